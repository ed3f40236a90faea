/*
 * Operations, sleeping and waking, death and poison of the shared-memory
 * communicator: shm_sync.h, shm_sync.c, mem_progress.c, mem_wait.c,
 * mem_exchange.c, mem_array.c, mem_world.c.  README.md says what is left out,
 * and why less would not be found by more.
 *
 * One step of a rank is one access to a word that others see, with what the
 * rank does on its own words around it.  Inlines have the names of functions of
 * the core.  A define FAULT_... seeds one mistake.
 *
 *   N         ranks
 *   OPS       operations, one after another, on each tag
 *   TAGS      operations in flight at a time; ranks post them in different orders
 *   WORK      REGION: reduce-scatter and all-gather in turn; EXCHANGE: records; STAGING: plain arrays
 *   DEATH     one rank may die at any step
 *   DEADLINE  one rank may reach its timeout in any wait, or be told to poison the group; with
 *             DEATH, a death comes after that
 *   LEAVE     rank 0 closes before the last operation
 */
#ifndef N
#define N 2
#endif
#ifndef OPS
#define OPS 2
#endif
#ifndef TAGS
#define TAGS 1
#endif
#define REGION 0
#define EXCHANGE 1
#define STAGING 2
#ifndef WORK
#define WORK REGION
#endif

/* ---- words that others see ---------------------------------------------- */

#define CELL(r, tag) ((r) * TAGS + (tag))
#ifdef FAULT_ONE_DESCRIPTOR
#define DESC(r, tag, stamp) ((CELL(r, tag)) * 2)
#else
#define DESC(r, tag, stamp) ((CELL(r, tag)) * 2 + ((stamp) & 1))
#endif
byte posted[N * TAGS];     /* shm_cell.posted */
byte done[N * TAGS];       /* shm_cell.done */
byte desc[N * TAGS * 2];   /* shm_cell.desc[k & 1]; the stamp stands for what was called */

/* What a rank shows: a region for each tag, one record slot, or two staging halves.  A stamp stands for the bytes. */
#if WORK == STAGING
#define PLACES 2
#ifdef FAULT_ONE_HALF
#define PLACE(tag, stamp) 0
#else
#define PLACE(tag, stamp) ((stamp) & 1) /* half_of */
#endif
#elif WORK == EXCHANGE
#define PLACES 1
#define PLACE(tag, stamp) 0
#else
#define PLACES TAGS
#define PLACE(tag, stamp) (tag)
#endif
byte shown[N * PLACES];

bit sleeping[N];           /* shm_control.sleeping */
bit rung[N];               /* shm_control.doorbell is no longer what its owner read in shm_sleep_prepare */
bit asleep[N];             /* inside FUTEX_WAIT */

byte alarm[N];             /* shm_group.alarm */
byte poison[N];            /* shm_group.poison_state */
bit closed[N];             /* shm_group.closed */
bit dead[N];               /* what a pidfd tells: mem_provider_ops.dead */

/* ---- words of the model -------------------------------------------------- */

bit died;                  /* a rank is dead */
bit expired;               /* a rank has reached its timeout */
byte looked;               /* bit r: nothing that rank r could see has changed since its last look began */

#define FIRST (me == 0 -> 1 : 0)
#define AFTER(r) ((r) + 1 == me -> (r) + 2 : (r) + 1)

/*
 * The limit of a futex wait.  Before a death or an early close it is not needed,
 * so there it never ends one; and a second look at the same words finds the same,
 * so it ends none before a word has changed.
 */
#ifdef DEADLINE
#define DOOMED expired /* deaths in good times are those without DEADLINE */
#else
#define DOOMED true
#endif
#if defined(DEATH)
#define CHANGED looked = 0
#define TIMER (died && !(looked & (1 << me)))
#define MAY_DIE :: atomic { !died && DOOMED -> died = 1; dead[me] = 1; CHANGED; goto gone }
#elif defined(LEAVE)
#define CHANGED looked = 0
#define TIMER (closed[0] && !(looked & (1 << me)))
#define MAY_DIE
#else
#define CHANGED skip
#define TIMER false
#define MAY_DIE
#endif

