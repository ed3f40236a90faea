/*
 * The operations of comm.h on NCCL: each is enqueued on its lane, behind what the
 * caller's stream has, and leaves an event as its ticket.  nccl_comm.h has the
 * protocol.
 */
#include "cuda_device.h"
#include "cuda_kernels.h"
#include "nccl_state.h"
#include "zc_hash.h"
#include "zc_point.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#define LOOK_AGAIN_NS 50000l

/* What all ranks must post alike. */
typedef struct operation {
    const char *what;
    size_t count;
    const char *of;        /* elements or bytes */
    size_t root;
} operation;

/* An operation that is being posted. */
typedef struct posting {
    nccl_comm *comm;
    nccl_channel *channel;
    nccl_lane *lane;
    int lane_number;
    uint32_t tag;
    const char *what;
    int entered;
    CUcontext previous; /* what was current, if entered */
} posting;

static cudaStream_t cuda_stream(zc_stream *stream)
{
    return (cudaStream_t)(void *)stream;
}

/* Why nothing can be posted or waited for any more. */
static zc_status ended(nccl_comm *comm, const char *what)
{
    zc_status status = comm_watch(comm->host, what);
    return status != ZC_OK ? status : zc_fail(ZC_ECOMM, "rank %zu: the communicator was aborted", comm->name);
}

/* Tells the peers what NCCL is about to get. */
static zc_status declare(posting *p, const operation *op)
{
    char text[COMM_WHAT_BYTES];
    uint64_t numbers[] = {p->channel->number, p->tag, op->count, op->root};
    uint64_t detail = zc_hash(ZC_HASH_START, numbers, sizeof numbers);
    detail = zc_hash(detail, op->what, strlen(op->what) + 1);
    detail = zc_hash(detail, op->of, strlen(op->of));
    snprintf(text, sizeof text, "%s of %zu %s (%.20s #%llu, tag %u)", op->what, op->count, op->of, p->channel->name,
             (unsigned long long)p->channel->number, p->tag);
    return nccl_watch_posting(p->comm, p->lane_number, op->what, detail, text);
}

static zc_status start(posting *p, zc_stream *stream, const operation *op)
{
    nccl_comm *comm = p->comm;
    nccl_tag *tag = &p->channel->tag[p->tag];
    if (comm->aborted)
        return ended(comm, p->what);
    ZC_TRY(cuda_enter(comm->ordinal, &p->previous));
    p->entered = 1;
    if (!tag->done)
        CUDA_TRY(comm->ordinal, cudaEventCreateWithFlags, &tag->done, cudaEventDisableTiming);
    if (tag->issued && tag->lane != p->lane_number) /* operations of a tag come one after the other */
        CUDA_TRY(comm->ordinal, cudaStreamWaitEvent, p->lane->stream, tag->done, 0);
    CUDA_TRY(comm->ordinal, cudaEventRecord, p->lane->start, cuda_stream(stream));
    CUDA_TRY(comm->ordinal, cudaStreamWaitEvent, p->lane->stream, p->lane->start, 0);
    return declare(p, op);
}

static zc_status mark(posting *p, comm_ticket *ticket)
{
    nccl_tag *tag = &p->channel->tag[p->tag];
    ZC_POINT("NCCL: posted");
    CUDA_TRY(p->comm->ordinal, cudaEventRecord, tag->done, p->lane->stream);
    ZC_TRY(nccl_watch_posted(p->comm, p->lane_number));
    tag->lane = p->lane_number;
    *ticket = ++tag->issued << NCCL_TAG_BITS | p->tag;
    return ZC_OK;
}

static zc_status finish(posting *p, zc_status status, comm_ticket *ticket)
{
    nccl_comm *comm = p->comm;
    if (status == ZC_OK)
        status = mark(p, ticket);
    if (status != ZC_OK && !comm->aborted) { /* the peers post it, and the ranks would be out of step from here on */
        char why[1024];
        snprintf(why, sizeof why, "rank %zu could not post %s: %s", comm->name, p->what, zc_last_error());
        status = nccl_give_up(comm, status, why);
    }
    pthread_mutex_unlock(&comm->lock);
    if (p->entered)
        cuda_leave(p->previous);
    return status;
}

