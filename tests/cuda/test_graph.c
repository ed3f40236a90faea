/*
 * Iterations that are captured into CUDA graphs and replayed: the bits of those
 * that are not, on many schedules and for everything that a step can be told;
 * what replays have done is known on the host; what cannot be captured is
 * refused, and neither the capture nor the optimizer has suffered.
 */
#include "cuda_device.h"
#include "emulated.h"
#include "engine.h"
#include "nccl_comm.h"

#include <math.h>

#define PARAMS 5
#define MOST_ELEMS 700
#define STEPS 6
#define WARM 2 /* steps before the capture */
#define GROUPS 2

typedef struct plan {
    int stage;
    optim_rule rule;
    zc_dtype dtype[PARAMS];
    int backwards;      /* in an iteration */
    double max_norm, loss_scale;
    int skip_nonfinite;
    size_t bad_step;    /* in which a gradient is infinite; STEPS: none */
    size_t lower_at;    /* before this step the learning rate is lowered */
    size_t eager_at;    /* this step is not a replay */
    int lend;           /* gradients stay where they are until they are used */
    int elsewhere;      /* graphs are launched on another stream, which is ordered with the engine's */
} plan;

typedef struct trained {
    char weights[PARAMS][MOST_ELEMS * 8], state[PARAMS][2][MOST_ELEMS * 8];
    double norms[STEPS];
    int skipped[STEPS];
    uint64_t steps[PARAMS], replayed;
    zc_traffic traffic;
} trained;

typedef struct bench {
    const plan *p;
    zc_comm *comm;
    zc_device *device;
    cudaStream_t stream, launching, other;
    zc_engine *engine;
    zc_options groups[GROUPS];
    void *grads[2][PARAMS];
} bench;

static size_t elems_of(size_t i)
{
    static const size_t elems[PARAMS] = {64, 700, 3, 257, 129};
    return elems[i];
}

static zc_stream *stream_of(const bench *b)
{
    return (zc_stream *)(void *)b->stream;
}

static const zc_options options[] = {
    {.lr = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1, .amsgrad = 1},
    {.lr = 0.02, .beta1 = 0.8, .beta2 = 0.9, .eps = 1e-6},
    {.lr = 0.1, .momentum = 0.9, .dampening = 0.5, .weight_decay = 0.01},
    {.lr = 0.03, .momentum = 0.5, .nesterov = 1, .maximize = 1},
};

static void fill(const plan *p, char *to, size_t i, uint64_t key)
{
    for (size_t k = 0; k < elems_of(i); k++) {
        uint64_t state = (key * PARAMS + i) * 1000003 + k;
        testing_put(to, p->dtype[i], k, testing_float(&state));
    }
}

static void open_bench(bench *b, const plan *p, uint64_t seed)
{
    static const int eager[] = {0, 3, -1};
    zc_engine_config config = ZC_ENGINE_CONFIG;
    zc_param params[PARAMS];
    static char initial[PARAMS][MOST_ELEMS * 8];
    zc_comm *host;
    emu_reset(seed, eager[seed % 3], 1);
    *b = (bench){.p = p};
    CHECK_OK(local_comm_create(1, 20000000000ull, &host));
    CHECK_OK(nccl_comm_create(&(nccl_comm_config){.host = host, .ordinal = 0, .deterministic = 1}, &b->comm));
    CHECK_OK(cuda_device_create(0, &b->device));
    b->stream = new_stream();
    b->other = new_stream();
    b->launching = p->elsewhere ? new_stream() : b->stream;
    for (size_t i = 0; i < PARAMS; i++) {
        fill(p, initial[i], i, 0);
        params[i] = (zc_param){.elems = elems_of(i), .dtype = p->dtype[i], .group = i % GROUPS, .initial = initial[i]};
        for (int k = 0; k < p->backwards; k++)
            CHECK_OK(b->device->ops->alloc(b->device, MOST_ELEMS * 8, &b->grads[k][i]));
    }
    memcpy(b->groups, &options[p->rule == OPTIM_SGD ? 2 : 0], sizeof b->groups);
    config.stage = p->stage;
    config.rule = p->rule;
    config.bucket_bytes = 1;
    CHECK_OK(engine_create(b->comm, b->device, stream_of(b), &config, params, PARAMS, b->groups, GROUPS, &b->engine));
}

