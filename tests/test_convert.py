"""Import: checkpoints of DeepSpeed and FSDP2 come here with the same bits, and what is no such checkpoint is refused."""

import importlib.util
import os
import pickle
import re
import shutil
import subprocess
import sys

import foreign_deepspeed
import numpy
import pytest
import rank_convert
import torch
from ranks import RankGroup, rank_groups

from zero_c.convert import _allowed, _source, deepspeed
from zero_c.convert.__main__ import main
from zero_c.torch._scale import LossScale

BUFFERS, SHARED = ("places", "shift"), {"head.weight": "embedding.weight"}
SCALER = {"cur_iter": 7, "last_overflow_iter": 2, "scale_factor": 2.0, "scale_window": 1000, "min_scale": 1,
          "delayed_shift": 1, "cur_hysteresis": 1, "consecutive_hysteresis": False, "raise_error_at_min_scale": True, "dynamic": True}
TELLING = ["--frozen", "fixed.*", "--buffer", "shift", "--alias", "head.weight=embedding.weight"]


@pytest.fixture(scope="module")
def groups():
    yield from rank_groups(leaks=False)


@pytest.fixture(scope="module")
def trained(groups):
    """dtype -> a record of three steps here, and the losses that follow, by rank."""
    found = {}

    def get(dtype):
        if dtype not in found:
            found[dtype] = groups(2).run(rank_convert.train, dtype)
        return found[dtype]

    return get


@pytest.fixture(scope="module")
def saved_by_fsdp2(groups, tmp_path_factory):
    folder = tmp_path_factory.mktemp("fsdp2")
    return folder, groups(2).run(rank_convert.fsdp2, str(folder), deadline=90)


def same(ours, theirs, what):
    assert (numpy.atleast_1d(ours).reshape(-1).view(numpy.uint8) == numpy.atleast_1d(theirs).reshape(-1).view(numpy.uint8)).all(), what


def convert(*arguments):
    main([str(argument) for argument in arguments])


def refused(capsys, dest, *arguments):
    """The message of a command that must not succeed, nor leave anything."""
    with pytest.raises(SystemExit) as ended:
        convert(*arguments, dest)
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and not out and len(err.splitlines()) == 1 and not dest.exists(), err
    return err


# ---- DeepSpeed -------------------------------------------------------------------


def as_tensor(array):
    tensor = torch.from_numpy(numpy.array(array))
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


def write_deepspeed(folder, known, dtype="float32", stage=2, ranks=3, prefix="", **how):
    """A record as DeepSpeed would have saved it."""
    state = known["state"]
    module = {prefix + name: as_tensor(value) for name, value in known["weights"].items()}
    values = {prefix + name: as_tensor(entry["master"]) if "master" in entry else module[prefix + name] for name, entry in state.items()}
    roles = [role for role in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if role in next(iter(state.values()))]
    moments = {role: {prefix + name: as_tensor(entry[role]) for name, entry in state.items()} for role in roles}
    # as torch's AdamW has them
    options = [{**group, "betas": tuple(group["betas"]), "fused": None, "decoupled_weight_decay": True} for group in known["groups"]]
    names = [[name for name in values if values[name].dim() > 1], [name for name in values if values[name].dim() <= 1]]
    how = {"buffers": [prefix + name for name in BUFFERS], "shared": {prefix + a: prefix + b for a, b in SHARED.items()}, **how}
    how = {"scaler": SCALER | {"cur_scale": known["loss_scale"]["value"]} if dtype == "float16" else None, **how}
    return foreign_deepspeed.write(folder, stage=stage, ranks=ranks, groups=list(zip(options, names, strict=True)), values=values,
                                   moments=moments, module=module, steps=int(next(iter(state.values()))["step"]), **how)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeeds_layout(groups, trained, tmp_path, stage, dtype):
    first, second = trained(dtype)
    convert("deepspeed", write_deepspeed(tmp_path / "source", first, dtype, stage, bf16=dtype == "bfloat16"), tmp_path / "dest")
    for rank, (found, known) in enumerate(zip(groups(2).run(rank_convert.resume, str(tmp_path / "dest"), dtype, stage),
                                              (first, second), strict=True)):
        for name, value in known["weights"].items():
            same(found["weights"][name], value, f"{name}, rank {rank}")
        for name, entry in known["state"].items():
            assert found["state"][name].keys() == entry.keys()
            for role, value in entry.items():
                same(found["state"][name][role], value, f"{role} of {name}")
        assert found["groups"] == known["groups"]
        assert found["losses"] == known["losses"]
        assert found["loss_scale"] == known["loss_scale"] | ({"good": 4} if dtype == "float16" else {})


