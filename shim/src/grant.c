/* grant.c - the container's limits, read once from a file that its container cannot write.
 *
 * The first of `mounts` that exists is a read-only mount made by the node. Only where none exists (a test, plain Docker) does TANGRAM_GRANT
 * name the file: inside a container with a grant the environment decides nothing. If a grant cannot be read in full, all GPU memory is
 * refused: if the library guessed, damaging a file would lift the limit.
 */
#include "process.h"

#include "lines.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* Specified: vgpu/api/contract.py, GRANT_DIRS. The second is that of the release before, whose containers may get this library. */
static const char *const mounts[] = {"/.tangram", "/run/tangram"};
enum { MOUNTS = sizeof mounts / sizeof *mounts };

/* Specified: docs/reference/protocol.md. tests/contract/domain/grant-cases.yaml keeps this and vgpu/api/codec.py in step. */
enum { NAMESPACE_LIMIT = 63, NAME_LIMIT = 253 };

/* Printable ASCII without a space: what every Kubernetes name is, and what nothing that forges a line could be. */
static bool is_word(const char *text, size_t length, size_t most)
{
    for (size_t i = 0; i < length; i++)
        if (text[i] < '!' || text[i] > '~')
            return false;
    return length >= 1 && length <= most;
}

static bool expect_field(struct lines *in, const char *key, const char *expected)
{
    size_t length;
    if (!lines_next(in, expected))
        return false;
    const char *value = lines_field(in, key, &length);
    return (value != NULL && is_word(value, length, NAME_LIMIT)) || lines_refuse(in, expected);
}

static bool is_pod(const char *value, size_t length)
{
    const char *slash = memchr(value, '/', length), *end = value + length;
    return slash != NULL && is_word(value, (size_t)(slash - value), NAMESPACE_LIMIT) &&
           is_word(slash + 1, (size_t)(end - slash - 1), NAME_LIMIT) && memchr(slash + 1, '/', (size_t)(end - slash - 1)) == NULL;
}

static bool hex(char c, uint8_t *value)
{
    if (c >= '0' && c <= '9')
        *value = (uint8_t)(c - '0');
    else if (c >= 'a' && c <= 'f')
        *value = (uint8_t)(c - 'a' + 10);
    else
        return false;
    return true;
}

/* "GPU-8e1c2f30-...-..." to its 16 bytes. */
bool uuid_parse(const char *text, size_t length, uint8_t uuid[16])
{
    if (length != 40 || (memcmp(text, "GPU-", 4) != 0 && memcmp(text, "MIG-", 4) != 0))
        return false;
    unsigned out = 0;
    for (const char *at = text + 4; at < text + 40;) {
        ptrdiff_t column = at - text - 4;
        if (column == 8 || column == 13 || column == 18 || column == 23) {
            if (*at++ != '-')
                return false;
            continue;
        }
        uint8_t high, low;
        if (!hex(at[0], &high) || !hex(at[1], &low))
            return false;
        uuid[out++] = (uint8_t)(high << 4 | low);
        at += 2;
    }
    return true;
}

#define GRANT_GPU "card"
#define GPU_LINE "card <GPU uuid> mib=<1-16777215> core_percent=<0-100>"

static bool gpu_line(struct lines *in, struct grant *grant)
{
    size_t length;
    const char *at = lines_field(in, GRANT_GPU, &length);
    struct gpu *gpu = &grant->gpu[grant->gpus];
    if (at == NULL || grant->gpus == GPUS_LIMIT)
        return lines_refuse(in, grant->gpus == GPUS_LIMIT ? "end, after 64 GPUs" : GPU_LINE ", or end");
    const char *end = at + length, *space = memchr(at, ' ', length);
    uint64_t mib, percent;
    if (space == NULL || memcmp(at, "GPU-", length < 4 ? length : 4) != 0 || !uuid_parse(at, (size_t)(space - at), gpu->uuid))
        return lines_refuse(in, GPU_LINE);
    if (!text_number(&space, end, " mib=", GRANT_MIB_LIMIT, &mib) || mib == 0 ||
        !text_number(&space, end, " core_percent=", GRANT_PERCENT_LIMIT, &percent) || space != end)
        return lines_refuse(in, GPU_LINE);
    for (unsigned i = 0; i < grant->gpus; i++)
        if (memcmp(grant->gpu[i].uuid, gpu->uuid, sizeof gpu->uuid) == 0)
            return lines_refuse(in, "each GPU once");
    gpu->at = grant->gpus++;
    gpu->guarantee_bytes = mib * MIB;
    atomic_store(&gpu->limit_bytes, mib * MIB);
    atomic_store(&gpu->resident_limit_bytes, mib * MIB);
    atomic_store(&gpu->wire, -1);
    return true;
}

