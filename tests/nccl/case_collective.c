/* Collectives in host memory, pipelined as NCCL's proxy does it: each channel has a ring (or a comm
 * to each peer), each comm eight slots, and a send of a step waits for the receive it builds on. */
#define _GNU_SOURCE
#include "wire.h"

#include <stdio.h>
#include <stdlib.h>

enum { CHANNELS = 3, CHUNK = 24 << 10, RANKS_MAX = 8 };

/* Elements of a channel; odd, so that the last chunks are short or empty. */
enum { ELEMENTS = 100003 };

struct ring {
    struct net *net;
    int rank, ranks;
    struct link links[2]; /* to the next, from the one before */
    struct buffer out, in;
    float *data;
    long steps; /* of all blocks: each block is 2 (ranks - 1) */
    long posted, received, sent, done;
    void *send_request[PROXY_STEPS], *receive_request[PROXY_STEPS];
    size_t slot_bytes[PROXY_STEPS];
};

/* A float sum is exact while the numbers are small and whole. */
static float input(int rank, int channel, long i) {
    return (float)((rank + 1) * (int)((i * 7 + channel * 13) % 61) - (int)(i % 17));
}

static long block_elements(const struct ring *ring) { return CHUNK / 4 * (long)ring->ranks; }

/* Which elements step `step` moves when the chunk is `chunk` of the step's block. */
static void extent(const struct ring *ring, long step, int chunk, long *from, long *count) {
    const long block = step / (2 * (ring->ranks - 1));
    *from = block * block_elements(ring) + (long)chunk * (CHUNK / 4);
    *count = ELEMENTS - *from;
    if (*count > CHUNK / 4) *count = CHUNK / 4;
    if (*count < 0) *count = 0;
}

static int chunk_of(const struct ring *ring, long step, int back) {
    const int in_block = (int)(step % (2 * (ring->ranks - 1)));
    return ((ring->rank - in_block - back) % ring->ranks + 2 * ring->ranks) % ring->ranks;
}

static bool ring_step(struct ring *r, bool *progress) {
    long from, count;
    if (r->posted < r->steps && r->posted - r->received < PROXY_STEPS) {
        const int slot = (int)(r->posted % PROXY_STEPS), tag = 3;
        const size_t room = CHUNK;
        void *at = r->in.at + (size_t)slot * CHUNK;
        r->receive_request[slot] = NULL;
        OK(net_irecv(r->net, r->links[1].comm, 1, &at, &room, &tag, &r->in.memory, NULL,
                     &r->receive_request[slot]));
        if (r->receive_request[slot]) r->posted++, *progress = true;
    }
    if (r->received < r->posted) {
        const int slot = (int)(r->received % PROXY_STEPS);
        int done = 0, size = -1;
        OK(net_test(r->net, r->receive_request[slot], &done, &size));
        if (done) {
            extent(r, r->received, chunk_of(r, r->received, 1), &from, &count);
            CHECK(size == count * 4, "step %ld: %d bytes, not %ld", r->received, size, count * 4);
            const float *in = (const float *)(r->in.at + (size_t)slot * CHUNK);
            const bool reduces = r->received % (2 * (r->ranks - 1)) < r->ranks - 1;
            for (long i = 0; i < count; i++) {
                if (reduces) r->data[from + i] += in[i];
                else r->data[from + i] = in[i];
            }
            r->received++;
            *progress = true;
        }
    }
    const bool first = r->sent % (2 * (r->ranks - 1)) == 0;
    if (r->sent < r->steps && r->sent - r->done < PROXY_STEPS &&
        (first || r->received >= r->sent)) {
        const int slot = (int)(r->sent % PROXY_STEPS);
        extent(r, r->sent, chunk_of(r, r->sent, 0), &from, &count);
        uint8_t *at = r->out.at + (size_t)slot * CHUNK;
        memcpy(at, r->data + (count ? from : 0), (size_t)count * 4);
        struct net_attributes attributes = {
            .send = {r->ranks, 1, 1, 1}, .receive = {r->ranks, 1, 1, 1}, .op = 1, .algo = 1,
            .proto = 1};
        OK(net_set_attributes(r->net, &attributes));
        r->send_request[slot] = NULL;
        OK(net_isend(r->net, r->links[0].comm, at, (size_t)count * 4, 3, r->out.memory, NULL,
                     &r->send_request[slot]));
        if (r->send_request[slot]) r->sent++, *progress = true;
    }
    if (r->done < r->sent) {
        int done = 0;
        OK(net_test(r->net, r->send_request[r->done % PROXY_STEPS], &done, NULL));
        if (done) r->done++, *progress = true;
    }
    return true;
}

