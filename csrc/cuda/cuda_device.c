/*
 * The CUDA device: every operation of device.h is put on the stream that it is
 * given, with the device's GPU current.  Memory is in cuda_memory.c, slots in
 * cuda_slots.c, the way from and to host memory in cuda_staging.c, groups'
 * options in cuda_options.c, loops in cuda_kernels.h.
 *
 * `lock` guards what calls share: the list of streams, memory, the ring for
 * uploads, the options.  Downloads wait for the device; they have a ring and a
 * lock of their own, so that other threads can go on enqueuing.
 */
#include "cuda_device.h"

#include "cuda_capture.h"
#include "cuda_kernels.h"
#include "cuda_memory.h"
#include "cuda_options.h"
#include "cuda_probe.h"
#include "cuda_slots.h"
#include "cuda_staging.h"
#include "strides.h"

#include <pthread.h>
#include <string.h>

#define DOWNLOAD_BLOCKS 2u
#define UPDATE_BYTES ((size_t)256 << 20) /* some 60 us of a GPU's memory: a launch's start is lost in it */

typedef struct cuda_device {
    zc_device device;
    device_ops ops; /* with this GPU's slots */
    int ordinal;
    pthread_mutex_t lock, download_lock;
    cuda_memory memory;
    cuda_slots slots;
    cuda_staging upload, download;
    cuda_options options;
    cudaEvent_t ordered; /* on its way from one stream to another */
} cuda_device;

static cuda_device *of(zc_device *device)
{
    return (cuda_device *)device;
}

static cudaStream_t cuda_stream(zc_stream *stream)
{
    return (cudaStream_t)stream;
}

static void use_stream(cuda_device *cuda, cudaStream_t stream)
{
    pthread_mutex_lock(&cuda->lock);
    cuda_memory_use_stream(&cuda->memory, stream);
    pthread_mutex_unlock(&cuda->lock);
}

/* Every operation on a stream lies between these two. */
static zc_status begin(zc_device *device, zc_stream *stream, CUcontext *previous)
{
    ZC_TRY(cuda_enter(of(device)->ordinal, previous));
    use_stream(of(device), cuda_stream(stream));
    return ZC_OK;
}

static zc_status end(zc_device *device, CUcontext previous, cudaError_t error, const char *function)
{
    zc_status status = error == cudaSuccess ? ZC_OK : cuda_fail(error, of(device)->ordinal, function);
    cuda_leave(previous);
    return status;
}

