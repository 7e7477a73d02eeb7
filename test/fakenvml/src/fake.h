/* What the fake's files share. One lock guards all of it; functions named *_locked are called with the lock held. */
#ifndef FAKENVML_FAKE_H
#define FAKENVML_FAKE_H

#include <pthread.h>
#include <stdbool.h>

#include "abi.h"

#define MAX_CARDS 64
#define MAX_LINE 512
#define UUID_SIZE 80
#define MODEL_SIZE 96
#define POLL_MS 10

/* The kinds of call that a broken card can refuse. */
enum call {
	CALL_HANDLE = 1 << 0, /* getting the card's handle */
	CALL_IDENTITY = 1 << 1, /* index, UUID, PCI address */
	CALL_QUERY = 1 << 2, /* name, affinity, MIG mode */
	CALL_MEMORY = 1 << 3,
	CALL_EVENTS = 1 << 4,
	CALL_ALL = (1 << 5) - 1
};

/* What is wrong with a card: the calls that fail, and with what. */
struct state {
	const char *name;
	nvmlReturn_t error;
	unsigned int calls;
	bool mig, hang;
	int recovery; /* what the card needs: nvmlDeviceGpuRecoveryAction_t; -1: it doesn't know the question */
};

/* One line of the cards file. */
struct card {
	char uuid[UUID_SIZE];
	char model[MODEL_SIZE];
	unsigned long long memory; /* bytes */
	int numa; /* -1: not known */
	const struct state *state;
};

/* A card as it was enumerated at nvmlInit; its address is the handle, its place in slots the index. */
struct slot {
	char uuid[UUID_SIZE];
};

extern pthread_mutex_t lock;
extern unsigned int init_count; /* nvmlInit calls not yet matched by nvmlShutdown */
extern struct slot slots[MAX_CARDS];
extern unsigned int slot_count;

void sleep_ms(unsigned int ms);

/* cards.c */
nvmlReturn_t read_cards(struct card *cards, unsigned int *count, bool explain);
nvmlReturn_t card_locked(nvmlDevice_t device, enum call call, struct card *card);

/* events.c */
void free_event_sets_locked(void);

#endif
