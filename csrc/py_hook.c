/*
 * Between autograd and the engine: the callables that torch runs for each
 * parameter in backward, and the rounds that they make.  Nothing here needs
 * torch's headers: `.grad` is an attribute, and tensors are read as
 * py_hook_table.c says.
 *
 * A round is one outermost backward.  What happens to `.grad` of a parameter:
 *
 *   before the first round   None, or what the user put there
 *   pre-hook                 (a gradient is about to be added) the guard goes away
 *   post-hook                the gradient is there: handed to the engine, cleared;
 *                            inside no_sync(), and when the parameter had one in this
 *                            round already ("late"), left where autograd adds it up
 *   end of the round         what is left is handed over too; then every parameter
 *                            gets its guard: NaN, of the right shape, one element
 *                            expanded, so that whoever reads it notices
 *   step, zero_grad          None
 *
 * A guard that is gone although no pre-hook took it was removed by someone else
 * (model.zero_grad()): the parameter's sums are discarded, as torch would.  That
 * is looked for before anything is added to the sums: at the start of a round
 * and in settle().
 *
 * The end of a round.  The first hook of a round queues a RoundEnd on the graph
 * task it runs in.  When it is called with no autograd node current, the task is
 * the outermost one.  Otherwise the task was nested in that node's backward
 * (reentrant checkpointing), and a RoundEnd is hung on the node, which runs inside
 * the outer task and queues the next one there.  A backward that raises destroys
 * its callbacks without calling them: a RoundEnd that dies unused aborts its round.
 *
 * Ownership.  A parameter owns its two callables, invisibly to the garbage
 * collector, so they only borrow the Hooks, which owns the parameters and takes
 * itself out of the callables when it goes.
 */
#include "py_hook.h"

#include <stddef.h>
#include <structmember.h>

typedef struct round_end {
    PyObject_HEAD
    struct py_hooks *hooks; /* NULL once called */
    uint64_t round;
    int on_node; /* the post-hook of the node that a nested task ran in */
} round_end;

/* ---- handing over -------------------------------------------------------- */

static PyObject *raise_status(py_hooks *self, zc_status status)
{
    return py_raise(py_state_of((PyObject *)self), status);
}

/* On a GPU the engine works where torch does; on the CPU there are no streams. */
static int current_stream(py_hooks *self, void **stream)
{
    int gpu = self->engine->gpu;
    return gpu < 0 ? 0 : py_tensor_stream(&self->reader, self->stream_of, gpu, stream);
}

/* May wait for a peer, without the GIL. */
static int offer(py_hooks *self, size_t index, PyObject *grad)
{
    PyObject *keep;
    int outcome = ZC_GRAD_TAKEN;
    zc_status status;
    void *data = hook_gradient_memory(self, index, grad, &keep), *stream = NULL;

    if (!data)
        return -1;
    if (current_stream(self, &stream) < 0 || py_engine_lock(self->engine) < 0) {
        Py_DECREF(keep);
        return -1;
    }
    Py_BEGIN_ALLOW_THREADS
    status = zc_engine_use_stream(self->engine->engine, stream);
    if (status == ZC_OK)
        status = zc_engine_offer_grad(self->engine->engine, index, data, keep, &outcome);
    Py_END_ALLOW_THREADS
    py_engine_unlock(self->engine);
    if (status == ZC_OK && outcome == ZC_GRAD_HELD)
        self->held = 1; /* the engine has the reference now */
    else
        Py_DECREF(keep);
    if (status != ZC_OK) {
        raise_status(self, status);
        return -1;
    }
    if (self->held)
        py_engine_drop_released(self->engine);
    self->params[index].round = self->round;
    self->offered = 1;
    return 0;
}

/* After a backward that raised, this waits for the other ranks to close its round. */
int hook_discard(py_hooks *self, size_t index)
{
    zc_status status;

    if (py_engine_lock(self->engine) < 0)
        return -1;
    Py_BEGIN_ALLOW_THREADS
    status = zc_engine_discard(self->engine->engine, index);
    Py_END_ALLOW_THREADS
    py_engine_unlock(self->engine);
    if (status != ZC_OK) {
        raise_status(self, status);
        return -1;
    }
    return 0;
}

