/*
 * Loading of the CUDA part; see cuda_load.h.
 */
#include "cuda_load.h"

#include <dlfcn.h>
#include <pthread.h>
#include <string.h>
#include <unistd.h>

#define HOW_TO_BUILD "install nvcc of CUDA 13 and build zero_c again: ZERO_C_CUDA=1 pip install ."

typedef const zc_cuda_plugin *(*get_function)(const zc_cuda_host *);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static const zc_cuda_plugin *loaded;

static void record(const char *sentence)
{
    zc_fail(ZC_OK, "%s", sentence);
}

static const zc_cuda_host host = {
    .abi = ZC_CUDA_PLUGIN_ABI,
    .bytes = sizeof(zc_cuda_host),
    .fail = record,
    .last_error = zc_last_error,
    .fault = zc_fault,
};

static zc_status open_library(const char *path, void **out)
{
    if (access(path, F_OK) != 0)
        return zc_fail(ZC_ESTATE, "this build of zero_c has no CUDA part (there is no %s); to use GPUs, " HOW_TO_BUILD,
                       path);
    *out = zc_fault() ? NULL : dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!*out) {
        const char *reason = dlerror();
        return zc_fail(ZC_ESYSTEM, "the CUDA part of zero_c could not be loaded: %s",
                       reason ? reason : "out of memory");
    }
    return ZC_OK;
}

/* Its table, if library and core are of one version. */
static zc_status ask(void *library, const char *path, const zc_cuda_plugin **out)
{
    get_function get;
    void *symbol = dlsym(library, "zc_cuda_plugin_get");
    if (!symbol)
        return zc_fail(ZC_ESTATE, "%s is not the CUDA part of zero_c: it has no zc_cuda_plugin_get; " HOW_TO_BUILD,
                       path);
    memcpy(&get, &symbol, sizeof get);
    const zc_cuda_plugin *plugin = get(&host);
    if (!plugin)
        return zc_fail(ZC_ESTATE, "%s was built for another version of zero_c: it refuses interface %u; " HOW_TO_BUILD,
                       path, ZC_CUDA_PLUGIN_ABI);
    if (plugin->abi != ZC_CUDA_PLUGIN_ABI || plugin->bytes != sizeof *plugin)
        return zc_fail(ZC_ESTATE, "%s was built for another version of zero_c: its interface is %u of %u bytes, this "
                       "one's %u of %zu; " HOW_TO_BUILD, path, plugin->abi, plugin->bytes, ZC_CUDA_PLUGIN_ABI,
                       sizeof *plugin);
    *out = plugin;
    return ZC_OK;
}

static zc_status load(const char *path)
{
    void *library;
    ZC_TRY(open_library(path, &library));
    zc_status status = ask(library, path, &loaded);
    if (status != ZC_OK)
        dlclose(library);
    return status;
}

zc_status cuda_load(const char *path, const zc_cuda_plugin **out)
{
    pthread_mutex_lock(&lock);
    zc_status status = loaded ? ZC_OK : load(path);
    *out = loaded;
    pthread_mutex_unlock(&lock);
    return status;
}
