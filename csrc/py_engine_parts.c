/*
 * Engine methods on parts of values: what a checkpoint writes and reads.
 */
#include "py_engine.h"

PyObject *py_engine_parts(py_engine *self, PyObject *number)
{
    size_t index, begin, end = 0;
    zc_status status = ZC_OK;

    if (py_engine_index(self, number, &index))
        return NULL;
    PyObject *list = PyList_New(0);
    if (!list || py_engine_lock_local(self)) {
        Py_XDECREF(list);
        return NULL;
    }
    int failed = 0;
    for (size_t from = 0; status == ZC_OK && !failed; from = end) {
        status = zc_engine_next_part(self->engine, index, from, &begin, &end);
        if (status != ZC_OK || begin == end)
            break;
        PyObject *part = Py_BuildValue("(nn)", (Py_ssize_t)begin, (Py_ssize_t)end);
        failed = !part || PyList_Append(list, part);
        Py_XDECREF(part);
    }
    if (failed) {
        py_engine_unlock(self);
        Py_DECREF(list);
        return NULL;
    }
    if (py_engine_end(self, status))
        Py_CLEAR(list);
    return list;
}

/* The bytes of [begin, end) of an array with this role: 0, or -1 with ValueError if the buffer has another size. */
static int check_size(const py_engine *self, size_t index, zc_role role, Py_ssize_t begin, Py_ssize_t end,
                      const Py_buffer *buffer)
{
    zc_dtype own = self->params[index].dtype;
    Py_ssize_t elem_bytes = (Py_ssize_t)zc_dtype_bytes(role == ZC_ROLE_WEIGHT ? own : zc_dtype_sum(own));

    if (begin >= 0 && end >= begin && (size_t)end <= self->params[index].elems &&
        buffer->len == (end - begin) * elem_bytes)
        return 0;
    PyErr_Format(PyExc_ValueError, "elements %zd to %zd of parameter %zu, which has %zu of %zd bytes, and a buffer of %zd "
                                   "bytes; they must fit", begin, end, index, self->params[index].elems, elem_bytes,
                 buffer->len);
    return -1;
}

PyObject *py_engine_read_part(py_engine *self, PyObject *args)
{
    PyObject *number, *result = NULL;
    Py_ssize_t begin, end;
    Py_buffer buffer;
    const char *name;
    zc_status status;
    size_t index;
    zc_role role;

    if (!PyArg_ParseTuple(args, "Osnnw*:read_part", &number, &name, &begin, &end, &buffer))
        return NULL;
    if (py_engine_index(self, number, &index) == 0 && py_engine_role(name, &role) == 0
        && check_size(self, index, role, begin, end, &buffer) == 0 && py_engine_lock_local(self) == 0) {
        Py_BEGIN_ALLOW_THREADS
        status = zc_engine_read_part(self->engine, index, role, (size_t)begin, (size_t)end, buffer.buf);
        Py_END_ALLOW_THREADS
        result = py_engine_finish(self, status);
    }
    PyBuffer_Release(&buffer);
    return result;
}

/* A line of what write_parts takes: elements [begin, end) of a parameter are in the buffer from byte `place` on. */
typedef struct part_line {
    int64_t index, begin, end, place;
} part_line;

/* 0, or -1 with ValueError unless all of the line is there. */
static int check_line(const py_engine *self, const part_line *line, zc_role role, Py_ssize_t bytes)
{
    if (line->index >= 0 && (uint64_t)line->index < self->param_count) {
        const py_param_facts *param = &self->params[line->index];
        int64_t elem_bytes = (int64_t)zc_dtype_bytes(role == ZC_ROLE_WEIGHT ? param->dtype : zc_dtype_sum(param->dtype));
        if (line->begin >= 0 && line->end >= line->begin && (uint64_t)line->end <= param->elems && line->place >= 0
            && line->place <= bytes && line->end - line->begin <= (bytes - line->place) / elem_bytes)
            return 0;
    }
    PyErr_Format(PyExc_ValueError, "elements %lld to %lld of parameter %lld of %zu at byte %lld of a buffer of %zd bytes; they "
                                   "must fit", (long long)line->begin, (long long)line->end, (long long)line->index,
                 self->param_count, (long long)line->place, bytes);
    return -1;
}

PyObject *py_engine_write_parts(py_engine *self, PyObject *args)
{
    PyObject *result = NULL;
    Py_buffer lines, from;
    zc_status status = ZC_OK;
    const char *name;
    zc_role role;

    if (!PyArg_ParseTuple(args, "sy*y*:write_parts", &name, &lines, &from))
        return NULL;
    size_t count = (size_t)lines.len / sizeof(part_line);
    int failed = py_engine_role(name, &role);
    if (!failed && (size_t)lines.len != count * sizeof(part_line)) {
        PyErr_Format(PyExc_ValueError, "%zd bytes are no lines of four 64-bit integers", lines.len);
        failed = 1;
    }
    for (size_t k = 0; k < count && !failed; k++) {
        part_line line;
        memcpy(&line, (const char *)lines.buf + k * sizeof line, sizeof line);
        failed = check_line(self, &line, role, from.len);
    }
    if (!failed && py_engine_lock_local(self) == 0) {
        Py_BEGIN_ALLOW_THREADS
        for (size_t k = 0; k < count && status == ZC_OK; k++) {
            part_line line;
            memcpy(&line, (const char *)lines.buf + k * sizeof line, sizeof line);
            status = zc_engine_write_part(self->engine, (size_t)line.index, role, (size_t)line.begin, (size_t)line.end,
                                          (const char *)from.buf + line.place);
        }
        Py_END_ALLOW_THREADS
        result = py_engine_finish(self, status);
    }
    PyBuffer_Release(&lines);
    PyBuffer_Release(&from);
    return result;
}

PyObject *py_engine_prepare(py_engine *self, PyObject *sequence)
{
    size_t count;
    zc_options *groups = py_engine_groups(sequence, &count);

    if (!groups || py_engine_lock_local(self)) {
        PyMem_Free(groups);
        return NULL;
    }
    zc_status status = zc_engine_prepare(self->engine, groups, count);
    PyMem_Free(groups);
    return py_engine_finish(self, status);
}

PyObject *py_engine_spread(py_engine *self, PyObject *unused)
{
    zc_status status;

    (void)unused;
    if (py_engine_lock(self))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = zc_engine_spread(self->engine);
    Py_END_ALLOW_THREADS
    PyObject *result = py_engine_finish(self, status);
    py_engine_drop_released(self);
    return result;
}

PyObject *py_checksum(PyObject *module, PyObject *source)
{
    uint64_t sums[2];
    Py_buffer buffer;

    (void)module;
    if (PyObject_GetBuffer(source, &buffer, PyBUF_SIMPLE))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    zc_checksum(buffer.buf, (size_t)buffer.len, sums);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&buffer);
    return Py_BuildValue("(KK)", (unsigned long long)sums[0], (unsigned long long)sums[1]);
}
