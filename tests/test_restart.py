"""Starting again: the launcher's --max-restarts, and training that ends as if nobody had killed its ranks.

Ranks are killed from outside, by SIGKILL, at moments that a seed chooses: while they start, between two losses, or
while a save is under way.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest

import zero_c
import zero_c.launch
from ranks import processes_of_group, python_path
from test_docs import FENCE, ROOT
from test_examples import EXAMPLES, ORDER_TOLERANCE
from test_init_launch import PACKAGE_ROOT, READY, alive, launch, wait_for_ranks

# ---- the launcher ------------------------------------------------------------------------

# Each rank tells its attempt, and what no two attempts may have in common. In the first attempts, as many as the argument
# says, rank 1 fails when rank 0 has told: with status 10, then by SIGKILL, then with status 12.
ATTEMPTS = """\
import os, signal, sys, time
names = "ZERO_C_RESTART TORCHELASTIC_RESTART_COUNT ZERO_C_JOB ZERO_C_TOKEN MASTER_PORT".split()
os.write(1, (" ".join(os.environ.get(name, "-").replace(" ", "_") for name in names) + "\\n").encode())
attempt, told = int(os.environ["ZERO_C_RESTART"]), "told" + os.environ["ZERO_C_RESTART"]
if os.environ["ZERO_C_RANK"] == "0":
    open(told, "w").close()
if attempt < int(sys.argv[1]):
    while os.environ["ZERO_C_RANK"] == "0" or not os.path.exists(told):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL) if attempt == 1 else sys.exit(10 + attempt)
"""


def test_ranks_start_again(tmp_path):
    done = launch(tmp_path, ATTEMPTS, "--max-restarts", "3", args=["2"])
    assert done.returncode == 0
    assert done.stderr.splitlines() == ["zero_c.launch: rank 1 ended with status 10; ending the others, then restart 1 of 3",
                                        "zero_c.launch: rank 1 ended with status 137; ending the others, then restart 2 of 3"]
    told = {tuple(line.split()) for line in done.stdout.splitlines()}
    assert len(done.stdout.splitlines()) == 6 and len(told) == 3, "the ranks of an attempt have the same"
    counts, torch_counts, jobs, tokens, _ = zip(*told, strict=True)
    assert set(counts) == {"0", "1", "2"} and torch_counts == counts
    assert len(set(jobs)) == len(set(tokens)) == 3


def test_the_last_failure_counts(tmp_path):
    done = launch(tmp_path, ATTEMPTS, "--max-restarts", "2", "--no-torch-env", args=["9"])
    assert done.returncode == 12
    assert [line.rpartition("; ")[2] for line in done.stderr.splitlines()] == [
        "ending the others, then restart 1 of 2", "ending the others, then restart 2 of 2", "ending the others"]
    assert {line.split()[1] for line in done.stdout.splitlines()} == {"-"}


def test_a_line_is_written_in_one_piece(monkeypatch, tmp_path):
    """No words of a rank come between, also where Python is unbuffered."""
    packets, end = os.pipe2(os.O_DIRECT)  # a read gives what one write wrote
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    with open(end, "wb") as writer:
        launch(tmp_path, ATTEMPTS, "--max-restarts", "1", args=["1"], capture_output=False, stderr=writer)
    with open(packets, "rb", buffering=0) as reader:
        assert re.fullmatch(rb"zero_c.launch: .*then restart 1 of 1\n", reader.read(4096))
        assert reader.read(4096) == b""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_launcher_is_no_failure(tmp_path, number):
    process = launch(tmp_path, READY + "time.sleep(50)\n", "--max-restarts", "5", start=subprocess.Popen, stderr=subprocess.PIPE,
                     text=True)
    pids = wait_for_ranks(tmp_path)
    process.send_signal(number)
    stderr = process.communicate(timeout=30)[1]
    assert process.returncode == 128 + number and "restart" not in stderr
    assert not any(map(alive, pids))


# Rank 1 fails when rank 0 is ready, which then ends when the test lets it. The second attempt has nothing to do.
SLOW_END = """\
import os, signal, sys, time
if os.environ["ZERO_C_RESTART"] == "1":
    sys.exit(0)
if os.environ["ZERO_C_RANK"] == "0":
    def end(*_):
        open("ending", "w").close()
        while not os.path.exists("end"):
            time.sleep(0.01)
        os._exit(0)
    signal.signal(signal.SIGTERM, end)
    open("ready", "w").close()
    time.sleep(50)
