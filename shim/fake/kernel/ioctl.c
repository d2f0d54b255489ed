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
#include "fault.h"
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

#define EXPORT __attribute__((visibility("default")))

enum { SUSPEND_NS = 600000, RESUME_NS = 300000 };

/* The page behind a descriptor, NULL for another file. The last one stays mapped: there is one daemon, whoever's descriptor it is. */
static struct fake_page *page_of(int fd)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static struct stat known;
    static struct fake_page *page;
    struct stat status;
    if (fstat(fd, &status) != 0 || !S_ISREG(status.st_mode) || (size_t)status.st_size != FAKE_PAGE_BYTES)
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

static bool all_zero(const void *at, size_t bytes)
{
    const unsigned char *byte = at;
    for (size_t i = 0; i < bytes; i++)
        if (byte[i] != 0)
            return false;
    return true;
}

/* Objects. The caller holds the page's lock. */

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

static uint32_t allocate(struct fake_page *page, const struct NVOS64 *in)
{
    static const struct fake_kernel_object no_parent;
    const struct fake_kernel_object *parent = in->hClass == NV01_ROOT_CLIENT ? &no_parent : find(page, in->hRoot, in->hObjectParent);
    const void *parameters = (const void *)(uintptr_t)in->pAllocParms;
    struct fake_slot *of = &page->slot[slot_of(in->hRoot)];
    if (of->kind != FAKE_CUDA || parent == NULL)
        return misuse(page, NV_ERR_INVALID_CHANNEL, "RM_ALLOC under a parent that is not there", in->hObjectParent);
    if (in->hObjectNew == 0 || find(page, in->hRoot, in->hObjectNew) != NULL)
        return misuse(page, NV_ERR_INVALID_ARGUMENT, "RM_ALLOC of a handle that is taken", in->hObjectNew);
    struct fake_kernel_object made = {in->hRoot, in->hObjectNew, in->hObjectParent, in->hClass, parent->unit, parent->engine, 0};
    if (in->hClass == NV01_DEVICE_0) {
        if (parameters == NULL)
            return misuse(page, NV_ERR_INVALID_ARGUMENT, "RM_ALLOC of a device without parameters", in->hObjectNew);
        made.unit = *(const uint32_t *)parameters;
        if (made.unit >= FAKE_UNITS || !page->unit[made.unit].live)
            return misuse(page, NV_ERR_INVALID_ARGUMENT, "RM_ALLOC of a device that is not there", made.unit);
    }
    if (in->hClass == KEPLER_CHANNEL_GROUP_A) {
        if (parameters == NULL || in->paramsSize != sizeof(struct NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS))
            return misuse(page, NV_ERR_INVALID_ARGUMENT, "RM_ALLOC of a channel group without parameters", in->hObjectNew);
        made.engine = ((const struct NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS *)parameters)->engineType;
    }
    struct fake_kernel_object *entry = entry_of(of, 0, 0);
    if (entry == NULL)
        return NV_ERR_NO_MEMORY;
    *entry = made;
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
    if (find(page, in->hRoot, in->hObjectOld) == NULL)
        return misuse(page, NV_ERR_INVALID_CHANNEL, "RM_FREE of a handle that is not there", in->hObjectOld);
    forget(&page->slot[slot_of(in->hRoot)], in->hRoot, in->hObjectOld);
    channels_hold(page, slot_of(in->hRoot));
    return NV_OK;
}

static uint32_t get_gid(struct fake_page *page, const struct fake_kernel_object *subdevice, struct NV2080_CTRL_GPU_GET_GID_INFO_PARAMS *gid)
{
    if (gid->index != 0 || gid->flags != NV2080_GPU_CMD_GPU_GET_GID_FLAGS_FORMAT_BINARY)
        return misuse(page, NV_ERR_INVALID_ARGUMENT, "GET_GID_INFO with other flags than binary", gid->flags);
    memset(gid->data, 0, sizeof gid->data);
    memcpy(gid->data, page->card[page->unit[subdevice->unit % FAKE_UNITS].card % FAKE_CARDS].uuid_bytes, 16);
    gid->length = 16;
    return NV_OK;
}

