/*
 * The communicator of GPUs on the emulated CUDA and NCCL: every result against a
 * plain loop, every wait by leaving it out, and every way in which it can fail.
 * Ranks are threads, rank r on GPU r, and meet through local_comm_create.  What
 * an operation reads was written on the caller's stream just before, and its
 * result is read on a stream that was made to wait for it, so the checker of the
 * emulation sees every edge that the communicator must draw.
 */
#include "cpu_kernels.h"
#include "cuda_device.h"
#include "emu.h"
#include "nccl_comm.h"
#include "testing.h"

#include <math.h>
#include <pthread.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define RANKS_MAX 4
#define SECOND 1000000000ull
#define TEXT_BYTES 8192
#define SENTENCE_BYTES 1024

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define SEEDS 3
#else
#define SEEDS 6
#endif

typedef struct run_setup {
    size_t ranks;
    uint64_t seed, timeout_ns;
    int deterministic;
    int unchecked;  /* findings are what the test is after */
    int gpu_of_all; /* 0: rank r is on GPU r; else all are on this one, or on none */
} run_setup;

typedef struct rank_state {
    zc_comm *comm;
    zc_device *device;
    zc_stream *stream;
    size_t rank, ranks;
    const run_setup *setup;
    void (*body)(struct rank_state *);
    pthread_barrier_t *meeting; /* of all ranks, beside the communicator */
    zc_status status;           /* of creation, then what body leaves */
    char text[SENTENCE_BYTES];
} rank_state;

static rank_state states[RANKS_MAX]; /* of the last run */

static int says(const char *text, const char *part)
{
    if (strstr(text, part))
        return 1;
    fprintf(stderr, "not in the sentence: '%s' in '%s'\n", part, text);
    return 0;
}

/* ---- a run ---------------------------------------------------------------------- */

static zc_status keep(rank_state *s, zc_status status)
{
    s->status = status;
    snprintf(s->text, sizeof s->text, "%s", status == ZC_OK ? "" : zc_last_error());
    return status;
}

static zc_status open_rank(rank_state *s, zc_comm *host)
{
    int gpu = s->setup->gpu_of_all ? s->setup->gpu_of_all : (int)s->rank;
    cudaStream_t stream = NULL;
    nccl_comm_config config = {.host = host, .ordinal = gpu, .deterministic = s->setup->deterministic};
    ZC_TRY(nccl_comm_create(&config, &s->comm));
    ZC_TRY(cuda_device_create(gpu, &s->device));
    CHECK_EQ(cudaSetDevice(gpu), cudaSuccess);
    if ((s->setup->seed + s->rank) % 2) /* the others use the legacy default stream */
        CHECK_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    s->stream = (zc_stream *)(void *)stream;
    return ZC_OK;
}

static void *run_rank(void *argument)
{
    rank_state *s = argument;
    if (keep(s, open_rank(s, s->comm)) == ZC_OK)
        s->body(s);
    comm_close(s->comm);
    if (s->device)
        s->device->ops->destroy(s->device);
    if (s->stream)
        cudaStreamDestroy((cudaStream_t)(void *)s->stream);
    return NULL;
}

static void check_clean(const run_setup *setup)
{
    static char text[TEXT_BYTES];
    if (!setup->unchecked && emu_findings(text, sizeof text)) {
        fprintf(stderr, "seed %" PRIu64 ", %zu ranks:\n%s\n", setup->seed, setup->ranks, text);
        CHECK(!"no findings");
    }
    if (emu_leaks(text, sizeof text)) {
        fprintf(stderr, "seed %" PRIu64 ", %zu ranks, left behind:\n%s\n", setup->seed, setup->ranks, text);
        CHECK(!"no leaks");
    }
}

static void reset(uint64_t seed)
{
    static const int eager_levels[] = {0, 3, -1};
    emu_reset(seed, eager_levels[seed % 3], 1);
}

/* body on all ranks, each with its communicator and stream, which are closed behind it. The emulation was reset. */
static void run_on(const run_setup *setup, zc_comm **hosts, void (*body)(rank_state *))
{
    pthread_t threads[RANKS_MAX];
    pthread_barrier_t meeting;
    pthread_barrier_init(&meeting, NULL, (unsigned)setup->ranks);
    for (size_t r = 0; r < setup->ranks; r++) {
        states[r] = (rank_state){.comm = hosts[r], .rank = r, .ranks = setup->ranks, .setup = setup, .body = body,
                                 .meeting = &meeting};
        pthread_create(&threads[r], NULL, run_rank, &states[r]);
    }
    for (size_t r = 0; r < setup->ranks; r++)
        pthread_join(threads[r], NULL);
    pthread_barrier_destroy(&meeting);
}

static void run(const run_setup *setup, void (*body)(rank_state *))
{
    zc_comm *hosts[RANKS_MAX];
    reset(setup->seed);
    CHECK_OK(local_comm_create(setup->ranks, setup->timeout_ns ? setup->timeout_ns : 60 * SECOND, hosts));
    run_on(setup, hosts, body);
    check_clean(setup);
}

/* On 1 to 4 ranks, every eager level, both ways of adding. */
static void run_everywhere(void (*body)(rank_state *))
{
    for (uint64_t seed = 1; seed <= SEEDS; seed++)
        for (size_t ranks = 1; ranks <= RANKS_MAX; ranks++) {
            run_setup setup = {.ranks = ranks, .seed = seed * 10 + ranks, .deterministic = (seed + ranks) % 2 == 0};
            run(&setup, body);
            for (size_t r = 0; r < ranks; r++)
                if (states[r].status != ZC_OK) {
                    fprintf(stderr, "rank %zu of %zu: %s\n", r, ranks, states[r].text);
                    CHECK(!"no failure");
                }
        }
}

static void meet(rank_state *s)
{
    pthread_barrier_wait(s->meeting);
}

/* ---- memory ------------------------------------------------------------------------ */

static void *new_memory(rank_state *s, const void *host, size_t bytes)
{
    void *there = NULL;
    CHECK_OK(s->device->ops->alloc(s->device, bytes + 8, &there));
    if (host)
        CHECK_OK(s->device->ops->upload(s->device, s->stream, there, host, bytes));
    return there;
}

static void drop_memory(rank_state *s, void *memory, size_t bytes)
{
    s->device->ops->free(s->device, memory, bytes + 8);
}

static void up(rank_state *s, void *there, const void *host, size_t bytes)
{
    CHECK_OK(s->device->ops->upload(s->device, s->stream, there, host, bytes));
}

static void down(rank_state *s, void *host, const void *there, size_t bytes)
{
    CHECK_OK(s->device->ops->download(s->device, s->stream, host, there, bytes));
}

static void wait_on(rank_state *s, comm_channel *channel, comm_ticket ticket)
{
    CHECK_OK(comm_wait(channel, ticket, s->stream));
}

/* Element k of every rank's contribution: the same on all ranks, with sums that have to be rounded. */
static float contribution(size_t rank, size_t k, unsigned round)
{
    uint64_t state = rank * 1000003 + k * 101 + round;
    return testing_float(&state);
}

static double element(const void *array, size_t k, zc_dtype dtype)
{
    switch (dtype) {
    case ZC_FLOAT64: return ((const double *)array)[k];
    case ZC_BFLOAT16: return zc_bf16_to_float(((const uint16_t *)array)[k]);
    case ZC_FLOAT16: return zc_fp16_to_float(((const uint16_t *)array)[k]);
    default: return ((const float *)array)[k];
    }
}

/* ---- reduce-scatter ------------------------------------------------------------------ */

/* One call and what surrounds it. */
typedef struct reduction {
    zc_dtype dtype;
    size_t count;
    unsigned round;
    int own;        /* the own slice is given apart; what the region has in its place is not a number */
    int to_own;     /* the result replaces that */
    int to_region;  /* the result replaces the own slice in the region */
    int zero_rank;  /* contributes zeros; -1: none */
    int accumulate;
} reduction;

