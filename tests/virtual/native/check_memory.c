/* The books: capacity, granularity, address reuse, expandable segments, pools, pinned memory. */
#include "check.h"
#include "vgpu.h"

#include <string.h>

#define MIB ((size_t)1 << 20)

int cudaMalloc(void **address, size_t size);
int cudaFree(void *address);
int cudaSetDevice(int device);
int cudaMemGetInfo(size_t *free_bytes, size_t *total);
int cudaMemcpy(void *to, const void *from, size_t size, int kind);
int cudaHostAlloc(void **address, size_t size, unsigned flags);
int cudaFreeHost(void *address);
int cudaMallocAsync(void **address, size_t size, void *stream);
int cudaFreeAsync(void *address, void *stream);
int cudaMemPoolTrimTo(void *pool, size_t keep);
int cudaDeviceGetDefaultMemPool(void **pool, int device);
int cuMemAddressReserve(uintptr_t *address, size_t size, size_t alignment, uintptr_t wish, unsigned long long flags);
int cuMemAddressFree(uintptr_t address, size_t size);
int cuMemCreate(void **handle, size_t size, const void *properties, unsigned long long flags);
int cuMemRelease(void *handle);
int cuMemMap(uintptr_t address, size_t size, size_t offset, void *handle, unsigned long long flags);
int cuMemUnmap(uintptr_t address, size_t size);

static size_t free_bytes(void) {
  size_t left, total;
  cudaMemGetInfo(&left, &total);
  CHECK(total == 4096 * MIB);
  return left;
}

static void device_memory(void) {
  void *first, *second, *third;
  CHECK(free_bytes() == (4096 - 100 - 50) * MIB); /* a context and other processes */
  CHECK(cudaMalloc(&first, 1) == 0);
  CHECK(free_bytes() == (3946 - 2) * MIB);
  CHECK(cudaMalloc(&second, 1000 * MIB) == 0);
  CHECK(cudaMalloc(&third, 3000 * MIB) == VGPU_OUT_OF_MEMORY && third == NULL);
  CHECK(cudaMalloc(&third, 2944 * MIB) == 0 && free_bytes() == 0);
  CHECK(cudaFree(second) == 0);
  CHECK(cudaMalloc(&second, 500 * MIB) == 0);
  CHECK((char *)second == (char *)first + 2 * MIB); /* the lowest free address again */
  CHECK(cudaFree((char *)third + MIB) == VGPU_INVALID_VALUE);
  CHECK(cudaFree(first) == 0 && cudaFree(second) == 0 && cudaFree(third) == 0);
  CHECK(cudaFree(third) == VGPU_INVALID_VALUE);
  CHECK(free_bytes() == 3946 * MIB);
}

static void copies(void) {
  void *address;
  int number = 42, read = -1;
  char *large = malloc(16 * MIB);
  memset(large, 7, 16 * MIB);
  CHECK(cudaMalloc(&address, 32 * MIB) == 0);
  CHECK(cudaMemcpy(&read, address, sizeof read, 2) == 0 && read == 0);
  CHECK(cudaMemcpy(address, &number, sizeof number, 1) == 0);
  CHECK(cudaMemcpy((char *)address + MIB, address, sizeof number, 3) == 0);
  CHECK(cudaMemcpy(&read, (char *)address + MIB, sizeof read, 2) == 0 && read == 42);
  CHECK(cudaMemcpy(large, address, 16 * MIB, 2) == 0); /* zeros, but for what is known */
  CHECK(*(int *)large == 42 && large[4] == 0 && large[16 * MIB - 1] == 0 && *(int *)(large + MIB) == 42);
  CHECK(cudaMemcpy(address, large, 16 * MIB, 1) == 0); /* too large to be remembered */
  CHECK(cudaMemcpy(&read, address, sizeof read, 2) == 0 && read == 0);
  CHECK(cudaMemcpy(address, &number, sizeof number, 1) == 0);
  CHECK(cudaFree(address) == 0 && cudaMalloc(&address, 32 * MIB) == 0);
  CHECK(cudaMemcpy(&read, address, sizeof read, 2) == 0 && read == 0);
  CHECK(cudaFree(address) == 0);
  free(large);
}

