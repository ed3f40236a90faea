/*
 * The emulated runtime's own structures.
 *
 * Everything lives in one `world`, made anew by emu_reset and guarded by one
 * lock, which is held during every call and while operations run.  A stream is a
 * queue; an operation may also name places in other streams that must be behind
 * it.  Nothing runs by itself: host threads run operations when they wait or ask.
 */
#ifndef EMU_INTERNAL_H
#define EMU_INTERNAL_H

#include "emu.h"
#include "emu_cuda.h"

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace emu {

/* ---- clocks: emu_clock.cc --------------------------------------------- */

/* What is known to have happened: a count for each stream and each host thread. */
typedef std::vector<uint32_t> vclock;

uint32_t at(const vclock &clock, int component);
void join(vclock &into, const vclock &from);
void tick(vclock &clock, int component);
int new_component(bool host);

struct stamp {
    int component;
    uint32_t time;
    int site;
};

/* The last accesses to a run of bytes. */
struct cell {
    size_t end;
    bool written;
    stamp write;
    std::vector<stamp> reads; /* since that write, one per component */
};

/* ---- memory: emu_memory.cc, emu_vmm.cc ---------------------------------- */

struct physical {
    int id, device;
    size_t bytes;
    bool host;     /* pinned host memory */
    int fd;        /* virtual memory management: its memfd; -1 */
    size_t maps;
    bool released; /* its handle was given back */
    std::map<size_t, cell> cells;
};

struct mapping {
    char *base;
    size_t bytes;
    std::shared_ptr<physical> memory;
    bool virtual_memory;
    int protection;             /* what operations on `devices` may do, as for mprotect */
    std::set<int> devices;
    char *outer;                /* what mmap gave, for cudaMalloc and pinned memory */
    size_t outer_bytes;
    std::map<int, stamp> uses;  /* the last one of each component */
};

struct range {
    mapping *map;
    size_t begin, end; /* of the physical memory */
};

enum class kind { pageable, pinned, device };

const size_t device_bytes = (size_t)4 << 30; /* of every device */

mapping *find_mapping(const void *memory);
kind kind_of(const void *memory);
/* False, with a finding, if not all of it is mapped. */
bool translate(const void *memory, size_t bytes, int site, std::vector<range> *out);
bool physically_overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes);
size_t used_bytes(int device);
/* Access to all device memory for as long as an operation runs, where emu_protect is on. */
struct unprotected {
    unprotected();
    ~unprotected();
};
/* The finding that memory is taken away while something may still use it; then lets that finish. */
void require_unused(std::unique_lock<std::mutex> &lock, const mapping &map, const std::string &what);
void release_memory(mapping *map);
void drop_all_memory();

/* ---- streams: emu_schedule.cc -------------------------------------------- */

struct stream;
struct nccl_launch;
struct capture;
struct graph;
struct graph_exec;
typedef std::shared_ptr<stream> stream_ref;

/* An access that an operation declares; device -1: of any. */
struct touched {
    int device;
    const void *memory;
    size_t bytes;
    bool write;
};

struct operation {
    int site = 0;
    std::vector<touched> accesses;                      /* in a capture: declared at each launch */
    std::vector<std::pair<stream_ref, uint64_t>> after; /* these streams have completed that many */
    std::function<void()> run;                          /* may be empty */
    std::shared_ptr<nccl_launch> nccl;                  /* runs together with its peers instead */
};

struct stream {
    int number, component, device;
    bool blocking; /* ordered with the device's default stream */
    std::deque<operation> queue;
    uint64_t enqueued = 0, completed = 0;
    vclock clock; /* after all that is enqueued */
    std::shared_ptr<capture> recording; /* what is enqueued goes there instead */
    std::set<size_t> last;              /* nodes of it that the next one comes after */
};

struct event {
    int device;
    stream_ref on; /* empty: never recorded */
    uint64_t position = 0;
    vclock clock;
    std::shared_ptr<capture> recorded; /* it was recorded in a capture, after these nodes */
    std::set<size_t> after;
};

struct host_thread {
    int component, device = 0;
    int context = -1; /* the device whose context is current; -1: none, and a call that needs one makes it */
    vclock clock;
    cudaError_t last_error = cudaSuccess;
    cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;
};

struct communicator;
struct clique;

struct world {
    std::mt19937_64 random;
    int eager = 0;
    bool check = true;
    double deadlock_s = 20;
    cudaError_t broken = cudaSuccess; /* after a deadlock or an illegal access every call returns it */
    uint64_t generation = 0, progress = 0, operations = 0, hash = 14695981039346656037ull;
    std::condition_variable moved;
    std::vector<bool> component_is_host;
    vclock known; /* what any host thread has waited for */
    std::vector<std::shared_ptr<host_thread>> hosts;
    std::map<uint64_t, stream_ref> streams;            /* open ones, by handle */
    std::vector<stream_ref> queues;                    /* open or still with work */
    std::map<int, stream_ref> legacy;                  /* default streams, by device */
    std::map<uint64_t, std::shared_ptr<event>> events;
    std::map<uint64_t, std::shared_ptr<physical>> handles;
    std::map<uintptr_t, mapping> maps;
    std::map<uintptr_t, size_t> reserved;
    std::map<uint64_t, std::shared_ptr<communicator>> comms;
    std::map<std::string, std::shared_ptr<clique>> cliques;
    std::vector<std::shared_ptr<capture>> captures; /* going on */
    std::map<uint64_t, std::shared_ptr<graph>> graphs;
    std::map<uint64_t, std::shared_ptr<graph_exec>> execs;
    std::set<int> contexts; /* devices on which there is one */
    uint64_t copied[2][2] = {}; /* bytes, [to a device][from a device] */
    int physicals = 0;
    uint64_t next_handle = 0x10000;
    std::vector<std::string> sites{"?"};
    std::map<std::string, int> site_numbers;
    std::set<std::string> findings;
    std::map<std::string, std::vector<std::pair<int, int>>> faults; /* function -> calls to go, error */
    std::vector<std::pair<int, std::pair<int, int>>> nccl_faults;   /* rank, operations to go, result */
};

