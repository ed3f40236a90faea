/*
 * Names and texts of CUDA errors, the current GPU of a thread, and the functions
 * of the driver.
 */
#include "cuda_error.h"

#include <pthread.h>
#include <stddef.h>
#include <string.h>

#define DRIVER_FUNCTIONS_OF 12000 /* the CUDA version whose variants of the driver's functions are used */

/* After these the runtime answers every further call of the process with an error. */
static int is_final(cudaError_t error)
{
    switch (error) {
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorContained:
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorLaunchFailure:
    case cudaErrorTensorMemoryLeak:
    case cudaErrorMpsClientTerminated:
    case cudaErrorExternalDevice:
        return 1;
    default:
        return 0;
    }
}

zc_status cuda_fail(cudaError_t error, int ordinal, const char *function)
{
    cudaGetLastError();
    return zc_fail(error == cudaErrorMemoryAllocation ? ZC_ENOMEM : ZC_ESYSTEM, "%s on GPU %d: %s (%s)%s", function,
                   ordinal, cudaGetErrorString(error), cudaGetErrorName(error),
                   is_final(error) ? "; CUDA cannot be used by this process any more, it must be restarted.  The "
                                     "error may come from any kernel that this process ran; with "
                                     "CUDA_LAUNCH_BLOCKING=1 the call that failed is the one that is named" : "");
}

zc_status cuda_driver_fail(const cuda_driver *driver, CUresult error, int ordinal, const char *function)
{
    const char *name = NULL;
    if (driver->cuGetErrorName(error, &name) != CUDA_SUCCESS || !name)
        name = "an error without a name";
    return zc_fail(error == CUDA_ERROR_OUT_OF_MEMORY ? ZC_ENOMEM : ZC_ESYSTEM, "%s on GPU %d: %s (%d)", function,
                   ordinal, name, (int)error);
}

zc_status cuda_no_room(int ordinal, size_t bytes, const char *advice)
{
    size_t free_bytes = 0, total_bytes = 0;
    cudaGetLastError();
    if (cudaMemGetInfo(&free_bytes, &total_bytes) != cudaSuccess) {
        cudaGetLastError();
        return zc_fail(ZC_ENOMEM, "GPU %d has no room for %zu bytes; %s", ordinal, bytes, advice);
    }
    return zc_fail(ZC_ENOMEM, "GPU %d has no room for %zu bytes: of %zu bytes %zu are free; %s", ordinal, bytes,
                   total_bytes, free_bytes, advice);
}

/* `out` is a pointer to a function, of any type. */
static zc_status find_function(int ordinal, const char *name, void *out)
{
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    void *function = NULL;
    CUDA_TRY(ordinal, cudaGetDriverEntryPointByVersion, name, &function, DRIVER_FUNCTIONS_OF, cudaEnableDefault,
             &found);
    if (found != cudaDriverEntryPointSuccess || !function)
        return zc_fail(ZC_ESYSTEM, "the NVIDIA driver has no function %s; install a driver for CUDA 13 (580 or newer)",
                       name);
    memcpy(out, &function, sizeof function);
    return ZC_OK;
}

zc_status cuda_driver_open(int ordinal, cuda_driver *out)
{
#define X(name) ZC_TRY(find_function(ordinal, #name, &out->name));
    CUDA_DRIVER_MAP(X)
#undef X
    return ZC_OK;
}

/* ---- the current GPU --------------------------------------------------------- */

/* The driver's functions for the context that a thread has; found once in a process. */
static struct {
    pthread_mutex_t lock;
    int found;
    __typeof__(cuCtxGetCurrent) *get;
    __typeof__(cuCtxSetCurrent) *set;
} contexts = {.lock = PTHREAD_MUTEX_INITIALIZER};

static zc_status find_contexts(int ordinal)
{
    if (__atomic_load_n(&contexts.found, __ATOMIC_ACQUIRE))
        return ZC_OK;
    pthread_mutex_lock(&contexts.lock);
    zc_status status = find_function(ordinal, "cuCtxGetCurrent", &contexts.get);
    if (status == ZC_OK)
        status = find_function(ordinal, "cuCtxSetCurrent", &contexts.set);
    if (status == ZC_OK)
        __atomic_store_n(&contexts.found, 1, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&contexts.lock);
    return status;
}

zc_status cuda_enter(int ordinal, CUcontext *previous)
{
    *previous = NULL;
    cudaGetLastError();
    ZC_TRY(find_contexts(ordinal));
    CUresult result = contexts.get(previous);
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_INITIALIZED) /* that is: nobody has a context yet */
        return zc_fail(ZC_ESYSTEM, "cuCtxGetCurrent, to use GPU %d: error %d of the driver", ordinal, (int)result);
    CUDA_TRY(ordinal, cudaSetDevice, ordinal);
    return ZC_OK;
}

void cuda_leave(CUcontext previous)
{
    contexts.set(previous);
}
