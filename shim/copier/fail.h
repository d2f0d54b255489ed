/* fail.h - what the copier writes to stderr, and how it gives up. */
#ifndef TANGRAM_COPIER_FAIL_H
#define TANGRAM_COPIER_FAIL_H

/* A line on stderr. */
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* The same if it can be written at once. It never waits, and does not end the program where nobody reads. */
void say_if_read(const char *text);

/* As `say`, and the program ends with status 1: its connection ends with it, and what was not answered counts as not done. */
_Noreturn void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
