// Sixteen numbers at a time: one register of AVX-512, or as many smaller ones as it takes. GCC keeps a vector that is
// wider than a register in memory, so there they are separate vectors of the processor's own width.

#ifndef FORETOKEN_LANES_H
#define FORETOKEN_LANES_H

#include <cstdint>
#include <cstring>

// For what the compiler would otherwise call with its vectors in memory.
#define FORETOKEN_INLINE inline __attribute__((always_inline))

namespace {

constexpr int LANES = 16;  // numbers of a vector, and outputs of a block of weights

#if defined(__AVX512F__)

typedef float Lanes __attribute__((vector_size(64)));
typedef int32_t Words __attribute__((vector_size(64)));

// `yes` in the lanes where a comparison holds, else `no`.
template <class V>
inline V choose(Words holds, V yes, V no) {
    return holds ? yes : no;
}

// 64 bytes at `at`, which need not lie at a multiple of 64.
template <class V>
inline V vector_at(const void* at) {
    V vector;
    std::memcpy(&vector, at, sizeof vector);
    return vector;
}

template <class V>
inline void put_vector(const V& from, void* to) {
    std::memcpy(to, &from, sizeof from);
}

#else

#if defined(__AVX__)
constexpr int PARTS = 2;
#else
constexpr int PARTS = 4;
#endif
constexpr int PART_LANES = LANES / PARTS;

template <class N>
struct PartOf {
    typedef N Vector __attribute__((vector_size(PART_LANES * sizeof(N))));
};

// As a vector of 16: a conversion between two kinds keeps the bits, a comparison is all ones where it holds.
template <class N>
struct Sixteen {
    using Part = typename PartOf<N>::Vector;
    Part parts[PARTS];

    Sixteen() = default;
    template <class Other>
    explicit Sixteen(const Sixteen<Other>& bits) {
        for (int p = 0; p < PARTS; ++p) parts[p] = Part(bits.parts[p]);
    }
    N operator[](int lane) const { return parts[lane / PART_LANES][lane % PART_LANES]; }
};

using Lanes = Sixteen<float>;
using Words = Sixteen<int32_t>;

// The type of a number beside vectors of `N`, which follows from theirs.
template <class N>
struct NumberOf {
    using Type = N;
};
template <class N>
using Number = typename NumberOf<N>::Type;

#define FORETOKEN_OPERATOR(op, Result)                                              \
    template <class N>                                                              \
    FORETOKEN_INLINE Result operator op(const Sixteen<N>& a, const Sixteen<N>& b) { \
        Result made;                                                                \
        for (int p = 0; p < PARTS; ++p) made.parts[p] = a.parts[p] op b.parts[p];   \
        return made;                                                                \
    }                                                                               \
    template <class N>                                                              \
    FORETOKEN_INLINE Result operator op(const Sixteen<N>& a, Number<N> b) {         \
        Result made;                                                                \
        for (int p = 0; p < PARTS; ++p) made.parts[p] = a.parts[p] op b;            \
        return made;                                                                \
    }                                                                               \
    template <class N>                                                              \
    FORETOKEN_INLINE Result operator op(Number<N> a, const Sixteen<N>& b) {         \
        Result made;                                                                \
        for (int p = 0; p < PARTS; ++p) made.parts[p] = a op b.parts[p];            \
        return made;                                                                \
    }
FORETOKEN_OPERATOR(+, Sixteen<N>)
FORETOKEN_OPERATOR(-, Sixteen<N>)
FORETOKEN_OPERATOR(*, Sixteen<N>)
FORETOKEN_OPERATOR(/, Sixteen<N>)
FORETOKEN_OPERATOR(&, Sixteen<N>)
FORETOKEN_OPERATOR(|, Sixteen<N>)
FORETOKEN_OPERATOR(<<, Sixteen<N>)
FORETOKEN_OPERATOR(>>, Sixteen<N>)
FORETOKEN_OPERATOR(<, Words)
FORETOKEN_OPERATOR(>, Words)
FORETOKEN_OPERATOR(<=, Words)
FORETOKEN_OPERATOR(>=, Words)
FORETOKEN_OPERATOR(==, Words)
FORETOKEN_OPERATOR(!=, Words)
#undef FORETOKEN_OPERATOR

FORETOKEN_INLINE Lanes operator-(const Lanes& a) {
    Lanes made;
    for (int p = 0; p < PARTS; ++p) made.parts[p] = -a.parts[p];
    return made;
}

template <class Other>
FORETOKEN_INLINE void operator+=(Lanes& a, const Other& b) {
    a = a + b;
}

template <class Other>
FORETOKEN_INLINE void operator*=(Lanes& a, const Other& b) {
    a = a * b;
}

// `yes` in the lanes where a comparison holds, else `no`.
template <class N>
FORETOKEN_INLINE Sixteen<N> choose(const Words& holds, const Sixteen<N>& yes, const Sixteen<N>& no) {
    Sixteen<N> made;
    for (int p = 0; p < PARTS; ++p) made.parts[p] = holds.parts[p] ? yes.parts[p] : no.parts[p];
    return made;
}

// 64 bytes at `at`, which need not lie at a multiple of 64: a register at a time, as GCC copies what is larger in small
// pieces by way of memory.
template <class V>
FORETOKEN_INLINE V vector_at(const void* at) {
    V vector;
    for (int p = 0; p < PARTS; ++p)
        std::memcpy(&vector.parts[p], static_cast<const char*>(at) + p * sizeof vector.parts[p], sizeof vector.parts[p]);
    return vector;
}

template <class V>
FORETOKEN_INLINE void put_vector(const V& from, void* to) {
    for (int p = 0; p < PARTS; ++p)
        std::memcpy(static_cast<char*>(to) + p * sizeof from.parts[p], &from.parts[p], sizeof from.parts[p]);
}

#endif

inline Words lane_numbers() {
    constexpr int32_t NUMBERS[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Words made;
    std::memcpy(&made, NUMBERS, sizeof made);
    return made;
}

}  // namespace

#endif
