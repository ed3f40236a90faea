/*
 * The collectives between ranks that are threads of this process: every
 * result against a plain loop, and every way in which ranks can disagree.
 * Under the thread sanitizer this checks the protocol of shm_sync.h itself.
 */
#include "comm.h"
#include "cpu_kernels.h"
#include "together.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#define RANKS_MAX 8
#define TAGS 12

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define SCALE 25
#else
#define SCALE 1
#endif

typedef struct rank_state {
    zc_comm *comm;
    size_t rank, ranks;
    void (*body)(struct rank_state *);
    uint64_t random;
} rank_state;

static void *run_rank(void *argument)
{
    rank_state *s = argument;
    s->body(s);
    comm_close(s->comm);
    return NULL;
}

/* body on `ranks` threads, each with its communicator, which is closed behind it. */
static void with_ranks(size_t ranks, uint64_t timeout_ns, void (*body)(rank_state *))
{
    zc_comm *comms[RANKS_MAX];
    rank_state states[RANKS_MAX];
    pthread_t threads[RANKS_MAX];
    zc_status status = local_comm_create(ranks, timeout_ns, comms);
    CHECK_OK(status);
    if (status != ZC_OK)
        return;
    for (size_t r = 0; r < ranks; r++) {
        states[r] = (rank_state){comms[r], r, ranks, body, 1000 + r};
        pthread_create(&threads[r], NULL, run_rank, &states[r]);
    }
    for (size_t r = 0; r < ranks; r++)
        pthread_join(threads[r], NULL);
}

static void with_all_sizes(void (*body)(rank_state *))
{
    static const size_t sizes[] = {1, 2, 3, 4, 8};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        with_ranks(sizes[i], 20 * SECOND, body);
}

/* ---- values ------------------------------------------------------------- */

/* What rank q contributes as element i of everything: the same on all ranks, and not representable sums. */
static double gradient(size_t q, size_t i, unsigned round)
{
    uint64_t state = q * 1000003 + i * 101 + round;
    return testing_float(&state);
}

/* ---- reduce-scatter and all-gather ------------------------------------- */

static void check_reduced(rank_state *s, const void *got, size_t count, zc_dtype dtype, unsigned round, int zero_rank,
                          const void *before)
{
    zc_dtype sum = zc_dtype_sum(dtype);
    unsigned char element[8];
    size_t wrong = 0;
    for (size_t i = 0; i < count; i++) {
        double total64 = 0;
        float total32 = 0;
        for (size_t q = 0; q < s->ranks; q++) {
            double value = 0;
            if ((int)q != zero_rank) {
                put(element, 0, dtype, gradient(q, s->rank * count + i, round));
                value = get(element, 0, dtype);
            }
            total64 = q ? total64 + value : value;
            total32 = q ? total32 + (float)value : (float)value;
        }
        double want = sum == ZC_FLOAT64 ? total64 : total32;
        if (before)
            want = sum == ZC_FLOAT64 ? get(before, i, sum) + total64 : (double)((float)get(before, i, sum) + total32);
        wrong += get(got, i, sum) != want;
    }
    CHECK_EQ(wrong, 0);
}

static void reduce_body(rank_state *s)
{
    static const zc_dtype dtypes[] = {ZC_FLOAT32, ZC_FLOAT64, ZC_BFLOAT16, ZC_FLOAT16};
    static const size_t counts[] = {0, 1, 64, 1003, 20000};
    comm_channel *channel;
    CHECK_OK(comm_channel_open(s->comm, "reduce", 2, &channel));
    for (size_t d = 0; d < 4; d++)
        for (size_t c = 0; c < 5; c++) {
            zc_dtype dtype = dtypes[d], sum = zc_dtype_sum(dtype);
            size_t count = counts[c], bytes = zc_dtype_bytes(dtype), sum_bytes = zc_dtype_bytes(sum);
            comm_region *region;
            comm_ticket ticket;
            uint32_t flags = 0;
            CHECK_OK(comm_region_alloc(channel, (s->ranks * count + 16) * bytes, 0, &region));
            char *slices = (char *)region->base + 16 * bytes;
            void *to = calloc(count + 1, sum_bytes), *before = calloc(count + 1, sum_bytes);
            for (size_t i = 0; i < s->ranks * count; i++)
                put(slices, i, dtype, gradient(s->rank, i, 1));
            comm_reduce_args args = {.tag = 1, .region = region, .offset_bytes = 16 * bytes, .to = to, .count = count,
                                     .dtype = dtype, .flags = &flags};
            CHECK_OK(comm_reduce_scatter(channel, NULL, &args, &ticket));
            CHECK_OK(comm_wait(channel, ticket, NULL));
            check_reduced(s, to, count, dtype, 1, -1, NULL);

            /* accumulate, one rank with zeros, own slice from elsewhere */
            memcpy(before, to, count * sum_bytes);
            void *own = malloc(count * bytes + 1);
            memcpy(own, slices + s->rank * count * bytes, count * bytes);
            memset(slices + s->rank * count * bytes, 0x55, count * bytes);
            args.accumulate = 1;
            args.own = own;
            args.zero = s->rank == s->ranks - 1;
            CHECK_OK(comm_reduce_scatter(channel, NULL, &args, &ticket));
            CHECK_OK(comm_wait(channel, ticket, NULL));
            check_reduced(s, to, count, dtype, 1, (int)s->ranks - 1, before);

            if (dtype == sum) { /* the result over the own contribution */
                args.zero = args.accumulate = 0;
                args.own = args.to = own;
                CHECK_OK(comm_reduce_scatter(channel, NULL, &args, &ticket));
                CHECK_OK(comm_wait(channel, ticket, NULL));
                check_reduced(s, own, count, dtype, 1, -1, NULL);
                /* and over the own slice in the region */
                for (size_t i = 0; i < s->ranks * count; i++)
                    put(slices, i, dtype, gradient(s->rank, i, 2));
                args.own = NULL;
                args.to = slices + s->rank * count * bytes;
                CHECK_OK(comm_reduce_scatter(channel, NULL, &args, &ticket));
                CHECK_OK(comm_wait(channel, ticket, NULL));
                check_reduced(s, args.to, count, dtype, 2, -1, NULL);
                CHECK_OK(comm_all_gather(channel, NULL, 0, region, 16 * bytes, count * bytes, &ticket));
                CHECK_OK(comm_wait(channel, ticket, NULL));
                size_t wrong = 0;
                for (size_t i = 0; i < s->ranks * count; i++) {
                    float total32 = 0;
                    double total64 = 0;
                    for (size_t q = 0; q < s->ranks; q++) {
                        unsigned char element[8];
                        put(element, 0, dtype, gradient(q, i, 2));
                        total32 = q ? total32 + (float)get(element, 0, dtype) : (float)get(element, 0, dtype);
                        total64 = q ? total64 + get(element, 0, dtype) : get(element, 0, dtype);
                    }
                    wrong += get(slices, i, sum) != (sum == ZC_FLOAT64 ? total64 : total32);
                }
                CHECK_EQ(wrong, 0);
            }
            CHECK_EQ(flags, 0);
            comm_region_free(region);
            free(to);
            free(before);
            free(own);
        }
    comm_channel_close(channel);
}

