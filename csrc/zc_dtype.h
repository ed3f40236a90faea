/*
 * Element types and the one rounding rule of each narrow type.
 *
 * fp32 -> bf16 is by integer arithmetic, to nearest even, NaN kept quiet; the
 * hardware's own conversion flushes denormals and is never used.  fp32 -> fp16
 * is to nearest even, exactly as F16C does it.
 *
 * A bf16 parameter's fp32 master is kept as the parameter's 16 bits plus a
 * signed 16-bit remainder:  master_bits = (bf16_bits << 16) + remainder.  Split
 * this way the bf16 value is the master rounded to nearest, ties away from
 * zero, and no bit of the master is stored twice.  A NaN master is made
 * canonical (0x7fc00000) first, because rounding could carry a NaN whose
 * payload is small into an infinity.
 *
 * ZC_FN is the qualifier of functions that run on every device; a compiler of
 * device code defines it before including any header of the core.
 */
#ifndef ZC_DTYPE_H
#define ZC_DTYPE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifndef ZC_FN
#define ZC_FN static inline
#endif

typedef enum zc_dtype {
    ZC_FLOAT32 = 0,
    ZC_FLOAT64 = 1,
    ZC_BFLOAT16 = 2,
    ZC_FLOAT16 = 3,
    ZC_INT32 = 4,   /* integers: collectives on plain arrays only */
    ZC_INT64 = 5,
    ZC_UINT8 = 6,
    ZC_DTYPE_COUNT = 7
} zc_dtype;

/* Bytes of one element; 0 for a number that is no dtype. */
static inline size_t zc_dtype_bytes(zc_dtype dtype)
{
    static const unsigned char bytes[ZC_DTYPE_COUNT] = {4, 8, 2, 2, 4, 8, 1};
    return (unsigned)dtype < ZC_DTYPE_COUNT ? bytes[dtype] : 0;
}

/* "float32", ...; "?" for a number that is no dtype. */
static inline const char *zc_dtype_name(zc_dtype dtype)
{
    static const char *const names[ZC_DTYPE_COUNT] = {"float32", "float64", "bfloat16", "float16",
                                                      "int32", "int64", "uint8"};
    return (unsigned)dtype < ZC_DTYPE_COUNT ? names[dtype] : "?";
}

/* The type in which gradients of `dtype` are summed and states are kept. */
static inline zc_dtype zc_dtype_sum(zc_dtype dtype)
{
    return dtype == ZC_FLOAT64 ? ZC_FLOAT64 : ZC_FLOAT32;
}

/* Bytes a parameter of `dtype` needs beside itself for an exact fp32 master. */
static inline size_t zc_dtype_master_bytes(zc_dtype dtype)
{
    return dtype == ZC_BFLOAT16 ? 2 : dtype == ZC_FLOAT16 ? 4 : 0;
}

ZC_FN uint32_t zc_float_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

ZC_FN float zc_bits_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

ZC_FN float zc_bf16_to_float(uint16_t half)
{
    return zc_bits_float((uint32_t)half << 16);
}

ZC_FN uint16_t zc_float_to_bf16(float value)
{
    uint32_t bits = zc_float_bits(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return (uint16_t)((bits >> 16) | 0x0040u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

/* The fp32 master of a bf16 parameter. */
ZC_FN float zc_master_join(uint16_t half, int16_t remainder)
{
    return zc_bits_float(((uint32_t)half << 16) + (uint32_t)(int32_t)remainder);
}

/* Splits a master; *half is the parameter, *remainder the rest. */
ZC_FN void zc_master_split(float master, uint16_t *half, int16_t *remainder)
{
    uint32_t bits = zc_float_bits(master);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        bits = 0x7fc00000u;
    *half = (uint16_t)((bits + 0x8000u) >> 16);
    *remainder = (int16_t)(bits - ((uint32_t)*half << 16));
}

/* Exact scalar conversions; denormals, infinities and NaN as F16C does them. */
float zc_fp16_to_float(uint16_t half);
uint16_t zc_float_to_fp16(float value);

#endif
