/* command.c - the control commands, by which a test makes things happen to the cards. */
#define _GNU_SOURCE
#include "daemon.h"
#include "nvos.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

const char command_help[] =
    "status                          cards, instances, processes and what they hold\n"
    "kernel                          misuses of the kernel's double; channels, enables owed and time of each process\n"
    "disable PID                     the compute channels of a process are disabled once more, as by some other process\n"
    "trap PID ERROR                  a kernel of the process failed: its CUDA calls answer that CUresult from now on\n"
    "fault none | FAULT              calls go wrong: fail, hang, missing, suspend-without-effect\n"
    "driver BRANCH                   an upgrade: the branch, or a version, that programs find which start now\n"
    "xid CARD NUMBER                 raise an XID; 79 also takes the card off the bus until it recovers\n"
    "recover CARD                    the card is well again\n"
    "mig CARD on | off               change MIG mode (no process may hold memory there)\n"
    "mig CARD create PROFILE         make an instance, e.g. 1g.18gb\n"
    "mig CARD destroy GI             remove an instance by its GPU instance ID\n"
    "process CARD[:GI] PID MIB NAME  a process that is not ours takes memory\n"
    "gone PID                        such a process ends\n";

static void say_unit(struct fake_page *page, uint32_t unit, const char *what, struct text *to)
{
    say(to, "%s %s used_mib=%" PRIu64 " limit_mib=%" PRIu64 " busy_percent=%u\n", what, page->unit[unit].uuid,
        page_unit_used(page, unit) / FAKE_MIB, page->unit[unit].limit_bytes / FAKE_MIB, atomic_load(&page->unit[unit].percent));
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++) {
        const struct fake_slot *of = &page->slot[slot];
        if (of->used_bytes[unit] > 0 || of->contexts[unit] > 0)
            say(to, "  pid=%d used_mib=%" PRIu64 " contexts=%u %.63s\n", (int)of->pid, of->used_bytes[unit] / FAKE_MIB,
                of->contexts[unit], of->name);
    }
}

static bool status(struct daemon *daemon, char **word, unsigned words, struct text *answer)
{
    (void)word, (void)words;
    struct fake_page *page = daemon->page;
    for (uint32_t card = 0; card < page->cards; card++) {
        char what[96];
        snprintf(what, sizeof what, "card %u %s mig=%s xid=%u", card, page->card[card].model, page->card[card].mig_on ? "on" : "off",
                 atomic_load(&page->card[card].xid));
        say_unit(page, card, what, answer);
        for (uint32_t i = 0; i < FAKE_INSTANCES; i++) {
            const uint32_t unit = fake_unit_of_instance(card, i);
            if (!page->unit[unit].live)
                continue;
            snprintf(what, sizeof what, "card %u instance %u %s", card, page->unit[unit].gi,
                     page->card[card].profile[page->unit[unit].profile].name);
            say_unit(page, unit, what, answer);
        }
    }
    return true;
}

static bool kernel(struct daemon *daemon, char **word, unsigned words, struct text *answer)
{
    (void)word, (void)words;
    struct fake_page *page = daemon->page;
    say(answer, "misuses=%" PRIu64 " %s\n", atomic_load(&page->kernel_misuses), page->kernel_misuse);
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++) {
        const struct fake_slot *of = &page->slot[slot];
        for (uint32_t unit = 0; unit < FAKE_UNITS && of->kind == FAKE_CUDA; unit++) {
            uint32_t channels = 0, owed = 0;
            for (uint32_t i = 0; i < FAKE_OBJECTS; i++) {
                const bool here = (of->object[i].klass & 0xff) == (HOPPER_CHANNEL_GPFIFO_A & 0xff) && of->object[i].unit == unit;
                channels += here;
                owed += here ? of->object[i].disables : 0;
            }
            if (channels == 0 && atomic_load(&of->queued_ns[unit]) == 0)
                continue;
            gpu_time_settle(page, unit);
            say(answer, "pid=%d unit=%u channels=%u enables_owed=%u held=%u queued_us=%" PRIu64 " ran_us=%" PRIu64 "\n", (int)of->pid, unit,
                channels, owed, atomic_load(&of->held[unit]), atomic_load(&of->queued_ns[unit]) / 1000, atomic_load(&of->ran_ns[unit]) / 1000);
        }
    }
    return true;
}

/* Returns how many channels. */
static uint32_t disable_compute(struct fake_page *page, uint32_t slot)
{
    uint32_t channels = 0;
    for (uint32_t i = 0; i < FAKE_OBJECTS; i++) {
        struct fake_kernel_object *object = &page->slot[slot].object[i];
        if ((object->klass & 0xff) != (HOPPER_CHANNEL_GPFIFO_A & 0xff) || object->engine >= NV2080_ENGINE_TYPE_COPY0)
            continue;
        channels++;
        object->disables++;
        if (atomic_load(&page->slot[slot].held[object->unit]) == 0)
            gpu_time_hold(page, slot, object->unit, true);
    }
    return channels;
}

