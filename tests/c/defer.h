/*
 * A device and a communicator that put off all work as long as their
 * interfaces allow: the stand-in for CUDA streams and NCCL.
 *
 * The device keeps a queue with a thread that works it off; an operation is
 * released to it when the host synchronises, reads device memory, or blocks on
 * its peers, not before.  The communicator keeps a queue of its own;
 * an operation runs when the device's queue reaches a point that was ordered
 * after it (comm_test and comm_wait put such a point into the queue and report
 * success at once, as a stream event would), and not before.  An engine that
 * forgets to order two pieces of work gets wrong numbers here.
 *
 * Underneath are the real CPU device and the ranks-as-threads communicator.
 */
#ifndef DEFER_H
#define DEFER_H

#include "comm.h"
#include "device.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum defer_kind {
    DEFER_COPY, DEFER_FILL, DEFER_ACCUMULATE, DEFER_SUM_SQUARES, DEFER_FOLD, DEFER_SCALE, DEFER_SCALARS,
    DEFER_UPDATE, DEFER_UPLOAD, DEFER_WAIT, DEFER_FREE
};

struct defer_comm;
struct defer_channel;

typedef struct defer_item {
    enum defer_kind kind;
    void *to;
    const void *from;
    void *extra;
    size_t count;
    zc_dtype dtype;
    int add;                /* or the byte of a fill */
    double factor;
    device_step_args step;
    device_update_args update;
    struct defer_channel *channel;
    comm_ticket ticket;
} defer_item;

typedef struct defer_device {
    zc_device head;
    device_ops ops;
    zc_device *under;
    defer_item *items;
    size_t count, room;
    size_t next, target;    /* the thread works up to target */
    int ending;
    zc_status failed;       /* the first failure; nothing runs after it */
    char why[512];
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t change;
} defer_device;

typedef struct defer_op {
    enum { OP_REDUCE, OP_GATHER, OP_GATHER_TO, OP_WORDS, OP_BROADCAST } kind;
    comm_reduce_args reduce;
    uint32_t tag;
    comm_region *region;
    size_t offset, size, root;
    void *to;
    size_t position;        /* items enqueued before it */
    comm_ticket ticket;     /* underneath */
} defer_op;

typedef struct defer_comm {
    zc_comm head;
    zc_comm *under;
    defer_device *device;
    struct defer_channel *channels;
} defer_comm;

/* Operations of one channel run in the order in which they were posted. */
typedef struct defer_channel {
    comm_channel head;
    comm_channel *under;
    defer_op **ops;         /* ticket t is ops[t - 1] */
    size_t count, room, posted;
    struct defer_channel *next;
} defer_channel;

typedef struct defer_region {
    comm_region head;
    comm_region *under;
} defer_region;

#define UNDER_REGION(region) (((defer_region *)(void *)(region))->under)

/* ---- the communicator's queue ------------------------------------------ */

static zc_status defer_post(defer_channel *channel, defer_op *op)
{
    switch (op->kind) {
    case OP_REDUCE:
        return comm_reduce_scatter(channel->under, NULL, &op->reduce, &op->ticket);
    case OP_GATHER:
        return comm_all_gather(channel->under, NULL, op->tag, op->region, op->offset, op->size, &op->ticket);
    case OP_GATHER_TO:
        return comm_all_gather_to(channel->under, NULL, op->tag, op->region, op->offset, op->size, op->to,
                                  &op->ticket);
    case OP_WORDS:
        return comm_all_reduce_words(channel->under, NULL, op->tag, op->region, op->offset, op->size, op->to,
                                     &op->ticket);
    default:
        return comm_broadcast(channel->under, NULL, op->tag, op->region, op->offset, op->size, op->root, &op->ticket);
    }
}

/*
 * Before the queue blocks, everything whose own place in the queue has been
 * passed begins, on all channels: a rank that held it back any longer would
 * keep peers waiting for ever.
 */
