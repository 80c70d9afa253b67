/* Connections: order of calls, many at once, handles of other plugins, connections of other programs. */
#define _GNU_SOURCE
#include "wire.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

/* One thread calls connect before any accept, and accept before any connect is complete. A call that
 * waited for the other side would never return. */
static bool connect_first(void) {
    struct net net = {0};
    uint8_t handle[HANDLE_BYTES] = {0};
    void *listen = NULL, *send = NULL, *receive = NULL;
    DO(net_open(&net));
    OK(net_listen(&net, setup.listen_device, handle, &listen));
    for (int i = 0; i < 1000 && !send; i++) OK(net_connect(&net, setup.send_device, handle, &send));
    if (!send) DO(join(&net, handle, listen, &send, &receive));
    else DO(accept_until(&net, listen, &receive));
    struct wire wire = {.net = &net, .listen = listen, .send = send, .receive = receive};
    DO(buffer_open(&net, send, &wire.out, 65536));
    DO(buffer_open(&net, receive, &wire.in, 65536));
    DO(one_message(&wire, 65536, 65536, 1, true));
    DO(wire_close(&wire));
    return net_shut(&net);
}

static bool accept_first(void) {
    struct net net = {0};
    uint8_t handle[HANDLE_BYTES] = {0};
    void *listen = NULL, *send = NULL, *receive = NULL;
    DO(net_open(&net));
    OK(net_listen(&net, setup.listen_device, handle, &listen));
    for (int i = 0; i < 1000; i++) {
        OK(net_accept(&net, listen, &receive));
        CHECK(!receive, "accept gives a comm though nobody connected");
    }
    DO(join(&net, handle, listen, &send, &receive));
    struct wire wire = {.net = &net, .listen = listen, .send = send, .receive = receive};
    DO(buffer_open(&net, send, &wire.out, 65536));
    DO(buffer_open(&net, receive, &wire.in, 65536));
    DO(one_message(&wire, 65536, 65536, 1, false));
    DO(wire_close(&wire));
    return net_shut(&net);
}

/* NCCL passes the listen comm's handle once and closes the listener before the first message. */
static bool listener_closed(void) {
    struct net net = {0};
    struct wire wire;
    DO(net_open(&net));
    DO(wire_open(&net, &wire, 65536));
    OK(net_close_listen(&net, wire.listen));
    wire.listen = NULL;
    for (uint64_t id = 0; id < 10; id++) DO(one_message(&wire, 6000 * id, 65536, id, id % 2));
    DO(wire_close(&wire));
    /* One that nobody ever connected to, and one with a connect under way. */
    uint8_t handle[HANDLE_BYTES] = {0};
    void *listen = NULL, *send = NULL;
    OK(net_listen(&net, setup.listen_device, handle, &listen));
    OK(net_close_listen(&net, listen));
    OK(net_listen(&net, setup.listen_device, handle, &listen));
    for (int i = 0; i < 50 && !send; i++) OK(net_connect(&net, setup.send_device, handle, &send));
    OK(net_close_listen(&net, listen));
    if (send) OK(net_close_send(&net, send));
    return net_shut(&net);
}

enum { LISTENERS = 4, PAIRS = 64 };

/* All connects at once over a few listeners, polled in turns; then each comm carries a number that
 * says which connect it came from, so that it is known that ends are paired one to one. */
