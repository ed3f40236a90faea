/*
 * Engine methods that bring values in: parameters and their gradients.
 */
#include "py_engine.h"

#include "py_gpu.h"

PyObject *py_engine_add_params(py_engine *self, PyObject *args)
{
    PyObject *params, *groups_object, *result = NULL;
    zc_options *groups = NULL;
    size_t group_count;
    py_param_list list;
    zc_status status;

    if (!PyArg_ParseTuple(args, "OO:add_params", &params, &groups_object)
        || py_param_list_read(params, self->param_count, &list))
        return NULL;
    if (!(groups = py_engine_groups(groups_object, &group_count)) || py_engine_lock(self))
        goto done;
    if (py_engine_reserve(self, list.count)) {
        py_engine_unlock(self);
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    status = zc_engine_add_params(self->engine, list.params, list.count, groups, group_count);
    Py_END_ALLOW_THREADS
    if (status == ZC_OK)
        py_engine_note(self, &list);
    result = py_engine_finish(self, status);
done:
    PyMem_Free(groups);
    py_param_list_free(&list);
    return result;
}

/* The two methods that hand the core an array of a parameter's size. */
static PyObject *pass_array(py_engine *self, PyObject *args, const char *what, py_where where,
                            zc_status (*call)(zc_engine *engine, size_t index, const void *array))
{
    py_array array;
    zc_status status;
    size_t index;

    if (py_engine_read_array(self, args, what, where, &index, &array))
        return NULL;
    if (py_engine_lock(self)) {
        py_array_release(&array);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = call(self->engine, index, array.data);
    Py_END_ALLOW_THREADS
    py_array_release(&array);
    return py_engine_finish(self, status);
}

PyObject *py_engine_load_param(py_engine *self, PyObject *args)
{
    if (PyTuple_GET_SIZE(args) == 2 && PyTuple_GET_ITEM(args, 1) == Py_None) {
        zc_status status;
        size_t index;
        if (py_engine_index(self, PyTuple_GET_ITEM(args, 0), &index) || py_engine_lock(self))
            return NULL;
        Py_BEGIN_ALLOW_THREADS
        status = zc_engine_load_param(self->engine, index, NULL);
        Py_END_ALLOW_THREADS
        return py_engine_finish(self, status);
    }
    return pass_array(self, args, "value", PY_HOST, zc_engine_load_param);
}

PyObject *py_engine_publish(py_engine *self, PyObject *unused)
{
    zc_status status;

    (void)unused;
    if (py_engine_lock(self))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = zc_engine_publish(self->engine);
    Py_END_ALLOW_THREADS
    return py_engine_finish(self, status);
}

PyObject *py_engine_param(py_engine *self, PyObject *number)
{
    size_t index;

    if (py_engine_index(self, number, &index) || py_engine_lock_local(self))
        return NULL;
    void *memory = zc_engine_param(self->engine, index);
    py_param_facts param = self->params[index];
    py_engine_unlock(self);
    if (self->gpu >= 0)
        return py_export_new(py_state_of((PyObject *)self), memory, param.elems, param.dtype, NULL, NULL, (PyObject *)self,
                             self->gpu);
    return py_array_over(memory, param.elems, param.dtype, (PyObject *)self);
}

PyObject *py_engine_param_dlpack(py_engine *self, PyObject *args)
{
    PyObject *number, *shape, *strides;
    size_t index;

    if (!PyArg_ParseTuple(args, "OOO:param_dlpack", &number, &shape, &strides) || py_engine_index(self, number, &index)
        || py_engine_lock_local(self))
        return NULL;
    void *memory = zc_engine_param(self->engine, index);
    py_param_facts param = self->params[index];
    py_engine_unlock(self);
    return py_export_new(py_state_of((PyObject *)self), memory, param.elems, param.dtype, shape, strides,
                         (PyObject *)self, self->gpu);
}

PyObject *py_engine_wait_params(py_engine *self, PyObject *args)
{
    PyObject *given = Py_None, *list = NULL;
    size_t *indices = NULL, count = 0;
    zc_status status;

    if (!PyArg_ParseTuple(args, "|O:wait_params", &given))
        return NULL;
    if (given != Py_None) {
        if (!(list = PySequence_Fast(given, "indices must be a sequence of parameter numbers, or None")))
            return NULL;
        count = (size_t)PySequence_Fast_GET_SIZE(list);
        if (!(indices = PyMem_Calloc(count + 1, sizeof *indices)))
            PyErr_NoMemory();
        for (size_t k = 0; indices && k < count; k++)
            if (py_engine_index(self, PySequence_Fast_GET_ITEM(list, (Py_ssize_t)k), &indices[k])) {
                PyMem_Free(indices);
                indices = NULL;
            }
        Py_DECREF(list);
        if (!indices)
            return NULL;
    }
    if (py_engine_lock_local(self)) {
        PyMem_Free(indices);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = zc_engine_wait_params(self->engine, indices, count);
    Py_END_ALLOW_THREADS
    PyMem_Free(indices);
    return py_engine_finish(self, status);
}

PyObject *py_engine_refresh(py_engine *self, PyObject *args)
{
    zc_status status;
    size_t index;

    if (py_engine_index_or_all(self, args, "|O:refresh", &index) || py_engine_lock_local(self))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = zc_engine_refresh(self->engine, index);
    Py_END_ALLOW_THREADS
    return py_engine_finish(self, status);
}

/* ---- GPUs ---------------------------------------------------------------- */

PyObject *py_engine_load_from_device(py_engine *self, PyObject *args)
{
    return pass_array(self, args, "value", PY_DEVICE, zc_engine_load_from_device);
}

PyObject *py_engine_copy_param(py_engine *self, PyObject *args)
{
    PyObject *number, *to;
    zc_status status;
    void *memory;
    size_t index;

    if (!PyArg_ParseTuple(args, "OO:copy_param", &number, &to) || py_engine_index(self, number, &index)
        || py_gpu_memory(py_state_of((PyObject *)self), to, self->gpu, self->params[index].dtype,
                         self->params[index].elems, 1, "the array to copy to", &memory)
        || py_engine_lock_local(self))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = zc_engine_copy_param(self->engine, index, memory);
    Py_END_ALLOW_THREADS
    return py_engine_finish(self, status);
}

/* The stream of an integer, a cudaStream_t's address; 0 is the legacy default one. */
PyObject *py_engine_use_stream(py_engine *self, PyObject *stream)
{
    unsigned long long address = PyLong_AsUnsignedLongLong(stream);

    if ((address == (unsigned long long)-1 && PyErr_Occurred()) || py_engine_lock_local(self))
        return NULL;
    return py_engine_finish(self, zc_engine_use_stream(self->engine, (void *)(uintptr_t)address));
}

PyObject *py_engine_replay_options(py_engine *self, PyObject *groups_object)
{
    size_t group_count;
    zc_options *groups = py_engine_groups(groups_object, &group_count);

    if (!groups || py_engine_lock_local(self)) {
        PyMem_Free(groups);
        return NULL;
    }
    zc_status status = zc_engine_replay_options(self->engine, groups, group_count);
    PyMem_Free(groups);
    return py_engine_finish(self, status);
}

PyObject *py_engine_replayed_steps(py_engine *self, PyObject *unused)
{
    uint64_t steps = 0;
    zc_status status;

    (void)unused;
    if (py_engine_lock_local(self))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = zc_engine_replayed_steps(self->engine, &steps);
    Py_END_ALLOW_THREADS
    return py_engine_end(self, status) ? NULL : PyLong_FromUnsignedLongLong(steps);
}

int py_engine_order(py_engine *self, void *stream)
{
    return py_engine_lock_local(self) ? -1 : py_engine_end(self, zc_engine_order(self->engine, stream));
}

/* ---- gradients ----------------------------------------------------------- */

PyObject *py_engine_add_grad(py_engine *self, PyObject *args)
{
    PyObject *result = pass_array(self, args, "gradient", PY_DEVICE, zc_engine_add_grad);

    py_engine_drop_released(self);
    return result;
}

PyObject *py_engine_store(py_engine *self, PyObject *args)
{
    PyObject *result = pass_array(self, args, "value", PY_HOST, zc_engine_store);

    py_engine_drop_released(self);
    return result;
}

PyObject *py_engine_has_grad(py_engine *self, PyObject *number)
{
    size_t index;

    if (py_engine_index(self, number, &index) || py_engine_lock_local(self))
        return NULL;
    int has = zc_engine_has_grad(self->engine, index);
    py_engine_unlock(self);
    return PyBool_FromLong(has);
}

PyObject *py_engine_end_round(py_engine *self, PyObject *args)
{
    PyObject *late_object = NULL, *tuple = NULL, *result = NULL;
    py_array *arrays = NULL;
    zc_late_grad *late = NULL;
    Py_ssize_t count = 0;
    zc_status status;

    if (!PyArg_ParseTuple(args, "|O:end_round", &late_object))
        return NULL;
    tuple = late_object ? PySequence_Tuple(late_object) : PyTuple_New(0);
    if (!tuple)
        return NULL;
    count = PyTuple_GET_SIZE(tuple);
    arrays = PyMem_Calloc((size_t)count + 1, sizeof *arrays);
    late = PyMem_Calloc((size_t)count + 1, sizeof *late);
    if (!arrays || !late) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (!PyTuple_Check(PyTuple_GET_ITEM(tuple, i))) {
            PyErr_SetString(PyExc_TypeError, "late must be a sequence of (i, array) tuples");
            goto done;
        }
        if (py_engine_read_array(self, PyTuple_GET_ITEM(tuple, i), "late gradient", PY_DEVICE, &late[i].index, &arrays[i]))
            goto done;
        late[i].grad = arrays[i].data;
    }
    if (py_engine_lock(self))
        goto done;
    Py_BEGIN_ALLOW_THREADS
    status = zc_engine_end_round(self->engine, late, (size_t)count);
    Py_END_ALLOW_THREADS
    result = py_engine_finish(self, status);
    py_engine_drop_released(self);
done:
    for (Py_ssize_t i = 0; arrays && i < count; i++)
        py_array_release(&arrays[i]);
    PyMem_Free(arrays);
    PyMem_Free(late);
    Py_DECREF(tuple);
    return result;
}

PyObject *py_engine_abort_round(py_engine *self, PyObject *unused)
{
    (void)unused;
    if (py_engine_lock_local(self))
        return NULL;
    zc_engine_abort_round(self->engine);
    py_engine_unlock(self);
    py_engine_drop_released(self);
    Py_RETURN_NONE;
}

PyObject *py_engine_discard(py_engine *self, PyObject *args)
{
    zc_status status;
    size_t index;

    if (py_engine_index_or_all(self, args, "|O:discard", &index) || py_engine_lock_local(self))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = zc_engine_discard(self->engine, index);
    Py_END_ALLOW_THREADS
    PyObject *result = py_engine_finish(self, status);
    py_engine_drop_released(self);
    return result;
}
