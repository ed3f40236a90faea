/*
 * How fast the core's loops move memory, beside what the machine can do: two
 * ranks at once, one per core, each on its own half of PARAMS parameters.
 * Rates count every byte that must be read or written; a plain store's read of
 * the line it overwrites is not counted.
 *
 *     kernel_rates [rounds]  ->  {"name": [bytes per element, seconds, GB/s of one core], ...}
 */
#include "pair.h"

#include "cpu_kernels.h"
#include "optim.h"

#include <string.h>

#define RANKS 2
#define PARAMS ((size_t)64 << 20)
#define HALF (PARAMS / RANKS)
#define TILE ((size_t)64 << 10)

enum { COPY, STREAM, MODIFY, REDUCE, UPDATE, GATHER, TESTS };
static const struct {
    const char *name;
    int bytes; /* per element of the rank's half */
} tests[TESTS] = {
    [COPY] = {"memcpy", 8},     [STREAM] = {"copy_stream", 8}, [MODIFY] = {"read_modify_write", 8},
    [REDUCE] = {"reduce", 12}, [UPDATE] = {"adamw", 28},      [GATHER] = {"gather", 8},
};

static int rounds = 7;
static float *gradients[RANKS], *params[RANKS]; /* PARAMS elements each, seen by both */

__attribute__((noinline)) static void modify(float *x, size_t count)
{
    for (size_t i = 0; i < count; i++)
        x[i] = x[i] * 0.999f + 0.001f;
}

static int rank_main(void)
{
    const cpu_kernels *kernels = cpu_kernels_get();
    optim_options options = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 0.01};
    optim_segment_scalars scalars;
    size_t own = (size_t)pair_rank * HALF, other = HALF - own;
    float *sum = malloc(HALF * sizeof *sum), *m = malloc(HALF * sizeof *m), *v = malloc(HALF * sizeof *v);

    if (!sum || !m || !v)
        return 2;
    for (size_t i = 0; i < PARAMS; i++) {
        gradients[pair_rank][i] = 1e-3f;
        params[pair_rank][i] = 1.0f;
    }
    for (size_t i = 0; i < HALF; i++)
        sum[i] = m[i] = v[i] = 1e-6f;
    for (int round = 0; round <= rounds; round++) { /* round 0 is not kept */
        optim_scalars(OPTIM_ADAMW, &options, (uint64_t)round + 1, 0.5, &scalars);
        for (int test = 0; test < TESTS; test++) {
            pair_meet();
            double begin = now_s();
            switch (test) {
            case COPY:
                memcpy(params[pair_rank] + other, gradients[pair_rank] + own, HALF * sizeof *sum);
                break;
            case STREAM:
                kernels->copy_stream(params[pair_rank] + other, gradients[pair_rank] + own, HALF * sizeof *sum);
                break;
            case MODIFY:
                modify(sum, HALF);
                break;
            case REDUCE:
                for (size_t at = 0; at < HALF; at += TILE) {
                    const void *in[RANKS] = {gradients[0] + own + at, gradients[1] + own + at};
                    kernels->reduce(sum + at, in, RANKS, TILE, ZC_FLOAT32, 0);
                }
                break;
            case UPDATE:
                for (size_t at = 0; at < HALF; at += TILE)
                    kernels->update(OPTIM_ADAMW, &scalars, TILE, ZC_FLOAT32, params[pair_rank] + own + at, NULL,
                                    sum + at, m + at, v + at, NULL);
                break;
            case GATHER:
                kernels->copy_stream(params[pair_rank] + other, params[!pair_rank] + other, HALF * sizeof *sum);
                break;
            }
            if (round)
                pair->seconds[pair_rank][(round - 1) * TESTS + test] = now_s() - begin;
        }
    }
    return 0;
}

int main(int argc, char **argv)
{
    if (argc > 1)
        rounds = atoi(argv[1]);
    for (int rank = 0; rank < RANKS; rank++) {
        gradients[rank] = pair_memory(PARAMS * sizeof(float));
        params[rank] = pair_memory(PARAMS * sizeof(float));
    }
    int worst = pair_fork(RANKS, rank_main);
    printf("{\"isa\": \"%s\"", cpu_kernels_get()->isa);
    for (int test = 0; test < TESTS; test++) {
        double seconds = pair_median(test, TESTS, rounds);
        printf(", \"%s\": [%d, %.6f, %.3f]", tests[test].name, tests[test].bytes, seconds,
               1e-9 * tests[test].bytes * (double)HALF / seconds);
    }
    printf("}\n");
    return worst;
}
