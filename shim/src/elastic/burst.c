/* burst.c - on which GPUs the container may burst: the file `burst` beside the grant, which the node rewrites when the pod's annotations
 * change. Without it, or where it cannot be read in full, there is no burst: then the container has what the grant guarantees.
 */
#include "process.h"

#include "lines.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* Specified: vgpu/api/burst.py. */
enum { WAIT_S_LIMIT = 3600, LATE_S = 5 }; /* an arbiter that refuses in time answers before that; guessed */
#define BURST_LINE "card <GPU uuid of the grant> mib=<guarantee-16777215> core_percent=<0-100>"

/* Which GPU of the grant the line names; GPUS_LIMIT: none. */
static unsigned gpu_named(const struct grant *grant, const char *text, size_t length)
{
    uint8_t uuid[16];
    unsigned i = 0;
    if (!uuid_parse(text, length, uuid))
        return GPUS_LIMIT;
    while (i < grant->gpus && memcmp(grant->gpu[i].uuid, uuid, sizeof uuid) != 0)
        i++;
    return i < grant->gpus ? i : GPUS_LIMIT;
}

static bool gpu_line(struct lines *in, const struct grant *grant, bool bursts[])
{
    size_t length;
    const char *at = lines_field(in, "card", &length);
    const char *space = at != NULL ? memchr(at, ' ', length) : NULL, *end = in->line + in->length;
    uint64_t mib, percent;
    if (space == NULL)
        return lines_refuse(in, BURST_LINE ", or end");
    const unsigned gpu = gpu_named(grant, at, (size_t)(space - at));
    if (gpu == GPUS_LIMIT || bursts[gpu])
        return lines_refuse(in, "each GPU of the grant once at most");
    if (!text_number(&space, end, " mib=", GRANT_MIB_LIMIT, &mib) || mib * MIB < grant->gpu[gpu].guarantee_bytes ||
        !text_number(&space, end, " core_percent=", GRANT_PERCENT_LIMIT, &percent) || space != end)
        return lines_refuse(in, BURST_LINE);
    bursts[gpu] = true;
    return true;
}

bool burst_read(const char *text, size_t length, const struct grant *grant, bool bursts[], uint64_t *wait_s, char *why, size_t why_bytes)
{
    struct lines in = lines_of(text, length, why, why_bytes);
    if (!lines_next(&in, "tangram-burst 1"))
        return false;
    if (!lines_is(&in, "tangram-burst 1"))
        return lines_refuse(&in, "tangram-burst 1 (this library reads version 1)");
    if (!lines_next(&in, "wait_s <0-3600>"))
        return false;
    const char *end = in.line + in.length, *space = memchr(in.line, ' ', in.length);
    if (strncmp(in.line, "wait_s ", 7) != 0 || !text_number(&space, end, " ", WAIT_S_LIMIT, wait_s) || space != end)
        return lines_refuse(&in, "wait_s <0-3600>");
    if (!lines_next(&in, BURST_LINE))
        return false;
    while (!lines_is(&in, "end"))
        if (!gpu_line(&in, grant, bursts) || !lines_next(&in, BURST_LINE ", or end"))
            return false;
    return lines_end(&in);
}

static bool path_of(char *path, size_t path_bytes)
{
    const char *socket = tangram.grant.socket, *slash = strrchr(socket, '/');
    return slash != NULL && snprintf(path, path_bytes, "%.*s/burst", (int)(slash - socket), socket) < (int)path_bytes;
}

/* False: there is no such file. One that cannot be read says so, and names no GPU. */
static bool load(const char *path, bool bursts[])
{
    char why[256];
    uint64_t wait_s = 0;
    size_t length;
    char *text = malloc(LINES_TEXT_LIMIT + 1);
    bool loaded = text != NULL && lines_load(path, text, &length);
    if (!loaded)
        snprintf(why, sizeof why, "%s", strerror(errno));
    const bool there = loaded || errno != ENOENT;
    loaded = loaded && burst_read(text, length, &tangram.grant, bursts, &wait_s, why, sizeof why);
    free(text);
    if (loaded)
        atomic_store(&tangram.grant.pending_most_ms, (uint32_t)(wait_s + LATE_S) * 1000);
    if (there && !loaded) {
        memset(bursts, 0, GPUS_LIMIT * sizeof *bursts);
        warn(WARN_BURST, "%s cannot be read (%s): this process has the memory that is guaranteed, and no more", path, why);
    }
    return there;
}

void burst_look(void)
{
    static struct stat seen; /* one thread at a time: under tangram.setup, and then the helper */
    struct stat now;
    char path[sizeof tangram.grant.socket];
    bool bursts[GPUS_LIMIT] = {false};
    if (!path_of(path, sizeof path))
        return;
    if (stat(path, &now) != 0)
        memset(&now, 0, sizeof now);
    else if (now.st_ino == seen.st_ino && now.st_dev == seen.st_dev && now.st_mtim.tv_sec == seen.st_mtim.tv_sec &&
             now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec)
        return;
    seen = now;
    const bool there = now.st_ino != 0 && load(path, bursts);
    for (unsigned i = 0; i < tangram.grant.gpus; i++)
        atomic_store_explicit(&tangram.grant.gpu[i].bursts, there && bursts[i], memory_order_release);
}
