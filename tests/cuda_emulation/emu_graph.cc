/*
 * Captures and graphs.
 *
 * A stream that is captured gives what is enqueued on it to the capture, as nodes;
 * a node comes after those that its stream had last, and those whose events it
 * has waited for.  An instantiated graph has a stream of its own for each that was
 * captured, on which a launch puts the nodes: ordered as they were captured,
 * after what the launching stream has, and before what it gets next.  Accesses are
 * declared then, with the clock of that launch, so replays are checked like
 * everything else.  Launches of one graph follow one another, wherever they are.
 *
 * What CUDA forbids while something is captured makes the capture void, as there:
 * the call that did it and every later one on the capture's streams fail, and so
 * does its end.  Of calls about which its manual is not clear the forbidding
 * reading counts.
 */
#include "emu_internal.h"

#include <algorithm>

namespace emu {

struct node {
    operation work;
    std::set<size_t> after;
    size_t lane;
};

struct capture {
    uint64_t id;
    cudaStreamCaptureMode mode;
    const host_thread *thread;
    stream_ref origin;
    bool over = false, invalid = false;
    std::vector<node> nodes;
    std::vector<stream_ref> streams; /* of lanes */
};

struct graph {
    std::vector<node> nodes;
    std::vector<int> lanes; /* their devices */
};

struct graph_exec {
    std::vector<node> nodes;
    std::vector<stream_ref> lanes;
    std::vector<std::pair<stream_ref, uint64_t>> launched; /* where the last launch has put its ends */
    vclock clock;                                          /* behind it */
};

namespace {

typedef std::shared_ptr<capture> capture_ref;

template <class Handle> Handle as_handle(uint64_t number)
{
    return (Handle)(uintptr_t)number;
}

template <class Map, class Handle> auto find_handle(const Map &open, Handle handle, const char *what)
{
    auto found = open.find((uint64_t)(uintptr_t)handle);
    if (found == open.end())
        finding(std::string(what) + " with a graph that does not exist");
    return found;
}

cudaError_t invalidate(const capture_ref &which, cudaError_t error)
{
    which->invalid = true;
    return error;
}

bool is_legacy(const stream_ref &on)
{
    auto legacy = the->legacy.find(on->device);
    return legacy != the->legacy.end() && legacy->second == on;
}

/* A capture of a stream of this device that is ordered with the default stream. */
capture_ref blocking_capture(int device)
{
    for (const capture_ref &going : the->captures)
        for (const stream_ref &on : going->streams)
            if (on->blocking && on->device == device)
                return going;
    return nullptr;
}

size_t lane_of(capture &going, const stream_ref &on)
{
    auto found = std::find(going.streams.begin(), going.streams.end(), on);
    return (size_t)(found - going.streams.begin());
}

void enter_capture(const capture_ref &going, const stream_ref &on)
{
    on->recording = going;
    on->last.clear();
    if (lane_of(*going, on) == going->streams.size())
        going->streams.push_back(on);
}

/* Whether something was captured that does not come before the end of the first stream. */
bool is_unjoined(const capture &ending)
{
    std::vector<size_t> open(ending.origin->last.begin(), ending.origin->last.end());
    std::set<size_t> reached(open.begin(), open.end());
    while (!open.empty()) {
        size_t at = open.back();
        open.pop_back();
        for (size_t earlier : ending.nodes[at].after)
            if (reached.insert(earlier).second)
                open.push_back(earlier);
    }
    return reached.size() < ending.nodes.size();
}

void leave(const capture_ref &ending)
{
    for (const stream_ref &on : ending->streams) {
        on->recording = nullptr;
        on->last.clear();
    }
    ending->over = true;
    the->captures.erase(std::find(the->captures.begin(), the->captures.end(), ending));
}

cudaError_t ended(const capture_ref &ending, cudaGraph_t *out)
{
    bool unjoined = is_unjoined(*ending);
    leave(ending);
    if (ending->invalid)
        return cudaErrorStreamCaptureInvalidated;
    if (unjoined)
        return cudaErrorStreamCaptureUnjoined;
    auto made = std::make_shared<graph>();
    made->nodes = std::move(ending->nodes);
    for (const stream_ref &on : ending->streams)
        made->lanes.push_back(on->device);
    uint64_t number = the->next_handle++;
    the->graphs[number] = made;
    *out = as_handle<cudaGraph_t>(number);
    return cudaSuccess;
}

cudaError_t status_of(cudaStream_t handle, const char *function, enum cudaStreamCaptureStatus *status,
                      unsigned long long *id)
{
    stream_ref on = find_stream(handle, function);
    if (!on)
        return failed(cudaErrorInvalidResourceHandle);
    if (is_legacy(on) && blocking_capture(on->device))
        return failed(cudaErrorStreamCaptureImplicit);
    *status = !on->recording ? cudaStreamCaptureStatusNone
              : on->recording->invalid ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
    if (id && *status == cudaStreamCaptureStatusActive)
        *id = on->recording->id;
    return cudaSuccess;
}

/* Whether all memory of the nodes is still there. */
bool is_whole(const graph_exec &exec)
{
    std::vector<range> unused;
    for (const node &each : exec.nodes)
        for (const touched &part : each.work.accesses)
            if (!translate(part.memory, part.bytes, each.work.site, &unused))
                return false;
    return true;
}

/* Puts the nodes on their streams, behind `on`; the stream goes on behind them. */
void enqueue(graph_exec &exec, const stream_ref &on, int site)
{
    std::vector<uint64_t> positions(exec.nodes.size());
    std::vector<vclock> clocks(exec.nodes.size());
    operation start = begin(on, site);
    start.after.insert(start.after.end(), exec.launched.begin(), exec.launched.end());
    vclock before = on->clock;
    join(before, exec.clock);
    submit(on, std::move(start));
    uint64_t begun = on->enqueued;
    for (size_t k = 0; k < exec.nodes.size(); k++) {
        const node &each = exec.nodes[k];
        const stream_ref &lane = exec.lanes[each.lane];
        operation work = each.work;
        work.accesses.clear();
        work.after = {{on, begun}};
        join(lane->clock, before);
        for (size_t earlier : each.after) {
            work.after.push_back({exec.lanes[exec.nodes[earlier].lane], positions[earlier]});
            join(lane->clock, clocks[earlier]);
        }
        tick(lane->clock, lane->component);
        for (const touched &part : each.work.accesses)
            declare(lane->clock, lane->component, part.device, part.memory, part.bytes, part.write, work.site);
        positions[k] = lane->enqueued + 1;
        clocks[k] = lane->clock;
        submit(lane, std::move(work));
    }
    operation end = begin(on, site);
    exec.launched.clear();
    for (const stream_ref &lane : exec.lanes) {
        exec.launched.push_back({lane, lane->enqueued});
        join(on->clock, lane->clock);
    }
    exec.clock = on->clock;
    end.after.insert(end.after.end(), exec.launched.begin(), exec.launched.end());
    submit(on, std::move(end));
}

} // namespace

/* ---- refusals ---------------------------------------------------------------- */

cudaError_t refused_on(const stream_ref &on)
{
    if (on->recording)
        return on->recording->invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
    capture_ref implied = is_legacy(on) ? blocking_capture(on->device) : nullptr;
    return implied ? invalidate(implied, cudaErrorStreamCaptureImplicit) : cudaSuccess;
}

cudaError_t refused_to_wait(const stream_ref &on)
{
    if (on->recording)
        return invalidate(on->recording, cudaErrorStreamCaptureUnsupported);
    if (cudaError_t error = refused_on(on))
        return error;
    return refused_anywhere();
}

cudaError_t refused_anywhere()
{
    const host_thread &thread = self();
    cudaError_t error = cudaSuccess;
    for (const capture_ref &going : the->captures) {
        bool own = going->thread == &thread && going->mode != cudaStreamCaptureModeRelaxed;
        bool everybodys = going->mode == cudaStreamCaptureModeGlobal && thread.capture_mode == cudaStreamCaptureModeGlobal;
        if (thread.capture_mode != cudaStreamCaptureModeRelaxed && (own || everybodys))
            error = invalidate(going, cudaErrorStreamCaptureUnsupported);
    }
    return error;
}

cudaError_t refused_event(const event &asked)
{
    if (!asked.recorded)
        return refused_anywhere();
    return invalidate(asked.recorded, cudaErrorCapturedEvent);
}

cudaError_t refused_on_device(int device)
{
    for (const capture_ref &going : the->captures)
        for (const stream_ref &on : going->streams)
            if (on->device == device)
                return invalidate(going, cudaErrorStreamCaptureUnsupported);
    return refused_anywhere();
}

/* ---- recording --------------------------------------------------------------- */

void record_node(const stream_ref &on, operation made)
{
    capture &going = *on->recording;
    made.after.clear();
    going.nodes.push_back({std::move(made), on->last, lane_of(going, on)});
    on->last = {going.nodes.size() - 1};
}

void record_event(const stream_ref &on, event *recorded)
{
    recorded->on = nullptr;
    recorded->recorded = on->recording;
    recorded->after = on->last;
}

cudaError_t record_wait(const stream_ref &on, const event &waited, bool *ours)
{
    *ours = on->recording || waited.recorded;
    if (!*ours)
        return cudaSuccess;
    if (!waited.recorded) /* an event that was never recorded is nothing to wait for */
        return waited.on ? invalidate(on->recording, cudaErrorStreamCaptureIsolation) : cudaSuccess;
    if (waited.recorded->over)
        return on->recording ? invalidate(on->recording, cudaErrorCapturedEvent) : cudaErrorCapturedEvent;
    if (on->recording && on->recording != waited.recorded) {
        invalidate(waited.recorded, cudaErrorStreamCaptureMerge);
        return invalidate(on->recording, cudaErrorStreamCaptureMerge);
    }
    bool enters = !on->recording;
    if (enters)
        enter_capture(waited.recorded, on);
    on->last.insert(waited.after.begin(), waited.after.end());
    if (enters) /* it has to be joined, whatever it gets */
        record_node(on, operation());
    return cudaSuccess;
}

void drop_captures()
{
    while (!the->captures.empty())
        leave(the->captures.back());
}

} // namespace emu

