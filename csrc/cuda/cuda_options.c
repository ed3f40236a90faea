/*
 * Uploads of options, and the kernel that reads them; see cuda_options.h.
 *
 * Streams that use the options one after the other are ordered by the event
 * `used`.  A captured kernel takes no part in that: it is ordered by where its
 * graph is launched, which is the caller's.
 */
#include "cuda_options.h"

#include "cuda_capture.h"
#include "cuda_kernels.h"

#include <string.h>

zc_status cuda_options_open(cuda_options *options)
{
    CUDA_TRY(options->ordinal, cudaEventCreateWithFlags, &options->used, cudaEventDisableTiming);
    return ZC_OK;
}

void cuda_options_close(cuda_options *options)
{
    cuda_memory_free(options->from, options->memory);
    if (options->used)
        cudaEventDestroy(options->used);
    zc_free(options->last);
}

/* Makes room for the options of `groups` groups; what was there is not kept. */
static zc_status reserve(cuda_options *options, size_t groups)
{
    void *memory;
    if (groups <= options->room)
        return ZC_OK;
    optim_options *last = zc_realloc(options->last, groups * sizeof *last);
    if (!last)
        return zc_fail(ZC_ENOMEM, "no memory for the options of %zu groups", groups);
    options->last = last;
    ZC_TRY(cuda_memory_alloc(options->from, groups * sizeof *options->memory, options->advice, &memory));
    cuda_memory_free(options->from, options->memory);
    options->memory = memory;
    options->room = groups;
    options->groups = 0;
    return ZC_OK;
}

static int are_there(const cuda_options *options, const optim_options *groups, size_t count)
{
    return options->groups == count && memcmp(options->last, groups, count * sizeof *groups) == 0;
}

/* The stream goes on when they are these. */
static zc_status bring(cuda_options *options, cudaStream_t stream, const optim_options *groups, size_t count)
{
    ZC_TRY(reserve(options, count));
    if (options->in_use)
        CUDA_TRY(options->ordinal, cudaStreamWaitEvent, stream, options->used, 0);
    if (are_there(options, groups, count))
        return ZC_OK;
    options->groups = 0;
    ZC_TRY(cuda_staging_upload(options->upload, stream, options->memory, groups, count * sizeof *groups));
    memcpy(options->last, groups, count * sizeof *groups);
    options->groups = count;
    return ZC_OK;
}

/* After every use, whatever came of it. */
static zc_status mark_used(cuda_options *options, cudaStream_t stream, zc_status status)
{
    cudaError_t error = cudaEventRecord(options->used, stream);
    if (error == cudaSuccess)
        options->in_use = 1;
    else
        cudaStreamSynchronize(stream); /* the next stream cannot be told to wait: there must be nothing to wait for */
    if (status == ZC_OK && error != cudaSuccess)
        return cuda_fail(error, options->ordinal, "cudaEventRecord");
    return status;
}

static zc_status decide(cuda_options *options, cudaStream_t stream, const device_step_args *args)
{
    CUDA_TRY(options->ordinal, cuda_step_scalars, stream, args, options->memory);
    return ZC_OK;
}

zc_status cuda_options_step(cuda_options *options, cudaStream_t stream, const device_step_args *args)
{
    uint64_t graph;
    ZC_TRY(cuda_capture_of(options->ordinal, stream, &graph));
    if (graph && !are_there(options, args->options, args->groups))
        return zc_fail(ZC_ESTATE, "options of the groups that GPU %d does not have yet cannot be captured", options->ordinal);
    if (graph)
        return decide(options, stream, args);
    zc_status status = bring(options, stream, args->options, args->groups);
    if (status == ZC_OK)
        status = decide(options, stream, args);
    return mark_used(options, stream, status);
}

zc_status cuda_options_set(cuda_options *options, cudaStream_t stream, const optim_options *groups, size_t count)
{
    ZC_TRY(cuda_capture_refuse(options->ordinal, stream, "options of the groups cannot be set"));
    return mark_used(options, stream, bring(options, stream, groups, count));
}
