/* Ends that are not orderly: closing with requests in flight, peers that die, stop or leave. What a
 * plugin owes its host: calls return, errors come from test and only from there, within seconds,
 * and memory is the host's again once the comm is closed. */
#define _GNU_SOURCE
#include "wire.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum { BIG = 64 << 20, CANARY = 0x42 };

/* Tests until it fails, which it must. Done is an answer, too, where `may_be_done`. */
static bool until_error(struct net *net, void *request, bool may_be_done, const char *what,
                        int *result) {
    const uint64_t until = now_ns() + 2 * patience_ns();
    for (int done = 0;;) {
        *result = net_test(net, request, &done, NULL);
        if (*result) return true;
        if (done && may_be_done) return true;
        CHECK(!done, "%s: test says done", what);
        CHECK(now_ns() < until, "%s: test neither fails nor says done", what);
        rest();
    }
}

/* As NCCL aborts: deregister, close, free, without a test of the requests. */
static bool close_in_flight(void) {
    enum { N = 8, LEN = 2 << 20 };
    struct net net = {0};
    DO(net_open(&net));
    for (int round = 0; round < 8; round++) {
        struct wire wire;
        void *requests[2 * N];
        DO(wire_open(&net, &wire, (size_t)N * LEN));
        const bool sends = round & 1, receives = round & 2 || !sends, sender_first = round & 4;
        memset(wire.in.at, CANARY, wire.in.len);
        pattern_fill(wire.out.at, wire.out.len, 1, 0);
        int sent = 0;
        for (int i = 0; i < N; i++) {
            if (receives)
                DO(irecv_until(&net, wire.receive, wire.in.at + (size_t)i * LEN, LEN, 1,
                               wire.in.memory, &requests[i]));
            if (!sends) continue;
            /* Without a receive it may refuse at some point. */
            OK(net_isend(&net, wire.send, wire.out.at + (size_t)i * LEN, LEN, 1, wire.out.memory,
                         NULL, &requests[N + sent]));
            if (requests[N + sent]) sent++;
        }
        for (int i = 0; i < 3; i++) {
            int done = 0;
            if (receives && round & 2 && sends) OK(net_test(&net, requests[0], &done, NULL));
            if (sent && !done) OK(net_test(&net, requests[N], &done, NULL));
            if (done) break; /* never tested again */
        }
        for (int turn = 0; turn < 2; turn++) {
            if ((turn == 0) == sender_first) {
                DO(buffer_close(&net, &wire.out));
                OK(net_close_send(&net, wire.send));
                wire.send = NULL;
            } else {
                DO(buffer_close(&net, &wire.in));
                OK(net_close_receive(&net, wire.receive));
                wire.receive = NULL;
            }
            rest_ms(5);
        }
        DO(wire_close(&wire));
    }
    struct wire wire;
    DO(wire_open(&net, &wire, 1 << 20));
    DO(one_message(&wire, 1 << 20, 1 << 20, 1, true));
    DO(wire_close(&wire));
    return net_shut(&net);
}

/* Closed receives: what the sender still sends goes nowhere. */
static bool memory_after_close(void) {
    enum { N = 8, LEN = 1 << 20 };
    struct net net = {0};
    struct wire wire;
    void *requests[N], *sent[N] = {NULL};
    DO(net_open(&net));
    DO(wire_open(&net, &wire, (size_t)N * LEN));
    for (int i = 0; i < N; i++)
        DO(irecv_until(&net, wire.receive, wire.in.at + (size_t)i * LEN, LEN, 1, wire.in.memory,
                       &requests[i]));
    OK(net_deregister(&net, wire.receive, wire.in.memory));
    OK(net_close_receive(&net, wire.receive));
    wire.receive = NULL;
    memset(wire.in.at, CANARY, wire.in.len);
    int result = 0;
    for (int i = 0; i < N; i++)
        OK(net_isend(&net, wire.send, wire.out.at + (size_t)i * LEN, LEN, 1, wire.out.memory, NULL,
                     &sent[i]));
    for (int i = 0; i < N; i++)
        if (sent[i]) DO(until_error(&net, sent[i], true, "a send to a closed receiver", &result));
    rest_ms(30);
    DO(bytes_are(wire.in.at, wire.in.len, CANARY, "memory of a closed comm"));
    munmap(wire.in.at, wire.in.len);
    wire.in.mapped = false;
    DO(wire_close(&wire));
    return net_shut(&net);
}

