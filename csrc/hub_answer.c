/*
 * What ranks must have in common in one call, and what comes of it once all have
 * made it: the numbers are those of mem_array.c, as the same function combines the
 * same operands in the order of ranks.
 */
#include "hub_server.h"

#include "cpu_kernels.h"

#include <stdio.h>
#include <string.h>

/* ---- before ------------------------------------------------------------------ */

static int is_sized(const hub_header *header)
{
    return header->operation == HUB_EXCHANGE || header->operation == HUB_ALL_REDUCE ||
           header->operation == HUB_REDUCE_SCATTER || header->operation == HUB_ALL_GATHER;
}

/* Whether so many bytes may come with a call that its rank could do its part of. */
static int data_fit(const hub_circle *circle, size_t index, const hub_header *header)
{
    size_t bytes = header->bytes - sizeof(hub_words), elem_bytes = zc_dtype_bytes((zc_dtype)header->dtype);
    switch ((hub_operation)header->operation) {
    case HUB_EXCHANGE:
        return bytes == header->count && bytes <= COMM_EXCHANGE_BYTES;
    case HUB_ALL_REDUCE:
        return elem_bytes && header->op <= COMM_PROD && bytes % elem_bytes == 0;
    case HUB_REDUCE_SCATTER:
        return elem_bytes && header->op <= COMM_PROD && bytes % (elem_bytes * circle->ranks) == 0;
    case HUB_ALL_GATHER:
        return bytes <= hub_part_bytes(circle->ranks);
    case HUB_BROADCAST:
        return header->root < circle->ranks && (index == header->root || !bytes);
    default:
        return !bytes;
    }
}

const char *hub_call_check(const hub_circle *circle, size_t index, const hub_header *header)
{
    int votes = header->operation == HUB_CHANNEL_OPEN || header->operation == HUB_SPLIT;
    if (header->status != ZC_OK && !votes)
        return "a call that it cannot make";
    if ((header->operation == HUB_EXCHANGE) != (header->channel != HUB_BASE) || header->channel > circle->channels)
        return "a call on no channel of its group";
    if (header->operation == HUB_START && circle->id)
        return "a call out of turn";
    if (header->status != ZC_OK ? header->bytes - sizeof(hub_words) > HUB_TEXT_BYTES : !data_fit(circle, index, header))
        return "a call with data that do not fit it";
    return NULL;
}

int hub_call_agrees(const hub_meeting *meeting, const hub_header *header, const hub_words *words)
{
    const hub_header *first = &meeting->header;
    if (first->operation != header->operation || first->dtype != header->dtype || first->op != header->op ||
        first->root != header->root)
        return 0;
    if (header->operation == HUB_SPLIT)
        return 1; /* the color may differ */
    if (header->operation == HUB_CHANNEL_OPEN && strcmp(meeting->words.name, words->name) != 0)
        return 0;
    return first->count == header->count && (!is_sized(header) || first->bytes == header->bytes);
}

void hub_call_describe(const hub_header *header, const hub_words *words, char *text, size_t room_bytes)
{
    static const char *const ops[] = {"sum", "max", "min", "prod"};
    unsigned long long count = header->count;
    switch ((hub_operation)header->operation) {
    case HUB_ALL_REDUCE:
    case HUB_REDUCE_SCATTER:
        snprintf(text, room_bytes, "%s(%llu elements of %s, %s)", words->what, count, zc_dtype_name((zc_dtype)header->dtype),
                 ops[header->op]);
        break;
    case HUB_BROADCAST:
        snprintf(text, room_bytes, "%s(%llu bytes from rank %u)", words->what, count, header->root);
        break;
    case HUB_CHANNEL_OPEN:
        snprintf(text, room_bytes, "%s('%s', %llu tags)", words->what, words->name, count);
        break;
    case HUB_EXCHANGE:
        snprintf(text, room_bytes, "exchange '%s' (%llu bytes)", words->what, count);
        break;
    case HUB_ALL_GATHER:
        snprintf(text, room_bytes, "%s(%llu bytes)", words->what, count);
        break;
    default:
        snprintf(text, room_bytes, "%s()", words->what);
    }
}

/* ---- answers ------------------------------------------------------------------- */

/* `bytes` of a blob, in as many messages as it takes. */
static void answer(hub_server *server, const hub_meeting *meeting, size_t index, uint64_t value, hub_blob *blob,
                   size_t offset, size_t bytes)
{
    do {
        size_t part = bytes < HUB_PAYLOAD_BYTES ? bytes : HUB_PAYLOAD_BYTES;
        bytes -= part;
        hub_header header = {.kind = HUB_ANSWER, .operation = meeting->header.operation, .more = bytes != 0,
                             .group = meeting->circle->id, .call = meeting->part[index].call, .count = value,
                             .bytes = (uint32_t)part};
        hub_tell(server, meeting->circle->member[index], &header, NULL, part ? blob : NULL, offset);
        offset += part;
    } while (bytes);
}

/* One rank could not do its part: nobody does, and the group is as before. */
static int refused(hub_server *server, const hub_meeting *meeting)
{
    const hub_circle *circle = meeting->circle;
    size_t failed = 0;
    while (failed < circle->ranks && meeting->part[failed].status == ZC_OK)
        failed++;
    if (failed == circle->ranks)
        return 0;
    for (size_t m = 0; m < circle->ranks; m++) {
        const hub_part *part = &meeting->part[m], *why = part->status != ZC_OK ? part : &meeting->part[failed];
        char reason[HUB_TEXT_BYTES - 128], text[HUB_TEXT_BYTES];
        hub_text(reason, sizeof reason, hub_part_data(why), why->bytes);
        if (part->status != ZC_OK)
            snprintf(text, sizeof text, "%s", reason[0] ? reason : zc_status_text((zc_status)why->status));
        else
            snprintf(text, sizeof text, "rank %u could not do its part of '%s': %s", circle->member[failed],
                     meeting->words.what, reason);
        hub_header header = {.kind = HUB_REFUSED, .group = circle->id, .call = part->call, .status = why->status,
                             .bytes = (uint32_t)strlen(text)};
        hub_tell(server, circle->member[m], &header, text, NULL, 0);
    }
    return 1;
}

