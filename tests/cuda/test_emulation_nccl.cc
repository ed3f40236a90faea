/*
 * The emulated NCCL itself: what collectives compute, that misuse and mismatches
 * are found, what failures look like to every rank, and that a missing wait
 * around a collective is found on every seed.  Ranks are threads.
 */
#include "emu_nccl.h"
#include "emulated.h"

#include <pthread.h>
#include <sched.h>

#define STEP ((size_t)2 << 20)
#define SEEDS 25
#define MOST_RANKS 4

/* ---- ranks as threads --------------------------------------------------------------- */

typedef struct rank_state {
    int rank, ranks, blocking, how;
    ncclUniqueId id;
    ncclComm_t comm;
    cudaStream_t stream;
    void (*work)(struct rank_state *);
} rank_state;

static pthread_barrier_t all_ranks;

/* Polls until a non-blocking call is over. */
static ncclResult_t settled(ncclComm_t comm, ncclResult_t result)
{
    while (result == ncclInProgress) {
        CHECK_EQ(ncclCommGetAsyncError(comm, &result), ncclSuccess);
        sched_yield();
    }
    return result;
}

static ncclResult_t join_clique(rank_state *state)
{
    ncclConfig_t config;
    memset(&config, 0, sizeof config);
    config.size = sizeof config;
    config.magic = EMU_NCCL_CONFIG_MAGIC;
    config.version = EMU_NCCL_VERSION;
    config.blocking = state->blocking;
    ncclResult_t result = ncclCommInitRankConfig(&state->comm, state->ranks, state->id, state->rank, &config);
    CHECK(state->blocking || result == ncclInProgress);
    return settled(state->comm, result);
}

static void *rank_thread(void *argument)
{
    rank_state *state = (rank_state *)argument;
    CHECK_EQ(cudaSetDevice(state->rank), cudaSuccess);
    CHECK_EQ(join_clique(state), ncclSuccess);
    state->stream = new_stream();
    state->work(state);
    return NULL;
}

static void run_ranks(int ranks, int blocking, int how, void (*work)(rank_state *))
{
    pthread_t threads[MOST_RANKS];
    rank_state states[MOST_RANKS];
    ncclUniqueId id;
    CHECK_EQ(ncclGetUniqueId(&id), ncclSuccess);
    pthread_barrier_init(&all_ranks, NULL, (unsigned)ranks);
    for (int r = 0; r < ranks; r++) {
        rank_state state = {r, ranks, blocking, how, id, NULL, NULL, work};
        states[r] = state;
        CHECK_EQ(pthread_create(&threads[r], NULL, rank_thread, &states[r]), 0);
    }
    for (int r = 0; r < ranks; r++)
        pthread_join(threads[r], NULL);
    pthread_barrier_destroy(&all_ranks);
}

static void leave(rank_state *state)
{
    CHECK_EQ(cudaStreamSynchronize(state->stream), cudaSuccess);
    CHECK_EQ(settled(state->comm, ncclCommFinalize(state->comm)), ncclSuccess);
    CHECK_EQ(ncclCommDestroy(state->comm), ncclSuccess);
    CHECK_EQ(cudaStreamDestroy(state->stream), cudaSuccess);
}

/* ---- what they compute ---------------------------------------------------------------- */

enum { COUNT = 37 };

static void fill_inputs(const rank_state *state, float *device, int count)
{
    float host[MOST_RANKS * COUNT];
    for (int i = 0; i < count; i++)
        host[i] = value_of(state->rank, i);
    CHECK_EQ(cudaMemcpyAsync(device, host, (size_t)count * 4, cudaMemcpyHostToDevice, state->stream), cudaSuccess);
}