/* Between begin and finish the lock is held and the GPU current. On failure neither is. */
static zc_status begin(posting *p, comm_channel *channel, int lane, uint32_t tag, zc_stream *stream,
                       const operation *op)
{
    *p = (posting){.comm = nccl_of(channel->comm), .channel = nccl_channel_of(channel), .lane_number = lane, .tag = tag,
                   .what = op->what};
    p->lane = &p->comm->lane[lane];
    if (tag >= p->channel->tags)
        return zc_fail(ZC_EINVAL, "rank %zu: %s on tag %u of channel '%s', which has %u", p->comm->name, op->what, tag,
                       p->channel->name, p->channel->tags);
    ZC_TRY(comm_progress(p->comm->host)); /* fails if the group has */
    pthread_mutex_lock(&p->comm->lock);
    zc_status status = start(p, stream, op);
    return status == ZC_OK ? ZC_OK : finish(p, status, NULL);
}

static zc_status settle(posting *p, ncclResult_t result)
{
    return nccl_settle(p->comm, p->lane_number, result, p->what);
}

/* ---- reductions ------------------------------------------------------------ */

static size_t scratch_need(const nccl_comm *comm, size_t count, zc_dtype dtype)
{
    return comm->public.ranks * count * zc_dtype_bytes(comm->public.in_rank_order ? dtype : zc_dtype_sum(dtype));
}

/* Operations of the main lane use the scratch one after the other. */
zc_status nccl_reserve(comm_channel *channel, size_t count, zc_dtype dtype, size_t *bytes)
{
    nccl_comm *comm = nccl_of(channel->comm);
    const device_ops *ops = comm->device->ops;
    size_t need = scratch_need(comm, count, dtype);
    zc_status status = ZC_OK;
    void *grown;
    if (comm->public.ranks == 1)
        return ZC_OK;
    pthread_mutex_lock(&comm->lock);
    if (need > comm->scratch_bytes && (status = ops->alloc(comm->device, need, &grown)) == ZC_OK) {
        ops->free(comm->device, comm->scratch, comm->scratch_bytes);
        *bytes = need - comm->scratch_bytes;
        comm->scratch = grown;
        comm->scratch_bytes = need;
    }
    pthread_mutex_unlock(&comm->lock);
    return status;
}

static zc_status launched(posting *p, cudaError_t error)
{
    return error == cudaSuccess ? ZC_OK : cuda_fail(error, p->comm->ordinal, "cudaLaunchKernel");
}

/* Every rank sends each slice, `stride_bytes` apart, to its owner. */
static zc_status exchange_slices(posting *p, const char *from, size_t stride_bytes, char *received, size_t slice_bytes)
{
    nccl_comm *comm = p->comm;
    const nccl_api *api = comm->api;
    ncclResult_t result = api->GroupStart();
    if (result != ncclSuccess)
        return settle(p, result);
    for (size_t q = 0; q < comm->public.ranks && result == ncclSuccess; q++) {
        if (q == comm->public.rank)
            continue;
        result = api->Send(from + q * stride_bytes, slice_bytes, ncclUint8, (int)q, p->lane->nccl, p->lane->stream);
        if (result == ncclSuccess || result == ncclInProgress)
            result = api->Recv(received + q * slice_bytes, slice_bytes, ncclUint8, (int)q, p->lane->nccl,
                               p->lane->stream);
        if (result == ncclInProgress)
            result = ncclSuccess;
        ZC_POINT("NCCL: a slice is in the group");
    }
    ncclResult_t ended_with = api->GroupEnd();
    return settle(p, result != ncclSuccess ? result : ended_with);
}

/* The owner of each slice adds what it has received in rank order. */
static zc_status reduce_in_order(posting *p, const comm_reduce_args *args)
{
    nccl_comm *comm = p->comm;
    size_t ranks = comm->public.ranks, me = comm->public.rank, slice = args->count * zc_dtype_bytes(args->dtype);
    char *window = (char *)args->region->base + args->offset_bytes;
    char *received = comm->scratch;
    if (args->zero) { /* sent from where nothing is received; the window may be in use for something else */
        char *zeros = received + me * slice;
        CUDA_TRY(comm->ordinal, cudaMemsetAsync, zeros, 0, slice, p->lane->stream);
        ZC_TRY(exchange_slices(p, zeros, 0, received, slice));
    } else {
        ZC_TRY(exchange_slices(p, window, slice, received, slice));
    }
    cuda_operands in = {.base = received, .stride_bytes = slice, .ranks = ranks, .own = me};
    in.own_at = args->zero ? NULL : args->own ? args->own : window + me * slice;
    return launched(p, cuda_reduce(p->lane->stream, args->to, &in, args->count, args->dtype, args->accumulate,
                                   args->flags));
}

