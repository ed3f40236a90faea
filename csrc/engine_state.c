/*
 * Looking at, and replacing, what the engine keeps: gradients, moments, masters,
 * step counts.  A rank has the slices it owns; a whole array is put together by
 * an integer all-reduce in which every other rank contributes zeros, so it has
 * the owner's bits exactly.
 */
#include "engine.h"

#include <stdio.h>

static void *role_array(const engine_space *space, zc_role role)
{
    switch (role) {
    case ZC_ROLE_EXP_AVG:
        return space->m;
    case ZC_ROLE_EXP_AVG_SQ:
        return space->v;
    case ZC_ROLE_MAX_EXP_AVG_SQ:
        return space->vmax;
    case ZC_ROLE_MASTER:
        return space->master;
    default:
        return NULL;
    }
}

static zc_status check_index(const zc_engine *engine, size_t index, zc_role role)
{
    if (index >= engine->param_count)
        return zc_fail(ZC_EINVAL, "parameter %zu of %zu", index, engine->param_count);
    if ((unsigned)role > ZC_ROLE_MASTER)
        return zc_fail(ZC_EINVAL, "role %d; legal are 0 to %d here", (int)role, ZC_ROLE_MASTER);
    return ZC_OK;
}

/* One run of a parameter's elements that this rank has state for. */
typedef struct owned_run {
    size_t begin, end; /* in the space */
    size_t state;      /* where it is in the state arrays */
} owned_run;

/*
 * The run of its elements [first, end) in bucket b; empty ones have begin >= end.
 * At stage 0 a rank has state for the whole bucket.
 */
static owned_run run_in_bucket(const zc_engine *engine, const engine_space *space, const engine_param *param, size_t b,
                               size_t first, size_t end)
{
    partition_range own = partition_slice(&space->plan, b, engine->rank);
    size_t state = partition_shard_offset(&space->plan, b);
    if (engine->config.stage == 0) {
        own = partition_bucket(&space->plan, b);
        state = own.begin;
    }
    first += param->offset;
    end += param->offset;
    owned_run run = {first > own.begin ? first : own.begin, end < own.end ? end : own.end, 0};
    run.state = state + (run.begin - own.begin);
    return run;
}

/*
 * A parameter that leaves a bucket fills this rank's slice of it to the end, and
 * begins its slice of the next: its runs lie one behind the other.
 */
zc_status zc_engine_state(zc_engine *engine, size_t index, zc_role role, void **memory, size_t *elems, zc_dtype *dtype)
{
    *memory = NULL;
    *elems = 0;
    *dtype = ZC_FLOAT32;
    ZC_TRY(check_index(engine, index, role));
    const engine_param *param = &engine->params[index];
    const engine_space *space = &engine->spaces[param->space];
    void *array = role_array(space, role);
    *dtype = role == ZC_ROLE_MASTER && space->dtype == ZC_BFLOAT16 ? ZC_BFLOAT16 : space->sum_dtype;
    if (!param->elems || !array)
        return ZC_OK;
    size_t last = partition_bucket_of(&space->plan, param->offset + param->elems - 1);
    for (size_t b = partition_bucket_of(&space->plan, param->offset); b <= last; b++) {
        owned_run run = run_in_bucket(engine, space, param, b, 0, param->elems);
        if (run.begin >= run.end)
            continue;
        if (!*memory)
            *memory = engine_at(array, run.state, zc_dtype_bytes(*dtype));
        *elems += run.end - run.begin;
    }
    return ZC_OK;
}

/* ---- whole arrays --------------------------------------------------------------- */

/* A frozen parameter has no master: its value is exact. */
static zc_status read_frozen(zc_engine *engine, const engine_space *space, const char *param, size_t count, char *to)
{
    const device_ops *ops = engine->device->ops;
    uint16_t half[256];
    if (space->elem_bytes == space->sum_bytes)
        return ops->download(engine->device, engine->stream, to, param, count * space->elem_bytes);
    for (size_t k = 0; k < count; k += 256) {
        size_t n = count - k < 256 ? count - k : 256;
        ZC_TRY(ops->download(engine->device, engine->stream, half, param + 2 * k, 2 * n));
        for (size_t j = 0; j < n; j++) {
            float value = space->dtype == ZC_BFLOAT16 ? zc_bf16_to_float(half[j]) : zc_fp16_to_float(half[j]);
            memcpy(to + 4 * (k + j), &value, sizeof value);
        }
    }
    return ZC_OK;
}

