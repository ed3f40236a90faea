/*
 * Birth and death of a communicator of GPUs, its channels and regions; what goes
 * to the host's communicator is passed on here.  nccl_comm.h has the protocol.
 */
#include "cuda_device.h"
#include "nccl_state.h"
#include "zc_hash.h"
#include "zc_point.h"

#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define POLL_NS 200000l
#define FINISH_NS 1000000000ull /* for peers to fetch what they have not received yet */
#define HEAR_NS 1000000000ull   /* for the host's plane to say what NCCL met only the effect of */
#define TAGS_MOST ((1u << NCCL_TAG_BITS) - 3) /* what the host can do, less one */

enum { START_TAG, START_TAGS }; /* of the communicator's own channel on the host */

static const comm_ops nccl_ops;

/* ---- failures -------------------------------------------------------------- */

zc_status nccl_give_up(nccl_comm *comm, zc_status status, const char *why)
{
    char text[1024];
    snprintf(text, sizeof text, "%s", why); /* may be the last sentence, which the next lines replace */
    comm_poison(comm->host, status, text);
    nccl_abort(comm);
    zc_status first = comm_watch(comm->host, "a failed group");
    return first != ZC_OK ? first : zc_fail(status, "%s", text);
}

/*
 * Declarations and bad news travel, and NCCL may be faster.  If ranks differ, that is known once every rank's declaration
 * of what this lane has posted has arrived; if one is gone, as soon as its end is seen.
 */
static void hear_the_reason(nccl_comm *comm, int lane, ncclResult_t result)
{
    char list[256];
    uint64_t until_ns = nccl_now_ns() + HEAR_NS;
    int of_a_peer = result == ncclRemoteError || result == ncclSystemError; /* what NCCL says when one is gone */
    while (comm_watch(comm->host, "a failed operation") == ZC_OK && nccl_now_ns() < until_ns &&
           (of_a_peer || nccl_missing(comm, lane, comm->lane[lane].posted, list, sizeof list)))
        nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
}

zc_status nccl_broken(nccl_comm *comm, int lane, ncclResult_t result, const char *what)
{
    char why[900];
    const char *last = comm->api->GetLastError(comm->lane[lane].nccl);
    int same_gpu = last && strstr(last, "Duplicate GPU");
    const char *advice = same_gpu ? "; give every rank a GPU of its own (two on one need NCCL 2.30 with "
                                    "NCCL_MULTI_RANK_GPU_ENABLE=1)" : "";
    snprintf(why, sizeof why, "rank %zu: NCCL %d.%d.%d failed in %s on GPU %d: %s%s%.500s%s", comm->name,
             comm->api->version / 10000, comm->api->version / 100 % 100, comm->api->version % 100, what, comm->ordinal,
             comm->api->GetErrorString(result), last && *last ? ": " : "", last ? last : "", advice);
    hear_the_reason(comm, lane, result);
    return nccl_give_up(comm, ZC_ECOMM, why);
}

zc_status nccl_time_out(nccl_comm *comm, int lane, uint64_t number, const char *what, uint64_t spent_ns)
{
    char list[256], stopped[128], why[640];
    size_t missing = nccl_missing(comm, lane, number, list, sizeof list);
    int used = snprintf(why, sizeof why, "rank %zu waited %.1f s for %s (operation %llu) on GPU %d; ", comm->name,
                        (double)spent_ns * 1e-9, what, (unsigned long long)number, comm->ordinal);
    if (missing)
        snprintf(why + used, sizeof why - (size_t)used, "not called by rank%s %s; all ranks must make this call, or "
                 "the timeout is too short", missing > 1 ? "s" : "", list + 2);
    else if (comm_stopped(comm->host, stopped, sizeof stopped))
        snprintf(why + used, sizeof why - (size_t)used, "every rank called it; " COMM_STOPPED, stopped);
    else
        snprintf(why + used, sizeof why - (size_t)used, "every rank called it: a GPU or the network is stuck "
                 "(NCCL_DEBUG=INFO says more), or the work before it takes longer than the timeout");
    return nccl_give_up(comm, ZC_ETIMEOUT, why);
}

zc_status nccl_interrupt(nccl_comm *comm, const char *what)
{
    char why[128];
    snprintf(why, sizeof why, "rank %zu was interrupted in %s", comm->name, what);
    nccl_give_up(comm, ZC_EINTERRUPT, why);
    return zc_fail(ZC_EINTERRUPT, "%s", why);
}

