/*
 * The emulated NCCL's functions: one rank is one host thread (or several) of this
 * process, on a device of its own.
 *
 * A non-blocking communicator says ncclInProgress for some polls after its
 * creation, its end, and now and then after an operation, which reaches its
 * stream only when a poll says that it is no longer in progress.  A failed
 * communicator gives its result to every further call.
 */
#include "emu_nccl_match.h"

#include <algorithm>
#include <cstring>
#include <unistd.h>

using namespace emu;

namespace {

struct open_group {
    int depth = 0;
    ncclResult_t failure = ncclSuccess;
    std::vector<nccl_op> ops;
};

thread_local open_group group;
std::string process_error; /* of calls without a communicator */

ncclResult_t refuse(communicator *comm, ncclResult_t result, const std::string &why)
{
    (comm ? comm->last_error : process_error) = why;
    return result;
}

ncclResult_t misuse(communicator *comm, ncclResult_t result, const std::string &why)
{
    finding("NCCL: " + why);
    return refuse(comm, result, why);
}

std::shared_ptr<communicator> find_comm(ncclComm_t handle, const char *function)
{
    auto found = the->comms.find((uint64_t)(uintptr_t)handle);
    if (found != the->comms.end())
        return found->second;
    misuse(nullptr, ncclInvalidArgument, std::string(function) + " on a communicator that does not exist");
    return nullptr;
}

bool told_to_fail(const char *function, ncclResult_t *result)
{
    int error;
    if (!take_fault(function, &error))
        return false;
    *result = (ncclResult_t)error;
    process_error = std::string(function) + " was told to fail";
    return true;
}

int joined(const clique &all)
{
    return all.shared ? shared_joined(*all.shared) : all.joined;
}

/* Advances what is in progress by one poll. */
ncclResult_t poll(communicator &comm)
{
    if (comm.result != ncclSuccess)
        return comm.result;
    if (!comm.joined && joined(*comm.group) < comm.group->ranks)
        return ncclInProgress;
    if (!comm.joined && comm.group->shared)
        comm.group->complaint = shared_duplicate(*comm.group->shared);
    if (!comm.joined && !comm.group->complaint.empty()) {
        comm.last_error = comm.group->complaint;
        return comm.result = ncclInvalidUsage;
    }
    if (comm.polls > 0) {
        comm.polls--;
        return ncclInProgress;
    }
    comm.joined = true;
    std::vector<launch_ref> due;
    due.swap(comm.deferred);
    for (const launch_ref &launch : due)
        nccl_enqueue(launch);
    if (comm.finalizing && !nccl_idle(comm))
        return ncclInProgress;
    comm.finalized = comm.finalizing;
    return ncclSuccess;
}

/* Whether a communicator may be used for something new. */
ncclResult_t usable(communicator &comm, const char *function)
{
    if (comm.result != ncclSuccess)
        return comm.result;
    if (!comm.joined || comm.polls > 0 || !comm.deferred.empty())
        return misuse(&comm, ncclInvalidUsage,
                      std::string(function) + " while the communicator's previous operation is in progress");
    if (comm.finalizing)
        return misuse(&comm, ncclInvalidUsage, std::string(function) + " on a finalized communicator");
    return ncclSuccess;
}

void apply_faults(nccl_op &op)
{
    for (size_t k = 0; k < the->nccl_faults.size(); k++) {
        auto &fault = the->nccl_faults[k];
        if (fault.first != op.comm->rank || --fault.second.first > 0)
            continue;
        op.dead = true;
        op.comm->result = (ncclResult_t)fault.second.second;
        op.comm->last_error = "this operation was told to fail";
        the->nccl_faults.erase(the->nccl_faults.begin() + (long)k);
        return;
    }
}

ncclResult_t launch_all(std::vector<nccl_op> ops)
{
    launch_ref launch = std::make_shared<nccl_launch>();
    communicator &comm = *ops[0].comm;
    bool one_comm = true;
    for (size_t k = 0; k < ops.size(); k++) {
        one_comm &= ops[k].comm == &comm;
        for (size_t j = 0; j < k; j++)
            if (physically_conflict(ops[j], ops[k]))
                finding("NCCL: buffers of one group overlap: " + site_text(ops[j].site) + " and " +
                        site_text(ops[k].site));
    }
    launch->ops = std::move(ops);
    for (nccl_op &op : launch->ops)
        apply_faults(op);
    if (one_comm && !comm.blocking && comm.result == ncclSuccess && the->random() % 4 == 0) {
        comm.deferred.push_back(launch);
        comm.polls = 1 + (int)(the->random() % 3);
        return ncclInProgress;
    }
    nccl_enqueue(launch);
    return ncclSuccess;
}

bool reachable(const nccl_op &op, const void *memory, size_t bytes)
{
    std::vector<range> ranges;
    if (!memory || bytes == 0)
        return true;
    if (!translate(memory, bytes, op.site, &ranges))
        return false;
    for (const range &part : ranges)
        if (!part.map->memory->host && !part.map->devices.count(op.comm->device))
            return false;
    return true;
}

/* Reduce-scatter and all-gather may be in place at the rank's own slice only, the others at the same address. */
bool overlap_is_legal(const nccl_op &op)
{
    size_t slice = op.count * nccl_type_bytes(op.type), mine = (size_t)op.comm->rank * slice;
    if (!op.from || !op.to || !physically_overlap(op.from, op.from_bytes, op.to, op.to_bytes))
        return true;
    if (op.kind == nccl_kind::reduce_scatter)
        return op.to == op.from + mine;
    if (op.kind == nccl_kind::all_gather)
        return op.from == op.to + mine;
    return op.from == op.to;
}

void set_sizes(nccl_op &op)
{
    size_t ranks = (size_t)op.comm->group->ranks, slice = op.count * nccl_type_bytes(op.type);
    op.from_bytes = op.kind == nccl_kind::reduce_scatter ? slice * ranks : slice;
    op.to_bytes = op.kind == nccl_kind::all_gather ? slice * ranks : slice;
    if (op.kind == nccl_kind::broadcast && op.comm->rank != op.peer) {
        op.from = nullptr;
        op.from_bytes = 0;
    }
}

ncclResult_t issue(nccl_op op, ncclComm_t handle, cudaStream_t stream_handle)
{
    std::unique_lock<std::mutex> lock = locked();
    const char *function = nccl_name(op.kind);
    ncclResult_t result;
    std::shared_ptr<communicator> comm = find_comm(handle, function);
    if (!comm)
        return ncclInvalidArgument;
    if (unusable() != cudaSuccess)
        return refuse(comm.get(), ncclUnhandledCudaError, "the device is unusable");
    auto fail = [](ncclResult_t failure) {
        if (group.depth > 0 && group.failure == ncclSuccess)
            group.failure = failure;
        return failure;
    };
    if (told_to_fail(function, &result) || (result = usable(*comm, function)) != ncclSuccess)
        return fail(result);
    std::string what = take_place((std::string(function) + " of rank " + std::to_string(comm->rank)).c_str());
    op.comm = comm.get();
    op.comm_handle = comm->handle;
    op.site = site_number(what);
    op.on = find_stream(stream_handle, function);
    set_sizes(op);
    bool sends = op.from_bytes > 0, receives = op.kind != nccl_kind::send && op.to_bytes > 0;
    if (op.kind == nccl_kind::send)
        op.to_bytes = 0;
    if (op.kind == nccl_kind::receive) {
        op.from_bytes = 0;
        sends = false;
    }
    if (!op.on || nccl_type_bytes(op.type) == 0 || op.peer < 0 || op.peer >= comm->group->ranks ||
        (unsigned)op.op > ncclMin || (sends && !op.from) || (receives && !op.to))
        return fail(misuse(comm.get(), ncclInvalidArgument, "arguments that make no sense: " + what));
    if (op.on->recording)
        return fail(misuse(comm.get(), ncclInvalidUsage, "in a capture, which is not emulated: " + what));
    if (op.on->device != comm->device)
        return fail(misuse(comm.get(), ncclInvalidUsage, "stream of another device: " + what));
    if (!reachable(op, op.from, op.from_bytes) || !reachable(op, op.to, op.to_bytes))
        return fail(misuse(comm.get(), ncclInvalidArgument, "memory the device has no access to: " + what));
    if (!overlap_is_legal(op))
        return fail(misuse(comm.get(), ncclInvalidArgument, "buffers overlap and are not in place: " + what));
    if (op.count == 0 && op.kind != nccl_kind::send && op.kind != nccl_kind::receive)
        return ncclSuccess;
    if (group.depth > 0) {
        group.ops.push_back(op);
        return ncclSuccess;
    }
    return launch_all({op});
}

nccl_op made(nccl_kind kind, const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op, int peer)
{
    nccl_op filled = {};
    filled.kind = kind;
    filled.from = (const char *)from;
    filled.to = (char *)to;
    filled.count = count;
    filled.type = type;
    filled.op = op;
    filled.peer = peer;
    return filled;
}

void find_duplicates(clique &all)
{
    for (int a = 0; a < all.ranks; a++)
        for (int b = a + 1; b < all.ranks; b++) {
            std::shared_ptr<communicator> one = all.members[(size_t)a].lock(), other = all.members[(size_t)b].lock();
            if (one && other && one->device == other->device)
                all.complaint = "Duplicate GPU detected : rank " + std::to_string(a) + " and rank " +
                                std::to_string(b) + " both on CUDA device " + std::to_string(one->device);
        }
}

ncclResult_t join_threads(const std::shared_ptr<communicator> &comm, const ncclUniqueId &id, int ranks)
{
    std::shared_ptr<clique> &all = the->cliques[std::string(id.internal, sizeof id.internal)];
    if (!all) {
        all = std::make_shared<clique>();
        all->ranks = ranks;
        all->members.resize((size_t)ranks);
    }
    if (all->ranks != ranks || all->joined == ranks || all->members[(size_t)comm->rank].lock())
        return misuse(nullptr, ncclInvalidUsage, "ranks disagree about a communicator, or its id was used before");
    comm->group = all;
    all->members[(size_t)comm->rank] = comm;
    if (++all->joined == ranks)
        find_duplicates(*all);
    return ncclSuccess;
}

} // namespace

