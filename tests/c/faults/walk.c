/*
 * Faults, by injection: a rank meets its end at every place of a run, and the others
 * must do what they promise.
 *
 *     walk FOLDER RANKS VARIANT MANNERS all|turns|some JOBS
 *
 * A first run without a fault lists the places that each rank comes to.  Then there
 * is a run for every place of every rank and every manner ("turns": for every place
 * and manner, of one rank where all come to it, and these take turns; "some": for
 * every point once, of the first and the last rank), and after it another, of fresh
 * ranks, which goes on from the checkpoint that is there and must reach the bits of a
 * run that nothing disturbed; but not twice from the same bytes.  JOBS runs are under
 * way at a time.  In the end it prints what was done and found, and the points that
 * ranks came by or met their end at.
 *
 * VARIANT: a stage, then s (shared parameters) or o (gathers that overlap), or "start", or "hub": ranks as on several
 * hosts, that have a communicator and no engine.
 * MANNERS: k killed, s stopped, e exits, m no memory, g gives up, d another dies while
 * it tells the others that a first one was killed.
 *
 * A machine may be busy with other things, so what is wrong with a run must be wrong
 * with another one of the same place, too.
 */
#define _GNU_SOURCE
#include "faults.h"

#include "zc_hash.h"
#include "zc_status.h"

#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#define TIMEOUT_S 0.3        /* of runs in which a rank is stopped */
#define START_TIMEOUT_S 0.6  /* of runs in which a rank may never have been there */
#define ENOUGH_S 20.0        /* otherwise: a timeout would be an error */
#define EARLY_NS 50000000ll  /* a peer may have waited before the rank stopped; those that do not say how long they waited */
#define ATTACH_NS 5100000000ll /* start-up gives ranks so long to map one another, whatever the timeout is */
#define RUN_LIMIT_NS (20 * SECOND)
#define HUB_NS 2300000000ll  /* so long a hub is given to say who is missing, before that is known to be rank 0 */
#define MOST_ITEMS 60000
#define MOST_JOBS 16
#define STOPPED_JOBS 4        /* so many for each other job */
#define MOST_CHECKPOINTS 16
#define TRIES_TO_HIT 4       /* for places that a run may pass by */

typedef struct item {
    fault faults[2];
    int may_miss;            /* whether this place is passed depends on time */
} item;

/* What becomes of an item: the faulty run, then the one that goes on. */
typedef struct job {
    const item *of;
    int going_on, tries, failures;
    script *plan;
    pid_t pids[MOST_RANKS];
    int status[MOST_RANKS], ended[MOST_RANKS];
    uint64_t start_ns;
    uint64_t checkpoint;     /* hash of the file that is gone on from */
} job;

static const char *folder, *variant, *manners;
static size_t ranks;
static int stage, shared, overlap, start_only, hub, some, turns;
static uint64_t right_digest;
static unsigned runs_made, jobs_numbered;
static uint64_t gone_on_from[MOST_CHECKPOINTS];
static size_t gone_on_count;
static item *items;
static size_t item_count;
static size_t hits, misses, without_effect, never_there, retried;
static uint64_t slowest_ns[GAVE_UP + 1];
static char passed[256][POINT_BYTES]; /* points met, and those at which a rank has met its end */
static int hit_at[256];
static size_t passed_count;

static const char *manner_name(manner how)
{
    static const char *const names[] = {"nothing", "killed", "stopped", "exits", "no memory", "gives up"};
    return names[how];
}

static size_t note_point(const char *name)
{
    for (size_t k = 0; k < passed_count; k++)
        if (!strcmp(passed[k], name))
            return k;
    if (passed_count == 256)
        return 255;
    snprintf(passed[passed_count], POINT_BYTES, "%s", name);
    return passed_count++;
}

/* ---- one run -------------------------------------------------------------------- */

static void path_in(char *path, size_t room_bytes, const script *plan, const char *name)
{
    snprintf(path, room_bytes, "%s/%s", plan->folder, name);
}

