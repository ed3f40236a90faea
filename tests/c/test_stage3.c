/*
 * Stage 3 with ranks as threads: the bits of stage 2 at every use of a unit and
 * after every step, whatever the units, slots and guesses; and its promises on
 * addresses, errors, traffic and memory.  On the deferring pair the gathers are
 * collective, and what a unit's user would read is copied by the device itself.
 * All of it once more where memory has one address only.
 */
#include "comm.h"
#include "elsewhere.h"
#include "engine.h"
#include "testing.h"
#include "zero_c.h"

#include <math.h>
#include <pthread.h>
#include <time.h>

#define MAX_RANKS 4
#define PARAMS 20
#define MAX_UNITS 24
#define STEPS 4
#define STORE_AFTER 1 /* the step after which `store` writes */
#define NOBODY SIZE_MAX

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define SPARSE 3 /* only every third combination */
#else
#define SPARSE 1
#endif

static const struct {
    size_t elems;
    zc_dtype dtype;
    int frozen;
} model[PARAMS] = {
    {5, ZC_BFLOAT16, 0},   {1000, ZC_FLOAT32, 0}, {0, ZC_FLOAT32, 0},  {1, ZC_FLOAT64, 0},    {64, ZC_FLOAT16, 0},
    {777, ZC_BFLOAT16, 1}, {130, ZC_FLOAT32, 0},  {3000, ZC_FLOAT32, 0}, {33, ZC_FLOAT32, 1}, {0, ZC_BFLOAT16, 1},
    {257, ZC_FLOAT64, 0},  {640, ZC_BFLOAT16, 0}, {63, ZC_FLOAT16, 0}, {1, ZC_FLOAT32, 0},    {200, ZC_FLOAT32, 0},
    {210, ZC_FLOAT32, 0},  {220, ZC_FLOAT32, 1},  {230, ZC_FLOAT32, 0}, {240, ZC_FLOAT32, 0}, {250, ZC_FLOAT32, 0},
};

/* Which parameters are used together. Units of level 1 lie around those of level 2 that name them. */
typedef struct layout {
    size_t units;
    uint32_t level[MAX_UNITS];
    int resident[MAX_UNITS];
    size_t parent[MAX_UNITS]; /* of level 2 */
    uint32_t of[PARAMS];
} layout;

static const layout layouts[] = {
    {   /* a root around everything; one unit with nothing but an empty parameter, one with none at all */
        .units = 13, .level = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, .resident = {1},
        .of = {0, 1, 1, 1, 2, 2, 4, 4, 5, 3, 5, 5, 5, 0, 7, 8, 9, 10, 11, 12},
    },
    {.units = 1, .level = {1}}, /* all in one */
    {   /* each its own unit, in an order that is not the parameters' */
        .units = 20, .level = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1},
        .of = {7, 14, 1, 8, 15, 2, 9, 16, 3, 10, 17, 4, 11, 18, 5, 12, 19, 6, 13, 0},
    },
    {   /* units inside units, and a root */
        .units = 10, .level = {1, 1, 2, 2, 1, 2, 2, 1, 2, 1}, .resident = {1},
        .parent = {[2] = 1, [3] = 1, [5] = 4, [6] = 4, [8] = 7},
        .of = {0, 1, 1, 1, 2, 2, 3, 4, 4, 5, 5, 6, 7, 7, 2, 3, 5, 6, 8, 9},
    },
    {.units = 2, .level = {1, 1}, .resident = {1, 1}, .of = {0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1}},
};
#define LAYOUTS (sizeof layouts / sizeof *layouts)

typedef struct plan {
    size_t ranks;
    int stage, defer, fill, rounds;
    size_t layout, slots, prefetch, bucket_bytes, ring;
    optim_rule rule;
    double max_norm;
    int unused;   /* parameter 1 has no gradient on odd ranks, parameter 12 nowhere in even steps */
    int offer;    /* gradients are lent to the engine */
    int late;     /* parameter 6 delivers a second gradient */
    int store;    /* some parameters are written from outside */
    int evaluate; /* forwards without a backward between the steps */
    int recompute;/* each block's forward runs again before its backward, as with a checkpoint */
    int wander;   /* each rank uses units of its own, in an order of its own; deferred, all the same ones */
} plan;

/* What stage 2 has: all parameters after create and after each step, and masters and moments at the end. */
typedef struct history {
    char *weights[STEPS + 1][PARAMS];
    char *master[PARAMS], *moment[PARAMS];
} history;

typedef struct check {
    char *copy;
    const char *expected;
    size_t bytes;
} check;

typedef struct job {
    const plan *plan;
    zc_comm *comm;
    size_t rank;
    history *history; /* stage 2's rank 0 writes it, stage 3 compares with it */

    zc_engine *engine;
    zc_device *device;    /* elsewhere, or NULL */
    zc_stream *stream;
    size_t index[PARAMS]; /* in the engine */
    char *address[PARAMS];
    char *grads[PARAMS];  /* of this round */
    size_t step, round, held;
    check *checks;        /* copies that the device is to make before anybody looks */
    size_t check_count, check_room;
    uint64_t random;
} job;

static size_t bytes_of(size_t i)
{
    return model[i].elems * zc_dtype_bytes(model[i].dtype);
}

static char *made_of(size_t i, uint64_t state)
{
    char *array = malloc(bytes_of(i) + 8);
    state *= 1000003;
    for (size_t k = 0; k < model[i].elems; k++)
        testing_put(array, model[i].dtype, k, testing_float(&state));
    return array;
}

static char *gradient(size_t step, size_t round, size_t rank, size_t i)
{
    return made_of(i, ((step * 31 + round) * 31 + rank) * 31 + i + 77);
}

static int has_gradient(const job *j, size_t i)
{
    if (model[i].frozen)
        return 0;
    if (j->plan->unused && i == 1 && j->rank % 2 == 1)
        return 0;
    return !(j->plan->unused && i == 12 && j->step % 2 == 0);
}

/* ---- reading parameters ------------------------------------------------------- */

/* Parameter i is at its address, with the value that stage 2 has at this time. */
static void check_param(job *j, size_t i)
{
    const char *expected = j->history->weights[j->step][i];
    char *address = zc_engine_param(j->engine, j->index[i]);
    size_t unit = layouts[j->plan->layout].of[i], range;
    const char *base = zc_engine_unit_range(j->engine, unit, &range);
    CHECK(address == j->address[i]);
    CHECK((address == NULL) == (model[i].elems == 0));
    if (!address)
        return;
    CHECK(address >= base && address + bytes_of(i) <= base + range);
    CHECK_EQ((size_t)(address - base) % 128, 0); /* 64 of the smallest elements */
    if (!j->device) {
        if (memcmp(address, expected, bytes_of(i))) {
            fprintf(stderr, "parameter %zu of unit %zu differs at step %zu on rank %zu: layout %zu, ranks %zu, slots "
                    "%zu, prefetch %zu, bucket %zu\n", i, unit, j->step, j->rank, j->plan->layout, j->plan->ranks,
                    j->plan->slots, j->plan->prefetch, j->plan->bucket_bytes);
            CHECK(!"equal bits");
        }
        return;
    }
    if (j->check_count == j->check_room) {
        j->check_room = j->check_room ? 2 * j->check_room : 64;
        j->checks = realloc(j->checks, j->check_room * sizeof *j->checks);
    }
    check *c = &j->checks[j->check_count++];
    *c = (check){elsewhere_put(j->device, j->stream, malloc(bytes_of(i)), bytes_of(i)), expected, bytes_of(i)};
    CHECK_OK(j->device->ops->copy(j->device, j->stream, c->copy, address, c->bytes));
}

static void check_unit(job *j, size_t unit)
{
    for (size_t i = 0; i < PARAMS; i++)
        if (layouts[j->plan->layout].of[i] == unit)
            check_param(j, i);
}

static void look_at_copies(job *j)
{
    if (!j->device)
        return;
    CHECK_OK(j->device->ops->synchronize(j->device, j->stream));
    for (size_t k = 0; k < j->check_count; k++) {
        char *seen = malloc(j->checks[k].bytes);
        CHECK_OK(j->device->ops->download(j->device, j->stream, seen, j->checks[k].copy, j->checks[k].bytes));
        CHECK(memcmp(seen, j->checks[k].expected, j->checks[k].bytes) == 0);
        elsewhere_free(j->device, j->checks[k].copy, j->checks[k].bytes);
        free(seen);
    }
    j->check_count = 0;
}

/* All parameters, as every rank can fetch them. */
static void check_fetched(job *j)
{
    char *value = malloc(3000 * 8);
    for (size_t i = 0; i < PARAMS; i++) {
        CHECK_OK(zc_engine_fetch(j->engine, j->index[i], value));
        CHECK(memcmp(value, j->history->weights[j->step][i], bytes_of(i)) == 0);
    }
    free(value);
}

/* ---- a training step -------------------------------------------------------------- */

static void use(job *j, size_t unit, int backward)
{
    CHECK_OK(zc_engine_acquire(j->engine, unit, backward));
    check_unit(j, unit);
}

