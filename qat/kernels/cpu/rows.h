/* Tensors with channels. If these are innermost, the kernels go through the tensor in rows, and a channel's numbers are
   repeated to the length of a row. (Processing several rows side by side would load them once: a third faster in the
   cache, but half as fast from memory.) */

#ifndef QAT_ROWS_H
#define QAT_ROWS_H

#include "grids.h"

#define WIDE 512 /* shorter rows of channels are joined to rows of about this length */
#define LINE 16  /* floats in a cache line; loads across two lines take twice as long */
#define SHORT 64 /* so many rows of channels can be summed in floats */

typedef struct {
  i64 outer, channels, inner;
} Extent;

/* Rows of `width` elements; the last may be shorter. `pitch` is the width rounded up to whole lines. */
typedef struct {
  i64 width, pitch, rows;
} Joined;

static inline Joined joined(Extent s) {
  i64 several = s.channels < WIDE ? WIDE / s.channels : 1;
  several -= several >= LINE ? several % LINE : several > 1 ? several % 2 : 0; /* with even channels: whole lines */
  const i64 width = s.channels * several, elements = s.outer * s.channels;
  const Joined j = {width, (width + LINE - 1) / LINE * LINE, (elements + width - 1) / width};
  return j;
}

static inline i64 length_of(Joined j, Extent s, i64 row) {
  return at_most(s.outer * s.channels - row * j.width, j.width);
}

/* The number of rows that are summed in floats. */
static inline i64 block_of(Joined j, Extent s) {
  return SHORT * s.channels / j.width + 1;
}

/* `count` rows of floats, each aligned to a line. */
static inline float *row_buffers(Joined j, int count) { return aligned_alloc(LINE * 4, count * j.pitch * 4); }

static inline float *repeated(float *to, const float *values, Extent s, Joined j) {
  for (i64 i = 0; i < j.width; i += s.channels) memcpy(to + i, values, s.channels * sizeof(float));
  return to;
}

/* Adds the sums of a row's elements up by channel. */
static inline void gathered(double *to, const double *row, Extent s, Joined j) {
  for (i64 i = 0; i < j.width; i++) to[i % s.channels] += row[i];
}

static inline int all_finite(const double *values, i64 n) {
  int finite = 1;
  for (i64 i = 0; i < n; i++) finite &= values[i] - values[i] == 0;
  return finite;
}

#endif
