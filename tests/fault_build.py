"""Builds with points (csrc/zc_point.h): places where a rank may die, which other builds do not have."""

import functools
import re

import cuda_build
from package_build import make_package
from test_c import BUILD, CC, CORE, CSRC, FLAVOURS, ROOT, compile_all, compile_object, flags_for, link

FOLDER = BUILD / "points"
FAULTS = ROOT / "tests" / "c" / "faults"
# Used in a program and in a library.
FLAGS = ["-DZC_POINTS", "-fPIC"]


def compile_with_points(source, *more):
    headers = {*CSRC.rglob("*.h"), *source.parent.glob("*.h"), *FAULTS.parent.glob("*.h")}
    return compile_object(source, FOLDER, [CC, *flags_for(source, "plain"), *FLAGS, f"-I{FAULTS.parent}", *more], headers)


def on_cuda(source):
    """The same, of what the emulated CUDA needs; a program of tests/c/faults then runs there."""
    more = ["-DON_CUDA"] if source.parent == FAULTS else []
    return compile_object(source, FOLDER / "cuda", [*cuda_build.command_for(source, "plain", more), *FLAGS], cuda_build.headers())


@functools.cache
def core_objects():
    return compile_all(compile_with_points, CORE)


@functools.cache
def walker():
    """The program that walks over all places with C ranks."""
    own = [compile_with_points(FAULTS / name) for name in ("rank.c", "walk.c")]
    return link(FOLDER / "walk", [CC, *FLAVOURS["plain"], "-pthread"], [*own, *core_objects(), "-lm", "-ldl"])


@functools.cache
def gpu_walker():
    """The same with ranks on emulated GPUs."""
    sources = [FAULTS / "rank.c", FAULTS / "walk.c", *(source for source in cuda_build.backend_sources() if source.name not in cuda_build.PLUGIN_ONLY)]
    objects = [*compile_all(on_cuda, sources), *core_objects()]
    return link(FOLDER / "gpu_walk", [cuda_build.CXX, *FLAVOURS["plain"], "-pthread"], [*objects, "-lm", "-ldl"])


@functools.cache
def preload():
    """The library for Python ranks, to be loaded before all others."""
    return link(FOLDER / "preload.so", [CC, "-shared"], [compile_with_points(FAULTS / "preload.c"), "-ldl"])


@functools.cache
def package():
    """A folder in which zero_c is this one, with an extension that has points; preload() has their function."""
    return make_package(FOLDER, compile_with_points, core_objects())


def points_in(folder):
    """Every name in the sources of a folder."""
    names = set()
    for source in (*folder.glob("*.c"), *folder.glob("*.h")):
        names |= set(re.findall(r'ZC_POINT\("([^"]+)"\)', source.read_text()))
    return names
