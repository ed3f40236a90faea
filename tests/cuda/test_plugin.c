/*
 * The CUDA part as the core loads it, on a machine without an NVIDIA driver:
 *     test_plugin <library built by nvcc> <this file as a library>
 *
 * Compiled with -DOTHER_PLUGIN as a shared library this file is a CUDA part of
 * another version; which, the environment variable OTHER_PLUGIN says.
 */
#define _GNU_SOURCE
#include "cuda_load.h"

#include <stdlib.h>
#include <string.h>

#if defined(OTHER_PLUGIN)

const zc_cuda_plugin *zc_cuda_plugin_get(const zc_cuda_host *host)
{
    static zc_cuda_plugin plugin;
    const char *kind = getenv("OTHER_PLUGIN");
    plugin.abi = ZC_CUDA_PLUGIN_ABI + (strcmp(kind, "abi") == 0);
    plugin.bytes = sizeof plugin + 8 * (strcmp(kind, "bytes") == 0);
    return host && strcmp(kind, "refuses") != 0 ? &plugin : NULL;
}

#else

#include "testing.h"

#include <dlfcn.h>

static const char *plugin_path, *other_path;

static int says(const char *words)
{
    if (strstr(zc_last_error(), words))
        return 1;
    fprintf(stderr, "\"%s\" is not in: %s\n", words, zc_last_error());
    return 0;
}

static void nothing_there(void)
{
    const zc_cuda_plugin *plugin = NULL;
    CHECK_EQ(cuda_load("/nonexistent/_cuda.so", &plugin), ZC_ESTATE);
    CHECK(!plugin && says("no CUDA part") && says("/nonexistent/_cuda.so") && says("ZERO_C_CUDA=1 pip install ."));
}

static void not_a_library(void)
{
    const zc_cuda_plugin *plugin = NULL;
    CHECK_EQ(cuda_load("/proc/self/status", &plugin), ZC_ESYSTEM);
    CHECK(!plugin && says("could not be loaded") && says("/proc/self/status"));
    zc_fault_arm(1);
    CHECK_EQ(cuda_load(plugin_path, &plugin), ZC_ESYSTEM);
    zc_fault_arm(0);
    CHECK(!plugin && says("could not be loaded"));
}

/* Any library that is somewhere on this machine and has no table. */
static void another_library(void)
{
    const zc_cuda_plugin *plugin = NULL;
    Dl_info info;
    CHECK(dladdr((void *)(uintptr_t)&strlen, &info) != 0);
    CHECK_EQ(cuda_load(info.dli_fname, &plugin), ZC_ESTATE);
    CHECK(!plugin && says("is not the CUDA part"));
}

static void another_version(void)
{
    static const char *const kinds[] = {"abi", "bytes", "refuses"};
    for (size_t i = 0; i < 3; i++) {
        const zc_cuda_plugin *plugin = NULL;
        setenv("OTHER_PLUGIN", kinds[i], 1);
        CHECK_EQ(cuda_load(other_path, &plugin), ZC_ESTATE);
        CHECK(!plugin && says("another version of zero_c") && says(i == 2 ? "refuses" : "its interface is"));
    }
}

/* The library looks at the core's table as the core looks at the library's. */
static void the_library_looks_too(void)
{
    void *library = dlopen(plugin_path, RTLD_NOW | RTLD_LOCAL);
    CHECK(library != NULL);
    if (!library)
        return;
    const zc_cuda_plugin *(*get)(const zc_cuda_host *);
    void *symbol = dlsym(library, "zc_cuda_plugin_get");
    CHECK(symbol != NULL);
    memcpy(&get, &symbol, sizeof get);
    zc_cuda_host hosts[2] = {{.abi = ZC_CUDA_PLUGIN_ABI + 1, .bytes = sizeof(zc_cuda_host)},
                             {.abi = ZC_CUDA_PLUGIN_ABI, .bytes = sizeof(zc_cuda_host) - 8}};
    CHECK(get(&hosts[0]) == NULL);
    CHECK(get(&hosts[1]) == NULL);
    CHECK(get(NULL) == NULL);
    dlclose(library);
}

static void no_driver(void)
{
    const zc_cuda_plugin *plugin = NULL, *again = NULL;
    zc_cuda_probe probe;
    zc_device *device = NULL;
    CHECK_OK(cuda_load(plugin_path, &plugin));
    if (!plugin)
        return;
    CHECK_EQ(plugin->probe(&probe), ZC_ESTATE);
    CHECK(says("no NVIDIA driver was found") && says("580"));
    CHECK_EQ(probe.driver_version, 0);
    CHECK(probe.runtime_version >= 13000);
    CHECK_EQ(probe.gpus, 0);
    zc_fail(ZC_EINVAL, "forgotten");
    CHECK_EQ(plugin->device_create(0, &device), ZC_ESTATE);
    CHECK(!device && says("no NVIDIA driver was found"));

    CHECK_OK(cuda_load("/nonexistent/_cuda.so", &again)); /* loaded is loaded */
    CHECK(again == plugin);
}

int main(int count, char **words)
{
    if (count != 3)
        return 2;
    plugin_path = words[1];
    other_path = words[2];
    RUN(nothing_there);
    RUN(not_a_library);
    RUN(another_library);
    RUN(another_version);
    RUN(the_library_looks_too);
    RUN(no_driver);
    DONE();
}

#endif
