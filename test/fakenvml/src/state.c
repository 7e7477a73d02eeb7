/*
 * What other programs and the cards' users change: memory limits of cgroups, processes on the cards, compute modes. It is
 * kept in files in the folder that the environment variable FAKE_NVML_STATE names, for all processes of the machine:
 *
 *     limits/UUID/INODE    a cgroup's limits on a card: soft and hard in bytes, and the cgroup's path, which may have been removed
 *     modes/UUID           a card's compute mode
 *     processes            one process per line: UUID, PID, "compute", "graphics" or "mps", memory in MiB or "-" [, path of its cgroup]
 *
 * The library writes the first two; a test writes the third, by rename. Without the variable nothing can be set, and no card has
 * a process. As with the real driver, a cgroup's limits end with it: INODE is the inode of its folder, and the kernel
 * gives each cgroup another one.
 */
#define _POSIX_C_SOURCE 200809L

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "fake.h"

#define MAX_PATH 4096
#define CGROUP_V1 0x27e0eb /* the magic number of its file system */

static bool state_path(char *path, const char *kind, const char *name)
{
	const char *folder = getenv("FAKE_NVML_STATE");

	if (folder == NULL)
		return false;
	return (size_t)snprintf(path, MAX_PATH, "%s/%s/%s", folder, kind, name) < MAX_PATH;
}

/* Creates the folders above a path. */
static bool make_folders(char *path)
{
	for (char *slash = strchr(path + 1, '/'); slash != NULL; slash = strchr(slash + 1, '/')) {
		*slash = '\0';
		bool made = mkdir(path, 0755) == 0 || errno == EEXIST;
		*slash = '/';
		if (!made)
			return false;
	}
	return true;
}

/* Replaces a file, so that a reader never sees a part of it. */
static bool replace(char *path, const char *text)
{
	char temporary[MAX_PATH + 16];

	snprintf(temporary, sizeof(temporary), "%s.XXXXXX", path);
	int fd = make_folders(path) ? mkstemp(temporary) : -1;
	if (fd < 0)
		return false;
	bool written = write(fd, text, strlen(text)) == (ssize_t)strlen(text) && fchmod(fd, 0644) == 0;
	return close(fd) == 0 && written && rename(temporary, path) == 0;
}

#ifndef FAKE_NVML_BEFORE_R615

