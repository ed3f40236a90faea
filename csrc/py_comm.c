/*
 * The Communicator object: collectives on the arrays of other libraries.
 *
 * Core calls run without the GIL.  While one waits it calls back at least every
 * 100 ms; on the main thread that is where Ctrl-C and other signal handlers run.
 * A handler that raises ends the wait, and its exception comes out of the call.
 */
#include "py_comm.h"

#include <structmember.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef struct py_comm {
    PyObject_HEAD
    zc_comm *comm;      /* NULL: not opened, or closed and unused */
    size_t local_rank;
    int closed;         /* close() was called */
    long users;         /* calls inside it; guarded by the GIL */
    PyObject *engines;  /* list of weak references: what to wait for before it closes; NULL: nothing */
    PyObject *weak_references;
} py_comm;

/* This thread runs signal handlers inside a wait of the core. */
static _Thread_local int inside_handler;

int py_comm_interrupted(void *context)
{
    int result = 0;

    (void)context;
    if (syscall(SYS_gettid) != getpid())
        return 0; /* Python runs handlers on the main thread only; do not fight for the GIL elsewhere */
    PyGILState_STATE gil = PyGILState_Ensure();
    inside_handler = 1;
    result = PyErr_CheckSignals();
    inside_handler = 0;
    PyGILState_Release(gil);
    return result;
}

/* ---- life ---------------------------------------------------------------- */

int py_comm_check_handler(py_state *state)
{
    if (!inside_handler)
        return 0;
    PyErr_SetString(state->error, "called from a signal handler while this thread waits for other ranks; set a flag "
                                  "there and act on it after the call");
    return -1;
}

int py_comm_check_open(PyObject *object)
{
    py_comm *self = (py_comm *)object;

    if (self->comm && !self->closed)
        return 0;
    PyErr_SetString(py_state_of(object)->error, "the communicator is closed; make a new one with zero_c.init()");
    return -1;
}

zc_comm *py_comm_enter(PyObject *object)
{
    py_comm *self = (py_comm *)object;

    if (py_comm_check_handler(py_state_of(object)) || py_comm_check_open(object))
        return NULL;
    self->users++;
    return self->comm;
}

/* Without the GIL: rank 0 of several hosts waits a moment for the others. */
static void close_core(py_comm *self)
{
    zc_comm *comm = self->comm;

    self->comm = NULL;
    Py_BEGIN_ALLOW_THREADS
    zc_comm_close(comm);
    Py_END_ALLOW_THREADS
}

static void close_if_unused(py_comm *self)
{
    if (self->closed && !self->users)
        close_core(self);
}

void py_comm_leave(PyObject *object)
{
    ((py_comm *)object)->users--;
    close_if_unused((py_comm *)object);
}

PyObject *py_comm_wrap(PyTypeObject *type, zc_comm *comm, size_t local_rank)
{
    py_comm *self = (py_comm *)type->tp_alloc(type, 0);

    if (!self) {
        zc_comm_close(comm);
        return NULL;
    }
    self->comm = comm;
    self->local_rank = local_rank;
    return (PyObject *)self;
}

static void comm_dealloc(py_comm *self)
{
    PyTypeObject *type = Py_TYPE(self);

    if (self->weak_references)
        PyObject_ClearWeakRefs((PyObject *)self);
    close_core(self);
    Py_XDECREF(self->engines);
    type->tp_free(self);
    Py_DECREF(type);
}

PyDoc_STRVAR(close_doc, "close()\n--\n\nLeaves the group; ranks that wait for this one get PeerLost. Again: nothing. "
                        "Memory of optimizers on it stays valid as long as they live.");

int py_comm_before_close(PyObject *object, PyObject *engine)
{
    py_comm *self = (py_comm *)object;
    PyObject *reference = PyWeakref_NewRef(engine, NULL);
    int failed = !reference || (!self->engines && !(self->engines = PyList_New(0)))
                 || PyList_Append(self->engines, reference) < 0;

    Py_XDECREF(reference);
    return failed ? -1 : 0;
}

