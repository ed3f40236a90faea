/*
 * Iterations that are captured into a CUDA graph and replayed (device.h's capturing).
 *
 * While a capture goes on nothing runs; every call of the engine adds to what each
 * replay is going to do.  A replay is somebody's launch of the graph, which the
 * host's part of the engine does not notice.  So that it is right all the same:
 *
 *   - A graph has whole iterations, from the first gradient after a step to the next
 *     step.  Then the state on the host is the same before and after each, however
 *     many replays there are.  Gradients and a step that are not in one capture, or
 *     not both outside, are an error (capture_follow).
 *   - What changes from step to step is in device memory: steps of each parameter,
 *     the exact sum, the clip, whether a step is skipped, and the groups' options,
 *     which zc_engine_replay_options brings there.  What does not is as it was in
 *     the capture: loss scale, clipping, which parameters had gradients.
 *   - What the host counts as it enqueues would be counted once, in the capture,
 *     although nothing ran.  So it is taken back there, and the graph adds it to a
 *     tally on the device, which the host reads when somebody asks.
 *   - Addresses stay.  Nothing is allocated in a capture, because a whole step comes
 *     before it, and what a graph uses is not replaced afterwards: parameters
 *     cannot be added, nor options set that call for more arrays.
 *
 * One rank only, and stages 0 to 2.  Several ranks meet on the host at the end of
 * each backward and at each step, and declare to one another what NCCL is about to
 * get; replays would do neither, so ranks that replay differently would hang, or
 * get wrong sums, and no rank could say why.  At stage 3 the host decides, while
 * units are used, what is gathered, and when.
 */
#include "engine.h"

#include <stddef.h>

#define ROWS 4u

_Static_assert(offsetof(zc_traffic, bytes) == DEVICE_COUNTS * sizeof(uint64_t) &&
               sizeof(zc_traffic_row) * ROWS == DEVICE_COUNTS * sizeof(uint64_t), "a traffic is so many counts");

static zc_status capture_now(const zc_engine *engine, uint64_t *graph)
{
    *graph = 0;
    if (!engine->device->ops->capturing)
        return ZC_OK;
    return engine->device->ops->capturing(engine->device, engine->stream, graph);
}

zc_status zc_engine_capturing(const zc_engine *engine, int *capturing)
{
    uint64_t graph;
    zc_status status = capture_now(engine, &graph);
    *capturing = graph != 0;
    return status;
}

int zc_engine_captured(const zc_engine *engine)
{
    return engine->captured;
}

zc_status capture_refuse(const zc_engine *engine, const char *what)
{
    uint64_t graph;
    ZC_TRY(capture_now(engine, &graph));
    if (!graph)
        return ZC_OK;
    return zc_fail(ZC_ESTATE, "rank %zu: %s cannot be captured into a CUDA graph: it needs the host, or memory; do it "
                   "before the capture, or after it", engine->rank, what);
}

static zc_status check_can_capture(const zc_engine *engine)
{
    if (engine->ranks > 1)
        return zc_fail(ZC_EINVAL, "rank %zu: training on %zu ranks cannot be captured into a CUDA graph: the ranks meet on the "
                       "host in every step, and a replay would not; capture what is between the steps (forward without "
                       "backward), or train on one rank", engine->rank, engine->ranks);
    if (engine->config.stage == 3)
        return zc_fail(ZC_EINVAL, "rank %zu: stage 3 cannot be captured into a CUDA graph: the host decides what is gathered, "
                       "and when; use stage 2 or lower", engine->rank);
    if (!engine->stepped)
        return zc_fail(ZC_ESTATE, "rank %zu: before a capture there must have been a whole iteration, backward and step(): the "
                       "first one makes memory, which a capture cannot", engine->rank);
    return ZC_OK;
}

/* The sums that there are belong to another place than the stream is in now. */
static zc_status is_elsewhere(const zc_engine *engine, uint64_t graph, const char *what)
{
    const char *here = graph ? "is captured into a CUDA graph" : "is not captured into a CUDA graph";
    const char *there = engine->graph == 0 ? "outside of the capture" : graph ? "in another capture" : "in a capture";
    return zc_fail(ZC_ESTATE, "rank %zu: %s %s, but there are gradients from %s; a graph has to hold whole iterations, from "
                   "the first backward after a step to the next step; zero_grad() drops the gradients", engine->rank, what,
                   here, there);
}

