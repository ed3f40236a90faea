/*
 * Parts of values, which checkpoints are made of: at every stage and number of
 * ranks they cover each element once, and what was read by parts comes back by
 * parts in an engine of any other stage and number of ranks.  And the checksum.
 */
#include "comm.h"
#include "cpu_kernels.h"
#include "elsewhere.h"
#include "engine.h"
#include "testing.h"
#include "zero_c.h"

#include <pthread.h>

#define MAX_RANKS 3
#define PARAMS 7
#define FROZEN 5
#define ROLES 6
#define MOST 1000

static const size_t sizes[PARAMS] = {5, MOST, 0, 1, 64, 777, 130};
static const zc_dtype dtypes[PARAMS] = {ZC_BFLOAT16, ZC_FLOAT32, ZC_FLOAT32, ZC_FLOAT64, ZC_FLOAT16, ZC_FLOAT32, ZC_BFLOAT16};
static const uint32_t unit_of[PARAMS] = {0, 1, 1, 2, 2, 1, 0};

/* What a checkpoint is: whole arrays, and the ranks that wrote each element. */
typedef struct file {
    double data[PARAMS][ROLES][MOST];
    int writers[PARAMS][ROLES][MOST];
    uint64_t steps[PARAMS];
} file;

typedef struct job {
    size_t ranks, rank;
    int stage, defer, loads;
    zc_comm *comm;
    file *file;
    char weights[PARAMS][MOST * 8]; /* out: after another step */
    zc_status status;
} job;

static size_t bytes_of(size_t i, int role)
{
    return zc_dtype_bytes(role == ZC_ROLE_WEIGHT ? dtypes[i] : zc_dtype_sum(dtypes[i]));
}

/* Whether the parameter has this at all. */
static int has_role(const job *j, size_t i, int role)
{
    if (role == ZC_ROLE_GRAD || (i == FROZEN && j->stage == 3 && role != ZC_ROLE_WEIGHT))
        return 0;
    return role != ZC_ROLE_MASTER || zc_dtype_bytes(dtypes[i]) == 2;
}

static zc_status make_engine(job *j, zc_comm *comm, zc_device *device, zc_stream *stream, const zc_options *group,
                             zc_engine **engine)
{
    static const zc_unit units[] = {{"root", 1, 1}, {"a", 1, 0}, {"b", 1, 0}};
    char *initial[PARAMS];
    zc_param params[PARAMS];
    zc_engine_config config = ZC_ENGINE_CONFIG;
    config.stage = j->stage;
    config.threads = 1;
    config.bucket_bytes = 300;
    if (j->stage == 3) {
        config.units = units;
        config.unit_count = 3;
        config.fill_discarded = 1;
    }
    for (size_t i = 0; i < PARAMS; i++) {
        uint64_t state = i + 100 * (uint64_t)j->loads; /* an engine that loads began elsewhere */
        initial[i] = malloc(sizes[i] * 8 + 8);
        for (size_t k = 0; k < sizes[i]; k++)
            testing_put(initial[i], dtypes[i], k, testing_float(&state));
        params[i] = (zc_param){.elems = sizes[i], .dtype = dtypes[i], .initial = initial[i],
                               .unit = j->stage == 3 ? unit_of[i] : 0, .frozen = j->stage == 3 && i == FROZEN};
    }
    zc_status status = device ? engine_create(comm, device, stream, &config, params, PARAMS, group, 1, engine)
                              : zc_engine_create(comm, &config, params, PARAMS, group, 1, engine);
    for (size_t i = 0; i < PARAMS; i++)
        free(initial[i]);
    return status;
}

