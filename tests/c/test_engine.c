/*
 * The engine with ranks as threads: the same bits for every stage, bucket
 * size, ring, order of gradients, for shared and private parameters, and on
 * the deferring device and communicator; and equal to a scalar reference.
 */
#include "comm.h"
#include "elsewhere.h"
#include "engine.h"
#include "testing.h"
#include "zero_c.h"

#include <math.h>
#include <pthread.h>

#define MAX_RANKS 8
#define PARAMS 7
#define STEPS 4

static const size_t sizes[PARAMS] = {5, 1000, 0, 1, 64, 777, 130};

typedef struct plan {
    size_t ranks;
    int stage, defer, shared, mixed, rounds;
    size_t bucket_bytes, ring;
    optim_rule rule;
    double max_norm;
    uint64_t order; /* 0: backward order on every rank; else a seed, different per rank */
    int unused;     /* parameter 1 has no gradient on odd ranks, parameter 5 nowhere in even steps */
    int offer;      /* gradients are lent to the engine; what it hands back is overwritten at once; drains in between */
    int late;       /* parameter 3 delivers a second gradient */
    int skip_round; /* the last rank takes no part in the first round */
} plan;

typedef struct job {
    const plan *plan;
    zc_comm *comm;
    size_t rank;
    char *weights; /* out: all parameters, one behind the other */
} job;

static zc_dtype dtype_of(const plan *p, size_t i)
{
    static const zc_dtype mixed[PARAMS] = {ZC_BFLOAT16, ZC_FLOAT32, ZC_FLOAT32, ZC_FLOAT64,
                                           ZC_FLOAT16,  ZC_BFLOAT16, ZC_FLOAT32};
    return p->mixed ? mixed[i] : ZC_FLOAT32;
}

static float gradient(size_t step, size_t round, size_t rank, size_t param, size_t k)
{
    uint64_t state = (((step * 31 + round) * 31 + rank) * 31 + param) * 100003 + k;
    return testing_float(&state);
}

static int has_gradient(const plan *p, size_t step, size_t round, size_t rank, size_t param)
{
    if (p->skip_round && round == 0 && rank == p->ranks - 1)
        return 0;
    if (p->unused && param == 1 && rank % 2 == 1)
        return 0;
    if (p->unused && param == 5 && step % 2 == 0)
        return 0;
    return 1;
}

/* Takes back what the engine has finished with, and makes sure that it has. */
static size_t spoil_released(const plan *p, zc_engine *engine, char **copies)
{
    size_t count = 0;
    for (char *owner; (owner = zc_engine_take_released(engine)); count++)
        for (size_t i = 0; i < PARAMS; i++)
            if (copies[i] == owner && !p->defer) /* deferred work still reads it, in stream order */
                memset(owner, 255, sizes[i] * 8);
    return count;
}

