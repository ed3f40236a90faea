"""Models for test_plan.py, and what torch ranks do with them: build an optimizer, train, tell what it held and sent."""

import torch
from stage3_models import CASES
from torch import nn

import zero_c
from zero_c.torch import ShardedOptimizer


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """Blocks between an embedding and a head that share a weight; with a buffer."""

    def __init__(self, width=36, blocks=5):
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, width), nn.Linear(width, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.register_buffer("scale", torch.full((width,), 0.5))

    def forward(self, ids):
        x = self.embedding(ids) * self.scale
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build():
    return Model()


def with_frozen():
    model = Model()
    model.blocks[1].requires_grad_(False)
    return model


def no_module():
    return {"weight": 1}


def needs_values():
    return nn.Linear(int(torch.ones(()).item()), 3)


def leaves():
    raise SystemExit(3)


not_callable = 7


def train(stage, options, rounds):
    """memory() and traffic() around steps of so many backwards each."""
    comm = zero_c.init()
    torch.manual_seed(2)
    model = build()
    opt = ShardedOptimizer(model, comm=comm, stage=stage, **options)
    opt.traffic()  # counts from here on
    found = {"memory": [opt.memory()], "traffic": []}
    for number, count in enumerate(rounds):
        for turn in range(count):
            ids = torch.randint(50, (4, 3), generator=torch.Generator().manual_seed(10 * number + turn + 100 * comm.rank))
            model(ids).square().sum().backward()
        found["memory"].append(opt.memory())
        opt.step()
        opt.zero_grad()
        found["traffic"].append(opt.traffic())
    return found


def hold(names, stages, options):
    """memory() of an optimizer of each of these models at each of these stages, with its default units."""
    comm, found = zero_c.init(), {}
    for name in names:
        for stage in stages:
            found[f"{name} {stage}"] = ShardedOptimizer(CASES[name].build(), comm=comm, stage=stage, **options).memory()
    return found
