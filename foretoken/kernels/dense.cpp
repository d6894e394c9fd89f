// Products of activations with bfloat16 weights; model/matrices/dense.py has the layout.
//
// For row t and output n the products are added in float32 in ascending order of the inputs, two at a time where the
// processor has an instruction for that. A result therefore depends neither on the other rows, nor on their number, nor
// on the threads.

#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#include "pairs.h"
#include "threads.h"

// One matrix, as Python fills it in.
struct foretoken_dense {
    const uint16_t* weights;  // [blocks, pairs, 16, 2]: 16 outputs of two inputs
    int64_t num_outputs;
};

namespace {

// Rows of a tile, for which weights are loaded once, and blocks of outputs, for which a row's inputs are: as many as
// leave all sums in registers.
#ifdef __AVX512F__
constexpr int MAX_ROWS = 8, MAX_BLOCKS = 3;
#else
constexpr int MAX_ROWS = 4, MAX_BLOCKS = 1;
#endif
constexpr int FEW_ROWS = 2, FEW_BLOCKS = 2;  // memory is the limit up to here, and two blocks are read evenly
constexpr int MOST_BLOCKS = MAX_BLOCKS > FEW_BLOCKS ? MAX_BLOCKS : FEW_BLOCKS;
constexpr int64_t FEW_PRODUCTS = 1 << 18;  // up to here one thread multiplies: waking others would take longer
constexpr int AHEAD = 24;          // lines: what is fetched before it is needed

// The rows of a tile stand together: [pairs, rows].
struct Tile {
    const Pair* pairs;
    int64_t num_pairs;
};

inline void fetch(const void* at) { __builtin_prefetch(at, 0, 2); }

// 16 outputs of each of BLOCKS blocks for ROWS rows: a number of the rows that was fetched is used BLOCKS times, a line
// of weights ROWS times.
template <int ROWS, int BLOCKS>
void multiply_blocks(const uint16_t* weights, const Tile& x, Lanes (*out)[MAX_ROWS]) {
    const int64_t block_size = x.num_pairs * 2 * LANES;
    Lanes sums[BLOCKS][ROWS];
    for (int b = 0; b < BLOCKS; ++b)
        for (int r = 0; r < ROWS; ++r) sums[b][r] = Lanes{};
    for (int64_t p = 0; p < x.num_pairs; ++p, weights += 2 * LANES) {
        Line lines[BLOCKS];
        for (int b = 0; b < BLOCKS; ++b) {
            fetch(weights + b * block_size + AHEAD * 2 * LANES);
            lines[b] = line_at(weights + b * block_size);
        }
        for (int r = 0; r < ROWS; ++r)
            for (int b = 0; b < BLOCKS; ++b) add_products(sums[b][r], lines[b], x.pairs[p * ROWS + r]);
    }
    for (int b = 0; b < BLOCKS; ++b) std::copy_n(sums[b], ROWS, out[b]);
}

template <int BLOCKS, int ROWS = MAX_ROWS>
void multiply_rows(int64_t rows, const uint16_t* weights, const Tile& x, Lanes (*out)[MAX_ROWS]) {
    if (rows == ROWS) return multiply_blocks<ROWS, BLOCKS>(weights, x, out);
    if constexpr (ROWS > 1) multiply_rows<BLOCKS, ROWS - 1>(rows, weights, x, out);
}

inline uint16_t rounded(uint16_t bf16) { return bf16; }
inline uint16_t rounded(float value) { return bf16_of(value); }

// The rows of one call, rounded and laid out once for all matrices.
struct Activations {
    int64_t rows, num_pairs;
    std::vector<Pair> pairs;  // by tile as in `Tile`

