/*
 * The ring of pinned blocks; see cuda_staging.h.
 */
#include "cuda_staging.h"

#include <string.h>

zc_status cuda_staging_open(cuda_staging *staging, int ordinal, unsigned blocks)
{
    staging->ordinal = ordinal;
    CUDA_TRY(ordinal, cudaMallocHost, (void **)&staging->memory, blocks * CUDA_STAGING_BLOCK_BYTES);
    for (; staging->blocks < blocks; staging->blocks++)
        CUDA_TRY(ordinal, cudaEventCreateWithFlags, &staging->copied[staging->blocks], cudaEventDisableTiming);
    return ZC_OK;
}

void cuda_staging_close(cuda_staging *staging)
{
    for (unsigned i = 0; i < staging->blocks; i++)
        cudaEventDestroy(staging->copied[i]);
    if (staging->memory)
        cudaFreeHost(staging->memory);
    memset(staging, 0, sizeof *staging);
}

/* Nothing is on its way to or from the block after this. */
static zc_status settle(cuda_staging *staging, unsigned block)
{
    if (staging->busy[block])
        CUDA_TRY(staging->ordinal, cudaEventSynchronize, staging->copied[block]);
    staging->busy[block] = 0;
    return ZC_OK;
}

/* The copy that `block` is part of has been enqueued on the stream. */
static zc_status mark_busy(cuda_staging *staging, unsigned block, cudaStream_t stream)
{
    cudaError_t error = cudaEventRecord(staging->copied[block], stream);
    if (error == cudaSuccess) {
        staging->busy[block] = 1;
        return ZC_OK;
    }
    cudaStreamSynchronize(stream); /* no event tells when the block is free: it has to be free now */
    return cuda_fail(error, staging->ordinal, "cudaEventRecord");
}

static char *memory_of(const cuda_staging *staging, unsigned block)
{
    return staging->memory + block * CUDA_STAGING_BLOCK_BYTES;
}

static size_t piece_bytes(size_t left_bytes)
{
    return left_bytes < CUDA_STAGING_BLOCK_BYTES ? left_bytes : CUDA_STAGING_BLOCK_BYTES;
}

zc_status cuda_staging_upload(cuda_staging *staging, cudaStream_t stream, void *to, const void *from, size_t bytes)
{
    for (size_t at = 0, piece; at < bytes; at += piece) {
        unsigned block = staging->next;
        char *memory = memory_of(staging, block);
        piece = piece_bytes(bytes - at);
        ZC_TRY(settle(staging, block));
        staging->next = (block + 1) % staging->blocks;
        CU_HOST_WRITE(memory, piece);
        memcpy(memory, (const char *)from + at, piece);
        CUDA_TRY(staging->ordinal, cudaMemcpyAsync, (char *)to + at, memory, piece, cudaMemcpyHostToDevice, stream);
        ZC_TRY(mark_busy(staging, block, stream));
    }
    return ZC_OK;
}

/* Enqueues the copy of one piece into the block. */
static zc_status fetch(cuda_staging *staging, unsigned block, cudaStream_t stream, const void *from, size_t bytes)
{
    CUDA_TRY(staging->ordinal, cudaMemcpyAsync, memory_of(staging, block), from, bytes, cudaMemcpyDeviceToHost, stream);
    return mark_busy(staging, block, stream);
}

static zc_status download(cuda_staging *staging, cudaStream_t stream, char *to, const char *from, size_t bytes)
{
    size_t asked = 0;
    for (size_t at = 0, piece; at < bytes; at += piece) {
        for (; asked < bytes && asked < at + staging->blocks * CUDA_STAGING_BLOCK_BYTES;
             asked += piece_bytes(bytes - asked)) {
            ZC_TRY(fetch(staging, staging->next, stream, from + asked, piece_bytes(bytes - asked)));
            staging->next = (staging->next + 1) % staging->blocks;
        }
        unsigned block = (unsigned)(at / CUDA_STAGING_BLOCK_BYTES % staging->blocks);
        piece = piece_bytes(bytes - at);
        ZC_TRY(settle(staging, block));
        CU_HOST_READ(memory_of(staging, block), piece);
        memcpy(to + at, memory_of(staging, block), piece);
    }
    return ZC_OK;
}

zc_status cuda_staging_download(cuda_staging *staging, cudaStream_t stream, void *to, const void *from, size_t bytes)
{
    for (unsigned i = 0; i < staging->blocks; i++)
        ZC_TRY(settle(staging, i)); /* left behind by a download that failed */
    staging->next = 0;
    return download(staging, stream, to, from, bytes);
}
