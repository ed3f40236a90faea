"""Taking a state dict: everything is checked, on all ranks, before anything is changed.

Two forms come: this rank's own shards (local_state() of _state.py), which have a header "zero_c", and torch.optim's,
from full_state() or a plain torch optimizer (whose state has no masters). In both the keys of "state" are what the
groups list as "params", numbers or names, and the n-th of them is the n-th parameter here.
"""

import copy
import numbers
from dataclasses import dataclass
from reprlib import repr as shown  # short, whatever a dict holds

import torch

from zero_c import _core, _options
from zero_c._checkpoint import collective
from zero_c._core import CheckpointError

from . import _agree, _state
from ._arguments import DTYPES, options_of


@dataclass
class Part:
    """What one trained parameter takes; a value that is None: zeros."""

    index: int  # in the engine
    parameter: torch.Tensor
    name: str
    values: dict  # role -> tensor
    steps: int = 0
    has_momentum: bool = False


def load(opt, state):
    """Collective."""
    what = "load_state_dict"
    opt._engine.sync(what)
    loading = collective(opt._comm, what, lambda: Loading(opt, hooked(opt, state)))
    _agree.compare(opt._comm, what, loading.lines, "state dict, or its own of the same step")
    collective(opt._comm, what, lambda: opt._engine.prepare(loading.core_groups))
    collective(opt._comm, f"{what}, which is half done (the state is undefined until another load)", loading.apply)


def hooked(opt, state):
    """What the hooks make of a state dict; they get a copy, in which they may exchange what they like."""
    if not isinstance(state, dict):
        raise TypeError(f"the loaded state is a {type(state).__name__}; needed: a dict of state_dict()")
    state = state.copy()
    for hook in opt._optimizer_load_state_dict_pre_hooks.values():
        result = hook(opt, state)
        state = state if result is None else result
    return state


class Loading:
    """A state dict that fits: CheckpointError, or whatever a strange dict leads to, if it does not."""

    def __init__(self, opt, state):
        self._opt, self._optimizer = opt, opt._optimizer
        for key, kind in (("param_groups", list), ("state", dict)):
            if not isinstance(state.get(key), kind):
                raise CheckpointError(f"the loaded state has no {kind.__name__} '{key}' (it has: {', '.join(map(str, state)) or 'nothing'}); "
                                      f"every rank needs a whole state dict, which full_state_dict(rank=...) gives to one only")
        self._header = state.get("zero_c")
        if self._header is not None:
            self._check_header()
        self._options = self._read_groups(state["param_groups"])
        self.core_groups = [self._core_group(number, options) for number, options in enumerate(self._options)]
        keys = keys_of(state)
        read = self._read_whole if self._header is None else self._read_local
        self._parts = []
        for number, index, parameter, roles in opt._numbered(self._options):
            entry, name = state["state"].get(keys[number], {}), opt._managed[index][0]
            if not isinstance(entry, dict):
                raise CheckpointError(f"parameter '{name}': the loaded state is a {type(entry).__name__}; needed: a dict")
            self._check_names(name, entry)
            self._parts.append(read(Part(index, parameter, name, {}), entry, roles))
        self.lines = self._describe()

    # ---- the optimizer ---------------------------------------------------------

    def _check_header(self):
        for key, value in _state.layout(self._opt).items():
            if self._header.get(key) != value:
                raise CheckpointError(f"this is the local state of {key} {shown(self._header.get(key))}, and here {key} is {value}; "
                                      f"between different ranks, stages or bucket sizes use full_state_dict()")
        copy.copy(self._opt._scale).load_state_dict(self._header["loss_scale"])
        whole_number(self._header["steps"], "the number of steps")

    def _read_groups(self, saved):
        """The options that each group takes."""
        groups, legal = self._opt.param_groups, _options.DEFAULTS[self._optimizer].keys()
        if len(saved) != len(groups):
            raise CheckpointError(f"the loaded state has {len(saved)} parameter groups, the optimizer has {len(groups)}")
        found = []
        for number, (group, other) in enumerate(zip(groups, saved, strict=True)):
            if not isinstance(other, dict) or not isinstance(other.get("params"), list):
                raise CheckpointError(f"group {number} of the loaded state is no dict with a list of 'params'")
            if len(group["params"]) != len(other["params"]):
                raise CheckpointError(f"group {number} of the loaded state has {len(other['params'])} parameters, the "
                                      f"optimizer's has {len(group['params'])}")
            strange = [name for name in _options.EVERY_OPTION if name in other and name not in legal]
            if strange:
                raise CheckpointError(f"group {number} of the loaded state has the options {', '.join(strange)}, which are those of "
                                      f"{owners(strange, _options.DEFAULTS)}, and here is '{self._optimizer}'; load the state of the "
                                      f"same optimizer")
            options = {"maximize": False, **copy.deepcopy(options_of(other))}  # the youngest of torch's options
            missing = sorted(legal - options.keys())
            if missing:
                raise CheckpointError(f"group {number} of the loaded state has no {', '.join(missing)}; it is not of the optimizer "
                                      f"'{self._optimizer}', which is here")
            found.append(options)
        return found

    def _core_group(self, number, options):
        try:
            return _options.to_core(self._optimizer, options)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"group {number} of the loaded state: {error}") from None

    def _check_names(self, name, entry):
        known = {"step", "master", *_state.ROLES[self._optimizer]} | ({"has_momentum"} if self._header is not None else set())
        strange = [key for key in entry if key not in known]
        if strange:
            raise CheckpointError(f"parameter '{name}': the loaded state has '{strange[0]}', which is that of "
                                  f"{owners(strange[:1], _state.ROLES)}, and here is '{self._optimizer}'; load the state of the same "
                                  f"optimizer")

    # ---- a parameter -------------------------------------------------------------

    def _read_whole(self, part, entry, roles):
        part.has_momentum = "momentum_buffer" in roles and entry.get("momentum_buffer") is not None
        part.steps = whole_number(entry.get("step", 0), f"parameter '{part.name}': 'step'")
        for role in roles:
            value = part.values[role] = entry.get(role)
            if value is not None:
                check_value(value, f"parameter '{part.name}': the loaded {role}", part.parameter.shape, DTYPES)
            elif entry and role != "momentum_buffer":
                raise CheckpointError(f"parameter '{part.name}': the loaded state has no {role}; with these options of its group "
                                      f"{', '.join(roles)} are needed")
        if entry.get("master") is not None:
            if "master" not in _state.kept(part.parameter, ()):
                raise CheckpointError(f"parameter '{part.name}': the loaded state has a master, and a parameter of "
                                      f"{part.parameter.dtype} has none; take 'master' out of the state, or write it into the parameter")
            check_value(entry["master"], f"parameter '{part.name}': the loaded master", part.parameter.shape, DTYPES)
            part.values["master"] = entry["master"]
        return part

    def _read_local(self, part, entry, roles):
        engine = self._opt._engine
        elems = (part.parameter.numel() if self._opt._stage == 0
                 else sum(end - begin for begin, end in engine.parts(part.index)))
        wide = torch.float64 if part.parameter.dtype == torch.float64 else torch.float32
        for key in ("step", *_state.kept(part.parameter, roles)):
            if key not in entry:
                raise CheckpointError(f"parameter '{part.name}': the loaded state has no {key}")
        part.steps = whole_number(entry["step"], f"parameter '{part.name}': 'step'")
        part.has_momentum = bool(entry.get("has_momentum", False))
        for role in _state.kept(part.parameter, roles):
            dtype = _state.views(engine, part.index, ("master",))["master"].dtype if role == "master" else wide
            check_value(entry[role], f"parameter '{part.name}': this rank's part of the loaded {role}", (elems,),
                        (dtype,) if elems else (dtype, torch.float32))  # views() of nothing is fp32
            part.values[role] = entry[role]
        return part

    # ---- all of them -------------------------------------------------------------

    def _describe(self):
        """Lines that must be the same on all ranks."""
        lines = ["a whole state" if self._header is None else "a local state"]
        for number, options in enumerate(self._options):
            lines.append(f"group {number}: " + ", ".join(f"{key} {_agree.plain(value)}" for key, value in sorted(options.items())))
        for part in self._parts:
            line = f"parameter '{part.name}': {part.steps} steps, momentum {part.has_momentum}"
            if self._header is None:
                line += "".join(f", {role} with the checksum {checksum(value)}" for role, value in part.values.items())
            lines.append(line)
        if self._header is not None:
            lines.append(f"loss scale {self._header['loss_scale']}, {self._header['steps']} steps")
        return lines

    def apply(self):
        """After prepare(). Local."""
        opt = self._opt
        opt._refresh_written()  # weights that were loaded before this must not displace masters later
        for group, options in zip(opt.param_groups, self._options, strict=True):
            group.update(options)
        for part in self._parts:
            if self._header is None:
                for role, value in part.values.items():
                    opt._write(part.index, part.parameter, role, value)
            else:
                for role, view in _state.views(opt._engine, part.index, part.values).items():
                    view.copy_(part.values[role])
            opt._engine.set_step_count(part.index, part.steps, part.has_momentum)
        if self._header is not None:
            opt._scale.load_state_dict(self._header["loss_scale"])
            opt.last_step.steps = self._header["steps"]
        opt._follow_options()


