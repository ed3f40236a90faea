"""Ranks for tests: fresh processes under a deadline, and nothing may be left of them.

A test names a function of an importable module in tests/; it runs on every rank
and what it returns comes back, one value per rank:

    from ranks import run_ranks, RankGroup

    def train(stage, start):                  # runs on each rank
        comm = zero_c.init()                  # finds rank and size in the environment
        ...
        return {"loss": loss, "weights": array}

    def test_train():
        first, second = run_ranks(2, train, 1, array, deadline=60)

    @pytest.fixture(scope="module")           # starting torch costs seconds: share the processes of a file
    def pair():
        with RankGroup(2) as group:
            yield group

    def test_more(pair):
        first, second = pair.run(train, 2, start=array, deadline=30)

Targets are functions at the top of a module, or "module:function".  Arguments and
results are JSON values, NumPy arrays and torch tensors, nested at will (tuples
come back as lists, tensors as arrays, bfloat16 as its bits in uint16); no pickle.

A rank that raises, dies or is late fails the call with RanksFailed, which shows
each rank's traceback and the tail of its stderr.  A group is restarted by the
next call after any failure.  `check=False` gives a list of Outcome instead:

    outcomes = run_ranks(3, target, check=False)     # .rank .value .error .error_type .exit_code .stderr

and a test that kills a rank takes the call apart:

    with RankGroup(3) as group:
        group.start(target)
        group.kill(1)                                # SIGKILL, or kill(1, signal.SIGSTOP)
        outcomes = group.wait(deadline=20)

Every rank is the leader of its own process group; when a group is closed, ranks
that live get to close the default communicator, and then there may be no process
of the group, no new memfd, socket or pidfd in a rank, no mapping of a memfd and no
zero_c entry in /dev/shm.  `leaks=False` drops the descriptor check, for functions
that leave torch.distributed open.

`env` adds variables, None removes one; a function of the rank is allowed.
"""

import contextlib
import ctypes
import gc
import importlib
import importlib.util
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import numpy

HERE = Path(__file__).resolve().parent

# How long the other ranks may still work once one of them has failed.
GRACE_AFTER_FAILURE_S = 15.0
# How long ranks may take to close what they hold.
CLOSE_DEADLINE_S = 30.0
# What of the caller's environment would tell a rank who it is.
RANK_VARIABLES = (
    "ZERO_C_RANK ZERO_C_WORLD_SIZE ZERO_C_LOCAL_RANK ZERO_C_LOCAL_WORLD_SIZE ZERO_C_JOB ZERO_C_TOKEN ZERO_C_ADDR ZERO_C_HOST "
    "ZERO_C_RESTART RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID TORCHELASTIC_RESTART_COUNT "
    "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_LOCAL_SIZE PMI_RANK PMI_SIZE "
    "MPI_LOCALRANKID MPI_LOCALNRANKS PMIX_NAMESPACE SLURM_PROCID SLURM_NTASKS SLURM_LOCALID SLURM_JOB_ID SLURM_STEP_ID "
    "SLURM_NNODES SLURM_STEP_NUM_NODES SLURM_STEP_NODELIST SLURM_JOB_NODELIST"
).split()


class RanksFailed(AssertionError):
    """A rank raised, died, was late or left something behind."""


@dataclass
class Outcome:
    rank: int
    value: object = None
    error: str | None = None  # traceback, or what became of the process
    error_type: str | None = None  # name of the exception class; "died", "late"
    exit_code: int | None = None  # of a process that has ended; -9: killed
    stderr: str = ""


def rank_groups(**how):
    """For a fixture: yields n -> the RankGroup of n ranks, started when first asked for, and closes them all."""
    started = {}
    yield lambda n: started.setdefault(n, RankGroup(n, **how))
    for group in started.values():
        group.close()


def run_ranks(n, target, *args, deadline=60, env=None, leaks=True, check=True, **kwargs):
    """Runs target(*args, **kwargs) on n fresh ranks; their values, in rank order."""
    with RankGroup(n, env=env, leaks=leaks) as group:
        return group.run(target, *args, deadline=deadline, check=check, **kwargs)


