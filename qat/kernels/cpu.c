/* Quantizers, and what is fused with them, in one pass over memory each: float32 in and out, codes in uint8.

   Python formulas in qat/functional are the reference; the tests hold every function here against them. A grid is
   (step, zero, low, high): code = clamp(rint(x / step) + zero, low, high), all four shifted so that codes fit uint8.

   A tensor with channels is seen as `outer` blocks of `channels` x `inner`: (N, C, H, W) contiguous has inner = H*W,
   channels_last and (rows, C) have inner = 1. Sums over many elements go through short float sums into doubles, in an
   order that depends on the number of threads only.

   Inner loops that write bytes are functions of their own with restrict: a byte may alias anything, and the compiler
   would read the grid again for every element. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK 4096 /* elements of a short float sum */
#define ROWS 64    /* rows of one, where channels lie innermost */
#define WIDE 512   /* shorter rows of channels are taken several at a time */
typedef int64_t i64;

typedef struct {
  float step, zero, low, high;
} Grid;

static inline float clampf(float v, float low, float high) {
  v = v < low ? low : v; /* NaN stays NaN */
  return v > high ? high : v;
}

/* NaN becomes some code; the callers sum c - c, which is 0 or NaN, to know of it. */
static inline uint8_t as_code(float c) { return (uint8_t)(int32_t)c; }

static inline float code_of(float x, Grid g) { return clampf(rintf(x / g.step) + g.zero, g.low, g.high); }

/* Gradient of the quantizer at x: whether it passes, and the slope with respect to the step. */
static inline float slope_of(float x, Grid g, int *inside) {
  const float v = x / g.step, bounded = clampf(v, g.low - g.zero, g.high - g.zero);
  *inside = bounded == v;
  return *inside ? rintf(v) - v : bounded;
}

/* ---- per tensor ---- */

static float quantize_span(const float *restrict x, uint8_t *restrict codes, i64 n, Grid g) {
  float bad = 0;
#pragma omp simd reduction(+ : bad)
  for (i64 i = 0; i < n; i++) {
    const float c = code_of(x[i], g);
    bad += c - c;
    codes[i] = as_code(c);
  }
  return bad;
}

/* codes, and whether there was a NaN, for which there is no code */
int quantize_codes(const float *x, uint8_t *codes, i64 n, Grid g, int threads) {
  float bad = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : bad) schedule(static)
  for (i64 start = 0; start < n; start += CHUNK)
    bad += quantize_span(x + start, codes + start, n - start < CHUNK ? n - start : CHUNK, g);
  return bad != bad;
}

void dequantize(const uint8_t *codes, float *y, i64 n, float step, float zero, int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
  for (i64 i = 0; i < n; i++) y[i] = ((float)(int32_t)codes[i] - zero) * step;
}

void fake_quantize(const float *x, float *y, i64 n, Grid g, int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
  for (i64 i = 0; i < n; i++) y[i] = (code_of(x[i], g) - g.zero) * g.step;
}

/* dy/dstep of every element */
void step_slopes(const float *restrict x, float *restrict slopes, i64 n, Grid g, int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
  for (i64 i = 0; i < n; i++) {
    int inside;
    slopes[i] = slope_of(x[i], g, &inside);
  }
}