zc_status engine_read_run(zc_engine *engine, engine_space *space, size_t b, size_t begin, size_t end, zc_role role,
                          char *to)
{
    const device_ops *ops = engine->device->ops;
    partition_range own = partition_slice(&space->plan, b, engine->rank);
    size_t count = end - begin, bytes = count * space->sum_bytes;
    size_t state = engine->config.stage == 0 ? begin
                                             : partition_shard_offset(&space->plan, b) + (begin - own.begin);
    if (role == ZC_ROLE_GRAD) {
        const void *sums;
        ZC_TRY(bucket_sums(engine, space, b, engine->config.stage == 0 ? engine->rank : 0, &sums));
        return ops->download(engine->device, engine->stream, to,
                             (const char *)sums + (begin - own.begin) * space->sum_bytes, bytes);
    }
    if (role == ZC_ROLE_MASTER && space->frozen)
        return read_frozen(engine, space, engine_param_at(engine, space, b, begin), count, to);
    if (role != ZC_ROLE_MASTER || space->dtype == ZC_FLOAT16) {
        void *array = role_array(space, role); /* fp32 (fp64) */
        if (!array)
            return ZC_OK; /* never used: zeros */
        return ops->download(engine->device, engine->stream, to, engine_at(array, state, space->sum_bytes), bytes);
    }
    const char *param = engine_param_at(engine, space, b, begin);
    if (space->dtype != ZC_BFLOAT16)
        return ops->download(engine->device, engine->stream, to, param, bytes);
    uint16_t half[256];
    int16_t rest[256];
    for (size_t k = 0; k < count; k += 256) {
        size_t n = count - k < 256 ? count - k : 256;
        ZC_TRY(ops->download(engine->device, engine->stream, half, param + 2 * k, 2 * n));
        ZC_TRY(ops->download(engine->device, engine->stream, rest, engine_at(space->master, state + k, 2), 2 * n));
        for (size_t j = 0; j < n; j++) {
            float value = zc_master_join(half[j], rest[j]);
            memcpy(to + 4 * (k + j), &value, sizeof value);
        }
    }
    return ZC_OK;
}

static zc_status read_whole(zc_engine *engine, size_t index, zc_role role, double scale, void *to)
{
    static const char *const names[] = {[ZC_ROLE_GRAD] = "gradient",
                                        [ZC_ROLE_EXP_AVG] = "first moment",
                                        [ZC_ROLE_EXP_AVG_SQ] = "second moment",
                                        [ZC_ROLE_MAX_EXP_AVG_SQ] = "largest second moment",
                                        [ZC_ROLE_MASTER] = "master"};
    uint64_t key[2] = {index, (uint64_t)role};
    char with[MEET_WITH_BYTES];
    snprintf(with, sizeof with, "%s of %s", names[role], engine_param_name(engine, index));
    ZC_TRY(round_meet(engine, MEET_READ, zc_hash(ZC_HASH_START, key, sizeof key), "reading state", with));
    engine_param *param = &engine->params[index];
    engine_space *space = &engine->spaces[param->space];
    if (!param->elems)
        return ZC_OK;
    memset(to, 0, param->elems * space->sum_bytes);
    if (role == ZC_ROLE_GRAD && (engine->rounds == 0 || param->frozen))
        return ZC_OK;
    size_t end = param->offset + param->elems, last = partition_bucket_of(&space->plan, end - 1);
    for (size_t b = partition_bucket_of(&space->plan, param->offset); b <= last; b++) {
        partition_range own = partition_slice(&space->plan, b, engine->rank);
        size_t from = param->offset > own.begin ? param->offset : own.begin;
        size_t stop = end < own.end ? end : own.end;
        if (from < stop)
            ZC_TRY(engine_read_run(engine, space, b, from, stop, role,
                                   (char *)to + (from - param->offset) * space->sum_bytes));
    }
    ZC_TRY(comm_array_all_reduce(engine->comm, to, param->elems, space->sum_bytes == 8 ? ZC_INT64 : ZC_INT32,
                                 COMM_SUM));
    scale *= engine->clip_factor; /* as after torch's clip_grad_norm_ */
    if (role != ZC_ROLE_GRAD || scale == 1.0)
        return ZC_OK;
    for (size_t k = 0; k < param->elems; k++) {
        if (space->sum_dtype == ZC_FLOAT64)
            ((double *)to)[k] *= scale;
        else
            ((float *)to)[k] *= (float)scale;
    }
    return ZC_OK;
}

