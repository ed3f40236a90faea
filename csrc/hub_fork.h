/*
 * Connections that a forked child lets go of.
 *
 * A connection ends when the last process that has it open is gone.  A child that
 * was forked without exec, and outlives its parent, would keep peers waiting until
 * they take the silence for the end.  So sockets are listed here, and a child closes
 * them before fork() returns in it.  Nothing closes them there again: every way into
 * a communicator is barred by the process number first (hub_forked).
 */
#ifndef HUB_FORK_H
#define HUB_FORK_H

#include "zc_status.h"

typedef struct hub_kept hub_kept;
struct hub_kept {
    int fd; /* -1: nothing is listed */
    hub_kept *next, **at;
};

/* Once before the first is kept; any number of times. */
zc_status hub_fork_prepare(void);
/* Takes the open socket into the list; `kept` stays where it is until hub_fork_close. */
void hub_fork_keep(hub_kept *kept, int fd);
/* Closes the socket, if there is one. */
void hub_fork_close(hub_kept *kept);

#endif
