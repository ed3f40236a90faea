/* Tensors of other frameworks; py_tensor.h says why. */
#include "py_tensor.h"

int py_tensor_reader_init(py_tensor_reader *reader, PyObject *describe, PyObject *exchange)
{
    reader->exchange = NULL;
    reader->describe = Py_NewRef(describe);
    if (exchange == Py_None)
        return 0;
    reader->exchange = PyCapsule_GetPointer(exchange, DL_NAME_EXCHANGE);
    if (!reader->exchange)
        return -1;
    if (reader->exchange->header.version.major != DL_MAJOR || !reader->exchange->view_object_no_sync)
        reader->exchange = NULL;
    return 0;
}

static int read_numbers(PyObject *tuple, int64_t *to, int32_t dims)
{
    for (int32_t i = 0; i < dims; i++) {
        to[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i));
        if (to[i] == -1 && PyErr_Occurred())
            return -1;
    }
    return 0;
}

static int view_described(const py_tensor_reader *reader, PyObject *object, py_tensor *view)
{
    PyObject *sizes, *strides, *answer = PyObject_CallOneArg(reader->describe, object);
    unsigned long long address;
    int code, bits, gpu, failed = -1;

    if (!answer)
        return -1;
    if (!PyArg_ParseTuple(answer, "KiiO!O!i", &address, &code, &bits, &PyTuple_Type, &sizes, &PyTuple_Type, &strides, &gpu))
        goto done;
    if (PyTuple_GET_SIZE(sizes) > ZC_MAX_DIMS || PyTuple_GET_SIZE(sizes) != PyTuple_GET_SIZE(strides)) {
        PyErr_Format(PyExc_ValueError, "a tensor has %zd dimensions; at most %d are possible",
                     PyTuple_GET_SIZE(sizes), ZC_MAX_DIMS);
        goto done;
    }
    view->tensor.dims = (int32_t)PyTuple_GET_SIZE(sizes);
    view->tensor.shape = view->numbers;
    view->tensor.strides = view->numbers + ZC_MAX_DIMS;
    view->tensor.data = (void *)(uintptr_t)address;
    view->tensor.offset_bytes = 0;
    view->tensor.device = gpu < 0 ? (dl_device){DL_CPU, 0} : (dl_device){DL_CUDA, gpu};
    view->tensor.dtype = (dl_type){(uint8_t)code, (uint8_t)bits, 1};
    failed = read_numbers(sizes, view->tensor.shape, view->tensor.dims) ||
             read_numbers(strides, view->tensor.strides, view->tensor.dims)
                 ? -1 : 0;
done:
    Py_DECREF(answer);
    return failed;
}

int py_tensor_stream(const py_tensor_reader *reader, PyObject *stream_of, int gpu, void **stream)
{
    if (reader->exchange && reader->exchange->current_stream)
        return reader->exchange->current_stream(DL_CUDA, gpu, stream);
    PyObject *address = PyObject_CallFunction(stream_of, "i", gpu);
    if (!address)
        return -1;
    *stream = PyLong_AsVoidPtr(address);
    Py_DECREF(address);
    return PyErr_Occurred() ? -1 : 0;
}

int py_tensor_view(const py_tensor_reader *reader, PyObject *object, py_tensor *view)
{
    if (!reader->exchange)
        return view_described(reader, object, view);
    if (reader->exchange->view_object_no_sync(object, &view->tensor) != 0) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_BufferError, "a tensor could not be read");
        return -1;
    }
    return 0;
}