static void test_reduce_scatter_and_all_gather(void)
{
    with_all_sizes(reduce_body);
}

static void nonfinite_body(rank_state *s)
{
    comm_channel *channel;
    comm_region *region;
    comm_ticket ticket;
    float to[4];
    uint32_t flags = 0;
    CHECK_OK(comm_channel_open(s->comm, "nonfinite", 1, &channel));
    CHECK_OK(comm_region_alloc(channel, s->ranks * sizeof to, 0, &region));
    if (s->rank == 1)
        ((float *)region->base)[0] = INFINITY;
    comm_reduce_args args = {.region = region, .to = to, .count = 4, .dtype = ZC_FLOAT32, .flags = &flags};
    CHECK_OK(comm_reduce_scatter(channel, NULL, &args, &ticket));
    CHECK_OK(comm_wait(channel, ticket, NULL));
    CHECK_EQ(flags, s->rank == 0 ? CPU_NONFINITE_INF : 0);
    comm_region_free(region);
    comm_channel_close(channel);
}

static void test_nonfinite_flags(void)
{
    with_ranks(2, 20 * SECOND, nonfinite_body);
}

/* Many tags at once, issued by every rank in another order, waited for in yet another. */
static void tags_body(rank_state *s)
{
    comm_channel *channel;
    comm_region *region;
    comm_ticket tickets[TAGS];
    enum { COUNT = 500 };
    size_t stride = s->ranks * COUNT * sizeof(float);
    float *to = calloc(TAGS * COUNT, sizeof *to);
    CHECK_OK(comm_channel_open(s->comm, "tags", TAGS + 1, &channel));
    CHECK_OK(comm_region_alloc(channel, TAGS * stride, 0, &region));
    for (unsigned round = 0; round < 20; round++) {
        uint32_t order[TAGS];
        for (uint32_t t = 0; t < TAGS; t++)
            order[t] = t;
        for (uint32_t t = TAGS - 1; t > 0; t--) {
            uint32_t other = (uint32_t)(testing_random(&s->random) % (t + 1)), held = order[t];
            order[t] = order[other];
            order[other] = held;
        }
        for (uint32_t n = 0; n < TAGS; n++) {
            uint32_t t = order[n];
            /* every rank may keep a bucket in another slot of its ring */
            size_t slot = (t + s->rank + round) % TAGS;
            float *slices = (float *)((char *)region->base + slot * stride);
            for (size_t i = 0; i < s->ranks * COUNT; i++)
                slices[i] = (float)gradient(s->rank, i, round * TAGS + t);
            comm_reduce_args args = {.tag = t, .region = region, .offset_bytes = slot * stride,
                                     .to = to + t * COUNT, .count = COUNT, .dtype = ZC_FLOAT32};
            CHECK_OK(comm_reduce_scatter(channel, NULL, &args, &tickets[t]));
            int done;
            CHECK_OK(comm_test(channel, tickets[order[n / 2]], NULL, &done));
        }
        for (uint32_t n = TAGS; n-- > 0;)
            CHECK_OK(comm_wait(channel, tickets[order[n]], NULL));
        for (uint32_t t = 0; t < TAGS; t++)
            check_reduced(s, to + t * COUNT, COUNT, ZC_FLOAT32, round * TAGS + t, -1, NULL);
    }
    comm_region_free(region);
    comm_channel_close(channel);
    free(to);
}

static void test_many_tags_in_any_order(void)
{
    with_ranks(2, 20 * SECOND, tags_body);
    with_ranks(4, 20 * SECOND, tags_body);
}

static void words_body(rank_state *s)
{
    comm_channel *channel;
    comm_region *region;
    comm_ticket ticket;
    uint64_t to[40];
    CHECK_OK(comm_channel_open(s->comm, "words", 2, &channel));
    CHECK_OK(comm_region_alloc(channel, 4096, 0, &region));
    uint64_t *words = region->base;
    for (unsigned round = 0; round < 50; round++) {
        for (size_t i = 0; i < 40; i++)
            words[8 + i] = (s->rank + 1) * (i + round);
        CHECK_OK(comm_all_reduce_words(channel, NULL, 0, region, 64, 40, to, &ticket));
        CHECK_OK(comm_wait(channel, ticket, NULL));
        for (size_t i = 0; i < 40; i++)
            CHECK_EQ(to[i], s->ranks * (s->ranks + 1) / 2 * (i + round));
        size_t root = round % s->ranks;
        words[200] = s->rank * 100 + round;
        CHECK_OK(comm_broadcast(channel, NULL, 1, region, 1600, 8, root, &ticket));
        CHECK_OK(comm_wait(channel, ticket, NULL));
        CHECK_EQ(words[200], root * 100 + round);
    }
    comm_region_free(region);
    comm_channel_close(channel);
}

