/*
 * Stage 3: parameters that are put together before use and forgotten after.
 *
 * Where a parameter is.  For good, in pieces: every rank keeps its slices of
 * every bucket ("shards", the space's `param` region).  For use, whole, at one
 * address that never changes: each unit has a range of addresses of its own, and
 * the ranges of many units are mapped onto the memory of few slots.  Gathering a
 * unit fills its slot; discarding it is nothing at all, the next unit of the slot
 * overwrites it.  What a reader kept of an address is right again as soon as the
 * unit is gathered again.
 *
 *      addresses    | unit 0 | | unit 1 | | unit 2 | | unit 3 | | unit 4 | ...
 *                        \          \          |          |          |
 *      slots of a ring    +----------\---------+----------|----------+
 *                                     +-------------------+
 *                         [ slot 0: owner 2 ]  [ slot 1: owner 1 ]
 *                              ^     ^              ^     ^
 *      shards               rank 0 rank 1        rank 0 rank 1
 *
 * Rings.  Units of one level follow one another and share a ring of slots; a unit
 * used inside another one has a higher level and thereby another ring.  Within a
 * level there is a ring for each size class: the largest unit and those of more
 * than half its size, and so on, so that one huge unit does not size every slot.
 * Units of a ring take its slots in turn, for ever.  A resident unit has a slot
 * of its own.  On a device whose memory has one address only (device.h) every unit
 * has: slots then hold all parameters, and a unit is there until the next step.
 *
 * In use.  acquire() gathers a unit unless its slot holds it, and release() ends
 * its use.  A slot whose owner is in use is never filled with another unit: that
 * is an error of the caller, who knows whom to ask (unit_user).
 *
 * Order.  Every unit remembers which one was acquired after it last time, in
 * forward and in backward; before the first step that is its neighbour.  The next
 * `prefetch` units in that order are gathered ahead, into slots whose owners are
 * not in use.  It is a guess: a wrong one costs its time, and a unit that was not
 * foreseen is gathered when it is acquired.  Nothing comes after the last unit of a
 * forward or of a backward; a resident unit ends the order and begins it anew.
 *
 * Who reads what, and when.  A communicator with comm_peer lets a rank read its
 * peers' shards whenever it likes, so ranks may use different units, a different
 * number of times.  The rules that make this right:
 *
 *   Shards are written in step(), store() and while parameters are loaded, and
 *   nowhere else.  All of these begin with a meeting of all ranks: whoever is there
 *   is not gathering.  All of them end in stage3_written(), where every rank waits
 *   until all have written; only then may it gather again.  What the slots hold is
 *   forgotten there.
 *
 * Without comm_peer a gather is an all-gather of the unit's buckets, posted in
 * order on a channel of its own, into the slot's own address.  Before that the
 * rank declares which unit it is about to gather (round_declare): ranks that
 * differ get an error that names both, and nobody waits for a peer that is
 * elsewhere.  Declaring waits for nobody, so one rank's host may be many gathers
 * ahead, as far as the tags of the channel of gathers reach; what is in a slot is right all the
 * same, because this rank's stream orders every use of it, and shards are written and
 * read in the order of the stream on every rank.  All ranks must gather alike, the
 * units fetched ahead too: what is guessed depends on the order of acquire() and release()
 * and on options that are the same on all ranks, and on nothing else.
 */
#include "engine.h"
#include "zc_point.h"

#include <stdio.h>

#define FAR_BYTES ((size_t)4 << 20) /* units from this size on do not stay in a cache until they are used */

/* ---- set-up ------------------------------------------------------------------ */

static const char *unit_name(const zc_engine *engine, size_t unit)
{
    static _Thread_local char text[2][160];
    static _Thread_local int turn;
    char *to = text[turn ^= 1];
    const char *name = engine->units[unit].name;
    if (name)
        snprintf(to, sizeof text[0], "unit '%.120s'", name);
    else
        snprintf(to, sizeof text[0], "unit %zu", unit);
    return to;
}

