/*
 * The step: from complete sums to updated parameters on every rank.
 *
 *   1. The ranks meet (and close what is open).
 *   2. Each takes the facts of its shards: sum of squares if a norm is wanted,
 *      non-finite flags (found by the reductions), and on which parameters it
 *      had gradients.  One small all-reduce adds them up.  Integers only: every
 *      rank gets the same bits, in whatever order they are added.
 *   3. The device turns them into one factor and a few scalars per parameter
 *      (step_scalars), without the host looking: it does so when somebody asks
 *      (zc_engine_last_step).
 *   4. Each piece is updated in one pass, as many pieces in one call as the device
 *      wants.
 *   5. Stages 1 and 2: buckets' parameters are gathered as soon as their slices are
 *      updated; engine_gather.c says who waits for that.  Stage 0 gathers the sums
 *      instead, before the update; stage 3 gathers nothing here.
 *
 * With shared parameters there is one copy, which every rank reads and each
 * writes only where it owns: the gather moves nothing and only says "done".  At
 * stage 0 a rank then still has to advance the state of slices it does not own:
 * it does so with a scratch copy of their parameters, before any owner writes.
 */
#include "engine.h"
#include "zc_point.h"

#include <math.h>
#include <stdio.h>

/* Packs the used flags behind the statistics: 16 bits per parameter. */
static zc_status collect_stats(zc_engine *engine, int want_norm)
{
    const device_ops *ops = engine->device->ops;
    device_stats *stats = engine->stats->base;
    size_t words = (engine->param_count + 3) / 4;
    uint64_t *used = zc_calloc(words + 1, sizeof *used);
    zc_status status = ZC_OK;
    if (!used)
        return zc_fail(ZC_ENOMEM, "rank %zu: no memory for the used flags of %zu parameters", engine->rank,
                       engine->param_count);
    for (size_t i = 0; i < engine->param_count; i++)
        used[i / 4] |= (uint64_t)(engine->params[i].used != 0) << (i % 4 * 16);
    status = ops->fill(engine->device, engine->stream, stats, 0, sizeof *stats);
    for (size_t s = 0; status == ZC_OK && want_norm && engine->rounds && s < engine->space_count; s++) {
        engine_space *space = &engine->spaces[s];
        for (size_t b = 0; status == ZC_OK && !space->frozen && b < space->plan.buckets; b++) {
            const void *sums;
            status = bucket_sums(engine, space, b, engine->config.stage == 0 ? engine->rank : 0, &sums);
            if (status == ZC_OK)
                status = ops->sum_squares(engine->device, engine->stream, stats, engine->flags, sums,
                                          partition_shard_elems(&space->plan, b), space->sum_dtype);
        }
    }
    if (status == ZC_OK)
        status = ops->fold_flags(engine->device, engine->stream, stats, engine->flags);
    if (status == ZC_OK)
        status = ops->upload(engine->device, engine->stream, stats->used, used, words * sizeof *used);
    zc_free(used);
    return status;
}

static zc_status add_up_stats(zc_engine *engine)
{
    comm_ticket ticket;
    ZC_TRY(comm_all_reduce_words(engine->control, engine->stream, CONTROL_TAG_STATS, engine->stats, 0,
                                 engine->stats_words, (uint64_t *)(void *)engine->stats_sum, &ticket));
    zc_traffic_row *row = &engine->traffic.small;
    row->calls++;
    row->payload_elems += engine->stats_words;
    row->bytes += engine->stats_words * sizeof(uint64_t) * (engine->ranks - 1);
    return comm_wait(engine->control, ticket, engine->stream);
}

/* ---- updates ------------------------------------------------------------------ */

/* Pieces of one space that the device updates in one call. */
typedef struct update_run {
    device_update_args args;
    size_t bytes; /* of memory that it touches */
    const engine_space *space;
    size_t first_bucket;
} update_run;

