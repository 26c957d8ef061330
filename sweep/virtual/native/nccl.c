/* NCCL for one process that plays its rank in a world whose other ranks do the same as it does.
 *
 * What the other ranks would have sent is what this one sends. That is done for the few bytes that are known
 * (values.c): metadata, flags, sizes. The rest of the device reads as zero and needs no transfer. */
#define _GNU_SOURCE
#include "clock.h"
#include "reduce.h"
#include "trace.h"
#include "vgpu.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { NCCL_SUCCESS = 0, NCCL_UNHANDLED_CUDA_ERROR = 1, NCCL_INVALID_ARGUMENT = 4, NCCL_INVALID_USAGE = 5 };

typedef struct {
  char bytes[128];
} unique_id;

typedef struct communicator {
  int ranks, rank, device;
  size_t charged_bytes;
  bool used;
} communicator;

typedef struct {
  bool send;
  void *address;
  size_t bytes;
  int peer;
  communicator *comm;
} message;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* The sizes of the groups that PyTorch splits off: the split call itself names only a colour. */
#define MAX_COLORS 512
static struct {
  int color, ranks;
} colors[MAX_COLORS];
static int color_count;

EXPORT void vgpu_group_size(int color, int ranks) {
  pthread_mutex_lock(&lock);
  int i = 0;
  while (i < color_count && colors[i].color != color) i++;
  if (i < MAX_COLORS) {
    colors[i].color = color;
    colors[i].ranks = ranks;
    if (i == color_count) color_count++;
  }
  pthread_mutex_unlock(&lock);
}

static int ranks_of_color(int color, int fallback) {
  int ranks = fallback;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < color_count; i++)
    if (colors[i].color == color) ranks = colors[i].ranks;
  pthread_mutex_unlock(&lock);
  return ranks;
}

static int create(communicator **out, int ranks, int rank) {
  communicator *comm = calloc(1, sizeof *comm);
  if (!comm) abort();
  *comm = (communicator){.ranks = ranks, .rank = rank, .device = device_enter()};
  *out = comm;
  return NCCL_SUCCESS;
}

EXPORT int ncclGetUniqueId(unique_id *id) {
  memset(id, 0, sizeof *id);
  memcpy(id->bytes, "virtual", 7);
  return NCCL_SUCCESS;
}
EXPORT int ncclCommInitRank(communicator **comm, int ranks, unique_id id UNUSED, int rank) { return create(comm, ranks, rank); }
EXPORT int ncclCommInitRankConfig(communicator **comm, int ranks, unique_id id UNUSED, int rank, void *config UNUSED) {
  return create(comm, ranks, rank);
}
EXPORT int ncclCommInitRankScalable(communicator **comm, int ranks, int rank, int ids UNUSED, unique_id *id UNUSED,
                                    void *config UNUSED) {
  return create(comm, ranks, rank);
}

EXPORT int cudaSetDevice(int device);
EXPORT int ncclCommInitAll(communicator **comms, int devices, const int *list) {
  int before = device_current();
  for (int i = 0; i < devices; i++) {
    cudaSetDevice(list ? list[i] : i);
    create(&comms[i], devices, i);
  }
  cudaSetDevice(before);
  return NCCL_SUCCESS;
}

EXPORT int ncclCommSplit(communicator *comm, int color, int key UNUSED, communicator **out, void *config UNUSED) {
  *out = NULL;
  return color < 0 ? NCCL_SUCCESS : create(out, ranks_of_color(color, comm->ranks), comm->rank);
}

static int destroy(communicator *comm) {
  if (comm && comm->charged_bytes) memory_discharge_nccl(comm->device, comm->charged_bytes);
  free(comm);
  return NCCL_SUCCESS;
}
EXPORT int ncclCommDestroy(communicator *comm) { return destroy(comm); }
EXPORT int ncclCommAbort(communicator *comm) { return destroy(comm); }
EXPORT int ncclCommFinalize(communicator *comm UNUSED) { return NCCL_SUCCESS; }

EXPORT int ncclCommCount(const communicator *comm, int *count) {
  *count = comm->ranks;
  return NCCL_SUCCESS;
}
EXPORT int ncclCommUserRank(const communicator *comm, int *rank) {
  *rank = comm->rank;
  return NCCL_SUCCESS;
}
EXPORT int ncclCommCuDevice(const communicator *comm, int *device) {
  *device = comm->device;
  return NCCL_SUCCESS;
}
EXPORT int ncclCommGetAsyncError(communicator *comm UNUSED, int *error) {
  *error = NCCL_SUCCESS;
  return NCCL_SUCCESS;
}
EXPORT int ncclCommRegister(const communicator *comm UNUSED, void *address UNUSED, size_t size UNUSED, void **handle) {
  *handle = (void *)1;
  return NCCL_SUCCESS;
}
EXPORT int ncclCommDeregister(const communicator *comm UNUSED, void *handle UNUSED) { return NCCL_SUCCESS; }

