/* main.c - nvidia-fake-driverd: stands in for the kernel driver.
 *
 *     nvidia-fake-driverd --config FILE --socket SOCK
 *     nvidia-fake-driverd ctl --socket SOCK COMMAND...
 *
 * One thread, one poll. It prints one line when it is ready to be connected to.
 */
#define _GNU_SOURCE
#include "branch.h"
#include "client.h"
#include "daemon.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

static char sentence[FAKE_TEXT]; /* of a line that no client sent */
struct driver driver = {.seed = "tangram", .answer = {.at = sentence, .room = sizeof sentence}};

static bool make_page(void)
{
    driver.page_fd = new_memfd("nvidia-fake-driver");
    if (driver.page_fd < 0 || ftruncate(driver.page_fd, (off_t)FAKE_PAGE_BYTES) != 0)
        return false;
    struct fake_page *page = mmap(NULL, FAKE_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, driver.page_fd, 0);
    if (page == MAP_FAILED)
        return false;
    driver.page = page;
    page->magic = FAKE_PAGE_MAGIC;
    page->version = FAKE_PAGE_VERSION;
    page->kernel_ns = 10000;
    branch_set(page, "580");
    shared_mutex_init(&page->lock);
    for (uint32_t unit = 0; unit < FAKE_UNITS; unit++)
        shared_mutex_init(&page->unit[unit].time_lock);
    return true;
}

static bool listen_at(const char *path)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    errno = ENAMETOOLONG;
    if (strlen(path) >= sizeof at.sun_path)
        return false;
    memcpy(at.sun_path, path, strlen(path));
    unlink(path); /* one left by a daemon that was killed */
    driver.polled[LISTENER] = (struct pollfd){.fd = fd, .events = POLLIN};
    return bind(fd, (const struct sockaddr *)&at, sizeof at) == 0 && chmod(path, 0666) == 0 && listen(fd, 256) == 0;
}

static void catch_ends(void)
{
    sigset_t ends;
    sigemptyset(&ends);
    sigaddset(&ends, SIGTERM);
    sigaddset(&ends, SIGINT);
    sigprocmask(SIG_BLOCK, &ends, NULL);
    driver.polled[SIGNALS] = (struct pollfd){.fd = signalfd(-1, &ends, SFD_NONBLOCK | SFD_CLOEXEC), .events = POLLIN};
}

static int serve(const char *config, const char *socket_path)
{
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++)
        driver.polled[slot] = (struct pollfd){.fd = -1, .events = POLLIN};
    catch_ends();
    const bool ready = (make_page() || REFUSE("no shared memory: %s", strerror(errno))) && config_read(config) &&
                       (listen_at(socket_path) || REFUSE("--socket %s: %s", socket_path, strerror(errno)));
    if (!ready)
        return fprintf(stderr, "nvidia-fake-driverd: %s\n", sentence), 1;
    printf("nvidia-fake-driverd: ready, %u cards, %s\n", driver.page->cards, socket_path);
    fflush(stdout);
    while (driver.polled[SIGNALS].revents == 0) {
        const bool any = poll(driver.polled, POLLED, SAMPLE_MS) > 0;
        sample();
        for (uint32_t slot = 0; any && slot < FAKE_SLOTS; slot++)
            if (driver.polled[slot].fd >= 0 && driver.polled[slot].revents != 0)
                client_answer(slot);
        if (any && driver.polled[LISTENER].revents != 0)
            client_accept();
    }
    unlink(socket_path);
    return 0;
}

static int control(const char *socket_path, char **words)
{
    static struct fake_message message = {.type = FAKE_COMMAND};
    struct text line = {.at = message.text, .room = sizeof message.text};
    for (; *words != NULL; words++)
        say(&line, "%s%s", line.length == 0 ? "" : " ", *words);
    struct client client;
    int rc = client_open_at(&client, FAKE_CTL, socket_path);
    if (rc == 0)
        rc = client_ask(&client, &message, -1, NULL);
    if (rc == 0)
        return printf("%s", message.text), 0;
    if (rc == -EPERM)
        return fprintf(stderr, "%s\n", message.text), 1;
    return fprintf(stderr, "nvidia-fake-driverd: no daemon at %s: %s\n", socket_path, strerror(-rc)), 1;
}

static int usage(FILE *out)
{
    say(&driver.answer, "A stand-in for NVIDIA's kernel driver: counts memory over processes, queues kernels, raises XIDs.\n\n"
                        "  nvidia-fake-driverd --config FILE --socket SOCK\n"
                        "  nvidia-fake-driverd ctl --socket SOCK COMMAND\n\nLines of FILE:\n");
    say_lines(DESCRIPTION);
    say(&driver.answer, "\nCOMMANDs:\n");
    say_lines(COMMAND);
    fprintf(out, "%s", sentence);
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
        return at < argc ? control(socket_path, argv + at) : usage(stderr);
    return config != NULL && at == argc ? serve(config, socket_path) : usage(stderr);
}
