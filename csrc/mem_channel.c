/*
 * Channels and regions, and the calls of comm.h on them: each fills in an
 * operation and posts it.  What happens then is in mem_progress.c.
 */
#include "mem_comm.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* A ticket is (stamp, tag); stamps begin at 1, so none is 0. */
#define TAG_BITS 20

static comm_ticket ticket_of(uint32_t tag, uint64_t stamp)
{
    return stamp << TAG_BITS | tag;
}

size_t mem_channel_area_bytes(uint32_t tags)
{
    return ((size_t)tags + 1) * sizeof(shm_cell) + (size_t)SHM_RECORD_SLOTS * COMM_EXCHANGE_BYTES;
}

zc_status mem_channel_init(mem_channel *channel, mem_group *group, const char *name, uint32_t tags,
                           char *const *areas, size_t area_offset_bytes)
{
    size_t ranks = group->public.ranks;
    channel->public.comm = &group->public;
    channel->group = group;
    channel->tags = tags;
    snprintf(channel->name, sizeof channel->name, "%s", name);
    channel->cells = zc_calloc(ranks, sizeof *channel->cells);
    channel->records = zc_calloc(ranks, sizeof *channel->records);
    channel->votes = zc_calloc(ranks, sizeof *channel->votes);
    channel->tag = zc_calloc((size_t)tags + 1, sizeof *channel->tag);
    if (!channel->cells || !channel->records || !channel->votes || !channel->tag) {
        mem_channel_clear(channel);
        return zc_fail(ZC_ENOMEM, "rank %zu: out of memory for channel '%s' with %u tags",
                       mem_name(group, group->public.rank), name, tags);
    }
    for (size_t q = 0; q < ranks; q++) {
        channel->cells[q] = (shm_cell *)(areas[q] + area_offset_bytes);
        channel->records[q] = areas[q] + area_offset_bytes + ((size_t)tags + 1) * sizeof(shm_cell);
    }
    for (uint32_t t = 0; t <= tags; t++) {
        channel->tag[t].op.channel = channel;
        channel->tag[t].op.tag = t;
    }
    return ZC_OK;
}

void mem_channel_clear(mem_channel *channel)
{
    zc_free(channel->cells);
    zc_free(channel->records);
    zc_free(channel->votes);
    zc_free(channel->tag);
    channel->cells = NULL;
    channel->records = NULL;
    channel->votes = NULL;
    channel->tag = NULL;
}

/* ---- channels ---------------------------------------------------------- */

static zc_status channel_open(mem_group *group, const char *name, uint32_t tags, mem_channel **out)
{
    mem_world *world = group->world;
    size_t ranks = group->public.ranks, me = group->public.rank;
    zc_status status = ZC_OK;
    mem_block *block = NULL;
    uint64_t *tokens = NULL;
    mem_channel *channel = NULL;

    channel = zc_calloc(1, sizeof *channel);
    tokens = zc_calloc(ranks, sizeof *tokens);
    if (!channel || !tokens)
        status = zc_fail(ZC_ENOMEM, "rank %zu: out of memory", mem_name(group, me));
    if (status == ZC_OK)
        status = mem_block_alloc(world, mem_channel_area_bytes(tags), mem_channel_area_bytes(tags), &block);
    status = mem_vote_all(&group->base, SHM_CHANNEL_OPEN, tags, "channel_open", status, block ? block->token : 0,
                          name);
    if (status == ZC_OK) {
        for (size_t q = 0; q < ranks; q++) {
            tokens[q] = group->base.votes[q].value;
            if (ranks > 1 && strncmp(group->base.votes[q].text, name, sizeof group->base.votes[q].text) != 0) {
                status = mem_fail(group, ZC_EMISMATCH, "rank %zu opens channel '%s' and rank %zu opens channel '%s'; "
                                  "all ranks must make the same calls in the same order", mem_name(group, me),
                                  name, mem_name(group, q), group->base.votes[q].text);
                break;
            }
        }
    }
    if (status == ZC_OK) {
        status = mem_blocks_map(world, group->member, ranks, me, block, tokens, mem_channel_area_bytes(tags),
                                ranks, &channel->blocks);
        if (status == ZC_OK)
            status = mem_channel_init(channel, group, name, tags, channel->blocks.payload, 0);
        status = mem_vote_all(&group->base, SHM_AGREE, tags, "channel_open", status, 0, "");
    }
    zc_free(tokens);
    if (status == ZC_OK) {
        group->channels++;
        *out = channel;
        return ZC_OK;
    }
    mem_block_fate fate = group->failed == ZC_OK ? MEM_NEVER_SHARED : MEM_UNSURE;
    if (channel && channel->blocks.payload)
        mem_blocks_release(world, &channel->blocks, fate);
    else
        mem_block_drop(world, block, ranks, fate);
    if (channel)
        mem_channel_clear(channel);
    zc_free(channel);
    return status;
}

