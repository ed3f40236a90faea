/*
 * Every loop of the CPU backend, once; included by one file per instruction
 * set, which defines CPU_ISA_NAME and CPU_ISA_TABLE and is compiled with its
 * flags.  Copies and conversions are here, the rest in cpu_reduce_body.h and
 * cpu_update_body.h.
 *
 * Loops are plain C for the vectoriser.  Intrinsics stand only where C cannot
 * say it: streaming stores and fp16.  What matters more than instructions is
 * to touch memory once, so anything that needs two passes goes through tiles
 * of TILE elements that stay in the first-level cache.  The innermost loops
 * are functions of their own that are not inlined: inlined under a loop over
 * ranks or tiles, gcc would interchange the two and lose the vectors.
 */
#include "cpu_kernels.h"
#include "zc_point.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define TILE 512u

#define INNER static __attribute__((noinline))

/* The next loop's pointers may be equal, but never overlap otherwise. */
#if defined(__clang__)
#define SAME_INDEX _Pragma("clang loop vectorize(assume_safety)")
#else
#define SAME_INDEX _Pragma("GCC ivdep")
#endif

static inline size_t tile_elems(size_t at, size_t count)
{
    return count - at < TILE ? count - at : TILE;
}

/* ---- copies ------------------------------------------------------------- */

#if defined(__AVX512F__)
typedef __m512i wide;
#define WIDE_LOAD(from) _mm512_loadu_si512(from)
#define WIDE_STREAM(to, value) _mm512_stream_si512((void *)(to), value)
#elif defined(__AVX2__)
typedef __m256i wide;
#define WIDE_LOAD(from) _mm256_loadu_si256(from)
#define WIDE_STREAM(to, value) _mm256_stream_si256(to, value)
#elif defined(__x86_64__)
typedef __m128i wide;
#define WIDE_LOAD(from) _mm_loadu_si128(from)
#define WIDE_STREAM(to, value) _mm_stream_si128(to, value)
#endif

/* Without the fence. Whole cache lines are streamed, what is before and after them is copied. */
static void stream_bytes(void *to, const void *from, size_t bytes)
{
#if defined(__x86_64__)
    enum { LINE = 64, WIDES = LINE / sizeof(wide) };
    size_t head = (0 - (uintptr_t)to) % LINE;
    if (bytes >= 4 * (size_t)LINE) {
        memcpy(to, from, head);
        unsigned char *out = (unsigned char *)to + head;
        const unsigned char *in = (const unsigned char *)from + head;
        size_t left = bytes - head;
        for (; left >= LINE; left -= LINE, out += LINE, in += LINE)
            for (int k = 0; k < (int)WIDES; k++)
                WIDE_STREAM((wide *)out + k, WIDE_LOAD((const wide *)in + k));
        memcpy(out, in, left);
        return;
    }
#endif
    memcpy(to, from, bytes);
}

static void stream_fence(void)
{
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

static void copy_stream(void *to, const void *from, size_t bytes)
{
    stream_bytes(to, from, bytes);
    stream_fence();
}

/* ---- conversions to and from fp32 ---------------------------------------- */

INNER void bf16_to_f32(float *restrict to, const uint16_t *restrict from, size_t count)
{
    for (size_t i = 0; i < count; i++)
        to[i] = zc_bf16_to_float(from[i]);
}

INNER void f32_to_bf16(uint16_t *restrict to, const float *restrict from, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        uint32_t bits = zc_float_bits(from[i]);
        uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
        uint32_t kept = (bits & 0x7fffffffu) > 0x7f800000u ? bits | 0x00400000u : rounded;
        to[i] = (uint16_t)(kept >> 16);
    }
}

INNER void f16_to_f32(float *restrict to, const uint16_t *restrict from, size_t count)
{
    size_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
#endif
    for (; i < count; i++)
        to[i] = zc_fp16_to_float(from[i]);
}

