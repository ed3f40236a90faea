/*
 * The device and communicator on which an engine runs that is not on the CPU's
 * own: the deferring pair, or, with ON_CUDA, a GPU of the emulated CUDA and NCCL.
 * Host memory of a test goes there with elsewhere_put, which takes it over.  With
 * elsewhere_own_slots devices cannot give memory several addresses, from the next
 * elsewhere_begin on.
 */
#ifndef ELSEWHERE_H
#define ELSEWHERE_H

#include "testing.h"

static int elsewhere_own_slots;

#if defined(ON_CUDA)

#include "cuda_device.h"
#include "emu.h"
#include "nccl_comm.h"

#define ELSEWHERE 1

static uint64_t elsewhere_seed = 1;

/* A machine for the ranks of one run; no rank of an earlier one is alive. */
static inline void elsewhere_begin(void)
{
    static const int eager[] = {0, 3, -1};
    emu_set_attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, !elsewhere_own_slots);
    emu_reset(elsewhere_seed, eager[elsewhere_seed % 3], 1);
    elsewhere_seed++;
}

/* Everything was in order, and nothing is left. */
static inline void elsewhere_end(void)
{
    char text[4096];
    if (emu_findings(text, sizeof text)) {
        fprintf(stderr, "seed %" PRIu64 ":\n%s\n", elsewhere_seed - 1, text);
        CHECK(!"no findings");
    }
    if (emu_leaks(text, sizeof text)) {
        fprintf(stderr, "left behind:\n%s\n", text);
        CHECK(!"no leaks");
    }
}

static inline void elsewhere_wrap(zc_comm *under, zc_comm **comm, zc_device **device, zc_stream **stream)
{
    int gpu = (int)under->rank;
    cudaStream_t made = NULL;
    CHECK_OK(nccl_comm_create(&(nccl_comm_config){.host = under, .ordinal = gpu, .deterministic = 1}, comm));
    CHECK_OK(cuda_device_create(gpu, device));
    CHECK_EQ(cudaSetDevice(gpu), cudaSuccess);
    if (elsewhere_seed % 2)
        CHECK_EQ(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking), cudaSuccess);
    *stream = (zc_stream *)(void *)made;
}

static inline void elsewhere_close(zc_comm *comm, zc_stream *stream)
{
    comm_close(comm);
    if (stream)
        CHECK_EQ(cudaStreamDestroy((cudaStream_t)(void *)stream), cudaSuccess);
}

static inline char *elsewhere_put(zc_device *device, zc_stream *stream, char *host, size_t bytes)
{
    void *there = NULL;
    if (!device)
        return host;
    CHECK_OK(device->ops->alloc(device, bytes + 8, &there));
    CHECK_OK(device->ops->upload(device, stream, there, host, bytes));
    free(host);
    return there;
}

static inline void elsewhere_free(zc_device *device, char *there, size_t bytes)
{
    if (device)
        device->ops->free(device, there, bytes + 8);
    else
        free(there);
}

#else

#include "defer.h"

#define ELSEWHERE 0

static inline void elsewhere_begin(void)
{
    defer_own_slots = elsewhere_own_slots;
}

static inline void elsewhere_end(void)
{
}

static inline void elsewhere_wrap(zc_comm *under, zc_comm **comm, zc_device **device, zc_stream **stream)
{
    *stream = NULL;
    defer_wrap(under, comm, device);
}

static inline void elsewhere_close(zc_comm *comm, zc_stream *stream)
{
    (void)stream;
    comm_close(comm);
}

static inline char *elsewhere_put(zc_device *device, zc_stream *stream, char *host, size_t bytes)
{
    (void)device, (void)stream, (void)bytes;
    return host;
}

static inline void elsewhere_free(zc_device *device, char *there, size_t bytes)
{
    (void)device, (void)bytes;
    free(there);
}

#endif

#endif
