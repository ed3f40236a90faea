"""What torch ranks do in test_stage3_memory.py: train at stage 3, and tell what was sent and held."""

import contextlib
import ctypes
import gc

import torch
from torch import nn

from rank_stage3 import communicator, make_optimizer
from stage3_models import CASES
from zero_c.torch import ShardedOptimizer


class Unit(nn.Module):
    """Two matrices; `hidden` decides how large the unit is."""

    def __init__(self, width, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Chain(nn.Module):
    """Units of these sizes, one after the other, between layers that belong to the root."""

    def __init__(self, hidden, width=12):
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Unit(width, each) for each in hidden)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 3)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def layout(opt):
    """What the engine was given: its units (name, level, resident), and its parameters in its own order
    (unit, elements, dtype, frozen)."""
    units = opt._windows.units
    unit_of = {id(p): unit.index for unit in units for _, p in unit.members}
    by_index = {index: p for unit in units for _, p in unit.members for index in [opt._sharded[id(p)]]}
    params = [(unit_of[id(p)], p.numel(), str(p.dtype).split(".")[1], id(p) not in opt._index)
              for _, p in sorted(by_index.items())]
    return {"units": [(unit.name, unit.level, unit.resident) for unit in units], "params": params}


def backward(model, rank, number):
    x = torch.randn(4, 12, generator=torch.Generator().manual_seed(100 * number + rank))
    model(x).square().sum().backward()


def traffic(hidden, frozen, setting, rounds, deferred=0, **options):
    """traffic() of a step after each of these numbers of synchronised backwards, before which there are `deferred`
    in no_sync(). frozen: beginnings of parameters' names."""
    comm = communicator()
    torch.manual_seed(3)
    model = Chain(hidden)
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(tuple(frozen)))
    opt = make_optimizer(model, comm, 3, list(model.blocks), **setting, **options)
    opt.traffic()  # counts from here on
    found = []
    for number, count in enumerate(rounds):
        with opt.no_sync():
            for turn in range(deferred):
                backward(model, comm.rank, 10 * number + turn)
        for turn in range(count):
            backward(model, comm.rank, 10 * number + 5 + turn)
        before = opt.traffic()
        opt.step()
        opt.zero_grad()
        found.append({"before": before, "step": opt.traffic()})
    return {"layout": layout(opt), "steps": found}


def memory(names, setting, **options):
    """For each of these models: its layout, and memory() when it is built and after each of two steps."""
    comm, found = communicator(), {}
    for name in names:
        case = CASES[name]
        model = case.build()
        opt = make_optimizer(model, comm, 3, case.unit_modules(model), **setting, **options)
        seen = [opt.memory()]
        for step in range(2):
            case.loss(model, comm.rank, step).backward()
            opt.step()
            opt.zero_grad()
            seen.append(opt.memory())
        found[name] = {"layout": layout(opt), "memory": seen, "ring_bytes": opt._engine.plan()["ring_bytes"]}
    return found


# ---- what the system sees ---------------------------------------------------------------


class Tower(nn.Module):
    """Square matrices and next to no activations: what is held is parameters and what belongs to them."""

    def __init__(self, units, width):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(units))

    def forward(self, x):
        for block in self.blocks:
            x = x + 0.1 * block(x)
        return x.square().mean()


def pss():
    """Bytes of this process, each page divided by its users; Rss would count a slot once for each unit mapped to it.
    Without pages that only cache files (the text of programs), which come and go with other processes."""
    kib = {}
    with open("/proc/self/smaps_rollup") as rollup:
        for word in map(str.split, rollup):
            if word[-1] == "kB":
                kib[word[0]] = int(word[1])
    return 1024 * (kib["Pss_Anon:"] + kib["Pss_Shmem:"] if "Pss_Anon:" in kib else kib["Pss:"])


def trim():
    gc.collect()
    with contextlib.suppress(AttributeError):  # a libc without it
        ctypes.CDLL(None).malloc_trim(0)


def step(opt, model, width, number, mark=lambda: None):
    x = torch.randn(2, width, generator=torch.Generator().manual_seed(number))
    loss = model(x)
    mark()
    loss.backward()
    mark()
    opt.step()
    opt.zero_grad()
    mark()
    return loss.item().hex()


def seen_by_system(stage, units, width, steps, **options):
    """Pss above what it was before the model was made: the highest while it is built and trained, and in the end,
    with what malloc keeps given back; bytes that the engine counts; losses."""
    comm = communicator()
    torch.set_num_threads(1)

    def build(units, width):
        torch.manual_seed(1)
        model = Tower(units, width)
        return model, ShardedOptimizer(model, comm=comm, stage=stage, lr=1e-3, **options)

    model, opt = build(3, 16)  # loads what the libraries load at first use
    for number in range(2):
        step(opt, model, 16, number)
    del model, opt
    trim()
    comm.barrier()
    base = pss()
    samples = []

    def mark(*_):
        samples.append(pss() - base)

    torch.manual_seed(1)
    model = Tower(units, width)
    mark()
    opt = ShardedOptimizer(model, comm=comm, stage=stage, lr=1e-3, **options)
    mark()
    hooks = [p.register_post_accumulate_grad_hook(mark) for p in list(model.parameters())[::max(1, units // 8)]]
    losses = [step(opt, model, width, number, mark) for number in range(steps)]
    for hook in hooks:
        hook.remove()
    comm.barrier()
    trim()
    comm.barrier()  # a page that a peer has not given back yet would be counted in halves
    found = {"end": pss() - base, "peak": max(samples), "counted": opt.memory()["total"], "losses": losses,
             "elements": sum(p.numel() for p in model.parameters())}
    comm.barrier()
    return found
