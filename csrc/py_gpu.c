/*
 * Arrays on GPUs: the GpuArray object, borrowed through DLPack from whichever
 * library made them, and the engine's methods that take one.
 *
 * A producer is told the stream on which the memory will be used and orders its
 * own work before it; that is DLPack's rule, so nothing waits on the host.
 */
#include "py_gpu.h"

#include <structmember.h>

typedef struct py_gpu_array {
    PyObject_HEAD
    PyObject *keeper;       /* of the producer's memory */
    void *data;
    int device;
    zc_dtype dtype;
    int dims;
    int read_only;
    size_t elems;
    int64_t shape[ZC_MAX_DIMS], strides[ZC_MAX_DIMS];
} py_gpu_array;

/* How DLPack names a stream: the legacy default one, which CUDA calls NULL, is 1. */
static PyObject *stream_name(PyObject *stream)
{
    unsigned long long address = PyLong_AsUnsignedLongLong(stream);

    if (address == (unsigned long long)-1 && PyErr_Occurred())
        return NULL;
    return PyLong_FromUnsignedLongLong(address ? address : 1);
}

static int take_tensor(py_gpu_array *self, const dl_tensor *tensor, const char *what)
{
    if (tensor->device.type != DL_CUDA) {
        PyErr_Format(PyExc_BufferError, "%s is on device type %d; it must be on a CUDA GPU", what,
                     (int)tensor->device.type);
        return -1;
    }
    self->device = tensor->device.index;
    self->dims = tensor->dims;
    self->data = tensor->data ? (char *)tensor->data + tensor->offset_bytes : NULL;
    return py_dlpack_layout(tensor, what, &self->dtype, self->shape, self->strides, &self->elems);
}

static PyObject *gpu_array_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"source", "stream", "what", NULL};
    PyObject *source, *stream_object, *stream, *keeper;
    const char *what = "array";
    const dl_tensor *tensor;
    int read_only;

    if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO|s:GpuArray", names, &source, &stream_object, &what)
        || !(stream = stream_name(stream_object)))
        return NULL;
    keeper = py_dlpack_take(source, stream, what, &tensor, &read_only);
    Py_DECREF(stream);
    if (!keeper)
        return NULL;
    py_gpu_array *self = (py_gpu_array *)type->tp_alloc(type, 0);
    if (!self) {
        Py_DECREF(keeper);
        return NULL;
    }
    self->keeper = keeper;
    self->read_only = read_only;
    if (take_tensor(self, tensor, what)) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static void gpu_array_dealloc(py_gpu_array *self)
{
    PyTypeObject *type = Py_TYPE(self);

    Py_XDECREF(self->keeper);
    type->tp_free(self);
    Py_DECREF(type);
}

static int is_contiguous(const py_gpu_array *self)
{
    int64_t expected = 1;

    for (int dim = self->dims - 1; self->elems && dim >= 0; dim--) {
        if (self->shape[dim] != 1 && self->strides[dim] != expected)
            return 0;
        expected *= self->shape[dim];
    }
    return 1;
}

/* ---- for engines ------------------------------------------------------------ */

int py_gpu_memory(py_state *state, PyObject *source, int gpu, zc_dtype dtype, size_t elems, int write, const char *what,
                  void **memory)
{
    if (!PyObject_TypeCheck(source, state->gpu_array_type)) {
        PyErr_Format(PyExc_TypeError, "%s is a %s; the engine is on GPU %d and takes a GpuArray", what,
                     Py_TYPE(source)->tp_name, gpu);
        return -1;
    }
    const py_gpu_array *array = (const py_gpu_array *)source;
    if (array->device != gpu) {
        PyErr_Format(PyExc_ValueError, "%s is on GPU %d; the engine is on GPU %d", what, array->device, gpu);
        return -1;
    }
    if (array->dtype != dtype) {
        PyErr_Format(PyExc_TypeError, "%s has dtype %s; it must be %s", what, zc_dtype_name(array->dtype),
                     zc_dtype_name(dtype));
        return -1;
    }
    if (array->elems != elems) {
        PyErr_Format(PyExc_ValueError, "%s has %zu elements; the parameter has %zu", what, array->elems, elems);
        return -1;
    }
    if (!is_contiguous(array) || (write && array->read_only)) {
        PyErr_Format(PyExc_BufferError, "%s is %s; pass a %scontiguous (row-major) copy", what,
                     is_contiguous(array) ? "read-only" : "not contiguous", write ? "writable " : "");
        return -1;
    }
    *memory = array->data;
    return 0;
}

/* ---- attributes ---------------------------------------------------------------- */

static PyObject *get_shape(py_gpu_array *self, void *unused)
{
    (void)unused;
    PyObject *shape = PyTuple_New(self->dims);
    for (int dim = 0; shape && dim < self->dims; dim++) {
        PyObject *size = PyLong_FromLongLong(self->shape[dim]);
        if (!size)
            Py_CLEAR(shape);
        else
            PyTuple_SET_ITEM(shape, dim, size);
    }
    return shape;
}

static PyObject *get_dtype(py_gpu_array *self, void *unused)
{
    (void)unused;
    return PyUnicode_FromString(zc_dtype_name(self->dtype));
}

static PyObject *get_size(py_gpu_array *self, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(self->elems);
}

static PyObject *get_address(py_gpu_array *self, void *unused)
{
    (void)unused;
    return PyLong_FromVoidPtr(self->data);
}

static PyObject *get_writable(py_gpu_array *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(!self->read_only && is_contiguous(self));
}

static PyGetSetDef gpu_array_getset[] = {
    {"shape", (getter)get_shape, NULL, "Sizes of the dimensions.", NULL},
    {"dtype", (getter)get_dtype, NULL, "Name of the element type.", NULL},
    {"size", (getter)get_size, NULL, "Number of elements.", NULL},
    {"address", (getter)get_address, NULL, "Device address of the first element.", NULL},
    {"writable", (getter)get_writable, NULL, "Whether an engine can write it: contiguous and not read-only.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef gpu_array_members[] = {
    {"device", T_INT, offsetof(py_gpu_array, device), READONLY, "Number of the GPU."},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(gpu_array_doc,
             "GpuArray(source, stream, what='array')\n--\n\nAn array on a GPU, from anything with __dlpack__, for use on "
             "`stream` (a cudaStream_t as an integer; 0: the\nlegacy default one) from now on.");

static PyType_Slot gpu_array_slots[] = {
    {Py_tp_new, gpu_array_new},           {Py_tp_dealloc, gpu_array_dealloc},    {Py_tp_getset, gpu_array_getset},
    {Py_tp_members, gpu_array_members},   {Py_tp_doc, (void *)gpu_array_doc},    {0, NULL},
};

static PyType_Spec gpu_array_spec = {
    .name = "zero_c._core.GpuArray",
    .basicsize = sizeof(py_gpu_array),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = gpu_array_slots,
};

int py_gpu_add(PyObject *module)
{
    py_state *state = PyModule_GetState(module);

    state->gpu_array_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &gpu_array_spec, NULL);
    return state->gpu_array_type ? PyModule_AddType(module, state->gpu_array_type) : -1;
}

PyObject *py_gpu_probe(PyObject *module, PyObject *path)
{
    const char *plugin = PyUnicode_AsUTF8(path);
    int gpus = 0;

    if (!plugin)
        return NULL;
    zc_status status = zc_gpu_probe(plugin, &gpus);
    return status == ZC_OK ? PyLong_FromLong(gpus) : py_raise(PyModule_GetState(module), status);
}
