"""Loading: _checkpoint.py has the protocol."""

import os
import sys
from pathlib import Path

import numpy

from zero_c import _blocks
from zero_c._checkpoint import (
    FILES,
    MANIFEST,
    OURS,
    ROLES,
    collective,
    from_rank_0,
    items_of,
    numpy_dtype,
    options_of,
    read_manifest,
    shaped,
    stored,
    told,
    unseal,
)
from zero_c._core import CheckpointError, checksum

TAKEN = ("weight", *ROLES)


class Loading:
    """One load, on one rank."""

    def __init__(self, engine, comm, folder, everywhere):
        """everywhere: this rank keeps the state of all elements (stage 0)."""
        self._engine, self._comm, self._folder, self._everywhere = engine, comm, Path(folder), everywhere
        self.path = self._folder / MANIFEST
        self._fds, self._parts = [], {}

    def read(self):
        """The manifest: rank 0's, on every rank. Collective."""
        what = f"load from {self._folder}"

        def read():
            data = read_manifest(self._folder)
            if data is None:
                raise CheckpointError(f"there is no {MANIFEST} in {self._folder}; it is no checkpoint, or one whose first save "
                                      f"was interrupted")
            return data

        data = collective(self._comm, what, read if self._comm.rank == 0 else lambda: b"")
        data = from_rank_0(self._comm, data)

        def understood():
            manifest = unseal(data, self.path)
            check_form(manifest, self.path)
            return manifest

        return collective(self._comm, what, understood)

    def check(self, manifest, entries):
        """Local: everything is there, fits `entries`, and what this rank needs is as it was written."""
        self._entries = entries
        compare(manifest["tensors"], self._entries, self.path)
        self._saved = {tensor["name"]: tensor for tensor in manifest["tensors"]}
        self._items = items_of(self._entries)
        opened = []
        for number, kind in enumerate(FILES):
            opened.append(self._open(manifest["files"][kind]))
            check_header(*opened[number], *manifest["files"][kind]["header"])
            self._place(self._items[number], *opened[number])
        first_bytes = [min([item.offset for item in items], default=size)
                       for items, (_, _, size) in zip(self._items, opened, strict=True)]
        table_file, table_name, size = self._open(manifest["files"]["blocks"])
        self._blocks = _blocks.Blocks([(file, name, first, size) for (file, name, size), first in zip(opened, first_bytes, strict=True)],
                                      read_table(table_file, table_name, manifest["files"]["blocks"]["parts"]), table_name)
        self._pieces = [self._blocks.cut(number, self._list_pieces(items)) for number, items in enumerate(self._items)]
        for number in range(len(FILES)):
            for _ in self._read(number):
                pass

    def _read(self, number):
        return self._blocks.read(number, self._pieces[number], [item.name for item in self._items[number]])

    def _open(self, about):
        path = self._folder / about["name"]
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._fds.append(file)
        size = os.fstat(file).st_size
        if size != about["bytes"]:
            raise CheckpointError(f"{path} has {size} bytes and had {about['bytes']} when it was written; it was truncated or replaced")
        return file, str(path), size

    def _place(self, items, file, name, _):
        header = _blocks.read_header(file, name)
        for item in items:
            if item.name not in header:
                raise CheckpointError(f"{name} has no tensor '{item.name}'; it is damaged")
            dtype, shape, item.offset, end = header[item.name]
            if (dtype, shape, end - item.offset) != (_blocks.DTYPES[item.dtype][0], tuple(item.entry.shape), item.bytes):
                raise CheckpointError(f"{name}: tensor '{item.name}' is {dtype} {shape}, and the manifest says {item.dtype} "
                                      f"{tuple(item.entry.shape)}; the file is damaged or of another save")
        places = sorted((item.offset, item.offset + item.bytes) for item in items)
        if any(end > first for (_, end), (first, _) in zip(places, places[1:])):
            raise CheckpointError(f"{name}: two tensors share bytes; zero_c does not write such files")

    def _list_pieces(self, items):
        """What this rank reads of a file, in its order, which is that of the engine that wrote it.

        Of a piece, index: in the engine, or -1 for what is put together before it goes to its place; role: in TAKEN.
        """
        found = []
        for number, item in enumerate(items):
            index = item.entry.index if item.entry.strides is None else None
            for begin, end in self._wanted(item):
                first = item.offset + begin * item.elem_bytes
                found.append((number, -1 if index is None else index, TAKEN.index(item.role), item.elem_bytes, begin, first,
                              first + (end - begin) * item.elem_bytes, 0, 0))
        pieces = numpy.array(found, _blocks.PIECE)
        return pieces[numpy.argsort(pieces["first"])]

    def _wanted(self, item):
        """Elements of a tensor that this rank reads, as ranges."""
        entry = item.entry
        elems = item.bytes // item.elem_bytes
        if entry.index is None or entry.strides is not None or (self._everywhere and item.role != "weight"):
            return [(0, elems)] if elems else []
        if entry.index not in self._parts:
            self._parts[entry.index] = self._engine.parts(entry.index)
        return self._parts[entry.index]

    def apply(self):
        """Local, but for the weights coming together: everything takes its saved values."""
        for number, items in enumerate(self._items):
            self._whole = {}  # name -> the bytes that are there, of those that come in one piece
            pieces = self._pieces[number]
            lines = numpy.stack([pieces["index"], pieces["begin"], pieces["begin"] + (pieces["last"] - pieces["first"]) // pieces["elem_bytes"],
                                 pieces["at"]], axis=1)
            # Those that follow one another and are of one role and one block go to their places together.
            runs = numpy.flatnonzero(numpy.diff(pieces["role"]) | numpy.diff(pieces["index"] < 0)) + 1
            for block, begin, stop in self._read(number):
                cuts = runs[slice(*numpy.searchsorted(runs, (begin + 1, stop)))].tolist()
                for first, last in zip([begin, *cuts], [*cuts, stop], strict=True):
                    if pieces["index"][first] >= 0:
                        self._engine.write_parts(TAKEN[pieces["role"][first]], lines[first:last], block)
                    else:
                        for piece in pieces[first:last]:
                            self._take_whole(items[piece["item"]], piece, block)
        for entry in self._entries:
            if entry.kind == "parameter":
                saved = self._saved[entry.name]
                self._engine.set_step_count(entry.index, saved["steps"], saved["has_momentum"])

    def _take_whole(self, item, piece, block):
        whole = self._whole.setdefault(item.name, bytearray(item.bytes))
        begin, end, at = int(piece["first"]) - item.offset, int(piece["last"]) - item.offset, int(piece["at"])
        whole[begin:end] = block[at:at + end - begin]
        if end < item.bytes:
            return
        values = numpy.frombuffer(self._whole.pop(item.name), numpy_dtype(item.dtype)).reshape(item.entry.shape)
        if item.entry.index is None:
            item.entry.store(values)
        else:
            self._write_whole(item, values)

    def _write_whole(self, item, values):
        flat = stored(values, item.entry)
        ranges = self._engine.parts(item.entry.index) if item.role == "weight" else [(0, len(flat))]
        lines = [(item.entry.index, begin, end, begin * item.elem_bytes) for begin, end in ranges]
        self._engine.write_parts(item.role, numpy.array(lines, numpy.int64), flat.view(numpy.uint8))

    def close(self):
        for file in self._fds:
            _blocks.let_go(file)
        self._fds = []


