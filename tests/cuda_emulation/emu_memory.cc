/*
 * Memory of cudaMalloc and cudaMallocHost, and what is common to all mappings.
 *
 * An allocation ends where its last page ends, to within CUDA's alignment of 256
 * bytes, and has pages without access before and behind it.  It comes filled
 * with 0xFF: as floats NaN, as indices too big.  With emu_protect on, device
 * memory has no access but while operations run.
 */
#include "emu_internal.h"

#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

namespace emu {

static const size_t page_bytes = 4096;
static const size_t align_bytes = 256;

mapping *find_mapping(const void *memory)
{
    uintptr_t address = (uintptr_t)memory;
    auto next = the->maps.upper_bound(address);
    if (next == the->maps.begin())
        return nullptr;
    mapping &map = std::prev(next)->second;
    return address < (uintptr_t)map.base + map.bytes ? &map : nullptr;
}

kind kind_of(const void *memory)
{
    const mapping *map = find_mapping(memory);
    return !map ? kind::pageable : map->memory->host ? kind::pinned : kind::device;
}

bool translate(const void *memory, size_t bytes, int site, std::vector<range> *out)
{
    const char *address = (const char *)memory;
    while (bytes > 0) {
        mapping *map = find_mapping(address);
        if (!map) {
            finding("outside of every allocation: " + site_text(site));
            return false;
        }
        if (map->protection == PROT_NONE) {
            finding("before cuMemSetAccess gave access: " + site_text(site));
            return false;
        }
        size_t offset = (size_t)(address - map->base), part = std::min(bytes, map->bytes - offset);
        out->push_back({map, offset, offset + part});
        address += part;
        bytes -= part;
    }
    return true;
}

bool physically_overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes)
{
    std::vector<range> as, bs;
    if (a_bytes == 0 || b_bytes == 0 || kind_of(a) == kind::pageable || kind_of(b) == kind::pageable)
        return (uintptr_t)a < (uintptr_t)b + b_bytes && (uintptr_t)b < (uintptr_t)a + a_bytes;
    if (!translate(a, a_bytes, 0, &as) || !translate(b, b_bytes, 0, &bs))
        return false;
    for (const range &x : as)
        for (const range &y : bs)
            if (x.map->memory == y.map->memory && x.begin < y.end && y.begin < x.end)
                return true;
    return false;
}

size_t used_bytes(int device)
{
    std::set<const physical *> seen;
    size_t bytes = 0;
    for (const auto &map : the->maps)
        if (map.second.memory->device == device && !map.second.memory->host)
            seen.insert(map.second.memory.get());
    for (const auto &handle : the->handles)
        if (handle.second->device == device)
            seen.insert(handle.second.get());
    for (const physical *memory : seen)
        bytes += memory->bytes;
    return bytes;
}

/* ---- protection --------------------------------------------------------------- */

static void protect_all(bool open)
{
    for (auto &entry : the->maps) {
        const mapping &map = entry.second;
        char *page = (char *)((uintptr_t)map.base / page_bytes * page_bytes);
        if (!map.memory->host && map.protection != PROT_NONE)
            mprotect(page, (size_t)(map.base + map.bytes - page), open ? map.protection : PROT_NONE);
    }
}

unprotected::unprotected()
{
    if (configured.protect)
        protect_all(true);
}

unprotected::~unprotected()
{
    if (configured.protect)
        protect_all(false);
}

void require_unused(std::unique_lock<std::mutex> &lock, const mapping &map, const std::string &what)
{
    for (const auto &use : map.uses) {
        const stamp &last = use.second;
        if (!the->component_is_host[(size_t)last.component] && at(the->known, last.component) < last.time)
            finding(what + " of memory that may still be in use by " + site_text(last.site));
    }
    for (int device = 0; device < configured.devices; device++)
        if (map.devices.count(device))
            drain(lock, device, what);
}

/* ---- allocations -------------------------------------------------------------- */

