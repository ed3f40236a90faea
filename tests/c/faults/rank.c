/*
 * One rank of a run: it goes on from the last checkpoint, if there is one, trains up
 * to the step that the script says, and saves after each but the very last, as zero_c's
 * own checkpoints are saved: every rank writes its parts of a new file, then rank 0 renames it.  It stops
 * at the first call that fails, closes everything, and ends with EXIT_FAILED.
 */
#define _GNU_SOURCE
#include "faults.h"
#include "place.h"

#include "zc_hash.h"
#include "zc_point.h"
#include "zero_c.h"

#include <fcntl.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#define PARAMS 3
enum { LAST_ROLE = 3 };

static const size_t ELEMS[PARAMS] = {300, 6000, 2500};
static const char *const NAMES[PARAMS] = {"first", "second", "third"};
static const zc_role ROLES[LAST_ROLE] = {ZC_ROLE_WEIGHT, ZC_ROLE_EXP_AVG, ZC_ROLE_EXP_AVG_SQ};

static script *plan;
static rank_report *report;
static size_t own_rank;
static long times[2];
static int giving_up, unlisted;

/* ---- meeting one's end ------------------------------------------------------ */

static void meet_end(manner how)
{
    report->fault_ns = now_ns();
    if (how == KILLED)
        kill(getpid(), SIGKILL);
    else if (how == STOPPED)
        kill(getpid(), SIGSTOP);
    else if (how == EXITED)
        exit(EXIT_SUDDEN);
    else
        giving_up = 1;
}

/* A hub's thread, and the reader of its messages, come to points of their own. */
void zc_point(const char *name)
{
    static atomic_size_t listed;
    if (plan->list && !unlisted) {
        size_t k = atomic_fetch_add(&listed, 1);
        if (k < MOST_POINTS) {
            snprintf(report->point[k], POINT_BYTES, "%s", name);
            report->points = k + 1;
        }
    }
    for (size_t k = 0; k < 2; k++) {
        const fault *f = &plan->faults[k];
        if (f->how != NO_FAULT && f->rank == own_rank && !strcmp(f->point, name) && ++times[k] == f->time)
            meet_end(f->how);
    }
}

/* Between two calls of the program: a place, and where it may give up. */
static zc_status between(const char *name)
{
    char point[POINT_BYTES];
    snprintf(point, sizeof point, "program: before %s", name);
    zc_point(point);
    return giving_up ? zc_fail(ZC_ESTATE, "the program of rank %zu gave up before %s", own_rank, name) : ZC_OK;
}

#define DO(name, call)         \
    do {                       \
        ZC_TRY(between(name)); \
        ZC_TRY(call);          \
    } while (0)

/* ---- the checkpoint ---------------------------------------------------------- */

static size_t place_of(size_t param, size_t role)
{
    size_t elems = 16;
    for (size_t i = 0; i < param; i++)
        elems += ELEMS[i] * LAST_ROLE;
    return (elems + role * ELEMS[param]) * sizeof(float);
}

static void path_of(const char *name, char *path, size_t room_bytes)
{
    snprintf(path, room_bytes, "%s/%s", plan->folder, name);
}

static zc_status transfer(int fd, int writing, void *memory, size_t bytes, size_t offset)
{
    ssize_t done = writing ? pwrite(fd, memory, bytes, (off_t)offset) : pread(fd, memory, bytes, (off_t)offset);
    return done == (ssize_t)bytes ? ZC_OK : zc_fail(ZC_ESYSTEM, "the checkpoint is short");
}

static zc_status write_parts(zc_engine *engine, int fd)
{
    float part[8192];
    for (size_t i = 0; i < PARAMS; i++)
        for (size_t role = 0; role < LAST_ROLE; role++)
            for (size_t begin = 0, end; begin < ELEMS[i]; begin = end) {
                ZC_TRY(zc_engine_next_part(engine, i, begin, &begin, &end));
                if (begin == end)
                    break;
                ZC_TRY(zc_engine_read_part(engine, i, ROLES[role], begin, end, part));
                ZC_TRY(transfer(fd, 1, part, (end - begin) * sizeof *part,
                                place_of(i, role) + begin * sizeof *part));
            }
    return ZC_OK;
}

