#ifndef VGPU_REDUCE_H
#define VGPU_REDUCE_H

#include <stddef.h>

/* ncclRedOp_t; operations made with ncclRedOpCreatePreMulSum come after the built-in ones. */
enum { REDUCE_SUM, REDUCE_PRODUCT, REDUCE_MAXIMUM, REDUCE_MINIMUM, REDUCE_AVERAGE, REDUCE_SCALED_SUM };

size_t reduce_element_bytes(int type); /* of an ncclDataType_t; 0 if unknown */
void reduce_identical(void *elements, size_t count, int type, int operation, int ranks, double factor);

#endif
