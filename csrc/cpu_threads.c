/*
 * The pool of cpu_threads.h.
 *
 * Protocol.  `round` counts the calls that were split.  The caller writes the
 * job, sets `left` to the number of workers, increases `round` (release) and
 * wakes sleepers.  A worker that sees a round it has not worked on (acquire)
 * does its piece, which may be empty, and decreases `left` (release).  The
 * caller does piece 0 and waits for `left` to be 0 (acquire), so the job cannot
 * change under a worker.  A futex sleeps only if the word still has the value
 * that the sleeper saw, so a wake-up between look and sleep is not lost.
 */
#include "cpu_threads.h"

#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#define SPINS 200 /* a few microseconds: a piece next to ours ends about when ours does */

typedef struct worker {
    cpu_threads *pool;
    pthread_t thread;
    size_t piece;
} worker;

struct cpu_threads {
    pthread_mutex_t busy; /* held by the caller whose range is being split */
    pid_t owner;          /* the process that may have workers */
    size_t wanted;        /* workers to have */
    size_t started;       /* workers there are, once `tried` */
    int tried;

    uint32_t round; /* written by the caller, read by workers */
    uint32_t left;  /* workers still in this round */
    int stop;

    /* the job of this round */
    void (*run)(void *context, size_t begin, size_t end);
    void *context;
    size_t count, piece_elems;

    worker workers[];
};

static void futex_wait(uint32_t *word, uint32_t seen)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static void futex_wake(uint32_t *word, int sleepers)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, sleepers, NULL, NULL, 0);
}

static void spin_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void run_piece(const cpu_threads *pool, size_t piece)
{
    size_t begin = piece * pool->piece_elems;
    if (begin >= pool->count)
        return;
    size_t left = pool->count - begin;
    pool->run(pool->context, begin, begin + (left < pool->piece_elems ? left : pool->piece_elems));
}

/* Waits for the next round: woken by cpu_parallel or cpu_threads_destroy. */
static void *work(void *argument)
{
    worker *self = argument;
    cpu_threads *pool = self->pool;
    uint32_t done = 0;
    for (;;) {
        uint32_t round = __atomic_load_n(&pool->round, __ATOMIC_ACQUIRE);
        for (int spin = 0; round == done && spin < SPINS; spin++) {
            spin_pause();
            round = __atomic_load_n(&pool->round, __ATOMIC_ACQUIRE);
        }
        if (round == done) {
            futex_wait(&pool->round, done);
            continue;
        }
        done = round;
        if (pool->stop)
            return NULL;
        run_piece(pool, self->piece);
        if (__atomic_sub_fetch(&pool->left, 1, __ATOMIC_RELEASE) == 0)
            futex_wake(&pool->left, 1);
    }
}

/* Tells all workers that there is something new; `left` must be set before. */
static void next_round(cpu_threads *pool)
{
    __atomic_add_fetch(&pool->round, 1, __ATOMIC_RELEASE);
    futex_wake(&pool->round, INT_MAX);
}

/* Before the first round, which is the first that workers look for. */
static void start_workers(cpu_threads *pool)
{
    pool->tried = 1;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (size_t i = 0; i < pool->wanted; i++) {
        pool->workers[i] = (worker){.pool = pool, .piece = i + 1};
        if (zc_fault() || pthread_create(&pool->workers[i].thread, NULL, work, &pool->workers[i]) != 0)
            break;
        pool->started++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

zc_status cpu_threads_create(int threads, cpu_threads **out)
{
    *out = NULL;
    if (threads < 1 || threads > 4096)
        return zc_fail(ZC_EINVAL, "%d threads were asked for; 1 to 4096 are possible", threads);
    size_t workers = (size_t)threads - 1;
    cpu_threads *pool = zc_calloc(1, sizeof *pool + workers * sizeof(worker));
    if (!pool)
        return zc_fail(ZC_ENOMEM, "no memory for a pool of %d threads", threads);
    pthread_mutex_init(&pool->busy, NULL);
    pool->owner = getpid();
    pool->wanted = workers;
    *out = pool;
    return ZC_OK;
}

void cpu_threads_destroy(cpu_threads *pool)
{
    if (!pool)
        return;
    if (pool->started && getpid() == pool->owner) {
        pool->stop = 1;
        next_round(pool);
        for (size_t i = 0; i < pool->started; i++)
            pthread_join(pool->workers[i].thread, NULL);
    }
    if (getpid() == pool->owner) /* in a forked child another thread may have held it */
        pthread_mutex_destroy(&pool->busy);
    zc_free(pool);
}

void cpu_parallel(cpu_threads *pool, size_t count, size_t grain,
                  void (*run)(void *context, size_t begin, size_t end), void *context)
{
    if (count == 0)
        return;
    if (pool->wanted == 0 || count / 2 < grain || getpid() != pool->owner ||
        pthread_mutex_trylock(&pool->busy) != 0) {
        run(context, 0, count);
        return;
    }
    if (!pool->tried)
        start_workers(pool);

    size_t pieces = pool->started + 1;
    if (grain && count / grain < pieces)
        pieces = count / grain;
    size_t piece_elems = count / pieces + (count % pieces != 0);
    pool->piece_elems = (piece_elems + CPU_THREADS_ALIGN_ELEMS - 1) / CPU_THREADS_ALIGN_ELEMS *
                        CPU_THREADS_ALIGN_ELEMS;
    pool->count = count;
    pool->run = run;
    pool->context = context;
    if (pool->started) {
        __atomic_store_n(&pool->left, (uint32_t)pool->started, __ATOMIC_RELAXED);
        next_round(pool);
    }
    run_piece(pool, 0);

    /* Waits for the workers' pieces; the last one to finish wakes us. */
    for (int spin = 0;; spin++) {
        uint32_t left = __atomic_load_n(&pool->left, __ATOMIC_ACQUIRE);
        if (left == 0)
            break;
        if (spin < SPINS)
            spin_pause();
        else
            futex_wait(&pool->left, left);
    }
    pthread_mutex_unlock(&pool->busy);
}
