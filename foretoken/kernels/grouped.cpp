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
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <vector>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define FORETOKEN_VNNI 1
#include <immintrin.h>
#elif defined(__AVX2__)
#define FORETOKEN_AVX2 1
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;      // outputs of a block
constexpr int SPAN = 32;       // inputs that share a scale of activations
constexpr int CHUNK = 4;       // inputs of one output that stand together: what one lane of vpdpbusd multiplies
constexpr int FEW_ROWS = 32;   // up to here one thread codes the activations: waking others would take longer

struct Weights {
    const uint8_t* codes;     // [blocks, groups, GROUP / 4, 16, 4]; 4 bits: the second half of a group in the high nibbles
    const void* scales;       // [blocks, groups, 16], float32 or float16
    const void* minimums;     // the same, or null
    int64_t num_outputs, num_spans;
    bool is_half;             // scales and minimums are float16
};

struct Activations {
    const int8_t* codes;      // [rows, spans * 32]
    const float* scales;      // [rows, spans]
    const int32_t* offsets;   // [rows, groups]: -zero * sum of the codes of a group
    const float* sums;        // [rows, groups]
};

// ---- float16, for processors without an instruction for it

inline float from_half(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000u) << 16, exponent = (half >> 10) & 31u, fraction = half & 1023u;
    if (exponent == 0) {
        const float small = float(fraction) * 5.9604644775390625e-8f;  // 2^-24
        return sign ? -small : small;
    }
    const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

#ifdef FORETOKEN_VNNI

inline __m512 numbers_at(const void* from, int64_t index, bool is_half) {
    if (is_half) {
        const auto* at = static_cast<const uint16_t*>(from) + index;
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
    }
    return _mm512_loadu_ps(static_cast<const float*>(from) + index);
}

inline __m512i four_inputs(const int8_t* at) {
    int32_t four;
    std::memcpy(&four, at, sizeof four);
    return _mm512_set1_epi32(four);
}

// ROWS rows against the 16 outputs of one block: the codes are loaded once for all rows.
template <int ROWS, int BITS, int GROUP>
void multiply_block(const Weights& w, const Activations& x, int64_t block, int64_t first_row, float* out, int64_t stride) {
    const int64_t groups = w.num_spans * (SPAN / GROUP), width = w.num_spans * SPAN;
    const uint8_t* codes = w.codes + block * groups * (LANES * GROUP * BITS / 8);
    const int8_t* inputs = x.codes + first_row * width;
    const __m512i nibble = _mm512_set1_epi8(15);
    __m512 total[ROWS];
    for (int r = 0; r < ROWS; ++r) total[r] = _mm512_setzero_ps();
    for (int64_t g = 0; g < groups; ++g, inputs += GROUP) {
        __m512i dots[ROWS];
        for (int r = 0; r < ROWS; ++r) dots[r] = _mm512_set1_epi32(x.offsets[(first_row + r) * groups + g]);
        if (BITS == 8) {
            for (int j = 0; j < GROUP / CHUNK; ++j, codes += 64) {
                const __m512i code = _mm512_loadu_si512(codes);
                for (int r = 0; r < ROWS; ++r)
                    dots[r] = _mm512_dpbusd_epi32(dots[r], code, four_inputs(inputs + r * width + CHUNK * j));
            }
        } else {
            for (int j = 0; j < GROUP / CHUNK / 2; ++j, codes += 64) {
                const __m512i both = _mm512_loadu_si512(codes);
                const __m512i low = _mm512_and_si512(both, nibble);
                const __m512i high = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
                for (int r = 0; r < ROWS; ++r) {
                    const int8_t* at = inputs + r * width + CHUNK * j;
                    dots[r] = _mm512_dpbusd_epi32(dots[r], low, four_inputs(at));
                    dots[r] = _mm512_dpbusd_epi32(dots[r], high, four_inputs(at + GROUP / 2));
                }
            }
        }
        const int64_t place = (block * groups + g) * LANES, span = g * GROUP / SPAN;
        const __m512 scale = numbers_at(w.scales, place, w.is_half);
        if (w.minimums == nullptr) {
            for (int r = 0; r < ROWS; ++r) {
                const __m512 x_scale = _mm512_set1_ps(x.scales[(first_row + r) * w.num_spans + span]);
                const __m512 part = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(dots[r]));
                total[r] = _mm512_add_ps(total[r], _mm512_mul_ps(part, x_scale));
            }
        } else {
            const __m512 minimum = numbers_at(w.minimums, place, w.is_half);
            for (int r = 0; r < ROWS; ++r) {
                const __m512 x_scale = _mm512_set1_ps(x.scales[(first_row + r) * w.num_spans + span]);
                const __m512 sum = _mm512_set1_ps(x.sums[(first_row + r) * groups + g]);
                const __m512 part = _mm512_mul_ps(scale, _mm512_cvtepi32_ps(dots[r]));
                const __m512 full = _mm512_add_ps(part, _mm512_mul_ps(minimum, sum));
                total[r] = _mm512_add_ps(total[r], _mm512_mul_ps(full, x_scale));
            }
        }
    }
    const int64_t left = w.num_outputs - block * LANES;
    const __mmask16 mask = left >= LANES ? 0xffff : (__mmask16)((1u << left) - 1);
    for (int r = 0; r < ROWS; ++r) _mm512_mask_storeu_ps(out + (first_row + r) * stride + block * LANES, mask, total[r]);
}

