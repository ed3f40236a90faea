"""What a build must be like: layers of the sources, exports, stubs, instruction sets."""

import ast
import fnmatch
import inspect
import platform
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import zero_c
from zero_c import _core

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"

# Layer of each file, by the start of its name; the longest that fits counts.
LAYERS = {
    "zc_status": "words", "zc_dtype": "words", "zc_hash": "words", "zc_point": "words",
    "partition": "pure", "optim": "pure", "elem_update": "pure", "cpu_": "pure", "strides": "pure",
    "shm_segment": "system", "shm_sync": "system", "shm_process": "system", "cpu_threads": "system", "cpu_dispatch": "system",
    "device.h": "interfaces", "comm.h": "interfaces", "device_step": "interfaces",
    "cpu_device": "backends", "cpu_slots": "backends", "shm_": "backends", "hub_": "backends", "local_comm": "backends", "mem_": "backends", "comm.c": "backends",
    "cu.h": "cuda", "cuda_": "cuda", "nccl_": "cuda", "plugin_status": "cuda", "emu_cuda.h": "cuda",
    "cuda_load": "backends", "cuda/cuda_plugin.h": "plugin",
    "engine": "engine", "bucket": "engine",
    "zero_c.h": "api", "zc_api": "api glue",
    "py_": "python", "dlpack_abi.h": "python",
}
MAY_INCLUDE = {
    "words": {"words"},
    "pure": {"words", "pure"},
    "system": {"words", "pure", "system"},
    "interfaces": {"words", "pure", "interfaces"},
    "backends": {"words", "pure", "system", "interfaces", "backends", "plugin"},
    "cuda": {"words", "pure", "interfaces", "cuda"},
    "engine": {"words", "pure", "interfaces", "engine", "api"},
    "api": {"words", "pure"},
    "api glue": {"words", "pure", "interfaces", "backends", "engine", "api"},
    "python": {"api", "python"},
}
# <...> lines: the engine and what is pure know the C library only, Python is for the glue, NumPy for one file of it.
C_LIBRARY = {"assert.h", "errno.h", "float.h", "immintrin.h", "inttypes.h", "limits.h", "math.h", "stdarg.h", "stdatomic.h",
             "stdbool.h", "stddef.h", "stdint.h", "stdio.h", "stdlib.h", "string.h"}
C_LIBRARY_ONLY = {"words", "pure", "interfaces", "engine", "api"}
SOURCES = sorted(CSRC.glob("*.[ch]")) + sorted((CSRC / "cuda").glob("*.*"))


def layer_of(name):
    starts = [start for start in LAYERS if name.startswith(start)]
    assert starts, f"csrc/{name} belongs to no layer; add it to LAYERS"
    return LAYERS[max(starts, key=len)]


@pytest.mark.parametrize("source", SOURCES, ids=[source.name for source in SOURCES])
def test_includes_follow_the_layers(source):
    layer = layer_of(source.name)
    for kind, name in re.findall(r'^\s*#\s*include\s+(["<])([^">]+)[">]', source.read_text(), re.MULTILINE):
        if kind == '"':
            assert layer_of(name) in MAY_INCLUDE[layer], f"{source.name} ({layer}) includes {name} ({layer_of(name)})"
        elif layer in C_LIBRARY_ONLY:
            assert name in C_LIBRARY, f"{source.name} ({layer}) includes <{name}>"
        elif "numpy" in name:
            assert source.name == "py_dlpack.c", f"{source.name} includes <{name}>"
        elif name in ("Python.h", "structmember.h"):
            assert layer == "python", f"{source.name} includes <{name}>"


def test_the_table_of_layers_is_this_one():
    """That of docs/design.md names every file, in its layer, and nothing that is not there."""
    titles = {"0 words": "words", "1 pure": "pure", "1 system": "system", "2 interfaces": "interfaces", "3 backends": "backends",
              "3 plugin": "cuda", "4 engine": "engine", "5 C API": "api", "6 glue": "python"}
    found = {source: [] for source in SOURCES}
    for title, names in re.findall(r"^\| (\d [\w ]+) \| (.*?) \|", (ROOT / "docs" / "design.md").read_text(), re.M):
        for name in re.findall(r"`([^`]+)`", names.replace("`csrc/cuda/`", "")) if title in titles else ():
            named = [source for source in SOURCES if (source.parent.name == "cuda") == (title == "3 plugin")
                     and (fnmatch.fnmatch(source.name, name) or fnmatch.fnmatch(source.stem, name))]
            assert named, f"docs/design.md names {name}"
            for source in named:
                found[source].append(titles[title])
    for source, layers in found.items():
        assert set(layers) == {layer_of(source.name).removesuffix(" glue")}, source.name


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module.split(".")[0]


