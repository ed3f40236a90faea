/*
 * Update rules as data: what a step has to know, separate from the loop that
 * applies it.  The element arithmetic itself is in elem_update.h, shared by
 * every CPU instruction set (and by CUDA).
 *
 * A segment is one parameter in one group.  Step count, used flag and bias
 * corrections are per segment: a parameter that had no gradient on any rank in
 * this step does not count it, as in torch.
 */
#ifndef ZC_OPTIM_H
#define ZC_OPTIM_H

#include "zc_dtype.h"
#include "zc_status.h"

#include <stddef.h>
#include <stdint.h>

typedef enum optim_rule { OPTIM_ADAMW = 0, OPTIM_ADAM = 1, OPTIM_SGD = 2 } optim_rule;

/* Options of a group, as the user sees them at this step (read at each step). */
typedef struct optim_options {
    double lr;
    double beta1, beta2, eps; /* adam, adamw */
    double weight_decay;
    double momentum, dampening; /* sgd */
    int nesterov;               /* sgd; needs momentum > 0 and dampening == 0 */
    int amsgrad;                /* adam, adamw */
    int maximize;
} optim_options;

/* ZC_OK, or ZC_EINVAL naming option, value and legal range. */
zc_status optim_check(optim_rule rule, const optim_options *options);

/* "adamw", "adam", "sgd". */
const char *optim_name(optim_rule rule);

/*
 * What the update of one segment needs at this step, computed in double and
 * rounded once to the arithmetic type.  `f` fields serve fp32 arithmetic,
 * `d` fields fp64 parameters.  Two segments whose scalars are equal in every
 * byte may be updated in one call.
 *
 *   adam, adamw  step_size = lr / (1 - beta1^t)
 *                inv_bias2 = 1 / sqrt(1 - beta2^t)
 *                beta1c = 1 - beta1, beta2, beta2c = 1 - beta2, eps
 *                decay: adamw 1 - lr * weight_decay; adam weight_decay
 *   sgd          step_size = lr, beta1 = momentum,
 *                beta1c = 1 - dampening, decay = weight_decay
 *   all          grad_factor = (1/N, 1/loss scale, clip; negative for maximize)
 */
typedef struct optim_scalars_f {
    float grad_factor, step_size, inv_bias2, beta1c, beta2, beta2c, eps, decay;
    float beta1;
} optim_scalars_f;

typedef struct optim_scalars_d {
    double grad_factor, step_size, inv_bias2, beta1c, beta2, beta2c, eps, decay;
    double beta1;
} optim_scalars_d;

#define OPTIM_AMSGRAD 1u
#define OPTIM_NESTEROV 2u
#define OPTIM_HAS_DECAY 4u  /* decay changes something: adamw decay != 1, others != 0 */
#define OPTIM_MOMENTUM 8u   /* sgd with a momentum buffer */
#define OPTIM_FIRST 16u     /* sgd: the buffer starts at this gradient; set by the caller of optim_scalars */

typedef struct optim_segment_scalars {
    uint32_t active; /* 0: leave the segment alone (unused, or the step is skipped) */
    uint32_t flags;
    optim_scalars_f f;
    optim_scalars_d d;
} optim_segment_scalars;

/* base^exponent by repeated squaring, the same bits everywhere (libm's pow is not). */
double optim_powi(double base, uint64_t exponent);

/*
 * Scalars of one active segment whose step count, this step included, is
 * `step` (>= 1).  grad_factor > 0 is the common factor of all gradients.
 */
void optim_scalars(optim_rule rule, const optim_options *options, uint64_t step, double grad_factor,
                   optim_segment_scalars *out);

/*
 * Sum of squares, exactly.  A finite double is added as an integer multiple of
 * 2^-1074 into base-2^32 digits held in 64-bit words; words are only carried
 * when the sum is read, so two accumulators add word by word (which is how
 * ranks combine theirs), in any order, with the same result.  2^31 additions
 * fit before a word could overflow.  Only values >= 0 are added.
 */
#define OPTIM_SUM_WORDS 68u

/* The three digits of a finite value >= 0; the first belongs to the word whose number is returned. */
ZC_FN unsigned optim_sum_split(double value, uint32_t digits[3])
{
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    unsigned exponent = (unsigned)(bits >> 52) & 0x7ffu;
    uint64_t mantissa = bits & 0xfffffffffffffull;
    if (exponent)
        mantissa |= 1ull << 52;
    else
        exponent = 1;
    unsigned shift = exponent - 1; /* value = mantissa * 2^shift * 2^-1074 */
    unsigned low = shift & 31u;
    uint64_t high = mantissa >> 32 << low; /* the mantissa has 53 bits: no bit is lost */
    uint64_t rest = (mantissa & 0xffffffffu) << low;
    high += rest >> 32;
    digits[0] = (uint32_t)rest;
    digits[1] = (uint32_t)high;
    digits[2] = (uint32_t)(high >> 32);
    return shift >> 5;
}

static inline void optim_sum_add(uint64_t words[OPTIM_SUM_WORDS], double value)
{
    uint32_t digits[3];
    unsigned word = optim_sum_split(value, digits);
    for (unsigned k = 0; k < 3; k++)
        words[word + k] += digits[k];
}

/* The accumulated sum, rounded once to the nearest double (inf if too large). */
double optim_sum_value(const uint64_t words[OPTIM_SUM_WORDS]);

#endif
