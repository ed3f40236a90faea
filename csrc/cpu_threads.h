/*
 * A small pool of threads that splits one range of elements.
 *
 * The pool owns threads - 1 workers; the caller is the last of the team.  They
 * are created at the first call that is worth splitting, sleep on a futex when
 * idle, and block all signals, which stay with the threads of the host
 * program.  One call is split at a time: a second caller, and any caller in a
 * forked child (which has no workers), runs its whole range itself.
 */
#ifndef CPU_THREADS_H
#define CPU_THREADS_H

#include "zc_status.h"

#include <stddef.h>

typedef struct cpu_threads cpu_threads;

/* Pieces begin at multiples of this many elements, whatever their number. */
#define CPU_THREADS_ALIGN_ELEMS 64u

/* threads >= 1, the caller included. Starts none yet. */
zc_status cpu_threads_create(int threads, cpu_threads **out);

/* Ends and joins the workers. No call may be running. NULL is allowed. */
void cpu_threads_destroy(cpu_threads *pool);

/*
 * Calls run(context, begin, end) for pieces that cover [0, count) once, and
 * returns when all are done.  A piece has at least `grain` elements (or is
 * everything), so small ranges run in the caller.  If threads cannot be
 * created those there are do the work.
 */
void cpu_parallel(cpu_threads *pool, size_t count, size_t grain,
                  void (*run)(void *context, size_t begin, size_t end), void *context);

#endif