static bool stuck(uint64_t last, const char *what, long at, long of) {
    CHECK(now_ns() - last < 2 * patience_ns(), "nothing moves any more: %s at %ld of %ld", what, at,
          of);
    rest();
    return true;
}

static bool all_reduce_rounds(int rank, int ranks, unsigned refuse_of, int rounds) {
    struct net net = {.refuse_of = refuse_of};
    static struct ring rings[CHANNELS];
    static const char *const keys[CHANNELS] = {"ring0", "ring1", "ring2"};
    static struct link links[2 * CHANNELS];
    CHECK(ranks >= 2 && ranks <= RANKS_MAX, "2 to %d ranks", RANKS_MAX);
    DO(net_open(&net));
    for (int c = 0; c < CHANNELS; c++) {
        links[2 * c] = (struct link){.from = rank, .to = (rank + 1) % ranks, .key = keys[c]};
        links[2 * c + 1] =
            (struct link){.from = (rank + ranks - 1) % ranks, .to = rank, .key = keys[c]};
    }
    DO(links_open(&net, rank, links, 2 * CHANNELS));
    for (int c = 0; c < CHANNELS; c++) {
        rings[c] = (struct ring){.net = &net, .rank = rank, .ranks = ranks};
        memcpy(rings[c].links, links + 2 * c, sizeof rings[c].links);
        DO(buffer_open(&net, links[2 * c].comm, &rings[c].out, PROXY_STEPS * CHUNK));
        DO(buffer_open(&net, links[2 * c + 1].comm, &rings[c].in, PROXY_STEPS * CHUNK));
        rings[c].data = malloc(ELEMENTS * sizeof(float));
        CHECK(rings[c].data, "no memory");
    }
    for (int round = 0; round < rounds; round++) {
        for (int c = 0; c < CHANNELS; c++) {
            struct ring *r = &rings[c];
            const long blocks = (ELEMENTS + block_elements(r) - 1) / block_elements(r);
            r->steps = blocks * 2 * (ranks - 1);
            r->posted = r->received = r->sent = r->done = 0;
            for (long i = 0; i < ELEMENTS; i++) r->data[i] = input(rank, c + round, i);
        }
        uint64_t last = now_ns();
        for (int ended = 0; ended < CHANNELS;) {
            bool progress = false;
            ended = 0;
            for (int c = 0; c < CHANNELS; c++) {
                struct ring *r = &rings[c];
                DO(ring_step(r, &progress));
                ended += r->received == r->steps && r->done == r->steps;
            }
            if (progress) last = now_ns();
            else DO(stuck(last, "all-reduce", rings[0].received, rings[0].steps));
        }
        for (int c = 0; c < CHANNELS; c++)
            for (long i = 0; i < ELEMENTS; i++) {
                float sum = 0;
                for (int other = 0; other < ranks; other++) sum += input(other, c + round, i);
                CHECK(rings[c].data[i] == sum, "round %d, channel %d, element %ld: %f, not %f",
                      round, c, i, (double)rings[c].data[i], (double)sum);
            }
    }
    DO(meet("summed", rank, ranks));
    for (int c = 0; c < CHANNELS; c++) {
        DO(buffer_close(&net, &rings[c].out));
        DO(buffer_close(&net, &rings[c].in));
        OK(net_close_send(&net, rings[c].links[0].comm));
        OK(net_close_receive(&net, rings[c].links[1].comm));
        free(rings[c].data);
    }
    return net_shut(&net);
}

