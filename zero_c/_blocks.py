"""Files of a checkpoint: safetensors that many ranks write at once, and what is known of their bytes.

A safetensors file is eight bytes (the header's length), a JSON header that says of
each tensor its dtype, shape and place, and the tensors without gaps, row-major. So
the place of every element is known before anybody writes, and ranks write where
their parts belong.

What a rank writes in one piece is a block, at most BLOCK_BYTES: the unit of
checksums. The blocks' table (a line for each: file, offset, bytes, two sums) is a
file of its own, in which every rank's lines are together.
"""

import contextlib
import itertools
import json
import math
import os
import struct

import numpy

from zero_c._core import CheckpointError, checksum

BLOCK_BYTES = 1 << 20
HEADER_MOST_BYTES = 100 << 20  # as the safetensors library
# What is read of a tensor: elements from `begin` on, bytes [first, last) of the file, by cut() those from `at` on of a block.
# item, index, role: the caller's.
PIECE = numpy.dtype([(name, "<i8") for name in ("item", "index", "role", "elem_bytes", "begin", "first", "last", "block", "at")])
LINE = numpy.dtype([("file", "<u4"), ("bytes", "<u4"), ("offset", "<u8"), ("sums", "<u8", 2)])

# dtype -> its name in safetensors files, and bytes of an element.
DTYPES = {"float64": ("F64", 8), "float32": ("F32", 4), "float16": ("F16", 2), "bfloat16": ("BF16", 2), "int64": ("I64", 8),
          "int32": ("I32", 4), "int16": ("I16", 2), "int8": ("I8", 1), "uint64": ("U64", 8), "uint32": ("U32", 4),
          "uint16": ("U16", 2), "uint8": ("U8", 1), "bool": ("BOOL", 1)}


def bytes_of(shape, dtype):
    return math.prod(shape) * DTYPES[dtype][1]


def plan_file(tensors, notes):
    """(header, first byte of each tensor, bytes of the file) for (name, dtype, shape) in the order of the file.

    Elements are aligned if larger ones come first.
    """
    header, starts, at = {"__metadata__": notes}, [], 0
    for name, dtype, shape in tensors:
        if name in header:
            raise CheckpointError(f"two tensors are named '{name}' in a file, or it is a name that the format keeps for itself; "
                                  f"give each parameter and buffer a name of its own")
        end = at + bytes_of(shape, dtype)
        header[name] = {"dtype": DTYPES[dtype][0], "shape": list(shape), "data_offsets": [at, end]}
        starts.append(at)
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64)
    return struct.pack("<Q", len(text)) + text, [8 + len(text) + start for start in starts], 8 + len(text) + at


def read_header(file, name):
    """name -> (dtype's name in the file, shape, first byte, end) of an open safetensors file."""
    size = os.fstat(file).st_size
    length = struct.unpack("<Q", read_exactly(file, 0, 8, name))[0] if size >= 8 else size
    if size < 8 or length > min(size - 8, HEADER_MOST_BYTES):
        raise CheckpointError(f"{name}: {size} bytes are no safetensors file; it is damaged or another file")
    try:
        header = json.loads(read_exactly(file, 8, length, name))
        found = {}
        for key, entry in header.items():
            if key != "__metadata__":
                (first, end), shape = entry["data_offsets"], tuple(entry["shape"])
                if not {int}.issuperset(map(type, (first, end, *shape))):
                    raise TypeError("a size is no integer")
                found[key] = entry["dtype"], shape, 8 + length + first, 8 + length + end
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{name}: its header is damaged ({error})") from None
    if any(not 8 + length <= first <= end <= size for _, _, first, end in found.values()):
        raise CheckpointError(f"{name}: {size} bytes are fewer than its header tells of; it was truncated")
    return found


def read_exactly(file, offset, count, name):
    out = bytearray(count)
    read_into(file, offset, memoryview(out), name)
    return out


def read_into(file, offset, view, name):
    """Fills a memoryview of bytes from the file."""
    done = 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], offset + done)
        if not count:
            raise CheckpointError(f"{name}: ends at byte {offset + done}, inside what is to be read; it was truncated")
        done += count