static hub_blob *blob_for(hub_server *server, const hub_meeting *meeting, size_t bytes)
{
    hub_blob *blob = hub_blob_new(bytes);
    if (!blob)
        hub_circle_fail(server, meeting->circle, server->ranks, ZC_ENOMEM, "rank 0 has no memory for %zu bytes of '%s'",
                        bytes, meeting->words.what);
    return blob;
}

/* All ranks' data, one behind the other, to all. */
static void gather(hub_server *server, const hub_meeting *meeting)
{
    size_t ranks = meeting->circle->ranks, bytes = meeting->part[0].bytes;
    hub_blob *all = blob_for(server, meeting, ranks * bytes);
    if (!all)
        return;
    for (size_t m = 0; m < ranks && bytes; m++)
        memcpy(all->data + m * bytes, hub_part_data(&meeting->part[m]), bytes);
    for (size_t m = 0; m < ranks; m++)
        answer(server, meeting, m, 0, all, 0, ranks * bytes);
    hub_blob_drop(all);
}

/* Everything to all, or to each rank its slice. */
static void reduce(hub_server *server, const hub_meeting *meeting, int scatter)
{
    zc_dtype dtype = (zc_dtype)meeting->header.dtype;
    size_t ranks = meeting->circle->ranks, bytes = meeting->part[0].bytes;
    const void *in[HUB_RANKS_MAX];
    hub_blob *sums = blob_for(server, meeting, bytes);
    if (!sums)
        return;
    for (size_t m = 0; m < ranks; m++)
        in[m] = hub_part_data(&meeting->part[m]);
    if (bytes) {
        unsigned long mode = cpu_mode_enter();
        cpu_kernels_get()->combine(sums->data, in, ranks, bytes / zc_dtype_bytes(dtype), dtype,
                                   (cpu_op)meeting->header.op);
        cpu_mode_leave(mode);
    }
    for (size_t m = 0; m < ranks; m++)
        answer(server, meeting, m, 0, sums, scatter ? m * (bytes / ranks) : 0, scatter ? bytes / ranks : bytes);
    hub_blob_drop(sums);
}

static void broadcast(hub_server *server, const hub_meeting *meeting)
{
    const hub_part *root = &meeting->part[meeting->header.root];
    for (size_t m = 0; m < meeting->circle->ranks; m++)
        answer(server, meeting, m, 0, root->blob, sizeof(hub_words), m == meeting->header.root ? 0 : root->bytes);
}

/* The ranks of one color; answered with the group's number and which members of the old one they are. */
static zc_status make_group(hub_server *server, const hub_meeting *meeting, size_t first)
{
    const hub_circle *circle = meeting->circle;
    uint64_t color = meeting->part[first].count;
    size_t ranks = 0;
    uint32_t *member = zc_malloc(circle->ranks * sizeof *member);
    hub_blob *places = hub_blob_new(circle->ranks * sizeof(uint32_t));
    hub_circle *made = NULL;
    for (size_t m = first; member && places && m < circle->ranks; m++)
        if (meeting->part[m].count == color) {
            uint32_t place = (uint32_t)m;
            memcpy(places->data + ranks * sizeof place, &place, sizeof place);
            member[ranks++] = circle->member[m];
        }
    if (ranks)
        made = hub_circle_new(server, member, ranks);
    for (size_t m = first; made && m < circle->ranks; m++)
        if (meeting->part[m].count == color)
            answer(server, meeting, m, made->id, places, 0, ranks * sizeof(uint32_t));
    hub_blob_drop(places);
    zc_free(member);
    return made ? ZC_OK : ZC_ENOMEM;
}

static void split(hub_server *server, const hub_meeting *meeting)
{
    const hub_circle *circle = meeting->circle;
    for (size_t m = 0; m < circle->ranks; m++) {
        size_t before = 0;
        if ((int64_t)meeting->part[m].count < 0) {
            answer(server, meeting, m, 0, NULL, 0, 0);
            continue;
        }
        while (meeting->part[before].count != meeting->part[m].count)
            before++;
        if (before == m && make_group(server, meeting, m) != ZC_OK) {
            hub_circle_fail(server, meeting->circle, server->ranks, ZC_ENOMEM, "rank 0 has no memory for a group");
            return;
        }
    }
}

void hub_meeting_answer(hub_server *server, hub_meeting *meeting)
{
    if (refused(server, meeting))
        return;
    switch ((hub_operation)meeting->header.operation) {
    case HUB_EXCHANGE:
    case HUB_ALL_GATHER:
        gather(server, meeting);
        break;
    case HUB_ALL_REDUCE:
        reduce(server, meeting, 0);
        break;
    case HUB_REDUCE_SCATTER:
        reduce(server, meeting, 1);
        break;
    case HUB_BROADCAST:
        broadcast(server, meeting);
        break;
    case HUB_SPLIT:
        split(server, meeting);
        break;
    case HUB_CHANNEL_OPEN:
        meeting->circle->channels++;
        /* fall through */
    default:
        for (size_t m = 0; m < meeting->circle->ranks; m++)
            answer(server, meeting, m, meeting->circle->channels, NULL, 0, 0);
    }
}
