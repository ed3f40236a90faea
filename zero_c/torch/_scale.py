"""Loss scaling: the optimizer's own schedule, and a GradScaler for scripts written for torch's."""

import sys

import torch
from torch.amp.grad_scaler import OptState

# How often a step may be skipped in a row at the lowest scale before it is called hopeless.
SKIPS_AT_FLOOR = 50


class LossScale:
    """None: no scaling. A number: that, always. "dynamic": halved at each skipped step, doubled after 2000 good ones."""

    START, GROWTH, BACKOFF, FLOOR, INTERVAL = 2.0**16, 2.0, 0.5, 1.0, 2000

    def __init__(self, setting):
        if not (setting is None or setting == "dynamic" or is_positive(setting)):
            raise ValueError(f"loss_scale is {setting!r}; legal: None, a number above 0, or 'dynamic'")
        self.setting = setting
        self.dynamic = setting == "dynamic"
        self.value = self.START if self.dynamic else 1.0 if setting is None else float(setting)
        self.good = 0  # steps since the last change
        self.floored = 0  # steps skipped in a row at the floor

    def after_step(self, skipped):
        """Adapts a dynamic scale; whether skipping has become hopeless."""
        if not self.dynamic:
            return False
        if not skipped:
            self.floored = 0
            self.good += 1
            if self.good == self.INTERVAL:
                self.value, self.good = self.value * self.GROWTH, 0
            return False
        self.good = 0
        self.floored = self.floored + 1 if self.value <= self.FLOOR else 0
        self.value = max(self.FLOOR, self.value * self.BACKOFF)
        return self.floored >= SKIPS_AT_FLOOR

    def state_dict(self):
        return {"dynamic": self.dynamic, "value": self.value, "good": self.good, "floored": self.floored}

    def load_state_dict(self, state):
        """A dynamic scale goes on where a dynamic one was; after any other, which found nothing out, it starts anew."""
        if not self.dynamic:
            return
        if state["dynamic"]:
            self.value, self.good, self.floored = float(state["value"]), int(state["good"]), int(state["floored"])
        else:
            self.value, self.good, self.floored = self.START, 0, 0


def is_positive(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler for scripts that use one: overflow on any rank skips the step on all of them.

    Gradients are unscaled inside the optimizer's step; `unscale_` measures, so that
    `opt.clip_grad_norm_` after it sees unscaled gradients. Other optimizers are
    treated as by torch.
    """

    def __init__(self, device="cpu", **options):
        super().__init__(device, **options)

    def unscale_(self, optimizer):
        """Before clipping: gradients count as unscaled until step(). Collective. RuntimeError if called twice."""
        from ._optimizer import ShardedOptimizer

        if not self._enabled or not isinstance(optimizer, ShardedOptimizer):
            return super().unscale_(optimizer)
        self._check_scale_growth_tracker("unscale_")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is not OptState.READY:
            raise RuntimeError("unscale_() must be called once between backward and step()")
        self._record(state, optimizer._unscale(self.get_scale()))
        state["stage"] = OptState.UNSCALED

    def step(self, optimizer, *args, **kwargs):
        """optimizer.step(), skipped on all ranks after an overflow on any. Collective. RuntimeError if called twice."""
        from ._optimizer import ShardedOptimizer

        if not self._enabled or not isinstance(optimizer, ShardedOptimizer):
            return super().step(optimizer, *args, **kwargs)
        if args or kwargs:
            raise TypeError("GradScaler.step takes no closure: gradients must be there already")
        self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update()")
        with optimizer._scaled_by(self.get_scale()):
            result = optimizer.step()
        self._record(state, optimizer.last_step.nonfinite > 0)
        state["stage"] = OptState.STEPPED
        return result

    def _record(self, state, found):
        state["found_inf_per_device"] = {self._scale.device: torch.full((), float(found), dtype=torch.float32)}
