/*
 * Rank 0 of three ranks of one host (csrc/shm_rendezvous.c) while strangers are at its door.
 *
 * An input is what the strangers do: they connect, in floods too, send packets that are short, long, of no such
 * kind, or those of a rank but for some fields, with descriptors that nobody asked for, and go away or stay.  Then
 * the right ranks 1 and 2 come.
 *
 *   nobody is welcomed who has not sent what a rank of this job sends
 *   if nobody sent that, the three ranks meet, and each has sealed memory and the process of each other
 *   else each of the three meets or returns an error of the core with a sentence; it must not hang
 *   no descriptor is left
 */
#define _GNU_SOURCE
#include "door.h"

#include "shm_segment.h"

#include <pthread.h>
#include <stdatomic.h>

#define RANKS 3u
#define STRANGERS_MAX 160u
#define FDS_MAX 6u
#define TOKEN "token"

/* ---- the right ranks ---------------------------------------------------------- */

typedef struct rank {
    pthread_t thread;
    shm_rendezvous meeting;
    shm_peer peers[RANKS];
    zc_status status;
    char text[1024];
    unsigned attached;
    int improper; /* descriptors */
    atomic_int done, stop;
} rank;

static int stopped(void *context)
{
    return ((rank *)context)->stop;
}

static zc_status attach(void *context, const shm_peer *peers)
{
    rank *r = context;
    r->attached++;
    for (size_t q = 0; q < RANKS; q++)
        r->improper |= !is_memory(peers[q].memory_fd) || !is_process(peers[q].process_fd);
    return ZC_OK;
}

static void *meet(void *context)
{
    rank *r = context;
    r->status = shm_rendezvous_meet(&r->meeting, r->peers);
    snprintf(r->text, sizeof r->text, "%s", zc_last_error());
    r->done = 1;
    return NULL;
}

static void start(rank *r, size_t number, uint64_t timeout_ns)
{
    *r = (rank){.meeting = {.rank = number, .ranks = RANKS, .job = job, .token = TOKEN, .start_timeout_ns = timeout_ns,
                            .attach = attach, .attach_context = r, .interrupted = stopped, .interrupt_context = r}};
    shm_segment memory;
    MUST(shm_segment_open(&memory) == ZC_OK, "%s", zc_last_error());
    r->peers[number] = (shm_peer){memory.fd, shm_process_open()};
    MUST(pthread_create(&r->thread, NULL, meet, r) == 0, "thread");
}

static void finish(rank *r, int must_meet)
{
    pthread_join(r->thread, NULL);
    MUST(!must_meet || r->status == ZC_OK, "rank %zu: %s", r->meeting.rank, r->text);
    MUST(is_status(r->status), "rank %zu returned %d", r->meeting.rank, (int)r->status);
    MUST(r->status == ZC_OK || r->text[0], "rank %zu has no sentence", r->meeting.rank);
    MUST(!r->improper, "rank %zu has not the sealed memory and the process of each", r->meeting.rank);
    MUST(r->attached <= 1, "rank %zu attached %u times", r->meeting.rank, r->attached);
    for (size_t q = 0; q < RANKS; q++) {
        int open = r->peers[q].memory_fd >= 0 && r->peers[q].process_fd >= 0;
        MUST(open == (r->status == ZC_OK || q == r->meeting.rank), "rank %zu, peer %zu", r->meeting.rank, q);
        if (open) {
            close(r->peers[q].memory_fd);
            close(r->peers[q].process_fd);
        }
    }
}

/* ---- strangers ---------------------------------------------------------------- */

typedef struct stranger {
    int fd;
    int proper; /* what it has sent first is a rank's hello */
    int spoke;
} stranger;

typedef struct door {
    stranger strangers[STRANGERS_MAX];
    size_t count;
    int taken;  /* one may have taken a rank's place */
    int opened; /* rank 0 listens, or has done so */
} door;

/* -1: rank 0 listens no more, because it has met strangers or failed. */
static int knock(door *d, const rank *zero)
{
    struct sockaddr_un address;
    socklen_t bytes = door_address(&address);
    int fd = door_socket();
    while (connect(fd, (struct sockaddr *)&address, bytes) != 0) {
        if (zero->done || (d->opened && errno == ECONNREFUSED)) {
            close(fd);
            return -1;
        }
        pause_us(200);
    }
    d->opened = 1;
    return fd;
}

static void come(door *d, const rank *zero)
{
    int fd = d->count < STRANGERS_MAX ? knock(d, zero) : -1;
    if (fd >= 0)
        d->strangers[d->count++] = (stranger){.fd = fd};
}

