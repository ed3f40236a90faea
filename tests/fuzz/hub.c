/*
 * The hub (csrc/hub_server.c and its files) of three ranks on several hosts, two of which may say anything.
 *
 * An input is a sequence of messages of the ranks, whole or cut, with fields that are right, at some limit, or
 * wrong.  Rank 0 says only what a rank says.  The hub's loop runs in this thread, one message at a time, so the same
 * input always does the same.
 *
 *   rank 0's connection is never ended for what it or the others say
 *   what the hub sends is well-formed, and an answer is to a call that this rank has made and has no answer to yet
 *   each group fails once
 *   nothing is left: no memory, no descriptor
 */
#include "hub_server.c"

#include "target.h"
#include "together.h"

#include <sys/socket.h>

#define RANKS 3u
#define CALLS_MAX 4096u /* numbers of calls that are watched */
#define GROUPS_MAX 64u
#define PLANNED 6u /* operations, which all ranks have in common */

typedef struct peer {
    int fd;         /* the rank's end */
    hub_input input;
    uint64_t last_call, calls; /* calls: of next_call */
    uint16_t waits[CALLS_MAX]; /* calls of this number without an answer */
    uint8_t failed[GROUPS_MAX];
    int closed, parted;
    int torn;       /* it has cut a message: what it calls is not what it meant to */
} peer;

/* ---- what the hub says ---------------------------------------------------------- */

static void hear(peer *p)
{
    char why[160] = "";
    hub_got got;
    while ((got = hub_input_take(&p->input, p->fd, why, sizeof why)) == HUB_GOT_MESSAGE) {
        const hub_header *h = &p->input.header;
        if ((h->kind == HUB_ANSWER || h->kind == HUB_REFUSED) && h->call < CALLS_MAX && !p->torn) {
            MUST(p->waits[h->call], "an answer to call %llu", (unsigned long long)h->call);
            p->waits[h->call] -= h->kind == HUB_REFUSED || !h->more;
        }
        if (h->kind == HUB_FAILED && h->group < GROUPS_MAX)
            MUST(!p->failed[h->group]++, "group %u failed twice", h->group);
    }
    MUST(got != HUB_GOT_END || !strncmp(why, "its connection ended", 20), "the hub: %s", why);
}

/* ---- what ranks say ---------------------------------------------------------------- */

