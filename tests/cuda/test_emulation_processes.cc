/*
 * The emulated NCCL between processes: the same numbers as between threads, and
 * what a rank's death, a mismatch or a late comer look like to the others.  Ranks
 * are forked; what they tell each other beside NCCL is a page they share.
 */
#include "emu_nccl.h"
#include "emulated.h"

#include <dirent.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MOST_RANKS = 4, COUNT = 37, SEEDS = 4, DEADLINE_S = 60 };

typedef struct shared_page {
    ncclUniqueId id;
    pthread_barrier_t barrier;
    int died;    /* the rank that was to */
    int survive; /* ranks that have joined although another one will not */
} shared_page;

typedef struct rank_state {
    int rank, ranks, blocking, how;
    ncclComm_t comm;
    cudaStream_t stream;
} rank_state;

static shared_page *page;

/* ---- ranks as processes ---------------------------------------------------------------- */

static int open_files(void)
{
    int count = 0;
    DIR *folder = opendir("/proc/self/fd");
    while (readdir(folder))
        count++;
    closedir(folder);
    return count;
}

/* Polls until a non-blocking call is over. */
static ncclResult_t settled(ncclComm_t comm, ncclResult_t result)
{
    while (result == ncclInProgress) {
        CHECK_EQ(ncclCommGetAsyncError(comm, &result), ncclSuccess);
        sched_yield();
    }
    return result;
}

/* Rank 0 makes the id. */
static ncclResult_t start_join(rank_state *state)
{
    ncclConfig_t config;
    memset(&config, 0, sizeof config);
    config.size = sizeof config;
    config.magic = EMU_NCCL_CONFIG_MAGIC;
    config.version = EMU_NCCL_VERSION;
    config.blocking = state->blocking;
    if (state->rank == 0)
        CHECK_EQ(ncclGetUniqueId(&page->id), ncclSuccess);
    pthread_barrier_wait(&page->barrier);
    return ncclCommInitRankConfig(&state->comm, state->ranks, page->id, state->rank, &config);
}

static void join(rank_state *state)
{
    CHECK_EQ(settled(state->comm, start_join(state)), ncclSuccess);
    CHECK_EQ(cudaStreamCreateWithFlags(&state->stream, cudaStreamNonBlocking), cudaSuccess);
}

static void leave(rank_state *state)
{
    CHECK_EQ(cudaStreamSynchronize(state->stream), cudaSuccess);
    CHECK_EQ(settled(state->comm, ncclCommFinalize(state->comm)), ncclSuccess);
    CHECK_EQ(ncclCommDestroy(state->comm), ncclSuccess);
    CHECK_EQ(cudaStreamDestroy(state->stream), cudaSuccess);
}

static int live(const rank_state *given, uint64_t seed, void (*work)(rank_state *))
{
    rank_state state = *given;
    int files = open_files();
    testing_failures = 0; /* of this rank */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    alarm(DEADLINE_S);
    emu_reset(seed, (int)(seed % 4) - 1, 1);
    CHECK_EQ(cudaSetDevice(state.rank), cudaSuccess);
    work(&state);
    emu_reset(0, 0, 1);
    CHECK_EQ(open_files(), files);
    fflush(NULL);
    return testing_failures > 0;
}

/* How it ended: 0, an exit status, or the number of a signal. */
static int wait_for(pid_t child)
{
    int status = 0;
    CHECK_EQ(waitpid(child, &status, 0), child);
    return WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status);
}

/* Runs the ranks; rank `killed` (-1: none) must die by SIGKILL and all others end well. */
static void run_ranks(int ranks, uint64_t seed, int how, int killed, void (*work)(rank_state *))
{
    pid_t children[MOST_RANKS];
    pthread_barrierattr_t shared;
    pthread_barrierattr_init(&shared);
    pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&page->barrier, &shared, (unsigned)ranks);
    page->died = page->survive = 0;
    fflush(NULL);
    for (int r = 0; r < ranks; r++)
        if ((children[r] = fork()) == 0) {
            rank_state state = {r, ranks, (int)(seed & 1), how, NULL, NULL};
            _exit(live(&state, seed, work));
        }
    if (killed >= 0) {
        CHECK_EQ(wait_for(children[killed]), SIGKILL);
        __atomic_store_n(&page->died, 1, __ATOMIC_RELEASE);
    }
    for (int r = 0; r < ranks; r++)
        if (r != killed)
            CHECK_EQ(wait_for(children[r]), 0);
}

