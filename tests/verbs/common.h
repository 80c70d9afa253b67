/* What the verbs test programs share: time, patterns, devices, connecting queue pairs in one
 * process or between two. Everything here that calls ibv_* by name is in common.c, so that
 * dlopen_check.c can use the rest without being linked with libibverbs. */
#ifndef LAXITY_TESTS_VERBS_COMMON_H
#define LAXITY_TESTS_VERBS_COMMON_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define ALL_ACCESS                                                                               \
    (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |                 \
     IBV_ACCESS_REMOTE_ATOMIC)

static inline uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline void sleep_until_ns(uint64_t when) {
    struct timespec t = {(time_t)(when / 1000000000u), (long)(when % 1000000000u)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) == EINTR) {
    }
}

static inline void sleep_ms(unsigned ms) {
    sleep_until_ns(now_ns() + (uint64_t)ms * 1000000u);
}

/* VERBS_SLOW=10 gives everything ten times as long (valgrind, a starved machine). */
static inline uint64_t slowness(void) {
    const char *text = getenv("VERBS_SLOW");
    const long n = text ? atol(text) : 1;
    return n > 0 ? (uint64_t)n : 1;
}

/* Byte i of the pattern of a seed: each byte depends on the seed and on its place. */
static inline uint64_t pattern_word(uint64_t seed, uint64_t word) {
    uint64_t x = seed * 0x9e3779b97f4a7c15u + word * 0xd1342543de82ef95u + 1;
    x ^= x >> 29;
    x *= 0xbf58476d1ce4e5b9u;
    return x ^ (x >> 32);
}

static inline void fill(void *to, size_t len, uint64_t seed) {
    uint8_t *out = to;
    for (size_t at = 0; at < len; at += 8) {
        const uint64_t word = pattern_word(seed, at / 8);
        memcpy(out + at, &word, len - at < 8 ? len - at : 8);
    }
}

/* The first byte that is not the pattern's, or SIZE_MAX. */
static inline size_t mismatch(const void *in, size_t len, uint64_t seed) {
    const uint8_t *bytes = in;
    for (size_t at = 0; at < len; at += 8) {
        const uint64_t word = pattern_word(seed, at / 8);
        const size_t n = len - at < 8 ? len - at : 8;
        if (memcmp(bytes + at, &word, n) != 0) {
            size_t i = 0;
            while (bytes[at + i] == ((const uint8_t *)&word)[i]) i++;
            return at + i;
        }
    }
    return SIZE_MAX;
}

/* The first byte that is not `byte`, or SIZE_MAX. */
static inline size_t not_all(const void *in, size_t len, uint8_t byte) {
    const uint8_t *bytes = in;
    for (size_t i = 0; i < len; i++)
        if (bytes[i] != byte) return i;
    return SIZE_MAX;
}

static inline uint64_t checksum(const void *in, size_t len) {
    const uint8_t *bytes = in;
    uint64_t sum = 0xcbf29ce484222325u;
    size_t at = 0;
    for (; at + 8 <= len; at += 8) {
        uint64_t word;
        memcpy(&word, bytes + at, 8);
        sum = (sum ^ word) * 0x100000001b3u;
        sum ^= sum >> 31;
    }
    for (; at < len; at++) sum = (sum ^ bytes[at]) * 0x100000001b3u;
    return sum;
}

/* Overwrites what the caller may reuse once a post has returned; the compiler keeps it. */
static inline void scribble(void *what, size_t len) {
    memset(what, 0xee, len);
    __asm__ volatile("" : : "r"(what) : "memory");
}

static inline void json_text(FILE *out, const char *text) {
    fputc('"', out);
    for (; *text; text++) {
        const unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\')
            fprintf(out, "\\%c", c);
        else if (c < 0x20)
            fprintf(out, "\\u%04x", c);
        else
            fputc(c, out);
    }
    fputc('"', out);
}

static inline void json_result(const char *test, bool passed, bool skipped, uint64_t requests,
                               uint64_t bytes, uint64_t read_bytes, const char *detail) {
    printf("{\"test\":");
    json_text(stdout, test);
    printf(",\"passed\":%s,\"skipped\":%s,\"work_requests\":%llu,\"bytes\":%llu,"
           "\"read_bytes\":%llu,\"detail\":",
           passed ? "true" : "false", skipped ? "true" : "false", (unsigned long long)requests,
           (unsigned long long)bytes, (unsigned long long)read_bytes);
    json_text(stdout, detail);
    puts("}");
    fflush(stdout);
}

/* What one side tells the other of a queue pair and of its memory. */
struct address {
    uint32_t qpn;
    uint32_t psn;
    uint32_t mtu;
    uint32_t lid;
    uint8_t gid[16];
    uint64_t addr;
    uint64_t len;
    uint32_t rkey;
    uint32_t word; /* the programs' own */
};

/* How a connected queue pair is set up. All zero: defaults. */
struct path {
    uint8_t tclass;
    uint8_t timeout;   /* 0: 18, about a second */
    uint8_t rnr_timer; /* 0: 12, 0.64 ms */
    uint8_t rnr_retry; /* 0: 7, for ever */
    uint8_t retry_cnt; /* 0: 7, for ever with rxe */
};

