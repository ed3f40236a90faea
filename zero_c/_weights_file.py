"""The weights of a model as one safetensors file, written by all ranks; no checkpoint, and nothing here loads it."""

import os
from pathlib import Path

from zero_c import _blocks, _saving
from zero_c._checkpoint import collective, items_of


def save(engine, comm, path, list_entries):
    """Collective: returns on all ranks, or raises the same CheckpointError on all and `path` is what it was."""
    path, what = Path(path), f"save to {path}"
    fresh, opened, done = path.with_name(path.name + ".new"), [], False
    engine.sync("save")

    def prepare():
        items = items_of(list_entries())[0]
        header, size = _saving.plan(items)
        if comm.rank == 0:
            with open(fresh, "wb") as file:
                _saving.reserve(file.fileno(), size)
                _blocks.write_exactly(file.fileno(), 0, header)
        return items

    def write():
        opened.append(os.open(fresh, os.O_WRONLY | os.O_CLOEXEC))
        _saving.copy_parts(engine, comm, items, lambda _, offset, memory: _blocks.write_exactly(opened[0], offset, memory))
        os.fsync(opened[0])

    try:
        items = collective(comm, what, prepare)
        collective(comm, what, write)
        collective(comm, what, lambda: os.rename(fresh, path) if comm.rank == 0 else None)
        done = True
    finally:
        for file in opened:
            os.close(file)
        if not done and comm.rank == 0:
            fresh.unlink(missing_ok=True)
