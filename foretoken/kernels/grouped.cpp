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
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include "grouped.h"
#include "threads.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define FORETOKEN_VNNI 1
#include "block_vnni.h"
#if defined(__linux__) && defined(__x86_64__)
#define FORETOKEN_AMX 1
#include "block_amx.h"
#endif
#elif defined(__AVX2__) && defined(__F16C__)
#define FORETOKEN_AVX2 1
#include "block_avx2.h"
#else
#include "block_plain.h"
#endif

#ifndef FORETOKEN_AMX
namespace {
constexpr int TILE_ROWS = MAX_ROWS, MAX_REST = MAX_ROWS;
struct Tiles {};
inline bool has_tiles() { return false; }
inline bool fits_tiles(const Matrix&) { return false; }
}  // namespace
#endif

namespace {

// Up to here one thread works: waking others would take longer.
constexpr int64_t FEW_PRODUCTS = 1 << 18, FEW_SPANS = 256, FEW_SUMS = 2048;

// How far ahead codes are fetched. Anything from 4 to 12 KB takes equally long.
constexpr int64_t BYTES_AHEAD = 6144;

using Block = void (*)(const Matrix&, const Tile&, int64_t, const Ahead&, float (*)[LANES]);

template <int BITS, int GROUP, int... BEFORE>
Block block_of(int64_t rows, std::integer_sequence<int, BEFORE...>) {
    static const Block blocks[] = {multiply_block<BEFORE + 1, BITS, GROUP>...};
    return blocks[rows - 1];
}

template <int N>
using Whole = std::integral_constant<int, N>;

// `function(bits, group)` of the format of a matrix.
template <class Function>
auto by_format(const Matrix& w, Function function) {
    if (w.bits == 8) return w.group == 32 ? function(Whole<8>{}, Whole<32>{}) : function(Whole<8>{}, Whole<16>{});
    if (w.bits == 6) return function(Whole<6>{}, Whole<16>{});
    if (w.bits == 5) return function(Whole<5>{}, Whole<32>{});
    return w.group == 32 ? function(Whole<4>{}, Whole<32>{}) : function(Whole<4>{}, Whole<16>{});
}

Block block_of(const Matrix& w, int64_t rows) {
    return by_format(w, [&](auto bits, auto group) {
        return block_of<bits, group>(rows, std::make_integer_sequence<int, MAX_ROWS>{});
    });
}

// ---- activations

// Whether products of 16 inputs with the inverse of a scale might round to other whole numbers than quotients do. They
// differ by three roundings, 2.3e-5 where they are largest; what is not a number counts as well.
inline bool might_round_elsewhere(const Lanes& product) {
    constexpr float FAR_FROM_TIES = 0.4999f;
    const Lanes rest = product - (product + NEAREST - NEAREST);
    return lanes_set(rest < FAR_FROM_TIES & rest > -FAR_FROM_TIES) != 0xffff;
}

// 32 inputs of one row: scale = max|x| / 127, code = the nearest of x / scale, ties to even. A span that holds NaN or
// infinity gets the scale NaN and codes 0, which makes every output of the row NaN.
template <class T>
void code_span(const T* x, int64_t count, int8_t* codes, float* scale, int32_t* half_sums) {
    const auto half_at = [&](int64_t at) {
        return count >= at + LANES ? load(x + at) : load_some(x + at, std::max<int64_t>(0, count - at));
    };
    const Lanes halves[] = {half_at(0), half_at(LANES)};
    // The bits of a number without its sign are in its order, and NaN is above all.
    const Words sizes[] = {Words(halves[0]) & 0x7fffffff, Words(halves[1]) & 0x7fffffff};
    const int32_t largest = max_of(choose(sizes[0] > sizes[1], sizes[0], sizes[1]));
    const bool is_finite = largest < 0x7f800000;
    *scale = is_finite ? of_bits(uint32_t(largest)) / 127.0f : std::numeric_limits<float>::quiet_NaN();
    half_sums[0] = half_sums[1] = 0;
    if (!is_finite || *scale == 0.0f) {  // a denormal maximum may leave a scale of 0
        std::fill_n(codes, SPAN, int8_t(0));
        return;
    }
    // Dividing vectors takes half of the time, and a product tells the same except near a tie.
    const float inverse = 1.0f / *scale;
    for (int half = 0; half < 2; ++half) {
        Lanes quotients = halves[half] * inverse;
        if (might_round_elsewhere(quotients)) quotients = halves[half] / *scale;
        Words nearest = Words(quotients + NEAREST) - NEAREST_BITS;
        nearest = choose(nearest > 127, Words{} + 127, nearest);  // a denormal scale is rounded
        nearest = choose(nearest < -127, Words{} - 127, nearest);
        narrow(nearest, codes + half * LANES);
        half_sums[half] = sum_of(nearest);
    }
}

struct alignas(LINE) Line {
    int8_t codes[LINE];
};

// The rows of one call, coded once for all matrices, in tiles of `tile_rows`.
struct Activations {
    int64_t rows, width, spans, tile_rows;
    std::unique_ptr<Line[]> codes;   // by tile as in `Tile`
    std::vector<float> scales;
    std::vector<int32_t> half_sums;  // [spans, rows, 2] of a tile
    std::vector<int32_t> offsets;
    std::vector<float> sums;

