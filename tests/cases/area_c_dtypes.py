"""Rows of area C: data types and mixed precision."""

import torch
from torch import nn

from cases.rows import raised, row
from models import OneProcess, batch, close, same_bits


@row(39)
def two_dtypes_in_one_group(here):
    model = nn.ParameterList([nn.Parameter(torch.ones(3, dtype=torch.bfloat16)), nn.Parameter(torch.ones(2)),
                              nn.Parameter(torch.ones(4, dtype=torch.bfloat16))])
    reference = OneProcess(model, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1), here.ranks)
    opt = here.optimizer([{"params": list(model)}], optimizer="adamw", lr=0.01, weight_decay=0.1)
    for step in range(3):
        def loss_of(model, rank, step=step):
            return here.feed(list(model), [batch(rank, step, p.shape, p.dtype) for p in model])

        loss_of(model, here.rank).backward()
        opt.step()
        reference.backward(loss_of)
        reference.step()
    assert [p.dtype for p in model] == [torch.bfloat16, torch.float32, torch.bfloat16]
    here.close_models(model, reference.model)
    for index, master in enumerate(reference.masters):
        close(opt.full_state_dict()["state"][index]["exp_avg"],
              reference.optimizer.state[master]["exp_avg"], "moment")


@row(41)
def small_steps_are_not_lost_in_bf16(here):
    p = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    opt = here.optimizer([p], optimizer="adam", lr=6e-4)
    for _ in range(100):
        here.feed([p], [1.0]).backward()
        opt.step()
    close(opt.full_state_dict()["state"][0]["master"], torch.tensor([0.94]), "master", atol=1e-5)
    assert here.value(p).item() == 0.94140625


@row(43)
def moments_of_bf16_are_fp32(here):
    p = nn.Parameter(torch.ones(70, dtype=torch.bfloat16))
    opt = here.optimizer([p], optimizer="adamw", lr=0.01)
    here.feed([p], [1.0]).backward()
    opt.step()
    for state in (opt.state[p], opt.full_state_dict()["state"][0]):
        for name in ("exp_avg", "exp_avg_sq"):
            assert state[name].dtype == torch.float32, name
    assert opt.full_state_dict()["state"][0]["master"].dtype == torch.float32


@row(44)
def six_hundred_steps_are_counted(here):
    parameters = [nn.Parameter(torch.ones(1, dtype=dtype)) for dtype in (torch.bfloat16, torch.float16)]
    opt = here.optimizer(parameters, optimizer="adamw", lr=1e-5)
    for _ in range(600):
        here.feed(parameters, [1.0, 1.0]).backward()
        opt.step()
    full = opt.full_state_dict()["state"]
    assert [float(full[index]["step"]) for index in (0, 1)] == [600, 600]
    assert opt.last_step.steps == 600


@row(46)
def bf16_gradients_add_up_in_fp32(here):
    p = nn.Parameter(torch.zeros(5, dtype=torch.bfloat16))
    opt = here.optimizer([p], optimizer="sgd", lr=1.0)
    for value in [256.0] + 16 * [1.0]:
        here.feed([p], [value]).backward()
    close(opt.grad(p), torch.full((5,), 272.0), "sum of micro-batches", rtol=0, atol=0)
    opt.step()
    close(here.value(p), torch.full((5,), -272.0), rtol=0, atol=0)


@row(47)
def complex_parameters_are_refused(here):
    p = nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    error = raised(lambda: here.optimizer([("z", p)], optimizer="adam", lr=0.1), TypeError, ValueError)
    assert "z" in str(error) and "complex64" in str(error), str(error)


@row(49)
def loading_keeps_fp32_state_of_bf16(here):
    p = nn.Parameter(torch.ones(70, dtype=torch.bfloat16))
    opt = here.optimizer([p], optimizer="adamw", lr=0.01)
    here.feed([p], [1.0]).backward()
    opt.step()
    full = opt.full_state_dict()
    full["state"][0]["exp_avg"].fill_(0.1234567)
    opt.load_state_dict(full)
    for load in (opt.full_state_dict, opt.state_dict):
        opt.load_state_dict(load())
        loaded = opt.full_state_dict()["state"][0]
        for name, value in full["state"][0].items():
            if isinstance(value, torch.Tensor) and value.dim():
                same_bits(loaded[name], value, name)
    assert loaded["exp_avg"].dtype == torch.float32


@row(50)
def result_of_a_cast_is_no_parameter(here):
    cast = torch.zeros(4, requires_grad=True).to(torch.bfloat16)
    error = raised(lambda: here.optimizer([cast], optimizer="sgd", lr=0.1), ValueError)
    assert "leaf" in str(error), str(error)
