/*
 * The shape of a strided tensor in as few dimensions as possible: dimensions of
 * one element vanish, neighbours that are one run are joined.  What is left of a
 * contiguous tensor is one dimension of step 1, or none.
 */
#ifndef ZC_STRIDES_H
#define ZC_STRIDES_H

#include "zc_status.h"

#include <stddef.h>
#include <stdint.h>

#define STRIDES_MAX_DIMS 64

typedef struct strides_joined {
    size_t elems;
    int contiguous;
    int dims;
    int64_t extent[STRIDES_MAX_DIMS], step[STRIDES_MAX_DIMS]; /* row-major; steps in elements */
} strides_joined;

static inline zc_status strides_join(int dims, const int64_t *shape, const int64_t *strides, strides_joined *out)
{
    out->elems = 1;
    out->contiguous = 0;
    if (dims < 0 || dims > STRIDES_MAX_DIMS)
        return zc_fail(ZC_EINVAL, "a tensor of %d dimensions cannot be packed; at most %d are possible", dims,
                       STRIDES_MAX_DIMS);
    int kept = 0;
    for (int d = 0; d < dims; d++) {
        out->elems *= (size_t)shape[d];
        if (shape[d] == 1)
            continue;
        if (kept && out->step[kept - 1] == shape[d] * strides[d]) {
            out->extent[kept - 1] *= shape[d];
            out->step[kept - 1] = strides[d];
        } else {
            out->extent[kept] = shape[d];
            out->step[kept++] = strides[d];
        }
    }
    out->dims = kept;
    out->contiguous = kept == 0 || (kept == 1 && out->step[0] == 1);
    return ZC_OK;
}

#endif
