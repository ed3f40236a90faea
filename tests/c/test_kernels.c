/*
 * Every table of kernels this machine can run, against plain loops over one
 * element at a time: the same bytes for all types, sizes, alignments and
 * special values.  Where an operation meets a NaN only that the result is one
 * is compared, not which.
 */
#include "cpu_kernels.h"
#include "elem_update.h"
#include "testing.h"

#include <math.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define MOST 4200 /* elements of the largest test */
#define MAX_RANKS 5

static const size_t sizes[] = {0,  1,  7,   8,   15,  31,  63,  64,   65,   66,  70,   100,
                               127, 128, 129, 511, 512, 513, 1000, 4095, 4096, 4097};
#define SIZES (sizeof sizes / sizeof *sizes)

static const cpu_kernels *tables[3];
static int table_count;

/* ---- values -------------------------------------------------------------------- */

static const uint32_t special_f32[] = {0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007fffff, 0x00800000,
                                       0x3f800000, 0xbf800000, 0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000,
                                       0x7fc00000, 0xffc00001, 0x7f800001, 0x33000000, 0x33000001, 0x477fe000,
                                       0x477ff000, 0x477fefff, 0x38800000, 0x387fffff, 0x3f808000, 0x3f818000};

typedef enum kind { ORDINARY, SPECIAL } kind;

static float value_f32(uint64_t *state, kind k)
{
    if (k == SPECIAL && testing_random(state) % 3 == 0)
        return zc_bits_float(special_f32[testing_random(state) % (sizeof special_f32 / 4)]);
    if (k == SPECIAL && testing_random(state) % 3 == 0)
        return zc_bits_float((uint32_t)testing_random(state));
    return ldexpf(testing_float(state), (int)(testing_random(state) % 9) - 4);
}

static void fill(void *to, size_t count, zc_dtype dtype, kind k, uint64_t *state)
{
    for (size_t i = 0; i < count; i++) {
        float f = value_f32(state, k);
        uint64_t bits = testing_random(state);
        switch (dtype) {
        case ZC_FLOAT32:
            ((float *)to)[i] = f;
            break;
        case ZC_FLOAT64:
            ((double *)to)[i] = (double)f * (1 + (double)(bits >> 40) * 0x1p-52);
            if (k == SPECIAL && bits % 4 == 0)
                memcpy((double *)to + i, &(uint64_t){testing_random(state)}, 8);
            break;
        case ZC_BFLOAT16:
            ((uint16_t *)to)[i] = zc_float_to_bf16(f);
            break;
        case ZC_FLOAT16:
            ((uint16_t *)to)[i] = zc_float_to_fp16(f);
            break;
        default:
            memcpy((char *)to + i * zc_dtype_bytes(dtype), &bits, zc_dtype_bytes(dtype));
        }
    }
}

static double get(const void *from, size_t i, zc_dtype dtype)
{
    switch (dtype) {
    case ZC_FLOAT32:
        return (double)((const float *)from)[i];
    case ZC_FLOAT64:
        return ((const double *)from)[i];
    case ZC_BFLOAT16:
        return (double)zc_bf16_to_float(((const uint16_t *)from)[i]);
    default:
        return (double)zc_fp16_to_float(((const uint16_t *)from)[i]);
    }
}

static int is_nan(const void *array, size_t i, zc_dtype dtype)
{
    return dtype <= ZC_FLOAT16 && isnan(get(array, i, dtype));
}

/* Equal bytes, or both NaN. */
static void same(const char *what, const cpu_kernels *table, const void *got, const void *want, size_t count,
                 zc_dtype dtype)
{
    size_t bytes = zc_dtype_bytes(dtype);
    for (size_t i = 0; i < count; i++) {
        if (!memcmp((const char *)got + i * bytes, (const char *)want + i * bytes, bytes) ||
            (is_nan(got, i, dtype) && is_nan(want, i, dtype)))
            continue;
        testing_failures++;
        fprintf(stderr, "%s, table %s, %s: element %zu of %zu differs (%a, not %a)\n", what, table->isa,
                zc_dtype_name(dtype), i, count, get(got, i, dtype), get(want, i, dtype));
        return;
    }
}

