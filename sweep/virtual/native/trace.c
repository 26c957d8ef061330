/* The work of an iteration, for an estimate of its time: which calls there were, not how long they would take.
 *
 * Off unless a process asks for it. Kernels are known by their threads alone, so the process says, a thread each, which
 * operation of the framework it is in: it knows the tensors, and adds up their bytes itself. */
#include "trace.h"
#include "vgpu.h"

#include <pthread.h>
#include <stdlib.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool active;
static trace_entry *entries;
static size_t count, room;
static uint32_t operation;
static __thread bool within;

EXPORT void vgpu_trace_start(void) {
  pthread_mutex_lock(&lock);
  count = 0;
  operation = 0;
  __atomic_store_n(&active, true, __ATOMIC_RELEASE);
  pthread_mutex_unlock(&lock);
}

/* What was asked since the start; it stays until the next one. */
EXPORT size_t vgpu_trace_stop(const trace_entry **out) {
  pthread_mutex_lock(&lock);
  __atomic_store_n(&active, false, __ATOMIC_RELEASE);
  *out = entries;
  pthread_mutex_unlock(&lock);
  return count;
}

EXPORT void vgpu_trace_begin(uint32_t which) {
  __atomic_store_n(&operation, which, __ATOMIC_RELAXED);
  within = true;
}
EXPORT void vgpu_trace_end(void) { within = false; }

static void append(trace_entry entry) {
  if (!__atomic_load_n(&active, __ATOMIC_ACQUIRE)) return;
  entry.operation = __atomic_load_n(&operation, __ATOMIC_RELAXED);
  entry.within = within;
  pthread_mutex_lock(&lock);
  if (count == room) {
    room = room ? 2 * room : 4096;
    entries = realloc(entries, room * sizeof *entries);
    if (!entries) abort();
  }
  entries[count++] = entry;
  pthread_mutex_unlock(&lock);
}

void trace_work(int kind, int type, const void *stream, double amount, size_t how_many) {
  append((trace_entry){.kind = (uint8_t)kind,
                       .type = (uint8_t)type,
                       .stream = (uintptr_t)stream,
                       .amount = amount,
                       .count = (uint32_t)how_many});
}

void trace_collective(int type, const void *stream, double bytes, int ranks, bool follows) {
  append((trace_entry){.kind = TRACE_COLLECTIVE,
                       .type = (uint8_t)type,
                       .stream = (uintptr_t)stream,
                       .amount = bytes,
                       .count = (uint32_t)ranks,
                       .follows = follows});
}

void trace_order(int kind, const void *stream, const void *event) {
  append((trace_entry){.kind = (uint8_t)kind, .stream = (uintptr_t)stream, .event = (uintptr_t)event});
}