@pytest.mark.parametrize("stage", [2, 3])
def test_amsgrad(groups, tmp_path, stage):
    """The largest second moment comes too, and the option with it."""
    first, second = groups(2).run(rank_convert.train, "float32", amsgrad=True)
    convert("deepspeed", write_deepspeed(tmp_path / "source", first, stage=stage), tmp_path / "dest")
    for found, known in zip(groups(2).run(rank_convert.resume, str(tmp_path / "dest"), "float32", stage), (first, second), strict=True):
        assert all(group["amsgrad"] for group in found["groups"])
        for name, entry in known["state"].items():
            assert "max_exp_avg_sq" in entry and found["state"][name].keys() == entry.keys()
            for role, value in entry.items():
                same(found["state"][name][role], value, f"{role} of {name}")
        assert found["losses"] == known["losses"]


def test_a_source_without_a_dynamic_scale(groups, trained, tmp_path):
    """The target's starts anew, as after a checkpoint of zero_c without one."""
    convert("deepspeed", write_deepspeed(tmp_path / "source", trained("float16")[0], "float16", scaler={}), tmp_path / "dest")
    for found in groups(2).run(rank_convert.resume, str(tmp_path / "dest"), "float16", 2, 0):
        assert found["loss_scale"] == LossScale("dynamic").state_dict()
    static = _allowed.Attributes()
    static.cur_scale, static.dynamic = 128.0, False
    assert deepspeed.loss_scale_of({"loss_scaler": static}) == deepspeed.loss_scale_of({}) == LossScale(None).state_dict()


@pytest.mark.parametrize("stage, ranks", [(2, 1), (2, 64), (3, 1), (3, 5)])
def test_numbers_of_ranks(groups, trained, tmp_path, stage, ranks):
    """Parts of less than a parameter, and ranks that have padding only."""
    known = trained("float32")[0]
    convert("deepspeed", write_deepspeed(tmp_path / "source", known, stage=stage, ranks=ranks), tmp_path / "dest")
    for found in groups(2).run(rank_convert.resume, str(tmp_path / "dest"), "float32", 3, 0):
        for name, entry in known["state"].items():
            same(found["weights"][name], known["weights"][name], name)
            same(found["state"][name]["exp_avg_sq"], entry["exp_avg_sq"], name)


def bf16_optimizer(contents, name):
    """As the optimizer of that name, which knows no stage, and takes no padding off."""
    if "optim" in name:
        state = contents["optimizer_state_dict"]
        del state["zero_stage"], state["loss_scaler"]
        moments = state["base_optimizer_state"]["state"]
        state["single_partition_of_fp32_groups"] = [torch.cat([vector, torch.zeros(len(moments[number]["exp_avg"]) - len(vector))])
                                                    for number, vector in enumerate(state["single_partition_of_fp32_groups"])]
    return contents


@pytest.mark.parametrize("how", [{"align": 16}, {"change": bf16_optimizer}], ids=["aligned", "bf16 optimizer"])
def test_forms_of_stage_1(groups, trained, tmp_path, how):
    known = trained("bfloat16")[0]
    convert("deepspeed", write_deepspeed(tmp_path / "source", known, "bfloat16", 1, **how), tmp_path / "dest")
    found, _ = groups(2).run(rank_convert.resume, str(tmp_path / "dest"), "bfloat16", 1)
    assert found["losses"] == known["losses"]