/* What cannot be finished, because the group has failed, is not: 0, or -1 with an exception of a signal handler. */
static int finish_engines(py_comm *self)
{
    PyObject *error = py_state_of((PyObject *)self)->error, *engines = self->engines;
    int failed = 0;

    self->engines = NULL;
    for (Py_ssize_t k = 0; engines && !failed && k < PyList_GET_SIZE(engines); k++) {
        PyObject *engine = PyObject_CallNoArgs(PyList_GET_ITEM(engines, k)), *done = NULL;
        if (engine && engine != Py_None && !(done = PyObject_CallMethod(engine, "wait_params", NULL))) {
            failed = !PyErr_ExceptionMatches(error);
            if (!failed)
                PyErr_Clear();
        }
        Py_XDECREF(done);
        Py_XDECREF(engine);
    }
    Py_XDECREF(engines);
    return failed ? -1 : 0;
}

static PyObject *comm_close_method(py_comm *self, PyObject *unused)
{
    (void)unused;
    int failed = self->closed ? 0 : finish_engines(self);
    self->closed = 1;
    close_if_unused(self);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *comm_enter(PyObject *self, PyObject *unused)
{
    (void)unused;
    return py_comm_check_open(self) ? NULL : Py_NewRef(self);
}

static PyObject *comm_exit(py_comm *self, PyObject *args)
{
    (void)args;
    return comm_close_method(self, NULL);
}

/* ---- collectives --------------------------------------------------------- */

#define OP_MEAN (-1)

/* The operation of a name: 0, or -1 with an exception. OP_MEAN is done here, as a sum and a division. */
static int parse_op(const char *name, zc_dtype dtype, int *op)
{
    static const struct {
        const char *name;
        int op;
    } ops[] = {{"sum", ZC_SUM}, {"mean", OP_MEAN}, {"max", ZC_MAX}, {"min", ZC_MIN}, {"prod", ZC_PROD}};

    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++) {
        if (strcmp(ops[i].name, name) != 0)
            continue;
        *op = ops[i].op;
        if (*op == OP_MEAN && dtype >= ZC_INT32) {
            PyErr_Format(PyExc_TypeError, "op='mean' of %s would round; convert to floating point, or use op='sum' and "
                                          "divide", zc_dtype_name(dtype));
            return -1;
        }
        return 0;
    }
    PyErr_Format(PyExc_ValueError, "op is '%s'; legal are 'sum', 'mean', 'max', 'min', 'prod'", name);
    return -1;
}

static void divide(void *array, size_t count, zc_dtype dtype, size_t ranks)
{
    float *f = array, divisor = (float)ranks;
    double *d = array;
    uint16_t *h = array;

    for (size_t i = 0; i < count; i++) {
        switch (dtype) {
        case ZC_FLOAT32: f[i] /= divisor; break;
        case ZC_FLOAT64: d[i] /= (double)ranks; break;
        case ZC_BFLOAT16: h[i] = zc_float_to_bf16(zc_bf16_to_float(h[i]) / divisor); break;
        case ZC_FLOAT16: h[i] = zc_float_to_fp16(zc_fp16_to_float(h[i]) / divisor); break;
        default: return;
        }
    }
}

/* Ends a call that entered: None, or the exception. */
static PyObject *finish(PyObject *self, zc_status status, PyObject *result)
{
    py_comm_leave(self);
    if (status != ZC_OK) {
        Py_XDECREF(result);
        return py_raise(py_state_of(self), status);
    }
    return result;
}

PyDoc_STRVAR(all_reduce_doc,
             "all_reduce(array, op='sum')\n--\n\nReduces `array` (NumPy, or with __dlpack__; on the CPU, writable, "
             "contiguous) over all ranks, in place, and returns it. op: 'sum', 'mean', 'max', 'min', 'prod'.");

static PyObject *comm_all_reduce(PyObject *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"array", "op", NULL};
    PyObject *source;
    const char *op_name = "sum";
    py_array array;
    zc_status status;
    zc_comm *comm;
    int op;

    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O|s:all_reduce", names, &source, &op_name))
        return NULL;
    if (py_array_from(source, PY_DTYPE_ANY, PY_WRITE, "array of all_reduce", &array))
        return NULL;
    if (parse_op(op_name, array.dtype, &op) || !(comm = py_comm_enter(self))) {
        py_array_release(&array);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = zc_comm_all_reduce(comm, array.data, array.elems, array.dtype, op == OP_MEAN ? ZC_SUM : (zc_op)op);
    if (status == ZC_OK && op == OP_MEAN)
        divide(array.data, array.elems, array.dtype, zc_comm_ranks(comm));
    Py_END_ALLOW_THREADS
    py_array_release(&array);
    return finish(self, status, Py_NewRef(source));
}