zc_status stage3_copy_units(zc_engine *engine, const zc_engine_config *config)
{
    engine->units = zc_calloc(config->unit_count, sizeof *engine->units);
    if (!engine->units)
        return zc_fail(ZC_ENOMEM, "no memory for %zu units", config->unit_count);
    engine->unit_count = config->unit_count;
    engine->last_unit = ZC_NO_UNIT;
    engine->backward_round = UINT64_MAX;
    for (size_t u = 0; u < engine->unit_count; u++) {
        engine_unit *unit = &engine->units[u];
        unit->level = config->units[u].level;
        unit->resident = config->units[u].resident;
        unit->slot = SIZE_MAX;
        unit->next[0] = unit->next[1] = ZC_NO_UNIT;
        if (config->units[u].name && !(unit->name = engine_copy_text(config->units[u].name)))
            return zc_fail(ZC_ENOMEM, "no memory for the name of unit %zu", u);
    }
    return ZC_OK;
}

/* Until an order has been seen, neighbours of one level follow each other. */
static void guess_order(zc_engine *engine)
{
    for (size_t u = 0; u < engine->unit_count; u++) {
        engine_unit *unit = &engine->units[u];
        for (size_t v = u + 1; v < engine->unit_count && !unit->resident && unit->bytes; v++) {
            engine_unit *other = &engine->units[v];
            if (other->resident || other->level != unit->level || !other->bytes)
                continue;
            unit->next[0] = v;
            other->next[1] = u;
            break;
        }
    }
}

static zc_status add_slot(zc_engine *engine, size_t bytes)
{
    size_t step = engine->device->ops->slot_step_bytes;
    engine_slot *slots = zc_realloc(engine->slots, (engine->slot_count + 1) * sizeof *slots);
    if (!slots)
        return zc_fail(ZC_ENOMEM, "no memory for the units' slots");
    engine->slots = slots;
    engine_slot *slot = &slots[engine->slot_count++];
    memset(slot, 0, sizeof *slot);
    slot->owner = ZC_NO_UNIT;
    bytes = (bytes + step - 1) / step * step;
    ZC_TRY(engine->device->ops->slot_alloc(engine->device, bytes, &slot->memory));
    engine->memory.buffers += bytes;
    ZC_POINT("unit: a slot is made");
    if (!engine->config.fill_discarded)
        return ZC_OK;
    return engine->device->ops->fill(engine->device, engine->stream, slot->memory.base, 0xff, bytes);
}

/* Room for the tickets of a unit's gather: acquire() then allocates nothing that could fail half-way. */
static zc_status make_room(zc_engine *engine, const engine_unit *unit, engine_slot *slot)
{
    size_t buckets = 0;
    for (size_t k = 0; k < unit->part_count; k++)
        buckets += unit->parts[k].end_bucket - unit->parts[k].first_bucket;
    if (engine_reads_peers(engine) || buckets <= slot->ticket_room)
        return ZC_OK;
    comm_ticket *tickets = zc_realloc(slot->tickets, buckets * sizeof *tickets);
    if (!tickets)
        return zc_fail(ZC_ENOMEM, "no memory for the tickets of %zu gathers", buckets);
    slot->tickets = tickets;
    slot->ticket_room = buckets;
    return ZC_OK;
}

static zc_status map_unit(zc_engine *engine, engine_unit *unit, size_t slot)
{
    size_t step = engine->device->ops->slot_step_bytes, bytes = (unit->bytes + step - 1) / step * step;
    void *base;
    unit->slot = slot;
    ZC_TRY(make_room(engine, unit, &engine->slots[slot]));
    if (!zc_engine_units_share(engine)) {
        unit->base = engine->slots[slot].memory.base;
        return ZC_OK;
    }
    ZC_TRY(engine->device->ops->slot_map(engine->device, &engine->slots[slot].memory, bytes, &base));
    unit->base = base;
    unit->mapped_bytes = bytes;
    ZC_POINT("unit: mapped");
    return ZC_OK;
}

