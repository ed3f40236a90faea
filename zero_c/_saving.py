"""Saving: _checkpoint.py has the protocol."""

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
    collective,
    from_rank_0,
    items_of,
    read_manifest,
    seal,
    shaped,
    unseal,
)
from zero_c._core import CheckpointError, checksum
from zero_c._version import VERSION

POLL_S = 0.05
PATIENCE_S = 600.0  # rank 0's thread waits this long for others that live, after its own part
DONE = b"+"  # in a rank's word; anything else is what went wrong

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
    fcntl.flock(file, fcntl.LOCK_UN)  # a process that C code forked has the descriptor too
    os.close(file)


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

    An error of the sink is raised at the end: until then peers may need this rank, for parameters that are put together.
    """
    failed = []

    def careful(*block):
        try:
            if not failed:
                sink(*block)
        except OSError as error:
            failed.append(error)

    writer = _blocks.Writer(careful)
    for item in items:
        if item.entry.index is None:
            whole = item.entry.values() if comm.rank == 0 else None
        elif item.entry.strides is None:
            copy_own(engine, item, writer)
            continue
        else:
            index = item.entry.index
            whole = shaped(engine.fetch(index) if item.role == "weight" else engine.read(index, item.role), item.entry)
        if comm.rank == 0:
            writer.write(item.file, item.offset, numpy.ascontiguousarray(whole).reshape(-1).view(numpy.uint8))
    table = writer.table()
    if failed:
        raise failed[0]
    return table


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
        self._lock, self._fds, self._published, self._word = None, [], False, None
        planned = [plan(items) for items in self._items]
        self._headers, self._sizes = ([part[k] for part in planned] for k in (0, 1))

    def begin(self):
        """Files at full size, open on every rank."""
        name = collective(self._comm, self.what, self._make if self._comm.rank == 0 else lambda: b"")
        self._save = from_rank_0(self._comm, name).decode()
        collective(self._comm, self.what, self._open)

    def _make(self):
        self._folder.mkdir(parents=True, exist_ok=True)
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
            with open(self._path(FILES[number]), "xb") as file:
                reserve(file.fileno(), self._sizes[number])
                _blocks.write_exactly(file.fileno(), 0, header)
        return self._save.encode()

    def _path(self, kind):
        return self._folder / f"{kind}-{self._save}.safetensors"

    def _open(self):
        for number, kind in enumerate(FILES):
            self._fds.append(os.open(self._path(kind), os.O_WRONLY | os.O_CLOEXEC))
            if os.fstat(self._fds[number]).st_size != self._sizes[number]:
                raise CheckpointError(f"{self._path(kind)} is not the file that rank 0 made; the folder must be one that all "
                                      f"ranks share")

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
        first = start + int(self._parts[:self._comm.rank, 0].sum()) * _blocks.LINE.itemsize
        self._sizes.append(size)

        def make():
            with open(self._path("blocks"), "xb") as file:
                reserve(file.fileno(), size)
                _blocks.write_exactly(file.fileno(), 0, header)

        collective(self._comm, self.what, make if self._comm.rank == 0 else lambda: None)
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
            os.close(file)
        if failed and not self._published and self._lock is not None and hasattr(self, "_save"):
            with contextlib.suppress(OSError):
                self._remove(lambda name: self._save in name or name == f"{MANIFEST}.new")
        if self._lock is not None:
            unlock(self._lock)
        self._drop_word()
        self._fds, self._lock = [], None

    # ---- in the background

    def _word_path(self, rank):
        return self._folder / f"word-{self._save}-{rank}"

    def give_word(self):
        """Local: a file whose lock is held until this rank has written its part, or has ended, however it ended."""
        self._word = os.open(self._word_path(self._comm.rank), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC)
        lock(self._word, fcntl.LOCK_EX)

    def keep_word(self, error):
        """Rank 0's thread learns that this rank has written (None), or why not."""
        _blocks.write_exactly(self._word, 0, DONE if error is None else error.encode())
        self._drop_word()

    def _drop_word(self):
        if self._word is not None:
            unlock(self._word)
        self._word = None

    def wait_for_words(self):
        """Rank 0's thread: until all have written; CheckpointError with the sentence of one that could not, or of its end."""
        end = time.monotonic() + PATIENCE_S
        for rank in range(1, self._comm.world_size):
            with open(self._word_path(rank), "rb") as file:
                while not is_free(file):
                    if time.monotonic() > end:
                        raise CheckpointError(f"rank {rank}, or a process that it has started, lives and has not written its part "
                                              f"{PATIENCE_S:.0f} s after rank 0")
                    time.sleep(POLL_S)
                word = file.read()
            if not word:
                raise CheckpointError(f"rank {rank} ended before it had written its part; the checkpoint is the previous one")
            if word != DONE:
                raise CheckpointError(word.decode(errors="replace"))