class RankGroup:
    """n rank processes that live from call to call; a context manager."""

    def __init__(self, n, *, env=None, leaks=True):
        self.n = n
        self._env = env
        self._leaks = leaks
        self._ranks = []
        self._spoiled = False
        self._calls = 0
        self._shm_before = _shm_entries()
        self._files = tempfile.TemporaryDirectory(prefix="zero_c_ranks_")

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        try:
            self.close()
        except RanksFailed:
            if kind is None:
                raise  # otherwise the test's own failure is the one to show

    def run(self, target, *args, deadline=60, check=True, **kwargs):
        self.start(target, *args, **kwargs)
        return self.wait(deadline, check=check)

    def start(self, target, *args, **kwargs):
        """Hands the call to all ranks, starting them where there are none."""
        if self._spoiled:
            self._kill_all()
        if not self._ranks:
            self._launch()
        name = target if isinstance(target, str) else f"{target.__module__}:{target.__qualname__}"
        self._calls += 1
        line = json.dumps({"target": name, "args": _encode(args, self._files.name, f"args{self._calls}"),
                           "kwargs": _encode(kwargs, self._files.name, f"kwargs{self._calls}")})
        for rank in self._ranks:
            rank.send(line)

    def kill(self, rank, number=signal.SIGKILL):
        os.kill(self._ranks[rank].process.pid, number)
        if number == signal.SIGKILL:
            self._spoiled = True

    def wait(self, deadline=60, *, check=False):
        """Ends the call of start(): a list of values (check) or of Outcome."""
        outcomes = self._collect(self._ranks, deadline)
        if any(outcome.error for outcome in outcomes):
            self._spoiled = True
            if check:
                raise RanksFailed(_describe(outcomes))
        return [outcome.value for outcome in outcomes] if check else outcomes

    def close(self):
        """Lets the ranks close what they hold and checks that nothing is left."""
        problems = []
        idle = [rank for rank in self._ranks if not rank.busy and rank.process.poll() is None]
        for rank in idle:
            rank.send(json.dumps({"target": None, "leaks": self._leaks}))
        outcomes = self._collect(idle, CLOSE_DEADLINE_S)
        if any(outcome.error for outcome in outcomes):
            problems.append("while closing: " + _describe(outcomes))
        problems += [f"rank {outcome.rank} left open: {outcome.value}" for outcome in outcomes if outcome.value]
        for rank in idle:
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.process.wait(CLOSE_DEADLINE_S)
            if left := processes_of_group(rank.process.pid):
                problems.append(f"rank {rank.rank} left processes: {left}")
        self._kill_all()
        self._files.cleanup()
        problems += [f"/dev/shm/{entry} was left" for entry in sorted(_shm_entries() - self._shm_before)]
        if problems:
            raise RanksFailed("\n".join(problems))

    def _launch(self):
        job, token, port = secrets.token_hex(8), secrets.token_hex(8), free_port()
        for rank in range(self.n):
            env = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
            env.update(
                ZERO_C_RANK=str(rank), ZERO_C_WORLD_SIZE=str(self.n), ZERO_C_LOCAL_RANK=str(rank), ZERO_C_JOB=job,
                ZERO_C_TOKEN=token, RANK=str(rank), WORLD_SIZE=str(self.n), LOCAL_RANK=str(rank),
                LOCAL_WORLD_SIZE=str(self.n), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
                PYTHONFAULTHANDLER="1", PYTHONPATH=python_path())
            for name, value in (self._env(rank) if callable(self._env) else self._env or {}).items():
                env.pop(name, None) if value is None else env.__setitem__(name, str(value))
            self._ranks.append(_Rank(rank, env, Path(self._files.name)))

    def _collect(self, ranks, deadline):
        """One Outcome for each of `ranks`, at the latest after `deadline` seconds."""
        end = time.monotonic() + deadline
        outcomes = {}
        while len(outcomes) < len(ranks):
            waiting = [rank for rank in ranks if rank.rank not in outcomes]
            left = end - time.monotonic()
            for rank in select.select(waiting, [], [], max(0.0, min(left, 0.5)))[0]:
                outcome = rank.receive()
                if outcome is not None:
                    outcomes[rank.rank] = outcome
                    if outcome.error:
                        end = min(end, time.monotonic() + GRACE_AFTER_FAILURE_S)
            if left <= 0:
                self._spoiled = True
                outcomes |= {rank.rank: rank.late(deadline) for rank in waiting if rank.rank not in outcomes}
        return [outcomes[rank.rank] for rank in ranks]

    def _kill_all(self):
        for rank in self._ranks:
            rank.kill()
        self._ranks = []
        self._spoiled = False


class _Rank:
    """One rank process and the two pipes to it."""

    def __init__(self, rank, env, files):
        self.rank = rank
        self._stderr_path = files / f"stderr_{rank}_{time.monotonic_ns()}"
        commands, self._commands = os.pipe()
        self._replies, replies = os.pipe()
        self._text = b""
        self.busy = False
        with open(self._stderr_path, "wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(commands), str(replies), str(files), str(rank)],
                env=env, pass_fds=(commands, replies), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                start_new_session=True)
        os.close(commands)
        os.close(replies)

    def fileno(self):
        return self._replies

    def send(self, line):
        self.busy = True
        with contextlib.suppress(BrokenPipeError):  # a dead rank shows when its answer is read
            os.write(self._commands, line.encode() + b"\n")

    def receive(self):
        """What can be read now: an Outcome, or None while the line is not whole."""
        part = os.read(self._replies, 1 << 16)
        self._text += part
        if not part:
            self.process.wait()
            code = self.process.returncode
            return Outcome(self.rank, error=f"the process ended with status {code}", error_type="died",
                           exit_code=code, stderr=self.stderr())
        if not self._text.endswith(b"\n"):
            return None
        reply, self._text = json.loads(self._text), b""
        self.busy = False
        outcome = Outcome(self.rank, _decode(reply["value"]), reply["error"], reply["error_type"])
        if outcome.error:
            outcome.stderr = self.stderr()
        return outcome

    def late(self, deadline):
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGABRT)  # faulthandler shows where the rank stands
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(2)
        return Outcome(self.rank, error=f"no answer after {deadline} s", error_type="late", stderr=self.stderr())

    def stderr(self):
        """The last lines of what the rank printed, stdout included."""
        return self._stderr_path.read_bytes()[-6000:].decode(errors="replace")

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self._commands)
        os.close(self._replies)


