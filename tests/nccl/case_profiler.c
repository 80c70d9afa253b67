/* The profiler half of the library: the harness plays NCCL's profiler.cc. It starts the events of a
 * collective, its proxy operations and their steps, hands the step to isend as phandle, and gives
 * the plugin a callback that, as NCCL's does, calls the profiler's startEvent before it returns. */
#define _GNU_SOURCE
#include "wire.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static struct profiler {
    int version, mask;
    void *library, *context;
    const void *table;
    bool on; /* NCCL has none loaded before init and after finalize */
    atomic_long called, started;
    enum { OURS, NOTHING, ANOTHERS, FAILING } behaves;
} profiler;

/* What NCCL keeps for a step, and gives to the plugin as phandle. */
struct step {
    void *event;
    int rank;
};

#define P(n) ((const struct profiler_v##n *)profiler.table)

/* Takes the newest descriptor and makes an older one of it, as profiler_vN.cc do: an event that is
 * unknown there is dropped, the parent of a collective is its group, v4 leaves what it does not
 * fill as it was. */
static bool start(void **handle, struct event_v5 *event) {
    int result = RESULT_USAGE;
    const bool api = event->type & (EVENT_GROUP_API | EVENT_COLL_API | EVENT_P2P_API);
    if (profiler.version >= 5) {
        watch_enter("startEvent");
        result = P(5)->start(profiler.context, handle, event);
    } else if (api) {
        return true;
    } else if (profiler.version == 4) {
        struct event_v4 old;
        memset(&old, 0xcd, sizeof old);
        old.type = (uint8_t)event->type, old.parent = event->parent, old.rank = event->rank;
        if (event->type == EVENT_COLL) {
            old.parent = event->coll.group;
            old.coll.sequence = event->coll.sequence, old.coll.func = event->coll.func;
            old.coll.from = event->coll.from, old.coll.to = event->coll.to;
            old.coll.count = event->coll.count, old.coll.root = event->coll.root;
            old.coll.datatype = event->coll.datatype, old.coll.channels = event->coll.channels;
            old.coll.warps = event->coll.warps, old.coll.algo = event->coll.algo;
            old.coll.proto = event->coll.proto;
        } else if (event->type == EVENT_P2P) {
            old.parent = event->p2p.group;
            old.p2p.func = event->p2p.func, old.p2p.buffer = event->p2p.buffer;
            old.p2p.datatype = event->p2p.datatype, old.p2p.count = event->p2p.count;
            old.p2p.peer = event->p2p.peer;
        } else if (event->type == EVENT_PROXY_OP) old.proxy_op = event->proxy_op;
        else if (event->type == EVENT_PROXY_STEP) old.proxy_step.step = event->proxy_step.step;
        else if (event->type == EVENT_NET) old.net = event->net;
        watch_enter("startEvent");
        result = P(4)->start(profiler.context, handle, &old);
    } else {
        struct event_v3 old = {.type = (uint8_t)event->type, .parent = event->parent,
                               .rank = event->rank};
        *handle = NULL;
        if (event->type == EVENT_COLL) {
            old.parent = event->coll.group;
            old.coll.sequence = event->coll.sequence, old.coll.func = event->coll.func;
            old.coll.from = event->coll.from, old.coll.to = event->coll.to;
            old.coll.count = event->coll.count, old.coll.root = event->coll.root;
            old.coll.datatype = event->coll.datatype, old.coll.channels = event->coll.channels;
            old.coll.warps = event->coll.warps, old.coll.algo = event->coll.algo;
            old.coll.proto = event->coll.proto;
        } else if (event->type == EVENT_P2P) {
            old.parent = event->p2p.group;
            old.p2p.func = event->p2p.func, old.p2p.buffer = event->p2p.buffer;
            old.p2p.datatype = event->p2p.datatype, old.p2p.count = event->p2p.count;
            old.p2p.peer = event->p2p.peer;
        } else if (event->type == EVENT_PROXY_OP) old.proxy_op = event->proxy_op;
        else if (event->type == EVENT_PROXY_STEP) old.proxy_step.step = event->proxy_step.step;
        else if (event->type == EVENT_NET) old.net = event->net;
        watch_enter("startEvent");
        result = P(3)->start(profiler.context, handle, &old);
    }
    watch_leave();
    memset(event, 0x44, sizeof *event); /* it was on NCCL's stack */
    OK(result);
    return true;
}

static bool end(void **handle) {
    if (!*handle) return true;
    watch_enter("stopEvent");
    const int result = P(3)->stop(*handle);
    watch_leave();
    *handle = NULL;
    OK(result);
    return true;
}

