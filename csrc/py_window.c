/*
 * The Window object of stage 3: the parameters of one unit, which have their
 * values while the window is open, and a guard otherwise.
 *
 * A guard is one NaN of the parameter's own, expanded to its shape, and a class of
 * the parameter's that notices how it is used (_guard.py).  What gets around the
 * class, through .data for example, reads NaN, or writes the one element, which is
 * looked at when the window opens.  The memory is put in place by assigning
 * `.data`, which changes neither the identity of the parameter nor its version
 * counter, and which autograd follows in tensors that it saved.
 */
#include "py_tensor.h"

#include <math.h>

typedef struct window_param {
    PyObject *param, *full, *guard; /* guard None: an empty one, which is always there */
    PyObject *owner, *key;          /* owner[key] is the parameter; NULL: in no module */
    void *guard_data;
    dl_type guard_type;
    char on_cpu;                    /* the guard can be looked at */
    char held;                      /* somebody keeps it open by other means: left alone */
} window_param;

typedef struct py_window {
    PyObject_HEAD
    py_tensor_reader reader;
    PyObject *data_name;
    PyTypeObject *own, *guarded; /* the parameters' class, and the one they have with their guards: laid out alike */
    window_param *params;
    size_t count;
    int open;
} py_window;

/* ---- checks -------------------------------------------------------------- */

static int is_nan(const void *element, dl_type type)
{
    uint16_t half;
    float single;
    double wide;

    if (type.bits == 64) {
        memcpy(&wide, element, sizeof wide);
        return isnan(wide);
    }
    if (type.bits == 32) {
        memcpy(&single, element, sizeof single);
        return isnan(single);
    }
    memcpy(&half, element, sizeof half);
    return type.code == DL_BFLOAT ? (half & 0x7fff) > 0x7f80 : (half & 0x7fff) > 0x7c00;
}

/*
 * What is wrong with a parameter that should show its guard; NULL: nothing, or an exception.
 * Its class lets nobody assign to .data; whether somebody did by other means is only looked at with `where`.
 */
static const char *find_fault(py_window *self, window_param *p, int where)
{
    py_tensor view;

    if (p->owner) {
        PyObject *there = PyDict_GetItemWithError(p->owner, p->key);
        if (!there && PyErr_Occurred())
            return NULL;
        if (there != p->param)
            return "replaced";
    }
    if (p->guard == Py_None || p->held)
        return NULL;
    if (where && py_tensor_view(&self->reader, p->param, &view) < 0) {
        PyErr_Clear(); /* on another device */
        return "moved";
    }
    if (Py_TYPE(p->param) != self->guarded || (where && py_tensor_data(&view) != p->guard_data))
        return "moved";
    return !p->on_cpu || is_nan(p->guard_data, p->guard_type) ? NULL : "written";
}

/* None, or (position, reason); NULL with an exception. */
static PyObject *check_all(py_window *self, int where)
{
    for (size_t i = 0; i < self->count; i++) {
        const char *fault = find_fault(self, &self->params[i], where);
        if (fault)
            return Py_BuildValue("ns", (Py_ssize_t)i, fault);
        if (PyErr_Occurred())
            return NULL;
    }
    Py_RETURN_NONE;
}

static int show(py_window *self, window_param *p, int full)
{
    if (p->guard == Py_None || p->held)
        return 0;
    py_set_class(p->param, self->own); /* also before the guard is set: its class would not let us */
    if (PyObject_SetAttr(p->param, self->data_name, full ? p->full : p->guard) < 0)
        return -1;
    if (!full)
        py_set_class(p->param, self->guarded);
    return 0;
}

/* ---- methods ------------------------------------------------------------- */

PyDoc_STRVAR(open_doc,
             "open(check)\n--\n\nThe parameters get their values, which the unit's memory must hold. None; or, with check, "
             "(position, reason) of the first\none that is not as the window left it, and nothing is done: reason is "
             "'replaced', 'moved' or 'written'.");

static PyObject *window_open(py_window *self, PyObject *check)
{
    int checks = PyObject_IsTrue(check);

    if (checks < 0)
        return NULL;
    if (self->open)
        Py_RETURN_NONE;
    PyObject *fault = checks ? check_all(self, 0) : Py_NewRef(Py_None);
    if (fault != Py_None)
        return fault;
    for (size_t i = 0; i < self->count; i++)
        if (show(self, &self->params[i], 1) < 0) {
            Py_DECREF(fault);
            return NULL;
        }
    self->open = 1;
    return fault;
}

PyDoc_STRVAR(close_doc, "close()\n--\n\nThe parameters show their guards again.");

