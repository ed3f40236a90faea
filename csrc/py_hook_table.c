/*
 * The Hooks object: the parameters of one optimizer as autograd sees them, where
 * each was put, and the loops over all of them around a step.
 */
#include "py_hook.h"

/* ---- gradients ------------------------------------------------------------- */

static int same_shape(const hook_param *p, const dl_tensor *t)
{
    if (t->dims != p->dims)
        return 0;
    for (int32_t i = 0; i < p->dims; i++)
        if (t->shape[i] != p->sizes[i])
            return 0;
    return 1;
}

/* The same element type, and every element at the same distance from the first. */
static int same_layout(const hook_param *p, const dl_tensor *t)
{
    if (t->dtype.code != p->dtype.code || t->dtype.bits != p->dtype.bits || !t->strides)
        return p->dims == 0 && t->dtype.code == p->dtype.code && t->dtype.bits == p->dtype.bits;
    for (int32_t i = 0; i < p->dims; i++)
        if (p->sizes[i] > 1 && t->strides[i] != p->strides[i])
            return 0;
    return 1;
}

void *hook_gradient_memory(py_hooks *self, size_t index, PyObject *grad, PyObject **keep)
{
    hook_param *p = &self->params[index];
    py_tensor view;

    *keep = NULL;
    if (py_tensor_view(&self->reader, grad, &view) == 0 && py_tensor_is_on(&view, self->engine->gpu) &&
        same_shape(p, &view.tensor) && same_layout(p, &view.tensor) &&
        (py_tensor_data(&view) || !p->data)) { /* a sparse one has no memory to show */
        *keep = Py_NewRef(grad);
    } else {
        PyErr_Clear(); /* relayout says what is wrong with it */
        PyObject *number = PyLong_FromSize_t(index);
        if (number)
            *keep = PyObject_CallFunctionObjArgs(self->relayout, number, grad, NULL);
        Py_XDECREF(number);
        if (!*keep)
            return NULL;
        p = &self->params[index];
        if (py_tensor_view(&self->reader, *keep, &view) < 0) {
            Py_CLEAR(*keep);
            return NULL;
        }
        if (!same_shape(p, &view.tensor) || !same_layout(p, &view.tensor)) {
            PyErr_Format(PyExc_RuntimeError, "parameter %zu: its gradient cannot be brought into its layout", index);
            Py_CLEAR(*keep);
            return NULL;
        }
    }
    void *data = py_tensor_data(&view);
    return data ? data : *keep; /* an empty one has no memory; the engine reads nothing */
}

/* ---- the table ----------------------------------------------------------- */

static void clear_param(hook_param *p)
{
    if (p->pre)
        p->pre->hooks = NULL;
    if (p->post)
        p->post->hooks = NULL;
    Py_CLEAR(p->pre);
    Py_CLEAR(p->post);
    Py_CLEAR(p->param);
    Py_CLEAR(p->own);
    Py_CLEAR(p->guard);
    Py_CLEAR(p->owner);
    Py_CLEAR(p->key);
    PyMem_Free(p->sizes);
    p->sizes = NULL;
}

static int hooks_clear(PyObject *object)
{
    py_hooks *self = (py_hooks *)object;
    size_t count = self->count;

    self->count = 0;
    for (size_t i = 0; i < count; i++)
        clear_param(&self->params[i]);
    Py_CLEAR(self->engine);
    Py_CLEAR(self->queue_callback);
    Py_CLEAR(self->current_node);
    Py_CLEAR(self->reader.describe);
    Py_CLEAR(self->stream_of);
    Py_CLEAR(self->relayout);
    Py_CLEAR(self->grad_name);
    Py_CLEAR(self->version_name);
    Py_CLEAR(self->call_type);
    Py_CLEAR(self->round_end_type);
    return 0;
}

static int hooks_traverse(PyObject *object, visitproc visit, void *arg)
{
    py_hooks *self = (py_hooks *)object;

    Py_VISIT(Py_TYPE(object));
    for (size_t i = 0; i < self->count; i++) {
        Py_VISIT(self->params[i].param);
        Py_VISIT(self->params[i].own);
        Py_VISIT(self->params[i].guard);
        Py_VISIT(self->params[i].owner);
    }
    Py_VISIT(self->engine);
    Py_VISIT(self->queue_callback);
    Py_VISIT(self->current_node);
    Py_VISIT(self->reader.describe);
    Py_VISIT(self->stream_of);
    Py_VISIT(self->relayout);
    Py_VISIT(self->call_type);
    Py_VISIT(self->round_end_type);
    return 0;
}

