/* Max pooling of codes, which are ordered as their values are. */

#include "grids.h"

/* Sizes of a pool over (n, channels, height, width). */
typedef struct {
  i64 n, channels, height, width, out_height, out_width;
  i64 kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
} Pool;

/* The windows of a row whose place `right` lies in the image: begin <= x < end; x * stride - shift is its column. */
typedef struct {
  i64 shift, begin, end;
} Span;

static Span span_of(Pool p, i64 right) {
  const i64 shift = p.pad_w - right * p.dilation_w, last = p.width - 1 + shift;
  const Span s = {shift, shift > 0 ? (shift + p.stride_w - 1) / p.stride_w : 0,
                  last < 0 ? 0 : at_most(p.out_width, last / p.stride_w + 1)};
  return s;
}

static inline void keep_larger(uint8_t in, uint8_t *out, uint8_t *where, uint8_t k) {
  const uint8_t more = in >= *out;
  *where = more ? k : *where;
  *out = more ? in : *out;
}

static void larger(const uint8_t *restrict in, i64 step, uint8_t *restrict out, uint8_t *restrict where, uint8_t k,
                   i64 n) {
  if (step > 1)
    for (i64 c = 0; c < n; c++) keep_larger(in[c * step], out + c, where + c, k);
  else if (n < 64) /* wider vectors would leave the 24 channels of a stem to scalar code */
#pragma omp simd simdlen(16)
    for (i64 c = 0; c < n; c++) keep_larger(in[c], out + c, where + c, k);
  else
#pragma omp simd
    for (i64 c = 0; c < n; c++) keep_larger(in[c], out + c, where + c, k);
}

/* The largest code of every window, and its place in the window: the first of several equal ones. The last place comes
   first, so that every code found is kept, and none has to begin. */
void max_pool(const uint8_t *codes, uint8_t *out, uint8_t *where, Pool p, int nearest, int threads) {
  const i64 planes = nearest ? 1 : p.channels, block = nearest ? p.channels : 1;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 row = 0; row < p.n * planes * p.out_height; row++) {
    const i64 y = row % p.out_height, plane = row / p.out_height, to = row * p.out_width * block;
    memset(out + to, 0, p.out_width * block);
    for (i64 k = p.kernel_h * p.kernel_w - 1; k >= 0; k--) {
      const i64 from_y = y * p.stride_h - p.pad_h + k / p.kernel_w * p.dilation_h;
      const Span s = span_of(p, k % p.kernel_w);
      if (from_y < 0 || from_y >= p.height) continue;
      const i64 from = (plane * p.height + from_y) * p.width - s.shift, n = block > 1 ? block : s.end - s.begin;
      for (i64 x = s.begin; x < s.end; x += block > 1 ? 1 : n) {
        const i64 at = to + x * block, in = (from + x * p.stride_w) * block;
        larger(codes + in, block > 1 ? 1 : p.stride_w, out + at, where + at, (uint8_t)k, n);
      }
    }
  }
}

static void add_where(const float *restrict grad, const uint8_t *restrict where, float *restrict to, i64 step,
                      uint8_t k, i64 n) {
  if (step > 1)
    for (i64 c = 0; c < n; c++) to[c * step] += where[c] == k ? grad[c] : 0;
  else
#pragma omp simd
    for (i64 c = 0; c < n; c++) to[c] += where[c] == k ? grad[c] : 0;
}

/* Every input row gathers from the windows that contain it, so that no two threads write to one element. */
void max_pool_backward(const float *grad, const uint8_t *where, float *grad_in, Pool p, int nearest, int threads) {
  const i64 planes = nearest ? 1 : p.channels, block = nearest ? p.channels : 1;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 row = 0; row < p.n * planes * p.height; row++) {
    const i64 y = row % p.height, plane = row / p.height;
    memset(grad_in + row * p.width * block, 0, p.width * block * sizeof(float));
    for (i64 k = 0; k < p.kernel_h * p.kernel_w; k++) {
      const i64 down = y + p.pad_h - k / p.kernel_w * p.dilation_h;
      const Span s = span_of(p, k % p.kernel_w);
      if (down < 0 || down % p.stride_h || down / p.stride_h >= p.out_height) continue;
      const i64 from = (plane * p.out_height + down / p.stride_h) * p.out_width;
      const i64 n = block > 1 ? block : s.end - s.begin;
      for (i64 x = s.begin; x < s.end; x += block > 1 ? 1 : n) {
        const i64 at = (from + x) * block, to = (row * p.width - s.shift + x * p.stride_w) * block;
        add_where(grad + at, where + at, grad_in + to, block > 1 ? 1 : p.stride_w, (uint8_t)k, n);
      }
    }
  }
}