static bool record(void *handle, int state) {
    if (!handle) return true;
    if (profiler.version == 3 && state > 18) return true;
    union event_state values = {.proxy_op_v3 = {.bytes = 4096}};
    watch_enter("recordEventState");
    const int result = P(3)->record(handle, state, &values);
    watch_leave();
    OK(result);
    return true;
}

/* ncclProfilerCallback. */
static int callback(void **event, int type, void *phandle, int64_t id, void *data) {
    profiler.called++;
    if (type == 0 && !phandle) {
        failed_at("profiler", 0, "the callback is called with the phandle NULL: NCCL crashes");
        return RESULT_OK;
    }
    if (profiler.behaves == FAILING) return RESULT_INTERNAL;
    if (profiler.behaves == ANOTHERS && type == 0) *event = (void *)0x77;
    if (profiler.behaves != OURS || !profiler.on) return RESULT_OK;
    if (type == 0) {
        if (!(profiler.mask & EVENT_NET)) return RESULT_OK;
        const struct step *step = phandle;
        struct event_v5 descriptor = {.type = EVENT_NET, .parent = step->event,
                                      .rank = step->rank, .net = {.id = id, .data = data}};
        profiler.started++;
        start(event, &descriptor);
    } else {
        if (type & 2) record(*event, STATE_NET_UPDATE);
        if (type != 2) end(event);
    }
    return RESULT_OK;
}

static bool profiler_open(const char *comm_name) {
    char symbol[32];
    int result = RESULT_USAGE;
    profiler.library = dlopen(setup.plugin, RTLD_NOW | RTLD_LOCAL);
    CHECK(profiler.library, "dlopen: %s", dlerror());
    snprintf(symbol, sizeof symbol, "ncclProfiler_v%d", profiler.version);
    profiler.table = dlsym(profiler.library, symbol);
    CHECK(profiler.table, "no %s", symbol);
    CHECK(P(3)->name && *P(3)->name, "%s has no name", symbol);
    profiler.mask = 0;
    profiler.context = NULL;
    watch_enter("profiler init");
    if (profiler.version == 3) result = P(3)->init(&profiler.context, &profiler.mask);
    else if (profiler.version == 4)
        result = P(4)->init(&profiler.context, &profiler.mask, comm_name, 0x1a71, 2, 2, 0, log_line);
    else
        result = P(5)->init(&profiler.context, 0x1a71, &profiler.mask, comm_name, 2, 2, 0, log_line);
    watch_leave();
    OK(result);
    profiler.on = true;
    return true;
}

static bool profiler_close(void) {
    profiler.on = false;
    watch_enter("profiler finalize");
    const int result = P(3)->finalize(profiler.context);
    watch_leave();
    OK(result);
    CHECK(dlclose(profiler.library) == 0, "dlclose: %s", dlerror());
    return true;
}

/* NCCL starts an event also where only those below it are wanted. */
static bool wanted(int types) { return profiler.mask & types; }

enum { BELOW = EVENT_PROXY_OP | EVENT_PROXY_STEP | EVENT_KERNEL | EVENT_NET };

struct operation {
    void *group_api, *coll_api, *group, *task, *op;
};

