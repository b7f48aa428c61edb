/* Evaluation on integers: sums of products of codes become codes, or floats, in one pass. */

#include "rows.h"

#ifdef __AVX512VBMI__
#include <immintrin.h>
#endif

/* One bias and one scale per channel: y = clamp((sum + bias) * scale, floor, ceiling). */
typedef struct {
  const float *bias, *scale;
  float floor, ceiling;
} Rescaling;

static inline float rescaled(float sum, float bias, float scale, float floor, float ceiling) {
  return clampf((sum + bias) * scale, floor, ceiling);
}

static void codes_row(const float *restrict sums, uint8_t *restrict codes, const float *restrict bias,
                      const float *restrict scale, i64 n, Grid g, float floor, float ceiling) {
#pragma omp simd
  for (i64 c = 0; c < n; c++) codes[c] = as_code(code_of(rescaled(sums[c], bias[c], scale[c], floor, ceiling), g));
}

static void values_row(const float *restrict sums, float *restrict y, const float *restrict bias,
                       const float *restrict scale, i64 n, float floor, float ceiling) {
#pragma omp simd
  for (i64 c = 0; c < n; c++) y[c] = rescaled(sums[c], bias[c], scale[c], floor, ceiling);
}

static void centered_row(const float *restrict sums, float *restrict y, const float *restrict bias,
                         const float *restrict scale, i64 n, Grid g, float floor, float ceiling) {
#pragma omp simd
  for (i64 c = 0; c < n; c++) y[c] = code_of(rescaled(sums[c], bias[c], scale[c], floor, ceiling), g) - g.zero;
}

/* out may be codes. */
static void looked_up(const uint8_t *codes, uint8_t *out, const uint8_t *table, i64 n) {
  i64 i = 0;
#ifdef __AVX512VBMI__ /* two halves of the table, each in a pair of registers */
  __m512i part[4];
  memcpy(part, table, sizeof part);
  for (; i + 64 <= n; i += 64) {
    const __m512i at = _mm512_loadu_si512(codes + i);
    const __m512i low = _mm512_permutex2var_epi8(part[0], at, part[1]);
    const __m512i high = _mm512_permutex2var_epi8(part[2], at, part[3]);
    _mm512_storeu_si512(out + i, _mm512_mask_blend_epi8(_mm512_movepi8_mask(at), low, high));
  }
#endif
  for (; i < n; i++) out[i] = table[codes[i]];
}

static void values_of(const uint8_t *restrict codes, float *restrict y, const float *restrict table, i64 n) {
  for (i64 i = 0; i < n; i++) y[i] = table[codes[i]];
}

/* Channels are innermost. To `codes`, or to `y` where that is NULL: code - zero if the grid has levels, else the values;
   y may be sums. A table of 256 bytes or floats has what is written for each code instead. */
void requantize(const float *sums, uint8_t *codes, float *y, const void *table, Extent s, Rescaling r, Grid g,
                int threads) {
  const Joined j = joined(s);
  const i64 w = j.width;
  float *bias = repeated(row_buffers(j, 2), r.bias, s, j), *scale = repeated(bias + j.pitch, r.scale, s, j);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 k = 0; k < j.rows; k++) {
    const i64 n = length_of(j, s, k), at = k * w;
    if (!table && codes) codes_row(sums + at, codes + at, bias, scale, n, g, r.floor, r.ceiling);
    if (!table && !codes && g.low < g.high) centered_row(sums + at, y + at, bias, scale, n, g, r.floor, r.ceiling);
    if (!table && !codes && g.low >= g.high) values_row(sums + at, y + at, bias, scale, n, r.floor, r.ceiling);
    for (i64 c = 0; table && c < n; c += WIDE) {
      uint8_t found[WIDE];
      const i64 m = at_most(n - c, WIDE);
      codes_row(sums + at + c, found, bias + c, scale + c, m, g, r.floor, r.ceiling);
      if (codes)
        looked_up(found, codes + at + c, table, m);
      else
        values_of(found, y + at + c, table, m);
    }
  }
  free(bias);
}

void look_up(const uint8_t *codes, uint8_t *out, i64 n, const uint8_t *table, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 start = 0; start < n; start += CHUNK)
    looked_up(codes + start, out + start, table, at_most(n - start, CHUNK));
}

static void gated_row(const uint8_t *restrict codes, uint8_t *restrict out, const float *restrict gates, i64 n,
                      Grid from, Grid to) {
#pragma omp simd
  for (i64 c = 0; c < n; c++) out[c] = as_code(code_of((codes[c] - from.zero) * from.step * gates[c], to));
}

/* The codes of values times one gate for each channel of an image, in one pass. Channels are innermost, `s` is an image. */
void gate(const uint8_t *codes, const float *gates, uint8_t *out, i64 images, Extent s, Grid from, Grid to,
          int threads) {
  const Joined j = joined(s);
#pragma omp parallel for num_threads(threads) schedule(static)
  for (i64 image = 0; image < images; image++) {
    const i64 start = image * s.outer * s.channels;
    float *row = repeated(row_buffers(j, 1), gates + image * s.channels, s, j);
    for (i64 k = 0; k < j.rows; k++) {
      const i64 at = start + k * j.width;
      gated_row(codes + at, out + at, row, length_of(j, s, k), from, to);
    }
    free(row);
  }
}
