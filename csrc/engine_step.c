/*
 * The step: from complete sums to updated parameters on every rank.
 *
 *   1. The ranks meet (and close what is open).
 *   2. Each takes the facts of its shards: sum of squares if a norm is wanted,
 *      non-finite flags (found by the reductions), and on which parameters it
 *      had gradients.  One small all-reduce adds them up.  Integers only: every
 *      rank gets the same bits, in whatever order they are added.
 *   3. The device turns them into one factor and a few scalars per parameter
 *      (step_scalars), without the host looking.
 *   4. Each piece is updated in one pass.
 *   5. Stages 1 and 2: a bucket's parameters are gathered as soon as its slice is
 *      updated.  Stage 0 gathers the sums instead, before the update; stage 3
 *      gathers nothing here.
 *
 * With shared parameters there is one copy, which every rank reads and each
 * writes only where it owns: the gather moves nothing and only says "done".  At
 * stage 0 a rank then still has to advance the state of slices it does not own:
 * it does so with a scratch copy of their parameters, before any owner writes.
 */
#include "engine.h"

#include <math.h>

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

/* ---- gathers ------------------------------------------------------------------ */

static zc_status start_gather(zc_engine *engine, engine_space *space, size_t b, comm_region *region,
                              size_t elem_bytes)
{
    partition_range bucket = partition_bucket(&space->plan, b);
    size_t shard = partition_shard_elems(&space->plan, b);
    if (!(region->flags & COMM_ONE_COPY)) {
        zc_traffic_row *row = &engine->traffic.all_gather;
        row->calls++;
        row->payload_elems += shard * engine->ranks;
        row->bytes += shard * (engine->ranks - 1) * elem_bytes;
    }
    return comm_all_gather(space->channel, engine->stream, SPACE_TAG_GATHER(b), region, bucket.begin * elem_bytes,
                           shard * elem_bytes, &space->buckets[b].ticket);
}

static zc_status finish_gathers(zc_engine *engine)
{
    for (size_t s = 0; s < engine->space_count; s++) {
        engine_space *space = &engine->spaces[s];
        for (size_t b = 0; b < space->plan.buckets; b++)
            ZC_TRY(comm_wait(space->channel, space->buckets[b].ticket, engine->stream));
    }
    return ZC_OK;
}

zc_status zc_engine_spread(zc_engine *engine)
{
    ZC_TRY(round_meet(engine, MEET_STORE, SIZE_MAX, "loading"));
    ZC_TRY(stage3_settle(engine));
    if (engine->config.stage == 3)
        return stage3_written(engine, "loading");
    for (size_t s = 0; s < engine->space_count; s++) {
        engine_space *space = &engine->spaces[s];
        for (size_t b = 0; b < space->plan.buckets; b++)
            ZC_TRY(start_gather(engine, space, b, space->param, space->elem_bytes));
    }
    return finish_gathers(engine);
}

/* ---- updates ------------------------------------------------------------------ */

/* Updates one piece; its parameters are at `param`. */
static zc_status update_piece(zc_engine *engine, engine_space *space, size_t b, size_t piece, void *param)
{
    size_t row = b * engine_pieces(engine) + piece, state_begin;
    const void *sums;
    partition_range range = engine_piece(engine, space, b, piece, &state_begin);
    ZC_TRY(bucket_sums(engine, space, b, piece, &sums));
    device_update_args args = {
        .rule = engine->config.rule,
        .param_dtype = space->dtype,
        .spans = space->spans + space->span_first[row],
        .span_count = space->span_first[row + 1] - space->span_first[row],
        .extent = range.end - range.begin,
        .scalars = engine->scalars,
        .segments = engine->segment_count,
        .param = param,
        .master = engine_at(space->master, state_begin, zc_dtype_master_bytes(space->dtype)),
        .m = engine_at(space->m, state_begin, space->sum_bytes),
        .v = engine_at(space->v, state_begin, space->sum_bytes),
        .vmax = engine_at(space->vmax, state_begin, space->sum_bytes),
        .grad = sums,
    };
    return engine->device->ops->update(engine->device, engine->stream, &args);
}

