/*
 * Birth and death of worlds and groups; the way into and out of every call;
 * how a group fails.
 *
 * A world lives as long as one of its groups; a group lives until it is
 * closed, its channels are closed and no thread is inside a call on it.
 */
#define _GNU_SOURCE
#include "mem_comm.h"
#include "zc_point.h"

#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static size_t home_area_bytes(void)
{
    return (sizeof(mem_home) + SHM_LINE_BYTES - 1) / SHM_LINE_BYTES * SHM_LINE_BYTES;
}

static size_t home_bytes(void)
{
    return home_area_bytes() + mem_channel_area_bytes(0) + 2 * MEM_STAGING_BYTES;
}

size_t mem_cores(void)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        return (size_t)CPU_COUNT(&set);
    long online = sysconf(_SC_NPROCESSORS_ONLN); /* more processors than a cpu_set_t can name */
    return online > 0 ? (size_t)online : 1;
}

/* ---- worlds ------------------------------------------------------------ */

zc_status mem_world_create(mem_provider *provider, size_t rank, size_t ranks, int spin, mem_world **out)
{
    *out = NULL;
    mem_world *world = zc_calloc(1, sizeof *world);
    if (!world) {
        provider->ops->destroy(provider);
        return zc_fail(ZC_ENOMEM, "rank %zu: out of memory", rank);
    }
    world->provider = provider;
    world->rank = rank;
    world->ranks = ranks;
    world->spin = spin;
    world->pid = getpid();
    pthread_mutex_init(&world->mutex, NULL);
    zc_status status = ZC_OK;
    world->control = zc_calloc(ranks, sizeof *world->control);
    world->cycle = zc_calloc(ranks, sizeof *world->cycle);
    world->scratch = zc_calloc(2 * ranks, sizeof *world->scratch);
    if (!world->control || !world->cycle || !world->scratch)
        status = zc_fail(ZC_ENOMEM, "rank %zu: out of memory", rank);
    if (status == ZC_OK)
        status = mem_block_alloc(world, home_bytes(), home_bytes(), &world->home);
    if (status != ZC_OK) {
        mem_world_destroy(world);
        return status;
    }
    mem_home *home = (mem_home *)mem_block_payload(world->home);
    home->control.pid = (uint64_t)world->pid;
    *out = world;
    return ZC_OK;
}

/* Blocks that peers still look at stay theirs: this rank only lets go of its own view. */
void mem_world_destroy(mem_world *world)
{
    if (!world)
        return;
    while (world->blocks) {
        mem_block *block = world->blocks;
        world->blocks = block->next;
        world->provider->ops->leave(world->provider, block->memory, block->bytes);
        zc_free(block);
    }
    world->provider->ops->destroy(world->provider);
    pthread_mutex_destroy(&world->mutex);
    zc_free(world->control);
    zc_free(world->cycle);
    zc_free(world->scratch);
    zc_free(world);
}

/* ---- groups ------------------------------------------------------------ */

/* Everything but the blocks; half-made groups are allowed. */
static void group_free(mem_group *group)
{
    mem_channel_clear(&group->base);
    zc_free(group->member);
    zc_free(group->area);
    zc_free(group->staging);
    zc_free(group);
}

static mem_group *group_new(mem_world *world, size_t rank, size_t ranks, uint64_t timeout_ns)
{
    mem_group *group = zc_calloc(1, sizeof *group);
    if (!group)
        return NULL;
    group->world = world;
    group->public.ops = &mem_comm_ops;
    group->public.rank = rank;
    group->public.ranks = ranks;
    group->public.local_ranks = ranks;
    group->public.in_rank_order = 1;
    group->public.timeout_ns = timeout_ns;
    group->member = zc_calloc(ranks, sizeof *group->member);
    group->area = zc_calloc(ranks, sizeof *group->area);
    group->staging = zc_calloc(ranks, sizeof *group->staging);
    if (!group->member || !group->area || !group->staging) {
        group_free(group);
        return NULL;
    }
    return group;
}

/* Once the homes are mapped: finds everything in them. */
static zc_status group_bind(mem_group *group, const char *name)
{
    for (size_t q = 0; q < group->public.ranks; q++) {
        char *payload = group->blocks.payload[q];
        group->area[q] = &((mem_home *)payload)->group;
        group->staging[q] = payload + home_area_bytes() + mem_channel_area_bytes(0);
    }
    return mem_channel_init(&group->base, group, name, 0, group->blocks.payload, home_area_bytes());
}