/* A ring for the units of this level with most >= bytes > least: `slots` of them, taken in turn. */
static zc_status make_ring(zc_engine *engine, uint32_t level, size_t most, size_t least)
{
    size_t first = engine->slot_count, count = 0, turn = 0;
    for (size_t u = 0; u < engine->unit_count; u++) {
        engine_unit *unit = &engine->units[u];
        count += unit->level == level && !unit->resident && unit->bytes > least && unit->bytes <= most;
    }
    if (count > engine->config.unit_slots)
        count = engine->config.unit_slots;
    for (size_t k = 0; k < count; k++)
        ZC_TRY(add_slot(engine, most));
    for (size_t u = 0; u < engine->unit_count; u++) {
        engine_unit *unit = &engine->units[u];
        if (unit->level == level && !unit->resident && unit->bytes > least && unit->bytes <= most)
            ZC_TRY(map_unit(engine, unit, first + turn++ % count));
    }
    return ZC_OK;
}

/* The units that have no slot yet: the largest of the lowest level, or ZC_NO_UNIT. */
static size_t largest_left(const zc_engine *engine)
{
    size_t best = ZC_NO_UNIT;
    for (size_t u = 0; u < engine->unit_count; u++) {
        const engine_unit *unit = &engine->units[u], *other = best == ZC_NO_UNIT ? NULL : &engine->units[best];
        if (!unit->bytes || unit->slot != SIZE_MAX)
            continue;
        if (!other || unit->level < other->level || (unit->level == other->level && unit->bytes > other->bytes))
            best = u;
    }
    return best;
}

zc_status stage3_reserve(zc_engine *engine)
{
    ZC_TRY(plan_units(engine));
    for (size_t u = 0; u < engine->unit_count; u++) {
        engine_unit *unit = &engine->units[u];
        if (!unit->bytes || (!unit->resident && zc_engine_units_share(engine)))
            continue;
        ZC_TRY(add_slot(engine, unit->bytes));
        ZC_TRY(map_unit(engine, unit, engine->slot_count - 1));
    }
    for (size_t u = largest_left(engine); u != ZC_NO_UNIT; u = largest_left(engine))
        ZC_TRY(make_ring(engine, engine->units[u].level, engine->units[u].bytes, engine->units[u].bytes / 2));
    guess_order(engine);
    return ZC_OK;
}

void stage3_release(zc_engine *engine)
{
    const device_ops *ops = engine->device->ops;
    for (size_t u = 0; u < engine->unit_count; u++) {
        engine_unit *unit = &engine->units[u];
        if (unit->mapped_bytes)
            ops->slot_unmap(engine->device, unit->base, unit->mapped_bytes);
        zc_free(unit->parts);
        zc_free(unit->name);
    }
    for (size_t s = 0; s < engine->slot_count; s++) {
        if (engine->slots[s].memory.base)
            ops->slot_free(engine->device, &engine->slots[s].memory);
        zc_free(engine->slots[s].tickets);
    }
    zc_free(engine->units);
    zc_free(engine->slots);
}

/* ---- gathering ---------------------------------------------------------------- */

static zc_status wait_gather(zc_engine *engine, engine_slot *slot)
{
    for (size_t k = 0; k < slot->ticket_count; k++)
        ZC_TRY(comm_wait(engine->gathers, slot->tickets[k], engine->stream));
    slot->ticket_count = 0;
    return ZC_OK;
}

/* Bucket b of a space comes to `to`, all slices of it. */
static zc_status gather_bucket(zc_engine *engine, engine_space *space, size_t b, char *to, engine_slot *slot)
{
    size_t bytes = partition_shard_elems(&space->plan, b) * space->elem_bytes;
    size_t shard = partition_shard_offset(&space->plan, b) * space->elem_bytes;
    if (!engine_reads_peers(engine)) {
        comm_ticket ticket;
        uint32_t tag = engine->next_gather_tag++ % UNIT_TAGS;
        ZC_TRY(comm_all_gather_to(engine->gathers, engine->stream, tag, space->param, shard, bytes, to, &ticket));
        if (ticket)
            slot->tickets[slot->ticket_count++] = ticket;
        return ZC_OK;
    }
    const device_ops *ops = engine->device->ops;
    zc_status (*copy)(zc_device *, zc_stream *, void *, const void *, size_t) =
        slot->memory.bytes >= FAR_BYTES ? ops->copy_far : ops->copy;
    for (size_t turn = 0, q = engine->rank; turn < engine->ranks; turn++) {
        ZC_TRY(copy(engine->device, engine->stream, to + q * bytes, (const char *)comm_peer(space->param, q) + shard,
                    bytes));
        ZC_POINT("unit: a slice is here");
        q = q + 1 < engine->ranks ? q + 1 : 0; /* every rank begins with its own slice, then another peer's */
    }
    return ZC_OK;
}