zc_status nccl_settle(nccl_comm *comm, int number, ncclResult_t result, const char *what)
{
    nccl_lane *lane = &comm->lane[number];
    uint64_t start_ns = nccl_now_ns();
    while (result == ncclInProgress) {
        ncclResult_t asked = comm->api->CommGetAsyncError(lane->nccl, &result);
        if (asked != ncclSuccess)
            result = asked;
        if (result != ncclInProgress)
            break;
        zc_status status = comm_watch(comm->host, what);
        if (status != ZC_OK) {
            nccl_abort(comm);
            return status;
        }
        if (comm->public.interrupted && comm->public.interrupted(comm->public.interrupt_context))
            return nccl_interrupt(comm, what);
        uint64_t spent_ns = nccl_now_ns() - start_ns;
        if (spent_ns >= comm->public.timeout_ns)
            return nccl_time_out(comm, number, lane->posted, what, spent_ns);
        nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
    }
    return result == ncclSuccess ? ZC_OK : nccl_broken(comm, number, result, what);
}

/* Every rank tells how its part went; all return a failure if any had one. */
static zc_status agree(nccl_comm *comm, comm_channel *host, uint32_t tag, const char *what, zc_status status)
{
    struct vote {
        uint64_t name;
        int32_t status;
        char text[500];
    } own = {.name = comm->name, .status = status}, *all;
    size_t ranks = host->comm->ranks, failed = ranks;
    if (status != ZC_OK)
        snprintf(own.text, sizeof own.text, "%s", zc_last_error());
    all = zc_malloc(ranks * sizeof *all);
    zc_status met = all ? comm_exchange(host, tag, what, &own, all, sizeof own)
                        : zc_fail(ZC_ENOMEM, "no memory for the answers of %zu ranks", ranks);
    if (!all)
        comm_poison(host->comm, ZC_ENOMEM, zc_last_error()); /* the peers wait for an answer */
    for (size_t q = 0; met == ZC_OK && q < ranks && failed == ranks; q++)
        if (all[q].status != ZC_OK)
            failed = q;
    if (status != ZC_OK)
        zc_fail(status, "%s", own.text);
    else if (met != ZC_OK)
        status = met;
    else if (failed < ranks)
        status = zc_fail((zc_status)all[failed].status, "rank %llu could not do its part of '%s': %s",
                         (unsigned long long)all[failed].name, what, all[failed].text);
    zc_free(all);
    return status;
}

/* A forked child has neither the watchdog nor CUDA: nothing can be released in it. */
static int forked(const nccl_comm *comm)
{
    return getpid() != comm->pid;
}

/* ---- channels and regions ---------------------------------------------------- */

/* What channels and regions need to the end: everything but the lanes and the host's communicator. */
static void release(nccl_comm *comm)
{
    if (comm->device) {
        comm->device->ops->free(comm->device, comm->scratch, comm->scratch_bytes);
        comm->device->ops->destroy(comm->device);
    }
    pthread_cond_destroy(&comm->wake);
    pthread_mutex_destroy(&comm->lock);
    zc_free(comm);
}

static void free_channel(nccl_channel *channel)
{
    nccl_comm *comm = nccl_of(channel->public.comm);
    CUcontext previous;
    zc_status status = cuda_enter(comm->ordinal, &previous);
    for (uint32_t t = 0; channel->tag && t < channel->tags; t++)
        if (channel->tag[t].done)
            cudaEventDestroy(channel->tag[t].done);
    if (status == ZC_OK)
        cuda_leave(previous);
    zc_free(channel->tag);
    zc_free(channel);
}

static zc_status channel_open(zc_comm *public, const char *name, uint32_t tags, comm_channel **out)
{
    nccl_comm *comm = nccl_of(public);
    comm_channel *host = NULL;
    if (tags > TAGS_MOST)
        return zc_fail(ZC_EINVAL, "rank %zu: a channel of %u tags; there may be %u", comm->name, tags, TAGS_MOST);
    /* The host's channel has one tag more, for what ranks agree on. */
    ZC_TRY(comm_channel_open(comm->host, name, tags + 1, &host));
    nccl_channel *channel = zc_calloc(1, sizeof *channel);
    nccl_tag *tag = zc_calloc(tags + 1, sizeof *tag);
    if (!channel || !tag) {
        zc_status status = zc_fail(ZC_ENOMEM, "rank %zu: no memory for a channel of %u tags", comm->name, tags);
        comm_poison(comm->host, status, "a rank had no memory for a channel"); /* the peers have theirs */
        comm_channel_close(host);
        zc_free(channel);
        zc_free(tag);
        return status;
    }
    channel->public.comm = public;
    channel->host = host;
    channel->tags = tags;
    channel->tag = tag;
    snprintf(channel->name, sizeof channel->name, "%s", name);
    pthread_mutex_lock(&comm->lock);
    comm->channels++;
    channel->number = ++comm->channels_made;
    pthread_mutex_unlock(&comm->lock);
    *out = &channel->public;
    return ZC_OK;
}

