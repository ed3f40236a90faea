/*
 * From gradients to the scalars of a step: sums of squares, non-finite flags,
 * and the decision.
 */
#include "cuda_vector.cuh"

#include "device_step.h"

#include <stddef.h>

typedef unsigned long long word;
static_assert(sizeof(word) == sizeof(uint64_t), "atomicAdd takes this type of 64 bits");

/* ---- sums of squares ------------------------------------------------------- */

/*
 * Blocks of 64 elements, each summed in eight lanes (cpu_kernels.h).  A thread
 * owns as many lanes as its type has elements in 16 bytes, so 2 (fp32) or 4
 * (fp64) threads have a block: eight accesses of 16 bytes each, which together
 * with the neighbour's fill whole sectors, and no exchange until the lanes are
 * added up.
 */
#define SQUARES_BLOCK 64u
#define SQUARES_LANES 8u
#define SQUARES_WORDS 66u /* what finite sums have digits for (optim_sum_split); at most OPTIM_SUM_WORDS */
static_assert(SQUARES_WORDS <= OPTIM_SUM_WORDS, "the words of a sum");

/*
 * A sum's digits wait in registers while blocks keep adding to the same words,
 * which neighbouring sums of gradients nearly always do.  32-bit digits in
 * 64-bit words: no carry, so it makes no difference when they are added up.
 */
struct digits {
    unsigned first; /* word of digit[0] */
    word digit[3];
};

static inline __device__ void flush(word *words, const digits &sum)
{
#pragma unroll
    for (unsigned k = 0; k < 3; k++)
        if (sum.digit[k])
            atomicAdd(&words[sum.first + k], sum.digit[k]);
}

static inline __device__ void add(digits &sum, word *words, double value)
{
    uint32_t digit[3];
    unsigned first = optim_sum_split(value, digit);
    if (first != sum.first) {
        flush(words, sum);
        sum = {first, {0, 0, 0}};
    }
#pragma unroll
    for (unsigned k = 0; k < 3; k++)
        sum.digit[k] += digit[k];
}

/* This thread's lanes, which begin at element `at` of the array; elements from `count` on are 0. */
template <typename T, unsigned N>
static inline __device__ void sum_lanes(double (&lanes)[N], const T *from, size_t at, size_t count, int aligned)
{
#pragma unroll
    for (unsigned i = 0; i < N; i++)
        lanes[i] = 0;
    if (aligned && at + SQUARES_BLOCK - SQUARES_LANES + N <= count) {
        T values[SQUARES_BLOCK / SQUARES_LANES][N];
#pragma unroll
        for (unsigned k = 0; k < SQUARES_BLOCK / SQUARES_LANES; k++)
            load<N>(values[k], from + at + k * SQUARES_LANES);
#pragma unroll
        for (unsigned k = 0; k < SQUARES_BLOCK / SQUARES_LANES; k++)
#pragma unroll
            for (unsigned i = 0; i < N; i++)
                lanes[i] = lanes[i] + static_cast<double>(values[k][i]) * static_cast<double>(values[k][i]);
        return;
    }
#pragma unroll 1
    for (unsigned k = 0; k < SQUARES_BLOCK; k += SQUARES_LANES)
#pragma unroll
        for (unsigned i = 0; i < N; i++) {
            double value = at + k + i < count ? static_cast<double>(from[at + k + i]) : 0;
            lanes[i] = lanes[i] + value * value;
        }
}

