/*
 * The update of a shard, all of its spans in one launch.
 *
 * A thread takes packs of elements.  Spans begin at multiples of 64 elements of
 * the shard, so a pack lies in one span or between two; the span is searched
 * for, in a list that the caches hold, while other warps' loads are under way.
 * Which rule is a matter of the kernel, a segment's flags are looked at per
 * pack: warps seldom see two segments.
 *
 * 16-bit parameters are updated as fp32 masters in registers, and split or
 * rounded again on the way out.
 */
#include "cuda_vector.cuh"

#include "elem_update.h"

/* ---- parameters with their masters ------------------------------------------ */

/* One per dtype: PARAM in memory, REAL in registers, and the scalars of that type. */
template <zc_dtype DTYPE> struct format;

template <> struct format<ZC_FLOAT32> {
    typedef float param, real;
    typedef optim_scalars_f scalars;
    static inline __device__ const scalars *of(const optim_segment_scalars *s)
    {
        return &s->f;
    }
};

template <> struct format<ZC_FLOAT64> {
    typedef double param, real;
    typedef optim_scalars_d scalars;
    static inline __device__ const scalars *of(const optim_segment_scalars *s)
    {
        return &s->d;
    }
};

template <> struct format<ZC_BFLOAT16> : format<ZC_FLOAT32> {
    typedef uint16_t param;
};

template <> struct format<ZC_FLOAT16> : format<ZC_FLOAT32> {
    typedef uint16_t param;
};

template <typename T> static inline __device__ T *at_element(void *array, size_t at)
{
    return static_cast<T *>(array) + at;
}

template <zc_dtype DTYPE, unsigned N>
static inline __device__ void read_params(typename format<DTYPE>::real (&to)[N], const device_update_args &args,
                                          size_t at)
{
    if constexpr (DTYPE == ZC_BFLOAT16) {
        uint16_t half[N];
        int16_t remainder[N];
        load<N>(half, at_element<uint16_t>(args.param, at));
        load<N>(remainder, at_element<int16_t>(args.master, at));
#pragma unroll
        for (unsigned i = 0; i < N; i++)
            to[i] = zc_master_join(half[i], remainder[i]);
    } else if constexpr (DTYPE == ZC_FLOAT16) {
        load<N>(to, at_element<float>(args.master, at));
    } else {
        load<N>(to, at_element<typename format<DTYPE>::real>(args.param, at));
    }
}

template <zc_dtype DTYPE, unsigned N>
static inline __device__ void write_params(const device_update_args &args, size_t at,
                                           const typename format<DTYPE>::real (&from)[N])
{
    if constexpr (DTYPE == ZC_BFLOAT16) {
        uint16_t half[N];
        int16_t remainder[N];
#pragma unroll
        for (unsigned i = 0; i < N; i++)
            zc_master_split(from[i], &half[i], &remainder[i]);
        store<N>(at_element<uint16_t>(args.param, at), half);
        store<N>(at_element<int16_t>(args.master, at), remainder);
    } else if constexpr (DTYPE == ZC_FLOAT16) {
        uint16_t half[N];
#pragma unroll
        for (unsigned i = 0; i < N; i++)
            half[i] = __half_as_ushort(__float2half_rn(from[i]));
        store<N>(at_element<float>(args.master, at), from);
        store<N>(at_element<uint16_t>(args.param, at), half);
    } else {
        store<N>(at_element<typename format<DTYPE>::real>(args.param, at), from);
    }
}

/* ---- the rules --------------------------------------------------------------- */

static inline __device__ void elem_adam(const optim_scalars_f &s, int decoupled, unsigned flags, float sum, float &p,
                                        float &m, float &v, float &vmax)
{
    elem_adam_f(&s, decoupled, flags, sum, &p, &m, &v, &vmax);
}

static inline __device__ void elem_adam(const optim_scalars_d &s, int decoupled, unsigned flags, double sum, double &p,
                                        double &m, double &v, double &vmax)
{
    elem_adam_d(&s, decoupled, flags, sum, &p, &m, &v, &vmax);
}

static inline __device__ void elem_sgd(const optim_scalars_f &s, unsigned flags, float sum, float &p, float &m)
{
    elem_sgd_f(&s, flags, sum, &p, &m);
}

static inline __device__ void elem_sgd(const optim_scalars_d &s, unsigned flags, double sum, double &p, double &m)
{
    elem_sgd_d(&s, flags, sum, &p, &m);
}

