"""Train one model on N ranks with the memory of one (ZeRO).

    import zero_c
    from zero_c.torch import ShardedOptimizer      # for torch modules

`zero_c.init()` joins the ranks that torchrun, `python -m zero_c.launch`, mpirun or
srun started; `zero_c.ShardedOptimizer` shards the optimizer of arrays of any
library that speaks DLPack. Importing this package imports NumPy and nothing else.
"""

try:
    import zero_c._core
except ModuleNotFoundError as error:
    if error.name != "zero_c._core":
        raise
    raise ImportError(f"{__path__[0]} is zero_c's source and its C part was not built there; run `make venv` or `pip install "
                      f"-e .` in that repository, or start Python in another folder to use an installed zero_c") from None

from zero_c import _init
from zero_c._arrays import ShardedOptimizer
from zero_c._checkpoint import has_checkpoint
from zero_c._core import (
    CheckpointError,
    CommError,
    Communicator,
    Error,
    Mismatch,
    PeerLost,
    Timeout,
)
from zero_c._init import init, local_group
from zero_c._version import VERSION as __version__

__all__ = [
    "CheckpointError",
    "CommError",
    "Communicator",
    "Error",
    "Mismatch",
    "PeerLost",
    "ShardedOptimizer",
    "Timeout",
    "__version__",
    "has_checkpoint",
    "init",
    "local_group",
]
