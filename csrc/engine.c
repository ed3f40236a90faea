/*
 * The life of an engine: comparing what the ranks registered, planning the
 * spaces, reserving their memory, taking the parameters in, and giving it all
 * back.
 *
 * Construction is collective.  Nothing is allocated before the ranks have
 * compared what they were given, so ranks that disagree fail together and
 * cheaply.  Parameter memory is reserved as parameters are loaded, the last
 * one first, so a caller that frees each source after loading it never holds
 * two copies of the model.
 */
#include "engine.h"
#include "zc_point.h"

#include <math.h>
#include <stdio.h>

/* ---- small helpers ------------------------------------------------------ */

const char *engine_param_name(const zc_engine *engine, size_t index)
{
    static _Thread_local char text[160];
    const char *name = index < engine->param_count ? engine->params[index].name : NULL;
    snprintf(text, sizeof text, name ? "parameter %zu (%s)" : "parameter %zu", index, name);
    return text;
}

zc_status engine_alloc(zc_engine *engine, size_t bytes, uint64_t *account, void *out)
{
    void *memory = NULL;
    ZC_TRY(engine->device->ops->alloc(engine->device, bytes, &memory));
    *account += bytes;
    memcpy(out, &memory, sizeof memory);
    return ZC_OK;
}

static void release(zc_engine *engine, void *memory, size_t bytes, uint64_t *account)
{
    if (!memory)
        return;
    engine->device->ops->free(engine->device, memory, bytes);
    *account -= bytes;
}

char *engine_copy_text(const char *text)
{
    size_t bytes = strlen(text) + 1;
    char *copy = zc_malloc(bytes);
    if (copy)
        memcpy(copy, text, bytes);
    return copy;
}

/* Elements of a space for which this rank keeps optimizer state. */
static size_t state_elems(const zc_engine *engine, const engine_space *space)
{
    if (space->frozen)
        return 0;
    return engine->config.stage == 0 ? space->plan.total_elems : partition_shard_total(&space->plan);
}

/* Bytes of parameters that are always there. */
static size_t kept_bytes(const zc_engine *engine, const engine_space *space)
{
    size_t elems = engine->config.stage == 3 ? partition_shard_total(&space->plan) : space->plan.total_elems;
    return elems * space->elem_bytes;
}

/* ---- what fails on all ranks, and on one ------------------------------------ */

zc_status engine_end_call(zc_engine *engine, const char *what, zc_status status)
{
    int agreed = engine->agreed;
    engine->agreed = 0;
    return agreed ? status : comm_give_up(engine->comm, what, status);
}

static zc_status open_channel(zc_engine *engine, const char *name, uint32_t tags, comm_channel **out)
{
    zc_status status = comm_channel_open(engine->comm, name, tags, out);
    engine->agreed = status != ZC_OK;
    return status;
}

static zc_status alloc_region(zc_engine *engine, comm_channel *channel, size_t bytes, unsigned flags, comm_region **out)
{
    zc_status status = comm_region_alloc(channel, bytes, flags, out);
    engine->agreed = status != ZC_OK;
    return status;
}

/* ---- reserve: memory of spaces and of what is kept per parameter ----------- */

/* The parameters' memory: as much as is loaded into it. */
static zc_status reserve_params(zc_engine *engine, engine_space *space, size_t number)
{
    char name[32];
    unsigned shared = engine->config.shared_params ? COMM_ONE_COPY : 0;
    size_t kept = kept_bytes(engine, space);
    comm_channel *home;
    snprintf(name, sizeof name, "space %zu", number);
    ZC_TRY(open_channel(engine, name, (uint32_t)(2 * space->plan.buckets + 1), &space->channel));
    home = engine->config.stage == 3 ? engine->gathers : space->channel;
    ZC_TRY(alloc_region(engine, home, kept, COMM_GROWS | shared, &space->param));
    engine->memory.parameters += engine->config.shared_params ? kept / engine->comm->local_ranks : kept;
    return ZC_OK;
}