/* From here on the engine is in this capture (0: none). */
static void enter(zc_engine *engine, uint64_t graph)
{
    if (engine->graph)
        engine->traffic = engine->before_capture; /* given up, or a step has taken it back already */
    if (graph)
        engine->before_capture = engine->traffic;
    engine->graph = graph;
}

zc_status capture_follow(zc_engine *engine, const char *what)
{
    uint64_t graph;
    ZC_TRY(capture_now(engine, &graph));
    if (graph == engine->graph)
        return ZC_OK;
    if (engine->rounds > 0 || (engine->round_open && !engine->round_aborted))
        return is_elsewhere(engine, graph, what);
    if (graph)
        ZC_TRY(check_can_capture(engine));
    enter(engine, graph);
    return ZC_OK;
}

zc_status capture_forget(zc_engine *engine)
{
    uint64_t graph;
    ZC_TRY(capture_now(engine, &graph));
    if (graph == engine->graph)
        return ZC_OK;
    zc_engine_abort_round(engine);
    enter(engine, graph);
    return ZC_OK;
}

zc_status capture_check_step(const zc_engine *engine, const zc_options *groups)
{
    if (!engine->graph)
        return ZC_OK;
    if (!engine->round_open && !engine->rounds)
        return zc_fail(ZC_ESTATE, "rank %zu: step() is captured into a CUDA graph without a backward; a graph has to hold whole "
                       "iterations, because replays do not tell the optimizer which gradients they have used", engine->rank);
    if (engine_hash_options(ZC_HASH_START, groups, engine->group_count) != engine->options_hash)
        return zc_fail(ZC_ESTATE, "rank %zu: options of the groups were changed after the last step, and a capture cannot bring "
                       "them to the GPU; call before_replay() (zc_engine_replay_options) before it", engine->rank);
    return ZC_OK;
}

zc_status capture_end_step(zc_engine *engine)
{
    uint64_t counts[DEVICE_COUNTS];
    const uint64_t *now = &engine->traffic.reduce_scatter.calls, *before = &engine->before_capture.reduce_scatter.calls;
    if (!engine->graph) {
        engine->stepped = 1;
        return ZC_OK;
    }
    for (size_t k = 0; k < DEVICE_COUNTS; k++)
        counts[k] = now[k] - before[k];
    ZC_TRY(engine->device->ops->tally(engine->device, engine->stream, engine->tally, engine->result, counts));
    engine->traffic = engine->before_capture;
    engine->captured = 1;
    return ZC_OK;
}

zc_status capture_read_tally(zc_engine *engine, device_tally *out)
{
    memset(out, 0, sizeof *out);
    if (!engine->captured)
        return ZC_OK;
    return engine->device->ops->download(engine->device, engine->stream, out, engine->tally, sizeof *out);
}

zc_status zc_engine_replayed_steps(zc_engine *engine, uint64_t *steps)
{
    device_tally tally;
    zc_status status = capture_read_tally(engine, &tally);
    *steps = tally.steps;
    return status;
}

zc_status capture_add_traffic(zc_engine *engine, zc_traffic *to)
{
    device_tally tally;
    uint64_t *rows = &to->reduce_scatter.calls;
    ZC_TRY(capture_read_tally(engine, &tally));
    for (size_t k = 0; k < DEVICE_COUNTS; k++) {
        rows[k] += tally.counts[k] - engine->tally_taken[k];
        engine->tally_taken[k] = tally.counts[k];
    }
    memset(&engine->before_capture, 0, sizeof engine->before_capture);
    return ZC_OK;
}

zc_status zc_engine_replay_options(zc_engine *engine, const zc_options *groups, size_t group_count)
{
    if (!engine->device->ops->replay_options)
        return zc_fail(ZC_EINVAL, "rank %zu: replays are of CUDA graphs, and the engine is on the CPU", engine->rank);
    ZC_TRY(capture_refuse(engine, "setting the options of the groups"));
    ZC_TRY(zc_engine_prepare(engine, groups, group_count));
    ZC_TRY(engine->device->ops->replay_options(engine->device, engine->stream, groups, group_count));
    engine->options_hash = engine_hash_options(ZC_HASH_START, groups, group_count);
    return ZC_OK;
}