static void collectives_of_a_rank(rank_state *state)
{
    int ranks = state->ranks, rank = state->rank, all = ranks * COUNT;
    float *send = (float *)device_memory((size_t)all * 4), *receive = (float *)device_memory((size_t)all * 4);
    float host[MOST_RANKS * COUNT];
    float *mine = send + rank * COUNT;
    fill_inputs(state, send, all);
    CHECK_EQ(settled(state->comm, ncclAllReduce(send, receive, (size_t)all, ncclFloat32, ncclSum, state->comm,
                                                state->stream)), ncclSuccess);
    CHECK_EQ(cudaMemcpyAsync(host, receive, (size_t)all * 4, cudaMemcpyDeviceToHost, state->stream), cudaSuccess);
    for (int i = 0; i < all; i++)
        CHECK(host[i] == ring_sum(ranks, i / COUNT, i));
    CHECK_EQ(settled(state->comm, ncclReduceScatter(send, mine, COUNT, ncclFloat32, ncclSum, state->comm,
                                                    state->stream)), ncclSuccess);
    CHECK_EQ(settled(state->comm, ncclAllGather(mine, send, COUNT, ncclFloat32, state->comm, state->stream)),
             ncclSuccess);
    CHECK_EQ(cudaMemcpyAsync(host, send, (size_t)all * 4, cudaMemcpyDeviceToHost, state->stream), cudaSuccess);
    for (int i = 0; i < all; i++)
        CHECK(host[i] == ring_sum(ranks, i / COUNT, i));
    fill_inputs(state, send, COUNT);
    CHECK_EQ(settled(state->comm, ncclBroadcast(send, send, COUNT, ncclFloat32, ranks - 1, state->comm,
                                                state->stream)), ncclSuccess);
    CHECK_EQ(cudaMemcpyAsync(host, send, COUNT * 4, cudaMemcpyDeviceToHost, state->stream), cudaSuccess);
    for (int i = 0; i < COUNT; i++)
        CHECK(host[i] == value_of(ranks - 1, i));
    CHECK_EQ(cudaFree(send), cudaSuccess);
    CHECK_EQ(cudaFree(receive), cudaSuccess);
    leave(state);
}

static void collectives_compute(void)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++)
        for (int ranks = 1; ranks <= MOST_RANKS; ranks++) {
            emu_reset(seed, (int)(seed % 4) - 1, 1);
            run_ranks(ranks, (int)(seed & 1), 0, collectives_of_a_rank);
            CHECK_CLEAN();
            CHECK_EQ(emu_leaks(report, sizeof report), 0);
        }
    int differ = 0;
    for (int i = 0; i < COUNT; i++) /* code that expects rank order would notice */
        differ += ring_sum(3, 0, i) != ring_sum(3, 2, i);
    CHECK(differ > 0);
}

static void bfloat_sum_of_a_rank(rank_state *state)
{
    uint16_t host[4], one = zc_float_to_bf16(1), tiny = zc_float_to_bf16(1.0f / 512);
    uint16_t *memory = (uint16_t *)device_memory(sizeof host);
    for (int k = 0; k < 4; k++)
        host[k] = state->rank == 1 ? one : tiny;
    CHECK_EQ(cudaMemcpyAsync(memory, host, sizeof host, cudaMemcpyHostToDevice, state->stream), cudaSuccess);
    CHECK_EQ(ncclAllReduce(memory, memory, 4, ncclBfloat16, ncclSum, state->comm, state->stream), ncclSuccess);
    CHECK_EQ(cudaMemcpyAsync(host, memory, sizeof host, cudaMemcpyDeviceToHost, state->stream), cudaSuccess);
    /* 1 + 1/512 is 1 in bf16 each time; the one slice that rank 1 owns adds the small ones first */
    CHECK_EQ(host[0], one);
    CHECK_EQ(host[1], zc_float_to_bf16(zc_bf16_to_float(zc_float_to_bf16(3.0f / 512)) + 1));
    CHECK(host[1] != one);
    leave(state);
}

static void narrow_types_are_rounded_at_each_hop(void)
{
    emu_reset(1, 0, 1);
    run_ranks(4, 1, 0, bfloat_sum_of_a_rank);
    CHECK_CLEAN();
}