static void check_clean(void)
{
    if (emu_findings(report, sizeof report))
        fprintf(stderr, "unexpected:\n%s", report);
    CHECK_EQ(emu_findings(NULL, 0), 0);
    CHECK_EQ(emu_leaks(report, sizeof report), 0);
}

static float *device_floats(size_t count)
{
    void *memory = NULL;
    CHECK_EQ(cudaMalloc(&memory, count * sizeof(float)), cudaSuccess);
    return (float *)memory;
}

/* ---- what they compute ------------------------------------------------------------------ */

static void fill(const rank_state *state, float *device, int count)
{
    float host[MOST_RANKS * COUNT];
    for (int i = 0; i < count; i++)
        host[i] = value_of(state->rank, i);
    CHECK_EQ(cudaMemcpyAsync(device, host, (size_t)count * 4, cudaMemcpyHostToDevice, state->stream), cudaSuccess);
}

static void read_back(const rank_state *state, float *host, const float *device, int count)
{
    CHECK_EQ(cudaMemcpyAsync(host, device, (size_t)count * 4, cudaMemcpyDeviceToHost, state->stream), cudaSuccess);
}

static void check_sums(const rank_state *state, const float *device, int all)
{
    float host[MOST_RANKS * COUNT];
    read_back(state, host, device, all);
    for (int i = 0; i < all; i++)
        CHECK(host[i] == ring_sum(state->ranks, i / COUNT, i));
}

/* Many in a row, so that places of earlier ones are used again while slower ranks may still read. */
static void collectives(rank_state *state)
{
    int all = state->ranks * COUNT, last = state->ranks - 1;
    float host[COUNT];
    join(state);
    float *send = device_floats((size_t)all), *receive = device_floats((size_t)all), *mine = send + state->rank * COUNT;
    for (int k = 0; k < 5; k++) {
        fill(state, send, all);
        CHECK_EQ(settled(state->comm, ncclAllReduce(send, receive, (size_t)all, ncclFloat32, ncclSum, state->comm,
                                                    state->stream)), ncclSuccess);
        CHECK_EQ(settled(state->comm, ncclReduceScatter(send, mine, COUNT, ncclFloat32, ncclSum, state->comm,
                                                        state->stream)), ncclSuccess);
        CHECK_EQ(settled(state->comm, ncclAllGather(mine, send, COUNT, ncclFloat32, state->comm, state->stream)),
                 ncclSuccess);
        check_sums(state, receive, all);
        check_sums(state, send, all);
    }
    fill(state, send, COUNT);
    CHECK_EQ(settled(state->comm, ncclBroadcast(send, send, COUNT, ncclFloat32, last, state->comm, state->stream)),
             ncclSuccess);
    read_back(state, host, send, COUNT);
    for (int i = 0; i < COUNT; i++)
        CHECK(host[i] == value_of(last, i));
    CHECK_EQ(cudaFree(send), cudaSuccess);
    CHECK_EQ(cudaFree(receive), cudaSuccess);
    leave(state);
    check_clean();
}

static void collectives_compute(void)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++)
        for (int ranks = 1; ranks <= MOST_RANKS; ranks++)
            run_ranks(ranks, seed, 0, -1, collectives);
}

/* Everybody sends everybody else a slice, several times without waiting. */
static void all_to_all(rank_state *state)
{
    int all = state->ranks * COUNT;
    float host[MOST_RANKS * COUNT];
    join(state);
    float *out = device_floats((size_t)all), *in = device_floats((size_t)all);
    fill(state, out, all);
    CHECK_EQ(cudaMemsetAsync(in, 0, (size_t)all * 4, state->stream), cudaSuccess);
    for (int k = 0; k < 3; k++) {
        CHECK_EQ(ncclGroupStart(), ncclSuccess);
        for (int q = 0; q < state->ranks; q++) {
            if (q == state->rank)
                continue;
            CHECK_EQ(ncclSend(out + q * COUNT, COUNT, ncclFloat32, q, state->comm, state->stream), ncclSuccess);
            CHECK_EQ(ncclRecv(in + q * COUNT, COUNT, ncclFloat32, q, state->comm, state->stream), ncclSuccess);
        }
        CHECK_EQ(settled(state->comm, ncclGroupEnd()), ncclSuccess);
    }
    read_back(state, host, in, all);
    for (int i = 0; i < all; i++)
        CHECK(host[i] == (i / COUNT == state->rank ? 0 : value_of(i / COUNT, state->rank * COUNT + i % COUNT)));
    CHECK_EQ(cudaFree(out), cudaSuccess);
    CHECK_EQ(cudaFree(in), cudaSuccess);
    leave(state);
    check_clean();
}

