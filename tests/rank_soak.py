"""What the ranks of test_soak.py do: one training that never ends, in short lives, beside a plain reference.

A cycle is the life of a job: a communicator of some of the ranks, a model with other values, an optimizer at another stage, the
last checkpoint, some steps, a save, the end. Everything is drawn from the cycle's number, so that all ranks and the reference
know it without a word. After a cycle every bit of parameters, masters and moments is the reference's (reference.py, fed the
gradients of a plain model by rank 0); from time to time each rank counts what it holds.
"""

import contextlib
import copy
import ctypes
import gc
import json
import mmap
import os
import random
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy
import rank_numbers
import torch
from models import batch, fill
from reference import ReferenceOptimizer, same_bits
from scenarios import DTYPES, OPTIMIZERS, digest, plain_steps, reference_run, scenario
from torch import nn

import zero_c
from zero_c import _init
from zero_c._checkpoint import MANIFEST
from zero_c.torch import ShardedOptimizer

LIFE_CYCLES = 8  # then a new training begins, by another rule
RULES = ("adamw", "adam", "momentum", "amsgrad", "nesterov")
LIBC = ctypes.CDLL(None)
LIBC.malloc.restype, LIBC.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]


class Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()]


LIBC.mallinfo2.restype = Mallinfo


class Net(nn.Module):
    """Two layers in fp32, one in bfloat16 between them."""

    def __init__(self, seed):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 41), nn.Linear(41, 23).bfloat16(), nn.Linear(23, 2)
        fill(self, torch.Generator().manual_seed(seed))

    def forward(self, x):
        x = self.middle(torch.tanh(self.first(x)).bfloat16())
        return self.last(torch.tanh(x).float())


def loss_of(model, key, scale, bad):
    loss = model(batch(*key, (4, 3))).square().sum() * scale
    return loss * float("inf") if bad else loss


def array_of(tensor):
    tensor = tensor.detach()
    return tensor.view(torch.int16).numpy().view(numpy.uint16) if tensor.dtype == torch.bfloat16 else tensor.numpy()


class Plan:
    """One cycle, drawn from its number."""

    def __init__(self, ranks, seed, cycle, most_steps):
        draw = random.Random(1000003 * seed + cycle)
        self.life, self.first = cycle // LIFE_CYCLES, cycle % LIFE_CYCLES == 0
        self.rule, self.options = OPTIMIZERS[RULES[self.life % len(RULES)]]
        self.cycle, self.ranks = cycle, draw.randint(1, ranks)
        self.meet_again = self.ranks == ranks and draw.random() < 0.3
        self.stage = cycle % 4
        self.how = {"stage": self.stage, "bucket_mb": draw.choice([1e-6, 0.001, 1.0])}
        if self.stage == 3:
            self.how |= {"units": [nn.Linear], "prefetch": draw.randrange(3)}
        else:
            self.how["shared_params"] = draw.random() < 0.3
        if self.stage in (1, 2) and draw.random() < 0.5:
            self.how["overlap_gather"] = True
        self.scale = draw.choice([None, None, 8.0])
        self.max_norm = draw.choice([None, 0.5])
        self.steps = [self._step(draw) for _ in range(draw.randint(2, most_steps))]
        self.join = [draw.randint(0, 3) for _ in range(self.ranks)] if draw.random() < 0.4 else [0] * self.ranks
        self.kept = draw.random() < 0.85  # else the job ends without a save, and what it did is lost
        self.arrays = draw.random() < 0.2

    def _step(self, draw):
        rounds = [{"micro": draw.choice([1, 1, 2, 3]), "absent": None} for _ in range(draw.choice([1, 1, 2]))]
        if self.ranks > 1 and draw.random() < 0.3:  # a rank without a backward joins the last round when it steps
            rounds[-1]["absent"] = draw.randrange(self.ranks)
        return {"rounds": rounds, "clip": draw.choice([None, None, 1.0]) if self.max_norm is None else None,
                "bad": self.scale is not None and draw.random() < 0.2, "profile": draw.random() < 0.15,
                "look": draw.random() < 0.2, "saved": draw.choice(9 * [""] + ["save", "async_save", "load"])}

    def rounds_with_join(self):
        """Of the steps after the others: who takes part."""
        for step in range(max(self.join)):
            yield step, [step < count for count in self.join]


