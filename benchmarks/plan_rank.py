"""One rank of plan_time.py: pins itself, runs the job in PLAN_JOB, writes its figures to the job's result."""
import json
import os

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
JOB = json.loads(os.environ["PLAN_JOB"])
os.sched_setaffinity(0, {JOB["cores"][RANK % len(JOB["cores"])]})     # before torch starts a thread

import time  # noqa: E402

import numpy  # noqa: E402

import zero_c  # noqa: E402

CALIBRATIONS = [(elements, bucket_mb) for elements in (1 << 22, 1 << 24) for bucket_mb in (0.064, 0.25, 1.0, 4.0, 16.0)]
# The larger does not fit into a cache, like a model; small buckets show the latency.


def calibrate(comm):
    """Engines of one fp32 parameter at stage 2: what handing over and reducing took, the step, and the step without
    its gather (shared parameters), each with the calls and bytes of traffic()."""
    rows = []
    for elements, bucket_mb in CALIBRATIONS:
        gradient, times, traffic = numpy.full(elements, 1e-3, numpy.float32), {}, None
        for shared in (False, True):
            opt = zero_c.ShardedOptimizer([numpy.zeros(elements, numpy.float32)], "adamw", stage=2, bucket_mb=bucket_mb,
                                          shared_params=shared, in_place=False, comm=comm)
            reduce, step = [], []
            for turn in range(2 + JOB["steps"]):
                if turn == 2:
                    opt.traffic()
                comm.barrier()
                begin = time.perf_counter()
                opt.add_grad(0, gradient)
                opt.end_backward()
                middle = time.perf_counter()
                comm.barrier()
                between = time.perf_counter()
                opt.step()
                if turn > 1:
                    reduce.append(middle - begin)
                    step.append(time.perf_counter() - between)
            if not shared:
                sent = opt.traffic()
                traffic = {name: {key: number / JOB["steps"] for key, number in sent[name].items()}
                           for name in ("reduce_scatter", "all_gather")}
            times["shared" if shared else "private"] = min(reduce), min(step)
        rows.append({"elements": elements, "traffic": traffic, "reduce": times["private"][0],
                     "step": times["private"][1], "update": times["shared"][1]})
    return rows


def train(comm):
    """The fastest forward, backward and step of a model with this package at a stage; stage None: each process alone."""
    import torch
    from plan_time import MODELS
    from zero_c.torch import ShardedOptimizer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    build, batch = MODELS[JOB["model"]]
    model, stage, taken = build(), JOB["stage"], []
    opt = ShardedOptimizer(model, stage=stage, lr=1e-4, comm=comm) if stage is not None else None
    for number in range(2 + JOB["steps"]):
        arguments = batch(number, RANK)
        comm.barrier()
        marks = [time.perf_counter()]
        loss = model(*arguments)
        marks.append(time.perf_counter())
        loss.backward()
        marks.append(time.perf_counter())
        if opt is not None:
            opt.step()
            opt.zero_grad()
        else:
            model.zero_grad()
        marks.append(time.perf_counter())
        if number > 1:
            taken.append([after - before for before, after in zip(marks, marks[1:])])
    return [min(part) for part in zip(*taken)]


def main():
    with zero_c.init() as comm:
        figures = {"calibrate": calibrate, "train": train}[JOB["kind"]](comm)
    with open(f"{JOB['result']}.{RANK}", "w") as result:
        json.dump(figures, result)


if __name__ == "__main__":
    main()
