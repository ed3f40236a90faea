"""Rows of area A: parameter sharing, the shape of the graph, which object a parameter is."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_c
from cases.rows import SHARDED_STATE, STAGES, raised, row
from models import OneProcess, Tied, batch, close, fill, mlp, same_bits


def sgd(lr=0.1):
    return lambda parameters: torch.optim.SGD(parameters, lr=lr)


def adamw(lr=0.01, weight_decay=0.1):
    return lambda parameters: torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay)


@row(2)
def shared_layer_under_reentrant_checkpoint(here):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared, self.between = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x):
            x = checkpoint(self.shared, x, use_reentrant=True)
            return checkpoint(self.shared, self.between(x), use_reentrant=True)

    def loss_of(model, rank):
        return model(batch(rank, 0, (4, 2)).requires_grad_()).square().sum()

    model = fill(Twice())
    reference = OneProcess(model, sgd(), here.ranks)
    opt = here.optimizer(model, optimizer="sgd", lr=0.1)
    loss_of(model, here.rank).backward()
    reference.backward(loss_of)
    for index, parameter in enumerate(model.parameters()):
        close(opt.grad(parameter), reference.grad(index), "gradient")
    opt.step()
    reference.step()
    here.close_models(model, reference.model)


@row(3, stages=(None,))
def tied_layers_agree_between_stages(here):
    def loss_of(step):
        return lambda model, rank: (model(batch(rank, step, (3, 2))) - 1).square().mean()

    trained = []
    for stage in STAGES:
        here.stage = stage
        model = Tied()
        reference = OneProcess(model, adamw(), here.ranks)
        opt = here.optimizer(model, optimizer="adamw", lr=0.01, weight_decay=0.1)
        losses = []
        for step in range(5):
            loss = loss_of(step)(model, here.rank)
            with torch.no_grad():
                close(loss, loss_of(step)(reference.model, here.rank), f"loss at step {step}")
            losses.append(loss.detach())
            loss.backward()
            opt.step()
            opt.zero_grad()
            reference.backward(loss_of(step))
            reference.step()
        assert model.last.weight is model.first.weight
        assert len(opt.full_state_dict()["state"]) == 4  # weight and bias of two layers: one state for the pair
        trained.append((losses, [here.value(p).clone() for p in model.parameters()]))
    for losses, parameters in trained[1:]:
        assert losses == trained[0][0]
        for ours, first in zip(parameters, trained[0][1], strict=True):
            same_bits(ours, first, "parameter of another stage")


@row(7)
def a_layer_no_rank_uses_stays(here):
    model = nn.ModuleDict({"used": fill(nn.Linear(2, 2)), "unused": fill(nn.Linear(2, 2))})
    before = [p.detach().clone() for p in model["unused"].parameters()]
    opt = here.optimizer(model, optimizer="adamw", lr=0.1, weight_decay=0.1)
    for step in range(3):
        model["used"](batch(here.rank, step, (2, 2))).sum().backward()
        opt.step()
        opt.zero_grad()
    for parameter, old in zip(model["unused"].parameters(), before, strict=True):
        same_bits(here.value(parameter), old, "unused parameter")
    full = opt.full_state_dict()["state"]
    assert [float(full[index]["step"]) for index in (0, 1)] == [3, 3]
    for index in (2, 3):
        state = full.get(index, {})
        assert float(state.get("step", 0)) == 0
        for name in ("exp_avg", "exp_avg_sq"):
            assert name not in state or not state[name].any(), f"an unused parameter has {name}"


@row(9)
def a_shard_without_gradient_keeps_step_collective(here):
    # 64 elements each: of one smallest bucket of two ranks, each rank owns one parameter.
    first, second = nn.Parameter(torch.zeros(64)), nn.Parameter(torch.zeros(64))
    opt = here.optimizer([first, second], optimizer="sgd", lr=1.0)
    for _ in range(2):
        here.feed([first], [1.0]).backward()
        opt.step()
    assert opt.last_step.steps == 2
    close(here.value(first), torch.full((64,), -2.0))
    close(here.value(second), torch.zeros(64))


@row(12)
def frozen_weight_beside_trainable_bias(here):
    def loss_of(step):
        return lambda model, rank: model(batch(rank, step, (3, 2))).square().sum()

    model = fill(nn.Linear(2, 2))
    model.weight.requires_grad_(False)
    weight = model.weight.detach().clone()
    reference = OneProcess(model, adamw(), here.ranks)
    opt = here.optimizer(model, optimizer="adamw", lr=0.01, weight_decay=0.1)
    for step in range(2):
        loss_of(step)(model, here.rank).backward()
        opt.step()
        opt.zero_grad()
        reference.backward(loss_of(step))
        reference.step()
    same_bits(here.value(model.weight), weight, "frozen weight")
    here.close_models(model, reference.model)


@row(14, stages=SHARDED_STATE)
def unfrozen_later_starts_to_move(here):
    def loss_of(step):
        return lambda model, rank: model(batch(rank, step, (3, 3))).square().sum()

    model = mlp()
    reference = OneProcess(model, adamw(), here.ranks)
    first = list(model[0].parameters())
    for parameter, theirs in zip(first, reference.parameters[:2], strict=True):
        parameter.requires_grad_(False)
        theirs.requires_grad_(False)
    opt = here.optimizer(model, optimizer="adamw", lr=0.01, weight_decay=0.1)
    for step in range(4):
        if step == 2:
            for parameter in first + reference.parameters[:2]:
                parameter.requires_grad_(True)
        loss_of(step)(model, here.rank).backward()
        opt.step()
        opt.zero_grad()
        reference.backward(loss_of(step))
        reference.step()
        here.close_models(model, reference.model)
        if step == 2:
            assert float(opt.full_state_dict()["state"][0]["step"]) == 1
    assert [float(opt.full_state_dict()["state"][index]["step"]) for index in range(4)] == [2, 2, 4, 4]


@row(16)
def second_backward_over_one_graph(here):
    for zero_between, times, make in ((False, 3.0, mlp), (True, 2.0, mlp), (False, 3.0, lambda: fill(nn.Linear(3, 2)))):
        model = make()
        x = batch(here.rank, 0, (4, 3))
        once = OneProcess(model, sgd(), here.ranks)
        opt = here.optimizer(model, optimizer="sgd", lr=1.0)
        once.backward(lambda m, rank: m(batch(rank, 0, (4, 3))).sum())
        y = model(x)
        y.sum().backward(retain_graph=True)
        if zero_between:
            opt.zero_grad()
        (2 * y).sum().backward()
        for index, parameter in enumerate(model.parameters()):
            close(opt.grad(parameter), times * once.grad(index), f"gradient, zero_grad between: {zero_between}")
        opt.step()


@row(17, stages=SHARDED_STATE)
def gradient_penalty_is_averaged_once(here):
    def loss_of(model, rank):
        x = batch(rank, 0, (4, 3)).requires_grad_()
        loss = model(x).square().sum()
        penalty, = torch.autograd.grad(loss, x, create_graph=True)
        return loss + (penalty * penalty).sum()

    model = mlp()
    reference = OneProcess(model, sgd(), here.ranks)
    opt = here.optimizer(model, optimizer="sgd", lr=0.1)
    loss_of(model, here.rank).backward()
    reference.backward(loss_of)
    for index, parameter in enumerate(model.parameters()):
        close(opt.grad(parameter), reference.grad(index), "gradient")


@row(18)
def gradients_have_an_accessor_and_a_guard(here):
    model = fill(nn.ParameterList([torch.empty(2, 3), torch.empty(2)]))
    opt = here.optimizer(model, optimizer="sgd", lr=0.1)
    here.feed(list(model.parameters()), [here.rank + 1.0, 10.0]).backward()
    mean = sum(range(1, here.ranks + 1)) / here.ranks
    for parameter, value in zip(model.parameters(), (mean, 10.0), strict=True):
        # what is left in .grad must not pass for a gradient
        assert parameter.grad is None or (parameter.grad.shape == parameter.shape and parameter.grad.isnan().all())
        close(opt.grad(parameter), torch.full(parameter.shape, value))


@row(20)
def custom_function_returns_no_gradient(here):
    class OnlyInput(torch.autograd.Function):
        @staticmethod
        def forward(context, x, w):
            context.save_for_backward(w)
            return x * w

        @staticmethod
        def backward(context, grad):
            return grad * context.saved_tensors[0], None

    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.x, self.w = nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((3,), 2.0))

        def forward(self):
            return OnlyInput.apply(self.x, self.w).sum()

    model = Uses()
    opt = here.optimizer(model, optimizer="adamw", lr=0.1, weight_decay=0.5)
    model().backward()
    opt.step()
    same_bits(here.value(model.w), torch.full((3,), 2.0), "parameter without gradient")
    close(here.value(model.x), torch.full((3,), 0.95 - 0.1))  # decay, then a first step of size lr


@row(25)
def training_goes_on_after_an_exception(here):
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
            self.where = None

        def forward(self, x):
            between = self.first(x)
            if self.where == "forward":
                raise RuntimeError("told to fail")
            result = self.second(between)
            if self.where == "backward":  # when the second layer's gradients are there, the first one's are not
                between.register_hook(self.refuse)
            return result

        def refuse(self, grad):
            raise RuntimeError("told to fail")

    def loss_of(model, rank):
        return model(batch(rank, 1, (3, 2))).square().sum()

    for where in ("forward", "backward"):
        model = fill(Fails())
        reference = OneProcess(model, sgd(), here.ranks)
        opt = here.optimizer(model, optimizer="sgd", lr=0.1)
        model.where = where
        raised(lambda: loss_of(model, here.rank).backward(), RuntimeError)
        model.where = None
        opt.zero_grad()
        loss_of(model, here.rank).backward()
        opt.step()
        reference.backward(loss_of)
        reference.step()
        here.close_models(model, reference.model)


@row(29)
def shapes_stay_and_growing_is_refused(here):
    model = nn.ModuleDict({"emb": nn.Embedding(5, 4)})
    opt = here.optimizer(model, optimizer="sgd", lr=0.1)
    assert tuple(model["emb"].weight.shape) == (5, 4)
    grown = torch.zeros(7, 4)
    grown[:5] = here.value(model["emb"].weight)
    model["emb"].weight = nn.Parameter(grown)

    def use():
        model["emb"](torch.tensor([6])).sum().backward()
        opt.step()

    error = raised(use, zero_c.Error, ValueError, RuntimeError)
    assert "emb.weight" in str(error), str(error)
