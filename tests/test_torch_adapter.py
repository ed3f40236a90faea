"""The torch adapter on one and two ranks: what autograd does, and what users do to parameters and gradients.

Functions named `on_...` run on each rank; the reference they compare with is
models.OneProcess, plain torch fed the mean over ranks of the gradients.
"""

import contextlib
import copy
import gc
import math
import os
import pickle
import warnings
import weakref

import numpy
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import zero_c  # noqa: E402
from models import OneProcess, batch, close, close_models, feed, fill, mlp, same_bits  # noqa: E402
from ranks import RankGroup  # noqa: E402
from zero_c.torch import GradScaler, ShardedOptimizer  # noqa: E402

STAGES = (0, 1, 2)
RULES = {
    "adamw": ({"lr": 0.01, "weight_decay": 0.1}, torch.optim.AdamW),
    "adam": ({"lr": 0.01, "weight_decay": 0.05, "amsgrad": True}, torch.optim.Adam),
    "sgd": ({"lr": 0.002, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, torch.optim.SGD),
}


@pytest.fixture(scope="module")
def pair():
    with RankGroup(2) as group:
        yield group


def on_rank(name, *args):
    """Runs on_<name> with the default communicator; what each test hands to the ranks."""
    return globals()[f"on_{name}"](zero_c.init(), *args)


def loss_of(step, shape=(4, 3)):
    return lambda model, rank: model(batch(rank, step, shape)).square().sum()


def sgd(model, comm, **options):
    return ShardedOptimizer(model, comm=comm, **{"optimizer": "sgd", "lr": 0.1} | options)


def sgd_reference(model, comm):
    return OneProcess(model, lambda p: torch.optim.SGD(p, lr=0.1), comm.world_size)


def error_of(call, kind):
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


# ---- training ------------------------------------------------------------------


def on_training(comm, stage, rule):
    options, make = RULES[rule]
    model = mlp(sizes=(3, 70, 2))
    reference = OneProcess(model, lambda p: make(p, **options), comm.world_size)
    opt = ShardedOptimizer(model, optimizer=rule, stage=stage, bucket_mb=0.0001, comm=comm, **options)
    for step in range(4):
        if step == 2:
            opt.param_groups[0]["lr"] = reference.optimizer.param_groups[0]["lr"] = 0.003
        loss_of(step)(model, comm.rank).backward()
        reference.backward(loss_of(step))
        for index, p in enumerate(model.parameters()):
            close(opt.grad(p), reference.grad(index), "gradient", rtol=2e-5, atol=2e-5)
        opt.step()
        opt.zero_grad()
        reference.step()
        close_models(model, reference.model, rtol=1e-5, atol=1e-5)
    assert opt.last_step.steps == 4
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("rule", RULES)
def test_training_equals_plain_torch_and_stages_agree(pair, rule):
    first = None
    for stage in STAGES:
        for rank in pair.run(on_rank, "training", stage, rule):
            first = first or rank
            for ours, theirs in zip(rank, first, strict=True):
                assert (ours.view(numpy.uint32) == theirs.view(numpy.uint32)).all()


def on_ulps(comm, stage, rule):
    """Steps from equal values with equal gradients: at most 4 units in the last place each, of the larger value."""
    options, make = RULES[rule]
    generator = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(1000, generator=generator))
    theirs = nn.Parameter(p.detach().clone())
    opt = ShardedOptimizer([p], optimizer=rule, stage=stage, comm=comm, **options)
    plain = make([theirs], **options)
    for step in range(1, 6):
        gradients = [torch.randn(1000, generator=generator) * 10 ** (step - 3) for _ in range(comm.world_size)]
        before = torch.maximum(p.detach().abs(), theirs.detach().abs())
        feed([p], [gradients[comm.rank]]).backward()
        opt.step()
        theirs.grad = sum(gradients) / comm.world_size
        plain.step()
        unit = torch.maximum(before, p.detach().abs()).frexp().exponent.double().exp2() * 2.0**-24
        assert ((p.detach().double() - theirs.detach().double()).abs() <= 4 * step * unit).all()


@pytest.mark.parametrize("rule", RULES)
def test_steps_are_within_4_ulp_of_torch(pair, rule):
    for stage in STAGES:
        pair.run(on_rank, "ulps", stage, rule)


def on_accumulation(comm, stage, kind):
    model = mlp()
    reference = sgd_reference(model, comm)
    opt = sgd(model, comm, stage=stage)
    for step in range(2):
        for micro in range(3):
            deferred = kind == "all deferred" or (kind == "last synchronised" and micro < 2) or (
                kind == "first synchronised" and micro > 0)
            with opt.no_sync() if deferred else contextlib.nullcontext():
                loss_of(3 * step + micro)(model, comm.rank).backward()
            reference.backward(loss_of(3 * step + micro))
        close(opt.grad(model[0].weight), reference.grad(0), "gradient", rtol=2e-6, atol=1e-5)
        opt.step()
        reference.step()
        close_models(model, reference.model, rtol=5e-6, atol=1e-5)
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("kind", ["all synchronised", "last synchronised", "first synchronised", "all deferred"])
def test_accumulation(pair, kind):
    for stage in STAGES:
        pair.run(on_rank, "accumulation", stage, kind)


