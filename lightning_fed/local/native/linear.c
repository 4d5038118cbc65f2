/* Steps of a large linear layer with as little memory traffic as possible: its weight is read once forwards, once for
   the gradient of its inputs, and once more when it moves. For small batches, whose arithmetic hides behind the
   memory. Called by linear.py, which puts linear.h in the place of its includes. EXPORT comes from core/compiler.py. */

#include <stdlib.h>

#define ROWS 4 /* of the weight that go together */
#define MOST 8 /* samples */
/* a statement for each size of batches, which is then a constant wherever it is inlined */
#define CASE(size, ...) case size: { enum { BATCH = size }; __VA_ARGS__; return; }
#define EACH_BATCH(...) \
    switch (batch) { CASE(1, __VA_ARGS__) CASE(2, __VA_ARGS__) CASE(4, __VA_ARGS__) CASE(8, __VA_ARGS__) }
#define LOAD(from) (*(const VEC *)(from))
#define INLINE static inline __attribute__((always_inline))
#if defined(__x86_64__) && defined(__GLIBC__)
#define CLONED EXPORT __attribute__((target_clones("avx512f", "fma", "default")))
#else
#define CLONED EXPORT
#endif

#define T float
#define VEC vec_float32
#define NAME(x) x##_float32
#include "linear.h"
#undef T
#undef VEC
#undef NAME

#define T double
#define VEC vec_float64
#define NAME(x) x##_float64
#include "linear.h"