static void test_words_and_broadcast(void)
{
    with_all_sizes(words_body);
}

static void one_copy_body(rank_state *s)
{
    comm_channel *channel;
    comm_region *region, *none;
    comm_ticket ticket;
    CHECK_OK(comm_channel_open(s->comm, "one copy", 1, &channel));
    CHECK_OK(comm_region_alloc(channel, 0, 0, &none));
    CHECK(none == NULL);
    CHECK_OK(comm_region_alloc(channel, 64 * s->ranks, COMM_ONE_COPY, &region));
    uint64_t *words = region->base;
    words[8 * s->rank] = s->rank + 7;
    CHECK_OK(comm_all_gather(channel, NULL, 0, region, 0, 64, &ticket));
    CHECK_OK(comm_wait(channel, ticket, NULL));
    for (size_t q = 0; q < s->ranks; q++)
        CHECK_EQ(words[8 * q], q + 7);
    /* Rank 0 gives up its handle first; the others still read. */
    CHECK_OK(comm_barrier(s->comm));
    if (s->rank == 0)
        comm_region_free(region);
    CHECK_OK(comm_barrier(s->comm));
    if (s->rank != 0) {
        CHECK_EQ(words[0], 7);
        comm_region_free(region);
    }
    comm_channel_close(channel);
}

static void test_one_copy(void)
{
    with_all_sizes(one_copy_body);
}

/* Slices that lie alike on all ranks come together elsewhere; or each rank fetches them itself. */
static void gather_to_body(rank_state *s)
{
    enum { MOST = 3000, ROOM = 4 };
    static const size_t sizes[] = {1, 64, 1000, MOST};
    comm_channel *channel;
    comm_region *region;
    unsigned char *to[ROOM];
    CHECK_OK(comm_channel_open(s->comm, "gather to", ROOM, &channel));
    CHECK_OK(comm_region_alloc(channel, 2 * MOST, COMM_GROWS, &region));
    CHECK_OK(comm_region_grow(region, 2 * MOST));
    for (size_t k = 0; k < ROOM; k++)
        to[k] = malloc(s->ranks * MOST + 1);
    for (unsigned round = 0; round < 20; round++) {
        comm_ticket tickets[ROOM];
        unsigned char *own = region->base;
        for (size_t i = 0; i < 2 * MOST; i++)
            own[i] = (unsigned char)(i * 7 + s->rank * 31 + round);
        for (size_t k = 0; k < ROOM; k++) { /* every rank begins with another tag */
            uint32_t tag = (uint32_t)((k + s->rank) % ROOM);
            memset(to[tag], 0xaa, s->ranks * sizes[tag] + 1);
            CHECK_OK(comm_all_gather_to(channel, NULL, tag, region, round * 11 + tag, sizes[tag], to[tag],
                                        &tickets[tag]));
        }
        for (size_t k = 0; k < ROOM; k++) {
            size_t wrong = 0;
            CHECK_OK(comm_wait(channel, tickets[k], NULL));
            for (size_t q = 0; q < s->ranks; q++)
                for (size_t i = 0; i < sizes[k]; i++)
                    wrong += to[k][q * sizes[k] + i] != (unsigned char)((round * 11 + k + i) * 7 + q * 31 + round);
            CHECK_EQ(wrong, 0);
            CHECK_EQ(to[k][s->ranks * sizes[k]], 0xaa);
        }
        /* Nobody takes part in this; the barriers keep writers and readers apart. */
        CHECK_OK(comm_barrier(s->comm));
        for (size_t q = 0; q < s->ranks; q += 1 + s->rank % 2) {
            const unsigned char *its = comm_peer(region, q);
            size_t wrong = its == NULL || (q == s->rank && its != own);
            for (size_t i = 0; its && i < 2 * MOST; i++)
                wrong += its[i] != (unsigned char)(i * 7 + q * 31 + round);
            CHECK_EQ(wrong, 0);
        }
        CHECK_OK(comm_barrier(s->comm));
    }
    comm_ticket ticket = 7;
    CHECK_OK(comm_all_gather_to(channel, NULL, 0, region, 0, 0, NULL, &ticket));
    CHECK_EQ(ticket, 0);
    CHECK_EQ(comm_all_gather_to(channel, NULL, 0, region, 1, 2 * MOST, to[0], &ticket), ZC_EINVAL);
    CHECK(text_has("all_gather_to") && text_has("goes over the end"));
    CHECK_EQ(comm_all_gather_to(channel, NULL, 0, region, 0, 1, NULL, &ticket), ZC_EINVAL);
    CHECK(text_has("into NULL"));
    CHECK_EQ(comm_all_gather_to(channel, NULL, 0, NULL, 0, 1, to[0], &ticket), ZC_EINVAL);
    CHECK_EQ(comm_all_gather_to(channel, NULL, ROOM, region, 0, 1, to[0], &ticket), ZC_EINVAL);
    for (size_t k = 0; k < ROOM; k++)
        free(to[k]);
    comm_region_free(region);

    CHECK_OK(comm_region_alloc(channel, 64, COMM_ONE_COPY, &region));
    for (size_t q = 0; q < s->ranks; q++)
        CHECK(comm_peer(region, q) == region->base);
    CHECK_OK(comm_barrier(s->comm)); /* rank 0's memory */
    comm_region_free(region);
    comm_channel_close(channel);
}

static void test_gather_to(void)
{
    with_all_sizes(gather_to_body);
}

/* ---- exchange, barrier, arrays ----------------------------------------- */

