/*
 * The hub's loop: who has sent something, who can take more, who is silent.
 */
#define _GNU_SOURCE
#include "hub_server.h"
#include "zc_point.h"

#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "hub_comm.h"

#define MESSAGES_A_TURN 16 /* of one rank, before the others are looked at */

/* The rest of a message that could not be sent at once. */
struct hub_item {
    hub_item *next;
    size_t sent, head_bytes, blob_bytes;
    hub_blob *blob; /* NULL: all of it is in the head */
    size_t offset;
    char head[];
};

/* ---- sending --------------------------------------------------------------- */

static void drop_items(hub_conn *conn)
{
    while (conn->first) {
        hub_item *item = conn->first;
        conn->first = item->next;
        conn->kept_bytes -= item->head_bytes + item->blob_bytes;
        hub_blob_drop(item->blob);
        zc_free(item);
    }
    conn->last = NULL;
}

static void flush(hub_server *server, size_t rank)
{
    hub_conn *conn = &server->conn[rank];
    while (conn->first) {
        hub_item *item = conn->first;
        size_t head = item->sent < item->head_bytes ? item->head_bytes - item->sent : 0;
        size_t in_blob = head ? 0 : item->sent - item->head_bytes;
        ZC_POINT("hub: what is left is to go");
        ssize_t went = hub_send(conn->socket.fd, item->head + (item->head_bytes - head), head,
                                item->blob ? item->blob->data + item->offset + in_blob : NULL,
                                item->blob_bytes - in_blob);
        if (went < 0)
            conn->deaf = 1;
        if (went <= 0)
            break;
        item->sent += (size_t)went;
        if (item->sent < item->head_bytes + item->blob_bytes)
            continue;
        conn->first = item->next;
        if (!conn->first)
            conn->last = NULL;
        conn->kept_bytes -= item->head_bytes + item->blob_bytes;
        hub_blob_drop(item->blob);
        zc_free(item);
    }
    if (conn->deaf)
        drop_items(conn);
}

/* What did not go at once waits in a queue. */
static void keep(hub_server *server, size_t rank, const hub_header *header, const void *text, hub_blob *blob,
                 size_t offset, size_t sent)
{
    hub_conn *conn = &server->conn[rank];
    size_t head_bytes = sizeof *header + (blob ? 0 : header->bytes);
    hub_item *item = zc_malloc(sizeof *item + head_bytes);
    if (!item) {
        hub_end(server, rank, "rank 0 has no memory for what it does not take");
        return;
    }
    *item = (hub_item){.sent = sent, .head_bytes = head_bytes, .blob_bytes = blob ? header->bytes : 0,
                       .blob = blob ? hub_blob_keep(blob) : NULL, .offset = offset};
    memcpy(item->head, header, sizeof *header);
    if (!blob && header->bytes)
        memcpy(item->head + sizeof *header, text, header->bytes);
    conn->kept_bytes += head_bytes + item->blob_bytes;
    if (conn->last)
        conn->last->next = item;
    else
        conn->first = item;
    conn->last = item;
    if (conn->kept_bytes > HUB_BACKLOG_BYTES)
        hub_end(server, rank, "it does not take what it is sent (%zu MiB)", conn->kept_bytes >> 20);
}

void hub_tell(hub_server *server, size_t rank, const hub_header *header, const void *text, hub_blob *blob,
              size_t offset)
{
    hub_conn *conn = &server->conn[rank];
    if (conn->socket.fd < 0 || conn->ending || conn->parted || conn->deaf)
        return;
    hub_header whole = *header;
    whole.magic = HUB_MAGIC;
    ssize_t sent = 0;
    if (!conn->first) {
        ZC_POINT("hub: it is to send");
        sent = hub_send(conn->socket.fd, &whole, sizeof whole, blob ? blob->data + offset : text, whole.bytes);
        ZC_POINT("hub: it has sent");
        if (sent < 0)
            conn->deaf = 1;
        if (sent < 0 || (size_t)sent == sizeof whole + whole.bytes)
            return;
    }
    keep(server, rank, &whole, text, blob, offset, (size_t)sent);
}

/* ---- ends -------------------------------------------------------------------- */

