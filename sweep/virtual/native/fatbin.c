/* Which architectures the loaded kernels were compiled for.
 *
 * CUB and others pick their tuning by the architecture of the code that would run, not of the device: a GPU of
 * compute capability 8.9 runs the code for 8.6 where there is none for 8.9, and a version that no kernel was
 * compiled for is an error to them.
 */
#include "vgpu.h"

#define WRAPPER_MAGIC 0x466243b1u
#define CONTAINER_MAGIC 0xba55ed50u
#define ENOUGH 64 /* a library's containers all hold the same list: the first ones tell */
#define MAX_ARCHITECTURE 256
enum { KIND_PTX = 1, KIND_MACHINE_CODE = 2 };

typedef struct {
  uint32_t magic, version;
  const unsigned char *container;
} wrapper;
typedef struct {
  uint32_t magic;
  uint16_t version, header_size;
  uint64_t entries_size;
} container_header;
typedef struct {
  uint16_t kind, attributes;
  uint32_t header_size;
  uint64_t payload_size;
  uint32_t compressed_size, options;
  uint16_t minor, major;
  uint32_t architecture; /* 86 for 8.6 */
} entry_header;

static bool has_ptx[MAX_ARCHITECTURE], has_code[MAX_ARCHITECTURE];
static int seen;

void fatbin_register(const void *binary) {
  const wrapper *outer = binary;
  if (!outer || outer->magic != WRAPPER_MAGIC || seen >= ENOUGH) return;
  const container_header *container = (const container_header *)outer->container;
  if (!container || container->magic != CONTAINER_MAGIC || container->version != 1) return;
  seen++;
  const unsigned char *at = (const unsigned char *)container + container->header_size;
  const unsigned char *end = at + container->entries_size;
  while (at + sizeof(entry_header) <= end) {
    const entry_header *entry = (const entry_header *)at;
    if (entry->header_size < sizeof *entry) return;
    if (entry->architecture < MAX_ARCHITECTURE) {
      if (entry->kind == KIND_PTX) has_ptx[entry->architecture] = true;
      if (entry->kind == KIND_MACHINE_CODE) has_code[entry->architecture] = true;
    }
    at += entry->header_size + entry->payload_size;
  }
}

/* Machine code runs on its own major architecture from its minor one up; PTX is compiled for anything newer. 0: no
 * code runs there. */
int fatbin_architecture(int device_architecture) {
  for (int candidate = device_architecture; candidate >= device_architecture / 10 * 10; candidate--)
    if (candidate < MAX_ARCHITECTURE && has_code[candidate]) return candidate;
  for (int candidate = device_architecture; candidate > 0; candidate--)
    if (candidate < MAX_ARCHITECTURE && has_ptx[candidate]) return candidate;
  return seen ? 0 : device_architecture;
}