/* The sender closes (in good order) while the receiver waits. */
static bool closed_by_sender(void) {
    struct net net = {0};
    struct wire wire;
    void *pending[3];
    int result = 0;
    DO(net_open(&net));
    DO(wire_open(&net, &wire, 1 << 20));
    DO(one_message(&wire, 1 << 20, 1 << 20, 1, true));
    for (int i = 0; i < 3; i++)
        DO(irecv_until(&net, wire.receive, wire.in.at + 4096 * i, 4096, 1, wire.in.memory,
                       &pending[i]));
    DO(buffer_close(&net, &wire.out));
    OK(net_close_send(&net, wire.send));
    wire.send = NULL;
    OK(net_deregister(&net, wire.receive, wire.in.memory));
    OK(net_register(&net, wire.receive, wire.in.at, wire.in.len, POINTER_HOST, &wire.in.memory));
    for (int i = 0; i < 3; i++)
        DO(until_error(&net, pending[i], false, "a receive whose sender closed", &result));
    void *late = NULL;
    for (int i = 0; i < 5; i++) {
        OK(net_irecv(&net, wire.receive, 1, (void *[]){wire.in.at}, (size_t[]){64}, (int[]){1},
                     &wire.in.memory, NULL, &late));
        if (late) DO(until_error(&net, late, false, "a receive posted afterwards", &result));
    }
    DO(wire_close(&wire));
    note("result %d", result);
    return net_shut(&net);
}

/* The receiver closes while the sender sends. */
static bool closed_by_receiver(void) {
    enum { LEN = 4 << 20 };
    struct net net = {0};
    struct wire wire;
    int result = 0;
    DO(net_open(&net));
    DO(wire_open(&net, &wire, LEN));
    DO(one_message(&wire, 4096, 4096, 1, true));
    DO(buffer_close(&net, &wire.in));
    OK(net_close_receive(&net, wire.receive));
    wire.receive = NULL;
    /* It may take some into buffers before it notices. */
    const uint64_t until = now_ns() + 2 * patience_ns();
    while (!result) {
        void *sent = NULL;
        OK(net_isend(&net, wire.send, wire.out.at, LEN, 1, wire.out.memory, NULL, &sent));
        if (sent) DO(until_error(&net, sent, true, "a send whose receiver closed", &result));
        CHECK(now_ns() < until, "sends to a closed receiver never fail");
    }
    DO(wire_close(&wire));
    note("result %d", result);
    return net_shut(&net);
}

static bool die(void) {
    raise(SIGKILL);
    return false;
}

/* rank 0 sends, rank 1 receives. */
static bool pair_open(struct net *net, int rank, struct link *link, struct buffer *buffer) {
    *link = (struct link){.from = 0, .to = 1, .key = "pair"};
    DO(net_open(net));
    DO(links_open(net, rank, link, 1));
    return buffer_open(net, link->comm, buffer, BIG);
}

static bool survivor_close(struct net *net, int rank, struct link *link, struct buffer *buffer) {
    DO(buffer_close(net, buffer));
    if (rank == 0) OK(net_close_send(net, link->comm));
    else OK(net_close_receive(net, link->comm));
    /* And the plugin is of use for others. */
    struct wire wire;
    DO(wire_open(net, &wire, 1 << 20));
    DO(one_message(&wire, 1 << 20, 1 << 20, 1, true));
    DO(wire_close(&wire));
    return net_shut(net);
}

static bool sender_dies(int rank, int ranks) {
    struct net net = {0};
    struct link link;
    struct buffer buffer;
    void *request = NULL;
    int result = 0;
    (void)ranks;
    DO(pair_open(&net, rank, &link, &buffer));
    if (rank == 0) {
        pattern_fill(buffer.at, BIG, 1, 0);
        DO(meet("posted", rank, 2));
        DO(isend_until(&net, link.comm, buffer.at, BIG, 1, buffer.memory, &request));
        for (int i = 0, done = 0; i < 3 && !done; i++) OK(net_test(&net, request, &done, NULL));
        return die();
    }
    void *second = NULL;
    DO(irecv_until(&net, link.comm, buffer.at, BIG, 1, buffer.memory, &request));
    DO(irecv_until(&net, link.comm, buffer.at, BIG, 1, buffer.memory, &second));
    DO(meet("posted", rank, 2));
    DO(until_error(&net, request, true, "a receive whose sender died in the message", &result));
    const bool arrived = result == 0;
    if (arrived) DO(pattern_is(buffer.at, BIG, 1, 0, "the dead sender's message"));
    DO(until_error(&net, second, false, "a receive behind it", &result));
    void *late = NULL;
    OK(net_irecv(&net, link.comm, 1, (void *[]){buffer.at}, (size_t[]){64}, (int[]){1},
                 &buffer.memory, NULL, &late));
    if (late) DO(until_error(&net, late, false, "a receive posted afterwards", &result));
    note("result %d%s", result, arrived ? "; the message had arrived" : "");
    return survivor_close(&net, rank, &link, &buffer);
}

