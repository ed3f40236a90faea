/*
 * Slots of the CPU device: memory that appears at several addresses, comes
 * zero-filled, is given back, and whose failures leave nothing behind.
 */
#include "device.h"
#include "testing.h"

#include <stdint.h>

static zc_device *make_device(void)
{
    zc_device *device = NULL;
    CHECK_OK(cpu_device_create(1, &device));
    return device;
}

static int all_are(const void *memory, unsigned char byte, size_t bytes)
{
    const unsigned char *at = memory;
    for (size_t i = 0; i < bytes; i++)
        if (at[i] != byte)
            return 0;
    return 1;
}

/* How much memory all mappings of this process have, by the kernel's account. */
static size_t mapped_pages(void)
{
    size_t pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file && fscanf(file, "%zu", &pages) == 1);
    if (file)
        fclose(file);
    return pages;
}

static void one_memory_at_many_addresses(void)
{
    zc_device *device = make_device();
    const device_ops *ops = device->ops;
    size_t step = ops->slot_step_bytes;
    device_slot slots[3];
    void *views[3][4];
    CHECK(step >= 4096 && (step & (step - 1)) == 0);
    for (size_t s = 0; s < 3; s++) {
        CHECK_OK(ops->slot_alloc(device, (s + 1) * 2 * step, &slots[s]));
        CHECK_EQ(slots[s].bytes, (s + 1) * 2 * step);
        CHECK_EQ((uintptr_t)slots[s].base % 64, 0);
        CHECK(all_are(slots[s].base, 0, slots[s].bytes));
        for (size_t v = 0; v < 4; v++) { /* some of all of it, some of its beginning */
            size_t bytes = v % 2 ? step : slots[s].bytes;
            CHECK_OK(ops->slot_map(device, &slots[s], bytes, &views[s][v]));
            CHECK(views[s][v] != slots[s].base);
            CHECK_EQ((uintptr_t)views[s][v] % 64, 0);
        }
    }
    for (size_t s = 0; s < 3; s++) {
        CHECK_OK(ops->fill(device, NULL, slots[s].base, (int)s + 1, slots[s].bytes));
        for (size_t v = 0; v < 4; v++)
            CHECK(all_are(views[s][v], (unsigned char)(s + 1), v % 2 ? step : slots[s].bytes));
    }
    for (size_t s = 0; s < 3; s++) { /* and written at any, read at all; others are left alone */
        memset(views[s][1], 0x40 + (int)s, step);
        for (size_t v = 0; v < 4; v++)
            CHECK(all_are(views[s][v], (unsigned char)(0x40 + s), step));
        CHECK(all_are((char *)slots[s].base + step, (unsigned char)(s + 1), slots[s].bytes - step));
    }
    ops->slot_unmap(device, views[1][0], slots[1].bytes);
    CHECK(all_are(views[1][1], 0x41, step));
    for (size_t s = 0; s < 3; s++) {
        for (size_t v = s == 1; v < 4; v++)
            ops->slot_unmap(device, views[s][v], v % 2 ? step : slots[s].bytes);
        CHECK(all_are(slots[s].base, (unsigned char)(0x40 + s), step));
        ops->slot_free(device, &slots[s]);
        CHECK(slots[s].base == NULL);
        ops->slot_free(device, &slots[s]); /* nothing */
    }
    ops->destroy(device);
}

static void memory_comes_back(void)
{
    zc_device *device = make_device();
    const device_ops *ops = device->ops;
    size_t before = 0;
    for (int turn = 0; turn < 50; turn++) {
        device_slot a, b;
        void *view;
        CHECK_OK(ops->slot_alloc(device, 1 << 20, &a));
        CHECK_OK(ops->slot_alloc(device, 1 << 20, &b));
        CHECK_OK(ops->slot_map(device, &a, 1 << 20, &view));
        CHECK(all_are(view, 0, 1 << 20)); /* also where another slot has been */
        memset(view, turn + 1, 1 << 20);
        memset(b.base, turn + 2, 1 << 20);
        ops->slot_unmap(device, view, 1 << 20);
        if (turn % 2)
            ops->slot_free(device, &a);
        ops->slot_free(device, &b);
        if (!(turn % 2))
            ops->slot_free(device, &a);
        if (turn == 0)
            before = mapped_pages();
    }
    CHECK(mapped_pages() < before + 2560); /* ten slots; there were a hundred */
    ops->destroy(device);
}

static void too_much_is_refused(void)
{
    zc_device *device = make_device();
    device_slot slot;
    CHECK_EQ(device->ops->slot_alloc(device, (size_t)1 << 60, &slot), ZC_ENOMEM);
    CHECK(slot.base == NULL);
    device->ops->slot_free(device, &slot);
    CHECK_OK(device->ops->slot_alloc(device, 4096, &slot));
    device->ops->slot_free(device, &slot);
    device->ops->destroy(device);
}

static zc_status walk(zc_device *device)
{
    const device_ops *ops = device->ops;
    device_slot slots[2] = {{0}};
    void *views[2] = {NULL};
    zc_status status = ZC_OK;
    for (size_t s = 0; s < 2; s++) {
        if (status == ZC_OK)
            status = ops->slot_alloc(device, 8192, &slots[s]);
        if (status == ZC_OK)
            status = ops->slot_map(device, &slots[s], 4096, &views[s]);
    }
    for (size_t s = 0; s < 2; s++) {
        if (views[s])
            ops->slot_unmap(device, views[s], 4096);
        ops->slot_free(device, &slots[s]);
    }
    return status;
}

static void every_failure_is_reported(void)
{
    for (long nth = 1;; nth++) {
        zc_device *device = make_device();
        zc_fault_arm(nth);
        zc_status status = walk(device);
        long asked = zc_fault_count();
        zc_fault_arm(0);
        CHECK(status == ZC_OK || status == ZC_ENOMEM || status == ZC_ESYSTEM);
        CHECK(status == ZC_OK || zc_last_error()[0]);
        CHECK_OK(walk(device)); /* the next try works */
        device->ops->destroy(device);
        if (asked < nth) {
            CHECK_OK(status);
            break;
        }
        CHECK(nth < 100);
    }
}

int main(void)
{
    RUN(one_memory_at_many_addresses);
    RUN(memory_comes_back);
    RUN(too_much_is_refused);
    RUN(every_failure_is_reported);
    DONE();
}
