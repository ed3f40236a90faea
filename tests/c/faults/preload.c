/*
 * Faults, by injection, in ranks that are Python processes: a library to be loaded
 * before all others.  It knows the points of a core that was built with them
 * (zc_point.h), and makes every call that has to do with files of one folder two
 * points more, "before" and "after", and one in the middle of a write.
 *
 * tests/fault_ranks.py calls the functions faults_*.
 */
#define _GNU_SOURCE
#include "faults.h"

#include "zc_point.h"

#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define SHOWN __attribute__((visibility("default")))
#define MOST_FDS 4096

static char folder[400];
static char watched[MOST_FDS], halved[MOST_FDS];
static fault armed;
static long came;
static uint64_t *hit_ns; /* in memory that outlives this process */
static int listing;
static char (*list)[POINT_BYTES];
static size_t listed;

SHOWN void faults_watch(const char *path, uint64_t *hit)
{
    snprintf(folder, sizeof folder, "%s", path);
    hit_ns = hit;
}

/* From now on; point "": none. */
SHOWN void faults_arm(const char *point, long time, int how, int lists)
{
    memset(&armed, 0, sizeof armed);
    snprintf(armed.point, sizeof armed.point, "%s", point);
    armed.time = time;
    armed.how = (manner)how;
    came = 0;
    listing = lists;
    listed = 0;
    if (lists && !list)
        list = calloc(MOST_POINTS, POINT_BYTES);
}

SHOWN size_t faults_listed(void)
{
    return listed;
}

SHOWN const char *faults_point(size_t k)
{
    return list[k];
}

/* 1: this call shall fail. */
static int come_to(const char *name)
{
    size_t at = listing ? __atomic_fetch_add(&listed, 1, __ATOMIC_RELAXED) : MOST_POINTS;
    if (at < MOST_POINTS)
        snprintf(list[at], POINT_BYTES, "%s", name);
    if (!armed.time || strcmp(name, armed.point) || __atomic_add_fetch(&came, 1, __ATOMIC_RELAXED) != armed.time)
        return 0;
    *hit_ns = now_ns();
    if (armed.how == KILLED)
        kill(getpid(), SIGKILL);
    else if (armed.how == STOPPED)
        kill(getpid(), SIGSTOP);
    else if (armed.how == EXITED)
        _exit(EXIT_SUDDEN); /* exit() would run what Python does at its end, in the middle of a call */
    return armed.how == NO_MEMORY;
}

SHOWN void zc_point(const char *name)
{
    come_to(name);
}

/* ---- files -------------------------------------------------------------------- */

static int is_inside(const char *path)
{
    return folder[0] && path && !strncmp(path, folder, strlen(folder));
}

static int is_watched(int fd)
{
    return fd >= 0 && fd < MOST_FDS && watched[fd];
}

static void watch_fd(int fd, const char *path)
{
    if (fd >= 0 && fd < MOST_FDS)
        halved[fd] = 0, watched[fd] = (char)is_inside(path);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* A call that is looked at if `inside`, and fails with `error` if that is its end. */
#define AROUND(inside, what, type, error, call)      \
    do {                                             \
        int looked_at = (inside);                    \
        if (looked_at && come_to("before " what)) {  \
            errno = (error);                         \
            return (type)-1;                         \
        }                                            \
        type result = (call);                        \
        int number = errno;                          \
        if (looked_at)                               \
            come_to("after " what);                  \
        errno = number;                              \
        return result;                               \
    } while (0)

static int opened(int fd, const char *path)
{
    watch_fd(fd, path);
    return fd;
}

#define OPEN(name)                                                                              \
    SHOWN int name(const char *path, int flags, ...)                                            \
    {                                                                                           \
        va_list arguments;                                                                      \
        va_start(arguments, flags);                                                             \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, mode_t) : 0;            \
        va_end(arguments);                                                                      \
        AROUND(is_inside(path), "open", int, EIO, opened(NEXT(name)(path, flags, mode), path)); \
    }

OPEN(open)
OPEN(open64)

static int forgotten(int fd)
{
    if (fd >= 0 && fd < MOST_FDS)
        watched[fd] = 0;
    return NEXT(close)(fd);
}

