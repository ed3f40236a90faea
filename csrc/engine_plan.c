/*
 * The plan of an engine: where the parameters of a space lie, which of them are
 * in which bucket, which elements of a piece belong to which segment, and the
 * order in which a backward completes the buckets of all spaces.
 */
#include "engine.h"

/*
 * Where the caller leaves it open.  In memory that ranks share: windows so small
 * that a ring of sixteen is an eighth of the gradient, but not so small that their
 * number costs, and never so large that a slice leaves the cache before a peer has
 * read it.  Over a network an operation has to be large to use it, and a few of
 * them under way are enough.
 */
static size_t window_bytes(const zc_engine *engine, size_t space_bytes)
{
    int ordered = engine_is_ordered(engine);
    const size_t least = ordered ? (size_t)1 << 20 : (size_t)256 << 10, most = (size_t)(ordered ? 25 : 1) << 20;
    size_t bytes = space_bytes / (ordered ? 8 : 128);
    if (engine->config.bucket_bytes)
        return engine->config.bucket_bytes;
    return bytes < least ? least : bytes > most ? most : bytes;
}

static int belongs(const engine_space *space, const engine_param *param)
{
    return param->dtype == space->dtype && param->frozen == space->frozen;
}

/* Stage 3: units in the reverse order of their first parameters, as backward comes to them. */
static zc_status order_units(const zc_engine *engine, const engine_space *space, size_t *units, size_t *unit_count)
{
    unsigned char *seen = zc_calloc(engine->unit_count, 1);
    *unit_count = 0;
    if (!seen)
        return zc_fail(ZC_ENOMEM, "no memory to plan %zu units", engine->unit_count);
    for (size_t i = 0; i < engine->param_count; i++) {
        size_t unit = engine->params[i].unit;
        if (!belongs(space, &engine->params[i]) || !engine->params[i].elems || seen[unit])
            continue;
        seen[unit] = 1;
        units[(*unit_count)++] = unit;
    }
    for (size_t low = 0, high = *unit_count; low + 1 < high; low++) {
        size_t unit = units[--high];
        units[high] = units[low];
        units[low] = unit;
    }
    zc_free(seen);
    return ZC_OK;
}

/*
 * Stage 3: the same space unit by unit.  What is gathered together begins and
 * ends with a bucket, so that every rank's part of it is its slices of whole
 * buckets.
 */
static zc_status plan_layout_units(zc_engine *engine, engine_space *space, size_t count)
{
    size_t align = PARTITION_ALIGN_ELEMS * engine->ranks, used = 0, unit_count = 0;
    size_t *units = zc_malloc(2 * engine->unit_count * sizeof *units), *cuts = units + engine->unit_count;
    space->order = zc_malloc(count * sizeof *space->order);
    if (!units || !space->order) {
        zc_free(units);
        return zc_fail(ZC_ENOMEM, "no memory to plan %zu parameters", count);
    }
    zc_status status = order_units(engine, space, units, &unit_count);
    for (size_t k = 0; status == ZC_OK && k < unit_count; k++) {
        for (size_t i = engine->param_count; i-- > 0;) {
            engine_param *param = &engine->params[i];
            if (!belongs(space, param) || param->unit != units[k] || !param->elems)
                continue;
            param->offset = used;
            used += partition_align(param->elems);
            param->extent = used;
            space->order[space->order_count++] = i;
            if (used > SIZE_MAX / 16 / (engine->ranks + 1))
                status = zc_fail(ZC_EINVAL, "the %s parameters have more elements than can be addressed",
                                 zc_dtype_name(space->dtype));
            if (status != ZC_OK)
                break;
        }
        used += (align - used % align) % align;
        engine->params[space->order[space->order_count - 1]].extent = used; /* it has the unit's padding too */
        cuts[k] = used;
    }
    for (size_t i = 0; i < engine->param_count; i++)
        if (belongs(space, &engine->params[i]))
            engine->params[i].space = engine->space_count - 1;
    if (status == ZC_OK) {
        size_t bytes = window_bytes(engine, used * space->elem_bytes);
        size_t buckets = partition_cut_buckets(cuts, unit_count, engine->ranks, bytes, space->elem_bytes);
        space->starts = zc_malloc((buckets + 1) * sizeof *space->starts);
        if (space->starts)
            space->plan = partition_make_cut(cuts, unit_count, engine->ranks, bytes, space->elem_bytes, space->starts);
        else
            status = zc_fail(ZC_ENOMEM, "no memory for %zu buckets", buckets);
    }
    zc_free(units);
    return status;
}