int hook_discard_unguarded(py_hooks *self)
{
    size_t summed = 0, gone = 0;

    for (size_t i = 0; i < self->count; i++) {
        hook_param *p = &self->params[i];
        if (!p->summed)
            continue;
        PyObject *grad = hook_get_grad(self, i);
        if (!grad)
            return -1;
        summed++;
        if (grad == Py_None || (grad != p->guard && !p->deferred)) {
            p->summed = 2;
            gone++;
        }
        Py_DECREF(grad);
    }
    if (!gone)
        return 0;
    if (gone == summed && hook_discard(self, SIZE_MAX) < 0)
        return -1;
    for (size_t i = 0; i < self->count; i++) {
        if (self->params[i].summed != 2)
            continue;
        if (gone != summed && hook_discard(self, i) < 0)
            return -1;
        self->params[i].summed = 0;
    }
    return 0;
}

static int queue_end(py_hooks *self);

static int start_round(py_hooks *self)
{
    if (hook_discard_unguarded(self) < 0)
        return -1;
    self->round++;
    self->offered = 0;
    if (queue_end(self) < 0)
        return -1;
    self->live = 1;
    return 0;
}

static int restore_taken_guards(py_hooks *self)
{
    for (size_t i = 0; i < self->count; i++) {
        hook_param *p = &self->params[i];
        if (!p->taken)
            continue;
        p->taken = 0;
        PyObject *grad = hook_get_grad(self, i);
        if (!grad)
            return -1;
        int failed = grad == Py_None && p->summed ? hook_set_grad(self, i, p->guard) : 0;
        Py_DECREF(grad);
        if (failed)
            return -1;
    }
    return 0;
}

/*
 * The local part of an aborted round: its gradients are dropped, also those in
 * .grad, and the guards of earlier rounds' sums come back.  Keeps the exception
 * that is on its way.
 */
static void abort_round(py_hooks *self)
{
    PyObject *type, *value, *traceback;

    PyErr_Fetch(&type, &value, &traceback);
    self->live = 0;
    if (self->offered && self->engine->engine && py_engine_lock(self->engine) == 0) {
        zc_engine_abort_round(self->engine->engine);
        py_engine_unlock(self->engine);
    }
    for (size_t i = 0; i < self->count && !PyErr_Occurred(); i++) {
        hook_param *p = &self->params[i];
        if (p->round == self->round && self->offered) {
            p->round = 0;
            hook_set_grad(self, i, Py_None);
        }
    }
    if (!PyErr_Occurred())
        restore_taken_guards(self);
    self->offered = 0;
    if (PyErr_Occurred())
        PyErr_WriteUnraisable((PyObject *)self);
    PyErr_Restore(type, value, traceback);
}

/*
 * Hands over what is left in `.grad`, ends the round with all ranks and sets the
 * guards.  Waits for peers, without the GIL.
 */
