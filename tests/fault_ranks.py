"""Python ranks that meet their end within one operation, and what their peers do then: test_fault_files.py runs this program.

    fault_ranks.py FOLDER KIND RANKS STAGES OPERATIONS MANNERS all|some|turns|one

with preload() of fault_build.py loaded before all other libraries, and its package(). KIND: numpy or torch. Ranks are forked from
this process, which has imported all that they need and never had a communicator, so that a run takes some hundredths of a
second.

A first run lists the points that each rank comes to within an operation; then there is a run for every place that has to do
with files and one for every other point ("some": for every point; "turns": for every point, of one rank where all come to it,
and these take turns; "one": for the operation's own point, on the last rank), and manner: k killed, s stopped, e exits, f the
call on the file fails, r the program raises. After each, fresh ranks load the checkpoint that is there and must reach the
numbers of a run that nothing disturbed.
"""

import ctypes
import gc
import json
import mmap
import os
import re
import select
import shutil
import signal
import struct
import sys
import time
import traceback
import zlib
from pathlib import Path

import numpy

import zero_c
from ranks import _held, processes_of_group
from zero_c._checkpoint import MANIFEST, OURS

TIMEOUT_S, ENOUGH_S, NOTICE_S = 0.5, 30.0, 1.0
RUN_LIMIT_S = 40.0
FIRST_STEP, FAULTY_STEP, LAST_STEP = 1, 2, 4
KILLED, STOPPED, EXITED, FAILS, RAISES = 1, 2, 3, 4, 5  # as in faults.h
MANNERS = {"k": KILLED, "s": STOPPED, "e": EXITED, "f": FAILS, "r": RAISES}
EXIT_FAILED, EXIT_SUDDEN = 3, 7
# In the middle of what the operation is about.
OWN_POINT = {"construction": "construction: values are here", "load": "before read", "forward": "unit: a slice is here",
             "backward": "reduce: a tile", "step": "step: decided", "save": "in the middle of a write",
             "async_save": "before fsync", "async_save alone": "before fsync", "close": "close: to be told"}
TRIES = 2  # a machine may be busy with other things
WALKERS = 4  # runs under way at a time: ranks of one mostly wait for each other, for a disk or for a timeout

LIBRARY = ctypes.CDLL(None)
LIBRARY.faults_point.restype = ctypes.c_char_p
LIBRARY.faults_point.argtypes = [ctypes.c_size_t]
LIBRARY.faults_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]


class Raised(RuntimeError):
    """What the program of a rank raises."""


# ---- a rank ----------------------------------------------------------------------


class Part:
    """What one rank does in one run."""

    def __init__(self, plan, rank):
        self.plan, self.rank, self.fault = plan, rank, plan["fault"]
        self.points = []

    def within(self, operation):
        """The fault is armed from here to the end of the operation."""
        return _Within(self, operation)

    def come_to(self, operation):
        """The program raises here, if that is its fault."""
        if self.is_victim and self.fault["how"] == RAISES and self.plan["operation"] == operation:
            raise Raised(f"the program of rank {self.rank} raises in {operation}")

    @property
    def is_victim(self):
        return self.fault is not None and self.fault["rank"] == self.rank

    @property
    def closes_first(self):
        return self.plan["closer"] == self.rank


class _Within:
    def __init__(self, part, operation):
        self._part, self._on = part, part.plan["operation"] == operation

    def __enter__(self):
        part = self._part
        if self._on and part.is_victim and part.fault["how"] != RAISES:
            LIBRARY.faults_arm(part.fault["point"].encode(), part.fault["time"], part.fault["how"], 0)
        elif self._on and part.plan["list"]:
            LIBRARY.faults_arm(b"", 0, 0, 1)

    def __exit__(self, *error):
        if self._on and self._part.plan["list"]:
            self._part.points += [LIBRARY.faults_point(k).decode() for k in range(LIBRARY.faults_listed())]
        LIBRARY.faults_arm(b"", 0, 0, 0)


