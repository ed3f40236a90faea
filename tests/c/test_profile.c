/*
 * The record of when a rank worked, with ranks as threads: that every piece is
 * noted once, at the time at which it was done; that it changes no bit; the ring
 * when it is full; and switching it on and off in the middle of things.
 */
#include "elsewhere.h"
#include "engine.h"
#include "together.h"
#include "zero_c.h"

#include <pthread.h>

#define MAX_RANKS 3
#define PARAMS 3
#define BUCKETS 5    /* of each type */
#define MAX_NUMBERS (2 * BUCKETS + PARAMS) /* at stage 3 each unit begins a bucket */
#define STEPS 3
#define ROOM 4096

static const zc_options adamw = ZC_OPTIONS_ADAMW;

typedef struct plan {
    size_t ranks;
    int stage, shared, overlap;
    size_t capacity;    /* 0: off */
} plan;

typedef struct job {
    const plan *plan;
    void (*body)(struct job *job);
    zc_comm *comm;
    zc_engine *engine;
    size_t rank, step;
    zc_work work[ROOM];
    size_t count;
    char weights[PARAMS * BUCKETS * MAX_RANKS * 64 * 4];
} job;

/* A frozen type cannot be seen here; two types make two spaces. */
static zc_dtype dtype_of(size_t i)
{
    return i == 1 ? ZC_BFLOAT16 : ZC_FLOAT32;
}

static size_t elems_of(const plan *p, size_t i)
{
    return i == 0 ? 64 : 64 * (p->ranks * BUCKETS - (dtype_of(i) == ZC_FLOAT32));
}

static void fill_values(const plan *p, size_t i, uint64_t key, void *to)
{
    uint64_t state = key * 131 + i;
    for (size_t k = 0; k < elems_of(p, i); k++)
        testing_put(to, dtype_of(i), k, testing_float(&state));
}

static void open_engine(job *j)
{
    const plan *p = j->plan;
    zc_engine_config config = ZC_ENGINE_CONFIG;
    zc_unit units[PARAMS] = {{"first", 1, 0}, {"second", 1, 0}, {"third", 1, 0}};
    zc_param params[PARAMS];
    char *initial[PARAMS];
    config.stage = p->stage;
    config.bucket_bytes = 1; /* as small as they can be */
    config.threads = 1;
    config.shared_params = p->shared;
    config.overlap_gather = p->overlap;
    config.units = units;
    config.unit_count = p->stage == 3 ? PARAMS : 0;
    for (size_t i = 0; i < PARAMS; i++) {
        initial[i] = malloc(elems_of(p, i) * 4);
        fill_values(p, i, 0, initial[i]);
        params[i] = (zc_param){.elems = elems_of(p, i), .dtype = dtype_of(i), .initial = initial[i], .unit = (uint32_t)i};
    }
    CHECK_OK(zc_engine_create(j->comm, &config, params, PARAMS, &adamw, 1, &j->engine));
    for (size_t i = 0; i < PARAMS; i++)
        free(initial[i]);
}

static void use_units(job *j, int backward)
{
    for (size_t k = 0; j->plan->stage == 3 && k < PARAMS; k++) {
        size_t unit = backward ? PARAMS - 1 - k : k;
        CHECK_OK(zc_engine_acquire(j->engine, unit, backward));
        zc_engine_release(j->engine, unit);
    }
}

static void add_grads(job *j)
{
    char grad[BUCKETS * MAX_RANKS * 64 * 4];
    for (size_t i = PARAMS; i-- > 0;) {
        fill_values(j->plan, i, 1 + j->step * MAX_RANKS + j->rank, grad);
        CHECK_OK(zc_engine_add_grad(j->engine, i, grad));
    }
    j->step++;
}

static void train_step(job *j)
{
    use_units(j, 0);
    use_units(j, 1);
    add_grads(j);
    CHECK_OK(zc_engine_step(j->engine, &adamw, 1, &(zc_step_args)ZC_STEP_ARGS));
}

static void read_weights(job *j)
{
    char *to = j->weights;
    for (size_t i = 0; i < PARAMS; i++, to += BUCKETS * MAX_RANKS * 64 * 4)
        CHECK_OK(zc_engine_fetch(j->engine, i, to));
}

static void *run_job(void *argument)
{
    job *j = argument;
    open_engine(j);
    if (j->engine)
        j->body(j);
    zc_engine_destroy(j->engine);
    zc_comm_close(j->comm);
    return NULL;
}