/* What is wrong with a list of channels, NULL for nothing. */
static const char *wrong_in(const struct NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS *list)
{
    if (list->numChannels == 0 || list->numChannels > NV2080_CTRL_FIFO_DISABLE_CHANNELS_MAX_ENTRIES)
        return "DISABLE_CHANNELS with this many channels";
    if (list->bDisable > 1 || list->bOnlyDisableScheduling != 0 || list->bRewindGpPut != 0 || list->pRunlistPreemptEvent != 0)
        return "DISABLE_CHANNELS with a flag that must be 0";
    const size_t left = sizeof list->hClientList - list->numChannels * sizeof(uint32_t);
    if (!all_zero(list->pad1, sizeof list->pad1) || !all_zero(list->pad2, sizeof list->pad2) ||
        !all_zero(list->hClientList + list->numChannels, left) || !all_zero(list->hChannelList + list->numChannels, left))
        return "DISABLE_CHANNELS with bytes that are not 0 where nothing belongs";
    return NULL;
}

static uint32_t disable(struct fake_page *page, const struct fake_kernel_object *subdevice, const struct NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS *list)
{
    const char *wrong = wrong_in(list);
    if (wrong != NULL)
        return misuse(page, NV_ERR_INVALID_ARGUMENT, wrong, list->numChannels);
    if (fault_of_page(page, FAULT_SUSPEND))
        return NV_OK;
    for (uint32_t i = 0; i < list->numChannels; i++) {
        struct fake_kernel_object *channel = find(page, list->hClientList[i], list->hChannelList[i]);
        if (channel == NULL || !channel_is(channel) || channel->unit != subdevice->unit)
            return misuse(page, NV_ERR_INVALID_CHANNEL, "DISABLE_CHANNELS of a handle that is no channel of the subdevice", list->hChannelList[i]);
        if (list->bDisable)
            channel->disables++;
        else if (channel->disables > 0)
            channel->disables--;
        channels_hold(page, slot_of(channel->client));
    }
    return NV_OK;
}

static uint32_t control(struct fake_page *page, const struct NVOS54 *in)
{
    void *parameters = (void *)(uintptr_t)in->params;
    const struct fake_kernel_object *object = find(page, in->hClient, in->hObject);
    if (object == NULL)
        return misuse(page, NV_ERR_INVALID_CHANNEL, "RM_CONTROL of an object that is not there", in->hObject);
    if (in->flags != 0 || parameters == NULL || object->klass != NV20_SUBDEVICE_0)
        return misuse(page, NV_ERR_INVALID_ARGUMENT, "RM_CONTROL with flags, without parameters, or of no subdevice", in->cmd);
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

static int fail(int error)
{
    errno = error;
    return -1;
}

static int kernel_ioctl(struct fake_page *page, unsigned escape, size_t bytes, void *argument)
{
    const size_t more = fault_of_page(page, FAULT_ALLOC_FORM) ? FAKE_ALLOC_MORE : 0;
    struct NVOS64 *made = argument;
    struct NVOS00 *gone = argument;
    struct NVOS54 *commanded = argument;
    bool known = true;
    if (argument == NULL)
        return fail(EFAULT);
    if (escape == NV_ESC_RM_CONTROL && bytes == sizeof *commanded)
        take_time(commanded);
    page_lock(page);
    if (escape == NV_ESC_RM_ALLOC && bytes == sizeof *made + more)
        made->status = allocate(page, made);
    else if (escape == NV_ESC_RM_FREE && bytes == sizeof *gone)
        gone->status = release(page, gone);
    else if (escape == NV_ESC_RM_CONTROL && bytes == sizeof *commanded)
        commanded->status = control(page, commanded);
    else
        known = misuse(page, false, "an escape of this number and size is not known", escape << 16 | (uint32_t)bytes);
    page_unlock(page);
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