using namespace emu;

extern "C" {

/* ---- captures ----------------------------------------------------------------- */

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, enum cudaStreamCaptureMode mode)
{
    EMU_ENTER("cudaStreamBeginCapture");
    stream_ref on = find_stream(handle, "cudaStreamBeginCapture");
    if (!on)
        return failed(cudaErrorInvalidResourceHandle);
    if (is_legacy(on))
        return failed(cudaErrorStreamCaptureUnsupported);
    if (on->recording)
        return failed(cudaErrorIllegalState);
    capture_ref made = std::make_shared<capture>();
    made->id = the->next_handle++;
    made->mode = mode;
    made->thread = &self();
    made->origin = on;
    the->captures.push_back(made);
    enter_capture(made, on);
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t *out)
{
    EMU_ENTER("cudaStreamEndCapture");
    stream_ref on = find_stream(handle, "cudaStreamEndCapture");
    *out = nullptr;
    if (!on)
        return failed(cudaErrorInvalidResourceHandle);
    capture_ref ending = on->recording;
    if (!ending)
        return failed(cudaErrorIllegalState);
    if (ending->origin != on)
        return failed(invalidate(ending, cudaErrorStreamCaptureUnmatched));
    if (ending->mode != cudaStreamCaptureModeRelaxed && ending->thread != &self())
        return failed(cudaErrorStreamCaptureWrongThread);
    return failed(ended(ending, out));
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *whole, const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges,
                                     size_t *count)
{
    EMU_ENTER("cudaStreamGetCaptureInfo");
    if (whole || nodes || edges || count)
        return failed(cudaErrorNotSupported);
    return status_of(handle, "cudaStreamGetCaptureInfo", status, id);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, enum cudaStreamCaptureStatus *status)
{
    EMU_ENTER("cudaStreamIsCapturing");
    return status_of(handle, "cudaStreamIsCapturing", status, nullptr);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    EMU_ENTER("cudaThreadExchangeStreamCaptureMode");
    std::swap(*mode, self().capture_mode);
    return cudaSuccess;
}

