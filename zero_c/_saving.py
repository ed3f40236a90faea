"""Saving: _checkpoint.py has the protocol."""

import atexit
import contextlib
import errno
import fcntl
import os
import secrets
import threading
import time
from pathlib import Path

import numpy

from zero_c import _blocks
from zero_c._checkpoint import (
    FILES,
    FORMAT,
    MANIFEST,
    OURS,
    VERSION_OF_FORMAT,
    all_texts,
    collective,
    from_rank_0,
    items_of,
    read_manifest,
    seal,
    shaped,
    unseal,
)
from zero_c._core import CheckpointError, CommError, checksum
from zero_c._version import VERSION

POLL_S = 0.05
PATIENCE_S = 600.0  # rank 0's thread waits this long for the others' after its own part

_locks = set()  # descriptors of files that this process has locked


def _leave_locks():
    """In a forked process: what its parent has locked is free when the parent ends, not when the last of its children does."""
    for file in _locks:
        os.close(file)
    _locks.clear()


os.register_at_fork(after_in_child=_leave_locks)


def lock(file, how):
    _locks.add(file)
    fcntl.flock(file, how)


def unlock(file):
    _locks.discard(file)
    with contextlib.suppress(OSError):  # closing does it too, but where a process that C code forked has the descriptor
        fcntl.flock(file, fcntl.LOCK_UN)
    _blocks.let_go(file)


def describe(entry, engine):
    counted = entry.kind == "parameter"
    return {"name": entry.name, "kind": entry.kind, "dtype": entry.dtype, "shape": list(entry.shape), "group": entry.group,
            "roles": list(entry.roles), "aliases": list(entry.aliases),
            "steps": engine.step_count(entry.index) if counted else 0,
            "has_momentum": bool(engine.has_momentum(entry.index)) if counted else False}


def plan(items):
    """(header, size) of the file of these items, which learn their places."""
    notes = {"format": FORMAT, "version": str(VERSION_OF_FORMAT)}
    header, starts, size = _blocks.plan_file([(item.name, item.dtype, item.entry.shape) for item in items], notes)
    for item, start in zip(items, starts, strict=True):
        item.offset = start
    return header, size


def copy_parts(engine, comm, items, sink):
    """This rank's parts, in blocks, to sink(file, offset, memory); the blocks' table. Collective.

    An error of this rank is raised at the end: until then peers may need it, for parameters that are put together.
    """
    failed = []

    def unless_failed(call, *args):
        try:
            return call(*args) if not failed else None
        except CommError:
            raise
        except Exception as error:
            failed.append(error)

    writer = _blocks.Writer(sink)
    for item in items:
        index = item.entry.index
        if index is None:
            if comm.rank == 0:
                unless_failed(lambda: writer.write(item.file, item.offset, row_major(item.entry.values())))
        elif item.entry.strides is None:
            unless_failed(copy_own, engine, item, writer)
        else:
            whole = engine.fetch(index) if item.role == "weight" else engine.read(index, item.role)
            if comm.rank == 0:
                unless_failed(lambda: writer.write(item.file, item.offset, row_major(shaped(whole, item.entry))))
    table = unless_failed(writer.table)
    if failed:
        raise failed[0]
    return table


def row_major(values):
    """The bytes of an array, copied if they are stored otherwise."""
    return numpy.ascontiguousarray(values).reshape(-1).view(numpy.uint8)


def copy_own(engine, item, writer):
    for begin, end in engine.parts(item.entry.index):
        while begin < end:
            room = writer.room(item.file, item.offset + begin * item.elem_bytes, (end - begin) * item.elem_bytes)
            stop = begin + len(room) // item.elem_bytes
            engine.read_part(item.entry.index, item.role, begin, stop, room)
            begin = stop


