/*
 * The C tests' whole framework.  A test program is a list of functions run by
 * RUN(); CHECK prints both sides of what failed and lets the program exit 1.
 * Every program is run by tests/test_c.py in its own process under a deadline,
 * plain and under each sanitizer.
 */
#ifndef TESTING_H
#define TESTING_H

#include "zc_dtype.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int testing_failures __attribute__((unused));

#define CHECK(condition)                                                                 \
    do {                                                                                 \
        if (!(condition)) {                                                              \
            __atomic_fetch_add(&testing_failures, 1, __ATOMIC_RELAXED);                  \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);    \
        }                                                                                \
    } while (0)

#define CHECK_EQ(left, right)                                                            \
    do {                                                                                 \
        int64_t testing_l = (int64_t)(left), testing_r = (int64_t)(right);               \
        if (testing_l != testing_r) {                                                    \
            __atomic_fetch_add(&testing_failures, 1, __ATOMIC_RELAXED);                  \
            fprintf(stderr, "%s:%d: %s is %" PRId64 ", %s is %" PRId64 "\n", __FILE__,   \
                    __LINE__, #left, testing_l, #right, testing_r);                      \
        }                                                                                \
    } while (0)

/* For calls that must succeed: shows the core's own sentence. */
#define CHECK_OK(call)                                                                   \
    do {                                                                                 \
        zc_status testing_s = (call);                                                    \
        if (testing_s != ZC_OK) {                                                        \
            __atomic_fetch_add(&testing_failures, 1, __ATOMIC_RELAXED);                  \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, zc_last_error()); \
        }                                                                                \
    } while (0)

#define RUN(function)                                                                    \
    do {                                                                                 \
        int testing_before = testing_failures;                                           \
        function();                                                                      \
        printf("%s %s\n", testing_failures == testing_before ? "ok" : "FAILED", #function); \
        fflush(stdout);                                                                  \
    } while (0)

#define DONE() return testing_failures ? 1 : 0

/* A small generator for test data: the same numbers on every machine. */
static inline uint64_t testing_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

static inline float testing_float(uint64_t *state)
{
    return (float)((double)(testing_random(state) >> 40) / 16777216.0 * 2 - 1);
}

/* Element k of an array of this dtype. */
static inline void testing_put(void *array, zc_dtype dtype, size_t k, float value)
{
    if (dtype == ZC_FLOAT32)
        ((float *)array)[k] = value;
    else if (dtype == ZC_FLOAT64)
        ((double *)array)[k] = value;
    else if (dtype == ZC_BFLOAT16)
        ((uint16_t *)array)[k] = zc_float_to_bf16(value);
    else
        ((uint16_t *)array)[k] = zc_float_to_fp16(value);
}

#endif
