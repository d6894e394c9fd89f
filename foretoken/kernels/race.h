// Sampling by exponential race with noise that is a function of a key, a position and the token.
//
// The noise of token i is -log of the i-th word of numpy's Philox4x64 stream (Salmon et al. 2011, "Parallel random
// numbers: as easy as 1, 2, 3"). Its words can be computed one by one, so tokens of weight zero need none; and because
// -log(u) >= 1 - u, most of the others are seen to lose without a logarithm.

#ifndef FORETOKEN_RACE_H
#define FORETOKEN_RACE_H

#include <cfloat>
#include <cmath>
#include <vector>

#include "numbers.h"

namespace {

struct RaceKey {
    uint64_t first, second, position;
};

// The largest ratio of weight and noise so far, of the lowest id among equals; NaN counts as largest.
struct Leader {
    float ratio = 0.0f;
    int64_t id = 0;

    void meet(float other, int64_t other_id) {
        const bool wins = other != other ? ratio == ratio || other_id < id
                                         : other > ratio || (other == ratio && other > 0 && other_id < id);
        if (wins) *this = {other, other_id};
    }
};

constexpr int64_t PIECE = 1 << 13;        // tokens of a race that one thread looks at
constexpr int WORDS = 4, BLOCKS = 8;      // words of a Philox block, blocks that are computed together
constexpr int RACERS = WORDS * BLOCKS;    // tokens that join a race together
constexpr uint64_t MULTIPLIERS[2] = {0xD2E7470EE14C6C93u, 0xCA5A826395121157u};
constexpr uint64_t KEY_STEPS[2] = {0x9E3779B97F4A7C15u, 0xBB67AE8584CAA73Bu};

#ifdef __AVX512DQ__

typedef uint64_t Blocks __attribute__((vector_size(64)));

// The low and the high half of the products with a constant; 32 x 32 bits at a time for the high one.
inline Blocks multiplied(Blocks a, uint64_t by, Blocks* high) {
    const __m512i own = reinterpret_cast<__m512i>(a), upper = _mm512_srli_epi64(own, 32);
    const __m512i low_by = _mm512_set1_epi64(int64_t(by)), high_by = _mm512_set1_epi64(int64_t(by >> 32));
    const auto times = [](__m512i x, __m512i y) { return Blocks(_mm512_mul_epu32(x, y)); };
    const Blocks first = times(own, high_by) + (times(own, low_by) >> 32);
    const Blocks second = times(upper, low_by) + (first & 0xffffffffu);
    *high = times(upper, high_by) + (first >> 32) + (second >> 32);
    return Blocks(_mm512_mullo_epi64(own, low_by));
}

inline Blocks numbered(uint64_t first) { return Blocks{0, 1, 2, 3, 4, 5, 6, 7} + first; }

#else

struct Blocks {
    uint64_t of[BLOCKS];
};

inline Blocks operator^(Blocks a, const Blocks& b) {
    for (int k = 0; k < BLOCKS; ++k) a.of[k] ^= b.of[k];
    return a;
}

inline Blocks operator^(Blocks a, uint64_t b) {
    for (uint64_t& own : a.of) own ^= b;
    return a;
}

inline Blocks operator+(Blocks a, uint64_t b) {
    for (uint64_t& own : a.of) own += b;
    return a;
}

inline Blocks multiplied(Blocks a, uint64_t by, Blocks* high) {
    for (int k = 0; k < BLOCKS; ++k) {
        const unsigned __int128 product = static_cast<unsigned __int128>(a.of[k]) * by;
        high->of[k] = uint64_t(product >> 64), a.of[k] = uint64_t(product);
    }
    return a;
}

inline Blocks numbered(uint64_t first) { return Blocks{{0, 1, 2, 3, 4, 5, 6, 7}} + first; }

#endif

// Philox4x64-10 of the counters (block, 0, position, 0) from `block` on: word j of block k is words[j * BLOCKS + k].
inline void philox(const RaceKey& key, uint64_t block, uint64_t* words) {
    Blocks c0 = numbered(block), c1 = {}, c2 = Blocks{} + key.position, c3 = {};
    uint64_t k0 = key.first, k1 = key.second;
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
        Blocks high0, high2;
        const Blocks low0 = multiplied(c0, MULTIPLIERS[0], &high0), low2 = multiplied(c2, MULTIPLIERS[1], &high2);
        c0 = high2 ^ c1 ^ k0, c1 = low2, c2 = high0 ^ c3 ^ k1, c3 = low0;
        k0 += KEY_STEPS[0], k1 += KEY_STEPS[1];
    }
    const Blocks of_words[WORDS] = {c0, c1, c2, c3};
    std::memcpy(words, of_words, sizeof of_words);
}

