/*
 * zc_status.h inside the CUDA part.  Sentences and faults belong to the core, so
 * that whoever asks there sees those of both; arming of faults, which only the core
 * needs, is not here.  The rest is in zc_status_common.c, which both have.
 */
#include "plugin_status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define SENTENCE_BYTES 1024

static const zc_cuda_host *core;

void plugin_status_use(const zc_cuda_host *host)
{
    core = host;
}

static void pass_on(const char *format, va_list arguments, const char *suffix)
{
    char sentence[SENTENCE_BYTES];
    int length = vsnprintf(sentence, sizeof sentence, format, arguments);
    if (length < 0)
        sentence[length = 0] = '\0';
    if (suffix && (size_t)length < sizeof sentence)
        snprintf(sentence + length, sizeof sentence - (size_t)length, ": %s", suffix);
    core->fail(sentence);
}

zc_status zc_fail(zc_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    pass_on(format, arguments, NULL);
    va_end(arguments);
    return status;
}

zc_status zc_fail_errno(zc_status status, int error_number, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    pass_on(format, arguments, strerror(error_number));
    va_end(arguments);
    return status;
}

const char *zc_last_error(void)
{
    return core->last_error();
}

int zc_fault(void)
{
    return core->fault();
}
