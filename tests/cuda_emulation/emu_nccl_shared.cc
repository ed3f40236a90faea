/*
 * NCCL between processes, one rank each.
 *
 * What ranks share is a nameless file (memfd) of the process that made the id,
 * which says where: /proc/<process>/fd/<number>.  So there is nothing to clean
 * up, however a rank ends; whoever comes after that process has given up its
 * communicator finds nothing and is told so.
 *
 * The file begins with a table; behind it is, for every rank, room for its input
 * to two collectives and to one message for each peer, far more than is ever
 * touched (the file is sparse).  An operation that has begun first puts its input
 * there, then waits for what it needs:
 *
 *   - A collective ends once all ranks have given their input to the one of its
 *     number; each rank computes what it receives itself.  A rank gives its input
 *     to number n when its number n - 1 has ended, which means that all have given
 *     theirs to n - 1, and so are done with n - 2, whose place n takes.
 *   - A message is given when the one before it to the same peer was taken, and
 *     ends at the sender when it is taken.
 *
 * A rank that dies gives nothing any more: its peers' operations stay where they
 * are until they abort.
 *
 * A host thread that waits for a peer in a way that is not CUDA's runs nothing,
 * but the peer may need what only this process can run.  So there is a thread
 * that runs operations when nothing has happened for a while.
 */
#include "emu_nccl_match.h"

#include <atomic>
#include <chrono>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>

