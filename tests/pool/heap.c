// A process whose heap is a file of a pool: heap PATH MILLISECONDS SEED. Every byte of it is zero when it comes, and nobody else's from
// then on. Prints how many bytes there are, and how many of them are mapped as huge pages.
#include "../preload/check.h"
#include <sys/stat.h>

// Stands before each block, in the heap.
struct block {
    size_t bytes;
    uint64_t seed;
};

static struct block **blocks;
static size_t used;

static void write_block(struct block *block, uint64_t seed) {
    block->seed = seed;
    fill(block + 1, block->bytes, seed, true);
}

static void check_block(const struct block *block) { CHECK(holds(block + 1, block->bytes, block->seed, true)); }

// Blocks of random sizes, one behind the other, until nothing is left; the table of them is the heap's first block.
static void use_all(char *start, size_t size, uint64_t *random) {
    size_t most = size / KIB, at = (most * sizeof *blocks + 15) & ~(size_t)15;
    blocks = (struct block **)start;
    while (at + sizeof(struct block) + 16 <= size && used < most) {
        size_t room = size - at - sizeof(struct block);
        size_t bytes = (KIB + random_word(random) % (used % 64 ? 8 * KIB : size / 16)) & ~(size_t)15;
        struct block *block = (struct block *)(start + at);
        block->bytes = bytes < room ? bytes : room & ~(size_t)15;
        write_block(block, random_word(random));
        blocks[used++] = block;
        at += sizeof *block + block->bytes;
    }
}

// Bytes of the mapping at this address that are mapped as huge pages.
static size_t mapped_huge(const char *start) {
    FILE *file = fopen("/proc/self/smaps", "r");
    CHECK(file);
    char line[4096];
    bool here = false;
    size_t kilobytes = 0;
    while (fgets(line, sizeof line, file)) {
        uintptr_t begin, end;
        size_t value;
        if (sscanf(line, "%lx-%lx ", &begin, &end) == 2) here = begin <= (uintptr_t)start && (uintptr_t)start < end;
        if (!here) continue;
        if (sscanf(line, "ShmemPmdMapped: %zu", &value) == 1 || sscanf(line, "Shared_Hugetlb: %zu", &value) == 1 ||
            sscanf(line, "Private_Hugetlb: %zu", &value) == 1)
            kilobytes += value;
    }
    fclose(file);
    return kilobytes * KIB;
}

int main(int count, char **arguments) {
    CHECK(count == 4);
    uint64_t end = now_ns() + strtoul(arguments[2], NULL, 10) * 1000000;
    uint64_t random = strtoul(arguments[3], NULL, 10);
    int file = open(arguments[1], O_RDWR | O_CLOEXEC);
    CHECK(file >= 0);
    struct stat status;
    CHECK(!fstat(file, &status));
    CHECK((status.st_mode & 07777) == 0600 && status.st_uid == geteuid() && S_ISREG(status.st_mode));
    size_t size = (size_t)status.st_size;
    CHECK(size > 0 && size % (2 * MIB) == 0);
    char *start = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    CHECK(start != MAP_FAILED);
    CHECK(all_zero(start, size));
    use_all(start, size, &random);
    printf("%zu %zu\n", size, mapped_huge(start));
    fflush(stdout);
    while (now_ns() < end) {
        struct block *block = blocks[random_word(&random) % used];
        check_block(block);
        write_block(block, random_word(&random));
    }
    for (size_t index = 0; index < used; index++) check_block(blocks[index]);
    return 0;
}
