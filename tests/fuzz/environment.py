"""Environment variables: whoever started the ranks sets them, and zero_c._init and zero_c._address read them.

An input is a value for some of the variables, and init()'s own arguments.

    init() opens a communicator of one rank, waits for others, or raises ValueError, TypeError or one of zero_c's own errors,
    with a sentence that can be printed and names the variable; an address at which ranks would meet has a legal port
    no descriptor is left
"""

import os

import zero_c
from choices import Choices
from zero_c import _hosts, _init
from zero_c._address import Address

NAMES = ["ZERO_C_RANK", "ZERO_C_WORLD_SIZE", "ZERO_C_LOCAL_RANK", "ZERO_C_LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE", "LOCAL_RANK",
         "LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE",
         "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "PMIX_NAMESPACE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID",
         "SLURM_STEP_ID", "SLURM_JOB_ID", "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST",
         "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT", "ZERO_C_ADDR", "ZERO_C_JOB", "ZERO_C_TOKEN",
         "ZERO_C_HOST"]
VALUES = ["", "0", "1", "2", "3", "-1", "+1", " 1", "01", "1_0", "1.5", "x", "\u0661", "65535", "65536", "2147483647", "2147483648",
          "4294967296", "9223372036854775808", "1" * 30, "9" * 5000, "127.0.0.1", "127.0.0.1:1", "[::1]:29500", "[::1", "0.0.0.0:1",
          "a:65535", "a:65536", "a:\u0661", "host", "host.name", "node[07-12,20],login1", "node[", "a[1-2]b[3],c", "fe80::1%eth0", "\udcff",
          "\udcff:1", "a b", "x" * 90, "x" * 300, "\u00e9" * 50, "a\n:1", "node1\n", "1\n"]
GROUPS = [NAMES[0:4], NAMES[4:8], NAMES[8:12], NAMES[12:16], NAMES[17:20]]  # of one launcher: rank, size, local rank, ranks here
START_TIMEOUT_S = 0.001
ERRORS = (ValueError, TypeError, zero_c.Error)


class Met(Exception):
    """Ranks would meet at this address."""


def meet(rank, ranks, address, name, token, start_timeout_s):
    assert type(address) is Address and 1 <= address.port <= 65535 and address.host, str(address)
    _hosts.Job(rank, ranks, address, name, token, start_timeout_s)
    raise Met


def environ_of(choices):
    environ = {}
    if choices.below(4):  # one launcher's, right but for what follows
        rank, size, *local = choices.pick(GROUPS)
        environ |= {size: str(1 + choices.below(3)), rank: "0", "MASTER_PORT": "29500"}
        environ |= {name: str(choices.below(4)) for name in local}
        if rank == "SLURM_PROCID":
            environ["SLURM_STEP_ID"] = "0"
    for _ in range(choices.below(6)):
        value = choices.pick(VALUES) if choices.below(4) else choices.text().replace("\0", "")
        environ[choices.pick(NAMES)] = value
    return environ


def one_input(data):
    choices, kept, before = Choices(data), dict(os.environ), len(os.listdir("/proc/self/fd"))
    environ = environ_of(choices)
    arguments = {}
    if choices.below(4) == 0:
        arguments["backend"] = choices.pick(["shm", "tcp", "auto", "nccl", "x", "", None])
    if choices.below(4) == 0:
        arguments["address"] = choices.pick([*VALUES, None, 7, b"a:1"])
    if choices.below(8) == 0:
        arguments["job"] = choices.pick([*VALUES, None, 7])
    real, _hosts.meet = _hosts.meet, meet
    comm = None
    try:
        for name in NAMES:
            os.environ.pop(name, None)
        os.environ.update(environ)
        comm = zero_c.init(start_timeout=START_TIMEOUT_S, **arguments)
        assert (comm.rank, comm.world_size) == (0, 1), environ  # others would have waited for their peers
    except Met:
        pass
    except ERRORS as error:
        assert not isinstance(error, UnicodeError), repr(error)
        text = str(error)
        assert text and text.encode() and len(text) < 20000, text
        told = [name for name in environ if name in text]
        explained = any(word in text for word in ("ZERO_C", "launcher", "ranks on"))
        assert told or explained or arguments or isinstance(error, zero_c.Error), (environ, text)
    finally:
        if comm is not None:
            comm.close()
        _init.close_default()
        _hosts.meet = real
        os.environ.clear()
        os.environ.update(kept)
    assert len(os.listdir("/proc/self/fd")) == before, environ
