/* ptx.c - what the variables of a PTX text take, read word by word.
 *
 * The text is read as the assembler reads it: comments and strings are passed over, and a declaration is `.global` with what follows, up to
 * its semicolon. Nothing is searched for in the text, so nothing can hide in it. What is not understood is not taken for small: then the
 * text's variables are unknown, and at least what was understood. Grammar: PTX ISA 9.0, "State Spaces, Types, and Variables" and "Constant
 * Expressions"; of those + - * / % << >> & | ^ and brackets are computed, all else is unknown.
 */
#include "code/ptx.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

enum { EXPRESSION_DEPTH = 32, OPAQUE_BYTES = 8 /* .texref and its kin are handles */, ALIGN_MOST = 1 << 20 };

enum kind { END, WORD, NUMBER, MARK, STRING };

struct reader {
    const char *at, *end;
    bool known;
    /* the token that is being looked at */
    enum kind kind;
    const char *text;
    size_t length;
};

static void unknown(struct reader *reader)
{
    reader->known = false;
}

/* From a comment's start, past it. */
static const char *past_comment(struct reader *reader, const char *at)
{
    if (at[1] == '/') {
        const char *line = memchr(at, '\n', (size_t)(reader->end - at));
        return line != NULL ? line : reader->end;
    }
    const char *close = memmem(at + 2, (size_t)(reader->end - at - 2), "*/", 2);
    if (close == NULL)
        unknown(reader);
    return close != NULL ? close + 2 : reader->end;
}

static void skip_blanks(struct reader *reader)
{
    const char *at = reader->at;
    while (at < reader->end) {
        if (isspace((unsigned char)*at))
            at++;
        else if (*at == '/' && reader->end - at > 1 && (at[1] == '/' || at[1] == '*'))
            at = past_comment(reader, at);
        else
            break;
    }
    reader->at = at;
}

/* A string ends on its line. Whether a backslash guards the quote behind it is not known. */
static size_t string_length(struct reader *reader)
{
    const char *at = reader->at + 1;
    while (at < reader->end && *at != '"' && *at != '\n')
        at++;
    if (at == reader->end || *at == '\n' || at[-1] == '\\')
        unknown(reader);
    return (size_t)(at - reader->at) + (at < reader->end && *at == '"');
}

static bool in_word(char c)
{
    return isalnum((unsigned char)c) || c == '_' || c == '$' || c == '%';
}

/* A directive begins with a dot; `.global.b8` is two. A name's or an instruction's dots are part of it: `ld.global` is one word. */
static size_t word_length(const struct reader *reader)
{
    const bool directive = *reader->at == '.', digits = isdigit((unsigned char)*reader->at);
    const char *at = reader->at + 1;
    while (at < reader->end && ((in_word(*at) && !(digits && *at == '%')) || (*at == '.' && !directive)))
        at++;
    return (size_t)(at - reader->at);
}

/* Of a register's name; else it is an operator. */
static bool is_percent_of_name(const struct reader *reader)
{
    return reader->end - reader->at > 1 && in_word(reader->at[1]) && !isdigit((unsigned char)reader->at[1]);
}

static void next(struct reader *reader)
{
    skip_blanks(reader);
    reader->text = reader->at;
    reader->length = 1;
    if (reader->at == reader->end) {
        reader->kind = END;
        reader->length = 0;
    } else if (*reader->at == '"') {
        reader->kind = STRING;
        reader->length = string_length(reader);
    } else if (*reader->at == '%' ? is_percent_of_name(reader) : in_word(*reader->at) || *reader->at == '.') {
        reader->kind = isdigit((unsigned char)*reader->at) ? NUMBER : WORD;
        reader->length = word_length(reader);
    } else {
        reader->kind = MARK;
        if (strchr("#\\`", *reader->at) != NULL || !isascii((unsigned char)*reader->at)) /* of a preprocessor, or of no PTX */
            unknown(reader);
    }
    reader->at += reader->length;
}

static bool is(const struct reader *reader, const char *token)
{
    return reader->length == strlen(token) && memcmp(reader->text, token, reader->length) == 0;
}

static bool is_mark(const struct reader *reader, char mark)
{
    return reader->kind == MARK && *reader->text == mark;
}

/* False: it is not there. */
static bool passed(struct reader *reader, char mark)
{
    if (!is_mark(reader, mark))
        return false;
    next(reader);
    return true;
}

