/*
 * Communicators, and operations between the moment a rank issues them and the
 * moment they run together with their peers' (emu_nccl_match.cc).
 *
 * A rank's collectives on a communicator are numbered, and so are its sends and
 * receives for each peer; operations of the same number belong together.  What
 * is issued in one group is one launch: it begins when it is the head of each of
 * its streams and leaves them all when its last operation is done.
 */
#ifndef EMU_NCCL_MATCH_H
#define EMU_NCCL_MATCH_H

#include "emu_internal.h"
#include "emu_nccl.h"

namespace emu {

enum class nccl_kind { reduce_scatter, all_gather, all_reduce, broadcast, send, receive };

struct nccl_op {
    nccl_kind kind;
    const char *from;
    size_t from_bytes;
    char *to;
    size_t to_bytes;
    size_t count;
    ncclDataType_t type;
    ncclRedOp_t op;
    int peer; /* or root */
    communicator *comm;
    uint64_t comm_handle;
    stream_ref on;
    int site;
    uint64_t number;
    bool done, dead, aborted; /* dead: never runs, a fault or a mismatch */
    bool staged;              /* ranks are processes: the input lies where peers find it */
};

struct nccl_launch {
    std::vector<nccl_op> ops;
    std::vector<std::pair<stream_ref, uint64_t>> places; /* its position in each of its streams */
};

typedef std::shared_ptr<nccl_launch> launch_ref;

struct pending_op {
    launch_ref launch;
    size_t index;
};

struct shared_clique; /* what processes share: emu_nccl_shared.cc */

struct clique {
    int ranks, joined = 0;
    std::string complaint; /* two ranks are on one device */
    std::vector<std::weak_ptr<communicator>> members;
    std::shared_ptr<shared_clique> shared; /* its ranks are processes; empty: threads of this one */
};

struct communicator {
    uint64_t handle;
    int rank, device;
    bool blocking;
    std::shared_ptr<clique> group;
    bool joined = false, finalizing = false, finalized = false;
    int polls = 0; /* so often more it says that it is in progress */
    ncclResult_t result = ncclSuccess;
    std::string last_error;
    std::vector<launch_ref> deferred; /* issued, but in progress: not in its streams yet */
    uint64_t collectives = 0;
    std::map<int, uint64_t> sends, receives;
    std::map<uint64_t, pending_op> waiting_collectives;
    std::map<std::pair<int, uint64_t>, pending_op> waiting_sends, waiting_receives;
};

const char *nccl_name(nccl_kind kind);
size_t nccl_type_bytes(ncclDataType_t type);
bool physically_conflict(const nccl_op &a, const nccl_op &b);
/* Numbers the operations and puts them into their streams. */
void nccl_enqueue(const launch_ref &launch);
/* All of its operations complete without effect once their turn comes. */
void nccl_abort(communicator &comm);
bool nccl_idle(const communicator &comm);

std::string nccl_text(const nccl_op &op);
bool nccl_is_collective(const nccl_op &op);
/* What rank r of `ranks` receives; a receive has its sender's input only. */
void nccl_produce(const nccl_op &mine, size_t r, size_t ranks, const std::vector<std::vector<char>> &inputs);

/* ---- ranks in processes of their own: emu_nccl_shared.cc ---- */

void shared_new_id(ncclUniqueId *id);
/* False, with a reason: no such clique any more, or the rank does not fit in. */
bool shared_join(communicator &comm, const ncclUniqueId &id, std::string *why);
int shared_joined(const shared_clique &shared);
/* Two ranks on one device: the complaint, or "". */
std::string shared_duplicate(const shared_clique &shared);
/* Whether an operation whose launch has begun can do something: give its input or end. */
bool shared_executable(const nccl_op &op);
/* Does that; true: it is done. */
bool shared_run(nccl_op &op);
std::string shared_missing(const nccl_op &op);
/* Ids that nobody of this process has joined with are void. */
void shared_forget_ids();

/* to[i] = in[0][i] op in[1][i] op ..., rounded to the type each time; emu_reduce.cc. */
void nccl_reduce(ncclDataType_t type, ncclRedOp_t op, char *to, const std::vector<const char *> &in, size_t count);

} // namespace emu

#endif