/* Everybody sends to the next and receives from the one before, on two streams of one group. */
static void ring_of_a_rank(rank_state *state)
{
    int next = (state->rank + 1) % state->ranks, before = (state->rank + state->ranks - 1) % state->ranks;
    float *out = (float *)device_memory(400), *in = (float *)device_memory(400), host[100];
    cudaStream_t other = new_stream();
    fill_inputs(state, out, 100);
    CHECK_EQ(ncclGroupStart(), ncclSuccess);
    CHECK_EQ(ncclSend(out, 100, ncclFloat32, next, state->comm, state->stream), ncclSuccess);
    CHECK_EQ(ncclRecv(in, 100, ncclFloat32, before, state->comm, other), ncclSuccess);
    CHECK_EQ(settled(state->comm, ncclGroupEnd()), ncclSuccess);
    CHECK_EQ(cudaMemsetAsync(out, 0, 400, other), cudaSuccess); /* all streams of a group are behind all of it */
    CHECK_EQ(cudaMemcpyAsync(host, in, 400, cudaMemcpyDeviceToHost, state->stream), cudaSuccess);
    for (int i = 0; i < 100; i++)
        CHECK(host[i] == value_of(before, i));
    CHECK_EQ(cudaStreamSynchronize(other), cudaSuccess);
    CHECK_EQ(cudaStreamDestroy(other), cudaSuccess);
    leave(state);
}

static void grouped_sends_and_receives(void)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++)
        for (int ranks = 1; ranks <= MOST_RANKS; ranks++) {
            emu_reset(seed, (int)(seed % 4) - 1, 1);
            run_ranks(ranks, (int)(seed & 1), 0, ring_of_a_rank);
            CHECK_CLEAN();
        }
}

/* ---- misuse ------------------------------------------------------------------------------ */

static void overlaps_of_a_rank(rank_state *state)
{
    float *memory = (float *)device_memory(4000);
    ncclComm_t comm = state->comm;
    CHECK_EQ(ncclAllGather(memory + 1, memory, 10, ncclFloat32, comm, state->stream), ncclInvalidArgument);
    CHECK_EQ(ncclReduceScatter(memory, memory + 10 * state->rank + 1, 10, ncclFloat32, ncclSum, comm, state->stream),
             ncclInvalidArgument);
    CHECK_EQ(ncclReduceScatter(memory, memory + 10 * (1 - state->rank), 10, ncclFloat32, ncclSum, comm,
                               state->stream), ncclInvalidArgument);
    CHECK_EQ(ncclAllReduce(memory, memory + 5, 10, ncclFloat32, ncclSum, comm, state->stream), ncclInvalidArgument);
    CHECK_EQ(ncclAllGather(memory, memory + 990, 10, ncclFloat32, comm, state->stream), ncclInvalidArgument);
    CHECK_EQ(ncclBroadcast(memory, memory, 10, ncclFloat32, 2, comm, state->stream), ncclInvalidArgument);
    pthread_barrier_wait(&all_ranks);
    ncclCommAbort(comm);
}

static void overlaps_are_found(void)
{
    emu_reset(2, 0, 1);
    run_ranks(2, 1, 0, overlaps_of_a_rank);
    CHECK_FOUND("overlap and are not in place: ncclAllGather of rank 0");
    CHECK(strstr(report, "overlap and are not in place: ncclReduceScatter of rank 1"));
    CHECK(strstr(report, "overlap and are not in place: ncclAllReduce of rank 1"));
    CHECK(strstr(report, "outside of every allocation: ncclAllGather of rank 1"));
    CHECK(strstr(report, "make no sense: ncclBroadcast of rank 1"));
}

