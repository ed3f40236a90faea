/*
 * Worlds and groups on the rank's side: birth, failure, death, and what goes out.
 */
#define _GNU_SOURCE
#include "hub_server.h"
#include "hub_state.h"
#include "zc_point.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#define OUT_FIRST_BYTES ((size_t)64 << 10)

/* ---- what goes out --------------------------------------------------------------- */

void hub_flush(hub_world *world)
{
    while (world->out_end > world->out_begin) {
        ZC_POINT("hub: a rank is to send");
        ssize_t went = hub_send(world->socket.fd, world->out + world->out_begin, world->out_end - world->out_begin, NULL, 0);
        ZC_POINT("hub: a rank has sent");
        if (went < 0) {
            world->unsendable = 1; /* what has arrived may tell why, so the reader reads on */
            world->out_begin = world->out_end = 0;
        }
        if (went <= 0)
            break;
        world->out_begin += (size_t)went;
    }
    if (world->out_begin == world->out_end)
        world->out_begin = world->out_end = 0;
}

static void wake_reader(hub_world *world)
{
    uint64_t one = 1;
    if (write(world->wake_fd, &one, sizeof one) < 0)
        return; /* it is awake: the count has not been read for 2^64 - 1 times */
}

static zc_status make_room(hub_world *world, size_t bytes)
{
    size_t used = world->out_end - world->out_begin, room = world->out_room;
    if (world->out_begin && bytes > room - world->out_end) {
        memmove(world->out, world->out + world->out_begin, used);
        world->out_begin = 0;
        world->out_end = used;
    }
    while (room - used < bytes)
        room *= 2;
    if (room == world->out_room)
        return ZC_OK;
    char *out = used + bytes > HUB_BACKLOG_BYTES ? NULL : zc_realloc(world->out, room);
    if (!out)
        return zc_fail(ZC_ENOMEM, "rank %zu: no memory for %zu bytes that rank 0 has not taken yet", world->rank,
                       used + bytes);
    world->out = out;
    world->out_room = room;
    return ZC_OK;
}

static void put_span(char *to, const hub_span *span)
{
    size_t piece = span->piece_bytes ? span->piece_bytes : span->bytes;
    for (size_t at = 0, k = 0; at < span->bytes; at += piece, k++)
        memcpy(to + at, span->base + k * span->stride_bytes, piece);
}

zc_status hub_say(hub_world *world, const hub_header *header, const hub_words *words, const hub_span *data)
{
    size_t word_bytes = words ? sizeof *words : 0, data_bytes = data ? data->bytes : 0;
    hub_header whole = *header;
    if (world->unsendable || world->ending)
        return ZC_OK;
    ZC_TRY(make_room(world, sizeof whole + word_bytes + data_bytes));
    whole.magic = HUB_MAGIC;
    whole.bytes = (uint32_t)(word_bytes + data_bytes);
    char *to = world->out + world->out_end;
    memcpy(to, &whole, sizeof whole);
    if (words)
        memcpy(to + sizeof whole, words, word_bytes);
    if (data_bytes)
        put_span(to + sizeof whole + word_bytes, data);
    world->out_end += sizeof whole + word_bytes + data_bytes;
    hub_flush(world);
    if (world->out_end)
        wake_reader(world);
    return ZC_OK;
}

/* For what must be said: without it the hub could only take this rank for lost, so it shall. */
static void must_say(hub_world *world, const hub_header *header, const hub_span *data)
{
    if (hub_say(world, header, NULL, data) != ZC_OK)
        shutdown(world->socket.fd, SHUT_RDWR);
}

/* ---- groups ------------------------------------------------------------------------ */

hub_group *hub_group_new(hub_world *world, size_t room)
{
    hub_group *group = zc_calloc(1, sizeof *group);
    uint32_t *member = zc_calloc(room, sizeof *member);
    if (!group || !member) {
        zc_free(group);
        zc_free(member);
        return NULL;
    }
    group->world = world;
    group->member = member;
    group->id = HUB_OF_ONE;
    return group;
}

void hub_group_drop(hub_group *group)
{
    if (group)
        zc_free(group->member);
    zc_free(group);
}

