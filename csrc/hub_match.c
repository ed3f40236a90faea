/*
 * The hub's groups: which calls belong together, who is waited for, and how a
 * group ends.  A group that has failed keeps nothing and answers nothing: its
 * members have been told, and what they said before they heard of it is dropped.
 */
#define _GNU_SOURCE
#include "hub_server.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* ---- circles and meetings --------------------------------------------------- */

static void meeting_free(hub_server *server, hub_meeting *meeting)
{
    hub_circle *circle = meeting->circle;
    for (size_t m = 0; m < circle->ranks; m++) {
        hub_part *part = &meeting->part[m];
        hub_conn *conn = &server->conn[circle->member[m]];
        if (!part->here)
            continue;
        conn->calls--;
        conn->kept_bytes -= part->bytes;
        if (conn->meeting == meeting)
            conn->meeting = NULL;
        hub_blob_drop(part->blob);
    }
    zc_free(meeting);
}

static void forget_meetings(hub_server *server, hub_circle *circle)
{
    while (circle->meetings) {
        hub_meeting *meeting = circle->meetings;
        circle->meetings = meeting->next;
        meeting_free(server, meeting);
    }
}

static void circle_free(hub_server *server, hub_circle *circle)
{
    forget_meetings(server, circle);
    for (uint32_t k = 0; k < COMM_LINES; k++)
        hub_line_clear(&circle->line[k]);
    zc_free(circle->member);
    zc_free(circle->closed);
    zc_free(circle);
}

hub_circle *hub_circle_new(hub_server *server, const uint32_t *member, size_t ranks)
{
    hub_circle *circle = zc_calloc(1, sizeof *circle);
    if (!circle)
        return NULL;
    circle->ranks = ranks;
    circle->member = zc_malloc(ranks * sizeof *circle->member);
    circle->closed = zc_calloc(ranks, 1);
    zc_status status = circle->member && circle->closed ? ZC_OK : ZC_ENOMEM;
    for (uint32_t k = 0; k < COMM_LINES && status == ZC_OK; k++)
        status = hub_line_init(&circle->line[k], ranks);
    if (status != ZC_OK) {
        circle_free(server, circle);
        return NULL;
    }
    memcpy(circle->member, member, ranks * sizeof *member);
    circle->id = server->last_circle++; /* the first is 0: all ranks */
    circle->next = server->circles;
    server->circles = circle;
    return circle;
}

void hub_circles_free(hub_server *server)
{
    while (server->circles) {
        hub_circle *circle = server->circles;
        server->circles = circle->next;
        circle_free(server, circle);
    }
}

/* Which member a rank is; circle->ranks: none. */
static size_t index_of(const hub_circle *circle, size_t rank)
{
    size_t low = 0, high = circle->ranks;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (circle->member[middle] < rank)
            low = middle + 1;
        else
            high = middle;
    }
    return low < circle->ranks && circle->member[low] == rank ? low : circle->ranks;
}

/* The circle of all ranks stays to the end. */
static void sweep(hub_server *server)
{
    for (hub_circle **at = &server->circles; *at;) {
        hub_circle *circle = *at;
        if (circle->id && circle->closed_count == circle->ranks) {
            *at = circle->next;
            circle_free(server, circle);
        } else {
            at = &circle->next;
        }
    }
}

/* ---- failures ------------------------------------------------------------------ */

void hub_circle_fail(hub_server *server, hub_circle *circle, size_t except, zc_status status, const char *format, ...)
{
    char text[HUB_TEXT_BYTES];
    if (circle->failed != ZC_OK)
        return;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    circle->failed = status;
    hub_header header = {.kind = HUB_FAILED, .group = circle->id, .status = status, .bytes = (uint32_t)strlen(text)};
    for (size_t m = 0; m < circle->ranks; m++)
        if (!circle->closed[m] && circle->member[m] != except)
            hub_tell(server, circle->member[m], &header, text, NULL, 0);
    forget_meetings(server, circle);
}

/* "; rank 2 waited for it in all_reduce (operation 3)", if one does. */
static const hub_meeting *awaits(const hub_circle *circle, size_t index, char *text, size_t room_bytes)
{
    text[0] = '\0';
    for (const hub_meeting *meeting = circle->meetings; meeting; meeting = meeting->next)
        if (!meeting->part[index].here) {
            snprintf(text, room_bytes, "; rank %u waited for it in %s (operation %llu)", circle->member[meeting->first],
                     meeting->words.what, (unsigned long long)meeting->header.number);
            return meeting;
        }
    return NULL;
}

