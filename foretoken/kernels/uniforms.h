// Uniform numbers from a counter: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

#ifndef FORETOKEN_UNIFORMS_H
#define FORETOKEN_UNIFORMS_H

#include <cstdint>

namespace {

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