/* A discarded unit cannot be mistaken for a gathered one. */
static void leave(job *j, size_t unit)
{
    size_t bytes;
    zc_engine_release(j->engine, unit);
    const unsigned char *range = zc_engine_unit_range(j->engine, unit, &bytes);
    if (!j->plan->fill || layouts[j->plan->layout].resident[unit] || j->device)
        return;
    CHECK_EQ(zc_engine_unit_generation(j->engine, unit), 0);
    for (size_t k = 0; k < bytes; k++)
        if (range[k] != 0xff) {
            CHECK_EQ(range[k], 0xff);
            break;
        }
}

static void spoil_released(job *j)
{
    for (char *owner; (owner = zc_engine_take_released(j->engine)); j->held--)
        for (size_t i = 0; i < PARAMS; i++)
            if (j->grads[i] == owner && !j->device) /* deferred work still reads it */
                memset(owner, 255, bytes_of(i));
}

static void give_gradient(job *j, size_t i)
{
    int outcome = ZC_GRAD_TAKEN;
    if (!has_gradient(j, i))
        return;
    char *grad = gradient(j->step, j->round, j->rank, i);
    grad = j->grads[i] = elsewhere_put(j->device, j->stream, grad, bytes_of(i));
    if (!j->plan->offer)
        CHECK_OK(zc_engine_add_grad(j->engine, j->index[i], grad));
    else
        CHECK_OK(zc_engine_offer_grad(j->engine, j->index[i], grad, grad, &outcome));
    j->held += outcome == ZC_GRAD_HELD;
    if (j->plan->offer && outcome == ZC_GRAD_TAKEN && !j->device)
        memset(grad, 255, bytes_of(i));
    spoil_released(j);
}

static void give_unit(job *j, size_t unit)
{
    for (size_t i = PARAMS; i-- > 0;)
        if (layouts[j->plan->layout].of[i] == unit)
            give_gradient(j, i);
}

static int inside(const layout *l, size_t unit, size_t outer)
{
    return l->level[unit] == 2 && l->parent[unit] == outer;
}

static void forward(job *j)
{
    const layout *l = &layouts[j->plan->layout];
    for (size_t u = 0; u < l->units; u++)
        if (l->resident[u])
            use(j, u, 0);
    for (size_t u = 0; u < l->units; u++) {
        if (l->resident[u] || l->level[u] != 1)
            continue;
        use(j, u, 0);
        for (size_t v = 0; v < l->units; v++)
            if (inside(l, v, u)) {
                use(j, v, 0);
                leave(j, v);
            }
        check_unit(j, u); /* still there */
        leave(j, u);
    }
}

static void backward(job *j)
{
    const layout *l = &layouts[j->plan->layout];
    for (size_t u = l->units; u-- > 0;) {
        if (l->resident[u] || l->level[u] != 1)
            continue;
        if (j->plan->recompute) {
            use(j, u, 0);
            leave(j, u);
        }
        use(j, u, 1);
        for (size_t v = l->units; v-- > 0;)
            if (inside(l, v, u)) {
                use(j, v, 1);
                give_unit(j, v);
                leave(j, v);
            }
        check_unit(j, u);
        give_unit(j, u);
        leave(j, u);
    }
}

static void leave_residents(job *j, int give)
{
    const layout *l = &layouts[j->plan->layout];
    for (size_t u = l->units; u-- > 0;)
        if (l->resident[u]) {
            check_unit(j, u);
            if (give)
                give_unit(j, u);
            leave(j, u);
        }
}

/* Some units, some of them together, in an order and number that nobody can guess. */
static void wander(job *j)
{
    const layout *l = &layouts[j->plan->layout];
    size_t held[MAX_UNITS], count = 0, turns = testing_random(&j->random) % 12;
    for (size_t t = 0; t < turns; t++) {
        size_t unit = testing_random(&j->random) % l->units;
        size_t user = zc_engine_unit_user(j->engine, unit);
        int back = testing_random(&j->random) % 2 == 0;
        if (user != ZC_NO_UNIT && user != unit) {
            CHECK_EQ(zc_engine_acquire(j->engine, unit, back), ZC_ESTATE);
            check_unit(j, user);
            continue;
        }
        use(j, unit, back);
        held[count++] = unit;
        for (size_t k = 0; k < count; k++)
            check_unit(j, held[k]);
        while (count && testing_random(&j->random) % 2)
            zc_engine_release(j->engine, held[--count]);
    }
    while (count)
        zc_engine_release(j->engine, held[--count]);
}

static void all_gradients(job *j)
{
    for (size_t i = PARAMS; i-- > 0;)
        give_gradient(j, i);
}

static void one_round(job *j)
{
    const plan *p = j->plan;
    if (p->stage < 3) {
        all_gradients(j);
    } else {
        if (p->wander)
            wander(j);
        forward(j);
        backward(j);
        leave_residents(j, 1);
    }
    char *second = gradient(j->step, j->round + 100, j->rank, 6);
    second = elsewhere_put(j->device, j->stream, second, bytes_of(6));
    zc_late_grad late = {j->index[6], second};
    CHECK_OK(zc_engine_end_round(j->engine, &late, p->late && j->rank % 2 == 0));
    spoil_released(j);
    CHECK_EQ(j->held, 0);
    look_at_copies(j);
    for (size_t i = 0; i < PARAMS; i++) {
        if (j->grads[i])
            elsewhere_free(j->device, j->grads[i], bytes_of(i));
        j->grads[i] = NULL;
    }
    elsewhere_free(j->device, second, bytes_of(6));
    if (p->wander && p->stage == 3)
        wander(j);
}

/* Stage 3: rank 0's values count. Stage 2 does the same by hand. */
static void write_some(job *j)
{
    for (size_t i = 0; i < PARAMS; i += 1 + i % 2) {
        char *value = made_of(i, 5000 + i);
        if (j->plan->stage == 3) {
            CHECK_OK(zc_engine_store(j->engine, j->index[i], j->rank ? NULL : value));
        } else if (model[i].frozen) {
            if (j->rank == 0)
                memcpy(j->history->weights[j->step + 1][i], value, bytes_of(i));
        } else if (bytes_of(i)) {
            memcpy(zc_engine_param(j->engine, j->index[i]), value, bytes_of(i));
            CHECK_OK(zc_engine_refresh(j->engine, j->index[i]));
        }
        free(value);
    }
    for (size_t u = 0; j->plan->stage == 3 && u < layouts[j->plan->layout].units; u++)
        CHECK_EQ(zc_engine_unit_generation(j->engine, u), 0);
}

/* Stage 2, rank 0: what is to be compared with. */
static void note_weights(job *j, size_t step)
{
    for (size_t i = 0; i < PARAMS; i++) {
        char *to = j->history->weights[step][i];
        if (model[i].frozen)
            continue;
        char *other = malloc(bytes_of(i) + 8);
        CHECK_OK(zc_engine_fetch(j->engine, j->index[i], j->rank ? other : to));
        if (bytes_of(i))
            CHECK(memcmp(j->rank ? other : to, zc_engine_param(j->engine, j->index[i]), bytes_of(i)) == 0);
        free(other);
    }
}

/* Masters and first moments. */
static void finish_state(job *j)
{
    for (size_t i = 0; i < PARAMS; i++) {
        size_t bytes = model[i].elems * (model[i].dtype == ZC_FLOAT64 ? 8 : 4);
        char *master = calloc(1, bytes + 8), *moment = calloc(1, bytes + 8);
        if (j->index[i] != NOBODY) {
            CHECK_OK(zc_engine_read(j->engine, j->index[i], ZC_ROLE_MASTER, 1, master));
            CHECK_OK(zc_engine_read(j->engine, j->index[i], ZC_ROLE_EXP_AVG, 1, moment));
        }
        if (j->plan->stage == 3 && !model[i].frozen) {
            CHECK(memcmp(master, j->history->master[i], bytes) == 0);
            CHECK(memcmp(moment, j->history->moment[i], bytes) == 0);
        } else if (j->plan->stage < 3 && j->rank == 0) {
            memcpy(j->history->master[i], master, bytes);
            memcpy(j->history->moment[i], moment, bytes);
        } else if (j->plan->stage == 3 && model[i].elems) { /* frozen: no master but the value itself, and no moment */
            uint16_t half = zc_float_to_bf16(*(float *)(void *)master);
            CHECK(memcmp(model[i].dtype == ZC_FLOAT32 ? (void *)master : (void *)&half,
                         j->history->weights[STEPS][i], model[i].dtype == ZC_FLOAT32 ? 4 : 2) == 0);
            CHECK_EQ(moment[0], 0);
        }
        free(master);
        free(moment);
    }
}

