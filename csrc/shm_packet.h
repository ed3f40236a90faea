/*
 * The packets of the rendezvous: one fixed size, with descriptors.
 *
 * A socket of packets (SOCK_SEQPACKET) gives whole ones or none.  A stranger
 * may send anything: whatever is not a packet of this size and magic, with a
 * status that there is, is refused, and descriptors that came with it are closed.
 */
#ifndef SHM_PACKET_H
#define SHM_PACKET_H

#include "zc_status.h"

#include <stddef.h>
#include <stdint.h>

#define SHM_PACKET_VERSION 2u
#define SHM_PACKET_FDS 128u

typedef enum shm_packet_kind {
    SHM_PACKET_HELLO = 1,
    SHM_PACKET_WELCOME,
    SHM_PACKET_TABLE,
    SHM_PACKET_ATTACHED,
    SHM_PACKET_ANSWER
} shm_packet_kind;

typedef struct shm_packet {
    uint64_t magic;
    uint32_t version, kind;
    uint32_t rank, ranks;  /* hello: of the sender; table: first rank, number of ranks */
    int32_t status;        /* attached, answer */
    uint32_t number;       /* hello: bytes of the token; welcome: ms after which rank 0 has told how the start went */
    char text[512];        /* hello: the token; otherwise a sentence */
} shm_packet;

void shm_packet_init(shm_packet *m, int kind, uint32_t rank, uint32_t ranks, zc_status status, const char *text);

/* Never blocks. 1 sent, 0 not now, -1 with errno. */
int shm_packet_send(int fd, const shm_packet *m, const int *fds, size_t count);

/*
 * Never blocks.  1 a packet of the right form, 0 not now, -1 end (errno 0) or
 * garbage (EPROTO) or an error.  *count descriptors (close-on-exec) now belong
 * to the caller; beyond `room`, and unless 1 is returned, they are closed.
 */
int shm_packet_receive(int fd, shm_packet *m, int *fds, size_t room, size_t *count);

#endif
