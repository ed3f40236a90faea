/*
 * The partition's arithmetic; partition.h has the picture.
 *
 * Every bucket but the last has the same size, so each question is one division.
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

partition partition_make(size_t used_elems, size_t ranks, size_t bucket_bytes, size_t elem_bytes)
{
    size_t unit = PARTITION_ALIGN_ELEMS * ranks; /* one aligned piece for each rank */
    partition plan = {.ranks = ranks};
    plan.total_elems = (used_elems / unit + (used_elems % unit != 0)) * unit;
    plan.bucket_elems = bucket_bytes / elem_bytes / unit * unit;
    if (plan.bucket_elems > plan.total_elems)
        plan.bucket_elems = plan.total_elems;
    if (plan.bucket_elems < unit)
        plan.bucket_elems = unit;
    plan.buckets = plan.total_elems / plan.bucket_elems + (plan.total_elems % plan.bucket_elems != 0);
    return plan;
}

partition_range partition_bucket(const partition *plan, size_t bucket)
{
    partition_range range = {.begin = bucket * plan->bucket_elems};
    size_t left = plan->total_elems - range.begin;
    range.end = range.begin + (left < plan->bucket_elems ? left : plan->bucket_elems);
    return range;
}

size_t partition_bucket_of(const partition *plan, size_t elem)
{
    return elem / plan->bucket_elems;
}

size_t partition_shard_elems(const partition *plan, size_t bucket)
{
    partition_range range = partition_bucket(plan, bucket);
    return (range.end - range.begin) / plan->ranks;
}

partition_range partition_slice(const partition *plan, size_t bucket, size_t rank)
{
    size_t elems = partition_shard_elems(plan, bucket);
    size_t begin = bucket * plan->bucket_elems + rank * elems;
    return (partition_range){begin, begin + elems};
}

size_t partition_shard_offset(const partition *plan, size_t bucket)
{
    return bucket * (plan->bucket_elems / plan->ranks);
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
        size_t bucket = owned.begin / (plan->bucket_elems / plan->ranks);
        size_t inside = owned.begin - partition_shard_offset(plan, bucket);
        *first = partition_slice(plan, bucket, rank).begin + inside;
    }
    return owned;
}
