/* recorder.c - stands for the library: writes down which of its functions were called. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "tangram.h"

static int say(const char *what, unsigned long value)
{
    char line[64];
    int length = snprintf(line, sizeof line, "%s %lu\n", what, value);
    return write(1, line, (size_t)length) == length ? 0 : -1;
}

const char *tangram_version(void) { return "9.8.7"; }
int tangram_memory(unsigned gpu, struct tangram_memory *out)
{
    *out = (struct tangram_memory){4 + gpu, 3, 2, 1};
    return gpu < 2 ? 0 : -1;
}
int tangram_hint(uint64_t microseconds) { return say("hint", microseconds); }
int tangram_begin(void) { return say("begin", 0); }
int tangram_end(void) { return say("end", 0); }
int tangram_yield_begin(void) { return say("yield_begin", 0); }
int tangram_yield_end(void) { return say("yield_end", 0); }
