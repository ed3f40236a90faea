/*
 * Options, scalars, the exact sum, the narrow types, the CPU device's step and
 * its thread pool: what is computed once, not per element.
 */
#include "cpu_kernels.h"
#include "cpu_threads.h"
#include "device.h"
#include "testing.h"

#include <math.h>
#include <pthread.h>
#include <sys/wait.h>
#include <unistd.h>

/* ---- options and scalars ---------------------------------------------------- */

static const optim_options adam_defaults = {.lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8};

static void refused(optim_rule rule, optim_options options, const char *name)
{
    CHECK_EQ(optim_check(rule, &options), ZC_EINVAL);
    if (strncmp(zc_last_error(), name, strlen(name)) != 0)
        fprintf(stderr, "\"%s\" does not begin with %s\n", zc_last_error(), name), testing_failures++;
}

static void options_are_checked(void)
{
    optim_options o = adam_defaults;
    CHECK_OK(optim_check(OPTIM_ADAM, &o));
    CHECK_OK(optim_check(OPTIM_ADAMW, &o));
    o.lr = 0, o.beta1 = 0, o.beta2 = 0, o.eps = 0;
    CHECK_OK(optim_check(OPTIM_ADAMW, &o));
    static const double bad[] = {-1e-300, -1, -INFINITY, NAN};
    for (int i = 0; i < 4; i++) {
        o = adam_defaults, o.lr = bad[i], refused(OPTIM_ADAM, o, "lr");
        o = adam_defaults, o.eps = bad[i], refused(OPTIM_ADAM, o, "eps");
        o = adam_defaults, o.beta1 = bad[i], refused(OPTIM_ADAM, o, "betas[0]");
        o = adam_defaults, o.beta2 = bad[i], refused(OPTIM_ADAMW, o, "betas[1]");
        o = adam_defaults, o.weight_decay = bad[i], refused(OPTIM_ADAMW, o, "weight_decay");
        o = (optim_options){.lr = 1, .momentum = bad[i]}, refused(OPTIM_SGD, o, "momentum");
    }
    o = adam_defaults, o.beta1 = 1, refused(OPTIM_ADAM, o, "betas[0]");
    o = adam_defaults, o.beta2 = 1, refused(OPTIM_ADAM, o, "betas[1]");
    o = (optim_options){.lr = 1, .nesterov = 1}, refused(OPTIM_SGD, o, "nesterov");
    o = (optim_options){.lr = 1, .nesterov = 1, .momentum = .9, .dampening = .1}, refused(OPTIM_SGD, o, "nesterov");
    o = (optim_options){.lr = 1, .nesterov = 1, .momentum = .9};
    CHECK_OK(optim_check(OPTIM_SGD, &o));
    o = (optim_options){.lr = 1, .momentum = .9, .dampening = -3};
    CHECK_OK(optim_check(OPTIM_SGD, &o));
    refused((optim_rule)7, o, "optimizer rule 7");
    CHECK(!strcmp(optim_name(OPTIM_ADAMW), "adamw") && !strcmp(optim_name(OPTIM_ADAM), "adam") &&
          !strcmp(optim_name(OPTIM_SGD), "sgd"));
}

static void powers(void)
{
    CHECK(optim_powi(0.9, 0) == 1);
    CHECK(optim_powi(0.9, 1) == 0.9);
    CHECK(optim_powi(0.9, 2) == 0.9 * 0.9);
    CHECK(optim_powi(0.9, 3) == 0.9 * (0.9 * 0.9));
    CHECK(optim_powi(2, 1000) == ldexp(1, 1000));
    CHECK(optim_powi(0, 0) == 1 && optim_powi(0, 5) == 0);
    CHECK(optim_powi(0.999, 1ull << 62) == 0);
    for (uint64_t n = 1; n < 3000; n += 7)
        CHECK(fabs(optim_powi(0.999, n) / pow(0.999, (double)n) - 1) < 1e-13);
}