zc_status mem_channel_open(zc_comm *comm, const char *name, uint32_t tags, comm_channel **out)
{
    mem_group *group = (mem_group *)comm;
    mem_channel *channel = NULL;
    if (tags > MEM_TAGS_MAX || strlen(name) >= MEM_NAME_BYTES)
        return zc_fail(ZC_EINVAL, "rank %zu: channel '%s' with %u tags; a name has at most %u bytes, a channel at "
                       "most %u tags", comm->rank, name, tags, MEM_NAME_BYTES - 1, MEM_TAGS_MAX);
    ZC_TRY(mem_enter(group));
    zc_status status = mem_busy_begin(&group->base);
    if (status == ZC_OK) {
        status = channel_open(group, name, tags, &channel);
        mem_busy_end(&group->base);
    }
    *out = channel ? &channel->public : NULL;
    mem_leave(group);
    return status;
}

/* The ways in for calls that only release: they work on failed and closed groups, and do nothing in a forked child. */
static int release_begin(mem_group *group)
{
    if (getpid() != group->world->pid)
        return 0;
    pthread_mutex_lock(&group->world->mutex);
    group->users++;
    return 1;
}

void mem_channel_close(comm_channel *public)
{
    mem_channel *channel = (mem_channel *)public;
    mem_group *group = channel->group;
    if (!release_begin(group))
        return;
    mem_forget(group, channel);
    mem_blocks_release(group->world, &channel->blocks, MEM_SHARED);
    mem_channel_clear(channel);
    zc_free(channel);
    group->channels--;
    mem_leave(group);
}

/* ---- regions ----------------------------------------------------------- */

static zc_status region_alloc(mem_channel *channel, size_t bytes, unsigned flags, mem_region **out)
{
    mem_group *group = channel->group;
    mem_world *world = group->world;
    size_t ranks = group->public.ranks, me = group->public.rank;
    size_t giver = flags & COMM_ONE_COPY ? 0 : ranks; /* ranks: everyone gives */
    shm_kind kind = flags & COMM_ONE_COPY ? SHM_REGION_ALLOC_ONE_COPY : SHM_REGION_ALLOC;
    zc_status status = ZC_OK;
    mem_block *block = NULL;
    uint64_t *tokens = NULL;
    mem_region *region = NULL;
    uint32_t number = ++channel->regions;

    if (!bytes)
        return mem_vote_all(channel, kind, 0, "region_alloc", ZC_OK, 0, "");
    region = zc_calloc(1, sizeof *region);
    tokens = zc_calloc(ranks, sizeof *tokens);
    if (region)
        region->base = zc_calloc(ranks, sizeof *region->base);
    if (!region || !tokens || !region->base)
        status = zc_fail(ZC_ENOMEM, "rank %zu: out of memory", mem_name(group, me));
    if (status == ZC_OK && (giver == ranks || giver == me))
        status = mem_block_alloc(world, bytes, flags & COMM_GROWS ? 0 : bytes, &block);
    status = mem_vote_all(channel, kind, bytes, "region_alloc", status, block ? block->token : 0, "");
    if (status == ZC_OK) {
        for (size_t q = 0; q < ranks; q++)
            tokens[q] = channel->votes[q].value;
        status = mem_blocks_map(world, group->member, ranks, me, block, tokens, bytes, giver, &region->blocks);
        status = mem_vote_all(channel, SHM_AGREE, bytes, "region_alloc", status, 0, "");
    }
    zc_free(tokens);
    if (status == ZC_OK) {
        for (size_t q = 0; q < ranks; q++)
            region->base[q] = region->blocks.payload[giver < ranks ? giver : q];
        region->number = number;
        region->grown_bytes = flags & COMM_GROWS ? 0 : bytes;
        region->public = (comm_region){region->base[me], bytes, &channel->public, flags};
        *out = region;
        return ZC_OK;
    }
    mem_block_fate fate = group->failed == ZC_OK ? MEM_NEVER_SHARED : MEM_UNSURE;
    if (region && region->blocks.payload)
        mem_blocks_release(world, &region->blocks, fate);
    else
        mem_block_drop(world, block, ranks, fate);
    if (region)
        zc_free(region->base);
    zc_free(region);
    return status;
}

zc_status mem_region_alloc(comm_channel *public, size_t bytes, unsigned flags, comm_region **out)
{
    mem_channel *channel = (mem_channel *)public;
    mem_group *group = channel->group;
    mem_region *region = NULL;
    ZC_TRY(mem_enter(group));
    zc_status status = mem_busy_begin(channel);
    if (status == ZC_OK) {
        status = region_alloc(channel, bytes, flags, &region);
        mem_busy_end(channel);
    }
    *out = region ? &region->public : NULL;
    mem_leave(group);
    return status;
}

