/*
 * The communicator of ranks on several hosts: ranks as threads and as processes,
 * over socket pairs and over TCP; ranks that disagree, die, are silent, or talk
 * nonsense; every allocation and system call failing once.
 */
#define _GNU_SOURCE
#include "comm.h"
#include "hub_comm.h"
#include "hub_wire.h"
#include "together.h"

#include <arpa/inet.h>
#include <errno.h>
#include <math.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <unistd.h>

#define RANKS_MAX 8
#define SHORT_BEAT (SECOND / 20) /* silence after half a second */

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define SCALE 10
#else
#define SCALE 1
#endif

static void *do_nothing(void *context)
{
    return context;
}

/* Sanitizers have threads of their own, which come with the first of the program's. */
static void have_threads(void)
{
    pthread_t thread;
    pthread_create(&thread, NULL, do_nothing, NULL);
    pthread_join(thread, NULL);
}

/* A thread that was joined may still be listed. */
static void check_threads(size_t before)
{
    for (int turn = 0; turn < 200 && count_entries("/proc/self/task") > before; turn++)
        pause_us(5000);
    CHECK_EQ(count_entries("/proc/self/task"), before);
}

/* ---- connections ------------------------------------------------------------ */

static int use_tcp;
static uint64_t beat_ns = SECOND, open_timeout_ns = 20 * SECOND;

static void tcp_pair(int pair[2])
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t bytes = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    CHECK_EQ(bind(listener, (struct sockaddr *)&address, sizeof address), 0);
    CHECK_EQ(listen(listener, 1), 0);
    CHECK_EQ(getsockname(listener, (struct sockaddr *)&address, &bytes), 0);
    pair[1] = socket(AF_INET, SOCK_STREAM, 0);
    CHECK_EQ(connect(pair[1], (struct sockaddr *)&address, sizeof address), 0);
    pair[0] = accept(listener, NULL, NULL);
    close(listener);
}

/* hub[q]: rank 0's end of the connection to rank q, guest[q]: that rank's. */
typedef struct wires {
    int hub[RANKS_MAX], guest[RANKS_MAX];
} wires;

static void wires_make(wires *w, size_t ranks)
{
    w->hub[0] = w->guest[0] = -1;
    for (size_t q = 1; q < ranks; q++) {
        int pair[2];
        if (use_tcp)
            tcp_pair(pair);
        else
            CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
        w->hub[q] = pair[0];
        w->guest[q] = pair[1];
    }
}

static zc_status open_rank(const wires *w, size_t rank, size_t ranks, zc_comm **comm)
{
    size_t hosts[RANKS_MAX];
    for (size_t q = 0; q < ranks; q++)
        hosts[q] = q / 2; /* two on each */
    hub_comm_config config = {.rank = rank, .ranks = ranks, .hosts = hosts, .sockets = rank ? &w->guest[rank] : w->hub,
                              .timeout_ns = open_timeout_ns, .beat_ns = beat_ns};
    return hub_comm_open(&config, comm);
}

/* ---- ranks as threads --------------------------------------------------------- */

typedef struct rank_state {
    zc_comm *comm;
    size_t rank, ranks;
    void (*body)(struct rank_state *);
    uint64_t timeout_ns, random;
    const wires *wires;
} rank_state;

static void *run_rank(void *argument)
{
    rank_state *s = argument;
    zc_status status = open_rank(s->wires, s->rank, s->ranks, &s->comm);
    CHECK_OK(status);
    if (status != ZC_OK)
        return NULL;
    s->comm->timeout_ns = s->timeout_ns;
    s->body(s);
    comm_close(s->comm);
    return NULL;
}

static void with_ranks(size_t ranks, uint64_t timeout_ns, void (*body)(rank_state *))
{
    rank_state states[RANKS_MAX];
    pthread_t threads[RANKS_MAX];
    wires w;
    size_t fds = count_fds(), tasks = count_entries("/proc/self/task");
    wires_make(&w, ranks);
    for (size_t r = 0; r < ranks; r++) {
        states[r] = (rank_state){NULL, r, ranks, body, timeout_ns, 1000 + r, &w};
        pthread_create(&threads[r], NULL, run_rank, &states[r]);
    }
    for (size_t r = 0; r < ranks; r++)
        pthread_join(threads[r], NULL);
    CHECK_EQ(count_fds(), fds);
    check_threads(tasks);
}

static void with_all_sizes(void (*body)(rank_state *))
{
    static const size_t sizes[] = {1, 2, 3, 8};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        with_ranks(sizes[i], 20 * SECOND, body);
}

/* Every call of a group that has failed returns the reason. */
static void after_failure(rank_state *s, zc_status status)
{
    float one = 1;
    zc_comm *half;
    CHECK_EQ(comm_barrier(s->comm), status);
    CHECK_EQ(comm_array_all_reduce(s->comm, &one, 1, ZC_FLOAT32, COMM_SUM), status);
    CHECK_EQ(comm_progress(s->comm), status);
    CHECK_EQ(comm_watch(s->comm, "nothing"), status);
    CHECK_EQ(comm_split(s->comm, 0, &half), status);
    CHECK_EQ(comm_declare(s->comm, 0, 1, "after all"), status);
}

/* ---- what goes well -------------------------------------------------------------- */

static void arguments_body(rank_state *s)
{
    comm_channel *channel;
    comm_region *region = NULL;
    comm_ticket ticket;
    int done;
    CHECK(!strcmp(s->comm->ops->name, "tcp") && !s->comm->ops->device && !s->comm->ops->gpu);
    CHECK(!s->comm->ops->ordered && s->comm->in_rank_order);
    CHECK_EQ(s->comm->rank, s->rank);
    CHECK_EQ(s->comm->ranks, s->ranks);
    CHECK_EQ(s->comm->local_ranks, s->rank / 2 * 2 + 1 < s->ranks ? 2 : 1);
    CHECK_EQ(comm_channel_open(s->comm, "too many", 1u << 20, &channel), ZC_EINVAL);
    CHECK_OK(comm_channel_open(s->comm, "one", 2, &channel));
    CHECK_EQ(comm_region_alloc(channel, 64, 0, &region), ZC_EINVAL);
    CHECK(!region && text_has("on GPUs only") && text_has("move the model to GPUs"));
    CHECK_EQ(comm_exchange(channel, 2, "step", NULL, NULL, 0), ZC_EINVAL);
    CHECK_EQ(comm_exchange(channel, 0, "step", NULL, NULL, COMM_EXCHANGE_BYTES + 1), ZC_EINVAL);
    CHECK_EQ(comm_all_gather(channel, NULL, 0, NULL, 0, 4, &ticket), ZC_EINVAL);
    CHECK_EQ(comm_wait(channel, 12345, NULL), ZC_EINVAL);
    CHECK_EQ(comm_test(channel, 12345, NULL, &done), ZC_EINVAL);
    CHECK_EQ(comm_wait_some(channel, 12345, NULL, 1, &done), ZC_EINVAL);
    CHECK_OK(comm_wait(channel, 0, NULL));
    comm_channel_close(channel);
    CHECK_EQ(comm_declare(s->comm, COMM_LINES, 1, "no line"), ZC_EINVAL);
    CHECK_OK(comm_watch(s->comm, "nothing"));
    CHECK_OK(comm_barrier(s->comm));
}

static void test_arguments(void)
{
    zc_comm *comm;
    size_t host = 0;
    hub_comm_config config = {.rank = 1, .ranks = 1, .hosts = &host, .timeout_ns = SECOND};
    CHECK_EQ(hub_comm_open(&config, &comm), ZC_EINVAL);
    config.ranks = HUB_RANKS_MAX + 1;
    CHECK_EQ(hub_comm_open(&config, &comm), ZC_EINVAL);
    with_all_sizes(arguments_body);
}

