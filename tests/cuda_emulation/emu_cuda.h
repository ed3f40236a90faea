/*
 * What csrc/cuda/cu.h includes in the test build, in place of nvcc's world.
 *
 * NVIDIA's own headers declare the API; this adds what they leave to nvcc.  In
 * C that is only the place of each call: the calls below are preceded by
 * emu_at, which the runtime remembers for its reports, and by which a wait can
 * be dropped.  In C++ it is also what a kernel sees: its indices, barriers,
 * warp exchanges, atomics and shared memory.
 *
 * Kernels run one at a time under the runtime's lock, so indices are plain
 * variables and atomics plain arithmetic.  Shared memory is the linker section
 * emu_shared, so that the runtime can spoil it before every block; dynamic
 * shared memory does not exist.
 */
#ifndef EMU_CUDA_H
#define EMU_CUDA_H

#if defined(__CUDACC__)
#error "emu_cuda.h is for the test build: compile with gcc or g++ and without __CUDACC__"
#endif

#include <cuda.h>
#if defined(__cplusplus)
#include <cuda_runtime.h>
#else
#include <cuda_runtime_api.h>
#endif
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif
void emu_at(const char *file, int line);
void emu_host_access(const void *memory, size_t bytes, int write);
#ifdef __cplusplus
}
#endif

#define CU_HOST_READ(p, bytes) (emu_at(__FILE__, __LINE__), emu_host_access((p), (bytes), 0))
#define CU_HOST_WRITE(p, bytes) (emu_at(__FILE__, __LINE__), emu_host_access((p), (bytes), 1))

#define cudaMalloc(...) (emu_at(__FILE__, __LINE__), cudaMalloc(__VA_ARGS__))
#define cudaFree(...) (emu_at(__FILE__, __LINE__), cudaFree(__VA_ARGS__))
#define cudaFreeHost(...) (emu_at(__FILE__, __LINE__), cudaFreeHost(__VA_ARGS__))
#define cudaMemcpyAsync(...) (emu_at(__FILE__, __LINE__), cudaMemcpyAsync(__VA_ARGS__))
#define cudaMemcpy2DAsync(...) (emu_at(__FILE__, __LINE__), cudaMemcpy2DAsync(__VA_ARGS__))
#define cudaMemsetAsync(...) (emu_at(__FILE__, __LINE__), cudaMemsetAsync(__VA_ARGS__))
#define cudaEventRecord(...) (emu_at(__FILE__, __LINE__), cudaEventRecord(__VA_ARGS__))
#define cudaEventSynchronize(...) (emu_at(__FILE__, __LINE__), cudaEventSynchronize(__VA_ARGS__))
#define cudaStreamWaitEvent(...) (emu_at(__FILE__, __LINE__), cudaStreamWaitEvent(__VA_ARGS__))
#define cudaStreamSynchronize(...) (emu_at(__FILE__, __LINE__), cudaStreamSynchronize(__VA_ARGS__))
#define cudaDeviceSynchronize() (emu_at(__FILE__, __LINE__), cudaDeviceSynchronize())

#if defined(__cplusplus)

#include <cstring> /* takes macros of its names away, so it comes before ours */
#include <initializer_list>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <tuple>

#undef __shared__
#define __shared__ static __attribute__((section("emu_shared")))
#undef __launch_bounds__
#define __launch_bounds__(...)

extern uint3 threadIdx, blockIdx, blockDim, gridDim;
static constexpr int warpSize = 32;