/* A thread for each rank; the jobs are the caller's to free. */
static job *run_ranks(const plan *p, void (*body)(job *))
{
    zc_comm *comms[MAX_RANKS];
    pthread_t threads[MAX_RANKS];
    job *jobs = calloc(p->ranks, sizeof *jobs);
    CHECK_OK(zc_comm_open_local(p->ranks, 20, comms));
    for (size_t r = 0; r < p->ranks; r++) {
        jobs[r].plan = p;
        jobs[r].body = body;
        jobs[r].comm = comms[r];
        jobs[r].rank = r;
        pthread_create(&threads[r], NULL, run_job, &jobs[r]);
    }
    for (size_t r = 0; r < p->ranks; r++)
        pthread_join(threads[r], NULL);
    return jobs;
}

/* ---- everything is noted ---------------------------------------------------------- */

static size_t count_kind(const job *j, zc_work_kind kind, uint64_t *bytes)
{
    size_t count = 0;
    *bytes = 0;
    for (size_t k = 0; k < j->count; k++)
        if (j->work[k].kind == kind) {
            count++;
            *bytes += j->work[k].bytes;
        }
    return count;
}

static int by_time(const void *left, const void *right)
{
    const zc_work *a = left, *b = right;
    if (a->kind != b->kind)
        return a->kind < b->kind ? -1 : 1;
    return a->begin_ns < b->begin_ns ? -1 : a->begin_ns > b->begin_ns;
}

static void check_times(job *j, uint64_t begin_ns, uint64_t end_ns)
{
    qsort(j->work, j->count, sizeof *j->work, by_time);
    for (size_t k = 0; k < j->count; k++) {
        const zc_work *w = &j->work[k];
        CHECK(w->begin_ns >= begin_ns && w->begin_ns <= w->end_ns && w->end_ns <= end_ns);
        if (k && w[-1].kind == w->kind)
            CHECK(w[-1].end_ns <= w->begin_ns);
    }
}

/* How often each bucket, or at stage 3 each unit, occurs. */
static void check_numbers(const job *j, zc_work_kind kind, size_t numbers, size_t times_each)
{
    size_t seen[MAX_NUMBERS] = {0};
    CHECK(numbers <= MAX_NUMBERS);
    for (size_t k = 0; k < j->count; k++) {
        const zc_work *w = &j->work[k];
        CHECK(w->number < MAX_NUMBERS && w->peer < j->plan->ranks);
        CHECK(kind != ZC_WORK_GATHER || j->plan->stage == 3 || w->kind != kind || w->peer != j->rank);
        if (w->kind == kind && w->number < MAX_NUMBERS)
            seen[w->number]++;
    }
    for (size_t n = 0; n < numbers; n++)
        CHECK_EQ(seen[n], times_each);
}

static void train_and_check(job *j)
{
    const plan *p = j->plan;
    zc_traffic traffic;
    zc_plan sizes;
    uint64_t bytes, lost = 1, begin_ns, end_ns;
    CHECK_OK(zc_engine_profile(j->engine, p->capacity));
    zc_engine_plan(j->engine, &sizes);
    CHECK(p->stage == 3 || sizes.buckets == 2 * BUCKETS);
    begin_ns = now_ns();
    zc_engine_traffic(j->engine, &traffic);
    for (size_t s = 0; s < STEPS; s++)
        train_step(j);
    CHECK_OK(zc_engine_wait_params(j->engine, NULL, 0));
    end_ns = now_ns();
    zc_engine_traffic(j->engine, &traffic);
    j->count = zc_engine_take_work(j->engine, j->work, ROOM, &lost);
    CHECK_EQ(lost, 0);
    read_weights(j);
    if (!p->capacity) {
        CHECK_EQ(j->count, 0);
        return;
    }
    check_times(j, begin_ns, end_ns);
    CHECK_EQ(count_kind(j, ZC_WORK_REDUCE, &bytes), traffic.reduce_scatter.calls);
    CHECK_EQ(traffic.reduce_scatter.calls, STEPS * sizes.buckets);
    CHECK_EQ(bytes, traffic.reduce_scatter.bytes);
    check_numbers(j, ZC_WORK_REDUCE, sizes.buckets, STEPS);

    size_t gathers = count_kind(j, ZC_WORK_GATHER, &bytes);
    CHECK_EQ(gathers, traffic.all_gather.calls * (p->stage == 3 ? 1 : p->ranks - 1));
    CHECK_EQ(bytes, traffic.all_gather.bytes);
    if (p->stage < 3)
        check_numbers(j, ZC_WORK_GATHER, sizes.buckets, p->shared && p->stage ? 0 : STEPS * (p->ranks - 1));
    else
        CHECK(gathers >= STEPS * PARAMS);

    size_t pieces = p->stage == 0 ? p->ranks : 1; /* one after another on the CPU */
    CHECK_EQ(count_kind(j, ZC_WORK_UPDATE, &bytes), STEPS * sizes.buckets * pieces);
    CHECK(bytes > 0);
    check_numbers(j, ZC_WORK_UPDATE, sizes.buckets, STEPS * pieces);
}