static void *train(void *argument)
{
    job *j = argument;
    const plan *p = j->plan;
    zc_comm *comm = j->comm;
    zc_device *device = NULL;
    zc_stream *stream = NULL;
    zc_param params[PARAMS];
    char names[PARAMS][8], *initial[PARAMS];
    char *grads[2][PARAMS];
    zc_options group = p->rule == OPTIM_SGD
                           ? (zc_options){.lr = 0.1, .momentum = 0.9, .dampening = 0.5, .weight_decay = 0.01}
                           : (zc_options){.lr = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1,
                                          .amsgrad = p->mixed};
    zc_engine_config config = ZC_ENGINE_CONFIG;
    zc_engine *engine = NULL;
    config.stage = p->stage;
    config.rule = p->rule;
    config.bucket_bytes = p->bucket_bytes;
    config.ring_slots = p->ring;
    config.shared_params = p->shared;
    config.threads = 1;
    for (size_t i = 0; i < PARAMS; i++) {
        zc_dtype dtype = dtype_of(p, i);
        initial[i] = malloc(sizes[i] * 8 + 8);
        for (size_t k = 0; k < sizes[i]; k++) { /* rank 0's must win */
            uint64_t state = i * 1000003 + k;
            testing_put(initial[i], dtype, k, j->rank == 0 ? testing_float(&state) : 77);
        }
        snprintf(names[i], sizeof names[i], "p%zu", i);
        params[i] = (zc_param){.name = names[i], .elems = sizes[i], .dtype = dtype, .initial = initial[i]};
        grads[0][i] = malloc(sizes[i] * 8 + 8);
        grads[1][i] = malloc(sizes[i] * 8 + 8);
    }
    if (p->defer) {
        elsewhere_wrap(j->comm, &comm, &device, &stream);
        CHECK_OK(engine_create(comm, device, stream, &config, params, PARAMS, &group, 1, &engine));
    } else {
        CHECK_OK(zc_engine_create(comm, &config, params, PARAMS, &group, 1, &engine));
    }
    for (size_t step = 0; engine && step < STEPS; step++) {
        for (size_t round = 0; round < (size_t)p->rounds; round++) {
            size_t order[PARAMS];
            uint64_t seed = p->order * 1000 + j->rank * 17 + step;
            for (size_t i = 0; i < PARAMS; i++)
                order[i] = PARAMS - 1 - i;
            for (size_t i = PARAMS; p->order && i-- > 1;) {
                size_t k = testing_random(&seed) % (i + 1), swap = order[i];
                order[i] = order[k];
                order[k] = swap;
            }
            char *copy[PARAMS] = {0};
            size_t held = 0;
            for (size_t n = 0; n < PARAMS; n++) {
                size_t i = order[n];
                if (!has_gradient(p, step, round, j->rank, i))
                    continue;
                /* deferred work reads the gradient later: it must stay as it is */
                copy[i] = malloc(sizes[i] * 8 + 8);
                for (size_t k = 0; k < sizes[i]; k++)
                    testing_put(copy[i], dtype_of(p, i), k, gradient(step, round, j->rank, i, k));
                copy[i] = elsewhere_put(device, stream, copy[i], sizes[i] * 8);
                int outcome = ZC_GRAD_TAKEN;
                if (!p->offer)
                    CHECK_OK(zc_engine_add_grad(engine, i, copy[i]));
                else
                    CHECK_OK(zc_engine_offer_grad(engine, i, copy[i], copy[i], &outcome));
                held += outcome == ZC_GRAD_HELD;
                if (p->offer && !p->order && n % 3 == 2)
                    CHECK_OK(zc_engine_drain(engine));
                if (p->offer && !p->defer && outcome == ZC_GRAD_TAKEN)
                    memset(copy[i], 255, sizes[i] * 8);
                held -= spoil_released(p, engine, copy);
            }
            int bring = p->late && j->rank % 2 == 0 && has_gradient(p, step, round, j->rank, 3);
            for (size_t k = 0; k < sizes[3]; k++)
                testing_put(grads[0][3], dtype_of(p, 3), k, gradient(step, round + 100, j->rank, 3, k));
            zc_late_grad late = {3, grads[0][3] = elsewhere_put(device, stream, grads[0][3], sizes[3] * 8)};
            CHECK_OK(zc_engine_end_round(engine, &late, (size_t)bring));
            held -= spoil_released(p, engine, copy);
            CHECK_EQ(held, 0);
            CHECK_OK(device ? device->ops->synchronize(device, stream) : ZC_OK);
            for (size_t i = 0; i < PARAMS; i++)
                if (copy[i])
                    elsewhere_free(device, copy[i], sizes[i] * 8);
            elsewhere_free(device, grads[0][3], sizes[3] * 8);
            grads[0][3] = malloc(sizes[3] * 8 + 8);
        }
        zc_step_args args = ZC_STEP_ARGS;
        zc_step_result result;
        args.max_norm = p->max_norm;
        CHECK_OK(zc_engine_step(engine, &group, 1, &args));
        CHECK_OK(zc_engine_last_step(engine, &result));
        CHECK(!p->max_norm || result.norm > 0);
    }
    char *out = j->weights;
    for (size_t i = 0; engine && i < PARAMS; i++) {
        size_t bytes = sizes[i] * zc_dtype_bytes(dtype_of(p, i));
        if (bytes && device)
            CHECK_OK(device->ops->download(device, stream, out, zc_engine_param(engine, i), bytes));
        else if (bytes)
            memcpy(out, zc_engine_param(engine, i), bytes);
        out += bytes;
        CHECK_EQ(zc_engine_step_count(engine, i), p->unused && i == 5 ? STEPS / 2 : STEPS);
    }
    if (p->shared)
        CHECK_OK(zc_engine_sync(engine, "the end")); /* rank 0 owns the memory */
    zc_engine_destroy(engine);
    if (p->defer)
        elsewhere_close(comm, stream);
    else
        zc_comm_close(comm);
    for (size_t i = 0; i < PARAMS; i++) {
        free(initial[i]);
        free(grads[0][i]);
        free(grads[1][i]);
    }
    return NULL;
}

