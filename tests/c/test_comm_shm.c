/*
 * The collectives between processes: the same protocol as between threads, so
 * here mostly what only processes do: memory that comes and goes, ranks that
 * are killed or stopped, forked children, and every system call failing once.
 */
#define _GNU_SOURCE
#include "comm.h"
#include "together.h"

#include <errno.h>
#include <unistd.h>

#define RANKS_MAX 8

static char job[64];
static unsigned jobs_made, body_limit_s = 30;
static uint64_t timeout_ns, start_timeout_ns;

static size_t shared_kib(void)
{
    FILE *file = fopen("/proc/self/smaps_rollup", "r");
    char line[256];
    size_t kib = 0;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "Pss_Shmem: %zu kB", &kib) == 1)
            break;
    if (file)
        fclose(file);
    return kib;
}

static zc_status open_rank(size_t rank, size_t ranks, zc_comm **comm)
{
    shm_comm_config config = {.rank = rank, .ranks = ranks, .job = job, .token = "a secret",
                              .start_timeout_ns = start_timeout_ns, .timeout_ns = timeout_ns};
    return shm_comm_open(&config, comm);
}

/* What a child does; its exit status is the number of failed checks. */
typedef int (*rank_body)(size_t rank, size_t ranks);

static void new_job(void)
{
    snprintf(job, sizeof job, "test-%d-%u", (int)getpid(), ++jobs_made);
}

/* Runs body in `ranks` fresh processes; status[r] as of waitpid. Ranks that are still there at the end are killed. */
static void run_ranks(size_t ranks, rank_body body, unsigned limit_s, int *status)
{
    pid_t pids[RANKS_MAX];
    new_job();
    fflush(stdout);
    fflush(stderr);
    for (size_t r = 0; r < ranks; r++) {
        pids[r] = fork();
        if (pids[r] == 0) {
            alarm(limit_s);
            testing_failures = 0;
            int extra = body(r, ranks);
            _exit(extra ? extra : testing_failures ? 1 : 0);
        }
    }
    wait_for_all(pids, ranks, now_ns() + limit_s * SECOND, status);
}

/* All ranks must end well. */
static void with_ranks(size_t ranks, rank_body body)
{
    int status[RANKS_MAX];
    run_ranks(ranks, body, body_limit_s, status);
    for (size_t r = 0; r < ranks; r++)
        CHECK_EQ(status[r], 0);
}

static int with_comm(size_t rank, size_t ranks, void (*body)(zc_comm *comm))
{
    size_t fds = count_fds();
    zc_comm *comm;
    CHECK_OK(open_rank(rank, ranks, &comm));
    if (!comm)
        return 1;
    body(comm);
    comm_close(comm);
    CHECK_EQ(count_fds(), fds);
    return 0;
}

/* ---- basics -------------------------------------------------------------- */

static float value_of(size_t q, size_t i, unsigned round)
{
    uint64_t state = q * 1000003 + i * 101 + round;
    return testing_float(&state);
}

