"""Rows of area I: checkpoints, resuming, and loading on other ranks and stages; and rows of other areas that save and load.

Rows that kill a rank or leave it out are in test_faults.py.
"""

import contextlib
import os
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import zero_c
from cases.rows import raised, row
from models import batch, close, fill, same_bits
from zero_c._checkpoint import from_rank_0


@contextlib.contextmanager
def common_folder(here):
    """A temporary folder of all ranks."""
    made = tempfile.TemporaryDirectory() if here.rank == 0 else contextlib.nullcontext()
    with made as name:
        yield from_rank_0(here.comm, (name or "").encode()).decode() + "/checkpoint"
        here.comm.barrier()


@contextlib.contextmanager
def with_ranks(here, count, job):
    """The case on the first `count` ranks, with a communicator of their own; None on the others."""
    if here.rank >= count:
        yield None
        return
    with zero_c.init(here.rank, count, job=job) as comm:
        yield replace(here, comm=comm, owners={}, fed={})


def named(ps):
    """With the names that Here.optimizer gives them at stage 3."""
    return [(f"pieces.{k}.value", p) for k, p in enumerate(ps)]


def parameters(seed, *sizes):
    return list(fill(nn.ParameterList([nn.Parameter(torch.empty(size)) for size in sizes]), torch.Generator().manual_seed(seed)))


def advance(here, opt, ps, first, steps):
    """The same gradient on every rank, so that their number does not matter."""
    for step in range(first, first + steps):
        here.feed(ps, [batch(0, step, p.shape) for p in ps]).backward()
        opt.step()


@row(116, 118, 136, ranks=(4,), deadline=120)
def any_ranks_and_stage_load_any(here):
    """Of sums of equal gradients the mean over 1, 2 or 4 ranks is exact, so the next step has the same bits there."""
    sizes = (5, 1, 7)
    with common_folder(here) as folder:
        for saver, loaders in ((4, (2, 3, 1)), (2, (4, 3))):
            name = f"{folder}{saver}"
            with with_ranks(here, saver, f"{name}-save") as saving:
                if saving:
                    ps = parameters(1, *sizes)
                    opt = saving.optimizer(named(ps), optimizer="adamw", lr=0.1)
                    advance(saving, opt, ps, 0, 3)
                    opt.save(name)
                    wanted = [saving.value(p).clone() for p in ps]
                    state = opt.full_state_dict()["state"]
                    advance(saving, opt, ps, 3, 1)
                    later = [saving.value(p).clone() for p in ps]
                    del opt
            for count in loaders:
                for stage in (0, 1, 2, 3):
                    with with_ranks(here, count, f"{name}-{count}-{stage}") as loading:
                        if not loading:
                            continue
                        loading.stage = stage
                        ps = parameters(2, *sizes)
                        opt = loading.optimizer(named(ps), optimizer="adamw", lr=0.7)
                        opt.load(name)
                        values = [loading.value(p).clone() for p in ps]
                        found = opt.full_state_dict()["state"]
                        advance(loading, opt, ps, 3, 1)
                        ends = [loading.value(p).clone() for p in ps]
                        del opt
                    if here.rank >= saver:
                        continue
                    for k in range(len(sizes)):
                        same_bits(values[k], wanted[k], "weight")
                        for key, value in state[k].items():
                            same_bits(found[k][key], value, key)
                        (close if count == 3 else same_bits)(ends[k], later[k], "next step")
                here.comm.barrier()


class Pair(nn.Module):
    """Two tied pairs and a layer that no loss uses."""

    def __init__(self, seed, tied=True):
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)
        self.unused, self.one = nn.Linear(3, 2), nn.Parameter(torch.zeros(1))
        fill(self, torch.Generator().manual_seed(seed))
        if tied:
            self.head.weight, self.last.weight = self.embedding.weight, self.first.weight

    def forward(self, ids, use=False):
        x = self.last(torch.tanh(self.first(self.embedding(ids)))) * self.one
        return self.head(x).square().mean() + (self.unused(x).sum() if use else 0)