/*
 * Nothing guards the sums of an optimizer that is gone: its parameters are plain
 * ones again.  A finalizer, because it must see them before the collector clears
 * them.
 */
static void hooks_finalize(PyObject *object)
{
    py_hooks *self = (py_hooks *)object;
    PyObject *type, *value, *traceback;

    PyErr_Fetch(&type, &value, &traceback);
    for (size_t i = 0; i < self->count; i++) {
        if (!self->params[i].summed)
            continue;
        PyObject *grad = hook_get_grad(self, i);
        if (!grad || (grad == self->params[i].guard && hook_set_grad(self, i, Py_None) < 0))
            PyErr_WriteUnraisable((PyObject *)Py_TYPE(self));
        Py_XDECREF(grad);
    }
    PyErr_Restore(type, value, traceback);
}

static void hooks_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);

    if (PyObject_CallFinalizerFromDealloc(object) < 0)
        return;
    PyObject_GC_UnTrack(object);
    hooks_clear(object);
    PyMem_Free(((py_hooks *)object)->params);
    PyObject_GC_Del(object);
    Py_DECREF(type);
}

static PyTypeObject *type_of_module(PyTypeObject *type, const char *name)
{
    PyObject *module = PyType_GetModule(type);
    return module ? (PyTypeObject *)PyObject_GetAttrString(module, name) : NULL;
}

