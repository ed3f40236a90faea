/*
 * The CUDA device on the emulated runtime: every operation gives what the CPU
 * device gives, whatever the schedule; all that must be ordered is; nothing is
 * left behind, whichever call fails.
 *
 * The runtime reports accesses that nothing orders on every schedule, so each
 * test is run on few of them; they differ in what is late.
 */
#include "cuda_device.h"
#include "cuda_probe.h"
#include "cuda_staging.h"
#include "emu.h"
#include "testing.h"

#include <pthread.h>

#define TEXT_BYTES 4096u
#define GPU 1                /* not the current one */
#define CUDA_OUT_OF_MEMORY 2 /* the number that runtime and driver have for it */

static const int eager_levels[] = {0, 2, -1};
static uint64_t seed_now;

static zc_stream *as_stream(cudaStream_t stream)
{
    return (zc_stream *)stream;
}

static zc_device *open_device(void)
{
    zc_device *device = NULL;
    CHECK_OK(cuda_device_create(GPU, &device));
    return device;
}

static zc_device *cpu(void)
{
    static zc_device *device;
    if (!device)
        CHECK_OK(cpu_device_create(1, &device));
    return device;
}

static int says(const char *words)
{
    if (strstr(zc_last_error(), words))
        return 1;
    fprintf(stderr, "\"%s\" is not in: %s\n", words, zc_last_error());
    return 0;
}

/* All that the test made is gone, and nothing was out of order. */
static void check_clean(void)
{
    static char text[TEXT_BYTES];
    int findings = emu_findings(text, sizeof text);
    if (findings)
        fprintf(stderr, "seed %" PRIu64 ":\n%s", seed_now, text);
    CHECK_EQ(findings, 0);
    int leaks = emu_leaks(text, sizeof text);
    if (leaks)
        fprintf(stderr, "seed %" PRIu64 ":\n%s", seed_now, text);
    CHECK_EQ(leaks, 0);
}

static void on_schedules(unsigned seeds, int check, void (*test)(void))
{
    for (unsigned i = 0; i < seeds * 3; i++) {
        seed_now = i;
        emu_reset(i, eager_levels[i % 3], check);
        emu_protect(i % 4 == 0); /* once on every level */
        test();
        check_clean();
    }
    emu_protect(0);
}

static cudaStream_t new_stream(void)
{
    cudaStream_t stream;
    int before;
    CHECK_EQ(cudaGetDevice(&before), 0);
    CHECK_EQ(cudaSetDevice(GPU), 0);
    CHECK_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), 0);
    CHECK_EQ(cudaSetDevice(before), 0);
    return stream;
}

static void fill_random(void *to, size_t bytes, uint64_t seed)
{
    for (size_t i = 0; i < bytes; i++)
        ((unsigned char *)to)[i] = (unsigned char)testing_random(&seed);
}

static void *on_device(zc_device *device, zc_stream *stream, const void *from, size_t bytes)
{
    void *memory = NULL;
    CHECK_OK(device->ops->alloc(device, bytes, &memory));
    CHECK_OK(device->ops->upload(device, stream, memory, from, bytes));
    return memory;
}

static int is_on_device(zc_device *device, zc_stream *stream, const void *memory, const void *expected, size_t bytes)
{
    void *found = malloc(bytes);
    memset(found, 0xee, bytes);
    CHECK_OK(device->ops->download(device, stream, found, memory, bytes));
    int equal = memcmp(found, expected, bytes) == 0;
    free(found);
    return equal;
}

/* ---- moving bytes --------------------------------------------------------------- */

static void bytes_move(void)
{
    static const size_t sizes[] = {1, 64, CUDA_STAGING_BLOCK_BYTES - 1, CUDA_STAGING_BLOCK_BYTES,
                                   3 * CUDA_STAGING_BLOCK_BYTES + 5,
                                   2 * CUDA_STAGING_BLOCKS * CUDA_STAGING_BLOCK_BYTES + 77};
    zc_device *device = open_device();
    const device_ops *ops = device->ops;
    cudaStream_t own = new_stream();
    zc_stream *streams[] = {NULL, as_stream(own)};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        zc_stream *stream = streams[i % 2];
        size_t bytes = sizes[i];
        char *host = malloc(bytes), *source = malloc(bytes);
        void *a = NULL, *b = NULL;
        fill_random(host, bytes, i);
        memcpy(source, host, bytes);
        CHECK_OK(ops->alloc(device, bytes, &a));
        CHECK_OK(ops->alloc(device, bytes, &b));
        CHECK_OK(ops->upload(device, stream, a, source, bytes));
        memset(source, 0x55, bytes); /* it has been read */
        CHECK_OK((i % 2 ? ops->copy : ops->copy_far)(device, stream, b, a, bytes));
        CHECK_OK(ops->fill(device, stream, a, 0x5a, bytes));
        CHECK(is_on_device(device, stream, b, host, bytes));
        memset(host, 0x5a, bytes);
        CHECK(is_on_device(device, stream, a, host, bytes));
        memset(host, 0, bytes);
        ops->free(device, b, bytes);
        CHECK_OK(ops->alloc(device, bytes, &b)); /* zero-filled, also where something was */
        CHECK(is_on_device(device, stream, b, host, bytes));
        CHECK_OK(ops->copy(device, stream, a, a, bytes));
        CHECK_OK(ops->synchronize(device, stream));
        ops->free(device, a, bytes);
        ops->free(device, b, bytes);
        free(host);
        free(source);
    }
    void *nothing = device;
    CHECK_OK(ops->alloc(device, 0, &nothing));
    CHECK(nothing == NULL);
    ops->free(device, NULL, 0);
    CHECK_OK(ops->copy(device, NULL, NULL, NULL, 0));
    CHECK_OK(ops->fill(device, NULL, NULL, 0, 0));
    CHECK_OK(ops->upload(device, NULL, NULL, NULL, 0));
    CHECK_OK(ops->download(device, NULL, NULL, NULL, 0));
    ops->destroy(device);
    cudaStreamDestroy(own);
}

