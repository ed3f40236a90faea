"""Writes what DeepSpeed 0.19 writes (engine.py, stage_1_and_2.py, stage3.py), without DeepSpeed.

Its classes are made up under its names, so that the pickles name what DeepSpeed's do.
"""

import contextlib
import enum
import math
import sys
import types

import torch

CLASSES = {"deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
           "deepspeed.utils.tensor_fragment": ("fragment_address",), "deepspeed.runtime.other": ("Thing",)}


@contextlib.contextmanager
def classes():
    """DeepSpeed's names -> classes, while its modules can be found."""
    made, before = {}, set(sys.modules)
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "deepspeed"}
    for path in (*CLASSES, "deepspeed.runtime.zero.config"):
        parts = path.split(".")
        for count in range(1, len(parts) + 1):
            sys.modules[".".join(parts[:count])] = types.ModuleType(".".join(parts[:count]))
    for path, names in CLASSES.items():
        module = sys.modules[path]
        for name in names:
            made[name] = type(name, (), {"__module__": path})
            setattr(module, name, made[name])
    config = sys.modules["deepspeed.runtime.zero.config"]
    config.ZeroStageEnum = enum.Enum("ZeroStageEnum", {"disabled": 0, "optimizer_states": 1, "gradients": 2, "weights": 3},
                                     module=config.__name__, type=int)
    made["ZeroStageEnum"] = config.ZeroStageEnum
    try:
        yield made
    finally:
        for name in set(sys.modules) - before:
            if name.startswith("deepspeed"):
                del sys.modules[name]
        sys.modules.update(kept)


def write(folder, *, stage, ranks, groups, values, moments, module, buffers, shared, steps, scaler=None, config=None, bf16=False,
          align=1, change=None):
    """groups: (options, names) of each; values, moments[role]: name -> fp32 tensor; module: name -> tensor, all of the model.

    scaler: attributes of a dynamic loss scaler; align: stages 1 and 2, each parameter takes a multiple of it;
    change(contents, name of the file): spoils what is written.
    """
    tag = folder / "global_step3"
    tag.mkdir(parents=True)
    (folder / "latest").write_text(tag.name)
    trained = {name for _, names in groups for name in names}
    frozen = [name for name in module if name not in trained and name not in buffers and name not in shared]
    shapes = [{name: values[name].shape for name in names} for _, names in groups]

    def save(contents, name):
        contents = contents if change is None else change(contents, name)
        if contents is not None:
            torch.save(contents, tag / name)

    with classes() as made:
        for rank in range(ranks):
            if stage == 3 or rank == 0:
                save(model_file(stage, rank, ranks, module, buffers, shapes, frozen, shared if rank == 0 else {}, config),
                     f"{f'zero_pp_rank_{rank}_' if stage == 3 else ''}mp_rank_00_model_states.pt")
            flat = {role: [stage_3_vector([of_role[name] for name in names], rank, ranks) if stage == 3 else
                           stage_2_vector([filled(of_role[name], align) for name in names], rank, ranks) for _, names in groups]
                    for role, of_role in {"weight": values, **moments}.items()}
            inner = {"state": {number: {"step": torch.tensor(float(steps)), **{role: flat[role][number] for role in moments}}
                               for number in range(len(groups))},
                     "param_groups": [{**options, "params": [number]} for number, (options, _) in enumerate(groups)]}
            extra = [[-values[name].numel() % align for name in names] for _, names in groups]
            state = optimizer_file(made, stage, rank, ranks, groups, values, flat["weight"], inner, scaler, extra)
            save({"optimizer_state_dict": state, "ds_config": config or {}, "ds_version": "0.19.8"},
                 f"{'bf16_' if bf16 else ''}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    return folder


def model_file(stage, rank, ranks, module, buffers, shapes, frozen, shared, config):
    shown = {name: torch.empty(0, dtype=value.dtype) if stage == 3 and name not in buffers else value for name, value in module.items()}
    saves_frozen = stage > 1
    fragments = {name: stage_3_vector([module[name]], rank, ranks) if stage == 3 else module[name] for name in frozen}
    return {"module": shown, "buffer_names": list(buffers), "optimizer": None, "param_shapes": shapes,
            "frozen_param_shapes": {name: module[name].shape for name in frozen} if saves_frozen else None, "shared_params": shared,
            "frozen_param_fragments": fragments if saves_frozen else None, "lr_scheduler": None, "skipped_steps": 0, "global_steps": 3,
            "dp_world_size": ranks, "mp_world_size": 1, "ds_config": config or {}, "ds_version": "0.19.8"}


def optimizer_file(made, stage, rank, ranks, groups, values, weights, inner, scaler, extra):
    loss_scaler = made["DynamicLossScaler" if scaler else "LossScaler"]()
    loss_scaler.__dict__.update(scaler or {"cur_scale": 1.0, "dynamic": False})
    state = {"loss_scaler": loss_scaler, "dynamic_loss_scale": bool(scaler), "overflow": False,
             "zero_stage": made["ZeroStageEnum"](stage), "ds_version": "0.19.8"}
    if stage == 3:
        return state | {"partition_count": ranks, "optimizer_state_dict": inner, "fp32_flat_groups": weights}
    fragment = made["fragment_address"]()
    fragment.__dict__.update(numel=1, start=0)
    paddings = [padding(sum(values[name].numel() for name in names) + sum(of_group), ranks) if rank == ranks - 1 else 0
                for (_, names), of_group in zip(groups, extra, strict=True)]
    return state | {"clip_grad": 0.0, "base_optimizer_state": inner, "group_paddings": paddings, "partition_count": [ranks] * len(groups),
                    "single_partition_of_fp32_groups": [vector[:len(vector) - count]
                                                        for vector, count in zip(weights, paddings, strict=True)],
                    "param_alignment_paddings": extra, "param_slice_mappings": [{"any": fragment} for _ in groups]}


def padding(count, ranks):
    return -count % (2 * ranks)


def filled(tensor, align):
    return torch.cat([tensor.reshape(-1), tensor.new_zeros(-tensor.numel() % align)])


def stage_2_vector(tensors, rank, ranks):
    """A rank's part of all tensors one behind the other, filled up to a multiple of twice the ranks."""
    whole = torch.cat([tensor.reshape(-1) for tensor in tensors])
    whole = torch.cat([whole, whole.new_zeros(padding(len(whole), ranks))])
    return whole.chunk(ranks)[rank].clone()


def stage_3_vector(tensors, rank, ranks):
    """A rank's part of each tensor, one behind the other; each filled up at its end."""
    parts = []
    for tensor in tensors:
        part = math.ceil(tensor.numel() / ranks)
        whole = torch.cat([tensor.reshape(-1), tensor.new_zeros(part * ranks - tensor.numel())])
        parts.append(whole[rank * part:(rank + 1) * part])
    return torch.cat(parts)
