/* The driver's virtual memory management: what PyTorch's expandable segments are made of. */
#include "vgpu.h"

#include <pthread.h>
#include <stdlib.h>

/* CUmemAllocationProp, as far as it is read: type, requested handle types, location type, location id. */
typedef struct {
  int type, handle_types, location_type, location_id;
  char rest[16];
} allocation_properties;

typedef struct physical {
  size_t size;
  int device, references;
} physical;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static range *mappings;

static void drop_reference(physical *memory) {
  if (--memory->references > 0) return;
  memory_discharge(memory->device, memory->size);
  free(memory);
}

EXPORT int cuMemGetAllocationGranularity(size_t *granularity, const allocation_properties *properties UNUSED,
                                         int option UNUSED) {
  *granularity = VGPU_GRANULARITY;
  return VGPU_SUCCESS;
}

EXPORT int cuMemAddressReserve(uintptr_t *address, size_t size, size_t alignment UNUSED, uintptr_t wish UNUSED,
                               unsigned long long flags UNUSED) {
  reuse_watch();
  *address = (uintptr_t)memory_allocate(device_enter(), size, MEMORY_RESERVED);
  return *address ? VGPU_SUCCESS : VGPU_OUT_OF_MEMORY;
}

EXPORT int cuMemAddressFree(uintptr_t address, size_t size UNUSED) {
  return memory_free((void *)address) ? VGPU_SUCCESS : VGPU_INVALID_VALUE;
}

EXPORT int cuMemCreate(physical **handle, size_t size, const allocation_properties *properties,
                       unsigned long long flags UNUSED) {
  int device = properties->location_id;
  if (device < 0 || device >= vgpu_configuration()->device_count) return VGPU_INVALID_DEVICE;
  if (size % VGPU_GRANULARITY) return VGPU_INVALID_VALUE;
  if (!memory_charge(device, size)) return VGPU_OUT_OF_MEMORY;
  physical *memory = calloc(1, sizeof *memory);
  if (!memory) abort();
  *memory = (physical){.size = size, .device = device, .references = 1};
  *handle = memory;
  return VGPU_SUCCESS;
}

EXPORT int cuMemRelease(physical *memory) {
  if (!memory) return VGPU_INVALID_VALUE;
  pthread_mutex_lock(&lock);
  drop_reference(memory);
  pthread_mutex_unlock(&lock);
  return VGPU_SUCCESS;
}

/* A mapping keeps its memory alive after the handle is released, as in the driver. */
EXPORT int cuMemMap(uintptr_t address, size_t size, size_t offset UNUSED, physical *memory,
                    unsigned long long flags UNUSED) {
  range reserved;
  if (!memory_find((void *)address, &reserved) || reserved.kind != MEMORY_RESERVED) return VGPU_INVALID_VALUE;
  pthread_mutex_lock(&lock);
  bool is_free = !range_containing(mappings, address);
  if (is_free) {
    range *mapping = range_new(address, size);
    mapping->data = memory;
    memory->references++;
    range_insert(&mappings, mapping);
  }
  pthread_mutex_unlock(&lock);
  return is_free ? VGPU_SUCCESS : VGPU_INVALID_VALUE;
}

EXPORT int cuMemUnmap(uintptr_t address, size_t size) {
  pthread_mutex_lock(&lock);
  range *mapping;
  while ((mapping = range_at_or_after(mappings, address)) && mapping->start < address + size) {
    range_remove(&mappings, mapping);
    drop_reference(mapping->data);
    free(mapping);
  }
  pthread_mutex_unlock(&lock);
  values_forget(address, size);
  return VGPU_SUCCESS;
}

EXPORT int cuMemSetAccess(uintptr_t address UNUSED, size_t size UNUSED, const void *access UNUSED, size_t count UNUSED) {
  return VGPU_SUCCESS;
}

EXPORT int cuMemRetainAllocationHandle(physical **handle, void *address) {
  pthread_mutex_lock(&lock);
  range *mapping = range_containing(mappings, (uintptr_t)address);
  if (mapping) {
    *handle = mapping->data;
    (*handle)->references++;
  }
  pthread_mutex_unlock(&lock);
  return mapping ? VGPU_SUCCESS : VGPU_INVALID_VALUE;
}

EXPORT int cuMemGetAllocationPropertiesFromHandle(allocation_properties *properties, physical *memory) {
  *properties = (allocation_properties){.type = 1, .location_type = 1, .location_id = memory->device};
  return VGPU_SUCCESS;
}

EXPORT int cuMemGetAddressRange_v2(uintptr_t *base, size_t *size, uintptr_t address) {
  range block;
  if (!memory_find((void *)address, &block)) return VGPU_NOT_FOUND;
  if (base) *base = block.start;
  if (size) *size = block.size;
  return VGPU_SUCCESS;
}

EXPORT int cuMemGetAddressRange(uintptr_t *base, size_t *size, uintptr_t address) {
  return cuMemGetAddressRange_v2(base, size, address);
}

/* Sharing memory between processes: there is no other process. */
EXPORT int cuMemExportToShareableHandle(void *shareable UNUSED, physical *memory UNUSED, int type UNUSED,
                                        unsigned long long flags UNUSED) {
  return vgpu_unsupported("cuMemExportToShareableHandle", VGPU_NOT_SUPPORTED);
}

EXPORT int cuMemImportFromShareableHandle(physical **memory UNUSED, void *shareable UNUSED, int type UNUSED) {
  return vgpu_unsupported("cuMemImportFromShareableHandle", VGPU_NOT_SUPPORTED);
}
