/*
 * Arrays of other libraries: NumPy's directly, everything else through DLPack.
 *
 * Whatever comes is turned into a NumPy array over the same memory, because
 * NumPy already knows how to look at, refuse and copy strided, unaligned and
 * byte-swapped memory.  bfloat16, which NumPy lacks, travels as uint16 with the
 * true dtype beside it.  The producer's memory lives as long as that array.
 * No other file of the glue knows NumPy.
 */
#include "py_state.h"

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <numpy/arrayobject.h>

#define KEEPER_NAME "zero_c.managed"

/* ---- dtypes -------------------------------------------------------------- */

int py_dtype_from_name(const char *name, zc_dtype *out)
{
    for (int dtype = 0; dtype < ZC_DTYPE_COUNT; dtype++) {
        if (strcmp(name, zc_dtype_name((zc_dtype)dtype)) == 0) {
            *out = (zc_dtype)dtype;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "dtype is '%s'; legal are float32, float64, bfloat16, float16, int32, int64, uint8",
                 name);
    return -1;
}

static int numpy_type(zc_dtype dtype)
{
    static const int types[ZC_DTYPE_COUNT] = {NPY_FLOAT32, NPY_FLOAT64, NPY_UINT16, NPY_FLOAT16,
                                              NPY_INT32, NPY_INT64, NPY_UINT8};
    return types[dtype];
}

dl_type py_dlpack_type(zc_dtype dtype)
{
    static const uint8_t codes[ZC_DTYPE_COUNT] = {DL_FLOAT, DL_FLOAT, DL_BFLOAT, DL_FLOAT, DL_INT, DL_INT, DL_UINT};
    return (dl_type){codes[dtype], (uint8_t)(8 * zc_dtype_bytes(dtype)), 1};
}

/* The dtype of a DLPack element type, or PY_DTYPE_ANY if we have none for it. */
static zc_dtype dtype_from_dlpack(dl_type type)
{
    for (int dtype = 0; dtype < ZC_DTYPE_COUNT; dtype++) {
        dl_type ours = py_dlpack_type((zc_dtype)dtype);
        if (ours.code == type.code && ours.bits == type.bits && ours.lanes == type.lanes)
            return (zc_dtype)dtype;
    }
    return PY_DTYPE_ANY;
}

/* The same for a NumPy array of any byte order; bits of bfloat16 are known by name, or by being wanted. */
static zc_dtype dtype_from_numpy(PyArrayObject *array, zc_dtype wanted)
{
    PyArray_Descr *descr = PyArray_DESCR(array);
    npy_intp bytes = PyArray_ITEMSIZE(array);

    switch (descr->kind) {
    case 'f':
        return bytes == 4 ? ZC_FLOAT32 : bytes == 8 ? ZC_FLOAT64 : bytes == 2 ? ZC_FLOAT16 : PY_DTYPE_ANY;
    case 'i':
        return bytes == 4 ? ZC_INT32 : bytes == 8 ? ZC_INT64 : PY_DTYPE_ANY;
    case 'u':
        return bytes == 1 ? ZC_UINT8 : bytes == 2 && wanted == ZC_BFLOAT16 ? ZC_BFLOAT16 : PY_DTYPE_ANY;
    case 'V': {
        const char *name = descr->typeobj->tp_name, *dot = strrchr(name, '.');
        return bytes == 2 && strcmp(dot ? dot + 1 : name, "bfloat16") == 0 ? ZC_BFLOAT16 : PY_DTYPE_ANY;
    }
    default:
        return PY_DTYPE_ANY;
    }
}

/* ---- capsules ----------------------------------------------------------- */

static void call_deleter(void *managed, int versioned)
{
    if (versioned) {
        dl_managed_versioned *tensor = managed;
        if (tensor->deleter)
            tensor->deleter(tensor);
    } else {
        dl_managed *tensor = managed;
        if (tensor->deleter)
            tensor->deleter(tensor);
    }
}

/* A deleter may run Python code, which must not meet the exception for which the tensor is given up. */
static void keeper_destroy(PyObject *keeper)
{
    PyObject *type, *value, *trace;

    PyErr_Fetch(&type, &value, &trace);
    call_deleter(PyCapsule_GetPointer(keeper, KEEPER_NAME), PyCapsule_GetContext(keeper) != NULL);
    PyErr_Restore(type, value, trace);
}

/* Memory that the CPU can address: 0, or -1 with BufferError. */
static int check_device(int64_t type, const char *what)
{
    static const char *const names[] = {[2] = "CUDA", [4] = "OpenCL", [7] = "Vulkan", [8] = "Metal", [10] = "ROCm",
                                        [14] = "oneAPI"};

    if (type == DL_CPU || type == DL_CUDA_PINNED || type == DL_CUDA_MANAGED)
        return 0;
    const char *name = type >= 0 && type < (int64_t)(sizeof names / sizeof *names) ? names[type] : NULL;
    PyErr_Format(PyExc_BufferError, "%s is on device type %lld (%s), which the CPU cannot address; copy it to the CPU",
                 what, (long long)type, name ? name : "unknown to this build");
    return -1;
}

/* Asks the object itself first, before it makes a capsule or orders any work. */
static int check_device_of(PyObject *source, const char *what)
{
    PyObject *device = PyObject_CallMethod(source, "__dlpack_device__", NULL);
    int result = -1, is_pair;
    long type = -1;

    if (!device)
        return -1;
    is_pair = PyTuple_Check(device) && PyTuple_GET_SIZE(device) == 2;
    if (is_pair)
        type = PyLong_AsLong(PyTuple_GET_ITEM(device, 0));
    if (is_pair && !PyErr_Occurred()) {
        result = check_device(type, what);
    } else {
        PyErr_Clear(); /* of an index of another kind, or too large */
        PyErr_Format(PyExc_BufferError, "%s: __dlpack_device__ gave %R, not (type, index)", what, device);
    }
    Py_DECREF(device);
    return result;
}

/* Whether the current exception says that a producer does not know the keyword max_version. */
static int is_unknown_keyword(void)
{
    PyObject *type, *value, *trace, *text = NULL;
    const char *message = NULL;
    int result = 0;

    if (!PyErr_ExceptionMatches(PyExc_TypeError))
        return 0;
    PyErr_Fetch(&type, &value, &trace);
    if (value && (text = PyObject_Str(value)) && (message = PyUnicode_AsUTF8(text)))
        result = strstr(message, "max_version") || strstr(message, "keyword argument")
                 || strstr(message, "incompatible function arguments");
    Py_XDECREF(text);
    PyErr_Clear();
    PyErr_Restore(type, value, trace);
    return result;
}

static PyObject *ask_for_capsule(PyObject *source, PyObject *stream)
{
    PyObject *method = PyObject_GetAttrString(source, "__dlpack__");
    PyObject *none = NULL, *keywords = NULL, *capsule = NULL;

    if (!method)
        return NULL;
    none = PyTuple_New(0);
    keywords = Py_BuildValue("{s(II)}", "max_version", DL_MAJOR, DL_MINOR);
    if (!none || !keywords || (stream && PyDict_SetItemString(keywords, "stream", stream) < 0))
        goto done;
    capsule = PyObject_Call(method, none, keywords);
    if (!capsule && is_unknown_keyword()) {
        PyErr_Clear();
        if (PyDict_DelItemString(keywords, "max_version") == 0)
            capsule = PyObject_Call(method, none, keywords);
    }
done:
    Py_XDECREF(keywords);
    Py_XDECREF(none);
    Py_DECREF(method);
    return capsule;
}

/* Takes the managed tensor out of a capsule: a keeper that owns it, or NULL with BufferError. */
static PyObject *take_from_capsule(PyObject *capsule, const char *what)
{
    int versioned = PyCapsule_IsValid(capsule, DL_NAME_VERSIONED);
    void *managed = NULL;

    if (versioned)
        managed = PyCapsule_GetPointer(capsule, DL_NAME_VERSIONED);
    else if (PyCapsule_IsValid(capsule, DL_NAME))
        managed = PyCapsule_GetPointer(capsule, DL_NAME);
    if (!managed) {
        const char *name = PyCapsule_CheckExact(capsule) ? PyCapsule_GetName(capsule) : NULL;
        PyErr_Clear();
        if (name && (strcmp(name, DL_NAME_USED) == 0 || strcmp(name, DL_NAME_VERSIONED_USED) == 0))
            PyErr_Format(PyExc_BufferError, "%s: its DLPack capsule was consumed before", what);
        else
            PyErr_Format(PyExc_BufferError, "%s: __dlpack__ gave %R, not a DLPack capsule", what, capsule);
        return NULL;
    }
    PyObject *keeper = PyCapsule_New(managed, KEEPER_NAME, NULL);
    if (!keeper)
        return NULL;
    if (PyCapsule_SetName(capsule, versioned ? DL_NAME_VERSIONED_USED : DL_NAME_USED)
        || PyCapsule_SetContext(keeper, versioned ? managed : NULL) || PyCapsule_SetDestructor(keeper, keeper_destroy)) {
        Py_DECREF(keeper);
        return NULL;
    }
    if (versioned && ((dl_managed_versioned *)managed)->version.major != DL_MAJOR) {
        PyErr_Format(PyExc_BufferError, "%s comes as DLPack %u.%u; this build reads major version %u", what,
                     ((dl_managed_versioned *)managed)->version.major,
                     ((dl_managed_versioned *)managed)->version.minor, DL_MAJOR);
        Py_DECREF(keeper);
        return NULL;
    }
    return keeper;
}

int py_dlpack_layout(const dl_tensor *tensor, const char *what, zc_dtype *dtype, int64_t *shape, int64_t *strides,
                     size_t *elems)
{
    int64_t count = 1, without_zeros = 1; /* NumPy counts both */

    *dtype = dtype_from_dlpack(tensor->dtype);
    if (*dtype == PY_DTYPE_ANY) {
        PyErr_Format(PyExc_BufferError,
                     "%s has a DLPack type of code %d with %d bits and %d lanes; legal are float32, float64, bfloat16, "
                     "float16, int32, int64, uint8", what, tensor->dtype.code, tensor->dtype.bits, tensor->dtype.lanes);
        return -1;
    }
    if (tensor->dims < 0 || tensor->dims > ZC_MAX_DIMS || (tensor->dims && !tensor->shape)) {
        PyErr_Format(PyExc_BufferError, "%s has %d dimensions; legal are 0 to %d", what, (int)tensor->dims, ZC_MAX_DIMS);
        return -1;
    }
    int64_t elem_bytes = (int64_t)zc_dtype_bytes(*dtype);
    for (int dim = tensor->dims - 1; dim >= 0; dim--) {
        int64_t stride_bytes, bytes;
        shape[dim] = tensor->shape[dim];
        strides[dim] = tensor->strides ? tensor->strides[dim] : count;
        if (shape[dim] < 0 || __builtin_mul_overflow(count, shape[dim], &count)
            || __builtin_mul_overflow(without_zeros, shape[dim] ? shape[dim] : 1, &without_zeros)
            || __builtin_mul_overflow(without_zeros, elem_bytes, &bytes)
            || __builtin_mul_overflow(strides[dim], elem_bytes, &stride_bytes)) {
            PyErr_Format(PyExc_BufferError, "%s: size %lld and stride %lld of dimension %d are not possible", what,
                         (long long)shape[dim], (long long)strides[dim], dim);
            return -1;
        }
    }
    if (count && !tensor->data) {
        PyErr_Format(PyExc_BufferError, "%s has %lld elements and no memory", what, (long long)count);
        return -1;
    }
    *elems = (size_t)count;
    return 0;
}

PyObject *py_dlpack_take(PyObject *source, PyObject *stream, const char *what, const dl_tensor **tensor, int *read_only)
{
    PyObject *capsule = ask_for_capsule(source, stream), *keeper;

    if (!capsule)
        return NULL;
    keeper = take_from_capsule(capsule, what);
    Py_DECREF(capsule);
    if (!keeper)
        return NULL;
    void *managed = PyCapsule_GetPointer(keeper, KEEPER_NAME);
    int versioned = PyCapsule_GetContext(keeper) != NULL;
    *tensor = versioned ? &((dl_managed_versioned *)managed)->tensor : &((dl_managed *)managed)->tensor;
    *read_only = versioned && ((dl_managed_versioned *)managed)->flags & DL_FLAG_READ_ONLY;
    return keeper;
}

/* A NumPy array over a producer's memory, and its true dtype. */
static PyObject *array_from_dlpack(PyObject *source, const char *what, zc_dtype *dtype)
{
    int64_t shape[ZC_MAX_DIMS], strides[ZC_MAX_DIMS];
    npy_intp sizes[ZC_MAX_DIMS], strides_bytes[ZC_MAX_DIMS];
    PyObject *keeper, *array = NULL;
    const dl_tensor *tensor;
    int read_only;
    size_t elems;

    if (check_device_of(source, what) || !(keeper = py_dlpack_take(source, NULL, what, &tensor, &read_only)))
        return NULL;
    if (check_device(tensor->device.type, what)
        || py_dlpack_layout(tensor, what, dtype, shape, strides, &elems))
        goto done;
    for (int dim = 0; dim < tensor->dims; dim++) {
        sizes[dim] = (npy_intp)shape[dim];
        strides_bytes[dim] = (npy_intp)(strides[dim] * (int64_t)zc_dtype_bytes(*dtype));
    }
    char *data = tensor->data ? (char *)tensor->data + tensor->offset_bytes : NULL;
    array = PyArray_New(&PyArray_Type, tensor->dims, sizes, numpy_type(*dtype), data ? strides_bytes : NULL, data, 0,
                        read_only ? 0 : NPY_ARRAY_WRITEABLE, NULL);
    if (array && data) {
        PyArray_UpdateFlags((PyArrayObject *)array, NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_ALIGNED);
        if (PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(keeper)))
            Py_CLEAR(array);
    }
done:
    Py_DECREF(keeper);
    return array;
}

