"""How a failure case becomes a test.

A function marked `@row(16)` is the case of row 16; its name says the failure.
It runs on every rank of every size in `ranks`, once for each stage in `stages`,
and asserts there.  test_rows.py makes one pytest test of each combination;
README.md lists the rows.
"""

import importlib
from dataclasses import dataclass

import zero_c

STAGES = (0, 1, 2)
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

    @property
    def rank(self):
        return self.comm.rank

    @property
    def ranks(self):
        return self.comm.world_size

    def optimizer(self, params, **options):
        from zero_c.torch import ShardedOptimizer

        return ShardedOptimizer(params, stage=self.stage, comm=self.comm, **options)


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
