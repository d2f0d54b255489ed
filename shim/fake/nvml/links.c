/* links.c - how cards are joined: NVLink and the PCI tree. */
#include "internal.h"

#include <stdio.h>

static nvmlReturn_t link_of(nvmlDevice_t device, unsigned link, struct target *to, int *peer)
{
    TRY(whole_card(device, to));
    CHECK(to->on->links_wired > 0, NVML_ERROR_NOT_SUPPORTED);
    CHECK(link < to->on->links_wired && link < FAKE_LINKS, NVML_ERROR_INVALID_ARGUMENT);
    *peer = to->on->link_peer[link];
    return NVML_SUCCESS;
}

/* The same, for what only an active link has. */
static nvmlReturn_t active_link(nvmlDevice_t device, unsigned link, struct target *to, int *peer)
{
    TRY(link_of(device, link, to, peer));
    return *peer == -1 ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link, nvmlEnableState_t *active)
{
    struct target to;
    int peer;
    TRY(link_of(device, link, &to, &peer));
    CHECK(active != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *active = peer != -1 ? NVML_FEATURE_ENABLED : NVML_FEATURE_DISABLED;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkVersion(nvmlDevice_t device, unsigned link, unsigned *version)
{
    struct target to;
    int peer;
    TRY(active_link(device, link, &to, &peer));
    CHECK(version != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *version = to.on->architecture >= 9 ? 6 : 5; /* NVML_NVLINK_VERSION_4_0, _3_0 */
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkCapability(nvmlDevice_t device, unsigned link, nvmlNvLinkCapability_t which, unsigned *has)
{
    struct target to;
    int peer;
    TRY(active_link(device, link, &to, &peer));
    CHECK(has != NULL && which < NVML_NVLINK_CAP_COUNT, NVML_ERROR_INVALID_ARGUMENT);
    *has = which == NVML_NVLINK_CAP_P2P_SUPPORTED || which == NVML_NVLINK_CAP_P2P_ATOMICS || which == NVML_NVLINK_CAP_VALID;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned link, nvmlIntNvLinkDeviceType_t *type)
{
    struct target to;
    int peer;
    TRY(active_link(device, link, &to, &peer));
    CHECK(type != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *type = peer == -2 ? NVML_NVLINK_DEVICE_TYPE_SWITCH : NVML_NVLINK_DEVICE_TYPE_GPU;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned link, nvmlPciInfo_t *pci)
{
    struct target to;
    int peer;
    TRY(active_link(device, link, &to, &peer));
    CHECK(pci != NULL, NVML_ERROR_INVALID_ARGUMENT);
    if (peer >= 0)
        return nvmlDeviceGetPciInfo_v3(handle_of((uint32_t)peer), pci);
    memset(pci, 0, sizeof *pci);
    pci->bus = 0xc0 + link % 4; /* four switches, as on an eight-card board */
    pci->pciDeviceId = 0x22a310de;
    snprintf(pci->busId, sizeof pci->busId, "00000000:%02X:00.0", pci->bus & 0xff);
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "0000:%02X:00.0", pci->bus & 0xff);
    return NVML_SUCCESS;
}

ALIAS(nvmlDeviceGetNvLinkRemotePciInfo, nvmlDeviceGetNvLinkRemotePciInfo_v2)

static nvmlReturn_t both(nvmlDevice_t a, nvmlDevice_t b, struct target *to_a, struct target *to_b)
{
    TRY(whole_card(a, to_a));
    return whole_card(b, to_b);
}

EXPORT nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t a, nvmlDevice_t b, nvmlGpuTopologyLevel_t *level)
{
    struct target to_a, to_b;
    TRY(both(a, b, &to_a, &to_b));
    CHECK(level != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *level = to_a.card == to_b.card         ? NVML_TOPOLOGY_INTERNAL
             : to_a.on->numa == to_b.on->numa ? NVML_TOPOLOGY_NODE
                                              : NVML_TOPOLOGY_SYSTEM;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetTopologyNearestGpus(nvmlDevice_t device, nvmlGpuTopologyLevel_t level, unsigned *count, nvmlDevice_t *found)
{
    struct target to;
    TRY(whole_card(device, &to));
    CHECK(count != NULL, NVML_ERROR_INVALID_ARGUMENT);
    unsigned have = 0;
    for (unsigned i = 0; i < nvml.cards; i++) {
        nvmlGpuTopologyLevel_t between;
        TRY(nvmlDeviceGetTopologyCommonAncestor(device, handle_of(nvml.card[i]), &between));
        if (nvml.card[i] == to.card || between != level)
            continue;
        if (found != NULL && have < *count)
            found[have] = handle_of(nvml.card[i]);
        have++;
    }
    if (found == NULL || have < *count)
        *count = have;
    return NVML_SUCCESS;
}

static bool linked(const struct target *a, const struct target *b)
{
    bool through_a = false, through_b = false;
    for (unsigned i = 0; i < FAKE_LINKS; i++) {
        if (a->on->link_peer[i] == (int)b->card)
            return true;
        through_a |= a->on->link_peer[i] == -2;
        through_b |= b->on->link_peer[i] == -2;
    }
    return through_a && through_b; /* by way of the switches */
}

EXPORT nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t a, nvmlDevice_t b, nvmlGpuP2PCapsIndex_t which, nvmlGpuP2PStatus_t *status)
{
    struct target to_a, to_b;
    TRY(both(a, b, &to_a, &to_b));
    CHECK(status != NULL && which < NVML_P2P_CAPS_INDEX_UNKNOWN, NVML_ERROR_INVALID_ARGUMENT);
    const bool good = linked(&to_a, &to_b) || (which != NVML_P2P_CAPS_INDEX_NVLINK && to_a.on->numa == to_b.on->numa);
    *status = good ? NVML_P2P_STATUS_OK : NVML_P2P_STATUS_NOT_SUPPORTED;
    return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceOnSameBoard(nvmlDevice_t a, nvmlDevice_t b, int *same)
{
    struct target to_a, to_b;
    TRY(both(a, b, &to_a, &to_b));
    CHECK(same != NULL, NVML_ERROR_INVALID_ARGUMENT);
    *same = to_a.card == to_b.card;
    return NVML_SUCCESS;
}
