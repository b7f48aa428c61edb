/* Activation functions and softmax, each with the quantizer behind it in one pass. */

#include "grids.h"

enum { GELU, GELU_TANH, SILU, HARDSWISH }; /* as in operators/curves.py */

#define INLINED static inline __attribute__((always_inline))

/* e^x to two units in the last place, 0 where that would be denormal; x is at most 88. */
INLINED float exp_of(float x) {
  const float bounded = x < -87.0f ? -87.0f : x, n = rintf(bounded * 1.44269504f);
  const float r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f; /* ln 2 in two parts */
  float y = 1.9875691500e-4f;
  y = y * r + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const uint32_t bits = (uint32_t)((int32_t)n + 127) << 23; /* arbitrary for NaN, but y is NaN then */
  float power;
  memcpy(&power, &bits, sizeof power);
  return x < -87.0f ? 0.0f : y * power; /* NaN stays NaN */
}

/* The normal distribution function and density. erfc(z) = exp(-z^2) t P(t) with t = 1 / (1 + 0.38 z), where P is
   fitted to a relative error of at most 2e-8. */
INLINED float normal(float x, float *density) {
  const float z = fabsf(x) * 0.70710678f, t = 1.0f / (1.0f + 0.38f * z), e = exp_of(-0.5f * (x * x));
  float p = 0.05887429f;
  p = p * t - 0.26181018f;
  p = p * t + 0.36283877f;
  p = p * t - 0.16022347f;
  p = p * t + 0.22911859f;
  p = p * t + 0.13906233f;
  p = p * t + 0.20379338f;
  p = p * t + 0.21393645f;
  p = p * t + 0.21440987f;
  const float tail = 0.5f * e * t * p;
  *density = e * 0.39894228f;
  return x < 0 ? tail : 1.0f - tail;
}

/* The function's value; its derivative goes to slope. */
INLINED float curve_at(float x, int curve, float *slope) {
  if (curve == GELU) {
    float density;
    const float share = normal(x, &density);
    *slope = share + x * density;
    return x * share;
  }
  if (curve == HARDSWISH) {
    const float inner = x * (1.0f / 3.0f) + 0.5f;
    *slope = x <= -3.0f ? 0.0f : (x < 3.0f ? inner : 1.0f);
    return x * clampf(x + 3.0f, 0.0f, 6.0f) / 6.0f;
  }
  /* x * sigmoid(u): silu with u = x, and gelu's approximation by tanh, since (1 + tanh(v)) / 2 = sigmoid(2 v) */
  const float near = clampf(x, -20.0f, 20.0f), square = near * near; /* x^3 could overflow */
  const float u = curve == SILU ? x : 1.59576912f * (near + 0.044715f * (near * square));
  const float rise = curve == SILU ? 1.0f : 1.59576912f * (1.0f + 0.134145f * square);
  const float share = u < -80.0f ? 0.0f : 1.0f / (1.0f + exp_of(clampf(-u, -80.0f, 80.0f)));
  *slope = share + x * share * (1.0f - share) * rise;
  return x * share;
}

INLINED float quantize_span(const float *restrict x, uint8_t *restrict codes, i64 n, Grid g, int curve) {
  float bad = 0;
#pragma omp simd reduction(+ : bad)
  for (i64 i = 0; i < n; i++) {
    float slope;
    const float c = code_of(curve_at(x[i], curve, &slope), g);
    bad += c - c;
    codes[i] = as_code(c);
  }
  return bad;
}

INLINED float backward_span(const float *restrict grad, const float *restrict x, float *restrict grad_x, i64 n, Grid g,
                            int curve) {
  float part = 0;
#pragma omp simd reduction(+ : part)
  for (i64 i = 0; i < n; i++) {
    int inside;
    float rise;
    const float slope = slope_of(curve_at(x[i], curve, &rise), g, &inside);
    part += grad[i] * slope;
    grad_x[i] = inside ? grad[i] * rise : 0;
  }
  return part;
}

