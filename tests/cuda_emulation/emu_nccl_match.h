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

struct clique {
    int ranks, joined = 0;
    bool duplicate = false;
    std::string complaint;
    std::vector<std::weak_ptr<communicator>> members;
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

/* to[i] = in[0][i] op in[1][i] op ..., rounded to the type each time; emu_reduce.cc. */
void nccl_reduce(ncclDataType_t type, ncclRedOp_t op, char *to, const std::vector<const char *> &in, size_t count);

} // namespace emu

#endif