/* `kind` chooses a collective, a point-to-point call, or one that belongs to another process. */
static bool operation_start(struct operation *o, int kind, uint64_t sequence) {
    static int area;
    memset(o, 0, sizeof *o);
    if (wanted(EVENT_GROUP_API | EVENT_COLL_API | EVENT_P2P_API | EVENT_GROUP | EVENT_COLL |
               EVENT_P2P | BELOW))
        DO(start(&o->group_api, &(struct event_v5){.type = EVENT_GROUP_API,
                                                   .group_api = {.depth = 1}}));
    if (kind == 0 && wanted(EVENT_COLL_API | EVENT_COLL | BELOW))
        DO(start(&o->coll_api,
                 &(struct event_v5){.type = EVENT_COLL_API, .parent = o->group_api,
                                    .coll_api = {.func = "AllReduce", .count = 1 << 20,
                                                 .datatype = "ncclFloat32"}}));
    if (wanted(EVENT_GROUP | EVENT_COLL | EVENT_P2P | BELOW))
        DO(start(&o->group, &(struct event_v5){.type = EVENT_GROUP}));
    if (kind == 0 && wanted(EVENT_COLL | BELOW))
        DO(start(&o->task, &(struct event_v5){
                               .type = EVENT_COLL,
                               .parent = o->coll_api,
                               .coll = {.sequence = sequence, .func = "AllReduce", .from = &area,
                                        .to = &area, .count = 1 << 20, .datatype = "ncclFloat32",
                                        .channels = 2, .warps = 8, .algo = "RING",
                                        .proto = "SIMPLE", .group = o->group}}));
    if (kind == 1 && wanted(EVENT_P2P | BELOW))
        DO(start(&o->task, &(struct event_v5){.type = EVENT_P2P,
                                              .parent = o->coll_api,
                                              .p2p = {.func = "Send", .buffer = &area,
                                                      .datatype = "ncclInt8", .count = 1 << 20,
                                                      .peer = 1, .channels = 2,
                                                      .group = o->group}}));
    if (kind == 2) o->task = (void *)0xdead0008; /* means something where it comes from */
    if (kind == 3) o->task = NULL;
    if (wanted(EVENT_PROXY_OP | EVENT_PROXY_STEP | EVENT_NET))
        DO(start(&o->op, &(struct event_v5){
                             .type = EVENT_PROXY_OP,
                             .parent = o->task,
                             .proxy_op = {.pid = kind == 2 ? getpid() + 1 : getpid(), .channel = 1,
                                          .peer = 1, .steps = 8, .chunk = 1 << 17,
                                          .is_send = 1}}));
    DO(record(o->op, STATE_OP_IN_PROGRESS));
    if (kind == 2) o->task = NULL; /* not this process's to stop */
    return true;
}

/* In this order the events of an operation are stopped; NCCL stops the task long before its proxy
 * operation is done. */
static bool operation_stop(struct operation *o, int order) {
    void **const all[] = {&o->task, &o->group, &o->coll_api, &o->group_api, &o->op};
    for (int i = 0; i < 5; i++) DO(end(all[(i * (order % 2 ? 3 : 1) + order) % 5]));
    return true;
}

static bool step_start(struct step *step, const struct operation *o, int number) {
    *step = (struct step){.rank = 0};
    if (wanted(EVENT_PROXY_STEP | EVENT_NET))
        DO(start(&step->event, &(struct event_v5){.type = EVENT_PROXY_STEP, .parent = o->op,
                                                  .proxy_step = {.step = number}}));
    return record(step->event, STATE_STEP_PEER_WAIT);
}

/* One message with the phandle of `step`. */
static bool send_step(struct wire *w, struct step *step, uint64_t id) {
    void *sent = NULL, *received = NULL, *at = w->in.at;
    struct step receive_step = {0};
    void *receive_phandle = &receive_step;
    const size_t len = 1000 + (size_t)(id % 5000), room = w->in.len;
    const int tag = 1;
    pattern_fill(w->out.at, len, id, 0);
    while (!sent || !received) {
        if (!received)
            OK(net_irecv(w->net, w->receive, 1, &at, &room, &tag, &w->in.memory, &receive_phandle,
                         &received));
        if (!sent)
            OK(net_isend(w->net, w->send, w->out.at, len, tag, w->out.memory, step, &sent));
    }
    DO(record(step->event, STATE_STEP_SEND_WAIT));
    const uint64_t until = now_ns() + 3 * patience_ns();
    while (sent || received) {
        int done = 0;
        if (sent) OK(net_test(w->net, sent, &done, NULL));
        if (done) sent = NULL;
        done = 0;
        if (received) OK(net_test(w->net, received, &done, NULL));
        if (done) received = NULL;
        CHECK(now_ns() < until, "a message is never done");
    }
    DO(end(&step->event));
    return pattern_is(w->in.at, len, id, 0, "profiled");
}

static bool messages(struct wire *wire, int n) {
    for (int i = 0; i < n; i++) {
        struct operation o;
        DO(operation_start(&o, i % 4, (uint64_t)i));
        if (i % 3 == 0) { /* stopped, and still a parent */
            DO(end(&o.task));
            DO(end(&o.group));
        }
        for (int s = 0; s < 4; s++) {
            struct step step;
            DO(step_start(&step, &o, s));
            DO(send_step(wire, &step, (uint64_t)i * 8 + (uint64_t)s));
        }
        DO(operation_stop(&o, i));
        CHECK(!has_failed(), "a callback failed");
    }
    return true;
}

/* Trees of events without messages, in NCCL's number for a long run. */
static bool events(int n) {
    for (int i = 0; i < n; i++) {
        struct operation o;
        void *net_event = NULL;
        DO(operation_start(&o, i % 4, (uint64_t)i));
        for (int s = 0; s < 8; s++) {
            struct step step;
            DO(step_start(&step, &o, s));
            callback(&net_event, 0, &step, 0, NULL);
            if (s % 2) callback(&net_event, s == 1 ? 1 : 3, &step, 0, NULL);
            DO(end(&step.event));
        }
        if (i % 50) DO(operation_stop(&o, i)); /* some are never stopped: an aborted job's */
    }
    return true;
}

