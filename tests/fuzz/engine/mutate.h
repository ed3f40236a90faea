/*
 * The mutator of every target that no library drives: engine/driver.c calls it for
 * targets in C, engine/python.py for those in Python.  The same seed and the same
 * inputs give the same mutations on every machine.
 */
#ifndef MUTATE_H
#define MUTATE_H

#include <stddef.h>
#include <stdint.h>

/* 64 random bits; *state is any number to begin with. */
uint64_t fuzz_random(uint64_t *state);

/*
 * Changes `bytes` bytes of data, which has room for `room`, in one to eight small steps, or now and then altogether,
 * and returns their new number, at least 1.  `other` is another input, a piece of which may be taken over; other_bytes may be 0.
 */
size_t fuzz_mutate(uint64_t *state, uint8_t *data, size_t bytes, size_t room, const uint8_t *other, size_t other_bytes);

#endif
