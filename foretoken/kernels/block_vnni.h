// Rows of a tile against 16 outputs, with AVX-512 VNNI.

#ifndef FORETOKEN_BLOCK_VNNI_H
#define FORETOKEN_BLOCK_VNNI_H

#include <immintrin.h>

#include "grouped.h"

namespace {

// Rows of a tile, for which codes are loaded once: 32 registers hold the totals and the sums of 12, and what they share.
constexpr int MAX_ROWS = 12;

FORETOKEN_INLINE __m512 halves_at(const uint16_t* at) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
}

// A float's bits are added up like whole numbers as long as its exponent stays: the bits of SHIFTED plus a sum n are
// those of SHIFTED + n. Then scale * (SHIFTED + n) - scale * SHIFTED is scale * n, rounded once, in one instruction,
// where scale * SHIFTED is exact: scales of 11 or 18 bits. They are finite, see `GroupedWeight.of`.
constexpr float SHIFTED = NEAREST;  // sums are below 2^21
constexpr int32_t SHIFTED_BITS = NEAREST_BITS;

inline int32_t sums_begin_with(const Matrix& w) { return w.form == FLOAT ? 0 : SHIFTED_BITS; }

FORETOKEN_INLINE __m512 wholes_at(const void* from, int64_t index) {
    const auto* at = reinterpret_cast<const __m128i*>(static_cast<const int8_t*>(from) + index);
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at)));
}

// 16 scales or minimums: those at `index`, which are multiplied by those at `super` if they are whole numbers.
FORETOKEN_INLINE __m512 numbers_at(const void* from, const uint16_t* supers, int32_t form, int64_t index, int64_t super) {
    if (form == FLOAT) return _mm512_loadu_ps(static_cast<const float*>(from) + index);
    if (form == WHOLE) return _mm512_mul_ps(halves_at(supers + super), wholes_at(from, index));
    return halves_at(static_cast<const uint16_t*>(from) + index);
}

FORETOKEN_INLINE __m512 minimums_at(const Matrix& w, __m512 scale, int64_t index, int64_t super) {
    if (w.form == MULTIPLE) return _mm512_mul_ps(scale, wholes_at(w.minimums, index));
    return numbers_at(w.minimums, w.super_minimums, w.form, index, super);
}

// The codes of chunk C of a group. Below 8 bits, the first half of the chunks lies in low nibbles, the second in high
// ones; one more line holds the bits above those, of chunk C from bit (BITS - 4) * C on.
template <int BITS, int GROUP, int C>
FORETOKEN_INLINE __m512i codes_of(const uint8_t* codes) {
    if constexpr (BITS == 8) {
        return _mm512_loadu_si512(codes + LINE * C);
    } else {
        constexpr int LINES = GROUP / CHUNK / 2;
        __m512i nibbles = _mm512_loadu_si512(codes + LINE * (C % LINES));
        if constexpr (C >= LINES) nibbles = _mm512_srli_epi16(nibbles, 4);
        nibbles = _mm512_and_si512(nibbles, _mm512_set1_epi8(15));
        if constexpr (BITS == 4) {
            return nibbles;
        } else {
            constexpr int SHIFT = (BITS - 4) * C - 4;
            __m512i above = _mm512_loadu_si512(codes + LINE * LINES);
            if constexpr (SHIFT > 0) above = _mm512_srli_epi16(above, SHIFT);
            if constexpr (SHIFT < 0) above = _mm512_slli_epi16(above, -SHIFT);
            const __m512i mask = _mm512_set1_epi8(BITS == 5 ? 16 : 48);
            return _mm512_ternarylogic_epi64(nibbles, above, mask, 0xf8);  // a | (b & c)
        }
    }
}

// What the rows of a tile bring to a group. Pointers that walk from group to group: with an index, GCC 12 computes the
// address of every row, and keeps these in mask registers, each of which then costs as much as a product.
template <int ROWS, int GROUP>
struct Inputs {
    const int8_t* codes;
    const float* scales;
    const int32_t* offsets;
    const float* sums;

