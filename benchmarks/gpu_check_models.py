"""Models, data and the comparison with torch's optimizers for the checks; nothing here is bound to a GPU.

A training is compared with torch on the gradients that the engine itself was given: a hook in front of the engine's
notes them, and torch's optimizer gets their sums. So the comparison is of what this package does and not of two runs of
a matrix product, and its tolerance can be small.
"""
import copy
import math
import os
from functools import partial

import numpy
import torch
import zero_c
from gpu_check_child import Failed
from torch import nn
from torch.utils.checkpoint import checkpoint
from zero_c.torch import ShardedOptimizer

STEPS, ROUNDS = 4, 2        # rounds: backwards in a step
MAX_NORM = 0.5
VOCABULARY, LENGTH, BATCH = 32, 16, 8
ULP, BF16_HALF_ULP = 2.0**-23, 2.0**-8      # as shares of a value, at most
LR = {"adamw": 0.01, "sgd": 0.1}
TORCH_OPTIMIZERS = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
OPTIONS = {"adamw": {"weight_decay": 0.1}, "sgd": {"momentum": 0.9, "nesterov": True}}


class Block(nn.Module):
    """Attention and a feed-forward layer, of plain operations whose backward is the same each time."""

    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-1, -2) / math.sqrt(width // self.heads)).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.feed(self.norm2(x))


class Transformer(nn.Module):
    """Next-token model; `recompute`: None, "reentrant" or "plain" checkpointing of each block."""

    def __init__(self, layers, width=64, recompute=None):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.recompute = recompute

    def forward(self, tokens):
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = block(x)
        return nn.functional.cross_entropy(self.head(x).float().flatten(0, 1), tokens[:, 1:].flatten())


class Mlp(nn.Module):
    def __init__(self, width=200):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(LENGTH, width), nn.GELU(), nn.Linear(width, width), nn.GELU(),
                                    nn.Linear(width, 1))

    def forward(self, tokens):
        x = (tokens / VOCABULARY - 0.5).to(self.layers[0].weight.dtype)
        return (self.layers(x[:, :LENGTH]).float() - x.sum(1, keepdim=True)).square().mean()


def tokens_of(step, part, rank, device):
    """A rank's batch in one backward of one step."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * part + rank)
    return torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator).to(device)


def built(make, dtype, device):
    torch.manual_seed(0)
    return make().to(device=device, dtype=dtype)


def same_operations_same_bits():
    """torch takes kernels that give the same bits for the same operands, where it has them."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


# ---- training ---------------------------------------------------------------------


class Record:
    """What a training gave: losses and norms of all steps, parameters at its end, gradients as the engine got them."""

    def __init__(self):
        self.losses, self.norms, self.values, self.gradients = [], [], [], []

    def note(self, index, gradient):
        self.gradients[-1][index] = gradient.detach().clone()

    def first_difference(self, other):
        """In words, what is not the same in both, bit for bit; None if everything is."""
        for step, (ours, theirs) in enumerate(zip(self.losses, other.losses, strict=True)):
            if ours != theirs:
                return f"the loss of step {step} is {ours:.9g}, not {theirs:.9g}"
        for i, (ours, theirs) in enumerate(zip(self.values, other.values, strict=True)):
            if not torch.equal(ours, theirs):
                return f"{int((ours != theirs).sum())} of {ours.numel()} elements of parameter {i} differ"
        return None


def train(model, steps=STEPS, rounds=ROUNDS, **options):
    """A Record; `options` are ShardedOptimizer's."""
    record, params = Record(), list(model.parameters())
    device = params[0].device
    for index, param in enumerate(params):
        param.register_hook(partial(record.note, index))
    opt = ShardedOptimizer(model, **options)
    rank = zero_c.init().rank
    for step in range(steps):
        losses = []
        for part in range(rounds):
            record.gradients.append({})
            loss = model(tokens_of(step, part, rank, device))
            loss.backward()
            losses.append(loss.detach())
        opt.step()
        opt.zero_grad()
        record.losses.append(torch.stack(losses).mean().item())
        record.norms.append(opt.last_step.norm)
    record.values = [opt.full_param(param) for param in params]
    return record


# ---- torch's numbers --------------------------------------------------------------