/* Memory with room for a start that is not aligned, and a guard behind the end. */
typedef struct array {
    _Alignas(64) unsigned char bytes[MOST * 8 + 256];
} array;

static void *at(array *a, size_t offset_elems, zc_dtype dtype)
{
    return a->bytes + 64 + offset_elems * zc_dtype_bytes(dtype);
}

static void *reset(array *a, size_t offset_elems, zc_dtype dtype)
{
    memset(a->bytes, 0xa5, sizeof a->bytes);
    return at(a, offset_elems, dtype);
}

static void guards_hold(const array *a, const void *begin, size_t bytes)
{
    size_t head = (size_t)((const unsigned char *)begin - a->bytes), wrong = 0;
    for (size_t i = 0; i < sizeof a->bytes; i++)
        wrong += (i < head || i >= head + bytes) && a->bytes[i] != 0xa5;
    CHECK_EQ(wrong, 0);
}

/* ---- the tests -------------------------------------------------------------------- */

static void copies(void)
{
    static array from, to;
    uint64_t state = 1;
    for (size_t i = 0; i < sizeof from.bytes; i++)
        from.bytes[i] = (unsigned char)testing_random(&state);
    for (int t = 0; t < table_count; t++)
        for (size_t s = 0; s < SIZES; s++)
            for (size_t shift = 0; shift < 70; shift += s % 3 ? 9 : 1) {
                unsigned char *begin = (unsigned char *)reset(&to, 0, ZC_UINT8) + shift;
                tables[t]->copy_stream(begin, from.bytes + shift % 5, sizes[s]);
                CHECK(!memcmp(begin, from.bytes + shift % 5, sizes[s]));
                guards_hold(&to, begin, sizes[s]);
            }
}

static float plain_sum_f32(const void *const *in, size_t ranks, size_t i, zc_dtype dtype)
{
    float sum = in[0] ? (float)get(in[0], i, dtype) : 0;
    for (size_t k = 1; k < ranks; k++)
        sum = sum + (in[k] ? (float)get(in[k], i, dtype) : 0);
    return sum;
}

static double plain_sum_f64(const void *const *in, size_t ranks, size_t i)
{
    double sum = in[0] ? get(in[0], i, ZC_FLOAT64) : 0;
    for (size_t k = 1; k < ranks; k++)
        sum = sum + (in[k] ? get(in[k], i, ZC_FLOAT64) : 0);
    return sum;
}

/* absent: which input is NULL; alias: which one is `to`; -1: none. */
static void check_reduce(const cpu_kernels *table, zc_dtype dtype, size_t ranks, size_t count, size_t offset,
                         int accumulate, int absent, int alias, kind k, uint64_t *state)
{
    static array inputs[MAX_RANKS], result, wanted;
    zc_dtype sum = zc_dtype_sum(dtype);
    const void *in[MAX_RANKS];
    void *to = reset(&result, offset, sum), *want = reset(&wanted, offset, sum);
    for (size_t r = 0; r < ranks; r++) {
        void *begin = at(&inputs[r], offset + r, dtype);
        fill(begin, count, dtype, k, state);
        in[r] = (int)r == absent ? NULL : begin;
    }
    fill(to, count, sum, k, state);
    if (alias >= 0)
        in[alias] = to;
    uint32_t flags = 0;
    for (size_t i = 0; i < count; i++) {
        double value;
        if (dtype == ZC_FLOAT64) {
            value = plain_sum_f64(in, ranks, i);
            if (accumulate)
                value = ((double *)to)[i] + value;
            ((double *)want)[i] = value;
        } else {
            float f = plain_sum_f32(in, ranks, i, dtype);
            if (accumulate)
                f = ((float *)to)[i] + f;
            ((float *)want)[i] = f;
            value = (double)f;
        }
        flags |= isnan(value) ? CPU_NONFINITE_NAN : isinf(value) ? CPU_NONFINITE_INF : 0;
    }
    CHECK_EQ(table->reduce(to, in, ranks, count, dtype, accumulate), flags);
    same("reduce", table, to, want, count, sum);
    guards_hold(&result, to, count * zc_dtype_bytes(sum));
}

