/*
 * Memory and arithmetic of one device, as the engine sees it.
 *
 * Every operation takes a stream and may be deferred: it runs after what was
 * enqueued on that stream before it, at the latest when the stream is
 * synchronised.  Arguments passed by value or by a pointer to a struct of this
 * header are read during the call; the memory they point to is device memory
 * and must stay valid until the operation has run.  The CPU device runs
 * everything at once and its streams are NULL; a test device defers as long as
 * it may, so the engine is written for devices that do.
 *
 * Callers use the device_* wrappers, never the table.
 */
#ifndef DEVICE_H
#define DEVICE_H

#include "optim.h"
#include "zc_dtype.h"
#include "zc_status.h"

#include <stddef.h>
#include <stdint.h>

typedef struct zc_stream zc_stream; /* the device's own; NULL is its default stream */
typedef struct zc_device zc_device;

/* Gradient facts of one step on one rank; then, summed, of all ranks. Device memory. */
typedef struct device_stats {
    uint64_t sum_squares[OPTIM_SUM_WORDS];
    uint64_t inf_ranks; /* ranks that saw an infinity */
    uint64_t nan_ranks; /* ranks that saw a NaN */
    uint64_t used[];    /* 16 bits per segment: on how many ranks it had a gradient */
} device_stats;

/* What a step decided. Device memory, written by step_scalars, read back by the host when it is asked. */
typedef struct device_step {
    double norm;        /* of the averaged, unscaled gradient, before clipping; NaN when not asked for */
    double grad_factor; /* what every gradient sum is multiplied with */
    uint64_t skipped;   /* 1: nothing is updated */
    uint64_t nonfinite; /* ranks that saw an infinity or NaN */
} device_step;

/* What replays of captured steps have done (see device_ops.capturing), for the host to read. Device memory. */
#define DEVICE_COUNTS 12u
typedef struct device_tally {
    uint64_t steps;                 /* that were not skipped */
    uint64_t counts[DEVICE_COUNTS]; /* what the host counts when it enqueues a step that is not captured */
} device_tally;

typedef struct device_segment {
    uint32_t group;
    uint32_t has_momentum; /* sgd: its buffer holds a value (becomes 1 at the first use with momentum) */
    uint64_t step;         /* times it was updated */
} device_segment;

/* A run of elements of a shard that belong to one segment. */
typedef struct device_span {
    uint64_t begin, end; /* elements of the shard */
    uint64_t segment;
} device_span;

