/*
 * The checksum of zero_c.h: Fletcher's sums, wide enough that nothing has to be
 * reduced, in eight lanes, so that they run at the speed of memory.
 */
#include "zero_c.h"

#include <string.h>

#define LANES 8u

typedef uint32_t lane_words __attribute__((vector_size(4 * LANES)));
typedef uint64_t lane_sums __attribute__((vector_size(8 * LANES)));

/*
 * Lane k sums words k, k + 8, ...: `a` of it, and `b` as the sum of all its a's so
 * far.  After g groups of eight, a word of lane k in group i has been added g - i
 * times; of the whole it must count 8 (g - i) - k times.
 */
void zc_checksum(const void *data, size_t bytes, uint64_t sums[2])
{
    const unsigned char *at = data;
    lane_sums a = {0}, b = {0};
    for (size_t g = bytes / sizeof(lane_words); g > 0; g--, at += sizeof(lane_words)) {
        lane_words words;
        memcpy(&words, at, sizeof words);
        a += __builtin_convertvector(words, lane_sums);
        b += a;
    }
    sums[0] = sums[1] = 0;
    for (unsigned k = 0; k < LANES; k++) {
        sums[0] += a[k];
        sums[1] += LANES * b[k] - k * a[k];
    }
    for (size_t left = bytes % sizeof(lane_words); left > 0;) {
        size_t here = left < 4 ? left : 4;
        uint32_t word = 0;
        memcpy(&word, at, here);
        sums[0] += word;
        sums[1] += sums[0]; /* every word so far counts once more */
        at += here;
        left -= here;
    }
}
