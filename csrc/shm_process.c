/*
 * What is known of a process through its pidfd; see shm_process.h.
 */
#define _GNU_SOURCE
#include "shm_process.h"

#include "zc_status.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

int shm_process_open(void)
{
    int fd = zc_fault() ? (errno = EMFILE, -1) : (int)syscall(SYS_pidfd_open, getpid(), 0);
    return fd; /* close-on-exec by itself */
}

int shm_process_ended(int process_fd)
{
    struct pollfd end = {process_fd, POLLIN, 0};
    return poll(&end, 1, 0) == 1 && (end.revents & POLLIN);
}

/* One line of /proc that begins so, or 0. */
static int find_line(const char *path, const char *begin, char *line, size_t room_bytes)
{
    FILE *file = fopen(path, "re");
    int found = 0;
    while (file && !found && fgets(line, (int)room_bytes, file))
        found = !strncmp(line, begin, strlen(begin));
    if (file)
        fclose(file);
    return found;
}

/* The pidfd knows the number that the process has here, where another namespace has another. */
int shm_process_stopped(int process_fd)
{
    char path[64], line[256];
    snprintf(path, sizeof path, "/proc/self/fdinfo/%d", process_fd);
    if (!find_line(path, "Pid:", line, sizeof line))
        return 0;
    long pid = strtol(line + strlen("Pid:"), NULL, 10);
    snprintf(path, sizeof path, "/proc/%ld/status", pid);
    return find_line(path, "State:", line, sizeof line) && (strstr(line, "(stopped)") || strstr(line, "(tracing stop)"));
}