/* A death at a load is one before the next store: a load changes nothing for the others. */
inline store(word, value)
{
    if
    :: atomic { word = value; CHANGED }
    MAY_DIE
    fi
}

/* ---- waking --------------------------------------------------------------- */

/* mem_wake_members: shm_wake of every peer. P2 and P3 of shm_sync.h are one exchange, P4 one step. */
inline mem_wake_members()
{
    q = FIRST;
    do
    :: atomic {
            !ringing ->
            if
            :: sleeping[q] -> sleeping[q] = 0; ringing = 1
            :: !sleeping[q] && AFTER(q) < N -> q = AFTER(q)
            :: !sleeping[q] && AFTER(q) >= N -> q = 0; break
            fi
        }
    :: atomic {
            ringing ->
            ringing = 0;
#ifndef FAULT_WAKE_WITHOUT_BELL
            rung[q] = 1;                     /* doorbell += 1 */
#endif
            asleep[q] = 0;                   /* FUTEX_WAKE */
            if
            :: AFTER(q) < N -> q = AFTER(q)
            :: AFTER(q) >= N -> q = 0; break
            fi
        }
    MAY_DIE
    od
}

/* ---- failing -------------------------------------------------------------- */

/* mem_forget: pending operations leave the list */
inline mem_forget()
{
    atomic {
        t = 0;
        do
        :: t < TAGS -> pending[t] = 0; t++
        :: t == TAGS -> t = 0; break
        od
    }
}

/* raise_alarms: every member's, where nobody did it before; then wakes them */
inline raise_alarms(reporter)
{
    q = FIRST;
    do
    :: atomic {
            if                               /* compare and exchange */
            :: alarm[q] == 0 -> alarm[q] = reporter; CHANGED
            :: alarm[q] != 0
            fi;
            if
            :: AFTER(q) < N -> q = AFTER(q)
            :: AFTER(q) >= N -> q = 0; break
            fi
        }
    MAY_DIE
    od;
#ifndef FAULT_ALARM_WITHOUT_WAKE
    mem_wake_members()
#endif
}

inline mem_fail()
{
    failed = 1;
    mem_forget();
#ifdef FAULT_ALARM_BEFORE_REASON
    raise_alarms(me + 1);
    store(poison[me], 1);
    store(poison[me], 2)
#else
    store(poison[me], 1);                    /* shm_poison_write */
    store(poison[me], 2);
    raise_alarms(me + 1)
#endif
}

/* mem_failure: the own alarm */
inline mem_failure()
{
    if
    :: failed
    :: atomic { !failed && alarm[me] == 0 }
    :: atomic {
            !failed && alarm[me] != 0 ->
            assert(poison[alarm[me] - 1] == 2); /* shm_poison_read: who is told is told why */
            failed = 1;
            reporter = alarm[me]
        };
        mem_forget();
#ifndef FAULT_NO_RELAY
        raise_alarms(reporter)
#endif
    fi
}

/* ---- operations ------------------------------------------------------------ */

/* The kinds from SHM_REDUCE_SCATTER on: complete when all are done, the others when all have posted. */
#define HANDS_OUT (WORK == REGION)
#define HAS_DONE (WORK != STAGING)
#define BY_RANK(stamp) (WORK == REGION && !((stamp) & 1)) /* an all-gather */

