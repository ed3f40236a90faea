"""Two ranks whose next operations differ in any way: zero_c.Mismatch on both, which names both sides.

Every ordered pair of OPERATIONS, at stages 0 to 2, and of these and SHARDED at stage 3, between threads of one process. Where
gathers of units are collective, pairs of them and of what else an engine does are in tests/c/test_stage3.c.
"""

import re
import threading

import numpy
import pytest

import zero_c
from zero_c import _core, _options

BOTH = "rank 0.*rank 1|rank 1.*rank 0|ranks 0 and 1|ranks 1 and 0"
TIMEOUT_S = 30  # a pair that is not found is a Timeout, and fails the test

# name -> (what messages call it, the call[, what tells it from others of that name])
OPERATIONS = {
    "barrier": ("barrier", lambda opt, comm, folder: comm.barrier()),
    "sum of 3": ("all_reduce", lambda opt, comm, folder: comm.all_reduce(ones(3))),
    "sum of 4": ("all_reduce", lambda opt, comm, folder: comm.all_reduce(ones(4))),
    "sum of 3 doubles": ("all_reduce", lambda opt, comm, folder: comm.all_reduce(ones(3, "f8"))),
    "maximum of 3": ("all_reduce", lambda opt, comm, folder: comm.all_reduce(ones(3), "max")),
    "reduce_scatter": ("reduce_scatter", lambda opt, comm, folder: comm.reduce_scatter(ones((2, 2)))),
    "all_gather of 3": ("all_gather", lambda opt, comm, folder: comm.all_gather(ones(3))),
    "all_gather of 4": ("all_gather", lambda opt, comm, folder: comm.all_gather(ones(4))),
    "broadcast from 0": ("broadcast", lambda opt, comm, folder: comm.broadcast(ones(3), 0)),
    "broadcast from 1": ("broadcast", lambda opt, comm, folder: comm.broadcast(ones(3), 1)),
    "split": ("split", lambda opt, comm, folder: comm.split(0)),
    "step": ("step", lambda opt, comm, folder: opt.step(), "lr 0.001"),
    "gradient of 0": ("reading state", lambda opt, comm, folder: opt.grad(0), "gradient of parameter 0"),
    "gradient of 1": ("reading state", lambda opt, comm, folder: opt.grad(1), "gradient of parameter 1"),
    "state of 0": ("reading state", lambda opt, comm, folder: opt.full_state(0), "first moment of parameter 0"),
    "state of 1": ("reading state", lambda opt, comm, folder: opt.full_state(1), "first moment of parameter 1"),
    "clip to 1": ("clip_grad_norm_", lambda opt, comm, folder: opt.clip_grad_norm_(1.0), "max_norm 1,"),
    "clip to 2": ("clip_grad_norm_", lambda opt, comm, folder: opt.clip_grad_norm_(2.0), "max_norm 2,"),
    "step at another rate": ("step", lambda opt, comm, folder: step_at(opt, 0.5), "lr 0.5"),
    "save": ("save", lambda opt, comm, folder: opt.save(folder)),
    "load": ("load", lambda opt, comm, folder: opt.load(folder)),
    "another optimizer": ("channel_open", lambda opt, comm, folder: zero_c.ShardedOptimizer([ones(3)], comm=comm)),
}


def ones(shape, dtype="f4"):
    return numpy.ones(shape, dtype)


def step_at(opt, lr):
    opt.param_groups[0]["lr"] = lr
    opt.step()


