/* BatchNorm, clamp and quantizer in one pass; their backward in two. */

#include "grids.h"

#define ROWS 64    /* rows of one, where channels lie innermost */
#define WIDE 512   /* shorter rows of channels are taken several at a time */

/* ---- BatchNorm -> clamp -> codes; without a norm gamma and inverse are 1, beta and mean 0 ---- */

typedef struct {
  i64 outer, channels, inner;
} Shape;

/* One number a channel: z = (y - mean) * inverse * gamma + beta, with inverse = 1 / sqrt(var + eps). */
typedef struct {
  const float *gamma, *beta, *mean, *inverse;
} Norm;

/* z = y * alpha + shift */
static void linear_form(Norm norm, i64 channels, float *alpha, float *shift) {
  for (i64 c = 0; c < channels; c++) {
    alpha[c] = norm.inverse[c] * norm.gamma[c];
    shift[c] = norm.beta[c] - norm.mean[c] * alpha[c];
  }
}

/* Channels innermost: rows of few channels are joined to rows of `width`, and what belongs to a channel is repeated. */
typedef struct {
  i64 width, rows; /* the last row may be shorter */
} Joined;

static Joined joined(Shape s) {
  const i64 several = s.channels < WIDE ? WIDE / s.channels : 1, width = s.channels * several;
  const Joined j = {width, (s.outer * s.channels + width - 1) / width};
  return j;
}

static i64 length_of(Joined j, Shape s, i64 row) {
  const i64 left = s.outer * s.channels - row * j.width;
  return left < j.width ? left : j.width;
}

static float *repeated(float *to, const float *values, i64 channels, i64 width) {
  for (i64 i = 0; i < width; i += channels) memcpy(to + i, values, channels * sizeof(float));
  return to;
}

static void moments_row(const float *restrict y, const float *restrict center, float *restrict sums,
                        float *restrict squares, i64 n) {
#pragma omp simd
  for (i64 c = 0; c < n; c++) {
    const float d = y[c] - center[c];
    sums[c] += d;
    squares[c] += d * d;
  }
}

