/*
 * A fake libnvidia-ml.so.1: cards.c reads its cards, events.c their Xid errors. It exports the functions that the
 * device plugin calls and some more, under the versioned names of the real library. All functions are thread-safe.
 */
#define _POSIX_C_SOURCE 200809L

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "fake.h"

#ifdef FAKE_NVML_BEFORE_R615
#define DRIVER "570"
#define CUDA "12"
#else
#define DRIVER "615"
#define CUDA "13"
#endif

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
unsigned int init_count;
struct slot slots[MAX_CARDS];
unsigned int slot_count;

void sleep_ms(unsigned int ms)
{
	struct timespec rest = {.tv_sec = ms / 1000, .tv_nsec = (long)(ms % 1000) * 1000000L};

	nanosleep(&rest, NULL); /* a signal can end it early: the callers check the clock */
}

static nvmlReturn_t init(void)
{
	struct card cards[MAX_CARDS];
	unsigned int count;
	nvmlReturn_t ret = NVML_SUCCESS;

	pthread_mutex_lock(&lock);
	if (init_count == 0) {
		ret = read_cards(cards, &count, true);
		if (ret == NVML_SUCCESS) {
			for (unsigned int i = 0; i < count; i++)
				strcpy(slots[i].uuid, cards[i].uuid);
			slot_count = count;
		}
	}
	if (ret == NVML_SUCCESS)
		init_count++;
	pthread_mutex_unlock(&lock);
	return ret;
}

EXPORT nvmlReturn_t nvmlInit(void)
{
	return init();
}

EXPORT nvmlReturn_t nvmlInit_v2(void)
{
	return init();
}

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
	(void)flags;
	return init();
}

EXPORT nvmlReturn_t nvmlShutdown(void)
{
	nvmlReturn_t ret = NVML_SUCCESS;

	pthread_mutex_lock(&lock);
	if (init_count == 0) {
		ret = NVML_ERROR_UNINITIALIZED;
	} else if (--init_count == 0) {
		free_event_sets_locked();
		slot_count = 0;
	}
	pthread_mutex_unlock(&lock);
	return ret;
}

EXPORT const char *nvmlErrorString(nvmlReturn_t result)
{
	switch (result) {
	case NVML_SUCCESS: return "Success";
	case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
	case NVML_ERROR_INVALID_ARGUMENT: return "Invalid Argument";
	case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
	case NVML_ERROR_NO_PERMISSION: return "Insufficient Permissions";
	case NVML_ERROR_NOT_FOUND: return "Not Found";
	case NVML_ERROR_INSUFFICIENT_SIZE: return "Insufficient Size";
	case NVML_ERROR_DRIVER_NOT_LOADED: return "Driver Not Loaded";
	case NVML_ERROR_TIMEOUT: return "Timeout";
	case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
	case NVML_ERROR_RESET_REQUIRED: return "GPU requires reset";
	case NVML_ERROR_OPERATING_SYSTEM: return "GPU access blocked by the operating system";
	case NVML_ERROR_LIB_RM_VERSION_MISMATCH: return "Driver/library version mismatch";
	case NVML_ERROR_MEMORY: return "Insufficient Memory";
	case NVML_ERROR_ARGUMENT_VERSION_MISMATCH: return "Argument version mismatch";
	case NVML_ERROR_UNKNOWN: break;
	}
	return "Unknown Error";
}

static nvmlReturn_t copy_string(const char *from, char *to, unsigned int size)
{
	if (to == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (strlen(from) >= size)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	strcpy(to, from);
	return NVML_SUCCESS;
}

static nvmlReturn_t system_string(const char *from, char *to, unsigned int size)
{
	pthread_mutex_lock(&lock);
	nvmlReturn_t ret = init_count == 0 ? NVML_ERROR_UNINITIALIZED : copy_string(from, to, size);
	pthread_mutex_unlock(&lock);
	return ret;
}

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
	return system_string(DRIVER ".00.00", version, length); /* no driver's: their last number isn't 0 */
}

EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
	if (version == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	*version = atoi(CUDA) * 1000;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
	return system_string(CUDA "." DRIVER ".00.00", version, length);
}

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count)
{
	struct card cards[MAX_CARDS];
	unsigned int ignored;

	if (count == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	pthread_mutex_lock(&lock);
	/* The set of cards is that of nvmlInit. Reading the file checks that the driver is still loaded. */
	nvmlReturn_t ret = init_count == 0 ? NVML_ERROR_UNINITIALIZED : read_cards(cards, &ignored, false);
	if (ret == NVML_SUCCESS)
		*count = slot_count;
	pthread_mutex_unlock(&lock);
	return ret;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
	struct card card;
	nvmlReturn_t ret;

	if (device == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	pthread_mutex_lock(&lock);
	if (init_count == 0)
		ret = NVML_ERROR_UNINITIALIZED;
	else if (index >= slot_count)
		ret = NVML_ERROR_INVALID_ARGUMENT;
	else
		ret = card_locked(&slots[index], CALL_HANDLE, &card);
	if (ret == NVML_SUCCESS)
		*device = &slots[index];
	pthread_mutex_unlock(&lock);
	return ret;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
	struct card card;
	nvmlReturn_t ret = NVML_ERROR_NOT_FOUND;

	if (uuid == NULL || device == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	pthread_mutex_lock(&lock);
	if (init_count == 0)
		ret = NVML_ERROR_UNINITIALIZED;
	for (unsigned int i = 0; i < slot_count; i++) {
		if (strcmp(slots[i].uuid, uuid) == 0) {
			ret = card_locked(&slots[i], CALL_HANDLE, &card);
			if (ret == NVML_SUCCESS)
				*device = &slots[i];
			break;
		}
	}
	pthread_mutex_unlock(&lock);
	return ret;
}

/* Finds the card of a handle in the current file. */
nvmlReturn_t query(nvmlDevice_t device, enum call call, struct card *card)
{
	pthread_mutex_lock(&lock);
	nvmlReturn_t ret = card_locked(device, call, card);
	pthread_mutex_unlock(&lock);
	return ret;
}

EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
	struct card card;
	nvmlReturn_t ret = index == NULL ? NVML_ERROR_INVALID_ARGUMENT : query(device, CALL_IDENTITY, &card);

	if (ret == NVML_SUCCESS)
		*index = (unsigned int)(device - slots);
	return ret;
}

/* The number N of /dev/nvidiaN. */
EXPORT nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor)
{
	return nvmlDeviceGetIndex(device, minor);
}

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
	struct card card;
	nvmlReturn_t ret = query(device, CALL_IDENTITY, &card);

	return ret == NVML_SUCCESS ? copy_string(card.uuid, uuid, length) : ret;
}

EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
	struct card card;
	nvmlReturn_t ret = query(device, CALL_QUERY, &card);

	return ret == NVML_SUCCESS ? copy_string(card.model, name, length) : ret;
}

