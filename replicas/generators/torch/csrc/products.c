// Products of bfloat16 rows and packed weight matrices.
//
// A weight matrix is packed as panels of 64 columns. A panel holds, for each pair of features, the
// two weights of each column next to each other: the order in which the instructions of AVX512-BF16
// (16 columns times a pair) and of AMX (16 rows times 16 columns times 16 pairs) read it.
//
// A row's sums never depend on the rows beside it: every path adds the products of a row in the
// same order for every number of rows. The paths differ from one another in the last bits.
#include "simd.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

enum { MAX_ROWS = 32 };  // rows that are multiplied by a panel together

// Where the results of some rows and of a panel's columns go.
typedef struct target {
  bf16 *out;          // first row, first column of the panel
  const bf16 *other;  // the same place of the summand or factor
  int64_t stride;     // between rows, of both
  int64_t width;      // columns of the panel that exist
  int64_t then;       // a product_then
} target;

static target rows_behind(target to, int64_t rows) {
  to.out += rows * to.stride;
  if (to.other) to.other += rows * to.stride;
  return to;
}

#if defined(__AVX512BF16__)

// --- AVX512-BF16 --------------------------------------------------------------------------------

enum { DOT_ROWS = 6, VECTORS = PANEL_COLUMNS / 16 };

// Return exp(x) for x <= 0 with an error below 2 ulp. Source: Cephes, expf.
INLINE __m512 exponential(__m512 x) {
  const __m512 magic = _mm512_set1_ps(12582912.0f);  // a sum with it is rounded to an integer
  // The second operand is the result where one is NaN: NaN stays.
  x = _mm512_max_ps(_mm512_set1_ps(-87.0f), x);
  const __m512 power =
      _mm512_sub_ps(_mm512_fmadd_ps(x, _mm512_set1_ps(1.44269504f), magic), magic);
  __m512 rest = _mm512_fnmadd_ps(power, _mm512_set1_ps(0.693359375f), x);
  rest = _mm512_fmadd_ps(power, _mm512_set1_ps(2.12194440e-4f), rest);
  __m512 sum = _mm512_set1_ps(1.9875691500e-4f);
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.3981999507e-3f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(8.3334519073e-3f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(4.1665795894e-2f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.6666665459e-1f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(5.0000001201e-1f));
  sum = _mm512_fmadd_ps(sum, _mm512_mul_ps(rest, rest), rest);
  sum = _mm512_add_ps(sum, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(sum, power);
}

// Return x times its sigmoid.
INLINE __m512 swish(__m512 x) {
  const __m512 one = _mm512_set1_ps(1.0f);
  const __mmask16 is_negative = _mm512_movepi32_mask(_mm512_castps_si512(x));
  const __m512 raised = exponential(_mm512_or_ps(x, _mm512_set1_ps(-0.0f)));
  const __m512 share = _mm512_mask_mov_ps(one, is_negative, raised);
  return _mm512_mul_ps(x, _mm512_div_ps(share, _mm512_add_ps(one, raised)));
}

INLINE __m512 widened(__m256i stored) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(stored), 16));
}

