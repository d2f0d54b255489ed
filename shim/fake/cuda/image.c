/* image.c - the variables and kernels of a module's image: PTX text, cubins and fatbins, of which only the uncompressed.
 *
 * A variable of PTX is a statement ".global [.align N] [.vN] .TYPE name[N]..."; one behind .extern is another module's, and
 * ".ptr .global" belongs to a parameter. A cubin has them as objects in the sections .nv.global and .nv.global.init.
 *
 * The length of an image is not passed, and a damaged one states a wrong length: what is not text is read by peek alone.
 */
#define _GNU_SOURCE
#include "internal.h"

#include <ctype.h>
#include <elf.h>
#include <errno.h>
#include <stdlib.h>
#include <sys/uio.h>
#include <unistd.h>

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

#define IMAGE_MOST ((uint64_t)1 << 30) /* bytes of one; guessed */

/* False: there is no such memory. The kernel copies, and returns an error instead of a SIGSEGV. */
static bool peek(uintptr_t from, void *to, size_t bytes)
{
    const struct iovec here = {to, bytes}, there = {(void *)from, bytes};
    const ssize_t got = process_vm_readv(getpid(), &here, 1, &there, 1, 0);
    if (got < 0 && (errno == EPERM || errno == ENOSYS)) { /* a sandbox that forbids it */
        memcpy(to, (const void *)from, bytes);
        return true;
    }
    return got == (ssize_t)bytes;
}

/* False: it is longer than any that is kept, or is not there. */
static bool peek_name(uintptr_t from, char name[256])
{
    for (size_t i = 0; i < 256 && peek(from + i, &name[i], 1); i++)
        if (name[i] == '\0')
            return true;
    return false;
}

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

static bool peek_section(uintptr_t elf, const Elf64_Ehdr *head, uint32_t number, Elf64_Shdr *section)
{
    return number < head->e_shnum && peek(elf + head->e_shoff + number * sizeof *section, section, sizeof *section);
}

/* The variables of a section, which begins at base. */
static bool read_symbols(struct image *image, uintptr_t elf, const Elf64_Ehdr *head, const Elf64_Shdr *table, unsigned number, uint64_t base, uint64_t capacity)
{
    Elf64_Shdr names;
    Elf64_Sym symbol;
    char name[256];
    CHECK(table->sh_size <= IMAGE_MOST && peek_section(elf, head, table->sh_link, &names), false);
    for (uint64_t at = 0; at + sizeof symbol <= table->sh_size; at += sizeof symbol) {
        CHECK(peek(elf + table->sh_offset + at, &symbol, sizeof symbol), false);
        if (symbol.st_shndx != number || ELF64_ST_TYPE(symbol.st_info) != STT_OBJECT)
            continue;
        CHECK(symbol.st_value <= capacity && symbol.st_size <= capacity - symbol.st_value, false);
        image->bytes = base + symbol.st_value;
        if (peek_name(elf + names.sh_offset + symbol.st_name, name))
            add(image, name, strlen(name), symbol.st_size, 1);
    }
    return true;
}

static bool read_elf(struct image *image, uintptr_t elf)
{
    Elf64_Ehdr head;
    Elf64_Shdr names, section, table;
    char name[256];
    CHECK(peek(elf, &head, sizeof head), false);
    CHECK(head.e_shoff == 0 || peek_section(elf, &head, head.e_shstrndx, &names), false);
    for (unsigned i = 0; head.e_shoff != 0 && i < head.e_shnum; i++) {
        CHECK(peek_section(elf, &head, i, &section), false);
        if (!peek_name(elf + names.sh_offset + section.sh_name, name) || strncmp(name, ".nv.global", 10) != 0)
            continue;
        const uint64_t base = rounded(image->bytes, GRAIN);
        CHECK(section.sh_size <= ARENA_BYTES / 2, false);
        for (unsigned t = 0; t < head.e_shnum; t++) {
            CHECK(peek_section(elf, &head, t, &table), false);
            CHECK(table.sh_type != SHT_SYMTAB || read_symbols(image, elf, &head, &table, i, base, section.sh_size), false);
        }
        image->bytes = base + section.sh_size;
    }
    return true;
}

/* A cubin runs on GPUs of its generation that are no older, PTX on all that are no older. 0: not here. */
static unsigned suits(const struct fatbin_entry *entry, unsigned capability)
{
    if (entry->architecture > capability || (entry->kind == 2 && entry->architecture / 10 != capability / 10))
        return 0;
    return (entry->kind == 2 ? 1000 : 0) + entry->architecture;
}

static bool read_part(struct image *image, const struct fatbin_entry *part, uintptr_t body)
{
    char magic[SELFMAG];
    CHECK(part->bytes >= SELFMAG && peek(body, magic, sizeof magic), false);
    if (part->kind == 2) /* what is compressed does not begin so */
        return memcmp(magic, ELFMAG, SELFMAG) != 0 || read_elf(image, body);
    char *text = part->kind == 1 && part->compressed == 0 ? calloc(1, part->bytes + 1) : NULL;
    const bool there = text == NULL || peek(body, text, part->bytes);
    if (there && text != NULL)
        read_text(image, text);
    free(text);
    return there;
}

/* Of the entries, the one that the driver would take. */
static CUresult read_fatbin(struct image *image, uintptr_t at, unsigned capability)
{
    struct fatbin head;
    struct fatbin_entry entry, found = {0};
    uintptr_t body = 0;
    CHECK(peek(at, &head, sizeof head) && memcmp(&head, FATBIN_MAGIC, 4) == 0, CUDA_ERROR_INVALID_IMAGE);
    CHECK(head.header >= sizeof head && head.bytes <= IMAGE_MOST, CUDA_ERROR_INVALID_IMAGE);
    at += head.header;
    for (uint64_t left = head.bytes, bytes; left >= sizeof entry; at += bytes, left -= bytes) {
        CHECK(peek(at, &entry, sizeof entry) && entry.header >= sizeof entry && entry.bytes <= left, CUDA_ERROR_INVALID_IMAGE);
        bytes = entry.header + entry.bytes;
        CHECK(bytes <= left, CUDA_ERROR_INVALID_IMAGE);
        if (suits(&entry, capability) > suits(&found, capability)) {
            found = entry;
            body = at + entry.header;
        }
    }
    CHECK(body != 0, CUDA_ERROR_NO_BINARY_FOR_GPU);
    return read_part(image, &found, body) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE;
}

bool image_is_text(const char *image)
{
    return strchr("/.\n \t\r", image[0]) != NULL && image[0] != '\0';
}

CUresult image_read(struct image *image, const void *at, unsigned capability)
{
    *image = (struct image){0}; /* what is no image at all may be shorter than a magic number: strncmp does not go past its end */
    const bool wrapped = strncmp(at, WRAPPER_MAGIC, 4) == 0; /* magic, version, the fatbin's address */
    CHECK(!wrapped || peek((uintptr_t)at + 8, &at, sizeof at), CUDA_ERROR_INVALID_IMAGE);
    if (wrapped || strncmp(at, FATBIN_MAGIC, 4) == 0)
        return read_fatbin(image, (uintptr_t)at, capability);
    if (strncmp(at, ELFMAG, SELFMAG) == 0)
        return must(read_elf(image, (uintptr_t)at), CUDA_ERROR_INVALID_IMAGE);
    if (image_is_text(at))
        read_text(image, at);
    return CUDA_SUCCESS;
}

void image_free(struct image *image)
{
    for (struct variable *next; image->variables != NULL; image->variables = next) {
        next = image->variables->next;
        free(image->variables);
    }
}