static void send_all(peer *p, hub_header *header, const void *payload, size_t cut)
{
    char message[sizeof *header + 4096];
    size_t bytes = header->bytes < 4096 ? header->bytes : 4096;
    memcpy(message, header, sizeof *header);
    memcpy(message + sizeof *header, payload, bytes);
    bytes += sizeof *header;
    p->torn |= cut < bytes || header->bytes > 4096;
    send(p->fd, message, cut < bytes ? cut : bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if ((header->kind == HUB_CALL || header->kind == HUB_BEHIND) && header->call < CALLS_MAX)
        p->waits[header->call]++;
}

/*
 * A rank's next call on the group of all, as hub_comm.c makes it: the k-th is the same operation on all ranks. What
 * else there is to it fits, too.
 */
static uint32_t next_call(peer *p, size_t rank, const uint8_t *operations, hub_header *h)
{
    h->kind = HUB_CALL;
    h->call = ++p->last_call;
    h->operation = (uint8_t)(HUB_BARRIER + operations[p->calls % PLANNED] % (HUB_OPERATION_END - HUB_BARRIER));
    h->number = ++p->calls;
    switch ((hub_operation)h->operation) {
    case HUB_CHANNEL_OPEN: h->count = 3; return 0;
    case HUB_SPLIT: h->count = rank == 2 ? (uint64_t)-1 : 7; return 0;
    case HUB_ALL_REDUCE: h->count = 2; return 2 * sizeof(float);
    case HUB_REDUCE_SCATTER: h->count = 1; return RANKS * sizeof(float);
    case HUB_ALL_GATHER: h->count = 5; return 5;
    case HUB_BROADCAST: h->count = 9; h->root = 1; return rank == 1 ? 9 : 0;
    default: return 0;
    }
}

/* Rank 0: what hub_comm.c may send, and in that order. */
static void say_right(peer *p, const uint8_t *operations, choices *c)
{
    static const struct {
        hub_words words;
        char data[64];
    } payload = {.words = {"call", ""}};
    hub_header header = {.magic = HUB_MAGIC};
    unsigned what = take_below(c, 16);
    if (p->closed) {
        if (p->parted || !(p->parted = what == 0))
            return;
        header.kind = HUB_BYE;
    } else if (what == 0 && take_below(c, 4) == 0) {
        header.kind = HUB_CLOSE;
        p->closed = 1;
    } else if (what < 3) {
        header.kind = HUB_DECLARE;
        header.tag = what % COMM_LINES;
        header.count = take_byte(c);
        header.bytes = sizeof payload.words;
    } else if (what == 3) {
        header.kind = HUB_BEHIND;
        header.call = ++p->last_call;
        header.number = take_byte(c);
    } else if (what == 4) {
        header.kind = HUB_LATE;
        header.call = p->last_call;
    } else if (p->last_call < 900) {
        header.bytes = (uint32_t)sizeof payload.words;
        header.bytes += next_call(p, 0, operations, &header);
    } else {
        header.kind = HUB_BEAT;
    }
    send_all(p, &header, &payload, SIZE_MAX);
}

/* The others: a message that is right but for some fields, or any. */
static void say(peer *p, size_t rank, const uint8_t *operations, choices *c)
{
    static char payload[4096];
    hub_words *words = (hub_words *)payload;
    static const uint8_t kinds[] = {HUB_CALL, HUB_CALL, HUB_CALL, HUB_DECLARE, HUB_BEHIND, HUB_LATE, HUB_POISON, HUB_CLOSE,
                                    HUB_HELLO, HUB_BEAT, HUB_BYE, HUB_ANSWER};
    memset(payload, 0, sizeof payload);
    hub_header h = {.magic = HUB_MAGIC};
    uint32_t data_bytes = 0;
    size_t cut = SIZE_MAX;
    if (take_below(c, 4)) {
        data_bytes = next_call(p, rank, operations, &h);
    } else {
        h.kind = kinds[take_below(c, sizeof kinds)];
        h.call = ++p->last_call;
    }
    if (h.kind == HUB_HELLO) {
        h.root = (uint32_t)rank;
        h.number = RANKS;
    }
    if (h.kind == HUB_CALL && !h.operation) { /* on some group and channel */
        static const uint8_t sizes[] = {0, 4, 8, 12, 24, 96};
        h.operation = (uint8_t)(1 + take_below(c, HUB_OPERATION_END));
        h.group = take_below(c, 4);
        h.number = 1 + take_below(c, 4);
        h.channel = h.operation == HUB_EXCHANGE ? 1 + take_below(c, 2) : 0;
        data_bytes = sizes[take_below(c, sizeof sizes)];
        h.count = h.operation == HUB_EXCHANGE ? data_bytes : take_below(c, 4);
    }
    h.bytes = h.kind == HUB_CALL || h.kind == HUB_DECLARE ? (uint32_t)sizeof *words + data_bytes
              : h.kind == HUB_POISON ? 1 + take_below(c, 40) : 0;
    if (h.kind == HUB_POISON)
        h.status = ZC_ENOMEM;
    snprintf(words->what, sizeof words->what, "call");
    for (unsigned changes = take_below(c, 8) / 6; changes; changes--) {
        uint64_t value = take_number(c);
        switch (take_below(c, 18)) {
        case 0: h.magic = (uint32_t)value; break;
        case 1: h.kind = (uint16_t)value; break;
        case 2: h.operation = (uint8_t)value; break;
        case 3: h.more = (uint8_t)value; break;
        case 4: h.group = (uint32_t)value; break;
        case 5: h.channel = (uint32_t)value; break;
        case 6: h.tag = (uint32_t)value; break;
        case 7: h.status = (int32_t)(0 - value); break;
        case 8: h.call = value; break;
        case 9: h.number = value; break;
        case 10: h.count = value; break;
        case 11: h.root = (uint32_t)value; break;
        case 12: h.dtype = (uint8_t)value; break;
        case 13: h.op = (uint8_t)value; break;
        case 14: h.several = (uint8_t)value; break;
        case 15: h.bytes = (uint32_t)value; break;
        case 16: cut = value; break;
        default: take_bytes(c, payload, value % 200);
        }
    }
    send_all(p, &h, payload, cut);
}

/* ---- the hub ---------------------------------------------------------------------------- */

static void turn(hub_server *server, peer *peers)
{
    for (size_t r = 0; r < RANKS; r++) {
        if (server->conn[r].socket.fd < 0)
            continue;
        if (server->conn[r].first)
            flush(server, r);
        take(server, r);
    }
    MUST(!server->conn[0].ending || peers[0].parted, "rank 0 was given up: %s", server->conn[0].reason);
    settle_ends(server);
    for (size_t r = 0; r < RANKS; r++)
        hear(&peers[r]);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    static peer peers[RANKS];
    choices c = {data, bytes};
    size_t fds = count_fds();
    hub_server *server = server_new(RANKS);
    MUST(server, "no memory");
    server->beat_ns = SECOND;
    memset(peers, 0, sizeof peers);
    for (size_t r = 0; r < RANKS; r++) {
        int pair[2];
        MUST(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0, "socketpair");
        hub_fork_keep(&server->conn[r].socket, pair[0]);
        server->path[r] = (uint32_t)r;
        peers[r] = (peer){.fd = pair[1], .input = {.from_hub = 1}};
    }
    server->world = hub_circle_new(server, server->path, RANKS);
    MUST(server->world, "no memory");
    unsigned greeted = take_byte(&c);
    uint8_t operations[PLANNED];
    for (size_t k = 0; k < PLANNED; k++)
        operations[k] = take_byte(&c);
    for (size_t r = 0; r < RANKS; r++) {
        hub_header hello = {.magic = HUB_MAGIC, .kind = HUB_HELLO, .root = (uint32_t)r, .number = RANKS, .count = 1};
        if (r == 0 || greeted % 8)
            send_all(&peers[r], &hello, "", SIZE_MAX);
    }
    turn(server, peers);
    for (unsigned messages = 0; c.left && messages < 400; messages++) {
        unsigned who = take_below(&c, 16);
        if (who < 5)
            say(&peers[1], 1, operations, &c);
        else if (who < 10)
            say(&peers[2], 2, operations, &c);
        else if (who < 14)
            say_right(&peers[0], operations, &c);
        else if (who == 14)
            hub_match_cycles(server, hub_now_ns() + 2 * SECOND); /* as if all had waited for a while */
        else
            shutdown(peers[1 + take_below(&c, 2)].fd, SHUT_WR);
        if (who < 14 || take_below(&c, 2))
            turn(server, peers);
    }
    for (size_t r = 0; r < RANKS; r++) {
        MUST(server->conn[r].calls <= HUB_CALLS_MOST, "%zu calls", server->conn[r].calls);
        close(peers[r].fd);
        hub_blob_drop(peers[r].input.blob);
    }
    destroy(server);
    MUST(count_fds() == fds, "%zu descriptors, there were %zu", count_fds(), fds);
    return 0;
}
