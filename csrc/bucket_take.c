/*
 * Gradients come in: each is copied into the windows of its buckets as far as
 * there is room, or lent to the reduction where it lies, and otherwise kept until
 * there is room.  bucket.c says why a rank that waits for room cannot be stuck.
 */
#include "bucket.h"
#include "zc_point.h"

/* A held gradient is not needed any more. */
zc_status bucket_let_go(zc_engine *engine, engine_space *space, engine_param *param)
{
    size_t bytes = param->elems * space->elem_bytes;
    if (param->own_copy) {
        engine->device->ops->free(engine->device, param->owner, bytes);
    } else {
        if (engine->released_count == engine->released_room) {
            size_t room = engine->released_room ? 2 * engine->released_room : 64;
            void **more = zc_realloc(engine->released, room * sizeof *more);
            if (!more)
                return zc_fail(ZC_ENOMEM, "no memory to hand back %zu gradients", room);
            engine->released = more;
            engine->released_room = room;
        }
        engine->released[engine->released_count++] = param->owner;
    }
    engine->held_bytes -= bytes;
    param->owner = NULL;
    param->own_copy = 0;
    param->grad = NULL;
    space->held--;
    return ZC_OK;
}

static zc_status part_arrived(zc_engine *engine, engine_space *space, size_t b)
{
    engine_bucket *bucket = &space->buckets[b];
    if (--bucket->missing > 0)
        return ZC_OK;
    bucket->state = BUCKET_READY;
    return bucket_post_ready(engine, space, b);
}

/* A little patience for room, so that a rank that runs ahead does not pile gradients up. */
static zc_status wait_for_room(zc_engine *engine, engine_space *space, size_t b)
{
    while (!bucket_has_room(engine, space, b) && !engine->waited_out) {
        int done = 0;
        for (size_t k = space->low; k + space->slots <= b; k++)
            if (space->buckets[k].state < BUCKET_POSTED)
                return ZC_OK; /* gradients come in another order: room depends on this rank itself */
        if (engine_is_ordered(engine) && engine->config.stage < 3) {
            ZC_TRY(bucket_wait_low(engine, space)); /* the stream waits, and nobody needs it to go on: no gathers */
            continue;
        }
        ZC_TRY(comm_wait_some(space->channel, space->buckets[space->low].ticket, engine->stream,
                              engine->patience_ns, &done));
        if (!done)
            engine->waited_out = 1;
        ZC_TRY(bucket_advance_low(engine, space));
    }
    return ZC_OK;
}

/* The gradient stays where it is for the reduction of this rank's slice of bucket b, if it covers it. */
static void lend(zc_engine *engine, engine_space *space, size_t b, engine_param *param)
{
    partition_range own = partition_slice(&space->plan, b, engine->rank);
    if (engine->config.stage < 2)
        return; /* stages 0 and 1: a gradient that waits would only be memory on top */
    if (own.begin < param->offset || own.end > param->offset + param->elems)
        return;
    space->buckets[b].lent = (const char *)param->grad + (own.begin - param->offset) * space->elem_bytes;
    space->buckets[b].lender = (size_t)(param - engine->params);
    param->lent++;
}

/*
 * Copies what fits of a parameter's gradient; posts buckets that became
 * complete.  may_lend: the gradient's memory stays as long as the engine wants.
 */
static zc_status deliver(zc_engine *engine, engine_param *param, int may_wait, int may_lend)
{
    engine_space *space = &engine->spaces[param->space];
    size_t last = partition_bucket_of(&space->plan, param->extent - 1);
    while (param->next_bucket <= last) {
        size_t b = param->next_bucket;
        if (!bucket_has_room(engine, space, b))
            ZC_TRY(bucket_advance_low(engine, space));
        if (!bucket_has_room(engine, space, b) && may_wait)
            ZC_TRY(wait_for_room(engine, space, b));
        if (!bucket_has_room(engine, space, b))
            break;
        if (may_lend)
            lend(engine, space, b, param);
        ZC_TRY(bucket_fill_part(engine, space, b, param, param->grad));
        space->buckets[b].has_data = 1;
        param->next_bucket++;
        ZC_POINT("gradient: a part is taken");
        ZC_TRY(part_arrived(engine, space, b));
    }
    return ZC_OK;
}

/* Uses the room that there is now. */
static zc_status deliver_waiting(zc_engine *engine, engine_space *space)
{
    for (size_t k = 0; space->waiting && k < space->order_count; k++) {
        engine_param *param = &engine->params[space->order[k]];
        if (!param->owner || bucket_delivered(space, param))
            continue;
        ZC_TRY(deliver(engine, param, 1, 1));
        if (!bucket_delivered(space, param))
            continue;
        space->waiting--;
        if (!param->lent && param->owner)
            ZC_TRY(bucket_let_go(engine, space, param));
    }
    return ZC_OK;
}

