/*
 * The emulated CUDA runtime itself: it keeps CUDA's rules, runs kernels as a GPU
 * would, finds what is not ordered whatever the schedule, and never what is.
 */
#include "emulated.h"

#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#define STEP ((size_t)2 << 20)
#define SEEDS 60

static int leaks_now(void)
{
    return emu_leaks(report, sizeof report);
}

static void *pinned_memory(size_t bytes)
{
    void *memory = NULL;
    CHECK_EQ(cudaMallocHost(&memory, bytes), cudaSuccess);
    return memory;
}

/* ---- kernels ------------------------------------------------------------------- */

__global__ void add_kernel(float *to, const float *from, float value, size_t count)
{
    size_t stride = (size_t)gridDim.x * blockDim.x;
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += stride)
        to[i] = from[i] + value;
}

static cudaError_t add(float *to, const float *from, float value, size_t count, cudaStream_t stream)
{
    return CU_LAUNCH(add_kernel, 2, 64, stream, CU_READS(from, count * 4) CU_WRITES(to, count * 4), to, from, value,
                     count);
}

template <int THREADS> __global__ void __launch_bounds__(THREADS) tree_sum_kernel(float *to, const float *from)
{
    __shared__ float partial[THREADS];
    unsigned t = threadIdx.x;
    partial[t] = from[blockIdx.x * THREADS + t];
    __syncthreads();
    for (unsigned half = THREADS / 2; half > 0; half /= 2) {
        if (t < half)
            partial[t] += partial[t + half];
        __syncthreads();
    }
    if (t == 0)
        to[blockIdx.x] = partial[0];
}

__global__ void warp_kernel(int *to)
{
    int t = (int)threadIdx.x, sum = t;
    for (int by = 16; by > 0; by /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, by);
    int down = __shfl_down_sync(0xffffffffu, t, 3), up = __shfl_up_sync(0xffffffffu, t, 5);
    int first = __shfl_sync(0xffffffffu, t, 2, 8);
    unsigned odd = __ballot_sync(0xffffffffu, t & 1);
    to[t * 5] = sum;
    to[t * 5 + 1] = down;
    to[t * 5 + 2] = up;
    to[t * 5 + 3] = first;
    to[t * 5 + 4] = (int)odd + __any_sync(0xffffffffu, t == 7) + 2 * __all_sync(0xffffffffu, t == 7);
}

__global__ void reverse_kernel(int *to, int with_barrier)
{
    __shared__ int box[64];
    box[threadIdx.x] = (int)threadIdx.x;
    if (with_barrier)
        __syncthreads();
    to[threadIdx.x] = box[63 - threadIdx.x];
}

__global__ void shared_garbage_kernel(unsigned *to)
{
    __shared__ unsigned box[4];
    to[blockIdx.x] = box[blockIdx.x & 3];
    box[blockIdx.x & 3] = 0;
}

__global__ void half_barrier_kernel(int *to)
{
    if (threadIdx.x < 32)
        __syncthreads();
    to[threadIdx.x] = 1;
}

__global__ void atomics_kernel(unsigned long long *to)
{
    atomicAdd(&to[0], 1);
    atomicOr((unsigned *)&to[1], 1u << (threadIdx.x & 7));
    atomicMax(&to[2], (unsigned long long)(blockIdx.x * blockDim.x + threadIdx.x));
}

static void kernels_compute(void)
{
    enum { N = 1000 };
    float host[N];
    emu_reset(1, 0, 1);
    cudaStream_t stream = new_stream();
    float *a = (float *)device_memory(N * 4), *b = (float *)device_memory(N * 4);
    for (int i = 0; i < N; i++)
        host[i] = (float)i;
    emu_poke(a, host, sizeof host);
    CHECK_EQ(add(b, a, 0.5f, N, stream), cudaSuccess);
    emu_peek(host, b, sizeof host);
    for (int i = 0; i < N; i++)
        CHECK(host[i] == (float)i + 0.5f);
    CHECK_EQ(CU_LAUNCH((tree_sum_kernel<256>), 3, 256, stream, CU_READS(b, 3 * 256 * 4) CU_WRITES(a, 12), a, b),
             cudaSuccess);
    emu_peek(host, a, 12);
    for (int k = 0; k < 3; k++) /* exact: multiples of 1/2 below 2^24 */
        CHECK(host[k] == (float)(256 * (256 * k) + 255 * 128) + 128);
    CHECK_CLEAN();
}

static void warps_exchange(void)
{
    int host[64 * 5];
    emu_reset(2, 0, 1);
    cudaStream_t stream = new_stream();
    int *to = (int *)device_memory(sizeof host);
    CHECK_EQ(CU_LAUNCH(warp_kernel, 1, 64, stream, CU_WRITES(to, sizeof host), to), cudaSuccess);
    emu_peek(host, to, sizeof host);
    for (int t = 0; t < 64; t++) {
        int lane = t % 32, warp = t - lane;
        CHECK_EQ(host[t * 5], 32 * warp + 31 * 16);
        CHECK_EQ(host[t * 5 + 1], lane + 3 < 32 ? t + 3 : t);
        CHECK_EQ(host[t * 5 + 2], lane >= 5 ? t - 5 : t);
        CHECK_EQ(host[t * 5 + 3], t / 8 * 8 + 2);
        CHECK_EQ(host[t * 5 + 4], (int)0xaaaaaaaau + (warp == 0));
    }
    CHECK_CLEAN();
}

