/*
 * A CUDA program that needs no CUDA toolkit: it loads the driver's libcuda.so.1. It allocates memory of its first card, in MiB:
 *
 *     cudaprogram MIB
 *
 * It prints "runs FREE TOTAL" (MiB, as cuMemGetInfo reports them before the allocation) and waits until its standard input ends or a call fails, or
 * prints the call that failed with its CUresult and ends with status 1. The declarations are those of CUDA's driver API.
 */
#include <dlfcn.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

static void *library;

static void *function(const char *name)
{
	void *symbol = dlsym(library, name);

	if (symbol == NULL) {
		printf("libcuda has no %s\n", name);
		exit(1);
	}
	return symbol;
}

static void check(const char *call, int result)
{
	if (result != 0) {
		printf("%s: %d\n", call, result);
		exit(1);
	}
}

int main(int argc, char **argv)
{
	void *context;
	unsigned long long pointer;
	size_t available, total, mib = argc > 1 ? strtoul(argv[1], NULL, 10) : 0;
	int device;

	library = dlopen("libcuda.so.1", RTLD_NOW);
	if (library == NULL) {
		printf("%s\n", dlerror());
		return 1;
	}
	check("cuInit", ((int (*)(unsigned int))function("cuInit"))(0));
	check("cuDeviceGet", ((int (*)(int *, int))function("cuDeviceGet"))(&device, 0));
	check("cuCtxCreate", ((int (*)(void **, unsigned int, int))function("cuCtxCreate_v2"))(&context, 0, device));
	check("cuMemGetInfo", ((int (*)(size_t *, size_t *))function("cuMemGetInfo_v2"))(&available, &total));
	check("cuMemAlloc", ((int (*)(unsigned long long *, size_t))function("cuMemAlloc_v2"))(&pointer, mib << 20));
	printf("runs %zu %zu\n", available >> 20, total >> 20);
	fflush(stdout);
	/* It notices when its MPS server has ended. */
	struct pollfd input = {.fd = 0, .events = POLLIN};
	while (poll(&input, 1, 100) == 0)
		check("cuMemGetInfo", ((int (*)(size_t *, size_t *))function("cuMemGetInfo_v2"))(&available, &total));
	return 0;
}
