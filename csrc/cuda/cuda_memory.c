/*
 * Allocation, and burial of what is freed; see cuda_memory.h.
 */
#include "cuda_memory.h"

#include "cuda_capture.h"

#include <pthread.h>
#include <string.h>

static pthread_mutex_t all_lock = PTHREAD_MUTEX_INITIALIZER; /* of the list, and of everybody's streams while they change */
static cuda_memory *all;

zc_status cuda_memory_open(cuda_memory *memory, int ordinal)
{
    memory->ordinal = ordinal;
    pthread_mutex_lock(&all_lock);
    memory->next = all;
    all = memory;
    pthread_mutex_unlock(&all_lock);
    CUDA_TRY(ordinal, cudaStreamCreateWithFlags, &memory->fill, cudaStreamNonBlocking);
    CUDA_TRY(ordinal, cudaStreamCreateWithFlags, &memory->join, cudaStreamNonBlocking);
    CUDA_TRY(ordinal, cudaEventCreateWithFlags, &memory->reached, cudaEventDisableTiming);
    return ZC_OK;
}

/* ---- streams --------------------------------------------------------------------- */

void cuda_memory_use_stream(cuda_memory *memory, cudaStream_t stream)
{
    for (unsigned i = 0; i < memory->stream_count; i++)
        if (memory->streams[i] == stream)
            return;
    pthread_mutex_lock(&all_lock);
    if (memory->stream_count < CUDA_MEMORY_STREAMS)
        memory->streams[memory->stream_count++] = stream;
    else
        memory->too_many_streams = 1;
    pthread_mutex_unlock(&all_lock);
}

void cuda_memory_forget_stream(cuda_memory *memory, cudaStream_t stream)
{
    pthread_mutex_lock(&all_lock);
    for (unsigned i = 0; i < memory->stream_count; i++)
        if (memory->streams[i] == stream)
            memory->streams[i] = memory->streams[--memory->stream_count];
    pthread_mutex_unlock(&all_lock);
}

/* Whether any of them is captured into a graph, so that nothing can be asked or given back. */
static int is_captured(const cuda_memory *memory)
{
    int captured = 0;
    for (unsigned i = 0; i < memory->stream_count && !captured; i++)
        captured = cuda_capture_seen(memory->streams[i]);
    return captured;
}

/* ---- burial ---------------------------------------------------------------------- */

static void discard(cuda_block *block)
{
    if (block->memory)
        cudaFree(block->memory);
    if (block->passed)
        cudaEventDestroy(block->passed);
    zc_free(block);
}

static int has_passed(const cuda_block *block)
{
    if (block->unmarked)
        return 0;
    cudaError_t error = cudaEventQuery(block->passed);
    if (error != cudaSuccess)
        cudaGetLastError(); /* "not ready" counts as an error, which the next launch would be blamed for */
    return error == cudaSuccess;
}

/* Whether freeing would find something to wait for. */
static int is_idle(const cuda_memory *memory)
{
    int idle = 1;
    pthread_mutex_lock(&all_lock);
    for (const cuda_memory *each = all; each && idle; each = each->next) {
        if (each->ordinal != memory->ordinal)
            continue;
        idle = !each->too_many_streams;
        for (unsigned i = 0; i < each->stream_count && idle; i++)
            idle = !cuda_capture_seen(each->streams[i]) && cudaStreamQuery(each->streams[i]) == cudaSuccess;
    }
    pthread_mutex_unlock(&all_lock);
    if (!idle)
        cudaGetLastError(); /* "not ready" counts as an error, which the next launch would be blamed for */
    return idle;
}

static void discard_first(cuda_memory *memory)
{
    cuda_block *block = memory->buried;
    memory->buried = block->next;
    if (!memory->buried)
        memory->last = NULL;
    discard(block);
}

/* Gives back all that is buried; waits for the GPU. */
static void discard_all(cuda_memory *memory)
{
    if (cudaDeviceSynchronize() != cudaSuccess)
        cudaGetLastError(); /* what it has to say is said by the call that needs the GPU next */
    while (memory->buried)
        discard_first(memory);
}

