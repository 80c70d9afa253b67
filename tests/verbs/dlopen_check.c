/* A program in NCCL's style: not linked with libibverbs. It opens the library with RTLD_LOCAL,
 * takes each function by dlvsym with IBVERBS_1.1, posts through qp->context->ops.post_send and
 * polls through ops.poll_cq. --late starts without the library, and opens, uses and closes it
 * several times. One line of JSON a subtest; exit status 1 on a failure. */
#include "common.h"

#include <dlfcn.h>
#include <getopt.h>
#include <stdarg.h>
#include <sys/mman.h>

/* ibv_query_port of 1.1 writes the structure as it was then. */
struct port_1_1 {
    struct ibv_port_attr attr;
    uint8_t slack[64];
};

static struct {
    void *library;
    struct ibv_device **(*get_device_list)(int *);
    void (*free_device_list)(struct ibv_device **);
    const char *(*get_device_name)(struct ibv_device *);
    struct ibv_context *(*open_device)(struct ibv_device *);
    int (*close_device)(struct ibv_context *);
    int (*query_port)(struct ibv_context *, uint8_t, void *);
    int (*query_gid)(struct ibv_context *, uint8_t, int, union ibv_gid *);
    struct ibv_pd *(*alloc_pd)(struct ibv_context *);
    int (*dealloc_pd)(struct ibv_pd *);
    struct ibv_mr *(*reg_mr)(struct ibv_pd *, void *, size_t, int);
    int (*dereg_mr)(struct ibv_mr *);
    struct ibv_cq *(*create_cq)(struct ibv_context *, int, void *, struct ibv_comp_channel *, int);
    int (*destroy_cq)(struct ibv_cq *);
    struct ibv_qp *(*create_qp)(struct ibv_pd *, struct ibv_qp_init_attr *);
    int (*modify_qp)(struct ibv_qp *, struct ibv_qp_attr *, int);
    int (*query_qp)(struct ibv_qp *, struct ibv_qp_attr *, int, struct ibv_qp_init_attr *);
    int (*destroy_qp)(struct ibv_qp *);
} v;

static uint64_t requests, payload, read_payload;
static bool corrupt;
static char detail[512];

static bool failed(const char *format, ...) __attribute__((format(printf, 1, 2)));
static bool failed(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(detail, sizeof detail, format, args);
    va_end(args);
    return false;
}

#define CHECK(condition, ...)                                                                    \
    do {                                                                                         \
        if (!(condition)) return failed(__VA_ARGS__);                                            \
    } while (0)

static bool load(void) {
    v.library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
    CHECK(v.library, "dlopen: %s", dlerror());
    const struct {
        const char *name;
        void *into;
    } symbols[] = {
        {"ibv_get_device_list", &v.get_device_list}, {"ibv_free_device_list", &v.free_device_list},
        {"ibv_get_device_name", &v.get_device_name}, {"ibv_open_device", &v.open_device},
        {"ibv_close_device", &v.close_device},       {"ibv_query_port", &v.query_port},
        {"ibv_query_gid", &v.query_gid},             {"ibv_alloc_pd", &v.alloc_pd},
        {"ibv_dealloc_pd", &v.dealloc_pd},           {"ibv_reg_mr", &v.reg_mr},
        {"ibv_dereg_mr", &v.dereg_mr},               {"ibv_create_cq", &v.create_cq},
        {"ibv_destroy_cq", &v.destroy_cq},           {"ibv_create_qp", &v.create_qp},
        {"ibv_modify_qp", &v.modify_qp},             {"ibv_query_qp", &v.query_qp},
        {"ibv_destroy_qp", &v.destroy_qp},
    };
    for (size_t i = 0; i < COUNT(symbols); i++) {
        void *symbol = dlvsym(v.library, symbols[i].name, "IBVERBS_1.1");
        CHECK(symbol, "dlvsym(%s): %s", symbols[i].name, dlerror());
        memcpy(symbols[i].into, &symbol, sizeof symbol);
    }
    return true;
}

