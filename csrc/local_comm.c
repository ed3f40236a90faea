/*
 * Ranks as threads of one process: memory that every thread addresses anyway.
 *
 * All pieces are kept in one arena until the last rank has closed, so a rank
 * may close while others still look at its words.
 */
#define _GNU_SOURCE
#include "mem_comm.h"
#include "shm_segment.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/mman.h>

typedef struct piece {
    struct piece *next;
    void *memory;
    size_t bytes;
} piece;

typedef struct arena {
    pthread_mutex_t mutex;
    size_t users;
    piece *pieces; /* that nobody has freed */
} arena;

typedef struct local_provider {
    mem_provider public;
    arena *arena;
} local_provider;

static zc_status local_alloc(mem_provider *provider, size_t bytes, size_t now_bytes, void **memory, uint64_t *token)
{
    arena *all = ((local_provider *)provider)->arena;
    ZC_TRY(shm_memory_check(bytes));
    piece *made = zc_malloc(sizeof *made);
    if (!made)
        return zc_fail(ZC_ENOMEM, "out of memory");
    made->bytes = bytes;
    made->memory = zc_fault() ? (errno = ENOMEM, MAP_FAILED)
                              : mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | (now_bytes == bytes ? MAP_POPULATE : 0), -1, 0);
    if (made->memory == MAP_FAILED) {
        int number = errno;
        zc_free(made);
        return zc_fail_errno(ZC_ENOMEM, number, "cannot map %zu bytes of memory", bytes);
    }
    pthread_mutex_lock(&all->mutex);
    made->next = all->pieces;
    all->pieces = made;
    pthread_mutex_unlock(&all->mutex);
    *memory = made->memory;
    *token = (uint64_t)(uintptr_t)made->memory;
    return ZC_OK;
}

/* Private memory comes with its first use. */
static zc_status local_grow(mem_provider *provider, uint64_t token, size_t from_bytes, size_t to_bytes)
{
    (void)provider, (void)token, (void)from_bytes, (void)to_bytes;
    return ZC_OK;
}

static void local_free(mem_provider *provider, void *memory, uint64_t token, size_t bytes)
{
    (void)token;
    arena *all = ((local_provider *)provider)->arena;
    pthread_mutex_lock(&all->mutex);
    piece **at = &all->pieces;
    while ((*at)->memory != memory)
        at = &(*at)->next;
    piece *gone = *at;
    *at = gone->next;
    pthread_mutex_unlock(&all->mutex);
    munmap(memory, bytes);
    zc_free(gone);
}

static void local_leave(mem_provider *provider, void *memory, size_t bytes)
{
    (void)provider, (void)memory, (void)bytes;
}

static zc_status local_map(mem_provider *provider, size_t rank, uint64_t token, size_t bytes, void **memory)
{
    (void)provider, (void)bytes;
    if (zc_fault())
        return zc_fail(ZC_ENOMEM, "cannot map memory of rank %zu", rank);
    *memory = (void *)(uintptr_t)token;
    return ZC_OK;
}

static int local_dead(mem_provider *provider, size_t rank)
{
    (void)provider, (void)rank; /* a thread that ends without closing its communicator cannot be told from a slow one */
    return 0;
}

static void arena_release(arena *all)
{
    pthread_mutex_lock(&all->mutex);
    int last = --all->users == 0;
    pthread_mutex_unlock(&all->mutex);
    if (!last)
        return;
    while (all->pieces) {
        piece *gone = all->pieces;
        all->pieces = gone->next;
        munmap(gone->memory, gone->bytes);
        zc_free(gone);
    }
    pthread_mutex_destroy(&all->mutex);
    zc_free(all);
}

static void local_destroy(mem_provider *provider)
{
    arena_release(((local_provider *)provider)->arena);
    zc_free(provider);
}

static const mem_provider_ops local_ops = {
    .alloc = local_alloc,
    .grow = local_grow,
    .free = local_free,
    .leave = local_leave,
    .map = local_map,
    .unmap = local_leave,
    .dead = local_dead,
    .destroy = local_destroy,
};

zc_status local_comm_create(size_t ranks, uint64_t timeout_ns, zc_comm **out)
{
    if (ranks < 1 || ranks > SHM_RANKS_MAX)
        return zc_fail(ZC_EINVAL, "%zu ranks; there may be 1 to %u", ranks, SHM_RANKS_MAX);
    memset(out, 0, ranks * sizeof *out);

    zc_status status = ZC_OK;
    mem_world **worlds = zc_calloc(ranks, sizeof *worlds);
    uint64_t *tokens = zc_calloc(ranks, sizeof *tokens);
    arena *all = zc_calloc(1, sizeof *all);
    if (!worlds || !tokens || !all) {
        zc_free(worlds);
        zc_free(tokens);
        zc_free(all);
        return zc_fail(ZC_ENOMEM, "out of memory for %zu ranks", ranks);
    }
    pthread_mutex_init(&all->mutex, NULL);
    all->users = 1; /* this function */

    int spin = ranks <= mem_cores();
    for (size_t r = 0; r < ranks && status == ZC_OK; r++) {
        local_provider *provider = zc_calloc(1, sizeof *provider);
        if (!provider) {
            status = zc_fail(ZC_ENOMEM, "out of memory for %zu ranks", ranks);
            break;
        }
        provider->public.ops = &local_ops;
        provider->arena = all;
        pthread_mutex_lock(&all->mutex);
        all->users++;
        pthread_mutex_unlock(&all->mutex);
        status = mem_world_create(&provider->public, r, ranks, spin, &worlds[r]);
        if (status == ZC_OK)
            tokens[r] = worlds[r]->home->token;
    }
    for (size_t r = 0; r < ranks && status == ZC_OK; r++)
        status = mem_world_attach(worlds[r], tokens, timeout_ns, &out[r]);
    if (status != ZC_OK)
        for (size_t r = 0; r < ranks; r++) {
            if (out[r])
                comm_close(out[r]);
            else
                mem_world_destroy(worlds[r]);
            out[r] = NULL;
        }
    arena_release(all);
    zc_free(worlds);
    zc_free(tokens);
    return status;
}