extern "C" {

ncclResult_t ncclGetVersion(int *version)
{
    std::unique_lock<std::mutex> lock = locked();
    ncclResult_t result;
    if (told_to_fail("ncclGetVersion", &result))
        return result;
    *version = configured.nccl_version;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    static uint64_t ids;
    std::unique_lock<std::mutex> lock = locked();
    ncclResult_t result;
    if (told_to_fail("ncclGetUniqueId", &result))
        return result;
    memset(id, 0, sizeof *id);
    if (configured.processes)
        shared_new_id(id);
    else
        snprintf(id->internal, sizeof id->internal, "emulated %ld %llu", (long)getpid(), (unsigned long long)++ids);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config)
{
    std::unique_lock<std::mutex> lock = locked();
    ncclResult_t result;
    if (unusable() != cudaSuccess)
        return refuse(nullptr, ncclUnhandledCudaError, "no usable CUDA device");
    if (told_to_fail("ncclCommInitRankConfig", &result))
        return result;
    if (!out || ranks < 1 || rank < 0 || rank >= ranks)
        return misuse(nullptr, ncclInvalidArgument, "ncclCommInitRankConfig with a rank that does not exist");
    if (config && (config->magic != EMU_NCCL_CONFIG_MAGIC || config->size < offsetof(ncclConfig_t, cgaClusterSize)))
        return misuse(nullptr, ncclInvalidArgument, "ncclCommInitRankConfig with a config that was not initialised");
    auto comm = std::make_shared<communicator>();
    comm->rank = rank;
    comm->device = self().device;
    comm->blocking = !config || config->blocking != 0;
    if (configured.processes) {
        std::string why;
        comm->group = std::make_shared<clique>();
        comm->group->ranks = ranks;
        if (!shared_join(*comm, id, &why))
            return refuse(nullptr, ncclSystemError, why);
    } else if ((result = join_threads(comm, id, ranks)) != ncclSuccess) {
        return result;
    }
    comm->handle = the->next_handle++;
    comm->polls = comm->blocking ? 0 : (int)(the->random() % 4);
    the->comms[comm->handle] = comm;
    the->progress++;
    the->moved.notify_all();
    *out = (ncclComm_t)(uintptr_t)comm->handle;
    if (!comm->blocking)
        return ncclInProgress;
    if (!wait_for(lock, "ncclCommInitRankConfig", [&] { return joined(*comm->group) == ranks; }))
        return refuse(nullptr, ncclRemoteError, "not all ranks came");
    if ((result = poll(*comm)) != ncclSuccess) {
        process_error = comm->last_error;
        the->comms.erase(comm->handle);
        *out = nullptr;
    }
    return result;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t handle, ncclResult_t *result)
{
    std::unique_lock<std::mutex> lock = locked();
    ncclResult_t failure;
    std::shared_ptr<communicator> comm = find_comm(handle, "ncclCommGetAsyncError");
    if (!comm || !result)
        return ncclInvalidArgument;
    if (told_to_fail("ncclCommGetAsyncError", &failure))
        return failure;
    if (the->random() & 1)
        step();
    *result = poll(*comm);
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t handle)
{
    std::unique_lock<std::mutex> lock = locked();
    ncclResult_t result;
    std::shared_ptr<communicator> comm = find_comm(handle, "ncclCommFinalize");
    if (!comm)
        return ncclInvalidArgument;
    if (told_to_fail("ncclCommFinalize", &result) || (result = usable(*comm, "ncclCommFinalize")) != ncclSuccess)
        return result;
    comm->finalizing = true;
    if (!comm->blocking) {
        comm->polls = (int)(the->random() % 4);
        return ncclInProgress;
    }
    if (!wait_for(lock, "ncclCommFinalize", [&] { return nccl_idle(*comm); }))
        return refuse(comm.get(), ncclUnhandledCudaError, "its operations never complete");
    comm->finalized = true;
    return ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t handle)
{
    std::unique_lock<std::mutex> lock = locked();
    ncclResult_t result = ncclSuccess;
    std::shared_ptr<communicator> comm = find_comm(handle, "ncclCommDestroy");
    if (!comm)
        return ncclInvalidArgument;
    if (told_to_fail("ncclCommDestroy", &result))
        return result;
    if (comm->result != ncclSuccess)
        misuse(comm.get(), comm->result, "ncclCommDestroy after a failure, which can wait for ever: ncclCommAbort");
    else if (!comm->joined || comm->polls > 0 || !comm->deferred.empty() || (comm->finalizing && !comm->finalized))
        return misuse(comm.get(), ncclInvalidUsage, "ncclCommDestroy while the communicator is in progress");
    else if (!wait_for(lock, "ncclCommDestroy", [&] { return nccl_idle(*comm); }))
        result = ncclUnhandledCudaError;
    nccl_abort(*comm);
    the->comms.erase(comm->handle);
    return result;
}

ncclResult_t ncclCommAbort(ncclComm_t handle)
{
    std::unique_lock<std::mutex> lock = locked();
    ncclResult_t result;
    std::shared_ptr<communicator> comm = find_comm(handle, "ncclCommAbort");
    if (!comm)
        return ncclInvalidArgument;
    if (told_to_fail("ncclCommAbort", &result))
        return result;
    nccl_abort(*comm);
    the->comms.erase(comm->handle);
    return ncclSuccess;
}

ncclResult_t ncclGroupStart(void)
{
    std::unique_lock<std::mutex> lock = locked();
    ncclResult_t result;
    if (told_to_fail("ncclGroupStart", &result))
        return result;
    if (group.depth++ == 0) {
        group.ops.clear();
        group.failure = ncclSuccess;
    }
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void)
{
    std::unique_lock<std::mutex> lock = locked();
    ncclResult_t result;
    if (group.depth == 0)
        return misuse(nullptr, ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    if (--group.depth > 0)
        return ncclSuccess;
    std::vector<nccl_op> ops;
    ops.swap(group.ops);
    if (told_to_fail("ncclGroupEnd", &result))
        return result;
    if (group.failure != ncclSuccess || ops.empty())
        return group.failure;
    for (const nccl_op &op : ops)
        if (!the->comms.count(op.comm_handle))
            return misuse(nullptr, ncclInvalidUsage, "a communicator was ended inside a group that uses it");
    return launch_all(std::move(ops));
}

ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream)
{
    return issue(made(nccl_kind::reduce_scatter, from, to, count, type, op, 0), comm, stream);
}

ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream)
{
    return issue(made(nccl_kind::all_gather, from, to, count, type, ncclSum, 0), comm, stream);
}

ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream)
{
    return issue(made(nccl_kind::all_reduce, from, to, count, type, op, 0), comm, stream);
}

ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream)
{
    return issue(made(nccl_kind::broadcast, from, to, count, type, ncclSum, root), comm, stream);
}

ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    return issue(made(nccl_kind::send, from, nullptr, count, type, ncclSum, peer), comm, stream);
}

ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream)
{
    return issue(made(nccl_kind::receive, nullptr, to, count, type, ncclSum, peer), comm, stream);
}

