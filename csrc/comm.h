/*
 * Collectives between the ranks of one group, as the engine sees them.
 *
 * A communicator is the group; a channel is one user of it (an engine), with
 * its own tags.  Operations are matched by (channel, tag): the k-th operation
 * a rank posts on a tag meets the k-th of every other rank on that tag, and
 * must be the same in kind, dtype, count and root, or all ranks get
 * ZC_EMISMATCH naming both sides.  Operations on different tags are
 * independent and may complete in any order, unless the communicator is
 * `ordered`, in which case every rank must post all operations of a channel in
 * one order (NCCL).
 *
 * Streams.  An operation begins after the work enqueued on `stream` before the
 * call; the call does not wait for it.  It hands out a ticket.  comm_test
 * tells whether work enqueued on `stream` from now on is ordered after the
 * whole operation: its result is there *and* every peer has finished with this
 * rank's memory.  comm_wait makes it so: on a backend with real streams by making
 * the stream wait, on the CPU by blocking the host.  Ticket 0 is an operation
 * that is done.
 *
 * Waiting.  Every wait makes progress on all channels of all communicators
 * that share this one's processes, returns to the interrupt callback at least
 * every 100 ms, and ends: with ZC_EPEERLOST when a peer that is waited for is
 * gone, ZC_ETIMEOUT after the communicator's timeout, ZC_EMISMATCH when ranks
 * wait for one another in different operations, ZC_EINTERRUPT.  Any of these
 * poisons the group: on all ranks every later operation fails, with the first
 * reason, until a new communicator is made.  (ZC_EINTERRUPT is returned by the
 * interrupted call only; peers and later calls get ZC_ECOMM with its sentence.)
 * Posting on a tag whose last operation is still pending waits for that one.
 *
 * Memory.  Regions are allocated collectively and reachable by the backend on
 * all ranks (mapped, or registered); operations of the engine name offsets in
 * them.  The plain-array operations at the end accept any host memory and
 * block.
 *
 * Threads.  One communicator may be used by several threads of its rank; calls
 * are serialised.  Ranks that wait for one another are found out only while each
 * of them calls from one thread; otherwise the timeout ends the wait.  A call
 * from a forked child fails with ZC_ESTATE.
 */
#ifndef COMM_H
#define COMM_H

#include "device.h"
#include "zc_dtype.h"
#include "zc_status.h"

#include <stddef.h>
#include <stdint.h>

typedef struct zc_comm zc_comm;
typedef struct comm_channel comm_channel;
typedef uint64_t comm_ticket;

/* Memory that every rank of a channel has, at a place known to all. */
typedef struct comm_region {
    void *base;         /* this rank's address */
    size_t bytes;
    comm_channel *channel;
    unsigned flags;
} comm_region;

/* One physical copy per host: all ranks' `base` is rank 0's memory. */
#define COMM_ONE_COPY 1u
/* Only address space at first: memory comes with comm_region_grow, so that a caller can move data in piece by piece. */
#define COMM_GROWS 2u

typedef enum comm_op { COMM_SUM = 0, COMM_MAX = 1, COMM_MIN = 2, COMM_PROD = 3 } comm_op; /* as cpu_op */

/*
 * Reduce-scatter of one bucket.  Rank q contributes `ranks` slices of `count`
 * elements of `dtype` each, at region + offset; this rank receives
 *     s[i] = (slice of rank 0)[i] + (slice of rank 1)[i] + ...
 * in zc_dtype_sum(dtype), in rank order, rounded once per addition, into `to`
 * (`to[i] = s[i]`, or `to[i] += s[i]` with accumulate).
 *   own   where this rank's contribution to its own slice is; NULL: in the
 *         region like the others.  May equal `to` when dtype is the sum's.
 *   to    may be this rank's own slice in the region when dtype is the sum's.
 *   zero  this rank contributes zeros and its slices are not read.
 *   flags receives CPU_NONFINITE_* of the values written, or-ed in; may be NULL.
 */
typedef struct comm_reduce_args {
    uint32_t tag;
    comm_region *region;
    size_t offset_bytes;
    const void *own;
    void *to;
    size_t count;
    zc_dtype dtype;
    int accumulate;
    int zero;
    uint32_t *flags;
} comm_reduce_args;

