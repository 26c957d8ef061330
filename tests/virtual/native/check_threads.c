/* Four threads at once, for the thread sanitizer: each allocates, copies, records, reduces and frees on its device. */
#include "check.h"
#include "clock.h"
#include "vgpu.h"

#include <pthread.h>

int cudaSetDevice(int device);
int cudaMalloc(void **address, size_t size);
int cudaFree(void *address);
int cudaMemcpy(void *to, const void *from, size_t size, int kind);
int cudaStreamCreate(void **stream);
int cudaStreamSynchronize(void *stream);
int cudaStreamDestroy(void *stream);
int cudaGetSymbolAddress(void **address, const void *symbol);

static void *work(void *argument) {
  int device = (int)(intptr_t)argument;
  void *stream, *variable;
  CHECK(cudaSetDevice(device % 2) == 0);
  CHECK(cudaStreamCreate(&stream) == 0);
  CHECK(cudaGetSymbolAddress(&variable, NULL) == 0);
  for (int round = 0; round < 500; round++) {
    int read = 0;
    void *address;
    clock_event event = {0};
    CHECK(cudaMalloc(&address, 1000) == 0);
    CHECK(cudaMemcpy(address, &round, sizeof round, 1) == 0);
    clock_run(stream, 100);
    clock_record(stream, &event);
    clock_has_happened(&event);
    CHECK(cudaMemcpy(&read, address, sizeof read, 2) == 0 && read == round);
    CHECK(cudaFree(address) == 0);
  }
  CHECK(cudaStreamSynchronize(stream) == 0 && cudaStreamDestroy(stream) == 0);
  return NULL;
}

int main(void) {
  pthread_t threads[4];
  vgpu_books books;
  setenv("VGPU_COUNT", "2", 1);
  setenv("VGPU_LAG", "simulated", 1);
  for (intptr_t i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, work, (void *)i) == 0);
  for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
  CHECK(vgpu_read_books(0, &books) == 0 && books.process_bytes == books.context_bytes);
  return 0;
}
