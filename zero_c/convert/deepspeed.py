"""DeepSpeed's checkpoints of ZeRO stages 1, 2 and 3.

    latest                                                the tag of the newest
    <tag>/mp_rank_00_model_states.pt                      stages 1 and 2: names, shapes, buffers, frozen parameters
    <tag>/zero_pp_rank_<r>_mp_rank_00_model_states.pt     stage 3: the same of rank r; frozen parameters in fragments
    <tag>/[bf16_]zero_pp_rank_<r>_mp_rank_00_optim_states.pt    fp32 weights and optimizer state of rank r

The optimizer's files hold vectors, one for each group (stage 3: for each piece of a
group, a "sub group"), in which the parameters lie in the order of `param_shapes`.

    stages 1, 2   the vector of a group is cut into as many parts of equal length as there are ranks; the last is
                  followed by padding. `param_alignment_paddings` may tell of padding behind each parameter, too.
    stage 3       each parameter is cut into equal parts, padded at its end, and rank r's vector has all parts r.

The vectors of the moments are cut in the same way. All files are mapped, not read:
what is held at one time is one block.
"""

import math
import re
from dataclasses import dataclass

import torch

from zero_c._core import CheckpointError
from zero_c.torch._scale import LossScale

from . import _allowed, _source

OPTIM = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt\Z")
MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt\Z")
NOT_READ = re.compile(r"layer_\d+.*_states\.pt\Z|.*expert_\d+.*_states\.pt\Z")


@dataclass
class Run:
    """Elements [begin, end) of a parameter are in a rank's vector `number`, from `offset` on."""

    begin: int
    end: int
    rank: int
    number: int
    offset: int


class DeepSpeed(_source.Source):
    """A checkpoint's mapped files."""

    def __init__(self, weights, moments):
        """weights[rank][number], moments[rank][number] -> {role: vector}; the latter empty before the first step."""
        self._weights, self._moments = weights, moments

    def values(self, tensor, role, begin, end):
        if isinstance(tensor.place, torch.Tensor):  # a buffer, or a frozen parameter in one piece
            return tensor.place.reshape(-1)[begin:end]
        found = [self._vector(run, role, max(begin, run.begin), min(end, run.end))
                 for run in tensor.place if run.begin < end and begin < run.end]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _vector(self, run, role, begin, end):
        if role == "weight":
            vector = self._weights[run.rank][run.number]
        elif run.number in self._moments[run.rank]:
            vector = self._moments[run.rank][run.number][role]
        else:
            return torch.zeros(end - begin)
        return vector[run.offset + begin - run.begin:run.offset + end - run.begin]


def read(folder, given):
    """A Source of the checkpoint in this folder, or of its newest one."""
    folder = find_tag(folder)
    paths = optimizer_files(folder)
    files = [_allowed.load(path, path, _allowed.DEEPSPEED, mmap=True) for path in paths]
    states = [item(file, "optimizer_state_dict", path) for file, path in zip(files, paths, strict=True)]
    stage = stage_of(states[0], paths[0])
    check_ranks(states, folder, paths)
    models, model_paths = model_files(folder, stage, len(states))
    model = models[0]

    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    inner = "optimizer_state_dict" if stage == 3 else "base_optimizer_state"
    weights = [[flat(vector, path) for vector in item(state, key, path)] for state, path in zip(states, paths, strict=True)]
    inner_states = [inner_state(item(state, inner, path), path) for state, path in zip(states, paths, strict=True)]
    groups = inner_states[0]["param_groups"]
    optimizer = _source.optimizer_of(groups, optimizer_of_config(model.get("ds_config")), given)
    group_of = {number: index for index, group in enumerate(groups) for number in group["params"]}
    shapes = item(model, "param_shapes", model_paths[0])
    for vectors, path in zip(weights, paths, strict=True):
        if not len(shapes) == len(vectors) == len(group_of):
            raise CheckpointError(f"{model_paths[0]} tells of {len(shapes)} vectors, {path} has {len(vectors)} and {paths[0]} options of "
                                  f"{len(group_of)}; the files are of different checkpoints, or of a layout that is not known")
    moments = [moments_of(state, vectors, path) for state, vectors, path in zip(inner_states, weights, paths, strict=True)]
    steps = steps_of(inner_states[0], groups, group_of, moments[0], paths[0])
    check_roles(moments, paths, weights, [groups[group_of[number]].get("amsgrad", False) for number in range(len(group_of))])

    rename = _source.renaming([name for group in shapes for name in group], given.strip_prefix)
    places = lay(stage, shapes, weights, states[0].get("param_alignment_paddings"), paths[0])
    tensors = []
    for number, names in enumerate(shapes):
        for name, shape in names.items():
            dtype = _source.dtype_of(dtype_in(model, name, model_paths[0]), "parameter", name, given)
            tensors.append(_source.Tensor(rename(name), "parameter", dtype, tuple(shape), places[name], group_of[number], steps[number]))
    tensors += others(models, model_paths, shapes, weights if stage == 3 else None, rename, given)
    add_aliases(tensors, model.get("shared_params") or {}, rename)
    source = DeepSpeed(weights, moments)
    version = model.get("ds_version", "?")
    source.finish(tensors, groups, optimizer, _source.default_frozen_group(given, groups), loss_scale_of(states[0]),
                  f"DeepSpeed {version}, stage {stage}, {len(states)} ranks")
    return source