static void exchange_body(rank_state *s)
{
    comm_channel *channel;
    static const size_t sizes[] = {0, 1, 8, 100, COMM_EXCHANGE_BYTES};
    unsigned char record[COMM_EXCHANGE_BYTES], *records = malloc(s->ranks * COMM_EXCHANGE_BYTES);
    CHECK_OK(comm_channel_open(s->comm, "exchange", 3, &channel));
    for (unsigned round = 0; round < 1000 / SCALE; round++) {
        size_t bytes = sizes[round % 5], wrong = 0;
        memset(record, (int)(s->rank * 16 + round % 16), sizeof record);
        CHECK_OK(comm_exchange(channel, round % 3, "a record", record, records, bytes));
        for (size_t q = 0; q < s->ranks; q++)
            for (size_t i = 0; i < bytes; i++)
                wrong += records[q * bytes + i] != (unsigned char)(q * 16 + round % 16);
        CHECK_EQ(wrong, 0);
    }
    CHECK_EQ(comm_exchange(channel, 3, "beyond", record, records, 1), ZC_EINVAL);
    CHECK_EQ(comm_exchange(channel, 0, "too much", record, records, COMM_EXCHANGE_BYTES + 1), ZC_EINVAL);
    comm_channel_close(channel);
    free(records);
}

static void test_exchange(void)
{
    with_all_sizes(exchange_body);
}

static atomic_size_t arrived;

static void barrier_body(rank_state *s)
{
    for (size_t round = 1; round <= 2000 / SCALE; round++) {
        atomic_fetch_add_explicit(&arrived, 1, memory_order_relaxed);
        CHECK_OK(comm_barrier(s->comm));
        CHECK(atomic_load_explicit(&arrived, memory_order_relaxed) >= round * s->ranks);
    }
}

static void test_barrier(void)
{
    static const size_t sizes[] = {1, 2, 3, 4, 8};
    for (size_t i = 0; i < 5; i++) {
        atomic_store(&arrived, 0);
        with_ranks(sizes[i], 20 * SECOND, barrier_body);
    }
}

static void arrays_body(rank_state *s)
{
    static const size_t counts[] = {0, 1, 2, 63, 5000, 300001};
    for (int d = 0; d < ZC_DTYPE_COUNT; d++)
        for (size_t c = 0; c < 6; c++) {
            zc_dtype dtype = (zc_dtype)d;
            size_t count = counts[c], bytes = zc_dtype_bytes(dtype), wrong = 0;
            if (SCALE > 1 && count > 5000 && d % 3)
                continue;
            char *array = malloc(s->ranks * count * bytes + 8), *to = malloc(count * bytes + 8);
            /* small whole numbers: exact in every type */
            for (size_t i = 0; i < count; i++)
                put(array, i, dtype, (double)((i + s->rank) % 7));
            CHECK_OK(comm_array_all_reduce(s->comm, array, count, dtype, COMM_SUM));
            for (size_t i = 0; i < count; i++) {
                double want = 0;
                for (size_t q = 0; q < s->ranks; q++)
                    want += (double)((i + q) % 7);
                wrong += get(array, i, dtype) != want;
            }
            CHECK_EQ(wrong, 0);

            for (size_t i = 0; i < count; i++)
                put(array, i, dtype, (double)((i + s->rank) % 7));
            CHECK_OK(comm_array_all_reduce(s->comm, array, count, dtype, COMM_MAX));
            for (size_t i = 0; i < count; i++) {
                size_t want = 0;
                for (size_t q = 0; q < s->ranks; q++)
                    want = (i + q) % 7 > want ? (i + q) % 7 : want;
                wrong += get(array, i, dtype) != (double)want;
            }
            CHECK_EQ(wrong, 0);

            /* into a slice of the input itself, and outside it */
            for (int inside = 0; inside < 2; inside++) {
                for (size_t i = 0; i < s->ranks * count; i++)
                    put(array, i, dtype, (double)((i + s->rank) % 5));
                char *result = inside ? array + (s->ranks - 1 - s->rank) * count * bytes : to;
                CHECK_OK(comm_array_reduce_scatter(s->comm, array, result, count, dtype, COMM_SUM));
                for (size_t i = 0; i < count; i++) {
                    double want = 0;
                    for (size_t q = 0; q < s->ranks; q++)
                        want += (double)((s->rank * count + i + q) % 5);
                    wrong += get(result, i, dtype) != want;
                }
                CHECK_EQ(wrong, 0);
            }

            for (size_t i = 0; i < count; i++)
                put(to, i, dtype, (double)((i + 3 * s->rank) % 11));
            CHECK_OK(comm_array_all_gather(s->comm, to, array, count * bytes));
            for (size_t i = 0; i < s->ranks * count; i++)
                wrong += get(array, i, dtype) != (double)((i % count + 3 * (i / count)) % 11);
            CHECK_EQ(wrong, 0);

            size_t root = c % s->ranks;
            CHECK_OK(comm_array_broadcast(s->comm, to, count * bytes, root));
            for (size_t i = 0; i < count; i++)
                wrong += get(to, i, dtype) != (double)((i + 3 * root) % 11);
            CHECK_EQ(wrong, 0);
            free(array);
            free(to);
        }
    float three[3] = {0};
    CHECK_EQ(comm_array_all_reduce(s->comm, three, 3, (zc_dtype)77, COMM_SUM), ZC_ETYPE);
    CHECK_EQ(comm_array_all_reduce(s->comm, three, 3, ZC_FLOAT32, (comm_op)9), ZC_EINVAL);
    CHECK_EQ(comm_array_broadcast(s->comm, three, 12, s->ranks), ZC_EINVAL);
    CHECK_EQ(comm_array_all_reduce(s->comm, NULL, 3, ZC_FLOAT32, COMM_SUM), ZC_EINVAL);
    if (s->ranks > 1)
        CHECK_EQ(comm_array_reduce_scatter(s->comm, three, (char *)three + 2, 1, ZC_FLOAT32, COMM_SUM), ZC_EINVAL);
}

