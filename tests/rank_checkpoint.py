"""What ranks without torch do in test_checkpoint.py: small optimizers, saved and loaded, with trouble on the way.

`everything()` is all that a checkpoint must bring back; tests compare it bit for bit.
`Trouble` counts a rank's calls of the system and spoils one of them.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import threading
import time
from pathlib import Path

import numpy

import zero_c
from zero_c import _blocks, _checkpoint, _loading, _saving

SIZES = [("w", (70, 11), "f4"), ("scalar", (), "f4"), ("none", (0, 3), "f4"), ('a/b "c" ü', (129,), "f4"),
         ("double", (7,), "f8"), ("half", (33,), "f2"), ("late", (5,), "f4")]


def values(seed, shape, dtype):
    return numpy.random.default_rng(seed).standard_normal(shape).astype(dtype)


def build(comm, rule="adamw", stage=2, seed=0, sizes=SIZES, groups=2, **options):
    """An optimizer of `groups` groups; other seeds have other values and options to start from."""
    named = [(name, numpy.asarray(values((seed, k), shape, dtype))) for k, (name, shape, dtype) in enumerate(sizes)]
    options = {"lr": 0.01 * (seed + 1)} | ({"momentum": 0.9, "dampening": 0.1} if rule == "sgd" else {}) | options
    split = [{"params": named[k::groups], "weight_decay": 0.1 * k + 0.01 * seed} for k in range(groups)]
    options = {"bucket_mb": 0.0005, "loss_scale": 2.0 ** (seed + 3)} | options  # several buckets even in small parameters
    return zero_c.ShardedOptimizer(split, rule, stage=stage, comm=comm, **options)


def train(opt, first, steps):
    """Gradients of a global batch of twelve rows, of which every rank has its share; parameter "late" has none yet."""
    comm = opt.comm
    share = 12 // comm.world_size
    for step in range(first, first + steps):
        for i in range(len(opt)):
            if opt._names[i] == "late" and step < 5:
                continue
            shape, dtype = opt._shapes[i], numpy.dtype(opt._dtypes[i])
            rows = values((9, step, i), (12, *shape), "f4")[comm.rank * share:(comm.rank + 1) * share]
            opt.add_grad(i, numpy.asarray(rows.mean(0) * opt.loss_scale / 8).astype(dtype))
        opt.step()


def everything(opt):
    """Collective."""
    found = {"groups": json.dumps([{key: value for key, value in group.items()} for group in opt.param_groups]),
             "scale": opt.loss_scale, "steps": opt.last_step.steps}
    for i, name in enumerate(opt._names):
        for role in opt._kept(i):
            found[f"{name}.{role}"] = opt._engine.read(i, role)
        found[f"{name}.count"] = [opt._engine.step_count(i), int(opt._engine.has_momentum(i))]
        found[f"{name}.weight"] = numpy.array(opt.param(i))
        found[f"{name}.in_place"] = numpy.array(opt._in_place[i])
    return found


def digest(found):
    """A text that is the same only if every bit of everything() is."""
    state = hashlib.sha256()
    for key, value in sorted(found.items()):
        state.update(f"{key} {value.shape} {value.dtype}".encode() + value.tobytes() if isinstance(value, numpy.ndarray)
                     else f"{key} {value!r}".encode())
    return state.hexdigest()


def error_of(call):
    """The sentence of the error that call() raises, with its class; "" if none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ---- plain saves and loads ----------------------------------------------------------


def saved(folder, steps=3, **how):
    """Trains, saves; what was saved, and what 10 further steps make of it."""
    opt = build(zero_c.init(), **how)
    train(opt, 0, steps)
    opt.save(folder)
    before = everything(opt)
    train(opt, steps, 10)
    return before, everything(opt)


def loaded(folder, steps=3, **how):
    """The same from a checkpoint, in an optimizer that began elsewhere and has trained already."""
    opt = build(zero_c.init(), **{"seed": 4} | how)
    train(opt, 50, 2)
    opt.load(folder)
    before = everything(opt)
    train(opt, steps, 10)
    return before, everything(opt)


def digest_of(folder, **how):
    opt = build(zero_c.init(), **{"seed": 4} | how)
    opt.load(folder)
    return digest(everything(opt))


