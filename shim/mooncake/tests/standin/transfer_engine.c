/* A stand-in for Mooncake's libtransfer_engine.so: its C interface, over a TCP transport of its own. It is not Mooncake.
 *
 * An engine listens at 127.0.0.1:PORT and serves its registered memory, by offset from the first buffer. Transfers of a batch are
 * done by one thread of the engine, in the order in which they were submitted. What Mooncake does and a caller may notice is as in
 * release 0.3.13: a batch takes as many transfers as it was allocated for; one is finished when getTransferStatus has said so; a batch with
 * an unfinished one is busy (code 4) and is not freed; an unknown segment is refused, and nothing of that call is taken; a notification
 * goes when all that the batch has is complete.
 *
 * STANDIN_LOG names a file to which each call and what came of it is written, addresses counted from the first buffer. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "mooncake_facts.h"

enum { SEGMENTS = 16, INVALID = 1, TOO_MANY = 2, BUSY = 4 };

struct task {
    struct request request;
    volatile int status;
    int finished;
};

struct batch {
    size_t size, count, done;
    struct task *tasks;
    char notify[64];
    struct engine *engine;
    struct batch *next;
};

struct engine {
    pthread_mutex_t lock;
    pthread_cond_t bell;
    char *base;
    size_t length;
    int listener, segments, ends, has_transport;
    int sockets[SEGMENTS];
    pthread_t mover, server;
    struct batch *batches;
};

static FILE *log_file;
static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;

#define SAY(...)                                                        \
    do {                                                                \
        pthread_mutex_lock(&log_lock);                                  \
        if (!log_file && getenv("STANDIN_LOG"))                         \
            log_file = fopen(getenv("STANDIN_LOG"), "a");               \
        if (log_file) { fprintf(log_file, __VA_ARGS__); fflush(log_file); } \
        pthread_mutex_unlock(&log_lock);                                \
    } while (0)

static int all(int fd, void *at, size_t length, int out) {
    for (char *p = at; length > 0;) {
        ssize_t n = out ? send(fd, p, length, MSG_NOSIGNAL) : recv(fd, p, length, 0);
        if (n <= 0) return -1;
        p += n, length -= n;
    }
    return 0;
}

static void *serve_one(void *argument) {
    struct engine *engine = ((void **)argument)[0];
    int fd = (int)(intptr_t)((void **)argument)[1];
    free(argument);
    uint64_t head[3];
    while (all(fd, head, sizeof head, 0) == 0) {
        char done = head[1] <= engine->length && head[2] <= engine->length - head[1];
        if (head[0] == WRITE_OPCODE) {
            char *into = done ? engine->base + head[1] : malloc(head[2]);
            if (all(fd, into, head[2], 0)) break;
            if (!done) free(into);
        }
        if (all(fd, &done, 1, 1)) break;
        if (head[0] == READ_OPCODE && done && all(fd, engine->base + head[1], head[2], 1)) break;
    }
    close(fd);
    return NULL;
}

static void *serve(void *argument) {
    struct engine *engine = argument;
    for (int fd; (fd = accept(engine->listener, NULL, NULL)) >= 0;) {
        void **pair = malloc(2 * sizeof *pair);
        pair[0] = engine, pair[1] = (void *)(intptr_t)fd;
        pthread_t thread;
        pthread_create(&thread, NULL, serve_one, pair);
        pthread_detach(thread);
    }
    return NULL;
}

static int do_one(struct engine *engine, struct request *r) {
    uint64_t head[3] = {r->opcode, r->offset, r->length};
    int fd = engine->sockets[r->target];
    char done = 0;
    if (all(fd, head, sizeof head, 1)) return -1;
    if (r->opcode == WRITE_OPCODE && all(fd, r->source, r->length, 1)) return -1;
    if (all(fd, &done, 1, 0) || !done) return -1;
    return r->opcode == READ_OPCODE ? all(fd, r->source, r->length, 0) : 0;
}

static void *move(void *argument) {
    struct engine *engine = argument;
    pthread_mutex_lock(&engine->lock);
    while (!engine->ends) {
        struct batch *batch = engine->batches;
        while (batch && batch->done == batch->count) batch = batch->next;
        if (!batch) {
            pthread_cond_wait(&engine->bell, &engine->lock);
            continue;
        }
        struct task *task = &batch->tasks[batch->done];
        pthread_mutex_unlock(&engine->lock);
        int failed = do_one(engine, &task->request);
        pthread_mutex_lock(&engine->lock);
        task->status = failed ? IS_FAILED : IS_COMPLETED;
        batch->done++;
    }
    pthread_mutex_unlock(&engine->lock);
    return NULL;
}

void *createTransferEngine(const char *metadata, const char *local, const char *host, uint64_t port, int discover) {
    struct engine *engine = calloc(1, sizeof *engine);
    pthread_mutex_init(&engine->lock, NULL);
    pthread_cond_init(&engine->bell, NULL);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    engine->listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(engine->listener, (void *)&address, sizeof address) || listen(engine->listener, 16)) return NULL;
    socklen_t length = sizeof address;
    getsockname(engine->listener, (void *)&address, &length);
    fprintf(stdout, "port %d\n", ntohs(address.sin_port));
    fflush(stdout);
    pthread_create(&engine->server, NULL, serve, engine);
    pthread_create(&engine->mover, NULL, move, engine);
    engine->has_transport = discover;
    SAY("create %s %s %s %lu %d\n", metadata, local, host, port, discover);
    return engine;
}

void destroyTransferEngine(void *handle) {
    struct engine *engine = handle;
    pthread_mutex_lock(&engine->lock);
    engine->ends = 1;
    pthread_cond_signal(&engine->bell);
    pthread_mutex_unlock(&engine->lock);
    pthread_join(engine->mover, NULL);
    shutdown(engine->listener, SHUT_RDWR);
    pthread_join(engine->server, NULL);
    SAY("destroy\n");
}

void *installTransport(void *handle, const char *protocol, void **args) {
    struct engine *engine = handle;
    engine->has_transport = 1;
    SAY("install %s %s\n", protocol, args ? (char *)args[0] : "-");
    return engine;
}

int uninstallTransport(void *handle, const char *protocol) {
    (void)handle;
    SAY("uninstall %s\n", protocol);
    return 0;
}

int32_t openSegment(void *handle, const char *name) {
    struct engine *engine = handle;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(strrchr(name, ':') + 1))};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(fd, (void *)&address, sizeof address)) return -1;
    /* A header and its bytes are two writes, and the answer is awaited. */
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
    engine->sockets[engine->segments] = fd;
    SAY("open\n");
    return engine->segments++;
}

