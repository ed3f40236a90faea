"""What other users of a host can see or reach of a job: nothing. And nothing that is read can bring code with it."""

import ast
import os
import re
import stat
from pathlib import Path

import numpy
import pytest
from ranks import RankGroup

import zero_c

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = sorted((ROOT / "zero_c").rglob("*.py"))

# ---- no memory that others can read -------------------------------------------


def shared_memory():
    """(what it is, mode) of each descriptor and mapping of this process that is a file of shared memory."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{fd}")
            mode = os.fstat(int(fd)).st_mode
        except OSError:  # the one that listed the folder
            continue
        if re.match(r"/memfd:|/dev/shm/|/dev/zero", name):
            found.add((name, stat.S_IMODE(mode)))
    for mapping in os.listdir("/proc/self/map_files"):
        try:
            name, mode = os.readlink(f"/proc/self/map_files/{mapping}"), os.stat(f"/proc/self/map_files/{mapping}").st_mode
        except OSError:  # without CAP_CHECKPOINT_RESTORE mappings cannot be opened, by anybody
            continue
        if re.match(r"/memfd:|/dev/shm/", name):
            found.add((name, stat.S_IMODE(mode)))
    return sorted(found)


def exposed():
    """On a rank with an optimizer in shared memory: its memory, and the sockets that have a name in the file system."""
    os.umask(0)  # as loose as it gets
    comm = zero_c.init()
    weight = numpy.ones((64, 64), numpy.float32)
    opt = zero_c.ShardedOptimizer([("w", weight)], shared_params=True, comm=comm)
    opt.add_grad(0, weight)
    opt.step()
    sockets = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()[1:] if len(line.split()) > 7]
    return shared_memory(), [name for name in sockets if "zero_c" in name and not name.startswith("@")]


def exposed_stage_3():
    """The same with the ring of slots, which torch's optimizer has."""
    import torch

    from zero_c.torch import ShardedOptimizer

    os.umask(0)
    comm = zero_c.init()
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 1))
    opt = ShardedOptimizer(model, stage=3, lr=0.1)
    model(torch.ones(2, 32)).sum().backward()
    opt.step()
    memory = shared_memory()
    comm.barrier()
    return memory, []


@pytest.mark.parametrize("body", [exposed, exposed_stage_3])
def test_memory_belongs_to_the_user_alone(body):
    before = set(os.listdir("/dev/shm"))
    with RankGroup(2) as ranks:
        found = ranks.run(body)
        assert set(os.listdir("/dev/shm")) <= before, "there is a name in /dev/shm"
    for memory, sockets in found:
        ours = [(name, mode) for name, mode in memory if "zero_c" in name]
        assert ours and not sockets, (memory, sockets)
        assert all(mode & 0o077 == 0 for _, mode in ours), [(name, oct(mode)) for name, mode in ours]


def test_descriptors_are_not_inherited():
    with zero_c.init(rank=0, world_size=1) as comm:
        opt = zero_c.ShardedOptimizer([numpy.ones(100, numpy.float32)], comm=comm)
        for fd in map(int, os.listdir("/proc/self/fd")):
            try:
                name = os.readlink(f"/proc/self/fd/{fd}")
            except OSError:
                continue
            assert "zero_c" not in name or not os.get_inheritable(fd), name
        assert len(opt) == 1


# ---- no pickle ---------------------------------------------------------------------

UNPICKLERS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "multiprocessing"}
READERS = {"eval", "exec", "compile", "__import__"}


def names_of(node):
    """"torch.load" of torch.load(...)."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([*([node.id] if isinstance(node, ast.Name) else []), *reversed(parts)])


def risks(path):
    """Lines of a source that could run code that a file or a socket brings."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            modules = [node.module] if isinstance(node, ast.ImportFrom) and node.level == 0 else []
        for module in modules:
            if module.split(".")[0] in UNPICKLERS:
                yield node.lineno, f"imports {module}"
        if not isinstance(node, ast.Call):
            continue
        name, given = names_of(node.func), {keyword.arg: keyword.value for keyword in node.keywords}
        safe = isinstance(given.get("weights_only"), ast.Constant) and given["weights_only"].value is True
        if name in READERS or re.search(r"(^|\.)(Unpickler|loads_unsafe|read_pickle)$", name):
            yield node.lineno, f"calls {name}"
        elif name == "torch.load" and not safe:
            yield node.lineno, "torch.load without weights_only=True"
        elif name in ("numpy.load", "np.load"):
            yield node.lineno, f"{name}: arrays of objects are pickles"
        elif name.endswith(("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")):
            yield node.lineno, f"{name} sends pickles"


@pytest.mark.parametrize("path", PACKAGE, ids=[str(path.relative_to(ROOT)) for path in PACKAGE])
def test_nothing_is_unpickled(path):
    assert list(risks(path)) == []


@pytest.mark.parametrize("line", ["import pickle", "from pickle import loads", "torch.load(x)", "torch.load(x, weights_only=False)",
                                  "numpy.load(x)", "eval(x)", "torch.distributed.all_gather_object(x, y)", "a.Unpickler(x)"])
def test_what_unpickles_is_seen(line, tmp_path):
    (tmp_path / "line.py").write_text(line)
    assert list(risks(tmp_path / "line.py"))


def test_the_core_knows_no_pickle():
    for path in sorted((ROOT / "csrc").glob("*.c")):
        assert not re.search(r"PyMarshal|PyRun_|Py_CompileString|\"pickle\"", path.read_text()), path
