/* NVML from the same books. It is a library of its own because nvidia-ml-py opens libnvidia-ml.so.1 by name; the
 * books are in the preloaded libcuda.so.1. */
#include "../vgpu.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

enum { NVML_SUCCESS = 0, NVML_INVALID = 2, NVML_NOT_SUPPORTED = 3, NVML_NOT_FOUND = 6, NVML_TOO_SMALL = 7 };
#define DRIVER_VERSION (VGPU_CUDA_MAJOR >= 13 ? "580.65.06" : "550.54.15")

/* A handle is the device's number plus one, so that no handle is null. */
static int device_of(const void *handle) { return (int)(uintptr_t)handle - 1; }
static bool valid(const void *handle) {
  int device = device_of(handle);
  return device >= 0 && device < vgpu_look().gpu_count;
}
static int handle_of(int device, void **handle) {
  if (device < 0 || device >= vgpu_look().gpu_count) return NVML_INVALID;
  *handle = (void *)(uintptr_t)(device + 1);
  return NVML_SUCCESS;
}
static int text(char *out, unsigned size, const char *value) {
  if (strlen(value) >= size) return NVML_TOO_SMALL;
  strcpy(out, value);
  return NVML_SUCCESS;
}

EXPORT int nvmlInit(void) { return NVML_SUCCESS; }
EXPORT int nvmlInit_v2(void) { return NVML_SUCCESS; }
EXPORT int nvmlInitWithFlags(unsigned flags UNUSED) { return NVML_SUCCESS; }
EXPORT int nvmlShutdown(void) { return NVML_SUCCESS; }
EXPORT const char *nvmlErrorString(int code) {
  return code == NVML_SUCCESS         ? "Success"
         : code == NVML_INVALID       ? "Invalid Argument"
         : code == NVML_NOT_SUPPORTED ? "Not Supported"
         : code == NVML_NOT_FOUND     ? "Not Found"
                                      : "Unknown Error";
}

EXPORT int nvmlSystemGetDriverVersion(char *out, unsigned size) { return text(out, size, DRIVER_VERSION); }
EXPORT int nvmlSystemGetNVMLVersion(char *out, unsigned size) { return text(out, size, DRIVER_VERSION); }
EXPORT int nvmlSystemGetCudaDriverVersion(int *version) {
  *version = VGPU_CUDA_VERSION;
  return NVML_SUCCESS;
}
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }

EXPORT int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = (unsigned)vgpu_look().gpu_count;
  return NVML_SUCCESS;
}
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { return handle_of((int)index, handle); }

EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
  char candidate[VGPU_UUID_TEXT];
  for (int device = 0; device < vgpu_look().gpu_count; device++) {
    vgpu_uuid_text(device, candidate);
    if (strcasecmp(candidate, uuid) == 0) return handle_of(device, handle);
  }
  return NVML_NOT_FOUND;
}
EXPORT int nvmlDeviceGetUUID(void *handle, char *out, unsigned size) {
  char uuid[VGPU_UUID_TEXT];
  if (!valid(handle)) return NVML_INVALID;
  vgpu_uuid_text(device_of(handle), uuid);
  return text(out, size, uuid);
}

/* A handle's number is the GPU's in the machine, whatever CUDA_VISIBLE_DEVICES says. The bus of GPU n is n + 1. The domain is written with four or eight digits. */
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **handle) {
  unsigned domain, bus, slot;
  if (sscanf(id, "%x:%x:%x", &domain, &bus, &slot) != 3) return NVML_INVALID;
  return handle_of((int)bus - 1, handle) ? NVML_NOT_FOUND : NVML_SUCCESS;
}
typedef struct {
  char short_id[16];
  unsigned domain, bus, device, device_id, subsystem_id;
  char id[32];
} pci_info;
EXPORT int nvmlDeviceGetPciInfo_v3(void *handle, pci_info *out) {
  if (!valid(handle)) return NVML_INVALID;
  memset(out, 0, sizeof *out);
  out->bus = (unsigned)device_of(handle) + 1;
  snprintf(out->short_id, sizeof out->short_id, "0000:%02X:00.0", out->bus & 0xff);
  snprintf(out->id, sizeof out->id, "00000000:%02X:00.0", out->bus & 0xff);
  return NVML_SUCCESS;
}

