// Up to 16 rows against 16 outputs, with AMX: whole numbers are multiplied in tiles, scales as in block_vnni.h.

#ifndef FORETOKEN_BLOCK_AMX_H
#define FORETOKEN_BLOCK_AMX_H

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "block_vnni.h"

namespace {

constexpr int TILE_ROWS = 16;
constexpr int MAX_REST = 8;  // rows beside full tiles that are multiplied in vectors

// Whether the processor has tiles of bytes, and the kernel lets this process use them, which has to be asked for.
inline bool has_tiles() {
    static const bool allowed = [] {
        constexpr unsigned TILES_OF_BYTES = 3u << 24;  // edx of leaf 7: AMX-TILE and AMX-INT8
        constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
        unsigned a, b, c, d;
        return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & TILES_OF_BYTES) == TILES_OF_BYTES &&
               syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    }();
    return allowed;
}

// The shapes of a thread's tile registers while it multiplies: 0 holds sums, 1 inputs, 2 codes. At the end they are as
// they were before: other libraries use them too.
class Tiles {
public:
    Tiles() = default;
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
    ~Tiles() {
        if (group_ == 0) return;
        if (before_.palette != 0)
            asm volatile("ldtilecfg %0" ::"m"(before_));
        else
            asm volatile("tilerelease");
    }

    // For groups of `group` inputs.
    void shape(int group) {
        if (group == group_) return;
        if (group_ == 0) asm volatile("sttilecfg %0" : "=m"(before_));
        Shapes own{};
        own.palette = 1;
        own.rows[0] = own.rows[1] = TILE_ROWS, own.rows[2] = uint8_t(group / CHUNK);
        own.row_bytes[0] = own.row_bytes[2] = LINE, own.row_bytes[1] = uint16_t(group);
        asm volatile("ldtilecfg %0" ::"m"(own));
        group_ = group;
    }

private:
    struct alignas(64) Shapes {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    };
    Shapes before_;
    int group_ = 0;
};

// Sums [16 rows, 16 outputs] of the products of one group.
inline void multiply_group(const int8_t* inputs, const int8_t* codes, int32_t (*sums)[LANES]) {
    asm volatile(
        "tilezero %%tmm0\n\t"
        "tileloadd (%[inputs],%[span]), %%tmm1\n\t"
        "tileloadd (%[codes],%[line]), %%tmm2\n\t"
        "tdpbssd %%tmm2, %%tmm1, %%tmm0\n\t"
        "tilestored %%tmm0, (%[sums],%[line])"
        :
        : [inputs] "r"(inputs), [codes] "r"(codes), [sums] "r"(sums), [span] "r"(int64_t(SPAN)),
          [line] "r"(int64_t(LINE))
        : "memory");
}

// A code less the zero is a signed byte.
inline bool fits_tiles(const Matrix& w) { return w.bits < 8 ? w.zero <= 128 : w.zero == 128; }

// The codes of a group as signed bytes [GROUP / 4, 16 outputs, 4], as tiles read them.
template <int BITS, int GROUP, int C = 0>
inline void unpack(const uint8_t* codes, __m512i zero, int8_t* to) {
    if constexpr (C < GROUP / CHUNK) {
        _mm512_store_si512(to + LINE * C, _mm512_sub_epi8(codes_of<BITS, GROUP, C>(codes), zero));
        unpack<BITS, GROUP, C + 1>(codes, zero, to);
    }
}

// The codes of a block as tiles read them, group by group, for rows that one tile register holds.
template <int BITS, int GROUP>
class UnpackedAhead {
public:
    UnpackedAhead(const Matrix& w, int64_t groups, int64_t block, const Ahead& ahead)
        : w_(w), codes_(w.codes + block * groups * LINES * LINE), groups_(groups), block_(block), ahead_(ahead),
          zero_(_mm512_set1_epi8(char(w.zero))) {
        for (int64_t g = 0; g < LEAD; ++g) make(g);
    }

    // Those of group `g`; unpacks those of a later one, since what was just stored is read late.
    const int8_t* at(int64_t g) {
        make(g + LEAD);
        return ring_[g % RING];
    }

private:
    static constexpr int LINES = GROUP * BITS / 32, LEAD = 2, RING = 4;