    Activations(int64_t num_rows, int64_t num_inputs, int64_t rows_of_a_tile)
        : rows(num_rows), width(num_inputs), spans((num_inputs + SPAN - 1) / SPAN), tile_rows(rows_of_a_tile) {
        const int64_t places = ((tiles() - 1) * tile_rows + lines_of(tiles() - 1)) * spans;
        codes.reset(new Line[(places * SPAN + LINE - 1) / LINE]);
        scales.resize(places), half_sums.resize(places * 2), offsets.resize(places * 2), sums.resize(places * 2);
        const int64_t last = tiles() - 1;
        if (lines_of(last) > rows_of(last))
            std::fill_n(codes_at(last * tile_rows * spans), lines_of(last) * spans * SPAN, int8_t(0));
    }

    int8_t* codes_at(int64_t place) const { return codes[0].codes + place * SPAN; }
    int64_t tiles() const { return (rows + tile_rows - 1) / tile_rows; }
    int64_t rows_of(int64_t tile) const { return std::min<int64_t>(tile_rows, rows - tile * tile_rows); }
    // A tile register is filled up with zeros.
    bool is_in_register(int64_t tile) const { return tile_rows > MAX_ROWS && rows_of(tile) > MAX_REST; }
    int64_t lines_of(int64_t tile) const { return is_in_register(tile) ? tile_rows : rows_of(tile); }

    // A thread codes some spans of all rows of a tile: rows that were shared out would share lines of the cache.
    template <class T>
    void code(const T* x, int threads) {
        on_threads(threads, rows * spans > FEW_SPANS, [&](int t, int n) {
            const int64_t end = tiles() * spans * (t + 1) / n;
            for (int64_t piece = tiles() * spans * t / n; piece < end;) {
                const int64_t tile = piece / spans, first = piece % spans, last = std::min(spans, first + end - piece);
                for (int64_t row = tile * tile_rows; row < tile * tile_rows + rows_of(tile); ++row)
                    code_row(x + row * width, row, first, last);
                piece += last - first;
            }
        });
    }

    // Spans `first` to `last` of a row.
    template <class T>
    void code_row(const T* x, int64_t row, int64_t first, int64_t last) {
        const int64_t tile = row / tile_rows, lines = lines_of(tile);
        const int64_t begin = tile * tile_rows * spans + row % tile_rows;
        for (int64_t s = first; s < last; ++s) {
            const int64_t at = begin + s * lines;
            code_span(x + s * SPAN, std::min<int64_t>(SPAN, width - s * SPAN), codes_at(at), &scales[at],
                      &half_sums[at * 2]);
        }
    }

    // What a matrix needs beside the codes.
    void sum_groups(const Matrix& w, int threads) {
        const int64_t halves = w.group == SPAN ? 1 : 2;
        for_each(tiles(), threads, rows * spans > FEW_SUMS, [&](int64_t tile) {
            const int64_t first = tile * tile_rows * spans, count = rows_of(tile), lines = lines_of(tile);
            for (int64_t s = 0; s < spans; ++s)
                for (int64_t half = 0; half < halves; ++half)
                    for (int64_t r = 0; r < count; ++r) {
                        const int32_t* own = &half_sums[(first + s * lines + r) * 2];
                        const int32_t sum = halves == 1 ? own[0] + own[1] : own[half];
                        const int64_t at = first * halves + (s * halves + half) * lines + r;
                        offsets[at] = sums_begin_with(w) - w.zero * sum;
                        sums[at] = float(sum);
                    }
        });
    }

    Tile at(int64_t tile, int group) const {
        const int64_t first = tile * tile_rows * spans, group_first = first * (SPAN / group);
        return {codes_at(first), &scales[first], &offsets[group_first], &sums[group_first], spans};
    }
};

// Where the results of a block belong: `count` columns of rows.
struct Outputs {
    void* to;
    int64_t stride, count;
    bool is_bf16;

