/*
 * Gradient hooks of the torch adapter: what py_hook.c (rounds) and
 * py_hook_table.c (the parameters) share.
 */
#ifndef PY_HOOK_H
#define PY_HOOK_H

#include "py_engine.h"
#include "py_tensor.h"

struct py_hooks;

/* Called by torch for one parameter, before or after its gradient is added to .grad. */
typedef struct hook_call {
    PyObject_HEAD
    vectorcallfunc call;
    struct py_hooks *hooks; /* borrowed; NULL: the optimizer is gone */
    size_t index;
} hook_call;

typedef struct hook_param {
    PyObject *param, *guard;
    PyTypeObject *own;      /* the parameter's class; at stage 3 it has another one meanwhile, which watches all attributes */
    PyObject *owner, *key;  /* owner[key] is the parameter; NULL: in no module */
    hook_call *pre, *post;
    void *data;             /* where the parameter was put; NULL: empty, anywhere */
    dl_type dtype;
    int32_t dims;
    int64_t *sizes, *strides; /* one allocation */
    uint64_t round;         /* the last round in which it handed over a gradient */
    unsigned long version;  /* torch's counter of in-place writes, for those with a master */
    char has_master;
    char windowed;          /* stage 3: it is at `data` only while its unit is in use */
    char summed;            /* the engine holds sums; .grad is, or should be, the guard */
    char taken;             /* the pre-hook took the guard in this round */
    char deferred;          /* backwards inside no_sync() have added to .grad; otherwise what is there replaces the sums */
} hook_param;

typedef struct py_hooks {
    PyObject_HEAD
    py_engine *engine;
    PyObject *queue_callback, *current_node; /* torch's */
    py_tensor_reader reader;
    PyObject *stream_of;    /* GPU -> address of torch's current stream, where there is no exchange table */
    PyObject *relayout;     /* (index, gradient) -> the gradient in the parameter's dtype and strides */
    PyObject *grad_name, *version_name;
    PyTypeObject *call_type, *round_end_type;
    hook_param *params;
    size_t count, capacity;
    uint64_t round;         /* number of the current or last round, from 1 */
    int live;               /* a backward is running whose end is awaited */
    int offered;            /* something was handed over in it */
    int held;               /* the engine keeps gradients that it has not read yet */
    int deferring;          /* depth of no_sync() */
} py_hooks;

/* Adds Hooks, GradHook and RoundEnd to the module. 0, or -1 with an exception set. */
int py_hook_add(PyObject *module);

/* Everything below: 0 or an object, or -1 or NULL with an exception set. */

/* Around an access to a parameter's attributes: it is of its own class, and then of the one before again. */
static inline PyTypeObject *hook_undress(hook_param *p)
{
    PyTypeObject *now = Py_TYPE(p->param);

    if (now == p->own)
        return NULL;
    Py_INCREF(now);
    py_set_class(p->param, p->own);
    return now;
}

static inline void hook_dress(hook_param *p, PyTypeObject *before)
{
    if (!before)
        return;
    py_set_class(p->param, before);
    Py_DECREF(before);
}

static inline PyObject *hook_get_grad(py_hooks *self, size_t index)
{
    hook_param *p = &self->params[index];
    PyTypeObject *before = hook_undress(p);
    PyObject *grad = PyObject_GetAttr(p->param, self->grad_name);

    hook_dress(p, before);
    return grad;
}

static inline int hook_set_grad(py_hooks *self, size_t index, PyObject *value)
{
    hook_param *p = &self->params[index];
    PyTypeObject *before = hook_undress(p);
    int failed = PyObject_SetAttr(p->param, self->grad_name, value);

    hook_dress(p, before);
    return failed;
}

/* ---- py_hook_table.c ------------------------------------------------------ */

/*
 * The memory of a gradient in the parameter's layout.  *keep becomes a new
 * reference to the tensor that owns it: the gradient, or a copy of it where it
 * lies otherwise.
 */
void *hook_gradient_memory(py_hooks *self, size_t index, PyObject *grad, PyObject **keep);

/* ---- py_hook.c ------------------------------------------------------------ */

extern PyType_Spec hook_call_spec, hook_round_end_spec;

/* The pre-hook, or with `after` the post-hook, of a parameter. */
hook_call *hook_call_new(py_hooks *self, size_t index, int after);
/* Forgets the engine's sums of a parameter, or of all (SIZE_MAX). May wait. */
int hook_discard(py_hooks *self, size_t index);
/* The same for those whose guard somebody removed, or put a gradient of his own in place of. */
int hook_discard_unguarded(py_hooks *self);
/* A round without a backward: hands over what is left in .grad. May wait. */
int hook_round_of_leftovers(py_hooks *self);

#endif
