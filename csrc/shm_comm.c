/*
 * Ranks as processes of one host: every rank's memory is a segment of its own,
 * whose descriptor all ranks hold, and so is a descriptor of every process, by
 * which its end is seen.
 */
#define _GNU_SOURCE
#include "mem_comm.h"
#include "shm_process.h"
#include "shm_rendezvous.h"
#include "shm_segment.h"
#include "zc_point.h"

#include <errno.h>
#include <sched.h>
#include <string.h>
#include <unistd.h>

typedef struct shm_provider {
    mem_provider public;
    size_t rank, ranks;
    shm_segment segment;
    shm_peer *peers; /* [ranks]; the own memory's descriptor is the segment's */
} shm_provider;

static zc_status provider_alloc(mem_provider *provider, size_t bytes, size_t now_bytes, void **memory,
                                uint64_t *token)
{
    shm_provider *shm = (shm_provider *)provider;
    ZC_TRY(shm_segment_alloc(&shm->segment, bytes, now_bytes, token));
    /* page table entries would bring memory with them: not for what is still a hole */
    zc_status status = shm_segment_map(shm->segment.fd, *token, bytes, now_bytes == bytes, memory);
    if (status != ZC_OK)
        shm_segment_free(&shm->segment, *token, bytes);
    return status;
}

static zc_status provider_grow(mem_provider *provider, uint64_t token, size_t from_bytes, size_t to_bytes)
{
    return shm_segment_reserve(&((shm_provider *)provider)->segment, token + from_bytes, to_bytes - from_bytes);
}

static void provider_unmap(mem_provider *provider, void *memory, size_t bytes)
{
    (void)provider;
    shm_segment_unmap(memory, bytes);
}

static void provider_free(mem_provider *provider, void *memory, uint64_t token, size_t bytes)
{
    shm_segment_unmap(memory, bytes);
    shm_segment_free(&((shm_provider *)provider)->segment, token, bytes);
}

static zc_status provider_map(mem_provider *provider, size_t rank, uint64_t token, size_t bytes, void **memory)
{
    return shm_segment_map(((shm_provider *)provider)->peers[rank].memory_fd, token, bytes, 0, memory);
}

static int provider_dead(mem_provider *provider, size_t rank)
{
    return shm_process_ended(((shm_provider *)provider)->peers[rank].process_fd);
}

static int provider_stopped(mem_provider *provider, size_t rank)
{
    return shm_process_stopped(((shm_provider *)provider)->peers[rank].process_fd);
}

static void provider_destroy(mem_provider *provider)
{
    shm_provider *shm = (shm_provider *)provider;
    for (size_t q = 0; shm->peers && q < shm->ranks; q++) {
        if (q != shm->rank && shm->peers[q].memory_fd >= 0)
            close(shm->peers[q].memory_fd);
        if (shm->peers[q].process_fd >= 0)
            close(shm->peers[q].process_fd);
    }
    shm_segment_close(&shm->segment);
    zc_free(shm->peers);
    zc_free(shm);
}

static const mem_provider_ops shm_ops = {
    .alloc = provider_alloc,
    .grow = provider_grow,
    .free = provider_free,
    .leave = provider_unmap,
    .map = provider_map,
    .unmap = provider_unmap,
    .dead = provider_dead,
    .stopped = provider_stopped,
    .destroy = provider_destroy,
};

