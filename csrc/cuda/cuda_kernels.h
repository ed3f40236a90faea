/*
 * The loops of the CUDA backend: kernel launches (the .cu files) behind C functions.
 *
 * Each enqueues its work on `stream` and returns; all pointers are device
 * memory and stay valid until the work has run, except structs passed by
 * address, which are read during the call.  Nothing here allocates, waits or
 * reads device memory, so every call may be captured into a graph.
 *
 * The numbers are those of cpu_kernels.h, bit for bit: the element arithmetic
 * is the same header (elem_update.h), nothing is contracted (-fmad=false),
 * sums of squares are exact integers, narrow types are rounded by zc_dtype.h.
 * Only which NaN an operation on NaN gives is left open.
 *
 * Pointers need the alignment of their element.  Where all arrays of a call are
 * aligned to 16 bytes accesses are 16 bytes wide; otherwise they are single
 * elements.
 */
#ifndef CUDA_KERNELS_H
#define CUDA_KERNELS_H

#include "cu.h"
#include "device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The operands of one reduction: rank q's `count` elements. */
typedef struct cuda_operands {
    const void *base;    /* rank q's slice is at base + q * stride_bytes ... */
    size_t stride_bytes;
    size_t ranks;        /* >= 1 */
    size_t own;          /* ... but this rank's is at `own_at`; ranks: none is apart */
    const void *own_at;  /* NULL: zeros */
} cuda_operands;

/*
 * to[i] = s, or to[i] + s with `accumulate`, where s is the sum over ranks in
 * rank order, in zc_dtype_sum(dtype), rounded once per addition; -0 and the
 * first operand as in cpu_kernels' reduce.  `to` may be one of the operands
 * (same index only) when dtype is the sum's.  CPU_NONFINITE_* of what was
 * written is or-ed into *flags unless that is NULL.
 */
cudaError_t cuda_reduce(cudaStream_t stream, void *to, const cuda_operands *in, size_t count, zc_dtype dtype,
                        int accumulate, uint32_t *flags);

/* device.h's pack. dims <= CUDA_MAX_DIMS after neighbours that are one run are joined, which the caller has done. */
#define CUDA_MAX_DIMS 25 /* what torch allows an operation on a GPU */
cudaError_t cuda_pack(cudaStream_t stream, void *to, const void *from, size_t elem_bytes, int dims,
                      const int64_t *shape, const int64_t *strides);

/* device.h's sum_squares, fold_flags and scale. */
cudaError_t cuda_sum_squares(cudaStream_t stream, device_stats *stats, uint32_t *flags, const void *grad,
                             size_t count, zc_dtype dtype);
cudaError_t cuda_fold_flags(cudaStream_t stream, device_stats *stats, const uint32_t *flags);
cudaError_t cuda_scale(cudaStream_t stream, void *to, const void *from, size_t count, zc_dtype dtype,
                       double factor);

/* device.h's step_scalars, with the options in device memory instead of args->options. */
cudaError_t cuda_step_scalars(cudaStream_t stream, const device_step_args *args, const optim_options *options);

/* device.h's upload in a capture, and its tally. */
cudaError_t cuda_store(cudaStream_t stream, void *to, const void *from, size_t bytes);
cudaError_t cuda_tally(cudaStream_t stream, device_tally *tally, const device_step *result,
                       const uint64_t counts[DEVICE_COUNTS]);

/* device.h's update: one launch for all shards. */
cudaError_t cuda_update(cudaStream_t stream, const device_update_args *args);

#ifdef __cplusplus
}
#endif

#endif
