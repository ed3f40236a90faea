/*
 * Looking at another framework's tensors: where their elements are, and how they
 * lie there, without a reference and, where the framework has a DLPack exchange
 * table, without a Python call.
 */
#ifndef PY_TENSOR_H
#define PY_TENSOR_H

#include "py_state.h"

typedef struct py_tensor_reader {
    const dl_exchange *exchange; /* NULL: use describe */
    PyObject *describe;          /* tensor -> (address, type code, bits, sizes, strides, GPU or -1), or raises; owned */
} py_tensor_reader;

typedef struct py_tensor {
    dl_tensor tensor;
    int64_t numbers[2 * ZC_MAX_DIMS]; /* behind sizes and strides, with describe */
} py_tensor;

/* exchange: the table's capsule, or None. 0, or -1 with an exception set. */
int py_tensor_reader_init(py_tensor_reader *reader, PyObject *describe, PyObject *exchange);

/* Good while `object` lives and is not changed. 0, or -1 with an exception set. */
int py_tensor_view(const py_tensor_reader *reader, PyObject *object, py_tensor *view);

/*
 * The stream on which the framework works on this GPU now: from the exchange table, or
 * from `stream_of`, GPU -> address.  0, or -1 with an exception set.
 */
int py_tensor_stream(const py_tensor_reader *reader, PyObject *stream_of, int gpu, void **stream);

/* Whether a tensor is where an engine is: on its GPU, or with -1 on the CPU. */
static inline int py_tensor_is_on(const py_tensor *view, int gpu)
{
    const dl_device *device = &view->tensor.device;
    return gpu < 0 ? device->type == DL_CPU : device->type == DL_CUDA && device->index == gpu;
}

static inline void *py_tensor_data(const py_tensor *view)
{
    return view->tensor.data ? (char *)view->tensor.data + view->tensor.offset_bytes : NULL;
}

#endif