static void missing_barriers_show(void)
{
    int host[64];
    emu_reset(3, 0, 1);
    cudaStream_t stream = new_stream();
    int *to = (int *)device_memory(sizeof host);
    CU_LAUNCH(reverse_kernel, 1, 64, stream, CU_WRITES(to, 256), to, 1);
    emu_peek(host, to, sizeof host);
    for (int t = 0; t < 64; t++)
        CHECK_EQ(host[t], 63 - t);
    CHECK_CLEAN();
    CU_LAUNCH(reverse_kernel, 1, 64, stream, CU_WRITES(to, 256), to, 0);
    emu_peek(host, to, sizeof host);
    int wrong = 0;
    for (int t = 0; t < 64; t++)
        wrong += host[t] == -1; /* shared memory that was not written yet is 0xff */
    CHECK_EQ(wrong, 32);
    CU_LAUNCH(half_barrier_kernel, 1, 64, stream, CU_WRITES(to, 256), to);
    emu_peek(host, to, sizeof host);
    CHECK_FOUND("not all threads of the block reach: half_barrier_kernel");
    for (int t = 0; t < 64; t++)
        CHECK_EQ(host[t], 1);
}

static void shared_memory_is_garbage(void)
{
    unsigned host[8];
    emu_reset(4, 0, 1);
    cudaStream_t stream = new_stream();
    unsigned *to = (unsigned *)device_memory(sizeof host);
    CU_LAUNCH(shared_garbage_kernel, 8, 1, stream, CU_WRITES(to, 32), to);
    emu_peek(host, to, sizeof host);
    for (int k = 0; k < 8; k++)
        CHECK_EQ(host[k], 0xffffffffu);
    CHECK_CLEAN();
}

static void atomics_count(void)
{
    unsigned long long host[3] = {0, 0, 0};
    emu_reset(5, 0, 1);
    cudaStream_t stream = new_stream();
    unsigned long long *to = (unsigned long long *)device_memory(sizeof host);
    emu_poke(to, host, sizeof host);
    CU_LAUNCH(atomics_kernel, 3, 100, stream, CU_WRITES(to, sizeof host), to);
    emu_peek(host, to, sizeof host);
    CHECK_EQ(host[0], 300);
    CHECK_EQ(host[1], 255);
    CHECK_EQ(host[2], 299);
}

static void launches_are_checked(void)
{
    emu_reset(6, 0, 1);
    cudaStream_t stream = new_stream();
    float *a = (float *)device_memory(400);
    CHECK_EQ(CU_LAUNCH(add_kernel, 1, 1025, stream, CU_WRITES(a, 400), a, a, 1.0f, (size_t)100),
             cudaErrorInvalidConfiguration);
    CHECK_EQ(CU_LAUNCH(add_kernel, 0, 32, stream, CU_WRITES(a, 400), a, a, 1.0f, (size_t)100),
             cudaErrorInvalidConfiguration);
    CHECK_FOUND("launch configuration");
    CHECK_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
    CHECK_EQ(cudaGetLastError(), cudaSuccess);
    CHECK_EQ(CU_LAUNCH(add_kernel, 1, 32, stream, CU_WRITES(a, 404), a, a, 1.0f, (size_t)100),
             cudaErrorIllegalAddress);
    CHECK_FOUND("outside of every allocation: add_kernel at test_emulation.cc:");
    cudaGetLastError();
    CHECK_EQ(cudaSetDevice(1), cudaSuccess);
    CHECK_EQ(add(a, a, 1, 10, stream), cudaErrorInvalidResourceHandle);
    cudaGetLastError();
    cudaStream_t other = new_stream();
    CHECK_EQ(add(a, a, 1, 10, other), cudaErrorIllegalAddress);
    CHECK_FOUND("device 1 has no access to this memory of device 0");
    CHECK_EQ(cudaSetDevice(0), cudaSuccess);
    emu_reset(6, 0, 1);
    stream = new_stream();
    a = (float *)device_memory(400);
    emu_fail_next("cudaLaunchKernel", 2, cudaErrorLaunchFailure);
    CHECK_EQ(add(a, a, 1, 10, stream), cudaSuccess);
    CHECK_EQ(add(a, a, 1, 10, stream), cudaErrorLaunchFailure);
    cudaGetLastError();
    CHECK_EQ(add(a, a, 1, 10, stream), cudaSuccess);
    CHECK_EQ(cudaEventQuery(NULL), cudaErrorInvalidResourceHandle);
    CHECK_EQ(add(a, a, 1, 10, stream), cudaErrorInvalidResourceHandle); /* an error that nobody took is seen there */
}

/* ---- memory ---------------------------------------------------------------------- */

static CUmemAllocationProp pinned_on(int device)
{
    CUmemAllocationProp prop;
    memset(&prop, 0, sizeof prop);
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = device;
    return prop;
}

static CUmemAccessDesc access_of(int device, CUmemAccess_flags flags)
{
    CUmemAccessDesc access;
    memset(&access, 0, sizeof access);
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = flags;
    return access;
}