    void make(int64_t g) {
        if (g >= groups_) return;
        const uint8_t* codes = codes_ + g * LINES * LINE;
        fetch_group(w_, codes, LINES, (block_ * groups_ + g) * LANES, ahead_);
        unpack<BITS, GROUP>(codes, zero_, ring_[g % RING]);
    }

    alignas(64) int8_t ring_[RING][GROUP * LANES];
    const Matrix& w_;
    const uint8_t* codes_;
    const int64_t groups_, block_;
    const Ahead& ahead_;
    const __m512i zero_;
};

// The same, all unpacked before, for more rows.
template <int GROUP>
struct UnpackedBefore {
    const int8_t* codes;  // [groups, GROUP / 4, 16, 4]
    const int8_t* at(int64_t g) const { return codes + g * GROUP * LANES; }
};

template <int BITS, int GROUP>
void unpack_block(const Matrix& w, int64_t groups, int64_t block, const Ahead& ahead, int8_t* to) {
    constexpr int LINES = GROUP * BITS / 32;
    const uint8_t* codes = w.codes + block * groups * LINES * LINE;
    const __m512i zero = _mm512_set1_epi8(char(w.zero));
    for (int64_t g = 0; g < groups; ++g, codes += LINES * LINE, to += GROUP * LANES) {
        fetch_group(w, codes, LINES, (block * groups + g) * LANES, ahead);
        unpack<BITS, GROUP>(codes, zero, to);
    }
}

// What `multiply_block` of block_vnni.h gives, bit for bit, for `tiles` tiles of ROWS rows that follow one another, each
// with TILE_ROWS lines. `codes` is one of the above, `put(row, sums)` takes the results. The sums of a group are read
// when those of later ones are under way: what a tile register stores cannot be read before it has reached the cache.
template <int ROWS, int GROUP, class Codes, class Put>
void multiply_tiles(const Matrix& w, const Tile& x, int64_t tiles, int64_t block, Codes&& codes, const Put& put) {
    constexpr int GROUPS = SPAN / GROUP, DELAY = 3, RING = 4;
    const int64_t groups = x.spans * GROUPS, supers = (x.spans * SPAN + SUPER - 1) / SUPER;
    alignas(64) int32_t sums[RING][TILE_ROWS][LANES];
    __m512 total[ROWS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) total[r] = _mm512_setzero_ps();
    const auto add_group = [&](int64_t g, const int32_t(*own)[LANES], const float* x_scales,
                               const float* x_sums) __attribute__((always_inline)) {
        const int64_t place = (block * groups + g) * LANES, super = (block * supers + g * GROUP / SUPER) * LANES;
        const __m512 scale = numbers_at(w.scales, w.super_scales, w.form, place, super);
        const auto part_of = [&](int r) {
            return _mm512_mul_ps(scale, _mm512_cvtepi32_ps(_mm512_load_si512(own[r])));
        };
        if (w.minimums == nullptr) {
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r)
                total[r] = _mm512_add_ps(total[r], _mm512_mul_ps(part_of(r), _mm512_set1_ps(x_scales[r])));
        } else {
            const __m512 minimum = minimums_at(w, scale, place, super);
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; ++r) {
                const __m512 lower = _mm512_mul_ps(minimum, _mm512_set1_ps(x_sums[r]));
                const __m512 part = _mm512_add_ps(part_of(r), lower);
                total[r] = _mm512_add_ps(total[r], _mm512_mul_ps(part, _mm512_set1_ps(x_scales[r])));
            }
        }
    };
    const int64_t count = tiles * groups;
    int64_t tile = 0;
    for (int64_t i = 0, multiplied = 0, added = 0; i < count + DELAY; ++i) {
        if (i < count) {
            const int8_t* inputs = x.codes + i / GROUPS * TILE_ROWS * SPAN + i % GROUPS * GROUP;
            multiply_group(inputs, codes.at(multiplied), sums[i % RING]);
            if (++multiplied == groups) multiplied = 0;
        }
        if (i < DELAY) continue;
        const int64_t one = i - DELAY;
        add_group(added, sums[one % RING], x.scales + one / GROUPS * TILE_ROWS, x.sums + one * TILE_ROWS);
        if (++added < groups) continue;
        added = 0;
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            put(tile * TILE_ROWS + r, Lanes(total[r]));
            total[r] = _mm512_setzero_ps();
        }
        ++tile;
    }
}

}  // namespace

#endif