static void reductions(void)
{
    uint64_t state = 2;
    for (int t = 0; t < table_count; t++)
        for (zc_dtype dtype = ZC_FLOAT32; dtype <= ZC_FLOAT16; dtype++)
            for (size_t ranks = 1; ranks <= MAX_RANKS; ranks++)
                for (size_t s = 0; s < SIZES; s++)
                    for (int variant = 0; variant < 4; variant++) {
                        int absent = testing_random(&state) % 3 ? -1 : (int)(testing_random(&state) % ranks);
                        int alias = dtype == zc_dtype_sum(dtype) && variant == 2
                                        ? (int)(testing_random(&state) % ranks) : -1;
                        check_reduce(tables[t], dtype, ranks, sizes[s], testing_random(&state) % 17, variant & 1,
                                     absent, alias, variant == 3 ? SPECIAL : ORDINARY, &state);
                        check_reduce(tables[t], dtype, ranks, sizes[s], 0, 0, absent, alias, SPECIAL, &state);
                    }
}

/* Long enough for streaming stores. */
static void long_reductions(void)
{
    enum { COUNT = 100003 };
    uint64_t state = 3;
    float *a = malloc(4 * COUNT), *b = malloc(4 * COUNT), *to = malloc(4 * COUNT + 64);
    fill(a, COUNT, ZC_FLOAT32, ORDINARY, &state);
    fill(b, COUNT, ZC_FLOAT32, ORDINARY, &state);
    for (int t = 0; t < table_count; t++)
        for (size_t shift = 0; shift < 16; shift += 3) {
            memset(to, 0xff, 4 * COUNT + 64);
            a[77777] = shift == 3 ? INFINITY : 1;
            uint32_t flags = tables[t]->reduce(to + shift, (const void *[]){a, b}, 2, COUNT, ZC_FLOAT32, 0);
            CHECK_EQ(flags, shift == 3 ? CPU_NONFINITE_INF : 0);
            size_t wrong = 0;
            for (size_t i = 0; i < COUNT; i++)
                wrong += to[shift + i] != a[i] + b[i];
            CHECK_EQ(wrong, 0);
        }
    free(a), free(b), free(to);
}

static void minus_zero_meets_absent_rank(void)
{
    for (int t = 0; t < table_count; t++) {
        float minus[1] = {-0.0f}, to[1];
        tables[t]->reduce(to, (const void *[]){minus}, 1, 1, ZC_FLOAT32, 0);
        CHECK_EQ(zc_float_bits(to[0]), 0x80000000u);
        tables[t]->reduce(to, (const void *[]){minus, NULL}, 2, 1, ZC_FLOAT32, 0);
        CHECK_EQ(zc_float_bits(to[0]), 0);
        tables[t]->reduce(to, (const void *[]){NULL}, 1, 1, ZC_FLOAT32, 0);
        CHECK_EQ(zc_float_bits(to[0]), 0);
    }
}

static void check_squares(const cpu_kernels *table, zc_dtype dtype, size_t count, kind k, uint64_t *state)
{
    static array input;
    uint64_t got[OPTIM_SUM_WORDS] = {7}, want[OPTIM_SUM_WORDS] = {7};
    void *from = at(&input, 3, dtype);
    fill(from, count, dtype, k, state);
    uint32_t flags = 0;
    for (size_t block = 0; block < count; block += 64) {
        double lane[8] = {0};
        uint32_t found = 0;
        for (size_t i = block; i < count && i < block + 64; i++) {
            double x = get(from, i, dtype);
            found |= isnan(x) ? CPU_NONFINITE_NAN : isinf(x) ? CPU_NONFINITE_INF : 0;
            lane[i % 8] = lane[i % 8] + x * x;
        }
        double sum = ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
        if (!found && isinf(sum))
            found = CPU_NONFINITE_INF;
        if (!found)
            optim_sum_add(want, sum);
        flags |= found;
    }
    CHECK_EQ(table->sum_squares(got, from, count, dtype), flags);
    CHECK(!memcmp(got, want, sizeof got));
}

