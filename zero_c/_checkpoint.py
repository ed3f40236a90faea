"""Checkpoints: a folder that any number of ranks, at any stage, loads.

    zero_c.json                     the manifest: what there is, and in which files
    weights-<save>.safetensors      parameters and buffers, by name, whole and row-major
    state-<save>.safetensors        "exp_avg/<name>", "master/<name>", ..., the same
    blocks-<save>.safetensors       the table of checksums (_blocks.py)

Tensors are whole, not cut by ranks, because that is what makes a checkpoint
independent of them, and the weights a file that any program loads. All ranks write
the same files, each its own parts (Engine.parts: every element belongs to one rank,
at every stage) at their places, so nothing is gathered and no rank holds more than
one block besides its shards. The folder must be one that all ranks see. (A parameter
that is not stored row-major, as in channels_last models, is put together and written
by rank 0.)

A save
  1. The ranks meet. Rank 0 locks the folder, makes the files at full size under a
     name that no other save has, and tells it to the others.
  2. Each rank writes its parts, and its lines of the table; all flush.
  3. When all have done so rank 0 writes the manifest beside the old one and renames
     it. That is the moment at which the new checkpoint replaces the old one.
  4. Files that the manifest does not name are removed.
Whatever happens before 3, the old checkpoint is whole. In a save in the background
(async_save) ranks copy their parts in 2, and the rest is done by a thread of each: they
tell rank 0's thread by files `done-<save>-<rank>` that they have written, because the
communicator belongs to training. Until then each keeps a file of that name and `.new`
locked: on one host a lock that nobody holds tells rank 0's thread that the rank is gone.

A load reads the manifest on rank 0, compares it with what is there on all ranks, then
reads every block that it needs and checks it, and only when all ranks have found all
well does it read again, into the shards, and check that too: a block that has changed
meanwhile makes the load half done, which the error says. Keeping what is overwritten, to
read once, would cost more: fresh memory is slower than the page cache.

After each step the ranks tell one another whether they could do it (collective()):
all raise the same error or none does.
"""

import json
import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from reprlib import repr as shown  # short, whatever a file holds

import numpy

from zero_c import _blocks, _options
from zero_c._core import CheckpointError, CommError, checksum
from zero_c._version import VERSION

