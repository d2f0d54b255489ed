/* lines.c - reads the description, one thing a line, and the control commands, by which a test makes things happen to the
 * GPUs. Words by blanks, # begins a comment. */
#include "missing.h"
#include "daemon.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define ARGUMENTS 4 /* the most of any form */

static const struct line {
    char name[16];
    enum place places;
    line_function *run;
    unsigned words;
    const char *form, *help;
} lines[] = {
#define LINE(name, places, function, words, form, help) {#name, places, function, words, form, help},
#include "lines.def"
};
#define LINES (sizeof lines / sizeof lines[0])

void print_lines(FILE *out, enum place place)
{
    for (const struct line *line = lines; line < lines + LINES; line++)
        if (line->places & place)
            fprintf(out, "%s %-*s  %s\n", line->name, 43 - (int)strlen(line->name), line->form, line->help);
}

uint64_t read_number(const char *what, const char *word, uint64_t least, uint64_t most)
{
    char *end = NULL;
    errno = 0;
    const unsigned long long number = strtoull(word, &end, 10);
    if (word[0] < '0' || word[0] > '9' || *end != '\0' || errno != 0 || number < least || number > most)
        fail("%s is \"%s\", must be a number from %llu to %llu", what, word, (unsigned long long)least, (unsigned long long)most);
    return number;
}

size_t read_name(const char *what, const char *word, const void *first, size_t stride, size_t count)
{
    char names[512] = "";
    size_t length = 0;
    for (size_t i = 0; i < count; i++) {
        const char *name = (const char *)first + i * stride;
        if (strcmp(word, name) == 0)
            return i;
        length += (size_t)snprintf(names + length, sizeof names - length, "%s%s", i == 0 ? "" : ", ", name);
    }
    fail("%s is \"%s\", must be one of %s", what, word, names);
}

/* Cuts it off the line, which goes on after it. NULL at the end of the line. */
static char *next_word(char **line)
{
    char *word = *line + strspn(*line, " \t");
    *line = word + strcspn(word, " \t");
    if (**line != '\0')
        *(*line)++ = '\0';
    return *word != '\0' ? word : NULL;
}

static void run(const struct line *line, char *rest)
{
    char *word[ARGUMENTS + 1], *last = rest;
    for (unsigned i = 0; i < line->words; i++)
        word[i] = last = next_word(&rest);
    word[line->words] = rest + strspn(rest, " \t");
    if (last == NULL || (word[line->words][0] != '\0' && strstr(line->form, "...") == NULL))
        fail("%s: must be \"%s %s\"", line->name, line->name, line->form);
    line->run(word);
}

void run_line(enum place place, char *text)
{
    size_t length = strcspn(text, "#\r\n");
    while (length > 0 && (text[length - 1] == ' ' || text[length - 1] == '\t'))
        length--;
    text[length] = '\0';
    const struct line *first = lines, *end = lines + LINES;
    const char *name = next_word(&text);
    if (name == NULL && place == DESCRIPTION)
        return;
    while (!(first->places & place))
        first++;
    while (!(end[-1].places & place))
        end--;
    run(&first[read_name("the first word", name == NULL ? "" : name, first, sizeof *first, (size_t)(end - first))], text);
}

void read_description(const char *path)
{
    char line[1024];
    FILE *file = fopen(path, "re");
    if (file == NULL)
        fail("%s: %s", path, strerror(errno));
    driver.description = path;
    while (fgets(line, sizeof line, file) != NULL) {
        driver.line++;
        run_line(DESCRIPTION, line);
    }
    fclose(file);
    driver.description = NULL;
    if (driver.page->gpus == 0)
        fail("%s: describes no GPU", path);
}

/* Lines that only set something. */

void set_driver(char **word)
{
    branch_set(driver.page, word[0]);
}

void set_cuda(char **word)
{
    driver.page->cuda_version = (uint32_t)read_number("cuda", word[0], 11000, 13999);
}

void set_kernel_us(char **word)
{
    driver.page->kernel_ns = read_number("kernel_us", word[0], 0, 60000000) * 1000;
}

void set_seed(char **word)
{
    if (driver.page->gpus > 0)
        fail("seed: must precede the first GPU, whose UUID is made from it");
    snprintf(driver.page->seed, sizeof driver.page->seed, "%s", word[0]);
}

void add_fault(char **word)
{
    struct fake_page *page = driver.page;
    const uint32_t count = atomic_load(&page->faults);
    const bool none = strcmp(word[0], "none") == 0;
    char why[512];
    if (!none && count >= FAKE_FAULTS)
        fail("fault: more than %u faults", FAKE_FAULTS);
    if (!none && !fault_parse(word[0], &page->fault[count], why, sizeof why))
        fail("%s", why);
    atomic_store(&page->faults, none ? 0 : count + 1);
}