#define GUARD_ELEMS 16 /* before the slices in the region */

static float initial(size_t k)
{
    return (float)k * 0.125f - 3;
}

/*
 * Rank order and one rounding for each addition, so bit for bit.  NCCL promises
 * no order, and the emulated one adds in another on purpose: each of the
 * additions may then round by half a unit of the sum of magnitudes.
 */
static int is_reduced(const rank_state *s, const reduction *r, const void *got)
{
    zc_dtype sum = zc_dtype_sum(r->dtype);
    unsigned char rounded[8];
    for (size_t k = 0; k < r->count; k++) {
        double total = 0, size = fabs(initial(k));
        for (size_t q = 0; q < s->ranks; q++) {
            float given = (int)q == r->zero_rank ? 0 : contribution(q, s->rank * r->count + k, r->round);
            testing_put(rounded, r->dtype, 0, given);
            double value = element(rounded, 0, r->dtype);
            size += fabs(value);
            total = q == 0 ? value : sum == ZC_FLOAT64 ? total + value : (double)((float)total + (float)value);
        }
        if (r->accumulate)
            total = sum == ZC_FLOAT64 ? initial(k) + total : (double)(initial(k) + (float)total);
        double slack = size * (double)(s->ranks + 1) * (sum == ZC_FLOAT64 ? 0x1p-53 : 0x1p-24);
        double is = element(got, k, sum);
        if (s->setup->deterministic || s->ranks == 1 ? is != total : !(fabs(is - total) <= slack)) {
            fprintf(stderr, "rank %zu, %s, element %zu of %zu: %.17g instead of %.17g\n", s->rank,
                    zc_dtype_name(r->dtype), k, r->count, is, total);
            return 0;
        }
    }
    return 1;
}

static void reduce_once(rank_state *s, comm_channel *channel, comm_region *region, const reduction *r, uint32_t *flags)
{
    size_t bytes = zc_dtype_bytes(r->dtype), sum_bytes = zc_dtype_bytes(zc_dtype_sum(r->dtype));
    size_t slice = r->count * bytes, whole = s->ranks * slice;
    char *window = malloc(whole), *after = malloc(whole), *own = malloc(slice), *to = malloc(r->count * sum_bytes);
    char *there = (char *)region->base + GUARD_ELEMS * bytes;
    int zero = (int)s->rank == r->zero_rank;
    for (size_t k = 0; k < s->ranks * r->count; k++)
        testing_put(window, r->dtype, k, zero ? NAN : contribution(s->rank, k, r->round));
    for (size_t k = 0; k < r->count; k++)
        testing_put(to, zc_dtype_sum(r->dtype), k, initial(k));
    char *mine = window + s->rank * slice;
    memcpy(own, mine, slice);
    if (r->own)
        memset(mine, 0xff, slice);
    if (r->to_region && r->accumulate)
        memcpy(mine, to, slice);
    up(s, there, window, whole);
    void *own_there = r->own ? new_memory(s, own, slice) : NULL, *to_there = new_memory(s, to, r->count * sum_bytes);
    comm_reduce_args args = {.tag = 0, .region = region, .offset_bytes = GUARD_ELEMS * bytes, .own = own_there,
                             .to = to_there, .count = r->count, .dtype = r->dtype, .accumulate = r->accumulate,
                             .zero = zero, .flags = flags};
    if (r->to_own)
        args.to = own_there;
    if (r->to_region)
        args.to = there + s->rank * slice;
    comm_ticket ticket;
    CHECK_OK(comm_reduce_scatter(channel, s->stream, &args, &ticket));
    wait_on(s, channel, ticket);
    down(s, to, args.to, r->count * sum_bytes);
    CHECK(is_reduced(s, r, to));
    down(s, after, there, whole);
    if (r->to_region)
        memcpy(after + s->rank * slice, mine, slice);
    CHECK(memcmp(after, window, whole) == 0);
    drop_memory(s, own_there, slice);
    drop_memory(s, to_there, r->count * sum_bytes);
    free(window);
    free(after);
    free(own);
    free(to);
}

static void reduce_body(rank_state *s)
{
    static const zc_dtype dtypes[] = {ZC_FLOAT32, ZC_FLOAT64, ZC_BFLOAT16, ZC_FLOAT16};
    static const size_t counts[] = {1, 64, 331};
    comm_channel *channel;
    uint32_t zero = 0, flags = 7;
    size_t reserved, last = s->ranks - 1;
    CHECK_OK(comm_channel_open(s->comm, "reduce", 1, &channel));
    uint32_t *flags_there = new_memory(s, &zero, sizeof zero);
    for (size_t d = 0; d < 4; d++)
        for (size_t c = 0; c < 3; c++) {
            zc_dtype dtype = dtypes[d];
            size_t count = counts[c];
            int wide = dtype == zc_dtype_sum(dtype);
            comm_region *region;
            CHECK_OK(comm_region_alloc(channel, (s->ranks * count + GUARD_ELEMS) * zc_dtype_bytes(dtype), 0, &region));
            CHECK_OK(comm_reserve(channel, count, dtype, &reserved));
            reduction all[] = {
                {.zero_rank = -1},
                {.own = 1, .accumulate = 1, .zero_rank = (int)last},
                {.zero_rank = 0},
                {.own = 1, .to_own = 1, .zero_rank = -1},
                {.to_region = 1, .zero_rank = -1},
                {.own = 1, .to_region = 1, .accumulate = 1, .zero_rank = -1},
                {.own = 1, .to_region = 1, .accumulate = 1, .zero_rank = (int)last},
            };
            for (size_t i = 0; i < (wide ? sizeof all / sizeof *all : 3); i++) {
                all[i].dtype = dtype;
                all[i].count = count;
                all[i].round = (unsigned)i;
                reduce_once(s, channel, region, &all[i], flags_there);
            }
            comm_region_free(region);
        }
    down(s, &flags, flags_there, sizeof flags);
    CHECK_EQ(flags, 0);
    drop_memory(s, flags_there, sizeof flags);
    comm_channel_close(channel);
}

static void test_reduce_scatter(void)
{
    run_everywhere(reduce_body);
}

/* Flags tell of what a rank has written, and are or-ed in. */
static void nonfinite_body(rank_state *s)
{
    enum { COUNT = 100 };
    comm_channel *channel;
    comm_region *region;
    comm_ticket ticket;
    size_t reserved, whole = s->ranks * COUNT * sizeof(float);
    float *window = calloc(1, whole);
    uint32_t flags = 0;
    if (s->rank == s->ranks - 1)
        window[17] = INFINITY; /* for rank 0 */
    if (s->rank == 0)
        window[(s->ranks - 1) * COUNT + 3] = NAN;
    CHECK_OK(comm_channel_open(s->comm, "nonfinite", 1, &channel));
    CHECK_OK(comm_region_alloc(channel, whole, 0, &region));
    CHECK_OK(comm_reserve(channel, COUNT, ZC_FLOAT32, &reserved));
    uint32_t *flags_there = new_memory(s, &flags, sizeof flags);
    void *to = new_memory(s, NULL, COUNT * sizeof(float));
    comm_reduce_args args = {.region = region, .to = to, .count = COUNT, .dtype = ZC_FLOAT32, .flags = flags_there};
    for (int i = 0; i < 2; i++) {
        up(s, region->base, window, whole);
        CHECK_OK(comm_reduce_scatter(channel, s->stream, &args, &ticket));
        wait_on(s, channel, ticket);
        memset(window, 0, whole);
        down(s, &flags, flags_there, sizeof flags); /* stays, although the second sum is finite */
        CHECK_EQ(flags, (s->rank == 0 ? CPU_NONFINITE_INF : 0u) | (s->rank == s->ranks - 1 ? CPU_NONFINITE_NAN : 0u));
    }
    drop_memory(s, to, COUNT * sizeof(float));
    drop_memory(s, flags_there, sizeof flags);
    comm_region_free(region);
    comm_channel_close(channel);
    free(window);
}