while not os.path.exists("ready"):
    time.sleep(0.01)
sys.exit(5)
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 5), (signal.SIGUSR1, 0)])
def test_a_signal_while_ranks_are_ended(tmp_path, number, status):
    """One that asks for the end is obeyed; another goes with the ranks it was for, as new ones may not expect it."""
    process = launch(tmp_path, SLOW_END, "--max-restarts", "1", start=subprocess.Popen, stderr=subprocess.PIPE, text=True)
    wait_until((tmp_path / "ending").exists)
    process.send_signal(number)
    (tmp_path / "end").touch()
    stderr = process.communicate(timeout=30)[1]
    assert process.returncode == status, stderr
    assert ("SIGTERM came; no restart" in stderr) == (number == signal.SIGTERM)


# In the first attempt each rank leaves two processes of another session; the second tells in which states it finds them.
LEAVES = r"""
import glob, os, subprocess, sys
if os.environ["ZERO_C_RESTART"] == "0":
    code = r"import os, time; os.fork(); os.write(1, b'%d\n' % os.getpid()); time.sleep(50)"
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE, text=True)
    found = [child.stdout.readline() for _ in range(2)]
    with open("pids" + os.environ["RANK"], "w") as pids:
        pids.writelines(found)
    sys.exit(3)
pids = [line.strip() for name in glob.glob("pids*") for line in open(name)]
states = [open(f"/proc/{pid}/stat").read().rsplit(")")[1].split()[0] for pid in pids if os.path.exists(f"/proc/{pid}")]
os.write(1, repr((len(pids) >= 2, states)).encode() + b"\n")
"""


def test_nothing_of_an_attempt_meets_the_next(tmp_path):
    """What ranks had started, in whatever session, is gone when they start again; what ran before is not touched."""
    (tmp_path / "script.py").write_text(LEAVES)
    # The shell's child is the launcher's, as the shell becomes it.
    shell = 'sleep 30 >/dev/null & echo $!; exec "$0" -m zero_c.launch -n 2 --max-restarts 1 script.py'
    done = subprocess.run(["bash", "-c", shell, sys.executable], cwd=tmp_path, text=True, timeout=60, stdout=subprocess.PIPE,
                          env={**os.environ, "PYTHONPATH": PACKAGE_ROOT})
    sleeper, *told = done.stdout.splitlines()
    was_there = alive(int(sleeper))
    os.kill(int(sleeper), signal.SIGKILL)
    assert done.returncode == 0 and told == ["(True, [])"] * 2 and was_there