/* Hooks(engine, queue_callback, current_node, describe, stream_of, relayout, exchange): exchange is a capsule or None. */
static PyObject *hooks_new(PyTypeObject *type, PyObject *arguments, PyObject *names)
{
    PyObject *engine, *queue_callback, *current_node, *describe, *stream_of, *relayout, *exchange;

    if (names && PyDict_GET_SIZE(names)) {
        PyErr_SetString(PyExc_TypeError, "Hooks takes no keyword arguments");
        return NULL;
    }
    if (!PyArg_ParseTuple(arguments, "OOOOOOO", &engine, &queue_callback, &current_node, &describe, &stream_of,
                          &relayout, &exchange))
        return NULL;
    py_hooks *self = (py_hooks *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    if (!py_engine_check(py_state_of((PyObject *)self), engine)) {
        PyErr_Format(PyExc_TypeError, "Hooks needs an Engine, got %s", Py_TYPE(engine)->tp_name);
        goto failed;
    }
    if (py_tensor_reader_init(&self->reader, describe, exchange) < 0)
        goto failed;
    self->engine = (py_engine *)Py_NewRef(engine);
    self->queue_callback = Py_NewRef(queue_callback);
    self->current_node = Py_NewRef(current_node);
    self->stream_of = Py_NewRef(stream_of);
    self->relayout = Py_NewRef(relayout);
    self->grad_name = PyUnicode_InternFromString("grad");
    self->version_name = PyUnicode_InternFromString("_version");
    self->call_type = type_of_module(type, "GradHook");
    self->round_end_type = type_of_module(type, "RoundEnd");
    if (!self->grad_name || !self->version_name || !self->call_type || !self->round_end_type)
        goto failed;
    return (PyObject *)self;
failed:
    Py_DECREF(self);
    return NULL;
}

static int read_version(py_hooks *self, hook_param *p, unsigned long *version)
{
    PyObject *number = PyObject_GetAttr(p->param, self->version_name);
    if (!number)
        return -1;
    *version = PyLong_AsUnsignedLongMask(number);
    Py_DECREF(number);
    return PyErr_Occurred() ? -1 : 0;
}

/* Notes where the parameter lies now. */
static int note_place(py_hooks *self, hook_param *p)
{
    py_tensor view;
    int64_t elems = 1;

    if (py_tensor_view(&self->reader, p->param, &view) < 0)
        return -1;
    p->dims = view.tensor.dims;
    p->dtype = view.tensor.dtype;
    p->sizes = PyMem_Malloc((2 * (size_t)p->dims + 1) * sizeof *p->sizes);
    if (!p->sizes) {
        PyErr_NoMemory();
        return -1;
    }
    p->strides = p->sizes + p->dims;
    for (int32_t i = 0; i < p->dims; i++) {
        p->sizes[i] = view.tensor.shape[i];
        p->strides[i] = view.tensor.strides ? view.tensor.strides[i] : 0;
        elems *= p->sizes[i];
    }
    p->data = elems ? py_tensor_data(&view) : NULL;
    return p->has_master ? read_version(self, p, &p->version) : 0;
}

PyDoc_STRVAR(hooks_add_doc,
"add(param, guard, owner, key, has_master, windowed)\n--\n\n"
"The parameter of the next index, already where the engine keeps it; returns\n"
"the callables for register_hook and register_post_accumulate_grad_hook.\n"
"owner is the dict in which the module keeps it under key, or None.  A windowed\n"
"one comes and goes, and others look after its place (Window).");

static PyObject *hooks_add(PyObject *object, PyObject *arguments)
{
    py_hooks *self = (py_hooks *)object;
    PyObject *param, *guard, *owner, *key;
    int has_master, windowed;

    if (!PyArg_ParseTuple(arguments, "OOOOpp", &param, &guard, &owner, &key, &has_master, &windowed))
        return NULL;
    if (self->count == self->capacity) {
        size_t capacity = self->capacity ? 2 * self->capacity : 64;
        hook_param *bigger = PyMem_Realloc(self->params, capacity * sizeof *bigger);
        if (!bigger)
            return PyErr_NoMemory();
        self->params = bigger;
        self->capacity = capacity;
    }
    hook_param fresh = {.has_master = (char)has_master, .windowed = (char)windowed};
    fresh.param = Py_NewRef(param);
    fresh.own = (PyTypeObject *)Py_NewRef(Py_TYPE(param));
    fresh.guard = Py_NewRef(guard);
    if (PyDict_Check(owner)) {
        fresh.owner = Py_NewRef(owner);
        fresh.key = Py_NewRef(key);
    }
    fresh.pre = hook_call_new(self, self->count, 0);
    fresh.post = hook_call_new(self, self->count, 1);
    if (!fresh.pre || !fresh.post || note_place(self, &fresh) < 0) {
        clear_param(&fresh);
        return NULL;
    }
    PyObject *pair = PyTuple_Pack(2, (PyObject *)fresh.pre, (PyObject *)fresh.post);
    if (!pair) {
        clear_param(&fresh);
        return NULL;
    }
    self->params[self->count++] = fresh;
    return pair;
}

/* ---- around the step ----------------------------------------------------- */

PyDoc_STRVAR(hooks_settle_doc,
"settle()\n--\n\n"
"Before anything collective that reads the sums: drops those whose guard is\n"
"gone or was replaced, and hands over gradients that were left in .grad as a round of their own.");

static PyObject *hooks_settle(PyObject *object, PyObject *ignored)
{
    py_hooks *self = (py_hooks *)object;
    (void)ignored;

    if (self->live) {
        PyErr_SetString(py_state_of(object)->error,
                        "the optimizer was called from inside a backward; call it after backward() has returned");
        return NULL;
    }
    if (hook_discard_unguarded(self) < 0)
        return NULL;
    for (size_t i = 0; i < self->count; i++) {
        PyObject *grad = hook_get_grad(self, i);
        if (!grad)
            return NULL;
        int real = grad != Py_None && grad != self->params[i].guard;
        Py_DECREF(grad);
        if (!real)
            continue;
        if (hook_round_of_leftovers(self) < 0)
            return NULL;
        break;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(hooks_check_doc,
"check()\n--\n\n"
"None, or (index, reason) of the first parameter that is not where it was put;\n"
"reason is 'replaced' or 'moved'.");

static PyObject *hooks_check(PyObject *object, PyObject *ignored)
{
    py_hooks *self = (py_hooks *)object;
    py_tensor view;
    (void)ignored;

    for (size_t i = 0; i < self->count; i++) {
        hook_param *p = &self->params[i];
        if (p->owner) {
            PyObject *there = PyDict_GetItemWithError(p->owner, p->key);
            if (!there && PyErr_Occurred())
                return NULL;
            if (there != p->param)
                return Py_BuildValue("ns", (Py_ssize_t)i, "replaced");
        }
        if (p->windowed)
            continue;
        if (py_tensor_view(&self->reader, p->param, &view) < 0) {
            PyErr_Clear(); /* on the meta device, for example */
            return Py_BuildValue("ns", (Py_ssize_t)i, "moved");
        }
        if (!py_tensor_is_on(&view, self->engine->gpu) || (p->data && py_tensor_data(&view) != p->data) ||
            !same_shape(p, &view.tensor) || !same_layout(p, &view.tensor))
            return Py_BuildValue("ns", (Py_ssize_t)i, "moved");
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(hooks_written_doc,
"written()\n--\n\n"
"Indices of the parameters with a master that were written in place since the\n"
"last call, as far as torch counts such writes.");

static PyObject *hooks_written(PyObject *object, PyObject *ignored)
{
    py_hooks *self = (py_hooks *)object;
    PyObject *list = PyList_New(0);
    (void)ignored;

    for (size_t i = 0; list && i < self->count; i++) {
        hook_param *p = &self->params[i];
        unsigned long version;
        if (!p->has_master)
            continue;
        if (read_version(self, p, &version) < 0) {
            Py_CLEAR(list);
        } else if (version != p->version) {
            p->version = version;
            PyObject *number = PyLong_FromSize_t(i);
            if (!number || PyList_Append(list, number) < 0)
                Py_CLEAR(list);
            Py_XDECREF(number);
        }
    }
    return list;
}

PyDoc_STRVAR(hooks_consume_doc, "consume()\n--\n\nAfter a step used the sums: the guards go away.");

static PyObject *hooks_consume(PyObject *object, PyObject *ignored)
{
    py_hooks *self = (py_hooks *)object;
    (void)ignored;

    for (size_t i = 0; i < self->count; i++) {
        self->params[i].summed = self->params[i].deferred = 0;
        if (hook_set_grad(self, i, Py_None) < 0)
            return NULL;
    }
    Py_RETURN_NONE;
}

PyDoc_STRVAR(hooks_forget_doc, "forget()\n--\n\nDrops all sums, guards and gradients left in .grad.");

static PyObject *hooks_forget(PyObject *object, PyObject *ignored)
{
    if (hook_discard((py_hooks *)object, SIZE_MAX) < 0)
        return NULL;
    return hooks_consume(object, ignored);
}

PyDoc_STRVAR(hooks_defer_doc, "defer(on)\n--\n\nEnters (True) or leaves (False) a no_sync() block.");

static PyObject *hooks_defer(PyObject *object, PyObject *on)
{
    int truth = PyObject_IsTrue(on);
    if (truth < 0)
        return NULL;
    ((py_hooks *)object)->deferring += truth ? 1 : -1;
    Py_RETURN_NONE;
}

static PyMethodDef hooks_methods[] = {
    {"add", hooks_add, METH_VARARGS, hooks_add_doc},
    {"settle", hooks_settle, METH_NOARGS, hooks_settle_doc},
    {"check", hooks_check, METH_NOARGS, hooks_check_doc},
    {"written", hooks_written, METH_NOARGS, hooks_written_doc},
    {"consume", hooks_consume, METH_NOARGS, hooks_consume_doc},
    {"forget", hooks_forget, METH_NOARGS, hooks_forget_doc},
    {"defer", hooks_defer, METH_O, hooks_defer_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot hooks_slots[] = {
    {Py_tp_doc, "The parameters of one optimizer, as autograd sees them."},
    {Py_tp_new, hooks_new},
    {Py_tp_finalize, hooks_finalize},
    {Py_tp_dealloc, hooks_dealloc},
    {Py_tp_traverse, hooks_traverse},
    {Py_tp_clear, hooks_clear},
    {Py_tp_methods, hooks_methods},
    {0, NULL},
};

static PyType_Spec hooks_spec = {
    .name = "zero_c._core.Hooks",
    .basicsize = sizeof(py_hooks),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .slots = hooks_slots,
};

int py_hook_add(PyObject *module)
{
    PyType_Spec *const specs[] = {&hooks_spec, &hook_call_spec, &hook_round_end_spec};

    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        PyObject *type = PyType_FromModuleAndSpec(module, specs[i], NULL);
        if (!type)
            return -1;
        int failed = PyModule_AddType(module, (PyTypeObject *)type);
        Py_DECREF(type);
        if (failed)
            return -1;
    }
    return 0;
}
