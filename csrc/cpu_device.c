/*
 * The CPU device: memory, and the operations of device.h on the kernels of this
 * machine.  Everything is done when a call returns; streams are ignored.
 *
 * Elements are independent of each other and sums of squares are exact, so how
 * a range is split among threads changes no bit.
 */
#include "cpu_kernels.h"
#include "cpu_slots.h"
#include "cpu_threads.h"
#include "device.h"
#include "device_step.h"
#include "shm_sync.h"
#include "strides.h"
#include "zc_point.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define GRAIN_ELEMS ((size_t)32 << 10) /* below this a second thread costs more than it saves */
#define STREAM_COPY_BYTES ((size_t)4 << 20)

typedef struct cpu_device {
    zc_device device;
    const cpu_kernels *kernels;
    cpu_threads *threads;
    uint32_t mappings; /* made so far, for staggering */
    cpu_slots slots;
} cpu_device;

static cpu_device *of(zc_device *device)
{
    return (cpu_device *)device;
}

/* ---- memory -------------------------------------------------------------------- */

#define MAPPED_BYTES ((size_t)1 << 20) /* from this size on memory is mapped, not taken from the heap */
#define HUGE_BYTES ((size_t)2 << 20)
#define STAGGER_BYTES ((size_t)320)    /* whole lines, and 12 steps of it fit the first page */
#define STAGGER_STEPS 12u
#define SMALL_ALIGN_BYTES 64u

static size_t page_bytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

static size_t mapping_bytes(size_t bytes)
{
    size_t page = page_bytes();
    return (bytes + STAGGER_STEPS * STAGGER_BYTES + page - 1) / page * page;
}

/* Makes every page present, so that no step pays for it. */
static void touch_pages(char *base, size_t bytes)
{
#if defined(MADV_POPULATE_WRITE)
    if (madvise(base, bytes, MADV_POPULATE_WRITE) == 0)
        return;
#endif
    size_t page = page_bytes();
    for (size_t at = 0; at < bytes; at += page)
        ((volatile char *)base)[at] = 0;
}

/*
 * Begins at a huge page, plus a few lines that differ between mappings: the
 * streams of one update (p, m, v, g) should not meet in the same cache sets.
 */
static zc_status map(cpu_device *cpu, size_t bytes, void **out)
{
    size_t length = mapping_bytes(bytes);
    char *reserved = MAP_FAILED;
    if (length > bytes && length <= SIZE_MAX - HUGE_BYTES && !zc_fault())
        reserved = mmap(NULL, length + HUGE_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved == MAP_FAILED)
        return zc_fail(ZC_ENOMEM, "could not map %zu bytes of memory", bytes);
    size_t head = (0 - (uintptr_t)reserved) % HUGE_BYTES;
    if (head)
        munmap(reserved, head);
    char *base = reserved + head;
    if (HUGE_BYTES > head)
        munmap(base + length, HUGE_BYTES - head);
    madvise(base, length, MADV_HUGEPAGE); /* best effort */
    touch_pages(base, length);
    uint32_t step = __atomic_fetch_add(&cpu->mappings, 1, __ATOMIC_RELAXED) % STAGGER_STEPS;
    *out = base + step * STAGGER_BYTES;
    return ZC_OK;
}

static zc_status cpu_alloc(zc_device *device, size_t bytes, void **out)
{
    *out = NULL;
    if (bytes == 0)
        return ZC_OK;
    if (bytes >= MAPPED_BYTES)
        return map(of(device), bytes, out);
    void *memory = NULL;
    if (zc_fault() || posix_memalign(&memory, SMALL_ALIGN_BYTES, bytes) != 0)
        return zc_fail(ZC_ENOMEM, "could not allocate %zu bytes of memory", bytes);
    *out = memset(memory, 0, bytes);
    return ZC_OK;
}

static void cpu_free(zc_device *device, void *memory, size_t bytes)
{
    (void)device;
    if (!memory)
        return;
    if (bytes < MAPPED_BYTES) {
        free(memory);
        return;
    }
    uintptr_t base = (uintptr_t)memory / HUGE_BYTES * HUGE_BYTES;
    munmap((void *)base, mapping_bytes(bytes));
}

static zc_status cpu_slot_alloc(zc_device *device, size_t bytes, device_slot *out)
{
    return cpu_slots_alloc(&of(device)->slots, bytes, out);
}

static zc_status cpu_slot_map(zc_device *device, const device_slot *slot, size_t bytes, void **out)
{
    return cpu_slots_map(&of(device)->slots, slot, bytes, out);
}

static void cpu_slot_unmap(zc_device *device, void *memory, size_t bytes)
{
    (void)device;
    cpu_slots_unmap(memory, bytes);
}