def test_a_rank_that_cannot_start_again_is_an_error(tmp_path):
    (tmp_path / "python").symlink_to(sys.executable)
    (tmp_path / "script.py").write_text(f"import os\nos.unlink({str(tmp_path / 'python')!r})\nexit(3)\n")
    packages = [PACKAGE_ROOT, str(Path(numpy.__file__).parents[1])]  # the link knows no virtual environment
    done = subprocess.run([tmp_path / "python", "-m", "zero_c.launch", "-n", "1", "--max-restarts", "2", tmp_path / "script.py"],
                          capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": os.pathsep.join(packages)})
    assert done.returncode == 1
    assert re.search(r"rank 0 ended with status 3;.*\nzero_c.launch: rank 0 cannot be started: .*No such file", done.stderr)


@pytest.mark.parametrize(("options", "words"), [
    (["--max-restarts", "-1"], "--max-restarts is -1"),
    (["--max-restarts", "1", "--hosts", "2", "--address", "10.0.0.1:5"], "torchrun --nnodes")])
def test_wrong_restarts(monkeypatch, capsys, options, words):
    monkeypatch.setenv("ZERO_C_TOKEN", "secret")
    with pytest.raises(SystemExit):
        zero_c.launch.parse(["-n", "2", *options, "x.py"])
    assert words in capsys.readouterr().err


def test_whether_there_is_a_checkpoint(tmp_path):
    assert not zero_c.has_checkpoint(tmp_path / "none")
    assert not zero_c.has_checkpoint(tmp_path)
    (tmp_path / "file").touch()
    assert not zero_c.has_checkpoint(tmp_path / "file")
    with zero_c.init() as comm:
        zero_c.ShardedOptimizer([numpy.zeros(3, "f4")], comm=comm).save(tmp_path / "some")
    assert zero_c.has_checkpoint(str(tmp_path / "some"))


# ---- training that is killed --------------------------------------------------------------

STEPS_BETWEEN_KILLS = 6  # at most, besides those that pass while the test looks
LOOKS = 20  # at most, for a save
FILES = 4  # of a checkpoint


def wait_until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def is_saving(folder):
    """Whether a save is under way, or was cut short: there are weights besides those of the checkpoint."""
    weights = [path.name for path in folder.glob("weights-*")] if folder.exists() else []
    return len(weights) > zero_c.has_checkpoint(folder)


def ranks_of(launcher, attempt):
    """rank -> pid of the ranks of an attempt that live."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rsplit(")", 1)[1].split()[1]) == launcher.pid:
                environ = dict(entry.partition(b"=")[::2] for entry in stat.with_name("environ").read_bytes().split(b"\0"))
                if int(environ[b"ZERO_C_RESTART"]) == attempt:
                    found[int(environ[b"ZERO_C_RANK"])] = int(stat.parent.name)
        except (OSError, KeyError):  # it has ended, or has not yet become a rank
            continue
    return found


class Training:
    """A program under the launcher that prints "start ... step I" and "step I  loss X" and saves to `folder`; its ranks can be killed."""

    def __init__(self, program, folder, ranks, restarts, dice):
        self.folder, self.ranks, self.dice = folder, ranks, dice
        self._out = folder.with_suffix(f".{time.monotonic_ns()}.txt")
        self._errors = self._out.with_suffix(".errors")
        with open(self._out, "wb") as out, open(self._errors, "wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "zero_c.launch", "-n", str(ranks), "--max-restarts", str(restarts), *map(str, program)],
                stdout=out, stderr=errors, cwd=folder.parent, start_new_session=True,
                env={**os.environ, "PYTHONPATH": python_path()})

    def text(self):
        return self._out.read_text()

    def errors(self):
        return self._errors.read_text()

    def starts(self):
        """From which steps attempts went on; one that was killed at start-up tells nothing."""
        return [int(step) for step in re.findall(r"^start .*step (\d+)$", self.text(), re.M)]

    def kill_one(self, attempt, moment):
        """Kills a rank of an attempt at a moment; whether a save was under way then."""
        victim = self.dice.randrange(self.ranks)
        where = {}

        def have_started():
            assert self.process.poll() is None, self.errors()
            where.update(ranks_of(self.process, attempt))
            return len(where) == self.ranks

        wait_until(have_started)
        losses = self.text().count("loss")  # of the attempts before, or few more
        if moment == "start":
            return self.kill(where[victim], 1, 0.5)
        steps = self.dice.randint(1, STEPS_BETWEEN_KILLS)
        wait_until(lambda: self.text().count("loss") >= losses + steps)
        return self.kill(where[victim], LOOKS if moment == "save" else 1, 0.003)

    def kill(self, pid, looks, most_s):
        """After a while of at most most_s each time: in a save, or at the last of the looks; whether it was in a save."""
        while True:
            time.sleep(self.dice.uniform(0, most_s))
            os.kill(pid, signal.SIGSTOP)  # where it is now, it stays; a save lasts less than a look at the folder
            saving, looks = is_saving(self.folder), looks - 1
            if saving or not looks:
                os.kill(pid, signal.SIGKILL)
                return saving
            os.kill(pid, signal.SIGCONT)

    def end(self):
        """Status and losses by step, all that were printed; nothing may be left."""
        status = self.process.wait(240)
        assert processes_of_group(self.process.pid) == []
        losses = {}
        for step, loss in re.findall(r"^step (\d+)  loss (\S+)$", self.text(), re.M):
            losses.setdefault(int(step), set()).add(loss)
        return status, losses


def uninterrupted(program, folder, ranks):
    status, losses = Training(program, folder, ranks, 0, dice=None).end()
    assert status == 0 and all(len(values) == 1 for values in losses.values())
    return losses


def moments(kills):
    """One of five at start-up, one in steps, the others in saves."""
    return [("save", "start", "save", "step", "save")[number % 5] for number in range(kills)]


def killed_and_restarted(program, tmp_path, ranks, kills, steps, seed):
    """Every loss that any attempt printed has the bits of the run that nobody killed; returns how many kills hit a save."""
    wanted = uninterrupted(program(tmp_path / "whole"), tmp_path / "whole", ranks)
    folder, dice = tmp_path / "killed", random.Random(seed)
    training = Training(program(folder), folder, ranks, kills, dice)
    hit = sum(training.kill_one(attempt, moment) for attempt, moment in enumerate(moments(kills)))
    status, losses = training.end()
    assert status == 0, training.errors()
    assert re.findall(rf"restart (\d+) of {kills}\n", training.errors()) == [str(kill + 1) for kill in range(kills)], training.errors()
    assert losses == wanted and len(losses) == steps
    assert 0 < training.starts()[-1] < steps and training.starts() == sorted(training.starts())
    assert len(os.listdir(folder)) == FILES
    return hit


def example(steps):
    return lambda folder: [EXAMPLES / "restart.py", "--folder", folder, "--steps", steps, "--save-every", 2]


def test_killed_ranks_change_no_bit(tmp_path):
    assert killed_and_restarted(example(400), tmp_path, 2, kills=3, steps=400, seed=3) >= 1


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "kills"), [(2, 50), (3, 20)])
def test_many_kills_change_no_bit(tmp_path, ranks, kills):
    steps = 100 * kills
    assert killed_and_restarted(example(steps), tmp_path, ranks, kills, steps, seed=ranks) >= 2 * kills // 5


def killed_with_other_numbers(tmp_path, kills, steps, seed):
    """Starts with 1, 2, 3, 1, ... ranks; each but the last is killed.

    With n ranks a gradient is the sum of n sums over rows instead of one, so the update differs by some ulp of 2^-24 a step,
    which the training then carries on. Nothing else may differ: no step is lost or made twice.
    """
    program = example(steps)
    wanted = uninterrupted(program(tmp_path / "whole"), tmp_path / "whole", 1)
    folder, dice, seen = tmp_path / "killed", random.Random(seed), {}
    for number, moment in enumerate([*moments(kills), None]):
        training = Training(program(folder), folder, number % 3 + 1, 0, dice)
        if moment:
            training.kill_one(0, moment)
        status, losses = training.end()
        assert status == (137 if moment else 0), training.errors()
        last = training.starts()
        for step, values in losses.items():
            seen.setdefault(step, set()).update(values)
    assert 0 < last[0] < steps
    assert seen.keys() == wanted.keys() == set(range(1, steps + 1))
    for step, values in seen.items():
        for value in values:
            assert float(value) == pytest.approx(float(*wanted[step]), rel=ORDER_TOLERANCE, abs=1e-6), step
    assert len(os.listdir(folder)) == FILES


def test_killed_and_started_with_other_numbers_of_ranks(tmp_path):
    killed_with_other_numbers(tmp_path, kills=2, steps=400, seed=5)


@pytest.mark.long
def test_killed_many_times_and_started_with_other_numbers_of_ranks(tmp_path):
    killed_with_other_numbers(tmp_path, kills=20, steps=2000, seed=5)


def documented(steps):
    """The loop of docs/restart.md, with torch, a schedule and saves in the background."""
    loop, = (match[3] for match in FENCE.finditer((ROOT / "docs" / "restart.md").read_text()) if match[2] == "python")
    changes = {"STEPS = 40\n": f"STEPS = {steps}\n", "(step + 1) % 5 ": "(step + 1) % 2 "}
    assert all(part in loop for part in ("run/last", *changes))
    for old, new in changes.items():
        loop = loop.replace(old, new)

    def program(folder):
        script = folder.with_suffix(".py")
        script.write_text(loop.replace("run/last", str(folder)))
        return [script]

    return program


@pytest.mark.long
def test_the_documented_loop_is_killed(tmp_path):
    pytest.importorskip("torch")
    assert killed_and_restarted(documented(500), tmp_path, 2, kills=5, steps=500, seed=6) >= 2


# ---- torchrun --------------------------------------------------------------------------------

DIES_ONCE = """import os, runpy, signal, sys
import zero_c

step = zero_c.ShardedOptimizer.step


def fatal(opt):
    if opt.last_step.steps == 7 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    step(opt)


zero_c.ShardedOptimizer.step = fatal
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.long
def test_torchrun_starts_again(tmp_path):
    pytest.importorskip("torch")
    wanted = uninterrupted(example(20)(tmp_path / "whole"), tmp_path / "whole", 2)
    (tmp_path / "dies_once.py").write_text(DIES_ONCE)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]
    done = subprocess.run([*torchrun, tmp_path / "dies_once.py", *map(str, example(20)(tmp_path / "killed"))], text=True,
                          capture_output=True, timeout=120, env={**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    losses = re.findall(r"^step (\d+)  loss (\S+)$", done.stdout, re.M)
    assert [int(step) for step, _ in losses] == [*range(1, 8), *range(7, 21)]
    assert all(wanted[int(step)] == {loss} for step, loss in losses)
