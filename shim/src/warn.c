/* warn.c - the lines that the library writes to a process's stderr: one for each kind of trouble, again after a minute at the earliest.
 * TANGRAM_DEBUG=1 prints more.
 *
 * A daemon may close its standard files, and a file of its own gets number 2. So descriptor 2 is written to only while device and inode show
 * the file of the program's start. The arbiter's status lists what cannot be enforced in any case. */
#include "process.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { AGAIN_MS = 60000 }; /* specified */

static struct {
    bool open;
    dev_t device;
    ino_t inode;
} stderr_; /* as it was */

__attribute__((constructor)) static void look_at_stderr(void)
{
    struct stat there;
    int saved = errno;
    stderr_.open = fstat(STDERR_FILENO, &there) == 0;
    if (stderr_.open) {
        stderr_.device = there.st_dev;
        stderr_.inode = there.st_ino;
    }
    errno = saved;
}

static bool stderr_is_the_same(void)
{
    struct stat there;
    return stderr_.open && fstat(STDERR_FILENO, &there) == 0 && there.st_dev == stderr_.device && there.st_ino == stderr_.inode;
}

static void write_line(const char *head, const char *format, va_list values)
{
    char line[512];
    if (!stderr_is_the_same())
        return;
    int used = snprintf(line, sizeof line, "%s", head);
    int tail = vsnprintf(line + used, sizeof line - (size_t)used - 1, format, values);
    if (tail <= 0)
        return;
    size_t length = (size_t)used + (size_t)tail;
    if (length > sizeof line - 2)
        length = sizeof line - 2;
    line[length++] = '\n';
    ssize_t written = write(STDERR_FILENO, line, length);
    (void)written; /* a closed stderr is the program's own choice */
}

void warn(enum warning kind, const char *format, ...)
{
    struct quiet quiet = quiet_begin();
    uint64_t now = now_ms(), last = atomic_load(&tangram.warned_ms[kind]);
    bool due = last == 0 || now - last >= AGAIN_MS;
    if (due && atomic_compare_exchange_strong(&tangram.warned_ms[kind], &last, now)) {
        va_list values;
        va_start(values, format);
        write_line("tangram: ", format, values);
        va_end(values);
    }
    quiet_end(quiet);
}

void debug(const char *format, ...)
{
    struct quiet quiet = quiet_begin();
    const char *wanted = getenv("TANGRAM_DEBUG");
    if (wanted != NULL && wanted[0] == '1') {
        va_list values;
        va_start(values, format);
        write_line("tangram: debug: ", format, values);
        va_end(values);
    }
    quiet_end(quiet);
}