def is_free(file):
    """Whether nobody holds a file's lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def reserve(file, size):
    """Disk space for the whole file, where the file system can promise it: a full disk is found before anything is written."""
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # not here
            raise
        os.truncate(file, size)


def start(engine, comm, folder, describe_all, sink_of):
    """Collective: a Saving whose ranks have handed their parts to sink_of(saving), this rank's table, and where that goes."""
    engine.sync("save")  # first of all: a rank may still be in a backward that another took no part in
    saving = collective(comm, f"save to {folder}", lambda: Saving(engine, comm, folder, describe_all))
    done = False
    try:
        saving.begin()
        collective(comm, saving.what, lambda: saving.copy(sink_of(saving)))
        table, first = saving.tables()
        done = True
    finally:
        if not done:
            saving.close(failed=True)
    return saving, table, first


def save(engine, comm, folder, describe_all):
    """Collective. All ranks return, or raise the same CheckpointError and the folder's checkpoint is the old one."""
    saving, table, first = start(engine, comm, folder, describe_all, lambda saving: saving.write)
    done = False
    try:
        collective(comm, saving.what, lambda: saving.flush(table, first))
        collective(comm, saving.what, saving.publish if comm.rank == 0 else lambda: None)
        done = True
    finally:
        saving.close(failed=not done)


class Background:
    """A save whose writing goes on in a thread; made by async_save()."""

    def __init__(self, engine, comm, folder, describe_all):
        self._engine, self._comm, self._error, self._blocks = engine, comm, None, []
        saving, table, first = start(engine, comm, folder, describe_all, lambda saving: self._keep)
        given = False
        try:
            collective(comm, saving.what, saving.give_word if comm.rank else lambda: None)
            given = True
        finally:
            if not given:
                saving.close(failed=True)
        self._thread = threading.Thread(target=self._run, args=(saving, table, first), name="zero_c save")
        self._thread.start()

    def _keep(self, file, offset, memory):
        self._blocks.append((file, offset, bytes(memory)))

    def _run(self, saving, table, first):
        rank = self._comm.rank
        try:
            for block in self._blocks:
                saving.write(*block)
            saving.flush(table, first)
        except Exception as error:
            self._error = f"{saving.what}, rank {rank}: {type(error).__name__}: {error}"
        self._blocks = []
        try:
            if rank:
                saving.keep_word(self._error)
            else:
                saving.wait_for_words()
                if self._error is None:
                    saving.publish()
        except Exception as error:
            self._error = self._error or f"{saving.what}, rank {rank}: {error}"
        saving.close(failed=self._error is not None)

    def wait(self):
        """Collective: until the checkpoint is on the disk. CheckpointError on all ranks if it could not be written."""
        self._thread.join()
        self._engine.sync("wait_saved")

        def outcome():
            if self._error is not None:
                raise CheckpointError(self._error)

        collective(self._comm, "save in the background", outcome)
