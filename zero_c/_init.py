"""init(): who am I and how many are we, from arguments or from whoever started the ranks.

Launchers are looked for in the order of LAUNCHERS; the first whose variables are
set tells rank and size, and with them the job's name, by which the ranks of one
job find each other and are kept apart from those of others.
"""

import hashlib
import numbers
import operator
import os
import sys

from zero_c import _gpu, _hosts
from zero_c._address import find_address
from zero_c._core import Communicator

BACKENDS = ("auto", "shm", "tcp", "nccl")
JOB_BYTES = 80  # longest name the core takes
MOST = 2**31 - 1  # number of anything

_default = None


def init(rank=None, world_size=None, *, address=None, job=None, backend="auto", start_timeout=60.0, timeout=1800.0):
    """Joins the ranks of this job; collective. Returns a Communicator, also a context manager.

    rank, world_size  both, or neither: then from the variables of zero_c.launch, torchrun, mpirun or srun; one
                      rank where none is set
    address           "host:port" where rank 0 listens for ranks on other hosts, the same on all ranks; by default
                      ZERO_C_ADDR, or MASTER_ADDR at MASTER_PORT + 1, or under srun its first host
    job               name of the job; by default the launcher's
    backend           "shm": shared memory between ranks on one host; "tcp": connections to rank 0, for ranks on
                      several hosts, which train parameters on GPUs; "auto": "tcp" if an address is given or the ranks
                      are on several hosts, else "shm"; "nccl": as "auto", and then each rank's GPU `local_rank`
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
    start_timeout = _seconds("start_timeout", start_timeout)
    timeout = _seconds("timeout", timeout)
    place = _from_arguments(rank, world_size) if (rank, world_size) != (None, None) else _from_environment(os.environ)
    if job is not None and not (isinstance(job, str) and job):
        raise ValueError(f"job is {job!r}; it must be a string that is not empty")
    if _connects(backend, address, place, os.environ):
        comm = _over_tcp(place, address, job, start_timeout, timeout)
    else:
        comm = Communicator(place.rank, place.size, _job_key(job, place, os.environ), _token(),
                            -1 if place.local_rank is None else place.local_rank, start_timeout, timeout)
    if backend == "nccl":
        comm = _onto_gpu(comm)
    if _default is None or _default.closed:
        _default = comm
    return comm


def _connects(backend, address, place, environ):
    """Whether ranks are connected by TCP, rather than by shared memory."""
    if backend == "shm":
        if address is not None:
            raise ValueError(f"address is {address!r}; it is for ranks on several hosts, and backend 'shm' connects ranks of one "
                             f"host: leave one of the two out")
        if place.several_hosts:
            raise ValueError("the launcher started ranks on several hosts, and backend 'shm' connects ranks of one host; leave "
                             "it out")
        return False
    if backend == "tcp" or address is not None or place.several_hosts:
        return True
    return place.several_hosts is None and place.size > 1 and "ZERO_C_ADDR" in environ


def _over_tcp(place, address, job, start_timeout, timeout):
    hosts, sockets = [0], [None]
    if place.size > 1:
        address = find_address(address, os.environ)
        key = _job_key(job, place, os.environ, address.port)
        hosts, sockets = _hosts.meet(place.rank, place.size, address, key, _token(), start_timeout)
    local_rank = place.local_rank
    if local_rank is None:
        local_rank = hosts[:place.rank].count(hosts[place.rank])
    return Communicator.over_sockets(place.rank, place.size, hosts, [sock.detach() if sock else -1 for sock in sockets],
                                     local_rank, timeout)


def _onto_gpu(comm):
    """The same ranks on their GPUs; what fails on one rank fails on all."""
    with comm:
        return _gpu.communicator(comm, comm.local_rank)


def _token():
    token = os.environ.get("ZERO_C_TOKEN") or None
    if token is not None and not _is_utf8(os.fsencode(token)):
        raise ValueError("ZERO_C_TOKEN is no text in UTF-8; choose a token of letters and digits, the same on all ranks")
    return token


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
    """A rank's place. None is what nobody told: the number on its host, whether there are several, the job's name; and
    the name that the ranks of this host have in common.
    """

    def __init__(self, rank, size, local_rank=None, several_hosts=None, job=None, host_job=None):
        self.rank, self.size, self.local_rank, self.several_hosts = rank, size, local_rank, several_hosts
        self.job, self.host_job = job, host_job


def _torchrun_job(environ):
    run = environ.get("TORCHELASTIC_RUN_ID")
    return run and f"torchrun {run} {environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _slurm_job(environ):
    return f"slurm {environ.get('SLURM_JOB_ID', '')} {environ['SLURM_STEP_ID']}"


def _mpi_job(environ):
    space = environ.get("PMIX_NAMESPACE")
    return space and f"mpi {space}"


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
        local_rank = _integer(local_rank_name, environ[local_rank_name], 0) if local_rank_name in environ else None
        several = _slurm_hosts(environ) > 1 if rank_name == "SLURM_PROCID" else None
        if local_size_name in environ:
            several = _integer(local_size_name, environ[local_size_name], 1) < size
        # The ranks of one mpirun have one parent on each host, whatever else is not told.
        host_job = f"mpi {os.getppid()}" if job is _mpi_job else None
        return Place(rank, size, local_rank, several, job(environ), host_job)
    return Place(0, 1)


def _slurm_hosts(environ):
    name = "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in environ else "SLURM_NNODES"
    return _integer(name, environ.get(name, "1"), 1)


def _from_arguments(rank, world_size):
    if rank is None or world_size is None:
        raise ValueError(f"rank is {rank!r} and world_size is {world_size!r}; pass both or neither")
    size = _integer("world_size", world_size, 1)
    rank = _integer("rank", rank, 0, size)
    return Place(rank, size)


def _job_key(job, place, environ, port=None):
    """What the ranks of this job have in common and no other job has, on this host or, with a port, at the address of rank 0."""
    name = job or environ.get("ZERO_C_JOB") or place.job
    if port is None:
        name, port = name or place.host_job, environ.get("MASTER_PORT")
    if place.size == 1:
        name = f"alone {os.getpid()}"
    elif not name and not port:
        raise ValueError("nothing tells this job from others on this host: pass job=, or set ZERO_C_JOB or MASTER_PORT to the "
                         "same value on all ranks, or start them with python -m zero_c.launch")
    key = f"{name or ''}:{port or ''}"
    data = os.fsencode(key)  # variables may hold any bytes
    if len(data) > JOB_BYTES or not _is_utf8(data):
        key = hashlib.sha256(data).hexdigest()
    return key


def _is_utf8(data):
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


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
    if number > MOST:
        raise ValueError(f"{name} is {number}; it must be {MOST} or less")
    return number


def _seconds(name, value):
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r}; it must be a number of seconds")
    if not 0 < value <= sys.float_info.max:
        raise ValueError(f"{name} is {value}; it must be finite and above 0")
    return float(value)
