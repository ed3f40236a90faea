"""Builds the targets in C and the mutator, as tests/test_c.py builds its programs.

    engine "libfuzzer"  clang with -fsanitize=fuzzer, which guides mutations by coverage
    engine "coverage"   gcc, engine/driver.c, and gcc's -fsanitize-coverage=trace-pc as the guide
    engine "plain"      gcc, engine/driver.c, no guide: the objects are those of the C tests

All with the address and undefined behaviour sanitizers.
"""

import functools
import os
import re
import shutil
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parent))

from test_c import BUILD, CC, CORE, CSRC, FLAVOURS, compile_all, compile_object, flags_for, link  # noqa: E402

ENGINE = FOLDER / "engine"
OUT = BUILD.parent / "fuzz"
NOT_FOR_CLANG = {"cpu_dispatch.c"}  # clang 14 knows no "f16c" in __builtin_cpu_supports


def find_clang():
    """A clang that has libFuzzer, by the usual names; None."""
    names = [os.environ.get("CLANG"), "clang", *(f"clang-{version}" for version in range(21, 12, -1))]
    return next(filter(None, map(shutil.which, filter(None, names))), None)


def default_engine():
    return "libfuzzer" if find_clang() else "coverage"


def command_of(source, engine):
    if engine == "libfuzzer" and source.name in NOT_FOR_CLANG:
        return [CC, *flags_for(source, "plain")]
    if engine == "libfuzzer":
        sanitizers = ["-fsanitize=fuzzer-no-link,address,undefined", "-fno-sanitize-recover=undefined", "-g", "-O1"]
        return [find_clang(), *flags_for(source, "plain"), "-w", *sanitizers]  # warnings are gcc's business
    # The driver itself is no part of what guides it.
    guide = ["-fsanitize-coverage=trace-pc"] if engine == "coverage" and source.parent != ENGINE else []
    return [CC, *flags_for(source, "address"), *guide]


def compile_one(source, engine):
    if engine == "plain" and source.parent == CSRC:
        folder = BUILD / "address"  # the C tests' own
    else:
        folder = OUT / engine
    includes = [] if source.parent == CSRC else [f"-I{FOLDER}", f"-I{FOLDER.parent / 'c'}"]
    headers = {*CSRC.rglob("*.h"), *source.parent.glob("*.h")}
    if source.parent == FOLDER:
        headers |= {*(FOLDER.parent / "c").glob("*.h"), *(CSRC / name for name in included(source))}
    return compile_object(source, folder, [*command_of(source, engine), *includes], headers)


def included(target):
    """Files of the core that a target includes whole, to reach their static functions."""
    return re.findall(r'^#include "(\w+\.c)"', target.read_text(), re.MULTILINE)


@functools.cache
def core_objects(engine):
    return dict(zip((source.name for source in CORE), compile_all(lambda source: compile_one(source, engine), CORE), strict=True))


def c_target(name, engine):
    """The program of a target in C."""
    source = FOLDER / f"{name}.c"
    objects = [compile_one(source, engine)]
    objects += [path for file, path in core_objects(engine).items() if file not in included(source)]
    if engine == "libfuzzer":
        return link(OUT / engine / name, [find_clang(), "-fsanitize=fuzzer,address,undefined", "-pthread"], [*objects, "-lm", "-ldl"])
    objects += [compile_one(ENGINE / file, engine) for file in ("driver.c", "mutate.c")]
    return link(OUT / engine / name, [CC, *FLAVOURS["address"], "-pthread"], [*objects, "-lm", "-ldl"])


def mutator():
    """engine/mutate.c as a library for Python."""
    source = ENGINE / "mutate.c"
    made = compile_object(source, OUT, [CC, *flags_for(source, "plain"), "-fPIC", "-fvisibility=default"], ENGINE.glob("*.h"))
    return link(OUT / "mutate.so", [CC, "-shared"], [made])