static void cpu_slot_free(zc_device *device, device_slot *slot)
{
    cpu_slots_free(&of(device)->slots, slot);
}

/* ---- moving bytes --------------------------------------------------------------- */

typedef struct copy_job {
    const cpu_kernels *kernels;
    char *to;
    const char *from; /* NULL: fill with `byte` */
    int byte;
    int stream;
} copy_job;

static void run_copy(void *context, size_t begin, size_t end)
{
    const copy_job *job = context;
    if (!job->from)
        memset(job->to + begin, job->byte, end - begin);
    else if (job->stream)
        job->kernels->copy_stream(job->to + begin, job->from + begin, end - begin);
    else
        memcpy(job->to + begin, job->from + begin, end - begin);
}

static zc_status copy(zc_device *device, void *to, const void *from, size_t bytes, int stream)
{
    copy_job job = {of(device)->kernels, to, from, 0, stream};
    if (bytes && to != from)
        cpu_parallel(of(device)->threads, bytes, GRAIN_ELEMS * sizeof(float), run_copy, &job);
    return ZC_OK;
}

static zc_status cpu_copy(zc_device *device, zc_stream *stream, void *to, const void *from, size_t bytes)
{
    (void)stream;
    return copy(device, to, from, bytes, bytes >= STREAM_COPY_BYTES);
}

static zc_status cpu_copy_far(zc_device *device, zc_stream *stream, void *to, const void *from, size_t bytes)
{
    (void)stream;
    return copy(device, to, from, bytes, 1);
}

static zc_status cpu_fill(zc_device *device, zc_stream *stream, void *to, int byte, size_t bytes)
{
    (void)stream;
    copy_job job = {.to = to, .byte = byte};
    cpu_parallel(of(device)->threads, bytes, GRAIN_ELEMS * sizeof(float), run_copy, &job);
    return ZC_OK;
}

/* One row of the innermost dimension; `stride_bytes` lies between its elements. */
static void pack_row(char *to, const char *from, size_t elem_bytes, size_t elems, ptrdiff_t stride_bytes)
{
    if (stride_bytes == (ptrdiff_t)elem_bytes) {
        memcpy(to, from, elems * elem_bytes);
        return;
    }
    switch (elem_bytes) { /* a constant size makes memcpy one move */
    case 2:
        for (size_t i = 0; i < elems; i++)
            memcpy(to + 2 * i, from + (ptrdiff_t)i * stride_bytes, 2);
        break;
    case 4:
        for (size_t i = 0; i < elems; i++)
            memcpy(to + 4 * i, from + (ptrdiff_t)i * stride_bytes, 4);
        break;
    default:
        for (size_t i = 0; i < elems; i++)
            memcpy(to + elem_bytes * i, from + (ptrdiff_t)i * stride_bytes, elem_bytes);
    }
}

static zc_status cpu_pack(zc_device *device, zc_stream *stream, void *to, const void *from, size_t elem_bytes,
                          int dims, const int64_t *shape, const int64_t *strides)
{
    strides_joined joined;
    ZC_TRY(strides_join(dims, shape, strides, &joined));
    if (joined.elems == 0)
        return ZC_OK;
    if (joined.contiguous)
        return cpu_copy(device, stream, to, from, joined.elems * elem_bytes);

    int inner = joined.dims - 1;
    const int64_t *extent = joined.extent, *step = joined.step;
    int64_t index[STRIDES_MAX_DIMS] = {0};
    char *row_to = to;
    const char *row_from = from;
    size_t row_elems = (size_t)extent[inner];
    for (;;) {
        pack_row(row_to, row_from, elem_bytes, row_elems, (ptrdiff_t)(step[inner] * (int64_t)elem_bytes));
        row_to += row_elems * elem_bytes;
        int d = inner - 1;
        for (; d >= 0; d--) {
            row_from += step[d] * (int64_t)elem_bytes;
            if (++index[d] < extent[d])
                break;
            row_from -= extent[d] * step[d] * (int64_t)elem_bytes;
            index[d] = 0;
        }
        if (d < 0)
            return ZC_OK;
    }
}

/* ---- gradients ------------------------------------------------------------------- */

typedef struct accumulate_job {
    const cpu_kernels *kernels;
    char *to;
    const char *from;
    zc_dtype dtype;
    int add;
} accumulate_job;

static void run_accumulate(void *context, size_t begin, size_t end)
{
    const accumulate_job *job = context;
    const void *in = job->from + begin * zc_dtype_bytes(job->dtype);
    void *to = job->to + begin * zc_dtype_bytes(zc_dtype_sum(job->dtype));
    unsigned long mode = cpu_mode_enter();
    job->kernels->reduce(to, &in, 1, end - begin, job->dtype, job->add);
    cpu_mode_leave(mode);
}