static zc_status read_parts(zc_engine *engine, int fd)
{
    float whole[8192];
    for (size_t i = 0; i < PARAMS; i++)
        for (size_t role = 0; role < LAST_ROLE; role++) {
            ZC_TRY(transfer(fd, 0, whole, ELEMS[i] * sizeof *whole, place_of(i, role)));
            if (ROLES[role] != ZC_ROLE_WEIGHT) {
                ZC_TRY(zc_engine_write_part(engine, i, ROLES[role], 0, ELEMS[i], whole));
                continue;
            }
            for (size_t begin = 0, end; begin < ELEMS[i]; begin = end) {
                ZC_TRY(zc_engine_next_part(engine, i, begin, &begin, &end));
                ZC_TRY(zc_engine_write_part(engine, i, ROLES[role], begin, end, whole + begin));
            }
        }
    return ZC_OK;
}

static zc_status save(zc_comm *comm, zc_engine *engine, uint64_t steps)
{
    char fresh[256], last[256];
    path_of("new", fresh, sizeof fresh);
    path_of("last", last, sizeof last);
    DO("save", zc_engine_sync(engine, "save"));
    int fd = own_rank == 0 ? open(fresh, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600) : -1;
    zc_status status = own_rank == 0 ? transfer(fd, 1, &steps, sizeof steps, 0) : ZC_OK;
    if (status == ZC_OK)
        status = between("the file is there");
    if (status == ZC_OK)
        status = zc_comm_broadcast(comm, &steps, sizeof steps, 0);
    if (own_rank != 0)
        fd = open(fresh, O_RDWR | O_CLOEXEC);
    if (status == ZC_OK)
        status = write_parts(engine, fd);
    close(fd);
    ZC_TRY(status);
    DO("all have written", zc_comm_barrier(comm));
    ZC_TRY(between("the rename"));
    if (own_rank == 0 && rename(fresh, last) != 0)
        return zc_fail(ZC_ESYSTEM, "cannot rename the checkpoint");
    DO("it is saved", zc_comm_barrier(comm));
    return ZC_OK;
}

/* *steps 0: there is none. */
static zc_status load(zc_comm *comm, zc_engine *engine, uint64_t *steps)
{
    char last[256];
    path_of("last", last, sizeof last);
    int fd = open(last, O_RDONLY | O_CLOEXEC);
    zc_status status = fd < 0 ? ZC_OK : transfer(fd, 0, steps, sizeof *steps, 0);
    if (status == ZC_OK)
        status = between("load");
    if (status == ZC_OK)
        status = zc_comm_broadcast(comm, steps, sizeof *steps, 0);
    if (status == ZC_OK && *steps)
        status = read_parts(engine, fd);
    if (fd >= 0)
        close(fd);
    ZC_TRY(status);
    if (!*steps)
        return ZC_OK;
    for (size_t i = 0; i < PARAMS; i++)
        ZC_TRY(zc_engine_set_step_count(engine, i, *steps, 0));
    DO("it is loaded", zc_engine_spread(engine));
    return ZC_OK;
}

/* ---- training ------------------------------------------------------------------ */

static void numbers(float *to, size_t count, uint64_t seed)
{
    for (size_t k = 0; k < count; k++)
        to[k] = testing_float(&seed);
}

/* Reads parameters, as a forward would: at stage 3 a unit's are there between acquire and release. */
static zc_status use(zc_engine *engine, size_t i, int backward, float *sum)
{
    if (plan->stage == 3)
        DO("acquire", zc_engine_acquire(engine, i, backward));
    else
        DO("a layer", zc_engine_wait_params(engine, &i, 1));
    float room[8192];
    const float *values;
    ZC_TRY(place_read(zc_engine_param(engine, i), room, ELEMS[i] * sizeof *room, &values));
    for (size_t k = 0; k < ELEMS[i]; k++)
        *sum += values[k];
    if (plan->stage == 3)
        zc_engine_release(engine, i);
    return ZC_OK;
}

