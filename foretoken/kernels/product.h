// A matrix with the function that multiplies by it, of whatever library: `foretoken_grouped_multiply` says what it takes.

#ifndef FORETOKEN_PRODUCT_H
#define FORETOKEN_PRODUCT_H

#include <cstdint>

struct foretoken_product {
    bool (*multiply)(const void* x, int64_t rows, int64_t width, const void* parts, int num_parts, void* out,
                     int64_t stride, int is_bf16, int threads);
    const void *parts, *bias;  // `bias` [num_outputs] or null
    int64_t width, num_outputs;
    int32_t num_parts;
};

#endif