def on_two_models(comm, stage):
    """A GAN: two optimizers on one communicator, backwards of one through the other."""
    maker, judge = mlp(seed=1, sizes=(2, 4, 3)), mlp(seed=2, sizes=(3, 4, 1))
    references = [sgd_reference(maker, comm), sgd_reference(judge, comm)]
    opts = [sgd(maker, comm, stage=stage), sgd(judge, comm, stage=stage)]
    for step in range(3):
        def fool(net, rank, step=step):
            return judge(net(batch(rank, step, (4, 2)))).square().mean()

        def tell(net, rank, step=step):
            return (net(batch(rank, step + 7, (4, 3))) - 1).square().mean() + net(made[rank]).square().mean()

        made = [references[0].model(batch(rank, step, (4, 2))).detach() for rank in range(comm.world_size)]
        references[1].backward(tell)
        tell(judge, comm.rank).backward()
        opts[1].step()
        references[1].step()
        fool(maker, comm.rank).backward()  # also fills the judge's gradients, which are thrown away
        references[0].backward(lambda net, rank: references[1].model(net(batch(rank, step, (4, 2)))).square().mean())
        references[1].optimizer.zero_grad()
        opts[0].step()
        references[0].step()
        opts[1].zero_grad()
        close_models(maker, references[0].model, rtol=5e-6)
        close_models(judge, references[1].model, rtol=5e-6)


def test_two_optimizers_on_one_communicator(pair):
    for stage in STAGES:
        pair.run(on_rank, "two_models", stage)


# ---- what autograd does -----------------------------------------------------------


class Nested(nn.Module):
    """A layer used several times, at every depth of reentrant checkpointing."""

    def __init__(self, nesting):
        super().__init__()
        self.nesting = nesting
        self.tied, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        if self.nesting == "only inner":
            return checkpoint(self.tied, x, use_reentrant=True)
        if self.nesting == "outer first":
            return self.other(checkpoint(self.tied, x, use_reentrant=True))
        if self.nesting == "tied":
            return checkpoint(self.tied, self.other(checkpoint(self.tied, x, use_reentrant=True)), use_reentrant=True)

        def inner(y):
            return checkpoint(self.tied, y, use_reentrant=True) + self.other(y)

        return checkpoint(lambda y: self.tied(checkpoint(inner, y, use_reentrant=True)), x, use_reentrant=True)


def on_nested(comm, stage, nesting):
    def loss(model, rank):
        return model(batch(rank, 0, (4, 3)).requires_grad_()).square().sum()

    model = fill(Nested(nesting))
    reference = sgd_reference(model, comm)
    opt = sgd(model, comm, stage=stage, lr=0.01)
    reference.optimizer.param_groups[0]["lr"] = 0.01
    for _ in range(2):
        loss(model, comm.rank).backward()
        reference.backward(loss)
        assert opt._engine.rounds == 1
        opt.step()
        reference.step()
        close_models(model, reference.model, rtol=5e-6, atol=1e-6)


@pytest.mark.parametrize("nesting", ["only inner", "outer first", "tied", "deep"])
def test_reentrant_checkpointing_is_one_round(pair, nesting):
    for stage in STAGES:
        pair.run(on_rank, "nested", stage, nesting)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, grad):
        raise RuntimeError("told to fail")


def on_raising(comm, stage, nested):
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    fill(model)
    reference = sgd_reference(model, comm)
    opt = sgd(model, comm, stage=stage)

    def loss(layers, rank, fail=False):
        def body(x):
            x = layers[0](x)
            return layers[1](Fails.apply(x) if fail else x)

        x = batch(rank, 0, (2, 3)).requires_grad_()
        return (checkpoint(body, x, use_reentrant=True) if nested else body(x)).square().sum()

    for retry in range(3):
        assert "told to fail" in error_of(lambda: loss(model, comm.rank, fail=True).backward(), RuntimeError)
        assert all(p.grad is None for p in model.parameters())
        if retry == 2:
            opt.zero_grad()
        loss(model, comm.rank).backward()
        reference.backward(loss)
        opt.step()
        reference.step()
        close_models(model, reference.model, rtol=5e-6, atol=1e-6)


@pytest.mark.parametrize("nested", [False, True])
def test_a_backward_that_raised_is_forgotten(pair, nested):
    for stage in STAGES:
        pair.run(on_rank, "raising", stage, nested)


