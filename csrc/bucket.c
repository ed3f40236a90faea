/*
 * One round's data path: complete buckets are handed to the communicator, and
 * room is reclaimed as reductions finish.  How gradients get into the buckets is
 * in bucket_take.c.
 *
 * Windows.  At stages 0, 2 and 3 bucket b uses slot b mod slots of a ring; it may
 * do so once every bucket up to b - slots is done ("low" is the first that is
 * not).  At stage 1 every bucket has its own window.
 *
 * Why no rank can be stuck.  Let j be the lowest bucket that some rank has not
 * finished.  On every rank all buckets before j are done, so j's slot is free
 * there: whoever has j's gradients can copy and post them.  A rank that cannot
 * place a gradient keeps it ("held") and goes on; only at the round's end, when
 * all ranks are in bucket_flush and supply zeros for what never came, does a
 * rank wait for its own lowest bucket, which by then it has posted.  During
 * backward a rank may wait for room, but only for a reduction that it has
 * posted itself, and not for long: the peers may be busy with another
 * optimizer's backward, or not training at all, or have other gradients first.
 * A round that waited in vain waits no more, and makes the next ones wait less.
 *
 * Where a rank's own contribution is.  Peers never read this rank's own slice of
 * a bucket, so it need not be in the window.  From stage 2 on, if one gradient covers
 * it and its owner can wait, the reduction reads it where autograd left it
 * ("lent"), and the gradient is held until that is done.  Otherwise, in the first
 * round after a step, when nothing has to be added, it is copied straight to
 * where the sum will be (at stage 1 that is in the window); in later rounds, into
 * the window.
 *
 * Order of posting.  Any order, unless sums pass through the small scratch ring
 * of 16-bit stage 1: then the buckets of a space are posted in plan order, so
 * that all ranks reduce the same ones.  A communicator that wants one order
 * gets the engine's `sequence`, over all spaces: on such a backend the stream
 * waits for what was posted, so what every rank needs for the k-th operation
 * must be enqueued before any rank waits for it.
 */
#include "bucket.h"

static int raw_sums(const zc_engine *engine, const engine_space *space)
{
    return engine->config.stage == 1 && engine->ranks == 1 && space->scratch && !space->sums;
}

static char *window_of(const zc_engine *engine, const engine_space *space, size_t bucket)
{
    size_t offset = engine->config.stage == 1 ? partition_bucket(&space->plan, bucket).begin * space->elem_bytes
                                              : bucket % space->slots * space->slot_bytes;
    return (char *)space->window->base + offset;
}

static char *scratch_of(const engine_space *space, size_t bucket)
{
    return (char *)space->scratch +
           bucket % space->scratch_slots * partition_most_shard(&space->plan) * space->sum_bytes;
}

/* Where the sum of this rank's slice of a bucket is kept; NULL: only its 16-bit form is. */
static void *home_of(const zc_engine *engine, const engine_space *space, size_t bucket)
{
    size_t shard = partition_shard_offset(&space->plan, bucket);
    if (space->sums)
        return (char *)space->sums + shard * space->sum_bytes;
    if (engine->config.stage == 0)
        return (char *)space->full_sums->base +
               partition_slice(&space->plan, bucket, engine->rank).begin * space->sum_bytes;
    if (raw_sums(engine, space))
        return NULL;
    char *window = window_of(engine, space, bucket);
    if (space->scratch)
        return window; /* the spent window's start */
    return window + engine->rank * partition_shard_elems(&space->plan, bucket) * space->elem_bytes;
}

/* The first round of a step can put its own slice where the sum goes, if the types agree. */
static int own_goes_home(const zc_engine *engine, const engine_space *space)
{
    return engine->rounds == 0 && engine->config.stage != 1 && space->elem_bytes == space->sum_bytes;
}

void bucket_begin_round(zc_engine *engine)
{
    for (size_t s = 0; s < engine->space_count; s++) {
        engine_space *space = &engine->spaces[s];
        for (size_t b = 0; b < space->plan.buckets; b++) {
            space->buckets[b].state = BUCKET_OPEN;
            space->buckets[b].missing = space->buckets[b].parts;
            space->buckets[b].has_data = 0;
            space->buckets[b].lent = NULL;
        }
        space->low = space->next_post = 0;
    }
    engine->next_turn = 0;
}

