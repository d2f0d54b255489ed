/* slow_poll.c - poll() that answers the threads of a program late, as on a machine that has no time for them, except for the first thread. */
#include <dlfcn.h>
#include <poll.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { LATE_MS = 300 };

__attribute__((visibility("default"))) int poll(struct pollfd *of, nfds_t count, int timeout_ms);

int poll(struct pollfd *of, nfds_t count, int timeout_ms)
{
    int (*next)(struct pollfd *, nfds_t, int);
    void *found = dlsym(RTLD_NEXT, "poll");
    memcpy(&next, &found, sizeof found);
    int rc = next(of, count, timeout_ms);
    struct timespec late = {0, LATE_MS * 1000000};
    if (gettid() != getpid())
        nanosleep(&late, NULL);
    return rc;
}