def free_port():
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def python_path():
    """PYTHONPATH for processes that import the package that this one imports, wherever that came from."""
    spec = importlib.util.find_spec("zero_c")
    package = [str(Path(next(iter(spec.submodule_search_locations))).parent)] if spec else []
    return os.pathsep.join(package + [entry for entry in [os.environ.get("PYTHONPATH")] if entry])


def processes_of_group(group):
    """Living processes of a process group (zombies have given everything back)."""
    left = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                stat = Path("/proc", entry, "stat").read_text()
                state, _, pgrp = stat.rsplit(")", 1)[1].split()[:3]
                if int(pgrp) == group and state not in "ZX":
                    left.append(int(entry))
    return left


def _describe(outcomes):
    text = []
    for outcome in outcomes:
        if outcome.error:
            text.append(f"rank {outcome.rank}: {outcome.error}")
            if outcome.stderr:
                text.append(f"  output of rank {outcome.rank} ends:\n{outcome.stderr}")
    return "\n".join(text)


def _shm_entries():
    return {entry for entry in os.listdir("/dev/shm") if "zero_c" in entry} if os.path.isdir("/dev/shm") else set()


def _encode(value, folder, prefix, count=None):
    """value with arrays written to .npy files of `folder` and named in their place."""
    count = count if count is not None else [0]
    if hasattr(value, "detach"):  # a torch tensor
        value = value.detach().cpu().contiguous()
        if str(value.dtype) == "torch.bfloat16":
            value = value.view(sys.modules["torch"].int16).numpy().view(numpy.uint16)
        else:
            value = value.numpy()
    if isinstance(value, numpy.generic):
        return value.item()
    if isinstance(value, numpy.ndarray):
        count[0] += 1
        path = os.path.join(folder, f"{prefix}_{count[0]}.npy")
        numpy.save(path, value, allow_pickle=False)
        return {"<npy>": path}
    if isinstance(value, dict):
        return {str(key): _encode(item, folder, prefix, count) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(item, folder, prefix, count) for item in value]
    return value


def _decode(value):
    if isinstance(value, dict):
        if "<npy>" in value:
            return numpy.load(value["<npy>"], allow_pickle=False)
        return {key: _decode(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_decode(item) for item in value]
    return value


# ---- inside a rank -------------------------------------------------------


def _held():
    """Descriptors and mappings a communicator could leave behind."""
    held = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            to = os.readlink(f"/proc/self/fd/{entry}")
            if to.startswith(("/memfd:", "socket:", "anon_inode:")):
                held.add(f"fd {entry} {to}")
    with open("/proc/self/maps") as maps:
        for line in maps:
            if "/memfd:" in line:
                held.add("mapping " + line.split(None, 1)[0])
    return held


def _serve(commands, replies, folder, rank):
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives the test process
    before, modules = _held(), 0
    for number, line in enumerate(os.fdopen(commands, "rb")):
        call = json.loads(line)
        reply = {"value": None, "error": None, "error_type": None}
        try:
            if call["target"] is None:
                reply["value"] = _finish(before if call["leaks"] else None)
            else:
                module, function = call["target"].split(":")
                target = importlib.import_module(module)
                for name in function.split("."):
                    target = getattr(target, name)
                value = target(*_decode(call["args"]), **_decode(call["kwargs"]))
                reply["value"] = _encode(value, folder, f"reply{number}_{rank}")
                target = value = None
        except BaseException as error:
            reply["error"] = traceback.format_exc()
            reply["error_type"] = type(error).__name__
        gc.collect()
        if len(sys.modules) != modules:
            gc.freeze()  # looking through what importing torch made takes a quarter of a second, after every call
            modules = len(sys.modules)
        sys.stdout.flush()
        os.write(replies, json.dumps(reply).encode() + b"\n")
        if call["target"] is None:
            break


def _finish(before):
    """Closes the default communicator; names what is still held."""
    gc.unfreeze()
    gc.collect()
    if "zero_c" in sys.modules:
        sys.modules["zero_c"]._init.close_default()
    return sorted(_held() - before) if before is not None else []


if __name__ == "__main__":
    sys.path[0] = str(HERE)
    _serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
