/*
 * Birth and death of a communicator of GPUs; what goes to the host's communicator
 * is passed on here.  nccl_comm.h has the protocol.
 */
#include "cuda_device.h"
#include "nccl_state.h"
#include "zc_hash.h"
#include "zc_point.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define FINISH_NS 1000000000ull /* for peers to fetch what they have not received yet */

enum { START_TAG, START_TAGS }; /* of the communicator's own channel on the host */

static const comm_ops nccl_ops;

/* ---- passed on to the host ------------------------------------------------------ */

static zc_status progress(zc_comm *public)
{
    return comm_progress(nccl_of(public)->host);
}

static zc_status watch(zc_comm *public, const char *what)
{
    return comm_watch(nccl_of(public)->host, what);
}

/* The other lines are the lanes'. */
static zc_status declare(zc_comm *public, uint32_t line, uint64_t detail, const char *what)
{
    nccl_comm *comm = nccl_of(public);
    if (line != COMM_LINE_ENGINE)
        return zc_fail(ZC_EINVAL, "rank %zu: a declaration on line %u, which is for what NCCL is given; use line %u",
                       comm->name, line, COMM_LINE_ENGINE);
    return comm_declare(comm->host, line, detail, what);
}

static size_t behind(zc_comm *public, uint32_t line, uint64_t number, char *text, size_t room_bytes)
{
    return comm_behind(nccl_of(public)->host, line, number, text, room_bytes);
}

static zc_status exchange(comm_channel *channel, uint32_t tag, const char *what, const void *record, void *records,
                          size_t bytes)
{
    return comm_exchange(nccl_channel_of(channel)->host, tag, what, record, records, bytes);
}

static zc_status array_all_reduce(zc_comm *public, void *array, size_t count, zc_dtype dtype, comm_op op)
{
    return comm_array_all_reduce(nccl_of(public)->host, array, count, dtype, op);
}

static zc_status array_reduce_scatter(zc_comm *public, const void *from, void *to, size_t count, zc_dtype dtype,
                                      comm_op op)
{
    return comm_array_reduce_scatter(nccl_of(public)->host, from, to, count, dtype, op);
}

static zc_status array_all_gather(zc_comm *public, const void *from, void *to, size_t bytes)
{
    return comm_array_all_gather(nccl_of(public)->host, from, to, bytes);
}

static zc_status array_broadcast(zc_comm *public, void *array, size_t bytes, size_t root)
{
    return comm_array_broadcast(nccl_of(public)->host, array, bytes, root);
}

static zc_status barrier(zc_comm *public)
{
    return comm_barrier(nccl_of(public)->host);
}

static void poison(zc_comm *public, zc_status status, const char *why)
{
    nccl_comm *comm = nccl_of(public);
    comm_poison(comm->host, status, why);
    pthread_mutex_lock(&comm->lock);
    nccl_abort(comm);
    pthread_mutex_unlock(&comm->lock);
}

/* ---- life ------------------------------------------------------------------------ */

static zc_status open_lane(nccl_comm *comm, nccl_lane *lane)
{
    int lowest, highest;
    /* Ahead of the computation that will wait for it, where the GPU has to choose. */
    CUDA_TRY(comm->ordinal, cudaDeviceGetStreamPriorityRange, &lowest, &highest);
    CUDA_TRY(comm->ordinal, cudaStreamCreateWithPriority, &lane->stream, cudaStreamNonBlocking, highest);
    cuda_device_use_stream(comm->device, lane->stream);
    CUDA_TRY(comm->ordinal, cudaEventCreateWithFlags, &lane->start, cudaEventDisableTiming);
    CUDA_TRY(comm->ordinal, cudaEventCreateWithFlags, &lane->probe.event, cudaEventDisableTiming);
    return ZC_OK;
}

static zc_status join_clique(nccl_comm *comm, int lane, const ncclUniqueId *id)
{
    ncclConfig_t config = {.size = sizeof config, .magic = NCCL_CONFIG_MAGIC, .version = NCCL_CONFIG_VERSION,
                           .blocking = 0, .cgaClusterSize = NCCL_UNSET, .minCTAs = NCCL_UNSET, .maxCTAs = NCCL_UNSET,
                           .splitShare = NCCL_UNSET, .trafficClass = NCCL_UNSET, .collnetEnable = NCCL_UNSET,
                           .CTAPolicy = NCCL_UNSET, .shrinkShare = NCCL_UNSET, .nvlsCTAs = NCCL_UNSET,
                           .nChannelsPerNetPeer = NCCL_UNSET, .nvlinkCentricSched = NCCL_UNSET};
    ZC_TRY(nccl_watch_posting(comm, lane, "start-up", ZC_HASH_START, "start-up of NCCL"));
    ncclResult_t result = comm->api->CommInitRankConfig(&comm->lane[lane].nccl, (int)comm->public.ranks, *id,
                                                        (int)comm->public.rank, &config);
    ZC_POINT("NCCL: about to join");
    zc_status status = nccl_settle(comm, lane, result, "start-up");
    ZC_POINT("NCCL: joined");
    return status;
}

