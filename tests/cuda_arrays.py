"""Arrays on an emulated GPU, from NumPy and back, by DLPack; what stands in for torch's CUDA tensors in tests.

    gradient = cuda_arrays.to_gpu(numpy_array)       has __dlpack__ and __dlpack_device__ (CUDA, device 0)
    cuda_arrays.to_host(anything_on_the_gpu)         a NumPy array
    cuda_arrays.findings(), cuda_arrays.leaks()      what the emulation has to say; both must be empty

Memory behaves like that of a caching allocator: when the array and all that was exported of it are gone, the next
owner overwrites it, in the order of the array's stream. A consumer whose work on another stream may then still
read it is a finding.
"""

import ctypes
import functools
import sys

import numpy

import cuda_build
from dlpack_producer import CUDA, DELETER, TYPES, Managed, ManagedVersioned, Tensor, capsule_is_valid, new_capsule
from rank_numbers import BFLOAT16

BFLOAT = 4
# Capsules keep the address of their name, so these live as long as the module.
NAME, NAME_VERSIONED = b"dltensor", b"dltensor_versioned"
USED = {NAME: b"used_dltensor", NAME_VERSIONED: b"used_dltensor_versioned"}
LEGACY_STREAM, STREAM_PER_THREAD, NO_STREAM = 1, 2, -1  # of the array API's `stream`
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
NON_BLOCKING, DISABLE_TIMING = 1, 2
CAPTURE_GLOBAL = 0
VIRTUAL_MEMORY = 102  # CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
TEXT_BYTES = 1 << 16
# These remember the place that emu_at said last.
PLACED = {"cudaMalloc", "cudaFree", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaEventRecord", "cudaStreamWaitEvent",
          "cudaStreamSynchronize"}

Pointer, Size, Int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
ARGUMENTS = {
    "cudaSetDevice": [Int],
    "cudaGetDevice": [ctypes.POINTER(Int)],
    "cudaMalloc": [ctypes.POINTER(Pointer), Size],
    "cudaFree": [Pointer],
    "cudaMemcpyAsync": [Pointer, Pointer, Size, Int, Pointer],
    "cudaMemsetAsync": [Pointer, Int, Size, Pointer],
    "cudaStreamCreateWithFlags": [ctypes.POINTER(Pointer), ctypes.c_uint],
    "cudaStreamDestroy": [Pointer],
    "cudaStreamSynchronize": [Pointer],
    "cudaStreamWaitEvent": [Pointer, Pointer, ctypes.c_uint],
    "cudaEventCreateWithFlags": [ctypes.POINTER(Pointer), ctypes.c_uint],
    "cudaEventRecord": [Pointer, Pointer],
    "cudaEventDestroy": [Pointer],
    "cudaStreamBeginCapture": [Pointer, Int],
    "cudaStreamEndCapture": [Pointer, ctypes.POINTER(Pointer)],
    "cudaGraphInstantiate": [ctypes.POINTER(Pointer), Pointer, ctypes.c_ulonglong],
    "cudaGraphLaunch": [Pointer, Pointer],
    "cudaGraphDestroy": [Pointer],
    "cudaGraphExecDestroy": [Pointer],
    "emu_at": [ctypes.c_char_p, Int],
    "emu_nccl_processes": [Int],
    "emu_reset": [ctypes.c_uint64, Int, Int],
    "emu_set_attribute": [Int, Int],
    "emu_findings": [ctypes.c_char_p, Size],
    "emu_leaks": [ctypes.c_char_p, Size],
}

capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
capsule_pointer.restype, capsule_pointer.argtypes = Pointer, [ctypes.py_object, ctypes.c_char_p]
capsule_rename = ctypes.pythonapi.PyCapsule_SetName
capsule_rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
# For a capsule that is being destroyed: its address only, no reference.
DESTRUCTOR = ctypes.PYFUNCTYPE(None, Pointer)
dying_capsule_is_valid = ctypes.PYFUNCTYPE(Int, Pointer, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
dying_capsule_pointer = ctypes.PYFUNCTYPE(Pointer, Pointer, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))


@functools.cache
def library():
    loaded = ctypes.CDLL(str(cuda_build.build_plugin()))
    for name, arguments in ARGUMENTS.items():
        getattr(loaded, name).argtypes = arguments
    loaded.emu_nccl_processes(1)  # what uses this module has a process for every rank
    return loaded


def call(name, *arguments):
    """A function of CUDA, which must succeed."""
    if name in PLACED:
        library().emu_at(b"cuda_arrays.py", 0)
    error = getattr(library(), name)(*arguments)
    assert error == 0, f"{name} returned {error}; {findings()}"


