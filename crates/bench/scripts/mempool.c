// DPDK's mempool as it comes: pages of 4 KiB in memory without huge pages, the default cache of a thread before a ring.
//
// mempool pair N | all N | bulk N      prints the figures of the bench worker `frames` of the same name

#include <rte_eal.h>
#include <rte_errno.h>
#include <rte_mempool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PAGES 262144
#define PAGE 4096

static struct rte_mempool *pool;
static void *pages[PAGES];

static double now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1e9 + time.tv_nsec;
}

static void *get(void)
{
	void *page;
	if (rte_mempool_get(pool, &page) != 0)
		exit(4);
	__asm__ volatile("" ::"r"(page) : "memory");
	return page;
}

static void get_many(size_t count)
{
	if (rte_mempool_get_bulk(pool, pages, count) != 0)
		exit(4);
	__asm__ volatile("" ::"r"(pages) : "memory");
}

static void get_each(size_t count)
{
	for (size_t i = 0; i < count; i++)
		pages[i] = get();
}

static void put_many(size_t count)
{
	rte_mempool_put_bulk(pool, pages, count);
}

static void put_each(size_t count)
{
	for (size_t i = 0; i < count; i++)
		rte_mempool_put(pool, pages[i]);
}

// What a page takes to get and to put: together over many rounds, shared out by what the parts take when they are timed apart.
static void apart(size_t size, void (*getting)(size_t), void (*putting)(size_t))
{
	size_t rounds = 20000000 / size;
	double together = 0, gets = 0, puts = 0;
	for (int timed = 0; timed < 2; timed++) {
		double start = now();
		for (size_t round = 0; round < rounds; round++) {
			getting(size);
			putting(size);
		}
		together = (now() - start) / rounds / size;
	}
	for (size_t round = 0; round < rounds && round < 20000; round++) {
		double start = now();
		getting(size);
		double between = now();
		putting(size);
		gets += between - start;
		puts += now() - between;
	}
	printf("%g\n%g\n", together * gets / (gets + puts), together * puts / (gets + puts));
}

static int order(const void *a, const void *b)
{
	uint64_t x = (uint64_t)(uintptr_t)*(void *const *)a * 0x9e3779b97f4a7c15u;
	uint64_t y = (uint64_t)(uintptr_t)*(void *const *)b * 0x9e3779b97f4a7c15u;
	return (x > y) - (x < y);
}

static void all(size_t count)
{
	double gets = 0, puts = 0;
	for (int round = 0; round < 4; round++) {
		double start = now();
		get_each(count);
		double between = now();
		if (round == 3)
			qsort(pages, count, sizeof pages[0], order);
		double middle = now();
		put_each(count);
		double end = now();
		if (round == 3) {
			printf("%g\n%g\n%g\n", gets / 2, puts / 2, (end - middle) / count);
		} else if (round > 0) {
			gets += (between - start) / count;
			puts += (end - middle) / count;
		}
	}
}

int main(int count, char **arguments)
{
	char *options[] = { "mempool", "--no-huge", "-m", "1400", "--no-pci", "--no-telemetry", "--log-level=1", "-l", "0" };
	if (count != 3 || rte_eal_init(sizeof options / sizeof options[0], options) < 0)
		return 2;
	// A little more than is ever out at a time, since a thread's cache keeps some.
	pool = rte_mempool_create("pages", PAGES + 2048, PAGE, RTE_MEMPOOL_CACHE_MAX_SIZE, 0, NULL, NULL, NULL, NULL,
				  SOCKET_ID_ANY, 0);
	if (pool == NULL) {
		fprintf(stderr, "mempool: %s\n", rte_strerror(rte_errno));
		return 3;
	}
	size_t number = strtoul(arguments[2], NULL, 10);
	if (number == 0 || (number > PAGES && strcmp(arguments[1], "pair") != 0))
		return 2;
	if (strcmp(arguments[1], "pair") == 0) {
		for (int timed = 0; timed < 2; timed++) {
			double start = now();
			for (size_t i = 0; i < number; i++)
				rte_mempool_put(pool, get());
			if (timed)
				printf("%g\n", (now() - start) / number);
		}
	} else if (strcmp(arguments[1], "all") == 0) {
		all(number);
	} else if (strcmp(arguments[1], "bulk") == 0) {
		apart(number, get_many, put_many);
		apart(number, get_each, put_each);
	} else {
		return 2;
	}
	return 0;
}
