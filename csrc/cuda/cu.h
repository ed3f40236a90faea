/*
 * CUDA as this backend uses it, and the one place that knows nvcc from the test
 * build (ZERO_C_EMULATE), in which the same sources are compiled by gcc and g++
 * against NVIDIA's own headers and linked with tests/cuda_emulation.
 *
 * The test build checks that accesses are ordered, so every access is declared:
 *
 *   CU_LAUNCH(kernel, grid, block, stream, CU_READS(p, bytes) CU_WRITES(q, bytes), arguments...)
 *       launches and evaluates to a cudaError_t; the declared ranges need no
 *       comma between them.  What is written may be read too, and an atomic
 *       read-modify-write that commutes with all others of its launch counts as
 *       a write.  Every launch touches the first and the last byte of what it
 *       declares so; CU_MAY_READ and CU_MAY_WRITE are for ranges of which the
 *       data decide how much is touched.  A build that watches kernels proves
 *       all this (tests/cuda_emulation/emu_watch.cc).
 *   CU_NEXT_READS(p, bytes), CU_NEXT_MAY_READ(p, bytes), CU_NEXT_MAY_WRITE(p, bytes)
 *       before a launch: one more access of it, where their number is not fixed.
 *   CU_HOST_READ(p, bytes), CU_HOST_WRITE(p, bytes)
 *       before the host touches pinned memory that the device also touches.
 *
 * Copies, fills and collectives declare themselves.  Event waits are found by
 * their place in the source, so that a test can leave one out.
 */
#ifndef CU_H
#define CU_H

#if defined(ZERO_C_EMULATE)
#include "emu_cuda.h"
#else
#include <cuda.h>
#include <cuda_runtime_api.h>
#define CU_HOST_READ(p, bytes) ((void)0)
#define CU_HOST_WRITE(p, bytes) ((void)0)
#if defined(__CUDACC__)
#include <cuda_runtime.h>
#define CU_READS(p, bytes)
#define CU_WRITES(p, bytes)
#define CU_MAY_READ(p, bytes)
#define CU_MAY_WRITE(p, bytes)
#define CU_NEXT_READS(p, bytes) ((void)0)
#define CU_NEXT_MAY_READ(p, bytes) ((void)0)
#define CU_NEXT_MAY_WRITE(p, bytes) ((void)0)
#define CU_LAUNCH(kernel, grid, block, stream, accesses, ...) \
    ((kernel)<<<(grid), (block), 0, (stream)>>>(__VA_ARGS__), cudaPeekAtLastError())
#endif
#endif

#endif