static void begin_run(const zc_engine *engine, const engine_space *space, update_run *run)
{
    run->bytes = 0;
    run->space = space;
    run->first_bucket = 0;
    run->args.rule = engine->config.rule;
    run->args.param_dtype = space->dtype;
    run->args.scalars = engine->scalars;
    run->args.segments = engine->segment_count;
    run->args.master = space->master;
    run->args.m = space->m;
    run->args.v = space->v;
    run->args.vmax = space->vmax;
    run->args.shard_count = 0;
}

/* What is read and written for one element. */
static size_t touched_bytes(const engine_space *space)
{
    size_t moments = (size_t)(space->m != NULL) + (space->v != NULL) + (space->vmax != NULL);
    return 2 * (space->elem_bytes + zc_dtype_master_bytes(space->dtype) + moments * space->sum_bytes) +
           space->sum_bytes;
}

/* Adds one piece, whose parameters are at `param`. */
static zc_status add_piece(zc_engine *engine, engine_space *space, update_run *run, size_t b, size_t piece, void *param)
{
    size_t row = b * engine_pieces(engine) + piece;
    device_shard *shard = &run->args.shards[run->args.shard_count];
    partition_range range = engine_piece(engine, space, b, piece, &shard->state_begin);
    ZC_TRY(bucket_sums(engine, space, b, piece, &shard->grad));
    shard->spans = space->spans + space->span_first[row];
    shard->span_count = space->span_first[row + 1] - space->span_first[row];
    shard->extent = range.end - range.begin;
    shard->param = param;
    if (!run->args.shard_count)
        run->first_bucket = b;
    run->bytes += shard->extent * touched_bytes(space);
    run->args.shard_count++;
    return ZC_OK;
}

static int is_full(const zc_engine *engine, const engine_space *space, const update_run *run)
{
    return run->bytes >= engine->device->ops->update_bytes || run->args.shard_count == DEVICE_MAX_SHARDS ||
           run->args.shard_count == bucket_sums_at_once(engine, space);
}

static zc_status end_run(zc_engine *engine, update_run *run)
{
    uint64_t begin_ns = profile_now_ns(engine);
    if (!run->args.shard_count)
        return ZC_OK;
    ZC_TRY(engine->device->ops->update(engine->device, engine->stream, &run->args));
    profile_note(engine, ZC_WORK_UPDATE, run->space, run->first_bucket, run->bytes, begin_ns);
    run->args.shard_count = run->bytes = 0;
    return ZC_OK;
}

/* This rank's slices; stages 1 and 2, and shared parameters: each run is gathered while the next one is updated. */
static zc_status update_own(zc_engine *engine)
{
    size_t piece = engine->config.stage == 0 ? engine->rank : 0;
    for (size_t s = 0; s < engine->space_count; s++) {
        engine_space *space = &engine->spaces[s];
        size_t gathered = 0;
        update_run run;
        begin_run(engine, space, &run);
        for (size_t b = 0; !space->frozen && b < space->plan.buckets; b++) {
            partition_range own = partition_slice(&space->plan, b, engine->rank);
            ZC_TRY(add_piece(engine, space, &run, b, piece, engine_param_at(engine, space, b, own.begin)));
            if (b + 1 < space->plan.buckets && !is_full(engine, space, &run))
                continue;
            ZC_TRY(end_run(engine, &run));
            ZC_POINT("step: a part is updated");
            for (; engine->config.stage < 3 && gathered <= b; gathered++)
                ZC_TRY(gather_start(engine, space, gathered, space->param, space->elem_bytes));
        }
    }
    return ZC_OK;
}

static zc_status update_shards(zc_engine *engine)
{
    ZC_TRY(stage3_settle(engine));
    ZC_TRY(update_own(engine));
    if (engine->config.stage == 3)
        return stage3_written(engine, "step");
    return engine->config.overlap_gather ? ZC_OK : gather_finish(engine);
}

static zc_status gather_sums(zc_engine *engine)
{
    for (size_t s = 0; s < engine->space_count; s++)
        for (size_t b = 0; b < engine->spaces[s].plan.buckets; b++)
            ZC_TRY(gather_start(engine, &engine->spaces[s], b, engine->spaces[s].full_sums,
                                engine->spaces[s].sum_bytes));
    return gather_finish(engine);
}

