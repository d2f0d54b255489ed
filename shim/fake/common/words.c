/* words.c - words in, sentences out. */
#include "words.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void say(struct text *to, const char *format, ...)
{
    va_list values;
    va_start(values, format);
    const size_t left = to->room - to->length;
    const int length = vsnprintf(to->at + to->length, left, format, values);
    va_end(values);
    if (length > 0)
        to->length += (size_t)length < left ? (size_t)length : left - 1;
}

char *next_word(char **line)
{
    char *word = *line + strspn(*line, " \t\n");
    *line = word + strcspn(word, " \t\n");
    if (**line != '\0')
        *(*line)++ = '\0';
    return *word != '\0' ? word : NULL;
}

bool parse_number(const char *what, const char *word, uint64_t least, uint64_t most, uint64_t *number, struct text *why)
{
    char *end = NULL;
    errno = 0;
    *number = strtoull(word, &end, 10);
    if (word[0] >= '0' && word[0] <= '9' && *end == '\0' && errno == 0 && *number >= least && *number <= most)
        return true;
    say(why, "%s is \"%s\", must be a number from %llu to %llu", what, word, (unsigned long long)least, (unsigned long long)most);
    return false;
}
