/*
 * Meeting of the ranks of a job on one host; see shm_rendezvous.h.
 */
#define _GNU_SOURCE
#include "shm_rendezvous.h"
#include "shm_packet.h"
#include "shm_process.h"
#include "shm_sync.h"
#include "zc_point.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define TABLE_RANKS (SHM_PACKET_FDS / 2) /* in one packet */
#define GUESTS_MAX 64u               /* connections that have not said hello */
#define HELLO_NS 2000000000ull       /* and how long they may take */
#define ATTACH_NS 5000000000ull      /* for all to map everything, once they are there, */
#define ATTACH_RANK_NS 20000000ull   /* and for each rank, one after the other */
#define NAME_TAKEN_NS 1000000000ull  /* an older rank 0 of the same job may be about to end */
#define RETRY_NS 5000000ull
#define COME_AGAIN_NS 500000000ull /* a rank that died may have been started again */
#define TURN_MS 40

static int same_user(int fd)
{
    struct ucred peer;
    socklen_t length = sizeof peer;
    return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == geteuid();
}

/*
 * The memory must be sealed, or a peer could take pages away under our mapping; and what is no process would look like
 * one that lives for ever, or has ended.
 */
static int proper_descriptors(const int *fds)
{
    int seals = fcntl(fds[0], F_GET_SEALS);
    return seals >= 0 && (seals & F_SEAL_SHRINK) &&
           (syscall(SYS_pidfd_send_signal, fds[1], 0, NULL, 0) == 0 || errno != EBADF);
}

/* ---- time -------------------------------------------------------------- */

/* now + span, at most the end of time. */
static uint64_t later(uint64_t span_ns)
{
    uint64_t now_ns = shm_now_ns();
    return span_ns < UINT64_MAX - now_ns ? now_ns + span_ns : UINT64_MAX;
}

/* For the time between the coming of the last rank and the start of all. */
static uint64_t attach_ns(const shm_rendezvous *r)
{
    return ATTACH_NS + r->ranks * ATTACH_RANK_NS;
}

static uint64_t last_of(uint64_t a_ns, uint64_t b_ns)
{
    return a_ns > b_ns ? a_ns : b_ns;
}

static zc_status still_time(const shm_rendezvous *r, uint64_t deadline_ns, int *left_ms)
{
    *left_ms = 0;
    if (r->interrupted && r->interrupted(r->interrupt_context))
        return zc_fail(ZC_EINTERRUPT, "rank %zu was interrupted while it waited for the other ranks of job '%s'",
                       r->rank, r->job);
    uint64_t now_ns = shm_now_ns();
    if (now_ns < deadline_ns) {
        uint64_t left = (deadline_ns - now_ns) / 1000000u + 1;
        *left_ms = left < TURN_MS ? (int)left : TURN_MS;
    }
    return ZC_OK;
}

/* Sends to, or receives from, one accepted peer. 1 done, 0 time is over, -1 it is gone; *status for an interrupt. */
static int transfer(const shm_rendezvous *r, int fd, uint64_t deadline_ns, shm_packet *m, int *fds, size_t *count,
                    size_t room, int sending, zc_status *status)
{
    for (;;) {
        int left_ms = 0, result = sending ? shm_packet_send(fd, m, fds, *count) : shm_packet_receive(fd, m, fds, room, count);
        if (result)
            return result;
        *status = still_time(r, deadline_ns, &left_ms);
        if (*status != ZC_OK || !left_ms)
            return 0;
        struct pollfd ready = {fd, sending ? POLLOUT : POLLIN, 0};
        poll(&ready, 1, left_ms);
    }
}

/* ---- names ------------------------------------------------------------- */

static socklen_t address_of(const shm_rendezvous *r, struct sockaddr_un *address)
{
    memset(address, 0, sizeof *address);
    address->sun_family = AF_UNIX;
    int length = snprintf(address->sun_path + 1, sizeof address->sun_path - 1, "zero_c/%u/%s", (unsigned)geteuid(),
                          r->job);
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)length);
}

static int new_socket(void)
{
    return zc_fault() ? (errno = EMFILE, -1) : socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
}

/* ---- rank 0 ------------------------------------------------------------ */

