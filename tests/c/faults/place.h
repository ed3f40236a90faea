/*
 * Where a rank's engine and its gradients are: in the CPU's memory, or, with ON_CUDA, on a GPU of the emulated CUDA, with
 * NCCL between processes.
 */
#ifndef PLACE_H
#define PLACE_H

#include "zero_c.h"

#if defined(ON_CUDA)

#include "cuda_device.h"
#include "emu.h"
#include "nccl_comm.h"

#include <string.h>

#define PLACE_PARAMS 8

static zc_comm *place_comm;
static zc_device *place_memory; /* of the rank's own arrays */
static void *place_array[PLACE_PARAMS];
static size_t place_bytes[PLACE_PARAMS];

/* What fails here fails in the middle of what the ranks do together. */
static zc_status place_try(zc_status status)
{
    return comm_give_up(place_comm, "the rank's own program", status);
}

/* From a communicator of the host to one of GPUs; *comm NULL: there is none any more. */
static zc_status place_join(zc_comm **comm)
{
    zc_comm *host = *comm;
    int gpu = (int)host->rank;
    *comm = NULL;
    emu_nccl_processes(1);
    emu_reset(1, 3, 1);
    ZC_TRY(nccl_comm_create(&(nccl_comm_config){.host = host, .ordinal = gpu, .deterministic = 1}, comm));
    place_comm = *comm;
    return place_try(cuda_device_create(gpu, &place_memory));
}

/* A gradient where the engine takes it; it stays until the next one of this parameter. */
static zc_status place_grad(size_t param, const void *values, size_t bytes, const void **there)
{
    if (!place_array[param]) {
        ZC_TRY(place_try(place_memory->ops->alloc(place_memory, bytes, &place_array[param])));
        place_bytes[param] = bytes;
    }
    *there = place_array[param];
    return place_try(place_memory->ops->upload(place_memory, NULL, place_array[param], values, bytes));
}

/* `values`, for the CPU to read; `room` is as large. */
static zc_status place_read(const void *values, void *room, size_t bytes, const float **here)
{
    *here = room;
    return place_try(place_memory->ops->download(place_memory, NULL, room, values, bytes));
}

/* Before the communicator is closed. */
static void place_leave(void)
{
    for (size_t i = 0; i < PLACE_PARAMS; i++)
        if (place_array[i])
            place_memory->ops->free(place_memory, place_array[i], place_bytes[i]);
    if (place_memory)
        place_memory->ops->destroy(place_memory);
}

/* What was wrong on the GPU, and what is left there when everything is closed, in lines; how many. */
static size_t place_complaints(char *text, size_t room_bytes)
{
    int found = emu_findings(text, room_bytes);
    size_t used = strlen(text);
    found += emu_leaks(text + used, room_bytes - used);
    emu_reset(1, 3, 1); /* an id that NCCL has made and no rank has used is in a descriptor, and nothing gives it back */
    return (size_t)found;
}

#else

static inline zc_status place_join(zc_comm **comm)
{
    (void)comm;
    return ZC_OK;
}

static inline zc_status place_grad(size_t param, const void *values, size_t bytes, const void **there)
{
    (void)param, (void)bytes;
    *there = values;
    return ZC_OK;
}

static inline zc_status place_read(const void *values, void *room, size_t bytes, const float **here)
{
    (void)room, (void)bytes;
    *here = values;
    return ZC_OK;
}

static inline void place_leave(void)
{
}

static inline size_t place_complaints(char *text, size_t room_bytes)
{
    (void)text, (void)room_bytes;
    return 0;
}

#endif

#endif
