/*
 * The primitives of the protocol in shm_sync.h: clock, futex, poison records,
 * wait records and the search for cycles in them.
 */
#define _GNU_SOURCE
#include "shm_sync.h"
#include "zc_point.h"

#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

uint64_t shm_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* Not FUTEX_PRIVATE: the word is shared between processes. */
static long futex(_Atomic uint32_t *word, int operation, uint32_t value, const struct timespec *limit)
{
    return syscall(SYS_futex, (uint32_t *)word, operation, value, limit, NULL, 0);
}

void shm_wake(shm_control *peer)
{
    if (!atomic_load(&peer->sleeping))
        return;
    if (!atomic_exchange(&peer->sleeping, 0)) /* another publisher wakes it */
        return;
    ZC_POINT("wake: to be rung");
    atomic_fetch_add(&peer->doorbell, 1);
    ZC_POINT("wake: rung");
    futex(&peer->doorbell, FUTEX_WAKE, INT_MAX, NULL);
}

uint32_t shm_sleep_prepare(shm_control *own)
{
    uint32_t doorbell = atomic_load(&own->doorbell);
    atomic_store(&own->sleeping, 1);
    return doorbell;
}

void shm_sleep(shm_control *own, uint32_t doorbell, uint64_t limit_ns)
{
    struct timespec limit = {(time_t)(limit_ns / 1000000000u), (long)(limit_ns % 1000000000u)};
    futex(&own->doorbell, FUTEX_WAIT, doorbell, &limit);
}

/* Text crosses as relaxed words: a reader may look while it is replaced, and then drops what it read. */
static void store_text(_Atomic uint64_t *words, size_t bytes, const char *text)
{
    size_t length = strlen(text);
    if (length > bytes - 1)
        length = bytes - 1;
    for (size_t at = 0; at < bytes; at += 8) {
        uint64_t word = 0;
        if (at < length)
            memcpy(&word, text + at, length - at < 8 ? length - at : 8);
        atomic_store_explicit(&words[at / 8], word, memory_order_relaxed);
    }
}

static void load_text(char *text, size_t bytes, _Atomic uint64_t *words)
{
    for (size_t at = 0; at < bytes; at += 8) {
        uint64_t word = atomic_load_explicit(&words[at / 8], memory_order_relaxed);
        memcpy(text + at, &word, 8);
    }
    text[bytes - 1] = '\0';
}

void shm_poison_write(shm_group *own, zc_status status, const char *text)
{
    uint32_t none = 0;
    if (!atomic_compare_exchange_strong(&own->poison_state, &none, 1))
        return;
    atomic_store_explicit(&own->poison_status, (int32_t)status, memory_order_relaxed);
    store_text(own->poison_text, SHM_TEXT_BYTES, text);
    atomic_store_explicit(&own->poison_state, 2, memory_order_release);
}

zc_status shm_poison_read(shm_group *peer, char text[SHM_TEXT_BYTES])
{
    if (atomic_load_explicit(&peer->poison_state, memory_order_acquire) != 2)
        return ZC_OK;
    load_text(text, SHM_TEXT_BYTES, peer->poison_text);
    return (zc_status)atomic_load_explicit(&peer->poison_status, memory_order_relaxed);
}

/* The set is empty until the first beat: a record just begun has no edges. */
void shm_wait_begin(shm_control *own, const char *what)
{
    for (size_t w = 0; w < SHM_MASK_WORDS; w++)
        atomic_store_explicit(&own->wait.missing[w], 0, memory_order_relaxed);
    store_text(own->wait.what, SHM_WHAT_BYTES, what);
    atomic_fetch_add(&own->wait.sequence, 1);
}

void shm_wait_beat(shm_control *own, const uint64_t missing[SHM_MASK_WORDS])
{
    for (size_t w = 0; w < SHM_MASK_WORDS; w++)
        atomic_store(&own->wait.missing[w], missing[w]);
    atomic_fetch_add(&own->wait.beat, 1);
}