static void exchange_body(rank_state *s)
{
    comm_channel *channel, *other;
    unsigned char record[COMM_EXCHANGE_BYTES], records[RANKS_MAX * COMM_EXCHANGE_BYTES];
    CHECK_OK(comm_channel_open(s->comm, "first", 3, &channel));
    CHECK_OK(comm_channel_open(s->comm, "second", 1, &other));
    for (unsigned round = 0; round < 300 / SCALE; round++) {
        size_t wrong = 0, bytes = round % 7 == 0 ? COMM_EXCHANGE_BYTES : round % 40;
        if (testing_random(&s->random) % 20 == 0)
            pause_us((unsigned)(testing_random(&s->random) % 300));
        memset(record, (int)(s->rank * 16 + round % 16), sizeof record);
        CHECK_OK(comm_exchange(round % 3 ? channel : other, round % 3 ? round % 3 : 0, "step", record, records, bytes));
        for (size_t q = 0; q < s->ranks; q++)
            for (size_t i = 0; i < bytes; i++)
                wrong += records[q * bytes + i] != q * 16 + round % 16;
        CHECK_EQ(wrong, 0);
        if (round % 10 == 0)
            CHECK_OK(comm_barrier(s->comm));
    }
    comm_channel_close(other);
    comm_channel_close(channel);
}

static void test_exchange(void)
{
    with_all_sizes(exchange_body);
    use_tcp = 1;
    with_ranks(3, 20 * SECOND, exchange_body);
    use_tcp = 0;
}

typedef struct second_thread {
    comm_channel *channel;
    uint32_t tag;
    int same;
} second_thread;

static void *exchange_often(void *argument)
{
    second_thread *t = argument;
    for (uint64_t i = 0; i < 300 / SCALE; i++) {
        uint64_t records[RANKS_MAX];
        zc_status status = comm_exchange(t->channel, t->tag, "thread", &i, records, sizeof i);
        CHECK_OK(status);
        if (status != ZC_OK)
            break;
        if (!t->same)
            CHECK_EQ(records[0], i);
    }
    return NULL;
}

/* Three threads, each on a tag of its own, or all on one, where they come one after the other. */
static void exchange_in_threads(rank_state *s, int same)
{
    comm_channel *channel;
    pthread_t threads[3];
    second_thread args[3];
    CHECK_OK(comm_channel_open(s->comm, "threads", 3, &channel));
    for (uint32_t t = 0; t < 3; t++) {
        args[t] = (second_thread){channel, same ? 0 : (t + (uint32_t)s->rank) % 3, same};
        pthread_create(&threads[t], NULL, exchange_often, &args[t]);
    }
    for (unsigned i = 0; i < 200 / SCALE; i++)
        CHECK_OK(comm_barrier(s->comm));
    for (uint32_t t = 0; t < 3; t++)
        pthread_join(threads[t], NULL);
    comm_channel_close(channel);
}

static void threads_body(rank_state *s)
{
    exchange_in_threads(s, 0);
    exchange_in_threads(s, 1);
}

static void test_several_threads_a_rank(void)
{
    with_ranks(2, 20 * SECOND, threads_body);
    with_ranks(3, 20 * SECOND, threads_body);
}

/* ---- arrays --------------------------------------------------------------------------- */

/* Rank q's element i: sums of floats are not exact, products stay small. */
static double value_of(size_t q, size_t i, zc_dtype dtype, comm_op op)
{
    uint64_t state = q * 1000003 + i * 101 + (uint64_t)op;
    if (dtype <= ZC_FLOAT16)
        return op == COMM_PROD ? 1 + 0.25 * testing_float(&state) : testing_float(&state);
    return op == COMM_PROD ? 1 + (double)(testing_random(&state) % 8 == 0) : (double)(testing_random(&state) % 30);
}

/* What a plain loop over the ranks gives: 16-bit types in fp32, rounded once. */
static double expected(size_t ranks, size_t i, zc_dtype dtype, comm_op op)
{
    unsigned char element[8];
    double wide = 0;
    float narrow = 0;
    for (size_t q = 0; q < ranks; q++) {
        put(element, 0, dtype, value_of(q, i, dtype, op));
        double value = get(element, 0, dtype);
        float small = (float)value;
        wide = !q ? value : op == COMM_SUM ? wide + value : op == COMM_PROD ? wide * value
                          : op == COMM_MAX ? fmax(wide, value) : fmin(wide, value);
        narrow = !q ? small : op == COMM_SUM ? narrow + small : op == COMM_PROD ? narrow * small
                            : op == COMM_MAX ? fmaxf(narrow, small) : fminf(narrow, small);
    }
    put(element, 0, dtype, dtype == ZC_FLOAT32 || dtype == ZC_BFLOAT16 || dtype == ZC_FLOAT16 ? narrow : wide);
    return get(element, 0, dtype);
}

static void reduce_one(rank_state *s, size_t count, zc_dtype dtype, comm_op op)
{
    size_t elem = zc_dtype_bytes(dtype), all = s->ranks * count, wrong = 0;
    char *array = malloc(all * elem + 8), *to = malloc(count * elem + 8);
    for (size_t i = 0; i < all; i++)
        put(array, i, dtype, value_of(s->rank, i, dtype, op));
    memcpy(to, array, count * elem);
    CHECK_OK(comm_array_all_reduce(s->comm, to, count, dtype, op));
    for (size_t i = 0; i < count; i++)
        wrong += get(to, i, dtype) != expected(s->ranks, i, dtype, op);
    CHECK_EQ(wrong, 0);
    CHECK_OK(comm_array_reduce_scatter(s->comm, array, to, count, dtype, op));
    for (size_t i = 0; i < count; i++)
        wrong += get(to, i, dtype) != expected(s->ranks, s->rank * count + i, dtype, op);
    CHECK_EQ(wrong, 0);
    /* over a slice of the input */
    char *slice = array + (s->ranks - 1 - s->rank) * count * elem;
    CHECK_OK(comm_array_reduce_scatter(s->comm, array, slice, count, dtype, op));
    CHECK(!count || !memcmp(slice, to, count * elem));
    free(array);
    free(to);
}

static void gather_one(rank_state *s, size_t bytes)
{
    size_t wrong = 0, root = bytes % s->ranks;
    unsigned char *own = malloc(bytes + 1), *all = malloc(s->ranks * bytes + 1);
    for (size_t i = 0; i < bytes; i++)
        own[i] = (unsigned char)(i * 7 + s->rank * 31);
    CHECK_OK(comm_array_all_gather(s->comm, own, all, bytes));
    for (size_t i = 0; i < s->ranks * bytes; i++)
        wrong += all[i] != (unsigned char)(i % bytes * 7 + i / bytes * 31);
    memset(all, 0xaa, s->ranks * bytes);
    memcpy(all + s->rank * bytes, own, bytes);
    CHECK_OK(comm_array_all_gather(s->comm, all + s->rank * bytes, all, bytes));
    for (size_t i = 0; i < s->ranks * bytes; i++)
        wrong += all[i] != (unsigned char)(i % bytes * 7 + i / bytes * 31);
    CHECK_OK(comm_array_broadcast(s->comm, own, bytes, root));
    for (size_t i = 0; i < bytes; i++)
        wrong += own[i] != (unsigned char)(i * 7 + root * 31);
    CHECK_EQ(wrong, 0);
    free(own);
    free(all);
}

