/*
 * Captures and graphs of the emulated CUDA runtime: replays do what the calls would have done, are ordered as they
 * were captured and no more, and what CUDA forbids in a capture makes it void.
 */
#include "emulated.h"

#include <pthread.h>

#define SEEDS 60
#define STREAMS 3
#define BUFFERS 4
#define CELLS 100

__global__ void mix_kernel(float *to, const float *from, float value)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < CELLS)
        to[i] = to[i] * 0.5f + from[i] + value;
}

static cudaError_t mix(float *to, const float *from, float value, cudaStream_t stream)
{
    return CU_LAUNCH(mix_kernel, 2, 64, stream, CU_READS(from, CELLS * 4) CU_WRITES(to, CELLS * 4), to, from, value);
}

static cudaGraphExec_t end_capture(cudaStream_t stream)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    CHECK_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    CHECK_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
    CHECK_EQ(cudaGraphDestroy(graph), cudaSuccess);
    return exec;
}

/* ---- replays -------------------------------------------------------------------- */

typedef struct machine {
    cudaStream_t streams[STREAMS];
    float *buffers[BUFFERS];
} machine;

static void open_machine(machine *m, uint64_t seed)
{
    static const int eager[] = {0, 3, -1};
    float start[CELLS];
    emu_reset(seed, eager[seed % 3], 1);
    for (int s = 0; s < STREAMS; s++)
        m->streams[s] = new_stream();
    for (int b = 0; b < BUFFERS; b++) {
        m->buffers[b] = (float *)device_memory(sizeof start);
        for (int i = 0; i < CELLS; i++)
            start[i] = value_of(b, i);
        emu_poke(m->buffers[b], start, sizeof start);
    }
}

static void close_machine(machine *m)
{
    CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (int s = 0; s < STREAMS; s++)
        CHECK_EQ(cudaStreamDestroy(m->streams[s]), cudaSuccess);
    for (int b = 0; b < BUFFERS; b++)
        CHECK_EQ(cudaFree(m->buffers[b]), cudaSuccess);
    CHECK_CLEAN();
    CHECK_EQ(emu_leaks(report, sizeof report), 0);
}

static void order(cudaStream_t before, cudaStream_t after)
{
    cudaEvent_t event = new_event();
    CHECK_EQ(cudaEventRecord(event, before), cudaSuccess);
    CHECK_EQ(cudaStreamWaitEvent(after, event, 0), cudaSuccess);
    CHECK_EQ(cudaEventDestroy(event), cudaSuccess);
}

/* A program of the seed's: operations on all streams, each ordered after the one before by an event if it is elsewhere. */
static void play(const machine *m, uint64_t seed)
{
    uint64_t state = seed * 77 + 1;
    int last = 0;
    for (int s = 1; s < STREAMS; s++)
        order(m->streams[0], m->streams[s]);
    for (int k = 0; k < 12; k++) {
        int stream = (int)(testing_random(&state) % STREAMS), to = (int)(testing_random(&state) % BUFFERS);
        int from = (to + 1 + (int)(testing_random(&state) % (BUFFERS - 1))) % BUFFERS;
        if (stream != last)
            order(m->streams[last], m->streams[stream]);
        last = stream;
        if (k % 4 == 3)
            CHECK_EQ(cudaMemcpyAsync(m->buffers[to], m->buffers[from], CELLS * 2, cudaMemcpyDeviceToDevice,
                                     m->streams[stream]), cudaSuccess);
        else
            CHECK_EQ(mix(m->buffers[to], m->buffers[from], (float)k, m->streams[stream]), cudaSuccess);
    }
    for (int s = 1; s < STREAMS; s++)
        order(m->streams[s], m->streams[0]);
}

static void read_all(const machine *m, float *out)
{
    for (int b = 0; b < BUFFERS; b++)
        emu_peek(out + b * CELLS, m->buffers[b], CELLS * 4);
}