static void expect_refusal(CUresult result, const char *part)
{
    CHECK_EQ(result, CUDA_ERROR_INVALID_VALUE);
    CHECK_FOUND(part);
}

static void virtual_memory_has_rules(void)
{
    emu_reset(10, 0, 1);
    CUmemAllocationProp prop = pinned_on(0);
    CUmemAccessDesc access = access_of(0, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    CUmemGenericAllocationHandle handle = 0;
    CUdeviceptr at = 0;
    size_t step = 0;
    CHECK_EQ(cuMemGetAllocationGranularity(&step, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM), CUDA_SUCCESS);
    CHECK_EQ(step, STEP);
    expect_refusal(cuMemCreate(&handle, STEP / 2, &prop, 0), "cuMemCreate of 1048576 bytes");
    expect_refusal(cuMemAddressReserve(&at, STEP + 4096, 0, 0, 0), "cuMemAddressReserve of");
    CHECK_EQ(cuMemCreate(&handle, 2 * STEP, &prop, 0), CUDA_SUCCESS);
    CHECK_EQ(cuMemAddressReserve(&at, 4 * STEP, 0, 0, 0), CUDA_SUCCESS);
    expect_refusal(cuMemMap(at, STEP, STEP, handle, 0), "with an offset");
    expect_refusal(cuMemMap(at, 4 * STEP, 0, handle, 0), "more bytes than the handle has");
    expect_refusal(cuMemMap(at + 3 * STEP, 2 * STEP, 0, handle, 0), "outside of reserved ranges");
    expect_refusal(cuMemMap(at, STEP, 0, handle + 1, 0), "handle that is not held");
    CHECK_EQ(cuMemMap(at, 2 * STEP, 0, handle, 0), CUDA_SUCCESS);
    expect_refusal(cuMemMap(at + STEP, STEP, 0, handle, 0), "where memory is mapped already");
    CHECK_EQ(cuMemMap(at + 2 * STEP, STEP, 0, handle, 0), CUDA_SUCCESS);
    cudaStream_t stream = new_stream();
    CHECK_EQ(cudaMemsetAsync((void *)(uintptr_t)at, 1, 64, stream), cudaErrorInvalidValue);
    CHECK_FOUND("before cuMemSetAccess");
    CHECK_EQ(cuMemSetAccess(at, 3 * STEP, &access, 1), CUDA_SUCCESS);
    expect_refusal(cuMemUnmap(at, STEP), "cuMemUnmap of something else");
    expect_refusal(cuMemAddressFree(at, 4 * STEP), "in which memory is mapped");
    CHECK_EQ(cuMemRelease(handle), CUDA_SUCCESS);
    expect_refusal(cuMemRelease(handle), "cuMemRelease of a handle");
    CHECK_EQ(cudaMemsetAsync((void *)(uintptr_t)at, 7, 64, stream), cudaSuccess); /* lives while it is mapped */
    unsigned char seen = 0;
    emu_peek(&seen, (void *)(uintptr_t)(at + 2 * STEP + 63), 1);
    CHECK_EQ(seen, 7);
    CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    CHECK_EQ(cuMemUnmap(at, 3 * STEP), CUDA_SUCCESS);
    expect_refusal(cuMemAddressFree(at, 2 * STEP), "cuMemAddressFree of something else");
    CHECK_EQ(cuMemAddressFree(at, 4 * STEP), CUDA_SUCCESS);
    CHECK_EQ(cudaStreamDestroy(stream), cudaSuccess);
    CHECK_EQ(leaks_now(), 0);
}

typedef struct slot {
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at[4];
} slot;

/* One handle at several addresses, the odd ones of its first step only. */
static slot make_slot(int device)
{
    slot made = {0, {0, 0, 0, 0}};
    CUmemAllocationProp prop = pinned_on(device);
    CUmemAccessDesc access = access_of(device, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    CHECK_EQ(cuMemCreate(&made.handle, 2 * STEP, &prop, 0), CUDA_SUCCESS);
    for (int k = 0; k < 4; k++) {
        size_t bytes = k % 2 ? STEP : 2 * STEP;
        CHECK_EQ(cuMemAddressReserve(&made.at[k], bytes, 0, 0, 0), CUDA_SUCCESS);
        CHECK_EQ(cuMemMap(made.at[k], bytes, 0, made.handle, 0), CUDA_SUCCESS);
        CHECK_EQ(cuMemSetAccess(made.at[k], bytes, &access, 1), CUDA_SUCCESS);
    }
    return made;
}

static void free_slot(slot *made)
{
    for (int k = 0; k < 4; k++) {
        size_t bytes = k % 2 ? STEP : 2 * STEP;
        CHECK_EQ(cuMemUnmap(made->at[k], bytes), CUDA_SUCCESS);
        CHECK_EQ(cuMemAddressFree(made->at[k], bytes), CUDA_SUCCESS);
    }
    CHECK_EQ(cuMemRelease(made->handle), CUDA_SUCCESS);
}

static float *alias(const slot *of, int k)
{
    return (float *)(uintptr_t)of->at[k];
}

static void aliases_are_one_memory(void)
{
    emu_reset(11, 0, 1);
    slot made = make_slot(0);
    cudaStream_t stream = new_stream();
    float *source = (float *)device_memory(4000), host[1000];
    for (int i = 0; i < 1000; i++)
        host[i] = (float)i;
    emu_poke(source, host, sizeof host);
    for (int k = 0; k < 4; k++) {
        add(alias(&made, k), source, (float)k, 1000, stream);
        for (int j = 0; j < 4; j++) {
            emu_peek(host, alias(&made, j), sizeof host);
            CHECK(host[999] == 999 + (float)k);
        }
    }
    CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    CHECK_CLEAN();
    add(alias(&made, 0), source, 0, 1000, stream); /* the same place by other names, on another stream */
    cudaStream_t other = new_stream();
    add(alias(&made, 3) + 999, source, 0, 1, other);
    CHECK_FOUND("unordered: write by add_kernel at test_emulation.cc:");
    emu_reset(11, 0, 1);
}

static void memory_is_garbage_and_counted(void)
{
    size_t free_0 = 0, free_1 = 0, total = 0;
    emu_reset(12, 0, 1);
    CHECK_EQ(cudaMemGetInfo(&free_0, &total), cudaSuccess);
    unsigned char *memory = (unsigned char *)device_memory(1000), byte[1000];
    emu_peek(byte, memory, sizeof byte);
    for (int i = 0; i < 1000; i++)
        CHECK_EQ(byte[i], 0xff);
    CHECK_EQ((uintptr_t)memory % 256, 0);
    slot made = make_slot(0);
    emu_peek(byte, alias(&made, 2), sizeof byte);
    CHECK_EQ(byte[999], 0xff);
    CHECK_EQ(cudaMemGetInfo(&free_1, &total), cudaSuccess);
    CHECK_EQ(free_0 - free_1, 1000 + 2 * STEP);
    void *never = &never;
    CHECK_EQ(cudaMalloc(&never, total + 1), cudaErrorMemoryAllocation);
    CHECK(never == NULL);
    cudaStream_t stream = new_stream();
    cudaEvent_t event = new_event();
    void *pinned = pinned_memory(100);
    CHECK_EQ(leaks_now(), 1 + 4 + 1 + 4 + 1 + 1 + 1); /* memory, mappings, handle, addresses, stream, event, pinned */
    CHECK(strstr(report, "pinned memory of 100 bytes") && strstr(report, "memory handle of 4194304 bytes"));
    free_slot(&made);
    CHECK_EQ(cudaFree(memory), cudaSuccess);
    CHECK_EQ(cudaFreeHost(pinned), cudaSuccess);
    CHECK_EQ(cudaEventDestroy(event), cudaSuccess);
    CHECK_EQ(cudaStreamDestroy(stream), cudaSuccess);
    CHECK_EQ(leaks_now(), 0);
    CHECK_CLEAN();
    CHECK_EQ(cudaFree(memory), cudaErrorInvalidValue);
    CHECK_FOUND("cudaFree at test_emulation.cc:");
}

static void freeing_in_use_is_found(void)
{
    for (int how = 0; how < 4; how++) {
        emu_reset(13, how & 1 ? -1 : 0, 1);
        cudaStream_t stream = new_stream();
        float *memory = (float *)device_memory(400);
        void *pinned = pinned_memory(400);
        slot made = make_slot(0);
        cudaMemsetAsync(memory, 0, 400, stream);
        cudaMemsetAsync(alias(&made, 1), 0, 400, stream);
        cudaMemcpyAsync(pinned, memory, 400, cudaMemcpyDeviceToHost, stream);
        if (how & 2)
            CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        CHECK_EQ(cudaFree(memory), cudaSuccess);
        CHECK_EQ(cudaFreeHost(pinned), cudaSuccess);
        free_slot(&made);
        if (how & 2) {
            CHECK_CLEAN();
            continue;
        }
        CHECK_EQ(emu_findings(report, sizeof report), 3);
        CHECK(strstr(report, "cudaFree at") && strstr(report, "cudaFreeHost at"));
        CHECK(strstr(report, "cuMemUnmap of memory that may still be in use by cudaMemsetAsync at"));
    }
}

static void memory_given_back_has_no_past(void)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        emu_reset(seed, (int)(seed % 4) - 1, 1);
        cudaStream_t a = new_stream(), b = new_stream();
        for (int round = 0; round < 4; round++) {
            float *memory = (float *)device_memory(4096);
            slot made = make_slot(0);
            cudaMemsetAsync(memory, round, 4096, round & 1 ? a : b);
            cudaMemsetAsync(alias(&made, 0), round, 4096, round & 1 ? a : b);
            CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
            free_slot(&made);
            CHECK_EQ(cudaFree(memory), cudaSuccess);
        }
        CHECK_CLEAN();
    }
}