/* to = or += from, both of the sum's type, and the flags of what is written. */
static zc_status take_sum(posting *p, const comm_reduce_args *args, const void *from)
{
    cuda_operands in = {.base = from, .ranks = 1, .own = 1};
    return launched(p, cuda_reduce(p->lane->stream, args->to, &in, args->count, zc_dtype_sum(args->dtype),
                                   args->accumulate, args->flags));
}

/* The whole contribution in the sum's type, in scratch. */
static zc_status widen(posting *p, const comm_reduce_args *args, char *wide)
{
    nccl_comm *comm = p->comm;
    size_t ranks = comm->public.ranks, me = comm->public.rank;
    size_t sum_bytes = zc_dtype_bytes(zc_dtype_sum(args->dtype));
    char *window = (char *)args->region->base + args->offset_bytes;
    if (args->zero) {
        CUDA_TRY(comm->ordinal, cudaMemsetAsync, wide, 0, ranks * args->count * sum_bytes, p->lane->stream);
        return ZC_OK;
    }
    cuda_operands all = {.base = window, .ranks = 1, .own = 1}, own = {.base = args->own, .ranks = 1, .own = 1};
    ZC_TRY(launched(p, cuda_reduce(p->lane->stream, wide, &all, ranks * args->count, args->dtype, 0, NULL)));
    if (!args->own)
        return ZC_OK;
    return launched(p, cuda_reduce(p->lane->stream, wide + me * args->count * sum_bytes, &own, args->count, args->dtype,
                                   0, NULL));
}

static zc_status reduce_by_nccl(posting *p, const comm_reduce_args *args)
{
    nccl_comm *comm = p->comm;
    zc_dtype sum = zc_dtype_sum(args->dtype);
    size_t sum_bytes = zc_dtype_bytes(sum);
    char *wide = comm->scratch;
    ZC_TRY(widen(p, args, wide));
    char *own = wide + comm->public.rank * args->count * sum_bytes;
    ZC_TRY(settle(p, comm->api->ReduceScatter(wide, own, args->count, sum == ZC_FLOAT64 ? ncclFloat64 : ncclFloat32,
                                              ncclSum, p->lane->nccl, p->lane->stream)));
    return take_sum(p, args, own);
}

static zc_status check_reserved(nccl_comm *comm, const comm_reduce_args *args)
{
    pthread_mutex_lock(&comm->lock);
    int fits = scratch_need(comm, args->count, args->dtype) <= comm->scratch_bytes;
    pthread_mutex_unlock(&comm->lock);
    if (fits)
        return ZC_OK;
    return zc_fail(ZC_EINVAL, "rank %zu: reduce_scatter of slices of %zu elements of %s, for which nothing was "
                   "reserved; comm_reserve must come first", comm->name, args->count, zc_dtype_name(args->dtype));
}

/* One rank: its own contribution is the sum. */
static zc_status reduce_alone(nccl_comm *comm, zc_stream *stream, const comm_reduce_args *args)
{
    const void *from = args->zero ? NULL : args->own ? args->own : (char *)args->region->base + args->offset_bytes;
    cuda_operands in = {.base = from, .ranks = 1, .own = 0, .own_at = from};
    CUcontext previous;
    ZC_TRY(comm_progress(comm->host));
    ZC_TRY(cuda_enter(comm->ordinal, &previous));
    cudaError_t error = cuda_reduce(cuda_stream(stream), args->to, &in, args->count, args->dtype, args->accumulate,
                                    args->flags);
    cuda_leave(previous);
    return error == cudaSuccess ? ZC_OK : cuda_fail(error, comm->ordinal, "cudaLaunchKernel");
}

