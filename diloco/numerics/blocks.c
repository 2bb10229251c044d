// SPDX-License-Identifier: Apache-2.0
// What the syncer does to every value, in one pass over memory.
//
// The numpy code of codec.py, merge.py and outer.py is the reference:
// each function here gives its bits, by the same operations on the same values,
// each rounded by itself. So nothing here may be contracted (setup.py says
// -ffp-contract=off), and no sum may be reordered: that of squares has numpy's
// order. What is not finite is declined, and numpy does it, as it does all codecs
// but those of 4 and 8 bits. Plain C, called by native.py; it needs no header of
// Python.

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if FLT_EVAL_METHOD != 0 || defined(__FAST_MATH__)
#error "each operation must be rounded to its own type"
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the bytes of codecs are little-endian"
#endif

// The same code for wider vectors, chosen by the processor when loaded.
#if defined(__x86_64__) && defined(__linux__) && !defined(__clang__) && \
    __GNUC__ >= 12
#define CLONES \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif
#define INLINE static inline __attribute__((always_inline))

enum { SUM_VALUES = 1 << 16, LEAF_VALUES = 128, TILE_VALUES = 512 };

// A float from here up has integers as its last bits: adding it rounds to the
// nearest integer, ties to even, as rint does, and leaves it in two's complement.
static const float ROUND = 0x1.8p23f;
static const uint32_t MAGNITUDE = 0x7fffffff, INFINITE = 0x7f800000;

// Of this file, as compiled: native.py takes no other for its own.
const uint32_t diloco_source_crc = SOURCE_CRC;

INLINE uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

INLINE float float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