static bool disable(struct daemon *daemon, char **word, unsigned words, struct text *answer)
{
    uint64_t pid;
    uint32_t channels = 0;
    (void)words;
    if (!parse_number("pid", word[1], 1, 4194304, &pid, answer))
        return false;
    page_lock(daemon->page);
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++)
        if (daemon->page->slot[slot].kind == FAKE_CUDA && daemon->page->slot[slot].pid == (int32_t)pid)
            channels += disable_compute(daemon->page, slot);
    page_unlock(daemon->page);
    if (channels == 0)
        say(answer, "pid: found %s, must be a process with compute channels", word[1]);
    return channels > 0;
}

/* As if a kernel of the process had ended in that CUresult, on every device where it has a context. */
static bool trap(struct daemon *daemon, char **word, unsigned words, struct text *answer)
{
    uint64_t pid, error;
    uint32_t contexts = 0;
    (void)words;
    if (!parse_number("pid", word[1], 1, 4194304, &pid, answer) || !parse_number("error", word[2], 1, 999, &error, answer))
        return false;
    page_lock(daemon->page);
    for (uint32_t slot = 0; slot < FAKE_SLOTS; slot++) {
        struct fake_slot *of = &daemon->page->slot[slot];
        for (uint32_t unit = 0; unit < FAKE_UNITS && of->kind == FAKE_CUDA && of->pid == (int32_t)pid; unit++) {
            if (of->contexts[unit] > 0)
                atomic_store(&of->error[unit], (uint32_t)error);
            contexts += of->contexts[unit];
        }
    }
    page_unlock(daemon->page);
    if (contexts == 0)
        say(answer, "pid: found %s, must be a process with a CUDA context", word[1]);
    return contexts > 0;
}

static bool xid(struct daemon *daemon, char **word, unsigned words, struct text *answer)
{
    uint32_t card;
    uint64_t number;
    (void)words;
    if (!parse_card(daemon, word[1], &card, answer) || !parse_number("XID", word[2], 1, 65535, &number, answer))
        return false;
    event_xid(daemon, card, (uint32_t)number);
    return true;
}

static bool recover(struct daemon *daemon, char **word, unsigned words, struct text *answer)
{
    uint32_t card;
    (void)words;
    if (!parse_card(daemon, word[1], &card, answer))
        return false;
    event_recover(daemon, card);
    return true;
}

static bool mig(struct daemon *daemon, char **word, unsigned words, struct text *answer)
{
    uint32_t card;
    uint64_t gi;
    if (!parse_card(daemon, word[1], &card, answer))
        return false;
    if (words == 3 && (strcmp(word[2], "on") == 0 || strcmp(word[2], "off") == 0))
        return mig_set_mode(daemon, card, word[2][1] == 'n', answer);
    if (words == 4 && strcmp(word[2], "create") == 0)
        return mig_create(daemon, card, word[3], answer);
    if (words == 4 && strcmp(word[2], "destroy") == 0)
        return parse_number("GPU instance", word[3], 0, 14, &gi, answer) && mig_destroy(daemon, card, (uint32_t)gi, answer);
    say(answer, "mig: must be on, off, create PROFILE or destroy GI");
    return false;
}

static bool process(struct daemon *daemon, char **word, unsigned words, struct text *answer)
{
    uint32_t unit;
    uint64_t pid, mib;
    (void)words;
    return parse_unit(daemon, word[1], &unit, answer) && parse_number("pid", word[2], 1, 4194304, &pid, answer) &&
           parse_number("mib", word[3], 0, 1u << 24, &mib, answer) &&
           foreign_add(daemon, unit, (int32_t)pid, mib * FAKE_MIB, word[4], answer);
}

static bool gone(struct daemon *daemon, char **word, unsigned words, struct text *answer)
{
    uint64_t pid;
    (void)words;
    return parse_number("pid", word[1], 1, 4194304, &pid, answer) && foreign_remove(daemon, (int32_t)pid, answer);
}

bool command_run(struct daemon *daemon, const char *line, struct text *answer)
{
    static const struct {
        const char *name;
        unsigned least, most; /* words */
        bool (*run)(struct daemon *, char **, unsigned, struct text *);
    } commands[] = {{"status", 1, 1, status}, {"kernel", 1, 1, kernel}, {"disable", 2, 2, disable}, {"trap", 3, 3, trap}, {"fault", 2, 6, add_fault}, {"driver", 2, 2, set_word}, {"xid", 3, 3, xid},
                    {"recover", 2, 2, recover}, {"mig", 3, 4, mig},     {"process", 5, 5, process}, {"gone", 2, 2, gone}};
    char copy[512], *word[8], *rest = NULL;
    unsigned words = 0;
    snprintf(copy, sizeof copy, "%s", line);
    for (char *w = strtok_r(copy, " \t\n", &rest); w != NULL && words < 8; w = strtok_r(NULL, " \t\n", &rest))
        word[words++] = w;
    for (size_t i = 0; words > 0 && i < sizeof commands / sizeof commands[0]; i++)
        if (strcmp(word[0], commands[i].name) == 0 && words >= commands[i].least && words <= commands[i].most)
            return commands[i].run(daemon, word, words, answer);
    say(answer, "the command is \"%s\", must be one of:\n%s", line, command_help);
    return false;
}
