/*
 * Kernels on the CPU: the blocks of a grid one after another, the threads of a
 * block one after another on a stack of their own.  Only when a thread meets a
 * barrier or a warp exchange does the next one get a new stack; a kernel without
 * them never switches.  Every other block runs its threads from the last to the
 * first, so that a missing barrier shows whichever way the data goes.
 *
 * A barrier that some threads of a block do not reach is a finding; those that
 * wait are then let go.
 */
#include "emu_internal.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

uint3 threadIdx, blockIdx, blockDim, gridDim;

extern "C" {
extern char __start_emu_shared[] __attribute__((weak));
extern char __stop_emu_shared[] __attribute__((weak));
}

namespace emu {
namespace {

const int most_threads = 1024;
const size_t stack_bytes = 128 << 10, guard_bytes = 4096;

/* Threads of one warp that exchange values; those of another mask are a meeting of their own. */
struct meeting {
    unsigned mask;
    int arrived;
    uint64_t round;
    uint64_t values[2][32]; /* by parity of the round: the next one begins while this one is read */
};

struct fiber {
    int thread; /* of the block; that runs on it */
    bool live, at_barrier;
    meeting *at; /* where it waits for others, if not at the barrier */
    uint64_t round;
#if defined(__x86_64__)
    void *stack_pointer;
#else
    ucontext_t context;
#endif
    void *sanitizer; /* the thread sanitizer's idea of it */
};

struct block_run {
    dim3 size;
    int threads, started, arrived;
    bool backwards;
    uint64_t barrier_round;
    const char *barrier_file;
    int barrier_line;
    void (*body)(const void *);
    const void *arguments;
    const char *kernel;
    std::deque<meeting> meetings[most_threads / 32];
} block;

char *stacks;
fiber fibers[most_threads];
int fibers_made, current;

/* ---- switching ------------------------------------------------------------ */

/* The thread sanitizer keeps a call stack of its own and has to be told. */
#if defined(__SANITIZE_THREAD__)

void *main_sanitizer;

void tell_to_fiber(fiber &next)
{
    if (!next.sanitizer)
        next.sanitizer = __tsan_create_fiber(0);
    main_sanitizer = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(next.sanitizer, 0);
}

void tell_to_main()
{
    __tsan_switch_to_fiber(main_sanitizer, 0);
}

#else

void tell_to_fiber(fiber &) {}
void tell_to_main() {}

#endif

#if defined(__x86_64__)

extern "C" void emu_switch(void **save, void *next);
asm(".text\n"
    ".globl emu_switch\n"
    ".type emu_switch,@function\n"
    "emu_switch:\n"
    "    push %rbp\n"
    "    push %rbx\n"
    "    push %r12\n"
    "    push %r13\n"
    "    push %r14\n"
    "    push %r15\n"
    "    mov %rsp, (%rdi)\n"
    "    mov %rsi, %rsp\n"
    "    pop %r15\n"
    "    pop %r14\n"
    "    pop %r13\n"
    "    pop %r12\n"
    "    pop %rbx\n"
    "    pop %rbp\n"
    "    ret\n"
    ".size emu_switch, .-emu_switch\n");

void *main_pointer;

void prepare(fiber &made, char *stack_end, void (*start)())
{
    void **top = (void **)stack_end;
    *--top = nullptr; /* where start would return to; also aligns its frame */
    *--top = (void *)start;
    for (int k = 0; k < 6; k++)
        *--top = nullptr;
    made.stack_pointer = top;
}

void to_fiber(fiber &next)
{
    tell_to_fiber(next);
    emu_switch(&main_pointer, next.stack_pointer);
}

void to_main(fiber &from)
{
    tell_to_main();
    emu_switch(&from.stack_pointer, main_pointer);
}

#else

ucontext_t main_context;

void prepare(fiber &made, char *stack_end, void (*start)())
{
    getcontext(&made.context);
    made.context.uc_stack.ss_sp = stack_end - (stack_bytes - guard_bytes);
    made.context.uc_stack.ss_size = stack_bytes - guard_bytes;
    made.context.uc_link = nullptr;
    makecontext(&made.context, start, 0);
}

void to_fiber(fiber &next)
{
    tell_to_fiber(next);
    swapcontext(&main_context, &next.context);
}

void to_main(fiber &from)
{
    tell_to_main();
    swapcontext(&from.context, &main_context);
}

#endif

/* ---- a block ---------------------------------------------------------------- */

void set_index(int thread)
{
    unsigned t = (unsigned)thread;
    threadIdx = make_uint3(t % block.size.x, t / block.size.x % block.size.y, t / (block.size.x * block.size.y));
}

/* What runs on a fiber: threads until one has to wait, then the rest of that one. */
void run_threads()
{
    fiber &mine = fibers[current];
    while (block.started < block.threads) {
        int k = block.started++;
        mine.thread = block.backwards ? block.threads - 1 - k : k;
        set_index(mine.thread);
        block.body(block.arguments);
    }
    mine.live = false;
    to_main(mine);
}

void resume(int which)
{
    current = which;
    set_index(fibers[which].thread);
    to_fiber(fibers[which]);
}

void start_fiber(int which)
{
    if (!stacks) /* kept for the life of the process */
        stacks = (char *)mmap(nullptr, stack_bytes * most_threads, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    char *stack = stacks + stack_bytes * (size_t)which;
    if (which >= fibers_made) {
        mprotect(stack, guard_bytes, PROT_NONE);
        fibers_made = which + 1;
    }
    fibers[which].live = true;
    prepare(fibers[which], stack + stack_bytes, run_threads);
    current = which;
    to_fiber(fibers[which]);
}

bool can_go_on(const fiber &which)
{
    return which.at_barrier ? block.barrier_round != which.round : which.at->round != which.round;
}

void release_stuck()
{
    if (block.arrived) {
        finding(std::string("barrier that not all threads of the block reach: ") + block.kernel + " " +
                block.barrier_file + ":" + std::to_string(block.barrier_line));
        block.arrived = 0;
        block.barrier_round++;
    }
    for (auto &warp : block.meetings)
        for (meeting &met : warp)
            if (met.arrived) {
                finding(std::string("warp exchange that not all threads of its mask reach: ") + block.kernel);
                met.arrived = 0;
                met.round++;
            }
}

void run_block()
{
    int used = 0;
    block.started = block.arrived = 0;
    block.barrier_round = 0;
    for (auto &warp : block.meetings)
        warp.clear();
    while (block.started < block.threads)
        start_fiber(used++);
    for (bool any = true; any;) {
        bool moved = false;
        any = false;
        for (int k = 0; k < used; k++) {
            if (fibers[k].live && can_go_on(fibers[k])) {
                resume(k);
                moved = true;
            }
            any |= fibers[k].live;
        }
        if (any && !moved)
            release_stuck();
    }
}

void run_grid(dim3 grid, dim3 threads, const char *name, void (*body)(const void *), const void *arguments)
{
    gridDim = make_uint3(grid.x, grid.y, grid.z);
    blockDim = make_uint3(threads.x, threads.y, threads.z);
    block.size = threads;
    block.threads = (int)(threads.x * threads.y * threads.z);
    block.kernel = name;
    block.body = body;
    block.arguments = arguments;
    block.backwards = the->random() & 1;
    for (blockIdx.z = 0; blockIdx.z < grid.z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < grid.y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < grid.x; blockIdx.x++) {
                if (__start_emu_shared)
                    memset(__start_emu_shared, 0xff, (size_t)(__stop_emu_shared - __start_emu_shared));
                block.backwards = !block.backwards;
                run_block();
            }
}

meeting *meet(int warp, unsigned mask)
{
    for (meeting &known : block.meetings[warp])
        if (known.mask == mask)
            return &known;
    block.meetings[warp].push_back({mask, 0, 0, {}});
    return &block.meetings[warp].back();
}

} // namespace

void barrier(const char *file, int line)
{
    fiber &mine = fibers[current];
    if (block.arrived == 0) {
        block.barrier_file = file;
        block.barrier_line = line;
    } else if (line != block.barrier_line) {
        finding(std::string("threads of a block meet at different barriers: ") + block.kernel + " " + file + ":" +
                std::to_string(line) + " and :" + std::to_string(block.barrier_line));
    }
    if (++block.arrived == block.threads) {
        block.arrived = 0;
        block.barrier_round++;
        return;
    }
    mine.at_barrier = true;
    mine.round = block.barrier_round;
    to_main(mine);
}

int lane()
{
    return fibers[current].thread % 32;
}

void exchange(unsigned mask, uint64_t value, uint64_t lanes[32])
{
    fiber &mine = fibers[current];
    int warp = mine.thread / 32, members = std::min(32, block.threads - warp * 32), my_lane = lane();
    unsigned present = mask & (members == 32 ? 0xffffffffu : (1u << members) - 1);
    if (!(mask >> my_lane & 1))
        finding(std::string("warp exchange by a thread that is not in its mask: ") + block.kernel);
    meeting *at = meet(warp, mask);
    uint64_t round = at->round;
    at->values[round & 1][my_lane] = value;
    if (++at->arrived >= __builtin_popcount(present)) {
        at->arrived = 0;
        at->round++;
    } else {
        mine.at_barrier = false;
        mine.at = at;
        mine.round = round;
        to_main(mine);
    }
    for (int k = 0; k < 32; k++)
        lanes[k] = present >> k & 1 ? at->values[round & 1][k] : ~(uint64_t)0;
}

static thread_local std::vector<access> announced;

void next_access(const access &part)
{
    announced.push_back(part);
}

cudaError_t launch(const char *name, const char *file, int line, dim3 grid, dim3 threads, cudaStream_t handle,
                   std::initializer_list<access> accesses, void (*body)(const void *), const void *arguments,
                   size_t bytes)
{
    emu_at(file, line);
    std::vector<access> all = std::move(announced);
    announced.clear();
    all.insert(all.end(), accesses);
    EMU_ENTER("cudaLaunchKernel");
    stream_ref on = find_stream(handle, name);
    std::string what = take_place(name);
    size_t count = (size_t)threads.x * threads.y * threads.z;
    if (!on)
        return failed(cudaErrorInvalidResourceHandle);
    if (on->device != self().device) {
        finding("launch on a stream of device " + std::to_string(on->device) + " while device " +
                std::to_string(self().device) + " is current: " + what);
        return failed(cudaErrorInvalidResourceHandle);
    }
    if (count == 0 || count > (size_t)most_threads || grid.x == 0 || grid.x > 0x7fffffffu || grid.y == 0 ||
        grid.y > 65535 || grid.z == 0 || grid.z > 65535 || threads.z > 64) {
        finding("launch configuration that no device takes: " + what);
        return failed(cudaErrorInvalidConfiguration);
    }
    if (cudaError_t captured = refused_on(on))
        return failed(captured);
    operation made = begin(on, site_number(what));
    for (const access &part : all)
        if (!use(on, &made, {on->device, part.memory, part.bytes, part.write}))
            return failed(cudaErrorIllegalAddress);
    auto copy = std::make_shared<std::vector<max_align_t>>(bytes / sizeof(max_align_t) + 1);
    memcpy(copy->data(), arguments, bytes);
    made.run = [=, site = made.site] {
        run_watched(site, all, [&] { run_grid(grid, threads, name, body, copy->data()); });
    };
    submit(on, std::move(made));
    return self().last_error;
}

} // namespace emu
