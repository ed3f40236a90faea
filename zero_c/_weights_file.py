"""The weights of a model as one safetensors file, written by all ranks; no checkpoint, and nothing here loads it."""

import contextlib
import os
import secrets
from pathlib import Path

from zero_c import _blocks, _saving
from zero_c._checkpoint import collective, from_rank_0, items_of


def save(engine, comm, path, list_entries):
    """Collective: returns on all ranks, or raises the same CheckpointError on all and `path` is what it was; or the new file, if
    no more failed than the flush of its name, so that a crash of the machine could bring back the old one.

    Until it takes the place of `path` the file is beside it, under a name that no other file ever had.
    """
    path, what = Path(path), f"save to {path}"
    made, opened = [], []
    engine.sync("save")

    def prepare():
        items = items_of(list_entries())[0]
        return items, *_saving.plan(items)

    def make():
        fresh = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")
        _saving.make_file(fresh, size, header)
        made.append(fresh)
        return os.fsencode(fresh.name)

    def write():  # together from here on, for parameters that are put together
        _saving.copy_parts(engine, comm, items, lambda _, offset, memory: _blocks.write_exactly(opened[0], offset, memory))
        os.fsync(opened[0])

    def publish():
        os.rename(made[0], path)
        made.clear()
        _saving.flush_folder(path.parent)

    try:
        items, header, size = collective(comm, what, prepare)
        name = os.fsdecode(from_rank_0(comm, collective(comm, what, make if comm.rank == 0 else lambda: b"")))
        collective(comm, what, lambda: opened.append(_saving.open_made(path.with_name(name), size)))
        collective(comm, what, write)
        collective(comm, what, publish if comm.rank == 0 else lambda: None)
    finally:
        for file in opened:
            _blocks.let_go(file)
        for fresh in made:
            with contextlib.suppress(OSError):  # the error that is raised says more
                fresh.unlink()
