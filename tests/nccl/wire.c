/* See wire.h. */
#define _GNU_SOURCE
#include "wire.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { UNTOUCHED = 0x5a, TAKEN_BACK = 0xee };

/* --- connections --- */

bool connect_until(struct net *net, void *handle, void **send) {
    const uint64_t until = now_ns() + 3 * patience_ns();
    for (*send = NULL;;) {
        OK(net_connect(net, setup.send_device, handle, send));
        if (*send) return true;
        CHECK(now_ns() < until, "connect gives no comm");
        rest();
    }
}

bool accept_until(struct net *net, void *listen, void **receive) {
    const uint64_t until = now_ns() + 3 * patience_ns();
    for (*receive = NULL;;) {
        OK(net_accept(net, listen, receive));
        if (*receive) return true;
        CHECK(now_ns() < until, "accept gives no comm");
        rest();
    }
}

bool join(struct net *net, void *handle, void *listen, void **send, void **receive) {
    const uint64_t until = now_ns() + 3 * patience_ns();
    *send = *receive = NULL;
    while (!*send || !*receive) {
        if (!*send) OK(net_connect(net, setup.send_device, handle, send));
        if (!*receive) OK(net_accept(net, listen, receive));
        CHECK(now_ns() < until, "no connection: connect %s a comm, accept %s",
              *send ? "gave" : "gives no", *receive ? "did" : "does not");
        if (!*send || !*receive) rest();
    }
    return true;
}

bool wire_open(struct net *net, struct wire *wire, size_t buffer_bytes) {
    uint8_t handle[HANDLE_BYTES] = {0};
    memset(wire, 0, sizeof *wire);
    wire->net = net;
    OK(net_listen(net, setup.listen_device, handle, &wire->listen));
    CHECK(wire->listen, "listen gives no comm");
    DO(join(net, handle, wire->listen, &wire->send, &wire->receive));
    if (buffer_bytes) {
        DO(buffer_open(net, wire->send, &wire->out, buffer_bytes));
        DO(buffer_open(net, wire->receive, &wire->in, buffer_bytes));
    }
    return true;
}

bool wire_close(struct wire *wire) {
    DO(buffer_close(wire->net, &wire->out));
    DO(buffer_close(wire->net, &wire->in));
    if (wire->send) OK(net_close_send(wire->net, wire->send));
    if (wire->receive) OK(net_close_receive(wire->net, wire->receive));
    if (wire->listen) OK(net_close_listen(wire->net, wire->listen));
    wire->send = wire->receive = wire->listen = NULL;
    return true;
}

bool links_open(struct net *net, int rank, struct link *links, int n) {
    for (int i = 0; i < n; i++) {
        if (links[i].to != rank) continue;
        OK(net_listen(net, setup.listen_device, links[i].handle, &links[i].listen));
        DO(tell(links[i].key, links[i].to * 64 + links[i].from, links[i].handle, HANDLE_BYTES));
    }
    /* A connection needs both sides to be polled: hear only when all of this rank's are told. */
    for (int i = 0; i < n; i++)
        if (links[i].from == rank)
            DO(hear(links[i].key, links[i].to * 64 + links[i].from, links[i].handle, HANDLE_BYTES));
    const uint64_t until = now_ns() + 3 * patience_ns();
    for (int open = 0; open < n;) {
        open = 0;
        for (int i = 0; i < n; i++) {
            if (!links[i].comm) {
                if (links[i].from == rank)
                    OK(net_connect(net, setup.send_device, links[i].handle, &links[i].comm));
                else OK(net_accept(net, links[i].listen, &links[i].comm));
            }
            open += links[i].comm != NULL;
        }
        CHECK(now_ns() < until, "%d of %d connections came about", open, n);
        if (open < n) rest();
    }
    for (int i = 0; i < n; i++)
        if (links[i].listen) {
            OK(net_close_listen(net, links[i].listen));
            links[i].listen = NULL;
        }
    return true;
}

bool buffer_open(struct net *net, void *comm, struct buffer *buffer, size_t len) {
    buffer->len = len;
    buffer->comm = comm;
    buffer->at = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(buffer->at != MAP_FAILED, "mmap of %zu bytes: %s", len, strerror(errno));
    buffer->mapped = true;
    OK(net_register(net, comm, buffer->at, len, POINTER_HOST, &buffer->memory));
    return true;
}

