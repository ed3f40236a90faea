"""Small torch models, exact gradients, and the plain one-process training they are compared with.

Everything here is plain torch.  `OneProcess` is the reference of the case tests:
torch's own optimizer over fp32 masters, fed the mean over ranks of what each
rank's backward gives.
"""

import copy

import torch
from torch import nn


def feed(parameters, gradients, scale=1.0):
    """A loss whose gradient for parameters[i] is scale * gradients[i], exactly; None: not used in it."""
    terms = [(parameter * torch.as_tensor(gradient, dtype=parameter.dtype).expand_as(parameter)).sum()
             for parameter, gradient in zip(parameters, gradients, strict=True) if gradient is not None]
    return scale * sum(term.double() if term.dtype == torch.float64 else term.float() for term in terms)


def mlp(seed=0, sizes=(3, 5, 2), dtype=torch.float32):
    """Linear layers with tanh between them; the same weights for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for fan_in, fan_out in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(fan_in, fan_out), nn.Tanh()]
    return fill(nn.Sequential(*layers[:-1]), generator).to(dtype)


def fill(module, generator=None):
    """Gives every parameter values that depend on nothing but the generator."""
    generator = generator or torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5
            parameter.copy_(values)
    return module


def batch(rank, step, shape, dtype=torch.float32):
    """The input of one rank at one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


class Tied(nn.Module):
    """Three layers; the last one borrows weight and bias of the first."""

    def __init__(self, width=2):
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(width, width) for _ in range(3))
        self.last.weight, self.last.bias = self.first.weight, self.first.bias
        fill(self)

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class OneProcess:
    """One process that sees the data of all ranks.

    backward(loss_of) adds the mean over ranks of the gradients of
    loss_of(model, rank); step() clips, updates masters in fp32 (fp64) and
    rounds them into the model.  `mean=False` sums over ranks.
    """

    def __init__(self, model, make_optimizer, ranks, mean=True):
        self.model = copy.deepcopy(model)
        self.ranks = ranks
        self.divisor = ranks if mean else 1
        self.parameters = list(self.model.parameters())
        self.masters = [p.detach().clone() if p.dtype == torch.float64 else p.detach().float().clone()
                        for p in self.parameters]
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.requires_grad_(parameter.requires_grad)
        self.optimizer = make_optimizer(self.masters)

    def backward(self, loss_of):
        for rank in range(self.ranks):
            used = [p for p in self.parameters if p.requires_grad]
            for parameter in used:
                parameter.grad = None
            loss_of(self.model, rank).backward()
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if parameter.requires_grad and parameter.grad is not None:
                    part = parameter.grad.to(master.dtype) / self.divisor
                    master.grad = part if master.grad is None else master.grad + part
                    parameter.grad = None

    def grad(self, index):
        return self.masters[index].grad

    def step(self, max_grad_norm=None):
        norm = None
        if max_grad_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(self.masters, max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master)
        return norm


def close(actual, expected, what="value", rtol=1e-6, atol=1e-7):
    """Asserts equality within tolerance; for 16-bit tensors within one of their roundings too."""
    actual, expected = actual.detach(), torch.as_tensor(expected).detach()
    assert tuple(actual.shape) == tuple(expected.shape), f"{what}: shape {actual.shape}, wanted {expected.shape}"
    if actual.dtype in (torch.bfloat16, torch.float16):
        rtol = max(rtol, torch.finfo(actual.dtype).eps)
    torch.testing.assert_close(actual.double(), expected.double(), rtol=rtol, atol=atol,
                               msg=lambda text: f"{what}: {text}")


def close_models(model, reference, **tolerances):
    """Every parameter of the two models agrees."""
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        close(ours, theirs, name, **tolerances)


def same_bits(actual, expected, what="value"):
    """Asserts that two tensors are equal in every bit, NaN included."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, what
    actual, expected = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (actual, expected))
    assert torch.equal(actual, expected), f"{what}: bits differ"
