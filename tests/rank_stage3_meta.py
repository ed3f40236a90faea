"""What torch ranks do in test_stage3_meta.py: models on the meta device, and weights from files."""

import copy
import pathlib

import torch
from models import same_bits
from safetensors.torch import save_file
from torch import nn

import zero_c
from zero_c.torch import ShardedOptimizer, _meta


class Block(nn.Module):
    """Layers whose constructors draw values in several ways, and one with buffers."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.batch_norm = nn.BatchNorm1d(width)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.down(torch.relu(self.up(x)))
        return self.batch_norm(x.transpose(1, 2)).transpose(1, 2)


class Model(nn.Module):
    """A recurrent layer (which keeps its own list of its parameters), units, and a tied head."""

    def __init__(self, width=16, blocks=4):
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.recurrent = nn.LSTM(width, width, batch_first=True)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, 50)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.recurrent(self.embedding(ids))[0]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Own(nn.Module):
    """A parameter that nothing but the constructor gives values, and a buffer likewise."""

    def __init__(self, buffer=False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))
        self.layer = nn.Linear(3, 3)
        if buffer:
            self.register_buffer("table", torch.arange(3.0))


def built(seed, device="cpu", dtype=torch.float32, make=Model):
    """The dtype from the start: values are drawn in it."""
    torch.manual_seed(seed)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            return make()
    finally:
        torch.set_default_dtype(torch.float32)


def loss_of(model, rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    ids = torch.randint(0, 50, (3, 7), generator=generator)
    return nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())


def train(model, opt, rank, steps=3):
    losses = []
    for step in range(steps):
        loss = loss_of(model, rank, step)
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def compare(opt, model, values, what):
    for name, parameter in model.named_parameters():
        same_bits(opt.full_param(parameter), values[name], f"{what}: {name}")


def seeded(dtype, units):
    """The same seed gives the same model as on the CPU; and it trains as stage 2 trains that one."""
    comm, dtype = zero_c.init(), getattr(torch, dtype)
    plain = built(3, dtype=dtype)
    ours = built(3, "meta", dtype)
    names = [name for name, _ in ours.named_parameters()]
    opt = ShardedOptimizer(ours, stage=3, lr=0.01, comm=comm, units={"blocks": None, "nested": [Block, nn.MultiheadAttention, nn.LayerNorm],
                                                                     "none": []}[units])
    assert names == [name for name, _ in ours.named_parameters()]
    assert ours.head.weight is ours.embedding.weight
    compare(opt, ours, dict(plain.named_parameters()), "after construction")
    for (name, buffer), other in zip(ours.named_buffers(), plain.buffers(), strict=True):
        same_bits(buffer, other, f"buffer {name}")
    other = ShardedOptimizer(plain, stage=2, lr=0.01, comm=comm)
    assert train(plain, other, comm.rank) == train(ours, opt, comm.rank)
    compare(opt, ours, dict(plain.named_parameters()), "after training")


def only_rank_0_counts():
    """Ranks with different seeds get rank 0's values."""
    comm = zero_c.init()
    model = built(10 + comm.rank, "meta")
    opt = ShardedOptimizer(model, stage=3, comm=comm)
    compare(opt, model, dict(built(10).named_parameters()), "rank 0's seed")


def groups_of_meta_parameters():
    """Groups may list parameters that are still on the meta device; parameters keep what was put on them."""
    comm = zero_c.init()
    model = built(3, "meta")
    model.head.bias.note = "kept"
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    rest[0].requires_grad_(False)
    opt = ShardedOptimizer([{"params": decay, "weight_decay": 0.1}, {"params": rest}], module=model, stage=3, comm=comm)
    assert model.head.bias.note == "kept"
    own = {id(p) for p in model.parameters()}
    assert all(id(p) in own and not p.is_meta for group in opt.param_groups for p in group["params"])
    assert [p.requires_grad for p in opt.param_groups[1]["params"]] == [p is not rest[0] for p in rest]
    compare(opt, model, dict(built(3).named_parameters()), "in groups")
    train(model, opt, comm.rank, 2)


def state_of(model):
    """Values as a file may hold them: one name for each tensor."""
    kept, seen = {}, set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            kept[name] = tensor.detach().clone()
    return kept


def from_files(folder, device, parts):
    """Values, buffers among them, come from files; a dtype of the file's is converted."""
    comm = zero_c.init()
    source = built(5)
    source.blocks[1].batch_norm.running_mean.fill_(0.25)
    state = state_of(source)
    paths = [pathlib.Path(folder) / f"{number}.safetensors" for number in range(parts)]
    if comm.rank == 0:
        names = list(state)
        for number, path in enumerate(paths):
            save_file({name: state[name].double() if number else state[name] for name in names[number::parts]}, path)
    comm.barrier()
    model = built(6, device)
    opt = ShardedOptimizer(model, stage=3, lr=0.01, weights=paths if parts > 1 else str(paths[0]), comm=comm)
    compare(opt, model, dict(source.named_parameters()), "from files")
    for (name, buffer), other in zip(model.named_buffers(), source.buffers(), strict=True):
        same_bits(buffer, other, f"buffer {name}")
    plain = copy.deepcopy(source)
    assert train(model, opt, comm.rank) == train(plain, ShardedOptimizer(plain, lr=0.01, comm=comm), comm.rank)