const char *hub_name(const hub_server *server, size_t rank, char text[48])
{
    if (server->conn[rank].greeted)
        snprintf(text, 48, "rank %zu (pid %llu)", rank, (unsigned long long)server->conn[rank].pid);
    else
        snprintf(text, 48, "rank %zu", rank);
    return text;
}

void hub_end(hub_server *server, size_t rank, const char *format, ...)
{
    hub_conn *conn = &server->conn[rank];
    if (conn->ending || conn->socket.fd < 0)
        return;
    conn->ending = 1;
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(conn->reason, sizeof conn->reason, format, arguments);
    va_end(arguments);
}

static void close_conn(hub_conn *conn)
{
    hub_fork_close(&conn->socket);
    drop_items(conn);
    hub_blob_drop(conn->input.blob);
    conn->input.blob = NULL;
}

/* The last word, for what it is worth: a rank that can still listen learns why. */
static void last_word(hub_server *server, size_t rank, const char *text)
{
    hub_conn *conn = &server->conn[rank];
    hub_header header = {.magic = HUB_MAGIC, .kind = HUB_ENDED, .bytes = (uint32_t)strlen(text)};
    flush(server, rank);
    if (!conn->first)
        hub_send(conn->socket.fd, &header, sizeof header, text, header.bytes);
}

/* Closes what is to end; each end may bring about others. */
static void settle_ends(hub_server *server)
{
    for (size_t r = 0; r < server->ranks; r++) {
        hub_conn *conn = &server->conn[r];
        if (conn->socket.fd < 0 || (!conn->ending && !conn->parted))
            continue;
        if (!conn->parted) {
            char text[256];
            snprintf(text, sizeof text, "rank 0 gave up rank %zu: %s", r, conn->reason);
            last_word(server, r, text);
        }
        conn->ending = 1;
        close_conn(conn);
        hub_match_lost(server, r);
        if (r == 0)
            server->linger_ns = hub_now_ns() + HUB_LINGER_BEATS * server->beat_ns;
        r = (size_t)-1;
    }
}

/* ---- receiving ----------------------------------------------------------------- */

static void greet(hub_server *server, size_t rank, const hub_header *header)
{
    hub_conn *conn = &server->conn[rank];
    if (header->kind != HUB_HELLO) {
        hub_end(server, rank, "it did not say who it is");
        return;
    }
    conn->greeted = 1;
    conn->pid = header->count;
    if (header->root != rank || header->number != server->ranks)
        hub_circle_fail(server, server->world, server->ranks, ZC_EMISMATCH, "rank 0 has %zu ranks and on one of its "
                        "sockets expects rank %zu, but there is rank %u of %llu; all ranks must be started alike",
                        server->ranks, rank, header->root, (unsigned long long)header->number);
}

static void take(hub_server *server, size_t rank)
{
    hub_conn *conn = &server->conn[rank];
    for (int turn = 0; turn < MESSAGES_A_TURN && !conn->ending && !conn->parted; turn++) {
        char why[128];
        hub_got got = hub_input_take(&conn->input, conn->socket.fd, why, sizeof why);
        if (got == HUB_GOT_END)
            hub_end(server, rank, "%s", why);
        if (got != HUB_GOT_MESSAGE)
            return;
        conn->heard_ns = hub_now_ns();
        if (!conn->greeted)
            greet(server, rank, &conn->input.header);
        else if (conn->input.header.kind == HUB_HELLO)
            hub_end(server, rank, "it said twice who it is");
        else if (conn->input.header.kind != HUB_BEAT)
            hub_match(server, rank, &conn->input);
        hub_blob_drop(conn->input.blob);
        conn->input.blob = NULL;
    }
}

/* ---- the loop -------------------------------------------------------------------- */

static void tick(hub_server *server)
{
    uint64_t now_ns = hub_now_ns();
    if (now_ns < server->tick_ns)
        return;
    server->tick_ns = now_ns + server->beat_ns / 2;
    for (size_t r = 0; r < server->ranks; r++) {
        hub_conn *conn = &server->conn[r];
        if (conn->socket.fd < 0 || !conn->greeted)
            continue;
        if (now_ns - conn->heard_ns > HUB_SILENCE_BEATS * server->beat_ns)
            hub_end(server, r, "nothing came from it for %.1f s", (double)(now_ns - conn->heard_ns) * 1e-9);
        hub_tell(server, r, &(hub_header){.kind = HUB_BEAT}, NULL, NULL, 0);
    }
    hub_match_cycles(server, now_ns);
}

