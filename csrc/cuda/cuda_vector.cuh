/*
 * What all kernels share: accesses of 16 bytes, fp16, grids.
 *
 * A kernel's thread handles packs of 16 bytes of the narrowest type it touches,
 * so wider types of the same elements take several accesses each.  Data that a
 * step touches once is loaded and stored with an evict-first hint (__ldcs,
 * __stcs), which leaves the caches to the model's own kernels.
 *
 * The loops over scalars that follow packs are not unrolled: they are short or
 * rare, and unrolled they cost registers that the packs need.
 */
#ifndef CUDA_VECTOR_CUH
#define CUDA_VECTOR_CUH

#define ZC_FN static inline __host__ __device__
#include "cuda_kernels.h"

#include <cuda_fp16.h>
#include <stdint.h>
#include <string.h>

#define VECTOR_BYTES 16u
#define BLOCK_THREADS 256u
#define BLOCKS_PER_SM 8u

/* Flag bits of cpu_kernels.h. */
#define NONFINITE_INF 1u
#define NONFINITE_NAN 2u

/* A gradient's or parameter's 16 bits, by type. */
struct bf16_bits {
    uint16_t bits;
};
struct fp16_bits {
    uint16_t bits;
};

ZC_FN float widen(float value)
{
    return value;
}

ZC_FN double widen(double value)
{
    return value;
}

ZC_FN float widen(bf16_bits value)
{
    return zc_bf16_to_float(value.bits);
}

ZC_FN float widen(fp16_bits value)
{
    return __half2float(__ushort_as_half(value.bits));
}

template <typename T> struct sum_type {
    typedef float type;
};
template <> struct sum_type<double> {
    typedef double type;
};

ZC_FN uint32_t nonfinite(float value)
{
    return fabsf(value) <= 0x1.fffffep+127f ? 0 : value != value ? NONFINITE_NAN : NONFINITE_INF;
}

ZC_FN uint32_t nonfinite(double value)
{
    return fabs(value) <= 0x1.fffffffffffffp+1023 ? 0 : value != value ? NONFINITE_NAN : NONFINITE_INF;
}

/* N elements to and from aligned memory; N > 1: whole vectors. */
template <unsigned N, typename T> static inline __device__ void load(T (&to)[N], const T *from)
{
    if constexpr (N == 1) {
        to[0] = *from;
    } else {
        static_assert(N * sizeof(T) % VECTOR_BYTES == 0, "not whole vectors");
#pragma unroll
        for (unsigned k = 0; k < N * sizeof(T) / VECTOR_BYTES; k++) {
            uint4 vector = __ldcs(reinterpret_cast<const uint4 *>(from) + k);
            memcpy(reinterpret_cast<char *>(to) + k * VECTOR_BYTES, &vector, VECTOR_BYTES);
        }
    }
}

template <unsigned N, typename T> static inline __device__ void store(T *to, const T (&from)[N])
{
    if constexpr (N == 1) {
        *to = from[0];
    } else {
        static_assert(N * sizeof(T) % VECTOR_BYTES == 0, "not whole vectors");
#pragma unroll
        for (unsigned k = 0; k < N * sizeof(T) / VECTOR_BYTES; k++) {
            uint4 vector;
            memcpy(&vector, reinterpret_cast<const char *>(from) + k * VECTOR_BYTES, VECTOR_BYTES);
            __stcs(reinterpret_cast<uint4 *>(to) + k, vector);
        }
    }
}

static inline int is_aligned(const void *pointer)
{
    return (uintptr_t)pointer % VECTOR_BYTES == 0;
}

static inline __device__ size_t first_index(void)
{
    return (size_t)blockIdx.x * blockDim.x + threadIdx.x;
}

static inline __device__ size_t index_step(void)
{
    return (size_t)gridDim.x * blockDim.x;
}

/* Blocks of BLOCK_THREADS for `threads` >= 1 threads of work: at most what fills the current device. */
static inline cudaError_t grid_for(size_t threads, unsigned *blocks)
{
    int device, processors;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess)
        error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess)
        return error;
    size_t needed = (threads + BLOCK_THREADS - 1) / BLOCK_THREADS, most = (size_t)processors * BLOCKS_PER_SM;
    *blocks = (unsigned)(needed < most ? needed : most);
    return cudaSuccess;
}

#endif