/* ---- arrays ------------------------------------------------------------- */

/* What stands in the way of writing to an array, or NULL. */
static const char *why_not_writable(PyArrayObject *array, py_access access)
{
    if (!PyArray_ISWRITEABLE(array))
        return "read-only";
    for (int dim = 0; PyArray_SIZE(array) && dim < PyArray_NDIM(array); dim++)
        if (PyArray_DIM(array, dim) > 1 && PyArray_STRIDE(array, dim) == 0)
            return "expanded (several elements share memory)";
    if (access == PY_STORE)
        return NULL;
    if (!PyArray_ISNOTSWAPPED(array))
        return "of the other byte order";
    if (!PyArray_ISALIGNED(array))
        return "not aligned to its elements";
    if (!PyArray_IS_C_CONTIGUOUS(array))
        return "not contiguous (row-major)";
    return NULL;
}

/* A row-major, aligned array of this machine's byte order; a reference to `array` is consumed. */
static PyObject *plain_copy(PyObject *array, zc_dtype dtype)
{
    PyArray_Descr *descr = PyArray_DescrFromType(numpy_type(dtype));
    PyObject *copy = PyArray_FromArray((PyArrayObject *)array, descr, NPY_ARRAY_CARRAY_RO | NPY_ARRAY_NOTSWAPPED);

    Py_DECREF(array);
    return copy;
}

