/*
 * The device and communicator on which an engine runs that is not on the CPU's
 * own: the deferring pair, or, with ON_CUDA, a GPU of the emulated CUDA and NCCL.
 * Host memory of a test goes there with elsewhere_put, which takes it over.  With
 * elsewhere_own_slots devices cannot give memory several addresses, from the next
 * elsewhere_begin on.  With ON_HOSTS in the environment GPUs' ranks are on two hosts,
 * as far as they can tell: they meet through sockets.
 */
#ifndef ELSEWHERE_H
#define ELSEWHERE_H

#include "testing.h"
#include "zero_c.h"

static int elsewhere_own_slots;

#if defined(ON_CUDA)

#include "cuda_device.h"
#include "emu.h"
#include "nccl_comm.h"

#include <pthread.h>
#include <sys/socket.h>
#include <unistd.h>

#define ELSEWHERE 1

static uint64_t elsewhere_seed = 1;
static int elsewhere_differs;

/* Whether ranks differ on purpose: between hosts NCCL may see that before any rank is told. */
static inline void elsewhere_expect_difference(int on)
{
    elsewhere_differs = on;
}

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
    int findings = emu_findings(text, sizeof text);
    if (findings && !(findings == 1 && elsewhere_differs && getenv("ON_HOSTS") && strstr(text, "ranks disagree: ") == text)) {
        fprintf(stderr, "seed %" PRIu64 ":\n%s\n", elsewhere_seed - 1, text);
        CHECK(!"no findings");
    }
    if (emu_leaks(text, sizeof text)) {
        fprintf(stderr, "left behind:\n%s\n", text);
        CHECK(!"no leaks");
    }
}

static inline void *elsewhere_open_on_host(void *config)
{
    zc_comm *comm = NULL;
    CHECK_OK(hub_comm_open(config, &comm));
    return comm;
}

/* Communicators for ranks that are threads, which those of GPUs are made of. */
static inline void elsewhere_open(size_t ranks, double timeout_s, zc_comm **comms)
{
    enum { MOST = 8 };
    size_t hosts[MOST];
    int hub[MOST], guest[MOST];
    pthread_t threads[MOST];
    hub_comm_config configs[MOST];
    if (!getenv("ON_HOSTS")) {
        CHECK_OK(zc_comm_open_local(ranks, timeout_s, comms));
        return;
    }
    for (size_t r = 0; r < ranks; r++) {
        int pair[2];
        CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
        hub[r] = pair[0];
        guest[r] = pair[1];
        hosts[r] = r % 2;
        configs[r] = (hub_comm_config){.rank = r, .ranks = ranks, .hosts = hosts, .sockets = r ? &guest[r] : hub,
                                       .timeout_ns = (uint64_t)(timeout_s * 1e9)};
    }
    close(hub[0]); /* rank 0 needs none to itself */
    close(guest[0]);
    for (size_t r = 0; r < ranks; r++)
        pthread_create(&threads[r], NULL, elsewhere_open_on_host, &configs[r]);
    for (size_t r = 0; r < ranks; r++) {
        void *comm;
        pthread_join(threads[r], &comm);
        comms[r] = comm;
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

static inline void elsewhere_expect_difference(int on)
{
    (void)on;
}

static inline void elsewhere_begin(void)
{
    defer_own_slots = elsewhere_own_slots;
}

static inline void elsewhere_end(void)
{
}

static inline void elsewhere_open(size_t ranks, double timeout_s, zc_comm **comms)
{
    CHECK_OK(zc_comm_open_local(ranks, timeout_s, comms));
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