static void steps(zc_comm *comm)
{
    enum { TAGS = 6, COUNT = 40000 };
    comm_channel *channel;
    comm_region *region;
    comm_ticket tickets[TAGS];
    size_t slice = COUNT * sizeof(float), stride = comm->ranks * slice, wrong = 0;
    uint64_t sum;
    CHECK_OK(comm_channel_open(comm, "engine", TAGS + 2, &channel));
    CHECK_OK(comm_region_alloc(channel, TAGS * stride + 64, 0, &region));
    for (unsigned round = 0; round < 3; round++) {
        for (uint32_t n = 0; n < TAGS; n++) {
            uint32_t t = (n * (comm->rank % 2 ? 5 : 1)) % TAGS;
            float *slices = (float *)((char *)region->base + t * stride);
            for (size_t i = 0; i < comm->ranks * COUNT; i++)
                slices[i] = value_of(comm->rank, i + t, round);
            comm_reduce_args args = {.tag = t, .region = region, .offset_bytes = t * stride,
                                     .to = slices + comm->rank * COUNT, .count = COUNT, .dtype = ZC_FLOAT32};
            CHECK_OK(comm_reduce_scatter(channel, NULL, &args, &tickets[t]));
        }
        for (uint32_t t = 0; t < TAGS; t++)
            CHECK_OK(comm_wait(channel, tickets[t], NULL));
        *(uint64_t *)((char *)region->base + TAGS * stride) = comm->rank + round;
        CHECK_OK(comm_all_reduce_words(channel, NULL, TAGS, region, TAGS * stride, 1, &sum, &tickets[0]));
        CHECK_OK(comm_wait(channel, tickets[0], NULL));
        CHECK_EQ(sum, comm->ranks * round + comm->ranks * (comm->ranks - 1) / 2);
        for (uint32_t t = 0; t < TAGS; t++)
            CHECK_OK(comm_all_gather(channel, NULL, t, region, t * stride, slice, &tickets[t]));
        for (uint32_t t = 0; t < TAGS; t++)
            CHECK_OK(comm_wait(channel, tickets[t], NULL));
        for (uint32_t t = 0; t < TAGS; t++)
            for (size_t i = 0; i < comm->ranks * COUNT; i++) {
                float want = value_of(0, i + t, round);
                for (size_t q = 1; q < comm->ranks; q++)
                    want += value_of(q, i + t, round);
                wrong += ((float *)((char *)region->base + t * stride))[i] != want;
            }
        uint64_t record = comm->rank, records[RANKS_MAX];
        CHECK_OK(comm_exchange(channel, TAGS + 1, "step", &record, records, sizeof record));
        for (size_t q = 0; q < comm->ranks; q++)
            CHECK_EQ(records[q], q);
    }
    CHECK_EQ(wrong, 0);
    comm_region_free(region);
    comm_channel_close(channel);

    double *array = malloc(300000 * sizeof *array);
    for (size_t i = 0; i < 300000; i++)
        array[i] = (double)(i + comm->rank);
    CHECK_OK(comm_array_all_reduce(comm, array, 300000, ZC_FLOAT64, COMM_SUM));
    for (size_t i = 0; i < 300000; i++)
        wrong += array[i] != (double)(comm->ranks * i + comm->ranks * (comm->ranks - 1) / 2);
    CHECK_EQ(wrong, 0);
    CHECK_OK(comm_array_broadcast(comm, array, 300000 * sizeof *array, comm->ranks - 1));
    free(array);
    for (int i = 0; i < 200; i++)
        CHECK_OK(comm_barrier(comm));
}

static int steps_body(size_t rank, size_t ranks)
{
    return with_comm(rank, ranks, steps);
}

static void test_steps(void)
{
    with_ranks(1, steps_body);
    with_ranks(2, steps_body);
    with_ranks(3, steps_body);
    with_ranks(8, steps_body);
}

