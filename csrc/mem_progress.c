/*
 * What is done when stamps meet: comparing what the ranks called, reducing and
 * copying straight from peers' memory, and telling them when that is over.
 *
 * Pending operations of all groups are in one list, in the order in which this
 * rank posted them; a scan looks at each once.  Ranks are looked at in order,
 * from where the last scan stopped, so an operation that waits for one rank
 * costs one load.
 */
#include "mem_comm.h"

#include "cpu_kernels.h"
#include "zc_point.h"

#include <stdio.h>
#include <string.h>

static const char *const kind_names[SHM_KIND_COUNT] = {
    [SHM_EXCHANGE] = "exchange",
    [SHM_BARRIER] = "barrier",
    [SHM_CHANNEL_OPEN] = "channel_open",
    [SHM_REGION_ALLOC] = "region_alloc",
    [SHM_REGION_ALLOC_ONE_COPY] = "region_alloc (one copy)",
    [SHM_AGREE] = "agreement",
    [SHM_SPLIT] = "split",
    [SHM_ARRAY_ALL_REDUCE] = "all_reduce",
    [SHM_ARRAY_REDUCE_SCATTER] = "reduce_scatter",
    [SHM_ARRAY_ALL_GATHER] = "all_gather",
    [SHM_ARRAY_BROADCAST] = "broadcast",
    [SHM_REDUCE_SCATTER] = "reduce_scatter",
    [SHM_ALL_GATHER] = "all_gather",
    [SHM_ALL_GATHER_TO] = "all_gather_to",
    [SHM_ALL_REDUCE_WORDS] = "all_reduce_words",
    [SHM_BROADCAST] = "broadcast",
};

const char *mem_kind_name(shm_kind kind)
{
    return (unsigned)kind < SHM_KIND_COUNT && kind_names[kind] ? kind_names[kind] : "unknown operation";
}

/* ---- the list ---------------------------------------------------------- */

static void append(mem_op *op)
{
    mem_world *world = op->channel->group->world;
    op->next = NULL;
    op->previous = world->last;
    if (world->last)
        world->last->next = op;
    else
        world->first = op;
    world->last = op;
    op->pending = 1;
}

static void take_out(mem_op *op)
{
    mem_world *world = op->channel->group->world;
    if (op->previous)
        op->previous->next = op->next;
    else
        world->first = op->next;
    if (op->next)
        op->next->previous = op->previous;
    else
        world->last = op->previous;
    op->next = op->previous = NULL;
    op->pending = 0;
}

void mem_forget(mem_group *group, const mem_channel *channel)
{
    for (mem_op *op = group->world->first, *next; op; op = next) {
        next = op->next;
        if (op->channel->group == group && (!channel || op->channel == channel))
            take_out(op);
    }
}

void mem_post(mem_op *op)
{
    mem_channel *channel = op->channel;
    mem_group *group = channel->group;
    shm_cell *cell = &channel->cells[group->public.rank][op->tag];
    op->left = group->public.ranks - 1;
    append(op);
    group->world->posts++;
    ZC_POINT("post: to be told");
    cell->desc[op->stamp & 1] = op->desc;
    ZC_POINT("post: described");
    atomic_store(&cell->posted, op->stamp);
    ZC_POINT("post: told");
    mem_wake_members(group);
}

/* ---- when a peer has posted -------------------------------------------- */

static void describe(const shm_desc *desc, char *text, size_t room_bytes)
{
    const char *name = mem_kind_name(desc->kind);
    static const char *const ops[] = {"sum", "max", "min", "prod"};
    switch ((shm_kind)desc->kind) {
    case SHM_REDUCE_SCATTER:
        snprintf(text, room_bytes, "%s(%llu elements of %s a slice, region %u)", name,
                 (unsigned long long)desc->count, zc_dtype_name(desc->dtype), desc->region);
        break;
    case SHM_ARRAY_ALL_REDUCE:
    case SHM_ARRAY_REDUCE_SCATTER:
        snprintf(text, room_bytes, "%s(%llu elements of %s, %s)", name, (unsigned long long)desc->count,
                 zc_dtype_name(desc->dtype), desc->op < 4 ? ops[desc->op] : "?");
        break;
    case SHM_ALL_GATHER:
    case SHM_ALL_GATHER_TO:
        snprintf(text, room_bytes, "%s(%llu bytes a slice, region %u)", name, (unsigned long long)desc->count,
                 desc->region);
        break;
    case SHM_ALL_REDUCE_WORDS:
        snprintf(text, room_bytes, "%s(%llu words, region %u)", name, (unsigned long long)desc->count, desc->region);
        break;
    case SHM_BROADCAST:
        snprintf(text, room_bytes, "%s(%llu bytes from rank %u, region %u)", name, (unsigned long long)desc->count,
                 desc->root, desc->region);
        break;
    case SHM_ARRAY_BROADCAST:
        snprintf(text, room_bytes, "%s(%llu bytes from rank %u)", name, (unsigned long long)desc->count, desc->root);
        break;
    case SHM_CHANNEL_OPEN:
        snprintf(text, room_bytes, "%s(%llu tags)", name, (unsigned long long)desc->count);
        break;
    case SHM_BARRIER:
    case SHM_SPLIT:
        snprintf(text, room_bytes, "%s()", name);
        break;
    default:
        snprintf(text, room_bytes, "%s(%llu bytes)", name, (unsigned long long)desc->count);
    }
}