/* Whether any launch has touched the first and the last byte. */
struct reach {
    bool first = false, last = false;
};

/* What stays over resets. */
struct settings {
    bool protect = false, no_driver = false, processes = false;
    int devices = 8, driver_version = 13000, nccl_version = 22809;
    std::map<int, int> attributes;
    std::set<std::string> wait_sites;
    std::map<std::string, reach> reached; /* ranges that kernels may touch, by where they are declared */
    std::string dropped;
    settings();  /* from the environment: EMU_DROP_WAIT, EMU_NCCL_PROCESSES */
    ~settings(); /* appends the wait sites to the file EMU_WAIT_SITES */
};

extern world *the;
extern settings configured;
std::unique_lock<std::mutex> locked();

host_thread &self();
void learn(host_thread &host, const vclock &clock);
void finding(const std::string &text);
int site_number(const std::string &text);
const std::string &site_text(int site);
/* "what at file:line" with the place of this call, which is forgotten thereby. */
std::string take_place(const char *what);
/* The same as "file:line what" and in the list of waits; *dropped: this one is to do nothing. */
std::string take_wait(const char *what, bool *dropped);

bool take_fault(const char *function, int *error);
/* Why no call can work: no driver or device, or broken. */
cudaError_t unusable();
/* What a call has to return at once: that, or it is told to fail. Most calls need a context, and make it. */
cudaError_t enter(const char *function);
void use_context(int device);
CUresult enter_driver(const char *function);
cudaError_t failed(cudaError_t error); /* remembers it as cudaGetLastError does */

/* NULL, with a finding, for no open stream. */
stream_ref find_stream(cudaStream_t handle, const char *what);
stream_ref new_stream(int device, bool blocking);
/*
 * An operation of this host thread, ordered after what the stream is ordered after; accesses carry stream->clock.  On a
 * stream that is captured it becomes a node.
 */
operation begin(const stream_ref &on, int site);
/* It accesses this memory; false, with a finding: not accessible. */
bool use(const stream_ref &on, operation *made, const touched &part);
void submit(const stream_ref &on, operation made);
void complete_head(stream &on);
bool step(); /* runs one operation that can run; false: none */
void step_some();
/* False: never (a deadlock, by now reported). */
bool wait_for(std::unique_lock<std::mutex> &lock, const std::string &what, const std::function<bool()> &over);
bool drain(std::unique_lock<std::mutex> &lock, int device, const std::string &what);
bool ready(const operation &head);

/* Declares an access on a device (-1: any) by an operation or the host; false, with a finding: not accessible. */
bool declare(const vclock &clock, int component, int device, const void *memory, size_t bytes, bool write, int site);
void check_range(const vclock &clock, int component, const range &bytes, bool write, int site);

/* ---- captures: emu_graph.cc ---------------------------------------------------- */

/* Why nothing can be enqueued on this stream: its capture is void, or another one would get what is not of it. */
cudaError_t refused_on(const stream_ref &on);
/* The same for waiting for it and asking it, which no capture survives. */
cudaError_t refused_to_wait(const stream_ref &on);
/* The same for what a capture forbids to threads, as memory that is allocated. */
cudaError_t refused_anywhere();
/* The same for an event that was recorded in a capture. */
cudaError_t refused_event(const event &asked);
/* Whether any stream of the device is captured; its capture is void after it. */
cudaError_t refused_on_device(int device);
void record_node(const stream_ref &on, operation made);
void record_event(const stream_ref &on, event *recorded);
/* The wait of a stream for an event if one of them is of a capture; otherwise *ours is false. */
cudaError_t record_wait(const stream_ref &on, const event &waited, bool *ours);
void drop_captures(); /* at a reset: they refer to streams, and these to them */

/* ---- kernels: emu_watch.cc --------------------------------------------------- */

/* Runs a kernel; in a build that watches, what it touches is compared with what it declares. */
void run_watched(int site, const std::vector<access> &declared, const std::function<void()> &kernel);

/* ---- NCCL: emu_nccl.cc, emu_nccl_match.cc --------------------------------- */

bool nccl_ready(const nccl_launch &launch);
void nccl_run(const std::shared_ptr<nccl_launch> &launch);
std::string nccl_describe(const nccl_launch &launch);
uint64_t nccl_progress(); /* the->progress, and what happened in communicators that processes share */
void nccl_stop();         /* nothing is run behind the host's back any more */

} // namespace emu

/* Here the names stand for the functions that are defined. */
#undef cudaMalloc
#undef cudaFree
#undef cudaFreeHost
#undef cudaMemcpyAsync
#undef cudaMemcpy2DAsync
#undef cudaMemsetAsync
#undef cudaEventRecord
#undef cudaEventSynchronize
#undef cudaStreamWaitEvent
#undef cudaStreamSynchronize
#undef cudaDeviceSynchronize

/* First line of an API function. */
#define EMU_ENTER(function)                                          \
    std::unique_lock<std::mutex> lock = emu::locked();               \
    if (cudaError_t refused = emu::enter(function))                  \
        return refused

#endif
