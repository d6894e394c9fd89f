// Numbers in 16 lanes: bfloat16 and float16 are widened to float32 where they are read and rounded where they are written.

#ifndef FORETOKEN_NUMBERS_H
#define FORETOKEN_NUMBERS_H

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "lanes.h"

#if defined(__AVX2__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

typedef float Four __attribute__((vector_size(16)));

inline float of_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline uint16_t bf16_of(float value) {  // ties to even
    const uint32_t bits = bits_of(value);
    return value != value ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

struct Half {  // float16; bfloat16 is uint16_t
    uint16_t bits;
};

// ---- float16, for processors without instructions for it

inline float from_half(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000u) << 16, exponent = (half >> 10) & 31u, fraction = half & 1023u;
    if (exponent == 0) {
        const float small = float(fraction) * 5.9604644775390625e-8f;  // 2^-24
        return sign ? -small : small;
    }
    return of_bits(sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13);
}

inline uint16_t half_of(float value) {  // ties to even; too large becomes infinity
    const uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return uint16_t(sign | 0x7e00u | ((size >> 13) & 0x3ffu));
    if (size >= 0x477ff000u) return uint16_t(sign | 0x7c00u);
    if (size < 0x38800000u)  // the sum with 0.5 keeps as many digits as a subnormal float16 has
        return uint16_t(sign | (bits_of(of_bits(size) + 0.5f) - 0x3f000000u));
    return uint16_t(sign | ((size - 0x38000000u + 0xfffu + ((size >> 13) & 1u)) >> 13));
}

inline float number(float value) { return value; }
inline float number(Half value) { return from_half(value.bits); }
inline float number(uint16_t bf16) { return of_bits(uint32_t(bf16) << 16); }
inline void put(float value, float& to) { to = value; }
inline void put(float value, uint16_t& to) { to = bf16_of(value); }
inline void put(float value, Half& to) { to.bits = half_of(value); }

FORETOKEN_INLINE Lanes all(float value) { return value - Lanes{}; }

// `sum + a * b`, rounded once where the processor multiplies and adds in one instruction.
FORETOKEN_INLINE Lanes plus_product(const Lanes& sum, const Lanes& a, const Lanes& b) {
#if defined(__AVX512F__)
    return Lanes(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(sum)));
#elif defined(__FMA__)
    Lanes made;
    for (int p = 0; p < PARTS; ++p) made.parts[p] = _mm256_fmadd_ps(a.parts[p], b.parts[p], sum.parts[p]);
    return made;
#else
    return sum + a * b;
#endif
}

FORETOKEN_INLINE Lanes load(const float* from) { return vector_at<Lanes>(from); }

FORETOKEN_INLINE Words widened(const uint16_t* from) {
#if defined(__AVX512F__)
    typedef uint16_t Halves __attribute__((vector_size(32)));
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    return __builtin_convertvector(halves, Words);
#elif defined(__AVX2__)  // of a conversion GCC makes four instructions
    Words to;
    for (int p = 0; p < PARTS; ++p)
        to.parts[p] = Words::Part(
            _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + p * PART_LANES))));
    return to;
#else
    Words to;
    for (int p = 0; p < PARTS; ++p) {
        PartOf<uint16_t>::Vector halves;
        std::memcpy(&halves, from + p * PART_LANES, sizeof halves);
        to.parts[p] = __builtin_convertvector(halves, Words::Part);
    }
    return to;
#endif
}

FORETOKEN_INLINE void narrow(const Words& from, uint16_t* to) {
#if defined(__AVX512F__)
    typedef uint16_t Halves __attribute__((vector_size(32)));
    const Halves halves = __builtin_convertvector(from, Halves);
    std::memcpy(to, &halves, sizeof halves);
#else
    for (int p = 0; p < PARTS; ++p) {
        const auto halves = __builtin_convertvector(from.parts[p], PartOf<uint16_t>::Vector);
        std::memcpy(to + p * PART_LANES, &halves, sizeof halves);
    }
#endif
}

// Whole numbers of one byte each.
FORETOKEN_INLINE void narrow(const Words& from, int8_t* to) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(__m512i(from)));
#else
    for (int p = 0; p < PARTS; ++p) {
        const auto bytes = __builtin_convertvector(from.parts[p], PartOf<int8_t>::Vector);
        std::memcpy(to + p * PART_LANES, &bytes, sizeof bytes);
    }
#endif
}

FORETOKEN_INLINE Lanes load(const uint16_t* bf16) { return Lanes(widened(bf16) << 16); }

FORETOKEN_INLINE Lanes load(const Half* halves) {
#if defined(__AVX512F__)
    return Lanes(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves))));
#elif defined(__F16C__)
    Lanes to;
    for (int p = 0; p < PARTS; ++p)
        to.parts[p] = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + p * PART_LANES)));
    return to;