typedef struct guest {
    int fd;
    uint64_t deadline_ns;
} guest;

typedef struct host {
    const shm_rendezvous *r;
    shm_peer *peers;
    int listener;
    uint64_t deadline_ns; /* for all to come */
    int *joined;      /* [ranks]: connection of a rank that was accepted, or -1 */
    uint64_t *left_ns; /* [ranks]: when a rank that had joined went away; its process_fd is kept until it comes again */
    size_t missing;
    guest guests[GUESTS_MAX];
    size_t guest_count;
    struct pollfd *polls; /* [1 + GUESTS_MAX + ranks] */
} host;

/* The process that listens at an address: text, "" when it cannot be told. It gets a guest that says nothing and goes. */
static const char *listener_of(const struct sockaddr_un *address, socklen_t length, char *text, size_t room_bytes)
{
    struct ucred owner = {0};
    socklen_t owner_bytes = sizeof owner;
    int fd = new_socket();
    text[0] = '\0';
    if (fd >= 0 && connect(fd, (const struct sockaddr *)address, length) == 0 &&
        getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &owner, &owner_bytes) == 0 && owner.pid > 0)
        snprintf(text, room_bytes, " (process %ld)", (long)owner.pid);
    if (fd >= 0)
        close(fd);
    return text;
}

static zc_status listen_for_ranks(host *h)
{
    char process[40];
    struct sockaddr_un address;
    socklen_t length = address_of(h->r, &address);
    uint64_t give_up_ns = later(NAME_TAKEN_NS < h->r->start_timeout_ns ? NAME_TAKEN_NS : h->r->start_timeout_ns);
    h->listener = new_socket();
    if (h->listener < 0)
        return zc_fail_errno(ZC_ESYSTEM, errno, "rank 0 cannot make a socket to meet the other ranks");
    while ((zc_fault() ? (errno = EACCES, -1) : bind(h->listener, (struct sockaddr *)&address, length)) != 0) {
        int left_ms = 0;
        if (errno != EADDRINUSE)
            return zc_fail_errno(ZC_ESYSTEM, errno, "rank 0 cannot bind the socket of job '%s'", h->r->job);
        ZC_TRY(still_time(h->r, give_up_ns, &left_ms));
        if (!left_ms)
            return zc_fail(ZC_ECOMM, "job '%s' is already being started on this host by another rank 0%s; set ZERO_C_JOB "
                           "or another MASTER_PORT for one of the two jobs", h->r->job,
                           listener_of(&address, length, process, sizeof process));
        nanosleep(&(struct timespec){0, RETRY_NS}, NULL);
    }
    if (zc_fault() ? (errno = EACCES, 1) : listen(h->listener, 128) != 0)
        return zc_fail_errno(ZC_ESYSTEM, errno, "rank 0 cannot listen on the socket of job '%s'", h->r->job);
    ZC_POINT("start: listening");
    return ZC_OK;
}

/* Compares in a time that does not depend on where they differ. */
static int token_differs(const shm_rendezvous *r, const shm_packet *hello)
{
    size_t own = r->token ? strlen(r->token) : 0;
    unsigned char difference = hello->number != own;
    for (size_t i = 0; i < own && i < SHM_TOKEN_BYTES; i++)
        difference |= (unsigned char)(hello->text[i] ^ r->token[i]);
    return difference != 0;
}

/* Why a hello is refused; "" when it is not. */
static void judge(const host *h, const shm_packet *hello, size_t fd_count, char *why, size_t room_bytes)
{
    const shm_rendezvous *r = h->r;
    why[0] = '\0';
    if (hello->version != SHM_PACKET_VERSION || hello->kind != SHM_PACKET_HELLO)
        snprintf(why, room_bytes, "rank 0 of job '%s' speaks version %u of the protocol, this rank version %u", r->job,
                 SHM_PACKET_VERSION, hello->version);
    else if (token_differs(r, hello))
        snprintf(why, room_bytes, "rank 0 of job '%s' has another token; ZERO_C_TOKEN must be the same on all ranks of a "
                 "job, and a second job needs another ZERO_C_JOB or MASTER_PORT", r->job);
    else if (hello->ranks != r->ranks)
        snprintf(why, room_bytes, "rank 0 of job '%s' expects %zu ranks, this rank %u; the world size must be the same "
                 "on all ranks", r->job, r->ranks, hello->ranks);
    else if (hello->rank == 0 || hello->rank >= r->ranks)
        snprintf(why, room_bytes, "rank %u cannot join job '%s'; ranks 1 to %zu are expected", hello->rank, r->job,
                 r->ranks - 1);
    else if (h->joined[hello->rank] >= 0)
        snprintf(why, room_bytes, "rank %u of job '%s' has joined already; two processes have the same rank, or two "
                 "jobs the same name (set ZERO_C_JOB or another MASTER_PORT)", hello->rank, r->job);
    else if (fd_count != 2)
        snprintf(why, room_bytes, "rank %u of job '%s' sent %zu descriptors instead of 2", hello->rank, r->job,
                 fd_count);
}