zc_status mem_region_grow(comm_region *public, size_t bytes)
{
    mem_region *region = (mem_region *)public;
    mem_group *group = ((mem_channel *)public->channel)->group;
    mem_provider *provider = group->world->provider;
    zc_status status = ZC_OK;
    ZC_TRY(mem_enter(group));
    if (bytes > region->grown_bytes && region->blocks.own) {
        status = provider->ops->grow(provider, region->blocks.own->token, MEM_HEADER_BYTES + region->grown_bytes,
                                     MEM_HEADER_BYTES + bytes);
        if (status == ZC_OK)
            region->grown_bytes = bytes;
    }
    mem_leave(group);
    return status;
}

void mem_region_free(comm_region *public)
{
    mem_region *region = (mem_region *)public;
    mem_group *group = ((mem_channel *)public->channel)->group;
    if (!release_begin(group))
        return;
    mem_blocks_release(group->world, &region->blocks, MEM_SHARED);
    zc_free(region->base);
    zc_free(region);
    mem_leave(group);
}

/* ---- operations -------------------------------------------------------- */

static zc_status check_tag(const mem_channel *channel, uint32_t tag, const char *operation)
{
    if (tag < channel->tags)
        return ZC_OK;
    return zc_fail(ZC_EINVAL, "rank %zu: %s on tag %u of channel '%s', which has tags 0 to %u",
                   mem_name(channel->group, channel->group->public.rank), operation, tag, channel->name,
                   channel->tags - 1);
}

/* Where an operation notes when this rank worked on it, or NULL. Nothing is copied to a region that the ranks share. */
static comm_times *times_of(const mem_channel *channel, uint32_t tag, const shm_desc *desc, const mem_region *region)
{
    int works = desc->kind == SHM_REDUCE_SCATTER ||
                (desc->kind == SHM_ALL_GATHER && !(region->public.flags & COMM_ONE_COPY));
    return works && channel->public.times ? channel->public.times + (size_t)tag * channel->group->public.ranks : NULL;
}

/* Posts an operation on a region and tries at once whether it can be done. */
static zc_status post(mem_channel *channel, uint32_t tag, const shm_desc *desc, const mem_op *fields,
                      comm_ticket *ticket)
{
    mem_group *group = channel->group;
    mem_op *op;
    ZC_TRY(mem_enter(group));
    zc_status status = check_tag(channel, tag, mem_kind_name(desc->kind));
    if (status == ZC_OK)
        status = mem_take_op(channel, tag, desc, &op);
    if (status == ZC_OK) {
        op->region = fields->region;
        op->own = fields->own;
        op->to = fields->to;
        op->accumulate = fields->accumulate;
        op->flags = fields->flags;
        op->times = times_of(channel, tag, desc, fields->region);
        if (group->public.ranks == 1) {
            mem_execute_alone(op);
        } else {
            uint64_t stamp = op->stamp;
            mem_post(op);
            mem_progress(group->world);
            status = mem_failure(group);
            *ticket = channel->tag[tag].completed >= stamp ? 0 : ticket_of(tag, stamp);
        }
    }
    mem_leave(group);
    return status;
}

zc_status mem_reduce_scatter(comm_channel *public, zc_stream *stream, const comm_reduce_args *args,
                             comm_ticket *ticket)
{
    (void)stream;
    mem_region *region = (mem_region *)args->region;
    shm_desc desc = {.kind = SHM_REDUCE_SCATTER, .dtype = (uint8_t)args->dtype, .zero = args->zero != 0,
                     .count = args->count, .offset_bytes = args->offset_bytes, .region = region->number};
    mem_op fields = {.region = region, .own = args->own, .to = args->to, .accumulate = args->accumulate,
                     .flags = args->flags};
    return post((mem_channel *)public, args->tag, &desc, &fields, ticket);
}

zc_status mem_all_gather(comm_channel *public, zc_stream *stream, uint32_t tag, comm_region *public_region,
                         size_t offset_bytes, size_t slice_bytes, comm_ticket *ticket)
{
    (void)stream;
    mem_region *region = (mem_region *)public_region;
    shm_desc desc = {.kind = SHM_ALL_GATHER, .count = slice_bytes, .offset_bytes = offset_bytes,
                     .region = region->number};
    mem_op fields = {.region = region};
    return post((mem_channel *)public, tag, &desc, &fields, ticket);
}

zc_status mem_all_gather_to(comm_channel *public, zc_stream *stream, uint32_t tag, comm_region *public_region,
                            size_t offset_bytes, size_t slice_bytes, void *to, comm_ticket *ticket)
{
    (void)stream;
    mem_region *region = (mem_region *)public_region;
    shm_desc desc = {.kind = SHM_ALL_GATHER_TO, .count = slice_bytes, .offset_bytes = offset_bytes,
                     .region = region->number};
    mem_op fields = {.region = region, .to = to};
    return post((mem_channel *)public, tag, &desc, &fields, ticket);
}

