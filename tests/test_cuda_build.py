"""What the CUDA plugin must be like as a binary: compiled by nvcc for every architecture without a warning, a spilled
register or local memory, wide accesses where bandwidth is spent, no libraries but the C library, one export.

Needs nvcc, no GPU. The plugin is built once and kept in build/cuda; a run after no change compiles nothing.
"""

import os
import re
import runpy
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "cuda"
SETUP = runpy.run_path(str(ROOT / "setup.py"), run_name="flags")
NVCC = SETUP["find_nvcc"]()
DEADLINE_S = 300

pytestmark = pytest.mark.skipif(NVCC is None, reason="no nvcc of CUDA 13 (CUDA_HOME, PATH, CUDA wheels)")

# Kernels that move whole shards, by what their names contain: each must have 16-byte loads and stores.
WIDE = {"reduce_kernel": 4, "scale_kernel": 2, "update_kernel": 12}
WIDE_LOADS_ONLY = {"squares_kernel": 2}


def output_of(command, **options):
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                          timeout=DEADLINE_S, stdin=subprocess.DEVNULL, **options)
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="session")
def plugin():
    """Warnings, spills and local memory fail here: the strict flags make them errors."""
    return SETUP["build_plugin"](NVCC, BUILD, strict=True)


@pytest.fixture(scope="session")
def ptx(tmp_path_factory):
    """kernel name -> its PTX."""
    kernels, target = {}, tmp_path_factory.mktemp("ptx") / "kernels.ptx"
    for source in sorted((ROOT / "csrc" / "cuda").glob("*.cu")):
        flags = [flag for flag in SETUP["NVCC_FLAGS"] if not flag.startswith("-gencode")]
        output_of([NVCC, *flags, "-arch=compute_90", "-ptx", f"-I{ROOT / 'csrc'}", source, "-o", target])
        for name, body in re.findall(r"\.entry (\w+)\((.*?)^\}", target.read_text(), re.MULTILINE | re.DOTALL):
            kernels[name] = body
    return kernels


def kernels_named(kernels, part, count):
    found = {name: body for name, body in kernels.items() if part in name}
    assert len(found) == count, sorted(kernels)
    return found


def test_every_architecture_is_in_the_plugin(plugin):
    text = plugin.read_bytes()
    for _, code in SETUP["CUDA_ARCHITECTURES"]:
        for name in re.findall(r"sm_\d+", code):
            assert name.encode() in text, name


def test_strict_flags_catch_local_memory(tmp_path):
    source = tmp_path / "bad.cu"
    source.write_text("__global__ void k(int *to, int n) { int a[99]; for (int i = 0; i < 99; i++) a[i] = to[i];"
                      " *to = a[n]; }\n")
    flags = [*SETUP["NVCC_FLAGS"], *SETUP["STRICT_NVCC_FLAGS"]]
    done = subprocess.run([NVCC, *flags, "-c", source, "-o", tmp_path / "bad.o"], capture_output=True, text=True,
                          timeout=DEADLINE_S, stdin=subprocess.DEVNULL)
    assert done.returncode != 0 and "Local memory used" in done.stdout + done.stderr


def test_ptx_has_wide_accesses(ptx):
    for part, count in {**WIDE, **WIDE_LOADS_ONLY}.items():
        for name, body in kernels_named(ptx, part, count).items():
            assert re.search(r"\bld\.global(\.\w+)*\.v4\.", body), f"{name} has no 16-byte load"
            if part in WIDE:
                assert re.search(r"\bst\.global(\.\w+)*\.v4\.", body), f"{name} has no 16-byte store"
            assert not re.search(r"\b(ld|st)\.local\b", body), f"{name} uses local memory"


def test_nothing_is_contracted(ptx):
    """A product and a sum in one rounding would give other bits than the CPU; the fused ones are in / and sqrt only."""
    for part in ("reduce_kernel", "scale_kernel", "squares_kernel", "update_kernel"):
        for name, body in ptx.items():
            if part in name:
                assert not re.search(r"\bfma\.rn\.f(32|64)\b", body), name
                assert not re.search(r"\b(div|sqrt|rcp|rsqrt)\.(approx|full)|\.ftz\b", body), name


def cuda_tool(name):
    places = [Path(path, "nvidia", "cu13", "bin", name) for path in (sysconfig.get_path("platlib"),)]
    return next((place for place in [*places, Path(shutil.which(name) or "")] if place.is_file()), None)


@pytest.mark.skipif(not (cuda_tool("cuobjdump") and cuda_tool("nvdisasm")),
                    reason="no cuobjdump and nvdisasm (nvidia-cuda-cuobjdump, nvidia-cuda-nvdisasm)")
@pytest.mark.parametrize("architecture", [code for _, codes in SETUP["CUDA_ARCHITECTURES"]
                                          for code in re.findall(r"sm_\d+", codes)])
def test_machine_code_has_wide_accesses(plugin, architecture):
    path = os.pathsep.join([str(cuda_tool("nvdisasm").parent), os.environ["PATH"]])
    text = output_of([cuda_tool("cuobjdump"), "-sass", "-arch", architecture, plugin], env={**os.environ, "PATH": path})
    kernels = dict(re.findall(r"Function : (\w+)\n(.*?)(?=Function : |\Z)", text, re.DOTALL))
    for part, count in {**WIDE, **WIDE_LOADS_ONLY}.items():
        for name, body in kernels_named(kernels, part, count).items():
            assert re.search(r"\bLDG\.\S*\b128\b", body), f"{name} has no 16-byte load"
            if part in WIDE:
                assert re.search(r"\bSTG\.\S*\b128\b", body), f"{name} has no 16-byte store"
    for name, body in kernels.items():
        assert not re.search(r"\b(LDL|STL)\b", body), f"{name} uses local memory"


def test_plugin_needs_the_c_library_only(plugin):
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", output_of(["readelf", "-d", plugin]))
    allowed = ("libc.so", "libm.so", "libdl.so", "libpthread.so", "librt.so", "ld-linux")
    assert needed and all(name.startswith(allowed) for name in needed), needed


def test_plugin_exports_its_table_only(plugin):
    listed = output_of(["nm", "-D", "--defined-only", plugin])
    assert [line.split()[-1] for line in listed.splitlines()] == [SETUP["PLUGIN_EXPORT"]]


def test_nothing_is_compiled_twice(plugin):
    before = {path: path.stat().st_mtime_ns for path in BUILD.iterdir() if path.suffix in (".o", ".so")}
    assert SETUP["build_plugin"](NVCC, BUILD, strict=True) == plugin
    assert before == {path: path.stat().st_mtime_ns for path in BUILD.iterdir() if path.suffix in (".o", ".so")}