static void make_engine(job *j, zc_comm **comm, const zc_options *group)
{
    const plan *p = j->plan;
    const layout *l = &layouts[p->layout];
    zc_engine_config config = ZC_ENGINE_CONFIG;
    zc_param params[PARAMS];
    zc_unit units[MAX_UNITS];
    char *initial[PARAMS], names[MAX_UNITS][24];
    size_t count = 0;
    config.stage = p->stage;
    config.rule = p->rule;
    config.bucket_bytes = p->bucket_bytes;
    config.ring_slots = p->ring;
    config.threads = 1;
    if (p->stage == 3) {
        config.units = units;
        config.unit_count = l->units;
        config.unit_slots = p->slots;
        config.prefetch = p->prefetch;
        config.fill_discarded = p->fill;
    }
    for (size_t u = 0; u < l->units; u++) {
        snprintf(names[u], sizeof names[u], "u%zu", u);
        units[u] = (zc_unit){u % 3 ? names[u] : NULL, l->level[u], l->resident[u]};
    }
    for (size_t i = 0; i < PARAMS; i++) {
        initial[i] = made_of(i, i + (j->rank ? 999 : 1)); /* rank 0's must win */
        j->index[i] = model[i].frozen && p->stage < 3 ? NOBODY : count;
        if (j->index[i] != NOBODY)
            params[count++] = (zc_param){.elems = model[i].elems, .dtype = model[i].dtype, .initial = initial[i],
                                         .unit = l->of[i], .frozen = model[i].frozen};
        else if (j->rank == 0)
            for (size_t step = 0; step <= STEPS; step++)
                memcpy(j->history->weights[step][i], initial[i], bytes_of(i));
    }
    if (p->defer) {
        elsewhere_wrap(j->comm, comm, &j->device, &j->stream);
        CHECK_OK(engine_create(*comm, j->device, j->stream, &config, params, count, group, 1, &j->engine));
    } else {
        CHECK_OK(zc_engine_create(j->comm, &config, params, count, group, 1, &j->engine));
    }
    for (size_t i = 0; i < PARAMS; i++)
        free(initial[i]);
    if (j->engine)
        j->engine->patience_ns = 100000; /* with a ring of one, ranks that differ wait in vain */
}

static void *train(void *argument)
{
    job *j = argument;
    const plan *p = j->plan;
    zc_comm *comm = j->comm;
    zc_options group = p->rule == OPTIM_SGD ? (zc_options){.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01}
                                            : (zc_options){.lr = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8,
                                                           .weight_decay = 0.1};
    make_engine(j, &comm, &group);
    for (size_t i = 0; j->engine && i < PARAMS; i++)
        j->address[i] = j->index[i] == NOBODY ? NULL : zc_engine_param(j->engine, j->index[i]);
    if (j->engine && p->stage < 3)
        note_weights(j, 0);
    for (j->step = 0; j->engine && j->step < STEPS;) {
        if (p->evaluate && p->stage == 3)
            for (size_t turn = 0; turn < 1 + j->step % 2; turn++) {
                forward(j);
                leave_residents(j, 0);
            }
        for (j->round = 0; j->round < (size_t)p->rounds; j->round++)
            one_round(j);
        zc_step_args args = ZC_STEP_ARGS;
        zc_step_result result;
        args.max_norm = p->max_norm;
        CHECK_OK(zc_engine_step(j->engine, &group, 1, &args));
        CHECK_OK(zc_engine_last_step(j->engine, &result));
        CHECK(!p->max_norm || result.norm > 0);
        look_at_copies(j);
        if (p->store && j->step == STORE_AFTER)
            write_some(j);
        if (p->stage < 3)
            note_weights(j, j->step + 1);
        for (size_t step = j->step + 2; p->store && p->stage < 3 && j->rank == 0 && step <= STEPS; step++)
            for (size_t i = 0; i < PARAMS; i++)
                if (model[i].frozen)
                    memcpy(j->history->weights[step][i], j->history->weights[j->step + 1][i], bytes_of(i));
        j->step++;
        if (p->stage == 3)
            check_fetched(j);
    }
    if (j->engine)
        finish_state(j);
    for (size_t i = 0; j->engine && i < PARAMS; i++)
        if (j->index[i] != NOBODY)
            CHECK_EQ(zc_engine_step_count(j->engine, j->index[i]),
                     model[i].frozen ? 0 : p->unused && i == 12 ? STEPS / 2 : STEPS);
    zc_engine_destroy(j->engine);
    free(j->checks);
    if (p->defer)
        elsewhere_close(comm, j->stream);
    else
        zc_comm_close(comm);
    return NULL;
}

static void run_plan(const plan *p, history *h)
{
    zc_comm *comms[MAX_RANKS];
    job jobs[MAX_RANKS];
    pthread_t threads[MAX_RANKS];
    elsewhere_begin();
    if (p->defer)
        elsewhere_open(p->ranks, 20, comms);
    else
        CHECK_OK(zc_comm_open_local(p->ranks, 20, comms));
    for (size_t r = 0; r < p->ranks; r++) {
        jobs[r] = (job){.plan = p, .comm = comms[r], .rank = r, .history = h, .random = p->layout};
        if (!p->defer) /* collective gathers: all ranks the same way */
            jobs[r].random += 100 * r;
        pthread_create(&threads[r], NULL, train, &jobs[r]);
    }
    for (size_t r = 0; r < p->ranks; r++)
        pthread_join(threads[r], NULL);
    elsewhere_end();
}

static history *make_history(void)
{
    history *h = calloc(1, sizeof *h);
    for (size_t i = 0; i < PARAMS; i++) {
        for (size_t step = 0; step <= STEPS; step++)
            h->weights[step][i] = calloc(1, bytes_of(i) + 8);
        h->master[i] = calloc(1, model[i].elems * 8 + 8);
        h->moment[i] = calloc(1, model[i].elems * 8 + 8);
    }
    return h;
}

static void free_history(history *h)
{
    for (size_t i = 0; i < PARAMS; i++) {
        for (size_t step = 0; step <= STEPS; step++)
            free(h->weights[step][i]);
        free(h->master[i]);
        free(h->moment[i]);
    }
    free(h);
}

static const plan start = {.ranks = 2, .stage = 2, .rounds = 1, .bucket_bytes = 1 << 20, .ring = 16};

/* Every layout with every number of slots and units ahead, against one run of stage 2; `base` says the rest. */
static void compare_all(const plan *base, size_t skip)
{
    static const size_t slots[][2] = {{1, 0}, {2, 0}, {2, 1}, {3, 1}, {3, 2}};
    static const size_t buckets[] = {1, 600, 2500, 1 << 20};
    history *h = make_history();
    size_t turn = 0;
    run_plan(base, h);
    for (size_t l = 0; l < LAYOUTS; l++)
        for (size_t s = 0; s < 5; s++, turn++) {
            plan p = *base;
            if (turn % skip)
                continue;
            p.stage = 3;
            p.layout = l;
            p.slots = slots[s][0];
            p.prefetch = slots[s][1];
            p.bucket_bytes = buckets[turn % 4];
            p.ring = 1 + turn % 3;
            int before = testing_failures;
            run_plan(&p, h);
            if (testing_failures != before)
                fprintf(stderr, "above: ranks %zu layout %zu slots %zu prefetch %zu bucket %zu ring %zu defer %d\n",
                        p.ranks, l, p.slots, p.prefetch, p.bucket_bytes, p.ring, p.defer);
        }
    free_history(h);
}

static void equals_stage_2(void)
{
    for (size_t ranks = 1; ranks <= MAX_RANKS; ranks++) {
        plan p = start;
        p.ranks = ranks;
        compare_all(&p, SPARSE);
    }
}

static void equals_stage_2_with_everything(void)
{
    for (size_t ranks = 1; ranks <= MAX_RANKS; ranks++) {
        plan p = start;
        p.ranks = ranks;
        p.rounds = 1 + (int)ranks % 3;
        p.max_norm = 0.5;
        p.unused = p.late = p.evaluate = 1;
        p.offer = ranks % 2;
        p.fill = ranks >= 3;
        p.store = 1;
        p.rule = ranks == 2 ? OPTIM_SGD : OPTIM_ADAMW;
        compare_all(&p, SPARSE);
    }
}

static void ranks_wander(void)
{
    for (size_t ranks = 2; ranks <= MAX_RANKS; ranks++) {
        plan p = start;
        p.ranks = ranks;
        p.wander = p.unused = 1;
        p.rounds = 2;
        p.fill = ranks == 3;
        p.store = ranks == 4;
        p.recompute = ranks != 3;
        compare_all(&p, SPARSE);
    }
}

static void equals_stage_2_deferred(void)
{
    for (size_t ranks = 1; ranks <= 3; ranks++) {
        history *h = make_history();
        plan base = start;
        base.ranks = ranks;
        base.rounds = 2;
        base.max_norm = 0.5;
        base.unused = base.late = 1;
        base.store = ranks != 2;
        run_plan(&base, h);
        for (size_t l = 0; l < LAYOUTS; l++)
            for (size_t ahead = 0; ahead < 3; ahead++) {
                plan p = base;
                p.stage = 3;
                p.defer = 1;
                p.layout = l;
                p.slots = ahead + 1;
                p.prefetch = ahead;
                p.bucket_bytes = ahead == 1 ? 1 : 700; /* with 1 a unit has more buckets than there are tags */
                p.ring = 2;
                p.offer = l % 2;
                p.fill = ahead == 2;
                p.evaluate = l < 2;
                p.wander = l % 2 == 0;
                p.recompute = l != 1 && ahead != 0; /* ranks have gradients, and open rounds, at different times */
                run_plan(&p, h);
            }
        free_history(h);
    }
}

