/*
 * Slots of a CUDA device (device.h): physical memory that is mapped at more than
 * one address, by the driver's virtual memory management.
 *
 * A slot is a handle of its own, because mappings can only begin at offset 0 of
 * one.  It is made the way NCCL makes memory, so that nothing NCCL can do with
 * memory is lost: exportable as a file descriptor, open to network cards.  A
 * mapping is seen as changed by what is ordered after the change by stream or
 * event; inside one kernel two mappings of a slot must not meet.
 *
 * The GPU must be current in all of these.
 */
#ifndef CUDA_SLOTS_H
#define CUDA_SLOTS_H

#include "cuda_error.h"
#include "device.h"

#include <stddef.h>

typedef struct cuda_slots {
    int ordinal;
    int supported;
    size_t step_bytes; /* slots and mappings are multiples of it */
    cuda_driver driver;
    CUmemAllocationProp properties;
} cuda_slots;

/* Succeeds on a GPU without virtual memory management too; then `supported` is 0, and nothing else may be called. */
zc_status cuda_slots_open(cuda_slots *slots, int ordinal);

/* Not zero-filled. */
zc_status cuda_slots_alloc(cuda_slots *slots, size_t bytes, device_slot *out);
zc_status cuda_slots_map(const cuda_slots *slots, const device_slot *slot, size_t bytes, void **out);
void cuda_slots_unmap(const cuda_slots *slots, void *memory, size_t bytes);
void cuda_slots_free(const cuda_slots *slots, device_slot *slot);

#endif
