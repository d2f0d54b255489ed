/* main.c - nvidia-fake-driverd: stands in for the kernel driver.
 *
 *     nvidia-fake-driverd --config FILE --socket SOCK [--bus FOLDER]
 *     nvidia-fake-driverd ctl --socket SOCK COMMAND...
 */
#define _GNU_SOURCE
#include "missing.h"
#include "client.h"
#include "daemon.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

struct driver driver;

void fail(const char *format, ...)
{
    va_list values;
    va_start(values, format);
    fprintf(stderr, "nvidia-fake-driverd: ");
    if (driver.description != NULL)
        fprintf(stderr, "%s:%u: ", driver.description, driver.line);
    vfprintf(stderr, format, values);
    fprintf(stderr, "\n");
    va_end(values);
    exit(1);
}

/* Returns its descriptor. */
static int make_page(void)
{
    const int fd = new_memfd("nvidia-fake-driver");
    const bool sized = fd >= 0 && ftruncate(fd, (off_t)FAKE_FILE_BYTES) == 0;
    struct fake_page *page = sized ? mmap(NULL, FAKE_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) : MAP_FAILED;
    if (page == MAP_FAILED)
        fail("no shared memory: %s", strerror(errno));
    driver.page = page;
    page->magic = FAKE_PAGE_MAGIC;
    page->version = FAKE_PAGE_VERSION;
    page->kernel_ns = 10000;
    snprintf(page->seed, sizeof page->seed, "tangram");
    branch_set(page, "580");
    shared_mutex_init(&page->commands);
    return fd;
}

static int listen_at(const char *path)
{
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (snprintf(at.sun_path, sizeof at.sun_path, "%s", path) >= (int)sizeof at.sun_path)
        fail("--socket %s: %s", path, strerror(ENAMETOOLONG));
    unlink(path); /* one left by a daemon that was killed */
    if (bind(fd, (const struct sockaddr *)&at, sizeof at) != 0 || chmod(path, 0666) != 0 || listen(fd, 256) != 0)
        fail("--socket %s: %s", path, strerror(errno));
    return fd;
}

static int run_daemon(const char *description, const char *socket_path, const char *bus_folder)
{
    const int page_fd = make_page();
    if (snprintf(driver.page->bus_folder, sizeof driver.page->bus_folder, "%s", bus_folder) >= (int)sizeof driver.page->bus_folder)
        fail("--bus %s: %s", bus_folder, strerror(ENAMETOOLONG));
    read_description(description);
    link_gpus();
    serve(page_fd, listen_at(socket_path), socket_path);
    unlink(socket_path);
    return 0;
}

static int run_command(const char *socket_path, char **words)
{
    static char printed[4 << 20]; /* all of it: a thread with a lock must not wait for a reader of this process */
    char line[1024] = "";
    size_t length = 0;
    for (; *words != NULL; words++) {
        length += (size_t)snprintf(line + length, sizeof line - length, "%s ", *words);
        if (length >= sizeof line)
            fail("the command has %zu bytes and more, must have less than %zu", length, sizeof line);
    }
    struct client client;
    const int rc = client_open_at(&client, FAKE_CTL, socket_path);
    if (rc < 0)
        fail("no daemon at %s: %s", socket_path, strerror(-rc));
    driver.page = client.page;
    setvbuf(stdout, printed, _IOFBF, sizeof printed);
    shared_mutex_lock(&client.page->commands);
    run_line(COMMAND, line);
    pthread_mutex_unlock(&client.page->commands);
    return 0;
}

static int usage(FILE *out)
{
    fprintf(out, "A stand-in for NVIDIA's kernel driver: counts memory over processes, queues kernels, raises XIDs.\n\n"
                 "  nvidia-fake-driverd --config FILE --socket SOCK [--bus FOLDER]\n"
                 "  nvidia-fake-driverd ctl --socket SOCK COMMAND\n\nLines of FILE:\n");
    print_lines(out, DESCRIPTION);
    fprintf(out, "\nCOMMANDs:\n");
    print_lines(out, COMMAND);
    return out == stdout ? 0 : 2;
}

int main(int argc, char **argv)
{
    const char *description = NULL, *socket_path = FAKE_DEFAULT_SOCKET, *bus_folder = "";
    const bool is_command = argc > 1 && strcmp(argv[1], "ctl") == 0;
    int at = is_command ? 2 : 1;
    for (; at < argc && argv[at][0] == '-'; at += 2) {
        if (strcmp(argv[at], "--help") == 0)
            return usage(stdout);
        if (at + 1 < argc && strcmp(argv[at], "--config") == 0)
            description = argv[at + 1];
        else if (at + 1 < argc && strcmp(argv[at], "--socket") == 0)
            socket_path = argv[at + 1];
        else if (at + 1 < argc && strcmp(argv[at], "--bus") == 0)
            bus_folder = argv[at + 1];
        else
            return usage(stderr);
    }
    if (is_command)
        return at < argc ? run_command(socket_path, argv + at) : usage(stderr);
    return description != NULL && at == argc ? run_daemon(description, socket_path, bus_folder) : usage(stderr);
}