static zc_status reserve_state(zc_engine *engine, engine_space *space);

/*
 * Everything else that is kept of a space.  After its parameters have been
 * loaded: until then the caller has the values too.
 */
static zc_status reserve_rest(zc_engine *engine, engine_space *space)
{
    int stage = engine->config.stage;
    size_t total = space->plan.total_elems;
    if (space->frozen)
        return ZC_OK;

    size_t most = partition_most_shard(&space->plan), reserved;
    space->slot_bytes = most * engine->ranks * space->elem_bytes;
    ZC_TRY(comm_reserve(space->channel, most, space->dtype, &reserved));
    engine->memory.buffers += reserved;
    if (stage == 1) {
        space->slots = space->plan.buckets;
        ZC_TRY(alloc_region(engine, space->channel, total * space->elem_bytes, 0, &space->window));
        engine->memory.gradients += total * space->elem_bytes;
    } else {
        space->slots = space->plan.buckets < engine->config.ring_slots ? space->plan.buckets
                                                                       : engine->config.ring_slots;
        ZC_TRY(alloc_region(engine, space->channel, space->slots * space->slot_bytes, 0, &space->window));
        engine->memory.buffers += space->slots * space->slot_bytes;
    }
    if (stage == 0) {
        ZC_TRY(alloc_region(engine, space->channel, total * space->sum_bytes, 0, &space->full_sums));
        engine->memory.gradients += total * space->sum_bytes;
    }
    if (stage >= 2)
        ZC_TRY(engine_alloc(engine, state_elems(engine, space) * space->sum_bytes, &engine->memory.gradients,
                            &space->sums));
    if (stage == 1 && space->elem_bytes < space->sum_bytes && space->plan.buckets) {
        space->scratch_slots = space->plan.buckets < ENGINE_SCRATCH_SLOTS ? space->plan.buckets : ENGINE_SCRATCH_SLOTS;
        ZC_TRY(engine_alloc(engine,
                            space->scratch_slots * partition_most_shard(&space->plan) * space->sum_bytes,
                            &engine->memory.buffers, &space->scratch));
    }
    ZC_TRY(engine_alloc(engine, state_elems(engine, space) * zc_dtype_master_bytes(space->dtype),
                        &engine->memory.master, &space->master));
    if (engine->config.rule != OPTIM_SGD) {
        size_t bytes = state_elems(engine, space) * space->sum_bytes;
        ZC_TRY(engine_alloc(engine, bytes, &engine->memory.optimizer_state, &space->m));
        ZC_TRY(engine_alloc(engine, bytes, &engine->memory.optimizer_state, &space->v));
    }
    if (stage == 0 && engine->config.shared_params && space->plan.buckets) {
        size_t bytes = partition_most_shard(&space->plan) * space->elem_bytes;
        if (bytes > engine->slice_scratch_bytes) {
            release(engine, engine->slice_scratch, engine->slice_scratch_bytes, &engine->memory.buffers);
            engine->slice_scratch = NULL;
            engine->slice_scratch_bytes = 0;
            ZC_TRY(engine_alloc(engine, bytes, &engine->memory.buffers, &engine->slice_scratch));
            engine->slice_scratch_bytes = bytes;
        }
    }
    return reserve_state(engine, space);
}

/* A space for the parameters from first_param on that are of this type, and frozen or not. */
static zc_status add_space(zc_engine *engine, zc_dtype dtype, int frozen, size_t first_param)
{
    engine_space *space = &engine->spaces[engine->space_count];
    size_t count = 0;
    memset(space, 0, sizeof *space);
    for (size_t i = first_param; i < engine->param_count; i++)
        count += engine->params[i].dtype == dtype && engine->params[i].frozen == frozen;
    if (!count)
        return ZC_OK;
    space->dtype = dtype;
    space->frozen = frozen;
    space->sum_dtype = zc_dtype_sum(dtype);
    space->elem_bytes = zc_dtype_bytes(dtype);
    space->sum_bytes = zc_dtype_bytes(space->sum_dtype);
    space->plan.ranks = engine->ranks; /* an empty plan, until there is one */
    engine->space_count++; /* from here on destroy() takes care of it */

    ZC_TRY(plan_layout(engine, space, first_param, count));
    ZC_TRY(plan_buckets(space, engine->params));
    if (!frozen)
        ZC_TRY(plan_spans(engine, space));
    ZC_TRY(reserve_params(engine, space, engine->space_count - 1));
    return engine->work ? profile_watch(engine, space) : ZC_OK;
}