static int dies_touching(volatile char *memory)
{
    int status = 0;
    fflush(NULL);
    pid_t child = fork();
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        alarm(20);
        memory[0] = 1;
        _exit(0);
    }
    waitpid(child, &status, 0);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGSEGV;
}

static void host_touching_device_memory_dies(void)
{
    emu_protect(1);
    emu_reset(14, 0, 1);
    cudaStream_t stream = new_stream();
    char *memory = (char *)device_memory(100);
    slot made = make_slot(0);
    CHECK(dies_touching(memory));
    CHECK(dies_touching((char *)alias(&made, 1)));
    cudaMemsetAsync(memory, 3, 100, stream);
    cudaMemsetAsync(alias(&made, 0), 3, 100, stream);
    CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    CHECK(dies_touching(memory));
    CHECK(dies_touching((char *)alias(&made, 1)));
    char byte = 0;
    emu_peek(&byte, alias(&made, 1), 1);
    CHECK_EQ(byte, 3);
    char *pinned = (char *)pinned_memory(100);
    CHECK(!dies_touching(pinned));
    emu_protect(0);
    CHECK(!dies_touching(memory));
    CHECK(!dies_touching((char *)alias(&made, 1)));
    CHECK_CLEAN();
}

/* ---- copies --------------------------------------------------------------------------- */