zc_status bucket_progress(zc_engine *engine, engine_space *space)
{
    if (!space->in_flight)
        return ZC_OK;
    ZC_TRY(comm_progress(engine->comm)); /* what peers wait for may lie beyond `low` */
    ZC_TRY(bucket_advance_low(engine, space));
    if (space->scratch)
        ZC_TRY(bucket_post_ready(engine, space, space->next_post));
    while (space->waiting && space->looked_at != space->low) {
        space->looked_at = space->low;
        ZC_TRY(deliver_waiting(engine, space));
    }
    return ZC_OK;
}

/* ---- gradients come in ------------------------------------------------------ */

/* owner NULL: the memory is only there during the call. */
static zc_status accept(zc_engine *engine, size_t index, const void *grad, void *owner, int *outcome)
{
    if (index >= engine->param_count)
        return zc_fail(ZC_EINVAL, "gradient for parameter %zu, but there are %zu", index, engine->param_count);
    ZC_TRY(engine_check_loaded(engine));
    ZC_TRY(capture_follow(engine, "a gradient"));
    ZC_TRY(round_settle(engine));
    engine_param *param = &engine->params[index];
    engine_space *space = &engine->spaces[param->space];
    if (param->frozen)
        return zc_fail(ZC_EINVAL, "rank %zu: a gradient for %s, which is frozen", engine->rank,
                       engine_param_name(engine, index));
    if (!engine->round_open)
        ZC_TRY(round_begin(engine));
    if (param->arrived)
        return zc_fail(ZC_ESTATE, "rank %zu: %s already has a gradient in this backward; end the backward before its "
                       "next one", engine->rank, engine_param_name(engine, index));
    param->arrived = 1;
    *outcome = ZC_GRAD_TAKEN;
    if (param->elems == 0)
        return ZC_OK;
    param->grad = grad;
    param->next_bucket = partition_bucket_of(&space->plan, param->offset);
    ZC_TRY(deliver(engine, param, 1, owner != NULL));
    if (bucket_delivered(space, param) && !param->lent) {
        param->grad = NULL;
    } else {
        param->owner = owner ? owner : engine;
        engine->held_bytes += param->elems * space->elem_bytes;
        space->held++;
        if (!bucket_delivered(space, param)) {
            space->waiting++;
            space->looked_at = SIZE_MAX; /* room may have come while it was delivered */
        }
        *outcome = ZC_GRAD_HELD;
    }
    return ZC_OK;
}

zc_status zc_engine_offer_grad(zc_engine *engine, size_t index, const void *grad, void *owner, int *outcome)
{
    zc_status status = accept(engine, index, grad, owner, outcome);
    if (status == ZC_OK)
        status = bucket_progress(engine, &engine->spaces[engine->params[index].space]);
    return engine_end_call(engine, "backward", status);
}

/* The caller takes its memory back: keep a copy until there is room. */
static zc_status keep_copy(zc_engine *engine, engine_param *param)
{
    engine_space *space = &engine->spaces[param->space];
    size_t bytes = param->elems * space->elem_bytes;
    void *copy = NULL;
    zc_status status = engine->graph ? zc_fail(ZC_ESTATE, "rank %zu: the gradient of %s has no room yet, and in a CUDA graph it "
                                               "cannot be copied to wait for it: give all gradients, in the reverse order of "
                                               "registration, or make bucket_mb larger", engine->rank,
                                               engine_param_name(engine, (size_t)(param - engine->params)))
                                     : ZC_OK;
    if (status == ZC_OK)
        status = engine->device->ops->alloc(engine->device, bytes, &copy);
    if (status == ZC_OK)
        status = engine->device->ops->copy(engine->device, engine->stream, copy, param->grad, bytes);
    if (status == ZC_OK) {
        param->grad = param->owner = copy;
        param->own_copy = 1;
        return ZC_OK;
    }
    if (copy)
        engine->device->ops->free(engine->device, copy, bytes);
    param->owner = NULL;
    param->grad = NULL;
    space->held--;
    space->waiting--;
    engine->held_bytes -= bytes;
    zc_engine_abort_round(engine); /* half a gradient is in the sums: they cannot be used */
    return status;
}

zc_status zc_engine_add_grad(zc_engine *engine, size_t index, const void *grad)
{
    int outcome = ZC_GRAD_TAKEN;
    zc_status status = accept(engine, index, grad, NULL, &outcome);
    if (status == ZC_OK && outcome == ZC_GRAD_HELD)
        status = keep_copy(engine, &engine->params[index]);
    if (status == ZC_OK)
        status = bucket_progress(engine, &engine->spaces[engine->params[index].space]);
    return engine_end_call(engine, "backward", status);
}

void *zc_engine_take_released(zc_engine *engine)
{
    return engine->released_count ? engine->released[--engine->released_count] : NULL;
}

void zc_engine_drop_held(zc_engine *engine)
{
    for (size_t i = 0; i < engine->param_count; i++) {
        engine_param *param = &engine->params[i];
        if (param->owner && bucket_let_go(engine, &engine->spaces[param->space], param) != ZC_OK)
            return;
    }
}
