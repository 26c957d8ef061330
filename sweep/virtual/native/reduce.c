/* What a reduction over identical contributions gives: a sum is n times the value, a maximum is the value. */
#include "vgpu.h"
#include "reduce.h"

#include <math.h>
#include <string.h>

size_t reduce_element_bytes(int type) {
  static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type >= 0 && type < (int)(sizeof bytes / sizeof *bytes) ? bytes[type] : 0;
}

static double float_of_half(uint16_t bits) {
  int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  double magnitude = exponent == 31 ? (mantissa ? NAN : INFINITY)
                     : exponent     ? ldexp(1024 + mantissa, exponent - 25)
                                    : ldexp(mantissa, -24);
  return bits & 0x8000 ? -magnitude : magnitude;
}

static uint16_t half_of_float(double value) {
  uint16_t sign = signbit(value) ? 0x8000 : 0;
  double magnitude = fabs(value);
  int exponent;
  if (isnan(value)) return sign | 0x7e00;
  if (magnitude >= 65520) return sign | 0x7c00;
  if (magnitude < ldexp(1, -14)) return sign | (uint16_t)nearbyint(ldexp(magnitude, 24));
  frexp(magnitude, &exponent);
  /* a mantissa that rounds up to 2048 carries into the exponent, as it should */
  return sign | (uint16_t)(((exponent + 13) << 10) + (int)nearbyint(ldexp(magnitude, 11 - exponent)));
}

static double float_of_bfloat(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

static uint16_t bfloat_of_float(double value) {
  float narrow = (float)value;
  uint32_t wide;
  memcpy(&wide, &narrow, sizeof wide);
  if (isnan(narrow)) return 0x7fc0;
  return (uint16_t)((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
}

static double combined(double value, int operation, int ranks, double factor) {
  switch (operation) {
    case REDUCE_SUM: return value * ranks;
    case REDUCE_PRODUCT: return pow(value, ranks);
    case REDUCE_SCALED_SUM: return value * factor * ranks;
    default: return value; /* maximum, minimum, average */
  }
}

static uint64_t combined_integer(uint64_t value, int operation, int ranks) {
  uint64_t product = 1;
  if (operation == REDUCE_SUM || operation == REDUCE_SCALED_SUM) return value * (uint64_t)ranks;
  if (operation != REDUCE_PRODUCT) return value;
  for (int i = 0; i < ranks; i++) product *= value;
  return product;
}

#define EACH(type, expression)                                  \
  for (size_t i = 0; i < count; i++) {                          \
    type x;                                                     \
    memcpy(&x, (char *)elements + i * sizeof x, sizeof x);      \
    x = (type)(expression);                                     \
    memcpy((char *)elements + i * sizeof x, &x, sizeof x);      \
  }                                                             \
  break

void reduce_identical(void *elements, size_t count, int type, int operation, int ranks, double factor) {
  switch (type) {
    case 0: case 1: EACH(uint8_t, combined_integer(x, operation, ranks));
    case 2: case 3: EACH(uint32_t, combined_integer(x, operation, ranks));
    case 4: case 5: EACH(uint64_t, combined_integer(x, operation, ranks));
    case 6: EACH(uint16_t, half_of_float(combined(float_of_half(x), operation, ranks, factor)));
    case 7: EACH(float, combined(x, operation, ranks, factor));
    case 8: EACH(double, combined(x, operation, ranks, factor));
    case 9: EACH(uint16_t, bfloat_of_float(combined(float_of_bfloat(x), operation, ranks, factor)));
    default: break; /* fp8: left as it is */
  }
}