static script *new_script(int *fd)
{
    *fd = memfd_create("faults", MFD_CLOEXEC);
    if (*fd < 0 || ftruncate(*fd, sizeof(script)) != 0)
        return NULL;
    script *plan = mmap(NULL, sizeof *plan, PROT_READ | PROT_WRITE, MAP_SHARED, *fd, 0);
    return plan == MAP_FAILED ? NULL : plan;
}

/* Sockets between rank 0 and each other, out of the way of the numbers that ranks know them by. */
static void make_sockets(int pairs[][2])
{
    for (size_t r = 1; r < ranks; r++) {
        int pair[2];
        if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) {
            perror("walk: no sockets");
            exit(2);
        }
        for (int side = 0; side < 2; side++) {
            pairs[r][side] = fcntl(pair[side], F_DUPFD_CLOEXEC, HUB_FD + MOST_RANKS);
            close(pair[side]);
        }
    }
}

/* In a rank: its own side gets its number; the others are closed by exec. */
static void take_sockets(int pairs[][2], size_t rank)
{
    if (rank)
        dup2(pairs[rank][1], HUB_FD);
    for (size_t r = 1; !rank && r < ranks; r++)
        dup2(pairs[r][0], HUB_FD + (int)r);
}

/* Fresh processes, which know nothing but the script. */
static void start_ranks(job *j, const script *what)
{
    int fd, pairs[MOST_RANKS][2];
    if (j->plan)
        munmap(j->plan, sizeof *j->plan);
    j->plan = new_script(&fd);
    if (!j->plan) {
        perror("walk: no memory for a script");
        exit(2);
    }
    memcpy(j->plan, what, offsetof(script, report));
    snprintf(j->plan->job, sizeof j->plan->job, "faults-%d-%u", (int)getpid(), ++runs_made);
    j->start_ns = now_ns();
    if (hub)
        make_sockets(pairs);
    for (size_t r = 0; r < ranks; r++) {
        char number[16];
        snprintf(number, sizeof number, "%zu", r);
        j->ended[r] = 0;
        j->pids[r] = fork();
        if (j->pids[r] == 0) {
            if (fd == SCRIPT_FD) /* dup2 to itself would leave it close-on-exec */
                fd = dup(fd);
            dup2(fd, SCRIPT_FD);
            if (hub)
                take_sockets(pairs, r);
            execl("/proc/self/exe", "rank", number, (char *)NULL);
            _exit(127);
        }
    }
    close(fd);
    for (size_t r = 1; hub && r < ranks; r++) {
        close(pairs[r][0]);
        close(pairs[r][1]);
    }
}

/* 1 when all ranks have ended; a stopped one is ended when it is alone. */
static int all_ended(job *j)
{
    size_t left = 0, stopped = 0;
    int late = now_ns() - j->start_ns > RUN_LIMIT_NS;
    for (size_t r = 0; r < ranks; r++) {
        if (!j->ended[r])
            j->ended[r] = waitpid(j->pids[r], &j->status[r], WNOHANG) == j->pids[r];
        if (j->ended[r])
            continue;
        left++;
        for (size_t k = 0; k < 2; k++)
            stopped += j->plan->faults[k].how == STOPPED && j->plan->faults[k].rank == r &&
                       j->plan->report[r].fault_ns;
    }
    if (left && (late || left == stopped))
        for (size_t r = 0; r < ranks; r++)
            if (!j->ended[r])
                kill(j->pids[r], SIGKILL);
    return left == 0;
}

/* ---- what must have come of it --------------------------------------------------- */

static char wrong[2048];

static int is_wrong(const char *format, ...) __attribute__((format(printf, 1, 2)));
static int is_wrong(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(wrong, sizeof wrong, format, arguments);
    va_end(arguments);
    return 0;
}

static int names_rank(const char *text, const char *before, size_t rank)
{
    char wanted[64];
    const char *at = text;
    int length = snprintf(wanted, sizeof wanted, "%s%zu", before, rank);
    while ((at = strstr(at, wanted))) {
        if (at[length] < '0' || at[length] > '9')
            return 1;
        at++;
    }
    return 0;
}

