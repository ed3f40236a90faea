/*
 * Parts of values, for checkpoints: which elements of a parameter are this rank's
 * to write, and moving them to and from host memory, a bucket's slice at a time.
 *
 * At every stage rank r owns slice r of every bucket, also where it holds more:
 * the ranks' parts of a parameter cover each element once.
 */
#include "engine.h"
#include "zc_point.h"

/* Where [begin, end) of a parameter is in its space; ZC_EINVAL unless it is a range of it. */
static zc_status locate(const zc_engine *engine, size_t index, size_t begin, size_t end, partition_range *range)
{
    if (index >= engine->param_count)
        return zc_fail(ZC_EINVAL, "parameter %zu of %zu", index, engine->param_count);
    const engine_param *param = &engine->params[index];
    if (begin > end || end > param->elems)
        return zc_fail(ZC_EINVAL, "elements %zu to %zu of %s, which has %zu", begin, end,
                       engine_param_name(engine, index), param->elems);
    *range = (partition_range){param->offset + begin, param->offset + end};
    return ZC_OK;
}

/* What a call about a part needs: the engine has its parameters, the range and the role are ones. */
static zc_status check_part(const zc_engine *engine, size_t index, zc_role role, size_t begin, size_t end,
                            partition_range *range)
{
    ZC_TRY(engine_check_loaded(engine));
    ZC_TRY(locate(engine, index, begin, end, range));
    if ((unsigned)role > ZC_ROLE_WEIGHT)
        return zc_fail(ZC_EINVAL, "role %d; legal are 0 to %d", (int)role, ZC_ROLE_WEIGHT);
    if (role == ZC_ROLE_GRAD)
        return zc_fail(ZC_EINVAL, "gradients have no parts; zc_engine_read gives them whole, a backward adds them");
    return ZC_OK;
}

/* The bucket whose slice of this rank holds all of the range; ZC_EINVAL if there is none. */
static zc_status own_bucket(const zc_engine *engine, size_t index, partition_range range, size_t *bucket)
{
    const engine_space *space = &engine->spaces[engine->params[index].space];
    *bucket = partition_bucket_of(&space->plan, range.begin);
    partition_range own = partition_slice(&space->plan, *bucket, engine->rank);
    if (range.begin < own.begin || range.end > own.end)
        return zc_fail(ZC_EINVAL, "rank %zu: elements %zu to %zu of %s are in no part of its own; zc_engine_next_part "
                       "tells which are", engine->rank, range.begin - engine->params[index].offset,
                       range.end - engine->params[index].offset, engine_param_name(engine, index));
    return ZC_OK;
}

zc_status zc_engine_next_part(const zc_engine *engine, size_t index, size_t from, size_t *begin, size_t *end)
{
    partition_range rest = {0, 0};
    *begin = *end = 0;
    ZC_TRY(locate(engine, index, from, index < engine->param_count ? engine->params[index].elems : from, &rest));
    const engine_param *param = &engine->params[index];
    const engine_space *space = &engine->spaces[param->space];
    *begin = *end = param->elems;
    for (size_t at = rest.begin; at < rest.end;) {
        size_t bucket = partition_bucket_of(&space->plan, at);
        partition_range own = partition_slice(&space->plan, bucket, engine->rank);
        size_t first = own.begin > at ? own.begin : at, last = own.end < rest.end ? own.end : rest.end;
        if (first < last) {
            *begin = first - param->offset;
            *end = last - param->offset;
            return ZC_OK;
        }
        at = partition_bucket(&space->plan, bucket).end;
    }
    return ZC_OK;
}

zc_status zc_engine_read_part(zc_engine *engine, size_t index, zc_role role, size_t begin, size_t end, void *to)
{
    partition_range range = {0, 0};
    size_t bucket;
    ZC_TRY(check_part(engine, index, role, begin, end, &range));
    if (begin == end)
        return ZC_OK;
    ZC_TRY(own_bucket(engine, index, range, &bucket));
    engine_space *space = &engine->spaces[engine->params[index].space];
    ZC_TRY(gather_finish(engine));
    ZC_POINT("part: to be read");
    if (role == ZC_ROLE_WEIGHT)
        return engine->device->ops->download(engine->device, engine->stream, to,
                                             engine_param_at(engine, space, bucket, range.begin),
                                             (end - begin) * space->elem_bytes);
    memset(to, 0, (end - begin) * space->sum_bytes);
    return engine_read_run(engine, space, bucket, range.begin, range.end, role, to);
}

zc_status zc_engine_write_part(zc_engine *engine, size_t index, zc_role role, size_t begin, size_t end,
                               const void *from)
{
    partition_range range = {0, 0};
    size_t bucket;
    ZC_TRY(check_part(engine, index, role, begin, end, &range));
    ZC_TRY(capture_refuse(engine, "writing a parameter"));
    ZC_POINT("part: to be written");
    if (begin == end)
        return ZC_OK;
    if (role != ZC_ROLE_WEIGHT)
        return engine_write_range(engine, index, role, begin, end, from);
    ZC_TRY(own_bucket(engine, index, range, &bucket));
    ZC_TRY(gather_finish(engine));
    engine_space *space = &engine->spaces[engine->params[index].space];
    return engine->device->ops->upload(engine->device, engine->stream,
                                       engine_param_at(engine, space, bucket, range.begin), from,
                                       (end - begin) * space->elem_bytes);
}
