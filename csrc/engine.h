/*
 * The engine's own data: what the files engine*.c and bucket.c share.  Its public face is zero_c.h.
 *
 * The engine knows ranks, buckets and tickets, and neither a backend nor an
 * operating system: memory and arithmetic come from a zc_device, messages from
 * a zc_comm, and everything it enqueues goes to one stream, in an order that is
 * right even if the device and the communicator put all work off.
 *
 *   register -> plan -> accumulate -> reduce -> update -> gather
 *   engine.c            bucket.c, engine_round.c   engine_step.c, engine_gather.c, engine_stage3.c
 *
 * Parameters of one dtype that were added together form a space (partition.h).
 * What a space keeps, by stage (N ranks, elements of the space):
 *
 *              stage 0            stage 1               stage 2          stage 3
 *   param      all                all                   all              1/N
 *   window     ring of slots      a slot per bucket     ring of slots    ring of slots
 *   sums       all (region)       in the spent slots    1/N              1/N
 *   state      all                1/N                   1/N              1/N
 *
 * `sums` are the reduced gradients, in fp32 (fp64).  In stage 1 a bucket's sum
 * overwrites its spent window: in place for fp32 and fp64, at the window's
 * start for 16-bit types once all peers have read it (4/N <= 2 bytes for
 * N >= 2; at N = 1 the 16-bit gradient itself is kept, and is the exact sum).
 * A second backward before the step needs the windows again: the sums then
 * move to an accumulator, 4/N bytes more.
 */
#ifndef ENGINE_H
#define ENGINE_H

#include "comm.h"
#include "device.h"
#include "partition.h"
#include "zc_hash.h"
#include "zero_c.h"

#define ENGINE_PATIENCE_NS 250000000ull /* most that a round waits for room before it holds gradients back */
#define ENGINE_SCRATCH_SLOTS 4u            /* 16-bit stage 1: reductions in flight */

enum { CONTROL_TAG_MEET, CONTROL_TAG_STATS, CONTROL_TAGS };

#define UNIT_TAGS 64u /* of the channel of gathers: as many of them may be under way */

/* Tags of bucket b on its space's channel. */
#define SPACE_TAG_REDUCE(b) ((uint32_t)(2 * (b)))
#define SPACE_TAG_GATHER(b) ((uint32_t)(2 * (b) + 1))

typedef enum bucket_state {
    BUCKET_OPEN,   /* some gradients of this round are still missing */
    BUCKET_READY,  /* all are there; waits for its turn to be posted */
    BUCKET_POSTED, /* its reduction is under way */
    BUCKET_DONE    /* reduced, and no peer reads it any more */
} bucket_state;

typedef struct engine_bucket {
    bucket_state state;
    uint32_t parts;     /* parameters with elements in it */
    uint32_t missing;   /* of these, not yet copied in this round */
    uint32_t first_part;/* index into the space's `order` of the first of them */
    int has_data;       /* some gradient was copied; otherwise it counts as zeros */
    const void *lent;   /* this rank's slice, where a gradient lies that covers it; NULL: it was copied */
    size_t lender;      /* the parameter */
    comm_ticket ticket;
    size_t gathering;   /* bytes of an element, if it is that of a gather, for which nothing has waited; otherwise 0 */
} engine_bucket;

typedef struct engine_param {
    char *name;
    size_t elems;
    zc_dtype dtype;
    uint32_t group;
    size_t space;
    size_t offset;        /* first element in the space */
    size_t extent;        /* end of its padded extent in the space */
    size_t unit;          /* stage 3 */
    int frozen;
    int arrived;          /* had a gradient in the open round */
    int used;             /* had one since the last step, on this rank */
    const void *grad;     /* held: until `next_bucket` has passed its last one and nothing of it is lent */
    size_t next_bucket;
    size_t lent;          /* buckets whose reduction reads it */
    void *owner;
    int own_copy;         /* `grad` is a copy the engine made, to be freed by it */
} engine_param;

