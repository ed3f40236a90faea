/*
 * Rounds: which backward is reduced with which, on all ranks.
 *
 * The protocol
 *
 * A round is one outermost backward.  On each rank it opens with the first
 * gradient that is offered and closes with end_round().  In between nothing is
 * agreed: complete buckets are posted, and reduced as soon as every rank has
 * posted them.  A round is known by its number, `round_count`, which is the same
 * on all ranks whenever they meet.
 *
 * Ranks come together in round_meet().  Each brings a record (what it is about
 * to do, its round number, how often it discarded sums, ...) and sees all
 * others'.  Four things can happen:
 *
 *   all do the same        They go on with it.
 *   some end a round       The ones that are elsewhere (in step(), reading a
 *                          gradient, saving) have not taken part in that
 *                          backward: no hook of theirs fired, or they ran no
 *                          backward.  They join the round with zeros for all
 *                          buckets, and then come to the meeting again.
 *   some abort a round     Their backward raised half-way.  All ranks close the
 *                          round by number: buckets are completed with zeros so
 *                          that every posted operation ends, and then all sums
 *                          are dropped.  If every rank aborted, training goes
 *                          on as if that backward had not been; if only some
 *                          did, all ranks get ZC_EMISMATCH, naming one of them.
 *                          If sums of earlier backwards are lost with it, all
 *                          ranks get ZC_ESTATE, since a later step would
 *                          silently lack them.
 *   they do different      ZC_EMISMATCH naming both sides, on all ranks.
 *   things
 *
 * After the meeting that ends a round, every rank is in bucket_flush(): what
 * did not arrive counts as zeros, and the round is over when every bucket is
 * reduced.  Only there does a rank wait for peers without a bound of its own.
 *
 * Order.  Where gathers of units are collective (engine_stage3.c), a rank must not
 * gather while another meets: it would wait for a gather that never comes.  There
 * every gather, and every meeting before it waits, is declared on the engines' line
 * of the communicator, so whoever comes second to such a difference finds it at
 * once, with both names.  All meetings of an engine have one detail on that line, as ranks
 * that join the round of others are in another call; what a meeting is about
 * is compared in it.  A rank that joins comes to as many meetings as the others: to
 * the one that it joins, and to its own, which the others come to later.  Several
 * engines of one communicator share the line, so their gathers and meetings
 * are in one order on all ranks; they must be anyway, because the communicator is ordered.
 *
 * Late gradients.  A reentrant checkpoint delivers a tied weight several times
 * in one backward.  The first gradient goes into the round; the caller adds up
 * the others and brings them to end_round().  If any rank brings some (the
 * records say so), the buckets they touch on any rank are reduced a second
 * time, with zeros for all other parameters.  Which gradient is "first" does
 * not depend on buckets or timing, so neither do the bits of the sum.
 *
 * Cases worth knowing
 *
 *   An unused parameter registered last, a ring of one slot: its bucket comes
 *   first in the plan and stays open all through backward, so everything else
 *   is held back, and flows through the one slot at the round's end.
 *   A rank on which no hook fires: it opens no round, and joins as above.
 *   Two engines with open rounds at once (a GAN): each has channels of its own,
 *   any wait makes progress on all, and a wait inside a backward is bounded.
 */
#include "engine.h"
#include "zc_point.h"

#include <stdio.h>

#define MEETING UINT64_MAX /* the detail of all meetings that are declared; a gather's is its unit */

typedef struct meet_record {
    uint32_t kind;
    uint32_t late;          /* this rank brings late gradients */
    uint64_t round;         /* rounds closed so far */
    uint64_t discards;
    uint64_t detail;
    char what[MEET_WHAT_BYTES];
    char with[MEET_WITH_BYTES];
} meet_record;