static bool storm(void) {
    struct net net = {0};
    uint8_t handles[LISTENERS][HANDLE_BYTES] = {{0}}, copies[PAIRS][HANDLE_BYTES];
    void *listens[LISTENERS], *sends[PAIRS] = {NULL}, *receives[PAIRS] = {NULL};
    DO(net_open(&net));
    for (int i = 0; i < LISTENERS; i++)
        OK(net_listen(&net, setup.listen_device, handles[i], &listens[i]));
    /* NCCL gives each connect a handle of its own, in which a plugin may keep state. */
    for (int i = 0; i < PAIRS; i++) memcpy(copies[i], handles[i % LISTENERS], HANDLE_BYTES);
    const uint64_t until = now_ns() + 3 * patience_ns();
    for (int open = 0; open < 2 * PAIRS;) {
        open = 0;
        for (int i = 0; i < PAIRS; i++) {
            const int j = PAIRS - 1 - i;
            if (!sends[i]) OK(net_connect(&net, setup.send_device, copies[i], &sends[i]));
            if (!receives[j]) OK(net_accept(&net, listens[j % LISTENERS], &receives[j]));
        }
        for (int i = 0; i < PAIRS; i++) open += (sends[i] != NULL) + (receives[i] != NULL);
        CHECK(now_ns() < until, "%d of %d ends came about", open, 2 * PAIRS);
        if (open < 2 * PAIRS) rest();
    }
    static uint64_t out[PAIRS], in[PAIRS];
    void *out_memory[PAIRS], *in_memory[PAIRS], *sent[PAIRS], *received[PAIRS];
    bool from[PAIRS] = {false};
    for (int i = 0; i < PAIRS; i++) {
        out[i] = (uint64_t)i;
        in[i] = UINT64_MAX;
        OK(net_register(&net, sends[i], &out[i], 8, POINTER_HOST, &out_memory[i]));
        OK(net_register(&net, receives[i], &in[i], 8, POINTER_HOST, &in_memory[i]));
        DO(irecv_until(&net, receives[i], &in[i], 8, 1, in_memory[i], &received[i]));
    }
    for (int i = 0; i < PAIRS; i++)
        DO(isend_until(&net, sends[i], &out[i], 8, 1, out_memory[i], &sent[i]));
    for (int left = 2 * PAIRS; left;) {
        const int before = left;
        for (int i = 0; i < PAIRS; i++) {
            int done = 0;
            if (sent[i]) OK(net_test(&net, sent[i], &done, NULL));
            if (done) sent[i] = NULL, left--;
            done = 0;
            if (received[i]) OK(net_test(&net, received[i], &done, NULL));
            if (done) received[i] = NULL, left--;
        }
        CHECK(now_ns() < until + 3 * patience_ns(), "%d messages are never done", left);
        if (before == left) rest();
    }
    for (int i = 0; i < PAIRS; i++) {
        CHECK(in[i] < PAIRS && !from[in[i]], "receiver %d got %llu", i, (unsigned long long)in[i]);
        CHECK(in[i] % LISTENERS == (uint64_t)i % LISTENERS,
              "sender %llu arrived at another listener", (unsigned long long)in[i]);
        from[in[i]] = true;
    }
    for (int i = 0; i < PAIRS; i++) {
        OK(net_deregister(&net, sends[i], out_memory[i]));
        OK(net_deregister(&net, receives[i], in_memory[i]));
        OK(net_close_send(&net, sends[i]));
        OK(net_close_receive(&net, receives[i]));
    }
    for (int i = 0; i < LISTENERS; i++) OK(net_close_listen(&net, listens[i]));
    return net_shut(&net);
}

/* Connects until there is an error (what must come), a comm, or no more patience. */
static bool connect_fails(struct net *net, const void *bytes, const char *what) {
    uint8_t handle[HANDLE_BYTES];
    memcpy(handle, bytes, HANDLE_BYTES);
    void *send = NULL;
    log_forget();
    const uint64_t until = now_ns() + 2 * patience_ns();
    while (net_connect(net, setup.send_device, handle, &send) == RESULT_OK) {
        CHECK(!send, "connect to %s gives a comm", what);
        CHECK(now_ns() < until, "connect to %s neither fails nor ends", what);
        rest();
    }
    CHECK(*logged(), "connect to %s fails without a line in the log", what);
    return true;
}