static void test_nonfinite_flags(void)
{
    run_everywhere(nonfinite_body);
}

/* Several tags under way, and one that is posted again before anybody waited for it. */
static void in_flight_body(rank_state *s)
{
    enum { TAGS = 5, COUNT = 200 };
    comm_channel *channel;
    comm_region *region;
    comm_ticket tickets[TAGS], again;
    size_t reserved, stride = s->ranks * COUNT * sizeof(float), slice = COUNT * sizeof(float);
    float *window = malloc(TAGS * stride), *first = malloc(slice), *twice = malloc(slice);
    CHECK_OK(comm_channel_open(s->comm, "in flight", TAGS, &channel));
    CHECK_OK(comm_region_alloc(channel, TAGS * stride, 0, &region));
    CHECK_OK(comm_reserve(channel, COUNT, ZC_FLOAT32, &reserved));
    CHECK_EQ(reserved, s->ranks == 1 ? 0 : stride);
    CHECK_OK(comm_reserve(channel, COUNT / 2, ZC_FLOAT32, &reserved));
    CHECK_EQ(reserved, 0);
    for (size_t k = 0; k < TAGS * s->ranks * COUNT; k++)
        window[k] = contribution(s->rank, k % (s->ranks * COUNT), (unsigned)(k / (s->ranks * COUNT)));
    up(s, region->base, window, TAGS * stride);
    char *to = new_memory(s, NULL, TAGS * slice);
    comm_reduce_args args = {.region = region, .count = COUNT, .dtype = ZC_FLOAT32};
    for (uint32_t t = 0; t < TAGS; t++) {
        args.tag = t;
        args.offset_bytes = t * stride;
        args.to = to + t * slice;
        CHECK_OK(comm_reduce_scatter(channel, s->stream, &args, &tickets[t]));
    }
    args.accumulate = 1;
    CHECK_OK(comm_reduce_scatter(channel, s->stream, &args, &again));
    CHECK(s->ranks == 1 || again != tickets[TAGS - 1]);
    for (uint32_t t = TAGS; t-- > 0;) {
        int done = 0;
        if (t % 3 == 0)
            wait_on(s, channel, tickets[t]);
        else if (t % 3 == 1)
            for (done = 0; !done;)
                CHECK_OK(comm_test(channel, tickets[t], s->stream, &done));
        else
            CHECK(comm_wait_some(channel, tickets[t], s->stream, 5000000000ull, &done) == ZC_OK && done);
        reduction r = {.dtype = ZC_FLOAT32, .count = COUNT, .round = t, .zero_rank = -1};
        if (t == TAGS - 1)
            wait_on(s, channel, again);
        down(s, first, to + t * slice, slice);
        if (t < TAGS - 1)
            CHECK(is_reduced(s, &r, first));
        else
            memcpy(twice, first, slice);
    }
    for (size_t k = 0; k < COUNT; k++) /* doubling is exact: the second pass adds the same bits again */
        first[k] = twice[k] / 2;
    CHECK(is_reduced(s, &(reduction){.dtype = ZC_FLOAT32, .count = COUNT, .round = TAGS - 1, .zero_rank = -1}, first));
    drop_memory(s, to, TAGS * slice);
    comm_region_free(region);
    comm_channel_close(channel);
    free(window);
    free(first);
    free(twice);
}

static void test_in_flight(void)
{
    run_everywhere(in_flight_body);
}

/* ---- the other operations ---------------------------------------------------------------- */

static void fill_bytes(unsigned char *to, size_t bytes, size_t rank, unsigned round)
{
    uint64_t state = rank * 77 + round;
    for (size_t k = 0; k < bytes; k++)
        to[k] = (unsigned char)testing_random(&state);
}

/* Gathers in place and into a slot, seen at an alias of it, on two channels at once. */
static void gather_body(rank_state *s)
{
    enum { SLICE = 1000, OFFSET = 48 };
    const device_ops *ops = s->device->ops;
    comm_channel *channel[2];
    comm_region *region[2];
    comm_ticket ticket[2];
    device_slot slot;
    void *alias;
    size_t whole = s->ranks * SLICE;
    unsigned char *want = malloc(whole), *got = malloc(whole);
    for (int i = 0; i < 2; i++) {
        CHECK_OK(comm_channel_open(s->comm, i ? "units" : "space", 3, &channel[i]));
        CHECK_OK(comm_region_alloc(channel[i], OFFSET + whole, i ? COMM_GROWS : 0, &region[i]));
        CHECK_OK(comm_region_grow(region[i], OFFSET + whole));
    }
    CHECK_OK(ops->slot_alloc(s->device, ops->slot_step_bytes, &slot));
    CHECK_OK(ops->slot_map(s->device, &slot, slot.bytes, &alias));
    for (unsigned round = 0; round < 3; round++) {
        for (size_t q = 0; q < s->ranks; q++)
            fill_bytes(want + q * SLICE, SLICE, q, round);
        unsigned char *own = want + s->rank * SLICE;
        up(s, (char *)region[0]->base + OFFSET + s->rank * SLICE, own, SLICE);
        up(s, (char *)region[1]->base + OFFSET, own, SLICE);
        CHECK_OK(comm_all_gather(channel[0], s->stream, round, region[0], OFFSET, SLICE, &ticket[0]));
        CHECK_OK(comm_all_gather_to(channel[1], s->stream, 1, region[1], OFFSET, SLICE, slot.base, &ticket[1]));
        wait_on(s, channel[1], ticket[1]);
        down(s, got, alias, whole);
        CHECK(memcmp(got, want, whole) == 0);
        wait_on(s, channel[0], ticket[0]);
        down(s, got, (char *)region[0]->base + OFFSET, whole);
        CHECK(memcmp(got, want, whole) == 0);
    }
    CHECK_OK(ops->synchronize(s->device, s->stream));
    ops->slot_unmap(s->device, alias, slot.bytes);
    ops->slot_free(s->device, &slot);
    for (int i = 0; i < 2; i++) {
        comm_region_free(region[i]);
        comm_channel_close(channel[i]);
    }
    free(want);
    free(got);
}

static void test_gathers(void)
{
    run_everywhere(gather_body);
}

static void words_body(rank_state *s)
{
    enum { WORDS = 70 };
    comm_channel *channel;
    comm_region *region;
    comm_ticket ticket;
    uint64_t words[WORDS], sums[WORDS];
    CHECK_OK(comm_channel_open(s->comm, "words", 2, &channel));
    CHECK_OK(comm_region_alloc(channel, 8 + sizeof words, 0, &region));
    uint64_t *to = new_memory(s, NULL, sizeof sums);
    for (size_t root = 0; root < s->ranks; root++) {
        for (uint64_t k = 0; k < WORDS; k++)
            words[k] = (s->rank + 1) * (k + root + 0x4000000000000000ull);
        up(s, (char *)region->base + 8, words, sizeof words);
        CHECK_OK(comm_all_reduce_words(channel, s->stream, 0, region, 8, WORDS, to, &ticket));
        wait_on(s, channel, ticket);
        down(s, sums, to, sizeof sums);
        for (uint64_t k = 0; k < WORDS; k++)
            CHECK_EQ(sums[k], s->ranks * (s->ranks + 1) / 2 * (k + root + 0x4000000000000000ull));
        CHECK_OK(comm_broadcast(channel, s->stream, 1, region, 8, sizeof words, root, &ticket));
        wait_on(s, channel, ticket);
        down(s, sums, (char *)region->base + 8, sizeof sums);
        for (uint64_t k = 0; k < WORDS; k++)
            CHECK_EQ(sums[k], (root + 1) * (k + root + 0x4000000000000000ull));
    }
    drop_memory(s, to, sizeof sums);
    comm_region_free(region);
    comm_channel_close(channel);
}