/* "missing: 1, 2", "did not finish: 2"; of NCCL "not called by ranks 1, 2", or who is stopped */
static int lists_rank(const char *text, size_t rank)
{
    static const char *const before[] = {"missing: ", "did not finish: ", "not called by rank",
                                         "stopped by a signal or a debugger: rank"};
    const char *list = NULL;
    for (size_t k = 0; k < sizeof before / sizeof *before && !list; k++)
        list = strstr(text, before[k]);
    return list && (names_rank(list, ": ", rank) || names_rank(list, ", ", rank) || names_rank(list, "rank ", rank) ||
                    names_rank(list, "ranks ", rank));
}

/* Whether a timeout says that it lasted. */
static int waited_out(const char *text)
{
    const char *waited = strstr(text, "waited ");
    return waited && strtod(waited + 7, NULL) >= TIMEOUT_S;
}

/* What every rank that was not at fault leaves behind: nothing. */
static int left_nothing(const job *j, size_t r, int code)
{
    const rank_report *seen = &j->plan->report[r];
    if (!WIFEXITED(j->status[r]) || WEXITSTATUS(j->status[r]) != code)
        return is_wrong("rank %zu ended with status %#x instead of exit %d (%s)", r, (unsigned)j->status[r], code, seen->complaints[0] ? seen->complaints : seen->text);
    if (!seen->closed || seen->descriptors_left || seen->mappings_left)
        return is_wrong("rank %zu left %zu descriptors and %zu mappings", r, seen->descriptors_left, seen->mappings_left);
    return 1;
}

/* Before rank 0 has welcomed a rank neither is known to the other: the start timeout tells. */
static int may_be_unknown(const fault *f)
{
    static const char *const before[] = {"block: made", "start: memory made", "start: connected", "start: listening",
                                         "start: a guest has come", "start: a rank has joined",
                                         "start: a rank is welcomed", "start: hello is said", "program: before start"};
    if (!start_only || hub)
        return 0;
    for (size_t k = 0; k < sizeof before / sizeof *before; k++)
        if (!strcmp(f->point, before[k]))
            return 1;
    return f->how == NO_MEMORY;
}

