/*
 * The collectives of comm.h between ranks that can address each other's
 * memory.  Internal to the mem_*.c files and to the two providers of such
 * memory: shm_comm.c (processes) and local_comm.c (threads).
 *
 * What there is, from the outside in:
 *
 *   mem_world    one per rank: the provider, the homes of all ranks, the one
 *                mutex, the list of pending operations of all groups
 *   mem_group    a communicator: the world's own, or one made by split
 *   mem_channel  cells for `tags` tags, and one more for its own management;
 *                every group has a channel of its own, `base`, for the calls
 *                that name no channel
 *   mem_region   memory of every rank of a channel, mapped here
 *   mem_op       an operation this rank has posted; it lives in its tag
 *
 * The mutex of the world is held by everything below mem_enter; a wait lets
 * go of it while it yields, sleeps or asks the interrupt callback.
 *
 * Files: mem_block.c (blocks of memory and when they may be used again),
 * mem_world.c (birth and death of worlds and groups, entering, failing),
 * mem_exchange.c (records, votes), mem_channel.c (channels, regions, the calls
 * of comm.h on them),
 * mem_progress.c (what is done when stamps meet), mem_wait.c (waiting),
 * mem_array.c (plain arrays through a staging buffer), mem_declare.c (what
 * ranks must do in one order).
 */
#ifndef MEM_COMM_H
#define MEM_COMM_H

#include "comm.h"
#include "shm_sync.h"

#include <pthread.h>
#include <sys/types.h>

#define MEM_HEADER_BYTES 4096u             /* in front of every block; keeps the payload page aligned */
#define MEM_STAGING_BYTES ((size_t)512 << 10) /* one of two halves */
#define MEM_TAGS_MAX ((1u << 20) - 2)
#define MEM_NAME_BYTES 48u

/* ---- memory of ranks -------------------------------------------------- */

typedef struct mem_provider mem_provider;

/* `bytes` is the same number in all calls about one piece of memory. */
typedef struct mem_provider_ops {
    /*
     * Zero-filled, page aligned; the first `now_bytes` have memory, the rest gets it from grow.  `token`
     * tells peers where it is; a rank's first one is 0 in processes.
     */
    zc_status (*alloc)(mem_provider *provider, size_t bytes, size_t now_bytes, void **memory, uint64_t *token);
    zc_status (*grow)(mem_provider *provider, uint64_t token, size_t from_bytes, size_t to_bytes);
    /* Gives it back for good. */
    void (*free)(mem_provider *provider, void *memory, uint64_t token, size_t bytes);
    /* Lets go of this rank's own view; peers that have mapped it keep the memory. */
    void (*leave)(mem_provider *provider, void *memory, size_t bytes);
    zc_status (*map)(mem_provider *provider, size_t rank, uint64_t token, size_t bytes, void **memory);
    void (*unmap)(mem_provider *provider, void *memory, size_t bytes);
    /* 1: that rank will never do anything again. */
    int (*dead)(mem_provider *provider, size_t rank);
    /* 1: its process is stopped, and may go on one day; NULL: ranks are of one process. */
    int (*stopped)(mem_provider *provider, size_t rank);
    void (*destroy)(mem_provider *provider);
} mem_provider_ops;

struct mem_provider {
    const mem_provider_ops *ops;
};

typedef struct mem_block_header {
    _Atomic uint64_t detached; /* peers that have let go */
} mem_block_header;

/* A block of this rank that peers map; kept in the world's list until nobody looks at it. */
typedef struct mem_block {
    struct mem_block *next;
    char *memory; /* header, then payload */
    uint64_t token;
    size_t bytes;   /* with the header */
    size_t readers; /* peers that mapped it */
    int dropped;    /* the owner is done with it */
} mem_block;

/* The same piece of a collective allocation on every rank of a group. */
typedef struct mem_blocks {
    mem_block *own;   /* NULL: this rank gave none */
    char **payload;   /* [ranks]: as mapped here */
    size_t bytes;     /* with the header */
    size_t ranks, rank;
} mem_blocks;

/* ---- the parts -------------------------------------------------------- */

typedef struct mem_world mem_world;
typedef struct mem_group mem_group;
typedef struct mem_channel mem_channel;
typedef struct mem_region mem_region;

