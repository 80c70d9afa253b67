/* A program that moves bytes by Mooncake's C interface, in the ways that the tests ask for; it knows nothing of Laxity.
 *
 *   mover serve BYTES            has a buffer, and says its checksum for each line of its input
 *   mover WAY PORT PROTOCOL COUNT LENGTH
 *
 * WAY: write, read, notify, refused, free, threads, many, unplug, own. Ends with 0 only if every transfer did as it had to. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "mooncake_facts.h"

#define CHECK(what)                                                    \
    do {                                                               \
        if (!(what)) {                                                 \
            fprintf(stderr, "mover: line %d: %s\n", __LINE__, #what);  \
            exit(1);                                                   \
        }                                                              \
    } while (0)

static void *engine;
static uint64_t batch;
static size_t count;
static char *buffer;
static size_t bytes;
/* Where the peer's buffer is, for who counts from 0 (MOVER_BASE). */
static uint64_t base;

static uint64_t checksum(void) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ (unsigned char)buffer[i]) * 0x100000001b3u;
    return hash;
}

static void fill(int seed) {
    for (size_t i = 0; i < bytes; i++) buffer[i] = (char)(i * 31 + i / 251 + seed);
}

/* Until transfer `task` is over; its status. */
static int await(size_t task) {
    struct status status = {-1, 0};
    for (;; usleep(200)) {
        CHECK(getTransferStatus(engine, batch, task, &status) == 0);
        if (status.status != IS_WAITING) return status.status;
        CHECK(status.transferred == 0);
    }
}

static void *poll_all(void *argument) {
    for (size_t i = 0; i < count; i++) CHECK(await(i) == IS_COMPLETED);
    return argument;
}

static void requests(struct request *all, int opcode, int32_t target, size_t length) {
    for (size_t i = 0; i < count; i++)
        all[i] = (struct request){opcode, buffer + i * length, target, base + i * length, length};
}

static long resident(void) {
    long pages = 0, all;
    FILE *file = fopen("/proc/self/statm", "r");
    CHECK(file && fscanf(file, "%ld %ld", &all, &pages) == 2);
    fclose(file);
    return pages * 4096;
}

static void open_engine(size_t length) {
    bytes = length;
    buffer = malloc(bytes);
    engine = createTransferEngine("P2PHANDSHAKE", "127.0.0.1:1", "127.0.0.1", 0, 0);
    CHECK(engine);
}

static int serve(size_t length) {
    open_engine(length);
    CHECK(installTransport(engine, "tcp", NULL) && registerLocalMemory(engine, buffer, bytes, "cpu:0", 1) == 0);
    fill(7);
    printf("ready %lu\n", (uint64_t)buffer);
    fflush(stdout);
    for (char line[16]; fgets(line, sizeof line, stdin);) {
        printf("%016lx\n", checksum());
        fflush(stdout);
    }
    return 0;
}

/* As laxity.h has it. */
struct said {
    uint32_t size;
    uint16_t layer;
    uint8_t stage, reserved;
    uint64_t batch, request, deadline;
};

/* Of request 23 and stage 5 (background), where a library of Laxity's is there to be told. */
static void open_scope(void) {
    struct said scope = {sizeof scope, 0xffff, 5, 0, 0, 23, 0};
    int (*push)(struct said *);
    *(void **)&push = dlsym(RTLD_DEFAULT, "lax_scope_push");
    CHECK(push && push(&scope) == 0);
}

/* Whose memory the buffer is, once no scope is open. */
static uint64_t owner(void) {
    struct said scope = {sizeof scope, 0xffff, 0, 0, 0, 0, 0};
    int (*ask)(const void *, struct said *);
    *(void **)&ask = dlsym(RTLD_DEFAULT, "lax_scope_of");
    CHECK(ask && ask(buffer, &scope) >= 0);
    return scope.request;
}

#ifdef SAYS
/* As laxity.h has it, in place of a library of Laxity's: each eighth of the buffer is a layer of request 17, which is KV reuse in the first
 * half and background in the second. */
int lax_scope_of(const void *address, struct said *said);
int lax_scope_of(const void *address, struct said *said) {
    if (!address || !bytes) return 0;
    size_t part = ((const char *)address - buffer) * 8 / bytes;
    said->layer = (uint16_t)part;
    said->stage = part < 4 ? 1 : 5;
    said->request = 17;
    return 1;
}
#endif

#ifndef WITHOUT_TENT
static int tent(void) {
    bytes = 800;
    buffer = malloc(bytes);
    struct tent_request all[3] = {{1, buffer, 2, 3, 4, 0, 7}, {0, buffer + 700, 5, 6, 7, 0, 0}, {0, buffer + 700, 5, 6, 7, 1, 0}};
    CHECK(tent_submit((void *)1, 11, all, 3) == 0);
    CHECK(tent_submit_notif((void *)1, 12, all, 2, "name", "text") == 0);
    /* The program's own array stays as it is. */
    CHECK(all[1].priority == 0);
    return 0;
}
#endif

