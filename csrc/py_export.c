/*
 * Memory of an engine for other libraries: the Export object.
 *
 * Every consumer gets a managed tensor of its own, which holds a reference to
 * the owner of the memory and gives it back from any thread.  When the
 * interpreter is gone there is nothing to give back to.
 */
#include "py_engine.h"

typedef struct py_export {
    PyObject_HEAD
    PyObject *owner; /* the Engine */
    int gpu;         /* -1: the CPU */
    void *data;
    zc_dtype dtype;
    int dims;
    int64_t shape[ZC_MAX_DIMS], strides[ZC_MAX_DIMS];
} py_export;

/* One managed tensor with its shape and strides, in one allocation. */
typedef struct export_managed {
    union {
        dl_managed plain;
        dl_managed_versioned versioned;
    } managed;
    int64_t layout[];
} export_managed;

static void release_owner(PyObject *owner)
{
#if PY_VERSION_HEX >= 0x030d0000
    int gone = !Py_IsInitialized() || Py_IsFinalizing();
#else
    int gone = !Py_IsInitialized() || _Py_IsFinalizing();
#endif
    if (gone)
        return; /* the process is about to end, and its memory with it */
    PyGILState_STATE gil = PyGILState_Ensure();
    Py_DECREF(owner);
    PyGILState_Release(gil);
}

static void delete_plain(dl_managed *self)
{
    release_owner(self->context);
    free(self);
}

static void delete_versioned(dl_managed_versioned *self)
{
    release_owner(self->context);
    free(self);
}

/* A capsule that nobody consumed gives its tensor back itself. */
static void export_capsule_destroy(PyObject *capsule)
{
    if (PyCapsule_IsValid(capsule, DL_NAME_VERSIONED))
        delete_versioned(PyCapsule_GetPointer(capsule, DL_NAME_VERSIONED));
    else if (PyCapsule_IsValid(capsule, DL_NAME))
        delete_plain(PyCapsule_GetPointer(capsule, DL_NAME));
}

static dl_device device_of(const py_export *self)
{
    return self->gpu < 0 ? (dl_device){DL_CPU, 0} : (dl_device){DL_CUDA, self->gpu};
}

static PyObject *export_capsule(py_export *self, int versioned)
{
    size_t dims = (size_t)self->dims;
    export_managed *block = malloc(sizeof *block + 2 * dims * sizeof *block->layout);

    if (!block)
        return PyErr_NoMemory();
    memcpy(block->layout, self->shape, dims * sizeof *block->layout);
    memcpy(block->layout + dims, self->strides, dims * sizeof *block->layout);
    dl_tensor tensor = {.data = self->data, .device = device_of(self), .dims = self->dims,
                        .dtype = py_dlpack_type(self->dtype), .shape = block->layout, .strides = block->layout + dims};
    if (versioned)
        block->managed.versioned = (dl_managed_versioned){{DL_MAJOR, DL_MINOR}, self->owner, delete_versioned, 0, tensor};
    else
        block->managed.plain = (dl_managed){tensor, self->owner, delete_plain};
    PyObject *capsule = PyCapsule_New(block, versioned ? DL_NAME_VERSIONED : DL_NAME, export_capsule_destroy);
    if (!capsule) {
        free(block);
        return NULL;
    }
    Py_INCREF(self->owner);
    return capsule;
}

/* The consumer's stream sees what the engine has enqueued: 0, or -1 with BufferError. */
static int order_stream(py_export *self, PyObject *stream)
{
    long long address = stream == Py_None ? 1 : PyLong_AsLongLong(stream); /* None: the legacy default stream is assumed */

    if (address == -1 && PyErr_Occurred())
        return -1;
    if (self->gpu < 0 && stream != Py_None) {
        PyErr_Format(PyExc_BufferError, "stream is %R; memory of the CPU has none, pass None", stream);
        return -1;
    }
    if (address == 0) {
        PyErr_SetString(PyExc_BufferError, "stream is 0, which DLPack leaves open; pass 1 (legacy), 2 (per thread) or an "
                                           "address");
        return -1;
    }
    if (self->gpu < 0 || address == -1) /* -1: the consumer sees to the order itself */
        return 0;
    return py_engine_order((py_engine *)self->owner, address == 1 ? NULL : (void *)(uintptr_t)address);
}

PyDoc_STRVAR(export_dlpack_doc,
             "__dlpack__(*, stream=None, max_version=None, dl_device=None, copy=None)\n--\n\n"
             "A DLPack capsule over the engine's memory, writable and without a copy.");