static int survivor_is_right(const job *j, size_t r, const fault *f)
{
    const rank_report *seen = &j->plan->report[r], *lost = &j->plan->report[f->rank];
    int64_t late_ns = (int64_t)(seen->end_ns - lost->fault_ns);
    const char *text = seen->text;
    if (!left_nothing(j, r, EXIT_FAILED))
        return 0;
    if (seen->status == ZC_ETIMEOUT && f->how != STOPPED && may_be_unknown(f)) {
        never_there++;
        if (!lists_rank(text, f->rank) && !names_rank(text, "rank ", f->rank))
            return is_wrong("rank %zu: the start timeout does not name rank %zu: %s", r, f->rank, text);
        if (late_ns > (int64_t)((START_TIMEOUT_S + 2) * 1e9))
            return is_wrong("rank %zu: the start timeout took %.3f s: %s", r, (double)late_ns * 1e-9, text);
        return 1;
    }
    if (f->how == STOPPED) {
        int64_t most = (int64_t)(TIMEOUT_S * 1e9) + (int64_t)SECOND;
        if (start_only && (!strncmp(f->point, "start: ", 7) || !strncmp(f->point, "block: ", 7) ||
                           !strcmp(f->point, "program: before start")))
            most = (int64_t)(START_TIMEOUT_S * 1e9) + ATTACH_NS + 2 * (int64_t)SECOND;
        if (hub && f->rank == 0)
            most += HUB_NS;
        if (seen->status == ZC_EPEERLOST && names_rank(text, "rank ", f->rank) && strstr(text, "has closed"))
            return 1; /* it had said so before it was stopped */
        if (seen->status != ZC_ETIMEOUT)
            return is_wrong("rank %zu: not a timeout: %d: %s", r, seen->status, text);
        if (!lists_rank(text, f->rank) && !(start_only && names_rank(text, "rank ", f->rank)))
            return is_wrong("rank %zu: the timeout does not name rank %zu: %s", r, f->rank, text);
        if (!start_only && !strstr(text, "stopped by a signal") && !strstr(text, "not called by"))
            return is_wrong("rank %zu: the timeout does not say that rank %zu is stopped: %s", r, f->rank, text);
        int early = late_ns < (int64_t)(TIMEOUT_S * 1e9) - EARLY_NS && !waited_out(text);
        if (early || late_ns > most)
            return is_wrong("rank %zu: %.3f s instead of the timeout: %s", r, (double)late_ns * 1e-9, text);
        return 1;
    }
    if (late_ns > (int64_t)SECOND)
        return is_wrong("rank %zu noticed after %.3f s: %s", r, (double)late_ns * 1e-9, text);
    if (late_ns > 0 && (uint64_t)late_ns > slowest_ns[f->how])
        slowest_ns[f->how] = (uint64_t)late_ns;
    if (!names_rank(text, "rank ", f->rank))
        return is_wrong("rank %zu: rank %zu is not named: %s", r, f->rank, text);
    if (hub && !lost->opened) /* who has not said that it is there can only go: its socket ends */
        return seen->status == ZC_EPEERLOST || strstr(text, "no memory") ? 1 : is_wrong("rank %zu: no lost peer: %s", r, text);
    if (hub && f->how == NO_MEMORY && f->rank == 0 &&
        (strstr(text, "rank 0 had no memory for") || strstr(text, "rank 0 has no memory for")))
        return 1; /* its thread, the hub, that is */
    if (f->how == NO_MEMORY && lost->status != ZC_OK) {
        /* who cannot send to the others cannot tell them why */
        if (strstr(lost->text, "cannot speak with") && seen->status == ZC_EPEERLOST)
            return 1;
        char reason[64];
        snprintf(reason, sizeof reason, "%s", lost->text);
        if ((seen->status != lost->status && seen->status != ZC_ECOMM) || !strstr(text, reason))
            return is_wrong("rank %zu: not the reason of rank %zu (%d, %s): %d: %s", r, f->rank, lost->status, lost->text,
                            seen->status, text);
        return 1;
    }
    if (seen->status != ZC_EPEERLOST)
        return is_wrong("rank %zu: no lost peer: %d: %s", r, seen->status, text);
    if (!hub && !strstr(text, "waited for it in ") && !strstr(text, "was lost while the job started")) /* a hub tells before one waits */
        return is_wrong("rank %zu: the operation is not named: %s", r, text);
    if (f->how == KILLED || f->how == EXITED ? !strstr(text, "is gone") && !strstr(text, "was lost") &&
                                                   !strstr(text, "has closed")
                                             : !strstr(text, "has closed"))
        return is_wrong("rank %zu: not what became of rank %zu: %s", r, f->rank, text);
    return 1;
}

/* The faulty run itself. */
static int fault_is_right(const job *j)
{
    const fault *f = &j->plan->faults[0], *second = &j->plan->faults[1];
    for (size_t r = 0; r < ranks; r++) {
        const rank_report *seen = &j->plan->report[r];
        int code = WIFEXITED(j->status[r]) ? WEXITSTATUS(j->status[r]) : -1;
        if (r == f->rank) {
            if ((f->how == EXITED && code != EXIT_SUDDEN) || (f->how == GAVE_UP && code != EXIT_FAILED))
                return is_wrong("rank %zu ended with status %#x", r, (unsigned)j->status[r]);
            if ((f->how == GAVE_UP || f->how == NO_MEMORY) &&
                !left_nothing(j, r, seen->status == ZC_OK ? 0 : EXIT_FAILED))
                return 0;
            continue;
        }
        if (second->how != NO_FAULT && r == second->rank)
            continue;
        if (second->how == NO_FAULT ? !survivor_is_right(j, r, f)
                                    : !survivor_is_right(j, r, f) && !survivor_is_right(j, r, second))
            return 0;
    }
    return 1;
}

