/*
 * The ways to a Communicator object: by processes of this host, by sockets that
 * are connected already, by threads.
 */
#include "py_comm.h"

#include <unistd.h>

static int check_place(Py_ssize_t rank, Py_ssize_t ranks)
{
    if (ranks >= 1 && rank >= 0 && rank < ranks)
        return 0;
    PyErr_Format(PyExc_ValueError, "rank is %zd of world_size %zd; legal are world_size >= 1 and 0 <= rank < world_size",
                 rank, ranks);
    return -1;
}

PyObject *py_comm_new(PyTypeObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"rank", "world_size", "job", "token", "local_rank", "start_timeout", "timeout", NULL};
    zc_comm_config config = {.start_timeout_s = 60, .timeout_s = 1800, .interrupted = py_comm_interrupted};
    Py_ssize_t rank, ranks, local_rank = -1;
    zc_comm *comm = NULL;
    zc_status status;

    if (!PyArg_ParseTupleAndKeywords(args, keywords, "nns|zndd:Communicator", names, &rank, &ranks, &config.job,
                                     &config.token, &local_rank, &config.start_timeout_s, &config.timeout_s))
        return NULL;
    if (check_place(rank, ranks))
        return NULL;
    py_state *state = PyType_GetModuleState(type);
    if (py_comm_check_handler(state))
        return NULL;
    config.rank = (size_t)rank;
    config.ranks = (size_t)ranks;
    Py_BEGIN_ALLOW_THREADS
    status = zc_comm_open(&config, &comm);
    Py_END_ALLOW_THREADS
    if (status != ZC_OK)
        return py_raise(state, status);
    return py_comm_wrap(type, comm, local_rank < 0 ? (size_t)rank : (size_t)local_rank);
}

/* The item of a sequence that must have `count`: an integer >= low. Otherwise -1 with an exception. */
static int integer_at(PyObject *sequence, const char *name, Py_ssize_t at, Py_ssize_t count, int low)
{
    PyObject *item = PySequence_Size(sequence) == count ? PySequence_GetItem(sequence, at) : NULL;
    long value = item ? PyLong_AsLong(item) : -1;

    if (!item && !PyErr_Occurred())
        PyErr_Format(PyExc_ValueError, "%s has %zd items; legal is %zd", name, PySequence_Size(sequence), count);
    Py_XDECREF(item);
    if (!PyErr_Occurred() && (value < low || value > INT_MAX))
        PyErr_Format(PyExc_ValueError, "%s[%zd] is %ld; legal are %d to %d", name, at, value, low, INT_MAX);
    return PyErr_Occurred() ? -1 : (int)value;
}

static void close_all(const int *sockets, Py_ssize_t begin, Py_ssize_t end)
{
    for (Py_ssize_t i = begin; i < end; i++)
        if (sockets[i] >= 0)
            close(sockets[i]);
}

const char py_comm_sockets_doc[] = PyDoc_STR(
    "over_sockets(rank, world_size, hosts, sockets, local_rank, timeout=1800.0)\n--\n\n"
    "A group of ranks that are connected already, on one host or several. hosts: the number of each rank's host.\n"
    "sockets: descriptors of stream sockets; on rank 0 one for each rank (its own is not looked at), elsewhere one, to rank "
    "0.\nThey are the communicator's from then on, also when it cannot be made. All ranks must call it.");

PyObject *py_comm_over_sockets(PyObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"rank", "world_size", "hosts", "sockets", "local_rank", "timeout", NULL};
    zc_comm_sockets config = {.timeout_s = 1800, .interrupted = py_comm_interrupted};
    PyObject *hosts_source, *sockets_source;
    Py_ssize_t rank, ranks, local_rank;
    zc_comm *comm = NULL;
    zc_status status = ZC_OK;

    if (!PyArg_ParseTupleAndKeywords(args, keywords, "nnOOn|d:over_sockets", names, &rank, &ranks, &hosts_source,
                                     &sockets_source, &local_rank, &config.timeout_s)
        || check_place(rank, ranks))
        return NULL;
    py_state *state = PyType_GetModuleState((PyTypeObject *)type);
    size_t *hosts = PyMem_Calloc((size_t)ranks, sizeof *hosts);
    int *sockets = PyMem_Calloc((size_t)ranks, sizeof *sockets);
    Py_ssize_t count = rank ? 1 : ranks, taken = 0;
    if (!hosts || !sockets)
        PyErr_NoMemory();
    for (; taken < count && !PyErr_Occurred(); taken++)
        sockets[taken] = integer_at(sockets_source, "sockets", taken, count, -1);
    for (Py_ssize_t i = 0; i < ranks && !PyErr_Occurred(); i++)
        hosts[i] = (size_t)integer_at(hosts_source, "hosts", i, ranks, 0);
    if (PyErr_Occurred() || py_comm_check_handler(state)) {
        close_all(sockets, rank ? 0 : 1, taken);
    } else {
        config.rank = (size_t)rank;
        config.ranks = (size_t)ranks;
        config.hosts = hosts;
        config.sockets = sockets;
        Py_BEGIN_ALLOW_THREADS
        status = zc_comm_open_sockets(&config, &comm);
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(hosts);
    PyMem_Free(sockets);
    if (comm)
        return py_comm_wrap((PyTypeObject *)type, comm, (size_t)local_rank);
    return status == ZC_OK ? NULL : py_raise(state, status);
}

const char py_comm_local_doc[] = PyDoc_STR(
    "local(ranks, timeout=1800.0)\n--\n\n"
    "Communicators of `ranks` ranks that are threads of this process, one for each thread.");

PyObject *py_comm_local(PyObject *type, PyObject *args, PyObject *keywords)
{
    static char *names[] = {"ranks", "timeout", NULL};
    Py_ssize_t ranks;
    double timeout_s = 1800;

    if (!PyArg_ParseTupleAndKeywords(args, keywords, "n|d:local", names, &ranks, &timeout_s))
        return NULL;
    if (ranks < 1 || ranks > 4096) {
        PyErr_Format(PyExc_ValueError, "ranks is %zd; legal are 1 to 4096", ranks);
        return NULL;
    }
    zc_comm **comms = PyMem_Calloc((size_t)ranks, sizeof *comms);
    if (!comms)
        return PyErr_NoMemory();
    zc_status status = zc_comm_open_local((size_t)ranks, timeout_s, comms);
    PyObject *list = status == ZC_OK ? PyList_New(ranks) : py_raise(PyType_GetModuleState((PyTypeObject *)type), status);
    for (Py_ssize_t rank = 0; status == ZC_OK && rank < ranks; rank++) {
        PyObject *comm = list ? py_comm_wrap((PyTypeObject *)type, comms[rank], (size_t)rank) : NULL;
        if (comm)
            PyList_SET_ITEM(list, rank, comm);
        else if (list)
            Py_CLEAR(list); /* py_comm_wrap() closed this one */
        else
            zc_comm_close(comms[rank]);
    }
    PyMem_Free(comms);
    return list;
}