static PyObject *export_dlpack(py_export *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"stream", "max_version", "dl_device", "copy", NULL};
    PyObject *stream = Py_None, *max_version = Py_None, *device = Py_None, *copy = Py_None;
    long major = 0, minor = 0, device_type, device_index;

    if (!PyArg_ParseTupleAndKeywords(args, keywords, "|$OOOO:__dlpack__", names, &stream, &max_version, &device, &copy))
        return NULL;
    if (device != Py_None) {
        if (!PyArg_ParseTuple(device, "ll:dl_device", &device_type, &device_index))
            return NULL;
        if (device_type != device_of(self).type || device_index != device_of(self).index) {
            PyErr_Format(PyExc_BufferError, "dl_device is %R; this memory is on (%d, %d)", device,
                         (int)device_of(self).type, (int)device_of(self).index);
            return NULL;
        }
    }
    if (copy != Py_None) {
        int wants_copy = PyObject_IsTrue(copy);
        if (wants_copy < 0)
            return NULL;
        if (wants_copy) {
            PyErr_SetString(PyExc_BufferError, "copy=True: only the engine's own memory is exported; copy it afterwards");
            return NULL;
        }
    }
    if (max_version != Py_None && !PyArg_ParseTuple(max_version, "ll:max_version", &major, &minor))
        return NULL;
    return order_stream(self, stream) ? NULL : export_capsule(self, major >= 1);
}

static PyObject *export_dlpack_device(py_export *self, PyObject *unused)
{
    (void)unused;
    return Py_BuildValue("(ii)", (int)device_of(self).type, (int)device_of(self).index);
}

static void export_dealloc(py_export *self)
{
    PyTypeObject *type = Py_TYPE(self);

    Py_XDECREF(self->owner);
    type->tp_free(self);
    Py_DECREF(type);
}

/* Reads `dims` integers >= 0: 0, or -1 with an exception. */
static int read_sizes(PyObject *sequence, Py_ssize_t dims, const char *what, int64_t *out)
{
    for (Py_ssize_t dim = 0; dim < dims; dim++) {
        PyObject *item = PySequence_GetItem(sequence, dim);
        if (!item)
            return -1;
        out[dim] = PyLong_AsLongLong(item);
        Py_DECREF(item);
        if (out[dim] == -1 && PyErr_Occurred())
            return -1;
        if (out[dim] < 0) {
            PyErr_Format(PyExc_ValueError, "%s of dimension %zd is %lld; it must be 0 or more", what, dim,
                         (long long)out[dim]);
            return -1;
        }
    }
    return 0;
}

/* Whether shape and strides stay within `elems` elements: 0, or -1 with ValueError. */
static int check_layout(const py_export *self, size_t elems)
{
    uint64_t count = 1, last = 0;
    int possible = 1;

    for (int dim = 0; dim < self->dims; dim++) {
        uint64_t reach = 0;
        possible &= !__builtin_mul_overflow(count, (uint64_t)self->shape[dim], &count);
        if (self->shape[dim])
            possible &= !__builtin_mul_overflow((uint64_t)self->shape[dim] - 1, (uint64_t)self->strides[dim], &reach);
        possible &= !__builtin_add_overflow(last, reach, &last);
    }
    if (possible && count == elems && (count == 0 || last < elems))
        return 0;
    PyErr_Format(PyExc_ValueError, "shape and strides do not describe exactly %zu elements", elems);
    return -1;
}

PyObject *py_export_new(py_state *state, void *data, size_t elems, zc_dtype dtype, PyObject *shape, PyObject *strides,
                        PyObject *engine, int gpu)
{
    Py_ssize_t dims = shape ? PySequence_Size(shape) : 1;

    if (dims < 0)
        return NULL;
    if (dims > ZC_MAX_DIMS || (shape && PySequence_Size(strides) != dims)) {
        if (!PyErr_Occurred())
            PyErr_Format(PyExc_ValueError, "shape %R and strides %R must have the same length, at most %d", shape, strides,
                         ZC_MAX_DIMS);
        return NULL;
    }
    py_export *self = PyObject_New(py_export, state->export_type);
    if (!self)
        return NULL;
    self->owner = NULL;
    self->gpu = gpu;
    self->data = data;
    self->dtype = dtype;
    self->dims = (int)dims;
    self->shape[0] = (int64_t)elems;
    self->strides[0] = 1;
    if (shape && (read_sizes(shape, dims, "size", self->shape) || read_sizes(strides, dims, "stride", self->strides)
                  || check_layout(self, elems))) {
        Py_DECREF(self);
        return NULL;
    }
    self->owner = Py_NewRef(engine);
    return (PyObject *)self;
}

static PyMethodDef export_methods[] = {
    {"__dlpack__", (PyCFunction)(void (*)(void))export_dlpack, METH_VARARGS | METH_KEYWORDS, export_dlpack_doc},
    {"__dlpack_device__", (PyCFunction)export_dlpack_device, METH_NOARGS,
     "__dlpack_device__()\n--\n\n(1, 0): the CPU; (2, n): GPU n."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot export_slots[] = {
    {Py_tp_dealloc, export_dealloc},
    {Py_tp_methods, export_methods},
    {Py_tp_doc, "Memory of an engine for other libraries, through DLPack."},
    {0, NULL},
};

static PyType_Spec export_spec = {
    .name = "zero_c._core.Export",
    .basicsize = sizeof(py_export),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = export_slots,
};

int py_export_add(PyObject *module)
{
    py_state *state = PyModule_GetState(module);

    state->export_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &export_spec, NULL);
    return state->export_type ? PyModule_AddType(module, state->export_type) : -1;
}
