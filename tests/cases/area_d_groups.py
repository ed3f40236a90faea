"""Rows of area D: parameter groups, learning rates and schedulers."""

import torch
from torch import nn

from cases.rows import raised, row
from models import OneProcess, batch, close, fill, same_bits


@row(51)
def each_group_has_its_own_numbers(here):
    def groups(parameters):
        w, b, c = parameters
        return [{"params": [w], "lr": 0.1, "weight_decay": 0.1}, {"params": [b], "lr": 0.01, "weight_decay": 0.0},
                {"params": [c], "betas": (0.5, 0.9)}]

    model = fill(nn.ParameterList([nn.Parameter(torch.empty(n)) for n in (3, 70, 2)]))
    reference = OneProcess(model, lambda p: torch.optim.AdamW(groups(p), lr=0.05), here.ranks)
    opt = here.optimizer(groups(list(model)), optimizer="adamw", lr=0.05)
    for step in range(3):
        def loss_of(model, rank, step=step):
            return here.feed(list(model), [batch(rank, step, p.shape) for p in model])

        loss_of(model, here.rank).backward()
        opt.step()
        reference.backward(loss_of)
        reference.step()
    here.close_models(model, reference.model)


@row(53)
def a_parameter_listed_twice_is_refused(here):
    x = nn.Parameter(torch.zeros(1))
    raised(lambda: here.optimizer([x, x], optimizer="sgd", lr=0.1), ValueError)
    raised(lambda: here.optimizer([{"params": [x]}, {"params": [x]}], optimizer="sgd", lr=0.1), ValueError)
    # and a refusal has changed nothing: the parameter can be used
    opt = here.optimizer([x], optimizer="sgd", lr=0.1)
    here.feed([x], [1.0]).backward()
    opt.step()
    close(here.value(x), torch.tensor([-0.1]))


@row(54)
def a_group_may_be_frozen_as_a_whole(here):
    frozen, trained = nn.Parameter(torch.ones(3), requires_grad=False), nn.Parameter(torch.ones(3))
    opt = here.optimizer([{"params": [frozen]}, {"params": [trained], "lr": 1.0}], optimizer="sgd", lr=0.1)
    here.feed([trained], [1.0]).backward()
    opt.step()
    assert len(opt.param_groups) == 2 and opt.param_groups[0]["params"][0] is frozen
    same_bits(here.value(frozen), torch.ones(3), "frozen parameter")
    close(here.value(trained), torch.zeros(3))
    groups = opt.full_state_dict()["param_groups"]
    assert [group["params"] for group in groups] == [[0], [1]]


@row(56)
def learning_rate_is_read_at_each_step(here):
    p = nn.Parameter(torch.zeros(3))
    opt = here.optimizer([p], optimizer="sgd", lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
    here.feed([p], [1.0]).backward()
    opt.step()
    scheduler.step()
    close(here.value(p), torch.full((3,), -0.1))
    opt.param_groups[0]["lr"] = 0.0
    here.feed([p], [1.0]).backward()
    opt.step()
    close(here.value(p), torch.full((3,), -0.1))
    opt.param_groups[0]["lr"] = 0.05

    q = nn.Parameter(here.value(p).clone())
    fresh = here.optimizer([q], optimizer="sgd", lr=0.7)
    resumed = torch.optim.lr_scheduler.StepLR(fresh, step_size=1, gamma=0.5)
    fresh.load_state_dict(opt.full_state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    assert fresh.param_groups[0]["lr"] == 0.05 and resumed.get_last_lr() == [0.05]
    here.feed([q], [1.0]).backward()
    fresh.step()
    close(here.value(q), torch.full((3,), -0.15))


@row(58)
def unknown_group_keys_survive(here):
    p = nn.Parameter(torch.zeros(3))
    group = {"params": [p], "initial_lr": 0.3, "tag": "decoder"}
    opt = here.optimizer([group], optimizer="adamw", lr=0.1)
    for state in (opt.state_dict(), opt.full_state_dict()):
        q = nn.Parameter(torch.zeros(3))
        fresh = here.optimizer([q], optimizer="adamw", lr=0.2)
        fresh.load_state_dict(state)
        assert fresh.param_groups[0]["initial_lr"] == 0.3 and fresh.param_groups[0]["tag"] == "decoder"
        torch.optim.lr_scheduler.LambdaLR(fresh, lambda epoch: 1.0, last_epoch=0)
        assert fresh.param_groups[0]["lr"] == 0.3


@row(60)
def learning_rate_as_tensor(here):
    trained = []
    for lr in (0.1, torch.tensor(0.1), torch.tensor([0.1])):
        p = nn.Parameter(torch.ones(5))
        opt = here.optimizer([p], optimizer="adamw", lr=lr)
        for _ in range(2):
            here.feed([p], [here.rank + 1.0]).backward()
            opt.step()
        assert p.dtype == torch.float32
        trained.append(here.value(p).clone())
    # a float32 tensor holds 0.1 rounded to fp32
    close(trained[1], trained[0])
    same_bits(trained[2], trained[1], "lr of shape [1]")


@row(61)
def scheduler_waits_for_a_skipped_step(here):
    p = nn.Parameter(torch.zeros(3, dtype=torch.float16))
    # 1.5 * 65536 overflows fp16, 1.5 * 32768 does not
    opt = here.optimizer([p], optimizer="sgd", lr=0.5, loss_scale="dynamic")
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
    skipped = []
    for _ in range(3):
        opt.scale(here.feed([p], [1.5])).backward()
        opt.step()
        skipped.append(bool(opt.last_step.skipped))
        if not skipped[-1]:
            scheduler.step()
        opt.zero_grad()
    assert skipped == [True, False, False]
    close(here.value(p), torch.full((3,), -0.5 * 1.5 - 0.25 * 1.5))
    assert opt.last_step.steps == 2 and scheduler.get_last_lr() == [0.125]
    assert opt.last_step.scale == 32768