struct side {
    struct ibv_context *ctx;
    struct ibv_pd *pd;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct ibv_mr *mr;
    uint8_t *buf;
    int gid_index;
    struct address address;
};

enum { SIZE = 4 << 20, LEN = 32768, ROUNDS = 64, WINDOW = 16, MESSAGES = 16 };

static bool side_open(struct side *s, const char *name, int gid_index) {
    static const uint8_t mapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    int n = 0;
    struct ibv_device **list = v.get_device_list(&n);
    CHECK(list, "ibv_get_device_list: %s", strerror(errno));
    for (int i = 0; i < n; i++)
        if (strcmp(v.get_device_name(list[i]), name) == 0) s->ctx = v.open_device(list[i]);
    v.free_device_list(list);
    CHECK(s->ctx, "no device %s among %d", name, n);
    struct port_1_1 port;
    memset(&port, 0, sizeof port);
    CHECK(!v.query_port(s->ctx, 1, &port), "ibv_query_port");
    union ibv_gid gid;
    if (gid_index < 0 && getenv("VERBS_GID_INDEX")) gid_index = atoi(getenv("VERBS_GID_INDEX"));
    for (int i = 0; gid_index < 0 && i < port.attr.gid_tbl_len && i < 16; i++)
        if (!v.query_gid(s->ctx, 1, i, &gid) && memcmp(gid.raw, mapped, 12) == 0) gid_index = i;
    s->gid_index = gid_index < 0 ? 0 : gid_index;
    CHECK(!v.query_gid(s->ctx, 1, s->gid_index, &gid), "ibv_query_gid");
    s->pd = v.alloc_pd(s->ctx);
    CHECK(s->pd, "ibv_alloc_pd");
    s->buf = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (s->buf == MAP_FAILED) s->buf = NULL;
    CHECK(s->buf, "mmap");
    s->mr = v.reg_mr(s->pd, s->buf, SIZE, ALL_ACCESS);
    CHECK(s->mr, "ibv_reg_mr: %s", strerror(errno));
    s->cq = v.create_cq(s->ctx, 128, NULL, NULL, 0);
    CHECK(s->cq, "ibv_create_cq: %s", strerror(errno));
    struct ibv_qp_init_attr attr = {.send_cq = s->cq, .recv_cq = s->cq, .qp_type = IBV_QPT_RC,
                                    .cap = {.max_send_wr = 2 * WINDOW, .max_recv_wr = 2 * WINDOW,
                                            .max_send_sge = 1, .max_recv_sge = 1}};
    s->qp = v.create_qp(s->pd, &attr);
    CHECK(s->qp, "ibv_create_qp: %s", strerror(errno));
    s->address = (struct address){.qpn = s->qp->qp_num, .psn = 1000 + s->qp->qp_num,
                                  .mtu = port.attr.active_mtu, .lid = port.attr.lid};
    memcpy(s->address.gid, gid.raw, 16);
    return true;
}

static bool side_connect(struct side *s, const struct side *peer) {
    const struct path path = {0};
    struct ibv_qp_attr attr;
    int mask = attr_init(&attr, IBV_QPT_RC);
    CHECK(!v.modify_qp(s->qp, &attr, mask), "to INIT");
    mask = attr_rtr(&attr, IBV_QPT_RC, s->gid_index, (enum ibv_mtu)s->address.mtu, &peer->address,
                    &path);
    CHECK(!v.modify_qp(s->qp, &attr, mask), "to RTR");
    mask = attr_rts(&attr, IBV_QPT_RC, s->address.psn, &path);
    CHECK(!v.modify_qp(s->qp, &attr, mask), "to RTS");
    return true;
}

static bool side_close(struct side *s) {
    bool good = true;
    if (s->qp && v.destroy_qp(s->qp)) good = failed("ibv_destroy_qp");
    if (s->cq && v.destroy_cq(s->cq)) good = failed("ibv_destroy_cq");
    if (s->mr && v.dereg_mr(s->mr)) good = failed("ibv_dereg_mr");
    if (s->pd && v.dealloc_pd(s->pd)) good = failed("ibv_dealloc_pd");
    if (s->ctx && v.close_device(s->ctx)) good = failed("ibv_close_device");
    if (s->buf) munmap(s->buf, SIZE);
    return good;
}