static zc_status defer_wait_op(defer_comm *comm, defer_channel *channel, comm_ticket ticket, size_t position)
{
    pthread_mutex_t *mutex = &comm->device->mutex;
    pthread_mutex_lock(mutex);
    for (defer_channel *c = comm->channels; c; c = c->next)
        while (c->posted < c->count && c->ops[c->posted]->position <= position) {
            defer_op *op = c->ops[c->posted++];
            pthread_mutex_unlock(mutex);
            zc_status status = defer_post(c, op);
            if (status != ZC_OK)
                return status;
            pthread_mutex_lock(mutex);
        }
    comm_ticket under = channel->ops[ticket - 1]->ticket;
    pthread_mutex_unlock(mutex);
    return comm_wait(channel->under, under, NULL);
}

/* ---- the device's queue -------------------------------------------------- */

static zc_status defer_item_run(defer_device *device, defer_item *i, size_t position)
{
    zc_device *u = device->under;
    zc_status status = ZC_OK;
    switch (i->kind) {
    case DEFER_COPY:
        status = u->ops->copy(u, NULL, i->to, i->from, i->count);
        break;
    case DEFER_FILL:
        status = u->ops->fill(u, NULL, i->to, i->add, i->count);
        break;
    case DEFER_ACCUMULATE:
        status = u->ops->accumulate(u, NULL, i->to, i->from, i->count, i->dtype, i->add);
        break;
    case DEFER_SUM_SQUARES:
        status = u->ops->sum_squares(u, NULL, i->to, i->extra, i->from, i->count, i->dtype);
        break;
    case DEFER_FOLD:
        status = u->ops->fold_flags(u, NULL, i->to, i->from);
        break;
    case DEFER_SCALE:
        status = u->ops->scale(u, NULL, i->to, i->from, i->count, i->dtype, i->factor);
        break;
    case DEFER_SCALARS:
        i->step.options = i->extra;
        status = u->ops->step_scalars(u, NULL, &i->step);
        free(i->extra);
        break;
    case DEFER_UPDATE:
        status = u->ops->update(u, NULL, &i->update);
        break;
    case DEFER_UPLOAD:
        status = u->ops->upload(u, NULL, i->to, i->extra, i->count);
        free(i->extra);
        break;
    case DEFER_FREE:
        u->ops->free(u, i->to, i->count);
        break;
    case DEFER_WAIT:
        status = defer_wait_op((defer_comm *)(void *)i->channel->head.comm, i->channel, i->ticket,
                               position);
        break;
    }
    return status;
}

/* After a failure nothing runs, but memory is given back. */
static void defer_item_drop(defer_device *device, defer_item *i)
{
    if (i->kind == DEFER_FREE)
        device->under->ops->free(device->under, i->to, i->count);
    else if (i->kind == DEFER_UPLOAD || i->kind == DEFER_SCALARS)
        free(i->extra);
}

static void *defer_work(void *argument)
{
    defer_device *device = argument;
    pthread_mutex_lock(&device->mutex);
    for (;;) {
        while (device->next == device->target && !device->ending)
            pthread_cond_wait(&device->change, &device->mutex);
        if (device->next == device->target)
            break;
        defer_item item = device->items[device->next];
        size_t position = device->next;
        pthread_mutex_unlock(&device->mutex);
        zc_status status = ZC_OK;
        if (device->failed == ZC_OK)
            status = defer_item_run(device, &item, position);
        else
            defer_item_drop(device, &item);
        pthread_mutex_lock(&device->mutex);
        if (status != ZC_OK && device->failed == ZC_OK) {
            device->failed = status;
            strncpy(device->why, zc_last_error(), sizeof device->why - 1);
        }
        device->next++;
        pthread_cond_broadcast(&device->change);
    }
    pthread_mutex_unlock(&device->mutex);
    return NULL;
}

/* Lets the thread work off what is enqueued, and does not wait for it. */
static void defer_release(defer_device *device)
{
    pthread_mutex_lock(&device->mutex);
    device->target = device->count;
    pthread_cond_broadcast(&device->change);
    pthread_mutex_unlock(&device->mutex);
}

