/* Threads as NCCL has them: a service thread that connects, registers and closes, and a progress
 * thread that sends, receives and tests, one comm being used by both. */
#define _GNU_SOURCE
#include "wire.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>

static atomic_bool stop;

/* Runs a body in a thread; join it with thread_end. */
struct thread {
    pthread_t id;
    bool (*body)(void *);
    void *argument;
    bool passed;
};

static void *thread_main(void *argument) {
    struct thread *thread = argument;
    thread->passed = thread->body(thread->argument);
    return NULL;
}

static bool thread_start(struct thread *thread, bool (*body)(void *), void *argument) {
    thread->body = body;
    thread->argument = argument;
    CHECK(pthread_create(&thread->id, NULL, thread_main, thread) == 0, "pthread_create");
    return true;
}

static bool thread_end(struct thread *thread) {
    pthread_join(thread->id, NULL);
    return thread->passed;
}

enum { SLOT = 40000, WINDOW = 8 };

static const struct message load[] = {
    {.size = 40000, .room = 40000, .id = 1}, {.size = 17, .room = 40000, .id = 2},
    {.size = 8192, .room = 8192, .id = 3},   {.size = 0, .room = 64, .id = 4},
    {.size = 33333, .room = 40000, .id = 5},
};

static struct stream side(struct wire *wire, bool sends, long n) {
    return (struct stream){
        .net = wire->net,
        .comm = sends ? wire->send : wire->receive,
        .memory = sends ? wire->out.memory : wire->in.memory,
        .base = sends ? wire->out.at : wire->in.at,
        .sends = sends,
        .slot_bytes = SLOT,
        .window = WINDOW,
        .messages = load,
        .repeat_after = COUNT(load),
        .n = n,
    };
}

static bool registers(void *argument) {
    struct wire *wire = argument;
    static uint8_t area[1 << 20];
    for (size_t i = 0; !atomic_load(&stop); i++) {
        void *a = NULL, *b = NULL;
        const size_t len = 1 + (i * 4099) % (sizeof area - 1);
        OK(net_register(wire->net, wire->send, area, len, POINTER_HOST, &a));
        OK(net_register(wire->net, wire->receive, area, len, POINTER_HOST, &b));
        OK(net_deregister(wire->net, wire->receive, b));
        OK(net_deregister(wire->net, wire->send, a));
    }
    return true;
}

static bool register_and_send(void) {
    struct net net = {0};
    struct wire wire;
    struct thread service;
    DO(net_open(&net));
    DO(wire_open(&net, &wire, WINDOW * SLOT));
    struct stream streams[2] = {side(&wire, true, 1500), side(&wire, false, 1500)};
    DO(thread_start(&service, registers, &wire));
    const bool passed = streams_run(streams, 2);
    atomic_store(&stop, true);
    DO(thread_end(&service) && passed);
    DO(wire_close(&wire));
    return net_shut(&net);
}

static bool connects(void *argument) {
    struct net *net = argument;
    for (uint64_t i = 0; !atomic_load(&stop); i++) {
        struct wire wire;
        DO(wire_open(net, &wire, 4096));
        if (i % 2) DO(one_message(&wire, 4096, 4096, i, true));
        DO(wire_close(&wire));
    }
    return true;
}

static bool connect_and_send(void) {
    struct net net = {0};
    struct wire wire;
    struct thread service;
    DO(net_open(&net));
    DO(wire_open(&net, &wire, WINDOW * SLOT));
    struct stream streams[2] = {side(&wire, true, 1500), side(&wire, false, 1500)};
    DO(thread_start(&service, connects, &net));
    const bool passed = streams_run(streams, 2);
    atomic_store(&stop, true);
    DO(thread_end(&service) && passed);
    DO(wire_close(&wire));
    return net_shut(&net);
}

enum { COMMS = 12 };

struct share {
    struct stream streams[2 * COMMS];
    int n;
};

static bool runs(void *argument) {
    struct share *share = argument;
    return streams_run(share->streams, share->n);
}

/* Split by comm: each thread has both ends of half of them; or by direction: one thread sends on
 * all, the other receives. */
static bool many_comms(bool by_direction) {
    struct net net = {0};
    static struct wire wires[COMMS];
    static struct share shares[2];
    struct thread other;
    DO(net_open(&net));
    for (int i = 0; i < COMMS; i++) {
        DO(wire_open(&net, &wires[i], WINDOW * SLOT));
        for (int sends = 0; sends < 2; sends++) {
            struct share *share = &shares[by_direction ? sends : i % 2];
            share->streams[share->n] = side(&wires[i], sends, 150);
            share->streams[share->n++].id_base = (uint64_t)i * 100;
        }
    }
    DO(thread_start(&other, runs, &shares[1]));
    const bool passed = runs(&shares[0]);
    DO(thread_end(&other) && passed);
    for (int i = 0; i < COMMS; i++) DO(wire_close(&wires[i]));
    return net_shut(&net);
}

static atomic_long ticks;
static void tick(int signal) { ticks += signal == SIGALRM; }

/* A host with a profiling timer: system calls are interrupted, and not restarted. */
static bool interrupted(void) {
    struct net net = {0};
    struct wire wire;
    const struct sigaction action = {.sa_handler = tick};
    const struct itimerval often = {{0, 300}, {0, 300}}, never = {{0, 0}, {0, 0}};
    sigaction(SIGALRM, &action, NULL);
    setitimer(ITIMER_REAL, &often, NULL);
    DO(net_open(&net));
    for (int round = 0; round < 5; round++) {
        DO(wire_open(&net, &wire, WINDOW * SLOT));
        struct stream streams[2] = {side(&wire, true, 300), side(&wire, false, 300)};
        DO(streams_run(streams, 2));
        DO(wire_close(&wire));
    }
    DO(net_shut(&net));
    setitimer(ITIMER_REAL, &never, NULL);
    CHECK(ticks > 0, "no signal came");
    note("%ld signals", (long)ticks);
    return true;
}

static bool comms_by_thread(void) { return many_comms(false); }
static bool ends_by_thread(void) { return many_comms(true); }

const struct check thread_checks[] = {
    {"register_and_send", register_and_send, 60, 0, EACH, "regMr in one thread, sends in another"},
    {"connect_and_send", connect_and_send, 60, 0, EACH, "connections come and go meanwhile"},
    {"comms_by_thread", comms_by_thread, 60, 0, EACH, "12 comms, half of them to each thread"},
    {"ends_by_thread", ends_by_thread, 60, 0, EACH, "12 comms, one thread sends, one receives"},
    {"interrupted", interrupted, 60, 0, EACH, "system calls interrupted by signals"},
    {0}};