/* Regions are zero, their pages go back, one copy is one, and a rank may read it after the owner gave it up. */
static void regions(zc_comm *comm)
{
    comm_channel *channel;
    comm_region *region;
    enum { BYTES = 8 << 20 };
    CHECK_OK(comm_channel_open(comm, "regions", 1, &channel));
    size_t before = shared_kib(), wrong = 0;
    for (int round = 0; round < 10; round++) {
        CHECK_OK(comm_region_alloc(channel, BYTES + round * 4096, 0, &region));
        for (size_t i = 0; i < BYTES; i += 64)
            wrong += ((char *)region->base)[i] != 0;
        memset(region->base, 1, BYTES);
        comm_region_free(region);
        CHECK_OK(comm_barrier(comm)); /* now all have let go of all */
    }
    CHECK_EQ(wrong, 0);
    CHECK_OK(comm_region_alloc(channel, 4096, 0, &region)); /* frees what was waiting */
    comm_region_free(region);
    CHECK_OK(comm_barrier(comm));
    CHECK(shared_kib() < before + 4096);

    CHECK_OK(comm_region_alloc(channel, BYTES, COMM_ONE_COPY, &region));
    unsigned char *bytes = region->base;
    bytes[comm->rank * 64] = (unsigned char)(comm->rank + 1);
    CHECK_OK(comm_barrier(comm));
    for (size_t q = 0; q < comm->ranks; q++)
        CHECK_EQ(bytes[q * 64], q + 1);
    if (comm->rank == 0)
        comm_region_free(region);
    CHECK_OK(comm_barrier(comm));
    comm_region *other;
    CHECK_OK(comm_region_alloc(channel, BYTES, 0, &other));
    memset(other->base, 0x77, BYTES);
    CHECK_OK(comm_barrier(comm));
    if (comm->rank != 0) {
        for (size_t q = 0; q < comm->ranks; q++)
            CHECK_EQ(bytes[q * 64], q + 1);
        comm_region_free(region);
    }
    comm_region_free(other);

    CHECK_EQ(comm_region_alloc(channel, (size_t)1 << 46, 0, &region), ZC_ENOMEM);
    CHECK(region == NULL && text_has("70368744181760 bytes"));
    CHECK_OK(comm_barrier(comm)); /* running out of memory does no harm */
    comm_channel_close(channel);
}

static int regions_body(size_t rank, size_t ranks)
{
    return with_comm(rank, ranks, regions);
}

static void test_regions(void)
{
    with_ranks(2, regions_body);
    with_ranks(3, regions_body);
}

/* What a rank writes, others read where it is, also memory that came piece by piece; and gather it elsewhere. */
static void peers(zc_comm *comm)
{
    enum { BYTES = 300000, PIECES = 5 };
    comm_channel *channel;
    comm_region *region;
    comm_ticket ticket;
    unsigned char *to = malloc(comm->ranks * BYTES);
    CHECK_OK(comm_channel_open(comm, "gathers", 2, &channel));
    CHECK_OK(comm_region_alloc(channel, BYTES, COMM_GROWS, &region));
    for (size_t piece = 0; piece < PIECES; piece++) {
        unsigned char *own = (unsigned char *)region->base + piece * (BYTES / PIECES);
        CHECK_OK(comm_region_grow(region, (piece + 1) * (BYTES / PIECES)));
        for (size_t i = 0; i < BYTES / PIECES; i++)
            own[i] = (unsigned char)(comm->rank * 50 + piece * 7 + i);
    }
    CHECK_OK(comm_barrier(comm));
    for (size_t q = 0; q < comm->ranks; q++)
        memcpy(to + q * BYTES, comm_peer(region, q), BYTES);
    for (int turn = 0; turn < 2; turn++) {
        size_t wrong = 0;
        for (size_t q = 0; q < comm->ranks; q++)
            for (size_t k = 0; k < BYTES; k++)
                wrong += to[q * BYTES + k] != (unsigned char)(q * 50 + k / (BYTES / PIECES) * 7 + k % (BYTES / PIECES));
        CHECK_EQ(wrong, 0);
        memset(to, 0, comm->ranks * BYTES);
        CHECK_OK(comm_all_gather_to(channel, NULL, 1, region, 0, BYTES, to, &ticket));
        CHECK_OK(comm_wait(channel, ticket, NULL));
    }
    free(to);
    comm_region_free(region);
    comm_channel_close(channel);
}

static int peers_body(size_t rank, size_t ranks)
{
    return with_comm(rank, ranks, peers);
}

static void test_peers(void)
{
    for (size_t ranks = 1; ranks <= 4; ranks++)
        with_ranks(ranks, peers_body);
}