/* The lines that may stand before the GPUs, and then the line behind them. The guard is the node's business. */
static bool options(struct lines *in, struct grant *grant)
{
    if (!lines_next(in, GPU_LINE ", or end"))
        return false;
    if ((lines_is(in, "guard report") || lines_is(in, "guard evict") || lines_is(in, "guard kill")) &&
        !lines_next(in, GPU_LINE ", or end"))
        return false;
    grant->clear = lines_is(in, "clear yes");
    return !(grant->clear || lines_is(in, "clear no")) || lines_next(in, GPU_LINE ", or end");
}

/* Fills grant->GPU from the text. False, with a sentence in `why`, when it is not a grant of version 1 in every line. */
bool grant_read(const char *text, size_t length, struct grant *grant, char *why, size_t why_bytes)
{
    struct lines in = lines_of(text, length, why, why_bytes);
    size_t n;
    const char *value;
    if (!lines_next(&in, "tangram-grant 1"))
        return false;
    value = lines_field(&in, "tangram-grant", &n);
    if (value == NULL || !text_is(value, n, "1"))
        return lines_refuse(&in, "tangram-grant 1 (this library reads version 1)");
    if (!lines_next(&in, "pod <namespace>/<name>"))
        return false;
    value = lines_field(&in, "pod", &n);
    if (value == NULL || !is_pod(value, n))
        return lines_refuse(&in, "pod <namespace>/<name>");
    if (!expect_field(&in, "uid", "uid <pod uid>") || !expect_field(&in, "container", "container <name>"))
        return false;
#define CLASS_LINE "class latency-critical, standard or best-effort"
    if (!lines_next(&in, CLASS_LINE))
        return false;
    value = lines_field(&in, "class", &n);
    if (value == NULL || !(text_is(value, n, "latency-critical") || text_is(value, n, "standard") || text_is(value, n, "best-effort")))
        return lines_refuse(&in, CLASS_LINE);
    if (!lines_next(&in, "level 0-4"))
        return false;
    value = lines_field(&in, "level", &n);
    if (value == NULL || n != 1 || *value < '0' || *value > '4')
        return lines_refuse(&in, "level 0-4");
    if (!options(&in, grant))
        return false;
    while (!lines_is(&in, "end"))
        if (!gpu_line(&in, grant) || !lines_next(&in, GPU_LINE ", or end"))
            return false;
    if (grant->gpus == 0) /* it would limit nothing in its container */
        return lines_refuse(&in, GPU_LINE " at least once");
    return lines_end(&in);
}

/* When the library is loaded: later the program may have locked itself out of its own files. */
__attribute__((constructor)) static void look_for_the_mount(void)
{
    struct stat there;
    int saved = errno;
    for (int i = MOUNTS - 1; i >= 0; i--)
        if (stat(mounts[i], &there) == 0)
            tangram.mount = mounts[i];
    errno = saved;
}

/* A mount that was there when the program started cannot be left by chroot. One that stat cannot reach counts as existing: it is read, and refused. */
static const char *mount_of_grant(void)
{
    struct stat there;
    for (int i = 0; tangram.mount == NULL && i < MOUNTS; i++)
        if (stat(mounts[i], &there) == 0 || (errno != ENOENT && errno != ENOTDIR))
            return mounts[i];
    return tangram.mount;
}

static enum grant_state load(struct grant *grant)
{
    char mounted[64];
    const char *mount = mount_of_grant(), *path = mounted;
    if (mount != NULL)
        snprintf(mounted, sizeof mounted, "%s/grant", mount);
    else
        path = getenv("TANGRAM_GRANT");
    if (path == NULL || *path == '\0')
        return GRANT_NONE;
    const char *slash = strrchr(path, '/');
    int folder = slash ? (int)(slash - path) : 1;
    int needs = snprintf(grant->socket, sizeof grant->socket, "%.*s/arbiter.sock", folder, slash ? path : ".");
    char why[256];
    size_t length;
    char *text = malloc(LINES_TEXT_LIMIT + 1);
    bool good = false;
    if (text == NULL || needs < 0 || (size_t)needs >= sizeof grant->socket)
        snprintf(why, sizeof why, "its path is too long");
    else if (!lines_load(path, text, &length))
        snprintf(why, sizeof why, "%s", strerror(errno));
    else
        good = grant_read(text, length, grant, why, sizeof why);
    free(text);
    if (!good) {
        grant->gpus = 0;
        grant->closed.closed = true;
        warn(WARN_GRANT, "grant %s cannot be read (%s): GPU memory is refused to this process", path, why);
    }
    if (good)
        burst_look();
    return good ? GRANT_GOOD : GRANT_BAD;
}

enum grant_state grant_ready(void)
{
    int state = atomic_load_explicit(&tangram.grant.state, memory_order_acquire);
    if (state != GRANT_UNREAD)
        return (enum grant_state)state;
    struct quiet quiet = quiet_begin();
    pthread_mutex_lock(&tangram.setup);
    state = atomic_load(&tangram.grant.state);
    if (state == GRANT_UNREAD) {
        state = (int)load(&tangram.grant);
        atomic_store_explicit(&tangram.grant.state, state, memory_order_release);
    }
    pthread_mutex_unlock(&tangram.setup);
    quiet_end(quiet);
    return (enum grant_state)state;
}
