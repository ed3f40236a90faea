/*
 * A call: it goes to the hub, and the caller waits for what comes back, for bad
 * news, for the timeout, or for its interrupt callback to have had enough.
 */
#define _GNU_SOURCE
#include "hub_state.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#define LOOK_NS 40000000ull       /* between two questions to the interrupt callback */
#define LATE_NS 2000000000ull     /* for the hub to say who is missing */
#define BEHIND_NS 1000000000ull

/* At most so long; less if anything has changed. */
static void sleep_a_while(hub_world *world, uint64_t limit_ns)
{
    uint64_t until_ns = hub_now_ns() + limit_ns;
    struct timespec until = {(time_t)(until_ns / 1000000000u), (long)(until_ns % 1000000000u)};
    pthread_cond_timedwait(&world->changed, &world->mutex, &until);
}

/* Whether the caller's callback wants the wait to end. */
static int interrupted(hub_group *group, uint64_t *asked_ns)
{
    uint64_t now_ns = hub_now_ns();
    if (!group->public.interrupted || now_ns - *asked_ns < LOOK_NS)
        return 0;
    *asked_ns = now_ns;
    pthread_mutex_unlock(&group->world->mutex);
    int stop = group->public.interrupted(group->public.interrupt_context);
    pthread_mutex_lock(&group->world->mutex);
    return stop;
}

zc_status hub_busy_begin(hub_channel *channel, uint32_t tag)
{
    hub_group *group = channel->group;
    hub_tag *t = &channel->tag[tag];
    uint64_t asked_ns = hub_now_ns();
    while (t->busy) {
        if (pthread_equal(t->thread, pthread_self()))
            return zc_fail(ZC_ESTATE, "rank %zu: a collective call from inside a wait of the same communicator "
                           "(a signal handler?)", hub_rank(group));
        sleep_a_while(group->world, LOOK_NS);
        if (interrupted(group, &asked_ns) && t->busy)
            return hub_fail(group, ZC_EINTERRUPT, "rank %zu was interrupted while it waited for another of its "
                            "threads", hub_rank(group));
        ZC_TRY(hub_failure(group));
    }
    t->busy = 1;
    t->thread = pthread_self();
    return ZC_OK;
}

void hub_busy_end(hub_channel *channel, uint32_t tag)
{
    channel->tag[tag].busy = 0;
    pthread_cond_broadcast(&channel->group->world->changed);
}

static void begin(hub_call *call)
{
    hub_world *world = call->group->world;
    call->id = ++world->last_call;
    call->next = world->calls;
    world->calls = call;
}

static void end(hub_call *call)
{
    hub_call **at = &call->group->world->calls;
    while (*at != call)
        at = &(*at)->next;
    *at = call->next;
}

/* An answer that has come counts, whatever came after it. */
static zc_status wait_for(hub_call *call, uint64_t number)
{
    hub_group *group = call->group;
    hub_world *world = group->world;
    uint64_t start_ns = hub_now_ns(), asked_ns = start_ns, late_ns = 0;
    while (!call->done) {
        ZC_TRY(hub_failure(group));
        uint64_t now_ns = hub_now_ns(), spent_ns = now_ns - start_ns, timeout_ns = group->public.timeout_ns;
        if (!late_ns && spent_ns >= timeout_ns) {
            late_ns = now_ns;
            hub_header late = {.kind = HUB_LATE, .group = group->id, .call = call->id, .count = spent_ns};
            (void)hub_say(world, &late, NULL, NULL); /* without memory for it the next wait ends this one */
        }
        if (late_ns && now_ns - late_ns >= LATE_NS)
            return hub_fail(group, ZC_ETIMEOUT, "rank %zu waited %.1f s in %s (operation %llu), and rank 0, which knows "
                            "who is missing, does not answer", hub_rank(group), (double)spent_ns * 1e-9,
                            call->request->what, (unsigned long long)number);
        if (interrupted(group, &asked_ns) && !call->done)
            return hub_fail(group, ZC_EINTERRUPT, "rank %zu was interrupted in %s (operation %llu)", hub_rank(group),
                            call->request->what, (unsigned long long)number);
        if (call->done)
            break;
        uint64_t left_ns = late_ns ? LATE_NS - (now_ns - late_ns) : timeout_ns - spent_ns;
        if (group->failed == ZC_OK)
            sleep_a_while(world, group->public.interrupted && left_ns > LOOK_NS ? LOOK_NS : left_ns);
    }
    return call->status == ZC_OK ? ZC_OK : zc_fail(call->status, "%s", call->text);
}

zc_status hub_ask(hub_channel *channel, uint32_t tag, hub_request *request)
{
    hub_group *group = channel->group;
    hub_words words;
    char why[HUB_TEXT_BYTES];
    hub_span data = request->from;
    memset(&words, 0, sizeof words);
    snprintf(words.what, sizeof words.what, "%s", request->what);
    snprintf(words.name, sizeof words.name, "%s", request->name ? request->name : channel->name);
    if (request->status != ZC_OK) {
        snprintf(why, sizeof why, "%s", zc_last_error());
        data = (hub_span){why, strlen(why), 0, 0};
    }
    hub_call call = {.group = group, .request = request};
    hub_header header = {.kind = HUB_CALL, .operation = request->operation, .group = group->id, .channel = channel->id,
                         .tag = tag, .status = request->status, .number = ++channel->tag[tag].number,
                         .count = request->count, .root = request->root, .dtype = request->dtype, .op = request->op,
                         .several = (uint8_t)group->world->several};
    begin(&call);
    header.call = call.id;
    zc_status status = hub_say(group->world, &header, &words, &data);
    if (status != ZC_OK)
        hub_fail(group, status, "%s", zc_last_error()); /* the others wait for it */
    else
        status = wait_for(&call, header.number);
    end(&call);
    return status;
}

size_t hub_ask_behind(hub_group *group, uint32_t line, uint64_t number, char *text, size_t room_bytes)
{
    hub_world *world = group->world;
    char list[HUB_TEXT_BYTES + 1] = "";
    hub_request request = {.what = "behind", .to = {list, HUB_TEXT_BYTES, 0, 0}};
    hub_call call = {.group = group, .request = &request, .any_bytes = 1};
    hub_header header = {.kind = HUB_BEHIND, .group = group->id, .tag = line, .number = number};
    uint64_t start_ns = hub_now_ns(), spent_ns = 0;
    begin(&call);
    header.call = call.id;
    int asked = hub_say(world, &header, NULL, NULL) == ZC_OK;
    while (asked && !call.done && world->lost == ZC_OK && !group->closed && spent_ns < BEHIND_NS) {
        sleep_a_while(world, BEHIND_NS - spent_ns);
        spent_ns = hub_now_ns() - start_ns;
    }
    end(&call);
    if (!call.done)
        return 0;
    snprintf(text, room_bytes, "%s", list);
    return request.value < group->public.ranks ? (size_t)request.value : group->public.ranks;
}