def on_raising_after_sums(comm):
    model = fill(nn.Linear(3, 3))
    opt = sgd(model, comm)
    loss_of(0)(model, comm.rank).backward()
    # the second layer's parameters have their gradients when this raises
    error_of(lambda: (Fails.apply(model.weight.sum().expand(1)).sum() + model.bias.sum()).backward(), RuntimeError)
    assert model.weight.grad.isnan().all() and model.bias.grad.isnan().all(), "guards of the earlier sums are back"
    if comm.world_size > 1:
        told = error_of(opt.step, zero_c.Error)
        assert "raised" in told
    opt.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    loss_of(0)(model, comm.rank).backward()
    opt.step()
    assert all((p != old).any() for p, old in zip(model.parameters(), before, strict=True))


def test_a_backward_that_raises_after_another(pair):
    pair.run(on_rank, "raising_after_sums")


def on_one_rank_raises(comm):
    model = fill(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    opt = sgd(model, comm)
    between = model[0](batch(comm.rank, 0, (2, 3)))
    if comm.rank == 1:
        error_of(lambda: model[1](Fails.apply(between)).sum().backward(), RuntimeError)
        return error_of(opt.step, zero_c.Mismatch)
    return error_of(lambda: model[1](between).sum().backward(), zero_c.Mismatch)


def test_a_backward_that_raises_on_one_rank(pair):
    for told in pair.run(on_rank, "one_rank_raises"):
        assert "rank 1" in told and "backward" in told


def on_unused(comm, stage):
    model = nn.ModuleDict({"all": nn.Linear(3, 2), "some": nn.Linear(3, 2), "none": nn.Linear(3, 2)})
    fill(model)
    reference = OneProcess(model, lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5), comm.world_size)
    opt = ShardedOptimizer(model, optimizer="adamw", lr=0.1, weight_decay=0.5, stage=stage, comm=comm)

    def loss(net, rank):
        y = net["all"](batch(rank, 0, (2, 3)))
        return (y + net["some"](batch(rank, 1, (2, 3))) if rank == comm.world_size - 1 else y).square().sum()

    for _ in range(2):
        loss(model, comm.rank).backward()
        reference.backward(loss)
        opt.step()
        reference.step()
        close_models(model, reference.model, rtol=5e-6, atol=1e-6)
    full = opt.full_state_dict()["state"]
    assert [float(full[number]["step"]) for number in range(6)] == [2, 2, 2, 2, 0, 0]