static void scalars_follow_the_formulas(void)
{
    optim_options o = adam_defaults;
    o.weight_decay = 0.1;
    optim_segment_scalars s, again;
    memset(&s, 0xff, sizeof s);
    memset(&again, 0x55, sizeof again);
    optim_scalars(OPTIM_ADAMW, &o, 3, 0.25, &s);
    optim_scalars(OPTIM_ADAMW, &o, 3, 0.25, &again);
    CHECK(!memcmp(&s, &again, sizeof s)); /* every byte, padding included */
    CHECK_EQ(s.active, 1);
    CHECK_EQ(s.flags, OPTIM_HAS_DECAY);
    CHECK(s.d.step_size == 1e-3 / (1 - 0.9 * (0.9 * 0.9)));
    CHECK(s.d.inv_bias2 == 1 / sqrt(1 - 0.999 * (0.999 * 0.999)));
    CHECK(s.d.decay == 1 - 1e-3 * 0.1);
    CHECK(s.f.decay == (float)(1 - 1e-3 * 0.1) && s.f.grad_factor == 0.25f && s.f.beta2c == (float)(1 - 0.999));
    o.maximize = 1, o.amsgrad = 1, o.weight_decay = 0;
    optim_scalars(OPTIM_ADAM, &o, 1, 0.25, &s);
    CHECK_EQ(s.flags, OPTIM_AMSGRAD);
    CHECK(s.d.grad_factor == -0.25 && s.d.decay == 0);
    o = (optim_options){.lr = 0.5, .momentum = 0.9, .dampening = 0.25, .weight_decay = 0.1};
    optim_scalars(OPTIM_SGD, &o, 1, 1, &s);
    CHECK_EQ(s.flags, OPTIM_MOMENTUM | OPTIM_HAS_DECAY);
    CHECK(s.d.step_size == 0.5 && s.d.beta1 == 0.9 && s.d.beta1c == 0.75 && s.d.decay == 0.1);
}

/* ---- the exact sum -------------------------------------------------------------- */

static double random_positive(uint64_t *state, int lowest, int highest)
{
    double mantissa = 1 + (double)(testing_random(state) >> 12) * 0x1p-52;
    return ldexp(mantissa, lowest + (int)(testing_random(state) % (uint64_t)(highest - lowest + 1)));
}

static void sums_do_not_depend_on_order(void)
{
    enum { COUNT = 20000 };
    static double values[COUNT];
    uint64_t state = 1;
    for (int i = 0; i < COUNT; i++)
        values[i] = i % 50 ? random_positive(&state, -60, 60) : random_positive(&state, -1074, 1000);
    uint64_t forward[OPTIM_SUM_WORDS] = {0}, backward[OPTIM_SUM_WORDS] = {0}, halves[2][OPTIM_SUM_WORDS] = {{0}};
    for (int i = 0; i < COUNT; i++) {
        optim_sum_add(forward, values[i]);
        optim_sum_add(backward, values[COUNT - 1 - i]);
        optim_sum_add(halves[i & 1], values[i]);
    }
    for (unsigned w = 0; w < OPTIM_SUM_WORDS; w++)
        halves[0][w] += halves[1][w];
    CHECK(optim_sum_value(forward) == optim_sum_value(backward));
    CHECK(optim_sum_value(forward) == optim_sum_value(halves[0]));
}

