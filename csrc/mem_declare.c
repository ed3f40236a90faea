/*
 * What ranks must do in one order (comm_declare), in memory that all can read.
 *
 * Every rank keeps, for each line, a ring of its last SHM_DECLARED declarations
 * in its home: number, detail, `what`, and a chain, which is the hash of all
 * details up to this one.  Two ranks have declared the same up to number k exactly
 * when their chains at k are equal (but for a chance of 2^-64), so one comparison
 * covers everything before it.
 *
 * To declare, a rank writes the entry, stores `newest` and looks at every peer
 * once: at the newest number that both have, the two chains must be equal.  If the
 * peer is ahead, that is this rank's new number, in the peer's ring; if it is
 * behind, it is the peer's newest number, in both rings.  An entry that is no longer
 * in a ring, because one rank is more than SHM_DECLARED ahead, is not compared
 * now: the one that is behind compares as soon as it is near enough.
 *
 * Why no difference is missed.  `newest` is stored and loaded seq_cst, so of two
 * ranks that declare number k at the same time at least one sees the other's; and
 * any later comparison would find what an earlier one should have found.
 *
 * Reading without a lock.  The owner sets an entry's number to 0, writes the rest
 * with release stores, and then its number.  A reader loads the number, the rest with
 * acquire loads, and the number again.  If any word it got is of a later
 * declaration, the 0 that was stored before that word is visible to the second
 * look, or something later still, and numbers never come back; so an entry that
 * has the right number both times is whole.  (Acquire loads and not a fence: the
 * thread sanitizer knows no fences.)
 *
 * Cost: three cache lines written, and two of each peer read.
 */
#include "mem_comm.h"
#include "zc_hash.h"

#include <stdio.h>
#include <string.h>

_Static_assert(SHM_LINES == COMM_LINES && SHM_DECLARED == COMM_DECLARED && SHM_WHAT_BYTES == COMM_WHAT_BYTES,
               "the rings are what comm.h promises");

/* A copy of an entry. */
typedef struct declaration {
    uint64_t number, chain, detail;
    char what[SHM_WHAT_BYTES];
} declaration;

static void write_entry(shm_line *line, const declaration *made)
{
    shm_declared *entry = &line->ring[made->number % SHM_DECLARED];
    atomic_store_explicit(&entry->number, 0, memory_order_relaxed);
    atomic_store_explicit(&entry->chain, made->chain, memory_order_release);
    atomic_store_explicit(&entry->detail, made->detail, memory_order_release);
    for (size_t w = 0; w < SHM_WHAT_BYTES / 8; w++) {
        uint64_t word;
        memcpy(&word, made->what + 8 * w, 8);
        atomic_store_explicit(&entry->what[w], word, memory_order_release);
    }
    atomic_store_explicit(&entry->number, made->number, memory_order_release);
}

/* 1: `out` is declaration `number`; 0: the ring does not have it (any more). */
static int read_entry(shm_line *line, uint64_t number, declaration *out)
{
    shm_declared *entry = &line->ring[number % SHM_DECLARED];
    if (atomic_load_explicit(&entry->number, memory_order_acquire) != number)
        return 0;
    out->number = number;
    out->chain = atomic_load_explicit(&entry->chain, memory_order_acquire);
    out->detail = atomic_load_explicit(&entry->detail, memory_order_acquire);
    for (size_t w = 0; w < SHM_WHAT_BYTES / 8; w++) {
        uint64_t word = atomic_load_explicit(&entry->what[w], memory_order_acquire);
        memcpy(out->what + 8 * w, &word, 8);
    }
    return atomic_load_explicit(&entry->number, memory_order_relaxed) == number;
}

/* The chains differ at `last`: names the first pair that differs, of those that both rings still have. */
static zc_status differ(mem_group *group, size_t q, shm_line *own, shm_line *peer, uint64_t last)
{
    size_t me = mem_name(group, group->public.rank), other = mem_name(group, q);
    for (uint64_t number = last < SHM_DECLARED ? 1 : last - SHM_DECLARED + 1; number <= last; number++) {
        declaration mine, its;
        if (!read_entry(own, number, &mine) || !read_entry(peer, number, &its) || mine.detail == its.detail)
            continue;
        if (strcmp(mine.what, its.what) != 0)
            return mem_fail(group, ZC_EMISMATCH, "ranks do different things: rank %zu comes to \"%s\" where rank %zu "
                            "comes to \"%s\" (number %llu of each); every rank must make the same calls in the same "
                            "order", me, mine.what, other, its.what, (unsigned long long)number);
        return mem_fail(group, ZC_EMISMATCH, "ranks %zu and %zu both come to \"%s\" (number %llu of each) but with "
                        "different arguments, or of different optimizers; all ranks must pass the same, in one order",
                        me, other, mine.what, (unsigned long long)number);
    }
    return mem_fail(group, ZC_EMISMATCH, "ranks %zu and %zu have done different things before their number %llu, so "
                    "long ago that it is not known what; every rank must make the same calls in the same order", me,
                    other, (unsigned long long)last);
}

/* Against rank q, which may be declaring at this moment. */
static zc_status compare(mem_group *group, size_t q, uint32_t line)
{
    shm_line *own = &group->area[group->public.rank]->line[line], *peer = &group->area[q]->line[line];
    uint64_t newest = atomic_load(&peer->newest), number = group->declared[line].number;
    uint64_t last = newest < number ? newest : number;
    declaration mine, its;
    if (!last || !read_entry(own, last, &mine) || !read_entry(peer, last, &its) || mine.chain == its.chain)
        return ZC_OK;
    return differ(group, q, own, peer, last);
}

zc_status mem_declare(zc_comm *comm, uint32_t line, uint64_t detail, const char *what)
{
    mem_group *group = (mem_group *)comm;
    ZC_TRY(mem_enter(group));
    shm_line *own = &group->area[comm->rank]->line[line];
    declaration made = {.number = ++group->declared[line].number, .detail = detail};
    made.chain = group->declared[line].chain = zc_hash_next(group->declared[line].chain, detail);
    snprintf(made.what, sizeof made.what, "%s", what);
    write_entry(own, &made);
    atomic_store(&own->newest, made.number);
    zc_status status = ZC_OK;
    for (size_t q = 0; status == ZC_OK && q < comm->ranks; q++)
        if (q != comm->rank)
            status = compare(group, q, line);
    mem_leave(group);
    return status;
}

size_t mem_behind(zc_comm *comm, uint32_t line, uint64_t number, char *text, size_t room_bytes)
{
    mem_group *group = (mem_group *)comm;
    size_t behind = 0;
    for (size_t q = 0; q < comm->ranks; q++) {
        if (atomic_load(&group->area[q]->line[line].newest) >= number)
            continue;
        behind++;
        zc_list_number(text, room_bytes, mem_name(group, q));
    }
    return behind;
}
