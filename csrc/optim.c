/*
 * Options checked, scalars of a step computed, exact sums read.
 *
 * Everything here is in double and uses only + - * / and sqrt, which IEEE 754
 * rounds the same way everywhere; libm's pow does not promise that.
 */
#include "optim.h"

#include <math.h>
#include <string.h>

static zc_status check_betas(const optim_options *options)
{
    if (!(options->beta1 >= 0 && options->beta1 < 1))
        return zc_fail(ZC_EINVAL, "betas[0] is %g; it must be in [0, 1)", options->beta1);
    if (!(options->beta2 >= 0 && options->beta2 < 1))
        return zc_fail(ZC_EINVAL, "betas[1] is %g; it must be in [0, 1)", options->beta2);
    if (!(options->eps >= 0))
        return zc_fail(ZC_EINVAL, "eps is %g; it must be >= 0", options->eps);
    return ZC_OK;
}

static zc_status check_momentum(const optim_options *options)
{
    if (!(options->momentum >= 0))
        return zc_fail(ZC_EINVAL, "momentum is %g; it must be >= 0", options->momentum);
    if (isnan(options->dampening))
        return zc_fail(ZC_EINVAL, "dampening is %g; it must be a number", options->dampening);
    if (options->nesterov && !(options->momentum > 0 && options->dampening == 0))
        return zc_fail(ZC_EINVAL,
                       "nesterov is set with momentum %g and dampening %g; it needs momentum > 0, dampening 0",
                       options->momentum, options->dampening);
    return ZC_OK;
}

zc_status optim_check(optim_rule rule, const optim_options *options)
{
    if (!(options->lr >= 0))
        return zc_fail(ZC_EINVAL, "lr is %g; it must be >= 0", options->lr);
    if (!(options->weight_decay >= 0))
        return zc_fail(ZC_EINVAL, "weight_decay is %g; it must be >= 0", options->weight_decay);
    switch (rule) {
    case OPTIM_ADAMW:
    case OPTIM_ADAM:
        return check_betas(options);
    case OPTIM_SGD:
        return check_momentum(options);
    }
    return zc_fail(ZC_EINVAL, "optimizer rule %d is unknown; it must be adamw, adam or sgd", (int)rule);
}

const char *optim_name(optim_rule rule)
{
    switch (rule) {
    case OPTIM_ADAMW:
        return "adamw";
    case OPTIM_ADAM:
        return "adam";
    case OPTIM_SGD:
        return "sgd";
    }
    return "?";
}

double optim_powi(double base, uint64_t exponent)
{
    double power = 1;
    for (; exponent; exponent >>= 1) {
        if (exponent & 1)
            power *= base;
        base *= base;
    }
    return power;
}

static optim_scalars_f round_scalars(const optim_scalars_d *d)
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

void optim_scalars(optim_rule rule, const optim_options *options, uint64_t step, double grad_factor,
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
        d->step_size = options->lr / (1 - optim_powi(options->beta1, step));
        d->inv_bias2 = 1 / sqrt(1 - optim_powi(options->beta2, step));
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
    out->f = round_scalars(d);
}

/* ---- the exact sum ------------------------------------------------------ */

#define DIGIT_BITS 32u
#define DIGITS (OPTIM_SUM_WORDS + 2u) /* room for the last word's carry */

/* Bits [at, at + 64) of the number, at >= 0. */
static uint64_t bits_from(const uint32_t digits[DIGITS], unsigned at)
{
    unsigned digit = at / DIGIT_BITS, low = at % DIGIT_BITS;
    unsigned __int128 window = 0;
    for (unsigned k = 0; k < 3; k++)
        if (digit + k < DIGITS)
            window |= (unsigned __int128)digits[digit + k] << (DIGIT_BITS * k);
    return (uint64_t)(window >> low);
}

static int any_bit_below(const uint32_t digits[DIGITS], unsigned at)
{
    unsigned digit = at / DIGIT_BITS;
    uint32_t any = digits[digit] & ((1u << at % DIGIT_BITS) - 1);
    while (digit-- > 0)
        any |= digits[digit];
    return any != 0;
}

double optim_sum_value(const uint64_t words[OPTIM_SUM_WORDS])
{
    uint32_t digits[DIGITS];
    uint64_t carry = 0;
    for (unsigned i = 0; i < DIGITS; i++) {
        carry += i < OPTIM_SUM_WORDS ? words[i] : 0;
        digits[i] = (uint32_t)carry;
        carry >>= DIGIT_BITS;
    }
    unsigned top = DIGITS;
    while (top > 0 && digits[top - 1] == 0)
        top--;
    if (top == 0)
        return 0;

    /* The number is an integer of `length` bits, in units of 2^-1074. */
    unsigned length = top * DIGIT_BITS - (unsigned)__builtin_clz(digits[top - 1]);
    if (length <= 53)
        return ldexp((double)bits_from(digits, 0), -1074);
    unsigned dropped = length - 53;
    uint64_t mantissa = bits_from(digits, dropped) & ((1ull << 53) - 1);
    int half = bits_from(digits, dropped - 1) & 1;
    if (half && ((mantissa & 1) || any_bit_below(digits, dropped - 1)))
        mantissa++; /* 2^53 is exact too */
    return ldexp((double)mantissa, (int)dropped - 1074); /* exact, or infinity */
}