/* Arrays with one entry per parameter grow with them; what they hold is kept. */
static zc_status grow_segments(zc_engine *engine, size_t before)
{
    size_t count = engine->param_count, words = (count + 3) / 4;
    size_t stats_bytes = sizeof(device_stats) + words * sizeof(uint64_t);
    device_segment *segments = NULL, *host = zc_calloc(count ? count : 1, sizeof *host);
    zc_status status = ZC_OK;
    if (!host)
        return zc_fail(ZC_ENOMEM, "no memory for %zu segments", count);
    status = engine_alloc(engine, count * sizeof *segments, &engine->memory.buffers, &segments);
    if (status == ZC_OK && before)
        status = engine->device->ops->download(engine->device, engine->stream, host, engine->segments,
                                               before * sizeof *host);
    for (size_t i = before; i < count; i++)
        host[i].group = engine->params[i].group;
    if (status == ZC_OK && count)
        status = engine->device->ops->upload(engine->device, engine->stream, segments, host, count * sizeof *host);
    zc_free(host);
    if (status != ZC_OK) {
        release(engine, segments, count * sizeof *segments, &engine->memory.buffers);
        return status;
    }
    release(engine, engine->segments, before * sizeof *segments, &engine->memory.buffers);
    release(engine, engine->scalars, before * sizeof *engine->scalars, &engine->memory.buffers);
    engine->segments = segments;
    engine->segment_count = count;
    engine->scalars = NULL;
    ZC_TRY(engine_alloc(engine, count * sizeof *engine->scalars, &engine->memory.buffers, &engine->scalars));
    if (engine->stats_sum) {
        size_t old = engine->stats_words * sizeof(uint64_t);
        release(engine, engine->stats_sum, old, &engine->memory.buffers);
        engine->memory.buffers -= old;
        comm_region_free(engine->stats);
        engine->stats_sum = NULL;
        engine->stats = NULL;
    }
    ZC_TRY(alloc_region(engine, engine->control, stats_bytes, 0, &engine->stats));
    engine->stats_words = stats_bytes / sizeof(uint64_t);
    engine->memory.buffers += stats_bytes;
    return engine_alloc(engine, stats_bytes, &engine->memory.buffers, &engine->stats_sum);
}

/* Arrays that some group's options call for. */
static zc_status reserve_state(zc_engine *engine, engine_space *space)
{
    size_t bytes = state_elems(engine, space) * space->sum_bytes;
    if ((engine->state_flags & ENGINE_HAS_MOMENTUM) && !space->m)
        ZC_TRY(engine_alloc(engine, bytes, &engine->memory.optimizer_state, &space->m));
    if ((engine->state_flags & ENGINE_HAS_AMSGRAD) && !space->vmax)
        ZC_TRY(engine_alloc(engine, bytes, &engine->memory.optimizer_state, &space->vmax));
    return ZC_OK;
}

/* The flags of the arrays that these options call for. */
static int wanted_state(const zc_engine *engine, const zc_options *groups)
{
    int want = 0;
    for (size_t g = 0; g < engine->group_count; g++) {
        if (engine->config.rule == OPTIM_SGD && groups[g].momentum != 0)
            want |= ENGINE_HAS_MOMENTUM;
        if (engine->config.rule != OPTIM_SGD && groups[g].amsgrad)
            want |= ENGINE_HAS_AMSGRAD;
    }
    return want;
}