typedef struct engine_space {
    int frozen;               /* stage 3: its parameters are not trained; only `param` is kept */
    size_t *starts;           /* stage 3: the plan's table of buckets */
    zc_dtype dtype, sum_dtype;
    size_t elem_bytes, sum_bytes;
    partition plan;
    comm_channel *channel;
    comm_region *param, *window;
    size_t slots, slot_bytes;
    size_t grown_bytes;       /* of `param`, while it is loaded; SIZE_MAX: it is complete */

    comm_region *full_sums;   /* stage 0 */
    void *sums;               /* stage 2: the shards' sums; stage 1: only from the second backward on */
    void *scratch;            /* 16-bit stage 1: a ring of shards */
    void *m, *v, *vmax, *master;
    size_t scratch_slots;

    engine_bucket *buckets;
    size_t low;               /* all buckets before it are DONE in this round */
    size_t next_post;         /* with scratch: the next to be posted */
    size_t in_flight;         /* buckets POSTED */
    size_t held;              /* parameters whose gradient is held, lent or waiting */
    size_t waiting;           /* of them, those with a bucket that had no room yet */
    size_t looked_at;         /* `low` when these were last tried */

    size_t *order;            /* engine indices of its non-empty parameters, by offset */
    size_t order_count;
    device_span *spans;       /* device memory: per bucket and piece, relative to the piece */
    size_t *span_first;       /* [buckets * pieces + 1] */
    comm_times *times;        /* the channel's, from the first profile on */
} engine_space;

typedef struct engine_turn {
    uint32_t space, bucket;
} engine_turn;

/* The buckets of one space that belong to a unit. */
typedef struct engine_part {
    size_t space, first_bucket, end_bucket;
    size_t offset_bytes;      /* of the first one in the unit's range */
} engine_part;

typedef struct engine_unit {
    char *name;
    uint32_t level;
    int resident;
    engine_part *parts;       /* at most one for each space */
    size_t part_count;
    size_t bytes;             /* of its range; 0: it has no elements, and no slot */
    char *base;               /* its range */
    size_t mapped_bytes;      /* 0: the range is its slot's own */
    size_t slot;
    size_t users;             /* acquired and not released */
    size_t next[2];           /* the one to come after it in forward, in backward; ZC_NO_UNIT: none */
} engine_unit;

typedef struct engine_slot {
    device_slot memory;
    size_t owner;             /* the unit whose parameters are in it; ZC_NO_UNIT: none */
    uint64_t generation;      /* gathers into it */
    comm_ticket *tickets;     /* of the gathers into it that nothing has been ordered after; room for one gather */
    size_t ticket_count, ticket_room;
} engine_slot;

struct zc_engine {
    zc_comm *comm;
    zc_device *device;
    zc_stream *stream;
    zc_engine_config config;
    size_t rank, ranks;
    comm_channel *control;

    engine_param *params;
    size_t param_count;
    engine_space *spaces;
    size_t space_count;
    engine_turn *sequence;    /* all buckets, in the order in which a backward completes them */
    size_t turns;
    size_t gathering;         /* buckets that are */
    size_t next_turn;         /* where the communicator wants an order: the next to be posted */
    size_t group_count;
    int state_flags;          /* ENGINE_HAS_*: arrays that exist, or will with the spaces that are loaded now */
    uint64_t number;          /* the same on all ranks, and of no other engine of this communicator */
    int loading;              /* parameters were registered, and not published yet */
    int agreed;               /* the failure of the call under way is all ranks', who have agreed on it */

    engine_unit *units;       /* stage 3 */
    size_t unit_count;
    engine_slot *slots;
    size_t slot_count;
    comm_channel *gathers;
    uint32_t next_gather_tag;
    size_t last_unit;         /* acquired last, not resident; ZC_NO_UNIT: the order begins anew */
    int last_backward;
    uint64_t backward_round;  /* in which round a unit was last acquired for backward; UINT64_MAX: not since the step */

    device_segment *segments; /* device memory, one per parameter */
    size_t segment_count;     /* entries of segments and scalars */
    optim_segment_scalars *scalars;
    comm_region *stats;       /* this rank's; */
    device_stats *stats_sum;  /* all ranks' */
    size_t stats_words;
    device_step *result;
    uint32_t *flags;          /* device memory: CPU_NONFINITE_* of this rank's sums */
    void *slice_scratch;      /* shared parameters at stage 0: one slice */
    size_t slice_scratch_bytes;

