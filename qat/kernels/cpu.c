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

/* ---- BatchNorm -> clamp -> codes; without a norm alpha is 1 and beta 0 ---- */

typedef struct {
  i64 outer, channels, inner;
} Shape;

/* sums of y - shift and of its square, shift being the channel's first value: one pass, and no cancellation to speak of */
void moments(const float *y, Shape s, double *sums, double *squares, float *shift, int threads) {
  for (i64 c = 0; c < s.channels; c++) shift[c] = y[c * s.inner];
  if (s.inner == 1) {
    const i64 blocks = (s.outer + ROWS - 1) / ROWS;
    double *partial = calloc((size_t)threads * 2 * s.channels, sizeof(double));
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int t = 0; t < threads; t++) {
      double *first = partial + (i64)t * 2 * s.channels, *second = first + s.channels;
      float *short_sums = malloc(2 * s.channels * sizeof(float)), *short_squares = short_sums + s.channels;
      for (i64 k = blocks * t / threads; k < blocks * (t + 1) / threads; k++) {
        const i64 end = (k + 1) * ROWS < s.outer ? (k + 1) * ROWS : s.outer;
        memset(short_sums, 0, 2 * s.channels * sizeof(float));
        for (i64 r = k * ROWS; r < end; r++) {
          const float *row = y + r * s.channels;
#pragma omp simd
          for (i64 c = 0; c < s.channels; c++) {
            const float d = row[c] - shift[c];
            short_sums[c] += d;
            short_squares[c] += d * d;
          }
        }
        for (i64 c = 0; c < s.channels; c++) first[c] += short_sums[c], second[c] += short_squares[c];
      }
      free(short_sums);
    }
    memset(sums, 0, s.channels * sizeof(double));
    memset(squares, 0, s.channels * sizeof(double));
    for (int t = 0; t < threads; t++)
      for (i64 c = 0; c < s.channels; c++) {
        sums[c] += partial[(i64)t * 2 * s.channels + c];
        squares[c] += partial[((i64)t * 2 + 1) * s.channels + c];
      }
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

int norm_quantize(const float *y, uint8_t *codes, Shape s, const float *alpha, const float *beta, Grid g, float floor,
                  float ceiling, int threads) {
  float bad = 0;
  const i64 channels = s.channels, inner = s.inner;
  if (inner == 1) {
#pragma omp parallel for num_threads(threads) reduction(+ : bad) schedule(static)
    for (i64 r = 0; r < s.outer; r++)
      bad += norm_row(y + r * channels, codes + r * channels, channels, alpha, beta, g, floor, ceiling);
    return bad != bad;
  }
#pragma omp parallel for num_threads(threads) reduction(+ : bad) schedule(static)
  for (i64 k = 0; k < s.outer * channels; k++)
    bad += norm_span(y + k * inner, codes + k * inner, inner, alpha[k % channels], beta[k % channels], g, floor,
                     ceiling);
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

/* per channel: the sums of the masked gradient and of its product with y - mean; total[0]: the sum for the step */
void norm_quantize_sums(const float *grad, const float *y, Shape s, const float *mean, const float *alpha,
                        const float *beta, Grid g, float floor, float ceiling, double *sums, double *products,
                        double *total, int threads) {
  double all = 0;
  if (s.inner == 1) {
    const i64 blocks = (s.outer + ROWS - 1) / ROWS, wide = 3 * s.channels;
    double *partial = calloc((size_t)threads * wide, sizeof(double));
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int t = 0; t < threads; t++) {
      double *first = partial + t * wide, *second = first + s.channels, *third = second + s.channels;
      float *a = malloc(wide * sizeof(float)), *b = a + s.channels, *d = b + s.channels;
      for (i64 k = blocks * t / threads; k < blocks * (t + 1) / threads; k++) {
        const i64 end = (k + 1) * ROWS < s.outer ? (k + 1) * ROWS : s.outer;
        memset(a, 0, wide * sizeof(float));
        for (i64 r = k * ROWS; r < end; r++) {
          const float *row = y + r * s.channels, *from = grad + r * s.channels;
#pragma omp simd
          for (i64 c = 0; c < s.channels; c++) {
            float slope;
            const float m = masked(from[c], row[c], alpha[c], beta[c], g, floor, ceiling, &slope);
            a[c] += m;
            b[c] += m * (row[c] - mean[c]);
            d[c] += from[c] * slope;
          }
        }
        for (i64 c = 0; c < s.channels; c++) first[c] += a[c], second[c] += b[c], third[c] += d[c];
      }
      free(a);
    }
    for (i64 c = 0; c < s.channels; c++) {
      sums[c] = products[c] = 0;
      for (int t = 0; t < threads; t++) {
        sums[c] += partial[t * wide + c];
        products[c] += partial[t * wide + s.channels + c];
        all += partial[t * wide + 2 * s.channels + c];
      }
    }
    free(partial);
    total[0] = all;
    return;
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
  total[0] = all;
}

/* grad_y = alpha * (masked - offset - (y - mean) * factor); offset and factor are 0 for statistics that are fixed */
void norm_quantize_backward(const float *grad, const float *y, float *grad_y, Shape s, const float *mean,
                            const float *alpha, const float *beta, Grid g, float floor, float ceiling,
                            const float *offset, const float *factor, int threads) {
  if (s.inner == 1) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (i64 r = 0; r < s.outer; r++) {
      const float *row = y + r * s.channels, *from = grad + r * s.channels;
      float *out = grad_y + r * s.channels;
#pragma omp simd
      for (i64 c = 0; c < s.channels; c++) {
        float slope;
        const float m = masked(from[c], row[c], alpha[c], beta[c], g, floor, ceiling, &slope);
        out[c] = alpha[c] * (m - offset[c] - (row[c] - mean[c]) * factor[c]);
      }
    }
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