static void arrays_body(rank_state *s)
{
    static const size_t counts[] = {0, 1, 1003};
    static const size_t bytes[] = {0, 1, 4099, 1000001};
    for (int dtype = 0; dtype < ZC_DTYPE_COUNT; dtype++)
        for (int op = 0; op < 4; op++)
            for (size_t c = 0; c < 3; c++)
                reduce_one(s, counts[c], (zc_dtype)dtype, (comm_op)op);
    reduce_one(s, 70001, ZC_FLOAT32, COMM_SUM); /* in several parts */
    reduce_one(s, 40001, ZC_FLOAT64, COMM_SUM);
    reduce_one(s, 140001 / SCALE, ZC_BFLOAT16, COMM_SUM);
    for (size_t c = 0; c < 4; c++)
        gather_one(s, bytes[c]);
}

static void test_arrays(void)
{
    with_all_sizes(arrays_body);
}

/* ---- groups ----------------------------------------------------------------------------- */

static void split_body(rank_state *s)
{
    zc_comm *half, *again, *none, *alone;
    CHECK_OK(comm_split(s->comm, (int64_t)(s->rank % 2), &half));
    CHECK_EQ(half->rank, s->rank / 2);
    CHECK_EQ(half->ranks, (s->ranks + 1 - s->rank % 2) / 2);
    CHECK_EQ(half->local_ranks, 1);
    int64_t sum = (int64_t)s->rank, want = 0;
    CHECK_OK(comm_array_all_reduce(half, &sum, 1, ZC_INT64, COMM_SUM));
    for (size_t q = s->rank % 2; q < s->ranks; q += 2)
        want += (int64_t)q;
    CHECK_EQ(sum, want);

    comm_channel *wide, *narrow;
    CHECK_OK(comm_split(half, 0, &again));
    CHECK_OK(comm_channel_open(s->comm, "wide", 1, &wide));
    CHECK_OK(comm_channel_open(again, "narrow", 1, &narrow));
    for (uint64_t round = 0; round < 100 / SCALE; round++) {
        uint64_t record = s->rank + round, records[RANKS_MAX];
        CHECK_OK(comm_exchange(wide, 0, "wide", &record, records, sizeof record));
        for (size_t q = 0; q < s->ranks; q++)
            CHECK_EQ(records[q], q + round);
        CHECK_OK(comm_exchange(narrow, 0, "narrow", &record, records, sizeof record));
        for (size_t q = 0; q < again->ranks; q++)
            CHECK_EQ(records[q], 2 * q + s->rank % 2 + round);
    }
    comm_channel_close(narrow);
    comm_channel_close(wide);

    CHECK_OK(comm_split(s->comm, s->rank == 0 ? 5 : -1, &none));
    CHECK_EQ(none != NULL, s->rank == 0);
    CHECK_OK(comm_split(s->comm, (int64_t)s->rank, &alone));
    CHECK_EQ(alone->ranks, 1);
    CHECK_OK(comm_barrier(alone));
    CHECK_OK(comm_declare(alone, 0, 5, "alone"));
    comm_close(alone);
    comm_close(none);
    comm_close(half);
    CHECK_OK(comm_barrier(again)); /* outlives the group it was split from */
    comm_close(again);
    CHECK_OK(comm_barrier(s->comm));
}

static void test_split(void)
{
    with_all_sizes(split_body);
}

/* A group of the others goes on while rank 0, where the hub is, has closed; and closing waits for nobody too long. */
static void rank_0_first_body(rank_state *s)
{
    zc_comm *others;
    CHECK_OK(comm_split(s->comm, s->rank ? 1 : -1, &others));
    if (s->rank == 0)
        return;
    for (int i = 0; i < 20; i++) {
        CHECK_OK(comm_barrier(others));
        pause_us(1000);
    }
    comm_channel *channel;
    CHECK_OK(comm_channel_open(others, "last", 1, &channel));
    comm_close(others); /* before its channel */
    comm_channel_close(channel);
}

static void test_rank_0_closes_first(void)
{
    with_ranks(3, 20 * SECOND, rank_0_first_body);
}

/* ---- declarations ------------------------------------------------------------------------- */

static const char *word(char *text, unsigned number)
{
    sprintf(text, "deed %u", number);
    return text;
}

static void declare_body(rank_state *s)
{
    char text[32], list[64];
    if (s->rank == 0) /* the others are far behind, then pass */
        for (unsigned k = 1; k <= 1000; k++)
            CHECK_OK(comm_declare(s->comm, 1, k * 7, word(text, k)));
    CHECK_OK(comm_barrier(s->comm));
    if (s->rank == s->ranks - 1 && s->ranks > 2) {
        CHECK_EQ(comm_behind(s->comm, 1, 1000, list, sizeof list), s->ranks - 1);
        CHECK(!strncmp(list, "1, 2", 4));
        CHECK_EQ(comm_behind(s->comm, 1, 0, list, sizeof list), 0);
        CHECK_EQ(comm_behind(s->comm, 0, 1, list, sizeof list), s->ranks);
    }
    CHECK_OK(comm_barrier(s->comm));
    if (s->rank)
        for (unsigned k = 1; k <= 1000; k++)
            CHECK_OK(comm_declare(s->comm, 1, k * 7, word(text, k)));
    for (unsigned k = 1; k <= 500; k++)
        for (uint32_t line = 0; line < COMM_LINES; line++)
            CHECK_OK(comm_declare(s->comm, line, (k + line) % 10, "again"));
    CHECK_OK(comm_barrier(s->comm));
    CHECK_EQ(comm_behind(s->comm, 1, 1500, list, sizeof list), 0);
    CHECK(!list[0]);
    CHECK_OK(comm_barrier(s->comm));
}

static unsigned ahead, different; /* number `different` of rank 1 is another */

static void differ_body(rank_state *s)
{
    char text[32];
    zc_status status = ZC_OK;
    if (s->rank != 1)
        for (unsigned k = 1; k <= ahead && status == ZC_OK; k++)
            status = comm_declare(s->comm, COMM_LINE_ENGINE, k, word(text, k));
    CHECK_OK(status);
    CHECK_OK(comm_barrier(s->comm));
    if (s->rank == 1)
        for (unsigned k = 1; k <= ahead && status == ZC_OK; k++)
            status = comm_declare(s->comm, COMM_LINE_ENGINE, k == different ? 0 : k,
                             k == different ? "misdeed" : word(text, k));
    CHECK_EQ(comm_barrier(s->comm), ZC_EMISMATCH);
    if (different + 4000 > ahead)
        CHECK(text_has("rank 1 did 'misdeed'") && text_has(word(text, different)) && text_has("number"));
    else
        CHECK(text_has("rank 1 did 'deed ") && text_has("before that differed"));
    after_failure(s, ZC_EMISMATCH);
}

static void test_declare(void)
{
    with_ranks(1, 20 * SECOND, declare_body);
    with_ranks(2, 20 * SECOND, declare_body);
    with_ranks(3, 20 * SECOND, declare_body);
    ahead = different = 1;
    with_ranks(2, 20 * SECOND, differ_body);
    ahead = 1000;
    different = 3;
    with_ranks(3, 20 * SECOND, differ_body);
    different = 1000;
    with_ranks(2, 20 * SECOND, differ_body);
    ahead = 10000; /* more than the hub keeps */
    different = 17;
    with_ranks(3, 20 * SECOND, differ_body);
}

/* ---- ranks that disagree --------------------------------------------------------------------- */

static void mismatch_array_body(rank_state *s)
{
    float array[8] = {0};
    CHECK_EQ(comm_array_all_reduce(s->comm, array, s->rank == 1 ? 7 : 8, ZC_FLOAT32, COMM_SUM), ZC_EMISMATCH);
    CHECK(text_has("all_reduce(7 elements of float32, sum)") && text_has("all_reduce(8 elements of float32, sum)") &&
          text_has("rank 1 called"));
    after_failure(s, ZC_EMISMATCH);
}

