"""What torch ranks do in test_checkpoint_torch.py: one model with everything that a checkpoint must hold, saved and loaded."""

import json
import os
import re
import signal
import threading
import time
from pathlib import Path

import numpy
import torch
from torch import nn

import zero_c
from models import fill, same_bits
from rank_checkpoint import digest, error_of, peak_of, unnamed, without
from zero_c import _blocks
from zero_c.torch import ShardedOptimizer

ROWS = 12  # of a global batch; every number of ranks up to 4 divides it
RULES = {"adamw": {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1}, "amsgrad": {"optimizer": "adam", "lr": 0.01, "amsgrad": True},
         "sgd": {"optimizer": "sgd", "lr": 0.01, "momentum": 0.9, "nesterov": True}, "plain": {"optimizer": "sgd", "lr": 0.01}}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 9), nn.LayerNorm(9), nn.Linear(9, 8)

    def forward(self, x):
        return x + self.second(torch.tanh(self.norm(self.first(x))))


class Net(nn.Module):
    """Tied, frozen, 0-d, empty, unused and channels_last parameters; buffers of several dtypes, and one that is not saved."""

    def __init__(self, seed, dtype=torch.float32):
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.head = nn.Linear(8, 13, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.convolution = nn.Conv2d(2, 5, 3, padding=1)
        self.frozen = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.scale, self.empty, self.unused = (nn.Parameter(torch.zeros(shape)) for shape in ((), (0, 3), (5,)))
        fill(self, torch.Generator().manual_seed(seed))
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)
        self.to(dtype).to(memory_format=torch.channels_last)
        self.register_buffer("mask", torch.arange(8) % (seed + 2) == 0)
        self.register_buffer("count", torch.tensor(seed))
        self.register_buffer("table", torch.full((3,), float(seed), dtype=dtype), persistent=False)
        self.norm.running_mean.fill_(0.1 * seed)
        self.eval()

    def forward(self, tokens):
        x = self.frozen(self.embedding(tokens)) * self.scale.exp()
        for block in self.blocks:
            x = block(x)
        x = self.norm(x.flatten(0, 1)).view(x.shape)
        picture = x.view(len(x), 2, 3, 8)
        x = x * (1 + self.convolution(picture).tanh().mean((1, 2, 3)))[:, None, None]
        return self.head(x.masked_fill(self.mask, 0.5)) + self.empty.sum()


def build(stage, rule="adamw", seed=0, dtype="float32", **options):
    model = Net(seed, getattr(torch, dtype))
    named = list(model.named_parameters())
    groups = [{"params": named[::2], "tag": f"even {seed}", "initial_lr": 0.3 + seed}, {"params": named[1::2], "lr": 0.02 * (seed + 1)}]
    units = {"units": list(model.blocks)} if stage == 3 else {}
    opt = ShardedOptimizer(groups, module=model, stage=stage, comm=zero_c.init(), bucket_mb=0.001, **RULES[rule] | units | options)
    return model, opt


def loss_of(model, step, comm):
    ids = torch.randint(0, 13, (ROWS, 6), generator=torch.Generator().manual_seed(step))
    share = ROWS // comm.world_size
    ids = ids[comm.rank * share:(comm.rank + 1) * share]
    return nn.functional.cross_entropy(model(ids).float().flatten(0, 1), ids.roll(1, 1).flatten())


def train(model, opt, first, steps):
    """Losses of this rank."""
    losses = []
    for step in range(first, first + steps):
        loss = loss_of(model, step, opt._comm)
        opt.scale(loss).backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


def everything(model, opt):
    """All that a checkpoint must bring back, name -> tensor or text. Collective."""
    found = {}
    for name, p in model.named_parameters():
        found[f"weight {name}"] = opt.full_param(p).clone() if opt._stage == 3 or id(p) in opt._index else p.detach().clone()
    for name, buffer in model.named_buffers():
        if name != "table":
            found[f"buffer {name}"] = buffer.clone()
    names = [opt._managed[index][0] for _, index, _, _ in opt._numbered()]
    numbers = {number: name for (number, *_), name in zip(opt._numbered(), names, strict=True)}
    full = opt.full_state_dict()
    for number, state in full["state"].items():
        found |= {f"{key} {numbers[number]}": value.clone() for key, value in state.items()}
    found["groups"] = repr([{key: value for key, value in group.items() if key not in ("params", "param_names")}
                            for group in full["param_groups"]])
    found["scale"], found["steps"] = repr(opt._scale.state_dict()), repr(opt.last_step.steps)
    return found


