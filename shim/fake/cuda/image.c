/* image.c - what a module's image says of its variables and kernels: PTX text, cubins and fatbins, of which only the uncompressed.
 *
 * A variable of PTX is a statement ".global [.align N] [.vN] .TYPE name[N]..."; one behind .extern is another module's, and
 * ".ptr .global" belongs to a parameter. A cubin has them as objects in the sections .nv.global and .nv.global.init.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <ctype.h>
#include <elf.h>
#include <stdlib.h>

#define FATBIN_MAGIC "P\xed" "U\xba"
#define WRAPPER_MAGIC "\xb1" "CbF"

struct fatbin {
    uint32_t magic;
    uint16_t version, header;
    uint64_t bytes; /* behind the header */
};
struct fatbin_entry {
    uint16_t kind, version; /* 1 = PTX, 2 = ELF */
    uint32_t header;
    uint64_t bytes;
    uint32_t compressed, unknown, version_of_language, architecture; /* 75 = sm_75 */
};

static void add(struct image *image, const char *name, size_t length, uint64_t bytes, uint64_t align)
{
    struct variable *variable = bytes > 0 && length < sizeof variable->name ? calloc(1, sizeof *variable) : NULL;
    if (variable == NULL)
        return;
    memcpy(variable->name, name, length);
    variable->at = rounded(image->bytes, align > 0 ? align : 1);
    variable->bytes = bytes;
    variable->next = image->variables;
    image->variables = variable;
    image->bytes = variable->at + bytes;
}

/* The statement's bytes, up to its ';' or '='; 0: none of those above. */
static uint64_t statement(const char *at, const char **name, size_t *length, uint64_t *align)
{
    uint64_t bytes = 0, vector = 1;
    *align = 0;
    for (at += strspn(at, " \t"); *at == '.'; at += strcspn(at, " \t\n;="), at += strspn(at, " \t")) {
        if (strncmp(at, ".align", 6) == 0) {
            char *end = NULL;
            *align = strtoull(at + 6, &end, 10);
            at = end;
        } else if (at[1] == 'v' && isdigit((unsigned char)at[2])) {
            vector = (uint64_t)(at[2] - '0');
        } else if (strchr("busf", at[1]) != NULL && isdigit((unsigned char)at[2])) {
            bytes = strtoull(at + 2, NULL, 10) / 8;
        }
    }
    *name = at;
    *length = strcspn(at, " \t\n[;=,");
    for (at += *length; *at == '[' || *at == ' '; at += strcspn(at, "[;=\n "))
        if (*at++ == '[')
            bytes *= strtoull(at, NULL, 10);
    *align = *align > 0 ? *align : bytes < 8 ? bytes : 8;
    return bytes * vector;
}

static bool is_behind(const char *text, const char *at, const char *word)
{
    const size_t length = strlen(word);
    while (at > text && (at[-1] == ' ' || at[-1] == '\t'))
        at--;
    return at >= text + length && strncmp(at - length, word, length) == 0;
}

static void read_text(struct image *image, const char *text)
{
    static const char mark[] = ".global ";
    const char *name;
    size_t length;
    uint64_t align;
    for (const char *at = strstr(text, mark); at != NULL; at = strstr(at + 1, mark)) {
        const bool instruction = at > text && isalnum((unsigned char)at[-1]); /* ld.global */
        if (instruction || is_behind(text, at, ".extern") || is_behind(text, at, ".ptr"))
            continue;
        const uint64_t bytes = statement(at + sizeof mark - 1, &name, &length, &align);
        add(image, name, length, bytes, align);
    }
    image->runtime |= strstr(text, "vprintf") != NULL || strstr(text, " malloc") != NULL;
}