/* Elements [at, at + N) of one segment. */
template <optim_rule RULE, zc_dtype DTYPE, unsigned N>
static inline __device__ void update_pack(const device_update_args &args, const optim_segment_scalars *scalars,
                                          size_t at)
{
    typedef typename format<DTYPE>::real real;
    const unsigned flags = scalars->flags;
    const typename format<DTYPE>::scalars s = *format<DTYPE>::of(scalars);
    real p[N], sum[N], m[N] = {}, v[N], vmax[N] = {};
    read_params<DTYPE, N>(p, args, at);
    load<N>(sum, static_cast<const real *>(args.grad) + at);
    if constexpr (RULE == OPTIM_SGD) {
        if ((flags & OPTIM_MOMENTUM) && !(flags & OPTIM_FIRST))
            load<N>(m, at_element<real>(args.m, at));
#pragma unroll
        for (unsigned i = 0; i < N; i++)
            elem_sgd(s, flags, sum[i], p[i], m[i]);
        if (flags & OPTIM_MOMENTUM)
            store<N>(at_element<real>(args.m, at), m);
    } else {
        load<N>(m, at_element<real>(args.m, at));
        load<N>(v, at_element<real>(args.v, at));
        if (flags & OPTIM_AMSGRAD)
            load<N>(vmax, at_element<real>(args.vmax, at));
#pragma unroll
        for (unsigned i = 0; i < N; i++)
            elem_adam(s, RULE == OPTIM_ADAMW, flags, sum[i], p[i], m[i], v[i], vmax[i]);
        store<N>(at_element<real>(args.m, at), m);
        store<N>(at_element<real>(args.v, at), v);
        if (flags & OPTIM_AMSGRAD)
            store<N>(at_element<real>(args.vmax, at), vmax);
    }
    write_params<DTYPE, N>(args, at, p);
}

/* ---- the shard --------------------------------------------------------------- */

template <zc_dtype DTYPE> struct update_width {
    static constexpr unsigned elems = VECTOR_BYTES / sizeof(typename format<DTYPE>::param);
};

template <optim_rule RULE, zc_dtype DTYPE>
__global__ void __launch_bounds__(BLOCK_THREADS) update_kernel(const __grid_constant__ device_update_args args,
                                                               int aligned)
{
    constexpr unsigned N = update_width<DTYPE>::elems;
#pragma unroll 1
    for (size_t at = first_index() * N; at < args.extent; at += index_step() * N) {
        size_t k = device_find_span(args.spans, args.span_count, at);
        if (k == args.span_count || args.spans[k].begin > at)
            continue;
        const optim_segment_scalars *scalars = &args.scalars[args.spans[k].segment];
        size_t end = args.spans[k].end;
        if (!scalars->active)
            continue;
        if (aligned && end - at >= N) {
            update_pack<RULE, DTYPE, N>(args, scalars, at);
            continue;
        }
#pragma unroll 1
        for (size_t i = at; i < end && i < at + N; i++)
            update_pack<RULE, DTYPE, 1>(args, scalars, i);
    }
}

template <optim_rule RULE, zc_dtype DTYPE>
static cudaError_t update(cudaStream_t stream, const device_update_args &args)
{
    constexpr unsigned N = update_width<DTYPE>::elems;
    int aligned = is_aligned(args.param) && is_aligned(args.master) && is_aligned(args.grad) && is_aligned(args.m) &&
                  is_aligned(args.v) && is_aligned(args.vmax);
    [[maybe_unused]] size_t state_bytes = args.extent * sizeof(typename format<DTYPE>::real);
    [[maybe_unused]] size_t param_bytes = args.extent * sizeof(typename format<DTYPE>::param);
    [[maybe_unused]] size_t master_bytes = args.extent * zc_dtype_master_bytes(DTYPE);
    unsigned blocks;
    cudaError_t error = grid_for((args.extent + N - 1) / N, &blocks);
    if (error != cudaSuccess)
        return error;
    auto kernel = update_kernel<RULE, DTYPE>;
    return CU_LAUNCH(kernel, blocks, BLOCK_THREADS, stream,
                     CU_READS(args.spans, args.span_count * sizeof *args.spans)
                     CU_MAY_READ(args.scalars, args.segments * sizeof *args.scalars)
                     CU_MAY_READ(args.grad, state_bytes)
                     CU_MAY_WRITE(args.param, param_bytes)
                     CU_MAY_WRITE(args.master, master_bytes)
                     CU_MAY_WRITE(args.m, args.m ? state_bytes : 0)
                     CU_MAY_WRITE(args.v, args.v ? state_bytes : 0)
                     CU_MAY_WRITE(args.vmax, args.vmax ? state_bytes : 0),
                     args, aligned);
}

template <optim_rule RULE> static cudaError_t update_dtype(cudaStream_t stream, const device_update_args &args)
{
    switch (args.param_dtype) {
    case ZC_FLOAT32:
        return update<RULE, ZC_FLOAT32>(stream, args);
    case ZC_FLOAT64:
        return update<RULE, ZC_FLOAT64>(stream, args);
    case ZC_BFLOAT16:
        return update<RULE, ZC_BFLOAT16>(stream, args);
    case ZC_FLOAT16:
        return update<RULE, ZC_FLOAT16>(stream, args);
    default:
        return cudaErrorInvalidValue;
    }
}

cudaError_t cuda_update(cudaStream_t stream, const device_update_args *args)
{
    if (args->span_count == 0 || args->extent == 0)
        return cudaSuccess;
    switch (args->rule) {
    case OPTIM_ADAMW:
        return update_dtype<OPTIM_ADAMW>(stream, *args);
    case OPTIM_ADAM:
        return update_dtype<OPTIM_ADAM>(stream, *args);
    case OPTIM_SGD:
        return update_dtype<OPTIM_SGD>(stream, *args);
    }
    return cudaErrorInvalidValue;
}