#define WEIGHT_BYTES (2048 * 8)

static void run_plan(const plan *p, char *weights)
{
    zc_comm *comms[MAX_RANKS];
    job jobs[MAX_RANKS];
    pthread_t threads[MAX_RANKS];
    char *others = calloc(MAX_RANKS, WEIGHT_BYTES);
    elsewhere_begin();
    if (p->defer)
        elsewhere_open(p->ranks, 20, comms);
    else
        CHECK_OK(zc_comm_open_local(p->ranks, 20, comms));
    for (size_t r = 0; r < p->ranks; r++) {
        jobs[r] = (job){p, comms[r], r, r ? others + r * WEIGHT_BYTES : weights};
        pthread_create(&threads[r], NULL, train, &jobs[r]);
    }
    for (size_t r = 0; r < p->ranks; r++)
        pthread_join(threads[r], NULL);
    elsewhere_end();
    for (size_t r = 1; r < p->ranks; r++)
        CHECK(memcmp(weights, others + r * WEIGHT_BYTES, WEIGHT_BYTES) == 0);
    free(others);
}

static void compare(const plan *base, const plan *other, const char *what)
{
    char *one = calloc(1, WEIGHT_BYTES), *two = calloc(1, WEIGHT_BYTES);
    run_plan(base, one);
    run_plan(other, two);
    if (memcmp(one, two, WEIGHT_BYTES)) {
        fprintf(stderr, "different bits: %s; stage %d bucket %zu ring %zu ranks %zu defer %d shared %d\n", what,
                other->stage, other->bucket_bytes, other->ring, other->ranks, other->defer, other->shared);
        CHECK(!"equal bits");
    }
    free(one);
    free(two);
}

static const plan start = {.ranks = 2, .stage = 2, .rounds = 1, .bucket_bytes = 1 << 20, .ring = 16};

/* AdamW in plain scalar code, one backward. */
static void test_reference(void)
{
    for (size_t ranks = 1; ranks <= 3; ranks++) {
        plan p = start;
        char *weights = calloc(1, WEIGHT_BYTES);
        p.ranks = ranks;
        run_plan(&p, weights);
        float *got = (float *)(void *)weights;
        for (size_t i = 0; i < PARAMS; i++) {
            for (size_t k = 0; k < sizes[i]; k++) {
                uint64_t state = i * 1000003 + k;
                float w = testing_float(&state), m = 0, v = 0;
                for (size_t step = 0; step < STEPS; step++) {
                    double t = (double)(step + 1);
                    float sum = gradient(step, 0, 0, i, k);
                    for (size_t r = 1; r < ranks; r++)
                        sum += gradient(step, 0, r, i, k);
                    float g = (float)(1.0 / (double)ranks) * sum;
                    w = w * (float)(1 - 0.1 * 0.1);
                    m = m + (g - m) * (float)(1 - 0.9);
                    v = v * (float)0.99 + ((float)(1 - 0.99) * g) * g;
                    float size = (float)(0.1 / (1 - optim_powi(0.9, (uint64_t)t)));
                    float root = (float)(1 / sqrt(1 - optim_powi(0.99, (uint64_t)t)));
                    w = w - (size * m) / (sqrtf(v) * root + (float)1e-8);
                }
                if (memcmp(&w, got, 4)) {
                    fprintf(stderr, "ranks %zu parameter %zu element %zu: %a, reference %a\n", ranks, i, k,
                            (double)*got, (double)w);
                    CHECK(!"reference bits");
                    free(weights);
                    return;
                }
                got++;
            }
        }
        free(weights);
    }
}

static void test_stages(void)
{
    static const size_t buckets[] = {1, 1024, 2500, 1 << 20};
    for (size_t ranks = 1; ranks <= 4; ranks++)
        for (int rounds = 1; rounds <= 3; rounds += 2) {
            plan base = start;
            base.ranks = ranks;
            base.rounds = rounds;
            base.mixed = 1;
            for (int stage = 0; stage <= 2; stage++)
                for (size_t b = 0; b < 4; b++) {
                    plan p = base;
                    p.stage = stage;
                    p.bucket_bytes = buckets[b];
                    p.ring = 1 + b % 3;
                    p.defer = ELSEWHERE;
                    compare(&base, &p, "stages and buckets");
                    p.offer = 1;
                    compare(&base, &p, "lent gradients");
                }
        }
}

