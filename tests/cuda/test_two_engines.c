/*
 * Two engines on one communicator of GPUs, at stage 3, or one at stage 3 and one at stage 2: their gathers and rounds
 * share NCCL's lanes and the line on which ranks declare their order.  On many schedules each has the numbers that it has
 * alone, whichever way they take turns, and no rank is stuck; ranks that take turns differently are told so.
 */
#include "cuda_device.h"
#include "emulated.h"
#include "engine.h"
#include "nccl_comm.h"

#include <pthread.h>

#define RANKS 2
#define UNITS 5
#define ELEMS 150
#define STEPS 3
#define SEEDS 2

typedef enum turns { ONE_AFTER_THE_OTHER, INSIDE, UNIT_BY_UNIT, ALONE_FIRST, ALONE_SECOND } turns;

typedef struct plan {
    turns turns;
    int stage[2];
    size_t slots, prefetch;
    int disagree; /* rank 1 takes turns the other way round */
} plan;

static float history[2][STEPS + 1][UNITS][ELEMS]; /* what each has alone, at stage 2 */

typedef struct net {
    zc_engine *engine;
    int number, stage, note; /* the history is being made */
    size_t rank, step;
    zc_device *device; /* the engine's */
    zc_stream *stream;
    void *grads[UNITS], *seen[UNITS]; /* seen: what a forward has read */
} net;

static const zc_options group = {.lr = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1};

static void fill(float *to, uint64_t key)
{
    uint64_t state = key * 1000003 + 1;
    for (size_t k = 0; k < ELEMS; k++)
        to[k] = testing_float(&state);
}

static void open_net(net *n, zc_comm *comm, int gpu, const plan *p)
{
    static const zc_unit unit = {.level = 1};
    static float values[RANKS][UNITS][ELEMS];
    zc_engine_config config = ZC_ENGINE_CONFIG;
    zc_unit units[UNITS];
    zc_param params[UNITS];
    config.stage = n->stage;
    config.bucket_bytes = 1;
    config.ring_slots = 1;
    config.units = units;
    config.unit_count = n->stage == 3 ? UNITS : 0;
    config.unit_slots = p->slots;
    config.prefetch = p->prefetch;
    for (uint32_t u = 0; u < UNITS; u++) {
        units[u] = unit;
        fill(values[n->rank][u], 1000 + (uint64_t)n->number * UNITS + u);
        params[u] = (zc_param){.elems = ELEMS, .dtype = ZC_FLOAT32, .unit = u, .initial = values[n->rank][u]};
    }
    CHECK_OK(cuda_device_create(gpu, &n->device));
    CHECK_OK(engine_create(comm, n->device, n->stream, &config, params, UNITS, &group, 1, &n->engine));
    for (size_t u = 0; u < UNITS; u++) {
        CHECK_OK(n->device->ops->alloc(n->device, ELEMS * 4, &n->grads[u]));
        CHECK_OK(n->device->ops->alloc(n->device, ELEMS * 4, &n->seen[u]));
    }
}

static void close_net(net *n)
{
    for (size_t u = 0; u < UNITS; u++) {
        n->device->ops->free(n->device, n->grads[u], ELEMS * 4);
        n->device->ops->free(n->device, n->seen[u], ELEMS * 4);
    }
    zc_engine_destroy(n->engine);
}

/* The unit's values, as whoever computes with them at this moment has them. */
static zc_status forward(net *n, size_t u)
{
    if (n->stage == 3)
        ZC_TRY(zc_engine_acquire(n->engine, u, 0));
    ZC_TRY(n->device->ops->copy(n->device, n->stream, n->seen[u], zc_engine_param(n->engine, u), ELEMS * 4));
    if (n->stage == 3)
        zc_engine_release(n->engine, u);
    return ZC_OK;
}

static zc_status backward(net *n, size_t u)
{
    float values[ELEMS];
    fill(values, ((uint64_t)n->number * STEPS + n->step) * RANKS * UNITS + n->rank * UNITS + u);
    if (n->stage == 3)
        ZC_TRY(zc_engine_acquire(n->engine, u, 1));
    ZC_TRY(n->device->ops->upload(n->device, n->stream, n->grads[u], values, sizeof values));
    ZC_TRY(zc_engine_add_grad(n->engine, u, n->grads[u]));
    if (n->stage == 3)
        zc_engine_release(n->engine, u);
    return ZC_OK;
}

