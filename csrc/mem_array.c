/*
 * Collectives on plain arrays, anywhere in a rank's private memory and of any
 * size: chunk by chunk through a staging buffer that the peers see.
 *
 * The buffer has two halves, used in turn over the life of the group.  A rank
 * fills a half for chunk c after it has met all peers in chunk c-1; they came
 * there after they had read chunk c-2, which was in the same half.  So one
 * meeting per phase is enough and none comes after the last chunk.
 *
 * Reads per element and rank: an all-reduce of a large chunk reads N parts of
 * the own slice and then N-1 reduced slices; a small one (one meeting instead
 * of two) reads all N parts of everything.
 */
#include "mem_comm.h"

#include "cpu_kernels.h"
#include "zc_point.h"

#include <string.h>

#define SMALL_CHUNK_BYTES 16384u

static size_t smaller(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* All ranks have written what this phase reads. */
static zc_status meet(mem_group *group, const shm_desc *desc)
{
    return mem_exchange(&group->base, 0, desc, mem_kind_name(desc->kind), NULL, NULL, 0);
}

static char *half_of(const mem_group *group, size_t q)
{
    return group->staging[q] + (group->turn & 1) * MEM_STAGING_BYTES;
}

static void combine(void *to, const void *const *in, size_t ranks, size_t count, zc_dtype dtype, comm_op op)
{
    unsigned long mode = cpu_mode_enter();
    cpu_kernels_get()->combine(to, in, ranks, count, dtype, (cpu_op)op);
    cpu_mode_leave(mode);
}

/* in[q] = rank q's half, `offset_bytes` into it. */
static void inputs(const mem_group *group, size_t offset_bytes, const void **in)
{
    for (size_t q = 0; q < group->public.ranks; q++)
        in[q] = half_of(group, q) + offset_bytes;
}

static zc_status all_reduce(mem_group *group, const shm_desc *desc, char *array, size_t count, zc_dtype dtype,
                            comm_op op)
{
    size_t me = group->public.rank, ranks = group->public.ranks, elem_bytes = zc_dtype_bytes(dtype);
    size_t room = MEM_STAGING_BYTES / elem_bytes, at = 0;
    const void *in[SHM_RANKS_MAX];
    do {
        size_t chunk = smaller(room, count - at);
        char *here = array + at * elem_bytes;
        if (chunk)
            memcpy(half_of(group, me), here, chunk * elem_bytes);
        ZC_TRY(meet(group, desc));
        if (chunk * elem_bytes <= SMALL_CHUNK_BYTES) {
            inputs(group, 0, in);
            if (chunk)
                combine(here, in, ranks, chunk, dtype, op);
        } else {
            /* Slices of whole cache lines; nobody else reads the own slice of the own half before it is reduced. */
            size_t slice = (chunk + ranks - 1) / ranks;
            slice = (slice + 63) / 64 * 64;
            size_t begin = smaller(me * slice, chunk), end = smaller(begin + slice, chunk);
            inputs(group, begin * elem_bytes, in);
            if (end > begin)
                combine(half_of(group, me) + begin * elem_bytes, in, ranks, end - begin, dtype, op);
            ZC_POINT("array: own slice reduced");
            ZC_TRY(meet(group, desc));
            for (size_t q = 0; q < ranks; q++) {
                begin = smaller(q * slice, chunk);
                end = smaller(begin + slice, chunk);
                memcpy(here + begin * elem_bytes, half_of(group, q) + begin * elem_bytes, (end - begin) * elem_bytes);
            }
        }
        group->turn++;
        ZC_POINT("array: a chunk is here");
        at += chunk;
    } while (at < count);
    return ZC_OK;
}

/* A chunk is the same range of every slice, so a `to` that is a slice of `from` overwrites what was staged. */
static zc_status reduce_scatter(mem_group *group, const shm_desc *desc, const char *from, char *to, size_t count,
                                zc_dtype dtype, comm_op op)
{
    size_t me = group->public.rank, ranks = group->public.ranks, elem_bytes = zc_dtype_bytes(dtype);
    size_t room = MEM_STAGING_BYTES / elem_bytes / ranks, at = 0;
    const void *in[SHM_RANKS_MAX];
    do {
        size_t chunk = smaller(room, count - at);
        for (size_t q = 0; q < ranks && chunk; q++)
            memcpy(half_of(group, me) + q * chunk * elem_bytes, from + (q * count + at) * elem_bytes,
                   chunk * elem_bytes);
        ZC_TRY(meet(group, desc));
        inputs(group, me * chunk * elem_bytes, in);
        if (chunk)
            combine(to + at * elem_bytes, in, ranks, chunk, dtype, op);
        group->turn++;
        ZC_POINT("array: a chunk is here");
        at += chunk;
    } while (at < count);
    return ZC_OK;
}

static zc_status all_gather(mem_group *group, const shm_desc *desc, const char *from, char *to, size_t bytes)
{
    size_t me = group->public.rank, ranks = group->public.ranks, at = 0;
    do {
        size_t chunk = smaller(MEM_STAGING_BYTES, bytes - at);
        if (chunk)
            memcpy(half_of(group, me), from + at, chunk);
        ZC_TRY(meet(group, desc));
        for (size_t q = 0; q < ranks && chunk; q++)
            memcpy(to + q * bytes + at, half_of(group, q), chunk);
        group->turn++;
        ZC_POINT("array: a chunk is here");
        at += chunk;
    } while (at < bytes);
    return ZC_OK;
}

static zc_status broadcast(mem_group *group, const shm_desc *desc, char *array, size_t bytes, size_t root)
{
    size_t at = 0;
    do {
        size_t chunk = smaller(MEM_STAGING_BYTES, bytes - at);
        if (chunk && root == group->public.rank)
            memcpy(half_of(group, root), array + at, chunk);
        ZC_TRY(meet(group, desc));
        if (chunk && root != group->public.rank)
            memcpy(array + at, half_of(group, root), chunk);
        group->turn++;
        ZC_POINT("array: a chunk is here");
        at += chunk;
    } while (at < bytes);
    return ZC_OK;
}

/* ---- the calls --------------------------------------------------------- */

static zc_status begin(mem_group *group)
{
    ZC_TRY(mem_enter(group));
    zc_status status = mem_busy_begin(&group->base);
    if (status != ZC_OK)
        mem_leave(group);
    return status;
}

static zc_status end(mem_group *group, zc_status status)
{
    mem_busy_end(&group->base);
    mem_leave(group);
    return status;
}

zc_status mem_array_all_reduce(zc_comm *comm, void *array, size_t count, zc_dtype dtype, comm_op op)
{
    mem_group *group = (mem_group *)comm;
    shm_desc desc = {.kind = SHM_ARRAY_ALL_REDUCE, .dtype = (uint8_t)dtype, .op = (uint8_t)op, .count = count};
    ZC_TRY(begin(group));
    return end(group, comm->ranks == 1 ? ZC_OK : all_reduce(group, &desc, array, count, dtype, op));
}

zc_status mem_array_reduce_scatter(zc_comm *comm, const void *from, void *to, size_t count, zc_dtype dtype, comm_op op)
{
    mem_group *group = (mem_group *)comm;
    shm_desc desc = {.kind = SHM_ARRAY_REDUCE_SCATTER, .dtype = (uint8_t)dtype, .op = (uint8_t)op, .count = count};
    ZC_TRY(begin(group));
    if (comm->ranks > 1)
        return end(group, reduce_scatter(group, &desc, from, to, count, dtype, op));
    if (count)
        memmove(to, from, count * zc_dtype_bytes(dtype));
    return end(group, ZC_OK);
}

zc_status mem_array_all_gather(zc_comm *comm, const void *from, void *to, size_t bytes)
{
    mem_group *group = (mem_group *)comm;
    shm_desc desc = {.kind = SHM_ARRAY_ALL_GATHER, .count = bytes};
    ZC_TRY(begin(group));
    if (comm->ranks > 1)
        return end(group, all_gather(group, &desc, from, to, bytes));
    if (bytes)
        memmove(to, from, bytes);
    return end(group, ZC_OK);
}

zc_status mem_array_broadcast(zc_comm *comm, void *array, size_t bytes, size_t root)
{
    mem_group *group = (mem_group *)comm;
    shm_desc desc = {.kind = SHM_ARRAY_BROADCAST, .count = bytes, .root = (uint32_t)root};
    ZC_TRY(begin(group));
    return end(group, comm->ranks == 1 ? ZC_OK : broadcast(group, &desc, array, bytes, root));
}

zc_status mem_barrier(zc_comm *comm)
{
    mem_group *group = (mem_group *)comm;
    shm_desc desc = {.kind = SHM_BARRIER};
    ZC_TRY(begin(group));
    return end(group, mem_exchange(&group->base, 0, &desc, "barrier", NULL, NULL, 0));
}
