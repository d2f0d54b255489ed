/* image.c - reads the images that modules are loaded from: cubin (ELF), fatbin (a list of cubins and PTX for several kinds of GPU), PTX.
 *
 * Two numbers are wanted: what the variables take, which the driver allocates when it loads the module, and what the code can take at
 * most. The driver itself trusts the sizes that an image states, and gets no length with it, so they are trusted here as well. Of a fatbin
 * it takes one part: a cubin for the GPU's major version and no later minor one, else PTX that is not newer. Of those the largest
 * counts; where it is compressed it is unpacked to be read. Forms: ELF-64 with NVIDIA's machine number 190; the fatbin container as the
 * toolkit's own tools print it. Code takes at most twice its bytes (a function of more than half a page has pages of its own, measured: bench/granularity), and less than its text in PTX.
 */
#include "image.h"
#include "unpack.h"

#include <ctype.h>
#include <elf.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { MACHINE_CUDA = 190, WRAPPER_MAGIC = 0x466243b1, FATBIN_PTX = 1, FATBIN_CUBIN = 2, FATBIN_PARTS_MOST = 4096, CODE_LEAST = 8192 };
#define FATBIN_MAGIC UINT32_C(0xba55ed50)
#define FATBIN_LZ4 UINT64_C(0x2000)
#define FATBIN_ZSTD UINT64_C(0x8000)
#define FATBIN_COMPRESSED UINT64_C(0xe000) /* or in a way that no tool names */
static const uint64_t UNPACKED_MOST = UINT64_C(1) << 30; /* what is read of a compressed part; one so large is not seen in practice */

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
    uint64_t flags, reserved;
    uint64_t whole_bytes; /* of the content when it is not compressed any more */
};

static uint64_t sum(uint64_t one, uint64_t other)
{
    uint64_t both;
    return __builtin_add_overflow(one, other, &both) ? UINT64_MAX : both;
}

static uint64_t code_of(uint64_t bytes)
{
    return bytes > UINT64_MAX / 4 ? UINT64_MAX : 2 * bytes + CODE_LEAST;
}

/* Names of symbols stand between zeros. */
static bool names_heap(const char *names, size_t length)
{
    return memmem(names, length, "\0vprintf", sizeof "\0vprintf") != NULL || memmem(names, length, "\0malloc", sizeof "\0malloc") != NULL;
}

/* Where the text alone is known a function may be all of it. */
static struct image_needs of_text(uint64_t length)
{
    return (struct image_needs){.code = code_of(length), .function = code_of(length)};
}

static bool holds(uint64_t length, uint64_t at, uint64_t bytes)
{
    return at <= length && bytes <= length - at;
}

/* Sections .nv.global (zeros, not in the image) and .nv.global.init; and all that is loaded from the image. The length is UINT64_MAX where
 * nobody states it. */
static struct image_needs of_cubin(const unsigned char *image, uint64_t length)
{
    Elf64_Ehdr header;
    struct image_needs needs = {.known = false};
    if (!holds(length, 0, sizeof header))
        return needs;
    memcpy(&header, image, sizeof header);
    if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_machine != MACHINE_CUDA || header.e_shentsize != sizeof(Elf64_Shdr) ||
        header.e_shstrndx >= header.e_shnum || !holds(length, header.e_shoff, (uint64_t)header.e_shnum * sizeof(Elf64_Shdr)))
        return needs;
    Elf64_Shdr names, section;
    uint64_t loaded = 0, largest = 0;
    memcpy(&names, image + header.e_shoff + (size_t)header.e_shstrndx * sizeof names, sizeof names);
    if (!holds(length, names.sh_offset, names.sh_size))
        return needs;
    for (unsigned i = 0; i < header.e_shnum; i++) {
        memcpy(&section, image + header.e_shoff + (size_t)i * sizeof section, sizeof section);
        if (holds(names.sh_size, section.sh_name, strlen(".nv.global")) &&
            memcmp(image + names.sh_offset + section.sh_name, ".nv.global", strlen(".nv.global")) == 0)
            needs.variables = sum(needs.variables, section.sh_size);
        else if (section.sh_type == SHT_PROGBITS) {
            loaded = sum(loaded, section.sh_size);
            largest = section.sh_size > largest ? section.sh_size : largest;
        } else if (section.sh_type == SHT_STRTAB && holds(length, section.sh_offset, section.sh_size))
            needs.heap = needs.heap || names_heap((const char *)image + section.sh_offset, section.sh_size);
    }
    needs.code = code_of(loaded);
    needs.function = code_of(largest);
    needs.known = true;
    return needs;
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
static uint64_t variables_of_ptx(const char *text)
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

