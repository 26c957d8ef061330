/* The runtime's allocation calls: device memory, stream-ordered pools, pinned host memory, pointer queries. */
#include "vgpu.h"

#include <pthread.h>
#include <string.h>

EXPORT int cudaMalloc(void **address, size_t size) {
  int device = device_enter();
  reuse_watch();
  *address = NULL;
  if (!size) return VGPU_SUCCESS;
  *address = memory_allocate(device, size, MEMORY_DEVICE);
  return *address ? VGPU_SUCCESS : vgpu_fail(VGPU_OUT_OF_MEMORY);
}

EXPORT int cudaFree(void *address) {
  device_enter();
  if (address && !memory_free(address)) return vgpu_fail(VGPU_INVALID_VALUE);
  return VGPU_SUCCESS;
}

EXPORT int cudaHostAlloc(void **address, size_t size, unsigned flags UNUSED) {
  device_enter();
  *address = size ? memory_pin(size, MEMORY_PINNED) : NULL;
  return *address || !size ? VGPU_SUCCESS : vgpu_fail(VGPU_OUT_OF_MEMORY);
}

EXPORT int cudaMallocHost(void **address, size_t size) { return cudaHostAlloc(address, size, 0); }

/* Managed memory wanders between host and device. Here it stays on the host and costs the device nothing. */
EXPORT int cudaMallocManaged(void **address, size_t size, unsigned flags UNUSED) {
  device_enter();
  *address = size ? memory_pin(size, MEMORY_MANAGED) : NULL;
  return *address ? VGPU_SUCCESS : vgpu_fail(size ? VGPU_OUT_OF_MEMORY : VGPU_INVALID_VALUE);
}
EXPORT int cudaMemPrefetchAsync(const void *address UNUSED, size_t size UNUSED) { return VGPU_SUCCESS; }
EXPORT int cudaMemAdvise(const void *address UNUSED, size_t size UNUSED, int advice UNUSED) { return VGPU_SUCCESS; }

EXPORT int cudaFreeHost(void *address) {
  if (address && !memory_free(address)) return vgpu_fail(VGPU_INVALID_VALUE);
  return VGPU_SUCCESS;
}

EXPORT int cudaHostRegister(void *address, size_t size, unsigned flags UNUSED) {
  device_enter();
  memory_register(address, size);
  return VGPU_SUCCESS;
}

EXPORT int cudaHostUnregister(void *address) {
  return memory_unregister(address) ? VGPU_SUCCESS : vgpu_fail(VGPU_INVALID_VALUE);
}

EXPORT int cudaHostGetDevicePointer(void **device_address, void *address, unsigned flags UNUSED) {
  *device_address = address;
  return VGPU_SUCCESS;
}

/* cudaPointerAttributes; CUDA 13 appended 64 reserved bytes. */
typedef struct {
  int type, device;
  void *device_pointer, *host_pointer;
#if VGPU_CUDA_MAJOR >= 13
  long reserved[8];
#endif
} pointer_attributes;
enum { POINTER_UNREGISTERED, POINTER_HOST, POINTER_DEVICE, POINTER_MANAGED };

EXPORT int cudaPointerGetAttributes(pointer_attributes *attributes, const void *address) {
  range block;
  memset(attributes, 0, sizeof *attributes);
  if (!memory_find(address, &block)) {
    attributes->device = -2; /* cudaInvalidDeviceId: not CUDA memory */
    return VGPU_SUCCESS;
  }
  bool host = block.kind == MEMORY_PINNED || block.kind == MEMORY_REGISTERED;
  attributes->type = host ? POINTER_HOST : block.kind == MEMORY_MANAGED ? POINTER_MANAGED : POINTER_DEVICE;
  attributes->device = host ? device_current() : block.device;
  attributes->device_pointer = (void *)address;
  attributes->host_pointer = host ? (void *)address : NULL;
  return VGPU_SUCCESS;
}

/* Stream-ordered pools, for PyTorch's cudaMallocAsync backend: one default pool a device. A freed block goes back to
 * the pool and stays reserved until the release threshold or a trim gives it up; here the pool keeps only the sum of
 * what it may keep, since with a driver that maps pages freely any block fits any request. */
