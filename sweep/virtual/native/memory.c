/* The books on memory: how much each device has given out, and what lies at an address.
 *
 * Device memory is address space without access (PROT_NONE): it costs no host memory, and host code that follows a
 * device pointer crashes as it would with a real GPU. Addresses are given out first-fit from one arena, lowest
 * first, and are reused after a free. */
#define _GNU_SOURCE
#include "vgpu.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static range *blocks;      /* every block by address, pinned host memory included */
static range *free_ranges; /* the unused parts of the arena */
static uintptr_t arena_start;
static size_t arena_size;
static struct {
  bool context;
  size_t used, peak, nccl;
  uint64_t allocations, refusals;
} devices[VGPU_MAX_DEVICES];
static size_t pinned, peak_pinned;

static size_t rounded(size_t bytes) { return (bytes + VGPU_GRANULARITY - 1) & ~(VGPU_GRANULARITY - 1); }

/* The address of the arena is only a wish: equal addresses from run to run make runs easier to compare. */
static void arena_open(void) {
  void *wish = (void *)((uintptr_t)0x200000000000); /* 32 TiB */
  for (arena_size = (size_t)1 << 44; arena_size >= (size_t)1 << 36; arena_size >>= 1) {
    void *got = mmap(wish, arena_size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) continue;
    arena_size -= VGPU_GRANULARITY;
    range_insert(&free_ranges, range_new(rounded((uintptr_t)got), arena_size & ~(VGPU_GRANULARITY - 1)));
    __atomic_store_n(&arena_start, rounded((uintptr_t)got), __ATOMIC_RELEASE);
    return;
  }
  fprintf(stderr, "virtual GPU: no address space for device memory; raise the limit (ulimit -v unlimited)\n");
  abort();
}

static uintptr_t address_take(size_t size, size_t alignment) {
  if (!arena_start) arena_open();
  for (range *hole = range_at_or_after(free_ranges, 0); hole; hole = range_at_or_after(free_ranges, hole->start + 1)) {
    uintptr_t start = (hole->start + alignment - 1) / alignment * alignment;
    size_t skipped = start - hole->start;
    if (hole->size < skipped + size) continue;
    size_t left = hole->size - skipped - size;
    if (skipped) {
      hole->size = skipped;
      if (left) range_insert(&free_ranges, range_new(start + size, left));
    } else {
      range_remove(&free_ranges, hole);
      hole->start = start + size;
      hole->size = left;
      if (left) range_insert(&free_ranges, hole);
      else free(hole);
    }
    return start;
  }
  return 0;
}

static void address_give(uintptr_t start, size_t size) {
  range *before = range_containing(free_ranges, start - 1);
  range *after = range_containing(free_ranges, start + size);
  if (after) {
    size += after->size;
    range_remove(&free_ranges, after);
    free(after);
  }
  if (before) before->size += size;
  else range_insert(&free_ranges, range_new(start, size));
}

static void context_create(int device) {
  if (devices[device].context) return;
  devices[device].used += vgpu_configuration()->context_bytes;
  if (devices[device].peak < devices[device].used) devices[device].peak = devices[device].used;
  __atomic_store_n(&devices[device].context, true, __ATOMIC_RELEASE);
}

static bool charge(int device, size_t bytes) {
  const vgpu_config *config = vgpu_configuration();
  context_create(device);
  if (devices[device].used + bytes + config->other_processes_bytes > config->total_memory_bytes) {
    devices[device].refusals++;
    return false;
  }
  devices[device].used += bytes;
  devices[device].allocations++;
  if (devices[device].peak < devices[device].used) devices[device].peak = devices[device].used;
  return true;
}

void memory_use_device(int device) {
  if (__atomic_load_n(&devices[device].context, __ATOMIC_ACQUIRE)) return;
  pthread_mutex_lock(&lock);
  context_create(device);
  pthread_mutex_unlock(&lock);
}

bool memory_has_context(int device) { return __atomic_load_n(&devices[device].context, __ATOMIC_ACQUIRE); }

bool memory_charge(int device, size_t bytes) {
  pthread_mutex_lock(&lock);
  bool charged = charge(device, bytes);
  pthread_mutex_unlock(&lock);
  return charged;
}

void memory_discharge(int device, size_t bytes) {
  pthread_mutex_lock(&lock);
  devices[device].used -= bytes;
  pthread_mutex_unlock(&lock);
}

void memory_charge_nccl(int device, size_t bytes) {
  pthread_mutex_lock(&lock);
  if (charge(device, bytes)) devices[device].nccl += bytes;
  pthread_mutex_unlock(&lock);
}

void memory_discharge_nccl(int device, size_t bytes) {
  pthread_mutex_lock(&lock);
  if (bytes > devices[device].nccl) bytes = devices[device].nccl;
  devices[device].nccl -= bytes;
  devices[device].used -= bytes;
  pthread_mutex_unlock(&lock);
}

