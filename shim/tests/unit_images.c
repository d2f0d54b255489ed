/* unit_images.c - sizes read from images of modules: PTX, cubins and fatbins. A part of unit_code. */
#include <assert.h>
#include <elf.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../src/code/image.h"
#include "unit_images.h"

#undef NDEBUG

static uint64_t variables(const void *image, bool expect_known)
{
    struct image_needs needs = image_read(image, IMAGE_UNSTATED, 0);
    assert(needs.known == expect_known);
    return needs.variables;
}

static void ptx_states_its_variables(void)
{
    static const struct {
        const char *text;
        uint64_t bytes;
    } of[] = {
        {".version 8.0\n.target sm_90\n.address_size 64\n", 0},
        {"//\n// made by hand\n.global .align 4 .b8 a[16];\n", 16},
        {".visible .global .align 16 .v4 .f32 a[10];", 160},
        {".global .u64 a, b[2], c[3][4];", 8 * (1 + 2 + 12)},
        {".global .u8 a[4] = {1, 2, 3, 4};\n.global .f64 b;", 12},
        {".global .f16 a[100]; .global .b128 b;", 216},
        {".extern .global .u32 a[1000000];\n.global .u32 b;", 4000004},
        {".extern .global .b8 a[], b[][4];", 0},
        {".visible .entry k() { ld.global.u32 %r1, [%rd1]; st.global.v4.f32 [%rd1], {%f1}; ret; }", 0},
        {"// .global .u32 a[1000];\n", 0},
        {".global .b8 a[3221225472];", UINT64_C(3221225472)},
        {".global .b8 a[18446744073709551615][2];", UINT64_MAX},
        {"/* see http://x */ .visible .global .b8 a[5000];", 5000},
        {"/* .extern no */ .visible .global .b8 a[5000];", 5000},
        {"// not /* the start of one\n.global .b8 a[5000]; // */\n", 5000},
        {".file 1 \"/* .global .b8 a[1]; // \"\n.global .b8 a[5000];", 5000},
        {".version 8.0 .target sm_90 .address_size 64 .global .b8 a[5000];", 5000},
        {".visible .global.b8 a[5000];.global\n.align\n8 .b8/**/b[8];", 5008},
        {".global .b8 a[500*1048576], b[(1 << 10) + 0x10 - 0b11 * 02%5];", 500 * 1048576 + 1024 + 16 - 1},
        {".global .b8 a[16 - 2 - 1], b[100U];", 113},
        {".global .u32 a[] = {1, 2, (3), 4+b}; .global .u8 b[] = \"abc\";", 16 + 5},
        {".global .align 4 .v2 .b16 a[][2] = {{{1, 2}, {3, 4}}, {{5, 6}, {7, 8}}}, c;", 16 + 4},
        {".global .b8 a = 1, b[3] = {mask(0xff)(f), 0, 0};", 4},
        {".global .attribute(.unified(1, 2)) .b8 a; .global .align 256 .b8 b[2];", 258},
        {".visible .entry k(.param .u64 .ptr .global .align 4 p) { call (r), f, (p); } .weak .global .b8 a[7];", 7},
        {".extern .func f; .global .b8 a[9]; .extern .shared .b8 s[]; .common .global .b8 c[1];", 10},
    };
    for (unsigned i = 0; i < sizeof of / sizeof *of; i++)
        if (!image_read(of[i].text, IMAGE_UNSTATED, 0).known || variables(of[i].text, true) != of[i].bytes) {
            fprintf(stderr, "%s: %llu bytes\n", of[i].text, (unsigned long long)image_read(of[i].text, IMAGE_UNSTATED, 0).variables);
            exit(1);
        }
}

/* What is not understood is not small: at least what was understood, and unknown. */
static void ptx_that_is_not_understood_is_unknown(void)
{
    static const struct {
        const char *text;
        uint64_t least;
    } of[] = {
        {".global", 0},
        {".global .b8 a[", 0},
        {".global .align", 0},
        {".global /* not ended", 0},
        {".global .b8 a[12 ? 3 : 4];", 0},
        {".global .b8 a[N];", 0},
        {".global .b8 a[1/0];", 0},
        {".global .b8 a[-1];", 0},
        {".global .b8 a[1] .global .b8 b[5000];", 5000},
        {".global .b8 a<100>[5000];", 0},
        {".global .b8 a[];", 0},
        {".global .b8 a[][] = {1};", 0},
        {".global .new a[5000];", 5000},
        {".global a[5000];", 5000},
        {".global .b8 a[5] = {1, 2", 5},
        {".global .b8 5;", 0},
        {" #define X .global\nX .b8 a[5000];", 0},
        {".file 1 \"C:\\\" .global .b8 a[5000]; \"\n", 0},
        {".file 1 \"not ended\n.global .b8 a[5000];", 0},
        {" (.global .b8 a[5000];", 0},
        {" ld .global .u32 r, [a];", 0},
    };
    for (unsigned i = 0; i < sizeof of / sizeof *of; i++) {
        struct image_needs needs = image_read(of[i].text, strlen(of[i].text) + 1, 0);
        if (needs.known || needs.variables < of[i].least) {
            fprintf(stderr, "%s: %llu bytes, known %d\n", of[i].text, (unsigned long long)needs.variables, needs.known);
            exit(1);
        }
    }
}

