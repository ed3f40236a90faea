"""State dicts in other hands: plain torch.optim, torch.distributed.checkpoint, modules without an optimizer.

Functions named `on_...` run on each of two ranks.
"""

import copy
import os
import re
import time
import warnings

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


def on_masters(comm, stage, dtype):
    """fp32 moments and masters of 16-bit parameters keep all bits."""
    dtype = getattr(torch, dtype)
    model, opt = sharded(comm, "adamw", stage, dtype)
    train(model, opt, 3)
    state, values = opt.full_state_dict(), opt.full_model_state_dict()
    other_model, other = sharded(comm, "adamw", 1 if stage != 1 else 2, dtype)
    with other.gathered(write=True):
        other_model.load_state_dict(values)
    other.load_state_dict(state)
    for number, entry in other.full_state_dict()["state"].items():
        assert entry["master"].dtype == entry["exp_avg"].dtype == torch.float32
        assert any((value != value.to(dtype).float()).any() for name, value in entry.items() if name != "step")
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


# ---- options, groups and keys ------------------------------------------------------------


def on_options_come_with_the_state(comm, stage):
    """Those that call for other state too, and back again."""
    for rule, make, few, many, role in (
            ("adamw", torch.optim.AdamW, {"lr": 0.01}, {"lr": 0.02, "amsgrad": True}, "max_exp_avg_sq"),
            ("sgd", torch.optim.SGD, {"lr": 0.002}, {"lr": 0.001, "momentum": 0.9, "nesterov": True}, "momentum_buffer")):
        for before, after in ((few, many), (many, few)):
            plain_model, model = mlp(), mlp()
            plain = make(plain_model.parameters(), **after)
            train(plain_model, plain, 3)
            units = {"units": [torch.nn.Linear]} if stage == 3 else {}
            opt = ShardedOptimizer(model, optimizer=rule, stage=stage, comm=comm, **before, **units)
            train(model, opt, 1)
            with opt.gathered(write=True):
                model.load_state_dict(plain_model.state_dict())
            opt.load_state_dict(plain.state_dict())
            assert {key: opt.param_groups[0][key] for key in after} == after
            assert all((role in opt.state[p]) == (after is many) for p in model.parameters())
            train(plain_model, plain, 3, 3)
            train(model, opt, 3, 3)
            close_states(weights(model, opt), weights(plain_model, plain))


def split(model):
    """Two groups, the second parameter first."""
    first, second, *others = model.parameters()
    return [{"params": [second, *others], "lr": 0.02, "weight_decay": 0.1}, {"params": [first], "lr": 0.005, "tag": "of the first"}]


def on_several_groups(comm, stage):
    """Both ways: a plain optimizer's, and back to it, and each goes on."""
    plain_model, model = mlp(), mlp()
    plain = torch.optim.AdamW(split(plain_model))
    train(plain_model, plain, 2)
    units = {"units": [torch.nn.Linear]} if stage == 3 else {}
    groups = split(model)
    groups[0]["lr"] = groups[1]["lr"] = 0.5
    opt = ShardedOptimizer(groups, module=model, stage=stage, comm=comm, **units)
    with opt.gathered(write=True):
        model.load_state_dict(plain_model.state_dict())
    opt.load_state_dict(plain.state_dict())
    assert [group["lr"] for group in opt.param_groups] == [0.02, 0.005] and opt.param_groups[1]["tag"] == "of the first"
    train(plain_model, plain, 2, 2)
    train(model, opt, 2, 2)
    close_states(weights(model, opt), weights(plain_model, plain))
    back_model = mlp()
    back = torch.optim.AdamW(split(back_model))
    back_model.load_state_dict(opt.full_model_state_dict())
    back.load_state_dict(opt.full_state_dict())
    train(model, opt, 2, 4)
    train(back_model, back, 2, 4)
    close_states(weights(model, opt), weights(back_model, back))


