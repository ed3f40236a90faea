/*
 * How ranks that can see each other's memory synchronise: the words in that
 * memory, who writes them, and the order in which it must be done.
 *
 * Every rank owns one *home*: a block of memory that all ranks of the world
 * have mapped.  Every group made later (a split) gives each member one more
 * home, and every channel gives each member a block of cells.  The ranks may
 * be processes that map one another's files or threads of one process; the
 * protocol is the same and uses nothing but the atomics of this file and one
 * futex word per rank.
 *
 * Layout.  "owner" is the rank whose block it is.
 *
 *   place                     writer          readers   meaning
 *   shm_control (one a rank and world)
 *     pid                     owner, once     all       written before anybody maps it
 *     sleeping                owner sets 1,   all       a thread of the owner is about to sleep on, or
 *                             others clear              sleeps on, its doorbell
 *     doorbell                all (add)       owner     futex word; its value means nothing
 *     wait.sequence           owner           all       odd while the owner is blocked in a wait
 *     wait.beat               owner           all       counts how often wait.missing was worked out anew
 *     wait.missing            owner           all       bit q: cannot go on before rank q posts something
 *     wait.what               owner           all       in which call
 *   shm_group (one a rank and group)
 *     alarm                   all (CAS 0->r)  owner     member r-1 reports that the group failed
 *     closed                  owner           all       1: the owner will not call again
 *     poison.state            owner           all       0 none, 1 being written, 2 status and text are final
 *     poison.status, .text    owner           all       why; valid once the state is 2
 *     line[].newest, .ring    owner           all       what it has declared: see mem_declare.c
 *   shm_cell (one a rank, channel and tag)
 *     desc[k & 1]             owner           all       what the owner's k-th operation on this tag is
 *     posted                  owner           all       k: operations 1..k were called
 *     done                    owner           all       k: the owner no longer touches peers' memory for 1..k
 *   records[slot]             owner           all       a small record of an exchange; desc says which slot
 *   detached (block header)   all (add)       owner     peers that have unmapped the block
 *
 * One operation.  The owner writes the descriptor and whatever peers shall
 * read (its region, a record), then stores `posted` = k.  A peer that loads
 * posted >= k may read all that.  When it has what it needs it stores its own
 * `done` = k.  An operation that hands out memory of its regions is complete
 * on a rank when that rank has seen done >= k of everyone; a barrier or an
 * exchange is complete when it has seen posted >= k of everyone.
 *
 * Why two descriptors are enough.  A rank posts k+1 only when k is complete on
 * it, so it has seen posted >= k of all; a peer may still be reading
 * descriptor k while k+1 is written, but nobody writes k+2 before having seen
 * that peer post k+1, which the peer does only after it has finished with k.
 * For the same reason posted(q) is k-1, k or k+1 as long as this rank is in
 * operation k, and tests are `>=`.
 *
 * Why record slots may be reused.  A record of (tag, k) is read between the
 * peer's sight of posted >= k and its done >= k; the owner takes a slot again
 * only after it has seen done >= k of everyone on that tag.
 *
 * Memory orders.  posted and done are stored and loaded seq_cst.  Release and
 * acquire would be enough to hand data over; seq_cst is what makes sleeping
 * safe:
 *
 *     publisher                            sleeper
 *     P1  posted = k                       S1  d = doorbell
 *     P2  if (sleeping)                    S2  sleeping = 1
 *     P3      sleeping = 0                 S3  look at everything that is waited for again
 *     P4      doorbell += 1, FUTEX_WAKE    S4  FUTEX_WAIT(doorbell, d)
 *
 * P1, P2, S2, S3 are seq_cst, so they have one order.  If P2 reads 0 although
 * S2 has been executed, another publisher's P3 came in between, and its P4
 * ends S4 (the doorbell no longer is d, or the wake finds the sleeper); the
 * sleeper then goes through S2 and S3 again, after P2 and therefore after P1,
 * and sees k.  If P2 reads 0 because S2 comes later, S3 comes later than P1
 * and sees k.  If P2 reads 1 the sleeper is woken.  A publisher that dies
 * between P3 and P4 loses a wake-up: S4 never sleeps longer than 50 ms.
 *
 * Poison.  A rank that gives up writes status and text into its own group
 * block, sets the state to 2 (release), then sets the alarm of every member by
 * CAS from 0, so the first report wins, and wakes it.  A member looks only at
 * its own alarm (a line of its own that nobody writes in good times).  Who is
 * told passes it on in the same way: the reporter may have died between two
 * alarms, and a rank that waits for one that was told, and so will not come,
 * would wait until its timeout.
 *
 * Deadlock.  A rank that is blocked publishes whose *post* it lacks.  Only the
 * owner's own calls make a post, so a cycle of blocked ranks stays for ever:
 * ranks have diverged.  A record may be stale, because its owner is stopped,
 * or torn; so a cycle counts only if, at a second look, every sequence number
 * is the same, every edge still there, and every beat has grown by two.  The
 * second of those beats began after the first look, when all the ranks of the
 * cycle were already blocked, and still found the edge.  (The first look notes
 * beats only when it has seen every rank of the cycle blocked.)  Ranks that call
 * from several threads publish no record (another thread may do the post).
 *
 * tests/model checks all this but declarations with spin.
 *
 * What a crash leaves behind.  No lock lives in shared memory.  Stamps are
 * written whole, and never before what they announce, so a dead rank's words
 * say exactly which operations it finished; they stay readable while anyone
 * has them mapped, and vanish with the last mapping.  A poison record in
 * state 1 is ignored: its writer never got to raise an alarm.
 */