void hub_group_join(hub_group *group, size_t ranks)
{
    hub_world *world = group->world;
    group->public.ops = &hub_ops;
    group->public.ranks = ranks;
    group->public.in_rank_order = 1;
    for (size_t q = 0; q < ranks; q++) {
        if (group->member[q] == world->rank)
            group->public.rank = q;
        group->public.local_ranks += world->host[group->member[q]] == world->host[world->rank];
    }
    group->base = (hub_channel){.public = {&group->public}, .group = group, .id = HUB_BASE, .tags = 1,
                                .tag = &group->base_tag};
    group->parted = ranks;
    group->next = world->groups;
    world->groups = group;
}

static int unused(const hub_group *group)
{
    return group->closed && !group->users && !group->channels;
}

/* Lets go of the mutex; a closed group that nobody uses any more goes, and the world with its last group. */
static void unlock(hub_group *group)
{
    hub_world *world = group->world;
    int last = 0;
    if (unused(group)) {
        hub_group **at = &world->groups;
        while (*at != group)
            at = &(*at)->next;
        *at = group->next;
        hub_group_drop(group);
        last = !world->groups;
    }
    pthread_mutex_unlock(&world->mutex);
    if (last)
        hub_world_destroy(world);
}

int hub_forked(const hub_world *world)
{
    return getpid() != world->pid;
}

zc_status hub_enter(hub_group *group)
{
    hub_world *world = group->world;
    if (hub_forked(world))
        return zc_fail(ZC_ESTATE, "rank %zu: this communicator belongs to process %d and cannot be used in process %d, "
                       "which was forked from it; a forked child may read memory but not communicate",
                       world->rank, (int)world->pid, (int)getpid());
    pthread_mutex_lock(&world->mutex);
    pthread_t self = pthread_self();
    if (!world->caller_known)
        world->caller = self;
    else if (!pthread_equal(world->caller, self))
        world->several = 1;
    world->caller_known = 1;
    group->users++;
    zc_status status = hub_failure(group);
    if (status != ZC_OK)
        hub_leave(group);
    return status;
}

void hub_leave(hub_group *group)
{
    group->users--;
    unlock(group);
}

int hub_enter_any(hub_group *group)
{
    if (hub_forked(group->world))
        return 0;
    pthread_mutex_lock(&group->world->mutex);
    group->users++;
    return 1;
}

/* ---- failure -------------------------------------------------------------------------- */

zc_status hub_failure(const hub_group *group)
{
    return group->failed == ZC_OK ? ZC_OK : zc_fail(group->failed, "%s", group->failed_text);
}

/* As later calls will return it: an interrupt belongs to one call on one rank. */
void hub_set_failed(hub_group *group, zc_status status, const char *text)
{
    group->failed = status == ZC_EINTERRUPT ? ZC_ECOMM : status;
    snprintf(group->failed_text, sizeof group->failed_text, "%s", text);
    pthread_cond_broadcast(&group->world->changed);
}

zc_status hub_fail(hub_group *group, zc_status status, const char *format, ...)
{
    char text[HUB_TEXT_BYTES];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (!text[0])
        snprintf(text, sizeof text, "%s", zc_status_text(status));
    if (group->failed == ZC_OK) {
        hub_set_failed(group, status, text);
        hub_span data = {text, strlen(text), 0, 0};
        hub_header header = {.kind = HUB_POISON, .group = group->id, .status = group->failed};
        if (!hub_alone(group))
            must_say(group->world, &header, &data);
    }
    return zc_fail(status, "%s", text);
}

void hub_lose(hub_world *world, zc_status status, const char *text)
{
    if (world->lost != ZC_OK)
        return;
    world->lost = status;
    world->unsendable = 1;
    world->out_begin = world->out_end = 0;
    for (hub_group *group = world->groups; group; group = group->next)
        if (group->failed == ZC_OK && !hub_alone(group))
            hub_set_failed(group, status, text);
    pthread_cond_broadcast(&world->changed);
}