static void everything_is_noted_and_nothing_changes(void)
{
    for (size_t ranks = 1; ranks <= MAX_RANKS; ranks++)
        for (int stage = 0; stage <= 3; stage++)
            for (int how = 0; how < 3; how++) {
                plan p = {.ranks = ranks, .stage = stage, .shared = how == 1, .overlap = how == 2};
                if ((p.shared && stage == 3) || (p.overlap && stage != 1 && stage != 2))
                    continue;
                job *off = run_ranks(&p, train_and_check);
                plan noted = p;
                noted.capacity = ROOM;
                job *on = run_ranks(&noted, train_and_check);
                for (size_t r = 0; r < ranks; r++)
                    CHECK(memcmp(on[r].weights, off[r].weights, sizeof on[r].weights) == 0);
                free(off);
                free(on);
            }
}

/* ---- the ring ----------------------------------------------------------------------- */

static void overfill(job *j)
{
    zc_work few[3];
    uint64_t lost;
    size_t all = STEPS * 3 * 2 * BUCKETS; /* two ranks: a reduction, a gather, an update of each bucket */
    zc_memory before, during, after;
    zc_engine_memory(j->engine, &before);
    CHECK_OK(zc_engine_profile(j->engine, 7));
    zc_engine_memory(j->engine, &during);
    CHECK_EQ(during.buffers - before.buffers, 7 * sizeof(zc_work) +
             2 * (2 * BUCKETS + 1) * j->plan->ranks * sizeof(comm_times));
    for (size_t s = 0; s < STEPS; s++)
        train_step(j);
    CHECK_EQ(zc_engine_take_work(j->engine, few, 3, &lost), 3);
    CHECK_EQ(lost, all - 7);
    CHECK_EQ(zc_engine_take_work(j->engine, few, 0, &lost), 0);
    CHECK_EQ(lost, 0);
    train_step(j); /* goes on behind the four that are left, around the ring's end */
    CHECK_EQ(zc_engine_take_work(j->engine, j->work, ROOM, &lost), 7);
    CHECK_EQ(lost, all / STEPS - 3);
    unsigned reduced = 0; /* by bucket: the seven that were kept of the first step. They begin in whatever order peers are ready */
    for (size_t k = 0; k < 7; k++) {
        const zc_work *work = k < 3 ? &few[k] : &j->work[k - 3];
        CHECK(work->kind == ZC_WORK_REDUCE && work->begin_ns < j->work[4].begin_ns);
        reduced |= 1u << work->number;
    }
    CHECK_EQ(__builtin_popcount(reduced), 7);
    for (size_t k = 4; k < 7; k++)
        CHECK(j->work[k].begin_ns > j->work[3].end_ns);
    CHECK_EQ(zc_engine_take_work(j->engine, few, 3, &lost), 0);
    CHECK_OK(zc_engine_profile(j->engine, 0));
    zc_engine_memory(j->engine, &after);
    CHECK_EQ(during.buffers - after.buffers, 7 * sizeof(zc_work));
}

static void a_full_ring_counts_what_it_loses(void)
{
    plan p = {.ranks = 2, .stage = 2};
    free(run_ranks(&p, overfill));
}

/* ---- on and off -------------------------------------------------------------------- */