INNER void f32_to_f16(uint16_t *restrict to, const float *restrict from, size_t count)
{
    size_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128((__m128i *)(to + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
    for (; i < count; i++)
        to[i] = zc_float_to_fp16(from[i]);
}

INNER void f64_to_f32(float *restrict to, const double *restrict from, size_t count)
{
    for (size_t i = 0; i < count; i++)
        to[i] = (float)from[i];
}

INNER void f32_to_f64(double *restrict to, const float *restrict from, size_t count)
{
    for (size_t i = 0; i < count; i++)
        to[i] = (double)from[i];
}

/*
 * fp64 to fp32 "to odd": where bits are lost the last one kept is set.  A
 * second rounding, to a 16-bit type, then gives what one rounding would.
 */
INNER void f64_to_f32_odd(float *restrict to, const double *restrict from, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        double value = from[i];
        float nearest = (float)value;
        uint32_t bits = zc_float_bits(nearest);
        if (value == value && (double)nearest != value) {
            if (__builtin_fabs((double)nearest) > __builtin_fabs(value))
                bits--;
            bits |= 1u;
        }
        to[i] = zc_bits_float(bits);
    }
}

static void to_f32(float *to, const void *from, size_t count, zc_dtype dtype)
{
    if (dtype == ZC_BFLOAT16)
        bf16_to_f32(to, from, count);
    else if (dtype == ZC_FLOAT16)
        f16_to_f32(to, from, count);
    else
        memcpy(to, from, count * sizeof(float));
}

static void from_f32(void *to, const float *from, size_t count, zc_dtype dtype)
{
    if (dtype == ZC_BFLOAT16)
        f32_to_bf16(to, from, count);
    else if (dtype == ZC_FLOAT16)
        f32_to_f16(to, from, count);
    else
        memcpy(to, from, count * sizeof(float));
}

static void convert(void *to, zc_dtype to_dtype, const void *from, zc_dtype from_dtype, size_t count)
{
    size_t to_bytes = zc_dtype_bytes(to_dtype), from_bytes = zc_dtype_bytes(from_dtype);
    if (to_dtype == from_dtype) {
        memcpy(to, from, count * to_bytes);
        return;
    }
    for (size_t at = 0; at < count; at += TILE) {
        float tile[TILE];
        size_t n = tile_elems(at, count);
        void *out = (char *)to + at * to_bytes;
        const void *in = (const char *)from + at * from_bytes;
        if (from_dtype == ZC_FLOAT64 && to_dtype == ZC_FLOAT32) {
            f64_to_f32(out, in, n);
            continue;
        }
        if (from_dtype == ZC_FLOAT64)
            f64_to_f32_odd(tile, in, n);
        else
            to_f32(tile, in, n, from_dtype);
        if (to_dtype == ZC_FLOAT64)
            f32_to_f64(out, tile, n);
        else
            from_f32(out, tile, n, to_dtype);
    }
}

/* ---- checksums -------------------------------------------------------------- */

#define PAIRS 4u

typedef uint64_t pair_lanes __attribute__((vector_size(8 * PAIRS)));

/*
 * Fletcher's sums, wide enough that nothing has to be reduced, in eight lanes.  Lane k sums words k, k + 8, ...: `a` of
 * it, and `b` as the sum of all its a's so far.  After g groups of eight, a word of lane k in group i has been added
 * g - i times; of the whole it must count 8 (g - i) - k times.  A vector holds four words with even k and, above them,
 * those with odd k, so that no element has to move.
 */
static void checksum(const void *data, size_t bytes, uint64_t sums[2])
{
    const unsigned char *at = data;
    pair_lanes a[2] = {{0}}, b[2] = {{0}};
    for (size_t g = bytes / sizeof(pair_lanes); g > 0; g--, at += sizeof(pair_lanes)) {
        pair_lanes words;
        memcpy(&words, at, sizeof words);
        a[0] += words & UINT32_MAX;
        a[1] += words >> 32;
        b[0] += a[0];
        b[1] += a[1];
    }
    sums[0] = sums[1] = 0;
    for (unsigned k = 0; k < 2 * PAIRS; k++) {
        sums[0] += a[k % 2][k / 2];
        sums[1] += 2 * PAIRS * b[k % 2][k / 2] - k * a[k % 2][k / 2];
    }
    for (size_t left = bytes % sizeof(pair_lanes); left > 0;) {
        size_t here = left < 4 ? left : 4;
        uint32_t word = 0;
        memcpy(&word, at, here);
        sums[0] += word;
        sums[1] += sums[0]; /* every word so far counts once more */
        at += here;
        left -= here;
    }
}

#include "cpu_reduce_body.h"
#include "cpu_update_body.h"

const cpu_kernels CPU_ISA_TABLE = {
    .isa = CPU_ISA_NAME,
    .copy_stream = copy_stream,
    .reduce = reduce,
    .sum_squares = sum_squares,
    .scale = scale,
    .update = update,
    .master_read = master_read,
    .master_write = master_write,
    .convert = convert,
    .combine = combine,
    .checksum = checksum,
};
