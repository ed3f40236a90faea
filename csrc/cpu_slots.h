/*
 * Slots of the CPU device (device.h): physical memory that is mapped at more
 * than one address.  All slots of a device are ranges of one nameless file.
 */
#ifndef CPU_SLOTS_H
#define CPU_SLOTS_H

#include "device.h"
#include "shm_segment.h"

typedef struct cpu_slots {
    shm_segment segment; /* opened with the first slot */
} cpu_slots;

void cpu_slots_init(cpu_slots *slots);
/* Slots must have been freed. */
void cpu_slots_close(cpu_slots *slots);

zc_status cpu_slots_alloc(cpu_slots *slots, size_t bytes, device_slot *out);
zc_status cpu_slots_map(cpu_slots *slots, const device_slot *slot, size_t bytes, void **out);
void cpu_slots_unmap(void *memory, size_t bytes);
void cpu_slots_free(cpu_slots *slots, device_slot *slot);

#endif
