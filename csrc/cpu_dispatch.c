/*
 * Chooses the table of kernels for this machine, and guards the floating-point
 * mode in which they run.
 */
#include "cpu_kernels.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

static int machine_has_avx2(void)
{
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
#else
    return 0;
#endif
}

static int machine_has_avx512(void)
{
#if defined(__x86_64__)
    return machine_has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
    return 0;
#endif
}

const cpu_kernels *cpu_kernels_named(const char *isa)
{
    if (!strcmp(isa, "base"))
        return &cpu_kernels_base;
    if (!strcmp(isa, "avx2") && cpu_kernels_avx2.isa && machine_has_avx2())
        return &cpu_kernels_avx2;
    if (!strcmp(isa, "avx512") && cpu_kernels_avx512.isa && machine_has_avx512())
        return &cpu_kernels_avx512;
    return NULL;
}

static pthread_once_t chosen_once = PTHREAD_ONCE_INIT;
static const cpu_kernels *chosen;
static char chosen_error[160];

static void choose(void)
{
    static const char *const best_first[] = {"avx512", "avx2", "base"};
    for (int i = 0; i < 3 && !chosen; i++)
        chosen = cpu_kernels_named(best_first[i]);

    const char *wanted = getenv("ZERO_C_ISA");
    if (!wanted || !*wanted)
        return;
    const cpu_kernels *named = cpu_kernels_named(wanted);
    if (named)
        chosen = named;
    else
        snprintf(chosen_error, sizeof chosen_error,
                 "ZERO_C_ISA=%.40s: this build and machine have base%s%s; name one of them or unset it",
                 wanted, cpu_kernels_named("avx2") ? ", avx2" : "",
                 cpu_kernels_named("avx512") ? ", avx512" : "");
}

const cpu_kernels *cpu_kernels_get(void)
{
    pthread_once(&chosen_once, choose);
    return chosen;
}

const char *cpu_kernels_error(void)
{
    pthread_once(&chosen_once, choose);
    return chosen_error[0] ? chosen_error : NULL;
}

/* ---- floating-point mode -------------------------------------------------- */

#if defined(__x86_64__)

#define MXCSR_DEFAULT 0x1f80u

unsigned long cpu_mode_enter(void)
{
    unsigned mode = _mm_getcsr();
    _mm_setcsr(MXCSR_DEFAULT);
    return mode;
}

void cpu_mode_leave(unsigned long mode)
{
    _mm_setcsr((unsigned)mode);
}

#elif defined(__aarch64__)

unsigned long cpu_mode_enter(void)
{
    unsigned long mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    __asm__ volatile("msr fpcr, %0" : : "r"(0ul) : "memory");
    return mode;
}

void cpu_mode_leave(unsigned long mode)
{
    __asm__ volatile("msr fpcr, %0" : : "r"(mode) : "memory");
}

#else

unsigned long cpu_mode_enter(void)
{
    return 0;
}

void cpu_mode_leave(unsigned long mode)
{
    (void)mode;
}

#endif
