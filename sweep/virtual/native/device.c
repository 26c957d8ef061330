/* Devices as the runtime describes them. */
#include "vgpu.h"

#include <stdio.h>
#include <string.h>

static __thread int current;

int device_current(void) { return current; }

int device_enter(void) {
  memory_use_device(current);
  return current;
}

/* cudaDeviceProp, of which CUDA 13 dropped seven fields. */
typedef struct {
  char name[256];
  unsigned char uuid[16];
  char luid[8];
  unsigned luid_device_node_mask;
  size_t total_global_memory, shared_per_block;
  int registers_per_block, warp_size;
  size_t memory_pitch;
  int max_threads_per_block, max_threads_dim[3], max_grid_size[3];
#if VGPU_CUDA_MAJOR < 13
  int clock_rate;
#endif
  size_t total_constant_memory;
  int major, minor;
  size_t texture_alignment, texture_pitch_alignment;
#if VGPU_CUDA_MAJOR < 13
  int device_overlap;
#endif
  int multi_processor_count;
#if VGPU_CUDA_MAJOR < 13
  int kernel_execution_timeout;
#endif
  int integrated, can_map_host_memory;
#if VGPU_CUDA_MAJOR < 13
  int compute_mode;
  int max_texture_1d, max_texture_1d_mipmap, max_texture_1d_linear;
#else
  int max_texture_1d, max_texture_1d_mipmap;
#endif
  int max_texture_2d[2], max_texture_2d_mipmap[2], max_texture_2d_linear[3], max_texture_2d_gather[2];
  int max_texture_3d[3], max_texture_3d_alternative[3], max_texture_cubemap, max_texture_1d_layered[2];
  int max_texture_2d_layered[3], max_texture_cubemap_layered[2];
  int max_surface_1d, max_surface_2d[2], max_surface_3d[3], max_surface_1d_layered[2], max_surface_2d_layered[3];
  int max_surface_cubemap, max_surface_cubemap_layered[2];
  size_t surface_alignment;
  int concurrent_kernels, ecc_enabled, pci_bus_id, pci_device_id, pci_domain_id, tcc_driver, async_engine_count;
  int unified_addressing;
#if VGPU_CUDA_MAJOR < 13
  int memory_clock_rate;
#endif
  int memory_bus_width, l2_cache_size, persisting_l2_cache_max_size, max_threads_per_multi_processor;
  int stream_priorities_supported, global_l1_cache_supported, local_l1_cache_supported;
  size_t shared_per_multi_processor;
  int registers_per_multi_processor, managed_memory, is_multi_gpu_board, multi_gpu_board_group_id;
  int host_native_atomic_supported;
#if VGPU_CUDA_MAJOR < 13
  int single_to_double_precision_ratio;
#endif
  int pageable_memory_access, concurrent_managed_access, compute_preemption_supported;
  int can_use_host_pointer_for_registered_memory, cooperative_launch;
#if VGPU_CUDA_MAJOR < 13
  int cooperative_multi_device_launch;
#endif
  size_t shared_per_block_optin;
  int pageable_memory_access_uses_host_page_tables, direct_managed_memory_access_from_host;
  int max_blocks_per_multi_processor, access_policy_max_window_size;
  size_t reserved_shared_per_block;
  int host_register_supported, sparse_array_supported, host_register_read_only_supported;
  int timeline_semaphore_interop_supported, memory_pools_supported;
  char rest[512]; /* PyTorch reads nothing beyond; the copy ends where the structure of this CUDA version ends */
} device_properties;

#if VGPU_CUDA_MAJOR < 13
_Static_assert(offsetof(device_properties, multi_processor_count) == 388, "cudaDeviceProp of CUDA 12");
_Static_assert(offsetof(device_properties, l2_cache_size) == 616, "cudaDeviceProp of CUDA 12");
_Static_assert(offsetof(device_properties, shared_per_block_optin) == 696, "cudaDeviceProp of CUDA 12");
_Static_assert(offsetof(device_properties, memory_pools_supported) == 744, "cudaDeviceProp of CUDA 12");
#define PROPERTIES_BYTES 1032
#else
_Static_assert(offsetof(device_properties, multi_processor_count) == 384, "cudaDeviceProp of CUDA 13");
_Static_assert(offsetof(device_properties, l2_cache_size) == 596, "cudaDeviceProp of CUDA 13");
_Static_assert(offsetof(device_properties, shared_per_block_optin) == 672, "cudaDeviceProp of CUDA 13");
_Static_assert(offsetof(device_properties, memory_pools_supported) == 720, "cudaDeviceProp of CUDA 13");
#define PROPERTIES_BYTES 1008
#endif

