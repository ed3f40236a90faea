/*
 * The part of cpu_kernels_body.h that changes parameters: exact fp32 masters
 * of 16-bit parameters, and a loop for every rule of elem_update.h.
 */
#include "elem_update.h"

/* ---- masters ------------------------------------------------------------------ */

INNER void join_bf16(float *restrict to, const uint16_t *restrict param, const int16_t *restrict remainder,
                     size_t count)
{
    for (size_t i = 0; i < count; i++)
        to[i] = zc_master_join(param[i], remainder[i]);
}

INNER void split_bf16(uint16_t *restrict param, int16_t *restrict remainder, const float *restrict from,
                      size_t count)
{
    for (size_t i = 0; i < count; i++)
        zc_master_split(from[i], &param[i], &remainder[i]);
}

static void master_read(float *to, const void *param, const void *master, size_t count, zc_dtype param_dtype)
{
    switch (param_dtype) {
    case ZC_BFLOAT16:
        join_bf16(to, param, master, count);
        break;
    case ZC_FLOAT16:
        memcpy(to, master, count * sizeof(float));
        break;
    default:
        memcpy(to, param, count * zc_dtype_bytes(param_dtype));
    }
}

static void master_write(void *param, void *master, const float *from, size_t count, zc_dtype param_dtype)
{
    if (param_dtype == ZC_BFLOAT16) {
        split_bf16(param, master, from, count);
    } else {
        memcpy(master, from, count * sizeof(float));
        f32_to_f16(param, from, count);
    }
}

/* ---- updates --------------------------------------------------------------------- */

#define ADAM_LOOP(NAME, REAL, SUFFIX, DECOUPLED, FLAGS)                                               \
    static void NAME##_##SUFFIX(const optim_scalars_##SUFFIX *scalars, size_t count, REAL *restrict p, \
                                const REAL *restrict grad, REAL *restrict m, REAL *restrict v,        \
                                REAL *restrict vmax)                                                  \
    {                                                                                                 \
        const optim_scalars_##SUFFIX s = *scalars;                                                    \
        for (size_t i = 0; i < count; i++)                                                            \
            elem_adam_##SUFFIX(&s, DECOUPLED, FLAGS, grad[i], &p[i], &m[i], &v[i],                    \
                              (FLAGS) & OPTIM_AMSGRAD ? &vmax[i] : NULL);                             \
    }

#define SGD_LOOP(NAME, REAL, SUFFIX, FLAGS)                                                           \
    static void NAME##_##SUFFIX(const optim_scalars_##SUFFIX *scalars, size_t count, REAL *restrict p, \
                                const REAL *restrict grad, REAL *restrict m)                          \
    {                                                                                                 \
        const optim_scalars_##SUFFIX s = *scalars;                                                    \
        for (size_t i = 0; i < count; i++)                                                            \
            elem_sgd_##SUFFIX(&s, FLAGS, grad[i], &p[i], (FLAGS) & OPTIM_MOMENTUM ? &m[i] : NULL);    \
    }