/* ---- posting ------------------------------------------------------------- */

static zc_status post(zc_engine *engine, engine_space *space, size_t b)
{
    engine_bucket *bucket = &space->buckets[b];
    size_t shard = partition_shard_elems(&space->plan, b);
    char *window = window_of(engine, space, b);
    comm_reduce_args args = {
        .tag = SPACE_TAG_REDUCE(b),
        .region = space->window,
        .offset_bytes = (size_t)(window - (char *)space->window->base),
        .to = space->scratch && !space->sums ? scratch_of(space, b) : home_of(engine, space, b),
        .count = shard,
        .dtype = space->dtype,
        .accumulate = engine->rounds > 0,
        .zero = !bucket->has_data,
        .flags = engine->flags,
    };
    if (bucket->lent)
        args.own = bucket->lent;
    else if (own_goes_home(engine, space) && bucket->has_data)
        args.own = args.to;
    if (raw_sums(engine, space) && !bucket->has_data) /* the window is the sum */
        ZC_TRY(engine->device->ops->fill(engine->device, engine->stream, window, 0, shard * space->elem_bytes));
    ZC_TRY(comm_reduce_scatter(space->channel, engine->stream, &args, &bucket->ticket));
    bucket->state = BUCKET_POSTED;
    space->in_flight++;
    zc_traffic_row *row = &engine->traffic.reduce_scatter;
    row->calls++;
    row->payload_elems += shard * engine->ranks;
    row->bytes += shard * (engine->ranks - 1) * space->elem_bytes;
    return ZC_OK;
}

/* A reduction that goes through scratch needs a slot of it, and comes in plan order. */
static int has_scratch(const engine_space *space, size_t b)
{
    return !space->scratch || (b == space->next_post && b < space->low + space->scratch_slots);
}

/* Moves past bucket b in its space: posts it, or passes over one that takes no part. 0: it cannot go yet. */
static zc_status take_turn(zc_engine *engine, engine_space *space, size_t b, int *moved)
{
    *moved = space->buckets[b].state == BUCKET_DONE;
    if (space->buckets[b].state == BUCKET_READY && has_scratch(space, b)) {
        ZC_TRY(post(engine, space, b));
        *moved = 1;
    }
    if (*moved)
        space->next_post = b + 1;
    return ZC_OK;
}

/* Posts what is complete and may go now; bucket b of the space is the news. */
zc_status bucket_post_ready(zc_engine *engine, engine_space *space, size_t b)
{
    int moved = 1;
    if (engine_is_ordered(engine)) {
        while (moved && engine->next_turn < engine->turns) {
            engine_turn turn = engine->sequence[engine->next_turn];
            ZC_TRY(take_turn(engine, &engine->spaces[turn.space], turn.bucket, &moved));
            engine->next_turn += moved != 0;
        }
        return ZC_OK;
    }
    if (!space->scratch)
        return take_turn(engine, space, b, &moved);
    while (moved && space->next_post < space->plan.buckets)
        ZC_TRY(take_turn(engine, space, space->next_post, &moved));
    return ZC_OK;
}

/* The reduction of bucket b is over. */
static zc_status settle(zc_engine *engine, engine_space *space, size_t b)
{
    if (space->scratch && !space->sums && !raw_sums(engine, space))
        ZC_TRY(engine->device->ops->copy(engine->device, engine->stream, home_of(engine, space, b),
                                         scratch_of(space, b),
                                         partition_shard_elems(&space->plan, b) * space->sum_bytes));
    space->buckets[b].state = BUCKET_DONE;
    space->in_flight--;
    profile_reduced(engine, space, b);
    if (!space->buckets[b].lent)
        return ZC_OK;
    engine_param *param = &engine->params[space->buckets[b].lender];
    space->buckets[b].lent = NULL;
    return --param->lent == 0 && bucket_delivered(space, param) && param->owner ? bucket_let_go(engine, space, param) : ZC_OK;
}

zc_status bucket_advance_low(zc_engine *engine, engine_space *space)
{
    while (space->low < space->plan.buckets) {
        engine_bucket *bucket = &space->buckets[space->low];
        int done = bucket->state == BUCKET_DONE;
        if (bucket->state == BUCKET_POSTED) {
            ZC_TRY(comm_test(space->channel, bucket->ticket, engine->stream, &done));
            if (done)
                ZC_TRY(settle(engine, space, space->low));
        }
        if (!done)
            break;
        space->low++;
    }
    return ZC_OK;
}

