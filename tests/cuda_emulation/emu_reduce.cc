/*
 * The arithmetic of reductions: one addition at a time, rounded to the element
 * type after each, as a ring does from hop to hop.
 */
#include "emu_nccl_match.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>
#include <type_traits>

namespace emu {
namespace {

template <class T> struct plain {
    typedef T element;
    static T load(T x) { return x; }
    static T store(T x) { return x; }
};

struct half {
    typedef __half element;
    static float load(__half x) { return __half2float(x); }
    static __half store(float x) { return __float2half_rn(x); }
};

struct bfloat {
    typedef __nv_bfloat16 element;
    static float load(__nv_bfloat16 x) { return __bfloat162float(x); }
    static __nv_bfloat16 store(float x) { return __float2bfloat16_rn(x); }
};

/* Sums of signed integers wrap. */
template <class V> V combine(ncclRedOp_t op, V a, V b)
{
    typedef typename std::conditional<std::is_integral<V>::value, uint64_t, V>::type wide;
    switch (op) {
    case ncclProd:
        return (V)((wide)a * (wide)b);
    case ncclMax:
        return a > b ? a : b;
    case ncclMin:
        return a < b ? a : b;
    default:
        return (V)((wide)a + (wide)b);
    }
}

/* Element by element through memcpy: inputs may have any alignment of their own type. */
template <class T> void reduce(ncclRedOp_t op, char *to, const std::vector<const char *> &in, size_t count)
{
    typedef typename T::element element;
    for (size_t i = 0; i < count; i++) {
        element sum, next;
        memcpy(&sum, in[0] + i * sizeof sum, sizeof sum);
        for (size_t k = 1; k < in.size(); k++) {
            memcpy(&next, in[k] + i * sizeof next, sizeof next);
            sum = T::store(combine(op, T::load(sum), T::load(next)));
        }
        memcpy(to + i * sizeof sum, &sum, sizeof sum);
    }
}

} // namespace

size_t nccl_type_bytes(ncclDataType_t type)
{
    static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return (unsigned)type < sizeof bytes / sizeof *bytes ? bytes[type] : 0;
}

void nccl_reduce(ncclDataType_t type, ncclRedOp_t op, char *to, const std::vector<const char *> &in, size_t count)
{
    switch (type) {
    case ncclInt8:
        return reduce<plain<int8_t>>(op, to, in, count);
    case ncclUint8:
        return reduce<plain<uint8_t>>(op, to, in, count);
    case ncclInt32:
        return reduce<plain<int32_t>>(op, to, in, count);
    case ncclUint32:
        return reduce<plain<uint32_t>>(op, to, in, count);
    case ncclInt64:
        return reduce<plain<int64_t>>(op, to, in, count);
    case ncclUint64:
        return reduce<plain<uint64_t>>(op, to, in, count);
    case ncclFloat16:
        return reduce<half>(op, to, in, count);
    case ncclFloat32:
        return reduce<plain<float>>(op, to, in, count);
    case ncclFloat64:
        return reduce<plain<double>>(op, to, in, count);
    default:
        return reduce<bfloat>(op, to, in, count);
    }
}

} // namespace emu
