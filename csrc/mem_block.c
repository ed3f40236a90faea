/*
 * Blocks of memory that peers map, and when their memory may be used again.
 *
 * A block is a header page and a payload.  Its owner cannot know by itself when
 * the last peer stops looking at it (a parameter that lives in a shared copy,
 * an alarm that is about to be rung), so every peer counts up `detached` in the
 * header as its last access.  A block that its owner has dropped is freed when
 * the count has reached the number of peers that mapped it; until then, or
 * until the world ends, it waits in the world's list.
 *
 * An allocation that fails by agreement is freed at once, and nobody counts.  But
 * a rank that learns of the agreement may make the group fail in the next moment,
 * and a peer that is still inside the call then sees that failure instead.  This
 * peer cannot know whether the owners have freed their blocks, so it must not
 * touch them, not even to count; and it cannot know whether its own block is
 * looked at, so that is freed only when all have counted, which may be never:
 * then it goes with the world, as the group has failed anyway.
 */
#include "mem_comm.h"
#include "zc_point.h"

#include <string.h>

zc_status mem_block_alloc(mem_world *world, size_t payload_bytes, size_t now_bytes, mem_block **out)
{
    *out = NULL;
    mem_block_sweep(world);
    if (payload_bytes > (size_t)-1 / 2)
        return zc_fail(ZC_ENOMEM, "rank %zu: %zu bytes of memory were asked for", world->rank, payload_bytes);
    mem_block *block = zc_calloc(1, sizeof *block);
    if (!block)
        return zc_fail(ZC_ENOMEM, "rank %zu: out of memory", world->rank);
    block->bytes = payload_bytes + MEM_HEADER_BYTES;
    void *memory;
    zc_status status = world->provider->ops->alloc(world->provider, block->bytes, now_bytes + MEM_HEADER_BYTES, &memory,
                                                     &block->token);
    if (status != ZC_OK) {
        zc_free(block);
        return status;
    }
    block->memory = memory;
    block->next = world->blocks;
    world->blocks = block;
    *out = block;
    ZC_POINT("block: made");
    return ZC_OK;
}

void mem_block_sweep(mem_world *world)
{
    for (mem_block **at = &world->blocks; *at;) {
        mem_block *block = *at;
        mem_block_header *header = (mem_block_header *)block->memory;
        if (block->dropped && atomic_load(&header->detached) >= block->readers) {
            *at = block->next;
            world->provider->ops->free(world->provider, block->memory, block->token, block->bytes);
            zc_free(block);
        } else {
            at = &block->next;
        }
    }
}

void mem_block_drop(mem_world *world, mem_block *block, size_t ranks, mem_block_fate fate)
{
    if (!block)
        return;
    block->dropped = 1;
    block->readers = fate == MEM_NEVER_SHARED ? 0 : ranks - 1;
    mem_block_sweep(world);
}

zc_status mem_blocks_map(mem_world *world, const size_t *member, size_t ranks, size_t rank, mem_block *own,
                         const uint64_t *tokens, size_t payload_bytes, size_t giver, mem_blocks *out)
{
    memset(out, 0, sizeof *out);
    out->own = own;
    out->bytes = payload_bytes + MEM_HEADER_BYTES;
    out->ranks = ranks;
    out->rank = rank;
    out->payload = zc_calloc(ranks, sizeof *out->payload);
    if (!out->payload)
        return zc_fail(ZC_ENOMEM, "rank %zu: out of memory", world->rank);
    for (size_t q = 0; q < ranks; q++) {
        void *memory;
        if (giver < ranks && q != giver)
            continue;
        if (q == rank) {
            out->payload[q] = mem_block_payload(own);
            continue;
        }
        zc_status status = world->provider->ops->map(world->provider, member[q], tokens[q], out->bytes, &memory);
        if (status != ZC_OK) {
            out->own = NULL; /* stays the caller's */
            mem_blocks_release(world, out, MEM_NEVER_SHARED);
            return status;
        }
        out->payload[q] = (char *)memory + MEM_HEADER_BYTES;
        ZC_POINT("block: a peer's is mapped");
    }
    return ZC_OK;
}

void mem_blocks_release(mem_world *world, mem_blocks *blocks, mem_block_fate fate)
{
    for (size_t q = 0; blocks->payload && q < blocks->ranks; q++) {
        if (q == blocks->rank || !blocks->payload[q])
            continue;
        char *memory = blocks->payload[q] - MEM_HEADER_BYTES;
        if (fate == MEM_SHARED)
            atomic_fetch_add(&((mem_block_header *)memory)->detached, 1);
        ZC_POINT("block: a peer's is let go");
        world->provider->ops->unmap(world->provider, memory, blocks->bytes);
    }
    mem_block_drop(world, blocks->own, blocks->ranks, fate);
    zc_free(blocks->payload);
    memset(blocks, 0, sizeof *blocks);
}
