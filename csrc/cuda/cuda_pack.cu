/*
 * Strided to contiguous, one element per thread: neighbouring threads write
 * neighbouring elements, and read them where the innermost stride allows it.
 */
#include "cuda_vector.cuh"

struct pack_args {
    int dims;
    int64_t shape[CUDA_MAX_DIMS], strides[CUDA_MAX_DIMS];
};

/* INDEX is as wide as the count needs: a division of 64 bits costs many instructions. */
template <typename ELEM, typename INDEX>
__global__ void __launch_bounds__(BLOCK_THREADS) pack_kernel(ELEM *to, const ELEM *from, size_t count,
                                                             const __grid_constant__ pack_args args)
{
#pragma unroll 1
    for (size_t at = first_index(); at < count; at += index_step()) {
        INDEX rest = static_cast<INDEX>(at);
        int64_t offset = 0;
#pragma unroll 1
        for (int d = args.dims - 1; d > 0; d--) {
            INDEX extent = static_cast<INDEX>(args.shape[d]), next = rest / extent;
            offset += static_cast<int64_t>(rest - next * extent) * args.strides[d];
            rest = next;
        }
        to[at] = from[offset + static_cast<int64_t>(rest) * args.strides[0]];
    }
}

template <typename ELEM>
static cudaError_t pack(cudaStream_t stream, void *to, const void *from, const pack_args &args)
{
    size_t count = 1;
    int64_t lowest = 0, highest = 0; /* elements of `from` that are read first and last */
    for (int d = 0; d < args.dims; d++) {
        int64_t reach = (args.shape[d] - 1) * args.strides[d];
        count *= static_cast<size_t>(args.shape[d]);
        lowest += reach < 0 ? reach : 0;
        highest += reach > 0 ? reach : 0;
    }
    if (count == 0)
        return cudaSuccess;
    unsigned blocks;
    cudaError_t error = grid_for(count, &blocks);
    if (error != cudaSuccess)
        return error;
    auto kernel = count <= UINT32_MAX ? pack_kernel<ELEM, uint32_t> : pack_kernel<ELEM, uint64_t>;
    const ELEM *source = static_cast<const ELEM *>(from);
    return CU_LAUNCH(kernel, blocks, BLOCK_THREADS, stream,
                     CU_READS(source + lowest, static_cast<size_t>(highest - lowest + 1) * sizeof(ELEM))
                     CU_WRITES(to, count * sizeof(ELEM)),
                     static_cast<ELEM *>(to), source, count, args);
}

cudaError_t cuda_pack(cudaStream_t stream, void *to, const void *from, size_t elem_bytes, int dims,
                      const int64_t *shape, const int64_t *strides)
{
    if (dims < 1 || dims > CUDA_MAX_DIMS)
        return cudaErrorInvalidValue;
    pack_args args = {};
    args.dims = dims;
    for (int d = 0; d < dims; d++) {
        args.shape[d] = shape[d];
        args.strides[d] = strides[d];
    }
    switch (elem_bytes) {
    case 1:
        return pack<uint8_t>(stream, to, from, args);
    case 2:
        return pack<uint16_t>(stream, to, from, args);
    case 4:
        return pack<uint32_t>(stream, to, from, args);
    case 8:
        return pack<uint64_t>(stream, to, from, args);
    default:
        return cudaErrorInvalidValue;
    }
}
