/*
 * Ranks as processes, which meet in shared memory, train a small network to tell
 * points inside a circle from those outside, with AdamW:
 *
 *     processes RANKS STAGE
 *
 * Each rank computes on its part of the same 256 points, so that any number of
 * ranks (a divisor of 256) reaches the same loss, but for the order of additions.
 * Rank 0 prints it every 100 steps.  Returns 0 if no rank failed.
 */
#include "zero_c.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define POINTS 256
#define HIDDEN 16
enum { W, B, V, C, PARAMS }; /* tanh(x w + b) v + c */

static const size_t ELEMS[PARAMS] = {2 * HIDDEN, HIDDEN, HIDDEN, 1};
static const char *const NAMES[PARAMS] = {"w", "b", "v", "c"};

static int check(zc_status status)
{
    if (status != ZC_OK)
        fprintf(stderr, "zero_c: %s\n", zc_last_error());
    return status != ZC_OK;
}

/* The same numbers from -1 to 1 everywhere. */
static float number(unsigned *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / (1 << 23) - 1;
}

/* This rank's mean loss; its gradients in grad. */
static float backward(float *const param[PARAMS], float *const grad[PARAMS], size_t rank, size_t ranks)
{
    unsigned state = 7;
    float loss = 0, share = (float)ranks / POINTS;
    for (int i = 0; i < PARAMS; i++)
        memset(grad[i], 0, ELEMS[i] * sizeof(float));
    for (size_t k = 0; k < POINTS; k++) {
        float x = number(&state), y = number(&state), hidden[HIDDEN], logit = param[C][0];
        if (k % ranks != rank)
            continue;
        for (int h = 0; h < HIDDEN; h++) {
            hidden[h] = tanhf(x * param[W][2 * h] + y * param[W][2 * h + 1] + param[B][h]);
            logit += hidden[h] * param[V][h];
        }
        float inside = x * x + y * y < 0.6f, error = (1 / (1 + expf(-logit)) - inside) * share;
        loss += (log1pf(expf(-fabsf(logit))) + fmaxf(logit, 0) - inside * logit) * share;
        grad[C][0] += error;
        for (int h = 0; h < HIDDEN; h++) {
            float back = error * param[V][h] * (1 - hidden[h] * hidden[h]);
            grad[V][h] += error * hidden[h];
            grad[B][h] += back;
            grad[W][2 * h] += back * x;
            grad[W][2 * h + 1] += back * y;
        }
    }
    return loss;
}

/* One step; its loss over all ranks. */
static int step(zc_comm *comm, zc_engine *engine, int stage, const zc_options *group, float *loss)
{
    float *param[PARAMS], *grad[PARAMS], memory[4 * HIDDEN + 1], *next = memory;
    for (size_t i = 0; i < PARAMS; i++) {
        param[i] = zc_engine_param(engine, i);
        grad[i] = next;
        next += ELEMS[i];
    }
    if (stage == 3 && check(zc_engine_acquire(engine, 0, 0))) /* parameters are there between this and release */
        return 1;
    *loss = backward(param, grad, zc_comm_rank(comm), zc_comm_ranks(comm)) / (float)zc_comm_ranks(comm);
    if (stage == 3)
        zc_engine_release(engine, 0);
    for (size_t i = PARAMS; i-- > 0;)
        if (check(zc_engine_add_grad(engine, i, grad[i])))
            return 1;
    return check(zc_engine_step(engine, group, 1, &(zc_step_args)ZC_STEP_ARGS)) ||
           check(zc_comm_all_reduce(comm, loss, 1, ZC_FLOAT32, ZC_SUM));
}

static int train(zc_comm *comm, int stage)
{
    float start[PARAMS][2 * HIDDEN] = {{0}}, loss = 0;
    unsigned state = 1;
    zc_param params[PARAMS];
    zc_unit whole = {.name = "network"};
    zc_options group = ZC_OPTIONS_ADAMW;
    zc_engine_config config = ZC_ENGINE_CONFIG;
    zc_engine *engine = NULL;
    for (size_t i = 0; i < PARAMS; i++) {
        for (size_t k = 0; (i == W || i == V) && k < ELEMS[i]; k++)
            start[i][k] = number(&state);
        params[i] = (zc_param){.name = NAMES[i], .elems = ELEMS[i], .dtype = ZC_FLOAT32, .initial = start[i]};
    }
    group.lr = 0.02;
    config.stage = stage;
    config.units = &whole;
    config.unit_count = stage == 3;
    int failed = check(zc_engine_create(comm, &config, params, PARAMS, &group, 1, &engine));
    for (int k = 1; k <= 400 && !failed; k++) {
        failed = step(comm, engine, stage, &group, &loss);
        if (!failed && k % 100 == 0 && zc_comm_rank(comm) == 0)
            printf("step %d  loss %.6f\n", k, (double)loss);
    }
    zc_engine_destroy(engine);
    return failed;
}

int main(int argc, char **argv)
{
    size_t ranks = argc == 3 ? strtoul(argv[1], NULL, 10) : 0, rank = 0;
    char job[32];
    zc_comm *comm;
    if (ranks < 1 || ranks > 16 || POINTS % ranks) {
        fprintf(stderr, "usage: processes RANKS STAGE, with 1, 2, 4, 8 or 16 ranks\n");
        return 2;
    }
    snprintf(job, sizeof job, "processes %ld", (long)getpid()); /* before the fork: the same for all */
    for (size_t r = 1; r < ranks && rank == 0; r++)
        if (fork() == 0)
            rank = r;
    zc_comm_config config = {.rank = rank, .ranks = ranks, .job = job, .start_timeout_s = 30, .timeout_s = 30};
    if (check(zc_comm_open(&config, &comm)))
        return 1;
    int failed = train(comm, atoi(argv[2])), status;
    zc_comm_close(comm);
    while (rank == 0 && wait(&status) > 0) /* rank 0 started the others */
        failed |= status != 0;
    return failed;
}
