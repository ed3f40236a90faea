"""How well `python -m zero_c.plan` foretells the time of a step on this machine:

    python benchmarks/plan_time.py [--quick]

1. Small calls of the engine, without a model, give the latency of a collective and the rates of reduction, gather and
   update, at 2 and 4 ranks (least squares over several sizes and numbers of buckets).
2. Each model is run by as many processes that train apart: the seconds of forward and backward.
3. From these the planner foretells a step at stages 1 to 3, and then it is measured.

The result is results/plan_time.md. Nothing that is measured in 3 goes into the prediction.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "examples")]

import numpy  # noqa: E402
import torch  # noqa: E402
import torch.nn as nn  # noqa: E402
from workloads import WORKLOADS  # noqa: E402
from zero_c.plan import Machine, plan  # noqa: E402
from zero_c.torch import _plan as torch_plan  # noqa: E402

UPDATE_BYTES = 28     # AdamW of an fp32 parameter: parameter, two moments both ways, the sum once


class Mlp(nn.Module):
    def __init__(self, width=1536, layers=8):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x.square().mean()


def mlp_batch(step, rank, batch=64, width=1536):
    return (torch.randn(batch, width, generator=torch.Generator().manual_seed(100 * step + rank)),)


MODELS = {      # name -> (builds it, batch of a step and rank)
    "gpt": (WORKLOADS["gpt"].full, WORKLOADS["gpt"].batch),
    "mlp": (Mlp, mlp_batch),
    "flat64m": (WORKLOADS["flat64m"].full, WORKLOADS["flat64m"].batch),
}


def run(ranks, cores, **job):
    """What each rank of a job found."""
    with tempfile.TemporaryDirectory() as folder:
        job |= {"result": os.path.join(folder, "result"), "cores": cores}
        subprocess.run([sys.executable, "-m", "zero_c.launch", "-n", str(ranks), str(HERE / "plan_rank.py")], check=True,
                       timeout=600, env=dict(os.environ, PLAN_JOB=json.dumps(job), OMP_NUM_THREADS="1"))
        return [json.loads(pathlib.Path(f"{job['result']}.{rank}").read_text()) for rank in range(ranks)]


def fit(found):
    """The Machine that fits calibrations best, and how far off the worst of them is. found: of each rank."""
    slowest = [{key: max(row[key] for row in rows) for key in ("reduce", "step", "update")} | {
        "traffic": rows[0]["traffic"], "elements": rows[0]["elements"]} for rows in zip(*found)]
    ranks, equations, seconds = len(found), [], []
    for row in slowest:
        reduced, gathered = row["traffic"]["reduce_scatter"], row["traffic"]["all_gather"]
        updated = row["elements"] / ranks * UPDATE_BYTES
        for took, equation in ((row["reduce"], [reduced["calls"], reduced["bytes"], 0.0, 0.0]),
                               (row["step"], [gathered["calls"], 0.0, gathered["bytes"], updated]),
                               (row["update"], [0.0, 0.0, 0.0, updated])):
            equations.append(equation)
            seconds.append(took)
    weighted = numpy.array(equations) / numpy.array(seconds)[:, None]   # relative errors count alike
    columns = [0, 1, 2, 3]
    solved, *_ = numpy.linalg.lstsq(weighted, numpy.ones(len(seconds)), rcond=None)
    if solved[0] < 0:       # a latency too small to be seen
        columns = columns[1:]
        solved, *_ = numpy.linalg.lstsq(weighted[:, 1:], numpy.ones(len(seconds)), rcond=None)
    latency, *inverse = [0.0] * (4 - len(columns)) + [float(each) for each in solved]
    if min(inverse) <= 0:
        raise SystemExit(f"calibration at {ranks} ranks makes no sense (seconds per byte {inverse}): the machine is too busy")
    return (Machine(latency, *(1 / each for each in inverse), hops="one", overlap=False),
            weighted[:, columns] @ numpy.array(solved))


def others_busy(before, after, own_seconds):
    """Cores that processes other than ours used between two readings of machine_seconds()."""
    return (after[0] - before[0] - own_seconds) / (after[1] - before[1])


def machine_seconds():
    """(CPU seconds that all processes of the machine have used, now)."""
    with open("/proc/stat") as stat:
        user, nice, system = map(int, stat.readline().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK"), time.monotonic()


def children_seconds():
    times = os.times()
    return times.children_user + times.children_system + times.user + times.system


def report(rows, machines, busy, steps):
    lines = ["# A step's time: foretold and measured", "",
             f"`python benchmarks/plan_time.py`, {steps} steps each; milliseconds of the slowest rank, of each part its fastest "
             f"time. Other processes used "
             f"{busy:.2f} cores of {len(os.sched_getaffinity(0))} on average"
             + (": **the machine was busy**, so these figures show that the comparison works, not how good the model is."
                if busy > 0.05 else "."), "",
             "| ranks | latency of a call, µs | reduce, GB/s sent | gather, GB/s sent | update, GB/s | calibrations off by |",
             "| --- | --- | --- | --- | --- | --- |"]
    for ranks, (machine, off) in machines.items():
        lines.append(f"| {ranks} | {1e6 * machine.latency_s:.1f} | {machine.reduce_bandwidth / 1e9:.2f} | "
                     f"{machine.gather_bandwidth / 1e9:.2f} | {machine.memory_bandwidth / 1e9:.2f} | "
                     f"{off.min() - 1:+.0%} to {off.max() - 1:+.0%} |")
    lines += ["", "| model | ranks | stage | foretold: forward + backward + step | total | measured: forward + backward + step | "
              "total | foretold / measured |", "| --- | --- | --- | --- | --- | --- | --- | --- |"]
    for model, ranks, stage, time_, measured in rows:
        parts = [time_.forward, time_.backward, time_.step]
        lines.append(f"| {model} | {ranks} | {stage} | " + " + ".join(f"{1e3 * part:.0f}" for part in parts)
                     + f" | {1e3 * time_.total:.0f} | " + " + ".join(f"{1e3 * part:.0f}" for part in measured)
                     + f" | {1e3 * sum(measured):.0f} | {time_.total / sum(measured):.2f} |")
    return "\n".join([*lines, ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS), help=",".join(MODELS))
    parser.add_argument("--quick", action="store_true", help="two ranks, one model: shows that it works; prints only")
    options = parser.parse_args()
    if unknown := [name for name in options.models if name not in MODELS]:
        parser.error(f"{', '.join(unknown)}: known are {', '.join(MODELS)}")
    cores = sorted(os.sched_getaffinity(0))[:2]
    before, used = machine_seconds(), children_seconds()
    machines, rows = {}, []

    def save():
        """The report so far, which --quick does not keep."""
        text = report(rows, machines, others_busy(before, machine_seconds(), children_seconds() - used), options.steps)
        if not options.quick:
            (HERE / "results" / "plan_time.md").write_text(text)
        return text

    for ranks in (2,) if options.quick else (2, 4):
        machines[ranks] = fit(run(ranks, cores, kind="calibrate", steps=options.steps))
        print(ranks, "ranks:", machines[ranks][0], flush=True)
        for name in ("mlp",) if options.quick else options.models:
            with torch.device("meta"):
                model = torch_plan.listed(MODELS[name][0]())
            apart = run(ranks, cores, kind="train", model=name, stage=None, steps=options.steps)
            forward, backward = (max(each[k] for each in apart) for k in (0, 1))
            foretold = plan(model, ranks, machine=machines[ranks][0], forward_seconds=forward,
                            backward_seconds=backward).stages
            for stage in (1, 2, 3):
                found = run(ranks, cores, kind="train", model=name, stage=stage, steps=options.steps)
                measured = [max(part) for part in zip(*found)]
                rows.append((name, ranks, stage, foretold[stage].time, measured))
                print(f"{name} {ranks} ranks stage {stage}: foretold {1e3 * rows[-1][3].total:.0f} ms, measured "
                      f"{1e3 * sum(measured):.0f}", flush=True)
                save()
    print("\n" + save())


if __name__ == "__main__":
    main()
