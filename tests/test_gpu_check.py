"""benchmarks/gpu_check.py where there is no GPU: its lines, its deadlines, and that its comparisons can fail.

The functions at the end are targets: they run in processes of their own, as checks do.
"""

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import cuda_build
from ranks import processes_of_group, python_path

TESTS = Path(__file__).resolve().parent
BENCHMARKS = TESTS.parent / "benchmarks"
SCRIPT = BENCHMARKS / "gpu_check.py"
LINE = re.compile(r"(ok|FAIL|skip) +(\w+) +(\d+\.\d) s  (\S.*\S)")

sys.path.append(str(BENCHMARKS))
import gpu_check  # noqa: E402
import gpu_check_build  # noqa: E402

# The driver shows no GPU, whatever this machine has.
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}

MEMCHECK_SAID = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at update_kernel(device_update_args, unsigned int)+0x120
=========     by thread (1,0,0) in block (3,0,0)
=========     Access at 0x7f00 is out of bounds
=========
the program's own words
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void at::native::reduce_kernel<512, 1>(T3)+0x80
=========     by thread (0,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 2 errors
"""


def run_script(tmp_path, *arguments, deadline=60):
    """Status, the lines as (verdict, name, what was found), and what --json wrote; nothing may be left."""
    temporary, summary = tmp_path / "temporary", tmp_path / "summary.json"
    temporary.mkdir()
    done = subprocess.run([sys.executable, SCRIPT, *arguments, "--json", summary], text=True, stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=deadline,
                          env={**os.environ, **NO_GPU, "TMPDIR": str(temporary)})
    lines = [LINE.fullmatch(line) for line in done.stdout.splitlines()]
    assert lines and all(lines), done.stdout
    assert list(temporary.iterdir()) == []
    return done.returncode, [line.group(1, 2, 4) for line in lines], json.loads(summary.read_text())


def run_target(tmp_path, function, deadline_s=60, **arguments):
    """The Outcome of a function of this file, run as a check."""
    path = os.pathsep.join([str(TESTS), str(BENCHMARKS), python_path()])
    return gpu_check.run_with_deadline("target", f"test_gpu_check:{function.__name__}", deadline_s, tmp_path,
                                       {"PYTHONPATH": path}, arguments)


def pid_in(path, deadline_s=30):
    """The number that a process writes to this file."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        with contextlib.suppress(OSError, ValueError):
            return int(path.read_text())
        time.sleep(0.02)
    raise AssertionError(f"{path} was not written")


def assert_gone(group, deadline_s=10):
    """Nothing lives in a process group that was killed a moment ago."""
    end = time.monotonic() + deadline_s
    while processes_of_group(group):
        assert time.monotonic() < end, f"processes of group {group} are left"
        time.sleep(0.02)


# ---- lines ----------------------------------------------------------------------------


def test_without_a_gpu_a_line_says_why(tmp_path):
    names = [check.name for check in gpu_check.CHECKS if check.name != "build"]
    status, lines, summary = run_script(tmp_path, "--only", ",".join(names))
    assert status == 0
    assert [name for _, name, _ in lines] == names == [entry["name"] for entry in summary]
    assert lines[0][0] == "ok" and "no GPU" in lines[0][2] and "Python" in lines[0][2]
    assert all(verdict == "skip" and found.startswith("no GPU here") for verdict, _, found in lines[1:])
    assert [entry["verdict"] for entry in summary] == [verdict for verdict, _, _ in lines]


@pytest.mark.long
def test_without_a_gpu_the_package_is_built(tmp_path):
    status, lines, summary = run_script(tmp_path, deadline=400)
    assert status == 0, lines
    verdict, name, found = lines[1]
    assert (verdict, name) == ("ok", "build")
    has_nvcc = cuda_build.SETUP["find_nvcc"]() is not None
    assert summary[1]["numbers"] == {"plugin": has_nvcc}
    assert ("_cuda.so of" if has_nvcc else "no nvcc") in found
    assert {verdict for verdict, name, _ in lines[2:]} == {"skip"}


def test_a_time_that_is_over_skips(tmp_path):
    status, lines, _ = run_script(tmp_path, "--minutes", "0.01", "--only", "machine")
    assert status == 0
    assert lines == [("skip", "machine", "none of the 0.01 minutes are left")]


def test_a_failure_is_the_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(gpu_check, "CHECKS", [gpu_check.Check("machine", "gpu_check_build:no_such_function", 60, ())])
    assert gpu_check.main(["--only", "machine"]) == 1
    line, *output = capsys.readouterr().out.splitlines()
    assert line.startswith("FAIL  machine") and "ended with status 1" in line
    assert "AttributeError" in output[-1] and all(line.startswith("      | ") for line in output)


def test_unknown_names_are_refused(capsys):
    with pytest.raises(SystemExit) as refused:
        gpu_check.main(["--only", "stages,stagse"])
    assert refused.value.code == 2
    assert "stagse: known are machine, build" in capsys.readouterr().err


# ---- processes --------------------------------------------------------------------------


def test_a_late_check_is_killed_with_its_children(tmp_path):
    outcome = run_target(tmp_path, hang, deadline_s=5, folder=str(tmp_path), package="")
    assert outcome.verdict == "FAIL" and outcome.found == "did not end within 5 s"
    assert "in hang" in outcome.output  # where it stood
    assert_gone(pid_in(tmp_path / "group"))


def test_a_check_that_ends_leaves_no_children(tmp_path):
    outcome = run_target(tmp_path, leave_child, folder=str(tmp_path))
    assert outcome.verdict == "ok"
    assert_gone(pid_in(tmp_path / "group"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_everything(tmp_path, number):
    program = ("import gpu_check, signal, sys\n"
               "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
               "gpu_check.CHECKS = [gpu_check.Check('machine', 'test_gpu_check:hang_below', 60, ())]\n"
               "sys.exit(gpu_check.main([]))")
    path = os.pathsep.join([str(TESTS), str(BENCHMARKS), python_path()])
    process = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL,
                               env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)})
    try:
        group = pid_in(tmp_path / "group")
        process.send_signal(number)
        assert process.wait(30) in (128 + number, -number)
    finally:
        process.kill()
        process.wait()
    assert_gone(group)
    assert [entry.name for entry in tmp_path.iterdir()] == ["group"]


