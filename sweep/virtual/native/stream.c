/* Streams and events, and how far the device runs behind the host.
 *
 * Whether an event is ready decides when PyTorch may reuse a block that another stream used. With lag "none" the
 * device finishes at once. With lag "until-sync" an event is ready only after the host has waited for the device
 * since: the upper bound of how far a host can run ahead. A real device is between the two. */
#include "vgpu.h"

#include <stdlib.h>

typedef struct {
  int device, priority;
  unsigned flags;
} stream;

typedef struct {
  uint64_t recorded;
} event;

static uint64_t enqueued = 1, finished;


static uint64_t now(void) { return __atomic_load_n(&enqueued, __ATOMIC_RELAXED); }

static void finish(uint64_t until) {
  uint64_t seen = __atomic_load_n(&finished, __ATOMIC_RELAXED);
  while (seen < until && !__atomic_compare_exchange_n(&finished, &seen, until, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

static int create(stream **out, unsigned flags, int priority) {
  stream *created = calloc(1, sizeof *created);
  if (!created) abort();
  *created = (stream){.device = device_enter(), .priority = priority, .flags = flags};
  *out = created;
  return VGPU_SUCCESS;
}

EXPORT int cudaStreamCreate(stream **out) { return create(out, 0, 0); }
EXPORT int cudaStreamCreateWithFlags(stream **out, unsigned flags) { return create(out, flags, 0); }
EXPORT int cudaStreamCreateWithPriority(stream **out, unsigned flags, int priority) { return create(out, flags, priority); }

EXPORT int cudaStreamDestroy(stream *which) {
  free(which);
  return VGPU_SUCCESS;
}

EXPORT int cudaStreamGetPriority(const stream *which, int *priority) {
  *priority = (uintptr_t)which > 2 ? which->priority : 0; /* 0, 1 and 2 name the default streams */
  return VGPU_SUCCESS;
}

EXPORT int cudaStreamQuery(stream *which UNUSED) {
  const vgpu_config *config = vgpu_configuration();
  if (config->lag_until_sync && __atomic_load_n(&finished, __ATOMIC_RELAXED) < now()) return VGPU_NOT_READY;
  return VGPU_SUCCESS;
}

EXPORT int cudaStreamSynchronize(stream *which UNUSED) {
  device_enter();
  finish(now());
  return VGPU_SUCCESS;
}

EXPORT int cudaDeviceSynchronize(void) { return cudaStreamSynchronize(NULL); }

EXPORT int cudaStreamWaitEvent(stream *which UNUSED, event *awaited UNUSED, unsigned flags UNUSED) { return VGPU_SUCCESS; }

typedef void (*host_function)(void *data);
typedef void (*stream_callback)(stream *which, int status, void *data);

EXPORT int cudaLaunchHostFunc(stream *which UNUSED, host_function function, void *data) {
  function(data);
  return VGPU_SUCCESS;
}

EXPORT int cudaStreamAddCallback(stream *which, stream_callback callback, void *data, unsigned flags UNUSED) {
  callback(which, VGPU_SUCCESS, data);
  return VGPU_SUCCESS;
}

/* Nothing is ever captured (cudaStreamBeginCapture is refused), so every stream says "not capturing". The first two
 * arguments are the same in all versions of the call; what follows is only valid while capturing. */
EXPORT int cudaStreamIsCapturing(stream *which UNUSED, int *status) {
  *status = 0;
  return VGPU_SUCCESS;
}
EXPORT int cudaStreamGetCaptureInfo(stream *which UNUSED, int *status) {
  *status = 0;
  return VGPU_SUCCESS;
}
EXPORT int cudaStreamGetCaptureInfo_v2(stream *which UNUSED, int *status) {
  *status = 0;
  return VGPU_SUCCESS;
}
EXPORT int cudaStreamGetCaptureInfo_v3(stream *which UNUSED, int *status) {
  *status = 0;
  return VGPU_SUCCESS;
}
EXPORT int cudaThreadExchangeStreamCaptureMode(int *mode UNUSED) { return VGPU_SUCCESS; }

static event *event_new(void) {
  event *created = calloc(1, sizeof *created);
  if (!created) abort();
  return created;
}

EXPORT int cudaEventCreateWithFlags(event **out, unsigned flags UNUSED) {
  device_enter();
  *out = event_new();
  return VGPU_SUCCESS;
}

EXPORT int cudaEventCreate(event **out) { return cudaEventCreateWithFlags(out, 0); }

EXPORT int cudaEventDestroy(event *which) {
  free(which);
  return VGPU_SUCCESS;
}

EXPORT int cudaEventRecordWithFlags(event *which, stream *on UNUSED, unsigned flags UNUSED) {
  uint64_t recorded = __atomic_add_fetch(&enqueued, 1, __ATOMIC_RELAXED);
  __atomic_store_n(&which->recorded, recorded, __ATOMIC_RELAXED);
  return VGPU_SUCCESS;
}

EXPORT int cudaEventRecord(event *which, stream *on) { return cudaEventRecordWithFlags(which, on, 0); }

EXPORT int cudaEventQuery(event *which) {
  if (!vgpu_configuration()->lag_until_sync) return VGPU_SUCCESS;
  uint64_t recorded = __atomic_load_n(&which->recorded, __ATOMIC_RELAXED);
  return recorded <= __atomic_load_n(&finished, __ATOMIC_RELAXED) ? VGPU_SUCCESS : VGPU_NOT_READY;
}

EXPORT int cudaEventSynchronize(event *which) {
  finish(__atomic_load_n(&which->recorded, __ATOMIC_RELAXED));
  return VGPU_SUCCESS;
}

/* Time is not simulated. Any two events are the same time apart, so that an autotuner, which compares such times,
 * always chooses its first candidate; and it is long enough that a benchmark loop stops after few repetitions. */
EXPORT int cudaEventElapsedTime(float *milliseconds, event *from UNUSED, event *to UNUSED) {
  *milliseconds = 10.0f;
  return VGPU_SUCCESS;
}

EXPORT int cudaEventElapsedTime_v2(float *milliseconds, event *from, event *to) {
  return cudaEventElapsedTime(milliseconds, from, to);
}

EXPORT int cudaProfilerStart(void) { return VGPU_SUCCESS; }
EXPORT int cudaProfilerStop(void) { return VGPU_SUCCESS; }

EXPORT int cuStreamWriteValue32_v2(stream *which UNUSED, uintptr_t address, uint32_t value, unsigned flags UNUSED) {
  copy_bytes((void *)address, &value, sizeof value);
  return VGPU_SUCCESS;
}
EXPORT int cuStreamWriteValue32(stream *which, uintptr_t address, uint32_t value, unsigned flags) {
  return cuStreamWriteValue32_v2(which, address, value, flags);
}
EXPORT int cuStreamGetCaptureInfo_v2(stream *which UNUSED, int *status) {
  *status = 0;
  return VGPU_SUCCESS;
}
EXPORT int cuStreamIsCapturing(stream *which UNUSED, int *status) {
  *status = 0;
  return VGPU_SUCCESS;
}
EXPORT int cuStreamSynchronize(stream *which) { return cudaStreamSynchronize(which); }