static bool all_reduce_rank(int rank, int ranks) { return all_reduce_rounds(rank, ranks, 0, 3); }
static bool all_reduce_refused_rank(int rank, int ranks) {
    return all_reduce_rounds(rank, ranks, 50, 1);
}

/* All-to-all with uneven parts, some empty, as experts have them: each pair has a comm each way,
 * over which its part goes in slots. */
static bool all_to_all_rank(int rank, int ranks) {
    enum { SLOTS = 8, ROUNDS = 3 };
    struct net net = {0};
    static struct link links[2 * RANKS_MAX];
    static struct buffer buffers[2 * RANKS_MAX];
    static struct stream streams[2 * RANKS_MAX];
    static struct message messages[2 * RANKS_MAX][64];
    CHECK(ranks >= 2 && ranks <= RANKS_MAX, "2 to %d ranks", RANKS_MAX);
    int n = 0;
    for (int other = 0; other < ranks; other++) {
        if (other == rank) continue;
        links[n++] = (struct link){.from = rank, .to = other, .key = "a2a"};
        links[n++] = (struct link){.from = other, .to = rank, .key = "a2a"};
    }
    DO(net_open(&net));
    DO(links_open(&net, rank, links, n));
    for (int i = 0; i < n; i++) DO(buffer_open(&net, links[i].comm, &buffers[i], SLOTS * CHUNK));
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < n; i++) {
            const int from = links[i].from, to = links[i].to;
            /* 0, or up to 50 slots, the last one cut. */
            const size_t part = (from + 2 * to + round) % 5 == 0
                                    ? 0
                                    : (size_t)((from * 37 + to * 11 + round * 7) % 50) * CHUNK +
                                          (size_t)(from * 100 + to);
            int count = 0;
            for (size_t at = 0; at < part || count == 0; at += CHUNK)
                messages[i][count++] = (struct message){
                    .size = part - at < CHUNK ? part - at : CHUNK,
                    .room = CHUNK,
                    .id = (uint64_t)(((round * 16 + from) * 16 + to) * 64 + count),
                };
            streams[i] = (struct stream){
                .net = &net,
                .comm = links[i].comm,
                .memory = buffers[i].memory,
                .base = buffers[i].at,
                .sends = from == rank,
                .slot_bytes = CHUNK,
                .window = SLOTS,
                .messages = messages[i],
                .n = count,
            };
        }
        DO(streams_run(streams, n));
    }
    DO(meet("exchanged", rank, ranks));
    for (int i = 0; i < n; i++) {
        DO(buffer_close(&net, &buffers[i]));
        if (links[i].from == rank) OK(net_close_send(&net, links[i].comm));
        else OK(net_close_receive(&net, links[i].comm));
    }
    return net_shut(&net);
}

#define PART(name, part, n)                                                                      \
    static bool name(void) { return ranks_run(n, part, 0); }
PART(all_reduce_2, all_reduce_rank, 2)
PART(all_reduce_4, all_reduce_rank, 4)
PART(all_reduce_8, all_reduce_rank, 8)
PART(all_reduce_refused, all_reduce_refused_rank, 2)
PART(all_to_all_2, all_to_all_rank, 2)
PART(all_to_all_4, all_to_all_rank, 4)
PART(all_to_all_8, all_to_all_rank, 8)

const struct check collective_checks[] = {
    {"all_reduce_2", all_reduce_2, 90, 0, RANKS_2, "ring all-reduce, 3 channels"},
    {"all_reduce_4", all_reduce_4, 90, 0, RANKS_4, "ring all-reduce, 3 channels"},
    {"all_reduce_8", all_reduce_8, 120, 0, RANKS_8, "ring all-reduce, 3 channels"},
    {"all_reduce_refused", all_reduce_refused, 120, 0, RANKS_2, "and the host tries 1 send in 50"},
    {"all_to_all_2", all_to_all_2, 90, 0, RANKS_2, "uneven all-to-all"},
    {"all_to_all_4", all_to_all_4, 90, 0, RANKS_4, "uneven all-to-all"},
    {"all_to_all_8", all_to_all_8, 120, 0, RANKS_8, "uneven all-to-all"},
    {0}};