static void copies_follow_the_kind_of_memory(void)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        emu_reset(seed, (int)(seed % 4) - 1, 1);
        cudaStream_t stream = new_stream();
        int *device = (int *)device_memory(400), *pinned = (int *)pinned_memory(400), pageable[100];
        for (int i = 0; i < 100; i++)
            pageable[i] = i;
        CHECK_EQ(cudaMemcpyAsync(device, pageable, 400, cudaMemcpyHostToDevice, stream), cudaSuccess);
        memset(pageable, 0, sizeof pageable); /* it was read during the call */
        CHECK_EQ(cudaMemcpyAsync(pinned, device, 400, cudaMemcpyDefault, stream), cudaSuccess);
        CHECK_EQ(cudaMemcpyAsync(device, pinned, 400, cudaMemcpyHostToDevice, stream), cudaSuccess);
        CHECK_EQ(cudaMemcpyAsync(pageable, device, 400, cudaMemcpyDeviceToHost, stream), cudaSuccess);
        for (int i = 0; i < 100; i++)
            CHECK_EQ(pageable[i], i); /* it was waited for */
        CU_HOST_READ(pinned, 400);
        CHECK_CLEAN();
        CHECK_EQ(cudaMemcpyAsync(device, pageable, 400, cudaMemcpyDeviceToDevice, stream),
                 cudaErrorInvalidMemcpyDirection);
        CHECK_FOUND("kind of copy");
        cudaMemcpyAsync(device, device + 1, 40, cudaMemcpyDeviceToDevice, stream);
        CHECK_FOUND("overlap");
    }
}

static void pinned_memory_is_read_when_the_copy_runs(void)
{
    int late = 0, value = 0;
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        emu_reset(seed, (int)(seed % 4) - 1, 1);
        cudaStream_t stream = new_stream();
        int *device = (int *)device_memory(4), *pinned = (int *)pinned_memory(4);
        CU_HOST_WRITE(pinned, 4);
        *pinned = 1;
        cudaMemcpyAsync(device, pinned, 4, cudaMemcpyHostToDevice, stream);
        CHECK_CLEAN();
        CU_HOST_WRITE(pinned, 4); /* too early */
        *pinned = 2;
        CHECK_FOUND("unordered: read by cudaMemcpyAsync at test_emulation.cc:");
        emu_peek(&value, device, 4);
        late += value == 2;
    }
    CHECK(late > SEEDS / 4 && late < SEEDS);
}

static void rows_are_copied(void)
{
    unsigned char host[10][16], back[10][4];
    emu_reset(20, 0, 1);
    cudaStream_t stream = new_stream(), other = new_stream();
    unsigned char *device = (unsigned char *)device_memory(160);
    for (int i = 0; i < 160; i++)
        host[i / 16][i % 16] = (unsigned char)i;
    CHECK_EQ(cudaMemcpy2DAsync(device, 16, host, 16, 8, 10, cudaMemcpyHostToDevice, stream), cudaSuccess);
    CHECK_EQ(cudaMemcpy2DAsync(device + 8, 16, &host[0][8], 16, 8, 10, cudaMemcpyHostToDevice, other), cudaSuccess);
    CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
    CHECK_EQ(cudaMemcpy2DAsync(back, 4, device + 6, 16, 4, 10, cudaMemcpyDeviceToHost, stream), cudaSuccess);
    for (int row = 0; row < 10; row++)
        for (int k = 0; k < 4; k++)
            CHECK_EQ(back[row][k], row * 16 + 6 + k);
    CHECK_CLEAN(); /* columns of two streams are different bytes */
}

/* ---- order ------------------------------------------------------------------------------ */

enum {
    WAIT_NONE,
    WAIT_EVENT,
    WAIT_HOST_STREAM,
    WAIT_HOST_EVENT,
    WAIT_QUERY_EVENT,
    WAIT_QUERY_STREAM,
    WAIT_DEVICE,
    WAYS
};

/* One stream writes, another reads, ordered in one of these ways. */
static void hand_over(int way, float *memory, float *result, cudaStream_t first, cudaStream_t then)
{
    cudaEvent_t event = new_event();
    cudaMemsetAsync(memory, 0, 400, first);
    cudaEventRecord(event, first);
    if (way == WAIT_EVENT)
        cudaStreamWaitEvent(then, event, 0);
    if (way == WAIT_HOST_STREAM)
        cudaStreamSynchronize(first);
    if (way == WAIT_HOST_EVENT)
        cudaEventSynchronize(event);
    while (way == WAIT_QUERY_EVENT && cudaEventQuery(event) == cudaErrorNotReady)
        cudaGetLastError();
    while (way == WAIT_QUERY_STREAM && cudaStreamQuery(first) == cudaErrorNotReady)
        cudaGetLastError();
    if (way == WAIT_DEVICE)
        cudaDeviceSynchronize();
    CHECK_EQ(cudaEventDestroy(event), cudaSuccess); /* legal whatever is pending */
    CHECK_EQ(add(result, memory, 1, 100, then), cudaSuccess);
}

