/* cuDNN's graph interface, through which PyTorch runs attention on Hopper and Blackwell, and convolutions.
 *
 * A graph is described with backend descriptors, heuristics propose engines for it, and a plan says how much workspace
 * it wants. Here there is always one engine, and it wants none: what cuDNN's engines want is not public. The buffers
 * that its frontend, compiled into PyTorch, adds for attention are its own and are all there. */
#include "clock.h"
#include "trace.h"
#include "vgpu.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

EXPORT int cudnnCreate(void ***handle) {
  device_enter();
  *handle = calloc(1, 256);
  if (!*handle) abort();
  return VGPU_SUCCESS;
}
EXPORT int cudnnDestroy(void **handle) {
  free(handle);
  return VGPU_SUCCESS;
}
EXPORT int cudnnSetStream(void **handle, void *stream) {
  *handle = stream;
  return VGPU_SUCCESS;
}
EXPORT int cudnnGetStream(void **handle, void **stream) {
  *stream = *handle;
  return VGPU_SUCCESS;
}

static size_t installed(const char *call, size_t fallback) {
  static const char *const names[] = {"libcudnn.so.9", "libcudnn.so.8", NULL};
  return vgpu_installed_version(names, call, fallback);
}
EXPORT size_t cudnnGetVersion(void) { return installed("cudnnGetVersion", 90000); }
EXPORT size_t cudnnGetCudartVersion(void) { return installed("cudnnGetCudartVersion", VGPU_CUDA_VERSION); }
EXPORT const char *cudnnGetErrorString(int status) {
  return status ? vgpu_unsupported_message() : "CUDNN_STATUS_SUCCESS";
}
EXPORT void cudnnGetLastErrorString(char *message, size_t size) {
  if (size) snprintf(message, size, "%s", vgpu_unsupported_message());
}

typedef struct {
  int kind;
} descriptor;

EXPORT int cudnnBackendCreateDescriptor(int kind, descriptor **out) {
  *out = calloc(1, sizeof **out);
  if (!*out) abort();
  (*out)->kind = kind;
  return VGPU_SUCCESS;
}
EXPORT int cudnnBackendDestroyDescriptor(descriptor *which) {
  free(which);
  return VGPU_SUCCESS;
}
EXPORT int cudnnBackendSetAttribute(descriptor *which UNUSED, int name UNUSED, int type UNUSED, int64_t count UNUSED,
                                    const void *values UNUSED) {
  return VGPU_SUCCESS;
}
EXPORT int cudnnBackendFinalize(descriptor *which UNUSED) { return VGPU_SUCCESS; }

enum { ENGINE_HEURISTIC_RESULTS = 202, ENGINE_CONFIG_ENGINE = 300, ENGINE_CONFIG_WORKSPACE = 303, PLAN_WORKSPACE = 402 };
enum { TYPE_INT64 = 3, TYPE_DESCRIPTOR = 15, TYPE_INT32 = 23 };

static void say_workspace_is_unknown(void) {
  fprintf(stderr, "virtual GPU: the workspaces of cuDNN are not known; they count as zero\n");
}

/* Descriptors that are asked for were made by the caller, and are only filled. Lists, such as an engine's notes and
 * knobs, are empty. */
EXPORT int cudnnBackendGetAttribute(const descriptor *which UNUSED, int name, int type, int64_t room, int64_t *count,
                                    void *values) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  bool one = name == ENGINE_HEURISTIC_RESULTS || name == ENGINE_CONFIG_ENGINE || type == TYPE_INT64 || type == TYPE_INT32;
  if (name == PLAN_WORKSPACE) pthread_once(&once, say_workspace_is_unknown);
  if (count) *count = one;
  if (values && room > 0 && type == TYPE_INT64) memset(values, 0, sizeof(int64_t));
  if (values && room > 0 && type == TYPE_INT32) memset(values, 0, sizeof(int32_t));
  return VGPU_SUCCESS;
}

EXPORT int cudnnBackendExecute(void **handle, const descriptor *plan UNUSED, const descriptor *variant UNUSED) {
  trace_work(TRACE_KERNEL, 0, *handle, 0, 1);
  clock_run(*handle, 0);
  return VGPU_SUCCESS;
}
