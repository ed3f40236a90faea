"""DLPack descriptors (csrc/py_dlpack.c): what another library says of its arrays.

An input is a descriptor over real memory, right or with wrong fields, and how the producer behaves.

    as_array gives an array that is laid out as the descriptor says, over the producer's memory or a copy of no elements,
    or raises BufferError, TypeError or ValueError with a sentence; what the producer itself raises comes out
    a tensor that was handed over is given back once: at once if it is refused, else with the array; one that was not is not
"""

import ctypes

import numpy

from choices import Choices
from dlpack_producer import CPU, CUDA, CUDA_MANAGED, CUDA_PINNED, READ_ONLY, Producer
from zero_c import _core

MEMORY = numpy.arange(4096, dtype=numpy.uint8)
DTYPES = {(2, 32): "float32", (2, 64): "float64", (2, 16): "float16", (4, 16): "bfloat16", (0, 32): "int32", (0, 64): "int64",
          (1, 8): "uint8"}
SIZES = [0, 1, 2, 3, 5, 8, -1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, -2**63]
STRIDES = [0, 1, 2, 3, 8, -1, -3, 2**31, 2**60, 2**61, 2**63 - 1, -2**63]
ODD_DEVICES = [None, 7, "cpu", (1,), (1, 0, 0), [1, 0], (2**70, 0), (-2**70, 0), (None, 0), ("x", 0)]


class Fault(Exception):
    """Of the producer."""


def producer_of(choices):
    how = {"versioned": bool(choices.below(4))}
    if how["versioned"]:
        how["major"] = choices.pick([1, 1, 1, 1, 0, 2, 2**32 - 1])
        how["flags"] = choices.pick([0, 0, READ_ONLY, 2, 2**63 + 4])
    how["code"], how["bits"] = choices.pick(list(DTYPES)) if choices.below(8) else (choices.byte(), choices.byte())
    how["lanes"] = 1 if choices.below(8) else choices.below(65536)
    device = (choices.pick([CPU, CPU, CPU, CUDA_PINNED, CUDA_MANAGED, CUDA, 0, -1, 2**31 - 1]), choices.pick([0, 0, 1, -1]))
    how["device"] = device
    if choices.below(8) == 0:
        how["reported"] = choices.pick([(CPU, 0), *ODD_DEVICES])
    dims = choices.below(5) if choices.below(8) else choices.below(70)
    how["shape"] = [choices.below(5) if choices.below(4) else choices.pick(SIZES) for _ in range(dims)]
    how["strides"] = [choices.below(5) if choices.below(4) else choices.pick(STRIDES) for _ in range(dims)] if choices.below(2) else None
    how["data"] = MEMORY.ctypes.data + choices.below(64) if choices.below(8) else None
    how["accepts_version"] = bool(choices.below(4))
    how["name"] = None if choices.below(16) else choices.pick([b"dltensor", b"dltensor_versioned", b"used_dltensor", b"x", b""])
    how["error"] = None if choices.below(16) else choices.pick([Fault("fault"), TypeError("keyword argument"), BufferError("no")])
    if how["name"] in (b"dltensor", b"dltensor_versioned") and how["versioned"] != (how["name"] == b"dltensor_versioned"):
        how["name"] = None  # a capsule of the other kind is no descriptor that could be read
    return Producer(MEMORY, **how)


class WithMore(Producer):
    """Fields that Producer does not have: dims that are none, an offset, no deleter, no shape."""

    def __init__(self, producer, choices):
        self.__dict__ = producer.__dict__
        self._dims = choices.pick([-1, 65, 2**31 - 1, -2**31]) if choices.below(16) == 0 else None
        self.offset = choices.below(64) if choices.below(4) == 0 else 0
        self._no_deleter = choices.below(16) == 0
        self._no_shape = choices.below(16) == 0

    def capsule(self):
        capsule = super().capsule()
        managed = self._kept[-1]
        if self._dims is not None:
            managed.tensor.dims = self._dims
        managed.tensor.offset_bytes = self.offset
        if self._no_deleter:
            managed.deleter = None
        if self._no_shape:
            managed.tensor.shape = None
        return capsule


def check(array, dtype, producer, writable):
    shape = tuple(producer.shape) if not (producer._no_shape and not producer.shape) else ()
    assert dtype == DTYPES[producer.code, producer.bits] and producer.lanes == 1, dtype
    assert array.shape == shape and producer._dims is None, (array.shape, shape)
    if array.size and producer.data is not None:
        assert array.ctypes.data == producer.data + producer.offset
        if producer.strides is not None:
            own = zip(array.strides, producer.strides, array.shape, strict=True)
            assert all(have == want * array.itemsize for have, want, size in own if size > 1), array.strides
        else:
            assert array.flags.c_contiguous
    assert not (array.size and array.flags.writeable and producer.versioned and producer.flags & READ_ONLY)
    assert not (writable and not array.flags.writeable)


def one_input(data):
    choices = Choices(data)
    writable = bool(choices.below(2))
    producer = WithMore(producer_of(choices), choices)
    given = False
    try:
        array, dtype = _core.as_array(producer, writable, "the array")
        given = True
        check(array, dtype, producer, writable)
        del array
    except (BufferError, TypeError, ValueError) as error:
        text = str(error)
        assert not given, text
        assert producer.error is error or "the array" in text, text
    except Fault as fault:
        assert fault is producer.error
    consumed = sum(b"used_" in _name(capsule) for capsule in producer.capsules if producer.name not in (b"used_dltensor",))
    wanted = 0 if producer._no_deleter else consumed
    assert producer.deleted == wanted, (producer.deleted, wanted)
    producer._kept.clear()  # a cycle, by its deleter


def _name(capsule):
    name = ctypes.pythonapi.PyCapsule_GetName
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    return name(capsule)
