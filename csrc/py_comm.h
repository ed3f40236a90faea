/*
 * What engines need of a Communicator object, and its constructors of it.
 *
 * Its zc_comm is closed when close() was called and no call is inside it.  Engines
 * on it may live longer: their memory stays, and their collective calls fail.
 */
#ifndef PY_COMM_H
#define PY_COMM_H

#include "py_state.h"

/* Counts a user in: the zc_comm, or NULL with Error set when it is closed or a signal handler runs in a wait. */
zc_comm *py_comm_enter(PyObject *comm);
/* Counts it out. */
void py_comm_leave(PyObject *comm);

/*
 * `engine` may be reading peers' memory, and they this rank's, when close() is called: it finishes that first, by
 * engine.wait_params().  Kept by a weak reference: 0, or -1 with an exception.
 */
int py_comm_before_close(PyObject *comm, PyObject *engine);

/* 0, or -1 with Error set: close() was called. */
int py_comm_check_open(PyObject *comm);
/* 0, or -1 with Error set: this is a signal handler inside a wait of the core, which holds locks. */
int py_comm_check_handler(py_state *state);

/* For the core's waits: runs signal handlers; not 0: one of them raised. */
int py_comm_interrupted(void *context);

/* The object for a zc_comm, which it owns from now on, also on failure. */
PyObject *py_comm_wrap(PyTypeObject *type, zc_comm *comm, size_t local_rank);

/* Constructors, in py_comm_open.c. */
PyObject *py_comm_new(PyTypeObject *type, PyObject *args, PyObject *keywords);
PyObject *py_comm_local(PyObject *type, PyObject *args, PyObject *keywords);
PyObject *py_comm_over_sockets(PyObject *type, PyObject *args, PyObject *keywords);
extern const char py_comm_local_doc[], py_comm_sockets_doc[];

#endif