uint64_t image_local(const char *entry)
{
    uint64_t bytes = 0, align;
    const char *name, *end = entry == NULL ? NULL : strstr(entry + 1, ".entry");
    size_t length;
    for (const char *at = entry == NULL ? NULL : strstr(entry, ".local "); at != NULL && (end == NULL || at < end); at = strstr(at + 1, ".local "))
        bytes += statement(at + 7, &name, &length, &align);
    return bytes;
}

static void read_elf(struct image *image, const char *elf)
{
    Elf64_Ehdr head;
    memcpy(&head, elf, sizeof head);
    const Elf64_Shdr *section = (const Elf64_Shdr *)(elf + head.e_shoff);
    for (unsigned i = 0; head.e_shoff != 0 && i < head.e_shnum; i++) {
        const char *name = elf + section[head.e_shstrndx].sh_offset + section[i].sh_name;
        if (strncmp(name, ".nv.global", 10) != 0)
            continue;
        const uint64_t base = image->bytes = rounded(image->bytes, GRAIN);
        for (unsigned t = 0; t < head.e_shnum; t++)
            for (uint64_t s = 0; section[t].sh_type == SHT_SYMTAB && s < section[t].sh_size / sizeof(Elf64_Sym); s++) {
                const Elf64_Sym *symbol = (const Elf64_Sym *)(elf + section[t].sh_offset) + s;
                const char *of = elf + section[section[t].sh_link].sh_offset + symbol->st_name;
                image->bytes = base + symbol->st_value;
                if (symbol->st_shndx == i && ELF64_ST_TYPE(symbol->st_info) == STT_OBJECT)
                    add(image, of, strlen(of), symbol->st_size, 1);
            }
        image->bytes = base + section[i].sh_size;
    }
}

/* A cubin runs on GPUs of its generation that are no older, PTX on all that are no older. 0: not here. */
static unsigned suits(const struct fatbin_entry *entry, unsigned capability)
{
    if (entry->architecture > capability || (entry->kind == 2 && entry->architecture / 10 != capability / 10))
        return 0;
    return (entry->kind == 2 ? 1000 : 0) + entry->architecture;
}

/* Of the entries, the one that the driver would take. False: none runs on this GPU. */
static bool read_fatbin(struct image *image, const char *at, unsigned capability)
{
    struct fatbin head;
    struct fatbin_entry entry = {0}, found = {0};
    const char *body = NULL;
    memcpy(&head, at, sizeof head);
    const char *end = at + head.header + head.bytes;
    for (at += head.header; at + sizeof entry <= end; at += entry.header + entry.bytes) {
        memcpy(&entry, at, sizeof entry);
        if (entry.header < sizeof entry)
            break;
        if (suits(&entry, capability) > suits(&found, capability)) {
            found = entry;
            body = at + entry.header;
        }
    }
    if (body != NULL && found.kind == 2 && memcmp(body, ELFMAG, SELFMAG) == 0)
        read_elf(image, body);
    else if (body != NULL && found.kind == 1 && found.compressed == 0 && memchr(body, '\0', found.bytes) != NULL)
        read_text(image, body);
    return body != NULL;
}

bool image_is_text(const char *image)
{
    return strchr("/.\n \t\r", image[0]) != NULL && image[0] != '\0';
}

bool image_read(struct image *image, const void *at, unsigned capability)
{
    *image = (struct image){0}; /* what is no image at all may be shorter than a magic number: strncmp does not go past its end */
    if (strncmp(at, WRAPPER_MAGIC, 4) == 0) /* magic, version, the fatbin's address */
        memcpy(&at, (const char *)at + 8, sizeof at);
    if (strncmp(at, FATBIN_MAGIC, 4) == 0)
        return read_fatbin(image, at, capability);
    if (strncmp(at, ELFMAG, SELFMAG) == 0)
        read_elf(image, at);
    else if (image_is_text(at))
        read_text(image, at);
    return true;
}

void image_free(struct image *image)
{
    for (struct variable *next; image->variables != NULL; image->variables = next) {
        next = image->variables->next;
        free(image->variables);
    }
}
