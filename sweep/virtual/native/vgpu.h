/* What the parts of the virtual GPU share.
 *
 * The library is preloaded into a Python process and answers the CUDA runtime, driver, cuBLAS, cuDNN and NCCL
 * calls that PyTorch makes. Memory is real book-keeping, compute is a no-op. No CUDA header is needed: the few
 * structures and codes that cross the boundary are declared here and in device.c, for CUDA 12 and CUDA 13.
 */
#ifndef VGPU_H
#define VGPU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define UNUSED __attribute__((unused))

#ifndef VGPU_CUDA_MAJOR
#define VGPU_CUDA_MAJOR 13
#endif
#ifndef VGPU_CUDA_MINOR
#define VGPU_CUDA_MINOR 0
#endif
#define VGPU_CUDA_VERSION (VGPU_CUDA_MAJOR * 1000 + VGPU_CUDA_MINOR * 10)

#define VGPU_MAX_DEVICES 64
#define VGPU_GRANULARITY ((size_t)2 << 20) /* the driver maps device memory in pages of 2 MiB */

/* Codes that the runtime (cudaError_t) and the driver (CUresult) share, where they do. */
enum {
  VGPU_SUCCESS = 0,
  VGPU_INVALID_VALUE = 1,
  VGPU_OUT_OF_MEMORY = 2,
  VGPU_NO_DEVICE = 100,
  VGPU_INVALID_DEVICE = 101,
  VGPU_NO_KERNEL_IMAGE = 209,
  VGPU_INVALID_HANDLE = 400,
  VGPU_NOT_FOUND = 500,
  VGPU_NOT_READY = 600,
  VGPU_PEER_ALREADY_ENABLED = 704,
  VGPU_NOT_SUPPORTED = 801,
};

typedef struct {
  uint32_t x, y, z;
} vgpu_dim3;

enum { LAG_NONE, LAG_UNTIL_SYNC, LAG_SIMULATED };

/* config.c: the environment, read at the first call that needs it (a forked child may still change it). */
typedef struct {
  char name[256];
  int gpu_count;                 /* in the machine: what NVML counts */
  int device_count;              /* that CUDA_VISIBLE_DEVICES leaves */
  int gpu_of[VGPU_MAX_DEVICES];  /* which GPU of the machine each device is */
  int world_size;
  int cc_major, cc_minor;
  int sm_count;
  int max_threads_per_sm;
  size_t l2_bytes;
  size_t shared_per_block_optin_bytes, shared_per_sm_bytes;
  size_t total_memory_bytes, context_bytes, other_processes_bytes;
  size_t nvml_total_bytes; /* with what the driver keeps for itself, which PyTorch does not see */
  size_t nccl_communicator_bytes;
  double half_tflops, single_tflops, memory_gb_per_second, link_gb_per_second; /* only for lag simulated */
  int lag;
} vgpu_config;
const vgpu_config *vgpu_configuration(void);          /* reads it once and for all */
EXPORT vgpu_config vgpu_look(void);                   /* reads it without deciding anything */
EXPORT bool vgpu_is_armed(void);
#define VGPU_UUID_TEXT 48
EXPORT void vgpu_uuid_text(int gpu, char out[VGPU_UUID_TEXT]);

/* fatbin.c */
void fatbin_register(const void *binary);
int fatbin_architecture(int device_architecture);     /* of the code that such a device would run; 0: there is none */

/* errors.c */
int vgpu_fail(int code);                              /* remembers the thread's last runtime error */
int vgpu_unsupported(const char *call, int code);     /* says so on stderr, once a call, and returns code */
const char *vgpu_unsupported_message(void);           /* for the libraries' own "get error string" */

/* ranges.c: address ranges in a treap, ordered by address, never overlapping. */
typedef struct range {
  uintptr_t start;
  size_t size;
  struct range *left, *right;
  uint32_t priority;
  int device;
  int kind;
  void *data;
} range;
range *range_new(uintptr_t start, size_t size);
void range_insert(range **root, range *node);
void range_remove(range **root, range *node);
range *range_containing(range *root, uintptr_t address);
range *range_at_or_after(range *root, uintptr_t address); /* the lowest that starts at or after address */

/* memory.c */
enum { MEMORY_DEVICE, MEMORY_POOL, MEMORY_RESERVED, MEMORY_PINNED, MEMORY_MANAGED, MEMORY_REGISTERED, MEMORY_STATIC };
typedef struct {
  size_t total_bytes, used_bytes, peak_used_bytes, process_bytes, peak_process_bytes;
  size_t context_bytes, nccl_bytes, pinned_bytes, peak_pinned_bytes;
  uint64_t allocations, refusals;
} vgpu_books;
bool memory_charge(int device, size_t bytes);
void memory_discharge(int device, size_t bytes);
void memory_use_device(int device);                   /* creates the context of the device, once */
bool memory_has_context(int device);
void *memory_allocate(int device, size_t bytes, int kind);
bool memory_free(const void *address);                /* false: not the start of a block */
void *memory_pin(size_t bytes, int kind);            /* host memory: pinned or managed */
void memory_register(void *address, size_t bytes);
bool memory_unregister(void *address);
bool memory_find(const void *address, range *found);  /* copies the block's description */
bool memory_on_device(const void *address);
void memory_charge_nccl(int device, size_t bytes);
void memory_discharge_nccl(int device, size_t bytes);
EXPORT int vgpu_read_books(int device, vgpu_books *books);
EXPORT int vgpu_read_books_of_gpu(int gpu, vgpu_books *books); /* by its number in the machine, visible or not */

/* values.c: the few bytes on the device that are known. Everything else on the device reads as zero. */
#define VALUES_COPY_LIMIT ((size_t)256 << 10)         /* larger copies to the device leave no value behind */
void values_write(uintptr_t device_address, const void *bytes, size_t size);
void values_forget(uintptr_t device_address, size_t size);
bool values_read(uintptr_t device_address, void *bytes, size_t size); /* overlays what is known; false: nothing */
void values_copy(uintptr_t to, uintptr_t from, size_t size);

/* copy.c */
void copy_bytes(void *to, const void *from, size_t size);
void copy_fill(void *to, const void *pattern, size_t pattern_size, size_t size);

/* reuse.c: PyTorch's allocator hands a block out again: its old values are gone. */
void reuse_watch(void);

/* libraries.c: what an installed library's own version call says; no GPU is needed to ask */
size_t vgpu_installed_version(const char *const *libraries, const char *call, size_t fallback);

/* nccl.c */
void nccl_note_copy(void *to, size_t bytes);          /* a copy within the device, perhaps inside a group of calls */

/* device.c */
int device_current(void);
int device_enter(void);                               /* the current device, its context created */


#endif