/* grad_x (NULL: not wanted); returns the sums for step in total[0] and, for a zero point, in total[1] */
void fake_quantize_backward(const float *grad, const float *x, float *grad_x, i64 n, Grid g, double *total,
                            int threads) {
  double sum = 0, sum_out = 0;
  const i64 chunks = (n + CHUNK - 1) / CHUNK;
#pragma omp parallel for num_threads(threads) reduction(+ : sum, sum_out) schedule(static)
  for (i64 k = 0; k < chunks; k++) {
    const i64 end = (k + 1) * CHUNK < n ? (k + 1) * CHUNK : n;
    float part = 0, part_out = 0;
    if (grad_x) {
#pragma omp simd reduction(+ : part, part_out)
      for (i64 i = k * CHUNK; i < end; i++) {
        int inside;
        const float slope = slope_of(x[i], g, &inside);
        part += grad[i] * slope;
        part_out += inside ? 0 : grad[i];
        grad_x[i] = inside ? grad[i] : 0;
      }
    } else {
#pragma omp simd reduction(+ : part, part_out)
      for (i64 i = k * CHUNK; i < end; i++) {
        int inside;
        const float slope = slope_of(x[i], g, &inside);
        part += grad[i] * slope;
        part_out += inside ? 0 : grad[i];
      }
    }
    sum += part;
    sum_out += part_out;
  }
  total[0] = sum;
  total[1] = sum_out;
}

/* the sum of (y - x)^2, y being x on the grid */
double squared_error(const float *x, i64 n, Grid g, int threads) {
  double sum = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : sum) schedule(static)
  for (i64 start = 0; start < n; start += CHUNK) {
    const i64 end = start + CHUNK < n ? start + CHUNK : n;
    float part = 0;
#pragma omp simd reduction(+ : part)
    for (i64 i = start; i < end; i++) {
      const float d = (code_of(x[i], g) - g.zero) * g.step - x[i];
      part += d * d;
    }
    sum += part;
  }
  return sum;
}

double dot(const float *a, const float *b, i64 n, int threads) {
  double sum = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : sum) schedule(static)
  for (i64 start = 0; start < n; start += CHUNK) {
    const i64 end = start + CHUNK < n ? start + CHUNK : n;
    float part = 0;
#pragma omp simd reduction(+ : part)
    for (i64 i = start; i < end; i++) part += a[i] * b[i];
    sum += part;
  }
  return sum;
}

/* ---- per channel: weights with the channel on the first axis, `inner` elements each, symmetric ---- */

/* codes (NULL: not wanted) and values on the grid (NULL: not wanted) */
void quantize_rows(const float *w, const float *steps, int8_t *codes, float *y, i64 channels, i64 inner, float low,
                   float high, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 c = 0; c < channels; c++) {
    const Grid g = {steps[c], 0, low, high};
    const float *row = w + c * inner;
    if (codes) {
      int8_t *out = codes + c * inner;
#pragma omp simd
      for (i64 i = 0; i < inner; i++) {
        const float q = code_of(row[i], g);
        out[i] = (int8_t)(int32_t)q;
      }
    }
    if (y) {
      float *out = y + c * inner;
#pragma omp simd
      for (i64 i = 0; i < inner; i++) out[i] = code_of(row[i], g) * g.step;
    }
  }
}

/* grad_w may be grad itself or NULL; grad_steps without any factor */
void quantize_rows_backward(const float *grad, const float *w, const float *steps, float *grad_w, float *grad_steps,
                            i64 channels, i64 inner, float low, float high, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 c = 0; c < channels; c++) {
    const Grid g = {steps[c], 0, low, high};
    double sum = 0;
    for (i64 start = 0; start < inner; start += CHUNK) {
      const i64 end = start + CHUNK < inner ? start + CHUNK : inner;
      float part = 0;
#pragma omp simd reduction(+ : part)
      for (i64 i = c * inner + start; i < c * inner + end; i++) {
        int inside;
        const float slope = slope_of(w[i], g, &inside), d = grad[i];
        part += d * slope;
        if (grad_w) grad_w[i] = inside ? d : 0;
      }
      sum += part;
    }
    grad_steps[c] = (float)sum;
  }
}

/* ---- sum of two quantized tensors -> clamp -> codes ---- */

typedef struct {
  const uint8_t *codes;
  float step, zero;
} Operand;

static inline float sum_at(uint8_t a, uint8_t b, Operand first, Operand second) {
  return ((float)(int32_t)a - first.zero) * first.step + ((float)(int32_t)b - second.zero) * second.step;
}

