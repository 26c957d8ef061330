/* Copies and fills. Host memory is real; device memory has only the values of values.c. */
#define _GNU_SOURCE
#include "clock.h"
#include "trace.h"
#include "vgpu.h"

#include <string.h>
#include <sys/mman.h>

#define DISCARD_FROM ((size_t)8 << 20)

/* Zeroes host memory. Pages of a large buffer are handed back to the kernel, which gives zero pages at the next
 * read: gigabytes copied back from the device then cost no host memory until somebody looks at them. */
static void zero_host(char *to, size_t size) {
  if (size >= DISCARD_FROM) {
    char *first = (char *)(((uintptr_t)to + 4095) & ~(uintptr_t)4095);
    char *last = (char *)(((uintptr_t)to + size) & ~(uintptr_t)4095);
    if (madvise(first, (size_t)(last - first), MADV_DONTNEED) == 0) {
      memset(to, 0, (size_t)(first - to));
      memset(last, 0, (size_t)(to + size - last));
      return;
    }
  }
  memset(to, 0, size);
}

void copy_bytes(void *to, const void *from, size_t size) {
  bool to_device = memory_on_device(to), from_device = memory_on_device(from);
  if (!size) return;
  if (to_device && from_device) {
    values_copy((uintptr_t)to, (uintptr_t)from, size);
    nccl_note_copy(to, size);
  } else if (to_device) {
    if (size <= VALUES_COPY_LIMIT) values_write((uintptr_t)to, from, size);
    else values_forget((uintptr_t)to, size);
  } else if (from_device) {
    zero_host(to, size);
    values_read((uintptr_t)from, to, size);
  } else {
    memmove(to, from, size);
  }
}

void copy_fill(void *to, const void *pattern, size_t pattern_size, size_t size) {
  char bytes[4096];
  bool zero = true;
  for (size_t i = 0; i < pattern_size; i++) zero = zero && ((const char *)pattern)[i] == 0;
  if (memory_on_device(to)) {
    values_forget((uintptr_t)to, size);
    if (zero || size > VALUES_COPY_LIMIT) return;
  }
  for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = ((const char *)pattern)[i % pattern_size];
  for (size_t done = 0; done < size; done += sizeof bytes)
    copy_bytes((char *)to + done, bytes, size - done < sizeof bytes ? size - done : sizeof bytes);
}

EXPORT int cudaMemcpy(void *to, const void *from, size_t size, int kind UNUSED) {
  device_enter();
  copy_bytes(to, from, size);
  return VGPU_SUCCESS;
}

EXPORT int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind UNUSED, void *stream) {
  device_enter();
  bool over_pcie = !memory_on_device(to) || !memory_on_device(from);
  trace_work(TRACE_COPY, over_pcie ? TRACE_OVER_PCIE : TRACE_WITHIN_DEVICE, stream, (double)size, 1);
  clock_run(stream, clock_of_copy(size, over_pcie));
  copy_bytes(to, from, size);
  return VGPU_SUCCESS;
}

EXPORT int cudaMemcpyPeerAsync(void *to, int to_device UNUSED, const void *from, int from_device UNUSED, size_t size,
                               void *stream UNUSED) {
  device_enter();
  copy_bytes(to, from, size);
  return VGPU_SUCCESS;
}

EXPORT int cudaMemcpyPeer(void *to, int to_device, const void *from, int from_device, size_t size) {
  return cudaMemcpyPeerAsync(to, to_device, from, from_device, size, NULL);
}

EXPORT int cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                             int kind UNUSED, void *stream UNUSED) {
  device_enter();
  for (size_t row = 0; row < height; row++)
    copy_bytes((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
  return VGPU_SUCCESS;
}

EXPORT int cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                        int kind) {
  return cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, NULL);
}

/* A symbol is a variable of a kernel's module: no kernel will read it. */
EXPORT int cudaMemcpyToSymbol(const void *symbol UNUSED, const void *from UNUSED, size_t size UNUSED,
                              size_t offset UNUSED, int kind UNUSED) {
  device_enter();
  return VGPU_SUCCESS;
}

EXPORT int cudaMemset(void *to, int value, size_t size) {
  unsigned char byte = (unsigned char)value;
  device_enter();
  copy_fill(to, &byte, 1, size);
  return VGPU_SUCCESS;
}

EXPORT int cudaMemsetAsync(void *to, int value, size_t size, void *stream) {
  trace_work(TRACE_KERNEL, 0, stream, (double)size / 16, 1);
  clock_run(stream, clock_of_copy(size, false));
  return cudaMemset(to, value, size);
}

EXPORT int cuMemsetD32Async(uintptr_t to, unsigned value, size_t count, void *stream UNUSED) {
  device_enter();
  copy_fill((void *)to, &value, sizeof value, count * sizeof value);
  return VGPU_SUCCESS;
}

EXPORT int cuMemsetD32Async_ptsz(uintptr_t to, unsigned value, size_t count, void *stream) {
  return cuMemsetD32Async(to, value, count, stream);
}

EXPORT int cuMemsetD8Async(uintptr_t to, unsigned char value, size_t size, void *stream) {
  return cudaMemsetAsync((void *)to, value, size, stream);
}

EXPORT int cuMemcpyHtoDAsync_v2(uintptr_t to, const void *from, size_t size, void *stream) {
  return cudaMemcpyAsync((void *)to, from, size, 1, stream);
}

EXPORT int cuMemcpyDtoHAsync_v2(void *to, uintptr_t from, size_t size, void *stream) {
  return cudaMemcpyAsync(to, (const void *)from, size, 2, stream);
}

EXPORT int cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t size, void *stream) {
  return cudaMemcpyAsync((void *)to, (const void *)from, size, 3, stream);
}
