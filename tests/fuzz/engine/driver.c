/*
 * main() for a target where there is no libFuzzer, with those of its options that run.py uses:
 *
 *   TARGET [-runs=N] [-seed=K] [-max_total_time=SECONDS] [-max_len=BYTES] [-timeout=SECONDS]
 *          [-artifact_prefix=PATH] INPUT|FOLDER...
 *
 * It gives the target every input, in the order of their names, and unless only files were named mutations of
 * them until N inputs have run or the time is over.  In a build with -fsanitize-coverage=trace-pc an input that
 * reached a place no other did is kept for mutation, and written to the first folder.
 *
 * The input that is running lies in the file PATHcurrent, which is left there by whatever ends the process
 * before its time; one that takes longer than the timeout ends it with SIGALRM.
 */
#define _GNU_SOURCE
#include "mutate.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define PLACES (1u << 16)
#define INPUTS_MAX 20000u

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes);

typedef struct input {
    uint8_t *data;
    size_t bytes;
} input;

static input inputs[INPUTS_MAX];
static size_t input_count, runs, max_bytes = 1024;
static unsigned timeout_s = 20;
static const char *prefix = "";

/* What the process is doing now, for whoever finds it dead. */
static struct {
    uint64_t number; /* of the inputs, from 1 */
    uint64_t bytes;
    uint8_t data[];
} *current;

/* ---- coverage ------------------------------------------------------------ */

static uint8_t reached[PLACES];
static size_t news; /* places that this input was the first to reach */

__attribute__((no_sanitize_coverage, no_sanitize("address", "undefined"))) void __sanitizer_cov_trace_pc(void)
{
    uintptr_t place = (uintptr_t)__builtin_return_address(0);
    uint8_t *seen = &reached[(place ^ place >> 16) % PLACES];
    news += !*seen;
    *seen = 1;
}

/* ---- inputs ---------------------------------------------------------------- */

static void fail(const char *what)
{
    perror(what);
    exit(2);
}

static void keep(const uint8_t *data, size_t bytes)
{
    if (input_count == INPUTS_MAX)
        return;
    uint8_t *copy = malloc(bytes + 1);
    if (!copy)
        fail("malloc");
    memcpy(copy, data, bytes);
    inputs[input_count++] = (input){copy, bytes};
}

static void read_file(const char *path)
{
    static uint8_t data[1 << 20];
    FILE *file = fopen(path, "rb");
    if (!file)
        fail(path);
    size_t bytes = fread(data, 1, sizeof data, file);
    fclose(file);
    keep(data, bytes);
    max_bytes = bytes > max_bytes ? bytes : max_bytes;
}

static int visible(const struct dirent *entry)
{
    return entry->d_name[0] != '.';
}

static void read_folder(const char *path)
{
    struct dirent **entries;
    int count = scandir(path, &entries, visible, alphasort);
    if (count < 0)
        fail(path);
    for (int i = 0; i < count; i++) {
        char name[4096];
        snprintf(name, sizeof name, "%s/%s", path, entries[i]->d_name);
        read_file(name);
        free(entries[i]);
    }
    free(entries);
}

static void write_new(const char *folder, const uint8_t *data, size_t bytes)
{
    char name[4096];
    uint64_t hash = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ data[i]) * 0x100000001b3ull;
    snprintf(name, sizeof name, "%s/%016llx", folder, (unsigned long long)hash);
    FILE *file = fopen(name, "wb");
    if (!file || fwrite(data, 1, bytes, file) != bytes)
        fail(name);
    fclose(file);
}

/* ---- running ----------------------------------------------------------------- */

static void map_current(void)
{
    char name[4096];
    size_t bytes = sizeof *current + max_bytes;
    snprintf(name, sizeof name, "%scurrent", prefix);
    int fd = open(name, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0)
        fail(name);
    current = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (current == MAP_FAILED)
        fail(name);
    close(fd);
}

/* From memory of exactly its size, so that a read beyond it is seen. */
static void run(const uint8_t *data, size_t bytes)
{
    uint8_t *exact = malloc(bytes);
    if (bytes && !exact)
        fail("malloc");
    if (bytes) {
        memcpy(exact, data, bytes);
        memcpy(current->data, data, bytes);
    }
    current->bytes = bytes;
    current->number = ++runs;
    news = 0;
    alarm(timeout_s);
    LLVMFuzzerTestOneInput(exact, bytes);
    alarm(0);
    free(exact);
}

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

int main(int count, char **arguments)
{
    unsigned long long most_runs = 0, seed = 1;
    double end_s = 0;
    const char *folder = NULL;
    for (int i = 1; i < count; i++) {
        const char *value = arguments[i][0] == '-' ? strchr(arguments[i], '=') : NULL;
        struct stat facts;
        if (!value) {
            if (stat(arguments[i], &facts) != 0)
                fail(arguments[i]);
            if (!S_ISDIR(facts.st_mode)) {
                read_file(arguments[i]);
                continue;
            }
            folder = folder ? folder : arguments[i];
            read_folder(arguments[i]);
        } else if (!strncmp(arguments[i], "-runs=", 6)) {
            most_runs = strtoull(value + 1, NULL, 10);
        } else if (!strncmp(arguments[i], "-seed=", 6)) {
            seed = strtoull(value + 1, NULL, 10);
        } else if (!strncmp(arguments[i], "-max_total_time=", 16)) {
            end_s = now_s() + strtod(value + 1, NULL);
        } else if (!strncmp(arguments[i], "-max_len=", 9)) {
            max_bytes = strtoull(value + 1, NULL, 10);
        } else if (!strncmp(arguments[i], "-timeout=", 9)) {
            timeout_s = (unsigned)strtoul(value + 1, NULL, 10);
        } else if (!strncmp(arguments[i], "-artifact_prefix=", 17)) {
            prefix = value + 1;
        } else {
            fprintf(stderr, "unknown option %s\n", arguments[i]);
            return 2;
        }
    }
    map_current();
    if (!input_count && folder)
        keep((const uint8_t *)"", 0);
    for (size_t i = 0; i < input_count; i++)
        run(inputs[i].data, inputs[i].bytes);
    uint64_t state = seed;
    uint8_t *data = malloc(max_bytes);
    while (folder && data && (!most_runs || runs < most_runs) && (!end_s || now_s() < end_s)) {
        const input *one = &inputs[fuzz_random(&state) % input_count], *other = &inputs[fuzz_random(&state) % input_count];
        memcpy(data, one->data, one->bytes);
        size_t bytes = fuzz_mutate(&state, data, one->bytes, max_bytes, other->data, other->bytes);
        run(data, bytes);
        if (news) {
            keep(data, bytes);
            write_new(folder, data, bytes);
        }
    }
    free(data);
    for (size_t i = 0; i < input_count; i++)
        free(inputs[i].data);
    fprintf(stderr, "%zu inputs\n", runs);
    return 0;
}
