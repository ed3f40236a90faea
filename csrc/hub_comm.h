/*
 * comm.h between hosts, for what is small: records, agreements, plain arrays,
 * failures and their reasons.  What is large lies on GPUs there, and goes through
 * NCCL, whose host communicator this is.  So it has no regions (region_alloc is
 * ZC_EINVAL, with a sentence that says what to use) and no operations on them.
 *
 * The hub.  Every rank has one connection, to the hub: a thread of rank 0's
 * process (rank 0 itself is connected by a socket pair).  The hub is the only
 * place where anything is matched, so nothing is locked and nothing races there:
 * one loop reads requests, keeps for every group, channel, tag and number what has
 * arrived, answers when the last rank has come, and decides who is wrong, late or
 * lost.  A rank has a reader thread, which takes answers and bad news while its
 * other threads compute.
 *
 * Messages (hub_wire.h) are a fixed header and a payload.  Anything else (another
 * magic, a length over the limit, an unknown kind, a rank that speaks out of turn)
 * ends that connection, and its rank counts as lost; nothing that arrives from a
 * socket is trusted to be well-formed, by either side.  Neither side ever waits
 * inside a send: what the other does not take is kept, and when that becomes too
 * much, the connection ends.
 *
 * A meeting that a rank cannot do its part of for lack of memory is refused: the
 * rank takes part in it with its reason instead, all return that, and the group is
 * as before.  Lack of memory at the hub fails the group.
 *
 * Failure.  A connection that ends without a farewell is a lost rank; forked
 * children let go of it (hub_fork.h).  So is a host that falls silent: both sides
 * send a beat at least every HUB_BEAT_NS and take HUB_SILENCE_BEATS times that
 * without anything for the end (TCP alone would take minutes).  The hub tells
 * all ranks of every group the rank is in, with the sentence; the first reason
 * stays, but an answer that was given before still counts.  If the hub's process
 * ends, every rank sees its own connection end, and that is the loss of rank 0.  A
 * wait that takes longer than the timeout is reported to the hub, which knows who
 * is missing and fails the group with their names.  Ranks that wait for one another,
 * each calling from one thread, are given a beat to prove otherwise.
 *
 * Declarations are kept at the hub as long as some rank is still to pass them:
 * hub_lines.c.
 *
 * Closing the last group waits for the hub to take the farewell, a second at the
 * most.  Rank 0's keeps the hub until all ranks have closed theirs or have no group
 * left that can go on, and waits for that, at most HUB_LINGER_BEATS.
 *
 * Cost: one round trip, and for N ranks N messages through one process; records of
 * all ranks to all ranks are N * N * bytes through its network card.  There are
 * about two meetings in a training step.
 */
#ifndef HUB_COMM_H
#define HUB_COMM_H

#include "comm.h"

#define HUB_BEAT_NS 1000000000ull
#define HUB_SILENCE_BEATS 10u
#define HUB_LINGER_BEATS 5u

#endif
