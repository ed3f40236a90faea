/*
 * The parts of a step without a framework: 64 Mi fp32 parameters in 64 tensors,
 * AdamW, two ranks on two cores.  Three phases are timed: handing the gradients
 * over, ending the round (what is left to reduce), and step() (update and, for
 * private parameters, gather).
 *
 *     engine_parts [rounds]  ->  {"stage 2 private": {"add_grad": s, "end_round": s, "step": s}, ...}
 */
#include "pair.h"

#include "zero_c.h"

#define RANKS 2
#define TENSORS 64
#define ELEMS ((size_t)1 << 20)
#define ALIVE 8 /* gradients that a backward keeps alive at once */

enum { ADD, END, STEP, PHASES };
static const char *const phases[PHASES] = {"add_grad", "end_round", "step"};
static const struct {
    const char *name;
    int stage, shared;
} variants[] = {
    {"stage 0 private", 0, 0}, {"stage 1 private", 1, 0}, {"stage 2 private", 2, 0},
    {"stage 1 shared", 1, 1},  {"stage 2 shared", 2, 1},
};
#define VARIANTS ((int)(sizeof variants / sizeof *variants))

static int rounds = 5, variant;

#define NEED(call)                                                                         \
    do {                                                                                   \
        if ((call) != ZC_OK) {                                                             \
            fprintf(stderr, "%s: %s\n", #call, zc_last_error());                           \
            return 2;                                                                      \
        }                                                                                  \
    } while (0)

static int rank_main(void)
{
    char job[64];
    snprintf(job, sizeof job, "parts-%d-%d", (int)getppid(), variant);
    zc_comm_config where = {.rank = (size_t)pair_rank, .ranks = RANKS, .job = job, .start_timeout_s = 60, .timeout_s = 60};
    zc_engine_config config = ZC_ENGINE_CONFIG;
    zc_options group = ZC_OPTIONS_ADAMW;
    zc_step_args args = ZC_STEP_ARGS;
    zc_param params[TENSORS];
    zc_comm *comm;
    zc_engine *engine;
    float *initial = calloc(ELEMS, sizeof *initial), *gradients = malloc(ALIVE * ELEMS * sizeof *gradients);

    if (!initial || !gradients)
        return 2;
    for (int i = 0; i < TENSORS; i++)
        params[i] = (zc_param){.elems = ELEMS, .dtype = ZC_FLOAT32, .initial = initial};
    config.stage = variants[variant].stage;
    config.shared_params = variants[variant].shared;
    config.threads = 1;
    NEED(zc_comm_open(&where, &comm));
    NEED(zc_engine_create(comm, &config, params, TENSORS, &group, 1, &engine));
    free(initial);
    for (int round = -1; round < rounds; round++) { /* round -1 is not kept */
        double took[PHASES] = {0}, begin;
        pair_meet();
        for (int i = TENSORS - 1; i >= 0; i--) {
            float *gradient = gradients + (size_t)(i % ALIVE) * ELEMS;
            for (size_t k = 0; k < ELEMS; k++)
                gradient[k] = 1e-3f * (float)(round + 2);
            begin = now_s();
            NEED(zc_engine_add_grad(engine, (size_t)i, gradient));
            took[ADD] += now_s() - begin;
        }
        begin = now_s();
        NEED(zc_engine_end_round(engine, NULL, 0));
        took[END] = now_s() - begin;
        begin = now_s();
        NEED(zc_engine_step(engine, &group, 1, &args));
        took[STEP] = now_s() - begin;
        for (int phase = 0; phase < PHASES && round >= 0; phase++)
            pair->seconds[pair_rank][round * PHASES + phase] = took[phase];
    }
    zc_engine_destroy(engine);
    zc_comm_close(comm);
    return 0;
}

int main(int argc, char **argv)
{
    int worst = 0;
    if (argc > 1)
        rounds = atoi(argv[1]);
    printf("{");
    for (variant = 0; variant < VARIANTS && !worst; variant++) {
        worst = pair_fork(RANKS, rank_main);
        printf("%s\"%s\": {", variant ? ", " : "", variants[variant].name);
        for (int phase = 0; phase < PHASES; phase++)
            printf("%s\"%s\": %.6f", phase ? ", " : "", phases[phase], pair_median(phase, PHASES, rounds));
        printf("}");
        fflush(stdout);
    }
    printf("}\n");
    return worst;
}
