/*
 * What the glue files share: the module's state, the one place where a status
 * becomes an exception, and borrowed views of other libraries' arrays.
 *
 * Glue functions check, convert, release the GIL, make one core call and
 * convert back.  They see the core through zero_c.h only.
 */
#ifndef PY_STATE_H
#define PY_STATE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "dlpack_abi.h"
#include "zero_c.h"

typedef struct py_state {
    PyObject *error, *comm_error, *peer_lost, *timeout, *mismatch, *checkpoint_error;
    PyTypeObject *comm_type, *engine_type, *export_type, *gpu_array_type;
} py_state;

/* The state of the module that made this object's (final) type. */
static inline py_state *py_state_of(PyObject *self)
{
    return PyType_GetModuleState(Py_TYPE(self));
}

/*
 * Sets the exception for a failed call from zc_last_error() of this thread,
 * which must be the one that made the call; returns NULL.  An exception that a
 * signal handler raised during the call is left as it is.
 */
PyObject *py_raise(py_state *state, zc_status status);

/* As assigning __class__, between classes whose instances are laid out alike. */
static inline void py_set_class(PyObject *object, PyTypeObject *type)
{
    PyTypeObject *before = Py_TYPE(object);

    Py_INCREF(type);
    Py_SET_TYPE(object, type);
    Py_DECREF(before);
}

/* ---- arrays (py_dlpack.c, the only file that knows NumPy) --------------- */

/* Somebody else's elements, kept alive until py_array_release; row-major unless only looked at. */
typedef struct py_array {
    void *data;
    size_t elems;
    zc_dtype dtype;
    PyObject *array; /* a NumPy array over them (bfloat16: as uint16) */
} py_array;

#define PY_ARRAY_NONE {NULL, 0, ZC_FLOAT32, NULL}
#define PY_DTYPE_ANY ZC_DTYPE_COUNT

typedef enum py_access {
    PY_READ,  /* arrays that are strided, unaligned or of the other byte order are copied */
    PY_WRITE, /* those are refused, and read-only ones, too */
    PY_LOOK,  /* .array is over the memory as it is, `data` means nothing */
    PY_STORE  /* the same, and read-only arrays and those that overlap themselves are refused */
} py_access;

/*
 * A view of `source`: a NumPy array or anything with __dlpack__ in memory that
 * the CPU can address.  `wanted` is the dtype it must have (a uint16 NumPy array
 * passes for bfloat16), or PY_DTYPE_ANY.  `what` names it in messages.
 * 0, or -1 with TypeError or BufferError set.
 */
int py_array_from(PyObject *source, zc_dtype wanted, py_access access, const char *what, py_array *out);
void py_array_release(py_array *array);

dl_type py_dlpack_type(zc_dtype dtype);
/*
 * A tensor's dtype, sizes, strides in elements (arrays of ZC_MAX_DIMS; row-major ones where it gives none) and number
 * of elements: 0, or -1 with BufferError.
 */
int py_dlpack_layout(const dl_tensor *tensor, const char *what, zc_dtype *dtype, int64_t *shape, int64_t *strides,
                     size_t *elems);
/*
 * A producer's tensor for use on `stream` (NULL: the CPU): what keeps it alive, a new reference, or NULL with an
 * exception.  *tensor is good while that lives.
 */
PyObject *py_dlpack_take(PyObject *source, PyObject *stream, const char *what, const dl_tensor **tensor, int *read_only);
/* The dtype of a name such as "bfloat16": 0, or -1 with ValueError set. */
int py_dtype_from_name(const char *name, zc_dtype *out);

/* One-dimensional NumPy arrays: over memory that `owner` keeps alive; new, not initialised. */
PyObject *py_array_over(void *data, size_t elems, zc_dtype dtype, PyObject *owner);
PyObject *py_array_new(size_t elems, zc_dtype dtype, void **data);

/* Method of the module, as_array(source, writable): (NumPy array over the same memory, name of its dtype). */
PyObject *py_array_as(PyObject *module, PyObject *args);

/* Loads NumPy: 0, or -1 with ImportError set. */
int py_array_init(void);

/*
 * An object with __dlpack__ over memory of an Engine object; strides in elements, both sequences of ints (NULL: one
 * dimension).  gpu: where the memory is, -1 for the CPU.
 */
PyObject *py_export_new(py_state *state, void *data, size_t elems, zc_dtype dtype, PyObject *shape,
                        PyObject *strides, PyObject *engine, int gpu);

/* Each file adds its types to the module. */
int py_comm_add(PyObject *module);
int py_engine_add(PyObject *module);
int py_export_add(PyObject *module);
int py_window_add(PyObject *module);
int py_gpu_add(PyObject *module);

#endif
