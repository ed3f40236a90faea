/*
 * Streams, the scheduler, and the state everything hangs on.
 *
 * An operation can run when it is the head of its stream and the places it
 * names in other streams are behind.  Which of several runs next is drawn from
 * the seed.  A host thread that waits runs operations until its condition
 * holds; where none can run it sleeps until another thread does something, and
 * after the deadlock time without that it reports all heads and breaks the world.
 */
#include "emu_internal.h"

#include <chrono>
#include <cstdlib>
#include <cstring>

namespace emu {

settings configured;
world *the = new world;

static std::mutex big_lock;
static thread_local std::string call_place; /* of the call that comes next */

std::unique_lock<std::mutex> locked()
{
    return std::unique_lock<std::mutex>(big_lock);
}

host_thread &self()
{
    static thread_local std::shared_ptr<host_thread> mine;
    static thread_local uint64_t generation = ~(uint64_t)0;
    if (generation != the->generation) {
        mine = std::make_shared<host_thread>();
        mine->component = new_component(true);
        tick(mine->clock, mine->component);
        the->hosts.push_back(mine);
        generation = the->generation;
    }
    return *mine;
}

void learn(host_thread &host, const vclock &clock)
{
    join(host.clock, clock);
    join(the->known, clock);
}

void finding(const std::string &text)
{
    the->findings.insert(text);
}

int site_number(const std::string &text)
{
    auto known = the->site_numbers.find(text);
    if (known != the->site_numbers.end())
        return known->second;
    the->sites.push_back(text);
    return the->site_numbers[text] = (int)the->sites.size() - 1;
}

const std::string &site_text(int site)
{
    return the->sites[(size_t)site];
}

std::string take_place(const char *what)
{
    std::string text = call_place.empty() ? what : std::string(what) + " at " + call_place;
    call_place.clear();
    return text;
}

std::string take_wait(const char *what, bool *dropped)
{
    std::string where = call_place.empty() ? "unknown" : call_place;
    configured.wait_sites.insert(where + " " + what);
    *dropped = !configured.dropped.empty() && where == configured.dropped;
    return take_place(what);
}

/* ---- refusals ----------------------------------------------------------- */

bool take_fault(const char *function, int *error)
{
    auto armed = the->faults.find(function);
    bool taken = false;
    if (armed == the->faults.end())
        return false;
    for (auto fault = armed->second.begin(); fault != armed->second.end();) {
        if (--fault->first > 0) {
            ++fault;
            continue;
        }
        if (!taken)
            *error = fault->second;
        taken = true;
        fault = armed->second.erase(fault);
    }
    return taken;
}

cudaError_t failed(cudaError_t error)
{
    if (error != cudaSuccess)
        self().last_error = error;
    return error;
}

cudaError_t unusable()
{
    if (configured.no_driver || configured.driver_version < CUDART_VERSION)
        return cudaErrorInsufficientDriver;
    return configured.devices == 0 ? cudaErrorNoDevice : the->broken;
}

void use_context(int device)
{
    self().device = self().context = device;
    the->contexts.insert(device);
}

static bool needs_context(const char *function)
{
    static const char *const others[] = {
        "cudaGetDeviceCount", "cudaGetDevice", "cudaSetDevice", "cudaDeviceGetAttribute",
        "cudaGetDriverEntryPointByVersion", "cudaThreadExchangeStreamCaptureMode",
    };
    for (const char *other : others)
        if (strcmp(function, other) == 0)
            return false;
    return true;
}

cudaError_t enter(const char *function)
{
    int error = unusable();
    if (error == cudaSuccess)
        take_fault(function, &error);
    if (error != cudaSuccess)
        call_place.clear();
    else if (self().context < 0 && needs_context(function))
        use_context(self().device);
    return failed((cudaError_t)error);
}

CUresult enter_driver(const char *function)
{
    int error = 0;
    if (the->broken != cudaSuccess)
        return (CUresult)the->broken; /* of the codes in question the numbers agree */
    return take_fault(function, &error) ? (CUresult)error : CUDA_SUCCESS;
}

/* ---- streams ------------------------------------------------------------- */

stream_ref new_stream(int device, bool blocking)
{
    static int numbers;
    stream_ref made = std::make_shared<stream>();
    made->number = ++numbers;
    made->component = new_component(false);
    made->device = device;
    made->blocking = blocking;
    tick(made->clock, made->component);
    the->queues.push_back(made);
    return made;
}

stream_ref find_stream(cudaStream_t handle, const char *what)
{
    if (!handle || handle == cudaStreamLegacy) {
        int device = self().device;
        stream_ref &legacy = the->legacy[device];
        if (!legacy)
            legacy = new_stream(device, false);
        return legacy;
    }
    auto found = the->streams.find((uint64_t)(uintptr_t)handle);
    if (found != the->streams.end())
        return found->second;
    finding(std::string(what) + " on a stream that is not open" + (call_place.empty() ? "" : " at " + call_place));
    return nullptr;
}

operation begin(const stream_ref &on, int site)
{
    host_thread &host = self();
    operation made;
    made.site = site;
    if (on->recording)
        return made;
    join(on->clock, host.clock);
    tick(host.clock, host.component);
    auto legacy = the->legacy.find(on->device);
    bool is_legacy = legacy != the->legacy.end() && legacy->second == on;
    auto follow = [&](const stream_ref &other) {
        made.after.push_back({other, other->enqueued});
        join(on->clock, other->clock);
    };
    if (is_legacy) {
        for (const stream_ref &other : the->queues)
            if (other->blocking && other->device == on->device)
                follow(other);
    } else if (on->blocking && legacy != the->legacy.end()) {
        follow(legacy->second);
    }
    tick(on->clock, on->component);
    return made;
}

bool use(const stream_ref &on, operation *made, const touched &part)
{
    std::vector<range> unused;
    if (!on->recording)
        return declare(on->clock, on->component, part.device, part.memory, part.bytes, part.write, made->site);
    made->accesses.push_back(part);
    return translate(part.memory, part.bytes, made->site, &unused);
}

void submit(const stream_ref &on, operation made)
{
    if (on->recording) {
        record_node(on, std::move(made));
        return;
    }
    on->queue.push_back(std::move(made));
    on->enqueued++;
    the->progress++;
    the->moved.notify_all();
    step_some();
}

void complete_head(stream &on)
{
    on.queue.pop_front();
    on.completed++;
}

/* ---- the scheduler ---------------------------------------------------------- */

bool ready(const operation &head)
{
    for (const auto &other : head.after)
        if (other.first->completed < other.second)
            return false;
    return true;
}

static bool runnable(const stream &queue)
{
    if (queue.queue.empty() || !ready(queue.queue.front()))
        return false;
    const operation &head = queue.queue.front();
    return !head.nccl || nccl_ready(*head.nccl);
}

static void run_head(stream &queue)
{
    the->operations++;
    the->hash = (the->hash ^ (uint64_t)(queue.component * 4096 + queue.queue.front().site)) * 1099511628211ull;
    if (std::shared_ptr<nccl_launch> launch = queue.queue.front().nccl) {
        unprotected opened;
        nccl_run(launch);
        return;
    }
    if (queue.queue.front().run) {
        unprotected opened;
        queue.queue.front().run();
    }
    complete_head(queue);
}

/* Streams that are closed and empty are of no more use. */
static void forget_finished()
{
    for (size_t i = 0; i < the->queues.size();)
        if (the->queues[i]->queue.empty() && the->queues[i].use_count() == 1)
            the->queues.erase(the->queues.begin() + (long)i);
        else
            i++;
}

bool step()
{
    stream *picked = nullptr;
    uint64_t seen = 0;
    for (const stream_ref &queue : the->queues)
        if (runnable(*queue) && the->random() % ++seen == 0)
            picked = queue.get();
    if (!picked)
        return false;
    run_head(*picked);
    if (picked->queue.empty())
        forget_finished();
    the->progress++;
    the->moved.notify_all();
    return true;
}

void step_some()
{
    if (the->eager < 0)
        while (step())
            continue;
    for (uint64_t n = the->eager > 0 ? the->random() % (uint64_t)(the->eager + 1) : 0; n > 0 && step(); n--)
        continue;
}

static void report_deadlock(const std::string &what)
{
    std::string text = "deadlock: " + what + " waits;";
    for (const stream_ref &queue : the->queues)
        if (!queue->queue.empty()) {
            const operation &head = queue->queue.front();
            text += " [device " + std::to_string(queue->device) + " stream " + std::to_string(queue->number) + ": " +
                    (head.nccl ? nccl_describe(*head.nccl) : site_text(head.site)) + "]";
        }
    finding(text);
    the->broken = cudaErrorUnknown;
    the->moved.notify_all();
}

bool wait_for(std::unique_lock<std::mutex> &lock, const std::string &what, const std::function<bool()> &over)
{
    typedef std::chrono::system_clock time;
    uint64_t seen = nccl_progress();
    time::time_point since = time::now();
    while (!over()) {
        if (the->broken != cudaSuccess)
            return false;
        if (step())
            continue;
        if (nccl_progress() != seen) {
            seen = nccl_progress();
            since = time::now();
        }
        if (std::chrono::duration<double>(time::now() - since).count() >= the->deadlock_s) {
            report_deadlock(what);
            return false;
        }
        /* Other processes cannot notify. */
        the->moved.wait_until(lock, time::now() + std::chrono::microseconds(configured.processes ? 200 : 20000));
    }
    return true;
}

bool drain(std::unique_lock<std::mutex> &lock, int device, const std::string &what)
{
    return wait_for(lock, what, [device] {
        for (const stream_ref &queue : the->queues)
            if (queue->device == device && !queue->queue.empty())
                return false;
        return true;
    });
}

} // namespace emu

using namespace emu;

extern "C" void emu_at(const char *file, int line)
{
    const char *name = strrchr(file, '/');
    call_place = std::string(name ? name + 1 : file) + ":" + std::to_string(line);
}