static void squares(void)
{
    uint64_t state = 4;
    for (int t = 0; t < table_count; t++)
        for (zc_dtype dtype = ZC_FLOAT32; dtype <= ZC_FLOAT64; dtype++)
            for (size_t s = 0; s < SIZES; s++)
                for (int repeat = 0; repeat < 4; repeat++) {
                    check_squares(tables[t], dtype, sizes[s], ORDINARY, &state);
                    check_squares(tables[t], dtype, sizes[s], SPECIAL, &state);
                }
}

/* Rounds through every candidate: double to a 16-bit float, once, to nearest even. */
static double narrow(double value, zc_dtype to)
{
    int digits = to == ZC_BFLOAT16 ? 8 : to == ZC_FLOAT16 ? 11 : 24;
    int lowest = to == ZC_FLOAT16 ? -24 : to == ZC_BFLOAT16 ? -133 : -149;
    double largest = to == ZC_FLOAT16 ? 65504 : to == ZC_BFLOAT16 ? 0x1.fep127 : 0x1.fffffep127;
    if (to == ZC_FLOAT64 || isnan(value) || isinf(value) || value == 0)
        return value;
    int exponent;
    frexp(value, &exponent);
    int unit = exponent - digits > lowest ? exponent - digits : lowest;
    double rounded = unit < -1000 ? value : ldexp(rint(ldexp(value, -unit)), unit);
    return fabs(rounded) > largest ? copysign(INFINITY, value) : copysign(rounded, value);
}

static void conversions(void)
{
    static array input, output;
    uint64_t state = 5;
    for (int t = 0; t < table_count; t++)
        for (zc_dtype from = ZC_FLOAT32; from <= ZC_FLOAT16; from++)
            for (zc_dtype to = ZC_FLOAT32; to <= ZC_FLOAT16; to++)
                for (size_t s = 0; s < SIZES; s++) {
                    size_t count = sizes[s];
                    void *in = at(&input, 1, from), *out = reset(&output, 3, to);
                    fill(in, count, from, SPECIAL, &state);
                    for (size_t i = 0; from == ZC_FLOAT64 && i + 3 < count; i += 5) {
                        /* just beside the middle between two 16-bit values */
                        double odd = 2 * (double)(testing_random(&state) % 64) + 1;
                        double middle = ldexp(1 + odd / 2048, (int)i % 40 - 30);
                        ((double *)in)[i] = middle;
                        ((double *)in)[i + 1] = nextafter(middle, 100);
                        ((double *)in)[i + 2] = nextafter(middle, 0);
                    }
                    tables[t]->convert(out, to, in, from, count);
                    guards_hold(&output, out, count * zc_dtype_bytes(to));
                    for (size_t i = 0; i < count; i++) {
                        double want = narrow(get(in, i, from), to), got = get(out, i, to);
                        int right = isnan(want) ? isnan(got) : got == want && signbit(got) == signbit(want);
                        if (!right) {
                            testing_failures++;
                            fprintf(stderr, "convert %s to %s, table %s: %a became %a, not %a\n",
                                    zc_dtype_name(from), zc_dtype_name(to), tables[t]->isa, get(in, i, from), got,
                                    want);
                            break;
                        }
                    }
                    /* the bits of a NaN too, for the types with a scalar rule */
                    if (from == ZC_FLOAT32 && (to == ZC_BFLOAT16 || to == ZC_FLOAT16))
                        for (size_t i = 0; i < count; i++) {
                            float f = ((float *)in)[i];
                            uint16_t half = to == ZC_BFLOAT16 ? zc_float_to_bf16(f) : zc_float_to_fp16(f);
                            CHECK_EQ(((uint16_t *)out)[i], half);
                        }
                }
}

static void every_fp16(void)
{
    static uint16_t halves[65536], back[65536];
    static float floats[65536];
    for (uint32_t i = 0; i < 65536; i++)
        halves[i] = (uint16_t)i;
    for (int t = 0; t < table_count; t++) {
        tables[t]->convert(floats, ZC_FLOAT32, halves, ZC_FLOAT16, 65536);
        tables[t]->convert(back, ZC_FLOAT16, floats, ZC_FLOAT32, 65536);
        size_t wrong = 0;
        for (uint32_t i = 0; i < 65536; i++)
            wrong += zc_float_bits(floats[i]) != zc_float_bits(zc_fp16_to_float((uint16_t)i)) ||
                     back[i] != zc_float_to_fp16(floats[i]);
        CHECK_EQ(wrong, 0);
    }
}