namespace emu {

namespace {

const int most_ranks = 16;
const size_t room_bytes = (size_t)1 << 32; /* for one input */

struct description {
    int32_t kind, type, op, peer;
    uint64_t count;
};

struct place {
    std::atomic<uint64_t> given; /* the number of the operation whose input is here */
    std::atomic<uint64_t> taken; /* messages: the last that the receiver is done with */
    std::atomic<int> refused;    /* messages: the receiver expected another one */
    description what;
};

struct table {
    std::atomic<uint64_t> progress;
    std::atomic<int> ranks; /* 0: nobody has come */
    std::atomic<int> joined;
    std::atomic<int> device[most_ranks]; /* 1 + the device; 0: has not come */
    place collective[most_ranks][2];
    place message[most_ranks][most_ranks]; /* from, to */
};

const size_t table_bytes = (sizeof(table) + 4095) / 4096 * 4096;

std::map<std::string, int> unjoined_ids; /* -> the file */
int open_cliques;

} // namespace

struct shared_clique {
    int fd;
    table *at;
    shared_clique(int file, table *mapped) : fd(file), at(mapped) { open_cliques++; }
    ~shared_clique()
    {
        munmap(at, table_bytes);
        close(fd);
        open_cliques--;
    }
};

namespace {

/* ---- the thread that stands for the hardware --------------------------------------- */

const auto idle_time = std::chrono::milliseconds(2);
std::condition_variable hardware_changed;
bool hardware_runs, hardware_ends;
pid_t hardware_process;

void hardware()
{
    std::unique_lock<std::mutex> lock = locked();
    while (open_cliques > 0 && !hardware_ends) {
        uint64_t seen = the->progress;
        hardware_changed.wait_until(lock, std::chrono::system_clock::now() + idle_time);
        for (int steps = 8; !hardware_ends && the->progress == seen && steps > 0 && step(); steps--)
            seen = the->progress;
    }
    hardware_runs = false;
    hardware_changed.notify_all();
}

void start_hardware()
{
    if (hardware_runs && hardware_process == getpid())
        return;
    hardware_runs = true;
    hardware_process = getpid();
    std::thread(hardware).detach();
}

/* ---- places ------------------------------------------------------------------------- */

bool transfer(bool write, int fd, char *memory, size_t bytes, off_t offset)
{
    while (bytes > 0) {
        ssize_t moved = write ? pwrite(fd, memory, bytes, offset) : pread(fd, memory, bytes, offset);
        if (moved <= 0)
            return false;
        memory += moved;
        bytes -= (size_t)moved;
        offset += moved;
    }
    return true;
}

place &collective_place(const shared_clique &shared, size_t rank, uint64_t number)
{
    return shared.at->collective[rank][number % 2];
}

/* From the sender to the receiver of this operation. */
place &message_place(const nccl_op &op)
{
    bool sends = op.kind == nccl_kind::send;
    int from = sends ? op.comm->rank : op.peer, to = sends ? op.peer : op.comm->rank;
    return op.comm->group->shared->at->message[from][to];
}

off_t room_of(const shared_clique &shared, const place &of)
{
    const place *first = &shared.at->collective[0][0];
    static_assert(sizeof(place[most_ranks][2]) == 2 * most_ranks * sizeof(place), "places lie behind one another");
    return (off_t)(table_bytes + (size_t)(&of - first) * room_bytes);
}

description describe(const nccl_op &op)
{
    bool reduces = op.kind == nccl_kind::reduce_scatter || op.kind == nccl_kind::all_reduce;
    return {(int32_t)op.kind, (int32_t)op.type, reduces ? (int32_t)op.op : 0,
            op.kind == nccl_kind::broadcast ? op.peer : 0, op.count};
}

bool equal(const description &a, const description &b)
{
    return a.kind == b.kind && a.type == b.type && a.op == b.op && a.peer == b.peer && a.count == b.count;
}

void give(const nccl_op &op, place &to)
{
    const shared_clique &shared = *op.comm->group->shared;
    if (op.from_bytes > room_bytes || !transfer(true, shared.fd, (char *)op.from, op.from_bytes, room_of(shared, to)))
        finding("no room for what peers are to read: " + nccl_text(op));
    to.what = describe(op);
    to.given.store(op.number, std::memory_order_release);
    shared.at->progress++;
}

std::vector<char> take(const shared_clique &shared, const place &from, size_t bytes, const nccl_op &op)
{
    std::vector<char> input(bytes);
    if (!transfer(false, shared.fd, input.data(), bytes, room_of(shared, from)))
        finding("a peer's input cannot be read: " + nccl_text(op));
    return input;
}

void disagree(nccl_op &op, int rank, const description &other)
{
    static const nccl_kind kinds[] = {nccl_kind::reduce_scatter, nccl_kind::all_gather, nccl_kind::all_reduce,
                                      nccl_kind::broadcast, nccl_kind::send, nccl_kind::receive};
    finding("ranks disagree: " + nccl_text(op) + " and " + nccl_name(kinds[other.kind]) + " of rank " +
            std::to_string(rank) + ", count " + std::to_string(other.count) + ", type " + std::to_string(other.type) +
            ", op " + std::to_string(other.op) + ", root " + std::to_string(other.peer));
    op.dead = true;
    op.comm->result = ncclInvalidUsage;
    op.comm->last_error = "ranks disagree about an operation";
}

bool run_collective(nccl_op &op)
{
    const shared_clique &shared = *op.comm->group->shared;
    size_t ranks = (size_t)op.comm->group->ranks;
    std::vector<std::vector<char>> inputs;
    if (!op.staged) {
        op.staged = true;
        give(op, collective_place(shared, (size_t)op.comm->rank, op.number));
        return false;
    }
    for (size_t q = 0; q < ranks; q++) {
        const place &from = collective_place(shared, q, op.number);
        if (!equal(from.what, describe(op))) {
            disagree(op, (int)q, from.what);
            return false;
        }
        bool reads = op.kind != nccl_kind::broadcast || (int)q == op.peer;
        size_t bytes = op.kind == nccl_kind::broadcast ? op.to_bytes : op.from_bytes;
        inputs.push_back(reads ? take(shared, from, bytes, op) : std::vector<char>());
    }
    nccl_produce(op, (size_t)op.comm->rank, ranks, inputs);
    return true;
}

bool run_send(nccl_op &op)
{
    place &to = message_place(op);
    if (!op.staged) {
        op.staged = true;
        give(op, to);
        return false;
    }
    if (to.refused) {
        disagree(op, op.peer, to.what);
        return false;
    }
    return true;
}

bool run_receive(nccl_op &op)
{
    const shared_clique &shared = *op.comm->group->shared;
    place &from = message_place(op);
    description wanted = describe(op), sent = from.what;
    bool fits = wanted.type == sent.type && wanted.count == sent.count;
    if (fits)
        nccl_produce(op, 0, 1, {take(shared, from, op.to_bytes, op)});
    else
        disagree(op, op.peer, sent);
    from.refused = !fits;
    from.taken.store(op.number, std::memory_order_release);
    shared.at->progress++;
    return fits;
}

std::string id_text(const ncclUniqueId &id)
{
    return std::string(id.internal, strnlen(id.internal, sizeof id.internal));
}

/* The file of an id: this process's own, or another's by its descriptor. -1: gone, or no such id. */
int open_file(const ncclUniqueId &id)
{
    std::string text = id_text(id);
    auto own = unjoined_ids.find(text);
    if (own != unjoined_ids.end()) {
        int fd = own->second;
        unjoined_ids.erase(own);
        return fd;
    }
    size_t space = text.find(' ');
    if (text.compare(0, 6, "/proc/") != 0 || space == std::string::npos)
        return -1;
    char link[256];
    std::string path = text.substr(0, space);
    ssize_t length = readlink(path.c_str(), link, sizeof link); /* the number may stand for another file by now */
    if (length < 0 || std::string(link, (size_t)length) != "/memfd:" + text.substr(space + 1) + " (deleted)")
        return -1;
    return open(path.c_str(), O_RDWR | O_CLOEXEC);
}

} // namespace

/* ---- joining -------------------------------------------------------------------------- */

void shared_new_id(ncclUniqueId *id)
{
    static uint64_t ids;
    std::string name = "emulated-nccl-" + std::to_string(getpid()) + "-" + std::to_string(++ids);
    size_t places = 2 * most_ranks + most_ranks * most_ranks;
    int fd = memfd_create(name.c_str(), MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)(table_bytes + places * room_bytes)) != 0) {
        finding("no memory that processes could share");
        if (fd >= 0)
            close(fd);
        return;
    }
    snprintf(id->internal, sizeof id->internal, "/proc/%ld/fd/%d %s", (long)getpid(), fd, name.c_str());
    unjoined_ids[id_text(*id)] = fd;
}