class on_device:
    """Makes a device the current one for a while."""

    def __init__(self, device):
        self.device, self.previous = device, Int()

    def __enter__(self):
        call("cudaGetDevice", ctypes.byref(self.previous))
        call("cudaSetDevice", self.device)

    def __exit__(self, *_):
        call("cudaSetDevice", self.previous)


# ---- what the emulation has to say ------------------------------------------

_generation = 0  # of resets; what is older is void
_retired = []    # memory whose owners are gone
_exports = {}    # address of a managed tensor -> all that it needs


def _lines(function):
    text = ctypes.create_string_buffer(TEXT_BYTES)
    function(text, TEXT_BYTES)
    return text.value.decode().splitlines()


def reset(seed=0, eager=0):
    """A new machine, see emu_reset; arrays made before are void."""
    global _generation
    _generation += 1
    _retired.clear()
    library().emu_reset(seed, eager, 1)


def offer_virtual_memory(on):
    """Whether GPUs can give memory several addresses; stays over resets."""
    library().emu_set_attribute(VIRTUAL_MEMORY, int(on))


def findings():
    return _lines(library().emu_findings)


def leaks():
    """What is still there, arrays included."""
    _free_retired()
    return _lines(library().emu_leaks)


def new_stream(device=0):
    """A non-blocking stream, as the number that `stream=` takes."""
    out = Pointer()
    with on_device(device):
        call("cudaStreamCreateWithFlags", ctypes.byref(out), NON_BLOCKING)
    return out.value


def close_stream(stream):
    call("cudaStreamDestroy", stream)


class Graph:
    """What is enqueued on a stream inside `with graph:` does not run; each launch() does all of it. For close() when done."""

    def __init__(self, stream):
        self.stream, self.exec = stream, Pointer()

    def __enter__(self):
        call("cudaStreamBeginCapture", self.stream, CAPTURE_GLOBAL)
        return self

    def __exit__(self, error, *_):
        graph = Pointer()
        call("cudaStreamEndCapture", self.stream, ctypes.byref(graph))  # fails where the capture is void
        if error is None:
            call("cudaGraphInstantiate", ctypes.byref(self.exec), graph, 0)
        call("cudaGraphDestroy", graph)

    def launch(self):
        call("cudaGraphLaunch", self.exec, self.stream)

    def close(self):
        call("cudaGraphExecDestroy", self.exec)


# ---- memory ------------------------------------------------------------------


class Memory:
    """Device memory; shared by the array and its exports, and retired with the last of them."""

    def __init__(self, size_bytes, device, stream):
        self.bytes, self.device, self.stream, self.generation = size_bytes, device, stream, _generation
        out = Pointer()
        with on_device(device):
            call("cudaMalloc", ctypes.byref(out), size_bytes)
        self.address = out.value

    def __del__(self):
        if getattr(self, "address", None) and self.generation == _generation and not sys.is_finalizing():
            with on_device(self.device):
                call("cudaMemsetAsync", self.address, 0xff, self.bytes, self.stream)
            _retired.append((self.address, self.device, self.stream))


def _free_retired():
    while _retired:
        address, device, stream = _retired.pop()
        with on_device(device):
            call("cudaStreamSynchronize", stream)
            call("cudaFree", address)


def _cuda_stream(stream):
    """The handle for the array API's number."""
    if stream == STREAM_PER_THREAD:
        raise BufferError("the emulated CUDA has no default stream per thread")
    return None if stream in (None, LEGACY_STREAM) else stream


def _order(stream, behind, device):
    """What is enqueued on `stream` from now on runs after what `behind` has."""
    if stream == behind:
        return
    event = Pointer()
    with on_device(device):
        call("cudaEventCreateWithFlags", ctypes.byref(event), DISABLE_TIMING)
        call("cudaEventRecord", event, behind)
        call("cudaStreamWaitEvent", stream, event, 0)
        call("cudaEventDestroy", event)


# ---- giving ------------------------------------------------------------------


@DELETER
def _delete(address):
    _exports.pop(address, None)


@DESTRUCTOR
def _destroy_capsule(capsule):
    for name in USED:  # not taken by anybody
        if dying_capsule_is_valid(capsule, name):
            _delete(dying_capsule_pointer(capsule, name))