EXPORT int nvmlDeviceGetName(void *handle, char *out, unsigned size) {
  return valid(handle) ? text(out, size, vgpu_look().name) : NVML_INVALID;
}
EXPORT int nvmlDeviceGetIndex(void *handle, unsigned *index) {
  *index = (unsigned)device_of(handle);
  return valid(handle) ? NVML_SUCCESS : NVML_INVALID;
}
EXPORT int nvmlDeviceGetMinorNumber(void *handle, unsigned *minor) { return nvmlDeviceGetIndex(handle, minor); }
EXPORT int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
  *major = vgpu_look().cc_major;
  *minor = vgpu_look().cc_minor;
  return valid(handle) ? NVML_SUCCESS : NVML_INVALID;
}

/* The first version counts what the driver keeps for itself as used; the second shows it apart. */
typedef struct {
  uint64_t total, free, used;
} memory_v1;
typedef struct {
  unsigned version;
  uint64_t total, reserved, free, used;
} memory_v2;
static void read_memory(void *handle, memory_v2 *out) {
  vgpu_config look = vgpu_look(), *config = &look;
  vgpu_books books;
  vgpu_read_books_of_gpu(device_of(handle), &books);
  out->total = config->nvml_total_bytes;
  out->reserved = config->nvml_total_bytes - config->total_memory_bytes;
  out->used = books.used_bytes;
  out->free = books.total_bytes > books.used_bytes ? books.total_bytes - books.used_bytes : 0;
}
EXPORT int nvmlDeviceGetMemoryInfo(void *handle, memory_v1 *out) {
  memory_v2 now = {0};
  if (!valid(handle)) return NVML_INVALID;
  read_memory(handle, &now);
  *out = (memory_v1){now.total, now.free, now.used + now.reserved};
  return NVML_SUCCESS;
}
EXPORT int nvmlDeviceGetMemoryInfo_v2(void *handle, memory_v2 *out) {
  if (!valid(handle)) return NVML_INVALID;
  read_memory(handle, out);
  return NVML_SUCCESS;
}

/* Compute processes: this one, on the devices where it has a context. The oldest version lacks the instance ids. */
typedef struct {
  unsigned pid;
  uint64_t used;
} process_v1;
typedef struct {
  unsigned pid;
  uint64_t used;
  unsigned gpu_instance, compute_instance;
} process_v2;
static int processes(void *handle, unsigned *count, void *out, size_t entry_bytes) {
  vgpu_books books;
  if (!valid(handle)) return NVML_INVALID;
  vgpu_read_books_of_gpu(device_of(handle), &books);
  unsigned room = *count;
  *count = books.process_bytes > 0;
  if (!*count) return NVML_SUCCESS;
  if (!room || !out) return NVML_TOO_SMALL;
  process_v2 entry = {(unsigned)getpid(), books.process_bytes, 0xffffffff, 0xffffffff};
  memcpy(out, &entry, entry_bytes);
  return NVML_SUCCESS;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, void *out) {
  return processes(handle, count, out, sizeof(process_v1));
}
EXPORT int nvmlDeviceGetComputeRunningProcesses_v2(void *handle, unsigned *count, void *out) {
  return processes(handle, count, out, sizeof(process_v2));
}
EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, void *out) {
  return processes(handle, count, out, sizeof(process_v2));
}
EXPORT int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *count, void *out UNUSED) {
  *count = 0;
  return valid(handle) ? NVML_SUCCESS : NVML_INVALID;
}

/* No fabric: everything is zero but the version, whose low three bytes are the structure's size. */
EXPORT int nvmlDeviceGetGpuFabricInfoV(void *handle, unsigned *info) {
  size_t size = *info & 0xffffff;
  if (!valid(handle) || size < sizeof *info || size > 256) return NVML_INVALID;
  memset(info + 1, 0, size - sizeof *info);
  return NVML_SUCCESS;
}

/* What a virtual device has no answer to. */
#define NOT_SUPPORTED(call) \
  EXPORT int call(void) { return NVML_NOT_SUPPORTED; }
NOT_SUPPORTED(nvmlDeviceGetUtilizationRates)
NOT_SUPPORTED(nvmlDeviceGetPowerUsage)
NOT_SUPPORTED(nvmlDeviceGetTemperature)
NOT_SUPPORTED(nvmlDeviceGetClockInfo)
NOT_SUPPORTED(nvmlDeviceGetMigMode)
NOT_SUPPORTED(nvmlDeviceGetNvLinkState)
NOT_SUPPORTED(nvmlDeviceGetNvLinkRemoteDeviceType)
NOT_SUPPORTED(nvmlDeviceGetNvLinkRemotePciInfo_v2)
NOT_SUPPORTED(nvmlDeviceGetP2PStatus)
NOT_SUPPORTED(nvmlDeviceGetMemoryAffinity)
NOT_SUPPORTED(nvmlDeviceGetCpuAffinity)