/* One loop per curve, so that the choice is not made for every element. */
static float quantize_chosen(const float *x, uint8_t *codes, i64 n, Grid g, int curve) {
  switch (curve) {
    case GELU: return quantize_span(x, codes, n, g, GELU);
    case GELU_TANH: return quantize_span(x, codes, n, g, GELU_TANH);
    case SILU: return quantize_span(x, codes, n, g, SILU);
    case HARDSWISH: return quantize_span(x, codes, n, g, HARDSWISH);
  }
  return NAN; /* no such curve */
}

static float backward_chosen(const float *grad, const float *x, float *grad_x, i64 n, Grid g, int curve) {
  switch (curve) {
    case GELU: return backward_span(grad, x, grad_x, n, g, GELU);
    case GELU_TANH: return backward_span(grad, x, grad_x, n, g, GELU_TANH);
    case SILU: return backward_span(grad, x, grad_x, n, g, SILU);
    case HARDSWISH: return backward_span(grad, x, grad_x, n, g, HARDSWISH);
  }
  return NAN;
}

/* Codes of curve(x). */
void curve_quantize(const float *x, uint8_t *codes, i64 n, LearnedGrid q, int curve, float *qparams, int threads) {
  const Grid g = grid_of(q);
  float bad = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : bad) schedule(static)
  for (i64 start = 0; start < n; start += CHUNK)
    bad += quantize_chosen(x + start, codes + start, at_most(n - start, CHUNK), g, curve);
  write_qparams(qparams, g, bad);
}

void curve_quantize_backward(const float *grad, const float *x, float *grad_x, i64 n, LearnedGrid q, int curve,
                             float *grad_scale, int threads) {
  const Grid g = grid_of(q);
  double sum = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : sum) schedule(static)
  for (i64 start = 0; start < n; start += CHUNK)
    sum += backward_chosen(grad + start, x + start, grad_x + start, at_most(n - start, CHUNK), g, curve);
  *grad_scale = gradient_of(sum, q);
}

/* ---- softmax of rows ---- */

static float softmax_row(const float *restrict x, float *restrict p, uint8_t *restrict codes, i64 n, float factor,
                         Grid g) {
  float top = -INFINITY, sum = 0, bad = 0;
#pragma omp simd reduction(max : top)
  for (i64 i = 0; i < n; i++) {
    const float v = x[i] * factor;
    top = v > top ? v : top;
  }
#pragma omp simd reduction(+ : sum)
  for (i64 i = 0; i < n; i++) {
    p[i] = exp_of(x[i] * factor - top);
    sum += p[i];
  }
  const float share = 1.0f / sum;
#pragma omp simd reduction(+ : bad)
  for (i64 i = 0; i < n; i++) {
    p[i] *= share;
    const float c = code_of(p[i], g);
    bad += c - c;
    codes[i] = as_code(c);
  }
  return bad;
}

/* p = softmax(x * factor) of every row of n elements, and its codes. */
void softmax_quantize(const float *x, float *p, uint8_t *codes, i64 rows, i64 n, float factor, LearnedGrid q,
                      float *qparams, int threads) {
  const Grid g = grid_of(q);
  float bad = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : bad) schedule(static)
  for (i64 r = 0; r < rows; r++) bad += softmax_row(x + r * n, p + r * n, codes + r * n, n, factor, g);
  write_qparams(qparams, g, bad);
}

static float softmax_row_backward(const float *restrict grad, const float *restrict p, float *restrict grad_x, i64 n,
                                  float factor, Grid g) {
  float part = 0, mean = 0;
#pragma omp simd reduction(+ : part, mean)
  for (i64 i = 0; i < n; i++) {
    int inside;
    const float slope = slope_of(p[i], g, &inside);
    part += grad[i] * slope;
    grad_x[i] = inside ? grad[i] : 0;
    mean += grad_x[i] * p[i];
  }
#pragma omp simd
  for (i64 i = 0; i < n; i++) grad_x[i] = (grad_x[i] - mean) * p[i] * factor;
  return part;
}

void softmax_quantize_backward(const float *grad, const float *p, float *grad_x, i64 rows, i64 n, float factor,
                               LearnedGrid q, float *grad_scale, int threads) {
  const Grid g = grid_of(q);
  double sum = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : sum) schedule(static)
  for (i64 r = 0; r < rows; r++)
    sum += softmax_row_backward(grad + r * n, p + r * n, grad_x + r * n, n, factor, g);
  *grad_scale = gradient_of(sum, q);
}