def test_16_bit_masters_between_two_weights(groups, trained, tmp_path):
    """Whatever bits a master has, it is there again; the weight is the master rounded as the engine does it."""
    known = trained("bfloat16")[0]
    bits = numpy.array([0x3f808000, 0x3f818000, 0xbf808000, 0x3f807fff, 0x3f808001, 0x00008000, 0x7f7f7fff], numpy.uint32)
    known = known | {"state": {name: dict(entry) for name, entry in known["state"].items()}}
    known["state"]["norm.weight"]["master"] = bits.view(numpy.float32)
    convert("deepspeed", write_deepspeed(tmp_path / "source", known, "bfloat16"), tmp_path / "dest")
    found, _ = groups(2).run(rank_convert.resume, str(tmp_path / "dest"), "bfloat16", 2, 0)
    same(found["state"]["norm.weight"]["master"], bits, "master")
    same(found["weights"]["norm.weight"], numpy.array([0x3f81, 0x3f82, 0xbf81, 0x3f80, 0x3f81, 0x0001, 0x7f7f], numpy.uint16), "weight")


def test_rounding_keeps_nan():
    odd = numpy.array([0x7f800001, 0xffffffff, 0x7f800000, 0xff800000], numpy.uint32).view(numpy.float32)
    assert _source.rounded_to_bfloat16(odd).tolist() == [0x7fc0, 0x7fc0, 0x7f80, 0xff80]


def test_another_dtype(groups, trained, tmp_path):
    """The masters of a 16-bit model become the weights of a model in fp32."""
    known = trained("bfloat16")[0]
    source = write_deepspeed(tmp_path / "source", known, "bfloat16")
    convert("deepspeed", source, tmp_path / "dest", "--dtype", "float32")
    found, _ = groups(2).run(rank_convert.resume, str(tmp_path / "dest"), "float32", 2, 0)
    for name, entry in known["state"].items():
        same(found["weights"][name], entry["master"], name)


@pytest.mark.parametrize("prefix, arguments", [("module.", []), ("_orig_mod.", []), ("module._orig_mod.", []),
                                               ("net.", ["--strip-prefix", "net."])])
def test_prefixes(groups, trained, tmp_path, prefix, arguments):
    known = trained("float32")[0]
    source = write_deepspeed(tmp_path / "source", known, prefix=prefix)
    convert("deepspeed", source, tmp_path / "dest", *arguments)
    found, _ = groups(2).run(rank_convert.resume, str(tmp_path / "dest"), "float32", 2, 1)
    assert found["losses"] == known["losses"][:1]


def gone(name):
    return lambda contents, file: None if re.search(name, file) else contents


def without(*keys, file="optim"):
    def change(contents, name):
        inner = contents
        if file in name:
            for key in keys[:-1]:
                inner = inner[key]
            del inner[keys[-1]]
        return contents
    return change


def put(value, *keys, file="optim"):
    def change(contents, name):
        inner = contents
        if file in name:
            for key in keys[:-1]:
                inner = inner[key]
            inner[keys[-1]] = value() if callable(value) else value
        return contents
    return change


