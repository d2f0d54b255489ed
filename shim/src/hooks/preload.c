/* preload.c - the library precedes the objects that it replaces, or the program does not start.
 *
 * The loader binds a name to the first object that defines it: the program, LD_PRELOAD in its order, /etc/ld.so.preload, then what they
 * need. So LD_PRELOAD=libc.so.6 puts libc's dlsym before ours, and LD_PRELOAD=libcuda.so.1, which people set to choose a driver, the
 * driver's functions. Then no hook is reached, and no other part of the library could detect it.
 *
 * The first of our code that runs sees it in the loader's list, before main(). It starts the program again, in the same process, with the
 * library first in LD_PRELOAD; what else was named there stays and follows. If that cannot be, the program ends as one whose libraries
 * the loader cannot load: it is the one place where the library ends a process. Where there is no grant nothing is done.
 *
 * What else was preloaded, an allocator, a sanitizer or a profiler, may stand on either side: its own libc follows all that is preloaded.
 */
#include "process.h"

#include <errno.h>
#include <fcntl.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/auxv.h>
#include <sys/stat.h>
#include <unistd.h>

enum { CANNOT_LOAD = 127 }; /* specified: glibc's loader ends so */

static const char PRELOAD[] = "LD_PRELOAD=", SELF[] = "/proc/self/exe";

/* Not the program itself, the first of the list: the loader puts nothing before it. */
static const struct link_map *original_before(const struct link_map *us)
{
    static const char *const originals[] = {"libc.so.6", "libdl.so.2", "libcuda.so", "libnvidia-ml.so"};
    for (const struct link_map *at = us->l_prev; at != NULL && at->l_prev != NULL; at = at->l_prev)
        for (unsigned i = 0; i < sizeof originals / sizeof *originals; i++)
            if (object_is(at, originals[i]))
                return at;
    return NULL;
}

/* A file of /proc or /etc, ended by two zeros; NULL if it cannot be read. For the caller to free. */
static char *contents(const char *path, size_t *length)
{
    size_t capacity = 0, used = 0;
    char *text = NULL;
    ssize_t got = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    while (fd >= 0) {
        if (capacity - used < 4096) {
            char *larger = realloc(text, capacity = 2 * capacity + 8192);
            if (larger == NULL)
                break;
            text = larger;
        }
        got = read(fd, text + used, capacity - used - 2);
        if (got == 0 || (got < 0 && errno != EINTR))
            break;
        used += got > 0 ? (size_t)got : 0;
    }
    if (fd >= 0)
        close(fd);
    if (fd < 0 || got != 0 || text == NULL) {
        free(text);
        return NULL;
    }
    text[used] = text[used + 1] = '\0';
    *length = used;
    return text;
}

/* Is the library one of the names in this list, or the first of them? A name without a folder was looked for in several. */
static bool is_named(const char *list, const char *between, const char *library, bool first)
{
    const char *slash = strrchr(library, '/');
    for (const char *at = list + strspn(list, between); *at != '\0'; at += strspn(at, between)) {
        const size_t length = strcspn(at, between);
        const char *wanted = memchr(at, '/', length) == NULL && slash != NULL ? slash + 1 : library;
        if (strlen(wanted) == length && memcmp(at, wanted, length) == 0)
            return true;
        if (first)
            return false;
        at += length;
    }
    return false;
}

/* LD_PRELOAD as the kernel gave it to the program, which may have changed it since. The loader goes by the last one. */
static const char *preload_of(const char *environment, size_t length)
{
    const char *found = "";
    for (const char *at = environment; at < environment + length; at += strlen(at) + 1)
        if (strncmp(at, PRELOAD, sizeof PRELOAD - 1) == 0)
            found = at + sizeof PRELOAD - 1;
    return found;
}

/* Did the loader bring the library when the program started? A program may load it itself later, and is not started again. */
static bool was_preloaded(const char *name, const char *preload)
{
    size_t length;
    if (is_named(preload, " :", name, false))
        return true;
    char *file = contents("/etc/ld.so.preload", &length);
    bool named = file != NULL && is_named(file, " :\t\n", name, false);
    free(file);
    return named;
}

/* The name under which this program was started, unless that was a script, so that it keeps its name in the lists of processes. */
static const char *program(char *real, size_t capacity)
{
    struct stat started, running;
    const char *name = (const char *)(uintptr_t)getauxval(AT_EXECFN);
    if (stat(SELF, &running) != 0)
        return SELF;
    for (int i = 0; i < 2; i++) {
        if (name != NULL && stat(name, &started) == 0 && started.st_dev == running.st_dev && started.st_ino == running.st_ino)
            return name;
        ssize_t length = readlink(SELF, real, capacity - 1);
        real[length > 0 ? length : 0] = '\0';
        name = real;
    }
    return SELF;
}

static char **words_of(char *text, size_t length)
{
    size_t count = 0;
    for (char *at = text; at < text + length; at += strlen(at) + 1)
        count++;
    char **words = calloc(count + 1, sizeof *words), **word = words;
    for (char *at = text; words != NULL && at < text + length; at += strlen(at) + 1)
        *word++ = at;
    return words;
}

/* The environment with the library in front of LD_PRELOAD. */
static char **environment_with(const char *name, const char *preload)
{
    size_t count = 0, length = sizeof PRELOAD + strlen(name) + strlen(preload) + 1;
    while (environ[count] != NULL)
        count++;
    char **made = calloc(count + 2, sizeof *made), **at = made, *line = malloc(length);
    if (made == NULL || line == NULL)
        return NULL;
    snprintf(line, length, "%s%s%s%s", PRELOAD, name, *preload != '\0' ? ":" : "", preload);
    *at++ = line;
    for (char **old = environ; *old != NULL; old++)
        if (strncmp(*old, PRELOAD, sizeof PRELOAD - 1) != 0)
            *at++ = *old;
    return made;
}

/* Returns only on failure. What it allocated is then not freed: the program ends soon. */
static void start_again(const char *name, const char *preload)
{
    char path[4096];
    size_t length;
    char *text = contents("/proc/self/cmdline", &length); /* not argv: a loader that was started by its name took its own words away */
    char **words = text != NULL ? words_of(text, length) : NULL, **environment = environment_with(name, preload);
    if (words != NULL && environment != NULL)
        execve(program(path, sizeof path), words, environment);
}

static void refuse(const char *name, const char *before)
{
    char line[1024];
    int length = snprintf(line, sizeof line,
                          "tangram: LD_PRELOAD loads %.300s before %.300s, so that no limit could be enforced: this program does not start; "
                          "take it out of LD_PRELOAD, or write the library first\n", before, name);
    ssize_t written = write(STDERR_FILENO, line, (size_t)length);
    (void)written; /* a closed stderr is the program's own choice */
    _exit(CANNOT_LOAD);
}

__attribute__((constructor)) static void stand_before_the_originals(void)
{
    const int saved = errno;
    const struct link_map *us = object_of(&tangram), *before = us != NULL ? original_before(us) : NULL;
    if (UNLIKELY(before != NULL) && grant_ready() != GRANT_NONE) {
        size_t length;
        char *environment = contents("/proc/self/environ", &length);
        const char *preload = environment != NULL ? preload_of(environment, length) : getenv("LD_PRELOAD");
        if (preload == NULL)
            preload = "";
        if (was_preloaded(us->l_name, preload)) {
            if (!is_named(preload, " :", us->l_name, true) && getauxval(AT_SECURE) == 0)
                start_again(us->l_name, preload);
            refuse(us->l_name, before->l_name);
        }
        free(environment);
    }
    errno = saved;
}