def pair_optimizer(here, model, **options):
    options = {"optimizer": "adamw", "lr": 0.1} | options
    if here.stage == 3:
        options["units"] = [nn.Linear]
    return here.optimizer(model, **options)


@row(120, 121)
def tied_weights_are_saved_once_under_their_first_name(here):
    """The file loads into a plain tied model; an untied model is refused, and the missing name is told."""
    from safetensors.torch import load_file, load_model

    model = Pair(1)
    opt = pair_optimizer(here, model)
    model(torch.arange(5)).backward()
    opt.step()
    with common_folder(here) as folder:
        opt.save(folder)
        path = next(Path(folder).glob("weights-*"))
        plain, untied = Pair(2), Pair(2, tied=False)
        load_model(plain, path)
        for (name, p), ours in zip(plain.named_parameters(), model.parameters(), strict=True):
            same_bits(p, here.value(ours), name)
        assert plain.head.weight is plain.embedding.weight and plain.last.weight is plain.first.weight
        assert untied.load_state_dict(load_file(path), strict=False).missing_keys == ["head.weight", "last.weight"]
        text = str(raised(lambda: pair_optimizer(here, untied).load(folder), zero_c.CheckpointError))
        assert "head.weight" in text or "last.weight" in text, text


@row(123, 124, ranks=(2, 4))
def step_counts_come_back_and_unused_layers_start_at_one(here):
    model, resumed = Pair(1), Pair(2)
    opt = pair_optimizer(here, model)
    for _ in range(3):
        model(torch.arange(5)).backward()
        opt.step()
    with common_folder(here) as folder:
        opt.save(folder)
        other = pair_optimizer(here, resumed, lr=0.9)
        other.load(folder)
        for net, trained in ((model, opt), (resumed, other)):
            net(torch.arange(5), use=True).backward()
            trained.step()
    for (name, p), q in zip(model.named_parameters(), resumed.parameters(), strict=True):
        same_bits(here.value(q), here.value(p), name)
        assert other.state[q]["step"] == (1 if name.startswith("unused") else 4)


@row(31, 32, ranks=(2, 4))
def parameters_smaller_than_the_ranks_are_saved(here):
    ps, others = ([nn.Parameter(torch.tensor(value)), nn.Parameter(torch.full((2,), value))] for value in (3.0, 8.0))
    opt, other = (here.optimizer(members, optimizer="sgd", lr=0.5) for members in (ps, others))
    here.feed(ps, [1.0, torch.ones(2)]).backward()
    opt.step()
    with common_folder(here) as folder:
        opt.save(folder)
        other.load(folder)
    for p, size in zip(others, ((), (2,)), strict=True):
        same_bits(here.value(p), torch.full(size, 2.5), "value")


@row(58)
def unknown_group_keys_survive_a_checkpoint(here):
    ps, others = parameters(1, 3), parameters(2, 3)
    opt = here.optimizer([{"params": ps, "initial_lr": 0.3, "tag": "decoder"}], optimizer="adamw", lr=0.1)
    other = here.optimizer(others, optimizer="adamw", lr=0.2)
    with common_folder(here) as folder:
        opt.save(folder)
        other.load(folder)
    group = other.param_groups[0]
    assert (group["initial_lr"], group["tag"], group["lr"], group["betas"]) == (0.3, "decoder", 0.1, (0.9, 0.999))
    torch.optim.lr_scheduler.LambdaLR(other, lambda epoch: 1.0, last_epoch=0)