typedef struct comm_ops {
    const char *name;
    int ordered;
    /* Where regions are: a device for an engine, and the number of its GPU. NULL: in host memory. */
    zc_status (*device)(zc_comm *comm, zc_device **out);
    int (*gpu)(const zc_comm *comm);
    zc_status (*channel_open)(zc_comm *comm, const char *name, uint32_t tags, comm_channel **out);
    void (*channel_close)(comm_channel *channel);
    zc_status (*region_alloc)(comm_channel *channel, size_t bytes, unsigned flags, comm_region **out);
    zc_status (*region_grow)(comm_region *region, size_t bytes);
    void (*region_free)(comm_region *region);
    zc_status (*reserve)(comm_channel *channel, size_t count, zc_dtype dtype, size_t *bytes); /* NULL: nothing to do */
    zc_status (*reduce_scatter)(comm_channel *channel, zc_stream *stream, const comm_reduce_args *args,
                                comm_ticket *ticket);
    zc_status (*all_gather)(comm_channel *channel, zc_stream *stream, uint32_t tag, comm_region *region,
                            size_t offset_bytes, size_t slice_bytes, comm_ticket *ticket);
    zc_status (*all_gather_to)(comm_channel *channel, zc_stream *stream, uint32_t tag, comm_region *region,
                               size_t offset_bytes, size_t slice_bytes, void *to, comm_ticket *ticket);
    const void *(*peer)(const comm_region *region, size_t rank); /* NULL: regions are not readable from outside */
    zc_status (*all_reduce_words)(comm_channel *channel, zc_stream *stream, uint32_t tag, comm_region *region,
                                  size_t offset_bytes, size_t words, uint64_t *to, comm_ticket *ticket);
    zc_status (*broadcast)(comm_channel *channel, zc_stream *stream, uint32_t tag, comm_region *region,
                           size_t offset_bytes, size_t bytes, size_t root, comm_ticket *ticket);
    zc_status (*test)(comm_channel *channel, comm_ticket ticket, zc_stream *stream, int *done);
    zc_status (*wait)(comm_channel *channel, comm_ticket ticket, zc_stream *stream);
    zc_status (*wait_some)(comm_channel *channel, comm_ticket ticket, zc_stream *stream, uint64_t limit_ns,
                           int *done);
    zc_status (*progress)(zc_comm *comm);
    zc_status (*watch)(zc_comm *comm, const char *what);
    zc_status (*declare)(zc_comm *comm, uint32_t line, uint64_t detail, const char *what);
    size_t (*behind)(zc_comm *comm, uint32_t line, uint64_t number, char *text, size_t room_bytes);
    size_t (*stopped)(zc_comm *comm, char *text, size_t room_bytes); /* NULL: it never knows */
    zc_status (*exchange)(comm_channel *channel, uint32_t tag, const char *what, const void *record,
                          void *records, size_t bytes);

    zc_status (*array_all_reduce)(zc_comm *comm, void *array, size_t count, zc_dtype dtype, comm_op op);
    zc_status (*array_reduce_scatter)(zc_comm *comm, const void *from, void *to, size_t count, zc_dtype dtype,
                                      comm_op op);
    zc_status (*array_all_gather)(zc_comm *comm, const void *from, void *to, size_t bytes);
    zc_status (*array_broadcast)(zc_comm *comm, void *array, size_t bytes, size_t root);
    zc_status (*barrier)(zc_comm *comm);
    zc_status (*split)(zc_comm *comm, int64_t color, zc_comm **out);
    void (*poison)(zc_comm *comm, zc_status status, const char *why);
    void (*close)(zc_comm *comm);
} comm_ops;

/* The head of every communicator. */
struct zc_comm {
    const comm_ops *ops;
    size_t rank, ranks;     /* in this group; messages name ranks of the first communicator */
    size_t local_ranks;     /* ranks of the group on this host */
    int in_rank_order;      /* reductions add in the order that comm_reduce_args promises */
    uint64_t timeout_ns;
    /* Called during waits, at least every 100 ms; not 0: give up with ZC_EINTERRUPT. May be NULL. */
    int (*interrupted)(void *context);
    void *interrupt_context;
};

/* When this rank worked on something: CLOCK_MONOTONIC. end_ns 0: it did not. */
typedef struct comm_times {
    uint64_t begin_ns, end_ns;
} comm_times;

struct comm_channel {
    zc_comm *comm;
    /*
     * The user's, NULL or [tags * ranks], and set between calls.  An operation takes it when it is posted and notes there,
     * before it is done, when this rank worked on it: a reduce-scatter, at tag * ranks + this rank, when it added up; an
     * all-gather in place, at tag * ranks + q, when it copied rank q's slice.  Only by backends that do this themselves
     * and on the CPU.
     */
    comm_times *times;
};

/* ---- the calls; see above for streams and tickets --------------------- */

/* Collective. `tags` tags, all idle. `name` appears in messages and must agree. */
zc_status comm_channel_open(zc_comm *comm, const char *name, uint32_t tags, comm_channel **out);
/* Local; NULL is allowed. Regions of the channel must be freed before. */
void comm_channel_close(comm_channel *channel);