static void groups(zc_comm *comm)
{
    zc_comm *pair;
    CHECK_OK(comm_split(comm, (int64_t)(comm->rank / 2), &pair));
    int64_t sum = (int64_t)comm->rank;
    CHECK_OK(comm_array_all_reduce(pair, &sum, 1, ZC_INT64, COMM_SUM));
    CHECK_EQ(sum, (comm->rank & ~(size_t)1) * 2 + 1);
    comm_close(pair);
    CHECK_OK(comm_barrier(comm));
}

static int groups_body(size_t rank, size_t ranks)
{
    return with_comm(rank, ranks, groups);
}

static void test_groups(void)
{
    with_ranks(4, groups_body);
}

/* The same job opens, closes and opens again, at once. */
static int again_body(size_t rank, size_t ranks)
{
    size_t fds = count_fds();
    for (int round = 0; round < 20; round++) {
        zc_comm *comm;
        CHECK_OK(open_rank(rank, ranks, &comm));
        if (!comm)
            return 1;
        CHECK_OK(comm_barrier(comm));
        comm_close(comm);
    }
    CHECK_EQ(count_fds(), fds);
    return 0;
}

static void test_open_again(void)
{
    with_ranks(3, again_body);
}

/* ---- what goes wrong ----------------------------------------------------- */

static int killed_body(size_t rank, size_t ranks)
{
    zc_comm *comm;
    CHECK_OK(open_rank(rank, ranks, &comm));
    CHECK_OK(comm_barrier(comm));
    if (rank == 1) {
        pause_us(100000);
        raise(SIGKILL);
    }
    float one = 1;
    uint64_t start = now_ns();
    CHECK_EQ(comm_array_all_reduce(comm, &one, 1, ZC_FLOAT32, COMM_SUM), ZC_EPEERLOST);
    CHECK(now_ns() - start < SECOND);
    CHECK(text_has("rank 1 (pid ") && text_has("is gone") && text_has("all_reduce"));
    CHECK_EQ(comm_barrier(comm), ZC_EPEERLOST);
    comm_close(comm);
    return 0;
}

static void test_killed_rank(void)
{
    for (size_t ranks = 2; ranks <= 4; ranks += 2) {
        int status[RANKS_MAX];
        run_ranks(ranks, killed_body, 20, status);
        for (size_t r = 0; r < ranks; r++)
            if (r == 1)
                CHECK(WIFSIGNALED(status[r]) && WTERMSIG(status[r]) == SIGKILL);
            else
                CHECK_EQ(status[r], 0);
    }
}

/* A rank that exits in order right after its last call has not let anybody down. */
static int leaves_body(size_t rank, size_t ranks)
{
    zc_comm *comm;
    CHECK_OK(open_rank(rank, ranks, &comm));
    uint64_t record = rank, records[RANKS_MAX];
    comm_channel *channel;
    CHECK_OK(comm_channel_open(comm, "leaves", 1, &channel));
    if (rank == 0)
        pause_us(100000);
    CHECK_OK(comm_exchange(channel, 0, "last words", &record, records, sizeof record));
    CHECK_EQ(records[ranks - 1], ranks - 1);
    return 0; /* _exit without closing anything */
}

static int early_leaver_body(size_t rank, size_t ranks)
{
    zc_comm *comm;
    comm_channel *channel;
    comm_region *region;
    comm_ticket ticket;
    CHECK_OK(open_rank(rank, ranks, &comm));
    CHECK_OK(comm_channel_open(comm, "early", 1, &channel));
    CHECK_OK(comm_region_alloc(channel, 4096, 0, &region));
    if (rank == 0)
        pause_us(150000);
    CHECK_OK(comm_all_gather(channel, NULL, 0, region, 0, 64, &ticket));
    if (rank == 1)
        return 0; /* posted, never done: it may have died in the middle of reading rank 0's memory */
    CHECK_EQ(comm_wait(channel, ticket, NULL), ZC_EPEERLOST);
    return 0;
}