int32_t openSegmentNoCache(void *handle, const char *name) { return openSegment(handle, name); }

int registerLocalMemory(void *handle, void *address, size_t length, const char *location, int remote) {
    struct engine *engine = handle;
    if (!engine->base) engine->base = address, engine->length = length;
    SAY("register %ld %zu %s %d\n", (long)((char *)address - engine->base), length, location, remote);
    return 0;
}

int unregisterLocalMemory(void *handle, void *address) {
    struct engine *engine = handle;
    SAY("unregister %ld\n", (long)((char *)address - engine->base));
    return 0;
}

int registerLocalMemoryBatch(void *handle, struct buffer *buffers, size_t count, const char *location) {
    for (size_t i = 0; i < count; i++) registerLocalMemory(handle, buffers[i].address, buffers[i].length, location, 1);
    return 0;
}

int unregisterLocalMemoryBatch(void *handle, void **addresses, size_t count) {
    for (size_t i = 0; i < count; i++) unregisterLocalMemory(handle, addresses[i]);
    return 0;
}

uint64_t allocateBatchID(void *handle, size_t size) {
    struct engine *engine = handle;
    struct batch *batch = calloc(1, sizeof *batch);
    batch->size = size;
    batch->tasks = calloc(size, sizeof *batch->tasks);
    batch->engine = engine;
    pthread_mutex_lock(&engine->lock);
    batch->next = engine->batches;
    engine->batches = batch;
    pthread_mutex_unlock(&engine->lock);
    return (uint64_t)batch;
}