def same(one, other):
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    for key, value in one.items():
        if isinstance(value, torch.Tensor):
            same_bits(value, other[key], key)
        else:
            assert value == other[key], f"{key}: {value} and {other[key]}"


def kept_file(folder, name="everything"):
    return Path(folder).with_name(Path(folder).name + f"-{name}.pt")


def saved(folder, stage, rule="adamw", seed=0, how="save", **options):
    """Trains, saves, keeps beside it what was saved; losses of the ten steps after it."""
    model, opt = build(stage, rule, seed, **options)
    train(model, opt, 0, 3)
    if how == "save":
        opt.save(folder)
    else:
        opt.async_save(folder)
    state = everything(model, opt)
    if opt._comm.rank == 0:
        torch.save(state, kept_file(folder))
    losses = train(model, opt, 3, 10)
    opt.wait_saved()
    return losses


def loaded(folder, stage, rule="adamw", trained=True, **options):
    """The same losses from the checkpoint, in a model that began elsewhere; all that was saved is there."""
    model, opt = build(stage, rule, 4, **options)
    if trained:
        train(model, opt, 70, 2)
    opt.load(folder)
    state = everything(model, opt)
    same(torch.load(kept_file(folder)), state)
    assert model.table.tolist() == [4.0] * 3
    return train(model, opt, 3, 10)


def all_loads(cases, **options):
    """loaded() for several (folder, stage)."""
    return [loaded(folder, stage, **options) for folder, stage in cases]


def all_saves(cases, **options):
    return [saved(folder, stage, **options) for folder, stage in cases]


# ---- other things that happen around a save --------------------------------------------------


def between_backward_and_step(folder, stage, idle):
    """The step after a save there is the step without one; with `idle` rank 0 takes no part in the backward."""
    results = []
    for how in ("save", "async_save", None):
        model, opt = build(stage)
        train(model, opt, 0, 1)
        if opt._comm.rank or not idle:
            loss_of(model, 5, opt._comm).backward()
        if how:
            getattr(opt, how)(folder)
        opt.step()
        results.append(everything(model, opt))
        opt.wait_saved()
    for other in results[:2]:
        same(results[2], other)


def tied_and_frozen(folder, stage):
    """Weights load into a plain model; a strict load names the tied one only."""
    from safetensors.torch import load_file, load_model

    model, opt = build(stage)
    train(model, opt, 0, 2)
    opt.save(folder)
    state = everything(model, opt)
    told = json.loads((Path(folder) / "zero_c.json").read_text())["manifest"]["tensors"]
    assert {tensor["name"]: tensor["aliases"] for tensor in told if tensor["aliases"]} == {"embedding.weight": ["head.weight"]}
    path = next(Path(folder).glob("weights-*"))
    plain = Net(7)
    load_model(plain, path)
    for name, p in plain.named_parameters():
        same_bits(p.detach(), state[f"weight {name}"], name)
    for name, buffer in plain.named_buffers():
        if name != "table":
            same_bits(buffer, state[f"buffer {name}"], name)
    other = Net(8)
    result = other.load_state_dict(load_file(path), strict=False)
    assert result.missing_keys == ["head.weight"] and not result.unexpected_keys
    assert torch.equal(other.head.weight, plain.embedding.weight)
    untied = Net(8)
    untied.head.weight = nn.Parameter(untied.head.weight.detach().clone())
    opt.wait_saved()
    alone = ShardedOptimizer(untied, comm=opt._comm, **RULES["adamw"])
    return error_of(lambda: alone.load(folder))


def frozen_otherwise(folder, stage):
    """What was frozen is trained here: refused, and nothing changes."""
    build(stage)[1].save(folder)
    model = Net(4)
    model.frozen.requires_grad_(True)
    named = list(model.named_parameters())
    units = {"units": list(model.blocks)} if stage == 3 else {}
    opt = ShardedOptimizer([{"params": named[::2]}, {"params": named[1::2]}], module=model, stage=stage, comm=zero_c.init(),
                           **RULES["adamw"] | units)
    before = everything(model, opt)
    text = error_of(lambda: opt.load(folder))
    same(before, everything(model, opt))
    return text


