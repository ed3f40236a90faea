"""Checks of training with torch modules: stages, ranks, gathering in autograd, CUDA graphs."""
import contextlib
import itertools
import os
import subprocess
import sys
from pathlib import Path

import torch
import zero_c
from gpu_check_build import nccl_version
from gpu_check_child import Failed, Skip
from gpu_check_models import (
    LR,
    MAX_NORM,
    Mlp,
    Transformer,
    built,
    compare_with_torch,
    same_operations_same_bits,
    tokens_of,
    train,
)
from gpu_check_speed import host_s
from zero_c.torch import ShardedOptimizer

HERE = Path(__file__).resolve().parent
DEVICE = "cuda"
MULTI_RANK_NCCL = 2, 30     # the first that can have two ranks on one GPU
MOST_RANKS = 4
PREFETCHES = 0, 1, 2
RECOMPUTE = None, "plain", "reentrant"
WARM_STEPS, REPLAYS = 3, 4


def two_layers():
    return Transformer(2)


TRAININGS = (Mlp, "adamw"), (Mlp, "sgd"), (two_layers, "adamw")


def compare_all(device):
    """Every training at all stages; what was found."""
    same_operations_same_bits()
    worst = {dtype: max(compare_with_torch(make, dtype, rule, device) for make, rule in TRAININGS)
             for dtype in (torch.float32, torch.bfloat16)}
    distances = ", ".join(f"{str(dtype).removeprefix('torch.')} {share:.2f}" for dtype, share in worst.items())
    return (f"{len(TRAININGS)} trainings at stages 0 to 3: the same bits at all stages; largest distance from "
            f"torch.optim, as a share of the tolerance: {distances}")


def stages(folder, package):
    return compare_all(DEVICE)


# ---- ranks --------------------------------------------------------------------------


def ranks(folder, package):
    gpus, version = torch.cuda.device_count(), nccl_version()
    if version is None:
        raise Skip("no NCCL (pip install nvidia-nccl-cu13)")
    dotted = ".".join(map(str, version))
    if gpus == 1 and version[:2] < MULTI_RANK_NCCL:
        raise Skip(f"one GPU, and NCCL {dotted} cannot have two ranks on it (2.30 can)")
    count = max(2, min(gpus, MOST_RANKS))
    environment = {"NCCL_SOCKET_IFNAME": "lo", **os.environ}
    if gpus == 1:
        environment["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    done = subprocess.run([sys.executable, "-m", "zero_c.launch", "-n", str(count), HERE / "gpu_check_rank.py", DEVICE],
                          env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True)
    said = [line.removeprefix("rank 0: ") for line in done.stdout.splitlines() if line.startswith("rank 0: ")]
    if done.returncode or not said:
        print(done.stdout)
        raise Failed(f"{count} ranks on {gpus} GPUs with NCCL {dotted} ended with status {done.returncode}")
    return f"{count} ranks on {gpus} GPUs with NCCL {dotted}: {said[-1]}"


# ---- stage 3 in autograd --------------------------------------------------------------


def autograd(folder, package):
    same_operations_same_bits()
    compared = 0
    for recompute in RECOMPUTE:
        def six_layers(recompute=recompute):
            return Transformer(6, recompute=recompute)

        options = {"optimizer": "adamw", "lr": LR["adamw"], "max_grad_norm": 1.0}
        whole = train(built(six_layers, torch.float32, DEVICE), stage=2, **options)
        for prefetch in PREFETCHES:
            sharded = train(built(six_layers, torch.float32, DEVICE), stage=3, prefetch=prefetch, **options)
            if (difference := sharded.first_difference(whole)) is not None:
                raise Failed(f"stage 3 with prefetch={prefetch}, checkpointing {recompute}, against stage 2: "
                             f"{difference}")
            compared += 1
    return (f"{compared} trainings at stage 3 (prefetch 0, 1, 2; checkpointing none, plain, reentrant) have the bits "
            "of stage 2")


