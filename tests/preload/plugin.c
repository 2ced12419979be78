// A library that allocates in its constructor and destructor and has thread-local storage of its own. For dlopen.c, and linked to
// by exit-order.c.
#include "check.h"

static char *from_constructor;
__thread char plugin_storage[64 * 1024];

static void __attribute__((constructor)) begin(void) {
    from_constructor = malloc(6 * MIB);
    CHECK(from_constructor);
    fill(from_constructor, 6 * MIB, 12, true);
    char *zeroes = calloc(1, 3 * MIB);
    CHECK(zeroes && all_zero(zeroes, 3 * MIB));
    free(zeroes);
}

static void __attribute__((destructor)) end(void) {
    CHECK(holds(from_constructor, 6 * MIB, 12, true));
    free(from_constructor);
}

char *plugin_work(size_t bytes);
char *plugin_work(size_t bytes) {
    memset(plugin_storage, 1, sizeof plugin_storage);
    char *block = malloc(bytes);
    CHECK(block);
    fill(block, bytes, bytes, false);
    return block;
}
