/*
 * How the ranks of one job on one host find each other and exchange the
 * descriptors of their memory.
 *
 * Rank 0 listens on an abstract Unix socket named by user and job; the others
 * connect, again and again until it is there.  A name in the abstract space is
 * gone with its socket, so nothing can be left behind.  Messages are packets
 * (SOCK_SEQPACKET), so there are no half messages, only wrong ones:
 *
 *   rank q -> 0   hello: versions, rank, number of ranks, token; descriptors of its memory and of its process
 *   0 -> rank q   welcome, and how long it may take - or answer: refused, with a sentence
 *   0 -> rank q   tables: the descriptors of all ranks, some ranks a packet
 *   rank q -> 0   attached: it has mapped everything, or why not
 *   0 -> rank q   answer: go, or the first failure of any rank
 *
 * Rank 0 stops listening before it sends the first table, so a rank that is
 * quick to begin another rendezvous of the same job cannot meet the old one.
 * A rank that has been welcomed and dies may be started again, at once: rank 0 tells
 * all that it is lost if another does not come in half a second, and a guest does so
 * when it is rank 0 that died.  Who died before that was never there, and is missing
 * at the end of the start timeout.
 * It never waits for one connection: all are polled, each has a deadline to
 * say hello, and only so many may be open.  Both sides check that the other
 * has the same user id.
 */
#ifndef SHM_RENDEZVOUS_H
#define SHM_RENDEZVOUS_H

#include "zc_status.h"

#include <stddef.h>
#include <stdint.h>

#define SHM_JOB_BYTES 80u
#define SHM_TOKEN_BYTES 256u

typedef struct shm_peer {
    int memory_fd;  /* -1: none */
    int process_fd; /* pidfd */
} shm_peer;

typedef struct shm_rendezvous {
    size_t rank, ranks;
    const char *job;
    const char *token; /* NULL: none */
    uint64_t start_timeout_ns;
    int (*interrupted)(void *context);
    void *interrupt_context;
    /* Called once all peers are known; its failure is everybody's. */
    zc_status (*attach)(void *context, const shm_peer *peers);
    void *attach_context;
} shm_rendezvous;

/*
 * Blocking.  peers[rank] is filled in by the caller and stays its own; on
 * success the others are descriptors that now belong to the caller
 * (close-on-exec), on failure they are -1.  ZC_ETIMEOUT names the ranks that did
 * not come; ZC_ECOMM: refused, or the name is in use by another job.
 */
zc_status shm_rendezvous_meet(const shm_rendezvous *rendezvous, shm_peer *peers);

#endif
