/*
 * The calls of comm.h on a hub, but for plain arrays; hub_comm.h has the protocol.
 */
#define _GNU_SOURCE
#include "hub_state.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define TAGS_MAX ((1u << 20) - 2)
#define NAME_MAX_BYTES 47u

/* ---- channels ----------------------------------------------------------------------- */

static zc_status channel_open(hub_group *group, const char *name, uint32_t tags, hub_channel *made)
{
    zc_status status = ZC_OK;
    if (!made || !made->tag)
        status = zc_fail(ZC_ENOMEM, "rank %zu: out of memory for channel '%s' with %u tags", hub_rank(group), name,
                         tags);
    hub_request request = {.operation = HUB_CHANNEL_OPEN, .what = "channel_open", .name = name, .count = tags,
                           .status = status};
    if (!hub_alone(group)) {
        zc_status met = hub_ask(&group->base, 0, &request);
        status = status == ZC_OK ? met : status;
    }
    if (status != ZC_OK)
        return status;
    made->public.comm = &group->public;
    made->group = group;
    made->id = (uint32_t)request.value;
    made->tags = tags;
    snprintf(made->name, sizeof made->name, "%s", name);
    group->channels++;
    return ZC_OK;
}

static zc_status hub_channel_open(zc_comm *comm, const char *name, uint32_t tags, comm_channel **out)
{
    hub_group *group = (hub_group *)comm;
    if (tags > TAGS_MAX || strlen(name) > NAME_MAX_BYTES)
        return zc_fail(ZC_EINVAL, "rank %zu: channel '%s' with %u tags; a name has at most %u bytes, a channel at most "
                       "%u tags", comm->rank, name, tags, NAME_MAX_BYTES, TAGS_MAX);
    ZC_TRY(hub_enter(group));
    zc_status status = hub_busy_begin(&group->base, 0);
    if (status == ZC_OK) {
        hub_channel *made = zc_calloc(1, sizeof *made);
        if (made)
            made->tag = zc_calloc((size_t)tags + 1, sizeof *made->tag);
        status = channel_open(group, name, tags, made);
        if (status == ZC_OK)
            *out = &made->public;
        else if (made)
            zc_free(made->tag);
        if (status != ZC_OK)
            zc_free(made);
        hub_busy_end(&group->base, 0);
    }
    hub_leave(group);
    return status;
}

static void hub_channel_close(comm_channel *public)
{
    hub_channel *channel = (hub_channel *)public;
    hub_group *group = channel->group;
    if (!hub_enter_any(group))
        return;
    group->channels--;
    zc_free(channel->tag);
    zc_free(channel);
    hub_leave(group);
}

/* ---- what lies on GPUs only ------------------------------------------------------------ */

static zc_status hub_region_alloc(comm_channel *public, size_t bytes, unsigned flags, comm_region **out)
{
    (void)bytes, (void)flags, (void)out;
    return zc_fail(ZC_EINVAL, "rank %zu: ranks on several hosts share what lies on GPUs only, and this memory is a "
                   "CPU's; move the model to GPUs, or keep all ranks on one host",
                   hub_rank(((hub_channel *)public)->group));
}

static zc_status no_ticket(const comm_channel *public, comm_ticket ticket)
{
    const hub_channel *channel = (const hub_channel *)public;
    return zc_fail(ZC_EINVAL, "rank %zu: %llu is no ticket of channel '%s', which hands out none",
                   hub_rank(channel->group), (unsigned long long)ticket, channel->name);
}

static zc_status hub_test(comm_channel *channel, comm_ticket ticket, zc_stream *stream, int *done)
{
    (void)stream, (void)done;
    return no_ticket(channel, ticket);
}

static zc_status hub_wait(comm_channel *channel, comm_ticket ticket, zc_stream *stream)
{
    (void)stream;
    return no_ticket(channel, ticket);
}

static zc_status hub_wait_some(comm_channel *channel, comm_ticket ticket, zc_stream *stream, uint64_t limit_ns,
                               int *done)
{
    (void)stream, (void)limit_ns, (void)done;
    return no_ticket(channel, ticket);
}

/* ---- meetings ---------------------------------------------------------------------------- */