zc_status mem_world_attach(mem_world *world, const uint64_t *tokens, uint64_t timeout_ns, zc_comm **out)
{
    *out = NULL;
    mem_group *group = group_new(world, world->rank, world->ranks, timeout_ns);
    if (!group)
        return zc_fail(ZC_ENOMEM, "rank %zu: out of memory", world->rank);
    for (size_t q = 0; q < world->ranks; q++)
        group->member[q] = q;
    zc_status status = mem_blocks_map(world, group->member, world->ranks, world->rank, world->home, tokens,
                                      home_bytes(), world->ranks, &group->blocks);
    if (status == ZC_OK)
        status = group_bind(group, "world");
    if (status != ZC_OK) {
        group->blocks.own = NULL; /* stays the world's */
        mem_blocks_release(world, &group->blocks, MEM_NEVER_SHARED);
        group_free(group);
        return status;
    }
    for (size_t q = 0; q < world->ranks; q++)
        world->control[q] = &((mem_home *)group->blocks.payload[q])->control;
    world->groups = group;
    *out = &group->public;
    return ZC_OK;
}

static int unused(const mem_group *group)
{
    return group->closed && !group->users && !group->channels;
}

/*
 * Gives up a closed group that nobody uses any more, and the world with its
 * last group.  The world's own group is the first that was made, so the last in
 * the list; it stays until it is alone, because its homes hold the controls.
 * The mutex is held on entry and not on return.
 */
static void group_finish(mem_group *group)
{
    mem_world *world = group->world;
    while (group && unused(group) && (group->blocks.own != world->home || world->groups == group)) {
        mem_group **at = &world->groups;
        while (*at != group)
            at = &(*at)->next;
        *at = group->next;
        mem_blocks_release(world, &group->blocks, MEM_SHARED);
        group_free(group);
        group = world->groups;
    }
    ZC_POINT("close: memory let go");
    int last = !world->groups;
    pthread_mutex_unlock(&world->mutex);
    if (last)
        mem_world_destroy(world);
}

static void group_unlock(mem_group *group)
{
    if (unused(group))
        group_finish(group);
    else
        pthread_mutex_unlock(&group->world->mutex);
}

static int forked(const mem_world *world)
{
    return getpid() != world->pid;
}

zc_status mem_enter(mem_group *group)
{
    mem_world *world = group->world;
    if (forked(world))
        return zc_fail(ZC_ESTATE, "rank %zu: this communicator belongs to process %d and cannot be used in process %d, "
                       "which was forked from it; a forked child may read memory but not communicate",
                       world->rank, (int)world->pid, (int)getpid());
    pthread_mutex_lock(&world->mutex);
    pthread_t self = pthread_self();
    if (!world->thread_known) {
        world->thread = self;
        world->thread_known = 1;
    } else if (!pthread_equal(world->thread, self)) {
        world->several_threads = 1;
    }
    group->users++;
    zc_status status = mem_failure(group);
    if (status != ZC_OK)
        mem_leave(group);
    return status;
}

void mem_leave(mem_group *group)
{
    group->users--;
    group_unlock(group);
}

/* Waits for another thread of this rank, which is inside a call that ends by itself. */
zc_status mem_busy_begin(mem_channel *channel)
{
    mem_group *group = channel->group;
    uint64_t asked_ns = shm_now_ns();
    while (channel->busy) {
        if (pthread_equal(channel->busy_thread, pthread_self()))
            return zc_fail(ZC_ESTATE, "rank %zu: a collective call from inside a wait of the same communicator "
                           "(a signal handler?)", mem_name(group, group->public.rank));
        pthread_mutex_unlock(&group->world->mutex);
        nanosleep(&(struct timespec){0, 200000}, NULL);
        int stop = 0;
        if (shm_now_ns() - asked_ns > 50000000u) {
            asked_ns = shm_now_ns();
            stop = group->public.interrupted && group->public.interrupted(group->public.interrupt_context);
        }
        pthread_mutex_lock(&group->world->mutex);
        if (stop)
            return mem_fail(group, ZC_EINTERRUPT, "rank %zu was interrupted while it waited for another of its "
                            "threads", mem_name(group, group->public.rank));
        zc_status status = mem_failure(group);
        if (status != ZC_OK)
            return status;
    }
    channel->busy = 1;
    channel->busy_thread = pthread_self();
    return ZC_OK;
}

void mem_busy_end(mem_channel *channel)
{
    channel->busy = 0;
}

/* ---- failure ----------------------------------------------------------- */

void mem_wake_members(mem_group *group)
{
    for (size_t q = 0; q < group->public.ranks; q++)
        if (q != group->public.rank)
            shm_wake(group->world->control[group->member[q]]);
}

/* Other threads of this rank that sleep look again. */
static void wake_own(mem_world *world)
{
    if (world->sleepers)
        shm_wake(world->control[world->rank]);
}

