"""Rows of area G: what the optimizers compute; values worked out by hand from the formulas."""

import torch
from torch import nn

from cases.rows import row
from models import close

BOTH = (1, 2)


def train(here, start, gradients, **options):
    """Values of one parameter of three elements after each step; None: a step without a gradient."""
    p, other = nn.Parameter(torch.full((3,), start)), nn.Parameter(torch.zeros(1))
    opt = here.optimizer([p, other], **options)
    values = []
    for gradient in gradients:
        here.feed([p, other], [gradient, 1.0]).backward()
        opt.step()
        value = here.value(p)
        assert torch.equal(value, value[0].expand(3))
        values.append(value[0].item())
    return opt, p, values


def agree(values, expected, tolerance=1e-6):
    close(torch.tensor(values), torch.tensor(expected), rtol=tolerance, atol=tolerance)


@row(94, ranks=BOTH)
def bias_correction(here):
    for optimizer in ("adam", "adamw"):
        agree(train(here, 1.0, [0.5], optimizer=optimizer, lr=0.1, weight_decay=0.0)[2], [0.9])


@row(95, ranks=BOTH)
def adam_is_not_adamw(here):
    agree(train(here, 1.0, [0.5], optimizer="adam", lr=0.1, weight_decay=0.1)[2], [0.9])
    agree(train(here, 1.0, [0.5], optimizer="adamw", lr=0.1, weight_decay=0.1)[2], [0.89])


@row(97, ranks=BOTH)
def amsgrad_keeps_its_maximum(here):
    options = {"optimizer": "adam", "betas": (0.0, 0.5), "lr": 0.1, "eps": 1e-8}
    opt, p, values = train(here, 0.0, [1.0, 0.1, 0.1], amsgrad=True, **options)
    agree(values, [-0.1, -0.1122474, -0.1254762])
    agree([opt.full_state_dict()["state"][0]["max_exp_avg_sq"][0].item()], [0.5])
    agree(train(here, 0.0, [1.0, 0.1, 0.1], **options)[2], [-0.1, -0.1171499, -0.1428477])


@row(99, ranks=BOTH)
def one_step_counts_once(here):
    parameters = [nn.Parameter(torch.zeros(200, dtype=dtype)) for dtype in
                  (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16)]
    # buckets of the smallest size: 64 elements for each rank, several for each dtype
    opt = here.optimizer(parameters, optimizer="adam", lr=0.125, bucket_mb=1e-6)
    here.feed(parameters, [1.0] * 4).backward()
    opt.step()
    full = opt.full_state_dict()["state"]
    for index, parameter in enumerate(parameters):
        assert float(full[index]["step"]) == 1
        close(here.value(parameter), torch.full((200,), -0.125))
    assert opt.last_step.steps == 1


@row(101, ranks=BOTH)
def momentum_starts_at_the_first_gradient(here):
    options = {"optimizer": "sgd", "momentum": 0.9, "dampening": 0.5, "lr": 0.1}
    agree(train(here, 0.0, [1.0, 1.0], **options)[2], [-0.1, -0.24])
    agree(train(here, 0.0, [None, 1.0, 1.0], **options)[2], [0.0, -0.1, -0.24])


@row(102, ranks=BOTH)
def nesterov_looks_ahead_without_writing(here):
    opt, p, values = train(here, 0.0, [1.0, 1.0], optimizer="sgd", momentum=0.9, nesterov=True, lr=0.1)
    agree(values, [-0.19, -0.461])
    agree([opt.full_state_dict()["state"][0]["momentum_buffer"][0].item()], [1.9])