namespace emu {

struct access {
    const void *memory;
    size_t bytes;
    bool write;
    bool always; /* its first and last byte are touched whatever the data are */
    int line;    /* where it was declared before the launch; 0: by the launch itself */
};

/* Enqueues `body(arguments)` for every thread of the grid; arguments are `bytes` bytes, copied now. */
cudaError_t launch(const char *name, const char *file, int line, dim3 grid, dim3 block, cudaStream_t stream,
                   std::initializer_list<access> accesses, void (*body)(const void *), const void *arguments,
                   size_t bytes);

/* One more access of this thread's next launch. */
void next_access(const access &part);

template <class... P> struct call {
    void (*kernel)(P...);
    std::tuple<P...> arguments;
    static void body(const void *at)
    {
        const call *self = static_cast<const call *>(at);
        std::apply(self->kernel, self->arguments);
    }
};

template <class... P, class... A>
cudaError_t launch(const char *name, const char *file, int line, void (*kernel)(P...), dim3 grid, dim3 block,
                   cudaStream_t stream, std::initializer_list<access> accesses, A &&...arguments)
{
    static_assert((std::is_trivially_copyable<P>::value && ...), "kernel arguments are copied as bytes");
    call<P...> made = {kernel, std::tuple<P...>(static_cast<P>(arguments)...)};
    return launch(name, file, line, grid, block, stream, accesses, call<P...>::body, &made, sizeof made);
}

void barrier(const char *file, int line);
/* All threads of `mask` give a value and get all lanes' values; lanes that give none count as all ones. */
void exchange(unsigned mask, uint64_t value, uint64_t lanes[32]);
int lane();

template <class T> T shuffle(unsigned mask, T value, int source, int first, int last)
{
    static_assert(sizeof(T) <= 8, "a shuffle moves 4 or 8 bytes");
    uint64_t bits = 0, lanes[32];
    memcpy(&bits, &value, sizeof value);
    exchange(mask, bits, lanes);
    if (source >= first && source < last)
        memcpy(&value, &lanes[source], sizeof value);
    return value;
}

} // namespace emu

#define CU_READS(p, bytes) emu::access{(p), (size_t)(bytes), false, true, 0},
#define CU_WRITES(p, bytes) emu::access{(p), (size_t)(bytes), true, true, 0},
#define CU_MAY_READ(p, bytes) emu::access{(p), (size_t)(bytes), false, false, 0},
#define CU_MAY_WRITE(p, bytes) emu::access{(p), (size_t)(bytes), true, false, 0},
#define CU_NEXT_READS(p, bytes) emu::next_access({(p), (size_t)(bytes), false, true, __LINE__})
#define CU_NEXT_MAY_READ(p, bytes) emu::next_access({(p), (size_t)(bytes), false, false, __LINE__})
#define CU_NEXT_MAY_WRITE(p, bytes) emu::next_access({(p), (size_t)(bytes), true, false, __LINE__})
#define CU_LAUNCH(kernel, grid, block, stream, accesses, ...)                                      \
    emu::launch(#kernel, __FILE__, __LINE__, (kernel), dim3(grid), dim3(block), (stream),          \
                std::initializer_list<emu::access>{accesses}, __VA_ARGS__)

#define __syncthreads() emu::barrier(__FILE__, __LINE__)

static inline void __threadfence() {}
static inline void __threadfence_block() {}

static inline void __syncwarp(unsigned mask = 0xffffffffu)
{
    uint64_t lanes[32];
    emu::exchange(mask, 0, lanes);
}

template <class T> inline T __shfl_sync(unsigned mask, T value, int source, int width = 32)
{
    int first = emu::lane() / width * width;
    return emu::shuffle(mask, value, first + (source & (width - 1)), first, first + width);
}

template <class T> inline T __shfl_xor_sync(unsigned mask, T value, int with, int width = 32)
{
    int first = emu::lane() / width * width;
    return emu::shuffle(mask, value, emu::lane() ^ with, first, first + width);
}

template <class T> inline T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32)
{
    int first = emu::lane() / width * width;
    return emu::shuffle(mask, value, emu::lane() + (int)by, first, first + width);
}

template <class T> inline T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32)
{
    int first = emu::lane() / width * width;
    return emu::shuffle(mask, value, emu::lane() - (int)by, first, first + width);
}

static inline unsigned __ballot_sync(unsigned mask, int predicate)
{
    uint64_t lanes[32];
    unsigned votes = 0;
    emu::exchange(mask, predicate != 0, lanes);
    for (int k = 0; k < 32; k++)
        votes |= (unsigned)(mask >> k & 1 && lanes[k] == 1) << k;
    return votes;
}

static inline int __any_sync(unsigned mask, int predicate)
{
    return __ballot_sync(mask, predicate) != 0;
}

static inline int __all_sync(unsigned mask, int predicate)
{
    return __ballot_sync(mask, !predicate) == 0;
}