EXPORT nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t device, unsigned int *brand)
{
	struct card card;
	nvmlReturn_t ret = brand == NULL ? NVML_ERROR_INVALID_ARGUMENT : query(device, CALL_QUERY, &card);

	if (ret != NVML_SUCCESS)
		return ret;
	*brand = NVML_BRAND_UNKNOWN;
	if (strncmp(card.model, "Tesla ", strlen("Tesla ")) == 0)
		*brand = NVML_BRAND_TESLA;
	else if (strncmp(card.model, "NVIDIA ", strlen("NVIDIA ")) == 0)
		*brand = NVML_BRAND_NVIDIA;
	return ret;
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
	struct card card;
	nvmlReturn_t ret = pci == NULL ? NVML_ERROR_INVALID_ARGUMENT : query(device, CALL_IDENTITY, &card);

	if (ret != NVML_SUCCESS)
		return ret;
	memset(pci, 0, sizeof(*pci));
	pci->bus = (unsigned int)(device - slots) + 1;
	pci->pciDeviceId = 0x1DB410DE; /* device 0x1DB4 of vendor 0x10DE, NVIDIA */
	snprintf(pci->busIdLegacy, sizeof(pci->busIdLegacy), "0000:%02X:00.0", pci->bus & 0xFFU);
	snprintf(pci->busId, sizeof(pci->busId), "00000000:%02X:00.0", pci->bus & 0xFFU);
	return ret;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
	struct card card;
	nvmlReturn_t ret = memory == NULL ? NVML_ERROR_INVALID_ARGUMENT : query(device, CALL_MEMORY, &card);

	if (ret != NVML_SUCCESS)
		return ret;
	/* The first version counts reserved memory as used. */
	memory->total = card.memory;
	memory->used = card.reserved + used_by_processes(&card, NULL);
	memory->free = memory->used < memory->total ? memory->total - memory->used : 0;
	return ret;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
	struct card card;

	if (memory == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (memory->version != NVML_MEMORY_V2)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	nvmlMemory_t first;
	nvmlReturn_t ret = nvmlDeviceGetMemoryInfo(device, &first);
	if (ret == NVML_SUCCESS)
		ret = query(device, CALL_MEMORY, &card);
	if (ret == NVML_SUCCESS)
		*memory = (nvmlMemory_v2_t){
			.version = NVML_MEMORY_V2, .total = first.total, .reserved = card.reserved,
			.free = first.free, .used = first.used - card.reserved,
		};
	return ret;
}

EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
	struct card card;

	if (major == NULL || minor == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	nvmlReturn_t ret = query(device, CALL_QUERY, &card);
	if (ret == NVML_SUCCESS) {
		*major = card.major;
		*minor = card.minor;
	}
	return ret;
}

/* The architecture follows from the compute capability, as in the CUDA documentation. */
static const struct {
	int major, minor; /* the first capability */
	unsigned int architecture;
} architectures[] = {
	{10, 0, 10 /* Blackwell */}, {9, 0, 9 /* Hopper */}, {8, 9, 8 /* Ada */}, {8, 0, 7 /* Ampere */}, {7, 5, 6 /* Turing */},
	{7, 0, 5 /* Volta */}, {6, 0, 4 /* Pascal */}, {5, 0, 3 /* Maxwell */}, {3, 0, 2 /* Kepler */},
};

EXPORT nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, unsigned int *architecture)
{
	struct card card;
	nvmlReturn_t ret = architecture == NULL ? NVML_ERROR_INVALID_ARGUMENT : query(device, CALL_QUERY, &card);

	if (ret != NVML_SUCCESS)
		return ret;
	*architecture = NVML_DEVICE_ARCH_UNKNOWN;
	for (unsigned int i = 0; i < sizeof(architectures) / sizeof(*architectures); i++) {
		if (card.major > architectures[i].major ||
			(card.major == architectures[i].major && card.minor >= architectures[i].minor)) {
			*architecture = architectures[i].architecture;
			break;
		}
	}
	return ret;
}

/* Finds the cards of two handles. A handle's link to itself is invalid, as in the real library. */
static nvmlReturn_t query_pair(nvmlDevice_t a, nvmlDevice_t b, struct card *card_a, struct card *card_b)
{
	if (a == b)
		return NVML_ERROR_INVALID_ARGUMENT;
	nvmlReturn_t ret = query(a, CALL_QUERY, card_a);
	return ret == NVML_SUCCESS ? query(b, CALL_QUERY, card_b) : ret;
}

EXPORT nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t a, nvmlDevice_t b, int *level)
{
	struct card card_a, card_b;
	nvmlReturn_t ret = level == NULL ? NVML_ERROR_INVALID_ARGUMENT : query_pair(a, b, &card_a, &card_b);

	if (ret != NVML_SUCCESS)
		return ret;
	*level = NVML_TOPOLOGY_SYSTEM;
	if (card_a.pcie_switch >= 0 && card_a.pcie_switch == card_b.pcie_switch)
		*level = NVML_TOPOLOGY_SINGLE;
	else if (card_a.numa >= 0 && card_a.numa == card_b.numa)
		*level = NVML_TOPOLOGY_NODE;
	return ret;
}