static int finish_round(py_hooks *self)
{
    zc_late_grad *late = NULL;
    PyObject **late_keep = NULL;
    size_t late_count = 0, late_room = 0;
    void *stream = NULL;
    zc_status status;
    int failed = -1;

    for (size_t i = 0; i < self->count; i++) {
        hook_param *p = &self->params[i];
        PyObject *grad = hook_get_grad(self, i);
        if (!grad)
            goto done;
        if (grad == Py_None || grad == p->guard) {
            Py_DECREF(grad);
            continue;
        }
        if (p->round != self->round) {
            int bad = offer(self, i, grad) < 0 || hook_set_grad(self, i, Py_None) < 0;
            Py_DECREF(grad);
            if (bad)
                goto done;
            continue;
        }
        if (late_count == late_room) {
            size_t room = late_room ? 2 * late_room : 16;
            void *bigger = PyMem_Realloc(late, room * sizeof *late);
            void *bigger_keep = bigger ? PyMem_Realloc(late_keep, room * sizeof *late_keep) : NULL;
            late = bigger ? bigger : late;
            late_keep = bigger_keep ? bigger_keep : late_keep;
            if (!bigger_keep) {
                Py_DECREF(grad);
                PyErr_NoMemory();
                goto done;
            }
            late_room = room;
        }
        late[late_count].index = i;
        late[late_count].grad = hook_gradient_memory(self, i, grad, &late_keep[late_count]);
        Py_DECREF(grad);
        if (!late[late_count].grad)
            goto done;
        late_count++;
    }
    if (current_stream(self, &stream) < 0 || py_engine_lock(self->engine) < 0)
        goto done;
    self->live = 0; /* from here on it is the engine's affair how the round ends */
    Py_BEGIN_ALLOW_THREADS
    status = zc_engine_use_stream(self->engine->engine, stream);
    if (status == ZC_OK)
        status = zc_engine_end_round(self->engine->engine, late, late_count);
    Py_END_ALLOW_THREADS
    py_engine_unlock(self->engine);
    self->offered = 0;
    if (status != ZC_OK) {
        raise_status(self, status);
        goto done;
    }
    if (self->held) {
        py_engine_drop_released(self->engine);
        self->held = 0;
    }
    for (size_t i = 0; i < self->count; i++) {
        hook_param *p = &self->params[i];
        p->summed = 1;
        p->taken = p->deferred = 0;
        if (hook_set_grad(self, i, p->guard) < 0)
            goto done;
    }
    failed = 0;
done:
    if (self->live)
        abort_round(self);
    for (size_t i = 0; i < late_count; i++)
        Py_DECREF(late_keep[i]);
    PyMem_Free(late);
    PyMem_Free(late_keep);
    return failed;
}

int hook_round_of_leftovers(py_hooks *self)
{
    self->round++;
    self->offered = 0;
    self->live = 1;
    return finish_round(self);
}

/* ---- what torch calls ---------------------------------------------------- */

/* A gradient for the parameter was computed; it is about to be added to .grad, or returned by autograd.grad. */
static PyObject *pre_hook(PyObject *object, PyObject *const *arguments, size_t flags, PyObject *names)
{
    hook_call *hook = (hook_call *)object;
    py_hooks *self = hook->hooks;
    (void)arguments, (void)flags, (void)names;

    if (!self)
        Py_RETURN_NONE;
    Py_INCREF(self);
    int failed = -1;
    hook_param *p = &self->params[hook->index];
    PyObject *grad = hook_get_grad(self, hook->index);
    if (!grad)
        goto done;
    if (!self->live && p->summed && (grad == Py_None || grad == p->guard) && start_round(self) < 0)
        goto done;
    if (grad == p->guard) {
        p->taken = 1;
        if (hook_set_grad(self, hook->index, Py_None) < 0)
            goto done;
    }
    failed = 0;
done:
    Py_XDECREF(grad);
    Py_DECREF(self);
    return failed ? NULL : Py_NewRef(Py_None);
}

/* The gradient has been added to .grad. */
static PyObject *post_hook(PyObject *object, PyObject *const *arguments, size_t flags, PyObject *names)
{
    hook_call *hook = (hook_call *)object;
    py_hooks *self = hook->hooks;
    (void)arguments, (void)flags, (void)names;

    if (!self)
        Py_RETURN_NONE;
    if (self->deferring) {
        self->params[hook->index].deferred = 1;
        Py_RETURN_NONE;
    }
    Py_INCREF(self);
    int failed = -1;
    size_t index = hook->index;
    PyObject *grad = NULL;
    if (!self->live && start_round(self) < 0)
        goto done;
    if (self->params[index].round != self->round) {
        grad = hook_get_grad(self, index);
        if (!grad)
            goto done;
        if (grad != Py_None && grad != self->params[index].guard &&
            (hook_set_grad(self, index, Py_None) < 0 || offer(self, index, grad) < 0))
            goto done;
    }
    failed = 0;
done:
    Py_XDECREF(grad);
    Py_DECREF(self);
    return failed ? NULL : Py_NewRef(Py_None);
}

