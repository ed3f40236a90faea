/*
 * The thread of a rank that reads its connection: it brings answers to who waits for
 * them, and bad news to the groups, also while nobody waits.
 */
#define _GNU_SOURCE
#include "hub_state.h"

#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define FAREWELL_NS 1000000000ull /* for the hub to take BYE */

/* ---- what comes in; the mutex is held ------------------------------------------------ */

static hub_group *find_group(hub_world *world, uint32_t id)
{
    hub_group *group = world->groups;
    while (group && group->id != id)
        group = group->next;
    return group; /* NULL: closed in the meantime */
}

static hub_call *find_call(hub_world *world, uint64_t id)
{
    hub_call *call = world->calls;
    while (call && call->id != id)
        call = call->next;
    return call; /* NULL: given up in the meantime */
}

/* Bytes of an answer from `at` on go to their places. */
static void get_span(const hub_span *span, size_t at, const char *from, size_t bytes)
{
    size_t piece = span->piece_bytes ? span->piece_bytes : span->bytes;
    while (bytes) {
        size_t inside = at % piece, part = piece - inside < bytes ? piece - inside : bytes;
        memcpy(span->base + at / piece * span->stride_bytes + inside, from, part);
        at += part;
        from += part;
        bytes -= part;
    }
}

/* The answer of a split: which members of the old group are in the new one. */
static int adopt(const hub_call *call, uint32_t id, const char *places, size_t bytes)
{
    hub_group *made = call->request->made, *group = call->group;
    size_t ranks = bytes / sizeof(uint32_t), own = 0;
    if (!made || bytes % sizeof(uint32_t) || ranks > group->public.ranks || id == HUB_OF_ONE ||
        find_group(group->world, id))
        return !made && !bytes;
    for (size_t q = 0, before = 0; q < ranks; q++) {
        uint32_t place;
        memcpy(&place, places + q * sizeof place, sizeof place);
        if (place >= group->public.ranks || (q && place <= before))
            return 0;
        before = place;
        own += place == group->public.rank;
        made->member[q] = group->member[place];
    }
    if (own != 1)
        return 0;
    made->id = id;
    hub_group_join(made, ranks);
    return 1;
}

static const char *take_answer(hub_world *world, const hub_header *header, const char *payload)
{
    static const char wrong[] = "an answer that does not fit the call";
    hub_call *call = find_call(world, header->call);
    if (call && call->done)
        return "two answers to one call";
    if (!call) { /* others may wait for this rank in a group that it will never hear of */
        if (header->operation == HUB_SPLIT && header->bytes)
            hub_say(world, &(hub_header){.kind = HUB_CLOSE, .group = (uint32_t)header->count}, NULL, NULL);
        return NULL;
    }
    hub_span *to = &call->request->to;
    if (call->request->operation == HUB_SPLIT) {
        if (header->more || !adopt(call, (uint32_t)header->count, payload, header->bytes))
            return wrong;
    } else {
        if (header->bytes > to->bytes - call->got_bytes)
            return wrong;
        get_span(to, call->got_bytes, payload, header->bytes);
        call->got_bytes += header->bytes;
        if (!header->more && !call->any_bytes && call->got_bytes != to->bytes)
            return wrong;
    }
    call->request->value = header->count;
    call->done = !header->more;
    return NULL;
}

/* NULL, or what is wrong with the message. */
static const char *take_message(hub_world *world)
{
    const hub_header *header = &world->input.header;
    const char *payload = hub_input_payload(&world->input);
    char text[HUB_TEXT_BYTES + 1];
    hub_text(text, sizeof text, payload, header->bytes);
    hub_group *group = find_group(world, header->group);
    hub_call *call;
    const char *wrong = NULL;
    switch ((hub_kind)header->kind) {
    case HUB_ANSWER:
        wrong = take_answer(world, header, payload);
        break;
    case HUB_REFUSED:
        if ((call = find_call(world, header->call)) != NULL && call->done) {
            wrong = "two answers to one call";
        } else if (call) {
            call->status = (zc_status)header->status;
            snprintf(call->text, sizeof call->text, "%s", text);
            call->done = 1;
        }
        break;
    case HUB_FAILED:
        if (group && group->failed == ZC_OK)
            hub_set_failed(group, (zc_status)header->status, text);
        break;
    case HUB_CLOSED:
        if (group && header->root >= group->public.ranks)
            wrong = "word of a member that there is not";
        else if (group && group->parted == group->public.ranks)
            group->parted = header->root;
        break;
    case HUB_ENDED:
        hub_lose(world, ZC_EPEERLOST, text);
        break;
    default: /* a beat */
        break;
    }
    pthread_cond_broadcast(&world->changed);
    return wrong;
}