static int went_on_right(const job *j)
{
    for (size_t r = 0; r < ranks; r++) {
        if (!left_nothing(j, r, 0))
            return 0;
        if (j->plan->report[r].digest != right_digest)
            return is_wrong("rank %zu: the run that goes on has other bits", r);
    }
    return 1;
}

/* ---- walking ------------------------------------------------------------------------ */

static void describe_item(const item *of, char *text, size_t room_bytes)
{
    const fault *f = &of->faults[0], *second = &of->faults[1];
    int used = snprintf(text, room_bytes, "%zu ranks, %s: rank %zu %s at \"%s\" %ld", ranks, variant, f->rank,
                        manner_name(f->how), f->point, f->time);
    if (second->how != NO_FAULT)
        snprintf(text + used, room_bytes - (size_t)used, ", rank %zu at \"%s\" %ld", second->rank, second->point,
                 second->time);
}

static void forget_folder(const script *plan)
{
    char path[256];
    path_in(path, sizeof path, plan, "last");
    unlink(path);
    path_in(path, sizeof path, plan, "new");
    unlink(path);
    rmdir(plan->folder);
}

static script plain_script(void)
{
    static script plan; /* too large for a stack */
    memset(&plan, 0, offsetof(script, report));
    plan.ranks = ranks;
    plan.stage = stage;
    plan.shared = shared;
    plan.overlap = overlap;
    plan.start_only = start_only;
    plan.hub = hub;
    plan.closer = -1;
    plan.timeout_s = plan.start_timeout_s = ENOUGH_S;
    return plan;
}

static void begin_fault(job *j)
{
    char base[256], last[300];
    static script plan;
    plan = plain_script();
    snprintf(plan.folder, sizeof plan.folder, "%.150s/%u", folder, ++jobs_numbered);
    mkdir(plan.folder, 0700);
    snprintf(base, sizeof base, "%.150s/base/last", folder);
    path_in(last, sizeof last, &plan, "last");
    if (!start_only && link(base, last) != 0)
        perror("walk: cannot link the checkpoint");
    plan.steps = FAULTY_STEP;
    memcpy(plan.faults, j->of->faults, sizeof plan.faults);
    plan.closer = (int)plan.faults[0].rank;
    if (plan.faults[0].how == STOPPED)
        plan.timeout_s = TIMEOUT_S;
    if (start_only)
        plan.start_timeout_s = START_TIMEOUT_S;
    j->going_on = 0;
    start_ranks(j, &plan);
}

static int has_checkpoint(const script *plan)
{
    char path[256];
    path_in(path, sizeof path, plan, "last");
    return access(path, R_OK) == 0 ? 1 : is_wrong("the last checkpoint is gone");
}

/* The bytes of its checkpoint: runs are the same where these are. */
static uint64_t hash_checkpoint(const script *plan)
{
    char path[256], bytes[4096];
    uint64_t hash = ZC_HASH_START;
    size_t count;
    path_in(path, sizeof path, plan, "last");
    FILE *file = fopen(path, "rb");
    while (file && (count = fread(bytes, 1, sizeof bytes, file)) > 0)
        hash = zc_hash(hash, bytes, count);
    if (file)
        fclose(file);
    return hash;
}

static int gone_on_before(const script *plan)
{
    uint64_t checkpoint = hash_checkpoint(plan);
    for (size_t k = 0; k < gone_on_count; k++)
        if (gone_on_from[k] == checkpoint)
            return 1;
    return 0;
}

static void begin_going_on(job *j)
{
    static script plan;
    plan = plain_script();
    j->checkpoint = hash_checkpoint(j->plan);
    plan.steps = LAST_STEP;
    memcpy(plan.folder, j->plan->folder, sizeof plan.folder);
    j->going_on = 1;
    start_ranks(j, &plan);
}