typedef struct {
  size_t reserved, reserved_peak, used, used_peak;
  uint64_t threshold;
} pool;
static pool pools[VGPU_MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static pool *pool_of(void *handle) {
  pool *candidate = handle;
  return candidate >= pools && candidate < pools + VGPU_MAX_DEVICES ? candidate : NULL;
}

static void pool_trim(int device, size_t keep) {
  pool *p = &pools[device];
  if (keep < p->used) keep = p->used;
  if (p->reserved <= keep) return;
  memory_discharge(device, p->reserved - keep);
  p->reserved = keep;
}

EXPORT int cudaDeviceGetDefaultMemPool(void **handle, int device) {
  if (device < 0 || device >= vgpu_configuration()->device_count) return vgpu_fail(VGPU_INVALID_DEVICE);
  *handle = &pools[device];
  return VGPU_SUCCESS;
}

EXPORT int cudaDeviceGetMemPool(void **handle, int device) { return cudaDeviceGetDefaultMemPool(handle, device); }

EXPORT int cudaMallocAsync(void **address, size_t size, void *stream UNUSED) {
  int device = device_enter();
  pool *p = &pools[device];
  size_t rounded = (size + VGPU_GRANULARITY - 1) & ~(VGPU_GRANULARITY - 1);
  reuse_watch();
  *address = NULL;
  if (!size) return VGPU_SUCCESS;
  pthread_mutex_lock(&lock);
  size_t missing = p->used + rounded > p->reserved ? p->used + rounded - p->reserved : 0;
  bool fits = !missing || memory_charge(device, missing);
  if (fits) *address = memory_allocate(device, size, MEMORY_POOL);
  if (*address) {
    p->reserved += missing;
    p->used += rounded;
    if (p->reserved_peak < p->reserved) p->reserved_peak = p->reserved;
    if (p->used_peak < p->used) p->used_peak = p->used;
  }
  pthread_mutex_unlock(&lock);
  return *address ? VGPU_SUCCESS : vgpu_fail(VGPU_OUT_OF_MEMORY);
}

EXPORT int cudaFreeAsync(void *address, void *stream UNUSED) {
  range block;
  if (!address) return VGPU_SUCCESS;
  if (!memory_find(address, &block) || block.kind != MEMORY_POOL) return cudaFree(address);
  pthread_mutex_lock(&lock);
  memory_free(address);
  pools[block.device].used -= block.size;
  pthread_mutex_unlock(&lock);
  return VGPU_SUCCESS;
}

enum { POOL_THRESHOLD = 4, POOL_RESERVED, POOL_RESERVED_PEAK, POOL_USED, POOL_USED_PEAK };

EXPORT int cudaMemPoolGetAttribute(void *handle, int which, void *value) {
  pool *p = pool_of(handle);
  if (!p) return vgpu_fail(VGPU_INVALID_VALUE);
  switch (which) {
    case POOL_THRESHOLD: *(uint64_t *)value = p->threshold; break;
    case POOL_RESERVED: *(uint64_t *)value = p->reserved; break;
    case POOL_RESERVED_PEAK: *(uint64_t *)value = p->reserved_peak; break;
    case POOL_USED: *(uint64_t *)value = p->used; break;
    case POOL_USED_PEAK: *(uint64_t *)value = p->used_peak; break;
    default: *(int *)value = 1; /* the reuse policies */
  }
  return VGPU_SUCCESS;
}

EXPORT int cudaMemPoolSetAttribute(void *handle, int which, void *value) {
  pool *p = pool_of(handle);
  if (!p) return vgpu_fail(VGPU_INVALID_VALUE);
  if (which == POOL_THRESHOLD) p->threshold = *(uint64_t *)value;
  if (which == POOL_RESERVED_PEAK) p->reserved_peak = p->reserved;
  if (which == POOL_USED_PEAK) p->used_peak = p->used;
  return VGPU_SUCCESS;
}

EXPORT int cudaMemPoolSetAccess(void *handle, const void *access UNUSED, size_t count UNUSED) {
  return pool_of(handle) ? VGPU_SUCCESS : vgpu_fail(VGPU_INVALID_VALUE);
}

EXPORT int cudaMemPoolTrimTo(void *handle, size_t keep) {
  pool *p = pool_of(handle);
  if (!p) return vgpu_fail(VGPU_INVALID_VALUE);
  pthread_mutex_lock(&lock);
  pool_trim((int)(p - pools), keep);
  pthread_mutex_unlock(&lock);
  return VGPU_SUCCESS;
}