static bool post(struct side *s, const struct side *to, enum ibv_wr_opcode op, size_t from,
                 size_t at, uint64_t id, bool signaled) {
    struct ibv_sge sge = {(uintptr_t)s->buf + from, LEN, s->mr->lkey};
    struct ibv_send_wr wr = {.wr_id = id, .sg_list = &sge, .num_sge = 1, .opcode = op,
                             .send_flags = signaled ? IBV_SEND_SIGNALED : 0,
                             .imm_data = htobe32((uint32_t)id)};
    struct ibv_send_wr *bad = NULL;
    wr.wr.rdma.remote_addr = (uintptr_t)to->buf + at;
    wr.wr.rdma.rkey = to->mr->rkey;
    const int error = s->qp->context->ops.post_send(s->qp, &wr, &bad);
    scribble(&wr, sizeof wr);
    scribble(&sge, sizeof sge);
    CHECK(!error, "post of %llu: %s", (unsigned long long)id, strerror(error));
    requests++;
    payload += LEN;
    if (op == IBV_WR_RDMA_READ) read_payload += LEN;
    return true;
}

static bool want(struct side *s, uint64_t id) {
    struct ibv_recv_wr wr = {.wr_id = id}, *bad = NULL;
    CHECK(!s->qp->context->ops.post_recv(s->qp, &wr, &bad), "post of a receive");
    return true;
}

static bool one(struct side *s, uint64_t id, enum ibv_wc_opcode op) {
    const char *text = getenv("VERBS_TIMEOUT_MS");
    const uint64_t ms = (text ? strtoull(text, NULL, 10) : 20000) * slowness();
    const uint64_t until = now_ns() + ms * 1000000u;
    struct ibv_wc wc;
    int got;
    while ((got = s->cq->context->ops.poll_cq(s->cq, 1, &wc)) == 0) {
        CHECK(now_ns() < until, "the completion of %llu did not come", (unsigned long long)id);
        usleep(20);
    }
    CHECK(got == 1, "poll_cq: %d", got);
    CHECK(wc.status == IBV_WC_SUCCESS, "request %llu: status %d", (unsigned long long)wc.wr_id,
          wc.status);
    CHECK(wc.wr_id == id && wc.opcode == op && wc.qp_num == s->qp->qp_num,
          "request %llu, opcode %d, queue pair %u where %llu, %d, %u were due",
          (unsigned long long)wc.wr_id, wc.opcode, wc.qp_num, (unsigned long long)id, op,
          s->qp->qp_num);
    CHECK(!(op & IBV_WC_RECV) || (wc.byte_len == LEN && (wc.wc_flags & IBV_WC_WITH_IMM)),
          "a receive of %u bytes", wc.byte_len);
    return true;
}

/* Messages both ways, the last of each round with an immediate; then READs back. */
static bool traffic(struct side *a, struct side *b, uint64_t seed) {
    for (uint64_t round = 0; round < ROUNDS / MESSAGES * 4; round++) {
        struct side *from = round % 2 ? b : a, *to = round % 2 ? a : b;
        fill(from->buf, MESSAGES * LEN, seed + round);
        if (!want(to, round)) return false;
        for (unsigned i = 0; i < MESSAGES; i++) {
            const bool last = i + 1 == MESSAGES;
            if (!post(from, to, last ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE, i * LEN,
                      (MESSAGES + i) * LEN, round * 100 + i, i % 4 == 3))
                return false;
        }
        for (unsigned i = 3; i < MESSAGES; i += 4)
            if (!one(from, round * 100 + i, IBV_WC_RDMA_WRITE)) return false;
        if (!one(to, round, IBV_WC_RECV_RDMA_WITH_IMM)) return false;
        if (corrupt) to->buf[MESSAGES * LEN + 12345] ^= 1;
        const size_t at = mismatch(to->buf + MESSAGES * LEN, MESSAGES * LEN, seed + round);
        CHECK(at == SIZE_MAX, "round %llu: byte %zu is wrong", (unsigned long long)round, at);
    }
    fill(b->buf, MESSAGES * LEN, seed + 5000);
    for (unsigned i = 0; i < MESSAGES; i++)
        if (!post(a, b, IBV_WR_RDMA_READ, (2 * MESSAGES + i) * LEN, i * LEN, 9000 + i, true))
            return false;
    for (unsigned i = 0; i < MESSAGES; i++)
        if (!one(a, 9000 + i, IBV_WC_RDMA_READ)) return false;
    const size_t at = mismatch(a->buf + 2 * MESSAGES * LEN, MESSAGES * LEN, seed + 5000);
    CHECK(at == SIZE_MAX, "read data: byte %zu is wrong", at);
    return true;
}

