/*
 * Sending and receiving the packets of shm_packet.h, with descriptors.
 */
#define _GNU_SOURCE
#include "shm_packet.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define MAGIC 0x7a65726f5f633031ull
#define KERNEL_FDS 253 /* no packet can carry more */

void shm_packet_init(shm_packet *m, int kind, uint32_t rank, uint32_t ranks, zc_status status, const char *text)
{
    memset(m, 0, sizeof *m);
    m->magic = MAGIC;
    m->version = SHM_PACKET_VERSION;
    m->kind = (uint32_t)kind;
    m->rank = rank;
    m->ranks = ranks;
    m->status = status;
    snprintf(m->text, sizeof m->text, "%s", text);
}

int shm_packet_send(int fd, const shm_packet *m, const int *fds, size_t count)
{
    char control[CMSG_SPACE(SHM_PACKET_FDS * sizeof(int))];
    struct iovec part = {(void *)m, sizeof *m};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1};
    if (count) {
        memset(control, 0, sizeof control);
        header.msg_control = control;
        header.msg_controllen = CMSG_SPACE(count * sizeof(int));
        struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(count * sizeof(int));
        memcpy(CMSG_DATA(rights), fds, count * sizeof(int));
    }
    for (;;) {
        ssize_t sent = zc_fault() ? (errno = ENOBUFS, -1) : sendmsg(fd, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent == (ssize_t)sizeof *m)
            return 1;
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return 0;
        if (sent >= 0)
            errno = EMSGSIZE;
        return -1;
    }
}

int shm_packet_receive(int fd, shm_packet *m, int *fds, size_t room, size_t *count)
{
    char control[CMSG_SPACE(KERNEL_FDS * sizeof(int))];
    struct iovec part = {m, sizeof *m};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control,
                            .msg_controllen = sizeof control};
    ssize_t got;
    *count = 0;
    do
        got = zc_fault() ? (errno = ENOBUFS, -1) : recvmsg(fd, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    while (got < 0 && errno == EINTR);
    if (got < 0)
        return errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -1;
    int too_many = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&header); c; c = CMSG_NXTHDR(&header, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        size_t carried = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
        for (size_t i = 0; i < carried; i++) {
            int received;
            memcpy(&received, CMSG_DATA(c) + i * sizeof(int), sizeof received);
            if (*count < room)
                fds[(*count)++] = received;
            else {
                close(received);
                too_many = 1;
            }
        }
    }
    if (got == (ssize_t)sizeof *m && !(header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) && !too_many &&
        m->magic == MAGIC && (m->status == ZC_OK || zc_status_is_failure(m->status))) {
        m->text[sizeof m->text - 1] = '\0';
        return 1;
    }
    for (size_t i = 0; i < *count; i++)
        close(fds[i]);
    *count = 0;
    errno = got == 0 ? 0 : EPROTO;
    return -1;
}