static const shm_desc *peer_desc(const mem_op *op, size_t q)
{
    return &op->channel->cells[q][op->tag].desc[op->stamp & 1];
}

static int has_posted(const mem_op *op, size_t q)
{
    return atomic_load(&op->channel->cells[q][op->tag].posted) >= op->stamp;
}

/* 1 when rank q called the same; otherwise the group has failed. */
static int agrees(const mem_op *op, size_t q)
{
    const shm_desc *own = &op->desc, *theirs = peer_desc(op, q);
    if (own->kind == theirs->kind && own->dtype == theirs->dtype && own->op == theirs->op &&
        own->root == theirs->root && own->count == theirs->count && own->region == theirs->region)
        return 1;
    char mine[128], other[128], where[MEM_NAME_BYTES + 48] = "";
    mem_channel *channel = op->channel;
    mem_group *group = channel->group;
    describe(own, mine, sizeof mine);
    describe(theirs, other, sizeof other);
    if (op->tag < channel->tags)
        snprintf(where, sizeof where, " on tag %u of channel '%s'", op->tag, channel->name);
    mem_fail(group, ZC_EMISMATCH, "rank %zu called %s and rank %zu called %s as operation %llu%s; all ranks must make "
             "the same calls with the same sizes, in the same order", mem_name(group, group->public.rank), mine,
             mem_name(group, q), other, (unsigned long long)op->stamp, where);
    return 0;
}

/* ---- the work ---------------------------------------------------------- */

/* Around work with rank q's slice: when it began, and that it is over. */
static uint64_t begin_ns_of(const mem_op *op)
{
    return op->times ? shm_now_ns() : 0;
}

static void note_times(mem_op *op, size_t q, uint64_t begin_ns)
{
    if (op->times)
        op->times[q] = (comm_times){begin_ns, shm_now_ns()};
}

/* Slice `slice` of `slice_bytes` that rank q shows in this operation. */
static const char *peer_slice(const mem_op *op, size_t q, uint64_t offset_bytes, size_t slice, size_t slice_bytes)
{
    return op->region->base[q] + offset_bytes + slice * slice_bytes;
}

static void reduce(mem_op *op)
{
    mem_group *group = op->channel->group;
    size_t me = group->public.rank, ranks = group->public.ranks;
    zc_dtype dtype = (zc_dtype)op->desc.dtype;
    size_t slice_bytes = (size_t)op->desc.count * zc_dtype_bytes(dtype);
    const void *in[SHM_RANKS_MAX];
    uint64_t begin_ns = begin_ns_of(op);
    for (size_t q = 0; q < ranks; q++) {
        const shm_desc *desc = q == me ? &op->desc : peer_desc(op, q);
        in[q] = desc->zero ? NULL : peer_slice(op, q, desc->offset_bytes, me, slice_bytes);
    }
    if (op->own && !op->desc.zero)
        in[me] = op->own;
    unsigned long mode = cpu_mode_enter();
    uint32_t flags = cpu_kernels_get()->reduce(op->to, in, ranks, (size_t)op->desc.count, dtype, op->accumulate);
    cpu_mode_leave(mode);
    if (op->flags)
        *op->flags |= flags;
    note_times(op, me, begin_ns);
}

static void add_words(mem_op *op)
{
    mem_group *group = op->channel->group;
    size_t me = group->public.rank, words = (size_t)op->desc.count;
    uint64_t *to = op->to;
    memcpy(to, op->region->base[me] + op->desc.offset_bytes, words * sizeof *to);
    for (size_t q = 0; q < group->public.ranks; q++) {
        if (q == me)
            continue;
        const uint64_t *from = (const uint64_t *)(op->region->base[q] + peer_desc(op, q)->offset_bytes);
        for (size_t w = 0; w < words; w++)
            to[w] += from[w];
    }
}

/* Rank q's slice of an all-gather goes to its place in `to`. */
static void copy_slice_to(mem_op *op, size_t q)
{
    size_t me = op->channel->group->public.rank, bytes = (size_t)op->desc.count;
    const shm_desc *desc = q == me ? &op->desc : peer_desc(op, q);
    memcpy((char *)op->to + q * bytes, op->region->base[q] + desc->offset_bytes, bytes);
}