static void replays_are_the_calls(void)
{
    enum { TIMES = 4 };
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        static float wanted[BUFFERS * CELLS], got[BUFFERS * CELLS], untouched[BUFFERS * CELLS];
        machine m;
        open_machine(&m, seed);
        for (int k = 0; k < TIMES; k++)
            play(&m, seed);
        read_all(&m, wanted);
        close_machine(&m);

        open_machine(&m, seed + 1);
        read_all(&m, untouched);
        CHECK_EQ(cudaStreamBeginCapture(m.streams[0], cudaStreamCaptureModeGlobal), cudaSuccess);
        play(&m, seed);
        cudaGraphExec_t exec = end_capture(m.streams[0]);
        read_all(&m, got);
        CHECK(memcmp(got, untouched, sizeof got) == 0);
        play(&m, seed);
        for (int k = 1; k < TIMES; k++)
            CHECK_EQ(cudaGraphLaunch(exec, m.streams[0]), cudaSuccess);
        CHECK_EQ(cudaGraphExecDestroy(exec), cudaSuccess); /* what was launched still runs */
        read_all(&m, got);
        CHECK(memcmp(got, wanted, sizeof got) == 0);
        close_machine(&m);
    }
}

/* Pinned memory is read at every launch, kernels' arguments once. */
static void what_a_launch_reads(void)
{
    machine m;
    int *pinned, got = 0;
    open_machine(&m, 3);
    CHECK_EQ(cudaMallocHost((void **)&pinned, sizeof *pinned), cudaSuccess);
    CHECK_EQ(cudaStreamBeginCapture(m.streams[0], cudaStreamCaptureModeGlobal), cudaSuccess);
    CHECK_EQ(cudaMemcpyAsync(m.buffers[0], pinned, sizeof *pinned, cudaMemcpyHostToDevice, m.streams[0]), cudaSuccess);
    cudaGraphExec_t exec = end_capture(m.streams[0]);
    for (int k = 1; k < 4; k++) {
        CU_HOST_WRITE(pinned, sizeof *pinned);
        *pinned = 5 * k;
        CHECK_EQ(cudaGraphLaunch(exec, m.streams[1]), cudaSuccess);
        CHECK_EQ(cudaStreamSynchronize(m.streams[1]), cudaSuccess);
        emu_peek(&got, m.buffers[0], sizeof got);
        CHECK_EQ(got, 5 * k);
    }
    CHECK_CLEAN();
    CHECK_EQ(cudaGraphLaunch(exec, m.streams[1]), cudaSuccess);
    CU_HOST_WRITE(pinned, sizeof *pinned);
    CHECK_FOUND("unordered");
    emu_reset(0, 0, 1);
}

/* ---- order ------------------------------------------------------------------------- */

/* Two branches that write one buffer: with a wait in between, or without. */
static void branches(const machine *m, int joined)
{
    order(m->streams[0], m->streams[1]);
    CHECK_EQ(mix(m->buffers[0], m->buffers[1], 1, m->streams[0]), cudaSuccess);
    if (joined)
        order(m->streams[0], m->streams[1]);
    CHECK_EQ(mix(m->buffers[0], m->buffers[2], 2, m->streams[1]), cudaSuccess);
    order(m->streams[1], m->streams[0]);
}

static void order_in_a_graph_is_checked(void)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++)
        for (int joined = 0; joined <= 1; joined++) {
            machine m;
            open_machine(&m, seed);
            CHECK_EQ(cudaStreamBeginCapture(m.streams[0], cudaStreamCaptureModeThreadLocal), cudaSuccess);
            branches(&m, joined);
            cudaGraphExec_t exec = end_capture(m.streams[0]);
            CHECK_CLEAN();
            CHECK_EQ(cudaGraphLaunch(exec, m.streams[2]), cudaSuccess);
            if (joined)
                CHECK_CLEAN();
            else
                CHECK_FOUND("unordered: write by mix_kernel");
            CHECK_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
            if (joined)
                close_machine(&m);
        }
    emu_reset(0, 0, 1);
}

static void order_around_a_graph_is_checked(void)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++)
        for (int ordered = 0; ordered <= 1; ordered++) {
            machine m;
            open_machine(&m, seed);
            CHECK_EQ(cudaStreamBeginCapture(m.streams[0], cudaStreamCaptureModeGlobal), cudaSuccess);
            branches(&m, 1);
            cudaGraphExec_t exec = end_capture(m.streams[0]);
            CHECK_EQ(cudaGraphLaunch(exec, m.streams[0]), cudaSuccess);
            CHECK_EQ(cudaGraphLaunch(exec, m.streams[1]), cudaSuccess); /* behind the first launch, wherever it is */
            CHECK_CLEAN();
            if (ordered)
                order(m.streams[1], m.streams[2]);
            CHECK_EQ(mix(m.buffers[3], m.buffers[0], 3, m.streams[2]), cudaSuccess);
            if (ordered)
                CHECK_CLEAN();
            else
                CHECK_FOUND("unordered");
            CHECK_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
            if (ordered)
                close_machine(&m);
        }
    emu_reset(0, 0, 1);
}