/* Rank 0's id on every rank. Made just before it is used: NCCL has no call to give one back. */
static zc_status make_id(nccl_comm *comm, ncclUniqueId *id)
{
    zc_status status = ZC_OK;
    memset(id, 0, sizeof *id);
    if (comm->public.rank == 0) {
        ncclResult_t result = comm->api->GetUniqueId(id);
        if (result != ncclSuccess)
            status = zc_fail(ZC_ECOMM, "rank 0: ncclGetUniqueId: %s: %s; a machine without a network needs "
                             "NCCL_SOCKET_IFNAME=lo", comm->api->GetErrorString(result), comm->api->GetLastError(NULL));
    }
    ZC_TRY(nccl_agree(comm, comm->host_channel, START_TAG, "start of NCCL", status));
    return comm_array_broadcast(comm->host, id, sizeof *id, 0);
}

static zc_status connect(nccl_comm *comm, int lane)
{
    ncclUniqueId id;
    ZC_TRY(make_id(comm, &id));
    pthread_mutex_lock(&comm->lock);
    zc_status status = join_clique(comm, lane, &id);
    pthread_mutex_unlock(&comm->lock);
    return status;
}

static zc_status start(nccl_comm *comm, const char *wheel)
{
    zc_status status = nccl_open(wheel, &comm->api);
    for (int k = 0; status == ZC_OK && k < NCCL_LANES; k++)
        status = open_lane(comm, &comm->lane[k]);
    ZC_TRY(nccl_agree(comm, comm->host_channel, START_TAG, "start of NCCL", status));
    for (int k = 0; status == ZC_OK && k < NCCL_LANES; k++)
        status = connect(comm, k);
    if (status == ZC_OK)
        status = nccl_watch_start(comm);
    return nccl_agree(comm, comm->host_channel, START_TAG, "start of NCCL", status);
}

/*
 * What every rank has posted ends by itself, and peers may be in the middle of
 * it, so it is waited for, as a peer that was not waited for would lose it.  The
 * rest can only be given up.  The watchdog ends this wait if it comes to that.
 * Returns whether everything has ended.
 */
static int let_end(nccl_comm *comm)
{
    char list[8];
    int all = comm->watching && comm_progress(comm->host) == ZC_OK;
    for (int k = 0; k < NCCL_LANES && all; k++) {
        pthread_mutex_lock(&comm->lock);
        all = !comm->aborted && nccl_missing(comm, k, comm->lane[k].posted, list, sizeof list) == 0;
        pthread_mutex_unlock(&comm->lock);
        cudaError_t state = cudaSuccess;
        while (all && (state = cudaStreamQuery(comm->lane[k].stream)) == cudaErrorNotReady)
            nccl_pause();
        all = all && state == cudaSuccess;
    }
    cudaGetLastError(); /* "not ready" counts as an error */
    return all;
}

/* Finishing lets peers fetch what they have not received yet, and waits for operations; aborting does neither. */
static void end_nccl(nccl_comm *comm, ncclComm_t nccl, int finish)
{
    uint64_t start_ns = nccl_now_ns();
    ZC_POINT("NCCL: to be finished");
    ncclResult_t result = finish ? comm->api->CommFinalize(nccl) : ncclInvalidUsage;
    while (result == ncclInProgress && nccl_now_ns() - start_ns < FINISH_NS) {
        ncclResult_t asked = comm->api->CommGetAsyncError(nccl, &result);
        if (asked != ncclSuccess)
            result = asked;
        if (result == ncclInProgress)
            nccl_pause();
    }
    ZC_POINT("NCCL: finished");
    if (result == ncclSuccess)
        comm->api->CommDestroy(nccl);
    else
        comm->api->CommAbort(nccl);
    ZC_POINT("NCCL: gone");
}

/* Half-made ones too. Peers that still need this rank learn that it is gone from the host's communicator. */
static void close_lane(nccl_comm *comm, nccl_lane *lane, int finish)
{
    if (lane->nccl)
        end_nccl(comm, lane->nccl, finish);
    if (lane->stream) {
        cudaStreamSynchronize(lane->stream);
        cuda_device_forget_stream(comm->device, lane->stream);
        cudaStreamDestroy(lane->stream);
    }
    if (lane->start)
        cudaEventDestroy(lane->start);
    if (lane->probe.event)
        cudaEventDestroy(lane->probe.event);
}

