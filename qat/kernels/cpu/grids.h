/* Quantizers, and what is fused with them, each in one pass over memory: float32 in and out, codes in uint8.

   The formulas in qat/functional are the reference; tests compare every function here with them. A grid is
   (step, zero, low, high): code = clamp(rint(x / step) + zero, low, high); the last three are shifted so that codes fit
   uint8.

   A tensor with channels is seen as `outer` blocks of `channels` x `inner`: (N, C, H, W) contiguous has inner = H*W,
   channels_last and (rows, C) have inner = 1. Sums over many elements are short float sums added up in doubles, in an
   order that depends on the number of threads only.

   Inner loops that write bytes are functions of their own with restrict parameters: a byte may alias anything, so the
   compiler would otherwise read the grid again for every element. */

#ifndef QAT_GRIDS_H
#define QAT_GRIDS_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define CHUNK 4096 /* elements of a short float sum */
typedef int64_t i64;

typedef struct {
  float step, zero, low, high;
} Grid;

static inline i64 at_most(i64 a, i64 b) { return a < b ? a : b; }

static inline float clampf(float v, float low, float high) {
  v = v < low ? low : v; /* NaN stays NaN */
  return v > high ? high : v;
}

/* NaN becomes some code; callers detect it by summing c - c, which is 0 or NaN. */
static inline uint8_t as_code(float c) { return (uint8_t)(int32_t)c; }

static inline float code_of(float x, Grid g) { return clampf(rintf(x / g.step) + g.zero, g.low, g.high); }

/* The quantizer's derivatives at x: whether a gradient passes, and the slope with respect to the step. */
static inline float slope_of(float x, Grid g, int *inside) {
  const float v = x / g.step, bounded = clampf(v, g.low - g.zero, g.high - g.zero);
  *inside = bounded == v;
  return *inside ? rintf(v) - v : bounded;
}

/* ---- learned steps; see structures.py ---- */

#define LARGEST 1e18f /* the upper bound of a learned scale */

typedef struct {
  const float *scale, *smallest, *zero_point; /* zero_point NULL: 0 */
  float low, high, shift;
  double factor;
  int relative;
} LearnedGrid;

/* As `positive_scale` reads it: a NaN acts as smallest. */
static inline float step_in_force(float scale, float smallest) {
  const float step = scale >= smallest ? scale : smallest;
  return step > LARGEST ? LARGEST : step;
}

static inline Grid grid_of(LearnedGrid q) {
  const float zero = q.zero_point ? clampf(rintf(*q.zero_point), q.low, q.high) : 0;
  const Grid g = {step_in_force(*q.scale, *q.smallest), zero + q.shift, q.low + q.shift, q.high + q.shift};
  return g;
}

/* Step and zero for readers of the codes; the step is NaN if one of the values was. */
static inline void write_qparams(float *qparams, Grid g, float bad) {
  qparams[0] = bad != bad ? NAN : g.step;
  qparams[1] = g.zero;
}

/* The scale's gradient from that of the step. A scale below its lower bound gets no gradient that would lower it
   further. */
static inline float learned_gradient(double total, float scale, float smallest, double factor, int relative) {
  const double step = step_in_force(scale, smallest), gradient = total * factor * (relative ? step * step : 1);
  return scale < smallest && gradient > 0 ? 0.0f : (float)gradient;
}

static inline float gradient_of(double total, LearnedGrid q) {
  return learned_gradient(total, *q.scale, *q.smallest, q.factor, q.relative);
}

#endif
