// As many products of codes and inputs as the processor can add up: the instruction by which `grouped.cpp` multiplies,
// on numbers that stay in registers.

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__) && defined(__linux__)
#define FORETOKEN_AMX 1
#include "../../foretoken/kernels/block_amx.h"
#endif

namespace {

#if defined(__AVX512F__) && defined(__AVX512VNNI__)
constexpr int SUMS = 16, EACH = 64;
using Sum = __m512i;
inline Sum ones() { return _mm512_set1_epi8(1); }
inline void add_products(Sum& sum, Sum& codes, Sum inputs) {
    sum = _mm512_dpbusd_epi32(sum, codes, inputs);
    asm volatile("" : "+v"(sum), "+v"(codes));
}
#elif defined(__AVX2__)
constexpr int SUMS = 12, EACH = 32;
using Sum = __m256i;
inline Sum ones() { return _mm256_set1_epi8(1); }
inline void add_products(Sum& sum, Sum& codes, Sum inputs) {
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, inputs));
    asm volatile("" : "+x"(sum), "+x"(codes));
}
#else
constexpr int SUMS = 4, EACH = 1;
using Sum = int32_t;
inline Sum ones() { return 1; }
inline void add_products(Sum& sum, Sum& codes, Sum inputs) {
    sum += codes * inputs;
    asm volatile("" : "+r"(sum), "+r"(codes));
}
#endif

#ifdef FORETOKEN_AMX
constexpr int TILE_SUMS = 4, TILE_PRODUCTS = TILE_ROWS * LANES * SPAN;

// Registers 0 to 3 hold sums, 4 the inputs of a group of 32 and 5 its codes.
struct alignas(64) PeakShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, SPAN, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, SPAN / CHUNK};
};

void add_in_tiles(int64_t rounds) {
    const PeakShapes shapes;
    asm volatile(
        "ldtilecfg %0\n\ttilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3\n\t"
        "tilezero %%tmm4\n\ttilezero %%tmm5" ::"m"(shapes));
    for (int64_t round = 0; round < rounds; ++round)
        asm volatile(
            "tdpbssd %tmm5, %tmm4, %tmm0\n\ttdpbssd %tmm5, %tmm4, %tmm1\n\t"
            "tdpbssd %tmm5, %tmm4, %tmm2\n\ttdpbssd %tmm5, %tmm4, %tmm3");
    asm volatile("tilerelease");
}
#endif

}  // namespace

extern "C" {

int foretoken_peak_interface() { return 2; }

// The same in tiles of 16 rows; 0 without AMX.
int64_t foretoken_peak_tiles(int64_t rounds, int threads) {
#ifdef FORETOKEN_AMX
    if (has_tiles()) {
#pragma omp parallel num_threads(threads)
        add_in_tiles(rounds);
        return rounds * TILE_SUMS * TILE_PRODUCTS * threads;
    }
#endif
    return 0;
}

// Does `rounds` rounds on each thread; how many products that were.
int64_t foretoken_peak(int64_t rounds, int threads) {
#pragma omp parallel num_threads(threads)
    {
        Sum sums[SUMS] = {}, codes = ones();
        const Sum inputs = ones();
        for (int64_t round = 0; round < rounds; ++round)
            for (int i = 0; i < SUMS; ++i) add_products(sums[i], codes, inputs);
    }
    return rounds * SUMS * EACH * threads;
}
}
