/*
 * Forked ranks of a native benchmark: pinned to cores, with a spin barrier and
 * a table of results in shared memory, so that a phase begins on all ranks at
 * once and lasts as long as on the slowest.
 */
#ifndef PAIR_H
#define PAIR_H

#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define PAIR_MAX_RANKS 64
#define PAIR_MAX_RESULTS 4096

typedef struct pair_shared {
    uint32_t arrived __attribute__((aligned(128)));
    double seconds[PAIR_MAX_RANKS][PAIR_MAX_RESULTS];
} pair_shared;

static pair_shared *pair;
static int pair_ranks, pair_rank;

static inline double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Zero-filled memory that all ranks have at one address. */
static inline void *pair_memory(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        perror("mmap");
        exit(2);
    }
    return memory;
}

/* Waits for all ranks: the k-th call returns when all have made their k-th. */
static inline void pair_meet(void)
{
    static uint32_t target;
    target += (uint32_t)pair_ranks;
    __atomic_add_fetch(&pair->arrived, 1, __ATOMIC_ACQ_REL);
    while ((int32_t)(__atomic_load_n(&pair->arrived, __ATOMIC_ACQUIRE) - target) < 0)
        sched_yield();
}

/*
 * Becomes `ranks` processes that run rank_main, each pinned to a core of its
 * own where there are enough; returns the worst exit status.  When one fails
 * the others are killed: they would wait for it.
 */
static inline int pair_fork(int ranks, int (*rank_main)(void))
{
    cpu_set_t allowed, one;
    int cores[CPU_SETSIZE], core_count = 0, status, worst = 0;
    pid_t children[PAIR_MAX_RANKS];

    sched_getaffinity(0, sizeof allowed, &allowed);
    for (int core = 0; core < CPU_SETSIZE; core++)
        if (CPU_ISSET(core, &allowed))
            cores[core_count++] = core;
    pair = pair_memory(sizeof *pair);
    pair_ranks = ranks;
    fflush(NULL);
    for (int rank = 0; rank < ranks; rank++) {
        children[rank] = fork();
        if (children[rank] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            if (ranks <= core_count) {
                CPU_ZERO(&one);
                CPU_SET(cores[rank], &one);
                sched_setaffinity(0, sizeof one, &one);
            }
            pair_rank = rank;
            exit(rank_main());
        }
    }
    for (int left = ranks; left > 0; left--) {
        pid_t ended = wait(&status);
        if (status && !worst)
            worst = WIFEXITED(status) ? WEXITSTATUS(status) : 2;
        for (int rank = 0; rank < ranks; rank++) {
            if (children[rank] == ended)
                children[rank] = 0;
            else if (worst && children[rank])
                kill(children[rank], SIGKILL);
        }
    }
    return worst;
}

static inline int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median over results first, first + stride, ... of the slowest rank's time. */
static inline double pair_median(int first, int stride, int count)
{
    double slowest[PAIR_MAX_RESULTS];
    for (int i = 0; i < count; i++) {
        slowest[i] = 0;
        for (int rank = 0; rank < pair_ranks; rank++) {
            double s = pair->seconds[rank][first + i * stride];
            slowest[i] = s > slowest[i] ? s : slowest[i];
        }
    }
    qsort(slowest, (size_t)count, sizeof *slowest, by_value);
    return slowest[count / 2];
}

#endif
