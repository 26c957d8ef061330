/* Collectives of a world of identical ranks, and the arithmetic of their reductions. */
#include "check.h"
#include "reduce.h"
#include "vgpu.h"

#include <math.h>
#include <string.h>

typedef struct {
  char bytes[128];
} unique_id;
int ncclCommInitRank(void **comm, int ranks, unique_id id, int rank);
int ncclCommDestroy(void *comm);
int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, void *comm, void *stream);
int ncclAllGather(const void *from, void *to, size_t count, int type, void *comm, void *stream);
int ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation, void *comm, void *stream);
int ncclSend(const void *from, size_t count, int type, int peer, void *comm, void *stream);
int ncclRecv(void *to, size_t count, int type, int peer, void *comm, void *stream);
int ncclGroupStart(void);
int ncclGroupEnd(void);
int cudaMalloc(void **address, size_t size);
int cudaMemcpy(void *to, const void *from, size_t size, int kind);

enum { INT64 = 4, HALF = 6, BFLOAT16 = 9 };

static void sixteen_bit_floats(void) {
  for (int bits = 0; bits < 0x7c00; bits++) { /* every finite half, once: unchanged */
    uint16_t value = (uint16_t)bits;
    reduce_identical(&value, 1, HALF, REDUCE_SUM, 1, 1);
    CHECK(value == bits);
  }
  uint16_t half[] = {0x3c00, 0xc000, 0x7bff, 0x0001}; /* 1, -2, 65504, the smallest */
  reduce_identical(half, 4, HALF, REDUCE_SUM, 2, 1);
  CHECK(half[0] == 0x4000 && half[1] == 0xc400 && half[2] == 0x7c00 && half[3] == 0x0002);
  uint16_t bfloat[] = {0x3fc0, 0x8000}; /* 1.5, -0 */
  reduce_identical(bfloat, 2, BFLOAT16, REDUCE_SUM, 8, 1);
  CHECK(bfloat[0] == 0x4140 && bfloat[1] == 0x8000);
}

static void integers(void) {
  int64_t value = 3;
  reduce_identical(&value, 1, INT64, REDUCE_PRODUCT, 4, 1);
  CHECK(value == 81);
  reduce_identical(&value, 1, INT64, REDUCE_MAXIMUM, 4, 1);
  reduce_identical(&value, 1, INT64, REDUCE_AVERAGE, 4, 1);
  CHECK(value == 81);
}

static void collectives(void) {
  void *comm;
  char *device;
  int64_t sent[2] = {5, 6}, got[16] = {0};
  vgpu_books books;
  CHECK(ncclCommInitRank(&comm, 8, (unique_id){{0}}, 2) == 0);
  CHECK(cudaMalloc((void **)&device, 1 << 20) == 0);
  CHECK(vgpu_read_books(0, &books) == 0 && books.nccl_bytes == 0);
  cudaMemcpy(device, sent, sizeof sent, 1);
  ncclAllReduce(device, device + 1024, 2, INT64, REDUCE_SUM, comm, NULL);
  CHECK(vgpu_read_books(0, &books) == 0 && books.nccl_bytes == 10 << 20); /* at the first use */
  cudaMemcpy(got, device + 1024, sizeof sent, 2);
  CHECK(got[0] == 40 && got[1] == 48);
  ncclAllGather(device, device + 1024, 2, INT64, comm, NULL);
  cudaMemcpy(got, device + 1024, sizeof got, 2);
  for (int i = 0; i < 16; i++) CHECK(got[i] == sent[i % 2]);
  for (int64_t i = 0; i < 8; i++) cudaMemcpy(device + 8 * i, &i, sizeof i, 1);
  ncclReduceScatter(device, device + 1024, 1, INT64, REDUCE_MAXIMUM, comm, NULL);
  cudaMemcpy(got, device + 1024, 8, 2);
  CHECK(got[0] == 2); /* the part of rank 2 */
  ncclGroupStart(); /* all to all: what the others send to me is what I send to myself */
  for (int peer = 0; peer < 8; peer++) {
    ncclSend(device + 8 * peer, 1, INT64, peer, comm, NULL);
    ncclRecv(device + 1024 + 8 * peer, 1, INT64, peer, comm, NULL);
  }
  ncclGroupEnd();
  cudaMemcpy(got, device + 1024, 64, 2);
  for (int i = 0; i < 8; i++) CHECK(got[i] == 2);
  CHECK(ncclCommDestroy(comm) == 0);
  CHECK(vgpu_read_books(0, &books) == 0 && books.nccl_bytes == 0);
}

int main(void) {
  setenv("VGPU_NCCL_COMMUNICATOR_BYTES", "10485760", 1);
  sixteen_bit_floats();
  integers();
  collectives();
  return 0;
}
