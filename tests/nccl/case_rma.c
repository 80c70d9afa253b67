/* One-sided operations by each version of their table, between processes: puts, signals, gets. */
#define _GNU_SOURCE
#include "wire.h"

#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

enum { RANKS = 2, HANDLE = 128, WORDS = 50000, CONTEXTS = 2, ADD = 2, HOST = 1 };

struct config {
    int contexts, traffic_class, rank_stride;
};

/* The slots of v14. In v16 one more comes after `devices`; the calls below differ since v15. */
struct table {
    const char *name;
    int (*init)(void **ctx, uint64_t id, void *logger);
    int (*devices)(int *count);
    int (*properties)(int device, void *into);
    int (*listen)(void *ctx, int device, void *handle, void **listener);
    int (*connect)(void *ctx, void *handles[], int ranks, int rank, void *listener, void **comm);
    int (*create_context)(void *comm, struct config *config, void **context);
    int (*reg)(void *comm, void *data, size_t size, int type, uint64_t flags, void **handle);
    void *reg_dma_buf;
    int (*dereg)(void *comm, void *handle);
    int (*destroy_context)(void *context);
    int (*close)(void *comm);
    int (*close_listen)(void *listener);
    void *put, *put_signal, *get;
    int (*flush)(void *context, int domain, void *handle, uint32_t rank, void **request);
    int (*test)(void *comm, void *request, int *done);
    int (*progress)(void *context);
    int (*last_error)(void *context, bool *failed);
    int (*finalize)(void *ctx);
};

typedef int put_signal_14(void *, int, uint64_t, void *, size_t, uint64_t, void *, uint32_t, uint64_t,
                          void *, uint64_t, uint32_t, bool, void **);
typedef int put_signal_15(void *, int, uint64_t, void *, size_t, uint64_t, void *, uint32_t, uint64_t,
                          void *, uint64_t, uint32_t, bool, uint32_t, void **);
typedef int get_14(void *, int, uint64_t, void *, size_t, uint64_t, void *, uint32_t, void **);
typedef int get_15(void *, int, uint64_t, void *, size_t, uint64_t, void *, uint32_t, uint32_t,
                   void **);

static int version;
static bool dies; /* rank 1 does */
static struct table table;
static uint64_t out[WORDS], in[RANKS][WORDS], back[WORDS];
static _Atomic uint64_t signals[2];

static bool table_open(void) {
    void *library = dlopen(setup.plugin, RTLD_NOW);
    CHECK(library, "%s", dlerror());
    char name[32];
    snprintf(name, sizeof name, "ncclRmaPlugin_v%d", version);
    void **slots = dlsym(library, name);
    CHECK(slots, "no %s", name);
    const size_t first = 3, rest = sizeof table / sizeof *slots - first;
    memcpy(&table, slots, first * sizeof *slots);
    memcpy((void **)&table + first, slots + first + (version >= 16), rest * sizeof *slots);
    return true;
}

/* Waits for a request that is not null. */
static bool finish(void *comm, void *context, void *request) {
    CHECK(request, "a null request");
    const uint64_t end = now_ns() + 6 * patience_ns();
    for (int done = 0; !done; rest()) {
        OK(table.test(comm, request, &done));
        OK(table.progress(context));
        CHECK(now_ns() < end, "a request is not done");
    }
    return true;
}

static bool signalled(int word, uint64_t value, void *context) {
    const uint64_t end = now_ns() + 6 * patience_ns();
    while (atomic_load(&signals[word]) != value) {
        CHECK(now_ns() < end, "signal %d is %lu", word, (unsigned long)atomic_load(&signals[word]));
        OK(table.progress(context));
        rest();
    }
    return true;
}

static bool put(void *context, int domain, void *from, size_t bytes, void *to, int rank, int at,
                int word, void *counts, void **request) {
    const uint64_t offset = (uint64_t)at * sizeof *in, signal = (uint64_t)word * 8;
    const uint32_t peer = (uint32_t)rank;
    if (version >= 15)
        OK(((put_signal_15 *)table.put_signal)(context, domain, 0, from, bytes, offset, to, peer,
                                               signal, counts, 7, ADD, true, 1, request));
    else
        OK(((put_signal_14 *)table.put_signal)(context, domain, 0, from, bytes, offset, to, peer,
                                               signal, counts, 7, ADD, true, request));
    return true;
}