static void mismatch_dtype_body(rank_state *s)
{
    float array[8] = {0};
    CHECK_EQ(comm_array_all_reduce(s->comm, array, 8, s->rank ? ZC_FLOAT32 : ZC_INT32, s->rank ? COMM_SUM : COMM_MAX),
             ZC_EMISMATCH);
    CHECK(text_has("float32, sum") && text_has("int32, max"));
}

static void mismatch_kind_body(rank_state *s)
{
    float array[8] = {0};
    CHECK_EQ(s->rank == 0 ? comm_barrier(s->comm) : comm_array_broadcast(s->comm, array, 32, 0), ZC_EMISMATCH);
    CHECK(text_has("barrier()") && text_has("broadcast(32 bytes from rank 0)"));
}

static void mismatch_root_body(rank_state *s)
{
    float array[8] = {0};
    CHECK_EQ(comm_array_broadcast(s->comm, array, 32, s->rank), ZC_EMISMATCH);
    CHECK(text_has("from rank 0") && text_has("from rank 1"));
}

static void mismatch_exchange_body(rank_state *s)
{
    comm_channel *channel;
    char record[64] = {0}, records[64 * RANKS_MAX];
    CHECK_OK(comm_channel_open(s->comm, "engine", 3, &channel));
    CHECK_EQ(comm_exchange(channel, 2, s->rank ? "step" : "backward", record, records, s->rank ? 24 : 32),
             ZC_EMISMATCH);
    CHECK(text_has("'backward' (32 bytes)") && text_has("'step' (24 bytes)") && text_has("rank 0") &&
          text_has("tag 2 of channel 'engine'")); /* the other side is rank 1 or 2, whoever came first */
    after_failure(s, ZC_EMISMATCH);
    comm_channel_close(channel);
}

static void mismatch_channel_body(rank_state *s)
{
    comm_channel *channel;
    CHECK_EQ(comm_channel_open(s->comm, s->rank ? "b" : "a", 1, &channel), ZC_EMISMATCH);
    CHECK(channel == NULL && text_has("'a'") && text_has("'b'"));
}

static void mismatch_tags_body(rank_state *s)
{
    comm_channel *channel;
    CHECK_EQ(comm_channel_open(s->comm, "a", 1 + (uint32_t)s->rank, &channel), ZC_EMISMATCH);
    CHECK(text_has("1 tags") && text_has("2 tags"));
}

/* What the parts do not see: records of one length, and words that may differ. */
static void words_body(rank_state *s)
{
    comm_channel *channel;
    CHECK_OK(comm_channel_open(s->comm, "engine", 1, &channel));
    CHECK_OK(comm_exchange(channel, 0, s->rank ? "step" : "backward", NULL, NULL, 0));
    comm_channel_close(channel);
}

static void test_mismatch(void)
{
    with_ranks(2, 20 * SECOND, mismatch_array_body);
    with_ranks(3, 20 * SECOND, mismatch_array_body);
    with_ranks(2, 20 * SECOND, mismatch_dtype_body);
    with_ranks(2, 20 * SECOND, mismatch_kind_body);
    with_ranks(2, 20 * SECOND, mismatch_root_body);
    with_ranks(2, 20 * SECOND, mismatch_exchange_body);
    with_ranks(2, 20 * SECOND, mismatch_channel_body);
    with_ranks(2, 20 * SECOND, mismatch_tags_body);
    with_ranks(2, 20 * SECOND, words_body);
}

/* Rank 0 in a barrier, the others in an exchange of a channel: nobody can ever come. */
static void cycle_body(rank_state *s)
{
    comm_channel *channel;
    CHECK_OK(comm_channel_open(s->comm, "steps", 1, &channel));
    uint64_t start = now_ns();
    CHECK_EQ(s->rank == 0 ? comm_barrier(s->comm) : comm_exchange(channel, 0, "step", NULL, NULL, 0), ZC_EMISMATCH);
    CHECK(text_has("'barrier'") && text_has("'step'") && text_has("rank 0 waits"));
    CHECK(now_ns() - start < 5 * SECOND);
    comm_channel_close(channel);
}

/* 0 waits for 1 in one group, 1 for 2 in another, 2 for 0 in a third. */
static void ring_body(rank_state *s)
{
    zc_comm *pairs[3];
    for (size_t p = 0; p < 3; p++)
        CHECK_OK(comm_split(s->comm, s->rank == p || s->rank == (p + 1) % 3 ? 0 : -1, &pairs[p]));
    CHECK_EQ(comm_barrier(pairs[s->rank]), ZC_EMISMATCH);
    CHECK(text_has("rank 0") && text_has("rank 1") && text_has("rank 2"));
    for (size_t p = 0; p < 3; p++)
        comm_close(pairs[p]);
}

/* Slow ranks and late ones are not a cycle. */
static void late_body(rank_state *s)
{
    comm_channel *channel;
    CHECK_OK(comm_channel_open(s->comm, "slow", 1, &channel));
    for (unsigned round = 0; round < 6; round++) {
        if (round % s->ranks == s->rank)
            pause_us(150000);
        CHECK_OK(comm_barrier(s->comm));
        CHECK_OK(comm_exchange(channel, 0, "step", NULL, NULL, 0));
    }
    comm_channel_close(channel);
}

static void test_cycles(void)
{
    beat_ns = SHORT_BEAT;
    with_ranks(2, 20 * SECOND, cycle_body);
    with_ranks(4, 20 * SECOND, cycle_body);
    with_ranks(3, 20 * SECOND, ring_body);
    with_ranks(3, 20 * SECOND, late_body);
    beat_ns = SECOND;
}

/* ---- poison, closed peers, timeouts, interrupts ------------------------------------------------- */

static void poison_body(rank_state *s)
{
    uint64_t start = now_ns();
    if (s->rank == 1) {
        pause_us(20000);
        comm_poison(s->comm, ZC_ESTATE, "the data ran out");
    } else if (s->rank == 2) { /* computes, and only looks */
        while (comm_watch(s->comm, "work") == ZC_OK && now_ns() - start < 5 * SECOND)
            pause_us(1000);
        CHECK(now_ns() - start < SECOND);
        CHECK_EQ(comm_watch(s->comm, "work"), ZC_ESTATE);
    } else {
        CHECK_EQ(comm_barrier(s->comm), ZC_ESTATE);
        CHECK(text_has("rank 1 reported: the data ran out"));
    }
    after_failure(s, ZC_ESTATE);
}

static void poison_part_body(rank_state *s)
{
    zc_comm *half;
    CHECK_OK(comm_split(s->comm, (int64_t)s->rank / 2, &half));
    if (s->rank == 0)
        comm_poison(half, ZC_EINVAL, "only here");
    if (s->rank < 2)
        CHECK_EQ(comm_barrier(half), ZC_EINVAL);
    else
        CHECK_OK(comm_barrier(half));
    CHECK_OK(comm_barrier(s->comm)); /* other groups go on */
    comm_close(half);
}

static void test_poison(void)
{
    with_ranks(3, 20 * SECOND, poison_body);
    with_ranks(4, 20 * SECOND, poison_part_body);
}

static size_t leaver;

static void closed_body(rank_state *s)
{
    float one = 1;
    char name[16];
    snprintf(name, sizeof name, "rank %zu", leaver);
    CHECK_OK(comm_barrier(s->comm));
    if (s->rank == leaver)
        return;
    uint64_t start = now_ns();
    CHECK_EQ(comm_array_all_reduce(s->comm, &one, 1, ZC_FLOAT32, COMM_SUM), ZC_EPEERLOST);
    CHECK(text_has(name) && text_has("has closed its communicator"));
    CHECK(now_ns() - start < 2 * SECOND);
    after_failure(s, ZC_EPEERLOST);
}

