/* The loops for any machine of this architecture (on x86-64: SSE2). */
#define CPU_ISA_NAME "base"
#define CPU_ISA_TABLE cpu_kernels_base
#include "cpu_kernels_body.h"