def refused(folder, stage, rule="adamw", **options):
    """The error of a load, which changes nothing: values, groups, loss scale."""
    model, opt = build(stage, rule, 4, **options)
    train(model, opt, 70, 2)
    before = everything(model, opt)
    text = error_of(lambda: opt.load(folder))
    same(before, everything(model, opt))
    return text


def loss_scale(folder, stage):
    """The schedule of a dynamic loss scale goes on where it was."""
    from zero_c.torch._scale import LossScale

    model, opt = build(stage, loss_scale="dynamic")
    train(model, opt, 0, 2)
    opt._scale.value, opt._scale.good = 4.0, LossScale.INTERVAL - 1
    opt.save(folder)
    model, other = build(stage, seed=3, loss_scale="dynamic")
    other.load(folder)
    assert (other._scale.value, other._scale.good) == (4.0, LossScale.INTERVAL - 1)
    train(model, other, 2, 1)
    return other._scale.value


def loss_scales(folder, stage):
    """A dynamic scale starts anew after any other setting; the others keep their own."""
    start = (2.0**16, 0)

    def scale(opt):
        return opt._scale.value, opt._scale.good

    _, none = build(stage)
    _, always = build(stage, loss_scale=128.0)
    _, dynamic = build(stage, loss_scale="dynamic")

    def passed(source, target):
        dynamic._scale.value, dynamic._scale.good = 4.0, 9
        source.save(folder)
        target.load(folder)
        return scale(target)

    assert passed(none, dynamic) == start
    assert passed(dynamic, none) == (1.0, 0) and passed(none, dynamic) == start
    assert passed(always, dynamic) == start
    assert passed(dynamic, always) == (128.0, 0) and passed(none, always) == (128.0, 0)
    assert passed(dynamic, dynamic) == (4.0, 9)
    local = none.state_dict()
    dynamic.load_state_dict(local)
    assert scale(dynamic) == start


def tensor_lr(folder, stage):
    found = []
    for lr in (torch.tensor(0.1), torch.tensor([0.1])):
        model, opt = build(stage)
        opt.param_groups[0]["lr"] = lr
        opt.save(folder)
        model, other = build(stage, seed=2)
        other.param_groups[0]["lr"] = torch.full_like(lr, 0.7)
        other.load(folder)
        found.append([isinstance(other.param_groups[0]["lr"], torch.Tensor) and torch.equal(other.param_groups[0]["lr"], lr),
                      isinstance(other.param_groups[0]["betas"], tuple), other.param_groups[0]["tag"],
                      other.param_groups[0]["initial_lr"]])
    return found


def added_group(folder, stage):
    """A group that was added later is in the checkpoint."""
    def make(seed):
        model, opt = build(stage, seed=seed)
        extra = nn.Parameter(torch.full((7,), float(seed)))
        opt.add_param_group({"params": [("extra", extra)], "lr": 0.5 + seed})
        for step in range(2):
            (loss_of(model, step, opt._comm) + extra.sum()).backward()
            opt.step()
        return opt, extra

    opt, extra = make(0)
    opt.save(folder)
    other, loaded_extra = make(3)
    other.load(folder)
    same_bits(extra.detach(), loaded_extra.detach(), "extra")
    return other.param_groups[2]["lr"]


def odd_buffer(folder):
    model = nn.Linear(2, 2)
    model.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
    opt = ShardedOptimizer(model, comm=zero_c.init(), **RULES["adamw"])
    return error_of(lambda: opt.save(folder)), os.path.exists(folder)


# ---- in the background -----------------------------------------------------------------------


def slowly(seconds):
    """Writes of this process take a while from now on; returns what undoes it."""
    real = os.pwrite

    def slow(*args):
        time.sleep(seconds)
        return real(*args)

    os.pwrite = slow
    return lambda: setattr(os, "pwrite", real)


def trains_on(folder, stage):
    """Training between async_save() and its end does not change what is saved, nor the save the training."""
    undo = slowly(0.05)
    try:
        losses = saved(folder, stage, how="async_save")
    finally:
        undo()
    return losses, loaded(folder, stage)


