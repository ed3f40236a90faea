/*
 * Texts of status codes, lists in sentences, and allocation that takes part in fault injection: what
 * is the same in the core and in its CUDA part.
 */
#include "zc_status.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define UNKNOWN "unknown status"

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
    return UNKNOWN;
}

int zc_status_is_failure(int number)
{
    switch ((zc_status)number) {
    case ZC_OK:
    case ZC_EINTERRUPT:
        return 0;
    default:
        return strcmp(zc_status_text((zc_status)number), UNKNOWN) != 0;
    }
}

const char *zc_status_python(zc_status status)
{
    switch (status) {
    case ZC_OK:
        break;
#define X(name, value, text, python) \
    case name:                       \
        return python;
    ZC_STATUS_MAP(X)
#undef X
    }
    return "Error";
}

void zc_list_number(char *list, unsigned long room_bytes, unsigned long number)
{
    char entry[32];
    size_t used = room_bytes ? strlen(list) : 0;
    int bytes = snprintf(entry, sizeof entry, "%s%lu", used ? ", " : "", number);
    if (used + (size_t)bytes < room_bytes)
        memcpy(list + used, entry, (size_t)bytes + 1);
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
