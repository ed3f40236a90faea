/*
 * The partition's arithmetic; partition.h has the picture.
 *
 * Every bucket but the last has the same size, so each question is one division;
 * in a space with cuts it is a look into the table of buckets.
 */
#include "partition.h"

size_t partition_align(size_t elems)
{
    return (elems + PARTITION_ALIGN_ELEMS - 1) / PARTITION_ALIGN_ELEMS * PARTITION_ALIGN_ELEMS;
}

size_t partition_place(const size_t *sizes, size_t count, size_t *offsets)
{
    size_t used = 0;
    for (size_t i = count; i-- > 0;) {
        offsets[i] = used;
        if (sizes[i] > SIZE_MAX - PARTITION_ALIGN_ELEMS)
            return SIZE_MAX;
        size_t extent = partition_align(sizes[i]);
        if (extent > SIZE_MAX - PARTITION_ALIGN_ELEMS - used)
            return SIZE_MAX;
        used += extent;
    }
    return used;
}

/* Elements of a full bucket: at least one aligned piece for each rank. */
static size_t full_bucket(size_t ranks, size_t bucket_bytes, size_t elem_bytes)
{
    size_t unit = PARTITION_ALIGN_ELEMS * ranks, elems = bucket_bytes / elem_bytes / unit * unit;
    return elems < unit ? unit : elems;
}

partition partition_make(size_t used_elems, size_t ranks, size_t bucket_bytes, size_t elem_bytes)
{
    size_t unit = PARTITION_ALIGN_ELEMS * ranks;
    partition plan = {.ranks = ranks};
    plan.total_elems = (used_elems / unit + (used_elems % unit != 0)) * unit;
    plan.bucket_elems = full_bucket(ranks, bucket_bytes, elem_bytes);
    if (plan.bucket_elems > plan.total_elems && plan.total_elems)
        plan.bucket_elems = plan.total_elems;
    plan.buckets = plan.total_elems / plan.bucket_elems + (plan.total_elems % plan.bucket_elems != 0);
    return plan;
}

/* Buckets of [begin, end): as few as possible, and as equal as possible. */
static size_t pieces_of(size_t begin, size_t end, size_t most)
{
    return (end - begin) / most + ((end - begin) % most != 0);
}

size_t partition_cut_buckets(const size_t *cuts, size_t count, size_t ranks, size_t bucket_bytes, size_t elem_bytes)
{
    size_t most = full_bucket(ranks, bucket_bytes, elem_bytes), buckets = 0;
    for (size_t k = 0; k < count; k++)
        buckets += pieces_of(k ? cuts[k - 1] : 0, cuts[k], most);
    return buckets;
}

partition partition_make_cut(const size_t *cuts, size_t count, size_t ranks, size_t bucket_bytes, size_t elem_bytes,
                             size_t *starts)
{
    size_t most = full_bucket(ranks, bucket_bytes, elem_bytes), unit = PARTITION_ALIGN_ELEMS * ranks;
    partition plan = {.ranks = ranks, .total_elems = count ? cuts[count - 1] : 0, .starts = starts};
    for (size_t k = 0; k < count; k++) {
        size_t begin = k ? cuts[k - 1] : 0, pieces = pieces_of(begin, cuts[k], most), units = (cuts[k] - begin) / unit;
        for (size_t piece = 0; piece < pieces; piece++)
            starts[plan.buckets++] = begin + units * piece / pieces * unit;
    }
    starts[plan.buckets] = plan.total_elems;
    for (size_t b = 0; b < plan.buckets; b++)
        if (starts[b + 1] - starts[b] > plan.bucket_elems)
            plan.bucket_elems = starts[b + 1] - starts[b];
    return plan;
}

partition_range partition_bucket(const partition *plan, size_t bucket)
{
    if (plan->starts)
        return (partition_range){plan->starts[bucket], plan->starts[bucket + 1]};
    partition_range range = {.begin = bucket * plan->bucket_elems};
    size_t left = plan->total_elems - range.begin;
    range.end = range.begin + (left < plan->bucket_elems ? left : plan->bucket_elems);
    return range;
}

size_t partition_bucket_of(const partition *plan, size_t elem)
{
    if (!plan->starts)
        return elem / plan->bucket_elems;
    size_t low = 0, high = plan->buckets; /* starts[low] <= elem < starts[high] */
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (plan->starts[middle] <= elem)
            low = middle;
        else
            high = middle;
    }
    return low;
}

size_t partition_shard_elems(const partition *plan, size_t bucket)
{
    partition_range range = partition_bucket(plan, bucket);
    return (range.end - range.begin) / plan->ranks;
}

size_t partition_most_shard(const partition *plan)
{
    return plan->buckets ? plan->bucket_elems / plan->ranks : 0;
}

partition_range partition_slice(const partition *plan, size_t bucket, size_t rank)
{
    partition_range range = partition_bucket(plan, bucket);
    size_t elems = (range.end - range.begin) / plan->ranks;
    return (partition_range){range.begin + rank * elems, range.begin + (rank + 1) * elems};
}

size_t partition_shard_offset(const partition *plan, size_t bucket)
{
    return (plan->starts ? plan->starts[bucket] : bucket * plan->bucket_elems) / plan->ranks;
}

size_t partition_shard_total(const partition *plan)
{
    return plan->total_elems / plan->ranks;
}

/* How many of the rank's elements lie before `elem` of the space. */
static size_t owned_before(const partition *plan, size_t rank, size_t elem)
{
    if (elem >= plan->total_elems)
        return partition_shard_total(plan);
    size_t bucket = partition_bucket_of(plan, elem);
    partition_range slice = partition_slice(plan, bucket, rank);
    size_t inside = elem < slice.begin ? 0 : elem < slice.end ? elem - slice.begin : slice.end - slice.begin;
    return partition_shard_offset(plan, bucket) + inside;
}

partition_range partition_owned(const partition *plan, size_t rank, size_t begin, size_t end, size_t *first)
{
    partition_range owned = {owned_before(plan, rank, begin), owned_before(plan, rank, end)};
    *first = begin;
    if (owned.begin < owned.end) {
        size_t bucket = partition_bucket_of(plan, owned.begin * plan->ranks);
        size_t inside = owned.begin - partition_shard_offset(plan, bucket);
        *first = partition_slice(plan, bucket, rank).begin + inside;
    }
    return owned;
}
