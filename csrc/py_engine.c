/*
 * The Engine object: its lock, its life and its type.  Methods that bring values
 * in are in py_engine_params.c, steps and looking in in py_engine_state.c, units
 * in py_engine_units.c, times of work in py_engine_profile.c.
 *
 * Methods are those of zero_c.h, one to one; what is convenient for people is
 * built from them in Python.
 */
#include "py_engine.h"

#include "py_comm.h"

#include <structmember.h>

/* ---- lock ---------------------------------------------------------------- */

int py_engine_lock_local(py_engine *self)
{
    py_state *state = py_state_of((PyObject *)self);

    if (py_comm_check_handler(state))
        return -1;
    if (!self->engine) {
        PyErr_SetString(state->error, "the engine was not built");
        return -1;
    }
    if (!PyThread_acquire_lock(self->lock, NOWAIT_LOCK)) {
        Py_BEGIN_ALLOW_THREADS
        PyThread_acquire_lock(self->lock, WAIT_LOCK);
        Py_END_ALLOW_THREADS
    }
    return 0;
}

int py_engine_lock(py_engine *self)
{
    if (self->comm && py_comm_check_open(self->comm))
        return -1;
    return py_engine_lock_local(self);
}

void py_engine_unlock(py_engine *self)
{
    PyThread_release_lock(self->lock);
}

void py_engine_drop_released(py_engine *self)
{
    PyObject *type, *value, *trace, *owner;

    PyErr_Fetch(&type, &value, &trace);
    do {
        owner = NULL;
        if (py_engine_lock_local(self) == 0) {
            owner = zc_engine_take_released(self->engine);
            py_engine_unlock(self);
        }
        Py_XDECREF(owner);
    } while (owner);
    PyErr_Restore(type, value, trace);
}

int py_engine_end(py_engine *self, zc_status status)
{
    py_engine_unlock(self);
    if (status == ZC_OK)
        return 0;
    py_raise(py_state_of((PyObject *)self), status);
    return -1;
}

PyObject *py_engine_finish(py_engine *self, zc_status status)
{
    if (py_engine_end(self, status))
        return NULL;
    Py_RETURN_NONE;
}

/* ---- life ---------------------------------------------------------------- */

/* Makes room for the facts of `count` more parameters, before the engine has them. */
int py_engine_reserve(py_engine *self, size_t count)
{
    py_param_facts *params = PyMem_Realloc(self->params, (self->param_count + count + 1) * sizeof *params);

    if (!params) {
        PyErr_NoMemory();
        return -1;
    }
    self->params = params;
    return 0;
}

void py_engine_note(py_engine *self, const py_param_list *list)
{
    for (size_t i = 0; i < list->count; i++)
        self->params[self->param_count++] = (py_param_facts){list->params[i].elems, list->params[i].dtype};
}

static int parse_rule(const char *name, optim_rule *rule)
{
    for (int known = OPTIM_ADAMW; known <= OPTIM_SGD; known++) {
        if (strcmp(optim_name((optim_rule)known), name) == 0) {
            *rule = (optim_rule)known;
            return 0;
        }
    }
    PyErr_Format(PyExc_ValueError, "rule is '%s'; legal are 'adamw', 'adam', 'sgd'", name);
    return -1;
}

