/* daemon.h - the parts of nvidia-fake-driverd.
 *
 * One struct, `driver`, holds everything. Functions that can be refused write a sentence into its answer that names the object,
 * the value found and the range allowed.
 */
#ifndef TANGRAM_FAKE_DAEMON_H
#define TANGRAM_FAKE_DAEMON_H

#include "page.h"
#include "words.h"

#include <poll.h>

enum { LISTENER = FAKE_SLOTS, SIGNALS, POLLED };

struct driver {
    struct fake_page *page;
    int page_fd;
    struct pollfd polled[POLLED]; /* a slot's client (-1 = none), then those above */
    char seed[64];                /* mixed into the default UUIDs, so that two nodes' cards differ */
    uint64_t last_sample_ns, last_object;
    struct text answer; /* of the line that runs */
};
extern struct driver driver;

#define REFUSE(...) (say(&driver.answer, __VA_ARGS__), false)

/* lines.c - the description and the control commands, by the table lines.def. */
enum place { DESCRIPTION = 1, COMMAND = 2, ANYWHERE = 3 };
struct value { /* one argument of a line */
    char *word;
    uint64_t number; /* or a card, or a unit */
};
typedef bool line_function(const struct value *value);
#define LINE(name, places, function, form, help) line_function function;
#define NUMBER(word, name, least, most)
#include "lines.def"
#undef LINE
#undef NUMBER
bool line_run(enum place place, char *line);
void say_lines(enum place place);
bool config_read(const char *path);

/* cards.c - cards and their links. */
bool parse_card(const char *word, uint64_t *card);
/* A word among the names that stand first in `count` elements of `stride` bytes: its index, or count. */
size_t find_name(const char *word, const void *first, size_t stride, size_t count);
void say_names(const void *first, size_t stride, size_t count);
void make_uuid(const char *prefix, const char *seed, char text[48], uint8_t bytes[16]);

/* mig.c - MIG mode and instances. Reads "0" (card 0) or "0:7" (its GPU instance 7). */
bool parse_unit(const char *word, uint64_t *unit);

/* clients.c - who is connected, and what it asks. */
void client_accept(void);
void client_answer(uint32_t slot);
/* The first slot from `from` on of such a process, or FAKE_SLOTS. */
uint32_t slot_from(uint32_t from, enum fake_kind kind, uint64_t pid);

/* objects.c - memory that several processes hold: SHARE, IMPORT and RELEASE. False: refused. */
struct passed {
    int in, out; /* descriptors that came with the request (-1: it is kept) and that go with the answer */
};
bool object_request(uint32_t slot, struct fake_message *message, struct passed *fd);
void object_drop_slot(uint32_t slot);

/* events.c - how much had run on each unit, if it is time to look again. */
#define SAMPLE_MS 200 /* guessed: NVML's own period is 1/6 to 1 s by product */
void sample(void);

#endif
