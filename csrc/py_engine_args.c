/*
 * Arguments of Engine methods: parameter numbers, arrays of a parameter's size,
 * lists of parameters and of option groups.
 */
#include "py_engine.h"

#include "py_gpu.h"

int py_engine_check(py_state *state, PyObject *object)
{
    return Py_IS_TYPE(object, state->engine_type);
}

int py_engine_index(py_engine *self, PyObject *number, size_t *index)
{
    Py_ssize_t value = PyNumber_AsSsize_t(number, PyExc_IndexError);

    if (value == -1 && PyErr_Occurred())
        return -1;
    if (value < 0 || (size_t)value >= self->param_count) {
        PyErr_Format(PyExc_IndexError, "parameter index is %zd; legal are 0 to %zd", value,
                     (Py_ssize_t)self->param_count - 1);
        return -1;
    }
    *index = (size_t)value;
    return 0;
}

/* One option of a group: 0, or -1 with an exception. */
static int read_option(zc_options *options, PyObject *key, PyObject *value)
{
    const struct {
        const char *name;
        double *real;
        int *flag;
    } fields[] = {
        {"lr", &options->lr, NULL},
        {"beta1", &options->beta1, NULL},
        {"beta2", &options->beta2, NULL},
        {"eps", &options->eps, NULL},
        {"weight_decay", &options->weight_decay, NULL},
        {"momentum", &options->momentum, NULL},
        {"dampening", &options->dampening, NULL},
        {"nesterov", NULL, &options->nesterov},
        {"amsgrad", NULL, &options->amsgrad},
        {"maximize", NULL, &options->maximize},
    };

    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) {
        if (!PyUnicode_Check(key) || PyUnicode_CompareWithASCIIString(key, fields[i].name) != 0)
            continue;
        if (fields[i].flag) {
            *fields[i].flag = PyObject_IsTrue(value);
            return *fields[i].flag < 0 ? -1 : 0;
        }
        *fields[i].real = PyFloat_AsDouble(value);
        return *fields[i].real == -1 && PyErr_Occurred() ? -1 : 0;
    }
    PyErr_Format(PyExc_TypeError, "group option %R is not known", key);
    return -1;
}

zc_options *py_engine_groups(PyObject *sequence, size_t *count)
{
    PyObject *groups = PySequence_Tuple(sequence);

    if (!groups)
        return NULL;
    *count = (size_t)PyTuple_GET_SIZE(groups);
    zc_options *options = PyMem_Calloc(*count + 1, sizeof *options);
    if (!options)
        PyErr_NoMemory();
    for (size_t i = 0; options && i < *count; i++) {
        PyObject *group = PyTuple_GET_ITEM(groups, (Py_ssize_t)i), *key, *value;
        Py_ssize_t at = 0;
        int failed = 0;
        if (!PyDict_Check(group)) {
            PyErr_Format(PyExc_TypeError, "group %zu is a %s; it must be a dict of options", i, Py_TYPE(group)->tp_name);
            failed = 1;
        }
        while (!failed && PyDict_Next(group, &at, &key, &value))
            failed = read_option(&options[i], key, value);
        if (failed) {
            PyMem_Free(options);
            options = NULL;
        }
    }
    Py_DECREF(groups);
    return options;
}

void py_param_list_free(py_param_list *list)
{
    for (size_t i = 0; list->initial && i < list->count; i++)
        py_array_release(&list->initial[i]);
    PyMem_Free(list->initial);
    PyMem_Free(list->params);
    Py_CLEAR(list->tuple);
}