/* Rank 0 has parted: the others are waited for, but not when all they can do is close. */
static int over(const hub_server *server)
{
    if (!server->linger_ns)
        return 0;
    int late = hub_now_ns() >= server->linger_ns;
    for (size_t r = 1; r < server->ranks && !late; r++)
        if (server->conn[r].socket.fd >= 0 && (server->conn[r].first || hub_match_hopes(server, r)))
            return 0;
    return 1;
}

static void *serve(void *context)
{
    hub_server *server = context;
    while (!over(server)) {
        for (size_t r = 0; r < server->ranks; r++) {
            const hub_conn *conn = &server->conn[r];
            server->polled[r] = (struct pollfd){.fd = conn->socket.fd,
                                                .events = (short)(POLLIN | (conn->first ? POLLOUT : 0))};
        }
        uint64_t now_ns = hub_now_ns();
        int left_ms = now_ns < server->tick_ns ? (int)((server->tick_ns - now_ns) / 1000000u) + 1 : 0;
        if (poll(server->polled, server->ranks, left_ms) > 0)
            for (size_t r = 0; r < server->ranks; r++) {
                if (server->polled[r].revents & POLLOUT)
                    flush(server, r);
                if (server->polled[r].revents & ~POLLOUT)
                    take(server, r);
            }
        tick(server);
        settle_ends(server);
    }
    for (size_t r = 0; r < server->ranks; r++)
        if (server->conn[r].socket.fd >= 0)
            last_word(server, r, "rank 0 has closed its communicator, and the hub is gone with it");
    return NULL;
}

/* ---- life ------------------------------------------------------------------------- */

static void destroy(hub_server *server)
{
    for (size_t r = 0; r < server->ranks; r++)
        close_conn(&server->conn[r]);
    hub_circles_free(server);
    zc_free(server->conn);
    zc_free(server->path);
    zc_free(server->polled);
    zc_free(server);
}

static hub_server *server_new(size_t ranks)
{
    hub_server *server = zc_calloc(1, sizeof *server);
    if (!server)
        return NULL;
    server->conn = zc_calloc(ranks, sizeof *server->conn);
    server->path = zc_calloc(2 * ranks, sizeof *server->path);
    server->polled = zc_calloc(ranks, sizeof *server->polled);
    if (server->conn && server->path && server->polled) {
        server->ranks = ranks;
        for (size_t r = 0; r < ranks; r++)
            server->conn[r].socket.fd = -1;
        return server;
    }
    zc_free(server->conn);
    zc_free(server->path);
    zc_free(server->polled);
    zc_free(server);
    return NULL;
}

zc_status hub_server_start(const int *sockets, size_t ranks, uint64_t beat_ns, hub_server **out)
{
    *out = NULL;
    hub_server *server = server_new(ranks);
    if (!server) {
        for (size_t r = 0; r < ranks; r++)
            close(sockets[r]);
        return zc_fail(ZC_ENOMEM, "rank 0: out of memory for %zu ranks", ranks);
    }
    for (size_t r = 0; r < ranks; r++) {
        hub_fork_keep(&server->conn[r].socket, sockets[r]);
        server->path[r] = (uint32_t)r;
    }
    server->beat_ns = beat_ns;
    zc_status status = ZC_OK;
    server->world = hub_circle_new(server, server->path, ranks);
    if (!server->world)
        status = zc_fail(ZC_ENOMEM, "rank 0: out of memory for %zu ranks", ranks);
    for (size_t r = 0; r < ranks && status == ZC_OK; r++)
        status = hub_socket_prepare(sockets[r]);
    if (status == ZC_OK)
        status = hub_thread(&server->thread, serve, server, 0);
    if (status != ZC_OK) {
        destroy(server);
        return status;
    }
    *out = server;
    return ZC_OK;
}

void hub_server_join(hub_server *server)
{
    pthread_join(server->thread, NULL);
    destroy(server);
}