int py_array_from(PyObject *source, zc_dtype wanted, py_access access, const char *what, py_array *out)
{
    zc_dtype dtype;
    PyObject *array = NULL;

    *out = (py_array)PY_ARRAY_NONE;
    if (PyArray_Check(source)) {
        dtype = dtype_from_numpy((PyArrayObject *)source, wanted);
        if (dtype == PY_DTYPE_ANY) {
            PyErr_Format(PyExc_BufferError,
                         "%s has dtype %R; legal are float32, float64, float16, int32, int64, uint8 and bfloat16", what,
                         PyArray_DESCR((PyArrayObject *)source));
            return -1;
        }
        if (PyArray_DESCR((PyArrayObject *)source)->kind == 'V')
            array = PyArray_View((PyArrayObject *)source, PyArray_DescrFromType(NPY_UINT16), NULL);
        else
            array = Py_NewRef(source);
        if (!array)
            return -1;
    } else if (PyObject_HasAttrString(source, "__dlpack__")) {
        array = array_from_dlpack(source, what, &dtype);
        if (!array)
            return -1;
    } else {
        PyErr_Format(PyExc_TypeError, "%s is a %s; it must be a NumPy array or have __dlpack__", what,
                     Py_TYPE(source)->tp_name);
        return -1;
    }
    if (wanted != PY_DTYPE_ANY && dtype != wanted) {
        PyErr_Format(PyExc_TypeError, "%s has dtype %s; it must be %s", what, zc_dtype_name(dtype), zc_dtype_name(wanted));
        goto fail;
    }
    if (access == PY_WRITE || access == PY_STORE) {
        const char *why = why_not_writable((PyArrayObject *)array, access);
        if (why) {
            PyErr_Format(PyExc_BufferError, "%s is %s and would have to be written; pass a writable contiguous copy", what,
                         why);
            goto fail;
        }
    } else if (access == PY_READ && !PyArray_ISCARRAY_RO((PyArrayObject *)array)) {
        array = plain_copy(array, dtype);
        if (!array)
            return -1;
    }
    *out = (py_array){PyArray_DATA((PyArrayObject *)array), (size_t)PyArray_SIZE((PyArrayObject *)array), dtype, array};
    return 0;
fail:
    Py_DECREF(array);
    return -1;
}