/* ((0+4)+(2+6))+((1+5)+(3+7)) of the lanes of a block's threads, in each of them; all threads of the warp call it. */
static inline __device__ double add_lanes(double (&lanes)[4])
{
#pragma unroll
    for (unsigned i = 0; i < 4; i++)
        lanes[i] = lanes[i] + __shfl_xor_sync(0xffffffffu, lanes[i], 1);
    return (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
}

static inline __device__ double add_lanes(double (&lanes)[2])
{
#pragma unroll
    for (unsigned step = 2; step > 0; step--)
#pragma unroll
        for (unsigned i = 0; i < 2; i++)
            lanes[i] = lanes[i] + __shfl_xor_sync(0xffffffffu, lanes[i], step);
    return lanes[0] + lanes[1];
}

/* Of a block whose sum is not finite; if its elements are, a square overflowed. */
template <typename T> static inline __device__ uint32_t block_flags(const T *from, size_t begin, size_t count)
{
    uint32_t found = 0;
#pragma unroll 1
    for (size_t i = begin; i < count && i < begin + SQUARES_BLOCK; i++)
        found |= nonfinite(from[i]);
    return found ? found : NONFINITE_INF;
}

template <typename T>
__global__ void __launch_bounds__(BLOCK_THREADS, 4)
squares_kernel(word *to, uint32_t *flags, const T *from, size_t count, int aligned)
{
    constexpr unsigned N = VECTOR_BYTES / sizeof(T), THREADS = SQUARES_LANES / N;
    __shared__ word words[SQUARES_WORDS];
    for (unsigned i = threadIdx.x; i < SQUARES_WORDS; i += BLOCK_THREADS)
        words[i] = 0;
    __syncthreads();

    uint32_t found = 0;
    digits sum = {0, {0, 0, 0}};
    size_t blocks = (count + SQUARES_BLOCK - 1) / SQUARES_BLOCK;
    size_t lead = first_index() - threadIdx.x % warpSize; /* of the warp, whose threads go round together */
#pragma unroll 1
    for (; lead / THREADS < blocks; lead += index_step()) {
        size_t begin = (lead + threadIdx.x % warpSize) / THREADS * SQUARES_BLOCK;
        double lanes[N];
        sum_lanes<T, N>(lanes, from, begin + threadIdx.x % THREADS * N, count, aligned);
        double total = add_lanes(lanes);
        if (threadIdx.x % THREADS != 0 || begin >= count)
            continue;
        if (total <= 0x1.fffffffffffffp+1023)
            add(sum, words, total);
        else
            found |= block_flags(from, begin, count);
    }
    flush(words, sum);
    if (found)
        atomicOr(flags, found);

    __syncthreads();
    for (unsigned i = threadIdx.x; i < SQUARES_WORDS; i += BLOCK_THREADS)
        if (words[i])
            atomicAdd(&to[i], words[i]);
}

template <typename T>
static cudaError_t sum_squares(cudaStream_t stream, device_stats *stats, uint32_t *flags, const void *grad,
                               size_t count)
{
    constexpr size_t THREADS = SQUARES_LANES * sizeof(T) / VECTOR_BYTES;
    unsigned blocks;
    cudaError_t error = grid_for((count + SQUARES_BLOCK - 1) / SQUARES_BLOCK * THREADS, &blocks);
    if (error != cudaSuccess)
        return error;
    return CU_LAUNCH(squares_kernel<T>, blocks, BLOCK_THREADS, stream,
                     CU_READS(grad, count * sizeof(T))
                     CU_MAY_WRITE(stats->sum_squares, SQUARES_WORDS * sizeof(word))
                     CU_MAY_WRITE(flags, sizeof *flags),
                     reinterpret_cast<word *>(stats->sum_squares), flags, static_cast<const T *>(grad), count,
                     is_aligned(grad));
}

cudaError_t cuda_sum_squares(cudaStream_t stream, device_stats *stats, uint32_t *flags, const void *grad,
                             size_t count, zc_dtype dtype)
{
    if (count == 0)
        return cudaSuccess;
    switch (dtype) {
    case ZC_FLOAT32:
        return sum_squares<float>(stream, stats, flags, grad, count);
    case ZC_FLOAT64:
        return sum_squares<double>(stream, stats, flags, grad, count);
    default:
        return cudaErrorInvalidValue;
    }
}

/* ---- the decision ---------------------------------------------------------- */

__global__ void fold_flags_kernel(device_stats *stats, const uint32_t *flags)
{
    stats->inf_ranks = (*flags & NONFINITE_INF) != 0;
    stats->nan_ranks = (*flags & NONFINITE_NAN) != 0;
}

cudaError_t cuda_fold_flags(cudaStream_t stream, device_stats *stats, const uint32_t *flags)
{
    return CU_LAUNCH(fold_flags_kernel, 1, 1, stream,
                     CU_READS(flags, sizeof *flags) CU_WRITES(&stats->inf_ranks, 2 * sizeof stats->inf_ranks),
                     stats, flags);
}

/* One block: the norm is decided by one thread, the segments are shared out. */
__global__ void __launch_bounds__(BLOCK_THREADS) step_scalars_kernel(const __grid_constant__ device_step_args args)
{
    __shared__ device_step step;
    __shared__ uint32_t scratch[OPTIM_SUM_DIGITS];
    if (threadIdx.x == 0) {
        step = device_step_decide(&args, scratch);
        *args.result = step;
    }
    __syncthreads();
#pragma unroll 1
    for (size_t i = threadIdx.x; i < args.segments; i += BLOCK_THREADS)
        device_step_segment(&args, &step, i);
}

cudaError_t cuda_step_scalars(cudaStream_t stream, const device_step_args *args, const optim_options *options)
{
    device_step_args on_device = *args;
    on_device.options = options;
    [[maybe_unused]] size_t stats_bytes = sizeof *args->stats + (args->segments + 3) / 4 * sizeof *args->stats->used;
    /* Behind the last group's options is padding, and of a segment all but its group changes. */
    [[maybe_unused]] size_t options_bytes = args->groups * sizeof *options - sizeof *options +
                                            offsetof(optim_options, maximize) + sizeof options->maximize;
    [[maybe_unused]] size_t segment_bytes = args->segments * sizeof *args->segment;
    [[maybe_unused]] size_t group_bytes = offsetof(device_segment, has_momentum);
    return CU_LAUNCH(step_scalars_kernel, 1, BLOCK_THREADS, stream,
                     CU_MAY_READ(args->stats, stats_bytes) CU_MAY_READ(options, options_bytes)
                     CU_MAY_READ(args->segment, segment_bytes)
                     CU_MAY_WRITE(&args->segment->has_momentum, segment_bytes ? segment_bytes - group_bytes : 0)
                     CU_WRITES(args->scalars, args->segments * sizeof *args->scalars)
                     CU_WRITES(args->result, sizeof *args->result),
                     on_device);
}
