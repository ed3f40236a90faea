"""How a failure case becomes a test.

A function marked `@row(16)` is the case of row 16; its name says the failure.
It runs on every rank of every size in `ranks`, once for each stage in `stages`,
and asserts there.  test_rows.py makes one pytest test of each combination;
README.md lists the rows.

At stage 3 a parameter has its value inside its unit's forward only, so a case
takes from Here what depends on that: `here.feed` for a loss with given gradients,
`here.value` for what a parameter holds.  At the other stages these are the plain things.
"""

import contextlib
import importlib
import os
from dataclasses import dataclass, field

import zero_c

STAGES = (0, 1, 2, 3)
SHARDED_STATE = (0, 1, 2)  # for a case whose stage 3 differs: that is a case of its own
_ROWS = []


@dataclass
class Case:
    numbers: tuple
    function: object
    ranks: tuple
    stages: tuple
    deadline: float

    @property
    def name(self):
        return f"{'+'.join(str(number) for number in self.numbers)}-{self.function.__name__}"


@dataclass
class Here:
    """What a case knows of the rank it runs on."""

    comm: object
    stage: int | None
    owners: dict = field(default_factory=dict)  # id(parameter) -> (parameter, its optimizer), at stage 3
    fed: dict = field(default_factory=dict)  # id(parameter) -> the module that was made to hold it

    @property
    def rank(self):
        return self.comm.rank

    @property
    def ranks(self):
        return self.comm.world_size

    def optimizer(self, params, module=None, **options):
        """An optimizer of this stage; at stage 3 bare parameters get a module, each of them a unit of its own."""
        from zero_c.torch import ShardedOptimizer

        if self.stage != 3:
            return ShardedOptimizer(params, module=module, stage=self.stage, comm=self.comm, **options)
        bare = module is None and bare_parameters(params)
        if bare:
            module = holder_of(bare)
            self.fed.update((id(parameter), module) for parameter in bare)
            options["units"] = list(module.pieces)
            params = list(params.named_parameters()) if hasattr(params, "named_parameters") else params
        with missed_gathers_show():
            opt = ShardedOptimizer(params, module=module, stage=3, comm=self.comm, **options)
        whole = params if module is None else module
        self.owners.update((id(parameter), (parameter, opt)) for parameter in whole.parameters())
        return opt

    def feed(self, parameters, gradients, scale=1.0):
        """models.feed, through the module that holds the parameters where they have no value outside it."""
        from models import feed

        module = self.fed.get(id(parameters[0]))
        return scale * module(parameters, gradients) if module is not None else feed(parameters, gradients, scale)

    def value(self, parameter):
        """What a parameter holds, at full shape; at stage 3 all ranks must ask."""
        parameter, opt = self.owners.get(id(parameter), (parameter, None))
        return parameter.detach() if opt is None else opt.full_param(parameter)

    def close_models(self, model, reference, **tolerances):
        """Every parameter of a trained model agrees with the reference's."""
        from models import close

        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            close(self.value(ours), theirs, name, **tolerances)


def bare_parameters(params):
    """The tensors in what is given to an optimizer, where it is no module with a forward of its own; else []."""
    from torch import nn

    if isinstance(params, nn.ParameterList):
        return list(params)
    if isinstance(params, nn.Module):
        return []
    groups = params if isinstance(params[0], dict) else [{"params": params}]
    return [entry[1] if isinstance(entry, tuple) else entry for group in groups for entry in group["params"]]


def holder_of(parameters):
    """A module whose forward is feed(): each parameter is in a unit, which computes its part of the sum."""
    from torch import nn

    from models import feed

    class Piece(nn.Module):
        def __init__(self, parameter):
            super().__init__()
            self.value = parameter if isinstance(parameter, nn.Parameter) else None
            if self.value is None:  # what is no Parameter may be refused; that is then what the case is about
                self._parameters["value"] = parameter

        def forward(self, gradient):
            return feed([self.value], [gradient])

    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.pieces = nn.ModuleList(Piece(parameter) for parameter in parameters)

        def forward(self, fed, gradients):
            at = {id(piece.value): piece for piece in self.pieces}
            terms = [at[id(parameter)](gradient) for parameter, gradient in zip(fed, gradients, strict=True)
                     if gradient is not None]
            return sum(terms)

    return Holder()


@contextlib.contextmanager
def missed_gathers_show():
    """Memory of discarded units is filled with NaN in optimizers made inside: a unit that was not gathered is seen."""
    os.environ["ZERO_C_STAGE3_FILL"] = "1"
    try:
        yield
    finally:
        del os.environ["ZERO_C_STAGE3_FILL"]


def row(*numbers, ranks=(2,), stages=STAGES, deadline=60.0):
    """Marks a function of one argument, Here, as the case of these rows."""

    def mark(function):
        _ROWS.append(Case(numbers, function, tuple(ranks), tuple(stages), deadline))
        return function

    return mark


def all_cases():
    return list(_ROWS)


def on_rank(module, function, stage):
    """Runs one case; called in a rank process."""
    importlib.import_module("cases.areas")
    getattr(importlib.import_module(module), function)(Here(zero_c.init(), stage))


def raised(call, *kinds):
    """The exception of one of `kinds` that call() raises; anything else is a failure."""
    try:
        call()
    except kinds as error:
        return error
    raise AssertionError(f"nothing was raised; wanted {', '.join(kind.__name__ for kind in kinds)}")