/* ---- copying -------------------------------------------------------------- */

/*
 * Elements [begin, end) of the space get `from` (zeros if NULL), wherever in
 * bucket b they belong; a lent slice stays where it is.
 */
static zc_status fill(zc_engine *engine, engine_space *space, size_t b, size_t begin, size_t end, const char *from)
{
    const device_ops *ops = engine->device->ops;
    partition_range bucket = partition_bucket(&space->plan, b);
    partition_range own = partition_slice(&space->plan, b, engine->rank);
    char *window = window_of(engine, space, b);
    size_t bytes = space->elem_bytes;
    const void *lent = space->buckets[b].lent;
    if (!lent && !own_goes_home(engine, space))
        own.begin = own.end = end;
    while (begin < end) {
        size_t stop = end;
        char *to = window + (begin - bucket.begin) * bytes;
        if (begin >= own.begin && begin < own.end) {
            to = lent ? NULL : (char *)home_of(engine, space, b) + (begin - own.begin) * bytes;
            stop = own.end < end ? own.end : end;
        } else if (begin < own.begin) {
            stop = own.begin < end ? own.begin : end;
        }
        if (to && from)
            ZC_TRY(ops->copy(engine->device, engine->stream, to, from, (stop - begin) * bytes));
        else if (to)
            ZC_TRY(ops->fill(engine->device, engine->stream, to, 0, (stop - begin) * bytes));
        if (from)
            from += (stop - begin) * bytes;
        begin = stop;
    }
    return ZC_OK;
}

/* A parameter's part of bucket b: its gradient (zeros if NULL), and zeros for what pads it. */
zc_status bucket_fill_part(zc_engine *engine, engine_space *space, size_t b, const engine_param *param,
                           const char *grad)
{
    partition_range bucket = partition_bucket(&space->plan, b);
    size_t begin = param->offset > bucket.begin ? param->offset : bucket.begin;
    size_t end = param->extent < bucket.end ? param->extent : bucket.end;
    size_t real = param->offset + param->elems;
    size_t values = real < begin ? begin : real < end ? real : end;
    if (grad)
        ZC_TRY(fill(engine, space, b, begin, values, grad + (begin - param->offset) * space->elem_bytes));
    else
        values = begin;
    return fill(engine, space, b, values, end, NULL);
}

/* ---- in the middle of a round ------------------------------------------------- */

zc_status zc_engine_drain(zc_engine *engine)
{
    int only_look = engine_is_ordered(engine); /* what is still under way has room of its own */
    for (size_t s = 0; engine->round_open && s < engine->space_count; s++) {
        engine_space *space = &engine->spaces[s];
        for (size_t b = space->low; space->in_flight && b < space->plan.buckets && !engine->waited_out; b++) {
            int done = 0;
            if (space->buckets[b].state != BUCKET_POSTED)
                continue;
            if (only_look)
                ZC_TRY(comm_test(space->channel, space->buckets[b].ticket, engine->stream, &done));
            else
                ZC_TRY(comm_wait_some(space->channel, space->buckets[b].ticket, engine->stream, engine->patience_ns, &done));
            if (done)
                ZC_TRY(settle(engine, space, b));
            else
                engine->waited_out = !only_look;
        }
        ZC_TRY(bucket_advance_low(engine, space));
    }
    return ZC_OK;
}

/* ---- the end of a round ------------------------------------------------------- */

zc_status bucket_wait_low(zc_engine *engine, engine_space *space)
{
    engine_bucket *bucket = &space->buckets[space->low];
    if (bucket->state == BUCKET_POSTED) {
        ZC_TRY(comm_wait(space->channel, bucket->ticket, engine->stream));
        ZC_TRY(settle(engine, space, space->low));
    }
    space->low++;
    return space->scratch ? bucket_post_ready(engine, space, space->next_post) : ZC_OK;
}