HELD = ("heap_bytes", "objects", "resident_bytes", "mappings", "descriptors", "threads", "files", "shared")


def soak(seed, seconds, steps, cycles, most_steps, folder, lose=()):
    """Cycles of at most `most_steps` steps, until there were so many seconds, steps and cycles. What was done how often, and
    held: a row of HELD for each cycle. `lose`: of HELD, what this loses on purpose in each cycle.
    """
    with contextlib.closing(Losses(lose)) as losses:
        return cycles_until(seed, seconds, steps, cycles, most_steps, folder, losses)


def cycles_until(seed, seconds, steps, cycles, most_steps, folder, losses):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)  # a skipped step
    gc.collect()
    gc.freeze()  # what is there now, no cycle has to look at
    rank, ranks = int(os.environ["ZERO_C_RANK"]), int(os.environ["ZERO_C_WORLD_SIZE"])
    reference = Reference(seed) if rank == 0 else None
    counts, held, began, cycle = {"steps": 0}, numpy.zeros((1 << 16, len(HELD)), numpy.int64), time.monotonic(), 0
    held[:] = -1  # all pages are there
    while True:
        world = zero_c.init()
        over = cycle >= cycles and counts["steps"] >= steps and time.monotonic() - began >= seconds
        if world.broadcast(numpy.array([over], numpy.uint8), 0)[0]:
            return {"counts": counts, "held": held[:cycle]}
        plan = Plan(ranks, seed, cycle, most_steps)
        Cycle(plan, seed, rank, world, Path(folder), reference, counts).run()
        if plan.meet_again:
            world.close()
        del world
        losses.grow(cycle)
        held[cycle] = held_now(folder)
        cycle += 1


def held_now(folder):
    """What must not grow, as in HELD, without what is only waiting to be used again."""
    gc.collect()
    LIBC.malloc_trim(0)
    heap = LIBC.mallinfo2()
    with open("/proc/self/statm") as statm:
        resident_pages = int(statm.read().split()[1])
    with open("/proc/self/maps") as maps:
        mappings = sum(1 for _ in maps)
    return (heap.uordblks + heap.hblkhd, sys.getallocatedblocks(), resident_pages * os.sysconf("SC_PAGE_SIZE"), mappings,
            len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), len(os.listdir(folder)), len(os.listdir("/dev/shm")))


class Losses:
    """What a fault would lose in each cycle, a little of each kind that is asked for; closing gives it back."""

    def __init__(self, kinds):
        self._growing, self._stack, self._over = [getattr(self, f"_lose_{kind}") for kind in kinds], contextlib.ExitStack(), threading.Event()

    def grow(self, cycle):
        for lose in self._growing:
            lose(cycle)

    def close(self):
        self._over.set()
        self._stack.close()

    def _lose_heap_bytes(self, cycle):
        self._stack.callback(LIBC.free, ctypes.c_void_p(LIBC.malloc(1 << 20)))  # never touched: not resident

    def _lose_objects(self, cycle):
        self._stack.callback([[] for _ in range(1000)].clear)

    def _lose_resident_bytes(self, cycle):
        memory = mmap.mmap(-1, 3 << 20)
        memory.write(b"\1" * len(memory))
        self._stack.callback(memory.close)

    def _lose_mappings(self, cycle):
        for count in range(20):  # neighbours of one kind would be counted as one
            self._stack.callback(mmap.mmap(-1, 1 << 12, prot=(mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE)[count % 2]).close)

    def _lose_descriptors(self, cycle):
        self._stack.callback(os.close, os.dup(0))

    def _lose_threads(self, cycle):
        thread = threading.Thread(target=self._over.wait)
        thread.start()
        self._stack.callback(thread.join)

    def _lose_shared(self, cycle):
        path = Path(f"/dev/shm/lost-{os.getpid()}-{cycle}")
        path.touch()
        self._stack.callback(path.unlink)


