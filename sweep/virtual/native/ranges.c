/* Address ranges in a treap: a search tree by address and a heap by random priority, so that finding, inserting and
 * removing take logarithmic time whatever the order of the calls. The caller holds the lock. */
#include "vgpu.h"

#include <stdlib.h>

static uint32_t next_priority(void) {
  static uint32_t state = 2463534242u;
  uint32_t x = __atomic_load_n(&state, __ATOMIC_RELAXED);
  x ^= x << 13;
  x ^= x >> 17;
  x ^= x << 5;
  __atomic_store_n(&state, x, __ATOMIC_RELAXED);
  return x;
}

range *range_new(uintptr_t start, size_t size) {
  range *node = calloc(1, sizeof *node);
  if (!node) abort();
  node->start = start;
  node->size = size;
  node->priority = next_priority();
  return node;
}

/* Splits into the ranges that start before the address and those that start at or after it. */
static void split(range *root, uintptr_t address, range **before, range **after) {
  if (!root) {
    *before = *after = NULL;
  } else if (root->start < address) {
    split(root->right, address, &root->right, after);
    *before = root;
  } else {
    split(root->left, address, before, &root->left);
    *after = root;
  }
}

static range *merge(range *low, range *high) {
  if (!low) return high;
  if (!high) return low;
  if (low->priority > high->priority) {
    low->right = merge(low->right, high);
    return low;
  }
  high->left = merge(low, high->left);
  return high;
}

void range_insert(range **root, range *node) {
  range **place = root;
  while (*place && (*place)->priority >= node->priority)
    place = node->start < (*place)->start ? &(*place)->left : &(*place)->right;
  split(*place, node->start, &node->left, &node->right);
  *place = node;
}

void range_remove(range **root, range *node) {
  range **place = root;
  while (*place && *place != node) place = node->start < (*place)->start ? &(*place)->left : &(*place)->right;
  if (!*place) return;
  *place = merge(node->left, node->right);
  node->left = node->right = NULL;
}

range *range_containing(range *root, uintptr_t address) {
  while (root) {
    if (address < root->start) {
      root = root->left;
    } else if (address - root->start < root->size) {
      return root;
    } else {
      root = root->right;
    }
  }
  return NULL;
}

range *range_at_or_after(range *root, uintptr_t address) {
  range *best = NULL;
  while (root) {
    if (root->start >= address) {
      best = root;
      root = root->left;
    } else {
      root = root->right;
    }
  }
  return best;
}
