// Rows of a tile against 16 outputs, with AVX2: products of two inputs are added in 16 bits as long as they fit there.

#ifndef FORETOKEN_BLOCK_AVX2_H
#define FORETOKEN_BLOCK_AVX2_H

#include <immintrin.h>

#include <algorithm>

#include "grouped.h"

namespace {

constexpr int HALF_LINE = LINE / 2;  // bytes: a chunk of the 8 outputs of a register
constexpr int MAX_ROWS = 8;          // rows of a tile, for which codes are loaded once
constexpr int MAX_COUNT = 4;         // rows whose sums stay in registers

// Chunks whose products of two inputs, at most 2 * 127 times the largest code, add up to a number of 16 bits. Codes of
// 8 bits are multiplied as two of 4.
template <int BITS>
constexpr int CHUNKS_IN_16 = 32767 / (254 * ((1 << (BITS == 8 ? 4 : BITS)) - 1));

inline int32_t sums_begin_with(const Matrix&) { return 0; }

inline __m256i bytes_at(const void* at) { return _mm256_loadu_si256(static_cast<const __m256i*>(at)); }

inline __m256i low_nibbles(__m256i bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }

// The codes of chunk C of a group for 8 outputs, `codes` theirs. Below 8 bits, the first half of the chunks lies in low
// nibbles, the second in high ones; one more line holds the bits above those, of chunk C from bit (BITS - 4) * C on.
template <int BITS, int GROUP, int C>
FORETOKEN_INLINE __m256i codes_of(const uint8_t* codes) {
    constexpr int LINES = GROUP / CHUNK / 2;
    __m256i nibbles = bytes_at(codes + LINE * (C % LINES));
    if constexpr (C >= LINES) nibbles = _mm256_srli_epi16(nibbles, 4);
    nibbles = low_nibbles(nibbles);
    if constexpr (BITS == 4) {
        return nibbles;
    } else {
        constexpr int SHIFT = (BITS - 4) * C - 4;
        __m256i above = bytes_at(codes + LINE * LINES);
        if constexpr (SHIFT > 0) above = _mm256_srli_epi16(above, SHIFT);
        if constexpr (SHIFT < 0) above = _mm256_slli_epi16(above, -SHIFT);
        return _mm256_or_si256(nibbles, _mm256_and_si256(above, _mm256_set1_epi8(BITS == 5 ? 16 : 48)));
    }
}

inline __m256i inputs_at(const int8_t* inputs) {
    int32_t four;
    std::memcpy(&four, inputs, sizeof four);
    return _mm256_set1_epi32(four);
}

// Adds products of 8 outputs with four inputs in 16 bits, here and now: the compiler would rather keep the products of a
// whole group in memory and add them afterwards.
FORETOKEN_INLINE void add_products(__m256i& sums, __m256i codes, __m256i x) {
    sums = _mm256_add_epi16(sums, _mm256_maddubs_epi16(codes, x));
    asm("" : "+x"(sums));
}

// Adds the products of chunks C to STOP to `sums`, two numbers of 16 bits an output.
template <int COUNT, int BITS, int GROUP, int C, int STOP>
FORETOKEN_INLINE void add_narrow(__m256i (*sums)[2], const uint8_t* codes, const int8_t* inputs, const Ahead* ahead) {
    if constexpr (C < STOP) {
        if (ahead != nullptr) fetch_beside(C, GROUP / CHUNK, codes, GROUP * BITS / 32, *ahead);
        const __m256i low = codes_of<BITS, GROUP, C>(codes), high = codes_of<BITS, GROUP, C>(codes + HALF_LINE);
        for (int r = 0; r < COUNT; ++r) {
            const __m256i x = inputs_at(inputs + r * SPAN + CHUNK * C);
            add_products(sums[r][0], low, x);
            add_products(sums[r][1], high, x);
        }
        add_narrow<COUNT, BITS, GROUP, C + 1, STOP>(sums, codes, inputs, ahead);
    }
}

// `to` plus both numbers of 16 bits of each output, `times` as often.
inline __m256i plus_pairs(__m256i to, __m256i sums, int16_t times = 1) {
    return _mm256_add_epi32(to, _mm256_madd_epi16(sums, _mm256_set1_epi16(times)));
}

// Adds the products of a group, from chunk C on, to `dots`, for `COUNT` rows and 16 outputs. Fetches unless `ahead` is
// null.
template <int COUNT, int BITS, int GROUP, int C = 0>
FORETOKEN_INLINE void add_chunks(__m256i (*dots)[2], const uint8_t* codes, const int8_t* inputs, const Ahead* ahead) {
    if constexpr (BITS == 8) {
        for (int half = 0; half < 2; ++half) {
            __m256i low[COUNT] = {}, high[COUNT] = {};  // sums of the products with both nibbles
            for (int c = 0; c < GROUP / CHUNK; ++c) {
                if (ahead != nullptr && half == 0) fetch_beside(c, GROUP / CHUNK, codes, GROUP * BITS / 32, *ahead);
                const __m256i code = bytes_at(codes + LINE * c + HALF_LINE * half);
                const __m256i lower = low_nibbles(code), upper = low_nibbles(_mm256_srli_epi16(code, 4));
                for (int r = 0; r < COUNT; ++r) {
                    const __m256i x = inputs_at(inputs + r * SPAN + CHUNK * c);
                    add_products(low[r], lower, x);
                    add_products(high[r], upper, x);
                }
            }
            for (int r = 0; r < COUNT; ++r) dots[r][half] = plus_pairs(plus_pairs(dots[r][half], low[r]), high[r], 16);
        }
    } else if constexpr (C < GROUP / CHUNK) {
        constexpr int STOP = std::min(C + CHUNKS_IN_16<BITS>, GROUP / CHUNK);
        __m256i sums[COUNT][2] = {};
        add_narrow<COUNT, BITS, GROUP, C, STOP>(sums, codes, inputs, ahead);
        for (int r = 0; r < COUNT; ++r)
            for (int half = 0; half < 2; ++half) dots[r][half] = plus_pairs(dots[r][half], sums[r][half]);
        add_chunks<COUNT, BITS, GROUP, STOP>(dots, codes, inputs, ahead);
    }
}

// ---- scales and minimums of 8 outputs

inline __m256 halves_at(const uint16_t* at) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}