bool buffer_close(struct net *net, struct buffer *buffer) {
    if (!buffer->mapped) return true;
    OK(net_deregister(net, buffer->comm, buffer->memory));
    munmap(buffer->at, buffer->len);
    buffer->mapped = false;
    return true;
}

/* --- messages --- */

struct message stream_message(const struct stream *stream, long number) {
    const long period = stream->repeat_after ? stream->repeat_after : stream->n;
    struct message message = stream->messages[number % period];
    message.id += stream->id_base + ((uint64_t)(number / period) << 32);
    return message;
}

static bool post(struct stream *s, bool *progress) {
    const int slot = (int)(s->posted % s->window);
    const struct message m = stream_message(s, s->posted);
    uint8_t *at = s->base + (size_t)slot * s->slot_bytes;
    void *phandle = s->phandle ? s->phandle(s->posted) : NULL;
    CHECK((s->sends ? m.size : m.room) <= s->slot_bytes, "the case's slots are too small");
    void **request = &s->request[slot];
    if (s->sends) {
        pattern_fill(at, m.size, m.id, 0);
        *request = NULL;
        OK(net_isend(s->net, s->comm, at, m.size, m.tag, s->memory, phandle, request));
    } else {
        memset(at, UNTOUCHED, m.room);
        *request = s->optional ? OPTIONAL_COMPLETION : NULL;
        OK(net_irecv(s->net, s->comm, 1, (void *[]){at}, &m.room, &m.tag, &s->memory, &phandle,
                     request));
    }
    if (!*request) return true;
    s->finished[slot] = false;
    s->posted++;
    *progress = true;
    return true;
}

/* Slow only where a plugin says that an optional receive is done before the data are there. */
static bool await_data(const struct message *m, const uint8_t *at) {
    const uint64_t until = now_ns() + patience_ns();
    uint8_t expected[8];
    const size_t tail = m->size < 8 ? m->size : 8;
    const size_t from = (m->size - tail) & ~(size_t)7;
    pattern_fill(expected, m->size - from < 8 ? m->size - from : 8, m->id, from);
    while (m->size && memcmp(at + from, expected, m->size - from < 8 ? m->size - from : 8)) {
        CHECK(now_ns() < until, "the data of message %llu never came", (unsigned long long)m->id);
        rest();
    }
    return true;
}

static bool finish(struct stream *s, long number, int size) {
    const struct message m = stream_message(s, number);
    uint8_t *at = s->base + (size_t)(number % s->window) * s->slot_bytes;
    if (s->sends) {
        CHECK(size == (int)m.size || size == -1 || (size == 0 && m.size >> 31),
              "test says that %d bytes were sent of message %llu of %zu", size,
              (unsigned long long)m.id, m.size);
        /* The host's again: a plugin that still reads it sends something else. */
        memset(at, TAKEN_BACK, m.size);
        return true;
    }
    if (s->optional) return await_data(&m, at) && pattern_is(at, m.size, m.id, 0, "received");
    CHECK(size == (int)m.size, "test says that %d bytes were received of message %llu of %zu",
          size, (unsigned long long)m.id, m.size);
    DO(pattern_is(at, m.size, m.id, 0, "received"));
    return bytes_are(at + m.size, m.room - m.size, UNTOUCHED, "behind a received message");
}

static bool try_finish(struct stream *s, long number, bool *progress) {
    const int slot = (int)(number % s->window);
    int done = 0;
    int sizes[GROUP_MAX + 1];
    for (int i = 0; i <= GROUP_MAX; i++) sizes[i] = -1;
    OK(net_test(s->net, s->request[slot], &done, sizes));
    if (!done) return true;
    for (int i = 1; i <= GROUP_MAX; i++)
        CHECK(sizes[i] == -1, "test wrote size %d of a request for one message", i);
    DO(finish(s, number, sizes[0]));
    s->finished[slot] = true;
    s->request[slot] = NULL;
    *progress = true;
    return true;
}

bool stream_step(struct stream *s, bool *progress) {
    for (int i = 0; i < s->window && s->posted < s->n && s->posted - s->done < s->window; i++) {
        const long before = s->posted;
        DO(post(s, progress));
        if (s->posted == before) break;
    }
    const long last = s->any_order ? s->posted : s->done + 1;
    for (long number = s->done; number < last && number < s->posted; number++)
        if (!s->finished[number % s->window]) DO(try_finish(s, number, progress));
    while (s->done < s->posted && s->finished[s->done % s->window]) s->done++;
    return true;
}

