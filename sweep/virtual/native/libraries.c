/* cuBLAS, cuSPARSE and cuSOLVER: the calls that answer something. Those that only compute or set something are
 * generated (see ../stubs.py), and so are the refusals of all the others. */
#define _GNU_SOURCE
#include "clock.h"
#include "trace.h"
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
size_t vgpu_installed_version(const char *const *libraries, const char *call, size_t fallback) {
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

/* Matrix products, for their time. A handle of cuBLAS remembers its stream. */
EXPORT int cublasSetStream_v2(void **handle, void *stream) {
  *handle = stream;
  return VGPU_SUCCESS;
}

static bool is_sixteen_bit(int type) { return type == 2 || type == 14; } /* CUDA_R_16F, CUDA_R_16BF */

#define TILE 128

static double tiles(double size) { return (double)(((uint64_t)size + TILE - 1) / TILE); }

static int matmul(void *stream, double m, double n, double k, double batch, bool sixteen_bit) {
  trace_work(TRACE_MATMUL, 0, stream, 2 * m * n * k * batch, (size_t)(tiles(m) * tiles(n) * batch));
  clock_run(stream, clock_of_matmul(m, n, k, batch, sixteen_bit));
  return VGPU_SUCCESS;
}

EXPORT int cublasGemmEx(void **handle, int transpose_a UNUSED, int transpose_b UNUSED, int m, int n, int k,
                        const void *alpha UNUSED, const void *a UNUSED, int type) {
  return matmul(*handle, m, n, k, 1, is_sixteen_bit(type));
}
EXPORT int cublasSgemm_v2(void **handle, int transpose_a UNUSED, int transpose_b UNUSED, int m, int n, int k) {
  return matmul(*handle, m, n, k, 1, false);
}
EXPORT int cublasGemmStridedBatchedEx(void **handle, int transpose_a UNUSED, int transpose_b UNUSED, int m, int n, int k,
                                      const void *alpha UNUSED, const void *a UNUSED, int type, int lda UNUSED,
                                      long long stride_a UNUSED, const void *b UNUSED, int type_b UNUSED, int ldb UNUSED,
                                      long long stride_b UNUSED, const void *beta UNUSED, void *c UNUSED,
                                      int type_c UNUSED, int ldc UNUSED, long long stride_c UNUSED, int batch) {
  return matmul(*handle, m, n, k, batch, is_sixteen_bit(type));
}
EXPORT int cublasSgemmStridedBatched(void **handle, int transpose_a UNUSED, int transpose_b UNUSED, int m, int n, int k,
                                     const void *alpha UNUSED, const void *a UNUSED, int lda UNUSED,
                                     long long stride_a UNUSED, const void *b UNUSED, int ldb UNUSED,
                                     long long stride_b UNUSED, const void *beta UNUSED, void *c UNUSED, int ldc UNUSED,
                                     long long stride_c UNUSED, int batch) {
  return matmul(*handle, m, n, k, batch, false);
}

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
  return vgpu_installed_version(names, "cublasLtGetVersion", VGPU_CUDA_MAJOR * 10000);
}

EXPORT int cublasLtMatmulDescCreate(void **handle) { return new_handle(handle); }
EXPORT int cublasLtMatmulDescDestroy(void *handle) { return free_handle(handle); }
typedef struct {
  int type;
  uint64_t rows, columns;
} matrix_layout;
EXPORT int cublasLtMatrixLayoutCreate(matrix_layout **layout, int type, uint64_t rows, uint64_t columns, int64_t ld UNUSED) {
  new_handle((void **)layout);
  **layout = (matrix_layout){type, rows, columns};
  return VGPU_SUCCESS;
}
EXPORT int cublasLtMatmul(void *handle UNUSED, void *operation UNUSED, const void *alpha UNUSED, const void *a UNUSED,
                          const matrix_layout *a_layout, const void *b UNUSED, const void *b_layout UNUSED,
                          const void *beta UNUSED, const void *c UNUSED, const void *c_layout UNUSED, void *d UNUSED,
                          const matrix_layout *d_layout, const void *algorithm UNUSED, void *workspace UNUSED,
                          size_t workspace_bytes UNUSED, void *stream) {
  double m = (double)d_layout->rows, n = (double)d_layout->columns;
  double k = m > 0 ? (double)a_layout->rows * (double)a_layout->columns / m : 0;
  return matmul(stream, m, n, k, 1, is_sixteen_bit(a_layout->type));
}
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

EXPORT int cusparseCreate(void **handle) { return cublasCreate_v2(handle); }
EXPORT int cusparseDestroy(void *handle) { return free_handle(handle); }
EXPORT const char *cusparseGetErrorString(int status) {
  return status ? vgpu_unsupported_message() : "CUSPARSE_STATUS_SUCCESS";
}
EXPORT int cusolverDnCreate(void **handle) { return cublasCreate_v2(handle); }
EXPORT int cusolverDnDestroy(void *handle) { return free_handle(handle); }