typedef struct mem_op {
    struct mem_op *next, *previous; /* among the pending of the world, in the order of posting */
    mem_channel *channel;
    uint32_t tag;
    uint64_t stamp;
    shm_desc desc;
    size_t seen;     /* ranks below this one have posted (all kinds but the all-gathers) */
    size_t finished; /* ranks below this one are done */
    int pending, executed;
    mem_region *region;
    /* reduce-scatter; `to` also of the words and of the all-gather that has one */
    const void *own;
    void *to;
    int accumulate;
    uint32_t *flags;
    comm_times *times; /* [ranks] of the channel's user; NULL: nobody wants to know */
    /* exchange */
    void *records;
    size_t record_bytes;
    /* all-gathers: whose slice was copied */
    size_t left;
    uint64_t copied[SHM_MASK_WORDS];
} mem_op;

/* What a rank says before the next stage of a collective allocation. */
typedef struct mem_vote {
    int32_t status, unused;
    uint64_t value;
    char text[512]; /* why it failed; otherwise whatever the ranks compare */
} mem_vote;

typedef struct mem_tag {
    uint64_t issued, completed;
    mem_op op;
} mem_tag;

struct mem_region {
    comm_region public;
    uint32_t number;
    size_t grown_bytes; /* of the own memory */
    mem_blocks blocks;
    char **base; /* [ranks]: where each rank's bytes are */
};

struct mem_channel {
    comm_channel public;
    mem_group *group;
    mem_channel *next; /* in the group */
    char name[MEM_NAME_BYTES];
    uint32_t tags;          /* of the user; tag number `tags` is for management */
    uint32_t regions;       /* ever allocated: numbers them */
    mem_blocks blocks;      /* not of a base channel, which lies in the home */
    shm_cell **cells;       /* [ranks] */
    char **records;         /* [ranks]: SHM_RECORD_SLOTS records each */
    mem_tag *tag;           /* [tags + 1] */
    mem_vote *votes;        /* [ranks]: of the last vote */
    struct {
        uint32_t tag;
        uint64_t stamp; /* 0: never used */
    } slot[SHM_RECORD_SLOTS];
    int busy; /* a thread is inside a call of several exchanges */
    pthread_t busy_thread;
};

/* What a member of a group shows to the others; the staging halves follow the channel area. */
typedef struct mem_home {
    shm_control control; /* in force in the world's own group only */
    shm_group group;
} mem_home;

struct mem_group {
    zc_comm public;
    mem_world *world;
    mem_group *next;
    size_t *member;      /* [ranks]: number in the world */
    mem_blocks blocks;   /* homes */
    shm_group **area;    /* [ranks] */
    char **staging;      /* [ranks]: two halves */
    uint64_t turn;       /* counts uses of the halves, alike on all ranks */
    mem_channel base;
    size_t channels;     /* open, besides base */
    size_t users;        /* threads inside a call */
    struct {
        uint64_t number, chain; /* of this rank's newest declaration */
    } declared[SHM_LINES];
    int closed;
    zc_status failed;    /* the first reason; every later call returns it */
    char failed_text[SHM_TEXT_BYTES + 64];
};

struct mem_world {
    mem_provider *provider;
    size_t rank, ranks;
    pid_t pid;
    int spin;             /* a core for every rank: busy waiting takes nothing from anybody */
    pthread_mutex_t mutex;
    shm_control **control; /* [ranks] */
    mem_block *home;
    mem_block *blocks;    /* all of this rank's */
    mem_group *groups;
    mem_op *first, *last; /* pending */
    uint64_t posts;       /* operations this rank has ever posted */
    size_t sleepers;      /* threads of this rank in shm_sleep */
    pthread_t thread;     /* the first that called */
    int thread_known, several_threads;
    int recording;        /* a wait of this rank has its record published */
    shm_cycle_node *cycle; /* [ranks] */
    uint32_t *scratch;     /* [2 * ranks] */
};

/* ---- mem_block.c ------------------------------------------------------ */

