/*
 * Finds the CUDA part of the core: a shared library beside the extension, which
 * a build has or has not.  Nothing of it is loaded before it is asked for.
 */
#ifndef CUDA_LOAD_H
#define CUDA_LOAD_H

#include "cuda/cuda_plugin.h"

/*
 * Loads the library at `path`, once per process: after the first success its
 * table is given again, whatever `path` is.  ZC_ESTATE if there is no such file
 * (this build has no CUDA part) or it belongs to another version of the core.
 */
zc_status cuda_load(const char *path, const zc_cuda_plugin **out);

#endif
