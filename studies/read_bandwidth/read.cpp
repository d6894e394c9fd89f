// Reads memory in a line, as a product reads its weights, and adds up what it read: a sum that is checked cannot be
// left out by the compiler.

#include <cstdint>

extern "C" {

int foretoken_read_interface() { return 1; }

// The sum of the 32-bit words at `from`, each thread reading one part of them from its beginning to its end.
uint32_t foretoken_read(const uint32_t* from, int64_t num_words, int threads) {
    uint32_t sum = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : sum)
    for (int64_t i = 0; i < num_words; ++i) sum += from[i];
    return sum;
}
}
