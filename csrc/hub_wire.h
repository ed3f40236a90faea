/*
 * The messages between a rank and the hub, and how they cross a socket that does
 * not block; hub_comm.h says what they are for.
 *
 *   kind      from   group, what else it carries
 *   HELLO     rank   `root`: its rank, `number`: of how many, `count`: its process
 *   CALL      rank   one rank's part of a meeting; payload: hub_words, then data
 *   LATE      rank   the timeout of call `call` is over: who is missing?
 *   DECLARE   rank   `tag`: the line, `count`: the detail; payload: hub_words
 *   BEHIND    rank   `tag`: the line, `number`: who has declared less often? An ANSWER comes
 *   POISON    rank   `status`; payload: a sentence
 *   CLOSE     rank   will not call on this group again
 *   BYE       rank   nor on any other: the last message
 *   ANSWER    hub    to call `call`; `count`: a number, payload: data, `more` is to come
 *   REFUSED   hub    to call `call`; `status`, payload: a sentence; the group goes on
 *   FAILED    hub    `status`; payload: a sentence
 *   CLOSED    hub    member `root` has closed
 *   ENDED     hub    no more messages; payload: a sentence
 *   BEAT      both   nothing: still there
 *
 * A CALL is matched with those of the other members by group, channel, tag and
 * number.  Channel 0 of a group is for calls that name none.
 */
#ifndef HUB_WIRE_H
#define HUB_WIRE_H

#include "comm.h"

#include <pthread.h>
#include <sys/types.h>

#define HUB_MAGIC 0x3148435au /* "ZCH1": another number with every change of the format */
#define HUB_RANKS_MAX 1024u
#define HUB_PAYLOAD_BYTES (1u << 20)
#define HUB_BACKLOG_BYTES ((size_t)256 << 20) /* that one side may keep for the other */
#define HUB_TEXT_BYTES 900u
#define HUB_NAME_BYTES 64u
#define HUB_BASE 0u /* channel */

typedef enum hub_kind {
    HUB_HELLO = 1,
    HUB_CALL,
    HUB_LATE,
    HUB_DECLARE,
    HUB_BEHIND,
    HUB_POISON,
    HUB_CLOSE,
    HUB_BYE,
    HUB_ANSWER,
    HUB_REFUSED,
    HUB_FAILED,
    HUB_CLOSED,
    HUB_ENDED,
    HUB_BEAT,
    HUB_KIND_END
} hub_kind;

/* Of a CALL. */
typedef enum hub_operation {
    HUB_START = 1,
    HUB_EXCHANGE,
    HUB_BARRIER,
    HUB_CHANNEL_OPEN,
    HUB_SPLIT,
    HUB_ALL_REDUCE,
    HUB_REDUCE_SCATTER,
    HUB_ALL_GATHER,
    HUB_BROADCAST,
    HUB_OPERATION_END
} hub_operation;

/* As it crosses the wire, on little-endian machines, which all are that have GPUs. */
typedef struct hub_header {
    uint32_t magic;
    uint16_t kind;
    uint8_t operation, more;
    uint32_t group, channel, tag;
    int32_t status;   /* of a CALL: not ZC_OK when the caller cannot do its part; its data are the sentence */
    uint64_t call;    /* the caller's number for it */
    uint64_t number;
    uint64_t count;
    uint32_t root;
    uint8_t dtype, op, several, unused; /* several: threads of the rank call */
    uint32_t bytes;   /* of the payload */
    uint32_t spare;
} hub_header;

_Static_assert(sizeof(hub_header) == 64, "the wire's format");
_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "data cross the wire as they lie in memory");

/* What messages call it: of the caller's operation and of its channel. */
typedef struct hub_words {
    char what[COMM_WHAT_BYTES];
    char name[HUB_NAME_BYTES];
} hub_words;

/* Bytes of one part of a large array that N ranks combine: the hub holds N of them. */
static inline size_t hub_part_bytes(size_t ranks)
{
    size_t share = ((size_t)32 << 20) / ranks;
    return share < (256u << 10) ? share : 256u << 10;
}

/* NULL, or what is wrong with it: "a message of unknown kind 77". */
const char *hub_header_check(const hub_header *header, int from_hub);

/* Memory that several queues may be sending from; freed with its last user. Only one thread has it. */
typedef struct hub_blob {
    size_t users, bytes;
    _Alignas(64) char data[];
} hub_blob;

hub_blob *hub_blob_new(size_t bytes);
hub_blob *hub_blob_keep(hub_blob *blob);
void hub_blob_drop(hub_blob *blob); /* NULL is allowed */

/* A message that is arriving. The payload is in `blob`, which whoever takes it sets to NULL. */
typedef struct hub_input {
    int from_hub;
    hub_header header;
    hub_blob *blob;
    size_t got_bytes; /* of both */
} hub_input;

typedef enum hub_got { HUB_GOT_NOTHING, HUB_GOT_MESSAGE, HUB_GOT_END } hub_got;

/*
 * Takes what has arrived, one message at the most.  Of HUB_GOT_END `why` is the
 * reason: "its connection ended", "it sent a message of unknown kind 77".
 */
hub_got hub_input_take(hub_input *input, int fd, char *why, size_t room_bytes);
static inline const char *hub_input_payload(const hub_input *input)
{
    return input->header.bytes ? input->blob->data : "";
}

/* A payload as a sentence or a name: cut, ended, without control characters. */
void hub_text(char *to, size_t room_bytes, const char *from, size_t bytes);

/* As send without waiting: how many bytes went (0: none for now), or -1 when the connection is over. */
ssize_t hub_send(int fd, const void *head, size_t head_bytes, const void *rest, size_t rest_bytes);

/* The socket will not wait, be inherited, or collect small messages. */
zc_status hub_socket_prepare(int fd);

uint64_t hub_now_ns(void);

/* A thread that takes no signals. */
zc_status hub_thread(pthread_t *thread, void *(*body)(void *), void *context, size_t rank);

#endif
