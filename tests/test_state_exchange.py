"""State dicts in other hands: plain torch.optim, torch.distributed.checkpoint, modules without an optimizer.

Functions named `on_...` run on each of two ranks.
"""

import copy

import pytest

torch = pytest.importorskip("torch")

import zero_c  # noqa: E402
from models import batch, mlp, same_bits  # noqa: E402
from ranks import RankGroup  # noqa: E402
from zero_c.torch import ShardedOptimizer  # noqa: E402

STAGES = (0, 1, 2, 3)
PLAIN = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.002, "momentum": 0.9, "dampening": 0.5}),
    "plain sgd": (torch.optim.SGD, {"lr": 0.002}),
}
RULES = {"adamw": "adamw", "amsgrad": "adam", "sgd": "sgd", "plain sgd": "sgd"}


@pytest.fixture(scope="module")
def pair():
    with RankGroup(2, leaks=False) as group:  # DCP leaves a process group open
        yield group


def on_rank(name, *args):
    return globals()[f"on_{name}"](zero_c.init(), *args)


def sharded(comm, kind, stage, dtype=torch.float32, **options):
    model = mlp().to(dtype)
    units = {"units": [torch.nn.Linear]} if stage == 3 else {}
    return model, ShardedOptimizer(model, optimizer=RULES[kind], stage=stage, comm=comm, **PLAIN[kind][1], **units, **options)


def train(model, opt, steps, first=0):
    """All ranks have the same batches, so that an optimizer of one process makes the same steps."""
    for step in range(first, first + steps):
        model(batch(0, step, (4, 3)).to(next(model.parameters()).dtype)).float().square().sum().backward()
        opt.step()
        opt.zero_grad()


def weights(model, opt):
    return opt.full_model_state_dict() if isinstance(opt, ShardedOptimizer) else copy.deepcopy(model.state_dict())


def close_states(state, other):
    assert state.keys() == other.keys()
    for name, value in state.items():
        torch.testing.assert_close(value, other[name], rtol=1e-5, atol=1e-7)  # torch's update differs in the last bits


def on_to_torch(comm, kind, stage):
    """A plain optimizer goes on where ours stopped."""
    model, opt = sharded(comm, kind, stage)
    train(model, opt, 3)
    plain_model = mlp()
    plain = PLAIN[kind][0](plain_model.parameters(), **PLAIN[kind][1])
    plain_model.load_state_dict(opt.full_model_state_dict())
    plain.load_state_dict(opt.full_state_dict())
    train(model, opt, 3, 3)
    train(plain_model, plain, 3, 3)
    close_states(weights(model, opt), weights(plain_model, plain))


def on_from_torch(comm, kind, stage):
    """Ours goes on where a plain optimizer stopped, and takes all bits of its state."""
    plain_model = mlp()
    plain = PLAIN[kind][0](plain_model.parameters(), **PLAIN[kind][1])
    plain.param_groups[0]["initial_lr"] = 0.25
    train(plain_model, plain, 3)
    model, opt = sharded(comm, kind, stage)
    with opt.gathered(write=True):
        model.load_state_dict(plain_model.state_dict())
    opt.load_state_dict(plain.state_dict())
    assert opt.param_groups[0]["initial_lr"] == 0.25
    ours = opt.full_state_dict()["state"]
    for number, entry in plain.state_dict()["state"].items():
        for name, value in entry.items():
            if value is not None:  # SGD without momentum
                same_bits(torch.as_tensor(ours[number][name]), torch.as_tensor(value))
    train(model, opt, 3, 3)
    train(plain_model, plain, 3, 3)
    close_states(weights(model, opt), weights(plain_model, plain))


def on_one_rank_only(comm, stage):
    model, opt = sharded(comm, "adamw", stage)
    train(model, opt, 2)
    everywhere, weights_everywhere = opt.full_state_dict(), opt.full_model_state_dict()
    there, weights_there = opt.full_state_dict(rank=1), opt.full_model_state_dict(rank=1)
    if comm.rank != 1:
        assert there == {} and weights_there == {}
        return
    assert weights_there.keys() == weights_everywhere.keys() == mlp().state_dict().keys()
    for name, value in weights_there.items():
        same_bits(value, weights_everywhere[name])
    for number, entry in everywhere["state"].items():
        for name, value in entry.items():
            same_bits(value, there["state"][number][name])


def on_wrong_rank(comm):
    _, opt = sharded(comm, "adamw", 2)
    told = []
    for rank in (2, -1, True, "0"):
        for call in (opt.full_state_dict, opt.full_model_state_dict):
            with pytest.raises(ValueError, match="legal are None, for all, and 0 to 1") as error:
                call(rank=rank)
            told.append(str(error.value))
    return told


def on_masters(comm, stage):
    """fp32 moments and masters of 16-bit parameters keep all bits."""
    model, opt = sharded(comm, "adamw", stage, torch.bfloat16)
    train(model, opt, 3)
    state, values = opt.full_state_dict(), opt.full_model_state_dict()
    other_model, other = sharded(comm, "adamw", 1 if stage != 1 else 2, torch.bfloat16)
    with other.gathered(write=True):
        other_model.load_state_dict(values)
    other.load_state_dict(state)
    for number, entry in other.full_state_dict()["state"].items():
        assert entry["master"].dtype == entry["exp_avg"].dtype == torch.float32
        for name, value in entry.items():
            same_bits(value, state["state"][number][name])
    train(model, opt, 2, 3)
    train(other_model, other, 2, 3)
    for name, value in opt.full_model_state_dict().items():
        same_bits(value, other.full_model_state_dict()[name])


def on_distributed_checkpoint(comm, folder, stage, other_stage):
    """torch.distributed.checkpoint writes the full form and fills that of an optimizer that has made no step."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model, opt = sharded(comm, "adamw", stage)
    train(model, opt, 3)
    dcp.save({"model": opt.full_model_state_dict(), "optim": opt.full_state_dict()}, checkpoint_id=folder)
    other_model, other = sharded(comm, "adamw", other_stage)
    loaded = {"model": other.full_model_state_dict(), "optim": other.full_state_dict()}
    dcp.load(loaded, checkpoint_id=folder)
    with other.gathered(write=True):
        other_model.load_state_dict(loaded["model"])
    other.load_state_dict(loaded["optim"])
    train(model, opt, 2, 3)
    train(other_model, other, 2, 3)
    for name, value in opt.full_model_state_dict().items():
        same_bits(value, other.full_model_state_dict()[name])


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", PLAIN)
def test_a_plain_optimizer_goes_on(pair, kind, stage):
    pair.run(on_rank, "to_torch", kind, stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", PLAIN)
def test_ours_goes_on_after_a_plain_one(pair, kind, stage):
    pair.run(on_rank, "from_torch", kind, stage)


@pytest.mark.parametrize("stage", STAGES)
def test_full_states_on_one_rank(pair, stage):
    pair.run(on_rank, "one_rank_only", stage)


def test_a_rank_that_does_not_exist(pair):
    pair.run(on_rank, "wrong_rank")


@pytest.mark.parametrize("stage", STAGES)
def test_masters_keep_their_bits(pair, stage):
    pair.run(on_rank, "masters", stage)


@pytest.mark.parametrize("stage, other_stage", [(2, 3), (3, 1)])
def test_torch_distributed_checkpoint(pair, tmp_path, stage, other_stage):
    pair.run(on_rank, "distributed_checkpoint", str(tmp_path / "dcp"), stage, other_stage)