void hub_close(zc_comm *comm)
{
    hub_group *group = (hub_group *)comm;
    hub_world *world = group->world;
    if (hub_forked(world))
        return;
    pthread_mutex_lock(&world->mutex);
    if (!group->closed) {
        char text[96];
        snprintf(text, sizeof text, "rank %zu has closed this communicator", world->rank);
        group->closed = 1;
        if (group->failed == ZC_OK)
            hub_set_failed(group, ZC_ESTATE, text);
        if (group->id != HUB_OF_ONE)
            must_say(world, &(hub_header){.kind = HUB_CLOSE, .group = group->id}, NULL);
    }
    unlock(group);
}

/* ---- worlds ----------------------------------------------------------------------------- */

zc_status hub_world_new(const hub_comm_config *config, hub_world **out)
{
    *out = NULL;
    hub_world *world = zc_calloc(1, sizeof *world);
    size_t *host = zc_malloc(config->ranks * sizeof *host);
    if (!world || !host) {
        zc_free(world);
        zc_free(host);
        return zc_fail(ZC_ENOMEM, "rank %zu: out of memory", config->rank);
    }
    memcpy(host, config->hosts, config->ranks * sizeof *host);
    world->rank = config->rank;
    world->ranks = config->ranks;
    world->pid = getpid();
    world->host = host;
    world->beat_ns = config->beat_ns ? config->beat_ns : HUB_BEAT_NS;
    world->socket.fd = world->wake_fd = -1;
    world->unsendable = 1; /* until there is a connection */
    pthread_condattr_t attributes;
    pthread_mutex_init(&world->mutex, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&world->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    *out = world;
    return ZC_OK;
}

/* Rank 0: the hub gets all sockets, and one end of a pair for rank 0 itself. */
static zc_status start_hub(hub_world *world, const int *sockets)
{
    int pair[2] = {-1, -1}, *all = zc_malloc(world->ranks * sizeof *all);
    zc_status status = ZC_OK;
    if (!all)
        status = zc_fail(ZC_ENOMEM, "rank 0: out of memory for %zu ranks", world->ranks);
    else if (zc_fault() ? (errno = EMFILE, -1) : socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair))
        status = zc_fail_errno(ZC_ESYSTEM, errno, "rank 0: no socket pair");
    if (status != ZC_OK) {
        for (size_t q = 1; q < world->ranks; q++)
            close(sockets[q]);
        zc_free(all);
        return status;
    }
    memcpy(all, sockets, world->ranks * sizeof *all);
    all[0] = pair[1];
    hub_fork_keep(&world->socket, pair[0]);
    status = hub_server_start(all, world->ranks, world->beat_ns, &world->server);
    zc_free(all);
    return status;
}

zc_status hub_world_connect(hub_world *world, const int *sockets)
{
    if (world->rank == 0)
        ZC_TRY(start_hub(world, sockets));
    else
        hub_fork_keep(&world->socket, sockets[0]);
    ZC_TRY(hub_socket_prepare(world->socket.fd));
    world->wake_fd = zc_fault() ? (errno = EMFILE, -1) : eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (world->wake_fd < 0)
        return zc_fail_errno(ZC_ESYSTEM, errno, "rank %zu: no eventfd", world->rank);
    world->out = zc_malloc(OUT_FIRST_BYTES);
    world->out_room = OUT_FIRST_BYTES;
    world->input.from_hub = 1;
    world->input.blob = hub_blob_new(HUB_PAYLOAD_BYTES); /* once and for all: no answer fails for lack of memory */
    if (!world->out || !world->input.blob)
        return zc_fail(ZC_ENOMEM, "rank %zu: out of memory", world->rank);
    world->unsendable = 0;
    hub_header hello = {.kind = HUB_HELLO, .root = (uint32_t)world->rank, .number = world->ranks,
                        .count = (uint64_t)world->pid};
    ZC_TRY(hub_say(world, &hello, NULL, NULL));
    return hub_reader_start(world);
}

void hub_world_destroy(hub_world *world)
{
    if (world->reading)
        hub_reader_end(world);
    hub_fork_close(&world->socket);
    if (world->wake_fd >= 0)
        close(world->wake_fd);
    if (world->server)
        hub_server_join(world->server);
    hub_blob_drop(world->input.blob);
    pthread_cond_destroy(&world->changed);
    pthread_mutex_destroy(&world->mutex);
    zc_free(world->out);
    zc_free(world->host);
    zc_free(world);
}