/* Returns the path of the file with a cgroup's limits. */
static nvmlReturn_t limits_path(char *path, const struct card *card, const char *cgroup)
{
	char name[UUID_SIZE + 32];
	struct stat info;
	struct statfs system;

	/* Only an absolute path of an existing cgroup of version 2. A test can use another folder. */
	if (cgroup[0] != '/' || stat(cgroup, &info) != 0 || !S_ISDIR(info.st_mode) || statfs(cgroup, &system) != 0 ||
		system.f_type == CGROUP_V1)
		return NVML_ERROR_OPERATING_SYSTEM;
	snprintf(name, sizeof(name), "%s/%llu", card->uuid, (unsigned long long)info.st_ino);
	return state_path(path, "limits", name) ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

EXPORT nvmlReturn_t nvmlDeviceSetMemoryLimits_v1(nvmlDevice_t device, nvmlSetMemoryLimits_v1_t *limits)
{
	char path[MAX_PATH], text[MAX_PATH + 64];
	struct card card;

	if (limits == NULL || limits->nameSpace == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	nvmlReturn_t ret = query(device, CALL_LIMITS, &card);
	if (ret == NVML_SUCCESS && geteuid() != 0)
		ret = NVML_ERROR_NO_PERMISSION;
	if (ret != NVML_SUCCESS)
		return ret;
	if (limits->softLimit > limits->hardLimit || limits->softLimit > card.memory ||
		(limits->hardLimit > card.memory && limits->hardLimit != NVML_DEVICE_MEMORY_LIMIT_MAX))
		return NVML_ERROR_INVALID_ARGUMENT;
	ret = limits_path(path, &card, limits->nameSpace);
	if (ret != NVML_SUCCESS || card.ignores_limits)
		return ret;
	if (snprintf(text, sizeof(text), "%llu %llu %s\n", limits->softLimit, limits->hardLimit, limits->nameSpace) >= (int)sizeof(text))
		return NVML_ERROR_INVALID_ARGUMENT;
	return replace(path, text) ? NVML_SUCCESS : NVML_ERROR_UNKNOWN;
}

/* A cgroup whose limits were never set isn't found; one whose limits were cleared has no soft and the maximal hard limit. */
EXPORT nvmlReturn_t nvmlDeviceGetMemoryLimits_v1(nvmlDevice_t device, nvmlGetMemoryLimits_v1_t *limits)
{
	char path[MAX_PATH];
	struct card card;

	if (limits == NULL || limits->nameSpace == NULL)
		return NVML_ERROR_INVALID_ARGUMENT;
	nvmlReturn_t ret = query(device, CALL_LIMITS, &card);
	if (ret == NVML_SUCCESS)
		ret = limits_path(path, &card, limits->nameSpace);
	if (ret != NVML_SUCCESS)
		return ret;
	FILE *file = fopen(path, "re");
	if (file == NULL)
		return errno == ENOENT ? NVML_ERROR_NOT_FOUND : NVML_ERROR_UNKNOWN;
	if (fscanf(file, "%llu %llu", &limits->softLimit, &limits->hardLimit) != 2)
		ret = NVML_ERROR_UNKNOWN;
	fclose(file);
	limits->currentUsed = used_by_processes(&card, limits->nameSpace);
	return ret;
}

#endif

static const char compute[] = "compute", graphics[] = "graphics", mps[] = "mps";

/* A line of the processes file. */
struct process {
	char *uuid, *cgroup; /* cgroup is empty if unknown */
	unsigned int pid;
	const char *kind;
	unsigned long long memory;
};

static bool parse_process(char *line, struct process *process)
{
	char *fields[5];
	unsigned int n = split(line, fields, 5);
	unsigned long long pid;

	if (n < 4 || n > 5 || !parse_number(fields[1], 1ULL << 31, &pid))
		return false;
	*process = (struct process){.uuid = fields[0], .pid = (unsigned int)pid, .cgroup = n == 5 ? fields[4] : fields[0] + strlen(fields[0])};
	process->kind = strcmp(fields[2], "graphics") == 0 ? graphics : strcmp(fields[2], "mps") == 0 ? mps : compute;
	if (strcmp(fields[2], process->kind) != 0)
		return false;
	if (strcmp(fields[3], "-") == 0) {
		process->memory = NVML_VALUE_NOT_AVAILABLE;
		return true;
	}
	if (!parse_number(fields[3], 1ULL << 40, &process->memory))
		return false;
	process->memory <<= 20;
	return true;
}

/* Calls visit for each process on a card. Returns NVML_ERROR_UNKNOWN for an invalid file. */
static nvmlReturn_t each_process(const struct card *card, void (*visit)(const struct process *, void *), void *argument)
{
	char path[MAX_PATH];
	char *line = NULL;
	size_t size = 0;
	nvmlReturn_t ret = NVML_SUCCESS;
	FILE *file = state_path(path, ".", "processes") ? fopen(path, "re") : NULL;

	while (file != NULL && ret == NVML_SUCCESS && getline(&line, &size, file) >= 0) {
		struct process process;
		char *text = trim(line);
		if (*text == '\0' || *text == '#')
			continue;
		if (!parse_process(text, &process))
			ret = NVML_ERROR_UNKNOWN;
		else if (strcmp(process.uuid, card->uuid) == 0)
			visit(&process, argument);
	}
	free(line);
	if (file != NULL)
		fclose(file);
	return ret;
}

struct use {
	const char *cgroup; /* NULL: any */
	unsigned long long bytes;
};

static void add_use(const struct process *process, void *argument)
{
	struct use *use = argument;
	size_t length = use->cgroup == NULL ? 0 : strlen(use->cgroup);

	/* The cgroup itself and those below it. */
	if (length > 0 && (strncmp(process->cgroup, use->cgroup, length) != 0 ||
		(process->cgroup[length] != '\0' && process->cgroup[length] != '/')))
		return;
	if (process->memory != NVML_VALUE_NOT_AVAILABLE)
		use->bytes += process->memory;
}

/* Returns the memory of the processes in a cgroup, or of all if cgroup is NULL. */
unsigned long long used_by_processes(const struct card *card, const char *cgroup)
{
	struct use use = {.cgroup = cgroup};

	each_process(card, add_use, &use);
	return use.bytes;
}

struct listing {
	const char *kind;
	unsigned int size, count;
	nvmlProcessInfo_t *infos;
};

static void add_to_listing(const struct process *process, void *argument)
{
	struct listing *listing = argument;

	if (process->kind != listing->kind)
		return;
	if (listing->count < listing->size)
		listing->infos[listing->count] = (nvmlProcessInfo_t){
			.pid = process->pid, .usedGpuMemory = process->memory,
			.gpuInstanceId = NVML_NO_INSTANCE, .computeInstanceId = NVML_NO_INSTANCE,
		};
	listing->count++;
}

static nvmlReturn_t list_processes(nvmlDevice_t device, const char *kind, unsigned int *count, nvmlProcessInfo_t *infos)
{
	struct card card;

	if (count == NULL || (infos == NULL && *count > 0))
		return NVML_ERROR_INVALID_ARGUMENT;
	struct listing listing = {.kind = kind, .size = *count, .infos = infos};
	nvmlReturn_t ret = query(device, CALL_PROCESSES, &card);
	if (ret == NVML_SUCCESS)
		ret = each_process(&card, add_to_listing, &listing);
	if (ret != NVML_SUCCESS)
		return ret;
	*count = listing.count;
	return listing.count > listing.size ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos)
{
	return list_processes(device, compute, count, infos);
}

EXPORT nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos)
{
	return list_processes(device, graphics, count, infos);
}

EXPORT nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos)
{
	return list_processes(device, mps, count, infos);
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, unsigned int *mode)
{
	char path[MAX_PATH];
	struct card card;
	nvmlReturn_t ret = mode == NULL ? NVML_ERROR_INVALID_ARGUMENT : query(device, CALL_QUERY, &card);

	if (ret != NVML_SUCCESS)
		return ret;
	*mode = 0; /* the default mode */
	FILE *file = state_path(path, "modes", card.uuid) ? fopen(path, "re") : NULL;
	if (file == NULL)
		return NVML_SUCCESS;
	if (fscanf(file, "%u", mode) != 1)
		ret = NVML_ERROR_UNKNOWN;
	fclose(file);
	return ret;
}

EXPORT nvmlReturn_t nvmlDeviceSetComputeMode(nvmlDevice_t device, unsigned int mode)
{
	char path[MAX_PATH], text[16];
	struct card card;
	nvmlReturn_t ret = query(device, CALL_QUERY, &card);

	if (ret != NVML_SUCCESS)
		return ret;
	if (mode >= NVML_COMPUTEMODE_COUNT)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (geteuid() != 0)
		return NVML_ERROR_NO_PERMISSION;
	if (mode == NVML_COMPUTEMODE_EXCLUSIVE_THREAD || !state_path(path, "modes", card.uuid))
		return NVML_ERROR_NOT_SUPPORTED;
	snprintf(text, sizeof(text), "%u\n", mode);
	return replace(path, text) ? NVML_SUCCESS : NVML_ERROR_UNKNOWN;
}