static void memory_of_a_graph_must_stay(void)
{
    machine m;
    open_machine(&m, 1);
    CHECK_EQ(cudaStreamBeginCapture(m.streams[0], cudaStreamCaptureModeGlobal), cudaSuccess);
    branches(&m, 1);
    cudaGraphExec_t exec = end_capture(m.streams[0]);
    CHECK_EQ(cudaGraphLaunch(exec, m.streams[0]), cudaSuccess);
    CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
    CHECK_EQ(cudaFree(m.buffers[2]), cudaSuccess);
    CHECK_CLEAN();
    CHECK_EQ(cudaGraphLaunch(exec, m.streams[0]), cudaErrorIllegalAddress);
    CHECK_FOUND("outside of every allocation");
    emu_reset(0, 0, 1);
}

/* ---- misuse -------------------------------------------------------------------------- */

/* What makes a capture on the first stream void, and with which error. */
typedef struct misuse {
    cudaError_t (*call)(machine *m);
    cudaError_t error;
} misuse;

static cudaEvent_t earlier; /* recorded before the capture */

static cudaError_t synchronize_stream(machine *m)
{
    return cudaStreamSynchronize(m->streams[0]);
}

static cudaError_t query_stream(machine *m)
{
    return cudaStreamQuery(m->streams[0]);
}

static cudaError_t synchronize_device(machine *m)
{
    (void)m;
    return cudaDeviceSynchronize();
}

static cudaError_t record(machine *m)
{
    static cudaEvent_t event;
    event = new_event();
    CHECK_EQ(cudaEventRecord(event, m->streams[0]), cudaSuccess);
    earlier = event;
    return cudaSuccess;
}

static cudaError_t query_captured_event(machine *m)
{
    record(m);
    return cudaEventQuery(earlier);
}

static cudaError_t synchronize_captured_event(machine *m)
{
    record(m);
    return cudaEventSynchronize(earlier);
}

static cudaError_t query_other_event(machine *m)
{
    (void)m;
    return cudaEventQuery(earlier);
}

static cudaError_t wait_for_what_is_not_captured(machine *m)
{
    return cudaStreamWaitEvent(m->streams[0], earlier, 0);
}

static cudaError_t allocate(machine *m)
{
    void *memory;
    (void)m;
    return cudaMalloc(&memory, 8);
}

static cudaError_t allocate_pinned(machine *m)
{
    void *memory;
    (void)m;
    return cudaMallocHost(&memory, 8);
}

static cudaError_t give_back(machine *m)
{
    return cudaFree(m->buffers[3]);
}

static cudaError_t merge(machine *m)
{
    cudaGraph_t graph;
    CHECK_EQ(cudaStreamBeginCapture(m->streams[2], cudaStreamCaptureModeGlobal), cudaSuccess);
    record(m);
    cudaError_t error = cudaStreamWaitEvent(m->streams[2], earlier, 0);
    CHECK_EQ(cudaGetLastError(), error);
    CHECK_EQ(cudaStreamEndCapture(m->streams[2], &graph), cudaErrorStreamCaptureInvalidated);
    return error;
}

static cudaError_t end_elsewhere(machine *m)
{
    cudaGraph_t graph;
    order(m->streams[0], m->streams[1]);
    return cudaStreamEndCapture(m->streams[1], &graph);
}

static const misuse misuses[] = {
    {synchronize_stream, cudaErrorStreamCaptureUnsupported},
    {query_stream, cudaErrorStreamCaptureUnsupported},
    {synchronize_device, cudaErrorStreamCaptureUnsupported},
    {query_captured_event, cudaErrorCapturedEvent},
    {synchronize_captured_event, cudaErrorCapturedEvent},
    {query_other_event, cudaErrorStreamCaptureUnsupported},
    {wait_for_what_is_not_captured, cudaErrorStreamCaptureIsolation},
    {allocate, cudaErrorStreamCaptureUnsupported},
    {allocate_pinned, cudaErrorStreamCaptureUnsupported},
    {give_back, cudaErrorStreamCaptureUnsupported},
    {merge, cudaErrorStreamCaptureMerge},
    {end_elsewhere, cudaErrorStreamCaptureUnmatched},
};