def on_keys_that_are_names(comm, stage):
    """torch.distributed.checkpoint names parameters; which is which is said by the groups."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    plain_model = mlp()
    plain = torch.optim.AdamW(split(plain_model))
    train(plain_model, plain, 3)
    state = plain.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        named = get_optimizer_state_dict(plain_model, plain)
    assert set(named["state"]) == {name for name, _ in plain_model.named_parameters()}
    renumbered = copy.deepcopy(state)
    renumbered["state"] = {number + 7: entry for number, entry in state["state"].items()}
    for group in renumbered["param_groups"]:
        group["params"] = [number + 7 for number in group["params"]]
    model = mlp()
    opt = ShardedOptimizer(split(model), module=model, stage=stage, comm=comm)
    for form, load in ((named, opt.load_state_dict), (renumbered, opt.load_state_dict),
                       (named, lambda given: set_optimizer_state_dict(model, opt, given))):
        train(model, opt, 1)
        load(copy.deepcopy(form))
        for number, entry in opt.full_state_dict()["state"].items():
            for role, value in entry.items():
                same_bits(value, state["state"][number][role])


# ---- what does not fit ---------------------------------------------------------------------


def changed(state, number, role, value):
    """A copy with this in it; None: without what was there."""
    state = copy.deepcopy(state)
    if value is None:
        del state["state"][number][role]
    else:
        state["state"][number][role] = value
    return state


def with_group(state, **options):
    state = copy.deepcopy(state)
    state["param_groups"][0].update(options)
    return state


def bad_states(whole, local, other_stage):
    """What is wrong -> (a state dict, words of the error). The parameters are (5, 3), (5,), (2, 5), (2,)."""
    sgd_model = mlp()
    sgd = torch.optim.SGD(sgd_model.parameters(), lr=0.5, momentum=0.9)
    train(sgd_model, sgd, 1)
    entries, groups = whole["state"], whole["param_groups"]
    part = len(local["state"][1]["exp_avg"])
    here = max(local["state"], key=lambda number: len(local["state"][number]["exp_avg"]))  # this rank has some of it
    odd = local["state"][here]["exp_avg"].double()
    return {
        "local, another stage": (other_stage, "local state of stage"),
        "local, another rank": ({**local, "zero_c": {**local["zero_c"], "rank": 7}}, "local state of rank 7"),
        "local, a part": (changed(local, 1, "exp_avg", torch.zeros(part + 1)), f"'0.bias'.*exp_avg.*({part + 1},).*({part},)"),
        "local, a dtype": (changed(local, here, "exp_avg", odd), "exp_avg is float64.*needed: float32"),
        "local, a role": (changed(local, 3, "exp_avg_sq", None), "'2.bias'.*no exp_avg_sq"),
        "local, the scale": ({**local, "zero_c": {**local["zero_c"], "steps": None}}, "number of steps is None"),
        "one row": (changed(whole, 0, "exp_avg", torch.zeros(3)), "'0.weight'.*exp_avg is (3,), and must be (5, 3)"),
        "one element": (changed(whole, 0, "exp_avg", torch.zeros(())), "'0.weight'.*exp_avg is ()"),
        "the second": (changed(whole, 1, "exp_avg_sq", torch.zeros(4)), "'0.bias'.*exp_avg_sq is (4,)"),
        "integers": (changed(whole, 1, "exp_avg", torch.zeros(5, dtype=torch.int64)), "'0.bias'.*int64"),
        "no tensor": (changed(whole, 1, "exp_avg", [0.0] * 5), "'0.bias'.*list.*plain tensor"),
        "no values": (changed(whole, 1, "exp_avg", torch.zeros(5, device="meta")), "'0.bias'.*'meta'"),
        "no moment": (changed(whole, 2, "exp_avg_sq", None), "'2.weight'.*no exp_avg_sq"),
        "a master": (changed(whole, 2, "master", torch.zeros(2, 5)), "'2.weight'.*float32 has none"),
        "half a step": (changed(whole, 3, "step", 1.5), "'2.bias': 'step' is 1.5"),
        "an endless step": (changed(whole, 3, "step", torch.tensor(float("nan"))), "'2.bias': 'step' is nan"),
        "sgd": (sgd.state_dict(), "dampening, momentum, nesterov.*'sgd'.*here is 'adamw'"),
        "sgd's buffer": (changed(whole, 0, "momentum_buffer", torch.zeros(5, 3)), "'0.weight'.*'momentum_buffer'.*'sgd'.*'adamw'"),
        "names": ({**whole, "state": {f"p{number}": entry for number, entry in entries.items()}}, "list no such parameter"),
        "groups": ({**whole, "param_groups": groups * 2}, "2 parameter groups, the optimizer has 1"),
        "a parameter less": (with_group(whole, params=[0, 1, 2]), "3 parameters, the optimizer's has 4"),
        "a parameter twice": (with_group(whole, params=[0, 1, 2, 2]), "2 twice"),
        "an option": (with_group(whole, betas=(2.0, 0.9)), r"group 0.*betas\[0\]"),
        "no option": ({**whole, "param_groups": [{k: v for k, v in groups[0].items() if k != "eps"}]}, "no eps"),
        "nothing": ({}, "no list 'param_groups'"),
        "no dict": ([], "is a list"),
    }


def on_bad_states(comm, stage, ranks):
    """On these ranks; what is wrong -> the words, and the error on this one. Nothing is changed."""
    model, opt = sharded(comm, "adamw", stage)
    train(model, opt, 2)
    other_model, other = sharded(comm, "adamw", (stage + 1) % 4)
    train(other_model, other, 1)
    other.param_groups[0]["lr"] = 0.7
    whole, local = copy.deepcopy(opt.full_state_dict()), copy.deepcopy(opt.state_dict())
    told = {}
    for what, (bad, words) in bad_states(whole, local, copy.deepcopy(other.state_dict())).items():
        good = local if what.startswith("local") else whole
        with pytest.raises(zero_c.CheckpointError) as error:
            opt.load_state_dict(bad if comm.rank in ranks else good)
        told[what] = words, str(error.value)
        assert opt.param_groups[0]["lr"] == 0.01 and "momentum" not in opt.param_groups[0], what
        for number, entry in opt.full_state_dict()["state"].items():
            for role, value in entry.items():
                same_bits(value, whole["state"][number][role], f"{what}: {role}")
    opt.load_state_dict(whole)
    opt.load_state_dict(local)
    return told


def on_different_states(comm, stage):
    """Each fits, and they are not the same."""
    model, opt = sharded(comm, "adamw", stage)
    train(model, opt, 2)
    whole, local = copy.deepcopy(opt.full_state_dict()), copy.deepcopy(opt.state_dict())
    told = []
    for other in (local, with_group(whole, lr=0.5), changed(whole, 1, "step", 3.0),
                  changed(whole, 1, "exp_avg", whole["state"][1]["exp_avg"] + 1)):
        with pytest.raises(zero_c.Mismatch, match="must pass the same state") as error:
            opt.load_state_dict(other if comm.rank else whole)
        told.append(str(error.value))
        assert opt.param_groups[0]["lr"] == 0.01
        same_bits(opt.full_state_dict()["state"][1]["exp_avg"], whole["state"][1]["exp_avg"])
    train(model, opt, 1)
    return told


# ---- hooks, and who takes part ---------------------------------------------------------------


def on_hooks(comm, stage):
    """torch's four; what one returns counts, unless it is None."""
    model, opt = sharded(comm, "adamw", stage)
    train(model, opt, 1)
    called = []
    opt.register_state_dict_pre_hook(lambda optimizer: called.append(optimizer is opt))
    handle = opt.register_state_dict_post_hook(lambda optimizer, state: state.update(note="seen"))
    state = opt.state_dict()
    assert called == [True] and state["note"] == "seen" and "state" in state
    handle.remove()
    handle = opt.register_state_dict_post_hook(lambda optimizer, state: {})
    assert opt.state_dict() == {}
    handle.remove()

    def exchange(optimizer, given):
        assert given is not state and given["state"] is state["state"]
        given["param_groups"] = [{**given["param_groups"][0], "lr": 0.25}]

    handles = [opt.register_load_state_dict_pre_hook(exchange),
               opt.register_load_state_dict_post_hook(lambda optimizer: called.append(optimizer.param_groups[0]["lr"]))]
    opt.load_state_dict(state)
    assert called == [True, True, 0.25] and state["param_groups"][0]["lr"] == 0.01
    handles += [opt.register_load_state_dict_pre_hook(lambda optimizer, given: {**given, "param_groups": state["param_groups"]})]
    opt.load_state_dict(state)
    assert called[3:] == [0.01]
    handles += [opt.register_load_state_dict_pre_hook(lambda optimizer, given: {})]
    with pytest.raises(zero_c.CheckpointError, match="it has: nothing"):
        opt.load_state_dict(state)
    assert len(called) == 4
    for handle in handles:
        handle.remove()

    def fail(optimizer, given):
        raise LookupError("the hook's own")

    if comm.rank == 1:
        opt.register_load_state_dict_pre_hook(fail)
    with pytest.raises(zero_c.CheckpointError, match="rank 1: LookupError: the hook's own"):
        opt.load_state_dict(state)


