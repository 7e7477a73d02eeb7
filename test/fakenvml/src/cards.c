/*
 * The cards file, named by the environment variable FAKE_NVML_CARDS. One card per line, in NVML's order of indexes:
 *
 *     UUID, model, memory in MiB, NUMA node or "-" [, state [, NAME=VALUE]...]
 *
 * Empty lines and lines that start with '#' are skipped; an empty file is a machine without cards. Every call uses the
 * current file, so a card can fail and recover while a process runs. Replace the file by rename: a partly written file is
 * invalid, and a file that was parsed is parsed again only if its inode, size or change time differs. As with the real
 * library, the *set* of cards is fixed by the nvmlInit that raises the initialization count to one: a card that is removed
 * from the file is lost, and a card that is added is visible after shutdown and another init.
 *
 * The tables below define the states and the names and values. The line "mismatch" is a driver whose version doesn't match the library: every
 * call fails with NVML_ERROR_LIB_RM_VERSION_MISMATCH. No file: NVML_ERROR_DRIVER_NOT_LOADED. An invalid file:
 * NVML_ERROR_UNKNOWN, and nvmlInit prints the line on stderr.
 *
 * Without FAKE_NVML_CARDS the lines are those of the environment variable FAKE_NVML_CARD_LINES, for a container without such a file.
 */
#define _POSIX_C_SOURCE 200809L

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>

#include "fake.h"

#define MAX_FIELDS 12

static const struct state states[] = {
	{.name = "ok"},
	/* fallen off the bus */
	{.name = "lost", .error = NVML_ERROR_GPU_IS_LOST, .calls = CALL_ALL},
	/* recognized, but must be reset before it can be used */
	{.name = "reset", .error = NVML_ERROR_RESET_REQUIRED, .calls = CALL_ALL & ~(CALL_HANDLE | CALL_IDENTITY)},
	/* the process has no access to the device node */
	{.name = "denied", .error = NVML_ERROR_NO_PERMISSION, .calls = CALL_HANDLE},
	/* only the memory query fails */
	{.name = "nomemory", .error = NVML_ERROR_UNKNOWN, .calls = CALL_MEMORY},
	/* shares the machine's memory and has none of its own */
	{.name = "unified", .error = NVML_ERROR_NOT_SUPPORTED, .calls = CALL_MEMORY},
	/* works, but the driver requests a reset of the card */
	{.name = "wantsreset", .recovery = 1},
	/* doesn't support the recovery action query */
	{.name = "norecovery", .recovery = -1},
	/* doesn't support events */
	{.name = "noevents", .error = NVML_ERROR_NOT_SUPPORTED, .calls = CALL_EVENTS},
	/* partitioned: MIG mode is on */
	{.name = "mig", .mig = true},
	/* calls for the card return only when the file gives it another state */
	{.name = "hang", .hang = true},
};

static const struct state *find_state(const char *name)
{
	for (size_t i = 0; i < sizeof(states) / sizeof(states[0]); i++) {
		if (strcmp(states[i].name, name) == 0)
			return &states[i];
	}
	return NULL;
}

char *trim(char *s)
{
	s += strspn(s, " \t\r\n");
	size_t n = strlen(s);
	while (n > 0 && strchr(" \t\r\n", s[n - 1]) != NULL)
		s[--n] = '\0';
	return s;
}

bool parse_number(const char *s, unsigned long long max, unsigned long long *out)
{
	char *end;

	if (*s < '0' || *s > '9')
		return false;
	errno = 0;
	*out = strtoull(s, &end, 10);
	return errno == 0 && *end == '\0' && *out <= max;
}

/* Splits a line at its commas and trims the fields. Returns their number, max + 1 if there are more. */
unsigned int split(char *line, char **fields, unsigned int max)
{
	unsigned int n = 0;

	for (char *rest = line; rest != NULL; n++) {
		if (n == max)
			return max + 1;
		char *comma = strchr(rest, ',');
		if (comma != NULL)
			*comma++ = '\0';
		fields[n] = trim(rest);
		rest = comma;
	}
	return n;
}

