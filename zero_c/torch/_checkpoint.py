"""What a checkpoint of a torch model holds, and how it comes back: zero_c/_checkpoint.py has the files and the protocol."""

import torch

from zero_c import _blocks, _checkpoint, _loading

from . import _state
from ._arguments import options_of

NAMES = {getattr(torch, name): name for name in _blocks.DTYPES}


def entries(opt):
    """All tensors: the trained parameters, the frozen ones, and the module's other parameters and persistent buffers."""
    found, names_of = [], aliases(opt)
    numbered = {id(p): (index, names) for _, index, p, names in opt._numbered()}
    group_of = {id(p): number for number, group in enumerate(opt.param_groups) for p in group["params"]}
    seen = set()

    def add(name, tensor, kind):
        if id(tensor) in seen:
            return
        seen.add(id(tensor))
        own = names_of.get(id(tensor), [name])
        if tensor.dtype not in NAMES:
            raise TypeError(f"{kind} '{own[0]}' is {tensor.dtype}; a checkpoint holds {', '.join(_blocks.DTYPES)}")
        entry = _checkpoint.Entry(own[0], kind, NAMES[tensor.dtype], tuple(tensor.shape), aliases=tuple(own[1:]),
                                  group=group_of.get(id(tensor)))
        if id(tensor) in numbered:
            entry.index, names = numbered[id(tensor)]
            entry.roles = tuple(sorted(_state.kept(tensor, names), key=_checkpoint.ROLES.index))
        elif opt._windows is not None and id(tensor) in opt._sharded:
            entry.index = opt._sharded[id(tensor)]
        else:
            entry.values, entry.store = lambda: as_values(tensor), lambda values: store(tensor, values)
        if entry.index is not None:
            strides = opt._windows.layout[id(tensor)][1] if opt._windows is not None else tensor.stride()
            if not is_row_major(entry.shape, strides):
                entry.strides = tuple(strides)
        found.append(entry)

    for name, tensor, _ in opt._managed:
        add(name, tensor, "parameter")
    for name, tensor, _ in opt._frozen:
        add(name, tensor, "frozen")
    if opt._whole is not None:
        for name, tensor in opt._whole.named_parameters():
            add(name, tensor, "frozen")
        for name, tensor in persistent_buffers(opt._whole):
            add(name, tensor, "buffer")
    return found


def is_row_major(shape, strides):
    wanted = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != wanted:
            return 0 in shape
        wanted *= size
    return True


def aliases(opt):
    """id -> all names of a tensor in the module; the first is the one that named_parameters() gives."""
    names = {}
    if opt._whole is not None:
        for name, tensor in (*opt._whole.named_parameters(remove_duplicate=False), *persistent_buffers(opt._whole)):
            names.setdefault(id(tensor), []).append(name)
    return names


def persistent_buffers(module):
    """(name, buffer) of those that a state_dict has."""
    for prefix, part in module.named_modules():
        for key, buffer in part._buffers.items():
            if buffer is not None and key not in part._non_persistent_buffers_set:
                yield f"{prefix}.{key}" if prefix else key, buffer


def as_values(tensor):
    """A NumPy array with a tensor's values; bfloat16 as its bits."""
    tensor = tensor.detach().cpu().contiguous()
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def store(tensor, values):
    values = torch.from_numpy(values)
    with torch.no_grad():
        tensor.copy_(values.view(torch.bfloat16) if tensor.dtype == torch.bfloat16 else values)


def about(opt):
    """What the manifest says of the optimizer."""
    groups = [(options_of(group), len(group["params"])) for group in opt.param_groups]
    return _checkpoint.about(opt._optimizer, groups, opt._scale.state_dict(), opt.last_step.steps, opt._stage, opt._comm)


def like(value, old):
    """A loaded value as the group has it now."""
    if isinstance(old, torch.Tensor):
        return torch.full_like(old, value)
    return _checkpoint.like(value, old)


def load(opt, folder):
    """Collective. Everything of `opt` and its module takes the values of the checkpoint, or nothing does."""
    opt._refresh_written()  # weights that were written before this must not displace masters later
    manifest = _loading.load(opt._engine, opt._comm, folder, opt._stage == 0, opt.param_groups, opt._optimizer, like,
                             lambda: entries(opt), opt._core_groups)
    opt._scale.load_state_dict(manifest["loss_scale"])
    opt.last_step.steps = manifest["steps"]
    opt._follow_options()
    opt._hooks.written()
    if opt._windows is not None:
        opt._windows.changed()