/* Nobody waits for it in a call, so only who watches sees it. */
static void watched_body(rank_state *s)
{
    CHECK_OK(comm_barrier(s->comm));
    if (s->rank == 1)
        return;
    uint64_t start = now_ns();
    while (comm_watch(s->comm, "work on a GPU") == ZC_OK && now_ns() - start < 5 * SECOND)
        pause_us(1000);
    CHECK_EQ(comm_watch(s->comm, "work on a GPU"), ZC_EPEERLOST);
    CHECK(text_has("rank 1 has closed its communicator") && text_has("work on a GPU"));
    after_failure(s, ZC_EPEERLOST);
}

static void test_closed_peer(void)
{
    for (leaver = 0; leaver < 2; leaver++) {
        with_ranks(2, 20 * SECOND, closed_body);
        with_ranks(4, 20 * SECOND, closed_body);
    }
    with_ranks(2, 20 * SECOND, watched_body);
    with_ranks(3, 20 * SECOND, watched_body);
}

static void timeout_body(rank_state *s)
{
    CHECK_OK(comm_barrier(s->comm));
    uint64_t start = now_ns();
    if (s->rank >= 2) {
        pause_us(1000000);
        after_failure(s, ZC_ETIMEOUT);
        CHECK(text_has("missing: 2, 3"));
        return;
    }
    CHECK_EQ(comm_barrier(s->comm), ZC_ETIMEOUT);
    CHECK(text_has("missing: 2, 3; last rank 2 called 'barrier'") && text_has("in barrier (operation ") &&
          text_has("the timeout is too short"));
    CHECK(now_ns() - start < SECOND);
}

static void test_timeout(void)
{
    with_ranks(4, SECOND * 3 / 10, timeout_body);
}

static int stop_now(void *context)
{
    return atomic_load((atomic_int *)context);
}

static atomic_int stop_flag;

static void interrupt_body(rank_state *s)
{
    if (s->rank == 0) {
        s->comm->interrupted = stop_now;
        s->comm->interrupt_context = &stop_flag;
        uint64_t start = now_ns();
        CHECK_EQ(comm_barrier(s->comm), ZC_EINTERRUPT);
        CHECK(now_ns() - start < SECOND);
        after_failure(s, ZC_ECOMM);
    } else {
        pause_us(50000);
        atomic_store(&stop_flag, 1);
        pause_us(200000);
        CHECK_EQ(comm_barrier(s->comm), ZC_ECOMM);
        CHECK(text_has("rank 0 reported: rank 0 was interrupted in barrier"));
    }
}

static void test_interrupt(void)
{
    atomic_store(&stop_flag, 0);
    with_ranks(2, 20 * SECOND, interrupt_body);
}

static void *wait_forever(void *argument)
{
    CHECK_EQ(comm_barrier(argument), ZC_ESTATE);
    return NULL;
}

/* Closing while another thread of the rank waits: that thread returns. */
static void close_body(rank_state *s)
{
    zc_comm *all;
    pthread_t thread;
    CHECK_OK(comm_split(s->comm, 0, &all));
    if (s->rank == 0) {
        pthread_create(&thread, NULL, wait_forever, all);
        pause_us(30000);
        comm_close(all);
        pthread_join(thread, NULL);
    } else {
        pause_us(60000);
        comm_close(all);
    }
    CHECK_OK(comm_barrier(s->comm));
}

static void test_close_while_waiting(void)
{
    with_ranks(2, 20 * SECOND, close_body);
}

/* ---- opening ---------------------------------------------------------------------------------- */

static void test_open_without_all(void)
{
    wires w;
    zc_comm *comm;
    size_t fds = count_fds();
    wires_make(&w, 2);
    open_timeout_ns = SECOND / 5;
    CHECK_EQ(open_rank(&w, 0, 2, &comm), ZC_ETIMEOUT);
    CHECK(comm == NULL && text_has("missing: 1") && text_has("start"));
    close(w.guest[1]);
    wires_make(&w, 2); /* rank 0 never comes */
    CHECK_EQ(open_rank(&w, 1, 2, &comm), ZC_ETIMEOUT);
    CHECK(text_has("rank 0, which knows who is missing, does not answer"));
    close(w.hub[1]);
    open_timeout_ns = 20 * SECOND;
    CHECK_EQ(count_fds(), fds);
}

static void *open_of_three(void *argument)
{
    zc_comm *comm;
    CHECK_EQ(open_rank(argument, 1, 3, &comm), ZC_EMISMATCH);
    return NULL;
}

static void test_open_of_different_sizes(void)
{
    wires w;
    zc_comm *comm;
    pthread_t thread;
    wires_make(&w, 2);
    pthread_create(&thread, NULL, open_of_three, &w);
    CHECK_EQ(open_rank(&w, 0, 2, &comm), ZC_EMISMATCH);
    CHECK(text_has("rank 0 has 2 ranks") && text_has("there is rank 1 of 3"));
    pthread_join(thread, NULL);
}

/* ---- ranks that talk nonsense -------------------------------------------------------------------- */

static void fake_say(int fd, hub_header header, const void *payload)
{
    header.magic = header.magic ? header.magic : HUB_MAGIC;
    CHECK_EQ(send(fd, &header, sizeof header, MSG_NOSIGNAL), sizeof header);
    if (payload && header.bytes)
        CHECK(send(fd, payload, header.bytes, MSG_NOSIGNAL) == (ssize_t)header.bytes);
}

static hub_words fake_words = {"fake", ""};

static hub_header fake_call(hub_operation operation, uint64_t number)
{
    return (hub_header){.kind = HUB_CALL, .operation = (uint8_t)operation, .call = 100 + number, .number = number,
                        .bytes = sizeof fake_words};
}

/* As rank `rank` of `ranks` does in hub_comm_open. */
static void fake_open(int fd, size_t rank, size_t ranks)
{
    fake_say(fd, (hub_header){.kind = HUB_HELLO, .root = (uint32_t)rank, .number = ranks, .count = 4711}, NULL);
    fake_say(fd, fake_call(HUB_START, 1), &fake_words);
}

static void fake_drain(int fd)
{
    char bytes[4096];
    while (recv(fd, bytes, sizeof bytes, MSG_DONTWAIT) > 0)
        continue;
}

static uint64_t nonsense_seed;

