/*
 * What the targets in C share: reading an input as a sequence of choices, and stopping at a finding.
 *
 * A target defines LLVMFuzzerTestOneInput() and returns 0.  Every input is good for something: what is missing at
 * its end reads as zeros.
 */
#ifndef TARGET_H
#define TARGET_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

/* What must be so whatever the input is. In the thread of LLVMFuzzerTestOneInput only: libFuzzer keeps the input then. */
#define MUST(condition, ...)                                                        \
    do {                                                                            \
        if (!(condition)) {                                                         \
            fprintf(stderr, "%s:%d: %s does not hold: ", __FILE__, __LINE__, #condition); \
            fprintf(stderr, __VA_ARGS__);                                           \
            fputc('\n', stderr);                                                    \
            abort();                                                                \
        }                                                                           \
    } while (0)

typedef struct choices {
    const uint8_t *at;
    size_t left;
} choices;

static inline uint8_t take_byte(choices *c)
{
    if (!c->left)
        return 0;
    c->left--;
    return *c->at++;
}

/* A number below `end`, which is 1 to 256. */
static inline unsigned take_below(choices *c, unsigned end)
{
    return take_byte(c) % end;
}

/* Mostly a small number, else one at some type's limits. */
static inline uint64_t take_number(choices *c)
{
    static const uint64_t limits[] = {0x7f, 0x80, 0xff, 0x100, 0x3ff, 0x400, 0x401, 0xffff, 0x10000, 0xfffff, 0x100000,
                                      0x100001, 0x7fffffff, 0x80000000, 0xfffffffe, 0xffffffff, 0x100000000,
                                      0x7fffffffffffffff, 0x8000000000000000, 0xfffffffffffffffe, 0xffffffffffffffff};
    unsigned byte = take_byte(c);
    return byte < 200 ? byte % 20 : limits[byte % (sizeof limits / sizeof *limits)];
}

/* Up to `room` bytes of the input as they are. */
static inline size_t take_bytes(choices *c, void *to, size_t room)
{
    size_t count = room < c->left ? room : c->left;
    memcpy(to, c->at, count);
    c->at += count;
    c->left -= count;
    return count;
}

#endif
