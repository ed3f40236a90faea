"""What the user handed over: parameters, their names and groups, checked before anything is changed."""

import torch

import zero_c

from ._guard import GuardedParameter

DEVICES = ("cpu", "cuda")
DTYPES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16", torch.float16: "float16"}

# Wrappers that shard or synchronise on their own, by the name of their class.
WRAPPERS = {
    "DistributedDataParallel": "pass the module inside it (.module); zero_c averages gradients itself",
    "DataParallel": "pass the module inside it (.module), and start one process per device",
    "FullyShardedDataParallel": "pass the module before wrapping it",
    "FSDPModule": "pass the module before fully_shard()",
}


def refuse_wrapped(module):
    """Modules that do the same work as this optimizer."""
    for name, part in module.named_modules():
        for kind in type(part).__mro__:
            if kind.__name__ in WRAPPERS and kind.__module__.startswith("torch."):
                where = f"submodule '{name}'" if name else "the module"
                raise TypeError(f"{where} is wrapped in {kind.__name__}, which shards or synchronises gradients "
                                f"itself: {WRAPPERS[kind.__name__]}")


def named_tensors(module):
    """id(tensor) -> its first name in the module."""
    names = {}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), name)
    return names


def places(module):
    """id(parameter) -> (dict that holds it, key): where the module keeps it, for the check at each step."""
    found = {}
    for part in module.modules():
        for key, parameter in part._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), (part._parameters, key))
    return found


def read_groups(params):
    """The first argument as a list of group dicts, each with a list of tensors and, where given, their names."""
    if isinstance(params, torch.nn.Module):
        refuse_wrapped(params)
        params = list(params.named_parameters())
        if not params:
            raise ValueError("the module has no parameters, so there is nothing to optimize")
    if isinstance(params, torch.Tensor):
        raise TypeError(f"params is a single {torch.typename(params)}; pass a module, or an iterable of tensors, of "
                        f"(name, tensor) pairs or of group dicts")
    if isinstance(params, (set, frozenset)):
        raise TypeError("params is a set, whose order differs between ranks and runs; pass a list")
    groups = list(params)
    if not groups:
        raise ValueError("params is empty: an optimizer needs at least one parameter")
    if not isinstance(groups[0], dict):
        groups = [{"params": groups}]
    return [read_group(group) for group in groups]


def options_of(group):
    """What a group says besides its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def read_group(group):
    """One group as a new dict."""
    if not isinstance(group, dict):
        raise TypeError(f"a parameter group must be a dict with the key 'params', got {type(group).__name__}; tensors "
                        f"and groups cannot be mixed in one list")
    if "params" not in group:
        raise ValueError(f"a parameter group needs the key 'params'; it has {sorted(group)}")
    given = group["params"]
    if isinstance(given, (set, frozenset)):
        raise TypeError("the parameters of a group are in a set, whose order differs between ranks; use a list")
    given = [given] if isinstance(given, torch.Tensor) else list(given)
    pairs = [item if isinstance(item, tuple) else (None, item) for item in given]
    for pair in pairs:
        if len(pair) != 2 or not isinstance(pair[1], torch.Tensor):
            found = type(pair[1]).__name__ if len(pair) == 2 else f"a tuple of {len(pair)}"
            raise TypeError(f"a parameter must be a tensor or a (name, tensor) pair, got {found}")
    named = [name for name, _ in pairs if name is not None]
    if named and len(named) != len(pairs):
        raise ValueError("some parameters of a group have names and some have not; name all of them, or none")
    read = {**group, "params": [tensor for _, tensor in pairs]}
    if named:
        read["param_names"] = named
    return read


def name_all(groups, names, first_group=0):
    """id(tensor) -> name, for every parameter; `names` are the module's."""
    found = {}
    for number, group in enumerate(groups, first_group):
        for position, tensor in enumerate(group["params"]):
            given = group["param_names"][position] if "param_names" in group else None
            found[id(tensor)] = given or names.get(id(tensor)) or f"group {number} parameter {position}"
    return found