SHOWN int close(int fd)
{
    if (!is_watched(fd))
        return NEXT(close)(fd);
    come_to("before close"); /* never fails here: a caller may not call it again */
    int result = forgotten(fd);
    come_to("after close");
    return result;
}

/* Half of the bytes, then the point, then an error or the end; the caller comes again with the rest, which goes at once. */
#define WRITE(name, PARAMETERS, half, whole)                        \
    SHOWN ssize_t name PARAMETERS                                   \
    {                                                               \
        if (!is_watched(fd))                                        \
            return whole;                                           \
        if (come_to("before write")) {                              \
            errno = ENOSPC;                                         \
            return -1;                                              \
        }                                                           \
        ssize_t written = halved[fd] ? whole : half;                \
        halved[fd] = !halved[fd];                                   \
        if (halved[fd] && come_to("in the middle of a write")) {    \
            errno = ENOSPC;                                         \
            return -1;                                              \
        }                                                           \
        come_to("after write");                                     \
        return written;                                             \
    }

static size_t half_of(size_t bytes)
{
    return bytes > 1 ? bytes / 2 : bytes;
}

WRITE(write, (int fd, const void *from, size_t bytes), NEXT(write)(fd, from, half_of(bytes)), NEXT(write)(fd, from, bytes))
WRITE(pwrite, (int fd, const void *from, size_t bytes, off_t at), NEXT(pwrite)(fd, from, half_of(bytes), at),
      NEXT(pwrite)(fd, from, bytes, at))
WRITE(pwrite64, (int fd, const void *from, size_t bytes, off64_t at), NEXT(pwrite64)(fd, from, half_of(bytes), at),
      NEXT(pwrite64)(fd, from, bytes, at))

SHOWN ssize_t read(int fd, void *to, size_t bytes)
{
    AROUND(is_watched(fd), "read", ssize_t, EIO, NEXT(read)(fd, to, bytes));
}

SHOWN ssize_t preadv(int fd, const struct iovec *parts, int count, off_t at)
{
    AROUND(is_watched(fd), "read", ssize_t, EIO, NEXT(preadv)(fd, parts, count, at));
}

SHOWN ssize_t preadv64(int fd, const struct iovec *parts, int count, off64_t at)
{
    AROUND(is_watched(fd), "read", ssize_t, EIO, NEXT(preadv64)(fd, parts, count, at));
}

SHOWN ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off64_t at, int flags)
{
    AROUND(is_watched(fd), "read", ssize_t, EIO, NEXT(preadv64v2)(fd, parts, count, at, flags));
}

SHOWN int fsync(int fd)
{
    AROUND(is_watched(fd), "fsync", int, EIO, NEXT(fsync)(fd));
}

SHOWN int flock(int fd, int operation)
{
    AROUND(is_watched(fd), "flock", int, EIO, NEXT(flock)(fd, operation));
}

/* These two return the error's number. */
static int allocated(int fd, int result)
{
    if (is_watched(fd))
        come_to("after fallocate");
    return result;
}

SHOWN int posix_fallocate(int fd, off_t at, off_t bytes)
{
    if (is_watched(fd) && come_to("before fallocate"))
        return ENOSPC;
    return allocated(fd, NEXT(posix_fallocate)(fd, at, bytes));
}

SHOWN int posix_fallocate64(int fd, off64_t at, off64_t bytes)
{
    if (is_watched(fd) && come_to("before fallocate"))
        return ENOSPC;
    return allocated(fd, NEXT(posix_fallocate64)(fd, at, bytes));
}

SHOWN int rename(const char *from, const char *to)
{
    AROUND(is_inside(from), "rename", int, EIO, NEXT(rename)(from, to));
}

SHOWN int unlink(const char *path)
{
    AROUND(is_inside(path), "unlink", int, EIO, NEXT(unlink)(path));
}

SHOWN int mkdir(const char *path, mode_t mode)
{
    AROUND(is_inside(path), "mkdir", int, EIO, NEXT(mkdir)(path, mode));
}

SHOWN DIR *opendir(const char *path)
{
    if (is_inside(path) && come_to("before opendir")) {
        errno = EIO;
        return NULL;
    }
    DIR *directory = NEXT(opendir)(path);
    if (is_inside(path))
        come_to("after opendir");
    return directory;
}