/* 1: the item is over. */
static int next_phase(job *j)
{
    const fault *f = &j->of->faults[0], *last = j->of->faults[1].how != NO_FAULT ? &j->of->faults[1] : f;
    const rank_report *victim = &j->plan->report[last->rank];
    int right;
    if (j->going_on) {
        right = went_on_right(j);
        if (right && gone_on_count < MOST_CHECKPOINTS)
            gone_on_from[gone_on_count++] = j->checkpoint;
    } else if (!victim->fault_ns && j->of->may_miss) {
        forget_folder(j->plan);
        if (++j->tries < TRIES_TO_HIT) {
            begin_fault(j);
            return 0;
        }
        misses++;
        return 1;
    } else if (!victim->fault_ns) {
        right = is_wrong("the place was not reached");
    } else {
        right = fault_is_right(j) && (start_only || has_checkpoint(j->plan));
        if (right && !start_only && !gone_on_before(j->plan)) {
            begin_going_on(j);
            return 0;
        }
    }
    forget_folder(j->plan);
    if (right) {
        hits++;
        without_effect += f->how == NO_MEMORY && victim->status == ZC_OK && !j->going_on;
        if (last->point[0])
            hit_at[note_point(last->point)] = 1;
        return 1;
    }
    char text[256];
    describe_item(j->of, text, sizeof text);
    fprintf(stderr, "%s%s: %s\n", text, j->failures ? " (again)" : "", wrong);
    if (j->failures++ == 0) {
        retried++;
        begin_fault(j);
        return 0;
    }
    testing_failures++;
    return 1;
}

/* Runs in which a rank is stopped are mostly waited for, so more of them may be under way. */
static int may_start(const item *of, size_t at_once, size_t active, size_t busy)
{
    return of->faults[0].how == STOPPED ? active < STOPPED_JOBS * at_once : busy < at_once;
}

static void walk_items(size_t at_once)
{
    static job jobs[MOST_JOBS * STOPPED_JOBS];
    size_t next = 0, active = 0, busy = 0;
    while (next < item_count || active) {
        for (size_t k = 0; k < MOST_JOBS * STOPPED_JOBS; k++) {
            job *j = &jobs[k];
            if (!j->of && next < item_count && may_start(&items[next], at_once, active, busy)) {
                j->of = &items[next++];
                j->tries = j->failures = 0;
                begin_fault(j);
                active++;
                busy += j->of->faults[0].how != STOPPED;
            }
            if (j->of && all_ended(j) && next_phase(j)) {
                active--;
                busy -= j->of->faults[0].how != STOPPED;
                j->of = NULL;
            }
        }
        if (testing_failures >= 10)
            next = item_count;
        pause_us(500);
    }
}

/* ---- which places there are ------------------------------------------------------------ */

static void add_item(item what)
{
    if (item_count < MOST_ITEMS)
        items[item_count++] = what;
}

/*
 * A rank sleeps, or wakes one that sleeps, only if it comes early, or late; the first to see a loss tells it; messages between
 * hosts go together, or in parts, as there is room.
 */
static int depends_on_time(const char *name)
{
    return !strncmp(name, "wait: ", 6) || !strncmp(name, "hub: ", 5) || !strcmp(name, "wake: to be rung") || !strcmp(name, "wake: rung") ||
           !strncmp(name, "failure: ", 9);
}

static long times_at(const rank_report *seen, size_t points, const char *name)
{
    long times = 0;
    for (size_t k = 0; k < points; k++)
        times += !strcmp(seen->point[k], name);
    return times;
}

/* Whether it is for another rank to meet its end there. */
static int left_to_another(const rank_report *all, size_t rank, const char *name, long time, manner how)
{
    for (size_t r = 0; r < ranks; r++)
        if (times_at(&all[r], all[r].points, name) < time)
            return 0;
    return (zc_hash(ZC_HASH_START, name, strlen(name)) + (uint64_t)time + (uint64_t)how) % ranks != rank;
}

