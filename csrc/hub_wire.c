/*
 * Messages over a stream socket: see hub_wire.h.  Nothing that arrives is
 * believed before it was checked: a length is, before memory is taken for it.
 */
#define _GNU_SOURCE
#include "hub_wire.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

uint64_t hub_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

/* ---- payloads ------------------------------------------------------------ */

hub_blob *hub_blob_new(size_t bytes)
{
    hub_blob *blob = zc_malloc(sizeof *blob + bytes);
    if (blob) {
        blob->users = 1;
        blob->bytes = bytes;
    }
    return blob;
}

hub_blob *hub_blob_keep(hub_blob *blob)
{
    blob->users++;
    return blob;
}

void hub_blob_drop(hub_blob *blob)
{
    if (blob && --blob->users == 0)
        zc_free(blob);
}

void hub_text(char *to, size_t room_bytes, const char *from, size_t bytes)
{
    size_t used = 0;
    while (used < bytes && used < room_bytes - 1 && from[used]) {
        unsigned char c = (unsigned char)from[used];
        to[used++] = (char)(c < 0x20 || c == 0x7f ? '?' : c);
    }
    to[used] = '\0';
}

/* ---- checking ------------------------------------------------------------ */

/* The least and most payload of a kind; most < least: this side never sends it. */
static void payload_limits(const hub_header *header, int from_hub, uint32_t *least, uint32_t *most)
{
    *least = *most = 0;
    switch ((hub_kind)header->kind) {
    case HUB_CALL:
        *least = sizeof(hub_words);
        *most = from_hub ? 0 : HUB_PAYLOAD_BYTES;
        return;
    case HUB_DECLARE:
        *least = sizeof(hub_words);
        *most = from_hub ? 0 : sizeof(hub_words);
        return;
    case HUB_POISON:
        *least = 1;
        *most = from_hub ? 0 : HUB_TEXT_BYTES;
        return;
    case HUB_ANSWER:
        *least = from_hub ? 0 : 1;
        *most = from_hub ? HUB_PAYLOAD_BYTES : 0;
        return;
    case HUB_REFUSED:
    case HUB_FAILED:
    case HUB_ENDED:
        *least = 1;
        *most = from_hub ? HUB_TEXT_BYTES : 0;
        return;
    case HUB_CLOSED:
        *least = from_hub ? 0 : 1;
        return;
    case HUB_HELLO:
    case HUB_LATE:
    case HUB_BEHIND:
    case HUB_CLOSE:
    case HUB_BYE:
        *least = from_hub ? 1 : 0;
        return;
    case HUB_BEAT:
    case HUB_KIND_END:
        return;
    }
}

const char *hub_header_check(const hub_header *header, int from_hub)
{
    uint32_t least, most;
    if (header->magic != HUB_MAGIC)
        return "something that is no message of this version";
    if (header->kind < HUB_HELLO || header->kind >= HUB_KIND_END)
        return "a message of an unknown kind";
    payload_limits(header, from_hub, &least, &most);
    if (least > most)
        return "a message that it may not send";
    if (header->bytes < least || header->bytes > most)
        return "a message of an impossible length";
    int must_fail = header->kind == HUB_POISON || header->kind == HUB_REFUSED || header->kind == HUB_FAILED;
    if (must_fail ? !zc_status_is_failure(header->status)
                  : header->status != ZC_OK && !(header->kind == HUB_CALL && zc_status_is_failure(header->status)))
        return "a message with an impossible status";
    if (header->kind == HUB_CALL && (header->operation < HUB_START || header->operation >= HUB_OPERATION_END))
        return "a call of an unknown operation";
    if ((header->kind == HUB_DECLARE || header->kind == HUB_BEHIND) && header->tag >= COMM_LINES)
        return "a declaration on an unknown line";
    return NULL;
}

/* ---- in and out ------------------------------------------------------------ */

static hub_got broken(char *why, size_t room_bytes, const char *what)
{
    snprintf(why, room_bytes, "it sent %s", what);
    return HUB_GOT_END;
}

/* recv, without waiting; *got bytes. */
static hub_got receive(int fd, void *to, size_t bytes, size_t *got, char *why, size_t room_bytes)
{
    ssize_t part;
    *got = 0;
    do
        part = recv(fd, to, bytes, MSG_DONTWAIT);
    while (part < 0 && errno == EINTR);
    if (part > 0) {
        *got = (size_t)part;
        return HUB_GOT_MESSAGE;
    }
    if (part < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
        return HUB_GOT_NOTHING;
    if (part == 0)
        snprintf(why, room_bytes, "its connection ended");
    else
        snprintf(why, room_bytes, "its connection ended: %s", strerror(errno));
    return HUB_GOT_END;
}

/* The header is there: checks it, and makes room for the payload. */
static hub_got begin_payload(hub_input *input, char *why, size_t room_bytes)
{
    const char *wrong = hub_header_check(&input->header, input->from_hub);
    if (wrong)
        return broken(why, room_bytes, wrong);
    if (input->header.bytes && (!input->blob || input->blob->bytes < input->header.bytes)) {
        hub_blob_drop(input->blob);
        input->blob = hub_blob_new(input->header.bytes);
        if (!input->blob) {
            snprintf(why, room_bytes, "%s had no memory for a message of it", input->from_hub ? "this rank" : "rank 0");
            return HUB_GOT_END;
        }
    }
    return HUB_GOT_MESSAGE;
}

hub_got hub_input_take(hub_input *input, int fd, char *why, size_t room_bytes)
{
    const size_t head = sizeof input->header;
    for (;;) {
        size_t got;
        char *to;
        if (input->got_bytes < head)
            to = (char *)&input->header + input->got_bytes;
        else
            to = input->blob->data + (input->got_bytes - head);
        size_t all = input->got_bytes < head ? head : head + input->header.bytes;
        hub_got result = receive(fd, to, all - input->got_bytes, &got, why, room_bytes);
        if (result != HUB_GOT_MESSAGE)
            return result;
        input->got_bytes += got;
        if (input->got_bytes < all)
            continue;
        if (all == head) {
            result = begin_payload(input, why, room_bytes);
            if (result != HUB_GOT_MESSAGE)
                return result;
            if (input->header.bytes)
                continue;
        }
        input->got_bytes = 0;
        return HUB_GOT_MESSAGE;
    }
}

ssize_t hub_send(int fd, const void *head, size_t head_bytes, const void *rest, size_t rest_bytes)
{
    struct iovec parts[2] = {{(void *)(uintptr_t)head, head_bytes}, {(void *)(uintptr_t)rest, rest_bytes}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = rest_bytes ? 2 : 1};
    ssize_t sent;
    do
        sent = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    if (sent >= 0)
        return sent;
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS ? 0 : -1;
}

zc_status hub_socket_prepare(int fd)
{
    int one = 1, flags = zc_fault() ? (errno = EBADF, -1) : fcntl(fd, F_GETFD);
    if (flags < 0 || fcntl(fd, F_SETFD, flags | FD_CLOEXEC) < 0)
        return zc_fail_errno(ZC_ESYSTEM, errno, "descriptor %d is no usable socket", fd);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one); /* fails on sockets that have no such thing */
    return ZC_OK;
}

zc_status hub_thread(pthread_t *thread, void *(*body)(void *), void *context, size_t rank)
{
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the program's own threads */
    int error = zc_fault() ? EAGAIN : pthread_create(thread, NULL, body, context);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error ? zc_fail_errno(ZC_ESYSTEM, error, "rank %zu: no thread for messages", rank) : ZC_OK;
}