#ifndef SHM_SYNC_H
#define SHM_SYNC_H

#include "zc_status.h"

#include <stdalign.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define SHM_LINE_BYTES 128        /* two cache lines: adjacent ones are fetched together */
#define SHM_RANKS_MAX 1024u
#define SHM_MASK_WORDS (SHM_RANKS_MAX / 64)
#define SHM_WHAT_BYTES 64u
#define SHM_TEXT_BYTES 768u
#define SHM_RECORD_SLOTS 8u  /* exchanges of one rank and channel at a time, by as many threads */
#define SHM_LINES 3u         /* of declarations */
#define SHM_DECLARED 64u     /* of them that peers can still read, on each line */

typedef enum shm_kind {
    SHM_EXCHANGE = 1,
    SHM_BARRIER,
    SHM_CHANNEL_OPEN,
    SHM_REGION_ALLOC,
    SHM_REGION_ALLOC_ONE_COPY,
    SHM_AGREE,
    SHM_SPLIT,
    SHM_ARRAY_ALL_REDUCE,
    SHM_ARRAY_REDUCE_SCATTER,
    SHM_ARRAY_ALL_GATHER,
    SHM_ARRAY_BROADCAST,
    /* from here on: complete when all are done */
    SHM_REDUCE_SCATTER,
    SHM_ALL_GATHER,
    SHM_ALL_GATHER_TO,
    SHM_ALL_REDUCE_WORDS,
    SHM_BROADCAST,
    SHM_KIND_COUNT
} shm_kind;

/* What a rank called; 32 bytes. */
typedef struct shm_desc {
    uint8_t kind, dtype, op;
    uint8_t zero;          /* contributes zeros: not compared */
    uint32_t root;
    uint64_t count;        /* elements, bytes, words or tags, by kind */
    uint64_t offset_bytes; /* of this rank in the region: not compared */
    uint32_t region;       /* number within the channel */
    uint32_t slot;         /* of the record: not compared */
} shm_desc;

typedef struct shm_cell {
    alignas(SHM_LINE_BYTES) _Atomic uint64_t posted;
    _Atomic uint64_t done;
    shm_desc desc[2];
} shm_cell;