static void drop_guest(host *h, size_t g)
{
    close(h->guests[g].fd);
    h->guests[g] = h->guests[--h->guest_count];
}

/* After this time all ranks that are here have been told how the start went, if this one lives. */
static uint32_t most_ms(const host *h)
{
    uint64_t now_ns = shm_now_ns(), left_ns = h->deadline_ns > now_ns ? h->deadline_ns - now_ns : 0;
    uint64_t most_ms = left_ns / 1000000u + attach_ns(h->r) / 1000000u;
    return most_ms < UINT32_MAX ? (uint32_t)most_ms : UINT32_MAX;
}

static void hear_guest(host *h, size_t g)
{
    shm_packet hello, answer;
    int fds[2], fd = h->guests[g].fd;
    size_t count;
    char why[400];
    int result = shm_packet_receive(fd, &hello, fds, 2, &count);
    if (result == 0)
        return;
    if (result < 0) {
        drop_guest(h, g);
        return;
    }
    judge(h, &hello, count, why, sizeof why);
    if (!why[0] && !proper_descriptors(fds))
        snprintf(why, sizeof why, "rank %u of job '%s' sent descriptors of the wrong kind", hello.rank, h->r->job);
    if (why[0]) {
        shm_packet_init(&answer, SHM_PACKET_ANSWER, 0, 0, ZC_ECOMM, why);
        shm_packet_send(fd, &answer, NULL, 0);
        for (size_t i = 0; i < count; i++)
            close(fds[i]);
        drop_guest(h, g);
        return;
    }
    if (h->peers[hello.rank].process_fd >= 0) /* of one that had joined, and went away */
        close(h->peers[hello.rank].process_fd);
    h->joined[hello.rank] = fd;
    h->peers[hello.rank] = (shm_peer){fds[0], fds[1]};
    h->missing--;
    ZC_POINT("start: a rank has joined");
    shm_packet_init(&answer, SHM_PACKET_WELCOME, 0, 0, ZC_OK, "");
    answer.number = most_ms(h);
    shm_packet_send(fd, &answer, NULL, 0); /* a new connection has room for it */
    ZC_POINT("start: a rank is welcomed");
    h->guests[g] = h->guests[--h->guest_count];
}

/* As many as are heard at a time: who floods the door does not keep rank 0 at it. */
static void accept_guests(host *h)
{
    for (size_t turn = 0; turn < GUESTS_MAX; turn++) {
        int fd = zc_fault() ? (errno = EMFILE, -1)
                            : accept4(h->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd < 0) {
            if (errno == EMFILE || errno == ENFILE) /* the guest stays in the queue: no busy loop over it */
                nanosleep(&(struct timespec){0, RETRY_NS}, NULL);
            return;
        }
        if (!same_user(fd)) {
            close(fd);
            continue;
        }
        if (h->guest_count == GUESTS_MAX) {
            size_t oldest = 0;
            for (size_t g = 1; g < GUESTS_MAX; g++)
                if (h->guests[g].deadline_ns < h->guests[oldest].deadline_ns)
                    oldest = g;
            drop_guest(h, oldest);
        }
        h->guests[h->guest_count++] = (guest){fd, later(HELLO_NS)};
        ZC_POINT("start: a guest has come");
    }
}

