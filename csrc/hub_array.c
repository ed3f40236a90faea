/*
 * Plain arrays of any size through the hub, part by part; each part is a call, and
 * all ranks cut alike.  The hub combines, so a rank sends and receives only its own.
 */
#include "hub_state.h"

#include <string.h>

#define SCATTER_ELEMS 64u /* of each slice at least, however many ranks there are */

_Static_assert(SCATTER_ELEMS * sizeof(double) * HUB_RANKS_MAX + sizeof(hub_words) <= HUB_PAYLOAD_BYTES, "fits a message");

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

static zc_status begin(hub_group *group)
{
    ZC_TRY(hub_enter(group));
    zc_status status = hub_busy_begin(&group->base, 0);
    if (status != ZC_OK)
        hub_leave(group);
    return status;
}

static zc_status end(hub_group *group, zc_status status)
{
    hub_busy_end(&group->base, 0);
    hub_leave(group);
    return status;
}

static zc_status all_reduce(hub_group *group, hub_request *request, char *array)
{
    size_t elem_bytes = zc_dtype_bytes((zc_dtype)request->dtype), count = request->count, at = 0;
    size_t room = hub_part_bytes(group->public.ranks) / elem_bytes;
    do {
        size_t part = smaller(room, count - at);
        request->from = request->to = (hub_span){array + at * elem_bytes, part * elem_bytes, 0, 0};
        ZC_TRY(hub_ask(&group->base, 0, request));
        at += part;
    } while (at < count);
    return ZC_OK;
}

/* A part is the same range of every slice, so a `to` that is a slice of `from` overwrites what was sent. */
static zc_status reduce_scatter(hub_group *group, hub_request *request, const char *from, char *to)
{
    size_t elem_bytes = zc_dtype_bytes((zc_dtype)request->dtype), count = request->count, ranks = group->public.ranks;
    size_t room = hub_part_bytes(ranks) / elem_bytes / ranks, at = 0;
    room = room < SCATTER_ELEMS ? SCATTER_ELEMS : room;
    do {
        size_t part = smaller(room, count - at), bytes = part * elem_bytes;
        request->from = (hub_span){(char *)(uintptr_t)from + at * elem_bytes, ranks * bytes, bytes, count * elem_bytes};
        request->to = (hub_span){to + at * elem_bytes, bytes, 0, 0};
        ZC_TRY(hub_ask(&group->base, 0, request));
        at += part;
    } while (at < count);
    return ZC_OK;
}

static zc_status all_gather(hub_group *group, hub_request *request, const char *from, char *to)
{
    size_t bytes = request->count, ranks = group->public.ranks, room = hub_part_bytes(ranks), at = 0;
    do {
        size_t part = smaller(room, bytes - at);
        request->from = (hub_span){(char *)(uintptr_t)from + at, part, 0, 0};
        request->to = (hub_span){to + at, ranks * part, part, bytes};
        ZC_TRY(hub_ask(&group->base, 0, request));
        at += part;
    } while (at < bytes);
    return ZC_OK;
}

static zc_status broadcast(hub_group *group, hub_request *request, char *array)
{
    size_t bytes = request->count, room = hub_part_bytes(group->public.ranks), at = 0;
    int root = request->root == group->public.rank;
    do {
        hub_span part = {array + at, smaller(room, bytes - at), 0, 0}, none = {NULL, 0, 0, 0};
        request->from = root ? part : none;
        request->to = root ? none : part;
        ZC_TRY(hub_ask(&group->base, 0, request));
        at += part.bytes;
    } while (at < bytes);
    return ZC_OK;
}

/* ---- the calls ------------------------------------------------------------ */

zc_status hub_array_all_reduce(zc_comm *comm, void *array, size_t count, zc_dtype dtype, comm_op op)
{
    hub_group *group = (hub_group *)comm;
    hub_request request = {.operation = HUB_ALL_REDUCE, .what = "all_reduce", .count = count, .dtype = (uint8_t)dtype,
                           .op = (uint8_t)op};
    ZC_TRY(begin(group));
    return end(group, hub_alone(group) ? ZC_OK : all_reduce(group, &request, array));
}

zc_status hub_array_reduce_scatter(zc_comm *comm, const void *from, void *to, size_t count, zc_dtype dtype, comm_op op)
{
    hub_group *group = (hub_group *)comm;
    hub_request request = {.operation = HUB_REDUCE_SCATTER, .what = "reduce_scatter", .count = count,
                           .dtype = (uint8_t)dtype, .op = (uint8_t)op};
    ZC_TRY(begin(group));
    if (!hub_alone(group))
        return end(group, reduce_scatter(group, &request, from, to));
    if (count)
        memmove(to, from, count * zc_dtype_bytes(dtype));
    return end(group, ZC_OK);
}

zc_status hub_array_all_gather(zc_comm *comm, const void *from, void *to, size_t bytes)
{
    hub_group *group = (hub_group *)comm;
    hub_request request = {.operation = HUB_ALL_GATHER, .what = "all_gather", .count = bytes};
    ZC_TRY(begin(group));
    if (!hub_alone(group))
        return end(group, all_gather(group, &request, from, to));
    if (bytes)
        memmove(to, from, bytes);
    return end(group, ZC_OK);
}

zc_status hub_array_broadcast(zc_comm *comm, void *array, size_t bytes, size_t root)
{
    hub_group *group = (hub_group *)comm;
    hub_request request = {.operation = HUB_BROADCAST, .what = "broadcast", .count = bytes, .root = (uint32_t)root};
    ZC_TRY(begin(group));
    return end(group, hub_alone(group) ? ZC_OK : broadcast(group, &request, array));
}