static void masters(void)
{
    static array floats, params, rests, back;
    uint64_t state = 6;
    for (int t = 0; t < table_count; t++)
        for (size_t s = 0; s < SIZES; s++) {
            size_t count = sizes[s];
            float *from = at(&floats, 1, ZC_FLOAT32), *to = reset(&back, 2, ZC_FLOAT32);
            uint16_t *param = reset(&params, 3, ZC_BFLOAT16);
            int16_t *rest = reset(&rests, 5, ZC_BFLOAT16);
            fill(from, count, ZC_FLOAT32, SPECIAL, &state);
            tables[t]->master_write(param, rest, from, count, ZC_BFLOAT16);
            guards_hold(&params, param, 2 * count);
            guards_hold(&rests, rest, 2 * count);
            tables[t]->master_read(to, param, rest, count, ZC_BFLOAT16);
            guards_hold(&back, to, 4 * count);
            for (size_t i = 0; i < count; i++) {
                uint16_t half;
                int16_t remainder;
                zc_master_split(from[i], &half, &remainder);
                CHECK_EQ(param[i], half);
                CHECK_EQ(rest[i], remainder);
            }
            same("bf16 master", tables[t], to, from, count, ZC_FLOAT32);

            float *master = reset(&rests, 2, ZC_FLOAT32);
            tables[t]->master_write(param, master, from, count, ZC_FLOAT16);
            tables[t]->master_read(to, param, master, count, ZC_FLOAT16);
            CHECK(!memcmp(to, from, 4 * count));
            for (size_t i = 0; i < count; i++)
                CHECK_EQ(param[i], zc_float_to_fp16(from[i]));
            tables[t]->master_read(to, from, NULL, count, ZC_FLOAT32);
            CHECK(!memcmp(to, from, 4 * count));
        }
}

static void scaling(void)
{
    static array input, output;
    uint64_t state = 7;
    for (int t = 0; t < table_count; t++)
        for (size_t s = 0; s < SIZES; s++) {
            float *f = at(&input, 1, ZC_FLOAT32), *to = reset(&output, 2, ZC_FLOAT32);
            fill(f, sizes[s], ZC_FLOAT32, ORDINARY, &state);
            tables[t]->scale(to, f, sizes[s], ZC_FLOAT32, 0.1);
            guards_hold(&output, to, 4 * sizes[s]);
            for (size_t i = 0; i < sizes[s]; i++)
                CHECK(to[i] == 0.1f * f[i]);
            double *d = at(&input, 1, ZC_FLOAT64);
            fill(d, sizes[s], ZC_FLOAT64, ORDINARY, &state);
            double first = d[0];
            tables[t]->scale(d, d, sizes[s], ZC_FLOAT64, 0.1);
            CHECK(sizes[s] == 0 || d[0] == 0.1 * first);
        }
}

/* One update of one element with the scalar formulas of this file. */
static float plain_update_f32(optim_rule rule, const optim_segment_scalars *s, float p, float sum, float *m, float *v,
                              float *vmax)
{
    const optim_scalars_f *f = &s->f;
    int decay = (s->flags & OPTIM_HAS_DECAY) != 0;
    float g = f->grad_factor * sum;
    if (rule != OPTIM_ADAMW && decay)
        g = g + f->decay * p;
    if (rule == OPTIM_SGD) {
        if (s->flags & OPTIM_MOMENTUM) {
            *m = s->flags & OPTIM_FIRST ? g : *m * f->beta1 + f->beta1c * g;
            g = s->flags & OPTIM_NESTEROV ? g + f->beta1 * *m : *m;
        }
        return p - f->step_size * g;
    }
    if (rule == OPTIM_ADAMW && decay)
        p = p * f->decay;
    *m = *m + (g - *m) * f->beta1c;
    *v = *v * f->beta2 + (f->beta2c * g) * g;
    float root = *v;
    if (s->flags & OPTIM_AMSGRAD) {
        *vmax = isnan(*v) || *v > *vmax ? *v : *vmax;
        root = *vmax;
    }
    return p - (f->step_size * *m) / (sqrtf(root) * f->inv_bias2 + f->eps);
}