/* A rank that has joined has nothing to say now: it speaks only by going away, and may come again. */
static void hear_joined(host *h, size_t rank)
{
    shm_packet m;
    int fds[2];
    size_t count;
    if (shm_packet_receive(h->joined[rank], &m, fds, 2, &count) == 0)
        return;
    for (size_t i = 0; i < count; i++)
        close(fds[i]);
    close(h->joined[rank]);
    close(h->peers[rank].memory_fd);
    h->joined[rank] = -1;
    h->peers[rank].memory_fd = -1;
    h->left_ns[rank] = shm_now_ns();
    h->missing++;
}

static zc_status lost(const shm_rendezvous *r, size_t rank)
{
    return zc_fail(ZC_EPEERLOST, "rank %zu of job '%s' was lost while the job started", rank, r->job);
}

/* Why a packet to or from a rank failed: it is not there any more, or something is wrong here. */
static int went_away(int error_number)
{
    return error_number == 0 || error_number == ECONNRESET || error_number == EPIPE || error_number == ENOTCONN;
}

static zc_status broken(const shm_rendezvous *r, size_t rank, int error_number)
{
    return went_away(error_number) ? lost(r, rank)
                                   : zc_fail_errno(ZC_ESYSTEM, error_number, "rank %zu cannot speak with rank %zu of job '%s'",
                                                   r->rank, rank, r->job);
}

/* A rank that had joined, whose process has ended, and that did not come again. */
static zc_status look_for_lost(const host *h)
{
    for (size_t q = 1; q < h->r->ranks; q++)
        if (h->joined[q] < 0 && h->peers[q].process_fd >= 0 && shm_now_ns() - h->left_ns[q] > COME_AGAIN_NS &&
            shm_process_ended(h->peers[q].process_fd))
            return lost(h->r, q);
    return ZC_OK;
}

static zc_status gather_ranks(host *h)
{
    size_t ranks = h->r->ranks;
    while (h->missing) {
        int left_ms = 0;
        ZC_TRY(look_for_lost(h));
        ZC_TRY(still_time(h->r, h->deadline_ns, &left_ms));
        if (!left_ms) {
            char list[256] = "";
            for (size_t q = 1; q < ranks; q++)
                if (h->joined[q] < 0)
                    zc_list_number(list, sizeof list, q);
            return zc_fail(ZC_ETIMEOUT, "job '%s': %zu of %zu ranks did not come within %.1f s; missing: %s", h->r->job,
                           h->missing, ranks, (double)h->r->start_timeout_ns * 1e-9, list);
        }
        size_t n = 0;
        h->polls[n++] = (struct pollfd){h->listener, POLLIN, 0};
        for (size_t g = 0; g < h->guest_count; g++)
            h->polls[n++] = (struct pollfd){h->guests[g].fd, POLLIN, 0};
        size_t guests = h->guest_count;
        for (size_t q = 1; q < ranks; q++)
            h->polls[n++] = (struct pollfd){h->joined[q], POLLIN, 0}; /* -1 is skipped */
        if ((zc_fault() ? (errno = ENOMEM, -1) : poll(h->polls, n, left_ms)) < 0 && errno != EINTR)
            return zc_fail_errno(ZC_ESYSTEM, errno, "rank 0 cannot wait for the other ranks");
        for (size_t q = 1; q < ranks; q++)
            if (h->joined[q] >= 0 && h->polls[1 + guests + q - 1].revents)
                hear_joined(h, q);
        uint64_t now_ns = shm_now_ns();
        for (size_t g = guests; g-- > 0;) { /* backwards: a dropped guest is replaced by the last one */
            if (h->polls[1 + g].revents)
                hear_guest(h, g);
            else if (h->guests[g].deadline_ns < now_ns)
                drop_guest(h, g);
        }
        if (h->polls[0].revents)
            accept_guests(h);
    }
    return ZC_OK;
}

