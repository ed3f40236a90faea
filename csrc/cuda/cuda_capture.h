/*
 * Whether a stream is captured into a CUDA graph.  What is enqueued on it is
 * recorded then, and runs whenever the graph is launched.
 *
 * Most of what a host does beside enqueuing makes a capture void: memory that
 * is allocated or freed, waiting for streams and events and asking them, waits
 * of its streams for what lies outside.  So everything here that does such a
 * thing asks first; asking is always allowed.
 *
 * The GPU must be current.
 */
#ifndef CUDA_CAPTURE_H
#define CUDA_CAPTURE_H

#include "cuda_error.h"

#include <stdint.h>

/* *graph: 0, or the number of the capture.  ZC_ESTATE if that is void by now. */
zc_status cuda_capture_of(int ordinal, cudaStream_t stream, uint64_t *graph);

/* ZC_ESTATE if the stream is captured; `what` cannot be done then. */
zc_status cuda_capture_refuse(int ordinal, cudaStream_t stream, const char *what);

/* Whether the stream is captured, or this cannot be told. */
int cuda_capture_seen(cudaStream_t stream);

#endif
