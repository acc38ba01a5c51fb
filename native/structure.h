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

struct Grid;
struct Outliers;

constexpr int kRowsTogether = 8;  // that are projected side by side
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

// Which entries of a row go to which class, for 64 entries after the other: parts of one class, in ascending order of
// classes, up to the `ends` of these 64.
struct ClassPart {
    uint64_t mask;  // of the 64 entries
    uint16_t offset;  // entries of this class before these, in this row
    uint8_t of_class, number;
};
struct ClassParts {
    std::vector<ClassPart> parts;
    std::vector<uint32_t> ends;
};

// Rows to classes and back, by parts; null where a loop over bytes is as good.
struct ClassPartLoops {
    // `positions` has where the symbols of each class go, and `limits` where those of others begin.
    void (*split)(const ClassParts& row, const uint8_t* symbols, size_t width, uint8_t* streams,
                  const int64_t* positions, const int64_t* limits);
    void (*merge)(const ClassParts& row, const uint8_t* streams, size_t size, const int64_t* positions,
                  const uint8_t* zeros, size_t width, uint8_t* symbols);
};

// Entries of a tensor that is not transformed, on their way to symbols and to what these leave out.
struct Entries {
    const float *u, *prediction;  // the latter may be null
    size_t count;
    uint64_t first;  // position of the first in the tensor
    const float* values;  // as those of Rebuild
    uint8_t* symbols;
    float* memory;
};

struct StructureLoops {
    void (*compensate)(const Compensated& source, size_t start, size_t count, float* x);
    void (*transform)(float* x, size_t count, const Axis* axes, int axis_count, int kernel);
    // Rows first … last−1 of the rebuilt tensor, to `out`, which is where row `first` goes; `out` may be the memory.
    void (*rebuild)(const Rebuild& r, size_t first, size_t last, float* out);
    void (*predict)(float* x, size_t count, size_t width, const float* left, const int8_t* right, int rank, float sign);
    void (*energies)(const float* x, size_t count, size_t width, double* rows, double* places);
    void (*project_rows)(const float* x, size_t rows, size_t width, const float* basis, float* out);
    void (*quantize)(const Grid& g, const Entries& e, Outliers& outliers);
    // Adds xᵀ·left of at most kRowsTogether rows to `right`.
    void (*add_columns)(const float* x, size_t rows, size_t width, const float* left, float* right);
    void (*count_symbols)(const uint8_t* symbols, size_t n, int64_t* counts);  // adds to 256 numbers
    void (*gram)(const float* a, const float* b, size_t count, double* out);
    ClassPartLoops parts;
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
// The energies of what is left of x.
void measure_remainder(const float* x, size_t count, size_t width, const float* left, const int8_t* right, int rank,
                       double* rows, double* places, int threads);
// What is left at `runs` runs of `length` entries, of more entries than these are; the rank may be 0.
void sample_remainder(const float* x, size_t count, size_t width, const float* left, const int8_t* right, int rank,
                      size_t runs, size_t length, float* out);
void axis_energies(const float* x, size_t count, size_t width, double* rows, double* places, int threads);
void project_rows(const float* x, size_t rows, size_t width, const float* basis, float* out, int threads);
// Both in one pass: left = x·basis and right = xᵀ·left.
void project_both(const float* x, size_t rows, size_t width, const float* basis, float* left, float* right,
                  int threads);
void gram(const float* a, const float* b, size_t count, double* out);

}  // namespace gradwire