zc_status plan_units(zc_engine *engine)
{
    for (size_t u = 0; u < engine->unit_count; u++) {
        engine->units[u].parts = zc_calloc(engine->space_count, sizeof *engine->units[u].parts);
        if (!engine->units[u].parts)
            return zc_fail(ZC_ENOMEM, "no memory to plan unit %zu", u);
    }
    for (size_t s = 0; s < engine->space_count; s++) {
        const engine_space *space = &engine->spaces[s];
        for (size_t b = 0; b < space->plan.buckets; b++) {
            engine_unit *unit = &engine->units[engine->params[space->order[space->buckets[b].first_part]].unit];
            engine_part *part = unit->part_count ? &unit->parts[unit->part_count - 1] : NULL;
            partition_range bucket = partition_bucket(&space->plan, b);
            if (!part || part->space != s) {
                part = &unit->parts[unit->part_count++];
                *part = (engine_part){.space = s, .first_bucket = b, .offset_bytes = unit->bytes};
            }
            part->end_bucket = b + 1;
            unit->bytes += (bucket.end - bucket.begin) * space->elem_bytes;
        }
    }
    return ZC_OK;
}

/* Places the `count` parameters of the space's type from first_param on, and cuts the space into buckets. */
zc_status plan_layout(zc_engine *engine, engine_space *space, size_t first_param, size_t count)
{
    if (engine->config.stage == 3)
        return plan_layout_units(engine, space, count);
    zc_dtype dtype = space->dtype;
    zc_status status = ZC_OK;
    size_t *sizes = zc_malloc(2 * count * sizeof *sizes);
    space->order = zc_malloc(count * sizeof *space->order);
    if (!sizes || !space->order) {
        zc_free(sizes);
        return zc_fail(ZC_ENOMEM, "no memory to plan %zu parameters", count);
    }
    size_t *offsets = sizes + count, used, k = 0;
    for (size_t i = first_param; i < engine->param_count; i++)
        if (engine->params[i].dtype == dtype)
            sizes[k++] = engine->params[i].elems;
    used = partition_place(sizes, count, offsets);
    if (used > SIZE_MAX / 16 / (engine->ranks + 1))
        status = zc_fail(ZC_EINVAL, "the %s parameters have more elements than can be addressed",
                         zc_dtype_name(dtype));
    if (status != ZC_OK)
        used = 0;
    space->plan = partition_make(used, engine->ranks, window_bytes(engine, used * space->elem_bytes),
                                 space->elem_bytes);
    k = 0;
    for (size_t i = first_param; i < engine->param_count; i++) {
        engine_param *param = &engine->params[i];
        if (param->dtype != dtype)
            continue;
        param->space = engine->space_count - 1;
        param->offset = offsets[k++];
        param->extent = param->offset + partition_align(param->elems);
    }
    /* By address: the last registered first. What pads the space belongs to the last of these. */
    for (size_t i = engine->param_count; i-- > first_param;)
        if (engine->params[i].dtype == dtype && engine->params[i].elems)
            space->order[space->order_count++] = i;
    if (space->order_count)
        engine->params[space->order[space->order_count - 1]].extent = space->plan.total_elems;
    zc_free(sizes);
    return status;
}