// The weights of 32 tokens in the order of `philox`'s words.
inline void by_word(const float* weights, float* out) {
#ifdef __AVX512DQ__
    const __m512 first = _mm512_loadu_ps(weights), second = _mm512_loadu_ps(weights + LANES);
    __m512i places = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    _mm512_storeu_ps(out, _mm512_permutex2var_ps(first, places, second));
    places = _mm512_add_epi32(places, _mm512_set1_epi32(2));
    _mm512_storeu_ps(out + LANES, _mm512_permutex2var_ps(first, places, second));
#else
    for (int k = 0; k < RACERS; ++k) out[k] = weights[k % BLOCKS * WORDS + k / BLOCKS];
#endif
}

// weight / noise, rounded as in `text/randomness.py` and `verify/base.py`.
inline float race_ratio(float weight, uint64_t word) {
    const double middle = (double(word >> 11) + 0.5) * 0x1p-53;
    return weight / std::max(-float(std::log(middle)), FLT_MIN);
}

// The 32 tokens from `first` on join the race.
inline void join(const float* weights, int64_t first, const RaceKey& key, Leader* leader) {
    uint64_t words[RACERS];
    float own[RACERS], gaps[RACERS];  // gaps: at most (1 - u) * 2^31
    philox(key, uint64_t(first / WORDS + 1), words);  // numpy counts before it computes: its first block is 1
    by_word(weights, own);
    for (int k = 0; k < RACERS; ++k) gaps[k] = float(int32_t(0x7fffffff - (words[k] >> 33)));
    // A ratio is at most weight / (1 - u); the margin covers everything that is rounded here.
    const float bound = leader->ratio * (0x1p-31f * (1.0f - 0x1p-18f));
    for (int half = 0; half < RACERS; half += LANES) {
        uint32_t left = 0xffff & ~lanes_set(load(own + half) < bound * load(gaps + half));
        for (; left; left &= left - 1) {
            const int k = half + __builtin_ctz(left);
            if (own[k] != 0) leader->meet(race_ratio(own[k], words[k]), first + k % BLOCKS * WORDS + k / BLOCKS);
        }
    }
}

// The leader among the tokens from `first` to `last`; `first` is a multiple of 4.
inline Leader race_piece(const float* weights, int64_t first, int64_t last, const RaceKey& key) {
    Leader leader;
    int64_t i = first;
    for (; i + RACERS <= last; i += RACERS)
        if (lanes_set((load(weights + i) != 0.0f) | (load(weights + i + LANES) != 0.0f)))
            join(weights + i, i, key, &leader);
    if (i < last) {
        float rest[RACERS] = {};
        std::copy_n(weights + i, last - i, rest);
        join(rest, i, key, &leader);
    }
    return leader;
}

// The leader of the `count` pieces of one race from `first` on.
inline Leader best_of(const std::vector<Leader>& pieces, int64_t first, int64_t count) {
    Leader best;
    for (int64_t i = first; i < first + count; ++i) best.meet(pieces[i].ratio, pieces[i].id);
    return best;
}

}  // namespace

#endif