# ---- files ---------------------------------------------------------------------


def find_tag(folder):
    """The folder with the files."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    latest = folder / "latest"
    if not latest.is_file():
        return folder
    tag = latest.read_text(errors="replace").strip()
    if not tag or "/" in tag or tag in (".", "..") or not (folder / tag).is_dir():
        raise CheckpointError(f"{latest} names the checkpoint {tag[:100]!r}, and there is no such folder in {folder}; name the "
                              f"folder of a checkpoint")
    return folder / tag


def optimizer_files(folder):
    """The optimizer's files in the order of ranks."""
    found = {}
    for path in folder.iterdir():
        match = OPTIM.match(path.name)
        if NOT_READ.match(path.name) or (match and int(match[2])):
            raise CheckpointError(f"{path} is of a model that is split over ranks by pipeline, tensor or expert parallelism; only "
                                  f"ZeRO's own split is read")
        if match:
            if int(match[1]) in found:
                raise CheckpointError(f"{path} and {found[int(match[1])].name} are of the same rank: two checkpoints lie in {folder}")
            found[int(match[1])] = path
    if not found:
        raise CheckpointError(f"{folder} has no *_optim_states.pt; it is no DeepSpeed checkpoint of ZeRO stage 1, 2 or 3 (without "
                              f"ZeRO, mp_rank_00_model_states.pt has the model's and the optimizer's state dicts whole)")
    missing = [rank for rank in range(max(found) + 1) if rank not in found]
    if missing:
        name = next(iter(found.values())).name
        raise CheckpointError(f"{folder} has no {re.sub('pp_rank_[0-9]+', f'pp_rank_{missing[0]}', name)}; the files of all ranks "
                              f"are needed")
    return [found[rank] for rank in sorted(found)]


def check_ranks(states, folder, paths):
    """Files of one checkpoint, of all its ranks."""
    for state, path in zip(states, paths, strict=True):
        count = state.get("partition_count")
        counts = set(count) if isinstance(count, (list, tuple)) else {count}
        if counts != {len(states)}:
            text = " or ".join(sorted(map(str, counts)))
            raise CheckpointError(f"{path} was written by {text} ranks, and {folder} has files of {len(states)}; the files of all ranks "
                                  f"of one save are needed")
        if state.get("ds_zero_partition_groups") is not None:
            raise CheckpointError(f"{path}: its parameters are cut within groups of ranks (MiCS, expert parallelism), which is not read")


def model_files(folder, stage, ranks):
    """(contents, paths): one at stages 1 and 2, one of each rank at stage 3."""
    prefixes = [f"zero_pp_rank_{rank}_" for rank in range(ranks)] if stage == 3 else [""]
    others = sorted(path.name for path in folder.iterdir() if (match := MODEL.match(path.name)) and int(match[2]))
    if others:
        raise CheckpointError(f"{folder / others[0]} is of a model that is split by tensor parallelism; only ZeRO's own split is read")
    paths = [folder / f"{prefix}mp_rank_00_model_states.pt" for prefix in prefixes]
    models = [_allowed.load(path, path, _allowed.DEEPSPEED, mmap=True) for path in paths]
    for model, path in zip(models, paths, strict=True):
        for key in ("module", "buffer_names", "param_shapes"):
            item(model, key, path)
        if model.get("mp_world_size", 1) != 1:
            raise CheckpointError(f"{path} is of a model that is split by tensor parallelism; only ZeRO's own split is read")
    return models, paths


def item(contents, key, path):
    if not isinstance(contents, dict) or contents.get(key) is None:
        raise CheckpointError(f"{path} has no '{key}'; it is no file of a ZeRO checkpoint of stage 1, 2 or 3")
    return contents[key]


def stage_of(state, path):
    """1, 2 or 3; the bf16 optimizer, whose layout is that of stage 1, names none."""
    stage = state.get("zero_stage", 1 if "single_partition_of_fp32_groups" in state else None)
    if stage not in (1, 2, 3):
        raise CheckpointError(f"{path} says ZeRO stage {stage}; legal are 1, 2 and 3")
    return int(stage)


