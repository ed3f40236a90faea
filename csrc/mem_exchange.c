/*
 * Taking a tag's operation, and the blocking exchange of small records, on
 * which everything is built that ranks have to agree on.
 *
 * A rank puts its record into one of a few slots of the channel that peers can
 * see, and names the slot in its descriptor.
 */
#include "mem_comm.h"

#include <stdio.h>
#include <string.h>

zc_status mem_take_op(mem_channel *channel, uint32_t tag, const shm_desc *desc, mem_op **out)
{
    mem_tag *t = &channel->tag[tag];
    while (t->op.pending)
        ZC_TRY(mem_wait(channel, tag, t->issued, MEM_WAIT_COMPLETE, mem_kind_name(t->op.desc.kind)));
    if (channel->group->failed != ZC_OK)
        return mem_failure(channel->group);
    mem_op *op = &t->op;
    memset(op, 0, sizeof *op);
    op->channel = channel;
    op->tag = tag;
    op->stamp = ++t->issued;
    op->desc = *desc;
    *out = op;
    return ZC_OK;
}

static int slot_free(const mem_channel *channel, uint32_t s)
{
    const mem_group *group = channel->group;
    for (size_t q = 0; channel->slot[s].stamp && q < group->public.ranks; q++)
        if (q != group->public.rank &&
            atomic_load(&channel->cells[q][channel->slot[s].tag].done) < channel->slot[s].stamp)
            return 0;
    return 1;
}

/*
 * A record slot that no peer is reading.  Any free one will do: a fixed turn
 * would let threads of two ranks wait for each other's.  When none is free, an
 * exchange that is over on this rank is waited for; its peers need nothing more
 * from here to be done with it.  (Only if as many threads as there are slots
 * are in the middle of exchanges, one of those is.)
 */
static zc_status take_slot(mem_channel *channel, uint32_t *slot)
{
    for (;;) {
        uint32_t victim = 0;
        for (uint32_t s = 0; s < SHM_RECORD_SLOTS; s++) {
            if (slot_free(channel, s)) {
                *slot = s;
                return ZC_OK;
            }
            if (channel->tag[channel->slot[s].tag].completed >= channel->slot[s].stamp)
                victim = s;
        }
        ZC_TRY(mem_wait(channel, channel->slot[victim].tag, channel->slot[victim].stamp, MEM_WAIT_DONE, "exchange"));
    }
}

zc_status mem_exchange(mem_channel *channel, uint32_t tag, const shm_desc *desc, const char *what,
                       const void *record, void *records, size_t bytes)
{
    mem_group *group = channel->group;
    size_t me = group->public.rank;
    if (group->public.ranks == 1) {
        if (bytes)
            memmove(records, record, bytes);
        return ZC_OK;
    }
    mem_op *op;
    uint32_t slot = 0;
    for (;;) { /* any wait may let in another thread of this rank: both must be free at one moment */
        if (bytes)
            ZC_TRY(take_slot(channel, &slot));
        if (!channel->tag[tag].op.pending)
            break;
        ZC_TRY(mem_wait(channel, tag, channel->tag[tag].issued, MEM_WAIT_COMPLETE, what));
    }
    ZC_TRY(mem_take_op(channel, tag, desc, &op));
    if (bytes) {
        channel->slot[slot].tag = tag;
        channel->slot[slot].stamp = op->stamp;
        memcpy(channel->records[me] + (size_t)slot * COMM_EXCHANGE_BYTES, record, bytes);
        memmove((char *)records + me * bytes, record, bytes);
    }
    op->desc.slot = slot;
    op->records = records;
    op->record_bytes = bytes;
    uint64_t stamp = op->stamp;
    mem_post(op);
    return mem_wait(channel, tag, stamp, MEM_WAIT_COMPLETE, what);
}

zc_status mem_vote_all(mem_channel *channel, shm_kind kind, uint64_t count, const char *what, zc_status status,
                       uint64_t value, const char *text)
{
    mem_group *group = channel->group;
    size_t me = group->public.rank;
    mem_vote own = {.status = status, .value = value};
    snprintf(own.text, sizeof own.text, "%s", status == ZC_OK ? text : zc_last_error());
    shm_desc desc = {.kind = (uint8_t)kind, .count = count};
    ZC_TRY(mem_exchange(channel, channel->tags, &desc, what, &own, channel->votes, sizeof own));
    if (status != ZC_OK)
        return zc_fail(status, "%s", own.text);
    for (size_t q = 0; q < group->public.ranks; q++)
        if (q != me && channel->votes[q].status != ZC_OK)
            return zc_fail((zc_status)channel->votes[q].status, "rank %zu could not do its part of '%s': %s",
                           mem_name(group, q), what, channel->votes[q].text);
    return ZC_OK;
}
