/*
 * The step's cadence, with ranks as threads: how many buckets the device updates
 * in one call, with the same bits however many they are; that the host waits for
 * nothing; and parameters that come back while the next forward runs.  Buckets are
 * as small as they can be, so few elements make many of them.
 */
#include "comm.h"
#include "elsewhere.h"
#include "engine.h"
#include "testing.h"
#include "zero_c.h"

#include <math.h>
#include <pthread.h>
#include <time.h>

#define MAX_RANKS 3
#define PARAMS 4
#define STEPS 3

typedef struct plan {
    size_t ranks, buckets; /* of each of the two types */
    int stage;
    optim_rule rule;
    int elsewhere;
    size_t update_bytes;   /* how much that device wants in one call */
    double max_norm;
    int overlap;           /* step() returns before parameters are back */
    int hasty;             /* and they are read at once */
} plan;

typedef struct job {
    const plan *plan;
    zc_comm *comm;
    size_t rank;
    char *weights; /* out: all parameters, one behind the other */
    size_t updates; /* out: calls of the device's update in one step */
    uint64_t digest; /* out: of all parameters after every step */
} job;

static zc_dtype dtype_of(size_t i)
{
    return i % 2 ? ZC_BFLOAT16 : ZC_FLOAT32;
}

/* Of each type a small parameter, and one that fills the rest of its buckets. */
static size_t elems_of(const plan *p, size_t i)
{
    return i < 2 ? 50 : 64 * p->ranks * p->buckets - 64;
}

static size_t weight_bytes(const plan *p)
{
    size_t bytes = 0;
    for (size_t i = 0; i < PARAMS; i++)
        bytes += elems_of(p, i) * zc_dtype_bytes(dtype_of(i));
    return bytes;
}

/* Values of parameter i that depend on `key`. */
static char *values_of(const plan *p, size_t i, uint64_t key)
{
    char *values = malloc(elems_of(p, i) * 8 + 8);
    for (size_t k = 0; k < elems_of(p, i); k++) {
        uint64_t state = (key * PARAMS + i) * 1000003 + k;
        testing_put(values, dtype_of(i), k, testing_float(&state));
    }
    return values;
}

static const zc_options adamw = {.lr = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1, .amsgrad = 1};
static const zc_options sgd = {.lr = 0.1, .momentum = 0.9, .dampening = 0.5, .weight_decay = 0.01};

static const zc_options *group_of(const plan *p)
{
    return p->rule == OPTIM_SGD ? &sgd : &adamw;
}

/* ---- a device whose calls are counted -------------------------------------------- */

typedef struct watched {
    device_ops ops; /* first: found again from the device */
    const device_ops *under;
    size_t updates, looks; /* calls of update; of download and synchronize, which wait for the device */
} watched;

static watched *watch_of(zc_device *device)
{
    return (watched *)(uintptr_t)device->ops;
}

static zc_status watched_update(zc_device *device, zc_stream *stream, const device_update_args *args)
{
    watch_of(device)->updates++;
    return watch_of(device)->under->update(device, stream, args);
}

static zc_status watched_download(zc_device *device, zc_stream *stream, void *to, const void *from, size_t bytes)
{
    watch_of(device)->looks++;
    return watch_of(device)->under->download(device, stream, to, from, bytes);
}

static zc_status watched_synchronize(zc_device *device, zc_stream *stream)
{
    watch_of(device)->looks++;
    return watch_of(device)->under->synchronize(device, stream);
}

static void watch(zc_device *device, watched *w, size_t update_bytes)
{
    *w = (watched){.ops = *device->ops, .under = device->ops};
    w->ops.update = watched_update;
    w->ops.download = watched_download;
    w->ops.synchronize = watched_synchronize;
    w->ops.update_bytes = update_bytes;
    device->ops = &w->ops;
}

/* ---- one rank -------------------------------------------------------------------- */

typedef struct rank {
    zc_comm *comm;
    zc_device *device; /* NULL: the engine has the CPU's */
    zc_stream *stream;
    zc_engine *engine;
    watched calls;
} rank;