// `then` is a constant of each caller.
INLINE void finish_rows(const float *sums, int64_t rows, const target *to, const int64_t then) {
  const int has_other = then == PRODUCT_PLUS || then == PRODUCT_TIMES;
  for (int64_t row = 0; row < rows; row++, sums += PANEL_COLUMNS) {
    bf16 *out = to->out + row * to->stride;
    const bf16 *other = has_other ? to->other + row * to->stride : NULL;
    for (int64_t i = 0; i < to->width; i += 32) {
      const int64_t left = to->width - i;
      const __mmask32 mask = left >= 32 ? 0xffffffffu : (1u << left) - 1;
      __m512 low = _mm512_loadu_ps(sums + i), high = _mm512_loadu_ps(sums + i + 16);
      if (has_other) {
        const __m512i beside = _mm512_maskz_loadu_epi16(mask, other + i);
        const __m512 a = widened(_mm512_castsi512_si256(beside));
        const __m512 b = widened(_mm512_extracti64x4_epi64(beside, 1));
        low = then == PRODUCT_PLUS ? _mm512_add_ps(low, a) : _mm512_mul_ps(low, a);
        high = then == PRODUCT_PLUS ? _mm512_add_ps(high, b) : _mm512_mul_ps(high, b);
      } else if (then == PRODUCT_SWISH) {
        low = swish(low);
        high = swish(high);
      }
      _mm512_mask_storeu_epi16(out + i, mask, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
  }
}

static void finish(const float *sums, int64_t rows, const target *to) {
  switch (to->then) {
    case PRODUCT_PLUS: return finish_rows(sums, rows, to, PRODUCT_PLUS);
    case PRODUCT_TIMES: return finish_rows(sums, rows, to, PRODUCT_TIMES);
    case PRODUCT_SWISH: return finish_rows(sums, rows, to, PRODUCT_SWISH);
    default: finish_rows(sums, rows, to, PRODUCT_ONLY);
  }
}

// Six rows and four vectors of columns fill 24 of the 32 registers with sums.
INLINE void sum_rows(const bf16 *x, int64_t size, const bf16 *panel, const float *start,
                     float *sums, const int rows) {
  __m512 found[DOT_ROWS][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) found[r][v] = _mm512_loadu_ps(start + v * 16);
  for (int64_t k = 0; k < size; k += 2, panel += 2 * PANEL_COLUMNS) {
    __m512i columns[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++) columns[v] = _mm512_loadu_si512(panel + v * 32);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++) {
      int32_t pair;
      memcpy(&pair, x + r * size + k, sizeof pair);
      const __m512bh everywhere = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; v++)
        found[r][v] = _mm512_dpbf16_ps(found[r][v], (__m512bh)columns[v], everywhere);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; v++)
      _mm512_storeu_ps(sums + r * PANEL_COLUMNS + v * 16, found[r][v]);
}

static void multiply_rows(const bf16 *x, int64_t num_rows, int64_t size, const bf16 *panel,
                          const float *start, float *sums, target to) {
  for (int64_t row = 0; row < num_rows; row += DOT_ROWS, x += DOT_ROWS * size) {
    const int64_t rows = num_rows - row < DOT_ROWS ? num_rows - row : DOT_ROWS;
    switch (rows) {
      case 6: sum_rows(x, size, panel, start, sums, 6); break;
      case 5: sum_rows(x, size, panel, start, sums, 5); break;
      case 4: sum_rows(x, size, panel, start, sums, 4); break;
      case 3: sum_rows(x, size, panel, start, sums, 3); break;
      case 2: sum_rows(x, size, panel, start, sums, 2); break;
      default: sum_rows(x, size, panel, start, sums, 1);
    }
    finish(sums, rows, &to);
    to = rows_behind(to, rows);
  }
}

#else

// --- vectors of the compiler's ------------------------------------------------------------------

// Return exp(x) for x <= 0 with an error below 2 ulp. Source: Cephes, expf.
INLINE float exponential(float x) {
  const float magic = 12582912.0f;  // a sum with it is rounded to an integer
  x = x < -87.0f ? -87.0f : x;
  const float shifted = x * 1.44269504f + magic;
  const float power = shifted - magic;
  const float rest = (x - power * 0.693359375f) + power * 2.12194440e-4f;
  float sum = 1.9875691500e-4f;
  sum = sum * rest + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * (rest * rest) + rest + 1.0f;
  uint32_t bits;
  memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 127u) << 23;  // two to that power
  float scale;
  memcpy(&scale, &bits, sizeof scale);
  return sum * scale;
}

// Return x times its sigmoid.
INLINE float swish(float x) {
  const float raised = exponential(x < 0.0f ? x : -x);
  return x * ((x < 0.0f ? raised : 1.0f) / (1.0f + raised));
}

static void finish(const float *sums, int64_t rows, const target *to) {
  for (int64_t row = 0; row < rows; row++, sums += PANEL_COLUMNS) {
    bf16 *out = to->out + row * to->stride;
    const bf16 *other = to->other ? to->other + row * to->stride : NULL;
    const int64_t width = to->width;
    switch (to->then) {
      case PRODUCT_PLUS:
        for (int64_t i = 0; i < width; i++)
          out[i] = round_bfloat16(sums[i] + widen_bfloat16(other[i]));
        break;
      case PRODUCT_TIMES:
        for (int64_t i = 0; i < width; i++)
          out[i] = round_bfloat16(sums[i] * widen_bfloat16(other[i]));
        break;
      case PRODUCT_SWISH:
        for (int64_t i = 0; i < width; i++) out[i] = round_bfloat16(swish(sums[i]));
        break;
      default:
        for (int64_t i = 0; i < width; i++) out[i] = round_bfloat16(sums[i]);
    }
  }
}

enum { FEW_VECTORS = 128 / VECTOR_BYTES, MANY_VECTORS = 2, TOGETHER = 4 };