zc_status round_begin(zc_engine *engine)
{
    ZC_TRY(gather_finish(engine));
    for (size_t s = 0; engine->rounds > 0 && s < engine->space_count; s++)
        ZC_TRY(bucket_vacate(engine, &engine->spaces[s]));
    bucket_begin_round(engine);
    if (engine->waited_out)
        engine->patience_ns /= 4;
    else if (engine->patience_ns < ENGINE_PATIENCE_NS / 2)
        engine->patience_ns = 2 * engine->patience_ns + 100000;
    engine->round_open = 1;
    engine->waited_out = 0;
    return ZC_OK;
}

void round_forget(zc_engine *engine)
{
    engine->rounds = 0;
    engine->clip_factor = 1.0;
    for (size_t i = 0; i < engine->param_count; i++)
        engine->params[i].used = 0;
    engine->device->ops->fill(engine->device, engine->stream, engine->flags, 0, sizeof *engine->flags);
}

/* ---- late gradients -------------------------------------------------------- */

static void mark_late(const zc_engine *engine, const engine_space *space, const void *const *late,
                      unsigned char *mask)
{
    for (size_t k = 0; k < space->order_count; k++) {
        const engine_param *param = &engine->params[space->order[k]];
        if (!late[space->order[k]])
            continue;
        size_t last = partition_bucket_of(&space->plan, param->extent - 1);
        for (size_t b = partition_bucket_of(&space->plan, param->offset); b <= last; b++)
            mask[b] = 1;
    }
}

/* mask becomes the union of all ranks' masks. `all` has room for ranks * COMM_EXCHANGE_BYTES. */
static zc_status unite_masks(zc_engine *engine, unsigned char *mask, size_t count, unsigned char *all)
{
    for (size_t base = 0; base < count; base += COMM_EXCHANGE_BYTES) {
        size_t bytes = count - base < COMM_EXCHANGE_BYTES ? count - base : COMM_EXCHANGE_BYTES;
        ZC_TRY(comm_exchange(engine->control, CONTROL_TAG_MEET, "late gradients", mask + base, all, bytes));
        for (size_t r = 0; r < engine->ranks; r++)
            for (size_t k = 0; k < bytes; k++)
                mask[base + k] |= all[r * bytes + k];
    }
    return ZC_OK;
}

/* A second pass over the buckets that hold a late gradient on some rank. */
static zc_status reduce_late(zc_engine *engine, const zc_late_grad *list, size_t count)
{
    zc_status status = ZC_OK;
    const void **late = zc_calloc(engine->param_count + 1, sizeof *late);
    unsigned char **masks = zc_calloc(engine->space_count + 1, sizeof *masks);
    unsigned char *all = zc_malloc(engine->ranks * COMM_EXCHANGE_BYTES);
    if (!late || !masks || !all)
        status = zc_fail(ZC_ENOMEM, "no memory for %zu late gradients", count);
    for (size_t k = 0; status == ZC_OK && k < count; k++)
        if (engine->params[list[k].index].elems)
            late[list[k].index] = list[k].grad;
    for (size_t s = 0; status == ZC_OK && s < engine->space_count; s++) {
        engine_space *space = &engine->spaces[s];
        masks[s] = zc_calloc(space->plan.buckets + 1, 1);
        if (!masks[s]) {
            status = zc_fail(ZC_ENOMEM, "no memory for %zu late gradients", count);
            break;
        }
        mark_late(engine, space, late, masks[s]);
        status = unite_masks(engine, masks[s], space->plan.buckets, all);
        if (status == ZC_OK)
            status = bucket_vacate(engine, space);
    }
    if (status == ZC_OK) {
        bucket_begin_round(engine);
        status = bucket_flush(engine, masks, late);
    }
    for (size_t s = 0; masks && s < engine->space_count; s++)
        zc_free(masks[s]);
    zc_free(masks);
    zc_free(late);
    zc_free(all);
    return status;
}

/* ---- closing ------------------------------------------------------------------ */