def on_local_alone(comm, folder, stage):
    """state_dict() on rank 1, while rank 0 is somewhere else until that is done."""
    model, opt = sharded(comm, "adamw", stage, torch.float16)
    path = os.path.join(folder, f"done {stage}")
    for pending in (False, True):
        train(model, opt, 1)
        if pending:
            model(batch(0, 5, (4, 3)).half()).float().sum().backward()
        comm.barrier()
        if comm.rank == 1:
            state = opt.state_dict()
            assert set(state["state"][0]) == {"step", "exp_avg", "exp_avg_sq", "master"}
            open(f"{path} {pending}", "w").close()
        end = time.monotonic() + 20
        while not os.path.exists(f"{path} {pending}"):
            assert time.monotonic() < end, "state_dict() waits for rank 0"
            time.sleep(0.005)
    opt.step()


def on_state_at_construction(comm, kind, stage):
    """torch's _init_optim_state makes a step of an optimizer without state, on gradients of zero; ours has its state."""
    from torch.distributed.checkpoint.state_dict import _init_optim_state

    model, opt = sharded(comm, kind, stage)
    roles = {"adamw": {"step", "exp_avg", "exp_avg_sq"}, "amsgrad": {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"},
             "sgd": {"step", "momentum_buffer"}, "plain sgd": {"step"}}[kind]
    assert list(opt.state) == list(model.parameters())
    for entry in opt.state.values():
        assert set(entry) == roles and all(not value.any() for value in entry.values())
    _init_optim_state(opt)
    assert opt.last_step.steps == 0 and opt._engine.rounds == 0
    assert all(p.grad is None and float(opt.state[p]["step"]) == 0 for p in model.parameters())


@pytest.mark.parametrize("stage", STAGES)
def test_options_come_with_the_state(pair, stage):
    pair.run(on_rank, "options_come_with_the_state", stage)


@pytest.mark.parametrize("stage", STAGES)
def test_several_groups(pair, stage):
    pair.run(on_rank, "several_groups", stage)


@pytest.mark.parametrize("stage", (1, 3))
def test_keys_that_are_names(pair, stage):
    pair.run(on_rank, "keys_that_are_names", stage)


@pytest.mark.parametrize("stage, ranks", [(0, [0, 1]), (1, [1]), (2, [0]), (3, [1])])
def test_what_does_not_fit_changes_nothing(pair, stage, ranks):
    first, second = pair.run(on_rank, "bad_states", stage, ranks)
    assert {what: text for what, (_, text) in first.items()} == {what: text for what, (_, text) in second.items()}
    told = (first, second)[ranks[0]]
    for what, (words, text) in told.items():
        pattern = words.replace("(", r"\(").replace(")", r"\)")
        assert re.search(f"load_state_dict, rank {ranks[0]}: .*{pattern}", text), (what, text)


@pytest.mark.parametrize("stage", (0, 2))
def test_ranks_that_load_different_states(pair, stage):
    for told in pair.run(on_rank, "different_states", stage):
        assert "a whole state" in told[0] and "a local state" in told[0]
        assert "lr 0.01" in told[1] and "lr 0.5" in told[1]
        assert all("'0.bias'" in text for text in told[2:])


@pytest.mark.parametrize("stage", (1, 3))
def test_hooks_of_state_dicts(pair, stage):
    pair.run(on_rank, "hooks", stage)


@pytest.mark.parametrize("stage", STAGES)
def test_a_local_state_needs_no_other_rank(pair, tmp_path, stage):
    pair.run(on_rank, "local_alone", str(tmp_path), stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", PLAIN)
def test_state_is_there_from_the_start(pair, kind, stage):
    pair.run(on_rank, "state_at_construction", kind, stage)


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


@pytest.mark.parametrize("dtype", ("bfloat16", "float16"))
@pytest.mark.parametrize("stage", STAGES)
def test_masters_keep_their_bits(pair, stage, dtype):
    pair.run(on_rank, "masters", stage, dtype)


@pytest.mark.parametrize("stage, other_stage", [(2, 3), (3, 1)])
def test_torch_distributed_checkpoint(pair, tmp_path, stage, other_stage):
    pair.run(on_rank, "distributed_checkpoint", str(tmp_path / "dcp"), stage, other_stage)