    int round_open, round_aborted;
    uint64_t round_count;     /* rounds closed since creation */
    uint64_t rounds;          /* of them, summed since the last step */
    uint64_t last_rounds;     /* that the last step used */
    uint64_t discards;        /* a running hash of what discard was called for, to be compared */
    int waited_out;           /* this round has waited for room in vain */
    uint64_t patience_ns;     /* how long the next wait may be */
    double clip_factor;
    uint64_t held_bytes;
    void **released;          /* owners to hand back */
    size_t released_count, released_room;

    zc_memory memory;
    zc_traffic traffic;
    uint64_t graph;           /* the capture that open rounds and sums are of; 0: none */
    int stepped;              /* a step was made that was not captured */
    int captured;             /* and one that was: the host does not know of all steps */
    uint64_t options_hash;    /* of the options that the device has */
    device_tally *tally;      /* device memory: what replays have done; NULL without graphs */
    uint64_t tally_taken[DEVICE_COUNTS]; /* of it, what was added to a traffic that somebody has taken */
    zc_traffic before_capture; /* the traffic when the capture began: nothing of it has run */

    zc_step_result last;      /* what the last step did, once last_known */
    int last_known;

    zc_work *work;            /* a ring, engine_profile.c; NULL: switched off */
    size_t work_room, work_first, work_count;
    uint64_t work_lost;
};

#define ENGINE_HAS_MOMENTUM 1
#define ENGINE_HAS_AMSGRAD 2

/* How many separately updated pieces a bucket has: its slices at stage 0, otherwise this rank's slice. */
static inline size_t engine_pieces(const zc_engine *engine)
{
    return engine->config.stage == 0 ? engine->ranks : 1;
}

/* The elements of the space that piece k of bucket b covers, and where its state begins. */
static inline partition_range engine_piece(const zc_engine *engine, const engine_space *space, size_t bucket,
                                           size_t piece, size_t *state_begin)
{
    if (engine->config.stage == 0) {
        partition_range slice = partition_slice(&space->plan, bucket, piece);
        *state_begin = slice.begin;
        return slice;
    }
    *state_begin = partition_shard_offset(&space->plan, bucket);
    return partition_slice(&space->plan, bucket, engine->rank);
}

/* This rank's memory of an element of bucket b of a space: at stage 3 it must own it. */
static inline char *engine_param_at(const zc_engine *engine, const engine_space *space, size_t b, size_t elem)
{
    if (engine->config.stage == 3)
        elem = partition_shard_offset(&space->plan, b) + (elem - partition_slice(&space->plan, b, engine->rank).begin);
    return (char *)space->param->base + elem * space->elem_bytes;
}

/* Whether ranks can read each other's regions. */
static inline int engine_reads_peers(const zc_engine *engine)
{
    return engine->comm->ops->peer != NULL;
}

/* Whether a gather of a unit is an operation of all ranks. */
static inline int engine_gathers_together(const zc_engine *engine)
{
    return engine->config.stage == 3 && !engine_reads_peers(engine);
}

/*
 * Whether operations are carried out in the order of their posting, by streams that
 * wait for one another while the host goes on; otherwise the host sees to progress.
 */
static inline int engine_is_ordered(const zc_engine *engine)
{
    return engine->comm->ops->ordered;
}

static inline void *engine_at(void *array, size_t elem, size_t elem_bytes)
{
    return array ? (char *)array + elem * elem_bytes : NULL;
}

/* Device memory, zero-filled, counted in *account. */
zc_status engine_alloc(zc_engine *engine, size_t bytes, uint64_t *account, void *out);

/*
 * Every call that ranks make together ends with it: peers must not wait for what failed on this rank alone.  Where
 * memory for all is refused by agreement, nobody waits, and the group stays whole.
 */
zc_status engine_end_call(zc_engine *engine, const char *what, zc_status status);

/* ZC_ESTATE between registering parameters and zc_engine_publish. */
zc_status engine_check_loaded(const zc_engine *engine);

