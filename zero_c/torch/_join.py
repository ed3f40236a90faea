"""opt.join(): training goes on until the last rank has no more batches.

Inside the context every collective call of training (step, clip_grad_norm_, what a
GradScaler does) begins with a meeting in which each rank announces it, with the
options of its groups. A rank that has left the loop announces nothing, makes the
call that the others have announced, as one that got no gradient, and comes back,
until nobody announces anything. Backwards need no announcement: the engine joins
them with zeros wherever a rank is that takes no part (csrc/engine_round.c).
"""

import contextlib
import json

import zero_c
from zero_c import _checkpoint


class Join:
    """One rank's part of one `with opt.join()`."""

    def __init__(self, opt):
        self._opt = opt
        self._replaying = False

    def announce(self, call, *arguments):
        """Before a collective call of this rank."""
        if self._replaying:
            return
        groups = [{key: _checkpoint.plain(group[key], f"'{key}'") for key in self._opt.defaults} for group in self._opt.param_groups]
        self._meet({"call": call, "arguments": arguments, "scale": self._opt._amp_scale, "groups": groups})

    def _meet(self, own):
        """What the ranks announce; None: no rank anything."""
        self._opt._engine.sync("join")
        texts = _checkpoint.all_texts(self._opt._comm, json.dumps(own).encode() if own is not None else b"")
        if not any(texts):
            return None
        first = next(rank for rank, other in enumerate(texts) if other)
        for rank, other in enumerate(texts):
            if other and other != texts[first]:
                raise zero_c.Mismatch(f"join: rank {first} is about to {told(texts[first])}, rank {rank} to {told(other)}; all "
                                      f"ranks that have batches must make the same calls with the same options")
        return json.loads(texts[first])

    def follow(self):
        """After this rank's last batch: does what the others do, until none does anything."""
        self._replaying = True
        while (announced := self._meet(None)) is not None:
            for group, options in zip(self._opt.param_groups, announced["groups"], strict=True):
                group.update({key: _checkpoint.like(value, group[key]) for key, value in options.items()})
            scale = announced["scale"]
            with contextlib.nullcontext() if scale is None else self._opt._scaled_by(scale):
                getattr(self._opt, announced["call"])(*announced["arguments"])


def told(text):
    announced = json.loads(text)
    arguments = ", ".join(map(repr, announced["arguments"]))
    return f"call {announced['call'].strip('_')}({arguments}) with {announced['groups']}"
