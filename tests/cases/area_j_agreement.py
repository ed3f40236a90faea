"""Rows of areas H and J that need no fault: what ranks agree on."""

import numpy
import torch
from torch import nn

import zero_c
from cases.rows import raised, row
from models import batch, same_bits


@row(112)
def a_replaced_parameter_is_named(here):
    model = nn.Linear(2, 2)
    opt = here.optimizer(model, optimizer="sgd", lr=0.1)
    model.weight = nn.Parameter(torch.zeros(2, 2))

    def use():
        model(batch(0, 0, (1, 2))).sum().backward()
        opt.step()

    error = raised(use, zero_c.Error, ValueError, RuntimeError)
    assert "weight" in str(error), str(error)


@row(144, ranks=(2, 3))
def all_ranks_start_from_rank_0(here):
    torch.manual_seed(here.rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    nn.init.orthogonal_(model[2].weight)
    model[1].running_mean.fill_(here.rank + 1.0)
    opt = here.optimizer(model, optimizer="sgd", lr=0.1)
    torch.manual_seed(0)
    wanted = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    nn.init.orthogonal_(wanted[2].weight)
    for (name, ours), theirs in zip(model.named_parameters(), wanted.parameters(), strict=True):
        same_bits(here.value(ours), theirs.detach(), name)
    same_bits(model[1].running_mean, torch.ones(4), "buffer")
    model(batch(here.rank, 0, (4, 3))).sum().backward()
    opt.step()


@row(160, ranks=(3,), stages=(None,))
def the_operation_is_not_ignored(here):
    for dtype in (numpy.float32, numpy.float64, numpy.int32, numpy.int64):
        for op, value in (("sum", 6), ("max", 3), ("min", 1), ("prod", 6)):
            result = here.comm.all_reduce(numpy.array([here.rank + 1], dtype=dtype), op)
            assert result[0] == value, (op, dtype)
        if dtype in (numpy.float32, numpy.float64):
            assert here.comm.all_reduce(numpy.array([here.rank + 1], dtype=dtype), "mean")[0] == 2
    raised(lambda: here.comm.all_reduce(numpy.ones(1), "average"), ValueError)