/* One rank after the other, so that few descriptors are on their way at a time. */
static zc_status hand_out(host *h, size_t rank, uint64_t deadline_ns)
{
    size_t ranks = h->r->ranks;
    int fds[2 * TABLE_RANKS];
    shm_packet m;
    zc_status status = ZC_OK;
    size_t count;
    int result = 1;
    for (size_t first = 0; first < ranks && result == 1; first += TABLE_RANKS) {
        size_t some = ranks - first < TABLE_RANKS ? ranks - first : TABLE_RANKS;
        for (size_t i = 0; i < some; i++) {
            fds[2 * i] = h->peers[first + i].memory_fd;
            fds[2 * i + 1] = h->peers[first + i].process_fd;
        }
        shm_packet_init(&m, SHM_PACKET_TABLE, (uint32_t)first, (uint32_t)some, ZC_OK, "");
        count = 2 * some;
        result = transfer(h->r, h->joined[rank], deadline_ns, &m, fds, &count, 0, 1, &status);
        ZC_POINT("start: a table is sent");
    }
    if (result == 1)
        result = transfer(h->r, h->joined[rank], deadline_ns, &m, NULL, &count, 0, 0, &status);
    int number = errno;
    ZC_POINT("start: a rank has answered");
    if (status != ZC_OK)
        return status;
    if (result == 0)
        return zc_fail(ZC_ETIMEOUT, "rank %zu of job '%s' did not attach to the shared memory within %.1f s", rank,
                       h->r->job, (double)h->r->start_timeout_ns * 1e-9);
    if (result < 0)
        return broken(h->r, rank, number);
    if (m.kind != SHM_PACKET_ATTACHED)
        return zc_fail(ZC_ECOMM, "rank %zu of job '%s' answered out of turn", rank, h->r->job);
    if (m.status != ZC_OK)
        return zc_fail((zc_status)m.status, "rank %zu could not attach to the shared memory: %s", rank, m.text);
    return ZC_OK;
}

static zc_status attach_rank_0(const shm_rendezvous *r, shm_peer *peers)
{
    zc_status status = r->attach(r->attach_context, peers);
    return status == ZC_OK ? ZC_OK
                           : zc_fail(status, "rank 0 could not attach to the shared memory: %s", zc_last_error());
}

static zc_status be_host(const shm_rendezvous *r, shm_peer *peers)
{
    host h = {.r = r, .peers = peers, .listener = -1, .missing = r->ranks - 1, .deadline_ns = later(r->start_timeout_ns)};
    zc_status status = ZC_OK;
    shm_packet m;
    h.joined = zc_malloc(r->ranks * sizeof *h.joined);
    h.left_ns = zc_calloc(r->ranks, sizeof *h.left_ns);
    h.polls = zc_calloc(1 + GUESTS_MAX + r->ranks, sizeof *h.polls);
    if (!h.joined || !h.left_ns || !h.polls) {
        zc_free(h.joined);
        zc_free(h.left_ns);
        zc_free(h.polls);
        return zc_fail(ZC_ENOMEM, "rank 0: out of memory for %zu ranks", r->ranks);
    }
    for (size_t q = 0; q < r->ranks; q++)
        h.joined[q] = -1;

    status = listen_for_ranks(&h);
    if (status == ZC_OK)
        status = gather_ranks(&h);
    if (h.listener >= 0)
        close(h.listener);
    while (h.guest_count)
        drop_guest(&h, 0);
    if (status == ZC_OK)
        status = attach_rank_0(r, peers);
    ZC_POINT("start: rank 0 has attached");
    uint64_t attached_ns = last_of(h.deadline_ns, later(attach_ns(r)));
    for (size_t q = 1; q < r->ranks && status == ZC_OK; q++)
        status = hand_out(&h, q, attached_ns);

    /* An interrupt is rank 0's own; the others are told what it means for them. */
    shm_packet_init(&m, SHM_PACKET_ANSWER, 0, 0, status == ZC_EINTERRUPT ? ZC_ECOMM : status,
                 status == ZC_OK ? "" : zc_last_error());
    for (size_t q = 1; q < r->ranks; q++)
        if (h.joined[q] >= 0) {
            /* A rank that lives has room for it; one that does not is missed by all who have been let in. */
            if (shm_packet_send(h.joined[q], &m, NULL, 0) != 1 && status == ZC_OK && !went_away(errno)) {
                status = broken(r, q, errno);
                shm_packet_init(&m, SHM_PACKET_ANSWER, 0, 0, status, zc_last_error());
            }
            ZC_POINT("start: a rank is let in");
            close(h.joined[q]);
        }
    zc_free(h.joined);
    zc_free(h.left_ns);
    zc_free(h.polls);
    return status;
}