static cudaError_t allocate(void **out, size_t bytes, bool host)
{
    int device = self().device;
    *out = nullptr;
    if (cudaError_t captured = refused_anywhere())
        return failed(captured);
    if (bytes == 0)
        return cudaSuccess;
    if (bytes > device_bytes || (!host && used_bytes(device) + bytes > device_bytes))
        return failed(cudaErrorMemoryAllocation);
    size_t whole = (bytes + page_bytes - 1) / page_bytes * page_bytes;
    size_t outer = whole + 2 * page_bytes;
    char *at = (char *)mmap(nullptr, outer, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
        return failed(cudaErrorMemoryAllocation);
    char *base = at + page_bytes + whole - (bytes + align_bytes - 1) / align_bytes * align_bytes;
    mprotect(at + page_bytes, whole, PROT_READ | PROT_WRITE);
    memset(at + page_bytes, 0xff, whole);
    if (configured.protect && !host)
        mprotect(at + page_bytes, whole, PROT_NONE);
    mapping map = {};
    map.base = base;
    map.bytes = bytes;
    map.memory = std::make_shared<physical>();
    map.memory->id = ++the->physicals;
    map.memory->device = device;
    map.memory->bytes = bytes;
    map.memory->host = host;
    map.memory->fd = -1;
    map.protection = PROT_READ | PROT_WRITE;
    map.devices.insert(device);
    map.outer = at;
    map.outer_bytes = outer;
    the->maps[(uintptr_t)base] = map;
    *out = base;
    return cudaSuccess;
}

static cudaError_t give_back(std::unique_lock<std::mutex> &lock, void *memory, bool host, const char *function)
{
    std::string what = take_place(function);
    if (cudaError_t captured = refused_anywhere())
        return failed(captured);
    if (!memory)
        return cudaSuccess;
    auto found = the->maps.find((uintptr_t)memory);
    if (found == the->maps.end() || found->second.virtual_memory || found->second.memory->host != host) {
        finding(what + " of something else than its allocations");
        return failed(cudaErrorInvalidValue);
    }
    require_unused(lock, found->second, what);
    if (the->broken != cudaSuccess)
        return failed(the->broken);
    munmap(found->second.outer, found->second.outer_bytes);
    the->maps.erase((uintptr_t)memory);
    the->progress++;
    return cudaSuccess;
}

void drop_all_memory()
{
    for (auto &map : the->maps)
        if (!map.second.virtual_memory)
            munmap(map.second.outer, map.second.outer_bytes);
    for (auto &area : the->reserved)
        munmap((void *)area.first, area.second);
    std::set<std::shared_ptr<physical>> files;
    for (auto &map : the->maps)
        files.insert(map.second.memory);
    for (auto &handle : the->handles)
        files.insert(handle.second);
    for (const std::shared_ptr<physical> &memory : files)
        if (memory->fd >= 0)
            close(memory->fd);
}

} // namespace emu

using namespace emu;

extern "C" {

cudaError_t cudaMalloc(void **out, size_t bytes)
{
    EMU_ENTER("cudaMalloc");
    take_place("");
    return out ? allocate(out, bytes, false) : failed(cudaErrorInvalidValue);
}

cudaError_t cudaMallocHost(void **out, size_t bytes)
{
    EMU_ENTER("cudaMallocHost");
    return out ? allocate(out, bytes, true) : failed(cudaErrorInvalidValue);
}

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags)
{
    EMU_ENTER("cudaHostAlloc");
    if (!out || flags & ~(unsigned)(cudaHostAllocPortable | cudaHostAllocMapped | cudaHostAllocWriteCombined))
        return failed(cudaErrorInvalidValue);
    return allocate(out, bytes, true);
}

cudaError_t cudaFree(void *memory)
{
    EMU_ENTER("cudaFree");
    return give_back(lock, memory, false, "cudaFree");
}

cudaError_t cudaFreeHost(void *memory)
{
    EMU_ENTER("cudaFreeHost");
    return give_back(lock, memory, true, "cudaFreeHost");
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes)
{
    EMU_ENTER("cudaMemGetInfo");
    *total_bytes = device_bytes;
    *free_bytes = device_bytes - used_bytes(self().device);
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *out, const void *memory)
{
    EMU_ENTER("cudaPointerGetAttributes");
    if (!out)
        return failed(cudaErrorInvalidValue);
    const mapping *map = find_mapping(memory);
    *out = {};
    out->type = !map ? cudaMemoryTypeUnregistered : map->memory->host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    out->device = map ? map->memory->device : -2;
    if (map)
        out->devicePointer = (void *)memory;
    if (!map || map->memory->host)
        out->hostPointer = (void *)memory;
    return cudaSuccess;
}

void emu_host_access(const void *memory, size_t bytes, int write)
{
    std::unique_lock<std::mutex> lock = locked();
    std::string what = take_place("host");
    int site = site_number(what);
    host_thread &host = self();
    if (bytes == 0)
        return;
    if (kind_of(memory) != kind::pinned)
        finding("not pinned memory: " + what);
    else
        declare(host.clock, host.component, -1, memory, bytes, write != 0, site);
}

void emu_protect(int on)
{
    std::unique_lock<std::mutex> lock = locked();
    configured.protect = on != 0;
    protect_all(!on);
}

static void copy_settled(const void *device_memory, size_t bytes, const std::function<void()> &copy)
{
    std::unique_lock<std::mutex> lock = locked();
    std::vector<range> ranges;
    if (bytes == 0)
        return;
    if (!translate(device_memory, bytes, site_number("emu_peek or emu_poke"), &ranges))
        return;
    for (int device = 0; device < configured.devices; device++)
        if (ranges[0].map->devices.count(device))
            drain(lock, device, "emu_peek or emu_poke");
    unprotected opened;
    copy();
}

void emu_peek(void *to, const void *device_from, size_t bytes)
{
    copy_settled(device_from, bytes, [=] { memcpy(to, device_from, bytes); });
}

void emu_poke(void *device_to, const void *from, size_t bytes)
{
    copy_settled(device_to, bytes, [=] { memcpy(device_to, from, bytes); });
}

} // extern "C"
