"""opt.join(): ranks with different numbers of batches train as one process in which an absent rank has no gradient."""

import pytest

torch = pytest.importorskip("torch")

import zero_c  # noqa: E402
from models import OneProcess, batch, close_models, mlp  # noqa: E402
from ranks import rank_groups  # noqa: E402
from zero_c.torch import GradScaler, ShardedOptimizer  # noqa: E402

STAGES = (0, 1, 2, 3)


@pytest.fixture(scope="module")
def groups():
    yield from rank_groups()


def on_rank(name, *args):
    return globals()[f"on_{name}"](zero_c.init(), *args)


def build(comm, stage, **options):
    model = mlp()
    units = {"units": [torch.nn.Linear]} if stage == 3 else {}
    return model, ShardedOptimizer(model, lr=0.05, stage=stage, comm=comm, **units, **options)


def loss_of(model, rank, step):
    return model(batch(rank, step, (4, 3))).square().sum()


def on_uneven(comm, stage, counts, how):
    """counts[r]: batches of rank r."""
    options = {"max_grad_norm": 0.5} if how == "clipped in step" else {}
    model, opt = build(comm, stage, **options)
    reference = OneProcess(mlp(), lambda p: torch.optim.AdamW(p, lr=0.05), comm.world_size)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    scaler = GradScaler(init_scale=256.0, growth_interval=1000) if how == "scaler" else None
    with opt.join():
        for step in range(counts[comm.rank]):
            if how == "accumulated":
                with opt.no_sync():
                    loss_of(model, comm.rank, 100 + step).backward()
            loss = loss_of(model, comm.rank, step)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if how == "clipped":
                opt.clip_grad_norm_(0.5)
            if scaler is not None:
                scaler.unscale_(opt)
                opt.clip_grad_norm_(0.5)
                scaler.step(opt)
                scaler.update()
            else:
                opt.step()
            opt.zero_grad()
            schedule.step()
    for step in range(max(counts)):
        def loss(net, rank):
            value = loss_of(net, rank, step)
            if how == "accumulated":
                value = value + loss_of(net, rank, 100 + step)
            return value * (step < counts[rank])
        for group in reference.optimizer.param_groups:
            group["lr"] = 0.05 * 0.5 ** (step // 2)
        reference.backward(loss)
        reference.step(0.5 if "clip" in how or how == "scaler" else None)
    assert opt.last_step.steps == max(counts)
    if stage == 3:
        for (name, value), other in zip(opt.full_model_state_dict().items(), reference.model.parameters(), strict=True):
            torch.testing.assert_close(value, other.detach(), rtol=2e-5, atol=1e-6, msg=name)  # torch's update, see models.py
    else:
        close_models(model, reference.model, rtol=2e-5, atol=1e-6)
    loss_of(model, comm.rank, 0).backward()  # and the group is as usable as before
    for group in opt.param_groups:
        group["lr"] = 0.01
    opt.step()


def on_twice(comm):
    model, opt = build(comm, 2)
    with pytest.raises(zero_c.Error, match="join.. inside join"), opt.join(), opt.join():
        pass


def on_raises(comm):
    """A rank that raises inside does not stay for the others."""
    model, opt = build(comm, 2)
    with pytest.raises(KeyError), opt.join():
        raise KeyError("mine")
    loss_of(model, comm.rank, 0).backward()
    opt.step()


def on_different_options(comm):
    model, opt = build(comm, 2)
    try:
        with opt.join():
            loss_of(model, comm.rank, 0).backward()
            opt.param_groups[0]["lr"] = 0.1 * (comm.rank + 1)
            opt.step()
    except zero_c.Mismatch as error:
        return str(error)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["plain", "clipped", "clipped in step", "accumulated", "scaler"])
def test_two_ranks(groups, stage, how):
    groups(2).run(on_rank, "uneven", stage, [3, 5], how)


@pytest.mark.parametrize("counts", [[4, 0], [0, 0], [2, 2], [1, 6]])
def test_counts(groups, counts):
    groups(2).run(on_rank, "uneven", 2, counts, "plain")


@pytest.mark.parametrize("stage", STAGES)
def test_three_ranks(groups, stage):
    groups(3).run(on_rank, "uneven", stage, [2, 0, 4], "clipped")


def test_join_inside_join(groups):
    groups(2).run(on_rank, "twice")


def test_an_exception_leaves(groups):
    groups(2).run(on_rank, "raises")


def test_ranks_that_mean_different_things(groups):
    for told in groups(2).run(on_rank, "different_options"):
        assert "rank 0 is about to call step" in told and "rank 1" in told and "0.1" in told and "0.2" in told
