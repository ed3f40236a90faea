/*
 * What a step decides from the facts of all ranks, and what it makes of each
 * segment: device.h's step_scalars, the same source for every device (ZC_FN).
 */
#ifndef DEVICE_STEP_H
#define DEVICE_STEP_H

#include "device.h"
#include "optim_math.h"

ZC_FN double device_step_norm(const device_step_args *args, uint32_t digits[OPTIM_SUM_DIGITS])
{
    if (args->stats->nan_ranks)
        return NAN;
    if (args->stats->inf_ranks)
        return INFINITY;
    return args->norm_factor * sqrt(optim_math_sum_value(args->stats->sum_squares, digits));
}

/* What makes a gradient of norm `norm` one of at most max_norm; NaN for a NaN norm, as in torch. */
ZC_FN double device_step_clip(double max_norm, double norm)
{
    double coefficient = max_norm / (norm + 1e-6);
    return coefficient > 1 ? 1 : coefficient;
}

/* `digits` is scratch memory of the caller. */
ZC_FN device_step device_step_decide(const device_step_args *args, uint32_t digits[OPTIM_SUM_DIGITS])
{
    const device_stats *stats = args->stats;
    device_step step;
    step.norm = NAN;
    if (args->want_norm || args->max_norm > 0)
        step.norm = device_step_norm(args, digits);
    step.nonfinite = stats->inf_ranks > stats->nan_ranks ? stats->inf_ranks : stats->nan_ranks;
    step.skipped = args->skip_nonfinite && step.nonfinite;
    step.grad_factor = args->base_factor * args->clip_factor;
    if (args->max_norm > 0)
        step.grad_factor *= device_step_clip(args->max_norm, step.norm);
    return step;
}

/* Segment i: counts its step and writes its scalars. args->options is memory that the caller can read. */
ZC_FN void device_step_segment(const device_step_args *args, const device_step *step, size_t i)
{
    device_segment *segment = &args->segment[i];
    optim_segment_scalars *scalars = &args->scalars[i];
    uint64_t used_ranks = args->stats->used[i / 4] >> (16 * (i % 4)) & 0xffffu;
    if (step->skipped || used_ranks == 0) {
        memset(scalars, 0, sizeof *scalars);
        return;
    }
    segment->step++;
    optim_math_scalars(args->rule, &args->options[segment->group], segment->step, step->grad_factor, scalars);
    if (scalars->flags & OPTIM_MOMENTUM) {
        if (!segment->has_momentum)
            scalars->flags |= OPTIM_FIRST;
        segment->has_momentum = 1;
    }
}

#endif
