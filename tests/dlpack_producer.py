"""A DLPack producer in plain ctypes, which can be told to be wrong in every way a test needs.

    producer = Producer(numpy_array, versioned=True, flags=READ_ONLY)
    _core.as_array(producer)
    producer.deleted                      # how often its deleter ran

The capsules own nothing but a count; the array outlives them with the producer.
"""

import ctypes

READ_ONLY = 1
CPU, CUDA, CUDA_PINNED, CUDA_MANAGED = 1, 2, 3, 13
TYPES = {"f": 2, "i": 0, "u": 1}


class Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_index", ctypes.c_int32),
                ("dims", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("offset_bytes", ctypes.c_uint64)]


class Managed(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class ManagedVersioned(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", Tensor)]


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
capsule_name = ctypes.pythonapi.PyCapsule_GetName
capsule_name.restype, capsule_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
capsule_is_valid = ctypes.pythonapi.PyCapsule_IsValid
capsule_is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]


class Producer:
    """Exports `array`; every keyword replaces what an honest producer would say."""

    def __init__(self, array, *, versioned=True, major=1, minor=0, flags=0, device=(CPU, 0), reported=None, code=None,
                 bits=None, lanes=1, shape=None, strides="own", data="own", name=None, accepts_version=True, error=None):
        self.array, self.versioned, self.version, self.flags = array, versioned, (major, minor), flags
        self.device, self.reported = device, reported or device
        self.code = TYPES[array.dtype.kind] if code is None else code
        self.bits = 8 * array.dtype.itemsize if bits is None else bits
        self.lanes, self.name, self.accepts_version, self.error = lanes, name, accepts_version, error
        self.shape = array.shape if shape is None else shape
        own = tuple(stride // array.dtype.itemsize for stride in array.strides)
        self.strides = own if strides == "own" else strides
        self.data = array.ctypes.data if data == "own" else data
        self.asked, self.deleted, self.capsules, self._kept = [], 0, [], []

    def __dlpack_device__(self):
        return self.reported

    def __dlpack__(self, **keywords):
        self.asked.append(keywords)
        if not self.accepts_version and "max_version" in keywords:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        if self.error is not None:
            raise self.error
        return self.capsule()

    def capsule(self):
        dims = len(self.shape)
        shape = (ctypes.c_int64 * max(dims, 1))(*self.shape)
        strides = None if self.strides is None else (ctypes.c_int64 * max(dims, 1))(*self.strides)
        tensor = Tensor(self.data, *self.device, dims, self.code, self.bits, self.lanes,
                        ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)),
                        ctypes.cast(strides, ctypes.POINTER(ctypes.c_int64)) if strides else None, 0)

        def delete(address):
            self.deleted += 1

        deleter = DELETER(delete)
        address = ctypes.cast(deleter, ctypes.c_void_p)
        if self.versioned:
            managed = ManagedVersioned(*self.version, None, address, self.flags, tensor)
        else:
            managed = Managed(tensor, None, address)
        self._kept += [shape, strides, deleter, managed]
        name = self.name or (b"dltensor_versioned" if self.versioned else b"dltensor")
        capsule = new_capsule(ctypes.addressof(managed), name, None)
        self.capsules.append(capsule)
        return capsule