static void test_order_and_unused(void)
{
    for (int stage = 0; stage <= 2; stage++)
        for (uint64_t order = 0; order < 4; order++) {
            plan base = start, p;
            base.ranks = 3;
            base.mixed = 1;
            base.unused = 1;
            base.rounds = 2;
            p = base;
            p.stage = stage;
            p.bucket_bytes = 600;
            p.ring = 1 + order % 2;
            p.defer = ELSEWHERE;
            p.order = order;
            compare(&base, &p, "orders, unused parameters");
            base.late = p.late = 1;
            p.offer = order % 2;
            compare(&base, &p, "late gradients");
            base.skip_round = p.skip_round = 1;
            compare(&base, &p, "a rank without a round");
        }
}

static void test_deferred(void)
{
    for (int stage = 0; stage <= 2; stage++)
        for (int rounds = 1; rounds <= 2; rounds++)
            for (uint64_t order = 0; order < 2; order++) {
                plan base = start, p;
                base.mixed = 1;
                base.rounds = rounds;
                base.max_norm = 0.5;
                base.unused = 1;
                base.late = 1;
                p = base;
                p.defer = 1;
                p.stage = stage;
                p.bucket_bytes = 700;
                p.ring = 2;
                p.order = order;
                compare(&base, &p, "deferred");
                p.offer = 1;
                compare(&base, &p, "deferred, lent");
            }
}

static void test_shared(void)
{
    for (int stage = 0; stage <= 2; stage++)
        for (int rule = OPTIM_ADAMW; rule <= OPTIM_SGD; rule++) {
            plan base = start, p;
            base.ranks = 3;
            base.mixed = 1;
            base.rule = (optim_rule)rule;
            base.max_norm = 1;
            p = base;
            p.stage = stage;
            p.shared = 1;
            p.bucket_bytes = 900;
            compare(&base, &p, "shared parameters");
        }
}

/* ---- errors ------------------------------------------------------------------ */

typedef struct error_job {
    zc_comm *comm;
    size_t rank;
    int what;
    zc_status status;
    char text[512];
} error_job;

static void *fail_together(void *argument)
{
    error_job *j = argument;
    float w[4] = {1, 2, 3, 4}, g[4] = {1, 1, 1, 1};
    zc_param param = {.name = "w", .elems = j->what == 0 && j->rank == 1 ? 3 : 4, .dtype = ZC_FLOAT32, .initial = w};
    zc_options group = ZC_OPTIONS_ADAMW;
    zc_engine_config config = ZC_ENGINE_CONFIG;
    zc_engine *engine = NULL;
    zc_step_args args = ZC_STEP_ARGS;
    double norm;
    config.threads = 1;
    j->status = zc_engine_create(j->comm, &config, &param, 1, &group, 1, &engine);
    if (engine) {
        j->status = zc_engine_add_grad(engine, 0, g);
        if (j->what == 1) { /* different operations */
            j->status = j->rank ? zc_engine_clip(engine, 1, 2, 1, &norm)
                                : zc_engine_step(engine, &group, 1, &args);
        } else if (j->what == 2) { /* different learning rates */
            group.lr = j->rank ? 0.1 : 0.2;
            j->status = zc_engine_step(engine, &group, 1, &args);
        } else if (j->what == 3) { /* one backward raised */
            if (j->rank == 1)
                zc_engine_abort_round(engine);
            j->status = zc_engine_step(engine, &group, 1, &args);
        } else if (j->what == 4) { /* all backwards raised: nothing is updated, training goes on */
            zc_engine_abort_round(engine);
            j->status = zc_engine_step(engine, &group, 1, &args);
            CHECK_EQ(zc_engine_step_count(engine, 0), 0);
            CHECK(memcmp(zc_engine_param(engine, 0), w, sizeof w) == 0);
            CHECK_OK(zc_engine_add_grad(engine, 0, g));
            CHECK_OK(zc_engine_step(engine, &group, 1, &args));
            CHECK_EQ(zc_engine_step_count(engine, 0), 1);
        }
    }
    snprintf(j->text, sizeof j->text, "%s", zc_last_error());
    zc_engine_destroy(engine);
    return NULL;
}