static inline unsigned __reduce_or_sync(unsigned mask, unsigned value)
{
    uint64_t lanes[32];
    unsigned all = 0;
    emu::exchange(mask, value, lanes);
    for (int k = 0; k < 32; k++)
        if (mask >> k & 1 && lanes[k] != ~(uint64_t)0)
            all |= (unsigned)lanes[k];
    return all;
}

template <class T> inline T __ldg(const T *from) { return *from; }
template <class T> inline T __ldcs(const T *from) { return *from; }
template <class T> inline T __ldcg(const T *from) { return *from; }
template <class T> inline T __ldca(const T *from) { return *from; }
template <class T> inline void __stcs(T *to, T value) { *to = value; }
template <class T> inline void __stcg(T *to, T value) { *to = value; }
template <class T> inline void __stwb(T *to, T value) { *to = value; }

/* The second parameter's type follows the first's, as with CUDA's overloads. */
template <class T> struct emu_same { typedef T type; };

template <class T> inline T atomicAdd(T *at, typename emu_same<T>::type value)
{
    T old = *at;
    *at = (T)(old + value);
    return old;
}

template <class T> inline T atomicOr(T *at, typename emu_same<T>::type value)
{
    T old = *at;
    *at = old | value;
    return old;
}

template <class T> inline T atomicAnd(T *at, typename emu_same<T>::type value)
{
    T old = *at;
    *at = old & value;
    return old;
}

template <class T> inline T atomicMax(T *at, typename emu_same<T>::type value)
{
    T old = *at;
    *at = old > value ? old : value;
    return old;
}

template <class T> inline T atomicMin(T *at, typename emu_same<T>::type value)
{
    T old = *at;
    *at = old < value ? old : value;
    return old;
}

template <class T> inline T atomicExch(T *at, typename emu_same<T>::type value)
{
    T old = *at;
    *at = value;
    return old;
}

template <class T> inline T atomicCAS(T *at, typename emu_same<T>::type expected, typename emu_same<T>::type value)
{
    T old = *at;
    if (old == expected)
        *at = value;
    return old;
}

template <class To, class From> inline To emu_bits(From from)
{
    static_assert(sizeof(To) == sizeof(From), "a reinterpretation keeps its size");
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

static inline unsigned __float_as_uint(float x) { return emu_bits<unsigned>(x); }
static inline int __float_as_int(float x) { return emu_bits<int>(x); }
static inline float __uint_as_float(unsigned x) { return emu_bits<float>(x); }
static inline float __int_as_float(int x) { return emu_bits<float>(x); }
static inline long long __double_as_longlong(double x) { return emu_bits<long long>(x); }
static inline double __longlong_as_double(long long x) { return emu_bits<double>(x); }

static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b)
{
    __extension__ typedef unsigned __int128 wide;
    return (unsigned long long)((wide)a * b >> 64);
}

static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __frcp_rn(float a) { return 1 / a; }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dsub_rn(double a, double b) { return a - b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }
static inline double __dsqrt_rn(double a) { return sqrt(a); }
static inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
static inline float __double2float_rn(double a) { return (float)a; }

/* Kernels that are watched (emu_watch.cc): what these do would be done by the library, unseen. */
#if defined(__SANITIZE_THREAD__)
extern "C" void emu_touch(const void *memory, size_t bytes, int write);

static inline void *emu_memset(void *to, int byte, size_t bytes)
{
    emu_touch(to, bytes, 1);
    return memset(to, byte, bytes);
}

static inline void *emu_memcpy(void *to, const void *from, size_t bytes)
{
    emu_touch(from, bytes, 0);
    emu_touch(to, bytes, 1);
    return memcpy(to, from, bytes);
}

namespace std { /* CUDA's headers name them with it */
using ::emu_memcpy;
using ::emu_memset;
}

#define memset(...) emu_memset(__VA_ARGS__)
#define memcpy(...) emu_memcpy(__VA_ARGS__)
#endif

template <class T> inline T min(T a, T b) { return b < a ? b : a; }
template <class T> inline T max(T a, T b) { return a < b ? b : a; }

#endif

#endif
