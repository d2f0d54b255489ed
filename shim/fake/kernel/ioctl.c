/* ioctl.c - the kernel driver's side of the few requests that matter for suspending a process: a double that checks every byte.
 *
 * Preloaded behind the library (LD_PRELOAD="libtangram.so libfake-kernel.so"), and alone into the arbiter. The descriptor of the
 * shared page stands for /dev/nvidiactl: it can be passed to another process, which then commands the same objects, as with
 * the real driver. A request that a real driver would refuse, or that would do harm, is counted on the page with its reason,
 * and tests look there. Everything else goes to libc.
 *
 * As measured on the real one: a disable is counted, extra enables are harmless, a bad handle answers 0x21 and leaves the
 * handles before it changed, and a suspend takes 0.6 ms, a resume 0.3.
 */
#define _GNU_SOURCE
#include "check.h"
#include "missing.h"
#include "nvos.h"
#include "page.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { SUSPEND_NS = 600000, RESUME_NS = 300000 };

/* The page behind a descriptor, NULL for another file. The last one stays mapped: every descriptor is of the same daemon. */
static struct fake_page *page_of(int fd)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static struct stat known;
    static struct fake_page *page;
    struct stat status;
    if (fstat(fd, &status) != 0 || !S_ISREG(status.st_mode) || (uint64_t)status.st_size != FAKE_FILE_BYTES)
        return NULL;
    pthread_mutex_lock(&lock);
    if (page == NULL || known.st_dev != status.st_dev || known.st_ino != status.st_ino) {
        page = page_map(fd);
        known = status;
    }
    struct fake_page *found = page;
    pthread_mutex_unlock(&lock);
    return found;
}

static uint32_t misuse(struct fake_page *page, uint32_t status, const char *what, uint32_t number)
{
    atomic_fetch_add(&page->kernel_misuses, 1);
    snprintf(page->kernel_misuse, sizeof page->kernel_misuse, "%s: 0x%x", what, number);
    return status;
}

#define REFUSE(when, status, what, number)                                                                                     \
    if (when)                                                                                                                  \
        return misuse(page, status, what, number);

static bool all_zero(const void *at, size_t bytes)
{
    const unsigned char *byte = at;
    for (size_t i = 0; i < bytes; i++)
        if (byte[i] != 0)
            return false;
    return true;
}

/* Objects. Called with the page's lock held. */

static uint32_t slot_of(uint32_t client)
{
    return client & (FAKE_SLOTS - 1); /* the fake libcuda names its client after its slot and its process */
}

static struct fake_kernel_object *entry_of(struct fake_slot *of, uint32_t client, uint32_t handle)
{
    for (uint32_t i = 0; i < FAKE_OBJECTS; i++)
        if (of->object[i].client == client && of->object[i].handle == handle)
            return &of->object[i];
    return NULL;
}

static struct fake_kernel_object *find(struct fake_page *page, uint32_t client, uint32_t handle)
{
    struct fake_slot *of = &page->slot[slot_of(client)];
    return of->kind == FAKE_CUDA && handle != 0 ? entry_of(of, client, handle) : NULL;
}

/* The last process of the slot had this client, and has ended: another that commands it just then could not know. On a real driver the client's
 * objects stay until the last descriptor is closed, and a command to them does no harm. */
static bool has_ended(const struct fake_page *page, uint32_t client)
{
    return client != 0 && page->ended_client[slot_of(client)] == client;
}

static uint32_t allocate(struct fake_page *page, const struct NVOS64 *in)
{
    static const struct fake_kernel_object no_parent;
    const struct fake_kernel_object *parent = in->hClass == NV01_ROOT_CLIENT ? &no_parent : find(page, in->hRoot, in->hObjectParent);
    const bool is_device = in->hClass == NV01_DEVICE_0, is_group = in->hClass == KEPLER_CHANNEL_GROUP_A;
    const uint32_t *device = (const void *)(uintptr_t)in->pAllocParms;
    const struct NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS *group = (const void *)(uintptr_t)in->pAllocParms;
    struct fake_slot *of = &page->slot[slot_of(in->hRoot)];
#define RULES_OF_ALLOC
#include "rules.def"
    struct fake_kernel_object *entry = entry_of(of, 0, 0);
    if (entry == NULL)
        return NV_ERR_NO_MEMORY;
    *entry = (struct fake_kernel_object){in->hRoot, in->hObjectNew, in->hObjectParent, in->hClass, is_device ? *device : parent->unit,
                                         is_group ? group->engineType : parent->engine, 0};
    return NV_OK;
}

/* An object and what is under it; all of a client with the client. */
static void forget(struct fake_slot *of, uint32_t client, uint32_t handle)
{
    for (uint32_t i = 0; i < FAKE_OBJECTS; i++) {
        struct fake_kernel_object *object = &of->object[i], gone = *object;
        const bool is_it = gone.handle == handle || handle == client;
        if (gone.handle == 0 || gone.client != client || (!is_it && gone.parent != handle))
            continue;
        memset(object, 0, sizeof *object);
        if (!is_it)
            forget(of, client, gone.handle);
    }
}

static uint32_t release(struct fake_page *page, const struct NVOS00 *in)
{
#define RULES_OF_FREE
#include "rules.def"
    forget(&page->slot[slot_of(in->hRoot)], in->hRoot, in->hObjectOld);
    channels_apply(page, slot_of(in->hRoot));
    return NV_OK;
}

