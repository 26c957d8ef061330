/* Error codes, their texts, and the loud refusal of a call that the virtual GPU does not know. */
#include "vgpu.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

static __thread int last_error;
static __thread char refused[128];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

int vgpu_fail(int code) {
  last_error = code;
  return code;
}

/* The same call may be refused in a loop: one line a call is enough. */
static bool first_time(const char *call) {
  static const char *said[256];
  static int count;
  bool first = true;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < count && first; i++) first = strcmp(said[i], call) != 0;
  if (first && count < 256) said[count++] = call;
  pthread_mutex_unlock(&lock);
  return first;
}

int vgpu_unsupported(const char *call, int code) {
  snprintf(refused, sizeof refused, "operation not supported on the virtual GPU: %s", call);
  if (first_time(call)) fprintf(stderr, "virtual GPU: %s is not supported on the virtual device\n", call);
  last_error = VGPU_NOT_SUPPORTED;
  return code;
}

const char *vgpu_unsupported_message(void) {
  return *refused ? refused : "operation not supported on the virtual GPU";
}

typedef struct {
  int code;
  const char *runtime_name, *driver_name, *text;
} entry;
static const entry entries[] = {
    {VGPU_SUCCESS, "cudaSuccess", "CUDA_SUCCESS", "no error"},
    {VGPU_INVALID_VALUE, "cudaErrorInvalidValue", "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {VGPU_OUT_OF_MEMORY, "cudaErrorMemoryAllocation", "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {VGPU_NO_DEVICE, "cudaErrorNoDevice", "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {VGPU_INVALID_DEVICE, "cudaErrorInvalidDevice", "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {VGPU_NO_KERNEL_IMAGE, "cudaErrorNoKernelImageForDevice", "CUDA_ERROR_NO_BINARY_FOR_GPU",
     "no kernel image is available for execution on the device"},
    {VGPU_INVALID_HANDLE, "cudaErrorInvalidResourceHandle", "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {VGPU_NOT_FOUND, "cudaErrorSymbolNotFound", "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {VGPU_NOT_READY, "cudaErrorNotReady", "CUDA_ERROR_NOT_READY", "device not ready"},
    {VGPU_PEER_ALREADY_ENABLED, "cudaErrorPeerAccessAlreadyEnabled", "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED",
     "peer access is already enabled"},
    {VGPU_NOT_SUPPORTED, "cudaErrorNotSupported", "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
};

static const entry *lookup(int code) {
  for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
    if (entries[i].code == code) return &entries[i];
  return NULL;
}

static const char *text_of(int code) {
  const entry *found = lookup(code);
  if (code == VGPU_NOT_SUPPORTED && *refused) return refused;
  return found ? found->text : "unknown error of the virtual GPU";
}

EXPORT const char *cudaGetErrorString(int code) { return text_of(code); }

EXPORT const char *cudaGetErrorName(int code) {
  const entry *found = lookup(code);
  return found ? found->runtime_name : "cudaErrorUnknown";
}

EXPORT int cudaGetLastError(void) {
  int code = last_error;
  last_error = VGPU_SUCCESS;
  return code;
}

EXPORT int cudaPeekAtLastError(void) { return last_error; }

EXPORT int cuGetErrorString(int code, const char **text) {
  *text = text_of(code);
  return VGPU_SUCCESS;
}

EXPORT int cuGetErrorName(int code, const char **text) {
  const entry *found = lookup(code);
  *text = found ? found->driver_name : "CUDA_ERROR_UNKNOWN";
  return VGPU_SUCCESS;
}
