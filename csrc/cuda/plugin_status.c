/*
 * zc_status.h inside the CUDA part.  Sentences and faults belong to the core, so
 * that whoever asks there sees those of both; what only the core needs (names of
 * Python classes, arming of faults) is not here.
 */
#include "plugin_status.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SENTENCE_BYTES 1024

static const zc_cuda_host *core;

void plugin_status_use(const zc_cuda_host *host)
{
    core = host;
}

const char *zc_status_text(zc_status status)
{
    switch (status) {
    case ZC_OK:
        return "ok";
#define X(name, value, text, python) \
    case name:                       \
        return text;
    ZC_STATUS_MAP(X)
#undef X
    }
    return "unknown status";
}

zc_status zc_fail(zc_status status, const char *format, ...)
{
    char sentence[SENTENCE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    if (vsnprintf(sentence, sizeof sentence, format, arguments) < 0)
        sentence[0] = '\0';
    va_end(arguments);
    core->fail(sentence);
    return status;
}

zc_status zc_fail_errno(zc_status status, int error_number, const char *format, ...)
{
    char sentence[SENTENCE_BYTES];
    va_list arguments;
    va_start(arguments, format);
    if (vsnprintf(sentence, sizeof sentence, format, arguments) < 0)
        sentence[0] = '\0';
    va_end(arguments);
    return zc_fail(status, "%s: %s", sentence, strerror(error_number));
}

const char *zc_last_error(void)
{
    return core->last_error();
}

int zc_fault(void)
{
    return core->fault();
}

void *zc_malloc(unsigned long size_bytes)
{
    return zc_fault() ? NULL : malloc(size_bytes);
}

void *zc_calloc(unsigned long count, unsigned long size_bytes)
{
    return zc_fault() ? NULL : calloc(count, size_bytes);
}

void *zc_realloc(void *memory, unsigned long size_bytes)
{
    return zc_fault() ? NULL : realloc(memory, size_bytes);
}

void zc_free(void *memory)
{
    free(memory);
}