static void test_leaving(void)
{
    with_ranks(2, leaves_body);
    with_ranks(4, leaves_body);
    with_ranks(2, early_leaver_body);
}

static int stopped_body(size_t rank, size_t ranks)
{
    zc_comm *comm;
    CHECK_OK(open_rank(rank, ranks, &comm));
    CHECK_OK(comm_barrier(comm));
    if (rank == 1) {
        raise(SIGSTOP);
        return 0;
    }
    uint64_t start = now_ns();
    CHECK_EQ(comm_barrier(comm), ZC_ETIMEOUT);
    CHECK(now_ns() - start < 3 * SECOND);
    CHECK(text_has("missing: 1") && text_has("barrier"));
    comm_close(comm);
    return 0;
}

static void test_stopped_rank(void)
{
    int status[2];
    timeout_ns = SECOND / 2;
    run_ranks(2, stopped_body, 2, status);
    timeout_ns = 20 * SECOND;
    CHECK_EQ(status[0], 0);
    CHECK(WIFSIGNALED(status[1]) && WTERMSIG(status[1]) == SIGKILL);
}

static int fork_body(size_t rank, size_t ranks)
{
    zc_comm *comm;
    comm_channel *channel;
    comm_region *region;
    CHECK_OK(open_rank(rank, ranks, &comm));
    CHECK_OK(comm_channel_open(comm, "fork", 1, &channel));
    CHECK_OK(comm_region_alloc(channel, 4096, 0, &region));
    ((int *)region->base)[0] = 41;
    pid_t child = fork();
    if (child == 0) {
        CHECK_EQ(((int *)region->base)[0], 41);
        CHECK_EQ(comm_barrier(comm), ZC_ESTATE);
        CHECK(text_has("forked"));
        comm_region_free(region);
        comm_channel_close(channel);
        comm_close(comm); /* must not close the parent's */
        _exit(testing_failures ? 1 : 0);
    }
    int status;
    waitpid(child, &status, 0);
    CHECK_EQ(status, 0);
    CHECK_OK(comm_barrier(comm));
    comm_region_free(region);
    comm_channel_close(channel);
    comm_close(comm);
    return 0;
}

static void test_forked_child(void)
{
    with_ranks(2, fork_body);
}

static int diverged_body(size_t rank, size_t ranks)
{
    zc_comm *comm;
    comm_channel *channel;
    CHECK_OK(open_rank(rank, ranks, &comm));
    CHECK_OK(comm_channel_open(comm, "steps", 1, &channel));
    zc_status status = rank == 0 ? comm_barrier(comm) : comm_exchange(channel, 0, "step", NULL, NULL, 0);
    CHECK_EQ(status, ZC_EMISMATCH);
    CHECK(text_has("rank 0") && text_has("'barrier'") && text_has("rank 1") && text_has("'step'"));
    comm_channel_close(channel);
    comm_close(comm);
    return 0;
}

static void test_diverged_ranks(void)
{
    with_ranks(2, diverged_body);
}

/* Processes that declare the same, then something else, in the whole and in a group of it. */
static int declared_body(size_t rank, size_t ranks)
{
    zc_comm *comm, *pair;
    char text[32];
    CHECK_OK(open_rank(rank, ranks, &comm));
    CHECK_OK(comm_split(comm, (int64_t)(rank / 2), &pair));
    for (uint64_t number = 1; number <= 1000; number++) {
        CHECK_OK(comm_declare(comm, 0, number, "the same"));
        CHECK_OK(comm_declare(pair, 0, number + rank / 2, "the same in the pair"));
    }
    CHECK_OK(comm_barrier(comm));
    CHECK_EQ(comm_behind(comm, 0, 1000, text, sizeof text), 0);
    CHECK_EQ(comm_behind(pair, 0, 1001, text, sizeof text), 2);
    CHECK(strcmp(text, rank < 2 ? "0, 1" : "2, 3") == 0);
    CHECK_EQ(comm_behind(pair, 0, 1001, text, 4), 2); /* no room for the second, and none that is cut off */
    CHECK(strcmp(text, rank < 2 ? "0" : "2") == 0);
    CHECK_OK(comm_barrier(comm));
    zc_status status = comm_declare(pair, 0, rank == 3, rank == 3 ? "odd" : "even");
    if (status == ZC_OK)
        status = comm_barrier(pair);
    CHECK_EQ(status, rank < 2 ? ZC_OK : ZC_EMISMATCH);
    CHECK(rank < 2 || (text_has("rank 3 comes to \"odd\"") && text_has("rank 2 comes to \"even\"")));
    CHECK_OK(comm_barrier(comm)); /* only that pair has failed */
    comm_close(pair);
    comm_close(comm);
    return 0;
}

