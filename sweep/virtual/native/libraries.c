/* cuBLAS, cuDNN, cuSPARSE and cuSOLVER: the calls that answer something. Those that only compute or set something are
 * generated (see ../stubs.py), and so are the refusals of all the others. */
#define _GNU_SOURCE
#include "vgpu.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

static int new_handle(void **handle) {
  *handle = calloc(1, 256);
  if (!*handle) abort();
  return VGPU_SUCCESS;
}

static int free_handle(void *handle) {
  free(handle);
  return VGPU_SUCCESS;
}

/* The version of the installed library, from the library itself: PyTorch compares it with what it was built for. */
static size_t installed_version(const char *const *libraries, const char *call, size_t fallback) {
  for (; *libraries; libraries++) {
    void *library = dlopen(*libraries, RTLD_LAZY | RTLD_NOLOAD);
    size_t (*version)(void) = library ? (size_t(*)(void))dlsym(library, call) : NULL;
    if (version) return version();
  }
  return fallback;
}

EXPORT int cublasCreate_v2(void **handle) {
  device_enter();
  return new_handle(handle);
}
EXPORT int cublasDestroy_v2(void *handle) { return free_handle(handle); }
EXPORT int cublasLtCreate(void **handle) { return cublasCreate_v2(handle); }
EXPORT int cublasLtDestroy(void *handle) { return free_handle(handle); }

EXPORT int cublasGetMathMode(void *handle UNUSED, int *mode) {
  *mode = 0;
  return VGPU_SUCCESS;
}

EXPORT int cublasGetPointerMode_v2(void *handle UNUSED, int *mode) {
  *mode = 0;
  return VGPU_SUCCESS;
}

EXPORT const char *cublasGetStatusString(int status) {
  return status == 15 ? vgpu_unsupported_message() : status ? "cuBLAS error" : "CUBLAS_STATUS_SUCCESS";
}

EXPORT size_t cublasLtGetVersion(void) {
  static const char *const names[] = {"libcublasLt.so.13", "libcublasLt.so.12", NULL};
  return installed_version(names, "cublasLtGetVersion", VGPU_CUDA_MAJOR * 10000);
}

EXPORT int cublasLtMatmulDescCreate(void **handle) { return new_handle(handle); }
EXPORT int cublasLtMatmulDescDestroy(void *handle) { return free_handle(handle); }
EXPORT int cublasLtMatrixLayoutCreate(void **handle) { return new_handle(handle); }
EXPORT int cublasLtMatrixLayoutDestroy(void *handle) { return free_handle(handle); }
EXPORT int cublasLtMatmulPreferenceCreate(void **handle) { return new_handle(handle); }
EXPORT int cublasLtMatmulPreferenceDestroy(void *handle) { return free_handle(handle); }

/* cublasLtMatmulHeuristicResult_t: one algorithm, which needs no workspace of its own. */
typedef struct {
  uint64_t algorithm[8];
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
} heuristic_result;

EXPORT int cublasLtMatmulAlgoGetHeuristic(void *handle UNUSED, void *operation UNUSED, void *a UNUSED, void *b UNUSED,
                                          void *c UNUSED, void *d UNUSED, void *preference UNUSED, int wanted,
                                          heuristic_result *results, int *found) {
  *found = wanted > 0;
  if (wanted > 0) memset(results, 0, sizeof *results);
  return VGPU_SUCCESS;
}

EXPORT int cublasLtMatmulAlgoCheck(void *handle UNUSED, void *operation UNUSED, void *a UNUSED, void *b UNUSED,
                                   void *c UNUSED, void *d UNUSED, const void *algorithm UNUSED,
                                   heuristic_result *result) {
  memset(result, 0, sizeof *result);
  return VGPU_SUCCESS;
}

EXPORT int cudnnCreate(void **handle) {
  device_enter();
  return new_handle(handle);
}
EXPORT int cudnnDestroy(void *handle) { return free_handle(handle); }

static size_t cudnn_answer(const char *call, size_t fallback) {
  static const char *const names[] = {"libcudnn.so.9", "libcudnn.so.8", NULL};
  return installed_version(names, call, fallback);
}
EXPORT size_t cudnnGetVersion(void) { return cudnn_answer("cudnnGetVersion", 90000); }
EXPORT size_t cudnnGetCudartVersion(void) { return cudnn_answer("cudnnGetCudartVersion", VGPU_CUDA_VERSION); }
EXPORT const char *cudnnGetErrorString(int status) {
  return status ? vgpu_unsupported_message() : "CUDNN_STATUS_SUCCESS";
}
EXPORT void cudnnGetLastErrorString(char *message, size_t size) {
  if (!size) return;
  strncpy(message, vgpu_unsupported_message(), size - 1);
  message[size - 1] = 0;
}

EXPORT int cusparseCreate(void **handle) { return cublasCreate_v2(handle); }
EXPORT int cusparseDestroy(void *handle) { return free_handle(handle); }
EXPORT const char *cusparseGetErrorString(int status) {
  return status ? vgpu_unsupported_message() : "CUSPARSE_STATUS_SUCCESS";
}
EXPORT int cusolverDnCreate(void **handle) { return cublasCreate_v2(handle); }
EXPORT int cusolverDnDestroy(void *handle) { return free_handle(handle); }