/* Small uploads, one behind the other, come back as they were when they were made. */
static void small_uploads_do_not_overtake(void)
{
    zc_device *device = open_device();
    uint64_t expected[3 * CUDA_STAGING_BLOCKS], *memory = NULL;
    CHECK_OK(device->ops->alloc(device, sizeof expected, (void **)&memory));
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++) {
        uint64_t value = expected[i] = 1000 + i;
        CHECK_OK(device->ops->upload(device, NULL, memory + i, &value, sizeof value));
    }
    CHECK(is_on_device(device, NULL, memory, expected, sizeof expected));
    device->ops->free(device, memory, sizeof expected);
    device->ops->destroy(device);
}

typedef struct packing {
    int dims;
    int64_t shape[5], strides[5];
} packing;

static void packs(void)
{
    static const packing packings[] = {
        {0, {0}, {0}},
        {1, {7}, {1}},
        {1, {7}, {3}},
        {2, {5, 6}, {6, 1}},
        {2, {6, 5}, {1, 6}},
        {3, {2, 3, 4}, {12, 4, 1}},
        {3, {3, 4, 5}, {40, 5, 1}},
        {3, {4, 1, 6}, {1, 77, 4}},
        {4, {2, 3, 2, 5}, {1, 2, 30, 6}},
        {5, {2, 2, 2, 3, 2}, {48, 1, 24, 8, 2}},
        {2, {4, 5}, {0, 1}},
        {3, {4, 0, 5}, {1, 1, 1}},
    };
    enum { ELEMS = 256 };
    zc_device *device = open_device();
    for (size_t elem_bytes = 2; elem_bytes <= 8; elem_bytes *= 2) {
        char source[8 * ELEMS], expected[8 * ELEMS];
        fill_random(source, sizeof source, elem_bytes);
        void *from = on_device(device, NULL, source, sizeof source), *to = NULL;
        CHECK_OK(device->ops->alloc(device, sizeof source, &to));
        for (size_t i = 0; i < sizeof packings / sizeof *packings; i++) {
            const packing *p = &packings[i];
            memset(expected, 0x11, sizeof expected);
            CHECK_OK(device->ops->fill(device, NULL, to, 0x11, sizeof expected));
            CHECK_OK(cpu()->ops->pack(cpu(), NULL, expected, source, elem_bytes, p->dims, p->shape, p->strides));
            CHECK_OK(device->ops->pack(device, NULL, to, from, elem_bytes, p->dims, p->shape, p->strides));
            CHECK(is_on_device(device, NULL, to, expected, sizeof expected));
        }
        device->ops->free(device, from, sizeof source);
        device->ops->free(device, to, sizeof source);
    }
    int64_t shape[65], strides[65];
    for (int d = 0; d < 65; d++)
        shape[d] = strides[d] = 2;
    CHECK_EQ(device->ops->pack(device, NULL, NULL, NULL, 4, 65, shape, strides), ZC_EINVAL);
    CHECK_EQ(device->ops->pack(device, NULL, NULL, NULL, 4, 26, shape, strides), ZC_EINVAL);
    CHECK(says("26 dimensions") && says("at most 25"));
    device->ops->destroy(device);
}

/* ---- arithmetic ----------------------------------------------------------------- */

enum { SEGMENTS = 5, GROUPS = 2, ELEMS = SEGMENTS * 128 };

/* Arrays of one shard, in the memory of one device. */
typedef struct shard {
    zc_device *device;
    float *grad, *sum, *param, *m, *v;
    uint32_t *flags;
    device_stats *stats;
    device_segment *segment;
    optim_segment_scalars *scalars;
    device_step *result;
    device_span *spans;
} shard;

#define STATS_BYTES (sizeof(device_stats) + (SEGMENTS + 3) / 4 * sizeof(uint64_t))

/* X(array, bytes) for every array of a shard. */
#define SHARD_MAP(X)                                                           \
    X(grad, ELEMS * sizeof(float))                                             \
    X(sum, ELEMS * sizeof(float))                                              \
    X(param, ELEMS * sizeof(float))                                            \
    X(m, ELEMS * sizeof(float))                                                \
    X(v, ELEMS * sizeof(float))                                                \
    X(flags, sizeof(uint32_t))                                                 \
    X(stats, STATS_BYTES)                                                      \
    X(segment, SEGMENTS * sizeof(device_segment))                              \
    X(scalars, SEGMENTS * sizeof(optim_segment_scalars))                       \
    X(result, sizeof(device_step))                                             \
    X(spans, SEGMENTS * sizeof(device_span))

static void shard_free(shard *s)
{
#define X(array, bytes) s->device->ops->free(s->device, s->array, (bytes));
    SHARD_MAP(X)
#undef X
}

static zc_status shard_alloc(zc_device *device, zc_stream *stream, shard *s)
{
    float numbers[ELEMS];
    uint64_t random = 5, used[(SEGMENTS + 3) / 4] = {0};
    device_segment segments[SEGMENTS] = {{0}};
    device_span spans[SEGMENTS];
    for (size_t i = 0; i < ELEMS; i++)
        numbers[i] = testing_float(&random);
    for (unsigned i = 0; i < SEGMENTS; i++) {
        used[i / 4] |= (uint64_t)(i != 2) << 16 * (i % 4);
        segments[i].group = i % GROUPS;
        spans[i] = (device_span){128 * i, 128 * i + 100, i};
    }
    *s = (shard){.device = device};
#define X(array, bytes) ZC_TRY(device->ops->alloc(device, (bytes), (void **)&s->array));
    SHARD_MAP(X)
#undef X
    ZC_TRY(device->ops->upload(device, stream, s->grad, numbers, sizeof numbers));
    ZC_TRY(device->ops->upload(device, stream, s->param, numbers, sizeof numbers));
    ZC_TRY(device->ops->upload(device, stream, s->stats->used, used, sizeof used));
    ZC_TRY(device->ops->upload(device, stream, s->segment, segments, sizeof segments));
    return device->ops->upload(device, stream, s->spans, spans, sizeof spans);
}