static zc_status defer_run(defer_device *device)
{
    defer_release(device);
    pthread_mutex_lock(&device->mutex);
    while (device->next < device->target)
        pthread_cond_wait(&device->change, &device->mutex);
    zc_status status = device->failed;
    pthread_mutex_unlock(&device->mutex);
    return status == ZC_OK ? ZC_OK : zc_fail(status, "%s", device->why);
}

static zc_status defer_push(defer_device *device, defer_item item)
{
    pthread_mutex_lock(&device->mutex);
    if (device->count == device->room) {
        device->room = device->room ? 2 * device->room : 256;
        device->items = realloc(device->items, device->room * sizeof item);
    }
    device->items[device->count++] = item;
    pthread_mutex_unlock(&device->mutex);
    return ZC_OK;
}

#define DEFER(d) ((defer_device *)(void *)(d))

static zc_status defer_alloc(zc_device *d, size_t bytes, void **out)
{
    return DEFER(d)->under->ops->alloc(DEFER(d)->under, bytes, out);
}

static void defer_free(zc_device *d, void *memory, size_t bytes)
{
    defer_push(DEFER(d), (defer_item){.kind = DEFER_FREE, .to = memory, .count = bytes});
}

static zc_status defer_slot_alloc(zc_device *d, size_t bytes, device_slot *out)
{
    return DEFER(d)->under->ops->slot_alloc(DEFER(d)->under, bytes, out);
}

static zc_status defer_slot_map(zc_device *d, const device_slot *slot, size_t bytes, void **out)
{
    return DEFER(d)->under->ops->slot_map(DEFER(d)->under, slot, bytes, out);
}

static void defer_slot_unmap(zc_device *d, void *memory, size_t bytes)
{
    DEFER(d)->under->ops->slot_unmap(DEFER(d)->under, memory, bytes);
}

static void defer_slot_free(zc_device *d, device_slot *slot)
{
    DEFER(d)->under->ops->slot_free(DEFER(d)->under, slot);
}

static zc_status defer_copy(zc_device *d, zc_stream *s, void *to, const void *from, size_t bytes)
{
    (void)s;
    return defer_push(DEFER(d), (defer_item){.kind = DEFER_COPY, .to = to, .from = from, .count = bytes});
}

static zc_status defer_pack(zc_device *d, zc_stream *s, void *to, const void *from, size_t elem_bytes, int dims,
                            const int64_t *shape, const int64_t *strides)
{
    (void)s;
    defer_run(DEFER(d));
    return DEFER(d)->under->ops->pack(DEFER(d)->under, NULL, to, from, elem_bytes, dims, shape, strides);
}

static zc_status defer_fill(zc_device *d, zc_stream *s, void *to, int byte, size_t bytes)
{
    (void)s;
    return defer_push(DEFER(d), (defer_item){.kind = DEFER_FILL, .to = to, .add = byte, .count = bytes});
}

static zc_status defer_accumulate(zc_device *d, zc_stream *s, void *to, const void *from, size_t count,
                                  zc_dtype dtype, int add)
{
    (void)s;
    return defer_push(DEFER(d), (defer_item){.kind = DEFER_ACCUMULATE, .to = to, .from = from, .count = count,
                                             .dtype = dtype, .add = add});
}

static zc_status defer_sum_squares(zc_device *d, zc_stream *s, device_stats *stats, uint32_t *flags,
                                   const void *grad, size_t count, zc_dtype dtype)
{
    (void)s;
    return defer_push(DEFER(d), (defer_item){.kind = DEFER_SUM_SQUARES, .to = stats, .extra = flags, .from = grad,
                                             .count = count, .dtype = dtype});
}

static zc_status defer_fold(zc_device *d, zc_stream *s, device_stats *stats, const uint32_t *flags)
{
    (void)s;
    return defer_push(DEFER(d), (defer_item){.kind = DEFER_FOLD, .to = stats, .from = flags});
}