static bool receiver_dies(int rank, int ranks) {
    struct net net = {0};
    struct link link;
    struct buffer buffer;
    void *request = NULL, *behind[4] = {NULL};
    int result = 0;
    (void)ranks;
    DO(pair_open(&net, rank, &link, &buffer));
    if (rank == 1) {
        DO(irecv_until(&net, link.comm, buffer.at, BIG, 1, buffer.memory, &request));
        DO(meet("posted", rank, 2));
        for (int i = 0, done = 0; i < 3 && !done; i++) OK(net_test(&net, request, &done, NULL));
        return die();
    }
    pattern_fill(buffer.at, BIG, 1, 0);
    DO(meet("posted", rank, 2));
    DO(isend_until(&net, link.comm, buffer.at, BIG, 1, buffer.memory, &request));
    for (int i = 0; i < 4; i++)
        OK(net_isend(&net, link.comm, buffer.at, 4096, 1, buffer.memory, NULL, &behind[i]));
    DO(until_error(&net, request, true, "a send whose receiver died in the message", &result));
    for (int i = 0; i < 4; i++)
        if (behind[i]) DO(until_error(&net, behind[i], result == 0, "a send behind it", &result));
    const uint64_t until = now_ns() + 2 * patience_ns();
    while (!result) { /* the message was through: others will fail */
        void *late = NULL;
        OK(net_isend(&net, link.comm, buffer.at, 4096, 1, buffer.memory, NULL, &late));
        if (late) DO(until_error(&net, late, true, "a send posted afterwards", &result));
        CHECK(now_ns() < until, "sends to a dead receiver never fail");
    }
    void *late = NULL;
    OK(net_isend(&net, link.comm, buffer.at, 4096, 1, buffer.memory, NULL, &late));
    if (late) DO(until_error(&net, late, false, "a send after an error", &result));
    note("result %d", result);
    return survivor_close(&net, rank, &link, &buffer);
}

static bool idle_sender_dies(int rank, int ranks) {
    struct net net = {0};
    struct link link;
    struct buffer buffer;
    void *request = NULL;
    int result = 0;
    (void)ranks;
    DO(pair_open(&net, rank, &link, &buffer));
    if (rank == 1) DO(irecv_until(&net, link.comm, buffer.at, 4096, 1, buffer.memory, &request));
    DO(meet("posted", rank, 2));
    if (rank == 0) return die();
    DO(until_error(&net, request, false, "a receive whose idle sender died", &result));
    note("result %d", result);
    return survivor_close(&net, rank, &link, &buffer);
}

/* A peer that is stopped is not dead: calls return, nothing fails, and in the end all arrives. */
static bool receiver_stops(int rank, int ranks) {
    struct net net = {0};
    struct link link;
    struct buffer buffer;
    void *request = NULL;
    pid_t pid = getpid();
    (void)ranks;
    DO(pair_open(&net, rank, &link, &buffer));
    if (rank == 1) {
        DO(irecv_until(&net, link.comm, buffer.at, BIG, 1, buffer.memory, &request));
        DO(tell("pid", rank, &pid, sizeof pid));
        raise(SIGSTOP);
        DO(until_done(&net, request, NULL));
        DO(pattern_is(buffer.at, BIG, 1, 0, "received after a stop"));
    } else {
        pattern_fill(buffer.at, BIG, 1, 0);
        DO(hear("pid", 1, &pid, sizeof pid));
        DO(isend_until(&net, link.comm, buffer.at, BIG, 1, buffer.memory, &request));
        int done = 0;
        for (int i = 0; i < 300 && !done; i++) {
            OK(net_test(&net, request, &done, NULL));
            rest_ms(1);
        }
        while (kill(pid, 0) == 0 && !done) {
            kill(pid, SIGCONT);
            OK(net_test(&net, request, &done, NULL));
        }
        if (!done) DO(until_done(&net, request, NULL));
        kill(pid, SIGCONT);
    }
    DO(meet("arrived", rank, 2));
    return survivor_close(&net, rank, &link, &buffer);
}

static bool sender_killed(void) { return ranks_run(2, sender_dies, 1); }
static bool receiver_killed(void) { return ranks_run(2, receiver_dies, 2); }
static bool idle_sender_killed(void) { return ranks_run(2, idle_sender_dies, 1); }
static bool receiver_stopped(void) { return ranks_run(2, receiver_stops, 0); }

const struct check abort_checks[] = {
    {"close_in_flight", close_in_flight, 60, 0, EACH, "closing with requests in flight"},
    {"memory_after_close", memory_after_close, 60, 0, EACH, "a closed comm writes no memory"},
    {"closed_by_sender", closed_by_sender, 60, 0, EACH, "receives fail when the sender closes"},
    {"closed_by_receiver", closed_by_receiver, 60, 0, EACH, "sends fail when the receiver closes"},
    {"sender_killed", sender_killed, 60, 0, EACH, "SIGKILL in a message: the receiver is told"},
    {"receiver_killed", receiver_killed, 60, 0, EACH, "SIGKILL in a message: the sender is told"},
    {"idle_sender_killed", idle_sender_killed, 60, 0, EACH, "SIGKILL of an idle sender"},
    {"receiver_stopped", receiver_stopped, 60, 0, EACH, "SIGSTOP of the receiver for a while"},
    {0}};