static zc_status step_scalars(const shard *s, zc_stream *stream, double lr, size_t groups)
{
    optim_options options[GROUPS + 1];
    memset(options, 0, sizeof options); /* padding too */
    for (size_t g = 0; g <= GROUPS; g++)
        options[g] = (optim_options){.lr = lr * (double)(g + 1), .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8};
    device_step_args args = {
        .rule = OPTIM_ADAMW, .options = options, .groups = groups, .base_factor = 0.5, .norm_factor = 0.5,
        .max_norm = 1, .clip_factor = 1, .want_norm = 1, .segments = SEGMENTS, .stats = s->stats,
        .segment = s->segment, .scalars = s->scalars, .result = s->result,
    };
    zc_status status = s->device->ops->step_scalars(s->device, stream, &args);
    memset(options, 0xff, sizeof options); /* they have been read */
    return status;
}

/* What a step does, all on one stream. */
static zc_status step(const shard *s, zc_stream *stream, double lr, size_t groups)
{
    zc_device *device = s->device;
    const device_ops *ops = device->ops;
    ZC_TRY(ops->accumulate(device, stream, s->sum, s->grad, ELEMS, ZC_FLOAT32, 0));
    ZC_TRY(ops->accumulate(device, stream, s->sum, s->grad, ELEMS, ZC_FLOAT32, 1));
    ZC_TRY(ops->scale(device, stream, s->sum, s->sum, ELEMS, ZC_FLOAT32, 0.3));
    ZC_TRY(ops->fill(device, stream, s->flags, 0, sizeof *s->flags));
    ZC_TRY(ops->fill(device, stream, s->stats->sum_squares, 0, sizeof s->stats->sum_squares));
    ZC_TRY(ops->sum_squares(device, stream, s->stats, s->flags, s->sum, ELEMS, ZC_FLOAT32));
    ZC_TRY(ops->fold_flags(device, stream, s->stats, s->flags));
    ZC_TRY(step_scalars(s, stream, lr, groups));
    device_update_args update = {
        .rule = OPTIM_ADAMW, .param_dtype = ZC_FLOAT32, .scalars = s->scalars, .segments = SEGMENTS, .m = s->m, .v = s->v,
        .shard_count = 1, .shards = {{s->spans, SEGMENTS, ELEMS, 0, s->param, s->sum}},
    };
    return ops->update(device, stream, &update);
}

static int shards_agree(const shard *a, const shard *b, zc_stream *stream)
{
    int equal = 1;
#define X(array, bytes)                                                                   \
    if (!is_on_device(a->device, stream, a->array, b->array, (bytes))) {                  \
        fprintf(stderr, "%s differs\n", #array);                                          \
        equal = 0;                                                                        \
    }
    SHARD_MAP(X)
#undef X
    return equal;
}

static void steps_are_the_cpus(void)
{
    /* options that change, stay, come back, and are of more groups */
    static const struct { double lr; size_t groups; } steps[] = {{0.1, GROUPS}, {0.2, GROUPS}, {0.2, GROUPS},
                                                                 {0.1, GROUPS}, {0.1, GROUPS + 1}};
    zc_device *device = open_device();
    cudaStream_t own = new_stream();
    shard ours, theirs;
    CHECK_OK(shard_alloc(device, as_stream(own), &ours));
    CHECK_OK(shard_alloc(cpu(), NULL, &theirs));
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        CHECK_OK(step(&ours, as_stream(own), steps[i].lr, steps[i].groups));
        CHECK_OK(step(&theirs, NULL, steps[i].lr, steps[i].groups));
        if (i % 2 == 0)
            CHECK(shards_agree(&ours, &theirs, as_stream(own)));
    }
    shard_free(&ours);
    shard_free(&theirs);
    device->ops->destroy(device);
    cudaStreamDestroy(own);
}

/* Nothing to do is nothing enqueued: empty grids are errors in CUDA. */
static void nothing_is_nothing(void)
{
    zc_device *device = open_device();
    const device_ops *ops = device->ops;
    cudaStream_t own = new_stream();
    zc_stream *stream = as_stream(own);
    uint64_t before = emu_operations();
    device_update_args update = {.rule = OPTIM_SGD, .param_dtype = ZC_FLOAT32};
    int64_t shape[] = {0, 3}, strides[] = {1, 1};
    CHECK_OK(ops->accumulate(device, stream, NULL, NULL, 0, ZC_FLOAT32, 1));
    CHECK_OK(ops->sum_squares(device, stream, NULL, NULL, NULL, 0, ZC_FLOAT32));
    CHECK_OK(ops->scale(device, stream, NULL, NULL, 0, ZC_FLOAT64, 1));
    CHECK_OK(ops->update(device, stream, &update));
    CHECK_OK(ops->pack(device, stream, NULL, NULL, 4, 2, shape, strides));
    CHECK_OK(ops->synchronize(device, stream));
    CHECK_EQ(emu_operations() - before, 0);
    ops->destroy(device);
    cudaStreamDestroy(own);
}

/* Two streams that nobody orders have a step each, with other options. */
static void options_serve_several_streams(void)
{
    zc_device *device = open_device();
    cudaStream_t streams[2] = {new_stream(), new_stream()};
    shard ours[2], theirs[2];
    for (size_t i = 0; i < 2; i++) {
        CHECK_OK(shard_alloc(device, as_stream(streams[i]), &ours[i]));
        CHECK_OK(shard_alloc(cpu(), NULL, &theirs[i]));
    }
    for (size_t turn = 0; turn < 4; turn++) {
        size_t i = turn % 2;
        double lr = turn < 3 ? 0.1 * (double)(turn + 1) : 0.3; /* the last: unchanged, on the other stream */
        CHECK_OK(step(&ours[i], as_stream(streams[i]), lr, GROUPS));
        CHECK_OK(step(&theirs[i], NULL, lr, GROUPS));
    }
    for (size_t i = 0; i < 2; i++) {
        CHECK(shards_agree(&ours[i], &theirs[i], as_stream(streams[i])));
        shard_free(&ours[i]);
        shard_free(&theirs[i]);
    }
    device->ops->destroy(device);
    for (size_t i = 0; i < 2; i++)
        cudaStreamDestroy(streams[i]);
}