const void *mem_peer(const comm_region *region, size_t rank)
{
    return ((const mem_region *)region)->base[rank];
}

zc_status mem_all_reduce_words(comm_channel *public, zc_stream *stream, uint32_t tag, comm_region *public_region,
                               size_t offset_bytes, size_t words, uint64_t *to, comm_ticket *ticket)
{
    (void)stream;
    mem_region *region = (mem_region *)public_region;
    shm_desc desc = {.kind = SHM_ALL_REDUCE_WORDS, .count = words, .offset_bytes = offset_bytes,
                     .region = region->number};
    mem_op fields = {.region = region, .to = to};
    return post((mem_channel *)public, tag, &desc, &fields, ticket);
}

zc_status mem_broadcast(comm_channel *public, zc_stream *stream, uint32_t tag, comm_region *public_region,
                        size_t offset_bytes, size_t bytes, size_t root, comm_ticket *ticket)
{
    (void)stream;
    mem_region *region = (mem_region *)public_region;
    shm_desc desc = {.kind = SHM_BROADCAST, .root = (uint32_t)root, .count = bytes, .offset_bytes = offset_bytes,
                     .region = region->number};
    mem_op fields = {.region = region};
    return post((mem_channel *)public, tag, &desc, &fields, ticket);
}

/* A ticket that this channel has handed out. */
static zc_status check_ticket(const mem_channel *channel, comm_ticket ticket, uint32_t *tag, uint64_t *stamp)
{
    *tag = (uint32_t)(ticket & ((1u << TAG_BITS) - 1));
    *stamp = ticket >> TAG_BITS;
    if (*tag < channel->tags && *stamp && *stamp <= channel->tag[*tag].issued)
        return ZC_OK;
    return zc_fail(ZC_EINVAL, "rank %zu: %llu is no ticket of channel '%s'",
                   mem_name(channel->group, channel->group->public.rank), (unsigned long long)ticket, channel->name);
}

zc_status mem_test(comm_channel *public, comm_ticket ticket, zc_stream *stream, int *done)
{
    (void)stream;
    mem_channel *channel = (mem_channel *)public;
    mem_group *group = channel->group;
    uint32_t tag;
    uint64_t stamp;
    ZC_TRY(mem_enter(group));
    zc_status status = check_ticket(channel, ticket, &tag, &stamp);
    if (status == ZC_OK) {
        mem_progress(group->world);
        status = mem_failure(group);
    }
    *done = status == ZC_OK && channel->tag[tag].completed >= stamp;
    mem_leave(group);
    return status;
}

zc_status mem_ticket_wait(comm_channel *public, comm_ticket ticket, zc_stream *stream)
{
    (void)stream;
    mem_channel *channel = (mem_channel *)public;
    mem_group *group = channel->group;
    uint32_t tag;
    uint64_t stamp;
    ZC_TRY(mem_enter(group));
    zc_status status = check_ticket(channel, ticket, &tag, &stamp);
    if (status == ZC_OK)
        status = mem_wait(channel, tag, stamp, MEM_WAIT_COMPLETE, NULL);
    mem_leave(group);
    return status;
}

zc_status mem_ticket_wait_some(comm_channel *public, comm_ticket ticket, zc_stream *stream, uint64_t limit_ns,
                               int *done)
{
    (void)stream;
    mem_channel *channel = (mem_channel *)public;
    mem_group *group = channel->group;
    uint32_t tag;
    uint64_t stamp;
    ZC_TRY(mem_enter(group));
    zc_status status = check_ticket(channel, ticket, &tag, &stamp);
    if (status == ZC_OK)
        status = mem_wait_some(channel, tag, stamp, limit_ns);
    *done = status == ZC_OK && channel->tag[tag].completed >= stamp;
    mem_leave(group);
    return status;
}

zc_status mem_progress_all(zc_comm *comm)
{
    mem_group *group = (mem_group *)comm;
    ZC_TRY(mem_enter(group));
    mem_progress(group->world);
    zc_status status = mem_failure(group);
    mem_leave(group);
    return status;
}

zc_status mem_public_exchange(comm_channel *public, uint32_t tag, const char *what, const void *record,
                              void *records, size_t bytes)
{
    mem_channel *channel = (mem_channel *)public;
    mem_group *group = channel->group;
    ZC_TRY(mem_enter(group));
    zc_status status = check_tag(channel, tag, "exchange");
    if (status == ZC_OK) {
        shm_desc desc = {.kind = SHM_EXCHANGE, .count = bytes};
        status = mem_exchange(channel, tag, &desc, what, record, records, bytes);
    }
    mem_leave(group);
    return status;
}