static zc_status exchange(hub_channel *channel, uint32_t tag, const char *what, const void *record, void *records,
                          size_t bytes)
{
    hub_group *group = channel->group;
    if (hub_alone(group)) {
        if (bytes)
            memmove(records, record, bytes);
        return ZC_OK;
    }
    hub_request request = {.operation = HUB_EXCHANGE, .what = what, .count = bytes,
                           .from = {(char *)(uintptr_t)record, bytes, 0, 0},
                           .to = {records, bytes * group->public.ranks, 0, 0}};
    return hub_ask(channel, tag, &request);
}

static zc_status hub_exchange(comm_channel *public, uint32_t tag, const char *what, const void *record, void *records,
                              size_t bytes)
{
    hub_channel *channel = (hub_channel *)public;
    hub_group *group = channel->group;
    if (tag >= channel->tags)
        return zc_fail(ZC_EINVAL, "rank %zu: %s on tag %u of channel '%s', which has tags 0 to %u", hub_rank(group),
                       what, tag, channel->name, channel->tags - 1);
    ZC_TRY(hub_enter(group));
    zc_status status = hub_busy_begin(channel, tag);
    if (status == ZC_OK) {
        status = exchange(channel, tag, what, record, records, bytes);
        hub_busy_end(channel, tag);
    }
    hub_leave(group);
    return status;
}

/* A call that carries nothing: all ranks are there. */
static zc_status meet(hub_group *group, hub_operation operation, const char *what)
{
    hub_request request = {.operation = (uint8_t)operation, .what = what};
    ZC_TRY(hub_enter(group));
    zc_status status = hub_busy_begin(&group->base, 0);
    if (status == ZC_OK) {
        status = hub_alone(group) ? ZC_OK : hub_ask(&group->base, 0, &request);
        hub_busy_end(&group->base, 0);
    }
    hub_leave(group);
    return status;
}

static zc_status hub_barrier(zc_comm *comm)
{
    return meet((hub_group *)comm, HUB_BARRIER, "barrier");
}

/* ---- split ---------------------------------------------------------------------------------- */

static zc_status split(hub_group *group, int64_t color, hub_group **out)
{
    zc_status status = ZC_OK;
    hub_group *made = NULL;
    if (color >= 0 && !(made = hub_group_new(group->world, group->public.ranks)))
        status = zc_fail(ZC_ENOMEM, "rank %zu: out of memory", hub_rank(group));
    if (made) {
        made->public.timeout_ns = group->public.timeout_ns;
        made->public.interrupted = group->public.interrupted;
        made->public.interrupt_context = group->public.interrupt_context;
    }
    hub_request request = {.operation = HUB_SPLIT, .what = "split", .count = (uint64_t)color, .status = status,
                           .made = made};
    if (!hub_alone(group)) {
        zc_status met = hub_ask(&group->base, 0, &request); /* makes it a group, so that no news of it is missed */
        status = status == ZC_OK ? met : status;
    } else if (made) {
        made->member[0] = group->member[0];
        hub_group_join(made, 1);
    }
    if (status != ZC_OK)
        hub_group_drop(made);
    else
        *out = made;
    return status;
}

static zc_status hub_split(zc_comm *comm, int64_t color, zc_comm **out)
{
    hub_group *group = (hub_group *)comm, *made = NULL;
    ZC_TRY(hub_enter(group));
    zc_status status = hub_busy_begin(&group->base, 0);
    if (status == ZC_OK) {
        status = split(group, color, &made);
        hub_busy_end(&group->base, 0);
    }
    *out = made ? &made->public : NULL;
    hub_leave(group);
    return status;
}

/* ---- without waiting --------------------------------------------------------------------------- */

static zc_status hub_progress(zc_comm *comm)
{
    hub_group *group = (hub_group *)comm;
    ZC_TRY(hub_enter(group));
    hub_leave(group);
    return ZC_OK;
}

static zc_status hub_watch(zc_comm *comm, const char *what)
{
    hub_group *group = (hub_group *)comm;
    if (!hub_enter_any(group))
        return zc_fail(ZC_ESTATE, "rank %zu: a forked child has no communicator", group->world->rank);
    zc_status status = hub_failure(group);
    if (status == ZC_OK && group->parted < group->public.ranks)
        status = hub_fail(group, ZC_EPEERLOST, "rank %u has closed its communicator; rank %zu waited for it in %s",
                          group->member[group->parted], hub_rank(group), what);
    hub_leave(group);
    return status;
}

