/* Each operation and each transport: data, opcodes, lengths, order. */
#include "check.h"

static const uint32_t sizes[] = {1, 7, 8, 64, 255, 1024, 4096, 4097, 9000, 65536, 262144};

static bool write_(void) {
    OPEN(p, .len = 1 << 20);
    size_t at = 0;
    for (size_t i = 0; i < COUNT(sizes); i++) {
        fill(p->a.buf + at, sizes[i], i + 1);
        DO(put(&p->a, &p->b, (struct ask){IBV_WR_RDMA_WRITE, at, at + 64 * i, sizes[i], 100 + i,
                                          IBV_SEND_SIGNALED, 0}));
        at += sizes[i];
    }
    DO(reap_run(&p->a, COUNT(sizes), 100, IBV_WC_RDMA_WRITE, 0));
    at = 0;
    for (size_t i = 0; i < COUNT(sizes); i++) {
        const uint8_t *to = p->b.buf + at + 64 * i;
        SAME(to, sizes[i], i + 1, "written data");
        UNTOUCHED(to + sizes[i], 64, 0xbb, "after written data");
        at += sizes[i];
    }
    return quiet(p->b.cq, 5);
}

static bool read_(void) {
    OPEN(p, .len = 1 << 20);
    size_t at = 0;
    for (size_t i = 0; i < COUNT(sizes); i++) {
        fill(p->b.buf + at, sizes[i], i + 50);
        DO(put(&p->a, &p->b, (struct ask){IBV_WR_RDMA_READ, at + 64 * i, at, sizes[i], 200 + i,
                                          IBV_SEND_SIGNALED, 0}));
        at += sizes[i];
    }
    struct ibv_wc wc[COUNT(sizes)];
    DO(reap(p->a.cq, wc, COUNT(sizes)));
    at = 0;
    for (size_t i = 0; i < COUNT(sizes); i++) {
        WC(&wc[i], &p->a, 200 + i, IBV_WC_RDMA_READ, sizes[i]);
        const uint8_t *to = p->a.buf + at + 64 * i;
        SAME(to, sizes[i], i + 50, "read data");
        UNTOUCHED(to + sizes[i], 64, 0xaa, "after read data");
        at += sizes[i];
    }
    return true;
}

/* Sends of every size, with or without an immediate. */
static bool sends(bool imm) {
    OPEN(p, .len = 1 << 20);
    struct ibv_wc wc[COUNT(sizes)];
    size_t at = 0;
    for (size_t i = 0; i < COUNT(sizes); i++) {
        DO(want(&p->b, at + 64 * i, sizes[i] + 32, 300 + i));
        at += sizes[i];
    }
    at = 0;
    for (size_t i = 0; i < COUNT(sizes); i++) {
        fill(p->a.buf + at, sizes[i], i + 70);
        DO(put(&p->a, NULL, (struct ask){imm ? IBV_WR_SEND_WITH_IMM : IBV_WR_SEND, at, 0, sizes[i],
                                         400 + i, IBV_SEND_SIGNALED, 0xfeed0000 + (uint32_t)i}));
        at += sizes[i];
    }
    DO(reap_run(&p->a, COUNT(sizes), 400, IBV_WC_SEND, 0));
    DO(reap(p->b.cq, wc, COUNT(sizes)));
    at = 0;
    for (size_t i = 0; i < COUNT(sizes); i++) {
        WC(&wc[i], &p->b, 300 + i, IBV_WC_RECV, sizes[i]);
        CHECK(!!(wc[i].wc_flags & IBV_WC_WITH_IMM) == imm, "flags %#x", wc[i].wc_flags);
        CHECK(!imm || be32toh(wc[i].imm_data) == 0xfeed0000 + i, "immediate %#x",
              be32toh(wc[i].imm_data));
        SAME(p->b.buf + at + 64 * i, sizes[i], i + 70, "received data");
        UNTOUCHED(p->b.buf + at + 64 * i + sizes[i], 64, 0xbb, "after received data");
        at += sizes[i];
    }
    return true;
}

static bool send_recv(void) { return sends(false); }
static bool send_with_imm(void) { return sends(true); }

