/*
 * What GPUs there are, and whether they can be used, without touching one: no
 * context is made, so nobody pays for a GPU that is not chosen.
 */
#ifndef CUDA_PROBE_H
#define CUDA_PROBE_H

#include "cuda_plugin.h"

/*
 * Fills *out, or fails and says what is missing: a driver, a newer driver, a
 * GPU.  Versions are filled in as far as they are known then, too.
 */
zc_status cuda_probe(zc_cuda_probe *out);

/* ZC_OK if GPU `ordinal` can be used; else what is in the way, and what cuda_probe has to say. */
zc_status cuda_probe_gpu(int ordinal);

#endif