typedef struct shm_wait {
    alignas(SHM_LINE_BYTES) _Atomic uint64_t sequence;
    _Atomic uint64_t beat;
    _Atomic uint64_t missing[SHM_MASK_WORDS];
    _Atomic uint64_t what[SHM_WHAT_BYTES / 8];
} shm_wait;

typedef struct shm_control {
    alignas(SHM_LINE_BYTES) uint64_t pid;
    alignas(SHM_LINE_BYTES) _Atomic uint32_t sleeping;
    alignas(SHM_LINE_BYTES) _Atomic uint32_t doorbell;
    shm_wait wait;
} shm_control;

/* One declaration. */
typedef struct shm_declared {
    alignas(SHM_LINE_BYTES) _Atomic uint64_t number; /* 0: being written, or never was */
    _Atomic uint64_t chain;                          /* hash of the details up to this one */
    _Atomic uint64_t detail;
    _Atomic uint64_t what[SHM_WHAT_BYTES / 8];
} shm_declared;

typedef struct shm_line {
    alignas(SHM_LINE_BYTES) _Atomic uint64_t newest; /* declarations made; number k is in ring[k % SHM_DECLARED] */
    shm_declared ring[SHM_DECLARED];
} shm_line;

typedef struct shm_group {
    alignas(SHM_LINE_BYTES) _Atomic uint32_t alarm;
    alignas(SHM_LINE_BYTES) _Atomic uint32_t closed;
    alignas(SHM_LINE_BYTES) _Atomic uint32_t poison_state;
    _Atomic int32_t poison_status;
    _Atomic uint64_t poison_text[SHM_TEXT_BYTES / 8];
    shm_line line[SHM_LINES];
} shm_group;

uint64_t shm_now_ns(void);

/* One turn of a busy loop. */
static inline void shm_pause(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

/* P2..P4 above; the caller has done P1 with a seq_cst store. */
void shm_wake(shm_control *peer);

/* S1 and S2; returns d. */
uint32_t shm_sleep_prepare(shm_control *own);
/* S4: until woken, at most `limit_ns`. Wakes early for any reason. */
void shm_sleep(shm_control *own, uint32_t doorbell, uint64_t limit_ns);

/* ---- poison ---------------------------------------------------------- */

/* Writes the owner's record unless there is one; alarms are the caller's. */
void shm_poison_write(shm_group *own, zc_status status, const char *text);
/* The record of another rank; ZC_OK when it has none. */
zc_status shm_poison_read(shm_group *peer, char text[SHM_TEXT_BYTES]);

/* ---- wait records and cycles ----------------------------------------- */

void shm_wait_begin(shm_control *own, const char *what);
/* Publishes a freshly computed set of missing ranks. */
void shm_wait_beat(shm_control *own, const uint64_t missing[SHM_MASK_WORDS]);
void shm_wait_end(shm_control *own);

typedef struct shm_cycle_node {
    size_t rank;
    uint64_t sequence, beat;
} shm_cycle_node;

/*
 * Looks for a cycle from `me` over what ranks are missing, and back.  Fills
 * path[0..] (room for `ranks`; path[0] is me) and returns its length; 0: none.
 * `scratch` has room for 2 * ranks numbers.
 */
size_t shm_cycle_find(shm_control *const *controls, size_t ranks, size_t me, shm_cycle_node *path,
                      uint32_t *scratch);

/* 1: the cycle is proved; 0: not yet; -1: it is gone. */
int shm_cycle_check(shm_control *const *controls, const shm_cycle_node *path, size_t length);

/* "rank 0 waits in 'barrier' for rank 1, which waits in 'step' for rank 0" */
void shm_cycle_describe(shm_control *const *controls, const shm_cycle_node *path, size_t length, char *text,
                        size_t room_bytes);

static inline int shm_mask_has(const uint64_t *mask, size_t rank)
{
    return (int)(mask[rank / 64] >> (rank % 64) & 1);
}

static inline void shm_mask_add(uint64_t *mask, size_t rank)
{
    mask[rank / 64] |= 1ull << (rank % 64);
}

#endif