/* The caller's bytes and descriptor; then mem_post. */
inline mem_post(tag, stamp)
{
    atomic { pending[tag] = 1; executed[tag] = 0; seen[tag] = FIRST; copied[tag] = 0; finished[tag] = FIRST };
#ifdef FAULT_STAMP_BEFORE_DATA
    store(posted[CELL(me, tag)], stamp);
    atomic { desc[DESC(me, tag, stamp)] = stamp; shown[me * PLACES + PLACE(tag, stamp)] = stamp };
#else
    atomic { desc[DESC(me, tag, stamp)] = stamp; shown[me * PLACES + PLACE(tag, stamp)] = stamp };
    store(posted[CELL(me, tag)], stamp);
#endif
    mem_wake_members()
}

/* What the peers called and show is of this operation: what agrees(), reduce(), copy_from(), copy_records() read. */
inline read_peers(tag, stamp)
{
    d_step {
        q = 0;
        do
        :: q < N ->
            assert(q == me || (desc[DESC(q, tag, stamp)] == stamp && shown[q * PLACES + PLACE(tag, stamp)] == stamp));
            q++
        :: q == N -> q = 0; break
        od
    }
}

inline store_done(tag, stamp)
{
    store(done[CELL(me, tag)], stamp);
#ifndef FAULT_DONE_WITHOUT_WAKE
    mem_wake_members()
#endif
}

/* try_op: all_posted or gather_complete, execute, done, and completion */
inline try_op(tag, stamp)
{
    if
    :: executed[tag]
    :: !executed[tag] && BY_RANK(stamp) ->   /* gather_complete */
        q = FIRST;
        do
        :: atomic {
                if
                :: posted[CELL(q, tag)] >= stamp -> copied[tag] = copied[tag] | (1 << q)
                :: posted[CELL(q, tag)] < stamp
                fi;
                if
                :: AFTER(q) < N -> q = AFTER(q)
                :: AFTER(q) >= N -> q = 0; executed[tag] = (copied[tag] == ((1 << N) - 1 - (1 << me))); break
                fi
            }
        od
    :: !executed[tag] && !BY_RANK(stamp) ->  /* all_posted */
        do
        :: atomic {
                if
                :: posted[CELL(seen[tag], tag)] < stamp -> break
                :: posted[CELL(seen[tag], tag)] >= stamp && AFTER(seen[tag]) < N -> seen[tag] = AFTER(seen[tag])
                :: posted[CELL(seen[tag], tag)] >= stamp && AFTER(seen[tag]) >= N -> executed[tag] = 1; break
                fi
            }
        od
    fi;
    if
    :: executed[tag] == 1 && HAS_DONE ->     /* now, not at an earlier turn */
        executed[tag] = 2;
#ifdef FAULT_DONE_BEFORE_READ
        store_done(tag, stamp);
        read_peers(tag, stamp)
#else
        read_peers(tag, stamp);
        store_done(tag, stamp)
#endif
    :: executed[tag] != 1 || !HAS_DONE
    fi;
    if
    :: executed[tag] && !HANDS_OUT -> pending[tag] = 0
    :: executed[tag] && HANDS_OUT ->
#ifdef FAULT_REUSE_WITHOUT_READERS
        pending[tag] = 0
#else
        do
        :: atomic {
                if
                :: done[CELL(finished[tag], tag)] < stamp -> break
                :: done[CELL(finished[tag], tag)] >= stamp && AFTER(finished[tag]) < N ->
#ifdef FAULT_REUSE_AFTER_FIRST_READER
                    pending[tag] = 0; break
#else
                    finished[tag] = AFTER(finished[tag])
#endif
                :: done[CELL(finished[tag], tag)] >= stamp && AFTER(finished[tag]) >= N -> pending[tag] = 0; break
                fi
            }
        od
#endif
    :: !executed[tag]
    fi
}

/* mem_progress: all pending operations of this rank; the order does not matter to the model */
inline mem_progress(only)
{
#ifdef FAULT_PROGRESS_OF_ONE
    if
    :: pending[only] -> try_op(only, round)
    :: !pending[only]
    fi
#else
    do
    :: !pending[t] && t + 1 < TAGS -> t++
    :: !pending[t] && t + 1 == TAGS -> t = 0; break
    :: pending[t] ->
        try_op(t, round);
        if
        :: t + 1 < TAGS -> t++
        :: t + 1 == TAGS -> t = 0; break
        fi
    od
#endif
}

