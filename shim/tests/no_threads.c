/* no_threads.c - preloaded: no thread can be started, as under a limit on processes. */
#include <errno.h>
#include <pthread.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*run)(void *), void *given)
{
    (void)thread, (void)attributes, (void)run, (void)given;
    return EAGAIN;
}