def fails_in_thread(folder, stage, rank):
    """The thread of one rank cannot write: all ranks hear of it at the next call; the old checkpoint stays, and a save works."""
    model, opt = build(stage)
    train(model, opt, 0, 1)
    opt.save(folder)
    state = everything(model, opt)
    train(model, opt, 1, 1)
    real = os.fsync

    def full(file):
        if threading.current_thread() is not threading.main_thread():
            raise OSError(28, "No space left on device")
        return real(file)

    if opt._comm.rank == rank:
        os.fsync = full
    try:
        opt.async_save(folder)
        losses = train(model, opt, 2, 1)
        text = error_of(opt.wait_saved)
    finally:
        os.fsync = real
    opt._comm.barrier()
    left = sorted(name for name in os.listdir(folder))
    _, other = (fresh := build(stage, seed=4))
    other.load(folder)
    same(state, everything(*fresh))
    opt.async_save(folder)
    opt.save(folder)
    return text, len(left), losses, len(os.listdir(folder))


def says_that_it_is_done_late(folder):
    """Rank 0's thread cannot write, and looks what is to be removed; only then rank 1's says that it has written."""
    model, opt = build(2)
    train(model, opt, 0, 1)
    opt.save(folder)
    rank, main, flush, look = opt._comm.rank, threading.main_thread(), os.fsync, Path.iterdir

    def late(file):
        if threading.current_thread() is not main:
            if rank == 0:
                raise OSError(28, "No space left on device")
            time.sleep(0.3)
        return flush(file)

    def slow(path):
        names, end = list(look(path)), time.monotonic() + 1.5
        while rank == 0 and threading.current_thread() is not main and time.monotonic() < end and not any(
                re.fullmatch(r"done-\w+-1", name) for name in os.listdir(path)):
            time.sleep(0.001)
        return iter(names)

    os.fsync, Path.iterdir = late, slow
    try:
        opt.async_save(folder)
        text = error_of(opt.wait_saved)
    finally:
        os.fsync, Path.iterdir = flush, look
    opt._comm.barrier()
    return text, sorted(os.listdir(folder))


def dies_in_thread(folder):
    """Rank 1 is killed while its thread writes: what rank 0 hears, how long that took, and what is in the folder."""
    model, opt = build(2)
    train(model, opt, 0, 1)
    opt.save(folder)
    state = everything(model, opt)
    train(model, opt, 1, 1)
    real = os.pwrite

    def fatal(*args):
        if threading.current_thread() is not threading.main_thread():
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args)

    if opt._comm.rank == 1:
        os.pwrite = fatal  # in a process that ends
    start = time.monotonic()
    text = error_of(lambda: (opt.async_save(folder), opt.wait_saved()))
    seconds = time.monotonic() - start
    torch.save(state, kept_file(folder))
    return text, seconds, len(os.listdir(folder))


def forks_meanwhile(folder):
    """A process forked during a save in the background does not keep the folder locked."""
    model, opt = build(2)
    undo = slowly(0.2)
    child = None
    try:
        opt.async_save(folder)
        if opt._comm.rank == 0:
            child = os.fork()
            if child == 0:
                time.sleep(20)
                os._exit(0)
    finally:
        undo()
    opt.wait_saved()
    text = error_of(lambda: opt.save(folder))
    if child:
        os.kill(child, 9)
        os.waitpid(child, 0)
    return text


def fails_then(folder, then):
    """The thread of rank 1 cannot write, and what comes next hears of it: another save, or a load; then all goes on."""
    model, opt = build(2)
    opt.save(folder)
    state, real = everything(model, opt), os.fsync

    def full(file):
        if threading.current_thread() is not threading.main_thread():
            raise OSError(28, "No space left on device")
        return real(file)

    train(model, opt, 0, 1)
    if opt._comm.rank == 1:
        os.fsync = full
    try:
        opt.async_save(folder)
        opt._saving._thread.join()
        opt._comm.barrier()
    finally:
        os.fsync = real
    text = error_of(lambda: getattr(opt, then)(folder))
    opt.load(folder)
    same(state, everything(model, opt))
    return text


def no_memory(folder, how):
    """Rank 0 has no memory for a buffer, while rank 1 helps to put parameters together that are not row-major; the next works."""
    from zero_c.torch import _checkpoint

    model, opt = build(3)
    real = _checkpoint.as_values

    def fail(tensor):
        raise MemoryError("no memory for this buffer")

    if opt._comm.rank == 0:
        _checkpoint.as_values = fail
    try:
        text = error_of(lambda: getattr(opt, how)(folder))
    finally:
        _checkpoint.as_values = real
    return text, error_of(lambda: (getattr(opt, how)(folder), opt.wait_saved()))