#else

// Adds the products of 16 outputs with four inputs to `dots`; `code` is 64 bytes, [16, 4].
inline void add_products(int32_t* dots, const uint8_t* code, const int8_t* inputs) {
#ifdef FORETOKEN_AVX2
    int32_t four;
    std::memcpy(&four, inputs, sizeof four);
    const __m256i x = _mm256_cvtepi8_epi16(_mm_set1_epi32(four));
    __m256i pairs[4];  // of four outputs each, two sums to an output; 16 bits in, so that nothing saturates
    for (int i = 0; i < 4; ++i)
        pairs[i] = _mm256_madd_epi16(
            _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(code + 16 * i))), x);
    for (int i = 0; i < 2; ++i) {
        auto* at = reinterpret_cast<__m256i*>(dots + 8 * i);
        const __m256i eight = _mm256_permute4x64_epi64(_mm256_hadd_epi32(pairs[2 * i], pairs[2 * i + 1]), 0xd8);
        _mm256_storeu_si256(at, _mm256_add_epi32(_mm256_loadu_si256(at), eight));
    }
#else
    for (int n = 0; n < LANES; ++n)
        for (int i = 0; i < CHUNK; ++i) dots[n] += int32_t(code[CHUNK * n + i]) * int32_t(inputs[i]);
#endif
}

inline float number_at(const void* from, int64_t index, bool is_half) {
    return is_half ? from_half(static_cast<const uint16_t*>(from)[index]) : static_cast<const float*>(from)[index];
}

template <int ROWS, int BITS, int GROUP>
void multiply_block(const Weights& w, const Activations& x, int64_t block, int64_t first_row, float* out, int64_t stride) {
    const int64_t groups = w.num_spans * (SPAN / GROUP), width = w.num_spans * SPAN;
    const uint8_t* codes = w.codes + block * groups * (LANES * GROUP * BITS / 8);
    float total[ROWS][LANES] = {};
    for (int64_t g = 0; g < groups; ++g) {
        int32_t dots[ROWS][LANES];
        for (int r = 0; r < ROWS; ++r) std::fill_n(dots[r], LANES, x.offsets[(first_row + r) * groups + g]);
        for (int j = 0; j < GROUP * BITS / 8 / CHUNK; ++j, codes += 64) {
            uint8_t low[64], high[64];
            if (BITS == 4)
                for (int i = 0; i < 64; ++i) low[i] = codes[i] & 15, high[i] = codes[i] >> 4;
            for (int r = 0; r < ROWS; ++r) {
                const int8_t* at = x.codes + (first_row + r) * width + g * GROUP + CHUNK * j;
                add_products(dots[r], BITS == 8 ? codes : low, at);
                if (BITS == 4) add_products(dots[r], high, at + GROUP / 2);
            }
        }
        float scale[LANES], minimum[LANES];
        for (int n = 0; n < LANES; ++n) {
            const int64_t place = (block * groups + g) * LANES + n;
            scale[n] = number_at(w.scales, place, w.is_half);
            minimum[n] = w.minimums == nullptr ? 0.0f : number_at(w.minimums, place, w.is_half);
        }
        for (int r = 0; r < ROWS; ++r) {
            const float x_scale = x.scales[(first_row + r) * w.num_spans + g * GROUP / SPAN];
            const float sum = x.sums[(first_row + r) * groups + g];
            for (int n = 0; n < LANES; ++n) {
                const float part = scale[n] * float(dots[r][n]);
                total[r][n] += (w.minimums == nullptr ? part : part + minimum[n] * sum) * x_scale;
            }
        }
    }
    const int64_t count = std::min<int64_t>(LANES, w.num_outputs - block * LANES);
    for (int r = 0; r < ROWS; ++r)
        std::copy_n(total[r], count, out + (first_row + r) * stride + block * LANES);
}

#endif

