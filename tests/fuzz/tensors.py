"""The headers of a checkpoint's safetensors files, and its table of blocks (zero_c._blocks, zero_c._loading).

An input is which file, and what is wrong: in its header, in the table's lines, or some bytes anywhere; the manifest has
the checksums and sizes of what is there, as somebody would have made it who wants it to be read.

    a load brings back what was saved, or raises CheckpointError, and then nothing has changed
"""

import copy
import json
import struct

import numpy

from checkpoint import Saved
from choices import Choices
from zero_c import _blocks, _checkpoint
from zero_c._core import checksum

SAVED = Saved()
KINDS = (*_checkpoint.FILES, "blocks")
NUMBERS = [0, 1, 63, 64, 2**20, 2**20 + 1, 2**31, 2**32 - 1, 2**53, 2**63, 2**64 - 1]


def parts_of(whole):
    length, = struct.unpack("<Q", whole[:8])
    return json.loads(whole[8:8 + length]), bytearray(whole[8 + length:])


def edited_lines(choices, data):
    """The table, with some lines others, gone, or there twice."""
    lines = numpy.frombuffer(data, _blocks.LINE).copy()
    for _ in range(choices.below(4)):
        at, what = choices.below(len(lines)), choices.below(6)
        if what == 0 and len(lines) > 1:
            lines = numpy.delete(lines, at)
        elif what == 1:
            lines = numpy.append(lines, lines[at:at + 1])
        else:
            field = choices.pick(["file", "bytes", "offset"])
            most = numpy.iinfo(lines.dtype[field]).max
            lines[field][at] = min(most, choices.pick(NUMBERS) if choices.below(2) else int(lines[field][at]) + choices.below(128))
    return bytearray(lines.tobytes())


def one_input(data):
    choices = Choices(data)
    kind = choices.pick(KINDS)
    manifest = copy.deepcopy(SAVED.manifest)
    file = manifest["files"][kind]
    header, body = parts_of(SAVED.bytes[file["name"]])
    if kind == "blocks" and choices.below(2):
        body = edited_lines(choices, body)
        entry = header["blocks"]
        if choices.below(4):
            entry["shape"], entry["data_offsets"] = [len(body) // _blocks.LINE.itemsize, _blocks.LINE.itemsize], [0, len(body)]
    else:
        header = choices.edited(header)
    text = json.dumps(header, separators=(",", ":")).encode()
    length = len(text)
    if choices.below(16) == 0:
        length = choices.pick([0, 1, length - 1, length + 1, len(text) + len(body), 100 << 20, (100 << 20) + 1, 2**63, 2**64 - 1])
    whole = bytearray(struct.pack("<Q", length) + text + body)
    if choices.below(8) == 0:
        whole[choices.below(min(len(whole), 60000))] = choices.byte()
    if choices.below(8) == 0:
        whole = whole[:choices.below(min(len(whole), 60000))]
    path = SAVED.folder / file["name"]
    path.write_bytes(whole)
    file["bytes"] = len(whole)
    if kind == "blocks":
        lines = bytes(whole[8 + len(text):])
        count = len(lines) // _blocks.LINE.itemsize
        if choices.below(4):
            file["parts"] = [[count, *checksum(lines[:count * _blocks.LINE.itemsize])]]
    else:
        header_bytes = 8 + len(text) if choices.below(4) else min(len(whole), choices.below(2000))
        file["header"] = [header_bytes, *checksum(bytes(whole[:header_bytes]))]
    SAVED.path.write_bytes(_checkpoint.seal(manifest))
    SAVED.load()
    path.write_bytes(SAVED.bytes[path.name])