static struct image_needs of_ptx(const char *text)
{
    struct image_needs needs = of_text(strlen(text));
    needs.variables = variables_of_ptx(text);
    needs.known = true;
    needs.heap = strstr(text, " vprintf") != NULL || strstr(text, " malloc") != NULL;
    return needs;
}

/* The text of a part ends with the part, perhaps without a zero. */
static struct image_needs of_ptx_part(const unsigned char *text, uint64_t length)
{
    char *copy = strndup((const char *)text, length);
    struct image_needs needs = of_text(length);
    if (copy != NULL)
        needs = of_ptx(copy);
    free(copy);
    return needs;
}

static struct image_needs of_content(unsigned kind, const unsigned char *content, uint64_t length)
{
    if (kind == FATBIN_CUBIN && length >= SELFMAG && memcmp(content, ELFMAG, SELFMAG) == 0)
        return of_cubin(content, length);
    return kind == FATBIN_PTX ? of_ptx_part(content, length) : of_text(length);
}

/* Of a part that cannot be unpacked only the length is known. */
static struct image_needs of_packed(const struct part *part, const unsigned char *content)
{
    const uint64_t compression = part->flags & FATBIN_COMPRESSED, packed = part->compressed_bytes != 0 ? part->compressed_bytes : part->bytes;
    struct image_needs needs = of_text(part->whole_bytes > part->bytes ? part->whole_bytes : part->bytes);
    if (part->whole_bytes == 0 || part->whole_bytes > UNPACKED_MOST || packed > part->bytes)
        return needs;
    unsigned char *whole = malloc(part->whole_bytes);
    size_t length = 0;
    if (whole != NULL && compression == FATBIN_LZ4)
        length = unpack_lz4(content, packed, whole, part->whole_bytes);
    else if (whole != NULL && compression == FATBIN_ZSTD)
        length = unpack_zstd(content, packed, whole, part->whole_bytes);
    if (length == part->whole_bytes)
        needs = of_content(part->kind, whole, length);
    free(whole);
    return needs;
}

static struct image_needs of_part(const struct part *part, const unsigned char *content)
{
    const bool packed = (part->flags & FATBIN_COMPRESSED) != 0 || part->compressed_bytes != 0;
    return packed ? of_packed(part, content) : of_content(part->kind, content, part->bytes);
}

/* How well a part suits the GPU. The driver takes the best. */
enum suits { NOT_AT_ALL, AS_TEXT, AS_IT_IS };
static enum suits suits(const struct part *part, unsigned capability)
{
    bool text = part->kind != FATBIN_CUBIN;
    if (capability == 0)
        return AS_IT_IS;
    if (text)
        return part->architecture <= capability ? AS_TEXT : NOT_AT_ALL;
    return part->architecture / 10 == capability / 10 && part->architecture <= capability ? AS_IT_IS : NOT_AT_ALL;
}

static void most_of(struct image_needs *most, const struct image_needs *needs)
{
    most->variables = needs->variables > most->variables ? needs->variables : most->variables;
    most->code = needs->code > most->code ? needs->code : most->code;
    most->function = needs->function > most->function ? needs->function : most->function;
    most->known = most->known && needs->known;
    most->heap = most->heap || needs->heap;
}

static struct image_needs of_fatbin(const unsigned char *image, unsigned capability)
{
    struct fatbin header;
    struct image_needs most = {.known = true};
    enum suits best = NOT_AT_ALL;
    memcpy(&header, image, sizeof header);
    uint64_t at = header.header_bytes, end = header.header_bytes + header.bytes;
    for (unsigned i = 0; i < FATBIN_PARTS_MOST && at + offsetof(struct part, reserved) <= end; i++) {
        struct part part = {.kind = 0};
        uint32_t header_bytes;
        memcpy(&header_bytes, image + at + offsetof(struct part, header_bytes), sizeof header_bytes);
        if (header_bytes == 0)
            break;
        memcpy(&part, image + at, header_bytes < sizeof part ? offsetof(struct part, reserved) : sizeof part);
        enum suits well = suits(&part, capability);
        if (well > best)
            most = (struct image_needs){.known = true};
        if (well >= best && well != NOT_AT_ALL) {
            struct image_needs needs = of_part(&part, image + at + header_bytes);
            best = well;
            most_of(&most, &needs);
        }
        at += header_bytes + part.bytes;
    }
    return best == NOT_AT_ALL && capability != 0 ? of_fatbin(image, 0) : most; /* the driver may know better: then any */
}

struct image_needs image_read(const void *image, unsigned capability)
{
    uint32_t magic;
    if (image == NULL)
        return (struct image_needs){.known = true};
    if (strncmp(image, ELFMAG, SELFMAG) == 0)
        return of_cubin(image, UINT64_MAX);
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
    return magic == FATBIN_MAGIC ? of_fatbin(image, capability) : (struct image_needs){.known = false};
}