static void open_rank(const job *j, rank *r)
{
    const plan *p = j->plan;
    zc_param params[PARAMS];
    char *initial[PARAMS];
    zc_engine_config config = ZC_ENGINE_CONFIG;
    config.stage = p->stage;
    config.rule = p->rule;
    config.bucket_bytes = 1;
    config.overlap_gather = p->overlap;
    config.threads = 1;
    for (size_t i = 0; i < PARAMS; i++) {
        initial[i] = values_of(p, i, 0);
        params[i] = (zc_param){.elems = elems_of(p, i), .dtype = dtype_of(i), .initial = initial[i]};
    }
    *r = (rank){.comm = j->comm};
    if (p->elsewhere) {
        elsewhere_wrap(j->comm, &r->comm, &r->device, &r->stream);
        watch(r->device, &r->calls, p->update_bytes);
        CHECK_OK(engine_create(r->comm, r->device, r->stream, &config, params, PARAMS, group_of(p), 1, &r->engine));
    } else {
        CHECK_OK(zc_engine_create(j->comm, &config, params, PARAMS, group_of(p), 1, &r->engine));
    }
    for (size_t i = 0; i < PARAMS; i++)
        free(initial[i]);
}

static void close_rank(const job *j, rank *r)
{
    zc_engine_destroy(r->engine);
    if (j->plan->elsewhere)
        elsewhere_close(r->comm, r->stream);
    else
        zc_comm_close(r->comm);
}

/* One backward: the large fp32 parameter has a gradient in every other step only, so its updates are masked. */
static void backward(const job *j, rank *r, size_t step)
{
    const plan *p = j->plan;
    char *grads[PARAMS] = {0};
    for (size_t i = PARAMS; i-- > 0;) {
        if (i == 2 && step % 2)
            continue;
        grads[i] = elsewhere_put(r->device, r->stream, values_of(p, i, 1 + step * MAX_RANKS + j->rank), elems_of(p, i) * 8);
        CHECK_OK(zc_engine_add_grad(r->engine, i, grads[i]));
    }
    CHECK_OK(zc_engine_end_round(r->engine, NULL, 0));
    CHECK_OK(r->device ? r->device->ops->synchronize(r->device, r->stream) : ZC_OK);
    for (size_t i = 0; i < PARAMS; i++)
        if (grads[i])
            elsewhere_free(r->device, grads[i], elems_of(p, i) * 8);
}

static void step(const job *j, rank *r)
{
    zc_step_args args = ZC_STEP_ARGS;
    args.max_norm = j->plan->max_norm;
    CHECK_OK(zc_engine_step(r->engine, group_of(j->plan), 1, &args));
}

static size_t read_param(const job *j, rank *r, size_t i, char *out)
{
    size_t bytes = elems_of(j->plan, i) * zc_dtype_bytes(dtype_of(i));
    if (bytes && r->device)
        CHECK_OK(r->device->ops->download(r->device, r->stream, out, zc_engine_param(r->engine, i), bytes));
    else if (bytes)
        memcpy(out, zc_engine_param(r->engine, i), bytes);
    return bytes;
}

static void read_weights(const job *j, rank *r, char *out)
{
    for (size_t i = 0; i < PARAMS; i++)
        out += read_param(j, r, i, out);
}

static void *train(void *argument)
{
    job *j = argument;
    rank r;
    open_rank(j, &r);
    for (size_t s = 0; r.engine && s < STEPS; s++) {
        backward(j, &r, s);
        r.calls.updates = 0;
        step(j, &r);
        j->updates = r.calls.updates;
    }
    if (r.engine)
        read_weights(j, &r, j->weights);
    close_rank(j, &r);
    return NULL;
}

