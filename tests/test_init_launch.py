"""Joining the ranks of a job, and starting them."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from ranks import RankGroup, run_ranks

import zero_c
from zero_c import _init

PACKAGE_ROOT = os.path.dirname(os.path.dirname(zero_c.__file__))


@pytest.fixture(autouse=True)
def closed():
    yield
    _init.close_default()


# ---- one process -------------------------------------------------------------


def test_alone():
    comm = zero_c.init()
    assert (comm.rank, comm.world_size, comm.local_rank) == (0, 1, 0)
    assert zero_c.init() is comm
    assert comm.all_reduce(np.array([3.0]), "mean").tolist() == [3.0]
    comm.close()
    comm.close()
    again = zero_c.init()
    assert again is not comm and not again.closed
    with pytest.raises(zero_c.Error, match="closed"):
        comm.barrier()
    with again as entered:
        assert entered is again
    assert again.closed
    with pytest.raises(zero_c.Error, match="closed"):
        again.__enter__()


LAUNCHED = [
    ({"ZERO_C_RANK": "1", "ZERO_C_WORLD_SIZE": "3"}, (1, 3, None, None)),
    ({"ZERO_C_RANK": "1", "ZERO_C_WORLD_SIZE": "3", "RANK": "0", "WORLD_SIZE": "2"}, (1, 3, None, None)),
    ({"ZERO_C_RANK": "2", "ZERO_C_WORLD_SIZE": "4", "ZERO_C_LOCAL_RANK": "0", "ZERO_C_LOCAL_WORLD_SIZE": "2"}, (2, 4, 0, True)),
    ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, (1, 2, 0, False)),
    ({"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}, (9, 16, 1, True)),
    ({"RANK": "1", "WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}, (1, 2, None, None)),
    ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "2"}, (2, 4, 2, None)),
    ({"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0",
      "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (2, 4, 0, True)),
    ({"PMI_RANK": "0", "PMI_SIZE": "2"}, (0, 2, None, None)),
    ({"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, (0, 2, None, False)),
    ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "1"}, (1, 2, 1, False)),
    ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_LOCALID": "0", "SLURM_NNODES": "2"}, (1, 2, 0, True)),
    ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_NNODES": "2", "SLURM_STEP_NUM_NODES": "1"},
     (1, 2, None, False)),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, (0, 1, None, None)),
    ({}, (0, 1, None, None)),
]


@pytest.mark.parametrize(("environ", "place"), LAUNCHED)
def test_launchers_are_understood(environ, place):
    found = _init._from_environment(environ)
    assert (found.rank, found.size, found.local_rank, found.several_hosts) == place


MPI = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}


@pytest.mark.parametrize(("backend", "address", "environ", "tcp"), [
    ("auto", None, {}, False), ("tcp", None, {}, True), ("auto", "host:1", {}, True), ("nccl", None, {}, False),
    ("auto", None, MPI, False), ("auto", None, {**MPI, "ZERO_C_ADDR": "host:1"}, True), ("shm", None, {**MPI, "ZERO_C_ADDR": "a:1"}, False),
    ("auto", None, {**MPI, "ZERO_C_ADDR": "host:1", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, False),
    ("nccl", None, {**MPI, "ZERO_C_ADDR": "host:1"}, True), ("auto", None, {"ZERO_C_ADDR": "host:1"}, False),
    ("auto", None, {**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, True), ("auto", "host:1", {**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, True),
    ("nccl", None, {**MPI, "MASTER_ADDR": "host", "MASTER_PORT": "1"}, False),
])
def test_shared_memory_where_all_ranks_are_on_one_host(backend, address, environ, tcp):
    assert _init._connects(backend, address, _init._from_environment(environ), environ) == tcp


WRONG = [
    ({"ZERO_C_RANK": "1"}, "ZERO_C_WORLD_SIZE is not"),
    ({"WORLD_SIZE": "1"}, "RANK is not"),
    ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'"),
    ({"RANK": "", "WORLD_SIZE": "2"}, "RANK is ''"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2; it must be an integer from 0 to 1"),
    ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK is -1"),
    ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE is 0"),
    ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "q"}, "LOCAL_RANK is 'q'"),
    ({"RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, "set ZERO_C_ADDR=host:port"),
    ({"RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "ZERO_C_ADDR": "host"}, "ZERO_C_ADDR is 'host'"),
    ({"RANK": "0", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "h", "MASTER_PORT": "x"}, "MASTER_PORT has port 'x'"),
    ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, "set ZERO_C_ADDR=host:port"),
    ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_NNODES": "2"}, "set ZERO_C_ADDR=host:port"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_PORT"),
]


@pytest.mark.parametrize(("environ", "message"), WRONG)
def test_wrong_environments_name_the_variable(environ, message, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        zero_c.init()


@pytest.mark.parametrize(("arguments", "error", "message"), [
    ({"rank": 0}, ValueError, "both or neither"),
    ({"world_size": 2}, ValueError, "both or neither"),
    ({"rank": 2, "world_size": 2, "job": "j"}, ValueError, "rank is 2"),
    ({"rank": 0.5, "world_size": 2, "job": "j"}, TypeError, "rank is 0.5"),
    ({"rank": True, "world_size": 2, "job": "j"}, TypeError, "rank is True"),
    ({"rank": 0, "world_size": 0}, ValueError, "world_size is 0"),
    ({"rank": 0, "world_size": 2}, ValueError, "job="),
    ({"backend": "gloo"}, ValueError, "'auto', 'shm', 'tcp', 'nccl'"),
    ({"address": "host:1", "backend": "shm"}, ValueError, "address is 'host:1'.*backend 'shm'"),
    ({"rank": 0, "world_size": 2, "job": "j", "address": "host"}, ValueError, "address is 'host'"),
    ({"rank": 0, "world_size": 2, "job": "j", "backend": "tcp"}, ValueError, "ZERO_C_ADDR"),
    ({"job": ""}, ValueError, "job"),
    ({"timeout": 0}, ValueError, "timeout is 0"),
    ({"timeout": float("nan")}, ValueError, "timeout"),
    ({"start_timeout": "1"}, TypeError, "start_timeout"),
])
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        zero_c.init(**arguments)


def test_jobs_are_told_apart():
    def key(environ, job=None):
        return _init._job_key(job, _init._from_environment(environ), environ)

    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}
    keys = [key(torchrun), key({**torchrun, "MASTER_PORT": "2"}), key({**torchrun, "TORCHELASTIC_RUN_ID": "a"}),
            key({**torchrun, "TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1"}),
            key({**torchrun, "ZERO_C_JOB": "x"}), key(torchrun, "y"), key(torchrun, "z" * 200), key(torchrun, "z" * 201),
            key({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0"}),
            key({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "5", "SLURM_STEP_ID": "1"})]
    assert len(set(keys)) == len(keys)
    assert all(len(key.encode()) <= _init.JOB_BYTES for key in keys)
    assert key({**torchrun, "RANK": "1"}) == keys[0]


def test_ranks_on_several_hosts_know_their_job_by_the_same_name():
    def key(environ, port):
        return _init._job_key(None, _init._from_environment(environ), environ, port)

    assert key({**MPI, "MASTER_PORT": "1"}, 7) == key(MPI, 7) == ":7"  # the parent is another one on each host
    assert "5" in key({**MPI, "PMIX_NAMESPACE": "5"}, 7) != key(MPI, 7)
    assert key({**MPI, "ZERO_C_JOB": "x"}, 7) == "x:7"


def test_shm_is_refused_on_several_hosts(monkeypatch):
    for name, value in {**MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="several hosts.*'shm'"):
        zero_c.init(backend="shm")


# ---- several ---------------------------------------------------------------


def collectives():
    comm = zero_c.init()
    rank, size = comm.rank, comm.world_size
    mean = comm.all_reduce(np.array([rank, 1.0], np.float32), op="mean")
    reduced = {op: comm.all_reduce(np.array([rank + 1, 2], np.int64), op).tolist() for op in ("sum", "max", "min", "prod")}
    halves = comm.all_reduce(np.full(3, rank, np.float16))
    rows = comm.reduce_scatter(np.arange(2 * size, dtype=np.float64).reshape(size, 2) * (rank + 1))
    gathered = comm.all_gather(np.array([[rank, -rank]], np.int32))
    word = comm.broadcast(np.array([rank], np.uint8), root=size - 1)
    pair = comm.split(rank % 2)
    nobody = comm.split(None)
    members = pair.all_gather(np.array([rank])).ravel().tolist()
    pair.close()
    errors = []
    for call in (lambda: comm.all_reduce(np.zeros(1, np.int32), "mean"), lambda: comm.all_reduce(np.zeros(1), "avg"),
                 lambda: comm.broadcast(np.zeros(1), root=size), lambda: comm.split(-1),
                 lambda: comm.reduce_scatter(np.zeros(size + 1)), lambda: comm.reduce_scatter(np.zeros(()))):
        try:
            call()
        except (TypeError, ValueError) as error:
            errors.append(type(error).__name__)
    comm.barrier()
    return {"mean": mean, "reduced": reduced, "halves": halves, "rows": rows, "gathered": gathered, "word": word,
            "members": members, "nobody": nobody, "errors": errors}


def check_collectives(of_ranks):
    n = len(of_ranks)
    for rank, got in enumerate(of_ranks):
        total = sum(range(1, n + 1))
        assert got["mean"].tolist() == [np.float32(sum(range(n))) / np.float32(n), 1]
        assert got["reduced"] == {"sum": [total, 2 * n], "max": [n, 2], "min": [1, 2], "prod": [int(np.prod(range(1, n + 1))), 2**n]}
        assert got["halves"].dtype == np.float16 and got["halves"].tolist() == [sum(range(n))] * 3
        assert got["rows"].tolist() == [[2 * rank * total, (2 * rank + 1) * total]]
        assert got["gathered"].tolist() == [[[peer, -peer]] for peer in range(n)]
        assert got["word"].tolist() == [n - 1]
        assert got["members"] == [peer for peer in range(n) if peer % 2 == rank % 2] and got["nobody"] is None
        wanted = ["TypeError", "ValueError", "ValueError", "ValueError", "ValueError", "TypeError"]
        assert got["errors"] == (wanted if n > 1 else wanted[:4] + wanted[5:])


@pytest.mark.parametrize("n", [1, 2, 3])
def test_collectives(n):
    check_collectives(run_ranks(n, collectives, deadline=60))


def again_and_again(times):
    seen = []
    for _ in range(times):
        with zero_c.init() as comm:
            seen.append(int(comm.all_reduce(np.array([comm.rank + 1]))[0]))
    return seen


def test_init_after_close():
    assert run_ranks(2, again_and_again, 20, deadline=60) == [[3] * 20] * 2


def explicit(job):
    rank = int(os.environ.pop("ZERO_C_RANK"))
    with zero_c.init(rank, 2, job=job, start_timeout=20) as comm:
        return int(comm.all_reduce(np.array([rank]))[0])


def test_explicit_rank_and_job():
    assert run_ranks(2, explicit, f"test {os.getpid()}", deadline=40) == [1, 1]


def lonely():
    if os.environ["ZERO_C_RANK"] == "0":
        try:
            zero_c.init(start_timeout=1)
        except zero_c.Timeout as error:
            return str(error)
    return None


def test_missing_rank_is_named():
    assert "1" in run_ranks(2, lonely, deadline=30)[0]


def interrupted():
    comm = zero_c.init()
    if comm.rank == 1:
        time.sleep(4)
        return None
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    try:
        comm.barrier()
    except KeyboardInterrupt:
        waited = time.monotonic() - began
        try:
            comm.barrier()
        except zero_c.CommError:
            return waited
    return "not interrupted"


def test_ctrl_c_in_a_wait():
    waited, _ = run_ranks(2, interrupted, deadline=30)
    assert 0.4 < waited < 2


def handler_calls_back():
    comm = zero_c.init()
    if comm.rank == 1:
        time.sleep(2)
        comm.barrier()
        return None
    said = []

    def handler(number, frame):
        try:
            comm.barrier()
        except zero_c.Error as error:
            said.append(str(error))

    signal.signal(signal.SIGUSR1, handler)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    comm.barrier()
    return said


def test_a_signal_handler_cannot_enter_the_wait_it_interrupts():
    said, _ = run_ranks(2, handler_calls_back, deadline=30)
    assert len(said) == 1 and "signal handler" in said[0]


def meets_the_dead():
    comm = zero_c.init()
    comm.barrier()
    began = time.monotonic()
    try:
        if comm.rank == 1:
            time.sleep(60)
        comm.barrier()
    except zero_c.CommError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return None


def test_killed_rank_is_noticed():
    with RankGroup(3) as group:
        group.start(meets_the_dead)
        time.sleep(2)
        group.kill(1)
        outcomes = group.wait(deadline=20)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        kind, text, waited = outcome.value
        assert kind == "PeerLost" and "rank 1" in text and waited < 10


def in_a_child():
    comm = zero_c.init()
    comm.barrier()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            comm.barrier()
            os.write(writing, b"no error")
        except zero_c.Error as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as text:
        said = text.read()
    comm.barrier()
    return said


def test_forked_child_is_refused():
    for said in run_ranks(2, in_a_child, deadline=30):
        assert "fork" in said


def test_threads_as_ranks():
    comms = zero_c.local_group(3)
    got = [None] * 3

    def work(rank):
        got[rank] = int(comms[rank].all_reduce(np.array([rank + 1]))[0])

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert got == [6, 6, 6]
    for comm in comms:
        comm.close()


# ---- the launcher --------------------------------------------------------------


def launch(tmp_path, script, *options, n=2, args=(), start=subprocess.run, **keywords):
    path = tmp_path / "script.py"
    path.write_text(script)
    environ = {**os.environ, "PYTHONPATH": PACKAGE_ROOT}
    if start is subprocess.run:
        keywords = {"capture_output": True, "text": True, "timeout": 60, **keywords}
    return start([sys.executable, "-m", "zero_c.launch", "-n", str(n), *options, str(path), *args], env=environ, cwd=tmp_path,
                 **keywords)


def test_launch_sets_the_environment(tmp_path):
    script = ("import os, sys, zero_c\n"
              "comm = zero_c.init()\n"
              "names = 'RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR'.split()\n"
              "os.write(1, repr((comm.rank, comm.world_size, [os.environ.get(n) for n in names],\n"
              "                  os.environ['OMP_NUM_THREADS'].isdigit(), sys.argv[1:])).encode() + b'\\n')\n"
              "comm.barrier()\n")
    done = launch(tmp_path, script, args=["-n", "7", "--flag"])
    assert done.returncode == 0, done.stderr
    wanted = [repr((rank, 2, [str(rank), "2", str(rank), "2", "127.0.0.1"], True, ["-n", "7", "--flag"])) for rank in (0, 1)]
    assert sorted(done.stdout.splitlines()) == wanted
    done = launch(tmp_path, script, "--no-torch-env")
    assert sorted(done.stdout.splitlines()) == [repr((rank, 2, [None] * 5, True, [])) for rank in (0, 1)]


def test_launch_of_a_module(tmp_path):
    (tmp_path / "module_of_ranks.py").write_text("import os\nos.write(1, os.environ['RANK'].encode())\n")
    done = subprocess.run([sys.executable, "-m", "zero_c.launch", "-n", "2", "-m", "module_of_ranks"], capture_output=True,
                          text=True, timeout=60, env={**os.environ, "PYTHONPATH": PACKAGE_ROOT}, cwd=tmp_path)
    assert done.returncode == 0 and sorted(done.stdout) == ["0", "1"]


@pytest.mark.parametrize(("action", "status"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137), ("raise ValueError", 1)])
def test_one_failing_rank_ends_all(tmp_path, action, status):
    script = f"import os, sys, time\nif os.environ['RANK'] == '1':\n    {action}\ntime.sleep(50)\n"
    began = time.monotonic()
    done = launch(tmp_path, script)
    assert done.returncode == status and "rank 1" in done.stderr and time.monotonic() - began < 20


def test_ranks_that_ignore_sigterm_are_killed(tmp_path):
    script = ("import os, signal, sys, time\n"
              "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
              "if os.environ['RANK'] == '0': time.sleep(1); sys.exit(3)\n"
              "time.sleep(50)\n")
    assert launch(tmp_path, script, "--timeout-grace", "0.5").returncode == 3


READY = "import os, signal, time\nopen(os.environ['RANK'], 'w').write(str(os.getpid()))\n"


def wait_for_ranks(tmp_path, n=2):
    end = time.monotonic() + 20
    while not all((tmp_path / str(rank)).exists() and (tmp_path / str(rank)).read_text() for rank in range(n)):
        assert time.monotonic() < end
        time.sleep(0.05)
    time.sleep(0.3)
    return [int((tmp_path / str(rank)).read_text()) for rank in range(n)]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_are_passed_on(tmp_path, number, status):
    process = launch(tmp_path, READY + "time.sleep(50)\n", start=subprocess.Popen, stderr=subprocess.PIPE)
    wait_for_ranks(tmp_path)
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == status


def test_ranks_may_take_a_signal_as_a_message(tmp_path):
    script = ("import os, signal, sys, time\n"
              "signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))\n" + READY + "time.sleep(50)\n")
    process = launch(tmp_path, script, start=subprocess.Popen)
    wait_for_ranks(tmp_path)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(30) == 0


def test_ranks_die_with_the_launcher(tmp_path):
    process = launch(tmp_path, READY + "time.sleep(50)\n", start=subprocess.Popen)
    pids = wait_for_ranks(tmp_path)
    process.kill()
    process.wait()
    end = time.monotonic() + 10
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.05)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("options", [
    ["-n", "0", "x.py"], ["x.py"], ["-n", "2"], ["-n", "2", "--timeout-grace", "-1", "x.py"], ["-n", "2", "--hosts", "0", "x.py"],
    ["-n", "2", "--hosts", "2", "--host-index", "2", "--address", "a:5", "x.py"], ["-n", "2", "--host-index", "1", "x.py"],
    ["-n", "2", "--hosts", "2", "x.py"], ["-n", "2", "--hosts", "2", "--address", "a", "x.py"],
    ["-n", "2", "--hosts", "2", "--address", "a:1", "x.py"], ["-n", "2", "--hosts", "2", "--address", "a:5", "x.py"]])
def test_wrong_launcher_arguments(options):
    done = subprocess.run([sys.executable, "-m", "zero_c.launch", *options], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": PACKAGE_ROOT})
    assert done.returncode == 2 and "usage" in done.stderr
