/*
 * The rank's side of the hub: what its files share.
 *
 *   hub_world    one per rank: the connection, the thread that reads it, the one
 *                mutex, all calls under way
 *   hub_group    a communicator: the world's own, or one made by split
 *   hub_channel  tags, each with the number of its last call; every group has one
 *                of its own, `base`, for the calls that name no channel
 *   hub_call     what a caller waits for; it lives on the caller's stack
 *
 * The mutex is held between hub_enter and hub_leave; a wait lets go of it.  A
 * message goes into `out` whole and from there to the socket as far as that takes
 * it; the reader sends the rest.  So nobody ever waits inside a send.
 *
 * Files: hub_world.c (birth, death and failure of worlds and groups, entering),
 * hub_reader.c (the thread, and what comes in), hub_call.c (calls and waiting),
 * hub_comm.c (the calls of comm.h), hub_array.c (those on plain arrays), hub_fork.c
 * (forked children let go of connections).
 */
#ifndef HUB_STATE_H
#define HUB_STATE_H

#include "hub_comm.h"
#include "hub_fork.h"
#include "hub_wire.h"

typedef struct hub_server hub_server;
typedef struct hub_world hub_world;
typedef struct hub_group hub_group;

/* Memory that is pieces of `piece_bytes`, the beginnings of which are `stride_bytes` apart; 0: all in one piece. */
typedef struct hub_span {
    char *base;
    size_t bytes, piece_bytes, stride_bytes;
} hub_span;

/* What a rank asks the others for. Of the zero-filled rest a call uses what it needs. */
typedef struct hub_request {
    uint8_t operation;
    const char *what, *name; /* name: of a channel */
    uint64_t count;
    uint32_t root;
    uint8_t dtype, op;
    zc_status status; /* this rank cannot do its part: its last error says why */
    hub_span from, to;
    hub_group *made;  /* of a split; NULL with a color below 0 */
    uint64_t value;   /* the answer's number */
} hub_request;

typedef struct hub_call {
    struct hub_call *next;
    hub_group *group;
    uint64_t id;
    hub_request *request;
    size_t got_bytes;
    int any_bytes;    /* the answer may be shorter than `to` */
    int done;
    zc_status status; /* ZC_OK, or a refusal */
    char text[HUB_TEXT_BYTES + 1];
} hub_call;

typedef struct hub_tag {
    uint64_t number;
    int busy;
    pthread_t thread; /* that is in it */
} hub_tag;

typedef struct hub_channel {
    comm_channel public;
    hub_group *group;
    uint32_t id, tags;
    char name[HUB_NAME_BYTES];
    hub_tag *tag; /* [tags] */
} hub_channel;

struct hub_group {
    zc_comm public;
    hub_world *world;
    hub_group *next;
    uint32_t id;       /* at the hub; HUB_OF_ONE: it does not know of it */
    uint32_t *member;  /* [ranks]: rank in the world */
    hub_channel base;
    hub_tag base_tag;
    uint64_t declared[COMM_LINES]; /* of a group of one rank */
    size_t channels, users;
    int closed;
    size_t parted;     /* a member that has closed; ranks: none */
    zc_status failed;
    char failed_text[HUB_TEXT_BYTES + 1];
};

struct hub_world {
    size_t rank, ranks;
    pid_t pid;
    size_t *host;       /* [ranks] */
    uint64_t beat_ns;
    pthread_mutex_t mutex;
    pthread_cond_t changed; /* on the monotonic clock */
    hub_kept socket;    /* fd -1: one rank, no connection */
    int wake_fd;        /* -1: as well */
    hub_server *server; /* rank 0's */
    pthread_t reader;
    int reading;        /* the reader was started */
    int ending;         /* BYE is in `out` */
    int unsendable;     /* nothing goes out any more; the reader will find out why */
    zc_status lost;     /* the connection is over */
    char lost_text[HUB_TEXT_BYTES + 1];
    hub_group *groups;  /* the world's own is the last */
    hub_call *calls;
    uint64_t last_call;
    char *out;
    size_t out_begin, out_end, out_room;
    hub_input input;    /* the reader's */
    pthread_t caller;   /* the first thread that called */
    int caller_known, several;
};

#define HUB_OF_ONE UINT32_MAX

static inline size_t hub_rank(const hub_group *group)
{
    return group->member[group->public.rank];
}

static inline int hub_alone(const hub_group *group)
{
    return group->public.ranks == 1;
}

/* ---- hub_world.c ---- */

/* No connection yet. */
zc_status hub_world_new(const hub_comm_config *config, hub_world **out);
/* Takes the sockets, also on failure; says HELLO. */
zc_status hub_world_connect(hub_world *world, const int *sockets);
/* One that has no groups. */
void hub_world_destroy(hub_world *world);

/* A group of up to `room` members, none of them in it yet. NULL: no memory. */
hub_group *hub_group_new(hub_world *world, size_t room);
/* One that nobody has seen. */
void hub_group_drop(hub_group *group);
/* The members are known: it is a group of the world from now on. */
void hub_group_join(hub_group *group, size_t ranks);
int hub_forked(const hub_world *world);
/* Begin and end of every call on a group; between them the mutex is held. */
zc_status hub_enter(hub_group *group);
void hub_leave(hub_group *group);
/* As hub_enter and hub_leave, for calls that also have to work on a group that has failed. Returns whether entered. */
int hub_enter_any(hub_group *group);
/* The failure of the group, or ZC_OK. */
zc_status hub_failure(const hub_group *group);
/* Fails the group on all ranks; returns status. The first failure stays. */
zc_status hub_fail(hub_group *group, zc_status status, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Fails it on this rank only: the others know. */
void hub_set_failed(hub_group *group, zc_status status, const char *text);
/* Adds a message to what goes out: header, words (NULL: none), data. */
zc_status hub_say(hub_world *world, const hub_header *header, const hub_words *words, const hub_span *data);
/* Sends what the socket takes. */
void hub_flush(hub_world *world);
/* No more connection: all groups fail. */
void hub_lose(hub_world *world, zc_status status, const char *text);
void hub_close(zc_comm *comm);

/* ---- hub_reader.c ---- */

zc_status hub_reader_start(hub_world *world);
/* After BYE: the reader sends the rest and ends with the connection, or after a second. */
void hub_reader_end(hub_world *world);

/* ---- hub_call.c ---- */

/* Keeps other threads of this rank off a tag. */
zc_status hub_busy_begin(hub_channel *channel, uint32_t tag);
void hub_busy_end(hub_channel *channel, uint32_t tag);
/* Blocking: the answer is in request->to and request->value. A busy tag; not for groups of one rank. */
zc_status hub_ask(hub_channel *channel, uint32_t tag, hub_request *request);
/* How many have declared less often, as comm_behind. */
size_t hub_ask_behind(hub_group *group, uint32_t line, uint64_t number, char *text, size_t room_bytes);

/* ---- hub_comm.c ---- */

extern const comm_ops hub_ops;

/* ---- hub_array.c ---- */

zc_status hub_array_all_reduce(zc_comm *comm, void *array, size_t count, zc_dtype dtype, comm_op op);
zc_status hub_array_reduce_scatter(zc_comm *comm, const void *from, void *to, size_t count, zc_dtype dtype, comm_op op);
zc_status hub_array_all_gather(zc_comm *comm, const void *from, void *to, size_t bytes);
zc_status hub_array_broadcast(zc_comm *comm, void *array, size_t bytes, size_t root);

#endif
