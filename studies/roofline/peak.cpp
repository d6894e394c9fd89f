// As many products of codes and inputs as the processor can add up: the instruction by which `grouped.cpp` multiplies,
// on numbers that stay in registers.

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
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

}  // namespace

extern "C" {

int foretoken_peak_interface() { return 1; }

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