/* It will not call any more, which is a loss only for who waits for it. */
static void part_from(hub_server *server, hub_circle *circle, size_t index)
{
    char waited[192], name[48];
    if (circle->closed[index])
        return;
    circle->closed[index] = 1;
    circle->closed_count++;
    if (awaits(circle, index, waited, sizeof waited))
        hub_circle_fail(server, circle, server->ranks, ZC_EPEERLOST, "%s has closed its communicator%s",
                        hub_name(server, circle->member[index], name), waited);
    hub_header header = {.kind = HUB_CLOSED, .group = circle->id, .root = (uint32_t)index};
    for (size_t m = 0; m < circle->ranks && circle->failed == ZC_OK; m++)
        if (!circle->closed[m])
            hub_tell(server, circle->member[m], &header, NULL, NULL, 0);
}

void hub_match_lost(hub_server *server, size_t rank)
{
    char waited[192], name[48];
    const hub_conn *conn = &server->conn[rank];
    for (hub_circle *circle = server->circles; circle; circle = circle->next) {
        size_t index = index_of(circle, rank);
        if (index == circle->ranks || circle->closed[index])
            continue;
        if (!conn->parted) {
            awaits(circle, index, waited, sizeof waited);
            hub_circle_fail(server, circle, rank, ZC_EPEERLOST, "%s is gone (%s)%s", hub_name(server, rank, name),
                            conn->reason, waited);
        }
        part_from(server, circle, index);
    }
    sweep(server);
}

static void read_words(hub_words *words, const hub_blob *blob)
{
    hub_words raw;
    memcpy(&raw, blob->data, sizeof raw);
    hub_text(words->what, sizeof words->what, raw.what, sizeof raw.what);
    hub_text(words->name, sizeof words->name, raw.name, sizeof raw.name);
}

static void time_out(hub_server *server, hub_circle *circle, hub_meeting *meeting, size_t index, double waited_s)
{
    char list[256] = "", doing[512] = "", where[HUB_NAME_BYTES + 48] = "";
    size_t used = 0, told = 0, missing = 0;
    uint64_t now_ns = hub_now_ns();
    hub_words words;
    read_words(&words, meeting->part[index].blob);
    for (size_t m = 0; m < circle->ranks; m++) {
        const hub_conn *conn = &server->conn[circle->member[m]];
        if (meeting->part[m].here)
            continue;
        if (used < sizeof list)
            used += (size_t)snprintf(list + used, sizeof list - used, "%s%u", used ? ", " : "", circle->member[m]);
        if (conn->did[0] && missing++ < 3)
            told += (size_t)snprintf(doing + told, sizeof doing - told, "%s rank %u called '%s' %.1f s ago%s",
                                     told ? "," : "; last", circle->member[m], conn->did,
                                     (double)(now_ns - conn->did_ns) * 1e-9, conn->calls ? " and waits in it" : "");
    }
    if (meeting->header.channel != HUB_BASE)
        snprintf(where, sizeof where, ", tag %u of channel '%s'", meeting->header.tag, words.name);
    hub_circle_fail(server, circle, server->ranks, ZC_ETIMEOUT, "rank %u waited %.1f s in %s (operation %llu%s); "
                    "missing: %s%s; all ranks must make this call, or the timeout is too short", circle->member[index],
                    waited_s, words.what, (unsigned long long)meeting->header.number, where, list, doing);
}

/* ---- calls ---------------------------------------------------------------------- */

static hub_meeting *find_meeting(const hub_circle *circle, const hub_header *header)
{
    hub_meeting *meeting = circle->meetings;
    while (meeting && (meeting->header.channel != header->channel || meeting->header.tag != header->tag ||
                       meeting->header.number != header->number))
        meeting = meeting->next;
    return meeting;
}

static hub_meeting *new_meeting(hub_circle *circle, size_t index, const hub_header *header, const hub_words *words)
{
    hub_meeting *meeting = zc_calloc(1, sizeof *meeting + circle->ranks * sizeof *meeting->part);
    if (!meeting)
        return NULL;
    meeting->circle = circle;
    meeting->header = *header;
    meeting->words = *words;
    meeting->first = index;
    meeting->next = circle->meetings;
    circle->meetings = meeting;
    return meeting;
}