static void sums_are_rounded_once(void)
{
    /* Small enough for a 128-bit integer, whose conversion to double is rounded to nearest even. */
    uint64_t state = 2;
    for (int trial = 0; trial < 2000; trial++) {
        uint64_t words[OPTIM_SUM_WORDS] = {0};
        unsigned __int128 exact = 0;
        int terms = 1 + (int)(testing_random(&state) % 40);
        for (int i = 0; i < terms; i++) {
            unsigned shift = (unsigned)(testing_random(&state) % 60);
            uint64_t mantissa = testing_random(&state) >> (11 + testing_random(&state) % 53);
            optim_sum_add(words, (double)mantissa * ldexp(1, (int)shift));
            exact += (unsigned __int128)mantissa << shift;
        }
        CHECK(optim_sum_value(words) == (double)exact);
    }
    /* ties, one bit above and below them */
    struct { double a, b, c, sum; } ties[] = {
        {0x1p53, 1, 0, 0x1p53},         {0x1p53, 1, 0x1p-1074, 0x1p53 + 2}, {0x1p53 + 2, 1, 0, 0x1p53 + 4},
        {0x1p53 + 2, 0.5, 0.25, 0x1p53 + 2}, {0x1p-1074, 0x1p-1074, 0, 0x1p-1073},
        {0x1p-1022, 0x1p-1074, 0, 0x1.0000000000001p-1022},
        {0x0.fffffffffffffp-1022, 0x1p-1074, 0, 0x1p-1022},
        {0x1.fffffffffffffp1023, 0x1p969, 0, 0x1.fffffffffffffp1023}, /* just below half an ulp */
        {0x1.fffffffffffffp1023, 0x1p970, 0, INFINITY},              /* the tie: to even, which is infinity */
        {0x1.fffffffffffffp1023, 0x1.fffffffffffffp1023, 0x1p1023, INFINITY}, {0, 0, 0, 0}, {0, 3, 0, 3},
    };
    for (size_t i = 0; i < sizeof ties / sizeof *ties; i++) {
        uint64_t words[OPTIM_SUM_WORDS] = {0};
        optim_sum_add(words, ties[i].a);
        optim_sum_add(words, ties[i].b);
        optim_sum_add(words, ties[i].c);
        CHECK(optim_sum_value(words) == ties[i].sum);
    }
}

static void full_words_carry(void)
{
    /* What 2^31 additions leave, without doing them: each word just below 2^63. */
    uint64_t words[OPTIM_SUM_WORDS] = {0};
    words[33] = words[34] = words[35] = (1ull << 63) - 1;
    double expected = ldexp((double)((1ull << 63) - 1), 32 * 35 - 1074); /* the lower two lie below its half ulp */
    double got = optim_sum_value(words);
    CHECK(got >= expected && got <= expected * (1 + 0x1p-30));
}

/* ---- narrow types ---------------------------------------------------------------- */

static void fp16_round_trip(void)
{
    for (uint32_t h = 0; h < 0x10000; h++) {
        float f = zc_fp16_to_float((uint16_t)h);
        int nan = (h & 0x7c00) == 0x7c00 && (h & 0x3ff);
        CHECK_EQ(zc_float_to_fp16(f), nan ? (h | 0x200) : h);
        if (nan || (h & 0x7fff) >= 0x7c00)
            continue;
        double value = ldexp((h & 0x7c00 ? 1024 : 0) + (h & 0x3ff), (h & 0x7c00 ? (int)(h >> 10 & 31) - 1 : 0) - 24);
        CHECK(f == (float)(h & 0x8000 ? -value : value));
        /* halfway to the next one goes to the even neighbour, a hair further or less to the nearer */
        uint16_t next = (uint16_t)(h + 1);
        if ((next & 0x7fff) > 0x7c00 || (h & 0x7fff) == 0x7fff)
            continue;
        double up = (next & 0x7fff) == 0x7c00 ? 65536 : fabs((double)zc_fp16_to_float(next));
        float middle = (float)((value + up) / 2 * (h & 0x8000 ? -1 : 1));
        CHECK_EQ(zc_float_to_fp16(middle), h & 1 ? next : h);
        CHECK_EQ(zc_float_to_fp16(zc_bits_float(zc_float_bits(middle) - 1)), h);
        CHECK_EQ(zc_float_to_fp16(zc_bits_float(zc_float_bits(middle) + 1)), next);
    }
    CHECK_EQ(zc_float_to_fp16(0x1p-25f), 0);
    CHECK_EQ(zc_float_to_fp16(1e-45f), 0);
    CHECK_EQ(zc_float_to_fp16(-1e30f), 0xfc00);
}

static void masters_are_exact(void)
{
    uint64_t state = 3;
    for (int i = 0; i < 2000000; i++) {
        uint32_t bits = (uint32_t)testing_random(&state);
        uint16_t half;
        int16_t remainder;
        zc_master_split(zc_bits_float(bits), &half, &remainder);
        float back = zc_master_join(half, remainder);
        CHECK_EQ(zc_float_bits(back), (bits & 0x7fffffff) > 0x7f800000 ? 0x7fc00000 : bits);
    }
}

