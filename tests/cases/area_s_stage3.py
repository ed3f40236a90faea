"""Rows of areas A, H, I and K that ask something of stage 3, where a parameter has its value in its unit's call."""

import copy
import ctypes
import gc
import math
import warnings
import weakref

import numpy
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_c
from cases.rows import STAGES, raised, row
from models import OneProcess, Tied, batch, close, fill, mlp, same_bits

ADAMW = {"optimizer": "adamw", "lr": 0.01, "weight_decay": 0.1}
MIB = 1 << 20


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def chain(width=4, count=4):
    """Layers in a row, each a unit."""
    return mlp(sizes=(width,) * (count + 1))


def trained(here, stage, build, loss_of, steps=2, units=None, **options):
    """Trains a model at a stage; returns it, its optimizer and the trace of losses, gradients and values."""
    here.stage = stage
    model = build()
    if stage == 3 and units is not None:
        options["units"] = units(model)
    opt = here.optimizer(model, **ADAMW | options)
    trace = []
    for step in range(steps):
        loss = loss_of(model, here.rank, step)
        loss.backward()
        trace.append((f"loss of step {step}", loss.detach()))
        trace += [(f"gradient of {name} in step {step}", opt.grad(p)) for name, p in model.named_parameters()]
        opt.step()
        opt.zero_grad()
        trace += [(f"{name} after step {step}", here.value(p).clone()) for name, p in model.named_parameters()]
    return model, opt, trace


def bits_of_stage_2(here, build, loss_of, **options):
    """Trains at stages 2 and 3: all that is seen has the same bits. Returns both models, and stage 3's optimizer."""
    plain, _, expected = trained(here, 2, build, loss_of, **options)
    model, opt, found = trained(here, 3, build, loss_of, **options)
    for (what, ours), (_, theirs) in zip(found, expected, strict=True):
        if ours is None or theirs is None:
            assert ours is theirs, what
            continue
        assert theirs.isfinite().all(), f"{what} says nothing: it is not finite at stage 2"
        same_bits(ours, theirs, what)
    return plain, model, opt


def shown_bytes(model):
    """Bytes of all memory that a module's parameters show, and their gradients, each piece counted once."""
    storages = {}
    for p in model.parameters():
        for tensor in (p, p.grad):
            if tensor is not None:
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


def only_guards(model, when):
    """Nothing but one NaN for each parameter, and one for each gradient, is reachable from the module."""
    assert all(p.isnan().all() for p in model.parameters()), when
    limit = sum(2 * p.element_size() for p in model.parameters())
    assert shown_bytes(model) <= limit, f"{shown_bytes(model)} bytes {when}"


def never_quiet(tensor, right, what):
    """A result that was computed from placeholders is right, or NaN in every element that depends on them."""
    if not torch.equal(tensor, right):
        assert tensor.shape == right.shape and tensor.isnan().all(), f"{what}: {tensor}"


@row(5, stages=(3,))
def a_placeholder_is_loud(here):
    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.full((3, 3), 7.0))

        def forward(self, x):
            return x + self.w

    for units in ([], None):
        model = nn.Sequential(Adds(), Adds())
        opt = here.optimizer(model, units=units, optimizer="sgd", lr=0.1)
        for when in ("before training", "after a step"):
            for part in model:
                assert tuple(part.w.shape) == (3, 3)
                right = torch.full((3, 3), 8.0)
                with torch.no_grad():
                    never_quiet(torch.ones(3, 3) + part.w, right, f"sum {when}")
                    never_quiet(torch.ones(3, 3) @ part.w, torch.full((3, 3), 21.0), f"product {when}")
                # nor does it fit where it would have to be stretched
                raised(lambda part=part: torch.ones(4, 4) + part.w, RuntimeError)
            with opt.gathered():
                for part in model:
                    same_bits((torch.ones(3, 3) + part.w).detach(), right, f"gathered {when}")
            (0.0 * model(torch.ones(3, 3))).sum().backward()  # a step that changes nothing
            opt.step()


class Encoder(nn.Module):
    """The loss comes from other methods than forward; they call layers, of which some are units."""

    def __init__(self):
        super().__init__()
        self.fc, self.between, self.out = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.decode(self.encode(x))

    def encode(self, x):
        return torch.tanh(self.between(torch.tanh(self.fc(x))))

    def decode(self, x):
        return self.out(x)