void py_array_release(py_array *array)
{
    Py_CLEAR(array->array);
    array->data = NULL;
}

/* ---- NumPy ------------------------------------------------------------- */

PyObject *py_array_new(size_t elems, zc_dtype dtype, void **data)
{
    npy_intp shape = (npy_intp)elems;
    PyObject *array = PyArray_SimpleNew(1, &shape, numpy_type(dtype));

    if (array)
        *data = PyArray_DATA((PyArrayObject *)array);
    return array;
}

PyObject *py_array_over(void *data, size_t elems, zc_dtype dtype, PyObject *owner)
{
    npy_intp shape = (npy_intp)elems;
    PyObject *array;

    if (!data) {
        shape = 0;
        return PyArray_SimpleNew(1, &shape, numpy_type(dtype));
    }
    array = PyArray_SimpleNewFromData(1, &shape, numpy_type(dtype), data);
    if (array && PyArray_SetBaseObject((PyArrayObject *)array, Py_NewRef(owner)))
        Py_CLEAR(array);
    return array;
}

PyObject *py_array_as(PyObject *module, PyObject *args)
{
    const char *what = "array";
    PyObject *source;
    int writable = 0;
    py_array array;

    (void)module;
    if (!PyArg_ParseTuple(args, "O|ps:as_array", &source, &writable, &what)
        || py_array_from(source, PY_DTYPE_ANY, writable ? PY_STORE : PY_LOOK, what, &array))
        return NULL;
    return Py_BuildValue("(Ns)", array.array, zc_dtype_name(array.dtype));
}

int py_array_init(void)
{
    import_array1(-1);
    return 0;
}