/* Stage 0: all slices, or with shared parameters those of other ranks, in a scratch copy. */
static zc_status update_pieces(zc_engine *engine, int shared)
{
    for (size_t s = 0; s < engine->space_count; s++) {
        engine_space *space = &engine->spaces[s];
        update_run run;
        begin_run(engine, space, &run);
        for (size_t b = 0; b < space->plan.buckets; b++)
            for (size_t piece = 0; piece < engine->ranks; piece++) {
                partition_range slice = partition_slice(&space->plan, b, piece);
                void *param = engine_param_at(engine, space, b, slice.begin);
                if (shared && piece == engine->rank)
                    continue;
                if (shared) {
                    ZC_TRY(engine->device->ops->copy(engine->device, engine->stream, engine->slice_scratch, param,
                                                     (slice.end - slice.begin) * space->elem_bytes));
                    param = engine->slice_scratch;
                }
                ZC_TRY(add_piece(engine, space, &run, b, piece, param));
                if (shared || is_full(engine, space, &run)) /* there is one scratch */
                    ZC_TRY(end_run(engine, &run));
            }
        ZC_TRY(end_run(engine, &run));
    }
    return ZC_OK;
}

static zc_status update_everything(zc_engine *engine)
{
    ZC_TRY(update_pieces(engine, engine->config.shared_params));
    if (!engine->config.shared_params)
        return ZC_OK;
    ZC_TRY(round_barrier(engine, "step"));
    ZC_TRY(update_own(engine));
    return gather_finish(engine);
}

/* ---- the call ------------------------------------------------------------------ */

static double base_factor(const zc_engine *engine, double loss_scale)
{
    return (engine->config.mean ? 1.0 / (double)engine->ranks : 1.0) / loss_scale;
}

static zc_status check_step(zc_engine *engine, const zc_options *groups, size_t group_count, const zc_step_args *args)
{
    if (group_count != engine->group_count)
        return zc_fail(ZC_EINVAL, "step with %zu groups, but the engine has %zu", group_count, engine->group_count);
    if (!(args->loss_scale > 0) || isinf(args->loss_scale))
        return zc_fail(ZC_EINVAL, "loss_scale is %g; legal is any finite number over 0", args->loss_scale);
    if (!(args->max_norm >= 0))
        return zc_fail(ZC_EINVAL, "max_norm is %g; legal is 0 (no clipping) or more", args->max_norm);
    for (size_t g = 0; g < group_count; g++)
        ZC_TRY(optim_check(engine->config.rule, &groups[g]));
    return ZC_OK;
}

/* In words, for ranks that differ: the arguments, and the rates of as many groups as fit. */
static void describe_step(const zc_options *groups, size_t group_count, const zc_step_args *args, char *text, size_t room_bytes)
{
    size_t used = (size_t)snprintf(text, room_bytes, "loss_scale %g, max_norm %g, skip_nonfinite %d, lr",
                                   args->loss_scale, args->max_norm, args->skip_nonfinite != 0);
    for (size_t g = 0; g < group_count && used < room_bytes; g++)
        used += (size_t)snprintf(text + used, room_bytes - used, "%s%.9g", g ? ", " : " ", groups[g].lr);
}

