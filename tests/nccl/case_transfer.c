/* Messages: sizes, order, windows, groups, optional completion, refusal. */
#define _GNU_SOURCE
#include "wire.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static bool sizes(void) {
    static const size_t each[] = {0,     1,     7,     8,     63,        64,       65,     4095,
                                  4096,  4097,  65535, 65536, 65537,     131072,   500001, 1 << 20,
                                  1048577, 4 << 20, 0, 3};
    enum { ROOM = 4 << 20 };
    struct net net = {0};
    struct wire wire;
    DO(net_open(&net));
    DO(wire_open(&net, &wire, ROOM + 4096));
    uint64_t id = 0;
    for (size_t i = 0; i < COUNT(each); i++) {
        DO(one_message(&wire, each[i], each[i], id++, true));
        DO(one_message(&wire, each[i], each[i], id++, false));
        /* NCCL offers the slot's size and sends what there is. */
        DO(one_message(&wire, each[i], each[i] + 4096, id++, i % 2));
    }
    DO(one_message(&wire, 10, ROOM, id++, true));
    DO(one_message(&wire, 10, ROOM, id++, false));
    DO(wire_close(&wire));
    return net_shut(&net);
}

static bool big(void) {
    struct net net = {0};
    struct wire wire;
    DO(net_open(&net));
    DO(wire_open(&net, &wire, 64 << 20));
    DO(one_message(&wire, 64 << 20, 64 << 20, 1, true));
    DO(one_message(&wire, (64 << 20) - 1, 64 << 20, 2, false));
    DO(wire_close(&wire));
    return net_shut(&net);
}

/* The sender's pages are one small file mapped again and again, with a period that is no power of
 * two, so that a piece that lands elsewhere shows. */
