"""Whether all ranks mean the same: compared before anything is changed."""

import hashlib

import numpy

import zero_c
from zero_c._checkpoint import all_texts

from ._arguments import options_of

SAME = "model, groups and options"


def describe(groups, names, settings):
    """Lines of text that must be the same on every rank."""
    lines = [f"{key} = {value!r}" for key, value in sorted(settings.items())]
    for number, group in enumerate(groups):
        options = {key: plain(value) for key, value in options_of(group).items()}
        lines.append(f"group {number}: {len(group['params'])} parameters, "
                     + ", ".join(f"{key} {value}" for key, value in sorted(options.items())))
        lines += [describe_tensor(f"parameter '{names[id(tensor)]}' of group {number}", tensor)
                  for tensor in group["params"]]
    return lines


def describe_tensor(what, tensor):
    return (f"{what}: shape {tuple(tensor.shape)}, {str(tensor.dtype).removeprefix('torch.')}, "
            f"strides {tensor.stride()}, requires_grad {tensor.requires_grad}")


def plain(value):
    """A group's value as text without addresses; what is no number or text counts by its type only."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(plain(item) for item in value) + ")"
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def compare(comm, what, lines, same=SAME):
    """Raises Mismatch on every rank, naming the first difference, unless all ranks pass the same lines."""
    text = "\n".join(lines).encode()
    digest = numpy.frombuffer(hashlib.sha256(text).digest(), numpy.uint8)
    digests = comm.all_gather(digest).reshape(comm.world_size, -1)
    if (digests == digests[0]).all():
        return
    texts = all_texts(comm, text)
    other = next(rank for rank in range(comm.world_size) if (digests[rank] != digests[0]).any())
    first, second = (texts[rank].decode().split("\n") for rank in (0, other))
    at = next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]),
              min(len(first), len(second)))
    sides = [lines[at] if at < len(lines) else "nothing more" for lines in (first, second)]
    raise zero_c.Mismatch(f"{what}: ranks disagree. Rank 0 has: {sides[0]}. Rank {other} has: {sides[1]}. Every rank "
                          f"must pass the same {same}")


def checked(comm, what, make, same=SAME):
    """make() -> (lines, result): compared over ranks, also when it raises on some of them."""
    try:
        lines, result = make()
    except Exception as error:
        try:
            compare(comm, what, [f"an error: {type(error).__name__}: {error}"], same)
        except zero_c.Mismatch:
            pass  # the other ranks get it; this one knows better
        raise
    compare(comm, what, lines, same)
    return result
