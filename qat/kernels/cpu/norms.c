/* BatchNorm, clamp and quantizer in one pass; their backward in two. Without a norm, gamma and inverse are 1, and beta
   and mean are 0. */

#include "rows.h"

/* One number per channel: z = (y - mean) * inverse * gamma + beta, with inverse = 1 / sqrt(var + eps). */
typedef struct {
  const float *gamma, *beta, *mean, *inverse;
} Norm;

/* The same as z = y * alpha + shift. */
typedef struct {
  const float *mean, *alpha, *shift;
} Linear;

static Linear linear_form(Norm norm, i64 channels, float *alpha, float *shift) {
  for (i64 c = 0; c < channels; c++) {
    alpha[c] = norm.inverse[c] * norm.gamma[c];
    shift[c] = norm.beta[c] - norm.mean[c] * alpha[c];
  }
  const Linear form = {norm.mean, alpha, shift};
  return form;
}

/* ---- forward ---- */

typedef struct {
  float floor, ceiling;
} Clip;

static float codes_row(const float *restrict y, uint8_t *restrict codes, const float *restrict alpha,
                       const float *restrict shift, i64 n, Grid g, Clip clip) {
  float bad = 0;
#pragma omp simd reduction(+ : bad)
  for (i64 c = 0; c < n; c++) {
    const float q = code_of(clampf(fmaf(y[c], alpha[c], shift[c]), clip.floor, clip.ceiling), g);
    bad += q - q;
    codes[c] = as_code(q);
  }
  return bad;
}

static float codes_innermost(const float *y, uint8_t *codes, Extent s, Linear form, Grid g, Clip clip, int threads) {
  float bad = 0;
  const Joined j = joined(s);
  const i64 w = j.width;
  float *a = repeated(row_buffers(j, 2), form.alpha, s, j), *b = repeated(a + j.pitch, form.shift, s, j);
#pragma omp parallel for num_threads(threads) reduction(+ : bad) schedule(static)
  for (i64 r = 0; r < j.rows; r++) bad += codes_row(y + r * w, codes + r * w, a, b, length_of(j, s, r), g, clip);
  free(a);
  return bad;
}

static float codes_span(const float *restrict y, uint8_t *restrict codes, i64 n, float alpha, float shift, Grid g,
                        Clip clip) {
  float bad = 0;
#pragma omp simd reduction(+ : bad)
  for (i64 i = 0; i < n; i++) {
    const float q = code_of(clampf(fmaf(y[i], alpha, shift), clip.floor, clip.ceiling), g);
    bad += q - q;
    codes[i] = as_code(q);
  }
  return bad;
}

static float codes_of_images(const float *y, uint8_t *codes, Extent s, Linear form, Grid g, Clip clip, int threads) {
  float bad = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : bad) schedule(static)
  for (i64 k = 0; k < s.outer * s.channels; k++) {
    const i64 c = k % s.channels;
    bad += codes_span(y + k * s.inner, codes + k * s.inner, s.inner, form.alpha[c], form.shift[c], g, clip);
  }
  return bad;
}

void norm_quantize(const float *y, uint8_t *codes, Extent s, Norm norm, LearnedGrid q, float floor, float ceiling,
                   float *qparams, int threads) {
  const Grid g = grid_of(q);
  const Clip clip = {floor, ceiling};
  float *alpha = malloc(2 * s.channels * sizeof(float));
  const Linear form = linear_form(norm, s.channels, alpha, alpha + s.channels);
  write_qparams(qparams, g, (s.inner == 1 ? codes_innermost : codes_of_images)(y, codes, s, form, g, clip, threads));
  free(alpha);
}

/* ---- backward, first pass: sums ---- */

/* The gradient that clamp and quantizer pass at z. */
static inline float masked(float grad, float z, Grid g, Clip clip, float *slope) {
  int inside;
  *slope = slope_of(clampf(z, clip.floor, clip.ceiling), g, &inside);
  grad = inside ? grad : 0;
  grad = z > clip.floor ? grad : 0;
  return z < clip.ceiling ? grad : 0;
}

static void sums_row(const float *restrict grad, const float *restrict y, const float *restrict alpha,
                     const float *restrict shift, const float *restrict mean, float *restrict sums,
                     float *restrict products, float *restrict slopes, i64 n, Grid g, Clip clip) {
#pragma omp simd
  for (i64 c = 0; c < n; c++) {
    float slope;
    const float m = masked(grad[c], fmaf(y[c], alpha[c], shift[c]), g, clip, &slope);
    sums[c] += m;
    products[c] += m * (y[c] - mean[c]);
    slopes[c] += grad[c] * slope;
  }
}