struct cubin {
    Elf64_Ehdr header;
    Elf64_Shdr section[5];
    char names[64];
};

static struct cubin cubin_of(uint64_t zeros, uint64_t set)
{
    static const char names[] = "\0.shstrtab\0.text.k\0.nv.global\0.nv.global.init";
    struct cubin cubin = {.header = {.e_ident = ELFMAG, .e_machine = 190, .e_shentsize = sizeof(Elf64_Shdr), .e_shnum = 5,
                                     .e_shstrndx = 1, .e_shoff = offsetof(struct cubin, section)}};
    cubin.header.e_ident[EI_CLASS] = ELFCLASS64;
    cubin.section[1] = (Elf64_Shdr){.sh_name = 1, .sh_offset = offsetof(struct cubin, names), .sh_size = sizeof names};
    cubin.section[2] = (Elf64_Shdr){.sh_name = 11, .sh_size = 123456};
    cubin.section[3] = (Elf64_Shdr){.sh_name = 19, .sh_type = SHT_NOBITS, .sh_size = zeros};
    cubin.section[4] = (Elf64_Shdr){.sh_name = 30, .sh_type = SHT_PROGBITS, .sh_size = set};
    memcpy(cubin.names, names, sizeof names);
    return cubin;
}

struct fatbin {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t bytes;
    struct {
        uint16_t kind, version;
        uint32_t header_bytes;
        uint64_t bytes;
        uint32_t compressed_bytes, rest[5];
        uint64_t flags, more;
        struct cubin cubin;
    } part[2];
};

/* Of two parts, each with so many bytes of variables. */
static struct fatbin fatbin_of(const uint16_t kinds[2], const uint64_t zeros[2])
{
    struct fatbin fatbin = {.magic = 0xba55ed50, .version = 1, .header_bytes = 16, .bytes = sizeof fatbin.part};
    for (unsigned i = 0; i < 2; i++) {
        fatbin.part[i].kind = kinds[i];
        fatbin.part[i].header_bytes = (uint32_t)((char *)&fatbin.part[0].cubin - (char *)&fatbin.part[0]);
        fatbin.part[i].bytes = sizeof fatbin.part[0] - fatbin.part[i].header_bytes;
        fatbin.part[i].cubin = cubin_of(zeros[i], 0);
    }
    return fatbin;
}

static void a_cubin_states_its_variables(void)
{
    struct cubin cubin = cubin_of(UINT64_C(3) << 30, 100);
    assert(variables(&cubin, true) == (UINT64_C(3) << 30) + 100);
    cubin.header.e_machine = 62;
    assert(variables(&cubin, false) == 0);
    cubin = cubin_of(UINT64_MAX - 10, 100);
    assert(variables(&cubin, true) == UINT64_MAX);
}

/* Of parts for several GPUs the driver loads one. */
static void a_fatbin_states_the_most_that_one_of_its_parts_takes(void)
{
    struct fatbin fatbin = fatbin_of((const uint16_t[]){2, 2}, (const uint64_t[]){1000, 2000});
    const struct {
        uint32_t magic, version;
        const void *data, *file;
    } wrapper = {0x466243b1, 1, &fatbin, NULL};
    assert(variables(&fatbin, true) == 2000);
    assert(variables(&wrapper, true) == 2000);
    fatbin.part[1].flags = 0x2000;
    assert(variables(&wrapper, false) == 1000);
    fatbin.part[0].header_bytes = 0;
    assert(variables(&wrapper, true) == 0);
    assert(variables("\x01\x02\x03\x04", false) == 0 && variables(NULL, true) == 0);
}

