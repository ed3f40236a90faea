"""What torch ranks do in test_equivalence_torch.py: the adapter beside DDP, torch's optimizers and one process."""

import contextlib
import copy

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zero_c
from models import OneProcess, batch, close, close_models, feed, fill, same_bits
from zero_c.torch import ShardedOptimizer

TORCH = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}


class Net(nn.Module):
    """Embedding, convolution, normalisation, a tied head and a scalar: every kind of gradient, odd shapes."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(13, 7)
        self.convolution = nn.Conv1d(7, 11, 3, padding=1)
        self.norm = nn.LayerNorm(11)
        self.back = nn.Linear(11, 7)
        self.scale = nn.Parameter(torch.tensor(0.0))
        fill(self)

    def forward(self, tokens):
        x = self.convolution(self.embedding(tokens).transpose(1, 2)).transpose(1, 2)
        x = torch.tanh(self.back(torch.tanh(self.norm(x)))) * self.scale.exp()
        return x @ self.embedding.weight.t()


def tokens(rank, step, rows=3):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, 13, (rows, 6), generator=generator)


def loss_of(model, rank, step):
    ids = tokens(rank, step)
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())


def join_gloo():
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")


def ddp_gradients(stage, bucket_mb):
    """Gradients of one backward, DDP's and ours, bit for bit; only for two ranks."""
    comm = zero_c.init()
    join_gloo()
    ours, theirs = Net(), DistributedDataParallel(Net(), bucket_cap_mb=0.001)
    opt = ShardedOptimizer(ours, optimizer="sgd", lr=0.1, stage=stage, bucket_mb=bucket_mb, comm=comm)
    for step in range(3):
        loss_of(ours, comm.rank, step).backward()
        loss_of(theirs, comm.rank, step).backward()
        for (name, parameter), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            same_bits(opt.grad(parameter), other.grad, f"gradient of {name} at step {step}")
        opt.zero_grad()
        theirs.zero_grad()


def ddp_training(stage, optimizer, options, max_grad_norm):
    """Five steps beside DDP with torch's optimizer: equal within the order of additions."""
    comm = zero_c.init()
    join_gloo()
    ours, theirs = Net(), DistributedDataParallel(Net())
    opt = ShardedOptimizer(ours, optimizer=optimizer, stage=stage, max_grad_norm=max_grad_norm, comm=comm, **options)
    plain = TORCH[optimizer](theirs.parameters(), **options)
    for step in range(5):
        loss_of(ours, comm.rank, step).backward()
        opt.step()
        opt.zero_grad()
        loss_of(theirs, comm.rank, step).backward()
        if max_grad_norm is not None:
            norm = nn.utils.clip_grad_norm_(theirs.parameters(), max_grad_norm)
            close(torch.as_tensor(float(opt.last_step.norm)), norm, "norm", rtol=1e-5)
        plain.step()
        plain.zero_grad()
    close_models(ours, theirs.module, rtol=1e-4, atol=1e-5)


def concatenated_batch(stage, optimizer, options):
    """Equal shares of one batch on the ranks against one process that is fed the whole."""
    comm = zero_c.init()
    ours, theirs = Net(), Net()
    opt = ShardedOptimizer(ours, optimizer=optimizer, stage=stage, comm=comm, **options)
    plain = TORCH[optimizer](theirs.parameters(), **options)
    for step in range(3):
        loss_of(ours, comm.rank, step).backward()
        ids = torch.cat([tokens(rank, step) for rank in range(comm.world_size)])
        nn.functional.cross_entropy(theirs(ids).flatten(0, 1), ids.roll(1, 1).flatten()).backward()
        if step == 0:
            for parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                close(opt.grad(parameter), other.grad, "gradient", rtol=1e-5, atol=1e-7)
        opt.step()
        plain.step()
        plain.zero_grad()
    close_models(ours, theirs, rtol=1e-4, atol=1e-5)


def ways_agree(ways, dtype):
    """The same rounds, some deferred, in every way the engine can run: the same bits on all of them."""
    comm = zero_c.init()
    results = []
    for way in ways:
        model = Net().to(getattr(torch, dtype))
        opt = ShardedOptimizer(model, optimizer="adamw", lr=0.01, weight_decay=0.1, max_grad_norm=0.7, comm=comm,
                               **way)
        norms = []
        for step in range(3):
            for micro, deferred in enumerate((True, False, False)):
                with opt.no_sync() if deferred else contextlib.nullcontext():
                    loss_of(model, comm.rank, 10 * step + micro).backward()
            opt.step()
            opt.zero_grad()
            norms.append(float(opt.last_step.norm))
        moments = [opt.full_state_dict()["state"][index]["exp_avg"] for index in range(len(list(model.parameters())))]
        results.append((norms, [p.detach().clone() for p in model.parameters()] + moments))
    for way, (norms, tensors) in zip(ways, results, strict=True):
        assert norms == results[0][0], way
        for ours, first in zip(tensors, results[0][1], strict=True):
            same_bits(ours, first, f"{way} against {ways[0]}")
    return [t.float() for t in results[0][1]]


def ulps(actual, expected, before):
    """Largest difference, in units of the last place of the values around."""
    size = torch.maximum(torch.maximum(actual.abs(), expected.abs()), before.abs())
    spacing = torch.nextafter(size, torch.full_like(size, float("inf"))) - size
    return ((actual - expected).abs() / spacing).max().item()


def torch_optimizer_steps(optimizer, options, dtype, steps):
    """Each step is begun from our own values on both sides; the largest distance in ulp, per step.

    Parameters stay away from zero: there an ulp would measure how moments cancel, not how a step is rounded.
    """
    comm = zero_c.init()
    start = batch(0, 0, (2001,), getattr(torch, dtype))
    start = start + 0.5 * start.sign()
    ours, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    opt = ShardedOptimizer([ours], optimizer=optimizer, comm=comm, **options)
    plain = TORCH[optimizer]([theirs], **options)
    distances = []
    for step in range(steps):
        gradient = 0.05 * batch(1, step, (2001,), ours.dtype)
        before = ours.detach().clone()
        with torch.no_grad():
            theirs.copy_(ours)
        if step:
            state = opt.full_state_dict()["state"][0]
            for name, value in plain.state[theirs].items():
                if isinstance(value, torch.Tensor) and value.dim():
                    value.copy_(state[name])
        theirs.grad = gradient.clone()
        plain.step()
        feed([ours], [gradient]).backward()
        opt.step()
        distances.append(ulps(ours.detach(), theirs.detach(), before))
    return distances


def one_process_of_ranks(stage, dtype):
    """Three AdamW steps of an odd model in a 16-bit dtype beside fp32 masters in one process."""
    comm = zero_c.init()
    model = nn.ParameterList([nn.Parameter(batch(9, index, shape, getattr(torch, dtype)))
                              for index, shape in enumerate(((5,), (3, 2), (131,), ()))])
    reference = OneProcess(model, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1), comm.world_size)
    opt = ShardedOptimizer(copy.copy(list(model)), optimizer="adamw", lr=0.01, weight_decay=0.1, stage=stage, comm=comm)
    for step in range(3):
        def loss(model, rank, step=step):
            return feed(list(model), [batch(rank, step, p.shape, p.dtype) for p in model])

        loss(model, comm.rank).backward()
        opt.step()
        reference.backward(loss)
        reference.step()
    close_models(model, reference.model)
