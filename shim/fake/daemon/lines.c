/* lines.c - reads the description, one thing a line, and runs the control commands, by which a test makes things happen to
 * the cards. Words by blanks, # begins a comment; a line that is not understood refuses the whole description. */
#include "branch.h"
#include "daemon.h"
#include "fault.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#define ARGUMENTS 4 /* the most of any form */

static const struct line {
    const char *name;
    enum place places;
    line_function *run;
    const char *form, *help;
} lines[] = {
#define LINE(name, places, function, form, help) {#name, places, function, form, help},
#define NUMBER(word, name, least, most)
#include "lines.def"
#undef LINE
#undef NUMBER
};
#define LINES (sizeof lines / sizeof lines[0])

static const struct {
    const char *word, *name;
    uint64_t least, most;
} numbers[] = {
#define LINE(name, places, function, form, help)
#define NUMBER(word, name, least, most) {word, name, least, most},
#include "lines.def"
};

void say_lines(enum place place)
{
    for (const struct line *line = lines; line < lines + LINES; line++)
        if (line->places & place)
            say(&driver.answer, "%s %-*s  %s\n", line->name, 43 - (int)strlen(line->name), line->form, line->help);
}

/* One argument, as its word in the form says. */
static bool read_argument(const char *form, struct value *value)
{
    if (strcmp(form, "CARD") == 0)
        return parse_card(value->word, &value->number);
    if (strcmp(form, "CARD[:GI]") == 0)
        return parse_unit(value->word, &value->number);
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        if (strcmp(form, numbers[i].word) == 0)
            return parse_number(numbers[i].name, value->word, numbers[i].least, numbers[i].most, &value->number, &driver.answer);
    return true;
}

static bool run(const struct line *line, char *words)
{
    struct value value[ARGUMENTS] = {0};
    char copy[64], *forms = copy;
    bool complete = true;
    snprintf(copy, sizeof copy, "%s", line->form);
    for (struct value *at = value; complete && at < value + ARGUMENTS; at++) {
        const char *form = next_word(&forms);
        if (form == NULL)
            break;
        const bool rest = strstr(form, "...") != NULL;
        at->word = rest ? words + strspn(words, " \t") : next_word(&words);
        words += rest ? strlen(words) : 0;
        complete = at->word != NULL;
        if (complete && !read_argument(form, at))
            return false;
    }
    if (!complete || next_word(&words) != NULL)
        return REFUSE("%s: must be \"%s %s\"", line->name, line->name, line->form);
    return line->run(value);
}

bool line_run(enum place place, char *text)
{
    text[strcspn(text, "#\r\n")] = '\0';
    const char *name = next_word(&text), *between = "";
    if (name == NULL)
        return place == DESCRIPTION || REFUSE("the command is empty, must be a line of --help");
    for (const struct line *line = lines; line < lines + LINES; line++)
        if ((line->places & place) && strcmp(name, line->name) == 0)
            return run(line, text);
    say(&driver.answer, "the first word is \"%s\", must be one of ", name);
    for (const struct line *line = lines; line < lines + LINES; line++)
        if (line->places & place) {
            say(&driver.answer, "%s%s", between, line->name);
            between = ", ";
        }
    return false;
}

bool config_read(const char *path)
{
    FILE *file = fopen(path, "re");
    if (file == NULL)
        return REFUSE("%s: %s", path, strerror(errno));
    const struct text start = driver.answer;
    char line[1024];
    bool good = true;
    for (unsigned number = 1; good && fgets(line, sizeof line, file) != NULL; number++) {
        driver.answer = start;
        say(&driver.answer, "%s:%u: ", path, number);
        good = line_run(DESCRIPTION, line);
    }
    fclose(file);
    if (good)
        driver.answer = start;
    return good && (driver.page->cards > 0 || REFUSE("%s: describes no card", path));
}

/* Lines that only set something. */

bool set_driver(const struct value *value)
{
    branch_set(driver.page, value[0].word);
    return true;
}

bool set_cuda(const struct value *value)
{
    driver.page->cuda_version = (uint32_t)value[0].number;
    return true;
}

bool set_kernel_us(const struct value *value)
{
    driver.page->kernel_ns = value[0].number * 1000;
    return true;
}

bool set_seed(const struct value *value)
{
    if (driver.page->cards > 0)
        return REFUSE("seed: must stand before the first card, whose UUID it makes");
    snprintf(driver.seed, sizeof driver.seed, "%s", value[0].word);
    return true;
}

bool add_fault(const struct value *value)
{
    struct fake_page *page = driver.page;
    const uint32_t count = atomic_load(&page->faults);
    const bool none = strcmp(value[0].word, "none") == 0;
    char why[512];
    if (!none && count >= FAKE_FAULTS)
        return REFUSE("fault: more than %u faults", FAKE_FAULTS);
    if (!none && !fault_parse(value[0].word, &page->fault[count], why, sizeof why))
        return REFUSE("%s", why);
    atomic_store(&page->faults, none ? 0 : count + 1);
    return true;
}