static void test_words_and_broadcast(void)
{
    run_everywhere(words_body);
}

/* Operations of one tag come one after the other, on whichever lane they are; no stream waits in between. */
static void same_tag_body(rank_state *s)
{
    enum { SLICE = 512 };
    comm_channel *channel;
    comm_region *region;
    comm_ticket first, second;
    size_t whole = s->ranks * SLICE;
    unsigned char *bytes = malloc(whole), *got = malloc(whole);
    CHECK_OK(comm_channel_open(s->comm, "one tag", 1, &channel));
    CHECK_OK(comm_region_alloc(channel, whole, 0, &region));
    for (size_t q = 0; q < s->ranks; q++)
        fill_bytes(bytes + q * SLICE, SLICE, q, 5);
    up(s, (char *)region->base + s->rank * SLICE, bytes + s->rank * SLICE, SLICE);
    char *to = new_memory(s, NULL, whole);
    CHECK_OK(comm_all_gather(channel, s->stream, 0, region, 0, SLICE, &first));
    CHECK_OK(comm_all_gather_to(channel, s->stream, 0, region, 0, SLICE, to, &second));
    wait_on(s, channel, first);
    wait_on(s, channel, second);
    down(s, got, to, whole);
    for (size_t q = 0; q < s->ranks; q++)
        CHECK(memcmp(got + q * SLICE, bytes, SLICE) == 0); /* every rank's first slice is rank 0's by then */
    CHECK_OK(comm_all_gather(channel, s->stream, 0, region, 0, SLICE, &second));
    wait_on(s, channel, second);
    CHECK_OK(s->device->ops->synchronize(s->device, s->stream));
    drop_memory(s, to, whole);
    comm_region_free(region);
    comm_channel_close(channel);
    free(bytes);
    free(got);
}

static void test_one_tag_on_two_lanes(void)
{
    run_everywhere(same_tag_body);
}

/* An operation is posted on one stream and waited for on another. */
static void two_streams_body(rank_state *s)
{
    comm_channel *channel;
    comm_region *region;
    comm_ticket ticket;
    cudaStream_t other;
    uint64_t word = s->rank + 1, sum = 0;
    CHECK_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
    CHECK_OK(comm_channel_open(s->comm, "streams", 1, &channel));
    CHECK_OK(comm_region_alloc(channel, sizeof word, 0, &region));
    uint64_t *to = new_memory(s, NULL, sizeof sum);
    up(s, region->base, &word, sizeof word);
    CHECK_OK(comm_all_reduce_words(channel, s->stream, 0, region, 0, 1, to, &ticket));
    /* Alone there is no ticket: it is done on the stream itself. */
    zc_stream *reader = s->ranks == 1 ? s->stream : (zc_stream *)(void *)other;
    CHECK_OK(comm_wait(channel, ticket, reader));
    CHECK_OK(s->device->ops->download(s->device, reader, &sum, to, sizeof sum));
    CHECK_EQ(sum, s->ranks * (s->ranks + 1) / 2);
    CHECK_OK(s->device->ops->synchronize(s->device, reader));
    drop_memory(s, to, sizeof sum);
    comm_region_free(region);
    comm_channel_close(channel);
    cuda_device_forget_stream(s->device, other);
    CHECK_EQ(cudaStreamDestroy(other), cudaSuccess);
}

static void test_two_streams(void)
{
    run_everywhere(two_streams_body);
}

static void odds_body(rank_state *s)
{
    comm_channel *channel;
    comm_region *region = (comm_region *)8, *none = (comm_region *)8;
    comm_ticket ticket;
    CHECK_OK(comm_channel_open(s->comm, "odds", 2, &channel));
    CHECK_OK(comm_region_alloc(channel, 0, 0, &none));
    CHECK(none == NULL);
    CHECK_EQ(comm_region_alloc(channel, 64, COMM_ONE_COPY, &region), ZC_EINVAL);
    CHECK(region == NULL && says(zc_last_error(), "shared_params=False"));
    CHECK_OK(comm_region_alloc(channel, 256, 0, &region));
    CHECK(comm_peer(region, 0) == NULL);
    CHECK_OK(comm_all_gather(channel, s->stream, 0, region, 0, 0, &ticket));
    wait_on(s, channel, ticket);
    CHECK_OK(comm_broadcast(channel, s->stream, 0, region, 0, 0, 0, &ticket));
    wait_on(s, channel, ticket);
    CHECK_OK(comm_reduce_scatter(channel, s->stream, &(comm_reduce_args){.region = region, .dtype = ZC_FLOAT32},
                                 &ticket));
    wait_on(s, channel, ticket);
    float *to = new_memory(s, NULL, 64);
    if (s->ranks > 1) {
        comm_reduce_args args = {.region = region, .to = to, .count = 16, .dtype = ZC_FLOAT32};
        CHECK_EQ(comm_reduce_scatter(channel, s->stream, &args, &ticket), ZC_EINVAL);
        CHECK(ticket == 0 && says(zc_last_error(), "nothing was reserved"));
        CHECK_EQ(comm_broadcast(channel, s->stream, 2, region, 0, 8, 0, &ticket), ZC_EINVAL);
        CHECK(says(zc_last_error(), "tag 2 of channel 'odds', which has 2"));
    }
    comm_channel *many;
    CHECK_EQ(comm_channel_open(s->comm, "many", 1u << 20, &many), ZC_EINVAL);
    CHECK(many == NULL);
    CHECK_OK(comm_barrier(s->comm)); /* refusals have broken nothing */
    drop_memory(s, to, 64);
    comm_region_free(region);
    comm_channel_close(channel);
}

static void test_odds(void)
{
    run_everywhere(odds_body);
}

static void host_body(rank_state *s)
{
    comm_channel *channel;
    uint64_t record = s->rank + 5, records[RANKS_MAX];
    float value[RANKS_MAX], gathered[RANKS_MAX];
    CHECK_OK(comm_channel_open(s->comm, "host", 1, &channel));
    CHECK_OK(comm_exchange(channel, 0, "records", &record, records, sizeof record));
    for (size_t q = 0; q < s->ranks; q++) {
        CHECK_EQ(records[q], q + 5);
        value[q] = (float)(s->rank + q);
    }
    CHECK_OK(comm_array_all_gather(s->comm, &value[s->rank], gathered, sizeof *value));
    for (size_t q = 0; q < s->ranks; q++)
        CHECK(gathered[q] == (float)(2 * q));
    CHECK_OK(comm_array_reduce_scatter(s->comm, value, gathered, 1, ZC_FLOAT32, COMM_SUM));
    CHECK(gathered[0] == (float)(s->ranks * (s->ranks - 1) / 2 + s->ranks * s->rank));
    CHECK_OK(comm_array_all_reduce(s->comm, value, 1, ZC_FLOAT32, COMM_MAX));
    CHECK(value[0] == (float)(s->ranks - 1));
    value[1 % s->ranks] = (float)s->rank;
    CHECK_OK(comm_array_broadcast(s->comm, value, sizeof *value * s->ranks, s->ranks - 1));
    CHECK(value[1 % s->ranks] == (float)(s->ranks - 1));
    CHECK_OK(comm_watch(s->comm, "nothing"));
    CHECK_OK(comm_progress(s->comm));
    CHECK_OK(comm_barrier(s->comm)); /* nobody has closed before that */
    comm_channel_close(channel);
}

static void test_what_the_host_does(void)
{
    run_everywhere(host_body);
}

/* A group of some ranks has a communicator of its own, on the same GPUs. */
static void split_body(rank_state *s)
{
    zc_comm *whole = s->comm, *part = NULL;
    CHECK_OK(comm_split(whole, s->rank == 0 && s->ranks > 2 ? -1 : (int64_t)(s->rank % 2), &part));
    if (part) {
        rank_state inner = *s;
        inner.comm = part;
        inner.rank = part->rank;
        inner.ranks = part->ranks;
        words_body(&inner);
        gather_body(&inner);
        CHECK_OK(s->device->ops->synchronize(s->device, s->stream));
        comm_close(part);
    } else {
        CHECK(s->rank == 0 && s->ranks > 2);
    }
    CHECK_OK(comm_barrier(whole));
    words_body(s);
}