/* A plugin that is present on one node only gets the handles of another transport. */
static bool foreign_handles(void) {
    struct net net = {0};
    DO(net_open(&net));
    uint8_t handle[HANDLE_BYTES] = {0};
    DO(connect_fails(&net, handle, "a handle of zeros"));
    memset(handle, 0xff, sizeof handle);
    DO(connect_fails(&net, handle, "a handle of ones"));
    for (uint64_t seed = 0; seed < 200; seed++) {
        pattern_fill(handle, sizeof handle, seed, 0);
        DO(connect_fails(&net, handle, "a random handle"));
    }
    /* What NCCL's socket transport puts into its: a sockaddr (with somebody listening at it), 28
     * bytes of room for it, a magic number, the counts of sockets and threads. */
    const int door = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    CHECK(door >= 0 && bind(door, (struct sockaddr *)&at, len) == 0 && listen(door, 8) == 0 &&
              getsockname(door, (struct sockaddr *)&at, &len) == 0,
          "a listening socket: %s", strerror(errno));
    const uint64_t magic = 0x564ab9f2fc4b9d6cULL;
    const int counts[2] = {2, 1};
    memset(handle, 0, sizeof handle);
    memcpy(handle, &at, sizeof at);
    memcpy(handle + 32, &magic, sizeof magic);
    memcpy(handle + 40, counts, sizeof counts);
    DO(connect_fails(&net, handle, "the handle of NCCL's socket transport"));
    close(door);
    /* A cut one of its own: nothing behind the first 8 bytes. */
    void *listen = NULL;
    memset(handle, 0, sizeof handle);
    OK(net_listen(&net, setup.listen_device, handle, &listen));
    memset(handle + 8, 0, sizeof handle - 8);
    DO(connect_fails(&net, handle, "a handle of its own with nothing in it"));
    OK(net_close_listen(&net, listen));

    struct wire wire;
    DO(wire_open(&net, &wire, 4096));
    DO(one_message(&wire, 4096, 4096, 1, true));
    DO(wire_close(&wire));
    return net_shut(&net);
}

/* The TCP sockets that this process listens at, which are not in `before`. */
static int listening(struct sockaddr_storage *found, int room, const bool *before, bool *now) {
    int n = 0;
    for (int fd = 0; fd < 1024; fd++) {
        int yes = 0;
        socklen_t len = sizeof yes;
        struct sockaddr_storage at;
        if (now) now[fd] = false;
        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &yes, &len) || !yes) continue;
        len = sizeof at;
        if (getsockname(fd, (struct sockaddr *)&at, &len)) continue;
        if (at.ss_family != AF_INET && at.ss_family != AF_INET6) continue;
        if (now) now[fd] = true;
        if (before && !before[fd] && n < room) found[n++] = at;
    }
    return n;
}