# ---- CUDA graphs ------------------------------------------------------------------------


class Iteration:
    """A model that is trained on one batch, piece by piece."""

    def __init__(self, stage, dtype, device):
        self.model = built(two_layers, dtype, device)
        self.opt = ShardedOptimizer(self.model, stage=stage, lr=LR["adamw"], max_grad_norm=MAX_NORM)
        self.tokens = tokens_of(0, 0, 0, device)

    def backward(self):
        self.model(self.tokens).backward()

    def step(self):
        self.opt.step()
        self.opt.zero_grad()

    def whole(self):
        self.backward()
        self.step()

    def lower_rate(self):
        for group in self.opt.param_groups:
            group["lr"] /= 2

    def values(self):
        return [self.opt.full_param(param) for param in self.model.parameters()]


@contextlib.contextmanager
def side_stream():
    """torch's rule for what will be captured: before it, work has run on a stream that is not the default one."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def warmed_up(stage, dtype, device):
    iteration = Iteration(stage, dtype, device)
    with side_stream() if device == DEVICE else contextlib.nullcontext():
        for _ in range(WARM_STEPS):
            iteration.whole()
    return iteration


def captured(work):
    """A graph of work(); Failed with what stood in the way."""
    made = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(made):
            work()
    except Exception as error:      # whatever it is, it is the answer
        while error.__context__ is not None:    # the end of a capture that failed raises again
            error = error.__context__
        raise Failed(f"cannot be captured: {type(error).__name__}: {' '.join(str(error).split())}") from None
    return made


def check_same(replayed, eager, what):
    for index, (one, other) in enumerate(zip(replayed.values(), eager.values(), strict=True)):
        if not torch.equal(one, other):
            raise Failed(f"{what}: {int((one != other).sum())} of {one.numel()} elements of parameter {index} are not "
                         "those of eager steps")
    if (told := [each.opt.last_step.steps for each in (replayed, eager)])[0] != told[1]:
        raise Failed(f"{what}: {told[0]} steps are counted, not {told[1]}")


def compare_graph(stage, dtype, device, capture, tell):
    """Replays of an iteration against eager ones, the last at a lower rate; returns the graph.

    capture     makes a graph of a function, without calling it
    tell        tells an optimizer that its options were changed
    """
    eager, replayed = (warmed_up(stage, dtype, device) for _ in range(2))
    made = capture(replayed.whole)
    for number in range(REPLAYS):
        if number == REPLAYS - 1:
            eager.lower_rate()
            replayed.lower_rate()
            tell(replayed.opt)
        made.replay()
        eager.whole()
    check_same(replayed, eager, f"stage {stage}, {dtype}, {REPLAYS} replays")
    return made


def graph(folder, package):
    """Forward, backward and step in one graph."""
    same_operations_same_bits()
    times = []
    for stage, dtype in itertools.product((0, 1, 2), (torch.float32, torch.bfloat16)):
        made = compare_graph(stage, dtype, DEVICE, captured, ShardedOptimizer.before_replay)
        times.append(host_s(made.replay, lambda: None))
    largest = max(times)
    return (f"an iteration of {len(times)} trainings, replayed {REPLAYS} times, has the bits of eager steps at stages 0 to 2; a "
            f"replay takes the host {1e6 * largest:.0f} us at most"), {"host_seconds": largest}


def graph_step(folder, package):
    """The step alone, with gradients that an eager backward has left: it must be refused, and nothing has happened."""
    same_operations_same_bits()
    eager, refused = (warmed_up(2, torch.float32, DEVICE) for _ in range(2))
    refused.backward()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            refused.opt.step()
    except zero_c.Error as error:
        said = str(error)
    else:
        raise Failed("step() alone was captured, though a replay cannot know which gradients it has used")
    refused.step()
    eager.whole()
    check_same(refused, eager, "after the refusal")
    return f"step() alone is refused ({said.split(';')[0]}), and eager steps go on"