#define PATH_TIMEOUT(path) ((path)->timeout ? (path)->timeout : 18)
#define PATH_RNR_TIMER(path) ((path)->rnr_timer ? (path)->rnr_timer : 12)
#define PATH_RNR_RETRY(path) ((path)->rnr_retry ? (path)->rnr_retry : 7)

struct device {
    struct ibv_context *ctx;
    struct ibv_pd *pd;
    char name[64];
    int gid_index;
    union ibv_gid gid;
    struct ibv_port_attr port;
    struct ibv_device_attr attr;
};

/* Fills in the attributes of INIT, RTR and RTS; each returns the mask to modify with. */
static inline int attr_init(struct ibv_qp_attr *attr, enum ibv_qp_type type) {
    memset(attr, 0, sizeof *attr);
    attr->qp_state = IBV_QPS_INIT;
    attr->port_num = 1;
    if (type == IBV_QPT_UD) {
        attr->qkey = 0x11111111;
        return IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
    }
    attr->qp_access_flags =
        type == IBV_QPT_RC ? ALL_ACCESS : IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
    return IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
}

static inline void attr_route(struct ibv_ah_attr *ah, int gid_index, const struct address *peer,
                              uint8_t tclass) {
    ah->dlid = (uint16_t)peer->lid;
    ah->port_num = 1;
    ah->is_global = 1;
    memcpy(ah->grh.dgid.raw, peer->gid, 16);
    ah->grh.sgid_index = (uint8_t)gid_index;
    ah->grh.hop_limit = 64;
    ah->grh.traffic_class = tclass;
}

static inline int attr_rtr(struct ibv_qp_attr *attr, enum ibv_qp_type type, int gid_index,
                           enum ibv_mtu mtu, const struct address *peer, const struct path *path) {
    memset(attr, 0, sizeof *attr);
    attr->qp_state = IBV_QPS_RTR;
    if (type == IBV_QPT_UD) return IBV_QP_STATE;
    attr->path_mtu = peer->mtu && peer->mtu < (uint32_t)mtu ? (enum ibv_mtu)peer->mtu : mtu;
    attr->dest_qp_num = peer->qpn;
    attr->rq_psn = peer->psn;
    attr_route(&attr->ah_attr, gid_index, peer, path->tclass);
    int mask = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    if (type == IBV_QPT_RC) {
        attr->max_dest_rd_atomic = 16;
        attr->min_rnr_timer = PATH_RNR_TIMER(path);
        mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    }
    return mask;
}

static inline int attr_rts(struct ibv_qp_attr *attr, enum ibv_qp_type type, uint32_t psn,
                           const struct path *path) {
    memset(attr, 0, sizeof *attr);
    attr->qp_state = IBV_QPS_RTS;
    attr->sq_psn = psn;
    int mask = IBV_QP_STATE | IBV_QP_SQ_PSN;
    if (type == IBV_QPT_RC) {
        attr->timeout = PATH_TIMEOUT(path);
        attr->retry_cnt = path->retry_cnt ? path->retry_cnt : 7;
        attr->rnr_retry = PATH_RNR_RETRY(path);
        attr->max_rd_atomic = 16;
        mask |= IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
    }
    return mask;
}

/* common.c from here on. Each returns 0, or an errno after a line on stderr. */

/* gid_index < 0: VERBS_GID_INDEX, or else the first RoCE v2 GID of an IPv4 address, or else 0. */
int device_open(struct device *device, const char *name, int gid_index);
void device_close(struct device *device);
/* The device's name out of argv, out of the environment, or the default. */
const char *device_name(const char *given, const char *variable, const char *otherwise);

void address_of(struct address *address, const struct device *device, const struct ibv_qp *qp,
                const struct ibv_mr *mr);
/* RESET → RTS. `type` is the queue pair's. */
int qp_up(struct ibv_qp *qp, const struct device *device, uint32_t psn,
          const struct address *peer, const struct path *path);
int qp_state(struct ibv_qp *qp, enum ibv_qp_state to);

/* Two processes: a TCP connection that carries addresses and words. Both die on failure. */
int rendezvous_listen(int port);
int rendezvous_accept(int listener);
int rendezvous_connect(const char *host, int port);
/* The client's end, or without a host the server's. */
int rendezvous(const char *host, int port);
void tell(int fd, const void *what, size_t len);
void hear(int fd, void *what, size_t len);
/* Waits until both processes have called it. */
void meet(int fd);
/* Whether the peer has closed fd, or sent 0 (a failure) instead of 1; leaves the byte unread. */
bool peer_lost(int fd);

/* One of two processes: some memory, and a queue pair that is connected to the other's. `device` is open
 * and `fd` is the rendezvous. */
struct endpoint {
    struct device device;
    int fd;
    uint8_t *buf;
    struct ibv_mr *mr;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct address peer;
};

/* Room for `depth` sends and `receives` receives, all of them signaled. */
int endpoint_open(struct endpoint *end, size_t memory, unsigned depth, unsigned receives, uint8_t tclass);
int endpoint_close(struct endpoint *end);

/* Exact quantile (nearest rank) of sorted values. */
double quantile(const double *sorted, size_t n, double q);
int by_value(const void *a, const void *b);

#endif