static zc_status gather(zc_engine *engine, size_t index)
{
    engine_unit *unit = &engine->units[index];
    engine_slot *slot = &engine->slots[unit->slot];
    if (engine_gathers_together(engine)) {
        char what[MEET_WHAT_BYTES];
        const char *name = unit_name(engine, index);
        size_t length = strlen(name);
        if (length <= 53)
            snprintf(what, sizeof what, "gather of %.53s", name);
        else /* the end, in which units differ */
            snprintf(what, sizeof what, "gather of ...%.50s", name + length - 50);
        ZC_TRY(round_declare(engine, index, what));
    }
    ZC_TRY(wait_gather(engine, slot)); /* one that was made ahead in vain: two must not write to the slot at once */
    slot->owner = ZC_NO_UNIT;          /* until it is complete */
    zc_traffic_row *row = &engine->traffic.all_gather;
    uint64_t begin_ns = profile_now_ns(engine), bytes = row->bytes;
    for (size_t k = 0; k < unit->part_count; k++) {
        const engine_part *part = &unit->parts[k];
        engine_space *space = &engine->spaces[part->space];
        size_t begin = partition_bucket(&space->plan, part->first_bucket).begin;
        for (size_t b = part->first_bucket; b < part->end_bucket; b++) {
            partition_range bucket = partition_bucket(&space->plan, b);
            char *to = (char *)slot->memory.base + part->offset_bytes + (bucket.begin - begin) * space->elem_bytes;
            ZC_TRY(gather_bucket(engine, space, b, to, slot));
            row->payload_elems += bucket.end - bucket.begin;
            row->bytes += (bucket.end - bucket.begin) / engine->ranks * (engine->ranks - 1) * space->elem_bytes;
        }
    }
    row->calls++;
    profile_note(engine, ZC_WORK_GATHER, NULL, index, row->bytes - bytes, begin_ns);
    slot->owner = index;
    slot->generation++;
    return ZC_OK;
}

/*
 * Nothing came after the last unit.  Not in the middle of a backward: what looks
 * like an end there is a checkpoint, which runs its forward once more.  (Whether
 * this rank has had a gradient yet would be another question: where gathers are
 * collective all ranks must guess alike.)
 */
static void end_order(zc_engine *engine)
{
    if (engine->last_unit != ZC_NO_UNIT && engine->backward_round != engine->round_count)
        engine->units[engine->last_unit].next[engine->last_backward] = ZC_NO_UNIT;
    engine->last_unit = ZC_NO_UNIT;
}

/* Notes that `index` came after the one before. */
static void note_order(zc_engine *engine, size_t index, int backward)
{
    if (engine->last_unit != ZC_NO_UNIT && engine->last_backward < backward)
        end_order(engine); /* the turn; a backward's end is known by step() */
    if (engine->last_unit != ZC_NO_UNIT && engine->last_unit != index && engine->last_backward == backward)
        engine->units[engine->last_unit].next[backward] = index;
    engine->last_unit = index;
    engine->last_backward = backward;
    if (backward)
        engine->backward_round = engine->round_count;
}

/* Whether `index`, or one of the next `count` - 1 units after it, is to be in this slot. */
static int is_promised(const zc_engine *engine, size_t index, int backward, size_t count, size_t slot)
{
    for (; count > 0; count--, index = engine->units[index].next[backward])
        if (engine->units[index].slot == slot)
            return 1;
    return 0;
}

/* Gathers what came after `index` last time. A unit further ahead never takes the slot of a nearer one. */
static zc_status look_ahead(zc_engine *engine, size_t index, int backward)
{
    size_t ahead = index;
    for (size_t k = 0; k < engine->config.prefetch; k++) {
        ahead = engine->units[ahead].next[backward];
        if (ahead == ZC_NO_UNIT || ahead == index)
            return ZC_OK;
        engine_slot *slot = &engine->slots[engine->units[ahead].slot];
        if (slot->owner == ahead)
            continue;
        if (is_promised(engine, index, backward, k + 1, engine->units[ahead].slot) ||
            (slot->owner != ZC_NO_UNIT && engine->units[slot->owner].users))
            return ZC_OK;
        ZC_TRY(gather(engine, ahead));
    }
    return ZC_OK;
}

