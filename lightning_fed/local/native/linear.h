/* The three passes over a large weight, for one type of numbers T; see linear.c.

   w (out, in) is the weight, x (batch, in) the inputs, dy (batch, out) the gradients of the outputs, all row by row.
   Four rows go together: what is read of x and dx serves all of them. `batch` is a constant wherever these are inlined. */

typedef T VEC __attribute__((vector_size(32), aligned(sizeof(T)), may_alias));
enum { NAME(WIDTH) = 32 / sizeof(T) };

/* y = x w^T, for the outputs first..last */
INLINE void NAME(multiply)(const T *restrict w, const T *restrict x, T *restrict y, size_t in, size_t out,
                           size_t first, size_t last, const int rows, const int batch) {
    for (size_t r = first; r + rows <= last; r += rows) {
        const T *row = w + r * in;
        VEC sums[ROWS][MOST] = {0};
        size_t j = 0;
        for (; j + NAME(WIDTH) <= in; j += NAME(WIDTH)) {
            for (int k = 0; k < batch; k++) {
                VEC inputs = LOAD(x + k * in + j);
                for (int i = 0; i < rows; i++) sums[i][k] += LOAD(row + i * in + j) * inputs;
            }
        }
        for (int i = 0; i < rows; i++) {
            for (int k = 0; k < batch; k++) {
                T sum = 0;
                for (int l = 0; l < NAME(WIDTH); l++) sum += sums[i][k][l];
                for (size_t rest = j; rest < in; rest++) sum += row[i * in + rest] * x[k * in + rest];
                y[k * out + r + i] = sum;
            }
        }
    }
}

/* dx += dy w, for the inputs first..last and the outputs from..to */
INLINE void NAME(slope)(const T *restrict w, const T *restrict dy, T *restrict dx, size_t in, size_t out,
                        size_t first, size_t last, size_t from, size_t to, const int rows, const int batch) {
    for (size_t r = from; r + rows <= to; r += rows) {
        const T *row = w + r * in;
        T slopes[MOST][ROWS];
        for (int k = 0; k < batch; k++)
            for (int i = 0; i < rows; i++) slopes[k][i] = dy[k * out + r + i];
        #pragma omp simd
        for (size_t j = first; j < last; j++) {
            for (int k = 0; k < batch; k++) {
                T sum = dx[k * in + j];
                for (int i = 0; i < rows; i++) sum += slopes[k][i] * row[i * in + j];
                dx[k * in + j] = sum;
            }
        }
    }
}

/* w = keep * w + pull * target - lr * dy^T x, for the inputs first..last and the outputs from..to */
INLINE void NAME(step)(T *restrict w, const T *restrict target, const T *restrict x, const T *restrict dy, size_t in,
                       size_t out, size_t first, size_t last, T keep, T pull, T lr, size_t from, size_t to,
                       const int rows, const int batch) {
    for (size_t r = from; r + rows <= to; r += rows) {
        T *row = w + r * in;
        const T *pulls = target + r * in;
        T slopes[MOST][ROWS];
        for (int k = 0; k < batch; k++)
            for (int i = 0; i < rows; i++) slopes[k][i] = lr * dy[k * out + r + i];
        #pragma omp simd
        for (size_t j = first; j < last; j++) {
            for (int i = 0; i < rows; i++) {
                T new = keep * row[i * in + j] + pull * pulls[i * in + j];
                for (int k = 0; k < batch; k++) new -= slopes[k][i] * x[k * in + j];
                row[i * in + j] = new;
            }
        }
    }
}

CLONED void NAME(forward)(const T *w, const T *x, T *y, size_t batch, size_t in, size_t out, size_t first,
                          size_t last) {
    size_t even = first + (last - first) / ROWS * ROWS;
    EACH_BATCH(NAME(multiply)(w, x, y, in, out, first, even, ROWS, BATCH);
               NAME(multiply)(w, x, y, in, out, even, last, 1, BATCH))
}

CLONED void NAME(backward)(const T *w, const T *dy, T *dx, size_t batch, size_t in, size_t out, size_t first,
                           size_t last) {
    size_t even = out / ROWS * ROWS;
    EACH_BATCH(NAME(slope)(w, dy, dx, in, out, first, last, 0, even, ROWS, BATCH);
               NAME(slope)(w, dy, dx, in, out, first, last, even, out, 1, BATCH))
}

CLONED void NAME(move)(T *w, const T *target, const T *x, const T *dy, size_t batch, size_t in, size_t out,
                       size_t first, size_t last, T keep, T pull, T lr) {
    size_t even = out / ROWS * ROWS;
    EACH_BATCH(NAME(step)(w, target, x, dy, in, out, first, last, keep, pull, lr, 0, even, ROWS, BATCH);
               NAME(step)(w, target, x, dy, in, out, first, last, keep, pull, lr, even, out, 1, BATCH))
}
