/*
 * The record of when this rank worked (zc_engine_profile).
 *
 * Who knows the time.  Updates, and at stage 3 gathers, are calls of the engine
 * that return when the work is done: the clock is read around them.  Reductions,
 * and gathers of buckets, are done by the communicator whenever peers are ready and
 * somebody polls, perhaps for another engine and in another thread.  It writes the times
 * into memory of the channel (comm_channel.times), and the engine takes them from
 * there when it takes note that the operation is over.  So the ring itself has one
 * writer and needs no care.
 *
 * A channel's times stay allocated when the record is switched off, until the
 * space goes: an operation that is under way may still write there.
 */
#include "engine.h"

static size_t times_count(const engine_space *space, size_t ranks)
{
    return (2 * space->plan.buckets + 1) * ranks;
}

static uint32_t number_of(const zc_engine *engine, const engine_space *space, size_t b)
{
    for (const engine_space *before = engine->spaces; before < space; before++)
        b += before->plan.buckets;
    return (uint32_t)b;
}

static void put(zc_engine *engine, const zc_work *work)
{
    if (engine->work_count == engine->work_room) {
        engine->work_lost++;
        return;
    }
    engine->work[(engine->work_first + engine->work_count++) % engine->work_room] = *work;
}

void profile_note(zc_engine *engine, zc_work_kind kind, const engine_space *space, size_t number, size_t bytes,
                  uint64_t begin_ns)
{
    if (!engine->work)
        return;
    put(engine, &(zc_work){begin_ns, profile_now_ns(engine), bytes, kind,
                           space ? number_of(engine, space, number) : (uint32_t)number, (uint32_t)engine->rank});
}

/* An operation's times become notes. Also while it is off, so that none is left for the next one. */
static void take_times(zc_engine *engine, engine_space *space, uint32_t tag, zc_work_kind kind, size_t b, size_t bytes)
{
    for (size_t q = 0; space->times && q < engine->ranks; q++) {
        comm_times *times = &space->times[(size_t)tag * engine->ranks + q];
        if (times->end_ns && engine->work)
            put(engine, &(zc_work){times->begin_ns, times->end_ns, bytes, kind, number_of(engine, space, b), (uint32_t)q});
        times->end_ns = 0;
    }
}

void profile_reduced(zc_engine *engine, engine_space *space, size_t b)
{
    size_t bytes = partition_shard_elems(&space->plan, b) * (engine->ranks - 1) * space->elem_bytes;
    take_times(engine, space, SPACE_TAG_REDUCE(b), ZC_WORK_REDUCE, b, bytes);
}

void profile_gathered(zc_engine *engine, engine_space *space, size_t b, size_t elem_bytes)
{
    take_times(engine, space, SPACE_TAG_GATHER(b), ZC_WORK_GATHER, b, partition_shard_elems(&space->plan, b) * elem_bytes);
}

/* ---- on and off ----------------------------------------------------------------- */

zc_status profile_watch(zc_engine *engine, engine_space *space)
{
    size_t count = times_count(space, engine->ranks);
    if (!space->times) {
        space->times = zc_calloc(count, sizeof *space->times);
        if (!space->times)
            return zc_fail(ZC_ENOMEM, "rank %zu: no memory for the times of %zu buckets' operations", engine->rank,
                           space->plan.buckets);
        engine->memory.buffers += count * sizeof *space->times;
    }
    space->channel->times = space->times;
    return ZC_OK;
}

void profile_free(zc_engine *engine)
{
    engine->memory.buffers -= engine->work_room * sizeof *engine->work;
    zc_free(engine->work);
    engine->work = NULL;
    engine->work_room = engine->work_first = engine->work_count = 0;
    engine->work_lost = 0;
}

void profile_free_times(zc_engine *engine, engine_space *space)
{
    if (space->times)
        engine->memory.buffers -= times_count(space, engine->ranks) * sizeof *space->times;
    zc_free(space->times);
}

zc_status zc_engine_profile(zc_engine *engine, size_t capacity)
{
    zc_work *work = NULL;
    if (capacity && !engine->device->ops->now_ns)
        return zc_fail(ZC_EINVAL, "rank %zu: times of work are recorded on the CPU; on '%s' it is enqueued, and done when "
                       "the host does not look: use the profiler of that device", engine->rank, engine->device->ops->name);
    if (capacity && !(work = zc_calloc(capacity, sizeof *work)))
        return zc_fail(ZC_ENOMEM, "rank %zu: no memory for a record of %zu pieces of work", engine->rank, capacity);
    zc_status status = ZC_OK;
    for (size_t s = 0; work && status == ZC_OK && s < engine->space_count; s++)
        status = profile_watch(engine, &engine->spaces[s]);
    if (status != ZC_OK) {
        zc_free(work);
        work = engine->work;
    }
    for (size_t s = 0; !work && s < engine->space_count; s++)
        engine->spaces[s].channel->times = NULL;
    ZC_TRY(status);
    profile_free(engine);
    engine->work = work;
    engine->work_room = capacity;
    engine->memory.buffers += capacity * sizeof *work;
    return ZC_OK;
}

size_t zc_engine_take_work(zc_engine *engine, zc_work *to, size_t room, uint64_t *lost)
{
    size_t count = engine->work_count < room ? engine->work_count : room;
    for (size_t k = 0; k < count; k++)
        to[k] = engine->work[(engine->work_first + k) % engine->work_room];
    if (count)
        engine->work_first = (engine->work_first + count) % engine->work_room;
    engine->work_count -= count;
    *lost = engine->work_lost;
    engine->work_lost = 0;
    return count;
}
