/*
 * The Engine object, for the glue files that work on it.
 *
 * An engine is used by several threads one after the other: whoever calls the
 * core with it holds its lock.  The lock is taken with the GIL held and is never
 * waited for with the GIL held, so a thread inside a core call (without the GIL)
 * and a thread that wants in (without it, too) cannot block each other.
 */
#ifndef PY_ENGINE_H
#define PY_ENGINE_H

#include "py_state.h"

typedef struct py_param_facts {
    size_t elems;
    zc_dtype dtype;
} py_param_facts;

typedef struct py_engine {
    PyObject_HEAD
    zc_engine *engine;          /* NULL: being built, or closed */
    PyObject *comm;             /* the Communicator, kept alive */
    int gpu;                    /* -1: the engine is on the CPU */
    PyThread_type_lock lock;
    py_param_facts *params;
    size_t param_count;
    PyObject *weak_references;
} py_engine;

/*
 * Takes the lock of an open engine: 0, or -1 with Error set when the engine is
 * closed or this is a signal handler that runs inside a wait of the core.
 */
int py_engine_lock(py_engine *self);
void py_engine_unlock(py_engine *self);

/*
 * Gives up the held gradients that the engine has finished with.  Every `owner`
 * passed to zc_engine_offer_grad that came back HELD must be a strong reference
 * to a Python object.  Call without the lock: releasing may run any code.
 */
void py_engine_drop_released(py_engine *self);

/* Whether `object` is an Engine of this module. */
int py_engine_check(py_state *state, PyObject *object);

/* The lock for calls that only look at this rank: allowed after the communicator was closed. */
int py_engine_lock_local(py_engine *self);
/* Work on a stream of the engine's GPU sees what the engine has enqueued: 0, or -1 with an exception. */
int py_engine_order(py_engine *self, void *stream);
/* Unlocks after a core call: 0, or -1 with the exception of its status. */
int py_engine_end(py_engine *self, zc_status status);
/* The same for a call that returns nothing: None or NULL. */
PyObject *py_engine_finish(py_engine *self, zc_status status);

/* Makes room for the facts of `count` more parameters, before the engine has them; then notes them. */
struct py_param_list;
int py_engine_reserve(py_engine *self, size_t count);
void py_engine_note(py_engine *self, const struct py_param_list *list);

/* ---- arguments (py_engine_args.c): 0, or -1 with an exception set -------- */

/* Index of a parameter from a Python integer. */
int py_engine_index(py_engine *self, PyObject *number, size_t *index);
/* Role of an array by the name that torch.optim gives it, or "weight". */
int py_engine_role(const char *name, zc_role *role);
/* An index from an argument tuple; None or nothing is SIZE_MAX, all. `format` is "|O:method". */
int py_engine_index_or_all(py_engine *self, PyObject *args, const char *format, size_t *index);
/*
 * A (parameter, array) pair of arguments; the array must have the parameter's dtype and size.  `where` says whose memory
 * it must be: the host's, or the engine's device's.
 */
typedef enum py_where { PY_HOST, PY_DEVICE } py_where;
int py_engine_read_array(py_engine *self, PyObject *args, const char *what, py_where where, size_t *index,
                         py_array *array);

/* Parameters as the core wants them, and what keeps their names and values alive. */
typedef struct py_param_list {
    PyObject *tuple;
    zc_param *params;
    py_array *initial;
    size_t count;
} py_param_list;

int py_param_list_read(PyObject *sequence, size_t first, py_param_list *list);
void py_param_list_free(py_param_list *list);

/* The units of stage 3, and what keeps their names alive. Freed also after a failure. */
typedef struct py_unit_list {
    PyObject *tuple;
    zc_unit *units;
    size_t count;
} py_unit_list;

int py_unit_list_read(PyObject *sequence, py_unit_list *list);
void py_unit_list_free(py_unit_list *list);

/* The options of all groups from a sequence of dicts, to be freed with PyMem_Free; NULL with an exception set. */
zc_options *py_engine_groups(PyObject *sequence, size_t *count);

/* ---- methods, as in the stub zero_c/_core.pyi ---------------------------- */

PyObject *py_engine_add_params(py_engine *self, PyObject *args);
PyObject *py_engine_load_param(py_engine *self, PyObject *args);
PyObject *py_engine_publish(py_engine *self, PyObject *args);
PyObject *py_engine_param(py_engine *self, PyObject *args);
PyObject *py_engine_param_dlpack(py_engine *self, PyObject *args);
PyObject *py_engine_refresh(py_engine *self, PyObject *args);
PyObject *py_engine_add_grad(py_engine *self, PyObject *args);
PyObject *py_engine_has_grad(py_engine *self, PyObject *args);
PyObject *py_engine_end_round(py_engine *self, PyObject *args);
PyObject *py_engine_abort_round(py_engine *self, PyObject *args);
PyObject *py_engine_discard(py_engine *self, PyObject *args);
PyObject *py_engine_step(py_engine *self, PyObject *args, PyObject *keywords);
PyObject *py_engine_last_step(py_engine *self, PyObject *unused);
PyObject *py_engine_wait_params(py_engine *self, PyObject *args);
PyObject *py_engine_clip(py_engine *self, PyObject *args, PyObject *keywords);
PyObject *py_engine_state(py_engine *self, PyObject *args);
PyObject *py_engine_read(py_engine *self, PyObject *args);
PyObject *py_engine_write(py_engine *self, PyObject *args);
PyObject *py_engine_step_count(py_engine *self, PyObject *args);
PyObject *py_engine_has_momentum(py_engine *self, PyObject *args);
PyObject *py_engine_set_step_count(py_engine *self, PyObject *args);
PyObject *py_engine_memory(py_engine *self, PyObject *args);
PyObject *py_engine_traffic(py_engine *self, PyObject *args);
PyObject *py_engine_plan(py_engine *self, PyObject *args);
PyObject *py_engine_sync(py_engine *self, PyObject *args);
PyObject *py_engine_acquire(py_engine *self, PyObject *args);
PyObject *py_engine_release(py_engine *self, PyObject *args);
PyObject *py_engine_drain(py_engine *self, PyObject *args);
PyObject *py_engine_unit_user(py_engine *self, PyObject *args);
PyObject *py_engine_unit_generation(py_engine *self, PyObject *args);
PyObject *py_engine_unit_range(py_engine *self, PyObject *args);
PyObject *py_engine_fetch(py_engine *self, PyObject *args);
PyObject *py_engine_store(py_engine *self, PyObject *args);
PyObject *py_engine_parts(py_engine *self, PyObject *number);
PyObject *py_engine_read_part(py_engine *self, PyObject *args);
PyObject *py_engine_write_parts(py_engine *self, PyObject *args);
PyObject *py_engine_prepare(py_engine *self, PyObject *groups);
PyObject *py_engine_spread(py_engine *self, PyObject *args);
PyObject *py_checksum(PyObject *module, PyObject *source);
PyObject *py_engine_use_stream(py_engine *self, PyObject *stream);
PyObject *py_engine_replay_options(py_engine *self, PyObject *groups);
PyObject *py_engine_replayed_steps(py_engine *self, PyObject *unused);
PyObject *py_engine_load_from_device(py_engine *self, PyObject *args);
PyObject *py_engine_copy_param(py_engine *self, PyObject *args);

/* ---- py_engine_profile.c -------------------------------------------------- */

PyObject *py_engine_profile(py_engine *self, PyObject *capacity);
PyObject *py_engine_take_work(py_engine *self, PyObject *unused);

#endif
