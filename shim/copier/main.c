/* main.c - the program that copies GPU memory of other processes to the host and back:
 *
 *     tangram-copier --gpu UUID --socket PATH --pool FILE [--pool FILE]... --pool-bytes N [--libraries FOLDER]
 *
 * One process a GPU, with a context of its own. The arbiter sends it blocks by descriptor, which it imports, copies and releases, while the process that
 * owns them is suspended. It decides nothing: which block goes where, and when, is the arbiter's affair.
 *
 * Three threads: this one has the connection (server.c), and one each way copies (direction.c). A fourth makes the pool and then ends: until it has, the
 * connection answers STATUS alone.
 */
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include "fail.h"
#include "server.h"

enum { WRONG_USE = 2, UUID_LENGTH = 40 };

static struct {
    const char *uuid, *path, *libraries;
    struct driver driver;
    struct pool pool;
    struct server server;
} copier = {.server = {.lock = PTHREAD_MUTEX_INITIALIZER,
                       .out = {.saves = true, .lock = PTHREAD_MUTEX_INITIALIZER, .came = PTHREAD_COND_INITIALIZER},
                       .in = {.lock = PTHREAD_MUTEX_INITIALIZER, .came = PTHREAD_COND_INITIALIZER}}};

_Noreturn static void wrong_use(const char *why)
{
    say("%s", why);
    say("usage: tangram-copier --gpu UUID --socket PATH --pool FILE [--pool FILE]... --pool-bytes N [--libraries FOLDER]");
    exit(WRONG_USE);
}

/* A multiple of the grain. */
static uint64_t bytes_of(const char *text)
{
    char *rest;
    errno = 0;
    uint64_t bytes = strtoull(text, &rest, 10);
    if (text[0] < '0' || text[0] > '9' || *rest != '\0' || errno != 0 || bytes == 0 || bytes % COPIER_GRAIN != 0 || bytes > INT64_MAX)
        wrong_use("--pool-bytes must be a number of bytes, a multiple of 2097152");
    return bytes;
}

static void add_pool(const char *path)
{
    if (copier.pool.paths == POOL_FILES)
        wrong_use("--pool can be given four times");
    copier.pool.path[copier.pool.paths++] = path;
}

static void read_arguments(char **words)
{
    for (; words[0] != NULL; words += 2) {
        if (words[1] == NULL)
            wrong_use("each option has a value");
        if (strcmp(words[0], "--gpu") == 0)
            copier.uuid = words[1];
        else if (strcmp(words[0], "--socket") == 0)
            copier.path = words[1];
        else if (strcmp(words[0], "--pool") == 0)
            add_pool(words[1]);
        else if (strcmp(words[0], "--pool-bytes") == 0)
            copier.pool.bytes = bytes_of(words[1]);
        else if (strcmp(words[0], "--libraries") == 0)
            copier.libraries = words[1];
        else
            wrong_use("unknown option");
    }
    if (copier.uuid == NULL || copier.path == NULL || copier.pool.paths == 0 || copier.pool.bytes == 0)
        wrong_use("--gpu, --socket, --pool and --pool-bytes are needed");
    if (strncmp(copier.uuid, "GPU-", 4) != 0 || strlen(copier.uuid) != UUID_LENGTH) /* a beginning or a list would name several */
        wrong_use("--gpu must be a whole UUID, as nvidia-smi -L prints it");
}

static const char *kind_of_pages(unsigned pages)
{
    return pages == COPIER_HUGETLB_PAGES ? "huge pages of a hugetlbfs" : pages == COPIER_TRANSPARENT_PAGES ? "huge pages of a tmpfs" : "pages of 4 KiB";
}

/* The driver and the pool; then the directions take jobs. */
static void *prepare(void *unused)
{
    (void)unused;
    pool_allocate(&copier.pool);
    driver_open(&copier.driver, copier.libraries, copier.uuid);
    pool_register(&copier.pool, &copier.driver);
    direction_start(&copier.server.out, &copier.driver, &copier.pool);
    direction_start(&copier.server.in, &copier.driver, &copier.pool);
    uint32_t context_mib = driver_context_mib(copier.libraries, copier.uuid);
    server_is_ready(&copier.server, context_mib);
    say("the pool has %s, the context %u MiB", kind_of_pages(copier.pool.pages), (unsigned)context_mib);
    say("ready");
    return NULL;
}

int main(int argc, char **argv)
{
    struct server *server = &copier.server;
    sigset_t ends;
    pthread_t thread;
    (void)argc;
    read_arguments(argv + 1);
    sigemptyset(&ends);
    sigaddset(&ends, SIGTERM);
    sigaddset(&ends, SIGINT);
    pthread_sigmask(SIG_BLOCK, &ends, NULL); /* of all threads */
    server->pool = &copier.pool;
    server->out.finished = server->in.finished = server_finished;
    server->out.argument = server->in.argument = server;
    server->signals = signalfd(-1, &ends, SFD_CLOEXEC | SFD_NONBLOCK);
    server->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (server->signals < 0 || server->wake < 0)
        fail("no descriptor is left: %s", strerror(errno));
    server->listener = socket_listen(copier.path);
    if (pthread_create(&thread, NULL, prepare, NULL) != 0 || pthread_detach(thread) != 0)
        fail("no thread can be started");
    server_run(server);
    _exit(0); /* threads of the driver may still run */
}
