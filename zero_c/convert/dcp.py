"""Folders of torch.distributed.checkpoint, as FSDP2 writes them.

    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)

with the states of torch.distributed.checkpoint.state_dict (get_state_dict, or
get_model_state_dict and get_optimizer_state_dict), flattened or not, under whatever
keys. What is there is seen in the names of its metadata:

    <root>param_groups.0.lr, ....params     options of a group, and the names of its parameters
    <root>param_groups.<name>.lr            flattened: the options of one parameter. Which were one group is lost;
                                            those with the same options become one, in the order of the first
    <root>state.<name>.exp_avg              of a parameter
    <other root><name>                      parameters and buffers

A tensor is read by dcp.load(), whole, when it is written, and forgotten when the next
one is: one tensor is in memory at a time. Two things of torch's reader would unpickle
and are replaced: reading the metadata (_allowed.py) and values that are no tensors.

The format does not say which tensors without optimizer state are buffers, frozen
parameters, or second names of a tied weight; the command does.
"""

import fnmatch
import warnings

import torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from zero_c._core import CheckpointError
from zero_c.torch._scale import LossScale

from . import _allowed, _source

ROLES = ("step", *_source.MOMENTS, "max_exp_avg_sq")


class Reader(checkpoint.FileSystemReader):
    """With metadata that were read once, and not by unpickling."""

    def __init__(self, folder, metadata):
        super().__init__(folder)
        self._metadata = metadata

    def read_metadata(self, *args, **kwargs):
        return self._metadata


class Planner(checkpoint.DefaultLoadPlanner):
    """Values that are no tensors are read with weights_only."""

    def __init__(self, folder):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._folder = folder

    def load_bytes(self, read_item, value):
        name = read_item.dest_index.fqn
        self.state_dict[name] = _allowed.load(value, f"{self._folder}: '{name}'", [])


class Folder(_source.Source):
    """A checkpoint's tensors, by their keys in the metadata."""

    def __init__(self, folder, metadata):
        self._folder, self._reader = folder, Reader(folder, metadata)
        self.about = metadata.state_dict_metadata
        self._held = None, None  # key, tensor

    def load(self, keys):
        """The values of these keys."""
        wanted = {key: self._room(self.about[key]) for key in keys}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # no_dist says so
                checkpoint.load(wanted, storage_reader=self._reader, planner=Planner(self._folder), no_dist=True)
        except (Exception, checkpoint.CheckpointException) as error:  # whatever a damaged file leads to; torch wraps it
            failures = [cause for cause, _ in getattr(error, "failures", {}).values()]
            cause = failures[0] if failures else error
            if isinstance(cause, CheckpointError):
                raise cause from None
            raise CheckpointError(f"{self._folder}: {', '.join(keys)[:200]} cannot be read; a file of the folder is damaged "
                                  f"({type(cause).__name__}: {' '.join(str(cause).split())[:300]})") from None
        return wanted

    @staticmethod
    def _room(about):
        return torch.empty(about.size, dtype=about.properties.dtype) if isinstance(about, TensorStorageMetadata) else None

    def values(self, tensor, role, begin, end):
        key = tensor.place.get(role)
        if key is None:
            return torch.zeros(end - begin)
        if self._held[0] != key:
            self._held = None, None
            self._held = key, self.load([key])[key].reshape(-1)
        return self._held[1][begin:end]


def read(folder, given):
    """A Source of the checkpoint in this folder."""
    if not (folder / ".metadata").is_file():
        raise CheckpointError(f"{folder} has no file .metadata; it is no checkpoint of torch.distributed.checkpoint, or one whose save "
                              f"was interrupted")
    metadata = _allowed.load_metadata(folder / ".metadata")
    check_files(folder, metadata.storage_data)
    source = Folder(folder, metadata)
    root = optimizer_root(source.about, folder)
    groups, members = read_groups(source, root)
    state = states(source.about, root)
    weights = model_keys(source.about, root, state, folder)
    unknown = next((name for names in members for name in names if name not in weights), None)
    if unknown is not None:
        raise CheckpointError(f"{folder}: the optimizer's parameter '{unknown}' is not among the model's; save the state that "
                              f"torch.distributed.checkpoint.state_dict.get_optimizer_state_dict gives, which has the model's names")
    counts = source.load([roles["step"] for roles in state.values()])
    steps = {name: int(counts[roles["step"]]) for name, roles in state.items()}
    rename = _source.renaming(list(weights), given.strip_prefix)
    group_of = {name: number for number, names in enumerate(members) for name in names}
    tensors = sort_in(source, weights, state, steps, group_of, rename, given)
    amsgrad = [bool(group.get("amsgrad")) for group in groups]
    for tensor in tensors:
        check_moments(folder, tensor, tensor.group is not None and amsgrad[tensor.group])
    source.finish(tensors, groups, _source.optimizer_of(groups, None, given), _source.default_frozen_group(given, groups),
                  LossScale(None).state_dict(), f"torch.distributed.checkpoint, torch {torch.__version__} reading")
    return source


def check_files(folder, storage):
    """All files are there, and as long as the metadata say."""
    ends = {}
    for place in storage.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    for name, end in sorted(ends.items()):
        if "/" in name or name in ("", ".", ".."):
            raise CheckpointError(f"{folder / '.metadata'} names the file {name!r}, which is not one of the folder")
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; the files of all ranks are needed")
        if path.stat().st_size < end:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes and had at least {end} when it was written; it was "
                                  f"truncated")


