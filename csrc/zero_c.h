/*
 * zero_c: train one model on N ranks with the memory of one (ZeRO).
 *
 * Two ranks as threads of one process, AdamW, stage 2; each thread runs
 *
 *     zc_param params[1] = {{.name = "w", .elems = n, .dtype = ZC_FLOAT32, .initial = w}};
 *     zc_options group = ZC_OPTIONS_ADAMW;
 *     zc_engine_config config = ZC_ENGINE_CONFIG;
 *     zc_engine *engine;
 *     zc_engine_create(comm, &config, params, 1, &group, 1, &engine);
 *     for (int step = 0; step < 100; step++) {
 *         compute_gradient(zc_engine_param(engine, 0), gradient);
 *         zc_engine_add_grad(engine, 0, gradient);
 *         zc_engine_step(engine, &group, 1, &(zc_step_args)ZC_STEP_ARGS);
 *     }
 *     zc_engine_destroy(engine);
 *     zc_comm_close(comm);
 *
 * (examples/two_threads.c is the whole program.)
 *
 * Conventions.  Every fallible function returns ZC_OK or a negative status and
 * leaves a sentence for zc_last_error().  "Collective" means that every rank of
 * the communicator must make the same call; ranks that make different ones get
 * ZC_EMISMATCH naming both.  Nothing is changed by a call that fails with
 * ZC_EINVAL, ZC_ETYPE or ZC_ESTATE.  An engine may be used from several threads
 * one after the other, not at once; the caller provides the lock.
 */
#ifndef ZERO_C_H
#define ZERO_C_H

#include "optim.h"
#include "zc_dtype.h"
#include "zc_status.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct zc_comm zc_comm;
typedef struct zc_engine zc_engine;
typedef optim_options zc_options;

/* ---- communicators ---------------------------------------------------- */

typedef struct zc_comm_config {
    size_t rank, ranks;
    const char *job;        /* key of the rendezvous on this host, at most 80 bytes */
    const char *token;      /* shared secret, or NULL */
    double start_timeout_s; /* for the ranks to meet */
    double timeout_s;       /* for a live peer to come to an operation */
    int (*interrupted)(void *context); /* called in waits; not 0 ends them; may be NULL */
    void *interrupt_context;
} zc_comm_config;

/* Ranks as processes of this host. Collective; blocks until all have come. */
zc_status zc_comm_open(const zc_comm_config *config, zc_comm **out);

/* Ranks on one host or several, connected already: rank r > 0 by a stream socket to rank 0, which has one to each. */
typedef struct zc_comm_sockets {
    size_t rank, ranks;
    const size_t *hosts;    /* [ranks]: equal numbers for ranks on one host */
    const int *sockets;     /* rank 0: [ranks], its own entry is not looked at; else: one. Taken, also on failure */
    double timeout_s;
    int (*interrupted)(void *context);
    void *interrupt_context;
} zc_comm_sockets;

/*
 * Collective; blocks until all ranks have called it.  Between hosts goes what is small: engines on such a
 * communicator keep everything on GPUs, see zc_comm_on_gpu.
 */
zc_status zc_comm_open_sockets(const zc_comm_sockets *config, zc_comm **out);
/* Ranks as threads: fills out[0..ranks-1], one for each thread. */
zc_status zc_comm_open_local(size_t ranks, double timeout_s, zc_comm **out);
size_t zc_comm_rank(const zc_comm *comm);
size_t zc_comm_ranks(const zc_comm *comm);
size_t zc_comm_local_ranks(const zc_comm *comm);
const char *zc_comm_backend(const zc_comm *comm);
/* Collective operations on host arrays of any size; op as in the names. Blocking. */
typedef enum zc_op { ZC_SUM = 0, ZC_MAX = 1, ZC_MIN = 2, ZC_PROD = 3 } zc_op;
zc_status zc_comm_all_reduce(zc_comm *comm, void *array, size_t count, zc_dtype dtype, zc_op op);
zc_status zc_comm_reduce_scatter(zc_comm *comm, const void *from, void *to, size_t count_per_rank, zc_dtype dtype,
                                 zc_op op);
zc_status zc_comm_all_gather(zc_comm *comm, const void *from, void *to, size_t bytes_per_rank);
zc_status zc_comm_broadcast(zc_comm *comm, void *array, size_t bytes, size_t root);
zc_status zc_comm_barrier(zc_comm *comm);
/* Collective; ranks of one color >= 0 form a group; *out = NULL for color < 0. */
zc_status zc_comm_split(zc_comm *comm, int64_t color, zc_comm **out);
/*
 * Local and prompt, but that rank 0 of several hosts, who holds the others together, gives them some seconds to close
 * theirs.  Engines on it must be destroyed first.  NULL is allowed.
 */