static zc_status defer_scale(zc_device *d, zc_stream *s, void *to, const void *from, size_t count, zc_dtype dtype,
                             double factor)
{
    (void)s;
    return defer_push(DEFER(d), (defer_item){.kind = DEFER_SCALE, .to = to, .from = from, .count = count,
                                             .dtype = dtype, .factor = factor});
}

static zc_status defer_scalars(zc_device *d, zc_stream *s, const device_step_args *args)
{
    (void)s;
    size_t bytes = args->groups * sizeof *args->options;
    defer_item item = {.kind = DEFER_SCALARS, .step = *args, .extra = malloc(bytes + 1)};
    memcpy(item.extra, args->options, bytes);
    return defer_push(DEFER(d), item);
}

static zc_status defer_update(zc_device *d, zc_stream *s, const device_update_args *args)
{
    (void)s;
    return defer_push(DEFER(d), (defer_item){.kind = DEFER_UPDATE, .update = *args});
}

static zc_status defer_upload(zc_device *d, zc_stream *s, void *to, const void *from, size_t bytes)
{
    (void)s;
    defer_item item = {.kind = DEFER_UPLOAD, .to = to, .count = bytes, .extra = malloc(bytes + 1)};
    memcpy(item.extra, from, bytes);
    return defer_push(DEFER(d), item);
}

static zc_status defer_download(zc_device *d, zc_stream *s, void *to, const void *from, size_t bytes)
{
    (void)s;
    zc_status status = defer_run(DEFER(d));
    return status != ZC_OK ? status : DEFER(d)->under->ops->download(DEFER(d)->under, NULL, to, from, bytes);
}

static zc_status defer_synchronize(zc_device *d, zc_stream *s)
{
    (void)s;
    return defer_run(DEFER(d));
}

static zc_status defer_order(zc_device *d, zc_stream *before, zc_stream *after)
{
    (void)d, (void)before, (void)after; /* there is one stream */
    return ZC_OK;
}

static void defer_destroy(zc_device *d)
{
    defer_run(DEFER(d));
    pthread_mutex_lock(&DEFER(d)->mutex);
    DEFER(d)->ending = 1;
    pthread_cond_broadcast(&DEFER(d)->change);
    pthread_mutex_unlock(&DEFER(d)->mutex);
    pthread_join(DEFER(d)->thread, NULL);
    DEFER(d)->under->ops->destroy(DEFER(d)->under);
    free(DEFER(d)->items);
    free(d);
}

static const device_ops defer_device_ops = {
    .name = "defer", .slot_step_bytes = 4096, .update_bytes = 1 << 16, .alloc = defer_alloc, .free = defer_free,
    .slot_alloc = defer_slot_alloc, .slot_map = defer_slot_map, .slot_unmap = defer_slot_unmap,
    .slot_free = defer_slot_free, .copy = defer_copy, .copy_far = defer_copy, .pack = defer_pack,
    .fill = defer_fill, .accumulate = defer_accumulate, .sum_squares = defer_sum_squares, .fold_flags = defer_fold,
    .scale = defer_scale, .step_scalars = defer_scalars, .update = defer_update, .upload = defer_upload,
    .download = defer_download, .synchronize = defer_synchronize, .order = defer_order, .destroy = defer_destroy,
};

static int defer_own_slots; /* devices that are made from now on have slots of one address */

/* ---- the communicator ------------------------------------------------------ */

#define DEFER_COMM(c) ((defer_comm *)(void *)(c))
#define UNDER(channel) (((defer_channel *)(void *)(channel))->under)

static zc_status defer_op_push(comm_channel *public, defer_op op, comm_ticket *ticket)
{
    defer_channel *channel = (defer_channel *)(void *)public;
    defer_device *device = DEFER_COMM(public->comm)->device;
    defer_op *kept = malloc(sizeof *kept);
    pthread_mutex_lock(&device->mutex); /* the thread reads what was posted before */
    if (channel->count == channel->room) {
        channel->room = channel->room ? 2 * channel->room : 256;
        channel->ops = realloc(channel->ops, channel->room * sizeof *channel->ops);
    }
    op.position = device->count;
    *kept = op;
    channel->ops[channel->count++] = kept;
    *ticket = channel->count;
    pthread_mutex_unlock(&device->mutex);
    return ZC_OK;
}

