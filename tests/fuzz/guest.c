/*
 * Rank 1 of three ranks of one host (csrc/shm_rendezvous.c), which meets a rank 0 that is none.
 *
 * An input is what that rank 0 answers to the hello: welcomes, tables with too few, too many or other descriptors,
 * answers, packets of no kind, in any order.  Then it goes away, and refuses the rank when it comes again.
 *
 *   the rank meets only if all three ranks' descriptors came in order, of the right kinds, and it was let in after
 *   it had attached; otherwise it returns an error of the core with a sentence, and has no descriptors
 *   it attaches once at the most, and does not hang
 */
#define _GNU_SOURCE
#include "door.h"

#include "shm_segment.h"

#include <poll.h>
#include <pthread.h>

#define RANKS 3u
#define TABLE_MAX 8u /* descriptors in one packet */

typedef struct guest {
    pthread_t thread;
    shm_rendezvous meeting;
    shm_peer peers[RANKS];
    zc_status status;
    char text[1024];
    zc_status attached; /* what it says of that */
    unsigned attachments;
    int improper; /* descriptors */
} guest;

static zc_status attach(void *context, const shm_peer *peers)
{
    guest *g = context;
    g->attachments++;
    for (size_t q = 0; q < RANKS; q++)
        g->improper |= !is_memory(peers[q].memory_fd) || !is_process(peers[q].process_fd);
    return g->attached == ZC_OK ? ZC_OK : zc_fail(g->attached, "it cannot");
}

static void *meet(void *context)
{
    guest *g = context;
    g->status = shm_rendezvous_meet(&g->meeting, g->peers);
    snprintf(g->text, sizeof g->text, "%s", zc_last_error());
    return NULL;
}

/* ---- rank 0 ---------------------------------------------------------------- */

static int listen_here(void)
{
    struct sockaddr_un address;
    socklen_t bytes = door_address(&address);
    int fd = door_socket();
    MUST(bind(fd, (struct sockaddr *)&address, bytes) == 0 && listen(fd, 8) == 0, "listen");
    return fd;
}

static int wait_for(int fd)
{
    struct pollfd ready = {fd, POLLIN, 0};
    int count;
    do
        count = poll(&ready, 1, 5000);
    while (count < 0 && errno == EINTR);
    return count == 1;
}

/* The hello, and its descriptors away. */
static void hear_hello(int fd)
{
    shm_packet m;
    int fds[4];
    size_t count = 0;
    MUST(wait_for(fd) && shm_packet_receive(fd, &m, fds, 4, &count) == 1 && m.kind == SHM_PACKET_HELLO, "no hello");
    for (size_t i = 0; i < count; i++)
        close(fds[i]);
}

/* A packet as rank 0 sends it, or not; the next table begins at *next. */
static void say(int fd, choices *c, unsigned *next)
{
    shm_packet m;
    int fds[TABLE_MAX];
    size_t count = 0;
    static const uint8_t packets[] = {SHM_PACKET_WELCOME, SHM_PACKET_TABLE, SHM_PACKET_TABLE, SHM_PACKET_TABLE,
                                      SHM_PACKET_ANSWER, SHM_PACKET_HELLO, SHM_PACKET_ATTACHED, 0};
    unsigned kind = packets[take_below(c, sizeof packets)];
    shm_packet_init(&m, (int)kind, 0, 0, ZC_OK, "a sentence");
    if (kind == SHM_PACKET_WELCOME)
        m.number = 100;
    if (kind == SHM_PACKET_TABLE) {
        m.rank = *next;
        m.ranks = take_below(c, 2) ? take_below(c, 4) : RANKS - *next % (RANKS + 1);
        *next += m.ranks;
        count = 2 * m.ranks;
    }
    for (size_t i = 0; i < TABLE_MAX; i++)
        fds[i] = kinds[i % 2 ? PROCESS : SEALED];
    for (unsigned changes = take_below(c, 8) / 5; changes; changes--) {
        uint64_t value = take_number(c);
        switch (take_below(c, 7)) {
        case 0: m.magic ^= value; break;
        case 1: m.rank = (uint32_t)value; break;
        case 2: m.ranks = (uint32_t)value; break;
        case 3: m.status = (int32_t)(take_byte(c) % 2 ? value : -value); break;
        case 4: m.number = (uint32_t)value % 300; break; /* ms that the rank then waits for; not so long here */
        case 5: count = value % (TABLE_MAX + 1); break;
        default: fds[value % TABLE_MAX] = kinds[take_below(c, KINDS)];
        }
    }
    door_send(fd, &m, sizeof m, fds, count);
}

static void refuse(int fd)
{
    shm_packet m;
    shm_packet_init(&m, SHM_PACKET_ANSWER, 0, 0, ZC_ECOMM, "it is over");
    shm_packet_send(fd, &m, NULL, 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    choices c = {data, bytes};
    door_open();
    size_t fds = count_fds();
    guest g = {.meeting = {.rank = 1, .ranks = RANKS, .job = job, .token = "token", .start_timeout_ns = 2 * SECOND,
                           .attach = attach, .attach_context = &g},
               .attached = take_below(&c, 4) ? ZC_OK : ZC_ENOMEM};
    shm_segment memory;
    MUST(shm_segment_open(&memory) == ZC_OK, "%s", zc_last_error());
    g.peers[1] = (shm_peer){memory.fd, shm_process_open()};
    int door = listen_here();
    MUST(pthread_create(&g.thread, NULL, meet, &g) == 0, "thread");
    MUST(wait_for(door), "nobody came");
    int fd = accept4(door, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
    MUST(fd >= 0, "accept");
    hear_hello(fd);
    unsigned next = 0;
    for (unsigned packets = 0; c.left && packets < 30; packets++)
        say(fd, &c, &next);
    shutdown(fd, SHUT_WR); /* its own answers go somewhere, so that it hears all of this */
    for (int over = 0; !over;) {
        over = pthread_tryjoin_np(g.thread, NULL) == 0;
        int again = accept4(door, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (again >= 0) {
            refuse(again);
            if (!over && wait_for(again))
                hear_hello(again);
            close(again);
        }
        pause_us(50);
    }
    close(fd);
    close(door);
    MUST(is_status(g.status), "returned %d", (int)g.status);
    MUST(g.status == ZC_OK || g.text[0], "no sentence");
    MUST(!g.improper, "it has not the sealed memory and the process of each");
    MUST(g.attachments <= 1, "attached %u times", g.attachments);
    MUST(g.status != ZC_OK || (g.attachments && g.attached == ZC_OK), "met without having attached");
    for (size_t q = 0; q < RANKS; q++) {
        int open = g.peers[q].memory_fd >= 0 && g.peers[q].process_fd >= 0;
        MUST(open == (g.status == ZC_OK || q == 1), "peer %zu", q);
        if (open) {
            close(g.peers[q].memory_fd);
            close(g.peers[q].process_fd);
        }
    }
    MUST(count_fds() == fds, "%zu descriptors, there were %zu", count_fds(), fds);
    return 0;
}