static uint64_t operations_of_a_step(const shard *s, double lr)
{
    CHECK_OK(s->device->ops->synchronize(s->device, NULL));
    uint64_t before = emu_operations();
    CHECK_OK(step_scalars(s, NULL, lr, GROUPS));
    CHECK_OK(s->device->ops->synchronize(s->device, NULL));
    return emu_operations() - before;
}

static void options_are_uploaded_when_they_change(void)
{
    zc_device *device = open_device();
    shard s;
    CHECK_OK(shard_alloc(device, NULL, &s));
    operations_of_a_step(&s, 0.1);
    uint64_t same = operations_of_a_step(&s, 0.1), other = operations_of_a_step(&s, 0.2);
    CHECK(other > same);
    CHECK_EQ(operations_of_a_step(&s, 0.2), same);
    shard_free(&s);
    device->ops->destroy(device);
}

/* ---- memory that is given back ----------------------------------------------------- */

static int live_things(void)
{
    return emu_leaks(NULL, 0);
}

/* All streams of the device are idle, and it is asked often enough to see that. */
static void let_go(zc_device *device, zc_stream *stream)
{
    for (int i = 0; i < 50; i++)
        CHECK_OK(device->ops->synchronize(device, stream));
}

/* Freed while work on it waits in two streams, one of which the device only knows of. */
static void free_does_not_wait(void)
{
    enum { BYTES = 1 << 16 };
    zc_device *device = open_device();
    cudaStream_t own = new_stream(), foreign = new_stream();
    void *a = NULL, *b = NULL;
    CHECK_OK(device->ops->alloc(device, BYTES, &a));
    CHECK_OK(device->ops->alloc(device, BYTES, &b));
    cuda_device_use_stream(device, foreign);
    int before = live_things();
    CHECK_OK(device->ops->fill(device, as_stream(own), a, 1, BYTES));
    CHECK_EQ(cudaMemsetAsync(b, 1, BYTES, foreign), 0);
    device->ops->free(device, a, BYTES);
    device->ops->free(device, b, BYTES);
    CHECK_OK(device->ops->alloc(device, BYTES, &a));
    CHECK_OK(device->ops->fill(device, as_stream(own), a, 2, BYTES));
    device->ops->free(device, a, BYTES);
    CHECK_EQ(cudaStreamSynchronize(foreign), 0);
    let_go(device, as_stream(own));
    CHECK(live_things() < before); /* given back, not kept until the end */
    cuda_device_forget_stream(device, foreign);
    cudaStreamDestroy(foreign);
    CHECK_OK(device->ops->alloc(device, BYTES, &a));
    device->ops->free(device, a, BYTES);
    device->ops->destroy(device);
    cudaStreamDestroy(own);
}

/* Nothing runs before somebody waits: the free of what is still in use came back nevertheless. */
static void free_leaves_work_alone(void)
{
    enum { BYTES = 1 << 16 };
    emu_reset(1, 0, 1);
    zc_device *device = open_device();
    cudaStream_t own = new_stream();
    void *a = NULL;
    CHECK_OK(device->ops->alloc(device, BYTES, &a));
    uint64_t before = emu_operations();
    int things = live_things();
    for (int i = 0; i < 20; i++)
        CHECK_OK(device->ops->fill(device, as_stream(own), a, i, BYTES));
    device->ops->free(device, a, BYTES);
    CHECK(emu_operations() - before < 20);
    CHECK_EQ(live_things(), things);
    device->ops->destroy(device);
    cudaStreamDestroy(own);
    check_clean();
}

/* With more streams than can be remembered, what is freed waits for the whole GPU. */
static void many_streams(void)
{
    enum { STREAMS = 70, BYTES = 4096 };
    zc_device *device = open_device();
    cudaStream_t streams[STREAMS];
    void *a = NULL;
    CHECK_OK(device->ops->alloc(device, BYTES * STREAMS, &a));
    for (size_t i = 0; i < STREAMS; i++) {
        streams[i] = new_stream();
        CHECK_OK(device->ops->fill(device, as_stream(streams[i]), (char *)a + i * BYTES, 1, BYTES));
    }
    device->ops->free(device, a, BYTES * STREAMS);
    CHECK_OK(device->ops->alloc(device, BYTES, &a));
    device->ops->free(device, a, BYTES);
    device->ops->destroy(device);
    for (size_t i = 0; i < STREAMS; i++)
        cudaStreamDestroy(streams[i]);
}

/* What is buried makes room; only when nothing is, there is none. */
static void room_is_made(void)
{
    enum { BYTES = 1 << 16 };
    emu_reset(1, 0, 1);
    zc_device *device = open_device();
    cudaStream_t own = new_stream();
    void *a = NULL, *b = NULL;
    CHECK_OK(device->ops->alloc(device, BYTES, &a));
    for (int i = 0; i < 20; i++)
        CHECK_OK(device->ops->fill(device, as_stream(own), a, i, BYTES));
    device->ops->free(device, a, BYTES);
    emu_fail_next("cudaMalloc", 1, cudaErrorMemoryAllocation);
    CHECK_OK(device->ops->alloc(device, BYTES, &b));
    CHECK_EQ(emu_faults_left(), 0);
    emu_fail_next("cudaMalloc", 1, cudaErrorMemoryAllocation);
    CHECK_EQ(device->ops->alloc(device, BYTES, &a), ZC_ENOMEM);
    CHECK(a == NULL && says("GPU 1 has no room for 65536 bytes") && says("are free") && says("more GPUs"));
    CHECK_EQ(device->ops->alloc(device, (size_t)1 << 50, &a), ZC_ENOMEM);
    CHECK(a == NULL);
    device->ops->free(device, b, BYTES);
    device->ops->destroy(device);
    cudaStreamDestroy(own);
    check_clean();
}