template <int BITS, int GROUP>
void multiply_rows(const Weights& w, const Activations& x, int64_t block, int64_t rows, float* out, int64_t stride) {
    int64_t row = 0;
    for (; row + 8 <= rows; row += 8) multiply_block<8, BITS, GROUP>(w, x, block, row, out, stride);
    switch (rows - row) {
        case 7: return multiply_block<7, BITS, GROUP>(w, x, block, row, out, stride);
        case 6: return multiply_block<6, BITS, GROUP>(w, x, block, row, out, stride);
        case 5: return multiply_block<5, BITS, GROUP>(w, x, block, row, out, stride);
        case 4: return multiply_block<4, BITS, GROUP>(w, x, block, row, out, stride);
        case 3: return multiply_block<3, BITS, GROUP>(w, x, block, row, out, stride);
        case 2: return multiply_block<2, BITS, GROUP>(w, x, block, row, out, stride);
        case 1: return multiply_block<1, BITS, GROUP>(w, x, block, row, out, stride);
        default: return;
    }
}

// One row of activations, 32 inputs at a time: scale = max|x| / 127, code = the nearest of x / scale, ties to even. A
// span that holds NaN or infinity gets the scale NaN and codes 0, which makes every output of the row NaN.
void code_row(const float* x, int64_t width, int64_t spans, int group, int zero, int8_t* codes, float* scales,
              int32_t* offsets, float* sums) {
    for (int64_t s = 0; s < spans; ++s) {
        float values[SPAN] = {};
        std::copy_n(x + s * SPAN, std::min<int64_t>(SPAN, width - s * SPAN), values);
        float largest = 0.0f;
        bool is_finite = true;
        for (float value : values) {
            const float size = std::fabs(value);
            is_finite &= size <= std::numeric_limits<float>::max();
            largest = size > largest ? size : largest;
        }
        const float scale = is_finite ? largest / 127.0f : std::numeric_limits<float>::quiet_NaN();
        scales[s] = scale;
        const bool has_codes = is_finite && scale > 0.0f;  // a denormal maximum may leave a scale of 0
        for (int i = 0; i < SPAN; ++i) {
            const float code = has_codes ? std::nearbyintf(values[i] / scale) : 0.0f;
            codes[s * SPAN + i] = int8_t(std::min(127.0f, std::max(-127.0f, code)));
        }
        for (int first = 0; first < SPAN; first += group) {
            int32_t sum = 0;
            for (int i = first; i < first + group; ++i) sum += codes[s * SPAN + i];
            const int64_t g = (s * SPAN + first) / group;
            offsets[g] = -zero * sum;
            sums[g] = float(sum);
        }
    }
}

}  // namespace

extern "C" {

// What the numbers below mean; a library of another interface is not used.
int foretoken_grouped_interface() { return 1; }

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

// `x` [rows, width] float32; the result goes to `out` [rows, stride], of which the first `num_outputs` columns are
// written. `bits` is 4 or 8, `group` 16 or 32. False: no memory for the activations' codes.
bool foretoken_grouped_multiply(const float* x, int64_t rows, int64_t width, const uint8_t* codes, const void* scales,
                                const void* minimums, int64_t num_outputs, int bits, int group, int zero, int is_half,
                                float* out, int64_t stride, int threads) {
    const int64_t spans = (width + SPAN - 1) / SPAN, groups = spans * (SPAN / group);
    const int64_t blocks = (num_outputs + LANES - 1) / LANES;
    try {
        std::vector<int8_t> x_codes(rows * spans * SPAN);
        std::vector<float> x_scales(rows * spans), sums(rows * groups);
        std::vector<int32_t> offsets(rows * groups);
#pragma omp parallel for num_threads(threads) schedule(static) if (rows > FEW_ROWS)
        for (int64_t t = 0; t < rows; ++t)
            code_row(x + t * width, width, spans, group, zero, &x_codes[t * spans * SPAN], &x_scales[t * spans],
                     &offsets[t * groups], &sums[t * groups]);
        const Weights w{codes, scales, minimums, num_outputs, spans, is_half != 0};
        const Activations a{x_codes.data(), x_scales.data(), offsets.data(), sums.data()};
#pragma omp parallel for num_threads(threads) schedule(static)
        for (int64_t block = 0; block < blocks; ++block) {
            if (bits == 8 && group == 32) multiply_rows<8, 32>(w, a, block, rows, out, stride);
            if (bits == 8 && group == 16) multiply_rows<8, 16>(w, a, block, rows, out, stride);
            if (bits == 4 && group == 32) multiply_rows<4, 32>(w, a, block, rows, out, stride);
            if (bits == 4 && group == 16) multiply_rows<4, 16>(w, a, block, rows, out, stride);
        }
    } catch (const std::bad_alloc&) {
        return false;
    }
    return true;
}
}