int main(int argc, char **argv) {
    if (argc == 3 && !strcmp(argv[1], "serve")) return serve(strtoul(argv[2], NULL, 10));
#ifndef WITHOUT_TENT
    if (argc == 2 && !strcmp(argv[1], "tent")) return tent();
#endif
    CHECK(argc == 6);
    const char *way = argv[1];
    size_t length = strtoul(argv[5], NULL, 10);
    count = strtoul(argv[4], NULL, 10);
    if (getenv("MOVER_BASE")) base = strtoul(getenv("MOVER_BASE"), NULL, 10);
    open_engine(count * length);
    void *args[] = {"a matrix", NULL};
    CHECK(installTransport(engine, argv[3], args));
    struct buffer known = {buffer, bytes};
    CHECK(registerLocalMemoryBatch(engine, &known, 1, "cpu:1") == 0);
    char name[32];
    snprintf(name, sizeof name, "127.0.0.1:%s", argv[2]);
    int32_t target = openSegment(engine, name);
    CHECK(target >= 0);
    int opcode = strcmp(way, "read") ? WRITE_OPCODE : READ_OPCODE;
    fill(opcode == WRITE_OPCODE ? 9 : 0);
    struct request *all = calloc(count, sizeof *all);
    requests(all, opcode, target, length);

    if (!strcmp(way, "own")) open_scope();
    if (!strcmp(way, "many")) {
        /* Batch after batch; nothing may grow. */
        long early = 0;
        for (int round = 0; round < 3000; round++) {
            batch = allocateBatchID(engine, count);
            CHECK(submitTransfer(engine, batch, all, count) == 0);
            poll_all(NULL);
            CHECK(freeBatchID(engine, batch) == 0);
            if (round == 500) early = resident();
        }
        printf("grew %ld\n", resident() - early);
    } else {
        batch = allocateBatchID(engine, count);
        if (!strcmp(way, "notify")) {
            char key[] = "request-17", text[] = "arrived";
            struct message message = {key, text};
            CHECK(submitTransferWithNotify(engine, batch, all, count, message) == 0);
            memset(key, 'x', sizeof key - 1), memset(text, 'x', sizeof text - 1);
        } else if (!strcmp(way, "refused")) {
            /* The second half goes nowhere. */
            for (size_t i = count / 2; i < count; i++) all[i].target = 99;
            int code = submitTransfer(engine, batch, all, count / 2);
            CHECK(code == 0);
            code = submitTransfer(engine, batch, all + count / 2, count - count / 2);
            printf("refused %d\n", code);
        } else if (!strcmp(way, "write")) {
            /* In two calls, and one more than there is room for. */
            CHECK(submitTransfer(engine, batch, all, count / 2) == 0);
            CHECK(submitTransfer(engine, batch, all + count / 2, count - count / 2) == 0);
        } else {
            CHECK(submitTransfer(engine, batch, all, count) == 0);
        }
        if (!strcmp(way, "own")) {
            int (*pop)(void);
            *(void **)&pop = dlsym(RTLD_DEFAULT, "lax_scope_pop");
            CHECK(pop && pop() == 0);
            printf("owner %lu\n", owner());
        }
        printf("submitted\n");
        fflush(stdout);
        /* Mooncake copies what it is given. */
        memset(all, 0xff, count * sizeof *all);
        if (!strcmp(way, "threads")) {
            pthread_t threads[4];
            for (int i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, poll_all, NULL) == 0);
            for (int i = 0; i < 4; i++) CHECK(pthread_join(threads[i], NULL) == 0);
        } else if (!strcmp(way, "free")) {
            /* Asks after nothing; only whether it is free. The second answer counts: what waited was handed on with the first. */
            printf("busy %d\n", freeBatchID(engine, batch));
            fflush(stdout);
            poll_all(NULL);
        } else if (!strcmp(way, "unplug")) {
            destroyTransferEngine(engine);
            return 0;
        } else if (!strcmp(way, "refused")) {
            for (size_t i = 0; i < count; i++) {
                struct status status = {IS_WAITING, 0};
                int code = 0;
                while (code == 0 && status.status == IS_WAITING) {
                    code = getTransferStatus(engine, batch, i, &status);
                    usleep(200);
                }
                printf("%zu: %d %d\n", i, code, status.status);
            }
        } else {
            poll_all(NULL);
        }
        struct status none = {-1, 0};
        CHECK(getTransferStatus(engine, batch, count + 7, &none) != 0);
        if (!strcmp(way, "write")) {
            struct request more = {WRITE_OPCODE, buffer, target, 0, 1};
            CHECK(submitTransfer(engine, batch, &more, 1) == 2);
        }
        CHECK(freeBatchID(engine, batch) == 0);
    }
    printf("%016lx\n", checksum());
    void *addresses[] = {buffer};
    CHECK(unregisterLocalMemoryBatch(engine, addresses, 1) == 0);
    if (!strcmp(way, "own")) printf("after %lu\n", owner());
    CHECK(uninstallTransport(engine, argv[3]) == 0);
    destroyTransferEngine(engine);
    return 0;
}