static zc_status defer_channel_open(zc_comm *comm, const char *name, uint32_t tags, comm_channel **out)
{
    defer_channel *channel = calloc(1, sizeof *channel);
    channel->head.comm = comm;
    defer_run(DEFER_COMM(comm)->device);
    channel->next = DEFER_COMM(comm)->channels;
    DEFER_COMM(comm)->channels = channel;
    *out = &channel->head;
    return comm_channel_open(DEFER_COMM(comm)->under, name, tags, &channel->under);
}

static void defer_channel_close(comm_channel *channel)
{
    defer_run(DEFER_COMM(channel->comm)->device);
    defer_channel **at = &DEFER_COMM(channel->comm)->channels;
    while (*at != (defer_channel *)(void *)channel)
        at = &(*at)->next;
    *at = (*at)->next;
    comm_channel_close(UNDER(channel));
    for (size_t k = 0; k < ((defer_channel *)(void *)channel)->count; k++)
        free(((defer_channel *)(void *)channel)->ops[k]);
    free(((defer_channel *)(void *)channel)->ops);
    free(channel);
}

static zc_status defer_region_alloc(comm_channel *channel, size_t bytes, unsigned flags, comm_region **out)
{
    defer_region *region = calloc(1, sizeof *region);
    zc_status status = comm_region_alloc(UNDER(channel), bytes, flags, &region->under);
    if (status != ZC_OK || !region->under) {
        free(region);
        return status;
    }
    region->head = *region->under;
    region->head.channel = channel;
    *out = &region->head;
    return ZC_OK;
}

static zc_status defer_region_grow(comm_region *region, size_t bytes)
{
    return comm_region_grow(UNDER_REGION(region), bytes);
}

static void defer_region_free(comm_region *region)
{
    comm_region_free(UNDER_REGION(region));
    free(region);
}

static zc_status defer_reduce(comm_channel *channel, zc_stream *s, const comm_reduce_args *args, comm_ticket *ticket)
{
    (void)s;
    defer_op op = {.kind = OP_REDUCE, .reduce = *args};
    op.reduce.region = UNDER_REGION(args->region);
    return defer_op_push(channel, op, ticket);
}

static zc_status defer_gather(comm_channel *channel, zc_stream *s, uint32_t tag, comm_region *region, size_t offset,
                              size_t slice, comm_ticket *ticket)
{
    (void)s;
    return defer_op_push(channel, (defer_op){.kind = OP_GATHER, .tag = tag, .region = UNDER_REGION(region),
                                             .offset = offset, .size = slice}, ticket);
}

static zc_status defer_gather_to(comm_channel *channel, zc_stream *s, uint32_t tag, comm_region *region,
                                 size_t offset, size_t slice, void *to, comm_ticket *ticket)
{
    (void)s;
    return defer_op_push(channel, (defer_op){.kind = OP_GATHER_TO, .tag = tag, .region = UNDER_REGION(region),
                                             .offset = offset, .size = slice, .to = to}, ticket);
}

static zc_status defer_words(comm_channel *channel, zc_stream *s, uint32_t tag, comm_region *region, size_t offset,
                             size_t words, uint64_t *to, comm_ticket *ticket)
{
    (void)s;
    return defer_op_push(channel, (defer_op){.kind = OP_WORDS, .tag = tag, .region = UNDER_REGION(region),
                                             .offset = offset, .size = words, .to = to}, ticket);
}

static zc_status defer_broadcast(comm_channel *channel, zc_stream *s, uint32_t tag, comm_region *region,
                                 size_t offset, size_t bytes, size_t root, comm_ticket *ticket)
{
    (void)s;
    return defer_op_push(channel, (defer_op){.kind = OP_BROADCAST, .tag = tag, .region = UNDER_REGION(region),
                                             .offset = offset, .size = bytes, .root = root}, ticket);
}

