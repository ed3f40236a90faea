/*
 * Parameters that lie on the GPU already are loaded from there: at stages 0 to 2
 * no byte of them goes through the host, at stage 3 the hosts send them around.
 */
#define ON_CUDA
#include "elsewhere.h"
#include "engine.h"
#include "zero_c.h"

#define PARAMS 3

static const size_t elems[PARAMS] = {100003, 0, 70};
static const zc_dtype dtypes[PARAMS] = {ZC_FLOAT32, ZC_FLOAT32, ZC_BFLOAT16};

typedef struct rank {
    zc_comm *comm;
    zc_device *device;
    zc_stream *stream;
    zc_engine *engine;
    char *values[PARAMS]; /* host */
    char *source[PARAMS]; /* device */
    size_t bytes;         /* of all */
} rank;

static rank begin(int stage)
{
    static const zc_unit units[1] = {{.name = "all", .level = 1}};
    zc_options group = {.lr = 0.1};
    zc_engine_config config = ZC_ENGINE_CONFIG;
    zc_param params[PARAMS] = {{0}};
    zc_comm *host = NULL;
    rank r = {0};
    uint64_t state = 3;
    elsewhere_begin();
    CHECK_OK(zc_comm_open_local(1, 20, &host));
    elsewhere_wrap(host, &r.comm, &r.device, &r.stream);
    for (size_t i = 0; i < PARAMS; i++) {
        size_t bytes = elems[i] * zc_dtype_bytes(dtypes[i]);
        params[i].elems = elems[i];
        params[i].dtype = dtypes[i];
        r.values[i] = malloc(bytes + 8);
        for (size_t k = 0; k < elems[i]; k++)
            testing_put(r.values[i], dtypes[i], k, testing_float(&state));
        char *copy = malloc(bytes + 8);
        memcpy(copy, r.values[i], bytes);
        r.source[i] = elsewhere_put(r.device, r.stream, copy, bytes);
        r.bytes += bytes;
    }
    config.stage = stage;
    config.rule = OPTIM_SGD;
    config.units = stage == 3 ? units : NULL;
    config.unit_count = stage == 3;
    CHECK_OK(engine_create(r.comm, r.device, r.stream, &config, params, PARAMS, &group, 1, &r.engine));
    return r;
}

static void end(rank *r)
{
    for (size_t i = 0; i < PARAMS; i++) {
        elsewhere_free(r->device, r->source[i], elems[i] * zc_dtype_bytes(dtypes[i]));
        free(r->values[i]);
    }
    zc_engine_destroy(r->engine);
    elsewhere_close(r->comm, r->stream);
    elsewhere_end();
}

static void load(int stage)
{
    rank r = begin(stage);
    uint64_t up = emu_copied(1, 0), down = emu_copied(0, 1), across = emu_copied(1, 1);
    for (size_t i = PARAMS; i-- > 0;)
        CHECK_OK(zc_engine_load_from_device(r.engine, i, r.source[i]));
    int through = stage == 3;
    CHECK_EQ(emu_copied(1, 0) - up, through * r.bytes);
    CHECK_EQ(emu_copied(0, 1) - down, through * r.bytes);
    CHECK_EQ(emu_copied(1, 1) - across, !through * r.bytes);
    CHECK_OK(zc_engine_publish(r.engine));
    for (size_t i = 0; i < PARAMS; i++) {
        size_t bytes = elems[i] * zc_dtype_bytes(dtypes[i]);
        char *found = malloc(bytes + 8);
        if (stage == 3)
            CHECK_OK(zc_engine_fetch(r.engine, i, found));
        else
            CHECK_OK(r.device->ops->download(r.device, r.stream, found, zc_engine_param(r.engine, i), bytes));
        CHECK(memcmp(found, r.values[i], bytes) == 0);
        free(found);
    }
    end(&r);
}

static void whole_parameters_stay_on_the_gpu(void)
{
    for (int turn = 0; turn < 4; turn++)
        for (int stage = 0; stage < 3; stage++)
            load(stage);
}

static void shards_go_through_the_host(void)
{
    load(3);
}

static void no_values_are_refused(void)
{
    rank r = begin(1);
    CHECK_EQ(zc_engine_load_from_device(r.engine, 0, NULL), ZC_EINVAL);
    CHECK(strstr(zc_last_error(), "no values for parameter 0") != NULL);
    CHECK_EQ(zc_engine_load_from_device(r.engine, PARAMS, r.source[0]), ZC_EINVAL);
    end(&r);
}

int main(void)
{
    RUN(whole_parameters_stay_on_the_gpu);
    RUN(shards_go_through_the_host);
    RUN(no_values_are_refused);
    DONE();
}