static void switch_about(job *j)
{
    uint64_t lost, bytes;
    float extra[64] = {0};
    zc_param more = {.elems = 64, .dtype = ZC_FLOAT32, .initial = extra};
    CHECK_OK(zc_engine_profile(j->engine, ROOM));
    add_grads(j);
    CHECK_OK(zc_engine_profile(j->engine, 0)); /* in the middle of a backward, whose reductions note times in vain */
    CHECK_OK(zc_engine_step(j->engine, &adamw, 1, &(zc_step_args)ZC_STEP_ARGS));
    CHECK_EQ(zc_engine_take_work(j->engine, j->work, ROOM, &lost), 0);

    add_grads(j);
    CHECK_OK(zc_engine_profile(j->engine, ROOM)); /* after its reductions were posted: those of before are not in it */
    CHECK_OK(zc_engine_step(j->engine, &adamw, 1, &(zc_step_args)ZC_STEP_ARGS));
    j->count = zc_engine_take_work(j->engine, j->work, ROOM, &lost);
    size_t late = j->plan->stage == 1 ? BUCKETS - ENGINE_SCRATCH_SLOTS : 0; /* 16-bit buckets that had no scratch before */
    CHECK(count_kind(j, ZC_WORK_REDUCE, &bytes) <= late);
    CHECK_EQ(count_kind(j, ZC_WORK_UPDATE, &bytes), 2 * BUCKETS * (j->plan->stage == 0 ? j->plan->ranks : 1));

    CHECK_OK(zc_engine_add_params(j->engine, &more, 1, &adamw, 1)); /* a space that is made while it is on */
    CHECK_OK(zc_engine_add_grad(j->engine, PARAMS, extra));
    CHECK_OK(zc_engine_step(j->engine, &adamw, 1, &(zc_step_args)ZC_STEP_ARGS));
    j->count = zc_engine_take_work(j->engine, j->work, ROOM, &lost);
    CHECK_EQ(count_kind(j, ZC_WORK_REDUCE, &bytes), 2 * BUCKETS + 1);
    size_t last = 0;
    for (size_t k = 0; k < j->count; k++)
        last = j->work[k].number > last ? j->work[k].number : last;
    CHECK_EQ(last, 2 * BUCKETS);

    CHECK_OK(zc_engine_profile(j->engine, 5)); /* again: empty, of another size */
    CHECK_EQ(zc_engine_take_work(j->engine, j->work, ROOM, &lost), 0);
    add_grads(j);
    CHECK_OK(zc_engine_step(j->engine, &adamw, 1, &(zc_step_args)ZC_STEP_ARGS));
    CHECK_EQ(zc_engine_take_work(j->engine, j->work, ROOM, &lost), 5);
}

static void on_and_off_at_any_time(void)
{
    for (int stage = 0; stage <= 2; stage++) {
        plan p = {.ranks = 2, .stage = stage};
        free(run_ranks(&p, switch_about));
    }
}

static void without_memory(job *j)
{
    uint64_t lost;
    zc_memory before, after;
    zc_engine_memory(j->engine, &before);
    for (long nth = 1; nth <= 2; nth++) { /* the ring; the times of the first space */
        zc_fault_arm(nth);
        CHECK_EQ(zc_engine_profile(j->engine, 10), ZC_ENOMEM);
        CHECK(text_has("rank 0: no memory for"));
        zc_fault_arm(0);
    }
    zc_engine_memory(j->engine, &after);
    CHECK_EQ(after.buffers, before.buffers);
    train_step(j);
    CHECK_EQ(zc_engine_take_work(j->engine, j->work, ROOM, &lost), 0);

    CHECK_OK(zc_engine_profile(j->engine, ROOM));
    zc_fault_arm(1);
    CHECK_EQ(zc_engine_profile(j->engine, 10), ZC_ENOMEM);
    zc_fault_arm(0);
    train_step(j); /* the ring that was there goes on */
    CHECK(zc_engine_take_work(j->engine, j->work, ROOM, &lost) > 10);
}

static void a_record_without_memory_changes_nothing(void)
{
    plan p = {.ranks = 1, .stage = 2};
    free(run_ranks(&p, without_memory));
}

/* ---- where the host does not see when work is done ------------------------------------- */

static void refused_where_work_is_put_off(void)
{
    zc_engine_config config = ZC_ENGINE_CONFIG;
    zc_param param = {.elems = 64, .dtype = ZC_FLOAT32};
    float initial[64] = {0};
    zc_comm *under, *comm;
    zc_device *device;
    zc_stream *stream;
    zc_engine *engine;
    param.initial = initial;
    elsewhere_begin();
    CHECK_OK(zc_comm_open_local(1, 20, &under));
    elsewhere_wrap(under, &comm, &device, &stream);
    CHECK_OK(engine_create(comm, device, stream, &config, &param, 1, &adamw, 1, &engine));
    CHECK_EQ(zc_engine_profile(engine, 10), ZC_EINVAL);
    CHECK(text_has("rank 0") && text_has("profiler of that device"));
    CHECK_OK(zc_engine_profile(engine, 0));
    zc_engine_destroy(engine);
    elsewhere_close(comm, stream);
    elsewhere_end();
}

int main(void)
{
    RUN(everything_is_noted_and_nothing_changes);
    RUN(a_full_ring_counts_what_it_loses);
    RUN(on_and_off_at_any_time);
    RUN(a_record_without_memory_changes_nothing);
    RUN(refused_where_work_is_put_off);
    DONE();
}
