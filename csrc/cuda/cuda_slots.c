/*
 * Handles of physical memory and their mappings; see cuda_slots.h.
 */
#include "cuda_slots.h"

#include <stdint.h>
#include <string.h>

static zc_status attribute(const cuda_slots *slots, CUdevice_attribute which, int *out)
{
    CUdevice device;
    CUDA_DRIVER_TRY(&slots->driver, slots->ordinal, cuDeviceGet, &device, slots->ordinal);
    CUDA_DRIVER_TRY(&slots->driver, slots->ordinal, cuDeviceGetAttribute, out, which, device);
    return ZC_OK;
}

zc_status cuda_slots_open(cuda_slots *slots, int ordinal)
{
    int exportable, rdma;
    memset(slots, 0, sizeof *slots);
    slots->ordinal = ordinal;
    ZC_TRY(cuda_driver_open(ordinal, &slots->driver));
    ZC_TRY(attribute(slots, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, &slots->supported));
    if (!slots->supported)
        return ZC_OK;
    ZC_TRY(attribute(slots, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, &exportable));
    ZC_TRY(attribute(slots, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, &rdma));
    slots->properties = (CUmemAllocationProp){
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = exportable ? CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR : CU_MEM_HANDLE_TYPE_NONE,
        .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = ordinal},
        .allocFlags.gpuDirectRDMACapable = rdma != 0,
    };
    /* The recommended step, not the least: memory that is registered with NCCL has to have it. */
    CUDA_DRIVER_TRY(&slots->driver, ordinal, cuMemGetAllocationGranularity, &slots->step_bytes, &slots->properties,
                    CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
    return ZC_OK;
}

/*
 * Some systems say that memory can be exported and then refuse to make any (WSL,
 * containers); plain memory serves all but registration.
 */
static CUresult create(cuda_slots *slots, size_t bytes, CUmemGenericAllocationHandle *handle)
{
    CUresult result = slots->driver.cuMemCreate(handle, bytes, &slots->properties, 0);
    int plain = slots->properties.requestedHandleTypes == CU_MEM_HANDLE_TYPE_NONE &&
                !slots->properties.allocFlags.gpuDirectRDMACapable;
    if (result == CUDA_SUCCESS || result == CUDA_ERROR_OUT_OF_MEMORY || plain)
        return result;
    slots->properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_NONE;
    slots->properties.allocFlags.gpuDirectRDMACapable = 0;
    return slots->driver.cuMemCreate(handle, bytes, &slots->properties, 0);
}

/* Maps the handle at a reserved address, for this GPU to read and write. */
static zc_status map_at(const cuda_slots *slots, CUmemGenericAllocationHandle handle, size_t bytes, CUdeviceptr at)
{
    const cuda_driver *driver = &slots->driver;
    CUmemAccessDesc access = {.location = slots->properties.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUDA_DRIVER_TRY(driver, slots->ordinal, cuMemMap, at, bytes, 0, handle, 0);
    CUresult result = driver->cuMemSetAccess(at, bytes, &access, 1);
    if (result != CUDA_SUCCESS) {
        driver->cuMemUnmap(at, bytes);
        return cuda_driver_fail(driver, result, slots->ordinal, "cuMemSetAccess");
    }
    return ZC_OK;
}

static zc_status map(const cuda_slots *slots, CUmemGenericAllocationHandle handle, size_t bytes, void **out)
{
    const cuda_driver *driver = &slots->driver;
    CUdeviceptr at = 0;
    *out = NULL;
    CUDA_DRIVER_TRY(driver, slots->ordinal, cuMemAddressReserve, &at, bytes, 0, 0, 0);
    zc_status status = map_at(slots, handle, bytes, at);
    if (status != ZC_OK) {
        driver->cuMemAddressFree(at, bytes);
        return status;
    }
    *out = (void *)(uintptr_t)at;
    return ZC_OK;
}

zc_status cuda_slots_alloc(cuda_slots *slots, size_t bytes, device_slot *out)
{
    CUmemGenericAllocationHandle handle;
    memset(out, 0, sizeof *out);
    CUresult result = create(slots, bytes, &handle);
    if (result == CUDA_ERROR_OUT_OF_MEMORY)
        return cuda_no_room(slots->ordinal, bytes, "it was to hold units of stage 3: use smaller units, a smaller "
                            "prefetch or more GPUs");
    if (result != CUDA_SUCCESS)
        return cuda_driver_fail(&slots->driver, result, slots->ordinal, "cuMemCreate");
    void *base;
    zc_status status = map(slots, handle, bytes, &base);
    if (status != ZC_OK) {
        slots->driver.cuMemRelease(handle);
        return status;
    }
    *out = (device_slot){.base = base, .bytes = bytes, .handle = handle};
    return ZC_OK;
}

zc_status cuda_slots_map(const cuda_slots *slots, const device_slot *slot, size_t bytes, void **out)
{
    return map(slots, slot->handle, bytes, out);
}

void cuda_slots_unmap(const cuda_slots *slots, void *memory, size_t bytes)
{
    slots->driver.cuMemUnmap((CUdeviceptr)(uintptr_t)memory, bytes);
    slots->driver.cuMemAddressFree((CUdeviceptr)(uintptr_t)memory, bytes);
}

void cuda_slots_free(const cuda_slots *slots, device_slot *slot)
{
    if (!slot->base)
        return;
    cuda_slots_unmap(slots, slot->base, slot->bytes);
    slots->driver.cuMemRelease(slot->handle);
    memset(slot, 0, sizeof *slot);
}