zc_status engine_ensure_state(zc_engine *engine, const zc_options *groups)
{
    if ((engine->captured || engine->graph) && wanted_state(engine, groups) & ~engine->state_flags)
        return zc_fail(ZC_ESTATE, "rank %zu: options of the groups call for arrays (momentum, amsgrad) that the captured CUDA "
                       "graph does not have; set them before the first step, or build a new optimizer", engine->rank);
    engine->state_flags |= wanted_state(engine, groups);
    for (size_t s = 0; engine->state_flags && s < engine->space_count; s++)
        ZC_TRY(reserve_state(engine, &engine->spaces[s]));
    return ZC_OK;
}

zc_status zc_engine_prepare(zc_engine *engine, const zc_options *groups, size_t group_count)
{
    if (group_count != engine->group_count)
        return zc_fail(ZC_EINVAL, "%zu groups, but the engine has %zu", group_count, engine->group_count);
    for (size_t g = 0; g < group_count; g++)
        ZC_TRY(optim_check(engine->config.rule, &groups[g]));
    return engine_ensure_state(engine, groups);
}

static zc_status load_param(zc_engine *engine, size_t index, const void *values);
static zc_status publish(zc_engine *engine);

static zc_status register_params(zc_engine *engine, const zc_param *params, size_t count, const zc_options *groups,
                                 size_t group_count)
{
    size_t before = engine->param_count;
    engine_param *all = zc_realloc(engine->params, (before + count + 1) * sizeof *all);
    if (!all)
        return zc_fail(ZC_ENOMEM, "no memory for %zu parameters", before + count);
    engine->params = all;
    engine_space *spaces = zc_realloc(engine->spaces, (engine->space_count + 8) * sizeof *spaces);
    if (!spaces)
        return zc_fail(ZC_ENOMEM, "no memory for the plan");
    engine->spaces = spaces;
    for (size_t i = 0; i < count; i++) {
        engine_param *param = &engine->params[before + i];
        memset(param, 0, sizeof *param);
        param->elems = params[i].elems;
        param->dtype = params[i].dtype;
        param->group = params[i].group;
        param->unit = params[i].unit;
        param->frozen = params[i].frozen != 0;
        engine->param_count++;
        if (params[i].name && !(param->name = engine_copy_text(params[i].name)))
            return zc_fail(ZC_ENOMEM, "no memory for the name of parameter %zu", before + i);
    }
    engine->group_count = group_count;
    for (int frozen = 0; frozen <= 1; frozen++)
        for (int dtype = ZC_FLOAT32; dtype <= ZC_FLOAT16; dtype++)
            ZC_TRY(add_space(engine, (zc_dtype)dtype, frozen, before));
    ZC_TRY(plan_sequence(engine));
    if (engine->config.stage == 3)
        ZC_TRY(stage3_reserve(engine));
    ZC_TRY(grow_segments(engine, before));
    engine->state_flags |= wanted_state(engine, groups);
    engine->loading = 1;

    int all_given = 1;
    for (size_t i = 0; i < count; i++)
        all_given &= params[i].initial != NULL || params[i].elems == 0;
    if (!all_given)
        return ZC_OK;
    for (size_t i = count; i-- > 0;)
        ZC_TRY(load_param(engine, before + i, params[i].initial));
    return publish(engine);
}