static uint32_t get_gid(struct fake_page *page, const struct fake_kernel_object *subdevice, struct NV2080_CTRL_GPU_GET_GID_INFO_PARAMS *gid)
{
#define RULES_OF_GID
#include "rules.def"
    memset(gid->data, 0, sizeof gid->data);
    memcpy(gid->data, page->gpu[page->unit[subdevice->unit % FAKE_UNITS].gpu % FAKE_GPUS].uuid_bytes, 16);
    gid->length = 16;
    return NV_OK;
}

static uint32_t disable(struct fake_page *page, const struct fake_kernel_object *subdevice, const struct NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS *list)
{
#define RULES_OF_LIST
#include "rules.def"
    if (fault_of_page(page, FAULT_SUSPEND))
        return NV_OK;
    for (uint32_t i = 0; i < list->numChannels; i++) {
        struct fake_kernel_object *channel = find(page, list->hClientList[i], list->hChannelList[i]);
        if (channel == NULL && has_ended(page, list->hClientList[i]))
            return NV_ERR_INVALID_CHANNEL;
#define RULES_OF_CHANNEL
#include "rules.def"
        if (list->bDisable)
            channel->disables++;
        else if (channel->disables > 0)
            channel->disables--;
        channels_apply(page, slot_of(channel->client));
    }
    return NV_OK;
}

static uint32_t control(struct fake_page *page, const struct NVOS54 *in)
{
    void *parameters = (void *)(uintptr_t)in->params;
    const struct fake_kernel_object *object = find(page, in->hClient, in->hObject);
    if (object == NULL && has_ended(page, in->hClient))
        return NV_ERR_INVALID_CHANNEL;
#define RULES_OF_CONTROL
#include "rules.def"
    if (in->cmd == NV2080_CTRL_CMD_GPU_GET_GID_INFO && in->paramsSize == sizeof(struct NV2080_CTRL_GPU_GET_GID_INFO_PARAMS))
        return get_gid(page, object, parameters);
    if (in->cmd == NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS && in->paramsSize == sizeof(struct NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS))
        return disable(page, object, parameters);
    return misuse(page, NV_ERR_NOT_SUPPORTED, "RM_CONTROL with a command or size that is not known", in->cmd);
}

/* A suspend or a resume takes its time before it takes effect; nothing is locked meanwhile. */
static void take_time(const struct NVOS54 *in)
{
    if (in->cmd != NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS || in->params == 0)
        return;
    const struct NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS *list = (const void *)(uintptr_t)in->params;
    const struct timespec pause = {.tv_nsec = list->bDisable ? SUSPEND_NS : RESUME_NS};
    nanosleep(&pause, NULL);
}

/* What a suspended process was about to write is written when the suspend returns. */
static void wait_for_steps(const struct fake_page *page, const struct NVOS54 *in)
{
    if (in->cmd != NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS || in->status != NV_OK)
        return;
    const struct NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS *list = (const void *)(uintptr_t)in->params;
    if (list->bDisable)
        gpu_steps_wait(page, slot_of(list->hClientList[0]));
}

/* This process was stopped in the request, and others have changed channels since: what these are decides once more who may run. */
static void apply_again(struct fake_page *page, const struct NVOS54 *in)
{
    if (in == NULL || in->cmd != NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS || in->status != NV_OK)
        return;
    const struct NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS *list = (const void *)(uintptr_t)in->params;
    do {
        page_lock(page);
        for (uint32_t i = 0; i < list->numChannels; i++)
            channels_apply(page, slot_of(list->hClientList[i]));
    } while (!page_unlock(page));
}

static int fail(int error)
{
    errno = error;
    return -1;
}

static int kernel_ioctl(struct fake_page *page, unsigned escape, size_t bytes, void *argument)
{
    const size_t more = fault_of_page(page, FAULT_ALLOC_FORM) ? FAKE_ALLOC_MORE : 0;
    bool known = true;
    if (argument == NULL)
        return fail(EFAULT);
    if (escape == NV_ESC_RM_CONTROL && bytes == sizeof(struct NVOS54))
        take_time(argument);
    page_lock(page);
#define REQUEST(number, form, beyond, answer)                                                                                  \
    if (escape == number && bytes == sizeof(struct form) + beyond)                                                             \
        ((struct form *)argument)->status = answer(page, argument);                                                            \
    else
#include "requests.def"
        known = misuse(page, false, "an escape of this number and size is not known", escape << 16 | (uint32_t)bytes);
    if (!page_unlock(page))
        apply_again(page, escape == NV_ESC_RM_CONTROL && bytes == sizeof(struct NVOS54) ? argument : NULL);
    if (escape == NV_ESC_RM_CONTROL && bytes == sizeof(struct NVOS54))
        wait_for_steps(page, argument);
    return known ? 0 : fail(EINVAL);
}

EXPORT int ioctl(int fd, unsigned long request, ...)
{
    va_list list;
    va_start(list, request);
    void *argument = va_arg(list, void *);
    va_end(list);
    struct fake_page *page = _IOC_TYPE(request) == NV_IOCTL_MAGIC ? page_of(fd) : NULL;
    if (page != NULL)
        return kernel_ioctl(page, _IOC_NR(request), _IOC_SIZE(request), argument);
    void *found = dlsym(RTLD_NEXT, "ioctl");
    int (*libc)(int, unsigned long, ...);
    memcpy(&libc, &found, sizeof libc);
    return libc != NULL ? libc(fd, request, argument) : fail(ENOSYS);
}
