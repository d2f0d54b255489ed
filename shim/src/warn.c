/* warn.c - the lines that the library writes to a process's stderr: one for each kind of trouble, again after a minute at the earliest.
 * TANGRAM_DEBUG=1 says more. */
#include "process.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { AGAIN_MS = 60000 }; /* specified */

static void write_line(const char *head, const char *format, va_list values)
{
    char line[512];
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