    void put(int64_t row, const Lanes& values) const {
        is_bf16 ? put(static_cast<uint16_t*>(to), row, values) : put(static_cast<float*>(to), row, values);
    }

private:
    template <class T>
    void put(T* first, int64_t row, const Lanes& values) const {
        if (count == LANES)
            store(values, first + row * stride);
        else
            store_some(values, first + row * stride, count);
    }
};

#ifdef FORETOKEN_AMX
// The tiles of more than MAX_REST rows, all of them but the last one full. Where there are several, `room` takes the
// codes of a block, which are unpacked once for all.
void multiply_in_tiles(Tiles& registers, int8_t* room, const Matrix& w, const Activations& x, int64_t block,
                       const Ahead& ahead, const Outputs& out) {
    registers.shape(w.group);
    const int64_t full = (x.rows + 3) / TILE_ROWS, rest = std::max<int64_t>(0, x.rows - full * TILE_ROWS);
    const auto put_from = [&](int64_t first) {
        return [&out, &x, first](int64_t row, const Lanes& values) {
            if (first + row < x.rows) out.put(first + row, values);
        };
    };
    by_format(w, [&](auto bits, auto group) {
        const int64_t groups = x.spans * (SPAN / group);
        const auto run = [&](auto codes_of_block) {
            if (full > 0) multiply_tiles<16, group>(w, x.at(0, group), full, block, codes_of_block(), put_from(0));
            if (rest > MAX_REST)
                multiply_tiles<12, group>(w, x.at(full, group), 1, block, codes_of_block(), put_from(full * TILE_ROWS));
        };
        if (room != nullptr) {
            unpack_block<bits, group>(w, groups, block, ahead, room);
            run([&] { return UnpackedBefore<group>(room, groups); });
        } else {
            run([&] { return UnpackedAhead<bits, group>(w, groups, block, ahead); });
        }
    });
}
#endif

Ahead ahead_of(const Matrix& w) {
    const int64_t group_bytes = w.group * w.bits / 32 * LINE, groups = BYTES_AHEAD / group_bytes;
    return {groups * group_bytes, groups * LANES};
}

// All rows against the 16 outputs of one block, into the columns of `out`.
void multiply_rows(Tiles& registers, int8_t* room, const Matrix& w, const Activations& x, int64_t block, Ahead ahead,
                   const Outputs& out) {
    // The first tile fetches all: shared out among two tiles, requests took up to a quarter more.
    int64_t tile = 0;
#ifdef FORETOKEN_AMX
    if (x.tile_rows > MAX_ROWS) {
        multiply_in_tiles(registers, room, w, x, block, ahead, out);
        ahead = Ahead{};
        tile = x.is_in_register(x.tiles() - 1) ? x.tiles() : x.tiles() - 1;
    }
#endif
    for (; tile < x.tiles(); ++tile, ahead = Ahead{}) {
        float totals[MAX_ROWS][LANES];
        block_of(w, x.rows_of(tile))(w, x.at(tile, w.group), block, ahead, totals);
        for (int64_t r = 0; r < x.rows_of(tile); ++r) out.put(tile * x.tile_rows + r, load(totals[r]));
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
    const Matrix* const end = parts + num_parts;
    const bool in_tiles = rows > MAX_ROWS && has_tiles() && std::all_of(parts, end, fits_tiles);
    Activations a(rows, width, in_tiles ? TILE_ROWS : MAX_ROWS);
    a.code(x, threads);
    const int64_t lines = in_tiles && rows > TILE_ROWS + MAX_REST ? a.spans * SPAN * LANES / LINE : 0;
    std::vector<Line> unpacked(threads * lines);  // of the block that each thread multiplies, a byte a code
    for (const Matrix *first = parts, *last; first < end; first = last) {
        int64_t num_outputs = 0;
        for (last = first; last < end && reads_alike(*first, *last); ++last) num_outputs += last->num_outputs;
        a.sum_groups(*first, threads);
        // One region for all that read the same sums: threads are woken and waited for once.
        on_threads(threads, rows * num_outputs * width > FEW_PRODUCTS, [&](int t, int n) {
            T* to = out;
            Tiles registers;
            int8_t* const room = lines == 0 ? nullptr : unpacked[t * lines].codes;
            for (const Matrix* w = first; w < last; to += w++->num_outputs) {
                const int64_t blocks = (w->num_outputs + LANES - 1) / LANES;
                const Ahead ahead = ahead_of(*w);
                for_share(blocks, t, n, [&](int64_t block) {
                    const int64_t count = std::min<int64_t>(LANES, w->num_outputs - block * LANES);
                    multiply_rows(registers, room, *w, a, block, block + 1 == blocks ? Ahead{} : ahead,
                                  {to + block * LANES, stride, count, std::is_same<T, uint16_t>::value});
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

// 3: AMX beside AVX-512 VNNI, 2: AVX-512 VNNI, 1: AVX2, 0: plain C++.
int foretoken_grouped_instructions() {
#ifdef FORETOKEN_VNNI
    return has_tiles() ? 3 : 2;
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
