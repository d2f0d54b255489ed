/* daemon.h - the parts of nvidia-fake-driverd.
 *
 * One struct daemon holds everything; each part works on it or on the page alone. Functions that can be refused take a
 * struct text and write a sentence into it that names the object, the value found and the range allowed.
 */
#ifndef TANGRAM_FAKE_DAEMON_H
#define TANGRAM_FAKE_DAEMON_H

#include "branch.h"
#include "page.h"

#include <stddef.h>

struct text {
    char *at;
    size_t room, length;
};
void say(struct text *to, const char *format, ...) __attribute__((format(printf, 2, 3)));

struct daemon {
    struct fake_page *page;
    int page_fd;
    int listener, epoll, timer, signals;
    char seed[64]; /* mixed into the default UUIDs, so that two nodes' cards differ */
    int client_fd[FAKE_SLOTS]; /* -1 = none */
    uint64_t last_ran_ns[FAKE_UNITS], last_sample_ns;
    uint64_t last_slot_ran_ns[FAKE_SLOTS][FAKE_UNITS];
    uint64_t last_object;
};

/* cards.c - the models, as NVIDIA's data sheets and nvidia-smi of each card give them. */
bool card_init(struct fake_card *card, const char *model, uint32_t index, const char *seed, struct text *why);
void card_models(struct text *to);
void make_uuid(const char *prefix, const char *seed, uint32_t a, uint32_t b, char text[48], uint8_t bytes[16]);
bool parse_uuid(const char *prefix, const char *text, uint8_t bytes[16]);
void card_unit_init(struct daemon *daemon, uint32_t card);

/* mig.c - MIG mode and instances. */
bool mig_set_mode(struct daemon *daemon, uint32_t card, bool on, struct text *why);
bool mig_create(struct daemon *daemon, uint32_t card, const char *profile, struct text *why);
bool mig_destroy(struct daemon *daemon, uint32_t card, uint32_t gi, struct text *why);
/* Reads "0" (card 0) or "0:7" (its GPU instance 7). */
bool parse_unit(const struct daemon *daemon, const char *word, uint32_t *unit, struct text *why);

/* config.c - the description file. */
bool set_word(struct daemon *daemon, char **word, unsigned words, struct text *why);
bool add_fault(struct daemon *daemon, char **word, unsigned words, struct text *why);
bool config_read(struct daemon *daemon, const char *path, struct text *why);
bool parse_number(const char *what, const char *word, uint64_t least, uint64_t most, uint64_t *value, struct text *why);
bool parse_card(const struct daemon *daemon, const char *word, uint32_t *card, struct text *why);

/* clients.c - who is connected, and what it asks. */
void clients_init(struct daemon *daemon);
bool client_accept(struct daemon *daemon);
void client_answer(struct daemon *daemon, uint32_t slot);
void client_drop(struct daemon *daemon, uint32_t slot);
bool foreign_add(struct daemon *daemon, uint32_t unit, int32_t pid, uint64_t bytes, const char *name, struct text *why);
bool foreign_remove(struct daemon *daemon, int32_t pid, struct text *why);

/* objects.c - memory that several processes hold. fd passes to the callee. */
bool object_share(struct daemon *daemon, uint32_t slot, struct fake_object *object, int fd);
int object_import(uint32_t slot, struct fake_object *object);
bool object_release(struct daemon *daemon, uint32_t slot, uint64_t id);
void object_drop_slot(struct daemon *daemon, uint32_t slot);

/* events.c - XIDs, and how busy each unit was. */
void event_xid(struct daemon *daemon, uint32_t card, uint32_t xid);
void event_recover(struct daemon *daemon, uint32_t card);
void sample_start(struct daemon *daemon);
void sample(struct daemon *daemon);

/* command.c - what `nvidia-fake-driverd ctl` says. */
bool command_run(struct daemon *daemon, const char *line, struct text *answer);
extern const char command_help[];

#endif
