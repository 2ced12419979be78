// What a wrong pointer does: SIGABRT, and one line that says why. The argument chooses the mistake.
#include "check.h"
#include <sys/resource.h>

int main(int count, char **arguments) {
    CHECK(count == 2);
    const char *mistake = arguments[1];
    struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
    char *volatile block = malloc(5 * MIB);
    CHECK(block);
    memset(block, 1, 5 * MIB);
    if (!strcmp(mistake, "twice")) {
        free(block);
        free(block);
    } else if (!strcmp(mistake, "twice-later")) {
        free(block);
        sleep_ms(200);
        free(block);
    } else if (!strcmp(mistake, "inside")) {
        free(block + PAGE);
    } else if (!strcmp(mistake, "inside-odd")) {
        free(block + 2 * MIB + 16);
    } else if (!strcmp(mistake, "behind")) {
        free(block + 64 * MIB);
    } else if (!strcmp(mistake, "realloc-freed")) {
        free(block);
        block = realloc(block, 7 * MIB);
    } else if (!strcmp(mistake, "realloc-freed-small")) {
        free(block);
        block = realloc(block, 100);
    } else if (!strcmp(mistake, "realloc-inside")) {
        block = realloc(block + PAGE, 7 * MIB);
    } else if (!strcmp(mistake, "size-of-freed")) {
        free(block);
        printf("%zu\n", malloc_usable_size(block));
    } else {
        return 2;
    }
    return 0;
}