static bool write_with_imm(void) {
    OPEN(p);
    struct ibv_wc wc[8];
    for (unsigned i = 0; i < 8; i++) DO(want(&p->b, 0, NONE, 500 + i));
    fill(p->a.buf, 8 * 5000, 9);
    for (unsigned i = 0; i < 8; i++)
        DO(put(&p->a, &p->b, (struct ask){IBV_WR_RDMA_WRITE_WITH_IMM, i * 5000, i * 5000, 5000,
                                          600 + i, IBV_SEND_SIGNALED, 0xabc00000 + i}));
    DO(reap_run(&p->a, 8, 600, IBV_WC_RDMA_WRITE, 0));
    DO(reap(p->b.cq, wc, 8));
    for (unsigned i = 0; i < 8; i++) {
        WC(&wc[i], &p->b, 500 + i, IBV_WC_RECV_RDMA_WITH_IMM, 5000);
        CHECK(wc[i].wc_flags & IBV_WC_WITH_IMM, "flags %#x", wc[i].wc_flags);
        CHECK(be32toh(wc[i].imm_data) == 0xabc00000 + i, "immediate %#x",
              be32toh(wc[i].imm_data));
    }
    SAME(p->b.buf, 8 * 5000, 9, "written data");
    return true;
}

static bool atomics(void) {
    if (A.attr.atomic_cap == IBV_ATOMIC_NONE) return skip("the device has no atomics");
    OPEN(p);
    uint64_t *there = (uint64_t *)(void *)p->b.buf, *here = (uint64_t *)(void *)p->a.buf;
    struct ibv_wc wc;
    struct ibv_sge sge;
    struct ibv_send_wr wr, *bad;
    uint64_t value = 1000;
    *there = value;
    for (unsigned i = 0; i < 24; i++) {
        const bool add = i % 3 == 0, hit = i % 3 == 1;
        fill_request(&wr, &sge, &p->a, NULL,
                     (struct ask){add ? IBV_WR_ATOMIC_FETCH_AND_ADD : IBV_WR_ATOMIC_CMP_AND_SWP,
                                  8 * i, 0, 8, 700 + i, IBV_SEND_SIGNALED, 0});
        wr.wr.atomic.remote_addr = (uintptr_t)there;
        wr.wr.atomic.rkey = p->b.mr->rkey;
        wr.wr.atomic.compare_add = add ? i + 5 : hit ? value : value + 1;
        wr.wr.atomic.swap = 0x1234567800000000u + i;
        const uint64_t before = value;
        if (add) value += i + 5;
        else if (hit) value = wr.wr.atomic.swap;
        const int error = post(p->a.qp, &wr, &bad);
        scribble(&wr, sizeof wr);
        scribble(&sge, sizeof sge);
        CHECK(!error, "post: %s", strerror(error));
        DO(reap(p->a.cq, &wc, 1));
        WC(&wc, &p->a, 700 + i, add ? IBV_WC_FETCH_ADD : IBV_WC_COMP_SWAP, 8);
        if (sabotaged(S_DATA)) here[i]++;
        CHECK(here[i] == before, "atomic %u gave %#llx, not %#llx", i, (unsigned long long)here[i],
              (unsigned long long)before);
        CHECK(*there == value, "after atomic %u %#llx, not %#llx", i, (unsigned long long)*there,
              (unsigned long long)value);
    }
    /* A run of additions without waiting: each result differs, the sum is right. */
    *there = 0;
    for (unsigned i = 0; i < 32; i++) {
        fill_request(&wr, &sge, &p->a, NULL, (struct ask){IBV_WR_ATOMIC_FETCH_AND_ADD, 8 * i, 0, 8,
                                                          800 + i, IBV_SEND_SIGNALED, 0});
        wr.wr.atomic.remote_addr = (uintptr_t)there;
        wr.wr.atomic.rkey = p->b.mr->rkey;
        wr.wr.atomic.compare_add = 3;
        const int error = post(p->a.qp, &wr, &bad);
        CHECK(!error, "post: %s", strerror(error));
    }
    DO(reap_run(&p->a, 32, 800, IBV_WC_FETCH_ADD, 8));
    for (unsigned i = 0; i < 32; i++)
        CHECK(here[i] == 3 * i, "addition %u saw %llu", i, (unsigned long long)here[i]);
    CHECK(*there == 96, "the sum is %llu", (unsigned long long)*there);
    return true;
}