/* ---- the device's step ------------------------------------------------------------- */

typedef struct step_case {
    device_stats stats;
    uint64_t used[2]; /* the flexible part of stats */
} step_case;

static void step_decides(void)
{
    zc_device *device = NULL;
    CHECK_OK(cpu_device_create(0, &device));
    step_case c;
    memset(&c, 0, sizeof c);
    optim_sum_add(c.stats.sum_squares, 36);
    optim_sum_add(c.stats.sum_squares, 64);
    c.stats.used[0] = 2 | (0ull << 16) | (1ull << 32) | (2ull << 48);
    c.stats.used[1] = 1;
    optim_options groups[2] = {{.lr = 0.5, .momentum = 0.9}, {.lr = 0.5, .maximize = 1}};
    device_segment segments[5] = {{.group = 0}, {.group = 0}, {.group = 1}, {.has_momentum = 1, .step = 4},
                                  {.group = 0}};
    optim_segment_scalars scalars[5];
    device_step result;
    device_step_args args = {.rule = OPTIM_SGD, .options = groups, .groups = 2, .base_factor = 0.5,
                             .norm_factor = 0.5, .max_norm = 1, .clip_factor = 1, .segments = 5,
                             .stats = &c.stats, .segment = segments, .scalars = scalars, .result = &result};
    CHECK_OK(DEVICE_CALL(device, step_scalars, NULL, &args));
    CHECK(result.norm == 5 && result.skipped == 0 && result.nonfinite == 0);
    CHECK(result.grad_factor == 0.5 * (1 / (5 + 1e-6)));
    CHECK_EQ(segments[0].step, 1);
    CHECK_EQ(segments[1].step, 0);
    CHECK_EQ(segments[2].step, 1);
    CHECK_EQ(segments[3].step, 5);
    CHECK_EQ(segments[4].step, 1);
    CHECK_EQ(scalars[0].flags, OPTIM_MOMENTUM | OPTIM_FIRST);
    CHECK_EQ(scalars[1].active, 0);
    CHECK_EQ(scalars[2].flags, 0);
    CHECK(scalars[2].d.grad_factor == -result.grad_factor);
    CHECK_EQ(scalars[3].flags, OPTIM_MOMENTUM);
    CHECK_EQ(segments[0].has_momentum, 1);
    CHECK_EQ(segments[1].has_momentum, 0);
    CHECK_EQ(segments[2].has_momentum, 0);

    uint32_t flags = CPU_NONFINITE_INF;
    CHECK_OK(DEVICE_CALL(device, fold_flags, NULL, &c.stats, &flags));
    CHECK(c.stats.inf_ranks == 1 && c.stats.nan_ranks == 0);
    c.stats.inf_ranks = 2, c.stats.nan_ranks = 1;
    CHECK_OK(DEVICE_CALL(device, step_scalars, NULL, &args)); /* propagates */
    CHECK(isnan(result.norm) && isnan(result.grad_factor) && result.nonfinite == 2 && !result.skipped);
    c.stats.nan_ranks = 0;
    CHECK_OK(DEVICE_CALL(device, step_scalars, NULL, &args));
    CHECK(isinf(result.norm) && result.grad_factor == 0);
    args.skip_nonfinite = 1, args.max_norm = 0;
    uint64_t before = segments[0].step;
    CHECK_OK(DEVICE_CALL(device, step_scalars, NULL, &args));
    CHECK(isnan(result.norm) && result.skipped == 1 && segments[0].step == before && scalars[0].active == 0);
    device->ops->destroy(device);
}

/* ---- the device's loops, whatever the number of threads --------------------------- */

enum { SHARD = 150016, SEGMENTS = 40 };

typedef struct shard {
    float p[SHARD], g[SHARD], m[SHARD], v[SHARD];
} shard;

static void fill_shard(shard *s)
{
    uint64_t state = 11;
    for (size_t i = 0; i < SHARD; i++) {
        s->p[i] = testing_float(&state), s->g[i] = testing_float(&state);
        s->m[i] = testing_float(&state), s->v[i] = 1 + testing_float(&state);
    }
}

