/* Lag: what has happened when, in each of the three ways of counting. The way is the first argument. */
#include "check.h"
#include "clock.h"
#include "vgpu.h"

#include <string.h>

int cudaStreamCreateWithFlags(void **stream, unsigned flags);
int cudaStreamDestroy(void *stream);

static void none(void) {
  clock_event event = {0};
  clock_run(NULL, 1000000000);
  clock_record(NULL, &event);
  CHECK(clock_has_happened(&event) && clock_is_idle(NULL));
}

static void until_sync(void) {
  clock_event first = {0}, second = {0};
  clock_record(NULL, &first);
  clock_record(NULL, &second);
  CHECK(!clock_has_happened(&first) && !clock_has_happened(&second));
  clock_host_waits(&first);
  CHECK(clock_has_happened(&first) && !clock_has_happened(&second));
  clock_host_waits_for_all();
  CHECK(clock_has_happened(&second));
}

static void simulated(void) {
  clock_event slow = {0}, quick = {0}, after = {0};
  void *side;
  CHECK(cudaStreamCreateWithFlags(&side, 1) == 0);
  clock_run(NULL, 1000000000);
  clock_record(NULL, &slow);
  clock_record(side, &quick);
  for (int i = 0; i < 100; i++) clock_run(side, 1);
  CHECK(!clock_has_happened(&slow) && clock_has_happened(&quick)); /* streams do not wait for one another */
  clock_wait_event(side, &slow);
  clock_record(side, &after);
  CHECK(!clock_has_happened(&after));
  clock_host_waits(&slow);
  CHECK(clock_has_happened(&slow) && clock_has_happened(&after));
  clock_run(NULL, 1000000000);
  clock_record(NULL, &slow);
  for (int i = 0; i < 1023; i++) clock_run(side, 1);
  CHECK(clock_has_happened(&slow)); /* the queue was full: the host has waited */
  clock_run(NULL, 1000000);
  clock_record(NULL, &slow);
  int questions = 0;
  while (!clock_has_happened(&slow)) questions++; /* polling ends */
  CHECK(questions > 0 && questions < 2000);
  CHECK(cudaStreamDestroy(side) == 0);
}

int main(int count, char **arguments) {
  CHECK(count == 2);
  setenv("VGPU_LAG", arguments[1], 1);
  if (strcmp(arguments[1], "none") == 0) none();
  else if (strcmp(arguments[1], "until-sync") == 0) until_sync();
  else simulated();
  return 0;
}
