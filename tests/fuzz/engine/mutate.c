/*
 * Mutations of a string of bytes; see mutate.h.
 */
#include "mutate.h"

#include <string.h>

uint64_t fuzz_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

static size_t below(uint64_t *state, size_t end)
{
    return end ? (size_t)(fuzz_random(state) % end) : 0;
}

/* A byte that often means something. */
static uint8_t odd_byte(uint64_t *state)
{
    static const uint8_t odd[] = {0, 1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 63, 64, 127, 128, 254, 255};
    return fuzz_random(state) & 1 ? odd[below(state, sizeof odd)] : (uint8_t)fuzz_random(state);
}

/* Makes a hole of up to `count` bytes at `at`; how many it has. */
static size_t open_hole(uint8_t *data, size_t *bytes, size_t room, size_t at, size_t count)
{
    count = count < room - *bytes ? count : room - *bytes;
    memmove(data + at + count, data + at, *bytes - at);
    *bytes += count;
    return count;
}

static void step(uint64_t *state, uint8_t *data, size_t *bytes, size_t room, const uint8_t *other, size_t other_bytes)
{
    size_t at = below(state, *bytes), left = *bytes - at, count, from;
    switch (below(state, 8)) {
    case 0: /* a bit */
        data[at] ^= (uint8_t)(1u << below(state, 8));
        return;
    case 1: /* a byte */
        data[at] = odd_byte(state);
        return;
    case 2: /* one more or less */
        data[at] = (uint8_t)(data[at] + (fuzz_random(state) & 1 ? 1 : -1));
        return;
    case 3: /* new bytes */
        count = open_hole(data, bytes, room, at, 1 + below(state, 8));
        while (count)
            data[at + --count] = odd_byte(state);
        return;
    case 4: /* fewer bytes */
        count = 1 + below(state, left < 16 ? left : below(state, 4) ? 16 : left);
        if (count < *bytes) {
            memmove(data + at, data + at + count, left - count);
            *bytes -= count;
        }
        return;
    case 5: /* a piece once more */
        from = below(state, *bytes);
        count = 1 + below(state, *bytes - from < 32 ? *bytes - from : 32);
        uint8_t piece[32];
        memcpy(piece, data + from, count);
        count = open_hole(data, bytes, room, at, count);
        memcpy(data + at, piece, count);
        return;
    case 6: /* a piece of another input, in place of what is here or before it */
        if (!other_bytes)
            return;
        from = below(state, other_bytes);
        count = 1 + below(state, other_bytes - from < 64 ? other_bytes - from : 64);
        if (fuzz_random(state) & 1)
            count = open_hole(data, bytes, room, at, count);
        else
            count = count < left ? count : left;
        memcpy(data + at, other + from, count);
        return;
    default: /* two pieces change places */
        from = below(state, *bytes);
        count = 1 + below(state, 4);
        for (size_t i = 0; i < count && at + i < *bytes && from + i < *bytes; i++) {
            uint8_t kept = data[at + i];
            data[at + i] = data[from + i];
            data[from + i] = kept;
        }
    }
}

size_t fuzz_mutate(uint64_t *state, uint8_t *data, size_t bytes, size_t room, const uint8_t *other, size_t other_bytes)
{
    if (!bytes || below(state, 3) == 0) { /* any bytes are an input, and these are like no other */
        bytes = 1 + below(state, room);
        for (size_t i = 0; i < bytes; i++)
            data[i] = (uint8_t)fuzz_random(state);
        return bytes;
    }
    for (size_t steps = 1 + below(state, 8); steps; steps--)
        step(state, data, &bytes, room, other, other_bytes);
    return bytes;
}
