/*
 * The update of shards, all of them in one launch: a row of the grid has one.
 *
 * The table of shards is an argument by value, which lies in constant memory and
 * needs no copy of its own.  A thread takes packs of elements.  Spans begin at
 * multiples of 64 elements of the shard, so a pack lies in one span or between
 * two; the span is searched for, in a list that the caches hold, while other
 * warps' loads are under way.
 * Which rule is a matter of the kernel, a segment's flags are looked at per
 * pack: warps seldom see two segments.
 *
 * 16-bit parameters are updated as fp32 masters in registers, and split or
 * rounded again on the way out.
 */
#include "cuda_vector.cuh"

#include "elem_update.h"

#include <initializer_list>

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
                                          const device_shard &shard, size_t at)
{
    [[maybe_unused]] const size_t state = shard.state_begin + at;
    if constexpr (DTYPE == ZC_BFLOAT16) {
        uint16_t half[N];
        int16_t remainder[N];
        load<N>(half, at_element<uint16_t>(shard.param, at));
        load<N>(remainder, at_element<int16_t>(args.master, state));
#pragma unroll
        for (unsigned i = 0; i < N; i++)
            to[i] = zc_master_join(half[i], remainder[i]);
    } else if constexpr (DTYPE == ZC_FLOAT16) {
        load<N>(to, at_element<float>(args.master, state));
    } else {
        load<N>(to, at_element<typename format<DTYPE>::real>(shard.param, at));
    }
}

