/*
 * Whether kernels touch what they declare.
 *
 * The happens-before check believes CU_READS, CU_WRITES and their like, so these
 * have to be true.  Under -DEMU_WATCH the .cu files are compiled with
 * -fsanitize=thread and linked without it: every load and store then calls one of
 * the functions below, which stand in for the sanitizer's.  While a kernel runs,
 * each access to memory that CUDA knows must lie within one declared range of its
 * direction (what is written may be read too); when it is over, the first and the
 * last byte of each range must have been touched, in its direction.  Of ranges
 * that the data decide on that is required of all launches of a program together,
 * and for the test to ask (emu_unreached).
 *
 * Locals, arguments and shared memory are nobody's business here.
 */
#include "emu_internal.h"

#include <algorithm>

namespace emu {

#if defined(EMU_WATCH)

namespace {

struct watched_range {
    const char *begin, *end;
    bool write, always;
    int line;
    const char *low, *high; /* what was touched lies in [low, high) */
};

struct watched_kernel {
    int site;
    std::vector<watched_range> ranges;
    bool told[2]; /* of an undeclared read, of an undeclared write */
};

thread_local watched_kernel *running;

void undeclared(watched_kernel &kernel, const char *begin, size_t bytes, bool write)
{
    if (kernel.told[write])
        return;
    running = nullptr; /* what is done here is not the kernel's doing */
    if (const mapping *map = find_mapping(begin)) {
        finding("undeclared: " + site_text(kernel.site) + (write ? " writes " : " reads ") + std::to_string(bytes) +
                " bytes at offset " + std::to_string(begin - map->base) + " of " + std::to_string(map->bytes));
        kernel.told[write] = true;
    }
    running = &kernel;
}

void touch(const void *memory, size_t bytes, bool write)
{
    watched_kernel *kernel = running;
    const char *begin = (const char *)memory, *end = begin + bytes;
    bool declared = false;
    if (!kernel)
        return;
    for (watched_range &range : kernel->ranges) {
        if (begin < range.begin || end > range.end)
            continue;
        declared |= range.write || !write;
        if (range.write == write) {
            range.low = std::min(range.low, begin);
            range.high = std::max(range.high, end);
        }
    }
    if (!declared)
        undeclared(*kernel, begin, bytes, write);
}

void settle(const watched_kernel &kernel)
{
    for (size_t k = 0; k < kernel.ranges.size(); k++) {
        const watched_range &range = kernel.ranges[k];
        if (range.begin == range.end)
            continue;
        bool first = range.low == range.begin, last = range.high == range.end;
        std::string name = site_text(kernel.site) + ", range " +
                           (range.line ? "of line " + std::to_string(range.line) : std::to_string(k + 1));
        if (!range.always) {
            reach &sofar = configured.reached[name];
            sofar.first |= first;
            sofar.last |= last;
        } else if (!first || !last) {
            finding("declared too much: " + name + ": its " + (first ? "last" : "first") + " byte of " +
                    std::to_string(range.end - range.begin) + " is not " + (range.write ? "written" : "read"));
        }
    }
}

} // namespace

void run_watched(int site, const std::vector<access> &declared, const std::function<void()> &kernel)
{
    watched_kernel watched = {site, {}, {false, false}};
    for (const access &part : declared) {
        const char *begin = (const char *)part.memory, *end = begin + part.bytes;
        watched.ranges.push_back({begin, end, part.write, part.always, part.line, end, begin});
    }
    running = &watched;
    kernel();
    running = nullptr;
    settle(watched);
}

#else

void run_watched(int, const std::vector<access> &, const std::function<void()> &kernel)
{
    kernel();
}

#endif

} // namespace emu

#if defined(EMU_WATCH)

#define ACCESSES(bytes)                                                                     \
    void __tsan_read##bytes(void *memory) { emu::touch(memory, bytes, false); }             \
    void __tsan_write##bytes(void *memory) { emu::touch(memory, bytes, true); }             \
    void __tsan_unaligned_read##bytes(void *memory) { emu::touch(memory, bytes, false); }   \
    void __tsan_unaligned_write##bytes(void *memory) { emu::touch(memory, bytes, true); }

extern "C" {

void __tsan_init() {}

/* Of a test's count of failures; kernels have emu_cuda.h's atomics. */
unsigned __tsan_atomic32_fetch_add(volatile unsigned *memory, unsigned value, int)
{
    return __atomic_fetch_add(memory, value, __ATOMIC_RELAXED);
}

ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)

void __tsan_read_range(void *memory, size_t bytes)
{
    emu::touch(memory, bytes, false);
}

void __tsan_write_range(void *memory, size_t bytes)
{
    emu::touch(memory, bytes, true);
}

void emu_touch(const void *memory, size_t bytes, int write)
{
    emu::touch(memory, bytes, write != 0);
}

} // extern "C"

#endif
