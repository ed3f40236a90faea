"""Ranks on several hosts, from init() on. Hosts are names here: all processes are on this one, over its loopback."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from ranks import RANK_VARIABLES, RankGroup, free_port, run_ranks
from test_init_launch import PACKAGE_ROOT, again_and_again, check_collectives, collectives, interrupted

import zero_c
from zero_c import _gpu
from zero_c._core import Communicator


def on_hosts(names, **more):
    """For the `env` of a group: rank r is on host names[r], and no launcher tells which of its ranks it is."""
    address = f"127.0.0.1:{free_port()}"
    return lambda rank: {"ZERO_C_LOCAL_RANK": None, "ZERO_C_ADDR": address, "ZERO_C_HOST": names[rank], **more}


def who():
    comm = zero_c.init()
    return comm.backend, comm.rank, comm.world_size, comm.local_rank, comm.local_world_size


@pytest.mark.parametrize(("names", "local"), [
    ("ab", [(0, 1), (0, 1)]), ("aa", [(0, 2), (1, 2)]), ("abc", [(0, 1)] * 3), ("aba", [(0, 2), (0, 1), (1, 2)]),
    ("aab", [(0, 2), (1, 2), (0, 1)]), ("aaa", [(0, 3), (1, 3), (2, 3)]),
])
def test_every_rank_knows_its_place(names, local):
    n = len(names)
    assert run_ranks(n, who, env=on_hosts(names), deadline=30) == [["tcp", rank, n, *here] for rank, here in enumerate(local)]


def test_which_gpu_is_whose_is_the_launchers_business():
    found = run_ranks(2, who, env=on_hosts("ab", ZERO_C_LOCAL_RANK="5"), deadline=30)
    assert [of_rank[3] for of_rank in found] == [5, 5]


@pytest.mark.parametrize("names", ["ab", "aa", "abc", "aba"])
def test_collectives(names):
    check_collectives(run_ranks(len(names), collectives, env=on_hosts(names), deadline=60))


def by_argument(backend):
    with zero_c.init(backend=backend) as comm:
        return comm.backend, int(comm.all_reduce(np.array([comm.rank + 1]))[0])


@pytest.mark.parametrize("n", [1, 2])
def test_tcp_on_one_host_with_the_launchers_address(n):
    total = n * (n + 1) // 2
    assert run_ranks(n, by_argument, "tcp", deadline=30) == [["tcp", total]] * n
    assert run_ranks(n, by_argument, "auto", deadline=30) == [["shared memory", total]] * n


def test_init_after_close():
    assert run_ranks(2, again_and_again, 10, env=on_hosts("ab"), deadline=60) == [[3] * 10] * 2


def wait_until(condition, seconds=20):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)


def threads_left():
    before = len(os.listdir("/proc/self/task"))
    comm = zero_c.init()
    comm.barrier()
    comm.split(0).close()
    comm.close()
    wait_until(lambda: len(os.listdir("/proc/self/task")) == before, 5)
    return len(os.listdir("/proc/self/task")) - before


def test_no_thread_is_left():
    assert run_ranks(3, threads_left, env=on_hosts("aba"), deadline=30) == [0] * 3


@pytest.mark.parametrize("wrong", [{"hosts": [0]}, {"hosts": [0, -1]}, {"hosts": [0, "a"]}, {"hosts": 5}, {"timeout": -1}])
def test_sockets_belong_to_who_refuses_them(wrong):
    given, other = socket.socketpair()
    with other:
        with pytest.raises((ValueError, TypeError)):
            Communicator.over_sockets(1, 2, sockets=[given.detach()], local_rank=0, **{"hosts": [0, 1], **wrong})
        other.settimeout(5)
        assert other.recv(1) == b""


# ---- what goes wrong -----------------------------------------------------------------


def starts(seconds):
    began = time.monotonic()
    try:
        zero_c.init(start_timeout=seconds).close()
    except zero_c.CommError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return None


def test_a_wrong_token_is_refused_and_the_missing_rank_named():
    env = on_hosts("abc")
    found = run_ranks(3, starts, 3, deadline=30, env=lambda rank: {**env(rank), **({"ZERO_C_TOKEN": "x"} if rank == 2 else {})})
    assert found[2][0] == "CommError" and "ZERO_C_TOKEN" in found[2][1] and found[2][2] < 2.5
    for kind, text, _ in found[:2]:
        assert kind == "Timeout" and "missing: 2" in text and "ZERO_C_TOKEN" in text


def interrupted_start():
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    began = time.monotonic()
    try:
        zero_c.init()
    except KeyboardInterrupt:
        return time.monotonic() - began
    return None


def test_ctrl_c_while_ranks_are_missing():
    env = on_hosts("abc", ZERO_C_WORLD_SIZE="3")
    assert all(waited < 3 for waited in run_ranks(2, interrupted_start, env=env, deadline=30))


def test_ctrl_c_in_a_wait():
    waited, _ = run_ranks(2, interrupted, env=on_hosts("ab"), deadline=30)
    assert 0.4 < waited < 2


def waits_for_the_dead(killed, ready):
    comm = zero_c.init()
    comm.barrier()
    try:
        if comm.rank == killed:
            Path(ready).touch()
            time.sleep(60)
        comm.barrier()
    except zero_c.CommError as error:
        return type(error).__name__, str(error), time.monotonic()
    return None


@pytest.mark.parametrize("killed", [1, 0])
def test_a_killed_rank_is_noticed_within_a_second(killed, tmp_path):
    ready = tmp_path / "ready"
    with RankGroup(3, env=on_hosts("abb")) as group:
        group.start(waits_for_the_dead, killed, str(ready))
        wait_until(ready.exists)
        time.sleep(0.3)
        at = time.monotonic()
        group.kill(killed)
        outcomes = group.wait(deadline=20)
    assert outcomes[killed].exit_code == -signal.SIGKILL
    for outcome in outcomes:
        if outcome.rank != killed:
            kind, text, noticed = outcome.value
            assert kind == "PeerLost" and f"rank {killed}" in text and noticed - at < 1


def on_the_cpu():
    comm = zero_c.init()
    said = []
    for attempt in (lambda: zero_c.ShardedOptimizer([np.zeros(3, np.float32)], "sgd", lr=1.0, comm=comm),
                    lambda: zero_c.ShardedOptimizer([np.zeros(3, np.float32)], "adamw", lr=1.0, comm=comm, stage=1)):
        try:
            attempt()
        except ValueError as error:
            said.append(str(error))
    comm.barrier()
    return said


def test_parameters_on_cpus_are_refused_on_all_ranks():
    for said in run_ranks(2, on_the_cpu, env=on_hosts("ab"), deadline=30):
        assert len(said) == 2 and all("GPU" in sentence for sentence in said), said


def onto_gpus(plugin):
    _gpu.PLUGIN = type(_gpu.PLUGIN)(plugin)
    began = time.monotonic()
    try:
        zero_c.init(backend="nccl")
    except zero_c.Error as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return None


@pytest.mark.parametrize("env", [on_hosts("ab"), None])
def test_nccl_without_the_cuda_part(env, tmp_path):
    for kind, text, seconds in run_ranks(2, onto_gpus, str(tmp_path / "_cuda.so"), env=env, deadline=30):
        assert kind == "Error" and "ZERO_C_CUDA=1" in text and seconds < 5


# ---- launchers -------------------------------------------------------------------------

SCRIPT = """
import os, sys, numpy, zero_c
comm = zero_c.init()
total = comm.all_reduce(numpy.array([comm.rank + 1]))[0]
names = 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT'.split()
os.write(1, repr((comm.backend, comm.rank, comm.local_rank, comm.local_world_size, int(total),
                  [os.environ.get(name) for name in names])).encode() + b'\\n')