/* ---- using units ---------------------------------------------------------------- */

static zc_status check_unit(const zc_engine *engine, size_t unit)
{
    if (unit < engine->unit_count)
        return ZC_OK;
    return zc_fail(ZC_EINVAL, "rank %zu: unit %zu of %zu", engine->rank, unit, engine->unit_count);
}

zc_status zc_engine_acquire(zc_engine *engine, size_t index, int backward)
{
    ZC_TRY(check_unit(engine, index));
    ZC_TRY(engine_check_loaded(engine));
    ZC_TRY(capture_follow(engine, "using a unit"));
    engine_unit *unit = &engine->units[index];
    if (unit->resident)
        end_order(engine);
    if (!unit->bytes)
        return ZC_OK;
    engine_slot *slot = &engine->slots[unit->slot];
    size_t owner = slot->owner;
    if (owner != index && owner != ZC_NO_UNIT && engine->units[owner].users)
        return zc_fail(ZC_ESTATE, "rank %zu: %s and %s are used at the same time but share memory; they must not be "
                       "units of one level", engine->rank, unit_name(engine, owner), unit_name(engine, index));
    if (owner != index)
        ZC_TRY(gather(engine, index));
    ZC_TRY(wait_gather(engine, slot));
    unit->users++;
    if (unit->resident)
        return ZC_OK;
    note_order(engine, index, backward != 0);
    zc_status status = look_ahead(engine, index, backward != 0);
    if (status != ZC_OK)
        unit->users--; /* the caller will not release what it did not get */
    return status;
}

void zc_engine_release(zc_engine *engine, size_t index)
{
    if (index >= engine->unit_count || !engine->units[index].users || --engine->units[index].users)
        return;
    engine_unit *unit = &engine->units[index];
    if (!engine->config.fill_discarded || unit->resident)
        return;
    engine_slot *slot = &engine->slots[unit->slot];
    slot->owner = ZC_NO_UNIT;
    engine->device->ops->fill(engine->device, engine->stream, slot->memory.base, 0xff, unit->bytes);
}

size_t zc_engine_unit_user(const zc_engine *engine, size_t index)
{
    if (index >= engine->unit_count || !engine->units[index].bytes)
        return ZC_NO_UNIT;
    size_t owner = engine->slots[engine->units[index].slot].owner;
    return owner != ZC_NO_UNIT && engine->units[owner].users ? owner : ZC_NO_UNIT;
}

uint64_t zc_engine_unit_generation(const zc_engine *engine, size_t index)
{
    if (index >= engine->unit_count || !engine->units[index].bytes)
        return 0;
    const engine_slot *slot = &engine->slots[engine->units[index].slot];
    return slot->owner == index ? slot->generation : 0;
}

int zc_engine_units_share(const zc_engine *engine)
{
    return engine->device->ops->slot_map != NULL;
}

void *zc_engine_unit_range(const zc_engine *engine, size_t index, size_t *bytes)
{
    *bytes = index < engine->unit_count ? engine->units[index].bytes : 0;
    return *bytes ? engine->units[index].base : NULL;
}

/* ---- writing shards --------------------------------------------------------------- */

zc_status stage3_check_unused(const zc_engine *engine, const char *what)
{
    for (size_t u = 0; u < engine->unit_count; u++)
        if (engine->units[u].users)
            return zc_fail(ZC_ESTATE, "rank %zu: %s while %s is in use; parameters change only between a backward's "
                           "end and the next forward", engine->rank, what, unit_name(engine, u));
    return ZC_OK;
}

zc_status stage3_settle(zc_engine *engine)
{
    for (size_t s = 0; s < engine->slot_count; s++)
        ZC_TRY(wait_gather(engine, &engine->slots[s]));
    return ZC_OK;
}

