/*
 * Every kernel of the CUDA backend, run by the emulated runtime, against the
 * CPU's kernels on the same memory: the same bytes for all types, sizes,
 * alignments and special values, and nothing written beside the arrays.  Where
 * an operation meets a NaN only that the result is one is compared.
 */
#include "cpu_kernels.h"
#include "cuda_kernels.h"
#include "emu.h"
#include "testing.h"

#include <math.h>

#define MOST 100003 /* elements of the largest test: many rounds of the grid */
#define GUARD_BYTES 64
#define MAX_RANKS 5
#define ARRAY_BYTES (2 * GUARD_BYTES + 64 + MOST * 8)

static const size_t sizes[] = {0, 1, 63, 64, 65, 130, 1000, 4099};
#define SIZES (sizeof sizes / sizeof *sizes)

static cudaStream_t stream;
static zc_device *cpu;
static const cpu_kernels *kernels;

/* ---- arrays, on both sides ------------------------------------------------------ */

/* The same memory twice; `used` bytes of it are filled, compared, and begin and end with guards. */
typedef struct array {
    unsigned char *host, *device;
    size_t begin, used; /* bytes */
    zc_dtype dtype;
} array;

static void give_back(const void *device)
{
    CHECK_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    CHECK_EQ(cudaFree((void *)device), cudaSuccess);
}

static array make_array(void)
{
    array a = {.host = malloc(ARRAY_BYTES)};
    CHECK_EQ(cudaMalloc((void **)&a.device, ARRAY_BYTES), cudaSuccess);
    return a;
}

static void drop_array(array *a)
{
    free(a->host);
    give_back(a->device);
}

static void *on_host(const array *a)
{
    return a->host + a->begin;
}

static void *on_device(const array *a)
{
    return a->device + a->begin;
}

typedef enum kind { ORDINARY, SPECIAL } kind;

static const uint32_t special_bits[] = {0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007fffff, 0x00800000,
                                        0x3f800000, 0xbf800000, 0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000,
                                        0x7fc00000, 0x7f800001, 0x33000000, 0x33000001, 0x477fe000, 0x477fefff,
                                        0x477ff000, 0x38800000, 0x387fffff, 0x3f808000, 0x3f818000};

static float random_value(kind k, uint64_t *state)
{
    uint64_t which = k == SPECIAL ? testing_random(state) % 6 : 0;
    if (which == 1)
        return zc_bits_float(special_bits[testing_random(state) % (sizeof special_bits / sizeof *special_bits)]);
    if (which == 2)
        return zc_bits_float((uint32_t)testing_random(state));
    return ldexpf(testing_float(state), (int)(testing_random(state) % 9) - 4);
}

/*
 * Values for `count` elements that begin `offset_elems` elements behind an address with
 * 64-byte alignment.  Guards are large numbers, so that one that is added changes any sum.
 */
static void fill(array *a, size_t offset_elems, size_t count, zc_dtype dtype, kind k, uint64_t *state)
{
    size_t bytes = zc_dtype_bytes(dtype);
    a->dtype = dtype;
    a->begin = GUARD_BYTES + offset_elems * bytes;
    a->used = a->begin + count * bytes + GUARD_BYTES;
    memset(a->host, 0x5a, a->used);
    for (size_t i = 0; i < count; i++) {
        float value = random_value(k, state);
        uint64_t bits = testing_random(state);
        if (dtype == ZC_FLOAT64) {
            double wide = (double)value * (1 + (double)(bits >> 40) * 0x1p-52);
            if (k == SPECIAL && bits % 8 == 0)
                memcpy(&wide, &(uint64_t){testing_random(state)}, sizeof wide);
            ((double *)on_host(a))[i] = wide;
        } else {
            testing_put(on_host(a), dtype, i, value);
        }
    }
    emu_poke(a->device, a->host, a->used);
}

static int is_nan(const void *at, zc_dtype dtype)
{
    switch (dtype) {
    case ZC_FLOAT32:
        return isnan(*(const float *)at);
    case ZC_FLOAT64:
        return isnan(*(const double *)at);
    case ZC_BFLOAT16:
        return isnan(zc_bf16_to_float(*(const uint16_t *)at));
    case ZC_FLOAT16:
        return isnan(zc_fp16_to_float(*(const uint16_t *)at));
    default:
        return 0;
    }
}

/* Both sides have the same bytes, or NaN in both places. */
static void same(const char *what, const array *a)
{
    static unsigned char got[ARRAY_BYTES];
    size_t bytes = zc_dtype_bytes(a->dtype);
    emu_peek(got, a->device, a->used);
    for (size_t i = a->begin % bytes; i + bytes <= a->used; i += bytes) {
        if (!memcmp(got + i, a->host + i, bytes) || (is_nan(got + i, a->dtype) && is_nan(a->host + i, a->dtype)))
            continue;
        testing_failures++;
        fprintf(stderr, "%s, %s: element %" PRId64 " of %zu differs from the CPU's\n", what, zc_dtype_name(a->dtype),
                ((int64_t)i - (int64_t)a->begin) / (int64_t)bytes, (a->used - a->begin - GUARD_BYTES) / bytes);
        return;
    }
}

