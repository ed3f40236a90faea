/*
 * comm.h between hosts, for what is small: records, agreements, plain arrays,
 * failures and their reasons.  What is large lies on GPUs there, and goes through
 * NCCL, whose host communicator this is.  So it has no regions (region_alloc is
 * ZC_EINVAL, with a sentence that says what to use) and no operations on them.
 *
 * The hub.  Every rank has one connection, to the hub: a thread of rank 0's
 * process (rank 0 itself is connected by a socket pair).  The hub is the only
 * place where anything is matched, so nothing is locked and nothing races there: one
 * loop reads requests, keeps for every group, channel and tag what has arrived, answers when
 * the last rank has come, and decides who is wrong, late or lost.  A
 * rank has a reader thread, which takes answers and bad news while its other threads
 * compute.
 *
 * Messages are a fixed header (magic, kind, group, channel, tag, number,
 * payload bytes; little-endian, explicit sizes) and a payload.  Anything else (another
 * magic, a length over the limit, an unknown kind, a rank that speaks out of turn)
 * ends that connection, and its rank counts as lost; nothing that arrives
 * from a socket is trusted to be well-formed, by either side.
 *
 * Failure.  A connection that ends without the word "close" is a lost rank.  So is a
 * host that falls silent: both sides send a beat every HUB_BEAT_NS and take
 * HUB_SILENCE_NS without any for the end (TCP alone would take minutes).  The hub
 * tells all ranks of every group the rank is in, with the sentence; the first reason stays.  If the hub's process ends, every rank
 * sees its own connection end, and that is the loss of rank 0.  A wait that takes
 * longer than the timeout is reported to the hub, which knows who is missing and poisons the
 * group with their names.
 *
 * Closing rank 0's communicator keeps the hub until all ranks have closed theirs,
 * at most HUB_LINGER_NS.
 *
 * Cost: one round trip, and for N ranks N messages through one process; records of all
 * ranks to all ranks are N * N * bytes through its network card.  At a few hundred ranks that is still below
 * a millisecond per meeting, and there are about two meetings in a training step.
 */
#ifndef HUB_COMM_H
#define HUB_COMM_H

#include "comm.h"

#define HUB_BEAT_NS 1000000000ull
#define HUB_SILENCE_NS 10000000000ull
#define HUB_LINGER_NS 5000000000ull

#endif