static zc_status hub_declare(zc_comm *comm, uint32_t line, uint64_t detail, const char *what)
{
    hub_group *group = (hub_group *)comm;
    hub_words words;
    memset(&words, 0, sizeof words);
    snprintf(words.what, sizeof words.what, "%s", what);
    ZC_TRY(hub_enter(group));
    hub_header header = {.kind = HUB_DECLARE, .group = group->id, .tag = line, .count = detail};
    zc_status status = ZC_OK;
    group->declared[line]++;
    if (!hub_alone(group))
        status = hub_say(group->world, &header, &words, NULL);
    if (status != ZC_OK)
        hub_fail(group, status, "%s", zc_last_error()); /* otherwise this rank would be one behind for ever */
    hub_leave(group);
    return status;
}

static size_t hub_behind(zc_comm *comm, uint32_t line, uint64_t number, char *text, size_t room_bytes)
{
    hub_group *group = (hub_group *)comm;
    size_t behind = 0;
    if (!hub_enter_any(group))
        return 0;
    if (!hub_alone(group)) {
        behind = group->closed ? 0 : hub_ask_behind(group, line, number, text, room_bytes);
    } else if (group->declared[line] < number) {
        zc_list_number(text, room_bytes, hub_rank(group));
        behind = 1;
    }
    hub_leave(group);
    return behind;
}

static void hub_poison(zc_comm *comm, zc_status status, const char *why)
{
    hub_group *group = (hub_group *)comm;
    if (!hub_enter_any(group))
        return;
    if (group->failed == ZC_OK && status != ZC_OK)
        hub_fail(group, status, "%s", why);
    hub_leave(group);
}

const comm_ops hub_ops = {
    /* Without regions there are no operations on them: comm.c calls none of those. */
    .name = "tcp",
    .ordered = 0,
    .channel_open = hub_channel_open,
    .channel_close = hub_channel_close,
    .region_alloc = hub_region_alloc,
    .test = hub_test,
    .wait = hub_wait,
    .wait_some = hub_wait_some,
    .progress = hub_progress,
    .watch = hub_watch,
    .declare = hub_declare,
    .behind = hub_behind,
    .exchange = hub_exchange,
    .array_all_reduce = hub_array_all_reduce,
    .array_reduce_scatter = hub_array_reduce_scatter,
    .array_all_gather = hub_array_all_gather,
    .array_broadcast = hub_array_broadcast,
    .barrier = hub_barrier,
    .split = hub_split,
    .poison = hub_poison,
    .close = hub_close,
};

/* ---- opening --------------------------------------------------------------------------------------- */

static void close_sockets(const hub_comm_config *config)
{
    if (!config->sockets)
        return;
    if (config->rank == 0)
        for (size_t q = 1; q < config->ranks; q++)
            close(config->sockets[q]);
    else
        close(config->sockets[0]);
}

static zc_status check(const hub_comm_config *config)
{
    if (config->ranks >= 1 && config->ranks <= HUB_RANKS_MAX && config->rank < config->ranks)
        return ZC_OK;
    return zc_fail(ZC_EINVAL, "rank %zu of %zu; there may be 1 to %u ranks on several hosts, numbered from 0",
                   config->rank, config->ranks, HUB_RANKS_MAX);
}

zc_status hub_comm_open(const hub_comm_config *config, zc_comm **out)
{
    hub_world *world = NULL;
    hub_group *group = NULL;
    char why[HUB_TEXT_BYTES];
    *out = NULL;
    zc_status status = check(config);
    if (status == ZC_OK)
        status = hub_fork_prepare();
    if (status == ZC_OK)
        status = hub_world_new(config, &world);
    if (status == ZC_OK && !(group = hub_group_new(world, config->ranks)))
        status = zc_fail(ZC_ENOMEM, "rank %zu: out of memory", config->rank);
    if (status != ZC_OK) {
        close_sockets(config);
        if (world)
            hub_world_destroy(world);
        return status;
    }
    for (size_t q = 0; q < config->ranks; q++)
        group->member[q] = (uint32_t)q;
    group->public.timeout_ns = config->timeout_ns;
    group->public.interrupted = config->interrupted;
    group->public.interrupt_context = config->interrupt_context;
    hub_group_join(group, config->ranks);
    if (config->ranks > 1) {
        group->id = 0;
        status = hub_world_connect(world, config->sockets);
    }
    if (status == ZC_OK)
        status = meet(group, HUB_START, "start");
    if (status != ZC_OK) {
        snprintf(why, sizeof why, "%s", zc_last_error());
        hub_close(&group->public);
        return zc_fail(status, "%s", why);
    }
    *out = &group->public;
    return ZC_OK;
}
