"""For `python -m zero_c.plan --model`: what the engine would be given of a module, read on the meta device."""

import contextlib
import importlib
import sys

import torch

from zero_c._plan_model import Listed, Param, Unit

from . import _arguments, _units
from ._optimizer import is_active, plan_units


def load(spec, dtype=None):
    """The module that `module:callable` makes, without memory for its parameters; ValueError says what is wrong.

    dtype: of its floating-point parameters and buffers; None: as they are.
    """
    module_name, colon, path = spec.partition(":")
    if not (module_name and colon and path):
        raise ValueError(f"--model is {spec!r}; legal is module:callable, as in my_package.models:build")
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for the plan
        try:
            target = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:
            raise ValueError(f"--model {spec}: module {module_name!r} cannot be imported ({describe(error)}); it is looked "
                             f"for in the current folder and in PYTHONPATH") from error
        for name in path.split("."):
            if not hasattr(target, name):
                raise ValueError(f"--model {spec}: {module_name!r} has no {path!r}; it has {', '.join(callables(target))}")
            target = getattr(target, name)
        if not callable(target):
            raise ValueError(f"--model {spec}: {path!r} is a {type(target).__name__}; it must be a class or function that "
                             f"returns a torch.nn.Module when called without arguments")
        try:
            with torch.device("meta"):
                model = target()
            if dtype is not None and isinstance(model, torch.nn.Module):
                model.to(getattr(torch, dtype))
        except (Exception, SystemExit) as error:
            raise ValueError(f"--model {spec}: calling {path}() on the meta device failed ({describe(error)}); it must need "
                             f"no arguments and no values of parameters") from error
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"--model {spec}: {path}() returned a {type(model).__name__}; it must return a torch.nn.Module")
    return model


def describe(error):
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def callables(target):
    names = sorted(name for name, value in vars(target).items() if callable(value) and not name.startswith("_"))
    return names[:20] or ["nothing that can be called"]


def listed(model, unit_classes=None):
    """The parameters of a module in the order in which ShardedOptimizer(model) hands them to the engine, and its units.

    unit_classes: names of the classes whose modules are units; None: by default, as ShardedOptimizer chooses.
    """
    groups = _arguments.read_groups(model)
    names = _arguments.name_all(groups, _arguments.named_tensors(model))
    tensors = groups[0]["params"]
    for tensor in tensors:
        _arguments.check_tensor(tensor, names[id(tensor)], is_active, meta=True)
    units = plan_units(model, classes(model, unit_classes), groups, names, False)
    unit_of = {id(tensor): unit.index for unit in units for _, tensor in unit.members}
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    if not trained:
        raise ValueError("the module has no parameter with requires_grad=True, so there is nothing to train")
    frozen = [tensor for tensor in tensors if not tensor.requires_grad and id(tensor) in unit_of]
    kept = {id(tensor) for tensor in trained + frozen}
    outside = [tensor for tensor in [*tensors, *model.buffers()] if id(tensor) not in kept]
    return Listed(
        tuple(Param(tensor.numel(), _arguments.DTYPES[tensor.dtype], unit_of[id(tensor)], is_frozen)
              for is_frozen, entries in ((False, trained), (True, frozen)) for tensor in entries),
        tuple(Unit(unit.name or "root", unit.level, unit.resident) for unit in units),
        sum(tensor.numel() * tensor.element_size() for tensor in outside))


def classes(model, names):
    """The classes of the module's parts that have these names."""
    if names is None:
        return None
    known = {}
    for module in model.modules():
        if module is not model:
            known.setdefault(type(module).__name__, set()).add(type(module))
    for name in names:
        if name not in known:
            raise ValueError(f"--units: the model has no module of class {name!r}; it has {', '.join(sorted(known))}")
    return sorted({kind for name in names for kind in known[name]}, key=lambda kind: (kind.__module__, kind.__qualname__))