zc_status engine_create(zc_comm *comm, zc_device *device, zc_stream *stream, const zc_engine_config *config,
                        const zc_param *params, size_t count, const zc_options *groups, size_t group_count,
                        zc_engine **out)
{
    zc_status status = ZC_OK;
    zc_engine *engine = zc_calloc(1, sizeof *engine);
    *out = NULL;
    if (!engine) {
        device->ops->destroy(device);
        return comm_give_up(comm, "construction", zc_fail(ZC_ENOMEM, "no memory for an engine"));
    }
    engine->comm = comm;
    engine->device = device;
    engine->stream = stream;
    engine->config = *config;
    engine->rank = comm->rank;
    engine->ranks = comm->ranks;
    engine->clip_factor = 1.0;
    engine->discards = ZC_HASH_START;
    engine->last.norm = NAN;
    engine->last_known = 1;
    engine->patience_ns = ENGINE_PATIENCE_NS;
    status = engine_check_config(config);
    if (status == ZC_OK && (count == 0 || group_count == 0))
        status = zc_fail(ZC_EINVAL, "%zu parameters in %zu groups; at least one of each is needed", count, group_count);
    if (status == ZC_OK)
        status = engine_check_params(engine, params, count, group_count);
    for (size_t g = 0; status == ZC_OK && g < group_count; g++)
        status = optim_check(config->rule, &groups[g]);
    if (status == ZC_OK && config->stage == 3)
        status = stage3_copy_units(engine, config);
    engine->config.units = NULL; /* the caller's */
    if (engine->config.ring_slots == 0)
        engine->config.ring_slots = engine_is_ordered(engine) ? 3 : 16;
    if (status == ZC_OK)
        status = open_channel(engine, "engine", CONTROL_TAGS, &engine->control);
    if (status == ZC_OK)
        status = engine_compare(engine, params, count, groups, group_count);
    if (status == ZC_OK && config->stage == 3)
        status = open_channel(engine, "gathers", UNIT_TAGS, &engine->gathers);
    if (status == ZC_OK)
        status = engine_alloc(engine, sizeof *engine->result, &engine->memory.buffers, &engine->result);
    if (status == ZC_OK)
        status = engine_alloc(engine, sizeof *engine->flags, &engine->memory.buffers, &engine->flags);
    if (status == ZC_OK && device->ops->capturing)
        status = engine_alloc(engine, sizeof *engine->tally, &engine->memory.buffers, &engine->tally);
    if (status == ZC_OK)
        status = register_params(engine, params, count, groups, group_count);
    status = engine_end_call(engine, "construction", status);
    if (status != ZC_OK) {
        zc_engine_destroy(engine);
        return status;
    }
    *out = engine;
    return ZC_OK;
}

zc_status zc_engine_add_params(zc_engine *engine, const zc_param *params, size_t count, const zc_options *groups,
                               size_t group_count)
{
    if (group_count < engine->group_count)
        return zc_fail(ZC_EINVAL, "%zu groups given, but the engine has %zu; groups are never removed", group_count,
                       engine->group_count);
    if (engine->config.stage == 3)
        return zc_fail(ZC_EINVAL, "rank %zu: at stage 3 parameters cannot be added to an engine: the units' memory is "
                       "laid out once; give all of them at the start", engine->rank);
    ZC_TRY(engine_check_params(engine, params, count, group_count));
    for (size_t g = 0; g < group_count; g++)
        ZC_TRY(optim_check(engine->config.rule, &groups[g]));
    if (engine->round_open && !engine->round_aborted)
        return zc_fail(ZC_ESTATE, "rank %zu: parameters cannot be added between a backward's first gradient and its "
                       "end; add them before backward or after step()", engine->rank);
    if (engine->captured)
        return zc_fail(ZC_ESTATE, "rank %zu: parameters cannot be added after a step was captured into a CUDA graph, which has "
                       "the addresses of what would be replaced; add them before", engine->rank);
    zc_status status = round_meet(engine, MEET_ADD, 0, "add parameters", NULL);
    if (status == ZC_OK)
        status = engine_compare(engine, params, count, groups, group_count);
    if (status == ZC_OK)
        status = register_params(engine, params, count, groups, group_count);
    return engine_end_call(engine, "add parameters", status);
}

/* ---- loading ------------------------------------------------------------- */

