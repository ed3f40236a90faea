/* Connections that a forked child lets go of: hub_fork.h. */
#include "hub_fork.h"

#include <pthread.h>
#include <unistd.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static hub_kept *all;
static int refused;

static void before_fork(void)
{
    pthread_mutex_lock(&mutex);
}

static void in_parent(void)
{
    pthread_mutex_unlock(&mutex);
}

/* Only what POSIX allows in the child of a process with threads. */
static void in_child(void)
{
    for (hub_kept *kept = all; kept; kept = kept->next)
        close(kept->fd);
    all = NULL; /* a grandchild may have other files of these numbers */
    pthread_mutex_unlock(&mutex);
}

static void begin(void)
{
    refused = pthread_atfork(before_fork, in_parent, in_child);
}

zc_status hub_fork_prepare(void)
{
    pthread_once(&once, begin);
    return refused ? zc_fail_errno(ZC_ENOMEM, refused, "no memory to look after forks") : ZC_OK;
}

void hub_fork_keep(hub_kept *kept, int fd)
{
    pthread_mutex_lock(&mutex);
    *kept = (hub_kept){.fd = fd, .next = all, .at = &all};
    if (all)
        all->at = &kept->next;
    all = kept;
    pthread_mutex_unlock(&mutex);
}

void hub_fork_close(hub_kept *kept)
{
    if (kept->fd < 0)
        return;
    pthread_mutex_lock(&mutex);
    *kept->at = kept->next;
    if (kept->next)
        kept->next->at = kept->at;
    close(kept->fd);
    kept->fd = -1;
    pthread_mutex_unlock(&mutex);
}