/* ---- the other ranks --------------------------------------------------- */

/* Connects; *fd stays -1 when there is nobody yet. */
static zc_status try_connect(const shm_rendezvous *r, int *fd)
{
    struct sockaddr_un address;
    socklen_t length = address_of(r, &address);
    int made = new_socket();
    if (made < 0)
        return zc_fail_errno(ZC_ESYSTEM, errno, "rank %zu cannot make a socket to meet rank 0", r->rank);
    int failed = zc_fault() ? (errno = EACCES, 1) : connect(made, (struct sockaddr *)&address, length) != 0;
    if (!failed && same_user(made)) {
        *fd = made;
        return ZC_OK;
    }
    int number = failed ? errno : EPERM;
    close(made);
    if (number == ECONNREFUSED || number == EAGAIN || number == EINTR || number == EINPROGRESS)
        return ZC_OK;
    return zc_fail_errno(ZC_ESYSTEM, number, "rank %zu cannot connect to rank 0 of job '%s'", r->rank, r->job);
}

/* From a table packet into peers; own descriptors come back too and are not needed. */
static zc_status take_table(const shm_rendezvous *r, const shm_packet *m, const int *fds, size_t count, size_t *known,
                            shm_peer *peers)
{
    int fits = m->rank == *known && m->ranks && m->ranks <= r->ranks - *known && count == 2 * (size_t)m->ranks;
    for (size_t i = 0; i < count && fits; i += 2)
        fits = proper_descriptors(fds + i);
    if (!fits) {
        for (size_t i = 0; i < count; i++)
            close(fds[i]);
        return zc_fail(ZC_ECOMM, "rank %zu: rank 0 of job '%s' sent a table out of turn, or with other descriptors than "
                       "of memory and processes", r->rank, r->job);
    }
    for (size_t i = 0; i < m->ranks; i++) {
        size_t q = *known + i;
        if (q == r->rank) {
            close(fds[2 * i]);
            close(fds[2 * i + 1]);
        } else {
            peers[q] = (shm_peer){fds[2 * i], fds[2 * i + 1]};
        }
    }
    *known += m->ranks;
    return ZC_OK;
}

/*
 * One connection from hello to the last answer.  *again: rank 0 went away before it had sent a table, *welcomed: it had
 * said that this rank has joined.
 */
static zc_status be_guest(const shm_rendezvous *r, int fd, uint64_t deadline_ns, shm_peer *peers, int *again,
                          int *welcomed)
{
    shm_packet m;
    int fds[2 * TABLE_RANKS] = {peers[r->rank].memory_fd, peers[r->rank].process_fd};
    size_t count = 2, known = 0, token_bytes = r->token ? strlen(r->token) : 0;
    zc_status status = ZC_OK, attached = ZC_OK;
    uint64_t begin_ns = shm_now_ns();
    int said = 0;

    *again = *welcomed = 0;
    shm_packet_init(&m, SHM_PACKET_HELLO, (uint32_t)r->rank, (uint32_t)r->ranks, ZC_OK, "");
    m.number = (uint32_t)token_bytes;
    memcpy(m.text, r->token ? r->token : "", token_bytes);
    int result = transfer(r, fd, deadline_ns, &m, fds, &count, 0, 1, &status);
    ZC_POINT("start: hello is said");
    while (result == 1) {
        result = transfer(r, fd, deadline_ns, &m, fds, &count, sizeof fds / sizeof *fds, 0, &status);
        if (result != 1)
            break;
        for (size_t i = 0; m.kind != SHM_PACKET_TABLE && i < count; i++)
            close(fds[i]);
        if (m.kind == SHM_PACKET_WELCOME && !*welcomed && !known) {
            *welcomed = 1;
            deadline_ns = later(m.number * 1000000ull + HELLO_NS / 2); /* rank 0 knows better who is missing */
            ZC_POINT("start: welcomed");
            continue;
        }
        if (m.kind == SHM_PACKET_ANSWER && m.status != ZC_OK)
            return attached != ZC_OK ? attached : zc_fail((zc_status)m.status, "rank %zu: %s", r->rank, m.text);
        if (m.kind == SHM_PACKET_ANSWER && known == r->ranks && attached == ZC_OK)
            return ZC_OK;
        if (m.kind != SHM_PACKET_TABLE)
            return zc_fail(ZC_ECOMM, "rank %zu: rank 0 of job '%s' answered out of turn", r->rank, r->job);
        said = 1;
        ZC_TRY(take_table(r, &m, fds, count, &known, peers));
        ZC_POINT("start: a table has come");
        if (known < r->ranks)
            continue;
        attached = r->attach(r->attach_context, peers);
        ZC_POINT("start: attached");
        shm_packet_init(&m, SHM_PACKET_ATTACHED, 0, 0, attached, attached == ZC_OK ? "" : zc_last_error());
        count = 0;
        result = transfer(r, fd, deadline_ns, &m, NULL, &count, 0, 1, &status);
        ZC_POINT("start: answered");
    }
    int number = errno;
    if (status != ZC_OK)
        return status;
    if (attached != ZC_OK)
        return attached;
    if (result == 0)
        return zc_fail(ZC_ETIMEOUT, "rank %zu: job '%s' did not start within %.1f s, and rank 0, which knows why, says "
                       "nothing: it is stopped, or kept from running; missing: 0", r->rank, r->job,
                       (double)(shm_now_ns() - begin_ns) * 1e-9);
    if (!said && went_away(number)) {
        *again = 1;
        return ZC_OK;
    }
    return broken(r, 0, number);
}