bool streams_run(struct stream *streams, int n) {
    uint64_t last = now_ns();
    for (int done = 0; done < n;) {
        bool progress = false;
        done = 0;
        for (int i = 0; i < n; i++) {
            if (streams[i].done < streams[i].n) DO(stream_step(&streams[i], &progress));
            done += streams[i].done == streams[i].n;
        }
        if (progress) last = now_ns();
        else {
            for (int i = 0; i < n && now_ns() - last > 2 * patience_ns(); i++)
                CHECK(streams[i].done == streams[i].n,
                      "nothing moves any more: a %s is at %ld done, %ld posted of %ld",
                      streams[i].sends ? "sender" : "receiver", streams[i].done,
                      streams[i].posted, streams[i].n);
            rest();
        }
    }
    return true;
}

bool until_done(struct net *net, void *request, int *sizes) {
    const uint64_t until = now_ns() + 3 * patience_ns();
    for (int done = 0;;) {
        OK(net_test(net, request, &done, sizes));
        if (done) return true;
        CHECK(now_ns() < until, "a request is never done");
        rest();
    }
}

bool isend_until(struct net *net, void *comm, void *data, size_t size, int tag, void *memory,
                 void **request) {
    const uint64_t until = now_ns() + patience_ns() * 3 / 2;
    for (*request = NULL; !*request; rest()) {
        OK(net_isend(net, comm, data, size, tag, memory, NULL, request));
        CHECK(*request || now_ns() < until, "isend never takes a message");
        if (*request) break;
    }
    return true;
}

bool irecv_until(struct net *net, void *comm, void *data, size_t size, int tag, void *memory,
                 void **request) {
    const uint64_t until = now_ns() + patience_ns() * 3 / 2;
    for (*request = NULL; !*request; rest()) {
        OK(net_irecv(net, comm, 1, &data, &size, &tag, &memory, NULL, request));
        CHECK(*request || now_ns() < until, "irecv never takes a receive");
        if (*request) break;
    }
    return true;
}

/* With no receive there: a plugin takes the message, and may even be done with it, or refuses it
 * until there is a receive, as NCCL's own for InfiniBand does. Neither may block. */
static bool send_ahead(struct wire *w, size_t size, void **sent, int *sent_size) {
    for (int i = 0; i < 200; i++) {
        int done = 0;
        if (!*sent) {
            OK(net_isend(w->net, w->send, w->out.at, size, 5, w->out.memory, NULL, sent));
            continue;
        }
        OK(net_test(w->net, *sent, &done, sent_size));
        if (!done) continue;
        *sent = NULL;
        if (*sent_size < 0) *sent_size = (int)size; /* it need not say */
        memset(w->out.at, TAKEN_BACK, size);
        return true;
    }
    return true;
}

bool one_message(struct wire *w, size_t size, size_t room, uint64_t id, bool receive_first) {
    void *sent = NULL, *received = NULL;
    int sent_size = -1, received_size = -1;
    pattern_fill(w->out.at, size, id, 0);
    memset(w->in.at, UNTOUCHED, room);
    if (receive_first)
        DO(irecv_until(w->net, w->receive, w->in.at, room, 5, w->in.memory, &received));
    else DO(send_ahead(w, size, &sent, &sent_size));
    if (!receive_first)
        DO(irecv_until(w->net, w->receive, w->in.at, room, 5, w->in.memory, &received));
    if (!sent && sent_size < 0)
        DO(isend_until(w->net, w->send, w->out.at, size, 5, w->out.memory, &sent));
    const uint64_t until = now_ns() + 6 * patience_ns();
    while (sent || received) {
        int done = 0;
        if (sent) {
            OK(net_test(w->net, sent, &done, &sent_size));
            if (done) {
                sent = NULL;
                memset(w->out.at, TAKEN_BACK, size);
            }
        }
        done = 0;
        if (received) {
            OK(net_test(w->net, received, &done, &received_size));
            if (done) received = NULL;
        }
        CHECK(now_ns() < until, "a message of %zu bytes is never done (%s)", size,
              received ? "receive" : "send");
    }
    CHECK(received_size == (int)size, "received %d of %zu bytes", received_size, size);
    DO(pattern_is(w->in.at, size, id, 0, "received"));
    return bytes_are(w->in.at + size, room - size, UNTOUCHED, "behind a received message");
}
