/*
 * Engine methods that step, clip, and look in: optimizer state, counts, memory
 * and traffic.
 */
#include "py_engine.h"

PyObject *py_engine_step(py_engine *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"groups", "loss_scale", "max_norm", "want_norm", "skip_nonfinite", NULL};
    zc_step_args step = ZC_STEP_ARGS;
    PyObject *groups_object;
    size_t group_count;
    zc_status status;

    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O|$ddpp:step", names, &groups_object, &step.loss_scale,
                                     &step.max_norm, &step.want_norm, &step.skip_nonfinite))
        return NULL;
    zc_options *groups = py_engine_groups(groups_object, &group_count);
    if (!groups || py_engine_lock(self)) {
        PyMem_Free(groups);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = zc_engine_step(self->engine, groups, group_count, &step);
    Py_END_ALLOW_THREADS
    PyMem_Free(groups);
    unsigned long long rounds = zc_engine_last_rounds(self->engine);
    int failed = py_engine_end(self, status);
    py_engine_drop_released(self);
    if (failed)
        return NULL;
    return PyLong_FromUnsignedLongLong(rounds);
}

PyObject *py_engine_last_step(py_engine *self, PyObject *unused)
{
    zc_step_result result;
    zc_status status;

    (void)unused;
    if (py_engine_lock_local(self))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = zc_engine_last_step(self->engine, &result);
    Py_END_ALLOW_THREADS
    if (py_engine_end(self, status))
        return NULL;
    return Py_BuildValue("(dOK)", result.norm, result.skipped ? Py_True : Py_False,
                         (unsigned long long)result.nonfinite);
}

PyObject *py_engine_clip(py_engine *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"max_norm", "norm_type", "loss_scale", NULL};
    double max_norm, norm_type = 2, loss_scale = 1, norm = 0;
    zc_status status;

    if (!PyArg_ParseTupleAndKeywords(args, keywords, "d|dd:clip", names, &max_norm, &norm_type, &loss_scale)
        || py_engine_lock(self))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = zc_engine_clip(self->engine, max_norm, norm_type, loss_scale, &norm);
    Py_END_ALLOW_THREADS
    int failed = py_engine_end(self, status);
    py_engine_drop_released(self);
    if (failed)
        return NULL;
    return PyFloat_FromDouble(norm);
}

/* ---- state of one parameter ----------------------------------------------- */

static int read_index_and_role(py_engine *self, PyObject *number, const char *name, size_t *index, zc_role *role)
{
    if (py_engine_index(self, number, index) || py_engine_role(name, role))
        return -1;
    if (*role != ZC_ROLE_WEIGHT)
        return 0;
    PyErr_SetString(PyExc_ValueError, "role 'weight' has parts only; param() and fetch() give parameters");
    return -1;
}

PyObject *py_engine_state(py_engine *self, PyObject *args)
{
    size_t index, elems = 0;
    void *memory = NULL;
    zc_dtype dtype = ZC_FLOAT32;
    const char *name;
    PyObject *number;
    zc_role role;

    if (!PyArg_ParseTuple(args, "Os:state", &number, &name) || read_index_and_role(self, number, name, &index, &role)
        || py_engine_lock_local(self))
        return NULL;
    zc_status status = zc_engine_state(self->engine, index, role, &memory, &elems, &dtype);
    if (py_engine_end(self, status))
        return NULL;
    if (!memory)
        Py_RETURN_NONE;
    if (self->gpu >= 0)
        return py_export_new(py_state_of((PyObject *)self), memory, elems, dtype, NULL, NULL, (PyObject *)self, self->gpu);
    return py_array_over(memory, elems, dtype, (PyObject *)self);
}

/* Ends a call under the lock that filled a new array, and gives up the array if it failed. */
static PyObject *finish_array(py_engine *self, zc_status status, PyObject *array)
{
    int failed = py_engine_end(self, status);

    py_engine_drop_released(self);
    if (failed)
        Py_CLEAR(array);
    return array;
}