static void test_split(void)
{
    run_everywhere(split_body);
}

/* ---- waits -------------------------------------------------------------------------------- */

/* Communication without looking at results, which are wrong when a wait is left out. */
static void orders_body(rank_state *s)
{
    comm_channel *channel;
    comm_region *region;
    comm_ticket ticket;
    uint64_t word = 1, sum;
    CHECK_OK(comm_channel_open(s->comm, "orders", 1, &channel));
    CHECK_OK(comm_region_alloc(channel, s->ranks * sizeof word, 0, &region));
    uint64_t *to = new_memory(s, NULL, s->ranks * sizeof sum);
    up(s, region->base, &word, sizeof word);
    CHECK_OK(comm_all_reduce_words(channel, s->stream, 0, region, 0, 1, to, &ticket));
    wait_on(s, channel, ticket);
    down(s, &sum, to, sizeof sum);
    CHECK_OK(comm_all_gather(channel, s->stream, 0, region, 0, sizeof word, &ticket));
    CHECK_OK(comm_all_gather_to(channel, s->stream, 0, region, 0, sizeof word, to, &ticket));
    wait_on(s, channel, ticket);
    down(s, &sum, to, sizeof sum);
    meet(s); /* a rank that does not wait must not close before its peers have posted */
    CHECK_OK(s->device->ops->synchronize(s->device, s->stream));
    drop_memory(s, to, s->ranks * sizeof sum);
    comm_region_free(region);
    comm_channel_close(channel);
}

static int is_missed_on_all(const char *site)
{
    for (uint64_t seed = 1; seed <= SEEDS; seed++) {
        run_setup setup = {.ranks = 2, .seed = seed, .deterministic = 1, .unchecked = 1};
        emu_drop_wait(site);
        run(&setup, orders_body);
        emu_drop_wait(NULL);
        if (emu_findings(NULL, 0) == 0)
            return 0;
    }
    return 1;
}

/* Each wait of the operations is missed when it is left out, on every schedule. */
static void test_no_wait_is_idle(void)
{
    static char sites[TEXT_BYTES];
    int tried = 0;
    emu_wait_sites(sites, sizeof sites);
    for (char *line = sites, *end; (end = strchr(line, '\n')) != NULL; line = end + 1) {
        *end = '\0';
        if (strncmp(line, "nccl_", 5) != 0 || !strstr(line, "cudaStreamWaitEvent"))
            continue;
        tried++;
        if (!is_missed_on_all(line)) {
            fprintf(stderr, "nobody misses %s\n", line);
            CHECK(0);
        }
    }
    CHECK(tried >= 3);
}

/* What all ranks have posted reaches all, although they close before it has run. */
static void close_early_body(rank_state *s)
{
    enum { SLICE = 3000 };
    comm_channel *channel;
    comm_region *region;
    comm_ticket ticket;
    size_t whole = s->ranks * SLICE;
    unsigned char *want = malloc(whole), *got = malloc(whole);
    CHECK_OK(comm_channel_open(s->comm, "early", 1, &channel));
    CHECK_OK(comm_region_alloc(channel, SLICE, 0, &region));
    for (size_t q = 0; q < s->ranks; q++)
        fill_bytes(want + q * SLICE, SLICE, q, 9);
    char *to = new_memory(s, NULL, whole);
    up(s, region->base, want + s->rank * SLICE, SLICE);
    CHECK_OK(comm_all_gather_to(channel, s->stream, 0, region, 0, SLICE, to, &ticket));
    wait_on(s, channel, ticket);
    meet(s);
    comm_region_free(region);
    comm_channel_close(channel);
    comm_close(s->comm);
    s->comm = NULL;
    down(s, got, to, whole);
    CHECK(memcmp(got, want, whole) == 0);
    drop_memory(s, to, whole);
    free(want);
    free(got);
}

static void test_close_before_the_end(void)
{
    run_everywhere(close_early_body);
}

/* ---- failures of ranks ------------------------------------------------------------------------ */

/* The stream ends, whatever became of what is in it: the watchdog sees to that. */
static void drain(rank_state *s)
{
    CHECK_EQ(cudaStreamSynchronize((cudaStream_t)(void *)s->stream), cudaSuccess);
}

typedef struct gathering {
    comm_channel *channel;
    comm_region *region;
    char *to;
} gathering;

#define GATHER_SLICE 64

static void gathering_open(rank_state *s, gathering *g)
{
    CHECK_OK(comm_channel_open(s->comm, "failing", 2, &g->channel));
    CHECK_OK(comm_region_alloc(g->channel, s->ranks * GATHER_SLICE, 0, &g->region));
    g->to = new_memory(s, NULL, s->ranks * GATHER_SLICE);
}

static void gathering_close(rank_state *s, gathering *g)
{
    drain(s);
    comm_region_free(g->region);
    comm_channel_close(g->channel); /* first: nothing that is still under way may write to what is dropped */
    drop_memory(s, g->to, s->ranks * GATHER_SLICE);
}

/* Posts, lets the stream wait for it, and the host for the stream; what the next calls return is kept. */
static void gather_and_fail(rank_state *s, gathering *g, int unit)
{
    comm_ticket ticket, late;
    zc_status posted = unit ? comm_all_gather_to(g->channel, s->stream, 0, g->region, 0, GATHER_SLICE, g->to, &ticket)
                            : comm_all_gather(g->channel, s->stream, 0, g->region, 0, GATHER_SLICE, &ticket);
    if (posted == ZC_OK)
        posted = comm_wait(g->channel, ticket, s->stream);
    drain(s);
    keep(s, comm_all_gather(g->channel, s->stream, 1, g->region, 0, GATHER_SLICE, &late));
    CHECK(posted == ZC_OK || posted == s->status);
    CHECK_EQ(late, 0);
    if (posted == ZC_OK)
        CHECK_EQ(comm_wait(g->channel, ticket, s->stream), s->status);
    CHECK_EQ(comm_barrier(s->comm), s->status);
    CHECK_EQ(comm_progress(s->comm), s->status);
}

static void lost_body(rank_state *s)
{
    gathering g;
    gathering_open(s, &g);
    if (s->rank != 1)
        gather_and_fail(s, &g, s->setup->seed % 2 != 0);
    gathering_close(s, &g);
}

/* A rank closes while its peers have posted: their host threads were blocked in CUDA. */
static void test_peer_that_closes(void)
{
    for (uint64_t seed = 1; seed <= 4; seed++) {
        run(&(run_setup){.ranks = 3, .seed = seed, .deterministic = 1}, lost_body);
        for (size_t r = 0; r < 3; r += 2) {
            CHECK_EQ(states[r].status, ZC_EPEERLOST);
            CHECK(says(states[r].text, "rank 1 (pid"));
            CHECK(says(states[r].text, seed % 2 ? "all_gather of a unit" : "all_gather"));
        }
    }
}

static void late_body(rank_state *s)
{
    gathering g;
    gathering_open(s, &g);
    if (s->rank != 1)
        gather_and_fail(s, &g, s->setup->seed % 2 != 0);
    meet(s);
    if (s->rank == 1)
        keep(s, comm_barrier(s->comm));
    gathering_close(s, &g);
}

static void test_timeout_names_who_is_missing(void)
{
    for (uint64_t seed = 1; seed <= 2; seed++) {
        run(&(run_setup){.ranks = 3, .seed = seed, .timeout_ns = SECOND}, late_body);
        for (size_t r = 0; r < 3; r++) {
            CHECK_EQ(states[r].status, ZC_ETIMEOUT);
            CHECK(says(states[r].text, seed % 2 ? "for all_gather of a unit (operation 2)"
                                                : "for all_gather (operation 2)"));
            CHECK(says(states[r].text, "not called by rank 1; all ranks must"));
        }
    }
}