/* Parses the error of a kind of call. */
static bool parse_failure(const char *name, nvmlReturn_t *ret)
{
	if (strcmp(name, "unsupported") == 0)
		*ret = NVML_ERROR_NOT_SUPPORTED;
	else if (strcmp(name, "denied") == 0)
		*ret = NVML_ERROR_NO_PERMISSION;
	else if (strcmp(name, "failing") == 0)
		*ret = NVML_ERROR_UNKNOWN;
	else
		return false;
	return true;
}

/* Parses NAME=VALUE. Returns an error message, or NULL. */
static const char *parse_option(char *text, struct card *card)
{
	char *value = strchr(text, '=');
	unsigned long long number;
	char extra;

	if (value == NULL)
		return "option without a value";
	*value++ = '\0';
	if (strcmp(text, "reserved") == 0) {
		if (!parse_number(value, card->memory >> 20, &number))
			return "reserved memory is not a number of MiB up to the card's memory";
		card->reserved = number << 20;
	} else if (strcmp(text, "capability") == 0) {
		if (sscanf(value, "%d.%d%c", &card->major, &card->minor, &extra) != 2)
			return "compute capability is not MAJOR.MINOR";
	} else if (strcmp(text, "limits") == 0) {
		card->ignores_limits = strcmp(value, "ignored") == 0;
		if (!card->ignores_limits && !parse_failure(value, &card->limits))
			return "unknown failure of limits";
	} else if (strcmp(text, "processes") == 0) {
		if (!parse_failure(value, &card->processes))
			return "unknown failure of processes";
	} else if (strcmp(text, "memory") == 0) {
		if (!parse_failure(value, &card->memory_query))
			return "unknown failure of the memory query";
	} else if (strcmp(text, "nvlink") == 0 || strcmp(text, "switch") == 0) {
		if (!parse_number(value, MAX_CARDS, &number))
			return "group of linked cards is not a small number";
		*(text[0] == 'n' ? &card->nvlink : &card->pcie_switch) = (int)number;
	} else {
		return "unknown option";
	}
	return NULL;
}

/* Parses one card. Returns an error message, or NULL. */
static const char *parse_card(char *line, struct card *card)
{
	char *fields[MAX_FIELDS];
	unsigned int n = split(line, fields, MAX_FIELDS);
	unsigned long long number;
	const char *problem = NULL;

	if (n < 4 || n > MAX_FIELDS)
		return "want: UUID, model, memory in MiB, NUMA node [, state [, NAME=VALUE]...]";
	memset(card, 0, sizeof(*card));
	card->major = 7; /* a V100's */
	card->nvlink = card->pcie_switch = -1;
	if (fields[0][0] == '\0' || strlen(fields[0]) >= sizeof(card->uuid))
		return "UUID empty or too long";
	strcpy(card->uuid, fields[0]);
	if (strlen(fields[1]) >= sizeof(card->model))
		return "model too long";
	strcpy(card->model, fields[1]);
	if (!parse_number(fields[2], 1ULL << 40, &number))
		return "memory is not a number of MiB";
	card->memory = number << 20;
	if (strcmp(fields[3], "-") == 0)
		card->numa = -1;
	else if (parse_number(fields[3], 1023, &number))
		card->numa = (int)number;
	else
		return "NUMA node is neither a number nor \"-\"";
	card->state = find_state(n > 4 ? fields[4] : "ok");
	if (card->state == NULL)
		return "unknown state";
	for (unsigned int i = 5; problem == NULL && i < n; i++)
		problem = parse_option(fields[i], card);
	return problem;
}

/* Parses the cards file. */
static nvmlReturn_t parse_cards(const char *path, FILE *file, struct card *cards, unsigned int *count, bool explain)
{
	char *line = NULL;
	size_t size = 0;
	ssize_t length;
	const char *problem = NULL;
	unsigned int number = 0;
	bool mismatch = false;

	*count = 0;
	while (problem == NULL && (length = getline(&line, &size, file)) >= 0) {
		number++;
		if (length >= MAX_LINE || strlen(line) != (size_t)length) {
			problem = "line too long or with a zero byte";
			break;
		}
		char *text = trim(line);
		if (*text == '\0' || *text == '#')
			continue;
		if (strcmp(text, "mismatch") == 0) {
			mismatch = true;
			continue;
		}
		if (*count == MAX_CARDS) {
			problem = "too many cards";
			break;
		}
		problem = parse_card(text, &cards[*count]);
		(*count)++;
	}
	if (problem == NULL && ferror(file))
		problem = "cannot be read";
	free(line);
	if (problem == NULL && !mismatch)
		return NVML_SUCCESS;
	*count = 0;
	if (problem == NULL)
		return NVML_ERROR_LIB_RM_VERSION_MISMATCH;
	if (explain)
		fprintf(stderr, "fake NVML: %s:%u: %s\n", path, number, problem);
	return NVML_ERROR_UNKNOWN;
}