def files_and_initialisation(folder):
    """What the files lack is initialised; what they have is theirs, also in a module that needs initialisation."""
    comm = zero_c.init()
    source, path = built(5), pathlib.Path(folder) / "weights.safetensors"
    state = {name: tensor for name, tensor in state_of(source).items() if not name.endswith("bias")}
    if comm.rank == 0:
        save_file(state, path)
    comm.barrier()
    model = built(6, "meta")
    opt = ShardedOptimizer(model, stage=3, weights=path, comm=comm)
    for name, parameter in model.named_parameters():
        value = opt.full_param(parameter)
        if name in state:
            same_bits(value, state[name], name)
        else:
            assert value.isfinite().all() and value.abs().max() <= 1, name


def own_function():
    """init= is called once for every module that has something to initialise, children first."""
    comm, called = zero_c.init(), []

    def init(module):
        called.append(type(module).__name__)
        for parameter in module.parameters(recurse=False):
            parameter.fill_(len(called))
        for buffer in module.buffers(recurse=False):
            buffer.fill_(7)

    model = built(0, "meta", make=lambda: Own(buffer=True))
    opt = ShardedOptimizer(model, stage=3, init=init, comm=comm)
    assert called == ["Linear", "Own"]
    assert (opt.full_param(model.layer.bias) == 1).all() and (opt.full_param(model.weight) == 2).all()
    assert (model.table == 7).all()


WEIGHTS = {"weight": torch.ones(3, 3), "layer.weight": torch.ones(3, 3), "layer.bias": torch.ones(3)}
FILES = {  # what the file holds
    "no safetensors file": None,
    "prefix": {f"module.{name}": tensor for name, tensor in WEIGHTS.items()},
    "one name more": WEIGHTS | {"extra": torch.ones(2)},
    "empty": {},
    "whole numbers": WEIGHTS | {"layer.weight": torch.ones(3, 3, dtype=torch.int64)},
    "two files": WEIGHTS,
    "bad data": WEIGHTS,
    "bad data of a buffer": WEIGHTS | {"table": torch.arange(3.0)},
}


def fails_at(bad, read):
    """Files.read on a disk with a bad block in this tensor; only rank 0 reads."""
    def reads(files, name, like):
        if name == bad:
            raise OSError("a bad block")
        return read(files, name, like)

    return reads


def refused(folder, what):
    """The error of a construction that cannot be; the model is as it was."""
    comm = zero_c.init()
    make = {"buffer": lambda: Own(buffer=True), "bad data of a buffer": lambda: Own(buffer=True)}.get(what, Own)
    model = built(0, "meta", make=make)
    options = {"stage": 3, "comm": comm}
    path = pathlib.Path(folder) / f"{what}.safetensors"
    if what == "left out":
        options["init"] = lambda module: None
    elif what == "buffer":
        options["init"] = lambda module: [p.fill_(1) for p in module.parameters(recurse=False)]
    elif what == "no file":
        options["weights"] = path
    elif what == "shape":
        if comm.rank == 0:
            save_file({"layer.weight": torch.ones(3, 4)}, path)
        comm.barrier()
        options["weights"] = [path]
    elif what in FILES:
        if comm.rank == 0:
            path.write_bytes(b"no file of this kind") if FILES[what] is None else save_file(FILES[what], path)
        comm.barrier()
        options["weights"] = [path, path] if what == "two files" else path
    elif what == "stage 2":
        options["stage"] = 2
    elif what == "raises":
        def init(module):
            raise RuntimeError("from the caller's function")
        options["init"] = init
    parameters = list(model.parameters())
    read = _meta.Files.read
    if what.startswith("bad data"):
        _meta.Files.read = fails_at({"bad data": "layer.weight"}.get(what, "table"), read)
    try:
        ShardedOptimizer(model, **options)
    except (ValueError, RuntimeError, OSError, zero_c.Error) as error:
        assert all(mine is other and mine.is_meta for mine, other in zip(model.parameters(), parameters, strict=True))
        return f"{type(error).__name__}: {error}"
    finally:
        _meta.Files.read = read
    raise AssertionError("nothing was raised")


def fails_on_one(what, victim):
    """The error where the initialisation fails on one rank only; all are fit to build the model again."""
    comm = zero_c.init()
    model = built(0, "meta", make=lambda: Own(buffer=True))

    def init(module):
        at_fault = comm.rank == victim
        if what == "raises" and at_fault:
            raise KeyError("from the caller's function")
        for parameter in module.parameters(recurse=False):
            if not (what == "parameter" and at_fault):
                parameter.fill_(1)
        for buffer in module.buffers(recurse=False):
            if not (what == "buffer" and at_fault):
                buffer.fill_(1)

    message = None
    try:
        ShardedOptimizer(model, stage=3, optimizer="sgd", lr=0.1, init=init, comm=comm)
    except (ValueError, KeyError, zero_c.Mismatch) as error:
        message = f"{type(error).__name__}: {error}"
    assert all(parameter.is_meta for parameter in model.parameters())
    what = "nothing"
    ShardedOptimizer(model, stage=3, optimizer="sgd", lr=0.1, init=init, comm=comm)
    return message


def peak(blocks, width):
    """Most bytes of parameter tensors that were alive at once during construction, beside the shards; and a unit's."""
    comm = zero_c.init()
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(blocks)))
    most = 0

    def init(module):
        nonlocal most
        for parameter in module.parameters(recurse=False):
            parameter.fill_(1)
        live = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
        most = max(most, sum(live.values()))

    ShardedOptimizer(model, stage=3, optimizer="sgd", lr=0.1, init=init, comm=comm)
    return most, 4 * (width * width + width)