/* In a group of some ranks, messages name ranks by their numbers in the first communicator. */
static void late_in_group_body(rank_state *s)
{
    zc_comm *part;
    gathering g;
    CHECK_OK(comm_split(s->comm, (int64_t)(s->rank % 2), &part));
    rank_state inner = *s;
    inner.comm = part;
    inner.rank = part->rank;
    inner.ranks = part->ranks;
    gathering_open(&inner, &g);
    if (s->rank == 1)
        gather_and_fail(&inner, &g, 0);
    meet(s);
    gathering_close(&inner, &g);
    s->status = inner.status;
    memcpy(s->text, inner.text, sizeof s->text);
    CHECK_OK(comm_barrier(s->comm)); /* the others go on */
    comm_close(part);
}

static void test_timeout_in_a_group(void)
{
    run(&(run_setup){.ranks = 4, .seed = 3, .timeout_ns = SECOND}, late_in_group_body);
    CHECK_EQ(states[1].status, ZC_ETIMEOUT);
    CHECK(says(states[1].text, "rank 1 waited") && says(states[1].text, "not called by rank 3;"));
}

static void poison_body(rank_state *s)
{
    gathering g;
    gathering_open(s, &g);
    meet(s);
    if (s->rank == 0 && s->setup->seed % 2)
        comm_poison(s->comm, ZC_EMISMATCH, "for a reason");
    if (s->rank > 0) /* joins nobody: what is pending ends, too */
        gather_and_fail(s, &g, 0);
    if (s->rank == 0 && s->setup->seed % 2 == 0)
        comm_poison(s->comm, ZC_EMISMATCH, "for a reason");
    meet(s);
    if (s->rank == 0)
        gather_and_fail(s, &g, 1);
    gathering_close(s, &g);
}

static void test_poison(void)
{
    for (uint64_t seed = 1; seed <= 4; seed++) {
        run(&(run_setup){.ranks = 3, .seed = seed}, poison_body);
        for (size_t r = 0; r < 3; r++)
            CHECK(states[r].status == ZC_EMISMATCH && says(states[r].text, "for a reason"));
    }
}

static void poison_alone_body(rank_state *s)
{
    gathering g;
    comm_ticket ticket;
    gathering_open(s, &g);
    float *to = (float *)(void *)g.to;
    comm_reduce_args args = {.region = g.region, .to = to, .count = 4, .dtype = ZC_FLOAT32};
    comm_poison(s->comm, ZC_EMISMATCH, "for a reason");
    gather_and_fail(s, &g, 1);
    CHECK_EQ(comm_reduce_scatter(g.channel, s->stream, &args, &ticket), s->status);
    CHECK_EQ(comm_all_reduce_words(g.channel, s->stream, 0, g.region, 0, 1, (uint64_t *)(void *)g.to, &ticket),
             s->status);
    CHECK_EQ(comm_broadcast(g.channel, s->stream, 0, g.region, 0, 8, 0, &ticket), s->status);
    gathering_close(s, &g);
}

static void test_poison_alone(void)
{
    run(&(run_setup){.ranks = 1, .seed = 1}, poison_alone_body);
    CHECK(states[0].status == ZC_EMISMATCH && says(states[0].text, "for a reason"));
}

/* Ranks that do different things are told so before NCCL gets the second of them. */
static void mismatch_body(rank_state *s)
{
    gathering g;
    comm_ticket ticket;
    zc_status status = ZC_OK;
    gathering_open(s, &g);
    if (s->rank == 1 && s->setup->seed % 2)
        status = comm_broadcast(g.channel, s->stream, 0, g.region, 0, GATHER_SLICE, 0, &ticket);
    else
        status = comm_all_gather(g.channel, s->stream, 0, g.region, 0, GATHER_SLICE - 8 * s->rank, &ticket);
    if (status == ZC_OK)
        status = comm_wait(g.channel, ticket, s->stream);
    drain(s);
    keep(s, comm_barrier(s->comm));
    gathering_close(s, &g);
}

static void test_mismatch(void)
{
    for (uint64_t seed = 1; seed <= 4; seed++) {
        run(&(run_setup){.ranks = 2, .seed = seed}, mismatch_body);
        for (size_t r = 0; r < 2; r++) {
            CHECK_EQ(states[r].status, ZC_EMISMATCH);
            CHECK(says(states[r].text, "rank 0 comes to \"all_gather of 64 bytes (failing #1, tag 0)\""));
            CHECK(says(states[r].text, seed % 2 ? "rank 1 comes to \"broadcast of 64 bytes (failing #1, tag 0)\""
                                                : "rank 1 comes to \"all_gather of 56 bytes (failing #1, tag 0)\""));
        }
    }
}

/* Two users of one communicator, with channels of one name, post operations of one size in different orders. */
static void other_order_body(rank_state *s)
{
    gathering first, second;
    comm_ticket ticket[2] = {0, 0};
    int unit = s->setup->seed % 2 != 0;
    zc_status status = ZC_OK;
    gathering_open(s, &first);
    gathering_open(s, &second);
    meet(s); /* a failure must not reach a peer that is still opening */
    for (int k = 0; k < 2 && status == ZC_OK; k++) {
        gathering *g = (k == 1) == (s->rank == 1) ? &first : &second;
        status = unit ? comm_all_gather_to(g->channel, s->stream, 0, g->region, 0, GATHER_SLICE, g->to, &ticket[k])
                      : comm_all_gather(g->channel, s->stream, 0, g->region, 0, GATHER_SLICE, &ticket[k]);
    }
    drain(s);
    keep(s, comm_barrier(s->comm));
    CHECK(status == ZC_OK || status == s->status);
    gathering_close(s, &second);
    gathering_close(s, &first);
}

static void test_channels_in_another_order(void)
{
    for (uint64_t seed = 1; seed <= 6; seed++)
        for (size_t ranks = 2; ranks <= 3; ranks++) {
            run(&(run_setup){.ranks = ranks, .seed = seed}, other_order_body);
            for (size_t r = 0; r < ranks; r++) {
                CHECK_EQ(states[r].status, ZC_EMISMATCH);
                CHECK(says(states[r].text, "64 bytes (failing #1, tag 0)") &&
                      says(states[r].text, "64 bytes (failing #2, tag 0)"));
            }
        }
}

/* ---- a host that is ahead of the others ------------------------------------------------------ */

static int stop(void *context)
{
    return context != NULL;
}

static zc_status gather_units(rank_state *s, gathering *g, int count)
{
    comm_ticket ticket;
    for (int k = 0; k < count; k++)
        ZC_TRY(comm_all_gather_to(g->channel, s->stream, (uint32_t)k % 2, g->region, 0, GATHER_SLICE, g->to, &ticket));
    return comm_wait(g->channel, ticket, s->stream);
}

enum { COMES, CLOSES, INTERRUPTS };

/* Rank 0 cannot post more gathers than there are tags until rank 1 comes. */
static void ahead_body(rank_state *s)
{
    int what = (int)(s->setup->seed % 3);
    gathering g;
    gathering_open(s, &g);
    meet(s);
    if (s->rank == 1)
        nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
    if (s->rank == 0 && what == INTERRUPTS) {
        s->comm->interrupted = stop;
        s->comm->interrupt_context = s;
    }
    if (s->rank == 0 || what == COMES)
        keep(s, gather_units(s, &g, 20));
    if (s->rank == 1 && what == INTERRUPTS)
        keep(s, comm_barrier(s->comm));
    gathering_close(s, &g);
}