/* ---- engines of a few equal blocks ------------------------------------------------ */

#define BLOCKS 8

typedef struct blocks {
    zc_comm *comm;
    size_t rank, ranks;
    int what, late;       /* for the body */
    int defer;
    int root;             /* unit 0 is resident */
    size_t count;         /* of blocks, besides the root */
    size_t elems[BLOCKS + 1];
    size_t slots, prefetch;
    int fill;
    zc_engine *engine;
    zc_device *device;
    zc_stream *stream;
    void (*body)(struct blocks *);
} blocks;

static zc_options adamw = ZC_OPTIONS_ADAMW;

static zc_status make_blocks(blocks *b, zc_comm *comm)
{
    static const char *const names[] = {"root", "b1", "b2", "b3", "b4", "b5", "b6", "b7", "b8"};
    zc_param params[BLOCKS + 1];
    zc_unit units[BLOCKS + 1];
    float *values[BLOCKS + 1];
    zc_engine_config config = ZC_ENGINE_CONFIG;
    config.stage = 3;
    config.threads = 1;
    config.bucket_bytes = 4096;
    config.units = units;
    config.unit_count = b->count + 1;
    config.unit_slots = b->slots;
    config.prefetch = b->prefetch;
    config.fill_discarded = b->fill;
    for (size_t u = 0; u <= b->count; u++) {
        units[u] = (zc_unit){names[u], 1, u == 0 && b->root};
        values[u] = malloc(b->elems[u] * sizeof(float) + 1);
        for (size_t k = 0; k < b->elems[u]; k++)
            values[u][k] = (float)(1000 * u + k % 1000);
        params[u] = (zc_param){.name = names[u], .elems = b->elems[u], .dtype = ZC_FLOAT32, .initial = values[u],
                               .unit = (uint32_t)u};
    }
    zc_status status = b->defer ? engine_create(comm, b->device, b->stream, &config, params, b->count + 1, &adamw, 1,
                                                &b->engine)
                                : zc_engine_create(comm, &config, params, b->count + 1, &adamw, 1, &b->engine);
    for (size_t u = 0; u <= b->count; u++)
        free(values[u]);
    return status;
}

static void *run_blocks(void *argument)
{
    blocks *b = argument;
    zc_comm *comm = b->comm;
    if (b->defer)
        elsewhere_wrap(b->comm, &comm, &b->device, &b->stream);
    CHECK_OK(make_blocks(b, comm));
    if (b->engine)
        b->body(b);
    zc_engine_destroy(b->engine);
    elsewhere_close(comm, b->stream);
    return NULL;
}

static void with_blocks(size_t ranks, blocks b, void (*body)(blocks *))
{
    zc_comm *comms[MAX_RANKS];
    blocks all[MAX_RANKS];
    pthread_t threads[MAX_RANKS];
    elsewhere_begin();
    if (b.defer)
        elsewhere_open(ranks, 20, comms);
    else
        CHECK_OK(zc_comm_open_local(ranks, 20, comms));
    for (size_t r = 0; r < ranks; r++) {
        all[r] = b;
        all[r].comm = comms[r];
        all[r].rank = r;
        all[r].ranks = ranks;
        all[r].body = body;
        pthread_create(&threads[r], NULL, run_blocks, &all[r]);
    }
    for (size_t r = 0; r < ranks; r++)
        pthread_join(threads[r], NULL);
    elsewhere_end();
}

static const blocks six = {
    .root = 1, .count = 6, .slots = 2, .prefetch = 1, .elems = {100, 1000, 1000, 1000, 1000, 1000, 1000},
};

static void visit(blocks *b, size_t unit, int backward)
{
    CHECK_OK(zc_engine_acquire(b->engine, unit, backward));
    zc_engine_release(b->engine, unit);
}

static void visit_all(blocks *b, int backward)
{
    for (size_t k = 0; k < b->count; k++)
        visit(b, backward ? b->count - k : k + 1, backward);
}

static zc_status step(blocks *b)
{
    zc_step_args args = ZC_STEP_ARGS;
    return zc_engine_step(b->engine, &adamw, 1, &args);
}

static size_t gathers(blocks *b)
{
    zc_traffic traffic;
    zc_engine_traffic(b->engine, &traffic);
    return traffic.all_gather.calls;
}

/* ---- addresses, generations ---------------------------------------------------------- */

static void addresses_body(blocks *b)
{
    zc_engine *e = b->engine;
    size_t one, three;
    char *at1 = zc_engine_unit_range(e, 1, &one), *at3 = zc_engine_unit_range(e, 3, &three);
    CHECK(at1 && at3 && at1 != at3 && one == three && one % (64 * b->ranks * sizeof(float)) == 0);
    CHECK(zc_engine_param(e, 1) == (void *)at1);
    CHECK(zc_engine_param(e, b->count + 1) == NULL);
    for (size_t u = 0; u <= b->count; u++) {
        CHECK_EQ(zc_engine_unit_generation(e, u), 0);
        CHECK_EQ(zc_engine_unit_user(e, u), ZC_NO_UNIT);
    }
    CHECK(zc_engine_units_share(e));
    volatile char sink = at1[0]; /* readable at any time */
    (void)sink;
    CHECK_OK(zc_engine_acquire(e, 1, 0));
    CHECK_OK(zc_engine_acquire(e, 1, 0));
    uint64_t first = zc_engine_unit_generation(e, 1);
    CHECK(first != 0);
    CHECK_EQ(zc_engine_unit_user(e, 1), 1);
    CHECK_EQ(zc_engine_unit_user(e, 3), 1); /* the same slot */
    CHECK_EQ(zc_engine_unit_user(e, 2), ZC_NO_UNIT);
    CHECK(((float *)(void *)at1)[7] == 1007);
    zc_engine_release(e, 1);
    CHECK_EQ(zc_engine_unit_user(e, 1), 1); /* still once */
    CHECK_EQ(zc_engine_acquire(e, 3, 0), ZC_ESTATE);
    CHECK(strstr(zc_last_error(), "unit 'b1' and unit 'b3'") != NULL);
    zc_engine_release(e, 1);
    zc_engine_release(e, 1); /* once too often changes nothing */
    CHECK_EQ(zc_engine_unit_user(e, 1), ZC_NO_UNIT);
    CHECK_EQ(zc_engine_unit_generation(e, 1), first);
    CHECK_OK(zc_engine_acquire(e, 3, 0));
    CHECK_EQ(zc_engine_unit_generation(e, 1), 0);
    CHECK(zc_engine_unit_generation(e, 3) != 0);
    CHECK(((float *)(void *)at3)[7] == 3007);
    CHECK(memcmp(at1, at3, one) == 0); /* one memory */
    zc_engine_release(e, 3);
    CHECK_OK(zc_engine_acquire(e, 1, 1));
    CHECK(zc_engine_unit_generation(e, 1) != 0 && zc_engine_unit_generation(e, 1) != first);
    CHECK_EQ(zc_engine_unit_generation(e, 3), 0);
    zc_engine_release(e, 1);

    CHECK_OK(zc_engine_acquire(e, 0, 0));
    uint64_t root = zc_engine_unit_generation(e, 0);
    zc_engine_release(e, 0);
    visit_all(b, 0);
    CHECK_OK(zc_engine_acquire(e, 0, 1));
    CHECK_EQ(zc_engine_unit_generation(e, 0), root); /* resident: nothing takes its place */
    zc_engine_release(e, 0);
    CHECK_OK(step(b));
    for (size_t u = 0; u <= b->count; u++)
        CHECK_EQ(zc_engine_unit_generation(e, u), 0);
    visit(b, 0, 0);
    CHECK(zc_engine_unit_generation(e, 0) > root);
    CHECK(zc_engine_unit_range(e, 1, &one) == (void *)at1);
}

static void addresses_stay(void)
{
    for (size_t ranks = 1; ranks <= 3; ranks++)
        with_blocks(ranks, six, addresses_body);
}

/* ---- errors ---------------------------------------------------------------------------- */

static void expect(zc_status got, zc_status status, const char *part)
{
    CHECK_EQ(got, status);
    if (!strstr(zc_last_error(), part)) {
        fprintf(stderr, "'%s' lacks '%s'\n", zc_last_error(), part);
        CHECK(!"message");
    }
}