inline __m256 wholes_at(const void* from, int64_t index) {
    const auto* at = reinterpret_cast<const __m128i*>(static_cast<const int8_t*>(from) + index);
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(at)));
}

// Those at `index`, which are multiplied by those at `super` if they are whole numbers.
inline __m256 numbers_at(const void* from, const uint16_t* supers, int32_t form, int64_t index, int64_t super) {
    if (form == FLOAT) return _mm256_loadu_ps(static_cast<const float*>(from) + index);
    if (form == WHOLE) return _mm256_mul_ps(halves_at(supers + super), wholes_at(from, index));
    return halves_at(static_cast<const uint16_t*>(from) + index);
}

inline __m256 minimums_at(const Matrix& w, __m256 scale, int64_t index, int64_t super) {
    if (w.form == MULTIPLE) return _mm256_mul_ps(scale, wholes_at(w.minimums, index));
    return numbers_at(w.minimums, w.super_minimums, w.form, index, super);
}

struct Numbers {
    __m256 scale[2], minimum[2];
};

// Of the 16 outputs of group `place / 16` of all blocks.
FORETOKEN_INLINE Numbers numbers_of(const Matrix& w, int64_t place, int64_t super) {
    Numbers found;  // to set all of it to zero first takes GCC's `rep stos`, half of the time of a group
    for (int half = 0; half < 2; ++half) {
        const int64_t at = place + LANES / 2 * half, super_at = super + LANES / 2 * half;
        found.scale[half] = numbers_at(w.scales, w.super_scales, w.form, at, super_at);
        found.minimum[half] =
            w.minimums == nullptr ? _mm256_setzero_ps() : minimums_at(w, found.scale[half], at, super_at);
    }
    return found;
}

// Adds group `g` to the totals of the rows `FIRST` to `FIRST + COUNT` of a tile of `ROWS`.
template <int ROWS, int FIRST, int COUNT, int BITS, int GROUP>
FORETOKEN_INLINE void add_group(const uint8_t* codes, const Numbers& numbers, bool has_minimum, const Tile& x, int64_t g,
                                const Ahead& ahead, __m256 (*totals)[2]) {
    constexpr int GROUPS = SPAN / GROUP;
    const int64_t span = g / GROUPS, row = span * ROWS + FIRST, group_row = g * ROWS + FIRST;
    __m256i dots[COUNT][2];
    for (int r = 0; r < COUNT; ++r) dots[r][0] = dots[r][1] = _mm256_set1_epi32(x.offsets[group_row + r]);
    add_chunks<COUNT, BITS, GROUP>(dots, codes, x.codes + row * SPAN + g % GROUPS * GROUP, FIRST == 0 ? &ahead : nullptr);
    for (int r = 0; r < COUNT; ++r) {
        const __m256 x_scale = _mm256_set1_ps(x.scales[row + r]), sum = _mm256_set1_ps(x.sums[group_row + r]);
        for (int half = 0; half < 2; ++half) {
            __m256& total = totals[FIRST + r][half];
            __m256 part = _mm256_mul_ps(numbers.scale[half], _mm256_cvtepi32_ps(dots[r][half]));
            if (has_minimum) part = _mm256_add_ps(part, _mm256_mul_ps(numbers.minimum[half], sum));
            total = _mm256_add_ps(total, _mm256_mul_ps(part, x_scale));
        }
    }
}

template <int ROWS, int BITS, int GROUP>
void multiply_block(const Matrix& w, const Tile& x, int64_t block, const Ahead& ahead, float (*out)[LANES]) {
    constexpr int GROUPS = SPAN / GROUP, LINES = GROUP * BITS / 32;
    constexpr int COUNT = ROWS > MAX_COUNT ? (ROWS + 1) / 2 : ROWS;
    const int64_t groups = x.spans * GROUPS, supers = (x.spans * SPAN + SUPER - 1) / SUPER;
    const uint8_t* codes = w.codes + block * groups * LINES * LINE;
    const bool has_minimum = w.minimums != nullptr;
    __m256 totals[ROWS][2];  // not in `out`, which the compiler would have to write for every group
    for (auto& total : totals) total[0] = total[1] = _mm256_setzero_ps();
    for (int64_t g = 0; g < groups; ++g, codes += LINES * LINE) {
        const int64_t place = (block * groups + g) * LANES, super = (block * supers + g * GROUP / SUPER) * LANES;
        fetch_numbers(w, place, ahead);
        const Numbers numbers = numbers_of(w, place, super);
        add_group<ROWS, 0, COUNT, BITS, GROUP>(codes, numbers, has_minimum, x, g, ahead, totals);
        if constexpr (COUNT < ROWS)
            add_group<ROWS, COUNT, ROWS - COUNT, BITS, GROUP>(codes, numbers, has_minimum, x, g, ahead, totals);
    }
    for (int r = 0; r < ROWS; ++r)
        for (int half = 0; half < 2; ++half) _mm256_storeu_ps(out[r] + LANES / 2 * half, totals[r][half]);
}

}  // namespace

#endif
