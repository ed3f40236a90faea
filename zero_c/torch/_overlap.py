"""overlap_gather: step() returns before parameters are back from their owners; the next forward waits for them.

Who waits for what.  Before a module is called, all parameters are waited for that
this call may read without calling another unit: those of the module itself and of
every module below it, down to the units, which wait when they are called in turn.
So a layer is right as a whole before any line of its forward runs, whichever way
that reads its weights: through its children's forward, or past it, as
MultiheadAttention does with out_proj, fused and functional layers with everything,
and old-style weight_norm in a hook (these hooks come first).  What is in no unit,
and what a unit shares with others or with the module around (a tied weight), is
waited for by each module that can reach it.

That is all there is to it for a program that reads a unit's weights only inside
calls of the unit, of its submodules, or of a module around it that does not keep
them as a unit.  What reads them otherwise reads, without an error, a mixture of
values from before and after the step, and has to call opt.wait() before:

  - a module that reads the weights of a unit below it without calling the unit (a
    penalty on layers' weights in the model's own forward); or make it no unit
    (units=);
  - a function other than a forward that uses a module's own weights: a method that
    is called from outside, a loss that takes weights, deepcopy, an average of
    weights, torch.save(model);
  - whatever writes weights in place.

Units are the children of the longest list of layers, as at stage 3, or those of
units=.
"""

import zero_c

from . import _place


def reached(module, units):
    """The parameters that a call of a module may read without calling a unit below it."""
    found, seen, waiting = [], set(), [module]
    while waiting:
        at = waiting.pop()
        if id(at) in seen:
            continue
        seen.add(id(at))
        found += [parameter for parameter in at._parameters.values() if parameter is not None]
        waiting += [child for child in at._modules.values() if child is not None and id(child) not in units]
    return found


class Waits:
    """The hooks of a module that wait for what a step left under way."""

    def __init__(self, engine, module, units):
        self.engine, self.module = engine, module
        self.units = {id(unit) for _, unit in units}
        self.steps = 0  # made so far: each hook waits once after each
        self.handles = []

    def watch(self, index):
        """Hooks for the parameters that the engine has now; index: id(parameter) -> the engine's number of it."""
        self.unwatch()
        for module in self.module.modules():
            wanted = sorted({index[id(tensor)] for tensor in reached(module, self.units) if id(tensor) in index})
            if wanted:
                self.handles += [
                    module.register_forward_pre_hook(self._before(tuple(wanted)), prepend=True),
                    module.register_state_dict_pre_hook(lambda *_: self.all()),
                    module.register_load_state_dict_pre_hook(lambda *_: self.all()),
                ]

    def _before(self, wanted):
        seen = 0

        def before(*_):
            nonlocal seen
            if seen != self.steps:
                _place.follow_stream(self.engine)
                self.engine.wait_params(wanted)
                seen = self.steps

        return before

    def all(self):
        """Every parameter is up to date on this rank, and no peer reads this rank's any more."""
        _place.follow_stream(self.engine)
        self.engine.wait_params()

    def unwatch(self):
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def close(self):
        """The optimizer is gone, or the program ends: peers get what they still need of this rank."""
        self.unwatch()
        try:
            self.engine.wait_params()
        except zero_c.Error:
            pass  # the group has failed, and nobody needs anything any more


def check(overlap_gather, stage, whole, groups, names):
    """overlap_gather fits the other arguments."""
    if not isinstance(overlap_gather, bool):
        raise TypeError(f"overlap_gather is {overlap_gather!r}; legal: True, False")
    if not overlap_gather:
        return
    if stage not in (1, 2):
        raise ValueError(f"overlap_gather=True at stage {stage}: it lets the gather of a step run beside the next forward, and "
                         f"only stages 1 and 2 gather parameters in step(); leave it out")
    if whole is None:
        raise ValueError("overlap_gather=True waits for parameters when their modules are called: pass the module as the "
                         "first argument, or as module= beside groups")
    check_members(whole, groups, names)


def check_members(whole, groups, names):
    """Nothing would wait for a parameter that the module does not have."""
    members = {id(tensor) for tensor in whole.parameters()}
    for group in groups:
        for tensor in group["params"]:
            if id(tensor) not in members:
                raise ValueError(f"parameter '{names[id(tensor)]}' is not in the module; with overlap_gather=True every "
                                 f"parameter must be")
