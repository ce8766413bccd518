/* What the stand-in engine says: token i of the answer to a prompt is a function of both, so that the load
   generator can tell every byte of an answer, wherever and by however many engines it was made. */
#ifndef WORDS_H
#define WORDS_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define WORD 7 /* bytes of a token's text, such as " w04711" */

static uint32_t token_of(uint32_t key, uint32_t i)
{
    uint64_t x = ((uint64_t)key << 32 | i) * 0x9E3779B97F4A7C15ull;
    x ^= x >> 29;
    return (uint32_t)(x * 0xBF58476D1CE4E5B9ull >> 40) % 100000;
}

static void spell(uint32_t token, char *out)
{
    out[0] = ' ', out[1] = 'w';
    for (int at = WORD - 1; at > 1; at--, token /= 10)
        out[at] = (char)('0' + token % 10);
}

/* Seconds of the clock that Python's time.monotonic() reads, so that times of several processes compare. */
static double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

#endif
