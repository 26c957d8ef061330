/* Streams and events. Work on them is not done; clock.c says when it would be. */
#include "clock.h"
#include "vgpu.h"

#include <stdlib.h>

typedef struct {
  int device, priority;
  unsigned flags;
  clock_stream clock;
} stream;

typedef clock_event event;

/* 0, 1 and 2 name the default streams. */
static bool is_default(const stream *which) { return (uintptr_t)which <= 2; }

clock_stream *clock_stream_of(void *handle) {
  static clock_stream default_streams[VGPU_MAX_DEVICES];
  return is_default(handle) ? &default_streams[device_current()] : &((stream *)handle)->clock;
}

static int create(stream **out, unsigned flags, int priority) {
  stream *created = calloc(1, sizeof *created);
  if (!created) abort();
  created->device = device_enter();
  created->priority = priority;
  created->flags = flags;
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
  *priority = is_default(which) ? 0 : which->priority;
  return VGPU_SUCCESS;
}

EXPORT int cudaStreamQuery(stream *which) { return clock_is_idle(which) ? VGPU_SUCCESS : VGPU_NOT_READY; }

EXPORT int cudaStreamSynchronize(stream *which) {
  device_enter();
  clock_host_waits_for_stream(which);
  return VGPU_SUCCESS;
}

EXPORT int cudaDeviceSynchronize(void) {
  device_enter();
  clock_host_waits_for_all();
  return VGPU_SUCCESS;
}

EXPORT int cudaStreamWaitEvent(stream *which, event *awaited, unsigned flags UNUSED) {
  clock_wait_event(which, awaited);
  return VGPU_SUCCESS;
}

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

EXPORT int cudaEventRecordWithFlags(event *which, stream *on, unsigned flags UNUSED) {
  clock_record(on, which);
  return VGPU_SUCCESS;
}

EXPORT int cudaEventRecord(event *which, stream *on) { return cudaEventRecordWithFlags(which, on, 0); }

EXPORT int cudaEventQuery(event *which) { return clock_has_happened(which) ? VGPU_SUCCESS : VGPU_NOT_READY; }

EXPORT int cudaEventSynchronize(event *which) {
  clock_host_waits(which);
  return VGPU_SUCCESS;
}

/* The simulated time is good enough to order events, not to be shown. Any two events are the same time apart, so that an autotuner, which compares such times,
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
