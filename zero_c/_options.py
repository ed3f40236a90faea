"""Options of the update rules: names and defaults as in torch.optim, checked here for NumPy and torch alike.

A group is a dict with torch's names; the core gets a dict with its own, numbers only.
"""

import math
import numbers
from reprlib import repr as shown  # short, whatever a file holds

ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "maximize": False}
DEFAULTS = {
    "adamw": {**ADAM, "weight_decay": 1e-2},
    "adam": ADAM,
    "sgd": {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False},
}
EVERY_OPTION = sorted({name for options in DEFAULTS.values() for name in options})


def resolve(optimizer, given):
    """The defaults of all groups: what was given, and torch's defaults for the rest."""
    if optimizer not in DEFAULTS:
        raise ValueError(f"optimizer is {optimizer!r}; legal are 'adamw', 'adam', 'sgd'")
    check_names(optimizer, given)
    options = {**DEFAULTS[optimizer], **given}
    to_core(optimizer, options)
    return options


def check_names(optimizer, given):
    """Options that are not known, or would do nothing, are errors."""
    for name in given:
        if name in DEFAULTS[optimizer]:
            continue
        legal = ", ".join(DEFAULTS[optimizer])
        if name in EVERY_OPTION:
            raise TypeError(f"option {name!r} has no effect with optimizer={optimizer!r}; its options are {legal}")
        raise TypeError(f"unknown option {name!r}; options of optimizer={optimizer!r} are {legal}")


def to_core(optimizer, group):
    """A group for the core; ValueError or TypeError name the option, its value and what is legal."""
    core = {
        "lr": _number("lr", group["lr"]),
        "weight_decay": _number("weight_decay", group["weight_decay"]),
        "maximize": _flag("maximize", group["maximize"]),
    }
    if optimizer == "sgd":
        core["momentum"] = _number("momentum", group["momentum"])
        core["dampening"] = _number("dampening", group["dampening"], low=-math.inf)
        core["nesterov"] = _flag("nesterov", group["nesterov"])
        if core["nesterov"] and (core["momentum"] <= 0 or core["dampening"] != 0):
            raise ValueError(f"nesterov=True with momentum={core['momentum']:g} and dampening={core['dampening']:g}; it "
                             f"needs momentum > 0 and dampening 0")
        return core
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise TypeError(f"betas is {shown(betas)}; it must be a pair of numbers")
    core["beta1"] = _number("betas[0]", betas[0], below=1.0)
    core["beta2"] = _number("betas[1]", betas[1], below=1.0)
    core["eps"] = _number("eps", group["eps"])
    core["amsgrad"] = _flag("amsgrad", group["amsgrad"])
    return core


def _number(name, value, low=0.0, below=math.inf):
    """A float in [low, below); tensors and arrays of one element count as numbers, strings and flags do not."""
    if hasattr(value, "item") and math.prod(getattr(value, "shape", ())) == 1:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {shown(value)}; it must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf if value > 0 else -math.inf
    if not low <= number < below:
        wanted = f"in [{low:g}, {below:g})" if below != math.inf else "finite and 0 or more" if low == 0 else "finite"
        raise ValueError(f"{name} is {number:g}; it must be {wanted}")
    return number


def _flag(name, value):
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {shown(value)}; it must be True or False")
    return value
