// Products of activations with weights in groups of inputs; grouped_kernel.py has the layout and a twin in torch.
//
// For row t and output n, over the groups g in ascending order, in float32, every operation rounded on its own:
//
//     total += (scale[n, g] * dot(code[n, g] - zero, x[t, g]) + minimum[n, g] * sum(x[t, g])) * x_scale[t, g]
//
// x holds 8-bit codes of the activations, so that the sums inside a group are exact integers. A result therefore
// depends neither on the other rows, nor on their number, nor on the threads. Build with -ffp-contract=off: a fused
// multiplication would round once where the twin rounds twice.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#include "grouped.h"
#include "threads.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define FORETOKEN_VNNI 1
#include "block_vnni.h"
#elif defined(__AVX2__) && defined(__F16C__)
#define FORETOKEN_AVX2 1
#include "block_avx2.h"
#else
#include "block_plain.h"
#endif

namespace {

// Up to here one thread works: waking others would take longer.
constexpr int64_t FEW_PRODUCTS = 1 << 18, FEW_SPANS = 256;

using Block = void (*)(const Matrix&, const Tile&, int64_t, const Ahead&, float (*)[LANES]);

template <int BITS, int GROUP>
Block block_of(int64_t rows) {
    static const Block blocks[MAX_ROWS] = {
        multiply_block<1, BITS, GROUP>, multiply_block<2, BITS, GROUP>, multiply_block<3, BITS, GROUP>,
        multiply_block<4, BITS, GROUP>, multiply_block<5, BITS, GROUP>, multiply_block<6, BITS, GROUP>,
        multiply_block<7, BITS, GROUP>, multiply_block<8, BITS, GROUP>,
    };
    return blocks[rows - 1];
}

Block block_of(const Matrix& w, int64_t rows) {
    if (w.bits == 8) return w.group == 32 ? block_of<8, 32>(rows) : block_of<8, 16>(rows);
    if (w.bits == 6) return block_of<6, 16>(rows);
    if (w.bits == 5) return block_of<5, 32>(rows);
    return w.group == 32 ? block_of<4, 32>(rows) : block_of<4, 16>(rows);
}

// ---- activations

// 32 inputs of one row: scale = max|x| / 127, code = the nearest of x / scale, ties to even. A span that holds NaN or
// infinity gets the scale NaN and codes 0, which makes every output of the row NaN.
template <class T>
void code_span(const T* x, int64_t count, int8_t* codes, float* scale, int32_t* half_sums) {
    float values[SPAN] = {};
    for (int64_t i = 0; i < count; ++i) values[i] = number(x[i]);
    uint32_t largest = 0;  // the bits of a number without its sign are in its order, and NaN is above all
    for (float value : values) largest = std::max(largest, bits_of(value) & 0x7fffffffu);
    const bool is_finite = largest < 0x7f800000u;
    *scale = is_finite ? of_bits(largest) / 127.0f : std::numeric_limits<float>::quiet_NaN();
    half_sums[0] = half_sums[1] = 0;
    if (!is_finite || *scale == 0.0f) {  // a denormal maximum may leave a scale of 0
        std::fill_n(codes, SPAN, int8_t(0));
        return;
    }
    constexpr float NEAREST = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to a whole number
    int32_t nearest[SPAN];
    for (int i = 0; i < SPAN; ++i)
        nearest[i] = std::min(127, std::max(-127, int32_t((values[i] / *scale + NEAREST) - NEAREST)));
    for (int i = 0; i < SPAN; ++i) codes[i] = int8_t(nearest[i]);
    for (int i = 0; i < SPAN / 2; ++i) half_sums[0] += nearest[i], half_sums[1] += nearest[SPAN / 2 + i];
}

// The rows of one call, coded once for all matrices.
struct Activations {
    int64_t rows, width, spans;
    std::vector<int8_t> codes;       // by tile as in `Tile`
    std::vector<float> scales;
    std::vector<int32_t> half_sums;  // [spans, rows, 2] of a tile
    std::vector<int32_t> offsets;
    std::vector<float> sums;

    Activations(int64_t num_rows, int64_t num_inputs)
        : rows(num_rows), width(num_inputs), spans((num_inputs + SPAN - 1) / SPAN), codes(rows * spans * SPAN),
          scales(rows * spans), half_sums(rows * spans * 2), offsets(rows * spans * 2), sums(rows * spans * 2) {}

