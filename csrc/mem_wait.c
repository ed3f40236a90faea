/*
 * Waiting: how, and everything that ends it other than success.
 *
 * First a short busy loop, only where every rank has a core; then sched_yield,
 * which costs peers on the same core nothing; then sleep on this rank's
 * doorbell.  Each turn does whatever progress there is on all channels.  From
 * the first sleep on, a turn also looks for what would make the wait endless:
 * the timeout, peers that are closed or dead, a cycle of ranks that wait for
 * one another, and the caller's interrupt.
 */
#define _GNU_SOURCE
#include "mem_comm.h"
#include "zc_point.h"

#include <sched.h>
#include <stdio.h>
#include <string.h>

#define SPIN_TURNS 200
#define PAUSES_A_TURN 4
#define YIELD_NS 100000u           /* with a core for every rank */
#define YIELD_CROWDED_NS 1000000u  /* without: a sleep and a wake-up cost more than the turns of the others */
#define SLEEP_FIRST_NS 1000000u
#define SLEEP_MOST_NS 50000000u
#define LOSS_CHECK_NS 10000000u
#define INTERRUPT_NS 40000000u

typedef struct waiting {
    mem_channel *channel;
    mem_group *group;
    uint32_t tag;
    uint64_t stamp;
    mem_wait_for what_for;
    const char *what;
    uint64_t start_ns, loss_ns, asked_ns, sleep_ns;
    uint64_t limit_ns;   /* 0: none but the timeout */
    int recording;       /* this wait owns the rank's wait record */
    size_t cycle_length; /* of a suspicion in world->cycle */
    uint64_t posts;      /* of this rank when it arose */
} waiting;

static int over(const waiting *w)
{
    const mem_channel *channel = w->channel;
    if (w->what_for == MEM_WAIT_COMPLETE)
        return channel->tag[w->tag].completed >= w->stamp;
    for (size_t q = 0; q < w->group->public.ranks; q++)
        if (q != w->group->public.rank && atomic_load(&channel->cells[q][w->tag].done) < w->stamp)
            return 0;
    return 1;
}

/* Members that have not posted or, once all have, are not done. Returns 1 in the first case. */
static int missing_members(const waiting *w, uint64_t members[SHM_MASK_WORDS])
{
    size_t me = w->group->public.rank, ranks = w->group->public.ranks;
    int posts = 0;
    memset(members, 0, SHM_MASK_WORDS * sizeof *members);
    for (size_t q = 0; q < ranks; q++)
        if (q != me && atomic_load(&w->channel->cells[q][w->tag].posted) < w->stamp) {
            shm_mask_add(members, q);
            posts = 1;
        }
    if (!posts)
        for (size_t q = 0; q < ranks; q++)
            if (q != me && atomic_load(&w->channel->cells[q][w->tag].done) < w->stamp)
                shm_mask_add(members, q);
    return posts;
}

static void list_members(const waiting *w, const uint64_t *members, char *text, size_t room_bytes)
{
    text[0] = '\0';
    for (size_t q = 0; q < w->group->public.ranks; q++)
        if (shm_mask_has(members, q))
            zc_list_number(text, room_bytes, mem_name(w->group, q));
}

static zc_status timed_out(const waiting *w)
{
    mem_group *group = w->group;
    uint64_t members[SHM_MASK_WORDS];
    char list[256], stopped[128], where[MEM_NAME_BYTES + 48] = "", why[240] = "all ranks must make this call, or the "
                                                                              "timeout is too short";
    int posts = missing_members(w, members);
    list_members(w, members, list, sizeof list);
    if (w->tag < w->channel->tags)
        snprintf(where, sizeof where, ", tag %u of channel '%s'", w->tag, w->channel->name);
    if (comm_stopped(&group->public, stopped, sizeof stopped))
        snprintf(why, sizeof why, COMM_STOPPED, stopped);
    return mem_fail(group, ZC_ETIMEOUT, "rank %zu waited %.1f s in %s (operation %llu%s); %s: %s; %s", mem_name(group, group->public.rank),
                    (double)(shm_now_ns() - w->start_ns) * 1e-9, w->what, (unsigned long long)w->stamp, where,
                    posts ? "missing" : "called it but did not finish", list, why);
}