def peak_while_saving(folder, stage, dtype, layers, width):
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).to(getattr(torch, dtype))
    opt = ShardedOptimizer(model, stage=stage, comm=zero_c.init(), bucket_mb=0.25, **RULES["adamw"])
    model(torch.ones(1, width, dtype=getattr(torch, dtype))).sum().backward()
    opt.step()
    return peak_of(lambda: opt.save(folder))


def chain(stage, frozen, order, seed):
    """Six layers of 1 KiB, some frozen, listed in this order."""
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(6)))
    fill(model, torch.Generator().manual_seed(seed))
    for k in frozen:
        model[k].requires_grad_(False)
    named = [(f"{k}.weight", model[k].weight) for k in order]
    units = {"units": list(model)} if stage == 3 else {}
    return model, ShardedOptimizer([{"params": named}], module=model, stage=stage, comm=zero_c.init(), **RULES["adamw"] | units)


def damage_between_stages(folder, saver, loader):
    """Damage of each tensor of a file that another stage wrote, with some parameters frozen; see rank_checkpoint.unnamed."""
    full = _blocks.BLOCK_BYTES
    _blocks.BLOCK_BYTES = 64
    try:
        chain(saver, [1, 4], [0, 1, 2, 3, 4, 5], 0)[1].save(folder)
    finally:
        _blocks.BLOCK_BYTES = full
    model, opt = chain(loader, [1, 4], [5, 1, 0, 4, 3, 2], 1)
    return unnamed(opt, folder, lambda: state_digest(model, opt), opt._comm)


def state_digest(model, opt):
    found = {name: opt.full_param(p).numpy().copy() if opt._stage == 3 else p.detach().numpy().copy()
             for name, p in model.named_parameters()}
    for number, state in opt.full_state_dict()["state"].items():
        found |= {f"{number} {key}": torch.as_tensor(value).numpy() for key, value in state.items()}
    return digest(found)


# ---- the weights alone -----------------------------------------------------------------------


def weights_alone(folder, stage, dtype):
    """save_weights() of a model with tied, frozen, channels_last and other odd parameters, twice; the tensors it must hold."""
    from safetensors.torch import load_file

    model, opt = build(stage, dtype=dtype)
    train(model, opt, 0, 2)
    path = f"{folder}/weights {stage}.safetensors"
    for _ in range(2):
        opt.save_weights(path)
        found, wanted = load_file(path), opt.full_model_state_dict()
        opt._comm.barrier()
    del wanted["head.weight"]  # tied
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    for name, value in wanted.items():
        same_bits(found[name], value.cpu(), name)
    return os.listdir(folder), Path(path).stat().st_mode & 0o777


def weights_refused(folder, rank, what):
    """The errors of save_weights() where it cannot write; `what` may be calls that fail on one rank."""
    model, opt = build(2)
    path = Path(folder) / {"parent is a file": "file/w.safetensors", "is a folder": "folder", "no folder": "none/w.safetensors",
                           "nothing": ".", "own folders": f"rank {opt._comm.rank}/w"}.get(what, "w")
    undo = without([what], 28) if hasattr(os, what) and opt._comm.rank == rank else lambda: None
    text = error_of(lambda: opt.save_weights(path))
    undo()
    opt._comm.barrier()
    left = sorted(str(found.relative_to(folder)) for found in Path(folder).rglob("*"))
    held = [os.readlink(f"/proc/self/fd/{entry}") for entry in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{entry}")]
    opt._comm.barrier()
    return text, left, [name for name in held if name.startswith(str(folder))]


def script_that_ends(folder):
    """For a process of its own: the interpreter ends right after async_save()."""
    model, opt = build(2)
    train(model, opt, 0, 3)
    slowly(0.05)
    opt.async_save(folder)


def inside_gathered(folder, stage):
    model, opt = build(stage)
    train(model, opt, 0, 2)
    with opt.gathered(model.blocks[0].first.weight) as (weight,):
        copy = weight.clone()
        opt.save(folder)
    with opt.no_sync():
        loss_of(model, 9, opt._comm).backward()
        opt.save(folder)
    from safetensors.torch import load_file

    same_bits(load_file(next(Path(folder).glob("weights-*")))["blocks.0.first.weight"], copy)
    opt.step()
    numpy.testing.assert_equal(len(os.listdir(folder)), 4)


if __name__ == "__main__":
    script_that_ends(os.environ["CHECKPOINT_FOLDER"])
