/* Finding NCCL; nccl_api.h says where. */
#define _GNU_SOURCE
#include "nccl_api.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#define ADVICE "install it (pip install 'nvidia-nccl-cu13>=2.28'), or name the file in ZERO_C_NCCL"

static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
static nccl_api api; /* version 0: not opened yet; kept for the life of the process, as the library is */

#if defined(ZERO_C_EMULATE)

void *emu_nccl_symbol(const char *name);

static zc_status open_library(const char *wheel, void **library, char *path, size_t path_bytes)
{
    (void)wheel;
    *library = NULL;
    snprintf(path, path_bytes, "the emulated NCCL");
    return ZC_OK;
}

static void *find(void *library, const char *name)
{
    (void)library;
    return emu_nccl_symbol(name);
}

#else

static void *find(void *library, const char *name)
{
    return dlsym(library, name);
}

static zc_status open_library(const char *wheel, void **library, char *path, size_t path_bytes)
{
    static const char system_name[] = "libnccl.so.2";
    const char *named = getenv("ZERO_C_NCCL");
    if (named && *named) {
        snprintf(path, path_bytes, "%s", named);
        *library = dlopen(named, RTLD_NOW | RTLD_LOCAL);
        if (!*library)
            return zc_fail(ZC_ESTATE, "ZERO_C_NCCL=%s cannot be loaded: %s", named, dlerror());
        return ZC_OK;
    }
    snprintf(path, path_bytes, "%s", system_name);
    *library = dlopen(system_name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
    if (!*library && wheel) {
        snprintf(path, path_bytes, "%s", wheel);
        *library = dlopen(wheel, RTLD_NOW | RTLD_LOCAL);
    }
    if (!*library) {
        snprintf(path, path_bytes, "%s", system_name);
        *library = dlopen(system_name, RTLD_NOW | RTLD_LOCAL);
    }
    if (!*library)
        return zc_fail(ZC_ESTATE, "NCCL was not found (%s); several GPUs need it: " ADVICE, dlerror());
    return ZC_OK;
}

#endif

static zc_status find_function(void *library, const char *path, const char *name, void **out)
{
    *out = find(library, name);
    if (!*out)
        return zc_fail(ZC_ESTATE, "%s has no function %s: it is no NCCL of version 2.27 or newer; " ADVICE, path, name);
    return ZC_OK;
}

static zc_status fill(const char *wheel, nccl_api *out)
{
    void *library;
    char path[1024];
    int version = 0;

    ZC_TRY(open_library(wheel, &library, path, sizeof path));
#define X(name, arguments) ZC_TRY(find_function(library, path, "nccl" #name, (void **)&out->name));
    NCCL_MAP(X)
#undef X
    ZC_TRY(find_function(library, path, "ncclGetErrorString", (void **)&out->GetErrorString));
    ZC_TRY(find_function(library, path, "ncclGetLastError", (void **)&out->GetLastError));
    ncclResult_t result = out->GetVersion(&version);
    if (result != ncclSuccess)
        return zc_fail(ZC_ESTATE, "%s does not tell its version: %s; " ADVICE, path, out->GetErrorString(result));
    if (version < NCCL_OLDEST)
        return zc_fail(ZC_ESTATE, "%s is NCCL %d.%d.%d; 2.27 or newer is needed: " ADVICE, path, version / 10000,
                       version / 100 % 100, version % 100);
    out->version = version;
    return ZC_OK;
}

zc_status nccl_open(const char *wheel, const nccl_api **out)
{
    zc_status status = ZC_OK;

    pthread_mutex_lock(&once);
    if (!api.version) {
        nccl_api found = {0};
        status = fill(wheel, &found);
        if (status == ZC_OK)
            api = found;
    }
    pthread_mutex_unlock(&once);
    *out = status == ZC_OK ? &api : NULL;
    return status;
}