/* The container as the toolkit 13.5 writes it by default: cubins as they are, PTX compressed by zstd. */
static void of_a_fatbin_the_part_counts_that_the_gpu_takes(void)
{
    struct whole {
        uint16_t kind, version;
        uint32_t header_bytes;
        uint64_t bytes;
        uint32_t compressed_bytes, unknown, version_of, architecture, name[2];
        uint64_t flags, reserved, whole_bytes;
        struct cubin cubin;
    };
    struct {
        uint32_t magic;
        uint16_t version, header_bytes;
        uint64_t bytes;
        struct whole part[3];
    } fatbin = {.magic = 0xba55ed50, .version = 1, .header_bytes = 16, .bytes = sizeof fatbin.part};
    const unsigned architectures[] = {80, 90, 90};
    for (unsigned i = 0; i < 3; i++) {
        fatbin.part[i] = (struct whole){.kind = 2, .header_bytes = offsetof(struct whole, cubin), .bytes = sizeof(struct cubin),
                                        .architecture = architectures[i], .cubin = cubin_of(1000 * (i + 1), 0)};
    }
    fatbin.part[2].kind = 1;
    fatbin.part[2].flags = 0x8011;
    fatbin.part[2].compressed_bytes = 481;
    fatbin.part[2].whole_bytes = 1000000;
    assert(image_read(&fatbin, IMAGE_UNSTATED, 86).variables == 1000 && image_read(&fatbin, IMAGE_UNSTATED, 86).known);
    assert(image_read(&fatbin, IMAGE_UNSTATED, 90).variables == 2000 && image_read(&fatbin, IMAGE_UNSTATED, 90).known);
    struct image_needs later = image_read(&fatbin, IMAGE_UNSTATED, 100);
    assert(later.variables == 0 && !later.known && later.code >= 1000000);
    assert(image_read(&fatbin, IMAGE_UNSTATED, 75).variables == 2000 && !image_read(&fatbin, IMAGE_UNSTATED, 0).known); /* none suits: any may be taken */
}

static void an_image_states_what_its_code_takes_at_most(void)
{
    struct cubin cubin = cubin_of(1000, 0);
    cubin.section[2].sh_type = SHT_PROGBITS;
    assert(image_read(&cubin, IMAGE_UNSTATED, 90).code >= 2 * 123456);
    const char text[] = ".version 8.0\n.visible .entry f() { ret; }";
    assert(image_read(text, IMAGE_UNSTATED, 90).code >= sizeof text && !image_read(text, IMAGE_UNSTATED, 90).heap);
    assert(image_read(".version 8.0\n.extern .func (.param .b32 r) vprintf (.param .b64 f, .param .b64 a);", IMAGE_UNSTATED, 90).heap);
}

static uint64_t pseudo_random(uint64_t *state)
{
    *state = *state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return *state >> 33;
}

/* A copy of exactly its bytes, some of them changed and its end cut off: the sanitizers see what is read behind it. */
static void read_damaged(const void *image, size_t length, uint64_t *state)
{
    static const char marks[] = "./*\"\\{}[](),;=<0x1Uglobal \n";
    const size_t left = 1 + pseudo_random(state) % length;
    unsigned char *copy = malloc(left);
    assert(copy != NULL);
    memcpy(copy, image, left);
    for (uint64_t changes = pseudo_random(state) % 6; changes > 0; changes--) {
        const uint64_t at = pseudo_random(state) % left, what = pseudo_random(state);
        copy[at] = (unsigned char)(what >> 1);
        if (what & 1)
            copy[at] = (unsigned char)marks[(what >> 1) % (sizeof marks - 1)];
    }
    image_read(copy, left, (unsigned)(pseudo_random(state) & 1) * 90);
    free(copy);
}

static void damaged_images_are_read_within_their_length(void)
{
    static const char text[] = ".version 8.0\n.target sm_90\n// c\n.extern .global .b8 e[];\n.visible .global .align 8 .b8 a[4][2] = {1, {2, 3}}, b;\n"
                               "/* .x */.file 1 \"name\"\n.visible .entry k(.param .u64 .ptr .global p) { ld.global.u32 %r1, [%rd1]; ret; }\n";
    const struct fatbin fatbin = fatbin_of((const uint16_t[]){1, 2}, (const uint64_t[]){1000, 1000});
    const struct cubin cubin = cubin_of(1000, 100);
    uint64_t state = 1;
    for (unsigned i = 0; i < 20000; i++) {
        read_damaged(text, sizeof text - 1, &state);
        read_damaged(&cubin, sizeof cubin, &state);
        read_damaged(&fatbin, sizeof fatbin, &state);
    }
    assert(!image_read(&fatbin, sizeof fatbin - 1, 0).known && !image_read(&cubin, 64, 0).known);
}

void images_are_read(void)
{
    ptx_states_its_variables();
    ptx_that_is_not_understood_is_unknown();
    damaged_images_are_read_within_their_length();
    a_cubin_states_its_variables();
    of_a_fatbin_the_part_counts_that_the_gpu_takes();
    an_image_states_what_its_code_takes_at_most();
    a_fatbin_states_the_most_that_one_of_its_parts_takes();
}
