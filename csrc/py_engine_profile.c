/*
 * Engine methods of the record of work.
 */
#include "py_engine.h"

#define TAKEN_AT_ONCE 256

PyObject *py_engine_profile(py_engine *self, PyObject *number)
{
    Py_ssize_t capacity = PyNumber_AsSsize_t(number, PyExc_OverflowError);

    if (capacity == -1 && PyErr_Occurred())
        return NULL;
    if (capacity < 0)
        return PyErr_Format(PyExc_ValueError, "capacity is %zd; legal is 0, which switches off, or more", capacity);
    if (py_engine_lock_local(self))
        return NULL;
    return py_engine_finish(self, zc_engine_profile(self->engine, (size_t)capacity));
}

static int append(PyObject *list, const zc_work *work)
{
    static const char *const kinds[] = {
        [ZC_WORK_REDUCE] = "reduce", [ZC_WORK_GATHER] = "gather", [ZC_WORK_UPDATE] = "update"};
    PyObject *item = Py_BuildValue("(sIIKKK)", kinds[work->kind], (unsigned)work->number, (unsigned)work->peer,
                                   (unsigned long long)work->bytes, (unsigned long long)work->begin_ns,
                                   (unsigned long long)work->end_ns);
    int failed = !item || PyList_Append(list, item);

    Py_XDECREF(item);
    return failed ? -1 : 0;
}

PyObject *py_engine_take_work(py_engine *self, PyObject *unused)
{
    zc_work work[TAKEN_AT_ONCE];
    uint64_t lost = 0;
    size_t count;
    PyObject *list = PyList_New(0);

    (void)unused;
    if (!list)
        return NULL;
    do {
        uint64_t more;
        if (py_engine_lock_local(self)) {
            Py_DECREF(list);
            return NULL;
        }
        count = zc_engine_take_work(self->engine, work, TAKEN_AT_ONCE, &more);
        py_engine_unlock(self);
        lost += more;
        for (size_t k = 0; k < count; k++) {
            if (append(list, &work[k])) {
                Py_DECREF(list);
                return NULL;
            }
        }
    } while (count == TAKEN_AT_ONCE);
    return Py_BuildValue("(NK)", list, (unsigned long long)lost);
}