MANIFEST = "zero_c.json"
FORMAT, VERSION_OF_FORMAT = "zero_c checkpoint", 1
MANIFEST_MOST_BYTES = 1 << 30
FILES = ("weights", "state")
# Names in the folder, besides the manifest's, that are ours to write and remove.
OURS = re.compile(r"(?:(?:weights|state|blocks)-[0-9a-f]{16}\.safetensors|done-[0-9a-f]{16}-\d+(?:\.new)?|zero_c\.json\.new)\Z")
ROLES = ("master", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer")


@dataclass
class Entry:
    """One tensor of a model. `index`: in the engine; otherwise `values`, which gives an array, rank 0's of which is saved."""

    name: str
    kind: str  # "parameter": trained; "frozen"; "buffer"
    dtype: str
    shape: tuple
    index: int | None = None
    strides: tuple | None = None  # of the engine's storage order, in elements; None: row-major
    group: int | None = None
    roles: tuple = ()
    aliases: tuple = ()
    values: object = None
    store: object = None  # called with the loaded array, where there are `values`


@dataclass
class Item:
    """A tensor of a file."""

    entry: Entry
    role: str  # "weight", or one of ROLES
    file: int
    dtype: str
    offset: int = 0
    name: str = field(init=False)

    def __post_init__(self):
        self.name = self.entry.name if self.role == "weight" else f"{self.role}/{self.entry.name}"
        self.elem_bytes = _blocks.DTYPES[self.dtype][1]
        self.bytes = _blocks.bytes_of(self.entry.shape, self.dtype)


def items_of(entries):
    """All tensors of both files, in their order: large elements first, and as neighbours those that are neighbours in a shard."""
    ordered = sorted((entry for entry in entries if entry.index is not None), key=lambda entry: -entry.index)
    ordered += [entry for entry in entries if entry.index is None]
    weights = [Item(entry, "weight", 0, entry.dtype) for entry in ordered]
    state = [Item(entry, role, 1, "float64" if entry.dtype == "float64" else "float32")
             for role in ROLES for entry in ordered if role in entry.roles]
    return [sorted(items, key=lambda item: -item.elem_bytes) for items in (weights, state)]


# ---- together ------------------------------------------------------------------


def collective(comm, what, call):
    """call() on every rank; its result, or on all ranks the error of the first rank on which it raised."""
    result, text = None, b""
    try:
        result = call()
    except CommError:
        raise
    except Exception as error:
        kept = error
        kind = "" if isinstance(error, CheckpointError) else f"{type(error).__name__}: "
        text = f"{what}, rank {comm.rank}: {kind}{error}".encode(errors="replace")
    for rank, other in enumerate(all_texts(comm, text)):
        if other:
            raise CheckpointError(other.decode()) from (kept if rank == comm.rank else None)
    return result


def from_rank_0(comm, data):
    """Rank 0's bytes, on every rank."""
    length = numpy.array([len(data) if comm.rank == 0 else 0], numpy.int64)
    comm.broadcast(length, 0)
    array = numpy.zeros(int(length[0]), numpy.uint8)
    if comm.rank == 0:
        array[:] = numpy.frombuffer(data, numpy.uint8)
    if len(array):
        comm.broadcast(array, 0)
    return array.tobytes()


def all_texts(comm, text):
    """The bytes that each rank gives, on every rank. Collective."""
    lengths = comm.all_gather(numpy.array([len(text)], numpy.int64)).reshape(-1)
    if not lengths.any():
        return [b""] * comm.world_size
    padded = numpy.zeros(int(lengths.max()), numpy.uint8)
    padded[:len(text)] = numpy.frombuffer(text, numpy.uint8)
    rows = comm.all_gather(padded).reshape(comm.world_size, -1)
    return [bytes(row[:length]) for row, length in zip(rows, lengths, strict=True)]


# ---- the manifest --------------------------------------------------------------


def seal(manifest):
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return json.dumps({"sums": checksum(text.encode()), "manifest": manifest}, sort_keys=True).encode()


def told(value):
    """A value of a manifest, for a sentence."""
    return value[:80] if isinstance(value, str) else shown(value)


def unseal(data, path):
    """The manifest in a file's bytes."""
    try:
        whole = json.loads(data)
        manifest = whole["manifest"]
        text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
        sums, kind, version = whole["sums"], manifest["format"], manifest["version"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged, or no manifest of zero_c ({type(error).__name__}: {error})") from None
    if kind != FORMAT:
        raise CheckpointError(f"{path} is the manifest of a {shown(kind)}, not of a {FORMAT!r}")
    if version != VERSION_OF_FORMAT:
        raise CheckpointError(f"{path} has format version {shown(version)}; this version of zero_c ({VERSION}) reads "
                              f"{VERSION_OF_FORMAT}; load it with the version that wrote it ({shown(manifest.get('zero_c'))}) or a newer one")
    if list(checksum(text.encode())) != sums:
        raise CheckpointError(f"{path} is damaged: its checksum is not that of what it says")
    return manifest


def read_manifest(folder):
    """The sealed bytes; None if there is none."""
    path = folder / MANIFEST
    try:
        if path.stat().st_size > MANIFEST_MOST_BYTES:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes; a manifest has less than {MANIFEST_MOST_BYTES}")
        return path.read_bytes()
    except FileNotFoundError:
        return None


def has_checkpoint(path):
    """Whether a save to this folder has ended: whether there is something for load(), which then checks it.

    Each rank looks for itself, and no rank should be saving. What an interrupted first save left is no checkpoint.
    """
    try:
        os.stat(Path(path) / MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


# ---- the optimizer ---------------------------------------------------------------


def about(optimizer, groups, loss_scale, steps, stage, comm):
    """What the manifest says besides tensors and files; groups: (options, number of parameters) of each."""
    packed = [{"options": {key: plain(value, f"group {number}: '{key}'") for key, value in options.items()}, "parameters": count}
              for number, (options, count) in enumerate(groups)]
    return {"optimizer": optimizer, "groups": packed, "loss_scale": loss_scale, "steps": steps,
            "made_by": {"ranks": comm.world_size, "stage": stage, "deterministic": comm.deterministic}}


def plain(value, what):
    """What JSON can hold."""
    if hasattr(value, "item") and math.prod(getattr(value, "shape", (0,))) == 1:
        value = value.item()
    if isinstance(value, (list, tuple)):
        return [plain(item, what) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: plain(item, what) for key, item in value.items()}
    if not isinstance(value, (bool, int, float, str, type(None))):
        raise TypeError(f"{what} is a {type(value).__name__}; a checkpoint holds numbers, texts, lists and dicts of groups: take it "
                        f"out of the group before saving")
    return value


def like(value, old):
    """A loaded value as the group has it now."""
    return tuple(value) if isinstance(old, tuple) and isinstance(value, list) else value


def options_of(manifest, optimizer, groups, like, path):
    """The saved options of each group, in whose types the groups have them; CheckpointError if the groups are others."""
    if manifest["optimizer"] != optimizer:
        raise CheckpointError(f"{path} is of the optimizer {shown(manifest['optimizer'])}, and here is '{optimizer}'")
    if len(manifest["groups"]) != len(groups):
        raise CheckpointError(f"{path} has {len(manifest['groups'])} parameter groups, the optimizer has {len(groups)}")
    loaded = []
    for number, (saved, group) in enumerate(zip(manifest["groups"], groups, strict=True)):
        if saved["parameters"] != len(group["params"]):
            raise CheckpointError(f"{path}: group {number} has {saved['parameters']} parameters in the checkpoint and "
                                  f"{len(group['params'])} here")
        missing = _options.DEFAULTS[optimizer].keys() - saved["options"].keys()
        if missing:
            raise CheckpointError(f"{path}: group {number} has no '{min(missing)}'; zero_c does not write such a manifest")
        options = {key: like(value, group.get(key)) for key, value in saved["options"].items()}
        _options.to_core(optimizer, {**group, **options})
        loaded.append(options)
    return loaded


# ---- values that are not stored row-major --------------------------------------


def numpy_dtype(dtype):
    """What holds the elements in NumPy."""
    return numpy.dtype("uint16" if dtype == "bfloat16" else dtype)


def shaped(flat, entry):
    """A view of values in storage order, as the parameter has them."""
    return numpy.lib.stride_tricks.as_strided(flat, entry.shape, [stride * flat.itemsize for stride in entry.strides])


def stored(values, entry):
    """Values in storage order."""
    flat = numpy.empty(values.size, values.dtype)
    shaped(flat, entry)[...] = values
    return flat