    int64_t tiles() const { return (rows + MAX_ROWS - 1) / MAX_ROWS; }
    int64_t rows_of(int64_t tile) const { return std::min<int64_t>(MAX_ROWS, rows - tile * MAX_ROWS); }

    template <class T>
    void code(const T* x, int threads) {
        for_each(rows * spans, threads, rows * spans > FEW_SPANS, [&](int64_t piece) {
            const int64_t row = piece / spans, s = piece % spans, tile = row / MAX_ROWS;
            const int64_t at = tile * MAX_ROWS * spans + row % MAX_ROWS + s * rows_of(tile);
            code_span(x + row * width + s * SPAN, std::min<int64_t>(SPAN, width - s * SPAN), &codes[at * SPAN],
                      &scales[at], &half_sums[at * 2]);
        });
    }

    // What a matrix needs beside the codes.
    void sum_groups(const Matrix& w, int threads) {
        const int64_t halves = w.group == SPAN ? 1 : 2;
        for_each(tiles(), threads, rows * spans > MAX_ROWS * FEW_SPANS, [&](int64_t tile) {
            const int64_t first = tile * MAX_ROWS * spans, count = rows_of(tile);
            for (int64_t s = 0; s < spans; ++s)
                for (int64_t half = 0; half < halves; ++half)
                    for (int64_t r = 0; r < count; ++r) {
                        const int32_t* own = &half_sums[(first + s * count + r) * 2];
                        const int32_t sum = halves == 1 ? own[0] + own[1] : own[half];
                        const int64_t at = first * halves + (s * halves + half) * count + r;
                        offsets[at] = sums_begin_with(w) - w.zero * sum;
                        sums[at] = float(sum);
                    }
        });
    }

    Tile at(int64_t tile, int group) const {
        const int64_t first = tile * MAX_ROWS * spans, group_first = first * (SPAN / group);
        return {&codes[first * SPAN], &scales[first], &offsets[group_first], &sums[group_first], spans};
    }
};

// All rows against the 16 outputs of one block, into the columns of `out` [rows, stride].
template <class T>
void multiply_rows(const Matrix& w, const Activations& x, int64_t block, bool is_last, T* out, int64_t stride) {
    const int64_t tiles = x.tiles(), count = std::min<int64_t>(LANES, w.num_outputs - block * LANES);
    const int64_t codes = is_last ? 0 : x.spans * w.bits * LINE;
    const int64_t scales = is_last ? 0 : x.spans * (SPAN / w.group) * LANES;
    for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t rows = x.rows_of(tile);
        // The first tile fetches all: shared out among two tiles, 12 rows took as long as 16, and those a quarter more.
        const Ahead ahead = tile == 0 ? Ahead{codes, scales} : Ahead{};
        float totals[MAX_ROWS][LANES];
        block_of(w, rows)(w, x.at(tile, w.group), block, ahead, totals);
        for (int64_t r = 0; r < rows; ++r)
            for (int64_t n = 0; n < count; ++n)
                put(totals[r][n], out[(tile * MAX_ROWS + r) * stride + block * LANES + n]);
    }
}

// ---- rows of a table

// Code `place` of group `g` of output `n`, from the layout that `codes_of` reads.
inline int32_t code_at(const Matrix& w, int64_t groups, int64_t n, int64_t g, int place) {
    const int lines = w.group * w.bits / 32, chunk = place / CHUNK;
    const int64_t in_line = n % LANES * CHUNK + place % CHUNK;
    const uint8_t* codes = w.codes + (n / LANES * groups + g) * lines * LINE + in_line;
    if (w.bits == 8) return codes[LINE * chunk];
    const int half = w.group / CHUNK / 2, above = w.bits - 4;
    const int32_t low = (codes[LINE * (chunk % half)] >> (chunk < half ? 0 : 4)) & 15;
    if (above == 0) return low;
    return low | ((codes[LINE * half] >> (above * chunk)) & ((1 << above) - 1)) << 4;
}