/* Sums, per channel, of the masked gradient and of its product with y - mean; returns the sum for the step. */
static double sums_innermost(const float *grad, const float *y, Extent s, Linear form, Grid g, Clip clip, double *sums,
                             double *products, int threads) {
  double all = 0;
  const Joined j = joined(s);
  const i64 w = j.width, p = j.pitch, block = block_of(j, s), blocks = (j.rows + block - 1) / block;
  double *partial = calloc((size_t)threads * 3 * p, sizeof(double));
  float *a = repeated(row_buffers(j, 3), form.alpha, s, j), *b = repeated(a + p, form.shift, s, j);
  float *mean = repeated(b + p, form.mean, s, j);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int t = 0; t < threads; t++) {
    double *into = partial + (i64)t * 3 * p;
    float *sum = row_buffers(j, 3);
    for (i64 k = blocks * t / threads; k < blocks * (t + 1) / threads; k++) {
      memset(sum, 0, 3 * p * sizeof(float));
      for (i64 r = k * block; r < at_most((k + 1) * block, j.rows); r++)
        sums_row(grad + r * w, y + r * w, a, b, mean, sum, sum + p, sum + 2 * p, length_of(j, s, r), g, clip);
      for (i64 c = 0; c < 3 * p; c++) into[c] += sum[c];
    }
    free(sum);
  }
  memset(sums, 0, s.channels * sizeof(double));
  memset(products, 0, s.channels * sizeof(double));
  for (int t = 0; t < threads; t++) {
    const double *from = partial + (i64)t * 3 * p;
    gathered(sums, from, s, j);
    gathered(products, from + p, s, j);
    for (i64 c = 0; c < w; c++) all += from[2 * p + c];
  }
  free(a);
  free(partial);
  return all;
}

static double sums_of_images(const float *grad, const float *y, Extent s, Linear form, Grid g, Clip clip, double *sums,
                             double *products, int threads) {
  double all = 0, *slopes = malloc(s.channels * sizeof(double));
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 c = 0; c < s.channels; c++) {
    const float alpha = form.alpha[c], shift = form.shift[c], mean = form.mean[c];
    double first = 0, second = 0, third = 0;
    for (i64 o = 0; o < s.outer; o++) {
      const i64 at = (o * s.channels + c) * s.inner;
      for (i64 start = 0; start < s.inner; start += CHUNK) {
        const i64 end = at_most(start + CHUNK, s.inner);
        float a = 0, b = 0, d = 0;
#pragma omp simd reduction(+ : a, b, d)
        for (i64 i = at + start; i < at + end; i++) {
          float slope;
          const float m = masked(grad[i], fmaf(y[i], alpha, shift), g, clip, &slope);
          a += m;
          b += m * (y[i] - mean);
          d += grad[i] * slope;
        }
        first += a, second += b, third += d;
      }
    }
    sums[c] = first, products[c] = second, slopes[c] = third;
  }
  for (i64 c = 0; c < s.channels; c++) all += slopes[c];
  free(slopes);
  return all;
}

/* The products again, in double, where they are beyond a float. */
static void products_of_large(const float *grad, const float *y, Extent s, Linear form, Grid g, Clip clip,
                              double *products, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 c = 0; c < s.channels; c++) {
    products[c] = 0;
    for (i64 k = 0; k < s.outer * s.inner; k++) {
      const i64 i = (k / s.inner * s.channels + c) * s.inner + k % s.inner;
      float slope;
      products[c] += masked(grad[i], fmaf(y[i], form.alpha[c], form.shift[c]), g, clip, &slope) *
                     ((double)y[i] - form.mean[c]);
    }
  }
}

/* ---- backward, second pass: grad_y = alpha * (masked - offset - (y - mean) * factor) ---- */

/* Where a gradient passes: floor < z < ceiling and lowest <= z <= highest, which `masked` decides by a division. */
typedef struct {
  float floor, ceiling, lowest, highest;
} Bounds;

/* The largest z with z / step <= bound, an integer >= 0. A quotient that exceeds the bound by up to half a unit in the
   last place is rounded to it, because its mantissa is even. The product below is exact in double. */
