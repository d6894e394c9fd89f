// What attention computes for a few query rows over a block of keys and values. Every sum has one order, whatever the
// number of rows: over the numbers of a key in ascending order, over positions in ascending order.

#ifndef FORETOKEN_ATTENTION_ROWS_H
#define FORETOKEN_ATTENTION_ROWS_H

#include <limits>

#include "key_layout.h"
#include "prefetch.h"

// For loops over registers: one that is left a loop keeps them in memory.
#ifdef __clang__
#define FORETOKEN_UNROLL _Pragma("unroll")
#else
#define FORETOKEN_UNROLL _Pragma("GCC unroll 8")
#endif

namespace {

constexpr int KEY_BLOCK = 64;  // positions of a block, which begins at a multiple of that
constexpr int SCORES_EACH = 4, VALUES_EACH = 2;  // words of a key, and positions, between two calls of a prefetch
constexpr float NONE = -std::numeric_limits<float>::infinity();

// Query rows that share what was read, and vectors of 16 sums for each of `rows`: all of them fit into the registers,
// and they are enough to keep the units busy that multiply. `READS_AHEAD`: the vectors that they share fit beside them.
#ifdef __AVX512F__
constexpr bool READS_AHEAD = true;
constexpr int REGISTER_ROWS = 6;
constexpr int register_vectors(int) { return 4; }
#else
constexpr bool READS_AHEAD = false;
constexpr int REGISTER_ROWS = 3;
constexpr int register_vectors(int rows) { return rows == 1 ? 4 : 2; }
#endif

// `from`, through which a compiler reads anew what it would keep in registers: those are for sums.
template <class N>
FORETOKEN_INLINE const N* read_anew(const N* from) {
    asm volatile("" : "+r"(from));
    return from;
}

// Calls `add(r, v, read(v))` for all rows and vectors.
template <int ROWS, int VECTORS, class Read, class Add>
FORETOKEN_INLINE void for_tile(Read read, Add add) {
    if constexpr (READS_AHEAD) {
        decltype(read(0)) own[VECTORS];
        FORETOKEN_UNROLL
        for (int v = 0; v < VECTORS; ++v) own[v] = read(v);
        FORETOKEN_UNROLL
        for (int r = 0; r < ROWS; ++r)
            FORETOKEN_UNROLL
            for (int v = 0; v < VECTORS; ++v) add(r, v, own[v]);
    } else {
        FORETOKEN_UNROLL
        for (int v = 0; v < VECTORS; ++v) {
            const auto own = read(v);
            FORETOKEN_UNROLL
            for (int r = 0; r < ROWS; ++r) add(r, v, own);
        }
    }
}

template <int ROWS, int VECTORS>
FORETOKEN_INLINE void store_sums(const Lanes (&sums)[ROWS][VECTORS], float* to, int64_t stride) {
    FORETOKEN_UNROLL
    for (int r = 0; r < ROWS; ++r)
        FORETOKEN_UNROLL
        for (int v = 0; v < VECTORS; ++v) store(sums[r][v], to + r * stride + v * LANES);
}

// ---- Scores: `out` [ROWS, KEY_BLOCK] of 16 * VECTORS keys [VECTORS, words, 16] and `query` [ROWS, words].
template <class C, int ROWS, int VECTORS>
__attribute__((noinline)) void score(const Laid<C>* keys, const uint32_t* query, int64_t num_words, float* out,
                                     Prefetch<C>& next) {
    using W = Word<IN_PAIRS<C>>;
    Lanes sums[ROWS][VECTORS] = {};
    for (int64_t w = 0; w < num_words; ++w) {
        if (w % SCORES_EACH == 0) next.some();
        const auto read = [&](int v) {
            query = read_anew(query);
            return W::load(keys + (v * num_words + w) * LANES);
        };
        for_tile<ROWS, VECTORS>(
            read, [&](int r, int v, const auto& own) { W::add(sums[r][v], own, query[r * num_words + w]); });
    }
    store_sums(sums, out, KEY_BLOCK);
}

// ---- Values: `total` [ROWS, stride] += weights [ROWS, KEY_BLOCK] times the rows `values + at[c]`, c from `first` to
// `last`; 16 * VECTORS numbers of each, or `some` if those are fewer than 16.
template <class C, int ROWS, int VECTORS>
__attribute__((noinline)) void add_values(const C* values, const int64_t* at, const float* weights, int64_t first,
                                          int64_t last, float* total, int64_t stride, int64_t some,
                                          Prefetch<C>& next) {
    Lanes sums[ROWS][VECTORS];
    FORETOKEN_UNROLL
    for (int r = 0; r < ROWS; ++r)
        FORETOKEN_UNROLL
        for (int v = 0; v < VECTORS; ++v) sums[r][v] = load(total + r * stride + v * LANES);
    for (int64_t c = first; c < last; ++c) {
        if (c % VALUES_EACH == 0) next.some();
        const auto read = [&](int v) {
            weights = read_anew(weights);
            return VECTORS == 1 && some < LANES ? load_some(values + at[c], some) : load(values + at[c] + v * LANES);
        };
        for_tile<ROWS, VECTORS>(
            read, [&](int r, int v, const Lanes& own) {
                sums[r][v] = plus_product(sums[r][v], own, all(weights[r * KEY_BLOCK + c]));
            });
    }
    store_sums(sums, total, stride);
}

// Calls `function(size, first)`, the size as a constant, for as few pieces of `size` as there can be if none is larger
// than MOST, each about as large as the others.
template <int N>
using Constant = std::integral_constant<int, N>;

template <int N, class Function>
inline void in_piece(int64_t size, int64_t first, Function function) {
    if (size == N) return function(Constant<N>{}, first);
    if constexpr (N > 1) in_piece<N - 1>(size, first, function);
}

template <int MOST, class Function>
inline void in_pieces(int64_t size, Function function) {
    int64_t first = 0;
    for (int64_t left = (size + MOST - 1) / MOST; left > 0; --left) {
        const int64_t own = (size - first + left - 1) / left;
        in_piece<MOST>(own, first, function);
        first += own;
    }
}

// ---- Softmax, block by block (Milakov & Gimelshein 1805.02867).

// How scores are made of dot products, see `foretoken_attention`.
struct Scoring {
    float scale, softcap;