// Output `n` as the row of a table: scale * (code - zero) + minimum, every operation rounded on its own.
template <class T>
void read_row(const Matrix& w, int64_t n, int64_t width, T* out) {
    const int64_t spans = (width + SPAN - 1) / SPAN, groups = spans * (SPAN / w.group);
    const int64_t supers = (spans * SPAN + SUPER - 1) / SUPER, block = n / LANES, lane = n % LANES;
    for (int64_t g = 0; g * w.group < width; ++g) {
        const int64_t index = (block * groups + g) * LANES + lane;
        const int64_t super = (block * supers + g * w.group / SUPER) * LANES + lane;
        const float scale = number_at(w.scales, w.super_scales, w.form, index, super);
        float minimum = 0.0f;
        if (w.form == MULTIPLE)
            minimum = scale * float(static_cast<const int8_t*>(w.minimums)[index]);
        else if (w.minimums != nullptr)
            minimum = number_at(w.minimums, w.super_minimums, w.form, index, super);
        const int count = int(std::min<int64_t>(w.group, width - g * w.group));
        for (int i = 0; i < count; ++i) {
            const float whole = scale * float(code_at(w, groups, n, g, i) - w.zero);
            put(w.minimums == nullptr ? whole : whole + minimum, out[g * w.group + i]);
        }
    }
}

// Whether two matrices read the same sums of a row's codes (`sum_groups`).
bool reads_alike(const Matrix& one, const Matrix& other) {
    return one.group == other.group && one.zero == other.zero && sums_begin_with(one) == sums_begin_with(other);
}

template <class T>
void multiply(const T* x, int64_t rows, int64_t width, const Matrix* parts, int num_parts, T* out, int64_t stride,
              int threads) {
    Activations a(rows, width);
    a.code(x, threads);
    const Matrix* const end = parts + num_parts;
    for (const Matrix *first = parts, *last; first < end; first = last) {
        int64_t num_outputs = 0;
        for (last = first; last < end && reads_alike(*first, *last); ++last) num_outputs += last->num_outputs;
        a.sum_groups(*first, threads);
        // One region for all that read the same sums: threads are woken and waited for once.
        on_threads(threads, rows * num_outputs * width > FEW_PRODUCTS, [&](int t, int n) {
            T* to = out;
            for (const Matrix* w = first; w < last; to += w++->num_outputs) {
                const int64_t blocks = (w->num_outputs + LANES - 1) / LANES;
                for_share(blocks, t, n, [&](int64_t block) {
                    multiply_rows(*w, a, block, block + 1 == blocks, to, stride);
                });
            }
        });
        out += num_outputs;
    }
}

}  // namespace

extern "C" {

// What the numbers below mean; a library of another interface is not used.
int foretoken_grouped_interface() { return 4; }

// 2: AVX-512 VNNI, 1: AVX2, 0: plain C++.
int foretoken_grouped_instructions() {
#ifdef FORETOKEN_VNNI
    return 2;
#elif defined(FORETOKEN_AVX2)
    return 1;
#else
    return 0;
#endif
}

// `x` [rows, width] times the transpose of the matrices `parts`, whose outputs follow one another in `out`
// [rows, stride]; both are bfloat16 or both float32. `bits` and `group` of a matrix: 4 or 8 with 32 or 16, 5 with 32,
// 6 with 16. False: no memory for the activations' codes.
bool foretoken_grouped_multiply(const void* x, int64_t rows, int64_t width, const foretoken_matrix* parts,
                                int num_parts, void* out, int64_t stride, int is_bf16, int threads) {
    const auto run = [&](auto number) {
        using T = decltype(number);
        multiply(static_cast<const T*>(x), rows, width, parts, num_parts, static_cast<T*>(out), stride, threads);
    };
    try {
        if (is_bf16)
            run(uint16_t{});
        else
            run(float{});
    } catch (const std::bad_alloc&) {
        return false;
    }
    return true;
}

// The outputs `index` [rows] of a matrix as rows of a table, into `out` [rows, width]. False: there is no such output.
bool foretoken_grouped_rows(const foretoken_matrix* matrix, const int64_t* index, int64_t rows, int64_t width, void* out,
                            int is_bf16) {
    for (int64_t row = 0; row < rows; ++row)
        if (index[row] < 0 || index[row] >= matrix->num_outputs) return false;
    for (int64_t row = 0; row < rows; ++row)
        if (is_bf16)
            read_row(*matrix, index[row], width, static_cast<uint16_t*>(out) + row * width);
        else
            read_row(*matrix, index[row], width, static_cast<float*>(out) + row * width);
    return true;
}
}
