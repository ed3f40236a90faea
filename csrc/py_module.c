/*
 * The extension module zero_c._core: its state, its exception classes, and the
 * one place where a status of the core becomes a Python exception.
 */
#include "py_engine.h"
#include "py_gpu.h"
#include "py_state.h"

#include "py_hook.h"

/* ---- errors -------------------------------------------------------------- */

/* The exception class for a status; the names are those of ZC_STATUS_MAP. Borrowed. */
static PyObject *class_of(py_state *state, zc_status status)
{
    const struct {
        const char *name;
        PyObject *type;
    } classes[] = {
        {"ValueError", PyExc_ValueError},   {"TypeError", PyExc_TypeError}, {"BufferError", PyExc_BufferError},
        {"MemoryError", PyExc_MemoryError}, {"OSError", PyExc_OSError},     {"Error", state->error},
        {"CommError", state->comm_error},   {"PeerLost", state->peer_lost}, {"Timeout", state->timeout},
        {"Mismatch", state->mismatch},      {"interrupt", PyExc_KeyboardInterrupt},
    };
    const char *name = zc_status_python(status);

    for (size_t i = 0; i < sizeof classes / sizeof *classes; i++)
        if (strcmp(classes[i].name, name) == 0)
            return classes[i].type;
    return state->error;
}

PyObject *py_raise(py_state *state, zc_status status)
{
    if (PyErr_Occurred())
        return NULL;
    const char *sentence = zc_last_error();
    PyObject *text = PyUnicode_DecodeUTF8(*sentence ? sentence : zc_status_text(status),
                                          (Py_ssize_t)strlen(*sentence ? sentence : zc_status_text(status)), "replace");
    if (text) {
        PyErr_SetObject(class_of(state, status), text);
        Py_DECREF(text);
    }
    return NULL;
}

/* Adds an exception class to the module and to its state. */
static int add_exception(PyObject *module, const char *name, const char *doc, PyObject *base, PyObject **slot)
{
    char qualified[64];

    PyOS_snprintf(qualified, sizeof qualified, "zero_c.%s", name);
    *slot = PyErr_NewExceptionWithDoc(qualified, doc, base, NULL);
    return *slot ? PyModule_AddObjectRef(module, name, *slot) : -1;
}

static int add_exceptions(PyObject *module, py_state *state)
{
    if (add_exception(module, "Error", "Base of zero_c's own errors; also: not possible in this state.",
                      PyExc_Exception, &state->error)
        || add_exception(module, "CommError", "Communication between ranks failed; the communicator is unusable now.",
                         state->error, &state->comm_error)
        || add_exception(module, "PeerLost", "A rank this one waited for is gone.", state->comm_error, &state->peer_lost)
        || add_exception(module, "Timeout", "A living rank did not come in time.", state->comm_error, &state->timeout)
        || add_exception(module, "Mismatch", "Ranks do different things.", state->comm_error, &state->mismatch)
        || add_exception(module, "CheckpointError", "A checkpoint is damaged or does not fit.", state->error,
                         &state->checkpoint_error))
        return -1;
    return 0;
}

/* ---- fault injection, for tests ------------------------------------------ */

PyDoc_STRVAR(fault_arm_doc, "_fault_arm(nth)\n--\n\nFor tests: the nth allocation or system call of the core from now on "
                            "fails; 0 disarms.");

static PyObject *fault_arm(PyObject *module, PyObject *number)
{
    long nth = PyLong_AsLong(number);

    (void)module;
    if (nth == -1 && PyErr_Occurred())
        return NULL;
    zc_fault_arm(nth);
    Py_RETURN_NONE;
}

PyDoc_STRVAR(fault_count_doc, "_fault_count()\n--\n\nFor tests: allocations and system calls since the last arming.");

static PyObject *fault_count(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    return PyLong_FromLong(zc_fault_count());
}

/* ---- the module ---------------------------------------------------------- */

PyDoc_STRVAR(as_array_doc, "as_array(source, writable=False, what='array')\n--\n\n"
                           "(NumPy array over the memory of `source`, as it lies there; name of its dtype). bfloat16 is shown "
                           "as uint16.");

static PyMethodDef module_methods[] = {
    {"as_array", py_array_as, METH_VARARGS, as_array_doc},
    {"gpu_probe", py_gpu_probe, METH_O,
     "gpu_probe(plugin)\n--\n\nThe number of GPUs that the CUDA part at this path can use; or Error says why there are none."},
    {"checksum", py_checksum, METH_O,
     "checksum(buffer)\n--\n\nThe two sums of a block of a checkpoint; zc_checksum in csrc/zero_c.h has their definition."},
    {"_fault_arm", fault_arm, METH_O, fault_arm_doc},
    {"_fault_count", fault_count, METH_NOARGS, fault_count_doc},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module)
{
    if (py_array_init() || add_exceptions(module, PyModule_GetState(module)) || py_comm_add(module)
        || py_engine_add(module) || py_export_add(module) || py_hook_add(module) || py_window_add(module)
        || py_gpu_add(module))
        return -1;
    return 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    py_state *state = PyModule_GetState(module);

    Py_VISIT(state->error);
    Py_VISIT(state->comm_error);
    Py_VISIT(state->peer_lost);
    Py_VISIT(state->timeout);
    Py_VISIT(state->mismatch);
    Py_VISIT(state->checkpoint_error);
    Py_VISIT(state->comm_type);
    Py_VISIT(state->engine_type);
    Py_VISIT(state->export_type);
    return 0;
}

static int module_clear(PyObject *module)
{
    py_state *state = PyModule_GetState(module);

    Py_CLEAR(state->error);
    Py_CLEAR(state->comm_error);
    Py_CLEAR(state->peer_lost);
    Py_CLEAR(state->timeout);
    Py_CLEAR(state->mismatch);
    Py_CLEAR(state->checkpoint_error);
    Py_CLEAR(state->comm_type);
    Py_CLEAR(state->engine_type);
    Py_CLEAR(state->export_type);
    return 0;
}

static void module_free(void *module)
{
    module_clear(module);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
#if PY_VERSION_HEX >= 0x030c0000
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED}, /* callbacks use PyGILState */
#endif
    {0, NULL},
};

static PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "zero_c._core",
    .m_doc = "The compiled core of zero_c: communicators and engines.",
    .m_size = sizeof(py_state),
    .m_methods = module_methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&module_def);
}
