/* daemon.h - the parts of nvidia-fake-driverd.
 *
 * One struct daemon holds everything; each part works on it or on the page alone. Functions that can be refused take a
 * struct text and write a sentence into it that names the object, the value found and the range allowed.
 */
#ifndef TANGRAM_FAKE_DAEMON_H
#define TANGRAM_FAKE_DAEMON_H

#include "branch.h"
#include "page.h"

#include <poll.h>
#include <stddef.h>

struct text {
    char *at;
    size_t room, length;
};
void say(struct text *to, const char *format, ...) __attribute__((format(printf, 2, 3)));

enum { LISTENER = FAKE_SLOTS, SIGNALS, POLLED };

struct daemon {
    struct fake_page *page;
    int page_fd;
    struct pollfd polled[POLLED]; /* a slot's client (-1 = none), then those above */
    char seed[64];                /* mixed into the default UUIDs, so that two nodes' cards differ */
    uint64_t last_sample_ns;      /* 0 = nobody computes */
    uint64_t last_ran_ns[FAKE_UNITS], last_slot_ran_ns[FAKE_SLOTS][FAKE_CARDS];
    uint64_t last_object;
};

/* lines.c - the description and the control commands, by the table lines.def. */
enum place { DESCRIPTION = 1, COMMAND = 2, ANYWHERE = 3 };
struct value { /* one argument of a line */
    char *word;
    uint64_t number; /* or a card, or a unit */
};
typedef bool line_function(struct daemon *daemon, const struct value *value, struct text *answer);
#define LINE(name, places, function, ...) line_function function;
#include "lines.def"
#undef LINE
bool line_run(struct daemon *daemon, enum place place, char *line, struct text *answer);
bool config_read(struct daemon *daemon, const char *path, struct text *why);
void say_lines(enum place place, struct text *to);
char *next_word(char **at); /* NULL at the end of the line */
bool parse_number(const char *what, const char *word, uint64_t least, uint64_t most, uint64_t *value, struct text *why);
bool parse_card(const struct daemon *daemon, const char *word, uint64_t *card, struct text *why);

/* cards.c - cards and their links. */
void make_uuid(const char *prefix, const char *seed, uint32_t a, uint32_t b, char text[48], uint8_t bytes[16]);

/* mig.c - MIG mode and instances. Reads "0" (card 0) or "0:7" (its GPU instance 7). */
bool parse_unit(const struct daemon *daemon, const char *word, uint64_t *unit, struct text *why);

/* clients.c - who is connected, and what it asks. */
void client_accept(struct daemon *daemon);
void client_answer(struct daemon *daemon, uint32_t slot);
/* The first slot from `from` on of such a process, or FAKE_SLOTS. */
uint32_t slot_from(const struct fake_page *page, uint32_t from, enum fake_kind kind, uint64_t pid);

/* objects.c - memory that several processes hold: SHARE, IMPORT and RELEASE. False: refused. */
struct passed {
    int in, out; /* descriptors that came with the request (-1: it is kept) and that go with the answer */
};
bool object_request(struct daemon *daemon, uint32_t slot, struct fake_message *message, struct passed *fd);
void object_drop_slot(struct daemon *daemon, uint32_t slot);

/* events.c - how busy each unit was: sampled while anybody computes. */
void sample_start(struct daemon *daemon);
/* Samples if it is time. Returns the milliseconds until the next one, -1 for never. */
int sample(struct daemon *daemon);

#endif
