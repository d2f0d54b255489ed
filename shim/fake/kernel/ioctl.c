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
#include "channels.h"
#include "fault.h"
#include "nvos.h"
#include "page.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { SUSPEND_NS = 600000, RESUME_NS = 300000, PAGES = 4 };

static pthread_mutex_t mapping = PTHREAD_MUTEX_INITIALIZER;
static struct known {
    dev_t device;
    ino_t inode;
    struct fake_page *page;
} known[PAGES];

static struct fake_page *map(int fd, const struct stat *status)
{
    struct known *free_place = NULL;
    for (unsigned i = 0; i < PAGES; i++) {
        if (known[i].page != NULL && known[i].device == status->st_dev && known[i].inode == status->st_ino)
            return known[i].page;
        if (known[i].page == NULL && free_place == NULL)
            free_place = &known[i];
    }
    if (free_place == NULL)
        free_place = &known[0]; /* its page stays mapped: somebody may be using it */
    struct fake_page *page = mmap(NULL, FAKE_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (page == MAP_FAILED)
        return NULL;
    if (page->magic != FAKE_PAGE_MAGIC || page->version != FAKE_PAGE_VERSION) {
        munmap(page, FAKE_PAGE_BYTES);
        return NULL;
    }
    *free_place = (struct known){status->st_dev, status->st_ino, page};
    return page;
}

static struct fake_page *page_of(int fd)
{
    struct stat status;
    if (fstat(fd, &status) != 0 || !S_ISREG(status.st_mode) || (size_t)status.st_size != FAKE_PAGE_BYTES)
        return NULL;
    pthread_mutex_lock(&mapping);
    struct fake_page *page = map(fd, &status);
    pthread_mutex_unlock(&mapping);
    return page;
}

static void misuse(struct fake_page *page, const char *what, uint32_t number)
{
    atomic_fetch_add(&page->kernel_misuses, 1);
    snprintf(page->kernel_misuse, sizeof page->kernel_misuse, "%s: 0x%x", what, number);
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

static struct fake_kernel_object *find(struct fake_page *page, uint32_t client, uint32_t handle, uint32_t *slot)
{
    for (uint32_t s = 0; client != 0 && handle != 0 && s < FAKE_SLOTS; s++) {
        if (page->slot[s].kind != FAKE_CUDA || page->slot[s].object[0].handle == 0)
            continue;
        for (uint32_t i = 0; i < FAKE_OBJECTS; i++) {
            struct fake_kernel_object *object = &page->slot[s].object[i];
            if (object->client == client && object->handle == handle) {
                *slot = s;
                return object;
            }
        }
    }
    return NULL;
}

/* The fake libcuda names its client after its slot. */
static bool slot_of(const struct fake_page *page, uint32_t client, uint32_t *slot)
{
    *slot = client & (FAKE_SLOTS - 1);
    return page->slot[*slot].kind == FAKE_CUDA;
}

static uint32_t allocate(struct fake_page *page, const struct NVOS64 *in)
{
    uint32_t slot, parent_slot = 0;
    const bool client = in->hClass == NV01_ROOT_CLIENT;
    const struct fake_kernel_object *parent = client ? NULL : find(page, in->hRoot, in->hObjectParent, &parent_slot);
    if (!slot_of(page, in->hRoot, &slot) || (!client && (parent == NULL || parent_slot != slot)))
        return misuse(page, "RM_ALLOC under a parent that is not there", in->hObjectParent), NV_ERR_INVALID_CHANNEL;
    uint32_t other;
    if (in->hObjectNew == 0 || find(page, in->hRoot, in->hObjectNew, &other) != NULL)
        return misuse(page, "RM_ALLOC of a handle that is taken", in->hObjectNew), NV_ERR_INVALID_ARGUMENT;
    struct fake_kernel_object made = {in->hRoot, in->hObjectNew, in->hObjectParent, in->hClass, 0, 0, 0};
    const void *parameters = (const void *)(uintptr_t)in->pAllocParms;
    if (in->hClass == NV01_DEVICE_0) {
        if (parameters == NULL)
            return misuse(page, "RM_ALLOC of a device without parameters", in->hObjectNew), NV_ERR_INVALID_ARGUMENT;
        made.unit = *(const uint32_t *)parameters;
        if (made.unit >= FAKE_UNITS || !page->unit[made.unit].live)
            return misuse(page, "RM_ALLOC of a device that is not there", made.unit), NV_ERR_INVALID_ARGUMENT;
    } else if (!client) {
        made.unit = parent->unit;
        made.engine = parent->engine;
    }
    if (in->hClass == KEPLER_CHANNEL_GROUP_A) {
        if (parameters == NULL || in->paramsSize != sizeof(struct NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS))
            return misuse(page, "RM_ALLOC of a channel group without parameters", in->hObjectNew), NV_ERR_INVALID_ARGUMENT;
        made.engine = ((const struct NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS *)parameters)->engineType;
    }
    for (uint32_t i = 0; i < FAKE_OBJECTS; i++)
        if (page->slot[slot].object[i].handle == 0) {
            page->slot[slot].object[i] = made;
            return NV_OK;
        }
    return NV_ERR_NO_MEMORY;
}

static void forget(struct fake_page *page, uint32_t slot, uint32_t client, uint32_t handle)
{
    for (uint32_t i = 0; i < FAKE_OBJECTS; i++) {
        struct fake_kernel_object *object = &page->slot[slot].object[i];
        if (object->handle == 0 || object->client != client)
            continue;
        const uint32_t own = object->handle;
        if (own == handle || handle == client) {
            memset(object, 0, sizeof *object);
        } else if (object->parent == handle) {
            memset(object, 0, sizeof *object);
            forget(page, slot, client, own);
        }
    }
}

static uint32_t release(struct fake_page *page, const struct NVOS00 *in)
{
    uint32_t slot;
    if (find(page, in->hRoot, in->hObjectOld, &slot) == NULL)
        return misuse(page, "RM_FREE of a handle that is not there", in->hObjectOld), NV_ERR_INVALID_CHANNEL;
    forget(page, slot, in->hRoot, in->hObjectOld);
    channels_hold(page, slot);
    return NV_OK;
}

static uint32_t get_gid(struct fake_page *page, const struct fake_kernel_object *subdevice, struct NV2080_CTRL_GPU_GET_GID_INFO_PARAMS *gid)
{
    if (gid->index != 0 || gid->flags != NV2080_GPU_CMD_GPU_GET_GID_FLAGS_FORMAT_BINARY)
        return misuse(page, "GET_GID_INFO with other flags than binary", gid->flags), NV_ERR_INVALID_ARGUMENT;
    const struct fake_unit *unit = &page->unit[subdevice->unit];
    memset(gid->data, 0, sizeof gid->data);
    memcpy(gid->data, page->card[unit->card].uuid_bytes, 16);
    gid->length = 16;
    return NV_OK;
}

static bool well_formed(struct fake_page *page, const struct NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS *list)
{
    if (list->numChannels == 0 || list->numChannels > NV2080_CTRL_FIFO_DISABLE_CHANNELS_MAX_ENTRIES)
        return misuse(page, "DISABLE_CHANNELS with this many channels", list->numChannels), false;
    if (list->bDisable > 1 || list->bOnlyDisableScheduling != 0 || list->bRewindGpPut != 0 || list->pRunlistPreemptEvent != 0)
        return misuse(page, "DISABLE_CHANNELS with a flag that must be 0", list->bDisable), false;
    const size_t used = list->numChannels * sizeof(uint32_t), all = sizeof list->hClientList;
    if (!all_zero(list->pad1, sizeof list->pad1) || !all_zero(list->pad2, sizeof list->pad2) ||
        !all_zero((const char *)list->hClientList + used, all - used) || !all_zero((const char *)list->hChannelList + used, all - used))
        return misuse(page, "DISABLE_CHANNELS with bytes that are not 0 where nothing belongs", list->numChannels), false;
    return true;
}

static uint32_t disable(struct fake_page *page, const struct fake_kernel_object *subdevice, const struct NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS *list)
{
    uint32_t status = NV_OK, slot = 0;
    if (fault_of_page(page, FAULT_SUSPEND))
        return NV_OK;
    bool touched[FAKE_SLOTS] = {false};
    for (uint32_t i = 0; i < list->numChannels && status == NV_OK; i++) {
        struct fake_kernel_object *channel = find(page, list->hClientList[i], list->hChannelList[i], &slot);
        if (channel == NULL || !channel_is(channel) || channel->unit != subdevice->unit) {
            misuse(page, "DISABLE_CHANNELS of a handle that is no channel of the subdevice", list->hChannelList[i]);
            status = NV_ERR_INVALID_CHANNEL;
            break;
        }
        if (list->bDisable)
            channel->disables++;
        else if (channel->disables > 0)
            channel->disables--;
        touched[slot] = true;
    }
    for (slot = 0; slot < FAKE_SLOTS; slot++)
        if (touched[slot])
            channels_hold(page, slot);
    return status;
}

static uint32_t control(struct fake_page *page, const struct NVOS54 *in)
{
    uint32_t slot;
    void *parameters = (void *)(uintptr_t)in->params;
    const struct fake_kernel_object *object = find(page, in->hClient, in->hObject, &slot);
    if (object == NULL)
        return misuse(page, "RM_CONTROL of an object that is not there", in->hObject), NV_ERR_INVALID_CHANNEL;
    if (in->flags != 0 || parameters == NULL || object->klass != NV20_SUBDEVICE_0)
        return misuse(page, "RM_CONTROL with flags, without parameters, or of no subdevice", in->cmd), NV_ERR_INVALID_ARGUMENT;
    if (in->cmd == NV2080_CTRL_CMD_GPU_GET_GID_INFO && in->paramsSize == sizeof(struct NV2080_CTRL_GPU_GET_GID_INFO_PARAMS))
        return get_gid(page, object, parameters);
    if (in->cmd == NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS && in->paramsSize == sizeof(struct NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS))
        return well_formed(page, parameters) ? disable(page, object, parameters) : NV_ERR_INVALID_ARGUMENT;
    return misuse(page, "RM_CONTROL with a command or size that is not known", in->cmd), NV_ERR_NOT_SUPPORTED;
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

static int answer(struct fake_page *page, unsigned escape, unsigned bytes, void *argument)
{
    if (escape == NV_ESC_RM_CONTROL && bytes == sizeof(struct NVOS54))
        take_time(argument);
    int rc = 0;
    page_lock(page);
    if (escape == NV_ESC_RM_ALLOC && bytes == sizeof(struct NVOS64) + (fault_of_page(page, FAULT_ALLOC_FORM) ? FAKE_ALLOC_MORE : 0)) {
        struct NVOS64 *in = argument;
        in->status = allocate(page, in);
    } else if (escape == NV_ESC_RM_ALLOC && bytes == sizeof(struct NVOS21)) {
        struct NVOS21 *in = argument;
        const struct NVOS64 whole = {in->hRoot, in->hObjectParent, in->hObjectNew, in->hClass, in->pAllocParms, 0, in->paramsSize, 0, 0, 0};
        in->status = allocate(page, &whole);
    } else if (escape == NV_ESC_RM_FREE && bytes == sizeof(struct NVOS00)) {
        struct NVOS00 *in = argument;
        in->status = release(page, in);
    } else if (escape == NV_ESC_RM_CONTROL && bytes == sizeof(struct NVOS54)) {
        struct NVOS54 *in = argument;
        in->status = control(page, in);
    } else {
        misuse(page, "an escape of this number and size is not known", escape << 16 | bytes);
        errno = EINVAL;
        rc = -1;
    }
    page_unlock(page);
    return rc;
}

static int kernel_ioctl(struct fake_page *page, unsigned long request, void *argument)
{
    if (argument == NULL) {
        errno = EFAULT;
        return -1;
    }
    if (_IOC_NR(request) != NV_ESC_IOCTL_XFER_CMD)
        return answer(page, _IOC_NR(request), _IOC_SIZE(request), argument);
    const struct nv_ioctl_xfer *wrapped = argument;
    if (_IOC_SIZE(request) != sizeof *wrapped || wrapped->ptr == 0) {
        errno = EINVAL;
        return -1;
    }
    return answer(page, wrapped->cmd, wrapped->size, (void *)(uintptr_t)wrapped->ptr);
}

typedef int (*ioctl_function)(int fd, unsigned long request, ...);

static ioctl_function find_libc(void)
{
    void *found = dlsym(RTLD_NEXT, "ioctl");
    ioctl_function function;
    memcpy(&function, &found, sizeof function);
    return function;
}

EXPORT int ioctl(int fd, unsigned long request, ...)
{
    va_list list;
    va_start(list, request);
    void *argument = va_arg(list, void *);
    va_end(list);
    if (_IOC_TYPE(request) == NV_IOCTL_MAGIC) {
        struct fake_page *page = page_of(fd);
        if (page != NULL)
            return kernel_ioctl(page, request, argument);
    }
    const ioctl_function libc = find_libc();
    if (libc == NULL) {
        errno = ENOSYS;
        return -1;
    }
    return libc(fd, request, argument);
}