/* Copies rank q's bytes to the same place here; a region with one copy has them already. */
static void copy_from(mem_op *op, size_t q, size_t slice, size_t bytes)
{
    mem_region *region = op->region;
    if (!bytes || (region->public.flags & COMM_ONE_COPY))
        return;
    size_t me = op->channel->group->public.rank;
    uint64_t begin_ns = begin_ns_of(op);
    cpu_kernels_get()->copy_stream(region->base[me] + op->desc.offset_bytes + slice * bytes,
                                   peer_slice(op, q, peer_desc(op, q)->offset_bytes, slice, bytes), bytes);
    note_times(op, q, begin_ns);
}

static void copy_records(mem_op *op)
{
    mem_channel *channel = op->channel;
    mem_group *group = channel->group;
    for (size_t q = 0; q < group->public.ranks; q++)
        if (q != group->public.rank)
            memcpy((char *)op->records + q * op->record_bytes,
                   channel->records[q] + (size_t)peer_desc(op, q)->slot * COMM_EXCHANGE_BYTES, op->record_bytes);
}

/* All ranks have posted (the all-gathers have copied as they came). */
static void execute(mem_op *op)
{
    mem_group *group = op->channel->group;
    switch ((shm_kind)op->desc.kind) {
    case SHM_REDUCE_SCATTER:
        reduce(op);
        break;
    case SHM_ALL_GATHER_TO:
        copy_slice_to(op, group->public.rank);
        break;
    case SHM_ALL_REDUCE_WORDS:
        add_words(op);
        break;
    case SHM_BROADCAST:
        if (op->desc.root != group->public.rank)
            copy_from(op, op->desc.root, 0, (size_t)op->desc.count);
        break;
    default:
        if (op->record_bytes)
            copy_records(op);
    }
}

void mem_execute_alone(mem_op *op)
{
    execute(op);
    op->channel->tag[op->tag].completed = op->stamp;
}

static int gather_complete(mem_op *op)
{
    mem_group *group = op->channel->group;
    size_t ranks = group->public.ranks;
    for (size_t q = group->public.rank, turn = 1; turn < ranks && op->left; turn++) {
        q = q + 1 < ranks ? q + 1 : 0; /* every rank begins with another peer */
        if (shm_mask_has(op->copied, q) || !has_posted(op, q))
            continue;
        if (!agrees(op, q))
            return 0;
        if (op->desc.kind == SHM_ALL_GATHER_TO)
            copy_slice_to(op, q);
        else
            copy_from(op, q, q, (size_t)op->desc.count);
        shm_mask_add(op->copied, q);
        op->left--;
        ZC_POINT("gather: a slice is here");
    }
    return !op->left;
}

static int all_posted(mem_op *op)
{
    mem_group *group = op->channel->group;
    for (; op->seen < group->public.ranks; op->seen++)
        if (op->seen != group->public.rank && (!has_posted(op, op->seen) || !agrees(op, op->seen)))
            return 0;
    return 1;
}

/* Goes as far as it can with one operation; when it is complete, it leaves the list. */
static void try_op(mem_op *op)
{
    mem_channel *channel = op->channel;
    mem_group *group = channel->group;
    shm_cell *own = &channel->cells[group->public.rank][op->tag];
    if (!op->executed) {
        int by_rank = op->desc.kind == SHM_ALL_GATHER || op->desc.kind == SHM_ALL_GATHER_TO;
        if (!(by_rank ? gather_complete(op) : all_posted(op)))
            return;
        ZC_POINT("operation: all have come");
        execute(op);
        op->executed = 1;
        ZC_POINT("operation: done here");
        if (op->desc.kind >= SHM_REDUCE_SCATTER || op->record_bytes) {
            atomic_store(&own->done, op->stamp);
            ZC_POINT("operation: told to be done");
            mem_wake_members(group);
        }
    }
    if (op->desc.kind >= SHM_REDUCE_SCATTER)
        for (; op->finished < group->public.ranks; op->finished++)
            if (op->finished != group->public.rank &&
                atomic_load(&channel->cells[op->finished][op->tag].done) < op->stamp)
                return;
    channel->tag[op->tag].completed = op->stamp;
    take_out(op);
    ZC_POINT("operation: complete");
    if (group->world->sleepers) /* the thread that waits for it may be another one */
        shm_wake(group->world->control[group->world->rank]);
}

/* A group that fails takes all its operations off the list, so the scan starts again then. */
void mem_progress(mem_world *world)
{
    for (mem_op *op = world->first, *next; op; op = next) {
        next = op->next;
        mem_group *group = op->channel->group;
        try_op(op);
        if (group->failed != ZC_OK)
            next = world->first;
    }
}
