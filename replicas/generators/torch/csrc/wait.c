// Waiting of threads for each other's progress: briefly busy, then asleep, so that a thread that
// waits long uses neither a core that another needs nor a container's quota.
#include <pthread.h>

#include "internal.h"

enum { POLLS = 1000 };  // some 20 to 50 microseconds, less than it takes to wake a thread twice

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t progressed = PTHREAD_COND_INITIALIZER;
static int64_t num_asleep;

void wait_for(const int64_t *progress, int64_t wanted) {
  for (int polls = 0; polls < POLLS; polls++) {
    if (__atomic_load_n(progress, __ATOMIC_ACQUIRE) >= wanted) return;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  pthread_mutex_lock(&mutex);
  // Each side writes its own number before it reads the other's: one of them sees the other.
  __atomic_fetch_add(&num_asleep, 1, __ATOMIC_SEQ_CST);
  while (__atomic_load_n(progress, __ATOMIC_SEQ_CST) < wanted)
    pthread_cond_wait(&progressed, &mutex);
  __atomic_fetch_sub(&num_asleep, 1, __ATOMIC_SEQ_CST);
  pthread_mutex_unlock(&mutex);
}

static void wake(void) {
  if (!__atomic_load_n(&num_asleep, __ATOMIC_SEQ_CST)) return;
  pthread_mutex_lock(&mutex);
  pthread_cond_broadcast(&progressed);
  pthread_mutex_unlock(&mutex);
}

void publish(int64_t *progress, int64_t value) {
  __atomic_store_n(progress, value, __ATOMIC_SEQ_CST);
  wake();
}

void publish_one(int64_t *progress, int64_t last) {
  if (__atomic_add_fetch(progress, 1, __ATOMIC_SEQ_CST) == last) wake();
}