void zc_comm_close(zc_comm *comm);

/*
 * Collective: the same ranks, each with a GPU of its own.  Engines on *out keep
 * everything on GPU `ordinal`; host arrays go between the ranks as on `comm`,
 * which may be closed before or after.  `plugin` is the path of the CUDA part of
 * this build, `nccl` that of a libnccl to try besides the system's, or NULL.
 * deterministic: gradients are summed in rank order; otherwise as NCCL does it.
 */
zc_status zc_comm_on_gpu(zc_comm *comm, const char *plugin, const char *nccl, int ordinal, int deterministic,
                         zc_comm **out);
/* Its GPU; -1: engines on it are on the CPU. */
int zc_comm_gpu(const zc_comm *comm);
/* Whether gradients are summed in rank order, so that a run repeats bit for bit. */
int zc_comm_deterministic(const zc_comm *comm);

/* ZC_OK if the CUDA part at `plugin` can be used here: *gpus of them; otherwise why not and what to do. */
zc_status zc_gpu_probe(const char *plugin, int *gpus);

/* ---- the engine -------------------------------------------------------- */

/*
 * With a communicator of GPUs the pointers to parameters, gradients and state are
 * device memory, and what the engine does with it is enqueued on its stream, the
 * legacy default one unless zc_engine_use_stream says otherwise.  Whole values
 * (initial, load_param, store, fetch, read, write) are host memory everywhere.
 */

#define ZC_MAX_DIMS 32

typedef struct zc_param {
    const char *name;       /* for messages; copied; NULL: "parameter <index>" */
    size_t elems;           /* 0 allowed */
    zc_dtype dtype;         /* float32, float64, bfloat16, float16 */
    uint32_t group;
    const void *initial;    /* elems elements in storage order, copied in during create; NULL: load it later */
    uint32_t unit;          /* stage 3: which unit it belongs to */
    int frozen;             /* stage 3: sharded and gathered, but never trained: no gradient, no state */
} zc_param;

/*
 * Stage 3: parameters that are gathered together.  Units of one level are never
 * in use at the same time and share the memory of a few slots; a unit that is
 * used inside another one has a higher level.  A resident unit has a slot of its
 * own, and is gathered once between two steps.
 */
typedef struct zc_unit {
    const char *name;       /* for messages; copied; NULL: "unit <index>" */
    uint32_t level;
    int resident;
} zc_unit;

typedef struct zc_engine_config {
    int stage;              /* 0, 1, 2, 3 */
    optim_rule rule;
    size_t bucket_bytes;    /* of one reduction window; 0: chosen by size, 256 KiB to 1 MiB, on GPUs 1 to 25 MiB */
    size_t ring_slots;      /* windows in flight (stages 0, 2 and 3); 0: 16, on GPUs 3 */
    int shared_params;      /* parameters live once per host */
    int overlap_gather;     /* stages 1 and 2: step() does not wait for parameters; see zc_engine_wait_params */
    int mean;               /* 1: average over ranks, 0: sum */
    int threads;            /* CPU threads of this rank; 0: usable cores / ranks on this host, at least 1 */
    const zc_unit *units;   /* stage 3: [unit_count], in the order of their first use; read during create */
    size_t unit_count;
    size_t unit_slots;      /* stage 3: slots of each size class of a level; > prefetch; see zc_engine_units_share */
    size_t prefetch;        /* stage 3: units gathered ahead of their use */
    int fill_discarded;     /* stage 3: overwrite what is not in use, so that a reader without a right to it sees NaN */
} zc_engine_config;

#define ZC_ENGINE_CONFIG \
    {.stage = 2, .rule = OPTIM_ADAMW, .bucket_bytes = 0, .ring_slots = 0, .shared_params = 0, .mean = 1, \
     .threads = 0, .unit_slots = 2, .prefetch = 1}
#define ZC_OPTIONS_ADAMW {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8, .weight_decay = 1e-2}
#define ZC_OPTIONS_ADAM {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8}
#define ZC_OPTIONS_SGD {.lr = 1e-3}