static bool cycle(const char *names[2], int gid_index, uint64_t seed) {
    struct side a, b;
    memset(&a, 0, sizeof a);
    memset(&b, 0, sizeof b);
    bool good = side_open(&a, names[0], gid_index) && side_open(&b, names[1], gid_index) &&
                side_connect(&a, &b) && side_connect(&b, &a) && traffic(&a, &b, seed);
    const bool closed = side_close(&a) & side_close(&b);
    return good && closed;
}

static bool plain(const char *names[2], int gid_index) {
    if (!load()) return false;
    return cycle(names, gid_index, 1) && cycle(names, gid_index, 2);
}

/* Opened, used and closed three times, with a second handle held in one of them. */
static bool late(const char *names[2], int gid_index) {
    void *loaded = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (loaded) dlclose(loaded);
    for (unsigned turn = 0; turn < 3; turn++) {
        if (!load()) return false;
        void *second = turn == 1 ? dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL) : NULL;
        if (!cycle(names, gid_index, 10 + turn)) return false;
        CHECK(dlclose(v.library) == 0, "dlclose: %s", dlerror());
        void *library = second;
        memset(&v, 0, sizeof v);
        if (library) CHECK(dlclose(library) == 0, "dlclose: %s", dlerror());
    }
    void *stays = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (stays) dlclose(stays);
    snprintf(detail, sizeof detail, "loaded at the start: %s; after the last dlclose: %s",
             loaded ? "yes" : "no", stays ? "yes" : "no");
    return true;
}

int main(int argc, char **argv) {
    static const struct option options[] = {{"late", no_argument, NULL, 'l'},
                                            {"corrupt", no_argument, NULL, 'x'},
                                            {"help", no_argument, NULL, 'h'},
                                            {NULL, 0, NULL, 0}};
    const char *names[2] = {getenv("VERBS_A"), getenv("VERBS_B")};
    int gid_index = -1;
    bool only_late = false;
    for (int c; (c = getopt_long(argc, argv, "a:b:g:lxh", options, NULL)) != -1;) {
        switch (c) {
        case 'a': names[0] = optarg; break;
        case 'b': names[1] = optarg; break;
        case 'g': gid_index = atoi(optarg); break;
        case 'l': only_late = true; break;
        case 'x': corrupt = true; break;
        default:
            fprintf(c == 'h' ? stdout : stderr,
                    "usage: %s [-a DEVICE] [-b DEVICE] [-g GID_INDEX] [--late] [--corrupt]\n"
                    "Without --late one subtest, dlopen; with it another, late_dlopen.\n"
                    "--corrupt falsifies a byte, to see it fail.\n",
                    argv[0]);
            return c == 'h' ? 0 : 3;
        }
    }
    if (!names[0]) names[0] = "rxe0";
    if (!names[1]) names[1] = "rxe1";
    alarm((unsigned)(120 * slowness()));
    const bool passed = only_late ? late(names, gid_index) : plain(names, gid_index);
    json_result(only_late ? "late_dlopen" : "dlopen", passed, false, requests, payload,
                read_payload, detail);
    return passed ? 0 : 1;
}
