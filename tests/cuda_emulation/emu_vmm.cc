/*
 * The driver's virtual memory management, on memfd: a handle is a file, every
 * mapping of it is the same memory.  Rules are those of cuda.h's comments:
 * multiples of the granularity, offset 0, nothing mapped twice, no access before
 * cuMemSetAccess, whole mappings only are unmapped, a handle may be released
 * while it is mapped.  A broken rule gives the error and is a finding, except
 * where memory has run out.
 */
#include "emu_internal.h"

#include <cerrno>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

namespace emu {

static const size_t step_bytes = (size_t)2 << 20;

static CUresult refuse(const std::string &why)
{
    finding(why);
    return CUDA_ERROR_INVALID_VALUE;
}

static int attribute(int which)
{
    auto set = configured.attributes.find(which);
    if (set != configured.attributes.end())
        return set->second;
    switch (which) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
        return 2;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
        return 9;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
        return 0;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
        return 32;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        return 1024;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK:
        return 49152;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
        return 1;
    default:
        return 0;
    }
}

/* The mappings that make up exactly [address, address + bytes); empty if they do not. */
static std::vector<mapping *> exactly(CUdeviceptr address, size_t bytes)
{
    std::vector<mapping *> maps;
    for (size_t done = 0; done < bytes;) {
        auto found = the->maps.find((uintptr_t)address + done);
        if (found == the->maps.end() || !found->second.virtual_memory || found->second.bytes > bytes - done)
            return {};
        maps.push_back(&found->second);
        done += found->second.bytes;
    }
    return maps;
}

static bool anything_mapped(uintptr_t address, size_t bytes)
{
    for (const auto &map : the->maps)
        if (map.first < address + bytes && address < map.first + map.second.bytes)
            return true;
    return false;
}

} // namespace emu

using namespace emu;

extern "C" {

CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    std::unique_lock<std::mutex> lock = locked();
    if (CUresult refused = enter_driver("cuDeviceGet"))
        return refused;
    if (!device || ordinal < 0 || ordinal >= configured.devices)
        return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device)
{
    std::unique_lock<std::mutex> lock = locked();
    if (CUresult refused = enter_driver("cuDeviceGetAttribute"))
        return refused;
    if (!value || device < 0 || device >= configured.devices)
        return CUDA_ERROR_INVALID_DEVICE;
    *value = attribute(which);
    return CUDA_SUCCESS;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device)
{
    EMU_ENTER("cudaDeviceGetAttribute");
    if (!value || device < 0 || device >= configured.devices)
        return failed(cudaErrorInvalidDevice);
    *value = attribute(which); /* the driver's numbers */
    return cudaSuccess;
}

CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *prop,
                                       CUmemAllocationGranularity_flags which)
{
    std::unique_lock<std::mutex> lock = locked();
    (void)which; /* minimum and recommended are the same */
    if (CUresult refused = enter_driver("cuMemGetAllocationGranularity"))
        return refused;
    if (!bytes || !prop || prop->location.id < 0 || prop->location.id >= configured.devices)
        return refuse("cuMemGetAllocationGranularity for no device");
    *bytes = step_bytes;
    return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop,
                     unsigned long long flags)
{
    std::unique_lock<std::mutex> lock = locked();
    if (CUresult refused = enter_driver("cuMemCreate"))
        return refused;
    if (!handle || !prop || bytes == 0 || bytes % step_bytes || flags)
        return refuse("cuMemCreate of " + std::to_string(bytes) + " bytes, not a multiple of the granularity");
    int device = prop->location.id;
    if (prop->type != CU_MEM_ALLOCATION_TYPE_PINNED || prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
        device < 0 || device >= configured.devices)
        return refuse("cuMemCreate of memory that is not pinned on a device");
    if (!attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED))
        return CUDA_ERROR_NOT_SUPPORTED;
    int handle_type = (int)prop->requestedHandleTypes;
    if ((handle_type & ~CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) ||
        (handle_type && !attribute(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)))
        return CUDA_ERROR_NOT_SUPPORTED;
    if (prop->allocFlags.gpuDirectRDMACapable &&
        !attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED))
        return CUDA_ERROR_NOT_SUPPORTED;
    if (used_bytes(device) + bytes > device_bytes)
        return CUDA_ERROR_OUT_OF_MEMORY;
    int fd = memfd_create("emu", MFD_CLOEXEC);
    if (fd < 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    void *view = ftruncate(fd, (off_t)bytes) == 0
                     ? mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    if (view == MAP_FAILED) {
        close(fd);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    memset(view, 0xff, bytes);
    munmap(view, bytes);
    std::shared_ptr<physical> made = std::make_shared<physical>();
    made->id = ++the->physicals;
    made->device = device;
    made->bytes = bytes;
    made->fd = fd;
    *handle = the->next_handle++;
    the->handles[*handle] = made;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    std::unique_lock<std::mutex> lock = locked();
    if (CUresult refused = enter_driver("cuMemRelease"))
        return refused;
    auto found = the->handles.find(handle);
    if (found == the->handles.end())
        return refuse("cuMemRelease of a handle that is not held");
    std::shared_ptr<physical> memory = found->second;
    the->handles.erase(found);
    memory->released = true;
    if (memory->maps == 0)
        close(memory->fd);
    return CUDA_SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t bytes, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags)
{
    std::unique_lock<std::mutex> lock = locked();
    (void)wanted; /* a hint */
    if (CUresult refused = enter_driver("cuMemAddressReserve"))
        return refused;
    if (!address || bytes == 0 || bytes % step_bytes || flags || (alignment & (alignment - 1)))
        return refuse("cuMemAddressReserve of " + std::to_string(bytes) + " bytes, not a multiple of the granularity");
    size_t align = std::max(alignment, step_bytes), whole = bytes + align;
    char *at = (char *)mmap(nullptr, whole, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    char *start = (char *)(((uintptr_t)at + align - 1) / align * align);
    if (start > at)
        munmap(at, (size_t)(start - at));
    if (at + whole > start + bytes)
        munmap(start + bytes, (size_t)(at + whole - (start + bytes)));
    the->reserved[(uintptr_t)start] = bytes;
    *address = (CUdeviceptr)(uintptr_t)start;
    return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes)
{
    std::unique_lock<std::mutex> lock = locked();
    if (CUresult refused = enter_driver("cuMemAddressFree"))
        return refused;
    auto area = the->reserved.find((uintptr_t)address);
    if (area == the->reserved.end() || area->second != bytes)
        return refuse("cuMemAddressFree of something else than a whole reserved range");
    if (anything_mapped((uintptr_t)address, bytes))
        return refuse("cuMemAddressFree of a range in which memory is mapped");
    munmap((void *)(uintptr_t)address, bytes);
    the->reserved.erase(area);
    return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags)
{
    std::unique_lock<std::mutex> lock = locked();
    if (CUresult refused = enter_driver("cuMemMap"))
        return refused;
    auto found = the->handles.find(handle);
    if (found == the->handles.end())
        return refuse("cuMemMap of a handle that is not held");
    if (offset || flags || bytes == 0 || bytes % step_bytes || address % step_bytes)
        return refuse("cuMemMap with an offset, or of no multiple of the granularity");
    if (bytes > found->second->bytes)
        return refuse("cuMemMap of more bytes than the handle has");
    auto area = the->reserved.upper_bound((uintptr_t)address);
    if (area == the->reserved.begin() ||
        (uintptr_t)address + bytes > std::prev(area)->first + std::prev(area)->second)
        return refuse("cuMemMap outside of reserved ranges");
    if (anything_mapped((uintptr_t)address, bytes))
        return refuse("cuMemMap where memory is mapped already");
    void *at = (void *)(uintptr_t)address;
    if (mmap(at, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second->fd, 0) == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    mapping map = {};
    map.base = (char *)at;
    map.bytes = bytes;
    map.memory = found->second;
    map.virtual_memory = true;
    map.protection = PROT_NONE;
    found->second->maps++;
    the->maps[(uintptr_t)at] = map;
    return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t bytes)
{
    std::unique_lock<std::mutex> lock = locked();
    if (CUresult refused = enter_driver("cuMemUnmap"))
        return refused;
    std::vector<mapping *> maps = exactly(address, bytes);
    if (maps.empty())
        return refuse("cuMemUnmap of something else than whole mappings");
    for (mapping *map : maps)
        require_unused(lock, *map, "cuMemUnmap");
    for (mapping *map : maps) {
        std::shared_ptr<physical> memory = map->memory;
        mmap(map->base, map->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
        the->maps.erase((uintptr_t)map->base);
        if (--memory->maps == 0 && memory->released)
            close(memory->fd);
    }
    return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    std::unique_lock<std::mutex> lock = locked();
    if (CUresult refused = enter_driver("cuMemSetAccess"))
        return refused;
    std::vector<mapping *> maps = exactly(address, bytes);
    if (maps.empty() || !access || count == 0)
        return refuse("cuMemSetAccess of something else than whole mappings");
    for (size_t k = 0; k < count; k++)
        if (access[k].location.type != CU_MEM_LOCATION_TYPE_DEVICE || access[k].location.id < 0 ||
            access[k].location.id >= configured.devices)
            return refuse("cuMemSetAccess for no device");
    for (mapping *map : maps) {
        for (size_t k = 0; k < count; k++) {
            if (access[k].flags == CU_MEM_ACCESS_FLAGS_PROT_NONE) {
                require_unused(lock, *map, "cuMemSetAccess to no access");
                map->devices.erase(access[k].location.id);
            } else {
                map->devices.insert(access[k].location.id);
            }
            if (!map->devices.empty() && access[k].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE)
                map->protection = access[k].flags == CU_MEM_ACCESS_FLAGS_PROT_READ ? PROT_READ : PROT_READ | PROT_WRITE;
        }
        if (map->devices.empty())
            map->protection = PROT_NONE;
        mprotect(map->base, map->bytes, configured.protect ? PROT_NONE : map->protection);
    }
    return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **name)
{
    switch (error) {
    case CUDA_SUCCESS:
        *name = "CUDA_SUCCESS";
        return CUDA_SUCCESS;
    case CUDA_ERROR_INVALID_VALUE:
        *name = "CUDA_ERROR_INVALID_VALUE";
        return CUDA_SUCCESS;
    case CUDA_ERROR_OUT_OF_MEMORY:
        *name = "CUDA_ERROR_OUT_OF_MEMORY";
        return CUDA_SUCCESS;
    case CUDA_ERROR_INVALID_DEVICE:
        *name = "CUDA_ERROR_INVALID_DEVICE";
        return CUDA_SUCCESS;
    case CUDA_ERROR_NOT_SUPPORTED:
        *name = "CUDA_ERROR_NOT_SUPPORTED";
        return CUDA_SUCCESS;
    case CUDA_ERROR_UNKNOWN:
        *name = "CUDA_ERROR_UNKNOWN";
        return CUDA_SUCCESS;
    default:
        *name = nullptr;
        return CUDA_ERROR_INVALID_VALUE;
    }
}

} // extern "C"