static zc_status step(zc_engine *engine, const zc_options *groups, size_t group_count, const zc_step_args *args)
{
    char with[MEET_WITH_BYTES];
    ZC_TRY(capture_follow(engine, "step()"));
    ZC_TRY(capture_check_step(engine, groups));
    ZC_TRY(engine_ensure_state(engine, groups));
    describe_step(groups, group_count, args, with, sizeof with);
    uint64_t detail = engine_hash_options(ZC_HASH_START, groups, group_count);
    engine->options_hash = detail;
    double numbers[4] = {args->loss_scale, args->max_norm, args->want_norm, args->skip_nonfinite};
    ZC_TRY(round_meet(engine, MEET_STEP, zc_hash(detail, numbers, sizeof numbers), "step", with));

    int want_norm = args->want_norm || args->max_norm > 0;
    double factor = base_factor(engine, args->loss_scale);
    ZC_POINT("step: met");
    ZC_TRY(collect_stats(engine, want_norm));
    ZC_POINT("step: own sums looked at");
    ZC_TRY(add_up_stats(engine));
    device_step_args decision = {
        .rule = engine->config.rule,
        .options = groups,
        .groups = group_count,
        .base_factor = factor,
        .norm_factor = factor * engine->clip_factor,
        .max_norm = args->max_norm,
        .clip_factor = engine->clip_factor,
        .want_norm = want_norm,
        .skip_nonfinite = args->skip_nonfinite,
        .segments = engine->param_count,
        .stats = engine->stats_sum,
        .segment = engine->segments,
        .scalars = engine->scalars,
        .result = engine->result,
    };
    engine->last_known = 0;
    ZC_TRY(engine->device->ops->step_scalars(engine->device, engine->stream, &decision));
    ZC_POINT("step: decided");
    if (engine->config.stage == 0) {
        ZC_TRY(gather_sums(engine));
        ZC_TRY(update_everything(engine));
    } else {
        ZC_TRY(update_shards(engine));
    }
    ZC_POINT("step: updated");
    engine->last_rounds = engine->rounds;
    round_forget(engine);
    return capture_end_step(engine);
}

zc_status zc_engine_step(zc_engine *engine, const zc_options *groups, size_t group_count, const zc_step_args *args)
{
    ZC_TRY(check_step(engine, groups, group_count, args));
    ZC_TRY(stage3_check_unused(engine, "step()"));
    return engine_end_call(engine, "step", step(engine, groups, group_count, args));
}

uint64_t zc_engine_last_rounds(const zc_engine *engine)
{
    return engine->last_rounds;
}

zc_status zc_engine_last_step(zc_engine *engine, zc_step_result *result)
{
    device_step decided;
    if (!engine->last_known || engine->captured) {
        ZC_TRY(engine->device->ops->download(engine->device, engine->stream, &decided, engine->result, sizeof decided));
        engine->last = (zc_step_result){decided.norm, decided.skipped != 0, decided.nonfinite};
        engine->last_known = 1;
    }
    *result = engine->last;
    return ZC_OK;
}

/* ---- norms other than the step's own --------------------------------------------- */

/* max |g|, or the sum of |g|^p in the block order of the 2-norm, over a host copy of one shard. */
static void other_norm(const char *sums, size_t count, zc_dtype dtype, double p, uint64_t *words, double *largest,
                       int *nonfinite)
{
    for (size_t begin = 0; begin < count; begin += 64) {
        double block = 0;
        for (size_t k = begin; k < count && k < begin + 64; k++) {
            double g = dtype == ZC_FLOAT64 ? ((const double *)(const void *)sums)[k]
                                           : ((const float *)(const void *)sums)[k];
            g = fabs(g);
            if (!(g <= 1.7976931348623157e308))
                *nonfinite |= g != g ? 2 : 1;
            if (g > *largest)
                *largest = g;
            block += isinf(p) ? 0 : pow(g, p);
        }
        if (block <= 1.7976931348623157e308)
            optim_sum_add(words, block);
    }
}

typedef struct norm_record {
    uint64_t words[OPTIM_SUM_WORDS];
    double largest;
    uint64_t nonfinite;
} norm_record;

