/*
 * Memory that appears at many addresses: one file (memfd), mapped often.
 *
 * Every mapping is made with its page table entries, 8 bytes for 4 KiB.  Without
 * them the first write through each mapping faults at every page, in the first
 * steps of the training, which costs several times as much.
 */
#include "cpu_slots.h"

#include <string.h>

void cpu_slots_init(cpu_slots *slots)
{
    memset(slots, 0, sizeof *slots);
    slots->segment.fd = -1;
}

void cpu_slots_close(cpu_slots *slots)
{
    shm_segment_close(&slots->segment);
}

zc_status cpu_slots_alloc(cpu_slots *slots, size_t bytes, device_slot *out)
{
    void *base;
    uint64_t offset;
    memset(out, 0, sizeof *out);
    if (slots->segment.fd < 0)
        ZC_TRY(shm_segment_open(&slots->segment));
    ZC_TRY(shm_segment_alloc(&slots->segment, bytes, bytes, &offset));
    zc_status status = shm_segment_map(slots->segment.fd, offset, bytes, 1, &base);
    if (status != ZC_OK) {
        shm_segment_free(&slots->segment, offset, bytes);
        return status;
    }
    *out = (device_slot){.base = base, .bytes = bytes, .handle = offset};
    return ZC_OK;
}

zc_status cpu_slots_map(cpu_slots *slots, const device_slot *slot, size_t bytes, void **out)
{
    return shm_segment_map(slots->segment.fd, slot->handle, bytes, 1, out);
}

void cpu_slots_unmap(void *memory, size_t bytes)
{
    shm_segment_unmap(memory, bytes);
}

void cpu_slots_free(cpu_slots *slots, device_slot *slot)
{
    if (!slot->base)
        return;
    shm_segment_unmap(slot->base, slot->bytes);
    shm_segment_free(&slots->segment, slot->handle, slot->bytes);
    memset(slot, 0, sizeof *slot);
}