class Reference:
    """The training as plain arrays, now and as it was saved last."""

    def __init__(self, seed):
        self._seed, self.opt, self._saved = seed, None, None

    def begin(self, plan):
        if plan.first:
            self.model = Net(self._seed + plan.life)
            self._saved = ReferenceOptimizer([array_of(p) for p in self.model.parameters()], 1, plan.rule, skip_nonfinite=True, **plan.options)
        self.load()
        self.plan = plan

    def save(self):
        self._saved = copy.deepcopy(self.opt)

    def load(self):
        self.opt = copy.deepcopy(self._saved)

    def backward(self, keys_of_ranks, bad):
        """One round; keys_of_ranks: of each rank's losses, () if it takes no part. `bad`: the last rank's last one is infinite."""
        plan, gradients = self.plan, []
        self.opt.ranks, self.opt.loss_scale, self.opt.max_grad_norm = plan.ranks, plan.scale or 1.0, plan.max_norm
        self.opt.skip_nonfinite = plan.scale is not None
        with torch.no_grad():
            for parameter, values in zip(self.model.parameters(), self.opt.params, strict=True):
                parameter.copy_(torch.from_numpy(values.view(numpy.int16)).view(torch.bfloat16) if values.dtype == numpy.uint16
                                else torch.from_numpy(values))
        last = max(rank for rank, keys in enumerate(keys_of_ranks) if keys)
        for rank, keys in enumerate(keys_of_ranks):
            self.model.zero_grad()
            for number, key in enumerate(keys):
                loss_of(self.model, key, plan.scale or 1.0, bad and rank == last and number == len(keys) - 1).backward()
            gradients.append([array_of(p.grad).copy() for p in self.model.parameters()] if keys else [None] * len(self.opt.params))
        self.opt.accumulate(gradients)

    def check(self, whole, state):
        """whole: the model's state dict; state: the optimizer's, in torch's form."""
        names = [name for name, _ in self.model.named_parameters()]
        for index, name in enumerate(names):
            where = f"cycle {self.plan.cycle}: {name}"
            assert same_bits(array_of(whole[name]), self.opt.params[index]), where
            own = state["state"].get(index, {})
            assert int(own.get("step", 0)) == self.opt.state[index]["step"], where
            for role, values in self.opt.state[index].items():
                if role != "step":
                    assert same_bits(own[role].numpy(), values), f"{where}: {role}"
            if "master" in own:
                assert same_bits(own["master"].numpy(), self.opt.masters[index]), f"{where}: master"


