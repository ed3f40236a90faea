"""Parameters move into the engine's memory, one by one, and gradients are routed to it."""

import ctypes
import functools
import gc
import math

import numpy
import torch

import zero_c
from zero_c import _core

from . import _guard
from ._arguments import DEVICES, dense_strides, overlaps_itself

# DLPack's codes of the dtypes that the engine takes.
CODES = {torch.float32: (2, 32), torch.float64: (2, 64), torch.float16: (2, 16), torch.bfloat16: (4, 16)}


def flat(tensor, strides):
    """The elements in the order in which they lie in memory, where the strides are its own; otherwise of a copy."""
    values = tensor.detach()
    if tensor.numel() and values.stride() != tuple(strides):
        values = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(values)
    return values.as_strided((tensor.numel(),), (1,))


def put(engine, index, values):
    """Copies a parameter's elements into the engine, from where it is: on a GPU in the order of torch's current stream."""
    if engine.gpu < 0:
        engine.load_param(index, values)
    else:
        follow_stream(engine)
        engine.load_from_device(index, _core.GpuArray(values, stream_of(engine.gpu), "value"))


def load(engine, first, tensors):
    """Copies values into the engine and makes each tensor a view of its memory; the old memory goes as this does."""
    for index in reversed(range(len(tensors))):
        tensor = tensors[index]
        strides = dense_strides(tensor)
        put(engine, first + index, flat(tensor, strides))
        if tensor.numel():
            tensor.data = torch.from_dlpack(engine.param_dlpack(first + index, tuple(tensor.shape), tuple(strides)))
    complete(engine)


def load_sharded(engine, tensors, later):
    """Stage 3: values go to the shards, rank 0's on every rank; each tensor shows NaN afterwards, its old memory goes.

    later: id(tensor) -> strides, of those whose values come later.  Returns views of the units' memory, as the tensors
    will be while their units are in use.
    """
    views = [None] * len(tensors)
    for index in reversed(range(len(tensors))):
        tensor = tensors[index]
        strides = later.get(id(tensor)) or tuple(dense_strides(tensor))
        if id(tensor) not in later:
            engine.load_param(index, flat(tensor, strides).cpu())
        views[index] = tensor.data
        if tensor.numel():
            views[index] = torch.from_dlpack(engine.param_dlpack(index, tuple(tensor.shape), strides))
            tensor.data = _guard.nan_guard(tensor)
    return views


def make_windows(engine, units, views, places):
    """Gives every unit its window, closed: parameters show their guards; views: id(parameter) -> view of the unit's
    memory.
    """
    for unit in units:
        rows = []
        for _, parameter in unit.members:
            guard = parameter.data if parameter.numel() else None
            rows.append((parameter, views[id(parameter)], guard, *places.get(id(parameter), (None, None))))
        unit.window = _core.Window(rows, describe, getattr(torch.Tensor, "__dlpack_c_exchange_api__", None),
                                    torch.nn.Parameter, _guard.GuardedParameter)
        unit.first_address, size = engine.unit_range(unit.index)
        unit.last_address = unit.first_address + size


def guard_state_dicts(runtime):
    """Saving or loading a module whose parameters are not there raises, instead of saving NaN."""
    def refuse(own, what):
        missing = next((parameter for parameter in own if parameter.numel() and not runtime.is_held(parameter)), None)
        if missing is not None:
            name = runtime.name_of(missing)
            raise zero_c.Error(f"rank {runtime.rank}: {what}, but parameter '{name}' is sharded and not here; do it inside "
                               f"`with opt.gathered({'write=True' if 'loaded' in what else ''}):`, on all ranks")

    for module in runtime.units[0].module.modules():
        own = [parameter for parameter in module._parameters.values() if id(parameter) in runtime.layout]
        if not own:
            continue
        runtime.handles += [
            module.register_state_dict_pre_hook(lambda *_, own=own: refuse(own, "a state_dict is made")),
            module.register_load_state_dict_pre_hook(lambda *_, own=own: refuse(own, "a state_dict is loaded")),
        ]


def shaped(array, layout, dtype):
    """A flat NumPy array (bfloat16: its bits) as a tensor with this (shape, strides)."""
    shape, strides = layout
    values = torch.from_numpy(array.view(numpy.int16)).view(dtype) if dtype == torch.bfloat16 else torch.from_numpy(array)
    return values.as_strided(shape, strides) if values.numel() else values.view(shape)


def complete(engine):
    """All parameters were loaded: the engine makes the rest of its memory, out of what they have left."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    if engine.gpu >= 0:
        torch.cuda.empty_cache()
    engine.publish()
    settle_allocator(engine.plan()["ring_bytes"])


def settle_allocator(ring_bytes):
    """With glibc: keeps the memory of gradients that come and go.

    What is freed at the top of the heap goes back to the system, and the next gradient faults it in again, unless
    glibc has seen a large block come and go: it keeps up to twice the largest one (of at most 32 MiB). So one block, as
    large as the gradients that may wait for a full ring of windows and 8 MiB, comes, untouched, and goes.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        return
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.free(libc.malloc(min(ring_bytes + (8 << 20), (32 << 20) - (64 << 10))))