static void test_declarations(void)
{
    with_ranks(4, declared_body);
}

/* ---- every allocation and system call fails once -------------------------- */

#define EXIT_HIT 40  /* the fault was met, and nothing else was wrong */
#define EXIT_LATE 41 /* it was not, but the ranks missed each other: too little time on a busy machine */

static long fault_number;
static size_t fault_rank;

static int walk_body(size_t rank, size_t ranks)
{
    size_t fds = count_fds();
    zc_comm *comm = NULL, *half = NULL;
    comm_channel *channel = NULL;
    comm_region *region = NULL;
    float array[4] = {1, 2, 3, 4};
    zc_fault_arm(rank == fault_rank ? fault_number : 0);
    zc_status status = open_rank(rank, ranks, &comm);
    if (status == ZC_OK)
        status = comm_channel_open(comm, "walk", 2, &channel);
    if (status == ZC_OK)
        status = comm_region_alloc(channel, 8192, 0, &region);
    if (status == ZC_OK)
        status = comm_split(comm, 1, &half);
    if (status == ZC_OK)
        status = comm_array_all_reduce(half, array, 4, ZC_FLOAT32, COMM_SUM);
    if (status != ZC_OK)
        CHECK(zc_last_error()[0] != 0);
    else
        CHECK(array[3] == 4.0f * (float)ranks);
    comm_close(half);
    comm_region_free(region);
    comm_channel_close(channel);
    comm_close(comm);
    CHECK_EQ(count_fds(), fds);
    if (testing_failures)
        fprintf(stderr, "rank %zu, fault %ld on rank %zu\n", rank, fault_number, fault_rank);
    int hit = rank == fault_rank && zc_fault_count() >= fault_number;
    return testing_failures ? 1 : hit ? EXIT_HIT : status != ZC_OK && rank == fault_rank ? EXIT_LATE : 0;
}

static void test_faults(void)
{
    timeout_ns = 2 * SECOND;
    for (fault_rank = 0; fault_rank < 2; fault_rank++)
        for (fault_number = 1;; fault_number++) {
            int status[2], code = EXIT_LATE;
            for (int attempt = 0; attempt < 2 && code == EXIT_LATE; attempt++) {
                start_timeout_ns = attempt ? 4 * SECOND : SECOND / 10;
                run_ranks(2, walk_body, 15, status);
                code = WIFEXITED(status[fault_rank]) ? WEXITSTATUS(status[fault_rank]) : -1;
                CHECK_EQ(status[1 - fault_rank], 0);
            }
            if (code == 0)
                break;
            CHECK_EQ(code, EXIT_HIT);
            if (fault_number > 500 || testing_failures > 20) {
                CHECK(0);
                break;
            }
        }
    start_timeout_ns = 10 * SECOND;
    timeout_ns = 20 * SECOND;
}

/* ---- not in every run ----------------------------------------------------- */