/* Refused before any rank is asked. */
static void refused(zc_comm *comm)
{
    float w[4] = {0};
    zc_unit unit = {NULL, 0, 0};
    zc_param param = {.name = "w", .elems = 4, .dtype = ZC_FLOAT32, .initial = w};
    zc_engine_config good = ZC_ENGINE_CONFIG, c;
    zc_engine *engine = NULL;
    good.stage = 3;
    good.units = &unit;
    good.unit_count = 1;
    good.threads = 1;
    c = good, c.unit_slots = c.prefetch = 1;
    expect(zc_engine_create(comm, &c, &param, 1, &adamw, 1, &engine), ZC_EINVAL, "1 slots for each ring");
    c = good, c.shared_params = 1;
    expect(zc_engine_create(comm, &c, &param, 1, &adamw, 1, &engine), ZC_EINVAL, "shared_params is for stages 0 to 2");
    c = good, c.unit_count = 0;
    expect(zc_engine_create(comm, &c, &param, 1, &adamw, 1, &engine), ZC_EINVAL, "stage 3 needs units");
    c = good, c.units = NULL;
    expect(zc_engine_create(comm, &c, &param, 1, &adamw, 1, &engine), ZC_EINVAL, "stage 3 needs units");
    param.unit = 1;
    expect(zc_engine_create(comm, &good, &param, 1, &adamw, 1, &engine), ZC_EINVAL,
           "parameter 0 (w) is in unit 1, but there are 1 units");
    param.unit = 0;
    param.frozen = 1;
    for (c = good, c.stage = 0; c.stage < 3; c.stage++)
        expect(zc_engine_create(comm, &c, &param, 1, &adamw, 1, &engine), ZC_EINVAL, "(w) is frozen; below stage 3");
    CHECK(engine == NULL);
}

static void errors_body(blocks *b)
{
    zc_engine *e = b->engine;
    float values[1000] = {0}, got[1000];
    zc_param more = {.name = "more", .elems = 4, .dtype = ZC_FLOAT32, .initial = values};
    refused(b->comm);
    expect(zc_engine_acquire(e, 7, 0), ZC_EINVAL, "unit 7 of 7");
    expect(zc_engine_acquire(e, ZC_NO_UNIT, 0), ZC_EINVAL, "of 7");
    zc_engine_release(e, 7);
    CHECK_EQ(zc_engine_unit_user(e, 7), ZC_NO_UNIT);
    CHECK_EQ(zc_engine_unit_generation(e, 7), 0);
    size_t bytes = 1;
    CHECK(zc_engine_unit_range(e, 7, &bytes) == NULL && bytes == 0);
    expect(zc_engine_add_params(e, &more, 1, &adamw, 1), ZC_EINVAL, "at stage 3 parameters cannot be added");
    expect(zc_engine_fetch(e, 7, got), ZC_EINVAL, "parameter 7 of 7");
    expect(zc_engine_store(e, 7, values), ZC_EINVAL, "parameter 7 of 7");
    if (b->rank == 0)
        expect(zc_engine_store(e, 1, NULL), ZC_EINVAL, "rank 0 must give the values of parameter 1 (b1)");
    CHECK_OK(zc_engine_acquire(e, 2, 0));
    expect(step(b), ZC_ESTATE, "step() while unit 'b2' is in use");
    expect(zc_engine_store(e, 1, values), ZC_ESTATE, "while unit 'b2' is in use");
    expect(zc_engine_acquire(e, 4, 0), ZC_ESTATE, "unit 'b2' and unit 'b4' are used at the same time");
    CHECK_EQ(zc_engine_unit_user(e, 4), 2);
    CHECK_EQ(zc_engine_unit_generation(e, 4), 0);
    zc_engine_release(e, 2);
    for (size_t k = 0; k < 1000; k++)
        values[k] = 1;
    CHECK_OK(zc_engine_add_grad(e, 4, values));
    CHECK_OK(step(b));
    CHECK_EQ(zc_engine_step_count(e, 4), 1);
    CHECK_EQ(zc_engine_step_count(e, 2), 0);
    CHECK_OK(zc_engine_fetch(e, 4, got));
    CHECK(got[5] < 4005 && got[5] > 4004);
    CHECK_OK(zc_engine_fetch(e, 2, got));
    CHECK(got[5] == 2005);
}

/* One trained parameter and frozen ones of every type in one unit. */
static void *live_with_frozen(void *argument)
{
    blocks *b = argument;
    float w[130] = {0}, g[130], master[130];
    uint16_t h[130];
    zc_unit unit = {"u", 0, 0};
    zc_param params[] = {
        {.name = "w", .elems = 130, .dtype = ZC_FLOAT32, .initial = w},
        {.name = "bf", .elems = 130, .dtype = ZC_BFLOAT16, .initial = h, .frozen = 1},
        {.name = "hf", .elems = 130, .dtype = ZC_FLOAT16, .initial = h, .frozen = 1},
        {.name = "f", .elems = 130, .dtype = ZC_FLOAT32, .initial = w, .frozen = 1},
    };
    zc_engine_config config = ZC_ENGINE_CONFIG;
    double norm;
    zc_traffic traffic;
    config.stage = 3;
    config.threads = 1;
    config.units = &unit;
    config.unit_count = 1;
    for (size_t k = 0; k < 130; k++) {
        g[k] = 1;
        w[k] = (float)k;
        h[k] = zc_float_to_bf16((float)k);
    }
    CHECK_OK(zc_engine_create(b->comm, &config, params, 4, &adamw, 1, &b->engine));
    zc_engine *e = b->engine;
    zc_engine_traffic(e, &traffic);
    for (size_t i = 1; i < 4; i++) {
        expect(zc_engine_add_grad(e, i, g), ZC_EINVAL, params[i].name);
        CHECK_EQ(zc_engine_round_open(e), 0); /* a refused gradient opens nothing */
    }
    CHECK_OK(zc_engine_add_grad(e, 0, g));
    CHECK_OK(zc_engine_end_round(e, NULL, 0));
    for (size_t i = 1; i < 4; i++) { /* there is nothing of it, and asking does no harm */
        CHECK_OK(zc_engine_discard(e, i));
        CHECK_OK(zc_engine_read(e, i, ZC_ROLE_GRAD, 1, master));
        CHECK_EQ(master[5], 0);
        CHECK_OK(zc_engine_read(e, i, ZC_ROLE_MASTER, 1, master));
        CHECK(i == 2 || master[5] == 5);
        CHECK(i != 2 || master[5] == zc_fp16_to_float(h[5]));
        CHECK_OK(zc_engine_refresh(e, i));
        CHECK_OK(zc_engine_store(e, i, i == 3 ? (void *)w : (void *)h));
    }
    CHECK_OK(zc_engine_clip(e, 1e9, 3, 1, &norm));
    CHECK_OK(zc_engine_clip(e, 1e9, 2, 1, &norm));
    CHECK(norm > 11.4 && norm < 11.41); /* sqrt(130) */
    CHECK_OK(step(b));
    zc_engine_traffic(e, &traffic);
    CHECK_EQ(traffic.reduce_scatter.calls, 1);
    CHECK_EQ(traffic.reduce_scatter.payload_elems, 256); /* of w alone */
    CHECK_EQ(traffic.reduce_scatter.bytes, 256 / 2 * 4);
    zc_engine_destroy(e);
    zc_comm_close(b->comm);
    return NULL;
}

static void errors_leave_the_engine_usable(void)
{
    zc_comm *comms[2];
    blocks both[2] = {0};
    pthread_t threads[2];
    with_blocks(2, six, errors_body);
    CHECK_OK(zc_comm_open_local(2, 20, comms));
    for (size_t r = 0; r < 2; r++) {
        both[r].comm = comms[r];
        pthread_create(&threads[r], NULL, live_with_frozen, &both[r]);
    }
    for (size_t r = 0; r < 2; r++)
        pthread_join(threads[r], NULL);
}

static void *look_at_stage(void *argument)
{
    blocks *b = argument;
    float w[100], got[100] = {0};
    zc_param param = {.name = "w", .elems = 100, .dtype = ZC_FLOAT32, .initial = w};
    zc_engine_config config = ZC_ENGINE_CONFIG;
    for (size_t k = 0; k < 100; k++)
        w[k] = (float)k + (b->rank ? 1000 : 0);
    for (config.stage = 0; config.stage < 3; config.stage++)
        for (config.shared_params = 0; config.shared_params < 2; config.shared_params++) {
            config.threads = 1;
            CHECK_OK(zc_engine_create(b->comm, &config, &param, 1, &adamw, 1, &b->engine));
            CHECK_OK(zc_engine_fetch(b->engine, 0, got));
            CHECK(got[99] == 99);
            expect(zc_engine_store(b->engine, 0, w), ZC_EINVAL, "store is for stage 3");
            expect(zc_engine_acquire(b->engine, 0, 0), ZC_EINVAL, "unit 0 of 0");
            zc_engine_release(b->engine, 0);
            CHECK_OK(zc_engine_sync(b->engine, "the end"));
            zc_engine_destroy(b->engine);
        }
    zc_comm_close(b->comm);
    return NULL;
}

static void fetch_works_at_all_stages(void)
{
    zc_comm *comms[2];
    blocks both[2] = {0};
    pthread_t threads[2];
    CHECK_OK(zc_comm_open_local(2, 20, comms));
    for (size_t r = 0; r < 2; r++) {
        both[r].comm = comms[r];
        both[r].rank = r;
        pthread_create(&threads[r], NULL, look_at_stage, &both[r]);
    }
    for (size_t r = 0; r < 2; r++)
        pthread_join(threads[r], NULL);
}