/*
 * A peer that is waited for and has closed, or is dead, will not come any more
 * - unless it came just before: everything it wrote is visible once its end is,
 * so one more look decides.
 */
static zc_status look_for_losses(waiting *w)
{
    mem_group *group = w->group;
    mem_world *world = group->world;
    uint64_t members[SHM_MASK_WORDS];
    missing_members(w, members);
    for (size_t q = 0; q < group->public.ranks; q++) {
        if (!shm_mask_has(members, q))
            continue;
        const char *loss = mem_loss(group, q);
        if (!loss)
            continue;
        mem_progress(world);
        if (over(w) || group->failed != ZC_OK)
            return mem_failure(group);
        missing_members(w, members);
        if (!shm_mask_has(members, q))
            continue;
        size_t me = mem_name(group, group->public.rank), lost = mem_name(group, q);
        return mem_fail(group, ZC_EPEERLOST, "rank %zu (pid %llu) %s; rank %zu waited for it in %s (operation %llu)", lost,
                        (unsigned long long)world->control[lost]->pid, loss, me, w->what, (unsigned long long)w->stamp);
    }
    return ZC_OK;
}

/* See "Deadlock" in shm_sync.h. Publishes this rank's record and follows those of others. */
static zc_status look_for_cycles(waiting *w)
{
    mem_group *group = w->group;
    mem_world *world = group->world;
    if (world->several_threads) {
        if (w->recording) {
            shm_wait_end(world->control[world->rank]);
            world->recording = w->recording = 0;
        }
        return ZC_OK;
    }
    if (!w->recording) {
        if (world->recording) /* a wait inside the callback of another */
            return ZC_OK;
        shm_wait_begin(world->control[world->rank], w->what);
        world->recording = w->recording = 1;
    }
    uint64_t members[SHM_MASK_WORDS], missing[SHM_MASK_WORDS] = {0};
    if (missing_members(w, members))
        for (size_t q = 0; q < group->public.ranks; q++)
            if (shm_mask_has(members, q))
                shm_mask_add(missing, group->member[q]);
    shm_wait_beat(world->control[world->rank], missing);
    ZC_POINT("wait: recorded");

    if (w->cycle_length && w->posts == world->posts) { /* an interrupt callback may have posted what a peer lacks */
        int verdict = shm_cycle_check(world->control, world->cycle, w->cycle_length);
        if (verdict == 0)
            return ZC_OK;
        if (verdict == 1) {
            char text[SHM_TEXT_BYTES - 128];
            shm_cycle_describe(world->control, world->cycle, w->cycle_length, text, sizeof text);
            return mem_fail(group, ZC_EMISMATCH, "%s; all ranks must make the same calls in the same order", text);
        }
    }
    w->posts = world->posts;
    w->cycle_length = shm_cycle_find(world->control, world->ranks, world->rank, world->cycle, world->scratch);
    return ZC_OK;
}

/* Everything seen again after `sleeping` is set, as S3 demands; then sleeps. */
static void sleep_once(waiting *w, uint64_t limit_ns)
{
    mem_world *world = w->group->world;
    shm_control *own = world->control[world->rank];
    uint32_t doorbell = shm_sleep_prepare(own);
    mem_progress(world);
    if (over(w) || mem_failure(w->group) != ZC_OK)
        return;
    world->sleepers++;
    ZC_POINT("wait: about to sleep");
    pthread_mutex_unlock(&world->mutex);
    shm_sleep(own, doorbell, limit_ns);
    pthread_mutex_lock(&world->mutex);
    world->sleepers--;
}

