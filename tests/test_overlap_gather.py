"""overlap_gather: the next forward finds the parameters that step() left under way, and nobody else has to know.

Functions named `on_...` run on each rank. That parameters are right is compared, bit for bit, with a run that waits in
step(); that they are waited for before they are read is watched where torch dispatches its operations.
"""

import contextlib
import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import zero_c  # noqa: E402
from models import Tied, batch, fill, mlp, same_bits  # noqa: E402
from ranks import RankGroup  # noqa: E402
from zero_c.torch import ShardedOptimizer  # noqa: E402

WIDTH = 8


@pytest.fixture(scope="module")
def pair():
    with RankGroup(2) as group:
        yield group


def on_rank(name, *args):
    return globals()[f"on_{name}"](zero_c.init(), *args)


# ---- models -----------------------------------------------------------------------


class Block(nn.Module):
    """A transformer layer; MultiheadAttention reads the weights of its child out_proj."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.wide = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.wide(x)


class Language(nn.Module):
    """Layers between an embedding and a head that is the embedding, used as a function."""

    def __init__(self, again=False):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.again = again  # layers are run a second time in backward

    def forward(self, x):
        tokens = (x[..., 0].abs() * 7).long() % 11
        h = self.embed(tokens).unsqueeze(1) * self.scale
        for layer in self.layers:
            h = checkpoint(layer, h, use_reentrant=False) if self.again else layer(h)
        return nn.functional.linear(h, self.embed.weight)


class Fused(nn.Module):
    """Layers that never call their children."""

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 3)

        def forward(self, x):
            return torch.tanh(x @ self.up.weight.T + self.up.bias) @ self.down.weight.T + self.down.bias

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(self.Layer() for _ in range(3)))

    def forward(self, x):
        return self.layers(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList([nn.LSTM(3, 5, 2, batch_first=True), nn.GRU(5, 4, batch_first=True)])

    def forward(self, x):
        for cell in self.cells:
            x = cell(x.unsqueeze(0) if x.dim() == 2 else x)[0]
        return x


def encoder():
    layer = nn.TransformerEncoderLayer(3, 1, 7, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def hooked():
    """Weights that are made from others in a hook, or by a module that is a parametrization."""
    with pytest.warns(FutureWarning):
        old = nn.utils.weight_norm(nn.Linear(3, 3))
    return nn.Sequential(old, nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)), nn.Linear(3, 2))


def tied():
    model = Tied(3)
    return nn.Sequential(model.first, model.middle, model.last)


MODELS = {"mlp": lambda: mlp(sizes=(3, 6, 6, 2)), "language": Language, "checkpointed": lambda: Language(again=True),
          "fused": Fused, "recurrent": Recurrent, "encoder": encoder, "hooked": hooked, "tied": lambda: Tied(3),
          "tied layers": tied}


def made(kind):
    torch.manual_seed(0)
    return fill(MODELS[kind]())


# ---- the same bits --------------------------------------------------------------------


def trained(comm, kind, overlap, **options):
    model = made(kind)
    opt = ShardedOptimizer(model, comm=comm, lr=0.01, bucket_mb=0.0002, max_grad_norm=0.5, overlap_gather=overlap, **options)
    losses = []
    for step in range(5):
        if step == 2:
            with opt.no_sync():
                model(batch(comm.rank, 50, (4, 3))).square().mean().backward()
        loss = model(batch(comm.rank, step, (4, 3))).square().mean()
        loss.backward()
        losses.append(loss.detach())
        opt.step()
        opt.zero_grad()
        if step == 3:
            model.eval()
            losses.append(model(batch(comm.rank, 60, (4, 3))).square().mean().detach())
            model.train()
    opt.wait()
    norm = torch.tensor(opt.last_step.norm)
    return [*losses, norm, *(p.detach().clone() for p in model.parameters())]


def on_equal_bits(comm, kind, stage, options):
    for one, other in zip(trained(comm, kind, False, stage=stage), trained(comm, kind, True, stage=stage, **options),
                          strict=True):
        same_bits(one, other)


@pytest.mark.parametrize("kind", MODELS)
def test_training_has_the_same_bits(pair, kind):
    for stage in (1, 2):
        pair.run(on_rank, "equal_bits", kind, stage, {})


def test_shared_parameters_too(pair):
    pair.run(on_rank, "equal_bits", "language", 2, {"shared_params": True})


# ---- nothing is read before it was waited for -------------------------------------------


class Watch(TorchDispatchMode):
    """Fails when an operation is given memory of a parameter that nothing has waited for since the step."""

    def __init__(self, opt):
        super().__init__()
        self.ranges = [(p.data_ptr(), p.data_ptr() + p.nbytes, index, name)
                       for index, (name, p, _) in enumerate(opt._managed)]
        self.engine, self.waited, self.read = opt._engine, set(), set()
        self.gpu = opt._engine.gpu
        opt._waits.engine = self

    def wait_params(self, indices=None):
        self.waited |= set(range(len(self.ranges)) if indices is None else indices)
        self.engine.wait_params(*(() if indices is None else (indices,)))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and value.numel():
                for first, end, index, name in self.ranges:
                    if first <= value.data_ptr() < end:
                        assert index in self.waited, f"{function} reads '{name}', which may be under way"
                        self.read.add(index)
        return function(*args, **(kwargs or {}))


def watched(kind, *, units=None, call=None, grad=True):
    """One forward, and backward, after a step: which parameters were waited for when the first was read."""
    with zero_c.local_group(1)[0] as comm:
        model = made(kind)
        opt = ShardedOptimizer(model, comm=comm, lr=0.01, overlap_gather=True, units=units)
        model(batch(0, 0, (4, 3))).square().mean().backward()
        opt.step()
        watch = Watch(opt)
        if not grad:
            model.eval()
        with watch, contextlib.nullcontext() if grad else torch.no_grad():
            out = (call or nn.Module.__call__)(model, batch(0, 1, (4, 3)))
            if grad:
                out.square().mean().backward()
        assert watch.read == set(range(len(opt._managed)))
        if grad:
            opt.step()


@pytest.mark.parametrize("grad", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("kind", MODELS)
def test_parameters_are_waited_for_before_they_are_read(kind, grad):
    watched(kind, grad=grad)


def test_a_part_of_the_model_that_is_called_alone_waits_for_itself():
    watched("tied", call=lambda model, x: model.last(torch.tanh(model.middle(torch.tanh(model.first(x))))))
    watched("fused", call=lambda model, x: model.layers(x))


def test_a_layer_waits_as_a_whole_and_for_no_other():
    with zero_c.local_group(1)[0] as comm:
        model = made("language")
        opt = ShardedOptimizer(model, comm=comm, lr=0.01, overlap_gather=True)
        watch, seen = Watch(opt), []
        opt._waits.steps += 1
        model.layers[1].register_forward_pre_hook(lambda *_: seen.append(set(watch.waited)))
        model(batch(0, 1, (4, 3)))
        names = [name for name, _, _ in opt._managed]
        expected = {name for name in names if not name.startswith("layers.2.")}
        assert {names[index] for index in seen[0]} == expected


def test_the_watch_sees_what_the_rule_does_not_cover():
    """Weights of units read by the module around: these must be no units, or opt.wait() comes first."""
    def penalty(model, x):
        return model(x) + sum(layer.up.weight.square().sum() for layer in model.layers)

    def early(model, x):
        return sum(layer.up.weight.square().sum() for layer in model.layers) + model(x)

    watched("fused", call=penalty)
    with pytest.raises(AssertionError, match="layers.0.up.weight"):
        watched("fused", call=early)
    with pytest.raises(AssertionError, match="layers.0.up.weight"):
        watched("fused", call=early, units=[nn.Linear])


# ---- other readers and writers -----------------------------------------------------------


def on_state_dicts(comm):
    model, other = made("mlp"), made("mlp")
    opt = ShardedOptimizer(model, comm=comm, lr=0.01, bucket_mb=0.0002, overlap_gather=True)
    plain = ShardedOptimizer(other, comm=comm, lr=0.01, bucket_mb=0.0002)

    def step():
        for one, optimizer in ((model, opt), (other, plain)):
            one(batch(comm.rank, 1, (4, 3))).square().mean().backward()
            optimizer.step()

    def equal():
        for one, theirs in zip(model.parameters(), other.parameters(), strict=True):
            same_bits(one, theirs)

    step()
    for key, value in model.state_dict().items():
        same_bits(value, other.state_dict()[key])
    step()
    for one, theirs in zip(model.parameters(), other.parameters(), strict=True):
        same_bits(opt.full_param(one), theirs)
    step()
    with opt.gathered(write=True) as ours, plain.gathered(write=True) as theirs, torch.no_grad():
        for tensor in [*ours, *theirs]:
            tensor.mul_(0.5)
    equal()
    step()
    saved = {key: value.clone() for key, value in other.state_dict().items()}
    step()
    model.load_state_dict(saved)
    other.load_state_dict(saved)
    equal()
    step()
    opt.wait()
    with torch.no_grad():
        for parameter in [*model.parameters(), *other.parameters()]:
            parameter.add_(1)
    step()
    opt.load_state_dict(plain.full_state_dict())
    step()
    opt.wait()
    equal()


def test_what_reads_and_writes_weights_waits(pair):
    pair.run(on_rank, "state_dicts")


def on_more_parameters(comm):
    model = nn.ModuleDict({"old": mlp(sizes=(3, 4, 3)), "new": mlp(sizes=(3, 4, 2))})
    opt = ShardedOptimizer(model["old"].parameters(), module=model, comm=comm, lr=0.01, bucket_mb=0.0002, overlap_gather=True)
    opt.add_param_group({"params": list(model["new"].parameters())})
    for step in range(3):
        model["new"](model["old"](batch(comm.rank, step, (4, 3)))).square().mean().backward()
        opt.step()
    opt.wait()
    with pytest.raises(ValueError, match="is not in the module"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    return [p.detach().clone() for p in model.parameters()]


def test_parameters_that_are_added_are_waited_for(pair):
    one, other = pair.run(on_rank, "more_parameters")
    for ours, theirs in zip(one, other, strict=True):
        assert (ours == theirs).all()


def on_alone(comm):
    """Rank 0 goes on while the other rank is elsewhere."""
    model = made("language")
    opt = ShardedOptimizer(model, comm=comm, lr=0.01, bucket_mb=0.0002, overlap_gather=True)
    model(batch(comm.rank, 0, (4, 3))).square().mean().backward()
    opt.step()
    if comm.rank:
        comm.barrier()  # it helps the others from here
    model(batch(comm.rank, 1, (4, 3)))
    if not comm.rank:
        comm.barrier()
    opt.zero_grad()
    opt.step()


def test_ranks_that_are_elsewhere_help(pair):
    pair.run(on_rank, "alone")


def leave(how):
    """A program that ends right after a step; the other rank evaluates before it does."""
    comm = zero_c.init()
    model = made("mlp")
    opt = ShardedOptimizer(model, comm=comm, lr=0.01, bucket_mb=0.0002, overlap_gather=True)
    model(batch(comm.rank, 0, (4, 3))).square().mean().backward()
    opt.step()
    if comm.rank == 0:
        out = model(batch(0, 1, (4, 3)))
        opt.wait()
        return out.detach()
    if how == "close":
        comm.close()
    else:
        gone = weakref.ref(opt)
        del opt, model
        gc.collect()
        assert gone() is None
    return None


@pytest.mark.parametrize("how", ["close", "drop"])
def test_whoever_leaves_serves_the_others_first(how):
    with RankGroup(2) as group:
        group.run(leave, how)


def test_hooks_go_with_the_optimizer():
    with zero_c.local_group(1)[0] as comm:
        model = made("language")
        opt = ShardedOptimizer(model, comm=comm, lr=0.01, overlap_gather=True)
        assert all(module._forward_pre_hooks for module in model.modules() if list(module.parameters(recurse=False)))
        del opt
        gc.collect()
        assert not any(module._forward_pre_hooks for module in model.modules())


# ---- arguments -----------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "kind", "part"), [
    ({"stage": 0}, ValueError, "at stage 0"),
    ({"stage": 3}, ValueError, "at stage 3"),
    ({"overlap_gather": 1}, TypeError, "legal: True, False"),
    ({"overlap_gather": False, "units": [nn.Linear]}, ValueError, "with overlap_gather=True, only"),
    ({"units": [nn.Conv1d]}, ValueError, "no module of class Conv1d"),
])
def test_what_does_not_fit_is_refused(settings, kind, part):
    with zero_c.local_group(1)[0] as comm, pytest.raises(kind, match=part):
        ShardedOptimizer(mlp(), comm=comm, **{"overlap_gather": True} | settings)


def test_it_needs_the_module():
    with zero_c.local_group(1)[0] as comm:
        model = mlp()
        with pytest.raises(ValueError, match="pass the module"):
            ShardedOptimizer(model.parameters(), comm=comm, overlap_gather=True)
        with pytest.raises(ValueError, match="is not in the module"):
            ShardedOptimizer([*model.parameters(), nn.Parameter(torch.ones(3))], module=model, comm=comm, overlap_gather=True)