/* Spans with gaps, some inactive, some neighbours with equal scalars. */
static size_t make_spans(device_span *spans, optim_segment_scalars *scalars)
{
    uint64_t state = 12;
    size_t at = 17;
    for (size_t i = 0; i < SEGMENTS; i++) {
        size_t length = i == 20 ? 100000 : 1 + testing_random(&state) % 2000;
        spans[i] = (device_span){at, at + length, i};
        at += length + (i % 3 ? 0 : testing_random(&state) % 50);
        optim_options o = {.lr = i % 4 ? 1e-3 : 1e-2, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8, .weight_decay = 0.1};
        optim_scalars(OPTIM_ADAMW, &o, 3, 0.5, &scalars[i]);
        scalars[i].active = i % 7 != 5;
    }
    CHECK(at <= SHARD);
    return SEGMENTS;
}

static void threads_change_no_bit(void)
{
    shard *want = malloc(sizeof *want), *got = malloc(sizeof *got);
    static device_span spans[SEGMENTS];
    static optim_segment_scalars scalars[SEGMENTS];
    size_t span_count = make_spans(spans, scalars);
    fill_shard(want);
    uint64_t words[OPTIM_SUM_WORDS] = {0};
    const cpu_kernels *kernels = cpu_kernels_get();
    kernels->sum_squares(words, want->g, SHARD, ZC_FLOAT32);
    for (size_t i = 0; i < span_count; i++) {
        size_t at = spans[i].begin;
        if (scalars[i].active)
            kernels->update(OPTIM_ADAMW, &scalars[i], spans[i].end - at, ZC_FLOAT32, want->p + at, NULL, want->g + at,
                            want->m + at, want->v + at, NULL);
    }
    for (int threads = 1; threads <= 4; threads++) {
        zc_device *device = NULL;
        CHECK_OK(cpu_device_create(threads, &device));
        fill_shard(got);
        step_case c;
        uint32_t flags = 0;
        memset(&c, 0, sizeof c);
        CHECK_OK(DEVICE_CALL(device, sum_squares, NULL, &c.stats, &flags, got->g, SHARD, ZC_FLOAT32));
        CHECK(!memcmp(c.stats.sum_squares, words, sizeof words) && flags == 0);
        device_update_args args = {.rule = OPTIM_ADAMW, .param_dtype = ZC_FLOAT32, .scalars = scalars,
                                   .m = got->m, .v = got->v, .shard_count = 1,
                                   .shards = {{spans, span_count, SHARD, 0, got->p, got->g}}};
        CHECK_OK(DEVICE_CALL(device, update, NULL, &args));
        CHECK(!memcmp(got, want, sizeof *got));
        args.shards[0].span_count = 0;
        CHECK_OK(DEVICE_CALL(device, update, NULL, &args));

        CHECK_OK(DEVICE_CALL(device, accumulate, NULL, got->p, got->g, SHARD, ZC_FLOAT32, 0));
        CHECK(!memcmp(got->p, got->g, sizeof got->p));
        CHECK_OK(DEVICE_CALL(device, accumulate, NULL, got->p, got->g, SHARD, ZC_FLOAT32, 1));
        CHECK_OK(DEVICE_CALL(device, scale, NULL, got->p, got->p, SHARD, ZC_FLOAT32, 0.5));
        CHECK(!memcmp(got->p, got->g, sizeof got->p));
        CHECK_OK(DEVICE_CALL(device, copy, NULL, got->m, got->p, sizeof got->m));
        CHECK(!memcmp(got->m, got->g, sizeof got->m));
        CHECK_OK(DEVICE_CALL(device, fill, NULL, got->m, 0, sizeof got->m));
        CHECK(got->m[0] == 0 && !memcmp(got->m, got->m + 1, sizeof got->m - sizeof *got->m));
        got->g[77] = INFINITY, got->g[SHARD - 1] = NAN;
        CHECK_OK(DEVICE_CALL(device, sum_squares, NULL, &c.stats, &flags, got->g, SHARD, ZC_FLOAT32));
        CHECK_EQ(flags, CPU_NONFINITE_INF | CPU_NONFINITE_NAN);
        device->ops->destroy(device);
    }
    free(want);
    free(got);
}

