"""What the targets of checkpoints share: an optimizer that was saved, and another one that loads what was made of that."""

import atexit
import builtins
import json
import re
import shutil
import tempfile
from pathlib import Path

import numpy

import zero_c
from zero_c import _checkpoint

SIZES = [("w", (7, 11), "f4"), ("scalar", (), "f4"), ("none", (0, 3), "f4"), ("double", (7,), "f8"), ("half", (33,), "f2")]
# What a load may say of itself: its own sentence, one of the options, or one of the system.
PREFIX = re.compile(r"load from [^,]*, rank 0: (?:(\w+): )?", re.S)
OPTIONS = ("must be", "it needs", "unknown option", "has no effect")


def build(comm, seed):
    draw = numpy.random.default_rng(seed)
    named = [(name, numpy.asarray(draw.standard_normal(shape)).astype(dtype)) for name, shape, dtype in SIZES]
    groups = [{"params": named[k::2], "weight_decay": 0.1 * k + 0.01 * seed} for k in range(2)]
    opt = zero_c.ShardedOptimizer(groups, "adamw", stage=2, comm=comm, lr=0.01 * (seed + 1), loss_scale=2.0 ** (seed + 3))
    for _ in range(2):
        for i in range(len(opt)):
            opt.add_grad(i, numpy.full(opt._shapes[i], 0.01 * seed, opt._dtypes[i]))
        opt.step()
    return opt


def everything(opt):
    """All that a load may change."""
    found = [json.dumps(opt.param_groups, default=str), opt.loss_scale, opt.last_step.steps]
    for i in range(len(opt)):
        found += [opt._engine.step_count(i), numpy.asarray(opt.param(i)).tobytes(), opt._in_place[i].tobytes()]
        found += [opt._engine.read(i, role).tobytes() for role in opt._kept(i)]
    return found


class Saved:
    """A checkpoint in a folder of its own, and the optimizer `kept`, which has another state."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="zero_c fuzz"))
        atexit.register(shutil.rmtree, self.folder)
        comm, = zero_c.local_group(1)
        saved, self.kept = build(comm, 1), build(comm, 2)
        saved.save(self.folder)
        self.good, self.before = everything(saved), everything(self.kept)
        self.path = self.folder / _checkpoint.MANIFEST
        self.bytes = {path.name: path.read_bytes() for path in self.folder.iterdir()}
        self.manifest = _checkpoint.unseal(self.bytes[_checkpoint.MANIFEST], self.path)
        self._groups = [set(group) for group in self.kept.param_groups]
        # A second folder brings `kept` back where it was.
        self._back = self.folder / "back"
        self.kept.save(self._back)

    def load(self):
        """Nothing but CheckpointError comes of a load, and then nothing has changed. Whether it succeeded."""
        try:
            self.kept.load(self.folder)
        except zero_c.CheckpointError as error:
            self._check_sentence(str(error))
            assert everything(self.kept) == self.before, f"changed, and raised: {error}"
            return False
        loaded = everything(self.kept)
        # The manifest says steps, options and the loss scale; values have checksums of their own.
        values = [part for part in loaded[3:] if isinstance(part, bytes)]
        assert values == [part for part in self.good[3:] if isinstance(part, bytes)], "other values than were saved"
        assert 0 < self.kept.loss_scale < float("inf") and 0 <= self.kept.last_step.steps < 1 << 63
        self.kept.load(self._back)
        for group, known in zip(self.kept.param_groups, self._groups, strict=True):
            for key in group.keys() - known:  # unknown options of a checkpoint stay
                del group[key]
        self.kept.loss_scale = self.before[1]
        assert everything(self.kept) == self.before
        return True

    @staticmethod
    def _check_sentence(text):
        found = PREFIX.match(text)
        assert found, text
        kind = found[1] and getattr(builtins, found[1], Exception)
        if kind in (ValueError, TypeError):
            assert any(part in text for part in OPTIONS), text
        else:
            assert kind is None or issubclass(kind, OSError), text
        assert len(text.encode(errors="replace")) <= 1100, text
