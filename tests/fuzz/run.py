"""Runs the targets of this folder; README.md tells what they are.

    python tests/fuzz/run.py [--seconds S] [--runs N] [--seed K] [--plain] [TARGET...]   look for findings
    python tests/fuzz/run.py TARGET --input FILE                                  what one input does

Inputs that reach something new are kept in build/fuzz/corpus/TARGET, and taken up again by the next run. An input that
finds something is written to build/fuzz/found; the exit status is then 1.
"""

import argparse
import hashlib
import importlib.util
import os
import random
import re
import signal
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

from build import ENGINE, FOLDER, OUT, c_target, default_engine, mutator

FINDINGS = FOLDER / "findings"
SECONDS = 300
INPUT_BYTES = 300    # the targets' choices seldom need more
INPUT_TIMEOUT_S = 20  # an input that takes longer is a finding
SEEDS = 24
SANITIZERS = {
    # Memory out of proportion to an input is a finding, too: no message is longer than 1 MiB.
    "ASAN_OPTIONS": "detect_leaks=1:max_allocation_size_mb=64:abort_on_error=0",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
}
C_TARGETS = sorted(path.stem for path in FOLDER.glob("*.c"))
PYTHON_TARGETS = sorted(path.stem for path in FOLDER.glob("*.py") if "\ndef one_input(" in path.read_text())
TARGETS = [*C_TARGETS, *PYTHON_TARGETS]


def seeds(target):
    """What every run begins with: inputs of any bytes, which targets can read all, and the findings of earlier ones."""
    choose = random.Random(target)
    made = [choose.randbytes(min(INPUT_BYTES, 2 ** (1 + k // 3))) for k in range(SEEDS)]
    return made + [path.read_bytes() for path in sorted((FINDINGS / target).glob("*"))]


def corpus(target):
    folder = OUT / "corpus" / target
    folder.mkdir(parents=True, exist_ok=True)
    for data in seeds(target):
        (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    return folder


def prepare(target, engine):
    """Builds what run() needs."""
    if target in C_TARGETS:
        c_target(target, engine)
    else:
        mutator()


def command_of(target, engine):
    if target in C_TARGETS:
        return [c_target(target, engine)]
    guided = engine != "plain" and importlib.util.find_spec("atheris") is not None
    return [sys.executable, ENGINE / "python.py", *(["--guided"] if guided else []), target]


def run(target, engine, inputs, **how):
    """(inputs that ran, the input of a finding or None, what was printed).

    inputs: a folder to start from, or a file that runs alone.
    """
    with tempfile.TemporaryDirectory(prefix="zero_c fuzz") as folder:
        return _run(target, engine, inputs, f"{folder}/", **how)


def _run(target, engine, inputs, prefix, *, seconds=None, runs=None, seed=1):
    """prefix: of the files that the engine writes."""
    command = [*command_of(target, engine), f"-seed={seed}", f"-max_len={INPUT_BYTES}", f"-timeout={INPUT_TIMEOUT_S}",
               f"-artifact_prefix={prefix}", *([f"-runs={runs}"] if runs else []),
               *([f"-max_total_time={seconds}"] if seconds else [])]
    library = command[0] != sys.executable and engine == "libfuzzer" or "--guided" in command
    if library:
        command += ["-len_control=0", "-print_final_stats=1", "-use_value_profile=1", "-rss_limit_mb=4096"]
    command.append(inputs)
    process = subprocess.Popen([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               errors="replace", env={**os.environ, **SANITIZERS}, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        output, _ = process.communicate()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    counts = re.findall(r"number_of_executed_units: (\d+)|^(\d+) inputs$", output, re.MULTILINE)
    count = int(next(filter(None, counts[-1]))) if counts else 0
    if not process.returncode:
        return count, None, output
    current = Path(prefix, "current")
    if current.exists():  # as the driver left it
        data = current.read_bytes()
        count, size = struct.unpack("<QQ", data[:16])
        return count, data[16:16 + size], output
    written = sorted(Path(prefix).iterdir())
    return count, written[0].read_bytes() if written else b"", output


def look(target, engine, seconds, runs, seed):
    """Whether there was no finding; prints one line, or what was found."""
    count, found, output = run(target, engine, corpus(target), seconds=seconds, runs=runs, seed=seed)
    if found is None:
        print(f"{target}: {count} inputs, no finding", flush=True)
        return True
    folder = OUT / "found"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{target}-{hashlib.sha256(found).hexdigest()[:16]}"
    path.write_bytes(found)
    print(f"{output[-6000:]}\n{target}: a finding after {count} inputs; python tests/fuzz/run.py {target} --input {path}", flush=True)
    return False


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"{', '.join(TARGETS)} (default all)")
    parser.add_argument("--seconds", type=int, help=f"for each target (default {SECONDS}, or no limit with --runs)")
    parser.add_argument("--runs", type=int, help="inputs for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="without a guide, as in make test")
    parser.add_argument("--input", type=Path, help="run this one alone")
    options = parser.parse_args()
    wrong = set(options.targets) - set(TARGETS)
    if wrong:
        parser.error(f"there is no target {min(wrong)}; there are {', '.join(TARGETS)}")
    engine = "plain" if options.plain else default_engine()
    if options.input is not None:
        if len(options.targets) != 1:
            parser.error("--input is for one target")
        _, found, output = run(options.targets[0], engine, options.input)
        print(output)
        sys.exit(found is not None)
    seconds = options.seconds or (None if options.runs else SECONDS)
    targets = options.targets or TARGETS
    good = [look(target, engine, seconds, options.runs, options.seed) for target in targets]
    sys.exit(not all(good))


if __name__ == "__main__":
    main()