static PyObject *window_close(py_window *self, PyObject *unused)
{
    (void)unused;
    for (size_t i = 0; self->open && i < self->count; i++)
        if (show(self, &self->params[i], 0) < 0)
            return NULL;
    self->open = 0;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(check_doc, "check()\n--\n\nOf a closed window: None, or what open() would find.");

static PyObject *window_check(py_window *self, PyObject *unused)
{
    (void)unused;
    if (self->open)
        Py_RETURN_NONE;
    return check_all(self, 1);
}

PyDoc_STRVAR(hold_doc,
             "hold(position, on)\n--\n\nOf a closed window: whether a parameter is left alone and of its own class, because it has "
             "values of its own just now.");

static PyObject *window_hold(py_window *self, PyObject *args)
{
    Py_ssize_t position;
    int on;

    if (!PyArg_ParseTuple(args, "np:hold", &position, &on))
        return NULL;
    if (position < 0 || (size_t)position >= self->count) {
        PyErr_Format(PyExc_IndexError, "position is %zd; the window has %zu parameters", position, self->count);
        return NULL;
    }
    window_param *p = &self->params[position];
    if (p->guard != Py_None)
        py_set_class(p->param, on ? self->own : self->guarded);
    p->held = (char)on;
    Py_RETURN_NONE;
}

/* ---- life ---------------------------------------------------------------- */

static int window_clear(PyObject *object)
{
    py_window *self = (py_window *)object;
    size_t count = self->count;

    self->count = 0;
    for (size_t i = 0; i < count; i++) {
        Py_CLEAR(self->params[i].param);
        Py_CLEAR(self->params[i].full);
        Py_CLEAR(self->params[i].guard);
        Py_CLEAR(self->params[i].owner);
        Py_CLEAR(self->params[i].key);
    }
    Py_CLEAR(self->reader.describe);
    Py_CLEAR(self->data_name);
    Py_CLEAR(self->own);
    Py_CLEAR(self->guarded);
    return 0;
}

static int window_traverse(PyObject *object, visitproc visit, void *arg)
{
    py_window *self = (py_window *)object;

    Py_VISIT(Py_TYPE(object));
    for (size_t i = 0; i < self->count; i++) {
        Py_VISIT(self->params[i].param);
        Py_VISIT(self->params[i].full);
        Py_VISIT(self->params[i].guard);
        Py_VISIT(self->params[i].owner);
    }
    Py_VISIT(self->reader.describe);
    Py_VISIT(self->own);
    Py_VISIT(self->guarded);
    return 0;
}

static void window_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);

    PyObject_GC_UnTrack(object);
    window_clear(object);
    PyMem_Free(((py_window *)object)->params);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

/* One (param, full, guard or None, owner or None, key): 0, or -1 with an exception. */
static int take_param(py_window *self, PyObject *item, window_param *p)
{
    PyObject *param, *full, *guard, *owner, *key;
    py_tensor view;

    if (!PyArg_ParseTuple(item, "OOOOO;a parameter is (param, full, guard, owner, key)", &param, &full, &guard, &owner,
                          &key))
        return -1;
    p->param = Py_NewRef(param);
    p->full = Py_NewRef(full);
    p->guard = Py_NewRef(guard);
    if (PyDict_Check(owner)) {
        p->owner = Py_NewRef(owner);
        p->key = Py_NewRef(key);
    }
    if (guard == Py_None)
        return 0;
    if (py_tensor_view(&self->reader, guard, &view) < 0)
        return -1;
    p->guard_data = py_tensor_data(&view);
    p->guard_type = view.tensor.dtype;
    p->on_cpu = (char)py_tensor_is_on(&view, -1);
    if (Py_TYPE(param) != self->own) {
        PyErr_Format(PyExc_TypeError, "a parameter is a %s; it must be a %s", Py_TYPE(param)->tp_name, self->own->tp_name);
        return -1;
    }
    return PyObject_SetAttrString(param, "__class__", (PyObject *)self->guarded); /* raises where that cannot be */
}

static PyObject *window_new(PyTypeObject *type, PyObject *arguments, PyObject *names)
{
    PyObject *sequence, *describe, *exchange, *own, *guarded;

    if (names && PyDict_GET_SIZE(names)) {
        PyErr_SetString(PyExc_TypeError, "Window takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(arguments, "OOOO!O!:Window", &sequence, &describe, &exchange, &PyType_Type, &own, &PyType_Type,
                          &guarded))
        return NULL;
    PyObject *list = PySequence_Tuple(sequence);
    if (!list)
        return NULL;
    py_window *self = (py_window *)type->tp_alloc(type, 0);
    size_t count = (size_t)PyTuple_GET_SIZE(list);
    if (!self || py_tensor_reader_init(&self->reader, describe, exchange) < 0 ||
        !(self->data_name = PyUnicode_InternFromString("data")))
        goto failed;
    self->own = (PyTypeObject *)Py_NewRef(own);
    self->guarded = (PyTypeObject *)Py_NewRef(guarded);
    self->params = PyMem_Calloc(count + 1, sizeof *self->params);
    if (!self->params) {
        PyErr_NoMemory();
        goto failed;
    }
    for (size_t i = 0; i < count; i++) {
        self->count = i + 1;
        if (take_param(self, PyTuple_GET_ITEM(list, (Py_ssize_t)i), &self->params[i]) < 0)
            goto failed;
    }
    Py_DECREF(list);
    return (PyObject *)self;
failed:
    Py_DECREF(list);
    Py_XDECREF(self);
    return NULL;
}

static PyMethodDef window_methods[] = {
    {"open", (PyCFunction)window_open, METH_O, open_doc},
    {"close", (PyCFunction)window_close, METH_NOARGS, close_doc},
    {"check", (PyCFunction)window_check, METH_NOARGS, check_doc},
    {"hold", (PyCFunction)window_hold, METH_VARARGS, hold_doc},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(window_doc,
             "Window(params, describe, exchange, own, guarded)\n--\n\nThe parameters of a unit of stage 3: (param, full, guard, "
             "owner, key) each, which show their guards now.\nfull is a view of the unit's memory; guard is None for an "
             "empty parameter; owner is the dict in which the module\nkeeps it under key, or None. They are of class own, "
             "and of guarded, a subclass of it, while they show their guards.");

static PyType_Slot window_slots[] = {
    {Py_tp_doc, (void *)window_doc},   {Py_tp_new, window_new},     {Py_tp_dealloc, window_dealloc},
    {Py_tp_traverse, window_traverse}, {Py_tp_clear, window_clear}, {Py_tp_methods, window_methods},
    {0, NULL},
};

static PyType_Spec window_spec = {
    .name = "zero_c._core.Window",
    .basicsize = sizeof(py_window),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = window_slots,
};

int py_window_add(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &window_spec, NULL);
    if (!type)
        return -1;
    int failed = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return failed;
}