/* A hello with something wrong in it, or not. */
static void speak(door *d, stranger *s, choices *c)
{
    struct {
        shm_packet packet;
        char more[64];
    } sent;
    int carried[FDS_MAX] = {kinds[SEALED], kinds[PROCESS], kinds[EVENT], kinds[SEALED], kinds[ZERO], kinds[PROCESS]};
    size_t bytes = sizeof sent.packet, count = 2;
    memset(&sent, 0, sizeof sent);
    shm_packet_init(&sent.packet, SHM_PACKET_HELLO, 1 + take_below(c, RANKS - 1), RANKS, ZC_OK, TOKEN);
    sent.packet.number = (uint32_t)strlen(TOKEN);
    for (unsigned changes = take_below(c, 4); changes; changes--) {
        uint64_t value = take_number(c);
        switch (take_below(c, 12)) {
        case 0: sent.packet.magic ^= value; break;
        case 1: sent.packet.version = (uint32_t)value; break;
        case 2: sent.packet.kind = (uint32_t)value; break;
        case 3: sent.packet.rank = (uint32_t)value; break;
        case 4: sent.packet.ranks = (uint32_t)value; break;
        case 5: sent.packet.status = (int32_t)value; break;
        case 6: sent.packet.number = (uint32_t)value; break;
        case 7: sent.packet.text[value % sizeof sent.packet.text] = (char)take_byte(c); break;
        case 8: take_bytes(c, sent.packet.text, value % sizeof sent.packet.text); break;
        case 9: bytes = value % sizeof sent; break;
        case 10: count = value % (FDS_MAX + 1); break;
        default: carried[value % FDS_MAX] = kinds[take_below(c, KINDS)];
        }
    }
    shm_packet right, *m = &sent.packet;
    shm_packet_init(&right, SHM_PACKET_HELLO, 0, RANKS, ZC_OK, TOKEN);
    if (!s->spoke++)
        s->proper = bytes == sizeof *m && count == 2 && m->magic == right.magic && m->version == right.version &&
                    m->kind == right.kind && m->ranks == RANKS && m->rank >= 1 && m->rank < RANKS &&
                    m->number == strlen(TOKEN) && !memcmp(m->text, TOKEN, strlen(TOKEN)) &&
                    is_memory(carried[0]) && is_process(carried[1]);
    d->taken |= s->proper;
    door_send(s->fd, &sent, bytes, carried, count);
}

/* What rank 0 has said to it so far. */
static void listen_to(stranger *s)
{
    shm_packet m;
    int fds[SHM_PACKET_FDS];
    size_t count;
    while (shm_packet_receive(s->fd, &m, fds, SHM_PACKET_FDS, &count) == 1) {
        for (size_t i = 0; i < count; i++)
            close(fds[i]);
        MUST(m.kind != SHM_PACKET_WELCOME || s->proper, "a stranger was welcomed");
    }
}

static void leave(door *d, stranger *s)
{
    listen_to(s);
    close(s->fd);
    *s = d->strangers[--d->count];
}

static void act(door *d, const rank *zero, choices *c)
{
    unsigned what = take_below(c, 8);
    stranger *s = d->count ? &d->strangers[take_byte(c) % d->count] : NULL;
    if (what == 0 || !s) {
        come(d, zero);
    } else if (what == 1 && take_below(c, 8) == 0) {
        for (size_t i = 0; i < 70; i++) /* more than rank 0 hears at a time */
            come(d, zero);
    } else if (what == 2) {
        leave(d, s);
    } else if (what == 3) {
        shutdown(s->fd, SHUT_WR);
    } else if (what == 4) {
        pause_us(100);
        listen_to(s);
    } else {
        speak(d, s, c);
    }
}

/* Until rank 0 has told one more stranger that it is none of the job. */
static void ask(door *d, const rank *zero)
{
    int fd = knock(d, zero);
    if (fd < 0)
        return;
    shm_packet m;
    size_t count;
    shm_packet_init(&m, SHM_PACKET_HELLO, 0, 0, ZC_OK, "");
    if (shm_packet_send(fd, &m, NULL, 0) == 1) /* else it listens no more */
        while (shm_packet_receive(fd, &m, NULL, 0, &count) == 0 && !zero->done)
            pause_us(100);
    close(fd);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static rank ranks[RANKS];
    static door d;
    choices c = {data, bytes};
    door_open();
    size_t fds = count_fds();
    memset(&d, 0, sizeof d);
    start(&ranks[0], 0, 20 * SECOND);
    int stay = take_below(&c, 2);
    for (unsigned acts = 0; c.left && acts < 40; acts++)
        act(&d, &ranks[0], &c);
    ask(&d, &ranks[0]); /* what came before is heard in the same turn of its loop at the latest, and the second one later */
    ask(&d, &ranks[0]);
    for (size_t i = 0; i < d.count; i++)
        listen_to(&d.strangers[i]);
    if (d.taken || !stay)
        while (d.count)
            leave(&d, &d.strangers[0]);
    int others = !ranks[0].done;
    for (size_t q = 1; q < RANKS && others; q++)
        start(&ranks[q], q, d.taken ? SECOND / 20 : 20 * SECOND); /* rank 0 may have failed already, and be gone */
    for (size_t q = 1; q < RANKS && others; q++)
        finish(&ranks[q], !d.taken);
    ranks[0].stop = d.taken;
    finish(&ranks[0], !d.taken);
    while (d.count)
        leave(&d, &d.strangers[0]);
    MUST(count_fds() == fds, "%zu descriptors, there were %zu", count_fds(), fds);
    return 0;
}