static zc_status step(net *n)
{
    zc_step_args args = ZC_STEP_ARGS;
    float got[ELEMS];
    args.max_norm = 0.5;
    ZC_TRY(zc_engine_step(n->engine, &group, 1, &args));
    for (size_t u = 0; u < UNITS; u++) {
        ZC_TRY(n->device->ops->download(n->device, n->stream, got, n->seen[u], sizeof got));
        CHECK(n->note || memcmp(got, history[n->number][n->step][u], sizeof got) == 0);
    }
    n->step++;
    return ZC_OK;
}

static zc_status pass(net *n, int back)
{
    for (size_t k = 0; k < UNITS; k++)
        ZC_TRY(back ? backward(n, UNITS - 1 - k) : forward(n, k));
    return back ? zc_engine_end_round(n->engine, NULL, 0) : ZC_OK;
}

static zc_status whole(net *n)
{
    ZC_TRY(pass(n, 0));
    ZC_TRY(pass(n, 1));
    return step(n);
}

static zc_status iteration(const plan *p, net *a, net *b)
{
    switch (p->turns) {
    case ONE_AFTER_THE_OTHER:
        ZC_TRY(whole(a));
        return whole(b);
    case INSIDE: /* b's backward is a part of a's */
        ZC_TRY(pass(a, 0));
        ZC_TRY(pass(b, 0));
        ZC_TRY(backward(a, UNITS - 1));
        ZC_TRY(pass(b, 1));
        for (size_t u = UNITS - 1; u-- > 0;)
            ZC_TRY(backward(a, u));
        ZC_TRY(step(b));
        return step(a);
    case UNIT_BY_UNIT:
        for (size_t u = 0; u < UNITS; u++) {
            ZC_TRY(forward(a, u));
            ZC_TRY(forward(b, u));
        }
        for (size_t u = UNITS; u-- > 0;) {
            ZC_TRY(backward(b, u));
            ZC_TRY(backward(a, u));
        }
        ZC_TRY(step(a));
        return step(b);
    case ALONE_FIRST:
        return whole(a);
    default:
        return whole(b);
    }
}

typedef struct job {
    const plan *plan;
    zc_comm *host;
    size_t rank;
    int note; /* rank 0 writes the history */
    zc_status status;
    char said[600];
} job;

static void look(net *n, int note)
{
    float got[ELEMS];
    for (size_t u = 0; u < UNITS; u++) {
        CHECK_OK(zc_engine_fetch(n->engine, u, got));
        if (note && n->rank == 0)
            memcpy(history[n->number][n->step][u], got, sizeof got);
        else if (!note)
            CHECK(memcmp(got, history[n->number][n->step][u], sizeof got) == 0);
    }
}

static void *run_rank(void *argument)
{
    job *j = argument;
    net nets[2];
    zc_comm *comm;
    int gpu = (int)j->rank;
    CHECK_OK(nccl_comm_create(&(nccl_comm_config){.host = j->host, .ordinal = gpu, .deterministic = 1}, &comm));
    CHECK_EQ(cudaSetDevice(gpu), cudaSuccess);
    cudaStream_t stream = new_stream();
    for (int k = 0; k < 2; k++) {
        nets[k] = (net){.number = k, .stage = j->plan->stage[k], .note = j->note, .rank = j->rank, .stream = (zc_stream *)(void *)stream};
        open_net(&nets[k], comm, gpu, j->plan);
        if (j->note)
            look(&nets[k], 1);
    }
    int swapped = j->plan->disagree && j->rank == 1;
    for (size_t s = 0; s < STEPS && j->status == ZC_OK; s++) {
        j->status = iteration(j->plan, &nets[swapped], &nets[!swapped]);
        for (int k = 0; k < 2 && j->note; k++)
            if (nets[k].step == s + 1)
                look(&nets[k], 1);
    }
    if (j->status != ZC_OK)
        snprintf(j->said, sizeof j->said, "%s", zc_last_error());
    for (int k = 0; k < 2; k++) {
        if (j->status == ZC_OK && nets[k].step == STEPS)
            look(&nets[k], 0);
        close_net(&nets[k]);
    }
    comm_close(comm);
    CHECK_EQ(cudaStreamDestroy(stream), cudaSuccess);
    return NULL;
}

