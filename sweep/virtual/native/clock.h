/* How far the device runs behind the host. See clock.c. */
#ifndef VGPU_CLOCK_H
#define VGPU_CLOCK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
  uint64_t free_at; /* when the work enqueued so far will be finished */
} clock_stream;

typedef struct {
  uint64_t at; /* when it will have happened; 0: never recorded */
} clock_event;

clock_stream *clock_stream_of(void *stream); /* stream.c: of a handle, the default streams included */

void clock_run(void *stream, uint64_t nanoseconds); /* enqueues work that takes so long */
void clock_record(void *stream, clock_event *event);
void clock_wait_event(void *stream, const clock_event *event);
bool clock_has_happened(const clock_event *event);
void clock_host_waits(const clock_event *event);
bool clock_is_idle(void *stream);
void clock_host_waits_for_stream(void *stream);
void clock_host_waits_for_all(void);

/* Durations from the datasheet's rates. */
uint64_t clock_of_matmul(double m, double n, double k, double batch, bool sixteen_bit);
uint64_t clock_of_threads(double threads);
uint64_t clock_of_copy(size_t bytes, bool over_pcie);
uint64_t clock_of_collective(size_t bytes, int ranks);

#endif
