/*
 * The loops with AVX-512; compiled with -mavx512f -mavx512bw -mavx512vl
 * -mavx512dq and the flags of AVX2.  On other architectures, or without the
 * flags, the table is empty (isa is NULL).
 */
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__) && \
    defined(__F16C__)
#define CPU_ISA_NAME "avx512"
#define CPU_ISA_TABLE cpu_kernels_avx512
#include "cpu_kernels_body.h"
#else
#include "cpu_kernels.h"
const cpu_kernels cpu_kernels_avx512 = {0};
#endif