static zc_status cpu_accumulate(zc_device *device, zc_stream *stream, void *to, const void *from, size_t count,
                                zc_dtype dtype, int add)
{
    (void)stream;
    accumulate_job job = {of(device)->kernels, to, from, dtype, add};
    cpu_parallel(of(device)->threads, count, GRAIN_ELEMS, run_accumulate, &job);
    return ZC_OK;
}

typedef struct squares_job {
    const cpu_kernels *kernels;
    pthread_mutex_t lock; /* of stats and flags */
    device_stats *stats;
    uint32_t *flags;
    const char *grad;
    zc_dtype dtype;
} squares_job;

static void run_squares(void *context, size_t begin, size_t end)
{
    squares_job *job = context;
    uint64_t words[OPTIM_SUM_WORDS] = {0};
    unsigned long mode = cpu_mode_enter();
    const char *grad = job->grad + begin * zc_dtype_bytes(job->dtype);
    uint32_t flags = job->kernels->sum_squares(words, grad, end - begin, job->dtype);
    cpu_mode_leave(mode);
    pthread_mutex_lock(&job->lock);
    for (unsigned i = 0; i < OPTIM_SUM_WORDS; i++)
        job->stats->sum_squares[i] += words[i];
    *job->flags |= flags;
    pthread_mutex_unlock(&job->lock);
}

static zc_status cpu_sum_squares(zc_device *device, zc_stream *stream, device_stats *stats, uint32_t *flags,
                                 const void *grad, size_t count, zc_dtype dtype)
{
    (void)stream;
    squares_job job = {of(device)->kernels, PTHREAD_MUTEX_INITIALIZER, stats, flags, grad, dtype};
    cpu_parallel(of(device)->threads, count, GRAIN_ELEMS, run_squares, &job);
    pthread_mutex_destroy(&job.lock);
    return ZC_OK;
}

static zc_status cpu_fold_flags(zc_device *device, zc_stream *stream, device_stats *stats,
                                const uint32_t *flags)
{
    (void)device;
    (void)stream;
    stats->inf_ranks = (*flags & CPU_NONFINITE_INF) != 0;
    stats->nan_ranks = (*flags & CPU_NONFINITE_NAN) != 0;
    return ZC_OK;
}

typedef struct scale_job {
    const cpu_kernels *kernels;
    char *to;
    const char *from;
    zc_dtype dtype;
    double factor;
} scale_job;

static void run_scale(void *context, size_t begin, size_t end)
{
    const scale_job *job = context;
    size_t at = begin * zc_dtype_bytes(job->dtype);
    unsigned long mode = cpu_mode_enter();
    job->kernels->scale(job->to + at, job->from + at, end - begin, job->dtype, job->factor);
    cpu_mode_leave(mode);
}

static zc_status cpu_scale(zc_device *device, zc_stream *stream, void *to, const void *from, size_t count,
                           zc_dtype dtype, double factor)
{
    (void)stream;
    scale_job job = {of(device)->kernels, to, from, dtype, factor};
    cpu_parallel(of(device)->threads, count, GRAIN_ELEMS, run_scale, &job);
    return ZC_OK;
}

/* ---- the step --------------------------------------------------------------------- */

/* Not inlined: its arithmetic must stay between the calls that set the floating-point mode. */
static __attribute__((noinline)) void decide_step(const device_step_args *args)
{
    uint32_t digits[OPTIM_SUM_DIGITS];
    *args->result = device_step_decide(args, digits);
    for (size_t i = 0; i < args->segments; i++)
        device_step_segment(args, args->result, i);
}

static zc_status cpu_step_scalars(zc_device *device, zc_stream *stream, const device_step_args *args)
{
    (void)device;
    (void)stream;
    unsigned long mode = cpu_mode_enter();
    decide_step(args);
    cpu_mode_leave(mode);
    return ZC_OK;
}

typedef struct update_job {
    const cpu_kernels *kernels;
    const device_update_args *args;
    const device_shard *shard;
    size_t origin; /* the shard element that element 0 of the job is */
} update_job;

static void *element(void *array, size_t at, size_t bytes)
{
    return array ? (char *)array + at * bytes : NULL;
}