/*
 * Collective. Ranks must agree in config, and in number, names, sizes, dtypes
 * and groups of the parameters (ZC_EMISMATCH names the first difference); all
 * of them continue from rank 0's values once zc_engine_publish was called
 * (create does it when every `initial` is given). comm must outlive the engine.
 */
zc_status zc_engine_create(zc_comm *comm, const zc_engine_config *config, const zc_param *params, size_t count,
                           const zc_options *groups, size_t group_count, zc_engine **out);

/* Collective: more parameters, numbered on from the last ones; groups is the new whole list. */
zc_status zc_engine_add_params(zc_engine *engine, const zc_param *params, size_t count, const zc_options *groups,
                               size_t group_count);

/* Copies a parameter's initial value (elems elements, storage order) into the engine. Local; at stage 3 collective:
 * rank 0's values are sent around, and others may pass NULL. Order: ascending address, that is the last parameter
 * first, keeps memory growing evenly; any order works. */
zc_status zc_engine_load_param(zc_engine *engine, size_t index, const void *values);

/* Collective: every rank's parameters become rank 0's; ends the loading of new parameters. */
zc_status zc_engine_publish(zc_engine *engine);

/* The address at which parameter `index` lives, for ever (at stage 3: whenever its unit is acquired): elems elements in
 * storage order, at least 128-byte aligned. Written by step(). Valid until destroy. NULL for an empty parameter or a
 * wrong index. */
void *zc_engine_param(const zc_engine *engine, size_t index);
size_t zc_engine_param_count(const zc_engine *engine);

/* After parameters were written from outside: masters of 16-bit parameters follow the new values. Local.
 * index SIZE_MAX: all. */
zc_status zc_engine_refresh(zc_engine *engine, size_t index);

/* -- stage 3: using parameters; the protocol is at the head of engine_stage3.c -- */

#define ZC_NO_UNIT SIZE_MAX

/*
 * The unit's parameters are at their addresses (zc_engine_param) until it is
 * released as often as it was acquired; they may be read, never written.
 * `backward` tells in which direction the units follow one another.  Local where
 * the communicator lets ranks read each other's memory (on one host); otherwise
 * collective.  ZC_ESTATE: its memory is in use by another unit, see zc_engine_unit_user.
 */
zc_status zc_engine_acquire(zc_engine *engine, size_t unit, int backward);
void zc_engine_release(zc_engine *engine, size_t unit);
/* The unit that is acquired and occupies the memory of `unit` (perhaps itself), or ZC_NO_UNIT. */
size_t zc_engine_unit_user(const zc_engine *engine, size_t unit);
/* 0: the unit is not in memory. Otherwise a number that is another one each time it is gathered. */
uint64_t zc_engine_unit_generation(const zc_engine *engine, size_t unit);
/* The address range of a unit's parameters; *bytes 0: it has none. Valid until destroy. */
void *zc_engine_unit_range(const zc_engine *engine, size_t unit, size_t *bytes);
/* 0: the device can give memory one address only, so that each unit has memory of its own, and all parameters are there. */
int zc_engine_units_share(const zc_engine *engine);
/* Collective, any stage: the parameter's value, elems elements in storage order, to host memory. */
zc_status zc_engine_fetch(zc_engine *engine, size_t index, void *to);
/* Collective, stage 3: the parameter becomes rank 0's `values` on every rank (others may pass NULL), and so its master.
 * ZC_ESTATE while units are acquired. */
zc_status zc_engine_store(zc_engine *engine, size_t index, const void *values);

/* -- gradients; the protocol of rounds is at the head of engine_round.c -- */

#define ZC_GRAD_TAKEN 0   /* copied, or nothing left to do */
#define ZC_GRAD_HELD 1    /* no room yet: the engine reads it later; keep it alive until `owner` is released */
/*
 * Hands over the gradient of a parameter in the current round (opened if there
 * is none): elems elements of the parameter's dtype, in its storage order.
 * Local; may wait a bounded time for peers. `owner` is an opaque non-NULL token:
 * with *outcome == ZC_GRAD_HELD it comes back from zc_engine_take_released when the
 * engine is done with the memory. ZC_ESTATE if the parameter already had one in
 * this round: see zc_engine_has_grad and zc_engine_add_late.
 */