/* ---- slots ----------------------------------------------------------------------- */

static void slots_are_one_memory(void)
{
    zc_device *device = open_device();
    const device_ops *ops = device->ops;
    size_t step_bytes = ops->slot_step_bytes, bytes = 2 * step_bytes;
    unsigned char *expected = calloc(1, bytes);
    device_slot slot;
    void *whole, *part;
    CHECK_EQ(step_bytes, 2 << 20);
    CHECK_OK(ops->slot_alloc(device, bytes, &slot));
    CHECK_EQ(slot.bytes, bytes);
    CHECK_OK(ops->slot_map(device, &slot, bytes, &whole));
    CHECK_OK(ops->slot_map(device, &slot, step_bytes, &part));
    CHECK(whole != slot.base && part != slot.base && part != whole);
    CHECK(is_on_device(device, NULL, slot.base, expected, bytes));
    CHECK_OK(ops->fill(device, NULL, part, 7, step_bytes));
    memset(expected, 7, step_bytes);
    CHECK(is_on_device(device, NULL, whole, expected, bytes));
    CHECK_OK(ops->fill(device, NULL, slot.base, 9, 100));
    memset(expected, 9, 100);
    CHECK(is_on_device(device, NULL, whole, expected, bytes));
    ops->slot_unmap(device, whole, bytes);
    CHECK(is_on_device(device, NULL, part, expected, step_bytes));
    ops->slot_unmap(device, part, step_bytes);
    ops->slot_free(device, &slot);
    CHECK(slot.base == NULL);
    ops->slot_free(device, &slot); /* nothing */
    ops->destroy(device);
    free(expected);
}

/* Without virtual memory management slots are ordinary memory, with one address. */
static void slots_without_support(void)
{
    unsigned char expected[1024] = {0};
    device_slot slot;
    zc_cuda_probe probe;
    emu_set_attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 0);
    emu_reset(1, 0, 1);
    CHECK_OK(cuda_probe(&probe));
    CHECK_EQ(probe.gpu[GPU].slots, 0);
    zc_device *device = open_device();
    const device_ops *ops = device->ops;
    CHECK(ops->slot_map == NULL && ops->slot_unmap == NULL && sizeof expected % ops->slot_step_bytes == 0);
    emu_fail_next("cudaMalloc", 1, cudaErrorMemoryAllocation);
    CHECK_EQ(ops->slot_alloc(device, 4096, &slot), ZC_ENOMEM);
    CHECK(slot.base == NULL && says("no room for 4096 bytes") && says("no virtual memory management"));
    CHECK_OK(ops->slot_alloc(device, sizeof expected, &slot));
    CHECK_EQ(slot.bytes, sizeof expected);
    CHECK(is_on_device(device, NULL, slot.base, expected, sizeof expected));
    CHECK_OK(ops->fill(device, NULL, slot.base, 7, sizeof expected));
    memset(expected, 7, sizeof expected);
    CHECK(is_on_device(device, NULL, slot.base, expected, sizeof expected));
    ops->slot_free(device, &slot);
    CHECK(slot.base == NULL);
    ops->slot_free(device, &slot); /* nothing */
    ops->destroy(device);
    check_clean();
    emu_set_attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1);
}

/* Memory that cannot be exported will do; no memory will not. */
static void slots_are_made_as_can_be(void)
{
    device_slot slot;
    emu_reset(1, 0, 1);
    zc_device *device = open_device();
    size_t bytes = device->ops->slot_step_bytes;
    emu_fail_next("cuMemCreate", 1, CUDA_ERROR_NOT_SUPPORTED);
    CHECK_OK(device->ops->slot_alloc(device, bytes, &slot));
    device->ops->slot_free(device, &slot);
    emu_fail_next("cuMemCreate", 1, CUDA_OUT_OF_MEMORY);
    CHECK_EQ(device->ops->slot_alloc(device, bytes, &slot), ZC_ENOMEM);
    CHECK(slot.base == NULL && says("no room") && says("prefetch"));
    CHECK_EQ(device->ops->slot_alloc(device, (size_t)1 << 50, &slot), ZC_ENOMEM);
    emu_fail_next("cuMemCreate", 1, CUDA_ERROR_UNKNOWN);
    CHECK_EQ(device->ops->slot_alloc(device, bytes, &slot), ZC_ESYSTEM);
    CHECK(says("cuMemCreate on GPU 1: CUDA_ERROR_UNKNOWN"));
    CHECK_EQ(emu_faults_left(), 0);
    device->ops->destroy(device);
    check_clean();
}

/* ---- whose GPU is current, and which there are -------------------------------------- */

static void the_current_gpu_stays(void)
{
    emu_reset(1, 0, 1);
    for (int current = 0; current < 3; current++) {
        int now = -1;
        void *memory;
        device_slot slot;
        CHECK_EQ(cudaSetDevice(current), 0);
        zc_device *device = open_device();
        CHECK(cudaGetDevice(&now) == 0 && now == current);
        CHECK_OK(device->ops->alloc(device, 4096, &memory));
        CHECK_OK(device->ops->fill(device, NULL, memory, 1, 4096));
        CHECK_OK(device->ops->slot_alloc(device, device->ops->slot_step_bytes, &slot));
        CHECK(cudaGetDevice(&now) == 0 && now == current);
        struct cudaPointerAttributes where;
        CHECK(cudaPointerGetAttributes(&where, memory) == 0 && where.device == GPU);
        device->ops->slot_free(device, &slot);
        device->ops->free(device, memory, 4096);
        CHECK_OK(device->ops->synchronize(device, NULL));
        device->ops->destroy(device);
        CHECK(cudaGetDevice(&now) == 0 && now == current);
    }
    check_clean();
    CHECK_EQ(cudaSetDevice(0), 0);
}

