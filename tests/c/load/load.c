/*
 * Ranks under load, for tests/test_load.py:
 *
 *     load processes RANKS COUNT SEED     COUNT small collectives between processes
 *     load threads RANKS COUNT SEED       the same between threads of one process
 *     load cycles RANKS COUNT SEED        COUNT times: processes meet, speak, and leave
 *
 * Which collective comes next, of what and how large, follows from the seed and is the same on all ranks; how long a
 * rank dawdles before it differs.  Values are small integers, so every result is known and must be exact.  In cycles
 * no rank may hold more descriptors, threads or memory at the end than after the first tenth.  Prints what failed;
 * the exit status says whether anything did.
 */
#define _GNU_SOURCE
#include "together.h"
#include "zero_c.h"

#include <errno.h>
#include <pthread.h>
#include <unistd.h>

#define RANKS_MAX 64
#define ELEMS_MOST 200
#define LARGE_ELEMS 5000u /* more than what passes in one piece; in one of LARGE_EVERY */
#define LARGE_EVERY 2048
#define DAWDLE_EVERY 64
#define DAWDLE_MOST_US 60
#define GROWTH_MOST_KIB 256 /* of the heap's and the stack's own making: pages, not cycles */
#define TIMEOUT_S 60.0

static size_t ranks, count;
static uint64_t seed;

/* ---- values ----------------------------------------------------------------------- */

static const zc_dtype DTYPES[] = {ZC_FLOAT32, ZC_FLOAT64, ZC_INT32, ZC_INT64, ZC_BFLOAT16};

/* What rank r has at place k in collective n: under 4, so that sums of 64 of them are exact in bfloat16, too. */
static double value_of(size_t r, size_t k, uint64_t n)
{
    return (double)((r * 5 + k * 3 + n * 7) % 4);
}

static double expected(size_t k, uint64_t n, zc_op op)
{
    double all = value_of(0, k, n);
    for (size_t r = 1; r < ranks; r++) {
        double one = value_of(r, k, n);
        all = op == ZC_SUM ? all + one : op == ZC_MAX ? (one > all ? one : all) : (one < all ? one : all);
    }
    return all;
}

/* ---- one rank ---------------------------------------------------------------------- */

typedef struct room {
    char from[LARGE_ELEMS * RANKS_MAX * sizeof(double)], to[LARGE_ELEMS * RANKS_MAX * sizeof(double)];
} room;

static void one_collective(zc_comm *comm, uint64_t n, uint64_t *shared, room *room)
{
    size_t me = zc_comm_rank(comm);
    uint64_t kind = testing_random(shared) % 5, choice = testing_random(shared);
    zc_dtype dtype = DTYPES[choice % (sizeof DTYPES / sizeof *DTYPES)];
    zc_op op = (zc_op)(choice / 8 % 3);
    size_t elems = 1 + choice / 64 % ELEMS_MOST, root = choice / 32768 % ranks, elem_bytes = zc_dtype_bytes(dtype);
    if (choice / 65536 % LARGE_EVERY == 0)
        elems = LARGE_ELEMS;
    switch (kind) {
    case 0:
        for (size_t k = 0; k < elems; k++)
            put(room->from, k, dtype, value_of(me, k, n));
        CHECK_OK(zc_comm_all_reduce(comm, room->from, elems, dtype, op));
        for (size_t k = 0; k < elems; k++)
            CHECK(get(room->from, k, dtype) == expected(k, n, op));
        break;
    case 1:
        for (size_t k = 0; k < elems * ranks; k++)
            put(room->from, k, dtype, value_of(me, k, n));
        CHECK_OK(zc_comm_reduce_scatter(comm, room->from, room->to, elems, dtype, op));
        for (size_t k = 0; k < elems; k++)
            CHECK(get(room->to, k, dtype) == expected(me * elems + k, n, op));
        break;
    case 2:
        for (size_t k = 0; k < elems; k++)
            put(room->from, k, dtype, value_of(me, k, n));
        CHECK_OK(zc_comm_all_gather(comm, room->from, room->to, elems * elem_bytes));
        for (size_t k = 0; k < elems * ranks; k++)
            CHECK(get(room->to, k, dtype) == value_of(k / elems, k % elems, n));
        break;
    case 3:
        for (size_t k = 0; k < elems; k++)
            put(room->from, k, dtype, value_of(me, k, n));
        CHECK_OK(zc_comm_broadcast(comm, room->from, elems * elem_bytes, root));
        for (size_t k = 0; k < elems; k++)
            CHECK(get(room->from, k, dtype) == value_of(root, k, n));
        break;
    default:
        CHECK_OK(zc_comm_barrier(comm));
    }
}

