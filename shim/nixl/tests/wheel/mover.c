// Moves bytes between two NIXL agents of this process by NIXL's C interface, as Rust programs do: mover libnixl_capi.so.
// The library is opened like nixl-sys opens it. The functions are those of wrapper.h in NIXL 1.0.0 to 1.5.1.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { BYTES = 1 << 20, BLOCKS = 16, MANY = 4, READ = 0, WRITE = 1, DRAM = 0, IN_PROG = 1 };

static void *library;
static char here[BYTES], there[BYTES];

#define CALL(name, types, ...) ((int (*) types)found("nixl_capi_" #name))(__VA_ARGS__)
#define MUST(name, types, ...) must(CALL(name, types, __VA_ARGS__), #name)

static void *found(const char *name) {
    void *function = dlsym(library, name);
    if (!function) printf("no %s\n", name), exit(1);
    return function;
}

static void must(int status, const char *what) {
    if (status != 0) printf("%s: %d\n", what, status), exit(1);
}

static void *made(const char *name, char *memory) {
    void *agent, *mems, *params, *backend, *list;
    MUST(create_agent, (const char *, void **), name, &agent);
    MUST(get_plugin_params, (void *, const char *, void **, void **), agent, "UCX", &mems, &params);
    MUST(create_backend, (void *, const char *, void *, void **), agent, "UCX", params, &backend);
    MUST(create_reg_dlist, (int, void **), DRAM, &list);
    MUST(reg_dlist_add_desc, (void *, uintptr_t, size_t, uint64_t, const void *, size_t), list, (uintptr_t)memory, BYTES,
         0, "", 0);
    MUST(register_mem, (void *, void *, void *), agent, list, NULL);
    return agent;
}

static void *blocks(char *memory) {
    void *list;
    MUST(create_xfer_dlist, (int, void **), DRAM, &list);
    for (size_t i = 0; i < BLOCKS; i++)
        MUST(xfer_dlist_add_desc, (void *, uintptr_t, size_t, uint64_t), list,
             (uintptr_t)memory + i * (BYTES / BLOCKS), BYTES / BLOCKS, 0);
    return list;
}

static void post(void *agent, void *request) {
    int status = CALL(post_xfer_req, (void *, void *, void *), agent, request, NULL);
    if (status != IN_PROG) must(status, "post");
}

static void end(void *agent, void *peer, void *request, void *notifications) {
    int status;
    // The peer's calls move the bytes of transports that need the CPU.
    while ((status = CALL(get_xfer_status, (void *, void *), agent, request)) == IN_PROG) {
        CALL(get_notifs, (void *, void *, void *), peer, notifications, NULL);
        usleep(100);
    }
    must(status, "transfer");
}

int main(int count, char **words) {
    library = count > 1 ? dlopen(words[1], RTLD_NOW | RTLD_LOCAL) : NULL;
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
    void *agents[2] = {made("here", here), made("there", there)}, *metadata, *notifications;
    size_t length;
    char *name;
    MUST(get_local_md, (void *, void **, size_t *), agents[1], &metadata, &length);
    MUST(load_remote_md, (void *, const void *, size_t, char **), agents[0], metadata, length, &name);
    MUST(create_notif_map, (void **), &notifications);

    memset(here, 'w', BYTES);
    void *requests[MANY];
    for (int i = 0; i < MANY; i++) {
        MUST(create_xfer_req, (void *, int, void *, void *, const char *, void **, void *), agents[0], WRITE,
             blocks(here), blocks(there), "there", &requests[i], NULL);
        post(agents[0], requests[i]);
    }
    for (int i = 0; i < MANY; i++) end(agents[0], agents[1], requests[i], notifications);
    printf("written %d\n", memcmp(here, there, BYTES) == 0);

    memset(there, 'r', BYTES);
    void *local, *remote, *request;
    int half[BLOCKS / 2];
    for (int i = 0; i < BLOCKS / 2; i++) half[i] = i;
    MUST(prep_xfer_dlist, (void *, const char *, void *, void **, void *), agents[0], "", blocks(here), &local, NULL);
    MUST(prep_xfer_dlist, (void *, const char *, void *, void **, void *), agents[0], "there", blocks(there), &remote,
         NULL);
    MUST(make_xfer_req, (void *, int, void *, const int *, size_t, void *, const int *, size_t, void **, void *),
         agents[0], READ, local, half, (size_t)BLOCKS / 2, remote, half, (size_t)BLOCKS / 2, &request, NULL);
    for (int i = 0; i < 2; i++) {
        post(agents[0], request);
        end(agents[0], agents[1], request, notifications);
    }
    printf("read %d\n", memcmp(here, there, BYTES / 2) == 0 && here[BYTES / 2] == 'w');

    MUST(release_xfer_req, (void *, void *), agents[0], request);
    for (int i = 0; i < MANY; i++) MUST(release_xfer_req, (void *, void *), agents[0], requests[i]);
    MUST(destroy_agent, (void *), agents[0]);
    MUST(destroy_agent, (void *), agents[1]);
    printf("destroyed\n");
    fflush(stdout);
    return 0;
}
