/*
 * The partition, exhaustively for small sizes: every element of the space is
 * owned once, shards tile their bucket, and what a rank owns of any range is
 * one range of its shard space; with and without cuts.
 */
#include "partition.h"
#include "testing.h"

/* The owner and shard position of each element, from the slices alone. */
static void check_elements(partition plan)
{
    size_t ranks = plan.ranks, unit = PARTITION_ALIGN_ELEMS * ranks, most = 0;
    CHECK_EQ(plan.total_elems % unit, 0);
    CHECK_EQ(plan.bucket_elems % unit, 0);
    CHECK_EQ(partition_shard_total(&plan) * ranks, plan.total_elems);

    size_t *owner = calloc(plan.total_elems + 1, sizeof *owner);   /* rank + 1 */
    size_t *position = calloc(plan.total_elems + 1, sizeof *position);
    size_t next_bucket = 0;
    for (size_t b = 0; b < plan.buckets; b++) {
        partition_range bucket = partition_bucket(&plan, b);
        CHECK_EQ(bucket.begin, next_bucket);
        CHECK(bucket.end > bucket.begin && (bucket.end - bucket.begin) % unit == 0);
        CHECK(bucket.end - bucket.begin <= plan.bucket_elems);
        if (bucket.end - bucket.begin > most)
            most = bucket.end - bucket.begin;
        CHECK_EQ(partition_bucket_of(&plan, bucket.begin), b);
        CHECK_EQ(partition_bucket_of(&plan, bucket.end - 1), b);
        next_bucket = bucket.end;
        size_t next_slice = bucket.begin;
        for (size_t r = 0; r < ranks; r++) {
            partition_range slice = partition_slice(&plan, b, r);
            CHECK_EQ(slice.begin, next_slice);
            CHECK_EQ(slice.end - slice.begin, partition_shard_elems(&plan, b));
            CHECK_EQ(slice.begin % PARTITION_ALIGN_ELEMS, 0);
            next_slice = slice.end;
            for (size_t i = slice.begin; i < slice.end; i++) {
                CHECK_EQ(owner[i], 0);
                owner[i] = r + 1;
                position[i] = partition_shard_offset(&plan, b) + i - slice.begin;
            }
        }
        CHECK_EQ(next_slice, bucket.end);
    }
    CHECK_EQ(next_bucket, plan.total_elems);
    CHECK_EQ(partition_most_shard(&plan) * ranks, most);

    /* Any range [begin, end), in steps that hit and miss the boundaries. */
    for (size_t begin = 0; begin <= plan.total_elems; begin += begin % 64 == 63 ? 1 : 31) {
        for (size_t end = begin; end <= plan.total_elems; end += end % 64 == 63 ? 1 : 63) {
            for (size_t r = 0; r < ranks; r++) {
                size_t first = SIZE_MAX;
                partition_range owned = partition_owned(&plan, r, begin, end, &first);
                CHECK(owned.begin <= owned.end && owned.end <= partition_shard_total(&plan));
                size_t expected = owned.begin;
                int seen = 0;
                for (size_t i = begin; i < end; i++) {
                    if (owner[i] != r + 1)
                        continue;
                    if (!seen)
                        CHECK_EQ(first, i);
                    seen = 1;
                    if (position[i] != expected)
                        CHECK_EQ(position[i], expected);
                    expected++;
                }
                CHECK_EQ(expected, owned.end);
            }
        }
    }
    free(owner);
    free(position);
}

static void check_plan(size_t used, size_t ranks, size_t bucket_elems)
{
    partition plan = partition_make(used, ranks, bucket_elems * 4, 4);
    size_t unit = PARTITION_ALIGN_ELEMS * ranks;
    CHECK(plan.total_elems >= used && plan.total_elems - used < unit);
    CHECK(plan.bucket_elems >= unit);
    CHECK(plan.bucket_elems <= (bucket_elems > unit ? bucket_elems : unit));
    CHECK_EQ(plan.buckets == 0, used == 0);
    for (size_t b = 0; b + 1 < plan.buckets; b++)
        CHECK_EQ(partition_shard_elems(&plan, b) * ranks, plan.bucket_elems);
    check_elements(plan);
}

