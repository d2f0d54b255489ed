/* daemon.h - the parts of nvidia-fake-driverd.
 *
 * The description and the commands of `ctl` change the page, the one in the daemon before it serves, the others in a process of
 * their own that is connected like any other. An error in one ends the process with a sentence.
 */
#ifndef TANGRAM_FAKE_DAEMON_H
#define TANGRAM_FAKE_DAEMON_H

#include "page.h"

#include <stddef.h>
#include <stdio.h>

struct driver {
    struct fake_page *page;
    const char *description; /* the file that is being read, and where in it; NULL: none is */
    unsigned line;
};
extern struct driver driver;

/* main.c - ends the process with a sentence that names the object, the value found and the range allowed. */
_Noreturn void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* lines.c - the description and the control commands, by the table lines.def. */
enum place { DESCRIPTION = 1, COMMAND = 2, ANYWHERE = 3 };
typedef void line_function(char **word); /* those after the first */
#define LINE(name, places, function, words, form, help) line_function function;
#include "lines.def"
#undef LINE
void run_line(enum place place, char *line);
void read_description(const char *path);
void print_lines(FILE *out, enum place place);
uint64_t read_number(const char *what, const char *word, uint64_t least, uint64_t most);
/* The index of a word among the names that stand first in `count` elements of `stride` bytes. */
size_t read_name(const char *what, const char *word, const void *first, size_t stride, size_t count);

/* gpus.c - GPUs and their links. */
uint32_t read_gpu(const char *word);
void set_options(struct fake_gpu *gpu, const char *options, uint64_t *count);
void fit_unit(uint32_t index); /* the unit of a whole GPU, as its GPU is now */

/* plug.c - the links of all GPUs, in the folder of the bus. */
void link_gpus(void);

/* mig.c - MIG mode and instances. Reads "0" (GPU 0) or "0:7" (its GPU instance 7). */
uint32_t read_unit(const char *word);

/* clients.c - the daemon while it serves, until SIGTERM or SIGINT. It prints one line when it is ready. */
void serve(int page_fd, int listener, const char *socket_path);

/* processes.c - slots of processes, and what is known of them. FAKE_SLOTS: all are taken. */
uint32_t new_slot(enum fake_kind kind, int32_t pid);
void empty_slot(uint32_t slot);

#endif
