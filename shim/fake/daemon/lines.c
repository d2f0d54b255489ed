/* lines.c - reads the description, one thing a line, and runs the control commands, by which a test makes things happen to
 * the cards. Words by blanks, # begins a comment; a line that is not understood refuses the whole description. */
#define _GNU_SOURCE
#include "daemon.h"
#include "fault.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum argument_kind { IS_NOTHING, IS_CARD, IS_UNIT, IS_NUMBER, IS_WORD, IS_REST };
#define ARGUMENTS 4

static const struct line {
    const char *name;
    enum place places;
    line_function *run;
    const char *form, *help;
    struct argument {
        enum argument_kind kind;
        const char *what; /* of a number */
        uint64_t least, most;
    } argument[ARGUMENTS];
} lines[] = {
#define NOTHING {.kind = IS_NOTHING}
#define CARD {.kind = IS_CARD}
#define UNIT {.kind = IS_UNIT}
#define NUMBER(its_name, from, to) {.kind = IS_NUMBER, .what = its_name, .least = from, .most = to}
#define WORD {.kind = IS_WORD}
#define REST {.kind = IS_REST}
#define LINE(name, places, function, form, help, ...) {#name, places, function, form, help, {__VA_ARGS__}},
#include "lines.def"
};
#define LINES (sizeof lines / sizeof lines[0])

void say_lines(enum place place, struct text *to)
{
    for (const struct line *line = lines; line < lines + LINES; line++)
        if (line->places & place)
            say(to, "%s %-*s  %s\n", line->name, 43 - (int)strlen(line->name), line->form, line->help);
}

char *next_word(char **at)
{
    char *word = *at + strspn(*at, " \t");
    *at = word + strcspn(word, " \t");
    if (**at != '\0')
        *(*at)++ = '\0';
    return *word != '\0' ? word : NULL;
}

bool parse_number(const char *what, const char *word, uint64_t least, uint64_t most, uint64_t *value, struct text *why)
{
    char *end = NULL;
    errno = 0;
    *value = strtoull(word, &end, 10);
    if (word[0] >= '0' && word[0] <= '9' && *end == '\0' && errno == 0 && *value >= least && *value <= most)
        return true;
    say(why, "%s is \"%s\", must be a number from %llu to %llu", what, word, (unsigned long long)least, (unsigned long long)most);
    return false;
}

bool parse_card(const struct daemon *daemon, const char *word, uint64_t *card, struct text *why)
{
    if (daemon->page->cards == 0)
        return say(why, "card is \"%s\", but there are no cards yet", word), false;
    return parse_number("card", word, 0, daemon->page->cards - 1, card, why);
}

static bool parse(const struct daemon *daemon, const struct argument *as, struct value *value, struct text *why)
{
    switch (as->kind) {
    case IS_CARD: return parse_card(daemon, value->word, &value->number, why);
    case IS_UNIT: return parse_unit(daemon, value->word, &value->number, why);
    case IS_NUMBER: return parse_number(as->what, value->word, as->least, as->most, &value->number, why);
    default: return true;
    }
}

static bool run(struct daemon *daemon, const struct line *line, char *at, struct text *answer)
{
    struct value value[ARGUMENTS] = {0};
    for (unsigned i = 0; i < ARGUMENTS && line->argument[i].kind != IS_NOTHING; i++) {
        const bool rest = line->argument[i].kind == IS_REST;
        value[i].word = rest ? at + strspn(at, " \t") : next_word(&at);
        at += rest ? strlen(at) : 0;
        if (value[i].word == NULL)
            return say(answer, "%s: must be \"%s %s\"", line->name, line->name, line->form), false;
        if (!parse(daemon, &line->argument[i], &value[i], answer))
            return false;
    }
    if (next_word(&at) != NULL)
        return say(answer, "%s: must be \"%s %s\"", line->name, line->name, line->form), false;
    return line->run(daemon, value, answer);
}

bool line_run(struct daemon *daemon, enum place place, char *text, struct text *answer)
{
    text[strcspn(text, "#\r\n")] = '\0';
    const char *name = next_word(&text);
    if (name == NULL)
        return place == DESCRIPTION || (say(answer, "the command is empty, must be a line of --help"), false);
    for (const struct line *line = lines; line < lines + LINES; line++)
        if ((line->places & place) && strcmp(name, line->name) == 0)
            return run(daemon, line, text, answer);
    say(answer, "the first word is \"%s\", must be one of ", name);
    const char *between = "";
    for (const struct line *line = lines; line < lines + LINES; line++)
        if (line->places & place) {
            say(answer, "%s%s", between, line->name);
            between = ", ";
        }
    return false;
}

bool config_read(struct daemon *daemon, const char *path, struct text *why)
{
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return say(why, "%s: %s", path, strerror(errno)), false;
    char line[1024];
    bool good = true;
    for (unsigned number = 1; good && fgets(line, sizeof line, file) != NULL; number++) {
        char sentence[512] = "";
        struct text about = {.at = sentence, .room = sizeof sentence};
        good = line_run(daemon, DESCRIPTION, line, &about);
        if (!good)
            say(why, "%s:%u: %s", path, number, sentence);
    }
    fclose(file);
    if (good && daemon->page->cards == 0)
        return say(why, "%s: describes no card", path), false;
    return good;
}

bool set_driver(struct daemon *daemon, const struct value *value, struct text *why)
{
    (void)why;
    branch_set(daemon->page, value[0].word);
    return true;
}

bool set_cuda(struct daemon *daemon, const struct value *value, struct text *why)
{
    (void)why;
    daemon->page->cuda_version = (uint32_t)value[0].number;
    return true;
}

bool set_kernel_us(struct daemon *daemon, const struct value *value, struct text *why)
{
    (void)why;
    daemon->page->kernel_ns = value[0].number * 1000;
    return true;
}

bool set_seed(struct daemon *daemon, const struct value *value, struct text *why)
{
    if (daemon->page->cards > 0)
        return say(why, "seed: must stand before the first card, whose UUID it makes"), false;
    snprintf(daemon->seed, sizeof daemon->seed, "%s", value[0].word);
    return true;
}

bool add_fault(struct daemon *daemon, const struct value *value, struct text *why)
{
    struct fake_page *page = daemon->page;
    const uint32_t count = atomic_load(&page->faults);
    const bool none = strcmp(value[0].word, "none") == 0;
    char sentence[512];
    if (!none && count == FAKE_FAULTS)
        return say(why, "fault: more than %u faults", FAKE_FAULTS), false;
    if (!none && !fault_parse(value[0].word, &page->fault[count], sentence, sizeof sentence))
        return say(why, "%s", sentence), false;
    atomic_store(&page->faults, none ? 0 : count + 1);
    return true;
}
