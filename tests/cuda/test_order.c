/*
 * device.h's `order` on a GPU: what is enqueued on one stream runs after what
 * another one has, and on every schedule something is missed without it.
 */
#include "cuda_device.h"
#include "emu.h"
#include "testing.h"

#define BYTES ((size_t)1 << 16)

static char report[1 << 14];

static zc_stream *as_stream(cudaStream_t stream)
{
    return (zc_stream *)(void *)stream;
}

/* Writes on one stream, reads on the other. */
static void hand_over(zc_device *device, zc_stream *before, zc_stream *after, int ordered)
{
    static char host[BYTES];
    void *from, *to;
    CHECK_OK(device->ops->alloc(device, BYTES, &from));
    CHECK_OK(device->ops->alloc(device, BYTES, &to));
    CHECK_OK(device->ops->fill(device, before, from, 7, BYTES));
    if (ordered)
        CHECK_OK(device->ops->order(device, before, after));
    CHECK_OK(device->ops->copy(device, after, to, from, BYTES));
    CHECK_OK(device->ops->download(device, after, host, to, BYTES));
    if (ordered)
        CHECK(host[0] == 7 && host[BYTES - 1] == 7);
    CHECK_OK(device->ops->synchronize(device, before));
    device->ops->free(device, from, BYTES);
    device->ops->free(device, to, BYTES);
}

static void live(uint64_t seed, int ordered)
{
    static const int eager[] = {0, 3, -1};
    zc_device *device;
    cudaStream_t made;
    emu_reset(seed, eager[seed % 3], 1);
    CHECK_OK(cuda_device_create(0, &device));
    CHECK_EQ(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), cudaSuccess);
    hand_over(device, as_stream(made), NULL, ordered);
    hand_over(device, NULL, as_stream(made), ordered);
    device->ops->destroy(device);
    CHECK_EQ(cudaStreamDestroy(made), cudaSuccess);
    CHECK_EQ(emu_leaks(report, sizeof report), 0);
}

static void ordered_streams(void)
{
    for (uint64_t seed = 0; seed < 30; seed++) {
        live(seed, 1);
        CHECK_EQ(emu_findings(report, sizeof report), 0);
    }
}

static void streams_are_not_ordered_otherwise(void)
{
    for (uint64_t seed = 0; seed < 30; seed++) {
        live(seed, 0);
        CHECK(emu_findings(report, sizeof report) > 0);
    }
}

int main(void)
{
    RUN(ordered_streams);
    RUN(streams_are_not_ordered_otherwise);
    DONE();
}
