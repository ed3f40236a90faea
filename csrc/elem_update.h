/*
 * The update of one element, the same source for every CPU instruction set and
 * for CUDA: the bits of a trained model are decided here.
 *
 * Each operation is rounded once, in the order written; the compiler must not
 * contract a multiplication and an addition (-ffp-contract=off, -fmad=false).
 * `decoupled` and `flags` are constants at every call on the CPU, so that the
 * branches vanish and the loop around the call is vectorised.
 *
 * The functions exist for fp32 (suffix _f) and fp64 (_d): the file includes
 * itself once for each.
 */
#ifndef ELEM_REAL

#ifndef ELEM_UPDATE_H
#define ELEM_UPDATE_H

#include "optim.h"

#include <math.h>

#define ELEM_REAL float
#define ELEM_SCALARS optim_scalars_f
#define ELEM_SQRT sqrtf
#define ELEM(name) name##_f
#include "elem_update.h"
#undef ELEM_REAL
#undef ELEM_SCALARS
#undef ELEM_SQRT
#undef ELEM

#define ELEM_REAL double
#define ELEM_SCALARS optim_scalars_d
#define ELEM_SQRT sqrt
#define ELEM(name) name##_d
#include "elem_update.h"
#undef ELEM_REAL
#undef ELEM_SCALARS
#undef ELEM_SQRT
#undef ELEM

#endif

#else /* one arithmetic type */

/* Adam; `decoupled` is AdamW's weight decay. vmax is used with OPTIM_AMSGRAD only. */
ZC_FN void ELEM(elem_adam)(const ELEM_SCALARS *s, int decoupled, unsigned flags, ELEM_REAL sum,
                           ELEM_REAL *param, ELEM_REAL *exp_avg, ELEM_REAL *exp_avg_sq, ELEM_REAL *vmax)
{
    ELEM_REAL p = *param;
    ELEM_REAL g = s->grad_factor * sum;
    if (flags & OPTIM_HAS_DECAY) {
        if (decoupled)
            p = p * s->decay;
        else
            g = g + s->decay * p;
    }
    ELEM_REAL m = *exp_avg;
    m = m + (g - m) * s->beta1c;
    ELEM_REAL v = *exp_avg_sq * s->beta2 + (s->beta2c * g) * g;
    *exp_avg = m;
    *exp_avg_sq = v;
    if (flags & OPTIM_AMSGRAD) {
        ELEM_REAL largest = *vmax;
        largest = v > largest ? v : largest; /* keeps a NaN in vmax */
        v = v != v ? v : largest;            /* and takes one from v */
        *vmax = v;
    }
    ELEM_REAL denominator = ELEM_SQRT(v) * s->inv_bias2 + s->eps;
    *param = p - (s->step_size * m) / denominator;
}

/* SGD; buffer is used with OPTIM_MOMENTUM only. */
ZC_FN void ELEM(elem_sgd)(const ELEM_SCALARS *s, unsigned flags, ELEM_REAL sum, ELEM_REAL *param,
                          ELEM_REAL *buffer)
{
    ELEM_REAL p = *param;
    ELEM_REAL g = s->grad_factor * sum;
    if (flags & OPTIM_HAS_DECAY)
        g = g + s->decay * p;
    if (flags & OPTIM_MOMENTUM) {
        ELEM_REAL momentum = flags & OPTIM_FIRST ? g : *buffer * s->beta1 + s->beta1c * g;
        *buffer = momentum;
        g = flags & OPTIM_NESTEROV ? g + s->beta1 * momentum : momentum;
    }
    *param = p - s->step_size * g;
}

#endif