static zc_status find_host(const shm_rendezvous *r, shm_peer *peers)
{
    uint64_t deadline_ns = later(r->start_timeout_ns), lost_ns = UINT64_MAX; /* when rank 0, that went away, counts as lost */
    for (;;) {
        int fd = -1, left_ms = 0;
        ZC_TRY(try_connect(r, &fd));
        if (fd >= 0) {
            int again, welcomed;
            ZC_POINT("start: connected");
            zc_status status = be_guest(r, fd, deadline_ns, peers, &again, &welcomed);
            char text[1024]; /* closing a socket must not lose the sentence */
            snprintf(text, sizeof text, "%s", zc_last_error());
            close(fd);
            if (status != ZC_OK)
                return zc_fail(status, "%s", text);
            if (!again)
                return ZC_OK;
            if (welcomed)
                lost_ns = later(COME_AGAIN_NS);
        }
        if (shm_now_ns() > lost_ns)
            return lost(r, 0);
        ZC_TRY(still_time(r, deadline_ns, &left_ms));
        if (!left_ms)
            return zc_fail(ZC_ETIMEOUT, "rank %zu: rank 0 of job '%s' did not come within %.1f s; missing: 0", r->rank,
                           r->job, (double)r->start_timeout_ns * 1e-9);
        nanosleep(&(struct timespec){0, RETRY_NS}, NULL);
    }
}

zc_status shm_rendezvous_meet(const shm_rendezvous *r, shm_peer *peers)
{
    for (size_t q = 0; q < r->ranks; q++)
        if (q != r->rank)
            peers[q] = (shm_peer){-1, -1};
    if (!r->job || !r->job[0] || strlen(r->job) > SHM_JOB_BYTES)
        return zc_fail(ZC_EINVAL, "rank %zu: a job's name has 1 to %u bytes", r->rank, SHM_JOB_BYTES);
    if (r->token && strlen(r->token) > SHM_TOKEN_BYTES)
        return zc_fail(ZC_EINVAL, "rank %zu: a token (ZERO_C_TOKEN) has at most %u bytes", r->rank, SHM_TOKEN_BYTES);
    if (r->ranks == 1)
        return r->attach(r->attach_context, peers);
    zc_status status = r->rank == 0 ? be_host(r, peers) : find_host(r, peers);
    if (status != ZC_OK)
        for (size_t q = 0; q < r->ranks; q++)
            if (q != r->rank) {
                if (peers[q].memory_fd >= 0)
                    close(peers[q].memory_fd);
                if (peers[q].process_fd >= 0)
                    close(peers[q].process_fd);
                peers[q] = (shm_peer){-1, -1};
            }
    return status;
}