/* On a thread that never used CUDA: nothing is current after any call. */
static void *live_without_context(void *unused)
{
    CUcontext current;
    zc_device *device = open_device();
    const device_ops *ops = device->ops;
    uint64_t value = 7;
    device_slot slot;
#define STAYS_FREE(call)                                                                  \
    do {                                                                                  \
        CHECK_OK(call);                                                                   \
        current = (CUcontext)(void *)&current;                                            \
        CHECK(cuCtxGetCurrent(&current) == CUDA_SUCCESS && current == NULL);              \
    } while (0)
    STAYS_FREE(ZC_OK);
    void *memory = on_device(device, NULL, &value, sizeof value);
    STAYS_FREE(ops->fill(device, NULL, memory, 0, 4));
    STAYS_FREE(ops->slot_alloc(device, ops->slot_step_bytes, &slot));
    ops->slot_free(device, &slot);
    STAYS_FREE(ops->download(device, NULL, &value, memory, sizeof value));
    ops->free(device, memory, sizeof value);
    STAYS_FREE(ops->synchronize(device, NULL));
    ops->destroy(device);
    STAYS_FREE(ZC_OK);
#undef STAYS_FREE
    return unused;
}

static void no_context_is_made_elsewhere(void)
{
    pthread_t thread;
    emu_reset(1, 0, 1);
    CHECK_EQ(pthread_create(&thread, NULL, live_without_context, NULL), 0);
    pthread_join(thread, NULL);
    CHECK(emu_has_context(GPU));
    for (int other = 0; other < 8; other++)
        CHECK_EQ(emu_has_context(other), other == GPU);
    check_clean();
}

static void refusals(void)
{
    zc_device *device = NULL;
    zc_cuda_probe probe;
    emu_set_devices(2);
    emu_reset(1, 0, 1);
    CHECK_OK(cuda_probe(&probe));
    CHECK(!emu_has_context(0) && !emu_has_context(1));
    CHECK(probe.gpus == 2 && probe.driver_version == 13000 && probe.runtime_version >= 13000);
    CHECK(probe.gpu[0].sm == 90 && probe.gpu[1].slots == 1);
    CHECK_EQ(cuda_device_create(2, &device), ZC_EINVAL);
    CHECK(!device && says("there is no GPU 2") && says("CUDA_VISIBLE_DEVICES"));
    CHECK_EQ(cuda_device_create(-1, &device), ZC_EINVAL);

    emu_set_attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 7);
    emu_set_attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 5);
    CHECK_EQ(cuda_device_create(0, &device), ZC_EINVAL);
    CHECK(!device && says("compute capability 7.5") && says("8.0 or newer"));
    emu_set_attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9);
    emu_set_attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0);

    emu_set_devices(0);
    CHECK_EQ(cuda_probe(&probe), ZC_ESTATE);
    CHECK(says("no GPU that this process may use"));
    CHECK_EQ(cuda_device_create(0, &device), ZC_ESTATE);
    emu_set_devices(8);

    emu_driver_version(12040);
    CHECK_EQ(cuda_device_create(0, &device), ZC_ESTATE);
    CHECK(says("supports CUDA up to 12.4") && says("13.") && says("580"));
    emu_driver_version(13000);

    emu_no_driver(1);
    CHECK_EQ(cuda_device_create(0, &device), ZC_ESTATE);
    CHECK(!device && says("no NVIDIA driver was found") && says("580"));
    emu_no_driver(0);
    check_clean();
}

/* ---- what goes wrong ------------------------------------------------------------------ */

/* Something of everything, on two streams; gives back all it has got. */
static zc_status try_everything(zc_device *device, zc_stream *a, zc_stream *b)
{
    enum { BYTES = (CUDA_STAGING_BLOCKS + 2) * CUDA_STAGING_BLOCK_BYTES };
    const device_ops *ops = device->ops;
    static char host[BYTES];
    void *x = NULL, *y = NULL, *z = NULL, *view = NULL;
    int64_t shape[] = {30, 20}, strides[] = {1, 30};
    device_slot slot = {0};
    shard s[2] = {{.device = device}, {.device = device}};
    size_t slot_bytes = ops->slot_step_bytes;
    zc_status status = ops->alloc(device, BYTES, &x);
#define TRY(call)                \
    do {                         \
        if (status == ZC_OK)     \
            status = (call);     \
    } while (0)
    TRY(ops->fill(device, b, x, 0, BYTES)); /* after the zero-fill of alloc, whatever the stream */
    TRY(ops->synchronize(device, b));
    TRY(ops->upload(device, a, x, host, BYTES));
    TRY(ops->alloc(device, BYTES, &y));
    TRY(ops->copy(device, a, y, x, BYTES));
    TRY(ops->pack(device, a, y, x, 4, 2, shape, strides));
    TRY(ops->slot_alloc(device, slot_bytes, &slot));
    TRY(ops->slot_map(device, &slot, slot_bytes, &view));
    TRY(ops->copy(device, a, view, x, BYTES));
    TRY(ops->fill(device, a, y, 3, BYTES));
    TRY(ops->synchronize(device, a));
    TRY(ops->copy(device, b, y, slot.base, BYTES));
    ops->free(device, y, BYTES);
    TRY(ops->alloc(device, BYTES, &z));
    TRY(ops->copy(device, a, z, x, BYTES));
    TRY(shard_alloc(device, a, &s[0]));
    TRY(shard_alloc(device, b, &s[1]));
    TRY(step(&s[0], a, 0.1, GROUPS));
    TRY(step(&s[1], b, 0.2, GROUPS));
    TRY(ops->download(device, a, host, z, BYTES));
    TRY(ops->synchronize(device, a));
    TRY(ops->synchronize(device, b));
#undef TRY
    if (status != ZC_OK)
        cudaDeviceSynchronize(); /* what was enqueued on the slot may be on its way */
    if (view)
        ops->slot_unmap(device, view, slot_bytes);
    ops->slot_free(device, &slot);
    shard_free(&s[0]);
    shard_free(&s[1]);
    ops->free(device, x, BYTES);
    ops->free(device, z, BYTES);
    return status;
}

