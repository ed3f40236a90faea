/*
 * The options of all groups, in device memory: what every step's scalars are made
 * from.  They are uploaded when they have changed.  A captured step reads them
 * there whenever it is replayed, so replays follow them too.
 *
 * Calls must not overlap.  The GPU must be current in all of these.
 */
#ifndef CUDA_OPTIONS_H
#define CUDA_OPTIONS_H

#include "cuda_memory.h"
#include "cuda_staging.h"
#include "device.h"

typedef struct cuda_options {
    int ordinal;
    cuda_memory *from;     /* where the memory is from */
    cuda_staging *upload;  /* how it is filled */
    const char *advice;    /* for cuda_memory_alloc */
    optim_options *memory; /* device */
    optim_options *last;   /* host: what was uploaded */
    size_t groups;         /* of `last`; 0: not known */
    size_t room;           /* groups that fit */
    cudaEvent_t used;      /* after the last upload or kernel on them */
    int in_use;            /* `used` was recorded */
} cuda_options;

/* `options` must be zero but for its first four; it may be closed after a failure too. */
zc_status cuda_options_open(cuda_options *options);
/* Before the memory is closed. */
void cuda_options_close(cuda_options *options);

/* device.h's step_scalars and replay_options. */
zc_status cuda_options_step(cuda_options *options, cudaStream_t stream, const device_step_args *args);
zc_status cuda_options_set(cuda_options *options, cudaStream_t stream, const optim_options *groups, size_t count);

#endif