static void every_way_of_waiting_is_an_edge(void)
{
    for (int way = 0; way < WAYS; way++)
        for (uint64_t seed = 0; seed < SEEDS; seed++) {
            emu_reset(seed, (int)(seed % 4) - 1, 1);
            float *memory = (float *)device_memory(400), *result = (float *)device_memory(400), host[100];
            cudaStream_t first = new_stream(), then = new_stream();
            hand_over(way, memory, result, first, then);
            CHECK_EQ(cudaStreamDestroy(first), cudaSuccess);
            CHECK_EQ(cudaStreamDestroy(then), cudaSuccess);
            if (way == WAIT_NONE) {
                CHECK_EQ(emu_findings(report, sizeof report), 1);
                CHECK(strstr(report, "write by cudaMemsetAsync at test_emulation.cc:"));
                CHECK(strstr(report, "and read by add_kernel at test_emulation.cc:"));
                continue;
            }
            CHECK_CLEAN();
            emu_peek(host, result, sizeof host);
            CHECK(host[99] == 1);
        }
}

static void only_what_was_recorded_is_waited_for(void)
{
    emu_reset(21, -1, 1);
    float *memory = (float *)device_memory(400);
    cudaStream_t first = new_stream(), then = new_stream();
    cudaEvent_t event = new_event();
    cudaEventRecord(event, first);
    cudaMemsetAsync(memory, 0, 400, first); /* after the record */
    cudaStreamWaitEvent(then, event, 0);
    cudaMemsetAsync(memory + 50, 1, 4, then);
    CHECK_EQ(emu_findings(NULL, 0), 1);
    emu_reset(21, -1, 1);
    memory = (float *)device_memory(400);
    first = new_stream();
    then = new_stream();
    event = new_event();
    cudaMemsetAsync(memory, 0, 400, first);
    cudaEventRecord(event, first);
    cudaStreamWaitEvent(then, event, 0);
    cudaEventRecord(event, first); /* a later record does not undo that wait */
    cudaMemsetAsync(memory + 50, 1, 4, then);
    CHECK_CLEAN();
    cudaMemsetAsync(memory + 51, 1, 4, first); /* another place, whose last writer is first itself */
    CHECK_CLEAN();
    cudaMemsetAsync(memory + 50, 1, 4, first);
    CHECK_EQ(emu_findings(NULL, 0), 1);
}

static void default_stream_is_ordered_with_blocking_ones(void)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        emu_reset(seed, (int)(seed % 4) - 1, 1);
        cudaStream_t blocking = NULL, free_one = new_stream();
        CHECK_EQ(cudaStreamCreateWithFlags(&blocking, 0), cudaSuccess);
        float *memory = (float *)device_memory(400), host[100];
        cudaMemsetAsync(memory, 0, 400, blocking);
        add(memory, memory, 1, 100, NULL);
        add(memory, memory, 1, 100, blocking);
        add(memory, memory, 1, 100, NULL);
        CHECK_EQ(cudaStreamSynchronize(NULL), cudaSuccess);
        CHECK_CLEAN();
        emu_peek(host, memory, sizeof host);
        CHECK(host[0] == 3);
        add(memory, memory, 1, 100, NULL);
        add(memory, memory, 1, 100, free_one);
        CHECK(emu_findings(NULL, 0) > 0);
    }
}

static void one_seed_is_one_run(void)
{
    uint64_t first[8] = {0}, differ = 0;
    for (int turn = 0; turn < 2; turn++)
        for (uint64_t seed = 0; seed < 8; seed++) {
            emu_reset(seed, 2, 1);
            float *memory[3];
            cudaStream_t streams[3];
            for (int k = 0; k < 3; k++) {
                memory[k] = (float *)device_memory(400);
                streams[k] = new_stream();
            }
            for (int k = 0; k < 30; k++)
                cudaMemsetAsync(memory[k % 3], k, 400, streams[k % 3]);
            CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
            CHECK_EQ(emu_operations(), 30);
            if (turn == 0)
                first[seed] = emu_trace_hash();
            CHECK_EQ(emu_trace_hash(), first[seed]);
            differ += seed > 0 && first[seed] != first[0];
        }
    CHECK(differ >= 12);
}

/* ---- pipelines with slots: what a missing wait does ----------------------------------------- */

/*
 * Units take turns on two slots.  `fill` writes a unit into its slot by one
 * address and `compute` reads it by another; a unit may be filled once the last
 * reader of its slot is done.  All waits are by events; the two places below are
 * the only ones.
 */