static bool profiled(int version) {
    struct net net = {.callback = callback};
    struct wire wire;
    profiler.version = version;
    DO(profiler_open("pipeline"));
    DO(net_open(&net));
    DO(wire_open(&net, &wire, 65536));
    DO(messages(&wire, 200));
    const long called = profiler.called, started = profiler.started;
    if (wanted(EVENT_NET)) CHECK(started > 0, "NetPlugin events were asked for, none was started");

    /* One whose other half is another library: its events are not ours. */
    for (int other = NOTHING; other <= FAILING; other++) {
        profiler.behaves = other;
        DO(messages(&wire, 8));
    }
    profiler.behaves = OURS;

    DO(events(2000));
    const long before = resident_kib();
    DO(events(12500));
    CHECK(resident_kib() < before + 4096, "100000 steps: memory grew from %ld to %ld KiB", before,
          resident_kib());
    DO(messages(&wire, 20));

    /* The profiler goes before the net plugin, and comes again. */
    DO(profiler_close());
    profiler.mask = 0;
    DO(messages(&wire, 8));
    DO(profiler_open(NULL)); /* most communicators have no name */
    DO(messages(&wire, 20));
    DO(wire_close(&wire));
    DO(net_shut(&net));
    struct operation o;
    DO(operation_start(&o, 0, 1));
    DO(operation_stop(&o, 0));
    DO(profiler_close());
    note("mask %#x, %ld callbacks of 800 sends, %ld events", (unsigned)profiler.mask, called,
         started);
    return true;
}

static bool profiler_3(void) { return profiled(3); }
static bool profiler_4(void) { return profiled(4); }
static bool profiler_5(void) { return profiled(5); }
static bool profiler_6(void) { return profiled(6); }

/* The host's thread starts collectives while the progress thread sends. */
static atomic_bool stop;

static void *launches(void *passed) {
    for (uint64_t i = 0; !atomic_load(&stop); i++) {
        struct operation o;
        if (!operation_start(&o, (int)(i % 2), i) || !operation_stop(&o, (int)(i % 5)))
            *(bool *)passed = false;
    }
    return NULL;
}

static bool profiler_threads(void) {
    struct net net = {.callback = callback};
    struct wire wire;
    pthread_t thread;
    bool launched = true;
    profiler.version = 6;
    DO(profiler_open("threads"));
    DO(net_open(&net));
    DO(wire_open(&net, &wire, 65536));
    CHECK(pthread_create(&thread, NULL, launches, &launched) == 0, "pthread_create");
    const bool passed = messages(&wire, 400);
    atomic_store(&stop, true);
    pthread_join(thread, NULL);
    DO(passed && launched);
    DO(wire_close(&wire));
    DO(net_shut(&net));
    return profiler_close();
}

/* Of another process: parents are that one's pointers, and must not be followed. Here each is one
 * that cannot be read. */
static bool profiler_foreign(void) {
    struct net net = {.callback = callback};
    struct wire wire;
    for (profiler.version = 3; profiler.version <= 6; profiler.version++) {
        DO(profiler_open(NULL));
        DO(net_open(&net));
        DO(wire_open(&net, &wire, 65536));
        for (int i = 0; i < 20; i++) {
            struct operation o;
            DO(operation_start(&o, 2, (uint64_t)i));
            struct step step;
            DO(step_start(&step, &o, i));
            DO(send_step(&wire, &step, (uint64_t)i));
            DO(operation_stop(&o, i));
        }
        DO(wire_close(&wire));
        DO(net_shut(&net));
        DO(profiler_close());
    }
    return true;
}

const struct check profiler_checks[] = {
    {"profiler_v3", profiler_3, 60, 10, EACH, "profiler v3 beside the net plugin"},
    {"profiler_v4", profiler_4, 60, 10, EACH, "profiler v4 beside the net plugin"},
    {"profiler_v5", profiler_5, 60, 10, EACH, "profiler v5 beside the net plugin"},
    {"profiler_v6", profiler_6, 60, 10, EACH, "profiler v6 beside the net plugin"},
    {"profiler_threads", profiler_threads, 60, 10, EACH, "events in one thread, sends in another"},
    {"profiler_foreign", profiler_foreign, 60, 10, EACH, "parents of another process"},
    {0}};
