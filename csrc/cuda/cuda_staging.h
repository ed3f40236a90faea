/*
 * Moves bytes between any host memory and the device by way of pinned memory,
 * because only from there a copy really runs beside the host.
 *
 * Upload: the source is copied into blocks of a ring, a copy to the device is
 * enqueued for each, and the call returns; it waits only when all blocks are on
 * their way.  Download: two blocks take turns, the host empties one while the
 * device fills the other.
 *
 * Calls of one ring must not overlap.  The GPU must be current in all of these.
 */
#ifndef CUDA_STAGING_H
#define CUDA_STAGING_H

#include "cuda_error.h"

#include <stddef.h>

#define CUDA_STAGING_BLOCKS 8u
#define CUDA_STAGING_BLOCK_BYTES ((size_t)128 << 10)

typedef struct cuda_staging {
    int ordinal;
    unsigned blocks;   /* at most CUDA_STAGING_BLOCKS */
    unsigned next;     /* the block to be used next, which is the one used longest ago */
    char *memory;
    cudaEvent_t copied[CUDA_STAGING_BLOCKS];
    int busy[CUDA_STAGING_BLOCKS]; /* its event has been recorded and not been waited for */
} cuda_staging;

/* `staging` must be zero; it may be closed after a failure too. */
zc_status cuda_staging_open(cuda_staging *staging, int ordinal, unsigned blocks);
/* No copy may be on its way. */
void cuda_staging_close(cuda_staging *staging);

zc_status cuda_staging_upload(cuda_staging *staging, cudaStream_t stream, void *to, const void *from, size_t bytes);
zc_status cuda_staging_download(cuda_staging *staging, cudaStream_t stream, void *to, const void *from, size_t bytes);

#endif