static void large(zc_comm *comm)
{
    size_t count = ((size_t)2200 << 20) + 3, wrong = 0;
    unsigned char *bytes = malloc(count);
    for (size_t i = 0; i < count; i++)
        bytes[i] = (unsigned char)((i >> 20) + comm->rank);
    CHECK_OK(comm_array_all_reduce(comm, bytes, count, ZC_UINT8, COMM_SUM));
    for (size_t i = 0; i < count; i++)
        wrong += bytes[i] != (unsigned char)(2 * (i >> 20) + 1);
    CHECK_EQ(wrong, 0);
    CHECK_OK(comm_array_broadcast(comm, bytes, count, 1));
    free(bytes);

    comm_channel *channel;
    comm_region *region;
    comm_ticket ticket;
    size_t slice = ((size_t)1100 << 20) / 4;
    CHECK_OK(comm_channel_open(comm, "large", 1, &channel));
    CHECK_OK(comm_region_alloc(channel, 2 * slice * 4, 0, &region));
    float *values = region->base;
    for (size_t i = 0; i < 2 * slice; i++)
        values[i] = (float)((i >> 16) & 1023) + (float)comm->rank;
    comm_reduce_args args = {.region = region, .to = values + comm->rank * slice, .count = slice, .dtype = ZC_FLOAT32};
    CHECK_OK(comm_reduce_scatter(channel, NULL, &args, &ticket));
    CHECK_OK(comm_wait(channel, ticket, NULL));
    CHECK_OK(comm_all_gather(channel, NULL, 0, region, 0, slice * 4, &ticket));
    CHECK_OK(comm_wait(channel, ticket, NULL));
    for (size_t i = 0; i < 2 * slice; i++)
        wrong += values[i] != 2.0f * (float)((i >> 16) & 1023) + 1;
    CHECK_EQ(wrong, 0);
    comm_region_free(region);
    comm_channel_close(channel);
}

static int large_body(size_t rank, size_t ranks)
{
    return with_comm(rank, ranks, large);
}

static void bench(zc_comm *comm)
{
    enum { TURNS = 20000 };
    comm_channel *channel;
    CHECK_OK(comm_channel_open(comm, "bench", 1, &channel));
    for (int repeat = 0; repeat < 3; repeat++) {
        CHECK_OK(comm_barrier(comm));
        uint64_t start = now_ns();
        for (int i = 0; i < TURNS; i++)
            CHECK_OK(comm_barrier(comm));
        uint64_t middle = now_ns(), record[4] = {0}, records[4 * RANKS_MAX];
        for (int i = 0; i < TURNS; i++)
            CHECK_OK(comm_exchange(channel, 0, "bench", record, records, sizeof record));
        if (comm->rank == 0)
            printf("%zu processes: barrier %.3f us, exchange of 32 bytes %.3f us\n", comm->ranks,
                   (double)(middle - start) / TURNS * 1e-3, (double)(now_ns() - middle) / TURNS * 1e-3);
        fflush(stdout);
    }
    comm_channel_close(channel);
}

static int bench_body(size_t rank, size_t ranks)
{
    return with_comm(rank, ranks, bench);
}

int main(int argc, char **argv)
{
    timeout_ns = 20 * SECOND;
    start_timeout_ns = 10 * SECOND;
    if (argc > 1 && !strcmp(argv[1], "bench")) {
        with_ranks(2, bench_body);
        with_ranks(8, bench_body);
        DONE();
    }
    if (argc > 1 && !strcmp(argv[1], "long")) {
        body_limit_s = 300;
        timeout_ns = 300 * SECOND;
        with_ranks(2, large_body);
        DONE();
    }
    RUN(test_steps);
    RUN(test_regions);
    RUN(test_peers);
    RUN(test_groups);
    RUN(test_open_again);
    RUN(test_killed_rank);
    RUN(test_leaving);
    RUN(test_stopped_rank);
    RUN(test_forked_child);
    RUN(test_diverged_ranks);
    RUN(test_declarations);
    RUN(test_faults);
    DONE();
}
