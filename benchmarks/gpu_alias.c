/*
 * Whether memory that is mapped at several addresses is one memory on this GPU,
 * by the package's own CUDA device, on which stage 3 stands:
 *
 *     gpu_alias PLUGIN [rounds]  ->  a sentence; status 1: it says what was found instead
 *
 * One slot has mappings of all of it and of its beginning only.  Each round
 * writes its number with a kernel or a copy through one mapping, on one stream;
 * another stream, ordered after it by an event, reads it with a kernel and a copy
 * through two other mappings, and the next round's write is ordered after that.
 * The host waits at the end only.
 */
#include "cuda_load.h"
#include "device.h"

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WHOLE_VIEWS 4u /* the slot's own address is one of them */
#define VIEWS 6u
#define SLOT_STEPS 4u
#define PIECE 4096u /* elements that a round writes */
#define LOGGED 4u   /* elements of them that it copies out */
#define CU_STREAM_NON_BLOCKING 1u

static zc_device *device;
static zc_stream *writer, *reader;
static device_slot slot;
static void *views[VIEWS];
static size_t view_bytes[VIEWS];

static void check(zc_status status)
{
    if (status == ZC_OK)
        return;
    printf("%s\n", zc_last_error());
    exit(1);
}

#define DO(op, ...) check(device->ops->op(device, __VA_ARGS__))

/* ---- streams ----------------------------------------------------------------- */

/* The device makes none; these are the driver's, made by hand so that no header of CUDA is needed. */
static zc_stream *make_stream(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW), *context = NULL, *stream = NULL;
    int (*retain)(void **, int), (*use)(void *), (*create)(void **, unsigned);
    if (library) {
        *(void **)&retain = dlsym(library, "cuDevicePrimaryCtxRetain");
        *(void **)&use = dlsym(library, "cuCtxSetCurrent");
        *(void **)&create = dlsym(library, "cuStreamCreate");
    }
    if (!library || !retain || !use || !create || retain(&context, 0) || use(context) ||
        create(&stream, CU_STREAM_NON_BLOCKING)) {
        printf("no stream could be made with libcuda.so.1\n");
        exit(1);
    }
    return stream;
}

/* ---- rounds ------------------------------------------------------------------ */

static void *device_memory(size_t bytes)
{
    void *memory;
    DO(alloc, bytes, &memory);
    return memory;
}

static void *host_copy(const void *from, size_t bytes)
{
    void *to = malloc(bytes);
    if (!to) {
        printf("no memory for %zu bytes\n", bytes);
        exit(1);
    }
    DO(download, reader, to, from, bytes);
    return to;
}

static double *device_ones(void)
{
    double ones[PIECE], *to = device_memory(sizeof ones);
    for (size_t i = 0; i < PIECE; i++)
        ones[i] = 1;
    DO(upload, writer, to, ones, sizeof ones);
    return to;
}

static void run_rounds(unsigned long rounds)
{
    size_t piece_bytes = PIECE * sizeof(double), pieces = device->ops->slot_step_bytes / piece_bytes;
    double *ones = device_ones(), *bank = device_memory(piece_bytes), *sums = device_memory(piece_bytes);
    double *log = device_memory(rounds * LOGGED * sizeof(double));

    DO(order, writer, reader);
    for (unsigned long k = 1; k <= rounds; k++) {
        size_t at = k % pieces * piece_bytes;
        size_t by_kernel = k + 1 + k / VIEWS % (VIEWS - 1), by_copy = k + 1 + k / 7 % (VIEWS - 1);
        void *to = (char *)views[k % VIEWS] + at;
        if (k / VIEWS % 2) {
            DO(scale, writer, to, ones, PIECE, ZC_FLOAT64, (double)k);
        } else {
            DO(scale, writer, bank, ones, PIECE, ZC_FLOAT64, (double)k);
            DO(copy, writer, to, bank, piece_bytes);
        }
        DO(order, writer, reader);
        DO(accumulate, reader, sums, (char *)views[by_kernel % VIEWS] + at, PIECE, ZC_FLOAT64, 1);
        DO(copy, reader, log + (k - 1) * LOGGED, (char *)views[by_copy % VIEWS] + at, LOGGED * sizeof(double));
        DO(order, reader, writer);
    }
    double *sum = host_copy(sums, piece_bytes), *copied = host_copy(log, rounds * LOGGED * sizeof(double));
    for (unsigned long i = 0; i < rounds * LOGGED; i++) {
        if (copied[i] != (double)(i / LOGGED + 1)) {
            printf("round %lu: a copy through another mapping read %g\n", i / LOGGED + 1, copied[i]);
            exit(1);
        }
    }
    double wanted = (double)rounds * (double)(rounds + 1) / 2;
    for (size_t i = 0; i < PIECE; i++) {
        if (sum[i] != wanted) {
            printf("kernels that read through another mapping in %lu rounds found a sum of %.0f, not %.0f\n", rounds,
                   sum[i], wanted);
            exit(1);
        }
    }
    free(sum);
    free(copied);
    device->ops->free(device, ones, piece_bytes);
    device->ops->free(device, bank, piece_bytes);
    device->ops->free(device, sums, piece_bytes);
    device->ops->free(device, log, rounds * LOGGED * sizeof(double));
}

