/* The driver API beside memory and kernels: devices, contexts, and the look-up of driver calls by name. */
#define _GNU_SOURCE
#include "vgpu.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static char contexts[VGPU_MAX_DEVICES];

EXPORT int cudaSetDevice(int device);

static int device_of(const void *context) {
  const char *place = context;
  return place >= contexts && place < contexts + VGPU_MAX_DEVICES ? (int)(place - contexts) : 0;
}

static bool exists(int device) { return device >= 0 && device < vgpu_configuration()->device_count; }

EXPORT int cuInit(unsigned flags UNUSED) { return VGPU_SUCCESS; }

EXPORT int cuDriverGetVersion(int *version) {
  *version = VGPU_CUDA_VERSION;
  return VGPU_SUCCESS;
}

EXPORT int cuDeviceGet(int *device, int ordinal) {
  *device = ordinal;
  return exists(ordinal) ? VGPU_SUCCESS : VGPU_INVALID_DEVICE;
}

EXPORT int cuDeviceGetCount(int *count) {
  *count = vgpu_configuration()->device_count;
  return VGPU_SUCCESS;
}

EXPORT int cuDeviceGetName(char *name, int size, int device) {
  if (!exists(device)) return VGPU_INVALID_DEVICE;
  snprintf(name, (size_t)size, "%s", vgpu_configuration()->name);
  return VGPU_SUCCESS;
}

EXPORT int cuDeviceTotalMem_v2(size_t *bytes, int device) {
  *bytes = vgpu_configuration()->total_memory_bytes;
  return exists(device) ? VGPU_SUCCESS : VGPU_INVALID_DEVICE;
}

EXPORT int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
  memset(uuid, 0, 16);
  memcpy(uuid, "vgpu", 4);
  if (!exists(device)) return VGPU_INVALID_DEVICE;
  uuid[15] = (unsigned char)(vgpu_configuration()->gpu_of[device] + 1);
  return VGPU_SUCCESS;
}

EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  if (!exists(device)) return VGPU_INVALID_DEVICE;
  *flags = 0;
  *active = memory_has_context(device);
  return VGPU_SUCCESS;
}

EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) {
  if (!exists(device)) return VGPU_INVALID_DEVICE;
  memory_use_device(device);
  *context = &contexts[device];
  return VGPU_SUCCESS;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device UNUSED) { return VGPU_SUCCESS; }

EXPORT int cuCtxGetCurrent(void **context) {
  *context = memory_has_context(device_current()) ? &contexts[device_current()] : NULL;
  return VGPU_SUCCESS;
}

EXPORT int cuCtxSetCurrent(void *context) { return context ? cudaSetDevice(device_of(context)) : VGPU_SUCCESS; }
EXPORT int cuCtxPushCurrent_v2(void *context) { return cuCtxSetCurrent(context); }
EXPORT int cuCtxPopCurrent_v2(void **context) { return context ? cuCtxGetCurrent(context) : VGPU_SUCCESS; }

EXPORT int cuCtxGetDevice(int *device) {
  *device = device_current();
  return VGPU_SUCCESS;
}

EXPORT int cuCtxGetLimit(size_t *value, int limit UNUSED) {
  *value = 1024;
  return VGPU_SUCCESS;
}

EXPORT int cuCtxSetLimit(int limit UNUSED, size_t value UNUSED) { return VGPU_SUCCESS; }

/* CUpointer_attribute, as far as Triton and PyTorch ask */
enum { POINTER_CONTEXT = 1, POINTER_MEMORY_TYPE = 2, POINTER_DEVICE_POINTER = 3, POINTER_DEVICE_ORDINAL = 9 };

EXPORT int cuPointerGetAttribute(void *value, int which, uintptr_t address) {
  range block;
  if (!memory_find((void *)address, &block)) return VGPU_INVALID_VALUE;
  bool host = block.kind == MEMORY_PINNED || block.kind == MEMORY_REGISTERED;
  switch (which) {
    case POINTER_CONTEXT: *(void **)value = &contexts[block.device]; break;
    case POINTER_MEMORY_TYPE: *(unsigned *)value = host ? 1 : 2; break;
    case POINTER_DEVICE_POINTER: *(uintptr_t *)value = address; break;
    case POINTER_DEVICE_ORDINAL: *(int *)value = block.device; break;
    default: return vgpu_unsupported("cuPointerGetAttribute", VGPU_NOT_SUPPORTED);
  }
  return VGPU_SUCCESS;
}

/* Versions of a call are suffixed; the plain name means the newest that the caller's CUDA knows. */
static void *find(const char *name) {
  static const char *const suffixes[] = {"", "_v2", "_v3"};
  char symbol[128];
  Dl_info self;
  static void *library;
  if (!library && dladdr((void *)find, &self)) library = dlopen(self.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  for (size_t i = 0; library && i < sizeof suffixes / sizeof *suffixes; i++) {
    snprintf(symbol, sizeof symbol, "%s%s", name, suffixes[i]);
    void *found = dlsym(library, symbol);
    if (found) return found;
  }
  return NULL;
}

/* The query result: 0 found, 1 not found. A caller that goes on without looking finds a null pointer. */
EXPORT int cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags UNUSED, int *result) {
  *function = find(name);
  if (result) *result = *function ? 0 : 1;
  return VGPU_SUCCESS;
}

EXPORT int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version UNUSED,
                                            unsigned long long flags, int *result) {
  return cudaGetDriverEntryPoint(name, function, flags, result);
}

EXPORT int cuGetProcAddress_v2(const char *name, void **function, int version UNUSED, uint64_t flags UNUSED, int *result) {
  *function = find(name);
  if (result) *result = *function ? 0 : 1;
  return *function ? VGPU_SUCCESS : VGPU_NOT_FOUND;
}

EXPORT int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) {
  return cuGetProcAddress_v2(name, function, version, flags, NULL);
}

/* Only NVIDIA's own CUDA runtime asks for these tables. PyTorch's is played here, so some other library has brought
 * its own, or has called a function of the runtime that is not played. Both could only work on a GPU. */
EXPORT int cuGetExportTable(const void **table, const void *id UNUSED) {
  Dl_info caller = {0};
  dladdr(__builtin_return_address(0), &caller);
  *table = NULL;
  fprintf(stderr,
          "virtual GPU: the CUDA runtime in %s was called; a library that has its own, or calls what is not answered, "
          "is not supported on the virtual device\n",
          caller.dli_fname ? caller.dli_fname : "a library");
  return vgpu_unsupported("cuGetExportTable", VGPU_NOT_SUPPORTED);
}
