/*
 * Rank-ordered sums, and multiplication by a constant.
 *
 * A thread keeps the sum of its elements in registers while it goes through the
 * ranks, so every operand is read once and the result written once, in the
 * order that makes the bits those of one rank's program.
 */
#include "cuda_vector.cuh"

/* ---- reduce --------------------------------------------------------------- */

template <typename T> struct reduce_args {
    typename sum_type<T>::type *to;
    const char *base;
    size_t stride_bytes, ranks, own;
    const T *own_at;
    size_t count, packs;
    int accumulate;
    uint32_t *flags;
};

/* Adds the rank's elements [at, at + N) to `sum`, or makes it them; a NULL operand is +0. */
template <unsigned N, typename T>
static inline __device__ void add_operand(typename sum_type<T>::type (&sum)[N], const reduce_args<T> &args,
                                          size_t rank, size_t at)
{
    const T *from = rank == args.own ? args.own_at
                                     : reinterpret_cast<const T *>(args.base + rank * args.stride_bytes);
    T in[N];
    memset(in, 0, sizeof in);
    if (from)
        load<N>(in, from + at);
#pragma unroll
    for (unsigned i = 0; i < N; i++)
        sum[i] = rank ? sum[i] + widen(in[i]) : widen(in[i]);
}

/* Returns the flags of what it wrote. */
template <unsigned N, typename T> static inline __device__ uint32_t reduce_pack(const reduce_args<T> &args, size_t at)
{
    typename sum_type<T>::type sum[N], old[N];
    add_operand<N>(sum, args, 0, at);
    for (size_t rank = 1; rank < args.ranks; rank++)
        add_operand<N>(sum, args, rank, at);
    if (args.accumulate) {
        load<N>(old, args.to + at);
#pragma unroll
        for (unsigned i = 0; i < N; i++)
            sum[i] = old[i] + sum[i];
    }
    store<N>(args.to + at, sum);
    uint32_t found = 0;
#pragma unroll
    for (unsigned i = 0; i < N; i++)
        found |= nonfinite(sum[i]);
    return found;
}

template <typename T> __global__ void __launch_bounds__(BLOCK_THREADS) reduce_kernel(const reduce_args<T> args)
{
    constexpr unsigned N = VECTOR_BYTES / sizeof(T);
    uint32_t found = 0;
#pragma unroll 1
    for (size_t pack = first_index(); pack < args.packs; pack += index_step())
        found |= reduce_pack<N>(args, pack * N);
#pragma unroll 1
    for (size_t at = args.packs * N + first_index(); at < args.count; at += index_step())
        found |= reduce_pack<1>(args, at);
    if (found && args.flags)
        atomicOr(args.flags, found);
}

template <typename T>
static cudaError_t reduce(cudaStream_t stream, void *to, const cuda_operands *in, size_t count, int accumulate,
                          uint32_t *flags)
{
    typedef typename sum_type<T>::type sum;
    size_t bytes = count * sizeof(T), own = in->own < in->ranks ? in->own : in->ranks;
    const char *base = static_cast<const char *>(in->base);
    const void *own_at = own < in->ranks ? in->own_at : NULL;
    size_t others = in->ranks - (own < in->ranks);
    int aligned = is_aligned(to) && is_aligned(own_at) && (!others || is_aligned(base)) &&
                  (in->ranks == 1 || in->stride_bytes % VECTOR_BYTES == 0);
    reduce_args<T> args = {static_cast<sum *>(to), base, in->stride_bytes, in->ranks, own,
                           static_cast<const T *>(own_at), count,
                           aligned ? bytes / VECTOR_BYTES : 0, accumulate, flags};
    /* The first and the last of the other ranks; what lies between their slices is declared as read too. */
    [[maybe_unused]] size_t first = own == 0, last = in->ranks - 1 - (own == in->ranks - 1);
    unsigned blocks;
    cudaError_t error = grid_for(args.packs ? args.packs : count, &blocks);
    if (error != cudaSuccess)
        return error;
    return CU_LAUNCH(reduce_kernel<T>, blocks, BLOCK_THREADS, stream,
                     CU_READS(base + first * in->stride_bytes, others ? (last - first) * in->stride_bytes + bytes : 0)
                     CU_READS(own_at, own_at ? bytes : 0)
                     CU_READS(to, accumulate ? count * sizeof(sum) : 0)
                     CU_WRITES(to, count * sizeof(sum))
                     CU_MAY_WRITE(flags, flags ? sizeof *flags : 0),
                     args);
}

cudaError_t cuda_reduce(cudaStream_t stream, void *to, const cuda_operands *in, size_t count, zc_dtype dtype,
                        int accumulate, uint32_t *flags)
{
    if (count == 0)
        return cudaSuccess;
    switch (dtype) {
    case ZC_FLOAT32:
        return reduce<float>(stream, to, in, count, accumulate, flags);
    case ZC_FLOAT64:
        return reduce<double>(stream, to, in, count, accumulate, flags);
    case ZC_BFLOAT16:
        return reduce<bf16_bits>(stream, to, in, count, accumulate, flags);
    case ZC_FLOAT16:
        return reduce<fp16_bits>(stream, to, in, count, accumulate, flags);
    default:
        return cudaErrorInvalidValue;
    }
}

/* ---- scale ---------------------------------------------------------------- */

template <unsigned N, typename T>
static inline __device__ void scale_pack(T *to, const T *from, size_t at, T factor)
{
    T values[N];
    load<N>(values, from + at);
#pragma unroll
    for (unsigned i = 0; i < N; i++)
        values[i] = factor * values[i];
    store<N>(to + at, values);
}

template <typename T>
__global__ void __launch_bounds__(BLOCK_THREADS)
scale_kernel(T *to, const T *from, size_t count, size_t packs, T factor)
{
    constexpr unsigned N = VECTOR_BYTES / sizeof(T);
#pragma unroll 1
    for (size_t pack = first_index(); pack < packs; pack += index_step())
        scale_pack<N>(to, from, pack * N, factor);
#pragma unroll 1
    for (size_t at = packs * N + first_index(); at < count; at += index_step())
        scale_pack<1>(to, from, at, factor);
}

template <typename T>
static cudaError_t scale(cudaStream_t stream, void *to, const void *from, size_t count, double factor)
{
    size_t bytes = count * sizeof(T), packs = is_aligned(to) && is_aligned(from) ? bytes / VECTOR_BYTES : 0;
    unsigned blocks;
    cudaError_t error = grid_for(packs ? packs : count, &blocks);
    if (error != cudaSuccess)
        return error;
    return CU_LAUNCH(scale_kernel<T>, blocks, BLOCK_THREADS, stream, CU_READS(from, bytes) CU_WRITES(to, bytes),
                     static_cast<T *>(to), static_cast<const T *>(from), count, packs, static_cast<T>(factor));
}

cudaError_t cuda_scale(cudaStream_t stream, void *to, const void *from, size_t count, zc_dtype dtype,
                       double factor)
{
    if (count == 0)
        return cudaSuccess;
    switch (dtype) {
    case ZC_FLOAT32:
        return scale<float>(stream, to, from, count, factor);
    case ZC_FLOAT64:
        return scale<double>(stream, to, from, count, factor);
    default:
        return cudaErrorInvalidValue;
    }
}