def flat(vector, path):
    if not isinstance(vector, torch.Tensor) or vector.dim() != 1 or not vector.is_floating_point():
        raise CheckpointError(f"{path}: a vector of weights is no tensor of one dimension; the layout is not known")
    return vector.detach()


# ---- the optimizer --------------------------------------------------------------


def inner_state(state, path):
    if not isinstance(state, dict) or not {"state", "param_groups"} <= set(state):
        raise CheckpointError(f"{path}: the optimizer's state is not a dict of 'state' and 'param_groups'; elastic checkpoints are not "
                              f"read, as they have no learning rate: save with zero_optimization.elastic_checkpoint false")
    return state


def moments_of(state, vectors, path):
    """number -> {role: vector}; without those that have no state yet."""
    found = {}
    for number in range(len(vectors)):
        entry = state["state"].get(number)
        if entry:
            found[number] = {role: value.detach().reshape(-1) for role, value in entry.items()
                             if isinstance(value, torch.Tensor) and value.dim()}
    if found and len(found) < len(vectors):
        number = next(number for number in range(len(vectors)) if number not in found)
        raise CheckpointError(f"{path} has no moments of vector {number}, and has those of others; the file is not whole")
    return found


def check_roles(moments, paths, weights, amsgrad):
    """All ranks have the same moments, as long as the weights, and they are Adam's; amsgrad: of each vector."""
    for of_rank, path, vectors in zip(moments, paths, weights, strict=True):
        if len(of_rank) != len(moments[0]):
            raise CheckpointError(f"{path} has the moments of {len(of_rank)} vectors and {paths[0]} of {len(moments[0])}; one of the "
                                  f"files is not whole, or the state was offloaded to NVMe, which is not read")
        for number, roles in of_rank.items():
            wanted = {*_source.MOMENTS, *(["max_exp_avg_sq"] if amsgrad[number] else [])}
            if set(roles) != wanted:
                raise CheckpointError(f"{path}: the optimizer keeps {', '.join(sorted(roles)) or 'nothing'} and not "
                                      f"{', '.join(sorted(wanted))}; only Adam and AdamW are read")
            short = [role for role, vector in roles.items() if len(vector) < len(vectors[number])]
            if short:
                raise CheckpointError(f"{path}: {short[0]} has {len(roles[short[0]])} elements and the weights have "
                                      f"{len(vectors[number])}; the file is not whole")


def steps_of(state, groups, group_of, moments, path):
    """Steps of each vector's parameters: from its state, as torch's optimizers, or its group, as DeepSpeed's older ones."""
    steps = []
    for number in range(len(group_of)):
        entry = state["state"].get(number) or {}
        found = entry.get("step", groups[group_of[number]].get("step"))
        if number not in moments:
            found = 0
        if found is None or float(found) < 0:
            raise CheckpointError(f"{path} has moments and no number of steps; only Adam and AdamW are read")
        steps.append(int(found))
    return steps


def optimizer_of_config(config):
    """From DeepSpeed's configuration, in which "Adam" is AdamW unless it says otherwise."""
    about = (config or {}).get("optimizer") or {}
    kind = str(about.get("type", "")).lower()
    if kind not in ("", "adam", "adamw"):
        raise CheckpointError(f"the source's optimizer is {about['type']!r}; only Adam and AdamW are read")
    decoupled = kind == "adamw" or (about.get("params") or {}).get("adam_w_mode", True)
    return None if not kind else "adamw" if decoupled else "adam"


def loss_scale_of(state):
    """In the form of LossScale.state_dict() of zero_c/torch/_scale.py; a scale that is always the same is the target's own."""
    scaler = state.get("loss_scaler")
    found = vars(scaler) if isinstance(scaler, _allowed.Attributes) else {}
    if "scale_window" not in found:
        return LossScale(None).state_dict()
    good = (found["cur_iter"] - found["last_overflow_iter"] - 1) % found["scale_window"]
    return {"dynamic": True, "value": float(found["cur_scale"]), "good": min(int(good), LossScale.INTERVAL - 1), "floored": 0}


# ---- where parameters are -------------------------------------------------------


def lay(stage, shapes, weights, paddings, path):
    """name -> runs, of all parameters."""
    places = {}
    for number, names in enumerate(shapes):
        counts, vectors = {name: math.prod(shape) for name, shape in names.items()}, [of_rank[number] for of_rank in weights]
        if stage == 3:
            places |= lay_stage_3(number, counts, vectors, path)
        else:
            places |= lay_stage_2(number, counts, vectors, paddings[number] if paddings else [0] * len(counts), path)
    return places


