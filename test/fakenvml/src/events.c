/*
 * Xid events, from the file named by the environment variable FAKE_NVML_EVENTS. Each appended line,
 *
 *     UUID or index, a space, Xid
 *
 * is delivered once to each event set in which that card is registered. As with the real library, events before a set's
 * first registration aren't delivered. A line is read once its newline is written. For an invalid line, or a line for
 * an unknown card, nvmlEventSetWait_v2 returns NVML_ERROR_UNKNOWN once. A file that shrinks is read from the start. If
 * no event is left and a registered card is lost, waiting returns NVML_ERROR_GPU_IS_LOST immediately.
 */
#define _POSIX_C_SOURCE 200809L

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "fake.h"

struct event_set {
	struct event_set *next;
	off_t offset; /* position of the first unread byte of the events file */
	bool started; /* a card is registered, so offset is valid */
	bool registered[MAX_CARDS];
};

static struct event_set *event_sets;

static bool is_event_set(nvmlEventSet_t set)
{
	for (struct event_set *s = event_sets; s != NULL; s = s->next) {
		if (s == set)
			return true;
	}
	return false;
}

void free_event_sets_locked(void)
{
	while (event_sets != NULL) {
		struct event_set *next = event_sets->next;
		free(event_sets);
		event_sets = next;
	}
}

EXPORT nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
	nvmlReturn_t ret = NVML_SUCCESS;

	if (set == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	pthread_mutex_lock(&lock);
	if (init_count == 0) {
		ret = NVML_ERROR_UNINITIALIZED;
	} else if ((*set = calloc(1, sizeof(**set))) == NULL) {
		ret = NVML_ERROR_MEMORY;
	} else {
		(*set)->next = event_sets;
		event_sets = *set;
	}
	pthread_mutex_unlock(&lock);
	return ret;
}

EXPORT nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
	nvmlReturn_t ret = NVML_ERROR_INVALID_ARGUMENT;

	pthread_mutex_lock(&lock);
	if (init_count == 0)
		ret = NVML_ERROR_UNINITIALIZED;
	for (struct event_set **at = &event_sets; *at != NULL; at = &(*at)->next) {
		if (*at == set) {
			*at = set->next;
			free(set);
			ret = NVML_SUCCESS;
			break;
		}
	}
	pthread_mutex_unlock(&lock);
	return ret;
}

EXPORT nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
	struct card card;

	if (types == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	pthread_mutex_lock(&lock);
	nvmlReturn_t ret = card_locked(device, CALL_EVENTS, &card);
	pthread_mutex_unlock(&lock);
	if (ret == NVML_ERROR_NOT_SUPPORTED) {
		*types = 0;
		return NVML_SUCCESS;
	}
	if (ret == NVML_SUCCESS)
		*types = NVML_EVENT_XID;
	return ret;
}

/* Opens the events file. Returns -1 if there is none. */
static int open_events(off_t *size)
{
	const char *path = getenv("FAKE_NVML_EVENTS");
	struct stat info;
	int fd = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);

	*size = 0;
	if (fd >= 0 && fstat(fd, &info) == 0)
		*size = info.st_size;
	return fd;
}

EXPORT nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
	struct card card;

	pthread_mutex_lock(&lock);
	nvmlReturn_t ret = card_locked(device, CALL_EVENTS, &card);
	if (ret == NVML_SUCCESS && !is_event_set(set))
		ret = NVML_ERROR_INVALID_ARGUMENT;
	if (ret == NVML_SUCCESS && (types & ~NVML_EVENT_XID) != 0)
		ret = NVML_ERROR_NOT_SUPPORTED;
	if (ret == NVML_SUCCESS && types != 0) {
		if (!set->started) {
			int fd = open_events(&set->offset);
			if (fd >= 0)
				close(fd);
			set->started = true;
		}
		set->registered[device - slots] = true;
	}
	pthread_mutex_unlock(&lock);
	return ret;
}

/* Reads the next complete line of the events file. Returns false if there is none. A long line is cut and so is invalid. */
static bool next_line(nvmlEventSet_t set, char *line, size_t size)
{
	off_t end;
	int fd = open_events(&end);
	bool found = false;

	if (fd < 0)
		return false;
	if (end < set->offset)
		set->offset = 0;
	ssize_t n = pread(fd, line, size - 1, set->offset);
	close(fd);
	if (n <= 0)
		return false;
	line[n] = '\0';
	char *newline = memchr(line, '\n', (size_t)n);
	if (newline != NULL) {
		*newline = '\0';
		set->offset += newline - line + 1;
		found = true;
	} else if ((size_t)n == size - 1) {
		set->offset += n;
		found = true;
	}
	return found;
}

static nvmlDevice_t find_slot(const char *name)
{
	char index[16];

	for (unsigned int i = 0; i < slot_count; i++) {
		snprintf(index, sizeof(index), "%u", i);
		if (strcmp(slots[i].uuid, name) == 0 || strcmp(index, name) == 0)
			return &slots[i];
	}
	return NULL;
}

/* Reads the next event of a registered card. Returns NVML_ERROR_TIMEOUT if there is none. */
static nvmlReturn_t next_event(nvmlEventSet_t set, nvmlEventData_t *data)
{
	char line[MAX_LINE], name[UUID_SIZE], extra;
	unsigned int xid;
	struct card card;

	while (set->started && next_line(set, line, sizeof(line))) {
		if (line[strspn(line, " \t\r")] == '\0')
			continue;
		if (sscanf(line, "%79s %9u %c", name, &xid, &extra) != 2)
			return NVML_ERROR_UNKNOWN;
		nvmlDevice_t device = find_slot(name);
		if (device == NULL)
			return NVML_ERROR_UNKNOWN;
		if (!set->registered[device - slots])
			continue;
		*data = (nvmlEventData_t){
			.device = device,
			.eventType = NVML_EVENT_XID,
			.eventData = xid,
			.gpuInstanceId = NVML_NO_INSTANCE,
			.computeInstanceId = NVML_NO_INSTANCE,
		};
		return NVML_SUCCESS;
	}
	for (unsigned int i = 0; i < slot_count; i++) {
		if (!is_event_set(set)) /* freed while the lock was released for a hanging card */
			return NVML_ERROR_INVALID_ARGUMENT;
		if (set->registered[i] && card_locked(&slots[i], CALL_EVENTS, &card) == NVML_ERROR_GPU_IS_LOST)
			return NVML_ERROR_GPU_IS_LOST;
	}
	return NVML_ERROR_TIMEOUT;
}

static long long now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (long long)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

EXPORT nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout)
{
	const long long deadline = now_ms() + timeout;

	if (data == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (;;) {
		nvmlReturn_t ret;

		pthread_mutex_lock(&lock);
		if (init_count == 0)
			ret = NVML_ERROR_UNINITIALIZED;
		else if (!is_event_set(set)) /* invalid, or freed during this wait */
			ret = NVML_ERROR_INVALID_ARGUMENT;
		else
			ret = next_event(set, data);
		pthread_mutex_unlock(&lock);
		if (ret != NVML_ERROR_TIMEOUT)
			return ret;
		long long left = deadline - now_ms();
		if (left <= 0)
			return NVML_ERROR_TIMEOUT;
		sleep_ms(left < POLL_MS ? (unsigned int)left : POLL_MS);
	}
}
