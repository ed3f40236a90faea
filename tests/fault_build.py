"""Builds with points (csrc/zc_point.h): places where a rank may die, which other builds do not have."""

import functools
import re
import sysconfig

import numpy

from test_c import BUILD, CC, CORE, CSRC, FLAVOURS, ROOT, compile_all, compile_object, flags_for, link

FOLDER = BUILD / "points"
FAULTS = ROOT / "tests" / "c" / "faults"
# Used in a program and in a library.
FLAGS = ["-DZC_POINTS", "-fPIC"]


def compile_with_points(source, *more):
    headers = {*CSRC.rglob("*.h"), *source.parent.glob("*.h"), *FAULTS.parent.glob("*.h")}
    return compile_object(source, FOLDER, [CC, *flags_for(source, "plain"), *FLAGS, f"-I{FAULTS.parent}", *more], headers)


def core_objects():
    return compile_all(compile_with_points, CORE)


@functools.cache
def walker():
    """The program that walks over all places with C ranks."""
    own = [compile_with_points(FAULTS / name) for name in ("rank.c", "walk.c")]
    return link(FOLDER / "walk", [CC, *FLAVOURS["plain"], "-pthread"], [*own, *core_objects(), "-lm", "-ldl"])


@functools.cache
def preload():
    """The library for Python ranks, to be loaded before all others."""
    return link(FOLDER / "preload.so", [CC, "-shared"], [compile_with_points(FAULTS / "preload.c"), "-ldl"])


@functools.cache
def package():
    """A folder in which zero_c is this one, with an extension that has points; preload() has their function."""
    includes = [f"-I{sysconfig.get_path('include')}", f"-I{numpy.get_include()}"]
    glue = compile_all(lambda source: compile_with_points(source, *includes), sorted(CSRC.glob("py_*.c")))
    extension = link(FOLDER / "_core.so", [CC, "-shared", "-pthread"], [*glue, *core_objects(), "-lm", "-ldl"])
    folder = FOLDER / "package" / "zero_c"
    folder.mkdir(parents=True, exist_ok=True)
    wanted = {path.name: path for path in (ROOT / "zero_c").iterdir() if path.suffix != ".so" and path.name != "__pycache__"}
    wanted["_core.so"] = extension
    for entry in folder.iterdir():
        if entry.is_symlink() and (entry.name not in wanted or entry.resolve() != wanted[entry.name].resolve()):
            entry.unlink()
    for name, path in wanted.items():
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(path)
    return folder.parent


def points_of_the_core():
    """Every name in csrc/."""
    names = set()
    for source in (*CSRC.glob("*.c"), *CSRC.glob("*.h")):
        names |= set(re.findall(r'ZC_POINT\("([^"]+)"\)', source.read_text()))
    return names
