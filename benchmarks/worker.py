"""One rank of one measurement: pins itself, runs the job in BENCHMARK_JOB, writes its figures to the job's result."""
import json
import os

RANK = int(os.environ["RANK"])
JOB = json.loads(os.environ["BENCHMARK_JOB"])
os.sched_setaffinity(0, JOB["cores"][RANK])     # before torch starts a thread

import ctypes  # noqa: E402
import gc  # noqa: E402
import resource  # noqa: E402
import time  # noqa: E402

MEMORY_STEPS = 6
HOOK_SAMPLES = 4        # in each one's backward, at other parameters each time: more would hold the ranks up unevenly


def pss():
    """Bytes of this process, shared pages divided by their users: all, and without pages that only cache files."""
    kib = {}
    with open("/proc/self/smaps_rollup") as rollup:
        for words in map(str.split, rollup):
            if words[-1] == "kB":
                kib[words[0]] = int(words[1])
    return 1024 * kib["Pss:"], 1024 * (kib.get("Pss_Anon:", 0) + kib.get("Pss_Shmem:", 0))


def machine_seconds():
    """CPU seconds that all processes of the machine have used, and seconds the host took away."""
    with open("/proc/stat") as stat:
        user, nice, system, _, _, _, _, stolen = map(int, stat.readline().split()[1:9])
    tick = os.sysconf("SC_CLK_TCK")
    return (user + nice + system) / tick, stolen / tick


def trim():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


class Samples:
    """Pss at the marks of a step, less the base taken before the model was made; the same marks on every rank."""

    def __init__(self, base):
        self.base, self.taken = base, []

    def sample(self, where):
        self.taken.append([where, *(now - base for now, base in zip(pss(), self.base))])

    def hook(self, params, turn):
        """Samples after some of the parameters' gradients are finished, others in each turn; returns the hooks."""
        stride = max(1, len(params) // HOOK_SAMPLES)
        chosen = params[turn * stride // MEMORY_STEPS::stride]
        return [p.register_post_accumulate_grad_hook(lambda _: self.sample("backward")) for p in chosen]


def train():
    import torch
    import torch.distributed as dist
    from peers import PEERS
    from workloads import WORKLOADS

    torch.set_num_threads(1)
    dist.init_process_group("gloo")     # every peer has it: the barrier before a step is the same for all
    workload, build = WORKLOADS[JOB["workload"]], PEERS[JOB["peer"]]

    def step(module, opt, batch, mark):
        mark("start")
        loss = module(*batch)
        mark("forward")
        getattr(opt, "backward", torch.Tensor.backward)(loss)
        mark("backward")
        opt.step()
        mark("step")
        opt.zero_grad()
        mark("end")
        return loss.item()

    torch.manual_seed(1)
    module, opt = build(workload.small())       # loads what the libraries load at first use
    for i in range(2):
        step(module, opt, workload.batch(i, RANK), lambda name: None)
    del module, opt
    trim()

    base = pss()
    torch.manual_seed(0)
    model = workload.full()
    elements, tensors = sum(p.numel() for p in model.parameters()), sum(1 for _ in model.parameters())
    module, opt = build(model)
    dist.barrier()
    samples = Samples(base)
    samples.sample("construction")
    marks, losses, walls, phases, cpu, faults = {}, [], [], [], [], []

    def mark(name):
        marks[name] = time.perf_counter()

    for i in range(JOB["warm_up"] + JOB["steps"]):
        if i == JOB["warm_up"]:
            dist.barrier()
            whole = (*machine_seconds(), time.process_time(), time.perf_counter())
        batch = workload.batch(i, RANK)
        dist.barrier()
        usage = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        losses.append(step(module, opt, batch, mark))
        if i >= JOB["warm_up"]:
            cpu.append(time.process_time() - usage[0])
            faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - usage[1])
            walls.append(marks["end"] - marks["start"])
            phases.append([marks["forward"] - marks["start"], marks["backward"] - marks["forward"],
                           marks["end"] - marks["backward"]])
    whole = [now - then for now, then in
             zip((*machine_seconds(), time.process_time(), time.perf_counter()), whole)]

    if JOB["memory"]:       # untimed: reading Pss walks the page tables
        params = [p for p in model.parameters() if p.requires_grad]
        for turn in range(MEMORY_STEPS):
            hooks = samples.hook(params, turn)
            batch = workload.batch(JOB["warm_up"] + JOB["steps"] + turn, RANK)
            dist.barrier()
            losses.append(step(module, opt, batch, samples.sample))
            for hook in hooks:
                hook.remove()
        trim()
    after = pss()
    dist.barrier()
    dist.destroy_process_group()
    return dict(elements=elements, tensors=tensors, walls=walls, phases=phases, cpu=cpu, faults=faults,
                losses=[x.hex() for x in losses], machine=whole,
                counted=opt.memory() if hasattr(opt, "memory") else None,
                memory=dict(samples=samples.taken, live=[a - b for a, b in zip(after, base)])
                if JOB["memory"] else None)


def barrier():
    import zero_c
    times = []
    with zero_c.init() as comm:
        comm.barrier()
        for _ in range(5):
            begin = time.perf_counter()
            for _ in range(JOB["loops"]):
                comm.barrier()
            times.append((time.perf_counter() - begin) / JOB["loops"])
    return dict(times=times)


if __name__ == "__main__":
    figures = dict(train=train, barrier=barrier)[JOB["kind"]]()
    with open(f"{JOB['result']}.{RANK}", "w") as result:
        json.dump(figures, result)