/* ---- collective gathers: ranks that do different things ---------------------------------- */

enum {
    OTHER_UNIT, OTHER_SIZE, ONE_MORE, STEPPING, STEPPING_IN_A_ROUND, STORING, FETCHING, SYNCING, ABORTED, EVALUATING,
    ALIKE
};

/* What the last rank does, and the others. */
static const struct {
    const char *odd, *others;
} differences[] = {
    [OTHER_UNIT] = {"gather of unit 'b2'", "gather of unit 'b1'"},
    [OTHER_SIZE] = {"gather of unit 'b2'", "gather of unit 'b1'"},
    [ONE_MORE] = {"gather of unit 'b3'", "the end"},
    [STEPPING] = {"step", "gather of unit 'b1'"},
    [STEPPING_IN_A_ROUND] = {"the end of backward", "gather of unit 'b1'"},
    [STORING] = {"writing a parameter", "gather of unit 'b1'"},
    [FETCHING] = {"reading a parameter", "gather of unit 'b1'"},
    [SYNCING] = {"evaluation", "gather of unit 'b1'"},
    [ABORTED] = {"a backward that raised", "gather of unit 'b1'"},
    [EVALUATING] = {"gather of unit 'b1'", "step"},
};

static void sleep_ms(long ms)
{
    nanosleep(&(struct timespec){0, ms * 1000000}, NULL);
}

static zc_status acquire_and_release(blocks *b, size_t unit)
{
    ZC_TRY(zc_engine_acquire(b->engine, unit, 0));
    zc_engine_release(b->engine, unit);
    return ZC_OK;
}

static zc_status differ(blocks *b, int odd)
{
    float values[3000] = {0};
    switch (odd ? b->what : b->what == EVALUATING ? STEPPING : ALIKE) {
    case OTHER_UNIT:
    case OTHER_SIZE:
        return acquire_and_release(b, 2);
    case STEPPING:
    case STEPPING_IN_A_ROUND:
    case ABORTED:
        return step(b);
    case STORING:
        return zc_engine_store(b->engine, 1, values);
    case FETCHING:
        return zc_engine_fetch(b->engine, 1, values);
    case SYNCING:
        return zc_engine_sync(b->engine, "evaluation");
    case ONE_MORE:
        ZC_TRY(acquire_and_release(b, 1));
        return acquire_and_release(b, 3);
    default:
        return acquire_and_release(b, 1);
    }
}

/* Gathering waits for nobody, so a rank may learn of it at its next meeting only, but there at the latest. */
static void mismatch_body(blocks *b)
{
    int odd = b->rank == b->ranks - 1;
    char *given = elsewhere_put(b->device, b->stream, calloc(1, 3000 * sizeof(float) + 8), 3000 * sizeof(float));
    CHECK_OK(acquire_and_release(b, 4));
    if (b->what == STEPPING_IN_A_ROUND || b->what == ABORTED)
        CHECK_OK(zc_engine_add_grad(b->engine, 1, given));
    if (b->what == ABORTED && odd)
        zc_engine_abort_round(b->engine);
    if (odd == b->late)
        sleep_ms(30);
    zc_status status = differ(b, odd);
    if (status == ZC_OK)
        status = zc_engine_sync(b->engine, "the end");
    if (b->what == ALIKE) {
        CHECK_OK(status);
    } else {
        expect(status, ZC_EMISMATCH, differences[b->what].odd);
        expect(status, ZC_EMISMATCH, differences[b->what].others);
        CHECK_EQ(zc_engine_unit_user(b->engine, 1), ZC_NO_UNIT);
        expect(zc_engine_sync(b->engine, "afterwards"), ZC_EMISMATCH, ""); /* the group has failed, for good */
    }
    b->device->ops->synchronize(b->device, b->stream); /* fails, where work of the failed group is in its way */
    elsewhere_free(b->device, given, 3000 * sizeof(float));
}

static void collective_gathers_agree(void)
{
    elsewhere_expect_difference(1);
    for (int what = OTHER_UNIT; what <= ALIKE; what++)
        for (size_t ranks = 2; ranks <= 3; ranks++)
            for (int late = 0; late < 2; late++) {
                blocks b = six;
                b.defer = 1;
                b.what = what;
                b.late = late;
                if (what == OTHER_SIZE)
                    b.elems[2] = 3000;
                with_blocks(ranks, b, mismatch_body);
            }
    elsewhere_expect_difference(0);
}

/* ---- the same, for every pair of calls ----------------------------------------------------- */

/* What a rank does next: what messages call it, and what tells it from others of that name. */
static const struct {
    const char *what, *with;
} calls[] = {
    {"gather of unit 'b1'", ""},
    {"gather of unit 'b2'", ""},
    {"gather of unit 'root'", ""},
    {"step", "lr 0.01"},
    {"step", "lr 0.5"},
    {"step", "loss_scale 4"},
    {"clip_grad_norm_", "max_norm 1,"},
    {"clip_grad_norm_", "max_norm 2,"},
    {"clip_grad_norm_", "norm_type inf"},
    {"reading state", "gradient of parameter 1 (b1)"},
    {"reading state", "gradient of parameter 2 (b2)"},
    {"reading state", "first moment of parameter 1 (b1)"},
    {"reading a parameter", "parameter 1 (b1)"},
    {"reading a parameter", "parameter 2 (b2)"},
    {"writing a parameter", "parameter 1 (b1)"},
    {"writing a parameter", "parameter 2 (b2)"},
    {"evaluation", ""},
    {"wait_saved", ""},
};
enum { CALLS = sizeof calls / sizeof *calls };

static zc_status call(blocks *b, int which)
{
    zc_engine *e = b->engine;
    zc_step_args args = ZC_STEP_ARGS;
    zc_options options = adamw;
    float values[3000] = {0};
    double norm;
    switch (which) {
    case 0: case 1:
        return acquire_and_release(b, (size_t)which + 1);
    case 2:
        return acquire_and_release(b, 0);
    case 3: case 4: case 5:
        options.lr = which == 4 ? 0.5 : 0.01;
        args.loss_scale = which == 5 ? 4 : 1;
        return zc_engine_step(e, &options, 1, &args);
    case 6: case 7:
        return zc_engine_clip(e, which - 5, 2, 1, &norm);
    case 8:
        return zc_engine_clip(e, 1, INFINITY, 1, &norm);
    case 9: case 10:
        return zc_engine_read(e, (size_t)which - 8, ZC_ROLE_GRAD, 1, values);
    case 11:
        return zc_engine_read(e, 1, ZC_ROLE_EXP_AVG, 1, values);
    case 12: case 13:
        return zc_engine_fetch(e, (size_t)which - 11, values);
    case 14: case 15:
        return zc_engine_store(e, (size_t)which - 13, values);
    default:
        return zc_engine_sync(e, calls[which].what);
    }
}

/* b->what: the pair of rank 0's call and rank 1's. */
static void pair_body(blocks *b)
{
    int pair[2] = {b->what / CALLS, b->what % CALLS};
    char *given = elsewhere_put(b->device, b->stream, calloc(1, 1000 * sizeof(float) + 8), 1000 * sizeof(float));
    visit(b, 4, 0);
    visit(b, 4, 1);
    CHECK_OK(zc_engine_add_grad(b->engine, 1, given));
    CHECK_OK(zc_engine_end_round(b->engine, NULL, 0));
    zc_status status = call(b, pair[b->rank]);
    if (status == ZC_OK)
        status = zc_engine_sync(b->engine, "the end");
    for (int r = 0; r < 2; r++) {
        expect(status, ZC_EMISMATCH, calls[pair[r]].what);
        if (!strcmp(calls[pair[0]].what, calls[pair[1]].what))
            expect(status, ZC_EMISMATCH, calls[pair[r]].with);
    }
    expect(status, ZC_EMISMATCH, "rank");
    b->device->ops->synchronize(b->device, b->stream);
    elsewhere_free(b->device, given, 1000 * sizeof(float));
}

static void every_pair_of_calls_that_differ(void)
{
    const int every = ELSEWHERE ? 5 : SPARSE; /* a machine of GPUs takes long to make */
    for (int first = 0; first < CALLS; first++)
        for (int second = 0; second < CALLS; second++)
            if (first != second && (first + second) % every == 0) {
                blocks b = six;
                b.defer = 1;
                b.what = first * CALLS + second;
                b.prefetch = (size_t)(first + second) % 2;
                with_blocks(2, b, pair_body);
            }
}

