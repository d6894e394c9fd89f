// Up to 16 rows against 16 outputs, with AMX: whole numbers are multiplied in tiles, scales as in block_vnni.h.

#ifndef FORETOKEN_BLOCK_AMX_H
#define FORETOKEN_BLOCK_AMX_H

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <type_traits>

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

// The shapes of a thread's tile registers while it multiplies, of which even and odd groups use one each: 0 and 1 hold
// sums, 2 and 3 inputs, 4 and 5 codes. At the end they are as they were before: other libraries use them too.
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
        for (int i : {0, 1}) {
            own.rows[i] = own.rows[2 + i] = TILE_ROWS, own.rows[4 + i] = uint8_t(group / CHUNK);
            own.row_bytes[i] = own.row_bytes[4 + i] = LINE, own.row_bytes[2 + i] = uint16_t(group);
        }
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

// The lines of a register, `stride` bytes apart.
template <int REGISTER>
inline void load_register(const int8_t* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(REGISTER) : "memory");
}

// What is done with the registers of even or odd groups: inputs [16 rows, GROUP] and codes [GROUP / 4, 16 outputs, 4]
// are loaded, multiplied, and their sums [16 rows, 16 outputs] stored.
template <bool ODD>
inline void load_inputs(const int8_t* inputs) {
    load_register<2 + ODD>(inputs, SPAN);
}

template <bool ODD>
inline void load_codes(const int8_t* codes) {
    load_register<4 + ODD>(codes, LINE);
}

template <bool ODD>
inline void multiply_group() {
    asm volatile("tilezero %%tmm%c0\n\ttdpbssd %%tmm%c1, %%tmm%c2, %%tmm%c0" ::"i"(0 + ODD), "i"(4 + ODD), "i"(2 + ODD)
                 : "memory");
}

