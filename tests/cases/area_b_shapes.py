"""Rows of area B: shapes, sizes and memory layouts."""

import torch
from torch import nn

import zero_c
from cases.rows import raised, row
from models import OneProcess, batch, close, fill


@row(31, ranks=(2, 4))
def scalar_parameter(here):
    p = nn.Parameter(torch.tensor(3.0))
    opt = here.optimizer([("p", p)], optimizer="sgd", lr=0.5)
    here.feed([p], [1.0]).backward()
    opt.step()
    assert p.shape == () and here.value(p).item() == 2.5
    assert opt.full_param(p).shape == () and opt.full_param(p).item() == 2.5
    state = opt.full_state_dict()
    q = nn.Parameter(here.value(p).clone())
    other = here.optimizer([("p", q)], optimizer="sgd", lr=0.25)
    other.load_state_dict(state)
    assert other.param_groups[0]["lr"] == 0.5
    here.feed([q], [1.0]).backward()
    other.step()
    assert q.shape == () and here.value(q).item() == 2.0


@row(32, ranks=(4,))
def more_ranks_than_elements(here):
    def options(parameters):
        return torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.1)

    p = nn.Parameter(torch.tensor([1.0, -2.0]))
    holder = nn.ParameterList([p])
    reference = OneProcess(holder, options, here.ranks)
    opt = here.optimizer([p], optimizer="adamw", lr=0.1, weight_decay=0.1)
    owned = here.comm.all_reduce(torch.tensor([sum(v.numel() for k, v in opt.state[p].items() if k == "exp_avg")]),
                                 "sum")
    assert int(owned[0]) == 2 or here.stage == 0

    def loss_of(model, rank):
        return here.feed(list(model.parameters()), [torch.tensor([rank + 1.0, 3.0])])

    for _ in range(2):
        loss_of(holder, here.rank).backward()
        norm = opt.clip_grad_norm_(1.0)
        opt.step()
        reference.backward(loss_of)
        close(torch.as_tensor(norm), reference.step(max_grad_norm=1.0), "norm")
        here.close_models(holder, reference.model)
    local, full = opt.state_dict(), opt.full_state_dict()
    for state in (local, full):
        opt.load_state_dict(state)
        close(opt.full_state_dict()["state"][0]["exp_avg"], full["state"][0]["exp_avg"])
    loss_of(holder, here.rank).backward()
    opt.step()
    reference.backward(loss_of)
    reference.step()
    here.close_models(holder, reference.model)


@row(34, ranks=(2, 3, 4))
def sizes_that_no_rank_count_divides(here):
    shapes = ((5,), (3, 2), (7, 1))
    model = fill(nn.ParameterList([nn.Parameter(torch.empty(shape)) for shape in shapes]))
    reference = OneProcess(model, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1), here.ranks)
    opt = here.optimizer(model, optimizer="adamw", lr=0.01, weight_decay=0.1, max_grad_norm=1.0)
    for step in range(3):
        def loss_of(model, rank, step=step):
            return here.feed(list(model), [batch(rank, step, shape) for shape in shapes])

        loss_of(model, here.rank).backward()
        opt.step()
        reference.backward(loss_of)
        close(torch.as_tensor(opt.last_step.norm), reference.step(max_grad_norm=1.0), "norm")
        here.close_models(model, reference.model)
    state = opt.full_state_dict()["state"]
    for index, shape in enumerate(shapes):
        assert tuple(opt.full_param(model[index]).shape) == shape
        assert tuple(state[index]["exp_avg"].shape) == shape


@row(36, ranks=(1, 2))
def channels_last_weight(here):
    def loss_of(model, rank):
        return model(batch(rank, 0, (2, 3, 4, 4))).square().sum()

    model = fill(nn.Conv2d(3, 2, 2))
    model = model.to(memory_format=torch.channels_last)
    strides = model.weight.stride()
    reference = OneProcess(model, lambda p: torch.optim.SGD(p, lr=0.01), here.ranks)
    opt = here.optimizer(model, optimizer="sgd", lr=0.01)
    loss_of(model, here.rank).backward()
    reference.backward(loss_of)
    close(opt.grad(model.weight), reference.grad(0), "gradient", rtol=1e-5, atol=1e-5)
    opt.step()
    reference.step()
    here.close_models(model, reference.model, rtol=1e-5, atol=1e-5)
    assert here.value(model.weight).stride() == strides
    close(opt.full_param(model.weight), here.value(model.weight))


@row(37)
def overlapping_memory(here):
    p = nn.Parameter(torch.zeros(1).expand(4))
    error = raised(lambda: here.optimizer([("overlapping", p)], optimizer="sgd", lr=0.1), ValueError, zero_c.Error)
    assert "overlapping" in str(error), str(error)

    class WithBuffers(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))
            self.register_buffer("expanded", torch.full((1,), here.rank + 1.0).expand(4))
            self.register_buffer("turned", torch.full((2, 3), here.rank + 1.0).t())

    model = WithBuffers()
    try:
        here.optimizer(model, optimizer="sgd", lr=0.1)
    except (ValueError, zero_c.Error) as refusal:
        assert "expanded" in str(refusal)
    else:  # module buffers start as rank 0's
        close(model.expanded, torch.ones(4), "expanded buffer")
        close(model.turned, torch.ones(3, 2), "transposed buffer")


@row(38)
def gradient_with_other_strides(here):
    values = torch.arange(6.0).reshape(2, 3)
    p = nn.Parameter(torch.zeros(2, 3))
    p.register_hook(lambda grad: grad.t().contiguous().t())
    opt = here.optimizer([p], optimizer="sgd", lr=0.5)
    here.feed([p], [values + here.rank]).backward()
    expected = values + (here.ranks - 1) / 2
    close(opt.grad(p), expected, "gradient")
    opt.step()
    close(here.value(p), -0.5 * expected)