EXPORT int ncclMemAlloc(void **address, size_t size) {
  *address = memory_allocate(device_enter(), size, MEMORY_DEVICE);
  return *address ? NCCL_SUCCESS : NCCL_UNHANDLED_CUDA_ERROR;
}
EXPORT int ncclMemFree(void *address) { return memory_free(address) ? NCCL_SUCCESS : NCCL_INVALID_ARGUMENT; }

/* PyTorch was built for the NCCL that is installed with it, and asks which one it is. */
EXPORT int ncclGetVersion(int *version) {
  void *library = dlopen("libnccl.so.2", RTLD_LAZY | RTLD_NOLOAD);
  int (*installed)(int *) = library ? (int (*)(int *))dlsym(library, "ncclGetVersion") : NULL;
  *version = 22703;
  return installed && installed != ncclGetVersion ? installed(version) : NCCL_SUCCESS;
}

EXPORT const char *ncclGetErrorString(int code) {
  return code == NCCL_INVALID_USAGE ? vgpu_unsupported_message() : code ? "NCCL error" : "no error";
}
EXPORT const char *ncclGetLastError(communicator *comm UNUSED) { return ""; }

/* Send and receive: gathered until the group ends, because a receive is answered by one of the sends. */
static __thread struct {
  int depth;
  bool traced; /* a part of the group */
  size_t count, room;
  message *messages;
} group;

/* NCCL allocates its channels' buffers when a communicator is used for the first time. */
static void use(communicator *comm, int kind, size_t bytes, void *stream) {
  if (comm->ranks > 1) {
    trace_collective(kind, stream, (double)bytes, comm->ranks, group.depth && group.traced);
    group.traced = true;
    clock_run(stream, clock_of_collective(kind == TRACE_ALL_REDUCE ? 2 * bytes : bytes, comm->ranks));
  }
  if (__atomic_exchange_n(&comm->used, true, __ATOMIC_RELAXED) || comm->ranks < 2) return;
  comm->charged_bytes = vgpu_configuration()->nccl_communicator_bytes;
  memory_charge_nccl(comm->device, comm->charged_bytes);
}

static struct {
  double factor;
  bool used;
} operations[256];

EXPORT int ncclRedOpCreatePreMulSum(int *operation, void *scalar, int type, int residence, communicator *comm UNUSED) {
  char bytes[8] = {0};
  double factor = 1;
  size_t size = reduce_element_bytes(type);
  if (residence == 0) values_read((uintptr_t)scalar, bytes, size); /* ncclScalarDevice */
  else memcpy(bytes, scalar, size);
  if (type == 7) {
    float narrow;
    memcpy(&narrow, bytes, sizeof narrow);
    factor = narrow;
  } else if (type == 8) {
    memcpy(&factor, bytes, sizeof factor);
  } /* half and bfloat16 factors stay 1: their sums are only ever gradients */
  pthread_mutex_lock(&lock);
  int slot = 0;
  while (slot < 255 && operations[slot].used) slot++;
  operations[slot].used = true;
  operations[slot].factor = factor;
  pthread_mutex_unlock(&lock);
  *operation = REDUCE_SCALED_SUM + slot;
  return NCCL_SUCCESS;
}

EXPORT int ncclRedOpDestroy(int operation, communicator *comm UNUSED) {
  if (operation >= REDUCE_SCALED_SUM && operation < REDUCE_SCALED_SUM + 256)
    operations[operation - REDUCE_SCALED_SUM].used = false;
  return NCCL_SUCCESS;
}

/* Reduces one piece of identical contributions from `from` into `to`. */
static int reduce(const void *from, void *to, size_t count, int type, int operation, communicator *comm) {
  size_t bytes = count * reduce_element_bytes(type);
  double factor = operation >= REDUCE_SCALED_SUM ? operations[(operation - REDUCE_SCALED_SUM) & 255].factor : 1;
  if (bytes > VALUES_COPY_LIMIT) {
    values_copy((uintptr_t)to, (uintptr_t)from, bytes);
    return NCCL_SUCCESS;
  }
  char *buffer = calloc(1, bytes ? bytes : 1);
  if (!buffer) abort();
  if (values_read((uintptr_t)from, buffer, bytes)) {
    reduce_identical(buffer, count, type, operation < REDUCE_SCALED_SUM ? operation : REDUCE_SCALED_SUM, comm->ranks, factor);
    values_write((uintptr_t)to, buffer, bytes);
  } else {
    values_forget((uintptr_t)to, bytes);
  }
  free(buffer);
  return NCCL_SUCCESS;
}