/* Arrays that the options of `groups` need and that do not exist yet. */
zc_status engine_ensure_state(zc_engine *engine, const zc_options *groups);

/* A copy of a text; NULL without memory. */
char *engine_copy_text(const char *text);

/* "parameter 3 (encoder.weight)", in a buffer of the thread. */
const char *engine_param_name(const zc_engine *engine, size_t index);

/* ---- bucket.c, bucket_take.c: one round's data path ---------------------------------- */

void bucket_begin_round(zc_engine *engine);

/* Takes note of reductions that are done, and uses the room for held gradients. */
zc_status bucket_progress(zc_engine *engine, engine_space *space);

/*
 * Completes and posts every bucket, zeros for gradients that did not come, and
 * waits until all are done.  Blocks on peers: all ranks must be in it.
 * With masks only buckets with masks[space][b] != 0 take part, and `late` (by
 * parameter, NULL where there is none) replaces the round's gradients.
 */
zc_status bucket_flush(zc_engine *engine, unsigned char *const *masks, const void *const *late);

/* Stage 1: sums leave the windows for the accumulator, before the windows are used again. */
zc_status bucket_vacate(zc_engine *engine, engine_space *space);

/* The sums of one piece, in the sum type; converted into scratch where only a 16-bit form is kept. */
zc_status bucket_sums(zc_engine *engine, engine_space *space, size_t bucket, size_t piece, const void **out);

/* From so many buckets in a row bucket_sums gives sums that are good at the same time. */
size_t bucket_sums_at_once(const zc_engine *engine, const engine_space *space);

/* ---- engine_round.c ---------------------------------------------------- */

typedef enum meet_kind {
    MEET_END_ROUND = 1, MEET_ABORT = 2, MEET_STEP = 3, MEET_CLIP = 4, MEET_READ = 5, MEET_SYNC = 6, MEET_ADD = 7,
    MEET_STORE = 8, MEET_FETCH = 9
} meet_kind;

#define MEET_WHAT_BYTES COMM_WHAT_BYTES
#define MEET_WITH_BYTES 160u

/*
 * All ranks come together for one operation; `detail` must agree.  `with` says in words what `detail`
 * stands for, so that ranks which differ can be told apart (cut to MEET_WITH_BYTES - 1 bytes; NULL: there is
 * nothing to say).  A rank that meets others at the end of a round it did not start joins it with zeros and
 * comes again.
 */
zc_status round_meet(zc_engine *engine, meet_kind kind, uint64_t detail, const char *what, const char *with);

/*
 * This rank is about to do something that all ranks do in one order with their other
 * declarations and meetings of this engine, or the group fails with ZC_EMISMATCH.
 * Never waits.  Only where gathers are collective; elsewhere nothing.
 */
zc_status round_declare(zc_engine *engine, uint64_t detail, const char *what);

/* Returns when all ranks have come here, in the middle of a call that they make together. */
zc_status round_barrier(zc_engine *engine, const char *what);

/* Opens a round: nothing has arrived. */
zc_status round_begin(zc_engine *engine);

/* Closes an aborted round, if there is one; every collective call begins with it. */
zc_status round_settle(zc_engine *engine);

/* Forgets all sums. */
void round_forget(zc_engine *engine);

uint64_t engine_hash_options(uint64_t hash, const zc_options *groups, size_t group_count);

/* ---- engine_state.c ---------------------------------------------------- */

/* Elements [begin, end) of the space, all within this rank's slice of bucket b, to host memory; left alone if never used. */
zc_status engine_read_run(zc_engine *engine, engine_space *space, size_t b, size_t begin, size_t end, zc_role role,
                          char *to);
/* Of the parameter's elements [first, end), which `from` has, this rank takes those that it keeps. */
zc_status engine_write_range(zc_engine *engine, size_t index, zc_role role, size_t first, size_t end, const void *from);

/* ---- engine_compare.c, engine_plan.c ----------------------------------- */

zc_status engine_check_config(const zc_engine_config *config);
zc_status engine_check_params(const zc_engine *engine, const zc_param *params, size_t count, size_t group_count);
/* Collective. ZC_EMISMATCH names the first difference. */
zc_status engine_compare(zc_engine *engine, const zc_param *params, size_t count, const zc_options *groups,
                         size_t group_count);