/* The places of one rank, in the order in which it came to them. */
static void add_places(const rank_report *all_seen, size_t rank, manner how)
{
    const rank_report *seen = &all_seen[rank];
    size_t first = 0;
    while (!start_only && first < seen->points && strcmp(seen->point[first], "program: before construction"))
        first++;
    for (size_t k = first; k < seen->points; k++) {
        const char *name = seen->point[k];
        long time = times_at(seen, k + 1, name), all = times_at(seen, seen->points, name);
        if ((how == GAVE_UP && strncmp(name, "program: ", 9)) || (some && time != (all + 1) / 2))
            continue;
        if (turns && left_to_another(all_seen, rank, name, time, how))
            continue;
        item what = {.faults[0] = {.rank = rank, .how = how, .time = time}, .may_miss = depends_on_time(name)};
        memcpy(what.faults[0].point, name, POINT_BYTES);
        add_item(what);
    }
}

/* The questions for memory of one rank that are walked over: those after the first ones, of its start. */
static long first_question(const rank_report *start)
{
    return start_only ? 1 : start->questions + 1;
}

static void add_questions(const rank_report *all_seen, const rank_report *all_started, size_t rank)
{
    long first = first_question(&all_started[rank]), of_all = all_seen[rank].questions + 1 - first;
    for (size_t r = 0; r < ranks; r++) {
        long asked = all_seen[r].questions + 1 - first_question(&all_started[r]);
        of_all = asked < of_all ? asked : of_all;
    }
    for (long k = first; k <= all_seen[rank].questions; k += some ? 5 : 1) {
        if (turns && k - first < of_all && (size_t)(k - first) % ranks != rank) /* as in left_to_another() */
            continue;
        add_item((item){.faults[0] = {.rank = rank, .how = NO_MEMORY, .time = k}, .may_miss = 1});
    }
}

/* A first rank dies; a second one does when it tells this. */
static void add_doubles(void)
{
    static const char *const telling[] = {"failure: to be told", "failure: written", "failure: an alarm is set"};
    for (size_t rank = 0; rank < ranks; rank++)
        for (size_t k = 0; k < 3; k++)
            for (long time = 1; time <= (k == 2 ? (long)ranks - 1 : 1); time++) {
                item what = {.faults[0] = {.rank = rank, .how = KILLED, .time = 1},
                             .faults[1] = {.rank = (rank + 1) % ranks, .how = k == 1 ? EXITED : KILLED, .time = time},
                             .may_miss = 1};
                snprintf(what.faults[0].point, POINT_BYTES, "%s", start_only ? "start: met" : "step: met");
                snprintf(what.faults[1].point, POINT_BYTES, "%s", telling[k]);
                add_item(what);
            }
}

static int run_once(job *j, const script *plan, const char *what)
{
    start_ranks(j, plan);
    while (!all_ended(j))
        pause_us(500);
    for (size_t r = 0; r < ranks; r++)
        if (!left_nothing(j, r, 0)) {
            fprintf(stderr, "%zu ranks, %s: %s: %s\n", ranks, variant, what, wrong);
            return 0;
        }
    return 1;
}

/* The run that nothing disturbs, its first checkpoint, and the list of places. */
static int list_places(job *whole)
{
    static script plan;
    static job start;
    plan = plain_script();
    plan.start_only = 1;
    if (!run_once(&start, &plan, "start"))
        return 0;
    plan = plain_script();
    plan.list = 1;
    snprintf(plan.folder, sizeof plan.folder, "%.150s/base", folder);
    mkdir(plan.folder, 0700);
    if (!start_only) {
        static job first;
        char last[256], kept[256];
        plan.list = 0;
        plan.steps = LAST_STEP;
        if (!run_once(&first, &plan, "all steps"))
            return 0;
        right_digest = first.plan->report[0].digest;
        for (size_t r = 1; r < ranks; r++)
            CHECK(first.plan->report[r].digest == right_digest);
        path_in(last, sizeof last, &plan, "last");
        path_in(kept, sizeof kept, &plan, "kept");
        unlink(last);
        plan.steps = FIRST_STEP;
        if (!run_once(&first, &plan, "the first step") || link(last, kept) != 0)
            return 0;
        plan.steps = FAULTY_STEP;
        plan.list = 1;
        if (!run_once(whole, &plan, "the undisturbed run"))
            return 0;
        rename(kept, last);
    } else if (!run_once(whole, &plan, "the undisturbed run")) {
        return 0;
    }
    for (size_t r = 0; r < ranks; r++) {
        const rank_report *seen = &whole->plan->report[r];
        for (size_t k = 0; k < seen->points; k++)
            note_point(seen->point[k]);
        if (some && r > 0 && r + 1 < ranks)
            continue;
        for (const char *m = manners; *m; m++) {
            if (*m == 'm')
                add_questions(whole->plan->report, start.plan->report, r);
            else if (*m != 'd')
                add_places(whole->plan->report, r, *m == 'k' ? KILLED : *m == 's' ? STOPPED : *m == 'e' ? EXITED : GAVE_UP);
        }
    }
    if (strchr(manners, 'd'))
        add_doubles();
    return 1;
}

