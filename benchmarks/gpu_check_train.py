"""Checks of training with torch modules: stages, ranks, gathering in autograd, CUDA graphs."""
import contextlib
import os
import subprocess
import sys
from pathlib import Path

import torch
from gpu_check_build import nccl_version
from gpu_check_child import Failed, Skip
from gpu_check_models import (
    LR,
    Mlp,
    Transformer,
    built,
    compare_with_torch,
    same_operations_same_bits,
    tokens_of,
    train,
)
from zero_c.torch import ShardedOptimizer

HERE = Path(__file__).resolve().parent
DEVICE = "cuda"
MULTI_RANK_NCCL = 2, 30     # the first that can have two ranks on one GPU
MOST_RANKS = 4
PREFETCHES = 0, 1, 2
RECOMPUTE = None, "plain", "reentrant"
REPLAYS = 3


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

    def __init__(self):
        self.model = built(two_layers, torch.float32, DEVICE)
        self.opt = ShardedOptimizer(self.model, stage=2, lr=LR["adamw"])
        self.tokens = tokens_of(0, 0, 0, DEVICE)

    def backward(self):
        self.model(self.tokens).backward()

    def step(self):
        self.opt.step()
        self.opt.zero_grad()

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


def warmed_up(steps):
    iteration = Iteration()
    with side_stream():
        for _ in range(steps):
            iteration.backward()
            iteration.step()
    return iteration


def captured(work):
    """A graph of work(); Skip with what stood in the way."""
    made = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(made):
            work()
    except Exception as error:      # whatever it is, it is the answer
        while error.__context__ is not None:    # the end of a capture that failed raises again
            error = error.__context__
        raise Skip(f"cannot be captured: {type(error).__name__}: {' '.join(str(error).split())}") from None
    return made


def check_same(replayed, eager, what):
    for index, (one, other) in enumerate(zip(replayed.values(), eager.values(), strict=True)):
        if not torch.equal(one, other):
            raise Failed(f"{what}: {int((one != other).sum())} of {one.numel()} elements of parameter {index} are not "
                         "those of eager steps")


def graph(folder, package):
    """Forward, backward and step in one graph; nothing runs while it is captured."""
    same_operations_same_bits()
    eager, replayed = warmed_up(3 + REPLAYS), warmed_up(3)

    def work():
        replayed.backward()
        replayed.step()

    made = captured(work)
    for _ in range(REPLAYS):
        made.replay()
    torch.cuda.synchronize()
    check_same(replayed, eager, f"an iteration, replayed {REPLAYS} times")
    return f"an iteration, replayed {REPLAYS} times, gives the bits of eager steps"


def graph_step(folder, package):
    """The step alone, with gradients that an eager backward has left."""
    same_operations_same_bits()
    eager, replayed = warmed_up(4), warmed_up(3)
    replayed.backward()
    torch.cuda.synchronize()
    made = captured(replayed.step)
    made.replay()
    torch.cuda.synchronize()
    check_same(replayed, eager, "step() alone")
    return "step() alone, replayed, gives the bits of an eager step"