static void update_range(const update_job *job, const optim_segment_scalars *scalars, size_t begin,
                         size_t end)
{
    const device_update_args *args = job->args;
    size_t param_bytes = zc_dtype_bytes(args->param_dtype);
    size_t state_bytes = zc_dtype_bytes(zc_dtype_sum(args->param_dtype));
    size_t master_bytes = zc_dtype_master_bytes(args->param_dtype);
    size_t state = job->shard->state_begin + begin;
    job->kernels->update(args->rule, scalars, end - begin, args->param_dtype,
                         element(job->shard->param, begin, param_bytes), element(args->master, state, master_bytes),
                         (const char *)job->shard->grad + begin * state_bytes, element(args->m, state, state_bytes),
                         element(args->v, state, state_bytes), element(args->vmax, state, state_bytes));
}

/* One kernel call for each run of adjacent active spans with the same scalars. */
static void run_update(void *context, size_t begin, size_t end)
{
    const update_job *job = context;
    const device_shard *shard = job->shard;
    begin += job->origin;
    end += job->origin;
    const optim_segment_scalars *scalars = NULL; /* of the run being collected; NULL: none */
    size_t run_begin = 0, run_end = 0;
    unsigned long mode = cpu_mode_enter();
    for (size_t k = device_find_span(shard->spans, shard->span_count, begin);
         k < shard->span_count && shard->spans[k].begin < end; k++) {
        const device_span *span = &shard->spans[k];
        const optim_segment_scalars *own = &job->args->scalars[span->segment];
        size_t from = span->begin < begin ? begin : span->begin, to = span->end > end ? end : span->end;
        if (!own->active || from >= to)
            continue;
        /* Other padding only ends a run that could go on. NOLINTNEXTLINE(bugprone-suspicious-memory-comparison) */
        if (scalars && run_end == from && (own == scalars || !memcmp(own, scalars, sizeof *own))) {
            run_end = to;
            continue;
        }
        ZC_POINT("update: a run of elements");
        if (scalars)
            update_range(job, scalars, run_begin, run_end);
        scalars = own;
        run_begin = from;
        run_end = to;
    }
    if (scalars)
        update_range(job, scalars, run_begin, run_end);
    cpu_mode_leave(mode);
}

static zc_status cpu_update(zc_device *device, zc_stream *stream, const device_update_args *args)
{
    (void)stream;
    for (size_t k = 0; k < args->shard_count; k++) {
        const device_shard *shard = &args->shards[k];
        if (shard->span_count == 0)
            continue;
        update_job job = {of(device)->kernels, args, shard, shard->spans[0].begin};
        size_t count = shard->spans[shard->span_count - 1].end - job.origin;
        cpu_parallel(of(device)->threads, count, GRAIN_ELEMS, run_update, &job);
    }
    return ZC_OK;
}

/* ---- host and device are the same -------------------------------------------------- */

static zc_status cpu_synchronize(zc_device *device, zc_stream *stream)
{
    (void)device;
    (void)stream;
    return ZC_OK;
}

static zc_status cpu_order(zc_device *device, zc_stream *before, zc_stream *after)
{
    (void)device, (void)before, (void)after;
    return ZC_OK;
}

static void cpu_destroy(zc_device *device)
{
    cpu_threads_destroy(of(device)->threads);
    cpu_slots_close(&of(device)->slots);
    zc_free(device);
}

static const device_ops cpu_ops = {
    .name = "cpu",
    .slot_step_bytes = 4096,
    .update_bytes = 0,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .slot_alloc = cpu_slot_alloc,
    .slot_map = cpu_slot_map,
    .slot_unmap = cpu_slot_unmap,
    .slot_free = cpu_slot_free,
    .copy = cpu_copy,
    .copy_far = cpu_copy_far,
    .pack = cpu_pack,
    .fill = cpu_fill,
    .accumulate = cpu_accumulate,
    .sum_squares = cpu_sum_squares,
    .fold_flags = cpu_fold_flags,
    .scale = cpu_scale,
    .step_scalars = cpu_step_scalars,
    .update = cpu_update,
    .upload = cpu_copy,
    .download = cpu_copy,
    .synchronize = cpu_synchronize,
    .order = cpu_order,
    .destroy = cpu_destroy,
    .now_ns = shm_now_ns,
};

zc_status cpu_device_create(int threads, zc_device **out)
{
    *out = NULL;
    if (cpu_kernels_error())
        return zc_fail(ZC_EINVAL, "%s", cpu_kernels_error());
    cpu_threads *pool = NULL;
    ZC_TRY(cpu_threads_create(threads ? threads : 1, &pool));
    cpu_device *cpu = zc_calloc(1, sizeof *cpu);
    if (!cpu) {
        cpu_threads_destroy(pool);
        return zc_fail(ZC_ENOMEM, "no memory for the CPU device");
    }
    cpu->device.ops = &cpu_ops;
    cpu_slots_init(&cpu->slots);
    cpu->kernels = cpu_kernels_get();
    cpu->threads = pool;
    *out = &cpu->device;
    return ZC_OK;
}