def live(part):
    """The steps from the last checkpoint on; {step: its loss, or digest of the parameters}."""
    plan = part.plan
    train = {"numpy": NumpyTraining, "torch": TorchTraining}[plan["kind"]]
    with zero_c.init(part.rank, plan["ranks"], job=plan["job"], start_timeout=ENOUGH_S, timeout=plan["timeout"]) as comm:
        part.come_to("construction")
        with part.within("construction"):
            training = train(part, comm)
        part.come_to("load")
        if Path(plan["folder"], MANIFEST).exists():
            with part.within("load"):
                together_or_not(part, comm, training.load)
        while training.steps < plan["last_step"]:
            training.step()
            if training.steps <= FAULTY_STEP or not plan["operation"]:
                part.come_to("save")
                with part.within("save"):
                    together_or_not(part, comm, training.save)
                for background in ("async_save", "async_save alone"):
                    if plan["operation"] == background:
                        part.come_to(background)
                        with part.within(background):
                            together_or_not(part, comm, lambda: training.save_in_background(background == "async_save"))
        part.come_to("close")
        if not part.closes_first:
            comm.barrier()
        with part.within("close"):
            training.close()
            comm.close()
        return training.numbers


def together_or_not(part, comm, call):
    """call(); an error of files is all ranks', and leaves them fit to do it again."""
    try:
        call()
    except zero_c.CheckpointError as error:
        LIBRARY.faults_arm(b"", 0, 0, 0)
        comm.barrier()
        call()
        part.plan["told"] = str(error)


class NumpyTraining:
    """Arrays; a step's number is a digest of them."""

    def __init__(self, part, comm):
        draw = numpy.random.default_rng(7)
        self._arrays = [draw.standard_normal(shape).astype(numpy.float32) for shape in ((300,), (60, 50), (2500,))]
        self._optimizer = zero_c.ShardedOptimizer(list(zip(("first", "second", "third"), self._arrays, strict=True)), optimizer="adamw", lr=0.01,
                                                  stage=part.plan["stage"], comm=comm)
        self._part, self.numbers = part, {}
        self._folder = part.plan["folder"]

    @property
    def steps(self):
        return self._optimizer.last_step.steps

    def step(self):
        draw = numpy.random.default_rng((self.steps, self._part.rank))
        for index, array in enumerate(self._arrays):
            self._optimizer.add_grad(index, draw.standard_normal(array.shape).astype(numpy.float32))
        self._optimizer.step()
        self.numbers[self.steps] = [zero_c._core.checksum(array.tobytes()) for array in self._arrays]

    def save(self):
        self._optimizer.save(self._folder)

    def load(self):
        self._optimizer.load(self._folder)

    def close(self):
        self._optimizer = None


class TorchTraining:
    """A small network; a step's number is its loss, bit for bit."""

    def __init__(self, part, comm):
        import torch

        from zero_c.torch import ShardedOptimizer

        torch.manual_seed(3)
        layers = [torch.nn.Linear(20, 60), torch.nn.Tanh(), torch.nn.Linear(60, 60), torch.nn.Tanh(), torch.nn.Linear(60, 1)]
        self._torch, self._part, self.numbers = torch, part, {}
        self._model = torch.nn.Sequential(*layers)
        self._optimizer = ShardedOptimizer(self._model, lr=0.01, stage=part.plan["stage"], max_grad_norm=1.0, bucket_mb=0.01, comm=comm)
        self._folder = part.plan["folder"]
        layers[2].register_forward_hook(self._in_the_middle)

    def _in_the_middle(self, module, inputs, output):
        self._part.come_to("forward")
        if output.requires_grad:
            output.register_hook(lambda gradient: self._part.come_to("backward"))

    @property
    def steps(self):
        return self._optimizer.last_step.steps

    def step(self):
        draw = self._torch.Generator().manual_seed(100 * self.steps + self._part.rank)
        x = self._torch.randn(8, 20, generator=draw)
        with self._part.within("forward"):
            loss = (self._model(x) - x.sum(1, keepdim=True)).square().mean()
        with self._part.within("backward"):
            loss.backward()
        self._part.come_to("step")
        with self._part.within("step"):
            self._optimizer.step()
        self._optimizer.zero_grad()
        self.numbers[self.steps] = [loss.item().hex()]

    def save(self):
        self._optimizer.save(self._folder)

    def save_in_background(self, together):
        """Each rank waits with the others for the thread, or alone, as a process that ends does."""
        self._optimizer.async_save(self._folder)
        if together:
            self._optimizer.wait_saved()
        else:
            self._optimizer._saving._thread.join()

    def load(self):
        self._optimizer.load(self._folder)

    def close(self):
        self._optimizer = self._model = None