/* Runs a thread for each rank; all end with the same weights, which are the caller's to free. */
static char *run_ranks(const plan *p, void *(*body)(void *), job *jobs)
{
    zc_comm *comms[MAX_RANKS];
    pthread_t threads[MAX_RANKS];
    size_t bytes = weight_bytes(p);
    char *weights = calloc(p->ranks, bytes);
    elsewhere_begin();
    if (p->elsewhere)
        elsewhere_open(p->ranks, 20, comms);
    else
        CHECK_OK(zc_comm_open_local(p->ranks, 20, comms));
    for (size_t r = 0; r < p->ranks; r++) {
        jobs[r] = (job){.plan = p, .comm = comms[r], .rank = r, .weights = weights + r * bytes};
        pthread_create(&threads[r], NULL, body, &jobs[r]);
    }
    for (size_t r = 0; r < p->ranks; r++)
        pthread_join(threads[r], NULL);
    if (!p->hasty)
        elsewhere_end();
    for (size_t r = 1; r < p->ranks && !p->hasty; r++)
        CHECK(memcmp(weights, weights + r * bytes, bytes) == 0);
    return weights;
}

/* ---- many buckets in one call ------------------------------------------------- */

/* As many calls for one type as its pieces need. */
static size_t calls(size_t pieces, size_t at_once)
{
    return (pieces + at_once - 1) / at_once;
}

static void check_runs(const plan *base, const char *want, size_t update_bytes)
{
    job jobs[MAX_RANKS];
    plan p = *base;
    p.elsewhere = 1;
    p.update_bytes = update_bytes;
    char *got = run_ranks(&p, train, jobs);
    if (memcmp(want, got, weight_bytes(&p))) {
        fprintf(stderr, "other bits: %zu ranks, stage %d, %zu buckets, %zu bytes in a call\n", p.ranks, p.stage, p.buckets,
                update_bytes);
        CHECK(!"equal bits");
    }
    free(got);
    if (update_bytes && update_bytes != SIZE_MAX)
        return;
    size_t pieces = p.stage == 0 ? p.ranks * p.buckets : p.buckets;
    size_t most = update_bytes ? DEVICE_MAX_SHARDS : 1;
    /* a 16-bit gradient that is its own sum is widened in a ring of scratch memory */
    size_t most_16bit = most > 1 && p.stage == 1 && p.ranks == 1 ? ENGINE_SCRATCH_SLOTS : most;
    for (size_t r = 0; r < p.ranks; r++)
        CHECK_EQ(jobs[r].updates, calls(pieces, most) + calls(pieces, most_16bit));
}

static void runs_of_buckets(void)
{
    static const size_t counts[] = {1, 2, 63, 64, 65, 130};
    for (size_t ranks = 1; ranks <= MAX_RANKS; ranks++)
        for (int stage = 0; stage <= 2; stage++)
            for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
                job jobs[MAX_RANKS];
                plan p = {.ranks = ranks, .buckets = counts[c], .stage = stage, .max_norm = 0.5,
                          .rule = c % 2 ? OPTIM_SGD : OPTIM_ADAMW};
                char *want = run_ranks(&p, train, jobs);
                check_runs(&p, want, SIZE_MAX);
                check_runs(&p, want, 0);
                check_runs(&p, want, 7 * 64 * 28); /* some buckets, and then some more */
                free(want);
            }
}

/* ---- nothing waits for the device -------------------------------------------------- */

static void *step_and_ask(void *argument)
{
    job *j = argument;
    zc_step_result result, again;
    rank r;
    open_rank(j, &r);
    CHECK_OK(zc_engine_last_step(r.engine, &result));
    CHECK(isnan(result.norm) && !result.skipped && result.nonfinite == 0);
    for (size_t s = 0; r.engine && s < STEPS; s++) {
        backward(j, &r, s);
        r.calls.looks = 0;
        step(j, &r);
        CHECK_EQ(r.calls.looks, 0);
        if (s == 1)
            continue; /* nobody asks */
        CHECK_OK(zc_engine_last_step(r.engine, &result));
        CHECK_OK(zc_engine_last_step(r.engine, &again));
        CHECK_EQ(r.calls.looks, j->plan->elsewhere);
        CHECK(result.norm > j->plan->max_norm && result.norm == again.norm);
        memcpy(j->weights + s * sizeof result.norm, &result.norm, sizeof result.norm);
    }
    if (r.engine)
        close_rank(j, &r);
    return NULL;
}

