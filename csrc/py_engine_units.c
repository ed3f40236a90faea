/*
 * Engine methods of stage 3: units in use.
 */
#include "py_engine.h"

/* Index of a unit from a Python integer: 0, or -1 with an exception. The core says what is legal. */
static int unit_index(PyObject *number, size_t *unit)
{
    Py_ssize_t value = PyNumber_AsSsize_t(number, PyExc_IndexError);

    if (value == -1 && PyErr_Occurred())
        return -1;
    *unit = value < 0 ? ZC_NO_UNIT : (size_t)value;
    return 0;
}

PyObject *py_engine_acquire(py_engine *self, PyObject *args)
{
    PyObject *number;
    zc_status status;
    size_t unit;
    int backward;

    if (!PyArg_ParseTuple(args, "Op:acquire", &number, &backward) || unit_index(number, &unit) || py_engine_lock(self))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = zc_engine_acquire(self->engine, unit, backward);
    Py_END_ALLOW_THREADS
    return py_engine_finish(self, status);
}

PyObject *py_engine_release(py_engine *self, PyObject *number)
{
    size_t unit;

    if (unit_index(number, &unit) || py_engine_lock_local(self))
        return NULL;
    zc_engine_release(self->engine, unit);
    return py_engine_finish(self, ZC_OK);
}

PyObject *py_engine_drain(py_engine *self, PyObject *unused)
{
    zc_status status;

    (void)unused;
    if (py_engine_lock(self))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = zc_engine_drain(self->engine);
    Py_END_ALLOW_THREADS
    PyObject *done = py_engine_finish(self, status);
    py_engine_drop_released(self);
    return done;
}

PyObject *py_engine_unit_user(py_engine *self, PyObject *number)
{
    size_t unit;

    if (unit_index(number, &unit) || py_engine_lock_local(self))
        return NULL;
    size_t user = zc_engine_unit_user(self->engine, unit);
    py_engine_unlock(self);
    if (user == ZC_NO_UNIT)
        Py_RETURN_NONE;
    return PyLong_FromSize_t(user);
}

PyObject *py_engine_unit_generation(py_engine *self, PyObject *number)
{
    size_t unit;

    if (unit_index(number, &unit) || py_engine_lock_local(self))
        return NULL;
    uint64_t generation = zc_engine_unit_generation(self->engine, unit);
    py_engine_unlock(self);
    return PyLong_FromUnsignedLongLong(generation);
}

PyObject *py_engine_unit_range(py_engine *self, PyObject *number)
{
    size_t unit, bytes;

    if (unit_index(number, &unit) || py_engine_lock_local(self))
        return NULL;
    void *base = zc_engine_unit_range(self->engine, unit, &bytes);
    py_engine_unlock(self);
    return Py_BuildValue("Kn", (unsigned long long)(uintptr_t)base, (Py_ssize_t)bytes);
}

/* One (name, level, resident): 0, or -1 with an exception. */
static int read_unit(PyObject *item, zc_unit *unit)
{
    Py_ssize_t level;

    if (!PyTuple_Check(item) || !PyArg_ParseTuple(item, "znp", &unit->name, &level, &unit->resident)) {
        PyErr_SetString(PyExc_TypeError, "a unit is a tuple (name, level, resident)");
        return -1;
    }
    if (level < 0 || level > UINT32_MAX) {
        PyErr_Format(PyExc_ValueError, "level is %zd; legal is 0 or more", level);
        return -1;
    }
    unit->level = (uint32_t)level;
    return 0;
}

int py_unit_list_read(PyObject *sequence, py_unit_list *list)
{
    *list = (py_unit_list){.tuple = PySequence_Tuple(sequence)};
    if (!list->tuple)
        return -1;
    list->count = (size_t)PyTuple_GET_SIZE(list->tuple);
    list->units = PyMem_Calloc(list->count + 1, sizeof *list->units);
    if (!list->units)
        PyErr_NoMemory();
    for (size_t u = 0; list->units && u < list->count; u++)
        if (read_unit(PyTuple_GET_ITEM(list->tuple, (Py_ssize_t)u), &list->units[u]))
            return -1;
    return list->units ? 0 : -1;
}

void py_unit_list_free(py_unit_list *list)
{
    PyMem_Free(list->units);
    Py_CLEAR(list->tuple);
}
