/* main.c - nvidia-fake-driverd: stands in for the kernel driver.
 *
 *     nvidia-fake-driverd --config FILE --socket SOCK
 *     nvidia-fake-driverd ctl --socket SOCK COMMAND...
 *
 * One thread, one poll. It prints one line when it is ready to be connected to.
 */
#define _GNU_SOURCE
#include "client.h"
#include "daemon.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

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
    struct fake_page *page = mmap(NULL, FAKE_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, daemon->page_fd, 0);
    if (page == MAP_FAILED)
        return false;
    daemon->page = page;
    page->magic = FAKE_PAGE_MAGIC;
    page->version = FAKE_PAGE_VERSION;
    page->kernel_ns = 10000;
    branch_set(page, "580");
    page_init_lock(page);
    for (uint32_t unit = 0; unit < FAKE_UNITS; unit++)
        gpu_time_init_lock(page, unit);
    return true;
}

static bool listen_at(struct daemon *daemon, const char *path)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    errno = ENAMETOOLONG;
    if (strlen(path) >= sizeof at.sun_path)
        return false;
    memcpy(at.sun_path, path, strlen(path));
    unlink(path); /* one left by a daemon that was killed */
    daemon->polled[LISTENER] = (struct pollfd){.fd = fd, .events = POLLIN};
    return bind(fd, (const struct sockaddr *)&at, sizeof at) == 0 && chmod(path, 0666) == 0 && listen(fd, 256) == 0;
}

static void catch_ends(struct daemon *daemon)
{
    sigset_t ends;
    sigemptyset(&ends);
    sigaddset(&ends, SIGTERM);
    sigaddset(&ends, SIGINT);
    sigprocmask(SIG_BLOCK, &ends, NULL);
    daemon->polled[SIGNALS] = (struct pollfd){.fd = signalfd(-1, &ends, SFD_NONBLOCK | SFD_CLOEXEC), .events = POLLIN};
}

static void loop(struct daemon *daemon)
{
    while (daemon->polled[SIGNALS].revents == 0) {
        if (poll(daemon->polled, POLLED, sample(daemon)) <= 0)
            continue;
        for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++)
            if (daemon->polled[slot].fd >= 0 && daemon->polled[slot].revents != 0)
                client_answer(daemon, slot);
        if (daemon->polled[LISTENER].revents != 0)
            client_accept(daemon);
    }
}

static int serve(const char *config, const char *socket_path)
{
    static struct daemon daemon = {.seed = "tangram"};
    char sentence[1024] = "";
    struct text why = {.at = sentence, .room = sizeof sentence};
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++)
        daemon.polled[slot] = (struct pollfd){.fd = -1, .events = POLLIN};
    catch_ends(&daemon);
    if (!make_page(&daemon))
        say(&why, "no shared memory: %s", strerror(errno));
    else if (config_read(&daemon, config, &why) && !listen_at(&daemon, socket_path))
        say(&why, "--socket %s: %s", socket_path, strerror(errno));
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
    static struct fake_message message = {.type = FAKE_COMMAND};
    struct text line = {.at = message.text, .room = sizeof message.text};
    for (int i = 0; i < count; i++)
        say(&line, "%s%s", i == 0 ? "" : " ", words[i]);
    struct client client;
    int rc = client_open_at(&client, FAKE_CTL, socket_path);
    if (rc == 0)
        rc = client_ask(&client, &message, -1, NULL);
    if (rc == 0)
        printf("%s", message.text);
    else if (rc == -EPERM)
        fprintf(stderr, "%s\n", message.text);
    else
        fprintf(stderr, "nvidia-fake-driverd: no daemon at %s: %s\n", socket_path, strerror(-rc));
    return rc == 0 ? 0 : 1;
}

static int usage(FILE *out)
{
    char lines[8192] = "";
    struct text text = {.at = lines, .room = sizeof lines};
    say(&text, "\nLines of FILE:\n");
    say_lines(DESCRIPTION, &text);
    say(&text, "\nCOMMANDs:\n");
    say_lines(COMMAND, &text);
    fprintf(out,
            "A stand-in for NVIDIA's kernel driver: counts memory over processes, queues kernels, raises XIDs.\n\n"
            "  nvidia-fake-driverd --config FILE --socket SOCK\n"
            "  nvidia-fake-driverd ctl --socket SOCK COMMAND\n%s",
            lines);
    return out == stdout ? 0 : 2;
}

int main(int argc, char **argv)
{
    const char *config = NULL, *socket_path = FAKE_DEFAULT_SOCKET;
    const bool is_control = argc > 1 && strcmp(argv[1], "ctl") == 0;
    int at = is_control ? 2 : 1;
    for (; at < argc && argv[at][0] == '-'; at += 2) {
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