static zc_status update_shards(zc_engine *engine)
{
    ZC_TRY(stage3_settle(engine));
    for (size_t s = 0; s < engine->space_count; s++) {
        engine_space *space = &engine->spaces[s];
        for (size_t b = 0; !space->frozen && b < space->plan.buckets; b++) {
            partition_range own = partition_slice(&space->plan, b, engine->rank);
            ZC_TRY(update_piece(engine, space, b, 0, engine_param_at(engine, space, b, own.begin)));
            if (engine->config.stage < 3)
                ZC_TRY(start_gather(engine, space, b, space->param, space->elem_bytes));
        }
    }
    return engine->config.stage < 3 ? finish_gathers(engine) : stage3_written(engine, "step");
}

static zc_status gather_sums(zc_engine *engine)
{
    for (size_t s = 0; s < engine->space_count; s++)
        for (size_t b = 0; b < engine->spaces[s].plan.buckets; b++)
            ZC_TRY(start_gather(engine, &engine->spaces[s], b, engine->spaces[s].full_sums,
                                engine->spaces[s].sum_bytes));
    return finish_gathers(engine);
}

static zc_status update_everything(zc_engine *engine)
{
    int shared = engine->config.shared_params;
    for (size_t s = 0; s < engine->space_count; s++) {
        engine_space *space = &engine->spaces[s];
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
                ZC_TRY(update_piece(engine, space, b, piece, param));
            }
    }
    if (!shared)
        return ZC_OK;
    ZC_TRY(round_barrier(engine, "step"));
    for (size_t s = 0; s < engine->space_count; s++) {
        engine_space *space = &engine->spaces[s];
        for (size_t b = 0; b < space->plan.buckets; b++) {
            partition_range own = partition_slice(&space->plan, b, engine->rank);
            ZC_TRY(update_piece(engine, space, b, engine->rank, engine_param_at(engine, space, b, own.begin)));
            ZC_TRY(start_gather(engine, space, b, space->param, space->elem_bytes));
        }
    }
    return finish_gathers(engine);
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

zc_status zc_engine_step(zc_engine *engine, const zc_options *groups, size_t group_count, const zc_step_args *args,
                         zc_step_result *result)
{
    device_step decided;
    ZC_TRY(check_step(engine, groups, group_count, args));
    ZC_TRY(stage3_check_unused(engine, "step()"));
    ZC_TRY(engine_ensure_state(engine, groups));
    uint64_t detail = engine_hash_options(ENGINE_HASH_START, groups, group_count);
    double numbers[4] = {args->loss_scale, args->max_norm, args->want_norm, args->skip_nonfinite};
    ZC_TRY(round_meet(engine, MEET_STEP, engine_hash(detail, numbers, sizeof numbers), "step"));

    int want_norm = args->want_norm || args->max_norm > 0;
    double factor = base_factor(engine, args->loss_scale);
    ZC_TRY(collect_stats(engine, want_norm));
    ZC_TRY(add_up_stats(engine));
    device_step_args step = {
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
    ZC_TRY(engine->device->ops->step_scalars(engine->device, engine->stream, &step));
    if (engine->config.stage == 0) {
        ZC_TRY(gather_sums(engine));
        ZC_TRY(update_everything(engine));
    } else {
        ZC_TRY(update_shards(engine));
    }
    uint64_t rounds = engine->rounds;
    round_forget(engine);
    if (!result)
        return ZC_OK;
    ZC_TRY(engine->device->ops->download(engine->device, engine->stream, &decided, engine->result, sizeof decided));
    result->norm = decided.norm;
    result->skipped = decided.skipped != 0;
    result->nonfinite = decided.nonfinite;
    result->rounds = rounds;
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
    if (!(max_norm >= 0))
        return zc_fail(ZC_EINVAL, "max_norm is %g; legal is 0 or more", max_norm);
    if (!(norm_type > 0))
        return zc_fail(ZC_EINVAL, "norm_type is %g; legal is any number over 0, or infinity", norm_type);
    if (!(loss_scale > 0) || isinf(loss_scale))
        return zc_fail(ZC_EINVAL, "loss_scale is %g; legal is any finite number over 0", loss_scale);
    ZC_TRY(round_meet(engine, MEET_CLIP, engine_hash(ENGINE_HASH_START, numbers, sizeof numbers), "clip_grad_norm_"));
    if (norm_type == 2.0)
        ZC_TRY(two_norm(engine, &raw));
    else
        ZC_TRY(general_norm(engine, norm_type, &raw));
    *norm = base_factor(engine, loss_scale) * engine->clip_factor * raw;
    if (isinf(max_norm))
        return ZC_OK;
    double coefficient = max_norm / (*norm + 1e-6);
    if (!(coefficient >= 1.0))
        engine->clip_factor *= coefficient;
    return ZC_OK;
}