static zc_status live_once(void)
{
    zc_device *device = NULL;
    CHECK_EQ(cudaSetDevice(GPU), 0);
    cudaStream_t a = new_stream(), b = new_stream();
    zc_status status = cuda_device_create(GPU, &device);
    if (status == ZC_OK) {
        status = try_everything(device, as_stream(a), as_stream(b));
        device->ops->destroy(device);
    }
    cudaStreamDestroy(a);
    cudaStreamDestroy(b);
    return status;
}

static void a_life(void)
{
    CHECK_OK(live_once());
}

/* There is another way when one of these fails. */
static int may_fail(const char *function)
{
    return strcmp(function, "cudaEventQuery") == 0 || strcmp(function, "cuMemCreate") == 0;
}

/*
 * Every call of every function fails once.  (Not those that give something back:
 * what they fail to give back is lost, and nobody can be told.)
 */
static void every_cuda_call_fails(void)
{
    static const char *const functions[] = {
        "cudaDriverGetVersion", "cudaRuntimeGetVersion", "cudaGetDeviceCount", "cudaDeviceGetAttribute",
        "cudaGetDriverEntryPointByVersion", "cudaStreamCreateWithFlags", "cudaEventCreateWithFlags",
        "cudaMallocHost", "cudaMalloc", "cudaMemsetAsync", "cudaMemcpyAsync", "cudaEventRecord",
        "cudaEventSynchronize", "cudaStreamSynchronize", "cudaStreamWaitEvent", "cudaLaunchKernel", "cudaEventQuery",
        "cuCtxGetCurrent", "cuDeviceGet", "cuDeviceGetAttribute", "cuMemGetAllocationGranularity", "cuMemCreate",
        "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess",
    };
    for (size_t f = 0; f < sizeof functions / sizeof *functions; f++) {
        int skipped = strcmp(functions[f], "cudaStreamCreateWithFlags") == 0 ? 2 : 0; /* the test's own */
        for (int nth = 1, asked = 1, failed = 0; asked; nth++) {
            emu_reset((uint64_t)nth, 0, 1);
            emu_fail_next(functions[f], nth + skipped, cudaErrorUnknown);
            zc_fail(ZC_OK, "%s", "");
            zc_status status = live_once();
            asked = emu_faults_left() == 0;
            failed += status != ZC_OK;
            if (status != ZC_OK && !(zc_last_error()[0] && strlen(zc_last_error()) > 20)) {
                fprintf(stderr, "call %d of %s: no sentence\n", nth, functions[f]);
                CHECK(0);
            }
            int before = testing_failures;
            check_clean();
            if (testing_failures != before)
                fprintf(stderr, "... after call %d of %s failed\n", nth, functions[f]);
            if (!asked) {
                CHECK_OK(status);
                CHECK(nth > 1); /* it is called */
                if (!failed && !may_fail(functions[f])) {
                    fprintf(stderr, "no failure of %s is reported\n", functions[f]);
                    CHECK(0);
                }
            }
            CHECK(nth < 1000);
        }
    }
}

/* The device is used on after one of its records has failed: two steps with other options, a full ring, memory. */
static void live_on(int nth)
{
    zc_device *device = open_device();
    const device_ops *ops = device->ops;
    cudaStream_t streams[2] = {new_stream(), new_stream()};
    shard s[2];
    void *x = NULL;
    uint64_t word = 0;
    for (size_t i = 0; i < 2; i++)
        CHECK_OK(shard_alloc(device, as_stream(streams[i]), &s[i]));
    CHECK_OK(ops->alloc(device, 8 * sizeof word, &x));
    emu_fail_next("cudaEventRecord", nth, cudaErrorUnknown);
    for (size_t i = 0; i < 4; i++)
        step(&s[i % 2], as_stream(streams[i % 2]), 0.1 * (double)(i + 1), GROUPS);
    for (size_t i = 0; i <= CUDA_STAGING_BLOCKS; i++)
        ops->upload(device, as_stream(streams[0]), x, &word, sizeof word);
    ops->download(device, as_stream(streams[0]), &word, x, sizeof word);
    ops->free(device, x, 8 * sizeof word);
    CHECK_OK(ops->alloc(device, 8 * sizeof word, &x));
    ops->free(device, x, 8 * sizeof word);
    for (size_t i = 0; i < 2; i++)
        shard_free(&s[i]);
    ops->destroy(device);
    for (size_t i = 0; i < 2; i++)
        cudaStreamDestroy(streams[i]);
}

static void failures_leave_no_disorder(void)
{
    for (int nth = 1, failed = 1; failed; nth++) {
        emu_reset((uint64_t)nth, eager_levels[nth % 3], 1);
        live_on(nth);
        failed = emu_faults_left() == 0;
        check_clean();
        CHECK(nth < 1000);
    }
}

static void every_allocation_fails(void)
{
    for (long nth = 1, asked = 1; asked; nth++) {
        emu_reset((uint64_t)nth, 0, 1);
        zc_fault_arm(nth);
        zc_status status = live_once();
        asked = zc_fault_count() >= nth;
        zc_fault_arm(0);
        CHECK_EQ(status, asked ? ZC_ENOMEM : ZC_OK);
        check_clean();
    }
}

