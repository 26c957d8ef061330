/* The treap against a plain array. */
#include "check.h"
#include "vgpu.h"

#define SLOTS 512

int main(void) {
  range *root = NULL, *slots[SLOTS] = {0};
  srand(7);
  for (int round = 0; round < 20000; round++) {
    int i = rand() % SLOTS;
    if (slots[i]) {
      range_remove(&root, slots[i]);
      free(slots[i]);
      slots[i] = NULL;
    } else {
      slots[i] = range_new(1000 + (uintptr_t)i * 10, 7);
      range_insert(&root, slots[i]);
    }
    int j = rand() % SLOTS, next = j;
    CHECK(range_containing(root, 1000 + (uintptr_t)j * 10 + 6) == slots[j]);
    CHECK(range_containing(root, 1000 + (uintptr_t)j * 10 + 7) == NULL);
    while (next < SLOTS && !slots[next]) next++;
    CHECK(range_at_or_after(root, 1000 + (uintptr_t)j * 10) == (next < SLOTS ? slots[next] : NULL));
  }
  for (int i = 0; i < SLOTS; i++) {
    if (!slots[i]) continue;
    range_remove(&root, slots[i]);
    free(slots[i]);
  }
  CHECK(root == NULL);
  return 0;
}