static void test_arrays(void)
{
    with_all_sizes(arrays_body);
}

/* Reading a peer's half too early or filling the own too early shows here. */
static void small_body(rank_state *s)
{
    size_t wrong = 0;
    for (unsigned i = 0; i < 10000 / SCALE; i++) {
        float four[4];
        for (unsigned k = 0; k < 4; k++)
            four[k] = (float)(s->rank + i + k);
        if (testing_random(&s->random) % 100 == 0)
            pause_us((unsigned)(testing_random(&s->random) % 200));
        CHECK_OK(comm_array_all_reduce(s->comm, four, 4, ZC_FLOAT32, COMM_SUM));
        for (unsigned k = 0; k < 4; k++)
            wrong += four[k] != (float)(s->ranks * (i + k) + s->ranks * (s->ranks - 1) / 2);
    }
    CHECK_EQ(wrong, 0);
}

static void test_small_all_reduces_with_delays(void)
{
    with_ranks(4, 20 * SECOND, small_body);
}

/* ---- groups and channels ----------------------------------------------- */

static void split_body(rank_state *s)
{
    zc_comm *half, *again, *none;
    CHECK_OK(comm_split(s->comm, (int64_t)(s->rank % 2), &half));
    CHECK_EQ(half->rank, s->rank / 2);
    CHECK_EQ(half->ranks, (s->ranks + 1 - s->rank % 2) / 2);
    double sum = (double)s->rank;
    CHECK_OK(comm_array_all_reduce(half, &sum, 1, ZC_FLOAT64, COMM_SUM));
    double want = 0;
    for (size_t q = s->rank % 2; q < s->ranks; q += 2)
        want += (double)q;
    CHECK(sum == want);

    /* a group of a group, and channels on both at once */
    comm_channel *wide, *narrow;
    comm_region *wide_region, *narrow_region;
    comm_ticket wide_ticket, narrow_ticket;
    CHECK_OK(comm_split(half, 0, &again));
    CHECK_OK(comm_channel_open(s->comm, "wide", 1, &wide));
    CHECK_OK(comm_channel_open(again, "narrow", 1, &narrow));
    CHECK_OK(comm_region_alloc(wide, 64 * s->ranks, 0, &wide_region));
    CHECK_OK(comm_region_alloc(narrow, 64 * again->ranks, 0, &narrow_region));
    for (unsigned round = 0; round < 100; round++) {
        ((uint64_t *)wide_region->base)[8 * s->rank] = s->rank + round;
        ((uint64_t *)narrow_region->base)[8 * again->rank] = s->rank + round;
        if (s->rank % 3 == 0) {
            CHECK_OK(comm_all_gather(wide, NULL, 0, wide_region, 0, 64, &wide_ticket));
            CHECK_OK(comm_all_gather(narrow, NULL, 0, narrow_region, 0, 64, &narrow_ticket));
        } else {
            CHECK_OK(comm_all_gather(narrow, NULL, 0, narrow_region, 0, 64, &narrow_ticket));
            CHECK_OK(comm_all_gather(wide, NULL, 0, wide_region, 0, 64, &wide_ticket));
        }
        CHECK_OK(comm_wait(wide, wide_ticket, NULL));
        CHECK_OK(comm_wait(narrow, narrow_ticket, NULL));
        for (size_t q = 0; q < s->ranks; q++)
            CHECK_EQ(((uint64_t *)wide_region->base)[8 * q], q + round);
        for (size_t q = 0; q < again->ranks; q++)
            CHECK_EQ(((uint64_t *)narrow_region->base)[8 * q], 2 * q + s->rank % 2 + round);
    }
    comm_region_free(narrow_region);
    comm_region_free(wide_region);
    comm_channel_close(narrow);
    comm_channel_close(wide);

    CHECK_OK(comm_split(s->comm, s->rank == 0 ? 5 : -1, &none));
    CHECK_EQ(none != NULL, s->rank == 0);
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

/* Channels and regions come and go; a world that closes before its groups. */
static void reuse_body(rank_state *s)
{
    for (unsigned round = 0; round < 20; round++) {
        comm_channel *channel;
        comm_region *region;
        CHECK_OK(comm_channel_open(s->comm, "again", 5, &channel));
        CHECK_OK(comm_region_alloc(channel, 100000, 0, &region));
        size_t wrong = 0;
        for (size_t i = 0; i < 100000; i++)
            wrong += ((char *)region->base)[i] != 0;
        CHECK_EQ(wrong, 0);
        memset(region->base, 1, 100000);
        comm_region_free(region);
        comm_channel_close(channel);
    }
    zc_comm *all;
    comm_channel *channel;
    CHECK_OK(comm_split(s->comm, 0, &all));
    CHECK_OK(comm_channel_open(all, "last", 1, &channel));
    CHECK_OK(comm_barrier(all));
    comm_close(all); /* before its channel: local, and the channel may still be closed */
    comm_channel_close(channel);
}

static void test_reuse(void)
{
    with_ranks(3, 20 * SECOND, reuse_body);
}

/* ---- ranks that disagree ----------------------------------------------- */

static void after_failure(rank_state *s, zc_status status)
{
    int done;
    (void)done;
    float one = 1;
    CHECK_EQ(comm_barrier(s->comm), status);
    CHECK_EQ(comm_array_all_reduce(s->comm, &one, 1, ZC_FLOAT32, COMM_SUM), status);
    CHECK_EQ(comm_progress(s->comm), status);
}

static void mismatch_array_body(rank_state *s)
{
    float array[8] = {0};
    CHECK_EQ(comm_array_all_reduce(s->comm, array, s->rank == 1 ? 7 : 8, ZC_FLOAT32, COMM_SUM), ZC_EMISMATCH);
    CHECK(text_has("all_reduce(7 elements of float32, sum)") && text_has("all_reduce(8 elements of float32, sum)") &&
          text_has("rank 1"));
    after_failure(s, ZC_EMISMATCH);
}

static void mismatch_kind_body(rank_state *s)
{
    float array[8] = {0};
    zc_status status = s->rank == 0 ? comm_barrier(s->comm) : comm_array_broadcast(s->comm, array, 32, 0);
    CHECK_EQ(status, ZC_EMISMATCH);
    CHECK(text_has("barrier()") && text_has("broadcast(32 bytes from rank 0)"));
    after_failure(s, ZC_EMISMATCH);
}

static void mismatch_tag_body(rank_state *s)
{
    comm_channel *channel;
    comm_region *region;
    comm_ticket ticket;
    float to[16];
    CHECK_OK(comm_channel_open(s->comm, "engine", 4, &channel));
    CHECK_OK(comm_region_alloc(channel, 4096, 0, &region));
    comm_reduce_args args = {.tag = 2, .region = region, .to = to, .count = 16,
                             .dtype = s->rank == 0 ? ZC_FLOAT32 : ZC_BFLOAT16};
    zc_status status = comm_reduce_scatter(channel, NULL, &args, &ticket);
    if (status == ZC_OK)
        status = comm_wait(channel, ticket, NULL);
    CHECK_EQ(status, ZC_EMISMATCH);
    CHECK(text_has("tag 2 of channel 'engine'") && text_has("float32") && text_has("bfloat16"));
    after_failure(s, ZC_EMISMATCH);
    comm_region_free(region);
    comm_channel_close(channel);
}

static void mismatch_gather_body(rank_state *s)
{
    comm_channel *channel;
    comm_region *region;
    comm_ticket ticket;
    char to[8 * RANKS_MAX];
    CHECK_OK(comm_channel_open(s->comm, "gathers", 1, &channel));
    CHECK_OK(comm_region_alloc(channel, 8 * RANKS_MAX, 0, &region));
    zc_status status = s->rank ? comm_all_gather_to(channel, NULL, 0, region, 0, 8, to, &ticket)
                               : comm_all_gather_to(channel, NULL, 0, region, 0, 7, to, &ticket);
    if (status == ZC_OK)
        status = comm_wait(channel, ticket, NULL);
    CHECK_EQ(status, ZC_EMISMATCH);
    CHECK(text_has("all_gather_to(8 bytes a slice") && text_has("all_gather_to(7 bytes a slice"));
    after_failure(s, ZC_EMISMATCH);
    comm_region_free(region);
    comm_channel_close(channel);
}

static void mismatch_channel_body(rank_state *s)
{
    comm_channel *channel;
    CHECK_EQ(comm_channel_open(s->comm, s->rank ? "b" : "a", 1, &channel), ZC_EMISMATCH);
    CHECK(channel == NULL);
    CHECK(text_has("'a'") && text_has("'b'"));
}

static void test_mismatch(void)
{
    with_ranks(2, 20 * SECOND, mismatch_array_body);
    with_ranks(3, 20 * SECOND, mismatch_array_body);
    with_ranks(2, 20 * SECOND, mismatch_kind_body);
    with_ranks(2, 20 * SECOND, mismatch_tag_body);
    with_ranks(2, 20 * SECOND, mismatch_channel_body);
    with_ranks(2, 20 * SECOND, mismatch_gather_body);
}

/* Rank 0 in a barrier, the others in an exchange of a channel: nobody can ever come. */
static void cycle_body(rank_state *s)
{
    comm_channel *channel;
    CHECK_OK(comm_channel_open(s->comm, "steps", 1, &channel));
    uint64_t start = now_ns();
    zc_status status = s->rank == 0 ? comm_barrier(s->comm) : comm_exchange(channel, 0, "step", NULL, NULL, 0);
    CHECK_EQ(status, ZC_EMISMATCH);
    CHECK(text_has("'barrier'") && text_has("'step'") && text_has("rank 0"));
    CHECK(now_ns() - start < 5 * SECOND);
    comm_channel_close(channel);
}

/* 0 waits for 1 in one group, 1 for 2 in another, 2 for 0 in a third. */
static void ring_body(rank_state *s)
{
    zc_comm *pairs[3], *mine = NULL;
    for (size_t p = 0; p < 3; p++) {
        int member = s->rank == p || s->rank == (p + 1) % 3;
        CHECK_OK(comm_split(s->comm, member ? 0 : -1, &pairs[p]));
    }
    mine = pairs[s->rank];
    zc_status status = comm_barrier(mine);
    CHECK(status == ZC_EMISMATCH || status == ZC_EPEERLOST);
    if (status == ZC_EMISMATCH)
        CHECK(text_has("rank 0") && text_has("rank 1") && text_has("rank 2"));
    for (size_t p = 0; p < 3; p++)
        comm_close(pairs[p]);
}

static void test_cycles(void)
{
    with_ranks(2, 20 * SECOND, cycle_body);
    with_ranks(4, 20 * SECOND, cycle_body);
    with_ranks(3, 20 * SECOND, ring_body);
}

/* Slow ranks and late ones are not a cycle. */
static void no_cycle_body(rank_state *s)
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

static void test_late_ranks(void)
{
    with_ranks(3, 20 * SECOND, no_cycle_body);
}

static void closed_body(rank_state *s)
{
    float one = 1;
    CHECK_OK(comm_barrier(s->comm));
    if (s->rank == 1)
        return;
    uint64_t start = now_ns();
    CHECK_EQ(comm_array_all_reduce(s->comm, &one, 1, ZC_FLOAT32, COMM_SUM), ZC_EPEERLOST);
    CHECK(text_has("rank 1") && text_has("has closed its communicator") && text_has("all_reduce"));
    CHECK(now_ns() - start < 2 * SECOND);
    after_failure(s, ZC_EPEERLOST);
}

static void test_closed_peer(void)
{
    with_ranks(2, 20 * SECOND, closed_body);
    with_ranks(4, 20 * SECOND, closed_body);
}

static void timeout_body(rank_state *s)
{
    CHECK_OK(comm_barrier(s->comm));
    uint64_t start = now_ns();
    if (s->rank >= 2) {
        pause_us(2000000);
        after_failure(s, ZC_ETIMEOUT);
        return;
    }
    CHECK_EQ(comm_barrier(s->comm), ZC_ETIMEOUT);
    CHECK(text_has("missing: 2, 3") && text_has("barrier") && text_has("operation 2"));
    CHECK(now_ns() - start < 1900000000); /* the later of the two may hear of it from the other, earlier than 0.3 s */
}

static void test_timeout(void)
{
    with_ranks(4, 300000000, timeout_body);
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
        CHECK_EQ(comm_barrier(s->comm), ZC_EINTERRUPT);
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

static void poison_body(rank_state *s)
{
    if (s->rank == 1) {
        pause_us(20000);
        comm_poison(s->comm, ZC_ESTATE, "the data ran out");
    } else {
        CHECK_EQ(comm_barrier(s->comm), ZC_ESTATE);
        CHECK(text_has("rank 1 reported: the data ran out"));
    }
    after_failure(s, ZC_ESTATE);
}

static void test_poison(void)
{
    with_ranks(3, 20 * SECOND, poison_body);
}

/* ---- several threads of one rank ---------------------------------------- */

typedef struct second_thread {
    comm_channel *channel;
    uint32_t tag;
} second_thread;

static void *exchange_often(void *argument)
{
    second_thread *t = argument;
    uint64_t records[RANKS_MAX];
    for (uint64_t i = 0; i < 500 / SCALE; i++) {
        zc_status status = comm_exchange(t->channel, t->tag, "thread", &i, records, sizeof i);
        CHECK_OK(status);
        if (status != ZC_OK)
            break;
        CHECK_EQ(records[0], i);
    }
    return NULL;
}

static void threads_body(rank_state *s)
{
    comm_channel *channel;
    pthread_t threads[3];
    second_thread args[3];
    CHECK_OK(comm_channel_open(s->comm, "threads", 3, &channel));
    for (uint32_t t = 0; t < 3; t++) {
        args[t] = (second_thread){channel, (t + (uint32_t)s->rank) % 3};
        pthread_create(&threads[t], NULL, exchange_often, &args[t]);
    }
    for (unsigned i = 0; i < 200 / SCALE; i++)
        CHECK_OK(comm_barrier(s->comm));
    for (uint32_t t = 0; t < 3; t++)
        pthread_join(threads[t], NULL);
    comm_channel_close(channel);
}

static void test_several_threads_a_rank(void)
{
    with_ranks(2, 20 * SECOND, threads_body);
    with_ranks(3, 20 * SECOND, threads_body);
}

static zc_comm *shared_comm;

static void *wait_forever(void *argument)
{
    (void)argument;
    CHECK_EQ(comm_barrier(shared_comm), ZC_ESTATE);
    return NULL;
}

/* Closing while another thread of the rank waits: that thread returns. */
static void test_close_while_waiting(void)
{
    zc_comm *comms[2];
    pthread_t thread;
    CHECK_OK(local_comm_create(2, 20 * SECOND, comms));
    shared_comm = comms[0];
    pthread_create(&thread, NULL, wait_forever, NULL);
    pause_us(30000);
    comm_close(comms[0]);
    pthread_join(thread, NULL);
    comm_close(comms[1]);
}

static void test_arguments(void)
{
    zc_comm *comm;
    comm_channel *channel;
    comm_region *region;
    comm_ticket ticket;
    float to[8];
    CHECK_EQ(local_comm_create(0, SECOND, &comm), ZC_EINVAL);
    CHECK_OK(local_comm_create(1, SECOND, &comm));
    CHECK_EQ(comm_channel_open(comm, "too many", 1u << 20, &channel), ZC_EINVAL);
    CHECK_OK(comm_channel_open(comm, "one", 2, &channel));
    CHECK_EQ(comm_region_alloc(channel, 64, 8u, &region), ZC_EINVAL);
    CHECK_EQ(comm_region_alloc(channel, (size_t)1 << 50, 0, &region), ZC_ENOMEM);
    CHECK(text_has("1125899906846720 bytes"));
    CHECK_OK(comm_region_alloc(channel, 64, 0, &region));
    comm_reduce_args args = {.tag = 0, .region = region, .offset_bytes = 36, .to = to, .count = 8, .dtype = ZC_FLOAT32};
    CHECK_EQ(comm_reduce_scatter(channel, NULL, &args, &ticket), ZC_EINVAL);
    args.offset_bytes = 2;
    CHECK_EQ(comm_reduce_scatter(channel, NULL, &args, &ticket), ZC_EINVAL);
    args.offset_bytes = 32;
    args.tag = 2;
    CHECK_EQ(comm_reduce_scatter(channel, NULL, &args, &ticket), ZC_EINVAL);
    args.tag = 1;
    args.dtype = ZC_INT32;
    CHECK_EQ(comm_reduce_scatter(channel, NULL, &args, &ticket), ZC_ETYPE);
    args.dtype = ZC_FLOAT32;
    ((float *)region->base)[8] = 3;
    CHECK_OK(comm_reduce_scatter(channel, NULL, &args, &ticket));
    CHECK_EQ(ticket, 0);
    CHECK(to[0] == 3);
    args.count = (size_t)-1 / 4;
    CHECK_EQ(comm_reduce_scatter(channel, NULL, &args, &ticket), ZC_EINVAL);
    CHECK_EQ(comm_all_gather(channel, NULL, 0, NULL, 0, 4, &ticket), ZC_EINVAL);
    CHECK_EQ(comm_wait(channel, 12345, NULL), ZC_EINVAL);
    comm_region_free(region);
    comm_channel_close(channel);
    comm_close(comm);
    comm_close(NULL);
    comm_channel_close(NULL);
    comm_region_free(NULL);
}

/* ---- every allocation and mapping fails once ----------------------------- */

static atomic_int walk_failures;

static void walk_body(rank_state *s)
{
    comm_channel *channel = NULL;
    comm_region *region = NULL;
    zc_comm *half = NULL;
    float array[4] = {1, 2, 3, 4};
    zc_status status = comm_channel_open(s->comm, "walk", 2, &channel);
    if (status == ZC_OK)
        status = comm_region_alloc(channel, 8192, 0, &region);
    if (status == ZC_OK)
        status = comm_split(s->comm, 1, &half);
    if (status == ZC_OK)
        status = comm_array_all_reduce(half, array, 4, ZC_FLOAT32, COMM_SUM);
    if (status != ZC_OK) {
        CHECK_EQ(status, ZC_ENOMEM);
        CHECK(zc_last_error()[0] != 0);
        atomic_fetch_add(&walk_failures, 1);
    }
    comm_close(half);
    comm_region_free(region);
    comm_channel_close(channel);
}

static void test_faults(void)
{
    for (long n = 1;; n++) {
        zc_comm *comms[2];
        zc_fault_arm(n);
        zc_status status = local_comm_create(2, 5 * SECOND, comms);
        if (status != ZC_OK) {
            CHECK_EQ(status, ZC_ENOMEM);
            continue;
        }
        rank_state states[2];
        pthread_t threads[2];
        atomic_store(&walk_failures, 0);
        for (size_t r = 0; r < 2; r++) {
            states[r] = (rank_state){comms[r], r, 2, walk_body, r};
            pthread_create(&threads[r], NULL, run_rank, &states[r]);
        }
        for (size_t r = 0; r < 2; r++)
            pthread_join(threads[r], NULL);
        if (zc_fault_count() < n) {
            CHECK_EQ(atomic_load(&walk_failures), 0);
            break;
        }
        CHECK_EQ(atomic_load(&walk_failures), 2); /* both ranks learn of it */
        CHECK(n < 1000);
    }
    zc_fault_arm(0);
}

static void poisoning_body(rank_state *s)
{
    comm_channel *channel = NULL;
    comm_region *region = NULL;
    zc_comm *part = NULL;
    zc_status status = ZC_OK;
    for (int turn = 0; turn < 3 && status == ZC_OK; turn++) {
        status = comm_channel_open(s->comm, "poisoning", 2, &channel);
        if (status == ZC_OK)
            status = comm_region_alloc(channel, 8192, turn == 1 ? COMM_ONE_COPY : 0, &region);
        if (status == ZC_OK)
            status = comm_split(s->comm, 1, &part);
        if (status != ZC_OK)
            comm_poison(s->comm, status, "a rank gives up"); /* while peers are still inside the call */
        comm_close(part);
        comm_region_free(region);
        comm_channel_close(channel);
        channel = NULL;
        region = NULL;
        part = NULL;
    }
    CHECK(status == ZC_OK || status == ZC_ENOMEM);
    atomic_fetch_add(&walk_failures, status != ZC_OK);
}

/*
 * What fails by agreement is given back by ranks that know it, while a peer may learn of the poison first: it must
 * not touch what is gone.
 */
static void test_faults_with_poison(void)
{
    for (size_t ranks = 2; ranks <= 4; ranks *= 2)
        for (long n = 1, taken = 1; taken; n += ranks > 2 ? 7 : 1)
            for (int trial = 0; trial < 4 && taken; trial++) {
                zc_comm *comms[RANKS_MAX];
                rank_state states[RANKS_MAX];
                pthread_t threads[RANKS_MAX];
                atomic_store(&walk_failures, 0);
                CHECK_OK(local_comm_create(ranks, 20 * SECOND, comms));
                zc_fault_arm(n);
                for (size_t r = 0; r < ranks; r++) {
                    states[r] = (rank_state){comms[r], r, ranks, poisoning_body, r};
                    pthread_create(&threads[r], NULL, run_rank, &states[r]);
                }
                for (size_t r = 0; r < ranks; r++)
                    pthread_join(threads[r], NULL);
                taken = zc_fault_count() >= n;
                CHECK_EQ(atomic_load(&walk_failures), taken ? ranks : 0);
                zc_fault_arm(0);
            }
}

static void bench_body(rank_state *s)
{
    enum { TURNS = 20000 };
    for (int repeat = 0; repeat < 3; repeat++) {
        CHECK_OK(comm_barrier(s->comm));
        uint64_t start = now_ns();
        for (int i = 0; i < TURNS; i++)
            CHECK_OK(comm_barrier(s->comm));
        if (s->rank == 0)
            printf("%zu threads: barrier %.3f us\n", s->ranks, (double)(now_ns() - start) / TURNS * 1e-3);
    }
}

int main(int argc, char **argv)
{
    if (argc > 1 && !strcmp(argv[1], "bench")) {
        with_ranks(2, 20 * SECOND, bench_body);
        with_ranks(8, 60 * SECOND, bench_body);
        DONE();
    }
    RUN(test_arguments);
    RUN(test_reduce_scatter_and_all_gather);
    RUN(test_nonfinite_flags);
    RUN(test_many_tags_in_any_order);
    RUN(test_words_and_broadcast);
    RUN(test_one_copy);
    RUN(test_gather_to);
    RUN(test_exchange);
    RUN(test_barrier);
    RUN(test_arrays);
    RUN(test_small_all_reduces_with_delays);
    RUN(test_split);
    RUN(test_reuse);
    RUN(test_mismatch);
    RUN(test_cycles);
    RUN(test_late_ranks);
    RUN(test_closed_peer);
    RUN(test_timeout);
    RUN(test_interrupt);
    RUN(test_poison);
    RUN(test_several_threads_a_rank);
    RUN(test_close_while_waiting);
    RUN(test_faults);
    RUN(test_faults_with_poison);
    DONE();
}