static void misuse_makes_a_capture_void(void)
{
    for (size_t k = 0; k < sizeof misuses / sizeof *misuses; k++) {
        machine m;
        cudaGraph_t graph;
        cudaStreamCaptureStatus status;
        open_machine(&m, k);
        CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
        record(&m);
        CHECK_EQ(cudaStreamBeginCapture(m.streams[0], cudaStreamCaptureModeGlobal), cudaSuccess);
        CHECK_EQ(mix(m.buffers[0], m.buffers[1], 1, m.streams[0]), cudaSuccess);
        cudaError_t error = misuses[k].call(&m);
        if (error != misuses[k].error)
            fprintf(stderr, "misuse %zu: %s\n", k, cudaGetErrorName(error));
        CHECK_EQ(error, misuses[k].error);
        CHECK(cudaGetLastError() != cudaSuccess);
        CHECK_EQ(cudaStreamIsCapturing(m.streams[0], &status), cudaSuccess);
        CHECK_EQ(status, cudaStreamCaptureStatusInvalidated);
        CHECK_EQ(mix(m.buffers[0], m.buffers[1], 1, m.streams[0]), cudaErrorStreamCaptureInvalidated);
        CHECK_EQ(cudaStreamEndCapture(m.streams[0], &graph), cudaErrorStreamCaptureInvalidated);
        CHECK(graph == NULL);
        CHECK_EQ(cudaStreamIsCapturing(m.streams[0], &status), cudaSuccess);
        CHECK_EQ(status, cudaStreamCaptureStatusNone);
        cudaGetLastError();
        CHECK_EQ(mix(m.buffers[0], m.buffers[1], 1, m.streams[0]), cudaSuccess); /* the stream is as before */
        CHECK_EQ(cudaStreamSynchronize(m.streams[0]), cudaSuccess);
        CHECK_CLEAN();
    }
    emu_reset(0, 0, 1);
}

static void ends_of_captures_are_checked(void)
{
    machine m;
    cudaGraph_t graph;
    open_machine(&m, 5);
    CHECK_EQ(cudaStreamBeginCapture(NULL, cudaStreamCaptureModeGlobal), cudaErrorStreamCaptureUnsupported);
    CHECK_EQ(cudaStreamEndCapture(m.streams[0], &graph), cudaErrorIllegalState);
    CHECK_EQ(cudaStreamBeginCapture(m.streams[0], cudaStreamCaptureModeGlobal), cudaSuccess);
    CHECK_EQ(cudaStreamBeginCapture(m.streams[0], cudaStreamCaptureModeGlobal), cudaErrorIllegalState);
    cudaGetLastError();
    order(m.streams[0], m.streams[1]);
    CHECK_EQ(mix(m.buffers[0], m.buffers[1], 1, m.streams[1]), cudaSuccess);
    CHECK_EQ(cudaStreamEndCapture(m.streams[0], &graph), cudaErrorStreamCaptureUnjoined);
    CHECK_EQ(cudaStreamBeginCapture(m.streams[1], cudaStreamCaptureModeGlobal), cudaSuccess); /* it was let go */
    cudaGraphExec_t empty = end_capture(m.streams[1]);
    CHECK_EQ(cudaGraphLaunch(empty, m.streams[0]), cudaSuccess);
    CHECK_EQ(cudaGraphExecDestroy(empty), cudaSuccess);
    record(&m);
    CHECK_EQ(cudaStreamBeginCapture(m.streams[0], cudaStreamCaptureModeGlobal), cudaSuccess);
    record(&m);
    empty = end_capture(m.streams[0]);
    CHECK_EQ(cudaGraphExecDestroy(empty), cudaSuccess);
    CHECK_EQ(cudaStreamWaitEvent(m.streams[1], earlier, 0), cudaErrorCapturedEvent); /* of a capture that is over */
    CHECK_CLEAN();
    CHECK_EQ(cudaStreamBeginCapture(m.streams[0], cudaStreamCaptureModeGlobal), cudaSuccess);
    CHECK(emu_leaks(report, sizeof report) > 0 && strstr(report, "capture\n"));
    emu_reset(0, 0, 1);
}