/* `sizes` in aligned pieces for each rank; cuts lie behind each of them. */
static void check_cut_plan(const size_t *sizes, size_t count, size_t ranks, size_t bucket_elems)
{
    size_t unit = PARTITION_ALIGN_ELEMS * ranks, cuts[4], total = 0, bucket = 0;
    size_t most = bucket_elems / unit ? bucket_elems / unit : 1;
    for (size_t k = 0; k < count; k++)
        cuts[k] = total += sizes[k] * unit;
    size_t buckets = partition_cut_buckets(cuts, count, ranks, bucket_elems * 4, 4);
    size_t *starts = malloc((buckets + 1) * sizeof *starts);
    partition plan = partition_make_cut(cuts, count, ranks, bucket_elems * 4, 4, starts);
    CHECK_EQ(plan.ranks, ranks);
    CHECK_EQ(plan.total_elems, total);
    CHECK_EQ(plan.buckets, buckets);
    CHECK_EQ(starts[buckets], total);
    for (size_t k = 0; k < count; k++) { /* as few as possible, and all but equal */
        size_t pieces = (sizes[k] + most - 1) / most, begin = k ? cuts[k - 1] : 0;
        for (size_t piece = 0; piece < pieces; piece++, bucket++) {
            partition_range range = partition_bucket(&plan, bucket);
            size_t units = (range.end - range.begin) / unit;
            CHECK_EQ(range.begin, begin);
            CHECK(units == sizes[k] / pieces || units == (sizes[k] + pieces - 1) / pieces);
            CHECK(units <= most);
            begin = range.end;
        }
        CHECK_EQ(begin, cuts[k]);
    }
    CHECK_EQ(bucket, buckets);
    check_elements(plan);
    free(starts);
}

static void no_bucket_goes_over_a_cut(void)
{
    static const size_t buckets[] = {1, 64, 128, 200, 300, 384, 1000, 1 << 20};
    for (size_t ranks = 1; ranks <= 4; ranks++)
        for (size_t b = 0; b < sizeof buckets / sizeof *buckets; b++) {
            check_cut_plan(NULL, 0, ranks, buckets[b]);
            for (size_t one = 1; one <= 7; one += 2)
                for (size_t two = 0; two <= 4; two += 2)
                    for (size_t three = 0; three <= 3; three++) {
                        size_t sizes[3] = {one}, count = 1;
                        if (two)
                            sizes[count++] = two;
                        if (three)
                            sizes[count++] = three;
                        check_cut_plan(sizes, count, ranks, buckets[b]);
                    }
        }
}

static void every_element_is_owned_once(void)
{
    static const size_t used[] = {0, 64, 128, 192, 256, 448, 640, 1024};
    static const size_t buckets[] = {1, 64, 128, 200, 256, 384, 4096};
    for (size_t ranks = 1; ranks <= 5; ranks++)
        for (size_t u = 0; u < sizeof used / sizeof *used; u++)
            for (size_t b = 0; b < sizeof buckets / sizeof *buckets; b++)
                check_plan(used[u], ranks, buckets[b]);
}

static void parameters_lie_in_reverse_order(void)
{
    static const size_t choices[] = {0, 1, 63, 64, 65, 200};
    size_t sizes[3], offsets[3];
    for (size_t a = 0; a < 6; a++)
        for (size_t b = 0; b < 6; b++)
            for (size_t c = 0; c < 6; c++) {
                sizes[0] = choices[a], sizes[1] = choices[b], sizes[2] = choices[c];
                size_t used = partition_place(sizes, 3, offsets);
                CHECK_EQ(offsets[2], 0);
                CHECK_EQ(offsets[1], partition_align(sizes[2]));
                CHECK_EQ(offsets[0], offsets[1] + partition_align(sizes[1]));
                CHECK_EQ(used, offsets[0] + partition_align(sizes[0]));
                CHECK_EQ(used % PARTITION_ALIGN_ELEMS, 0);
            }
    CHECK_EQ(partition_place(NULL, 0, NULL), 0);
}

static void alignment_rounds_up(void)
{
    CHECK_EQ(partition_align(0), 0);
    CHECK_EQ(partition_align(1), 64);
    CHECK_EQ(partition_align(64), 64);
    CHECK_EQ(partition_align(65), 128);
}

static void sizes_that_overflow_are_refused(void)
{
    size_t offsets[2];
    CHECK(partition_place((size_t[]){SIZE_MAX}, 1, offsets) == SIZE_MAX);
    CHECK(partition_place((size_t[]){SIZE_MAX - 63}, 1, offsets) == SIZE_MAX);
    CHECK(partition_place((size_t[]){SIZE_MAX / 2, SIZE_MAX / 2 + 2}, 2, offsets) == SIZE_MAX);
    CHECK(partition_place((size_t[]){SIZE_MAX / 2 - 127, 64}, 2, offsets) == SIZE_MAX / 2 - 63);
}

int main(void)
{
    RUN(alignment_rounds_up);
    RUN(parameters_lie_in_reverse_order);
    RUN(sizes_that_overflow_are_refused);
    RUN(every_element_is_owned_once);
    RUN(no_bucket_goes_over_a_cut);
    DONE();
}