def between_backward_and_step(folder, stage):
    """Whether saving there changes what the step does; all ranks have a gradient, or rank 1 alone."""
    results = []
    for save in (True, False):
        opt = build(zero_c.init(), stage=stage)
        for alone in (False, True):
            if opt.comm.rank or not alone:
                for i in range(len(opt)):
                    opt.add_grad(i, numpy.ones(opt._shapes[i], opt._dtypes[i]))
            if save:
                opt.save(folder)
            opt.step()
        results.append(digest(everything(opt)))
    return results


def refused(folder, **how):
    """The error of loading into an optimizer made so, and whether anything changed."""
    opt = build(zero_c.init(), **{"seed": 4} | how)
    train(opt, 50, 1)
    before = digest(everything(opt))
    text = error_of(lambda: opt.load(folder))
    return text, before == digest(everything(opt))


def bytes_read(folder, stage, sizes):
    """Bytes of the data files that a load has read here, besides headers, and the largest read."""
    counts = []
    real = os.preadv

    def counting(file, buffers, offset):
        count = real(file, buffers, offset)
        counts.append(count)
        return count

    opt = build(zero_c.init(), stage=stage, sizes=sizes, groups=1, bucket_mb=0.25)
    opt.load(folder)
    os.preadv = counting
    try:
        opt.load(folder)
    finally:
        os.preadv = real
    return sum(counts), max(counts)


def peak_while_saving(folder, stage, sizes):
    """Bytes by which the peak Rss of a save is above Rss before it, file pages apart."""
    opt = build(zero_c.init(), stage=stage, sizes=sizes, groups=1, bucket_mb=0.25)
    for i, (_, shape, dtype) in enumerate(sizes):
        opt.add_grad(i, numpy.ones(shape, dtype))
    opt.step()
    return peak_of(lambda: opt.save(folder))


def peak_of(call):
    """Bytes by which the second call's peak Rss is above Rss before it."""
    call()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    call()
    return status("VmHWM") - before


def status(key):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    raise KeyError(key)


# ---- trouble ----------------------------------------------------------------------------

CALLS = ("open", "pwrite", "preadv", "fsync", "posix_fallocate", "rename", "unlink")


