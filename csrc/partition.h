/*
 * The partition: which element of which parameter lives in which bucket, and
 * which rank owns it.  Pure arithmetic: nothing here allocates, waits or calls
 * out, so every property of it can be tested exhaustively.
 *
 * One flat space holds the parameters of one dtype, in reverse order of
 * registration (the order in which backward finishes them).  A parameter
 * starts at a multiple of 64 elements and its extent is padded to one, so
 *
 *     space:   | p[n-1] .. pad | p[n-2] .. pad | ...            | tail |
 *     buckets: |<---- bucket_elems ---->|<---- bucket_elems ---->| .. last |
 *     shards:  | rank 0 | rank 1 | ...  | rank 0 | rank 1 | ...  |
 *
 * A bucket is a window of `bucket_elems` (a multiple of 64 * ranks), the last
 * one shorter (but also a multiple of 64 * ranks); rank r owns slice r of
 * every bucket.  A parameter may span buckets: no embedding sizes a bucket.
 *
 * Stage 3 cuts the space at the units too: what is gathered together begins and
 * ends with a bucket.  Buckets then have different sizes, and where they begin is
 * in a table (`starts`).
 *
 * A rank keeps the slices it owns one behind the other ("shard space").  The
 * part of one parameter that a rank owns is one contiguous range there,
 * because a parameter that leaves a bucket fills it to its end.
 */
#ifndef ZC_PARTITION_H
#define ZC_PARTITION_H

#include <stddef.h>
#include <stdint.h>

#define PARTITION_ALIGN_ELEMS 64u

typedef struct partition {
    size_t ranks;
    size_t bucket_elems; /* of every bucket but the last; with `starts`, of the largest */
    size_t total_elems;  /* of the whole space, padding included */
    size_t buckets;      /* 0 for an empty space */
    const size_t *starts;/* [buckets + 1]: where each begins, multiples of 64 * ranks; NULL: all alike */
} partition;

/* A range of elements, [begin, end). */
typedef struct partition_range {
    size_t begin, end;
} partition_range;

/* n rounded up to a multiple of PARTITION_ALIGN_ELEMS. */
size_t partition_align(size_t elems);

/*
 * Lays `count` parameters of sizes[i] elements (0 allowed) into offsets[i]:
 * the last parameter first.  Returns the number of elements used (a multiple
 * of 64), or SIZE_MAX if that would overflow.
 */
size_t partition_place(const size_t *sizes, size_t count, size_t *offsets);

/*
 * The partition of `used_elems` elements (from partition_place) over `ranks`
 * ranks with buckets of about `bucket_bytes` bytes of `elem_bytes`-byte
 * elements: at least 64 * ranks elements, at most the whole space.
 */
partition partition_make(size_t used_elems, size_t ranks, size_t bucket_bytes, size_t elem_bytes);

/*
 * The same for a space that is cut at cuts[0..count-1] (ascending, multiples of
 * 64 * ranks; the last one is the end): no bucket goes over a cut.  `starts` has
 * room for partition_cut_buckets() + 1 numbers and must live as long as the plan.
 */
partition partition_make_cut(const size_t *cuts, size_t count, size_t ranks, size_t bucket_bytes, size_t elem_bytes,
                             size_t *starts);
size_t partition_cut_buckets(const size_t *cuts, size_t count, size_t ranks, size_t bucket_bytes, size_t elem_bytes);

/* The elements of bucket b in the space. */
partition_range partition_bucket(const partition *plan, size_t bucket);

/* The bucket that holds element `elem` of the space. */
size_t partition_bucket_of(const partition *plan, size_t elem);

/* Elements of one shard (slice) of bucket b; the same for every rank. */
size_t partition_shard_elems(const partition *plan, size_t bucket);

/* The largest of them; 0 for an empty space. */
size_t partition_most_shard(const partition *plan);

/* The slice of bucket b that `rank` owns, in the space. */
partition_range partition_slice(const partition *plan, size_t bucket, size_t rank);

/* Where bucket b's slice begins in a rank's shard space. */
size_t partition_shard_offset(const partition *plan, size_t bucket);

/* Elements of a rank's whole shard space: total_elems / ranks. */
size_t partition_shard_total(const partition *plan);

/*
 * The part of [begin, end) of the space that `rank` owns, as a range of its
 * shard space; `*first` receives the space's element that shard element
 * `begin` of the result holds.  Empty ranges have begin == end.
 * Contiguous for any range that covers whole buckets between its ends.
 */
partition_range partition_owned(const partition *plan, size_t rank, size_t begin, size_t end, size_t *first);

#endif