static void steps_do_not_wait(void)
{
    for (int stage = 0; stage <= 2; stage++) {
        job jobs[MAX_RANKS];
        plan p = {.ranks = 2, .buckets = 65, .stage = stage, .max_norm = 0.5, .rule = OPTIM_ADAMW};
        char *here = run_ranks(&p, step_and_ask, jobs);
        p.elsewhere = 1;
        p.update_bytes = SIZE_MAX;
        char *there = run_ranks(&p, step_and_ask, jobs);
        CHECK(memcmp(here, there, STEPS * sizeof(double)) == 0);
        free(here);
        free(there);
    }
}

/* ---- parameters come back while the next forward runs ------------------------------- */

/* A forward reads one parameter after another, each when it is right. */
static void forward(job *j, rank *r)
{
    char *values = malloc(weight_bytes(j->plan));
    for (size_t i = 0; i < PARAMS; i++) {
        if (j->plan->overlap)
            CHECK_OK(zc_engine_wait_params(r->engine, &i, 1));
        j->digest = zc_hash(j->digest, values, read_param(j, r, i, values));
    }
    free(values);
}

static void *train_forward(void *argument)
{
    job *j = argument;
    rank r;
    open_rank(j, &r);
    j->digest = ZC_HASH_START;
    for (size_t s = 0; r.engine && s < STEPS; s++) {
        backward(j, &r, s);
        if (s == 2) { /* since the last step there was no forward: the round has waited */
            read_weights(j, &r, j->weights);
            j->digest = zc_hash(j->digest, j->weights, weight_bytes(j->plan));
        }
        r.calls.looks = 0;
        step(j, &r);
        CHECK_EQ(r.calls.looks, 0);
        if (s != 1)
            forward(j, &r);
    }
    CHECK_OK(zc_engine_wait_params(r.engine, NULL, 0));
    read_weights(j, &r, j->weights);
    close_rank(j, &r);
    return NULL;
}

static void forwards_have_the_same_bits(void)
{
    static const size_t counts[] = {1, 5, 65};
    for (size_t ranks = 1; ranks <= MAX_RANKS; ranks++)
        for (int stage = 1; stage <= 2; stage++)
            for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
                job jobs[MAX_RANKS];
                plan p = {.ranks = ranks, .buckets = counts[c], .stage = stage, .max_norm = 0.5, .rule = OPTIM_ADAMW,
                          .update_bytes = 7 * 64 * 28};
                char *want = run_ranks(&p, train_forward, jobs);
                uint64_t digest = jobs[0].digest;
                p.overlap = 1;
                for (p.elsewhere = 0; p.elsewhere <= 1; p.elsewhere++) {
                    char *got = run_ranks(&p, train_forward, jobs);
                    CHECK(memcmp(want, got, weight_bytes(&p)) == 0);
                    for (size_t r = 0; r < ranks; r++)
                        CHECK(jobs[r].digest == digest);
                    free(got);
                }
                free(want);
            }
}

/* What is read before it was waited for is not there yet, or is not ordered: the waits of a forward are needed. */
static void *read_hastily(void *argument)
{
    job *j = argument;
    char *right = malloc(weight_bytes(j->plan));
    rank r;
    open_rank(j, &r);
    backward(j, &r, 0);
    step(j, &r);
    read_weights(j, &r, j->weights);
    CHECK_OK(zc_engine_wait_params(r.engine, NULL, 0));
    read_weights(j, &r, right);
    CHECK(ELSEWHERE || memcmp(right, j->weights, weight_bytes(j->plan)) != 0);
    close_rank(j, &r);
    free(right);
    return NULL;
}