/* In a way chosen by `how`, rank 1 does something else than rank 0. */
static void mismatch_of_a_rank(rank_state *state)
{
    float *memory = (float *)device_memory(4000);
    ncclResult_t result = ncclSuccess;
    int odd = state->rank == 1, how = odd ? state->how : -1;
    if (how == 0)
        ncclReduceScatter(memory, memory + 10, 10, ncclFloat32, ncclSum, state->comm, state->stream);
    else
        ncclAllReduce(memory, memory, how == 1 ? 11 : 10, how == 2 ? ncclInt32 : ncclFloat32,
                      how == 3 ? ncclMax : ncclSum, state->comm, state->stream);
    while (result == ncclSuccess) {
        CHECK_EQ(ncclCommGetAsyncError(state->comm, &result), ncclSuccess);
        sched_yield();
    }
    CHECK_EQ(result, ncclInvalidUsage);
    CHECK_EQ(ncclAllReduce(memory, memory, 1, ncclFloat32, ncclSum, state->comm, state->stream), ncclInvalidUsage);
    CHECK_EQ(ncclCommAbort(state->comm), ncclSuccess);
    CHECK_EQ(cudaStreamSynchronize(state->stream), cudaSuccess);
}

static void mismatches_are_found(void)
{
    for (int how = 0; how < 4; how++) {
        emu_reset((uint64_t)how, 0, 1);
        run_ranks(2, 1, how, mismatch_of_a_rank);
        CHECK_FOUND("ranks disagree: ");
    }
}

static void *duplicate_thread(void *argument)
{
    rank_state *state = (rank_state *)argument;
    CHECK_EQ(cudaSetDevice(3), cudaSuccess);
    CHECK_EQ(join_clique(state), ncclInvalidUsage);
    if (state->blocking) {
        CHECK(state->comm == NULL);
        CHECK(strstr(ncclGetLastError(NULL), "Duplicate GPU detected"));
        return NULL;
    }
    CHECK(strstr(ncclGetLastError(state->comm), "Duplicate GPU detected"));
    CHECK_EQ(ncclCommAbort(state->comm), ncclSuccess);
    return NULL;
}

static void one_device_takes_one_rank(void)
{
    for (int blocking = 0; blocking < 2; blocking++) {
        pthread_t threads[2];
        rank_state states[2];
        ncclUniqueId id;
        emu_reset(3, 0, 1);
        ncclGetUniqueId(&id);
        for (int r = 0; r < 2; r++) {
            rank_state state = {r, 2, blocking, 0, id, NULL, NULL, NULL};
            states[r] = state;
            CHECK_EQ(pthread_create(&threads[r], NULL, duplicate_thread, &states[r]), 0);
        }
        for (int r = 0; r < 2; r++)
            pthread_join(threads[r], NULL);
        CHECK_EQ(emu_leaks(NULL, 0), 0);
    }
}

static void nothing_before_initialisation_is_over(void)
{
    rank_state state = {0, 2, 0, 0, {{0}}, NULL, NULL, NULL};
    ncclConfig_t config;
    ncclResult_t result = ncclSuccess;
    emu_reset(4, 0, 1);
    ncclGetUniqueId(&state.id);
    memset(&config, 0, sizeof config);
    CHECK_EQ(ncclCommInitRankConfig(&state.comm, 2, state.id, 0, &config), ncclInvalidArgument);
    config.size = sizeof config;
    config.magic = EMU_NCCL_CONFIG_MAGIC;
    CHECK_EQ(ncclCommInitRankConfig(&state.comm, 2, state.id, 0, &config), ncclInProgress);
    float *memory = (float *)device_memory(400);
    cudaStream_t stream = new_stream();
    for (int k = 0; k < 20; k++) {
        CHECK_EQ(ncclCommGetAsyncError(state.comm, &result), ncclSuccess);
        CHECK_EQ(result, ncclInProgress); /* rank 1 does not come */
    }
    CHECK_EQ(ncclAllReduce(memory, memory, 1, ncclFloat32, ncclSum, state.comm, stream), ncclInvalidUsage);
    CHECK_FOUND("previous operation is in progress");
    CHECK_EQ(emu_leaks(report, sizeof report), 3);
    CHECK(strstr(report, "NCCL communicator"));
    CHECK_EQ(ncclCommAbort(state.comm), ncclSuccess);
    CHECK_EQ(ncclCommAbort(state.comm), ncclInvalidArgument);
}