static PyObject *engine_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"comm", "params", "groups", "rule", "stage", "bucket_bytes", "ring_slots", "shared_params",
                            "mean", "threads", "units", "unit_slots", "prefetch", "fill_discarded", "overlap_gather", NULL};
    py_state *state = PyType_GetModuleState(type);
    zc_engine_config config = ZC_ENGINE_CONFIG;
    Py_ssize_t bucket_bytes = (Py_ssize_t)config.bucket_bytes, ring_slots = (Py_ssize_t)config.ring_slots;
    Py_ssize_t unit_slots = (Py_ssize_t)config.unit_slots, prefetch = (Py_ssize_t)config.prefetch;
    PyObject *comm_object, *params, *groups_object, *units_object = NULL;
    py_unit_list units = {NULL, NULL, 0};
    const char *rule = "adamw";
    py_param_list list = {NULL, NULL, NULL, 0};
    zc_options *groups = NULL;
    size_t group_count;
    zc_status status;

    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O!OO|$sinnppiOnnpp:Engine", names, state->comm_type, &comm_object,
                                     &params, &groups_object, &rule, &config.stage, &bucket_bytes, &ring_slots,
                                     &config.shared_params, &config.mean, &config.threads, &units_object, &unit_slots,
                                     &prefetch, &config.fill_discarded, &config.overlap_gather)
        || parse_rule(rule, &config.rule))
        return NULL;
    if (bucket_bytes < 0 || ring_slots < 0) {
        PyErr_Format(PyExc_ValueError, "bucket_bytes is %zd (legal: 0, chosen by size, or more) and ring_slots %zd "
                                       "(legal: 0, chosen by place, or more)", bucket_bytes, ring_slots);
        return NULL;
    }
    config.bucket_bytes = (size_t)bucket_bytes;
    config.ring_slots = (size_t)ring_slots;
    if (unit_slots < 1 || prefetch < 0) {
        PyErr_Format(PyExc_ValueError, "unit_slots is %zd (legal: 1 or more) and prefetch %zd (legal: 0 or more)",
                     unit_slots, prefetch);
        return NULL;
    }
    config.unit_slots = (size_t)unit_slots;
    config.prefetch = (size_t)prefetch;
    py_engine *self = (py_engine *)type->tp_alloc(type, 0);
    if (!self)
        return NULL;
    self->gpu = -1;
    if (!(self->lock = PyThread_allocate_lock())) {
        PyErr_NoMemory();
        goto fail;
    }
    if (units_object && py_unit_list_read(units_object, &units))
        goto fail;
    config.units = units.units;
    config.unit_count = units.count;
    if (py_param_list_read(params, 0, &list) || !(groups = py_engine_groups(groups_object, &group_count))
        || py_engine_reserve(self, list.count))
        goto fail;
    zc_comm *comm = py_comm_enter(comm_object);
    if (!comm)
        goto fail;
    self->comm = Py_NewRef(comm_object);
    self->gpu = zc_comm_gpu(comm);
    Py_BEGIN_ALLOW_THREADS
    status = zc_engine_create(comm, &config, list.params, list.count, groups, group_count, &self->engine);
    Py_END_ALLOW_THREADS
    py_comm_leave(comm_object); /* what the engine has of it stays valid after close() */
    if (status != ZC_OK) {
        py_raise(state, status);
        goto fail;
    }
    py_engine_note(self, &list);
    if (config.overlap_gather && py_comm_before_close(comm_object, (PyObject *)self))
        goto fail;
    PyMem_Free(groups);
    py_param_list_free(&list);
    py_unit_list_free(&units);
    return (PyObject *)self;
fail:
    PyMem_Free(groups);
    py_param_list_free(&list);
    py_unit_list_free(&units);
    Py_DECREF(self);
    return NULL;
}

/* Gradients that the engine holds may be read by a reduction until it is gone; then their owners go. */
static void drop_engine(py_engine *self)
{
    PyObject *owner, *owners = PyList_New(0);

    if (self->engine)
        zc_engine_drop_held(self->engine);
    while (self->engine && owners && (owner = zc_engine_take_released(self->engine))) {
        if (PyList_Append(owners, owner) < 0)
            PyErr_Clear(); /* no memory: the gradient goes a moment early, or not at all */
        Py_DECREF(owner);
    }
    Py_BEGIN_ALLOW_THREADS /* it may wait for peers, which may be threads of this process */
    zc_engine_destroy(self->engine);
    Py_END_ALLOW_THREADS
    Py_XDECREF(owners);
}

static void engine_dealloc(py_engine *self)
{
    PyTypeObject *type = Py_TYPE(self);

    if (self->weak_references)
        PyObject_ClearWeakRefs((PyObject *)self);
    drop_engine(self);
    Py_XDECREF(self->comm);
    if (self->lock)
        PyThread_free_lock(self->lock);
    PyMem_Free(self->params);
    type->tp_free(self);
    Py_DECREF(type);
}

/* ---- the type ------------------------------------------------------------ */

static PyObject *get_rounds(py_engine *self, void *unused)
{
    (void)unused;
    if (py_engine_lock_local(self))
        return NULL;
    uint64_t rounds = zc_engine_rounds(self->engine);
    py_engine_unlock(self);
    return PyLong_FromUnsignedLongLong(rounds);
}

static PyObject *get_round_open(py_engine *self, void *unused)
{
    (void)unused;
    if (py_engine_lock_local(self))
        return NULL;
    int open = zc_engine_round_open(self->engine);
    py_engine_unlock(self);
    return PyBool_FromLong(open);
}

static PyObject *get_units_share(py_engine *self, void *unused)
{
    (void)unused;
    if (py_engine_lock_local(self))
        return NULL;
    int share = zc_engine_units_share(self->engine);
    py_engine_unlock(self);
    return PyBool_FromLong(share);
}