/* A loop per combination of options that changes the arithmetic, and the choice among them. */
#define UPDATE_LOOPS(REAL, SUFFIX)                                                                    \
    ADAM_LOOP(adam, REAL, SUFFIX, 0, 0)                                                               \
    ADAM_LOOP(adam_decay, REAL, SUFFIX, 0, OPTIM_HAS_DECAY)                                           \
    ADAM_LOOP(adam_amsgrad, REAL, SUFFIX, 0, OPTIM_AMSGRAD)                                           \
    ADAM_LOOP(adam_amsgrad_decay, REAL, SUFFIX, 0, OPTIM_AMSGRAD | OPTIM_HAS_DECAY)                   \
    ADAM_LOOP(adamw_decay, REAL, SUFFIX, 1, OPTIM_HAS_DECAY)                                          \
    ADAM_LOOP(adamw_amsgrad_decay, REAL, SUFFIX, 1, OPTIM_AMSGRAD | OPTIM_HAS_DECAY)                  \
    SGD_LOOP(sgd, REAL, SUFFIX, 0)                                                                    \
    SGD_LOOP(sgd_decay, REAL, SUFFIX, OPTIM_HAS_DECAY)                                                \
    SGD_LOOP(sgd_momentum, REAL, SUFFIX, OPTIM_MOMENTUM)                                              \
    SGD_LOOP(sgd_momentum_decay, REAL, SUFFIX, OPTIM_MOMENTUM | OPTIM_HAS_DECAY)                      \
    SGD_LOOP(sgd_nesterov, REAL, SUFFIX, OPTIM_MOMENTUM | OPTIM_NESTEROV)                             \
    SGD_LOOP(sgd_nesterov_decay, REAL, SUFFIX, OPTIM_MOMENTUM | OPTIM_NESTEROV | OPTIM_HAS_DECAY)     \
    SGD_LOOP(sgd_first, REAL, SUFFIX, OPTIM_MOMENTUM | OPTIM_FIRST)                                   \
    SGD_LOOP(sgd_first_decay, REAL, SUFFIX, OPTIM_MOMENTUM | OPTIM_FIRST | OPTIM_HAS_DECAY)           \
    SGD_LOOP(sgd_first_nesterov, REAL, SUFFIX, OPTIM_MOMENTUM | OPTIM_FIRST | OPTIM_NESTEROV)         \
    SGD_LOOP(sgd_first_nesterov_decay, REAL, SUFFIX,                                                  \
             OPTIM_MOMENTUM | OPTIM_FIRST | OPTIM_NESTEROV | OPTIM_HAS_DECAY)                         \
                                                                                                      \
    static void update_##SUFFIX(optim_rule rule, unsigned flags, const optim_scalars_##SUFFIX *s,     \
                                size_t count, REAL *p, const REAL *grad, REAL *m, REAL *v, REAL *vmax) \
    {                                                                                                 \
        int decay = (flags & OPTIM_HAS_DECAY) != 0;                                                   \
        if (rule == OPTIM_SGD) {                                                                      \
            typedef void loop(const optim_scalars_##SUFFIX *, size_t, REAL *restrict,                 \
                              const REAL *restrict, REAL *restrict);                                  \
            static loop *const plain[2] = {sgd_##SUFFIX, sgd_decay_##SUFFIX};                         \
            static loop *const momentum[2][2][2] = {                                                  \
                {{sgd_momentum_##SUFFIX, sgd_momentum_decay_##SUFFIX},                                \
                 {sgd_nesterov_##SUFFIX, sgd_nesterov_decay_##SUFFIX}},                               \
                {{sgd_first_##SUFFIX, sgd_first_decay_##SUFFIX},                                      \
                 {sgd_first_nesterov_##SUFFIX, sgd_first_nesterov_decay_##SUFFIX}}};                  \
            loop *run = plain[decay];                                                                 \
            if (flags & OPTIM_MOMENTUM)                                                               \
                run = momentum[(flags & OPTIM_FIRST) != 0][(flags & OPTIM_NESTEROV) != 0][decay];     \
            run(s, count, p, grad, m);                                                                \
        } else {                                                                                      \
            typedef void loop(const optim_scalars_##SUFFIX *, size_t, REAL *restrict,                 \
                              const REAL *restrict, REAL *restrict, REAL *restrict, REAL *restrict);  \
            /* without decay adam and adamw are the same */                                           \
            static loop *const loops[2][2][2] = {                                                     \
                {{adam_##SUFFIX, adam_decay_##SUFFIX},                                                \
                 {adam_amsgrad_##SUFFIX, adam_amsgrad_decay_##SUFFIX}},                               \
                {{adam_##SUFFIX, adamw_decay_##SUFFIX},                                               \
                 {adam_amsgrad_##SUFFIX, adamw_amsgrad_decay_##SUFFIX}}};                             \
            loops[rule == OPTIM_ADAMW][(flags & OPTIM_AMSGRAD) != 0][decay](s, count, p, grad, m, v, vmax); \
        }                                                                                             \
    }

UPDATE_LOOPS(float, f)
UPDATE_LOOPS(double, d)

/* Element `at` of an optional array. */
#define AT(array, at) ((array) ? (array) + (at) : NULL)

/* 16-bit parameters are updated as fp32: bf16 in a tile of masters, fp16 in the master itself. */
static void update_narrow(optim_rule rule, const optim_segment_scalars *scalars, size_t count,
                          zc_dtype param_dtype, uint16_t *param, void *master, const float *grad, float *m,
                          float *v, float *vmax)
{
    for (size_t at = 0; at < count; at += TILE) {
        float tile[TILE];
        size_t n = tile_elems(at, count);
        float *p = param_dtype == ZC_FLOAT16 ? (float *)master + at : tile;
        int16_t *remainder = (int16_t *)master + at;
        if (param_dtype == ZC_BFLOAT16)
            join_bf16(p, param + at, remainder, n);
        update_f(rule, scalars->flags, &scalars->f, n, p, grad + at, AT(m, at), AT(v, at), AT(vmax, at));
        if (param_dtype == ZC_BFLOAT16)
            split_bf16(param + at, remainder, p, n);
        else
            f32_to_f16(param + at, p, n);
    }
}

static void update(optim_rule rule, const optim_segment_scalars *scalars, size_t count, zc_dtype param_dtype,
                   void *param, void *master, const void *grad, void *m, void *v, void *vmax)
{
    if (param_dtype == ZC_FLOAT32)
        update_f(rule, scalars->flags, &scalars->f, count, param, grad, m, v, vmax);
    else if (param_dtype == ZC_FLOAT64)
        update_d(rule, scalars->flags, &scalars->d, count, param, grad, m, v, vmax);
    else
        update_narrow(rule, scalars, count, param_dtype, param, master, grad, m, v, vmax);
}