zc_status nccl_reduce_scatter(comm_channel *channel, zc_stream *stream, const comm_reduce_args *args,
                              comm_ticket *ticket)
{
    nccl_comm *comm = nccl_of(channel->comm);
    posting p;
    if (comm->public.ranks == 1)
        return reduce_alone(comm, stream, args);
    ZC_TRY(check_reserved(comm, args));
    operation op = {.what = "reduce_scatter", .count = args->count, .of = zc_dtype_name(args->dtype)};
    ZC_TRY(begin(&p, channel, NCCL_LANE_MAIN, args->tag, stream, &op));
    return finish(&p, comm->public.in_rank_order ? reduce_in_order(&p, args) : reduce_by_nccl(&p, args), ticket);
}

/* ---- the others -------------------------------------------------------------- */

static zc_status copy_alone(nccl_comm *comm, zc_stream *stream, void *to, const void *from, size_t bytes)
{
    ZC_TRY(comm_progress(comm->host));
    return comm->device->ops->copy(comm->device, stream, to, from, bytes);
}

zc_status nccl_all_gather(comm_channel *channel, zc_stream *stream, uint32_t tag, comm_region *region,
                          size_t offset_bytes, size_t slice_bytes, comm_ticket *ticket)
{
    nccl_comm *comm = nccl_of(channel->comm);
    char *all = (char *)region->base + offset_bytes;
    posting p;
    if (comm->public.ranks == 1)
        return comm_progress(comm->host);
    operation op = {.what = "all_gather", .count = slice_bytes, .of = "bytes"};
    ZC_TRY(begin(&p, channel, NCCL_LANE_MAIN, tag, stream, &op));
    const char *own = all + comm->public.rank * slice_bytes;
    ncclResult_t result = comm->api->AllGather(own, all, slice_bytes, ncclUint8, p.lane->nccl, p.lane->stream);
    return finish(&p, settle(&p, result), ticket);
}

/*
 * Until the tag's last gather of a unit is done.  Ranks may gather units without
 * ever meeting, so one could run ahead until CUDA's queue is full and its launch blocks,
 * with the lock held that the watchdog needs.
 */
static zc_status wait_for_tag(comm_channel *channel, uint32_t tag, zc_stream *stream, const char *what)
{
    nccl_comm *comm = nccl_of(channel->comm);
    const nccl_tag *last = &nccl_channel_of(channel)->tag[tag];
    if (tag >= nccl_channel_of(channel)->tags)
        return ZC_OK; /* begin has a sentence for it */
    pthread_mutex_lock(&comm->lock);
    int done = !last->issued || last->lane != NCCL_LANE_UNITS;
    pthread_mutex_unlock(&comm->lock);
    for (;;) {
        if (!done)
            ZC_TRY(nccl_test(channel, tag, stream, &done));
        if (done)
            return ZC_OK;
        if (comm->public.interrupted && comm->public.interrupted(comm->public.interrupt_context)) {
            pthread_mutex_lock(&comm->lock);
            zc_status status = nccl_interrupt(comm, what);
            pthread_mutex_unlock(&comm->lock);
            return status;
        }
        nanosleep(&(struct timespec){.tv_nsec = LOOK_AGAIN_NS}, NULL);
    }
}

zc_status nccl_all_gather_to(comm_channel *channel, zc_stream *stream, uint32_t tag, comm_region *region,
                             size_t offset_bytes, size_t slice_bytes, void *to, comm_ticket *ticket)
{
    nccl_comm *comm = nccl_of(channel->comm);
    char *own = (char *)region->base + offset_bytes;
    operation op = {.what = "all_gather of a unit", .count = slice_bytes, .of = "bytes"};
    posting p;
    if (comm->public.ranks == 1)
        return copy_alone(comm, stream, to, own, slice_bytes);
    ZC_TRY(wait_for_tag(channel, tag, stream, op.what));
    ZC_TRY(begin(&p, channel, NCCL_LANE_UNITS, tag, stream, &op));
    ncclResult_t result = comm->api->AllGather(own, to, slice_bytes, ncclUint8, p.lane->nccl, p.lane->stream);
    return finish(&p, settle(&p, result), ticket);
}

