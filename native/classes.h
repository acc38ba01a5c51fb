// Classes of entries by the scales of their row, column and coefficient (docs/wire-format.md, codec 8).
//
// The symbols of a class stand together in a frame, in the order of the tensor: quantizing shares them out, and decoding
// puts rows together again. Rows of one scale have the same classes in the same places.
#pragma once

#include "grid.h"
#include "structure.h"

namespace gradwire {

// The class of an entry is the sum of its scales less the base, limited.
struct Classes {
    const int16_t *rows, *columns, *coefficients;
    size_t row_count, column_count, coefficient_count;
    int base, number;

    size_t width() const { return column_count * coefficient_count; }
};

// `positions` has where in `streams` the next symbol of each class is, and is moved on. False if a class has no more:
// then it has been asked for entries that it does not have.
bool merge_classes(const Classes& c, const uint8_t* streams, size_t size, int64_t* positions, const uint8_t* zeros,
                   size_t first_row, size_t count, uint8_t* symbols);

// How many entries each class has among `count`, from row `first_row` on.
void count_classes(const Classes& c, size_t first_row, size_t count, int64_t* counts);

// What is quantized: x less a prediction, whose rank may be 0. With `memory`, what symbols and outliers leave out of the
// source goes there, as `Rebuild` says; without a source, x is what they are taken from, and there is no transform.
struct Remainder {
    const float* x;
    Rebuild rows;  // but symbols and outliers
    float* memory;  // or null
};

// Symbols of x in order, and class by class; how often each class has each of 2·largest+1 symbols; and the outliers.
void quantize_classes(const Grid& g, const Classes& c, const Remainder& r, uint8_t* symbols, uint8_t* streams,
                      int64_t* counts, Outliers& outliers, int threads);

// What makes the values of a tensor from its streams; `Rebuild` without symbols, factors of rows or positions by part.
struct MergedRebuild {
    Rebuild all;  // but `symbols` and `left`
    const Classes* classes;
    const uint8_t* streams;
    const uint8_t* zeros;  // of each class: what makes its symbols those of the grid
    const int8_t* rows;  // rank integers for each row
    const float* scales;  // of each term
};
void rebuild_classes(const MergedRebuild& m, float* out, int threads);

}  // namespace gradwire
