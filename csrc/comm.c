/*
 * The calls of comm.h: checks of arguments that are the same for every
 * backend, defaults, ticket 0; then the backend's function.
 */
#include "comm.h"

#include <stdio.h>
#include <string.h>

/* Whether count elements fit behind offset in a region, in all `parts` parts. */
static zc_status check_range(const comm_channel *channel, const char *operation, const comm_region *region,
                             size_t offset_bytes, size_t parts, size_t count, size_t elem_bytes)
{
    size_t rank = channel->comm->rank;
    if (!region)
        return zc_fail(ZC_EINVAL, "rank %zu: %s needs a region", rank, operation);
    if (region->channel != channel)
        return zc_fail(ZC_EINVAL, "rank %zu: %s with a region of another channel", rank, operation);
    if (offset_bytes % elem_bytes)
        return zc_fail(ZC_EINVAL, "rank %zu: %s at offset %zu, which is no multiple of the element's %zu bytes", rank,
                       operation, offset_bytes, elem_bytes);
    if (offset_bytes > region->bytes || count > (region->bytes - offset_bytes) / elem_bytes / parts)
        return zc_fail(ZC_EINVAL, "rank %zu: %s of %zu x %zu elements of %zu bytes at offset %zu goes over the end of "
                       "a region of %zu bytes", rank, operation, parts, count, elem_bytes, offset_bytes,
                       region->bytes);
    return ZC_OK;
}

static zc_status check_array(const zc_comm *comm, const char *operation, const void *array, size_t parts, size_t count,
                             size_t elem_bytes)
{
    if (!elem_bytes)
        return zc_fail(ZC_ETYPE, "rank %zu: %s of an unknown element type", comm->rank, operation);
    if (!array && count)
        return zc_fail(ZC_EINVAL, "rank %zu: %s of %zu elements at NULL", comm->rank, operation, count);
    if (count > (size_t)-1 / 2 / elem_bytes / parts)
        return zc_fail(ZC_EINVAL, "rank %zu: %s of %zu x %zu elements is more than memory can hold", comm->rank,
                       operation, parts, count);
    return ZC_OK;
}

static zc_status check_op(const zc_comm *comm, const char *operation, comm_op op)
{
    if ((unsigned)op > COMM_PROD)
        return zc_fail(ZC_EINVAL, "rank %zu: %s with operation number %d; there are sum, max, min and prod",
                       comm->rank, operation, (int)op);
    return ZC_OK;
}

static zc_status check_root(const zc_comm *comm, const char *operation, size_t root)
{
    if (root >= comm->ranks)
        return zc_fail(ZC_EINVAL, "rank %zu: %s from rank %zu of %zu", comm->rank, operation, root, comm->ranks);
    return ZC_OK;
}

/* ---- channels and regions ---------------------------------------------- */

zc_status comm_channel_open(zc_comm *comm, const char *name, uint32_t tags, comm_channel **out)
{
    *out = NULL;
    return comm->ops->channel_open(comm, name ? name : "", tags, out);
}

void comm_channel_close(comm_channel *channel)
{
    if (channel)
        channel->comm->ops->channel_close(channel);
}

zc_status comm_region_alloc(comm_channel *channel, size_t bytes, unsigned flags, comm_region **out)
{
    *out = NULL;
    if (flags & ~(COMM_ONE_COPY | COMM_GROWS))
        return zc_fail(ZC_EINVAL, "rank %zu: unknown region flags %#x", channel->comm->rank, flags);
    return channel->comm->ops->region_alloc(channel, bytes, flags, out);
}

zc_status comm_region_grow(comm_region *region, size_t bytes)
{
    if (bytes > region->bytes)
        return zc_fail(ZC_EINVAL, "rank %zu: a region of %zu bytes cannot grow to %zu", region->channel->comm->rank,
                       region->bytes, bytes);
    return region->flags & COMM_GROWS ? region->channel->comm->ops->region_grow(region, bytes) : ZC_OK;
}

void comm_region_free(comm_region *region)
{
    if (region)
        region->channel->comm->ops->region_free(region);
}

zc_status comm_reserve(comm_channel *channel, size_t count, zc_dtype dtype, size_t *bytes)
{
    *bytes = 0;
    return channel->comm->ops->reserve ? channel->comm->ops->reserve(channel, count, dtype, bytes) : ZC_OK;
}

/* ---- operations on regions --------------------------------------------- */

