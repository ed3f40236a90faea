"""Types and help of the public surface: mypy --strict accepts a program that uses all of it, and every name is explained."""

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import zero_c  # noqa: E402
import zero_c.plan  # noqa: E402
import zero_c.torch  # noqa: E402

PACKAGE = Path(zero_c.__file__).parent
PROGRAM = Path(__file__).with_name("typed_program.py")
STUBS = {PACKAGE / "_init.pyi": zero_c._init, PACKAGE / "_last_step.pyi": zero_c._last_step,
         PACKAGE / "_checkpoint.pyi": zero_c._checkpoint, PACKAGE / "_profile.pyi": zero_c._profile,
         PACKAGE / "_arrays.pyi": zero_c._arrays, PACKAGE / "plan.pyi": zero_c.plan,
         PACKAGE / "torch" / "__init__.pyi": zero_c.torch}
CLASSES = {"zero_c.ShardedOptimizer": zero_c.ShardedOptimizer, "zero_c.Communicator": zero_c.Communicator,
           "zero_c.Profile": zero_c._profile.Profile,
           "zero_c.torch.ShardedOptimizer": zero_c.torch.ShardedOptimizer, "zero_c.torch.GradScaler": zero_c.torch.GradScaler}


def public(kind):
    """A class's own public methods and properties."""
    return {name: value for name, value in vars(kind).items() if not name.startswith("_")
            and (callable(value) or isinstance(value, (property, classmethod)) or inspect.isgetsetdescriptor(value)
                 or inspect.ismethoddescriptor(value))}


def checked(program, cache):
    """mypy's verdict."""
    return subprocess.run([sys.executable, "-m", "mypy", "--strict", "--cache-dir", cache, program], cwd=program.parent, text=True,
                          capture_output=True, timeout=600, env={**os.environ, "MYPYPATH": str(PACKAGE.parent)})


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    pytest.importorskip("mypy")
    return tmp_path_factory.mktemp("mypy")


def test_a_program_that_uses_everything_is_well_typed(cache, tmp_path):
    program = tmp_path / "program.py"  # not in tests/, whose other files are not typed
    program.write_text(PROGRAM.read_text())
    done = checked(program, cache)
    assert done.returncode == 0, done.stdout + done.stderr
    program.write_text("import zero_c.torch\nzero_c.torch.ShardedOptimizer([], stage=4)\n")
    assert "arg-type" in checked(program, cache).stdout


def test_the_program_uses_everything():
    text = PROGRAM.read_text()
    names = [f"zero_c.{name}" for name in zero_c.__all__] + [f"zero_c.torch.{name}" for name in zero_c.torch.__all__]
    names += [f"zero_c.plan.{name}" for name in zero_c.plan.__all__]
    names += [f".{name}(" for name in public(zero_c.torch.ShardedOptimizer) | public(zero_c.ShardedOptimizer)]
    assert [name for name in names if not re.search(re.escape(name) + (r"\b" if name[-1] != "(" else ""), text)] == []


@pytest.mark.parametrize("stub", STUBS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_stubs_have_the_signatures_of_the_sources(stub):
    module, found = STUBS[stub], {}
    for node in ast.parse(stub.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = (getattr(module, node.name), node)
        elif isinstance(node, ast.ClassDef):
            kind = getattr(module, node.name)
            members = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
            found |= {f"{node.name}.{name}": (getattr(kind, name), item) for name, item in members.items()}
            assert set(public(kind)) <= {*members, *(item.target.id for item in node.body if isinstance(item, ast.AnnAssign))}
            if hasattr(kind, "__dataclass_fields__"):
                fields = [item.target.id for item in node.body if isinstance(item, ast.AnnAssign)]
                assert fields == list(kind.__dataclass_fields__), node.name
    for name, (function, node) in found.items():
        if isinstance(function, property):
            continue
        arguments = node.args
        wanted = arguments.posonlyargs + arguments.args + [arguments.vararg] + arguments.kwonlyargs + [arguments.kwarg]
        assert list(inspect.signature(function).parameters) == [argument.arg for argument in wanted if argument], name


def test_every_public_name_is_explained():
    named = {f"{module.__name__}.{name}": getattr(module, name) for module in (zero_c, zero_c.torch, zero_c.plan)
             for name in module.__all__ if name != "__version__"}
    named |= {f"{path}.{name}": value for path, kind in CLASSES.items() for name, value in public(kind).items()}
    assert [name for name, value in named.items() if len((value.__doc__ or "").strip()) < 10] == []


def test_help_says_who_must_call():
    """Every method of the torch optimizer says that it is collective, or is one of those that are not."""
    local = {"scale", "no_sync", "zero_grad", "memory", "traffic", "profile", "state_dict", "join", "before_replay"}
    told = {name for name, value in public(zero_c.torch.ShardedOptimizer).items() if re.search("collective", value.__doc__, re.I)}
    assert told - {"join"} == set(public(zero_c.torch.ShardedOptimizer)) - local