/* Something that no rank may send, or something by chance. */
static void fake_nonsense(int fd, uint64_t seed)
{
    static char rubbish[1 << 16];
    hub_header header = fake_call(HUB_BARRIER, 2);
    uint64_t random = seed;
    switch (seed % 17) {
    case 0: header.magic = 0x12345678; break;
    case 1: header.kind = HUB_KIND_END + 7; break;
    case 2: header.bytes = 0xffffffffu; break;
    case 3: header.bytes = 3; break;
    case 4: header.group = 77; break;
    case 5: header.channel = 5; header.operation = HUB_EXCHANGE; break;
    case 6: header.operation = HUB_ALL_REDUCE; header.dtype = 200; break;
    case 7: header.operation = HUB_ALL_REDUCE; header.op = 9; break;
    case 8: header.operation = HUB_BROADCAST; header.root = 4000000000u; break;
    case 9: header.kind = HUB_FAILED; header.status = ZC_ECOMM; break;
    case 10: header.kind = HUB_DECLARE; header.tag = 4000000000u; break;
    case 11: header.status = -77; break;
    case 12: header = (hub_header){.kind = HUB_HELLO}; break;
    case 13: header.number = 1; header.operation = HUB_START; header.group = 1; break;
    case 14: /* a call after its farewell */
        fake_say(fd, (hub_header){.kind = HUB_CLOSE}, NULL);
        fake_say(fd, header, &fake_words);
        return;
    case 15: /* a header by chance, with the right magic */
        for (size_t i = 4; i < sizeof header; i++)
            ((unsigned char *)&header)[i] = (unsigned char)testing_random(&random);
        break;
    default: /* a message that breaks off */
        CHECK_EQ(send(fd, &(hub_header){.magic = HUB_MAGIC, .kind = HUB_CALL}, 17, MSG_NOSIGNAL), 17);
        return;
    }
    for (size_t i = 0; i < sizeof rubbish; i++)
        rubbish[i] = (char)testing_random(&random);
    header.magic = header.magic ? header.magic : HUB_MAGIC;
    send(fd, &header, sizeof header, MSG_NOSIGNAL);
    send(fd, rubbish, testing_random(&random) % sizeof rubbish, MSG_NOSIGNAL | MSG_DONTWAIT);
}

static void *with_fake_body(void *argument)
{
    rank_state *s = argument;
    zc_status status = open_rank(s->wires, s->rank, s->ranks, &s->comm); /* too late, if the nonsense was earlier */
    if (status == ZC_OK)
        status = comm_barrier(s->comm);
    CHECK_EQ(status, ZC_EPEERLOST);
    CHECK(text_has("rank 2"));
    comm_close(s->comm);
    return NULL;
}

static void test_nonsense_from_a_rank(void)
{
    for (nonsense_seed = 0; nonsense_seed < 170 / SCALE + 17; nonsense_seed++) {
        wires w;
        pthread_t threads[2];
        rank_state states[2];
        wires_make(&w, 3);
        for (size_t r = 0; r < 2; r++) {
            states[r] = (rank_state){.rank = r, .ranks = 3, .wires = &w};
            pthread_create(&threads[r], NULL, with_fake_body, &states[r]);
        }
        fake_open(w.guest[2], 2, 3);
        fake_nonsense(w.guest[2], nonsense_seed);
        if (nonsense_seed % 17 >= 14)
            shutdown(w.guest[2], SHUT_WR); /* chance may leave the hub waiting for the rest */
        for (size_t r = 0; r < 2; r++)
            pthread_join(threads[r], NULL);
        close(w.guest[2]);
        if (testing_failures) {
            fprintf(stderr, "nonsense %" PRIu64 "\n", nonsense_seed);
            return;
        }
    }
}

/* A rank that does not read does not stop the others. */
static void *not_stopped_body(void *argument)
{
    rank_state *s = argument;
    zc_comm *two;
    CHECK_OK(open_rank(s->wires, s->rank, s->ranks, &s->comm));
    CHECK_OK(comm_split(s->comm, 0, &two));
    CHECK_EQ(two->ranks, 2);
    for (int i = 0; i < 200; i++)
        CHECK_OK(comm_barrier(two));
    comm_close(two);
    comm_close(s->comm);
    return NULL;
}

static void test_slow_receiver(void)
{
    wires w;
    pthread_t threads[2];
    rank_state states[2];
    wires_make(&w, 3);
    for (size_t r = 0; r < 2; r++) {
        states[r] = (rank_state){.rank = r, .ranks = 3, .wires = &w};
        pthread_create(&threads[r], NULL, not_stopped_body, &states[r]);
    }
    fake_open(w.guest[2], 2, 3);
    hub_header split = fake_call(HUB_SPLIT, 2);
    split.count = (uint64_t)-1;
    fake_say(w.guest[2], split, &fake_words);
    for (int i = 0; i < 20000; i++) /* each is answered, and no answer taken */
        fake_say(w.guest[2], (hub_header){.kind = HUB_BEHIND, .number = 1}, NULL);
    fake_say(w.guest[2], (hub_header){.kind = HUB_CLOSE}, NULL);
    fake_say(w.guest[2], (hub_header){.kind = HUB_BYE}, NULL);
    for (size_t r = 0; r < 2; r++)
        pthread_join(threads[r], NULL);
    fake_drain(w.guest[2]);
    close(w.guest[2]);
}

/* The other way round: a hub that is none. */
static void *with_fake_hub_body(void *argument)
{
    rank_state *s = argument;
    zc_status status = open_rank(s->wires, 1, 2, &s->comm);
    CHECK(status == ZC_OK || status == ZC_EPEERLOST);
    if (status != ZC_OK)
        return NULL;
    comm_channel *channel;
    status = comm_channel_open(s->comm, "no hub", 1, &channel);
    CHECK(status != ZC_OK);
    comm_close(s->comm);
    return NULL;
}

static void fake_hub_nonsense(int fd, uint64_t seed)
{
    hub_header header = {.kind = HUB_ANSWER, .call = 2};
    uint64_t random = seed;
    static char rubbish[4096];
    switch (seed % 10) {
    case 0: header.magic = 99; break;
    case 1: header.kind = HUB_CALL; header.bytes = 500; break;
    case 2: header.bytes = 4096; break;                   /* more than the call has room for */
    case 3: header.bytes = HUB_PAYLOAD_BYTES + 1; break;
    case 4: header.kind = HUB_CLOSED; header.root = 12; break;
    case 5: header.kind = HUB_FAILED; header.bytes = 4; break; /* ZC_OK is no failure */
    case 6: header.kind = HUB_ENDED; header.bytes = 100; break;
    case 7: header.kind = HUB_REFUSED; header.status = ZC_ENOMEM; header.bytes = 900; break;
    case 8: header.kind = HUB_FAILED; header.status = ZC_ENOMEM; header.bytes = 900; break;
    default:
        for (size_t i = 4; i < sizeof header; i++)
            ((unsigned char *)&header)[i] = (unsigned char)testing_random(&random);
    }
    for (size_t i = 0; i < sizeof rubbish; i++)
        rubbish[i] = (char)testing_random(&random);
    header.magic = header.magic ? header.magic : HUB_MAGIC;
    send(fd, &header, sizeof header, MSG_NOSIGNAL);
    send(fd, rubbish, header.bytes < sizeof rubbish ? header.bytes : sizeof rubbish, MSG_NOSIGNAL);
}

static void test_nonsense_from_the_hub(void)
{
    for (uint64_t seed = 0; seed < 100 / SCALE + 10; seed++) {
        wires w;
        pthread_t thread;
        wires_make(&w, 2);
        rank_state state = {.wires = &w};
        pthread_create(&thread, NULL, with_fake_hub_body, &state);
        hub_header started = {.kind = HUB_ANSWER, .operation = HUB_START, .call = 1};
        char bytes[1024];
        size_t got = 0;
        while (got < 2 * sizeof(hub_header) + sizeof(hub_words)) /* HELLO, CALL; and a beat */
            got += (size_t)recv(w.hub[1], bytes, sizeof bytes, 0);
        fake_say(w.hub[1], started, NULL);
        pause_us(3000);
        fake_hub_nonsense(w.hub[1], seed);
        shutdown(w.hub[1], SHUT_WR);
        pthread_join(thread, NULL);
        close(w.hub[1]);
        if (testing_failures) {
            fprintf(stderr, "nonsense of a hub %" PRIu64 "\n", seed);
            return;
        }
    }
}

/* ---- every allocation and system call fails once ---------------------------------------------------- */

static atomic_int walk_failures, walk_opened;