static void mismatch(hub_server *server, const hub_meeting *meeting, size_t index, const hub_header *header,
                     const hub_words *words)
{
    char one[192], other[192], where[HUB_NAME_BYTES + 48] = "";
    hub_circle *circle = meeting->circle;
    hub_call_describe(&meeting->header, &meeting->words, one, sizeof one);
    hub_call_describe(header, words, other, sizeof other);
    if (header->channel != HUB_BASE)
        snprintf(where, sizeof where, " on tag %u of channel '%s'", header->tag, words->name);
    hub_circle_fail(server, circle, server->ranks, ZC_EMISMATCH, "rank %u called %s and rank %u called %s as operation "
                    "%llu%s; all ranks must make the same calls with the same sizes, in the same order",
                    circle->member[meeting->first], one, circle->member[index], other,
                    (unsigned long long)header->number, where);
}

static void complete(hub_server *server, hub_meeting *meeting)
{
    hub_circle *circle = meeting->circle;
    hub_meeting **at = &circle->meetings;
    while (*at != meeting)
        at = &(*at)->next;
    *at = meeting->next;
    hub_meeting_answer(server, meeting); /* may fail the circle, which forgets the others */
    meeting_free(server, meeting);
}

static void arrive(hub_server *server, hub_circle *circle, size_t index, hub_meeting *meeting, const hub_words *words,
                   hub_input *input)
{
    const hub_header *header = &input->header;
    hub_conn *conn = &server->conn[circle->member[index]];
    hub_part *part = &meeting->part[index];
    *part = (hub_part){.here = 1, .status = header->status, .call = header->call, .count = header->count,
                       .blob = input->blob, .bytes = header->bytes - sizeof(hub_words)};
    input->blob = NULL;
    meeting->here++;
    conn->calls++;
    conn->kept_bytes += part->bytes;
    conn->meeting = meeting;
    conn->several |= header->several;
    conn->did_ns = hub_now_ns();
    memcpy(conn->did, words->what, sizeof conn->did);
    if (meeting->here == circle->ranks) {
        complete(server, meeting);
        return;
    }
    for (size_t m = 0; m < circle->ranks; m++) {
        char waited[192], name[48];
        if (!circle->closed[m] || meeting->part[m].here)
            continue;
        awaits(circle, m, waited, sizeof waited);
        hub_circle_fail(server, circle, server->ranks, ZC_EPEERLOST, "%s has closed its communicator%s",
                        hub_name(server, circle->member[m], name), waited);
        return;
    }
}

static void call(hub_server *server, hub_circle *circle, size_t index, hub_input *input)
{
    const hub_header *header = &input->header;
    size_t rank = circle->member[index];
    hub_conn *conn = &server->conn[rank];
    const char *wrong = hub_call_check(circle, index, header);
    if (wrong || conn->calls >= HUB_CALLS_MOST || conn->kept_bytes > HUB_BACKLOG_BYTES) {
        hub_end(server, rank, "it sent %s", wrong ? wrong : "too many calls at once");
        return;
    }
    hub_words words;
    read_words(&words, input->blob);
    hub_meeting *meeting = find_meeting(circle, header);
    if (meeting && meeting->part[index].here) {
        hub_end(server, rank, "it sent a call twice");
        return;
    }
    if (meeting && !hub_call_agrees(meeting, header, &words)) {
        mismatch(server, meeting, index, header, &words);
        return;
    }
    if (!meeting)
        meeting = new_meeting(circle, index, header, &words);
    if (!meeting)
        hub_circle_fail(server, circle, server->ranks, ZC_ENOMEM, "rank 0 has no memory for '%s' of rank %zu", words.what,
                        rank);
    else
        arrive(server, circle, index, meeting, &words, input);
}

/* ---- ranks that wait for one another ------------------------------------------------ */

/* What a rank waits in, if it is known that it does nothing else. */
static const hub_meeting *stuck_in(const hub_server *server, size_t rank, uint64_t now_ns)
{
    const hub_conn *conn = &server->conn[rank];
    return conn->calls == 1 && !conn->several && now_ns - conn->did_ns >= server->beat_ns ? conn->meeting : NULL;
}

/* The first member from `from` on that a meeting still needs. */
static size_t next_missing(const hub_meeting *meeting, size_t from)
{
    while (from < meeting->circle->ranks && meeting->part[from].here)
        from++;
    return from;
}