/* A small device object of its own. */
static void *upload(const void *from, size_t bytes)
{
    void *to = NULL;
    CHECK_EQ(cudaMalloc(&to, bytes ? bytes : 1), cudaSuccess);
    emu_poke(to, from, bytes);
    return to;
}

static void download(void *to, void *from, size_t bytes)
{
    emu_peek(to, from, bytes);
    give_back(from);
}

/* ---- reduce ----------------------------------------------------------------------- */

typedef enum own_place { IN_BASE, APART, NO_OWN, IN_RESULT, RESULT_IN_BASE, OWN_PLACES } own_place;

typedef struct reduction {
    zc_dtype dtype;
    size_t ranks, own, count, gap_elems;
    size_t base_offset, own_offset, to_offset; /* elements */
    own_place place; /* IN_RESULT, RESULT_IN_BASE: for types that are their own sum's */
    int accumulate;
    kind kind;
} reduction;

static void check_reduction(const reduction *r, array *base, array *own, array *result, uint64_t *state)
{
    zc_dtype sum = zc_dtype_sum(r->dtype);
    size_t bytes = zc_dtype_bytes(r->dtype), stride_bytes = (r->count + r->gap_elems) * bytes;
    fill(base, r->base_offset, r->ranks * (r->count + r->gap_elems), r->dtype, r->kind, state);
    fill(own, r->own_offset, r->count, r->dtype, r->kind, state);
    fill(result, r->to_offset, r->count, sum, r->kind, state);

    const void *in[MAX_RANKS];
    for (size_t q = 0; q < r->ranks; q++)
        in[q] = (char *)on_host(base) + q * stride_bytes;
    cuda_operands operands = {on_device(base), stride_bytes, r->ranks, r->ranks, NULL};
    void *to_host = on_host(result), *to_device = on_device(result);
    if (r->place == RESULT_IN_BASE) {
        to_host = (char *)on_host(base) + r->own * stride_bytes;
        to_device = (char *)on_device(base) + r->own * stride_bytes;
    } else if (r->place != IN_BASE) {
        const array *place = r->place == APART ? own : r->place == IN_RESULT ? result : NULL;
        operands.own = r->own;
        operands.own_at = place ? on_device(place) : NULL;
        in[r->own] = place ? on_host(place) : NULL;
    }
    uint32_t before = (uint32_t)(testing_random(state) % 4), flags = before;
    uint32_t *device_flags = upload(&flags, sizeof flags);
    int with_flags = testing_random(state) % 4 != 0;
    CHECK_EQ(cuda_reduce(stream, to_device, &operands, r->count, r->dtype, r->accumulate,
                         with_flags ? device_flags : NULL), cudaSuccess);
    uint32_t found = kernels->reduce(to_host, in, r->ranks, r->count, r->dtype, r->accumulate);
    download(&flags, device_flags, sizeof flags);
    CHECK_EQ(flags, with_flags ? before | found : before);
    same("reduce", base);
    same("reduce", result);
}

static void reductions(void)
{
    array base = make_array(), own = make_array(), result = make_array();
    uint64_t state = 1;
    for (zc_dtype dtype = ZC_FLOAT32; dtype <= ZC_FLOAT16; dtype++)
        for (size_t ranks = 1; ranks <= MAX_RANKS; ranks++)
            for (size_t s = 0; s < SIZES; s++)
                for (own_place place = IN_BASE; place < OWN_PLACES; place++)
                    for (int variant = 0; variant < 8; variant++) {
                        if (place >= IN_RESULT && dtype != zc_dtype_sum(dtype))
                            continue;
                        size_t round_up = (64 - sizes[s] % 64) % 64;
                        reduction r = {dtype, ranks, testing_random(&state) % ranks, sizes[s],
                                       variant == 7 ? 1 : round_up, variant == 4, variant == 5, variant == 6, place,
                                       variant & 1, variant < 2 ? ORDINARY : SPECIAL};
                        check_reduction(&r, &base, &own, &result, &state);
                    }
    for (zc_dtype dtype = ZC_FLOAT32; dtype <= ZC_FLOAT16; dtype++)
        for (size_t offset = 0; offset < 2; offset++) {
            reduction r = {dtype, 1, 0, MOST, 0, 0, offset, 0, APART, offset == 1, SPECIAL};
            check_reduction(&r, &base, &own, &result, &state);
        }
    reduction long_sum = {ZC_FLOAT32, 2, 1, MOST / 2 | 1, 0, 0, 0, 0, IN_RESULT, 0, ORDINARY};
    long_sum.gap_elems = 64 - long_sum.count % 64;
    check_reduction(&long_sum, &base, &own, &result, &state);
    drop_array(&base), drop_array(&own), drop_array(&result);
}

/* ---- sums of squares, scale, flags -------------------------------------------------- */