EXPORT int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, communicator *comm,
                         void *stream) {
  use(comm, TRACE_ALL_REDUCE, count * reduce_element_bytes(type), stream);
  return reduce(from, to, count, type, operation, comm);
}
EXPORT int ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root, communicator *comm,
                      void *stream) {
  use(comm, TRACE_REDUCE, count * reduce_element_bytes(type), stream);
  return comm->rank == root ? reduce(from, to, count, type, operation, comm) : NCCL_SUCCESS;
}
EXPORT int ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation, communicator *comm,
                             void *stream) {
  size_t bytes = count * reduce_element_bytes(type);
  use(comm, TRACE_REDUCE_SCATTER, bytes * (size_t)comm->ranks, stream);
  return reduce((const char *)from + bytes * (size_t)comm->rank, to, count, type, operation, comm);
}

EXPORT int ncclBroadcast(const void *from, void *to, size_t count, int type, int root UNUSED, communicator *comm,
                         void *stream) {
  use(comm, TRACE_BROADCAST, count * reduce_element_bytes(type), stream);
  values_copy((uintptr_t)to, (uintptr_t)from, count * reduce_element_bytes(type));
  return NCCL_SUCCESS;
}
EXPORT int ncclBcast(void *buffer, size_t count, int type, int root, communicator *comm, void *stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

EXPORT int ncclAllGather(const void *from, void *to, size_t count, int type, communicator *comm, void *stream) {
  size_t bytes = count * reduce_element_bytes(type);
  use(comm, TRACE_ALL_GATHER, bytes * (size_t)comm->ranks, stream);
  for (int rank = 0; rank < comm->ranks; rank++)
    values_copy((uintptr_t)to + bytes * (size_t)rank, (uintptr_t)from, bytes);
  return NCCL_SUCCESS;
}
EXPORT int ncclGather(const void *from, void *to, size_t count, int type, int root, communicator *comm, void *stream) {
  return comm->rank == root ? ncclAllGather(from, to, count, type, comm, stream) : NCCL_SUCCESS;
}

/* Every rank sends me the chunk that I would send to a rank in my place: my own. */
EXPORT int ncclAlltoAll(const void *from, void *to, size_t count, int type, communicator *comm, void *stream) {
  size_t bytes = count * reduce_element_bytes(type);
  use(comm, TRACE_ALL_TO_ALL, bytes * (size_t)comm->ranks, stream);
  for (int rank = 0; rank < comm->ranks; rank++)
    values_copy((uintptr_t)to + bytes * (size_t)rank, (uintptr_t)from + bytes * (size_t)comm->rank, bytes);
  return NCCL_SUCCESS;
}

static const message *answer(const message *receive) {
  const message *same_peer = NULL, *any = NULL;
  for (size_t i = 0; i < group.count; i++) {
    const message *send = &group.messages[i];
    if (!send->send || send->bytes != receive->bytes) continue;
    if (!send->comm || send->peer == receive->comm->rank) return send;
    if (send->peer == receive->peer) same_peer = send;
    if (!any) any = send;
  }
  return same_peer ? same_peer : any;
}

static void deliver(void) {
  for (size_t i = 0; i < group.count; i++) {
    const message *receive = &group.messages[i];
    const message *send = receive->send ? NULL : answer(receive);
    if (send) values_copy((uintptr_t)receive->address, (uintptr_t)send->address, receive->bytes);
    else if (!receive->send) values_forget((uintptr_t)receive->address, receive->bytes);
  }
  free(group.messages);
  group.messages = NULL;
  group.count = group.room = 0;
}

static void append(message posted) {
  if (group.count == group.room) {
    group.room = group.room ? 2 * group.room : 16;
    group.messages = realloc(group.messages, group.room * sizeof *group.messages);
    if (!group.messages) abort();
  }
  group.messages[group.count++] = posted;
}

static int post(bool send, void *address, size_t count, int type, int peer, communicator *comm, void *stream) {
  use(comm, TRACE_SEND, count * reduce_element_bytes(type), stream);
  append((message){send, address, count * reduce_element_bytes(type), peer, comm});
  if (!group.depth) deliver();
  return NCCL_SUCCESS;
}

/* PyTorch's gather at its root copies its own part and receives the others: the copy says what they all send. */
void nccl_note_copy(void *to, size_t bytes) {
  if (group.depth) append((message){true, to, bytes, -1, NULL});
}

EXPORT int ncclSend(const void *from, size_t count, int type, int peer, communicator *comm, void *stream) {
  return post(true, (void *)from, count, type, peer, comm, stream);
}
EXPORT int ncclRecv(void *to, size_t count, int type, int peer, communicator *comm, void *stream) {
  return post(false, to, count, type, peer, comm, stream);
}
EXPORT int ncclGroupStart(void) {
  if (!group.depth++) group.traced = false;
  return NCCL_SUCCESS;
}
EXPORT int ncclGroupEnd(void) {
  if (group.depth > 0 && --group.depth == 0) deliver();
  return NCCL_SUCCESS;
}