def test_a_crash_is_a_failure(tmp_path):
    raised = run_target(tmp_path, crash, how="raise")
    assert (raised.verdict, raised.found) == ("FAIL", "ended with status 1")
    assert raised.output.endswith("ZeroDivisionError: what went wrong")
    killed = run_target(tmp_path, crash, how="signal")
    assert (killed.verdict, killed.found) == ("FAIL", "was ended by signal 11 (SIGSEGV)")


def test_a_crash_after_the_result_is_a_failure(tmp_path):
    outcome = run_target(tmp_path, crash, how="at the end")
    assert outcome.verdict == "FAIL"
    assert outcome.found == "was ended by signal 6 (SIGABRT), after it had found: ok everything as it should be"


def test_verdicts_come_from_the_child(tmp_path):
    outcomes = [run_target(tmp_path, give, verdict=verdict) for verdict in ("ok", "skip", "FAIL")]
    assert [(outcome.verdict, outcome.found) for outcome in outcomes] == [
        ("ok", "all of it"), ("skip", "there is none"), ("FAIL", "another one")]
    assert outcomes[0].numbers == {"bytes": 7}
    assert outcomes[2].output == "printed before"


# ---- comparisons ------------------------------------------------------------------------


def test_comparison_with_torch_holds_on_the_cpu(tmp_path):
    outcome = run_target(tmp_path, compare_on_cpu, deadline_s=120, fault=None)
    assert outcome.verdict == "ok", outcome


@pytest.mark.parametrize("fault, words", [
    ("lr", "tolerances away from torch's"), ("clip", "tolerances away from torch's"),
    ("gradient", "the gradient's norm in step 0"), ("stage", "stage 1 against stage 0: ")])
def test_comparison_with_torch_finds_faults(tmp_path, fault, words):
    outcome = run_target(tmp_path, compare_on_cpu, deadline_s=120, fault=fault)
    assert outcome.verdict == "FAIL" and words in outcome.found, outcome


@pytest.mark.parametrize("fault, words", [
    (None, "has the bits"), ("lost replay", "steps are counted|are not those of eager steps"),
    ("old rate", "are not those of eager steps")])
def test_comparison_of_graphs(tmp_path, fault, words):
    outcome = run_target(tmp_path, compare_graphs_on_cpu, deadline_s=120, fault=fault)
    assert outcome.verdict == ("FAIL" if fault else "ok") and re.search(words, outcome.found), outcome