zc_status zc_engine_offer_grad(zc_engine *engine, size_t index, const void *grad, void *owner, int *outcome);
/* The same for callers that keep the memory only during the call. */
zc_status zc_engine_add_grad(zc_engine *engine, size_t index, const void *grad);
/* 1 if the parameter had a gradient in the open round. */
int zc_engine_has_grad(const zc_engine *engine, size_t index);
int zc_engine_round_open(const zc_engine *engine);
/* The next held gradient that the engine has finished with, or NULL. */
void *zc_engine_take_released(zc_engine *engine);
/* Local: gives up all held gradients, so that take_released returns their owners, whose memory must stay until the
 * engine is destroyed: nothing else may follow. */
void zc_engine_drop_held(zc_engine *engine);
/* Local: waits a moment for the reductions that this rank has posted, so that what they read is released. */
zc_status zc_engine_drain(zc_engine *engine);
/*
 * Collective: ends the round (an empty one, if this rank gave no gradient);
 * afterwards sums are complete on all ranks.  `late` lists second gradients of
 * parameters that had one already (reentrant graphs): they are reduced in a
 * supplementary pass of the same round.
 */
typedef struct zc_late_grad {
    size_t index;
    const void *grad;
} zc_late_grad;
zc_status zc_engine_end_round(zc_engine *engine, const zc_late_grad *late, size_t late_count);
/* Local: the open round's backward raised. It is closed with all ranks at the next collective call. */
void zc_engine_abort_round(zc_engine *engine);
/* Local: forgets the sums of one parameter, or of all (SIZE_MAX), as zero_grad does. All ranks must do the same. */
zc_status zc_engine_discard(zc_engine *engine, size_t index);
/* Backwards summed since the last step. */
uint64_t zc_engine_rounds(const zc_engine *engine);

/* -- the step -- */

typedef struct zc_step_args {
    double loss_scale;    /* gradients carry this factor; > 0 */
    double max_norm;      /* > 0: clip */
    int want_norm;        /* compute the norm even if nothing is clipped */
    int skip_nonfinite;
} zc_step_args;
#define ZC_STEP_ARGS {.loss_scale = 1.0, .max_norm = 0.0, .want_norm = 0, .skip_nonfinite = 0}

typedef struct zc_step_result {
    double norm;          /* of the averaged, unscaled gradient before clipping; NaN if not asked for */
    int skipped;
    uint64_t nonfinite;   /* ranks that saw an infinity or NaN in their shards of the sums */
} zc_step_result;

/* Collective. Updates all parameters that had a gradient on some rank; consumes the sums. On a GPU it waits for nothing.
 * groups: the options as they are now; group_count as created. */
zc_status zc_engine_step(zc_engine *engine, const zc_options *groups, size_t group_count, const zc_step_args *args);
/* Local. What the last step did; before the first one, nothing. On a GPU the first call after a step waits for it. */
zc_status zc_engine_last_step(zc_engine *engine, zc_step_result *result);
/* Local, never waits. The backwards whose sums it used; 0 on all ranks: no rank had a gradient. */
uint64_t zc_engine_last_rounds(const zc_engine *engine);
/*
 * With overlap_gather step() returns while parameters still come from their owners.  These `count` parameters are right,
 * for the host or on a GPU for the engine's stream, after this; with indices NULL all of them are, and may be written:
 * peers have what they need of this rank.  Every rank must call it, or something collective, sooner or later: a rank may
 * have to wait for its peers here.  The engine's own functions do so where they need it, except zc_engine_param,
 * zc_engine_order and what reads the memory that they give.  Costs nothing when nothing is under way.
 */
zc_status zc_engine_wait_params(zc_engine *engine, const size_t *indices, size_t count);
/* Collective. The norm of the averaged, unscaled gradient; gradients are scaled by min(1, max_norm / (norm + 1e-6))
 * at the next step (repeated calls multiply). norm_type: > 0 or infinity. max_norm infinity: measure only. */
zc_status zc_engine_clip(zc_engine *engine, double max_norm, double norm_type, double loss_scale, double *norm);

/* -- looking in -- */

typedef enum zc_role {
    ZC_ROLE_GRAD = 0,       /* reduced sum, not yet averaged; fp32, or fp64 for float64 parameters */
    ZC_ROLE_EXP_AVG = 1,    /* adam, adamw; SGD's momentum buffer */
    ZC_ROLE_EXP_AVG_SQ = 2,
    ZC_ROLE_MAX_EXP_AVG_SQ = 3,
    ZC_ROLE_MASTER = 4,     /* fp32 value of a 16-bit parameter */
    ZC_ROLE_WEIGHT = 5      /* the parameter, in its dtype; of the functions on parts only */
} zc_role;