def lay_stage_2(number, counts, vectors, paddings, path):
    """name -> runs, in a vector that is cut over the ranks."""
    part, places, offset = len(vectors[0]), {}, 0
    if any(len(vector) != part for vector in vectors[:-1]) or len(vectors[-1]) > part:
        raise CheckpointError(f"{path}: the ranks' parts of vector {number} have {', '.join(str(len(vector)) for vector in vectors)} "
                              f"elements; all but the last are equal in a checkpoint of stage 1 or 2")
    if len(paddings) != len(counts):
        raise CheckpointError(f"{path} has paddings of {len(paddings)} parameters in vector {number}, which has {len(counts)}")
    for (name, count), extra in zip(counts.items(), paddings, strict=True):
        runs, done = [], 0
        while done < count:
            rank, start = divmod(offset + done, part) if part else (len(vectors), 0)
            stop = min(count, done + part - start)
            if rank >= len(vectors) or start + stop - done > len(vectors[rank]):
                raise too_short(path, number, name)
            runs.append(Run(done, stop, rank, number, start))
            done = stop
        places[name] = runs
        offset += count + extra
    aligned = 2 * len(vectors)  # what DeepSpeed fills up to
    total = sum(map(len, vectors))
    if math.ceil(offset / aligned) != math.ceil(total / aligned):
        raise CheckpointError(f"{path}: the ranks' parts of vector {number} have {total} elements, and its parameters take {offset}; "
                              f"the layout is not known")
    return places


def lay_stage_3(number, counts, vectors, path):
    """name -> runs, in vectors that have a part of each parameter."""
    places, offset = {}, 0
    for name, count in counts.items():
        part = math.ceil(count / len(vectors))
        places[name] = [Run(rank * part, min(count, (rank + 1) * part), rank, number, offset)
                        for rank in range(len(vectors)) if rank * part < count]
        offset += part
    if any(len(vector) != offset for vector in vectors):
        raise CheckpointError(f"{path}: the ranks' parts of vector {number} have {', '.join(str(len(vector)) for vector in vectors)} "
                              f"elements, and its parameters take {offset} on each rank; the layout is not known")
    return places


def too_short(path, number, name):
    return CheckpointError(f"{path}: vector {number} ends before '{name}'; the files are of different checkpoints, or of a layout that "
                           f"is not known")


# ---- everything else -------------------------------------------------------------


def dtype_in(model, name, path):
    if name not in model["module"]:
        raise CheckpointError(f"{path}: parameter '{name}' is in 'param_shapes' and not in 'module'")
    return model["module"][name].dtype


def others(models, paths, shapes, weights, rename, given):
    """Buffers and frozen parameters; at stage 3 the frozen ones' fragments are added to `weights`, else None."""
    model, found = models[0], []
    trained = {name for names in shapes for name in names} | set(model.get("shared_params") or {})
    for name, value in model["module"].items():
        if name in trained:
            continue
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(f"{paths[0]}: '{name}' of 'module' is a {type(value).__name__}; a checkpoint holds tensors")
        kind, shape, place = "buffer" if name in model["buffer_names"] else "frozen", value.shape, value
        if kind == "frozen" and weights is not None:
            shape, place = lay_frozen(models, paths, name, weights)
        found.append(_source.Tensor(rename(name), kind, _source.dtype_of(value.dtype, kind, name, given), tuple(shape), place))
    return found


def lay_frozen(models, paths, name, weights):
    """(shape, runs) of a frozen parameter at stage 3."""
    shapes = models[0].get("frozen_param_shapes") or {}
    if name not in shapes:
        raise CheckpointError(f"{paths[0]} has no values of '{name}', which is not trained; save with frozen parameters "
                              f"(exclude_frozen_parameters=False)")
    count, runs, done = math.prod(shapes[name]), [], 0
    for rank, (model, path) in enumerate(zip(models, paths, strict=True)):
        vector = item(item(model, "frozen_param_fragments", path), name, path).reshape(-1)
        stop = min(count, done + len(vector))
        runs.append(Run(done, stop, rank, len(weights[rank]), 0))
        weights[rank].append(vector)
        done = stop
    if done < count:
        raise CheckpointError(f"{paths[-1]}: the ranks' fragments of '{name}' have {done} of its {count} elements")
    return shapes[name], runs


def add_aliases(tensors, shared, rename):
    """shared: other name -> the name under which a tied parameter is saved."""
    by_name = {tensor.name: tensor for tensor in tensors}
    for other, name in shared.items():
        if rename(name) in by_name:
            by_name[rename(name)].aliases.append(rename(other))