void shm_wait_end(shm_control *own)
{
    atomic_fetch_add(&own->wait.sequence, 1);
}

/* A consistent copy of one record; 0 when its owner is not blocked or just moved. */
static int read_wait(shm_control *control, shm_cycle_node *node, uint64_t missing[SHM_MASK_WORDS])
{
    node->sequence = atomic_load(&control->wait.sequence);
    if (!(node->sequence & 1))
        return 0;
    node->beat = atomic_load(&control->wait.beat);
    for (size_t w = 0; w < SHM_MASK_WORDS; w++)
        missing[w] = atomic_load(&control->wait.missing[w]);
    return atomic_load(&control->wait.sequence) == node->sequence;
}

/*
 * Breadth first, so the shortest cycle through `me`.  The first pass over it ends when every rank
 * of it has been seen blocked; beats count from the second, which finds each still in that wait.
 * With one pass a rank could beat twice before another of the cycle has come to its wait.
 */
size_t shm_cycle_find(shm_control *const *controls, size_t ranks, size_t me, shm_cycle_node *path,
                      uint32_t *scratch)
{
    uint32_t *queue = scratch, *parent = scratch + ranks;
    uint64_t missing[SHM_MASK_WORDS], visited[SHM_MASK_WORDS] = {0};
    size_t head = 0, tail = 0, length = 0;
    shm_cycle_node node;

    queue[tail++] = (uint32_t)me;
    shm_mask_add(visited, me);
    while (head < tail) {
        size_t rank = queue[head++];
        if (!read_wait(controls[rank], &node, missing))
            continue;
        if (rank != me && shm_mask_has(missing, me)) {
            for (size_t r = rank; r != me; r = parent[r])
                length++;
            length++;
            for (size_t r = rank, at = length; at > 0; r = parent[r]) {
                path[--at].rank = r;
                if (at == 0)
                    break;
            }
            for (size_t at = 0; at < length; at++)
                if (!read_wait(controls[path[at].rank], &path[at], missing))
                    return 0;
            for (size_t at = 0; at < length; at++) {
                if (!read_wait(controls[path[at].rank], &node, missing) || node.sequence != path[at].sequence)
                    return 0;
                path[at].beat = node.beat;
            }
            return length;
        }
        for (size_t next = 0; next < ranks; next++)
            if (shm_mask_has(missing, next) && !shm_mask_has(visited, next)) {
                shm_mask_add(visited, next);
                parent[next] = (uint32_t)rank;
                queue[tail++] = (uint32_t)next;
            }
    }
    return 0;
}

int shm_cycle_check(shm_control *const *controls, const shm_cycle_node *path, size_t length)
{
    uint64_t missing[SHM_MASK_WORDS];
    int proved = 1;
    for (size_t at = 0; at < length; at++) {
        shm_cycle_node now;
        if (!read_wait(controls[path[at].rank], &now, missing) || now.sequence != path[at].sequence ||
            !shm_mask_has(missing, path[(at + 1) % length].rank))
            return -1;
        if (now.beat < path[at].beat + 2)
            proved = 0;
    }
    return proved;
}

void shm_cycle_describe(shm_control *const *controls, const shm_cycle_node *path, size_t length, char *text,
                        size_t room_bytes)
{
    size_t used = 0;
    text[0] = '\0';
    for (size_t at = 0; at < length && used < room_bytes; at++) {
        char what[SHM_WHAT_BYTES];
        load_text(what, sizeof what, controls[path[at].rank]->wait.what);
        int wrote = at == 0 ? snprintf(text, room_bytes, "rank %zu waits in '%s' for rank %zu", path[0].rank, what,
                                       path[1 % length].rank)
                            : snprintf(text + used, room_bytes - used, ", which waits in '%s' for rank %zu", what,
                                       path[(at + 1) % length].rank);
        if (wrote < 0)
            return;
        used += (size_t)wrote;
    }
}