/* Records an event that comes after all work enqueued so far. */
static cudaError_t mark(cuda_memory *memory, cudaEvent_t passed)
{
    for (unsigned i = 0; i < memory->stream_count; i++) {
        cudaError_t error = cudaEventRecord(memory->reached, memory->streams[i]);
        if (error == cudaSuccess)
            error = cudaStreamWaitEvent(memory->join, memory->reached, 0);
        if (error != cudaSuccess)
            return error;
    }
    return cudaEventRecord(passed, memory->join);
}

static cuda_block *take_live(cuda_memory *memory, const void *address)
{
    for (cuda_block **at = &memory->live; *at; at = &(*at)->next) {
        if ((*at)->memory == address) {
            cuda_block *block = *at;
            *at = block->next;
            block->next = NULL;
            return block;
        }
    }
    return NULL;
}

void cuda_memory_free(cuda_memory *memory, void *address)
{
    cuda_block *block = address ? take_live(memory, address) : NULL;
    if (!block)
        return;
    if (memory->too_many_streams || is_captured(memory) || mark(memory, block->passed) != cudaSuccess) {
        cudaGetLastError();
        block->unmarked = 1;
    }
    if (memory->last)
        memory->last->next = block;
    else
        memory->buried = block;
    memory->last = block;
    cuda_memory_tidy(memory);
}

void cuda_memory_tidy(cuda_memory *memory)
{
    /* The last event comes after all others. */
    if (!memory->last || !has_passed(memory->last) || !is_idle(memory))
        return;
    while (memory->buried)
        discard_first(memory);
}

/* ---- allocation -------------------------------------------------------------------- */

zc_status cuda_memory_zero(cuda_memory *memory, void *to, size_t bytes)
{
    CUDA_TRY(memory->ordinal, cudaMemsetAsync, to, 0, bytes, memory->fill);
    cudaError_t error = cudaStreamSynchronize(memory->fill);
    if (error == cudaSuccess)
        return ZC_OK;
    cudaDeviceSynchronize(); /* the caller is going to give the memory back */
    return cuda_fail(error, memory->ordinal, "cudaStreamSynchronize");
}

static zc_status fill_block(cuda_memory *memory, cuda_block *block, size_t bytes, const char *advice)
{
    CUDA_TRY(memory->ordinal, cudaEventCreateWithFlags, &block->passed, cudaEventDisableTiming);
    cudaError_t error = cudaMalloc(&block->memory, bytes);
    if (error == cudaErrorMemoryAllocation && memory->buried) {
        cudaGetLastError();
        discard_all(memory);
        error = cudaMalloc(&block->memory, bytes);
    }
    if (error != cudaSuccess)
        block->memory = NULL;
    if (error == cudaErrorMemoryAllocation)
        return cuda_no_room(memory->ordinal, bytes, advice);
    if (error != cudaSuccess)
        return cuda_fail(error, memory->ordinal, "cudaMalloc");
    return cuda_memory_zero(memory, block->memory, bytes);
}

zc_status cuda_memory_alloc(cuda_memory *memory, size_t bytes, const char *advice, void **out)
{
    *out = NULL;
    if (is_captured(memory))
        return zc_fail(ZC_ESTATE, "%zu bytes of memory of GPU %d cannot be made while a stream is captured into a CUDA graph; "
                       "do the same, uncaptured, once before", bytes, memory->ordinal);
    cuda_memory_tidy(memory);
    cuda_block *block = zc_calloc(1, sizeof *block);
    if (!block)
        return zc_fail(ZC_ENOMEM, "no memory to note an allocation of %zu bytes on GPU %d", bytes, memory->ordinal);
    zc_status status = fill_block(memory, block, bytes, advice);
    if (status != ZC_OK) {
        discard(block);
        return status;
    }
    block->next = memory->live;
    memory->live = block;
    *out = block->memory;
    return ZC_OK;
}

void cuda_memory_close(cuda_memory *memory)
{
    pthread_mutex_lock(&all_lock);
    for (cuda_memory **at = &all; *at; at = &(*at)->next)
        if (*at == memory) {
            *at = memory->next;
            break;
        }
    pthread_mutex_unlock(&all_lock);
    discard_all(memory);
    if (memory->reached)
        cudaEventDestroy(memory->reached);
    if (memory->join)
        cudaStreamDestroy(memory->join);
    if (memory->fill)
        cudaStreamDestroy(memory->fill);
    memset(memory, 0, sizeof *memory);
}
