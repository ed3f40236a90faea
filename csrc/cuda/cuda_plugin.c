/*
 * The one exported symbol of the CUDA part: see cuda_plugin.h.
 */
#include "cuda_plugin.h"

#include "cuda_device.h"
#include "cuda_probe.h"
#include "plugin_status.h"

static const zc_cuda_plugin plugin = {
    .abi = ZC_CUDA_PLUGIN_ABI,
    .bytes = sizeof(zc_cuda_plugin),
    .probe = cuda_probe,
    .device_create = cuda_device_create,
    .comm_create = nccl_comm_create,
};

const zc_cuda_plugin *zc_cuda_plugin_get(const zc_cuda_host *host)
{
    if (!host || host->abi != ZC_CUDA_PLUGIN_ABI || host->bytes != sizeof *host)
        return NULL;
    plugin_status_use(host);
    return &plugin;
}