static bool multi_sge(void) {
    enum { SGES = 7 };
    OPEN(p, .sge = SGES);
    static const uint32_t lengths[SGES] = {1, 4096, 13, 0, 5000, 64, 3};
    struct ibv_sge sge[SGES], back[SGES];
    struct ibv_send_wr wr, *bad;
    uint32_t total = 0;
    /* Zero-length SGEs mean 2 GiB to some hardware: they are left out. */
    int n = 0;
    fill(p->a.buf + 500000, 20000, 31);
    for (int i = 0; i < SGES; i++) {
        if (!lengths[i]) continue;
        /* Gathered from scattered places, last part first in memory. */
        uint8_t *at = p->a.buf + 100000 - 10000 * i;
        memcpy(at, p->a.buf + 500000 + total, lengths[i]);
        sge[n++] = (struct ibv_sge){(uintptr_t)at, lengths[i], p->a.mr->lkey};
        total += lengths[i];
    }
    fill_request(&wr, back, &p->a, &p->b,
                 (struct ask){IBV_WR_RDMA_WRITE, 0, 100, 0, 1, IBV_SEND_SIGNALED, 0});
    wr.sg_list = sge;
    wr.num_sge = n;
    int error = post(p->a.qp, &wr, &bad);
    CHECK(!error, "post of a write of %d SGEs: %s", n, strerror(error));
    DO(reap_run(&p->a, 1, 1, IBV_WC_RDMA_WRITE, 0));
    SAME(p->b.buf + 100, total, 31, "gathered write");
    UNTOUCHED(p->b.buf + 100 + total, 64, 0xbb, "after the gathered write");

    /* The same by send, scattered on receipt. */
    struct ibv_sge scatter[2] = {{(uintptr_t)p->b.buf + 200000, 4000, p->b.mr->lkey},
                                 {(uintptr_t)p->b.buf + 300000, 20000, p->b.mr->lkey}};
    struct ibv_recv_wr recv = {.wr_id = 5, .sg_list = scatter, .num_sge = 2}, *bad_recv;
    CHECK(!ibv_post_recv(p->b.qp, &recv, &bad_recv), "post of a receive");
    wr.opcode = IBV_WR_SEND;
    wr.wr_id = 2;
    error = post(p->a.qp, &wr, &bad);
    scribble(sge, sizeof sge);
    CHECK(!error, "post of a send: %s", strerror(error));
    DO(reap_run(&p->a, 1, 2, IBV_WC_SEND, 0));
    DO(reap_run(&p->b, 1, 5, IBV_WC_RECV, total));
    CHECK(memcmp(p->b.buf + 200000, p->b.buf + 100, 4000) == 0 &&
              memcmp(p->b.buf + 300000, p->b.buf + 100 + 4000, total - 4000) == 0,
          "scattered receive");

    /* And a READ scattered into several places. */
    n = 0;
    total = 0;
    for (int i = 0; i < SGES; i++) {
        if (!lengths[i]) continue;
        back[n++] = (struct ibv_sge){(uintptr_t)p->a.buf + 700000 + 10000u * (unsigned)i,
                                     lengths[i], p->a.mr->lkey};
        total += lengths[i];
    }
    wr.opcode = IBV_WR_RDMA_READ;
    wr.wr_id = 3;
    wr.sg_list = back;
    wr.num_sge = n;
    error = post(p->a.qp, &wr, &bad);
    scribble(back, sizeof back);
    scribble(&wr, sizeof wr);
    CHECK(!error, "post of a read: %s", strerror(error));
    DO(reap_run(&p->a, 1, 3, IBV_WC_RDMA_READ, total));
    total = 0;
    for (int i = 0; i < SGES; i++) {
        CHECK(memcmp(p->a.buf + 700000 + 10000 * i, p->b.buf + 100 + total, lengths[i]) == 0,
              "part %d of the scattered read", i);
        total += lengths[i];
    }
    return true;
}

/* A fenced send must carry what the READ before it brought. */
static bool fence(void) {
    OPEN(p, .len = 4 << 20);
    enum { LEN = 1 << 20 };
    for (unsigned round = 0; round < 4; round++) {
        fill(p->b.buf, LEN, 900 + round);
        memset(p->a.buf, 0xaa, LEN);
        DO(want(&p->b, 2 << 20, LEN, round));
        DO(put(&p->a, &p->b,
               (struct ask){IBV_WR_RDMA_READ, 0, 0, LEN, 2 * round, IBV_SEND_SIGNALED, 0}));
        DO(put(&p->a, NULL, (struct ask){IBV_WR_SEND, 0, 0, LEN, 2 * round + 1,
                                         IBV_SEND_SIGNALED | IBV_SEND_FENCE, 0}));
        struct ibv_wc wc[2];
        DO(reap(p->a.cq, wc, 2));
        WC(&wc[0], &p->a, 2 * round, IBV_WC_RDMA_READ, LEN);
        WC(&wc[1], &p->a, 2 * round + 1, IBV_WC_SEND, 0);
        DO(reap_run(&p->b, 1, round, IBV_WC_RECV, LEN));
        SAME(p->b.buf + (2 << 20), LEN, 900 + round, "data of a fenced send");
    }
    return true;
}