/* ---- mappings ---------------------------------------------------------------- */

/* Bytes [begin, end) of what a mapping shows. */
static void expect(size_t view, size_t begin, size_t end, int byte, const char *when)
{
    unsigned char *shown = host_copy((char *)views[view] + begin, end - begin);
    for (size_t i = 0; i < end - begin; i++) {
        if (shown[i] != byte) {
            printf("%s: mapping %zu (%zu of %zu bytes) shows %d at byte %zu, not %d\n", when, view, view_bytes[view],
                   slot.bytes, shown[i], begin + i, byte);
            exit(1);
        }
    }
    free(shown);
}

static void check_prefixes(void)
{
    size_t step = device->ops->slot_step_bytes, prefix = VIEWS - 1;

    DO(fill, writer, slot.base, 1, slot.bytes);
    DO(order, writer, reader);
    for (size_t v = 0; v < VIEWS; v++)
        expect(v, 0, view_bytes[v], 1, "after a fill of the slot");
    DO(fill, writer, views[prefix], 2, step);
    DO(order, writer, reader);
    for (size_t v = 0; v < VIEWS; v++)
        expect(v, 0, step, 2, "after a fill through a mapping of the beginning");
    expect(1, step, slot.bytes, 1, "after a fill through a mapping of the beginning");
    device->ops->slot_unmap(device, views[prefix], step);
    expect(0, 0, step, 2, "after a mapping was taken away");
    DO(slot_map, &slot, step, &views[prefix]);
    expect(prefix, 0, step, 2, "after it was made again");
}

int main(int argc, char **argv)
{
    const zc_cuda_plugin *plugin;
    unsigned long rounds = argc > 2 ? strtoul(argv[2], NULL, 10) : 100000;

    if (argc < 2 || rounds == 0) {
        printf("usage: gpu_alias PLUGIN [rounds]\n");
        return 2;
    }
    check(cuda_load(argv[1], &plugin));
    check(plugin->device_create(0, &device));
    if (!device->ops->slot_map) {
        printf("memory has one address here: there is no virtual memory management\n");
        device->ops->destroy(device);
        return 0;
    }
    writer = make_stream();
    reader = make_stream();
    DO(slot_alloc, SLOT_STEPS * device->ops->slot_step_bytes, &slot);
    views[0] = slot.base;
    for (size_t v = 0; v < VIEWS; v++) {
        view_bytes[v] = v < WHOLE_VIEWS ? slot.bytes : device->ops->slot_step_bytes;
        if (v > 0)
            DO(slot_map, &slot, view_bytes[v], &views[v]);
    }
    run_rounds(rounds);
    check_prefixes();
    DO(synchronize, writer);
    DO(synchronize, reader);
    for (size_t v = 1; v < VIEWS; v++)
        device->ops->slot_unmap(device, views[v], view_bytes[v]);
    device->ops->slot_free(device, &slot);
    device->ops->destroy(device);
    printf("%lu rounds through %u mappings of %u x %zu bytes, %u of them of the beginning only\n", rounds, VIEWS,
           SLOT_STEPS, view_bytes[VIEWS - 1], VIEWS - WHOLE_VIEWS);
    return 0;
}