class Saving:
    """One save, on one rank. Calls are collective unless they say otherwise, and come in the order in which they stand here."""

    def __init__(self, engine, comm, folder, describe_all):
        """describe_all() -> (entries, what the manifest says besides tensors and files)."""
        self._engine, self._comm, self._folder, self.what = engine, comm, Path(folder), f"save to {folder}"
        entries, self._about = describe_all()
        self._items = items_of(entries)
        self._tensors = [describe(entry, engine) for entry in entries]
        # A thread in the background may outlive the communicator, and asks it nothing.
        self.rank, self._ranks, self._on_one_host = comm.rank, comm.world_size, comm.local_world_size == comm.world_size
        self._lock, self._promised, self._fds, self._published = None, None, [], False
        planned = [plan(items) for items in self._items]
        self._headers, self._sizes = ([part[k] for part in planned] for k in (0, 1))

    def begin(self):
        """Files at full size, open on every rank."""
        name = collective(self._comm, self.what, self._make if self.rank == 0 else lambda: b"")
        self._save = from_rank_0(self._comm, name).decode()
        collective(self._comm, self.what, self._open)

    def _make(self):
        make_folder(self._folder)
        self._lock = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            lock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError("another save to this folder is under way; wait for it, or use another folder") from None
        kept = read_manifest(self._folder)
        if kept is not None:  # what a foreign file or a newer version says must not be lost
            self._clean(unseal(kept, self._folder / MANIFEST))
        self._save = secrets.token_hex(8)
        for number, header in enumerate(self._headers):
            make_file(self._path(FILES[number]), self._sizes[number], header)
        return self._save.encode()

    def _path(self, kind):
        return self._folder / f"{kind}-{self._save}.safetensors"

    def _open(self):
        for number, kind in enumerate(FILES):
            self._fds.append(open_made(self._path(kind), self._sizes[number]))

    def copy(self, sink):
        """Local, but for parameters not stored row-major: this rank's parts, in blocks, to sink(file, offset, memory)."""
        self._table = copy_parts(self._engine, self._comm, [item for items in self._items for item in items], sink)

    def write(self, file, offset, memory):
        """A sink: to the file, and on to the disk without waiting for flush(), which then has little left to wait for."""
        _blocks.write_exactly(self._fds[file], offset, memory)
        # Linux starts to write what is dirty in a range that nobody needs; and memory is for training, not for these pages.
        os.posix_fadvise(self._fds[file], offset, len(memory), os.POSIX_FADV_DONTNEED)

    def tables(self):
        """Where each rank's lines are, and their checksums; makes the table's file."""
        table = self._table
        own = numpy.array([len(table), *checksum(table.tobytes())], numpy.uint64).view(numpy.int64)
        self._parts = self._comm.all_gather(own).reshape(-1, 3).view(numpy.uint64)
        lines = int(self._parts[:, 0].sum())
        header, (start,), size = _blocks.plan_file([("blocks", "uint8", (lines, _blocks.LINE.itemsize))], {})
        first = start + int(self._parts[:self.rank, 0].sum()) * _blocks.LINE.itemsize
        self._sizes.append(size)

        collective(self._comm, self.what, lambda: make_file(self._path("blocks"), size, header) if self.rank == 0 else None)
        return table, first

    def flush(self, table, first):
        """Local: everything this rank has written is on the disk after this."""
        self._fds.append(os.open(self._path("blocks"), os.O_WRONLY | os.O_CLOEXEC))
        _blocks.write_exactly(self._fds[-1], first, table.tobytes())
        for file in self._fds:
            os.fsync(file)

    def publish(self):
        """Rank 0, local: the new manifest takes the place of the old one."""
        files = {kind: {"name": self._path(kind).name, "bytes": size}
                 for kind, size in zip((*FILES, "blocks"), self._sizes, strict=True)}
        for kind, header in zip(FILES, self._headers, strict=True):
            files[kind]["header"] = [len(header), *checksum(header)]
        files["blocks"]["parts"] = self._parts.tolist()
        manifest = {"format": FORMAT, "version": VERSION_OF_FORMAT, "zero_c": VERSION, "files": files,
                    "tensors": self._tensors, **self._about}
        fresh = self._folder / f"{MANIFEST}.new"
        with open(fresh, "wb") as file:
            file.write(seal(manifest))
            file.flush()
            os.fsync(file.fileno())
        os.fsync(self._lock)  # the manifest must not be on the disk before the names that it gives
        os.rename(fresh, self._folder / MANIFEST)
        self._published = True
        os.fsync(self._lock)
        with contextlib.suppress(OSError):  # the next save tries again
            self._clean(manifest)

    def _clean(self, manifest):
        """Removes files of other saves than this manifest's."""
        kept = {entry["name"] for entry in manifest["files"].values()}
        self._remove(lambda name: name not in kept)

    def _remove(self, unwanted):
        for path in self._folder.iterdir():
            if OURS.match(path.name) and unwanted(path.name):
                path.unlink(missing_ok=True)

    def close(self, failed=False):
        """Local: lets go of everything; of a save that failed before the new manifest was in place nothing stays."""
        for file in self._fds:
            _blocks.let_go(file)
        if failed and not self._published and self._lock is not None and hasattr(self, "_save"):
            with contextlib.suppress(OSError):
                for rank in range(1, self._ranks):  # it may yet rename the first to the second: whichever it is, it goes
                    self.promise_path(rank).unlink(missing_ok=True)
                    self.done_path(rank).unlink(missing_ok=True)
                self._remove(lambda name: self._save in name or name == f"{MANIFEST}.new")
        if self._lock is not None:
            unlock(self._lock)
        if self._promised is not None:
            unlock(self._promised)
        self._fds, self._lock, self._promised = [], None, None

    # ---- in the background

    def done_path(self, rank):
        return self._folder / f"done-{self._save}-{rank}"

    def promise_path(self, rank):
        return self._folder / f"done-{self._save}-{rank}.new"

    def promise(self):
        """Collective: from now on a file is locked by each rank but 0, until it has written or is gone."""
        collective(self._comm, self.what, self._promise if self.rank else lambda: None)

    def _promise(self):
        self._promised = os.open(self.promise_path(self.rank), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        lock(self._promised, fcntl.LOCK_EX)

    def tell_done(self, text):
        """Rank 0's thread learns that this rank has written, or why not."""
        _blocks.write_exactly(self._promised, 0, text.encode())
        os.rename(self.promise_path(self.rank), self.done_path(self.rank))

    def wait_done(self, given_up):
        """Rank 0's thread: until all have written, or the sentence of one that could not; CheckpointError if one is not heard of.

        given_up: an event; nobody wants the checkpoint any more.
        """
        end = time.monotonic() + PATIENCE_S
        for rank in range(1, self._ranks):
            path = self.done_path(rank)
            while not path.exists():
                if self._broke_promise(rank) and not path.exists():
                    raise CheckpointError(f"rank {rank} is gone, or could not say that it has written its part")
                if time.monotonic() > end:
                    raise CheckpointError(f"rank {rank} has not written its part {PATIENCE_S:.0f} s after rank 0; it is stopped, or does "
                                          f"not see the folder")
                if given_up.wait(POLL_S):
                    raise CheckpointError(f"rank {rank} had not written its part when the ranks lost one another")
            text = path.read_text()
            if text:
                return text
        return None

    def _broke_promise(self, rank):
        if not self._on_one_host:  # a lock may not reach other hosts
            return False
        try:
            file = os.open(self.promise_path(rank), os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:  # it has been kept
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            _blocks.let_go(file)
        return True


def reserve(file, size):
    """Disk space for the whole file, where the file system can promise it: a full disk is found before anything is written."""
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # not here
            raise
        os.truncate(file, size)


def make_folder(folder):
    """The folder and those around it, where they are missing, on the disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        flush_folder(path.parent)


def flush_folder(folder):
    """The names in a folder are on the disk after this."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        _blocks.let_go(file)


def make_file(path, size, header):
    """A file of this size that was not there before, with its header; none, if that fails."""
    with open(path, "xb") as file:
        try:
            reserve(file.fileno(), size)
            _blocks.write_exactly(file.fileno(), 0, header)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise


def open_made(path, size):
    """A descriptor, for writing, of the file that rank 0 has made under a name that no other file ever had."""
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    if os.fstat(file).st_size != size:
        _blocks.let_go(file)
        raise CheckpointError(f"{path} is not the file that rank 0 made; the folder must be one that all ranks share")
    return file


def start(engine, comm, folder, describe_all, sink_of):
    """Collective: a Saving whose ranks have handed their parts to sink_of(saving), this rank's table, and where that goes."""
    engine.sync("save")  # first of all: a rank may still be in a backward that another took no part in
    saving = collective(comm, f"save to {folder}", lambda: Saving(engine, comm, folder, describe_all))
    done = False
    try:
        saving.begin()
        sink = sink_of(saving)
        collective(comm, saving.what, lambda: saving.copy(sink))
        table, first = saving.tables()
        done = True
    finally:
        if not done:
            saving.close(failed=True)
    return saving, table, first


def save(engine, comm, folder, describe_all):
    """Collective. All ranks return, or raise the same CheckpointError and the folder's checkpoint is the old one; or the new one,
    if no more failed than the last flush of the folder, so that a crash of the machine could bring back the old one.
    """
    saving, table, first = start(engine, comm, folder, describe_all, lambda saving: saving.write)
    done = False
    try:
        collective(comm, saving.what, lambda: saving.flush(table, first))
        collective(comm, saving.what, saving.publish if comm.rank == 0 else lambda: None)
        done = True
    finally:
        saving.close(failed=not done)


class Background:
    """A save whose writing goes on in a thread; made by async_save().

    The thread needs no communicator, and the interpreter waits for it when it ends. An error that no wait() has raised by
    then is told by sys.unraisablehook, which writes it to stderr.
    """

    def __init__(self, engine, comm, folder, describe_all):
        self._engine, self._comm, self._error, self._blocks = engine, comm, None, []
        self._given_up = threading.Event()
        self._unheard = None  # what the end of the interpreter calls
        saving, table, first = start(engine, comm, folder, describe_all, self._begin)
        self._thread = threading.Thread(target=self._run, args=(saving, table, first), name="zero_c save")
        done = False
        try:
            collective(comm, saving.what, self._thread.start)
            done = True
        finally:
            if not done:
                self._given_up.set()
                if self._thread.ident is None:
                    saving.close(failed=True)
                else:
                    self._thread.join()
                self._heard()

    def _begin(self, saving):
        saving.promise()
        return self._keep

    def _keep(self, file, offset, memory):
        self._blocks.append((file, offset, bytes(memory)))

    def _run(self, saving, table, first):
        what = f"{saving.what} in the background, rank {saving.rank}"
        error = None
        try:
            for block in self._blocks:
                saving.write(*block)
            saving.flush(table, first)
        except Exception as failure:
            error = f"{what}: {type(failure).__name__}: {failure}"
        self._blocks = []
        try:
            if saving.rank:
                saving.tell_done(error or "")
            else:
                error = saving.wait_done(self._given_up) if error is None else error
                if error is None:
                    saving.publish()
        except Exception as failure:
            error = error or f"{what}: {failure}"
        if error is not None:
            self._error, self._unheard = error, raiser(error)
            atexit.register(self._unheard)
        saving.close(failed=error is not None)

    def _heard(self):
        if self._unheard is not None:
            atexit.unregister(self._unheard)

    def wait(self):
        """Collective: until the checkpoint is on the disk. CheckpointError on all ranks if it could not be written."""
        try:
            self._engine.sync("wait_saved")
            # Together, so that a rank that is lost meanwhile is missed by all; its own thread may still be busy.
            while self._comm.all_reduce(numpy.array([self._thread.is_alive()], numpy.int64))[0]:
                self._thread.join(POLL_S)
        except BaseException:
            if not self._comm.closed:  # without a communicator threads go on as they would without this call
                self._given_up.set()
            raise
        finally:
            self._thread.join()

        errors = [text.decode() for text in all_texts(self._comm, (self._error or "").encode()) if text]
        self._heard()
        if errors:
            raise CheckpointError(errors[0])


def raiser(text):
    """A function for the end of the interpreter, which reports what its last functions raise and goes on."""

    def save_failed():
        raise CheckpointError(text)

    return save_failed