/*
 * What was posted uses memory that may go when the channel has.  It ends soon,
 * because the peers have posted it too, or the watchdog ends it.
 */
static void end_operations(nccl_channel *channel)
{
    nccl_comm *comm = nccl_of(channel->public.comm);
    CUcontext previous;
    if (cuda_enter(comm->ordinal, &previous) != ZC_OK)
        return;
    for (uint32_t t = 0; t < channel->tags; t++)
        while (channel->tag[t].done && cudaEventQuery(channel->tag[t].done) == cudaErrorNotReady)
            nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
    cudaGetLastError(); /* "not ready" counts as an error, which the next launch would be blamed for */
    cuda_leave(previous);
}

static void channel_close(comm_channel *public)
{
    nccl_channel *channel = nccl_channel_of(public);
    nccl_comm *comm = nccl_of(public->comm);
    if (forked(comm))
        return;
    end_operations(channel);
    comm_channel_close(channel->host);
    free_channel(channel);
    pthread_mutex_lock(&comm->lock);
    int last = --comm->channels == 0 && comm->closed;
    pthread_mutex_unlock(&comm->lock);
    if (last)
        release(comm);
}

static zc_status region_alloc(comm_channel *public, size_t bytes, unsigned flags, comm_region **out)
{
    nccl_comm *comm = nccl_of(public->comm);
    nccl_channel *channel = nccl_channel_of(public);
    comm_region *region = NULL;
    zc_status status = ZC_OK;
    if (flags & COMM_ONE_COPY)
        status = zc_fail(ZC_EINVAL, "rank %zu: memory that ranks share is for CPUs; use shared_params=False with GPUs",
                         comm->name);
    else if (bytes && !(region = zc_calloc(1, sizeof *region)))
        status = zc_fail(ZC_ENOMEM, "rank %zu: no memory for a region", comm->name);
    else if (bytes)
        status = comm->device->ops->alloc(comm->device, bytes, &region->base);
    status = agree(comm, channel->host, channel->tags, "allocation of memory", status);
    if (status != ZC_OK) {
        if (region)
            comm->device->ops->free(comm->device, region->base, bytes);
        zc_free(region);
        return status;
    }
    if (region) {
        region->bytes = bytes;
        region->channel = public;
        region->flags = flags;
    }
    *out = region;
    return ZC_OK;
}

/* Memory of a GPU has no first use to wait for: all of it came with the region. */
static zc_status region_grow(comm_region *region, size_t bytes)
{
    (void)region, (void)bytes;
    return ZC_OK;
}

static void region_free(comm_region *region)
{
    nccl_comm *comm = nccl_of(region->channel->comm);
    if (forked(comm))
        return;
    comm->device->ops->free(comm->device, region->base, region->bytes);
    zc_free(region);
}

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
    ZC_TRY(agree(comm, comm->host_channel, START_TAG, "start of NCCL", status));
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
    ZC_TRY(agree(comm, comm->host_channel, START_TAG, "start of NCCL", status));
    for (int k = 0; status == ZC_OK && k < NCCL_LANES; k++)
        status = connect(comm, k);
    if (status == ZC_OK)
        status = nccl_watch_start(comm);
    return agree(comm, comm->host_channel, START_TAG, "start of NCCL", status);
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
            nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
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
            nanosleep(&(struct timespec){.tv_nsec = POLL_NS}, NULL);
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
        release(comm);
}

static void close_comm(zc_comm *public)
{
    if (!forked(nccl_of(public)))
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
        status = agree(comm, comm->host_channel, START_TAG, "start on a GPU",
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
    .channel_open = channel_open,
    .channel_close = channel_close,
    .region_alloc = region_alloc,
    .region_grow = region_grow,
    .region_free = region_free,
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
