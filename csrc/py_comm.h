/*
 * What engines need of a Communicator object.
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

#endif
