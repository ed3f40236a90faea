"""Foreign pickles, read by torch.load(weights_only=True) with a list of what may be in them.

weights_only makes nothing that is not on torch's own list (tensors, containers) or on
the one given here. For DeepSpeed's classes that list has stand-ins, which do nothing
but keep what is put into them; nothing of DeepSpeed is imported.

The .metadata file of torch.distributed.checkpoint is a bare pickle of protocol 4 (or
5), and torch's restricted reader knows the instructions of protocol 2 only.
`to_protocol_2` writes the one as the other, instruction by instruction, without
running any. What the restricted reader has no instruction for, it still refuses.
"""

import io
import pickletools
import re
import struct
import zipfile
from pathlib import PurePosixPath

import torch
from torch.distributed.checkpoint import filesystem, metadata

from zero_c._core import CheckpointError


class Attributes:
    """In the place of an object: its attributes."""


class Number(int):
    """In the place of an enumeration's member: its value."""


DEEPSPEED = [(Attributes, f"deepspeed.{name}") for name in (
    "runtime.fp16.loss_scaler.LossScaler", "runtime.fp16.loss_scaler.DynamicLossScaler", "runtime.fp16.loss_scaler.LossScaleConfig",
    "utils.tensor_fragment.fragment_address")]
DEEPSPEED += [(Number, "deepspeed.runtime.zero.config.ZeroStageEnum")]

DCP = [(getattr(metadata, name), f"torch.distributed.checkpoint.metadata.{name}") for name in (
    "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
    "StorageMeta", "_MEM_FORMAT_ENCODING")]
DCP += [(filesystem._StorageInfo, "torch.distributed.checkpoint.filesystem._StorageInfo")]
DCP += [(PurePosixPath, name) for name in ("pathlib.PosixPath", "pathlib._local.PosixPath")]


def load(file, name, allowed, **how):
    """torch.load of a path or an open file; CheckpointError names what is not as it must be."""
    try:
        with torch.serialization.safe_globals(allowed):
            return torch.load(file, map_location="cpu", weights_only=True, **how)
    except FileNotFoundError:
        raise CheckpointError(f"{name} is missing") from None
    except Exception as error:  # a damaged file raises whatever its bytes lead to
        found = re.search(r"GLOBAL (\S+) was not an allowed global|unsupported GLOBAL (\S+) whose", str(error))
        if found:
            raise CheckpointError(f"{name} has a {found[1] or found[2]} in it, which is not on the list of what is read from such a "
                                  f"file (zero_c never unpickles anything else); save without it") from None
        first = str(error).strip().split("\n")[0][:300]
        raise CheckpointError(f"{name} is damaged, or not a file of torch.save ({type(error).__name__}: {first})") from None


def load_metadata(path):
    """The .metadata file of torch.distributed.checkpoint."""
    data = path.read_bytes()
    try:
        recoded = to_protocol_2(data)
    except (ValueError, IndexError, KeyError, UnicodeError) as error:
        raise CheckpointError(f"{path} is damaged, or no metadata of torch.distributed.checkpoint ({error})") from None
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", recoded)
        file.writestr("archive/version", "3\n")
        file.writestr("archive/byteorder", "little")
    archive.seek(0)
    found = load(archive, path, DCP)
    if not isinstance(found, metadata.Metadata):
        raise CheckpointError(f"{path} holds a {type(found).__name__}, no metadata of torch.distributed.checkpoint")
    return found


def to_protocol_2(data):
    """A pickle of protocol 4 or 5 in the instructions of protocol 2.

    Texts go where they are used instead of into the memo, because protocol 2 names a class in the instruction, and
    protocol 4 takes the last two texts of the stack.
    """
    out, texts, memo_size = bytearray(b"\x80\x02"), {}, 0
    last = []  # (where it starts in `out`, text) of the texts that were pushed since the last other instruction
    operations = list(pickletools.genops(data))
    ends = [position for _, _, position in operations[1:]] + [len(data)]
    for (operation, argument, position), end in zip(operations, ends, strict=True):
        name = operation.name
        if name in ("PROTO", "FRAME"):
            continue
        if name == "MEMOIZE":
            if last:
                texts[memo_size] = last[-1][1]
            else:
                out += b"r" + struct.pack("<I", memo_size)
            memo_size += 1
            continue
        if name in ("BINGET", "LONG_BINGET") and argument in texts:
            name, argument = "BINUNICODE", texts[argument]
        if name in ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"):
            text = argument.encode("utf-8", "surrogatepass")
            last.append((len(out), argument))
            out += b"X" + struct.pack("<I", len(text)) + text
        elif name == "STACK_GLOBAL":
            if len(last) < 2:
                raise ValueError("a class is not named by two texts")
            (start, module), (_, attribute) = last[-2:]
            if "\n" in module + attribute:
                raise ValueError("a class is named in a way that is not supported")
            out[start:] = f"c{module}\n{attribute}\n".encode()
            last = []
        else:
            out += data[position:end]
            last = []
    return bytes(out)