static void errors(int what, zc_status expected, const char *part)
{
    zc_comm *comms[2];
    error_job jobs[2];
    pthread_t threads[2];
    CHECK_OK(zc_comm_open_local(2, 10, comms));
    for (size_t r = 0; r < 2; r++) {
        jobs[r] = (error_job){.comm = comms[r], .rank = r, .what = what};
        pthread_create(&threads[r], NULL, fail_together, &jobs[r]);
    }
    for (size_t r = 0; r < 2; r++) {
        pthread_join(threads[r], NULL);
        CHECK_EQ(jobs[r].status, expected);
        if (part && !strstr(jobs[r].text, part)) {
            fprintf(stderr, "message '%s' lacks '%s'\n", jobs[r].text, part);
            CHECK(!"message");
        }
    }
    for (size_t r = 0; r < 2; r++)
        zc_comm_close(comms[r]);
}

static void test_errors(void)
{
    errors(0, ZC_EMISMATCH, "'w' float32 with 3 elements");
    errors(1, ZC_EMISMATCH, "clip_grad_norm_");
    errors(2, ZC_EMISMATCH, "different arguments");
    errors(3, ZC_EMISMATCH, "rank 1's backward raised");
    errors(4, ZC_OK, NULL);
}

/* ---- every allocation and system call made to fail ---------------------------- */

typedef struct fault_job {
    zc_comm *comm;
    zc_status status;
} fault_job;

/* As much of an engine's life as the fault allows; always cleans up and closes, so that the peer is told. */
static void *live(void *argument)
{
    fault_job *j = argument;
    float w[300] = {0}, g[300] = {0};
    uint16_t h[70] = {0};
    zc_param params[2] = {{.name = "w", .elems = 300, .dtype = ZC_FLOAT32, .initial = w},
                          {.name = "h", .elems = 70, .dtype = ZC_BFLOAT16, .initial = h}};
    zc_options group = {.lr = 0.1, .momentum = 0.9};
    zc_engine_config config = ZC_ENGINE_CONFIG;
    zc_engine *engine = NULL;
    zc_step_args args = ZC_STEP_ARGS;
    zc_step_result result;
    zc_late_grad late = {0, g};
    double norm;
    float whole[300];
    config.threads = 1;
    config.stage = 1;
    config.rule = OPTIM_SGD;
    config.bucket_bytes = 300;
    j->status = zc_engine_create(j->comm, &config, params, 2, &group, 1, &engine);
    if (j->status == ZC_OK)
        j->status = zc_engine_add_grad(engine, 0, g);
    if (j->status == ZC_OK)
        j->status = zc_engine_end_round(engine, &late, 1);
    if (j->status == ZC_OK)
        j->status = zc_engine_add_grad(engine, 1, h);
    if (j->status == ZC_OK)
        j->status = zc_engine_clip(engine, 1, 3, 1, &norm);
    if (j->status == ZC_OK)
        j->status = zc_engine_step(engine, &group, 1, &args);
    if (j->status == ZC_OK)
        j->status = zc_engine_last_step(engine, &result);
    if (j->status == ZC_OK)
        j->status = zc_engine_read(engine, 0, ZC_ROLE_EXP_AVG, 1, whole);
    if (j->status == ZC_OK)
        j->status = zc_engine_add_params(engine, params, 1, &group, 1);
    CHECK(j->status == ZC_OK || zc_last_error()[0]);
    zc_engine_destroy(engine);
    zc_comm_close(j->comm);
    return NULL;
}

static void test_faults(void)
{
    for (long nth = 1;; nth++) {
        zc_comm *comms[2];
        fault_job jobs[2];
        pthread_t threads[2];
        CHECK_OK(zc_comm_open_local(2, 20, comms));
        zc_fault_arm(nth);
        for (size_t r = 0; r < 2; r++) {
            jobs[r] = (fault_job){comms[r], ZC_OK};
            pthread_create(&threads[r], NULL, live, &jobs[r]);
        }
        for (size_t r = 0; r < 2; r++)
            pthread_join(threads[r], NULL);
        long asked = zc_fault_count();
        zc_fault_arm(0);
        if (jobs[0].status == ZC_OK && jobs[1].status == ZC_OK && asked < nth)
            break;
        /* a fault in clean-up, or in a call that can go on without, changes nothing */
        CHECK(jobs[0].status != ZC_ETIMEOUT && jobs[1].status != ZC_ETIMEOUT);
    }
}

int main(void)
{
    RUN(test_stages);
    RUN(test_order_and_unused);
    RUN(test_deferred);
#if !ELSEWHERE
    RUN(test_reference);
    RUN(test_shared);
    RUN(test_errors);
    RUN(test_faults);
#endif
    DONE();
}
