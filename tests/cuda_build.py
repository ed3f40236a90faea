"""Builds the CUDA backend against the emulated CUDA and NCCL of tests/cuda_emulation, for test modules.

    binary = cuda_build.program(path, "plain")    a C or C++ test program
    binary = cuda_build.program(path, "watched")  the same; what kernels touch is compared with what they declare
    library = cuda_build.build_plugin()           what zero_c loads as its CUDA plugin, with the emulation inside

NVIDIA's own headers are needed, no GPU and no compiler of NVIDIA's. Objects are kept in build/ctest; the core's are
those of test_c.py.
"""

import functools
import hashlib
import os
import runpy
import sysconfig
from pathlib import Path

import pytest
from setuptools.errors import CompileError

from test_c import BUILD, CC, CSRC, FLAVOURS, ROOT, compile_all, compile_object, core_objects, flags_for, link

CXX = os.environ.get("CXX", "g++")
CUDA = CSRC / "cuda"
EMULATION = ROOT / "tests" / "cuda_emulation"
SETUP = runpy.run_path(str(ROOT / "setup.py"), run_name="flags")

CXX_FLAGS = ["-std=c++17", "-O2", "-g", "-ffp-contract=off", "-fno-strict-aliasing", "-pthread", "-Wall", "-Wextra",
             "-Wno-unknown-pragmas"]
# These two make the shared library that the plugin is; in a program core and backend are one.
# Every load and store of a kernel calls emu_watch.cc, in place of the thread sanitizer's library.
WATCH_FLAGS = ["-fsanitize=thread", "--param", "tsan-instrument-func-entry-exit=0"]
PLUGIN_ONLY = {"plugin_status.c", "cuda_plugin.c"}
# What the plugin shows beside its table: what a test sets and asks, and CUDA's own functions, for arrays of a test.
PLUGIN_EXPORTS = [SETUP["PLUGIN_EXPORT"], "emu_*", "cuda*"]


@functools.cache
def include_flags():
    """Flags for CUDA's headers: nvcc's own answer, else CUDA_HOME's, else the wheels'. None: there are none."""
    if nvcc := SETUP["find_nvcc"]():
        try:
            return SETUP["cuda_include_flags"](nvcc)
        except CompileError:  # an nvcc without the runtime's headers
            pass
    wheels = [Path(sysconfig.get_path(kind), "nvidia", "cu13") for kind in ("platlib", "purelib")]
    homes = [Path(os.environ["CUDA_HOME"])] if os.environ.get("CUDA_HOME") else []
    for home in [*homes, *wheels]:
        if (home / "include" / "cuda_runtime_api.h").exists():
            return ["-isystem", str(home / "include")]
    return None


needs_headers = pytest.mark.skipif(include_flags() is None,
                                   reason="no headers of CUDA 13 (nvcc, CUDA_HOME, CUDA wheels)")


def headers():
    return {*CSRC.rglob("*.h"), *CSRC.rglob("*.cuh"), *EMULATION.glob("*.h"), *(ROOT / "tests" / "c").glob("*.h"),
            *(ROOT / "tests" / "cuda").glob("*.h")}


def flavour_of(source, flavour):
    """Only kernels and who watches them differ where kernels are watched."""
    return "plain" if flavour == "watched" and source.suffix != ".cu" and source.stem != "emu_watch" else flavour


def command_for(source, flavour, extra):
    """Kernels and the emulation are never under the thread sanitizer: it does not follow their stacks."""
    common = ["-DZERO_C_EMULATE", *include_flags(), f"-I{CUDA}", f"-I{EMULATION}", f"-I{ROOT / 'tests' / 'c'}", *extra]
    if source.suffix == ".c":
        return [CC, *flags_for(source, flavour), *common]
    special = {"thread": [], "watched": ["-DEMU_WATCH", *(WATCH_FLAGS if source.suffix == ".cu" else [])]}
    return [CXX, *CXX_FLAGS, *special.get(flavour, FLAVOURS.get(flavour)), f"-I{CSRC}", *common, *(["-x", "c++"] if source.suffix == ".cu" else [])]


def compile_one(source, flavour, folder, extra=()):
    return compile_object(source, BUILD / folder, command_for(source, flavour, extra), headers())


def compile_part(source, flavour, extra=()):
    part = flavour_of(source, flavour)
    return compile_one(source, part, f"cuda-{part}", extra)


def backend_sources():
    return [*sorted(CUDA.glob("*.c")), *sorted(CUDA.glob("*.cu")), *sorted(EMULATION.glob("*.cc"))]


@functools.cache
def backend_objects(flavour):
    """Backend and emulation for a program."""
    sources = [source for source in backend_sources() if source.name not in PLUGIN_ONLY]
    return compile_all(lambda source: compile_part(source, flavour), sources)


@functools.cache
def program(source, flavour):
    """The test program; those of tests/c run on the emulated GPU instead of where they otherwise do."""
    on_cuda = ["-DON_CUDA", "-Wno-unused-function"] if source.parent.name == "c" else []  # some parts are for CPUs
    core = "plain" if flavour == "watched" else flavour
    objects = [compile_part(source, flavour, on_cuda), *backend_objects(flavour), *core_objects(core)]
    return link(BUILD / f"cuda-{flavour}" / source.stem, [CXX, *FLAVOURS[core], "-pthread"], [*objects, "-ldl", "-lm"])


@functools.cache
def build_plugin():
    """The plugin's path. The whole is one library, because shared memory of kernels is a section of one."""
    folder = "cuda-plugin"
    sources = [*SETUP["plugin_sources"](ROOT), *sorted(EMULATION.glob("*.cc"))]
    objects = compile_all(lambda source: compile_one(source, "plain", folder, ["-fPIC"]), sources)
    text = f"{{ global: {' '.join(name + ';' for name in PLUGIN_EXPORTS)} local: *; }};\n"
    exports = BUILD / folder / f"exports_{hashlib.sha256(text.encode()).hexdigest()[:8]}.map"
    if not exports.exists():
        exports.write_text(text)
    # Its own CUDA functions, whatever else the process has loaded.
    command = [CXX, "-shared", "-pthread", "-Wl,-Bsymbolic,-z,defs", f"-Wl,--version-script={exports}"]
    return link(BUILD / folder / "_cuda_emulated.so", command, [*objects, "-ldl", "-lm"])