/* 12, 0x1f, 017, 0b101, each with a U behind it or not. */
static uint64_t number(struct reader *reader)
{
    char digits[72], *end;
    const bool binary = reader->length > 2 && reader->text[0] == '0' && (reader->text[1] | 32) == 'b';
    uint64_t value = 0;
    if (reader->kind == NUMBER && reader->length < sizeof digits) {
        memcpy(digits, reader->text, reader->length);
        digits[reader->length] = '\0';
        value = strtoull(digits + (binary ? 2 : 0), &end, binary ? 2 : 0);
        end += *end == 'U';
        if (*end != '\0')
            unknown(reader);
    } else
        unknown(reader);
    next(reader);
    return value;
}

static uint64_t expression(struct reader *reader, unsigned least, unsigned depth);

static uint64_t primary(struct reader *reader, unsigned depth)
{
    if (depth < EXPRESSION_DEPTH && passed(reader, '(')) {
        uint64_t value = expression(reader, 0, depth + 1);
        if (!passed(reader, ')'))
            unknown(reader);
        return value;
    }
    return number(reader);
}

/* How tightly an operator binds; 0: it is none. `*both`: it is written twice. */
static unsigned binds(const struct reader *reader, bool *both)
{
    if (reader->kind != MARK)
        return 0;
    const char mark = *reader->text;
    *both = (mark == '<' || mark == '>') && reader->at < reader->end && *reader->at == mark;
    if (*both)
        return 4;
    return strchr("*/%", mark) != NULL ? 6 : strchr("+-", mark) != NULL ? 5 : mark == '&' ? 3 : mark == '^' ? 2 : mark == '|' ? 1 : 0;
}

static uint64_t computed(struct reader *reader, char operator, uint64_t one, uint64_t other)
{
    uint64_t value = 0;
    bool good = true;
    switch (operator) {
    case '*': good = !__builtin_mul_overflow(one, other, &value); break;
    case '+': good = !__builtin_add_overflow(one, other, &value); break;
    case '-': good = !__builtin_sub_overflow(one, other, &value); break;
    case '/': value = (good = other != 0) ? one / other : 0; break;
    case '%': value = (good = other != 0) ? one % other : 0; break;
    case '<': value = (good = other < 64 && one <= UINT64_MAX >> other) ? one << other : 0; break;
    case '>': value = (good = other < 64) ? one >> other : 0; break;
    case '&': value = one & other; break;
    case '^': value = one ^ other; break;
    default: value = one | other; break;
    }
    if (!good)
        unknown(reader);
    return value;
}

static uint64_t expression(struct reader *reader, unsigned least, unsigned depth)
{
    uint64_t value = primary(reader, depth);
    bool both;
    for (unsigned tight; (tight = binds(reader, &both)) > least;) {
        const char operator = *reader->text;
        next(reader);
        if (both)
            next(reader);
        value = computed(reader, operator, value, expression(reader, tight, depth));
    }
    return value;
}

static int opens(const struct reader *reader)
{
    if (reader->kind != MARK)
        return 0;
    return strchr("({[", *reader->text) != NULL ? 1 : strchr(")}]", *reader->text) != NULL ? -1 : 0;
}

/* Behind `=`: up to the comma or semicolon that ends it. Returns its outermost elements: one is a scalar's, or a string's bytes. */
static uint64_t initialiser(struct reader *reader)
{
    uint64_t elements = 1;
    int depth = 0;
    if (reader->kind == STRING)
        elements = reader->length;
    for (; reader->kind != END; next(reader)) {
        const int step = opens(reader);
        if (depth == 0 && (is_mark(reader, ',') || is_mark(reader, ';')))
            return elements;
        if (is_mark(reader, '[')) /* it may name the element that follows */
            unknown(reader);
        elements += depth == 1 && is_mark(reader, ',');
        depth += step;
        if (depth < 0)
            break;
    }
    unknown(reader);
    return elements;
}

/* What a declaration states for all of its variables, before their names. */
struct shape {
    uint64_t bytes, align;
    bool typed;
};

static uint64_t type_bytes(const struct reader *reader)
{
    static const struct {
        const char *name;
        uint64_t bytes;
    } of[] = {{".b8", 1}, {".u8", 1}, {".s8", 1}, {".b16", 2}, {".u16", 2}, {".s16", 2}, {".f16", 2}, {".bf16", 2}, {".b32", 4}, {".u32", 4},
              {".s32", 4}, {".f32", 4}, {".f16x2", 4}, {".bf16x2", 4}, {".b64", 8}, {".u64", 8}, {".s64", 8}, {".f64", 8}, {".b128", 16},
              {".texref", OPAQUE_BYTES}, {".samplerref", OPAQUE_BYTES}, {".surfref", OPAQUE_BYTES}};
    for (size_t i = 0; i < sizeof of / sizeof *of; i++)
        if (is(reader, of[i].name))
            return of[i].bytes;
    return 0;
}

