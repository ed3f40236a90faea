/*
 * The memory orders: one publisher (P1 to P4 of shm_sync.h, as in mem_post and
 * shm_wake) and one sleeper (S1 to S4, as in sleep_once) on a machine whose stores
 * wait in a buffer and leave it in any order.
 *
 * Every rank has a buffer with room for one store to each word.  A relaxed store
 * goes into it and leaves at any time.  A release store leaves after the stores that
 * were made before it.  A seq_cst store is made when the buffer is empty, at once.
 * A read-modify-write empties the buffer.  A rank sees its own stores.
 */
#define DATA 0
#define POSTED 1
#define SLEEPING 2
#define WORDS 3

#define PUBLISHER 0
#define SLEEPER 1

#define SEQ_CST 0
#define RELEASE 1
#define RELAXED 2

/* atomic_store in mem_post and in shm_sleep_prepare */
#ifndef POSTED_ORDER
#define POSTED_ORDER SEQ_CST
#endif
#ifndef SLEEPING_ORDER
#define SLEEPING_ORDER SEQ_CST
#endif

bit memory[WORDS];
bit buffered[2 * WORDS], value[2 * WORDS];
byte after[2 * WORDS];    /* words that must leave the buffer first, a bit each */
bit rung, asleep;         /* the doorbell is changed by read-modify-write, and FUTEX_WAIT compares in the kernel */

#define HELD(rank) (buffered[(rank) * WORDS] | buffered[(rank) * WORDS + 1] << 1 | buffered[(rank) * WORDS + 2] << 2)
#define SEEN(rank, word) (buffered[(rank) * WORDS + (word)] -> value[(rank) * WORDS + (word)] : memory[word])

inline store(rank, word, what, order)
{
    if
    :: order == SEQ_CST -> atomic { HELD(rank) == 0 -> memory[word] = what }
    :: order != SEQ_CST ->
        atomic {
            !buffered[rank * WORDS + word] ->
            after[rank * WORDS + word] = (order == RELEASE -> HELD(rank) : 0);
            value[rank * WORDS + word] = what;
            buffered[rank * WORDS + word] = 1
        }
    fi
}

inline leave(rank, word)
{
    atomic {
        buffered[rank * WORDS + word] && !(after[rank * WORDS + word] & HELD(rank)) ->
        memory[word] = value[rank * WORDS + word];
        buffered[rank * WORDS + word] = 0
    }
}

/* Lets go of one store at a time, whenever it likes. */
proctype Buffer(byte rank)
{
end:
    do
    :: leave(rank, DATA)
    :: leave(rank, POSTED)
    :: leave(rank, SLEEPING)
    od
}

proctype Publisher()
{
    bit was;
    store(PUBLISHER, DATA, 1, RELAXED);
    store(PUBLISHER, POSTED, 1, POSTED_ORDER);              /* P1 */
    if
    :: !SEEN(PUBLISHER, SLEEPING)                           /* P2 */
    :: SEEN(PUBLISHER, SLEEPING) ->
        atomic { HELD(PUBLISHER) == 0 -> was = memory[SLEEPING]; memory[SLEEPING] = 0 };   /* P3 */
        if
        :: was -> rung = 1; asleep = 0                      /* P4 */
        :: !was
        fi
    fi
}

proctype Sleeper()
{
    do
    :: SEEN(SLEEPER, POSTED) -> break
    :: !SEEN(SLEEPER, POSTED) ->
        rung = 0;                                           /* S1 */
        store(SLEEPER, SLEEPING, 1, SLEEPING_ORDER);        /* S2 */
        if
        :: SEEN(SLEEPER, POSTED) -> break                   /* S3 */
        :: !SEEN(SLEEPER, POSTED) ->
            if                                              /* S4 */
            :: rung
            :: atomic { !rung -> asleep = 1 }; !asleep
            fi
        fi
    od;
    assert(SEEN(SLEEPER, DATA))
}

init
{
    atomic { run Publisher(); run Sleeper(); run Buffer(PUBLISHER); run Buffer(SLEEPER) }
}