def on_held_back(comm, stage, nested):
    """A parameter registered last that is not used keeps the first bucket open, so all other gradients wait."""
    class Chain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(40))
            self.unused = nn.Parameter(torch.zeros(128))

        def forward(self, x):
            for layer in [*self.layers, self.layers[0]]:  # the first one twice: with nesting, a late gradient
                x = torch.tanh(checkpoint(layer, x, use_reentrant=True) if nested else layer(x))
            return x

    def loss(net, rank):
        return net(batch(rank, 0, (2, 12)).requires_grad_()).square().sum()

    model = fill(Chain())
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)  # so that differences do not grow from layer to layer
    reference = sgd_reference(model, comm)
    opt = sgd(model, comm, stage=stage, bucket_mb=0.0001)
    for _ in range(3):
        loss(model, comm.rank).backward()
        reference.backward(loss)
        opt.step()
        reference.step()
        close_models(model, reference.model, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nested", [False, True])
def test_gradients_that_wait_for_a_bucket(pair, nested):
    for stage in STAGES:
        pair.run(on_rank, "held_back", stage, nested)


def on_another_thread(comm):
    import threading

    model = mlp()
    reference = sgd_reference(model, comm)
    opt = sgd(model, comm)
    for step in range(2):
        thread = threading.Thread(target=lambda step=step: loss_of(step)(model, comm.rank).backward())
        thread.start()
        thread.join()
        reference.backward(loss_of(step))
        opt.step()
        reference.step()
        close_models(model, reference.model, rtol=5e-6, atol=1e-6)


def test_backward_in_another_thread(pair):
    pair.run(on_rank, "another_thread")


def on_memory_stays(comm):
    """Nothing is left behind by a step: rounds, late gradients, held ones, backwards that raise."""
    def resident():
        gc.collect()
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    model = fill(nn.ModuleList(nn.Linear(256, 256) for _ in range(6)))
    opt = sgd(model, comm, lr=1e-6, bucket_mb=0.01)

    def train(steps):
        for step in range(steps):
            x = torch.ones(1, 256, requires_grad=True)
            for layer in [*model[:5], model[0]]:  # the last one is not used: gradients wait
                x = checkpoint(layer, x, use_reentrant=True)
            if step % 5 == 0:
                error_of(lambda x=x: Fails.apply(x).sum().backward(), RuntimeError)
                error_of(lambda: (Fails.apply(model[1].weight).sum() + model[0].bias.sum()).backward(), RuntimeError)
                opt.zero_grad()
            x.sum().backward()
            opt.step()

    train(20)
    before = resident()
    train(100)
    assert resident() - before < 8 << 20  # one leaked gradient per step would be 25 MB and more


def test_memory_stays(pair):
    pair.run(on_rank, "memory_stays")


def on_no_gradient_on_rank_0(comm, stage):
    """One rank runs no backward at all, or one without our parameters."""
    model = fill(nn.Linear(3, 2))
    reference = sgd_reference(model, comm)
    opt = sgd(model, comm, stage=stage)

    def loss(net, rank):
        return loss_of(0)(net, rank) * (rank != 0)

    if comm.rank != 0:
        loss(model, comm.rank).backward()
    reference.backward(loss)
    opt.step()
    reference.step()
    close_models(model, reference.model, rtol=5e-6)


def test_unused_parameters(pair):
    for stage in STAGES:
        pair.run(on_rank, "unused", stage)
        pair.run(on_rank, "no_gradient_on_rank_0", stage)


def on_frozen(comm, stage):
    model = mlp()
    reference = OneProcess(model, lambda p: torch.optim.AdamW(p, lr=0.01), comm.world_size)
    first = list(model[0].parameters())
    for p, theirs in zip(first, reference.parameters[:2], strict=True):
        p.requires_grad_(False)
        theirs.requires_grad_(False)
    opt = ShardedOptimizer(model, optimizer="adamw", lr=0.01, stage=stage, comm=comm)
    assert opt.param_groups[0]["params"][0] is first[0] and opt.grad(first[0]) is None
    for step in range(6):
        if step == 2:
            for p in first + reference.parameters[:2]:
                p.requires_grad_(True)
        if step == 4:  # frozen again: keeps its state, does not move
            for p in first + reference.parameters[:2]:
                p.requires_grad_(False)
        loss_of(step)(model, comm.rank).backward()
        opt.step()
        reference.backward(loss_of(step))
        reference.step()
        close_models(model, reference.model, rtol=5e-6)
    assert [float(opt.state[p]["step"]) for p in model.parameters()] == [2, 2, 6, 6]


def test_freezing_and_unfreezing(pair):
    for stage in STAGES:
        pair.run(on_rank, "frozen", stage)


def on_retained(comm, stage):
    model = fill(nn.Linear(3, 2))
    once = sgd_reference(model, comm)
    once.backward(lambda net, rank: net(batch(rank, 0, (4, 3))).sum())
    opt = sgd(model, comm, stage=stage)
    for forget, times in ((None, 3.0), (opt, 2.0), (model, 2.0)):
        y = model(batch(comm.rank, 0, (4, 3)))
        y.sum().backward(retain_graph=True)
        if forget is not None:
            forget.zero_grad()
        (2 * y).sum().backward()
        for index, p in enumerate(model.parameters()):
            close(opt.grad(p), times * once.grad(index), "gradient", rtol=2e-6, atol=1e-5)
        opt.zero_grad()


def test_two_backwards_over_one_graph(pair):
    for stage in STAGES:
        pair.run(on_rank, "retained", stage)


# ---- guards ----------------------------------------------------------------------


def on_guards(comm):
    model = fill(nn.Linear(3, 2))
    opt = sgd(model, comm)
    weight = model.weight
    assert weight.grad is None
    loss_of(0)(model, comm.rank).backward()
    guard = weight.grad
    assert guard.shape == weight.shape and guard.isnan().all()
    expected = opt.grad(weight)

    assert torch.autograd.grad(model(batch(0, 0, (4, 3))).sum(), weight)[0].isfinite().all()
    assert weight.grad is guard, "autograd.grad does not add to .grad, so the guard stays"
    same_bits(opt.grad(weight), expected)

    copied = copy.deepcopy(model)
    torch.optim.SGD([{"params": copied.parameters()}], lr=0.1)
    for p, other in zip(copied.parameters(), model.parameters(), strict=True):
        p.grad = other.grad
    torch.optim.SGD(copied.parameters(), lr=0.1).step()
    assert copied.weight.isnan().all(), "a foreign optimizer is loud"
    with pytest.raises(RuntimeError):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)

    weight.grad = None  # as model.zero_grad() does: this parameter's sums are forgotten, the other's stay
    same_bits(opt.grad(weight), torch.zeros(2, 3))
    assert (opt.grad(model.bias) != 0).any()
    before = weight.detach().clone()
    bias = model.bias.detach().clone()
    opt.step()
    same_bits(weight.detach(), before)
    assert (model.bias != bias).any()

    loss_of(0)(model, comm.rank).backward()
    model.zero_grad()
    loss_of(0)(model, comm.rank).backward()
    close(opt.grad(weight), expected, rtol=0.5, atol=5.0)  # of slightly other weights; once, not twice
    opt.zero_grad()
    assert weight.grad is None
    opt.step()  # nothing to do


def test_guards(pair):
    pair.run(on_rank, "guards")


def on_gradient_set_by_hand(comm, stage):
    p, q = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(5))
    opt = sgd([p, q], comm, stage=stage, lr=1.0)
    p.grad = torch.full((4, 3), comm.rank + 1.0).t()  # other strides
    opt.step()
    mean = (comm.world_size + 1) / 2
    close(p, torch.full((3, 4), -mean))
    feed([q], [1.0]).backward()
    p.grad = torch.ones(3, 4)  # over its guard
    opt.step()
    close(p, torch.full((3, 4), -mean - 1))
    close(q, torch.full((5,), -1.0))


