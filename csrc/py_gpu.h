/* Arrays on GPUs, for the glue files of the engine. */
#ifndef PY_GPU_H
#define PY_GPU_H

#include "py_state.h"

/*
 * Memory of a GpuArray that an engine on `gpu` can use for `elems` elements of
 * `dtype`; the object must outlive the call that uses it.  0, or -1 with an exception.
 */
int py_gpu_memory(py_state *state, PyObject *source, int gpu, zc_dtype dtype, size_t elems, int write, const char *what,
                  void **memory);

/* Function of the module: gpu_probe(plugin), the number of GPUs, or the reason why there are none. */
PyObject *py_gpu_probe(PyObject *module, PyObject *path);

#endif