static PyObject *get_param_count(py_engine *self, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(self->param_count);
}

static PyObject *get_comm(py_engine *self, void *unused)
{
    (void)unused;
    return Py_NewRef(self->comm);
}

static PyObject *get_capturing(py_engine *self, void *unused)
{
    int capturing = 0;

    (void)unused;
    if (py_engine_lock_local(self) || py_engine_end(self, zc_engine_capturing(self->engine, &capturing)))
        return NULL;
    return PyBool_FromLong(capturing);
}

static PyObject *get_captured(py_engine *self, void *unused)
{
    (void)unused;
    if (py_engine_lock_local(self))
        return NULL;
    int captured = zc_engine_captured(self->engine);
    py_engine_unlock(self);
    return PyBool_FromLong(captured);
}

PyDoc_STRVAR(add_params_doc,
             "add_params(params, groups)\n--\n\nMore parameters, numbered on; groups is the new whole list. "
             "All ranks must call it.");
PyDoc_STRVAR(param_doc,
             "param(i)\n--\n\nThe parameter itself: a flat array over the engine's memory, in storage order "
             "(bfloat16: as uint16; on a GPU an object with __dlpack__).");
PyDoc_STRVAR(param_dlpack_doc,
             "param_dlpack(i, shape, strides)\n--\n\nThe same for other libraries: an object with "
             "__dlpack__; strides in elements.");
PyDoc_STRVAR(refresh_doc,
             "refresh(i=None)\n--\n\nAfter parameter i (or all) was written from outside: its master follows.");
PyDoc_STRVAR(add_grad_doc,
             "add_grad(i, array)\n--\n\nThe gradient of parameter i in the current round, in storage order.");
PyDoc_STRVAR(end_round_doc,
             "end_round(late=())\n--\n\nEnds the round; all ranks must call it. late: (i, array) pairs, second "
             "gradients of parameters that had one.");
PyDoc_STRVAR(step_doc,
             "step(groups, *, loss_scale=1.0, max_norm=0.0, want_norm=False, skip_nonfinite=False)\n--\n\n"
             "Updates all parameters that had a gradient on some rank; how many backwards they are the sum of.");
PyDoc_STRVAR(wait_params_doc,
             "wait_params(indices=None)\n--\n\nWith overlap_gather: these parameters, or all, are what the last step made "
             "of them.");
PyDoc_STRVAR(clip_doc,
             "clip(max_norm, norm_type=2.0, loss_scale=1.0)\n--\n\nThe norm of the averaged gradient, which the next "
             "step scales to max_norm.");
PyDoc_STRVAR(state_doc,
             "state(i, role)\n--\n\nThis rank's part of an array of parameter i: the elements it owns, in order; None if "
             "there is none. A bfloat16 parameter's master is its 16-bit remainder. role: 'grad', 'exp_avg', "
             "'momentum_buffer', 'exp_avg_sq', 'max_exp_avg_sq', 'master'.");
PyDoc_STRVAR(read_doc,
             "read(i, role, scale=1.0)\n--\n\nThe whole array, flat, on every rank; all ranks must call it.");
PyDoc_STRVAR(acquire_doc,
             "acquire(unit, backward)\n--\n\nStage 3: the unit's parameters are at their addresses until release(); "
             "backward: in which direction units follow one another.");
PyDoc_STRVAR(store_doc,
             "store(i, array)\n--\n\nStage 3: parameter i becomes rank 0's array on every rank; all ranks must call it.");
PyDoc_STRVAR(discard_doc,
             "discard(i=None)\n--\n\nForgets the gradient of parameter i, or of all. All ranks must do the same.");

PyDoc_STRVAR(profile_doc,
             "profile(capacity)\n--\n\nFrom now on this rank's work is noted, up to `capacity` pieces of it at a time; "
             "0: no more.");
PyDoc_STRVAR(take_work_doc,
             "take_work()\n--\n\n([(kind, number, peer, bytes, begin_ns, end_ns), ...], lost): what was noted, and how much "
             "was not for lack of room, since the last call. kind: 'reduce', 'gather', 'update'; number: of the bucket, or of "
             "the unit that was gathered at stage 3; peer: whose slice was gathered; times of CLOCK_MONOTONIC.");