static bool zero_length(void) {
    OPEN(p);
    struct ibv_wc wc[4];
    fill(p->a.buf, 4096, 3);
    DO(want(&p->b, 0, NONE, 10));
    DO(want(&p->b, 0, 64, 11));
    DO(want(&p->b, 0, NONE, 12));
    DO(put(&p->a, &p->b, (struct ask){IBV_WR_RDMA_WRITE, 0, 0, NONE, 1, IBV_SEND_SIGNALED, 0}));
    DO(put(&p->a, &p->b,
           (struct ask){IBV_WR_RDMA_WRITE_WITH_IMM, 0, 0, NONE, 2, IBV_SEND_SIGNALED, 77}));
    DO(put(&p->a, NULL, (struct ask){IBV_WR_SEND, 0, 0, NONE, 3, IBV_SEND_SIGNALED, 0}));
    DO(put(&p->a, NULL, (struct ask){IBV_WR_SEND_WITH_IMM, 0, 0, NONE, 4, IBV_SEND_SIGNALED, 78}));
    DO(put(&p->a, &p->b, (struct ask){IBV_WR_RDMA_READ, 0, 0, NONE, 5, IBV_SEND_SIGNALED, 0}));
    DO(put(&p->a, &p->b, (struct ask){IBV_WR_RDMA_WRITE, 0, 0, 4096, 6, IBV_SEND_SIGNALED, 0}));
    DO(reap_run(&p->a, 2, 1, IBV_WC_RDMA_WRITE, 0));
    DO(reap_run(&p->a, 2, 3, IBV_WC_SEND, 0));
    DO(reap_run(&p->a, 1, 5, IBV_WC_RDMA_READ, 0));
    DO(reap_run(&p->a, 1, 6, IBV_WC_RDMA_WRITE, 0));
    DO(reap(p->b.cq, wc, 3));
    WC(&wc[0], &p->b, 10, IBV_WC_RECV_RDMA_WITH_IMM, 0);
    CHECK(be32toh(wc[0].imm_data) == 77, "immediate %u", be32toh(wc[0].imm_data));
    WC(&wc[1], &p->b, 11, IBV_WC_RECV, 0);
    WC(&wc[2], &p->b, 12, IBV_WC_RECV, 0);
    CHECK(be32toh(wc[2].imm_data) == 78, "immediate %u", be32toh(wc[2].imm_data));
    SAME(p->b.buf, 4096, 3, "the write after them");
    return true;
}

/* One 64 MiB write with single bytes before, between and after. */
static bool large_mixed(void) {
    enum { LARGE = 64 << 20, SMALL = 16 };
    OPEN(p, .len = LARGE + 4096);
    fill(p->a.buf, LARGE + 4096, 17);
    memset(p->b.buf, 0xbb, LARGE + 4096);
    uint64_t id = 0;
    for (unsigned i = 0; i < SMALL; i++)
        DO(put(&p->a, &p->b, (struct ask){IBV_WR_RDMA_WRITE, LARGE + i, LARGE + i, 1, id++,
                                          IBV_SEND_SIGNALED, 0}));
    DO(put(&p->a, &p->b,
           (struct ask){IBV_WR_RDMA_WRITE, 0, 0, LARGE, id++, IBV_SEND_SIGNALED, 0}));
    for (unsigned i = SMALL; i < 2 * SMALL; i++)
        DO(put(&p->a, &p->b, (struct ask){IBV_WR_RDMA_WRITE, LARGE + i, LARGE + i, 1, id++,
                                          IBV_SEND_SIGNALED, 0}));
    DO(reap_run(&p->a, (int)id, 0, IBV_WC_RDMA_WRITE, 0));
    SAME(p->b.buf, LARGE + 2 * SMALL, 17, "64 MiB and single bytes");
    UNTOUCHED(p->b.buf + LARGE + 2 * SMALL, 64, 0xbb, "after them");
    return true;
}

/* Writes and READs of the same place, in order: each READ sees the write before it. The writes are fenced:
 * a responder may carry out a repeated READ again, and it would see what was written since. */