void shared_forget_ids()
{
    for (const auto &made : unjoined_ids)
        close(made.second);
    unjoined_ids.clear();
}

bool shared_join(communicator &comm, const ncclUniqueId &id, std::string *why)
{
    int fd = open_file(id), none = 0, free = 0, ranks = comm.group->ranks;
    *why = "the process that made the communicator's id is gone, or has given it up";
    if (fd < 0)
        return false;
    void *at = mmap(nullptr, table_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) {
        close(fd);
        return false;
    }
    comm.group->shared = std::make_shared<shared_clique>(fd, (table *)at);
    table &all = *comm.group->shared->at;
    *why = "ranks disagree about a communicator, or its id was used before";
    if (ranks > most_ranks || (!all.ranks.compare_exchange_strong(none, ranks) && none != ranks) ||
        !all.device[comm.rank].compare_exchange_strong(free, comm.device + 1))
        return false;
    all.joined++;
    all.progress++;
    start_hardware();
    return true;
}

int shared_joined(const shared_clique &shared)
{
    return shared.at->joined;
}

std::string shared_duplicate(const shared_clique &shared)
{
    for (int a = 0; a < shared.at->ranks; a++)
        for (int b = a + 1; b < shared.at->ranks; b++)
            if (shared.at->device[a] == shared.at->device[b])
                return "Duplicate GPU detected : rank " + std::to_string(a) + " and rank " + std::to_string(b) +
                       " both on CUDA device " + std::to_string(shared.at->device[a] - 1);
    return "";
}

/* ---- running -------------------------------------------------------------------------- */

static bool all_given(const nccl_op &op)
{
    for (size_t q = 0; q < (size_t)op.comm->group->ranks; q++)
        if (collective_place(*op.comm->group->shared, q, op.number).given.load(std::memory_order_acquire) != op.number)
            return false;
    return true;
}

bool shared_executable(const nccl_op &op)
{
    if (nccl_is_collective(op))
        return op.staged ? all_given(op) : op.comm->waiting_collectives.begin()->first == op.number;
    const place &message = message_place(op);
    if (op.kind == nccl_kind::receive)
        return message.given.load(std::memory_order_acquire) == op.number;
    return message.taken.load(std::memory_order_acquire) == (op.staged ? op.number : op.number - 1);
}

bool shared_run(nccl_op &op)
{
    if (nccl_is_collective(op))
        return run_collective(op);
    return op.kind == nccl_kind::send ? run_send(op) : run_receive(op);
}

std::string shared_missing(const nccl_op &op)
{
    std::string text;
    if (!nccl_is_collective(op))
        return shared_executable(op) ? "" : " misses rank " + std::to_string(op.peer);
    for (size_t q = 0; q < (size_t)op.comm->group->ranks; q++)
        if (collective_place(*op.comm->group->shared, q, op.number).given != op.number)
            text += " misses rank " + std::to_string(q);
    return text;
}

uint64_t nccl_progress()
{
    uint64_t all = the->progress;
    for (const auto &open : the->comms)
        if (open.second->group->shared)
            all += open.second->group->shared->at->progress;
    return all;
}

void nccl_stop()
{
    std::unique_lock<std::mutex> lock = locked();
    hardware_ends = true;
    hardware_changed.notify_all();
    while (hardware_runs && hardware_process == getpid())
        hardware_changed.wait(lock);
}

} // namespace emu