/* From an open bracket past the one that closes it. */
static void skip_brackets(struct reader *reader)
{
    int depth = 0;
    do {
        depth += opens(reader);
        next(reader);
    } while (depth > 0 && reader->kind != END);
    if (depth != 0)
        unknown(reader);
}

/* .align 16, .v4, .attribute(...), a type: one of them. */
static void modifier(struct reader *reader, struct shape *shape)
{
    const uint64_t type = type_bytes(reader);
    const uint64_t vector = is(reader, ".v2") ? 2 : is(reader, ".v4") ? 4 : is(reader, ".v8") ? 8 : 0;
    const bool align = is(reader, ".align"), attribute = is(reader, ".attribute");
    next(reader);
    if (type > 0 && !shape->typed) {
        shape->bytes *= type;
        shape->typed = true;
    } else if (vector > 0)
        shape->bytes *= vector;
    else if (align) {
        shape->align = number(reader);
        if (shape->align > ALIGN_MOST)
            unknown(reader);
    } else if (attribute && is_mark(reader, '('))
        skip_brackets(reader);
    else
        unknown(reader);
}

/* A name with its dimensions and its initialiser. UINT64_MAX: more than any GPU has. Of an external one the first dimension may be left
 * out: then it is another module's for sure. */
static uint64_t variable(struct reader *reader, uint64_t bytes, bool external)
{
    bool empty = false, too_large = false;
    if (reader->kind != WORD || *reader->text == '.')
        unknown(reader);
    next(reader);
    while (passed(reader, '[')) {
        if (passed(reader, ']')) {
            if (empty)
                unknown(reader);
            empty = true;
            continue;
        }
        uint64_t count = expression(reader, 0, 0);
        too_large = __builtin_mul_overflow(bytes, count, &bytes) || too_large;
        if (!passed(reader, ']'))
            unknown(reader);
    }
    if (passed(reader, '=')) {
        uint64_t elements = initialiser(reader);
        too_large = (empty && __builtin_mul_overflow(bytes, elements, &bytes)) || too_large;
    } else if (empty && external)
        return 0;
    else if (empty)
        unknown(reader);
    return too_large ? UINT64_MAX : bytes;
}

static uint64_t sum(uint64_t one, uint64_t other)
{
    uint64_t both;
    return __builtin_add_overflow(one, other, &both) ? UINT64_MAX : both;
}

/* One after the other, each at the alignment that it states. */
static uint64_t placed(uint64_t before, uint64_t bytes, uint64_t align)
{
    const uint64_t past = align > 1 ? sum(before, (align - before % align) % align) : before;
    return sum(past, bytes);
}

/* From behind `.global` to its semicolon. The assembler allocates external variables, too, if it is given no other module (ptxas 13.5). */
static uint64_t declaration(struct reader *reader, uint64_t before, bool external)
{
    struct shape shape = {.bytes = 1};
    while (reader->kind == WORD && *reader->text == '.')
        modifier(reader, &shape);
    if (!shape.typed)
        unknown(reader);
    do
        before = placed(before, variable(reader, shape.bytes, external), shape.align);
    while (passed(reader, ','));
    if (!is_mark(reader, ';')) /* whatever stands there is read on as it is */
        unknown(reader);
    return before;
}

struct ptx_needs ptx_read(const char *text, size_t length)
{
    struct ptx_needs needs = {.variables = 0};
    struct reader reader = {.at = text, .end = text + strnlen(text, length), .known = true};
    bool external = false;
    unsigned depth = 0; /* of round brackets: they contain parameters, whose .global is the space that they point to */
    for (next(&reader); reader.kind != END;) {
        if (reader.kind == WORD && depth == 0 && is(&reader, ".global")) {
            next(&reader);
            needs.variables = declaration(&reader, needs.variables, external);
            external = false;
            continue;
        }
        if (is(&reader, ".extern"))
            external = true;
        else if (!is(&reader, ".visible") && !is(&reader, ".weak") && !is(&reader, ".common"))
            external = false;
        depth += is_mark(&reader, '(');
        depth -= depth > 0 && is_mark(&reader, ')');
        needs.heap = needs.heap || (reader.kind == WORD && (is(&reader, "vprintf") || is(&reader, "malloc")));
        next(&reader);
    }
    needs.known = reader.known && depth == 0;
    return needs;
}