/* One (name, elems, dtype, group, initial array or None[, unit, frozen]): 0, or -1 with an exception. */
static int read_param(PyObject *item, size_t number, zc_param *param, py_array *initial)
{
    const char *dtype_name;
    Py_ssize_t elems, group, unit = 0;
    PyObject *array;
    char what[160];

    if (!PyTuple_Check(item)) {
        PyErr_Format(PyExc_TypeError, "parameter %zu is a %s; it must be a tuple (name, elems, dtype, group, initial)",
                     number, Py_TYPE(item)->tp_name);
        return -1;
    }
    if (!PyArg_ParseTuple(item, "znsnO|np;a parameter is (name, elems, dtype, group, initial[, unit, frozen])",
                          &param->name, &elems, &dtype_name, &group, &array, &unit, &param->frozen)
        || py_dtype_from_name(dtype_name, &param->dtype))
        return -1;
    if (unit < 0 || unit > UINT32_MAX) {
        PyErr_Format(PyExc_ValueError, "parameter %zu is in unit %zd; legal is 0 or more", number, unit);
        return -1;
    }
    if (elems < 0 || group < 0 || group > UINT32_MAX) {
        PyErr_Format(PyExc_ValueError, "parameter %zu has %zd elements and group %zd; both must be 0 or more", number,
                     elems, group);
        return -1;
    }
    param->elems = (size_t)elems;
    param->group = (uint32_t)group;
    param->unit = (uint32_t)unit;
    if (array == Py_None)
        return 0;
    PyOS_snprintf(what, sizeof what, "initial value of parameter %zu (%s)", number, param->name ? param->name : "unnamed");
    if (py_array_from(array, param->dtype, PY_READ, what, initial))
        return -1;
    if (initial->elems != param->elems) {
        PyErr_Format(PyExc_ValueError, "%s has %zu elements; the parameter has %zd", what, initial->elems, elems);
        return -1;
    }
    static const char nothing; /* an empty array may have no address, but it was given */
    param->initial = initial->data ? initial->data : &nothing;
    return 0;
}

int py_param_list_read(PyObject *sequence, size_t first, py_param_list *list)
{
    *list = (py_param_list){.tuple = PySequence_Tuple(sequence)};
    if (!list->tuple)
        return -1;
    list->count = (size_t)PyTuple_GET_SIZE(list->tuple);
    list->params = PyMem_Calloc(list->count + 1, sizeof *list->params);
    list->initial = PyMem_Calloc(list->count + 1, sizeof *list->initial);
    if (!list->params || !list->initial) {
        PyErr_NoMemory();
        goto fail;
    }
    for (size_t i = 0; i < list->count; i++)
        if (read_param(PyTuple_GET_ITEM(list->tuple, (Py_ssize_t)i), first + i, &list->params[i], &list->initial[i]))
            goto fail;
    return 0;
fail:
    py_param_list_free(list);
    return -1;
}

int py_engine_read_array(py_engine *self, PyObject *args, const char *what, py_where where, size_t *index,
                         py_array *array)
{
    PyObject *number, *source;
    char name[96];

    if (!PyArg_ParseTuple(args, "OO;two arguments are needed: parameter index and array", &number, &source)
        || py_engine_index(self, number, index))
        return -1;
    PyOS_snprintf(name, sizeof name, "%s of parameter %zu", what, *index);
    if (where == PY_DEVICE && self->gpu >= 0) {
        const py_param_facts *param = &self->params[*index];
        *array = (py_array){NULL, param->elems, param->dtype, NULL};
        if (py_gpu_memory(py_state_of((PyObject *)self), source, self->gpu, param->dtype, param->elems, 0, name,
                          &array->data))
            return -1;
        array->array = Py_NewRef(source);
        return 0;
    }
    if (py_array_from(source, self->params[*index].dtype, PY_READ, name, array))
        return -1;
    if (array->elems != self->params[*index].elems) {
        PyErr_Format(PyExc_ValueError, "%s has %zu elements; the parameter has %zu", name, array->elems,
                     self->params[*index].elems);
        py_array_release(array);
        return -1;
    }
    return 0;
}

int py_engine_role(const char *name, zc_role *role)
{
    static const struct {
        const char *name;
        zc_role role;
    } roles[] = {{"grad", ZC_ROLE_GRAD},
                 {"exp_avg", ZC_ROLE_EXP_AVG},
                 {"momentum_buffer", ZC_ROLE_EXP_AVG},
                 {"exp_avg_sq", ZC_ROLE_EXP_AVG_SQ},
                 {"max_exp_avg_sq", ZC_ROLE_MAX_EXP_AVG_SQ},
                 {"master", ZC_ROLE_MASTER},
                 {"weight", ZC_ROLE_WEIGHT}};

    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++) {
        if (strcmp(roles[i].name, name) == 0) {
            *role = roles[i].role;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "role is '%s'; legal are 'grad', 'exp_avg', 'momentum_buffer', 'exp_avg_sq', "
                                   "'max_exp_avg_sq', 'master', 'weight'", name);
    return -1;
}

/* An optional parameter number, None for all. */
int py_engine_index_or_all(py_engine *self, PyObject *args, const char *format, size_t *index)
{
    PyObject *number = Py_None;

    *index = SIZE_MAX;
    if (!PyArg_ParseTuple(args, format, &number))
        return -1;
    return number == Py_None ? 0 : py_engine_index(self, number, index);
}