static void grouped_sends_and_receives(void)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++)
        for (int ranks = 1; ranks <= MOST_RANKS; ranks++)
            run_ranks(ranks, seed, 0, -1, all_to_all);
}

/* Rank 1 waits for rank 0 without CUDA, rank 0 for what rank 1 has enqueued. */
static void meet_without_cuda(rank_state *state)
{
    join(state);
    float *memory = device_floats(10);
    CHECK_EQ(settled(state->comm, ncclAllReduce(memory, memory, 10, ncclInt32, ncclMax, state->comm, state->stream)),
             ncclSuccess);
    if (state->rank == 0)
        CHECK_EQ(cudaStreamSynchronize(state->stream), cudaSuccess);
    pthread_barrier_wait(&page->barrier);
    CHECK_EQ(cudaStreamSynchronize(state->stream), cudaSuccess);
    CHECK_EQ(cudaFree(memory), cudaSuccess);
    leave(state);
    check_clean();
}

static void work_goes_on_while_the_host_is_elsewhere(void)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++)
        run_ranks(2, seed, 0, -1, meet_without_cuda);
}

/* ---- failures ------------------------------------------------------------------------------ */

static void wait_until(const int *word, int value)
{
    while (__atomic_load_n(word, __ATOMIC_ACQUIRE) != value)
        sched_yield();
}

/* The last rank dies: before it joins (how 0), or before its operation (1). */
static void one_dies(rank_state *state)
{
    int last = state->rank == state->ranks - 1;
    ncclResult_t result = ncclSuccess;
    int32_t host[10];
    if (state->how == 0) {
        state->blocking = 0;
        if (last) {
            pthread_barrier_wait(&page->barrier);
            raise(SIGKILL);
        }
        CHECK_EQ(start_join(state), ncclInProgress);
        __atomic_add_fetch(&page->survive, 1, __ATOMIC_ACQ_REL);
        wait_until(&page->survive, state->ranks - 1); /* rank 0 has the id's file */
        wait_until(&page->died, 1);
        for (int k = 0; k < 100; k++) {
            CHECK_EQ(ncclCommGetAsyncError(state->comm, &result), ncclSuccess);
            CHECK_EQ(result, ncclInProgress);
        }
        CHECK_EQ(ncclCommAbort(state->comm), ncclSuccess);
        check_clean();
        return;
    }
    join(state);
    float *memory = device_floats(10);
    CHECK_EQ(cudaMemsetAsync(memory, 0, sizeof host, state->stream), cudaSuccess);
    if (last)
        raise(SIGKILL);
    CHECK_EQ(settled(state->comm, ncclAllReduce(memory, memory, 10, ncclInt32, ncclSum, state->comm, state->stream)),
             ncclSuccess);
    wait_until(&page->died, 1);
    for (int k = 0; k < 100; k++)
        CHECK_EQ(cudaStreamQuery(state->stream), cudaErrorNotReady);
    CHECK_EQ(ncclCommGetAsyncError(state->comm, &result), ncclSuccess);
    CHECK_EQ(result, ncclSuccess); /* nobody has noticed */
    CHECK_EQ(ncclCommAbort(state->comm), ncclSuccess);
    CHECK_EQ(cudaStreamSynchronize(state->stream), cudaSuccess);
    CHECK_EQ(cudaMemcpyAsync(host, memory, sizeof host, cudaMemcpyDeviceToHost, state->stream), cudaSuccess);
    CHECK_EQ(host[0], -1);
    CHECK_EQ(cudaFree(memory), cudaSuccess);
    CHECK_EQ(cudaStreamDestroy(state->stream), cudaSuccess);
    check_clean();
}

static void a_killed_rank(void)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++)
        for (int how = 0; how < 2; how++)
            run_ranks(3, seed, how, 2, one_dies);
}