    template <class T>
    Activations(const T* x, int64_t num_rows, int64_t width, int threads)
        : rows(num_rows), num_pairs((width + 1) / 2), pairs(rows * num_pairs) {
        for_each(rows, threads, rows > MAX_ROWS, [&](int64_t row) {
            const int64_t first = row / MAX_ROWS * MAX_ROWS, count = rows_from(first);
            Pair* own = pairs.data() + first * num_pairs + (row - first);
            const T* from = x + row * width;
            for (int64_t p = 0; p < width / 2; ++p)
                own[p * count] = pair_of(rounded(from[2 * p]), rounded(from[2 * p + 1]));
            if (width % 2) own[width / 2 * count] = pair_of(rounded(from[width - 1]), 0);
        });
    }

    int64_t rows_from(int64_t first) const { return std::min<int64_t>(MAX_ROWS, rows - first); }
    Tile at(int64_t first) const { return {pairs.data() + first * num_pairs, num_pairs}; }
};

// All rows against some blocks, into the columns of `out` [rows, stride].
template <class T>
void multiply_some(const foretoken_dense& w, const Activations& x, int64_t block, int64_t num_blocks, T* out,
                   int64_t stride) {
    const uint16_t* weights = w.weights + block * x.num_pairs * 2 * LANES;
    for (int64_t first = 0; first < x.rows; first += MAX_ROWS) {
        const int64_t rows = x.rows_from(first);
        Lanes sums[MOST_BLOCKS][MAX_ROWS];
        if (num_blocks == MOST_BLOCKS)
            multiply_rows<MOST_BLOCKS>(rows, weights, x.at(first), sums);
        else if (num_blocks == 2)
            multiply_rows<2>(rows, weights, x.at(first), sums);
        else
            multiply_rows<1>(rows, weights, x.at(first), sums);
        for (int64_t b = 0; b < num_blocks; ++b) {
            const int64_t column = (block + b) * LANES, count = std::min<int64_t>(LANES, w.num_outputs - column);
            for (int64_t r = 0; r < rows; ++r) {
                T* to = out + (first + r) * stride + column;
                if (count == LANES)
                    store(sums[b][r], to);
                else
                    store_some(sums[b][r], to, count);
            }
        }
    }
}

template <class T>
void multiply(const T* x, int64_t rows, int64_t width, const foretoken_dense* parts, int num_parts, T* out,
              int64_t stride, int threads) {
    const Activations a(x, rows, width, threads);
    const int64_t together = rows <= FEW_ROWS ? FEW_BLOCKS : MAX_BLOCKS;
    int64_t num_outputs = 0;
    for (int part = 0; part < num_parts; ++part) num_outputs += parts[part].num_outputs;
    // One region for all matrices: threads are woken and waited for once.
    on_threads(threads, rows * num_outputs * width > FEW_PRODUCTS, [&](int t, int n) {
        T* to = out;
        for (const foretoken_dense* w = parts; w < parts + num_parts; to += w++->num_outputs) {
            const int64_t blocks = (w->num_outputs + LANES - 1) / LANES;
            for_share((blocks + together - 1) / together, t, n, [&](int64_t i) {
                multiply_some(*w, a, i * together, std::min(together, blocks - i * together), to, stride);
            });
        }
    });
}

}  // namespace

extern "C" {

// What the numbers below mean; a library of another interface is not used.
int foretoken_dense_interface() { return 1; }

// `x` [rows, width] times the transpose of the matrices `parts`, whose outputs follow one another in `out`
// [rows, stride]; both are bfloat16 or both float32, which is rounded to bfloat16 first. False: no memory.
bool foretoken_dense_multiply(const void* x, int64_t rows, int64_t width, const foretoken_dense* parts, int num_parts,
                              void* out, int64_t stride, int is_bf16, int threads) {
    try {
        if (is_bf16)
            multiply(static_cast<const uint16_t*>(x), rows, width, parts, num_parts, static_cast<uint16_t*>(out),
                     stride, threads);
        else
            multiply(static_cast<const float*>(x), rows, width, parts, num_parts, static_cast<float*>(out), stride,
                     threads);
    } catch (const std::bad_alloc&) {
        return false;
    }
    return true;
}
}