/* What became of a collective allocation, as this rank sees it. */
typedef enum mem_block_fate {
    MEM_NEVER_SHARED, /* all ranks know that it failed, as far as they know anything: nobody looks at it any more */
    MEM_SHARED,       /* all ranks mapped it, and each counts when it lets go */
    MEM_UNSURE        /* the group failed in the middle: a peer may believe either of the two */
} mem_block_fate;

/* The first now_bytes of the payload have memory. */
zc_status mem_block_alloc(mem_world *world, size_t payload_bytes, size_t now_bytes, mem_block **out);
/* The owner is done with it, and so are its peers by `fate`. NULL is allowed. */
void mem_block_drop(mem_world *world, mem_block *block, size_t ranks, mem_block_fate fate);
/* Frees what all have let go of. */
void mem_block_sweep(mem_world *world);
static inline char *mem_block_payload(const mem_block *block)
{
    return block->memory + MEM_HEADER_BYTES;
}

/*
 * Maps the blocks of all members.  tokens[q] is rank q's; `giver` < ranks: only
 * that rank has one and all payloads are its.  On failure nothing stays mapped.
 */
zc_status mem_blocks_map(mem_world *world, const size_t *member, size_t ranks, size_t rank, mem_block *own,
                         const uint64_t *tokens, size_t payload_bytes, size_t giver, mem_blocks *out);
/* Local. */
void mem_blocks_release(mem_world *world, mem_blocks *blocks, mem_block_fate fate);

/* ---- mem_world.c ------------------------------------------------------ */

/* Takes the provider, also on failure. The own home is allocated; its token is world->home->token. */
zc_status mem_world_create(mem_provider *provider, size_t rank, size_t ranks, int spin, mem_world **out);
/* Maps all homes and makes the world's communicator. On failure the world is as before. */
zc_status mem_world_attach(mem_world *world, const uint64_t *tokens, uint64_t timeout_ns, zc_comm **out);
void mem_world_destroy(mem_world *world);

/* Usable cores of the calling thread. */
size_t mem_cores(void);

/* Begin and end of every call on a group; between them the mutex is held. */
zc_status mem_enter(mem_group *group);
void mem_leave(mem_group *group);
/* A call that needs several exchanges keeps other threads of this rank out. */
zc_status mem_busy_begin(mem_channel *channel);
void mem_busy_end(mem_channel *channel);

