/* Tensors with channels. Where these lie innermost, the tensor is gone through in rows, and what belongs to a channel
   is repeated to the length of a row. (Several rows side by side would load that once for all: a third faster in the
   cache, half as fast from memory.) */

#ifndef QAT_ROWS_H
#define QAT_ROWS_H

#include "grids.h"

#define WIDE 512 /* shorter rows of channels are joined to rows of about so many */
#define LINE 16  /* floats of a cache line; loads that cross two take twice as long */
#define SHORT 64 /* rows of channels whose sums are short enough for floats */

typedef struct {
  i64 outer, channels, inner;
} Extent;

/* Rows of `width` elements, of which the last may be shorter; `pitch` is the width in whole lines. */
typedef struct {
  i64 width, pitch, rows;
} Joined;

static inline i64 at_most(i64 a, i64 b) { return a < b ? a : b; }

static inline Joined joined(Extent s) {
  i64 several = s.channels < WIDE ? WIDE / s.channels : 1;
  several -= several >= LINE ? several % LINE : several > 1 ? several % 2 : 0; /* of even channels: whole lines */
  const i64 width = s.channels * several, elements = s.outer * s.channels;
  const Joined j = {width, (width + LINE - 1) / LINE * LINE, (elements + width - 1) / width};
  return j;
}

static inline i64 length_of(Joined j, Extent s, i64 row) {
  return at_most(s.outer * s.channels - row * j.width, j.width);
}

/* rows whose sums are short */
static inline i64 block_of(Joined j, Extent s) {
  return SHORT * s.channels / j.width + 1;
}

/* `count` rows of floats that begin with a line each */
static inline float *row_buffers(Joined j, int count) { return aligned_alloc(LINE * 4, count * j.pitch * 4); }

static inline float *repeated(float *to, const float *values, Extent s, Joined j) {
  for (i64 i = 0; i < j.width; i += s.channels) memcpy(to + i, values, s.channels * sizeof(float));
  return to;
}

/* what the channels have in a row, added up */
static inline void gathered(double *to, const double *row, Extent s, Joined j) {
  for (i64 i = 0; i < j.width; i++) to[i % s.channels] += row[i];
}

#endif