static PyMethodDef engine_methods[] = {
    {"add_params", (PyCFunction)py_engine_add_params, METH_VARARGS, add_params_doc},
    {"load_param", (PyCFunction)py_engine_load_param, METH_VARARGS,
     "load_param(i, array)\n--\n\nThe initial value of parameter i, in storage order; at stage 3 all ranks must call it, "
     "rank 0's counts, and others may pass None."},
    {"publish", (PyCFunction)py_engine_publish, METH_NOARGS,
     "publish()\n--\n\nEvery rank's parameters become rank 0's; all ranks must call it."},
    {"param", (PyCFunction)py_engine_param, METH_O, param_doc},
    {"param_dlpack", (PyCFunction)py_engine_param_dlpack, METH_VARARGS, param_dlpack_doc},
    {"refresh", (PyCFunction)py_engine_refresh, METH_VARARGS, refresh_doc},
    {"add_grad", (PyCFunction)py_engine_add_grad, METH_VARARGS, add_grad_doc},
    {"has_grad", (PyCFunction)py_engine_has_grad, METH_O,
     "has_grad(i)\n--\n\nWhether parameter i had a gradient in the open round."},
    {"end_round", (PyCFunction)py_engine_end_round, METH_VARARGS, end_round_doc},
    {"abort_round", (PyCFunction)py_engine_abort_round, METH_NOARGS,
     "abort_round()\n--\n\nThe backward of the open round raised."},
    {"discard", (PyCFunction)py_engine_discard, METH_VARARGS, discard_doc},
    {"step", (PyCFunction)(void (*)(void))py_engine_step, METH_VARARGS | METH_KEYWORDS, step_doc},
    {"last_step", (PyCFunction)py_engine_last_step, METH_NOARGS,
     "last_step()\n--\n\n(norm, skipped, nonfinite) of the last step; on a GPU the first call after it waits for it."},
    {"wait_params", (PyCFunction)py_engine_wait_params, METH_VARARGS, wait_params_doc},
    {"clip", (PyCFunction)(void (*)(void))py_engine_clip, METH_VARARGS | METH_KEYWORDS, clip_doc},
    {"state", (PyCFunction)py_engine_state, METH_VARARGS, state_doc},
    {"read", (PyCFunction)py_engine_read, METH_VARARGS, read_doc},
    {"write", (PyCFunction)py_engine_write, METH_VARARGS,
     "write(i, role, array)\n--\n\nThis rank's part is taken from a whole array as read() gives it."},
    {"step_count", (PyCFunction)py_engine_step_count, METH_O, "step_count(i)\n--\n\nSteps parameter i took part in."},
    {"has_momentum", (PyCFunction)py_engine_has_momentum, METH_O,
     "has_momentum(i)\n--\n\nWhether sgd's buffer of parameter i holds a value."},
    {"set_step_count", (PyCFunction)py_engine_set_step_count, METH_VARARGS,
     "set_step_count(i, steps, has_momentum=False)\n--\n\nFor loading."},
    {"memory", (PyCFunction)py_engine_memory, METH_NOARGS, "memory()\n--\n\nBytes this rank holds."},
    {"traffic", (PyCFunction)py_engine_traffic, METH_NOARGS, "traffic()\n--\n\nWhat was sent since the last call."},
    {"plan", (PyCFunction)py_engine_plan, METH_NOARGS, "plan()\n--\n\nSpaces, buckets and padding."},
    {"profile", (PyCFunction)py_engine_profile, METH_O, profile_doc},
    {"take_work", (PyCFunction)py_engine_take_work, METH_NOARGS, take_work_doc},
    {"sync", (PyCFunction)py_engine_sync, METH_VARARGS,
     "sync(what='sync')\n--\n\nReturns when all ranks have come here."},
    {"parts", (PyCFunction)py_engine_parts, METH_O,
     "parts(i)\n--\n\n[(begin, end), ...]: the elements of parameter i that this rank saves, and takes back."},
    {"read_part", (PyCFunction)py_engine_read_part, METH_VARARGS,
     "read_part(i, role, begin, end, buffer)\n--\n\nElements of one of the parts to a writable buffer."},
    {"write_parts", (PyCFunction)py_engine_write_parts, METH_VARARGS,
     "write_parts(role, lines, buffer)\n--\n\nElements to their places: lines of four 64-bit integers, (i, begin, end, first "
     "byte in the buffer). Weights of this rank's parts; of state, what this rank keeps."},
    {"prepare", (PyCFunction)py_engine_prepare, METH_O,
     "prepare(groups)\n--\n\nState that these options call for exists from now on."},
    {"spread", (PyCFunction)py_engine_spread, METH_NOARGS,
     "spread()\n--\n\nAll ranks have written the weights of their parts: they come together. Collective."},
    {"acquire", (PyCFunction)py_engine_acquire, METH_VARARGS, acquire_doc},
    {"release", (PyCFunction)py_engine_release, METH_O, "release(unit)\n--\n\nEnds one acquire()."},
    {"drain", (PyCFunction)py_engine_drain, METH_NOARGS,
     "drain()\n--\n\nWaits a moment for this rank's reductions, so that the gradients they read are released."},
    {"unit_user", (PyCFunction)py_engine_unit_user, METH_O,
     "unit_user(unit)\n--\n\nThe acquired unit that occupies its memory, perhaps itself; or None."},
    {"unit_generation", (PyCFunction)py_engine_unit_generation, METH_O,
     "unit_generation(unit)\n--\n\n0: not in memory; otherwise another number each time it is gathered."},
    {"unit_range", (PyCFunction)py_engine_unit_range, METH_O,
     "unit_range(unit)\n--\n\n(address, bytes) of its parameters."},
    {"fetch", (PyCFunction)py_engine_fetch, METH_O,
     "fetch(i)\n--\n\nA flat copy of parameter i (bfloat16: as uint16); all ranks must call it."},
    {"store", (PyCFunction)py_engine_store, METH_VARARGS, store_doc},
    {"use_stream", (PyCFunction)py_engine_use_stream, METH_O,
     "use_stream(stream)\n--\n\nOn a GPU: the stream on which the engine works from now on, a cudaStream_t as an integer."},
    {"replay_options", (PyCFunction)py_engine_replay_options, METH_O,
     "replay_options(groups)\n--\n\nReplays of captured steps use these options from the stream's next work on."},
    {"replayed_steps", (PyCFunction)py_engine_replayed_steps, METH_NOARGS,
     "replayed_steps()\n--\n\nHow many steps replays have made that were not skipped; waits for them."},
    {"load_from_device", (PyCFunction)py_engine_load_from_device, METH_VARARGS,
     "load_from_device(i, array)\n--\n\nAs load_param, from a GpuArray."},
    {"copy_param", (PyCFunction)py_engine_copy_param, METH_VARARGS,
     "copy_param(i, array)\n--\n\nOn a GPU: writes parameter i to a GpuArray, in the order of the engine's stream."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef engine_getset[] = {
    {"rounds", (getter)get_rounds, NULL, "Backwards summed since the last step.", NULL},
    {"round_open", (getter)get_round_open, NULL, "Whether gradients came since the last end_round.", NULL},
    {"units_share", (getter)get_units_share, NULL,
     "Stage 3: whether units share memory; if not, the device cannot give memory several addresses.", NULL},
    {"capturing", (getter)get_capturing, NULL, "Whether the engine's stream is captured into a CUDA graph now.", NULL},
    {"captured", (getter)get_captured, NULL, "Whether a step ever was.", NULL},
    {"param_count", (getter)get_param_count, NULL, "Number of parameters.", NULL},
    {"comm", (getter)get_comm, NULL, "The Communicator.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef engine_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(py_engine, weak_references), READONLY, NULL},
    {"gpu", T_INT, offsetof(py_engine, gpu), READONLY, "Number of the GPU it is on; -1: the CPU."},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(engine_doc,
             "Engine(comm, params, groups, *, rule='adamw', stage=2, bucket_bytes=0, ring_slots=0, "
             "shared_params=False, mean=True, threads=0, units=(), unit_slots=2, prefetch=1, fill_discarded=False, "
             "overlap_gather=False)\n--\n\n"
             "params: (name, elems, dtype, group, initial array or None), at stage 3 also (..., unit, frozen); groups: dicts "
             "of options;\nunits, of stage 3: (name, level, resident). All ranks must call it.");

static PyType_Slot engine_slots[] = {
    {Py_tp_new, engine_new},         {Py_tp_dealloc, engine_dealloc}, {Py_tp_methods, engine_methods},
    {Py_tp_getset, engine_getset},   {Py_tp_members, engine_members}, {Py_tp_doc, (void *)engine_doc},
    {0, NULL},
};

static PyType_Spec engine_spec = {
    .name = "zero_c._core.Engine",
    .basicsize = sizeof(py_engine),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = engine_slots,
};

int py_engine_add(PyObject *module)
{
    py_state *state = PyModule_GetState(module);

    state->engine_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &engine_spec, NULL);
    return state->engine_type ? PyModule_AddType(module, state->engine_type) : -1;
}
