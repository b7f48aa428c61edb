/* Quantizers for tensors, for weights, and for the sum of two quantized tensors. */

#include "grids.h"

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

void quantize_codes(const float *x, uint8_t *codes, i64 n, LearnedGrid q, float *qparams, int threads) {
  const Grid g = grid_of(q);
  float bad = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : bad) schedule(static)
  for (i64 start = 0; start < n; start += CHUNK)
    bad += quantize_span(x + start, codes + start, at_most(n - start, CHUNK), g);
  write_qparams(qparams, g, bad);
}

void dequantize(const uint8_t *codes, float *y, i64 n, const float *qparams, int threads) {
  const float step = qparams[0], zero = qparams[1];
#pragma omp parallel for simd num_threads(threads) schedule(static)
  for (i64 i = 0; i < n; i++) y[i] = ((float)(int32_t)codes[i] - zero) * step;
}

void fake_quantize(const float *x, float *y, i64 n, Grid g, int threads) {
#pragma omp parallel for simd num_threads(threads) schedule(static)
  for (i64 i = 0; i < n; i++) y[i] = (code_of(x[i], g) - g.zero) * g.step;
}

/* dy/dstep of every element. */
void step_slopes(const float *restrict x, float *restrict slopes, i64 n, LearnedGrid q, int threads) {
  const Grid g = grid_of(q);
#pragma omp parallel for simd num_threads(threads) schedule(static)
  for (i64 i = 0; i < n; i++) {
    int inside;
    slopes[i] = slope_of(x[i], g, &inside);
  }
}

