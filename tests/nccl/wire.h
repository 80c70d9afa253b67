/* Connections and messages on them: what NCCL's proxy does with a plugin, with every byte checked. */
#ifndef LAXITY_TESTS_NCCL_WIRE_H
#define LAXITY_TESTS_NCCL_WIRE_H

#include "check.h"

/* Memory and its registration with one comm. */
struct buffer {
    uint8_t *at;
    size_t len;
    void *comm, *memory;
    bool mapped;
};

/* A connection whose two ends are both in this process. */
struct wire {
    struct net *net;
    void *listen, *send, *receive;
    struct buffer out, in; /* registered with send and with receive */
};

bool wire_open(struct net *net, struct wire *wire, size_t buffer_bytes);
bool wire_close(struct wire *wire);

/* connect and accept as NCCL calls them: again and again until there is a comm. */
bool connect_until(struct net *net, void *handle, void **send);
bool accept_until(struct net *net, void *listen, void **receive);
/* Both at once, for ends in one process. */
bool join(struct net *net, void *handle, void *listen, void **send, void **receive);

/* Connections of ranks: rank `from` sends to rank `to`; each tells the other by `key`. Call it on
 * both ranks; a rank may open many at once with links_open, which polls all. */
struct link {
    int from, to;
    const char *key;
    void *comm; /* this rank's end */
    void *listen;
    uint8_t handle[HANDLE_BYTES];
    bool heard;
};
bool links_open(struct net *net, int rank, struct link *links, int n);

bool buffer_open(struct net *net, void *comm, struct buffer *buffer, size_t len);
bool buffer_close(struct net *net, struct buffer *buffer);

/* One message: its bytes are the pattern of `id`; `room` is what the receive offers. */
struct message {
    size_t size, room;
    uint64_t id;
    int tag;
};

/* One side of a comm and the messages that go over it, in order. */
struct stream {
    struct net *net;
    void *comm, *memory;
    bool sends;
    uint8_t *base;  /* window slots of slot_bytes each */
    size_t slot_bytes;
    int window;
    bool any_order; /* test all that are outstanding, not only the oldest */
    bool optional;  /* irecv's *request comes in as 0x1; data are awaited */
    const struct message *messages;
    long n; /* of messages; they repeat from `repeat_after` on */
    long repeat_after;
    uint64_t id_base; /* added to each id */
    void *(*phandle)(long posted);
    long posted, done;
    void *request[REQUESTS_MAX];
    bool finished[REQUESTS_MAX];
};
bool stream_step(struct stream *stream, bool *progress);
/* Steps all until all are done; gives up when nothing at all happens for the patience. */
bool streams_run(struct stream *streams, int n);
struct message stream_message(const struct stream *stream, long number);

/* One message over a wire, posted in the given order, checked. */
bool one_message(struct wire *wire, size_t size, size_t room, uint64_t id, bool receive_first);
bool until_done(struct net *net, void *request, int *sizes);
/* Posts until the plugin takes it. */
bool isend_until(struct net *net, void *comm, void *data, size_t size, int tag, void *memory,
                 void **request);
bool irecv_until(struct net *net, void *comm, void *data, size_t size, int tag, void *memory,
                 void **request);

#endif