/* Collective, blocking; zero-filled, page aligned, pages present. bytes 0 gives *out = NULL. */
zc_status comm_region_alloc(comm_channel *channel, size_t bytes, unsigned flags, comm_region **out);
/*
 * Local: of a COMM_GROWS region, the first `bytes` bytes have memory after this.
 * On a COMM_ONE_COPY region only rank 0's call reserves memory.
 */
zc_status comm_region_grow(comm_region *region, size_t bytes);
/* Local. No operation may be pending on it on any rank. NULL is allowed. */
void comm_region_free(comm_region *region);

/*
 * Local.  Makes the memory that reductions with slices of up to `count` elements
 * need, which must come before them: in the middle of training a backend may not
 * be able to allocate without waiting for its peers.  *bytes is what it took now.
 */
zc_status comm_reserve(comm_channel *channel, size_t count, zc_dtype dtype, size_t *bytes);

zc_status comm_reduce_scatter(comm_channel *channel, zc_stream *stream, const comm_reduce_args *args,
                              comm_ticket *ticket);

/*
 * All-gather in place: rank r's slice of slice_bytes lies at region + offset +
 * r * slice_bytes on every rank.  On a COMM_ONE_COPY region nothing is copied.
 */
zc_status comm_all_gather(comm_channel *channel, zc_stream *stream, uint32_t tag, comm_region *region,
                          size_t offset_bytes, size_t slice_bytes, comm_ticket *ticket);

/*
 * All-gather of slices that lie at region + offset on every rank: `to`, device
 * memory of ranks * slice_bytes, receives them in rank order.
 */
zc_status comm_all_gather_to(comm_channel *channel, zc_stream *stream, uint32_t tag, comm_region *region,
                             size_t offset_bytes, size_t slice_bytes, void *to, comm_ticket *ticket);

/*
 * Where rank `rank`'s part of a region can be read from here without its doing,
 * or NULL if the backend has no such thing (then it is NULL for all).  Only
 * backends whose work is done when a call returns have it.  The callers see to
 * it that nobody writes what others may be reading: see engine_stage3.c.
 */
const void *comm_peer(const comm_region *region, size_t rank);

/* to[i] = sum over ranks of the uint64_t words at region + offset. `to` is device memory outside the region. */
zc_status comm_all_reduce_words(comm_channel *channel, zc_stream *stream, uint32_t tag, comm_region *region,
                                size_t offset_bytes, size_t words, uint64_t *to, comm_ticket *ticket);

/* region + offset on every rank becomes root's. */
zc_status comm_broadcast(comm_channel *channel, zc_stream *stream, uint32_t tag, comm_region *region,
                         size_t offset_bytes, size_t bytes, size_t root, comm_ticket *ticket);

zc_status comm_test(comm_channel *channel, comm_ticket ticket, zc_stream *stream, int *done);
zc_status comm_wait(comm_channel *channel, comm_ticket ticket, zc_stream *stream);

/*
 * As comm_wait, but gives up after limit_ns with *done = 0 and no error: for a
 * caller that can go on without.  Such a wait blocks nobody, so it takes no
 * part in the search for ranks that wait for one another.
 */
zc_status comm_wait_some(comm_channel *channel, comm_ticket ticket, zc_stream *stream, uint64_t limit_ns, int *done);

/* Does what can be done without waiting, on all channels. */
zc_status comm_progress(zc_comm *comm);

/*
 * For a thread beside the one that calls: whether the group can go on, while
 * `what` waits by other means for every rank of it.  The reason why it has
 * failed; or ZC_EPEERLOST, and the group fails, when a rank has closed or is
 * gone.  Never waits, and does not count as a call of this rank.
 */
zc_status comm_watch(zc_comm *comm, const char *what);

/*
 * What ranks must do in one order, without waiting for one another to see to it.
 * A rank declares on a line what it is about to do: the k-th declarations of all
 * ranks on a line must have the same `detail`.  Never waits.  Who comes second
 * finds the difference, in this call or, where records travel, soon after it: the group
 * fails with ZC_EMISMATCH, which names both sides by their `what` (cut to
 * COMM_WHAT_BYTES - 1 bytes).  A rank may be ahead of others by any number; after
 * more than COMM_DECLARED of them the sentence may name a later pair than the first
 * that differs, but no difference is missed.  Lines are the group's; the last is the
 * engine's own.
 */
