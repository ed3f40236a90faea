/*
 * A growing, sealed, nameless file of shared memory; see shm_segment.h.
 */
#define _GNU_SOURCE
#include "shm_segment.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <unistd.h>

/* One fallocate call is undone and starts again when a signal comes; small ones make progress between signals. */
#define RESERVE_STEP_BYTES (64ull << 20)

static uint64_t whole_pages(uint64_t bytes)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    return (bytes + page - 1) / page * page;
}

zc_status shm_memory_check(uint64_t bytes)
{
    struct sysinfo info;
    if (sysinfo(&info) != 0)
        return ZC_OK;
    uint64_t have = ((uint64_t)info.totalram + info.totalswap) * info.mem_unit;
    if (bytes > have)
        return zc_fail(ZC_ENOMEM, "%llu bytes of memory were asked for; this host has %llu in all",
                       (unsigned long long)bytes, (unsigned long long)have);
    return ZC_OK;
}

zc_status shm_segment_open(shm_segment *segment)
{
    memset(segment, 0, sizeof *segment);
    segment->fd = zc_fault() ? (errno = EMFILE, -1)
                             : memfd_create("zero_c", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (segment->fd < 0)
        return zc_fail_errno(ZC_ESYSTEM, errno, "cannot create shared memory (memfd_create)");
    /* A new one is open to all, should somebody find it under /proc. */
    if (zc_fault() ? (errno = EPERM, 1) : fchmod(segment->fd, 0600) != 0 ||
                                          fcntl(segment->fd, F_ADD_SEALS, F_SEAL_SHRINK) != 0) {
        zc_status status = zc_fail_errno(ZC_ESYSTEM, errno, "cannot close shared memory to others and seal it");
        shm_segment_close(segment);
        return status;
    }
    return ZC_OK;
}

void shm_segment_close(shm_segment *segment)
{
    if (segment->fd >= 0)
        close(segment->fd);
    zc_free(segment->spare);
    memset(segment, 0, sizeof *segment);
    segment->fd = -1;
}

/* Makes the pages of a range exist. On failure the range is left punched out. */
static zc_status reserve(shm_segment *segment, uint64_t offset_bytes, uint64_t bytes)
{
    for (uint64_t done = 0; done < bytes;) {
        uint64_t step = bytes - done < RESERVE_STEP_BYTES ? bytes - done : RESERVE_STEP_BYTES;
        int failed = zc_fault() ? (errno = ENOSPC, 1)
                                : fallocate(segment->fd, 0, (off_t)(offset_bytes + done), (off_t)step) != 0;
        if (failed && errno == EINTR)
            continue;
        if (failed) {
            int number = errno;
            if (done)
                fallocate(segment->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset_bytes,
                          (off_t)done);
            return zc_fail_errno(ZC_ENOMEM, number,
                                 "cannot reserve %llu bytes of shared memory (this rank has %llu already)",
                                 (unsigned long long)bytes, (unsigned long long)segment->end_bytes);
        }
        done += step;
    }
    return ZC_OK;
}

zc_status shm_segment_reserve(shm_segment *segment, uint64_t offset_bytes, uint64_t bytes)
{
    uint64_t first = whole_pages(offset_bytes + 1) - whole_pages(1);
    return reserve(segment, first, whole_pages(offset_bytes + bytes) - first);
}

zc_status shm_segment_alloc(shm_segment *segment, uint64_t bytes, uint64_t now_bytes, uint64_t *offset_bytes)
{
    ZC_TRY(shm_memory_check(bytes));
    bytes = whole_pages(bytes);
    now_bytes = whole_pages(now_bytes);
    for (size_t i = 0; i < segment->spare_count; i++) {
        shm_range *range = &segment->spare[i];
        if (range->bytes < bytes)
            continue;
        ZC_TRY(reserve(segment, range->offset_bytes, now_bytes));
        *offset_bytes = range->offset_bytes;
        range->offset_bytes += bytes;
        range->bytes -= bytes;
        if (!range->bytes)
            memmove(range, range + 1, (--segment->spare_count - i) * sizeof *range);
        return ZC_OK;
    }
    ZC_TRY(reserve(segment, segment->end_bytes, now_bytes));
    if (now_bytes < bytes && (zc_fault() ? (errno = EFBIG, 1)
                                         : ftruncate(segment->fd, (off_t)(segment->end_bytes + bytes)) != 0))
        return zc_fail_errno(ZC_ENOMEM, errno, "cannot make a range of %llu bytes of shared memory",
                             (unsigned long long)bytes);
    *offset_bytes = segment->end_bytes;
    segment->end_bytes += bytes;
    return ZC_OK;
}

void shm_segment_free(shm_segment *segment, uint64_t offset_bytes, uint64_t bytes)
{
    bytes = whole_pages(bytes);
    fallocate(segment->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset_bytes, (off_t)bytes);

    size_t at = 0;
    while (at < segment->spare_count && segment->spare[at].offset_bytes < offset_bytes)
        at++;
    shm_range *before = at > 0 ? &segment->spare[at - 1] : NULL;
    shm_range *after = at < segment->spare_count ? &segment->spare[at] : NULL;
    int joins_before = before && before->offset_bytes + before->bytes == offset_bytes;
    int joins_after = after && offset_bytes + bytes == after->offset_bytes;
    if (joins_before) {
        before->bytes += bytes;
        if (joins_after) {
            before->bytes += after->bytes;
            memmove(after, after + 1, (--segment->spare_count - at) * sizeof *after);
        }
    } else if (joins_after) {
        after->offset_bytes = offset_bytes;
        after->bytes += bytes;
    } else {
        if (segment->spare_count == segment->spare_room) {
            size_t room = segment->spare_room ? 2 * segment->spare_room : 8;
            shm_range *grown = zc_realloc(segment->spare, room * sizeof *grown);
            if (!grown)
                return; /* the pages are back; only their numbers in the file are not used again */
            segment->spare = grown;
            segment->spare_room = room;
        }
        memmove(&segment->spare[at + 1], &segment->spare[at], (segment->spare_count - at) * sizeof(shm_range));
        segment->spare[at] = (shm_range){offset_bytes, bytes};
        segment->spare_count++;
    }
}

zc_status shm_segment_map(int fd, uint64_t offset_bytes, uint64_t bytes, int populate, void **out)
{
    struct stat facts;
    *out = NULL;
    if (fstat(fd, &facts) != 0)
        return zc_fail_errno(ZC_ESYSTEM, errno, "cannot look at a rank's shared memory");
    if ((uint64_t)facts.st_size < offset_bytes || (uint64_t)facts.st_size - offset_bytes < bytes)
        return zc_fail(ZC_ECOMM, "a rank's shared memory has %llu bytes, but bytes %llu to %llu are expected in it",
                       (unsigned long long)facts.st_size, (unsigned long long)offset_bytes,
                       (unsigned long long)offset_bytes + bytes);
    void *memory = zc_fault() ? (errno = ENOMEM, MAP_FAILED)
                              : mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                                     MAP_SHARED | (populate ? MAP_POPULATE : 0), fd, (off_t)offset_bytes);
    if (memory == MAP_FAILED)
        return zc_fail_errno(ZC_ENOMEM, errno, "cannot map %llu bytes of shared memory", (unsigned long long)bytes);
    *out = memory;
    return ZC_OK;
}

void shm_segment_unmap(void *memory, uint64_t bytes)
{
    if (memory)
        munmap(memory, bytes);
}