/* Of what `grad` holds. */
static void compare_squares(const array *grad, zc_dtype dtype, size_t count, uint64_t *state)
{
    struct {
        uint64_t sum_squares[OPTIM_SUM_WORDS], inf_ranks, nan_ranks;
    } want, got;
    for (unsigned i = 0; i < OPTIM_SUM_WORDS; i++)
        want.sum_squares[i] = testing_random(state) >> 16;
    want.inf_ranks = want.nan_ranks = 77;
    uint32_t flags = 0, found;
    device_stats *stats = upload(&want, sizeof want);
    uint32_t *device_flags = upload(&flags, sizeof flags);
    CHECK_EQ(cuda_sum_squares(stream, stats, device_flags, on_device(grad), count, dtype), cudaSuccess);
    found = kernels->sum_squares(want.sum_squares, on_host(grad), count, dtype);
    download(&got, stats, sizeof got);
    download(&flags, device_flags, sizeof flags);
    CHECK_EQ(flags, found);
    CHECK(!memcmp(&got, &want, sizeof want));
    same("sum_squares", grad);
}

static void check_squares(array *grad, zc_dtype dtype, size_t offset, size_t count, kind k, uint64_t *state)
{
    fill(grad, offset, count, dtype, k, state);
    compare_squares(grad, dtype, count, state);
}

static void check_squares_of(array *grad, double value, uint64_t *state)
{
    fill(grad, 0, 1, ZC_FLOAT64, ORDINARY, state);
    *(double *)on_host(grad) = value;
    emu_poke(grad->device, grad->host, grad->used);
    compare_squares(grad, ZC_FLOAT64, 1, state);
}

static void squares(void)
{
    array grad = make_array();
    uint64_t state = 2;
    for (zc_dtype dtype = ZC_FLOAT32; dtype <= ZC_FLOAT64; dtype++) {
        for (size_t s = 0; s < SIZES; s++)
            for (size_t offset = 0; offset < 6; offset++)
                check_squares(&grad, dtype, offset % 3, sizes[s], offset < 3 ? ORDINARY : SPECIAL, &state);
        check_squares(&grad, dtype, 0, MOST, ORDINARY, &state);
    }
    drop_array(&grad);
}

/* One element that is not finite, or (fp64) whose square is not: which flag, wherever it is. */
static void squares_find_each_nonfinite(void)
{
    static const double odd[] = {INFINITY, -INFINITY, NAN, 1e200, 0x1.fffffffffffffp+1023, 4e-324};
    array grad = make_array();
    uint64_t state = 3;
    for (size_t o = 0; o < sizeof odd / sizeof *odd; o++)
        for (size_t place = 0; place < 130; place += 3) {
            fill(&grad, 0, 130, ZC_FLOAT64, ORDINARY, &state);
            ((double *)on_host(&grad))[place] = odd[o];
            emu_poke(grad.device, grad.host, grad.used);
            uint64_t want[OPTIM_SUM_WORDS] = {0};
            uint32_t flags = 0, found = kernels->sum_squares(want, on_host(&grad), 130, ZC_FLOAT64);
            uint64_t zeros[OPTIM_SUM_WORDS + 2] = {0}, got[OPTIM_SUM_WORDS + 2];
            device_stats *stats = upload(zeros, sizeof zeros);
            uint32_t *device_flags = upload(&flags, sizeof flags);
            CHECK_EQ(cuda_sum_squares(stream, stats, device_flags, on_device(&grad), 130, ZC_FLOAT64), cudaSuccess);
            download(got, stats, sizeof got);
            download(&flags, device_flags, sizeof flags);
            CHECK_EQ(flags, found);
            CHECK_EQ(found, o == 2 ? CPU_NONFINITE_NAN : o < 5 ? CPU_NONFINITE_INF : 0);
            CHECK(!memcmp(got, want, sizeof want));
        }
    drop_array(&grad);
}

/* Sums from the least to the greatest that there is. */
static void squares_reach_every_word(void)
{
    array grad = make_array();
    uint64_t state = 9;
    for (int exponent = -538; exponent <= 511; exponent++) {
        check_squares_of(&grad, ldexp(1.9, exponent), &state);
        check_squares_of(&grad, ldexp(1.1, exponent), &state);
    }
    drop_array(&grad);
}

static void scaling(void)
{
    array from = make_array(), to = make_array();
    uint64_t state = 4;
    for (zc_dtype dtype = ZC_FLOAT32; dtype <= ZC_FLOAT64; dtype++)
        for (size_t s = 0; s <= SIZES; s++)
            for (size_t offset = 0; offset < 3; offset++)
                for (int in_place = 0; in_place < 2; in_place++) {
                    size_t count = s < SIZES ? sizes[s] : MOST;
                    fill(&from, offset, count, dtype, SPECIAL, &state);
                    fill(&to, 2 - offset, count, dtype, ORDINARY, &state);
                    const array *target = in_place ? &from : &to;
                    CHECK_EQ(cuda_scale(stream, on_device(target), on_device(&from), count, dtype, 0.1), cudaSuccess);
                    kernels->scale(on_host(target), on_host(&from), count, dtype, 0.1);
                    same("scale", &from);
                    same("scale", &to);
                }
    drop_array(&from), drop_array(&to);
}

