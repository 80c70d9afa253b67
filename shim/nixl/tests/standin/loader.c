// Loads mover.so, and so NIXL, as Python loads an extension: their symbols are visible to nobody else.
#include <dlfcn.h>
#include <stdio.h>

int main(int count, char **words) {
    void *mover = count > 2 ? dlopen(words[2], RTLD_NOW | RTLD_LOCAL) : NULL;
    int (*run)(const char *) = mover ? (int (*)(const char *))dlsym(mover, "run") : NULL;
    if (!run) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    return run(words[1]);
}
