"""What a converter found in a foreign checkpoint, and how it is written.

A 16-bit parameter's weight and its master both come from the most exact values that
the source has: an fp32 master where it keeps one. The weight is the master rounded
as the engine rounds it (csrc/zc_dtype.h: bf16 to nearest, ties away from zero, so
that weight and 16-bit remainder give the master back). Where the other package
rounded a tie to even, the weight differs by its last bit and the master does not.
"""

import abc
import contextlib
import math
from dataclasses import dataclass, field

import numpy
import torch

import zero_c
from zero_c import _blocks, _checkpoint, _options, _saving
from zero_c._core import CheckpointError

MOMENTS = ("exp_avg", "exp_avg_sq")
# What torch's groups say about how, not what, is computed.
NOT_OPTIONS = {"params", "param_names", "foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay",
               "bias_correction", "step", "name"}


@dataclass
class Tensor:
    """A tensor of the model. `place` is the converter's own."""

    name: str
    kind: str  # as in _checkpoint.Entry
    dtype: str
    shape: tuple
    place: object
    group: int | None = None
    steps: int = 0
    aliases: list = field(default_factory=list)


class Source(abc.ABC):
    """Subclasses read values and call finish() when all else is known."""

    @abc.abstractmethod
    def values(self, tensor, role, begin, end):
        """Elements [begin, end) of a tensor, as the source has them, as a tensor of one dimension.

        role: "weight" (its most exact form), or one of MOMENTS or "max_exp_avg_sq".
        """

    def finish(self, tensors, groups, optimizer, frozen_group, loss_scale, origin):
        """groups: the options of each as the source has them; frozen_group: as the command has it."""
        self.tensors, self.optimizer, self.loss_scale, self.origin = tensors, optimizer, loss_scale, origin
        for tensor in tensors:
            if tensor.kind == "frozen" and tensor.group is None:
                tensor.group = frozen_group
        names = [tensor.name for tensor in tensors]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise CheckpointError(f"two tensors of the source are '{twice}' after their prefixes were taken off; say which prefix to "
                                  f"take with --strip-prefix")
        if not any(tensor.kind == "parameter" for tensor in tensors):
            raise CheckpointError("the source has no trained parameter")
        if frozen_group is not None and not 0 <= frozen_group < len(groups):
            raise CheckpointError(f"--frozen-group is {frozen_group}; the source has {len(groups)} groups, from 0 on")
        self.groups = [options_of(options, optimizer, number) for number, options in enumerate(groups)]
        self.steps = max(tensor.steps for tensor in tensors)

    def summary(self):
        count = {kind: sum(tensor.kind == kind for tensor in self.tensors) for kind in ("parameter", "frozen", "buffer")}
        return (f"{count['parameter']} parameters, {count['frozen']} frozen, {count['buffer']} buffers, {self.optimizer}, "
                f"{self.steps} steps, from {self.origin}")

    def describe_all(self, comm):
        """What _saving.Saving asks for."""
        entries = []
        for index, tensor in enumerate(self.tensors):
            roles = ()
            if tensor.kind == "parameter":
                roles = (("master",) if tensor.dtype in ("bfloat16", "float16") else ()) + MOMENTS
                roles += ("max_exp_avg_sq",) if self.groups[tensor.group]["amsgrad"] else ()
            entries.append(_checkpoint.Entry(tensor.name, tensor.kind, tensor.dtype, tuple(tensor.shape), index=index,
                                             group=tensor.group, roles=roles, aliases=tuple(tensor.aliases)))
        counted = [(options, sum(tensor.group == number for tensor in self.tensors)) for number, options in enumerate(self.groups)]
        about = _checkpoint.about(self.optimizer, counted, self.loss_scale, self.steps, 0, comm)
        return entries, {**about, "converted_from": self.origin}


class Reader:
    """The face of an engine that has one rank, as far as saving looks at it."""

    def __init__(self, source):
        self._source = source

    def sync(self, what):
        pass

    def step_count(self, index):
        return self._source.tensors[index].steps

    def has_momentum(self, index):
        return False

    def parts(self, index):
        elems = math.prod(self._source.tensors[index].shape)
        return [(0, elems)] if elems else []

    def read_part(self, index, role, begin, end, room):
        tensor = self._source.tensors[index]
        values = self._source.values(tensor, "weight" if role == "master" else role, begin, end)
        dtype = tensor.dtype if role == "weight" else "float64" if tensor.dtype == "float64" else "float32"
        room[:] = memoryview(as_bytes(values, dtype)).cast("B")


