/*
 * The memory of one rank that other processes can map: one anonymous file
 * (memfd) that grows.
 *
 * Ranges of the file are handed out in whole pages and reserved when they are
 * handed out, so that running out of memory is an error of shm_segment_alloc
 * and not a SIGBUS later.  A freed range is punched out of the file (its pages
 * go back to the system, and read as zeros when it is used again).  The file
 * has no name: it is gone with the last descriptor and mapping, however the
 * processes end.  It is sealed against shrinking, so no owner of a descriptor
 * can take pages away under a mapping, and no other user may open it.
 */
#ifndef SHM_SEGMENT_H
#define SHM_SEGMENT_H

#include "zc_status.h"

#include <stddef.h>
#include <stdint.h>

typedef struct shm_range {
    uint64_t offset_bytes, bytes;
} shm_range;

typedef struct shm_segment {
    int fd;               /* -1: none */
    uint64_t end_bytes;   /* size of the file */
    shm_range *spare;     /* punched out, by offset, never touching one another */
    size_t spare_count, spare_room;
} shm_segment;

/* Close-on-exec. On failure *segment is empty and may be closed. */
zc_status shm_segment_open(shm_segment *segment);
/* Mappings stay valid. */
void shm_segment_close(shm_segment *segment);

/* A range of `bytes` (rounded up to pages), zero-filled; its first now_bytes are reserved, the rest is a hole. */
zc_status shm_segment_alloc(shm_segment *segment, uint64_t bytes, uint64_t now_bytes, uint64_t *offset_bytes);
/* Reserves a part of a range that was a hole; whole pages that hold [offset, offset + bytes). */
zc_status shm_segment_reserve(shm_segment *segment, uint64_t offset_bytes, uint64_t bytes);
/* Gives the range back; the caller has unmapped it, and nobody looks at it any more. */
void shm_segment_free(shm_segment *segment, uint64_t offset_bytes, uint64_t bytes);

/*
 * Maps a range of a segment, own or a peer's, readable and writable.
 * `populate`: with page table entries.  Checks first that the file has it.
 */
zc_status shm_segment_map(int fd, uint64_t offset_bytes, uint64_t bytes, int populate, void **out);
void shm_segment_unmap(void *memory, uint64_t bytes);

/* Refuses what this host can never have: better an error now than the kernel's choice of a victim later. */
zc_status shm_memory_check(uint64_t bytes);

#endif