/* One host is as many gathers ahead of the other as it can be; every use of a slot is in its place all the same. */
static void run_ahead_body(blocks *b)
{
    enum { TURNS = 25 };
    size_t uses = 0, order[TURNS * 2 * BLOCKS];
    float *seen, got[TURNS * 2 * BLOCKS];
    void *memory = NULL;
    CHECK_OK(b->device->ops->alloc(b->device, sizeof got, &memory));
    seen = memory;
    if (b->rank == 1)
        sleep_ms(200);
    for (int turn = 0; turn < TURNS; turn++)
        for (int backward = 0; backward < 2; backward++)
            for (size_t k = 0; k < b->count; k++) {
                size_t unit = backward ? b->count - k : k + 1;
                CHECK_OK(zc_engine_acquire(b->engine, unit, backward));
                const float *w = zc_engine_param(b->engine, unit);
                CHECK_OK(b->device->ops->copy(b->device, b->stream, seen + uses, w + 999, sizeof *w));
                order[uses++] = unit;
                zc_engine_release(b->engine, unit);
            }
    CHECK_OK(zc_engine_sync(b->engine, "the end"));
    CHECK_OK(b->device->ops->download(b->device, b->stream, got, seen, uses * sizeof *got));
    for (size_t k = 0; k < uses; k++)
        CHECK(got[k] == (float)(1000 * order[k] + 999));
    b->device->ops->free(b->device, memory, sizeof got);
}

static void hosts_run_ahead(void)
{
    for (size_t ranks = 2; ranks <= 3; ranks++)
        for (size_t slots = 1; slots <= 3; slots++)
            for (int fill = 0; fill < 2; fill++) {
                blocks b = six;
                b.defer = 1;
                b.slots = slots;
                b.prefetch = slots - 1;
                b.fill = fill;
                with_blocks(ranks, b, run_ahead_body);
            }
}

/* ---- traffic -------------------------------------------------------------------------------- */

/* A training step in plain order: forward gathers all, backward all but those that are still there. */
static void traffic_body(blocks *b)
{
    size_t slots = b->slots < b->count && !elsewhere_own_slots ? b->slots : b->count, expected = 2 * b->count - slots + (b->root != 0);
    size_t align = 64 * b->ranks, block = (1000 + align - 1) / align * align, root = (100 + align - 1) / align * align;
    zc_traffic traffic;
    zc_engine_traffic(b->engine, &traffic);
    CHECK_EQ(traffic.all_gather.calls, 0);
    for (int turn = 0; turn < 4; turn++) {
        if (b->root)
            CHECK_OK(zc_engine_acquire(b->engine, 0, 0));
        visit_all(b, 0);
        if (b->root)
            visit(b, 0, 1);
        visit_all(b, 1);
        if (b->root)
            zc_engine_release(b->engine, 0);
        CHECK_OK(step(b));
        zc_engine_traffic(b->engine, &traffic);
        size_t payload = (2 * b->count - slots) * block + (b->root ? root : 0);
        CHECK_EQ(traffic.all_gather.calls, expected);
        CHECK_EQ(traffic.all_gather.payload_elems, payload);
        CHECK_EQ(traffic.all_gather.bytes, payload / b->ranks * (b->ranks - 1) * 4);
        CHECK_EQ(traffic.reduce_scatter.calls, 0);
        CHECK_EQ(traffic.bytes, traffic.all_gather.bytes);
    }
}

static void traffic_is_counted(void)
{
    for (int defer = ELSEWHERE; defer < 2; defer++)
        for (size_t ranks = 1; ranks <= 3; ranks++)
            for (size_t slots = 1; slots <= 7; slots++)
                for (size_t prefetch = 0; prefetch < slots; prefetch++)
                    for (int root = 0; root < 2; root++) {
                        blocks b = six;
                        b.defer = defer;
                        b.root = 1;
                        b.slots = slots;
                        b.prefetch = prefetch;
                        if ((ranks + slots + prefetch) % SPARSE || (defer && ranks == 1) ||
                            (elsewhere_own_slots && (!defer || slots > 3)))
                            continue;
                        b.elems[0] = root ? 100 : 0;
                        b.root = root; /* without one: an empty unit that nobody acquires */
                        with_blocks(ranks, b, traffic_body);
                    }
}

/* ---- memory ----------------------------------------------------------------------------------- */

static size_t rounded(size_t bytes)
{
    return (bytes + 4095) / 4096 * 4096;
}

static size_t slot_bytes(const zc_engine *engine)
{
    size_t bytes = 0;
    for (size_t s = 0; s < engine->slot_count; s++)
        bytes += engine->slots[s].memory.bytes;
    return bytes;
}

static uint64_t buffers_besides; /* of the run before; rank 0's */

static void memory_body(blocks *b)
{
    size_t align = 64 * b->ranks, total = 0, slots = 0, left[BLOCKS], classes = 0;
    zc_memory memory, later;
    zc_engine_memory(b->engine, &memory);
    for (size_t u = 0; u <= b->count; u++)
        total += (b->elems[u] + align - 1) / align * align;
    CHECK_EQ(memory.parameters, total / b->ranks * 4);
    CHECK_EQ(memory.gradients, total / b->ranks * 4);
    CHECK_EQ(memory.optimizer_state, total / b->ranks * 8);
    CHECK_EQ(memory.master, 0);
    /* the largest that is left and those of more than half its size, again and again */
    for (size_t u = 0; u < b->count; u++)
        left[u] = (b->elems[u + 1] + align - 1) / align * align * 4;
    for (size_t most = 1; most; classes++) {
        size_t count = 0;
        most = 0;
        for (size_t u = 0; u < b->count; u++)
            most = left[u] > most ? left[u] : most;
        for (size_t u = 0; u < b->count; u++)
            if (left[u] > most / 2) {
                count++;
                left[u] = 0;
            }
        slots += (count < b->slots ? count : b->slots) * rounded(most);
    }
    slots += rounded((b->elems[0] + align - 1) / align * align * 4);
    CHECK_EQ(slot_bytes(b->engine), slots);
    if (b->rank == 0) {
        CHECK(!buffers_besides || buffers_besides == memory.buffers - slots);
        buffers_besides = memory.buffers - slots;
    }
    for (int turn = 0; turn < 3; turn++) {
        visit(b, 0, 0);
        visit_all(b, 0);
        visit_all(b, 1);
        CHECK_OK(step(b));
    }
    zc_engine_memory(b->engine, &later);
    CHECK_EQ(later.total, memory.total);
    CHECK_EQ(later.total, later.parameters + later.gradients + later.master + later.optimizer_state + later.buffers);
}

static void memory_is_counted(void)
{
    static const size_t sizes[][BLOCKS + 1] = {
        {100, 1000, 1000, 1000, 1000, 1000, 1000},
        {100, 1000, 100000, 1000, 900, 800, 700}, /* one huge unit sizes one slot */
        {100, 4000, 64, 1900, 3000, 2500, 1},
    };
    for (size_t ranks = 1; ranks <= 3; ranks++)
        for (size_t n = 0; n < 3; n++) {
            buffers_besides = 0;
            for (size_t slots = 1; slots <= 4; slots++) {
                blocks b = six;
                b.slots = slots;
                b.prefetch = slots > 1;
                memcpy(b.elems, sizes[n], sizeof b.elems);
                with_blocks(ranks, b, memory_body);
            }
        }
}

/* ---- what guesses cost ------------------------------------------------------------------------- */

/* Visits units in this order, forward; each costs itself and the guesses at most. */
static void walk(blocks *b, const size_t *order, size_t count)
{
    gathers(b);
    for (size_t k = 0; k < count; k++) {
        CHECK_OK(zc_engine_acquire(b->engine, order[k], 0));
        const float *w = zc_engine_param(b->engine, order[k]);
        CHECK(w[17] == (float)(1000 * order[k] + 17));
        CHECK(gathers(b) <= 1 + b->prefetch);
        zc_engine_release(b->engine, order[k]);
    }
}

/* The same, and how many gathers it took. */
static size_t cost(blocks *b, const size_t *order, size_t count)
{
    zc_traffic traffic;
    zc_engine_traffic(b->engine, &traffic);
    for (size_t k = 0; k < count; k++) {
        CHECK_OK(zc_engine_acquire(b->engine, order[k], 0));
        const float *w = zc_engine_param(b->engine, order[k]);
        CHECK(w[17] == (float)(1000 * order[k] + 17));
        zc_engine_release(b->engine, order[k]);
    }
    return gathers(b);
}

#define COST(b, ...) cost(b, (size_t[]){__VA_ARGS__}, sizeof((size_t[]){__VA_ARGS__}) / sizeof(size_t))

static void guesses_body(blocks *b)
{
    static const size_t wild[] = {1, 4, 2, 6, 5, 1, 1, 3, 2, 4, 6, 3, 5, 2, 6, 1, 4};
    walk(b, wild, sizeof wild / sizeof *wild);
    CHECK_OK(step(b));

    /* An order that changed: once it costs, then it is known. */
    COST(b, 1, 2, 3, 4, 5, 6);
    CHECK_OK(step(b));
    CHECK_EQ(COST(b, 1, 2, 3, 4, 5, 6), 6);
    CHECK_OK(step(b));
    size_t first = COST(b, 1, 4, 5, 2, 3, 6);
    CHECK_OK(step(b));
    CHECK(first >= 6 && first <= 6 + 5 * b->prefetch);
    CHECK_EQ(COST(b, 1, 4, 5, 2, 3, 6), 6);
    CHECK_OK(step(b));

    /* Neighbours of one slot: the further one must not drive the nearer one out, step after step. */
    COST(b, 1, 3, 5, 2, 4, 6);
    CHECK_OK(step(b));
    CHECK_EQ(COST(b, 1, 3, 5, 2, 4, 6), 6);
    CHECK_OK(step(b));
}