static double plain_update_f64(optim_rule rule, const optim_segment_scalars *s, double p, double sum, double *m,
                               double *v, double *vmax)
{
    const optim_scalars_d *d = &s->d;
    int decay = (s->flags & OPTIM_HAS_DECAY) != 0;
    double g = d->grad_factor * sum;
    if (rule != OPTIM_ADAMW && decay)
        g = g + d->decay * p;
    if (rule == OPTIM_SGD) {
        if (s->flags & OPTIM_MOMENTUM) {
            *m = s->flags & OPTIM_FIRST ? g : *m * d->beta1 + d->beta1c * g;
            g = s->flags & OPTIM_NESTEROV ? g + d->beta1 * *m : *m;
        }
        return p - d->step_size * g;
    }
    if (rule == OPTIM_ADAMW && decay)
        p = p * d->decay;
    *m = *m + (g - *m) * d->beta1c;
    *v = *v * d->beta2 + (d->beta2c * g) * g;
    double root = *v;
    if (s->flags & OPTIM_AMSGRAD) {
        *vmax = isnan(*v) || *v > *vmax ? *v : *vmax;
        root = *vmax;
    }
    return p - (d->step_size * *m) / (sqrt(root) * d->inv_bias2 + d->eps);
}

enum { PARAM, MASTER, M, V, VMAX, ARRAYS };

static void check_update(const cpu_kernels *table, optim_rule rule, const optim_segment_scalars *s, zc_dtype dtype,
                         size_t count, kind k, uint64_t *state)
{
    static array got[ARRAYS], want[ARRAYS], gradient;
    zc_dtype sum = zc_dtype_sum(dtype);
    zc_dtype master_type = dtype == ZC_BFLOAT16 ? ZC_BFLOAT16 : ZC_FLOAT32;
    zc_dtype types[ARRAYS] = {dtype, master_type, sum, sum, sum};
    void *g[ARRAYS], *w[ARRAYS], *grad = at(&gradient, 3, sum);
    for (int a = 0; a < ARRAYS; a++) {
        g[a] = reset(&got[a], (size_t)a, types[a]);
        w[a] = reset(&want[a], (size_t)a, types[a]);
        if (a == MASTER)
            continue;
        fill(g[a], count, types[a], k, state);
        for (size_t i = 0; (a == V || a == VMAX) && k == ORDINARY && i < count; i++) {
            if (sum == ZC_FLOAT64)
                ((double *)g[a])[i] = fabs(((double *)g[a])[i]);
            else
                ((float *)g[a])[i] = fabsf(((float *)g[a])[i]);
        }
    }
    fill(grad, count, sum, k, state);
    if (dtype == ZC_BFLOAT16 || dtype == ZC_FLOAT16) {
        static float exact[MOST];
        fill(exact, count, ZC_FLOAT32, k, state);
        table->master_write(g[PARAM], g[MASTER], exact, count, dtype);
    }
    for (int a = 0; a < ARRAYS; a++)
        memcpy(w[a], g[a], count * zc_dtype_bytes(types[a]));

    for (size_t i = 0; i < count; i++) {
        if (dtype == ZC_FLOAT64) {
            double *p = w[PARAM], *m = w[M], *v = w[V], *vmax = w[VMAX];
            p[i] = plain_update_f64(rule, s, p[i], ((double *)grad)[i], &m[i], &v[i], &vmax[i]);
            continue;
        }
        float p, *m = w[M], *v = w[V], *vmax = w[VMAX];
        if (dtype == ZC_BFLOAT16)
            p = zc_master_join(((uint16_t *)w[PARAM])[i], ((int16_t *)w[MASTER])[i]);
        else
            p = ((float *)w[dtype == ZC_FLOAT16 ? MASTER : PARAM])[i];
        p = plain_update_f32(rule, s, p, ((float *)grad)[i], &m[i], &v[i], &vmax[i]);
        if (dtype == ZC_BFLOAT16)
            zc_master_split(p, &((uint16_t *)w[PARAM])[i], &((int16_t *)w[MASTER])[i]);
        else
            ((float *)w[dtype == ZC_FLOAT16 ? MASTER : PARAM])[i] = p;
        if (dtype == ZC_FLOAT16)
            ((uint16_t *)w[PARAM])[i] = zc_float_to_fp16(p);
    }
    int adam = rule != OPTIM_SGD, ams = adam && (s->flags & OPTIM_AMSGRAD);
    int has_m = adam || (s->flags & OPTIM_MOMENTUM);
    table->update(rule, s, count, dtype, g[PARAM], dtype >= ZC_BFLOAT16 ? g[MASTER] : NULL, grad,
                  has_m ? g[M] : NULL, adam ? g[V] : NULL, ams ? g[VMAX] : NULL);
    for (int a = 0; a < ARRAYS; a++) {
        if (a == MASTER && dtype == ZC_BFLOAT16)
            CHECK(!memcmp(g[a], w[a], 2 * count));
        else
            same("update", table, g[a], w[a], count, types[a]);
        guards_hold(&got[a], g[a], a == MASTER && dtype < ZC_BFLOAT16 ? 0 : count * zc_dtype_bytes(types[a]));
    }
}