/* ---- waiting ----------------------------------------------------------------- */

/* over: complete here or, for a slot, all peers are done */
inline look_whether_over(tag, stamp, for_done)
{
    if
    :: !for_done -> over = !pending[tag]
    :: for_done ->
        q = FIRST;
        do
        :: atomic {
                if
                :: done[CELL(q, tag)] < stamp -> q = 0; break
                :: done[CELL(q, tag)] >= stamp && AFTER(q) < N -> q = AFTER(q)
                :: done[CELL(q, tag)] >= stamp && AFTER(q) >= N -> q = 0; over = 1; break
                fi
            }
        od
    fi
}

/* missing_members: who has not posted or, once all have, is not done */
inline missing_members(tag, stamp)
{
    missing = 0;
    q = FIRST;
    do
    :: atomic {
            if
            :: posted[CELL(q, tag)] < stamp -> missing = missing | (1 << q)
            :: posted[CELL(q, tag)] >= stamp
            fi;
            if
            :: AFTER(q) < N -> q = AFTER(q)
            :: AFTER(q) >= N -> q = 0; break
            fi
        }
    od;
    if
    :: missing
    :: !missing ->
        q = FIRST;
        do
        :: atomic {
                if
                :: done[CELL(q, tag)] < stamp -> missing = missing | (1 << q)
                :: done[CELL(q, tag)] >= stamp
                fi;
                if
                :: AFTER(q) < N -> q = AFTER(q)
                :: AFTER(q) >= N -> q = 0; break
                fi
            }
        od
    fi
}

/* What may be called a loss: not a peer that had done its part. */
#ifdef LEAVE
#define IS_LOSS(r) ((r) == 0 && round == OPS)
#else
#define IS_LOSS(r) (dead[r])
#endif

/* look_for_losses: closed or dead, and still missing at one more look */
inline look_for_losses(tag, stamp, for_done)
{
    missing_members(tag, stamp);
    l = 0;
    do
    :: l == N -> break
    :: l < N && !(missing & (1 << l)) -> l++
    :: atomic { l < N && (missing & (1 << l)) && !closed[l] && !dead[l] -> l++ } /* mem_loss */
    :: atomic { l < N && (missing & (1 << l)) && (closed[l] || dead[l]) -> skip };
#ifdef FAULT_LOSS_WITHOUT_ANOTHER_LOOK
        assert(IS_LOSS(l));
        mem_fail();
        break
#else
        mem_progress(tag);
        look_whether_over(tag, stamp, for_done);
        if
        :: over || failed -> mem_failure(); break
        :: !over && !failed ->
            missing_members(tag, stamp);
            if
            :: missing & (1 << l) -> assert(IS_LOSS(l)); mem_fail(); break
            :: !(missing & (1 << l)) -> l++
            fi
        fi
#endif
    od;
    atomic { l = 0; missing = 0 }
}