static bool read_mix(void) {
    OPEN(p);
    enum { ROUNDS = 24, LEN = 12000 };
    for (unsigned i = 0; i < ROUNDS; i++) fill(p->a.buf + i * LEN, LEN, 40 + i);
    for (unsigned i = 0; i < ROUNDS; i++) {
        DO(put(&p->a, &p->b, (struct ask){IBV_WR_RDMA_WRITE, i * LEN, 0, LEN, 2 * i,
                                          IBV_SEND_FENCE | (i % 2 ? IBV_SEND_SIGNALED : 0), 0}));
        DO(put(&p->a, &p->b, (struct ask){IBV_WR_RDMA_READ, (ROUNDS + i) * LEN, 0, LEN, 2 * i + 1,
                                          IBV_SEND_SIGNALED, 0}));
    }
    struct ibv_wc wc[ROUNDS * 3 / 2];
    DO(reap(p->a.cq, wc, COUNT(wc)));
    unsigned n = 0;
    for (unsigned i = 0; i < ROUNDS; i++) {
        if (i % 2) WC(&wc[n++], &p->a, 2 * i, IBV_WC_RDMA_WRITE, 0);
        WC(&wc[n++], &p->a, 2 * i + 1, IBV_WC_RDMA_READ, LEN);
        SAME(p->a.buf + (ROUNDS + i) * LEN, LEN, 40 + i, "read back");
    }
    return true;
}

static bool uc(void) {
    OPEN(p, .type = IBV_QPT_UC);
    struct ibv_wc wc[2];
    for (unsigned i = 0; i < 16; i++) {
        const uint32_t len = 1 + i * 1500;
        fill(p->a.buf, len, i);
        fill(p->a.buf + 200000, len, i + 100);
        DO(want(&p->b, 200000, len, 900 + 2 * i));
        DO(want(&p->b, 0, NONE, 901 + 2 * i));
        DO(put(&p->a, &p->b, (struct ask){IBV_WR_RDMA_WRITE, 0, 0, len, 3 * i, 0, 0}));
        DO(put(&p->a, NULL,
               (struct ask){IBV_WR_SEND, 200000, 0, len, 3 * i + 1, IBV_SEND_SIGNALED, 0}));
        DO(put(&p->a, &p->b, (struct ask){IBV_WR_RDMA_WRITE_WITH_IMM, 0, 400000, len, 3 * i + 2,
                                          IBV_SEND_SIGNALED, i}));
        DO(reap(p->a.cq, wc, 2));
        WC(&wc[0], &p->a, 3 * i + 1, IBV_WC_SEND, 0);
        WC(&wc[1], &p->a, 3 * i + 2, IBV_WC_RDMA_WRITE, 0);
        DO(reap(p->b.cq, wc, 2));
        WC(&wc[0], &p->b, 900 + 2 * i, IBV_WC_RECV, len);
        WC(&wc[1], &p->b, 901 + 2 * i, IBV_WC_RECV_RDMA_WITH_IMM, len);
        CHECK(be32toh(wc[1].imm_data) == i, "immediate %u", be32toh(wc[1].imm_data));
        SAME(p->b.buf, len, i, "UC write");
        SAME(p->b.buf + 200000, len, i + 100, "UC send");
        SAME(p->b.buf + 400000, len, i, "UC write with immediate");
    }
    return true;
}

