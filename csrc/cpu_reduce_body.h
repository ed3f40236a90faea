/*
 * The part of cpu_kernels_body.h that combines arrays: the rank-ordered sum of
 * gradients, sums of squares, and sums, products and extremes of plain arrays.
 */

/* A result that is no input and at least this large is written past the caches. */
#define STREAM_MIN_BYTES ((size_t)256 << 10)

/*
 * The passes over one tile, for fp32 and fp64.  Each returns the or of a word
 * per element whose top bit is set if the exponent of the value written is all
 * ones (adding one to the exponent field carries into the sign's place).
 */
#define REDUCE_PASSES(SUFFIX, REAL, BITS, EXPONENT, EXPONENT_ONE)                                     \
    static inline BITS marks_##SUFFIX(REAL value)                                                     \
    {                                                                                                 \
        BITS bits;                                                                                    \
        memcpy(&bits, &value, sizeof bits);                                                           \
        return (bits & EXPONENT) + EXPONENT_ONE;                                                      \
    }                                                                                                 \
                                                                                                      \
    INNER int pass_copy_##SUFFIX(REAL *to, const REAL *a, size_t count)                               \
    {                                                                                                 \
        BITS marks = 0;                                                                               \
        SAME_INDEX                                                                                    \
        for (size_t i = 0; i < count; i++) {                                                          \
            REAL s = a[i];                                                                            \
            marks |= marks_##SUFFIX(s);                                                               \
            to[i] = s;                                                                                \
        }                                                                                             \
        return marks >> (8 * sizeof marks - 1);                                                       \
    }                                                                                                 \
                                                                                                      \
    INNER int pass_add_##SUFFIX(REAL *to, const REAL *a, const REAL *b, size_t count)                 \
    {                                                                                                 \
        BITS marks = 0;                                                                               \
        SAME_INDEX                                                                                    \
        for (size_t i = 0; i < count; i++) {                                                          \
            REAL s = a[i] + b[i];                                                                     \
            marks |= marks_##SUFFIX(s);                                                               \
            to[i] = s;                                                                                \
        }                                                                                             \
        return marks >> (8 * sizeof marks - 1);                                                       \
    }                                                                                                 \
                                                                                                      \
    /* to += a + b */                                                                                 \
    INNER int pass_accumulate_##SUFFIX(REAL *to, const REAL *a, const REAL *b, size_t count)          \
    {                                                                                                 \
        BITS marks = 0;                                                                               \
        SAME_INDEX                                                                                    \
        for (size_t i = 0; i < count; i++) {                                                          \
            REAL s = to[i] + (a[i] + b[i]);                                                           \
            marks |= marks_##SUFFIX(s);                                                               \
            to[i] = s;                                                                                \
        }                                                                                             \
        return marks >> (8 * sizeof marks - 1);                                                       \
    }                                                                                                 \
                                                                                                      \
    /* Which kinds of non-finite values there are; only asked when there are some. */                 \
    INNER uint32_t nonfinite_##SUFFIX(const REAL *values, size_t count)                               \
    {                                                                                                 \
        uint32_t flags = 0;                                                                           \
        for (size_t i = 0; i < count; i++)                                                            \
            if (marks_##SUFFIX(values[i]) >> (8 * sizeof(BITS) - 1))                                  \
                flags |= values[i] != values[i] ? CPU_NONFINITE_NAN : CPU_NONFINITE_INF;              \
        return flags;                                                                                 \
    }                                                                                                 \
                                                                                                      \
    static uint32_t reduce_##SUFFIX(REAL *to, const void *const *in, size_t ranks, size_t count,      \
                                    zc_dtype dtype, int accumulate)                                   \
    {                                                                                                 \
        uint32_t flags = 0;                                                                           \
        int stream = !accumulate && count * sizeof(REAL) >= STREAM_MIN_BYTES;                         \
        for (size_t k = 0; k < ranks; k++)                                                            \
            stream &= in[k] != to;                                                                    \
        for (size_t at = 0; at < count; at += TILE) {                                                 \
            REAL first[TILE], next[TILE], result[TILE];                                               \
            ZC_POINT("reduce: a tile");                                                               \
            size_t n = tile_elems(at, count);                                                         \
            REAL *out = stream ? result : to + at;                                                    \
            const REAL *sum = operand_##SUFFIX(in[0], at, n, dtype, first);                           \
            for (size_t k = 1; k + 1 < ranks; k++) {                                                  \
                pass_add_##SUFFIX(first, sum, operand_##SUFFIX(in[k], at, n, dtype, next), n);        \
                sum = first;                                                                          \
            }                                                                                         \
            int marked;                                                                               \
            if (ranks > 1) {                                                                          \
                const REAL *last = operand_##SUFFIX(in[ranks - 1], at, n, dtype, next);               \
                marked = accumulate ? pass_accumulate_##SUFFIX(out, sum, last, n)                     \
                                    : pass_add_##SUFFIX(out, sum, last, n);                           \
            } else {                                                                                  \
                marked = accumulate ? pass_add_##SUFFIX(out, out, sum, n)                             \
                                    : pass_copy_##SUFFIX(out, sum, n);                                \
            }                                                                                         \
            if (marked)                                                                               \
                flags |= nonfinite_##SUFFIX(out, n);                                                  \
            if (stream)                                                                               \
                stream_bytes(to + at, result, n * sizeof(REAL));                                      \
        }                                                                                             \
        if (stream)                                                                                   \
            stream_fence();                                                                           \
        return flags;                                                                                 \
    }

