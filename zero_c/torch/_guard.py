"""Stage 3: what a parameter is while its values are not there.

It keeps its identity, shape and dtype.  Its data is one NaN of its own, expanded to
the shape, so that reading it by any way is loud.  And it is of a class that notices
what would go wrong later or in silence: a result that autograd would differentiate
through it, a write, a copy.  Inside its unit's forward and backward it is a plain
Parameter again, and costs nothing (Window, _core.pyi).
"""

import math
import weakref

import torch

import zero_c

# Who can say what a parameter is called: the Runtimes of _stage3.py.
runtimes = weakref.WeakSet()

set_data = torch.Tensor.data.__set__
disabled = torch._C.DisableTorchFunctionSubclass

WRITES_NO_VALUE = {"requires_grad_"}
COPIES = {"clone", "__deepcopy__"}


def nan_guard(tensor):
    """One NaN of the tensor's own, expanded to its shape; one on the meta device will be on the CPU."""
    device = torch.device("cpu") if tensor.is_meta else tensor.device
    return torch.full((), math.nan, dtype=tensor.dtype, device=device).expand(tensor.shape)


def guarded_in(value):
    """The first guarded parameter among arguments of a function, or None."""
    if isinstance(value, GuardedParameter):
        return value
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return None
    return next((found for item in value if (found := guarded_in(item)) is not None), None)


def depends(result):
    """Whether a function's result leads autograd back to its arguments."""
    if isinstance(result, torch.Tensor):
        return result.requires_grad and not isinstance(result, GuardedParameter)
    return isinstance(result, (list, tuple)) and any(map(depends, result))


def written_by(function, arguments, keywords):
    """The guarded parameter that a torch function would write to, or None."""
    name = function.__name__
    if function == set_data:
        parameter, new = arguments
        same = new.dtype == parameter.dtype and new.shape == parameter.shape and new.data_ptr() == parameter.data_ptr()
        return None if same else parameter
    in_place = name.endswith("_") and not name.endswith("__") and name not in WRITES_NO_VALUE
    if in_place or name == "__setitem__" or (name.startswith("__i") and name.endswith("__") and len(arguments) == 2):
        return guarded_in(arguments[:1])
    return guarded_in(keywords.get("out"))


def refusal(parameter, what):
    """The error for a guarded parameter."""
    for runtime in list(runtimes):
        if id(parameter) in runtime.layout:
            return zero_c.Error(f"rank {runtime.rank}: parameter '{runtime.name_of(parameter)}' {what} while its values are not "
                                f"there: they are only during the forward and the backward of {runtime.unit_around(parameter)}. "
                                + REMEDIES[what])
    return zero_c.Error(f"a parameter of shape {tuple(parameter.shape)} {what}, but the ShardedOptimizer that had its values is "
                        f"gone; keep it, or take the values out inside opt.gathered() before")


REMEDIES = {
    "is used": "Use it inside that module's forward, or make the module that reads it the unit (units=); a penalty on weights "
               "is weight_decay=. Values to look at are in opt.full_param(p) and opt.gathered()",
    "is written": "Write inside opt.gathered(write=True); change dtype or device before building the optimizer",
    "is copied": "Copy or save it inside opt.gathered(); a copied model needs a new ShardedOptimizer of its own",
}


class GuardedParameter(torch.nn.Parameter):
    """What a Parameter is meanwhile; never constructed, objects change their class."""

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        with disabled():
            written = written_by(function, arguments, keywords)
            if written is not None:
                raise refusal(written, "is written")
            if function.__name__ in COPIES:
                raise refusal(arguments[0], "is copied")
            result = function(*arguments, **keywords)
        if torch.is_grad_enabled() and depends(result):
            raise refusal(guarded_in([arguments, keywords]), "is used")
        return result

    def __deepcopy__(self, memo):
        raise refusal(self, "is copied")

    def __reduce_ex__(self, protocol):
        raise refusal(self, "is copied")