zc_status comm_reduce_scatter(comm_channel *channel, zc_stream *stream, const comm_reduce_args *args,
                              comm_ticket *ticket)
{
    *ticket = 0;
    if (!args->region && !args->count)
        return ZC_OK;
    size_t elem_bytes = zc_dtype_bytes(args->dtype);
    if (!elem_bytes || args->dtype > ZC_FLOAT16)
        return zc_fail(ZC_ETYPE, "rank %zu: reduce_scatter of %s; gradients are float32, float64, bfloat16 or float16",
                       channel->comm->rank, zc_dtype_name(args->dtype));
    ZC_TRY(check_range(channel, "reduce_scatter", args->region, args->offset_bytes, channel->comm->ranks, args->count,
                       elem_bytes));
    if (args->region->flags & COMM_ONE_COPY)
        return zc_fail(ZC_EINVAL, "rank %zu: reduce_scatter in a region that the ranks share", channel->comm->rank);
    if (!args->to && args->count)
        return zc_fail(ZC_EINVAL, "rank %zu: reduce_scatter into NULL", channel->comm->rank);
    return channel->comm->ops->reduce_scatter(channel, stream, args, ticket);
}

zc_status comm_all_gather(comm_channel *channel, zc_stream *stream, uint32_t tag, comm_region *region,
                          size_t offset_bytes, size_t slice_bytes, comm_ticket *ticket)
{
    *ticket = 0;
    if (!region && !slice_bytes)
        return ZC_OK;
    ZC_TRY(check_range(channel, "all_gather", region, offset_bytes, channel->comm->ranks, slice_bytes, 1));
    return channel->comm->ops->all_gather(channel, stream, tag, region, offset_bytes, slice_bytes, ticket);
}

zc_status comm_all_gather_to(comm_channel *channel, zc_stream *stream, uint32_t tag, comm_region *region,
                             size_t offset_bytes, size_t slice_bytes, void *to, comm_ticket *ticket)
{
    *ticket = 0;
    if (!slice_bytes)
        return ZC_OK;
    ZC_TRY(check_range(channel, "all_gather_to", region, offset_bytes, 1, slice_bytes, 1));
    if (!to)
        return zc_fail(ZC_EINVAL, "rank %zu: all_gather_to into NULL", channel->comm->rank);
    return channel->comm->ops->all_gather_to(channel, stream, tag, region, offset_bytes, slice_bytes, to, ticket);
}

const void *comm_peer(const comm_region *region, size_t rank)
{
    const comm_ops *ops = region->channel->comm->ops;
    return ops->peer ? ops->peer(region, rank) : NULL;
}

zc_status comm_all_reduce_words(comm_channel *channel, zc_stream *stream, uint32_t tag, comm_region *region,
                                size_t offset_bytes, size_t words, uint64_t *to, comm_ticket *ticket)
{
    *ticket = 0;
    if (!region && !words)
        return ZC_OK;
    ZC_TRY(check_range(channel, "all_reduce_words", region, offset_bytes, 1, words, sizeof *to));
    if (region->flags & COMM_ONE_COPY)
        return zc_fail(ZC_EINVAL, "rank %zu: all_reduce_words in a region that the ranks share", channel->comm->rank);
    if (!to && words)
        return zc_fail(ZC_EINVAL, "rank %zu: all_reduce_words into NULL", channel->comm->rank);
    return channel->comm->ops->all_reduce_words(channel, stream, tag, region, offset_bytes, words, to, ticket);
}

zc_status comm_broadcast(comm_channel *channel, zc_stream *stream, uint32_t tag, comm_region *region,
                         size_t offset_bytes, size_t bytes, size_t root, comm_ticket *ticket)
{
    *ticket = 0;
    if (!region && !bytes)
        return ZC_OK;
    ZC_TRY(check_root(channel->comm, "broadcast", root));
    ZC_TRY(check_range(channel, "broadcast", region, offset_bytes, 1, bytes, 1));
    return channel->comm->ops->broadcast(channel, stream, tag, region, offset_bytes, bytes, root, ticket);
}

zc_status comm_test(comm_channel *channel, comm_ticket ticket, zc_stream *stream, int *done)
{
    *done = ticket == 0;
    return ticket ? channel->comm->ops->test(channel, ticket, stream, done) : ZC_OK;
}

zc_status comm_wait(comm_channel *channel, comm_ticket ticket, zc_stream *stream)
{
    return ticket ? channel->comm->ops->wait(channel, ticket, stream) : ZC_OK;
}

zc_status comm_wait_some(comm_channel *channel, comm_ticket ticket, zc_stream *stream, uint64_t limit_ns, int *done)
{
    *done = ticket == 0;
    return ticket ? channel->comm->ops->wait_some(channel, ticket, stream, limit_ns, done) : ZC_OK;
}

zc_status comm_progress(zc_comm *comm)
{
    return comm->ops->progress(comm);
}

zc_status comm_watch(zc_comm *comm, const char *what)
{
    return comm->ops->watch(comm, what);
}

zc_status comm_declare(zc_comm *comm, uint32_t line, uint64_t detail, const char *what)
{
    if (line >= COMM_LINES)
        return zc_fail(ZC_EINVAL, "rank %zu: a declaration on line %u; there are lines 0 to %u", comm->rank, line,
                       COMM_LINES - 1);
    return comm->ops->declare(comm, line, detail, what ? what : "an operation");
}

