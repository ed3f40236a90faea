/*
 * The loops with AVX2 and F16C; compiled with -mavx2 -mf16c -mbmi2.  On other
 * architectures, or without the flags, the table is empty (isa is NULL).
 */
#if defined(__AVX2__) && defined(__F16C__)
#define CPU_ISA_NAME "avx2"
#define CPU_ISA_TABLE cpu_kernels_avx2
#include "cpu_kernels_body.h"
#else
#include "cpu_kernels.h"
const cpu_kernels cpu_kernels_avx2 = {0};
#endif
