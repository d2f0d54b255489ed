/* fail.c - see fail.h. */
#include "fail.h"

#include <poll.h>
#include <stdarg.h>
#include <stdio.h>
#include <unistd.h>

static void line(const char *format, va_list list)
{
    char text[1024];
    vsnprintf(text, sizeof text, format, list);
    dprintf(STDERR_FILENO, "tangram-copier: %s\n", text);
}

void say(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    line(format, list);
    va_end(list);
}

void say_if_read(const char *text)
{
    struct pollfd to = {.fd = STDERR_FILENO, .events = POLLOUT};
    if (poll(&to, 1, 0) == 1 && to.revents == POLLOUT) /* a pipe is writable when a page of it is free: more than a line takes */
        say("%s", text);
}

void fail(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    line(format, list);
    va_end(list);
    _exit(1);
}