/* Names of this walker's jobs that are still bound. */
static size_t sockets_left(void)
{
    FILE *file = fopen("/proc/net/unix", "r");
    char line[512], ours[64];
    size_t count = 0;
    snprintf(ours, sizeof ours, "/faults-%d-", (int)getpid());
    while (file && fgets(line, sizeof line, file))
        count += strstr(line, ours) != NULL;
    if (file)
        fclose(file);
    return count;
}

static int walk(size_t at_once)
{
    static job whole;
    size_t shm = count_entries("/dev/shm"), descriptors;
    uint64_t start_ns = now_ns();
    items = calloc(MOST_ITEMS, sizeof *items);
    mkdir(folder, 0700);
    if (!items || !list_places(&whole))
        return 1;
    descriptors = count_fds();
    walk_items(at_once);
    CHECK_EQ(count_fds(), descriptors);
    CHECK_EQ(sockets_left(), 0);
    CHECK(count_entries("/dev/shm") <= shm);
    CHECK_EQ(waitpid(-1, NULL, WNOHANG), -1); /* no child is left */
    printf("%zu ranks, %s, manners %s: places", ranks, variant, manners);
    for (size_t r = 0; r < ranks; r++)
        printf(" %zu", whole.plan->report[r].points);
    printf("; %zu faults, %u runs, %.1f s; %zu passed by, %zu without effect, %zu told by the start timeout, %zu tried again; "
           "noticed within (ms)", hits, runs_made, (double)(now_ns() - start_ns) * 1e-9, misses, without_effect, never_there,
           retried);
    for (manner how = KILLED; how <= GAVE_UP; how++)
        if (slowest_ns[how])
            printf(" %s %.0f", manner_name(how), (double)slowest_ns[how] * 1e-6);
    printf("\n");
    for (size_t k = 0; k < passed_count; k++)
        printf("%s %s\n", hit_at[k] ? "fault at" : "passed", passed[k]);
    DONE();
}

int main(int argc, char **argv)
{
    if (argc == 2)
        return rank_main(strtoul(argv[1], NULL, 10));
    if (argc != 7) {
        fprintf(stderr, "usage: walk FOLDER RANKS VARIANT MANNERS all|turns|some JOBS\n");
        return 2;
    }
    folder = argv[1];
    ranks = strtoul(argv[2], NULL, 10);
    variant = argv[3];
    manners = argv[4];
    some = !strcmp(argv[5], "some");
    turns = !strcmp(argv[5], "turns");
    hub = !strcmp(variant, "hub");
    start_only = hub || !strcmp(variant, "start");
    stage = start_only ? 0 : variant[0] - '0';
    shared = !start_only && strchr(variant, 's') != NULL;
    overlap = !start_only && strchr(variant, 'o') != NULL;
    size_t at_once = strtoul(argv[6], NULL, 10);
    if (ranks < 2 || ranks > MOST_RANKS || stage < 0 || stage > 3 || at_once < 1 || at_once > MOST_JOBS)
        return 2;
    return walk(at_once);
}
