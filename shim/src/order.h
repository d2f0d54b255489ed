/* order.h - the one order of the library's locks, checked in a library that is built with -DTANGRAM_LOCK_ORDER. process.h includes this. */
#ifndef TANGRAM_ORDER_H
#define TANGRAM_ORDER_H

#include <pthread.h>

#ifdef TANGRAM_LOCK_ORDER
int order_lock(pthread_mutex_t *lock);
int order_trylock(pthread_mutex_t *lock);
int order_unlock(pthread_mutex_t *lock);
void order_acquire_innermost(void); /* a lock of lock.h is taken: nothing is taken after it */
void order_release_innermost(void);
void order_forget(void); /* in a forked child: its one thread has no lock */
#define pthread_mutex_lock order_lock
#define pthread_mutex_trylock order_trylock
#define pthread_mutex_unlock order_unlock
#else
static inline void order_acquire_innermost(void)
{
}
static inline void order_release_innermost(void)
{
}
static inline void order_forget(void)
{
}
#endif

#endif
