from zero_c import _init as _init
from zero_c._arrays import ShardedOptimizer as ShardedOptimizer
from zero_c._checkpoint import has_checkpoint as has_checkpoint
from zero_c._core import CheckpointError as CheckpointError
from zero_c._core import CommError as CommError
from zero_c._core import Communicator as Communicator
from zero_c._core import Error as Error
from zero_c._core import Mismatch as Mismatch
from zero_c._core import PeerLost as PeerLost
from zero_c._core import Timeout as Timeout
from zero_c._init import init as init
from zero_c._init import local_group as local_group

__version__: str
__all__: list[str]