size_t comm_behind(zc_comm *comm, uint32_t line, uint64_t number, char *text, size_t room_bytes)
{
    if (room_bytes)
        text[0] = '\0';
    return line < COMM_LINES ? comm->ops->behind(comm, line, number, text, room_bytes) : 0;
}

size_t comm_stopped(zc_comm *comm, char *text, size_t room_bytes)
{
    if (room_bytes)
        text[0] = '\0';
    return comm->ops->stopped ? comm->ops->stopped(comm, text, room_bytes) : 0;
}

zc_status comm_exchange(comm_channel *channel, uint32_t tag, const char *what, const void *record, void *records,
                        size_t bytes)
{
    if (bytes > COMM_EXCHANGE_BYTES)
        return zc_fail(ZC_EINVAL, "rank %zu: exchange of %zu bytes; at most %u", channel->comm->rank, bytes,
                       COMM_EXCHANGE_BYTES);
    return channel->comm->ops->exchange(channel, tag, what ? what : "exchange", record, records, bytes);
}

/* ---- plain arrays ------------------------------------------------------ */

zc_status comm_array_all_reduce(zc_comm *comm, void *array, size_t count, zc_dtype dtype, comm_op op)
{
    ZC_TRY(check_array(comm, "all_reduce", array, 1, count, zc_dtype_bytes(dtype)));
    ZC_TRY(check_op(comm, "all_reduce", op));
    return comm->ops->array_all_reduce(comm, array, count, dtype, op);
}

zc_status comm_array_reduce_scatter(zc_comm *comm, const void *from, void *to, size_t count, zc_dtype dtype,
                                    comm_op op)
{
    size_t elem_bytes = zc_dtype_bytes(dtype);
    ZC_TRY(check_array(comm, "reduce_scatter", from, comm->ranks, count, elem_bytes));
    ZC_TRY(check_array(comm, "reduce_scatter", to, 1, count, elem_bytes));
    ZC_TRY(check_op(comm, "reduce_scatter", op));
    uintptr_t first = (uintptr_t)from, result = (uintptr_t)to, slice = count * elem_bytes;
    if (count && result + slice > first && result < first + comm->ranks * slice &&
        (result < first || (result - first) % slice))
        return zc_fail(ZC_EINVAL, "rank %zu: the result of reduce_scatter overlaps its input but is no slice of it",
                       comm->rank);
    return comm->ops->array_reduce_scatter(comm, from, to, count, dtype, op);
}

zc_status comm_array_all_gather(zc_comm *comm, const void *from, void *to, size_t bytes)
{
    ZC_TRY(check_array(comm, "all_gather", from, 1, bytes, 1));
    ZC_TRY(check_array(comm, "all_gather", to, comm->ranks, bytes, 1));
    uintptr_t first = (uintptr_t)to, input = (uintptr_t)from;
    if (bytes && input + bytes > first && input < first + comm->ranks * bytes &&
        (input < first || (input - first) % bytes))
        return zc_fail(ZC_EINVAL, "rank %zu: the input of all_gather overlaps its result but is no slice of it",
                       comm->rank);
    return comm->ops->array_all_gather(comm, from, to, bytes);
}

zc_status comm_array_broadcast(zc_comm *comm, void *array, size_t bytes, size_t root)
{
    ZC_TRY(check_root(comm, "broadcast", root));
    ZC_TRY(check_array(comm, "broadcast", array, 1, bytes, 1));
    return comm->ops->array_broadcast(comm, array, bytes, root);
}

zc_status comm_barrier(zc_comm *comm)
{
    return comm->ops->barrier(comm);
}

/* ---- groups ------------------------------------------------------------ */

zc_status comm_split(zc_comm *comm, int64_t color, zc_comm **out)
{
    *out = NULL;
    return comm->ops->split(comm, color, out);
}

void comm_poison(zc_comm *comm, zc_status status, const char *why)
{
    comm->ops->poison(comm, status, why ? why : zc_status_text(status));
}

zc_status comm_give_up(zc_comm *comm, const char *what, zc_status status)
{
    char sentence[1024], why[1024];
    if ((status != ZC_ENOMEM && status != ZC_ESYSTEM) || comm->ranks == 1)
        return status;
    snprintf(sentence, sizeof sentence, "%s", zc_last_error());
    if (comm->ops->progress(comm) != ZC_OK) /* it has failed already, perhaps with this */
        return zc_fail(status, "%s", sentence);
    snprintf(why, sizeof why, "rank %zu failed in %s: %.900s", comm->rank, what, sentence);
    comm_poison(comm, ZC_ECOMM, why); /* the peers have memory */
    return zc_fail(status, "%s", why);
}

void comm_close(zc_comm *comm)
{
    if (comm)
        comm->ops->close(comm);
}