// Integers order magnitudes as floats do, with NaN above infinity.
INLINE uint32_t largest_of(const float *x, long n) {
  uint32_t largest = 0;
  for (long i = 0; i < n; i++) {
    uint32_t magnitude = bits_of(x[i]) & MAGNITUDE;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

// codec._DIVISOR.
INLINE float divisor_of(int bits) { return bits == 8 ? 127.0f : 7.47f; }

// BlockCodec._width: the bytes of the codes of a block of this many values.
INLINE long run_of(long width, int bits) {
  return bits == 8 ? width : (width + 1) / 2;
}

// BlockCodec._storable of the scale of a finite block.
INLINE float storable(float scale, int bits, int scale_bytes) {
  float level_max = (float)((1 << (bits - 1)) - 1);
  float bound = float_of(bits_of(FLT_MAX / level_max) & 0xffff0000);
  scale = scale < bound ? scale : bound;
  if (scale < FLT_MIN) scale = 0;
  if (scale_bytes == 4) return scale;
  uint32_t pattern = bits_of(scale);
  return float_of((pattern + 0x7fff + (pattern >> 16 & 1)) & 0xffff0000);
}

// BlockCodec._quantise and ._pack; `run` is the bytes of the block's codes.
// Returns the scale.
INLINE float encode_block(const float *x, long width, long run, uint32_t largest,
                          int bits, int scale_bytes, uint8_t *codes) {
  float scale = storable(float_of(largest) / divisor_of(bits), bits, scale_bytes);
  float step = scale == 0 ? 1 : scale;
  if (bits == 8) {
    for (long j = 0; j < run; j++)
      codes[j] = (uint8_t)bits_of(x[j] / step + ROUND);
    return scale;
  }
  long both = width - run;  // Bytes with two codes.
  for (long j = 0; j < both; j++) {
    uint32_t low = bits_of(x[j] / step + ROUND) & 15;
    uint32_t high = bits_of(x[run + j] / step + ROUND) & 15;
    codes[j] = (uint8_t)(low | high << 4);
  }
  if (both < run) codes[both] = bits_of(x[both] / step + ROUND) & 15;
  return scale;
}

// BlockCodec._unpack, and its one product per value.
INLINE void decode_block(float scale, const uint8_t *codes, long width, long run,
                         int bits, float *x) {
  if (bits == 8) {
    for (long j = 0; j < run; j++) x[j] = (float)(int8_t)codes[j] * scale;
    return;
  }
  long both = width - run;
  for (long j = 0; j < both; j++)
    x[j] = (float)(((codes[j] & 15) ^ 8) - 8) * scale;
  for (long j = 0; j < both; j++)
    x[run + j] = (float)(((codes[j] >> 4) ^ 8) - 8) * scale;
  if (both < run) x[both] = (float)(((codes[both] & 15) ^ 8) - 8) * scale;
}

INLINE float load_scale(const uint8_t *scales, long k, int scale_bytes) {
  uint32_t pattern = 0;
  memcpy((uint8_t *)&pattern + 4 - scale_bytes, scales + k * scale_bytes,
         scale_bytes);
  return float_of(pattern);
}

INLINE void store_scale(float scale, uint8_t *scales, long k, int scale_bytes) {
  uint32_t pattern = bits_of(scale);
  memcpy(scales + k * scale_bytes, (uint8_t *)&pattern + 4 - scale_bytes,
         scale_bytes);
}

// BlockCodec.encode, of block after block.
INLINE int encode_all(const float *x, long n, long block, int bits,
                      int scale_bytes, uint8_t *data) {
  uint8_t *codes = data + (n + block - 1) / block * scale_bytes;
  long full = n / block, run = block * bits / 8, tail = n % block;
  for (long k = 0; k < full; k++) {
    uint32_t largest = largest_of(x + k * block, block);
    if (largest >= INFINITE) return 1;
    float scale = encode_block(x + k * block, block, run, largest, bits,
                               scale_bytes, codes + k * run);
    store_scale(scale, data, k, scale_bytes);
  }
  if (tail) {
    uint32_t largest = largest_of(x + full * block, tail);
    if (largest >= INFINITE) return 1;
    float scale = encode_block(x + full * block, tail, run_of(tail, bits),
                               largest, bits, scale_bytes, codes + full * run);
    store_scale(scale, data, full, scale_bytes);
  }
  return 0;
}

// BlockCodec.decode, of values from the begin of a block to the end of one.
INLINE void decode_span(const uint8_t *data, long n, long block, int bits,
                        int scale_bytes, long begin, long end, float *x) {
  const uint8_t *codes = data + (n + block - 1) / block * scale_bytes;
  long run = block * bits / 8, tail = end % block, full = end / block;
  for (long k = begin / block; k < full; k++)
    decode_block(load_scale(data, k, scale_bytes), codes + k * run, block, run,
                 bits, x + k * block - begin);
  if (tail)
    decode_block(load_scale(data, full, scale_bytes), codes + full * run, tail,
                 run_of(tail, bits), bits, x + full * block - begin);
}

// Calls a function above with constants, for which its loops are then made.
#define SPECIALISED(CALL)                                  \
  if (bits == 4 && scale_bytes == 2 && block == 128) CALL(128, 4, 2); \
  if (bits == 4) CALL(block, 4, scale_bytes);              \
  CALL(block, 8, scale_bytes)

// Returns 1 if a value is not finite; `data` is then not written whole.
CLONES int diloco_encode(const float *x, long n, long block, int bits,
                         int scale_bytes, uint8_t *data) {
#define ENCODE(block, bits, scale_bytes) \
  return encode_all(x, n, block, bits, scale_bytes, data)
  SPECIALISED(ENCODE);
}

CLONES int diloco_decode(const uint8_t *data, long n, long block, int bits,
                         int scale_bytes, float *x) {
#define DECODE(block, bits, scale_bytes) \
  return decode_span(data, n, block, bits, scale_bytes, 0, n, x), 0
  SPECIALISED(DECODE);
}

// SGD with momentum, as outer.make_outer has it.
typedef struct {
  float minus_lr, momentum;
  int nesterov;
} Sgd;

// b' = Δ + μ·b, and -η·b', or with Nesterov -η·(Δ + μ·b').
INLINE float sgd_of(float delta, float trace, Sgd sgd, float *trace_to) {
  float moved = delta + sgd.momentum * trace;
  *trace_to = moved;
  return sgd.minus_lr * (sgd.nesterov ? delta + sgd.momentum * moved : moved);
}

// One round of outer.step, of block after block: SGD of Δ, then what is sent. The
// next residual serves as u + residual, the next Θ as what is sent, until each is
// made of it.
INLINE int round_all(const float *delta, const float *trace,
                     const float *residual, const float *theta, long n,
                     long block, int bits, int scale_bytes, Sgd sgd,
                     uint8_t *data, float *restrict trace_to,
                     float *restrict residual_to, float *restrict theta_to) {
  uint8_t *codes = data + (n + block - 1) / block * scale_bytes;
  long whole_run = block * bits / 8;
  for (long k = 0; k * block < n; k++) {
    long at = k * block, left = n - at, width = left < block ? left : block;
    long run = left < block ? run_of(left, bits) : whole_run;
    float *restrict wanted = residual_to + at, *restrict sent = theta_to + at;
    for (long j = 0; j < width; j++)
      wanted[j] = sgd_of(delta[at + j], trace[at + j], sgd, trace_to + at + j) +
                  residual[at + j];
    uint32_t largest = largest_of(wanted, width);
    if (largest >= INFINITE) return 1;
    uint8_t *to = codes + k * whole_run;
    float scale =
        left < block
            ? encode_block(wanted, width, run, largest, bits, scale_bytes, to)
            : encode_block(wanted, block, whole_run, largest, bits, scale_bytes,
                           to);
    store_scale(scale, data, k, scale_bytes);
    if (left < block)
      decode_block(scale, to, width, run, bits, sent);
    else
      decode_block(scale, to, block, whole_run, bits, sent);
    for (long j = 0; j < width; j++) wanted[j] -= sent[j];
    for (long j = 0; j < width; j++) sent[j] = theta[at + j] + sent[j];
  }
  return 0;
}

// Returns 1 if u + residual is not finite; no result is then written whole.
// `vectors`: Δ, b, residual, Θ, and the next b, residual and Θ.
CLONES int diloco_sgd_send(float *const *vectors, float minus_lr, float momentum,
                           int nesterov, long n, long block, int bits,
                           int scale_bytes, uint8_t *data) {
  Sgd sgd = {minus_lr, momentum, nesterov};
#define SGD_SEND(block, bits, scale_bytes)                                   \
  return round_all(vectors[0], vectors[1], vectors[2], vectors[3], n, block, \
                   bits, scale_bytes, sgd, data, vectors[4], vectors[5],     \
                   vectors[6])
  SPECIALISED(SGD_SEND);
}

// Σ x² in the order of numpy's pairwise sum of doubles.
INLINE double leaf_of_squares(const float *x, long n) {
  if (n < 8) {
    double sum = 0;
    for (long i = 0; i < n; i++) sum += (double)x[i] * x[i];
    return sum;
  }
  double r[8];
  for (int j = 0; j < 8; j++) r[j] = (double)x[j] * x[j];
  long i = 8;
  for (; i < n - n % 8; i += 8)
    for (int j = 0; j < 8; j++) r[j] += (double)x[i + j] * x[i + j];
  double sum = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
  for (; i < n; i++) sum += (double)x[i] * x[i];
  return sum;
}

CLONES static double leaf(const float *x, long n) { return leaf_of_squares(x, n); }

static double sum_of_squares(const float *x, long n) {
  if (n <= LEAF_VALUES) return leaf(x, n);
  long half = n / 2;
  half -= half % 8;
  return sum_of_squares(x, half) + sum_of_squares(x + half, n - half);
}

// The checks of a contribution, without its values in memory: the bits of the
// largest magnitude, and Σ x² of each SUM_VALUES values. `room` holds as many.
INLINE uint32_t inspect_all(const uint8_t *data, long n, long block, int bits,
                            int scale_bytes, double *sums, float *room) {
  uint32_t largest = 0;
  for (long at = 0; at < n; at += SUM_VALUES) {
    long end = n - at < SUM_VALUES ? n : at + SUM_VALUES;
    decode_span(data, n, block, bits, scale_bytes, at, end, room);
    uint32_t found = largest_of(room, end - at);
    largest = found > largest ? found : largest;
    *sums++ = sum_of_squares(room, end - at);
  }
  return largest;
}

CLONES uint32_t diloco_inspect(const uint8_t *data, long n, long block, int bits,
                               int scale_bytes, double *sums, float *room) {
#define INSPECT(block, bits, scale_bytes) \
  return inspect_all(data, n, block, bits, scale_bytes, sums, room)
  SPECIALISED(INSPECT);
}

// sum += c·v, or at first sum = c·v.
INLINE void add_scaled(float c, const float *v, long n, int first,
                       float *restrict sum) {
  if (first) {
    for (long i = 0; i < n; i++) sum[i] = c * v[i];
    return;
  }
  for (long i = 0; i < n; i++) {
    float product = c * v[i];
    sum[i] += product;
  }
}

// merge._sum of encoded v: Σ c·v in the order given, in tiles that stay in the
// cache, each decoded when it is added, and Σ x² of each SUM_VALUES of the result.
INLINE void sum_all(const uint8_t *const *datas, const float *cs, long m, long n,
                    long block, int bits, int scale_bytes, float *restrict sum,
                    double *squares) {
  float tile[TILE_VALUES];
  for (long at = 0; at < n; at += SUM_VALUES) {
    long end = n - at < SUM_VALUES ? n : at + SUM_VALUES;
    for (long i = at; i < end; i += TILE_VALUES) {
      long stop = end - i < TILE_VALUES ? end : i + TILE_VALUES;
      for (long k = 0; k < m; k++) {
        decode_span(datas[k], n, block, bits, scale_bytes, i, stop, tile);
        add_scaled(cs[k], tile, stop - i, k == 0, sum + i);
      }
    }
    *squares++ = sum_of_squares(sum + at, end - at);
  }
}

// `block` divides TILE_VALUES.
CLONES int diloco_weighted_sum_encoded(const uint8_t *const *datas,
                                       const float *cs, long m, long n,
                                       long block, int bits, int scale_bytes,
                                       float *sum, double *squares) {
#define SUM(block, bits, scale_bytes)                                        \
  return sum_all(datas, cs, m, n, block, bits, scale_bytes, sum, squares), 0
  SPECIALISED(SUM);
}

// CRC-32 as zlib's, of n bytes, a multiple of 16 from 64 up, by products without
// carries: "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
// Instruction", Gopal et al., 2009. Returns 0 if the processor has none.
#if defined(__x86_64__)
#define FOLD(x, by, next)                                             \
  _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, by, 0x00),      \
                              _mm_clmulepi64_si128(x, by, 0x11)), next)