class Cycle:
    """One rank's part of one job."""

    def __init__(self, plan, seed, rank, world, folder, reference, counts):
        self.plan, self.seed, self.rank, self.world, self.folder, self.counts = plan, seed, rank, world, folder, counts
        self.reference = reference
        self.delays = random.Random(f"{seed} {plan.cycle} {rank}")

    def count(self, what, times=1):
        self.counts[what] = self.counts.get(what, 0) + times

    def pause(self):
        if self.delays.random() < 0.1:
            time.sleep(self.delays.choice([0, 0.0005, 0.003]))

    def run(self):
        plan = self.plan
        self.count("cycles")
        if plan.arrays:
            self.train_arrays()
        comm = self.world if plan.ranks == self.world.world_size else self.world.split(0 if self.rank < plan.ranks else None)
        if comm is not None:
            self.train(comm)
            if comm is not self.world:
                comm.close()
        self.world.barrier()
        self.count(f"stage {plan.stage}")
        self.count(f"{plan.ranks} ranks")

    def train_arrays(self):
        """A life of its own: plain arrays in the way that test_equivalence.py has them."""
        cycle = self.plan.cycle
        this = scenario(seed=cycle, optimizer=list(OPTIMIZERS)[cycle % len(OPTIMIZERS)], dtypes=DTYPES, stage=cycle % 3,
                        shapes=[[3], [], [65], [2, 9]], bucket_mb=0.001, steps=plain_steps(2, max_norm=0.75))
        found, = rank_numbers.digests([this])
        assert self.rank > 0 or found == digest(reference_run(this, self.world.world_size)), f"cycle {cycle}: {this}"
        self.count("trainings of arrays")

    def train(self, comm):
        plan, reference = self.plan, self.reference
        if reference:
            reference.begin(plan)
        model = Net(self.seed + plan.life if plan.first else -1)
        opt = ShardedOptimizer(model, optimizer=plan.rule, comm=comm, loss_scale=plan.scale, max_grad_norm=plan.max_norm, **plan.how, **plan.options)
        self.model, self.opt = model, opt
        if plan.first:
            opt.save(self.folder)
        else:
            opt.load(self.folder)
            self.count("loads")
        for number, step in enumerate(plan.steps):
            with opt.profile() if step["profile"] else contextlib.nullcontext() as record:
                self.step(number, step)
            if record is not None:
                assert record.spans or plan.ranks == 1
                self.count("profiles")
            self.keep(step["saved"])
        if max(plan.join):
            self.join()
        opt.wait_saved()
        if plan.kept or plan.first:
            opt.save(self.folder)
            self.count("saves")
            if reference:
                reference.save()
            manifest = json.loads((self.folder / MANIFEST).read_bytes())
            assert set(os.listdir(self.folder)) == {MANIFEST, *(about["name"] for about in manifest["manifest"]["files"].values())}
            comm.barrier()
        whole, state = opt.full_model_state_dict(), opt.full_state_dict()
        if reference:
            reference.check(whole, state)
            self.count("checks of every bit")
        told = json.dumps([zero_c._core.checksum(array_of(tensor).tobytes()) for tensor in whole.values()]).encode()
        assert len(set(map(bytes, comm.all_gather(numpy.frombuffer(told.ljust(600), numpy.uint8))))) == 1

    def keep(self, how):
        if not how:
            return
        if how == "load":
            self.opt.load(self.folder)
        else:
            getattr(self.opt, how)(self.folder)
        self.count(how)
        if self.reference:
            self.reference.load() if how == "load" else self.reference.save()

    def step(self, number, step):
        plan, opt = self.plan, self.opt
        for turn, this in enumerate(step["rounds"]):
            bad = step["bad"] and turn == 0
            keys = [[] if rank == this["absent"] else [(rank, 100 * plan.cycle + 10 * number + 3 * turn + micro) for micro in range(this["micro"])]
                    for rank in range(plan.ranks)]
            self.pause()
            self.backward(keys, bad)
            if self.reference:
                self.reference.backward(keys, bad)
        if step["look"]:
            self.look()
        if step["clip"]:
            norm = float(opt.clip_grad_norm_(step["clip"]))
            if self.reference:
                wanted = self.reference.opt.clip_grad_norm(step["clip"])
                assert numpy.float32(norm) == numpy.float32(wanted) or norm != norm and wanted != wanted, (norm, wanted)
        self.end_step()
        self.count("rounds", len(step["rounds"]))

    def backward(self, keys, bad):
        mine = keys[self.rank]
        last = max(rank for rank, each in enumerate(keys) if each)
        for number, key in enumerate(mine):
            final = number == len(mine) - 1
            with contextlib.nullcontext() if final else self.opt.no_sync():
                loss_of(self.model, key, self.plan.scale or 1.0, bad and self.rank == last and final).backward()

    def look(self):
        """At gradients, parameters and accounts, as a script that logs does."""
        for index, parameter in enumerate(self.model.parameters()):
            seen = self.opt.grad(parameter)
            if self.reference:
                assert same_bits(seen.numpy(), self.reference.opt.averaged(index))
            self.opt.full_param(parameter)
        self.opt.memory()
        self.opt.traffic()
        self.count("looks")

    def end_step(self):
        self.pause()
        self.opt.step()
        self.opt.zero_grad()
        self.count("steps")
        self.count("skipped steps", int(self.opt.last_step.skipped))
        if self.reference:
            self.reference.opt.step()
            assert self.reference.opt.skipped == bool(self.opt.last_step.skipped)

    def join(self):
        plan = self.plan
        if self.reference:
            for number, here in plan.rounds_with_join():
                self.reference.backward([[(rank, 50 + 100 * plan.cycle + number)] if there else [] for rank, there in enumerate(here)], False)
                self.reference.opt.step()
        with self.opt.join():
            for number in range(plan.join[self.rank]):
                loss_of(self.model, (self.rank, 50 + 100 * plan.cycle + number), plan.scale or 1.0, False).backward()
                self.opt.step()
                self.opt.zero_grad()
        self.count("steps", max(plan.join))
        self.count("joins")