zc_status plan_buckets(engine_space *space, const engine_param *params)
{
    space->buckets = zc_calloc(space->plan.buckets, sizeof *space->buckets);
    if (space->plan.buckets && !space->buckets)
        return zc_fail(ZC_ENOMEM, "no memory for %zu buckets", space->plan.buckets);
    for (size_t k = 0; k < space->order_count; k++) {
        const engine_param *param = &params[space->order[k]];
        size_t last = partition_bucket_of(&space->plan, param->extent - 1);
        for (size_t b = partition_bucket_of(&space->plan, param->offset); b <= last; b++)
            if (space->buckets[b].parts++ == 0)
                space->buckets[b].first_part = (uint32_t)k;
    }
    return ZC_OK;
}

/* Spans tell an update which elements of a piece belong to which segment. */
zc_status plan_spans(zc_engine *engine, engine_space *space)
{
    size_t pieces = engine_pieces(engine), rows = space->plan.buckets * pieces, used = 0;
    size_t room = rows + space->order_count * (engine->config.stage == 0 ? 2 : 1) + rows;
    device_span *spans = NULL;
    zc_status status = ZC_OK;
    for (size_t b = 0; b < space->plan.buckets; b++)
        room += space->buckets[b].parts * pieces;
    spans = zc_malloc((room + 1) * sizeof *spans);
    space->span_first = zc_malloc((rows + 1) * sizeof *space->span_first);
    if (!spans || !space->span_first) {
        zc_free(spans);
        return zc_fail(ZC_ENOMEM, "no memory for the spans of %zu buckets", space->plan.buckets);
    }
    for (size_t row = 0; row < rows; row++) {
        size_t b = row / pieces, state_begin;
        partition_range piece = engine_piece(engine, space, b, row % pieces, &state_begin);
        space->span_first[row] = used;
        for (size_t k = space->buckets[b].first_part; k < space->order_count; k++) {
            const engine_param *param = &engine->params[space->order[k]];
            size_t begin = param->offset > piece.begin ? param->offset : piece.begin;
            size_t end = param->extent < piece.end ? param->extent : piece.end;
            if (param->offset >= piece.end)
                break;
            if (begin < end)
                spans[used++] = (device_span){begin - piece.begin, end - piece.begin, space->order[k]};
        }
    }
    space->span_first[rows] = used;
    status = engine_alloc(engine, used * sizeof *spans, &engine->memory.buffers, &space->spans);
    if (status == ZC_OK && used)
        status = engine->device->ops->upload(engine->device, engine->stream, space->spans, spans,
                                             used * sizeof *spans);
    zc_free(spans);
    return status;
}

/* The parameter whose gradient completes a bucket: of those in it, the one registered first. */
static size_t completed_by(const zc_engine *engine, size_t space_index, size_t bucket)
{
    const engine_space *space = &engine->spaces[space_index];
    return space->order[space->buckets[bucket].first_part + space->buckets[bucket].parts - 1];
}

/* Merges the spaces' buckets; within a space they are in order already. */
zc_status plan_sequence(zc_engine *engine)
{
    size_t turns = 0, *next = zc_calloc(engine->space_count + 1, sizeof *next);
    for (size_t s = 0; s < engine->space_count; s++)
        turns += engine->spaces[s].frozen ? 0 : engine->spaces[s].plan.buckets;
    engine_turn *sequence = zc_realloc(engine->sequence, (turns + 1) * sizeof *sequence);
    if (sequence)
        engine->sequence = sequence;
    if (!sequence || !next) {
        zc_free(next);
        return zc_fail(ZC_ENOMEM, "no memory for the order of %zu buckets", turns);
    }
    for (size_t t = 0; t < turns; t++) {
        size_t best = SIZE_MAX;
        for (size_t s = 0; s < engine->space_count; s++)
            if (!engine->spaces[s].frozen && next[s] < engine->spaces[s].plan.buckets &&
                (best == SIZE_MAX || completed_by(engine, s, next[s]) > completed_by(engine, best, next[best])))
                best = s;
        sequence[t] = (engine_turn){(uint32_t)best, (uint32_t)next[best]++};
    }
    engine->turns = turns;
    zc_free(next);
    return ZC_OK;
}