EXPORT nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t a, nvmlDevice_t b, int kind, int *status)
{
	struct card card_a, card_b;
	nvmlReturn_t ret = status == NULL ? NVML_ERROR_INVALID_ARGUMENT : query_pair(a, b, &card_a, &card_b);

	if (ret != NVML_SUCCESS)
		return ret;
	if (kind != NVML_P2P_CAPS_INDEX_NVLINK)
		return NVML_ERROR_NOT_SUPPORTED;
	*status = card_a.nvlink >= 0 && card_a.nvlink == card_b.nvlink ? NVML_P2P_STATUS_OK : NVML_P2P_STATUS_NOT_SUPPORTED;
	return ret;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned int size, unsigned long *nodes, int scope)
{
	const unsigned int bits = 8 * sizeof(*nodes);
	struct card card;

	if (nodes == NULL || size == 0 || scope < 0 || scope > 1)
		return NVML_ERROR_INVALID_ARGUMENT;
	nvmlReturn_t ret = query(device, CALL_QUERY, &card);
	if (ret != NVML_SUCCESS)
		return ret;
	if (card.numa < 0)
		return NVML_ERROR_NOT_SUPPORTED;
	if ((unsigned int)card.numa >= size * bits)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	memset(nodes, 0, size * sizeof(*nodes));
	nodes[(unsigned int)card.numa / bits] = 1UL << ((unsigned int)card.numa % bits);
	return ret;
}

EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
	struct card card;

	if (current == NULL || pending == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	nvmlReturn_t ret = query(device, CALL_QUERY, &card);
	if (ret == NVML_SUCCESS)
		*current = *pending = card.state->mig;
	return ret;
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
	struct card card;
	nvmlReturn_t ret = count == NULL ? NVML_ERROR_INVALID_ARGUMENT : query(device, CALL_QUERY, &card);

	if (ret == NVML_SUCCESS)
		*count = card.state->mig ? 7 : 0;
	return ret;
}

/* A card in MIG mode has no instances, and none can be made. So each handle is that of a card. */

EXPORT nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is)
{
	struct card card;
	nvmlReturn_t ret = is == NULL ? NVML_ERROR_INVALID_ARGUMENT : query(device, CALL_QUERY, &card);

	if (ret == NVML_SUCCESS)
		*is = 0;
	return ret;
}

EXPORT nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *instance)
{
	struct card card;
	nvmlReturn_t ret = instance == NULL || index >= 7 ? NVML_ERROR_INVALID_ARGUMENT : query(device, CALL_QUERY, &card);

	if (ret != NVML_SUCCESS)
		return ret;
	return card.state->mig ? NVML_ERROR_NOT_FOUND : NVML_ERROR_NOT_SUPPORTED;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device, unsigned int profile, void *info)
{
	struct card card;
	nvmlReturn_t ret = info == NULL ? NVML_ERROR_INVALID_ARGUMENT : query(device, CALL_QUERY, &card);

	(void)profile;
	return ret == NVML_SUCCESS ? NVML_ERROR_NOT_SUPPORTED : ret;
}

EXPORT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
	struct card card;

	if (values == NULL || count <= 0)
		return NVML_ERROR_INVALID_ARGUMENT;
	nvmlReturn_t ret = query(device, CALL_QUERY, &card);
	for (int i = 0; ret == NVML_SUCCESS && i < count; i++) {
		nvmlFieldValue_t *v = &values[i];
		if (v->fieldId != NVML_FI_DEV_GET_GPU_RECOVERY_ACTION || card.state->recovery < 0) {
			v->nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
			continue;
		}
		v->nvmlReturn = NVML_SUCCESS;
		v->valueType = NVML_VALUE_TYPE_UNSIGNED_INT;
		v->value.uiVal = (unsigned int)card.state->recovery;
	}
	return ret;
}