class Writer:
    """Collects what is to be written into blocks and hands each to `sink(file, offset, bytes-like)`.

    The memory that the sink gets is used again when it returns.
    """

    def __init__(self, sink):
        self._sink, self._lines = sink, []
        self._memory = memoryview(bytearray(BLOCK_BYTES))
        self._file, self._offset, self._used = 0, 0, 0

    def room(self, file, offset, count):
        """Memory for `count` bytes, or fewer, that belong there; the caller fills all of it before the next call."""
        if file != self._file or offset != self._offset + self._used or self._used == BLOCK_BYTES:
            self.flush()
            self._file, self._offset = file, offset
        first = self._used
        self._used = min(BLOCK_BYTES, first + count)
        return self._memory[first:self._used]

    def write(self, file, offset, source):
        """Bytes of any length."""
        source = memoryview(source).cast("B")
        while len(source):
            room = self.room(file, offset, len(source))
            room[:] = source[:len(room)]
            offset += len(room)
            source = source[len(room):]

    def flush(self):
        if self._used:
            block = self._memory[:self._used]
            self._lines.append((self._file, self._used, self._offset, checksum(block)))
            self._sink(self._file, self._offset, block)
        self._used = 0

    def table(self):
        """A line for each block so far."""
        self.flush()
        return numpy.array(self._lines, LINE)


def let_go(file):
    """Closes a descriptor. An error there says nothing new: what was written is flushed, or void, and the descriptor is free."""
    with contextlib.suppress(OSError):
        os.close(file)


def write_exactly(file, offset, source):
    done, source = 0, memoryview(source).cast("B")
    while done < len(source):
        done += os.pwrite(file, source[done:], offset + done)


class Blocks:
    """The blocks of a checkpoint's files, by their place.

    files: (descriptor, name, first byte that must be in a block, size); table: lines in any order.
    """

    def __init__(self, files, table, table_name):
        self._files = files
        self._memory = memoryview(bytearray(BLOCK_BYTES))
        self._lines = []
        for number, (_, name, first, size) in enumerate(files):
            lines = table[table["file"] == number]
            lines = lines[numpy.argsort(lines["offset"])]
            ends = lines["offset"] + lines["bytes"]
            wanted = numpy.concatenate([[first], ends]).astype(numpy.uint64)
            if (lines["bytes"] > BLOCK_BYTES).any() or not numpy.array_equal(wanted[:-1], lines["offset"]) or wanted[-1] != size:
                raise CheckpointError(f"{table_name}: its blocks do not cover {name}; one of the two is damaged or of another save")
            self._lines.append(lines)
        if len(table) != sum(map(len, self._lines)):
            raise CheckpointError(f"{table_name}: names files that this checkpoint has not; it is damaged")

    def cut(self, number, pieces):
        """Of PIECEs of a file, ascending: one for each block that has some of it, with its place in the block. CheckpointError
        if a block ends inside an element.
        """
        offsets = self._lines[number]["offset"].astype(numpy.int64)
        ends = offsets + self._lines[number]["bytes"]
        from_block = numpy.searchsorted(offsets, pieces["first"], "right") - 1
        counts = numpy.searchsorted(offsets, pieces["last"], "left") - from_block
        found = numpy.repeat(pieces, counts)
        found["block"] = numpy.arange(len(found)) + numpy.repeat(from_block - (counts.cumsum() - counts), counts)
        first = numpy.maximum(found["first"], offsets[found["block"]])
        before = first - found["first"]
        if (before % found["elem_bytes"]).any():
            raise CheckpointError(f"{self._files[number][1]}: a block ends inside an element; zero_c does not write such blocks")
        found["begin"] += before // found["elem_bytes"]
        found["first"], found["last"] = first, numpy.minimum(found["last"], ends[found["block"]])
        found["at"] = first - offsets[found["block"]]
        return found

    def read(self, number, pieces, names):
        """(memory, begin, stop) of each block that has some of the pieces of a file, in the order of the file: it has
        pieces[begin:stop]. CheckpointError if one is not as it was written. The memory is used again by the next block.

        pieces: of cut(); names: of their items.
        """
        file, name = self._files[number][:2]
        lines = self._lines[number]
        begins = numpy.flatnonzero(numpy.diff(pieces["block"], prepend=-1)).tolist()
        for begin, stop in itertools.pairwise([*begins, len(pieces)]):
            line = lines[pieces["block"][begin]]
            offset, end = int(line["offset"]), int(line["offset"]) + int(line["bytes"])
            view = self._memory[:end - offset]
            read_into(file, offset, view, name)
            if checksum(view) != tuple(line["sums"].tolist()):
                first, last = names[pieces["item"][begin]], names[pieces["item"][stop - 1]]
                where = f"tensor '{first}'" if first == last else f"tensors '{first}' to '{last}'"
                raise CheckpointError(f"{name}: bytes {offset} to {end} are not what was written ({where}); the file is damaged")
            yield view, begin, stop