/* Memory for a parameter and all before it in its space. */
static zc_status grow_for(zc_engine *engine, const engine_param *param)
{
    engine_space *space = &engine->spaces[param->space];
    if (param->elems == 0)
        return ZC_OK;
    ZC_TRY(gather_finish(engine));
    size_t end = param->extent * space->elem_bytes;
    if (engine->config.stage == 3) {
        size_t last = partition_bucket_of(&space->plan, param->extent - 1);
        end = partition_shard_offset(&space->plan, last) + partition_shard_elems(&space->plan, last);
        end *= space->elem_bytes;
    }
    if (end > space->grown_bytes) {
        ZC_TRY(comm_region_grow(space->param, end));
        space->grown_bytes = end;
    }
    return ZC_OK;
}

static size_t param_bytes(const zc_engine *engine, size_t index)
{
    return engine->params[index].elems * engine->spaces[engine->params[index].space].elem_bytes;
}

typedef zc_status copy_to_device(zc_device *device, zc_stream *stream, void *to, const void *from, size_t bytes);

/* Stages 0 to 2: every rank has the whole parameter. */
static zc_status load_whole(zc_engine *engine, size_t index, const void *values, copy_to_device *copy)
{
    ZC_TRY(grow_for(engine, &engine->params[index]));
    if (!values)
        return zc_fail(ZC_EINVAL, "rank %zu: no values for %s", engine->rank, engine_param_name(engine, index));
    if (engine->config.shared_params && engine->rank != 0)
        return ZC_OK; /* the one copy is rank 0's */
    return copy(engine->device, engine->stream, zc_engine_param(engine, index), values, param_bytes(engine, index));
}

static zc_status load_param(zc_engine *engine, size_t index, const void *values)
{
    if (!engine->params[index].elems)
        return ZC_OK;
    if (engine->config.stage != 3)
        return load_whole(engine, index, values, engine->device->ops->upload);
    ZC_TRY(grow_for(engine, &engine->params[index]));
    return stage3_load(engine, index, values);
}

zc_status zc_engine_load_param(zc_engine *engine, size_t index, const void *values)
{
    if (index >= engine->param_count)
        return zc_fail(ZC_EINVAL, "parameter %zu of %zu", index, engine->param_count);
    return engine_end_call(engine, "loading", load_param(engine, index, values));
}

/* Stage 3: rank 0's values are sent around by the hosts. */
static zc_status load_through_host(zc_engine *engine, size_t index, const void *values)
{
    size_t bytes = param_bytes(engine, index);
    char *host = zc_malloc(bytes);
    zc_status status = host ? engine->device->ops->download(engine->device, engine->stream, host, values, bytes)
                            : zc_fail(ZC_ENOMEM, "rank %zu: no memory to load %s", engine->rank,
                                      engine_param_name(engine, index));
    if (status == ZC_OK)
        status = load_param(engine, index, host);
    zc_free(host);
    return status;
}

zc_status zc_engine_load_from_device(zc_engine *engine, size_t index, const void *values)
{
    if (index >= engine->param_count)
        return zc_fail(ZC_EINVAL, "parameter %zu of %zu", index, engine->param_count);
    if (!engine->params[index].elems)
        return ZC_OK;
    return engine_end_call(engine, "loading",
                           engine->config.stage == 3
                               ? load_through_host(engine, index, values)
                               : load_whole(engine, index, values, engine->device->ops->copy));
}

zc_status zc_engine_copy_param(zc_engine *engine, size_t index, void *to)
{
    if (index >= engine->param_count)
        return zc_fail(ZC_EINVAL, "parameter %zu of %zu", index, engine->param_count);
    if (engine->config.stage == 3)
        return zc_fail(ZC_EINVAL, "rank %zu: at stage 3 no rank has %s; fetch it", engine->rank,
                       engine_param_name(engine, index));
    ZC_TRY(zc_engine_wait_params(engine, &index, 1));
    return engine->device->ops->copy(engine->device, engine->stream, to, zc_engine_param(engine, index),
                                     param_bytes(engine, index));
}

/* ---- streams ---------------------------------------------------------------- */