static void *walk_body(void *argument)
{
    rank_state *s = argument;
    comm_channel *channel = NULL;
    zc_comm *half = NULL;
    char list[64];
    float array[4] = {1, 2, 3, 4};
    zc_status status = open_rank(s->wires, s->rank, s->ranks, &s->comm);
    if (status == ZC_OK) {
        atomic_fetch_add(&walk_opened, 1);
        status = comm_channel_open(s->comm, "walk", 2, &channel);
    }
    if (status == ZC_OK)
        status = comm_declare(s->comm, 0, 1, "walk");
    if (status == ZC_OK)
        status = comm_split(s->comm, 1, &half);
    if (status == ZC_OK)
        status = comm_array_all_reduce(half, array, 4, ZC_FLOAT32, COMM_SUM);
    if (status == ZC_OK)
        comm_behind(s->comm, 0, 1, list, sizeof list);
    if (status == ZC_OK)
        CHECK(array[3] == 4.0f * (float)s->ranks);
    else
        CHECK(zc_last_error()[0] != 0);
    if (status != ZC_OK)
        atomic_fetch_add(&walk_failures, 1);
    comm_close(half);
    comm_channel_close(channel);
    comm_close(s->comm);
    return NULL;
}

static void test_faults(void)
{
    beat_ns = SHORT_BEAT;
    open_timeout_ns = 3 * SECOND;
    for (long n = 1; n < 1000; n++) {
        wires w;
        pthread_t threads[2];
        rank_state states[2];
        size_t fds = count_fds();
        uint64_t start = now_ns();
        wires_make(&w, 2);
        atomic_store(&walk_failures, 0);
        zc_fault_arm(n);
        for (size_t r = 0; r < 2; r++) {
            states[r] = (rank_state){.rank = r, .ranks = 2, .wires = &w};
            pthread_create(&threads[r], NULL, walk_body, &states[r]);
        }
        for (size_t r = 0; r < 2; r++)
            pthread_join(threads[r], NULL);
        CHECK_EQ(count_fds(), fds);
        CHECK(now_ns() - start < 5 * SECOND / 2); /* not by a timeout */
        if (zc_fault_count() < n) {
            CHECK_EQ(atomic_load(&walk_failures), 0);
            break;
        }
        if (testing_failures) {
            fprintf(stderr, "fault %ld\n", n);
            break;
        }
    }
    CHECK(zc_fault_count() > 10);
    zc_fault_arm(0);
    beat_ns = SECOND;
    open_timeout_ns = 20 * SECOND;
}

/* ---- ranks as processes -------------------------------------------------------------------------------- */

typedef int (*process_body)(size_t rank, zc_comm *comm);

/* Fresh processes, each with only its own ends; status[r] as of waitpid. Who is there at the end is killed. */
static void run_processes(size_t ranks, process_body body, unsigned limit_s, int *status)
{
    pid_t pids[RANKS_MAX];
    wires w;
    wires_make(&w, ranks);
    fflush(stdout);
    fflush(stderr);
    for (size_t r = 0; r < ranks; r++) {
        pids[r] = fork();
        if (pids[r] == 0) {
            zc_comm *comm;
            alarm(limit_s);
            testing_failures = 0;
            for (size_t q = 1; q < ranks; q++) {
                if (r)
                    close(w.hub[q]);
                if (q != r)
                    close(w.guest[q]);
            }
            CHECK_OK(open_rank(&w, r, ranks, &comm));
            int extra = comm ? body(r, comm) : 1;
            _exit(extra ? extra : testing_failures ? 1 : 0);
        }
    }
    for (size_t q = 1; q < ranks; q++) {
        close(w.hub[q]);
        close(w.guest[q]);
    }
    wait_for_all(pids, ranks, now_ns() + limit_s * SECOND, status);
}

static void with_processes(size_t ranks, process_body body)
{
    int status[RANKS_MAX];
    run_processes(ranks, body, 30, status);
    for (size_t r = 0; r < ranks; r++)
        CHECK_EQ(status[r], 0);
}

static int steps_body(size_t rank, zc_comm *comm)
{
    comm_channel *channel;
    CHECK_OK(comm_channel_open(comm, "engine", 2, &channel));
    for (uint64_t round = 0; round < 200 / SCALE; round++) {
        uint64_t record = rank + round, records[RANKS_MAX];
        double sum = (double)rank;
        CHECK_OK(comm_exchange(channel, round % 2, "step", &record, records, sizeof record));
        for (size_t q = 0; q < comm->ranks; q++)
            CHECK_EQ(records[q], q + round);
        CHECK_OK(comm_array_all_reduce(comm, &sum, 1, ZC_FLOAT64, COMM_SUM));
        CHECK(sum == (double)(comm->ranks * (comm->ranks - 1) / 2));
    }
    comm_channel_close(channel);
    comm_close(comm);
    return 0;
}

static void test_processes(void)
{
    with_processes(2, steps_body);
    with_processes(8, steps_body);
    use_tcp = 1;
    with_processes(3, steps_body);
    use_tcp = 0;
}

static size_t victim;
static unsigned killed_after_us;

static void *kill_later(void *context)
{
    (void)context;
    pause_us(killed_after_us);
    raise(SIGKILL);
    return NULL;
}

/* Exchanges, arrays and splits for ever, until one rank is killed in the middle of something. */
static int killed_body(size_t rank, zc_comm *comm)
{
    char name[24];
    comm_channel *channel;
    pthread_t thread;
    static char array[600000];
    zc_status status = comm_channel_open(comm, "engine", 1, &channel);
    CHECK_OK(status);
    CHECK_OK(comm_barrier(comm));
    if (rank == victim)
        pthread_create(&thread, NULL, kill_later, NULL);
    uint64_t start = now_ns(), last = start;
    for (unsigned round = 0; status == ZC_OK && now_ns() - start < 10 * SECOND; round++) {
        uint64_t record = rank, records[RANKS_MAX];
        zc_comm *made = NULL;
        last = now_ns();
        if (round % 4 == 0)
            status = comm_array_all_reduce(comm, array, sizeof array, ZC_UINT8, COMM_SUM);
        else if (round % 4 == 1)
            status = comm_split(comm, 0, &made);
        else
            status = comm_exchange(channel, 0, "step", &record, records, sizeof record);
        if (made) {
            zc_status inner = comm_barrier(made);
            CHECK(inner == ZC_OK || inner == ZC_EPEERLOST);
            comm_close(made);
        }
    }
    CHECK_EQ(status, ZC_EPEERLOST);
    CHECK(now_ns() - last < SECOND);
    snprintf(name, sizeof name, "rank %zu", victim);
    CHECK(text_has(name) && text_has("is gone"));
    CHECK_EQ(comm_barrier(comm), ZC_EPEERLOST);
    comm_channel_close(channel);
    comm_close(comm);
    return 0;
}

static void test_killed_rank(void)
{
    for (unsigned round = 0; round < 16 / SCALE + 4; round++) {
        size_t ranks = 2 + round % 2 * 2;
        int status[RANKS_MAX];
        victim = round / 2 % 2;
        killed_after_us = 500 + round * 1337;
        run_processes(ranks, killed_body, 20, status);
        for (size_t r = 0; r < ranks; r++)
            if (r == victim)
                CHECK(WIFSIGNALED(status[r]) && WTERMSIG(status[r]) == SIGKILL);
            else
                CHECK_EQ(status[r], 0);
    }
}

static int stopped_body(size_t rank, zc_comm *comm)
{
    CHECK_OK(comm_barrier(comm));
    if (rank == victim) {
        pause_us(50000); /* until the hub, which may be here, has told the other of the barrier */
        raise(SIGSTOP);
        return 0;
    }
    uint64_t start = now_ns();
    char name[24];
    snprintf(name, sizeof name, "rank %zu", victim);
    CHECK_EQ(comm_barrier(comm), ZC_EPEERLOST);
    CHECK(text_has(name) && text_has("nothing came from it"));
    CHECK(now_ns() - start < 3 * SECOND);
    comm_close(comm);
    return 0;
}

