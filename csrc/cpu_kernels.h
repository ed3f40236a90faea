/*
 * The loops of the CPU backend, as one table per instruction set.
 *
 * cpu_kernels_body.h holds every loop once; cpu_kernels_base.c, _avx2.c and
 * _avx512.c compile it with their own flags, and cpu_kernels() picks a table
 * once.  All tables give the same bits (only which NaN an operation on NaN
 * gives is left open): contraction is off, sums have a fixed order, narrow
 * types are rounded by the rules of zc_dtype.h.
 *
 * Conventions: counts are elements; pointers need only the alignment of their
 * element; ranges do not overlap unless said.  Kernels run in the default
 * floating-point mode (the caller sets it with cpu_mode_enter).
 */
#ifndef CPU_KERNELS_H
#define CPU_KERNELS_H

#include "optim.h"
#include "zc_dtype.h"

#include <stddef.h>
#include <stdint.h>

/* Bits of the flags words below. */
#define CPU_NONFINITE_INF 1u
#define CPU_NONFINITE_NAN 2u

typedef enum cpu_op { CPU_SUM = 0, CPU_MAX = 1, CPU_MIN = 2, CPU_PROD = 3, CPU_OP_COUNT = 4 } cpu_op;

typedef struct cpu_kernels {
    const char *isa; /* "base", "avx2", "avx512" */

    /*
     * Copies bytes with streaming stores where the set has them: for data that
     * this core will not read again soon.  Ends with a store fence.
     */
    void (*copy_stream)(void *to, const void *from, size_t bytes);

    /*
     * to[i] = s, or to[i] + s with `accumulate`, where
     * s = ((in[0][i] + in[1][i]) + in[2][i]) + ... in fp32, in the order given
     * (fp64 for ZC_FLOAT64).  in[k] has `dtype`; to has zc_dtype_sum(dtype).
     * in[k] may be `to` itself when its type is the sum's (same index only), and
     * may be NULL, which stands for zeros (+0).  ranks >= 1.
     * Returns CPU_NONFINITE_* of the values written.
     */
    uint32_t (*reduce)(void *to, const void *const *in, size_t ranks, size_t count, zc_dtype dtype,
                       int accumulate);

    /*
     * Sum of squares of `count` elements (ZC_FLOAT32 or ZC_FLOAT64) that begin
     * at a multiple of 64 elements of their parameter: in each block of 64 the
     * squares are added in fp64 in eight lanes (lane j takes elements j, j+8,
     * ... in turn; a short last block is padded with zeros) and the lanes are
     * added ((0+4)+(2+6))+((1+5)+(3+7)); block sums go to optim_sum_add.
     * Returns CPU_NONFINITE_* of the elements; blocks that hold one add nothing.
     * A block of finite fp64 elements whose sum overflows returns CPU_NONFINITE_INF.
     */
    uint32_t (*sum_squares)(uint64_t words[OPTIM_SUM_WORDS], const void *from, size_t count, zc_dtype dtype);

    /* to[i] = factor * from[i], fp32 or fp64; the factor is rounded to the type first. In place allowed. */
    void (*scale)(void *to, const void *from, size_t count, zc_dtype dtype, double factor);

    /*
     * One optimizer update of `count` elements of one segment (elem_update.h
     * has the formulas).  param has param_dtype; grad, moments and vmax have
     * zc_dtype_sum(param_dtype); master is int16_t[] for bf16 (the remainder),
     * float[] for fp16, unused otherwise.  m: exp_avg or momentum buffer,
     * v: exp_avg_sq, vmax: max_exp_avg_sq; NULL where the rule has none.
     */
    void (*update)(optim_rule rule, const optim_segment_scalars *scalars, size_t count, zc_dtype param_dtype,
                   void *param, void *master, const void *grad, void *m, void *v, void *vmax);

    /* to (float, or double for fp64) = the exact value of each parameter, master included. */
    void (*master_read)(float *to, const void *param, const void *master, size_t count, zc_dtype param_dtype);

    /* Sets parameter and master from fp32 values (16-bit types only). */
    void (*master_write)(void *param, void *master, const float *from, size_t count, zc_dtype param_dtype);

    /* Converts between any two floating types; narrowing to nearest even. */
    void (*convert)(void *to, zc_dtype to_dtype, const void *from, zc_dtype from_dtype, size_t count);

    /*
     * to[i] = in[0][i] op in[1][i] op ... for any dtype, ranks >= 1, in rank
     * order.  16-bit floats are combined in fp32 and rounded once; max and min
     * of floats return NaN if any operand is NaN; integer sums and products
     * wrap.  `to` may be one of the inputs.
     */
    void (*combine)(void *to, const void *const *in, size_t ranks, size_t count, zc_dtype dtype, cpu_op op);

    /* zc_checksum of zero_c.h, which defines the sums. */
    void (*checksum)(const void *data, size_t bytes, uint64_t sums[2]);
} cpu_kernels;

/*
 * The table for this machine: the best one it supports, or the one named by
 * the environment variable ZERO_C_ISA (base|avx2|avx512) when the machine
 * supports that.  Chosen once per process; never NULL.
 */
const cpu_kernels *cpu_kernels_get(void);

/* The table of a name, or NULL if this build or machine lacks it.  For tests. */
const cpu_kernels *cpu_kernels_named(const char *isa);

/* NULL, or why ZERO_C_ISA cannot be honoured ("ZERO_C_ISA=avx9: ..."). */
const char *cpu_kernels_error(void);

/* The tables themselves, for the functions above; `isa` is NULL in one that this build lacks. */
extern const cpu_kernels cpu_kernels_base, cpu_kernels_avx2, cpu_kernels_avx512;

/*
 * Callers of kernels put this around them: it sets the default floating-point
 * mode (round to nearest, denormals kept, nothing trapped) and returns the mode
 * that was set before.  A process that flushes denormals still gets our bits.
 */
unsigned long cpu_mode_enter(void);
void cpu_mode_leave(unsigned long mode);

#endif