/* Own memory and the descriptor of this process. */
static zc_status provider_create(size_t rank, size_t ranks, shm_provider **out)
{
    *out = NULL;
    shm_provider *shm = zc_calloc(1, sizeof *shm);
    if (!shm)
        return zc_fail(ZC_ENOMEM, "rank %zu: out of memory", rank);
    shm->public.ops = &shm_ops;
    shm->rank = rank;
    shm->ranks = ranks;
    shm->segment.fd = -1;
    zc_status status = ZC_OK;
    shm->peers = zc_malloc(ranks * sizeof *shm->peers);
    if (!shm->peers)
        status = zc_fail(ZC_ENOMEM, "rank %zu: out of memory for %zu ranks", rank, ranks);
    for (size_t q = 0; shm->peers && q < ranks; q++)
        shm->peers[q] = (shm_peer){-1, -1};
    if (status == ZC_OK)
        status = shm_segment_open(&shm->segment);
    if (status == ZC_OK) {
        shm->peers[rank].memory_fd = shm->segment.fd;
        shm->peers[rank].process_fd = shm_process_open();
        if (shm->peers[rank].process_fd < 0)
            status = zc_fail_errno(ZC_ESYSTEM, errno, "rank %zu cannot open a descriptor of its process (pidfd_open, "
                                   "Linux 5.3)", rank);
    }
    if (status != ZC_OK) {
        provider_destroy(&shm->public);
        return status;
    }
    *out = shm;
    return ZC_OK;
}

typedef struct attaching {
    mem_world *world;
    uint64_t timeout_ns;
    zc_comm *comm;
} attaching;

/* Every rank's home is the first thing in its segment. */
static zc_status attach(void *context, const shm_peer *peers)
{
    (void)peers; /* they are the provider's */
    attaching *a = context;
    size_t ranks = a->world->ranks;
    uint64_t *tokens = zc_calloc(ranks, sizeof *tokens);
    if (!tokens)
        return zc_fail(ZC_ENOMEM, "rank %zu: out of memory", a->world->rank);
    zc_status status = mem_world_attach(a->world, tokens, a->timeout_ns, &a->comm);
    zc_free(tokens);
    return status;
}

/* Busy waiting takes nothing from anybody if all ranks' affinity masks together have a core for each. */
static zc_status find_cores(mem_world *world, zc_comm *comm)
{
    cpu_set_t mine, every, *all = zc_malloc(world->ranks * sizeof *all);
    if (!all)
        return zc_fail(ZC_ENOMEM, "rank %zu: out of memory", world->rank);
    CPU_ZERO(&mine);
    CPU_ZERO(&every);
    sched_getaffinity(0, sizeof mine, &mine); /* fails where there are more cores than it can name: then no spinning */
    zc_status status = comm_array_all_gather(comm, &mine, all, sizeof mine);
    for (size_t q = 0; status == ZC_OK && q < world->ranks; q++)
        CPU_OR(&every, &every, &all[q]);
    world->spin = status == ZC_OK && (size_t)CPU_COUNT(&every) >= world->ranks;
    zc_free(all);
    return status;
}

zc_status shm_comm_open(const shm_comm_config *config, zc_comm **out)
{
    *out = NULL;
    if (config->ranks < 1 || config->ranks > SHM_RANKS_MAX || config->rank >= config->ranks)
        return zc_fail(ZC_EINVAL, "rank %zu of %zu; there may be 1 to %u ranks on a host, numbered from 0",
                       config->rank, config->ranks, SHM_RANKS_MAX);
    shm_provider *provider;
    attaching a = {.timeout_ns = config->timeout_ns};
    ZC_TRY(provider_create(config->rank, config->ranks, &provider));
    ZC_TRY(mem_world_create(&provider->public, config->rank, config->ranks, 0, &a.world));
    ZC_POINT("start: memory made");

    shm_rendezvous meeting = {.rank = config->rank, .ranks = config->ranks,
                              .job = config->job ? config->job : "default", .token = config->token,
                              .start_timeout_ns = config->start_timeout_ns, .interrupted = config->interrupted,
                              .interrupt_context = config->interrupt_context, .attach = attach,
                              .attach_context = &a};
    zc_status status = shm_rendezvous_meet(&meeting, provider->peers);
    if (status != ZC_OK) {
        if (a.comm)
            comm_close(a.comm);
        else
            mem_world_destroy(a.world);
        return status;
    }
    ZC_POINT("start: met");
    a.comm->interrupted = config->interrupted;
    a.comm->interrupt_context = config->interrupt_context;
    status = comm_give_up(a.comm, "start-up", find_cores(a.world, a.comm));
    if (status != ZC_OK) {
        comm_close(a.comm);
        return status;
    }
    *out = a.comm;
    return ZC_OK;
}