static void hasty_reads_are_wrong(void)
{
    for (int stage = 1; stage <= 2; stage++) {
        job jobs[MAX_RANKS];
        plan p = {.ranks = 2, .buckets = 5, .stage = stage, .rule = OPTIM_ADAMW, .elsewhere = 1, .overlap = 1, .hasty = 1};
        free(run_ranks(&p, read_hastily, jobs));
#if ELSEWHERE
        CHECK(emu_findings(NULL, 0) > 0);
#endif
    }
}

/* Functions of the engine that need whole parameters wait for them. */
static void *use_engine(void *argument)
{
    job *j = argument;
    size_t bytes = weight_bytes(j->plan), round = 0;
    char *got = malloc(bytes), *right = malloc(bytes);
    rank r;
    open_rank(j, &r);
    for (size_t i = 0; i < PARAMS; i++) {
        size_t size = elems_of(j->plan, i) * zc_dtype_bytes(dtype_of(i));
        backward(j, &r, round++);
        step(j, &r);
        CHECK_OK(zc_engine_fetch(r.engine, i, got));
        CHECK(read_param(j, &r, i, right) == size && memcmp(got, right, size) == 0);
        if (!r.device)
            continue;
        backward(j, &r, round++);
        step(j, &r);
        void *copy;
        CHECK_OK(r.device->ops->alloc(r.device, size + 1, &copy));
        CHECK_OK(zc_engine_copy_param(r.engine, i, copy));
        CHECK_OK(r.device->ops->download(r.device, r.stream, got, copy, size));
        r.device->ops->free(r.device, copy, size + 1);
        CHECK_OK(zc_engine_wait_params(r.engine, NULL, 0));
        CHECK(read_param(j, &r, i, right) == size && memcmp(got, right, size) == 0);
    }
    backward(j, &r, round++);
    step(j, &r);
    CHECK_OK(zc_engine_refresh(r.engine, SIZE_MAX));
    read_weights(j, &r, j->weights); /* compared between ranks */
    backward(j, &r, round);
    step(j, &r);
    close_rank(j, &r); /* with all of it under way */
    free(got);
    free(right);
    return NULL;
}

static void the_engine_waits_for_itself(void)
{
    for (int stage = 1; stage <= 2; stage++)
        for (int elsewhere = 0; elsewhere <= 1; elsewhere++) {
            job jobs[MAX_RANKS];
            plan p = {.ranks = 2, .buckets = 5, .stage = stage, .rule = OPTIM_ADAMW, .elsewhere = elsewhere, .overlap = 1};
            free(run_ranks(&p, use_engine, jobs));
        }
}

/* Rank 0 leaves, or meets the others elsewhere, before they have read what they need of it. */
static void *part(void *argument)
{
    job *j = argument;
    rank r;
    open_rank(j, &r);
    backward(j, &r, 0);
    step(j, &r);
    if (j->rank == 0)
        CHECK_OK(zc_comm_barrier(r.comm));
    forward(j, &r);
    if (j->rank)
        CHECK_OK(zc_comm_barrier(r.comm));
    backward(j, &r, 1);
    step(j, &r);
    if (j->rank) {
        struct timespec moment = {0, 20000000};
        nanosleep(&moment, NULL);
        CHECK_OK(zc_engine_wait_params(r.engine, NULL, 0));
    }
    close_rank(j, &r);
    return NULL;
}

static void ranks_that_are_elsewhere_help(void)
{
    for (int stage = 1; stage <= 2; stage++) {
        job jobs[MAX_RANKS];
        plan p = {.ranks = 3, .buckets = 20, .stage = stage, .rule = OPTIM_ADAMW, .overlap = 1};
        free(run_ranks(&p, part, jobs));
    }
}

int main(void)
{
    RUN(runs_of_buckets);
    RUN(steps_do_not_wait);
    RUN(forwards_have_the_same_bits);
    RUN(hasty_reads_are_wrong);
    RUN(the_engine_waits_for_itself);
#if !ELSEWHERE
    RUN(ranks_that_are_elsewhere_help);
#endif
    DONE();
}