static void close_bench(bench *b)
{
    CHECK_EQ(cudaStreamSynchronize(b->launching), cudaSuccess);
    for (size_t i = 0; i < PARAMS; i++)
        for (int k = 0; k < b->p->backwards; k++)
            b->device->ops->free(b->device, b->grads[k][i], MOST_ELEMS * 8);
    zc_engine_destroy(b->engine);
    comm_close(b->comm);
    CHECK_EQ(cudaStreamDestroy(b->stream), cudaSuccess);
    CHECK_EQ(cudaStreamDestroy(b->other), cudaSuccess);
    if (b->launching != b->stream)
        CHECK_EQ(cudaStreamDestroy(b->launching), cudaSuccess);
    CHECK_CLEAN();
    if (emu_leaks(report, sizeof report)) {
        fprintf(stderr, "left behind:\n%s", report);
        CHECK(!"no leaks");
    }
}

/* One has a gradient in the first backward only, and another one in none, which keeps all others waiting, if they may. */
static int has_gradient(const plan *p, size_t i, int backward)
{
    if (!p->lend)
        return i != 0 || backward == 0;
    return i != PARAMS - 1 && (i != 2 || backward == 0);
}

/* New values where the gradients are. */
static void bring_gradients(const bench *b, size_t step)
{
    static char values[MOST_ELEMS * 8];
    for (int k = 0; k < b->p->backwards; k++)
        for (size_t i = 0; i < PARAMS; i++) {
            fill(b->p, values, i, 1 + 2 * step + (uint64_t)k);
            if (step == b->p->bad_step && i == 1 && k == 0)
                testing_put(values, b->p->dtype[i], 17, INFINITY);
            CHECK_OK(b->device->ops->upload(b->device, stream_of(b), b->grads[k][i], values,
                                            elems_of(i) * zc_dtype_bytes(b->p->dtype[i])));
        }
}

static zc_status give(const bench *b, size_t i, int backward)
{
    int outcome;
    if (!b->p->lend)
        return zc_engine_add_grad(b->engine, i, b->grads[backward][i]);
    return zc_engine_offer_grad(b->engine, i, b->grads[backward][i], b->grads[backward][i], &outcome);
}

static void backward(const bench *b)
{
    for (int k = 0; k < b->p->backwards; k++) {
        for (size_t i = PARAMS; i-- > 0;)
            if (has_gradient(b->p, i, k))
                CHECK_OK(give(b, i, k));
        CHECK_OK(zc_engine_end_round(b->engine, NULL, 0));
        while (zc_engine_take_released(b->engine))
            continue;
    }
}

static zc_status step(const bench *b)
{
    zc_step_args args = {.loss_scale = b->p->loss_scale, .max_norm = b->p->max_norm, .skip_nonfinite = b->p->skip_nonfinite};
    return zc_engine_step(b->engine, b->groups, GROUPS, &args);
}

static void order(cudaStream_t before, cudaStream_t after)
{
    cudaEvent_t event = new_event();
    CHECK_EQ(cudaEventRecord(event, before), cudaSuccess);
    CHECK_EQ(cudaStreamWaitEvent(after, event, 0), cudaSuccess);
    CHECK_EQ(cudaEventDestroy(event), cudaSuccess);
}

static void begin_capture(const bench *b)
{
    CHECK_EQ(cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeGlobal), cudaSuccess);
}

static cudaGraphExec_t end_capture(const bench *b)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    CHECK_EQ(cudaStreamEndCapture(b->stream, &graph), cudaSuccess);
    CHECK_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    CHECK_EQ(cudaGraphDestroy(graph), cudaSuccess);
    return exec;
}

static cudaGraphExec_t capture(const bench *b)
{
    begin_capture(b);
    backward(b);
    CHECK_OK(step(b));
    return end_capture(b);
}