__attribute__((target("pclmul,sse4.1"))) static uint32_t crc32_of(
    const uint8_t *data, long n, uint32_t crc) {
  const __m128i *at = (const __m128i *)data, *end = (const __m128i *)(data + n);
  // Powers of x modulo the polynomial, bits reversed, as in the paper.
  const __m128i by_64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
  const __m128i by_16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  const __m128i by_4 = _mm_set_epi64x(0, 0x0163cd6124);
  const __m128i barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
  const __m128i low = _mm_setr_epi32(-1, 0, -1, 0);
  __m128i x[4];
  for (int j = 0; j < 4; j++) x[j] = _mm_loadu_si128(at++);
  x[0] = _mm_xor_si128(x[0], _mm_cvtsi32_si128((int)~crc));
  for (; end - at >= 4; at += 4)
    for (int j = 0; j < 4; j++)
      x[j] = FOLD(x[j], by_64, _mm_loadu_si128(at + j));
  __m128i y = x[0];
  for (int j = 1; j < 4; j++) y = FOLD(y, by_16, x[j]);
  while (at < end) y = FOLD(y, by_16, _mm_loadu_si128(at++));
  // 128 bits to 64, to 32 by Barrett's reduction.
  y = _mm_xor_si128(_mm_srli_si128(y, 8), _mm_clmulepi64_si128(y, by_16, 0x10));
  y = _mm_xor_si128(_mm_srli_si128(y, 4),
                    _mm_clmulepi64_si128(_mm_and_si128(y, low), by_4, 0x00));
  __m128i q = _mm_clmulepi64_si128(_mm_and_si128(y, low), barrett, 0x10);
  q = _mm_clmulepi64_si128(_mm_and_si128(q, low), barrett, 0x00);
  return ~(uint32_t)_mm_extract_epi32(_mm_xor_si128(y, q), 1);
}
#endif

int diloco_crc32(const uint8_t *data, long n, uint32_t *crc) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1")) {
    *crc = crc32_of(data, n, 0);
    return 1;
  }
#endif
  return 0;
}
