"""What the ranks of test_faults.py do.  No torch: a rank starts in a fraction of a second."""

import os
import threading
import time

import numpy

import zero_c


def caught(call):
    """Class names, message and seconds of what call() raises."""
    start = time.monotonic()
    try:
        call()
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        return {"kinds": kinds, "text": str(error), "seconds": time.monotonic() - start}
    return {"kinds": [], "text": "nothing was raised", "seconds": time.monotonic() - start}


def uneven_batches(timeout):
    """Three batches on rank 0, two on the others, which then do something else."""
    comm = zero_c.init(timeout=timeout)
    opt = zero_c.ShardedOptimizer([numpy.zeros(5, numpy.float32)], optimizer="sgd", lr=1.0, comm=comm)
    for _ in range(2):
        opt.add_grad(0, numpy.ones(5, numpy.float32))
        opt.step()
    if comm.rank == 0:
        opt.add_grad(0, numpy.ones(5, numpy.float32))
        return caught(opt.step)
    time.sleep(3 * timeout)
    return None


def go_on_after_an_error():
    comm = zero_c.init(timeout=5.0)
    opt = zero_c.ShardedOptimizer([numpy.zeros(5, numpy.float32)], optimizer="sgd", lr=1.0, comm=comm)
    opt.add_grad(0, numpy.ones(5, numpy.float32))
    # each rank is in another operation
    first = caught(opt.step if comm.rank == 0 else lambda: comm.all_reduce(numpy.ones(3, numpy.float32), "sum"))
    later = [caught(lambda: comm.all_reduce(numpy.ones(3, numpy.float32), "sum")), caught(comm.barrier),
             caught(opt.step)]
    return [first] + later


def one_sleeps(timeout):
    comm = zero_c.init(timeout=timeout)
    comm.barrier()
    if comm.rank == 2:
        time.sleep(3 * timeout)
        return None
    return caught(lambda: comm.all_reduce(numpy.ones(3, numpy.float32), "sum"))


def other_model(kind):
    comm = zero_c.init(timeout=10.0)
    odd = comm.rank == 1
    zeros = {"shape": (2, 3), "name": "weight", "dtype": numpy.float32}
    if odd and kind in ("shape", "name", "dtype"):
        zeros[kind] = {"shape": (2, 2), "name": "kernel", "dtype": numpy.float64}[kind]
    params = [(zeros["name"], numpy.zeros(zeros["shape"], zeros["dtype"]))]
    if odd and kind == "count":
        params.append(("extra", numpy.zeros(3, numpy.float32)))
    return caught(lambda: zero_c.ShardedOptimizer(params, optimizer="sgd", lr=1.0, comm=comm))


def swapped_groups():
    comm = zero_c.init(timeout=10.0)
    groups = [{"params": [("a", numpy.zeros(3, numpy.float32))], "lr": 0.1},
              {"params": [("b", numpy.zeros(3, numpy.float32))], "lr": 0.2}]
    return caught(lambda: zero_c.ShardedOptimizer(groups[::-1] if comm.rank == 1 else groups, optimizer="sgd",
                                                  comm=comm))


def close_while_a_peer_waits():
    comm = zero_c.init(timeout=20.0)
    comm.barrier()
    if comm.rank == 1:
        time.sleep(0.5)
        start = time.monotonic()
        try:
            raise RuntimeError("rank 1 has had enough")
        except RuntimeError:
            comm.close()
        return {"seconds": time.monotonic() - start}
    return caught(lambda: comm.all_reduce(numpy.ones(3, numpy.float32), "sum"))


def three_lives(rounds, job):
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sums, held = [], []
    for life in range(rounds):
        size = ranks - life % 2  # another size each time: the last rank sits out every other life
        if rank < size:
            with zero_c.init(rank, size, job=f"{job}{life}") as comm:
                sums.append(float(comm.all_reduce(numpy.ones(1, numpy.float32), "sum")[0]))
        else:
            sums.append(None)
        held.append([len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")),
                     threading.active_count()])
    return {"sums": sums, "held": held}


def one_never_starts(ranks, job):
    return caught(lambda: zero_c.init(int(os.environ["RANK"]), ranks, job=job, start_timeout=3.0))
