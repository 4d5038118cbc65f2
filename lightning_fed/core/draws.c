/* Orders of samples: the stable argsort of Philox4x64-10 words. Integers only, so that every machine gives the same
   orders as the NumPy code in draws.py, which a test compares. Compiled at first use (compiler.py), which defines EXPORT. */

#include <stdint.h>
#include <string.h>

/* Four words for a counter and a key (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). */
static void philox(const uint64_t counter[4], const uint64_t key[2], uint64_t out[4]) {
    uint64_t a = counter[0], b = counter[1], c = counter[2], d = counter[3], k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        unsigned __int128 first = (unsigned __int128)0xD2E7470EE14C6C93u * a;
        unsigned __int128 second = (unsigned __int128)0xCA5A826395121157u * c;
        a = (uint64_t)(second >> 64) ^ b ^ k0;
        b = (uint64_t)second;
        c = (uint64_t)(first >> 64) ^ d ^ k1;
        d = (uint64_t)first;
        k0 += 0x9E3779B97F4A7C15u;
        k1 += 0xBB67AE8584CAA73Bu;
    }
    out[0] = a, out[1] = b, out[2] = c, out[3] = d;
}

/* The stable argsort of n words. They are uniform, so n buckets by their leading bits hold about one word each; an
   insertion sort puts the few words of a bucket in order. `start` has room for n + 1 numbers, `sorted` for n. */
static void argsort(const uint64_t *words, int64_t n, int64_t *order, uint64_t *sorted, int64_t *start) {
    memset(start, 0, (size_t)(n + 1) * sizeof *start);
    for (int64_t i = 0; i < n; i++)
        start[(int64_t)(((unsigned __int128)words[i] * (uint64_t)n) >> 64) + 1]++;
    for (int64_t i = 0; i < n; i++)
        start[i + 1] += start[i];
    for (int64_t i = 0; i < n; i++) {
        int64_t at = start[(int64_t)(((unsigned __int128)words[i] * (uint64_t)n) >> 64)]++;
        sorted[at] = words[i], order[at] = i;
    }
    for (int64_t i = 1; i < n; i++) {
        uint64_t word = sorted[i];
        int64_t index = order[i], j = i;
        for (; j > 0 && sorted[j - 1] > word; j--)
            sorted[j] = sorted[j - 1], order[j] = order[j - 1];
        sorted[j] = word, order[j] = index;
    }
}

/* Orders of the first epochs of m clients, one after another in `orders`. `room` has space for 3 n + 5 numbers, where n
   is the largest number of samples. */
EXPORT void epoch_orders(const uint64_t *keys, uint64_t round, const int64_t *samples, const int64_t *epochs, int64_t m,
                         int64_t *orders, uint64_t *room) {
    for (int64_t client = 0; client < m; client++) {
        int64_t n = samples[client];
        uint64_t *words = room, *sorted = room + (n + 3) / 4 * 4;
        for (int64_t epoch = 0; epoch < epochs[client]; epoch++, orders += n) {
            for (int64_t block = 0; 4 * block < n; block++) {
                uint64_t counter[4] = {(uint64_t)block, (uint64_t)epoch, round, 0};
                philox(counter, keys + 2 * client, words + 4 * block);
            }
            argsort(words, n, orders, sorted, (int64_t *)sorted + n);
        }
    }
}