static int properties(void *out, int device) {
  const vgpu_config *config = vgpu_configuration();
  device_properties p = {0};
  if (device < 0 || device >= config->device_count) return vgpu_fail(VGPU_INVALID_DEVICE);
  memcpy(p.name, config->name, sizeof p.name);
  memcpy(p.uuid, "vgpu", 4);
  p.uuid[15] = (unsigned char)(config->gpu_of[device] + 1);
  p.total_global_memory = config->total_memory_bytes;
  p.shared_per_block = 49152;
  p.shared_per_block_optin = config->shared_per_block_optin_bytes;
  p.shared_per_multi_processor = config->shared_per_sm_bytes;
  p.reserved_shared_per_block = config->cc_major >= 8 ? 1024 : 0;
  p.registers_per_block = p.registers_per_multi_processor = 65536;
  p.warp_size = 32;
  p.memory_pitch = 2147483647;
  p.max_threads_per_block = 1024;
  p.max_threads_dim[0] = p.max_threads_dim[1] = 1024;
  p.max_threads_dim[2] = 64;
  p.max_grid_size[0] = 2147483647;
  p.max_grid_size[1] = p.max_grid_size[2] = 65535;
  p.total_constant_memory = 65536;
  p.major = config->cc_major;
  p.minor = config->cc_minor;
  p.texture_alignment = 512;
  p.texture_pitch_alignment = 32;
  p.multi_processor_count = config->sm_count;
  p.can_map_host_memory = p.concurrent_kernels = p.unified_addressing = p.managed_memory = 1;
  p.async_engine_count = 3;
  p.pci_bus_id = config->gpu_of[device] + 1;
  p.l2_cache_size = (int)config->l2_bytes;
  p.max_threads_per_multi_processor = config->max_threads_per_sm;
  p.stream_priorities_supported = p.global_l1_cache_supported = p.local_l1_cache_supported = 1;
  p.compute_preemption_supported = p.can_use_host_pointer_for_registered_memory = p.cooperative_launch = 1;
  p.concurrent_managed_access = p.host_register_supported = p.memory_pools_supported = 1;
  p.max_blocks_per_multi_processor = 32;
  memcpy(out, &p, PROPERTIES_BYTES);
  return VGPU_SUCCESS;
}

EXPORT int cudaGetDeviceProperties(void *out, int device) { return properties(out, device); }
EXPORT int cudaGetDeviceProperties_v2(void *out, int device) { return properties(out, device); }

