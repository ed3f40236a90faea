/*
 * Status codes and the text of the last error.
 *
 * Every fallible function of the core returns a zc_status: 0, or one of the
 * negative codes below.  The function that finds the problem also leaves a
 * sentence in a per-thread buffer, written for the person who will read it:
 * which rank, which operation, which parameter, what was found, what is legal
 * and what to do.  Callers pass the code up unchanged; only the outermost
 * caller reads the sentence.  Nothing in the core prints, exits or aborts.
 *
 * ZC_STATUS_MAP is the only place where a code, its short text and the Python
 * class it becomes are written down.
 */
#ifndef ZC_STATUS_H
#define ZC_STATUS_H

/*     name            value  short text                          Python class   */
#define ZC_STATUS_MAP(X)                                                          \
    X(ZC_EINVAL,         -1, "invalid argument",                   "ValueError")  \
    X(ZC_ETYPE,          -2, "invalid type",                       "TypeError")   \
    X(ZC_EBUFFER,        -3, "unusable buffer",                    "BufferError") \
    X(ZC_ENOMEM,         -4, "out of memory",                      "MemoryError") \
    X(ZC_ESYSTEM,        -5, "system call failed",                 "OSError")     \
    X(ZC_ESTATE,         -6, "not possible in this state",         "Error")       \
    X(ZC_ECOMM,          -7, "communication failed",               "CommError")   \
    X(ZC_EPEERLOST,      -8, "a peer is gone",                     "PeerLost")    \
    X(ZC_ETIMEOUT,       -9, "a peer did not come in time",        "Timeout")     \
    X(ZC_EMISMATCH,     -10, "ranks disagree",                     "Mismatch")    \
    X(ZC_EINTERRUPT,    -11, "interrupted",                        "interrupt")

typedef enum zc_status {
    ZC_OK = 0,
#define X(name, value, text, python) name = value,
    ZC_STATUS_MAP(X)
#undef X
} zc_status;

/* The short text of a code; "unknown status" for a number that is none. */
const char *zc_status_text(zc_status status);

/*
 * Whether a number that another process sent is the code of a failure that it may tell of.  ZC_EINTERRUPT is none:
 * an interrupt belongs to the rank that was interrupted.
 */
int zc_status_is_failure(int number);

/* The name of the Python class in which a code is reported. */
const char *zc_status_python(zc_status status);

/*
 * Records a printf-style sentence as this thread's last error and returns
 * `status`, so that a failure is one line: return zc_fail(ZC_EINVAL, ...).
 * A sentence over 1023 bytes is cut.
 */
zc_status zc_fail(zc_status status, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* As zc_fail, with the text of `error_number` (an errno) appended. */
zc_status zc_fail_errno(zc_status status, int error_number, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* This thread's last sentence; "" when none was recorded.  Never NULL. */
const char *zc_last_error(void);

/* Appends a number to a list for a sentence: "1, 2". What has no room is left out. */
void zc_list_number(char *list, unsigned long room_bytes, unsigned long number);

/* Call, and pass a failure up. */
#define ZC_TRY(call)                              \
    do {                                          \
        zc_status zc_try_status_ = (call);        \
        if (zc_try_status_ != ZC_OK)              \
            return zc_try_status_;                \
    } while (0)

/*
 * Fault injection, for tests only.  Every allocation and fallible system call
 * of the core asks zc_fault() first.  After zc_fault_arm(n) the n-th question
 * (n >= 1) of this process is answered "fail", once; zc_fault_arm(0) disarms.
 * zc_fault_count() is the number of questions asked since the last arming, so
 * a test can walk over all of them.
 */
void zc_fault_arm(long nth);
long zc_fault_count(void);
int zc_fault(void);

/* malloc/calloc/realloc/free that take part in fault injection. Sizes in bytes. */
void *zc_malloc(unsigned long size_bytes);
void *zc_calloc(unsigned long count, unsigned long size_bytes);
void *zc_realloc(void *memory, unsigned long size_bytes);
void zc_free(void *memory);

#endif