// A pair of weights is read as 32 bits; each half is a float32 where the other half is zero.
INLINE void sum_rows(const bf16 *x, int64_t size, const bf16 *panel, const float *start,
                     float *sums, const int rows, const int vectors) {
  for (int column = 0; column < PANEL_COLUMNS; column += vectors * FLOATS) {
    floats found[TOGETHER][FEW_VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
      for (int v = 0; v < vectors; v++) found[r][v] = load_float32(start + column + v * FLOATS);
    const bf16 *pairs = panel + 2 * column;
    for (int64_t k = 0; k < size; k += 2, pairs += 2 * PANEL_COLUMNS)
#pragma GCC unroll 8
      for (int v = 0; v < vectors; v++) {
        words both;
        memcpy(&both, pairs + 2 * v * FLOATS, sizeof both);
        const floats first = (floats)(both << 16), second = (floats)(both & 0xffff0000u);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
          found[r][v] += first * widen_bfloat16(x[r * size + k]);
          found[r][v] += second * widen_bfloat16(x[r * size + k + 1]);
        }
      }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
      for (int v = 0; v < vectors; v++)
        store_float32(sums + r * PANEL_COLUMNS + column + v * FLOATS, found[r][v]);
  }
}

static void multiply_rows(const bf16 *x, int64_t num_rows, int64_t size, const bf16 *panel,
                          const float *start, float *sums, target to) {
  for (int64_t row = 0; row < num_rows; row += TOGETHER, x += TOGETHER * size) {
    const int64_t rows = num_rows - row < TOGETHER ? num_rows - row : TOGETHER;
    switch (rows) {
      case 4: sum_rows(x, size, panel, start, sums, 4, MANY_VECTORS); break;
      case 3: sum_rows(x, size, panel, start, sums, 3, MANY_VECTORS); break;
      case 2: sum_rows(x, size, panel, start, sums, 2, MANY_VECTORS); break;
      default: sum_rows(x, size, panel, start, sums, 1, FEW_VECTORS);
    }
    finish(sums, rows, &to);
    to = rows_behind(to, rows);
  }
}

#endif

#if defined(__AMX_BF16__)

// --- AMX ----------------------------------------------------------------------------------------

enum { TILE_ROWS = 16, TILE_FEATURES = 32, ROW_BYTES = 4 * PANEL_COLUMNS };

// Intrinsics of some compilers do not say which memory they touch.
#define MEMORY_BARRIER() __asm__ volatile("" ::: "memory")

// As the processor reads it.
typedef struct tile_shapes {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} tile_shapes;

// Shape the tiles for 1 to MAX_ROWS rows: 0 to 3 hold sums, 4 and 5 rows, 6 and 7 columns.
static void shape_tiles(int64_t num_rows) {
  tile_shapes shapes = {.palette = 1};
  const int64_t first = num_rows < TILE_ROWS ? num_rows : TILE_ROWS, second = num_rows - first;
  for (int tile = 0; tile < 8; tile++) {
    const int is_second = second > 0 && (tile == 2 || tile == 3 || tile == 5);
    shapes.row_bytes[tile] = 64;
    shapes.rows[tile] = (uint8_t)(tile >= 6 ? TILE_ROWS : is_second ? second : first);
  }
  MEMORY_BARRIER();
  _tile_loadconfig(&shapes);
  MEMORY_BARRIER();
}

// Sums of up to 16 rows with a panel.
static void sum_one_block(const bf16 *x, int64_t size, const bf16 *panel, const float *start,
                          float *sums) {
  MEMORY_BARRIER();
  _tile_loadd(0, start, 0);
  _tile_loadd(1, start + 16, 0);
  _tile_loadd(2, start + 32, 0);
  _tile_loadd(3, start + 48, 0);
  for (int64_t k = 0; k < size; k += TILE_FEATURES, panel += TILE_FEATURES * PANEL_COLUMNS) {
    _tile_loadd(4, x + k, 2 * size);
    _tile_loadd(6, panel, ROW_BYTES);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, panel + 32, ROW_BYTES);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, panel + 64, ROW_BYTES);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, panel + 96, ROW_BYTES);
    _tile_dpbf16ps(3, 4, 7);
  }
  _tile_stored(0, sums, ROW_BYTES);
  _tile_stored(1, sums + 16, ROW_BYTES);
  _tile_stored(2, sums + 32, ROW_BYTES);
  _tile_stored(3, sums + 48, ROW_BYTES);
  MEMORY_BARRIER();
}

// Sums of 17 to 32 rows with half a panel.
static void sum_two_blocks(const bf16 *x, int64_t size, const bf16 *panel, const float *start,
                           float *sums) {
  const bf16 *second = x + TILE_ROWS * size;
  MEMORY_BARRIER();
  _tile_loadd(0, start, 0);
  _tile_loadd(1, start + 16, 0);
  _tile_loadd(2, start, 0);
  _tile_loadd(3, start + 16, 0);
  for (int64_t k = 0; k < size; k += TILE_FEATURES, panel += TILE_FEATURES * PANEL_COLUMNS) {
    _tile_loadd(4, x + k, 2 * size);
    _tile_loadd(6, panel, ROW_BYTES);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, second + k, 2 * size);
    _tile_dpbf16ps(2, 5, 6);
    _tile_loadd(7, panel + 32, ROW_BYTES);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, ROW_BYTES);
  _tile_stored(1, sums + 16, ROW_BYTES);
  _tile_stored(2, sums + TILE_ROWS * PANEL_COLUMNS, ROW_BYTES);
  _tile_stored(3, sums + TILE_ROWS * PANEL_COLUMNS + 16, ROW_BYTES);
  MEMORY_BARRIER();
}