/* This rank's part of a parameter's state: *elems elements at *memory (NULL if there is none; never for GRAD), those
 * it owns, in ascending order. *dtype: fp32 (fp64); bfloat16 for the master of a bf16 parameter, of which only the
 * 16-bit remainder is kept (raw bits). Valid until destroy. */
zc_status zc_engine_state(zc_engine *engine, size_t index, zc_role role, void **memory, size_t *elems,
                          zc_dtype *dtype);
/* Collective: the whole array, elems elements of fp32 (fp64), on every rank. GRAD: multiplied with scale, and with the
 * factor of clips since the last step, rounded once as one factor. */
zc_status zc_engine_read(zc_engine *engine, size_t index, zc_role role, double scale, void *to);
/* Local: this rank's part is taken from a whole array as zc_engine_read gives it. Not for GRAD. */
zc_status zc_engine_write(zc_engine *engine, size_t index, zc_role role, const void *from);
uint64_t zc_engine_step_count(const zc_engine *engine, size_t index);
/* has_momentum: sgd, the buffer holds a value. */
zc_status zc_engine_set_step_count(zc_engine *engine, size_t index, uint64_t steps, int has_momentum);
int zc_engine_has_momentum(const zc_engine *engine, size_t index);

/*
 * -- parts: what each rank saves, and takes back --
 * The ranks' parts of a parameter cover each of its elements once, at every stage; a part lies in one bucket.
 */
/* Local: the first part of this rank at or after element `from`, elements [*begin, *end) in storage order; both are the
 * number of elements when there is none. `from` may be in the middle of a part. */
zc_status zc_engine_next_part(const zc_engine *engine, size_t index, size_t from, size_t *begin, size_t *end);
/* Local: elements [begin, end), within one of its parts, to host memory: fp32 (fp64), the weight in its own dtype. Zeros for
 * state that was never used. Not for GRAD. */
zc_status zc_engine_read_part(zc_engine *engine, size_t index, zc_role role, size_t begin, size_t end, void *to);
/* Local: the weight within one of its parts; of state, what this rank keeps of [begin, end). */
zc_status zc_engine_write_part(zc_engine *engine, size_t index, zc_role role, size_t begin, size_t end,
                               const void *from);
/* Local: arrays that these options call for exist from now on, so that they can be written. */
zc_status zc_engine_prepare(zc_engine *engine, const zc_options *groups, size_t group_count);
/* Collective: all ranks have written the weights of their parts, which come together as after a step. */
zc_status zc_engine_spread(zc_engine *engine);

/*
 * Checksum of a block of a checkpoint.  Its bytes are taken as little-endian 32-bit
 * words w[0..n-1], zeros added to the last one.  Modulo 2^64,
 *     sums[0] = w[0] + w[1] + ... + w[n-1]
 *     sums[1] = n w[0] + (n-1) w[1] + ... + 1 w[n-1]
 * One changed word changes the first; two that leave it as it was change the second,
 * in blocks of less than 16 GiB.
 */
void zc_checksum(const void *data, size_t bytes, uint64_t sums[2]);

typedef struct zc_memory { /* bytes held by this rank; memory shared by all ranks of a host counts 1/N */
    uint64_t parameters, gradients, master, optimizer_state, buffers, total;
} zc_memory;
void zc_engine_memory(const zc_engine *engine, zc_memory *out);

typedef struct zc_traffic_row {
    uint64_t calls, payload_elems, bytes; /* bytes: what this rank would send on a wire, (N-1)/N of the payload */
} zc_traffic_row;
typedef struct zc_traffic { /* since the last call; bytes: without `small` */
    zc_traffic_row reduce_scatter, all_gather, broadcast, small;
    uint64_t bytes;
} zc_traffic;
/* Waits for the device if steps were captured, see zc_engine_capturing. */
zc_status zc_engine_traffic(zc_engine *engine, zc_traffic *out);

/*
 * -- when this rank worked: an opt-in record, on the CPU --
 * While it is switched on the engine notes each piece of work that this rank does: when, on what, how much.  Nothing else
 * changes: neither what is done, nor in which order, nor any number.  The record is a ring of fixed size; what finds it
 * full is not noted but counted.
 */
typedef enum zc_work_kind {
    ZC_WORK_REDUCE = 0,     /* the gradients of all ranks are added up: this rank's slice of a bucket */
    ZC_WORK_GATHER = 1,     /* stages 0 to 2: another rank's slice of a bucket is copied (with shared_params nothing is);
                               stage 3: a unit is put together */
    ZC_WORK_UPDATE = 2      /* the optimizer's formula on one slice of a bucket, or on several */
} zc_work_kind;

