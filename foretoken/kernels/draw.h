// A token by inverse CDF; and uniform numbers from a counter: Philox4x32-10 (Salmon et al. 2011, "Parallel random
// numbers: as easy as 1, 2, 3").

#ifndef FORETOKEN_DRAW_H
#define FORETOKEN_DRAW_H

#include <algorithm>
#include <cstdint>

namespace {

constexpr int64_t SUMMED_DRAW = 512;  // weights whose sum is kept while the place of a draw is looked for

// Sums that `draw_row` needs room for.
inline int64_t sums_of_draw(int64_t size) { return (size + SUMMED_DRAW - 1) / SUMMED_DRAW + 1; }

inline double sum_of_some(const float* weights, int64_t size) {
    double sums[8] = {};
    int64_t i = 0;
    for (; i + 8 <= size; i += 8)
        for (int k = 0; k < 8; ++k) sums[k] += double(weights[i + k]);
    for (; i < size; ++i) sums[0] += double(weights[i]);
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// The last token with weight before `stop`, 0 where there is none.
inline int64_t last_usable(const float* weights, int64_t stop) {
    while (stop > 1 && !(weights[stop - 1] > 0)) --stop;
    return stop - 1;
}

// The first token at which the sum of the weights exceeds the share `u` of all; `sums` gets those before each block.
inline int64_t draw_row(const float* weights, int64_t size, double u, double* sums) {
    int64_t blocks = 0;
    sums[0] = 0;
    for (int64_t first = 0; first < size; first += SUMMED_DRAW, ++blocks)
        sums[blocks + 1] = sums[blocks] + sum_of_some(weights + first, std::min(SUMMED_DRAW, size - first));
    const double point = u * sums[blocks];
    int64_t block = 0;
    while (block < blocks && !(sums[block + 1] > point)) ++block;
    if (block == blocks) return last_usable(weights, size);  // the product was rounded up to all
    const int64_t first = block * SUMMED_DRAW, stop = std::min(first + SUMMED_DRAW, size);
    double reached = sums[block];
    for (int64_t i = first; i < stop; ++i) {
        reached += double(weights[i]);
        if (reached > point && weights[i] > 0) return i;
    }
    return last_usable(weights, stop);  // one by one the block's weights made less than together
}

struct Counter {
    uint64_t index, start, purpose;  // 32 bits of each count
};

// A number in [0, 1) of 53 bits; `text/randomness.py` has the same in numpy.
inline double uniform_of(uint64_t seed, const Counter& counter) {
    uint32_t word[4] = {uint32_t(counter.index), uint32_t(counter.start), uint32_t(counter.purpose), 0};
    uint32_t key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
    for (int round = 0; round < 10; ++round) {
        const uint64_t first = uint64_t(word[0]) * 0xD2511F53u, second = uint64_t(word[2]) * 0xCD9E8D57u;
        const uint32_t next[4] = {uint32_t(second >> 32) ^ word[1] ^ key[0], uint32_t(second),
                                  uint32_t(first >> 32) ^ word[3] ^ key[1], uint32_t(first)};
        for (int i = 0; i < 4; ++i) word[i] = next[i];
        key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u;
    }
    return double(uint64_t(word[0] >> 5) << 26 | uint64_t(word[1] >> 6)) * 0x1p-53;
}

}  // namespace

#endif
