// Tells ThreadSanitizer where OpenMP forks and joins: gcc's libgomp is not compiled with it. To be
// preloaded before the libgomp in use.
#define _GNU_SOURCE
#include <dlfcn.h>

void __tsan_acquire(void *);
void __tsan_release(void *);

typedef void (*Body)(void *);

// Two addresses: with one, a thread that starts late would seem to wait for those that are done.
typedef struct {
  Body body;
  void *data;
  char fork, join __attribute__((aligned(8)));
} Region;

static void run(void *argument) {
  Region *region = argument;
  __tsan_acquire(&region->fork);
  region->body(region->data);
  __tsan_release(&region->join);
}

void GOMP_parallel(Body body, void *data, unsigned threads, unsigned flags) {
  void (*next)(Body, void *, unsigned, unsigned) = dlsym(RTLD_NEXT, "GOMP_parallel");
  Region region = {.body = body, .data = data};
  __tsan_release(&region.fork);
  next(run, &region, threads, flags);
  __tsan_acquire(&region.join);
}