# ---- what the names say ----------------------------------------------------------


def optimizer_root(about, folder):
    """What stands before "param_groups." in all keys that have it."""
    roots = {key[:f".{key}".index(".param_groups.")] for key in about if ".param_groups." in f".{key}"}
    if len(roots) != 1:
        found = f"the state of {len(roots)} optimizers ({', '.join(sorted(roots))})" if roots else "no key with 'param_groups'"
        raise CheckpointError(f"{folder} has {found}; the state of one optimizer is needed, as get_optimizer_state_dict gives it")
    return roots.pop()


def read_groups(source, root):
    """(options of each group, names of each group's parameters)."""
    start = root + "param_groups."
    values = source.load([key for key in source.about if key.startswith(start)])
    flattened = not any(key.endswith(".params") for key in values)
    found = {}
    for key, value in values.items():
        owner, option = key[len(start):].rsplit(".", 1)
        found.setdefault(owner, {})[option] = value
    if not flattened:
        ordered = [found[owner] for owner in sorted(found, key=int)]
        return ordered, [group["params"] for group in ordered]
    groups, members = [], []
    for name, options in found.items():
        if options not in groups:
            groups.append(options)
            members.append([])
        members[groups.index(options)].append(name)
    return groups, members


def states(about, root):
    """parameter's name -> {role: key}."""
    start, found = root + "state.", {}
    for key in about:
        if key.startswith(start):
            name, _, role = key[len(start):].rpartition(".")
            if role not in ROLES:
                raise CheckpointError(f"the optimizer keeps '{role}' of '{name}'; only Adam and AdamW are read")
            found.setdefault(name, {})[role] = key
    for name, roles in found.items():
        if "step" not in roles:
            raise CheckpointError(f"'{start}{name}.step' is missing: the optimizer's state is not whole")
    if not found:
        raise CheckpointError(f"there is no key that begins with '{start}': the checkpoint has no moments; save after the first step")
    return found


def model_keys(about, root, state, folder):
    """name -> key, of all tensors that stand beside the trained parameters."""
    others = [key for key, value in about.items() if isinstance(value, TensorStorageMetadata) and
              not key.startswith((root + "state.", root + "param_groups."))]
    first = next(iter(state))
    roots = [key[:-len(first)] for key in others if key == first or key.endswith("." + first)]
    roots = [start for start in roots if all(start + name in about for name in state)]
    if len(roots) != 1:
        what = f"more than one model ({', '.join(map(repr, roots))})" if roots else f"no tensor of the parameter '{first}'"
        raise CheckpointError(f"{folder} has {what}, of which '{root}state' is; save one model and its optimizer, with the names that "
                              f"torch.distributed.checkpoint.state_dict gives")
    return {key[len(roots[0]):]: key for key in others if key.startswith(roots[0])}


# ---- tensors -----------------------------------------------------------------------


def sort_in(source, weights, state, steps, group_of, rename, given):
    """What each tensor of the model is."""
    aliases = dict(given.alias)
    names = {rename(name): name for name in weights}
    for other, name in given.alias:
        if other not in names or name not in names or name in aliases:
            raise CheckpointError(f"--alias {other}={name}: the source has no tensor '{other if other not in names else name}' that is "
                                  f"not an alias itself")
    tensors, unknown = {}, []
    for target, name in names.items():
        about = source.about[weights[name]]
        if target in aliases:
            continue
        if name in state or (name in group_of and not matches(target, given.frozen)):
            kind = "parameter"
        elif matches(target, given.buffer) or not about.properties.dtype.is_floating_point:
            kind = "buffer"
        elif matches(target, given.frozen):
            kind = "frozen"
        else:
            unknown.append(target)
            continue
        place = {"weight": weights[name], **(state.get(name, {}) if kind == "parameter" else {})}
        dtype = _source.dtype_of(about.properties.dtype, kind, name, given)
        tensors[target] = _source.Tensor(target, kind, dtype, tuple(about.size), place, group_of.get(name), steps.get(name, 0))
    if unknown:
        shown = ", ".join([*unknown[:20], *(["..."] if len(unknown) > 20 else [])])
        raise CheckpointError(f"{len(unknown)} tensors have no optimizer state, and the source does not say why: {shown}; say what each "
                              f"is with --buffer PATTERN, --frozen PATTERN, or --alias NAME=NAME (another name of a tied weight)")
    for other, name in given.alias:
        tensors[name].aliases.append(other)
    return list(tensors.values())


def matches(name, patterns):
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def check_moments(folder, tensor, amsgrad):
    """A parameter has all of its state, or none of it: then it was never updated."""
    if tensor.kind != "parameter":
        return
    if tensor.group is None:
        raise CheckpointError(f"{folder}: '{tensor.name}' has optimizer state and is in no group")
    wanted = {"weight", "step", *_source.MOMENTS, *(["max_exp_avg_sq"] if amsgrad else [])}
    missing = wanted - set(tensor.place)
    if missing and set(tensor.place) != {"weight"}:
        raise CheckpointError(f"{folder} has no {', '.join(sorted(missing))} of '{tensor.name}': the optimizer's state is not whole")
