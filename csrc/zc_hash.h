/*
 * Hashes by which ranks compare what they do: nobody keeps one, and nobody is
 * protected by one.
 */
#ifndef ZC_HASH_H
#define ZC_HASH_H

#include <stddef.h>
#include <stdint.h>

#define ZC_HASH_START 0xcbf29ce484222325ull

/* 64-bit FNV-1a, chained: begins with ZC_HASH_START. */
static inline uint64_t zc_hash(uint64_t hash, const void *data, size_t bytes)
{
    const unsigned char *byte = data;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ byte[i]) * 0x100000001b3ull;
    return hash;
}

/* One more entry of a list that is known by this number; 0 is the empty one. The same in another order gives another number. */
static inline uint64_t zc_hash_next(uint64_t chain, uint64_t entry)
{
    uint64_t z = chain * 0x9e3779b97f4a7c15ull + entry + 1;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

#endif