def check_methods(here, units):
    def build():
        return fill(Encoder())

    def by_methods(model, rank, step):
        return model.decode(model.encode(batch(rank, step, (5, 3)))).square().mean()

    def one_after_the_other(model, rank, step):
        with torch.no_grad():
            model.encode(batch(rank, 9, (5, 3)))
        first = model.encode(batch(rank, step, (5, 3))).square().mean()
        return first + model(batch(rank, step + 1, (5, 3))).square().mean()

    for loss_of in (by_methods, one_after_the_other):
        bits_of_stage_2(here, build, loss_of, units=units)


@row(6, stages=(3,))
def a_method_calls_units(here):
    check_methods(here, lambda model: [model.fc, model.between, model.out])


@row(6, stages=(3,))
def a_method_calls_layers_of_the_root(here):
    check_methods(here, lambda model: [])


@row(6, stages=(3,))
def a_method_calls_units_and_layers_of_the_root(here):
    check_methods(here, lambda model: [model.between])


class Loops(nn.Module):
    """Runs one of its layers as often as it is told."""

    def __init__(self):
        super().__init__()
        self.first, self.b, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x, times):
        x = torch.tanh(self.first(x))
        for _ in range(times):
            x = torch.tanh(self.b(x))
        return self.last(x)


@row(10, ranks=(2, 3), stages=(3,), deadline=30.0)
def ranks_run_a_unit_at_their_own_count(here):
    for counts in ((1, 3, 2), (0, 2, 1), (4, 0, 0)):
        def loss_of(model, rank, step, counts=counts):
            return model(batch(rank, step, (4, 3)), counts[(rank + step) % len(counts)]).square().mean()

        bits_of_stage_2(here, lambda: fill(Loops()), loss_of, steps=3)
        model = fill(Loops())
        reference = OneProcess(model, adamw, here.ranks)
        opt = here.optimizer(model, **ADAMW)
        for step in range(3):
            with torch.no_grad():  # and as long as each likes, as text is generated
                model(batch(here.rank, 7, (1, 3)), 5 * here.rank)
            loss_of(model, here.rank, step).backward()
            opt.step()
            opt.zero_grad()
            reference.backward(lambda m, rank, step=step: loss_of(m, rank, step))
            reference.step()
            here.close_models(model, reference.model)