static bool same_file(const struct stat *a, const struct stat *b)
{
	return a->st_dev == b->st_dev && a->st_ino == b->st_ino && a->st_size == b->st_size &&
		a->st_ctim.tv_sec == b->st_ctim.tv_sec && a->st_ctim.tv_nsec == b->st_ctim.tv_nsec;
}

/* Parses the lines in an environment variable, separated by newlines. */
static nvmlReturn_t parse_variable(char *lines, struct card *cards, unsigned int *count, bool explain)
{
	FILE *file = fmemopen(lines, strlen(lines), "r");

	if (file == NULL)
		return NVML_ERROR_MEMORY;
	nvmlReturn_t ret = parse_cards("FAKE_NVML_CARD_LINES", file, cards, count, explain);
	fclose(file);
	return ret;
}

/* Returns the cards of the file, which is parsed only if it has changed: waiting for events calls this many times a second. */
nvmlReturn_t read_cards(struct card *cards, unsigned int *count, bool explain)
{
	static struct stat known;
	static struct card known_cards[MAX_CARDS];
	static unsigned int known_count;
	const char *path = getenv("FAKE_NVML_CARDS");
	char *lines = getenv("FAKE_NVML_CARD_LINES");
	struct stat now;
	FILE *file;
	nvmlReturn_t ret = NVML_SUCCESS;

	*count = 0;
	if (path == NULL && lines != NULL)
		return parse_variable(lines, cards, count, explain);
	if (path == NULL || stat(path, &now) != 0)
		return NVML_ERROR_DRIVER_NOT_LOADED;
	if (!same_file(&known, &now)) {
		file = fopen(path, "re");
		if (file == NULL || fstat(fileno(file), &now) != 0)
			ret = NVML_ERROR_DRIVER_NOT_LOADED;
		else
			ret = parse_cards(path, file, known_cards, &known_count, explain);
		if (file != NULL)
			fclose(file);
		known = ret == NVML_SUCCESS ? now : (struct stat){0};
	}
	if (ret == NVML_SUCCESS) {
		*count = known_count;
		memcpy(cards, known_cards, known_count * sizeof(known_cards[0]));
	}
	return ret;
}

static bool is_slot(nvmlDevice_t device)
{
	for (unsigned int i = 0; i < slot_count; i++) {
		if (device == &slots[i])
			return true;
	}
	return false;
}

/* Returns the error of a kind of call, by the card's state and then by its options. */
static nvmlReturn_t failure(const struct card *card, enum call call)
{
	if (card->state->calls & call)
		return card->state->error;
	if (call == CALL_LIMITS)
		return card->state->mig ? NVML_ERROR_NOT_SUPPORTED : card->limits;
	if (call == CALL_MEMORY)
		return card->memory_query;
	return call == CALL_PROCESSES ? card->processes : NVML_SUCCESS;
}

/*
 * Finds a handle's line in the current file, and returns the card's error for this kind of call. Releases
 * the lock while a card hangs, so that calls for other cards are answered.
 */
nvmlReturn_t card_locked(nvmlDevice_t device, enum call call, struct card *card)
{
	for (;;) {
		struct card cards[MAX_CARDS];
		unsigned int count, i;

		if (init_count == 0)
			return NVML_ERROR_UNINITIALIZED;
		if (!is_slot(device))
			return NVML_ERROR_INVALID_ARGUMENT;
		nvmlReturn_t ret = read_cards(cards, &count, false);
		if (ret != NVML_SUCCESS)
			return ret;
		for (i = 0; i < count && strcmp(cards[i].uuid, device->uuid) != 0; i++)
			;
		if (i == count)
			return NVML_ERROR_GPU_IS_LOST;
		*card = cards[i];
		if (!card->state->hang)
			return failure(card, call);
		pthread_mutex_unlock(&lock);
		sleep_ms(POLL_MS);
		pthread_mutex_lock(&lock);
	}
}