static float add_span(const uint8_t *restrict a, const uint8_t *restrict b, uint8_t *restrict codes, i64 n,
                      Operand first, Operand second, Grid g, float floor, float ceiling) {
  float bad = 0;
#pragma omp simd reduction(+ : bad)
  for (i64 i = 0; i < n; i++) {
    const float c = code_of(clampf(sum_at(a[i], b[i], first, second), floor, ceiling), g);
    bad += c - c;
    codes[i] = as_code(c);
  }
  return bad;
}

int add_quantize(Operand a, Operand b, uint8_t *codes, i64 n, Grid g, float floor, float ceiling, int threads) {
  float bad = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : bad) schedule(static)
  for (i64 start = 0; start < n; start += CHUNK)
    bad += add_span(a.codes + start, b.codes + start, codes + start, n - start < CHUNK ? n - start : CHUNK, a, b, g,
                    floor, ceiling);
  return bad != bad;
}

static float add_backward_span(const float *restrict grad, const uint8_t *restrict a, const uint8_t *restrict b,
                               float *restrict grad_sum, i64 n, Operand first, Operand second, Grid g, float floor,
                               float ceiling) {
  float part = 0;
#pragma omp simd reduction(+ : part)
  for (i64 i = 0; i < n; i++) {
    int inside;
    const float z = sum_at(a[i], b[i], first, second), slope = slope_of(clampf(z, floor, ceiling), g, &inside);
    part += grad[i] * slope;
    float kept = inside ? grad[i] : 0;
    kept = z > floor ? kept : 0;
    grad_sum[i] = z < ceiling ? kept : 0;
  }
  return part;
}

void add_quantize_backward(const float *grad, Operand a, Operand b, float *grad_sum, i64 n, Grid g, float floor,
                           float ceiling, double *total, int threads) {
  double sum = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : sum) schedule(static)
  for (i64 start = 0; start < n; start += CHUNK)
    sum += add_backward_span(grad + start, a.codes + start, b.codes + start, grad_sum + start,
                             n - start < CHUNK ? n - start : CHUNK, a, b, g, floor, ceiling);
  total[0] = sum;
}

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

/* mean, 1 / sqrt(var + eps), and the running ones (NULL: none) moved by `share` towards mean and unbiased variance */
void statistics(const float *y, Shape s, double eps, float *mean, float *inverse, float *running_mean,
                float *running_var, double share, int threads) {
  double *sums = malloc(2 * s.channels * sizeof(double)), *squares = sums + s.channels;
  const double count = (double)s.outer * s.inner;
  moments(y, s, sums, squares, mean, threads);
  for (i64 c = 0; c < s.channels; c++) {
    const double offset = sums[c] / count, spread = squares[c] / count - offset * offset;
    const double variance = spread > 0 || spread != spread ? spread : 0;
    mean[c] = (float)(mean[c] + offset);
    inverse[c] = (float)(1 / sqrt(variance + eps));
    if (running_mean) {
      const double unbiased = variance * (count / (count > 1 ? count - 1 : 1));
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

int norm_quantize(const float *y, uint8_t *codes, Shape s, Norm norm, Grid g, float floor, float ceiling,
                  int threads) {
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
    return bad != bad;
  }
#pragma omp parallel for num_threads(threads) reduction(+ : bad) schedule(static)
  for (i64 k = 0; k < s.outer * channels; k++)
    bad += norm_span(y + k * inner, codes + k * inner, inner, alpha[k % channels], beta[k % channels], g, floor,
                     ceiling);
  free(alpha);
  return bad != bad;
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

/* The gradients of the chain: grad_y (NULL: not wanted), gamma, beta; returns the step's. With `follows_batch` the
   statistics are the batch's, and y changes them too. */
double norm_quantize_backward(const float *grad, const float *y, float *grad_y, Shape s, Norm norm, Grid g,
                              float floor, float ceiling, int follows_batch, float *grad_gamma, float *grad_beta,
                              int threads) {
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
  free(alpha);
  free(sums);
  return total;
}
