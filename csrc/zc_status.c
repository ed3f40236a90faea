/*
 * The per-thread last sentence, and the count by which a test makes any
 * allocation or system call of the core fail.
 */
#include "zc_status.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#define SENTENCE_BYTES 1024

static _Thread_local char last_sentence[SENTENCE_BYTES];

/* The arguments may quote the last sentence itself, so the new one is built aside. */
static void record(const char *format, va_list arguments, const char *suffix)
{
    char sentence[SENTENCE_BYTES];
    int length = vsnprintf(sentence, sizeof sentence, format, arguments);
    if (length < 0)
        length = 0;
    if ((size_t)length >= sizeof sentence)
        length = (int)sizeof sentence - 1;
    sentence[length] = '\0';
    if (suffix)
        snprintf(sentence + length, sizeof sentence - (size_t)length, ": %s", suffix);
    memcpy(last_sentence, sentence, sizeof sentence);
}

zc_status zc_fail(zc_status status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    record(format, arguments, NULL);
    va_end(arguments);
    return status;
}

zc_status zc_fail_errno(zc_status status, int error_number, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    record(format, arguments, strerror(error_number));
    va_end(arguments);
    return status;
}

const char *zc_last_error(void)
{
    return last_sentence;
}

/* ---- fault injection --------------------------------------------------- */

static long fault_at;    /* the question to answer with "fail"; 0: none */
static long fault_asked; /* questions since the last arming */

void zc_fault_arm(long nth)
{
    __atomic_store_n(&fault_asked, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&fault_at, nth, __ATOMIC_RELAXED);
}

long zc_fault_count(void)
{
    return __atomic_load_n(&fault_asked, __ATOMIC_RELAXED);
}

int zc_fault(void)
{
    long asked = __atomic_add_fetch(&fault_asked, 1, __ATOMIC_RELAXED);
    return asked == __atomic_load_n(&fault_at, __ATOMIC_RELAXED);
}