static void test_host_ahead(void)
{
    static const zc_status expected[][2] = {[COMES] = {ZC_OK, ZC_OK}, [CLOSES] = {ZC_EPEERLOST, ZC_OK},
                                            [INTERRUPTS] = {ZC_EINTERRUPT, ZC_ECOMM}};
    for (uint64_t seed = 1; seed <= 9; seed++) {
        run(&(run_setup){.ranks = 2, .seed = seed}, ahead_body);
        for (size_t r = 0; r < 2; r++)
            CHECK_EQ(states[r].status, expected[seed % 3][r]);
        CHECK(seed % 3 != INTERRUPTS || says(states[0].text, "rank 0 was interrupted in all_gather of a unit"));
    }
}

/* ---- failures of NCCL --------------------------------------------------------------------------- */

/* All there is, once; ends at the first failure. */
static zc_status live(rank_state *s, comm_channel *channel, comm_region *region, char *to)
{
    comm_ticket ticket[4];
    size_t reserved, slice = 64 * sizeof(float);
    uint64_t word = 1;
    comm_reduce_args args = {.tag = 0, .region = region, .to = to, .count = 64, .dtype = ZC_FLOAT32, .own = NULL};
    ZC_TRY(comm_reserve(channel, 64, ZC_FLOAT32, &reserved));
    ZC_TRY(s->device->ops->upload(s->device, s->stream, region->base, &word, sizeof word));
    ZC_TRY(comm_reduce_scatter(channel, s->stream, &args, &ticket[0]));
    ZC_TRY(comm_all_gather(channel, s->stream, 1, region, 0, slice, &ticket[1]));
    ZC_TRY(comm_wait(channel, ticket[0], s->stream));
    ZC_TRY(comm_wait(channel, ticket[1], s->stream));
    ZC_TRY(comm_all_gather_to(channel, s->stream, 0, region, 0, slice, to, &ticket[2]));
    ZC_TRY(comm_wait(channel, ticket[2], s->stream));
    ZC_TRY(comm_all_reduce_words(channel, s->stream, 1, region, 0, 2, (uint64_t *)(void *)to, &ticket[3]));
    ZC_TRY(comm_wait(channel, ticket[3], s->stream));
    ZC_TRY(comm_broadcast(channel, s->stream, 2, region, 0, slice, s->ranks - 1, &ticket[3]));
    ZC_TRY(comm_wait(channel, ticket[3], s->stream));
    ZC_TRY(s->device->ops->download(s->device, s->stream, &word, region->base, sizeof word));
    return comm_barrier(s->comm);
}

static void life_body(rank_state *s)
{
    comm_channel *channel = NULL;
    comm_region *region = NULL;
    void *to = NULL;
    size_t bytes = s->ranks * 64 * sizeof(float);
    zc_status status = comm_channel_open(s->comm, "life", 3, &channel);
    if (status == ZC_OK)
        status = comm_region_alloc(channel, bytes, 0, &region);
    if (status == ZC_OK)
        status = s->device->ops->alloc(s->device, bytes, &to);
    if (status == ZC_OK)
        status = live(s, channel, region, to);
    keep(s, status); /* the peers learn it from the communicator's end at the latest */
    cudaStreamSynchronize((cudaStream_t)(void *)s->stream);
    s->device->ops->free(s->device, to, bytes);
    comm_region_free(region);
    comm_channel_close(channel);
}

static void test_life(void)
{
    run_everywhere(life_body);
}

/* Functions that a rank calls to end may fail without anybody being told. */
static int may_pass(const char *function)
{
    return !strcmp(function, "ncclCommFinalize") || !strcmp(function, "ncclCommDestroy") ||
           !strcmp(function, "ncclCommGetAsyncError");
}

static void test_every_nccl_call_fails(void)
{
    static const char *const functions[] = {
        "ncclGetUniqueId", "ncclCommInitRankConfig", "ncclCommGetAsyncError", "ncclGroupStart", "ncclGroupEnd",
        "ncclSend", "ncclRecv", "ncclReduceScatter", "ncclAllGather", "ncclAllReduce", "ncclBroadcast",
        "ncclCommFinalize", "ncclCommDestroy"};
    for (size_t f = 0; f < sizeof functions / sizeof *functions; f++)
        for (int nth = 1, taken = 1; taken && nth <= 30; nth++) {
            zc_comm *hosts[RANKS_MAX];
            run_setup setup = {.ranks = 2, .seed = (uint64_t)nth};
            setup.deterministic = strcmp(functions[f], "ncclReduceScatter") != 0;
            reset(setup.seed);
            CHECK_OK(local_comm_create(2, 20 * SECOND, hosts));
            emu_fail_next(functions[f], nth, 3 /* an internal error: no peer has gone */);
            run_on(&setup, hosts, life_body);
            taken = emu_faults_left() == 0;
            CHECK(taken || nth > 1);
            for (size_t r = 0; r < 2; r++) {
                int failed = states[r].status != ZC_OK;
                if (taken && may_pass(functions[f]) ? failed && states[r].status != ZC_ECOMM : failed != taken) {
                    fprintf(stderr, "call %d of %s, rank %zu: %s\n", nth, functions[f], r, states[r].text);
                    CHECK(0);
                }
                if (failed)
                    CHECK(states[r].status == ZC_ECOMM && strstr(states[r].text, "internal error"));
            }
            if (strcmp(functions[f], "ncclCommDestroy") || !taken)
                check_clean(&setup);
        }
}

static void async_body(rank_state *s)
{
    gathering g;
    gathering_open(s, &g);
    gather_and_fail(s, &g, s->setup->seed % 2 != 0);
    gathering_close(s, &g);
}

/* NCCL fails on one rank beside the calls: the others hear of it, with its sentence. */
static void test_error_beside_calls(void)
{
    for (uint64_t seed = 1; seed <= 6; seed++) {
        zc_comm *hosts[RANKS_MAX];
        run_setup setup = {.ranks = 3, .seed = seed};
        reset(seed);
        CHECK_OK(local_comm_create(3, 60 * SECOND, hosts));
        emu_nccl_fail(1, 1, 6);
        run_on(&setup, hosts, async_body);
        check_clean(&setup);
        for (size_t r = 0; r < 3; r++) {
            CHECK_EQ(states[r].status, ZC_ECOMM);
            CHECK(says(states[r].text, "rank 1: NCCL 2.28.9 failed in all_gather"));
            CHECK(says(states[r].text, "on GPU 1: remote process exited or there was a network error"));
        }
    }
}

/* ---- failures of CUDA and of memory ---------------------------------------------------------------- */

/* A rank that could not post is out of step with its peers: nobody goes on. */
static void test_every_cuda_call_fails(void)
{
    static const char *const functions[] = {
        "cudaGetDevice", "cudaEventCreateWithFlags", "cudaEventRecord", "cudaStreamWaitEvent", "cudaLaunchKernel",
        "cudaStreamCreateWithPriority", "cudaDeviceGetStreamPriorityRange", "cudaStreamIsCapturing",
        "cudaThreadExchangeStreamCaptureMode", "cudaMemsetAsync", "cudaMalloc"};
    for (size_t f = 0; f < sizeof functions / sizeof *functions; f++)
        for (int nth = 1, taken = 1; taken && nth <= 90; nth++) {
            zc_comm *hosts[RANKS_MAX];
            run_setup setup = {.ranks = 2, .seed = (uint64_t)nth, .deterministic = nth % 2};
            reset(setup.seed);
            CHECK_OK(local_comm_create(2, 20 * SECOND, hosts));
            emu_fail_next(functions[f], nth, cudaErrorUnknown);
            run_on(&setup, hosts, life_body);
            taken = emu_faults_left() == 0;
            CHECK(taken || nth > 1);
            for (size_t r = 0; r < 2; r++)
                if (states[r].status == ZC_ETIMEOUT || (!taken && states[r].status != ZC_OK)) {
                    fprintf(stderr, "call %d of %s, rank %zu: %s\n", nth, functions[f], r, states[r].text);
                    CHECK(0);
                }
            int before = testing_failures;
            check_clean(&setup);
            if (testing_failures != before)
                fprintf(stderr, "... after call %d of %s failed\n", nth, functions[f]);
        }
}

