/*
 * fp16 <-> fp32, one element at a time, with the bits that F16C gives: NaN made
 * quiet and its payload kept, denormals exact, ties to even.
 */
#include "zc_dtype.h"

float zc_fp16_to_float(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16;
    uint32_t exponent = (half >> 10) & 0x1fu;
    uint32_t mantissa = half & 0x3ffu;
    if (exponent == 0x1f) {
        uint32_t quiet = mantissa ? 0x00400000u : 0;
        return zc_bits_float(sign | 0x7f800000u | quiet | (mantissa << 13));
    }
    if (exponent == 0) {
        /* zero or denormal: mantissa * 2^-24, exact in fp32 and normal there */
        float magnitude = (float)mantissa * 0x1p-24f;
        return zc_bits_float(sign | zc_float_bits(magnitude));
    }
    return zc_bits_float(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

uint16_t zc_float_to_fp16(float value)
{
    uint32_t bits = zc_float_bits(value);
    uint32_t sign = (bits >> 16) & 0x8000u;
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u)
        return (uint16_t)(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu));
    if (magnitude >= 0x47800000u) /* 2^16 and above; from 65520 on the carry below gives infinity too */
        return (uint16_t)(sign | 0x7c00u);

    /* Keep `significand >> shift`, round on what is shifted out. */
    uint32_t exponent = magnitude >> 23;
    uint32_t shift, significand, base;
    if (exponent >= 113) { /* normal in fp16: 2^-14 and above */
        shift = 13;
        significand = magnitude & 0x7fffffu;
        base = (exponent - 112) << 10;
    } else {
        if (exponent < 102) /* below 2^-25: rounds to zero */
            return (uint16_t)sign;
        shift = 126 - exponent; /* 14 .. 24 */
        significand = (magnitude & 0x7fffffu) | 0x800000u;
        base = 0;
    }
    uint32_t kept = base + (significand >> shift);
    uint32_t lost = significand & ((1u << shift) - 1), half = 1u << (shift - 1);
    if (lost > half || (lost == half && (kept & 1u)))
        kept++; /* a carry into the exponent is the right result, up to infinity */
    return (uint16_t)(sign | kept);
}
