"""The models that are timed, and their batches: the same for every peer."""
import math
import pathlib
import sys

import torch
import torch.nn as nn

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "examples"))
from gpt import GPT  # noqa: E402


class ConstantGradient(torch.autograd.Function):
    """Adds one element of each parameter to x; in backward every element's gradient is `value`."""

    @staticmethod
    def forward(ctx, x, value, *params):
        ctx.value, ctx.likes = value, [(p.shape, p.dtype) for p in params]
        return x + sum(p.view(-1)[0].float() for p in params)

    @staticmethod
    def backward(ctx, upstream):
        return (upstream, None, *(torch.full(shape, ctx.value, dtype=dtype) for shape, dtype in ctx.likes))


class FlatBlock(nn.Module):
    def __init__(self, tensors, elements):
        super().__init__()
        for i in range(tensors):
            self.register_parameter(f"weight{i}", nn.Parameter(torch.empty(elements).normal_(0, 0.02)))

    def forward(self, x, value):
        return ConstantGradient.apply(x, value, *self._parameters.values())


class Flat(nn.Module):
    """Parameters without a model: what remains of a step is autograd, communication and the update."""

    def __init__(self, blocks, tensors, elements):
        super().__init__()
        self.blocks = nn.ModuleList(FlatBlock(tensors, elements) for _ in range(blocks))

    def forward(self, value):
        x = torch.zeros(())
        for block in self.blocks:
            x = block(x, value)
        return x


class LanguageModel(GPT):
    def __init__(self, layers=6, width=512):
        super().__init__(layers=layers, width=width, heads=8, context=128, vocabulary=10240)


def flat_batch(step, rank):
    return (math.sin(1 + 3 * step + 0.7 * rank),)


def token_batch(step, rank, batch=4, context=128):
    dice = torch.Generator().manual_seed(100 * step + rank)
    ids = (torch.randint(10240, (batch, 1), generator=dice) + 7 * torch.arange(context + 1)) % 10240
    return ids[:, :-1], ids[:, 1:]


class Workload:
    """full() is timed, small() warms the libraries up; batch(step, rank) gives the arguments of forward."""

    def __init__(self, full, small, batch, dtype=torch.float32):
        self.full = lambda: full().to(dtype)
        self.small = lambda: small().to(dtype)
        self.batch = batch


def small_flat():
    return Flat(2, 2, 4096)


WORKLOADS = {
    "flat64m": Workload(lambda: Flat(8, 8, 1 << 20), small_flat, flat_batch),
    "many_small": Workload(lambda: Flat(40, 100, 1024), small_flat, flat_batch),
    "gpt": Workload(LanguageModel, lambda: LanguageModel(layers=2, width=64), token_batch),
    "flat64m_bf16": Workload(lambda: Flat(8, 8, 1 << 20), small_flat, flat_batch, torch.bfloat16),
}