PyObject *py_engine_fetch(py_engine *self, PyObject *number)
{
    void *to = NULL;
    zc_status status;
    size_t index;

    if (py_engine_index(self, number, &index))
        return NULL;
    PyObject *array = py_array_new(self->params[index].elems, self->params[index].dtype, &to);
    if (!array)
        return NULL;
    if (py_engine_lock(self)) {
        Py_DECREF(array);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = zc_engine_fetch(self->engine, index, to);
    Py_END_ALLOW_THREADS
    return finish_array(self, status, array);
}

PyObject *py_engine_read(py_engine *self, PyObject *args)
{
    double scale = 1;
    const char *name;
    PyObject *number;
    void *to = NULL;
    size_t index;
    zc_role role;
    zc_status status;

    if (!PyArg_ParseTuple(args, "Os|d:read", &number, &name, &scale)
        || read_index_and_role(self, number, name, &index, &role))
        return NULL;
    PyObject *array = py_array_new(self->params[index].elems, zc_dtype_sum(self->params[index].dtype), &to);
    if (!array)
        return NULL;
    if (py_engine_lock(self)) {
        Py_DECREF(array);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = zc_engine_read(self->engine, index, role, scale, to);
    Py_END_ALLOW_THREADS
    return finish_array(self, status, array);
}

PyObject *py_engine_write(py_engine *self, PyObject *args)
{
    PyObject *number, *source, *result = NULL;
    const char *name;
    py_array array;
    size_t index;
    zc_role role;

    if (!PyArg_ParseTuple(args, "OsO:write", &number, &name, &source)
        || read_index_and_role(self, number, name, &index, &role)
        || py_array_from(source, zc_dtype_sum(self->params[index].dtype), PY_READ, name, &array))
        return NULL;
    if (array.elems != self->params[index].elems)
        PyErr_Format(PyExc_ValueError, "%s of parameter %zu has %zu elements; the parameter has %zu", name, index,
                     array.elems, self->params[index].elems);
    else if (py_engine_lock_local(self) == 0)
        result = py_engine_finish(self, zc_engine_write(self->engine, index, role, array.data));
    py_array_release(&array);
    return result;
}

/* Counts are in memory of the device. 0: they can be read; otherwise the lock is given back, with an exception. */
static int check_readable(py_engine *self)
{
    int capturing = 0;
    zc_status status = zc_engine_capturing(self->engine, &capturing);

    if (status == ZC_OK && capturing)
        status = zc_fail(ZC_ESTATE, "a step count cannot be read while the stream is captured into a CUDA graph");
    return status == ZC_OK ? 0 : py_engine_end(self, status);
}

PyObject *py_engine_step_count(py_engine *self, PyObject *number)
{
    size_t index;

    if (py_engine_index(self, number, &index) || py_engine_lock_local(self) || check_readable(self))
        return NULL;
    uint64_t steps = zc_engine_step_count(self->engine, index);
    py_engine_unlock(self);
    return PyLong_FromUnsignedLongLong(steps);
}

PyObject *py_engine_has_momentum(py_engine *self, PyObject *number)
{
    size_t index;

    if (py_engine_index(self, number, &index) || py_engine_lock_local(self) || check_readable(self))
        return NULL;
    int has = zc_engine_has_momentum(self->engine, index);
    py_engine_unlock(self);
    return PyBool_FromLong(has);
}

PyObject *py_engine_set_step_count(py_engine *self, PyObject *args)
{
    PyObject *number, *count;
    int has_momentum = 0;
    size_t index;

    if (!PyArg_ParseTuple(args, "OO|p:set_step_count", &number, &count, &has_momentum)
        || py_engine_index(self, number, &index))
        return NULL;
    unsigned long long steps = PyLong_AsUnsignedLongLong(count);
    if ((steps == (unsigned long long)-1 && PyErr_Occurred()) || py_engine_lock_local(self))
        return NULL;
    return py_engine_finish(self, zc_engine_set_step_count(self->engine, index, steps, has_momentum));
}

/* ---- the whole ------------------------------------------------------------- */

PyObject *py_engine_memory(py_engine *self, PyObject *unused)
{
    zc_memory memory;

    (void)unused;
    if (py_engine_lock_local(self))
        return NULL;
    zc_engine_memory(self->engine, &memory);
    py_engine_unlock(self);
    return Py_BuildValue("{sKsKsKsKsKsK}", "parameters", (unsigned long long)memory.parameters, "gradients",
                         (unsigned long long)memory.gradients, "master", (unsigned long long)memory.master,
                         "optimizer_state", (unsigned long long)memory.optimizer_state, "buffers",
                         (unsigned long long)memory.buffers, "total", (unsigned long long)memory.total);
}

static PyObject *traffic_row(const zc_traffic_row *row)
{
    return Py_BuildValue("{sKsKsK}", "calls", (unsigned long long)row->calls, "payload",
                         (unsigned long long)row->payload_elems, "bytes", (unsigned long long)row->bytes);
}

PyObject *py_engine_traffic(py_engine *self, PyObject *unused)
{
    zc_traffic traffic;
    zc_status status;

    (void)unused;
    if (py_engine_lock_local(self))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = zc_engine_traffic(self->engine, &traffic);
    Py_END_ALLOW_THREADS
    if (py_engine_end(self, status))
        return NULL;
    return Py_BuildValue("{sNsNsNsNsK}", "reduce_scatter", traffic_row(&traffic.reduce_scatter), "all_gather",
                         traffic_row(&traffic.all_gather), "broadcast", traffic_row(&traffic.broadcast), "small",
                         traffic_row(&traffic.small), "bytes", (unsigned long long)traffic.bytes);
}

PyObject *py_engine_plan(py_engine *self, PyObject *unused)
{
    zc_plan plan;

    (void)unused;
    if (py_engine_lock_local(self))
        return NULL;
    zc_engine_plan(self->engine, &plan);
    py_engine_unlock(self);
    return Py_BuildValue("{sKsKsKsKsK}", "spaces", (unsigned long long)plan.spaces, "buckets",
                         (unsigned long long)plan.buckets, "padded_elems", (unsigned long long)plan.padded_elems, "elems",
                         (unsigned long long)plan.elems, "ring_bytes", (unsigned long long)plan.ring_bytes);
}

PyObject *py_engine_sync(py_engine *self, PyObject *args)
{
    const char *what = "sync";
    zc_status status;

    if (!PyArg_ParseTuple(args, "|s:sync", &what) || py_engine_lock(self))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = zc_engine_sync(self->engine, what);
    Py_END_ALLOW_THREADS
    PyObject *result = py_engine_finish(self, status);
    py_engine_drop_released(self);
    return result;
}
