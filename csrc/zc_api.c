/*
 * The public C API where it is more than the engine: choosing a backend for a
 * communicator and a device for an engine.  The engine's own calls are defined
 * where they are implemented (engine.c, bucket.c, engine_*.c).
 */
#include "comm.h"
#include "cpu_kernels.h"
#include "cuda_load.h"
#include "engine.h"
#include "mem_comm.h"

#include <math.h>
#include <unistd.h>

static zc_status check_seconds(const char *name, double seconds, uint64_t *out_ns)
{
    if (!(seconds > 0) || seconds > 1e9)
        return zc_fail(ZC_EINVAL, "%s is %g seconds; legal is over 0 and up to 1e9", name, seconds);
    *out_ns = (uint64_t)(seconds * 1e9);
    return ZC_OK;
}

zc_status zc_comm_open(const zc_comm_config *config, zc_comm **out)
{
    shm_comm_config shm = {
        .rank = config->rank,
        .ranks = config->ranks,
        .job = config->job,
        .token = config->token,
        .interrupted = config->interrupted,
        .interrupt_context = config->interrupt_context,
    };
    *out = NULL;
    if (config->ranks == 0 || config->rank >= config->ranks)
        return zc_fail(ZC_EINVAL, "rank %zu of %zu; legal is 0 <= rank < ranks", config->rank, config->ranks);
    ZC_TRY(check_seconds("start_timeout", config->start_timeout_s, &shm.start_timeout_ns));
    ZC_TRY(check_seconds("timeout", config->timeout_s, &shm.timeout_ns));
    return shm_comm_open(&shm, out);
}

zc_status zc_comm_open_sockets(const zc_comm_sockets *config, zc_comm **out)
{
    hub_comm_config hub = {
        .rank = config->rank,
        .ranks = config->ranks,
        .hosts = config->hosts,
        .sockets = config->sockets,
        .interrupted = config->interrupted,
        .interrupt_context = config->interrupt_context,
    };
    *out = NULL;
    zc_status status = check_seconds("timeout", config->timeout_s, &hub.timeout_ns);
    if (status == ZC_OK)
        return hub_comm_open(&hub, out);
    for (size_t r = 0; r < (config->rank ? 1 : config->ranks); r++)
        if (config->rank || r)
            close(config->sockets[r]);
    return status;
}

zc_status zc_comm_open_local(size_t ranks, double timeout_s, zc_comm **out)
{
    uint64_t timeout_ns = 0;
    ZC_TRY(check_seconds("timeout", timeout_s, &timeout_ns));
    return local_comm_create(ranks, timeout_ns, out);
}

size_t zc_comm_rank(const zc_comm *comm)
{
    return comm->rank;
}

size_t zc_comm_ranks(const zc_comm *comm)
{
    return comm->ranks;
}

size_t zc_comm_local_ranks(const zc_comm *comm)
{
    return comm->local_ranks;
}

const char *zc_comm_backend(const zc_comm *comm)
{
    return comm->ops->name;
}

zc_status zc_comm_all_reduce(zc_comm *comm, void *array, size_t count, zc_dtype dtype, zc_op op)
{
    return comm_array_all_reduce(comm, array, count, dtype, (comm_op)op);
}

zc_status zc_comm_reduce_scatter(zc_comm *comm, const void *from, void *to, size_t count_per_rank, zc_dtype dtype,
                                 zc_op op)
{
    return comm_array_reduce_scatter(comm, from, to, count_per_rank, dtype, (comm_op)op);
}

zc_status zc_comm_all_gather(zc_comm *comm, const void *from, void *to, size_t bytes_per_rank)
{
    return comm_array_all_gather(comm, from, to, bytes_per_rank);
}

zc_status zc_comm_broadcast(zc_comm *comm, void *array, size_t bytes, size_t root)
{
    return comm_array_broadcast(comm, array, bytes, root);
}

zc_status zc_comm_barrier(zc_comm *comm)
{
    return comm_barrier(comm);
}

zc_status zc_comm_split(zc_comm *comm, int64_t color, zc_comm **out)
{
    return comm_split(comm, color, out);
}

void zc_comm_close(zc_comm *comm)
{
    comm_close(comm);
}

zc_status zc_comm_on_gpu(zc_comm *comm, const char *plugin, const char *nccl, int ordinal, int deterministic,
                         zc_comm **out)
{
    const zc_cuda_plugin *cuda;
    nccl_comm_config config = {.ordinal = ordinal, .deterministic = deterministic, .wheel = nccl};
    *out = NULL;
    if (zc_comm_gpu(comm) >= 0)
        return zc_fail(ZC_EINVAL, "rank %zu: the communicator is one of GPUs already", comm->rank);
    ZC_TRY(cuda_load(plugin, &cuda));
    ZC_TRY(comm_split(comm, 0, &config.host)); /* a life of its own */
    return cuda->comm_create(&config, out);
}

int zc_comm_gpu(const zc_comm *comm)
{
    return comm->ops->gpu ? comm->ops->gpu(comm) : -1;
}

int zc_comm_deterministic(const zc_comm *comm)
{
    return comm->in_rank_order;
}

zc_status zc_gpu_probe(const char *plugin, int *gpus)
{
    const zc_cuda_plugin *cuda;
    zc_cuda_probe found;
    *gpus = 0;
    ZC_TRY(cuda_load(plugin, &cuda));
    ZC_TRY(cuda->probe(&found));
    *gpus = found.gpus;
    return ZC_OK;
}

zc_status zc_engine_create(zc_comm *comm, const zc_engine_config *config, const zc_param *params, size_t count,
                           const zc_options *groups, size_t group_count, zc_engine **out)
{
    zc_device *device = NULL;
    *out = NULL;
    if (config->threads < 0)
        return zc_fail(ZC_EINVAL, "threads is %d; legal is 0 (this rank's share of the usable cores) or more",
                       config->threads);
    size_t share = mem_cores() / zc_comm_local_ranks(comm);
    int threads = config->threads ? config->threads : share ? (int)share : 1;
    ZC_TRY(comm_give_up(comm, "construction", comm->ops->device ? comm->ops->device(comm, &device)
                                                                : cpu_device_create(threads, &device)));
    return engine_create(comm, device, NULL, config, params, count, groups, group_count, out);
}

void zc_checksum(const void *data, size_t bytes, uint64_t sums[2])
{
    cpu_kernels_get()->checksum(data, bytes, sums);
}