static void flags_are_folded(void)
{
    for (uint32_t flags = 0; flags < 4; flags++) {
        uint64_t words[OPTIM_SUM_WORDS + 2], got[OPTIM_SUM_WORDS + 2];
        memset(words, 0x33, sizeof words);
        device_stats *stats = upload(words, sizeof words);
        uint32_t *device_flags = upload(&flags, sizeof flags), after;
        CHECK_EQ(cuda_fold_flags(stream, stats, device_flags), cudaSuccess);
        CHECK_OK(DEVICE_CALL(cpu, fold_flags, NULL, (device_stats *)words, &flags));
        download(got, stats, sizeof got);
        download(&after, device_flags, sizeof after);
        CHECK(!memcmp(got, words, sizeof words));
        CHECK_EQ(after, flags);
    }
}

/* ---- pack ----------------------------------------------------------------------------- */

static void check_pack(array *from, array *to, zc_dtype dtype, int64_t first, int dims, const int64_t *shape,
                       const int64_t *strides, uint64_t *state)
{
    size_t bytes = zc_dtype_bytes(dtype), count = 1;
    for (int d = 0; d < dims; d++)
        count *= (size_t)shape[d];
    fill(from, 0, 5000, ZC_FLOAT32, SPECIAL, state);
    fill(to, 1, count, ZC_FLOAT32, ORDINARY, state); /* room for elements of 4 bytes, more is not needed */
    to->dtype = ZC_UINT8;                            /* every byte counts, NaN or not */
    const char *host = (char *)on_host(from) + first * (int64_t)bytes;
    const char *device = (char *)on_device(from) + first * (int64_t)bytes;
    if (bytes == 8) {
        to->begin = GUARD_BYTES;
        to->used = 2 * GUARD_BYTES + 8 * count;
        memset(to->host, 0x5a, to->used);
        emu_poke(to->device, to->host, to->used);
    }
    CHECK_EQ(cuda_pack(stream, on_device(to), device, bytes, dims, shape, strides), cudaSuccess);
    CHECK_OK(DEVICE_CALL(cpu, pack, NULL, on_host(to), host, bytes, dims, shape, strides));
    same("pack", to);
}

static void packing(void)
{
    static const struct {
        int64_t first;
        int dims;
        int64_t shape[6], strides[6];
    } cases[] = {
        {0, 1, {1}, {1}},
        {0, 1, {1000}, {2}},
        {1999, 1, {1000}, {-2}},
        {0, 2, {30, 40}, {1, 30}},
        {3, 2, {7, 65}, {100, 1}},
        {1000, 2, {9, 9}, {-50, 3}},
        {0, 3, {5, 6, 7}, {1, 35, 5}},
        {0, 3, {5, 6, 7}, {0, 7, 1}},
        {0, 6, {2, 3, 2, 3, 2, 3}, {1, 2, 6, 12, 36, 72}},
        {0, 2, {3, 0}, {1, 1}},
    };
    array from = make_array(), to = make_array();
    uint64_t state = 5;
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++)
        for (zc_dtype dtype = ZC_FLOAT32; dtype < ZC_DTYPE_COUNT; dtype++)
            check_pack(&from, &to, dtype, cases[c].first, cases[c].dims, cases[c].shape, cases[c].strides, &state);
    int64_t shape[CUDA_MAX_DIMS + 1], strides[CUDA_MAX_DIMS + 1];
    for (int d = 0; d <= CUDA_MAX_DIMS; d++) {
        shape[d] = d % 3 == 0 ? 2 : 1;
        strides[d] = 1 << d / 3;
    }
    check_pack(&from, &to, ZC_FLOAT32, 0, CUDA_MAX_DIMS, shape, strides, &state);
    CHECK_EQ(cuda_pack(stream, to.device, from.device, 4, CUDA_MAX_DIMS + 1, shape, strides), cudaErrorInvalidValue);
    CHECK_EQ(cuda_pack(stream, to.device, from.device, 3, 1, shape, strides), cudaErrorInvalidValue);
    drop_array(&from), drop_array(&to);
}

/* ---- the step --------------------------------------------------------------------------- */

enum { GROUPS = 3, SEGMENTS = 300 };

static int same_double(double a, double b)
{
    return !memcmp(&a, &b, sizeof a) || (isnan(a) && isnan(b));
}

static int same_scalars(const optim_segment_scalars *a, const optim_segment_scalars *b)
{
    if (!memcmp(a, b, sizeof *a))
        return 1;
    const double *da = &a->d.grad_factor, *db = &b->d.grad_factor;
    const float *fa = &a->f.grad_factor, *fb = &b->f.grad_factor;
    int equal = a->active == b->active && a->flags == b->flags;
    for (size_t i = 0; i < sizeof a->d / sizeof *da; i++)
        equal &= same_double(da[i], db[i]) && same_double((double)fa[i], (double)fb[i]);
    return equal;
}

static optim_options random_options(optim_rule rule, uint64_t *state)
{
    uint64_t bits = testing_random(state);
    optim_options o = {.lr = 0.01 + 0.001 * (double)(bits % 7), .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-6};
    o.weight_decay = bits & 16 ? 0.1 : 0;
    o.maximize = (bits & 32) != 0;
    if (rule == OPTIM_SGD) {
        o.momentum = bits & 64 ? 0.9 : 0;
        o.nesterov = o.momentum > 0 && (bits & 128);
        o.dampening = o.nesterov ? 0 : 0.25;
    } else {
        o.amsgrad = (bits & 256) != 0;
    }
    return o;
}