zc_status nccl_all_reduce_words(comm_channel *channel, zc_stream *stream, uint32_t tag, comm_region *region,
                                size_t offset_bytes, size_t words, uint64_t *to, comm_ticket *ticket)
{
    nccl_comm *comm = nccl_of(channel->comm);
    char *from = (char *)region->base + offset_bytes;
    posting p;
    if (comm->public.ranks == 1)
        return copy_alone(comm, stream, to, from, words * sizeof *to);
    operation op = {.what = "all_reduce", .count = words, .of = "words"};
    ZC_TRY(begin(&p, channel, NCCL_LANE_MAIN, tag, stream, &op));
    ncclResult_t result = comm->api->AllReduce(from, to, words, ncclUint64, ncclSum, p.lane->nccl, p.lane->stream);
    return finish(&p, settle(&p, result), ticket);
}

zc_status nccl_broadcast(comm_channel *channel, zc_stream *stream, uint32_t tag, comm_region *region,
                         size_t offset_bytes, size_t bytes, size_t root, comm_ticket *ticket)
{
    nccl_comm *comm = nccl_of(channel->comm);
    char *at = (char *)region->base + offset_bytes;
    posting p;
    if (comm->public.ranks == 1)
        return comm_progress(comm->host);
    operation op = {.what = "broadcast", .count = bytes, .of = "bytes", .root = root};
    ZC_TRY(begin(&p, channel, NCCL_LANE_MAIN, tag, stream, &op));
    ncclResult_t result = comm->api->Broadcast(at, at, bytes, ncclUint8, (int)root, p.lane->nccl, p.lane->stream);
    return finish(&p, settle(&p, result), ticket);
}

/* ---- tickets ------------------------------------------------------------------ */

static zc_status wait_on_stream(nccl_comm *comm, cudaEvent_t done, zc_stream *stream)
{
    CUDA_TRY(comm->ordinal, cudaStreamWaitEvent, cuda_stream(stream), done, 0);
    return ZC_OK;
}

zc_status nccl_wait(comm_channel *channel, comm_ticket ticket, zc_stream *stream)
{
    nccl_comm *comm = nccl_of(channel->comm);
    uint32_t tag = (uint32_t)ticket & ((1u << NCCL_TAG_BITS) - 1);
    CUcontext previous;
    ZC_TRY(comm_progress(comm->host));
    ZC_TRY(cuda_enter(comm->ordinal, &previous));
    pthread_mutex_lock(&comm->lock);
    zc_status status = comm->aborted ? ended(comm, "a wait")
                                     : wait_on_stream(comm, nccl_channel_of(channel)->tag[tag].done, stream);
    pthread_mutex_unlock(&comm->lock);
    cuda_leave(previous);
    return status;
}

/* Only looks: a stream that waited would not overlap with what it is asked about. */
zc_status nccl_test(comm_channel *channel, comm_ticket ticket, zc_stream *stream, int *done)
{
    nccl_comm *comm = nccl_of(channel->comm);
    uint32_t tag = (uint32_t)ticket & ((1u << NCCL_TAG_BITS) - 1);
    CUcontext previous;
    (void)stream;
    ZC_TRY(comm_progress(comm->host));
    ZC_TRY(cuda_enter(comm->ordinal, &previous));
    cudaError_t state = cudaEventQuery(nccl_channel_of(channel)->tag[tag].done);
    if (state == cudaErrorNotReady)
        cudaGetLastError(); /* it counts as an error, which the next launch would be blamed for */
    cuda_leave(previous);
    *done = state == cudaSuccess;
    return *done || state == cudaErrorNotReady ? ZC_OK : cuda_fail(state, comm->ordinal, "cudaEventQuery");
}

zc_status nccl_wait_some(comm_channel *channel, comm_ticket ticket, zc_stream *stream, uint64_t limit_ns, int *done)
{
    uint64_t start_ns = nccl_now_ns();
    ZC_TRY(nccl_test(channel, ticket, stream, done));
    while (!*done && nccl_now_ns() - start_ns < limit_ns) {
        nanosleep(&(struct timespec){.tv_nsec = LOOK_AGAIN_NS}, NULL);
        ZC_TRY(nccl_test(channel, ticket, stream, done));
    }
    return ZC_OK;
}