static void run_plan(const plan *p, uint64_t seed, int note, job *jobs)
{
    static const int eager[] = {0, 3, -1};
    zc_comm *hosts[RANKS];
    pthread_t threads[RANKS];
    int before = testing_failures;
    emu_reset(seed, eager[seed % 3], 1);
    CHECK_OK(local_comm_create(RANKS, 20000000000ull, hosts));
    for (size_t r = 0; r < RANKS; r++) {
        jobs[r] = (job){.plan = p, .host = hosts[r], .rank = r, .note = note};
        pthread_create(&threads[r], NULL, run_rank, &jobs[r]);
    }
    for (size_t r = 0; r < RANKS; r++)
        pthread_join(threads[r], NULL);
    if (!p->disagree) {
        CHECK_CLEAN();
        CHECK_EQ(emu_leaks(report, sizeof report), 0);
        for (size_t r = 0; r < RANKS; r++)
            CHECK_EQ(jobs[r].status, ZC_OK);
    }
    if (testing_failures != before)
        fprintf(stderr, "seed %" PRIu64 ": turns %d, stages %d and %d, %zu slots, prefetch %zu: %s | %s\n", seed, (int)p->turns,
                p->stage[0], p->stage[1], p->slots, p->prefetch, jobs[0].said, jobs[1].said);
}

static void make_history(void)
{
    job jobs[RANKS];
    for (turns alone = ALONE_FIRST; alone <= ALONE_SECOND; alone++) {
        plan p = {.turns = alone, .stage = {2, 2}};
        for (int twice = 0; twice < 2; twice++) /* what a step finds is compared with what the first run has noted */
            run_plan(&p, 1, !twice, jobs);
    }
}

static void both_have_their_numbers(void)
{
    static const size_t rings[][2] = {{1, 0}, {2, 0}, {2, 1}, {3, 2}};
    static const int stages[][2] = {{3, 3}, {3, 2}, {2, 3}};
    job jobs[RANKS];
    uint64_t seed = 1;
    for (turns turns = ONE_AFTER_THE_OTHER; turns <= UNIT_BY_UNIT; turns++)
        for (size_t r = 0; r < sizeof rings / sizeof *rings; r++)
            for (size_t s = 0; s < sizeof stages / sizeof *stages; s++)
                for (int k = 0; k < SEEDS; k++) {
                    plan p = {.turns = turns, .stage = {stages[s][0], stages[s][1]}, .slots = rings[r][0],
                              .prefetch = rings[r][1]};
                    run_plan(&p, seed++, 0, jobs);
                }
}

static void other_orders_are_a_mismatch(void)
{
    for (turns turns = ONE_AFTER_THE_OTHER; turns <= UNIT_BY_UNIT; turns++)
        for (uint64_t seed = 0; seed < SEEDS; seed++) {
            job jobs[RANKS];
            plan p = {.turns = turns, .stage = {3, 3}, .slots = 2, .prefetch = 1, .disagree = 1};
            run_plan(&p, seed, 0, jobs);
            for (size_t r = 0; r < RANKS; r++) {
                CHECK_EQ(jobs[r].status, ZC_EMISMATCH);
                CHECK(strstr(jobs[r].said, "ranks 0 and 1") || strstr(jobs[r].said, "ranks 1 and 0"));
                CHECK(strstr(jobs[r].said, "both come to \"gather of unit 0\"") && strstr(jobs[r].said, "of different optimizers"));
            }
        }
}

int main(void)
{
    RUN(make_history);
    RUN(both_have_their_numbers);
    RUN(other_orders_are_a_mismatch);
    emu_reset(0, 0, 1);
    DONE();
}