/* The facts of a step: sums, ranks with non-finite values, used segments. */
typedef struct facts {
    uint64_t sum_squares[OPTIM_SUM_WORDS], inf_ranks, nan_ranks, used[(SEGMENTS + 3) / 4];
} facts;

static facts random_facts(uint64_t *state)
{
    facts f = {{0}, 0, 0, {0}};
    uint64_t bits = testing_random(state);
    int exponent = (int)(bits >> 8 & 511) - 256;
    for (int i = 0; i < (int)(bits % 9) * 20; i++)
        optim_sum_add(f.sum_squares, ldexp((double)(testing_random(state) >> 11), exponent - i));
    f.inf_ranks = bits >> 20 & 3 ? 0 : 2;
    f.nan_ranks = bits >> 22 & 3 ? 0 : 3;
    for (size_t i = 0; i < SEGMENTS; i++)
        f.used[i / 4] |= (testing_random(state) % 3) << 16 * (i % 4);
    return f;
}

static void check_step(optim_rule rule, uint64_t *state)
{
    static device_segment segments[SEGMENTS], got_segments[SEGMENTS];
    static optim_segment_scalars scalars[SEGMENTS], got_scalars[SEGMENTS];
    facts stats = random_facts(state);
    optim_options options[GROUPS];
    for (int g = 0; g < GROUPS; g++)
        options[g] = random_options(rule, state);
    for (size_t i = 0; i < SEGMENTS; i++)
        segments[i] = (device_segment){(uint32_t)(testing_random(state) % GROUPS), testing_random(state) & 1,
                                       testing_random(state) % 1000};
    memset(scalars, 0xff, sizeof scalars);
    device_step result = {0}, got_result;
    uint64_t bits = testing_random(state);
    device_step_args args = {.rule = rule, .options = options, .groups = GROUPS, .base_factor = 0.25,
                             .norm_factor = 0.5, .max_norm = bits & 1 ? 1e-3 : 0, .clip_factor = bits & 2 ? 0.75 : 1,
                             .want_norm = (bits & 4) != 0, .skip_nonfinite = (bits & 8) != 0,
                             .segments = bits & 16 ? SEGMENTS : 5, .stats = (device_stats *)&stats,
                             .segment = segments, .scalars = scalars, .result = &result};
    device_step_args on_gpu = args;
    on_gpu.options = NULL;
    on_gpu.stats = upload(&stats, sizeof stats);
    on_gpu.segment = upload(segments, sizeof segments);
    on_gpu.scalars = upload(scalars, sizeof scalars);
    on_gpu.result = upload(&result, sizeof result);
    optim_options *device_options = upload(options, sizeof options);
    CHECK_EQ(cuda_step_scalars(stream, &on_gpu, device_options), cudaSuccess);
    CHECK_OK(DEVICE_CALL(cpu, step_scalars, NULL, &args));
    download(got_segments, on_gpu.segment, sizeof segments);
    download(got_scalars, on_gpu.scalars, sizeof scalars);
    download(&got_result, on_gpu.result, sizeof result);
    give_back(on_gpu.stats);
    give_back(device_options);
    CHECK(same_double(got_result.norm, result.norm) && same_double(got_result.grad_factor, result.grad_factor));
    CHECK_EQ(got_result.skipped, result.skipped);
    CHECK_EQ(got_result.nonfinite, result.nonfinite);
    CHECK(!memcmp(got_segments, segments, sizeof segments));
    size_t wrong = 0;
    for (size_t i = 0; i < SEGMENTS; i++)
        wrong += !same_scalars(&got_scalars[i], &scalars[i]);
    CHECK_EQ(wrong, 0);
}

static void steps(void)
{
    uint64_t state = 6;
    for (optim_rule rule = OPTIM_ADAMW; rule <= OPTIM_SGD; rule++)
        for (int i = 0; i < 60; i++)
            check_step(rule, &state);
}

/* ---- update -------------------------------------------------------------------------------- */

enum { PARAM, MASTER, GRAD, M, V, VMAX, ARRAYS };

/* Spans of random lengths that begin at multiples of 64, some with a gap behind; returns how many. */
static size_t random_spans(device_span *spans, size_t most, size_t extent, uint64_t *state)
{
    size_t count = 0, at = testing_random(state) % 3 ? 0 : 64;
    while (at < extent && count < most) {
        size_t longest = extent - at, length = testing_random(state) % 3 ? testing_random(state) % 200 + 1 : longest;
        length = length < longest ? length : longest;
        spans[count++] = (device_span){at, at + length, testing_random(state) % SEGMENTS};
        at = (at + length + 63) / 64 * 64 + 64 * (testing_random(state) % 2);
    }
    return count;
}

/*
 * Array `misaligned` begins at an odd element; ARRAYS: none does.  Elements are shared out to `shards` shards, which lie
 * in one order in the arrays of the state and in the other one in parameters and gradients.
 */
