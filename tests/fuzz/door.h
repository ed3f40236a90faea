/*
 * What the targets of the rendezvous on one host share: its address, and packets with any descriptors.
 */
#ifndef DOOR_H
#define DOOR_H

#include "target.h"

#include "shm_packet.h"
#include "shm_process.h"
#include "shm_rendezvous.h"
#include "together.h"

#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#define DOOR_FDS_MAX SHM_PACKET_FDS

/* Descriptors that a packet may carry; those before UNSEALED are what a rank sends. */
enum { SEALED, PROCESS, ENDED, UNSEALED, EVENT, ZERO, KINDS };

static int kinds[KINDS];
static char job[64];

/* Once for the process. */
static inline void door_open(void)
{
    if (job[0])
        return;
    kinds[SEALED] = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    fcntl(kinds[SEALED], F_ADD_SEALS, F_SEAL_SHRINK);
    kinds[PROCESS] = shm_process_open();
    pid_t child = fork();
    if (child == 0)
        _exit(0);
    kinds[ENDED] = (int)syscall(SYS_pidfd_open, child, 0);
    waitpid(child, NULL, 0);
    kinds[UNSEALED] = memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    kinds[EVENT] = eventfd(0, EFD_CLOEXEC);
    kinds[ZERO] = open("/dev/zero", O_RDWR | O_CLOEXEC);
    for (int k = 0; k < KINDS; k++)
        MUST(kinds[k] >= 0, "descriptor %d", k);
    snprintf(job, sizeof job, "fuzz %d", (int)getpid());
}

static inline socklen_t door_address(struct sockaddr_un *address)
{
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    int length = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "zero_c/%u/%s", (unsigned)geteuid(), job);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

static inline int door_socket(void)
{
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    MUST(fd >= 0, "socket");
    return fd;
}

static inline int is_memory(int fd)
{
    int seals = fcntl(fd, F_GET_SEALS);
    return seals >= 0 && (seals & F_SEAL_SHRINK);
}

static inline int is_process(int fd)
{
    return syscall(SYS_pidfd_send_signal, fd, 0, NULL, 0) == 0 || errno == ESRCH;
}

/* `bytes` of it, which may be more or less than a packet. */
static inline void door_send(int fd, const void *packet, size_t bytes, const int *fds, size_t count)
{
    char control[CMSG_SPACE(DOOR_FDS_MAX * sizeof(int))] = {0};
    struct iovec part = {(void *)(uintptr_t)packet, bytes};
    struct msghdr header = {.msg_iov = &part, .msg_iovlen = 1};
    if (count) {
        header.msg_control = control;
        header.msg_controllen = CMSG_SPACE(count * sizeof(int));
        struct cmsghdr *rights = CMSG_FIRSTHDR(&header);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(count * sizeof(int));
        memcpy(CMSG_DATA(rights), fds, count * sizeof(int));
    }
    sendmsg(fd, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/* A status that the core may return. */
static inline int is_status(zc_status status)
{
    return status == ZC_OK || zc_status_is_failure(status);
}

#endif
