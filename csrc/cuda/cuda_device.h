/*
 * The CUDA device: device.h on one GPU.  Its zc_stream is a cudaStream_t of that
 * GPU; NULL is the legacy default stream.
 *
 * Every call may come from any thread, with any GPU current, and leaves that as
 * it was.  A stream that was passed to the device must exist until the device is
 * destroyed, or has been forgotten.
 */
#ifndef CUDA_DEVICE_H
#define CUDA_DEVICE_H

#include "cu.h"
#include "device.h"

/* ZC_ESTATE without a usable driver, ZC_EINVAL if there is no such GPU or it is too old. */
zc_status cuda_device_create(int ordinal, zc_device **out);

/*
 * Memory that is freed is kept until all work has passed that was enqueued before
 * on this stream, as on the streams that device operations are given: for streams
 * on which others use the device's memory.
 */
void cuda_device_use_stream(zc_device *device, cudaStream_t stream);
/* Before the stream is destroyed; its work on the device's memory is done. */
void cuda_device_forget_stream(zc_device *device, cudaStream_t stream);

#endif