comm.barrier()
sys.exit(int(sys.argv[1]) if comm.rank == 3 else 0)
"""


@pytest.fixture
def on_two_hosts(tmp_path):
    """Starts one command on each of two hosts: status, output and errors of each."""
    (tmp_path / "script.py").write_text(SCRIPT)
    clean = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}

    def start(command_of, **env):
        started = [subprocess.Popen(command_of(host), cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                    env={**clean, "PYTHONPATH": PACKAGE_ROOT, "ZERO_C_HOST": f"host {host}", **env})
                   for host in range(2)]
        done = []
        for process in started:
            output, errors = process.communicate(timeout=60)
            done.append((process.returncode, sorted(output.splitlines()), errors))
        return done

    return start


@pytest.mark.parametrize("status", [0, 7])
def test_launch_on_two_hosts(on_two_hosts, status):
    port = free_port()

    def command(host):
        return [sys.executable, "-m", "zero_c.launch", "-n", "2", "--hosts", "2", "--host-index", str(host),
                "--address", f"127.0.0.1:{port}", "script.py", str(status)]

    for host, (returned, output, errors) in enumerate(on_two_hosts(command, ZERO_C_TOKEN="secret")):
        first = 2 * host
        wanted = [repr(("tcp", first + local, local, 2, 10, [str(first + local), "4", str(local), "2", "127.0.0.1", str(port - 1)]))
                  for local in range(2)]
        assert output == wanted, errors
        assert returned == (status if host == 1 else 0)
        assert ("rank 3 ended with status 7" in errors) == (returned == 7)


def test_hosts_with_different_numbers_of_ranks(on_two_hosts, tmp_path):
    (tmp_path / "meet.py").write_text("import zero_c\nzero_c.init(start_timeout=4)\n")
    port = free_port()

    def command(host):
        return [sys.executable, "-m", "zero_c.launch", "-n", str(1 + host), "--hosts", "2", "--host-index", str(host),
                "--address", f"127.0.0.1:{port}", "meet.py"]

    for returned, _, errors in on_two_hosts(command, ZERO_C_TOKEN="secret"):
        assert returned == 1 and "the world size must be the same" in errors


def test_launch_demands_a_token(on_two_hosts):
    def command(host):
        return [sys.executable, "-m", "zero_c.launch", "-n", "1", "--hosts", "2", "--host-index", str(host), "--address",
                "127.0.0.1:5", "script.py"]

    for returned, _, errors in on_two_hosts(command):
        assert returned == 2 and "ZERO_C_TOKEN" in errors and "secrets.token_hex" in errors


def torchrun_like(backend):
    comm = zero_c.init(backend=backend)
    return comm.backend, comm.rank, comm.local_rank, comm.local_world_size, int(comm.all_reduce(np.array([comm.rank]))[0])


def test_torchrun_on_two_hosts():
    def env(rank):
        return {name: None for name in RANK_VARIABLES if name.startswith("ZERO_C")} | {
            "LOCAL_RANK": rank % 2, "LOCAL_WORLD_SIZE": 2, "TORCHELASTIC_RUN_ID": "run", "ZERO_C_HOST": rank // 2}

    found = run_ranks(4, torchrun_like, "auto", env=env, deadline=60)
    assert found == [["tcp", rank, rank % 2, 2, 6] for rank in range(4)]


def test_srun_on_two_hosts():
    job = {"SLURM_JOB_ID": os.getpid(), "SLURM_STEP_ID": "0", "SLURM_NNODES": "2", "SLURM_STEP_NODELIST": "localhost,other",
           "SLURM_NTASKS": "2", "SLURM_LOCALID": "0"}

    def env(rank):
        return {name: None for name in RANK_VARIABLES} | job | {"SLURM_PROCID": rank, "ZERO_C_HOST": rank}

    assert run_ranks(2, torchrun_like, "auto", env=env, deadline=30) == [["tcp", rank, 0, 1, 1] for rank in range(2)]
