"""Checks of zero_c on a machine with an NVIDIA GPU, in a few minutes:

    python benchmarks/gpu_check.py [--minutes 5] [--only NAME,...] [--json FILE]

One line for each check: its verdict (ok, FAIL or skip), its name, the seconds it took, what was found. The package is
built from this clone into a temporary folder, and the other checks use that one. Each check is a process of its own
(gpu_check_child.py) with a deadline; what it started goes with it. What a check needs and this machine does not have is
a skip with the reason. The exit status is 1 if a check failed.
"""
import argparse
import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
OUTPUT_LINES = 12           # of a check that failed
SHORTEST_S = 5              # with less time left a check is not begun
STACK_S = 3                 # for a late process to say where it is
END_S = 10                  # for a killed one to be gone


class Check(NamedTuple):
    name: str
    target: str             # module:function
    deadline_s: float
    needs: tuple = ("gpu", "package", "torch")
    what: str = ""


CHECKS = [
    Check("machine", "gpu_check_build:machine", 60, (), "GPU, driver, Python, torch"),
    Check("build", "gpu_check_build:build", 200, (), "pip install from this clone, with nvcc"),
    Check("aliases", "gpu_check_build:aliases", 60, ("gpu", "package"), "one memory at several addresses"),
    Check("stages", "gpu_check_train:stages", 60, what="stages 0 to 3 against torch.optim"),
    Check("autograd", "gpu_check_train:autograd", 60, what="stage 3 with prefetch and checkpointing against stage 2"),
    Check("memory", "gpu_check_speed:memory", 45, what="what the GPU has lost against opt.memory()"),
    Check("streams", "gpu_check_arrays:streams", 45, what="training on a side stream"),
    Check("dlpack", "gpu_check_arrays:dlpack", 30, what="torch's arrays, without its modules"),
    Check("cupy", "gpu_check_arrays:cupy", 45, what="CuPy's"),
    Check("jax", "gpu_check_arrays:jax", 60, what="JAX's"),
    Check("update", "gpu_check_speed:update", 45, what="bandwidth of the AdamW update"),
    Check("host", "gpu_check_speed:host", 45, what="time a step takes on the host, by buckets"),
    Check("graph", "gpu_check_train:graph", 75, what="iterations in CUDA graphs, and a replay's time on the host"),
    Check("graph_step", "gpu_check_train:graph_step", 45, what="step() alone in a CUDA graph, which is refused"),
    Check("ranks", "gpu_check_train:ranks", 90, what="several ranks, one on each GPU or two on one"),
    Check("memcheck", "gpu_check_build:memcheck", 75, what="compute-sanitizer memcheck"),
    Check("initcheck", "gpu_check_build:initcheck", 75, what="compute-sanitizer initcheck"),
]


class Outcome(NamedTuple):
    name: str
    verdict: str            # ok, FAIL, skip
    seconds: float
    found: str              # a sentence
    numbers: dict = {}
    output: str = ""        # the end of what a check that failed has printed


def run_with_deadline(name, target, deadline_s, folder, environment, arguments):
    """The Outcome of target(**arguments) in a process of its own, which is gone after it, with all that it started."""
    result, log = folder / f"{name}.json", folder / f"{name}.log"
    command = [sys.executable, HERE / "gpu_check_child.py", target, result, json.dumps(arguments)]
    begin = time.monotonic()
    with open(log, "wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=folder,
                                   env={**os.environ, **environment}, start_new_session=True)
    late = False
    try:
        process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        late = True
        process.send_signal(signal.SIGABRT)     # it says where it stands
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STACK_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):    # one that hangs in the driver may stay
            process.wait(END_S)
    seconds = time.monotonic() - begin
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-OUTPUT_LINES:])
    report = json.loads(result.read_text()) if result.exists() else None
    if not late and process.returncode == 0 and report:
        return Outcome(name, report["verdict"], seconds, report["found"], report["numbers"],
                       tail if report["verdict"] == "FAIL" else "")
    if late:
        found = f"did not end within {deadline_s:.0f} s"
    elif process.returncode < 0:
        found = f"was ended by signal {-process.returncode} ({signal.Signals(-process.returncode).name})"
    else:
        found = f"ended with status {process.returncode}"
    if report:
        found += f", after it had found: {report['verdict']} {report['found']}"
    return Outcome(name, "FAIL", seconds, found, output=tail)


def missing(check, facts):
    """Why a check cannot be made here, or None."""
    return next((facts[need] for need in check.needs if facts[need]), None)


def show(outcome):
    found = " ".join(outcome.found.split())
    print(f"{outcome.verdict:4}  {outcome.name:10}  {outcome.seconds:5.1f} s  {found}", flush=True)
    for line in outcome.output.splitlines():
        print(f"      | {line}", flush=True)


def run_all(chosen, minutes, folder, outcomes):
    """Adds the Outcomes of the chosen checks, and of what they stand on, to a list, and prints them as they come."""
    end = time.monotonic() + 60 * minutes
    package = folder / "package"
    path = [str(package), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    # CUBLAS_WORKSPACE_CONFIG: cuBLAS gives the same bits for the same operands only with it.
    environment = {"PYTHONPATH": os.pathsep.join(path), "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
                   "PYTHONDONTWRITEBYTECODE": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    facts = {"gpu": None, "package": None, "torch": None}     # what is missing, and why

    def run(check):
        reason = missing(check, facts)
        left = end - time.monotonic()
        if not reason and left < SHORTEST_S:
            reason = f"none of the {minutes:g} minutes are left"
        if reason:
            outcomes.append(Outcome(check.name, "skip", 0.0, reason))
        else:
            outcomes.append(run_with_deadline(check.name, check.target, min(check.deadline_s, left), folder,
                                              environment, {"folder": str(folder), "package": str(package)}))
        show(outcomes[-1])
        return outcomes[-1]

    by_name = {check.name: check for check in CHECKS}
    machine = run(by_name["machine"])
    if "lacks" in machine.numbers:
        facts.update(machine.numbers["lacks"])
    else:
        facts.update(gpu="what this machine has could not be found out")
    rest = [check for check in CHECKS if check.name in chosen and check.name not in ("machine", "build")]
    if "build" in chosen or any("package" in check.needs and not missing(check, facts) for check in rest):
        build = run(by_name["build"])
        if build.verdict != "ok" or not build.numbers["plugin"]:
            facts["package"] = "the build has no part for GPUs"
    for check in rest:
        run(check)


def ended(number, frame):
    raise SystemExit(128 + number)      # so that what was started is ended, too


def main(argv=None):
    names = [check.name for check in CHECKS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog="\n".join(f"  {check.name:10}  {check.what}" for check in CHECKS))
    parser.add_argument("--minutes", type=float, default=5, help="for everything; what does not fit is skipped")
    parser.add_argument("--only", type=lambda text: text.split(","), default=names, metavar="NAME,...",
                        help="these checks, and what they stand on")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="verdicts and figures of all checks")
    args = parser.parse_args(argv)
    if unknown := [name for name in args.only if name not in names]:
        parser.error(f"{', '.join(unknown)}: known are {', '.join(names)}")
    if not args.minutes > 0:
        parser.error(f"--minutes is {args.minutes:g}; it must be above 0")
    signal.signal(signal.SIGTERM, ended)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="zero_c_gpu_check_"))
    outcomes = []
    try:
        run_all(args.only, args.minutes, folder, outcomes)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if args.json:
            args.json.write_text(json.dumps([outcome._asdict() for outcome in outcomes], indent=1) + "\n")
    return 1 if any(outcome.verdict == "FAIL" for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