/* sums of y - shift and of its square, shift being the channel's first value: one pass, and no cancellation to speak of */
static void moments(const float *y, Shape s, double *sums, double *squares, float *shift, int threads) {
  for (i64 c = 0; c < s.channels; c++) shift[c] = y[c * s.inner];
  if (s.inner == 1) {
    const Joined j = joined(s);
    const i64 w = j.width, block = ROWS * s.channels / w > 0 ? ROWS * s.channels / w + 1 : 1;
    const i64 blocks = (j.rows + block - 1) / block;
    double *partial = calloc((size_t)threads * 2 * w, sizeof(double));
    float *center = repeated(malloc(w * sizeof(float)), shift, s.channels, w);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int t = 0; t < threads; t++) {
      double *total = partial + (i64)t * 2 * w;
      float *sum = malloc(2 * w * sizeof(float));
      for (i64 k = blocks * t / threads; k < blocks * (t + 1) / threads; k++) {
        memset(sum, 0, 2 * w * sizeof(float));
        for (i64 r = k * block; r < (k + 1) * block && r < j.rows; r++)
          moments_row(y + r * w, center, sum, sum + w, length_of(j, s, r));
        for (i64 c = 0; c < 2 * w; c++) total[c] += sum[c];
      }
      free(sum);
    }
    memset(sums, 0, s.channels * sizeof(double));
    memset(squares, 0, s.channels * sizeof(double));
    for (int t = 0; t < threads; t++)
      for (i64 c = 0; c < w; c++) {
        sums[c % s.channels] += partial[(i64)t * 2 * w + c];
        squares[c % s.channels] += partial[((i64)t * 2 + 1) * w + c];
      }
    free(center);
    free(partial);
    return;
  }
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 c = 0; c < s.channels; c++) {
    double first = 0, second = 0;
    for (i64 o = 0; o < s.outer; o++) {
      const float *row = y + (o * s.channels + c) * s.inner;
      for (i64 start = 0; start < s.inner; start += CHUNK) {
        const i64 end = start + CHUNK < s.inner ? start + CHUNK : s.inner;
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

/* mean, 1 / sqrt(var + eps), the unbiased variance (NULL: not wanted), and the running mean and variance (NULL: none)
   moved by `share` towards them */
void statistics(const float *y, Shape s, double eps, float *mean, float *inverse, float *unbiased_var,
                float *running_mean, float *running_var, double share, int threads) {
  double *sums = malloc(2 * s.channels * sizeof(double)), *squares = sums + s.channels;
  const double count = (double)s.outer * s.inner;
  moments(y, s, sums, squares, mean, threads);
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

static float norm_row(const float *restrict y, uint8_t *restrict codes, i64 n, const float *restrict alpha,
                      const float *restrict beta, Grid g, float floor, float ceiling) {
  float bad = 0;
#pragma omp simd reduction(+ : bad)
  for (i64 c = 0; c < n; c++) {
    const float q = code_of(clampf(fmaf(y[c], alpha[c], beta[c]), floor, ceiling), g);
    bad += q - q;
    codes[c] = as_code(q);
  }
  return bad;
}

static float norm_span(const float *restrict y, uint8_t *restrict codes, i64 n, float alpha, float beta, Grid g,
                       float floor, float ceiling) {
  float bad = 0;
#pragma omp simd reduction(+ : bad)
  for (i64 i = 0; i < n; i++) {
    const float q = code_of(clampf(fmaf(y[i], alpha, beta), floor, ceiling), g);
    bad += q - q;
    codes[i] = as_code(q);
  }
  return bad;
}

void norm_quantize(const float *y, uint8_t *codes, Shape s, Norm norm, Learned q, float floor, float ceiling,
                   float *numbers, int threads) {
  const Grid g = grid_of(q);
  float bad = 0;
  const i64 channels = s.channels, inner = s.inner;
  float *alpha = malloc(2 * channels * sizeof(float)), *beta = alpha + channels;
  linear_form(norm, channels, alpha, beta);
  if (inner == 1) {
    const Joined j = joined(s);
    const i64 w = j.width;
    float *a = malloc(2 * w * sizeof(float)), *b = repeated(a + w, beta, channels, w);
    repeated(a, alpha, channels, w);
#pragma omp parallel for num_threads(threads) reduction(+ : bad) schedule(static)
    for (i64 r = 0; r < j.rows; r++)
      bad += norm_row(y + r * w, codes + r * w, length_of(j, s, r), a, b, g, floor, ceiling);
    free(a);
    free(alpha);
    write_numbers(numbers, g, bad);
    return;
  }
#pragma omp parallel for num_threads(threads) reduction(+ : bad) schedule(static)
  for (i64 k = 0; k < s.outer * channels; k++)
    bad += norm_span(y + k * inner, codes + k * inner, inner, alpha[k % channels], beta[k % channels], g, floor,
                     ceiling);
  free(alpha);
  write_numbers(numbers, g, bad);
}

/* the gradient behind clamp and quantizer, at y */
static inline float masked(float grad, float y, float a, float b, Grid g, float floor, float ceiling, float *slope) {
  int inside;
  const float z = fmaf(y, a, b);
  *slope = slope_of(clampf(z, floor, ceiling), g, &inside);
  grad = inside ? grad : 0;
  grad = z > floor ? grad : 0;
  return z < ceiling ? grad : 0;
}

static void sums_row(const float *restrict grad, const float *restrict y, const float *restrict alpha,
                     const float *restrict beta, const float *restrict mean, float *restrict sums,
                     float *restrict products, float *restrict slopes, i64 n, Grid g, float floor, float ceiling) {
#pragma omp simd
  for (i64 c = 0; c < n; c++) {
    float slope;
    const float m = masked(grad[c], y[c], alpha[c], beta[c], g, floor, ceiling, &slope);
    sums[c] += m;
    products[c] += m * (y[c] - mean[c]);
    slopes[c] += grad[c] * slope;
  }
}

/* per channel: the sums of the masked gradient and of its product with y - mean; returns the sum for the step */
static double masked_sums(const float *grad, const float *y, Shape s, const float *mean, const float *alpha,
                          const float *beta, Grid g, float floor, float ceiling, double *sums, double *products,
                          int threads) {
  double all = 0;
  if (s.inner == 1) {
    const Joined j = joined(s);
    const i64 w = j.width, block = ROWS * s.channels / w > 0 ? ROWS * s.channels / w + 1 : 1;
    const i64 blocks = (j.rows + block - 1) / block;
    double *partial = calloc((size_t)threads * 3 * w, sizeof(double));
    float *a = malloc(3 * w * sizeof(float)), *b = repeated(a + w, beta, s.channels, w);
    float *center = repeated(b + w, mean, s.channels, w);
    repeated(a, alpha, s.channels, w);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int t = 0; t < threads; t++) {
      double *into = partial + (i64)t * 3 * w;
      float *sum = malloc(3 * w * sizeof(float));
      for (i64 k = blocks * t / threads; k < blocks * (t + 1) / threads; k++) {
        memset(sum, 0, 3 * w * sizeof(float));
        for (i64 r = k * block; r < (k + 1) * block && r < j.rows; r++)
          sums_row(grad + r * w, y + r * w, a, b, center, sum, sum + w, sum + 2 * w, length_of(j, s, r), g, floor,
                   ceiling);
        for (i64 c = 0; c < 3 * w; c++) into[c] += sum[c];
      }
      free(sum);
    }
    memset(sums, 0, s.channels * sizeof(double));
    memset(products, 0, s.channels * sizeof(double));
    for (int t = 0; t < threads; t++)
      for (i64 c = 0; c < w; c++) {
        const double *from = partial + (i64)t * 3 * w + c;
        sums[c % s.channels] += from[0];
        products[c % s.channels] += from[w];
        all += from[2 * w];
      }
    free(a);
    free(partial);
    return all;
  }
  double *slopes = malloc(s.channels * sizeof(double));
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 c = 0; c < s.channels; c++) {
    double first = 0, second = 0, third = 0;
    for (i64 o = 0; o < s.outer; o++) {
      const i64 at = (o * s.channels + c) * s.inner;
      for (i64 start = 0; start < s.inner; start += CHUNK) {
        const i64 end = start + CHUNK < s.inner ? start + CHUNK : s.inner;
        float a = 0, b = 0, d = 0;
#pragma omp simd reduction(+ : a, b, d)
        for (i64 i = at + start; i < at + end; i++) {
          float slope;
          const float m = masked(grad[i], y[i], alpha[c], beta[c], g, floor, ceiling, &slope);
          a += m;
          b += m * (y[i] - mean[c]);
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

static void backward_row(const float *restrict grad, const float *restrict y, float *restrict grad_y,
                         const float *restrict alpha, const float *restrict beta, const float *restrict mean,
                         const float *restrict offset, const float *restrict factor, i64 n, Grid g, float floor,
                         float ceiling) {
#pragma omp simd
  for (i64 c = 0; c < n; c++) {
    float slope;
    const float m = masked(grad[c], y[c], alpha[c], beta[c], g, floor, ceiling, &slope);
    grad_y[c] = alpha[c] * (m - offset[c] - (y[c] - mean[c]) * factor[c]);
  }
}

/* grad_y = alpha * (masked - offset - (y - mean) * factor) */
static void through_norm(const float *grad, const float *y, float *grad_y, Shape s, const float *mean,
                         const float *alpha, const float *beta, Grid g, float floor, float ceiling,
                         const float *offset, const float *factor, int threads) {
  if (s.inner == 1) {
    const Joined j = joined(s);
    const i64 w = j.width, n = s.channels;
    float *a = malloc(5 * w * sizeof(float)), *b = repeated(a + w, beta, n, w), *mu = repeated(b + w, mean, n, w);
    float *o = repeated(mu + w, offset, n, w), *f = repeated(o + w, factor, n, w);
    repeated(a, alpha, n, w);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (i64 r = 0; r < j.rows; r++)
      backward_row(grad + r * w, y + r * w, grad_y + r * w, a, b, mu, o, f, length_of(j, s, r), g, floor, ceiling);
    free(a);
    return;
  }
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 k = 0; k < s.outer * s.channels; k++) {
    const i64 c = k % s.channels;
    const float a = alpha[c], b = beta[c], o = offset[c], f = factor[c], mu = mean[c];
#pragma omp simd
    for (i64 i = k * s.inner; i < (k + 1) * s.inner; i++) {
      float slope;
      grad_y[i] = a * (masked(grad[i], y[i], a, b, g, floor, ceiling, &slope) - o - (y[i] - mu) * f);
    }
  }
}

/* The gradients of the chain: grad_y (NULL: not wanted), gamma, beta and scale. With `follows_batch` the
   statistics are the batch's, and y changes them too. */
void norm_quantize_backward(const float *grad, const float *y, float *grad_y, Shape s, Norm norm, Learned q,
                            float floor, float ceiling, int follows_batch, float *grad_gamma, float *grad_beta,
                            float *grad_scale, int threads) {
  const Grid g = grid_of(q);
  const i64 n = s.channels;
  const double count = (double)s.outer * s.inner;
  double *sums = malloc(2 * n * sizeof(double)), *products = sums + n;
  float *alpha = calloc(4 * n, sizeof(float)), *shift = alpha + n, *offset = shift + n, *factor = offset + n;
  linear_form(norm, n, alpha, shift);
  const double total =
      masked_sums(grad, y, s, norm.mean, alpha, shift, g, floor, ceiling, sums, products, threads);
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
    through_norm(grad, y, grad_y, s, norm.mean, alpha, shift, g, floor, ceiling, offset, factor, threads);
  *grad_scale = gradient_of(total, q);
  free(alpha);
  free(sums);
}
