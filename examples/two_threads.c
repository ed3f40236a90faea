/*
 * Two ranks as threads of one process train a line, y = w x + b, with AdamW at
 * stage 2: each rank sees half of the points, each keeps half of the optimizer
 * state.  Prints the fitted line; returns 0 if it is the right one.
 */
#include "zero_c.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>

typedef struct worker {
    zc_comm *comm;
    float w, b;
    int failed;
} worker;

static int check(zc_status status)
{
    if (status != ZC_OK)
        fprintf(stderr, "zero_c: %s\n", zc_last_error());
    return status != ZC_OK;
}

static void *train(void *argument)
{
    worker *self = argument;
    size_t rank = zc_comm_rank(self->comm);
    float start[1] = {0};
    zc_param params[2] = {
        {.name = "w", .elems = 1, .dtype = ZC_FLOAT32, .initial = start},
        {.name = "b", .elems = 1, .dtype = ZC_FLOAT32, .initial = start},
    };
    zc_options group = ZC_OPTIONS_ADAMW;
    zc_engine_config config = ZC_ENGINE_CONFIG;
    zc_engine *engine = NULL;
    group.lr = 0.05;
    group.weight_decay = 0;
    self->failed = check(zc_engine_create(self->comm, &config, params, 2, &group, 1, &engine));
    for (int step = 0; step < 600 && !self->failed; step++) {
        const float *w = zc_engine_param(engine, 0), *b = zc_engine_param(engine, 1);
        float dw = 0, db = 0;
        for (int k = 0; k < 8; k++) { /* this rank's half of sixteen points on y = 3 x - 1 */
            float x = (float)(k + 8 * (int)rank) / 8 - 1, error = *w * x + *b - (3 * x - 1);
            dw += error * x / 8;
            db += error / 8;
        }
        self->failed = check(zc_engine_add_grad(engine, 0, &dw)) || check(zc_engine_add_grad(engine, 1, &db)) ||
                       check(zc_engine_step(engine, &group, 1, &(zc_step_args)ZC_STEP_ARGS));
    }
    if (engine) {
        self->w = *(float *)zc_engine_param(engine, 0);
        self->b = *(float *)zc_engine_param(engine, 1);
    }
    zc_engine_destroy(engine);
    zc_comm_close(self->comm);
    return NULL;
}

int main(void)
{
    zc_comm *comms[2];
    worker workers[2] = {{0}};
    pthread_t threads[2];
    if (check(zc_comm_open_local(2, 60, comms)))
        return 1;
    for (int r = 0; r < 2; r++) {
        workers[r].comm = comms[r];
        pthread_create(&threads[r], NULL, train, &workers[r]);
    }
    for (int r = 0; r < 2; r++)
        pthread_join(threads[r], NULL);
    printf("y = %.3f x %+.3f\n", (double)workers[0].w, (double)workers[0].b);
    return workers[0].failed || workers[1].failed || fabsf(workers[0].w - 3) > 0.01f || fabsf(workers[0].b + 1) > 0.01f ||
           workers[0].w != workers[1].w;
}