/* Status and text as later calls will return them: an interrupt belongs to one call on one rank. */
static void set_failed(mem_group *group, zc_status status, const char *text)
{
    group->failed = status == ZC_EINTERRUPT ? ZC_ECOMM : status;
    snprintf(group->failed_text, sizeof group->failed_text, "%s", text);
    mem_forget(group, NULL);
    wake_own(group->world);
}

/* The alarm of every other member, where nobody was earlier: `reporter` has written why. */
static void raise_alarms(mem_group *group, size_t reporter)
{
    size_t me = group->public.rank;
    for (size_t q = 0; q < group->public.ranks; q++) {
        uint32_t none = 0;
        if (q == me)
            continue;
        atomic_compare_exchange_strong(&group->area[q]->alarm, &none, (uint32_t)reporter + 1);
        ZC_POINT("failure: an alarm is set");
    }
    mem_wake_members(group);
}

zc_status mem_fail(mem_group *group, zc_status status, const char *format, ...)
{
    char text[SHM_TEXT_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);

    size_t me = group->public.rank;
    if (group->failed == ZC_OK) {
        set_failed(group, status, text);
        ZC_POINT("failure: to be told");
        shm_poison_write(group->area[me], group->failed, text);
        ZC_POINT("failure: written");
        raise_alarms(group, me);
    }
    return zc_fail(status, "%s", text);
}

zc_status mem_failure(mem_group *group)
{
    if (group->failed == ZC_OK) {
        uint32_t alarm = atomic_load(&group->area[group->public.rank]->alarm);
        if (alarm == 0)
            return ZC_OK;
        char text[SHM_TEXT_BYTES], reported[SHM_TEXT_BYTES + 64];
        size_t reporter = alarm - 1;
        zc_status status = reporter < group->public.ranks ? shm_poison_read(group->area[reporter], text) : ZC_OK;
        if (status == ZC_OK)
            return mem_fail(group, ZC_ECOMM, "rank %zu was told that the group failed, but not why",
                            mem_name(group, group->public.rank));
        snprintf(reported, sizeof reported, "rank %zu reported: %s", mem_name(group, reporter), text);
        set_failed(group, status, reported);
        raise_alarms(group, reporter); /* the reporter may have died before it had told everyone */
    }
    return zc_fail(group->failed, "%s", group->failed_text);
}

static void mem_poison(zc_comm *comm, zc_status status, const char *why)
{
    mem_group *group = (mem_group *)comm;
    if (mem_enter(group) != ZC_OK)
        return;
    mem_fail(group, status, "%s", why);
    mem_leave(group);
}

const char *mem_loss(const mem_group *group, size_t rank)
{
    mem_provider *provider = group->world->provider;
    if (atomic_load(&group->area[rank]->closed))
        return "has closed its communicator";
    return provider->ops->dead(provider, group->member[rank]) ? "is gone" : NULL;
}

static size_t mem_stopped(zc_comm *comm, char *text, size_t room_bytes)
{
    mem_group *group = (mem_group *)comm;
    mem_provider *provider = group->world->provider;
    size_t stopped = 0;
    for (size_t q = 0; provider->ops->stopped && q < comm->ranks; q++) {
        if (q == comm->rank || !provider->ops->stopped(provider, group->member[q]))
            continue;
        zc_list_number(text, room_bytes, mem_name(group, q));
        stopped++;
    }
    return stopped;
}

static zc_status mem_watch(zc_comm *comm, const char *what)
{
    mem_group *group = (mem_group *)comm;
    mem_world *world = group->world;
    size_t me = mem_name(group, group->public.rank);
    if (forked(world))
        return zc_fail(ZC_ESTATE, "rank %zu: a forked child has no communicator", me);
    pthread_mutex_lock(&world->mutex);
    zc_status status = mem_failure(group);
    for (size_t q = 0; status == ZC_OK && q < group->public.ranks; q++) {
        const char *loss = q == group->public.rank ? NULL : mem_loss(group, q);
        size_t lost = mem_name(group, q);
        if (loss)
            status = mem_fail(group, ZC_EPEERLOST, "rank %zu (pid %llu) %s; rank %zu waited for it in %s", lost,
                              (unsigned long long)world->control[lost]->pid, loss, me, what);
    }
    pthread_mutex_unlock(&world->mutex);
    return status;
}

static void mem_close(zc_comm *comm)
{
    mem_group *group = (mem_group *)comm;
    mem_world *world = group->world;
    if (forked(world))
        return;
    pthread_mutex_lock(&world->mutex);
    if (!group->closed) {
        group->closed = 1;
        if (group->failed == ZC_OK) {
            char text[96];
            snprintf(text, sizeof text, "rank %zu has closed this communicator",
                     mem_name(group, group->public.rank));
            set_failed(group, ZC_ESTATE, text);
        }
        ZC_POINT("close: to be told");
        atomic_store(&group->area[group->public.rank]->closed, 1);
        ZC_POINT("close: told");
        mem_wake_members(group);
    }
    group_unlock(group);
}