def test_torch_is_imported_in_two_places():
    package = ROOT / "zero_c"
    for path in package.rglob("*.py"):
        if path.parent not in (package / "torch", package / "convert"):
            assert "torch" not in set(imports_of(path)), path
    loaded = subprocess.run([sys.executable, "-c", "import sys, zero_c, zero_c.convert; print(sorted(sys.modules))"], capture_output=True,
                            text=True, check=True, cwd=ROOT / "tests").stdout
    assert "'torch'" not in loaded


def test_a_source_distribution_has_what_the_repository_has(tmp_path):
    if not (ROOT / ".git").exists():
        pytest.skip("an unpacked source distribution: there is no repository to compare it with")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    subprocess.run([sys.executable, "setup.py", "-q", "egg_info", "--egg-base", tmp_path], cwd=ROOT, capture_output=True, check=True)
    packed = set((tmp_path / "zero_c.egg-info" / "SOURCES.txt").read_text().splitlines())
    wanted = {name for name in tracked.split("\0") if name and name not in (".ci/run", ".gitignore")}
    assert sorted(name for name in wanted - packed if (ROOT / name).exists()) == []


# ---- the built module ------------------------------------------------------


def test_only_the_init_function_is_exported():
    listed = subprocess.run(["nm", "-D", "--defined-only", _core.__file__], capture_output=True, text=True, check=True)
    assert [line.split()[-1] for line in listed.stdout.splitlines()] == ["PyInit__core"]


def stub_of(module):
    return ast.parse((Path(zero_c.__file__).parent / f"{module}.pyi").read_text()).body


def members_of(node):
    return {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}


def is_dunder(name):
    return name.startswith("__") and name.endswith("__")


def test_stub_names_what_the_module_has():
    stub = {node.name for node in stub_of("_core") if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    assert stub == {name for name in vars(_core) if not is_dunder(name)}


CLASSES = [node for node in stub_of("_core") if isinstance(node, ast.ClassDef) and not node.bases]


@pytest.mark.parametrize("node", CLASSES, ids=[node.name for node in CLASSES])
def test_stub_classes_have_the_members_of_the_module(node):
    built = vars(getattr(_core, node.name))
    stub = members_of(node)
    assert {name for name in stub if not is_dunder(name)} == {name for name in built if not is_dunder(name)}
    for name, item in stub.items():
        assert name in built, f"{node.name}.{name}"
        if getattr(built[name], "__text_signature__", None) and not is_dunder(name):
            wanted = [argument.arg for argument in item.args.posonlyargs + item.args.args + item.args.kwonlyargs]
            signature = inspect.signature(getattr(getattr(_core, node.name), name))
            assert list(signature.parameters) == [name for name in wanted if name not in ("self", "cls")], name


def test_package_stub_names_everything_public():
    stub = {alias.asname or alias.name for node in stub_of("__init__") if isinstance(node, ast.ImportFrom)
            for alias in node.names} | {"__version__"}
    assert set(zero_c.__all__) <= stub
    assert all(hasattr(zero_c, name) for name in zero_c.__all__)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="these instruction sets are x86-64's")
@pytest.mark.parametrize(("isa", "has", "has_not"), [("base", "%xmm", "%[yz]mm"), ("avx2", "%ymm", "%zmm"),
                                                     ("avx512", "%zmm", None)])
def test_kernels_use_their_instruction_set(isa, has, has_not, tmp_path):
    setup = runpy.run_path(str(ROOT / "setup.py"), run_name="flags")
    source, target = CSRC / f"cpu_kernels_{isa}.c", tmp_path / "kernels.o"
    subprocess.run(["gcc", *setup["FLAGS"], *setup["X86_FLAGS"].get(source.name, []), "-c", source, "-o", target], check=True)
    text = subprocess.run(["objdump", "-d", "--no-show-raw-insn", target], capture_output=True, text=True, check=True).stdout
    # The update of fp32 parameters divides and takes a square root of whole vectors.
    for instruction in ("sqrtps", "divps", "mulps"):
        assert re.search(rf"\bv?{instruction}\b.*{has}", text), f"{isa}: no {instruction} of {has}"
    assert has_not is None or not re.search(has_not, text), f"{isa}: has {has_not}"