static void guesses_cost_little(void)
{
    for (size_t slots = 1; slots <= 4; slots++)
        for (size_t prefetch = 0; prefetch < slots; prefetch++) {
            blocks b = six;
            b.slots = slots;
            b.prefetch = prefetch;
            with_blocks(1, b, guesses_body);
        }
}

/* Forwards alone, one after the other, teach that the first unit comes after the last: training must forget it. */
static void evaluation_body(blocks *b)
{
    size_t slots = b->slots;
    for (int turn = 0; turn < 3; turn++) {
        visit_all(b, 0);
        visit_all(b, 0);
        visit_all(b, 1);
        CHECK_OK(step(b));
        gathers(b);
        for (int more = 0; more < 2; more++) {
            visit_all(b, 0);
            visit_all(b, 1);
            CHECK_OK(step(b));
            CHECK_EQ(gathers(b), 2 * b->count - slots);
        }
    }
}

static void evaluation_teaches_nothing_wrong(void)
{
    for (size_t slots = 1; slots <= 4; slots++)
        for (size_t prefetch = 0; prefetch < slots; prefetch++) {
            blocks b = six;
            b.root = 0;
            b.slots = slots;
            b.prefetch = prefetch;
            b.elems[0] = 0;
            with_blocks(1, b, evaluation_body);
        }
}

/* ---- every allocation and system call made to fail --------------------------------------------- */

typedef struct fault_job {
    zc_comm *comm;
    zc_device *device; /* elsewhere, or NULL */
    zc_stream *stream;
    size_t rank;
    zc_status status;
} fault_job;

static void *live(void *argument)
{
    fault_job *j = argument;
    float w[300] = {0}, g[300] = {0};
    uint16_t h[70] = {0};
    zc_unit units[] = {{"root", 0, 1}, {"a", 0, 0}, {NULL, 0, 0}, {"c", 0, 0}, {"d", 1, 0}};
    zc_param params[] = {
        {.name = "w", .elems = 300, .dtype = ZC_FLOAT32, .initial = w},
        {.name = "h", .elems = 70, .dtype = ZC_BFLOAT16, .initial = h, .unit = 1},
        {.name = "v", .elems = 200, .dtype = ZC_FLOAT32, .initial = w, .unit = 2, .frozen = 1},
        {.name = "u", .elems = 190, .dtype = ZC_FLOAT32, .initial = w, .unit = 3},
        {.name = "t", .elems = 180, .dtype = ZC_FLOAT32, .initial = w, .unit = 4},
    };
    zc_options group = {.lr = 0.1, .momentum = 0.9};
    zc_engine_config config = ZC_ENGINE_CONFIG;
    zc_engine *engine = NULL;
    zc_step_args args = ZC_STEP_ARGS;
    float whole[300];
    config.threads = 1;
    config.stage = 3;
    config.rule = OPTIM_SGD;
    config.bucket_bytes = 300;
    config.units = units;
    config.unit_count = 5;
    config.fill_discarded = 1;
    j->status = j->device ? engine_create(j->comm, j->device, j->stream, &config, params, 5, &group, 1, &engine)
                          : zc_engine_create(j->comm, &config, params, 5, &group, 1, &engine);
    for (size_t k = 0; k < 10 && j->status == ZC_OK; k++) {
        size_t unit = k < 5 ? k : 9 - k;
        j->status = zc_engine_acquire(engine, unit, k >= 5);
        if (j->status == ZC_OK)
            zc_engine_release(engine, unit);
        else
            CHECK_EQ(zc_engine_unit_user(engine, unit), ZC_NO_UNIT);
        if (j->status == ZC_OK && k >= 5 && unit == 3)
            j->status = zc_engine_add_grad(engine, 3, g);
    }
    if (j->status == ZC_OK)
        j->status = zc_engine_step(engine, &group, 1, &args);
    if (j->status == ZC_OK)
        j->status = zc_engine_fetch(engine, 2, whole);
    if (j->status == ZC_OK)
        j->status = zc_engine_store(engine, 1, j->rank ? NULL : h);
    if (j->status == ZC_OK)
        j->status = zc_engine_acquire(engine, 1, 0);
    CHECK(j->status == ZC_OK || zc_last_error()[0]);
    zc_engine_destroy(engine);
    comm_close(j->comm);
    return NULL;
}

static void faults(int defer)
{
    for (long nth = 1;; nth++) {
        zc_comm *comms[2];
        fault_job jobs[2];
        pthread_t threads[2];
        CHECK_OK(zc_comm_open_local(2, 20, comms));
        for (size_t r = 0; r < 2; r++) {
            jobs[r] = (fault_job){.comm = comms[r], .rank = r};
            if (defer)
                elsewhere_wrap(comms[r], &jobs[r].comm, &jobs[r].device, &jobs[r].stream);
        }
        zc_fault_arm(nth);
        for (size_t r = 0; r < 2; r++)
            pthread_create(&threads[r], NULL, live, &jobs[r]);
        for (size_t r = 0; r < 2; r++)
            pthread_join(threads[r], NULL);
        long asked = zc_fault_count();
        zc_fault_arm(0);
        if (jobs[0].status == ZC_OK && jobs[1].status == ZC_OK && asked < nth)
            break;
        CHECK(jobs[0].status != ZC_ETIMEOUT && jobs[1].status != ZC_ETIMEOUT);
    }
}

static void every_failure_is_reported(void)
{
    faults(0);
    faults(1);
}

/* ---- memory with one address -------------------------------------------------------------------- */

/* Every unit has memory of its own, and is there, with all others, from its first use to the step. */
static void own_slots_body(blocks *b)
{
    zc_engine *e = b->engine;
    size_t step_bytes = b->device->ops->slot_step_bytes, all = 0;
    uint64_t generation[BLOCKS + 1];
    zc_memory memory;
    float got[100];
    CHECK(!zc_engine_units_share(e));
    CHECK_EQ(e->slot_count, b->count + 1);
    for (size_t u = 0; u <= b->count; u++) {
        const device_slot *slot = &e->slots[e->units[u].slot].memory;
        size_t bytes;
        CHECK(zc_engine_unit_range(e, u, &bytes) == slot->base && zc_engine_param(e, u) == slot->base);
        CHECK_EQ(slot->bytes, (bytes + step_bytes - 1) / step_bytes * step_bytes);
        all += slot->bytes;
    }
    zc_engine_memory(e, &memory);
    CHECK(memory.buffers >= all);
    gathers(b);
    for (size_t u = 0; u <= b->count; u++) {
        CHECK_OK(zc_engine_acquire(e, u, 0));
        CHECK_OK(b->device->ops->download(b->device, b->stream, got, zc_engine_param(e, u), sizeof got));
        CHECK(got[99] == (float)(1000 * u + 99));
        generation[u] = zc_engine_unit_generation(e, u);
        CHECK_EQ(zc_engine_unit_user(e, u), u);
    }
    for (size_t u = 0; u <= b->count; u++)
        zc_engine_release(e, u);
    CHECK_EQ(gathers(b), b->count + 1);
    visit_all(b, 1);
    CHECK_EQ(gathers(b), 0);
    for (size_t u = 0; u <= b->count; u++)
        CHECK_EQ(zc_engine_unit_generation(e, u), generation[u]);
    CHECK_OK(step(b));
    for (size_t u = 0; u <= b->count; u++)
        CHECK_EQ(zc_engine_unit_generation(e, u), 0);
}

static void memory_with_one_address(void)
{
    elsewhere_own_slots = 1;
    for (size_t ranks = 1; ranks <= 3; ranks++) {
        blocks b = six;
        b.defer = 1;
        with_blocks(ranks, b, own_slots_body);
    }
    equals_stage_2_deferred();
    collective_gathers_agree();
    traffic_is_counted();
#if !ELSEWHERE
    faults(1);
#endif
    elsewhere_own_slots = 0;
    elsewhere_begin();
}

int main(void)
{
    RUN(equals_stage_2_deferred);
    RUN(collective_gathers_agree);
    RUN(every_pair_of_calls_that_differ);
    RUN(hosts_run_ahead);
    RUN(traffic_is_counted);
    RUN(memory_with_one_address);
#if !ELSEWHERE
    RUN(addresses_stay);
    RUN(errors_leave_the_engine_usable);
    RUN(fetch_works_at_all_stages);
    RUN(equals_stage_2);
    RUN(equals_stage_2_with_everything);
    RUN(ranks_wander);
    RUN(memory_is_counted);
    RUN(guesses_cost_little);
    RUN(evaluation_teaches_nothing_wrong);
    RUN(every_failure_is_reported);
#endif
    DONE();
}