static void expandable_segments(void) {
  int properties[8] = {1, 0, 1, 0}; /* pinned, no handle types, on a device, number 0 */
  uintptr_t segment;
  void *handle, *refused;
  size_t before = free_bytes();
  CHECK(cuMemAddressReserve(&segment, 5000 * MIB, 0, 0, 0) == 0); /* address space alone */
  CHECK(free_bytes() == before);
  CHECK(cuMemCreate(&handle, 20 * MIB, properties, 0) == 0 && free_bytes() == before - 20 * MIB);
  CHECK(cuMemCreate(&refused, 4096 * MIB, properties, 0) == VGPU_OUT_OF_MEMORY);
  CHECK(cuMemCreate(&refused, 1, properties, 0) == VGPU_INVALID_VALUE);
  CHECK(cuMemMap(segment + 40 * MIB, 20 * MIB, 0, handle, 0) == 0);
  CHECK(cuMemMap(segment + 40 * MIB, 20 * MIB, 0, handle, 0) == VGPU_INVALID_VALUE);
  CHECK(cuMemRelease(handle) == 0 && free_bytes() == before - 20 * MIB); /* the mapping keeps it */
  CHECK(cuMemUnmap(segment + 40 * MIB, 20 * MIB) == 0 && free_bytes() == before);
  CHECK(cuMemAddressFree(segment, 5000 * MIB) == 0);
}

static void pools(void) {
  void *pool, *first, *second;
  size_t before = free_bytes();
  CHECK(cudaDeviceGetDefaultMemPool(&pool, 0) == 0);
  CHECK(cudaMallocAsync(&first, 100 * MIB, NULL) == 0 && cudaMallocAsync(&second, 50 * MIB, NULL) == 0);
  CHECK(free_bytes() == before - 150 * MIB);
  CHECK(cudaFreeAsync(first, NULL) == 0 && free_bytes() == before - 150 * MIB); /* the pool keeps it */
  CHECK(cudaMallocAsync(&first, 100 * MIB, NULL) == 0 && free_bytes() == before - 150 * MIB);
  CHECK(cudaFreeAsync(first, NULL) == 0 && cudaMemPoolTrimTo(pool, 0) == 0 && free_bytes() == before - 50 * MIB);
  CHECK(cudaFreeAsync(second, NULL) == 0 && cudaMemPoolTrimTo(pool, 0) == 0 && free_bytes() == before);
}

static void pinned(void) {
  void *address;
  vgpu_books books;
  CHECK(cudaHostAlloc(&address, 3 * MIB, 0) == 0);
  memset(address, 1, 3 * MIB);
  CHECK(vgpu_read_books(0, &books) == 0 && books.pinned_bytes == 3 * MIB);
  CHECK(cudaFreeHost(address) == 0);
  CHECK(vgpu_read_books(0, &books) == 0 && books.pinned_bytes == 0 && books.peak_pinned_bytes == 3 * MIB);
}

int main(void) {
  setenv("VGPU_COUNT", "2", 1);
  setenv("VGPU_TOTAL_MEMORY_BYTES", "4294967296", 1);
  setenv("VGPU_CONTEXT_BYTES", "104857600", 1);
  setenv("VGPU_OTHER_PROCESSES_BYTES", "52428800", 1);
  CHECK(!vgpu_is_armed());
  device_memory();
  CHECK(vgpu_is_armed());
  copies();
  expandable_segments();
  pools();
  pinned();
  CHECK(cudaSetDevice(2) == VGPU_INVALID_DEVICE && cudaSetDevice(1) == 0);
  device_memory(); /* a device of its own */
  return 0;
}
