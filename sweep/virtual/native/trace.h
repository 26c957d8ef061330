/* What is asked of the device, in the order in which it is asked. See trace.c. */
#ifndef VGPU_TRACE_H
#define VGPU_TRACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum {
  TRACE_KERNEL,       /* amount: threads */
  TRACE_MATMUL,       /* amount: floating-point operations; count: output tiles of 128 x 128 */
  TRACE_COPY,         /* amount: bytes; type: see below */
  TRACE_COLLECTIVE,   /* amount: bytes of the whole, on all ranks; type: see below; count: ranks */
  TRACE_RECORD,       /* subject: the event */
  TRACE_WAIT,         /* the stream waits for an event */
  TRACE_HOST_EVENT,   /* the host waits for an event ... */
  TRACE_HOST_STREAM,  /* ... for a stream ... */
  TRACE_HOST_ALL,     /* ... for the device */
};
enum { TRACE_WITHIN_DEVICE, TRACE_OVER_PCIE };
enum { TRACE_ALL_REDUCE, TRACE_REDUCE, TRACE_REDUCE_SCATTER, TRACE_BROADCAST, TRACE_ALL_GATHER, TRACE_ALL_TO_ALL, TRACE_SEND };

typedef struct {
  uint64_t stream, event; /* names without a meaning of their own; an event's is used again */
  double amount;
  uint32_t operation; /* the last that the framework began before */
  uint32_t count;
  uint8_t kind, type, within; /* within: whether that operation asks for it */
  uint8_t follows;            /* in the same group of NCCL calls as another one */
} trace_entry;

void trace_work(int kind, int type, const void *stream, double amount, size_t count);
void trace_collective(int type, const void *stream, double bytes, int ranks, bool follows);
void trace_order(int kind, const void *stream, const void *event);

#endif