/* The first of ascending spans that ends after element `at`; count: none does. */
ZC_FN size_t device_find_span(const device_span *spans, size_t count, size_t at)
{
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (spans[middle].end > at)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

typedef struct device_step_args {
    optim_rule rule;
    const optim_options *options; /* host memory, one per group; copied during the call */
    size_t groups;
    double base_factor;  /* 1/N and 1/loss scale */
    double norm_factor;  /* the norm is norm_factor * sqrt(sum of squares) */
    double max_norm;     /* > 0: clip to it */
    double clip_factor;  /* from an earlier clip_grad_norm_: 1 if none */
    int want_norm;
    int skip_nonfinite;
    size_t segments;
    const device_stats *stats;
    device_segment *segment;             /* [segments]; steps are counted here */
    optim_segment_scalars *scalars;      /* [segments]; written */
    device_step *result;                 /* written */
} device_step_args;

/* One shard of an update: its first element in each array. */
typedef struct device_shard {
    const device_span *spans; /* ascending */
    size_t span_count;
    size_t extent;            /* elements of the shard; no span ends after it */
    size_t state_begin;       /* in the arrays of the state */
    void *param;
    const void *grad;         /* zc_dtype_sum(param_dtype) */
} device_shard;

/* As many as a GPU takes by value: a kernel's arguments are 4 KiB at most. */
#define DEVICE_MAX_SHARDS 64u

/* Shards that are updated in one call; no two have elements in common. */
typedef struct device_update_args {
    optim_rule rule;
    zc_dtype param_dtype;
    const optim_segment_scalars *scalars; /* [segments] */
    size_t segments;
    void *master, *m, *v, *vmax; /* the state; NULL where there is none */
    size_t shard_count;
    device_shard shards[DEVICE_MAX_SHARDS];
} device_update_args;

/*
 * Physical memory with several addresses.  A slot has one address of its own,
 * `base`, the one to name in collectives; device_ops.slot_map gives it further
 * ones, each for as long as it is wanted: what is written at one is read at all.
 * Nothing has to be ordered between them but the accesses themselves.  On a GPU
 * one handle is one slot, mapped from its offset 0; all of it at start-up.
 *
 * A device may be unable to give further addresses: its slot_map and slot_unmap
 * are NULL, and what is to keep its address needs a slot of its own.
 */
typedef struct device_slot {
    void *base;
    size_t bytes;
    uint64_t handle; /* the device's own */
} device_slot;

typedef struct device_ops {
    const char *name;
    size_t slot_step_bytes; /* slots and their mappings are multiples of it */
    /*
     * One update should touch about this much memory, in as many shards as that takes: less is slow to start.
     * 0: one shard, so that what comes next finds it in the caches.
     */
    size_t update_bytes;
    /* Zero-filled; bytes 0 gives *out = NULL. */
    zc_status (*alloc)(zc_device *device, size_t bytes, void **out);
    /* Never blocks: the memory is given back after what has been enqueued so far. */
    void (*free)(zc_device *device, void *memory, size_t bytes);
    /* bytes > 0. */
    zc_status (*slot_alloc)(zc_device *device, size_t bytes, device_slot *out);
    /* One more address for the first `bytes` bytes of a slot; NULL where that is not possible. */
    zc_status (*slot_map)(zc_device *device, const device_slot *slot, size_t bytes, void **out);
    /* These two: nothing that is enqueued uses the memory any more. */
    void (*slot_unmap)(zc_device *device, void *memory, size_t bytes);
    void (*slot_free)(zc_device *device, device_slot *slot);
    zc_status (*copy)(zc_device *device, zc_stream *stream, void *to, const void *from, size_t bytes);
    /* The same, of memory that is not read again before more than a cache has been written. */
    zc_status (*copy_far)(zc_device *device, zc_stream *stream, void *to, const void *from, size_t bytes);
    /* Copies strided `from` (element strides, `dims` dimensions) into contiguous `to`, row-major. */
    zc_status (*pack)(zc_device *device, zc_stream *stream, void *to, const void *from, size_t elem_bytes,
                      int dims, const int64_t *shape, const int64_t *strides);
    /* Every byte becomes `byte`. */
    zc_status (*fill)(zc_device *device, zc_stream *stream, void *to, int byte, size_t bytes);
    /* to (sum type of dtype) = or += from (dtype). */
    zc_status (*accumulate)(zc_device *device, zc_stream *stream, void *to, const void *from, size_t count,
                            zc_dtype dtype, int add);
    /* Adds the sum of squares of one shard into stats and ors its CPU_NONFINITE_* into *flags. fp32 or fp64. */
    zc_status (*sum_squares)(zc_device *device, zc_stream *stream, device_stats *stats, uint32_t *flags,
                             const void *grad, size_t count, zc_dtype dtype);
    /* stats->inf_ranks and nan_ranks become 0 or 1 each, from *flags (CPU_NONFINITE_* of this rank's shards). */
    zc_status (*fold_flags)(zc_device *device, zc_stream *stream, device_stats *stats, const uint32_t *flags);
    /* to[i] = factor * from[i], fp32 or fp64; the factor is rounded to the type first. May be in place. */
    zc_status (*scale)(zc_device *device, zc_stream *stream, void *to, const void *from, size_t count,
                       zc_dtype dtype, double factor);
    zc_status (*step_scalars)(zc_device *device, zc_stream *stream, const device_step_args *args);
    zc_status (*update)(zc_device *device, zc_stream *stream, const device_update_args *args);
    /* Host memory to device memory; the source is read during the call. */
    zc_status (*upload)(zc_device *device, zc_stream *stream, void *to, const void *from, size_t bytes);
    /* Device memory to host memory; blocks until the stream has reached it. */
    zc_status (*download)(zc_device *device, zc_stream *stream, void *to, const void *from, size_t bytes);
    zc_status (*synchronize)(zc_device *device, zc_stream *stream);
    /* What is enqueued on `after` from now on runs after what has been enqueued on `before`. */
    zc_status (*order)(zc_device *device, zc_stream *before, zc_stream *after);
    void (*destroy)(zc_device *device);
    /*
     * Graphs; NULL, all three, on a device that has none.
     * *graph becomes 0, or, while what is enqueued on the stream is captured into a graph instead of being run, a number
     * that no other capture of the process has.  A graph runs, any number of times, when somebody launches it, which the
     * device does not notice.  In a capture every operation on the stream is captured with the values that it has read
     * during the call; what allocates, waits or reads back gives ZC_ESTATE, and the capture goes on; `order` gives it for
     * streams of which the first alone is captured, and does nothing where the second alone is: a graph comes after what
     * the stream has on which it is launched.
     */
    zc_status (*capturing)(zc_device *device, zc_stream *stream, uint64_t *graph);
    /* From the stream's next work on, replays of captured step_scalars read these options; not in a capture. */
    zc_status (*replay_options)(zc_device *device, zc_stream *stream, const optim_options *options, size_t groups);
    /* Adds one to tally->steps unless result->skipped, and `counts`, which are read during the call, to tally->counts. */
    zc_status (*tally)(zc_device *device, zc_stream *stream, device_tally *tally, const device_step *result,
                       const uint64_t counts[DEVICE_COUNTS]);
    /* CLOCK_MONOTONIC of the host. NULL: the work of a call may not be done when it returns, so this would not tell its time. */
    uint64_t (*now_ns)(void);
} device_ops;

struct zc_device {
    const device_ops *ops;
};

#define DEVICE_CALL(device, op, ...) ((device)->ops->op((device), __VA_ARGS__))

/*
 * A CPU device: kernels for this machine's instruction set, a pool of `threads`
 * threads, the caller included (0: 1; how many cores a rank may use is known to
 * the caller).  ZC_EINVAL if ZERO_C_ISA names a set that cannot be used.
 */
zc_status cpu_device_create(int threads, zc_device **out);

#endif
