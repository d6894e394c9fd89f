// How keys lie while they are multiplied: a vector holds one number, or one pair, of 16 keys. The cache holds row after
// row, so a block of them is transposed here.

#ifndef FORETOKEN_KEY_LAYOUT_H
#define FORETOKEN_KEY_LAYOUT_H

#include <type_traits>

#include "pairs.h"
#include "prefetch.h"

namespace {

// ---- Words of 32 bits, in which dot products go over a query: float32, or pairs of bfloat16.

// What a pass computes with where the cache holds C.
template <class C>
using Row = std::conditional_t<std::is_same_v<C, Half>, float, C>;

// Numbers of 16 bits are widened as fast as they are read: keys are laid out as they are, but for pairs of bfloat16
// that are multiplied at once.
#if defined(__AVX2__) && defined(__F16C__)
#define FORETOKEN_WIDENS 1
#endif
#if defined(FORETOKEN_WIDENS) && !defined(FORETOKEN_BF16)
template <class C>
constexpr bool IN_PAIRS = false;
#else
template <class C>
constexpr bool IN_PAIRS = std::is_same_v<C, uint16_t>;
#endif
#ifdef FORETOKEN_WIDENS
template <class C>
using Laid = std::conditional_t<sizeof(C) == 2 && !IN_PAIRS<C>, C, uint32_t>;
#else
template <class C>
using Laid = uint32_t;
#endif

template <class C>
constexpr int64_t words_of(int64_t size) {
    return IN_PAIRS<C> ? (size + 1) / 2 : size;
}

inline Lanes laid(const uint32_t* from) { return vector_at<Lanes>(from); }
inline Lanes laid(const uint16_t* from) { return load(from); }
inline Lanes laid(const Half* from) { return load(from); }

// `load` 16 keys' words as they are laid out, and `add` their products with one of a query.
template <bool PAIRS>
struct Word {
    using Vector = Lanes;
    template <class N>
    static Vector load(const N* from) { return laid(from); }
    static void add(Lanes& sum, const Vector& keys, uint32_t query) {
        sum = plus_product(sum, keys, all(of_bits(query)));
    }
};

template <>
struct Word<true> {
    using Vector = Line;
    static Vector load(const uint32_t* from) { return line_at(from); }
    static void add(Lanes& sum, const Vector& keys, uint32_t query) { add_products(sum, keys, query); }
};

// The words of a row of `size` numbers from word `first` on, 16 at most, zeros behind them.
template <class T>
inline Words row_words(const T* row, int64_t size, int64_t first) {
    constexpr int64_t EACH = 4 / sizeof(T);
    const int64_t bytes = (size - first * EACH) * int64_t(sizeof(T));
    const T* from = row + first * EACH;
    if (bytes >= int64_t(sizeof(Words))) return vector_at<Words>(from);
    Words words = {};
    if (bytes == sizeof words / 2)
        std::memcpy(&words, from, sizeof words / 2);
    else
        std::memcpy(&words, from, bytes);
    return words;
}

#ifdef __clang__
#define FORETOKEN_SHUFFLE(V, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define FORETOKEN_SHUFFLE(V, a, b, ...) __builtin_shuffle(a, b, V{__VA_ARGS__})
#endif

#if defined(__AVX512F__)

// 16 rows of 16 words, transposed into `to`, in four rounds of shuffles: two inside 128 bits, two of whole 128 bits.
inline void transpose(const Words (&from)[LANES], uint32_t* to) {
    Words rows[LANES];
    std::copy_n(from, LANES, rows);
    for (int i = 0; i < LANES; i += 2) {
        const Words a = rows[i], b = rows[i + 1];
        rows[i] = FORETOKEN_SHUFFLE(Words, a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
        rows[i + 1] = FORETOKEN_SHUFFLE(Words, a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    }
    for (int i = 0; i < LANES; i += 4) {
        const Words a = rows[i], b = rows[i + 2], c = rows[i + 1], d = rows[i + 3];
        rows[i] = FORETOKEN_SHUFFLE(Words, a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
        rows[i + 1] = FORETOKEN_SHUFFLE(Words, a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
        rows[i + 2] = FORETOKEN_SHUFFLE(Words, c, d, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
        rows[i + 3] = FORETOKEN_SHUFFLE(Words, c, d, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
    const auto even = [](Words a, Words b) {
        return FORETOKEN_SHUFFLE(Words, a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    };
    const auto odd = [](Words a, Words b) {
        return FORETOKEN_SHUFFLE(Words, a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    };
    for (int i = 0; i < 4; ++i) {
        const Words a = rows[i], b = rows[4 + i], c = rows[8 + i], d = rows[12 + i];
        const Words first = even(a, b), second = even(c, d), third = odd(a, b), fourth = odd(c, d);
        rows[i] = even(first, second);
        rows[8 + i] = odd(first, second);
        rows[4 + i] = even(third, fourth);
        rows[12 + i] = odd(third, fourth);
    }
    std::memcpy(to, rows, sizeof rows);
}

#else

// A square of as many rows as a register has lanes, written with `LANES` words from row to row.
inline void transpose_tile(Words::Part (&rows)[PART_LANES], uint32_t* to) {
    using Part = Words::Part;
    Part turned[PART_LANES];
    for (int i = 0; i < PART_LANES; i += 4) {
        const Part a = rows[i], b = rows[i + 1], c = rows[i + 2], d = rows[i + 3];
#if defined(__AVX__)
        const Part e = FORETOKEN_SHUFFLE(Part, a, b, 0, 8, 1, 9, 4, 12, 5, 13);
        const Part f = FORETOKEN_SHUFFLE(Part, c, d, 0, 8, 1, 9, 4, 12, 5, 13);
        const Part g = FORETOKEN_SHUFFLE(Part, a, b, 2, 10, 3, 11, 6, 14, 7, 15);
        const Part h = FORETOKEN_SHUFFLE(Part, c, d, 2, 10, 3, 11, 6, 14, 7, 15);
        turned[i] = FORETOKEN_SHUFFLE(Part, e, f, 0, 1, 8, 9, 4, 5, 12, 13);
        turned[i + 1] = FORETOKEN_SHUFFLE(Part, e, f, 2, 3, 10, 11, 6, 7, 14, 15);
        turned[i + 2] = FORETOKEN_SHUFFLE(Part, g, h, 0, 1, 8, 9, 4, 5, 12, 13);
        turned[i + 3] = FORETOKEN_SHUFFLE(Part, g, h, 2, 3, 10, 11, 6, 7, 14, 15);
#else
        const Part e = FORETOKEN_SHUFFLE(Part, a, b, 0, 4, 1, 5), f = FORETOKEN_SHUFFLE(Part, c, d, 0, 4, 1, 5);
        const Part g = FORETOKEN_SHUFFLE(Part, a, b, 2, 6, 3, 7), h = FORETOKEN_SHUFFLE(Part, c, d, 2, 6, 3, 7);
        turned[i] = FORETOKEN_SHUFFLE(Part, e, f, 0, 1, 4, 5), turned[i + 1] = FORETOKEN_SHUFFLE(Part, e, f, 2, 3, 6, 7);
        turned[i + 2] = FORETOKEN_SHUFFLE(Part, g, h, 0, 1, 4, 5), turned[i + 3] = FORETOKEN_SHUFFLE(Part, g, h, 2, 3, 6, 7);
#endif
    }
#if defined(__AVX__)
    for (int i = 0; i < 4; ++i) {
        const Part a = turned[i], b = turned[i + 4];
        turned[i] = FORETOKEN_SHUFFLE(Part, a, b, 0, 1, 2, 3, 8, 9, 10, 11);
        turned[i + 4] = FORETOKEN_SHUFFLE(Part, a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    }
#endif
    for (int i = 0; i < PART_LANES; ++i) std::memcpy(to + i * LANES, &turned[i], sizeof(Part));
}

// 16 rows of 16 words, transposed into `to`.
inline void transpose(const Words (&rows)[LANES], uint32_t* to) {
    for (int column = 0; column < PARTS; ++column)
        for (int row = 0; row < PARTS; ++row) {
            Words::Part own[PART_LANES];
            for (int i = 0; i < PART_LANES; ++i) own[i] = rows[row * PART_LANES + i].parts[column];
            transpose_tile(own, to + column * PART_LANES * LANES + row * PART_LANES);
        }
}

#endif

// The words of a row of numbers N where the cache holds C.
template <class C, class N>
inline Words words_at(const N* row, int64_t size, int64_t first) {
    if constexpr (IN_PAIRS<C> || sizeof(N) == 4) return row_words(row, size, first);
    const int64_t count = std::min<int64_t>(LANES, size - first);
    return Words(count == LANES ? load(row + first) : load_some(row + first, count));
}

// 16 rows of keys, those behind `count` zeros, as [words, 16].
template <class C>
void lay_out_keys(const C* keys, const int64_t* at, int64_t count, int64_t size, uint32_t* to, Prefetch<C>& next) {
    const int64_t num_words = words_of<C>(size), whole = IN_PAIRS<C> ? size / 2 : size;
    int64_t first = 0;
    for (; count == LANES && first + LANES <= whole; first += LANES) {
        next.some();
        Words rows[LANES];
        for (int64_t i = 0; i < LANES; ++i) rows[i] = words_at<C>(keys + at[i], size, first);
        transpose(rows, to + first * LANES);
    }
    for (; first < num_words; first += LANES) {
        Words rows[LANES];
        for (int64_t i = 0; i < LANES; ++i) rows[i] = i < count ? words_at<C>(keys + at[i], size, first) : Words{};
        uint32_t turned[LANES * LANES];
        transpose(rows, turned);
        const int64_t some = std::min<int64_t>(LANES, num_words - first);
        std::memcpy(to + first * LANES, turned, some * sizeof(Words));
    }
}

#ifdef FORETOKEN_WIDENS

constexpr int64_t EIGHT = 8;  // numbers of 16 bits in 128

// Eight numbers of 16 rows, of which `row(i)` gives row i, transposed into `to` [8, 16]. A round of unpacking turns the
// bits of an element's place by one, the number of its row and that in the row being three bits each: three rounds
// exchange them. Rows 0 to 7 take the lower half of each register, rows 8 to 15 the upper one.
template <class GetRow>
FORETOKEN_INLINE void transpose_narrow(GetRow row, void* to) {
    __m256i own[EIGHT], turned[EIGHT];
    for (int i = 0; i < EIGHT; ++i) own[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(row(i)), row(i + EIGHT), 1);
    for (int round = 0; round < 3; ++round) {
        for (int i = 0; i < EIGHT / 2; ++i) {
            turned[2 * i] = _mm256_unpacklo_epi16(own[i], own[i + EIGHT / 2]);
            turned[2 * i + 1] = _mm256_unpackhi_epi16(own[i], own[i + EIGHT / 2]);
        }
        std::copy_n(turned, EIGHT, own);
    }
    for (int i = 0; i < EIGHT; ++i) _mm256_storeu_si256(static_cast<__m256i*>(to) + i, own[i]);
}

// The same of numbers of 16 bits, which stay what they are: [size, 16].
template <class C>
void lay_out_keys(const C* keys, const int64_t* at, int64_t count, int64_t size, C* to, Prefetch<C>& next) {
    const auto eight = [](const C* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); };
    int64_t first = 0;
    for (; count == LANES && first + EIGHT <= size; first += EIGHT) {
        if (first % LANES == 0) next.some();
        transpose_narrow([&](int i) { return eight(keys + at[i] + first); }, to + first * LANES);
    }
    for (; first < size; first += EIGHT) {
        const int64_t some = std::min(EIGHT, size - first);
        C rows[LANES][EIGHT] = {}, turned[EIGHT * LANES];
        for (int64_t i = 0; i < count; ++i) std::copy_n(keys + at[i] + first, some, rows[i]);
        transpose_narrow([&](int i) { return eight(rows[i]); }, turned);
        std::copy_n(turned, some * LANES, to + first * LANES);
    }
}

#endif

}  // namespace

#endif
