/*
 * The communicator's own data, shared by nccl_comm.c (birth and death), nccl_channel.c
 * (channels, regions), nccl_ops.c (operations), nccl_fail.c (failures) and nccl_watch.c
 * (the watchdog).
 */
#ifndef NCCL_STATE_H
#define NCCL_STATE_H

#include "cuda_error.h"
#include "nccl_api.h"
#include "nccl_comm.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

/* A lane's operations are declared on the host communicator's line of the same number. */
enum { NCCL_LANE_MAIN, NCCL_LANE_UNITS, NCCL_LANES };
_Static_assert(NCCL_LANES == COMM_LINE_ENGINE, "the engine has a line of its own");

/*
 * The watchdog has one operation of a lane in view at a time, the probe: the last
 * that was posted when it was free.  When that is done, the newest is next.
 */
typedef struct nccl_probe {
    cudaEvent_t event;
    int active;
    uint64_t number;      /* of the lane's operations; 1 is the first */
    uint64_t since_ns;
    const char *what;
} nccl_probe;

typedef struct nccl_lane {
    ncclComm_t nccl;      /* NULL: none, or aborted */
    cudaStream_t stream;
    cudaEvent_t start;    /* of the operation that is being posted */
    uint64_t posted;      /* operations, each declared on the lane's line and then given to NCCL */
    const char *last;     /* the operation posted last */
    nccl_probe probe;
} nccl_lane;

typedef struct nccl_comm {
    zc_comm public;
    zc_comm *host;
    zc_device *device;            /* its own: regions, scratch and lanes outlive engines */
    size_t name;                  /* this rank's number in the first communicator, for messages */
    pid_t pid;
    int ordinal;
    const nccl_api *api;          /* NULL with one rank */
    comm_channel *host_channel;   /* of start-up */
    pthread_mutex_t lock;         /* of all below */
    nccl_lane lane[NCCL_LANES];
    void *scratch;                /* of the main lane's operations: what a reduction receives, or widens */
    size_t scratch_bytes;
    int aborted;
    pthread_t watchdog;
    pthread_cond_t wake;          /* of the watchdog, at the end */
    int watching, ending;
    size_t channels;              /* open: they, and their regions, may outlive close */
    uint64_t channels_made;
    int closed;
} nccl_comm;

typedef struct nccl_tag {
    cudaEvent_t done; /* behind the last operation; made at the first use */
    uint64_t issued;
    int lane;         /* of the last operation */
} nccl_tag;

typedef struct nccl_channel {
    comm_channel public;
    comm_channel *host;
    char name[48];
    uint64_t number;  /* in the order of opening, so the same on all ranks; names need not be unique */
    uint32_t tags;
    nccl_tag *tag;    /* [tags] */
} nccl_channel;

/* Tickets: the operation's number on its tag, and the tag. */
#define NCCL_TAG_BITS 20u

static inline nccl_comm *nccl_of(zc_comm *comm)
{
    return (nccl_comm *)(void *)comm;
}

static inline nccl_channel *nccl_channel_of(comm_channel *channel)
{
    return (nccl_channel *)(void *)channel;
}

/* A forked child has neither the watchdog nor CUDA: nothing can be released in it. */
static inline int nccl_forked(const nccl_comm *comm)
{
    return getpid() != comm->pid;
}

/* Between two looks at what has no call that waits with a timeout. */
static inline void nccl_pause(void)
{
    nanosleep(&(struct timespec){.tv_nsec = 200000}, NULL);
}

/* ---- nccl_fail.c -------------------------------------------------------- */

/* Every rank tells how its part went, on a tag of a channel of the host; all return a failure if any had one. */
zc_status nccl_agree(nccl_comm *comm, comm_channel *host, uint32_t tag, const char *what, zc_status status);

/* In these five the lock is held, or nobody else knows the communicator yet. */

/* The group fails on all ranks, unless it has before, and all operations end; returns the group's failure. */
zc_status nccl_give_up(nccl_comm *comm, zc_status status, const char *why);
/* The same after a failed call of NCCL. */
zc_status nccl_broken(nccl_comm *comm, int lane, ncclResult_t result, const char *what);
/* The same after a lane's operation of this number took too long. */
zc_status nccl_time_out(nccl_comm *comm, int lane, uint64_t number, const char *what, uint64_t spent_ns);
/* The same when the interrupt callback has said so; returns ZC_EINTERRUPT, which is of this call only. */
zc_status nccl_interrupt(nccl_comm *comm, const char *what);
/* A result of a call on a non-blocking communicator: waits while NCCL is at it, within the timeout. */
zc_status nccl_settle(nccl_comm *comm, int lane, ncclResult_t result, const char *what);

/* ---- nccl_channel.c ----------------------------------------------------- */

zc_status nccl_channel_open(zc_comm *public, const char *name, uint32_t tags, comm_channel **out);
void nccl_channel_close(comm_channel *public);
zc_status nccl_region_alloc(comm_channel *public, size_t bytes, unsigned flags, comm_region **out);
zc_status nccl_region_grow(comm_region *region, size_t bytes);
void nccl_region_free(comm_region *region);
/* What channels and regions need to the end goes: everything but the lanes and the host's communicator. */
void nccl_release(nccl_comm *comm);

/* ---- nccl_ops.c --------------------------------------------------------- */

zc_status nccl_reserve(comm_channel *channel, size_t count, zc_dtype dtype, size_t *bytes);
zc_status nccl_reduce_scatter(comm_channel *channel, zc_stream *stream, const comm_reduce_args *args,
                              comm_ticket *ticket);
zc_status nccl_all_gather(comm_channel *channel, zc_stream *stream, uint32_t tag, comm_region *region,
                          size_t offset_bytes, size_t slice_bytes, comm_ticket *ticket);
zc_status nccl_all_gather_to(comm_channel *channel, zc_stream *stream, uint32_t tag, comm_region *region,
                             size_t offset_bytes, size_t slice_bytes, void *to, comm_ticket *ticket);
zc_status nccl_all_reduce_words(comm_channel *channel, zc_stream *stream, uint32_t tag, comm_region *region,
                                size_t offset_bytes, size_t words, uint64_t *to, comm_ticket *ticket);
zc_status nccl_broadcast(comm_channel *channel, zc_stream *stream, uint32_t tag, comm_region *region,
                         size_t offset_bytes, size_t bytes, size_t root, comm_ticket *ticket);
zc_status nccl_test(comm_channel *channel, comm_ticket ticket, zc_stream *stream, int *done);
zc_status nccl_wait(comm_channel *channel, comm_ticket ticket, zc_stream *stream);
zc_status nccl_wait_some(comm_channel *channel, comm_ticket ticket, zc_stream *stream, uint64_t limit_ns, int *done);

/* ---- nccl_watch.c ------------------------------------------------------- */

uint64_t nccl_now_ns(void);
zc_status nccl_watch_start(nccl_comm *comm);
void nccl_watch_stop(nccl_comm *comm);
/*
 * The lock is held in all below.  A lane's operation is about to be given to NCCL, which may wait for peers:
 * every rank says first what it is (detail and text as comm_declare's); it has been.
 */
zc_status nccl_watch_posting(nccl_comm *comm, int lane, const char *what, uint64_t detail, const char *text);
zc_status nccl_watch_posted(nccl_comm *comm, int lane);
/* How many ranks have not posted the lane's operation of this number; text: "1, 2", these. */
size_t nccl_missing(nccl_comm *comm, int lane, uint64_t number, char *text, size_t room_bytes);
/* Ends all operations; their results are void. The group has been poisoned. */
void nccl_abort(nccl_comm *comm);

#endif