static zc_status train(zc_engine *engine, zc_device *device, zc_stream *stream, size_t rank, size_t step, const zc_options *group)
{
    char *grads[PARAMS] = {0};
    zc_step_args args = ZC_STEP_ARGS;
    zc_status status = ZC_OK;
    for (size_t i = PARAMS; i-- > 0 && status == ZC_OK;) {
        uint64_t state = (step * 31 + rank) * 31 + i;
        if (i == FROZEN)
            continue;
        grads[i] = malloc(sizes[i] * 8 + 8);
        for (size_t k = 0; k < sizes[i]; k++)
            testing_put(grads[i], dtypes[i], k, testing_float(&state));
        grads[i] = elsewhere_put(device, stream, grads[i], sizes[i] * 8);
        status = zc_engine_add_grad(engine, i, grads[i]);
    }
    if (status == ZC_OK)
        status = zc_engine_step(engine, group, 1, &args);
    if (device)
        device->ops->synchronize(device, stream);
    for (size_t i = 0; i < PARAMS; i++)
        if (grads[i])
            elsewhere_free(device, grads[i], sizes[i] * 8);
    return status;
}

/* Every part, in pieces that end in the middle of it too, to the file or from it. */
static zc_status move_parts(job *j, zc_engine *engine, size_t i, int role)
{
    size_t elem = bytes_of(i, role), begin = 0, end = 0;
    char *data = (char *)j->file->data[i][role];
    for (size_t from = 0;; from = end) {
        zc_status status = zc_engine_next_part(engine, i, from, &begin, &end);
        if (status != ZC_OK || begin == end)
            return status;
        CHECK(begin >= from && end <= sizes[i]);
        if (end - begin > 3) { /* a part from its middle is its rest */
            size_t first, last;
            CHECK_OK(zc_engine_next_part(engine, i, begin + 2, &first, &last));
            CHECK_EQ(first, begin + 2);
            CHECK_EQ(last, end);
            end = begin + 3;
        }
        char *buffer = malloc((end - begin) * elem); /* its own: the sanitizer sees a byte too many */
        if (j->loads) {
            memcpy(buffer, data + begin * elem, (end - begin) * elem);
            status = zc_engine_write_part(engine, i, (zc_role)role, begin, end, buffer);
        } else {
            status = zc_engine_read_part(engine, i, (zc_role)role, begin, end, buffer);
            memcpy(data + begin * elem, buffer, (end - begin) * elem);
            for (size_t k = begin; k < end; k++)
                __atomic_fetch_add(&j->file->writers[i][role][k], 1, __ATOMIC_RELAXED);
        }
        free(buffer);
        if (status != ZC_OK)
            return status;
    }
}

/* Stage 0 keeps the state of all elements, and takes them in any pieces. */
static zc_status write_everywhere(job *j, zc_engine *engine, size_t i, int role)
{
    size_t elem = bytes_of(i, role), middle = sizes[i] / 3;
    const char *data = (const char *)j->file->data[i][role];
    ZC_TRY(zc_engine_write_part(engine, i, (zc_role)role, 0, middle, data));
    return zc_engine_write_part(engine, i, (zc_role)role, middle, sizes[i], data + middle * elem);
}

static zc_status move_all(job *j, zc_engine *engine)
{
    for (size_t i = 0; i < PARAMS; i++)
        for (int role = 0; role < ROLES; role++)
            if (has_role(j, i, role))
                ZC_TRY(j->loads && j->stage == 0 && role != ZC_ROLE_WEIGHT ? write_everywhere(j, engine, i, role)
                                                                            : move_parts(j, engine, i, role));
    for (size_t i = 0; i < PARAMS; i++) {
        if (i == FROZEN)
            continue;
        if (j->loads)
            ZC_TRY(zc_engine_set_step_count(engine, i, j->file->steps[i], 0));
        else if (j->rank == 0)
            j->file->steps[i] = zc_engine_step_count(engine, i);
    }
    return ZC_OK;
}