#define COMM_LINES 3u
#define COMM_LINE_ENGINE (COMM_LINES - 1)
#define COMM_DECLARED 64u
#define COMM_WHAT_BYTES 64u
zc_status comm_declare(zc_comm *comm, uint32_t line, uint64_t detail, const char *what);

/*
 * How many ranks have declared fewer than `number` times on a line; text: "1, 2",
 * these, by their rank in the first communicator.  For any thread, as comm_watch; where it has to
 * ask, it waits for the answer for a second at the most.
 */
size_t comm_behind(zc_comm *comm, uint32_t line, uint64_t number, char *text, size_t room_bytes);

/*
 * How many ranks' processes are known to be stopped, by a signal or a debugger, at this moment; text: "1, 2", these, as
 * comm_behind's. For any thread.  For the sentence of a timeout: that of a group between hosts knows them by their silence.
 */
size_t comm_stopped(zc_comm *comm, char *text, size_t room_bytes);
#define COMM_STOPPED "stopped by a signal or a debugger: rank %s; let it go on (kill -CONT), or end the job"

/*
 * Host-side all-gather of small records, blocking: records[q] becomes rank q's
 * record.  bytes <= COMM_EXCHANGE_BYTES and equal on all ranks.  `what` names
 * the operation in messages ("step", "end of backward"); it may differ between
 * ranks.
 */
#define COMM_EXCHANGE_BYTES 2048u
zc_status comm_exchange(comm_channel *channel, uint32_t tag, const char *what, const void *record, void *records,
                        size_t bytes);

/* ---- plain host arrays, blocking, any size --------------------------- */

zc_status comm_array_all_reduce(zc_comm *comm, void *array, size_t count, zc_dtype dtype, comm_op op);
/* from: ranks * count elements; to: count elements, this rank's slice of the result; may be inside from. */
zc_status comm_array_reduce_scatter(zc_comm *comm, const void *from, void *to, size_t count, zc_dtype dtype,
                                    comm_op op);
/* to: ranks * bytes. */
zc_status comm_array_all_gather(zc_comm *comm, const void *from, void *to, size_t bytes);
zc_status comm_array_broadcast(zc_comm *comm, void *array, size_t bytes, size_t root);
zc_status comm_barrier(zc_comm *comm);

/* Collective. Ranks with the same color >= 0 form a group, in rank order; *out = NULL for color < 0. */
zc_status comm_split(zc_comm *comm, int64_t color, zc_comm **out);

/* Makes every later operation of the group fail on all ranks with this status and sentence. */
void comm_poison(zc_comm *comm, zc_status status, const char *why);

/*
 * At the end of a call that ranks make together, with its status: if this rank alone ran out of memory or had a system
 * call fail, its peers wait for it in the middle of that call, so the group fails, and they get ZC_ECOMM with its sentence.
 * Other failures change nothing, or are known to all.  Returns the status, and leaves the sentence.
 */
zc_status comm_give_up(zc_comm *comm, const char *what, zc_status status);

/* Local, never waits: peers that wait for this rank get ZC_EPEERLOST. Frees comm. NULL is allowed. */
void comm_close(zc_comm *comm);

/* ---- backends --------------------------------------------------------- */

/* `ranks` communicators, for threads of this process: out[r] belongs to rank r's thread. */
zc_status local_comm_create(size_t ranks, uint64_t timeout_ns, zc_comm **out);

typedef struct shm_comm_config {
    size_t rank, ranks;
    const char *job;             /* names the rendezvous on this host; at most 80 bytes */
    const char *token;           /* secret the peers must know too; NULL: none */
    uint64_t start_timeout_ns, timeout_ns;
    int (*interrupted)(void *context);
    void *interrupt_context;
} shm_comm_config;

/*
 * Ranks on several hosts that are connected already: rank r > 0 by a stream socket to rank 0, which has one
 * to each.  For what is small: hub_comm.h has the protocol, and what it leaves to others.
 */
typedef struct hub_comm_config {
    size_t rank, ranks;
    const size_t *hosts;         /* [ranks]: equal for ranks on one host */
    const int *sockets;          /* rank 0: [ranks], its own entry is not looked at; else: one. Taken, also on failure */
    uint64_t timeout_ns;
    uint64_t beat_ns;            /* the same on all ranks; 0: HUB_BEAT_NS */
    int (*interrupted)(void *context);
    void *interrupt_context;
} hub_comm_config;

/* Blocking, until all ranks have called it. */
zc_status hub_comm_open(const hub_comm_config *config, zc_comm **out);

/* Meets the other ranks of `job` on this host. Blocking; ZC_ETIMEOUT names the ranks that did not come. */
zc_status shm_comm_open(const shm_comm_config *config, zc_comm **out);

#endif