/* Every rank is here, with the same records. */
static zc_status close_round(zc_engine *engine, const meet_record *records, const zc_late_grad *late,
                             size_t late_count)
{
    size_t aborted = 0, who = 0, any_late = 0;
    uint64_t earlier = engine->rounds;
    for (size_t r = 0; r < engine->ranks; r++) {
        if (records[r].kind == MEET_ABORT && !aborted++)
            who = r;
        any_late += records[r].late;
    }
    if (!engine->round_open)
        ZC_TRY(round_begin(engine));
    ZC_POINT("round: all have ended it");
    ZC_TRY(bucket_flush(engine, NULL, NULL));
    ZC_POINT("round: sums are here");
    for (size_t i = 0; i < engine->param_count; i++) {
        engine->params[i].used |= engine->params[i].arrived;
        engine->params[i].arrived = 0;
    }
    engine->round_open = 0;
    engine->round_aborted = 0;
    engine->round_count++;
    engine->rounds++;
    if (any_late && !aborted)
        ZC_TRY(reduce_late(engine, late, late_count));
    if (!aborted)
        return ZC_OK;
    round_forget(engine);
    if (aborted < engine->ranks)
        return zc_fail(ZC_EMISMATCH, "rank %zu's backward raised an error while other ranks finished theirs; the sums "
                       "of this backward are dropped on all ranks. Raise on every rank, or restart", who);
    if (earlier)
        return zc_fail(ZC_ESTATE, "backward raised an error on all ranks, and the sums of %llu earlier backwards since "
                       "the last step are dropped with it; start the accumulation again", (unsigned long long)earlier);
    return ZC_OK;
}

zc_status round_declare(zc_engine *engine, uint64_t detail, const char *what)
{
    uint64_t hash = zc_hash(ZC_HASH_START, &engine->number, sizeof engine->number);
    if (!engine_gathers_together(engine))
        return ZC_OK;
    return comm_declare(engine->comm, COMM_LINE_ENGINE, zc_hash(hash, &detail, sizeof detail), what);
}

static int ends_round(const meet_record *record)
{
    return record->kind == MEET_END_ROUND || record->kind == MEET_ABORT;
}

/* "step (lr 0.1 ...)" */
static const char *told(const meet_record *record, char *text, size_t room_bytes)
{
    snprintf(text, room_bytes, record->with[0] ? "%.64s (%.160s)" : "%.64s", record->what, record->with);
    return text;
}

static zc_status differ(zc_engine *engine, const meet_record *records)
{
    const meet_record *mine = &records[engine->rank];
    size_t other = 0;
    char why[768], here[256], there[256];
    for (size_t r = 0; r < engine->ranks; r++)
        if (r != engine->rank && (records[r].kind != mine->kind || records[r].detail != mine->detail ||
                                  records[r].discards != mine->discards || records[r].round != mine->round))
            other = r;
    const meet_record *its = &records[other];
    /* The end of a backward is joined by ranks that do something else, so that is not what keeps them apart. */
    int joins = ends_round(mine) || ends_round(its);
    if (!joins && (its->kind != mine->kind || strncmp(its->what, mine->what, sizeof mine->what) != 0))
        snprintf(why, sizeof why, "ranks do different things: rank %zu is in %s, rank %zu in %s; every rank must "
                 "make the same calls in the same order", engine->rank, told(mine, here, sizeof here), other,
                 told(its, there, sizeof there));
    else if (its->discards != mine->discards)
        snprintf(why, sizeof why, "gradients of a backward were discarded or replaced (zero_grad, p.grad = ...) on rank %zu "
                 "and not, or others, on rank %zu, before %.64s; all ranks must discard alike", engine->rank, other,
                 mine->what);
    else if (its->round != mine->round)
        snprintf(why, sizeof why, "rank %zu has closed %llu backwards and rank %zu %llu at %.64s; this is a defect",
                 engine->rank, (unsigned long long)mine->round, other, (unsigned long long)its->round, mine->what);
    else if (strcmp(mine->with, its->with) != 0)
        snprintf(why, sizeof why, "ranks %zu and %zu are both in %.64s but with different arguments: rank %zu with %.160s, "
                 "rank %zu with %.160s; all ranks must pass the same", engine->rank, other, mine->what, engine->rank,
                 mine->with, other, its->with);
    else
        snprintf(why, sizeof why, "ranks %zu and %zu are both in %.64s, with %.160s, but with different arguments beside "
                 "these (options of the groups); all ranks must pass the same", engine->rank, other, mine->what, mine->with);
    comm_poison(engine->comm, ZC_EMISMATCH, why);
    return zc_fail(ZC_EMISMATCH, "%s", why);
}

