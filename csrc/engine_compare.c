/*
 * What every rank must have given alike: the check of an engine's arguments on
 * this rank, and the comparison over ranks, before anything is allocated.  If
 * ranks differ, all of them find the first difference and say what it is.
 */
#include "engine.h"

#include <stdatomic.h>
#include <stdio.h>

uint64_t engine_hash_options(uint64_t hash, const zc_options *groups, size_t group_count)
{
    for (size_t g = 0; g < group_count; g++) { /* by field: the struct has padding */
        const zc_options *o = &groups[g];
        double numbers[] = {o->lr, o->beta1, o->beta2, o->eps, o->weight_decay, o->momentum, o->dampening,
                            o->nesterov, o->amsgrad, o->maximize};
        hash = zc_hash(hash, numbers, sizeof numbers);
    }
    return hash;
}

zc_status engine_check_config(const zc_engine_config *config)
{
    if (config->stage < 0 || config->stage > 3)
        return zc_fail(ZC_EINVAL, "stage is %d; legal are 0, 1, 2 and 3", config->stage);
    if ((unsigned)config->rule > OPTIM_SGD)
        return zc_fail(ZC_EINVAL, "optimizer rule is %d; legal are 0 (adamw), 1 (adam) and 2 (sgd)",
                       (int)config->rule);
    if (config->overlap_gather && config->stage != 1 && config->stage != 2)
        return zc_fail(ZC_EINVAL, "overlap_gather at stage %d, whose step gathers no parameters; it is for stages 1 and 2",
                       config->stage);
    if (config->stage < 3)
        return ZC_OK;
    if (config->shared_params)
        return zc_fail(ZC_EINVAL, "stage 3 keeps every parameter once already; shared_params is for stages 0 to 2");
    if (!config->unit_count || !config->units)
        return zc_fail(ZC_EINVAL, "stage 3 needs units; there must be at least one");
    if (config->unit_slots <= config->prefetch)
        return zc_fail(ZC_EINVAL, "%zu slots for each ring of units with a prefetch of %zu; there must be one more "
                       "than units fetched ahead", config->unit_slots, config->prefetch);
    return ZC_OK;
}

zc_status engine_check_params(const zc_engine *engine, const zc_param *params, size_t count, size_t group_count)
{
    for (size_t i = 0; i < count; i++) {
        const char *name = params[i].name ? params[i].name : "unnamed";
        if ((unsigned)params[i].dtype > ZC_FLOAT16)
            return zc_fail(ZC_ETYPE, "parameter %zu (%s) is %s; legal are float32, float64, bfloat16 and float16", i,
                           name, zc_dtype_name(params[i].dtype));
        if (params[i].group >= group_count)
            return zc_fail(ZC_EINVAL, "parameter %zu (%s) is in group %u, but there are %zu groups", i, name,
                           params[i].group, group_count);
        if (engine->config.stage == 3 && params[i].unit >= engine->config.unit_count)
            return zc_fail(ZC_EINVAL, "parameter %zu (%s) is in unit %u, but there are %zu units", i, name,
                           params[i].unit, engine->config.unit_count);
        if (engine->config.stage < 3 && params[i].frozen)
            return zc_fail(ZC_EINVAL, "parameter %zu (%s) is frozen; below stage 3 leave it out", i, name);
        if (params[i].elems > SIZE_MAX / 64)
            return zc_fail(ZC_EINVAL, "parameter %zu (%s) has %zu elements; that cannot be addressed", i, name,
                           params[i].elems);
    }
    return ZC_OK;
}

static uint64_t hash_param(const zc_param *param)
{
    uint64_t hash = ZC_HASH_START, elems = param->elems;
    const char *name = param->name ? param->name : "";
    uint32_t rest[4] = {(uint32_t)param->dtype, param->group, param->unit, param->frozen != 0};
    hash = zc_hash(hash, name, strlen(name));
    hash = zc_hash(hash, &elems, sizeof elems);
    return zc_hash(hash, rest, sizeof rest);
}

static void describe(char *text, size_t bytes, const zc_param *params, size_t count, size_t index)
{
    if (index >= count)
        snprintf(text, bytes, "only %zu parameters", count);
    else
        snprintf(text, bytes, "parameter %zu '%s' %s with %zu elements in group %u%s, unit %u", index,
                 params[index].name ? params[index].name : "", zc_dtype_name(params[index].dtype),
                 params[index].elems, params[index].group, params[index].frozen ? ", frozen" : "", params[index].unit);
}

