/*
 * The search for ranks that wait for one another: the records of waits
 * (shm_wait_begin, shm_wait_beat, shm_wait_end) and the two looks of
 * look_for_cycles (shm_cycle_find, shm_cycle_check).  See "Deadlock" in
 * shm_sync.h.
 *
 * Three ranks in groups of two; rank 0 looks.  A rank posts on a tag and waits
 * there for the post of one other.  The ranks keep to one order, so no cycle may
 * be proved, however slow any of them is; with DIVERGED each waits for the
 * next one for ever, and a cycle must be proved.
 */
#define N 3

byte posted[4];      /* bit r of a tag: rank r has posted on it */
byte sequence[N];    /* shm_wait.sequence */
byte missing[N];     /* shm_wait.missing */
byte beats[N];       /* shm_wait.beat, counted from rank 0's last look at it; no more than 2 matter */
bit proved;

inline shm_wait_begin()
{
    missing[me] = 0;
    sequence[me]++
}

/* missing_members, then shm_wait_beat: what is published may be old by then */
inline publish(tag, peer)
{
    lacks = (posted[tag] & (1 << peer) -> 0 : 1 << peer);
    missing[me] = lacks;
    atomic { beats[me] = (beats[me] < 2 -> beats[me] + 1 : 2); lacks = 0 }
}

/* read_wait of rank r: `seen`, `grown`, `edges`; `whole` when nothing moved in between */
inline read_wait(r)
{
    atomic { whole = 1; seen = sequence[r] };
    if
    :: !(seen & 1) -> whole = 0
    :: seen & 1 ->
        grown = beats[r];
        edges = missing[r];
        atomic { whole = (sequence[r] == seen) }
    fi
}

/* The last pass of shm_cycle_find over one rank: its beats count from here. */
inline note_beat(r)
{
    atomic { whole = 1; seen = sequence[r] };
    if
    :: !(seen & 1) -> whole = 0
    :: seen & 1 ->
        beats[r] = 0;
        atomic { whole = (sequence[r] == seen) }
    fi
}

/* shm_cycle_find: every rank lacks one other at most, so the search is a walk */
inline shm_cycle_find()
{
    atomic { length = 0; path[0] = 0; at = 0 };
    do
    :: at < N ->
        read_wait(path[at]);
        if
        :: !whole || !edges -> break
        :: whole && edges && at > 0 && (edges & 1) -> length = at + 1; break
        :: whole && edges && (at == 0 || !(edges & 1)) ->
            atomic {
                at++;
                if
                :: at < N ->
                    path[at] = (edges & 2 -> 1 : 2);
                    if
                    :: at == 2 && path[2] == path[1] -> at = N
                    :: else
                    fi
                :: at >= N
                fi
            }
        fi
    :: at >= N -> break
    od;
    at = 0;
#ifndef FAULT_ONE_PASS
    do
    :: at < length ->
        read_wait(path[at]);
        if
        :: whole -> atomic { first[at] = seen; at++ }
        :: !whole -> length = 0
        fi
    :: at >= length -> at = 0; break
    od;
#endif
    do
    :: at < length ->
        note_beat(path[at]);
        if
#ifdef FAULT_ONE_PASS
        :: whole -> atomic { first[at] = seen; at++ }
        :: !whole -> length = 0
#else
        :: whole && first[at] == seen -> at++
        :: !whole || first[at] != seen -> length = 0
#endif
        fi
    :: at >= length -> break
    od;
    atomic { at = 0; seen = 0; edges = 0; grown = 0; whole = 0 }
}

/* shm_cycle_check; a suspicion that is gone has length 0 */
inline shm_cycle_check()
{
    atomic { verdict = 1; at = 0 };
    do
    :: at < length ->
        read_wait(path[at]);
        atomic {
            if
#ifdef FAULT_ANY_SEQUENCE
            :: whole && (edges & (1 << path[(at + 1) % length])) ->
#else
            :: whole && seen == first[at] && (edges & (1 << path[(at + 1) % length])) ->
#endif
#ifdef FAULT_ONE_BEAT
                verdict = (grown < 1 -> 0 : verdict);
#else
                verdict = (grown < 2 -> 0 : verdict);
#endif
                at++
            :: else -> length = 0; verdict = 0; at = 0
            fi
        }
    :: at >= length -> break
    od;
    atomic { at = 0; seen = 0; edges = 0; grown = 0; whole = 0 }
}

/* look_for_cycles, on rank 0 */
inline look()
{
    if
    :: length ->
        shm_cycle_check();
        if
        :: verdict -> proved = 1
        :: !verdict
        fi
    :: !length
    fi;
    if
    :: !length -> shm_cycle_find()
    :: length
    fi
}

/* One meeting: post, then wait_turns from the first slow turn on. */
inline meet(tag, peer)
{
    posted[tag] = posted[tag] | (1 << me);
    length = 0;
    shm_wait_begin();
    do
    :: posted[tag] & (1 << peer) -> break
    :: else ->
        publish(tag, peer);
        if
        :: me == 0 -> look()
        :: me != 0
        fi;
        if
        :: proved -> break
        :: !proved
        fi
    od;
    sequence[me]++   /* shm_wait_end */
}

proctype Rank(byte me)
{
    byte lacks, seen, grown, edges, at, length;
    byte path[N], first[N];
    bit whole, verdict;
    if
#ifdef DIVERGED
    :: me == 0 -> meet(0, 1)
    :: me == 1 -> meet(1, 2)
    :: me == 2 -> meet(2, 0)
#else
    :: me == 0 -> meet(0, 2); meet(2, 1); meet(3, 2)
    :: me == 1 -> meet(1, 2); meet(2, 0)
    :: me == 2 -> meet(0, 0); meet(1, 1); meet(3, 0)
#endif
    fi
}

init
{
    atomic { run Rank(0); run Rank(1); run Rank(2) }
}

#ifdef DIVERGED
ltl found { <> proved }
#else
ltl none { [] !proved }
#endif
