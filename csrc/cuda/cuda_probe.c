/*
 * Versions, GPUs and their abilities; see cuda_probe.h.
 */
#include "cuda_probe.h"

#include "cuda_error.h"

#include <string.h>

#define LEAST_SM 80 /* the oldest that the kernels are compiled for */
#define LEAST_DRIVER "580"

#define MAJOR(version) ((version) / 1000)
#define MINOR(version) ((version) % 1000 / 10)

static zc_status check_driver(zc_cuda_probe *probe)
{
    CUDA_TRY(0, cudaDriverGetVersion, &probe->driver_version);
    CUDA_TRY(0, cudaRuntimeGetVersion, &probe->runtime_version);
    if (probe->driver_version == 0)
        return zc_fail(ZC_ESTATE, "no NVIDIA driver was found on this machine; to use GPUs install driver "
                       LEAST_DRIVER " or newer (in a container: start it with GPUs), otherwise use the CPU");
    if (MAJOR(probe->driver_version) < MAJOR(probe->runtime_version))
        return zc_fail(ZC_ESTATE, "the NVIDIA driver supports CUDA up to %d.%d, but zero_c was built with CUDA %d.%d; "
                       "install driver " LEAST_DRIVER " or newer", MAJOR(probe->driver_version),
                       MINOR(probe->driver_version), MAJOR(probe->runtime_version), MINOR(probe->runtime_version));
    return ZC_OK;
}

static zc_status check_gpu(const cuda_driver *driver, int ordinal, zc_cuda_gpu *out)
{
    int major, minor;
    CUdevice device;
    CUDA_TRY(ordinal, cudaDeviceGetAttribute, &major, cudaDevAttrComputeCapabilityMajor, ordinal);
    CUDA_TRY(ordinal, cudaDeviceGetAttribute, &minor, cudaDevAttrComputeCapabilityMinor, ordinal);
    CUDA_DRIVER_TRY(driver, ordinal, cuDeviceGet, &device, ordinal);
    CUDA_DRIVER_TRY(driver, ordinal, cuDeviceGetAttribute, &out->slots,
                    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device);
    out->sm = 10 * major + minor;
    return ZC_OK;
}

zc_status cuda_probe(zc_cuda_probe *out)
{
    cuda_driver driver;
    memset(out, 0, sizeof *out);
    ZC_TRY(check_driver(out));
    cudaError_t error = cudaGetDeviceCount(&out->gpus);
    if (error == cudaErrorNoDevice || (error == cudaSuccess && out->gpus == 0)) {
        out->gpus = 0;
        cudaGetLastError();
        return zc_fail(ZC_ESTATE, "there is an NVIDIA driver, but no GPU that this process may use; look at nvidia-smi "
                       "and at the environment variable CUDA_VISIBLE_DEVICES");
    }
    if (error != cudaSuccess)
        return cuda_fail(error, 0, "cudaGetDeviceCount");
    if (out->gpus > ZC_CUDA_MAX_GPUS)
        out->gpus = ZC_CUDA_MAX_GPUS;
    ZC_TRY(cuda_driver_open(0, &driver));
    for (int i = 0; i < out->gpus; i++)
        ZC_TRY(check_gpu(&driver, i, &out->gpu[i]));
    return ZC_OK;
}

zc_status cuda_probe_gpu(int ordinal)
{
    zc_cuda_probe probe;
    ZC_TRY(cuda_probe(&probe));
    if (ordinal < 0 || ordinal >= probe.gpus)
        return zc_fail(ZC_EINVAL, "there is no GPU %d; this process sees %d, numbered from 0 (CUDA_VISIBLE_DEVICES "
                       "decides which)", ordinal, probe.gpus);
    int sm = probe.gpu[ordinal].sm;
    if (sm < LEAST_SM)
        return zc_fail(ZC_EINVAL, "GPU %d has compute capability %d.%d; zero_c needs %d.%d or newer", ordinal, sm / 10,
                       sm % 10, LEAST_SM / 10, LEAST_SM % 10);
    return ZC_OK;
}
