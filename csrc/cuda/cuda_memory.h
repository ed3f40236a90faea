/*
 * Memory of a CUDA device that can be given back without waiting.
 *
 * cudaFree waits for everything that runs on the GPU, so memory that is freed is
 * only buried at first: behind an event that comes after all work enqueued so
 * far on every stream that has been used with the device.  Buried memory goes
 * back to CUDA where that waits for nothing: when every stream of this GPU that
 * any device of the process knows is idle (a lane of NCCL may be waiting for a
 * peer that waits for us), when memory has run out, when the device is closed.
 *
 * Calls must not overlap.  The GPU must be current in all of these.
 */
#ifndef CUDA_MEMORY_H
#define CUDA_MEMORY_H

#include "cuda_error.h"

#include <stddef.h>

#define CUDA_MEMORY_STREAMS 64u

typedef struct cuda_block {
    struct cuda_block *next;
    void *memory;
    cudaEvent_t passed; /* buried: after this event nothing uses the memory */
    int unmarked;       /* buried, but no event was recorded (in a capture it cannot be): kept until all is given back */
} cuda_block;

typedef struct cuda_memory {
    struct cuda_memory *next;   /* of the process's */
    int ordinal;
    cudaStream_t fill;          /* zero-fills new memory, beside everything else */
    cudaStream_t join;          /* waits for all streams in turn; runs nothing */
    cudaEvent_t reached;        /* on its way from a stream to `join` */
    cudaStream_t streams[CUDA_MEMORY_STREAMS];
    unsigned stream_count;
    int too_many_streams;       /* some are not known: buried memory is unmarked */
    cuda_block *live;
    cuda_block *buried, *last;  /* in the order of their events */
} cuda_memory;

/* `memory` must be zero; it may be closed after a failure too. */
zc_status cuda_memory_open(cuda_memory *memory, int ordinal);
/* Waits for the GPU, and frees what is buried. */
void cuda_memory_close(cuda_memory *memory);

/* What is freed from now on is kept until this stream has passed, too. It must exist until it is forgotten. */
void cuda_memory_use_stream(cuda_memory *memory, cudaStream_t stream);
void cuda_memory_forget_stream(cuda_memory *memory, cudaStream_t stream);

/* Zero-filled; blocks. bytes > 0. `advice` says what to do if there is no room. */
zc_status cuda_memory_alloc(cuda_memory *memory, size_t bytes, const char *advice, void **out);
zc_status cuda_memory_zero(cuda_memory *memory, void *to, size_t bytes);
void cuda_memory_free(cuda_memory *memory, void *block);
/* Gives buried memory back if nothing runs that this would have to wait for. */
void cuda_memory_tidy(cuda_memory *memory);

#endif
