/*
 * The runtime API but for memory and copies: devices, streams, events, errors,
 * and the way to the driver's functions.
 */
#include "emu_internal.h"

#include <algorithm>
#include <cstring>

using namespace emu;

namespace {

template <class Handle> Handle as_handle(uint64_t number)
{
    return (Handle)(uintptr_t)number;
}

std::shared_ptr<event> find_event(cudaEvent_t handle, const std::string &what)
{
    auto found = the->events.find((uint64_t)(uintptr_t)handle);
    if (found != the->events.end())
        return found->second;
    finding(what + " with an event that does not exist");
    return nullptr;
}

cudaError_t create_stream(cudaStream_t *out, unsigned flags)
{
    if (!out || flags & ~(unsigned)cudaStreamNonBlocking)
        return failed(cudaErrorInvalidValue);
    uint64_t number = the->next_handle++;
    the->streams[number] = new_stream(self().device, !(flags & cudaStreamNonBlocking));
    *out = as_handle<cudaStream_t>(number);
    return cudaSuccess;
}

/* Waits for what a stream has been given so far. */
cudaError_t synchronize(std::unique_lock<std::mutex> &lock, const stream_ref &on, const std::string &what)
{
    uint64_t position = on->enqueued;
    vclock clock = on->clock;
    if (!wait_for(lock, what, [&] { return on->completed >= position; }))
        return failed(the->broken);
    learn(self(), clock);
    return cudaSuccess;
}

/* The default stream is behind all streams that are ordered with it once an operation of its own is. */
void settle_legacy(cudaStream_t handle, const stream_ref &on, const char *what)
{
    if ((!handle || handle == cudaStreamLegacy) && !on->recording)
        submit(on, begin(on, site_number(what)));
}

struct error_text {
    cudaError_t error;
    const char *name, *text;
};

const error_text errors[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {cudaErrorInvalidMemcpyDirection, "cudaErrorInvalidMemcpyDirection", "invalid copy direction for memcpy"},
    {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver",
     "CUDA driver version is insufficient for CUDA runtime version"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorIllegalState, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
    {cudaErrorStreamCaptureMerge, "cudaErrorStreamCaptureMerge",
     "operation would result in a merge of separate capture sequences"},
    {cudaErrorStreamCaptureUnmatched, "cudaErrorStreamCaptureUnmatched",
     "capture was not ended in the same stream as it began"},
    {cudaErrorStreamCaptureUnjoined, "cudaErrorStreamCaptureUnjoined",
     "capturing stream has unjoined work"},
    {cudaErrorStreamCaptureIsolation, "cudaErrorStreamCaptureIsolation",
     "dependency created on uncaptured work in another stream"},
    {cudaErrorStreamCaptureImplicit, "cudaErrorStreamCaptureImplicit",
     "operation would make the legacy stream depend on a capturing blocking stream"},
    {cudaErrorCapturedEvent, "cudaErrorCapturedEvent",
     "operation not permitted on an event last recorded in a capturing stream"},
    {cudaErrorStreamCaptureWrongThread, "cudaErrorStreamCaptureWrongThread",
     "attempt to terminate a thread-local capture sequence from another thread"},
    {cudaErrorUnknown, "cudaErrorUnknown", "unknown error"},
};

struct entry_point {
    const char *name;
    void *function;
    unsigned since;
};

const entry_point entry_points[] = {
    {"cuCtxGetCurrent", (void *)cuCtxGetCurrent, 4000},
    {"cuCtxSetCurrent", (void *)cuCtxSetCurrent, 4000},
    {"cuDeviceGet", (void *)cuDeviceGet, 2000},
    {"cuDeviceGetAttribute", (void *)cuDeviceGetAttribute, 2000},
    {"cuGetErrorName", (void *)cuGetErrorName, 6000},
    {"cuMemGetAllocationGranularity", (void *)cuMemGetAllocationGranularity, 10020},
    {"cuMemCreate", (void *)cuMemCreate, 10020},
    {"cuMemRelease", (void *)cuMemRelease, 10020},
    {"cuMemAddressReserve", (void *)cuMemAddressReserve, 10020},
    {"cuMemAddressFree", (void *)cuMemAddressFree, 10020},
    {"cuMemMap", (void *)cuMemMap, 10020},
    {"cuMemUnmap", (void *)cuMemUnmap, 10020},
    {"cuMemSetAccess", (void *)cuMemSetAccess, 10020},
};

} // namespace

extern "C" {

/* ---- versions and devices ------------------------------------------------- */

cudaError_t cudaDriverGetVersion(int *version)
{
    std::unique_lock<std::mutex> lock = locked();
    int error;
    if (take_fault("cudaDriverGetVersion", &error))
        return failed((cudaError_t)error);
    *version = configured.no_driver ? 0 : configured.driver_version;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    std::unique_lock<std::mutex> lock = locked();
    int error;
    if (take_fault("cudaRuntimeGetVersion", &error))
        return failed((cudaError_t)error);
    *version = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *count)
{
    EMU_ENTER("cudaGetDeviceCount");
    *count = configured.devices;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    EMU_ENTER("cudaSetDevice");
    if (device < 0 || device >= configured.devices)
        return failed(cudaErrorInvalidDevice);
    use_context(device);
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *device)
{
    EMU_ENTER("cudaGetDevice");
    *device = self().device;
    return cudaSuccess;
}

/* A context is its device's number; each device has one. */
CUresult cuCtxGetCurrent(CUcontext *context)
{
    std::unique_lock<std::mutex> lock = locked();
    if (CUresult refused = enter_driver("cuCtxGetCurrent"))
        return refused;
    *context = self().context < 0 ? nullptr : as_handle<CUcontext>((uint64_t)self().context + 1);
    return CUDA_SUCCESS;
}

CUresult cuCtxSetCurrent(CUcontext context)
{
    std::unique_lock<std::mutex> lock = locked();
    if (CUresult refused = enter_driver("cuCtxSetCurrent"))
        return refused;
    int device = (int)(uintptr_t)context - 1;
    if (device >= 0 && !the->contexts.count(device)) {
        finding("cuCtxSetCurrent of a context that does not exist");
        return CUDA_ERROR_INVALID_CONTEXT;
    }
    self().context = device;
    if (device >= 0)
        self().device = device;
    return CUDA_SUCCESS;
}

cudaError_t cudaDeviceSynchronize(void)
{
    EMU_ENTER("cudaDeviceSynchronize");
    bool dropped;
    std::string what = take_wait("cudaDeviceSynchronize", &dropped);
    int device = self().device;
    vclock clock;
    if (cudaError_t captured = refused_on_device(device))
        return failed(captured);
    if (dropped)
        return cudaSuccess;
    for (const stream_ref &queue : the->queues)
        if (queue->device == device)
            join(clock, queue->clock);
    if (!drain(lock, device, what))
        return failed(the->broken);
    learn(self(), clock);
    return cudaSuccess;
}

/* ---- streams ---------------------------------------------------------------- */

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *out, unsigned flags)
{
    EMU_ENTER("cudaStreamCreateWithFlags");
    return create_stream(out, flags);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *out, unsigned flags, int priority)
{
    EMU_ENTER("cudaStreamCreateWithPriority");
    (void)priority; /* any is legal, and the schedule is drawn by lot */
    return create_stream(out, flags);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    EMU_ENTER("cudaDeviceGetStreamPriorityRange");
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t handle)
{
    EMU_ENTER("cudaStreamDestroy");
    auto found = the->streams.find((uint64_t)(uintptr_t)handle);
    if (found == the->streams.end()) {
        finding("cudaStreamDestroy of a stream that is not open");
        return failed(cudaErrorInvalidResourceHandle);
    }
    if (found->second->recording)
        finding("cudaStreamDestroy of a stream that is captured");
    the->streams.erase(found); /* what is enqueued still runs */
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle)
{
    EMU_ENTER("cudaStreamSynchronize");
    bool dropped;
    stream_ref on = find_stream(handle, "cudaStreamSynchronize");
    std::string what = take_wait("cudaStreamSynchronize", &dropped);
    if (!on)
        return failed(cudaErrorInvalidResourceHandle);
    if (cudaError_t captured = refused_to_wait(on))
        return failed(captured);
    if (dropped)
        return cudaSuccess;
    settle_legacy(handle, on, "cudaStreamSynchronize");
    return synchronize(lock, on, what);
}

cudaError_t cudaStreamQuery(cudaStream_t handle)
{
    EMU_ENTER("cudaStreamQuery");
    stream_ref on = find_stream(handle, "cudaStreamQuery");
    if (!on)
        return failed(cudaErrorInvalidResourceHandle);
    if (cudaError_t captured = refused_to_wait(on))
        return failed(captured);
    if (the->random() & 1)
        step();
    if (on->completed < on->enqueued)
        return failed(cudaErrorNotReady);
    learn(self(), on->clock);
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned flags)
{
    EMU_ENTER("cudaStreamWaitEvent");
    bool dropped;
    stream_ref on = find_stream(handle, "cudaStreamWaitEvent");
    std::string what = take_wait("cudaStreamWaitEvent", &dropped);
    std::shared_ptr<event> waited = find_event(event_handle, what);
    if (!on || !waited || flags)
        return failed(flags ? cudaErrorInvalidValue : cudaErrorInvalidResourceHandle);
    if (cudaError_t captured = refused_on(on))
        return failed(captured);
    if (dropped)
        return cudaSuccess;
    bool in_capture;
    if (cudaError_t captured = record_wait(on, *waited, &in_capture))
        return failed(captured);
    if (in_capture || !waited->on)
        return cudaSuccess;
    operation made = begin(on, site_number(what));
    made.after.push_back({waited->on, waited->position});
    join(on->clock, waited->clock);
    submit(on, std::move(made));
    return cudaSuccess;
}

/* ---- events ------------------------------------------------------------------- */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *out, unsigned flags)
{
    EMU_ENTER("cudaEventCreateWithFlags");
    if (!out || flags & ~(unsigned)(cudaEventBlockingSync | cudaEventDisableTiming))
        return failed(cudaErrorInvalidValue);
    std::shared_ptr<event> made = std::make_shared<event>();
    made->device = self().device;
    uint64_t number = the->next_handle++;
    the->events[number] = made;
    *out = as_handle<cudaEvent_t>(number);
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t handle)
{
    EMU_ENTER("cudaEventDestroy");
    if (!find_event(handle, "cudaEventDestroy"))
        return failed(cudaErrorInvalidResourceHandle);
    the->events.erase((uint64_t)(uintptr_t)handle);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle)
{
    EMU_ENTER("cudaEventRecord");
    stream_ref on = find_stream(stream_handle, "cudaEventRecord");
    std::string what = take_place("cudaEventRecord");
    std::shared_ptr<event> recorded = find_event(handle, what);
    if (!on || !recorded)
        return failed(cudaErrorInvalidResourceHandle);
    if (recorded->device != on->device) {
        finding("event of device " + std::to_string(recorded->device) + " on a stream of device " +
                std::to_string(on->device) + ": " + what);
        return failed(cudaErrorInvalidResourceHandle);
    }
    if (cudaError_t captured = refused_on(on))
        return failed(captured);
    if (on->recording) {
        record_event(on, recorded.get());
        return cudaSuccess;
    }
    operation made = begin(on, site_number(what));
    recorded->recorded = nullptr;
    recorded->on = on;
    recorded->position = on->enqueued + 1;
    recorded->clock = on->clock;
    submit(on, std::move(made));
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t handle)
{
    EMU_ENTER("cudaEventQuery");
    std::shared_ptr<event> asked = find_event(handle, "cudaEventQuery");
    if (!asked)
        return failed(cudaErrorInvalidResourceHandle);
    if (cudaError_t captured = refused_event(*asked))
        return failed(captured);
    if (the->random() & 1)
        step();
    if (asked->on && asked->on->completed < asked->position)
        return failed(cudaErrorNotReady);
    learn(self(), asked->clock);
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle)
{
    EMU_ENTER("cudaEventSynchronize");
    bool dropped;
    std::string what = take_wait("cudaEventSynchronize", &dropped);
    std::shared_ptr<event> found = find_event(handle, what);
    if (!found)
        return failed(cudaErrorInvalidResourceHandle);
    if (cudaError_t captured = refused_event(*found))
        return failed(captured);
    event waited = *found;
    if (dropped || !waited.on)
        return cudaSuccess;
    if (!wait_for(lock, what, [&] { return waited.on->completed >= waited.position; }))
        return failed(the->broken);
    learn(self(), waited.clock);
    return cudaSuccess;
}