/* All values, whole; collective. */
static zc_status check_loaded(job *j, zc_engine *engine, char *whole)
{
    for (size_t i = 0; i < PARAMS; i++)
        for (int role = 0; role < ROLES; role++) {
            if (!has_role(j, i, role))
                continue;
            ZC_TRY(role == ZC_ROLE_WEIGHT ? zc_engine_fetch(engine, i, whole)
                                          : zc_engine_read(engine, i, (zc_role)role, 1, whole));
            if (memcmp(whole, j->file->data[i][role], sizes[i] * bytes_of(i, role))) {
                fprintf(stderr, "parameter %zu role %d stage %d rank %zu of %zu\n", i, role, j->stage, j->rank, j->ranks);
                CHECK(!"equal bits");
            }
        }
    return ZC_OK;
}

static void *live(void *argument)
{
    job *j = argument;
    zc_comm *comm = j->comm;
    zc_device *device = NULL;
    zc_stream *stream = NULL;
    zc_options group = {.lr = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1}, with = group;
    zc_engine *engine = NULL;
    with.amsgrad = 1;
    if (j->defer)
        elsewhere_wrap(j->comm, &comm, &device, &stream);
    j->status = make_engine(j, comm, device, stream, j->loads ? &group : &with, &engine);
    for (size_t step = 0; step < 2 && j->status == ZC_OK && !j->loads; step++)
        j->status = train(engine, device, stream, j->rank, step, &with);
    if (j->status == ZC_OK)
        j->status = zc_engine_prepare(engine, &with, 1); /* arrays for amsgrad, which the one that loads has not */
    if (j->status == ZC_OK)
        j->status = zc_engine_sync(engine, "parts");
    if (j->status == ZC_OK)
        j->status = move_all(j, engine);
    if (j->status == ZC_OK && j->loads)
        j->status = zc_engine_spread(engine);
    if (j->status == ZC_OK && j->loads)
        j->status = check_loaded(j, engine, j->weights[0]);
    memset(j->weights, 0, sizeof j->weights);
    if (j->status == ZC_OK)
        j->status = train(engine, device, stream, j->rank, 2, &with);
    for (size_t i = 0; i < PARAMS && j->status == ZC_OK; i++)
        j->status = zc_engine_fetch(engine, i, j->weights[i]);
    CHECK(j->status == ZC_OK || zc_last_error()[0]);
    zc_engine_destroy(engine);
    if (j->defer)
        elsewhere_close(comm, stream);
    else
        comm_close(comm);
    return NULL;
}

static void run_ranks(job *jobs, size_t ranks, int stage, int defer, int loads, file *f)
{
    zc_comm *comms[MAX_RANKS];
    pthread_t threads[MAX_RANKS];
    elsewhere_begin();
    CHECK_OK(zc_comm_open_local(ranks, 20, comms));
    for (size_t r = 0; r < ranks; r++) {
        memset(&jobs[r], 0, sizeof jobs[r]);
        jobs[r].ranks = ranks;
        jobs[r].rank = r;
        jobs[r].stage = stage;
        jobs[r].defer = defer;
        jobs[r].loads = loads;
        jobs[r].comm = comms[r];
        jobs[r].file = f;
        pthread_create(&threads[r], NULL, live, &jobs[r]);
    }
    for (size_t r = 0; r < ranks; r++)
        pthread_join(threads[r], NULL);
    elsewhere_end();
}

static void parts_cover_each_element_once(void)
{
    job *jobs = calloc(MAX_RANKS, sizeof *jobs);
    file *f = malloc(sizeof *f), *first = malloc(sizeof *first);
    for (size_t ranks = 1; ranks <= MAX_RANKS; ranks++)
        for (int stage = 0; stage <= 3; stage++) {
            memset(f, 0, sizeof *f);
            run_ranks(jobs, ranks, stage, ELSEWHERE || stage % 2, 0, f);
            for (size_t i = 0; i < PARAMS; i++)
                for (int role = 0; role < ROLES; role++)
                    for (size_t k = 0; k < sizes[i]; k++)
                        CHECK_EQ(f->writers[i][role][k], has_role(&jobs[0], i, role));
            if (stage == 0)
                *first = *f;
            CHECK(memcmp(f->data, first->data, sizeof f->data) == 0); /* what is written does not depend on the stage */
        }
    free(jobs);
    free(f);
    free(first);
}