static float reach(float bound, float step) {
  const double half = bound > 0 ? ldexp(1, ilogbf(bound) - 24) : 0x1p-150, exact = step * (bound + half);
  const float z = (float)exact;
  return z > exact ? nextafterf(z, 0) : z;
}

static Bounds bounds_of(Grid g, Clip clip) {
  const Bounds b = {clip.floor, clip.ceiling, -reach(g.zero - g.low, g.step), reach(g.high - g.zero, g.step)};
  return b;
}

static inline float passed(float grad, float z, Bounds b) {
  return (z > b.floor) & (z < b.ceiling) & (z >= b.lowest) & (z <= b.highest) ? grad : 0;
}

/* distance * factor, and 0 for a factor of 0 however far: an infinite score that a clip holds has no gradient. */
static inline float along(float distance, float factor) {
  return factor != 0 ? distance * factor : 0;
}

static void through_row(const float *restrict grad, const float *restrict y, float *restrict grad_y,
                        const float *restrict alpha, const float *restrict shift, const float *restrict mean,
                        const float *restrict offset, const float *restrict factor, i64 n, Bounds passes) {
#pragma omp simd
  for (i64 c = 0; c < n; c++) {
    const float m = passed(grad[c], fmaf(y[c], alpha[c], shift[c]), passes);
    grad_y[c] = alpha[c] * (m - offset[c] - along(y[c] - mean[c], factor[c]));
  }
}

static void through_innermost(const float *grad, const float *y, float *grad_y, Extent s, Linear form, Bounds passes,
                              const float *offset, const float *factor, int threads) {
  const Joined j = joined(s);
  const i64 w = j.width, p = j.pitch;
  float *a = repeated(row_buffers(j, 5), form.alpha, s, j), *b = repeated(a + p, form.shift, s, j);
  float *mean = repeated(b + p, form.mean, s, j), *o = repeated(mean + p, offset, s, j);
  float *f = repeated(o + p, factor, s, j);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 r = 0; r < j.rows; r++)
    through_row(grad + r * w, y + r * w, grad_y + r * w, a, b, mean, o, f, length_of(j, s, r), passes);
  free(a);
}

static void through_images(const float *grad, const float *y, float *grad_y, Extent s, Linear form, Bounds passes,
                           const float *offset, const float *factor, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 k = 0; k < s.outer * s.channels; k++) {
    const i64 c = k % s.channels;
    const float a = form.alpha[c], b = form.shift[c], mean = form.mean[c], o = offset[c], f = factor[c];
#pragma omp simd
    for (i64 i = k * s.inner; i < (k + 1) * s.inner; i++)
      grad_y[i] = a * (passed(grad[i], fmaf(y[i], a, b), passes) - o - along(y[i] - mean, f));
  }
}

/* The gradients of y (grad_y NULL: not needed), gamma, beta and scale. With `follows_batch` the statistics are the
   batch's, and depend on y too. */
void norm_quantize_backward(const float *grad, const float *y, float *grad_y, Extent s, Norm norm, LearnedGrid q,
                            float floor, float ceiling, int follows_batch, float *grad_gamma, float *grad_beta,
                            float *grad_scale, int threads) {
  const Grid g = grid_of(q);
  const Clip clip = {floor, ceiling};
  const i64 n = s.channels, innermost = s.inner == 1;
  const double count = (double)s.outer * s.inner;
  double *sums = malloc(2 * n * sizeof(double)), *products = sums + n;
  float *alpha = calloc(4 * n, sizeof(float)), *offset = alpha + 2 * n, *factor = offset + n;
  const Linear form = linear_form(norm, n, alpha, alpha + n);
  const double total =
      (innermost ? sums_innermost : sums_of_images)(grad, y, s, form, g, clip, sums, products, threads);
  if (!all_finite(products, n)) products_of_large(grad, y, s, form, g, clip, products, threads);
  for (i64 c = 0; c < n; c++) {
    const double inverse = norm.inverse[c];
    grad_gamma[c] = (float)(products[c] * inverse);
    grad_beta[c] = (float)sums[c];
    if (follows_batch) {
      offset[c] = (float)(sums[c] / count);
      factor[c] = (float)(products[c] / count * inverse * inverse);
    }
  }
  if (grad_y)
    (innermost ? through_innermost : through_images)(grad, y, grad_y, s, form, bounds_of(g, clip), offset, factor,
                                                     threads);
  *grad_scale = gradient_of(total, q);
  free(alpha);
  free(sums);
}