static void fail_cycle(hub_server *server, const uint32_t *path, size_t length)
{
    char text[HUB_TEXT_BYTES - 128];
    size_t used = 0;
    for (size_t at = 0; at < length && used < sizeof text; at++) {
        const char *what = server->conn[path[at]].did;
        used += (size_t)(at ? snprintf(text + used, sizeof text - used, ", which waits in '%s' for rank %u", what,
                                       path[(at + 1) % length])
                            : snprintf(text, sizeof text, "rank %u waits in '%s' for rank %u", path[0], what,
                                       path[1 % length]));
    }
    for (size_t at = 0; at < length; at++) {
        hub_meeting *meeting = server->conn[path[at]].meeting; /* gone with the circle, if that has failed just now */
        if (meeting)
            hub_circle_fail(server, meeting->circle, server->ranks, ZC_EMISMATCH,
                            "%s; all ranks must make the same calls in the same order", text);
    }
}

/*
 * A walk along who waits for whom, from each rank that was not seen before: coming
 * back to a rank of the way means that nobody on it can ever go on.
 */
static void look_for_cycles(hub_server *server, uint64_t now_ns)
{
    uint32_t *path = server->path, *turn = path + server->ranks; /* turn: 0 not seen; else 1 + where to look next */
    memset(turn, 0, server->ranks * sizeof *turn);
    for (size_t start = 0; start < server->ranks; start++) {
        size_t length = 0;
        if (turn[start] == 0 && stuck_in(server, start, now_ns)) {
            path[length++] = (uint32_t)start;
            turn[start] = 1;
        }
        while (length) {
            uint32_t here = path[length - 1];
            const hub_meeting *meeting = server->conn[here].meeting;
            size_t index = next_missing(meeting, turn[here] - 1);
            if (index == meeting->circle->ranks) {
                length--; /* seen, and on no way */
                continue;
            }
            turn[here] = (uint32_t)index + 2;
            uint32_t next = meeting->circle->member[index];
            for (size_t at = 0; at < length; at++)
                if (path[at] == next) {
                    fail_cycle(server, path + at, length - at);
                    return;
                }
            if (turn[next] == 0 && stuck_in(server, next, now_ns)) {
                path[length++] = next;
                turn[next] = 1;
            }
        }
    }
}

int hub_match_hopes(const hub_server *server, size_t rank)
{
    for (const hub_circle *circle = server->circles; circle; circle = circle->next) {
        size_t index = index_of(circle, rank);
        if (index < circle->ranks && !circle->closed[index] && circle->failed == ZC_OK)
            return 1;
    }
    return 0;
}

void hub_match_tick(hub_server *server, uint64_t now_ns)
{
    look_for_cycles(server, now_ns);
}

/* ---- the rest ------------------------------------------------------------------------ */

static void late(hub_server *server, hub_circle *circle, size_t index, const hub_header *header)
{
    for (hub_meeting *meeting = circle->meetings; meeting; meeting = meeting->next)
        if (meeting->part[index].here && meeting->part[index].call == header->call) {
            time_out(server, circle, meeting, index, (double)header->count * 1e-9);
            return;
        }
    /* otherwise the answer is under way */
}

static void poison(hub_server *server, hub_circle *circle, size_t rank, const hub_input *input)
{
    char text[HUB_TEXT_BYTES - 64];
    hub_text(text, sizeof text, hub_input_payload(input), input->header.bytes);
    hub_circle_fail(server, circle, rank, (zc_status)input->header.status, "rank %zu reported: %s", rank, text);
}

void hub_match(hub_server *server, size_t rank, hub_input *input)
{
    const hub_header *header = &input->header;
    if (header->kind == HUB_BYE) {
        server->conn[rank].parted = 1;
        return;
    }
    hub_circle *circle = server->circles;
    while (circle && circle->id != header->group)
        circle = circle->next;
    size_t index = circle ? index_of(circle, rank) : 0;
    if (!circle || index == circle->ranks || circle->closed[index]) {
        hub_end(server, rank, "it spoke to a group that it is not in");
        return;
    }
    if (header->kind == HUB_CLOSE) {
        part_from(server, circle, index);
        sweep(server);
        return;
    }
    if (header->kind == HUB_BEHIND)
        hub_line_behind(server, circle, index, header);
    if (circle->failed != ZC_OK)
        return;
    if (header->kind == HUB_CALL) {
        call(server, circle, index, input);
    } else if (header->kind == HUB_LATE) {
        late(server, circle, index, header);
    } else if (header->kind == HUB_POISON) {
        poison(server, circle, rank, input);
    } else if (header->kind == HUB_DECLARE) {
        hub_words words;
        read_words(&words, input->blob);
        hub_line_declare(server, circle, index, header, words.what);
    }
}