STATE, INNER = "optimizer_state_dict", ("optimizer_state_dict", "base_optimizer_state")
BAD_DEEPSPEED = {
    "a rank's file": (gone("rank_1.*optim"), ["zero_pp_rank_1_mp_rank_00_optim_states.pt"]),
    "the last rank's file": (gone("rank_2.*optim"), ["written by 3 ranks", "files of 2"]),
    "the model's file": (gone("model_states"), ["mp_rank_00_model_states.pt is missing"]),
    "all files": (gone("optim"), ["global_step3", "no *_optim_states.pt", "stage 1, 2 or 3"]),
    "stage": (put(7, STATE, "zero_stage"), ["zero_pp_rank_0", "stage 7", "1, 2 and 3"]),
    "no stage": (without(STATE, "single_partition_of_fp32_groups"), ["zero_pp_rank_0", "'single_partition_of_fp32_groups'"]),
    "no state": (put({}, STATE), ["zero_pp_rank_0", "stage None"]),
    "moments": (without(*INNER, "state", 1), ["zero_pp_rank_0", "no moments of vector 1"]),
    "moments of a rank": (put(dict, *INNER, "state", file="rank_1"), ["rank_1", "0 vectors", "rank_0"]),
    "second moment": (without(*INNER, "state", 1, "exp_avg_sq"), ["keeps exp_avg and not exp_avg, exp_avg_sq", "Adam"]),
    "short moments": (put(lambda: torch.zeros(3), *INNER, "state", 0, "exp_avg"), ["exp_avg has 3 elements"]),
    "short weights": (put(lambda: [torch.zeros(2)] * 2, STATE, "single_partition_of_fp32_groups"), ["vector 0 ends before"]),
    "elastic": (put(list, *INNER), ["elastic"]),
    "bias correction": (put(False, *INNER, "param_groups", 0, "bias_correction"), ["bias_correction=False"]),
    "learning rate": (without(*INNER, "param_groups", 0, "lr"), ["group 0", "no lr"]),
    "weight decay": (put(-1.0, *INNER, "param_groups", 0, "weight_decay"), ["group 0", "weight_decay is -1"]),
    "another class": (put(lambda: sys.modules["deepspeed.runtime.other"].Thing(), STATE, "overflow"),
                      ["zero_pp_rank_0", "deepspeed.runtime.other.Thing", "never unpickles"]),
    "a function": (put(lambda: os.getcwd, STATE, "overflow"), ["zero_pp_rank_0", ".getcwd", "never unpickles"]),
    "tensor parallel": (put(2, "mp_world_size", file="model"), ["mp_rank_00_model_states.pt", "tensor parallelism"]),
    "MiCS": (put([1], STATE, "ds_zero_partition_groups"), ["MiCS"]),
    "groups": (put(list, "param_shapes", file="model"), ["tells of 0 vectors", "has 2"]),
    "vectors of a rank": (put(list, STATE, "single_partition_of_fp32_groups", file="rank_1"), ["rank_1", "has 0"]),
    "what nobody foresaw": (put(5, "param_shapes", file="model"), ["source is damaged", "not known", "TypeError"]),
    "not a tensor": (put("x", "module", "shift", file="model"), ["'shift'", "str"]),
}


@pytest.mark.parametrize("case", BAD_DEEPSPEED)
def test_bad_deepspeed(trained, tmp_path, capsys, case):
    change, patterns = BAD_DEEPSPEED[case]
    write_deepspeed(tmp_path / "source", trained("float32")[0], change=change)
    message = refused(capsys, tmp_path / "dest", "deepspeed", tmp_path / "source")
    assert all(pattern in message for pattern in patterns), message


def test_deepspeed_folders(trained, tmp_path, capsys):
    source = write_deepspeed(tmp_path / "source", trained("float32")[0])
    (source / "latest").write_text("../else")
    assert "latest names" in refused(capsys, tmp_path / "dest", "deepspeed", source)
    (source / "latest").unlink()
    assert "no *_optim_states.pt" in refused(capsys, tmp_path / "dest", "deepspeed", source)
    assert "not a folder" in refused(capsys, tmp_path / "dest", "deepspeed", tmp_path / "nothing")
    assert "absent is not a folder" in refused(capsys, tmp_path / "absent" / "dest", "deepspeed", source / "global_step3")
    path = source / "global_step3" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    path.write_bytes(path.read_bytes()[:-500])
    assert str(path) in refused(capsys, tmp_path / "dest", "deepspeed", source / "global_step3")
    (source / "global_step3" / "layer_01-model_00-model_states.pt").touch()
    assert "layer_01" in refused(capsys, tmp_path / "dest", "deepspeed", source / "global_step3")


