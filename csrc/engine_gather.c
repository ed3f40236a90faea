/*
 * Gathers of whole buckets that a step starts: who waits for them, and when.
 *
 * Usually step() itself, before it returns.  With overlap_gather it returns at
 * once, and parameters become right while the caller begins its next forward,
 * which says what it is about to read (zc_engine_wait_params).  What is not waited
 * for there is waited for
 *
 *   - at the beginning of a round, which uses the buckets' tickets and windows;
 *   - before ranks meet, and with that before a step, a read, more parameters;
 *   - by every function that reads or replaces whole parameters;
 *   - at the end: peers read this rank's memory as long as a gather is under way.
 *
 * A gather that is done is so on all ranks: they have this rank's slice, and it
 * has theirs.  So who waits may be kept by a peer that does not come, be it that
 * it computes: every call of the engine that waits helps, and so does every
 * gradient.  A rank that wants to do something alone waits for all of it before.
 */
#include "engine.h"
#include "zc_point.h"

zc_status gather_start(zc_engine *engine, engine_space *space, size_t b, comm_region *region, size_t elem_bytes)
{
    partition_range range = partition_bucket(&space->plan, b);
    size_t shard = partition_shard_elems(&space->plan, b);
    if (!(region->flags & COMM_ONE_COPY)) {
        zc_traffic_row *row = &engine->traffic.all_gather;
        row->calls++;
        row->payload_elems += shard * engine->ranks;
        row->bytes += shard * (engine->ranks - 1) * elem_bytes;
    }
    ZC_TRY(comm_all_gather(space->channel, engine->stream, SPACE_TAG_GATHER(b), region, range.begin * elem_bytes,
                           shard * elem_bytes, &space->buckets[b].ticket));
    space->buckets[b].gathering = elem_bytes;
    engine->gathering++;
    return ZC_OK;
}

static zc_status finish(zc_engine *engine, engine_space *space, size_t b)
{
    if (!space->buckets[b].gathering)
        return ZC_OK;
    ZC_TRY(comm_wait(space->channel, space->buckets[b].ticket, engine->stream));
    ZC_POINT("gather: a bucket is here");
    profile_gathered(engine, space, b, space->buckets[b].gathering);
    space->buckets[b].gathering = 0;
    engine->gathering--;
    return ZC_OK;
}

zc_status gather_finish(zc_engine *engine)
{
    for (size_t s = 0; engine->gathering && s < engine->space_count; s++)
        for (size_t b = 0; b < engine->spaces[s].plan.buckets; b++)
            ZC_TRY(finish(engine, &engine->spaces[s], b));
    return ZC_OK;
}

static zc_status finish_param(zc_engine *engine, const engine_param *param)
{
    engine_space *space = &engine->spaces[param->space];
    if (!param->elems)
        return ZC_OK;
    size_t last = partition_bucket_of(&space->plan, param->offset + param->elems - 1);
    for (size_t b = partition_bucket_of(&space->plan, param->offset); b <= last; b++)
        ZC_TRY(finish(engine, space, b));
    return ZC_OK;
}

zc_status zc_engine_wait_params(zc_engine *engine, const size_t *indices, size_t count)
{
    if (!indices)
        return gather_finish(engine);
    for (size_t k = 0; k < count; k++)
        if (indices[k] >= engine->param_count)
            return zc_fail(ZC_EINVAL, "parameter %zu of %zu", indices[k], engine->param_count);
    for (size_t k = 0; engine->gathering && k < count; k++)
        ZC_TRY(finish_param(engine, &engine->params[indices[k]]));
    return ZC_OK;
}

static zc_status spread(zc_engine *engine)
{
    ZC_TRY(round_meet(engine, MEET_STORE, SIZE_MAX, "loading", NULL));
    ZC_TRY(stage3_settle(engine));
    if (engine->config.stage == 3)
        return stage3_written(engine, "loading");
    for (size_t s = 0; s < engine->space_count; s++)
        for (size_t b = 0; b < engine->spaces[s].plan.buckets; b++)
            ZC_TRY(gather_start(engine, &engine->spaces[s], b, engine->spaces[s].param, engine->spaces[s].elem_bytes));
    return gather_finish(engine);
}

zc_status zc_engine_spread(zc_engine *engine)
{
    return engine_end_call(engine, "loading", spread(engine));
}
