// Rows of a tile against 16 outputs, for processors without AVX-512 VNNI and AVX2.

#ifndef FORETOKEN_BLOCK_PLAIN_H
#define FORETOKEN_BLOCK_PLAIN_H

#include "grouped.h"

namespace {

constexpr int MAX_ROWS = 8;  // rows of a tile

inline int32_t sums_begin_with(const Matrix&) { return 0; }

// Adds the products of 16 outputs with four inputs to `dots`; `code` is 64 bytes, [16, 4].
inline void add_products(int32_t* dots, const uint8_t* code, const int8_t* inputs) {
    for (int n = 0; n < LANES; ++n)
        for (int i = 0; i < CHUNK; ++i) dots[n] += int32_t(code[CHUNK * n + i]) * int32_t(inputs[i]);
}

inline float minimum_at(const Matrix& w, float scale, int64_t index, int64_t super) {
    if (w.minimums == nullptr) return 0.0f;
    if (w.form == MULTIPLE) return scale * float(static_cast<const int8_t*>(w.minimums)[index]);
    return number_at(w.minimums, w.super_minimums, w.form, index, super);
}

// The codes of chunk `chunk` of a group, 64 bytes. Below 8 bits, the first half of the chunks lies in low nibbles, the
// second in high ones; one more line holds the bits above those, of chunk C from bit (BITS - 4) * C on.
template <int BITS, int GROUP>
inline void codes_of(const uint8_t* codes, int chunk, uint8_t* to) {
    constexpr int LINES = GROUP / CHUNK / 2, ABOVE = BITS - 4;
    if (BITS == 8) {
        std::copy_n(codes + LINE * chunk, LINE, to);
        return;
    }
    const int shift = chunk < LINES ? 0 : 4;
    for (int i = 0; i < LINE; ++i) to[i] = (codes[LINE * (chunk % LINES) + i] >> shift) & 15;
    if (ABOVE == 0) return;
    const int mask = (1 << ABOVE) - 1;
    for (int i = 0; i < LINE; ++i) to[i] |= ((codes[LINE * LINES + i] >> (ABOVE * chunk)) & mask) << 4;
}

template <int ROWS, int BITS, int GROUP>
void multiply_block(const Matrix& w, const Tile& x, int64_t block, const Ahead& ahead, float (*out)[LANES]) {
    constexpr int GROUPS = SPAN / GROUP, LINES = GROUP * BITS / 32;
    const int64_t groups = x.spans * GROUPS, supers = (x.spans * SPAN + SUPER - 1) / SUPER;
    const uint8_t* codes = w.codes + block * groups * LINES * LINE;
    for (int r = 0; r < ROWS; ++r) std::fill_n(out[r], LANES, 0.0f);
    for (int64_t g = 0; g < groups; ++g, codes += LINES * LINE) {
        const int64_t span = g / GROUPS;
        fetch_group(w, codes, LINES, (block * groups + g) * LANES, ahead);
        const int8_t* inputs = x.codes + span * ROWS * SPAN + g % GROUPS * GROUP;
        int32_t dots[ROWS][LANES];
        for (int r = 0; r < ROWS; ++r) std::fill_n(dots[r], LANES, x.offsets[g * ROWS + r]);
        for (int chunk = 0; chunk < GROUP / CHUNK; ++chunk) {
            uint8_t code[LINE];
            codes_of<BITS, GROUP>(codes, chunk, code);
            for (int r = 0; r < ROWS; ++r) add_products(dots[r], code, inputs + r * SPAN + CHUNK * chunk);
        }
        float scale[LANES], minimum[LANES];
        for (int n = 0; n < LANES; ++n) {
            const int64_t place = (block * groups + g) * LANES + n;
            const int64_t super = (block * supers + g * GROUP / SUPER) * LANES + n;
            scale[n] = number_at(w.scales, w.super_scales, w.form, place, super);
            minimum[n] = minimum_at(w, scale[n], place, super);
        }
        for (int r = 0; r < ROWS; ++r) {
            const float x_scale = x.scales[span * ROWS + r], sum = x.sums[g * ROWS + r];
            for (int n = 0; n < LANES; ++n) {
                const float part = scale[n] * float(dots[r][n]);
                out[r][n] += (w.minimums == nullptr ? part : part + minimum[n] * sum) * x_scale;
            }
        }
    }
}

}  // namespace

#endif