static bool gigabyte(void) {
    enum { PERIOD = 1021 * 4096 };
    const size_t len = (size_t)1 << 30;
    if (available_mib() < 2500) return skip("less than 2.5 GiB of memory are free");
    struct net net = {0};
    struct wire wire;
    DO(net_open(&net));
    DO(wire_open(&net, &wire, 0));
    DO(buffer_open(&net, wire.receive, &wire.in, len));
    const int fd = memfd_create("period", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, PERIOD) == 0, "memfd: %s", strerror(errno));
    uint8_t *out = mmap(NULL, len, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(out != MAP_FAILED, "mmap: %s", strerror(errno));
    for (size_t at = 0; at < len; at += PERIOD) {
        const size_t n = len - at < PERIOD ? len - at : PERIOD;
        CHECK(mmap(out + at, n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == out + at,
              "mmap: %s", strerror(errno));
    }
    pattern_fill(out, PERIOD, 7, 0);
    void *memory = NULL, *sent = NULL, *received = NULL;
    OK(net_register(&net, wire.send, out, len, POINTER_HOST, &memory));
    DO(irecv_until(&net, wire.receive, wire.in.at, len, 1, wire.in.memory, &received));
    DO(isend_until(&net, wire.send, out, len, 1, memory, &sent));
    int size = 0;
    while (sent || received) {
        int done = 0;
        if (sent) OK(net_test(&net, sent, &done, NULL));
        if (done) sent = NULL;
        done = 0;
        if (received) OK(net_test(&net, received, &done, &size));
        if (done) received = NULL;
    }
    CHECK(size == (int)len, "received %d bytes", size);
    for (size_t at = 0; at < len; at += PERIOD)
        DO(pattern_is(wire.in.at + at, len - at < PERIOD ? len - at : PERIOD, 7, 0, "a period"));
    OK(net_deregister(&net, wire.send, memory));
    munmap(out, len);
    close(fd);
    DO(wire_close(&wire));
    return net_shut(&net);
}

enum { MIXED = 97, SLOT = 72 << 10 };

/* Lengths that jump between nothing and more than a socket's buffer takes at once. */
static const struct message *mixed(void) {
    static struct message messages[MIXED];
    for (int i = 0; i < MIXED; i++) {
        static const size_t kinds[] = {0, 1, 12, 700, 4096, 65536, 65537, 33333, 8};
        messages[i].size = kinds[(i * 5 + i / 9) % COUNT(kinds)];
        messages[i].room = i % 3 ? SLOT : messages[i].size;
        messages[i].id = (uint64_t)i;
        messages[i].tag = i % 4;
    }
    return messages;
}

struct ends {
    struct stream stream[4];
    struct wire there, back;
};

static bool both_ways(struct net *net, struct ends *ends, int window, long n) {
    DO(wire_open(net, &ends->there, (size_t)window * SLOT));
    DO(wire_open(net, &ends->back, (size_t)window * SLOT));
    for (int i = 0; i < 4; i++) {
        struct wire *wire = i < 2 ? &ends->there : &ends->back;
        const bool sends = i % 2 == 0;
        ends->stream[i] = (struct stream){
            .net = net,
            .comm = sends ? wire->send : wire->receive,
            .memory = sends ? wire->out.memory : wire->in.memory,
            .base = sends ? wire->out.at : wire->in.at,
            .sends = sends,
            .slot_bytes = SLOT,
            .window = window,
            .messages = mixed(),
            .repeat_after = MIXED,
            .id_base = i < 2 ? 0 : 1000,
            .n = n,
        };
    }
    return true;
}

static bool run_mixed(int window, long n, bool any_order, bool optional, unsigned refuse_of) {
    struct net net = {.refuse_of = refuse_of};
    struct ends ends;
    DO(net_open(&net));
    DO(both_ways(&net, &ends, window, n));
    for (int i = 0; i < 4; i++) {
        ends.stream[i].any_order = any_order;
        ends.stream[i].optional = optional && !ends.stream[i].sends;
    }
    DO(streams_run(ends.stream, 4));
    DO(wire_close(&ends.there));
    DO(wire_close(&ends.back));
    return net_shut(&net);
}

static bool in_order(void) { return run_mixed(8, 1000, false, false, 0); }
static bool thirty_two(void) { return run_mixed(32, 2000, false, false, 0); }
static bool one_by_one(void) { return run_mixed(1, 500, false, false, 0); }
static bool tested_in_any_order(void) { return run_mixed(32, 1000, true, false, 0); }
static bool optional_completion(void) { return run_mixed(8, 500, false, true, 0); }
static bool refused(void) { return run_mixed(8, 400, false, false, 50); }

/* Receives far ahead of the sends, and sends far ahead of the receives. */
static bool lopsided(void) {
    struct net net = {0};
    struct ends ends;
    DO(net_open(&net));
    DO(both_ways(&net, &ends, 32, 320));
    bool progress;
    struct stream *sender = &ends.stream[0], *receiver = &ends.stream[1];
    for (int i = 0; i < 2000; i++) DO(stream_step(receiver, &progress));
    CHECK(receiver->done == 0, "a receive is done that nobody sent for");
    for (int i = 0; i < 2000; i++) DO(stream_step(&ends.stream[2], &progress));
    DO(streams_run(ends.stream, 4));
    CHECK(sender->done == 320, "%ld", sender->done);
    DO(wire_close(&ends.there));
    DO(wire_close(&ends.back));
    return net_shut(&net);
}

/* Send, test done, close at once; only then the receiver looks. A plugin that sends ahead of the
 * receives is not given any (first round); others get them as they want them, and the receiver
 * tests nothing unless the send needs that. */
static bool close_after_done(void) {
    enum { N = 6, LEN = 200000 };
    struct net net = {0};
    DO(net_open(&net));
    for (int round = 0; round < 4; round++) {
        struct wire wire;
        void *sent[N] = {NULL}, *received[N] = {NULL};
        bool arrived[N] = {false};
        int posted = 0, sending = 0, done_sends = 0, size;
        DO(wire_open(&net, &wire, (size_t)N * LEN));
        const size_t len = round % 2 ? LEN : 3000; /* the small ones fit into any buffer */
        if (round >= 2) posted = N;
        for (int i = 0; i < N; i++) {
            pattern_fill(wire.out.at + (size_t)i * LEN, len, (uint64_t)i, 0);
            if (i < posted)
                DO(irecv_until(&net, wire.receive, wire.in.at + (size_t)i * LEN, LEN, i,
                               wire.in.memory, &received[i]));
        }
        const uint64_t until = now_ns() + 2 * patience_ns();
        for (long idle = 0; done_sends < N;) {
            int done = 0;
            if (sending < N) {
                OK(net_isend(&net, wire.send, wire.out.at + (size_t)sending * LEN, len, sending,
                             wire.out.memory, NULL, &sent[sending]));
                if (sent[sending]) sending++, idle = 0;
            }
            if (done_sends < sending) OK(net_test(&net, sent[done_sends], &done, NULL));
            if (done) done_sends++, idle = 0;
            if (++idle > 2000) {
                /* It waits for the receiver, which has not done anything yet. */
                if (posted < N) {
                    DO(irecv_until(&net, wire.receive, wire.in.at + (size_t)posted * LEN, LEN,
                                   posted, wire.in.memory, &received[posted]));
                    posted++;
                } else if (!arrived[done_sends]) {
                    OK(net_test(&net, received[done_sends], &done, &size));
                    arrived[done_sends] = done;
                }
                idle = 1000;
                rest();
            }
            CHECK(now_ns() < until, "%d of %d sends are done", done_sends, N);
        }
        DO(buffer_close(&net, &wire.out));
        OK(net_close_send(&net, wire.send));
        wire.send = NULL;
        rest_ms(20);
        for (int i = 0; i < N; i++) {
            uint8_t *at = wire.in.at + (size_t)i * LEN;
            size = (int)len;
            if (!received[i])
                DO(irecv_until(&net, wire.receive, at, LEN, i, wire.in.memory, &received[i]));
            if (!arrived[i]) DO(until_done(&net, received[i], &size));
            CHECK(size == (int)len, "received %d of %zu bytes after the sender closed", size, len);
            DO(pattern_is(at, len, (uint64_t)i, 0, "after the sender closed"));
        }
        DO(wire_close(&wire));
    }
    return net_shut(&net);
}

/* A receive for several senders' messages, told apart by tags. */
static bool grouped(void) {
    enum { ROOM = 40000 };
    struct net net = {0};
    struct wire wire;
    struct properties p;
    DO(net_open(&net));
    OK(net_properties(&net, setup.listen_device, &p));
    const int most = p.max_recvs < GROUP_MAX ? p.max_recvs : GROUP_MAX;
    DO(wire_open(&net, &wire, (size_t)GROUP_MAX * ROOM));
    for (int round = 0; round < 60; round++) {
        const int n = 1 + round % most;
        void *data[GROUP_MAX], *memory[GROUP_MAX], *received = NULL, *sent[GROUP_MAX] = {NULL};
        size_t room[GROUP_MAX];
        int tags[GROUP_MAX], got[GROUP_MAX + 1];
        memset(wire.in.at, 0x5a, wire.in.len);
        for (int i = 0; i < n; i++) {
            data[i] = wire.in.at + (size_t)i * ROOM;
            memory[i] = wire.in.memory;
            room[i] = ROOM;
            tags[i] = round * 16 + i;
        }
        const uint64_t until = now_ns() + 2 * patience_ns();
        bool first = round % 2;
        for (int sending = 0; sending < n || !received;) {
            if (!received && (first || sending == n)) {
                OK(net_irecv(&net, wire.receive, n, data, room, tags, memory, NULL, &received));
            } else if (sending < n) {
                /* Not in the order of the tags. */
                const int i = (sending * 3 + 1) % n;
                const int turn = n % 3 ? i : n - 1 - sending;
                const size_t len = (size_t)((turn * 7919 + round * 31) % ROOM);
                uint8_t *at = wire.out.at + (size_t)turn * ROOM;
                pattern_fill(at, len, (uint64_t)tags[turn], 0);
                OK(net_isend(&net, wire.send, at, len, tags[turn], wire.out.memory, NULL,
                             &sent[turn]));
                if (sent[turn]) sending++;
                else first = true; /* it may want to see the receive before */
            }
            CHECK(now_ns() < until, "a group of %d is never posted", n);
        }
        for (int i = 0; i <= GROUP_MAX; i++) got[i] = -1;
        DO(until_done(&net, received, got));
        for (int i = 0; i < n; i++) {
            const size_t len = (size_t)((i * 7919 + round * 31) % ROOM);
            CHECK(got[i] == (int)len, "message %d of %d with tag %d: %d bytes, not %zu", i, n,
                  tags[i], got[i], len);
            DO(pattern_is(data[i], len, (uint64_t)tags[i], 0, "grouped"));
            DO(bytes_are((uint8_t *)data[i] + len, ROOM - len, 0x5a, "behind a grouped message"));
            DO(until_done(&net, sent[i], NULL));
        }
        for (int i = n; i <= GROUP_MAX; i++)
            CHECK(got[i] == -1, "test wrote size %d for a group of %d", i, n);
    }
    note("up to %d", most);
    DO(wire_close(&wire));
    return net_shut(&net);
}

/* What NCCL calls after a receive into a GPU; in host memory there is nothing to do. */
static bool flush(void) {
    struct net net = {0};
    struct wire wire;
    DO(net_open(&net));
    DO(wire_open(&net, &wire, 65536));
    DO(one_message(&wire, 65536, 65536, 1, true));
    for (int i = 0; i < 100; i++) {
        void *data = wire.in.at, *memory = wire.in.memory, *request = OPTIONAL_COMPLETION;
        int size = i % 2 ? 65536 : 0;
        OK(net_iflush(&net, wire.receive, 1, &data, &size, &memory, &request));
        CHECK(request != OPTIONAL_COMPLETION, "iflush left its request unset");
        if (request) DO(until_done(&net, request, NULL));
    }
    DO(one_message(&wire, 65536, 65536, 2, false));
    DO(wire_close(&wire));
    return net_shut(&net);
}

/* Progress without memory: many messages, the process does not grow. */
static bool many_messages(void) {
    struct net net = {0};
    struct wire wire;
    static const struct message small = {.size = 24, .room = 64};
    DO(net_open(&net));
    DO(wire_open(&net, &wire, 32 * 64));
    struct stream streams[2];
    for (int i = 0; i < 2; i++)
        streams[i] = (struct stream){
            .net = &net,
            .comm = i ? wire.receive : wire.send,
            .memory = i ? wire.in.memory : wire.out.memory,
            .base = i ? wire.in.at : wire.out.at,
            .sends = !i,
            .slot_bytes = 64,
            .window = 32,
            .messages = &small,
            .repeat_after = 1,
            .n = 10000,
        };
    DO(streams_run(streams, 2));
    const long before = resident_kib();
    streams[0].n = streams[1].n = 60000;
    DO(streams_run(streams, 2));
    CHECK(resident_kib() < before + 4096, "50000 messages: memory grew from %ld to %ld KiB", before,
          resident_kib());
    DO(wire_close(&wire));
    return net_shut(&net);
}

/* A message longer than its receive: NCCL never sends one, and its own transports differ in what
 * they do (an error; or the part that fits). It may also never be taken. But what was taken ends,
 * and nobody writes behind the receive. */
static bool too_long(void) {
    enum { ROOM = 4096, LEN = 100000 };
    struct net net = {0};
    struct wire wire;
    void *sent = NULL, *received = NULL;
    DO(net_open(&net));
    DO(wire_open(&net, &wire, LEN));
    memset(wire.in.at, 0x5a, LEN);
    DO(irecv_until(&net, wire.receive, wire.in.at, ROOM, 1, wire.in.memory, &received));
    const uint64_t tries_until = now_ns() + patience_ns() / 10;
    const uint64_t until = now_ns() + 2 * patience_ns();
    int done = 0, result = 0, send_result = 0, send_done = 0, size = 0;
    while (!done && !result && !send_result) {
        if (!sent) {
            OK(net_isend(&net, wire.send, wire.out.at, LEN, 1, wire.out.memory, NULL, &sent));
            if (!sent && now_ns() > tries_until) break;
        } else if (!send_done) send_result = net_test(&net, sent, &send_done, NULL);
        result = net_test(&net, received, &done, &size);
        CHECK(now_ns() < until, "a message that is too long was taken, and never ends");
        rest();
    }
    CHECK(!done || size <= ROOM, "test says that %d bytes are in a receive of %d", size, ROOM);
    rest_ms(10);
    DO(bytes_are(wire.in.at + ROOM, LEN - ROOM, 0x5a, "behind a receive that was too short"));
    note("%s", result        ? "the receive fails"
               : send_result ? "the send fails"
               : done        ? "the part that fits"
                             : "isend refuses it");
    DO(wire_close(&wire));
    return net_shut(&net);
}

/* A comm whose receiver does nothing holds up no other. */
static bool independent(void) {
    struct net net = {0};
    struct ends stuck, ends;
    DO(net_open(&net));
    DO(both_ways(&net, &stuck, 32, 320));
    DO(both_ways(&net, &ends, 8, 300));
    bool progress;
    for (int i = 0; i < 500; i++) DO(stream_step(&stuck.stream[0], &progress));
    DO(streams_run(ends.stream, 4));
    DO(streams_run(stuck.stream, 4));
    DO(wire_close(&ends.there));
    DO(wire_close(&ends.back));
    DO(wire_close(&stuck.there));
    DO(wire_close(&stuck.back));
    return net_shut(&net);
}

/* The same mixed lengths between two processes, both ways at once. */
static bool duplex_rank(int rank, int ranks) {
    struct net net = {0};
    struct link links[2] = {{.from = rank, .to = 1 - rank, .key = "duplex"},
                            {.from = 1 - rank, .to = rank, .key = "duplex"}};
    struct buffer buffers[2] = {{0}};
    struct stream streams[2];
    CHECK(ranks == 2, "it has two ranks, not %d", ranks);
    DO(net_open(&net));
    DO(links_open(&net, rank, links, 2));
    for (int i = 0; i < 2; i++) {
        DO(buffer_open(&net, links[i].comm, &buffers[i], (size_t)32 * SLOT));
        streams[i] = (struct stream){
            .net = &net,
            .comm = links[i].comm,
            .memory = buffers[i].memory,
            .base = buffers[i].at,
            .sends = i == 0,
            .slot_bytes = SLOT,
            .window = 32,
            .messages = mixed(),
            .repeat_after = MIXED,
            .id_base = (uint64_t)links[i].from * 1000,
            .n = 3000,
        };
    }
    DO(streams_run(streams, 2));
    DO(buffer_close(&net, &buffers[0]));
    DO(buffer_close(&net, &buffers[1]));
    DO(meet("done", rank, ranks));
    OK(net_close_send(&net, links[0].comm));
    OK(net_close_receive(&net, links[1].comm));
    return net_shut(&net);
}

static bool duplex(void) { return ranks_run(2, duplex_rank, 0); }

const struct check transfer_checks[] = {
    {"sizes", sizes, 60, 0, EACH, "0 B to 4 MiB, receive first and send first, with room behind"},
    {"big", big, 60, 0, EACH, "64 MiB"},
    {"gigabyte", gigabyte, 120, 9, ONCE, "1 GiB"},
    {"in_order", in_order, 60, 0, EACH, "mixed lengths both ways, 8 outstanding, in order"},
    {"thirty_two", thirty_two, 60, 0, EACH, "32 outstanding each way"},
    {"one_by_one", one_by_one, 60, 0, EACH, "one outstanding"},
    {"tested_in_any_order", tested_in_any_order, 60, 0, EACH, "test on all that are outstanding"},
    {"lopsided", lopsided, 60, 0, EACH, "receives posted long before any send, and the reverse"},
    {"optional_completion", optional_completion, 60, 9, EACH, "irecv with *request = 0x1"},
    {"refused", refused, 90, 0, EACH, "the host tries one send in 50"},
    {"close_after_done", close_after_done, 60, 0, EACH, "closeSend right after test: nothing lost"},
    {"grouped", grouped, 60, 0, EACH, "grouped receives, up to maxRecvs, and tags"},
    {"flush", flush, 45, 0, EACH, "iflush, of nothing too"},
    {"many_messages", many_messages, 60, 0, EACH, "60000 messages in constant memory"},
    {"too_long", too_long, 45, 0, EACH, "a message longer than its receive"},
    {"independent", independent, 60, 0, EACH, "a receiver that does nothing holds up no other"},
    {"duplex", duplex, 60, 0, RANKS_2, "mixed lengths both ways between two processes"},
    {0}};