/* Rank 1 does something else than rank 0. */
static void disagree(rank_state *state)
{
    ncclResult_t result = ncclSuccess;
    int how = state->rank == 1 ? state->how : -1;
    join(state);
    float *memory = device_floats(100);
    if (state->how == 4 && state->rank == 0)
        ncclSend(memory, 10, ncclFloat32, 1, state->comm, state->stream);
    else if (how == 4)
        ncclRecv(memory, 11, ncclFloat32, 0, state->comm, state->stream);
    else if (how == 0)
        ncclReduceScatter(memory, memory + 10, 10, ncclFloat32, ncclSum, state->comm, state->stream);
    else
        ncclAllReduce(memory, memory, how == 1 ? 11 : 10, how == 2 ? ncclInt32 : ncclFloat32,
                      how == 3 ? ncclMax : ncclSum, state->comm, state->stream);
    while (result == ncclSuccess || result == ncclInProgress) {
        CHECK_EQ(ncclCommGetAsyncError(state->comm, &result), ncclSuccess);
        sched_yield();
    }
    CHECK_EQ(result, ncclInvalidUsage);
    CHECK(emu_findings(report, sizeof report) > 0 && strstr(report, "ranks disagree: "));
    CHECK_EQ(ncclCommAbort(state->comm), ncclSuccess);
    CHECK_EQ(cudaStreamSynchronize(state->stream), cudaSuccess);
    pthread_barrier_wait(&page->barrier);
}

static void mismatches_are_found(void)
{
    for (uint64_t seed = 0; seed < 2; seed++)
        for (int how = 0; how < 5; how++)
            run_ranks(2, seed, how, -1, disagree);
}

static void share_a_device(rank_state *state)
{
    CHECK_EQ(cudaSetDevice(3), cudaSuccess);
    CHECK_EQ(settled(state->comm, start_join(state)), ncclInvalidUsage);
    CHECK(strstr(ncclGetLastError(state->comm), "Duplicate GPU detected"));
    if (state->comm)
        CHECK_EQ(ncclCommAbort(state->comm), ncclSuccess);
    pthread_barrier_wait(&page->barrier);
    check_clean();
}

static void one_device_takes_one_rank(void)
{
    for (uint64_t seed = 0; seed < 2; seed++)
        run_ranks(2, seed, 0, -1, share_a_device);
}

/* Rank 0 makes the id and gives its communicator up, before rank 1 comes. */
static void come_late(rank_state *state)
{
    state->blocking = 0;
    if (state->rank == 0) {
        CHECK_EQ(start_join(state), ncclInProgress);
        CHECK_EQ(ncclCommAbort(state->comm), ncclSuccess);
        pthread_barrier_wait(&page->barrier);
    } else {
        pthread_barrier_wait(&page->barrier);
        pthread_barrier_wait(&page->barrier);
        CHECK_EQ(ncclCommInitRankConfig(&state->comm, 2, page->id, 1, NULL), ncclSystemError);
        CHECK(strstr(ncclGetLastError(NULL), "gone, or has given it up"));
    }
    pthread_barrier_wait(&page->barrier);
    check_clean();
}

static void a_late_comer_is_told(void)
{
    run_ranks(2, 0, 0, -1, come_late);
}

/* exit, not _exit: what runs in the background must let it. */
static void exit_in_the_middle(rank_state *state)
{
    join(state);
    float *memory = device_floats(10);
    CHECK_EQ(settled(state->comm, ncclAllReduce(memory, memory, 10, ncclInt32, ncclSum, state->comm, state->stream)),
             ncclSuccess);
    pthread_barrier_wait(&page->barrier);
    exit(testing_failures > 0);
}

static void a_process_may_end_with_an_open_communicator(void)
{
    for (uint64_t seed = 0; seed < SEEDS; seed++)
        run_ranks(2, seed, 0, -1, exit_in_the_middle);
}

int main(void)
{
    page = (shared_page *)mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    emu_nccl_processes(1);
    RUN(collectives_compute);
    RUN(grouped_sends_and_receives);
    RUN(work_goes_on_while_the_host_is_elsewhere);
    RUN(a_killed_rank);
    RUN(mismatches_are_found);
    RUN(one_device_takes_one_rank);
    RUN(a_late_comer_is_told);
    RUN(a_process_may_end_with_an_open_communicator);
    DONE();
}