/* The ranks' hashes differ: find the first parameter that does, and show both sides. */
static zc_status explain_difference(zc_engine *engine, const zc_param *params, size_t count, uint64_t config_hash)
{
    enum { BATCH = COMM_EXCHANGE_BYTES / sizeof(uint64_t) };
    size_t ranks = engine->ranks;
    uint64_t mine[BATCH] = {config_hash, count};
    char *all = zc_malloc(ranks * COMM_EXCHANGE_BYTES);
    char text[256] = {0};
    if (!all)
        return zc_fail(ZC_ENOMEM, "no memory to compare the ranks' parameters");
    zc_status status = comm_exchange(engine->control, CONTROL_TAG_MEET, "construction", mine, all, sizeof mine);
    const uint64_t *heads = (const uint64_t *)(const void *)all;
    uint64_t most = 0;
    size_t odd = 0, first = SIZE_MAX;
    for (size_t r = 0; status == ZC_OK && r < ranks; r++) {
        if (heads[r * BATCH] != heads[0] && !odd)
            odd = r;
        if (heads[r * BATCH + 1] > most)
            most = heads[r * BATCH + 1];
    }
    if (status == ZC_OK && odd) {
        zc_free(all);
        return zc_fail(ZC_EMISMATCH, "rank %zu constructs its optimizer with another stage, rule, bucket size, units, "
                       "overlap_gather, group options or number of groups than rank 0; all ranks must pass the same", odd);
    }
    for (size_t base = 0; status == ZC_OK && base < most && first == SIZE_MAX; base += BATCH) {
        for (size_t k = 0; k < BATCH; k++)
            mine[k] = base + k < count ? hash_param(&params[base + k]) : 0;
        status = comm_exchange(engine->control, CONTROL_TAG_MEET, "construction", mine, all, sizeof mine);
        for (size_t k = 0; status == ZC_OK && k < BATCH && first == SIZE_MAX; k++)
            for (size_t r = 1; r < ranks; r++)
                if (heads[r * BATCH + k] != heads[k]) {
                    first = base + k;
                    odd = r;
                    break;
                }
    }
    if (status == ZC_OK) {
        describe(text, sizeof text, params, count, first);
        status = comm_exchange(engine->control, CONTROL_TAG_MEET, "construction", text, all, sizeof text);
    }
    if (status == ZC_OK)
        status = zc_fail(ZC_EMISMATCH, "ranks register different parameters: rank 0 has %.200s, rank %zu has %.200s; "
                         "every rank must build the same model", all, odd, all + odd * sizeof text);
    zc_free(all);
    return status;
}

zc_status engine_compare(zc_engine *engine, const zc_param *params, size_t count, const zc_options *groups,
                         size_t group_count)
{
    static _Atomic uint64_t engines_made;
    uint64_t config_hash = ZC_HASH_START, record[3], hash;
    uint64_t fields[] = {(uint64_t)engine->config.stage, engine->config.rule, engine->config.bucket_bytes,
                         engine->config.ring_slots, (uint64_t)engine->config.shared_params,
                         (uint64_t)engine->config.mean, group_count, engine->config.unit_slots,
                         engine->config.prefetch, engine->config.fill_discarded != 0,
                         engine->config.overlap_gather != 0};
    config_hash = zc_hash(config_hash, fields, sizeof fields);
    for (size_t u = 0; u < engine->unit_count; u++) {
        uint32_t unit[2] = {engine->units[u].level, engine->units[u].resident != 0};
        config_hash = zc_hash(config_hash, unit, sizeof unit);
    }
    config_hash = engine_hash_options(config_hash, groups, group_count);
    hash = config_hash;
    for (size_t i = 0; i < count; i++) {
        uint64_t one = hash_param(&params[i]);
        hash = zc_hash(hash, &one, sizeof one);
    }
    record[0] = hash;
    record[1] = count;
    record[2] = atomic_fetch_add(&engines_made, 1); /* rank 0's is the engine's number */
    uint64_t *all = zc_malloc(engine->ranks * sizeof record);
    if (!all)
        return zc_fail(ZC_ENOMEM, "no memory to compare the ranks' parameters");
    zc_status status = comm_exchange(engine->control, CONTROL_TAG_MEET, "construction", record, all, sizeof record);
    int equal = 1;
    for (size_t r = 0; status == ZC_OK && r < engine->ranks; r++)
        equal &= all[3 * r] == hash && all[3 * r + 1] == count;
    if (status == ZC_OK)
        engine->number = all[2];
    zc_free(all);
    if (status != ZC_OK || equal)
        return status;
    return explain_difference(engine, params, count, config_hash);
}
