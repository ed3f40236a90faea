/*
 * When a block of memory may be used again: mem_block.c, with the two votes of
 * region_alloc and channel_open (mem_vote_all).
 *
 * Every rank gives a block, maps those of the others, uses them and lets go.  Any
 * part may fail on any rank, and the group may fail at any time.  A freed block
 * belongs to somebody else at once: nobody may read it, or count in its header.
 */
#ifndef N
#define N 3
#endif

byte vote[2 * N];    /* 0: not yet; 1: could not; 2: could */
bit alarm[N];        /* shm_group.alarm: who reported does not matter here */
byte detached[N];    /* mem_block_header.detached */
bit freed[N];

/* mem_block_fate */
#define NEVER_SHARED 0
#define SHARED 1
#define UNSURE 2

inline mem_fail()
{
    failed = 1;
    q = 0;
    do
    :: q < N -> alarm[q] = 1; q++
    :: q == N -> q = 0; break
    od
}

/* mem_vote_all: an exchange, which a failure of the group ends first even where all have voted */
inline mem_vote_all(stage)
{
    vote[stage * N + me] = 1 + able;
    do
    :: q < N && !failed ->
        if
        :: atomic { vote[stage * N + q] != 0 -> able = able && vote[stage * N + q] == 2; q++ }
        :: atomic { alarm[me] -> failed = 1 }
        :: mem_fail()                        /* its deadline, or a poison */
        fi
    :: q == N || failed -> q = 0; break
    od;
    if
    :: alarm[me] -> failed = 1
    :: !alarm[me]
    fi;
    able = able && !failed
}

/* mem_blocks_release, then mem_block_drop of the own one */
inline release(fate)
{
    do
    :: q < N ->
        if
        :: q != me && fate == SHARED -> atomic { assert(!freed[q]); detached[q]++; q++ }
        :: q == me || fate != SHARED -> q++
        fi
    :: q == N -> q = 0; break
    od;
    readers = (fate == NEVER_SHARED -> 0 : N - 1)
}

proctype Rank(byte me)
{
    byte q, readers;
    bit able, failed, has;

    if                                       /* mem_block_alloc */
    :: able = 1; has = 1
    :: able = 0
    fi;
    mem_vote_all(0);
    if
    :: able ->
        if                                   /* mem_blocks_map */
        :: able = 1
        :: able = 0
        fi;
        mem_vote_all(1)
    :: !able
    fi;
    if
    :: able ->
        do                                   /* the region is in use, also when the group has failed */
        :: q < N -> assert(q == me || !freed[q]); q++
        :: q == N -> q = 0; break
        od;
        if
        :: skip
        :: mem_fail()                        /* a poison in the moment after the agreement */
        fi;
        release(SHARED)
    :: !able && failed ->
#ifdef FAULT_COUNT_WHEN_UNSURE
        release(SHARED)
#elif defined(FAULT_FREE_WHEN_UNSURE)
        release(NEVER_SHARED)
#else
        release(UNSURE)
#endif
    :: !able && !failed -> release(NEVER_SHARED)
    fi;
end:
    if                                       /* mem_block_sweep, whenever; it may be never */
#ifdef FAULT_FREE_WITHOUT_COUNT
    :: has -> freed[me] = 1
#else
    :: atomic { has && detached[me] >= readers -> freed[me] = 1 }
#endif
    :: !has
    fi
}

init
{
    atomic {
        byte r;
        for (r : 0 .. N - 1) {
            run Rank(r)
        }
    }
}
