"""What ranks do in test_profile.py: train with the record of work on and off, and look at memory over a step."""

import contextlib
import hashlib
import sys
import warnings
from pathlib import Path

import numpy

import zero_c

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
STEPS = 3


def build(stage, width=96, **how):
    import torch

    from zero_c.torch import ShardedOptimizer

    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.add_module("inner", torch.nn.Linear(width, width))
    model.add_module("blocks", torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(3)]))
    return model, ShardedOptimizer(model, stage=stage, lr=1e-2, max_grad_norm=1.0, comm=zero_c.init(), **how)


def digest_of(model, opt):
    bits = hashlib.sha256()
    with opt.gathered():
        for parameter in model.parameters():
            bits.update(parameter.detach().numpy().tobytes())
    return bits.hexdigest()


def trained(stage, path=None, capacity=None):
    """The bits of some steps; with a path also the trace of all but the first, and what the engine counted in them."""
    import torch

    model, opt = build(stage, bucket_mb=0.02)
    profile = opt.profile() if capacity is None else opt.profile(capacity)
    rank = opt._comm.rank
    losses, told = [], []
    for step in range(STEPS + 1):
        watched = path is not None and step > 0
        if step == 1:
            opt.traffic()
        with warnings.catch_warnings(record=True) as caught, profile if watched else contextlib.nullcontext():
            warnings.simplefilter("always")
            data = torch.Generator().manual_seed(10 * step + rank)
            with profile.span("forward"):
                loss = model(torch.randn(5, 96, generator=data)).square().mean()
            with profile.span("backward"):
                loss.backward()
            with profile.span("step"):
                opt.step()
        losses.append(loss.item().hex())
        told += [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
    found = {"losses": losses, "traffic": opt.traffic(), "buckets": opt._engine.plan()["buckets"], "told": told,
             "lost": profile.lost, "spans": len(profile.spans), "left": opt._engine.take_work(), "memory": opt.memory()["buffers"]}
    if path is not None:
        profile.save(path)
    return found | {"digest": digest_of(model, opt)}


def refused(folder):
    """The sentences of what cannot be done."""
    _, opt = build(2)
    profile, told = opt.profile(), []

    def attempt(call):
        try:
            call()
        except (ValueError, zero_c.Error) as error:
            told.append(f"{type(error).__name__}: {error}")

    with profile:
        attempt(profile.__enter__)
        attempt(lambda: profile.save(f"{folder}/trace.json"))
    attempt(lambda: profile.save(f"{folder}/missing/trace.json"))
    for capacity in (0, True, 1.5):
        attempt(lambda wrong=capacity: opt.profile(wrong))
    attempt(lambda: opt._engine.profile(-1))
    opt.traffic()   # and all goes on
    opt.zero_grad()
    profile.save(f"{folder}/trace.json")
    return told


def arrays(path):
    """The optimizer of plain arrays, in an exception's way."""
    values = [numpy.ones(3000, numpy.float32)]
    opt = zero_c.ShardedOptimizer(values, "sgd", lr=0.1, stage=1, bucket_mb=0.002, comm=zero_c.init())
    profile = opt.profile()
    with contextlib.suppress(KeyError), profile:
        opt.add_grad(0, numpy.ones(3000, numpy.float32))
        opt.step()
        raise KeyError("the profile is left as by a return")
    opt.add_grad(0, numpy.ones(3000, numpy.float32))
    opt.step()
    profile.save(path)
    return {"kinds": sorted({span.lane for span in profile.spans}), "buckets": opt._engine.plan()["buckets"],
            "reduces": sum(span.lane == "reduce" for span in profile.spans)}


def memory_over_step(stage, rows, width):
    """What the examples' watch saw of a step whose forward keeps 3 times rows * width numbers."""
    import torch

    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    import meter
    import timeline
    from watch import Watch

    warm = torch.nn.Linear(width, width)
    warm(torch.ones(rows, width)).sum().backward()
    del warm
    base = meter.held_bytes()
    model, opt = build(stage, width)
    watch = Watch(None, base)
    for number in range(timeline.SAMPLED - 1, timeline.STEPS):
        x = torch.randn(rows, width)
        with watch.step(number):
            with watch.phase("forward"):
                loss = model(x).square().mean()
            with watch.phase("backward"):
                loss.backward()
            with watch.phase("step"):
                opt.step()
    return {"seen": watch.memory, "parameters": sum(p.numel() for p in model.parameters())}
