/* Connects to itself through each device of the plugin that its argument names, with version 8 of NCCL's table. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

struct table {
    const char *name;
    int (*init)(void *logger);
    int (*devices)(int *count);
    int (*properties)(int device, void *into);
    int (*listen)(int device, void *handle, void **listener);
    int (*connect)(int device, void *handle, void **sender, void **unused);
    int (*accept)(void *listener, void **receiver, void **unused);
};

static void must(int code)
{
    if (code) {
        fprintf(stderr, "the plugin returns %d\n", code);
        exit(1);
    }
}

int main(int argc, char **argv)
{
    void *library = argc > 1 ? dlopen(argv[1], RTLD_NOW) : NULL;
    struct table *net = library ? dlsym(library, "ncclNetPlugin_v8") : NULL;
    int count = 0;
    if (!net) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    must(net->init(NULL));
    must(net->devices(&count));
    for (int device = 0; device < count; device++) {
        char handle[128] = {0};
        void *listener = NULL, *sender = NULL, *receiver = NULL, *unused = NULL;
        must(net->listen(device, handle, &listener));
        while (!sender || !receiver) {
            if (!sender)
                must(net->connect(device, handle, &sender, &unused));
            if (!receiver)
                must(net->accept(listener, &receiver, &unused));
        }
        printf("\n");
    }
    return 0;
}