static zc_status step(zc_engine *engine, const zc_options *group, uint64_t number)
{
    float grad[8192], sum = 0;
    zc_step_args args = ZC_STEP_ARGS;
    args.max_norm = 1;
    for (size_t i = 0; i < PARAMS; i++)
        ZC_TRY(use(engine, i, 0, &sum));
    for (size_t i = PARAMS; i-- > 0;) {
        ZC_TRY(use(engine, i, 1, &sum));
        numbers(grad, ELEMS[i], number * 1000 + i * 10 + own_rank);
        const void *there;
        ZC_TRY(place_grad(i, grad, ELEMS[i] * sizeof *grad, &there));
        DO("a gradient", zc_engine_add_grad(engine, i, there));
    }
    DO("the end of backward", zc_engine_end_round(engine, NULL, 0));
    DO("step", zc_engine_step(engine, group, 1, &args));
    return ZC_OK;
}

static zc_status train(zc_comm *comm, zc_engine *engine, const zc_options *group)
{
    float values[8192] = {1}; /* more than goes in one meeting */
    uint64_t steps = 0, digest = ZC_HASH_START;
    ZC_TRY(load(comm, engine, &steps));
    DO("an array is reduced", zc_comm_all_reduce(comm, values, 8192, ZC_FLOAT32, ZC_SUM));
    while (steps < plan->steps) {
        ZC_TRY(step(engine, group, ++steps));
        if (steps < LAST_STEP)
            ZC_TRY(save(comm, engine, steps));
    }
    for (size_t i = 0; i < PARAMS; i++) {
        DO("a parameter is read", zc_engine_fetch(engine, i, values));
        digest = zc_hash(digest, values, ELEMS[i] * sizeof *values);
    }
    report->digest = digest;
    return ZC_OK;
}

/* The last meeting, to which the closer does not come. */
static zc_status part(zc_comm *comm)
{
    ZC_TRY(between("the end"));
    unlisted = plan->list; /* the rank that has a fault is the closer */
    zc_status status = plan->closer == (int)own_rank ? ZC_OK : zc_comm_barrier(comm);
    unlisted = 0;
    return status;
}

static zc_status build(zc_comm *comm, zc_options *group, zc_engine **engine)
{
    static float start[PARAMS][8192];
    zc_param params[PARAMS];
    zc_unit units[PARAMS];
    zc_engine_config config = ZC_ENGINE_CONFIG;
    for (size_t i = 0; i < PARAMS; i++) {
        numbers(start[i], ELEMS[i], 77 + i);
        params[i] = (zc_param){.name = NAMES[i], .elems = ELEMS[i], .dtype = ZC_FLOAT32, .initial = start[i],
                               .unit = (uint32_t)i};
        units[i] = (zc_unit){.name = NAMES[i]};
    }
    group->lr = 0.01;
    config.stage = plan->stage;
    config.shared_params = plan->shared;
    config.overlap_gather = plan->overlap;
    config.bucket_bytes = 16384;
    config.ring_slots = 2;
    config.threads = 1;
    config.units = units;
    config.unit_count = PARAMS;
    DO("construction", zc_engine_create(comm, &config, params, PARAMS, group, 1, engine));
    return ZC_OK;
}

/* ---- several hosts ---------------------------------------------------------------- */

static zc_status talk(zc_comm *comm)
{
    static float values[40000]; /* more than a socket takes at once */
    static float all[MOST_RANKS * 500];
    zc_comm *part_of = NULL;
    uint64_t digest = ZC_HASH_START;
    for (uint64_t turn = 0; turn < 2; turn++) {
        numbers(values, 40000, 10 * turn + own_rank);
        DO("an array is reduced", zc_comm_all_reduce(comm, values, 40000, ZC_FLOAT32, ZC_SUM));
        DO("a broadcast", zc_comm_broadcast(comm, values, 4000, turn));
        DO("a gathering", zc_comm_all_gather(comm, values, all, 500 * sizeof *all));
        DO("a meeting", zc_comm_barrier(comm));
        DO("a split", zc_comm_split(comm, 0, &part_of));
        zc_status status = between("a part's meeting");
        if (status == ZC_OK)
            status = zc_comm_barrier(part_of);
        zc_comm_close(part_of);
        ZC_TRY(status);
        digest = zc_hash(digest, values, sizeof values);
        digest = zc_hash(digest, all, plan->ranks * 500 * sizeof *all);
    }
    report->digest = digest;
    return ZC_OK;
}

