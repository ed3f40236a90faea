"""What a plan is made for: a model, listed or counted, and how its optimizer is built. All sizes are in elements or, where
the name says so, in bytes.

A model is either Listed, one Param for each parameter, and then every figure of a plan is the engine's own to the byte;
or it is Counted, a number of elements in units of which the largest is given, and then the figures are those of a model
with one parameter for each unit.
"""

import numbers
import sys
from dataclasses import dataclass

PARAM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}  # in the order of csrc/zc_dtype.h
SUM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 4, "float16": 4}    # gradients are added up in fp32 (fp64)
MASTER_BYTES = {"float32": 0, "float64": 0, "bfloat16": 2, "float16": 4} # a bf16 parameter is half of its own master
STATES = {"adamw": 2, "adam": 2, "sgd": 0}                               # arrays of an optimizer
DEVICES = ("cpu", "cuda")


MOST = int(1e30)  # of anything that is counted: products of such numbers are floats still


def whole(name, value, least):
    """An int of at least `least`; a float that is whole will do."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r}; it must be a whole number, {least} or more")
    if value > MOST:
        raise ValueError(f"{name} is above 1e30, which nothing is that can be planned; it must be a whole number, {least} or more")
    if not least <= value or value != int(value):
        raise ValueError(f"{name} is {value}; it must be a whole number, {least} or more")
    return int(value)


def one_of(name, value, legal):
    if value not in legal:
        raise ValueError(f"{name} is {value!r}; legal are {', '.join(legal)}")
    return value


def positive(name, value, zero=False):
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is {value!r}; it must be a number")
    if not value <= sys.float_info.max or not (value > 0 or (zero and value == 0)):
        raise ValueError(f"{name} is {value}; it must be finite and {'0 or more' if zero else 'above 0'}")
    return float(value)


@dataclass(frozen=True)
class Settings:
    """How an optimizer is built, as far as memory and traffic depend on it; names and defaults of ShardedOptimizer.

    amsgrad, momentum: whether any group has it. device: "cpu", or "cuda" with all ranks on one host. backwards:
    synchronised ones for each step.
    """

    optimizer: str = "adamw"
    amsgrad: bool = False
    momentum: bool = False
    bucket_mb: float | None = None
    prefetch: int = 1
    shared_params: bool = False
    device: str = "cpu"
    backwards: int = 1

    def __post_init__(self):
        one_of("optimizer", self.optimizer, STATES)
        one_of("device", self.device, DEVICES)
        if self.amsgrad and self.optimizer == "sgd":
            raise ValueError("amsgrad has no effect with optimizer 'sgd'; leave it out, or choose adam or adamw")
        if self.momentum and self.optimizer != "sgd":
            raise ValueError(f"momentum has no effect with optimizer {self.optimizer!r}; leave it out, or choose sgd")
        if self.shared_params and self.device == "cuda":
            raise ValueError("shared_params is for the CPU; ranks on GPUs have a copy each")
        if self.bucket_mb is not None:
            positive("bucket_mb", self.bucket_mb)
        object.__setattr__(self, "prefetch", whole("prefetch", self.prefetch, 0))
        object.__setattr__(self, "backwards", whole("backwards", self.backwards, 1))

    @property
    def states(self):
        """Arrays that the optimizer keeps, in the type of the sums."""
        return STATES[self.optimizer] + bool(self.amsgrad) + bool(self.momentum)

    @property
    def bucket_bytes(self):
        return max(1, int(self.bucket_mb * 2**20)) if self.bucket_mb is not None else 0

    @property
    def slots(self):
        """Of each ring of stage 3."""
        return self.prefetch + 1

    @property
    def stages(self):
        return (0, 1, 2) if self.shared_params else (0, 1, 2, 3)


@dataclass(frozen=True)
class Param:
    """One parameter: elements, dtype, the number of its unit, and whether it is not trained."""

    elements: int
    dtype: str = "float32"
    unit: int = 0
    frozen: bool = False


@dataclass(frozen=True)
class Unit:
    """What stage 3 gathers together. Units of one level take turns in a ring of slots; a resident one has its own."""

    name: str = ""
    level: int = 1
    resident: bool = False


ROOT = Unit("root", 0, True)


@dataclass(frozen=True)
class Listed:
    """A model by its parameters, in the order of their registration; at stage 3 the frozen ones come last.

    units: of stage 3, in the order of their first use. outside_bytes: what torch keeps beside the engine at every
    stage (module buffers, parameters of other types).
    """

    params: tuple
    units: tuple = (ROOT,)
    outside_bytes: int = 0

    @property
    def elements(self):
        return sum(param.elements for param in self.params)


@dataclass(frozen=True)
class Counted:
    """A model of so many elements of one dtype: a root, and units of which the largest is given.

    There are as few units as that allows; the others share the rest equally.
    """

    elements: int
    dtype: str = "float32"
    largest_unit: int = 1
    root: int = 0

    def unit_sizes(self):
        """[(elements, how many units)]: the largest first."""
        rest = self.elements - self.root
        count = -(-rest // self.largest_unit)
        if count <= 1:
            return [(rest, 1)] if rest else []
        each, more = divmod(rest - self.largest_unit, count - 1)
        return [(size, how_many) for size, how_many in
                ((self.largest_unit, 1), (each + 1, more), (each, count - 1 - more)) if size and how_many]
