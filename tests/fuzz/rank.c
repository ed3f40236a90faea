/*
 * A rank (csrc/hub_reader.c and its files) whose hub may say anything.
 *
 * An input is which calls the rank has under way, and what the hub sends: messages, whole or cut, with fields that
 * are right, at some limit, or wrong.  The rank's calls do not wait here, and its reader is called from this thread,
 * so the same input always does the same.
 *
 *   an answer never writes outside the memory of its call (the address sanitizer watches), nor counts twice
 *   a call that is done has all its bytes, or a reason why not
 *   a group that was made has this rank in it, and stands once in the world's list
 *   what the rank sends is well-formed
 *   nothing is left: no memory, no descriptor
 */
#include "hub_reader.c"

#include "target.h"
#include "together.h"

#include <sys/eventfd.h>

#define RANKS 3u
#define CALLS 6u

/* A call under way, and the memory of its answer. */
typedef struct asked {
    hub_call call;
    hub_request request;
    char *memory;
    size_t bytes;
    int was_done;
    uint64_t value; /* when it was done */
} asked;

static hub_world *world_of(int fd)
{
    size_t hosts[RANKS] = {0, 0, 1};
    hub_comm_config config = {.rank = 1, .ranks = RANKS, .hosts = hosts, .beat_ns = SECOND};
    hub_world *world;
    MUST(hub_world_new(&config, &world) == ZC_OK, "%s", zc_last_error());
    hub_fork_keep(&world->socket, fd);
    world->out_room = 1 << 16;
    world->out = malloc(world->out_room);
    world->input.from_hub = 1;
    world->input.blob = hub_blob_new(HUB_PAYLOAD_BYTES);
    MUST(world->out && world->input.blob, "no memory");
    world->wake_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    world->unsendable = 0;
    return world;
}

static hub_group *new_group(hub_world *world, size_t ranks)
{
    hub_group *group = hub_group_new(world, ranks);
    MUST(group, "no memory");
    for (size_t q = 0; q < ranks; q++)
        group->member[q] = (uint32_t)q;
    return group;
}

/* As hub_ask begins one. */
static void ask(hub_world *world, hub_group *group, asked *a, choices *c)
{
    static const uint16_t sizes[] = {0, 1, 8, 24, 900, 3000};
    a->call = (hub_call){.group = group, .id = ++world->last_call, .request = &a->request, .next = world->calls};
    a->request = (hub_request){.what = "call", .operation = (uint8_t)(1 + take_below(c, HUB_OPERATION_END - 1))};
    if (a->request.operation == HUB_SPLIT) {
        a->request.made = take_below(c, 4) ? new_group(world, group->public.ranks) : NULL;
    } else {
        a->bytes = sizes[take_below(c, sizeof sizes / sizeof *sizes)];
        a->request.to.bytes = a->bytes;
        a->call.any_bytes = take_below(c, 4) == 0; /* hub_ask_behind */
        if (a->request.operation == HUB_ALL_GATHER && a->bytes >= 24) { /* three pieces, apart */
            a->request.to.piece_bytes = a->bytes / RANKS;
            a->request.to.stride_bytes = a->bytes / RANKS + 7;
            a->request.to.bytes = a->request.to.piece_bytes * RANKS;
        }
        size_t room = a->request.to.piece_bytes ? (RANKS - 1) * a->request.to.stride_bytes + a->request.to.piece_bytes
                                                : a->bytes;
        a->memory = malloc(room ? room : 1);
        MUST(a->memory, "no memory");
        a->request.to.base = a->memory;
        a->bytes = a->request.to.bytes;
    }
    world->calls = &a->call;
}

static void check(hub_world *world, asked *a)
{
    const hub_call *call = &a->call;
    MUST(!a->was_done || (call->done && a->value == a->request.value), "call %llu was answered twice",
         (unsigned long long)call->id);
    MUST(call->got_bytes <= a->bytes, "%zu bytes of %zu", call->got_bytes, a->bytes);
    if (!call->done || a->was_done)
        return;
    a->was_done = 1;
    a->value = a->request.value;
    MUST(call->status == ZC_OK || zc_status_is_failure(call->status), "status %d", (int)call->status);
    if (call->status == ZC_OK && a->request.operation != HUB_SPLIT && !call->any_bytes)
        MUST(call->got_bytes == a->bytes, "done with %zu bytes of %zu", call->got_bytes, a->bytes);
    const hub_group *made = a->request.made, *group = world->groups;
    if (call->status != ZC_OK || !made)
        return;
    size_t found = 0, steps = 0;
    for (; group; group = group->next) {
        found += group == made;
        MUST(++steps <= 2 * CALLS, "the list of groups goes round");
    }
    MUST(found == 1, "the group is %zu times in the list", found);
    MUST(made->public.ranks <= made->public.rank + RANKS && made->member[made->public.rank] == world->rank, "not in its group");
}