zc_status zc_engine_read(zc_engine *engine, size_t index, zc_role role, double scale, void *to)
{
    ZC_TRY(check_index(engine, index, role));
    return engine_end_call(engine, "reading state", read_whole(engine, index, role, scale, to));
}

/* Every rank's slices of a parameter, read where they are. */
static zc_status fetch_from_peers(zc_engine *engine, const engine_space *space, const engine_param *param, char *to)
{
    size_t end = param->offset + param->elems, last = partition_bucket_of(&space->plan, end - 1);
    for (size_t b = partition_bucket_of(&space->plan, param->offset); b <= last; b++)
        for (size_t q = 0; q < engine->ranks; q++) {
            partition_range slice = partition_slice(&space->plan, b, q);
            size_t from = param->offset > slice.begin ? param->offset : slice.begin;
            size_t stop = end < slice.end ? end : slice.end;
            size_t shard = partition_shard_offset(&space->plan, b) + (from - slice.begin);
            const char *peer = comm_peer(space->param, q);
            if (from < stop)
                ZC_TRY(engine->device->ops->download(engine->device, engine->stream,
                                                     to + (from - param->offset) * space->elem_bytes,
                                                     peer + shard * space->elem_bytes,
                                                     (stop - from) * space->elem_bytes));
        }
    return ZC_OK;
}

/* The same by adding up, bytewise, what every rank has, and zeros for what it has not. */
static zc_status fetch_by_sum(zc_engine *engine, const engine_space *space, const engine_param *param, char *to)
{
    size_t end = param->offset + param->elems, last = partition_bucket_of(&space->plan, end - 1);
    memset(to, 0, param->elems * space->elem_bytes);
    for (size_t b = partition_bucket_of(&space->plan, param->offset); b <= last; b++) {
        partition_range own = partition_slice(&space->plan, b, engine->rank);
        size_t from = param->offset > own.begin ? param->offset : own.begin, stop = end < own.end ? end : own.end;
        if (from < stop)
            ZC_TRY(engine->device->ops->download(engine->device, engine->stream,
                                                 to + (from - param->offset) * space->elem_bytes,
                                                 engine_param_at(engine, space, b, from),
                                                 (stop - from) * space->elem_bytes));
    }
    return comm_array_all_reduce(engine->comm, to, param->elems * space->elem_bytes, ZC_UINT8, COMM_SUM);
}

static zc_status fetch(zc_engine *engine, size_t index, void *to)
{
    char with[MEET_WITH_BYTES];
    snprintf(with, sizeof with, "%s", engine_param_name(engine, index));
    ZC_TRY(round_meet(engine, MEET_FETCH, index, "reading a parameter", with));
    const engine_param *param = &engine->params[index];
    const engine_space *space = &engine->spaces[param->space];
    if (!param->elems)
        return ZC_OK;
    if (engine->config.stage < 3)
        return engine->device->ops->download(engine->device, engine->stream, to, zc_engine_param(engine, index),
                                             param->elems * space->elem_bytes);
    return engine_reads_peers(engine) ? fetch_from_peers(engine, space, param, to)
                                      : fetch_by_sum(engine, space, param, to);
}

zc_status zc_engine_fetch(zc_engine *engine, size_t index, void *to)
{
    if (index >= engine->param_count)
        return zc_fail(ZC_EINVAL, "parameter %zu of %zu", index, engine->param_count);
    return engine_end_call(engine, "reading a parameter", fetch(engine, index, to));
}

/* The remainders of bf16 masters; the parameter's own bits are not touched. */
static zc_status write_remainders(zc_engine *engine, engine_space *space, size_t state, const char *from, size_t count)
{
    for (size_t k = 0; k < count; k += 256) {
        uint16_t half;
        int16_t rest[256];
        size_t n = count - k < 256 ? count - k : 256;
        for (size_t j = 0; j < n; j++) {
            float value;
            memcpy(&value, from + 4 * (k + j), sizeof value);
            zc_master_split(value, &half, &rest[j]);
        }
        ZC_TRY(engine->device->ops->upload(engine->device, engine->stream, engine_at(space->master, state + k, 2), rest,
                                           2 * n));
    }
    return ZC_OK;
}

