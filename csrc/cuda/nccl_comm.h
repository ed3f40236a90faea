/*
 * Collectives between GPUs: comm.h on NCCL.
 *
 * Two planes.  The ranks meet on the host through another communicator (the
 * shared-memory one, "host" below): start-up, small records, plain arrays,
 * groups, failures and their reasons.  Only what lies on GPUs goes through NCCL.
 * With one rank there is nothing to communicate, and no NCCL is loaded.
 *
 * Lanes.  NCCL matches operations by their order on a communicator, and runs
 * them in that order.  There are two: gathers of units (all_gather_to), which
 * ranks post while they compute, and everything else.  A rank may hold a
 * reduction back until its backward is over and still take part in the gathers
 * that its peers need to get there.  On each lane every rank must post the same
 * operations in the same order; that holds for all channels together.
 *
 * Order on the GPU is by events only.  An operation's lane waits for what was
 * enqueued on the caller's stream; an event behind the operation is its ticket,
 * waiting for a ticket makes the caller's stream wait for that event, and testing
 * one only looks at it.
 *
 * Sums.  NCCL promises no order of addition.  `deterministic` reductions are
 * sends and receives of slices and one kernel that adds them in rank order, the
 * sum that comm.h describes, at the traffic of a reduce-scatter.  Otherwise NCCL
 * adds, in fp32 (16-bit gradients are widened first) or fp64.
 *
 * Nobody waits for ever.  NCCL's own functions do not block (its communicators
 * are of the non-blocking kind), and a watchdog looks at the operations under way:
 * if NCCL reports an error, a rank is gone, or an operation takes longer than the
 * timeout, the group is poisoned with the reason, the NCCL communicators are
 * aborted and whatever waits on the GPU ends.
 *
 * Nobody gets another operation's result.  NCCL compares nothing: two operations of
 * one size that ranks post in different order would give wrong sums, others hang.  So
 * each is declared on the host (comm_declare, one line for each lane) before NCCL gets
 * it, and ranks that differ get ZC_EMISMATCH with both sides.  Between hosts a declaration
 * travels, and NCCL may have both operations before it arrives.  What comes of them is
 * used for nothing that stays: the ranks' next meeting on the host comes behind the
 * declarations, and fails.  The number of declarations tells a timeout who has not come, too.
 *
 * Of the host's communicator this needs channels without regions, records, plain arrays,
 * declarations, groups and failures, and no memory that ranks can see.
 */
#ifndef NCCL_COMM_H
#define NCCL_COMM_H

#include "comm.h"
#include "device.h"

typedef struct nccl_comm_config {
    zc_comm *host;      /* of the same ranks; the new communicator's from now on, also after a failure */
    int ordinal;        /* this rank's GPU */
    int deterministic;
    const char *wheel;  /* nccl_open's */
} nccl_comm_config;

/* Collective. All ranks succeed or all fail. */
zc_status nccl_comm_create(const nccl_comm_config *config, zc_comm **out);

#endif