static void say(int fd, choices *c)
{
    static char payload[4096];
    static const uint8_t kinds[] = {HUB_ANSWER, HUB_ANSWER, HUB_ANSWER, HUB_ANSWER, HUB_REFUSED, HUB_FAILED, HUB_CLOSED,
                                    HUB_BEAT, HUB_ENDED, HUB_CALL};
    hub_header h = {.magic = HUB_MAGIC, .kind = kinds[take_below(c, sizeof kinds)], .call = 1 + take_below(c, CALLS)};
    uint32_t places[] = {0, 1, 2};
    size_t cut = SIZE_MAX;
    memset(payload, 'x', sizeof payload);
    if (h.kind == HUB_ANSWER) {
        static const uint16_t sizes[] = {0, 1, 8, 12, 24, 900, 3000};
        h.operation = take_below(c, 4) ? 0 : HUB_SPLIT;
        h.more = take_below(c, 4) == 0;
        h.count = take_below(c, 8);
        h.bytes = sizes[take_below(c, sizeof sizes / sizeof *sizes)];
        unsigned first = take_below(c, 3);
        memcpy(payload, places + first, sizeof places - first * sizeof *places);
    }
    if (h.kind == HUB_REFUSED || h.kind == HUB_FAILED || h.kind == HUB_ENDED)
        h.bytes = 1 + take_below(c, 100);
    if (h.kind == HUB_REFUSED || h.kind == HUB_FAILED)
        h.status = ZC_ENOMEM;
    if (h.kind == HUB_CLOSED)
        h.root = take_below(c, 4);
    for (unsigned changes = take_below(c, 8) / 5; changes; changes--) {
        uint64_t value = take_number(c);
        switch (take_below(c, 12)) {
        case 0: h.magic = (uint32_t)value; break;
        case 1: h.kind = (uint16_t)value; break;
        case 2: h.operation = (uint8_t)value; break;
        case 3: h.group = (uint32_t)value; break;
        case 4: h.status = (int32_t)(0 - value); break;
        case 5: h.call = value; break;
        case 6: h.count = value; break;
        case 7: h.root = (uint32_t)value; break;
        case 8: h.bytes = (uint32_t)value; break;
        case 9: cut = value; break;
        case 10: h.tag = (uint32_t)value; break;
        default: take_bytes(c, payload, value % 64);
        }
    }
    char message[sizeof h + sizeof payload];
    size_t bytes = sizeof h + (h.bytes < sizeof payload ? h.bytes : sizeof payload);
    memcpy(message, &h, sizeof h);
    memcpy(message + sizeof h, payload, bytes - sizeof h);
    send(fd, message, cut < bytes ? cut : bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* What the rank has said is what the hub would take. */
static void hear(int fd, hub_input *input)
{
    char why[160];
    hub_got got;
    while ((got = hub_input_take(input, fd, why, sizeof why)) == HUB_GOT_MESSAGE)
        continue;
    MUST(got != HUB_GOT_END || !strncmp(why, "its connection ended", 20), "the rank: %s", why);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    choices c = {data, bytes};
    size_t fds = count_fds();
    int pair[2], more = 1;
    asked calls[CALLS] = {0};
    hub_input input = {0};
    uint64_t heard_ns = 0;
    MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "socketpair");
    hub_world *world = world_of(pair[0]);
    hub_group *all = new_group(world, RANKS);
    hub_group_join(all, RANKS);
    all->id = 0;
    unsigned count = 1 + take_below(&c, CALLS);
    for (unsigned k = 0; k < count; k++)
        ask(world, all, &calls[k], &c);
    for (unsigned messages = 0; c.left && more && messages < 200; messages++) {
        say(pair[1], &c);
        if (take_below(&c, 4))
            more = take_all(world, &heard_ns);
        for (unsigned k = 0; k < count; k++)
            check(world, &calls[k]);
        hear(pair[1], &input);
    }
    MUST(world->lost == ZC_OK || all->failed != ZC_OK, "the world is lost, and its group goes on");
    MUST(all->failed == ZC_OK || zc_status_is_failure(all->failed), "status %d", (int)all->failed);
    for (unsigned k = 0; k < count; k++) {
        free(calls[k].memory);
        hub_group *made = calls[k].request.made, **at = &world->groups;
        while (made && *at && *at != made)
            at = &(*at)->next;
        if (made && *at)
            *at = made->next;
        hub_group_drop(made);
    }
    hub_group_drop(all);
    world->groups = NULL;
    close(pair[1]);
    hub_blob_drop(input.blob);
    hub_world_destroy(world);
    MUST(count_fds() == fds, "%zu descriptors, there were %zu", count_fds(), fds);
    return 0;
}