static zc_status live_at_a_hub(zc_comm **comm)
{
    size_t hosts[MOST_RANKS] = {0, 1, 1, 2};
    int sockets[MOST_RANKS] = {HUB_FD, HUB_FD + 1, HUB_FD + 2, HUB_FD + 3};
    zc_comm_sockets config = {.rank = own_rank, .ranks = plan->ranks, .hosts = hosts, .sockets = sockets,
                              .timeout_s = plan->timeout_s};
    zc_status status = between("start");
    if (status != ZC_OK) {
        for (size_t r = own_rank ? 0 : 1; r < (own_rank ? 1 : plan->ranks); r++)
            close(HUB_FD + (int)r);
        return status;
    }
    ZC_TRY(zc_comm_open_sockets(&config, comm));
    report->opened = 1;
    ZC_TRY(talk(*comm));
    return part(*comm);
}

static zc_status live(zc_comm **comm, zc_engine **engine)
{
    zc_options group = ZC_OPTIONS_ADAMW;
    if (plan->hub)
        return live_at_a_hub(comm);
    zc_comm_config config = {.rank = own_rank, .ranks = plan->ranks, .job = plan->job, .token = "a secret",
                             .start_timeout_s = plan->start_timeout_s, .timeout_s = plan->timeout_s};
    DO("start", zc_comm_open(&config, comm));
    report->opened = 1;
    DO("the move to a GPU", place_join(comm));
    if (!plan->start_only) {
        ZC_TRY(build(*comm, &group, engine));
        ZC_TRY(train(*comm, *engine, &group));
    }
    return part(*comm);
}

/* ---- the process ----------------------------------------------------------------- */

static size_t count_mappings(void)
{
    FILE *file = fopen("/proc/self/maps", "r");
    char line[512];
    size_t count = 0;
    while (file && fgets(line, sizeof line, file))
        count += strstr(line, "/memfd:zero_c") != NULL;
    if (file)
        fclose(file);
    return count;
}

int rank_main(size_t rank)
{
    zc_comm *comm = NULL;
    zc_engine *engine = NULL;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    plan = mmap(NULL, sizeof *plan, PROT_READ | PROT_WRITE, MAP_SHARED, SCRIPT_FD, 0);
    if (plan == MAP_FAILED)
        return 1;
    own_rank = rank;
    report = &plan->report[rank];
    size_t given = plan->hub ? (rank ? 1 : plan->ranks - 1) : 0;
    size_t descriptors = count_fds() - given, mappings = count_mappings();
    long nth = 0;
    for (size_t k = 0; k < 2; k++)
        if (plan->faults[k].how == NO_MEMORY && plan->faults[k].rank == rank)
            nth = plan->faults[k].time;
    zc_fault_arm(nth);
    zc_status status = live(&comm, &engine);
    if (status != ZC_OK) {
        report->end_ns = now_ns();
        report->status = status;
        snprintf(report->text, sizeof report->text, "%s", zc_last_error());
    }
    if (nth && zc_fault_count() >= nth)
        report->fault_ns = now_ns();
    zc_engine_destroy(engine);
    place_leave();
    zc_comm_close(comm);
    if (place_complaints(report->complaints, sizeof report->complaints))
        return EXIT_COMPLAINS;
    report->questions = zc_fault_count();
    report->descriptors_left = count_fds() - descriptors;
    report->mappings_left = count_mappings() - mappings;
    report->closed = 1;
    return status == ZC_OK ? 0 : EXIT_FAILED;
}