def test_which_optimizer(trained, tmp_path, capsys):
    """Where the groups do not tell, DeepSpeed's configuration does, or the command."""
    def silent(contents, name):
        for group in contents.get(STATE, {}).get("base_optimizer_state", {}).get("param_groups", []):
            group.pop("decoupled_weight_decay", None)
        return contents

    known = trained("float32")[0]
    source = write_deepspeed(tmp_path / "silent", known, change=silent)
    assert "--optimizer" in refused(capsys, tmp_path / "dest", "deepspeed", source)
    convert("deepspeed", source, tmp_path / "given", "--optimizer", "adam")
    assert ", adam," in capsys.readouterr().out
    for kind, params, optimizer in (("AdamW", {}, "adamw"), ("Adam", {}, "adamw"), ("Adam", {"adam_w_mode": False}, "adam")):
        config = {"optimizer": {"type": kind, "params": params}}
        source = write_deepspeed(tmp_path / f"{kind}{params}", known, change=silent, config=config)
        convert("deepspeed", source, tmp_path / f"{kind}{params}.dest")
        assert f", {optimizer}," in capsys.readouterr().out
    assert "is adam, and" in refused(capsys, tmp_path / "dest", "deepspeed", tmp_path / "AdamW{}", "--optimizer", "adam")
    source = write_deepspeed(tmp_path / "Lamb", known, change=silent, config={"optimizer": {"type": "Lamb"}})
    assert "'Lamb'" in refused(capsys, tmp_path / "dest", "deepspeed", source)


def test_a_failed_write_leaves_nothing(trained, tmp_path, capsys, monkeypatch):
    source = write_deepspeed(tmp_path / "source", trained("float32")[0])
    plain = _source.Reader.read_part

    def fail(self, index, role, *rest):
        if role == "exp_avg_sq":
            raise OSError("disk full")
        plain(self, index, role, *rest)

    monkeypatch.setattr(_source.Reader, "read_part", fail)
    assert "disk full" in refused(capsys, tmp_path / "dest", "deepspeed", source)


def test_dest_is_kept(trained, tmp_path, capsys):
    source, dest = write_deepspeed(tmp_path / "source", trained("float32")[0]), tmp_path / "dest"
    dest.mkdir()
    with pytest.raises(SystemExit):
        convert("deepspeed", source, dest)
    assert "is there already" in capsys.readouterr().err and not list(dest.iterdir())