static zc_status defer_wait(comm_channel *channel, comm_ticket ticket, zc_stream *s)
{
    (void)s;
    defer_comm *comm = DEFER_COMM(channel->comm);
    return defer_push(comm->device, (defer_item){.kind = DEFER_WAIT, .ticket = ticket,
                                                .channel = (defer_channel *)(void *)channel});
}

static zc_status defer_test(comm_channel *channel, comm_ticket ticket, zc_stream *s, int *done)
{
    *done = 1;
    return defer_wait(channel, ticket, s);
}

static zc_status defer_wait_some(comm_channel *channel, comm_ticket ticket, zc_stream *s, uint64_t limit_ns, int *done)
{
    (void)limit_ns;
    return defer_test(channel, ticket, s, done);
}

static zc_status defer_progress(zc_comm *comm)
{
    (void)comm; /* as late as possible */
    return ZC_OK;
}

static zc_status defer_declare(zc_comm *comm, uint32_t line, uint64_t detail, const char *what)
{
    return comm_declare(DEFER_COMM(comm)->under, line, detail, what);
}

static size_t defer_behind(zc_comm *comm, uint32_t line, uint64_t number, char *text, size_t room_bytes)
{
    return comm_behind(DEFER_COMM(comm)->under, line, number, text, room_bytes);
}

static zc_status defer_exchange(comm_channel *channel, uint32_t tag, const char *what, const void *record,
                                void *records, size_t bytes)
{
    /* The host is about to wait for peers, whose streams may need what this one's stream has put off. */
    defer_release(DEFER_COMM(channel->comm)->device);
    return comm_exchange(UNDER(channel), tag, what, record, records, bytes);
}

static zc_status defer_array_all_reduce(zc_comm *comm, void *array, size_t count, zc_dtype dtype, comm_op op)
{
    return comm_array_all_reduce(DEFER_COMM(comm)->under, array, count, dtype, op);
}

static zc_status defer_array_broadcast(zc_comm *comm, void *array, size_t bytes, size_t root)
{
    return comm_array_broadcast(DEFER_COMM(comm)->under, array, bytes, root);
}

static void defer_poison(zc_comm *comm, zc_status status, const char *why)
{
    comm_poison(DEFER_COMM(comm)->under, status, why);
}

static void defer_close(zc_comm *comm)
{
    comm_close(DEFER_COMM(comm)->under);
    free(comm);
}

static const comm_ops defer_comm_ops = {
    .name = "defer", .ordered = 1, .channel_open = defer_channel_open, .channel_close = defer_channel_close,
    .region_alloc = defer_region_alloc, .region_grow = defer_region_grow, .region_free = defer_region_free,
    .reduce_scatter = defer_reduce, .all_gather = defer_gather, .all_gather_to = defer_gather_to,
    .all_reduce_words = defer_words, .broadcast = defer_broadcast, .test = defer_test, .wait = defer_wait,
    .wait_some = defer_wait_some, .progress = defer_progress, .declare = defer_declare,
    .behind = defer_behind, .exchange = defer_exchange,
    .array_all_reduce = defer_array_all_reduce, .array_broadcast = defer_array_broadcast, .poison = defer_poison,
    .close = defer_close,
};

/* Wraps a communicator; the pair (*comm, *device) belongs together. */
static inline void defer_wrap(zc_comm *under, zc_comm **comm, zc_device **device)
{
    defer_comm *c = calloc(1, sizeof *c);
    defer_device *d = calloc(1, sizeof *d);
    c->head = *under;
    c->head.ops = &defer_comm_ops;
    c->under = under;
    c->device = d;
    d->ops = defer_device_ops;
    if (defer_own_slots) {
        d->ops.slot_map = NULL;
        d->ops.slot_unmap = NULL;
    }
    d->head.ops = &d->ops;
    cpu_device_create(1, &d->under);
    pthread_mutex_init(&d->mutex, NULL);
    pthread_cond_init(&d->change, NULL);
    pthread_create(&d->thread, NULL, defer_work, d);
    *comm = &c->head;
    *device = &d->head;
}

#endif
