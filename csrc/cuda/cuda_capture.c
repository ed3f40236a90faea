/*
 * Asking streams; see cuda_capture.h.
 */
#include "cuda_capture.h"

zc_status cuda_capture_of(int ordinal, cudaStream_t stream, uint64_t *graph)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    *graph = 0;
    CUDA_TRY(ordinal, cudaStreamGetCaptureInfo, stream, &status, &id, NULL, NULL, NULL, NULL);
    if (status == cudaStreamCaptureStatusInvalidated)
        return zc_fail(ZC_ESTATE, "the CUDA graph that is captured on GPU %d is void, because of an earlier call that a "
                       "capture does not allow; end the capture", ordinal);
    *graph = status == cudaStreamCaptureStatusActive ? id : 0;
    return ZC_OK;
}

zc_status cuda_capture_refuse(int ordinal, cudaStream_t stream, const char *what)
{
    uint64_t graph;
    ZC_TRY(cuda_capture_of(ordinal, stream, &graph));
    if (!graph)
        return ZC_OK;
    return zc_fail(ZC_ESTATE, "%s while its stream is captured into a CUDA graph on GPU %d, where nothing runs; do it "
                   "before the capture, or after it", what, ordinal);
}

int cuda_capture_seen(cudaStream_t stream)
{
    enum cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    cudaError_t error = cudaStreamIsCapturing(stream, &status);
    if (error != cudaSuccess)
        cudaGetLastError();
    return error != cudaSuccess || status != cudaStreamCaptureStatusNone;
}