/* Tile `at` of one rank's input as fp32: itself where it can be, else converted into `scratch`. */
static const float *operand_f32(const void *in, size_t at, size_t count, zc_dtype dtype, float *scratch)
{
    if (!in)
        return memset(scratch, 0, count * sizeof(float));
    if (dtype == ZC_FLOAT32)
        return (const float *)in + at;
    to_f32(scratch, (const uint16_t *)in + at, count, dtype);
    return scratch;
}

static const double *operand_f64(const void *in, size_t at, size_t count, zc_dtype dtype, double *scratch)
{
    (void)dtype;
    return in ? (const double *)in + at : memset(scratch, 0, count * sizeof(double));
}

REDUCE_PASSES(f32, float, uint32_t, 0x7f800000u, 0x00800000u)
REDUCE_PASSES(f64, double, uint64_t, 0x7ff0000000000000ull, 0x0010000000000000ull)

static uint32_t reduce(void *to, const void *const *in, size_t ranks, size_t count, zc_dtype dtype,
                       int accumulate)
{
    return dtype == ZC_FLOAT64 ? reduce_f64(to, in, ranks, count, dtype, accumulate)
                               : reduce_f32(to, in, ranks, count, dtype, accumulate);
}

/* ---- sum of squares ---------------------------------------------------------- */

typedef double lanes __attribute__((vector_size(64)));
typedef float lanes_f __attribute__((vector_size(32)));

static inline double add_lanes(const lanes *sum)
{
    const lanes s = *sum;
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}

INNER double block_squares_f32(const float *block)
{
    lanes sum = {0};
    for (int k = 0; k < 64; k += 8) {
        lanes_f narrow;
        memcpy(&narrow, block + k, sizeof narrow);
        lanes x = __builtin_convertvector(narrow, lanes);
        sum += x * x;
    }
    return add_lanes(&sum);
}

INNER double block_squares_f64(const double *block)
{
    lanes sum = {0};
    for (int k = 0; k < 64; k += 8) {
        lanes x;
        memcpy(&x, block + k, sizeof x);
        sum += x * x;
    }
    return add_lanes(&sum);
}

/*
 * A block's sum is finite exactly if its elements are and (fp64) no square
 * overflowed, so elements are looked at only where the sum is not.
 */
#define SUM_SQUARES(SUFFIX, REAL)                                                                     \
    static uint32_t sum_squares_##SUFFIX(uint64_t *words, const REAL *from, size_t count)             \
    {                                                                                                 \
        uint32_t flags = 0;                                                                           \
        for (size_t at = 0; at < count; at += 64) {                                                   \
            REAL last[64] = {0};                                                                      \
            const REAL *block = from + at;                                                            \
            if (count - at < 64)                                                                      \
                block = memcpy(last, block, (count - at) * sizeof(REAL));                             \
            double sum = block_squares_##SUFFIX(block);                                               \
            if (sum <= 0x1.fffffffffffffp+1023) {                                                     \
                optim_sum_add(words, sum);                                                            \
                continue;                                                                             \
            }                                                                                         \
            uint32_t found = nonfinite_##SUFFIX(block, 64);                                           \
            flags |= found ? found : CPU_NONFINITE_INF;                                               \
        }                                                                                             \
        return flags;                                                                                 \
    }

SUM_SQUARES(f32, float)
SUM_SQUARES(f64, double)

static uint32_t sum_squares(uint64_t words[OPTIM_SUM_WORDS], const void *from, size_t count, zc_dtype dtype)
{
    return dtype == ZC_FLOAT64 ? sum_squares_f64(words, from, count) : sum_squares_f32(words, from, count);
}