def be_rank(plan, rank, pipe, hit):
    LIBRARY.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    os.setpgid(0, 0)
    part, answer = Part(plan, rank), {"kinds": [], "text": ""}
    address = ctypes.addressof(ctypes.c_uint64.from_buffer(hit, 8 * rank))
    LIBRARY.faults_watch(plan["folder"].encode(), ctypes.c_void_p(address))
    before = _held()
    try:
        answer["numbers"] = live(part)
    except BaseException as error:
        answer["end_ns"] = time.monotonic_ns()
        answer["kinds"] = [kind.__name__ for kind in type(error).__mro__]
        answer["text"] = str(error)
        answer["trace"] = traceback.format_exc()
        if part.is_victim and part.fault["how"] == RAISES:
            struct.pack_into("q", hit, 8 * rank, time.monotonic_ns())
        traceback.clear_frames(error.__traceback__)
    gc.collect()
    answer["left"] = sorted(_held() - before)
    answer["told"] = plan.get("told", "")
    answer["points"] = part.points
    os.write(pipe, json.dumps(answer).encode())
    os._exit(EXIT_FAILED if answer["kinds"] else 0)


# ---- a run ------------------------------------------------------------------------

runs_made = 0


class Wrong(Exception):
    """A run did not do what it must."""


def run(plan):
    """The answers of the ranks (None: it gave none), their wait statuses, and when each met its end (0: it did not)."""
    global runs_made
    runs_made += 1
    plan = {**plan, "job": f"fault ranks {os.getpid()} {runs_made}"}
    hit = mmap.mmap(-1, 4096)
    pids, pipes = [], []
    for rank in range(plan["ranks"]):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            be_rank(plan, rank, writing, hit)
        os.close(writing)
        pids.append(pid)
        pipes.append(reading)
    texts, statuses, end = [b""] * len(pids), [None] * len(pids), time.monotonic() + RUN_LIMIT_S
    victim = plan["fault"]["rank"] if plan["fault"] else None
    hits = lambda: struct.unpack_from(f"{len(pids)}q", hit)
    while None in statuses:
        for pipe in select.select(pipes, [], [], 0.002)[0]:
            texts[pipes.index(pipe)] += os.read(pipe, 1 << 20)
        for rank, pid in enumerate(pids):
            if statuses[rank] is None:
                done, status = os.waitpid(pid, os.WNOHANG)
                statuses[rank] = status if done else None
        left = [rank for rank, status in enumerate(statuses) if status is None]
        stopped = left == [victim] and plan["fault"]["how"] == STOPPED and hits()[victim]
        if stopped or time.monotonic() > end:
            for rank in left:
                os.kill(pids[rank], signal.SIGKILL)
    for rank, pipe in enumerate(pipes):
        while chunk := os.read(pipe, 1 << 20):
            texts[rank] += chunk
        os.close(pipe)
    if left := [pid for pid in pids if processes_of_group(pid)]:
        raise Wrong(f"ranks left processes: {left}")
    met = hits()
    hit.close()
    return [json.loads(text) if text else None for text in texts], statuses, met


def must(condition, text):
    if not condition:
        raise Wrong(text)


def check_quiet(answers, statuses, right):
    """A run without a fault: its numbers are the right ones."""
    for rank, (answer, status) in enumerate(zip(answers, statuses, strict=True)):
        must(status == 0 and answer, f"rank {rank} ended with {status}: {answer and answer.get('trace')}")
        must(not answer["left"], f"rank {rank} left {answer['left']}")
        for step, numbers in answer["numbers"].items():
            must(right is None or right[rank][step] == numbers, f"rank {rank}: step {step} has other bits than without a fault")


def files_are_whole(folder):
    """Nothing but the manifest, and what it names."""
    named = {MANIFEST, *(about["name"] for about in json.loads(Path(folder, MANIFEST).read_bytes())["manifest"]["files"].values())}
    found = set(os.listdir(folder))
    must(found == named, f"in the folder are {sorted(found ^ named)} too many or too few")