def test_gradients_set_by_hand(pair):
    for stage in STAGES:
        pair.run(on_rank, "gradient_set_by_hand", stage)


def on_hooks_and_layouts(comm, stage):
    generator = torch.Generator().manual_seed(0)
    conv = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    model = nn.ModuleDict({"conv": conv, "gap": nn.Linear(3, 2)})
    model["gap"].weight = nn.Parameter(torch.zeros(2, 6)[:, ::2])
    model["gap"].register_parameter("scalar", nn.Parameter(torch.tensor(2.0)))
    model["gap"].register_parameter("empty", nn.Parameter(torch.zeros(0, 3)))
    fill(model, generator)
    reference = sgd_reference(model, comm)
    strides = model["conv"].weight.stride()
    opt = sgd(model, comm, stage=stage)
    assert model["conv"].weight.stride() == strides
    for p in model["gap"].parameters():
        p.register_hook(lambda grad: grad.t().contiguous().t() if grad.dim() == 2 else grad)

    def loss(net, rank):
        images = net["conv"](batch(rank, 0, (2, 3, 4, 4))).square().mean()
        gap = net["gap"]
        return images + (gap(batch(rank, 1, (4, 3))) * gap.scalar).square().mean() + gap.empty.sum()

    for _ in range(2):
        loss(model, comm.rank).backward()
        reference.backward(loss)
        opt.step()
        reference.step()
        close_models(model, reference.model, rtol=1e-5, atol=1e-6)


def test_layouts_of_parameters_and_gradients(pair):
    for stage in STAGES:
        pair.run(on_rank, "hooks_and_layouts", stage)


# ---- the step ----------------------------------------------------------------------


def on_clipping(comm):
    model = mlp()
    reference = sgd_reference(model, comm)
    opt = sgd(model, comm)
    loss_of(0)(model, comm.rank).backward()
    reference.backward(loss_of(0))
    infinity = opt.clip_grad_norm_(1e9, norm_type=math.inf)
    close(infinity, max(p.grad.abs().max() for p in reference.masters), rtol=2e-6)
    norm = opt.clip_grad_norm_(0.5)
    close(norm, reference.step(max_grad_norm=0.5), rtol=2e-6)
    opt.step()
    close(torch.tensor(opt.last_step.norm), norm)
    close_models(model, reference.model, rtol=5e-6)
    feed([model[0].weight], [math.inf if comm.rank == 0 else 1.0]).backward()
    error_of(lambda: opt.clip_grad_norm_(1.0, error_if_nonfinite=True), RuntimeError)
    opt.zero_grad()


def test_clipping(pair):
    pair.run(on_rank, "clipping")


def on_scaler(comm):
    p = nn.Parameter(torch.zeros(70))
    opt = sgd([p], comm, lr=1.0)
    scaler = GradScaler(init_scale=4.0)
    for value in (1.0, math.inf if comm.rank == 0 else 1.0, 1.0):
        scaler.scale(feed([p], [value])).backward()
        scaler.unscale_(opt)
        opt.clip_grad_norm_(1e6)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    close(p, torch.full((70,), -2.0))
    assert scaler.get_scale() == 2.0 and opt.last_step.steps == 2

    theirs = torch.amp.GradScaler("cpu", init_scale=4.0)
    theirs.scale(feed([p], [1.0])).backward()
    told = error_of(lambda: theirs.step(opt), TypeError)
    assert "torch.amp.GradScaler" in told and "zero_c.torch.GradScaler" in told
    opt.zero_grad()


def test_grad_scalers(pair):
    pair.run(on_rank, "scaler")