/* ---- failures --------------------------------------------------------------------------------- */

/* Rank 1's second operation fails; the others' never completes until they abort, and leaves garbage. */
static void fault_of_a_rank(rank_state *state)
{
    float *memory = (float *)device_memory(400), host[100];
    ncclResult_t result = ncclSuccess;
    CHECK_EQ(cudaMemsetAsync(memory, 0, 400, state->stream), cudaSuccess);
    CHECK_EQ(settled(state->comm, ncclAllReduce(memory, memory, 100, ncclFloat32, ncclSum, state->comm,
                                                state->stream)), ncclSuccess);
    CHECK_EQ(cudaStreamSynchronize(state->stream), cudaSuccess);
    ncclResult_t called = ncclAllReduce(memory, memory, 100, ncclFloat32, ncclSum, state->comm, state->stream);
    result = settled(state->comm, called);
    CHECK_EQ(cudaMemsetAsync(memory + 50, 0, 200, state->stream), cudaSuccess);
    pthread_barrier_wait(&all_ranks);
    for (int k = 0; k < 50; k++) {
        CHECK_EQ(cudaStreamQuery(state->stream), cudaErrorNotReady);
        CHECK_EQ(ncclCommGetAsyncError(state->comm, &result), ncclSuccess);
        CHECK_EQ(result, state->rank == 1 ? ncclRemoteError : ncclSuccess);
    }
    if (state->rank == 1)
        CHECK_EQ(ncclAllReduce(memory, memory, 1, ncclFloat32, ncclSum, state->comm, state->stream), ncclRemoteError);
    pthread_barrier_wait(&all_ranks);
    CHECK_EQ(ncclCommAbort(state->comm), ncclSuccess);
    CHECK_EQ(cudaMemcpyAsync(host, memory, 400, cudaMemcpyDeviceToHost, state->stream), cudaSuccess);
    CHECK_EQ(zc_float_bits(host[49]), 0xffffffffu);
    CHECK(host[50] == 0);
    CHECK_EQ(cudaFree(memory), cudaSuccess);
    CHECK_EQ(cudaStreamDestroy(state->stream), cudaSuccess);
}

static void a_failed_rank(void)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        emu_reset(seed, (int)(seed % 4) - 1, 1);
        emu_nccl_fail(1, 2, ncclRemoteError);
        run_ranks(3, (int)(seed & 1), 0, fault_of_a_rank);
        CHECK_EQ(emu_faults_left(), 0);
        CHECK_CLEAN();
        CHECK_EQ(emu_leaks(report, sizeof report), 0);
    }
}

static void absent_of_a_rank(rank_state *state)
{
    float *memory = (float *)device_memory(400);
    if (state->rank == 1)
        return; /* without a word */
    CHECK_EQ(ncclAllReduce(memory, memory, 100, ncclFloat32, ncclSum, state->comm, state->stream), ncclSuccess);
    CHECK_EQ(cudaStreamSynchronize(state->stream), cudaErrorUnknown);
    CHECK_EQ(cudaMemsetAsync(memory, 0, 4, state->stream), cudaErrorUnknown); /* sticky */
}

static void deadlocks_are_found(void)
{
    setenv("EMU_DEADLOCK", "0.3", 1);
    emu_reset(5, 0, 1);
    run_ranks(2, 1, 0, absent_of_a_rank);
    CHECK_FOUND("deadlock: cudaStreamSynchronize at test_emulation_nccl.cc:");
    CHECK(strstr(report, "ncclAllReduce of rank 0, operation 1 misses rank 1"));
    unsetenv("EMU_DEADLOCK");
}

/* ---- pipelines with slots and collectives --------------------------------------------------------- */