def errors_of(live):
    """What live(rank, communicator) raised on each of two ranks."""
    comms = zero_c.local_group(2, timeout=TIMEOUT_S)
    raised = [None, None]

    def run(rank):
        try:
            live(rank, comms[rank])
        except Exception as error:
            raised[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for comm in comms:
        comm.close()
    return raised


def outcomes(calls, stage, folder):
    """What two ranks raised, each in its call after the same backward."""
    def live(rank, comm):
        opt = zero_c.ShardedOptimizer([ones(5), ones(7)], stage=stage, comm=comm)
        for index, size in enumerate((5, 7)):
            opt.add_grad(index, ones(size))
        opt.end_backward()
        calls[rank](opt, comm, folder)

    return errors_of(live)


def check_pair(operations, first, second, errors):
    """What is wrong with the errors of two ranks, in words."""
    (one, _, *about_one), (other, _, *about_other) = operations[first], operations[second]
    words = [one, other, *(about_one + about_other if one == other else [])]
    return [f"{first} against {second}: {error!r}" for error in errors
            if type(error) is not zero_c.Mismatch or not all(word in str(error) for word in words) or not re.search(BOTH, str(error))]


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("first", OPERATIONS)
def test_different_operations(first, stage, tmp_path):
    wrong = []
    for second in OPERATIONS:
        if second != first:
            calls = [OPERATIONS[name][1] for name in (first, second)]
            wrong += check_pair(OPERATIONS, first, second, outcomes(calls, stage, str(tmp_path / "folder")))
    assert not wrong, "\n".join(wrong)
    assert not (tmp_path / "folder").exists()


class Sharded:
    """An engine of stage 3 with a unit for each of two parameters, in the words of OPERATIONS."""

    def __init__(self, comm):
        options = _options.resolve("adamw", {})
        self.param_groups = [{"lr": options["lr"]}]
        self._options = options
        params = [(name, size, "float32", 0, ones(size), unit, False) for unit, (name, size) in enumerate({"a": 5, "b": 7}.items())]
        self.engine = _core.Engine(comm, params, self._groups(), stage=3, units=[("a", 1, False), ("b", 1, False)], bucket_bytes=1024)

    def _groups(self):
        return [_options.to_core("adamw", {**self._options, **self.param_groups[0]})]

    def step(self):
        self.engine.step(self._groups())

    def clip_grad_norm_(self, max_norm):
        return self.engine.clip(max_norm)

    def grad(self, index):
        return self.engine.read(index, "grad")

    def full_state(self, index):
        return self.engine.read(index, "exp_avg")

    def use(self, unit, backward=False):
        self.engine.acquire(unit, backward)
        self.engine.release(unit)


SHARDED = {name: OPERATIONS[name] for name in OPERATIONS if name not in ("save", "load", "another optimizer")} | {
    "second moment of 0": ("reading state", lambda opt, comm, folder: opt.engine.read(0, "exp_avg_sq"), "second moment of parameter 0"),
    "value of 0": ("reading a parameter", lambda opt, comm, folder: opt.engine.fetch(0), "parameter 0 (a)"),
    "value of 1": ("reading a parameter", lambda opt, comm, folder: opt.engine.fetch(1), "parameter 1 (b)"),
    "new value of 0": ("writing a parameter", lambda opt, comm, folder: opt.engine.store(0, ones(5)), "parameter 0 (a)"),
    "new value of 1": ("writing a parameter", lambda opt, comm, folder: opt.engine.store(1, ones(7)), "parameter 1 (b)"),
    "a meeting": ("evaluation", lambda opt, comm, folder: opt.engine.sync("evaluation")),
    "another meeting": ("full_model_state_dict", lambda opt, comm, folder: opt.engine.sync("full_model_state_dict")),
}
# What a rank alone may do between meetings on one host: its next call decides all the same.
ALONE = (lambda opt: None, lambda opt: opt.use(0), lambda opt: [opt.use(1), opt.use(0, backward=True)])


@pytest.mark.parametrize("first", SHARDED)
def test_different_operations_at_stage_3(first, tmp_path):
    wrong = []
    for number, second in enumerate(SHARDED):
        if second == first:
            continue
        calls = [SHARDED[name][1] for name in (first, second)]

        def live(rank, comm, calls=calls, alone=number % len(ALONE)):
            opt = Sharded(comm)
            for unit, size in enumerate((5, 7)):
                opt.use(unit)
                opt.engine.add_grad(unit, ones(size))
            opt.engine.end_round()
            if rank:
                ALONE[alone](opt)
            calls[rank](opt, comm, str(tmp_path))

        wrong += check_pair(SHARDED, first, second, errors_of(live))
    assert not wrong, "\n".join(wrong)


# Optimizers that differ in one thing each: arguments of rank 0, and of rank 1.
BUILT = {
    "stage": ({"stage": 1}, {"stage": 2}), "optimizer": ({"optimizer": "adam"}, {"optimizer": "sgd"}),
    "lr": ({"lr": 0.1}, {"lr": 0.2}), "buckets": ({"bucket_mb": 0.001}, {"bucket_mb": 0.002}),
    "mean": ({"reduce_op": "mean"}, {"reduce_op": "sum"}), "shared": ({"shared_params": True}, {"shared_params": False}),
    "dtype": ({"arrays": [ones(5), ones(7)]}, {"arrays": [ones(5), ones(7, "f8")]}),
    "size": ({"arrays": [ones(5), ones(7)]}, {"arrays": [ones(5), ones(8)]}),
    "number": ({"arrays": [ones(5), ones(7)]}, {"arrays": [ones(5)]}),
    "name": ({"arrays": {"a": ones(5), "b": ones(7)}}, {"arrays": {"a": ones(5), "c": ones(7)}}),
}


@pytest.mark.parametrize("what", BUILT)
def test_different_optimizers(what):
    def build(comm, arrays=None, **options):
        return zero_c.ShardedOptimizer(arrays or [ones(5), ones(7)], comm=comm, **options)

    for error in errors_of(lambda rank, comm: build(comm, **BUILT[what][rank])):
        assert type(error) is zero_c.Mismatch and re.search(BOTH, str(error), re.IGNORECASE | re.DOTALL), repr(error)