def keys_of(state):
    """The keys of the parameters in "state", in their order."""
    keys = [key for group in state["param_groups"] for key in group["params"]]
    strange = next((key for key in keys if not isinstance(key, (int, str))), None)
    if strange is not None:
        raise CheckpointError(f"the groups of the loaded state list a {type(strange).__name__} as a parameter; needed: numbers or names")
    if len(set(keys)) != len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise CheckpointError(f"the groups of the loaded state list {twice!r} twice")
    unknown = list(state["state"].keys() - set(keys))
    if unknown:
        raise CheckpointError(f"the loaded state has that of {shown(unknown[0])}, and its groups list no such parameter (the first of "
                              f"theirs: {shown(keys[0]) if keys else 'none'}); keys of 'state' must be those of 'params'")
    return keys


def owners(names, of_rules):
    """Which optimizers have these, for a sentence."""
    found = [f"'{rule}'" for rule, legal in of_rules.items() if set(names) <= set(legal)]
    return " or ".join(found) or "another optimizer"


def whole_number(value, what):
    """An int, of a number or a tensor of one element."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_meta:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= value < 1 << 63 or value != int(value):
        raise CheckpointError(f"{what} is {shown(value)} in the loaded state; needed: a whole number, 0 or more")
    return int(value)


def check_value(value, what, shape, dtypes):
    """A plain tensor of this shape, of one of these dtypes."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise CheckpointError(f"{what} is a {type(value).__name__}; needed: a plain tensor (of a DTensor: its full_tensor())")
    if tuple(value.shape) != tuple(shape):
        raise CheckpointError(f"{what} is {tuple(value.shape)}, and must be {tuple(shape)}")
    if value.dtype not in dtypes or value.layout != torch.strided or value.is_meta:
        legal = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise CheckpointError(f"{what} is {str(value.dtype).removeprefix('torch.')}, {value.layout}, on '{value.device}'; needed: "
                              f"{legal}, dense, with values")


def checksum(value):
    """Sums of a tensor's bytes; None has none."""
    if value is None:
        return None
    return _core.checksum(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
