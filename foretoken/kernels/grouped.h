// Weights in groups of inputs as the product reads them, and the rows of activations beside them.

#ifndef FORETOKEN_GROUPED_H
#define FORETOKEN_GROUPED_H

#include <cstdint>
#include <cstring>

#include "numbers.h"

namespace {

constexpr int SPAN = 32;       // inputs that share a scale of activations
constexpr int CHUNK = 4;       // inputs of one output that stand together: what one lane of vpdpbusd multiplies
constexpr int LINE = 64;       // bytes: 16 outputs of a chunk
constexpr int SUPER = 256;     // inputs that share a float16 where scales are whole numbers

// Of scales and minimums; MULTIPLE: scales are HALF, minimums whole numbers by which they are multiplied.
enum Form : int32_t { FLOAT = 0, HALF = 1, WHOLE = 2, MULTIPLE = 3 };

}  // namespace

// One matrix, as Python fills it in. The groups of a block follow one another, and so do the blocks.
struct foretoken_matrix {
    const uint8_t* codes;     // [blocks, groups, GROUP * BITS / 32, 16, 4], see `codes_of`
    const void* scales;       // [blocks, groups, 16] of `form`
    const void* minimums;     // the same, int8 for MULTIPLE, or null
    const uint16_t* super_scales;    // WHOLE: [blocks, ceil(width / 256), 16] float16, by which scales are multiplied
    const uint16_t* super_minimums;  // the same of the minimums
    int64_t num_outputs;
    int32_t bits, group, zero, form;
};

namespace {

using Matrix = foretoken_matrix;

// The rows of a tile stand together, so that a block reads them as one stream.
struct Tile {
    const int8_t* codes;      // [spans, rows, 32]
    const float* scales;      // [spans, rows]
    const int32_t* offsets;   // [groups, rows]: what a sum of products begins with, -zero * sum of the group's codes
    const float* sums;        // [groups, rows]
    int64_t spans;
};

// Bytes of codes and number of scales from a group to the one that is fetched while it is multiplied; 0: none is.
struct Ahead {
    int64_t codes, scales;
};

inline float number_at(const void* from, const uint16_t* supers, int32_t form, int64_t index, int64_t super) {
    if (form == FLOAT) return static_cast<const float*>(from)[index];
    if (form == WHOLE) return from_half(supers[super]) * float(static_cast<const int8_t*>(from)[index]);
    return from_half(static_cast<const uint16_t*>(from)[index]);
}

inline int64_t scale_bytes(int32_t form) { return form == FLOAT ? 4 : form == WHOLE ? 1 : 2; }
inline int64_t minimum_bytes(int32_t form) { return form == MULTIPLE ? 1 : scale_bytes(form); }

inline void fetch(const void* at) {
#ifdef __GNUC__
    __builtin_prefetch(at, 0, 2);
#endif
}

// The compiler would move all fetches of a group to its beginning.
FORETOKEN_INLINE void stay_in_order() {
#ifdef __GNUC__
    asm volatile("");
#endif
}

// What `ahead` says of the group whose numbers at `place` are read now. This and the following are inlined by force:
// GCC 12 finds that a function which only fetches does nothing, and removes its calls.
FORETOKEN_INLINE void fetch_numbers(const Matrix& w, int64_t place, const Ahead& ahead) {
    if (ahead.codes == 0) return;
    const int64_t at = place + ahead.scales;
    fetch(static_cast<const char*>(w.scales) + at * scale_bytes(w.form));
    if (w.minimums != nullptr) fetch(static_cast<const char*>(w.minimums) + at * minimum_bytes(w.form));
}

// The lines of a group's codes that are fetched beside part `part` of `parts` of its work: a core waits for a dozen
// lines of memory at a time, and asked for evenly they arrive while it multiplies. If nothing is to be fetched, the
// group's own lines are, which are needed anyway.
FORETOKEN_INLINE void fetch_beside(int part, int parts, const uint8_t* codes, int lines, const Ahead& ahead) {
    for (int i = lines * part / parts; i < lines * (part + 1) / parts; ++i) {
        stay_in_order();
        fetch(codes + ahead.codes + i * LINE);
        stay_in_order();
    }
}

// Both for a whole group at once: where tiles multiply, requests spread over their work gain nothing.
FORETOKEN_INLINE void fetch_group(const Matrix& w, const uint8_t* codes, int lines, int64_t place, const Ahead& ahead) {
    if (ahead.codes == 0) return;
    for (int i = 0; i < lines; ++i) fetch(codes + ahead.codes + i * LINE);
    fetch_numbers(w, place, ahead);
}

}  // namespace

#endif