def summed(gradients, comm):
    """One backward's gradients over all ranks, added in rank order, in fp32."""
    total = {}
    for index, gradient in gradients.items():
        ranks = comm.all_gather(gradient.float().cpu().numpy().ravel())
        total[index] = torch.from_numpy(numpy.add.reduce(ranks, 0)).view(gradient.shape).to(gradient.device)
    return total


def torch_training(model, record, rule, rounds=ROUNDS, max_norm=MAX_NORM):
    """Values, norms and losses of torch's optimizer on the gradients of a Record; values are fp32 for every dtype."""
    comm = zero_c.init()
    masters = [param.detach().float().clone().requires_grad_() for param in model.parameters()]
    optimizer = TORCH_OPTIMIZERS[rule](masters, lr=LR[rule], **OPTIONS[rule])
    norms, losses = [], []
    device = masters[0].device
    for step in range(len(record.gradients) // rounds):
        with torch.no_grad():
            for param, master in zip(model.parameters(), masters, strict=True):
                param.copy_(master)
            batches = [tokens_of(step, part, comm.rank, device) for part in range(rounds)]
            losses.append(sum(model(batch).item() for batch in batches) / rounds)
        for part in range(rounds):
            for index, gradient in summed(record.gradients[step * rounds + part], comm).items():
                gradient = gradient / comm.world_size
                masters[index].grad = gradient if masters[index].grad is None else masters[index].grad + gradient
        norms.append(nn.utils.clip_grad_norm_(masters, max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    return [master.detach() for master in masters], norms, losses


def tolerance(values, dtype, rule, steps):
    """How far a training may be from torch's on the same gradients.

    A step is within 4 ulp of torch's; the two norms differ by some roundings, which makes 1e-5 of the learning rate at
    most: an update is some learning rates with Adam, and with SGD and a clipped gradient of norm below 1. The rest is
    the rounding of a master to 16 bits.
    """
    bound = steps * (4 * ULP * values.abs() + 1e-5 * LR[rule])
    return bound + BF16_HALF_ULP * values.abs() if dtype == torch.bfloat16 else bound


def check_near(ours, torchs, dtype, rule, steps, where):
    """Failed if a value is further away than it may be; the largest distance, in what it may be."""
    worst = 0.0
    for index, (one, other) in enumerate(zip(ours, torchs, strict=True)):
        share = ((one.float() - other).abs() / tolerance(other, dtype, rule, steps)).max().item()
        if not share <= 1:
            raise Failed(f"{where}: parameter {index} is {share:.3g} tolerances away from torch's")
        worst = max(worst, share)
    return worst


def compare_with_torch(make, dtype, rule, device):
    """Stage 0 against torch and the others against it, bit for bit; the largest distance, in tolerances."""
    name = f"{make.__name__} {str(dtype).removeprefix('torch.')} {rule}"
    first = None
    for stage in (0, 1, 2, 3):
        model = built(make, dtype, device)
        twin = copy.deepcopy(model)
        record = train(model, stage=stage, optimizer=rule, lr=LR[rule], max_grad_norm=MAX_NORM, **OPTIONS[rule])
        where = f"{name} stage {stage}"
        if first is None:
            first = record
            values, norms, losses = torch_training(twin, record, rule)
            worst = check_near(record.values, values, dtype, rule, STEPS, where)
            check_steps(record, norms, losses, dtype, where)
        elif (difference := record.first_difference(first)) is not None:
            raise Failed(f"{where} against stage 0: {difference}")
    return worst


def check_steps(record, norms, losses, dtype, where):
    """Norms and losses of all steps; that one was clipped and one learned something."""
    for step, (ours, torchs) in enumerate(zip(record.norms, norms, strict=True)):
        if not math.isclose(ours, torchs, rel_tol=1e-5):
            raise Failed(f"{where}: the gradient's norm in step {step} is {ours:.9g}, torch's {torchs:.9g}")
    for step, (ours, torchs) in enumerate(zip(record.losses, losses, strict=True)):
        if not math.isclose(ours, torchs, rel_tol=0.02 if dtype == torch.bfloat16 else 1e-3):
            raise Failed(f"{where}: the loss of step {step} is {ours:.6g}, that of a plain model {torchs:.6g}")
    if max(norms) <= MAX_NORM:
        raise Failed(f"{where}: no gradient was clipped (norms {norms}), so this shows nothing")
