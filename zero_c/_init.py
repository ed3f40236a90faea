"""init(): who am I and how many are we, from arguments or from whoever started the ranks.

Launchers are looked for in the order of LAUNCHERS; the first whose variables are
set tells rank and size, and with them the job's name, by which the ranks of one
job find each other on this host and are kept apart from those of others.
"""

import hashlib
import math
import numbers
import operator
import os

from zero_c._core import Communicator

BACKENDS = ("auto", "shm")
JOB_BYTES = 80  # longest name the core takes

_default = None


def init(rank=None, world_size=None, *, address=None, job=None, backend="auto", start_timeout=60.0, timeout=1800.0):
    """Joins the ranks of this job; collective. Returns a Communicator, also a context manager.

    rank, world_size  both, or neither: then from the variables of zero_c.launch, torchrun, mpirun or srun; one
                      rank where none is set
    job               name of the job on this host; by default the launcher's
    address           for ranks on several hosts, which no backend of this build can connect
    start_timeout     seconds for all ranks to come here
    timeout           seconds for a living rank to come to an operation; a dead one is noticed at once

    Without any argument, returns the communicator that is open already, if there is one.
    """
    global _default
    plain = (rank, world_size, address, job, backend, start_timeout, timeout) == (
        None, None, None, None, "auto", 60.0, 1800.0)
    if plain and _default is not None and not _default.closed:
        return _default
    if backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; legal are {', '.join(map(repr, BACKENDS))}")
    if address is not None:
        raise ValueError(f"address is {address!r}; it is for ranks on several hosts, and backend {backend!r} of this build "
                         f"connects ranks of one host: leave it out")
    start_timeout = _seconds("start_timeout", start_timeout)
    timeout = _seconds("timeout", timeout)
    place = _from_arguments(rank, world_size) if (rank, world_size) != (None, None) else _from_environment(os.environ)
    if job is not None and not (isinstance(job, str) and job):
        raise ValueError(f"job is {job!r}; it must be a string that is not empty")
    comm = Communicator(place.rank, place.size, _job_key(job, place, os.environ), os.environ.get("ZERO_C_TOKEN") or None,
                        place.local_rank, start_timeout, timeout)
    if _default is None or _default.closed:
        _default = comm
    return comm


def local_group(ranks, timeout=1800.0):
    """Communicators of `ranks` ranks that are threads of this process: one for each thread."""
    return Communicator.local(_integer("ranks", ranks, 1), _seconds("timeout", timeout))


def close_default():
    """Closes what init() opened last, if it is open."""
    global _default
    if _default is not None:
        _default.close()
        _default = None


# ---- who am I ------------------------------------------------------------


class Place:
    """A rank's place, and where it was read."""

    def __init__(self, rank, size, local_rank, job=None):
        self.rank, self.size, self.local_rank, self.job = rank, size, local_rank, job


def _torchrun_job(environ):
    run = environ.get("TORCHELASTIC_RUN_ID")
    return run and f"torchrun {run} {environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _slurm_job(environ):
    return f"slurm {environ.get('SLURM_JOB_ID', '')} {environ['SLURM_STEP_ID']}"


def _mpi_job(environ):
    # Without a namespace the ranks of one mpirun on this host still have one parent.
    return f"mpi {environ.get('PMIX_NAMESPACE') or os.getppid()}"


# Names of the variables for rank, size, local rank and ranks on this host (srun counts hosts instead); the job's name.
LAUNCHERS = (
    ("ZERO_C_RANK", "ZERO_C_WORLD_SIZE", "ZERO_C_LOCAL_RANK", "ZERO_C_LOCAL_WORLD_SIZE", lambda environ: None),
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", _torchrun_job),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", _mpi_job),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", _mpi_job),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "", _slurm_job),
)


def _from_environment(environ):
    for rank_name, size_name, local_rank_name, local_size_name, job in LAUNCHERS:
        if rank_name not in environ and size_name not in environ:
            continue
        if rank_name == "SLURM_PROCID" and "SLURM_STEP_ID" not in environ:
            continue  # a batch script, not a task that srun started
        for name in (rank_name, size_name):
            if name not in environ:
                other = size_name if name == rank_name else rank_name
                raise ValueError(f"{other} is set and {name} is not; set both or neither, or pass rank and world_size")
        size = _integer(size_name, environ[size_name], 1)
        rank = _integer(rank_name, environ[rank_name], 0, size)
        local_size = _integer(local_size_name, environ[local_size_name], 1) if local_size_name in environ else size
        if rank_name == "SLURM_PROCID" and _slurm_hosts(environ) > 1:
            raise ValueError(f"srun started this job on {_slurm_hosts(environ)} hosts; this build connects ranks of one host")
        if local_size < size:
            raise ValueError(f"{size_name} is {size} and {local_size_name} is {local_size}: the ranks are on several hosts, "
                             f"and this build connects ranks of one host")
        local_rank = _integer(local_rank_name, environ[local_rank_name], 0) if local_rank_name in environ else rank
        return Place(rank, size, local_rank, job(environ))
    return Place(0, 1, 0)


def _slurm_hosts(environ):
    name = "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in environ else "SLURM_NNODES"
    return _integer(name, environ.get(name, "1"), 1)


def _from_arguments(rank, world_size):
    if rank is None or world_size is None:
        raise ValueError(f"rank is {rank!r} and world_size is {world_size!r}; pass both or neither")
    size = _integer("world_size", world_size, 1)
    rank = _integer("rank", rank, 0, size)
    return Place(rank, size, rank)


def _job_key(job, place, environ):
    """What the ranks of this job have in common and no other job on this host has."""
    name = job or environ.get("ZERO_C_JOB") or place.job
    port = environ.get("MASTER_PORT")
    if place.size == 1:
        name = f"alone {os.getpid()}"
    elif not name and not port:
        raise ValueError("nothing tells this job from others on this host: pass job=, or set ZERO_C_JOB or MASTER_PORT to the "
                         "same value on all ranks, or start them with python -m zero_c.launch")
    key = f"{name or ''}:{port or ''}"
    if len(key.encode()) > JOB_BYTES:
        key = hashlib.sha256(key.encode()).hexdigest()
    return key


# ---- checks --------------------------------------------------------------


def _integer(name, value, low, end=None):
    """An int in [low, end), from an integer or the text of a variable."""
    wanted = f"an integer >= {low}" if end is None else f"an integer from {low} to {end - 1}"
    try:
        if isinstance(value, bool):
            raise TypeError
        number = int(value) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        kind = ValueError if isinstance(value, str) else TypeError
        raise kind(f"{name} is {value!r}; it must be {wanted}") from None
    if number < low or (end is not None and number >= end):
        raise ValueError(f"{name} is {number}; it must be {wanted}")
    return number


def _seconds(name, value):
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r}; it must be a number of seconds")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} is {value}; it must be finite and above 0")
    return float(value)
