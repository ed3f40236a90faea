/*
 * Numbers of the host that go to the device as arguments of a kernel.  A graph
 * keeps them as they were when it was captured, whereas of a copy it keeps the
 * address from which it reads at every launch.
 */
#include "cuda_vector.cuh"

/* What is left of a kernel's 4 KiB of arguments, in whole KiB. */
#define VALUE_BYTES 3072u

struct value {
    unsigned char bytes[VALUE_BYTES];
};

struct counts {
    uint64_t of[DEVICE_COUNTS];
};

__global__ void __launch_bounds__(BLOCK_THREADS) store_kernel(unsigned char *to, const __grid_constant__ value from,
                                                              unsigned bytes)
{
#pragma unroll 1
    for (unsigned i = threadIdx.x; i < bytes; i += BLOCK_THREADS)
        to[i] = from.bytes[i];
}

cudaError_t cuda_store(cudaStream_t stream, void *to, const void *from, size_t bytes)
{
    cudaError_t error = cudaSuccess;
    for (size_t at = 0; at < bytes && error == cudaSuccess; at += VALUE_BYTES) {
        value piece = {};
        unsigned char *there = static_cast<unsigned char *>(to) + at;
        unsigned count = static_cast<unsigned>(bytes - at < VALUE_BYTES ? bytes - at : VALUE_BYTES);
        memcpy(piece.bytes, static_cast<const unsigned char *>(from) + at, count);
        error = CU_LAUNCH(store_kernel, 1, BLOCK_THREADS, stream, CU_WRITES(there, count), there, piece, count);
    }
    return error;
}

__global__ void tally_kernel(device_tally *tally, const device_step *result, const __grid_constant__ counts add)
{
    if (threadIdx.x == 0)
        tally->steps += result->skipped == 0;
    if (threadIdx.x < DEVICE_COUNTS)
        tally->counts[threadIdx.x] += add.of[threadIdx.x];
}

cudaError_t cuda_tally(cudaStream_t stream, device_tally *tally, const device_step *result,
                       const uint64_t add[DEVICE_COUNTS])
{
    counts values;
    memcpy(values.of, add, sizeof values.of);
    return CU_LAUNCH(tally_kernel, 1, 32, stream,
                     CU_READS(&result->skipped, sizeof result->skipped) CU_WRITES(tally, sizeof *tally), tally, result,
                     values);
}
