/*
 * What tests of several ranks share, whether these are threads or processes:
 * time, sentences, descriptors, and values of every dtype.
 */
#ifndef TOGETHER_H
#define TOGETHER_H

#include "testing.h"
#include "zc_status.h"

#include <dirent.h>
#include <signal.h>
#include <sys/wait.h>
#include <time.h>

#define SECOND 1000000000ull

static inline uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * SECOND + (uint64_t)now.tv_nsec;
}

static inline void pause_us(unsigned us)
{
    nanosleep(&(struct timespec){us / 1000000, (long)(us % 1000000) * 1000}, NULL);
}

static inline int text_has(const char *part)
{
    if (strstr(zc_last_error(), part))
        return 1;
    fprintf(stderr, "not in the sentence: '%s' in '%s'\n", part, zc_last_error());
    return 0;
}

static inline size_t count_entries(const char *path)
{
    DIR *directory = opendir(path);
    size_t count = 0;
    while (directory && readdir(directory))
        count++;
    if (directory)
        closedir(directory);
    return count;
}

static inline size_t count_fds(void)
{
    return count_entries("/proc/self/fd");
}

/* status[r] as of waitpid, once these have ended; what is still there at `end_ns` is killed. */
static inline void wait_for_all(const pid_t *pids, size_t count, uint64_t end_ns, int *status)
{
    for (size_t r = 0; r < count; r++)
        while (waitpid(pids[r], &status[r], WNOHANG) == 0) {
            if (now_ns() > end_ns) {
                kill(pids[r], SIGKILL);
                waitpid(pids[r], &status[r], 0);
                break;
            }
            pause_us(2000);
        }
}

static inline void put(void *array, size_t i, zc_dtype dtype, double value)
{
    switch (dtype) {
    case ZC_INT32: ((int32_t *)array)[i] = (int32_t)value; break;
    case ZC_INT64: ((int64_t *)array)[i] = (int64_t)value; break;
    case ZC_UINT8: ((uint8_t *)array)[i] = (uint8_t)value; break;
    case ZC_FLOAT64: ((double *)array)[i] = value; break;
    default: testing_put(array, dtype, i, (float)value);
    }
}

static inline double get(const void *array, size_t i, zc_dtype dtype)
{
    switch (dtype) {
    case ZC_FLOAT64: return ((const double *)array)[i];
    case ZC_BFLOAT16: return zc_bf16_to_float(((const uint16_t *)array)[i]);
    case ZC_FLOAT16: return zc_fp16_to_float(((const uint16_t *)array)[i]);
    case ZC_INT32: return ((const int32_t *)array)[i];
    case ZC_INT64: return (double)((const int64_t *)array)[i];
    case ZC_UINT8: return ((const uint8_t *)array)[i];
    default: return ((const float *)array)[i];
    }
}

#endif
