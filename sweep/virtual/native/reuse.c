/* Forgets the values of a block when PyTorch's caching allocator hands it out again.
 *
 * The caching allocator reuses freed blocks without telling the driver. A loss that no kernel ever wrote would then
 * show whatever small tensor had lived at its address before. So c10::Allocator::allocate of PyTorch's CUDA
 * allocator, the one entry that every tensor comes through, is wrapped: the object is found by its exported name,
 * and the slot of its virtual table is replaced. The slot is the first one after the two destructors since
 * c10::Allocator exists, and the returned DataPtr begins with the address. */
#define _GNU_SOURCE
#include "vgpu.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#define ALLOCATE_SLOT 2

/* c10::DataPtr as the C++ ABI returns it: a class with a destructor, so in memory, like a C structure this large. */
typedef struct {
  void *address, *context;
  void (*deleter)(void *);
  int32_t device;
} data_pointer;
typedef data_pointer (*allocate_function)(void *allocator, size_t size);

static allocate_function torch_allocate;

static data_pointer allocate_and_forget(void *allocator, size_t size) {
  data_pointer result = torch_allocate(allocator, size);
  if (result.address) values_forget((uintptr_t)result.address, (size + 511) & ~(size_t)511);
  return result;
}

static void watch(void) {
  void *library = dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  if (!library) return;
  void **allocator = dlsym(library, "_ZN3c104cuda20CUDACachingAllocator9allocatorE");
  void **table = allocator && *allocator ? **(void ****)allocator : NULL;
  Dl_info info;
  if (!table || !dladdr(table[ALLOCATE_SLOT], &info) || !info.dli_fname || !strstr(info.dli_fname, "libc10_cuda")) {
    fprintf(stderr, "virtual GPU: this PyTorch's allocator is unknown; values read back may be stale\n");
    return;
  }
  uintptr_t page = (uintptr_t)&table[ALLOCATE_SLOT] & ~(uintptr_t)4095;
  size_t length = (uintptr_t)&table[ALLOCATE_SLOT + 1] - page;
  if (mprotect((void *)page, length, PROT_READ | PROT_WRITE) != 0) return;
  torch_allocate = (allocate_function)table[ALLOCATE_SLOT];
  table[ALLOCATE_SLOT] = (void *)allocate_and_forget;
  mprotect((void *)page, length, PROT_READ);
}

void reuse_watch(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, watch);
}