def check_plain(tensor, name, what):
    """A buffer or frozen parameter that can be broadcast."""
    if tensor.layout != torch.strided or tensor.device.type not in DEVICES:
        raise ValueError(f"{what} '{name}' is on '{tensor.device}' with layout {tensor.layout}; needed: dense, on 'cpu' or "
                         f"'cuda'")
    if overlaps_itself(tensor):
        raise ValueError(f"{what} '{name}' is expanded or overlaps itself (shape {tuple(tensor.shape)}, strides "
                         f"{tensor.stride()}); register a clone()")


def broadcast(comm, tensors):
    """Every rank's tensors become rank 0's; a big one moves without a copy when its memory is one piece."""
    for tensor in tensors:
        if not tensor.numel() or comm.world_size == 1:
            continue
        values = tensor.detach()
        strides = dense_strides(values)
        whole = flat(values, strides).cpu()
        comm.broadcast(whole.view(torch.uint8), 0)
        if whole.data_ptr() != values.data_ptr():
            values.copy_(torch.as_strided(whole, values.shape, strides))


class Guards:
    """NaN gradients of one element, expanded: what `.grad` shows while the engine holds the sums.

    One for each shape. The engine's sums would not notice a write to one: it is found by torch's counter of writes and,
    on the CPU, by the value, since writes through `.data` are not counted.
    """

    def __init__(self):
        self._made = {}  # (shape, dtype) -> the guard
        self._elements = []  # [the element of one guard, its counter of writes]

    def of(self, tensor):
        key = (tensor.shape, tensor.dtype)
        if key not in self._made:
            element = torch.full((), math.nan, dtype=tensor.dtype, device=tensor.device)
            self._made[key] = element.expand(tensor.shape)
            self._elements.append([element, element._version])
        return self._made[key]

    def restore(self):
        """They show NaN again; whether somebody had written to one."""
        found = False
        for entry in self._elements:
            element, version = entry
            if element._version != version or not (element.is_cuda or math.isnan(element.item())):
                found = True
                element.fill_(math.nan)
                entry[1] = element._version
        return found


def new_hooks(engine, managed, windowed=False):
    """The table of parameters in the core; `managed`: the growing list of (name, parameter, its layout_of)."""
    return _core.Hooks(engine, torch.autograd.Variable._execution_engine.queue_callback,
                       torch._C._current_autograd_node, describe, stream_of, functools.partial(relayout, managed, windowed),
                       getattr(torch.Tensor, "__dlpack_c_exchange_api__", None))


def attach(hooks, guards, tensor, place, windowed=False):
    """The next parameter of the table: from now on its gradients go to the engine."""
    owner, key = place or (None, None)
    has_master = tensor.dtype in (torch.bfloat16, torch.float16) and not windowed  # stage 3 sees its writes anyway
    before, after = hooks.add(tensor, guards.of(tensor), owner, key, has_master, windowed)
    tensor.register_hook(before)
    tensor.register_post_accumulate_grad_hook(after)


def describe(tensor):
    """What the core has to know of a tensor, where torch has no exchange table."""
    if tensor.layout != torch.strided or tensor.device.type not in DEVICES or tensor.dtype not in CODES:
        raise BufferError("not a dense floating-point tensor on the CPU or a GPU")
    gpu = tensor.device.index if tensor.is_cuda else -1
    return (tensor.data_ptr(), *CODES[tensor.dtype], tuple(tensor.shape), tuple(tensor.stride()), gpu)


def stream_of(gpu):
    """The address of the stream on which torch works on a GPU now."""
    return torch.cuda.current_stream(gpu).cuda_stream


def follow_stream(engine):
    """On a GPU the engine works where torch does; the hooks see to that in backward."""
    if engine.gpu >= 0:
        engine.use_stream(stream_of(engine.gpu))


def relayout(managed, windowed, index, grad):
    """A gradient that does not lie as its parameter does, copied so that it does."""
    name, parameter, put = managed[index]
    if not windowed and layout_of(parameter) != put:
        raise zero_c.Error(moved(name, parameter))
    if grad.layout != torch.strided:
        raise TypeError(f"parameter '{name}' got a gradient with layout {grad.layout}; only dense ones can be "
                        f"reduced (for an embedding: sparse=False)")
    if grad.shape != parameter.shape or grad.dtype != parameter.dtype or grad.device != parameter.device:
        raise TypeError(f"parameter '{name}' ({tuple(parameter.shape)}, {parameter.dtype}, {parameter.device}) got a "
                        f"gradient that is {tuple(grad.shape)}, {grad.dtype}, on {grad.device}; they must be alike")
    return torch.empty_strided(parameter.shape, put[3], dtype=grad.dtype, device=grad.device).copy_(grad.detach())


def layout_of(tensor):
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()


def moved(name, parameter):
    return (f"parameter '{name}' is not where the optimizer put it: it is now {tuple(parameter.shape)}, "
            f"{parameter.dtype}, on {parameter.device}. Something replaced its memory (.to(), .half(), .data = ..., "
            f"load_state_dict(assign=True)); change the module before building the optimizer, load with "
            f"load_state_dict() and write in place, or build a new ShardedOptimizer")


def replaced(name):
    return (f"parameter '{name}' of the module is not the Parameter that the optimizer was built with: the module has "
            f"another one in its place; build a new ShardedOptimizer, or copy the values into the old Parameter")


def as_tensor(array):
    """What the engine gives, a NumPy array or on a GPU an object with __dlpack__, as a tensor over the same memory."""
    return torch.from_numpy(array) if isinstance(array, numpy.ndarray) else torch.from_dlpack(array)