/* cudaDeviceAttr and CUdevice_attribute share their numbers. */
static int attribute(int *value, int which, int device) {
  const vgpu_config *config = vgpu_configuration();
  if (device < 0 || device >= config->device_count) return VGPU_INVALID_DEVICE;
  switch (which) {
    case 1: *value = 1024; break;                                  /* threads per block */
    case 2: case 3: *value = 1024; break;                          /* block dimension x, y */
    case 4: *value = 64; break;
    case 5: *value = 2147483647; break;                            /* grid dimension x */
    case 6: case 7: *value = 65535; break;
    case 8: *value = 49152; break;                                 /* shared memory per block */
    case 9: *value = 65536; break;                                 /* constant memory */
    case 10: *value = 32; break;                                   /* warp size */
    case 12: case 82: *value = 65536; break;                       /* registers per block, per multiprocessor */
    case 13: *value = 1410000; break;                              /* clock rate in kHz: of no consequence */
    case 14: *value = 512; break;                                  /* texture alignment */
    case 16: *value = config->sm_count; break;
    case 17: case 18: case 20: *value = 0; break;                  /* timeout, integrated, compute mode */
    case 32: case 35: *value = 0; break;                           /* ECC, TCC driver */
    case 33: *value = config->gpu_of[device] + 1; break;           /* PCI bus */
    case 34: *value = 0; break;                                    /* PCI device */
    case 36: *value = 1215000; break;                              /* memory clock rate */
    case 37: *value = 5120; break;                                 /* memory bus width */
    case 38: *value = (int)config->l2_bytes; break;
    case 39: *value = config->max_threads_per_sm; break;
    case 40: *value = 3; break;                                    /* copy engines */
    case 50: *value = 0; break;                                    /* PCI domain */
    case 75: *value = config->cc_major; break;
    case 76: *value = config->cc_minor; break;
    case 81: *value = (int)config->shared_per_sm_bytes; break;
    case 84: case 85: case 86: case 88: *value = 0; break;         /* multi-GPU board, native atomics, pageable access */
    case 97: *value = (int)config->shared_per_block_optin_bytes; break;
    case 100: case 101: *value = 0; break;                         /* host page tables, managed access from host */
    case 102: *value = 1; break;                                   /* virtual memory management */
    case 103: case 104: case 105: *value = 0; break;               /* shareable handles */
    case 106: *value = 32; break;                                  /* blocks per multiprocessor */
    case 111: *value = config->cc_major >= 8 ? 1024 : 0; break;    /* reserved shared memory per block */
    case 115: *value = 1; break;                                   /* memory pools */
    case 116: case 117: case 118: case 119: *value = 0; break;     /* GPUDirect RDMA, pool handles */
    case 120: *value = config->cc_major >= 9; break;               /* cluster launch */
    case 128: case 132: *value = 0; break;                         /* fabric handles, multicast */
    default: *value = 1;                                           /* the rest are abilities: a GPU has them */
  }
  return VGPU_SUCCESS;
}

EXPORT int cudaDeviceGetAttribute(int *value, int which, int device) {
  int code = attribute(value, which, device);
  return code ? vgpu_fail(code) : code;
}

EXPORT int cuDeviceGetAttribute(int *value, int which, int device) { return attribute(value, which, device); }

EXPORT int cudaGetDeviceCount(int *count) {
  *count = vgpu_configuration()->device_count;
  return *count ? VGPU_SUCCESS : vgpu_fail(VGPU_NO_DEVICE);
}

EXPORT int cudaGetDevice(int *device) {
  *device = current;
  return VGPU_SUCCESS;
}

EXPORT int cudaSetDevice(int device) {
  if (device < 0 || device >= vgpu_configuration()->device_count) return vgpu_fail(VGPU_INVALID_DEVICE);
  reuse_watch();
  current = device;
  memory_use_device(device);
  return VGPU_SUCCESS;
}

EXPORT int cudaDriverGetVersion(int *version) {
  *version = VGPU_CUDA_VERSION;
  return VGPU_SUCCESS;
}

EXPORT int cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

EXPORT int cudaDeviceGetPCIBusId(char *text, int size, int device) {
  if (device < 0 || device >= vgpu_configuration()->device_count) return vgpu_fail(VGPU_INVALID_DEVICE);
  snprintf(text, (size_t)size, "0000:%02X:00.0", vgpu_configuration()->gpu_of[device] + 1);
  return VGPU_SUCCESS;
}

EXPORT int cudaDeviceCanAccessPeer(int *can, int device, int peer) {
  *can = device != peer;
  return VGPU_SUCCESS;
}

EXPORT int cudaDeviceEnablePeerAccess(int peer, unsigned flags UNUSED) {
  static __thread bool enabled[VGPU_MAX_DEVICES];
  if (peer < 0 || peer >= vgpu_configuration()->device_count) return vgpu_fail(VGPU_INVALID_DEVICE);
  if (enabled[peer]) return vgpu_fail(VGPU_PEER_ALREADY_ENABLED);
  enabled[peer] = true;
  return VGPU_SUCCESS;
}

EXPORT int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return VGPU_SUCCESS;
}

EXPORT int cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  vgpu_books books;
  vgpu_read_books(device_enter(), &books);
  *total = books.total_bytes;
  *free_bytes = books.total_bytes > books.used_bytes ? books.total_bytes - books.used_bytes : 0;
  return VGPU_SUCCESS;
}
