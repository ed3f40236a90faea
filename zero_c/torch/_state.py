"""Optimizer state as dicts: what torch shows in `opt.state`, local state dicts, and torch's own full form.

_state_loading.py takes them back.
"""

import torch

from ._place import as_tensor

# torch's names of what the engine keeps for a parameter, by rule.
ROLES = {"adamw": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), "adam": ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
         "sgd": ("momentum_buffer",)}
FORMAT = 1


def roles_of(optimizer, group):
    """The names of the state that a parameter of this group has."""
    if optimizer == "sgd":
        return ROLES["sgd"] if group["momentum"] else ()
    return ROLES[optimizer] if group["amsgrad"] else ROLES[optimizer][:2]


class ParamState(dict):
    """State of one parameter on this rank: views of its shards, and "step", which is read when asked for."""

    def __init__(self, engine, index, views):
        super().__init__(views)
        self._engine, self._index = engine, index
        self._count()

    def _count(self):
        dict.__setitem__(self, "step", torch.tensor(float(self._engine.step_count(self._index))))

    def __getitem__(self, key):
        self._count()
        return super().__getitem__(key)

    def get(self, key, default=None):
        self._count()
        return super().get(key, default)

    def items(self):
        self._count()
        return super().items()

    def values(self):
        self._count()
        return super().values()

    def __repr__(self):
        self._count()
        return super().__repr__()


def views(engine, index, names):
    """name -> this rank's part of the state; empty where it has none."""
    found = {}
    for name in names:
        array = engine.state(index, name)
        found[name] = torch.empty(0) if array is None else as_tensor(array)
    return found


def pack_groups(param_groups):
    """Groups with parameters as running numbers, as in torch's state dicts."""
    packed, number = [], 0
    for group in param_groups:
        count = len(group["params"])
        packed.append({**{key: value for key, value in group.items() if key != "params"},
                       "params": list(range(number, number + count))})
        number += count
    return packed


def kept(parameter, names):
    """Names of all that the engine keeps for a parameter: its state and, for 16-bit types, its master."""
    return (*names, "master") if parameter.dtype in (torch.bfloat16, torch.float16) else names


def layout(opt):
    """What a local state is tied to: shards of another layout hold other elements."""
    return {"format": FORMAT, "rank": opt._comm.rank, "ranks": opt._comm.world_size, "stage": opt._stage,
            "buckets": opt._engine.plan()["buckets"], "optimizer": opt._optimizer}


def local_state(opt):
    """This rank's shards; no communication."""
    state = {}
    for number, index, parameter, names in opt._numbered():
        entry = {"step": opt._engine.step_count(index)}
        if opt._optimizer == "sgd":
            entry["has_momentum"] = bool(opt._engine.has_momentum(index))
        for name, view in views(opt._engine, index, kept(parameter, names)).items():
            entry[name] = view.clone()
        state[number] = entry
    header = {**layout(opt), "loss_scale": opt._scale.state_dict(), "steps": opt.last_step.steps}
    return {"state": state, "param_groups": pack_groups(opt.param_groups), "zero_c": header}


def full_state(opt, rank=None):
    """torch.optim's form, whole arrays on every rank, or on one; collective.

    Adam's state is there before the first step too, as zeros, which mean the same to torch; a momentum buffer is not.
    """
    state, wanted = {}, rank is None or rank == opt._comm.rank
    for number, index, parameter, names in opt._numbered():
        if opt._optimizer == "sgd" and not opt._engine.has_momentum(index):
            names = ()
        steps = opt._engine.step_count(index)
        entry = {"step": torch.tensor(float(steps))} if steps or names else {}
        for name in kept(parameter, names) if entry else ():
            value = opt._read(index, parameter, name)
            if wanted:
                entry[name] = value
        if entry:
            state[number] = entry
    return {"state": state, "param_groups": pack_groups(opt.param_groups)} if wanted else {}


def full_model_state(opt, rank=None):
    """The module's state dict on the CPU, whole parameters, on every rank or on one; collective, one parameter at a time."""
    values, wanted = {}, rank is None or rank == opt._comm.rank
    state = {}
    for prefix, part in opt._whole.named_modules(remove_duplicate=False):
        for key, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is None or (key in part._buffers and key in part._non_persistent_buffers_set):
                continue
            if id(tensor) not in values:
                value = opt._fetch(tensor) if opt._windows is not None and id(tensor) in opt._sharded else tensor
                # Not the tensor itself: it changes with the next step.
                values[id(tensor)] = torch.empty_like(value, device="cpu").copy_(value.detach()) if wanted else None
            if wanted:
                state[f"{prefix}.{key}" if prefix else key] = values[id(tensor)]
    return state
