"""Rows of area E: reduction, averaging and accumulation of gradients."""

import contextlib

import numpy
import torch
from torch import nn

from cases.rows import raised, row
from models import OneProcess, batch, close, feed, mlp, same_bits


def exactly(actual, value):
    close(actual, torch.full(tuple(actual.shape), value), rtol=0, atol=0)


@row(63, ranks=(1, 2))
def every_micro_batch_is_reduced(here):
    p, q = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(300))
    opt = here.optimizer([p, q], optimizer="sgd", lr=1.0)
    for value in (1.0, 2.0, 3.0):
        here.feed([p, q], [value, value]).backward()
    exactly(opt.grad(p), 6.0)
    exactly(opt.grad(q), 6.0)
    opt.step()
    exactly(here.value(p), -6.0)


@row(65)
def the_mean_is_taken_once(here):
    p = nn.Parameter(torch.zeros(3))
    opt = here.optimizer([p], optimizer="sgd", lr=1.0)
    for _ in range(3):
        here.feed([p], [2.0 * here.rank]).backward()  # the sum over two ranks is 2
    exactly(opt.grad(p), 3.0)
    opt.step()
    exactly(here.value(p), -3.0)


@row(67, ranks=(1,))
def one_rank_accumulates_too(here):
    first, second = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(7))
    opt = here.optimizer([first, second], optimizer="sgd", lr=1.0)
    for value in (1.0, 2.0, 3.0):
        here.feed([first, second], [value, value]).backward()
    exactly(opt.grad(first), 6.0)
    exactly(opt.grad(second), 6.0)


@row(68, ranks=(1, 2))
def no_sync_then_sync(here):
    models = []
    for deferred in (False, True):
        model = mlp()
        reference = OneProcess(model, lambda p: torch.optim.SGD(p, lr=0.1), here.ranks)
        opt = here.optimizer(model, optimizer="sgd", lr=0.1)
        for micro in range(3):
            def loss_of(model, rank, micro=micro):
                return model(batch(rank, micro, (2, 3))).square().sum()

            with opt.no_sync() if deferred and micro < 2 else contextlib.nullcontext():
                loss_of(model, here.rank).backward()
                if deferred and micro < 2:
                    assert not any(p.grad.isnan().any() for p in model.parameters())
            reference.backward(loss_of)
        for index, parameter in enumerate(model.parameters()):
            close(opt.grad(parameter), reference.grad(index), f"gradient, deferred: {deferred}")
        opt.step()
        reference.step()
        here.close_models(model, reference.model)
        models.append(model)
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        close(here.value(ours), here.value(theirs))


@row(70, ranks=(2, 3))
def mean_by_default_and_sum_on_request(here):
    for reduce_op, value in ((None, 2.0), ("mean", 2.0), ("sum", 2.0 * here.ranks)):
        p = nn.Parameter(torch.zeros(3))
        options = {} if reduce_op is None else {"reduce_op": reduce_op}
        opt = here.optimizer([p], optimizer="sgd", lr=1.0, **options)
        here.feed([p], [(1.0, 3.0, 2.0)[here.rank]]).backward()
        exactly(opt.grad(p), value)
        opt.step()
        exactly(here.value(p), -value)


@row(72, stages=(None,))
def integer_mean_is_refused(here):
    numbers = numpy.array([4 if here.rank == 0 else 2], dtype=numpy.int32)
    for name in ("mean", "avg"):
        raised(lambda name=name: here.comm.all_reduce(numbers.copy(), name), ValueError, TypeError)
    assert here.comm.all_reduce(numbers, "sum")[0] == 6
    raised(lambda: here.optimizer([torch.zeros(3, dtype=torch.int32)], optimizer="sgd", lr=1.0),
           TypeError, ValueError)


@row(73)
def fp16_sum_does_not_overflow(here):
    p = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    opt = here.optimizer([p], optimizer="sgd", lr=1.0, skip_nonfinite=True)
    here.feed([p], [40000.0]).backward()
    exactly(opt.grad(p), 40000.0)
    opt.step()
    assert not opt.last_step.skipped and not opt.last_step.nonfinite
    exactly(here.value(p), -40000.0)


@row(74)
def tokens_weigh_the_same_on_all_ranks(here):
    # one token of loss 4 on rank 0, three of loss 0 on rank 1; d loss / d p is the loss of a token
    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return self.p * x

    model = Scales()
    opt = here.optimizer(model, optimizer="sgd", lr=1.0)
    tokens = torch.tensor([[4.0], [0.0, 0.0, 0.0]][here.rank])
    count = here.comm.all_reduce(torch.tensor([float(len(tokens))]), "sum")
    loss = model(tokens).sum() * here.ranks / float(count[0])
    loss.backward()
    exactly(opt.grad(model.p), 1.0)
    assert float(here.comm.all_reduce(loss.detach().reshape(1), "sum")[0]) / here.ranks == 1.0


@row(76)
def first_window_starts_from_zero(here):
    for _ in range(4):
        torch.full((1 << 16,), float("nan"))
        numpy.full(1 << 16, numpy.nan)
    p, q = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(20000))
    opt = here.optimizer([p, q], optimizer="adamw", lr=0.1, weight_decay=0.0, max_grad_norm=1e9)
    for _ in range(2):
        here.feed([p, q], [1.0, 1.0]).backward()
    exactly(opt.grad(q), 2.0)
    opt.step()
    close(here.value(q), torch.full((20000,), -0.1))
    close(torch.as_tensor(opt.last_step.norm), torch.tensor(4 * 20005.0).sqrt())


@row(78)
def parameters_left_out_are_the_callers(here):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.ignored = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))

        def forward(self, *gradients):
            return feed([self.w, self.ignored], gradients)

    model = Two()
    ignored = model.ignored
    opt = here.optimizer([model.w], module=model, optimizer="sgd", lr=1.0)
    model(1.0, (1.0, 3.0)[here.rank]).backward()
    exactly(ignored.grad, (1.0, 3.0)[here.rank])  # untouched: a plain autograd gradient
    opt.step()
    same_bits(here.value(ignored), torch.zeros(3), "parameter left out")
    mean = here.comm.all_reduce(ignored.grad.clone(), "sum") / here.ranks
    exactly(torch.as_tensor(mean), 2.0)