/* ---- scale ------------------------------------------------------------------- */

INNER void scale_f32(float *to, const float *from, size_t count, float factor)
{
    SAME_INDEX
    for (size_t i = 0; i < count; i++)
        to[i] = factor * from[i];
}

INNER void scale_f64(double *to, const double *from, size_t count, double factor)
{
    SAME_INDEX
    for (size_t i = 0; i < count; i++)
        to[i] = factor * from[i];
}

static void scale(void *to, const void *from, size_t count, zc_dtype dtype, double factor)
{
    if (dtype == ZC_FLOAT64)
        scale_f64(to, from, count, factor);
    else
        scale_f32(to, from, count, (float)factor);
}

/* ---- combine, for plain arrays ------------------------------------------------------ */

#define MAX_FLOAT(a, b) ((a) != (a) ? (a) : (b) != (b) || (b) > (a) ? (b) : (a))
#define MIN_FLOAT(a, b) ((a) != (a) ? (a) : (b) != (b) || (b) < (a) ? (b) : (a))
#define MAX_INT(a, b) ((b) > (a) ? (b) : (a))
#define MIN_INT(a, b) ((b) < (a) ? (b) : (a))

/* WRAP is a type in which + and * are defined for all operands. */
#define COMBINE_PASS(SUFFIX, TYPE, WRAP, KIND)                                                        \
    INNER void combine_##SUFFIX(TYPE *to, const TYPE *a, const TYPE *b, size_t count, cpu_op op)      \
    {                                                                                                 \
        switch (op) {                                                                                 \
        case CPU_SUM:                                                                                 \
            SAME_INDEX                                                                                \
            for (size_t i = 0; i < count; i++)                                                        \
                to[i] = (TYPE)((WRAP)a[i] + (WRAP)b[i]);                                              \
            break;                                                                                    \
        case CPU_PROD:                                                                                \
            SAME_INDEX                                                                                \
            for (size_t i = 0; i < count; i++)                                                        \
                to[i] = (TYPE)((WRAP)a[i] * (WRAP)b[i]);                                              \
            break;                                                                                    \
        case CPU_MAX:                                                                                 \
            SAME_INDEX                                                                                \
            for (size_t i = 0; i < count; i++)                                                        \
                to[i] = MAX_##KIND(a[i], b[i]);                                                       \
            break;                                                                                    \
        default:                                                                                      \
            SAME_INDEX                                                                                \
            for (size_t i = 0; i < count; i++)                                                        \
                to[i] = MIN_##KIND(a[i], b[i]);                                                       \
        }                                                                                             \
    }

COMBINE_PASS(f32, float, float, FLOAT)
COMBINE_PASS(f64, double, double, FLOAT)
COMBINE_PASS(i32, int32_t, uint32_t, INT)
COMBINE_PASS(i64, int64_t, uint64_t, INT)
COMBINE_PASS(u8, uint8_t, uint32_t, INT)

static void combine(void *to, const void *const *in, size_t ranks, size_t count, zc_dtype dtype, cpu_op op)
{
    size_t elem_bytes = zc_dtype_bytes(dtype);
    int narrow = dtype == ZC_BFLOAT16 || dtype == ZC_FLOAT16;
    if (ranks == 1) {
        memmove(to, in[0], count * elem_bytes);
        return;
    }
    for (size_t at = 0; at < count; at += TILE) {
        double first[TILE]; /* of any type */
        float next[TILE];
        size_t n = tile_elems(at, count);
        const void *sum = (const char *)in[0] + at * elem_bytes;
        if (narrow) {
            to_f32((float *)first, sum, n, dtype);
            sum = first;
        }
        for (size_t k = 1; k < ranks; k++) {
            const void *with = (const char *)in[k] + at * elem_bytes;
            if (narrow) {
                to_f32(next, with, n, dtype);
                with = next;
            }
            switch (dtype) {
            case ZC_FLOAT64:
                combine_f64(first, sum, with, n, op);
                break;
            case ZC_INT32:
                combine_i32((int32_t *)first, sum, with, n, op);
                break;
            case ZC_INT64:
                combine_i64((int64_t *)first, sum, with, n, op);
                break;
            case ZC_UINT8:
                combine_u8((uint8_t *)first, sum, with, n, op);
                break;
            default:
                combine_f32((float *)first, sum, with, n, op);
            }
            sum = first;
        }
        void *out = (char *)to + at * elem_bytes;
        if (narrow)
            from_f32(out, sum, n, dtype);
        else
            memcpy(out, sum, n * elem_bytes);
    }
}