static void packing(void)
{
    zc_device *device = NULL;
    CHECK_OK(cpu_device_create(1, &device));
    static float from[4 * 5 * 6], to[4 * 5 * 6];
    for (int i = 0; i < 120; i++)
        from[i] = (float)i;
    static const int64_t strides[3] = {30, 6, 1};
    static const int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    static const int64_t extents[3] = {4, 5, 6};
    for (int o = 0; o < 6; o++) {
        int64_t shape[4], step[4];
        for (int d = 0; d < 3; d++)
            shape[d] = extents[orders[o][d]], step[d] = strides[orders[o][d]];
        shape[3] = 1, step[3] = 12345;
        CHECK_OK(DEVICE_CALL(device, pack, NULL, to, from, 4, 4, shape, step));
        int at = 0;
        for (int64_t i = 0; i < shape[0]; i++)
            for (int64_t j = 0; j < shape[1]; j++)
                for (int64_t k = 0; k < shape[2]; k++)
                    CHECK(to[at++] == (float)(i * step[0] + j * step[1] + k * step[2]));
    }
    /* reversed and expanded, other element sizes, nothing, one element */
    CHECK_OK(DEVICE_CALL(device, pack, NULL, to, from + 9, 4, 1, (int64_t[]){10}, (int64_t[]){-1}));
    CHECK(to[0] == 9 && to[9] == 0);
    CHECK_OK(DEVICE_CALL(device, pack, NULL, to, from + 7, 4, 2, (int64_t[]){2, 3}, (int64_t[]){0, 0}));
    CHECK(to[0] == 7 && to[5] == 7);
    CHECK_OK(DEVICE_CALL(device, pack, NULL, to, from, 8, 1, (int64_t[]){3}, (int64_t[]){2}));
    CHECK(to[2] == 4 && to[3] == 5 && to[4] == 8);
    CHECK_OK(DEVICE_CALL(device, pack, NULL, to, from, 4, 2, (int64_t[]){0, 3}, (int64_t[]){3, 1}));
    CHECK_OK(DEVICE_CALL(device, pack, NULL, to, from + 5, 4, 0, NULL, NULL));
    CHECK(to[0] == 5);
    CHECK_EQ(DEVICE_CALL(device, pack, NULL, to, from, 4, 65, NULL, NULL), ZC_EINVAL);
    device->ops->destroy(device);
}

static void memory_is_zero_and_failures_are_told(void)
{
    static const size_t sizes[] = {1, 100, (1 << 20) - 1, 1 << 20, (2 << 20) + 12345};
    zc_device *device = NULL;
    CHECK_OK(cpu_device_create(2, &device));
    for (size_t round = 0; round < 14; round++) {
        size_t bytes = sizes[round % 5];
        unsigned char *memory;
        CHECK_OK(DEVICE_CALL(device, alloc, bytes, (void **)&memory));
        CHECK_EQ((uintptr_t)memory % 64, 0);
        size_t set = 0;
        for (size_t i = 0; i < bytes; i++)
            set += memory[i] != 0;
        CHECK_EQ(set, 0);
        memset(memory, 1, bytes);
        device->ops->free(device, memory, bytes);
    }
    void *none = device;
    CHECK_OK(DEVICE_CALL(device, alloc, 0, &none));
    CHECK(none == NULL);
    device->ops->free(device, NULL, 0);
    CHECK_EQ(DEVICE_CALL(device, alloc, SIZE_MAX, &none), ZC_ENOMEM);
    CHECK_EQ(DEVICE_CALL(device, alloc, SIZE_MAX / 4, &none), ZC_ENOMEM);
    for (size_t k = 0; k < 5; k++) {
        zc_fault_arm(1);
        CHECK_EQ(DEVICE_CALL(device, alloc, sizes[k], &none), ZC_ENOMEM);
        CHECK(none == NULL && strstr(zc_last_error(), "memory"));
    }
    device->ops->destroy(device);
    for (long nth = 1;; nth++) {
        zc_fault_arm(nth);
        zc_status status = cpu_device_create(2, &device);
        if (status == ZC_OK)
            break;
        CHECK_EQ(status, ZC_ENOMEM);
        CHECK(device == NULL && nth < 5);
    }
    zc_fault_arm(0);
    device->ops->destroy(device);
}

