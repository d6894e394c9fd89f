// What attention computes for a few query rows over a block of keys and values. Every sum has one order, whatever the
// number of rows: over the numbers of a key in ascending order, over positions in ascending order.

#ifndef FORETOKEN_ATTENTION_ROWS_H
#define FORETOKEN_ATTENTION_ROWS_H

#include <limits>
#include <type_traits>

#include "pairs.h"

namespace {

constexpr int KEY_BLOCK = 64;  // positions of a block, which begins at a multiple of that
constexpr float NONE = -std::numeric_limits<float>::infinity();

// Query rows, and vectors of 16 sums for each, that fit into the registers.
#ifdef __AVX512F__
constexpr int REGISTER_ROWS = 6, REGISTER_VECTORS = 4;
#else
constexpr int REGISTER_ROWS = 3, REGISTER_VECTORS = 2;
#endif

// ---- Words of 32 bits, in which dot products go over a row: pairs of bfloat16, or float32.

template <class T>
constexpr int64_t words_of(int64_t size) {
    return sizeof(T) == 4 ? size : (size + 1) / 2;
}

// What a pass computes with where the cache holds C.
template <class C>
using Row = std::conditional_t<std::is_same_v<C, Half>, float, C>;

template <class T>
struct Word;  // `load` 16 of them, and `add` their products with one

template <>
struct Word<uint16_t> {
    using Vector = Line;
    static Vector load(const uint32_t* from) { return line_at(from); }
    static void add(Lanes& sum, const Vector& keys, uint32_t query) { add_products(sum, keys, query); }
};

template <>
struct Word<float> {
    using Vector = Lanes;
    static Vector load(const uint32_t* from) { return vector_at<Lanes>(from); }
    static void add(Lanes& sum, const Vector& keys, uint32_t query) { sum += keys * of_bits(query); }
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

// The words of a row of the cache, which holds numbers as the rows of a pass or in float16.
inline Words cached_words(const Half* row, int64_t size, int64_t first) {
    const int64_t count = std::min<int64_t>(LANES, size - first);
    return Words(count == LANES ? load(row + first) : load_some(row + first, count));
}

template <class T>
inline Words cached_words(const T* row, int64_t size, int64_t first) {
    return row_words(row, size, first);
}

// 16 rows of keys, those behind `count` zeros, as [words, 16].
template <class C>
void lay_out_keys(const C* keys, const int64_t* at, int64_t count, int64_t size, uint32_t* to) {
    const int64_t num_words = words_of<Row<C>>(size);
    int64_t first = 0;
    for (; count == LANES && (first + LANES) * int64_t(4 / sizeof(Row<C>)) <= size; first += LANES) {
        Words rows[LANES];
        for (int64_t i = 0; i < LANES; ++i) rows[i] = cached_words(keys + at[i], size, first);
        transpose(rows, to + first * LANES);
    }
    for (; first < num_words; first += LANES) {
        Words rows[LANES];
        for (int64_t i = 0; i < LANES; ++i) rows[i] = i < count ? cached_words(keys + at[i], size, first) : Words{};
        uint32_t turned[LANES * LANES];
        transpose(rows, turned);
        const int64_t some = std::min<int64_t>(LANES, num_words - first);
        std::memcpy(to + first * LANES, turned, some * sizeof(Words));
    }
}

// Rows of the cache that are wanted soon: while few rows read a long text, it comes from memory. They are asked for one
// by one between other work, as a processor takes only some tens of requests at a time.
template <class C>
struct Soon {
    const C* rows;
    const int64_t* at;
    int64_t count, size;

    void fetch(int64_t i) const {
        const char* row = reinterpret_cast<const char*>(rows + at[i]);
        for (int64_t byte = 0; byte < size * int64_t(sizeof(C)); byte += 64) __builtin_prefetch(row + byte, 0, 2);
    }
};

// ---- Scores: `out` [ROWS, KEY_BLOCK] of 16 * VECTORS keys [VECTORS, words, 16] and `query` [ROWS, words].
template <class C, int ROWS, int VECTORS>
__attribute__((noinline)) void score(const uint32_t* keys, const uint32_t* query, int64_t num_words, float* out,
                                     const Soon<C>& soon) {
    using T = Row<C>;
    Lanes sums[ROWS][VECTORS] = {};
    for (int64_t w = 0; w < num_words; ++w) {
        for (int64_t i = w; i < soon.count; i += num_words) soon.fetch(i);
        typename Word<T>::Vector own[VECTORS];
        for (int v = 0; v < VECTORS; ++v) own[v] = Word<T>::load(keys + (v * num_words + w) * LANES);
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < VECTORS; ++v) Word<T>::add(sums[r][v], own[v], query[r * num_words + w]);
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) store(sums[r][v], out + r * KEY_BLOCK + v * LANES);
}

// ---- Values: `total` [ROWS, stride] += weights [ROWS, KEY_BLOCK] times the rows `values + at[c]`, c from `first` to
// `last`; 16 * VECTORS numbers of each, or `some` if those are fewer than 16.
template <class C, int ROWS, int VECTORS>
__attribute__((noinline)) void add_values(const C* values, const int64_t* at, const float* weights, int64_t first,
                                          int64_t last, float* total, int64_t stride, int64_t some,
                                          const Soon<C>& soon) {
    Lanes sums[ROWS][VECTORS];
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) sums[r][v] = load(total + r * stride + v * LANES);
    for (int64_t c = first; c < last; ++c) {
        if (c < soon.count) soon.fetch(c);
        Lanes own[VECTORS];
        for (int v = 0; v < VECTORS; ++v)
            own[v] = VECTORS == 1 && some < LANES ? load_some(values + at[c], some) : load(values + at[c] + v * LANES);
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < VECTORS; ++v) sums[r][v] += weights[r * KEY_BLOCK + c] * own[v];
    }
    for (int r = 0; r < ROWS; ++r)
        for (int v = 0; v < VECTORS; ++v) store(sums[r][v], total + r * stride + v * LANES);
}