PyDoc_STRVAR(broadcast_doc, "broadcast(array, root=0)\n--\n\nMakes `array` on every rank equal to that of `root`, in place, "
                            "and returns it.");

static PyObject *comm_broadcast(PyObject *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"array", "root", NULL};
    Py_ssize_t root = 0;
    PyObject *source;
    py_array array;
    zc_status status;
    zc_comm *comm;

    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O|n:broadcast", names, &source, &root))
        return NULL;
    if (py_array_from(source, PY_DTYPE_ANY, PY_WRITE, "array of broadcast", &array))
        return NULL;
    comm = py_comm_enter(self);
    if (comm && (root < 0 || (size_t)root >= zc_comm_ranks(comm))) {
        PyErr_Format(PyExc_ValueError, "root is %zd; legal are 0 to %zu", root, zc_comm_ranks(comm) - 1);
        py_comm_leave(self);
        comm = NULL;
    }
    if (!comm) {
        py_array_release(&array);
        return NULL;
    }
    Py_BEGIN_ALLOW_THREADS
    status = zc_comm_broadcast(comm, array.data, array.elems * zc_dtype_bytes(array.dtype), (size_t)root);
    Py_END_ALLOW_THREADS
    py_array_release(&array);
    return finish(self, status, Py_NewRef(source));
}

/* array.reshape((first,) + array's own shape[skip:]), of a new reference that is consumed. */
static PyObject *reshape(PyObject *result, Py_ssize_t first, const py_array *like, Py_ssize_t skip)
{
    PyObject *shape = NULL, *tail = NULL, *head = NULL, *whole = NULL, *reshaped = NULL;

    if (!result)
        return NULL;
    shape = PyObject_GetAttrString(like->array, "shape");
    if (shape && (tail = PySequence_GetSlice(shape, skip, PyTuple_GET_SIZE(shape)))
        && (head = Py_BuildValue("(n)", first)) && (whole = PySequence_Concat(head, tail)))
        reshaped = PyObject_CallMethod(result, "reshape", "(O)", whole);
    Py_XDECREF(whole);
    Py_XDECREF(head);
    Py_XDECREF(tail);
    Py_XDECREF(shape);
    Py_DECREF(result);
    return reshaped;
}

PyDoc_STRVAR(all_gather_doc, "all_gather(array)\n--\n\nA new array of shape (world_size, *array.shape): every rank's `array`, "
                             "in rank order. (bfloat16: its bits, as uint16.)");

