/* The few bytes of device memory whose value is known, because they were copied there.
 *
 * They live in a table beside the memory, keyed by address, not in the memory itself. Whatever is not in the table
 * reads as zero. A range is forgotten when its block is freed, when PyTorch hands its memory out again (reuse.c),
 * and when something unknown or zero is copied over it. */
#include "vgpu.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static range *values;
static size_t known; /* ranges in the table: an empty table, the usual case, costs one load */

static void insert(uintptr_t start, const void *bytes, size_t size) {
  range *node = range_new(start, size);
  node->data = malloc(size);
  if (!node->data) abort();
  memcpy(node->data, bytes, size);
  range_insert(&values, node);
  __atomic_add_fetch(&known, 1, __ATOMIC_RELAXED);
}

static void drop(range *node) {
  range_remove(&values, node);
  free(node->data);
  free(node);
  __atomic_sub_fetch(&known, 1, __ATOMIC_RELAXED);
}

/* The first known range that overlaps [start, end). */
static range *overlap(uintptr_t start, uintptr_t end) {
  range *node = range_containing(values, start);
  if (!node) node = range_at_or_after(values, start);
  return node && node->start < end ? node : NULL;
}

static void forget(uintptr_t start, size_t size) {
  uintptr_t end = start + size;
  range *node;
  while ((node = overlap(start, end))) {
    uintptr_t node_end = node->start + node->size;
    if (node_end > end) insert(end, (char *)node->data + (end - node->start), node_end - end);
    if (node->start < start) node->size = start - node->start;
    else drop(node);
  }
}

void values_write(uintptr_t address, const void *bytes, size_t size) {
  if (!size) return;
  pthread_mutex_lock(&lock);
  forget(address, size);
  insert(address, bytes, size);
  pthread_mutex_unlock(&lock);
}

void values_forget(uintptr_t address, size_t size) {
  if (!size || !__atomic_load_n(&known, __ATOMIC_RELAXED)) return;
  pthread_mutex_lock(&lock);
  forget(address, size);
  pthread_mutex_unlock(&lock);
}

bool values_read(uintptr_t address, void *bytes, size_t size) {
  uintptr_t end = address + size;
  bool any = false;
  if (!size || !__atomic_load_n(&known, __ATOMIC_RELAXED)) return false;
  pthread_mutex_lock(&lock);
  for (range *node = overlap(address, end); node; node = overlap(node->start + node->size, end)) {
    uintptr_t from = node->start > address ? node->start : address;
    uintptr_t to = node->start + node->size < end ? node->start + node->size : end;
    memcpy((char *)bytes + (from - address), (char *)node->data + (from - node->start), to - from);
    any = true;
    if (to == end) break;
  }
  pthread_mutex_unlock(&lock);
  return any;
}

/* Ranges are gathered before the destination is forgotten: source and destination may overlap. */
void values_copy(uintptr_t to, uintptr_t from, size_t size) {
  uintptr_t end = from + size;
  struct piece {
    struct piece *next;
    uintptr_t start;
    size_t size;
    char bytes[];
  } *pieces = NULL;
  if (!size || to == from || !__atomic_load_n(&known, __ATOMIC_RELAXED)) return;
  pthread_mutex_lock(&lock);
  for (range *node = overlap(from, end); node; node = overlap(node->start + node->size, end)) {
    uintptr_t piece_start = node->start > from ? node->start : from;
    uintptr_t piece_end = node->start + node->size < end ? node->start + node->size : end;
    struct piece *piece = malloc(sizeof *piece + (piece_end - piece_start));
    if (!piece) abort();
    piece->start = piece_start - from + to;
    piece->size = piece_end - piece_start;
    memcpy(piece->bytes, (char *)node->data + (piece_start - node->start), piece->size);
    piece->next = pieces;
    pieces = piece;
    if (piece_end == end) break;
  }
  forget(to, size);
  while (pieces) {
    struct piece *next = pieces->next;
    insert(pieces->start, pieces->bytes, pieces->size);
    free(pieces);
    pieces = next;
  }
  pthread_mutex_unlock(&lock);
}