zc_status plan_layout(zc_engine *engine, engine_space *space, size_t first_param, size_t count);
zc_status plan_buckets(engine_space *space, const engine_param *params);
zc_status plan_spans(zc_engine *engine, engine_space *space);
/* After all spaces are planned. */
zc_status plan_sequence(zc_engine *engine);

/* Stage 3: which buckets of which spaces a unit is. After all spaces are planned. */
zc_status plan_units(zc_engine *engine);

/* ---- engine_gather.c --------------------------------------------------- */

/* Bucket b of a space in a region: every rank's slice comes to all. */
zc_status gather_start(zc_engine *engine, engine_space *space, size_t b, comm_region *region, size_t elem_bytes);
/* The stream goes on when all of them are done: before parameters are read or written, and buckets used again. */
zc_status gather_finish(zc_engine *engine);

/* ---- engine_capture.c -------------------------------------------------- */

/* ZC_ESTATE in a capture: `what` is not possible there. */
zc_status capture_refuse(const zc_engine *engine, const char *what);
/*
 * Before gradients are taken, a round is ended or a step made: the engine enters the capture that its stream is in, or
 * leaves the one that is over.  ZC_ESTATE if there are sums or gradients from elsewhere, and where it cannot be captured.
 */
zc_status capture_follow(zc_engine *engine, const char *what);
/* Before all sums are forgotten: those of a capture that is over, too. */
zc_status capture_forget(zc_engine *engine);
/* Before a step, after capture_follow; changes nothing. */
zc_status capture_check_step(const zc_engine *engine, const zc_options *groups);
/* At the end of a step. */
zc_status capture_end_step(zc_engine *engine);
/* Adds what replays have sent since the last time. Waits for the device where a step was captured. */
zc_status capture_add_traffic(zc_engine *engine, zc_traffic *to);

/* ---- engine_stage3.c --------------------------------------------------- */

zc_status stage3_copy_units(zc_engine *engine, const zc_engine_config *config);
/* Slots, and the units' addresses. */
zc_status stage3_reserve(zc_engine *engine);
void stage3_release(zc_engine *engine);
/* ZC_ESTATE if a unit is acquired; `what` is not possible then. */
zc_status stage3_check_unused(const zc_engine *engine, const char *what);
/* The stream goes on when no gather reads shards any more: before they are written. */
zc_status stage3_settle(zc_engine *engine);
/* Collective: the shards were written. Returns when all ranks have written theirs; nothing gathered before counts. */
zc_status stage3_written(zc_engine *engine, const char *what);
/* Collective: takes this rank's slices of rank 0's values. */
zc_status stage3_load(zc_engine *engine, size_t index, const void *values);

/* ---- engine.c ---------------------------------------------------------- */

zc_status engine_create(zc_comm *comm, zc_device *device, zc_stream *stream, const zc_engine_config *config,
                        const zc_param *params, size_t count, const zc_options *groups, size_t group_count,
                        zc_engine **out);

/* ---- engine_profile.c: when work was done; all but profile_watch and profile_free do nothing while it is off ---- */

/* The time, for profile_note. */
static inline uint64_t profile_now_ns(const zc_engine *engine)
{
    return engine->work ? engine->device->ops->now_ns() : 0;
}

/* Work that began at begin_ns is over. `number` is of a unit at ZC_WORK_GATHER, otherwise of a bucket of `space`. */
void profile_note(zc_engine *engine, zc_work_kind kind, const engine_space *space, size_t number, size_t bytes,
                  uint64_t begin_ns);

/* What the communicator noted of an operation that is over. */
void profile_reduced(zc_engine *engine, engine_space *space, size_t b);
void profile_gathered(zc_engine *engine, engine_space *space, size_t b, size_t elem_bytes);

/* From now on the space's channel notes times. */
zc_status profile_watch(zc_engine *engine, engine_space *space);

/* The end of the engine; and that of a space, whose channel is closed. */
void profile_free(zc_engine *engine);
void profile_free_times(zc_engine *engine, engine_space *space);

#endif