zc_status stage3_written(zc_engine *engine, const char *what)
{
    for (size_t s = 0; s < engine->slot_count; s++)
        engine->slots[s].owner = ZC_NO_UNIT;
    engine->backward_round = UINT64_MAX;
    end_order(engine);
    if (!engine_reads_peers(engine))
        return ZC_OK; /* gathers come after the writes in the stream, on every rank */
    return round_barrier(engine, what);
}

/* The own slices of elements [begin, end) of a space, from `values`, which begins at element `begin`. */
static zc_status store_range(zc_engine *engine, engine_space *space, size_t begin, size_t end, const char *values)
{
    size_t last = partition_bucket_of(&space->plan, end - 1);
    for (size_t b = partition_bucket_of(&space->plan, begin); b <= last; b++) {
        partition_range own = partition_slice(&space->plan, b, engine->rank);
        size_t from = own.begin > begin ? own.begin : begin, stop = own.end < end ? own.end : end;
        if (from < stop)
            ZC_TRY(engine->device->ops->upload(engine->device, engine->stream, engine_param_at(engine, space, b, from),
                                               values + (from - begin) * space->elem_bytes,
                                               (stop - from) * space->elem_bytes));
    }
    return ZC_OK;
}

zc_status stage3_load(zc_engine *engine, size_t index, const void *values)
{
    engine_param *param = &engine->params[index];
    engine_space *space = &engine->spaces[param->space];
    size_t chunk = ((size_t)1 << 20) / space->elem_bytes;
    char *piece;
    zc_status status = ZC_OK;
    if (!param->elems)
        return ZC_OK;
    if (!values && engine->rank == 0)
        return zc_fail(ZC_EINVAL, "rank 0 must give the values of %s", engine_param_name(engine, index));
    zc_traffic_row *row = &engine->traffic.broadcast;
    row->calls++;
    row->payload_elems += param->elems;
    row->bytes += engine->rank == 0 ? param->elems * space->elem_bytes * (engine->ranks - 1) : 0;
    if (engine->ranks == 1)
        return store_range(engine, space, param->offset, param->offset + param->elems, values);
    if (chunk > param->elems)
        chunk = param->elems;
    piece = zc_malloc(chunk * space->elem_bytes);
    if (!piece)
        return zc_fail(ZC_ENOMEM, "rank %zu: no memory to load %s", engine->rank, engine_param_name(engine, index));
    for (size_t done = 0; status == ZC_OK && done < param->elems; done += chunk) {
        size_t count = param->elems - done < chunk ? param->elems - done : chunk;
        if (engine->rank == 0)
            memcpy(piece, (const char *)values + done * space->elem_bytes, count * space->elem_bytes);
        status = comm_array_broadcast(engine->comm, piece, count * space->elem_bytes, 0);
        if (status == ZC_OK)
            status = store_range(engine, space, param->offset + done, param->offset + done + count, piece);
        ZC_POINT("construction: a piece is here");
    }
    zc_free(piece);
    return status;
}

static zc_status store(zc_engine *engine, size_t index, const void *values)
{
    char with[MEET_WITH_BYTES];
    snprintf(with, sizeof with, "%s", engine_param_name(engine, index));
    ZC_TRY(round_meet(engine, MEET_STORE, index, "writing a parameter", with));
    ZC_TRY(stage3_settle(engine));
    ZC_TRY(stage3_load(engine, index, values));
    ZC_TRY(zc_engine_refresh(engine, index));
    return stage3_written(engine, "writing a parameter");
}

zc_status zc_engine_store(zc_engine *engine, size_t index, const void *values)
{
    if (engine->config.stage != 3)
        return zc_fail(ZC_EINVAL, "store is for stage 3; elsewhere write the parameter's memory, and refresh");
    if (index >= engine->param_count)
        return zc_fail(ZC_EINVAL, "parameter %zu of %zu", index, engine->param_count);
    if (!values && engine->rank == 0 && engine->params[index].elems) /* before the peers count on it */
        return zc_fail(ZC_EINVAL, "rank 0 must give the values of %s", engine_param_name(engine, index));
    ZC_TRY(stage3_check_unused(engine, "a parameter is written"));
    return engine_end_call(engine, "writing a parameter", store(engine, index, values));
}
