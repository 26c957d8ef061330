/* How far the device runs behind the host.
 *
 * Whether an event has happened decides when PyTorch may reuse a block that another stream used, and so what stays in
 * `active` and `reserved` beside what is allocated. Three answers:
 *   none        the device finishes everything at once: the lower bound;
 *   until-sync  what was enqueued is finished once the host has waited for anything enqueued later;
 *   simulated   the host spends a fixed time a call, each stream takes its work one after the other, work takes what
 *               the datasheet's rates say, and a host that is too far ahead waits for room in the launch queue. That
 *               last rule decides most. It is counted, not measured: the same run gives the same answers. */
#include "clock.h"
#include "trace.h"
#include "vgpu.h"

#include <pthread.h>
#include <time.h>

/* What one enqueued piece of work costs a Python training loop on the host, launch and interpreter together. */
#define HOST_NANOSECONDS_PER_CALL 8000
#define LAUNCH_NANOSECONDS 3000 /* the shortest that a kernel takes on the device */
#define QUEUE_ENTRIES 1024      /* what a context has room for: launches, copies, event records and waits */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t host_now = 1; /* simulated: nanoseconds; until-sync: events recorded so far */
static uint64_t finished;     /* until-sync: all up to this one have happened */
static uint64_t last_finish;  /* simulated: when all streams will be idle */
static uint64_t queued[QUEUE_ENTRIES], queued_count; /* simulated: when the last entries will be finished */

static time_t enqueued_at;    /* real time of the last record or launch */
static __thread bool enqueues;

static time_t real_seconds(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return now.tv_sec;
}

static int lag(void) { return vgpu_configuration()->lag; }
static uint64_t later(uint64_t a, uint64_t b) { return a > b ? a : b; }

/* Puts something behind the stream's work, and waits for room first. All streams share the room. */
static void enqueue(clock_stream *queue, uint64_t not_before, uint64_t nanoseconds) {
  uint64_t *slot = &queued[queued_count++ % QUEUE_ENTRIES];
  host_now = later(host_now + HOST_NANOSECONDS_PER_CALL, *slot);
  queue->free_at = later(later(queue->free_at, host_now), not_before) + nanoseconds;
  *slot = queue->free_at;
  last_finish = later(last_finish, queue->free_at);
  enqueues = true;
  enqueued_at = real_seconds();
}

void clock_run(void *stream, uint64_t nanoseconds) {
  if (lag() != LAG_SIMULATED) return;
  clock_stream *queue = clock_stream_of(stream);
  pthread_mutex_lock(&lock);
  enqueue(queue, 0, later(nanoseconds, LAUNCH_NANOSECONDS));
  pthread_mutex_unlock(&lock);
}

void clock_record(void *stream, clock_event *event) {
  trace_order(TRACE_RECORD, stream, event);
  if (lag() == LAG_NONE) return;
  clock_stream *queue = clock_stream_of(stream);
  pthread_mutex_lock(&lock);
  if (lag() == LAG_SIMULATED) {
    enqueue(queue, 0, 0);
    event->at = queue->free_at;
  } else {
    event->at = ++host_now;
    enqueued_at = real_seconds();
  }
  pthread_mutex_unlock(&lock);
}

void clock_wait_event(void *stream, const clock_event *event) {
  trace_order(TRACE_WAIT, stream, event);
  if (lag() != LAG_SIMULATED) return;
  clock_stream *queue = clock_stream_of(stream);
  pthread_mutex_lock(&lock);
  enqueue(queue, event->at, 0);
  pthread_mutex_unlock(&lock);
}

/* Somebody may poll an event until it has happened. A thread that enqueues work pays for each question in simulated
 * time. Another thread, such as NCCL's watchdog, must not move the clock, or runs would differ; but when nothing was
 * enqueued for seconds of real time a device would have caught up, and has. */
#define NANOSECONDS_PER_QUESTION 1000
#define CAUGHT_UP_SECONDS 5

