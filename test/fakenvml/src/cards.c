/*
 * The cards file, named by the environment variable FAKE_NVML_CARDS. One card a line, in NVML's order of indices:
 *
 *     UUID, model, memory in MiB, NUMA node or "-" [, state]
 *
 * Empty lines and lines that begin with '#' are skipped; an empty file is a machine without cards. It is read again at
 * every call, so a card can be broken and mended while a process runs. Replace the file by rename: one that is caught
 * half written is a bad file. As with the real library, the *set* of cards is fixed by the nvmlInit that brings the
 * count of initializations to one: a card that leaves the file is lost, one that is added is seen after shutdown and
 * another init.
 *
 * The states are the table below. The line "mismatch" stands for a driver that doesn't match the library: every call fails
 * with NVML_ERROR_LIB_RM_VERSION_MISMATCH. No file: NVML_ERROR_DRIVER_NOT_LOADED. A bad one: NVML_ERROR_UNKNOWN, with the line
 * named on stderr at nvmlInit.
 */
#define _POSIX_C_SOURCE 200809L

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>

#include "fake.h"

static const struct state states[] = {
	{.name = "ok"},
	/* fallen off the bus */
	{.name = "lost", .error = NVML_ERROR_GPU_IS_LOST, .calls = CALL_ALL},
	/* recognised, but to be reset before it does anything */
	{.name = "reset", .error = NVML_ERROR_RESET_REQUIRED, .calls = CALL_QUERY | CALL_MEMORY | CALL_EVENTS},
	/* the device node isn't there for this process */
	{.name = "denied", .error = NVML_ERROR_NO_PERMISSION, .calls = CALL_HANDLE},
	/* everything answers but its memory */
	{.name = "nomemory", .error = NVML_ERROR_UNKNOWN, .calls = CALL_MEMORY},
	/* it shares the machine's memory and has none of its own */
	{.name = "unified", .error = NVML_ERROR_NOT_SUPPORTED, .calls = CALL_MEMORY},
	/* everything answers, but the driver asks for a reset of the card */
	{.name = "wantsreset", .recovery = 1},
	/* too old to be asked what it needs */
	{.name = "norecovery", .recovery = -1},
	/* too old to report events */
	{.name = "noevents", .error = NVML_ERROR_NOT_SUPPORTED, .calls = CALL_EVENTS},
	/* partitioned: MIG mode is on */
	{.name = "mig", .mig = true},
	/* calls about it don't return until the file gives it another state */
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

static char *trim(char *s)
{
	s += strspn(s, " \t\r\n");
	size_t n = strlen(s);
	while (n > 0 && strchr(" \t\r\n", s[n - 1]) != NULL)
		s[--n] = '\0';
	return s;
}

static bool parse_number(const char *s, unsigned long long max, unsigned long long *out)
{
	char *end;

	if (*s < '0' || *s > '9')
		return false;
	errno = 0;
	*out = strtoull(s, &end, 10);
	return errno == 0 && *end == '\0' && *out <= max;
}

/* Reads one card; returns what is wrong with the line, or NULL. */
static const char *parse_card(char *line, struct card *card)
{
	char *fields[5];
	unsigned int n = 0;
	unsigned long long number;

	for (char *rest = line; rest != NULL; n++) {
		if (n == 5)
			return "more than five fields";
		char *comma = strchr(rest, ',');
		if (comma != NULL)
			*comma++ = '\0';
		fields[n] = trim(rest);
		rest = comma;
	}
	if (n < 4)
		return "want: UUID, model, memory in MiB, NUMA node [, state]";

	memset(card, 0, sizeof(*card));
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
	card->state = find_state(n == 5 ? fields[4] : "ok");
	return card->state == NULL ? "no such state" : NULL;
}

nvmlReturn_t read_cards(struct card *cards, unsigned int *count, bool explain)
{
	const char *path = getenv("FAKE_NVML_CARDS");
	FILE *file = path == NULL ? NULL : fopen(path, "re");
	char *line = NULL;
	size_t size = 0;
	ssize_t length;
	const char *problem = NULL;
	unsigned int number = 0;
	bool mismatch = false;

	*count = 0;
	if (file == NULL)
		return NVML_ERROR_DRIVER_NOT_LOADED;
	while (problem == NULL && (length = getline(&line, &size, file)) >= 0) {
		number++;
		if (length >= MAX_LINE || strlen(line) != (size_t)length) {
			problem = "line too long, or with a zero byte";
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
		for (unsigned int i = 0; problem == NULL && i < *count; i++) {
			if (strcmp(cards[i].uuid, cards[*count].uuid) == 0)
				problem = "UUID used twice";
		}
		(*count)++;
	}
	if (problem == NULL && ferror(file))
		problem = "cannot be read";
	free(line);
	fclose(file);
	if (problem == NULL && !mismatch)
		return NVML_SUCCESS;
	*count = 0;
	if (problem == NULL)
		return NVML_ERROR_LIB_RM_VERSION_MISMATCH;
	if (explain)
		fprintf(stderr, "fake NVML: %s:%u: %s\n", path, number, problem);
	return NVML_ERROR_UNKNOWN;
}

static bool is_slot(nvmlDevice_t device)
{
	for (unsigned int i = 0; i < slot_count; i++) {
		if (device == &slots[i])
			return true;
	}
	return false;
}

/*
 * Finds a handle's line in the file as it is now, and fails the way the card's state has it for this kind of call.
 * Gives the lock up while a card hangs: the others still answer.
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
			return card->state->calls & call ? card->state->error : NVML_SUCCESS;
		pthread_mutex_unlock(&lock);
		sleep_ms(POLL_MS);
		pthread_mutex_lock(&lock);
	}
}
