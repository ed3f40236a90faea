/*
 * The formulas of optim.h: the scalars of a step and the value of an exact sum,
 * the same source for the CPU and for device code (ZC_FN).
 *
 * Everything here is in double and uses only + - * / and sqrt, which IEEE 754
 * rounds the same way everywhere; libm's pow does not promise that.
 */
#ifndef OPTIM_MATH_H
#define OPTIM_MATH_H

#include "optim.h"

#include <math.h>
#include <string.h>

ZC_FN double optim_math_powi(double base, uint64_t exponent)
{
    double power = 1;
    for (; exponent; exponent >>= 1) {
        if (exponent & 1)
            power *= base;
        base *= base;
    }
    return power;
}

ZC_FN optim_scalars_f optim_math_round(const optim_scalars_d *d)
{
    optim_scalars_f f;
    memset(&f, 0, sizeof f);
    f.grad_factor = (float)d->grad_factor;
    f.step_size = (float)d->step_size;
    f.inv_bias2 = (float)d->inv_bias2;
    f.beta1c = (float)d->beta1c;
    f.beta2 = (float)d->beta2;
    f.beta2c = (float)d->beta2c;
    f.eps = (float)d->eps;
    f.decay = (float)d->decay;
    f.beta1 = (float)d->beta1;
    return f;
}

ZC_FN void optim_math_scalars(optim_rule rule, const optim_options *options, uint64_t step, double grad_factor,
                              optim_segment_scalars *out)
{
    memset(out, 0, sizeof *out); /* padding too: scalars are compared byte by byte */
    optim_scalars_d *d = &out->d;
    out->active = 1;
    d->grad_factor = options->maximize ? -grad_factor : grad_factor;
    if (rule == OPTIM_SGD) {
        d->step_size = options->lr;
        d->beta1 = options->momentum;
        d->beta1c = 1 - options->dampening;
        d->decay = options->weight_decay;
        if (options->momentum != 0)
            out->flags |= OPTIM_MOMENTUM;
        if (options->nesterov)
            out->flags |= OPTIM_NESTEROV;
    } else {
        d->step_size = options->lr / (1 - optim_math_powi(options->beta1, step));
        d->inv_bias2 = 1 / sqrt(1 - optim_math_powi(options->beta2, step));
        d->beta1 = options->beta1;
        d->beta1c = 1 - options->beta1;
        d->beta2 = options->beta2;
        d->beta2c = 1 - options->beta2;
        d->eps = options->eps;
        d->decay = rule == OPTIM_ADAMW ? 1 - options->lr * options->weight_decay : options->weight_decay;
        if (options->amsgrad)
            out->flags |= OPTIM_AMSGRAD;
    }
    if (d->decay != (rule == OPTIM_ADAMW ? 1.0 : 0.0))
        out->flags |= OPTIM_HAS_DECAY;
    out->f = optim_math_round(d);
}

/* ---- the exact sum ------------------------------------------------------ */

#define OPTIM_DIGIT_BITS 32u
#define OPTIM_SUM_DIGITS (OPTIM_SUM_WORDS + 2u) /* room for the last word's carry */

/* Bits [at, at + 64) of the number, at >= 0. */
ZC_FN uint64_t optim_math_bits(const uint32_t digits[OPTIM_SUM_DIGITS], unsigned at)
{
    unsigned digit = at / OPTIM_DIGIT_BITS, low = at % OPTIM_DIGIT_BITS;
    unsigned __int128 window = 0;
    for (unsigned k = 0; k < 3; k++)
        if (digit + k < OPTIM_SUM_DIGITS)
            window |= (unsigned __int128)digits[digit + k] << (OPTIM_DIGIT_BITS * k);
    return (uint64_t)(window >> low);
}

ZC_FN int optim_math_any_below(const uint32_t digits[OPTIM_SUM_DIGITS], unsigned at)
{
    unsigned digit = at / OPTIM_DIGIT_BITS;
    uint32_t any = digits[digit] & ((1u << at % OPTIM_DIGIT_BITS) - 1);
    while (digit-- > 0)
        any |= digits[digit];
    return any != 0;
}

/* The value of a sum (optim_sum_value); `digits` is the caller's scratch memory. */
ZC_FN double optim_math_sum_value(const uint64_t words[OPTIM_SUM_WORDS], uint32_t digits[OPTIM_SUM_DIGITS])
{
    uint64_t carry = 0;
    for (unsigned i = 0; i < OPTIM_SUM_DIGITS; i++) {
        carry += i < OPTIM_SUM_WORDS ? words[i] : 0;
        digits[i] = (uint32_t)carry;
        carry >>= OPTIM_DIGIT_BITS;
    }
    unsigned top = OPTIM_SUM_DIGITS;
    while (top > 0 && digits[top - 1] == 0)
        top--;
    if (top == 0)
        return 0;

    /* The number is an integer of `length` bits, in units of 2^-1074. */
    unsigned length = top * OPTIM_DIGIT_BITS - (unsigned)__builtin_clz(digits[top - 1]);
    if (length <= 53)
        return ldexp((double)optim_math_bits(digits, 0), -1074);
    unsigned dropped = length - 53;
    uint64_t mantissa = optim_math_bits(digits, dropped) & ((1ull << 53) - 1);
    int half = (int)(optim_math_bits(digits, dropped - 1) & 1);
    if (half && ((mantissa & 1) || optim_math_any_below(digits, dropped - 1)))
        mantissa++; /* 2^53 is exact too */
    return ldexp((double)mantissa, (int)dropped - 1074); /* exact, or infinity */
}

#endif