static void unposted_body(rank_state *s)
{
    gathering g;
    comm_ticket ticket;
    gathering_open(s, &g);
    meet(s);
    if (s->rank == 1)
        meet(s);
    else
        emu_fail_next("cudaStreamWaitEvent", 1, cudaErrorUnknown);
    keep(s, comm_all_gather(g.channel, s->stream, 0, g.region, 0, GATHER_SLICE, &ticket));
    if (s->rank == 0)
        meet(s);
    CHECK_EQ(comm_barrier(s->comm), s->status);
    gathering_close(s, &g);
}

/* The peers hear of it at their next call, not only when the rank has closed. */
static void test_rank_that_cannot_post(void)
{
    for (uint64_t seed = 1; seed <= 3; seed++) {
        run(&(run_setup){.ranks = 2, .seed = seed}, unposted_body);
        for (size_t r = 0; r < 2; r++) {
            CHECK_EQ(states[r].status, ZC_ESYSTEM);
            CHECK(says(states[r].text, "rank 0 could not post all_gather: cudaStreamWaitEvent on GPU 0"));
        }
    }
}

static void test_every_allocation_fails(void)
{
    for (long nth = 1, asked = 1; asked; nth++) {
        zc_comm *hosts[RANKS_MAX];
        run_setup setup = {.ranks = 2, .seed = (uint64_t)nth, .deterministic = 1};
        reset(setup.seed);
        CHECK_OK(local_comm_create(2, 20 * SECOND, hosts));
        zc_fault_arm(nth);
        run_on(&setup, hosts, life_body);
        asked = zc_fault_count() >= nth;
        zc_fault_arm(0);
        for (size_t r = 0; r < 2; r++)
            if (states[r].status == ZC_ETIMEOUT || (!asked && states[r].status != ZC_OK)) {
                fprintf(stderr, "allocation %ld, rank %zu: %s\n", nth, r, states[r].text);
                CHECK(0);
            }
        check_clean(&setup);
    }
}

/* ---- birth ------------------------------------------------------------------------------------------- */

static void nothing_body(rank_state *s)
{
    CHECK_OK(comm_barrier(s->comm));
}

/* First of all, while NCCL has not been opened: one rank does not open it, and a bad one is refused. */
static void test_first_use_of_nccl(void)
{
    zc_comm *hosts[RANKS_MAX];
    run_setup alone = {.ranks = 1, .seed = 1}, two = {.ranks = 2, .seed = 2};
    reset(1);
    CHECK_OK(local_comm_create(1, 20 * SECOND, hosts));
    emu_fail_next("ncclGetVersion", 1, 2);
    run_on(&alone, hosts, nothing_body);
    CHECK_EQ(emu_faults_left(), 1);
    CHECK_EQ(states[0].status, ZC_OK);
    check_clean(&alone);

    emu_nccl_version(22105);
    run(&two, nothing_body);
    emu_nccl_version(22809);
    for (size_t r = 0; r < 2; r++)
        CHECK(states[r].status == ZC_ESTATE && says(states[r].text, "is NCCL 2.21.5; 2.27 or newer is needed"));

    reset(2);
    CHECK_OK(local_comm_create(2, 20 * SECOND, hosts));
    emu_fail_next("ncclGetVersion", 1, 2); /* on one rank, which tells the other */
    run_on(&two, hosts, nothing_body);
    for (size_t r = 0; r < 2; r++)
        CHECK(states[r].status == ZC_ESTATE && says(states[r].text, "does not tell its version: unhandled system"));
    check_clean(&two);
}

static void test_two_ranks_on_one_gpu(void)
{
    run(&(run_setup){.ranks = 2, .seed = 1, .gpu_of_all = 1}, nothing_body);
    for (size_t r = 0; r < 2; r++) {
        CHECK_EQ(states[r].status, ZC_ECOMM);
        CHECK(says(states[r].text, "NCCL 2.28.9 failed in start-up on GPU 1: invalid usage: Duplicate GPU detected"));
        CHECK(says(states[r].text, "give every rank a GPU of its own"));
    }
    run(&(run_setup){.ranks = 2, .seed = 1, .gpu_of_all = 99}, nothing_body);
    for (size_t r = 0; r < 2; r++)
        CHECK(states[r].status == ZC_EINVAL && says(states[r].text, "there is no GPU 99"));
}

/* An interrupt during start-up ends it on all ranks; only the one that was interrupted is told so. */
static void test_interrupt(void)
{
    int seen = 0;
    for (uint64_t seed = 1; seed <= 10; seed++) {
        zc_comm *hosts[RANKS_MAX];
        run_setup setup = {.ranks = 2, .seed = seed};
        reset(seed);
        CHECK_OK(local_comm_create(2, 20 * SECOND, hosts));
        hosts[0]->interrupted = stop;
        hosts[0]->interrupt_context = hosts;
        run_on(&setup, hosts, nothing_body);
        check_clean(&setup);
        if (states[0].status == ZC_OK)
            continue;
        seen++;
        CHECK(states[0].status == ZC_EINTERRUPT && says(states[0].text, "rank 0 was interrupted"));
        CHECK(states[1].status == ZC_ECOMM && says(states[1].text, "rank 0 was interrupted"));
    }
    CHECK(seen > 0);
}

#if !defined(__SANITIZE_THREAD__)

/* A forked child can do nothing with it, and closing it there disturbs nobody. */
static void fork_body(rank_state *s)
{
    gathering g;
    comm_ticket ticket;
    int result = -1;
    gathering_open(s, &g);
    meet(s);
    pid_t child = fork();
    if (child == 0) {
        alarm(20);
        int right = comm_all_gather(g.channel, s->stream, 0, g.region, 0, GATHER_SLICE, &ticket) == ZC_ESTATE &&
                    comm_barrier(s->comm) == ZC_ESTATE;
        comm_region_free(g.region);
        comm_channel_close(g.channel);
        comm_close(s->comm);
        _exit(right ? 0 : 1);
    }
    CHECK(waitpid(child, &result, 0) == child && WIFEXITED(result) && WEXITSTATUS(result) == 0);
    CHECK_OK(comm_all_gather(g.channel, s->stream, 0, g.region, 0, GATHER_SLICE, &ticket));
    wait_on(s, g.channel, ticket);
    gathering_close(s, &g);
}

static void test_forked_child(void)
{
    run(&(run_setup){.ranks = 2, .seed = 1}, fork_body);
}

#endif

int main(void)
{
    RUN(test_first_use_of_nccl);
    RUN(test_reduce_scatter);
    RUN(test_nonfinite_flags);
    RUN(test_in_flight);
    RUN(test_gathers);
    RUN(test_words_and_broadcast);
    RUN(test_one_tag_on_two_lanes);
    RUN(test_two_streams);
    RUN(test_odds);
    RUN(test_what_the_host_does);
    RUN(test_split);
    RUN(test_close_before_the_end);
    RUN(test_no_wait_is_idle);
    RUN(test_life);
    RUN(test_peer_that_closes);
    RUN(test_timeout_names_who_is_missing);
    RUN(test_timeout_in_a_group);
    RUN(test_poison);
    RUN(test_poison_alone);
    RUN(test_mismatch);
    RUN(test_channels_in_another_order);
    RUN(test_host_ahead);
    RUN(test_every_nccl_call_fails);
    RUN(test_error_beside_calls);
    RUN(test_every_cuda_call_fails);
    RUN(test_rank_that_cannot_post);
    RUN(test_every_allocation_fails);
    RUN(test_two_ranks_on_one_gpu);
    RUN(test_interrupt);
#if !defined(__SANITIZE_THREAD__)
    RUN(test_forked_child);
#endif
    DONE();
}
