/*
 * The hub: a thread of rank 0's process, which alone touches everything in here.
 * hub_server.c moves messages, hub_match.c finds out what belongs together,
 * hub_answer.c works out what a complete meeting gives, and hub_lines.c compares
 * declarations.
 *
 * It never waits for a rank.  What a rank does not take is kept for it, up to
 * HUB_BACKLOG_BYTES; then the rank counts as lost.  What a rank says out of turn
 * ends its connection and nothing else.
 */
#ifndef HUB_SERVER_H
#define HUB_SERVER_H

#include "hub_fork.h"
#include "hub_wire.h"

#define HUB_CALLS_MOST 1024u /* of one rank, under way at one time */

typedef struct hub_server hub_server;

/* Takes the sockets[ranks], also on failure. A rank is heard of at least every beat. */
zc_status hub_server_start(const int *sockets, size_t ranks, uint64_t beat_ns, hub_server **out);
/* Waits for its end: all ranks have said BYE, or rank 0 has and the others are given up. Frees it. */
void hub_server_join(hub_server *server);

/* ---- between its files ---------------------------------------------------- */

typedef struct hub_item hub_item;
typedef struct hub_meeting hub_meeting;
typedef struct hub_circle hub_circle;

typedef struct hub_conn {
    hub_kept socket;       /* fd -1: closed */
    int greeted, parted;   /* HELLO came, BYE came */
    int deaf;              /* it takes nothing any more; what it has sent may tell why */
    int ending;            /* is closed before the loop waits again */
    uint64_t pid;
    hub_input input;
    hub_item *first, *last; /* what it has not taken yet */
    size_t kept_bytes;      /* of those, and of its calls' data */
    uint64_t heard_ns;
    char reason[160];       /* why it ends */
    /* what it does, as far as known */
    size_t calls;           /* under way */
    hub_meeting *meeting;   /* of the last of them */
    int several;            /* more than one thread calls */
    uint64_t did_ns;
    char did[COMM_WHAT_BYTES];
} hub_conn;

struct hub_server {
    size_t ranks;
    uint64_t beat_ns, tick_ns, linger_ns; /* the last two: when; linger_ns 0: rank 0 is there */
    hub_conn *conn;        /* [ranks] */
    hub_circle *circles;
    hub_circle *world;     /* the first of them, of all ranks; it stays to the end */
    uint32_t last_circle;
    uint32_t *path;        /* [2 * ranks]: for the search for ranks that wait for one another */
    pthread_t thread;
    struct pollfd *polled; /* [ranks] */
};

/* ---- hub_server.c ---- */

/* The header, `bytes` of text or `part_bytes` of a blob from `offset` on. */
void hub_tell(hub_server *server, size_t rank, const hub_header *header, const void *text, hub_blob *blob,
              size_t offset);
/* The connection ends before the loop waits again; the first reason stays. */
void hub_end(hub_server *server, size_t rank, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* "rank 3 (pid 1234)" */
const char *hub_name(const hub_server *server, size_t rank, char text[48]);

/* ---- hub_match.c ---- */

/* One rank's part of a meeting. */
typedef struct hub_part {
    int here;
    int32_t status;
    uint64_t call, count;
    hub_blob *blob; /* hub_words and data */
    size_t bytes;   /* of the data */
} hub_part;

/* The calls that belong together. */
struct hub_meeting {
    hub_meeting *next;
    hub_circle *circle;
    hub_header header; /* of the first that came */
    hub_words words;
    size_t first, here; /* which member that is; how many have come */
    hub_part part[];    /* [members] */
};

typedef struct hub_declared {
    uint64_t detail, chain; /* chain: of all details up to this one */
    uint32_t rank;          /* who came first */
    char what[COMM_WHAT_BYTES];
} hub_declared;

/* Entries last - kept + 1 to last, number k at k % room. */
typedef struct hub_line {
    uint64_t last;
    size_t kept, room;
    hub_declared *entry;
    uint64_t *count, *chain; /* [members] */
} hub_line;

/* A group, as the hub has it. */
struct hub_circle {
    hub_circle *next;
    uint32_t id, channels;
    size_t ranks, closed_count;
    uint32_t *member;      /* [ranks]: ascending */
    unsigned char *closed; /* [ranks] */
    zc_status failed;
    hub_meeting *meetings;
    hub_line line[COMM_LINES];
};

/* Members are circle->member[index]. NULL: no memory. */
hub_circle *hub_circle_new(hub_server *server, const uint32_t *member, size_t ranks);
void hub_circles_free(hub_server *server);
/* A message of a greeted rank; takes input->blob if it likes. */
void hub_match(hub_server *server, size_t rank, hub_input *input);
/* The rank is gone. */
void hub_match_lost(hub_server *server, size_t rank);
/* Whether the rank is in a group that can still go on. */
int hub_match_hopes(const hub_server *server, size_t rank);
/* Looks for ranks that wait for one another, which fails their groups. */
void hub_match_cycles(hub_server *server, uint64_t now_ns);
/* Tells all members but `except` (a rank; server->ranks: none). The first failure stays. */
void hub_circle_fail(hub_server *server, hub_circle *circle, size_t except, zc_status status, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

static inline const char *hub_part_data(const hub_part *part)
{
    return part->blob->data + sizeof(hub_words);
}

/* ---- hub_answer.c ---- */

/* NULL, or what is wrong with a CALL by itself. */
const char *hub_call_check(const hub_circle *circle, size_t index, const hub_header *header);
int hub_call_agrees(const hub_meeting *meeting, const hub_header *header, const hub_words *words);
/* "all_reduce(8 elements of float32, sum)" */
void hub_call_describe(const hub_header *header, const hub_words *words, char *text, size_t room_bytes);
/* Everybody has come: tells each what comes of it. */
void hub_meeting_answer(hub_server *server, hub_meeting *meeting);

/* ---- hub_lines.c ---- */

zc_status hub_line_init(hub_line *line, size_t ranks);
void hub_line_clear(hub_line *line);
void hub_line_declare(hub_server *server, hub_circle *circle, size_t index, const hub_header *header, const char *what);
void hub_line_behind(hub_server *server, hub_circle *circle, size_t index, const hub_header *header);

#endif