static void any_loads_any(void)
{
    job *jobs = calloc(MAX_RANKS, sizeof *jobs), *others = calloc(MAX_RANKS, sizeof *others);
    file *f = malloc(sizeof *f);
    for (size_t ranks = 1; ranks <= MAX_RANKS; ranks++)
        for (int stage = 0; stage <= 3; stage++) {
            memset(f, 0, sizeof *f);
            run_ranks(jobs, ranks, stage, ELSEWHERE, 0, f);
            for (size_t n = 1; n <= MAX_RANKS; n++)
                for (int other = 0; other <= 3; other++) {
                    run_ranks(others, n, other, ELSEWHERE || (n + ranks) % 2, 1, f);
                    for (size_t r = 0; r < n; r++) {
                        CHECK_EQ(others[r].status, ZC_OK);
                        if (n == ranks)
                            CHECK(memcmp(jobs[0].weights, others[r].weights, sizeof jobs[0].weights) == 0);
                    }
                }
        }
    free(jobs);
    free(others);
    free(f);
}

#if !ELSEWHERE
static void every_failure_is_reported(void)
{
    job *jobs = calloc(MAX_RANKS, sizeof *jobs);
    file *f = malloc(sizeof *f);
    for (int stage = 1; stage <= 3; stage += 2)
        for (int loads = 0; loads <= 1; loads++)
            for (long nth = 1;; nth++) {
                memset(f, 0, sizeof *f);
                zc_comm *comms[2];
                pthread_t threads[2];
                CHECK_OK(zc_comm_open_local(2, 20, comms));
                zc_fault_arm(nth);
                for (size_t r = 0; r < 2; r++) {
                    jobs[r] = (job){.ranks = 2, .rank = r, .stage = stage, .loads = loads, .comm = comms[r], .file = f};
                    pthread_create(&threads[r], NULL, live, &jobs[r]);
                }
                for (size_t r = 0; r < 2; r++)
                    pthread_join(threads[r], NULL);
                long asked = zc_fault_count();
                zc_fault_arm(0);
                CHECK(jobs[0].status != ZC_ETIMEOUT && jobs[1].status != ZC_ETIMEOUT);
                if (jobs[0].status == ZC_OK && jobs[1].status == ZC_OK && asked < nth)
                    break;
            }
    free(jobs);
    free(f);
}

static void expect(zc_status got, const char *part)
{
    CHECK_EQ(got, ZC_EINVAL);
    if (!strstr(zc_last_error(), part)) {
        fprintf(stderr, "'%s' is not in: %s\n", part, zc_last_error());
        CHECK(!"the sentence");
    }
}