class GpuArray:
    """A row-major array on a GPU; `stream` is where its values were written."""

    def __init__(self, values, device=0, stream=None):
        self.shape, self.dtype, self.device, self.stream = values.shape, values.dtype, device, stream
        self.memory = Memory(values.nbytes, device, stream)
        self.write(values)

    @property
    def address(self):
        return self.memory.address

    def write(self, values):
        """New values, in the order of its stream."""
        values = numpy.ascontiguousarray(values, self.dtype).reshape(self.shape)
        if values.nbytes:
            with on_device(self.device):
                call("cudaMemcpyAsync", self.address, values.ctypes.data, values.nbytes, HOST_TO_DEVICE, self.stream)

    def __dlpack_device__(self):
        return CUDA, self.device

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        if dl_device not in (None, self.__dlpack_device__()) or copy:
            raise BufferError("an array on a GPU is exported where it is")
        if stream != NO_STREAM:
            _order(_cuda_stream(stream), self.stream, self.device)
        return self._capsule(versioned=max_version is not None and max_version[0] >= 1)

    def _capsule(self, versioned):
        dims = len(self.shape)
        shape = (ctypes.c_int64 * max(dims, 1))(*self.shape)
        steps = [int(numpy.prod(self.shape[k + 1:], dtype=numpy.int64)) for k in range(dims)]
        strides = (ctypes.c_int64 * max(dims, 1))(*steps)
        code = BFLOAT if self.dtype == BFLOAT16 else TYPES[self.dtype.kind]
        tensor = Tensor(self.address, CUDA, self.device, dims, code, 8 * self.dtype.itemsize, 1, shape, strides, 0)
        deleter = ctypes.cast(_delete, Pointer)
        managed = ManagedVersioned(1, 0, None, deleter, 0, tensor) if versioned else Managed(tensor, None, deleter)
        address = ctypes.addressof(managed)
        _exports[address] = (managed, shape, strides, self.memory)
        return new_capsule(address, NAME_VERSIONED if versioned else NAME, ctypes.cast(_destroy_capsule, Pointer))


def to_gpu(values, device=0, stream=None):
    """A copy on a GPU. bfloat16 is what rank_numbers.BFLOAT16 is."""
    return GpuArray(numpy.ascontiguousarray(values).reshape(numpy.shape(values)), device, stream)


# ---- taking ------------------------------------------------------------------


def _ask(exporter, stream):
    try:
        return exporter.__dlpack__(stream=stream, max_version=(1, 1))
    except TypeError:
        return exporter.__dlpack__(stream=stream)


def _dtype_of(tensor):
    if (tensor.code, tensor.bits) == (BFLOAT, 16):
        return BFLOAT16
    kinds = {code: kind for kind, code in TYPES.items()}
    return numpy.dtype(f"{kinds[tensor.code]}{tensor.bits // 8}")


def _read(tensor, stream):
    """The values, by one copy of all bytes between the first and the last element."""
    dtype, shape = _dtype_of(tensor), tuple(tensor.shape[:tensor.dims])
    if 0 in shape:
        return numpy.empty(shape, dtype)
    strides = tensor.strides[:tensor.dims] if tensor.strides else [
        int(numpy.prod(shape[k + 1:], dtype=numpy.int64)) for k in range(len(shape))]
    reach = [(length - 1) * stride for length, stride in zip(shape, strides)]
    low, high = sum(min(r, 0) for r in reach), sum(max(r, 0) for r in reach)
    raw = numpy.empty(high - low + 1, dtype)
    first = tensor.data + tensor.offset_bytes + low * dtype.itemsize
    with on_device(tensor.device_index):
        call("cudaMemcpyAsync", raw.ctypes.data, first, raw.nbytes, DEVICE_TO_HOST, stream)
    view = numpy.lib.stride_tricks.as_strided(raw[-low:], shape, [stride * dtype.itemsize for stride in strides])
    return view.copy()


def to_host(exporter, stream=None):
    """The values of anything on an emulated GPU that has __dlpack__, read on `stream` in the order it promises."""
    assert exporter.__dlpack_device__()[0] == CUDA, exporter.__dlpack_device__()
    capsule = _ask(exporter, LEGACY_STREAM if stream is None else stream)
    versioned = capsule_is_valid(capsule, NAME_VERSIONED)
    name = NAME_VERSIONED if versioned else NAME
    managed = (ManagedVersioned if versioned else Managed).from_address(capsule_pointer(capsule, name))
    capsule_rename(capsule, USED[name])
    try:
        return _read(managed.tensor, stream)
    finally:
        if managed.deleter:
            DELETER(managed.deleter)(ctypes.addressof(managed))