static zc_status general_norm(zc_engine *engine, double p, double *norm)
{
    norm_record mine = {{0}, 0, 0}, *all = NULL;
    zc_status status = ZC_OK;
    int nonfinite = 0;
    for (size_t s = 0; status == ZC_OK && engine->rounds && s < engine->space_count; s++) {
        engine_space *space = &engine->spaces[s];
        size_t most = partition_most_shard(&space->plan) * space->sum_bytes;
        char *host = zc_malloc(most + 1);
        if (!host)
            return zc_fail(ZC_ENOMEM, "rank %zu: no memory for one shard's norm", engine->rank);
        for (size_t b = 0; status == ZC_OK && !space->frozen && b < space->plan.buckets; b++) {
            size_t count = partition_shard_elems(&space->plan, b);
            const void *sums;
            status = bucket_sums(engine, space, b, engine->config.stage == 0 ? engine->rank : 0, &sums);
            if (status == ZC_OK)
                status = engine->device->ops->download(engine->device, engine->stream, host, sums,
                                                       count * space->sum_bytes);
            if (status == ZC_OK)
                other_norm(host, count, space->sum_dtype, p, mine.words, &mine.largest, &nonfinite);
        }
        zc_free(host);
    }
    ZC_TRY(status);
    mine.nonfinite = (uint64_t)nonfinite;
    all = zc_malloc(engine->ranks * sizeof *all);
    if (!all)
        return zc_fail(ZC_ENOMEM, "rank %zu: no memory for the norms of %zu ranks", engine->rank, engine->ranks);
    status = comm_exchange(engine->control, CONTROL_TAG_MEET, "norm", &mine, all, sizeof mine);
    for (size_t r = 0; status == ZC_OK && r < engine->ranks; r++) {
        if (r != engine->rank)
            for (size_t k = 0; k < OPTIM_SUM_WORDS; k++)
                mine.words[k] += all[r].words[k];
        if (all[r].largest > mine.largest)
            mine.largest = all[r].largest;
        mine.nonfinite |= all[r].nonfinite;
    }
    zc_free(all);
    *norm = isinf(p) ? mine.largest : pow(optim_sum_value(mine.words), 1.0 / p);
    if (mine.nonfinite & 2)
        *norm = NAN;
    else if (mine.nonfinite & 1)
        *norm = INFINITY;
    return status;
}

static zc_status two_norm(zc_engine *engine, double *norm)
{
    device_stats stats;
    ZC_TRY(collect_stats(engine, 1));
    ZC_TRY(add_up_stats(engine));
    ZC_TRY(engine->device->ops->download(engine->device, engine->stream, &stats, engine->stats_sum, sizeof stats));
    *norm = stats.nan_ranks ? NAN : stats.inf_ranks ? INFINITY : sqrt(optim_sum_value(stats.sum_squares));
    return ZC_OK;
}

zc_status zc_engine_clip(zc_engine *engine, double max_norm, double norm_type, double loss_scale, double *norm)
{
    double numbers[3] = {max_norm, norm_type, loss_scale}, raw = 0;
    char with[MEET_WITH_BYTES];
    if (!(max_norm >= 0))
        return zc_fail(ZC_EINVAL, "max_norm is %g; legal is 0 or more", max_norm);
    if (!(norm_type > 0))
        return zc_fail(ZC_EINVAL, "norm_type is %g; legal is any number over 0, or infinity", norm_type);
    if (!(loss_scale > 0) || isinf(loss_scale))
        return zc_fail(ZC_EINVAL, "loss_scale is %g; legal is any finite number over 0", loss_scale);
    snprintf(with, sizeof with, "max_norm %.9g, norm_type %.9g, loss_scale %.9g", max_norm, norm_type, loss_scale);
    zc_status status = round_meet(engine, MEET_CLIP, zc_hash(ZC_HASH_START, numbers, sizeof numbers), "clip_grad_norm_", with);
    if (status == ZC_OK)
        status = norm_type == 2.0 ? two_norm(engine, &raw) : general_norm(engine, norm_type, &raw);
    ZC_TRY(engine_end_call(engine, "clip_grad_norm_", status));
    *norm = base_factor(engine, loss_scale) * engine->clip_factor * raw;
    if (isinf(max_norm))
        return ZC_OK;
    double coefficient = max_norm / (*norm + 1e-6);
    if (!(coefficient >= 1.0))
        engine->clip_factor *= coefficient;
    return ZC_OK;
}
