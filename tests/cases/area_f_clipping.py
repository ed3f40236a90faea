"""Rows of area F: clipping and loss scaling."""

import math
import random
import time
import warnings

import torch
from torch import nn

import zero_c
from cases.rows import row
from models import OneProcess, Tied, batch, close, feed, same_bits


@row(81)
def every_rank_sees_the_overflow_of_one(here):
    from zero_c.torch import GradScaler

    sleeps = random.Random(here.rank)
    p = nn.Parameter(torch.zeros(70))
    opt = here.optimizer([p], optimizer="sgd", lr=1.0)
    for _ in range(20):
        scaler = GradScaler(init_scale=2.0)
        scaler.scale(here.feed([p], [math.inf if here.rank == 0 else 1.0])).backward()
        time.sleep(sleeps.random() * 0.01)
        scaler.step(opt)
        scaler.update()
        assert scaler.get_scale() == 1.0
        opt.zero_grad()
    same_bits(here.value(p), torch.zeros(70), "parameter after skipped steps")


@row(83, ranks=(1, 2))
def clipping_sees_unscaled_gradients(here):
    for inside in (True, False):
        p = nn.Parameter(torch.zeros(2))
        opt = here.optimizer([p], optimizer="sgd", lr=1.0, loss_scale=1024.0, max_grad_norm=10.0 if inside else None)
        opt.scale(here.feed([p], [torch.tensor([3.0, 4.0])])).backward()
        norm = None if inside else opt.clip_grad_norm_(10.0)
        opt.step()
        close(torch.as_tensor(float(opt.last_step.norm if inside else norm)), torch.tensor(5.0), "norm")
        close(here.value(p), torch.tensor([-3.0, -4.0]))


@row(85)
def the_norm_is_global(here):
    # elements 0 and 64 of a smallest bucket belong to different ranks
    mean = torch.zeros(128)
    mean[0], mean[64] = 3.0, 4.0
    for inside in (True, False):
        p = nn.Parameter(torch.zeros(128))
        opt = here.optimizer([p], optimizer="sgd", lr=1.0, max_grad_norm=1.0 if inside else None)
        here.feed([p], [mean * 2 * here.rank]).backward()
        norm = None if inside else opt.clip_grad_norm_(1.0)
        opt.step()
        close(torch.as_tensor(float(opt.last_step.norm if inside else norm)), torch.tensor(5.0), "norm")
        close(here.value(p), -mean / 5.0, "clipped update", rtol=1e-5)


@row(87, ranks=(3,))
def padding_and_ties_do_not_show_in_the_norm(here):
    class WithFive(Tied):
        def __init__(self):
            super().__init__()
            self.extra = nn.Parameter(torch.ones(5))

        def forward(self, x, gradient):
            return super().forward(x).square().sum() + feed([self.extra], [gradient])

    model = WithFive()
    reference = OneProcess(model, lambda p: torch.optim.SGD(p, lr=0.1), here.ranks)
    opt = here.optimizer(model, optimizer="sgd", lr=0.1, max_grad_norm=0.5)
    for step in range(3):
        def loss_of(model, rank, step=step):
            return model(batch(rank, step, (3, 2)), batch(rank, step, (5,)))

        loss_of(model, here.rank).backward()
        opt.step()
        reference.backward(loss_of)
        close(torch.as_tensor(float(opt.last_step.norm)), reference.step(max_grad_norm=0.5), "norm")
        here.close_models(model, reference.model)


@row(88)
def the_norm_spans_dtypes(here):
    p, q = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16)), nn.Parameter(torch.zeros(1))
    opt = here.optimizer([p, q], optimizer="sgd", lr=1.0)
    here.feed([p, q], [3.0, 4.0]).backward()
    norm = opt.clip_grad_norm_(1.0)
    close(torch.as_tensor(float(norm)), torch.tensor(5.0))
    opt.step()
    assert p.dtype == torch.bfloat16 and q.dtype == torch.float32
    close(here.value(p), torch.tensor([-0.6]))
    close(here.value(q), torch.tensor([-0.8]), rtol=1e-5)


@row(89)
def skipped_bf16_steps_are_told(here):
    p = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    opt = here.optimizer([p], optimizer="sgd", lr=1.0, skip_nonfinite=True)
    skipped = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in (1, 2, 3, 4):
            value = math.nan if step in (2, 3) and here.rank == here.ranks - 1 else 1.0
            here.feed([p], [value]).backward()
            opt.step()
            skipped.append(bool(opt.last_step.skipped))
            assert bool(opt.last_step.nonfinite) == (step in (2, 3))
    assert skipped == [False, True, True, False]
    assert opt.last_step.steps == 2
    close(here.value(p), torch.full((3,), -2.0))
    assert told, "two steps were skipped without a warning"


@row(90)
def the_scale_has_a_floor_and_an_end(here):
    p = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    opt = here.optimizer([p], optimizer="sgd", lr=1.0, loss_scale="dynamic")
    scales, error = [], None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while error is None and len(scales) < 500:
            opt.scale(here.feed([p], [math.inf])).backward()
            try:
                opt.step()
            except zero_c.Error as told:
                error = told
            scales.append(opt.last_step.scale)
    assert error is not None, f"still skipping after 500 steps at scale {scales[-1]}"
    assert min(scales) == 1.0
    assert all(after == max(1.0, before / 2) for before, after in zip(scales, scales[1:-1], strict=False)), scales


@row(92)
def scaler_works_on_the_cpu(here):
    from zero_c.torch import GradScaler

    p = nn.Parameter(torch.zeros(5, dtype=torch.float16))
    opt = here.optimizer([p], optimizer="sgd", lr=1.0)
    scaler = GradScaler(init_scale=1024.0)
    for _ in range(2):
        scaler.scale(here.feed([p], [here.rank + 1.0])).backward()
        scaler.unscale_(opt)
        norm = opt.clip_grad_norm_(100.0)
        close(torch.as_tensor(float(norm)), torch.tensor(5 ** 0.5 * (here.ranks + 1) / 2))
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    close(here.value(p), torch.full((5,), -1.0 * (here.ranks + 1)))