static void *misuse(void *argument)
{
    job *j = argument;
    float buffer[MOST];
    size_t begin, end;
    zc_options group = ZC_OPTIONS_ADAMW, bad = ZC_OPTIONS_ADAMW;
    zc_engine *engine = NULL;
    bad.beta1 = 2;
    CHECK_OK(make_engine(j, j->comm, NULL, NULL, &group, &engine));
    expect(zc_engine_next_part(engine, PARAMS, 0, &begin, &end), "parameter 7 of 7");
    expect(zc_engine_next_part(engine, 1, MOST + 1, &begin, &end), "which has 1000");
    CHECK_OK(zc_engine_next_part(engine, 1, MOST, &begin, &end));
    CHECK(begin == MOST && end == MOST);
    CHECK_OK(zc_engine_next_part(engine, 2, 0, &begin, &end));
    CHECK(begin == 0 && end == 0);
    expect(zc_engine_read_part(engine, PARAMS, ZC_ROLE_WEIGHT, 0, 1, buffer), "parameter 7 of 7");
    expect(zc_engine_read_part(engine, 1, ZC_ROLE_WEIGHT, 3, 2, buffer), "which has 1000");
    expect(zc_engine_read_part(engine, 1, ZC_ROLE_WEIGHT, 0, MOST + 1, buffer), "which has 1000");
    expect(zc_engine_read_part(engine, 1, ZC_ROLE_EXP_AVG, 0, MOST, buffer), "in no part");
    expect(zc_engine_write_part(engine, 1, ZC_ROLE_WEIGHT, 0, MOST, buffer), "in no part");
    CHECK_OK(zc_engine_next_part(engine, 1, 0, &begin, &end));
    expect(zc_engine_read_part(engine, 1, ZC_ROLE_GRAD, begin, end, buffer), "gradients");
    expect(zc_engine_write_part(engine, 1, ZC_ROLE_GRAD, begin, end, buffer), "gradients");
    expect(zc_engine_read_part(engine, 1, (zc_role)77, begin, end, buffer), "role");
    expect(zc_engine_write_part(engine, 1, (zc_role)77, begin, end, buffer), "role");
    expect(zc_engine_prepare(engine, &group, 2), "2 groups");
    CHECK_EQ(zc_engine_prepare(engine, &bad, 1), ZC_EINVAL);
    /* state that was never used is zeros */
    memset(buffer, 255, sizeof buffer);
    CHECK_OK(zc_engine_read_part(engine, 1, ZC_ROLE_EXP_AVG, begin, end, buffer));
    for (size_t k = 0; k < end - begin; k++)
        CHECK(buffer[k] == 0);
    CHECK_OK(zc_engine_sync(engine, "the end"));
    zc_engine_destroy(engine);
    zc_comm_close(j->comm);
    return NULL;
}

static void misuse_is_refused(void)
{
    zc_comm *comms[2];
    pthread_t threads[2];
    job *jobs = calloc(2, sizeof *jobs);
    CHECK_OK(zc_comm_open_local(2, 20, comms));
    for (size_t r = 0; r < 2; r++) {
        jobs[r] = (job){.ranks = 2, .rank = r, .stage = 2, .comm = comms[r]};
        pthread_create(&threads[r], NULL, misuse, &jobs[r]);
    }
    for (size_t r = 0; r < 2; r++)
        pthread_join(threads[r], NULL);
    free(jobs);
}

static void checksum_is_as_defined(void)
{
    static const char *const sets[] = {"base", "avx2", "avx512"};
    unsigned char data[400];
    uint64_t state = 1;
    for (size_t k = 0; k < sizeof data; k++)
        data[k] = (unsigned char)testing_random(&state);
    for (size_t at = 0; at < 9; at++)
        for (size_t bytes = 0; bytes + at <= sizeof data; bytes++) {
            unsigned char *exact = malloc(bytes + 1); /* the sanitizer sees a byte too many */
            uint64_t sums[2], a = 0, b = 0;
            memcpy(exact, data + at, bytes);
            for (size_t k = 0; k < bytes; k += 4) {
                uint64_t word = 0;
                for (size_t n = 0; n < 4 && k + n < bytes; n++)
                    word |= (uint64_t)exact[k + n] << (8 * n);
                a += word;
                b += a;
            }
            zc_checksum(exact, bytes, sums);
            CHECK(sums[0] == a && sums[1] == b);
            for (size_t s = 0; s < 3; s++) {
                const cpu_kernels *kernels = cpu_kernels_named(sets[s]);
                if (!kernels)
                    continue;
                kernels->checksum(exact, bytes, sums);
                CHECK(sums[0] == a && sums[1] == b);
            }
            free(exact);
        }
}
#endif

int main(void)
{
    RUN(parts_cover_each_element_once);
    RUN(any_loads_any);
#if !ELSEWHERE
    RUN(misuse_is_refused);
    RUN(every_failure_is_reported);
    RUN(checksum_is_as_defined);
#endif
    DONE();
}