static const int pipeline_begin = __LINE__;
static void slot_pipeline(slot *slots, float *source, float *result)
{
    enum { UNITS = 6 };
    cudaStream_t fill = new_stream(), compute = new_stream();
    cudaEvent_t filled[UNITS], read[UNITS];
    for (int u = 0; u < UNITS; u++) {
        filled[u] = new_event();
        read[u] = new_event();
    }
    for (int u = 0; u < UNITS; u++) {
        if (u >= 2)
            cudaStreamWaitEvent(fill, read[u - 2], 0); /* place 1 */
        add(alias(&slots[u % 2], 0), source, (float)u, 500, fill);
        cudaEventRecord(filled[u], fill);
        cudaStreamWaitEvent(compute, filled[u], 0); /* place 2 */
        add(result + 500 * u, alias(&slots[u % 2], 3 - u % 2), 0, 500, compute);
        cudaEventRecord(read[u], compute);
    }
    CHECK_EQ(cudaStreamSynchronize(compute), cudaSuccess);
    CHECK_EQ(cudaStreamSynchronize(fill), cudaSuccess);
}

static const int pipeline_end = __LINE__;

static int wrong_results(const float *result)
{
    float host[3000];
    int wrong = 0;
    emu_peek(host, result, sizeof host);
    for (int i = 0; i < 3000; i++)
        wrong += host[i] != (float)(i / 500);
    return wrong;
}

static int run_slot_pipeline(uint64_t seed)
{
    static float zeros[500];
    emu_reset(seed, (int)(seed % 5) - 1, 1);
    slot slots[2] = {make_slot(0), make_slot(0)};
    float *source = (float *)device_memory(2000), *result = (float *)device_memory(12000);
    emu_poke(source, zeros, sizeof zeros);
    slot_pipeline(slots, source, result);
    int wrong = wrong_results(result);
    CHECK_EQ(leaks_now() > 0, 1);
    return wrong;
}

static void dropped_waits_are_found_on_every_seed(void)
{
    char sites[4096], *line, *rest;
    emu_drop_wait("test_emulation.cc:1"); /* no such place: nothing is dropped */
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        CHECK_EQ(run_slot_pipeline(seed), 0);
        CHECK_CLEAN();
    }
    CHECK(emu_wait_sites(sites, sizeof sites) >= 4);
    int dropped = 0, wrong = 0;
    for (line = strtok_r(sites, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        int place = atoi(strchr(line, ':') + 1);
        if (place < pipeline_begin || place > pipeline_end || !strstr(line, "cudaStreamWaitEvent"))
            continue;
        dropped++;
        emu_drop_wait(line);
        for (uint64_t seed = 0; seed < SEEDS; seed++) {
            wrong += run_slot_pipeline(seed) > 0;
            CHECK_FOUND("unordered: ");
        }
    }
    emu_drop_wait(NULL);
    CHECK_EQ(dropped, 2);
    CHECK(wrong > 0 && wrong < dropped * SEEDS); /* by values alone some would pass */
}

static void dropped_host_waits_are_found(void)
{
    char sites[4096], site[64] = "";
    for (int drop = 0; drop < 2; drop++)
        for (uint64_t seed = 0; seed < SEEDS; seed++) {
            emu_drop_wait(drop ? site : NULL);
            emu_reset(seed, (int)(seed % 4) - 1, 1);
            cudaStream_t stream = new_stream();
            cudaEvent_t event = new_event();
            void *memory = device_memory(400), *pinned = pinned_memory(400);
            cudaMemsetAsync(memory, 0, 400, stream);
            cudaMemcpyAsync(pinned, memory, 400, cudaMemcpyDeviceToHost, stream);
            cudaEventRecord(event, stream);
            snprintf(site, sizeof site, "test_emulation.cc:%d", __LINE__ + 1);
            CHECK_EQ(cudaEventSynchronize(event), cudaSuccess);
            CU_HOST_READ(pinned, 400);
            if (drop)
                CHECK_FOUND("write by cudaMemcpyAsync");
            else
                CHECK_CLEAN();
        }
    emu_drop_wait(NULL);
    emu_wait_sites(sites, sizeof sites);
    CHECK(strstr(sites, site) != NULL);
}

/* ---- threads, deadlocks, faults ----------------------------------------------------------- */

static pthread_barrier_t both;

static void *other_thread(void *shared)
{
    void **memory = (void **)shared;
    cudaStream_t stream = new_stream();
    for (int k = 0; k < 50; k++) {
        cudaMemsetAsync(memory[1], k, 4000, stream);
        CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        CU_HOST_WRITE(memory[2], 4); /* both threads: ordered by means that cannot be seen */
        pthread_barrier_wait(&both);
    }
    return NULL;
}

static void two_host_threads(void)
{
    for (int protect = 0; protect < 2; protect++) {
        pthread_t thread;
        emu_protect(protect);
        emu_reset(30, 1, 1);
        void *memory[3] = {device_memory(4000), device_memory(4000), pinned_memory(4)};
        cudaStream_t stream = new_stream();
        pthread_barrier_init(&both, NULL, 2);
        CHECK_EQ(pthread_create(&thread, NULL, other_thread, memory), 0);
        for (int k = 0; k < 50; k++) {
            cudaMemsetAsync(memory[0], k, 4000, stream);
            pthread_barrier_wait(&both);
            CU_HOST_WRITE(memory[2], 4);
            CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
        }
        pthread_join(thread, NULL);
        pthread_barrier_destroy(&both);
        CHECK_CLEAN();
    }
    emu_protect(0);
}