template <zc_dtype DTYPE, unsigned N>
static inline __device__ void write_params(const device_update_args &args, const device_shard &shard, size_t at,
                                           const typename format<DTYPE>::real (&from)[N])
{
    [[maybe_unused]] const size_t state = shard.state_begin + at;
    if constexpr (DTYPE == ZC_BFLOAT16) {
        uint16_t half[N];
        int16_t remainder[N];
#pragma unroll
        for (unsigned i = 0; i < N; i++)
            zc_master_split(from[i], &half[i], &remainder[i]);
        store<N>(at_element<uint16_t>(shard.param, at), half);
        store<N>(at_element<int16_t>(args.master, state), remainder);
    } else if constexpr (DTYPE == ZC_FLOAT16) {
        uint16_t half[N];
#pragma unroll
        for (unsigned i = 0; i < N; i++)
            half[i] = __half_as_ushort(__float2half_rn(from[i]));
        store<N>(at_element<float>(args.master, state), from);
        store<N>(at_element<uint16_t>(shard.param, at), half);
    } else {
        store<N>(at_element<typename format<DTYPE>::real>(shard.param, at), from);
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
static inline __device__ void update_pack(const device_update_args &args, const device_shard &shard,
                                          const optim_segment_scalars *scalars, size_t at)
{
    typedef typename format<DTYPE>::real real;
    const size_t state = shard.state_begin + at;
    const unsigned flags = scalars->flags;
    const typename format<DTYPE>::scalars s = *format<DTYPE>::of(scalars);
    real p[N], sum[N], m[N] = {}, v[N], vmax[N] = {};
    read_params<DTYPE, N>(p, args, shard, at);
    load<N>(sum, static_cast<const real *>(shard.grad) + at);
    if constexpr (RULE == OPTIM_SGD) {
        if ((flags & OPTIM_MOMENTUM) && !(flags & OPTIM_FIRST))
            load<N>(m, at_element<real>(args.m, state));
#pragma unroll
        for (unsigned i = 0; i < N; i++)
            elem_sgd(s, flags, sum[i], p[i], m[i]);
        if (flags & OPTIM_MOMENTUM)
            store<N>(at_element<real>(args.m, state), m);
    } else {
        load<N>(m, at_element<real>(args.m, state));
        load<N>(v, at_element<real>(args.v, state));
        if (flags & OPTIM_AMSGRAD)
            load<N>(vmax, at_element<real>(args.vmax, state));
#pragma unroll
        for (unsigned i = 0; i < N; i++)
            elem_adam(s, RULE == OPTIM_ADAMW, flags, sum[i], p[i], m[i], v[i], vmax[i]);
        store<N>(at_element<real>(args.m, state), m);
        store<N>(at_element<real>(args.v, state), v);
        if (flags & OPTIM_AMSGRAD)
            store<N>(at_element<real>(args.vmax, state), vmax);
    }
    write_params<DTYPE, N>(args, shard, at, p);
}

/* ---- the shards -------------------------------------------------------------- */

template <zc_dtype DTYPE> struct update_width {
    static constexpr unsigned elems = VECTOR_BYTES / sizeof(typename format<DTYPE>::param);
};

template <optim_rule RULE, zc_dtype DTYPE>
__global__ void __launch_bounds__(BLOCK_THREADS) update_kernel(const __grid_constant__ device_update_args args,
                                                               int aligned)
{
    constexpr unsigned N = update_width<DTYPE>::elems;
    const device_shard &shard = args.shards[blockIdx.y];
#pragma unroll 1
    for (size_t at = first_index() * N; at < shard.extent; at += index_step() * N) {
        size_t k = device_find_span(shard.spans, shard.span_count, at);
        if (k == shard.span_count || shard.spans[k].begin > at)
            continue;
        const optim_segment_scalars *scalars = &args.scalars[shard.spans[k].segment];
        size_t end = shard.spans[k].end;
        if (!scalars->active)
            continue;
        if (aligned && end - at >= N) {
            update_pack<RULE, DTYPE, N>(args, shard, scalars, at);
            continue;
        }
#pragma unroll 1
        for (size_t i = at; i < end && i < at + N; i++)
            update_pack<RULE, DTYPE, 1>(args, shard, scalars, i);
    }
}

static_assert(sizeof(device_update_args) + sizeof(int) <= 4096, "more than a kernel's arguments may be");

[[maybe_unused]] static const char *at_byte(const void *array, size_t at)
{
    return static_cast<const char *>(array) + at;
}

template <zc_dtype DTYPE> static void declare_accesses(const device_update_args &args)
{
    [[maybe_unused]] const size_t master_bytes = zc_dtype_master_bytes(DTYPE);
    [[maybe_unused]] constexpr size_t state_bytes = sizeof(typename format<DTYPE>::real);
    CU_NEXT_MAY_READ(args.scalars, args.segments * sizeof *args.scalars);
    for (size_t k = 0; k < args.shard_count; k++) {
        [[maybe_unused]] const device_shard &shard = args.shards[k];
        CU_NEXT_READS(shard.spans, shard.span_count * sizeof *shard.spans);
        CU_NEXT_MAY_READ(shard.grad, shard.extent * state_bytes);
        CU_NEXT_MAY_WRITE(shard.param, shard.extent * sizeof(typename format<DTYPE>::param));
        if (args.master)
            CU_NEXT_MAY_WRITE(at_byte(args.master, shard.state_begin * master_bytes), shard.extent * master_bytes);
        for ([[maybe_unused]] void *state : {args.m, args.v, args.vmax})
            if (state)
                CU_NEXT_MAY_WRITE(at_byte(state, shard.state_begin * state_bytes), shard.extent * state_bytes);
    }
}

template <zc_dtype DTYPE> static int all_aligned(const device_update_args &args)
{
    int aligned = is_aligned(args.master) && is_aligned(args.m) && is_aligned(args.v) && is_aligned(args.vmax);
    for (size_t k = 0; k < args.shard_count; k++)
        aligned &= is_aligned(args.shards[k].param) && is_aligned(args.shards[k].grad) &&
                   args.shards[k].state_begin % VECTOR_BYTES == 0;
    return aligned;
}

template <optim_rule RULE, zc_dtype DTYPE>
static cudaError_t update(cudaStream_t stream, const device_update_args &args)
{
    constexpr unsigned N = update_width<DTYPE>::elems;
    size_t packs = 0;
    unsigned blocks, rows = (unsigned)args.shard_count;
    for (size_t k = 0; k < args.shard_count; k++)
        packs += (args.shards[k].extent + N - 1) / N;
    if (packs == 0)
        return cudaSuccess;
    cudaError_t error = grid_for(packs, &blocks);
    if (error != cudaSuccess)
        return error;
    dim3 grid((blocks + rows - 1) / rows, rows);
    auto kernel = update_kernel<RULE, DTYPE>;
    declare_accesses<DTYPE>(args);
    return CU_LAUNCH(kernel, grid, BLOCK_THREADS, stream, , args, all_aligned<DTYPE>(args));
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
    if (args->shard_count == 0)
        return cudaSuccess;
    if (args->shard_count > DEVICE_MAX_SHARDS)
        return cudaErrorInvalidValue;
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