def on_dynamic_scale(comm):
    p = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    opt = sgd([p], comm, lr=1.0, loss_scale="dynamic")
    for skipped in (True, False):
        opt.scale(feed([p], [1.5])).backward()  # 1.5 * 65536 overflows fp16
        opt.step()
        assert opt.last_step.skipped is skipped
    close(p, torch.full((3,), -1.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(200):
            opt.scale(feed([p], [math.nan])).backward()
            try:
                opt.step()
            except zero_c.Error as told:
                assert "lowest loss scale" in str(told)
                break
        else:
            raise AssertionError("skipped 200 steps without a word")
    assert opt.last_step.scale == 1.0


def test_dynamic_loss_scale(pair):
    pair.run(on_rank, "dynamic_scale")


def on_written_weights(comm, stage):
    """Masters of 16-bit parameters follow in-place writes."""
    model = fill(nn.Linear(3, 70)).to(torch.bfloat16)
    opt = ShardedOptimizer(model, optimizer="sgd", lr=2.0**-12, stage=stage, comm=comm)
    for _ in range(3):  # small steps: the parameter does not move, its master does
        feed(list(model.parameters()), [1.0, 1.0]).backward()
        opt.step()
    values = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(values)
    for p in model.parameters():
        same_bits(opt.full_param(p), torch.ones_like(p))
    full = opt.full_state_dict()["state"]
    same_bits(full[0]["master"], torch.ones(70, 3))
    with opt.gathered(model.weight, write=True) as (weight,):
        weight.fill_(comm.rank + 2.0)
    same_bits(model.weight.detach(), torch.full((70, 3), 2.0, dtype=torch.bfloat16))
    same_bits(opt.full_state_dict()["state"][0]["master"], torch.full((70, 3), 2.0))

    def write():
        with opt.gathered(model.bias) as (bias,):
            bias.add_(1.0)

    assert "write=True" in error_of(write, zero_c.Error)


def test_masters_follow_written_weights(pair):
    for stage in STAGES:
        pair.run(on_rank, "written_weights", stage)


def on_groups(comm, stage):
    def groups(net):
        return [{"params": [net[0].weight], "lr": torch.tensor([0.1]), "tag": "first"},
                {"params": [net[0].bias], "weight_decay": 0.0, "lr": 0.01}]

    model = mlp()
    reference = OneProcess(model, lambda masters: torch.optim.AdamW(
        [{"params": masters[:1], "lr": 0.1}, {"params": masters[1:2], "weight_decay": 0.0, "lr": 0.01},
         {"params": masters[2:], "lr": 0.02}], weight_decay=0.1), comm.world_size)
    opt = ShardedOptimizer(groups(model), module=model, optimizer="adamw", weight_decay=0.1, stage=stage, comm=comm)
    opt.add_param_group({"params": list(model[2].parameters()), "lr": 0.02})
    assert opt.param_groups[0]["tag"] == "first"
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    theirs = torch.optim.lr_scheduler.ExponentialLR(reference.optimizer, 0.5)
    for step in range(3):
        def closure(step=step):
            opt.zero_grad()
            loss = loss_of(step)(model, comm.rank)
            loss.backward()
            return loss

        assert opt.step(closure).requires_grad
        reference.backward(loss_of(step))
        reference.step()
        scheduler.step()
        theirs.step()
        close_models(model, reference.model, rtol=1e-5, atol=1e-6)


def test_groups_closure_and_schedulers(pair):
    for stage in STAGES:
        pair.run(on_rank, "groups", stage)


# ---- state ---------------------------------------------------------------------------


def on_state(comm, stage, rule, form):
    options, make = RULES[rule]

    def train(net, optimizer, steps):
        for step in steps:
            loss_of(step)(net, comm.rank).backward()
            optimizer.step()

    def build(net):
        return ShardedOptimizer(net, optimizer=rule, stage=stage, bucket_mb=0.0001, comm=comm, **options)

    model = mlp(sizes=(3, 200, 2))
    opt = build(model)
    train(model, opt, range(2))
    weights = copy.deepcopy(model.state_dict())
    saved = copy.deepcopy(opt.state_dict() if form == "local" else opt.full_state_dict())
    for p in model.parameters():
        assert float(opt.state[p]["step"]) == 2 and opt.state[p].keys() >= set(saved["state"][0]) - {"step", "has_momentum"}
    train(model, opt, range(2, 4))

    again = mlp(seed=5, sizes=(3, 200, 2))
    other = build(again)
    again.load_state_dict(weights)
    other.load_state_dict(saved)
    train(again, other, range(2, 4))
    for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
        same_bits(ours.detach(), theirs.detach(), "resumed parameter")
    if form == "full":  # a plain torch optimizer takes it, and gives it back
        plain = make(mlp(sizes=(3, 200, 2)).parameters(), **options)
        plain.load_state_dict(saved)
        other.load_state_dict(plain.state_dict())
        for number, entry in other.full_state_dict()["state"].items():
            for name, value in entry.items():
                same_bits(value, saved["state"][number][name], name)


@pytest.mark.parametrize("form", ["local", "full"])
@pytest.mark.parametrize("rule", RULES)
def test_state_dicts(pair, rule, form):
    for stage in STAGES:
        pair.run(on_rank, "state", stage, rule, form)


# ---- agreement between ranks -----------------------------------------------------------


def on_disagreement(comm, what):
    size = 4 if what == "shape" and comm.rank else 3
    model = nn.Sequential(nn.Linear(3, size))
    if what == "frozen" and comm.rank:
        model[0].bias.requires_grad_(False)
    options = {"lr": 0.1 + (comm.rank if what == "option" else 0), "stage": comm.rank + 1 if what == "stage" else 2}
    if what == "invalid" and comm.rank:
        told = error_of(lambda: ShardedOptimizer(model, comm=comm, betas=(2.0, 0.9)), (ValueError, TypeError))
    else:
        told = error_of(lambda: ShardedOptimizer(model, comm=comm, **options), zero_c.Mismatch)
    sgd(mlp(), comm)  # nothing was changed: the next one can be built
    return told


@pytest.mark.parametrize("what, words", [("shape", ("0.weight", "(3, 3)", "(4, 3)")), ("frozen", ("0.bias",)),
                                         ("option", ("lr",)), ("stage", ("stage",)), ("invalid", ("betas",))])
def test_ranks_disagree_at_construction(pair, what, words):
    for told in pair.run(on_rank, "disagreement", what):
        assert all(word in told for word in words), told


def on_rank_0s_weights(comm):
    torch.manual_seed(comm.rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[0].weight.requires_grad_(False)
    model[1].running_mean.fill_(comm.rank + 1.0)
    model.register_buffer("turned", torch.full((2, 3), comm.rank + 1.0).t())
    opt = sgd(model, comm)
    values = [value.detach().clone() for value in model.state_dict().values()]
    model[1].running_mean.fill_(comm.rank + 5.0)
    opt.sync_buffers()
    close(model[1].running_mean, torch.full((4,), 5.0))
    return values


def test_ranks_start_from_rank_0(pair):
    first, second = pair.run(on_rank, "rank_0s_weights")
    for ours, theirs in zip(first, second, strict=True):
        assert (ours == theirs).all()


# ---- one rank: refusals, life, places -----------------------------------------------------


def alone(params, **options):
    return ShardedOptimizer(params, **{"optimizer": "sgd", "lr": 0.1} | options)


class Subclass(nn.Parameter):
    pass


@pytest.mark.parametrize("params, options, kind, words", [
    (lambda: [], {}, ValueError, "empty"),
    (lambda: nn.Sequential(), {}, ValueError, "no parameters"),
    (lambda: torch.zeros(3), {}, TypeError, "single"),
    (lambda: {nn.Parameter(torch.zeros(3))}, {}, TypeError, "set"),
    (lambda: [("late", torch.zeros(3, requires_grad=True) * 1)], {}, ValueError, "'late' is not a leaf"),
    (lambda: [("z", nn.Parameter(torch.zeros(1, dtype=torch.complex64)))], {}, TypeError, "'z' has dtype torch.complex64"),
    (lambda: [("m", nn.Parameter(torch.zeros(1, device="meta")))], {}, ValueError, "'m' is on device 'meta'"),
    (lambda: [("e", nn.Parameter(torch.zeros(1).expand(4)))], {}, ValueError, "'e' is expanded"),
    (lambda: [("s", Subclass(torch.zeros(4)))], {}, TypeError, "'s' is a test_torch_adapter.Subclass"),
    (lambda: nn.LazyLinear(3), {}, ValueError, "not initialised"),
    (lambda: [nn.Linear(2, 2).weight] * 2, {}, ValueError, "twice"),
    (lambda: [nn.Parameter(torch.zeros(3)), 5], {}, TypeError, "int"),
    (lambda: [{"lr": 1.0}], {}, ValueError, "'params'"),
    (lambda: nn.DataParallel(nn.Linear(2, 2)), {}, TypeError, "DataParallel"),
    (lambda: nn.Linear(2, 2), {"optimizer": "lion"}, ValueError, "lion"),
    (lambda: nn.Linear(2, 2), {"betas": (0.9, 0.9)}, (TypeError, ValueError), "betas"),
    (lambda: nn.Linear(2, 2).parameters(), {"stage": 3}, ValueError, "module"),
    (lambda: nn.Linear(2, 2), {"stage": 4}, ValueError, "stage is 4"),
    (lambda: nn.Linear(2, 2), {"stage": "two"}, ValueError, "legal: 0, 1, 2"),
    (lambda: nn.Linear(2, 2), {"prefetch": 2}, ValueError, "prefetch=2"),
    (lambda: nn.Linear(2, 2), {"units": [nn.Linear]}, ValueError, "units"),
    (lambda: nn.Linear(2, 2), {"deterministic": True}, ValueError, "deterministic"),
    (lambda: nn.Linear(2, 2), {"loss_scale": -1}, ValueError, "loss_scale"),
    (lambda: nn.Linear(2, 2), {"max_grad_norm": 0}, ValueError, "max_grad_norm"),
    (lambda: nn.Linear(2, 2), {"reduce_op": "max"}, ValueError, "reduce_op"),
    (lambda: nn.Linear(2, 2), {"bucket_mb": 0}, ValueError, "bucket_mb"),
    (lambda: nn.Linear(2, 2), {"comm": 5}, TypeError, "comm"),
])
def test_refusals(params, options, kind, words):
    assert words in error_of(lambda: alone(params(), **options), kind)


def test_tied_by_memory_is_refused():
    memory = torch.zeros(10)
    pair = [("a", nn.Parameter(memory[:6])), ("b", nn.Parameter(memory[5:]))]
    assert "'a' and 'b' share memory" in error_of(lambda: alone(pair), ValueError)
    halves = [("a", nn.Parameter(memory[:5])), ("b", nn.Parameter(memory[5:]))]
    alone(halves)


def test_no_pickle_no_copy():
    opt = alone(nn.Linear(2, 2))
    assert "state_dict" in error_of(lambda: pickle.dumps(opt), TypeError)
    assert "state_dict" in error_of(lambda: copy.deepcopy(opt), TypeError)


def test_second_optimizer_on_the_same_parameters():
    model = nn.Linear(2, 2)
    opt = alone(model)
    assert "another ShardedOptimizer" in error_of(lambda: alone(model), ValueError)
    del opt
    alone(model)


def backward_and_step(model, opt):
    sum(p.float().square().sum() for p in model.parameters()).backward()
    opt.step()


@pytest.mark.parametrize("change", [
    lambda model: model.double(),
    lambda model: model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True),
    lambda model: setattr(model[0], "weight", nn.Parameter(torch.zeros(3, 3))),
    lambda model: setattr(model[0].weight, "data", torch.zeros(3, 3)),
    lambda model: setattr(model[0].weight, "data", model[0].weight.data.t()),
])
def test_moved_parameters_are_named(change):
    model = nn.Sequential(nn.Linear(3, 3))
    opt = alone(model)
    backward_and_step(model, opt)
    change(model)
    told = error_of(lambda: backward_and_step(model, opt), zero_c.Error)
    assert "'0.weight'" in told or "'0.bias'" in told


def test_sparse_gradients_are_refused():
    model = nn.Embedding(4, 2, sparse=True)
    opt = alone(model)
    assert "'weight' got a gradient with layout" in error_of(
        lambda: model(torch.tensor([1])).sum().backward(), TypeError)
    opt.zero_grad()


def test_nothing_of_ours_keeps_the_model_alive():
    gc.collect()
    gc.disable()
    try:
        model, other = nn.Linear(3, 3), nn.Linear(3, 3)
        opt, second = alone(model), alone(other)
        backward_and_step(model, opt)
        model(torch.ones(1, 3)).sum().backward()
        other(torch.ones(1, 3)).sum().backward()
        watched = [weakref.ref(thing) for thing in (model, model.weight, opt, opt._engine)]
        del model, opt
        assert [thing() for thing in watched] == [None] * 4
        del second  # the model alone lives on, as a plain one
        assert other.weight.grad is None
        other(torch.ones(1, 3)).sum().backward()
        assert other.weight.grad.isfinite().all()
        torch.optim.SGD(other.parameters(), lr=0.1).step()
    finally:
        gc.enable()


def test_without_the_exchange_table(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "__dlpack_c_exchange_api__", None, raising=False)
    for kind in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        p = nn.Parameter(torch.ones(2, 3, dtype=kind))
        opt = alone([p])
        (p * 2).sum().backward()
        opt.step()
        close(p, torch.full((2, 3), 0.8))
        p.data = torch.zeros(2, 3, dtype=kind)
        error_of(opt.step, zero_c.Error)


def test_a_forked_child_may_read():
    model = fill(nn.Linear(3, 3))
    opt = alone(model)
    backward_and_step(model, opt)
    wanted = float(model.weight.detach().sum())
    child = os.fork()
    if child == 0:
        os._exit(0 if float(model.weight.detach().sum()) == wanted else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_the_communicator_is_closed():
    comm = zero_c.init(rank=0, world_size=1)
    model = nn.Linear(3, 3)
    opt = alone(model, comm=comm)
    comm.close()
    assert "closed" in error_of(lambda: backward_and_step(model, opt), zero_c.Error)
    assert model(torch.ones(1, 3)).isfinite().all()


def test_memory_and_traffic():
    model = nn.Linear(64, 64)
    opt = ShardedOptimizer(model, optimizer="adamw", lr=0.1)
    assert opt.memory()["parameters"] >= 4 * (64 * 64 + 64)
    backward_and_step(model, opt)
    assert set(opt.traffic()) == {"reduce_scatter", "all_gather", "broadcast", "small", "bytes"}


class EngineOnGpu:
    """What loading asks of an engine on GPU 0, and what it was told."""

    gpu = 0

    def __init__(self):
        self.told = []

    def use_stream(self, stream):
        self.told.append(("stream", stream))

    def load_from_device(self, index, array):
        self.told.append((index, *array))


def test_values_on_a_gpu_do_not_pass_the_host(monkeypatch):
    """There is no GPU here: how they are handed over, without a copy where the memory is one piece."""
    from zero_c.torch import _place

    monkeypatch.setattr(_place, "stream_of", lambda gpu: 7)
    monkeypatch.setattr(_place._core, "GpuArray", lambda values, stream, what: (values, stream))
    monkeypatch.setattr(torch.Tensor, "cpu", None)
    engine, tensor = EngineOnGpu(), torch.arange(6.0).view(2, 3).t()
    _place.put(engine, 3, _place.flat(tensor, tensor.stride()))
    assert engine.told[0] == ("stream", 7)
    index, values, stream = engine.told[1]
    assert (index, stream) == (3, 7) and values.tolist() == [0, 1, 2, 3, 4, 5] and values.data_ptr() == tensor.data_ptr()


def test_graphs_are_of_gpus():
    opt = alone(nn.Linear(3, 3))
    assert "CPU" in error_of(opt.before_replay, ValueError)
