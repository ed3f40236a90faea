/*
 * The table between the core and its CUDA part, a shared library of its own, so
 * that the core builds, loads and runs on machines without CUDA.
 *
 * The library exports one function, zc_cuda_plugin_get.  The core gives it a
 * table of what lives in the core only, and gets the table of what the library
 * offers.  Both tables begin with the number of this interface and their size;
 * each side looks at the other's before it uses anything else.  Everything else
 * goes through the interfaces of device.h and comm.h, compiled from the same
 * sources on both sides, which is why a change of those counts as one of this.
 *
 * No header of CUDA is needed to include this one.
 */
#ifndef CUDA_PLUGIN_H
#define CUDA_PLUGIN_H

#include "nccl_comm.h"
#include "zc_status.h"

#include <stddef.h>
#include <stdint.h>

#define ZC_CUDA_PLUGIN_ABI 3u

/* The core's: the last sentence of a thread is kept there, and faults are counted there. */
typedef struct zc_cuda_host {
    uint32_t abi;   /* ZC_CUDA_PLUGIN_ABI */
    uint32_t bytes; /* sizeof(zc_cuda_host) */
    void (*fail)(const char *sentence); /* becomes this thread's last error */
    const char *(*last_error)(void);
    int (*fault)(void);
} zc_cuda_host;

typedef struct zc_cuda_gpu {
    int sm;    /* compute capability: 90 is 9.0 */
    int slots; /* has virtual memory management: units of stage 3 share the memory of few slots */
} zc_cuda_gpu;

#define ZC_CUDA_MAX_GPUS 64

typedef struct zc_cuda_probe {
    int driver_version;  /* newest CUDA that the driver supports, as 13000 for 13.0; 0: there is no driver */
    int runtime_version; /* CUDA that the library was built with */
    int gpus;
    zc_cuda_gpu gpu[ZC_CUDA_MAX_GPUS];
} zc_cuda_probe;

typedef struct zc_cuda_plugin {
    uint32_t abi;   /* ZC_CUDA_PLUGIN_ABI */
    uint32_t bytes; /* sizeof(zc_cuda_plugin) */
    /* Fails with what is missing (a driver, a GPU) and what to do. Makes no context. */
    zc_status (*probe)(zc_cuda_probe *out);
    zc_status (*device_create)(int ordinal, zc_device **out);
    zc_status (*comm_create)(const nccl_comm_config *config, zc_comm **out);
} zc_cuda_plugin;

/* NULL: `host` is of another version, or NULL. The table is static. */
__attribute__((visibility("default"))) const zc_cuda_plugin *zc_cuda_plugin_get(const zc_cuda_host *host);

#endif
