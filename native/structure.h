// Kernels of structured frames (kernels/reference/structure.py): transforms of kernels, classes, low ranks.
//
// Traps:
// - Transform and prediction decide what a frame decodes to: sums are made from the first term to the last, products
//   and sums are rounded by themselves, and a prediction is made from 0 on and then added as one number.
// - Projections and energies are fits, whose bits may differ between instruction sets. But they may not depend on the
//   number of threads: what is added up is cut in the same places with any number of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels.h"

namespace gradwire {

constexpr int kDirections = 16;  // columns of a basis; with fewer, the others are zero

// The axes of a kernel, each with a square matrix: rows[m * size + k] is what entry m adds to result k.
struct Axis {
    int size;
    std::vector<float> rows;
    // For kernels of a few entries, where vectors of sixteen neighbours are worked on: see small_kernels().
    struct Phase {
        size_t from;  // the first entry that is needed for these sixteen, in a period
        std::vector<int32_t> index;  // what each of `size` terms takes, from there on: size × 16
        std::vector<float> factor;
    };
    std::vector<Phase> phases;
};

// Fills in the phases of all axes, if sixteen neighbours of such kernels need no more than 32 entries.
void small_kernels(std::vector<Axis>& axes, size_t kernel);

// u = gradient + decay·memory, limited to the finite range; the memory may be null.
struct Compensated {
    const float *gradient, *memory;
    float decay;
};

// What makes the values of some rows. Positions of outliers count from the first of these entries.
struct Rebuild {
    const uint8_t* symbols;  // null: the remainder is zero
    const float* values;     // with room for all 256 symbols
    int symbol_count;        // that there are
    size_t count, width;     // entries; of a row
    const int64_t* positions;
    const float* outliers;
    size_t number;
    const float* left;  // rank numbers for each of these rows
    const int8_t* right;  // rank × width
    int rank;
    const Axis* axes;
    int axis_count, kernel;  // entries of a kernel; 1: no transform
    const Compensated* source;  // null, or what values are taken from: then u − value is written
    size_t first_row = 0;  // that `symbols` and `left` begin with
    float weight = 1;      // without a source: weight·value is written, or added
    bool add = false;
    bool far = false;  // with a source: write past the caches, as Stream says
};

struct StructureLoops {
    void (*compensate)(const Compensated& source, size_t start, size_t count, float* x);
    void (*transform)(float* x, size_t count, const Axis* axes, int axis_count, int kernel);
    // Rows first … last−1 of the rebuilt tensor, to `out`, which is where row `first` goes; `out` may be the memory.
    void (*rebuild)(const Rebuild& r, size_t first, size_t last, float* out);
    void (*predict)(float* x, size_t count, size_t width, const float* left, const int8_t* right, int rank, float sign);
    void (*energies)(const float* x, size_t count, size_t width, double* rows, double* places);
    void (*project_rows)(const float* x, size_t rows, size_t width, const float* basis, float* out);
    // Of the places first … last−1 of all rows.
    void (*project_columns)(const float* x, size_t rows, size_t width, size_t first, size_t last, const float* basis,
                            float* out);
    void (*count_symbols)(const uint8_t* symbols, size_t n, int64_t* counts);  // adds to 256 numbers
    void (*gram)(const float* a, const float* b, size_t count, double* out);
};

extern const StructureLoops portable_structure;
#ifdef GRADWIRE_X86
extern const StructureLoops avx2_structure, avx512_structure;
#elif defined(GRADWIRE_NEON)  // whose vectors the portable loops are made of already
inline constexpr const StructureLoops& neon_structure = portable_structure;
#endif

const StructureLoops& structure_kernels();  // those in use

void rebuild_rows(const Rebuild& r, float* out, int threads);
// u of all entries, transformed, and its energies.
void prepare_rows(const Compensated& source, size_t count, size_t width, const std::vector<Axis>& axes, int kernel,
                  float* x, double* rows, double* places, int threads);
void add_prediction(float* x, size_t count, size_t width, const float* left, const int8_t* right, int rank, float sign,
                    int threads);
// The same, and the energies of the result.
void add_and_measure(float* x, size_t count, size_t width, const float* left, const int8_t* right, int rank, float sign,
                     double* rows, double* places, int threads);
void axis_energies(const float* x, size_t count, size_t width, double* rows, double* places, int threads);
void project_rows(const float* x, size_t rows, size_t width, const float* basis, float* out, int threads);
void project_columns(const float* x, size_t rows, size_t width, const float* basis, float* out, int threads);
void gram(const float* a, const float* b, size_t count, double* out);

}  // namespace gradwire
