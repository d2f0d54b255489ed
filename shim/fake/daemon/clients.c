/* clients.c - the daemon while it serves: one thread, one poll.
 *
 * A connection gets a slot when it is accepted; its hang-up empties the slot, which is how the memory of a killed process is free
 * again. Clients send nothing but single bytes: a client that sends anything else is disconnected, and affects no other.
 */
#define _GNU_SOURCE
#include "client.h"
#include "daemon.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define SAMPLE_MS 200 /* guessed: NVML's own period is 1/6 to 1 s by product */

enum { LISTENER = FAKE_SLOTS, SIGNALS, POLLED };
static struct {
    int page_fd;
    struct pollfd polled[POLLED]; /* a slot's client (-1 = none), then those above */
    uint64_t sampled_ns;          /* when last */
} clients;

static void drop(uint32_t slot)
{
    const uint32_t region = driver.page->slot[slot].region;
    objects_drop_slot(driver.page, slot, clients.page_fd);
    if (region > 0 && region < FAKE_REGIONS)
        objects_wipe_region(driver.page, region, clients.page_fd);
    empty_slot(slot);
    close(clients.polled[slot].fd);
    clients.polled[slot].fd = -1;
}

static void accept_client(void)
{
    const int fd = accept4(clients.polled[LISTENER].fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
    struct ucred peer = {0};
    socklen_t length = sizeof peer;
    if (fd < 0)
        return;
    const bool known = getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0;
    const uint32_t slot = known ? new_slot(FAKE_CTL, peer.pid) : FAKE_SLOTS;
    if (slot == FAKE_SLOTS) {
        fprintf(stderr, "nvidia-fake-driverd: a client is rejected: all %u slots are taken\n", FAKE_SLOTS);
        close(fd);
        return;
    }
    clients.polled[slot] = (struct pollfd){.fd = fd, .events = POLLIN};
    if (!process_name(peer.pid, driver.page->slot[slot].name))
        snprintf(driver.page->slot[slot].name, FAKE_NAME, "[unknown]");
    if (!client_greet(fd, slot, clients.page_fd))
        drop(slot);
}

/* One byte is returned when everything that ended before has been processed. A client that sends anything else is disconnected. */
static void answer_client(uint32_t slot)
{
    char word[2];
    const int fd = clients.polled[slot].fd;
    if (recv(fd, word, sizeof word, MSG_DONTWAIT) != 1 || send(fd, word, 1, MSG_DONTWAIT | MSG_NOSIGNAL) != 1)
        drop(slot);
}

/* How much had run on each unit, and of each process, if it is time to look again. */
static void sample(void)
{
    struct fake_page *page = driver.page;
    const uint64_t number = atomic_load(&page->samples), at = number % FAKE_SAMPLES, ns = page_now_ns();
    struct timespec now;
    if (ns - clients.sampled_ns < SAMPLE_MS * 1000000u)
        return;
    for (uint32_t unit = 0; unit < FAKE_UNITS; unit++) {
        if (page->unit[unit].live)
            gpu_time_settle(page, unit);
        atomic_store(&page->unit[unit].sampled_ns[at], atomic_load(&page->unit[unit].ran_ns));
    }
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++)
        for (uint32_t gpu = 0; gpu < FAKE_GPUS && page->slot[slot].kind == FAKE_CUDA; gpu++)
            atomic_store(&page->slot[slot].sampled_ns[gpu][at], atomic_load(&page->slot[slot].ran_ns[gpu]));
    clock_gettime(CLOCK_REALTIME, &now);
    atomic_store(&page->sampled_us[at], (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u);
    atomic_store(&page->samples, number + 1);
    clients.sampled_ns = ns;
}

void serve(int page_fd, int listener, const char *socket_path)
{
    struct pollfd *polled = clients.polled, requested[POLLED];
    sigset_t ends;
    sigemptyset(&ends);
    sigaddset(&ends, SIGTERM);
    sigaddset(&ends, SIGINT);
    sigprocmask(SIG_BLOCK, &ends, NULL);
    clients.page_fd = page_fd;
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++)
        polled[slot] = (struct pollfd){.fd = -1, .events = POLLIN};
    polled[LISTENER] = (struct pollfd){.fd = listener, .events = POLLIN};
    polled[SIGNALS] = (struct pollfd){.fd = signalfd(-1, &ends, SFD_NONBLOCK | SFD_CLOEXEC), .events = POLLIN};
    printf("nvidia-fake-driverd: ready, %u GPUs, %s\n", driver.page->gpus, socket_path);
    fflush(stdout);
    while (polled[SIGNALS].revents == 0) {
        poll(polled, POLLED, SAMPLE_MS);
        memcpy(requested, polled, sizeof requested);
        poll(polled, FAKE_SLOTS, 0); /* a process that ended before the request has no memory when that is answered */
        sample();
        for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++)
            if (polled[slot].fd >= 0 && (polled[slot].revents & POLLHUP))
                drop(slot);
        for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++)
            if (polled[slot].fd >= 0 && requested[slot].revents != 0)
                answer_client(slot);
        if (requested[LISTENER].revents != 0)
            accept_client();
    }
}