zc_status engine_write_range(zc_engine *engine, size_t index, zc_role role, size_t first, size_t end, const void *from)
{
    engine_param *param = &engine->params[index];
    engine_space *space = &engine->spaces[param->space];
    void *array = role_array(space, role);
    if (role == ZC_ROLE_GRAD)
        return zc_fail(ZC_EINVAL, "gradients cannot be written; add them with a backward");
    ZC_TRY(capture_refuse(engine, "writing the optimizer's state"));
    if (first == end)
        return ZC_OK;
    if (!array && role == ZC_ROLE_MASTER)
        return zc_fail(ZC_EINVAL, "%s is %s and has no master; write the parameter itself",
                       engine_param_name(engine, index), zc_dtype_name(space->dtype));
    if (!array)
        return zc_fail(ZC_ESTATE, "%s keeps no array for role %d with these options; set the option (momentum, "
                       "amsgrad) before loading", engine_param_name(engine, index), (int)role);
    size_t last = partition_bucket_of(&space->plan, param->offset + end - 1);
    for (size_t b = partition_bucket_of(&space->plan, param->offset + first); b <= last; b++) {
        owned_run run = run_in_bucket(engine, space, param, b, first, end);
        const char *source = (const char *)from + (run.begin - param->offset - first) * space->sum_bytes;
        if (run.begin >= run.end)
            continue;
        if (role == ZC_ROLE_MASTER && space->dtype == ZC_BFLOAT16)
            ZC_TRY(write_remainders(engine, space, run.state, source, run.end - run.begin));
        else
            ZC_TRY(engine->device->ops->upload(engine->device, engine->stream,
                                               engine_at(array, run.state, space->sum_bytes), source,
                                               (run.end - run.begin) * space->sum_bytes));
    }
    return ZC_OK;
}

zc_status zc_engine_write(zc_engine *engine, size_t index, zc_role role, const void *from)
{
    ZC_TRY(check_index(engine, index, role));
    return engine_write_range(engine, index, role, 0, engine->params[index].elems, from);
}

zc_status zc_engine_refresh(zc_engine *engine, size_t index)
{
    const device_ops *ops = engine->device->ops;
    if (index != SIZE_MAX && index >= engine->param_count)
        return zc_fail(ZC_EINVAL, "parameter %zu of %zu", index, engine->param_count);
    ZC_TRY(gather_finish(engine));
    for (size_t i = index == SIZE_MAX ? 0 : index; i < engine->param_count && (index == SIZE_MAX || i == index); i++) {
        engine_param *param = &engine->params[i];
        engine_space *space = &engine->spaces[param->space];
        size_t last, master = zc_dtype_master_bytes(space->dtype);
        if (!param->elems || !master || param->frozen)
            continue;
        last = partition_bucket_of(&space->plan, param->extent - 1);
        for (size_t b = partition_bucket_of(&space->plan, param->offset); b <= last; b++)
            for (size_t piece = 0; piece < engine_pieces(engine); piece++) {
                size_t state;
                partition_range own = engine_piece(engine, space, b, piece, &state);
                size_t from = param->offset > own.begin ? param->offset : own.begin;
                size_t stop = param->extent < own.end ? param->extent : own.end;
                if (from >= stop)
                    continue;
                char *to = engine_at(space->master, state + (from - own.begin), master);
                if (space->dtype == ZC_BFLOAT16)
                    ZC_TRY(ops->fill(engine->device, engine->stream, to, 0, (stop - from) * master));
                else
                    ZC_TRY(ops->accumulate(engine->device, engine->stream, to,
                                           engine_param_at(engine, space, b, from), stop - from, space->dtype, 0));
            }
    }
    return ZC_OK;
}

/* ---- step counts --------------------------------------------------------------------- */

static device_segment read_segment(const zc_engine *engine, size_t index)
{
    device_segment segment = {0, 0, 0};
    if (index < engine->segment_count)
        engine->device->ops->download(engine->device, engine->stream, &segment, &engine->segments[index],
                                      sizeof segment);
    return segment;
}

uint64_t zc_engine_step_count(const zc_engine *engine, size_t index)
{
    return read_segment(engine, index).step;
}

int zc_engine_has_momentum(const zc_engine *engine, size_t index)
{
    return read_segment(engine, index).has_momentum != 0;
}

zc_status zc_engine_set_step_count(zc_engine *engine, size_t index, uint64_t steps, int has_momentum)
{
    ZC_TRY(check_index(engine, index, ZC_ROLE_GRAD));
    ZC_TRY(capture_refuse(engine, "setting a step count"));
    device_segment segment = read_segment(engine, index);
    segment.step = steps;
    segment.has_momentum = has_momentum != 0;
    return engine->device->ops->upload(engine->device, engine->stream, &engine->segments[index], &segment,
                                       sizeof segment);
}
