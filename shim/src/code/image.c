/* image.c - reads the images that modules are loaded from: cubin (ELF), fatbin (a list of cubins and PTX for several kinds of GPU), PTX.
 *
 * It computes two sizes: of the variables, which the driver allocates when it loads the module, and of the code at most.
 * The driver itself trusts the sizes that an image in memory states, and gets no length with it, so they are trusted here as well; of a
 * file the length is known, and nothing behind it is read. Of a fatbin it loads one part: a cubin for the GPU's major version and no later
 * minor one, else PTX that is not newer. Of those the largest counts; where it is compressed it is unpacked to be read. Forms: ELF-64 with
 * NVIDIA's machine number 190; the fatbin container as the toolkit's own tools print it. Code takes at most twice its bytes (a function of
 * more than half a page has pages of its own, measured: bench/granularity), and less than its text in PTX.
 */
#include "code/image.h"
#include "code/ptx.h"
#include "code/unpack.h"

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

static bool contains(uint64_t length, uint64_t at, uint64_t bytes)
{
    return at <= length && bytes <= length - at;
}

/* Sections .nv.global (zeros, not in the image) and .nv.global.init; and all that is loaded from the image. The length is UINT64_MAX where
 * it is unknown. */
static struct image_needs of_cubin(const unsigned char *image, uint64_t length)
{
    Elf64_Ehdr header;
    struct image_needs needs = {.known = false};
    if (!contains(length, 0, sizeof header))
        return needs;
    memcpy(&header, image, sizeof header);
    if (header.e_ident[EI_CLASS] != ELFCLASS64 || header.e_machine != MACHINE_CUDA || header.e_shentsize != sizeof(Elf64_Shdr) ||
        header.e_shstrndx >= header.e_shnum || !contains(length, header.e_shoff, (uint64_t)header.e_shnum * sizeof(Elf64_Shdr)))
        return needs;
    Elf64_Shdr names, section;
    uint64_t loaded = 0, largest = 0;
    memcpy(&names, image + header.e_shoff + (size_t)header.e_shstrndx * sizeof names, sizeof names);
    if (!contains(length, names.sh_offset, names.sh_size))
        return needs;
    for (unsigned i = 0; i < header.e_shnum; i++) {
        memcpy(&section, image + header.e_shoff + (size_t)i * sizeof section, sizeof section);
        if (contains(names.sh_size, section.sh_name, strlen(".nv.global")) &&
            memcmp(image + names.sh_offset + section.sh_name, ".nv.global", strlen(".nv.global")) == 0)
            needs.variables = sum(needs.variables, section.sh_size);
        else if (section.sh_type == SHT_PROGBITS) {
            loaded = sum(loaded, section.sh_size);
            largest = section.sh_size > largest ? section.sh_size : largest;
        } else if (section.sh_type == SHT_STRTAB && contains(length, section.sh_offset, section.sh_size))
            needs.heap = needs.heap || names_heap((const char *)image + section.sh_offset, section.sh_size);
    }
    needs.code = code_of(loaded);
    needs.function = code_of(largest);
    needs.known = true;
    return needs;
}

/* Is there nothing but zeros behind the zero that ends a text? Whether the driver reads on there is not known. */
static bool ends(const char *text, uint64_t at, uint64_t length)
{
    while (length != IMAGE_UNSTATED && at < length && text[at] == '\0')
        at++;
    return length == IMAGE_UNSTATED || at == length;
}

static struct image_needs of_ptx(const char *text, uint64_t length)
{
    const struct ptx_needs needs = ptx_read(text, length);
    const uint64_t read = strnlen(text, length);
    struct image_needs of = of_text(read);
    of.variables = needs.variables;
    of.known = needs.known && ends(text, read, length);
    of.heap = needs.heap;
    return of;
}

static struct image_needs of_content(unsigned kind, const unsigned char *content, uint64_t length)
{
    if (kind == FATBIN_CUBIN && length >= SELFMAG && memcmp(content, ELFMAG, SELFMAG) == 0)
        return of_cubin(content, length);
    return kind == FATBIN_PTX ? of_ptx((const char *)content, length) : of_text(length);
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

/* One part, if it lies before `end`. Of its header the older form has no more than what is before `reserved`; one of no bytes ends the parts. */
static bool part_at(const unsigned char *image, uint64_t at, uint64_t end, struct part *part)
{
    const size_t least = offsetof(struct part, reserved);
    *part = (struct part){.kind = 0};
    if (!contains(end, at, least))
        return false;
    memcpy(part, image + at, least);
    if (part->header_bytes == 0)
        return true;
    if (part->header_bytes < least || !contains(end, at, part->header_bytes))
        return false;
    memcpy(part, image + at, part->header_bytes < sizeof *part ? least : sizeof *part);
    return contains(end, at + part->header_bytes, part->bytes);
}

/* A part that is cut off ends what can be read: then it is not known what the driver finds there. */
static struct image_needs of_fatbin(const unsigned char *image, uint64_t length, unsigned capability)
{
    struct fatbin header;
    struct image_needs most = {.known = true};
    enum suits best = NOT_AT_ALL;
    if (!contains(length, 0, sizeof header))
        return (struct image_needs){.known = false};
    memcpy(&header, image, sizeof header);
    uint64_t at = header.header_bytes, end = sum(at, header.bytes);
    bool whole = end <= length;
    end = whole ? end : length;
    struct part part = {.header_bytes = 1};
    for (unsigned i = 0; at < end && part.header_bytes != 0; i++) {
        if (i == FATBIN_PARTS_MOST || !part_at(image, at, end, &part)) {
            whole = false;
            break;
        }
        if (part.header_bytes == 0)
            break;
        enum suits well = suits(&part, capability);
        if (well > best)
            most = (struct image_needs){.known = true};
        if (well >= best && well != NOT_AT_ALL) {
            struct image_needs needs = of_part(&part, image + at + part.header_bytes);
            best = well;
            most_of(&most, &needs);
        }
        at += part.header_bytes + part.bytes;
    }
    most.known = most.known && whole;
    return best == NOT_AT_ALL && capability != 0 ? of_fatbin(image, length, 0) : most; /* the driver may know better: then any */
}

static bool is_text(const char *image, uint64_t length)
{
    const size_t most = length < sizeof(uint32_t) ? (size_t)length : sizeof(uint32_t);
    return strnlen(image, most) == sizeof(uint32_t) && isascii(*image) && (isspace((unsigned char)*image) || *image == '.' || *image == '/');
}

struct image_needs image_read(const void *image, uint64_t length, unsigned capability)
{
    uint32_t magic;
    if (image == NULL)
        return (struct image_needs){.known = true};
    if (contains(length, 0, SELFMAG) && strncmp(image, ELFMAG, SELFMAG) == 0)
        return of_cubin(image, length);
    if (is_text(image, length))
        return of_ptx(image, length);
    if (!contains(length, 0, sizeof magic))
        return (struct image_needs){.known = false};
    memcpy(&magic, image, sizeof magic);
    if (magic == WRAPPER_MAGIC && length == IMAGE_UNSTATED) { /* its pointers are of this process, so it is in no file */
        struct wrapper wrapper;
        memcpy(&wrapper, image, sizeof wrapper);
        image = wrapper.data;
        memcpy(&magic, image, sizeof magic);
    }
    return magic == FATBIN_MAGIC ? of_fatbin(image, length, capability) : (struct image_needs){.known = false};
}