static PyObject *comm_all_gather(PyObject *self, PyObject *source)
{
    PyObject *result = NULL;
    void *to = NULL;
    py_array array;
    zc_status status;
    zc_comm *comm;

    if (py_array_from(source, PY_DTYPE_ANY, PY_READ, "array of all_gather", &array))
        return NULL;
    if (!(comm = py_comm_enter(self)))
        goto done;
    size_t ranks = zc_comm_ranks(comm);
    if (!(result = py_array_new(ranks * array.elems, array.dtype, &to))) {
        py_comm_leave(self);
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    status = zc_comm_all_gather(comm, array.data, to, array.elems * zc_dtype_bytes(array.dtype));
    Py_END_ALLOW_THREADS
    result = reshape(finish(self, status, result), (Py_ssize_t)ranks, &array, 0);
done:
    py_array_release(&array);
    return result;
}

PyDoc_STRVAR(reduce_scatter_doc,
             "reduce_scatter(array, op='sum')\n--\n\nA new array: this rank's part, along the first dimension, of the "
             "reduction of `array` over all ranks. len(array) must be a multiple of world_size.");

static PyObject *comm_reduce_scatter(PyObject *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"array", "op", NULL};
    PyObject *source, *result = NULL;
    const char *op_name = "sum";
    void *to = NULL;
    py_array array;
    zc_status status;
    zc_comm *comm = NULL;
    int op;

    if (!PyArg_ParseTupleAndKeywords(args, keywords, "O|s:reduce_scatter", names, &source, &op_name))
        return NULL;
    if (py_array_from(source, PY_DTYPE_ANY, PY_READ, "array of reduce_scatter", &array))
        return NULL;
    Py_ssize_t rows = PySequence_Size(array.array);
    if (rows < 0 || parse_op(op_name, array.dtype, &op) || !(comm = py_comm_enter(self)))
        goto done;
    size_t ranks = zc_comm_ranks(comm), count = array.elems / ranks;
    if ((size_t)rows % ranks) {
        PyErr_Format(PyExc_ValueError, "array has %zd rows; legal is a multiple of the %zu ranks", rows, ranks);
        py_comm_leave(self);
        goto done;
    }
    if (!(result = py_array_new(count, array.dtype, &to))) {
        py_comm_leave(self);
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    status = zc_comm_reduce_scatter(comm, array.data, to, count, array.dtype, op == OP_MEAN ? ZC_SUM : (zc_op)op);
    if (status == ZC_OK && op == OP_MEAN)
        divide(to, count, array.dtype, ranks);
    Py_END_ALLOW_THREADS
    result = reshape(finish(self, status, result), rows / (Py_ssize_t)ranks, &array, 1);
done:
    py_array_release(&array);
    return result;
}

static PyObject *comm_barrier_method(PyObject *self, PyObject *unused)
{
    zc_comm *comm = py_comm_enter(self);
    zc_status status;

    (void)unused;
    if (!comm)
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = zc_comm_barrier(comm);
    Py_END_ALLOW_THREADS
    return finish(self, status, Py_NewRef(Py_None));
}

/* Ends a call that made a communicator of ranks of this one, or none: the object, None, or NULL with an exception. */
static PyObject *finish_group(PyObject *self, zc_status status, zc_comm *made)
{
    PyObject *done = finish(self, status, Py_NewRef(Py_None));
    if (!done || !made)
        return done;
    Py_DECREF(done);
    return py_comm_wrap(Py_TYPE(self), made, ((py_comm *)self)->local_rank);
}

PyDoc_STRVAR(split_doc, "split(color)\n--\n\nA communicator of the ranks that gave the same color (an integer >= 0), in rank "
                        "order. color None: belongs to no group, returns None. All ranks must call it.");

static PyObject *comm_split_method(PyObject *self, PyObject *color_object)
{
    long long color = -1;
    zc_comm *comm, *out = NULL;
    zc_status status;

    if (color_object != Py_None) {
        color = PyLong_AsLongLong(color_object);
        if (color == -1 && PyErr_Occurred())
            return NULL;
        if (color < 0) {
            PyErr_Format(PyExc_ValueError, "color is %lld; legal are integers >= 0 and None", color);
            return NULL;
        }
    }
    if (!(comm = py_comm_enter(self)))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = zc_comm_split(comm, color, &out);
    Py_END_ALLOW_THREADS
    return finish_group(self, status, out);
}

PyDoc_STRVAR(on_gpu_doc, "on_gpu(ordinal, plugin, nccl=None, deterministic=True)\n--\n\nThe same ranks, each with a GPU of "
                         "its own, for engines that keep everything there. plugin: path of the CUDA part;\nnccl: of a "
                         "libnccl to try. All ranks must call it.");

static PyObject *comm_on_gpu(PyObject *self, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"ordinal", "plugin", "nccl", "deterministic", NULL};
    const char *plugin, *nccl = NULL;
    zc_comm *comm, *out = NULL;
    int ordinal, deterministic = 1;
    zc_status status;

    if (!PyArg_ParseTupleAndKeywords(args, keywords, "is|zp:on_gpu", names, &ordinal, &plugin, &nccl, &deterministic)
        || !(comm = py_comm_enter(self)))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    status = zc_comm_on_gpu(comm, plugin, nccl, ordinal, deterministic, &out);
    Py_END_ALLOW_THREADS
    return finish_group(self, status, out);
}

/* ---- attributes ---------------------------------------------------------- */

static PyObject *get_rank(py_comm *self, void *unused)
{
    (void)unused;
    return py_comm_check_open((PyObject *)self) ? NULL : PyLong_FromSize_t(zc_comm_rank(self->comm));
}

static PyObject *get_world_size(py_comm *self, void *unused)
{
    (void)unused;
    return py_comm_check_open((PyObject *)self) ? NULL : PyLong_FromSize_t(zc_comm_ranks(self->comm));
}

static PyObject *get_local_rank(py_comm *self, void *unused)
{
    (void)unused;
    return PyLong_FromSize_t(self->local_rank);
}

static PyObject *get_local_size(py_comm *self, void *unused)
{
    (void)unused;
    return py_comm_check_open((PyObject *)self) ? NULL : PyLong_FromSize_t(zc_comm_local_ranks(self->comm));
}

static PyObject *get_backend(py_comm *self, void *unused)
{
    (void)unused;
    return py_comm_check_open((PyObject *)self) ? NULL : PyUnicode_FromString(zc_comm_backend(self->comm));
}