def check_once(groups, names):
    """A parameter may be listed once only, and a name may be one parameter's only: checkpoints have them by name."""
    seen, named = {}, {}
    for number, group in enumerate(groups):
        for tensor in group["params"]:
            name = names[id(tensor)]
            if id(tensor) in seen:
                raise ValueError(f"parameter '{name}' appears twice: in group {seen[id(tensor)]} and in "
                                 f"group {number}; it would be updated twice")
            if name in named:
                raise ValueError(f"two parameters are named '{name}': in group {named[name]} and in group {number}; give each a "
                                 f"name of its own")
            seen[id(tensor)] = named[name] = number


def device_of(named):
    """Where all of these (name, tensor) pairs are; those on the meta device are anywhere."""
    found = None
    for name, tensor in named:
        if tensor.is_meta:
            continue
        if found is not None and tensor.device != found[1]:
            raise ValueError(f"'{found[0]}' is on '{found[1]}' and '{name}' on '{tensor.device}'; all parameters and buffers must "
                             f"be on one device")
        found = name, tensor.device
    return torch.device("cpu") if found is None else found[1]


def check_tensor(tensor, name, active_hook, meta=False):
    """A tensor that the engine can own, or an error that says why not."""
    kind = type(tensor)
    if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        raise ValueError(f"parameter '{name}' is not initialised yet (a lazy module): run one forward first")
    if kind is GuardedParameter:
        raise zero_c.Error(f"parameter '{name}' is in the shards of another ShardedOptimizer already; keep one optimizer for it")
    if kind not in (torch.Tensor, torch.nn.Parameter):
        raise TypeError(f"parameter '{name}' is a {kind.__module__}.{kind.__qualname__}; tensor subclasses, DTensor "
                        f"among them, are not supported, pass plain parameters")
    if not tensor.is_leaf:
        raise ValueError(f"parameter '{name}' is not a leaf (the result of {tensor.grad_fn.name()}): it would never "
                         f"get a gradient; optimize the tensor it was computed from, or detach it first")
    if tensor.layout != torch.strided:
        raise TypeError(f"parameter '{name}' has layout {tensor.layout}; only dense (strided) ones are supported")
    if tensor.device.type not in DEVICES and not (meta and tensor.is_meta):
        raise ValueError(f"parameter '{name}' is on device '{tensor.device}'; legal are 'cpu' and 'cuda'")
    if tensor.requires_grad and tensor.dtype not in DTYPES:
        legal = ", ".join(sorted(DTYPES.values()))
        raise TypeError(f"parameter '{name}' has dtype {tensor.dtype}; legal: {legal}")
    for hook in (getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values():
        if active_hook(hook):
            raise ValueError(f"parameter '{name}' belongs to another ShardedOptimizer; delete that one first")
    if overlaps_itself(tensor):
        raise ValueError(f"parameter '{name}' is expanded or overlaps itself (shape {tuple(tensor.shape)}, strides "
                         f"{tensor.stride()}): several elements share memory; pass a clone()")


def check_apart(tensors, names):
    """Different parameters must not share memory: moved apart they would stop being tied."""
    spans = sorted((t.data_ptr(), t.data_ptr() + span_bytes(t), names[id(t)]) for t in tensors
                   if t.numel() and not t.is_meta)
    for (_, end, first), (begin, _, second) in zip(spans, spans[1:], strict=False):
        if begin < end:
            raise ValueError(f"parameters '{first}' and '{second}' share memory; use one Parameter in both places "
                             f"to tie them, or clone() one of them")


def span_bytes(tensor):
    """Bytes from the first to behind the last element."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size() if tensor.numel() else 0


def overlaps_itself(tensor):
    """Whether two indices may mean the same memory (as torch judges it, from sizes and strides)."""
    needed = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if tensor.numel() and size > 1:
            if stride < needed:
                return True
            needed = stride * (size - 1) + needed
    return False


def dense_strides(tensor):
    """The tensor's own strides where its elements fill their memory, otherwise those of a copy in the same order."""
    if span_bytes(tensor) == tensor.numel() * tensor.element_size():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()