/* ---- errors --------------------------------------------------------------------- */

cudaError_t cudaPeekAtLastError(void)
{
    std::unique_lock<std::mutex> lock = locked();
    if (configured.no_driver || configured.driver_version < CUDART_VERSION)
        return cudaErrorInsufficientDriver;
    return the->broken != cudaSuccess ? the->broken : self().last_error;
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t error = cudaPeekAtLastError();
    std::unique_lock<std::mutex> lock = locked();
    self().last_error = cudaSuccess;
    return error;
}

const char *cudaGetErrorName(cudaError_t error)
{
    for (const error_text &known : errors)
        if (known.error == error)
            return known.name;
    return "unrecognized error code";
}

const char *cudaGetErrorString(cudaError_t error)
{
    for (const error_text &known : errors)
        if (known.error == error)
            return known.text;
    return "unrecognized error code";
}

/* ---- the driver's functions -------------------------------------------------------- */

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, cudaDriverEntryPointQueryResult *result)
{
    EMU_ENTER("cudaGetDriverEntryPointByVersion");
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    if (!name || !function || flags)
        return failed(cudaErrorInvalidValue);
    *function = nullptr;
    for (const entry_point &known : entry_points)
        if (strcmp(known.name, name) == 0) {
            found = version < known.since ? cudaDriverEntryPointVersionNotSufficent : cudaDriverEntryPointSuccess;
            *function = found == cudaDriverEntryPointSuccess ? known.function : nullptr;
        }
    if (result)
        *result = found;
    return cudaSuccess;
}

} // extern "C"