/* mem_wait: wait_turns, slow_turn, sleep_once.  Ends when it is over, or the group has failed. */
inline mem_wait(tag, stamp, for_done)
{
    do
    :: true ->
        mem_progress(tag);
        mem_failure();
        look_whether_over(tag, stamp, for_done);
        if
        :: failed || over -> break
        :: !failed && !over
        fi;
        /* slow_turn */
#ifdef DEADLINE
        if
        :: skip
        :: atomic { !expired -> expired = 1 }; mem_fail(); break /* timed_out, or a comm_poison */
        fi;
#endif
#if defined(DEATH) || defined(LEAVE)
        looked = looked | (1 << me);
#ifdef FAULT_LOSSES_BEFORE_SLEEP_ONLY
        if
        :: !slept -> look_for_losses(tag, stamp, for_done)
        :: slept
        fi;
#else
        look_for_losses(tag, stamp, for_done);
#endif
        if
        :: failed || over -> break
        :: !failed && !over
        fi;
#endif
        /* sleep_once */
#ifndef FAULT_DOORBELL_READ_LATE
        rung[me] = 0;                        /* S1 */
#endif
#ifndef FAULT_LOOK_BEFORE_SLEEPING
        if                                   /* S2: no change that another look of this rank could find */
        :: sleeping[me] = 1
        MAY_DIE
        fi;
#endif
#ifndef FAULT_SLEEP_WITHOUT_LOOK
        mem_progress(tag);                   /* S3 */
        look_whether_over(tag, stamp, for_done);
        if
        :: over
        :: !over -> mem_failure()
        fi;
#endif
#ifdef FAULT_LOOK_BEFORE_SLEEPING
        sleeping[me] = 1;
#endif
#ifdef FAULT_DOORBELL_READ_LATE
        rung[me] = 0;
#endif
        if
        :: over || failed                    /* the loop begins anew, and ends */
        :: !over && !failed ->
            if                               /* S4 */
            :: rung[me]
            :: atomic { !rung[me] -> asleep[me] = 1 };
                if
                :: !asleep[me]
                :: atomic { TIMER -> asleep[me] = 0 }
                MAY_DIE
                fi;
#ifdef FAULT_LOSSES_BEFORE_SLEEP_ONLY
                slept = 1
#endif
            fi
        fi
    od;
    atomic { over = 0; slept = 0 }
}

/* ---- a rank ------------------------------------------------------------------- */

/* Even ranks post tags upwards and wait for them downwards; odd ranks the other way round. */
#define UPWARDS(i) (me & 1 -> TAGS - 1 - i : i)
#define DOWNWARDS(i) (me & 1 -> i : TAGS - 1 - i)

proctype Rank(byte me)
{
    byte round = 1;
    byte q, t, l, i, tag, missing, reporter;
    bit over, failed, ringing, slept;
    bit pending[TAGS];
    byte executed[TAGS], seen[TAGS], copied[TAGS], finished[TAGS];

    do
    :: round > OPS || failed -> break
#ifdef LEAVE
    :: me == 0 && round == OPS && !failed -> break
    :: !(me == 0 && round == OPS) && round <= OPS && !failed ->
#else
    :: round <= OPS && !failed ->
#endif
        mem_failure();                       /* mem_enter */
        if
        :: failed -> break
        :: !failed
        fi;
#if WORK == EXCHANGE && !defined(FAULT_SLOT_STILL_READ)
        if
        :: round > 1 -> mem_wait(0, round - 1, true) /* take_slot */
        :: round == 1
        fi;
        if
        :: failed -> break
        :: !failed
        fi;
#endif
        do
        :: i < TAGS -> tag = UPWARDS(i); mem_post(tag, round); i++
        :: i == TAGS -> i = 0; break
        od;
        do
        :: i < TAGS && !failed -> tag = DOWNWARDS(i); mem_wait(tag, round, false); i++
        :: i == TAGS || failed -> i = 0; tag = 0; break
        od;
        if
        :: failed -> break
        :: !failed
        fi;
#if WORK == STAGING
        read_peers(0, round);                /* combine, memcpy: after the meeting */
#endif
        round++
    od;
    /* However early others close, and however late this rank looks, nobody fails without a reason. */
#ifndef LEAVE
    assert(!failed || died || expired);
#endif
    if
    :: failed                                /* the hard case for the others: it does not close now */
#ifdef LEAVE
    :: !failed && me != 0
#elif !defined(DEATH)
    :: !failed                               /* computes on, and calls nothing */
#endif
    :: !failed ->
        store(closed[me], 1);                /* mem_close */
        mem_wake_members()
    fi;
gone:
    skip
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