static void check_update(optim_rule rule, zc_dtype dtype, size_t extent, size_t shards, int misaligned, kind k,
                         array *arrays, uint64_t *state)
{
    static optim_segment_scalars scalars[SEGMENTS];
    static device_span spans[2000];
    zc_dtype sum = zc_dtype_sum(dtype);
    zc_dtype master = dtype == ZC_BFLOAT16 ? ZC_BFLOAT16 : ZC_FLOAT32;
    const zc_dtype dtypes[ARRAYS] = {dtype, master, sum, sum, sum, sum};
    for (int a = 0; a < ARRAYS; a++)
        fill(&arrays[a], a == misaligned, extent, dtypes[a], k, state);
    if (dtype == ZC_BFLOAT16)
        arrays[MASTER].dtype = ZC_UINT8; /* remainders are integers */
    for (size_t i = 0; i < SEGMENTS; i++) {
        optim_options options = random_options(rule, state);
        memset(&scalars[i], 0, sizeof scalars[i]);
        if (testing_random(state) % 4 == 0)
            continue; /* inactive */
        optim_scalars(rule, &options, 1 + testing_random(state) % 50, 0.5, &scalars[i]);
        if ((scalars[i].flags & OPTIM_MOMENTUM) && testing_random(state) % 2)
            scalars[i].flags |= OPTIM_FIRST;
    }
    int adam = rule != OPTIM_SGD;
    device_update_args args = {.rule = rule, .param_dtype = dtype, .scalars = scalars, .segments = SEGMENTS,
                               .master = dtype >= ZC_BFLOAT16 ? on_host(&arrays[MASTER]) : NULL,
                               .m = on_host(&arrays[M]), .v = adam ? on_host(&arrays[V]) : NULL,
                               .vmax = adam ? on_host(&arrays[VMAX]) : NULL, .shard_count = shards};
    device_update_args on_gpu = args;
    size_t used = 0, step = extent / 64 / shards * 64;
    device_span *device_spans = upload(spans, sizeof spans);
    for (size_t s = 0; s < shards; s++) {
        size_t begin = s * step, end = s + 1 < shards ? begin + step : extent, mirrored = extent - end;
        /* every eighth has no spans, and there is not room for all */
        size_t most = s % 8 == 7 ? 0 : sizeof spans / sizeof *spans - used;
        size_t count = random_spans(spans + used, most, end - begin, state);
        args.shards[s] = (device_shard){spans + used, count, end - begin, begin,
                                        (char *)on_host(&arrays[PARAM]) + mirrored * zc_dtype_bytes(dtype),
                                        (char *)on_host(&arrays[GRAD]) + mirrored * zc_dtype_bytes(sum)};
        on_gpu.shards[s] = args.shards[s];
        on_gpu.shards[s].spans = device_spans + used;
        on_gpu.shards[s].param = (char *)on_device(&arrays[PARAM]) + mirrored * zc_dtype_bytes(dtype);
        on_gpu.shards[s].grad = (char *)on_device(&arrays[GRAD]) + mirrored * zc_dtype_bytes(sum);
        used += count;
    }
    emu_poke(device_spans, spans, sizeof spans);
    on_gpu.scalars = upload(scalars, sizeof scalars);
    on_gpu.master = args.master ? on_device(&arrays[MASTER]) : NULL;
    on_gpu.m = on_device(&arrays[M]);
    on_gpu.v = adam ? on_device(&arrays[V]) : NULL;
    on_gpu.vmax = adam ? on_device(&arrays[VMAX]) : NULL;
    CHECK_EQ(cuda_update(stream, &on_gpu), cudaSuccess);
    CHECK_OK(DEVICE_CALL(cpu, update, NULL, &args));
    for (int a = 0; a < ARRAYS; a++)
        same(optim_name(rule), &arrays[a]);
    give_back(device_spans);
    give_back(on_gpu.scalars);
}

static void updates(void)
{
    static const size_t shards[] = {2, DEVICE_MAX_SHARDS - 1, DEVICE_MAX_SHARDS};
    array arrays[ARRAYS];
    uint64_t state = 7;
    for (int a = 0; a < ARRAYS; a++)
        arrays[a] = make_array();
    for (optim_rule rule = OPTIM_ADAMW; rule <= OPTIM_SGD; rule++)
        for (zc_dtype dtype = ZC_FLOAT32; dtype <= ZC_FLOAT16; dtype++) {
            for (size_t s = 0; s < SIZES; s++)
                for (int variant = 0; variant < 2 * (ARRAYS + 1); variant++)
                    check_update(rule, dtype, sizes[s], 1, variant / 2, variant % 2 ? ORDINARY : SPECIAL, arrays, &state);
            check_update(rule, dtype, MOST, 1, ARRAYS, SPECIAL, arrays, &state);
            for (size_t s = 0; s < sizeof shards / sizeof *shards; s++)
                for (size_t rest = 0; rest < 2; rest++) /* with a rest all parameters but the last shard's are askew */
                    check_update(rule, dtype, shards[s] * 128 + rest, shards[s], ARRAYS, SPECIAL, arrays, &state);
            check_update(rule, dtype, 100, 3, ARRAYS, ORDINARY, arrays, &state); /* two that are empty */
        }
    for (int a = 0; a < ARRAYS; a++)
        drop_array(&arrays[a]);
}