#else
    float all_of[LANES];
    for (int i = 0; i < LANES; ++i) all_of[i] = from_half(halves[i].bits);
    return load(all_of);
#endif
}

FORETOKEN_INLINE void store(const Lanes& from, float* to) { put_vector(from, to); }

FORETOKEN_INLINE void store(Lanes from, uint16_t* bf16) {  // ties to even
    const Words bits = Words(from), rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    narrow(choose(from == from, rounded, Words{} + 0x7fc0), bf16);
}

FORETOKEN_INLINE void store(Lanes from, Half* halves) {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(halves),
                        _mm512_cvtps_ph(__m512(from), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
    for (int p = 0; p < PARTS; ++p)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(halves + p * PART_LANES),
                         _mm256_cvtps_ph(from.parts[p], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
    for (int i = 0; i < LANES; ++i) put(from[i], halves[i]);
#endif
}

// The last `count` numbers of a row, zeros behind them.
template <class T>
inline Lanes load_some(const T* from, int64_t count) {
    T all_of[LANES] = {};
    std::copy_n(from, count, all_of);
    return load(all_of);
}

template <class T>
inline void store_some(Lanes from, T* to, int64_t count) {
    T all_of[LANES];
    store(from, all_of);
    std::copy_n(all_of, count, to);
}

// Calls `whole(i)` for each 16 numbers of `size`, then `some(i, count)` for those that are left over.
template <class Whole, class Some>
inline void by_lanes(int64_t size, Whole whole, Some some) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) whole(i);
    if (i < size) some(i, size - i);
}

// The lanes of a comparison that hold, one bit each.
inline uint32_t lanes_set(Words holds) {
#if defined(__AVX512DQ__)
    return _mm512_movepi32_mask(reinterpret_cast<__m512i>(holds));
#elif defined(__AVX2__)
    uint32_t bits = 0;
    for (int p = 0; p < PARTS; ++p) bits |= uint32_t(_mm256_movemask_ps(__m256(holds.parts[p]))) << (p * PART_LANES);
    return bits;
#else
    uint32_t bits = 0;
    for (int k = 0; k < LANES; ++k) bits |= uint32_t(holds[k] != 0) << k;
    return bits;
#endif
}

// The sum of 16 numbers, in an order that does not change.
inline float sum_of(Lanes lanes) {
    Four fours[4];
    std::memcpy(fours, &lanes, sizeof fours);
    const Four four = (fours[0] + fours[2]) + (fours[1] + fours[3]);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

inline int32_t sum_of(const Words& words) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32(__m512i(words));
#else
    int32_t sum = 0;
    for (int k = 0; k < LANES; ++k) sum += words[k];
    return sum;
#endif
}

inline int32_t max_of(const Words& words) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32(__m512i(words));
#else
    int32_t largest = words[0];
    for (int k = 1; k < LANES; ++k) largest = std::max(largest, words[k]);
    return largest;
#endif
}

// The largest of 16 numbers, none of them NaN.
inline float max_of(Lanes lanes) {
    Four fours[4];
    std::memcpy(fours, &lanes, sizeof fours);
    const auto larger = [](Four a, Four b) { return a > b ? a : b; };
    const Four four = larger(larger(fours[0], fours[2]), larger(fours[1], fours[3]));
    const float first = four[0] > four[2] ? four[0] : four[2], second = four[1] > four[3] ? four[1] : four[3];
    return first > second ? first : second;
}

// 1.5 * 2^23: what is added to it is rounded to a whole number, ties to even, by which its bits grow.
constexpr float NEAREST = 12582912.0f;
constexpr int32_t NEAREST_BITS = 0x4b400000;

// e^x = rest * 2^whole to a few units in the last place; NaN stays NaN (Cody and Waite's reduction, a polynomial of
// degree 6).
struct Exponential {
    Lanes rest;
    Words whole;
};

FORETOKEN_INLINE Exponential exponential_of(Lanes x) {
    const Lanes shifted = x * 1.44269504f + NEAREST, power = shifted - NEAREST;
    const Lanes rest = (x - power * 0.693359375f) + power * 2.12194440e-4f;
    Lanes sum = rest * 1.3981999507e-3f + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    return {sum * rest * rest + rest + 1.0f, Words(shifted) - NEAREST_BITS};
}

// e^x of what is not above 0; below -87 what it is there.
FORETOKEN_INLINE Lanes share_of(Lanes x) {
    const Exponential own = exponential_of(choose(x < -87.0f, all(-87.0f), x));
    return own.rest * Lanes((own.whole + 127) << 23);
}

// e^x; above 88 infinity, below -87 what it is there.
FORETOKEN_INLINE Lanes exp_of(Lanes x) { return share_of(choose(x > 89.0f, all(89.0f), x)); }

}  // namespace

#endif