def load(engine, comm, folder, everywhere, groups, optimizer, like, list_entries, core_groups):
    """Collective: the manifest, after everything in the engine, the groups and the entries' own arrays has its values.

    groups: dicts, which get the saved options; list_entries() -> entries, as these options make them; core_groups() -> the
    options for the engine; like(value, old) -> a saved option in the type of the one that is there.
    """
    what = f"load from {folder}"
    engine.sync("load")
    loading = Loading(engine, comm, folder, everywhere)
    old = [dict(group) for group in groups]
    try:
        manifest = loading.read()

        def check():
            try:
                loaded = options_of(manifest, optimizer, groups, like, loading.path)
            except CheckpointError:
                compare_names(manifest["tensors"], list_entries(), loading.path)  # a missing name says more than a count
                raise
            for group, options in zip(groups, loaded, strict=True):
                group.update(options)
            loading.check(manifest, list_entries())

        try:
            collective(comm, what, check)
            collective(comm, what, lambda: engine.prepare(core_groups()))
        except BaseException:
            for group, options in zip(groups, old, strict=True):
                group.clear()
                group.update(options)
            raise
        collective(comm, f"{what}, which is half done (the model is undefined until another load)", loading.apply)
        engine.spread()
        return manifest
    finally:
        loading.close()


def is_count(value):
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def are_sums(values, count):
    """A list of this many 64-bit numbers, the first of which counts something."""
    return (isinstance(values, list) and len(values) == count and is_count(values[0])
            and all(isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 64 for value in values))