static void launch(const bench *b, cudaGraphExec_t exec)
{
    if (b->launching != b->stream)
        order(b->stream, b->launching);
    CHECK_EQ(cudaGraphLaunch(exec, b->launching), cudaSuccess);
    if (b->launching != b->stream)
        order(b->launching, b->stream);
}

static void read_all(bench *b, trained *out)
{
    for (size_t i = 0; i < PARAMS; i++) {
        CHECK_OK(zc_engine_fetch(b->engine, i, out->weights[i]));
        for (int role = 0; role < 2; role++)
            if (b->p->rule != OPTIM_SGD || role == 0)
                CHECK_OK(zc_engine_read(b->engine, i, role ? ZC_ROLE_EXP_AVG_SQ : ZC_ROLE_EXP_AVG, 1, out->state[i][role]));
        out->steps[i] = zc_engine_step_count(b->engine, i);
    }
    CHECK_OK(zc_engine_replayed_steps(b->engine, &out->replayed));
    CHECK_OK(zc_engine_traffic(b->engine, &out->traffic));
}

/* With graphs: after WARM steps one is captured, which makes all later ones but one. */
static void train(const plan *p, uint64_t seed, int graphs, trained *out)
{
    cudaGraphExec_t exec = NULL;
    bench b;
    memset(out, 0, sizeof *out);
    open_bench(&b, p, seed);
    for (size_t s = 0; s < STEPS; s++) {
        zc_step_result result;
        if (s == p->lower_at)
            b.groups[0].lr *= 0.25;
        if (s == p->lower_at && graphs)
            CHECK_OK(zc_engine_replay_options(b.engine, b.groups, GROUPS));
        if (s == WARM && graphs)
            exec = capture(&b);
        bring_gradients(&b, s);
        if (exec && s != p->eager_at) {
            launch(&b, exec);
        } else {
            backward(&b);
            CHECK_OK(step(&b));
        }
        if (s % 2 && s != p->bad_step)
            continue; /* nobody asks */
        CHECK_OK(zc_engine_last_step(b.engine, &result));
        out->norms[s] = result.norm;
        out->skipped[s] = result.skipped;
    }
    read_all(&b, out);
    if (exec)
        CHECK_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
    close_bench(&b);
}

static int same_double(double a, double b)
{
    return a == b || (isnan(a) && isnan(b));
}

static void check_plan(const plan *p, uint64_t seed)
{
    static trained eager, replayed;
    train(p, seed, 0, &eager);
    train(p, seed + 1, 1, &replayed);
    int same = memcmp(eager.weights, replayed.weights, sizeof eager.weights) == 0 &&
               memcmp(eager.state, replayed.state, sizeof eager.state) == 0 &&
               memcmp(eager.steps, replayed.steps, sizeof eager.steps) == 0 &&
               memcmp(eager.skipped, replayed.skipped, sizeof eager.skipped) == 0 &&
               memcmp(&eager.traffic, &replayed.traffic, sizeof eager.traffic) == 0;
    for (size_t s = 0; s < STEPS; s++)
        same &= same_double(eager.norms[s], replayed.norms[s]);
    if (!same)
        fprintf(stderr, "seed %" PRIu64 ": stage %d, rule %d, %d backwards, max_norm %g, bad step %zu, lent %d\n", seed,
                p->stage, (int)p->rule, p->backwards, p->max_norm, p->bad_step, p->lend);
    CHECK(same);
    uint64_t replays = STEPS - WARM - (p->eager_at < STEPS) - (p->skip_nonfinite && p->bad_step < STEPS);
    CHECK_EQ(eager.replayed, 0);
    CHECK_EQ(replayed.replayed, replays);
    if (p->bad_step < STEPS)
        CHECK_EQ(eager.skipped[p->bad_step], p->skip_nonfinite);
}