static PyObject *get_gpu(py_comm *self, void *unused)
{
    (void)unused;
    return py_comm_check_open((PyObject *)self) ? NULL : PyLong_FromLong(zc_comm_gpu(self->comm));
}

static PyObject *get_deterministic(py_comm *self, void *unused)
{
    (void)unused;
    return py_comm_check_open((PyObject *)self) ? NULL : PyBool_FromLong(zc_comm_deterministic(self->comm));
}

static PyObject *get_closed(py_comm *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(self->closed || !self->comm);
}

static PyObject *comm_repr(py_comm *self)
{
    if (self->closed || !self->comm)
        return PyUnicode_FromString("<zero_c.Communicator, closed>");
    return PyUnicode_FromFormat("<zero_c.Communicator, rank %zu of %zu, %s>", zc_comm_rank(self->comm),
                                zc_comm_ranks(self->comm), zc_comm_backend(self->comm));
}

#define KEYWORDS(function) (PyCFunction)(void (*)(void))(function), METH_VARARGS | METH_KEYWORDS

static PyMethodDef comm_methods[] = {
    {"local", (PyCFunction)(void (*)(void))py_comm_local, METH_VARARGS | METH_KEYWORDS | METH_CLASS, py_comm_local_doc},
    {"over_sockets", (PyCFunction)(void (*)(void))py_comm_over_sockets, METH_VARARGS | METH_KEYWORDS | METH_CLASS,
     py_comm_sockets_doc},
    {"all_reduce", KEYWORDS(comm_all_reduce), all_reduce_doc},
    {"reduce_scatter", KEYWORDS(comm_reduce_scatter), reduce_scatter_doc},
    {"all_gather", comm_all_gather, METH_O, all_gather_doc},
    {"broadcast", KEYWORDS(comm_broadcast), broadcast_doc},
    {"barrier", comm_barrier_method, METH_NOARGS, "barrier()\n--\n\nReturns when all ranks have come here."},
    {"split", comm_split_method, METH_O, split_doc},
    {"on_gpu", KEYWORDS(comm_on_gpu), on_gpu_doc},
    {"close", (PyCFunction)comm_close_method, METH_NOARGS, close_doc},
    {"__enter__", comm_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)comm_exit, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef comm_getset[] = {
    {"rank", (getter)get_rank, NULL, "Number of this rank, 0 to world_size - 1.", NULL},
    {"world_size", (getter)get_world_size, NULL, "Number of ranks.", NULL},
    {"local_rank", (getter)get_local_rank, NULL, "Number of this rank on its host.", NULL},
    {"local_world_size", (getter)get_local_size, NULL, "Number of ranks of the group on this host.", NULL},
    {"backend", (getter)get_backend, NULL, "Name of the transport.", NULL},
    {"gpu", (getter)get_gpu, NULL, "Number of this rank's GPU, where engines on it keep everything; -1: the CPU.", NULL},
    {"deterministic", (getter)get_deterministic, NULL,
     "Whether gradients are summed in rank order, so that a run repeats bit for bit.", NULL},
    {"closed", (getter)get_closed, NULL, "Whether close() was called.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef comm_members[] = {
    {"__weaklistoffset__", T_PYSSIZET, offsetof(py_comm, weak_references), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

PyDoc_STRVAR(comm_doc, "Communicator(rank, world_size, job, token=None, local_rank=-1, start_timeout=60.0, timeout=1800.0)\n"
                       "--\n\nA group of ranks; zero_c.init() makes one from the environment.");

static PyType_Slot comm_slots[] = {
    {Py_tp_new, py_comm_new},      {Py_tp_dealloc, comm_dealloc}, {Py_tp_repr, comm_repr}, {Py_tp_methods, comm_methods},
    {Py_tp_getset, comm_getset},   {Py_tp_members, comm_members}, {Py_tp_doc, (void *)comm_doc}, {0, NULL},
};

static PyType_Spec comm_spec = {
    .name = "zero_c.Communicator",
    .basicsize = sizeof(py_comm),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = comm_slots,
};

int py_comm_add(PyObject *module)
{
    py_state *state = PyModule_GetState(module);

    state->comm_type = (PyTypeObject *)PyType_FromModuleAndSpec(module, &comm_spec, NULL);
    return state->comm_type ? PyModule_AddType(module, state->comm_type) : -1;
}