/* One meeting. *again: this rank joined a round of others and must come once more. */
static zc_status meet_once(zc_engine *engine, meet_kind kind, uint64_t detail, const char *what, const char *with,
                           const zc_late_grad *late, size_t late_count, int *again)
{
    meet_record mine = {(uint32_t)kind, late_count != 0, engine->round_count, engine->discards, detail, {0}, {0}};
    meet_record *all = zc_malloc(engine->ranks * sizeof *all);
    int ending = 0, equal = 1, in_step = 1;
    *again = 0;
    if (!all)
        return zc_fail(ZC_ENOMEM, "rank %zu: no memory to meet %zu ranks", engine->rank, engine->ranks);
    snprintf(mine.what, sizeof mine.what, "%s", what);
    snprintf(mine.with, sizeof mine.with, "%s", with ? with : "");
    zc_status status = round_declare(engine, MEETING, what);
    if (status == ZC_OK)
        status = comm_exchange(engine->control, CONTROL_TAG_MEET, what, &mine, all, sizeof mine);
    for (size_t r = 0; status == ZC_OK && r < engine->ranks; r++) {
        ending |= ends_round(&all[r]);
        equal &= all[r].kind == mine.kind && all[r].detail == mine.detail;
        in_step &= all[r].discards == mine.discards && all[r].round == mine.round;
    }
    if (status == ZC_OK && ending && in_step) {
        *again = kind != MEET_END_ROUND && kind != MEET_ABORT;
        status = close_round(engine, all, late, late_count);
    } else if (status == ZC_OK && !(equal && in_step)) {
        status = differ(engine, all);
    }
    zc_free(all);
    return status;
}

static zc_status end_round(zc_engine *engine, const zc_late_grad *late, size_t late_count);

/* What is only of the host, and what ends backwards and makes steps. */
static int can_be_captured(meet_kind kind)
{
    return kind == MEET_STEP || kind == MEET_SYNC;
}

zc_status round_meet(zc_engine *engine, meet_kind kind, uint64_t detail, const char *what, const char *with)
{
    int again = 1;
    ZC_TRY(engine_check_loaded(engine));
    ZC_TRY(can_be_captured(kind) ? capture_follow(engine, what) : capture_refuse(engine, what));
    ZC_TRY(gather_finish(engine));
    ZC_TRY(round_settle(engine));
    if (engine->round_open) /* callers that do not end a backward themselves */
        ZC_TRY(end_round(engine, NULL, 0));
    while (again)
        ZC_TRY(meet_once(engine, kind, detail, what, with, NULL, 0, &again));
    return ZC_OK;
}

zc_status round_barrier(zc_engine *engine, const char *what)
{
    uint64_t here = 0, *all = zc_malloc(engine->ranks * sizeof *all);
    if (!all)
        return zc_fail(ZC_ENOMEM, "rank %zu: no memory to meet %zu ranks", engine->rank, engine->ranks);
    zc_status status = comm_exchange(engine->control, CONTROL_TAG_MEET, what, &here, all, sizeof here);
    zc_free(all);
    return status;
}

zc_status round_settle(zc_engine *engine)
{
    int again;
    if (!engine->round_open || !engine->round_aborted)
        return ZC_OK;
    return meet_once(engine, MEET_ABORT, 0, "a backward that raised", NULL, NULL, 0, &again);
}