const char *ncclGetErrorString(ncclResult_t result)
{
    static const char *const texts[] = {"no error", "unhandled cuda error", "unhandled system error",
                                        "internal error", "invalid argument", "invalid usage",
                                        "remote process exited or there was a network error",
                                        "NCCL operation in progress"};
    return (unsigned)result < sizeof texts / sizeof *texts ? texts[result] : "unknown result code";
}

const char *ncclGetLastError(ncclComm_t handle)
{
    static thread_local std::string text;
    std::unique_lock<std::mutex> lock = locked();
    auto found = the->comms.find((uint64_t)(uintptr_t)handle);
    text = found == the->comms.end() ? process_error : found->second->last_error;
    return text.c_str();
}

void *emu_nccl_symbol(const char *name)
{
    static const struct {
        const char *name;
        void *function;
    } symbols[] = {
        {"ncclGetVersion", (void *)ncclGetVersion},
        {"ncclGetUniqueId", (void *)ncclGetUniqueId},
        {"ncclCommInitRankConfig", (void *)ncclCommInitRankConfig},
        {"ncclCommFinalize", (void *)ncclCommFinalize},
        {"ncclCommDestroy", (void *)ncclCommDestroy},
        {"ncclCommAbort", (void *)ncclCommAbort},
        {"ncclCommGetAsyncError", (void *)ncclCommGetAsyncError},
        {"ncclGroupStart", (void *)ncclGroupStart},
        {"ncclGroupEnd", (void *)ncclGroupEnd},
        {"ncclReduceScatter", (void *)ncclReduceScatter},
        {"ncclAllGather", (void *)ncclAllGather},
        {"ncclAllReduce", (void *)ncclAllReduce},
        {"ncclBroadcast", (void *)ncclBroadcast},
        {"ncclSend", (void *)ncclSend},
        {"ncclRecv", (void *)ncclRecv},
        {"ncclGetErrorString", (void *)ncclGetErrorString},
        {"ncclGetLastError", (void *)ncclGetLastError},
    };
    for (const auto &known : symbols)
        if (strcmp(known.name, name) == 0)
            return known.function;
    return nullptr;
}

} // extern "C"
