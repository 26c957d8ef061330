/* Values on the device against a byte array that has them all. */
#include "check.h"
#include "vgpu.h"

#include <string.h>

#define BYTES 4096
#define BASE ((uintptr_t)1 << 40)

static unsigned char truth[BYTES];

static void compare(size_t from, size_t size) {
  unsigned char read[BYTES] = {0};
  values_read(BASE + from, read, size);
  CHECK(memcmp(read, truth + from, size) == 0);
}

int main(void) {
  srand(11);
  CHECK(!values_read(BASE, truth, BYTES));
  for (int round = 0; round < 20000; round++) {
    size_t from = (size_t)rand() % BYTES, size = (size_t)rand() % (BYTES - from) / (1 + (size_t)rand() % 64);
    size_t to = (size_t)rand() % (BYTES - size);
    unsigned char bytes[BYTES];
    switch (rand() % 3) {
      case 0:
        for (size_t i = 0; i < size; i++) bytes[i] = (unsigned char)rand();
        values_write(BASE + from, bytes, size);
        memcpy(truth + from, bytes, size);
        break;
      case 1:
        values_forget(BASE + from, size);
        memset(truth + from, 0, size);
        break;
      default:
        values_copy(BASE + to, BASE + from, size);
        memmove(truth + to, truth + from, size);
    }
    compare(from, size);
  }
  compare(0, BYTES);
  values_forget(BASE, BYTES);
  CHECK(!values_read(BASE, truth, BYTES));
  return 0;
}
