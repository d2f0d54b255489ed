/* words.h - lines of words, and sentences about what is wrong in them; the description, ctl and TANGRAM_FAKE_FAULTS share it. */
#ifndef TANGRAM_FAKE_WORDS_H
#define TANGRAM_FAKE_WORDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What does not fit is cut off. */
struct text {
    char *at;
    size_t room, length;
};
void say(struct text *to, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Cut off the line, which goes on after it. NULL at the end of the line. */
char *next_word(char **line);

/* False, with a sentence that names what was found and the range: it is no such number. */
bool parse_number(const char *what, const char *word, uint64_t least, uint64_t most, uint64_t *number, struct text *why);

#endif