def test_the_command(trained, tmp_path):
    source = write_deepspeed(tmp_path / "source", trained("float32")[0])
    command = [sys.executable, "-m", "zero_c.convert", "deepspeed", source, tmp_path / "dest"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "6 parameters, 2 frozen, 2 buffers, adamw, 3 steps, from DeepSpeed 0.19.8, stage 2, 3 ranks" in done.stdout


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize("dtype, tolerance", [("float32", 2e-6), ("bfloat16", 5e-3)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_itself(groups, tmp_path, stage, dtype, tolerance):
    """Its checkpoints, and five losses as it goes on itself. (In bf16 it adds gradients up in bf16.)"""
    before = set(os.listdir("/dev/shm"))
    try:
        with RankGroup(2, env={"DS_ACCELERATOR": "cpu"}, leaks=False) as theirs:
            losses = theirs.run(rank_convert.deepspeed, str(tmp_path / "source"), stage, dtype, deadline=500)
    finally:
        for left in set(os.listdir("/dev/shm")) - before:
            if left.startswith("deepspeed_allreduce_buffer"):
                os.unlink(f"/dev/shm/{left}")
    convert("deepspeed", tmp_path / "source", tmp_path / "dest")
    for found, known in zip(groups(2).run(rank_convert.resume, str(tmp_path / "dest"), dtype, stage, 5), losses, strict=True):
        numpy.testing.assert_allclose(found["losses"], known, rtol=tolerance)


# ---- torch.distributed.checkpoint ------------------------------------------------


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("form", ["nested", "flattened"])
def test_fsdp2(groups, saved_by_fsdp2, tmp_path, form, stage):
    folder, known = saved_by_fsdp2
    telling = [*TELLING, *(["--optimizer", "adamw"] if form == "flattened" else [])]
    convert("dcp", folder / form, tmp_path / "dest", *telling)
    results = groups(2).run(rank_convert.resume, str(tmp_path / "dest"), "float32", stage, 5)
    for found, theirs in zip(results, known, strict=True):
        for name, value in found["weights"].items():
            same(value, known[0]["weights"][name], name)
        for name, entry in found["state"].items():
            for role, value in entry.items():
                same(value, known[0]["state"][name][role], f"{role} of {name}")
        assert [group["lr"] for group in found["groups"]] == [0.01, 0.01]
        assert [group["initial_lr"] for group in found["groups"]] == [0.01, 0.01]
        assert [group["weight_decay"] for group in found["groups"]] == [0.1, 0.0]
        numpy.testing.assert_allclose(found["losses"], theirs["losses"], rtol=2e-6)


def test_fsdp2_in_another_dtype(groups, saved_by_fsdp2, tmp_path):
    folder, known = saved_by_fsdp2
    convert("dcp", folder / "nested", tmp_path / "dest", *TELLING, "--dtype", "bfloat16")
    found, _ = groups(2).run(rank_convert.resume, str(tmp_path / "dest"), "bfloat16", 2, 0)
    for name, entry in found["state"].items():
        same(entry["master"], known[0]["weights"][name], name)


def test_what_is_not_said_is_asked_for(saved_by_fsdp2, tmp_path, capsys):
    folder, dest = saved_by_fsdp2[0], tmp_path / "dest"
    message = refused(capsys, dest, "dcp", folder / "nested")
    assert "4 tensors" in message and all(name in message for name in ("shift", "fixed.weight", "fixed.bias", "head.weight", "--buffer"))
    assert "'head.weigh'" in refused(capsys, dest, "dcp", folder / "nested", "--alias", "head.weigh=embedding.weight")
    assert "'0'" in refused(capsys, dest, "dcp", folder / "numbered")
    assert "param_groups" in refused(capsys, dest, "dcp", folder / "model")
    assert ".metadata" in refused(capsys, dest, "dcp", folder)


def spoiled(folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    return copy


def test_bad_dcp_files(saved_by_fsdp2, tmp_path, capsys):
    copy, dest = spoiled(saved_by_fsdp2[0] / "nested", tmp_path), tmp_path / "dest"
    file = copy / "__1_0.distcp"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert f"{file} has {len(whole) - 1} bytes" in refused(capsys, dest, "dcp", copy, *TELLING)
    file.write_bytes(bytes(len(whole)))
    assert "is damaged" in refused(capsys, dest, "dcp", copy, *TELLING)
    file.unlink()
    assert f"{file} is missing" in refused(capsys, dest, "dcp", copy, *TELLING)
    data = (copy / ".metadata").read_bytes()
    for count in (0, 10, len(data) // 2, len(data) - 1):
        (copy / ".metadata").write_bytes(data[:count])
        assert ".metadata is damaged" in refused(capsys, dest, "dcp", copy, *TELLING)


class Harm:
    """What an evil file would do."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_metadata_are_not_unpickled(saved_by_fsdp2, tmp_path, capsys, protocol):
    copy, harm = spoiled(saved_by_fsdp2[0] / "nested", tmp_path), tmp_path / "harm"
    (copy / ".metadata").write_bytes(pickle.dumps([1, Harm(harm)], protocol))
    message = refused(capsys, tmp_path / "dest", "dcp", copy)
    assert ".metadata" in message and "posix.mkdir" in message and not harm.exists()


def test_values_are_not_unpickled(groups, tmp_path, capsys):
    import torch.distributed.checkpoint as dcp

    state = {"model": {"w": torch.zeros(2)}, "optim": {"state": {"w": {"step": torch.tensor(1.0)}},
                                                       "param_groups": [{"params": ["w"], "lr": Harm(tmp_path / "harm")}]}}
    dcp.save(state, checkpoint_id=tmp_path / "source", no_dist=True)
    message = refused(capsys, tmp_path / "dest", "dcp", tmp_path / "source")
    assert "posix.mkdir" in message and not (tmp_path / "harm").exists()


@pytest.mark.parametrize("protocol", [4, 5])
def test_recoding_keeps_what_a_pickle_says(saved_by_fsdp2, protocol):
    for form in ("nested", "flattened", "numbered", "model"):
        path = saved_by_fsdp2[0] / form / ".metadata"
        known = pickle.loads(path.read_bytes())  # of this test's own making
        found = pickle.loads(_allowed.to_protocol_2(pickle.dumps(known, protocol)))
        assert found == known
        read = _allowed.load_metadata(path)
        assert (read.state_dict_metadata, read.planner_data, read.storage_data) == (
            known.state_dict_metadata, known.planner_data, known.storage_data)