def is_texts(values):
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def check_form(manifest, path):
    """CheckpointError unless all that is read of a manifest is there and can be used: right sums do not make it zero_c's."""

    def need(fits, what):
        if not fits:
            raise CheckpointError(f"{path}: {what}; zero_c does not write such a manifest")

    def named(value, kind):
        return isinstance(value, str) and OURS.match(value) and value.startswith(f"{kind}-")

    for key, kind in (("files", dict), ("tensors", list), ("groups", list), ("loss_scale", dict), ("optimizer", str)):
        need(isinstance(manifest.get(key), kind), f"'{key}' is missing or no {kind.__name__}")
    for kind in (*FILES, "blocks"):
        file = manifest["files"].get(kind)
        need(isinstance(file, dict) and named(file.get("name"), kind) and is_count(file.get("bytes")),
             f"the '{kind}' file has no name or size")
        need(kind not in FILES or are_sums(file.get("header"), 3), f"the '{kind}' file has no header")
    parts = manifest["files"]["blocks"].get("parts")
    need(isinstance(parts, list) and all(are_sums(part, 3) for part in parts), "the blocks of the ranks are not told")
    for number, tensor in enumerate(manifest["tensors"]):
        need(isinstance(tensor, dict) and isinstance(tensor.get("name"), str) and is_texts(tensor.get("roles"))
             and {"kind", "dtype", "shape", "group"} <= tensor.keys() and is_count(tensor.get("steps"))
             and isinstance(tensor.get("has_momentum"), bool), f"tensor {number} is not described")
    names = [tensor["name"] for tensor in manifest["tensors"]]
    need(len(set(names)) == len(names), "a tensor is described twice")
    for number, group in enumerate(manifest["groups"]):
        need(isinstance(group, dict) and isinstance(group.get("options"), dict) and is_count(group.get("parameters"))
             and not {"params", "param_names"} & group["options"].keys(), f"group {number} is not described")
    scale = manifest["loss_scale"]
    # True is an int, and no scale.
    need(type(scale.get("value")) in (int, float) and 0 < scale["value"] <= sys.float_info.max and is_count(scale.get("good"))
         and is_count(scale.get("floored")) and isinstance(scale.get("dynamic"), bool), "the loss scale is not told")
    need(is_count(manifest.get("steps")), "the number of steps is not told")


def check_header(file, name, size, header_bytes, *sums):
    fits = header_bytes <= min(size, 8 + _blocks.HEADER_MOST_BYTES)
    if not fits or checksum(_blocks.read_exactly(file, 0, header_bytes, name)) != sums:
        raise CheckpointError(f"{name}: its header is not what was written; the file is damaged")


def read_table(file, name, parts):
    """The lines of all ranks, each rank's checked by what the manifest says of it."""
    header = _blocks.read_header(file, name)
    lines = sum(int(count) for count, *_ in parts)
    if header.get("blocks", (None,) * 4)[:2] != ("U8", (lines, _blocks.LINE.itemsize)):
        raise CheckpointError(f"{name} is not the table of {lines} blocks that the manifest says; it is damaged or of another save")
    _, _, first, end = header["blocks"]
    data = _blocks.read_exactly(file, first, end - first, name)
    at = 0
    for rank, (count, *sums) in enumerate(parts):
        own = memoryview(data)[at:at + count * _blocks.LINE.itemsize]
        if list(checksum(own)) != sums:
            raise CheckpointError(f"{name}: the lines of rank {rank} are not what was written; the file is damaged")
        at += len(own)
    return numpy.frombuffer(data, _blocks.LINE)


def compare_names(saved, entries, path):
    """CheckpointError names the first tensor that only one side has."""
    names = {tensor["name"]: None for tensor in saved}  # in their order
    for entry in entries:
        if entry.name not in names:
            raise CheckpointError(f"{path}: {entry.kind} '{entry.name}' is not in the checkpoint; it is one of another model")
        del names[entry.name]
    if names:
        raise CheckpointError(f"{path}: the checkpoint has '{next(iter(names))}', which the model here has not")


def compare(saved, entries, path):
    """CheckpointError names the first tensor that is saved otherwise than it is here."""
    compare_names(saved, entries, path)
    by_name = {tensor["name"]: tensor for tensor in saved}
    for entry in entries:
        tensor = by_name[entry.name]
        for key, here in (("kind", entry.kind), ("dtype", entry.dtype), ("shape", list(entry.shape)), ("group", entry.group)):
            if tensor[key] != here:
                raise CheckpointError(f"{path}: '{entry.name}' has {key} {told(tensor[key])} in the checkpoint and {here} here; build the "
                                      f"model and the optimizer as they were saved")
        if tensor["roles"] != list(entry.roles):
            raise CheckpointError(f"{path}: '{entry.name}' has {', '.join(tensor['roles']) or 'no state'} in the checkpoint, and "
                                  f"{', '.join(entry.roles) or 'none'} is needed here; use the same optimizer")