static zc_status end_round(zc_engine *engine, const zc_late_grad *late, size_t late_count)
{
    int again;
    ZC_TRY(engine_check_loaded(engine));
    ZC_TRY(capture_follow(engine, "the end of backward"));
    ZC_TRY(round_settle(engine));
    if (!engine->round_open) /* no gradient came here, but perhaps on other ranks */
        ZC_TRY(round_begin(engine));
    for (size_t k = 0; k < late_count; k++) {
        if (late[k].index >= engine->param_count)
            return zc_fail(ZC_EINVAL, "late gradient for parameter %zu, but there are %zu", late[k].index,
                           engine->param_count);
        if (!engine->params[late[k].index].arrived)
            return zc_fail(ZC_EINVAL, "rank %zu: late gradient for %s, which had no first one", engine->rank,
                           engine_param_name(engine, late[k].index));
    }
    return meet_once(engine, MEET_END_ROUND, 0, "the end of backward", NULL, late, late_count, &again);
}

zc_status zc_engine_end_round(zc_engine *engine, const zc_late_grad *late, size_t late_count)
{
    return engine_end_call(engine, "the end of backward", end_round(engine, late, late_count));
}

void zc_engine_abort_round(zc_engine *engine)
{
    if (engine->round_open)
        engine->round_aborted = 1;
}

zc_status zc_engine_discard(zc_engine *engine, size_t index)
{
    ZC_TRY(index == SIZE_MAX ? capture_forget(engine) : capture_follow(engine, "discarding a gradient"));
    zc_status settled = engine_end_call(engine, "a backward that raised", round_settle(engine));
    if (settled != ZC_OK && !(settled == ZC_ESTATE && index == SIZE_MAX)) /* lost sums that nobody wants any more */
        return settled;
    if (index != SIZE_MAX && index >= engine->param_count)
        return zc_fail(ZC_EINVAL, "parameter %zu of %zu", index, engine->param_count);
    if (engine->round_open)
        return zc_fail(ZC_ESTATE, "rank %zu: gradients cannot be discarded in the middle of a backward; end it first",
                       engine->rank);
    if (engine->rounds == 0)
        return ZC_OK;
    engine->discards = zc_hash(engine->discards, &index, sizeof index);
    if (index == SIZE_MAX) {
        round_forget(engine);
        return ZC_OK;
    }
    engine_param *param = &engine->params[index];
    engine_space *space = &engine->spaces[param->space];
    param->used = 0;
    if (!param->elems || param->frozen)
        return ZC_OK;
    ZC_TRY(bucket_vacate(engine, space));
    size_t last = partition_bucket_of(&space->plan, param->extent - 1);
    for (size_t b = partition_bucket_of(&space->plan, param->offset); b <= last; b++) {
        partition_range own = partition_slice(&space->plan, b, engine->rank);
        size_t begin = param->offset > own.begin ? param->offset : own.begin;
        size_t end = param->extent < own.end ? param->extent : own.end;
        const void *sums;
        if (begin >= end)
            continue;
        ZC_TRY(bucket_sums(engine, space, b, engine->config.stage == 0 ? engine->rank : 0, &sums));
        ZC_TRY(engine->device->ops->fill(engine->device, engine->stream,
                                         (char *)(uintptr_t)sums + (begin - own.begin) * space->sum_bytes, 0,
                                         (end - begin) * space->sum_bytes));
    }
    return ZC_OK;
}

uint64_t zc_engine_rounds(const zc_engine *engine)
{
    return engine->rounds;
}

int zc_engine_round_open(const zc_engine *engine)
{
    return engine->round_open;
}

int zc_engine_has_grad(const zc_engine *engine, size_t index)
{
    return index < engine->param_count && engine->round_open && !engine->round_aborted &&
           engine->params[index].arrived;
}

zc_status zc_engine_sync(zc_engine *engine, const char *what)
{
    return engine_end_call(engine, what, round_meet(engine, MEET_SYNC, zc_hash(ZC_HASH_START, what, strlen(what)), what, NULL));
}