def test_two_ranks_compare_on_the_cpu():
    path = os.pathsep.join([str(BENCHMARKS), python_path()])
    done = subprocess.run([sys.executable, "-m", "zero_c.launch", "-n", "2", BENCHMARKS / "gpu_check_rank.py", "cpu"],
                          text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          timeout=180, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout
    assert re.search(r"^rank 0: 3 trainings .* float32 0\.\d+, bfloat16 0\.\d+$", done.stdout, re.M), done.stdout


def test_sanitizer_reports_are_told_apart():
    found = gpu_check_build.reports(MEMCHECK_SAID)
    assert [what for what, _ in found] == ["Invalid __global__ write of size 4 bytes",
                                           "Uninitialized __global__ memory read of size 4 bytes"]
    assert [gpu_check_build.is_ours(where) for _, where in found] == [True, False]
    assert gpu_check_build.reports("========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n") == []


# What gpu_alias.c asks of libcuda.so.1, on top of the emulated runtime that is inside the plugin.
DRIVER = """\
#include <dlfcn.h>
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = context; return device; }
int cuCtxSetCurrent(void *context) { return !context; }
int cuStreamCreate(void **stream, unsigned flags)
{
    void *library = dlopen(PLUGIN, RTLD_NOW);
    int (*create)(void **, unsigned);
    if (!library)
        return 1;
    *(void **)&create = dlsym(library, "cudaStreamCreateWithFlags");
    return create(stream, flags);
}
"""


@cuda_build.needs_headers
def test_alias_program_runs_on_the_emulated_gpu(tmp_path, monkeypatch):
    plugin = tmp_path / "package" / "zero_c" / "_cuda.so"
    plugin.parent.mkdir(parents=True)
    plugin.symlink_to(cuda_build.build_plugin())
    (tmp_path / "driver.c").write_text(DRIVER)
    gpu_check_build.output_of([cuda_build.CC, "-shared", "-fPIC", f'-DPLUGIN="{plugin}"', tmp_path / "driver.c", "-o",
                               tmp_path / "libcuda.so.1", "-ldl"])
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    found = gpu_check_build.aliases(tmp_path, tmp_path / "package", rounds=200)
    assert found.startswith("200 rounds through 6 mappings of 4 x ")
    plugin.unlink()
    with pytest.raises(gpu_check_build.Failed, match="no CUDA part"):
        gpu_check_build.aliases(tmp_path, tmp_path / "package", rounds=1)


# ---- targets ----------------------------------------------------------------------------


def start_child(folder):
    """A process of this one's group, whose number goes to a file."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(folder, "part").write_text(str(os.getpgrp()))
    Path(folder, "part").rename(Path(folder, "group"))


def hang(folder, package):
    start_child(folder)
    time.sleep(600)


def hang_below(folder, package):
    """As hang, in the temporary folder of the whole script."""
    hang(Path(folder).parent, package)


def leave_child(folder):
    start_child(folder)
    return "a child is left"


def crash(how):
    if how == "raise":
        raise ZeroDivisionError("what went wrong")
    if how == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    import atexit

    atexit.register(os.abort)
    return "everything as it should be"


def give(verdict):
    from gpu_check_child import Failed, Skip

    print("printed before")
    if verdict == "skip":
        raise Skip("there is none")
    if verdict == "FAIL":
        raise Failed("another one")
    return "all of it", {"bytes": 7}


def compare_on_cpu(fault):
    import gpu_check_models as models
    import torch

    if fault == "lr":
        sgd = torch.optim.SGD
        models.TORCH_OPTIMIZERS = {"sgd": lambda masters, lr, **options: sgd(masters, 1.001 * lr, **options)}
    if fault == "clip":
        models.torch_training = functools.partial(models.torch_training, max_norm=1.001 * models.MAX_NORM)
    if fault == "gradient":
        note = models.Record.note
        models.Record.note = lambda record, index, gradient: note(record, index, gradient * (1 + 1e-4))
    if fault == "stage":
        train = models.train

        def trained(model, stage, **options):
            record = train(model, stage=stage, **options)
            record.values[0].view(-1)[0] += 1e-6 * (stage == 1)
            return record

        models.train = trained
    return f"{models.compare_with_torch(models.Mlp, torch.float32, 'sgd', 'cpu'):.3f} of the tolerance"


def compare_graphs_on_cpu(fault):
    """With what stands in for a graph: a function that a replay calls."""
    import gpu_check_train
    import torch

    rates = []

    class Graph:
        def __init__(self, work):
            self.iteration, self.replays = work.__self__, 0

        def replay(self):
            self.replays += 1
            if fault == "lost replay" and self.replays == 2:
                return
            groups = self.iteration.opt.param_groups
            if fault == "old rate":
                rates.append(groups[0]["lr"])
                groups[0]["lr"] = rates[0]
            self.iteration.whole()

    for stage in (0, 1, 2):
        gpu_check_train.compare_graph(stage, torch.float32, "cpu", Graph, lambda opt: None)
    return "has the bits"