static bool ud(void) {
    enum { LEN = 1000, BATCH = 8, GRH = 40 };
    OPEN(p, .type = IBV_QPT_UD);
    struct address b;
    address_of(&b, p->b.dev, p->b.qp, NULL);
    struct ibv_ah_attr attr = {0};
    attr_route(&attr, p->a.dev->gid_index, &b, 0);
    struct ibv_ah *ah = ibv_create_ah(p->a.dev->pd, &attr);
    CHECK(ah, "ibv_create_ah: %s", strerror(errno));
    bool passed = true;
    for (unsigned round = 0; passed && round < 16; round++) {
        struct ibv_wc wc[BATCH];
        for (unsigned i = 0; passed && i < BATCH; i++)
            passed = want(&p->b, i * 4096, LEN + GRH, 100 * round + i);
        for (unsigned i = 0; passed && i < BATCH; i++) {
            struct ibv_send_wr wr, *bad;
            struct ibv_sge sge;
            fill(p->a.buf + i * LEN, LEN, round * BATCH + i);
            fill_request(&wr, &sge, &p->a, NULL,
                         (struct ask){IBV_WR_SEND_WITH_IMM, i * LEN, 0, LEN, 100 * round + i,
                                      IBV_SEND_SIGNALED, i});
            wr.wr.ud.ah = ah;
            wr.wr.ud.remote_qpn = p->b.qp->qp_num;
            wr.wr.ud.remote_qkey = 0x11111111;
            const int error = post(p->a.qp, &wr, &bad);
            scribble(&wr, sizeof wr);
            scribble(&sge, sizeof sge);
            if (error) passed = failed_at(__FILE__, __LINE__, "post: %s", strerror(error));
        }
        passed = passed && reap_run(&p->a, BATCH, 100 * round, IBV_WC_SEND, 0) &&
                 reap(p->b.cq, wc, BATCH);
        for (unsigned i = 0; passed && i < BATCH; i++) {
            passed = wc_is(&wc[i], &p->b, 100 * round + i, IBV_WC_RECV, LEN + GRH) &&
                     same(p->b.buf + i * 4096 + GRH, LEN, round * BATCH + i, "datagram");
            if (passed && (wc[i].src_qp != p->a.qp->qp_num || be32toh(wc[i].imm_data) != i))
                passed = failed_at(__FILE__, __LINE__, "datagram %u: source %u, immediate %u", i,
                                   wc[i].src_qp, be32toh(wc[i].imm_data));
        }
    }
    if (ibv_destroy_ah(ah)) return failed_at(__FILE__, __LINE__, "ibv_destroy_ah");
    return passed;
}

/* Two queue pairs receive from one shared receive queue. */
static bool srq(void) {
    struct ibv_srq_init_attr attr = {.attr = {.max_wr = 64, .max_sge = 1}};
    struct ibv_srq *queue = ibv_create_srq(B.pd, &attr);
    if (!queue) return skip("no shared receive queues: %s", strerror(errno));
    struct pair *p = pair_open(&(struct options){.srq = queue});
    struct pair *q = p ? pair_open(&(struct options){.srq = queue, .share = p}) : NULL;
    bool passed = p && q;
    enum { EACH = 12, LEN = 3000 };
    for (unsigned i = 0; passed && i < 2 * EACH; i++)
        passed = want(&p->b, i * LEN, LEN, 1000 + i);
    for (unsigned i = 0; passed && i < 2 * EACH; i++) {
        fill(p->a.buf + i * LEN, LEN, 60 + i);
        passed = put(i % 2 ? &q->a : &p->a, NULL,
                     (struct ask){IBV_WR_SEND_WITH_IMM, i * LEN, 0, LEN, i, IBV_SEND_SIGNALED, i});
    }
    uint64_t next[2] = {0, 1}, got[2] = {0, 1};
    for (unsigned i = 0; passed && i < 4 * EACH; i++) {
        struct ibv_wc wc;
        const bool send = i < 2 * EACH;
        passed = reap(send ? p->a.cq : p->b.cq, &wc, 1);
        if (!passed) break;
        const unsigned which =
            wc.qp_num == (send ? q->a.qp->qp_num : q->b.qp->qp_num) ? 1 : 0;
        if (send) {
            passed = wc_is(&wc, which ? &q->a : &p->a, next[which], IBV_WC_SEND, 0);
            next[which] += 2;
        } else {
            const uint64_t slot = wc.wr_id - 1000, number = be32toh(wc.imm_data);
            if (slot >= 2 * EACH || number != got[which])
                passed = failed_at(__FILE__, __LINE__, "slot %llu has number %llu, not %llu",
                                   (unsigned long long)slot, (unsigned long long)number,
                                   (unsigned long long)got[which]);
            passed = passed &&
                     wc_is(&wc, which ? &q->b : &p->b, wc.wr_id, IBV_WC_RECV, LEN) &&
                     same(p->b.buf + slot * LEN, LEN, 60 + number, "received data");
            got[which] += 2;
        }
    }
    if (q) pair_close(q);
    if (p) pair_close(p);
    if (ibv_destroy_srq(queue)) return failed_at(__FILE__, __LINE__, "ibv_destroy_srq");
    return passed;
}

const struct check transfer_checks[] = {
    {"write", write_},
    {"read", read_},
    {"send_recv", send_recv},
    {"write_with_imm", write_with_imm},
    {"send_with_imm", send_with_imm},
    {"atomics", atomics},
    {"multi_sge", multi_sge},
    {"fence", fence},
    {"zero_length", zero_length},
    {"large_mixed", large_mixed},
    {"read_mix", read_mix},
    {"uc", uc},
    {"ud", ud},
    {"srq", srq},
    {NULL, NULL},
};
