/*
 * The happens-before check.
 *
 * Every stream and every host thread is a component and has a clock: how much of
 * each component is known to be behind it.  Clocks are settled when work is
 * enqueued, so a report needs no unlucky schedule.  An access is kept with its
 * component's time at the physical bytes it touches; a later access that
 * conflicts and whose clock does not know that time is unordered with it.
 *
 * Host threads order each other by means that cannot be seen here (mutexes,
 * joins), so two host accesses are never reported.
 */
#include "emu_internal.h"

#include <algorithm>
#include <sys/mman.h>

namespace emu {

uint32_t at(const vclock &clock, int component)
{
    return (size_t)component < clock.size() ? clock[(size_t)component] : 0;
}

void join(vclock &into, const vclock &from)
{
    if (into.size() < from.size())
        into.resize(from.size());
    for (size_t i = 0; i < from.size(); i++)
        into[i] = std::max(into[i], from[i]);
}

void tick(vclock &clock, int component)
{
    if (clock.size() <= (size_t)component)
        clock.resize((size_t)component + 1);
    clock[(size_t)component]++;
}

int new_component(bool host)
{
    the->component_is_host.push_back(host);
    return (int)the->component_is_host.size() - 1;
}

namespace {

struct access_now {
    const vclock &clock;
    int component;
    bool write;
    int site;
};

bool unordered(const access_now &now, const stamp &earlier)
{
    bool both_host = the->component_is_host[(size_t)now.component] &&
                     the->component_is_host[(size_t)earlier.component];
    return !both_host && at(now.clock, earlier.component) < earlier.time;
}

void report(const access_now &now, const stamp &earlier, bool earlier_writes)
{
    finding(std::string("unordered: ") + (earlier_writes ? "write by " : "read by ") + site_text(earlier.site) +
            " and " + (now.write ? "write by " : "read by ") + site_text(now.site));
}

void touch(const access_now &now, cell &bytes)
{
    stamp mine = {now.component, at(now.clock, now.component), now.site};
    if (bytes.written && unordered(now, bytes.write))
        report(now, bytes.write, true);
    if (now.write) {
        for (const stamp &read : bytes.reads)
            if (unordered(now, read))
                report(now, read, false);
        bytes.written = true;
        bytes.write = mine;
        bytes.reads.clear();
        return;
    }
    for (stamp &read : bytes.reads)
        if (read.component == now.component) {
            read = mine;
            return;
        }
    bytes.reads.push_back(mine);
}

/* Makes `offset` a border of cells. */
void split(std::map<size_t, cell> &cells, size_t offset)
{
    auto next = cells.upper_bound(offset);
    if (next == cells.begin())
        return;
    auto holds = std::prev(next);
    if (holds->first == offset || holds->second.end <= offset)
        return;
    cell rest = holds->second;
    holds->second.end = offset;
    cells.emplace_hint(next, offset, std::move(rest));
}

} // namespace

void check_range(const vclock &clock, int component, const range &bytes, bool write, int site)
{
    access_now now = {clock, component, write, site};
    std::map<size_t, cell> &cells = bytes.map->memory->cells;
    split(cells, bytes.begin);
    split(cells, bytes.end);
    auto holds = cells.lower_bound(bytes.begin);
    if (write) { /* one cell is left, whatever was there */
        cell whole = {bytes.end, true, {component, at(clock, component), site}, {}};
        while (holds != cells.end() && holds->first < bytes.end) {
            touch(now, holds->second);
            holds = cells.erase(holds);
        }
        cells.emplace_hint(holds, bytes.begin, std::move(whole));
        return;
    }
    for (size_t offset = bytes.begin; offset < bytes.end;) {
        if (holds == cells.end() || holds->first > offset) { /* never accessed so far */
            size_t end = holds == cells.end() ? bytes.end : std::min(bytes.end, holds->first);
            holds = cells.emplace_hint(holds, offset, cell{end, false, {}, {}});
        }
        touch(now, holds->second);
        offset = holds->second.end;
        ++holds;
    }
}

bool declare(const vclock &clock, int component, int device, const void *memory, size_t bytes, bool write, int site)
{
    std::vector<range> ranges;
    if (bytes == 0)
        return true;
    if (!translate(memory, bytes, site, &ranges))
        return false;
    for (const range &part : ranges) {
        mapping &map = *part.map;
        if (device >= 0 && !map.memory->host && !map.devices.count(device)) {
            finding("device " + std::to_string(device) + " has no access to this memory of device " +
                    std::to_string(map.memory->device) + ": " + site_text(site));
            return false;
        }
        if (write && !(map.protection & PROT_WRITE)) {
            finding("write to memory that may only be read: " + site_text(site));
            return false;
        }
        if (the->check) {
            map.uses[component] = {component, at(clock, component), site};
            check_range(clock, component, part, write, site);
        }
    }
    return true;
}

} // namespace emu