/* ---- graphs -------------------------------------------------------------------- */

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *out, cudaGraph_t handle, unsigned long long flags)
{
    EMU_ENTER("cudaGraphInstantiate");
    auto found = find_handle(the->graphs, handle, "cudaGraphInstantiate");
    *out = nullptr;
    if (found == the->graphs.end() || flags)
        return failed(cudaErrorInvalidValue);
    auto made = std::make_shared<graph_exec>();
    made->nodes = found->second->nodes;
    for (int device : found->second->lanes)
        made->lanes.push_back(new_stream(device, false));
    uint64_t number = the->next_handle++;
    the->execs[number] = made;
    *out = as_handle<cudaGraphExec_t>(number);
    return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream_handle)
{
    EMU_ENTER("cudaGraphLaunch");
    stream_ref on = find_stream(stream_handle, "cudaGraphLaunch");
    int site = site_number(take_place("cudaGraphLaunch"));
    auto found = find_handle(the->execs, handle, "cudaGraphLaunch");
    if (!on)
        return failed(cudaErrorInvalidResourceHandle);
    if (found == the->execs.end())
        return failed(cudaErrorInvalidValue);
    if (cudaError_t captured = refused_on(on))
        return failed(captured);
    if (on->recording) {
        finding("cudaGraphLaunch in a capture, which is not emulated");
        return failed(cudaErrorNotSupported);
    }
    std::shared_ptr<graph_exec> exec = found->second; /* may be destroyed meanwhile */
    if (!is_whole(*exec))
        return failed(cudaErrorIllegalAddress);
    enqueue(*exec, on, site);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle)
{
    EMU_ENTER("cudaGraphExecDestroy");
    auto found = find_handle(the->execs, handle, "cudaGraphExecDestroy");
    if (found == the->execs.end())
        return failed(cudaErrorInvalidValue);
    the->execs.erase(found); /* what was launched still runs */
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t handle)
{
    EMU_ENTER("cudaGraphDestroy");
    auto found = find_handle(the->graphs, handle, "cudaGraphDestroy");
    if (found == the->graphs.end())
        return failed(cudaErrorInvalidValue);
    the->graphs.erase(found);
    return cudaSuccess;
}

} // extern "C"