    FORETOKEN_INLINE Lanes operator()(Lanes product) const {
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

// From products at positions `first` to `last` of a block to weights, 0 beside them; `WHOLE`: nothing is beside them in
// the vectors that hold them.
template <bool WHOLE>
__attribute__((noinline)) void weigh(float* products, int64_t first, int64_t last, const Scoring& scoring, OpenSum& sum,
                                     int64_t stride) {
    const int64_t from = first / LANES * LANES, to = (last + LANES - 1) / LANES * LANES;
    const auto only_seen = [&](int64_t c, Lanes own, Lanes beside) {
        if constexpr (WHOLE) return own;
        const Words place = lane_numbers() + int32_t(c);
        return choose((place >= int32_t(first)) & (place < int32_t(last)), own, beside);
    };
    Lanes highest = all(NONE);
    for (int64_t c = from; c < to; c += LANES) {
        const Lanes score = only_seen(c, scoring(load(products + c)), all(NONE));
        store(score, products + c);
        highest = choose(score > highest, score, highest);
    }
    const float largest = std::max(sum.largest, max_of(highest));
    if (largest > sum.largest) {
        const float factor = share_of(all(sum.largest - largest))[0];
        for (int64_t k = 0; k < stride; k += LANES) store(load(sum.values + k) * factor, sum.values + k);
        sum.weights *= factor;
        sum.largest = largest;
    }
    for (int64_t c = from; c < to; c += LANES) {
        const Lanes weight = only_seen(c, share_of(load(products + c) - largest), Lanes{});
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