static bool talk(void *comm, void *context, int rank, int ranks) {
    void *from, *to, *read, *counts, *request;
    OK(table.reg(comm, out, sizeof out, HOST, 0, &from));
    OK(table.reg(comm, in, sizeof in, HOST, 0, &to));
    OK(table.reg(comm, back, sizeof back, HOST, 0, &read));
    OK(table.reg(comm, (void *)signals, sizeof signals, HOST, 1, &counts));
    pattern_fill(out, sizeof out, (uint64_t)rank, 0);
    for (int peer = 0; peer < ranks; peer++) {
        DO(put(context, peer % CONTEXTS, from, sizeof out, to, peer, rank, 0, counts, &request));
        DO(finish(comm, context, request));
    }
    DO(signalled(0, 7 * (uint64_t)ranks, context));
    for (int peer = 0; peer < ranks; peer++) {
        DO(pattern_is(in[peer], sizeof out, (uint64_t)peer, 0, "a put"));
        const uint64_t offset = (uint64_t)rank * sizeof *in;
        if (version >= 15)
            OK(((get_15 *)table.get)(context, 1, offset, to, sizeof back, 0, read, (uint32_t)peer, 0,
                                     &request));
        else
            OK(((get_14 *)table.get)(context, 1, offset, to, sizeof back, 0, read, (uint32_t)peer,
                                     &request));
        DO(finish(comm, context, request));
        OK(table.flush(context, 1, read, (uint32_t)rank, &request));
        DO(!request || finish(comm, context, request));
        DO(pattern_is(back, sizeof back, (uint64_t)rank, 0, "a get"));
    }
    for (int peer = 0; peer < ranks; peer++) {
        DO(put(context, 0, NULL, 0, NULL, peer, 0, 1, counts, &request));
        DO(finish(comm, context, request));
    }
    DO(signalled(1, 7 * (uint64_t)ranks, context));
    void *const all[] = {from, to, read, counts};
    for (size_t at = 0; at < COUNT(all); at++) OK(table.dereg(comm, all[at]));
    return true;
}

/* Puts to rank 1, which dies: the requests fail, and the context has an error. */
static bool outlive(void *comm, void *context, int rank, int ranks) {
    void *from, *to, *counts, *request;
    OK(table.reg(comm, out, sizeof out, HOST, 0, &from));
    OK(table.reg(comm, in, sizeof in, HOST, 0, &to));
    OK(table.reg(comm, (void *)signals, sizeof signals, HOST, 1, &counts));
    DO(meet("rma_dies", rank, ranks));
    if (rank == 1) raise(SIGKILL);
    const uint64_t end = now_ns() + 6 * patience_ns();
    for (int code = 0; !code;) {
        DO(put(context, 0, from, sizeof out, to, 1, rank, 0, counts, &request));
        for (int done = 0; !done && !code; rest()) {
            code = table.test(comm, request, &done);
            CHECK(!code || code == 6, "test: result %d", code);
            CHECK(now_ns() < end, "no error of a rank that died");
        }
    }
    bool failed = false;
    OK(table.last_error(context, &failed));
    CHECK(failed, "no error of the context");
    return true;
}

static bool part(int rank, int ranks) {
    uint8_t handles[RANKS][HANDLE];
    void *pointers[RANKS], *ctx, *listener, *comm, *context;
    int devices;
    DO(table_open());
    OK(table.init(&ctx, 7, NULL));
    OK(table.devices(&devices));
    OK(table.listen(ctx, rank % devices, handles[rank], &listener));
    DO(tell("rma", rank, handles[rank], HANDLE));
    for (int peer = 0; peer < ranks; peer++) {
        pointers[peer] = handles[peer];
        DO(hear("rma", peer, handles[peer], HANDLE));
    }
    OK(table.connect(ctx, pointers, ranks, rank, listener, &comm));
    OK(table.close_listen(listener));
    struct config config = {.contexts = CONTEXTS, .traffic_class = -1, .rank_stride = 1};
    OK(table.create_context(comm, &config, &context));
    if (dies) {
        DO(outlive(comm, context, rank, ranks));
    } else {
        DO(talk(comm, context, rank, ranks));
        DO(meet("rma_over", rank, ranks));
        bool failed = true;
        OK(table.last_error(context, &failed));
        CHECK(!failed, "an error of a rank");
    }
    OK(table.destroy_context(context));
    OK(table.close(comm));
    OK(table.finalize(ctx));
    return true;
}

static bool one_sided(int of) {
    version = of;
    void *library = dlopen(setup.plugin, RTLD_NOW);
    CHECK(library, "%s", dlerror());
    if (!dlsym(library, "ncclRmaPlugin_v14")) return skip("no one-sided operations");
    setenv("LAXITY_RMA", "1", 1);
    return ranks_run(RANKS, part, dies ? 1 << 1 : 0);
}

static bool one_sided_14(void) { return one_sided(14); }
static bool one_sided_15(void) { return one_sided(15); }
static bool one_sided_16(void) { return one_sided(16); }
static bool one_sided_killed(void) {
    dies = true;
    return one_sided(16);
}

const struct check rma_checks[] = {
    {"one_sided_14", one_sided_14, 60, 0, RANKS_2, "puts, signals and gets, ncclRmaPlugin_v14"},
    {"one_sided_15", one_sided_15, 60, 0, RANKS_2, "puts, signals and gets, ncclRmaPlugin_v15"},
    {"one_sided_16", one_sided_16, 60, 0, RANKS_2, "puts, signals and gets, ncclRmaPlugin_v16"},
    {"one_sided_killed", one_sided_killed, 60, 0, RANKS_2, "puts to a rank that is killed"},
    {0}};