@row(11, stages=(3,))
def the_order_of_units_changes(here):
    orders = ("abcd", "dcba", "a", "bd", "abcd", "bbac")

    class Ordered(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abcd"})

        def forward(self, x, order):
            for name in order:
                x = torch.tanh(self.layers[name](x))
            return x

    def loss_of(model, rank, step):
        return model(batch(rank, step, (3, 4)), orders[step]).square().mean()

    for prefetch in (0, 1, 2):
        model = fill(Ordered())
        reference = OneProcess(model, adamw, here.ranks)
        opt = here.optimizer(model, units=list(model.layers.values()), prefetch=prefetch, **ADAMW)
        for step in range(len(orders)):
            loss = loss_of(model, here.rank, step)
            with torch.no_grad():
                close(loss, loss_of(reference.model, here.rank, step), f"loss of step {step}")
            loss.backward()
            opt.step()
            opt.zero_grad()
            reference.backward(lambda m, rank, step=step: loss_of(m, rank, step))
            reference.step()
            here.close_models(model, reference.model)


@row(14, stages=(3,))
def unfreezing_later_is_refused_at_stage_3(here):
    model = chain()
    model[0].requires_grad_(False)
    opt = here.optimizer(model, **ADAMW)
    before = [here.value(p).clone() for p in model[0].parameters()]

    def use():
        model(batch(here.rank, 0, (3, 4))).square().mean().backward()
        opt.step()

    use()
    model[0].requires_grad_(True)
    message = str(raised(use, zero_c.Error))
    assert "0.weight" in message and "new ShardedOptimizer" in message, message
    for p, old in zip(model[0].parameters(), before, strict=True):
        same_bits(here.value(p), old, "frozen parameter")


@row(17, stages=(3,))
def gradient_penalty_is_refused_at_stage_3(here):
    model = chain()
    reference = OneProcess(model, adamw, here.ranks)
    opt = here.optimizer(model, **ADAMW)

    def penalised():
        x = batch(here.rank, 0, (3, 4)).requires_grad_()
        loss = model(x).square().mean()
        penalty, = torch.autograd.grad(loss, x, create_graph=True)
        (loss + (penalty * penalty).sum()).backward()

    message = str(raised(penalised, zero_c.Error))
    assert "create_graph" in message and "stage 2" in message, message
    opt.zero_grad()

    def loss_of(model, rank):
        return model(batch(rank, 1, (3, 4))).square().mean()

    loss_of(model, here.rank).backward()  # and the refusal has broken nothing
    opt.step()
    reference.backward(loss_of)
    reference.step()
    here.close_models(model, reference.model)


@row(21, stages=(3,))
def a_view_of_an_output_is_written_in_place(here):
    class Writes(nn.Module):
        """Writes into a view of what its first layer, a unit, gives."""

        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            y = self.first(x)
            y.view(-1).add_(1)
            y[:, 1:].mul_(0.5)
            return self.second(torch.tanh(y))

    def loss_of(model, rank, step):
        out = model(batch(rank, step, (3, 4))).view(-1)
        out.add_(1)
        return out.sum()

    def last_is_output(model, rank, step):
        out = model(batch(rank, step, (3, 4)))
        out.t()[1:].mul_(2)
        return out.square().sum()

    for build, units in ((chain, None), (chain, lambda model: []), (lambda: fill(nn.Linear(4, 4)), None),
                         (lambda: fill(Writes()), None), (lambda: nn.Sequential(fill(Writes()), fill(Writes())), None)):
        for loss in (loss_of, last_is_output):
            bits_of_stage_2(here, build, loss, units=units)


@row(23, ranks=(1, 2), stages=(3,))
def a_unit_fed_raw_data_is_released(here):
    def loss_of(model, rank, step):
        x = batch(rank, step, (3, 4))
        assert not x.requires_grad
        return model(x).square().mean()

    for build in (lambda: fill(nn.Linear(4, 4)), chain):
        here.stage = 3
        model = build()
        reference = OneProcess(model, adamw, here.ranks)
        opt = here.optimizer(model, **ADAMW)
        loss_of(model, here.rank, 0).backward()
        only_guards(model, "after backward")
        assert not any(unit.is_open or unit.backwards for unit in opt._windows.used), "a unit is still gathered"
        reference.backward(lambda m, rank: loss_of(m, rank, 0))
        for index, p in enumerate(model.parameters()):
            close(opt.grad(p), reference.grad(index), "gradient")
        opt.step()
        bits_of_stage_2(here, build, loss_of)


class Delegates(nn.Module):
    """Hands what it does not have on to what is inside, as wrappers do."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x):
        return self.inner(x) * self.scale + self.bias  # the bias is the inner one's


@row(24, stages=(3,))
def a_wrapper_forwards_attributes(here):
    def build():
        return fill(nn.Sequential(Delegates(), nn.Tanh(), Delegates()))

    def loss_of(model, rank, step):
        return model(batch(rank, step, (3, 4))).square().mean()

    # A unit's parameter used outside its forward has no value: the inner layer alone can be no unit here.
    for units in (None, lambda model: [Delegates], lambda model: []):
        bits_of_stage_2(here, build, loss_of, units=units)

    class Plain(Delegates):
        def forward(self, x):
            return self.inner(x) * self.scale

    for units in (lambda model: [Plain, nn.Linear], lambda model: [nn.Linear]):
        bits_of_stage_2(here, lambda: fill(nn.Sequential(Plain(), nn.Tanh(), Plain())), loss_of, units=units)


@row(27, stages=(3,))
def a_unit_is_released_twice(here):
    def loss_of(model, rank, step):
        return model(batch(rank, step, (3, 4))).square().mean()

    def twice_released(model, rank, step):
        if opts:
            runtime = opts[-1]._windows
            for unit in runtime.used:
                runtime.open(unit)
                runtime.open(unit)
                for _ in range(2):
                    runtime.close(unit)
            only_guards(model, "after two releases")
            with torch.no_grad():
                model(batch(rank, step, (3, 4)))
            for unit in runtime.used:
                runtime.close(unit)
        return loss_of(model, rank, step)

    expected = trained(here, 2, chain, loss_of)[2]
    # The optimizer is made inside trained(); this is how the loss gets hold of it.
    opts, make = [], here.optimizer
    here.optimizer = lambda *arguments, **options: opts.append(make(*arguments, **options)) or opts[-1]
    found = trained(here, 3, chain, twice_released)[2]
    for (what, ours), (_, theirs) in zip(found, expected, strict=True):
        same_bits(ours, theirs, what)


@row(28, ranks=(1, 2), stages=(3,))
def evaluation_under_inference_mode_comes_first(here):
    def loss_of(model, rank, step):
        with torch.inference_mode():
            model.eval()
            model(batch(rank, 5, (3, 4)))
            model.train()
        loss = model(batch(rank, step, (3, 4))).square().mean()
        with torch.inference_mode():
            model(batch(rank, 6, (3, 4)))
        return loss

    def build():
        return fill(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4)))

    plain, model, opt = bits_of_stage_2(here, build, loss_of)
    assert not any(p.is_inference() for p in model.parameters())
    with opt.gathered():
        state = copy.deepcopy(model.state_dict())
    for name, value in plain.state_dict().items():
        same_bits(state[name], value, name)


@row(29, stages=(3,))
def shapes_stay_and_full_data_can_be_grown(here):
    model = nn.ModuleDict({"emb": nn.Embedding(5, 4), "other": nn.Linear(4, 4)})
    fill(model)
    old_rows = model["emb"].weight.detach().clone()
    opt = here.optimizer(model, **ADAMW)
    assert tuple(model["emb"].weight.shape) == (5, 4) and model["emb"].weight.dtype == torch.float32
    # The way to grow: a new model out of gathered values, and a new optimizer for it.
    grown = nn.ModuleDict({"emb": nn.Embedding(7, 4), "other": nn.Linear(4, 4)})
    with opt.gathered(), torch.no_grad():
        grown["emb"].weight[:5] = model["emb"].weight
        grown["other"].load_state_dict(model["other"].state_dict())
    opt = here.optimizer(grown, **ADAMW)
    assert tuple(grown["emb"].weight.shape) == (7, 4)
    same_bits(here.value(grown["emb"].weight)[:5], old_rows, "old rows")
    grown["emb"](torch.tensor([6])).sum().backward()
    opt.step()
    value = here.value(grown["emb"].weight)
    assert value.isfinite().all() and not torch.equal(value[:5], old_rows)  # decay; the gradient is of row 6


@row(34, ranks=(2, 3, 4), stages=(3,))
def padding_is_not_gathered(here):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.empty(shape)) for shape in ((5,), (3, 2), (7, 1)))

        def forward(self, x):
            return (x[:, :5] * self.a).sum(1, keepdim=True) + x[:, :3] @ self.b + (x @ self.c)

    def loss_of(model, rank, step):
        return sum(part(batch(rank, step, (4, 7))).square().mean() for part in model)

    def build():
        return fill(nn.ModuleList([Odd(), Odd()]))

    plain, model, opt = bits_of_stage_2(here, build, loss_of, max_grad_norm=0.5)
    with opt.gathered() as tensors:
        for tensor, p, theirs in zip(tensors, model.parameters(), plain.parameters(), strict=True):
            same_bits(tensor, theirs.detach(), "gathered tensor")
            assert p.untyped_storage().nbytes() == p.numel() * 4, "a gathered parameter is saved with its padding"


class Checkpointed(nn.Module):
    """Blocks of two layers; checkpoints around the blocks, in them, or both; with or without a parameter of its own."""

    def __init__(self, outside, inside, use_reentrant, own=True):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(4)) if own else 1.0
        self.blocks = nn.ModuleList(Inside(use_reentrant if inside else None) for _ in range(3))
        self.use_reentrant = use_reentrant if outside else None

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.use_reentrant is None else checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x * self.scale


class Inside(nn.Module):
    def __init__(self, use_reentrant):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        if self.use_reentrant is None:
            return self.work(x)
        return checkpoint(self.work, x, use_reentrant=self.use_reentrant)

    def work(self, x):
        return x + self.second(torch.tanh(self.first(x)))


def check_nestings(here, own, ways=(False, True)):
    for use_reentrant in ways:
        def loss_of(model, rank, step, use_reentrant=use_reentrant):
            # re-entrant checkpoints need an input with a gradient
            return model(batch(rank, step, (3, 4)).requires_grad_(use_reentrant)).square().mean()

        for outside, inside in ((True, False), (False, True), (True, True)):
            for units in (None, lambda model: [Inside, nn.Linear], lambda model: [nn.Linear]):
                bits_of_stage_2(here, lambda o=outside, i=inside, u=use_reentrant: fill(Checkpointed(o, i, u, own)),
                                loss_of, units=units)


@row(104, stages=(3,))
def units_in_checkpoints_and_checkpoints_in_units(here):
    check_nestings(here, own=True)


@row(104, stages=(3,))
def units_in_reentrant_checkpoints_of_a_model_without_own_parameters(here):
    check_nestings(here, own=False, ways=(True,))


@row(104, stages=(3,))
def units_in_checkpoints_of_a_model_without_own_parameters(here):
    check_nestings(here, own=False, ways=(False,))


def old_weight_norm(layer):
    with torch.no_grad():  # so that the visible weight, made here, has no graph that would forbid copies of the model
        return torch.nn.utils.weight_norm(layer)


NORMS = {
    "old weight_norm": old_weight_norm,
    "weight_norm": torch.nn.utils.parametrizations.weight_norm,
    "spectral_norm": torch.nn.utils.parametrizations.spectral_norm,
}


@row(105, stages=(3,))
def normed_weights_are_recomputed(here):
    def loss_of(model, rank, step):
        return model(batch(rank, step, (3, 2))).square().mean()

    for kind, norm in NORMS.items():
        def build(norm=norm):
            torch.manual_seed(3)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)
                return nn.Sequential(norm(nn.Linear(2, 2)), nn.Tanh(), norm(nn.Linear(2, 2)))

        for units in (None, lambda model: []):
            plain, model, opt = bits_of_stage_2(here, build, loss_of, steps=3, units=units)
            with opt.gathered():
                state = copy.deepcopy(model.state_dict())
            assert list(state) == list(plain.state_dict()) == list(build().state_dict()), kind
            fresh = build()
            fresh.load_state_dict(state)
            again = build()
            other = here.optimizer(again, **ADAMW)
            with other.gathered(write=True):
                again.load_state_dict(state)
            x = batch(0, 9, (3, 2))
            for each in (plain, fresh, model, again):
                each.eval()
            with torch.no_grad():
                expected = plain(x)
                for what, each in (("sharded", model), ("loaded", fresh), ("loaded and sharded", again)):
                    same_bits(each(x), expected, f"{kind}, {what}")
        if kind == "spectral_norm":
            continue  # its vectors advance at each forward, and the one process below has more of these
        model = build()
        reference = OneProcess(model, adamw, here.ranks)
        opt = here.optimizer(model, **ADAMW)
        for step in range(2):
            loss_of(model, here.rank, step).backward()
            opt.step()
            opt.zero_grad()
            reference.backward(lambda m, rank, step=step: loss_of(m, rank, step))
            reference.step()
        here.close_models(model, reference.model)


class Adapted(nn.Module):
    """A frozen layer and a trained product of two thin matrices beside it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.base.requires_grad_(False)
        self.A, self.B = nn.Parameter(torch.empty(2, 4)), nn.Parameter(torch.empty(4, 2))

    def forward(self, x):
        return self.base(x) + x @ self.A.t() @ self.B.t()


def adapted():
    return fill(nn.Sequential(Adapted(), nn.Tanh(), Adapted()))


@row(111, stages=(3,))
def an_adapter_is_saved_at_full_shape(here):
    def loss_of(model, rank, step):
        return model(batch(rank, step, (3, 4))).square().mean()

    plain, model, opt = bits_of_stage_2(here, adapted, loss_of)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    assert names == ["0.A", "0.B", "2.A", "2.B"]
    # outside gathered() there is nothing that could pass for an adapter
    raised(model.state_dict, zero_c.Error)
    assert all(p.isnan().all() and p.numel() == 8 for p in model.parameters() if p.requires_grad)
    with opt.gathered(*(p for p in model.parameters() if p.requires_grad)):
        by_parameter = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    with opt.gathered():
        by_state = {name: tensor.clone() for name, tensor in model.state_dict().items() if name in names}
    for adapter in (by_parameter, by_state):
        assert list(adapter) == names
        for name in names:
            same_bits(adapter[name], plain.state_dict()[name], name)
        unsharded = adapted()
        missing = unsharded.load_state_dict(adapter, strict=False)
        assert not missing.unexpected_keys
        x = batch(0, 9, (3, 4))
        same_bits(unsharded(x).detach(), plain(x).detach(), "output of the loaded model")


@row(114, stages=(3,))
def an_average_of_weights_is_not_stale(here):
    def loss_of(model, rank, step):
        return model(batch(rank, step, (3, 4))).square().mean()

    averages = []
    for stage in (2, 3):
        here.stage = stage
        model = chain()
        average = [p.detach().clone() for p in model.parameters()]
        careless = [p.detach().clone() for p in model.parameters()]
        opt = here.optimizer(model, **ADAMW)
        for step in range(2):
            loss_of(model, here.rank, step).backward()
            opt.step()
            opt.zero_grad()
            with opt.gathered(), torch.no_grad():
                for mean, p in zip(average, model.parameters(), strict=True):
                    mean.mul_(0.9).add_(p, alpha=0.1)
            with torch.no_grad():
                for mean, p in zip(careless, model.parameters(), strict=True):
                    mean.mul_(0.9).add_(p, alpha=0.1)
        averages.append(average)
    for ours, theirs, without in zip(averages[1], averages[0], careless, strict=True):
        same_bits(ours, theirs, "average")
        never_quiet(without, theirs, "average outside gathered()")


class TwoTies(nn.Module):
    """An embedding tied to the head, and two other layers tied to each other."""

    def __init__(self, tied=True):
        super().__init__()
        self.emb, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        if tied:
            self.head.weight = self.emb.weight
            self.layers[2].weight, self.layers[2].bias = self.layers[0].weight, self.layers[0].bias

    def forward(self, ids):
        x = self.emb(ids)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


@row(120, ranks=(1, 2), stages=(3,))
def tied_parameters_are_all_in_the_state(here):
    def loss_of(model, rank, step):
        return model((torch.arange(3) + rank + step) % 5).square().mean()

    for units in (None, lambda model: [nn.Embedding, nn.Linear], lambda model: []):
        plain, model, opt = bits_of_stage_2(here, lambda: fill(TwoTies()), loss_of, units=units)
        with opt.gathered():
            state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        expected = plain.state_dict()
        assert list(state) == list(expected) == list(TwoTies().state_dict())
        for name, value in expected.items():
            same_bits(state[name], value, name)
        for one, other in (("emb.weight", "head.weight"), ("layers.0.weight", "layers.2.weight"),
                           ("layers.0.bias", "layers.2.bias")):
            same_bits(state[one], state[other], one)
        assert not torch.equal(state["layers.0.weight"], state["layers.1.weight"])
        ids = torch.arange(5)
        for tied in (True, False):
            loaded = TwoTies(tied)
            loaded.load_state_dict(state, strict=True)
            same_bits(loaded(ids).detach(), plain(ids).detach(), f"output of the loaded model, tied: {tied}")
    here.stage = 3
    model = Tied()
    here.optimizer(model, **ADAMW)
    assert model.last.weight is model.first.weight


# ---- memory ----------------------------------------------------------------------------


def settled():
    """Gives back what the allocator keeps, so that only what is in use counts."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def status_bytes(name):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(name + ":"))


def own_bytes():
    """Memory of this process, where a page counts for its part in each process that uses it (Pss)."""
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


class Peak:
    """Resident bytes of this process above those at the start: `peak` the most inside the block, `after` at its end.

    Pages shared with other ranks count whole in each rank that has touched them, so this is no less than what
    the rank is answerable for.
    """

    def __enter__(self):
        settled()
        self.start = status_bytes("VmRSS")
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # VmHWM starts again from what is resident now
        return self

    def __exit__(self, *_):
        self.peak = status_bytes("VmHWM") - self.start
        settled()
        self.after = status_bytes("VmRSS") - self.start


def large(layers, width=1024):
    """Layers of 4 MiB each, every page of which has been written."""
    return fill(nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))))


@row(164, ranks=(1, 2), stages=STAGES)
def replaced_memory_is_freed(here):
    arrays = [numpy.ones((64, 64), numpy.float32) for _ in range(4)]
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in arrays))
    for layer, array in zip(model, arrays, strict=True):
        layer.weight = nn.Parameter(torch.from_numpy(array))
    memory = [weakref.ref(array) for array in arrays]
    del array, arrays
    assert all(reference() is not None for reference in memory)
    opt = here.optimizer(model, **ADAMW)
    gc.collect()
    assert not any(reference() is not None for reference in memory), "the weights' first memory is still there"
    model(batch(here.rank, 0, (3, 64))).square().mean().backward()
    opt.step()
    # and a model goes with its optimizer
    kept = [weakref.ref(each) for each in (model, opt, model[0], *model.parameters())]
    here.owners.clear()
    del model, opt, layer
    gc.collect()
    assert not any(reference() is not None for reference in kept), "something keeps a model that was dropped"


@row(165, stages=STAGES)
def construction_peaks_at_model_and_shards(here):
    small = here.optimizer(large(2, 64), **ADAMW)  # what is loaded with the first optimizer is none of it
    small.step()
    model = large(16)
    weights = 64 * MIB
    settled()
    here.comm.barrier()
    before = own_bytes()
    here.comm.barrier()
    with Peak() as memory:
        opt = here.optimizer(model, **ADAMW)
    here.comm.barrier()
    grown = own_bytes() - before
    held = opt.memory()["total"]  # parameters' share, state, sums and rings
    unit, slack = 4 * MIB, 2 * MIB
    # `memory` counts from the model, so the first bound is that of the row: model + own shards + one unit.
    assert memory.peak <= held + unit + slack, f"{memory.peak / MIB:.1f} MiB, of which {held / MIB:.1f} are held"
    # The model's own memory has gone by the end, on all ranks together: what they share has no owner here.
    grown, held = here.comm.all_reduce(numpy.array([grown, held], numpy.int64), "sum") / here.ranks
    assert grown <= held - weights + slack, f"grown by {grown / MIB:.1f} MiB, of which {held / MIB:.1f} are held"
    if here.stage == 3:
        assert opt.memory()["parameters"] <= weights / here.ranks + slack
        assert shown_bytes(model) < 1024


@row(167, ranks=(4,), stages=(3,))
def saving_makes_one_copy_on_the_writer_only(here):
    model = large(8)
    one, whole, slack = 4 * MIB, 32 * MIB, 2 * MIB
    opt = here.optimizer(model, **ADAMW)
    # Maps the peers' shards, too, which is no copy of them.
    expected = [here.value(p)[:2, :2].clone() for p in model.parameters()]
    with Peak() as memory:
        state = {}
        for name, p in model.named_parameters():
            value = opt.full_param(p)
            if here.rank == 0:
                state[name] = value
            del value
    limit = (whole if here.rank == 0 else one) + one + slack
    assert memory.peak <= limit, f"rank {here.rank}: {memory.peak / MIB:.1f} MiB for saving parameter by parameter"
    for (_, value), corner in zip(state.items(), expected, strict=False):
        same_bits(value[:2, :2], corner, "saved parameter")
    state.clear()
    del state
    with Peak() as memory:
        with opt.gathered():
            assert len(model.state_dict()) == 8
            assert shown_bytes(model) == whole
    # The whole model at once is one copy on each rank, and it goes.
    assert memory.peak <= whole + one + slack, f"rank {here.rank}: {memory.peak / MIB:.1f} MiB for gathered()"
    assert memory.after <= slack, f"rank {here.rank}: {memory.after / MIB:.1f} MiB stay after gathered()"
    only_guards(model, "after gathered()")


@row(170, ranks=(1, 2), stages=(3,))
def nothing_gathered_is_reachable_when_released(here):
    for units in (None, []):
        model = fill(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))))
        elements = sum(p.numel() for p in model.parameters())
        opt = here.optimizer(model, units=units, **ADAMW)
        only_guards(model, "after construction")
        for step in range(2):
            loss = model(batch(here.rank, step, (3, 64))).square().mean()
            only_guards(model, "after forward")
            loss.backward()
            only_guards(model, "after backward")
            opt.step()
            only_guards(model, "after step()")
            with torch.no_grad():
                model(batch(here.rank, step, (3, 64)))
            only_guards(model, "after evaluation")
            with opt.gathered():
                assert shown_bytes(model) == 4 * elements
            only_guards(model, "after gathered()")
        padded = math.ceil(elements / (64 * here.ranks)) * 64 * here.ranks
        assert opt.memory()["parameters"] <= 4 * (padded // here.ranks + 64 * 8), "more than the shard"
