"""Builds with points (csrc/zc_point.h): places where a rank may die, which other builds do not have."""

import functools
import re

from package_build import make_package
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
    return make_package(FOLDER, compile_with_points, core_objects())


def points_of_the_core():
    """Every name in csrc/."""
    names = set()
    for source in (*CSRC.glob("*.c"), *CSRC.glob("*.h")):
        names |= set(re.findall(r'ZC_POINT\("([^"]+)"\)', source.read_text()))
    return names
