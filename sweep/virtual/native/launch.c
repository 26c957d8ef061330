/* Kernels: registered, looked up, asked for their attributes, and launched into nothing. */
#include "clock.h"
#include "trace.h"
#include "vgpu.h"

#include <stdlib.h>
#include <string.h>

/* nvcc's host code registers every kernel of a library when the library is loaded. */
EXPORT void **__cudaRegisterFatBinary(void *binary) {
  static void *token;
  fatbin_register(binary);
  return &token;
}
EXPORT void __cudaRegisterFatBinaryEnd(void **handle UNUSED) {}
EXPORT void __cudaUnregisterFatBinary(void **handle UNUSED) {}
EXPORT void __cudaRegisterFunction(void) {}
EXPORT void __cudaRegisterVar(void) {}
EXPORT void __cudaRegisterManagedVar(void) {}
EXPORT char __cudaInitModule(void **handle UNUSED) { return 1; }
EXPORT int __cudaGetKernel(void **kernel, const void *function) {
  *kernel = (void *)function;
  return VGPU_SUCCESS;
}

/* The <<<...>>> syntax pushes the configuration, and the kernel's stub pops it before it launches. */
static __thread struct {
  vgpu_dim3 grid, block;
  size_t shared_bytes;
  void *stream;
} pushed;

EXPORT unsigned __cudaPushCallConfiguration(vgpu_dim3 grid, vgpu_dim3 block, size_t shared_bytes, void *stream) {
  pushed.grid = grid;
  pushed.block = block;
  pushed.shared_bytes = shared_bytes;
  pushed.stream = stream;
  return 0;
}

EXPORT int __cudaPopCallConfiguration(vgpu_dim3 *grid, vgpu_dim3 *block, size_t *shared_bytes, void **stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared_bytes = pushed.shared_bytes;
  *stream = pushed.stream;
  return VGPU_SUCCESS;
}

/* A launch only takes its time. */
static int launch(vgpu_dim3 grid, vgpu_dim3 block, void *stream) {
  double threads = (double)grid.x * grid.y * grid.z * block.x * block.y * block.z;
  device_enter();
  trace_work(TRACE_KERNEL, 0, stream, threads, 1);
  clock_run(stream, clock_of_threads(threads));
  return VGPU_SUCCESS;
}

EXPORT int cudaLaunchKernel(const void *function UNUSED, vgpu_dim3 grid, vgpu_dim3 block, void **arguments UNUSED,
                            size_t shared_bytes UNUSED, void *stream) {
  const vgpu_config *config = vgpu_configuration();
  if (!fatbin_architecture(config->cc_major * 10 + config->cc_minor)) return vgpu_fail(VGPU_NO_KERNEL_IMAGE);
  return launch(grid, block, stream);
}
EXPORT int __cudaLaunchKernel(const void *kernel UNUSED, vgpu_dim3 grid, vgpu_dim3 block, void **arguments UNUSED,
                              size_t shared_bytes UNUSED, void *stream) {
  return launch(grid, block, stream);
}
EXPORT int cudaLaunchCooperativeKernel(const void *function UNUSED, vgpu_dim3 grid, vgpu_dim3 block,
                                       void **arguments UNUSED, size_t shared_bytes UNUSED, void *stream) {
  return launch(grid, block, stream);
}

/* cudaLaunchConfig_t, as far as it is read */
typedef struct {
  vgpu_dim3 grid, block;
  size_t shared_bytes;
  void *stream;
} launch_configuration;

EXPORT int cudaLaunchKernelExC(const launch_configuration *how, const void *function UNUSED, void **arguments UNUSED) {
  return launch(how->grid, how->block, how->stream);
}

/* cudaFuncAttributes */
typedef struct {
  size_t shared_bytes, constant_bytes, local_bytes;
  int max_threads_per_block, registers, ptx_version, binary_version, cache_mode, max_dynamic_shared_bytes, carveout;
  int cluster_dim_must_be_set, cluster_width, cluster_height, cluster_depth, cluster_policy, non_portable_cluster;
  int reserved[16];
} function_attributes;
_Static_assert(sizeof(function_attributes) == 144, "cudaFuncAttributes");

EXPORT int cudaFuncGetAttributes(function_attributes *attributes, const void *function UNUSED) {
  const vgpu_config *config = vgpu_configuration();
  memset(attributes, 0, sizeof *attributes);
  attributes->max_threads_per_block = 1024;
  attributes->registers = 32;
  attributes->ptx_version = fatbin_architecture(config->cc_major * 10 + config->cc_minor);
  if (!attributes->ptx_version) return vgpu_fail(VGPU_NO_KERNEL_IMAGE);
  attributes->binary_version = attributes->ptx_version;
  attributes->max_dynamic_shared_bytes = (int)config->shared_per_block_optin_bytes;
  return VGPU_SUCCESS;
}

EXPORT int cudaFuncSetAttribute(const void *function UNUSED, int which UNUSED, int value UNUSED) { return VGPU_SUCCESS; }
EXPORT int cudaKernelSetAttributeForDevice(void *kernel UNUSED, int which UNUSED, int value UNUSED, int device UNUSED) {
  return VGPU_SUCCESS;
}