def as_bytes(values, dtype):
    """A tensor of one dimension, in another dtype, as an array."""
    if dtype == "bfloat16" and values.dtype == torch.float32:
        return rounded_to_bfloat16(values.contiguous().numpy())
    return values.to(getattr(torch, dtype)).contiguous().view(torch.uint8).numpy()


def rounded_to_bfloat16(values):
    """zc_master_split of zc_dtype.h: the bits of the weights of these masters."""
    bits = numpy.where(numpy.isnan(values), numpy.uint32(0x7fc00000), values.view(numpy.uint32))
    return ((bits + numpy.uint32(0x8000)) >> numpy.uint32(16)).astype(numpy.uint16)


def write(source, folder):
    """A checkpoint in a new folder; nothing is left of it if that fails."""
    if folder.exists() or folder.is_symlink():
        raise CheckpointError(f"{folder} is there already; name a folder that is not")
    if not folder.parent.is_dir():
        raise CheckpointError(f"{folder.parent} is not a folder, so {folder.name} cannot be made in it")
    done = False
    try:
        with zero_c.local_group(1)[0] as comm:
            _saving.save(Reader(source), comm, folder, lambda: source.describe_all(comm))
        done = True
    finally:
        if not done:
            with contextlib.suppress(OSError):
                folder.rmdir()


# ---- names, dtypes, options ------------------------------------------------------


def renaming(names, prefix):
    """A function that gives the target's name of each of these of the source."""
    if prefix is not None:
        return lambda name: name.removeprefix(prefix)
    wrapped = all(without_compiled(name).startswith("module.") for name in names)
    return lambda name: without_compiled(name).removeprefix("module." if wrapped else "")


def without_compiled(name):
    """Without what torch.compile puts into names."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def dtype_of(tensor_dtype, kind, name, given):
    """The target's dtype of a tensor that has a torch dtype in the source."""
    wanted = given.buffer_dtype if kind == "buffer" else given.dtype
    if wanted is not None and tensor_dtype.is_floating_point:
        return wanted
    found = str(tensor_dtype).removeprefix("torch.")
    if found not in _blocks.DTYPES:
        raise CheckpointError(f"{kind} '{name}' is {found}; a checkpoint holds {', '.join(_blocks.DTYPES)}")
    return found


def optimizer_of(groups, known, given):
    """"adamw" or "adam": from the groups, or what else is known (or None), or the command."""
    said = {group["decoupled_weight_decay"] for group in groups if isinstance(group.get("decoupled_weight_decay"), bool)}
    if len(said) > 1:
        raise CheckpointError("some groups have decoupled_weight_decay and some have not; zero_c has one rule for all groups")
    found = {True: "adamw", False: "adam"}[said.pop()] if said else known
    if found is None and given.optimizer is None:
        raise CheckpointError("the source does not say whether its optimizer is AdamW or Adam: pass --optimizer adamw, or "
                              "--optimizer adam")
    if None not in (found, given.optimizer) and found != given.optimizer:
        raise CheckpointError(f"--optimizer is {given.optimizer}, and the source is of {found}; leave it out")
    return found or given.optimizer


def options_of(group, optimizer, number):
    """A group's options for the manifest."""
    if group.get("bias_correction") is False:
        raise CheckpointError(f"group {number} has bias_correction=False, which zero_c has not")
    options = {**_options.DEFAULTS[optimizer], **{key: value for key, value in group.items() if key not in NOT_OPTIONS}}
    missing = [key for key in ("lr", "betas", "eps", "weight_decay") if key not in group]
    if missing:
        raise CheckpointError(f"group {number} of the source has no {', '.join(missing)}; it is none of Adam or AdamW")
    try:
        _options.to_core(optimizer, options)
        return {key: _checkpoint.plain(value, f"group {number}: '{key}'") for key, value in options.items()}
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"group {number} of the source: {error}") from None


def default_frozen_group(given, groups):
    return given.frozen_group if "frozen_group" in given else 0 if len(groups) == 1 else None
