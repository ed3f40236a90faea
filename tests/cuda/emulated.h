/* What the tests of the emulation itself share: looking at findings, making things, and numbers to add up. */
#ifndef EMULATED_H
#define EMULATED_H

#include "cu.h"
#include "emu.h"
#include "testing.h"

static char report[1 << 16];

static inline void check_clean_at(int line)
{
    int found = emu_findings(report, sizeof report);
    if (found)
        fprintf(stderr, "line %d, unexpected:\n%s", line, report);
    CHECK_EQ(found, 0);
}

#define CHECK_CLEAN() check_clean_at(__LINE__)

/* There are findings, one of which contains this text. */
#define CHECK_FOUND(part)                                                \
    do {                                                                 \
        CHECK(emu_findings(report, sizeof report) > 0);                  \
        CHECK(strstr(report, (part)) != NULL);                           \
    } while (0)

static inline cudaStream_t new_stream(void)
{
    cudaStream_t stream = NULL;
    CHECK_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    return stream;
}

static inline cudaEvent_t new_event(void)
{
    cudaEvent_t event = NULL;
    CHECK_EQ(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), cudaSuccess);
    return event;
}

static inline void *device_memory(size_t bytes)
{
    void *memory = NULL;
    CHECK_EQ(cudaMalloc(&memory, bytes), cudaSuccess);
    return memory;
}

/* Values whose sum depends on the order in which they are added. */
static inline float value_of(int rank, int index)
{
    uint64_t state = (uint64_t)(rank * 1000 + index);
    return testing_float(&state) * (index % 3 ? 1 : 1e6f);
}

/* The sum as the emulated ring makes it: the owner of the slice comes last. */
static inline float ring_sum(int ranks, int owner, int index)
{
    float sum = value_of((owner + 1) % ranks, index);
    for (int k = 1; k < ranks; k++)
        sum += value_of((owner + 1 + k) % ranks, index);
    return sum;
}

#endif
