/* image.c - reads the images that modules are loaded from: cubin (ELF), fatbin (a list of cubins and PTX for several kinds of GPU), PTX.
 *
 * Only one number is wanted: what the variables take, which the driver allocates when it loads the module. The driver itself trusts
 * the sizes that an image states, and gets no length with it, so they are trusted here as well. Of a fatbin the largest part
 * counts: the driver loads one of them. Forms: ELF-64 with NVIDIA's machine number 190; the fatbin container as the toolkit's own
 * tools print it.
 */
#include "image.h"

#include <ctype.h>
#include <elf.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { MACHINE_CUDA = 190, WRAPPER_MAGIC = 0x466243b1, FATBIN_PTX = 1, FATBIN_CUBIN = 2, FATBIN_PARTS_MOST = 4096 };
#define FATBIN_MAGIC UINT32_C(0xba55ed50)
#define FATBIN_COMPRESSED UINT64_C(0xe000) /* LZ4, zstd, and a third that no tool names */

struct wrapper {
    uint32_t magic, version;
    const void *data;
    const void *file;
};

struct fatbin {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t bytes; /* of the parts behind the header */
};

struct part {
    uint16_t kind, version;
    uint32_t header_bytes;
    uint64_t bytes; /* behind this header, padding included */
    uint32_t compressed_bytes, unknown;
    uint32_t minor_major, architecture;
    uint32_t name_at, name_bytes;
    uint64_t flags;
};

static uint64_t sum(uint64_t one, uint64_t other)
{
    uint64_t both;
    return __builtin_add_overflow(one, other, &both) ? UINT64_MAX : both;
}

/* Sections .nv.global (zeros, not in the image) and .nv.global.init. */
static uint64_t of_cubin(const unsigned char *image, bool *known)
{
    Elf64_Ehdr header;
    uint64_t bytes = 0;
    memcpy(&header, image, sizeof header);
    if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_machine != MACHINE_CUDA || header.e_shentsize != sizeof(Elf64_Shdr) ||
        header.e_shstrndx >= header.e_shnum) {
        *known = false;
        return 0;
    }
    Elf64_Shdr names, section;
    memcpy(&names, image + header.e_shoff + (size_t)header.e_shstrndx * sizeof names, sizeof names);
    for (unsigned i = 0; i < header.e_shnum; i++) {
        memcpy(&section, image + header.e_shoff + (size_t)i * sizeof section, sizeof section);
        if (section.sh_name < names.sh_size &&
            strncmp((const char *)image + names.sh_offset + section.sh_name, ".nv.global", strlen(".nv.global")) == 0)
            bytes = sum(bytes, section.sh_size);
    }
    return bytes;
}

static const char *skip_blanks(const char *at)
{
    for (;;) {
        while (isspace((unsigned char)*at))
            at++;
        if (at[0] == '/' && at[1] == '/')
            at += strcspn(at, "\n");
        else if (at[0] == '/' && at[1] == '*')
            at = strstr(at, "*/") != NULL ? strstr(at, "*/") + 2 : at + strlen(at);
        else
            return at;
    }
}

/* .b8 .u32 .f64 .v4 ...: bytes of a type, or how many of them a vector has. */
static uint64_t type_bytes(const char *at, bool *vector)
{
    *vector = at[1] == 'v';
    unsigned long bits = isalpha((unsigned char)at[1]) ? strtoul(at + 2 + (at[2] == 'f'), NULL, 10) : 0;
    return *vector ? bits : bits / 8;
}