/* A pool pays for its blocks itself, and a reserved address costs nothing until memory is mapped there. */
static bool costs_memory(int kind) { return kind == MEMORY_DEVICE; }

void *memory_allocate(int device, size_t bytes, int kind) {
  size_t size = rounded(bytes ? bytes : 1);
  uintptr_t start = 0;
  pthread_mutex_lock(&lock);
  if (!costs_memory(kind) || charge(device, size)) {
    start = address_take(size, VGPU_GRANULARITY);
    if (!start && costs_memory(kind)) devices[device].used -= size;
  }
  if (start) {
    range *block = range_new(start, size);
    block->device = device;
    block->kind = kind;
    range_insert(&blocks, block);
  }
  pthread_mutex_unlock(&lock);
  return (void *)start;
}

void *memory_pin(size_t bytes, int kind) {
  size_t size = (bytes + 4095) & ~(size_t)4095;
  void *address = mmap(NULL, size ? size : 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (address == MAP_FAILED) return NULL;
  pthread_mutex_lock(&lock);
  range *block = range_new((uintptr_t)address, size ? size : 4096);
  block->kind = kind;
  range_insert(&blocks, block);
  pinned += block->size;
  if (peak_pinned < pinned) peak_pinned = pinned;
  pthread_mutex_unlock(&lock);
  return address;
}

void memory_register(void *address, size_t bytes) {
  pthread_mutex_lock(&lock);
  if (!range_containing(blocks, (uintptr_t)address)) {
    range *block = range_new((uintptr_t)address, bytes);
    block->kind = MEMORY_REGISTERED;
    range_insert(&blocks, block);
  }
  pthread_mutex_unlock(&lock);
}

bool memory_unregister(void *address) {
  pthread_mutex_lock(&lock);
  range *block = range_containing(blocks, (uintptr_t)address);
  bool known = block && block->kind == MEMORY_REGISTERED && block->start == (uintptr_t)address;
  if (known) {
    range_remove(&blocks, block);
    free(block);
  }
  pthread_mutex_unlock(&lock);
  return known;
}

bool memory_free(const void *address) {
  pthread_mutex_lock(&lock);
  range *block = range_containing(blocks, (uintptr_t)address);
  bool known = block && block->start == (uintptr_t)address && block->kind != MEMORY_REGISTERED;
  if (known) {
    range_remove(&blocks, block);
    if (block->kind == MEMORY_PINNED || block->kind == MEMORY_MANAGED) {
      pinned -= block->size;
      munmap((void *)block->start, block->size);
    } else {
      if (costs_memory(block->kind)) devices[block->device].used -= block->size;
      values_forget(block->start, block->size);
      address_give(block->start, block->size);
    }
    free(block);
  }
  pthread_mutex_unlock(&lock);
  return known;
}

bool memory_find(const void *address, range *found) {
  pthread_mutex_lock(&lock);
  range *block = range_containing(blocks, (uintptr_t)address);
  if (block) *found = *block;
  pthread_mutex_unlock(&lock);
  return block != NULL;
}

bool memory_on_device(const void *address) {
  uintptr_t start = __atomic_load_n(&arena_start, __ATOMIC_ACQUIRE);
  return start && (uintptr_t)address - start < arena_size;
}

EXPORT int vgpu_read_books(int device, vgpu_books *books) {
  vgpu_config config = vgpu_look();
  if (device < 0 || device >= config.device_count) return VGPU_INVALID_DEVICE;
  return vgpu_read_books_of_gpu(config.gpu_of[device], books);
}

EXPORT int vgpu_read_books_of_gpu(int gpu, vgpu_books *books) {
  vgpu_config config = vgpu_look();
  int device = 0;
  if (gpu < 0 || gpu >= config.gpu_count) return VGPU_INVALID_DEVICE;
  memset(books, 0, sizeof *books);
  books->total_bytes = config.total_memory_bytes;
  books->used_bytes = books->peak_used_bytes = config.other_processes_bytes;
  while (device < config.device_count && config.gpu_of[device] != gpu) device++;
  if (device == config.device_count) return VGPU_SUCCESS;
  pthread_mutex_lock(&lock);
  books->process_bytes = devices[device].used;
  books->peak_process_bytes = devices[device].peak;
  books->used_bytes += devices[device].used;
  books->peak_used_bytes += devices[device].peak;
  books->context_bytes = devices[device].context ? config.context_bytes : 0;
  books->nccl_bytes = devices[device].nccl;
  books->pinned_bytes = pinned;
  books->peak_pinned_bytes = peak_pinned;
  books->allocations = devices[device].allocations;
  books->refusals = devices[device].refusals;
  pthread_mutex_unlock(&lock);
  return VGPU_SUCCESS;
}