/* grad_x (NULL: not needed); the sum for the step in total[0], and that for a zero point in total[1]. */
void fake_quantize_backward(const float *grad, const float *x, float *grad_x, i64 n, Grid g, double *total,
                            int threads) {
  double sum = 0, sum_out = 0;
  const i64 chunks = (n + CHUNK - 1) / CHUNK;
#pragma omp parallel for num_threads(threads) reduction(+ : sum, sum_out) schedule(static)
  for (i64 k = 0; k < chunks; k++) {
    const i64 end = at_most((k + 1) * CHUNK, n);
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

void quantize_codes_backward(const float *grad, const float *x, float *grad_x, i64 n, LearnedGrid q, float *grad_scale,
                             int threads) {
  double total[2];
  fake_quantize_backward(grad, x, grad_x, n, grid_of(q), total, threads);
  *grad_scale = gradient_of(total[0], q);
}

/* The sum of (y - x)^2, where y is x on the grid. */
double squared_error(const float *x, i64 n, Grid g, int threads) {
  double sum = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : sum) schedule(static)
  for (i64 start = 0; start < n; start += CHUNK) {
    const i64 end = at_most(start + CHUNK, n);
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

int all_finite(const float *const *tensors, const i64 *sizes, i64 count) {
  float bad = 0;
  for (i64 k = 0; k < count; k++)
    for (i64 i = 0; i < sizes[k]; i++) bad += tensors[k][i] - tensors[k][i];
  return bad == bad;
}

/* The scale's gradient, from the gradient (a) and the derivative by the step (b) of every element. */
void gradient_by_slopes(const float *a, const float *b, i64 n, LearnedGrid q, float *grad_scale, int threads) {
  double sum = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : sum) schedule(static)
  for (i64 start = 0; start < n; start += CHUNK) {
    const i64 end = at_most(start + CHUNK, n);
    float part = 0;
#pragma omp simd reduction(+ : part)
    for (i64 i = start; i < end; i++) part += a[i] * b[i];
    sum += part;
  }
  *grad_scale = gradient_of(sum, q);
}

/* ---- per channel: weights with the channel on the first axis, `inner` elements each, symmetric ---- */

/* The grids of a weight's rows; with smallest NULL, the scales are used as they are. */
typedef struct {
  const float *scales, *smallest;
  float low, high;
  double factor;
  int relative;
} Rows;

static inline float step_of(Rows rows, i64 c) {
  return rows.smallest ? step_in_force(rows.scales[c], rows.smallest[c]) : rows.scales[c];
}

/* Codes, values on the grid, and bounded scales (each NULL if not needed). Codes have no NaN, so a row that contains
   one gets it as its step. */
void quantize_rows(const float *w, Rows rows, int8_t *codes, float *y, float *steps, i64 channels, i64 inner,
                   int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 c = 0; c < channels; c++) {
    const Grid g = {step_of(rows, c), 0, rows.low, rows.high};
    const float *row = w + c * inner;
    float bad = 0;
    if (codes) {
      int8_t *out = codes + c * inner;
#pragma omp simd reduction(+ : bad)
      for (i64 i = 0; i < inner; i++) {
        const float q = code_of(row[i], g);
        bad += q - q;
        out[i] = (int8_t)(int32_t)q;
      }
    }
    if (steps) steps[c] = bad != bad ? NAN : g.step;
    if (y) {
      float *out = y + c * inner;
#pragma omp simd
      for (i64 i = 0; i < inner; i++) out[i] = code_of(row[i], g) * g.step;
    }
  }
}

/* grad_w may be grad itself, or NULL. */
void quantize_rows_backward(const float *grad, const float *w, Rows rows, float *grad_w, float *grad_scales,
                            i64 channels, i64 inner, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 c = 0; c < channels; c++) {
    const Grid g = {step_of(rows, c), 0, rows.low, rows.high};
    double sum = 0;
    for (i64 start = 0; start < inner; start += CHUNK) {
      const i64 end = at_most(start + CHUNK, inner);
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
    const float smallest = rows.smallest ? rows.smallest[c] : rows.scales[c];
    grad_scales[c] = learned_gradient(sum, rows.scales[c], smallest, rows.factor, rows.relative);
  }
}

/* ---- sum of two quantized tensors -> clamp -> codes ---- */

typedef struct {
  const uint8_t *codes;
  const float *qparams;
} Operand;

typedef struct {
  float step, zero;
} QParams;

static QParams qparams_of(Operand a) {
  const QParams n = {a.qparams[0], a.qparams[1]};
  return n;
}

static inline float sum_at(uint8_t a, uint8_t b, QParams first, QParams second) {
  return ((float)(int32_t)a - first.zero) * first.step + ((float)(int32_t)b - second.zero) * second.step;
}

static float add_span(const uint8_t *restrict a, const uint8_t *restrict b, uint8_t *restrict codes, i64 n,
                      QParams first, QParams second, Grid g, float floor, float ceiling) {
  float bad = 0;
#pragma omp simd reduction(+ : bad)
  for (i64 i = 0; i < n; i++) {
    const float c = code_of(clampf(sum_at(a[i], b[i], first, second), floor, ceiling), g);
    bad += c - c;
    codes[i] = as_code(c);
  }
  return bad;
}

void add_quantize(Operand a, Operand b, uint8_t *codes, i64 n, LearnedGrid q, float floor, float ceiling,
                  float *qparams, int threads) {
  const Grid g = grid_of(q);
  const QParams first = qparams_of(a), second = qparams_of(b);
  float bad = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : bad) schedule(static)
  for (i64 start = 0; start < n; start += CHUNK)
    bad += add_span(a.codes + start, b.codes + start, codes + start, at_most(n - start, CHUNK), first, second, g, floor,
                    ceiling);
  write_qparams(qparams, g, bad);
}

static float add_backward_span(const float *restrict grad, const uint8_t *restrict a, const uint8_t *restrict b,
                               float *restrict grad_sum, i64 n, QParams first, QParams second, Grid g, float floor,
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

void add_quantize_backward(const float *grad, Operand a, Operand b, float *grad_sum, i64 n, LearnedGrid q, float floor,
                           float ceiling, float *grad_scale, int threads) {
  const Grid g = grid_of(q);
  const QParams first = qparams_of(a), second = qparams_of(b);
  double sum = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : sum) schedule(static)
  for (i64 start = 0; start < n; start += CHUNK)
    sum += add_backward_span(grad + start, a.codes + start, b.codes + start, grad_sum + start,
                             at_most(n - start, CHUNK), first, second, g, floor, ceiling);
  *grad_scale = gradient_of(sum, q);
}