static void what_is_told_to_fail_fails(void)
{
    void *memory = NULL;
    emu_reset(31, 0, 1);
    emu_fail_next("cudaMalloc", 2, cudaErrorMemoryAllocation);
    emu_fail_next("cuMemCreate", 1, CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_EQ(emu_faults_left(), 2);
    CHECK_EQ(cudaMalloc(&memory, 10), cudaSuccess);
    CHECK_EQ(cudaMalloc(&memory, 10), cudaErrorMemoryAllocation);
    CHECK_EQ(cudaMalloc(&memory, 10), cudaSuccess);
    CUmemAllocationProp prop = pinned_on(0);
    CUmemGenericAllocationHandle handle = 0;
    CHECK_EQ(cuMemCreate(&handle, STEP, &prop, 0), CUDA_ERROR_OUT_OF_MEMORY);
    CHECK_EQ(emu_faults_left(), 0);
    CHECK_EQ(leaks_now(), 2);
}

static void machines_without(void)
{
    int value = -1;
    void *memory = &value;
    emu_no_driver(1);
    emu_reset(32, 0, 1);
    CHECK_EQ(cudaDriverGetVersion(&value), cudaSuccess);
    CHECK_EQ(value, 0);
    CHECK_EQ(cudaRuntimeGetVersion(&value), cudaSuccess);
    CHECK_EQ(value, CUDART_VERSION);
    CHECK_EQ(cudaGetDeviceCount(&value), cudaErrorInsufficientDriver);
    CHECK_EQ(cudaMalloc(&memory, 4), cudaErrorInsufficientDriver);
    CHECK(memory == &value);
    CHECK_EQ(cudaGetLastError(), cudaErrorInsufficientDriver);
    CHECK_EQ(cudaGetLastError(), cudaErrorInsufficientDriver);
    emu_no_driver(0);
    emu_driver_version(12080);
    CHECK_EQ(cudaDriverGetVersion(&value), cudaSuccess);
    CHECK_EQ(value, 12080);
    CHECK_EQ(cudaGetDeviceCount(&value), cudaErrorInsufficientDriver);
    emu_driver_version(13000);
    emu_set_devices(0);
    CHECK_EQ(cudaGetDeviceCount(&value), cudaErrorNoDevice);
    emu_set_devices(3);
    emu_reset(32, 0, 1);
    CHECK_EQ(cudaGetDeviceCount(&value), cudaSuccess);
    CHECK_EQ(value, 3);
    CHECK_EQ(cudaSetDevice(3), cudaErrorInvalidDevice);
    emu_set_attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 0);
    CUmemAllocationProp prop = pinned_on(0);
    CUmemGenericAllocationHandle handle = 0;
    CHECK_EQ(cuMemCreate(&handle, STEP, &prop, 0), CUDA_ERROR_NOT_SUPPORTED);
    emu_set_attribute(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1);
    emu_set_devices(8);
}

static void driver_functions_are_found(void)
{
    typedef CUresult (*create_function)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *,
                                        unsigned long long);
    cudaDriverEntryPointQueryResult found;
    void *function = NULL;
    emu_reset(33, 0, 1);
    CHECK_EQ(cudaGetDriverEntryPointByVersion("cuMemCreate", &function, 13000, cudaEnableDefault, &found), cudaSuccess);
    CHECK_EQ(found, cudaDriverEntryPointSuccess);
    CHECK((create_function)function == cuMemCreate);
    CHECK_EQ(cudaGetDriverEntryPointByVersion("cuMemCreate", &function, 9000, cudaEnableDefault, &found), cudaSuccess);
    CHECK_EQ(found, cudaDriverEntryPointVersionNotSufficent);
    CHECK_EQ(cudaGetDriverEntryPointByVersion("cuNothing", &function, 13000, cudaEnableDefault, &found), cudaSuccess);
    CHECK_EQ(found, cudaDriverEntryPointSymbolNotFound);
    CHECK(function == NULL);
}

int main(void)
{
    RUN(kernels_compute);
    RUN(warps_exchange);
    RUN(missing_barriers_show);
    RUN(shared_memory_is_garbage);
    RUN(atomics_count);
    RUN(launches_are_checked);
    RUN(virtual_memory_has_rules);
    RUN(aliases_are_one_memory);
    RUN(memory_is_garbage_and_counted);
    RUN(freeing_in_use_is_found);
    RUN(memory_given_back_has_no_past);
    RUN(host_touching_device_memory_dies);
    RUN(copies_follow_the_kind_of_memory);
    RUN(pinned_memory_is_read_when_the_copy_runs);
    RUN(rows_are_copied);
    RUN(every_way_of_waiting_is_an_edge);
    RUN(only_what_was_recorded_is_waited_for);
    RUN(default_stream_is_ordered_with_blocking_ones);
    RUN(one_seed_is_one_run);
    RUN(dropped_waits_are_found_on_every_seed);
    RUN(dropped_host_waits_are_found);
    RUN(two_host_threads);
    RUN(what_is_told_to_fail_fails);
    RUN(machines_without);
    RUN(driver_functions_are_found);
    emu_reset(0, 0, 1);
    DONE();
}