class Trouble:
    """Counts this rank's calls of CALLS; the `at`-th (from 1) fails with `error`, or kills the process when half done."""

    def __init__(self, at=0, error=errno.ENOSPC, kill=False):
        self.at, self.error, self.kill, self.count, self.seen = at, error, kill, 0, []

    def __enter__(self):
        self._real = {name: getattr(os, name) for name in CALLS}
        for name in CALLS:
            setattr(os, name, self._wrap(name, self._real[name]))
        return self

    def __exit__(self, kind, error, trace):
        for name, real in self._real.items():
            setattr(os, name, real)

    def _wrap(self, name, real):
        def call(*args, **kwargs):
            self.count += 1
            self.seen.append(name)
            if self.count != self.at:
                return real(*args, **kwargs)
            if name == "pwrite":
                file, data, offset = args
                real(file, data[:len(data) // 2], offset)
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(self.error, os.strerror(self.error))
        return call


def save_with_trouble(folder, rank, at, kill, stage=2):
    """Another state saved over the one that is there; returns (calls, error, state unchanged, digest of what was to be saved)."""
    comm = zero_c.init()
    opt = build(comm, stage=stage, seed=1)
    train(opt, 0, 2)
    wanted = digest(everything(opt))
    with Trouble(at if comm.rank == rank else 0, kill=kill) as trouble:
        text = error_of(lambda: opt.save(folder))
    return trouble.count, text, wanted == digest(everything(opt)), wanted


def dies_in_a_save_with_a_child(folder):
    """Rank 0 is killed in a save, and a process that it has forked there lives on; its pid is in `folder`.child."""
    comm = zero_c.init()
    opt = build(comm)

    def fatal(file):
        child = os.fork()
        if child:
            with open(f"{folder}.child", "w") as told:
                told.write(str(child))
            os.kill(os.getpid(), signal.SIGKILL)
        for entry in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{entry}").startswith("pipe:"):
                    os.close(int(entry))  # the end of the rank is the end of its answers
        while True:
            time.sleep(60)

    if comm.rank == 0:
        os.fsync = fatal  # in a process that ends
    return error_of(lambda: opt.save(folder))


def every_error_of_a_save(folder, rank):
    """Each call of a rank's save fails once. Returns sentences of what was wrong."""
    comm = zero_c.init()
    old, new = build(comm), build(comm, seed=1)
    train(old, 0, 3)
    train(new, 0, 2)
    states = [digest(everything(old)), digest(everything(new))]
    wrong, at = [], 0
    while True:
        at += 1
        old.save(folder)
        with Trouble(at if comm.rank == rank else 0) as trouble:
            text = error_of(lambda: new.save(folder))
        passed = bool(comm.all_reduce(numpy.array([trouble.count < at and comm.rank == rank], "f4"), "sum")[0])
        other = build(comm, seed=4)
        there = error_of(lambda: other.load(folder))
        found = digest(everything(other))
        call = trouble.seen[at - 1] if comm.rank == rank and trouble.count >= at else ""
        if there or found not in states or (not text and found != states[1]):
            wrong.append(f"call {at} {call}: {text!r}, then {there!r}")
        if text and not text.startswith("CheckpointError"):
            wrong.append(f"call {at} {call}: {text!r}")
        if digest(everything(new)) != states[1]:
            wrong.append(f"call {at} {call}: the state has changed")
        if text and f"rank {rank}" not in text:
            wrong.append(f"call {at} {call}: no rank is named in {text!r}")
        if comm.rank == 0 and text and found == states[0] and len(os.listdir(folder)) != 4:
            wrong.append(f"call {at} {call}: left {sorted(os.listdir(folder))}")
        if passed:
            return wrong, at - 1


def every_error_of_a_load(folder, rank):
    """Each call of a rank's load fails once; nothing may change before everything has been checked."""
    comm = zero_c.init()
    opt, kept = build(comm), build(comm, seed=4)
    train(opt, 0, 3)
    opt.save(folder)
    train(kept, 50, 2)
    before, saved_state = digest(everything(kept)), digest(everything(opt))
    wrong, at = [], 0
    while True:
        at += 1
        with Trouble(at if comm.rank == rank else 0, errno.EIO) as trouble:
            text = error_of(lambda: kept.load(folder))
        passed = bool(comm.all_reduce(numpy.array([trouble.count < at and comm.rank == rank], "f4"), "sum")[0])
        if passed:
            same = digest(everything(kept)) == saved_state
            return wrong + ([] if same and not text else [f"at the end: {text!r}"]), at - 1
        if not text.startswith("CheckpointError") or f"rank {rank}" not in text:
            wrong.append(f"call {at}: {text!r}")
        if "half done" not in text and digest(everything(kept)) != before:
            wrong.append(f"call {at}: the state has changed; {text!r}")
        if "half done" in text:  # as it says, another load mends it
            kept.load(folder)
            if digest(everything(kept)) != saved_state:
                wrong.append(f"call {at}: another load does not mend it")
            train(kept, 50, 1)
            before = digest(everything(kept))


# ---- damaged files ------------------------------------------------------------------------


def damage(folder, kind, seed):
    """Every file of a checkpoint cut, or with a bit flipped, at many places: sentences of what was not found.

    A load must fail and change nothing, or bring back what was saved.
    """
    comm = zero_c.init()
    opt, kept = build(comm), build(comm, seed=4)
    train(opt, 0, 3)
    opt.save(folder)
    train(kept, 50, 2)
    good, before = digest(everything(opt)), digest(everything(kept))
    wrong, tried, found = [], 0, 0
    choose = random.Random(seed)
    for path in sorted(Path(folder).iterdir()):
        whole = path.read_bytes()
        comm.barrier()
        if kind == "cut":
            places = sorted({0, 1, 7, 8, 9, len(whole) // 2, len(whole) - 1, *(choose.randrange(len(whole)) for _ in range(12))})
        else:
            places = [*range(0, 8), *(choose.randrange(min(len(whole), 2000)) for _ in range(30)),
                      *(choose.randrange(len(whole)) for _ in range(50))]
        for place in places:
            bit = choose.randrange(8)
            if comm.rank == 0:
                damaged = bytearray(whole[:place] if kind == "cut" else whole)
                if kind == "flip":
                    damaged[place] ^= 1 << bit
                path.write_bytes(damaged)
            comm.barrier()
            text = error_of(lambda: kept.load(folder))
            state = digest(everything(kept))
            tried += 1
            found += text != ""
            if text and (not text.startswith("CheckpointError") or state != before):
                wrong.append(f"{path.name} {kind} at {place}, bit {bit}: {text!r}, changed: {state != before}")
            if not text:
                if state != good or path.name != "zero_c.json":
                    wrong.append(f"{path.name} {kind} at {place}, bit {bit}: not found")
                before = good
        if comm.rank == 0:
            path.write_bytes(whole)
        comm.barrier()
    kept.load(folder)
    return wrong + ([] if digest(everything(kept)) == good else ["the mended checkpoint does not load"]), tried, found


def mutate(value, choose):
    """A JSON value like this one with something wrong in it."""
    odd = [None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -2**63, 10**30, 1.5, float("nan"), float("inf"), "", "x", "../x", [], {},
           [0], [[]], {"a": 1}, "float32", "é" * 40]
    if isinstance(value, dict) and value and choose.random() < 0.9:
        key = choose.choice(sorted(value))
        what = choose.random()
        if what < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if what < 0.15:
            return {**value, "more": choose.choice(odd)}
        return {**value, key: mutate(value[key], choose)}
    if isinstance(value, list) and value and choose.random() < 0.9:
        at = choose.randrange(len(value))
        what = choose.random()
        if what < 0.1:
            return value[:at] + value[at + 1:]
        if what < 0.2:
            return value + [value[at]]
        return value[:at] + [mutate(value[at], choose)] + value[at + 1:]
    if isinstance(value, int) and choose.random() < 0.4:
        return value + choose.choice([-1, 1, 8, -value * 2])
    return choose.choice(odd)


def fuzz(folder, seed, rounds):
    """Manifests with right sums and wrong contents: nothing but CheckpointError, and no change unless a load succeeds."""
    comm = zero_c.init()
    opt, kept = build(comm), build(comm, seed=4)
    train(opt, 0, 3)
    opt.save(folder)
    before = digest(everything(kept))
    path = Path(folder) / _checkpoint.MANIFEST
    manifest = _checkpoint.unseal(path.read_bytes(), path)
    choose, wrong, errors = random.Random(seed), [], 0
    for turn in range(rounds):
        text = _checkpoint.seal(mutate(manifest, choose) if choose.random() < 0.9 else choose.choice([[], None, 3, "x"]))
        comm.barrier()
        if comm.rank == 0:
            path.write_bytes(text)
        comm.barrier()
        error = error_of(lambda: kept.load(folder))
        errors += error != ""
        state = digest(everything(kept))
        if error and (not error.startswith("CheckpointError") or state != before or "half done" in error):
            wrong.append(f"{turn}: {error!r}, changed: {state != before}: {text[:3000]}")
        if not error:  # back to something that is surely another state
            train(kept, 50, 1)
            before = digest(everything(kept))
    return wrong, errors


# ---- disagreement, space, places ------------------------------------------------------


def alone(folder, what, timeout=3.0):
    """Rank 0 saves; rank 1 does something else."""
    comm = zero_c.init(timeout=timeout)
    opt = build(comm)
    if comm.rank == 0:
        return error_of(lambda: opt.save(folder))
    if what == "load":
        return error_of(lambda: opt.load(folder))
    if what == "step":
        opt.add_grad(0, numpy.ones(opt._shapes[0], "f4"))
        return error_of(opt.step)
    time.sleep(3 * timeout)
    return ""


def no_space(folder, limit):
    """A save under a limit of file sizes on rank 1 or all ranks, and one after it is lifted."""
    comm = zero_c.init()
    opt = build(comm)
    train(opt, 0, 2)
    before = digest(everything(opt))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        text = error_of(lambda: opt.save(folder))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    comm.barrier()  # rank 0 cleans up after it has told the others
    left = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
    comm.barrier()
    again = error_of(lambda: opt.save(folder))
    return text, left, again, before == digest(everything(opt))


def own_folders(folder):
    """Each rank names another folder: one that only rank 0 sees."""
    comm = zero_c.init()
    opt = build(comm)
    mine = f"{folder}/{comm.rank}"
    save = error_of(lambda: opt.save(mine))
    opt.save(f"{folder}/all")
    comm.barrier()
    if comm.rank == 0:
        shutil.copytree(f"{folder}/all", f"{folder}/0", dirs_exist_ok=True)
    comm.barrier()
    return save, error_of(lambda: opt.load(mine)), sorted(os.listdir(f"{folder}/0"))


def without(calls, error):
    """These calls of the system fail in this process, always; returns what undoes it."""
    real = {name: getattr(os, name) for name in calls}

    def fail(*args, **kwargs):
        raise OSError(error, os.strerror(error))

    for name in calls:
        setattr(os, name, fail)
    return lambda: [setattr(os, name, call) for name, call in real.items()]


def refused_by_the_system(folder, rank, what, calls, error):
    """A save or a load where these calls fail on one rank: the error; then whether the checkpoint and the one that would load
    it are what they were, and files in the folder.
    """
    opt, other = build(zero_c.init()), build(zero_c.init(), seed=4)
    opt.save(folder)
    saved_state, before = digest(everything(opt)), digest(everything(other))
    train(opt, 0, 2)
    undo = without(calls, error) if opt.comm.rank == rank else lambda: None
    text = error_of(lambda: opt.save(folder) if what == "save" else other.load(folder))
    undo()
    opt.comm.barrier()  # rank 0 cleans up after it has told the others
    unchanged, left = digest(everything(other)) == before, len(os.listdir(folder))
    other.load(folder)
    unchanged = unchanged and digest(everything(other)) == saved_state
    opt.comm.barrier()
    return text, unchanged, left, error_of(lambda: opt.save(folder))


def flushed_folders(folder):
    """What a save hands to fsync."""
    opt, real, flushed = build(zero_c.init()), os.fsync, []
    os.fsync = lambda file: flushed.append(os.readlink(f"/proc/self/fd/{file}")) or real(file)
    try:
        opt.save(folder)
    finally:
        os.fsync = real
    return flushed


def begin(opt, folder):
    """What torch's async_save() does."""
    opt._close_round()
    return _saving.Background(opt._engine, opt.comm, folder, opt._describe_all)


def closes_meanwhile(folder):
    """The communicator is closed while the threads write: what is saved, the error of wait() then, and of the thread."""
    opt = build(zero_c.init())
    train(opt, 0, 3)
    state, real = digest(everything(opt)), os.pwrite
    os.pwrite = lambda *args: (time.sleep(0.05), real(*args))[1]
    try:
        saving = begin(opt, folder)
        opt.comm.close()
        text = error_of(saving.wait)
    finally:
        os.pwrite = real
    zero_c.init().barrier()
    return state, text, saving._error


def no_thread(folder, rank):
    """A save in the background where one rank can start no thread; the error, what is in the folder then, and the next save's."""
    opt, real = build(zero_c.init()), threading.Thread.start
    opt.save(folder)
    train(opt, 0, 1)

    def fail(self):
        raise RuntimeError("can't start new thread")

    if opt.comm.rank == rank:
        threading.Thread.start = fail
    try:
        text = error_of(lambda: begin(opt, folder))
    finally:
        threading.Thread.start = real
    opt.comm.barrier()
    saving = begin(opt, folder)
    return text, error_of(saving.wait), len(os.listdir(folder))


def nobody_asks(folder, fetch):
    """For a process of its own: a save in the background fails for want of space, and the program ends."""
    with zero_c.init(0, 1) as comm:
        opt, real = build(comm), os.fsync

        def full(file):
            if threading.current_thread() is not threading.main_thread():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(file)

        os.fsync = full
        saving = begin(opt, folder)
        if fetch:
            assert "No space" in error_of(saving.wait)


def saved_on_a_system_that_lets_go_badly(folder, background):
    """Closing a file of the checkpoint, and unlocking one, says EIO, as over a network; returns how many times."""
    opt = build(zero_c.init())
    train(opt, 0, 2)
    close, flock, failed = os.close, fcntl.flock, 0

    def fail():
        nonlocal failed
        failed += 1
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def close_badly(file):
        ours = os.readlink(f"/proc/self/fd/{file}").startswith(folder)
        close(file)
        if ours:
            fail()

    def unlock_badly(file, how):
        return fail() if how == fcntl.LOCK_UN else flock(file, how)

    os.close, fcntl.flock = close_badly, unlock_badly
    try:
        if background:
            begin(opt, folder).wait()
        else:
            opt.save(folder)
    finally:
        os.close, fcntl.flock = close, flock
    other = build(zero_c.init(), seed=1)
    other.load(folder)
    assert digest(everything(other)) == digest(everything(opt))
    return failed


def saved_in_small_blocks(folder, order):
    """Parameters of 1 KiB, listed so in two groups, saved at each stage with blocks of 64 bytes."""
    full = _blocks.BLOCK_BYTES
    _blocks.BLOCK_BYTES = 64
    try:
        for stage in (0, 1, 2):
            build(zero_c.init(), stage=stage, sizes=[(f"p{k}", (256,), "f4") for k in order]).save(f"{folder}/{stage}")
    finally:
        _blocks.BLOCK_BYTES = full


def damage_of_each(folder, order):
    """Loads of them with parameters in another order: (tensor that was damaged, error) wherever a load does not name it."""
    comm, wrong, tried = zero_c.init(), [], 0
    for stage in (0, 1, 2):
        opt = build(comm, stage=2 - stage, seed=4, sizes=[(f"p{k}", (256,), "f4") for k in order])
        found, count = unnamed(opt, f"{folder}/{stage}", lambda: digest(everything(opt)))
        wrong += found
        tried += count
    return wrong, tried


def unnamed(opt, folder, state, comm=None):
    """One byte of each tensor of a checkpoint after the other is damaged: the errors that do not name it, and how many were tried."""
    comm, wrong, tried, before = comm or opt.comm, [], 0, state()
    for path in sorted(Path(folder).glob("[ws]*.safetensors")):
        with open(path, "rb") as file:
            places = _blocks.read_header(file.fileno(), str(path))
        for name, (_, _, first, end) in places.items():
            comm.barrier()
            with flipped(path, (first + end) // 2) if comm.rank == 0 else contextlib.nullcontext():
                comm.barrier()
                text = error_of(lambda: opt.load(folder))
                comm.barrier()
            tried += 1
            if f"'{name}'" not in text or path.name not in text or state() != before:
                wrong.append(f"{path.name} {name}: {text}")
    opt.load(folder)
    return wrong, tried


def changes_between_readings(folder, kind):
    """A byte of rank 1's parts is another when a load reads it for the second time: the error, and whether a load mends it."""
    opt, other = build(zero_c.init()), build(zero_c.init(), seed=4)
    opt.save(folder)
    path = next(Path(folder).glob(f"{kind}-*"))
    with open(path, "rb") as file:
        _, _, first, end = _blocks.read_header(file.fileno(), str(path))["w" if kind == "weights" else "exp_avg_sq/w"]
    real = _loading.Loading.apply

    def apply(self):
        opt.comm.barrier()
        with flipped(path, end - 2) if opt.comm.rank == 0 else contextlib.nullcontext():
            opt.comm.barrier()
            try:
                real(self)
            finally:
                opt.comm.barrier()

    _loading.Loading.apply = apply
    try:
        text = error_of(lambda: other.load(folder))
    finally:
        _loading.Loading.apply = real
    other.load(folder)
    return text, digest(everything(other)) == digest(everything(opt))


def other_places(folder, what):
    """A checkpoint whose header or table has right sums and says what zero_c does not write: blocks that end inside an element,
    or two tensors at one place; the error, and whether anything changed.
    """
    comm = zero_c.init()
    opt, other = build(comm, groups=1, sizes=[("a", (300,), "f4"), ("b", (300,), "f4")]), None
    opt.save(folder)
    if comm.rank == 0:
        path = Path(folder) / _checkpoint.MANIFEST
        manifest = _checkpoint.unseal(path.read_bytes(), path)
        files = manifest["files"]
        weights, table = (Path(folder) / files[kind]["name"] for kind in ("weights", "blocks"))
        data = bytearray(weights.read_bytes())
        length = int.from_bytes(data[:8], "little")
        if what == "edges":
            size, start = len(data), 8 + length
            with open(table, "rb") as file:
                lines = _loading.read_table(file.fileno(), str(table), files["blocks"]["parts"])
            cut = [start, start + 1202, size]
            own = [(0, end - begin, begin, _blocks.checksum(data[begin:end])) for begin, end in zip(cut, cut[1:])]
            lines = numpy.concatenate([numpy.array(own, _blocks.LINE), lines[lines["file"] == 1]])
            header, _, files["blocks"]["bytes"] = _blocks.plan_file([("blocks", "uint8", (len(lines), _blocks.LINE.itemsize))], {})
            table.write_bytes(header + lines.tobytes())
            files["blocks"]["parts"] = [[len(lines), *_blocks.checksum(lines.tobytes())]]
        else:
            header = json.loads(data[8:8 + length])
            header["a"]["data_offsets"] = header["b"]["data_offsets"] = [0, 1200]
            data[8:8 + length] = json.dumps(header, separators=(",", ":")).encode().ljust(length)
            weights.write_bytes(data)
            files["weights"]["header"] = [8 + length, *_blocks.checksum(data[:8 + length])]
        path.write_bytes(_checkpoint.seal(manifest))
    comm.barrier()
    other = build(comm, groups=1, sizes=[("a", (300,), "f4"), ("b", (300,), "f4")], seed=4)
    before = digest(everything(other))
    return error_of(lambda: other.load(folder)), digest(everything(other)) == before


@contextlib.contextmanager
def flipped(path, place):
    """A byte of a file is another."""
    with open(path, "r+b") as file:
        byte = os.pread(file.fileno(), 1, place)
        os.pwrite(file.fileno(), bytes([byte[0] ^ 0x10]), place)
        yield
        os.pwrite(file.fileno(), byte, place)


def job_of_two(folder, seed, times):
    """Saves over and over; the sentences that came of it, and the digest of what is saved."""
    opt, real = build(zero_c.init(), seed=seed), os.fsync
    os.fsync = lambda file: (time.sleep(0.01), real(file))[1]
    try:
        texts = [error_of(lambda: opt.save(folder)) for _ in range(times)]
    finally:
        os.fsync = real
    return texts, digest(everything(opt))


def save_as(folder, path=None):
    """A save of the usual state, or its error."""
    opt = build(zero_c.init())
    train(opt, 0, 3)
    return error_of(lambda: opt.save(path or folder))


def save_then_read(folder):
    """Rank 0's last rename takes a while; rank 1 looks at the folder as soon as save() returns."""
    comm = zero_c.init()
    opt, real = build(comm), os.rename
    if comm.rank == 0:
        os.rename = lambda *names: (time.sleep(0.5), real(*names))
    try:
        opt.save(folder)
    finally:
        os.rename = real
    return os.path.exists(f"{folder}/zero_c.json")


def group_value(folder, kind):
    """A save with a value in a group that JSON cannot hold, and what is in the folder then."""
    opt = build(zero_c.init())
    opt.param_groups[0]["odd"] = {"function": error_of, "array": numpy.zeros(3), "set": {1}, "keys": {1: 2}}[kind]
    return error_of(lambda: opt.save(folder)), os.path.exists(folder)


def group_values(folder):
    """Values that JSON can hold come back, NumPy's scalars as numbers."""
    opt = build(zero_c.init())
    kept = {"initial_lr": 0.3, "tag": "ü", "flags": [True, None], "more": {"a": [1, 2.5]}, "big": 2**70, "lr": numpy.float32(0.1)}
    opt.param_groups[1].update(kept)
    opt.save(folder)
    other = build(zero_c.init(), seed=4)
    other.load(folder)
    return [{key: other.param_groups[1].get(key) for key in kept}, isinstance(other.param_groups[1]["betas"], tuple)
            if "betas" in other.param_groups[1] else None]


def checked_blocks(folder):
    """The table of blocks as the documentation reads it: how many blocks have other sums than it says."""
    manifest = json.loads((Path(folder) / "zero_c.json").read_text())["manifest"]
    names = [manifest["files"][kind]["name"] for kind in ("weights", "state")]
    data = [(Path(folder) / name).read_bytes() for name in names]
    table = (Path(folder) / manifest["files"]["blocks"]["name"]).read_bytes()
    start = 8 + int.from_bytes(table[:8], "little")
    wrong = 0
    for line in numpy.frombuffer(table[start:], _blocks.LINE):
        block = data[line["file"]][line["offset"]:line["offset"] + line["bytes"]]
        words = numpy.frombuffer(block + bytes(-len(block) % 4), "<u4").astype("u8")
        sums = words.sum(), (words * numpy.arange(len(words), 0, -1, dtype="u8")).sum()
        wrong += tuple(map(int, sums)) != tuple(map(int, line["sums"]))
    return wrong


if __name__ == "__main__":
    nobody_asks(os.environ["CHECKPOINT_FOLDER"], os.environ["CHECKPOINT_FETCH"] == "1")