/* Behind `.global`: [.attribute] [.align N] [.v4] .type name [N][M] [= {...}], more names; one number for all of it. */
static uint64_t of_declaration(const char *at)
{
    uint64_t bytes = 1, total = 0, one = 0;
    for (at = skip_blanks(at); *at != '\0' && *at != ';' && *at != '='; at = skip_blanks(at)) {
        if (strncmp(at, ".align", 6) == 0) {
            at = skip_blanks(at + 6);
            at += strspn(at, "0123456789");
        } else if (*at == '.') {
            bool vector;
            uint64_t of = type_bytes(at, &vector);
            if (of > 0)
                bytes *= of;
            at += 1 + strcspn(at + 1, " \t\r\n.;=");
        } else if (*at == '[') {
            char *end;
            uint64_t count = strtoull(skip_blanks(at + 1), &end, 0);
            if (__builtin_mul_overflow(one, count, &one))
                return UINT64_MAX;
            at = *end == ']' ? end + 1 : end + strcspn(end, "];");
            at += *at == ']';
        } else if (*at == ',') {
            total = sum(total, one);
            at++;
        } else {
            one = bytes;
            at += 1 + strcspn(at + 1, " \t\r\n[,;=");
        }
    }
    return sum(total, one);
}

/* `.global` begins a word: in `ld.global` it does not. What is declared `.extern` is another module's. */
static uint64_t of_ptx(const char *text)
{
    uint64_t bytes = 0;
    for (const char *at = text; (at = strstr(at, ".global")) != NULL; at += 7) {
        const char *line = at;
        while (line > text && line[-1] != '\n' && line[-1] != ';' && line[-1] != '}')
            line--;
        bool word = (at == text || isspace((unsigned char)at[-1]) || strchr(";}/", at[-1]) != NULL) && isspace((unsigned char)at[7]);
        bool elsewhere = false, comment = false;
        for (const char *before = line; before < at; before++) {
            elsewhere = elsewhere || strncmp(before, ".extern", 7) == 0;
            comment = comment || strncmp(before, "//", 2) == 0;
        }
        if (word && !elsewhere && !comment)
            bytes = sum(bytes, of_declaration(at + 7));
    }
    return bytes;
}

/* The text of a part ends with the part, perhaps without a zero. */
static uint64_t of_ptx_part(const unsigned char *text, uint64_t length, bool *known)
{
    char *copy = strndup((const char *)text, length);
    uint64_t bytes = copy != NULL ? of_ptx(copy) : 0;
    *known = *known && copy != NULL;
    free(copy);
    return bytes;
}

static uint64_t of_fatbin(const unsigned char *image, bool *known)
{
    struct fatbin header;
    uint64_t most = 0, at;
    memcpy(&header, image, sizeof header);
    at = header.header_bytes;
    for (unsigned i = 0; i < FATBIN_PARTS_MOST && at + sizeof(struct part) <= header.header_bytes + header.bytes; i++) {
        struct part part;
        uint64_t bytes = 0;
        memcpy(&part, image + at, sizeof part);
        const unsigned char *content = image + at + part.header_bytes;
        if (part.header_bytes == 0)
            break;
        if ((part.flags & FATBIN_COMPRESSED) != 0 || part.compressed_bytes != 0)
            *known = false;
        else if (part.kind == FATBIN_CUBIN && memcmp(content, ELFMAG, SELFMAG) == 0)
            bytes = of_cubin(content, known);
        else if (part.kind == FATBIN_PTX)
            bytes = of_ptx_part(content, part.bytes, known);
        most = bytes > most ? bytes : most;
        at += part.header_bytes + part.bytes;
    }
    return most;
}

uint64_t image_variables(const void *image, bool *known)
{
    uint32_t magic;
    *known = true;
    if (image == NULL)
        return 0;
    if (strncmp(image, ELFMAG, SELFMAG) == 0)
        return of_cubin(image, known);
    if (strnlen(image, sizeof magic) == sizeof magic && isascii(*(const char *)image) &&
        (isspace(*(const unsigned char *)image) || *(const char *)image == '.' || *(const char *)image == '/'))
        return of_ptx(image);
    memcpy(&magic, image, sizeof magic);
    if (magic == WRAPPER_MAGIC) {
        struct wrapper wrapper;
        memcpy(&wrapper, image, sizeof wrapper);
        image = wrapper.data;
        memcpy(&magic, image, sizeof magic);
    }
    if (magic == FATBIN_MAGIC)
        return of_fatbin(image, known);
    *known = false;
    return 0;
}
