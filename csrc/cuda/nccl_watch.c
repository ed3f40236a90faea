/*
 * The watchdog of a communicator: a thread that looks, a few times a second,
 * whether what was posted can still end, and ends it if not.
 *
 * It looks at one operation of each lane, because every further event costs the
 * poster time.  Operations of a lane end in order, so one that hangs is in view
 * as soon as those before it are done.
 */
#include "nccl_state.h"
#include "zc_point.h"

#include <errno.h>
#include <signal.h>
#include <time.h>

#define LOOK_NS 50000000ull    /* between two looks */
#define SLOW_NS 500000000ull   /* from then on a peer may be gone, which is worth a question */

uint64_t nccl_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

void nccl_abort(nccl_comm *comm)
{
    comm->aborted = 1;
    ZC_POINT("failure: NCCL is to be aborted");
    for (int k = 0; k < NCCL_LANES; k++) {
        if (comm->lane[k].nccl)
            comm->api->CommAbort(comm->lane[k].nccl);
        comm->lane[k].nccl = NULL;
        comm->lane[k].probe.active = 0;
    }
}

static zc_status begin_probe(nccl_comm *comm, nccl_lane *lane)
{
    enum cudaStreamCaptureStatus capture;
    CUDA_TRY(comm->ordinal, cudaStreamIsCapturing, lane->stream, &capture);
    if (capture != cudaStreamCaptureStatusNone)
        return ZC_OK; /* the event would be one of the graph's */
    CUDA_TRY(comm->ordinal, cudaEventRecord, lane->probe.event, lane->stream);
    lane->probe.active = 1;
    lane->probe.number = lane->posted;
    lane->probe.since_ns = nccl_now_ns();
    lane->probe.what = lane->last;
    return ZC_OK;
}

zc_status nccl_watch_posting(nccl_comm *comm, int number, const char *what, uint64_t detail, const char *text)
{
    nccl_lane *lane = &comm->lane[number];
    ZC_POINT("NCCL: to be declared");
    ZC_TRY(comm_declare(comm->host, (uint32_t)number, detail, text));
    ZC_POINT("NCCL: declared");
    lane->posted++;
    lane->last = what;
    return ZC_OK;
}

zc_status nccl_watch_posted(nccl_comm *comm, int number)
{
    nccl_lane *lane = &comm->lane[number];
    return lane->probe.active ? ZC_OK : begin_probe(comm, lane);
}

size_t nccl_missing(nccl_comm *comm, int lane, uint64_t number, char *text, size_t room_bytes)
{
    return comm_behind(comm->host, (uint32_t)lane, number, text, room_bytes);
}

/* Whether the lane can go on; the lock is held. */
static void look(nccl_comm *comm, int number)
{
    nccl_lane *lane = &comm->lane[number];
    ncclResult_t result = ncclSuccess;

    ncclResult_t asked = comm->api->CommGetAsyncError(lane->nccl, &result);
    if (asked != ncclSuccess)
        result = asked;
    if (result != ncclSuccess && result != ncclInProgress) {
        nccl_broken(comm, number, result, lane->last ? lane->last : "an idle communicator");
        return;
    }
    if (!lane->probe.active)
        return;
    cudaError_t state = cudaEventQuery(lane->probe.event);
    if (state != cudaErrorNotReady) { /* an error of the GPU is the caller's to meet */
        lane->probe.active = 0;
        if (state == cudaSuccess && lane->posted > lane->probe.number)
            begin_probe(comm, lane);
        return;
    }
    uint64_t spent_ns = nccl_now_ns() - lane->probe.since_ns;
    if (spent_ns >= comm->public.timeout_ns)
        nccl_time_out(comm, number, lane->probe.number, lane->probe.what, spent_ns);
    else if (spent_ns >= SLOW_NS && comm_watch(comm->host, lane->probe.what) != ZC_OK)
        nccl_abort(comm);
}

static zc_status begin_watch(const nccl_comm *comm)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    CUcontext previous;
    ZC_TRY(cuda_enter(comm->ordinal, &previous));
    /* A look must not end a capture that goes on in another thread. */
    CUDA_TRY(comm->ordinal, cudaThreadExchangeStreamCaptureMode, &mode);
    return ZC_OK;
}

static void *watch(void *context)
{
    nccl_comm *comm = context;
    pthread_mutex_lock(&comm->lock);
    zc_status status = begin_watch(comm);
    if (status != ZC_OK)
        nccl_give_up(comm, status, zc_last_error()); /* unwatched, operations could wait for ever */
    while (!comm->ending) {
        for (int k = 0; k < NCCL_LANES && !comm->aborted; k++)
            look(comm, k);
        struct timespec until;
        clock_gettime(CLOCK_MONOTONIC, &until);
        until.tv_nsec += LOOK_NS;
        if (until.tv_nsec >= 1000000000l) {
            until.tv_sec++;
            until.tv_nsec -= 1000000000l;
        }
        pthread_cond_timedwait(&comm->wake, &comm->lock, &until);
    }
    pthread_mutex_unlock(&comm->lock);
    return NULL;
}

zc_status nccl_watch_start(nccl_comm *comm)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the program's own threads */
    int error = zc_fault() ? EAGAIN : pthread_create(&comm->watchdog, NULL, watch, comm);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error)
        return zc_fail_errno(ZC_ESYSTEM, error, "rank %zu: no thread for the watchdog", comm->name);
    comm->watching = 1;
    return ZC_OK;
}

void nccl_watch_stop(nccl_comm *comm)
{
    if (!comm->watching)
        return;
    pthread_mutex_lock(&comm->lock);
    comm->ending = 1;
    pthread_cond_signal(&comm->wake);
    pthread_mutex_unlock(&comm->lock);
    pthread_join(comm->watchdog, NULL);
    comm->watching = 0;
}