static round_end *new_round_end(py_hooks *self, int on_node)
{
    round_end *end = PyObject_New(round_end, self->round_end_type);
    if (end) {
        end->hooks = (py_hooks *)Py_NewRef((PyObject *)self);
        end->round = self->round;
        end->on_node = on_node;
    }
    return end;
}

static int queue_end(py_hooks *self)
{
    round_end *end = new_round_end(self, 0);
    if (!end)
        return -1;
    PyObject *answer = PyObject_CallOneArg(self->queue_callback, (PyObject *)end);
    Py_DECREF(end);
    Py_XDECREF(answer);
    return answer ? 0 : -1;
}

/* Asks the node in whose backward the finished task ran to tell when it is done. */
static int wait_for_node(py_hooks *self, PyObject *node)
{
    round_end *end = new_round_end(self, 1);
    if (!end)
        return -1;
    PyObject *answer = PyObject_CallMethod(node, "register_hook", "O", (PyObject *)end);
    Py_DECREF(end);
    Py_XDECREF(answer);
    return answer ? 0 : -1;
}

static PyObject *round_end_call(PyObject *object, PyObject *arguments, PyObject *names)
{
    round_end *end = (round_end *)object;
    py_hooks *self = end->hooks;
    (void)arguments, (void)names;

    end->hooks = NULL; /* a retained graph may call a node's hook again */
    if (!self)
        Py_RETURN_NONE;
    int failed = -1;
    PyObject *node = NULL;
    if (!self->live || end->round != self->round) {
        failed = 0;
    } else if (end->on_node) {
        failed = queue_end(self);
    } else {
        node = PyObject_CallNoArgs(self->current_node);
        if (!node)
            goto done;
        if (node != Py_None) {
            failed = wait_for_node(self, node);
        } else if (self->offered) {
            failed = finish_round(self);
        } else {
            self->live = 0;
            failed = restore_taken_guards(self);
        }
    }
done:
    if (failed && self->live && end->round == self->round)
        abort_round(self);
    Py_XDECREF(node);
    Py_DECREF(self);
    return failed ? NULL : Py_NewRef(Py_None);
}

static void round_end_dealloc(PyObject *object)
{
    round_end *end = (round_end *)object;
    PyTypeObject *type = Py_TYPE(object);
    py_hooks *self = end->hooks;

    if (self) {
        if (self->live && end->round == self->round)
            abort_round(self);
        Py_DECREF(self);
    }
    PyObject_Free(object);
    Py_DECREF(type);
}

static void call_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyObject_Free(object);
    Py_DECREF(type);
}

static PyObject *call_active(PyObject *object, void *context)
{
    (void)context;
    return PyBool_FromLong(((hook_call *)object)->hooks != NULL);
}

hook_call *hook_call_new(py_hooks *self, size_t index, int after)
{
    hook_call *hook = PyObject_New(hook_call, self->call_type);
    if (hook) {
        hook->call = after ? post_hook : pre_hook;
        hook->hooks = self;
        hook->index = index;
    }
    return hook;
}

static PyMemberDef call_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(hook_call, call), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef call_getset[] = {
    {"active", call_active, NULL, "whether the optimizer that registered it is there", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot call_slots[] = {
    {Py_tp_doc, "Called by autograd around the accumulation of one parameter's gradient."},
    {Py_tp_dealloc, call_dealloc},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_members, call_members},
    {Py_tp_getset, call_getset},
    {0, NULL},
};

PyType_Spec hook_call_spec = {
    .name = "zero_c._core.GradHook",
    .basicsize = sizeof(hook_call),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = call_slots,
};

static PyType_Slot round_end_slots[] = {
    {Py_tp_doc, "Called by autograd when a graph task, or the node it ran in, is done."},
    {Py_tp_dealloc, round_end_dealloc},
    {Py_tp_call, round_end_call},
    {0, NULL},
};

PyType_Spec hook_round_end_spec = {
    .name = "zero_c._core.RoundEnd",
    .basicsize = sizeof(round_end),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = round_end_slots,
};
