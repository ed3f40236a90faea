/*
 * Options checked; scalars of a step and exact sums, as functions of the core.
 */
#include "optim_math.h"

#include <math.h>

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
    return optim_math_powi(base, exponent);
}

void optim_scalars(optim_rule rule, const optim_options *options, uint64_t step, double grad_factor,
                   optim_segment_scalars *out)
{
    optim_math_scalars(rule, options, step, grad_factor, out);
}

double optim_sum_value(const uint64_t words[OPTIM_SUM_WORDS])
{
    uint32_t digits[OPTIM_SUM_DIGITS];
    return optim_math_sum_value(words, digits);
}