/* Until the first failure: after it there is nothing to compare. */
static void collectives(zc_comm *comm, size_t many)
{
    uint64_t shared = seed, own = seed + 1 + zc_comm_rank(comm);
    room *room = calloc(1, sizeof *room);
    int before = testing_failures;
    for (uint64_t n = 0; room && n < many && testing_failures == before; n++) {
        if (testing_random(&own) % DAWDLE_EVERY == 0)
            pause_us((unsigned)(testing_random(&own) % DAWDLE_MOST_US));
        one_collective(comm, n, &shared, room);
    }
    CHECK(room != NULL);
    free(room);
}

/* ---- processes ----------------------------------------------------------------------- */

static zc_comm *open_rank(size_t rank, const char *job)
{
    zc_comm_config config = {.rank = rank, .ranks = ranks, .job = job, .token = "a secret", .start_timeout_s = TIMEOUT_S,
                             .timeout_s = TIMEOUT_S};
    zc_comm *comm = NULL;
    CHECK_OK(zc_comm_open(&config, &comm));
    return comm;
}

static void speak(size_t rank, const char *job)
{
    zc_comm *comm = open_rank(rank, job);
    if (comm)
        collectives(comm, count);
    zc_comm_close(comm);
}

static size_t kib_of(const char *key)
{
    FILE *file = fopen("/proc/self/status", "r");
    char line[256], form[32];
    size_t kib = 0;
    snprintf(form, sizeof form, "%s: %%zu kB", key);
    while (file && fgets(line, sizeof line, file) && sscanf(line, form, &kib) != 1)
        continue;
    if (file)
        fclose(file);
    return kib;
}

static void come_and_go(size_t rank, const char *job)
{
    size_t fds = 0, threads = 0, kib = 0;
    for (size_t n = 0; n < count && !testing_failures; n++) {
        zc_comm *comm = open_rank(rank, job);
        int64_t sum = (int64_t)(rank + n);
        if (!comm)
            return;
        CHECK_OK(zc_comm_all_reduce(comm, &sum, 1, ZC_INT64, ZC_SUM));
        CHECK_EQ(sum, ranks * (ranks - 1) / 2 + ranks * n);
        zc_comm_close(comm);
        if (n == count / 10) {
            fds = count_fds();
            threads = count_entries("/proc/self/task");
            kib = kib_of("VmRSS");
        }
    }
    CHECK_EQ(count_fds(), fds);
    CHECK_EQ(count_entries("/proc/self/task"), threads);
    if (kib_of("VmRSS") > kib + GROWTH_MOST_KIB)
        CHECK_EQ(kib_of("VmRSS"), kib);
}

static void as_processes(void (*body)(size_t rank, const char *job))
{
    pid_t pids[RANKS_MAX];
    int status[RANKS_MAX];
    char job[64];
    snprintf(job, sizeof job, "load-%d", (int)getpid());
    for (size_t r = 0; r < ranks; r++) {
        pids[r] = fork();
        if (pids[r] == 0) {
            body(r, job);
            _exit(testing_failures != 0);
        }
        CHECK(pids[r] > 0);
    }
    for (size_t r = 0; r < ranks; r++) {
        waitpid(pids[r], &status[r], 0);
        CHECK_EQ(status[r], 0);
    }
}

/* ---- threads ----------------------------------------------------------------------- */

static void *speak_in_thread(void *comm)
{
    collectives(comm, count);
    zc_comm_close(comm);
    return NULL;
}

static void as_threads(void)
{
    zc_comm *comms[RANKS_MAX];
    pthread_t threads[RANKS_MAX];
    zc_status status = zc_comm_open_local(ranks, TIMEOUT_S, comms);
    CHECK_OK(status);
    for (size_t r = 0; status == ZC_OK && r < ranks; r++)
        CHECK_EQ(pthread_create(&threads[r], NULL, speak_in_thread, comms[r]), 0);
    for (size_t r = 0; status == ZC_OK && r < ranks; r++)
        pthread_join(threads[r], NULL);
}

int main(int argc, char **argv)
{
    if (argc != 5 || !(ranks = strtoul(argv[2], NULL, 10)) || ranks > RANKS_MAX) {
        fprintf(stderr, "usage: load processes|threads|cycles RANKS COUNT SEED, with up to %d ranks\n", RANKS_MAX);
        return 2;
    }
    count = strtoul(argv[3], NULL, 10);
    seed = strtoull(argv[4], NULL, 10);
    if (!strcmp(argv[1], "threads"))
        as_threads();
    else
        as_processes(!strcmp(argv[1], "cycles") ? come_and_go : speak);
    DONE();
}