/* ---- the thread ------------------------------------------------------------------------- */

static void lose(hub_world *world, const char *why)
{
    char text[256];
    snprintf(text, sizeof text, "rank 0 is gone (%s); it held the ranks of this job together", why);
    pthread_mutex_lock(&world->mutex);
    if (!world->ending)
        hub_lose(world, ZC_EPEERLOST, text);
    pthread_mutex_unlock(&world->mutex);
    shutdown(world->socket.fd, SHUT_RDWR);
}

/* All messages that have arrived. 0: no more will come. */
static int take_all(hub_world *world, uint64_t *heard_ns)
{
    char why[160], what[128];
    hub_got got;
    while ((got = hub_input_take(&world->input, world->socket.fd, why, sizeof why)) == HUB_GOT_MESSAGE) {
        *heard_ns = hub_now_ns();
        pthread_mutex_lock(&world->mutex);
        const char *wrong = take_message(world);
        int over = world->lost != ZC_OK;
        pthread_mutex_unlock(&world->mutex);
        if (wrong) {
            snprintf(what, sizeof what, "it sent %s", wrong);
            lose(world, what);
        }
        if (wrong || over)
            return 0;
    }
    if (got == HUB_GOT_END)
        lose(world, why);
    return got != HUB_GOT_END;
}

/* Sends what is left, a beat if it is time for one; what to wait for. */
static short send_rest(hub_world *world, uint64_t now_ns, uint64_t *beat_ns, uint64_t *farewell_ns)
{
    pthread_mutex_lock(&world->mutex);
    if (now_ns >= *beat_ns) {
        *beat_ns = now_ns + world->beat_ns / 2;
        hub_say(world, &(hub_header){.kind = HUB_BEAT}, NULL, NULL); /* without memory there is one less */
    }
    hub_flush(world);
    if (world->ending && !*farewell_ns)
        *farewell_ns = now_ns + FAREWELL_NS;
    short events = (short)(POLLIN | (world->out_end ? POLLOUT : 0));
    pthread_mutex_unlock(&world->mutex);
    return events;
}

static void *read_messages(void *context)
{
    hub_world *world = context;
    uint64_t heard_ns = 0, beat_ns = 0, farewell_ns = 0; /* heard: 0 until the hub is there */
    for (;;) {
        uint64_t now_ns = hub_now_ns();
        short events = send_rest(world, now_ns, &beat_ns, &farewell_ns);
        uint64_t until_ns = farewell_ns && farewell_ns < beat_ns ? farewell_ns : beat_ns;
        struct pollfd polled[2] = {{.fd = world->socket.fd, .events = events}, {.fd = world->wake_fd, .events = POLLIN}};
        int left_ms = until_ns > now_ns ? (int)((until_ns - now_ns) / 1000000u) + 1 : 0;
        poll(polled, 2, left_ms);
        if (polled[1].revents) {
            uint64_t count;
            if (read(world->wake_fd, &count, sizeof count) < 0)
                count = 0; /* nothing to take back */
        }
        uint64_t before_ns = heard_ns;
        if (!take_all(world, &heard_ns))
            return NULL;
        now_ns = hub_now_ns();
        if (heard_ns && heard_ns == before_ns && now_ns - heard_ns > HUB_SILENCE_BEATS * world->beat_ns) {
            char why[96];
            snprintf(why, sizeof why, "nothing came from it for %.1f s", (double)(now_ns - heard_ns) * 1e-9);
            lose(world, why);
            return NULL;
        }
        if (farewell_ns && now_ns >= farewell_ns)
            return NULL;
    }
}

zc_status hub_reader_start(hub_world *world)
{
    ZC_TRY(hub_thread(&world->reader, read_messages, world, world->rank));
    world->reading = 1;
    return ZC_OK;
}

void hub_reader_end(hub_world *world)
{
    uint64_t one = 1;
    pthread_mutex_lock(&world->mutex);
    if (hub_say(world, &(hub_header){.kind = HUB_BYE}, NULL, NULL) != ZC_OK)
        shutdown(world->socket.fd, SHUT_RDWR);
    world->ending = 1;
    pthread_mutex_unlock(&world->mutex);
    if (write(world->wake_fd, &one, sizeof one) < 0)
        one = 0; /* it is awake */
    pthread_join(world->reader, NULL);
}