/* The default stream and a capture on a stream that is ordered with it. */
static void the_default_stream_is_kept_out(void)
{
    machine m;
    cudaStream_t blocking = NULL;
    cudaStreamCaptureStatus status;
    cudaGraph_t graph;
    open_machine(&m, 6);
    CHECK_EQ(cudaStreamCreateWithFlags(&blocking, cudaStreamDefault), cudaSuccess);
    CHECK_EQ(cudaStreamBeginCapture(m.streams[0], cudaStreamCaptureModeGlobal), cudaSuccess);
    CHECK_EQ(mix(m.buffers[0], m.buffers[1], 1, NULL), cudaSuccess);
    CHECK_EQ(cudaGraphExecDestroy(end_capture(m.streams[0])), cudaSuccess);
    CHECK_EQ(cudaStreamBeginCapture(blocking, cudaStreamCaptureModeGlobal), cudaSuccess);
    CHECK_EQ(cudaStreamIsCapturing(NULL, &status), cudaErrorStreamCaptureImplicit);
    CHECK_EQ(cudaGetLastError(), cudaErrorStreamCaptureImplicit);
    CHECK_EQ(mix(m.buffers[0], m.buffers[1], 1, blocking), cudaSuccess); /* asking is allowed */
    CHECK_EQ(mix(m.buffers[0], m.buffers[1], 1, NULL), cudaErrorStreamCaptureImplicit);
    CHECK_EQ(cudaStreamEndCapture(blocking, &graph), cudaErrorStreamCaptureInvalidated);
    CHECK_CLEAN();
    emu_reset(0, 0, 1);
}

typedef struct other_thread {
    machine *m;
    cudaStreamCaptureMode mode;
    cudaError_t found, ended;
} other_thread;

static void *ask_from_outside(void *argument)
{
    other_thread *other = (other_thread *)argument;
    cudaGraph_t graph;
    cudaThreadExchangeStreamCaptureMode(&other->mode);
    other->ended = cudaStreamEndCapture(other->m->streams[0], &graph);
    other->found = cudaEventQuery(earlier);
    return NULL;
}

static void threads_have_modes(void)
{
    static const cudaStreamCaptureMode modes[] = {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal,
                                                  cudaStreamCaptureModeRelaxed};
    for (int captured = 0; captured < 3; captured++)
        for (int asks = 0; asks < 3; asks++) {
            machine m;
            pthread_t thread;
            open_machine(&m, 7);
            CHECK_EQ(cudaDeviceSynchronize(), cudaSuccess);
            earlier = new_event();
            CHECK_EQ(cudaStreamBeginCapture(m.streams[0], modes[captured]), cudaSuccess);
            other_thread other = {&m, modes[asks], cudaSuccess, cudaSuccess};
            CHECK_EQ(pthread_create(&thread, NULL, ask_from_outside, &other), 0);
            pthread_join(thread, NULL);
            CHECK_EQ(other.ended, modes[captured] == cudaStreamCaptureModeRelaxed ? cudaSuccess
                                                                                  : cudaErrorStreamCaptureWrongThread);
            int kept_out = modes[captured] == cudaStreamCaptureModeGlobal && modes[asks] == cudaStreamCaptureModeGlobal;
            CHECK_EQ(other.found, kept_out ? cudaErrorStreamCaptureUnsupported : cudaSuccess);
            CHECK_CLEAN();
        }
    emu_reset(0, 0, 1);
}

static void pageable_memory_is_found(void)
{
    machine m;
    int value = 1;
    open_machine(&m, 8);
    CHECK_EQ(cudaStreamBeginCapture(m.streams[0], cudaStreamCaptureModeGlobal), cudaSuccess);
    CHECK_EQ(cudaMemcpyAsync(m.buffers[0], &value, sizeof value, cudaMemcpyHostToDevice, m.streams[0]), cudaSuccess);
    CHECK_FOUND("pageable memory in a capture");
    emu_reset(0, 0, 1);
}

int main(void)
{
    RUN(replays_are_the_calls);
    RUN(what_a_launch_reads);
    RUN(order_in_a_graph_is_checked);
    RUN(order_around_a_graph_is_checked);
    RUN(memory_of_a_graph_must_stay);
    RUN(misuse_makes_a_capture_void);
    RUN(ends_of_captures_are_checked);
    RUN(the_default_stream_is_kept_out);
    RUN(threads_have_modes);
    RUN(pageable_memory_is_found);
    emu_reset(0, 0, 1);
    DONE();
}
