/* The VGPU_* environment. It is read at the first CUDA call, not when the library is loaded, so that a process
 * which has torch imported can be forked many times and each child can be another GPU. From that call on the library
 * is armed and the values stay. NVML only looks: libraries count devices through it while they are imported. */
#include "vgpu.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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

static vgpu_config read_environment(void) {
  vgpu_config config = {0};
  const char *name = getenv("VGPU_NAME");
  const char *capability = getenv("VGPU_COMPUTE_CAPABILITY");
  const char *lag = getenv("VGPU_LAG");
  snprintf(config.name, sizeof config.name, "%s", name ? name : "NVIDIA A100-SXM4-80GB");
  config.cc_major = 8;
  if (capability && sscanf(capability, "%d.%d", &config.cc_major, &config.cc_minor) < 1) config.cc_major = 8;
  config.device_count = (int)number("VGPU_COUNT", 1);
  if (config.device_count > VGPU_MAX_DEVICES) config.device_count = VGPU_MAX_DEVICES;
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
