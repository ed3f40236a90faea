"""Checks with figures: bandwidth of the update, time of a step on the host, memory. None has a bound of time."""
import gc
import statistics
import time

import torch
import zero_c
from gpu_check_child import Failed, Skip
from torch import nn
from zero_c import _gpu
from zero_c.torch import ShardedOptimizer

MIB = 2**20
UPDATE_MIB = 256, 1024      # of fp32 parameters
UPDATE_BYTES = 28           # per fp32 element: reads parameter, gradient and two moments, writes all but the gradient
ROOM = 12                   # times the parameters' bytes: more than any of the three holds
REPEATS = 9
HEAD_START_CYCLES = 2_000_000   # for the host to enqueue everything before the first of it runs: about a millisecond
BUCKETS, BUCKETS_MIB = (1, 8, 64), 64
WIDTH, LAYERS = 2048, 8
ALLOWED_MIB = 48            # CUDA gives memory in pieces of 2 MiB, and torch keeps some


# ---- time -----------------------------------------------------------------------------


def gpu_s(work, prepare=lambda: None):
    """Median time that the GPU spends between the first and the last of what work() enqueues, after a warm-up."""
    times = []
    for _ in range(REPEATS + 1):
        prepare()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        torch.cuda._sleep(HEAD_START_CYCLES)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times[1:])


def host_s(work, prepare):
    """Median time that work() takes on the host while the GPU is idle at its begin, after a warm-up."""
    times = []
    for _ in range(REPEATS + 1):
        prepare()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return statistics.median(times[1:])


def sharded(elements, **options):
    """An optimizer of one parameter that lives in the engine only, and what hands it a gradient."""
    opt = zero_c.ShardedOptimizer([torch.zeros(elements, device="cuda")], "adamw", lr=1e-3, in_place=False, **options)
    gradient = torch.full((elements,), 0.01, device="cuda")

    def give():
        opt.add_grad(0, gradient)
        opt.end_backward()

    return opt, give


def torchs(elements):
    param = nn.Parameter(torch.zeros(elements, device="cuda"))
    param.grad = torch.full((elements,), 0.01, device="cuda")
    return torch.optim.AdamW([param], lr=1e-3, fused=True)


def release():
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def update_of(mib):
    """Seconds of one update of so many MiB of parameters: ours, torch's fused one, a copy that moves as many bytes."""
    elements = mib * MIB // 4
    opt, give = sharded(elements)
    ours = gpu_s(opt.step, give)
    del opt, give
    release()
    fused = gpu_s(torchs(elements).step)
    release()
    source = torch.zeros(elements * UPDATE_BYTES // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = gpu_s(lambda: target.copy_(source))
    del source, target
    release()
    return ours, fused, copy


def update(folder, package):
    said, figures = [], {}
    for mib in UPDATE_MIB:
        if torch.cuda.mem_get_info()[0] < ROOM * mib * MIB:
            said.append(f"{mib} MiB: no room")
            continue
        ours, fused, copy = update_of(mib)
        rate = UPDATE_BYTES * mib * MIB / 4 / 1e9 / ours
        said.append(f"{mib} MiB: {1e3 * ours:.3f} ms = {rate:.0f} GB/s, {copy / ours:.2f} x a copy's rate, "
                    f"{fused / ours:.2f} x torch's fused AdamW's")
        figures[f"{mib} MiB"] = {"seconds": ours, "torch_seconds": fused, "copy_seconds": copy}
    if not figures:
        raise Skip(f"the GPU has no {ROOM * UPDATE_MIB[0]} MiB left")
    return "; ".join(said), figures


def host(folder, package):
    said, figures = [], {}
    elements = BUCKETS_MIB * MIB // 4
    for buckets in BUCKETS:
        opt, give = sharded(elements, bucket_mb=BUCKETS_MIB / buckets)
        figures[str(buckets)] = {"step_seconds": host_s(opt.step, give), "backward_seconds": host_s(give, opt.step)}
        step, backward = (f"{1e6 * seconds:.0f}" for seconds in figures[str(buckets)].values())
        said.append(f"{buckets} buckets: step() {step} us, taking a gradient {backward} us")
        del opt, give
        release()
    fused = host_s(torchs(elements).step, lambda: None)
    return f"{BUCKETS_MIB} MiB in " + "; ".join(said) + f"; torch's fused AdamW {1e6 * fused:.0f} us", figures


# ---- memory ---------------------------------------------------------------------------


def free_bytes():
    release()
    return torch.cuda.mem_get_info()[0]


def train_once(stage, comm, width=WIDTH):
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS))).cuda()
    opt = ShardedOptimizer(model, stage=stage, lr=1e-3, comm=comm)
    model(torch.ones(8, width, device="cuda")).square().mean().backward()
    opt.step()
    opt.zero_grad()
    return model, opt


def memory_of(stage):
    """(what opt.memory() says, what the GPU has less), in bytes."""
    # A communicator of its own: what its device keeps for later goes with it.
    comm = _gpu.communicator(zero_c.local_group(1)[0], torch.cuda.current_device())
    before = free_bytes()
    model, opt = train_once(stage, comm)
    after, counted = free_bytes(), opt.memory()
    del model, opt
    gc.collect()
    comm.close()
    return counted, before - after


def memory(folder, package):
    for stage in (2, 3):        # what the libraries keep from their first use
        comm = _gpu.communicator(zero_c.local_group(1)[0], torch.cuda.current_device())
        train_once(stage, comm)
        gc.collect()
        comm.close()
    elements = LAYERS * WIDTH**2
    said, figures = [], {}
    for stage in (0, 1, 2, 3):
        counted, used = memory_of(stage)
        state = counted["total"] - counted["buffers"]
        figures[f"stage {stage}"] = {**counted, "used": used}
        said.append(f"stage {stage}: {used / MIB:.0f} MiB used, {counted['total'] / MIB:.0f} counted")
        if state != 16 * elements:      # the weights are multiples of the padding
            raise Failed(f"stage {stage}: {state} bytes are counted beside buffers, not 16 x {elements}")
        if abs(used - counted["total"]) > ALLOWED_MIB * MIB:
            raise Failed(f"{'; '.join(said)}: more than {ALLOWED_MIB} MiB apart")
    return f"{elements / MIB:.0f} Mi parameters; " + "; ".join(said), figures