static void errors_have_names(void)
{
    emu_reset(1, 0, 1);
    void *memory = NULL;
    zc_device *device = open_device();
    CHECK_OK(device->ops->alloc(device, 64, &memory));
    emu_fail_next("cudaMemsetAsync", 1, cudaErrorInvalidValue);
    CHECK_EQ(device->ops->fill(device, NULL, memory, 1, 64), ZC_ESYSTEM);
    CHECK(says("cudaMemsetAsync on GPU 1: ") && says("(cudaErrorInvalidValue)"));
    CHECK(strstr(zc_last_error(), "restarted") == NULL);
    emu_fail_next("cudaStreamSynchronize", 1, cudaErrorIllegalAddress);
    CHECK_EQ(device->ops->synchronize(device, NULL), ZC_ESYSTEM);
    CHECK(says("cudaStreamSynchronize on GPU 1: ") && says("(cudaErrorIllegalAddress)") && says("restarted"));
    device->ops->free(device, memory, 64);
    device->ops->destroy(device);
    check_clean();
}

/* ---- waits ---------------------------------------------------------------------------- */

/* In a life without failures, or in one in which a record fails: some waits are for that. */
static int is_missed(const char *site)
{
    enum { LIVES = 15, RECORDS = 60 };
    int missed = 0;
    for (int i = 0; i < LIVES + RECORDS && !missed; i++) {
        emu_reset((uint64_t)i, eager_levels[i % 3], 1);
        emu_drop_wait(site);
        if (i < LIVES)
            live_once();
        else
            live_on(i - LIVES + 1);
        emu_drop_wait(NULL);
        missed = emu_findings(NULL, 0) > 0;
    }
    return missed;
}

/*
 * Each wait of the device is missed when it is left out, on some schedule.  Those of cuda_memory.c take a
 * failure, or are doubled: tests/test_cuda.py has them in its table.
 */
static void no_wait_is_idle(void)
{
    static char sites[TEXT_BYTES];
    int tried = 0;
    emu_wait_sites(sites, sizeof sites);
    for (char *line = sites, *end; (end = strchr(line, '\n')) != NULL; line = end + 1) {
        *end = '\0';
        if (strncmp(line, "cuda_", 5) != 0 || strncmp(line, "cuda_memory.c", 13) == 0)
            continue;
        tried++;
        if (!is_missed(line)) {
            fprintf(stderr, "nobody misses %s\n", line);
            CHECK(0);
        }
    }
    CHECK(tried >= 4);
}

/* ---- threads -------------------------------------------------------------------------- */

enum { THREADS = 3, TURNS = 12 };

typedef struct worker {
    zc_device *device;
    cudaStream_t stream;
    uint64_t seed;
} worker;

static void *work(void *context)
{
    const worker *self = context;
    zc_stream *stream = as_stream(self->stream);
    const device_ops *ops = self->device->ops;
    enum { BYTES = CUDA_STAGING_BLOCK_BYTES + 1000 };
    char *host = malloc(BYTES);
    shard ours, theirs;
    CHECK_OK(shard_alloc(self->device, stream, &ours));
    CHECK_OK(shard_alloc(cpu(), NULL, &theirs));
    for (unsigned turn = 0; turn < TURNS; turn++) {
        void *memory = NULL;
        fill_random(host, BYTES, self->seed * TURNS + turn);
        CHECK_OK(ops->alloc(self->device, BYTES, &memory));
        CHECK_OK(ops->upload(self->device, stream, memory, host, BYTES));
        CHECK(is_on_device(self->device, stream, memory, host, BYTES));
        ops->free(self->device, memory, BYTES);
        double lr = 0.1 * (double)(self->seed + turn / 2);
        CHECK_OK(step(&ours, stream, lr, GROUPS));
        CHECK_OK(step(&theirs, NULL, lr, GROUPS));
    }
    CHECK(shards_agree(&ours, &theirs, stream));
    shard_free(&ours);
    shard_free(&theirs);
    free(host);
    return NULL;
}

/* Unchecked: what mutexes put in order, the checker cannot know. The numbers tell. */
static void threads_share_a_device(void)
{
    pthread_t threads[THREADS];
    worker workers[THREADS];
    zc_device *device = open_device();
    cpu(); /* made here, not by all of them */
    for (size_t i = 0; i < THREADS; i++) {
        workers[i] = (worker){device, new_stream(), i};
        CHECK_EQ(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
    }
    for (size_t i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    device->ops->destroy(device);
    for (size_t i = 0; i < THREADS; i++)
        cudaStreamDestroy(workers[i].stream);
}

#define ON_SCHEDULES(seeds, check, function)                                                \
    do {                                                                                    \
        int testing_before = testing_failures;                                              \
        on_schedules(seeds, check, function);                                               \
        printf("%s %s\n", testing_failures == testing_before ? "ok" : "FAILED", #function); \
        fflush(stdout);                                                                     \
    } while (0)

int main(void)
{
    ON_SCHEDULES(10, 1, bytes_move);
    ON_SCHEDULES(10, 1, small_uploads_do_not_overtake);
    ON_SCHEDULES(3, 1, packs);
    ON_SCHEDULES(20, 1, steps_are_the_cpus);
    ON_SCHEDULES(1, 1, nothing_is_nothing);
    ON_SCHEDULES(20, 1, options_serve_several_streams);
    ON_SCHEDULES(1, 1, options_are_uploaded_when_they_change);
    ON_SCHEDULES(20, 1, free_does_not_wait);
    RUN(free_leaves_work_alone);
    ON_SCHEDULES(4, 1, many_streams);
    RUN(room_is_made);
    ON_SCHEDULES(4, 1, slots_are_one_memory);
    RUN(slots_without_support);
    RUN(slots_are_made_as_can_be);
    RUN(the_current_gpu_stays);
    RUN(no_context_is_made_elsewhere);
    RUN(refusals);
    ON_SCHEDULES(20, 1, a_life);
    RUN(every_cuda_call_fails);
    RUN(every_allocation_fails);
    RUN(failures_leave_no_disorder);
    RUN(errors_have_names);
    RUN(no_wait_is_idle);
    ON_SCHEDULES(10, 0, threads_share_a_device);
    cpu()->ops->destroy(cpu());
    DONE();
}