static int submit(struct engine *engine, struct batch *batch, struct request *requests, size_t count,
                  const struct message *message) {
    pthread_mutex_lock(&engine->lock);
    int code = batch->count + count > batch->size ? TOO_MANY : 0;
    for (size_t i = 0; i < count && !code; i++)
        if (requests[i].target < 0 || requests[i].target >= engine->segments) code = INVALID;
    SAY("submit %zu -> %d%s%s%s%s\n", count, code, message ? " " : "", message ? message->name : "", message ? "=" : "",
        message ? message->text : "");
    for (size_t i = 0; i < count; i++) {
        struct request *r = &requests[i];
        SAY("  %d %ld %d %lu %lu\n", r->opcode, (long)((char *)r->source - engine->base), r->target, r->offset, r->length);
        if (code == 0) batch->tasks[batch->count++].request = *r;
    }
    if (code == 0 && message) snprintf(batch->notify, sizeof batch->notify, "%s=%s", message->name, message->text);
    pthread_cond_signal(&engine->bell);
    pthread_mutex_unlock(&engine->lock);
    return code;
}

int submitTransfer(void *engine, uint64_t batch, struct request *requests, size_t count) {
    return submit(engine, (struct batch *)batch, requests, count, NULL);
}

int submitTransferWithNotify(void *engine, uint64_t batch, struct request *requests, size_t count, struct message message) {
    return submit(engine, (struct batch *)batch, requests, count, &message);
}

int getTransferStatus(void *handle, uint64_t id, size_t index, struct status *status) {
    struct engine *engine = handle;
    struct batch *batch = (struct batch *)id;
    if (!engine->has_transport || batch->engine != engine) abort();
    pthread_mutex_lock(&engine->lock);
    int code = index < batch->count ? 0 : INVALID;
    if (code == 0) {
        struct task *task = &batch->tasks[index];
        status->status = task->status;
        status->transferred = task->status == IS_COMPLETED ? task->request.length : 0;
        task->finished |= task->status != IS_WAITING;
        size_t complete = 0;
        while (complete < batch->count && batch->tasks[complete].status == IS_COMPLETED) complete++;
        if (complete == batch->count && batch->notify[0]) {
            SAY("notified %s after %zu\n", batch->notify, batch->count);
            batch->notify[0] = 0;
        }
    }
    pthread_mutex_unlock(&engine->lock);
    return code;
}

int freeBatchID(void *handle, uint64_t id) {
    struct engine *engine = handle;
    struct batch *batch = (struct batch *)id;
    pthread_mutex_lock(&engine->lock);
    int code = 0;
    for (size_t i = 0; i < batch->count; i++)
        if (!batch->tasks[i].finished) code = BUSY;
    if (code == 0) {
        struct batch **at = &engine->batches;
        while (*at != batch) at = &(*at)->next;
        *at = batch->next;
        free(batch->tasks);
        memset(batch, 0xee, sizeof *batch);
        free(batch);
    }
    pthread_mutex_unlock(&engine->lock);
    return code;
}

int tent_submit(void *engine, uint64_t batch, struct tent_request *requests, size_t count) {
    return tent_submit_notif(engine, batch, requests, count, "-", "-");
}

int tent_submit_notif(void *engine, uint64_t batch, struct tent_request *requests, size_t count, const char *name,
                      const char *message) {
    (void)engine;
    SAY("tent %lu %zu %s %s\n", batch, count, name, message);
    for (size_t i = 0; i < count; i++) {
        struct tent_request *r = &requests[i];
        SAY("  %d %p %lu %lu %lu priority %d hint %d\n", r->opcode, r->source, r->target, r->offset, r->length, r->priority,
            r->transport_hint);
    }
    return 0;
}

int tent_cancel_task(void *engine, uint64_t batch, size_t task) {
    (void)engine, (void)batch, (void)task;
    return 0;
}
