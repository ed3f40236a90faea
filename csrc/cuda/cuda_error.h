/*
 * Calls of the CUDA runtime and of the driver: whose they are, and what a failed
 * one is called.
 *
 * The driver library is never linked, because machines that only build or only
 * use the CPU do not have it.  The few functions of it that the runtime does not
 * offer are asked for by name, through the runtime.
 */
#ifndef CUDA_ERROR_H
#define CUDA_ERROR_H

#include "cu.h"
#include "zc_status.h"

#include <stddef.h>

#define CUDA_DRIVER_MAP(X)            \
    X(cuDeviceGet)                    \
    X(cuDeviceGetAttribute)           \
    X(cuGetErrorName)                 \
    X(cuMemAddressFree)               \
    X(cuMemAddressReserve)            \
    X(cuMemCreate)                    \
    X(cuMemGetAllocationGranularity)  \
    X(cuMemMap)                       \
    X(cuMemRelease)                   \
    X(cuMemSetAccess)                 \
    X(cuMemUnmap)

typedef struct cuda_driver {
#define X(name) __typeof__(name) *name;
    CUDA_DRIVER_MAP(X)
#undef X
} cuda_driver;

/* Fills the table; ZC_ESYSTEM names the function that the driver does not have. */
zc_status cuda_driver_open(int ordinal, cuda_driver *out);

/*
 * What a failed call is reported as: "cudaMalloc on GPU 0: out of memory
 * (cudaErrorMemoryAllocation)".  The runtime forgets the error: the next launch
 * asks for "the last error" and would be blamed for it.
 */
zc_status cuda_fail(cudaError_t error, int ordinal, const char *function);
zc_status cuda_driver_fail(const cuda_driver *driver, CUresult error, int ordinal, const char *function);

/* ZC_ENOMEM for `bytes` bytes, with what is free; `advice` says what to do. */
zc_status cuda_no_room(int ordinal, size_t bytes, const char *advice);

/* Call a function of the runtime, and pass a failure up. */
#define CUDA_TRY(ordinal, function, ...)                                    \
    do {                                                                    \
        cudaError_t cuda_try_error_ = function(__VA_ARGS__);                \
        if (cuda_try_error_ != cudaSuccess)                                 \
            return cuda_fail(cuda_try_error_, (ordinal), #function);        \
    } while (0)

#define CUDA_DRIVER_TRY(driver, ordinal, function, ...)                                 \
    do {                                                                                \
        CUresult cuda_try_result_ = (driver)->function(__VA_ARGS__);                    \
        if (cuda_try_result_ != CUDA_SUCCESS)                                           \
            return cuda_driver_fail((driver), cuda_try_result_, (ordinal), #function);  \
    } while (0)

/*
 * Makes GPU `ordinal` this thread's current one until cuda_leave, which needs
 * *previous.  It is the driver that is asked for it and that gives it back: a
 * thread that had no context has none afterwards, whereas the runtime would say
 * that GPU 0 was current, and would make a context there, some hundred MB, to
 * return to it.  Errors of earlier calls that did not matter are forgotten here,
 * too, so that no launch is blamed for them.
 */
zc_status cuda_enter(int ordinal, CUcontext *previous);
void cuda_leave(CUcontext previous);

#endif