/* Channels that are still open make every call on them fail from now on. */
static void destroy(nccl_comm *comm)
{
    CUcontext previous;
    zc_status status = cuda_enter(comm->ordinal, &previous);
    int finish = let_end(comm);
    nccl_watch_stop(comm);
    for (int k = 0; k < NCCL_LANES; k++)
        close_lane(comm, &comm->lane[k], finish && !comm->aborted);
    if (status == ZC_OK)
        cuda_leave(previous);
    comm_channel_close(comm->host_channel);
    comm_close(comm->host);
    pthread_mutex_lock(&comm->lock);
    comm->aborted = comm->closed = 1;
    int last = comm->channels == 0;
    pthread_mutex_unlock(&comm->lock);
    if (last)
        nccl_release(comm);
}

static void close_comm(zc_comm *public)
{
    if (!nccl_forked(nccl_of(public)))
        destroy(nccl_of(public));
}

static zc_status create(const nccl_comm_config *config, size_t name, zc_comm **out);

static zc_status split(zc_comm *public, int64_t color, zc_comm **out)
{
    nccl_comm *comm = nccl_of(public);
    nccl_comm_config config = {.ordinal = comm->ordinal, .deterministic = comm->public.in_rank_order};
    ZC_TRY(comm_split(comm->host, color, &config.host));
    return config.host ? create(&config, comm->name, out) : ZC_OK;
}

static nccl_comm *new_comm(const nccl_comm_config *config, size_t name)
{
    nccl_comm *comm = zc_calloc(1, sizeof *comm);
    pthread_condattr_t attributes;
    if (!comm)
        return NULL;
    comm->public.ops = &nccl_ops;
    comm->public.rank = config->host->rank;
    comm->public.ranks = config->host->ranks;
    comm->public.local_ranks = config->host->local_ranks;
    comm->public.timeout_ns = config->host->timeout_ns;
    comm->public.interrupted = config->host->interrupted;
    comm->public.interrupt_context = config->host->interrupt_context;
    comm->host = config->host;
    comm->name = name;
    comm->pid = getpid();
    comm->ordinal = config->ordinal;
    comm->public.in_rank_order = config->deterministic || config->host->ranks == 1;
    pthread_mutex_init(&comm->lock, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&comm->wake, &attributes);
    pthread_condattr_destroy(&attributes);
    return comm;
}

static zc_status create(const nccl_comm_config *config, size_t name, zc_comm **out)
{
    CUcontext previous;
    *out = NULL;
    nccl_comm *comm = new_comm(config, name);
    if (!comm) {
        zc_status none = zc_fail(ZC_ENOMEM, "rank %zu: no memory for a communicator of GPUs", name);
        none = comm_give_up(config->host, "start on a GPU", none);
        comm_close(config->host);
        return none;
    }
    zc_status status = comm_channel_open(comm->host, "NCCL", START_TAGS, &comm->host_channel);
    if (status == ZC_OK)
        status = nccl_agree(comm, comm->host_channel, START_TAG, "start on a GPU",
                       cuda_device_create(comm->ordinal, &comm->device));
    if (status == ZC_OK && comm->public.ranks > 1 && (status = cuda_enter(comm->ordinal, &previous)) == ZC_OK) {
        status = start(comm, config->wheel);
        cuda_leave(previous);
    }
    if (status != ZC_OK) {
        char why[1024];
        snprintf(why, sizeof why, "%s", zc_last_error()); /* what destroy cannot do is of no interest */
        destroy(comm);
        return zc_fail(status, "%s", why);
    }
    *out = &comm->public;
    return ZC_OK;
}

zc_status nccl_comm_create(const nccl_comm_config *config, zc_comm **out)
{
    return create(config, config->host->rank, out);
}

static zc_status make_device(zc_comm *public, zc_device **out)
{
    return cuda_device_create(nccl_of(public)->ordinal, out);
}

static int gpu(const zc_comm *public)
{
    return ((const nccl_comm *)(const void *)public)->ordinal;
}

static const comm_ops nccl_ops = {
    .name = "NCCL",
    .ordered = 1,
    .device = make_device,
    .gpu = gpu,
    .channel_open = nccl_channel_open,
    .channel_close = nccl_channel_close,
    .region_alloc = nccl_region_alloc,
    .region_grow = nccl_region_grow,
    .region_free = nccl_region_free,
    .reserve = nccl_reserve,
    .reduce_scatter = nccl_reduce_scatter,
    .all_gather = nccl_all_gather,
    .all_gather_to = nccl_all_gather_to,
    .all_reduce_words = nccl_all_reduce_words,
    .broadcast = nccl_broadcast,
    .test = nccl_test,
    .wait = nccl_wait,
    .wait_some = nccl_wait_some,
    .progress = progress,
    .watch = watch,
    .declare = declare,
    .behind = behind,
    .exchange = exchange,
    .array_all_reduce = array_all_reduce,
    .array_reduce_scatter = array_reduce_scatter,
    .array_all_gather = array_all_gather,
    .array_broadcast = array_broadcast,
    .barrier = barrier,
    .split = split,
    .poison = poison,
    .close = close_comm,
};