static void replays_have_the_bits_of_steps(void)
{
    static const zc_dtype dtypes[] = {ZC_FLOAT32, ZC_BFLOAT16, ZC_FLOAT16, ZC_FLOAT64};
    uint64_t seed = 0;
    for (int stage = 0; stage <= 2; stage++)
        for (optim_rule rule = OPTIM_ADAMW; rule <= OPTIM_SGD; rule++)
            for (int backwards = 1; backwards <= 2; backwards++)
                for (size_t variant = 0; variant < 4; variant++, seed++) {
                    plan p = {.stage = stage, .rule = rule, .backwards = backwards, .max_norm = variant % 2 ? 0.5 : 0,
                              .loss_scale = variant == 3 ? 8 : 1, .skip_nonfinite = variant == 3,
                              .bad_step = variant == 3 ? WARM + 1 : STEPS, .lower_at = WARM + variant,
                              .eager_at = variant == 2 ? WARM + 2 : STEPS, .lend = seed % 2, .elsewhere = seed / 2 % 2};
                    for (size_t i = 0; i < PARAMS; i++)
                        p.dtype[i] = dtypes[variant == 0 ? 0 : (i + seed) % 4];
                    check_plan(&p, 3 * seed);
                }
}

/* Graphs of different iterations take turns, with steps of neither in between. */
static void graphs_take_turns(void)
{
    static const plan p = {.stage = 2, .rule = OPTIM_ADAMW, .backwards = 1, .max_norm = 0.5, .loss_scale = 1, .bad_step = STEPS,
                           .lend = 1};
    static trained wanted, got;
    static const int order_of[] = {0, 1, 0, 2, 1, 1, 0};
    for (uint64_t seed = 0; seed < 12; seed++)
        for (int graphs = 0; graphs <= 1; graphs++) {
            cudaGraphExec_t exec[2] = {NULL, NULL};
            bench b;
            open_bench(&b, &p, seed);
            for (size_t s = 0; s < sizeof order_of / sizeof *order_of; s++) {
                int kind = order_of[s]; /* 1: without the second parameter's gradient */
                bring_gradients(&b, s);
                for (int captured = graphs && s && kind < 2 && !exec[kind]; captured >= 0; captured--) {
                    if (captured)
                        begin_capture(&b);
                    if (!captured && graphs && s && kind < 2) {
                        launch(&b, exec[kind]);
                        continue;
                    }
                    for (size_t i = PARAMS; i-- > 0;)
                        if (i != 1 || kind != 1)
                            CHECK_OK(give(&b, i, 0));
                    CHECK_OK(step(&b));
                    while (zc_engine_take_released(b.engine))
                        continue;
                    if (captured)
                        exec[kind] = end_capture(&b);
                }
            }
            read_all(&b, graphs ? &got : &wanted);
            for (int k = 0; k < 2 && graphs; k++)
                CHECK_EQ(cudaGraphExecDestroy(exec[k]), cudaSuccess);
            close_bench(&b);
            if (graphs) {
                CHECK_EQ(got.replayed, 5);
                got.replayed = wanted.replayed;
                CHECK(memcmp(&got, &wanted, sizeof got) == 0);
            }
        }
}

/* ---- what is refused -------------------------------------------------------------------- */

/* After a capture that came to nothing: what was begun in it is dropped, and all goes on. */
static void drop(const bench *b)
{
    CHECK_OK(zc_engine_discard(b->engine, SIZE_MAX));
    while (zc_engine_take_released(b->engine))
        continue;
}

