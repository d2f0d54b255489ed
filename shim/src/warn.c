/* warn.c - the one line that the library may write to a process's stderr. */
#include "process.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

void warn_once(const char *format, ...)
{
    if (atomic_exchange(&tangram.warned, true))
        return;
    struct quiet quiet = quiet_begin();
    char line[512];
    int head = snprintf(line, sizeof line, "tangram: ");
    va_list values;
    va_start(values, format);
    int tail = vsnprintf(line + head, sizeof line - (size_t)head - 1, format, values);
    va_end(values);
    if (tail > 0) {
        size_t length = (size_t)(head + tail);
        if (length > sizeof line - 2)
            length = sizeof line - 2;
        line[length++] = '\n';
        ssize_t written = write(STDERR_FILENO, line, length);
        (void)written; /* a closed stderr is the program's own choice */
    }
    quiet_end(quiet);
}