// The tiles are shaped for so many rows, or for MAX_ROWS of which there is a multiple.
static void multiply_tiles(const bf16 *x, int64_t num_rows, int64_t size, const bf16 *panel,
                           const float *start, float *sums, target to) {
  for (int64_t row = 0; row < num_rows; row += MAX_ROWS, x += MAX_ROWS * size) {
    const int64_t rows = num_rows - row < MAX_ROWS ? num_rows - row : MAX_ROWS;
    if (rows <= TILE_ROWS) {
      sum_one_block(x, size, panel, start, sums);
    } else {
      sum_two_blocks(x, size, panel, start, sums);
      sum_two_blocks(x, size, panel + PANEL_COLUMNS, start + 32, sums + 32);
    }
    finish(sums, rows, &to);
    to = rows_behind(to, rows);
  }
}

#endif

// --- all ----------------------------------------------------------------------------------------

typedef void multiply_function(const bf16 *x, int64_t num_rows, int64_t size, const bf16 *panel,
                               const float *start, float *sums, target to);

// A panel is read for all rows while it is in the caches.
static void multiply_some(multiply_function *multiply, const packed_matrix *matrix, const bf16 *x,
                          int64_t num_rows, int64_t first_panel, int64_t last_panel, int64_t then,
                          const bf16 *other, bf16 *out) {
  float sums[MAX_ROWS * PANEL_COLUMNS] __attribute__((aligned(64)));
  float start[PANEL_COLUMNS] __attribute__((aligned(64))) = {0};
  const int64_t size = matrix->num_inputs, stride = matrix->num_outputs;
  const bf16 *weight = matrix->weight, *bias = matrix->bias;
  for (int64_t panel = first_panel; panel < last_panel; panel++) {
    const int64_t column = panel * PANEL_COLUMNS, left = stride - column;
    const target to = {
        .out = out + column,
        .other = other ? other + column : NULL,
        .stride = stride,
        .width = left < PANEL_COLUMNS ? left : PANEL_COLUMNS,
        .then = then,
    };
    if (bias)
      for (int64_t i = 0; i < to.width; i++) start[i] = widen_bfloat16(bias[column + i]);
    multiply(x, num_rows, size, weight + panel * size * PANEL_COLUMNS, start, sums, to);
  }
}

void VARIANT(multiply_panels)(const packed_matrix *matrix, const bf16 *x, int64_t num_rows,
                              int64_t first_panel, int64_t last_panel, int64_t then,
                              const bf16 *other, bf16 *out) {
#if defined(__AMX_BF16__)
  if (matrix->uses_tiles) {
    // The rows that fill the tiles, then the rest: to shape tiles takes as long as to use them.
    const int64_t rest = num_rows % MAX_ROWS, whole = num_rows - rest;
    if (whole) {
      shape_tiles(MAX_ROWS);
      multiply_some(multiply_tiles, matrix, x, whole, first_panel, last_panel, then, other, out);
    }
    if (rest) {
      const int64_t at = whole * matrix->num_outputs;
      shape_tiles(rest);
      multiply_some(multiply_tiles, matrix, x + whole * matrix->num_inputs, rest, first_panel,
                    last_panel, then, other ? other + at : NULL, out + at);
    }
    _tile_release();  // a thread without tiles is quicker to switch
    return;
  }
#endif
  multiply_some(multiply_rows, matrix, x, num_rows, first_panel, last_panel, then, other, out);
}

void VARIANT(product)(void *given) {
  product_call *call = given;
  const packed_matrix *matrix = &call->matrix;
  const int64_t num_panels = panels_of(matrix->num_outputs), most = call->rows_of_task;
  for (int64_t task; (task = take_task(&call->tasks)) < call->tasks.count;) {
    const int64_t first = task / num_panels * most, panel = task % num_panels;
    const int64_t rows = call->num_rows - first < most ? call->num_rows - first : most;
    const int64_t at = first * matrix->num_outputs;
    const bf16 *x = call->x, *other = call->other;
    VARIANT(multiply_panels)(matrix, x + first * matrix->num_inputs, rows, panel, panel + 1,
                             call->then, other ? other + at : NULL, (bf16 *)call->out + at);
  }
}