/* ---- split ------------------------------------------------------------- */

static zc_status split(mem_group *group, int64_t color, mem_group **out)
{
    mem_world *world = group->world;
    mem_group *made = NULL;
    mem_block *home = NULL;
    uint64_t *tokens = NULL;
    size_t me = group->public.rank, ranks = 0, rank = 0;

    ZC_TRY(mem_vote_all(&group->base, SHM_SPLIT, 0, "split", ZC_OK, (uint64_t)color, ""));
    for (size_t q = 0; q < group->public.ranks; q++)
        if ((int64_t)group->base.votes[q].value == color) {
            rank += q < me;
            ranks++;
        }

    zc_status status = ZC_OK;
    if (color >= 0) {
        made = group_new(world, rank, ranks, group->public.timeout_ns);
        tokens = zc_calloc(ranks, sizeof *tokens);
        if (!made || !tokens)
            status = zc_fail(ZC_ENOMEM, "rank %zu: out of memory", mem_name(group, me));
        else
            status = mem_block_alloc(world, home_bytes(), home_bytes(), &home);
    }
    if (status == ZC_OK && made) {
        made->public.interrupted = group->public.interrupted;
        made->public.interrupt_context = group->public.interrupt_context;
        for (size_t q = 0, at = 0; q < group->public.ranks; q++)
            if ((int64_t)group->base.votes[q].value == color)
                made->member[at++] = group->member[q];
    }
    status = mem_vote_all(&group->base, SHM_AGREE, 1, "split", status, home ? home->token : 0, "");
    if (status == ZC_OK && made) {
        for (size_t q = 0, at = 0; q < group->public.ranks && at < ranks; q++)
            if (group->member[q] == made->member[at])
                tokens[at++] = group->base.votes[q].value;
        status = mem_blocks_map(world, made->member, ranks, rank, home, tokens, home_bytes(), ranks, &made->blocks);
        if (status == ZC_OK)
            status = group_bind(made, "split");
        status = mem_vote_all(&group->base, SHM_AGREE, 2, "split", status, 0, "");
    } else if (status == ZC_OK) {
        status = mem_vote_all(&group->base, SHM_AGREE, 2, "split", ZC_OK, 0, "");
    }

    mem_block_fate fate = group->failed == ZC_OK ? MEM_NEVER_SHARED : MEM_UNSURE;
    zc_free(tokens);
    if (status == ZC_OK) {
        if (made) {
            made->next = world->groups;
            world->groups = made;
        }
        *out = made;
        return ZC_OK;
    }
    if (made && made->blocks.payload)
        mem_blocks_release(world, &made->blocks, fate);
    else
        mem_block_drop(world, home, ranks, fate);
    if (made)
        group_free(made);
    return status;
}

static zc_status mem_split(zc_comm *comm, int64_t color, zc_comm **out)
{
    mem_group *group = (mem_group *)comm, *made = NULL;
    ZC_TRY(mem_enter(group));
    zc_status status = mem_busy_begin(&group->base);
    if (status == ZC_OK) {
        status = split(group, color, &made);
        mem_busy_end(&group->base);
    }
    *out = made ? &made->public : NULL;
    mem_leave(group);
    return status;
}

const comm_ops mem_comm_ops = {
    .name = "shared memory",
    .ordered = 0,
    .channel_open = mem_channel_open,
    .channel_close = mem_channel_close,
    .region_alloc = mem_region_alloc,
    .region_grow = mem_region_grow,
    .region_free = mem_region_free,
    .reduce_scatter = mem_reduce_scatter,
    .all_gather = mem_all_gather,
    .all_gather_to = mem_all_gather_to,
    .peer = mem_peer,
    .all_reduce_words = mem_all_reduce_words,
    .broadcast = mem_broadcast,
    .test = mem_test,
    .wait = mem_ticket_wait,
    .wait_some = mem_ticket_wait_some,
    .progress = mem_progress_all,
    .watch = mem_watch,
    .declare = mem_declare,
    .behind = mem_behind,
    .stopped = mem_stopped,
    .exchange = mem_public_exchange,
    .array_all_reduce = mem_array_all_reduce,
    .array_reduce_scatter = mem_array_reduce_scatter,
    .array_all_gather = mem_array_all_gather,
    .array_broadcast = mem_array_broadcast,
    .barrier = mem_barrier,
    .split = mem_split,
    .poison = mem_poison,
    .close = mem_close,
};
