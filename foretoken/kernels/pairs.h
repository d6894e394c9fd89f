// Products of two bfloat16 at a time with two others, 16 sums side by side: in one instruction where the processor has
// it, else widened, first the lower one.

#ifndef FORETOKEN_PAIRS_H
#define FORETOKEN_PAIRS_H

#include "numbers.h"

#if defined(__AVX512BF16__) && defined(__AVX512F__)
#define FORETOKEN_BF16 1
#include <immintrin.h>
#endif

namespace {

// 16 pairs, as `line_at` reads them from 64 bytes; `add_products` adds the products of each with one pair, which
// `pair_of` makes of the lower number and the upper one.
#ifdef FORETOKEN_BF16
using Line = __m512bh;
using Pair = uint32_t;
inline Line line_at(const void* at) { return (Line)_mm512_loadu_si512(at); }
inline Pair pair_of(uint16_t first, uint16_t second) { return first | uint32_t(second) << 16; }
inline void add_products(Lanes& sum, const Line& line, Pair pair) {
    sum = Lanes(_mm512_dpbf16_ps(__m512(sum), line, (__m512bh)_mm512_set1_epi32(int32_t(pair))));
}
#else
struct Line {
    Lanes first, second;
};
struct Pair {
    float first, second;
};
FORETOKEN_INLINE Line line_at(const void* at) {
    const Words words = vector_at<Words>(at);
    return {Lanes(words << 16), Lanes(words & int32_t(0xffff0000u))};
}
inline Pair pair_of(uint16_t first, uint16_t second) { return {number(first), number(second)}; }
FORETOKEN_INLINE void add_products(Lanes& sum, const Line& line, const Pair& pair) {
    sum = plus_product(sum, line.first, all(pair.first));  // exact before it is added: fused or not, the bits are the same
    sum = plus_product(sum, line.second, all(pair.second));
}
FORETOKEN_INLINE void add_products(Lanes& sum, const Line& line, uint32_t pair) {
    add_products(sum, line, pair_of(uint16_t(pair), uint16_t(pair >> 16)));
}
#endif

}  // namespace

#endif