static void end_in_vain(const bench *b)
{
    cudaGraph_t graph;
    CHECK_EQ(cudaStreamEndCapture(b->stream, &graph), cudaSuccess);
    CHECK_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

static int says(const char *words)
{
    if (strstr(zc_last_error(), words))
        return 1;
    fprintf(stderr, "\"%s\" is not in: %s\n", words, zc_last_error());
    return 0;
}

typedef struct refusal {
    zc_status (*call)(bench *b);
    const char *words;
} refusal;

static zc_status clip(bench *b)
{
    double norm;
    return zc_engine_clip(b->engine, 1, 2, 1, &norm);
}

static zc_status read(bench *b)
{
    static float values[MOST_ELEMS];
    return zc_engine_read(b->engine, 0, ZC_ROLE_EXP_AVG, 1, values);
}

static zc_status fetch(bench *b)
{
    static float values[MOST_ELEMS];
    return zc_engine_fetch(b->engine, 0, values);
}

static zc_status read_part(bench *b)
{
    static float values[64];
    return zc_engine_read_part(b->engine, 0, ZC_ROLE_WEIGHT, 0, 64, values);
}

static zc_status write_part(bench *b)
{
    static float values[64];
    return zc_engine_write_part(b->engine, 0, ZC_ROLE_WEIGHT, 0, 64, values);
}

static zc_status last_step(bench *b)
{
    zc_step_result result;
    return zc_engine_last_step(b->engine, &result);
}

static zc_status traffic(bench *b)
{
    zc_traffic row;
    return zc_engine_traffic(b->engine, &row);
}

static zc_status set_step_count(bench *b)
{
    return zc_engine_set_step_count(b->engine, 0, 3, 0);
}

static zc_status replay_options(bench *b)
{
    return zc_engine_replay_options(b->engine, b->groups, GROUPS);
}

static zc_status add_params(bench *b)
{
    static const float one[1];
    zc_param param = {.elems = 1, .dtype = ZC_FLOAT32, .initial = one};
    return zc_engine_add_params(b->engine, &param, 1, b->groups, GROUPS);
}

static zc_status allocate(bench *b)
{
    void *memory;
    return b->device->ops->alloc(b->device, 8, &memory);
}

static zc_status wait(bench *b)
{
    return b->device->ops->synchronize(b->device, stream_of(b));
}

/* What is not captured cannot come after what is. */
static zc_status use_other_stream(bench *b)
{
    return zc_engine_use_stream(b->engine, b->other);
}

static const refusal refusals[] = {
    {clip, "clip_grad_norm_ cannot be captured"},
    {read, "cannot be captured"},
    {fetch, "cannot be captured"},
    {read_part, "memory cannot be read while its stream is captured"},
    {write_part, "writing a parameter cannot be captured"},
    {last_step, "memory cannot be read while its stream is captured"},
    {traffic, "reading the traffic cannot be captured"},
    {set_step_count, "setting a step count cannot be captured"},
    {replay_options, "setting the options of the groups cannot be captured"},
    {add_params, "add parameters cannot be captured"},
    {allocate, "8 bytes of memory of GPU 0 cannot be made while a stream is captured"},
    {wait, "nothing can be waited for while its stream is captured"},
    {use_other_stream, "cannot wait for one that is captured"},
};

/* The last one has no room before the others are there. */
static void gradients_that_must_wait_are_refused(void)
{
    plan p = {.stage = 2, .rule = OPTIM_ADAMW, .backwards = 1, .loss_scale = 1, .bad_step = STEPS};
    bench b;
    open_bench(&b, &p, 3);
    bring_gradients(&b, 0);
    backward(&b);
    CHECK_OK(step(&b));
    begin_capture(&b);
    zc_status status = ZC_OK;
    for (size_t i = 0; i < PARAMS && status == ZC_OK; i++)
        status = give(&b, i, 0);
    CHECK_EQ(status, ZC_ESTATE);
    CHECK(says("has no room yet, and in a CUDA graph"));
    end_in_vain(&b);
    drop(&b);
    backward(&b);
    CHECK_OK(step(&b));
    close_bench(&b);
}

static const plan plain = {.stage = 2, .rule = OPTIM_SGD, .backwards = 1, .max_norm = 0.5, .loss_scale = 1, .bad_step = STEPS,
                           .lower_at = STEPS, .eager_at = STEPS};

/* Each refused call in the middle of a capture, which is as good as without them. */
static void captures_survive_refusals(void)
{
    static trained wanted, got;
    train(&plain, 1, 0, &wanted);
    for (uint64_t seed = 0; seed < 6; seed++) {
        cudaGraphExec_t exec;
        bench b;
        memset(&got, 0, sizeof got);
        open_bench(&b, &plain, seed);
        for (size_t s = 0; s < WARM; s++) {
            bring_gradients(&b, s);
            backward(&b);
            CHECK_OK(step(&b));
        }
        begin_capture(&b);
        for (size_t k = 0; k < sizeof refusals / sizeof *refusals; k++) {
            CHECK_EQ(refusals[k].call(&b), ZC_ESTATE);
            CHECK(says(refusals[k].words));
        }
        backward(&b);
        for (size_t k = 0; k < sizeof refusals / sizeof *refusals; k++)
            CHECK_EQ(refusals[k].call(&b), ZC_ESTATE);
        CHECK_OK(step(&b));
        exec = end_capture(&b);
        for (size_t s = WARM; s < STEPS; s++) {
            bring_gradients(&b, s);
            launch(&b, exec);
        }
        CHECK_EQ(add_params(&b), ZC_ESTATE);
        CHECK(says("parameters cannot be added after a step was captured"));
        read_all(&b, &got);
        CHECK(memcmp(wanted.weights, got.weights, sizeof got.weights) == 0);
        CHECK(memcmp(&wanted.traffic, &got.traffic, sizeof got.traffic) == 0);
        CHECK_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
        close_bench(&b);
    }
}

static void iterations_are_whole(void)
{
    static trained wanted, got;
    plan lent = plain;
    lent.lend = 1;
    for (int k = 0; k < 2; k++) {
        bench b;
        train(k ? &lent : &plain, 1, 0, &wanted);
        memset(&got, 0, sizeof got);
        open_bench(&b, k ? &lent : &plain, 4 + (uint64_t)k);
        begin_capture(&b);
        CHECK_EQ(give(&b, 0, 0), ZC_ESTATE);
        CHECK(says("before a capture there must have been a whole iteration"));
        end_in_vain(&b);
        for (size_t s = 0; s < STEPS; s++) {
            bring_gradients(&b, s);
            if (s == 1) { /* a backward in the capture, and no step */
                begin_capture(&b);
                backward(&b);
                end_in_vain(&b);
                CHECK_EQ(step(&b), ZC_ESTATE);
                CHECK(says("step() is not captured into a CUDA graph, but there are gradients from in a capture"));
                CHECK_EQ(give(&b, 0, 0), ZC_ESTATE);
                begin_capture(&b);
                CHECK_EQ(step(&b), ZC_ESTATE);
                CHECK(says("there are gradients from in another capture"));
                end_in_vain(&b);
                drop(&b);
            }
            if (s == 2) { /* half a backward */
                begin_capture(&b);
                CHECK_OK(give(&b, PARAMS - 1, 0));
                end_in_vain(&b);
                CHECK_EQ(zc_engine_end_round(b.engine, NULL, 0), ZC_ESTATE);
                drop(&b);
                begin_capture(&b);
                CHECK_OK(give(&b, PARAMS - 1, 0));
                zc_engine_abort_round(b.engine); /* it raised */
                end_in_vain(&b);
            }
            if (s == 3) { /* a step without a backward */
                begin_capture(&b);
                CHECK_EQ(step(&b), ZC_ESTATE);
                CHECK(says("captured into a CUDA graph without a backward"));
                end_in_vain(&b);
            }
            backward(&b);
            if (s == 4) { /* a step in the capture, of gradients from before it */
                begin_capture(&b);
                CHECK_EQ(step(&b), ZC_ESTATE);
                CHECK(says("step() is captured into a CUDA graph, but there are gradients from outside of the capture"));
                end_in_vain(&b);
            }
            CHECK_OK(step(&b));
        }
        read_all(&b, &got);
        CHECK(memcmp(wanted.weights, got.weights, sizeof got.weights) == 0);
        CHECK(memcmp(wanted.steps, got.steps, sizeof got.steps) == 0);
        close_bench(&b);
    }
}

/* As torch does it: the capture is on a stream of its own, replays are where the engine works otherwise. */
static void captures_may_be_on_another_stream(void)
{
    static trained wanted, got;
    train(&plain, 1, 0, &wanted);
    for (uint64_t seed = 0; seed < 6; seed++) {
        cudaGraphExec_t exec = NULL;
        bench b;
        memset(&got, 0, sizeof got);
        open_bench(&b, &plain, seed);
        for (size_t s = 0; s < STEPS; s++) {
            cudaStream_t usual = b.stream;
            bring_gradients(&b, s);
            if (s == WARM) {
                CHECK_EQ(cudaStreamSynchronize(usual), cudaSuccess);
                b.stream = b.other;
                begin_capture(&b);
                CHECK_OK(zc_engine_use_stream(b.engine, b.other));
                backward(&b);
                CHECK_OK(step(&b));
                exec = end_capture(&b);
                b.stream = usual;
                CHECK_OK(zc_engine_use_stream(b.engine, usual));
            }
            if (exec)
                CHECK_EQ(cudaGraphLaunch(exec, usual), cudaSuccess);
            else
                backward(&b);
            CHECK_OK(exec ? ZC_OK : step(&b));
        }
        read_all(&b, &got);
        CHECK(memcmp(wanted.weights, got.weights, sizeof got.weights) == 0);
        CHECK_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
        close_bench(&b);
    }
}

/* Memory that goes in a capture is given back after it. */
static void memory_may_go_in_a_capture(void)
{
    for (uint64_t seed = 0; seed < 6; seed++) {
        void *before, *inside;
        bench b;
        open_bench(&b, &plain, seed);
        bring_gradients(&b, 0);
        backward(&b);
        CHECK_OK(step(&b));
        CHECK_OK(b.device->ops->alloc(b.device, 64, &before));
        CHECK_OK(b.device->ops->alloc(b.device, 64, &inside));
        CHECK_OK(b.device->ops->fill(b.device, stream_of(&b), inside, 1, 64));
        b.device->ops->free(b.device, before, 64);
        begin_capture(&b);
        b.device->ops->free(b.device, inside, 64);
        backward(&b);
        CHECK_OK(step(&b));
        CHECK_EQ(cudaGraphExecDestroy(end_capture(&b)), cudaSuccess);
        close_bench(&b);
    }
}

static void options_must_be_there(void)
{
    bench b;
    plan p = plain;
    p.rule = OPTIM_ADAMW;
    open_bench(&b, &p, 9);
    b.groups[0].amsgrad = 0;
    bring_gradients(&b, 0);
    backward(&b);
    CHECK_OK(step(&b));
    b.groups[0].lr = 0.5;
    begin_capture(&b);
    backward(&b);
    CHECK_EQ(step(&b), ZC_ESTATE);
    CHECK(says("call before_replay()"));
    end_in_vain(&b);
    drop(&b);
    CHECK_OK(zc_engine_replay_options(b.engine, b.groups, GROUPS));
    CHECK_EQ(cudaGraphExecDestroy(capture(&b)), cudaSuccess);
    close_bench(&b);
}

static void several_ranks_and_stage_3_are_refused(void)
{
    const plan *p = &plain;
    bench b;
    open_bench(&b, p, 11);
    bring_gradients(&b, 0);
    backward(&b);
    CHECK_OK(step(&b));
    b.engine->ranks = 2; /* as far as the question goes */
    begin_capture(&b);
    CHECK_EQ(give(&b, 0, 0), ZC_EINVAL);
    CHECK(says("training on 2 ranks cannot be captured"));
    b.engine->ranks = 1;
    b.engine->config.stage = 3;
    CHECK_EQ(give(&b, 0, 0), ZC_EINVAL);
    CHECK(says("stage 3 cannot be captured"));
    b.engine->config.stage = p->stage;
    end_in_vain(&b);
    close_bench(&b);
}

int main(void)
{
    RUN(replays_have_the_bits_of_steps);
    RUN(graphs_take_turns);
    RUN(gradients_that_must_wait_are_refused);
    RUN(captures_survive_refusals);
    RUN(iterations_are_whole);
    RUN(captures_may_be_on_another_stream);
    RUN(memory_may_go_in_a_capture);
    RUN(options_must_be_there);
    RUN(several_ranks_and_stage_3_are_refused);
    emu_reset(0, 0, 1);
    DONE();
}