def check_fault(plan, answers, statuses, met):
    """What the others did, and what the one with the fault left."""
    fault = plan["fault"]
    victim, how = fault["rank"], fault["how"]
    if how == EXITED:
        must(os.waitstatus_to_exitcode(statuses[victim]) == EXIT_SUDDEN, f"rank {victim} ended with {statuses[victim]}")
    if how == FAILS:
        told = {answer["told"] for answer in answers if answer}
        must(len(told) == 1 and all(answers), f"an error on some ranks only: {[answer and (answer['told'], answer.get('trace')) for answer in answers]}")
        must(told == {""} or re.search(rf"rank {victim}\b", told.pop()), f"the error does not name rank {victim}: {told}")
    for rank, answer in enumerate(answers):
        if rank == victim:
            continue
        must(answer and os.waitstatus_to_exitcode(statuses[rank]) == EXIT_FAILED, f"rank {rank} ended with {statuses[rank]}: {answer}")
        must(not answer["left"], f"rank {rank} left {answer['left']}")
        late_s = (answer["end_ns"] - met[victim]) / 1e9
        text = answer["text"]
        names = re.search(rf"rank {victim}\b", text) or re.search(rf"(missing|finish): (\d+, )*{victim}\b", text)
        must(names, f"rank {rank}: rank {victim} is not named: {text}")
        if how == STOPPED:
            must("Timeout" in answer["kinds"] or "has closed" in text, f"rank {rank}: no timeout: {answer['trace']}")
            must(TIMEOUT_S - 0.1 < late_s < 2 * TIMEOUT_S + 1 or "has closed" in text, f"rank {rank}: {late_s:.3f} s instead of the timeout: {text}")
            continue
        must("PeerLost" in answer["kinds"], f"rank {rank}: no lost peer: {answer['trace']}")
        if how != FAILS:
            must(late_s < NOTICE_S, f"rank {rank} noticed after {late_s:.3f} s: {text}")
            worst[how] = max(worst.get(how, 0), late_s)
    if victim != 0 and how != STOPPED or how == FAILS and answers[0]["told"]:  # else the next save removes what is left
        files_are_whole(plan["folder"])


worst = {}


# ---- walking ---------------------------------------------------------------------------