static int stranger(const struct sockaddr_storage *at, const void *bytes, size_t len) {
    struct sockaddr_storage to = *at;
    if (to.ss_family == AF_INET) {
        struct sockaddr_in *v4 = (void *)&to;
        if (!v4->sin_addr.s_addr) v4->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    } else {
        struct sockaddr_in6 *v6 = (void *)&to;
        if (IN6_IS_ADDR_UNSPECIFIED(&v6->sin6_addr)) v6->sin6_addr = in6addr_loopback;
    }
    const int fd = socket(to.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const socklen_t size = to.ss_family == AF_INET ? sizeof(struct sockaddr_in)
                                                   : sizeof(struct sockaddr_in6);
    if (fd < 0 || connect(fd, (struct sockaddr *)&to, size)) {
        if (fd >= 0) close(fd);
        return -1;
    }
    if (len && send(fd, bytes, len, MSG_NOSIGNAL) < 0) { /* it may close on us: also an answer */
    }
    return fd;
}

/* Port scanners, health checks, a peer that dies in its handshake: each listener gets a few of
 * those, before and between real peers. */
static bool strangers(void) {
    struct net net = {0};
    static bool before[1024];
    struct sockaddr_storage doors[8];
    DO(net_open(&net));
    listening(NULL, 0, NULL, before);
    uint8_t handle[HANDLE_BYTES] = {0}, garbage[4096];
    void *listen = NULL;
    OK(net_listen(&net, setup.listen_device, handle, &listen));
    const int n = listening(doors, 8, before, NULL);
    if (n == 0) {
        OK(net_close_listen(&net, listen));
        DO(net_shut(&net));
        return skip("listen opens no TCP port");
    }
    pattern_fill(garbage, sizeof garbage, 99, 0);
    int open[64], opened = 0;
    struct wire wires[3];
    for (int round = 0; round < 3; round++) {
        for (int d = 0; d < n; d++) {
            const struct linger at_once = {.l_onoff = 1};
            const int reset = stranger(&doors[d], NULL, 0);
            CHECK(reset >= 0, "connecting to the listener: %s", strerror(errno));
            setsockopt(reset, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
            close(reset); /* a reset */
            const int ended = stranger(&doors[d], NULL, 0);
            if (ended >= 0) close(ended); /* an end */
            const int cut = stranger(&doors[d], garbage, 3);
            if (cut >= 0) close(cut);
            open[opened++] = stranger(&doors[d], NULL, 0);               /* says nothing */
            open[opened++] = stranger(&doors[d], garbage, 5);            /* stops early */
            open[opened++] = stranger(&doors[d], garbage, sizeof garbage); /* talks nonsense */
            open[opened++] = stranger(&doors[d], "GET / HTTP/1.1\r\n\r\n", 18);
        }
        void *receive = NULL;
        for (int i = 0; i < 300; i++) {
            OK(net_accept(&net, listen, &receive));
            CHECK(!receive, "accept gives a comm for a stranger");
            rest();
        }
        struct wire *w = &wires[round];
        uint8_t copy[HANDLE_BYTES];
        memcpy(copy, handle, sizeof copy);
        *w = (struct wire){.net = &net};
        DO(join(&net, copy, listen, &w->send, &w->receive));
        DO(buffer_open(&net, w->send, &w->out, 65536));
        DO(buffer_open(&net, w->receive, &w->in, 65536));
        DO(one_message(w, 65536, 65536, (uint64_t)round, true));
    }
    for (int i = 0; i < opened; i++)
        if (open[i] >= 0) close(open[i]);
    for (int round = 0; round < 3; round++) DO(wire_close(&wires[round]));
    OK(net_close_listen(&net, listen));
    note("%d strangers at %d ports", 3 * n * 7, n);
    return net_shut(&net);
}

/* No file descriptors left: an error of listen, connect, accept or init, and all is well again when
 * there are. */
static bool no_files(void) {
    struct net net = {0};
    struct rlimit limit, tight;
    DO(net_open(&net));
    struct wire before, after;
    DO(wire_open(&net, &before, 65536));
    CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0, "getrlimit: %s", strerror(errno));
    int failures = 0;
    for (int spare = 0; spare < 6; spare++) {
        int last = open("/dev/null", O_RDONLY | O_CLOEXEC); /* the lowest that is free */
        CHECK(last >= 0, "open: %s", strerror(errno));
        close(last);
        tight = limit;
        tight.rlim_cur = (rlim_t)(last + spare);
        CHECK(setrlimit(RLIMIT_NOFILE, &tight) == 0, "setrlimit: %s", strerror(errno));
        uint8_t handle[HANDLE_BYTES] = {0};
        void *listen = NULL, *send = NULL, *receive = NULL;
        int result = net_listen(&net, setup.listen_device, handle, &listen);
        CHECK(result || listen, "listen succeeds without a comm");
        for (int i = 0; i < 3000 && !result && (!send || !receive); i++) {
            if (!send) result = net_connect(&net, setup.send_device, handle, &send);
            /* An accept for which there is no descriptor may fail, or wait for one. */
            if (!result && !receive) result = net_accept(&net, listen, &receive);
            if (i % 100 == 99) rest();
        }
        failures += result != RESULT_OK || !send || !receive;
        CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0, "setrlimit: %s", strerror(errno));
        if (send) OK(net_close_send(&net, send));
        if (receive) OK(net_close_receive(&net, receive));
        if (listen) OK(net_close_listen(&net, listen));
        DO(one_message(&before, 65536, 65536, (uint64_t)spare, true));
    }
    CHECK(failures, "a connection came about without a file descriptor");
    DO(wire_open(&net, &after, 65536));
    DO(one_message(&after, 65536, 65536, 9, true));
    DO(wire_close(&after));
    DO(wire_close(&before));
    return net_shut(&net);
}

const struct check connect_checks[] = {
    {"connect_first", connect_first, 45, 0, EACH, "connect does not wait for accept"},
    {"accept_first", accept_first, 45, 0, EACH, "accept does not wait for connect"},
    {"listener_closed", listener_closed, 45, 0, EACH, "a listener closed before the first message"},
    {"storm", storm, 60, 0, EACH, "64 pairs at once over 4 listeners, paired one to one"},
    {"foreign_handles", foreign_handles, 60, 0, EACH, "handles of something else: connect fails"},
    {"no_files", no_files, 60, 0, EACH, "out of file descriptors: errors, and then none"},
    {"strangers", strangers, 60, 0, EACH, "strangers at the listener; real peers get through"},
    {0}};