/* ---- declared accesses ------------------------------------------------------------------------ */

enum { SLOT_BYTES = 4096, SLOTS = 11, MOST_TOUCHED = 16 };

/* An array that a call touches: where it is in the arena, and how much of it. */
typedef struct touched {
    size_t begin, bytes;
} touched;

/* One call of every kernel on slots of `arena`; returns how many arrays it touches. */
static int call_kernel(int which, unsigned char *arena, touched *arrays)
{
#define SLOT(k) ((void *)(arena + (k) * (size_t)SLOT_BYTES))
#define TOUCHED(k, size) arrays[count++] = (touched){(k) * (size_t)SLOT_BYTES, (size)}
    int count = 0;
    cudaError_t error = cudaErrorInvalidValue;
    if (which == 0) { /* three ranks, the middle one apart */
        cuda_operands operands = {SLOT(0), SLOT_BYTES, 3, 1, SLOT(4)};
        error = cuda_reduce(stream, SLOT(5), &operands, 100, ZC_BFLOAT16, 1, SLOT(6));
        TOUCHED(0, 200), TOUCHED(2, 200), TOUCHED(4, 200), TOUCHED(5, 400), TOUCHED(6, 4);
    } else if (which == 1) { /* rank 0 apart, no flags */
        cuda_operands operands = {SLOT(0), SLOT_BYTES, 3, 0, SLOT(4)};
        error = cuda_reduce(stream, SLOT(5), &operands, 100, ZC_FLOAT32, 0, NULL);
        TOUCHED(1, 400), TOUCHED(2, 400), TOUCHED(4, 400), TOUCHED(5, 400);
    } else if (which == 2) { /* the last rank zero */
        cuda_operands operands = {SLOT(0), SLOT_BYTES, 2, 1, NULL};
        error = cuda_reduce(stream, SLOT(5), &operands, 100, ZC_FLOAT32, 0, NULL);
        TOUCHED(0, 400), TOUCHED(5, 400);
    } else if (which == 3) {
        int64_t shape[2] = {3, 5}, strides[2] = {-10, 2};
        error = cuda_pack(stream, SLOT(1), (char *)SLOT(0) + 20 * 4, 4, 2, shape, strides);
        TOUCHED(0, (20 + 8 + 1) * 4), TOUCHED(1, 60);
    } else if (which == 4) {
        error = cuda_sum_squares(stream, SLOT(0), SLOT(1), SLOT(2), 70, ZC_FLOAT64);
        TOUCHED(0, sizeof(uint64_t[66])), TOUCHED(1, 4), TOUCHED(2, 560);
    } else if (which == 5) {
        error = cuda_fold_flags(stream, (device_stats *)((char *)SLOT(0) - offsetof(device_stats, inf_ranks)), SLOT(1));
        TOUCHED(0, 16), TOUCHED(1, 4);
    } else if (which == 6) {
        error = cuda_scale(stream, SLOT(0), SLOT(1), 33, ZC_FLOAT32, 2);
        TOUCHED(0, 132), TOUCHED(1, 132);
    } else if (which == 7) {
        device_step_args args = {.groups = 2, .segments = 5, .stats = SLOT(1), .segment = SLOT(2), .scalars = SLOT(3),
                                 .result = SLOT(4)};
        error = cuda_step_scalars(stream, &args, SLOT(5));
        TOUCHED(1, sizeof(device_stats) + 16), TOUCHED(2, 5 * sizeof(device_segment));
        TOUCHED(3, 5 * sizeof(optim_segment_scalars)), TOUCHED(4, sizeof(device_step));
        TOUCHED(5, sizeof(optim_options) + offsetof(optim_options, maximize) + sizeof(int));
    } else {
        device_update_args args = {.rule = OPTIM_ADAM, .param_dtype = ZC_BFLOAT16, .scalars = SLOT(1), .segments = 2,
                                   .master = SLOT(3), .m = SLOT(5), .v = SLOT(6), .vmax = SLOT(7), .shard_count = 2,
                                   .shards = {{SLOT(0), 3, 99, 0, SLOT(2), SLOT(4)},
                                              {SLOT(8), 1, 50, 128, SLOT(9), SLOT(10)}}};
        error = cuda_update(stream, &args);
        TOUCHED(0, 3 * sizeof(device_span)), TOUCHED(1, 2 * sizeof(optim_segment_scalars));
        TOUCHED(2, 198), TOUCHED(3, 198);
        for (size_t k = 4; k < 8; k++)
            TOUCHED(k, 396);
        TOUCHED(8, sizeof(device_span)), TOUCHED(9, 100), TOUCHED(10, 200);
        arrays[count++] = (touched){3 * (size_t)SLOT_BYTES + 256, 100};
        for (size_t k = 5; k < 8; k++)
            arrays[count++] = (touched){k * (size_t)SLOT_BYTES + 512, 200};
    }
    CHECK_EQ(error, cudaSuccess);
    return count;
#undef SLOT
#undef TOUCHED
}

