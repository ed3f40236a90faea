"""The C tests: every tests/c/test_*.c, and the C example, plain and under sanitizers, each in its own process.

Objects of the core are compiled once per set of flags and kept in build/ctest, so
only what changed is compiled again.
"""

import functools
import hashlib
import os
import platform
import runpy
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
BUILD = ROOT / "build" / "ctest"
CC = os.environ.get("CC", "gcc")
RUN_DEADLINE_S = 400  # of programs that take a minute or two where another test runs beside them

SETUP = runpy.run_path(str(ROOT / "setup.py"), run_name="flags")
FLAVOURS = {
    "plain": [],
    "address": ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer", "-g", "-fPIC"],
    "thread": ["-fsanitize=thread", "-fno-omit-frame-pointer", "-g"],
}
ENVIRONMENT = {
    "ASAN_OPTIONS": "detect_leaks=1:abort_on_error=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}

CORE = sorted(path for path in CSRC.glob("*.c") if not path.name.startswith("py_"))
PROGRAMS = sorted((ROOT / "tests" / "c").glob("test_*.c")) + [ROOT / "examples" / "two_threads.c"]


def uses_threads(program):
    return "pthread" in program.read_text()


CASES = [(program, flavour) for program in PROGRAMS for flavour in FLAVOURS
         if flavour != "thread" or uses_threads(program)]
# Minutes, of `make tsan`; test_comm_local has most of their ways through the core.
LONG = {(f"test_{name}", "thread") for name in ("engine", "hub", "parts", "stage3", "step")}


def flags_for(source, flavour):
    isa = SETUP["X86_FLAGS"].get(source.name, []) if platform.machine() == "x86_64" else []
    return [*SETUP["FLAGS"], f"-I{CSRC}", *FLAVOURS[flavour], *isa]


def compile_object(source, folder, command, headers):
    """The object of a source in a folder, made when the source, a header or the command changed."""
    state = hashlib.sha256(repr([str(part) for part in command]).encode())
    for path in [source, *sorted(headers)]:
        state.update(path.read_bytes())
    target = folder / f"{source.stem}_{state.hexdigest()[:24]}.o"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob(f"{source.stem}_{'?' * 24}.o"):
            old.unlink(missing_ok=True)
        part = f"{target}.{os.getpid()}.part"
        made = subprocess.run([*command, "-c", source, "-o", part], capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
        assert "warning:" not in made.stderr, made.stderr
        os.replace(part, target)
    return target


def compile_all(compile_one, sources):
    """The objects of sources, compiled two at a time."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compile_one, sources))


def compile_core(source, flavour):
    return compile_object(source, BUILD / flavour, [CC, *flags_for(source, flavour)],
                          {*CSRC.rglob("*.h"), *source.parent.glob("*.h")})


@functools.cache
def core_objects(flavour):
    """Objects of the core, compiled when first asked for."""
    return compile_all(lambda source: compile_core(source, flavour), CORE)


def link(binary, command, objects):
    """The program or library, made when its objects or the command changed; never seen half made."""
    inputs = repr([str(part) for part in (*command, *objects)])
    made_of = binary.with_name(f"{binary.name}.inputs")
    if not (binary.exists() and made_of.exists() and made_of.read_text() == inputs):
        part = binary.with_name(f"{binary.name}.{os.getpid()}.part")
        linked = subprocess.run([*command, *objects, "-o", part], capture_output=True, text=True)
        assert linked.returncode == 0, linked.stderr
        os.replace(part, binary)
        made_of.write_text(inputs)
    return binary


def run(command, deadline_s, environment=()):
    """Runs a program in its own process group, which is gone afterwards."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               env={**os.environ, **ENVIRONMENT, **dict(environment)}, start_new_session=True,
                               stdin=subprocess.DEVNULL)
    try:
        output, _ = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGABRT)
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        pytest.fail(f"not done after {deadline_s} s:\n{output}")
    return process.returncode, output


@pytest.mark.parametrize(("program", "flavour"), [
    pytest.param(program, flavour, id=f"{program.stem}-{flavour}", marks=[pytest.mark.long] if (program.stem, flavour) in LONG else [])
    for program, flavour in CASES])
def test_program(program, flavour):
    binary = link(BUILD / flavour / program.stem, [CC, *FLAVOURS[flavour], "-pthread"],
                  [compile_core(program, flavour), *core_objects(flavour), "-lm"])
    status, output = run([binary], RUN_DEADLINE_S)
    assert status == 0, f"{binary.name} ended with status {status}:\n{output}"