/* A host that falls silent, the hub's among them. */
static void test_silent_rank(void)
{
    beat_ns = SHORT_BEAT;
    for (victim = 0; victim < 2; victim++) {
        int status[RANKS_MAX];
        run_processes(2, stopped_body, 4, status);
        CHECK_EQ(status[1 - victim], 0);
        CHECK(WIFSIGNALED(status[victim]));
    }
    beat_ns = SECOND;
}

/* A rank that exits right after its last call has not let anybody down. */
static int leaves_body(size_t rank, zc_comm *comm)
{
    uint64_t record = rank, records[RANKS_MAX];
    comm_channel *channel;
    CHECK_OK(comm_channel_open(comm, "leaves", 1, &channel));
    if (rank == 0)
        pause_us(50000);
    CHECK_OK(comm_exchange(channel, 0, "last words", &record, records, sizeof record));
    CHECK_EQ(records[comm->ranks - 1], comm->ranks - 1);
    if (rank == 0) {
        comm_close(comm);
        comm_channel_close(channel);
    }
    return 0; /* _exit without closing anything */
}

static void test_leaving(void)
{
    with_processes(2, leaves_body);
    with_processes(4, leaves_body);
}

/* A rank has no memory for its part: all are told, and the group goes on. */
static int refused_body(size_t rank, zc_comm *comm)
{
    comm_channel *channel;
    zc_comm *made;
    for (int round = 0; round < 2; round++) {
        for (long nth = 1; nth <= 2; nth++) {
            if (rank == 1)
                zc_fault_arm(nth); /* in this process nobody else allocates now */
            zc_status status = round ? comm_split(comm, 0, &made) : comm_channel_open(comm, "refused", 1, &channel);
            CHECK_EQ(status, ZC_ENOMEM);
            CHECK(round ? !made : !channel);
            CHECK(text_has(rank == 1 ? "rank 1: out of memory" : "rank 1 could not do its part of"));
        }
        if (rank == 1)
            zc_fault_arm(0);
        CHECK_OK(comm_barrier(comm));
    }
    CHECK_OK(comm_channel_open(comm, "refused", 1, &channel));
    CHECK_OK(comm_exchange(channel, 0, "step", NULL, NULL, 0));
    CHECK_OK(comm_split(comm, 0, &made));
    CHECK_OK(comm_barrier(made));
    comm_close(made);
    comm_channel_close(channel);
    comm_close(comm);
    return 0;
}

static void test_refused(void)
{
    with_processes(2, refused_body);
    with_processes(3, refused_body);
}

static int fork_body(size_t rank, zc_comm *comm)
{
    (void)rank;
    comm_channel *channel;
    char list[64];
    CHECK_OK(comm_channel_open(comm, "fork", 1, &channel));
    pid_t child = fork();
    if (child == 0) {
        CHECK_EQ(comm_barrier(comm), ZC_ESTATE);
        CHECK(text_has("forked"));
        CHECK_EQ(comm_exchange(channel, 0, "step", NULL, NULL, 0), ZC_ESTATE);
        CHECK_EQ(comm_watch(comm, "x"), ZC_ESTATE);
        CHECK_EQ(comm_declare(comm, 0, 1, "x"), ZC_ESTATE);
        CHECK_EQ(comm_behind(comm, 0, 1, list, sizeof list), 0);
        comm_poison(comm, ZC_EINVAL, "x");
        comm_channel_close(channel);
        comm_close(comm); /* must not close the parent's */
        _exit(testing_failures ? 1 : 0);
    }
    int status;
    waitpid(child, &status, 0);
    CHECK_EQ(status, 0);
    CHECK_OK(comm_barrier(comm));
    comm_channel_close(channel);
    comm_close(comm);
    return 0;
}

static void test_forked_child(void)
{
    with_processes(2, fork_body);
}

enum { LEFT = 7 };
static int orphans_end[2]; /* a pipe; its end is theirs */

/* A rank ends, and a child of its child lives on. The others learn of it by its connection, not by the silence. */
static int orphan_body(size_t rank, zc_comm *comm)
{
    CHECK_OK(comm_barrier(comm));
    if (rank == (comm->ranks == 2)) { /* rank 1 of two, rank 0 of three */
        int child = fork();
        if (child == 0) {
            char byte;
            close(orphans_end[1]);
            if (fork() == 0)
                CHECK_EQ(read(orphans_end[0], &byte, 1), 0);
            _exit(0);
        }
        CHECK_EQ(waitpid(child, NULL, 0), child);
        return LEFT;
    }
    CHECK_EQ(comm_barrier(comm), ZC_EPEERLOST);
    CHECK(!strstr(zc_last_error(), "nothing came"));
    comm_close(comm);
    return 0;
}

static void test_a_child_outlives_its_rank(void)
{
    for (size_t ranks = 2; ranks <= 3; ranks++) {
        int status[RANKS_MAX];
        CHECK_EQ(pipe(orphans_end), 0);
        run_processes(ranks, orphan_body, 30, status);
        for (size_t r = 0; r < ranks; r++)
            CHECK(WIFEXITED(status[r]) && WEXITSTATUS(status[r]) == (r == (ranks == 2) ? LEFT : 0));
        close(orphans_end[1]);
        close(orphans_end[0]);
    }
}

static int bench_body(size_t rank, zc_comm *comm)
{
    enum { TURNS = 5000 };
    comm_channel *channel;
    CHECK_OK(comm_channel_open(comm, "bench", 1, &channel));
    for (int repeat = 0; repeat < 3; repeat++) {
        CHECK_OK(comm_barrier(comm));
        uint64_t start = now_ns(), record[4] = {0}, records[4 * RANKS_MAX];
        for (int i = 0; i < TURNS; i++)
            CHECK_OK(comm_exchange(channel, 0, "bench", record, records, sizeof record));
        if (rank == 0)
            printf("%zu processes%s: exchange of 32 bytes %.1f us\n", comm->ranks, use_tcp ? ", TCP" : "",
                   (double)(now_ns() - start) / TURNS * 1e-3);
        fflush(stdout);
    }
    comm_channel_close(channel);
    comm_close(comm);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc > 1 && !strcmp(argv[1], "bench")) {
        for (use_tcp = 0; use_tcp < 2; use_tcp++) {
            with_processes(2, bench_body);
            with_processes(8, bench_body);
        }
        DONE();
    }
    RUN(test_processes); /* before this process has had threads */
    RUN(test_killed_rank);
    RUN(test_silent_rank);
    RUN(test_leaving);
    RUN(test_refused);
    RUN(test_forked_child);
    RUN(test_a_child_outlives_its_rank);
    have_threads();
    RUN(test_arguments);
    RUN(test_exchange);
    RUN(test_several_threads_a_rank);
    RUN(test_arrays);
    RUN(test_split);
    RUN(test_rank_0_closes_first);
    RUN(test_declare);
    RUN(test_mismatch);
    RUN(test_cycles);
    RUN(test_poison);
    RUN(test_closed_peer);
    RUN(test_timeout);
    RUN(test_interrupt);
    RUN(test_close_while_waiting);
    RUN(test_open_without_all);
    RUN(test_open_of_different_sizes);
    RUN(test_nonsense_from_a_rank);
    RUN(test_slow_receiver);
    RUN(test_nonsense_from_the_hub);
    RUN(test_faults);
    DONE();
}