/* The rest of an operation that is one call. */
#define ENQUEUE(device, stream, function, ...)                                   \
    do {                                                                         \
        CUcontext previous;                                                      \
        ZC_TRY(begin((device), (stream), &previous));                            \
        return end((device), previous, function(__VA_ARGS__), #function);        \
    } while (0)

/* ---- memory -------------------------------------------------------------------- */

#define ADVICE "use a higher stage, more GPUs or a smaller batch, or look for other programs on this GPU"

static zc_status alloc(cuda_device *cuda, size_t bytes, const char *advice, void **out)
{
    CUcontext previous;
    *out = NULL;
    ZC_TRY(cuda_enter(cuda->ordinal, &previous));
    pthread_mutex_lock(&cuda->lock);
    zc_status status = cuda_memory_alloc(&cuda->memory, bytes, advice, out);
    pthread_mutex_unlock(&cuda->lock);
    cuda_leave(previous);
    return status;
}

static zc_status device_alloc(zc_device *device, size_t bytes, void **out)
{
    *out = NULL;
    return bytes ? alloc(of(device), bytes, ADVICE, out) : ZC_OK;
}

static void device_free(zc_device *device, void *memory, size_t bytes)
{
    cuda_device *cuda = of(device);
    CUcontext previous;
    (void)bytes;
    zc_status status = cuda_enter(cuda->ordinal, &previous);
    pthread_mutex_lock(&cuda->lock);
    cuda_memory_free(&cuda->memory, memory);
    pthread_mutex_unlock(&cuda->lock);
    if (status == ZC_OK)
        cuda_leave(previous);
}

static zc_status device_slot_alloc(zc_device *device, size_t bytes, device_slot *out)
{
    cuda_device *cuda = of(device);
    CUcontext previous;
    memset(out, 0, sizeof *out);
    ZC_TRY(cuda_enter(cuda->ordinal, &previous));
    pthread_mutex_lock(&cuda->lock);
    zc_status status = cuda_slots_alloc(&cuda->slots, bytes, out);
    if (status == ZC_OK)
        status = cuda_memory_zero(&cuda->memory, out->base, bytes);
    if (status != ZC_OK)
        cuda_slots_free(&cuda->slots, out);
    pthread_mutex_unlock(&cuda->lock);
    cuda_leave(previous);
    return status;
}

static zc_status device_slot_map(zc_device *device, const device_slot *slot, size_t bytes, void **out)
{
    CUcontext previous;
    *out = NULL;
    ZC_TRY(cuda_enter(of(device)->ordinal, &previous));
    zc_status status = cuda_slots_map(&of(device)->slots, slot, bytes, out);
    cuda_leave(previous);
    return status;
}

static void device_slot_unmap(zc_device *device, void *memory, size_t bytes)
{
    cuda_slots_unmap(&of(device)->slots, memory, bytes);
}

static void device_slot_free(zc_device *device, device_slot *slot)
{
    cuda_slots_free(&of(device)->slots, slot);
}

/*
 * Slots of a GPU without virtual memory management (or under a virtualisation
 * without it): ordinary memory, which has one address.
 */
#define PLAIN_SLOT_STEP_BYTES 512u

static zc_status device_plain_slot_alloc(zc_device *device, size_t bytes, device_slot *out)
{
    memset(out, 0, sizeof *out);
    ZC_TRY(alloc(of(device), bytes, "it was to hold a unit of stage 3: each has memory of its own here, because this GPU, "
                 "or its virtualisation, has no virtual memory management; use one that has, or look for other programs "
                 "on this GPU", &out->base));
    out->bytes = bytes;
    return ZC_OK;
}

static void device_plain_slot_free(zc_device *device, device_slot *slot)
{
    device_free(device, slot->base, slot->bytes);
    memset(slot, 0, sizeof *slot);
}

static void choose_slots(cuda_device *cuda)
{
    device_ops *ops = &cuda->ops;
    if (cuda->slots.supported) {
        ops->slot_step_bytes = cuda->slots.step_bytes;
        return;
    }
    ops->slot_step_bytes = PLAIN_SLOT_STEP_BYTES;
    ops->slot_alloc = device_plain_slot_alloc;
    ops->slot_free = device_plain_slot_free;
    ops->slot_map = NULL;
    ops->slot_unmap = NULL;
}

/* ---- moving bytes --------------------------------------------------------------- */

static zc_status device_copy(zc_device *device, zc_stream *stream, void *to, const void *from, size_t bytes)
{
    if (bytes == 0 || to == from)
        return ZC_OK;
    ENQUEUE(device, stream, cudaMemcpyAsync, to, from, bytes, cudaMemcpyDeviceToDevice, cuda_stream(stream));
}

static zc_status device_fill(zc_device *device, zc_stream *stream, void *to, int byte, size_t bytes)
{
    if (bytes == 0)
        return ZC_OK;
    ENQUEUE(device, stream, cudaMemsetAsync, to, byte, bytes, cuda_stream(stream));
}

static zc_status device_pack(zc_device *device, zc_stream *stream, void *to, const void *from, size_t elem_bytes,
                             int dims, const int64_t *shape, const int64_t *strides)
{
    strides_joined joined;
    ZC_TRY(strides_join(dims, shape, strides, &joined));
    if (joined.elems == 0)
        return ZC_OK;
    if (joined.contiguous)
        return device_copy(device, stream, to, from, joined.elems * elem_bytes);
    if (joined.dims > CUDA_MAX_DIMS)
        return zc_fail(ZC_EINVAL, "a tensor of %d dimensions that cannot be joined cannot be packed on a GPU; at most "
                       "%d are possible", joined.dims, CUDA_MAX_DIMS);
    ENQUEUE(device, stream, cuda_pack, cuda_stream(stream), to, from, elem_bytes, joined.dims, joined.extent,
            joined.step);
}

/* In a capture the values become a part of the graph: what is pinned would be read at each launch, and hold others by then. */
static zc_status upload_locked(cuda_device *cuda, cudaStream_t stream, void *to, const void *from, size_t bytes)
{
    uint64_t graph;
    ZC_TRY(cuda_capture_of(cuda->ordinal, stream, &graph));
    if (!graph)
        return cuda_staging_upload(&cuda->upload, stream, to, from, bytes);
    CUDA_TRY(cuda->ordinal, cuda_store, stream, to, from, bytes);
    return ZC_OK;
}

static zc_status device_upload(zc_device *device, zc_stream *stream, void *to, const void *from, size_t bytes)
{
    cuda_device *cuda = of(device);
    CUcontext previous;
    ZC_TRY(begin(device, stream, &previous));
    pthread_mutex_lock(&cuda->lock);
    zc_status status = upload_locked(cuda, cuda_stream(stream), to, from, bytes);
    pthread_mutex_unlock(&cuda->lock);
    cuda_leave(previous);
    return status;
}

static zc_status device_download(zc_device *device, zc_stream *stream, void *to, const void *from, size_t bytes)
{
    cuda_device *cuda = of(device);
    CUcontext previous;
    ZC_TRY(begin(device, stream, &previous));
    pthread_mutex_lock(&cuda->download_lock);
    zc_status status = cuda_capture_refuse(cuda->ordinal, cuda_stream(stream), "memory cannot be read");
    if (status == ZC_OK)
        status = cuda_staging_download(&cuda->download, cuda_stream(stream), to, from, bytes);
    pthread_mutex_unlock(&cuda->download_lock);
    cuda_leave(previous);
    return status;
}

/* ---- arithmetic ------------------------------------------------------------------ */

static zc_status device_accumulate(zc_device *device, zc_stream *stream, void *to, const void *from, size_t count,
                                   zc_dtype dtype, int add)
{
    cuda_operands one = {.base = from, .ranks = 1, .own = 1};
    if (count == 0)
        return ZC_OK;
    ENQUEUE(device, stream, cuda_reduce, cuda_stream(stream), to, &one, count, dtype, add, NULL);
}

static zc_status device_sum_squares(zc_device *device, zc_stream *stream, device_stats *stats, uint32_t *flags,
                                    const void *grad, size_t count, zc_dtype dtype)
{
    if (count == 0)
        return ZC_OK;
    ENQUEUE(device, stream, cuda_sum_squares, cuda_stream(stream), stats, flags, grad, count, dtype);
}

static zc_status device_fold_flags(zc_device *device, zc_stream *stream, device_stats *stats, const uint32_t *flags)
{
    ENQUEUE(device, stream, cuda_fold_flags, cuda_stream(stream), stats, flags);
}

static zc_status device_scale(zc_device *device, zc_stream *stream, void *to, const void *from, size_t count,
                              zc_dtype dtype, double factor)
{
    if (count == 0)
        return ZC_OK;
    ENQUEUE(device, stream, cuda_scale, cuda_stream(stream), to, from, count, dtype, factor);
}

static zc_status device_update(zc_device *device, zc_stream *stream, const device_update_args *args)
{
    if (args->shard_count == 0)
        return ZC_OK;
    ENQUEUE(device, stream, cuda_update, cuda_stream(stream), args);
}

/* ---- the step --------------------------------------------------------------------- */

static zc_status device_step_scalars(zc_device *device, zc_stream *stream, const device_step_args *args)
{
    cuda_device *cuda = of(device);
    CUcontext previous;
    ZC_TRY(begin(device, stream, &previous));
    pthread_mutex_lock(&cuda->lock);
    zc_status status = cuda_options_step(&cuda->options, cuda_stream(stream), args);
    pthread_mutex_unlock(&cuda->lock);
    cuda_leave(previous);
    return status;
}

/* ---- graphs ------------------------------------------------------------------------ */

static zc_status device_capturing(zc_device *device, zc_stream *stream, uint64_t *graph)
{
    CUcontext previous;
    *graph = 0;
    ZC_TRY(begin(device, stream, &previous));
    zc_status status = cuda_capture_of(of(device)->ordinal, cuda_stream(stream), graph);
    cuda_leave(previous);
    return status;
}

static zc_status device_replay_options(zc_device *device, zc_stream *stream, const optim_options *options, size_t groups)
{
    cuda_device *cuda = of(device);
    CUcontext previous;
    ZC_TRY(begin(device, stream, &previous));
    pthread_mutex_lock(&cuda->lock);
    zc_status status = cuda_options_set(&cuda->options, cuda_stream(stream), options, groups);
    pthread_mutex_unlock(&cuda->lock);
    cuda_leave(previous);
    return status;
}

static zc_status device_add_tally(zc_device *device, zc_stream *stream, device_tally *tally, const device_step *result,
                                  const uint64_t counts[DEVICE_COUNTS])
{
    ENQUEUE(device, stream, cuda_tally, cuda_stream(stream), tally, result, counts);
}

/* ---- life ---------------------------------------------------------------------------- */

static zc_status synchronize(cuda_device *cuda, cudaStream_t stream)
{
    ZC_TRY(cuda_capture_refuse(cuda->ordinal, stream, "nothing can be waited for"));
    CUDA_TRY(cuda->ordinal, cudaStreamSynchronize, stream);
    pthread_mutex_lock(&cuda->lock);
    cuda_memory_tidy(&cuda->memory);
    pthread_mutex_unlock(&cuda->lock);
    return ZC_OK;
}

static zc_status device_synchronize(zc_device *device, zc_stream *stream)
{
    CUcontext previous;
    ZC_TRY(begin(device, stream, &previous));
    zc_status status = synchronize(of(device), cuda_stream(stream));
    cuda_leave(previous);
    return status;
}

static zc_status order_streams(cuda_device *cuda, cudaStream_t before, cudaStream_t after)
{
    uint64_t graph_before, graph_after;
    ZC_TRY(cuda_capture_of(cuda->ordinal, before, &graph_before));
    ZC_TRY(cuda_capture_of(cuda->ordinal, after, &graph_after));
    if (graph_after && !graph_before)
        return ZC_OK;
    if (graph_after != graph_before)
        return zc_fail(ZC_ESTATE, "a stream of GPU %d cannot wait for one that is captured into a CUDA graph that it is no "
                       "part of; use what is captured on the capture's streams", cuda->ordinal);
    CUDA_TRY(cuda->ordinal, cudaEventRecord, cuda->ordered, before);
    CUDA_TRY(cuda->ordinal, cudaStreamWaitEvent, after, cuda->ordered, 0);
    return ZC_OK;
}

static zc_status device_order(zc_device *device, zc_stream *before, zc_stream *after)
{
    cuda_device *cuda = of(device);
    CUcontext previous;
    ZC_TRY(begin(device, before, &previous));
    use_stream(cuda, cuda_stream(after));
    pthread_mutex_lock(&cuda->lock);
    zc_status status = order_streams(cuda, cuda_stream(before), cuda_stream(after));
    pthread_mutex_unlock(&cuda->lock);
    cuda_leave(previous);
    return status;
}

/* Also of a device that could not be completed. */
static void close_device(cuda_device *cuda)
{
    cuda_options_close(&cuda->options);
    cuda_memory_close(&cuda->memory); /* nothing runs after this */
    cuda_staging_close(&cuda->upload);
    cuda_staging_close(&cuda->download);
    if (cuda->ordered)
        cudaEventDestroy(cuda->ordered);
    pthread_mutex_destroy(&cuda->lock);
    pthread_mutex_destroy(&cuda->download_lock);
    zc_free(cuda);
}

static void device_destroy(zc_device *device)
{
    CUcontext previous;
    zc_status status = cuda_enter(of(device)->ordinal, &previous);
    close_device(of(device));
    if (status == ZC_OK)
        cuda_leave(previous);
}

static const device_ops cuda_ops = {
    .name = "cuda",
    .update_bytes = UPDATE_BYTES,
    .alloc = device_alloc,
    .free = device_free,
    .slot_alloc = device_slot_alloc,
    .slot_map = device_slot_map,
    .slot_unmap = device_slot_unmap,
    .slot_free = device_slot_free,
    .copy = device_copy,
    .copy_far = device_copy,
    .pack = device_pack,
    .fill = device_fill,
    .accumulate = device_accumulate,
    .sum_squares = device_sum_squares,
    .fold_flags = device_fold_flags,
    .scale = device_scale,
    .step_scalars = device_step_scalars,
    .update = device_update,
    .upload = device_upload,
    .download = device_download,
    .synchronize = device_synchronize,
    .order = device_order,
    .capturing = device_capturing,
    .replay_options = device_replay_options,
    .tally = device_add_tally,
    .destroy = device_destroy,
};

static zc_status open_device(cuda_device *cuda)
{
    ZC_TRY(cuda_memory_open(&cuda->memory, cuda->ordinal));
    ZC_TRY(cuda_slots_open(&cuda->slots, cuda->ordinal));
    ZC_TRY(cuda_staging_open(&cuda->upload, cuda->ordinal, CUDA_STAGING_BLOCKS));
    ZC_TRY(cuda_staging_open(&cuda->download, cuda->ordinal, DOWNLOAD_BLOCKS));
    ZC_TRY(cuda_options_open(&cuda->options));
    CUDA_TRY(cuda->ordinal, cudaEventCreateWithFlags, &cuda->ordered, cudaEventDisableTiming);
    cuda->ops = cuda_ops;
    choose_slots(cuda);
    cuda->device.ops = &cuda->ops;
    return ZC_OK;
}

zc_status cuda_device_create(int ordinal, zc_device **out)
{
    CUcontext previous;
    *out = NULL;
    ZC_TRY(cuda_probe_gpu(ordinal));
    ZC_TRY(cuda_enter(ordinal, &previous));
    cuda_device *cuda = zc_calloc(1, sizeof *cuda);
    zc_status status = cuda ? ZC_OK : zc_fail(ZC_ENOMEM, "no memory for the device of GPU %d", ordinal);
    if (cuda) {
        cuda->ordinal = ordinal;
        cuda->options = (cuda_options){.ordinal = ordinal, .from = &cuda->memory, .upload = &cuda->upload, .advice = ADVICE};
        pthread_mutex_init(&cuda->lock, NULL);
        pthread_mutex_init(&cuda->download_lock, NULL);
        status = open_device(cuda);
    }
    if (cuda && status != ZC_OK)
        close_device(cuda);
    cuda_leave(previous);
    if (status == ZC_OK)
        *out = &cuda->device;
    return status;
}

void cuda_device_use_stream(zc_device *device, cudaStream_t stream)
{
    use_stream(of(device), stream);
}

void cuda_device_forget_stream(zc_device *device, cudaStream_t stream)
{
    pthread_mutex_lock(&of(device)->lock);
    cuda_memory_forget_stream(&of(device)->memory, stream);
    pthread_mutex_unlock(&of(device)->lock);
}