static void ask(const clock_event *event) {
  if (enqueues) host_now += NANOSECONDS_PER_QUESTION;
  else if (real_seconds() - enqueued_at > CAUGHT_UP_SECONDS) host_now = later(host_now, event->at);
}

bool clock_has_happened(const clock_event *event) {
  if (lag() == LAG_NONE) return true;
  pthread_mutex_lock(&lock);
  bool happened = event->at <= (lag() == LAG_SIMULATED ? host_now : finished);
  if (!happened && lag() == LAG_SIMULATED) ask(event);
  if (!happened && lag() == LAG_UNTIL_SYNC && real_seconds() - enqueued_at > CAUGHT_UP_SECONDS) finished = event->at;
  pthread_mutex_unlock(&lock);
  return happened;
}

/* Without the trace: what the other ways of waiting come down to. */
static void host_waits(const clock_event *event) {
  if (lag() == LAG_NONE) return;
  pthread_mutex_lock(&lock);
  if (lag() == LAG_SIMULATED) host_now = later(host_now, event->at);
  else finished = later(finished, event->at);
  pthread_mutex_unlock(&lock);
}

void clock_host_waits(const clock_event *event) {
  trace_order(TRACE_HOST_EVENT, NULL, event);
  host_waits(event);
}

bool clock_is_idle(void *stream) {
  if (lag() == LAG_NONE) return true;
  pthread_mutex_lock(&lock);
  bool idle = lag() == LAG_SIMULATED ? clock_stream_of(stream)->free_at <= host_now : finished >= host_now;
  if (!idle && lag() == LAG_SIMULATED) host_now += NANOSECONDS_PER_QUESTION;
  pthread_mutex_unlock(&lock);
  return idle;
}

void clock_host_waits_for_stream(void *stream) {
  clock_event all = {0};
  trace_order(TRACE_HOST_STREAM, stream, NULL);
  if (lag() == LAG_NONE) return;
  pthread_mutex_lock(&lock);
  all.at = lag() == LAG_SIMULATED ? clock_stream_of(stream)->free_at : host_now;
  pthread_mutex_unlock(&lock);
  host_waits(&all);
}

void clock_host_waits_for_all(void) {
  clock_event all = {0};
  trace_order(TRACE_HOST_ALL, NULL, NULL);
  pthread_mutex_lock(&lock);
  all.at = lag() == LAG_SIMULATED ? last_finish : host_now;
  pthread_mutex_unlock(&lock);
  host_waits(&all);
}

/* Real kernels reach a part of the datasheet's rates. */
#define MATMUL_EFFICIENCY 0.6
#define MEMORY_EFFICIENCY 0.8
#define LINK_EFFICIENCY 0.75
#define BYTES_PER_THREAD 32 /* an elementwise kernel reads and writes some 16 bytes each in a thread */
#define PCIE_BYTES_PER_NANOSECOND 20.0

uint64_t clock_of_matmul(double m, double n, double k, double batch, bool sixteen_bit) {
  const vgpu_config *config = vgpu_configuration();
  double tflops = sixteen_bit ? config->half_tflops : config->single_tflops;
  return (uint64_t)(2 * m * n * k * batch / (tflops * MATMUL_EFFICIENCY * 1000));
}

uint64_t clock_of_threads(double threads) {
  return (uint64_t)(threads * BYTES_PER_THREAD / (vgpu_configuration()->memory_gb_per_second * MEMORY_EFFICIENCY));
}

uint64_t clock_of_copy(size_t bytes, bool over_pcie) {
  double rate = over_pcie ? PCIE_BYTES_PER_NANOSECOND : vgpu_configuration()->memory_gb_per_second * MEMORY_EFFICIENCY / 2;
  return (uint64_t)((double)bytes / rate);
}

/* A ring passes (n - 1) / n of the bytes over each link, which carries half of the datasheet's figure each way. */
uint64_t clock_of_collective(size_t bytes, int ranks) {
  double rate = vgpu_configuration()->link_gb_per_second / 2 * LINK_EFFICIENCY;
  return 20000 + (uint64_t)((double)bytes * (ranks - 1) / ranks / rate);
}