/* Occupancy by threads alone: the registers and the shared memory of a kernel are not known. */
static int blocks_per_multiprocessor(int block_threads) {
  int blocks = vgpu_configuration()->max_threads_per_sm / (block_threads > 0 ? block_threads : 1);
  return blocks < 1 ? 1 : blocks > 32 ? 32 : blocks;
}

EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function UNUSED, int threads,
                                                                  size_t shared UNUSED, unsigned flags UNUSED) {
  *blocks = blocks_per_multiprocessor(threads);
  return VGPU_SUCCESS;
}
EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function UNUSED, int threads,
                                                         size_t shared UNUSED) {
  *blocks = blocks_per_multiprocessor(threads);
  return VGPU_SUCCESS;
}

/* The variables of modules: an address to pass around, part of the context's own memory. */
EXPORT int cudaGetSymbolAddress(void **address, const void *symbol UNUSED) {
  static void *variables;
  void *seen = __atomic_load_n(&variables, __ATOMIC_ACQUIRE);
  if (!seen) {
    seen = memory_allocate(device_enter(), VGPU_GRANULARITY, MEMORY_STATIC);
    __atomic_store_n(&variables, seen, __ATOMIC_RELEASE);
  }
  *address = seen;
  return VGPU_SUCCESS;
}

/* Opaque handles of modules, libraries and kernels: one byte that can be freed. */
static int new_handle(void **handle) {
  *handle = calloc(1, 64);
  if (!*handle) abort();
  return VGPU_SUCCESS;
}
static int free_handle(void *handle) {
  free(handle);
  return VGPU_SUCCESS;
}
static int shared_handle(void **handle) {
  static char token[64];
  *handle = token;
  return VGPU_SUCCESS;
}

EXPORT int cudaLibraryLoadData(void **library) { return new_handle(library); }
EXPORT int cudaLibraryUnload(void *library) { return free_handle(library); }
EXPORT int cudaLibraryGetKernel(void **kernel) { return shared_handle(kernel); }

/* The driver's names for the same things: what Triton's compiled kernels come through. */
EXPORT int cuModuleLoad(void **module, const char *file UNUSED) { return new_handle(module); }
EXPORT int cuModuleLoadData(void **module, const void *image UNUSED) { return new_handle(module); }
EXPORT int cuModuleLoadDataEx(void **module, const void *image UNUSED) { return new_handle(module); }
EXPORT int cuModuleUnload(void *module) { return free_handle(module); }
EXPORT int cuModuleGetFunction(void **function, void *module UNUSED, const char *name UNUSED) {
  return shared_handle(function);
}
EXPORT int cuLibraryLoadData(void **library) { return new_handle(library); }
EXPORT int cuLibraryUnload(void *library) { return free_handle(library); }
EXPORT int cuLibraryGetKernel(void **kernel) { return shared_handle(kernel); }
EXPORT int cuKernelGetFunction(void **function, void *kernel) {
  *function = kernel;
  return VGPU_SUCCESS;
}
EXPORT int cuFuncGetAttribute(int *value, int which, void *function UNUSED) {
  *value = which == 0 ? 1024 : which == 4 ? 32 : 0; /* threads a block, registers; no spills, no static memory */
  return VGPU_SUCCESS;
}
EXPORT int cuFuncSetAttribute(void *function UNUSED, int which UNUSED, int value UNUSED) { return VGPU_SUCCESS; }
EXPORT int cuFuncSetCacheConfig(void *function UNUSED, int which UNUSED) { return VGPU_SUCCESS; }
EXPORT int cuLaunchKernel(void *function UNUSED, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                          unsigned block_y, unsigned block_z, unsigned shared_bytes UNUSED, void *stream) {
  return launch((vgpu_dim3){grid_x, grid_y, grid_z}, (vgpu_dim3){block_x, block_y, block_z}, stream);
}
EXPORT int cuLaunchCooperativeKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                                     unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream) {
  return cuLaunchKernel(function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream);
}

/* CUlaunchConfig, as far as it is read */
typedef struct {
  vgpu_dim3 grid, block;
  unsigned shared_bytes;
  void *stream;
} driver_launch_configuration;

EXPORT int cuLaunchKernelEx(const driver_launch_configuration *how, void *function UNUSED, void **arguments UNUSED,
                            void **extra UNUSED) {
  return launch(how->grid, how->block, how->stream);
}
EXPORT int cuOccupancyMaxActiveClusters(int *clusters, void *function UNUSED, void *configuration UNUSED) {
  *clusters = vgpu_configuration()->sm_count;
  return VGPU_SUCCESS;
}
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function UNUSED, int threads,
                                                       size_t shared UNUSED) {
  *blocks = blocks_per_multiprocessor(threads);
  return VGPU_SUCCESS;
}
EXPORT int cuTensorMapEncodeTiled(void *map) {
  memset(map, 0, 128);
  return VGPU_SUCCESS;
}
EXPORT int cuTensorMapEncodeIm2col(void *map) { return cuTensorMapEncodeTiled(map); }