typedef struct zc_work {
    uint64_t begin_ns, end_ns; /* of CLOCK_MONOTONIC, which all processes of a host share */
    uint64_t bytes;         /* reduce, gather: as zc_traffic counts them; update: of memory that it reads and writes */
    zc_work_kind kind;
    uint32_t number;        /* the bucket (the first one of an update), numbered through all spaces as zc_plan counts them;
                               of a gather at stage 3 the unit */
    uint32_t peer;          /* gather at stages 0 to 2: whose slice; otherwise this rank */
} zc_work;

/*
 * Local.  Notes are made from now on, in room for `capacity` of them (sizeof(zc_work) bytes each, and 16 bytes per bucket,
 * operation and rank, all allocated here and counted in zc_memory's buffers); the record is empty.  0 switches off and
 * forgets what was not taken.  Off, it costs a branch for each piece of work.  Work that was under way is noted if it
 * was posted while it was on.  ZC_EINVAL on a GPU: there work is enqueued, and done at times that the host does not see.
 */
zc_status zc_engine_profile(zc_engine *engine, size_t capacity);
/*
 * Local, never waits.  The oldest notes, at most `room` of them, go to `to`, and their room is free again; how many.  A
 * reduction or a gather is noted when the engine has seen its end.  Notes of one kind are disjoint in time, but come in
 * any order.  *lost: the notes that there was no room for since the last call.
 */
size_t zc_engine_take_work(zc_engine *engine, zc_work *to, size_t room, uint64_t *lost);

typedef struct zc_plan { /* sums over the spaces of all dtypes */
    uint64_t spaces, buckets, padded_elems, elems, ring_bytes;
} zc_plan;
void zc_engine_plan(const zc_engine *engine, zc_plan *out);

/*
 * -- GPUs; on a CPU engine these two do nothing --
 * A stream is a cudaStream_t of the engine's GPU, and must exist as long as the engine.
 */
/* From now on the engine works on this stream, after what it has enqueued on the one before. */
zc_status zc_engine_use_stream(zc_engine *engine, void *stream);
/* Work enqueued on `stream` from now on sees what the engine has enqueued so far. */
zc_status zc_engine_order(zc_engine *engine, void *stream);
/*
 * As zc_engine_load_param, from memory of the engine's device.  Stages 0 to 2 read it in the order of the engine's
 * stream, and it must stay as it is until then; at stage 3 it has been read, and the hosts send rank 0's values around.
 */
zc_status zc_engine_load_from_device(zc_engine *engine, size_t index, const void *values);
/* Stages 0 to 2: the parameter's value to other memory of the engine's device, in the order of its stream. */
zc_status zc_engine_copy_param(zc_engine *engine, size_t index, void *to);

/*
 * -- CUDA graphs, of one rank at stages 0 to 2 --
 * While the engine's stream is captured, gradients that are given and a step add to the graph, which does all of it
 * whenever it is launched: with the gradients' values then, and these options.  A graph holds whole iterations, and there
 * must have been one, with as many backwards, before the capture.  loss_scale, max_norm and what else a step is told stay
 * as they were captured.  Launches must be ordered with the engine's other work, by its stream or events, and come before
 * its destruction.  The head of engine_capture.c says what is refused (ZC_ESTATE, ZC_EINVAL, and nothing is changed) and
 * why.  What tells of steps, their counts and traffic includes replays, and waits for the device.
 */
/* Local. Whether the engine's stream is captured now; whether a step ever was. */
zc_status zc_engine_capturing(const zc_engine *engine, int *capturing);
int zc_engine_captured(const zc_engine *engine);
/* Local, waits for nothing: replays, from the stream's next work on, use these options. Not in a capture. */
zc_status zc_engine_replay_options(zc_engine *engine, const zc_options *groups, size_t group_count);
/* Local: how many steps replays have made that were not skipped; 0 where none was captured. */
zc_status zc_engine_replayed_steps(zc_engine *engine, uint64_t *steps);

/* Collective, blocking: all ranks of the engine have come here. `what` names it in messages. Joins open rounds. */
zc_status zc_engine_sync(zc_engine *engine, const char *what);

/* Local: frees everything; NULL and half-built engines are allowed. */
void zc_engine_destroy(zc_engine *engine);

#ifdef __cplusplus
}
#endif

#endif
