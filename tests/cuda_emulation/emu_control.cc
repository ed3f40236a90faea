/*
 * emu.h: resetting, setting up, and answering what a test asks.
 */
#include "emu_nccl_match.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>

using namespace emu;

namespace {

/* Writes the lines that fit whole. */
int write_lines(const std::vector<std::string> &lines, char *text, size_t bytes)
{
    size_t used = 0;
    if (text && bytes > 0)
        text[0] = '\0';
    for (const std::string &line : lines)
        if (text && used + line.size() + 2 <= bytes) {
            memcpy(text + used, (line + "\n").c_str(), line.size() + 2);
            used += line.size() + 1;
        }
    return (int)lines.size();
}

} // namespace

namespace emu {

settings::settings()
{
    const char *wait = getenv("EMU_DROP_WAIT"), *apart = getenv("EMU_NCCL_PROCESSES");
    dropped = wait ? wait : "";
    processes = apart && strcmp(apart, "1") == 0;
}

settings::~settings()
{
    nccl_stop();
    const char *path = getenv("EMU_WAIT_SITES");
    FILE *file = path ? fopen(path, "a") : nullptr;
    if (!file)
        return;
    for (const std::string &site : wait_sites)
        fprintf(file, "%s\n", site.c_str());
    fclose(file);
}

} // namespace emu

extern "C" {

void emu_reset(uint64_t seed, int eager, int check)
{
    std::unique_lock<std::mutex> lock = locked();
    const char *limit = getenv("EMU_DEADLOCK");
    uint64_t generation = the->generation;
    drop_all_memory();
    shared_forget_ids();
    for (const stream_ref &queue : the->queues)
        queue->queue.clear(); /* streams, operations and launches refer to one another */
    drop_captures();
    for (const auto &open : the->comms)
        nccl_abort(*open.second);
    delete the;
    the = new world;
    the->generation = generation + 1;
    the->random.seed(seed);
    the->eager = eager;
    the->check = check != 0;
    if (limit && atof(limit) > 0)
        the->deadlock_s = atof(limit);
}

void emu_nccl_processes(int on)
{
    std::unique_lock<std::mutex> lock = locked();
    configured.processes = on != 0;
}

void emu_set_devices(int count)
{
    std::unique_lock<std::mutex> lock = locked();
    configured.devices = count;
}

void emu_set_attribute(int attribute, int value)
{
    std::unique_lock<std::mutex> lock = locked();
    configured.attributes[attribute] = value;
}

void emu_driver_version(int version)
{
    std::unique_lock<std::mutex> lock = locked();
    configured.driver_version = version;
}

void emu_no_driver(int on)
{
    std::unique_lock<std::mutex> lock = locked();
    configured.no_driver = on != 0;
}

void emu_nccl_version(int version)
{
    std::unique_lock<std::mutex> lock = locked();
    configured.nccl_version = version;
}

void emu_fail_next(const char *function, int nth, int error)
{
    std::unique_lock<std::mutex> lock = locked();
    the->faults[function].push_back({nth, error});
}

int emu_faults_left(void)
{
    std::unique_lock<std::mutex> lock = locked();
    size_t left = the->nccl_faults.size();
    for (const auto &armed : the->faults)
        left += armed.second.size();
    return (int)left;
}

void emu_nccl_fail(int rank, int nth_operation, int result)
{
    std::unique_lock<std::mutex> lock = locked();
    the->nccl_faults.push_back({rank, {nth_operation, result}});
}

int emu_findings(char *text, size_t bytes)
{
    std::unique_lock<std::mutex> lock = locked();
    return write_lines({the->findings.begin(), the->findings.end()}, text, bytes);
}

int emu_leaks(char *text, size_t bytes)
{
    std::unique_lock<std::mutex> lock = locked();
    std::vector<std::string> lines;
    for (const auto &map : the->maps) {
        std::string what = map.second.virtual_memory ? "mapping" : map.second.memory->host ? "pinned memory" : "memory";
        lines.push_back(what + " of " + std::to_string(map.second.bytes) + " bytes on device " +
                        std::to_string(map.second.memory->device));
    }
    for (const auto &handle : the->handles)
        lines.push_back("memory handle of " + std::to_string(handle.second->bytes) + " bytes on device " +
                        std::to_string(handle.second->device));
    for (const auto &area : the->reserved)
        lines.push_back("reserved addresses, " + std::to_string(area.second) + " bytes");
    for (const auto &open : the->streams)
        lines.push_back("stream on device " + std::to_string(open.second->device));
    for (const auto &open : the->events)
        lines.push_back("event on device " + std::to_string(open.second->device));
    for (size_t k = 0; k < the->comms.size(); k++)
        lines.push_back("NCCL communicator");
    for (size_t k = 0; k < the->captures.size(); k++)
        lines.push_back("capture");
    for (size_t k = 0; k < the->graphs.size() + the->execs.size(); k++)
        lines.push_back("graph");
    return write_lines(lines, text, bytes);
}

int emu_wait_sites(char *text, size_t bytes)
{
    std::unique_lock<std::mutex> lock = locked();
    return write_lines({configured.wait_sites.begin(), configured.wait_sites.end()}, text, bytes);
}

void emu_drop_wait(const char *site)
{
    std::unique_lock<std::mutex> lock = locked();
    std::string text = site ? site : "";
    configured.dropped = text.substr(0, text.find(' '));
}

int emu_unreached(char *text, size_t bytes)
{
    std::unique_lock<std::mutex> lock = locked();
    std::vector<std::string> lines;
    for (const auto &range : configured.reached)
        if (!range.second.first || !range.second.last)
            lines.push_back(range.first + ": its " + (range.second.first ? "last" : "first") +
                            " byte is never touched");
    return write_lines(lines, text, bytes);
}

int emu_has_context(int device)
{
    std::unique_lock<std::mutex> lock = locked();
    return (int)the->contexts.count(device);
}

uint64_t emu_copied(int to_device, int from_device)
{
    std::unique_lock<std::mutex> lock = locked();
    return the->copied[to_device != 0][from_device != 0];
}

uint64_t emu_operations(void)
{
    std::unique_lock<std::mutex> lock = locked();
    return the->operations;
}

uint64_t emu_trace_hash(void)
{
    std::unique_lock<std::mutex> lock = locked();
    return the->hash;
}

} // extern "C"