template <bool ODD>
inline void store_sums(int32_t (*sums)[LANES]) {
    asm volatile("tilestored %%tmm%c2, (%0,%1)" ::"r"(sums), "r"(int64_t(LINE)), "i"(0 + ODD) : "memory");
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

// The codes of a block as tiles read them, group by group, for rows that one tile register holds. Each is unpacked some
// groups before it is read, since what was just stored is read late. Behind the last one, what comes is any code.
template <int BITS, int GROUP>
class UnpackedAhead {
public:
    UnpackedAhead(const Matrix& w, int64_t groups, int64_t block, const Ahead& ahead)
        : w_(w), codes_(w.codes + block * groups * LINES * LINE), groups_(groups), block_(block), ahead_(ahead),
          zero_(_mm512_set1_epi8(char(w.zero))) {
        for (int64_t g = 0; g < LEAD; ++g) make(g);
    }

    FORETOKEN_INLINE const int8_t* next() {
        make(group_ + LEAD);
        return ring_[group_++ % RING];
    }

private:
    static constexpr int LINES = GROUP * BITS / 32, LEAD = 2, RING = 4;

    FORETOKEN_INLINE void make(int64_t g) {
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
    int64_t group_ = 0;
};

// The same, all unpacked before, for more rows: behind the last group, the first one comes again.
template <int GROUP>
class UnpackedBefore {
public:
    // [groups, GROUP / 4, 16, 4]
    UnpackedBefore(const int8_t* codes, int64_t groups) : codes_(codes), groups_(groups) {}

    FORETOKEN_INLINE const int8_t* next() {
        const int8_t* codes = codes_ + group_ * GROUP * LANES;
        if (++group_ == groups_) group_ = 0;
        return codes;
    }

private:
    const int8_t* codes_;
    const int64_t groups_;
    int64_t group_ = 0;
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

// The product of one block with `tiles` tiles of ROWS rows that follow one another, each with TILE_ROWS lines. `codes`
// is one of the above, `put(row, sums)` takes the results: those of `multiply_block` of block_vnni.h, bit for bit.
//
// A turn adds the sums of a group, stores those of the second one behind it, multiplies the third and loads the fourth:
// an instruction that waits for a product (52 cycles), or for what a register stores, holds up all that follow, and a
// core looks ahead over three groups only. In the last turns, what is loaded, multiplied and stored is not used.
template <int ROWS, int GROUP, bool IS_FLOAT, bool HAS_MINIMUM, class Codes, class Put>
class TileProduct {
public:
    TileProduct(const Matrix& w, const Tile& x, int64_t tiles, int64_t block, Codes& codes, const Put& put)
        : w_(w), x_(x), groups_(x.spans * GROUPS), supers_((x.spans * SPAN + SUPER - 1) / SUPER),
          count_(tiles * groups_), block_(block), codes_(codes), put_(put) {}

    void run() {
        __m512 total[ROWS];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) total[r] = _mm512_setzero_ps();
        load<EVEN>(0), load<ODD>(1), multiply_group<EVEN>();
        load<EVEN>(2), multiply_group<ODD>(), store_sums<EVEN>(sums_[0]);
        load<ODD>(3), multiply_group<EVEN>(), store_sums<ODD>(sums_[1]);
        for (int64_t group = 0; group < count_;) {
            turn<EVEN>(total, group);
            if (++group == count_) break;
            turn<ODD>(total, group++);
        }
    }

private:
    static constexpr bool EVEN = false, ODD = true;
    static constexpr int GROUPS = SPAN / GROUP, RING = 4, PARTS = 4;
    static_assert(ROWS % PARTS == 0, "what a turn does for later groups stands between equally many rows");

    const Matrix& w_;
    const Tile& x_;
    const int64_t groups_, supers_, count_, block_;
    Codes& codes_;
    const Put& put_;
    int64_t added_ = 0, row_ = 0;
    alignas(64) int32_t sums_[RING][TILE_ROWS][LANES];

    template <bool PARITY>
    FORETOKEN_INLINE void load(int64_t group) {
        load_codes<PARITY>(codes_.next());
        load_rows<PARITY>(group);
    }

    template <bool PARITY>
    FORETOKEN_INLINE void load_rows(int64_t group) {
        const int64_t own = std::min(group, count_ - 1);
        load_inputs<PARITY>(x_.codes + own / GROUPS * TILE_ROWS * SPAN + own % GROUPS * GROUP);
    }

    // Adds the sums of `group`. Between tile instructions one port multiplies and converts 16 floats at a time, and two
    // add: so whole numbers become floats by an addition (`SHIFTED`) where scales allow it.
    template <bool PARITY>
    FORETOKEN_INLINE void turn(__m512 (&total)[ROWS], int64_t group) {
        const int64_t place = (block_ * groups_ + added_) * LANES;
        const int64_t super = (block_ * supers_ + added_ * GROUP / SUPER) * LANES;
        const float* const x_scales = x_.scales + group / GROUPS * TILE_ROWS;
        const float* const x_sums = x_.sums + group * TILE_ROWS;
        const int32_t(*const sums)[LANES] = sums_[group % RING];
        const __m512i shifted = _mm512_set1_epi32(SHIFTED_BITS);
        const __m512 scale = numbers_at(w_.scales, w_.super_scales, w_.form, place, super);
        const __m512 shift = _mm512_mul_ps(scale, _mm512_set1_ps(-SHIFTED));
        const __m512 minimum = HAS_MINIMUM ? minimums_at(w_, scale, place, super) : scale;
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            if (r == 0) load_codes<PARITY>(codes_.next());
            if (r == ROWS / PARTS) load_rows<PARITY>(group + 4);
            if (r == ROWS / PARTS * 2) multiply_group<!PARITY>();
            if (r == ROWS / PARTS * 3) store_sums<PARITY>(sums_[(group + 2) % RING]);
            const __m512i sum = _mm512_load_si512(sums[r]);
            __m512 part;
            if constexpr (IS_FLOAT)
                part = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(sum));
            else
                part = _mm512_fmadd_ps(scale, _mm512_castsi512_ps(_mm512_add_epi32(sum, shifted)), shift);
            if constexpr (HAS_MINIMUM) part = _mm512_add_ps(part, _mm512_mul_ps(minimum, _mm512_set1_ps(x_sums[r])));
            total[r] = _mm512_add_ps(total[r], _mm512_mul_ps(part, _mm512_set1_ps(x_scales[r])));
        }
        if (++added_ == groups_) put_all(total);
    }

    // The results of a tile, whose last group has been added.
    FORETOKEN_INLINE void put_all(__m512 (&total)[ROWS]) {
        alignas(64) float results[ROWS][LANES];
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; ++r) {
            _mm512_store_ps(results[r], total[r]);
            total[r] = _mm512_setzero_ps();
        }
#pragma GCC unroll 1
        for (int r = 0; r < ROWS; ++r) put_(row_ + r, ::load(results[r]));
        row_ += TILE_ROWS, added_ = 0;
    }
};

template <int ROWS, int GROUP, class Codes, class Put>
void multiply_tiles(const Matrix& w, const Tile& x, int64_t tiles, int64_t block, Codes&& codes, const Put& put) {
    const auto run = [&](auto is_float, auto has_minimum) {
        constexpr bool IS_FLOAT = decltype(is_float)::value, HAS_MINIMUM = decltype(has_minimum)::value;
        using Product = TileProduct<ROWS, GROUP, IS_FLOAT, HAS_MINIMUM, std::decay_t<Codes>, Put>;
        Product(w, x, tiles, block, codes, put).run();
    };
    const auto run_with = [&](auto is_float) {
        w.minimums == nullptr ? run(is_float, std::false_type{}) : run(is_float, std::true_type{});
    };
    w.form == FLOAT ? run_with(std::true_type{}) : run_with(std::false_type{});
}

}  // namespace

#endif