__global__ void affine_kernel(float *to, const float *from, float factor, float value, size_t count)
{
    for (size_t i = threadIdx.x; i < count; i += blockDim.x)
        to[i] = from[i] * factor + value;
}

static cudaError_t affine(float *to, const float *from, float factor, float value, size_t count, cudaStream_t stream)
{
    return CU_LAUNCH(affine_kernel, 1, 64, stream, CU_READS(from, count * 4) CU_WRITES(to, count * 4), to, from,
                     factor, value, count);
}

enum { UNITS = 6, SLICE = 40 };

typedef struct slot {
    CUmemGenericAllocationHandle handle;
    CUdeviceptr at[3];
} slot;

static slot make_slot(int device)
{
    slot made = {0, {0, 0, 0}};
    CUmemAllocationProp prop;
    CUmemAccessDesc access;
    memset(&prop, 0, sizeof prop);
    memset(&access, 0, sizeof access);
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location.type = access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop.location.id = access.location.id = device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    CHECK_EQ(cuMemCreate(&made.handle, STEP, &prop, 0), CUDA_SUCCESS);
    for (int k = 0; k < 3; k++) {
        CHECK_EQ(cuMemAddressReserve(&made.at[k], STEP, 0, 0, 0), CUDA_SUCCESS);
        CHECK_EQ(cuMemMap(made.at[k], STEP, 0, made.handle, 0), CUDA_SUCCESS);
        CHECK_EQ(cuMemSetAccess(made.at[k], STEP, &access, 1), CUDA_SUCCESS);
    }
    return made;
}

static float *alias(const slot *of, int k)
{
    return (float *)(uintptr_t)of->at[k];
}

static int values_wrong[MOST_RANKS];

static void check_values(const rank_state *state, const float *result)
{
    float host[MOST_RANKS * SLICE];
    values_wrong[state->rank] = 0;
    for (int u = 0; u < UNITS; u++) {
        emu_peek(host, result + u * state->ranks * SLICE, (size_t)state->ranks * SLICE * 4);
        for (int i = 0; i < state->ranks * SLICE; i++)
            values_wrong[state->rank] += host[i] != (float)(2 * (100 * u + i / SLICE));
    }
}

/*
 * Compute writes its slice by one alias, the collective's stream gathers by the
 * slot's own address, compute reads by another alias.
 */
static void gather_behind_compute(rank_state *state)
{
    cudaStream_t compute = new_stream(), comm = state->stream;
    cudaEvent_t produced = new_event(), ready = new_event();
    slot slots[2] = {make_slot(state->rank), make_slot(state->rank)};
    size_t whole = (size_t)state->ranks * SLICE, mine = (size_t)state->rank * SLICE;
    float *zeros = (float *)device_memory(whole * 4), *result = (float *)device_memory(UNITS * whole * 4);
    CHECK_EQ(cudaMemsetAsync(zeros, 0, whole * 4, compute), cudaSuccess);
    for (int u = 0; u < UNITS; u++) {
        const slot *in = &slots[u % 2];
        affine(alias(in, 1) + mine, zeros, 0, (float)(100 * u + state->rank), SLICE, compute);
        cudaEventRecord(produced, compute);
        cudaStreamWaitEvent(comm, produced, 0);
        CHECK_EQ(settled(state->comm, ncclAllGather(alias(in, 0) + mine, alias(in, 0), SLICE, ncclFloat32,
                                                    state->comm, comm)), ncclSuccess);
        cudaEventRecord(ready, comm);
        cudaStreamWaitEvent(compute, ready, 0);
        affine(result + (size_t)u * whole, alias(in, 2), 2, 0, whole, compute);
    }
    CHECK_EQ(cudaStreamSynchronize(compute), cudaSuccess);
    check_values(state, result);
    leave(state);
}

