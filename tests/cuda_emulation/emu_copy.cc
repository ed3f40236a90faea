/*
 * Copies and fills.
 *
 * Device and pinned memory is read and written when the operation runs.  A
 * pageable source is read during the call; a pageable target makes the call
 * wait until the copy is done, as does a copy between host memories.
 */
#include "emu_internal.h"

#include <cstring>

using namespace emu;

namespace {

/* `rows` runs of `width` bytes; one for an ordinary copy. */
struct copy {
    char *to;
    size_t to_pitch;
    const char *from;
    size_t from_pitch;
    size_t width, rows;
};

void perform(const copy &c)
{
    for (size_t row = 0; row < c.rows; row++)
        memmove(c.to + row * c.to_pitch, c.from + row * c.from_pitch, c.width);
}

bool fits(cudaMemcpyKind said, kind to, kind from)
{
    bool to_device = said == cudaMemcpyHostToDevice || said == cudaMemcpyDeviceToDevice;
    bool from_device = said == cudaMemcpyDeviceToHost || said == cudaMemcpyDeviceToDevice;
    return said == cudaMemcpyDefault ||
           (to_device == (to == kind::device) && from_device == (from == kind::device));
}

bool use_rows(const stream_ref &on, operation *made, char *memory, size_t pitch, const copy &c, bool write)
{
    if (kind_of(memory) == kind::pageable)
        return true;
    if (pitch == c.width)
        return use(on, made, {-1, memory, c.width * c.rows, write});
    for (size_t row = 0; row < c.rows; row++)
        if (!use(on, made, {-1, memory + row * pitch, c.width, write}))
            return false;
    return true;
}

/* A graph reads and writes it whenever it is launched, which is seldom what was meant. */
void report_pageable(const stream_ref &on, kind to, kind from, const std::string &what)
{
    if (on->recording && (to == kind::pageable || from == kind::pageable))
        finding("copy of pageable memory in a capture: " + what);
}

cudaError_t copy_async(std::unique_lock<std::mutex> &lock, const char *function, copy c, cudaMemcpyKind said,
                       cudaStream_t handle)
{
    stream_ref on = find_stream(handle, function);
    std::string what = take_place(function);
    kind to = kind_of(c.to), from = kind_of(c.from);
    if (!on)
        return failed(cudaErrorInvalidResourceHandle);
    if (c.width == 0 || c.rows == 0)
        return cudaSuccess;
    if (!c.to || !c.from || c.to_pitch < c.width || c.from_pitch < c.width || said < cudaMemcpyHostToHost ||
        said > cudaMemcpyDefault) {
        finding("copy with arguments that make no sense: " + what);
        return failed(cudaErrorInvalidValue);
    }
    if (!fits(said, to, from)) {
        finding("kind of copy does not fit the memory: " + what);
        return failed(cudaErrorInvalidMemcpyDirection);
    }
    if (c.rows == 1 && physically_overlap(c.to, c.width, c.from, c.width))
        finding("copy whose source and target overlap: " + what);
    if (cudaError_t captured = refused_on(on))
        return failed(captured);
    report_pageable(on, to, from, what);
    operation made = begin(on, site_number(what));
    if (!use_rows(on, &made, (char *)c.from, c.from_pitch, c, false) ||
        !use_rows(on, &made, c.to, c.to_pitch, c, true))
        return failed(cudaErrorInvalidValue);
    if (from == kind::pageable && to == kind::device) {
        auto taken = std::make_shared<std::vector<char>>(c.width * c.rows);
        perform({taken->data(), c.width, c.from, c.from_pitch, c.width, c.rows});
        made.run = [=] { perform({c.to, c.to_pitch, taken->data(), c.width, c.width, c.rows}); };
    } else {
        made.run = [=] { perform(c); };
    }
    the->copied[to == kind::device][from == kind::device] += c.width * c.rows;
    submit(on, std::move(made));
    if (on->recording)
        return cudaSuccess;
    if (to == kind::pageable || (to == kind::pinned && from != kind::device)) {
        uint64_t position = on->enqueued;
        vclock clock = on->clock;
        if (!wait_for(lock, what, [&] { return on->completed >= position; }))
            return failed(the->broken);
        learn(self(), clock);
    }
    return cudaSuccess;
}

} // namespace

extern "C" {

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind said, cudaStream_t handle)
{
    EMU_ENTER("cudaMemcpyAsync");
    return copy_async(lock, "cudaMemcpyAsync", {(char *)to, bytes, (const char *)from, bytes, bytes, 1}, said, handle);
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind said, cudaStream_t handle)
{
    EMU_ENTER("cudaMemcpy2DAsync");
    return copy_async(lock, "cudaMemcpy2DAsync",
                      {(char *)to, to_pitch, (const char *)from, from_pitch, width, height}, said, handle);
}

cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t handle)
{
    EMU_ENTER("cudaMemsetAsync");
    stream_ref on = find_stream(handle, "cudaMemsetAsync");
    std::string what = take_place("cudaMemsetAsync");
    if (!on)
        return failed(cudaErrorInvalidResourceHandle);
    if (bytes == 0)
        return cudaSuccess;
    if (cudaError_t captured = refused_on(on))
        return failed(captured);
    operation made = begin(on, site_number(what));
    if (!use(on, &made, {on->device, memory, bytes, true}))
        return failed(cudaErrorInvalidValue);
    made.run = [=] { memset(memory, value, bytes); };
    submit(on, std::move(made));
    return cudaSuccess;
}

} // extern "C"
