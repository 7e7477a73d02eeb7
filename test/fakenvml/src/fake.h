/* Declarations shared by the fake's files. One lock guards all state; functions named *_locked are called with it held. */
#ifndef FAKENVML_FAKE_H
#define FAKENVML_FAKE_H

#include <pthread.h>
#include <stdbool.h>

#include "abi.h"

#define MAX_CARDS 64
#define MAX_LINE 512
#define UUID_SIZE 96 /* NVML_DEVICE_UUID_V2_BUFFER_SIZE */
#define MODEL_SIZE 96
#define POLL_MS 20

/* The kinds of call that can fail for a card. */
enum call {
	CALL_HANDLE = 1 << 0, /* getting the card's handle */
	CALL_IDENTITY = 1 << 1, /* index, UUID, PCI address */
	CALL_QUERY = 1 << 2, /* name, affinity, MIG mode, links to other cards */
	CALL_MEMORY = 1 << 3,
	CALL_EVENTS = 1 << 4,
	CALL_LIMITS = 1 << 5, /* memory limits of cgroups */
	CALL_PROCESSES = 1 << 6,
	CALL_ALL = (1 << 7) - 1
};

/* A card's failure: the kinds of call that fail, and their error. */
struct state {
	const char *name;
	nvmlReturn_t error;
	unsigned int calls;
	bool mig, hang;
	int recovery; /* nvmlDeviceGpuRecoveryAction_t; -1: not supported */
};

/* One line of the cards file. */
struct card {
	char uuid[UUID_SIZE];
	char model[MODEL_SIZE];
	unsigned long long memory; /* bytes */
	int numa; /* -1: unknown */
	const struct state *state;
	unsigned long long reserved; /* bytes of memory that the driver keeps */
	int major, minor; /* compute capability */
	int nvlink, pcie_switch; /* cards with the same number are linked; -1: none */
	nvmlReturn_t limits, processes, memory_query; /* error of these calls */
	bool ignores_limits; /* setting a limit succeeds without effect */
};

/* A card as enumerated at nvmlInit. Its address is the handle, its position in slots the index. */
struct slot {
	char uuid[UUID_SIZE];
};

extern pthread_mutex_t lock;
extern unsigned int init_count; /* nvmlInit calls without an nvmlShutdown */
extern struct slot slots[MAX_CARDS];
extern unsigned int slot_count;

/* library.c */
void sleep_ms(unsigned int ms);
nvmlReturn_t query(nvmlDevice_t device, enum call call, struct card *card);

/* cards.c */
char *trim(char *s);
bool parse_number(const char *s, unsigned long long max, unsigned long long *out);
unsigned int split(char *line, char **fields, unsigned int max);
nvmlReturn_t read_cards(struct card *cards, unsigned int *count, bool explain);
nvmlReturn_t card_locked(nvmlDevice_t device, enum call call, struct card *card);

/* state.c */
unsigned long long used_by_processes(const struct card *card, const char *cgroup);

/* events.c */
void free_event_sets_locked(void);

#endif
