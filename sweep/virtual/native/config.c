/* The VGPU_* environment. It is read at the first CUDA call, not when the library is loaded, so that a process
 * which has torch imported can be forked many times and each child can be another GPU. From that call on the library
 * is armed and the values stay. NVML only looks: libraries count devices through it while they are imported. */
#include "vgpu.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

static vgpu_config armed_config;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static bool armed;

static size_t number(const char *name, size_t fallback) {
  const char *text = getenv(name);
  return text && *text ? strtoull(text, NULL, 10) : fallback;
}

static double rate(const char *name, double fallback) {
  const char *text = getenv(name);
  double value = text && *text ? strtod(text, NULL) : 0;
  return value > 0 ? value : fallback;
}

/* As the driver reads it: the list ends at the first entry that is no GPU. A UUID may be shortened. */
static int gpu_named(const char *entry, int gpu_count) {
  char *end;
  long index = strtol(entry, &end, 10);
  if (end != entry) return index >= 0 && index < gpu_count ? (int)index : -1;
  for (int gpu = 0; gpu < gpu_count; gpu++) {
    char uuid[VGPU_UUID_TEXT];
    vgpu_uuid_text(gpu, uuid);
    size_t length = strcspn(entry, ", ");
    if (length >= 4 && strncasecmp(uuid, entry, length) == 0) return gpu;
  }
  return -1;
}

static void read_visible_devices(vgpu_config *config) {
  const char *entry = getenv("CUDA_VISIBLE_DEVICES");
  for (int i = 0; !entry && i < config->gpu_count; i++) config->gpu_of[config->device_count++] = i;
  while (entry && config->device_count < VGPU_MAX_DEVICES) {
    entry += strspn(entry, " ");
    int gpu = gpu_named(entry, config->gpu_count);
    if (gpu < 0) break;
    config->gpu_of[config->device_count++] = gpu;
    entry = strchr(entry, ',');
    if (!entry++) break;
  }
}

void vgpu_uuid_text(int gpu, char out[VGPU_UUID_TEXT]) {
  snprintf(out, VGPU_UUID_TEXT, "GPU-76677075-0000-0000-0000-%012x", gpu + 1);
}

static vgpu_config read_environment(void) {
  vgpu_config config = {0};
  const char *name = getenv("VGPU_NAME");
  const char *capability = getenv("VGPU_COMPUTE_CAPABILITY");
  const char *lag = getenv("VGPU_LAG");
  snprintf(config.name, sizeof config.name, "%s", name ? name : "NVIDIA A100-SXM4-80GB");
  config.cc_major = 8;
  if (capability && sscanf(capability, "%d.%d", &config.cc_major, &config.cc_minor) < 1) config.cc_major = 8;
  config.gpu_count = (int)number("VGPU_COUNT", 1);
  if (config.gpu_count > VGPU_MAX_DEVICES) config.gpu_count = VGPU_MAX_DEVICES;
  read_visible_devices(&config);
  config.world_size = (int)number("VGPU_WORLD_SIZE", 1);
  config.sm_count = (int)number("VGPU_SM_COUNT", 108);
  config.max_threads_per_sm = (int)number("VGPU_MAX_THREADS_PER_SM", 2048);
  config.l2_bytes = number("VGPU_L2_BYTES", (size_t)40 << 20);
  config.shared_per_block_optin_bytes = number("VGPU_SHARED_PER_BLOCK_OPTIN_BYTES", 166912);
  config.shared_per_sm_bytes = number("VGPU_SHARED_PER_SM_BYTES", 167936);
  config.total_memory_bytes = number("VGPU_TOTAL_MEMORY_BYTES", (size_t)80 << 30);
  config.context_bytes = number("VGPU_CONTEXT_BYTES", (size_t)500 << 20);
  config.nvml_total_bytes = number("VGPU_NVML_TOTAL_BYTES", config.total_memory_bytes);
  if (config.nvml_total_bytes < config.total_memory_bytes) config.nvml_total_bytes = config.total_memory_bytes;
  config.other_processes_bytes = number("VGPU_OTHER_PROCESSES_BYTES", 0);
  config.nccl_communicator_bytes = number("VGPU_NCCL_COMMUNICATOR_BYTES", 0);
  config.half_tflops = rate("VGPU_HALF_TFLOPS", 312);
  config.single_tflops = rate("VGPU_SINGLE_TFLOPS", 19.5);
  config.memory_gb_per_second = rate("VGPU_MEMORY_GB_PER_SECOND", 2039);
  config.link_gb_per_second = rate("VGPU_LINK_GB_PER_SECOND", 64);
  config.lag = !lag || strcmp(lag, "none") == 0 ? LAG_NONE : strcmp(lag, "until-sync") == 0 ? LAG_UNTIL_SYNC : LAG_SIMULATED;
  return config;
}

static void arm(void) {
  armed_config = read_environment();
  __atomic_store_n(&armed, true, __ATOMIC_RELEASE);
}

const vgpu_config *vgpu_configuration(void) {
  pthread_once(&once, arm);
  return &armed_config;
}

bool vgpu_is_armed(void) { return __atomic_load_n(&armed, __ATOMIC_ACQUIRE); }

vgpu_config vgpu_look(void) { return vgpu_is_armed() ? armed_config : read_environment(); }
