"""Checkpoints of other packages (zero_c.convert), whose formats are pickles.

An input is a small checkpoint of DeepSpeed or torch.distributed.checkpoint in which some values are others, some bytes, or
the end is missing.

    the command writes a checkpoint, or prints one sentence, exits with status 2 and leaves nothing behind
    nothing is unpickled: no code that a file names runs
"""

import contextlib
import io
import pickle
import shutil
import sys
import tempfile
import warnings
from pathlib import Path

import foreign_deepspeed
import torch
import torch.distributed.checkpoint as dcp

from choices import Choices
from zero_c.convert.__main__ import main

FOLDER = tempfile.TemporaryDirectory(prefix="zero_c fuzz")
HERE = Path(FOLDER.name)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.uint16]
SHAPES = [(), (0,), (1,), (3, 2), (7,), (2**40, 2**30), (2**62, 4), (-1,), (2, -3)]
OPTIONS = {"lr": 0.1, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "decoupled_weight_decay": True}
watched = {"on": False, "seen": False}


def _watch(event, _):
    # The pickle module's own reader asks so for every name that a file has in it.
    if watched["on"] and event == "pickle.find_class":
        watched["seen"] = True


sys.addaudithook(_watch)


class Harm:
    def __reduce__(self):
        return eval, ("1",)


def tensor(choices):
    return torch.zeros(choices.pick(SHAPES[:5]), dtype=choices.pick(DTYPES))


def changed(choices, value):
    """A value like this one, in which one place is another."""
    what = choices.below(16)
    if isinstance(value, dict) and value and what < 13:
        key = choices.pick(sorted(value, key=str))
        if what == 0:
            return {k: v for k, v in value.items() if k != key}
        if what == 1:
            return {**value, choices.pick(["x", "w", 0, 7, key]): value[key]}
        return {**value, key: changed(choices, value[key])}
    if isinstance(value, (list, tuple)) and value and what < 13:
        at = choices.below(len(value))
        inner = list(value)
        inner[at:at + 1] = [] if what == 0 else [value[at]] * 2 if what == 1 else [changed(choices, value[at])]
        return type(value)(inner) if type(value) in (list, tuple) else inner
    if isinstance(value, torch.Tensor) and what < 10:
        return tensor(choices) if what else value.reshape(-1)[:choices.below(value.numel() + 1)]
    if hasattr(value, "__dict__") and not isinstance(value, (type, torch.Tensor)) and what < 13:
        with contextlib.suppress(AttributeError, TypeError):  # not all can be copied or set
            made = type(value).__new__(type(value))
            made.__dict__.update(changed(choices, vars(value)))
            return made
    if what == 15:
        return Harm()
    return tensor(choices) if what == 14 else choices.pick(SHAPES) if what == 13 else choices.odd()


def spoiled(choices, data):
    """Some bytes others, or the end gone."""
    data = bytearray(data)
    for _ in range(choices.below(5)):
        if data:
            data[choices.below(65536) % len(data)] = choices.byte()
    return bytes(data[:choices.below(65536) % (len(data) + 1)] if choices.below(4) == 0 else data)


# ---- the two formats -------------------------------------------------------


def deepspeed(choices, folder):
    stage, ranks = choices.pick([1, 2, 3]), 1 + choices.below(2)
    values = {"w": torch.arange(6.0).reshape(3, 2), "b": torch.arange(5.0)}
    which, edits, bytes_too = choices.below(4), choices.below(3), choices.below(8) == 0
    count = 0

    def change(contents, name):
        nonlocal count
        count += 1
        if which == count - 1:
            for _ in range(edits):
                contents = changed(choices, contents)
        return contents

    foreign_deepspeed.write(folder, stage=stage, ranks=ranks, groups=[(OPTIONS, ["w"]), (OPTIONS, ["b"])], values=values,
                            moments={"exp_avg": values, "exp_avg_sq": values}, module={**values, "buffer": torch.zeros(2)},
                            buffers=["buffer"], shared={"tied": "w"}, steps=3, change=change,
                            scaler={"cur_scale": 8.0} if which == 3 else None)
    if bytes_too:
        path = choices.pick(sorted(folder.rglob("*.pt")))
        path.write_bytes(spoiled(choices, path.read_bytes()))


def _make_dcp():
    state = {"w": torch.arange(6.0).reshape(3, 2), "b": torch.arange(5.0)}
    moments = {name: {"step": torch.tensor(3.0), "exp_avg": value, "exp_avg_sq": value} for name, value in state.items()}
    groups = [{**OPTIONS, "params": ["w"]}, {**OPTIONS, "params": ["b"]}]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": {**state, "buffer": torch.zeros(2)}, "optim": {"state": moments, "param_groups": groups}},
                 checkpoint_id=HERE / "dcp", no_dist=True)
    data = (HERE / "dcp" / ".metadata").read_bytes()
    return data, pickle.loads(data)  # of this target's own making


DCP_BYTES, DCP = _make_dcp()


def distributed(choices, folder):
    shutil.copytree(HERE / "dcp", folder)
    what = choices.below(8)
    if what == 0:
        path = next(folder.glob("*.distcp"))
        path.write_bytes(spoiled(choices, path.read_bytes()))
    elif what < 3:
        (folder / ".metadata").write_bytes(spoiled(choices, DCP_BYTES))
    else:
        made = DCP
        for _ in range(choices.below(3)):
            made = changed(choices, made)
        (folder / ".metadata").write_bytes(pickle.dumps(made, choices.pick([2, 4, 5])))


def one_input(data):
    choices = Choices(data)
    source, dest = HERE / "source", HERE / "dest"
    kind, make = choices.pick([("deepspeed", deepspeed), ("dcp", distributed)])
    out, err = io.StringIO(), io.StringIO()
    try:
        try:
            make(choices, source)
        except (RuntimeError, ValueError, TypeError, AttributeError, pickle.PicklingError, OverflowError):
            return  # what cannot be written cannot be read
        arguments = [kind, str(source), str(dest)] + (["--buffer", "buffer"] if kind == "dcp" else [])
        watched["on"] = True
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                main(arguments)
            except SystemExit as end:
                lines = err.getvalue().splitlines()
                assert end.code == 2 and len(lines) == 1 and lines[0].startswith("zero_c.convert: "), (end.code, lines)
                assert not dest.exists() and not out.getvalue(), lines
                return
        assert (dest / "zero_c.json").is_file() and out.getvalue()
    finally:
        watched["on"] = False
        assert not watched["seen"], "something was unpickled"
        shutil.rmtree(source, ignore_errors=True)
        shutil.rmtree(dest, ignore_errors=True)
