// Evenly spaced grids (ecq): the operations of src/gradwire/kernels/reference/grid.py, bit for bit.
//
// Each instruction set fills in one `GridKernels` table; grid.cpp chooses by the name of the kernels in use.
#pragma once

#include <cfloat>

#include "kernels.h"

namespace gradwire {

constexpr int kGridLimit = 1 << 24;  // largest multiple: fp32 holds all integers up to it

struct Grid {
    float decay, inverse, shift;  // inverse = 1/step
    int largest;                  // magnitude of a symbol
    const float* values;          // what each of the 2*largest+1 symbols stands for
    uint64_t seed;
    bool stochastic;
    // For quantize_rans: what multiples beyond the symbols' range stand for, where that needs no further rounding.
    bool settle;
    float step, offset;

    float beyond(int multiple) const {
        const float a = (float(multiple < 0 ? -multiple : multiple) + offset) * step;
        const float limited = a < FLT_MAX ? a : FLT_MAX;
        return multiple < 0 ? -limited : limited;
    }
};

// Entries beyond the symbols' range, in order of position, as long as there is room.
struct Outliers {
    int64_t* positions;
    int32_t* multiples;
    size_t count, capacity;

    // The multiple that is left for the entry's symbol.
    int add(uint64_t position, int multiple, int largest) {
        if (count == capacity) return multiple < 0 ? -largest : largest;
        positions[count] = int64_t(position);
        multiples[count++] = multiple;
        return 0;
    }
};

struct GridKernels {
    // Symbols of u = g + decay * memory, limited to the finite range.
    void (*quantize)(const Grid& g, const Stream& s, uint8_t* symbols, Outliers& outliers);
    // The same and rANS; it stops before a u that is not finite. `scratch` has room for the symbols of a chunk.
    Coded (*quantize_rans)(const Grid& g, const Stream& s, const RansTable& t, int lanes, uint8_t* out,
                           uint8_t* scratch, Outliers& outliers);
};

extern const GridKernels portable_grid;
#ifdef GRADWIRE_X86
extern const GridKernels avx2_grid, avx512_grid;
#endif
#ifdef GRADWIRE_NEON
extern const GridKernels neon_grid;
#endif
const GridKernels& grid_kernels();  // the ones in use

// What a grid comes to on a sorted sample of n entries and `zeros` more that are zero: see reference/grid.py.
// `first` and `second` are running sums of x and x^2, `logs` holds log2(i) for i up to kLogs (and 0 for i = 0).
constexpr int kLogs = 1 << 16;
struct Measured {
    double bits, outlier_bits, error;
    int largest, offsets[2];
};
bool grid_measure(const float* x, const double* first, const double* second, size_t n, int64_t zeros,
                  const double* logs, float step, float shift, Measured& out);

// The grid with the fewest bits at this squared error of the sample, of which `energy` is the sum of squares: what
// convert/grid_search.py does, to the bit. False where it does not end in a grid.
struct Sample {
    const float* x;  // sorted
    const double *first, *second;
    size_t n;
    int64_t zeros;
    const double* logs;
    double energy;
};
bool grid_search(const Sample& sample, double error, float& step, float& shift, Measured& out);

// Running sums of x and x^2, from 0 on: n + 1 numbers each.
void running_sums(const float* x, size_t n, double* first, double* second);

// x[positions] += values; positions are below n.
void add_at(float* x, const int64_t* positions, const float* values, size_t count);

// The codes of outliers (docs/wire-format.md). `out` has room for all of them.
size_t pack_outliers(const int64_t* gaps, const uint8_t* negative, const int64_t* excesses, size_t n, int a, int b,
                     uint8_t* out);
bool unpack_outliers(const uint8_t* data, size_t length, size_t n, int64_t elements, int largest, int a, int b,
                     int64_t* positions, int32_t* multiples);

}  // namespace gradwire