static void updates(void)
{
    static const size_t lengths[] = {1, 7, 64, 129, 513, 1030};
    uint64_t state = 8;
    for (int options = 0; options < 48; options++) {
        optim_rule rule = (optim_rule)(options / 16);
        optim_options o = {.lr = 0.01, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-6};
        o.weight_decay = options & 1 ? 0.1 : 0;
        o.amsgrad = rule != OPTIM_SGD && (options & 2);
        o.momentum = rule == OPTIM_SGD && (options & 6) ? 0.9 : 0;
        o.nesterov = rule == OPTIM_SGD && (options & 4);
        o.dampening = rule == OPTIM_SGD && !o.nesterov ? 0.25 : 0;
        o.maximize = (options & 8) != 0;
        optim_segment_scalars s;
        optim_scalars(rule, &o, 1 + (uint64_t)options, 0.5, &s);
        if (rule == OPTIM_SGD && o.momentum != 0 && (options & 8))
            s.flags |= OPTIM_FIRST;
        for (int t = 0; t < table_count; t++)
            for (zc_dtype dtype = ZC_FLOAT32; dtype <= ZC_FLOAT16; dtype++)
                for (size_t n = 0; n < sizeof lengths / sizeof *lengths; n++)
                    for (int special = 0; special < 2; special++)
                        check_update(tables[t], rule, &s, dtype, lengths[n], (kind)special, &state);
    }
}

static void check_combine(const cpu_kernels *table, zc_dtype dtype, cpu_op op, size_t ranks, size_t count, kind k,
                          int alias, uint64_t *state)
{
    static array inputs[MAX_RANKS], result, wanted;
    const void *in[MAX_RANKS];
    void *want = at(&wanted, 0, dtype), *to = reset(&result, 3, dtype);
    for (size_t r = 0; r < ranks; r++) {
        void *begin = alias == (int)r ? to : at(&inputs[r], r, dtype);
        fill(begin, count, dtype, k, state);
        in[r] = begin;
    }
    for (size_t i = 0; i < count; i++) {
        if (dtype >= ZC_INT32) {
            size_t bytes = zc_dtype_bytes(dtype);
            int64_t acc = 0;
            for (size_t r = 0; r < ranks; r++) {
                int64_t x = dtype == ZC_INT32 ? ((const int32_t *)in[r])[i]
                            : dtype == ZC_INT64 ? ((const int64_t *)in[r])[i] : ((const uint8_t *)in[r])[i];
                if (r == 0)
                    acc = x;
                else if (op == CPU_SUM)
                    acc = (int64_t)((uint64_t)acc + (uint64_t)x);
                else if (op == CPU_PROD)
                    acc = (int64_t)((uint64_t)acc * (uint64_t)x);
                else
                    acc = (op == CPU_MAX) == (x > acc) ? x : acc;
            }
            memcpy((char *)want + i * bytes, &acc, bytes);
            continue;
        }
        double wide = get(in[0], i, dtype);
        float acc = (float)wide;
        for (size_t r = 1; r < ranks; r++) {
            double x = get(in[r], i, dtype);
            int take = isnan(wide) ? 0 : isnan(x) || (op == CPU_MAX ? x > wide : x < wide);
            if (op >= CPU_MAX && op <= CPU_MIN)
                wide = take ? x : wide, acc = (float)wide;
            else if (dtype == ZC_FLOAT64)
                wide = op == CPU_SUM ? wide + x : wide * x;
            else
                wide = acc = op == CPU_SUM ? acc + (float)x : acc * (float)x;
        }
        if (dtype == ZC_FLOAT64)
            ((double *)want)[i] = wide;
        else if (dtype == ZC_FLOAT32)
            ((float *)want)[i] = acc;
        else
            ((uint16_t *)want)[i] = dtype == ZC_BFLOAT16 ? zc_float_to_bf16(acc) : zc_float_to_fp16(acc);
    }
    table->combine(to, in, ranks, count, dtype, op);
    same("combine", table, to, want, count, dtype);
    guards_hold(&result, to, count * zc_dtype_bytes(dtype));
}

