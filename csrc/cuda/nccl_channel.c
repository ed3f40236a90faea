/*
 * Channels and regions of a communicator of GPUs.  They may outlive it: whoever
 * goes last releases what they need.
 */
#include "nccl_state.h"

#include <stdio.h>

#define TAGS_MOST ((1u << NCCL_TAG_BITS) - 3) /* what the host can do, less one */

void nccl_release(nccl_comm *comm)
{
    if (comm->device) {
        comm->device->ops->free(comm->device, comm->scratch, comm->scratch_bytes);
        comm->device->ops->destroy(comm->device);
    }
    pthread_cond_destroy(&comm->wake);
    pthread_mutex_destroy(&comm->lock);
    zc_free(comm);
}

static void free_channel(nccl_channel *channel)
{
    nccl_comm *comm = nccl_of(channel->public.comm);
    CUcontext previous;
    zc_status status = cuda_enter(comm->ordinal, &previous);
    for (uint32_t t = 0; channel->tag && t < channel->tags; t++)
        if (channel->tag[t].done)
            cudaEventDestroy(channel->tag[t].done);
    if (status == ZC_OK)
        cuda_leave(previous);
    zc_free(channel->tag);
    zc_free(channel);
}

zc_status nccl_channel_open(zc_comm *public, const char *name, uint32_t tags, comm_channel **out)
{
    nccl_comm *comm = nccl_of(public);
    comm_channel *host = NULL;
    if (tags > TAGS_MOST)
        return zc_fail(ZC_EINVAL, "rank %zu: a channel of %u tags; there may be %u", comm->name, tags, TAGS_MOST);
    /* The host's channel has one tag more, for what ranks agree on. */
    ZC_TRY(comm_channel_open(comm->host, name, tags + 1, &host));
    nccl_channel *channel = zc_calloc(1, sizeof *channel);
    nccl_tag *tag = zc_calloc(tags + 1, sizeof *tag);
    if (!channel || !tag) {
        zc_status status = zc_fail(ZC_ENOMEM, "rank %zu: no memory for a channel of %u tags", comm->name, tags);
        comm_poison(comm->host, status, "a rank had no memory for a channel"); /* the peers have theirs */
        comm_channel_close(host);
        zc_free(channel);
        zc_free(tag);
        return status;
    }
    channel->public.comm = public;
    channel->host = host;
    channel->tags = tags;
    channel->tag = tag;
    snprintf(channel->name, sizeof channel->name, "%s", name);
    pthread_mutex_lock(&comm->lock);
    comm->channels++;
    channel->number = ++comm->channels_made;
    pthread_mutex_unlock(&comm->lock);
    *out = &channel->public;
    return ZC_OK;
}

/*
 * What was posted uses memory that may go when the channel has.  It ends soon,
 * because the peers have posted it too, or the watchdog ends it.
 */
static void end_operations(nccl_channel *channel)
{
    nccl_comm *comm = nccl_of(channel->public.comm);
    CUcontext previous;
    if (cuda_enter(comm->ordinal, &previous) != ZC_OK)
        return;
    for (uint32_t t = 0; t < channel->tags; t++)
        while (channel->tag[t].done && cudaEventQuery(channel->tag[t].done) == cudaErrorNotReady)
            nccl_pause();
    cudaGetLastError(); /* "not ready" counts as an error, which the next launch would be blamed for */
    cuda_leave(previous);
}

void nccl_channel_close(comm_channel *public)
{
    nccl_channel *channel = nccl_channel_of(public);
    nccl_comm *comm = nccl_of(public->comm);
    if (nccl_forked(comm))
        return;
    end_operations(channel);
    comm_channel_close(channel->host);
    free_channel(channel);
    pthread_mutex_lock(&comm->lock);
    int last = --comm->channels == 0 && comm->closed;
    pthread_mutex_unlock(&comm->lock);
    if (last)
        nccl_release(comm);
}

zc_status nccl_region_alloc(comm_channel *public, size_t bytes, unsigned flags, comm_region **out)
{
    nccl_comm *comm = nccl_of(public->comm);
    nccl_channel *channel = nccl_channel_of(public);
    comm_region *region = NULL;
    zc_status status = ZC_OK;
    if (flags & COMM_ONE_COPY)
        status = zc_fail(ZC_EINVAL, "rank %zu: memory that ranks share is for CPUs; use shared_params=False with GPUs",
                         comm->name);
    else if (bytes && !(region = zc_calloc(1, sizeof *region)))
        status = zc_fail(ZC_ENOMEM, "rank %zu: no memory for a region", comm->name);
    else if (bytes)
        status = comm->device->ops->alloc(comm->device, bytes, &region->base);
    status = nccl_agree(comm, channel->host, channel->tags, "allocation of memory", status);
    if (status != ZC_OK) {
        if (region)
            comm->device->ops->free(comm->device, region->base, bytes);
        zc_free(region);
        return status;
    }
    if (region) {
        region->bytes = bytes;
        region->channel = public;
        region->flags = flags;
    }
    *out = region;
    return ZC_OK;
}

/* Memory of a GPU has no first use to wait for: all of it came with the region. */
zc_status nccl_region_grow(comm_region *region, size_t bytes)
{
    (void)region, (void)bytes;
    return ZC_OK;
}

void nccl_region_free(comm_region *region)
{
    nccl_comm *comm = nccl_of(region->channel->comm);
    if (nccl_forked(comm))
        return;
    comm->device->ops->free(comm->device, region->base, region->bytes);
    zc_free(region);
}