// Calls `function(rows, vectors)`, both as constants, over all of `num_rows` and `num_vectors` in register tiles:
// `function(constants, first row, first vector)`.
template <int N>
using Constant = std::integral_constant<int, N>;

template <int MOST, class Function>
inline void in_pieces(int64_t size, Function function) {
    int64_t first = 0;
    for (; size - first >= MOST; first += MOST) function(Constant<MOST>{}, first);
    if constexpr (MOST > 4)
        if (size - first >= 4) function(Constant<4>{}, first), first += 4;
    if constexpr (MOST > 3)
        if (size - first >= 3) function(Constant<3>{}, first), first += 3;
    if constexpr (MOST > 2)
        if (size - first >= 2) function(Constant<2>{}, first), first += 2;
    if constexpr (MOST > 1)
        if (size - first >= 1) function(Constant<1>{}, first);
}

// ---- Softmax, block by block (Milakov & Gimelshein 1805.02867).

// How scores are made of dot products, see `foretoken_attention`.
struct Scoring {
    float scale, softcap;

    Lanes operator()(Lanes product) const {
        const Lanes score = product * scale;
        if (softcap == 0.0f) return score;
        return softcap - (2.0f * softcap) / (exp_of(score * (2.0f / softcap)) + 1.0f);
    }
};

// A row's result so far: `values` [head_dim, padded] are divided by `weight` in the end.
struct RowSum {
    float largest;
    float weight;
    float* values;
};

// The same within a split, its weights not yet added up.
struct OpenSum {
    float largest;
    Lanes weights;
    float* values;
};

// From products at positions `first` to `last` of a block to weights, 0 beside them.
__attribute__((noinline)) void weigh(float* products, int64_t first, int64_t last, const Scoring& scoring, OpenSum& sum,
                                     int64_t stride) {
    const int64_t from = first / LANES * LANES, to = (last + LANES - 1) / LANES * LANES;
    const Words lanes = lane_numbers();
    Lanes highest = all(NONE);
    for (int64_t c = from; c < to; c += LANES) {
        const Words place = lanes + int32_t(c);
        const Words seen = (place >= int32_t(first)) & (place < int32_t(last));
        const Lanes score = choose(seen, scoring(load(products + c)), all(NONE));
        store(score, products + c);
        highest = choose(score > highest, score, highest);
    }
    float largest = sum.largest;
    for (int i = 0; i < LANES; ++i) largest = highest[i] > largest ? highest[i] : largest;
    if (largest > sum.largest) {
        const float factor = exp_of(all(sum.largest - largest))[0];
        for (int64_t k = 0; k < stride; k += LANES) store(load(sum.values + k) * factor, sum.values + k);
        sum.weights *= factor;
        sum.largest = largest;
    }
    for (int64_t c = from; c < to; c += LANES) {
        const Words place = lanes + int32_t(c);
        const Words seen = (place >= int32_t(first)) & (place < int32_t(last));
        const Lanes weight = choose(seen, exp_of(load(products + c) - largest), Lanes{});
        store(weight, products + c);
        sum.weights += weight;
    }
}

// Adds what a later split found.
__attribute__((noinline)) void merge(RowSum& sum, float largest, float weight, const float* values, int64_t stride) {
    if (largest == NONE && weight == 0.0f) return;  // it saw nothing
    const float most = largest > sum.largest ? largest : sum.largest;
    const float kept = exp_of(all(sum.largest - most))[0], added = exp_of(all(largest - most))[0];
    sum.weight = sum.weight * kept + weight * added;
    for (int64_t k = 0; k < stride; k += LANES)
        store(load(sum.values + k) * kept + load(values + k) * added, sum.values + k);
    sum.largest = most;
}

}  // namespace

#endif
