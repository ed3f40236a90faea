/*
 * How operations of the ranks meet.
 *
 * An operation can run once all its counterparts' launches have begun.  Ranks
 * that disagree about one are a finding, and it never completes.  Inputs of all
 * ranks are read before any output is written.  A sum over N ranks of the slice
 * that rank r receives goes r+1, r+2, ..., r, as in a ring: with three ranks or
 * more the bits differ from those of rank order, and so does every slice's
 * order, which code must not rely on.
 */
#include "emu_nccl_match.h"

#include <algorithm>
#include <cstring>

namespace emu {

const char *nccl_name(nccl_kind kind)
{
    static const char *const names[] = {"ncclReduceScatter", "ncclAllGather", "ncclAllReduce",
                                        "ncclBroadcast", "ncclSend", "ncclRecv"};
    return names[(size_t)kind];
}

bool nccl_is_collective(const nccl_op &op)
{
    return op.kind != nccl_kind::send && op.kind != nccl_kind::receive;
}

namespace {

bool begun(const nccl_launch &launch)
{
    for (const auto &place : launch.places) {
        const stream &on = *place.first;
        if (on.completed + 1 != place.second || on.queue.empty() || !ready(on.queue.front()))
            return false;
    }
    return true;
}

const pending_op *find_pending(const std::weak_ptr<communicator> &member,
                               const std::function<const pending_op *(communicator &)> &look)
{
    std::shared_ptr<communicator> comm = member.lock();
    return comm ? look(*comm) : nullptr;
}

template <class Key> const pending_op *look_up(const std::map<Key, pending_op> &waiting, const Key &key)
{
    auto found = waiting.find(key);
    return found == waiting.end() ? nullptr : &found->second;
}

/* This operation and its counterparts, in rank order, or sender and receiver; NULL where one was not issued. */
std::vector<const pending_op *> counterparts(const nccl_op &op)
{
    const clique &group = *op.comm->group;
    std::vector<const pending_op *> all;
    if (nccl_is_collective(op)) {
        for (const auto &member : group.members)
            all.push_back(find_pending(member, [&](communicator &comm) {
                return look_up(comm.waiting_collectives, op.number);
            }));
        return all;
    }
    int sender = op.kind == nccl_kind::send ? op.comm->rank : op.peer;
    int receiver = op.kind == nccl_kind::send ? op.peer : op.comm->rank;
    all.push_back(find_pending(group.members[(size_t)sender], [&](communicator &comm) {
        return look_up(comm.waiting_sends, std::make_pair(receiver, op.number));
    }));
    all.push_back(find_pending(group.members[(size_t)receiver], [&](communicator &comm) {
        return look_up(comm.waiting_receives, std::make_pair(sender, op.number));
    }));
    return all;
}

bool executable(const nccl_op &op)
{
    if (op.done || op.aborted)
        return op.aborted && !op.done;
    if (op.dead)
        return false;
    if (op.comm->group->shared)
        return shared_executable(op);
    for (const pending_op *other : counterparts(op))
        if (!other || other->launch->ops[other->index].dead || !begun(*other->launch))
            return false;
    return true;
}

void forget(const nccl_op &op)
{
    if (op.kind == nccl_kind::send)
        op.comm->waiting_sends.erase({op.peer, op.number});
    else if (op.kind == nccl_kind::receive)
        op.comm->waiting_receives.erase({op.peer, op.number});
    else
        op.comm->waiting_collectives.erase(op.number);
}

bool all_done(const nccl_launch &launch)
{
    for (const nccl_op &op : launch.ops)
        if (!op.done)
            return false;
    return true;
}

void finish(const launch_ref &launch)
{
    if (!all_done(*launch))
        return;
    for (const auto &place : launch->places)
        complete_head(*place.first);
}

bool agree(const nccl_op &a, const nccl_op &b)
{
    bool reduces = a.kind == nccl_kind::reduce_scatter || a.kind == nccl_kind::all_reduce;
    return (a.kind == b.kind || !nccl_is_collective(a)) && a.count == b.count && a.type == b.type &&
           (!reduces || a.op == b.op) && (a.kind != nccl_kind::broadcast || a.peer == b.peer);
}

void run_together(const nccl_op &op)
{
    std::vector<launch_ref> launches;
    std::vector<nccl_op *> ops;
    std::vector<std::vector<char>> inputs;
    for (const pending_op *other : counterparts(op)) {
        launches.push_back(other->launch);
        ops.push_back(&other->launch->ops[other->index]);
    }
    for (nccl_op *other : ops)
        if (!agree(*ops[0], *other)) {
            finding("ranks disagree: " + nccl_text(*ops[0]) + " and " + nccl_text(*other));
            for (nccl_op *stuck : ops) {
                stuck->dead = true;
                stuck->comm->result = ncclInvalidUsage;
                stuck->comm->last_error = "ranks disagree about an operation";
            }
            return;
        }
    for (nccl_op *other : ops)
        inputs.emplace_back(other->from, other->from + other->from_bytes);
    for (size_t r = 0; r < ops.size(); r++)
        nccl_produce(*ops[r], r, ops.size(), inputs);
    for (nccl_op *other : ops) {
        other->done = true;
        forget(*other);
    }
    for (size_t k = 0; k < launches.size(); k++) /* a launch may be its own counterpart */
        if (std::find(launches.begin(), launches.begin() + (long)k, launches[k]) == launches.begin() + (long)k)
            finish(launches[k]);
}

} // namespace

void nccl_produce(const nccl_op &mine, size_t r, size_t ranks, const std::vector<std::vector<char>> &inputs)
{
    size_t element = nccl_type_bytes(mine.type), slice = mine.count * element;
    size_t chunk = (mine.count + ranks - 1) / ranks;
    auto sum = [&](size_t owner, size_t offset, char *to, size_t count) {
        std::vector<const char *> in;
        for (size_t k = 0; k < ranks; k++)
            in.push_back(inputs[(owner + 1 + k) % ranks].data() + offset * element);
        nccl_reduce(mine.type, mine.op, to, in, count);
    };
    if (slice == 0) /* then buffers may be NULL */
        return;
    switch (mine.kind) {
    case nccl_kind::reduce_scatter:
        sum(r, r * mine.count, mine.to, mine.count);
        break;
    case nccl_kind::all_reduce:
        for (size_t owner = 0; owner < ranks && owner * chunk < mine.count; owner++)
            sum(owner, owner * chunk, mine.to + owner * chunk * element, std::min(chunk, mine.count - owner * chunk));
        break;
    case nccl_kind::all_gather:
        for (size_t q = 0; q < ranks; q++)
            memcpy(mine.to + q * slice, inputs[q].data(), slice);
        break;
    case nccl_kind::broadcast:
        memcpy(mine.to, inputs[(size_t)mine.peer].data(), slice);
        break;
    case nccl_kind::receive:
        memcpy(mine.to, inputs[0].data(), slice);
        break;
    case nccl_kind::send:
        break;
    }
}

std::string nccl_text(const nccl_op &op)
{
    std::string text = site_text(op.site) + ", operation " + std::to_string(op.number) + ", count " +
                       std::to_string(op.count) + ", type " + std::to_string(op.type);
    if (op.kind == nccl_kind::reduce_scatter || op.kind == nccl_kind::all_reduce)
        text += ", op " + std::to_string(op.op);
    if (op.kind == nccl_kind::broadcast)
        text += ", root " + std::to_string(op.peer);
    return text;
}

bool nccl_ready(const nccl_launch &launch)
{
    return begun(launch) && std::any_of(launch.ops.begin(), launch.ops.end(), executable);
}

void nccl_run(const launch_ref &launch)
{
    for (nccl_op &op : launch->ops) {
        if (!executable(op))
            continue;
        if (!op.aborted && !op.comm->group->shared) {
            run_together(op);
            return;
        }
        if (op.aborted && op.to)
            memset(op.to, 0xff, op.to_bytes);
        if (!op.aborted && !shared_run(op))
            return;
        op.done = true;
        if (!op.aborted)
            forget(op);
        finish(launch);
        return;
    }
}

std::string nccl_describe(const nccl_launch &launch)
{
    std::string text;
    for (const nccl_op &op : launch.ops) {
        if (op.done)
            continue;
        text += (text.empty() ? "" : ", ") + site_text(op.site) + ", operation " + std::to_string(op.number);
        if (op.aborted || op.dead)
            continue;
        if (op.comm->group->shared) {
            text += shared_missing(op);
            continue;
        }
        std::vector<const pending_op *> others = counterparts(op);
        for (size_t k = 0; k < others.size(); k++)
            if (!others[k])
                text += nccl_is_collective(op) ? " misses rank " + std::to_string(k)
                                          : " misses rank " + std::to_string(op.peer);
    }
    return text;
}

/* ---- issuing and aborting ---------------------------------------------------------- */

static void number(const launch_ref &launch, size_t index)
{
    nccl_op &op = launch->ops[index];
    communicator &comm = *op.comm;
    pending_op pending = {launch, index};
    if (op.kind == nccl_kind::send) {
        op.number = ++comm.sends[op.peer];
        comm.waiting_sends[{op.peer, op.number}] = pending;
    } else if (op.kind == nccl_kind::receive) {
        op.number = ++comm.receives[op.peer];
        comm.waiting_receives[{op.peer, op.number}] = pending;
    } else {
        op.number = ++comm.collectives;
        comm.waiting_collectives[op.number] = pending;
    }
}

bool physically_conflict(const nccl_op &a, const nccl_op &b)
{
    return physically_overlap(a.to, a.to ? a.to_bytes : 0, b.to, b.to ? b.to_bytes : 0) ||
           physically_overlap(a.to, a.to ? a.to_bytes : 0, b.from, b.from ? b.from_bytes : 0) ||
           physically_overlap(a.from, a.from ? a.from_bytes : 0, b.to, b.to ? b.to_bytes : 0);
}

void nccl_enqueue(const launch_ref &launch)
{
    std::vector<operation> markers;
    vclock joined;
    for (size_t k = 0; k < launch->ops.size(); k++) {
        const nccl_op &op = launch->ops[k];
        number(launch, k);
        auto known = [&](const std::pair<stream_ref, uint64_t> &place) { return place.first == op.on; };
        if (std::none_of(launch->places.begin(), launch->places.end(), known)) {
            markers.push_back(begin(op.on, op.site));
            markers.back().nccl = launch;
            launch->places.push_back({op.on, op.on->enqueued + 1});
            join(joined, op.on->clock);
        }
    }
    for (const auto &place : launch->places) /* each of its streams waits for all before the first begins */
        join(place.first->clock, joined);
    for (const nccl_op &op : launch->ops) {
        const stream &on = *op.on;
        if (op.from)
            declare(on.clock, on.component, on.device, op.from, op.from_bytes, false, op.site);
        if (op.to)
            declare(on.clock, on.component, on.device, op.to, op.to_bytes, true, op.site);
    }
    for (size_t k = 0; k < markers.size(); k++)
        submit(launch->places[k].first, std::move(markers[k]));
}

bool nccl_idle(const communicator &comm)
{
    return comm.waiting_collectives.empty() && comm.waiting_sends.empty() && comm.waiting_receives.empty() &&
           comm.deferred.empty();
}

void nccl_abort(communicator &comm)
{
    auto abort_all = [](auto &waiting) {
        for (auto &entry : waiting)
            entry.second.launch->ops[entry.second.index].aborted = true;
        waiting.clear();
    };
    abort_all(comm.waiting_collectives);
    abort_all(comm.waiting_sends);
    abort_all(comm.waiting_receives);
    comm.deferred.clear();
    the->progress++;
    the->moved.notify_all();
}

} // namespace emu
