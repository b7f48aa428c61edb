/* Mean and variance of every channel. */

#include "rows.h"

static void moments_row(const float *restrict y, const float *restrict center, float *restrict sums,
                        float *restrict squares, i64 n) {
#pragma omp simd
  for (i64 c = 0; c < n; c++) {
    const float d = y[c] - center[c];
    sums[c] += d;
    squares[c] += d * d;
  }
}

static void moments_innermost(const float *y, Extent s, double *sums, double *squares, const float *shift,
                              int threads) {
  const Joined j = joined(s);
  const i64 w = j.width, block = block_of(j, s), blocks = (j.rows + block - 1) / block;
  double *partial = calloc((size_t)threads * 2 * w, sizeof(double));
  float *center = repeated(row_buffers(j, 1), shift, s, j);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int t = 0; t < threads; t++) {
    double *total = partial + (i64)t * 2 * w;
    float *sum = row_buffers(j, 2), *square = sum + j.pitch;
    for (i64 k = blocks * t / threads; k < blocks * (t + 1) / threads; k++) {
      memset(sum, 0, 2 * j.pitch * sizeof(float));
      for (i64 r = k * block; r < at_most((k + 1) * block, j.rows); r++)
        moments_row(y + r * w, center, sum, square, length_of(j, s, r));
      for (i64 c = 0; c < w; c++) total[c] += sum[c], total[w + c] += square[c];
    }
    free(sum);
  }
  memset(sums, 0, s.channels * sizeof(double));
  memset(squares, 0, s.channels * sizeof(double));
  for (int t = 0; t < threads; t++) {
    gathered(sums, partial + (i64)t * 2 * w, s, j);
    gathered(squares, partial + ((i64)t * 2 + 1) * w, s, j);
  }
  free(center);
  free(partial);
}

static void moments_of_images(const float *y, Extent s, double *sums, double *squares, const float *shift,
                              int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 c = 0; c < s.channels; c++) {
    double first = 0, second = 0;
    for (i64 o = 0; o < s.outer; o++) {
      const float *row = y + (o * s.channels + c) * s.inner;
      for (i64 start = 0; start < s.inner; start += CHUNK) {
        const i64 end = at_most(start + CHUNK, s.inner);
        float a = 0, b = 0;
#pragma omp simd reduction(+ : a, b)
        for (i64 i = start; i < end; i++) {
          const float d = row[i] - shift[c];
          a += d;
          b += d * d;
        }
        first += a;
        second += b;
      }
    }
    sums[c] = first;
    squares[c] = second;
  }
}

/* The same in double, for squares that are beyond a float (values of 1e18 and more). */
static void moments_of_large(const float *y, Extent s, double *sums, double *squares, const float *shift,
                             int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 c = 0; c < s.channels; c++) {
    sums[c] = squares[c] = 0;
    for (i64 k = 0; k < s.outer * s.inner; k++) {
      const double d = (double)y[(k / s.inner * s.channels + c) * s.inner + k % s.inner] - shift[c];
      sums[c] += d, squares[c] += d * d;
    }
  }
}

#define FAR 64 /* squared distance from the mean, in variances */

/* Moves every shift that is far from its channel's mean to the mean, and returns whether there was one: the variance
   would be a small difference of two large sums. */
static int moved(i64 channels, double count, const double *sums, const double *squares, float *shift) {
  int any = 0;
  for (i64 c = 0; c < channels; c++) {
    const double offset = sums[c] / count, spread = squares[c] / count - offset * offset;
    if (offset * offset > FAR * spread) shift[c] = (float)(shift[c] + offset), any = 1;
  }
  return any;
}

/* Mean, 1 / sqrt(var + eps), the unbiased variance (NULL: not needed), and the running mean and variance (NULL: none)
   moved towards them by `share`. The sums are those of y - shift, where shift is the channel's first value: one pass,
   with little cancellation. A second pass follows if that value is an outlier. */
void statistics(const float *y, Extent s, double eps, float *mean, float *inverse, float *unbiased_var,
                float *running_mean, float *running_var, double share, int threads) {
  double *sums = malloc(2 * s.channels * sizeof(double)), *squares = sums + s.channels;
  const double count = (double)s.outer * s.inner;
  for (i64 c = 0; c < s.channels; c++) mean[c] = y[c * s.inner];
  void (*moments)(const float *, Extent, double *, double *, const float *, int) =
      s.inner == 1 ? moments_innermost : moments_of_images;
  moments(y, s, sums, squares, mean, threads);
  if (!all_finite(squares, s.channels)) (moments = moments_of_large)(y, s, sums, squares, mean, threads);
  if (moved(s.channels, count, sums, squares, mean)) moments(y, s, sums, squares, mean, threads);
  for (i64 c = 0; c < s.channels; c++) {
    const double offset = sums[c] / count, spread = squares[c] / count - offset * offset;
    const double variance = spread > 0 || spread != spread ? spread : 0;
    mean[c] = (float)(mean[c] + offset);
    inverse[c] = (float)(1 / sqrt(variance + eps));
    const double unbiased = variance * (count / (count > 1 ? count - 1 : 1));
    if (unbiased_var) unbiased_var[c] = (float)unbiased;
    if (running_mean) {
      running_mean[c] = (float)(running_mean[c] + share * (mean[c] - running_mean[c]));
      running_var[c] = (float)(running_var[c] + share * (unbiased - running_var[c]));
    }
  }
  free(sums);
}