zc_status zc_engine_use_stream(zc_engine *engine, void *stream)
{
    if (stream == engine->stream)
        return ZC_OK;
    ZC_TRY(zc_engine_order(engine, stream));
    engine->stream = stream;
    return ZC_OK;
}

zc_status zc_engine_order(zc_engine *engine, void *stream)
{
    if (stream == engine->stream)
        return ZC_OK;
    return engine->device->ops->order(engine->device, engine->stream, stream);
}

/* ---- the end of loading ------------------------------------------------------ */

static zc_status publish(zc_engine *engine)
{
    for (size_t s = 0; s < engine->space_count; s++) {
        engine_space *space = &engine->spaces[s];
        size_t bytes = kept_bytes(engine, space);
        if (space->grown_bytes == SIZE_MAX || !bytes)
            continue;
        ZC_TRY(comm_region_grow(space->param, bytes));
        space->grown_bytes = SIZE_MAX;
        ZC_POINT("construction: parameters are there");
        ZC_TRY(reserve_rest(engine, space));
        if (engine->config.stage == 3)
            continue; /* rank 0's values were sent around when they were loaded */
        for (size_t b = 0; b < space->plan.buckets; b++) {
            partition_range range = partition_bucket(&space->plan, b);
            ZC_TRY(comm_broadcast(space->channel, engine->stream, SPACE_TAG_GATHER(b), space->param,
                                  range.begin * space->elem_bytes, (range.end - range.begin) * space->elem_bytes, 0,
                                  &space->buckets[b].ticket));
            engine->traffic.broadcast.calls++;
            engine->traffic.broadcast.payload_elems += range.end - range.begin;
            engine->traffic.broadcast.bytes += engine->rank == 0 && !engine->config.shared_params
                                                   ? (range.end - range.begin) * space->elem_bytes * (engine->ranks - 1)
                                                   : 0;
        }
        for (size_t b = 0; b < space->plan.buckets; b++)
            ZC_TRY(comm_wait(space->channel, space->buckets[b].ticket, engine->stream));
    }
    ZC_TRY(zc_engine_refresh(engine, SIZE_MAX));
    ZC_POINT("construction: values are here");
    engine->loading = 0;
    return engine->config.stage == 3 ? stage3_written(engine, "construction") : ZC_OK;
}

zc_status zc_engine_publish(zc_engine *engine)
{
    return engine_end_call(engine, "construction", publish(engine));
}

zc_status engine_check_loaded(const zc_engine *engine)
{
    if (!engine->loading)
        return ZC_OK;
    return zc_fail(ZC_ESTATE, "rank %zu: the parameters are not complete yet; load them, then call zc_engine_publish",
                   engine->rank);
}

void *zc_engine_param(const zc_engine *engine, size_t index)
{
    if (index >= engine->param_count || engine->params[index].elems == 0)
        return NULL;
    const engine_param *param = &engine->params[index];
    const engine_space *space = &engine->spaces[param->space];
    if (engine->config.stage < 3)
        return engine_at(space->param->base, param->offset, space->elem_bytes);
    const engine_unit *unit = &engine->units[param->unit];
    const engine_part *part = unit->parts;
    while (part->space != param->space)
        part++;
    size_t inside = param->offset - partition_bucket(&space->plan, part->first_bucket).begin;
    return unit->base + part->offset_bytes + inside * space->elem_bytes;
}

size_t zc_engine_param_count(const zc_engine *engine)
{
    return engine->param_count;
}

/* ---- looking in ----------------------------------------------------------- */

void zc_engine_memory(const zc_engine *engine, zc_memory *out)
{
    *out = engine->memory;
    out->buffers += engine->held_bytes;
    out->total = out->parameters + out->gradients + out->master + out->optimizer_state + out->buffers;
}

