"""Two ranks whose next operations differ in any way: zero_c.Mismatch on both, which names both sides.

Every ordered pair of OPERATIONS, at stages 0 to 2, between threads of one process; units of stage 3 that differ are in
test_stage3.py and tests/c/test_declare.c.
"""

import re
import threading

import numpy
import pytest

import zero_c

BOTH = "rank 0.*rank 1|rank 1.*rank 0|ranks 0 and 1|ranks 1 and 0"
TIMEOUT_S = 30  # a pair that is not found is a Timeout, and fails the test

# name -> (what messages call it, the call)
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
    "step": ("step", lambda opt, comm, folder: opt.step()),
    "gradient of 0": ("reading state", lambda opt, comm, folder: opt.grad(0)),
    "gradient of 1": ("reading state", lambda opt, comm, folder: opt.grad(1)),
    "state of 0": ("reading state", lambda opt, comm, folder: opt.full_state(0)),
    "state of 1": ("reading state", lambda opt, comm, folder: opt.full_state(1)),
    "clip to 1": ("clip_grad_norm_", lambda opt, comm, folder: opt.clip_grad_norm_(1.0)),
    "clip to 2": ("clip_grad_norm_", lambda opt, comm, folder: opt.clip_grad_norm_(2.0)),
    "step at another rate": ("step", lambda opt, comm, folder: step_at(opt, 0.5)),
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


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("first", OPERATIONS)
def test_different_operations(first, stage, tmp_path):
    wrong = []
    for second in OPERATIONS:
        if second == first:
            continue
        words, calls = zip(OPERATIONS[first], OPERATIONS[second], strict=True)
        for error in outcomes(calls, stage, str(tmp_path / "folder")):
            named = all(word in str(error) for word in words) and re.search(BOTH, str(error))
            if type(error) is not zero_c.Mismatch or not named:
                wrong.append(f"{first} against {second}: {error!r}")
    assert not wrong, "\n".join(wrong)
    assert not (tmp_path / "folder").exists()


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
