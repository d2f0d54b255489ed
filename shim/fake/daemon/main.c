/* main.c - nvidia-fake-driverd: stands in for the kernel driver.
 *
 *     nvidia-fake-driverd --config FILE --socket SOCK
 *     nvidia-fake-driverd ctl --socket SOCK COMMAND...
 *
 * One thread, one epoll. It prints one line when it is ready to be connected to.
 */
#define _GNU_SOURCE
#include "client.h"
#include "daemon.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <unistd.h>

enum { LISTENER = FAKE_SLOTS, TIMER, SIGNALS }; /* epoll's keys; a smaller one is a slot */

void say(struct text *to, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    const size_t left = to->room - to->length;
    const int length = vsnprintf(to->at + to->length, left, format, values);
    va_end(values);
    if (length > 0)
        to->length += (size_t)length < left ? (size_t)length : left - 1;
}

static bool make_page(struct daemon *daemon)
{
    daemon->page_fd = new_memfd("nvidia-fake-driver");
    if (daemon->page_fd < 0 || ftruncate(daemon->page_fd, (off_t)FAKE_PAGE_BYTES) != 0)
        return false;
    void *page = mmap(NULL, FAKE_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, daemon->page_fd, 0);
    if (page == MAP_FAILED)
        return false;
    daemon->page = page;
    daemon->page->magic = FAKE_PAGE_MAGIC;
    daemon->page->version = FAKE_PAGE_VERSION;
    daemon->page->kernel_ns = 10000;
    branch_set(daemon->page, "580");
    page_init_lock(daemon->page);
    for (uint32_t unit = 0; unit < FAKE_UNITS; unit++)
        gpu_time_init_lock(daemon->page, unit);
    return true;
}

static bool make_listener(struct daemon *daemon, const char *path, struct text *why)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof at.sun_path)
        return say(why, "--socket %s: longer than %zu characters", path, sizeof at.sun_path - 1), false;
    memcpy(at.sun_path, path, strlen(path));
    unlink(path); /* one left by a daemon that was killed */
    daemon->listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (daemon->listener < 0 || bind(daemon->listener, (const struct sockaddr *)&at, sizeof at) != 0 ||
        chmod(path, 0666) != 0 || listen(daemon->listener, 256) != 0)
        return say(why, "--socket %s: %s", path, strerror(errno)), false;
    return true;
}

static bool watch(const struct daemon *daemon, int fd, uint32_t key)
{
    struct epoll_event event = {.events = EPOLLIN, .data.u32 = key};
    return fd >= 0 && epoll_ctl(daemon->epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

static bool make_loop(struct daemon *daemon)
{
    sigset_t ends;
    sigemptyset(&ends);
    sigaddset(&ends, SIGTERM);
    sigaddset(&ends, SIGINT);
    sigprocmask(SIG_BLOCK, &ends, NULL);
    daemon->epoll = epoll_create1(EPOLL_CLOEXEC);
    daemon->timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    daemon->signals = signalfd(-1, &ends, SFD_NONBLOCK | SFD_CLOEXEC);
    return daemon->epoll >= 0 && watch(daemon, daemon->listener, LISTENER) && watch(daemon, daemon->timer, TIMER) &&
           watch(daemon, daemon->signals, SIGNALS);
}

static void loop(struct daemon *daemon)
{
    struct epoll_event events[64];
    for (;;) {
        const int count = epoll_wait(daemon->epoll, events, 64, -1);
        for (int i = 0; i < count; i++) {
            const uint32_t key = events[i].data.u32;
            if (key == SIGNALS)
                return;
            if (key == TIMER)
                sample(daemon);
            else if (key == LISTENER)
                client_accept(daemon);
            else if (daemon->client_fd[key] >= 0)
                client_answer(daemon, key);
        }
    }
}

static int serve(const char *config, const char *socket_path)
{
    static struct daemon daemon;
    char sentence[1024] = "";
    struct text why = {.at = sentence, .room = sizeof sentence};
    snprintf(daemon.seed, sizeof daemon.seed, "tangram");
    clients_init(&daemon);
    if (!make_page(&daemon))
        say(&why, "no shared memory: %s", strerror(errno));
    else if (config_read(&daemon, config, &why) && make_listener(&daemon, socket_path, &why) && !make_loop(&daemon))
        say(&why, "no event loop: %s", strerror(errno));
    if (why.length > 0) {
        fprintf(stderr, "nvidia-fake-driverd: %s\n", sentence);
        return 1;
    }
    printf("nvidia-fake-driverd: ready, %u cards, %s\n", daemon.page->cards, socket_path);
    fflush(stdout);
    loop(&daemon);
    unlink(socket_path);
    return 0;
}

static int control(const char *socket_path, char **words, int count)
{
    struct client client;
    const int rc = client_open_at(&client, FAKE_CTL, socket_path);
    if (rc < 0) {
        fprintf(stderr, "nvidia-fake-driverd: no daemon at %s: %s\n", socket_path, strerror(-rc));
        return 1;
    }
    static struct fake_packet packet;
    packet.header.type = FAKE_COMMAND;
    struct text line = {.at = (char *)packet.body, .room = 512};
    for (int i = 0; i < count; i++)
        say(&line, "%s%s", i == 0 ? "" : " ", words[i]);
    packet.header.length = (uint32_t)line.length;
    const int type = client_ask(&client, &packet, -1, NULL);
    client_close(&client);
    FILE *out = type == FAKE_OK ? stdout : stderr;
    fprintf(out, "%.*s", type > 0 ? (int)packet.header.length : 0, (const char *)packet.body);
    if (type != FAKE_OK)
        fprintf(out, "\n");
    return type == FAKE_OK ? 0 : 1;
}

static int usage(FILE *out)
{
    fprintf(out,
            "A stand-in for NVIDIA's kernel driver: counts memory over processes, queues kernels, raises XIDs.\n\n"
            "  nvidia-fake-driverd --config FILE --socket SOCK\n"
            "  nvidia-fake-driverd ctl --socket SOCK COMMAND\n\n%s",
            command_help);
    return out == stdout ? 0 : 2;
}

int main(int argc, char **argv)
{
    const char *config = NULL, *socket_path = FAKE_DEFAULT_SOCKET;
    int at = 1;
    const bool is_control = argc > 1 && strcmp(argv[1], "ctl") == 0;
    for (at += is_control; at < argc && argv[at][0] == '-'; at += 2) {
        if (strcmp(argv[at], "--help") == 0)
            return usage(stdout);
        if (at + 1 < argc && strcmp(argv[at], "--config") == 0)
            config = argv[at + 1];
        else if (at + 1 < argc && strcmp(argv[at], "--socket") == 0)
            socket_path = argv[at + 1];
        else
            return usage(stderr);
    }
    if (is_control)
        return at < argc ? control(socket_path, argv + at, argc - at) : usage(stderr);
    return config != NULL && at == argc ? serve(config, socket_path) : usage(stderr);
}