/* The collective's stream fills and gathers one unit ahead, once the slot is free. */
static void gather_ahead_of_compute(rank_state *state)
{
    cudaStream_t compute = new_stream(), comm = state->stream;
    cudaEvent_t ready[2] = {new_event(), new_event()}, released[2] = {new_event(), new_event()};
    slot slots[2] = {make_slot(state->rank), make_slot(state->rank)};
    size_t whole = (size_t)state->ranks * SLICE, mine = (size_t)state->rank * SLICE;
    float *zeros = (float *)device_memory(whole * 4), *result = (float *)device_memory(UNITS * whole * 4);
    CHECK_EQ(cudaMemsetAsync(zeros, 0, whole * 4, comm), cudaSuccess);
    for (int step = 0; step <= UNITS; step++) {
        if (step < UNITS) {
            const slot *in = &slots[step % 2];
            cudaStreamWaitEvent(comm, released[step % 2], 0);
            affine(alias(in, 0) + mine, zeros, 0, (float)(100 * step + state->rank), SLICE, comm);
            CHECK_EQ(settled(state->comm, ncclAllGather(alias(in, 0) + mine, alias(in, 0), SLICE, ncclFloat32,
                                                        state->comm, comm)), ncclSuccess);
            cudaEventRecord(ready[step % 2], comm);
        }
        if (step > 0) {
            int u = step - 1;
            cudaStreamWaitEvent(compute, ready[u % 2], 0);
            affine(result + (size_t)u * whole, alias(&slots[u % 2], 1 + u % 2), 2, 0, whole, compute);
            cudaEventRecord(released[u % 2], compute);
        }
    }
    CHECK_EQ(cudaStreamSynchronize(compute), cudaSuccess);
    check_values(state, result);
    leave(state);
}

static int wrong_ranks(int ranks)
{
    int wrong = 0;
    for (int r = 0; r < ranks; r++)
        wrong += values_wrong[r] > 0;
    return wrong;
}

static void correct_pipelines_are_silent(void)
{
    for (int ranks = 2; ranks <= 4; ranks += 2)
        for (uint64_t seed = 0; seed < SEEDS * 2; seed++) {
            emu_reset(seed, (int)(seed % 4) - 1, 1);
            run_ranks(ranks, (int)(seed / 4 & 1), 0, seed & 1 ? gather_behind_compute : gather_ahead_of_compute);
            CHECK_CLEAN();
            CHECK_EQ(wrong_ranks(ranks), 0);
        }
}

static void dropped_waits_of_pipelines_are_found(void)
{
    char sites[4096], *line, *rest;
    int dropped = 0, wrong = 0;
    emu_wait_sites(sites, sizeof sites);
    for (line = strtok_r(sites, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
        if (!strstr(line, "cudaStreamWaitEvent"))
            continue;
        dropped++;
        emu_drop_wait(line);
        for (uint64_t seed = 0; seed < SEEDS; seed++) {
            int reported = 0;
            for (int ahead = 0; ahead < 2; ahead++) {
                emu_reset(seed, (int)(seed % 4) - 1, 1);
                run_ranks(2, (int)(seed & 1), 0, ahead ? gather_ahead_of_compute : gather_behind_compute);
                reported += emu_findings(NULL, 0) > 0;
                wrong += wrong_ranks(2) > 0;
            }
            CHECK_EQ(reported, 1); /* the place is in one of the two */
        }
    }
    emu_drop_wait(NULL);
    CHECK_EQ(dropped, 4);
    CHECK(wrong > 0 && wrong < dropped * SEEDS); /* by values alone some would pass */
}

int main(void)
{
    RUN(collectives_compute);
    RUN(narrow_types_are_rounded_at_each_hop);
    RUN(grouped_sends_and_receives);
    RUN(overlaps_are_found);
    RUN(mismatches_are_found);
    RUN(one_device_takes_one_rank);
    RUN(nothing_before_initialisation_is_over);
    RUN(a_failed_rank);
    RUN(deadlocks_are_found);
    RUN(correct_pipelines_are_silent);
    RUN(dropped_waits_of_pipelines_are_found);
    emu_reset(0, 0, 1);
    DONE();
}