/* Fails the group on all ranks; returns status. The first failure stays. */
zc_status mem_fail(mem_group *group, zc_status status, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* The failure of the group, own or reported by a peer; ZC_OK while there is none. */
zc_status mem_failure(mem_group *group);
/* What has become of a member that will not come any more, for "rank q ..."; NULL: it may still. */
const char *mem_loss(const mem_group *group, size_t rank);
/* Rings every other member whose thread sleeps. */
void mem_wake_members(mem_group *group);
/* Number of a member in messages: its rank in the world. */
static inline size_t mem_name(const mem_group *group, size_t rank)
{
    return group->member[rank];
}

extern const comm_ops mem_comm_ops;

/* ---- mem_exchange.c --------------------------------------------------- */

/*
 * The operation of a tag, cleared, with its next stamp.  Waits when the one
 * before is still pending: until then its descriptor is in use.
 */
zc_status mem_take_op(mem_channel *channel, uint32_t tag, const shm_desc *desc, mem_op **out);
/* Blocking exchange with a whole descriptor; the mutex is held. */
zc_status mem_exchange(mem_channel *channel, uint32_t tag, const shm_desc *desc, const char *what,
                       const void *record, void *records, size_t bytes);
/*
 * Exchange of votes on the channel's management tag.  When the `status` of any
 * rank is not ZC_OK, all ranks return one of them; the sentence of a rank's own
 * is its last error at the call.  The votes are in channel->votes.
 */
zc_status mem_vote_all(mem_channel *channel, shm_kind kind, uint64_t count, const char *what, zc_status status,
                       uint64_t value, const char *text);

/* ---- mem_channel.c ---------------------------------------------------- */

size_t mem_channel_area_bytes(uint32_t tags);
/* `areas[q]` is rank q's. Allocates the private half. */
zc_status mem_channel_init(mem_channel *channel, mem_group *group, const char *name, uint32_t tags,
                           char *const *areas, size_t area_offset_bytes);
void mem_channel_clear(mem_channel *channel);
zc_status mem_channel_open(zc_comm *comm, const char *name, uint32_t tags, comm_channel **out);
void mem_channel_close(comm_channel *channel);
zc_status mem_region_alloc(comm_channel *channel, size_t bytes, unsigned flags, comm_region **out);
zc_status mem_region_grow(comm_region *region, size_t bytes);
void mem_region_free(comm_region *region);
zc_status mem_reduce_scatter(comm_channel *channel, zc_stream *stream, const comm_reduce_args *args,
                             comm_ticket *ticket);
zc_status mem_all_gather(comm_channel *channel, zc_stream *stream, uint32_t tag, comm_region *region,
                         size_t offset_bytes, size_t slice_bytes, comm_ticket *ticket);
zc_status mem_all_gather_to(comm_channel *channel, zc_stream *stream, uint32_t tag, comm_region *region,
                            size_t offset_bytes, size_t slice_bytes, void *to, comm_ticket *ticket);
const void *mem_peer(const comm_region *region, size_t rank);
zc_status mem_all_reduce_words(comm_channel *channel, zc_stream *stream, uint32_t tag, comm_region *region,
                               size_t offset_bytes, size_t words, uint64_t *to, comm_ticket *ticket);
zc_status mem_broadcast(comm_channel *channel, zc_stream *stream, uint32_t tag, comm_region *region,
                        size_t offset_bytes, size_t bytes, size_t root, comm_ticket *ticket);
zc_status mem_test(comm_channel *channel, comm_ticket ticket, zc_stream *stream, int *done);
zc_status mem_ticket_wait(comm_channel *channel, comm_ticket ticket, zc_stream *stream);
zc_status mem_ticket_wait_some(comm_channel *channel, comm_ticket ticket, zc_stream *stream, uint64_t limit_ns,
                               int *done);
zc_status mem_progress_all(zc_comm *comm);
zc_status mem_public_exchange(comm_channel *channel, uint32_t tag, const char *what, const void *record,
                              void *records, size_t bytes);

/* ---- mem_progress.c --------------------------------------------------- */

/* Appends an operation that has just been filled in to the pending ones and shows it to the peers. */
void mem_post(mem_op *op);
/* Does all that can be done now for all pending operations of the world. */
void mem_progress(mem_world *world);
/* Takes the pending operations of a group, or of one channel of it, off the list. */
void mem_forget(mem_group *group, const mem_channel *channel);
const char *mem_kind_name(shm_kind kind);
/* Carries out an operation of a group of one rank. */
void mem_execute_alone(mem_op *op);

/* ---- mem_wait.c ------------------------------------------------------- */

typedef enum mem_wait_for {
    MEM_WAIT_COMPLETE, /* the operation is complete on this rank */
    MEM_WAIT_DONE      /* all peers are done with it */
} mem_wait_for;

/* Blocks until then, or fails the group. The mutex is held on entry and exit, not in between. */
zc_status mem_wait(mem_channel *channel, uint32_t tag, uint64_t stamp, mem_wait_for what_for, const char *what);
/* As mem_wait for completion, but returns ZC_OK after limit_ns at the latest; nobody counts it as waiting. */
zc_status mem_wait_some(mem_channel *channel, uint32_t tag, uint64_t stamp, uint64_t limit_ns);

/* ---- mem_declare.c ---------------------------------------------------- */

zc_status mem_declare(zc_comm *comm, uint32_t line, uint64_t detail, const char *what);
size_t mem_behind(zc_comm *comm, uint32_t line, uint64_t number, char *text, size_t room_bytes);

/* ---- mem_array.c ------------------------------------------------------ */

zc_status mem_array_all_reduce(zc_comm *comm, void *array, size_t count, zc_dtype dtype, comm_op op);
zc_status mem_array_reduce_scatter(zc_comm *comm, const void *from, void *to, size_t count, zc_dtype dtype,
                                   comm_op op);
zc_status mem_array_all_gather(zc_comm *comm, const void *from, void *to, size_t bytes);
zc_status mem_array_broadcast(zc_comm *comm, void *array, size_t bytes, size_t root);
zc_status mem_barrier(zc_comm *comm);

#endif