static void combinations(void)
{
    static const size_t lengths[] = {0, 1, 7, 65, 513, 1030};
    uint64_t state = 9;
    for (int t = 0; t < table_count; t++)
        for (zc_dtype dtype = 0; dtype < ZC_DTYPE_COUNT; dtype++)
            for (cpu_op op = 0; op < CPU_OP_COUNT; op++)
                for (size_t ranks = 1; ranks <= 4; ranks++)
                    for (size_t n = 0; n < sizeof lengths / sizeof *lengths; n++)
                        for (int variant = 0; variant < 3; variant++)
                            check_combine(tables[t], dtype, op, ranks, lengths[n], variant ? SPECIAL : ORDINARY,
                                          variant == 2 ? (int)(ranks - 1) : -1, &state);
}

/* A caller that flushes denormals gets the same bits, and its mode back. */
static void mode_is_guarded(void)
{
#if defined(__x86_64__)
    unsigned before = _mm_getcsr();
    _mm_setcsr(before | 0x8040 | 0x6000); /* flush to zero, denormals are zero, round towards zero */
    unsigned odd = _mm_getcsr();
    unsigned long mode = cpu_mode_enter();
    float tiny[2] = {1e-40f, 1e-40f}, to[2], third[2] = {0x1p-25f, 1}, unit[2] = {1, 0x1.8p-24f};
    for (int t = 0; t < table_count; t++) {
        tables[t]->reduce(to, (const void *[]){tiny, tiny}, 2, 2, ZC_FLOAT32, 0);
        CHECK_EQ(zc_float_bits(to[0]), 2 * zc_float_bits(1e-40f));
        tables[t]->reduce(to, (const void *[]){third, unit}, 2, 2, ZC_FLOAT32, 0);
        CHECK_EQ(zc_float_bits(to[1]), 0x3f800001);
    }
    cpu_mode_leave(mode);
    CHECK_EQ(_mm_getcsr() & 0xffc0, odd & 0xffc0);
    _mm_setcsr(before);
#endif
}

static void tables_are_chosen(void)
{
    CHECK(cpu_kernels_named("base") != NULL);
    CHECK(cpu_kernels_named("avx9") == NULL);
    CHECK(cpu_kernels_error() == NULL || getenv("ZERO_C_ISA"));
    for (int t = 0; t < table_count; t++)
        CHECK(!strcmp(tables[t]->isa, cpu_kernels_named(tables[t]->isa)->isa));
    if (!getenv("ZERO_C_ISA"))
        CHECK(cpu_kernels_get() == tables[table_count - 1]);
}

int main(void)
{
    static const char *const names[] = {"base", "avx2", "avx512"};
    for (int i = 0; i < 3; i++)
        if (cpu_kernels_named(names[i]))
            tables[table_count++] = cpu_kernels_named(names[i]);
    printf("tables up to %s\n", tables[table_count - 1]->isa);
    RUN(tables_are_chosen);
    RUN(copies);
    RUN(minus_zero_meets_absent_rank);
    RUN(reductions);
    RUN(long_reductions);
    RUN(squares);
    RUN(conversions);
    RUN(every_fp16);
    RUN(masters);
    RUN(scaling);
    RUN(updates);
    RUN(combinations);
    RUN(mode_is_guarded);
    DONE();
}
