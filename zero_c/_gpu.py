"""GPUs: which part of the build knows them, and the communicator that keeps everything there.

Nothing here runs, and no CUDA library is loaded, before somebody brings an array
that lies on a GPU, or asks for the backend "nccl".
"""

import importlib.util
import weakref
from pathlib import Path

from zero_c import _core

CUDA = 2  # kDLCUDA
LEGACY_STREAM = 0

PLUGIN = Path(__file__).with_name("_cuda.so")

_on_gpu = weakref.WeakKeyDictionary()  # Communicator -> {(GPU, deterministic): the one for it}


def probe():
    """The number of GPUs that can be used, at least 1; or Error with what is missing and how to get it."""
    return _core.gpu_probe(str(PLUGIN))


def nccl_of_wheel():
    """Where the nvidia-nccl wheel has its library, or None. Imports nothing."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ModuleNotFoundError:
        return None
    for folder in spec.submodule_search_locations or () if spec else ():
        library = Path(folder, "lib", "libnccl.so.2")
        if library.exists():
            return str(library)
    return None


def communicator(comm, gpu, deterministic=None):
    """The same ranks, each on its GPU; collective the first time. One of GPUs is given back.

    deterministic  sums in rank order, at the cost of a little memory; by default while all ranks are on one host
    """
    if comm.gpu >= 0:
        if comm.gpu != gpu:
            raise ValueError(f"rank {comm.rank}: the arrays are on GPU {gpu}, the communicator's GPU is {comm.gpu}")
        if deterministic is not None and comm.world_size > 1 and deterministic != comm.deterministic:
            raise ValueError(f"deterministic={deterministic!r}, and the communicator of GPUs was made with "
                             f"{comm.deterministic}; leave it out, or pass the communicator that zero_c.init() gives")
        return comm
    if deterministic is None:
        deterministic = comm.local_world_size == comm.world_size
    made = _on_gpu.setdefault(comm, {})
    key = gpu, bool(deterministic)
    if key not in made or made[key].closed:
        probe()
        made[key] = comm.on_gpu(gpu, str(PLUGIN), nccl_of_wheel(), bool(deterministic))
    return made[key]


def device_of(array):
    """The GPU on which an array lies; None: in memory of the CPU, or whatever else as_array will refuse."""
    try:
        kind, index = array.__dlpack_device__()
    except (AttributeError, TypeError, ValueError):
        return None
    return index if kind == CUDA else None


def common_device(named):
    """The one GPU of all (name, array) pairs, or None for the CPU."""
    places = [(name, device_of(array)) for name, array in named]
    for name, place in places[1:]:
        if place != places[0][1]:
            where = ["the CPU" if at is None else f"GPU {at}" for at in (places[0][1], place)]
            raise ValueError(f"{places[0][0]} is on {where[0]} and {name} on {where[1]}; all parameters must be in one place")
    return places[0][1] if places else None