class Adapted(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(4, 2, bias=False), nn.Linear(2, 2, bias=False)
        fill(self, torch.Generator().manual_seed(seed))
        self.base.to(torch.bfloat16).requires_grad_(False)

    def forward(self, x):
        return (self.base(x.bfloat16()).float() + self.up(self.down(x))).square().sum()


@row(111, 135)
def a_frozen_base_and_its_adapter_are_saved(here):
    from safetensors.torch import load_file

    model = Adapted(1)
    opt = pair_optimizer(here, model)
    model(batch(here.rank, 0, (3, 4))).backward()
    opt.step()
    with common_folder(here) as folder:
        opt.save(folder)
        whole = load_file(next(Path(folder).glob("weights-*")))
        plain = Adapted(2)
        plain.load_state_dict(whole)
        assert whole["base.weight"].dtype == torch.bfloat16 and whole["down.weight"].shape == (2, 4)
        for (name, p), ours in zip(plain.named_parameters(), model.parameters(), strict=True):
            same_bits(p, here.value(ours) if ours.requires_grad or here.stage == 3 else ours, name)
        other = Adapted(3)
        pair_optimizer(here, other).load(folder)
        same_bits(here.value(other.base.weight), plain.base.weight, "base")


@row(128)
def a_full_disk_is_told_and_the_next_save_works(here):
    ps = parameters(1, 3000)
    opt = here.optimizer(ps, optimizer="adamw", lr=0.1)
    advance(here, opt, ps, 0, 1)
    before = here.value(ps[0]).clone()
    with common_folder(here) as folder:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            text = str(raised(lambda: opt.save(folder), zero_c.CheckpointError))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert folder in text and "File too large" in text, text
        here.comm.barrier()
        assert not os.listdir(folder)
        same_bits(here.value(ps[0]), before, "weight")
        here.comm.barrier()
        opt.save(folder)
        opt.load(folder)
    same_bits(here.value(ps[0]), before, "weight")


@row(130)
def a_checkpoint_is_there_when_save_returns(here):
    opt = here.optimizer(parameters(1, 3), optimizer="adamw", lr=0.1)
    real = os.rename
    with common_folder(here) as folder:
        if here.rank == 0:
            os.rename = lambda *names: (time.sleep(0.5), real(*names))
        try:
            opt.save(folder)
        finally:
            os.rename = real
        assert os.path.exists(f"{folder}/zero_c.json")
        # rank 1 names a folder that is not there: all are told
        raised(lambda: opt.load(folder if here.rank == 0 else folder + "no"), zero_c.CheckpointError)


@row(132)
def random_state_is_the_callers(here):
    opt = here.optimizer(parameters(1, 3), optimizer="adamw", lr=0.1)
    torch.manual_seed(here.rank)
    before = torch.get_rng_state()
    with common_folder(here) as folder:
        opt.save(folder)
        opt.load(folder)
    assert torch.equal(torch.get_rng_state(), before)


@row(133)
def the_loss_scale_goes_on_counting(here):
    ps, others = parameters(1, 3), parameters(2, 3)
    opt, other = (here.optimizer(members, optimizer="sgd", lr=0.1, loss_scale="dynamic") for members in (ps, others))
    opt._scale.value, opt._scale.good = 4.0, opt._scale.INTERVAL - 1
    with common_folder(here) as folder:
        opt.save(folder)
        other.load(folder)
    here.feed(others, [1.0], other._scale.value).backward()
    other.step()
    assert other._scale.value == 8.0


@row(168, ranks=(4,))
def ranks_read_their_own_ranges(here):
    ps, counted, real = parameters(1, 200_000), [], os.preadv
    opt = here.optimizer(ps, optimizer="adamw", lr=0.1, bucket_mb=0.25)
    advance(here, opt, ps, 0, 1)
    with common_folder(here) as folder:
        opt.save(folder)
        os.preadv = lambda *how: counted.append(real(*how)) or counted[-1]
        try:
            opt.load(folder)
        finally:
            os.preadv = real
    # weight and two moments, once to be checked and once to be taken; a rank of stage 0 has all moments
    most = 2 * 200_000 * 4 * (0.25 + 2 * (1 if here.stage == 0 else 0.25))
    assert sum(counted) < 1.3 * most and max(counted) <= 1 << 20, (sum(counted), most)