/* Everything that bucket b still lacks: held gradients, late ones, zeros. */
static zc_status complete(zc_engine *engine, engine_space *space, size_t b, const void *const *late)
{
    engine_bucket *bucket = &space->buckets[b];
    partition_range range = partition_bucket(&space->plan, b);
    int has_data = bucket->has_data;
    for (size_t pass = 0; pass < 2; pass++) {
        for (size_t k = bucket->first_part; k < space->order_count; k++) {
            engine_param *param = &engine->params[space->order[k]];
            const char *grad = late ? late[space->order[k]] : param->owner ? param->grad : NULL;
            int here = !late && param->arrived && (!param->owner || param->next_bucket > b);
            if (param->offset >= range.end)
                break;
            if (here)
                continue; /* copied before */
            if (pass == 0) {
                has_data |= grad != NULL;
                continue;
            }
            if (has_data)
                ZC_TRY(bucket_fill_part(engine, space, b, param, grad));
            if (grad && !late)
                param->next_bucket = b + 1;
        }
    }
    bucket->has_data = has_data;
    bucket->missing = 0;
    bucket->state = BUCKET_READY;
    return bucket_post_ready(engine, space, b);
}

zc_status bucket_flush(zc_engine *engine, unsigned char *const *masks, const void *const *late)
{
    for (size_t t = 0; t < engine->turns; t++) {
        engine_turn turn = engine->sequence[t];
        engine_space *space = &engine->spaces[turn.space];
        while (!bucket_has_room(engine, space, turn.bucket))
            ZC_TRY(bucket_wait_low(engine, space));
        if (masks && !masks[turn.space][turn.bucket]) {
            space->buckets[turn.bucket].state = BUCKET_DONE;
            ZC_TRY(bucket_post_ready(engine, space, turn.bucket));
        } else if (space->buckets[turn.bucket].state == BUCKET_OPEN) {
            ZC_TRY(complete(engine, space, turn.bucket, late));
        }
    }
    for (size_t t = 0; t < engine->turns; t++) {
        engine_space *space = &engine->spaces[engine->sequence[t].space];
        while (space->low <= engine->sequence[t].bucket)
            ZC_TRY(bucket_wait_low(engine, space));
    }
    for (size_t s = 0; s < engine->space_count; s++) {
        engine_space *space = &engine->spaces[s];
        for (size_t k = 0; space->held && k < space->order_count; k++)
            if (engine->params[space->order[k]].owner)
                ZC_TRY(bucket_let_go(engine, space, &engine->params[space->order[k]]));
        space->waiting = 0;
    }
    return ZC_OK;
}

/* ---- where the sums are --------------------------------------------------------- */

zc_status bucket_vacate(zc_engine *engine, engine_space *space)
{
    const device_ops *ops = engine->device->ops;
    void *sums = NULL;
    if (engine->config.stage != 1 || space->sums || !space->plan.buckets)
        return ZC_OK;
    ZC_TRY(engine_alloc(engine, partition_shard_total(&space->plan) * space->sum_bytes, &engine->memory.gradients,
                        &sums));
    for (size_t b = 0; b < space->plan.buckets; b++) {
        size_t shard = partition_shard_elems(&space->plan, b);
        void *to = (char *)sums + partition_shard_offset(&space->plan, b) * space->sum_bytes;
        int raw = raw_sums(engine, space);
        ZC_TRY(ops->accumulate(engine->device, engine->stream, to,
                               raw ? (void *)window_of(engine, space, b) : home_of(engine, space, b), shard,
                               raw ? space->dtype : space->sum_dtype, 0));
    }
    space->sums = sums;
    return ZC_OK;
}

zc_status bucket_sums(zc_engine *engine, engine_space *space, size_t bucket, size_t piece, const void **out)
{
    if (engine->config.stage == 0) {
        *out = (char *)space->full_sums->base + partition_slice(&space->plan, bucket, piece).begin * space->sum_bytes;
        return ZC_OK;
    }
    *out = home_of(engine, space, bucket);
    if (*out)
        return ZC_OK;
    char *to = scratch_of(space, bucket);
    *out = to;
    return engine->device->ops->accumulate(engine->device, engine->stream, to, window_of(engine, space, bucket),
                                           partition_shard_elems(&space->plan, bucket), space->dtype, 0);
}

size_t bucket_sums_at_once(const zc_engine *engine, const engine_space *space)
{
    return raw_sums(engine, space) ? space->scratch_slots : SIZE_MAX;
}