/* ---- threads -------------------------------------------------------------------------- */

static void mark(void *context, size_t begin, size_t end)
{
    unsigned char *seen = context;
    CHECK(begin < end && begin % CPU_THREADS_ALIGN_ELEMS == 0);
    for (size_t i = begin; i < end; i++)
        seen[i]++;
}

static void check_cover(cpu_threads *pool, size_t count, size_t grain)
{
    unsigned char *seen = calloc(count + 1, 1);
    cpu_parallel(pool, count, grain, mark, seen);
    size_t once = 0;
    for (size_t i = 0; i < count; i++)
        once += seen[i] == 1;
    CHECK_EQ(once, count);
    CHECK_EQ(seen[count], 0);
    free(seen);
}

static void *use_pool(void *pool)
{
    for (int i = 0; i < 200; i++)
        check_cover(pool, 1000 + (size_t)i, 64);
    return NULL;
}

static void pieces_cover_the_range(void)
{
    static const size_t counts[] = {0, 1, 63, 64, 65, 129, 1000, 4097, 100000};
    static const size_t grains[] = {1, 64, 100, 5000};
    for (int threads = 1; threads <= 5; threads++) {
        cpu_threads *pool = NULL;
        CHECK_OK(cpu_threads_create(threads, &pool));
        for (size_t c = 0; c < 9; c++)
            for (size_t g = 0; g < 4; g++)
                check_cover(pool, counts[c], grains[g]);
        cpu_threads_destroy(pool);
    }
    cpu_threads *pool = NULL;
    CHECK_EQ(cpu_threads_create(0, &pool), ZC_EINVAL);
    CHECK_EQ(cpu_threads_create(-1, &pool), ZC_EINVAL);
    cpu_threads_destroy(NULL);
}

static void two_callers_share_a_pool(void)
{
    cpu_threads *pool = NULL;
    CHECK_OK(cpu_threads_create(3, &pool));
    pthread_t other;
    pthread_create(&other, NULL, use_pool, pool);
    use_pool(pool);
    pthread_join(other, NULL);
    cpu_threads_destroy(pool);
}

static void missing_threads_are_replaced(void)
{
    cpu_threads *pool = NULL;
    for (long nth = 1; nth <= 2; nth++) {
        CHECK_OK(cpu_threads_create(3, &pool));
        zc_fault_arm(nth);
        check_cover(pool, 10000, 64);
        zc_fault_arm(0);
        check_cover(pool, 10000, 64);
        cpu_threads_destroy(pool);
    }
}

static void a_forked_child_works_alone(void)
{
    cpu_threads *pool = NULL;
    CHECK_OK(cpu_threads_create(3, &pool));
    check_cover(pool, 10000, 64);
    pid_t child = fork();
    if (child == 0) {
        testing_failures = 0;
        check_cover(pool, 10000, 64);
        cpu_threads_destroy(pool);
        _exit(testing_failures ? 1 : 0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    CHECK_EQ(status, 0);
    check_cover(pool, 10000, 64);
    cpu_threads_destroy(pool);
}

int main(void)
{
    RUN(options_are_checked);
    RUN(powers);
    RUN(scalars_follow_the_formulas);
    RUN(sums_do_not_depend_on_order);
    RUN(sums_are_rounded_once);
    RUN(full_words_carry);
    RUN(fp16_round_trip);
    RUN(masters_are_exact);
    RUN(step_decides);
    RUN(threads_change_no_bit);
    RUN(packing);
    RUN(memory_is_zero_and_failures_are_told);
    RUN(pieces_cover_the_range);
    RUN(two_callers_share_a_pool);
    RUN(missing_threads_are_replaced);
    RUN(a_forked_child_works_alone);
    DONE();
}