/* One turn of the slow part. */
static zc_status slow_turn(waiting *w, uint64_t now_ns)
{
    mem_group *group = w->group;
    uint64_t spent_ns = now_ns - w->start_ns, timeout_ns = group->public.timeout_ns;
    if (spent_ns >= timeout_ns)
        return timed_out(w);
    if (now_ns - w->loss_ns >= LOSS_CHECK_NS) {
        w->loss_ns = now_ns;
        ZC_TRY(look_for_losses(w));
        if (over(w))
            return ZC_OK;
    }
    if (!w->limit_ns)
        ZC_TRY(look_for_cycles(w));
    if (group->public.interrupted && now_ns - w->asked_ns >= INTERRUPT_NS) {
        w->asked_ns = now_ns;
        pthread_mutex_unlock(&group->world->mutex);
        int stop = group->public.interrupted(group->public.interrupt_context);
        pthread_mutex_lock(&group->world->mutex);
        if (stop && !over(w))
            return mem_fail(group, ZC_EINTERRUPT, "rank %zu was interrupted in %s (operation %llu)",
                            mem_name(group, group->public.rank), w->what, (unsigned long long)w->stamp);
    }
    uint64_t left_ns = (w->limit_ns && w->limit_ns < timeout_ns ? w->limit_ns : timeout_ns) - spent_ns;
    uint64_t limit_ns = w->sleep_ns < left_ns ? w->sleep_ns : left_ns;
    sleep_once(w, limit_ns);
    w->sleep_ns = 2 * w->sleep_ns < SLEEP_MOST_NS ? 2 * w->sleep_ns : SLEEP_MOST_NS;
    return ZC_OK;
}

/* Woken by peers' posts and dones, by alarms and by other threads of this rank; bounded by the timeout. */
static zc_status wait_turns(waiting *w)
{
    mem_group *group = w->group;
    mem_world *world = group->world;
    uint64_t yield_ns = world->spin ? YIELD_NS : YIELD_CROWDED_NS;
    int turns = world->spin ? SPIN_TURNS : 0;
    for (;;) {
        mem_progress(world);
        zc_status status = mem_failure(group);
        if (status != ZC_OK || over(w))
            return status;
        if (turns > 0) {
            turns--;
            for (int i = 0; i < PAUSES_A_TURN; i++)
                shm_pause();
            continue;
        }
        uint64_t now_ns = shm_now_ns();
        if (!w->start_ns)
            w->start_ns = w->loss_ns = w->asked_ns = now_ns;
        if (w->limit_ns && now_ns - w->start_ns >= w->limit_ns)
            return ZC_OK;
        if (now_ns - w->start_ns < yield_ns) {
            pthread_mutex_unlock(&world->mutex);
            sched_yield();
            pthread_mutex_lock(&world->mutex);
            continue;
        }
        ZC_TRY(slow_turn(w, now_ns));
    }
}

zc_status mem_wait(mem_channel *channel, uint32_t tag, uint64_t stamp, mem_wait_for what_for, const char *what)
{
    waiting w = {.channel = channel, .group = channel->group, .tag = tag, .stamp = stamp, .what_for = what_for,
                 .sleep_ns = SLEEP_FIRST_NS};
    w.what = what ? what : mem_kind_name(channel->tag[tag].op.desc.kind);
    zc_status status = wait_turns(&w);
    if (w.recording) {
        mem_world *world = channel->group->world;
        shm_wait_end(world->control[world->rank]);
        world->recording = 0;
    }
    return status;
}

zc_status mem_wait_some(mem_channel *channel, uint32_t tag, uint64_t stamp, uint64_t limit_ns)
{
    waiting w = {.channel = channel, .group = channel->group, .tag = tag, .stamp = stamp,
                 .what_for = MEM_WAIT_COMPLETE, .sleep_ns = SLEEP_FIRST_NS, .limit_ns = limit_ns + 1};
    w.what = mem_kind_name(channel->tag[tag].op.desc.kind);
    return wait_turns(&w);
}