    explicit Inputs(const Tile& x) : codes(x.codes), scales(x.scales), offsets(x.offsets), sums(x.sums) {}

    void leave(int64_t group) {
        const bool ends_span = GROUP == SPAN || group % 2 == 1;
        codes += ends_span ? ROWS * SPAN - (SPAN - GROUP) : GROUP;
        scales += ends_span ? ROWS : 0;
        offsets += ROWS, sums += ROWS;
    }
};

template <int ROWS, int BITS, int GROUP, int C = 0>
FORETOKEN_INLINE void add_chunks(__m512i* dots, const uint8_t* codes, const int8_t* inputs, const Ahead& ahead) {
    if constexpr (C < GROUP / CHUNK) {
        fetch_beside(C, GROUP / CHUNK, codes, GROUP * BITS / 32, ahead);
        const __m512i code = codes_of<BITS, GROUP, C>(codes);
        for (int r = 0; r < ROWS; ++r) {
            int32_t four;
            std::memcpy(&four, inputs + r * SPAN + CHUNK * C, sizeof four);
            dots[r] = _mm512_dpbusd_epi32(dots[r], code, _mm512_set1_epi32(four));
        }
        add_chunks<ROWS, BITS, GROUP, C + 1>(dots, codes, inputs, ahead);
    }
}

template <int ROWS, int BITS, int GROUP>
void multiply_block(const Matrix& w, const Tile& tile, int64_t block, const Ahead& ahead, float (*out)[LANES]) {
    constexpr int GROUPS = SPAN / GROUP, LINES = GROUP * BITS / 32;
    const int64_t groups = tile.spans * GROUPS, supers = (tile.spans * SPAN + SUPER - 1) / SUPER;
    const uint8_t* codes = w.codes + block * groups * LINES * LINE;
    Inputs<ROWS, GROUP> x(tile);
    __m512 total[ROWS];
    for (int r = 0; r < ROWS; ++r) total[r] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; x.leave(g), ++g, codes += LINES * LINE) {
        const int64_t place = (block * groups + g) * LANES;
        const int64_t super = (block * supers + g * GROUP / SUPER) * LANES;
        fetch_numbers(w, place, ahead);
        __m512i dots[ROWS];
        for (int r = 0; r < ROWS; ++r) dots[r] = _mm512_set1_epi32(x.offsets[r]);
        add_chunks<ROWS, BITS, GROUP>(dots, codes, x.codes, ahead);
        const __m512 scale = numbers_at(w.scales, w.super_scales, w.form, place, super);
        const auto add_group = [&](auto part_of) {
            if (w.minimums == nullptr) {
                for (int r = 0; r < ROWS; ++r) {
                    const __m512 x_scale = _mm512_set1_ps(x.scales[r]);
                    total[r] = _mm512_add_ps(total[r], _mm512_mul_ps(part_of(dots[r]), x_scale));
                }
            } else {
                const __m512 minimum = minimums_at(w, scale, place, super);
                for (int r = 0; r < ROWS; ++r) {
                    const __m512 x_scale = _mm512_set1_ps(x.scales[r]);
                    const __m512 lower = _mm512_mul_ps(minimum, _mm512_set1_ps(x.sums[r]));
                    total[r] = _mm512_add_ps(total[r], _mm512_mul_ps(_mm512_add_ps(part_of(dots[r]), lower), x_scale));
                }
            }
        };
        if (w.form == FLOAT) {
            add_group([&](__m512i dot) { return _mm512_mul_ps(scale, _mm512_cvtepi32_ps(dot)); });
        } else {
            const __m512 shift = _mm512_mul_ps(scale, _mm512_set1_ps(-SHIFTED));
            add_group([&](__m512i dot) { return _mm512_fmadd_ps(scale, _mm512_castsi512_ps(dot), shift); });
        }
    }
    for (int r = 0; r < ROWS; ++r) _mm512_storeu_ps(out[r], total[r]);
}

}  // namespace

#endif