def places(points, manner, some):
    """(name, how-manieth time) of a rank's points that this manner has."""
    seen = {}
    for name in points:
        seen.setdefault(name, []).append(len(seen.get(name, [])) + 1)
    for name, times in seen.items():
        of_files = ": " not in name
        if manner == FAILS and not (name.startswith("before ") and name != "before close" or name == "in the middle of a write"):
            continue
        if name.startswith(("wait: ", "wake: ", "failure: ")):  # whether a run comes there depends on time
            continue
        for number in times if of_files and not some else [times[len(times) // 2]]:
            yield name, number


def left_to_another(answers, rank, name, manner):
    """Whether it is for another rank to meet its end at this point, as all come to it."""
    return all(name in answer["points"] for answer in answers) and (zlib.crc32(name.encode()) + manner) % len(answers) != rank


def faults_of(answers, ranks, operation, manners, level):
    """What can befall the ranks in an operation; answers: of the run that listed its points."""
    for manner in (MANNERS[m] for m in manners):
        for rank in range(ranks) if level != "one" else [ranks - 1]:
            if manner == RAISES:
                yield {"rank": rank, "point": "", "time": 0, "how": RAISES}
                continue
            for name, number in places(answers[rank]["points"], manner, level != "all"):
                if level == "turns" and left_to_another(answers, rank, name, manner):
                    continue
                if level != "one" or name == OWN_POINT[operation]:
                    yield {"rank": rank, "point": name, "time": number, "how": manner}


def walk(folder, kind, ranks, stage, operations, manners, level):
    """One stage; the number of faults that were not right."""
    base = {"kind": kind, "ranks": ranks, "stage": stage, "operation": "", "fault": None, "list": False, "closer": None,
            "timeout": ENOUGH_S, "folder": str(folder / "base"), "last_step": LAST_STEP}
    answers, statuses, _ = run(base)
    check_quiet(answers, statuses, None)
    right = [answer["numbers"] for answer in answers]
    shutil.rmtree(folder / "base")
    check_quiet(*run({**base, "last_step": FIRST_STEP})[:2], right)
    return sum(walk_operation(folder, {**base, "operation": operation}, right, manners, level) for operation in operations)


def walk_operation(folder, base, right, manners, level):
    operation = base["operation"]
    answers, statuses, _ = run({**base, "folder": str(fresh(folder, f"{operation}-listed")), "list": True, "last_step": FAULTY_STEP})
    check_quiet(answers, statuses, right)
    faults = list(faults_of(answers, base["ranks"], operation, manners, level))
    must(faults, f"no rank comes to a point in {operation}")
    numbered = list(enumerate(faults))
    found = in_processes(lambda share: walk_faults(folder, base, right, share), [numbered[k::WALKERS] for k in range(WALKERS)])
    runs, again, silent, failed = (sum(numbers) for numbers in zip(*(numbers for numbers, _ in found), strict=True))
    slowest = [max((late_s[manner] for _, late_s in found if manner in late_s), default=None) for manner in MANNERS]
    noticed = ", ".join(f"{manner} {late_s * 1e3:.0f} ms" for manner, late_s in zip(MANNERS, slowest, strict=True) if late_s is not None)
    names = {fault["point"] for fault in faults} - {""}
    print(f"{describe(base)}: {len(faults)} faults at {len(names)} points in {runs} runs, {again} tried again, "
          f"{silent} without effect; noticed within {noticed}", flush=True)
    return failed


def in_processes(work, shares):
    """work(share) for every share, each in a process of its own; what they return, which JSON must be able to say."""
    pipes = []
    for share in shares:
        reading, writing = os.pipe()
        if os.fork() == 0:
            LIBRARY.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            try:
                os.write(writing, json.dumps(work(share)).encode())
            except BaseException:
                traceback.print_exc()
            os._exit(0)
        os.close(writing)
        pipes.append(reading)
    texts = []
    for pipe in pipes:
        with open(pipe, "rb") as file:
            texts.append(file.read())
        os.wait()
    must(all(texts), "a process that walks over a share of the faults has ended early")
    return [json.loads(text) for text in texts]


def walk_faults(folder, base, right, faults):
    """((runs, faults that were tried again, without effect, not right), {manner: the slowest notice of a loss, in seconds}) of
    numbered faults."""
    runs_before, again, silent, failed = runs_made, 0, 0, 0
    worst.clear()
    operation = base["operation"]
    for number, fault in faults:
        for attempt in range(TRIES):
            place = fresh(folder, f"{operation}-{number}-{attempt}")
            plan = {**base, "folder": str(place), "fault": fault, "closer": fault["rank"], "last_step": FAULTY_STEP,
                    "timeout": TIMEOUT_S if fault["how"] == STOPPED else ENOUGH_S}
            try:
                silent += one_fault(plan, {**base, "operation": "", "folder": str(place)}, right)
                break
            except Wrong as wrong:
                print(f"{describe(base)}, {fault}: {wrong}", file=sys.stderr, flush=True)
                again += 1
            finally:
                shutil.rmtree(place)
        else:
            failed += 1
    return (runs_made - runs_before, again, silent, failed), {manner: worst[how] for manner, how in MANNERS.items() if how in worst}


def describe(plan):
    return f"{plan['kind']}, {plan['ranks']} ranks, stage {plan['stage']}, {plan['operation']}"


def fresh(folder, name):
    """The checkpoint after the first step, in a folder of its own."""
    return Path(shutil.copytree(folder / "base", folder / name, copy_function=os.link))


def one_fault(plan, going_on, right):
    """1 if the fault had no effect, or its place was passed by."""
    answers, statuses, met = run(plan)
    if not met[plan["fault"]["rank"]]:  # how often a thread looks for the others' files depends on time
        must(plan["operation"].startswith("async_save"), "the place was not reached")
        return 1
    check_fault(plan, answers, statuses, met)
    must(Path(plan["folder"], MANIFEST).exists(), "the last checkpoint is gone")
    if plan["fault"]["how"] not in (STOPPED, EXITED):  # these leave the files of one that was killed there
        check_quiet(*run(going_on)[:2], right)
        files_are_whole(plan["folder"])
    return plan["fault"]["how"] == FAILS and not answers[0]["told"]


if __name__ == "__main__":
    if sys.argv[2] == "torch":
        import torch
        import torch._dynamo  # seconds, and otherwise in every rank

        import zero_c.torch

        torch.set_num_threads(1)
    gc.freeze()  # what is there now, no rank has to look at
    stages, operations = sys.argv[4].split(","), sys.argv[5].split(",")
    sys.exit(1 if sum(walk(Path(sys.argv[1], stage), sys.argv[2], int(sys.argv[3]), int(stage), operations, sys.argv[6], sys.argv[7])
                      for stage in stages) else 0)