/* Whether a write of one byte that is not ordered with the call is reported, by a fresh machine. */
static int write_is_reported(int which, size_t at)
{
    touched arrays[MOST_TOUCHED];
    unsigned char *arena;
    cudaStream_t other;
    emu_reset(1, 0, 1);
    CHECK_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    CHECK_EQ(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), cudaSuccess);
    CHECK_EQ(cudaMalloc((void **)&arena, (SLOTS + 1) * SLOT_BYTES), cudaSuccess);
    call_kernel(which, arena + SLOT_BYTES, arrays);
    CHECK_EQ(cudaMemsetAsync(arena + SLOT_BYTES + at, 0, 1, other), cudaSuccess);
    return emu_findings(NULL, 0) > 0;
}

static void accesses_are_declared(void)
{
    for (int which = 0; which < 9; which++) {
        touched arrays[MOST_TOUCHED];
        unsigned char *arena;
        emu_reset(1, 0, 1);
        CHECK_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
        CHECK_EQ(cudaMalloc((void **)&arena, (SLOTS + 1) * SLOT_BYTES), cudaSuccess);
        int count = call_kernel(which, arena + SLOT_BYTES, arrays);
        for (int a = 0; a < count; a++) {
            size_t begin = arrays[a].begin, end = begin + arrays[a].bytes;
            int first = write_is_reported(which, begin), last = write_is_reported(which, end - 1);
            int before = write_is_reported(which, begin - 1), after = write_is_reported(which, end);
            /* Between the slices of other ranks all is declared. */
            int between_before = (which == 0 && a == 1) || (which == 1 && a == 1);
            int between_after = (which == 0 && a == 0) || (which == 1 && a == 0);
            if (!first || !last || before != between_before || after != between_after)
                fprintf(stderr, "call %d, array %d: reported at %d %d %d %d\n", which, a, before, first, last, after);
            CHECK(first && last && before == between_before && after == between_after);
        }
    }
}

/* ---- errors ---------------------------------------------------------------------------------- */

/* What CUDA says is passed on, by every function. */
static void errors_are_returned(void)
{
    static const char *const calls[] = {"cudaGetDevice", "cudaDeviceGetAttribute", "cudaLaunchKernel"};
    array a = make_array();
    uint64_t state = 8;
    fill(&a, 0, 1000, ZC_FLOAT32, ORDINARY, &state);
    cuda_operands operands = {a.device, 0, 1, 1, NULL};
    int64_t shape = 10, stride = 2;
    device_update_args update = {.rule = OPTIM_SGD, .scalars = (optim_segment_scalars *)a.device, .shard_count = 1,
                                 .shards = {{(device_span *)a.device, 1, 100, 0, a.device, a.device}}};
    for (int c = 0; c < 3; c++)
        for (int f = 0; f < 5; f++) {
            emu_fail_next(calls[c], 1, cudaErrorLaunchOutOfResources);
            cudaError_t error =
                f == 0   ? cuda_reduce(stream, a.device, &operands, 10, ZC_FLOAT32, 0, NULL)
                : f == 1 ? cuda_pack(stream, a.device + 800, a.device, 4, 1, &shape, &stride)
                : f == 2 ? cuda_sum_squares(stream, (device_stats *)a.device, (uint32_t *)(a.device + 1024), a.device,
                                            10, ZC_FLOAT32)
                : f == 3 ? cuda_scale(stream, a.device, a.device, 10, ZC_FLOAT32, 2)
                         : cuda_update(stream, &update);
            CHECK_EQ(error, cudaErrorLaunchOutOfResources);
            CHECK_EQ(emu_faults_left(), 0);
            cudaGetLastError();
        }
    CHECK_EQ(cuda_scale(stream, a.device, a.device, 10, ZC_BFLOAT16, 2), cudaErrorInvalidValue);
    CHECK_EQ(cuda_reduce(stream, a.device, &operands, 10, ZC_INT32, 0, NULL), cudaErrorInvalidValue);
    update.shard_count = DEVICE_MAX_SHARDS + 1;
    CHECK_EQ(cuda_update(stream, &update), cudaErrorInvalidValue);
    drop_array(&a);
}

int main(void)
{
    char text[4096];
    CHECK_OK(cpu_device_create(1, &cpu));
    kernels = cpu_kernels_get();
    for (int eager = -1; eager <= 0; eager++) {
        emu_reset(7, eager, 1);
        CHECK_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
        RUN(reductions);
        RUN(squares);
        RUN(squares_find_each_nonfinite);
        RUN(squares_reach_every_word);
        RUN(scaling);
        RUN(flags_are_folded);
        RUN(packing);
        RUN(steps);
        RUN(updates);
        RUN(errors_are_returned);
        CHECK_EQ(cudaStreamDestroy(stream), cudaSuccess);
        if (emu_findings(text, sizeof text) || emu_leaks(text, sizeof text)) {
            testing_failures++;
            fprintf(stderr, "%s\n", text);
        }
    }
    RUN(accesses_are_declared);
    if (emu_unreached(text, sizeof text)) { /* what is declared is not more than what kernels do */
        testing_failures++;
        fprintf(stderr, "%s\n", text);
    }
    emu_reset(0, 0, 0);
    cpu->ops->destroy(cpu);
    DONE();
}
