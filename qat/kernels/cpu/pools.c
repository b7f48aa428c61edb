/* Max pooling of codes, which are ordered as their values are. */

#include "grids.h"

/* Sizes of a pool over (n, channels, height, width). */
typedef struct {
  i64 n, channels, height, width, out_height, out_width;
  i64 kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w;
} Pool;

/* The offset of an element; `nearest` says that channels are innermost. */
static i64 at(i64 n, i64 c, i64 y, i64 x, i64 channels, i64 height, i64 width, int nearest) {
  return nearest ? ((n * height + y) * width + x) * channels + c : ((n * channels + c) * height + y) * width + x;
}

static void first(const uint8_t *restrict in, uint8_t *restrict out, uint8_t *restrict where, uint8_t k, i64 n) {
#pragma omp simd
  for (i64 c = 0; c < n; c++) {
    out[c] = in[c];
    where[c] = k;
  }
}

static void larger(const uint8_t *restrict in, uint8_t *restrict out, uint8_t *restrict where, uint8_t k, i64 n) {
#pragma omp simd
  for (i64 c = 0; c < n; c++) {
    const uint8_t more = in[c] > out[c];
    where[c] = more ? k : where[c];
    out[c] = more ? in[c] : out[c];
  }
}

/* The largest code of every window, and its place in the window: the first of several equal ones. */
void max_pool(const uint8_t *codes, uint8_t *out, uint8_t *where, Pool p, int nearest, int threads) {
  const i64 planes = nearest ? 1 : p.channels, block = nearest ? p.channels : 1;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 row = 0; row < p.n * planes * p.out_height; row++) {
    const i64 y = row % p.out_height, c = row / p.out_height % planes, n = row / p.out_height / planes;
    for (i64 x = 0; x < p.out_width; x++) {
      const i64 to = at(n, c, y, x, p.channels, p.out_height, p.out_width, nearest);
      int begun = 0;
      for (i64 k = 0; k < p.kernel_h * p.kernel_w; k++) {
        const i64 from_y = y * p.stride_h - p.pad_h + k / p.kernel_w * p.dilation_h;
        const i64 from_x = x * p.stride_w - p.pad_w + k % p.kernel_w * p.dilation_w;
        if (from_y < 0 || from_y >= p.height || from_x < 0 || from_x >= p.width) continue;
        const uint8_t *in = codes + at(n, c, from_y, from_x, p.channels, p.height, p.width, nearest);
        (begun ? larger : first)(in, out + to, where + to, (uint8_t)k, block);
        begun = 1;
      }
    }
  }
}

static void add_where(const float *restrict grad, const uint8_t *restrict where, float *restrict to, uint8_t k,
                      i64 n) {
#pragma omp simd
  for (i64 c = 0; c < n; c++) to[c] += where[c] == k ? grad[c] : 0;
}

/* Every input gathers from the windows that contain it, so that no two threads write to one element. */
void max_pool_backward(const float *grad, const uint8_t *where, float *grad_in, Pool p, int nearest, int threads) {
  const i64 planes = nearest ? 1 : p.channels, block = nearest ? p.channels : 1;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 row = 0; row < p.n * planes * p.height; row++) {
    const i64 y = row % p.height, c = row / p.height % planes, n = row / p.height / planes;
    for (i64 x = 0; x < p.width; x++) {
      float *to = grad_in + at(n, c, y, x, p.channels, p.height, p.width, nearest);
      memset(to, 0, block * sizeof(float));
      for (i64 k = 0; k < p.kernel_h * p.kernel_w; k++) {
        const i64 down = y + p.pad_h - k / p.kernel_w * p.dilation_h;
        const i64 right = x + p.pad_w - k % p.kernel_w * p.dilation_w;
        if (down < 0 || right < 0 || down % p.stride_h || right % p.stride_w) continue;
        if (down / p.stride_h >= p.out_height || right / p.stride_w >= p.out_width) continue;
        const i64 from =
            at(n, c, down / p.stride_h, right / p.stride_w, p.channels, p.out_height, p.out_width, nearest);
        add_where(grad + from, where + from, to, (uint8_t)k, block);
      }
    }
  }
}