zc_status zc_engine_traffic(zc_engine *engine, zc_traffic *out)
{
    ZC_TRY(capture_refuse(engine, "reading the traffic"));
    *out = engine->traffic;
    ZC_TRY(capture_add_traffic(engine, out));
    out->bytes = out->reduce_scatter.bytes + out->all_gather.bytes + out->broadcast.bytes;
    memset(&engine->traffic, 0, sizeof engine->traffic);
    return ZC_OK;
}

void zc_engine_plan(const zc_engine *engine, zc_plan *out)
{
    memset(out, 0, sizeof *out);
    out->spaces = engine->space_count;
    for (size_t s = 0; s < engine->space_count; s++) {
        const engine_space *space = &engine->spaces[s];
        out->buckets += space->plan.buckets;
        out->padded_elems += space->plan.total_elems;
        if (engine->config.stage != 1)
            out->ring_bytes += space->slots * space->slot_bytes;
    }
    for (size_t i = 0; i < engine->param_count; i++)
        out->elems += engine->params[i].elems;
}

/* ---- the end ---------------------------------------------------------------- */

static void destroy_space(zc_engine *engine, engine_space *space)
{
    zc_memory *memory = &engine->memory;
    size_t state = state_elems(engine, space), sums = state * space->sum_bytes;
    release(engine, space->sums, sums, &memory->gradients);
    release(engine, space->m, sums, &memory->optimizer_state);
    release(engine, space->v, sums, &memory->optimizer_state);
    release(engine, space->vmax, sums, &memory->optimizer_state);
    release(engine, space->master, state * zc_dtype_master_bytes(space->dtype), &memory->master);
    if (space->scratch)
        release(engine, space->scratch,
                space->scratch_slots * partition_most_shard(&space->plan) * space->sum_bytes, &memory->buffers);
    if (space->spans)
        release(engine, space->spans,
                space->span_first[space->plan.buckets * engine_pieces(engine)] * sizeof *space->spans,
                &memory->buffers);
    comm_region_free(space->full_sums);
    comm_region_free(space->window);
    comm_region_free(space->param);
    ZC_POINT("destruction: regions let go");
    comm_channel_close(space->channel);
    profile_free_times(engine, space);
    zc_free(space->buckets);
    zc_free(space->order);
    zc_free(space->span_first);
    zc_free(space->starts);
}

void zc_engine_destroy(zc_engine *engine)
{
    if (!engine)
        return;
    ZC_POINT("destruction: begins");
    gather_finish(engine); /* or the group has failed, and nobody reads any more */
    engine->device->ops->synchronize(engine->device, engine->stream);
    for (size_t i = 0; i < engine->param_count; i++) {
        engine_param *param = &engine->params[i];
        if (param->own_copy)
            release(engine, param->owner, param->elems * zc_dtype_bytes(param->dtype), &engine->held_bytes);
        zc_free(param->name);
    }
    for (size_t s = 0; s < engine->space_count; s++)
        destroy_space(engine, &engine->spaces[s]);
    profile_free(engine);
    uint64_t *buffers = &engine->memory.buffers;
    release(engine, engine->segments, engine->segment_count * sizeof *engine->segments, buffers);
    release(engine, engine->scalars, engine->segment_count * sizeof *engine->scalars, buffers);
    release(engine, engine->stats_sum, engine->stats_words * sizeof(uint64_t), buffers);
    release(engine, engine->result, sizeof *engine->result, buffers);
    release(engine, engine->flags, sizeof *engine->flags, buffers);
    release(engine, engine->tally, sizeof *engine->tally, buffers);
    release(engine, engine->slice_scratch, engine->slice_scratch_bytes, buffers);
    comm_region_free(engine->stats);
    comm_channel_close(engine->gathers); /* first: nothing that is still under way may write to slots */
    stage3_release(engine);
    comm_channel_close(engine->control);
    ZC_POINT("destruction: channels let go");
    engine->device->ops->destroy(engine->device);
    zc_free(engine->sequence);
    zc_free(engine->released);
    zc_free(engine->params);
    zc_free(engine->spaces);
    zc_free(engine);
}
