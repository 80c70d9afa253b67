/* The ibv_wr_* interface: requests built by calls between wr_start and wr_complete. */
#include "check.h"

enum { LEN = 4096, DEPTH = 32 };

#define RC_OPS                                                                                   \
    (IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM | IBV_QP_EX_WITH_SEND |      \
     IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_RDMA_READ |                                   \
     IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD)

/* Whether the device makes such queue pairs; if not, why. */
static bool supported(enum ibv_qp_type type, uint64_t ops) {
    struct ibv_cq *cq = ibv_create_cq(A.ctx, 16, NULL, NULL, 0);
    struct ibv_qp_init_attr_ex attr = {
        .send_cq = cq, .recv_cq = cq, .qp_type = type, .pd = A.pd, .send_ops_flags = ops,
        .cap = {.max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1},
        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS};
    struct ibv_qp *qp = cq ? ibv_create_qp_ex(A.ctx, &attr) : NULL;
    const int error = errno;
    if (qp) ibv_destroy_qp(qp);
    if (cq) ibv_destroy_cq(cq);
    if (!qp) skip("no ibv_wr_* queue pairs: %s", strerror(error));
    return qp;
}

static void request(struct ibv_qp_ex *qp, uint64_t id, unsigned flags) {
    qp->wr_id = id;
    qp->wr_flags = flags;
}

static bool complete(struct ibv_qp_ex *qp, unsigned requests, uint64_t bytes, uint64_t reads) {
    int error = ibv_wr_complete(qp);
    scribble(&qp->wr_id, sizeof qp->wr_id);
    CHECK(!error, "ibv_wr_complete: %s", strerror(error));
    count(requests, bytes, reads);
    return true;
}

/* Each builder alone and all of them in one batch. */
static bool operations(bool batched) {
    if (!supported(IBV_QPT_RC, RC_OPS)) return true;
    OPEN(p, .send_ops = RC_OPS);
    struct ibv_qp_ex *qp = p->a.qpx;
    const uint32_t lkey = p->a.mr->lkey, rkey = p->b.mr->rkey;
    const uint64_t here = (uintptr_t)p->a.buf, there = (uintptr_t)p->b.buf;
    for (unsigned round = 0; round < 4; round++) {
        uint64_t *number = (uint64_t *)(void *)(p->b.buf + 800000);
        uint64_t *old = (uint64_t *)(void *)(p->a.buf + 800000);
        memset(p->a.buf, 0xaa, 500000);
        memset(p->b.buf, 0xbb, 500000);
        *number = 40;
        fill(p->a.buf, 4 * LEN, round);
        fill(p->b.buf + 400000, LEN, 100 + round);
        for (unsigned i = 0; i < 3; i++) DO(want(&p->b, (10 + i) * LEN, LEN, 200 + i));
        if (batched) ibv_wr_start(qp);
#define STEP(id, bytes, reads, ...)                                                              \
    do {                                                                                         \
        if (!batched) ibv_wr_start(qp);                                                          \
        request(qp, id, IBV_SEND_SIGNALED);                                                      \
        __VA_ARGS__;                                                                             \
        if (!batched) DO(complete(qp, 1, bytes, reads));                                         \
    } while (0)
        struct ibv_sge parts[4];
        for (unsigned i = 0; i < 4; i++)
            parts[i] = (struct ibv_sge){here + 2 * LEN + i * (LEN / 4), LEN / 4, lkey};
        STEP(0, LEN, 0, ibv_wr_rdma_write(qp, rkey, there); ibv_wr_set_sge(qp, lkey, here, LEN));
        STEP(1, LEN, 0, ibv_wr_rdma_write_imm(qp, rkey, there + LEN, htobe32(4321));
             ibv_wr_set_sge(qp, lkey, here + LEN, LEN));
        STEP(2, LEN, 0, ibv_wr_send(qp); ibv_wr_set_sge_list(qp, 4, parts));
        scribble(parts, sizeof parts);
        STEP(3, LEN, 0, ibv_wr_send_imm(qp, htobe32(8765));
             ibv_wr_set_sge(qp, lkey, here + 3 * LEN, LEN));
        STEP(4, LEN, LEN, ibv_wr_rdma_read(qp, rkey, there + 400000);
             ibv_wr_set_sge(qp, lkey, here + 400000, LEN));
        STEP(5, 8, 0, ibv_wr_atomic_fetch_add(qp, rkey, there + 800000, 2);
             ibv_wr_set_sge(qp, lkey, here + 800000, 8));
        STEP(6, 8, 0, ibv_wr_atomic_cmp_swp(qp, rkey, there + 800000, 42, 77);
             ibv_wr_set_sge(qp, lkey, here + 800008, 8));
        STEP(7, 8, 0, ibv_wr_atomic_cmp_swp(qp, rkey, there + 800000, 42, 99);
             ibv_wr_set_sge(qp, lkey, here + 800016, 8));
#undef STEP
        if (batched) DO(complete(qp, 8, 5 * LEN + 24, LEN));

        static const enum ibv_wc_opcode ops[] = {
            IBV_WC_RDMA_WRITE, IBV_WC_RDMA_WRITE, IBV_WC_SEND,      IBV_WC_SEND,
            IBV_WC_RDMA_READ,  IBV_WC_FETCH_ADD,  IBV_WC_COMP_SWAP, IBV_WC_COMP_SWAP};
        struct ibv_wc wc[COUNT(ops)];
        DO(reap(p->a.cq, wc, COUNT(ops)));
        for (unsigned i = 0; i < COUNT(ops); i++)
            WC(&wc[i], &p->a, i, ops[i], i == 4 ? LEN : 8);
        DO(reap(p->b.cq, wc, 3));
        WC(&wc[0], &p->b, 200, IBV_WC_RECV_RDMA_WITH_IMM, LEN);
        WC(&wc[1], &p->b, 201, IBV_WC_RECV, LEN);
        WC(&wc[2], &p->b, 202, IBV_WC_RECV, LEN);
        CHECK(be32toh(wc[0].imm_data) == 4321 && be32toh(wc[2].imm_data) == 8765,
              "immediates %u and %u", be32toh(wc[0].imm_data), be32toh(wc[2].imm_data));
        SAME(p->b.buf, 2 * LEN, round, "written data");
        CHECK(memcmp(p->b.buf + 11 * LEN, p->a.buf + 2 * LEN, 2 * LEN) == 0, "sent data");
        SAME(p->a.buf + 400000, LEN, 100 + round, "read data");
        CHECK(old[0] == 40 && old[1] == 42 && old[2] == 77 && *number == 77,
              "atomics gave %llu %llu %llu and left %llu", (unsigned long long)old[0],
              (unsigned long long)old[1], (unsigned long long)old[2],
              (unsigned long long)*number);
    }
    return true;
}

static bool wr_single(void) { return operations(false); }
static bool wr_batch(void) { return operations(true); }

/* SGEs of different lengths. librxe before rdma-core 62 adds up the first one's length. */
static bool wr_sge_list(void) {
    if (!supported(IBV_QPT_RC, RC_OPS)) return true;
    OPEN(p, .send_ops = RC_OPS);
    struct ibv_qp_ex *qp = p->a.qpx;
    static const uint32_t lengths[3] = {1000, 96, 3000};
    for (unsigned round = 0; round < 4; round++) {
        struct ibv_sge parts[3];
        struct ibv_wc wc;
        uint32_t total = 0;
        fill(p->a.buf, LEN, round);
        for (unsigned i = 0; i < 3; i++) {
            parts[i] = (struct ibv_sge){(uintptr_t)p->a.buf + total, lengths[i], p->a.mr->lkey};
            total += lengths[i];
        }
        DO(want(&p->b, 0, 2 * LEN, 1));
        ibv_wr_start(qp);
        request(qp, 2, IBV_SEND_SIGNALED);
        ibv_wr_send(qp);
        ibv_wr_set_sge_list(qp, 3, parts);
        scribble(parts, sizeof parts);
        DO(complete(qp, 1, total, 0));
        DO(reap_run(&p->a, 1, 2, IBV_WC_SEND, 0));
        DO(reap(p->b.cq, &wc, 1));
        if (wc.status == IBV_WC_SUCCESS && wc.byte_len == 3 * lengths[0])
            return skip("the provider takes the first SGE's length for each (rdma-core 406cd2ad)");
        WC(&wc, &p->b, 1, IBV_WC_RECV, total);
        SAME(p->b.buf, total, round, "sent data");
    }
    return true;
}

/* Inline data is copied by the call that sets it. librxe before rdma-core 62 sends nothing of a
 * list of inline data. */
static bool inline_data(bool list) {
    enum { SMALL = 60 };
    if (!supported(IBV_QPT_RC, RC_OPS)) return true;
    OPEN(p, .send_ops = RC_OPS, .inline_data = 64);
    struct ibv_qp_ex *qp = p->a.qpx;
    for (unsigned round = 0; round < 8; round++) {
        uint8_t stack[SMALL];
        memset(p->b.buf, 0xbb, DEPTH * 64);
        ibv_wr_start(qp);
        for (unsigned i = 0; i < DEPTH; i++) {
            fill(stack, SMALL, round * 100 + i);
            request(qp, i, IBV_SEND_SIGNALED | IBV_SEND_INLINE);
            ibv_wr_rdma_write(qp, p->b.mr->rkey, (uintptr_t)p->b.buf + i * 64);
            if (!list)
                ibv_wr_set_inline_data(qp, stack, SMALL);
            else {
                struct ibv_data_buf parts[3] = {
                    {stack, 5}, {stack + 5, 1}, {stack + 6, SMALL - 6}};
                ibv_wr_set_inline_data_list(qp, COUNT(parts), parts);
                scribble(parts, sizeof parts);
            }
            scribble(stack, SMALL);
        }
        DO(complete(qp, DEPTH, DEPTH * SMALL, 0));
        DO(reap_run(&p->a, DEPTH, 0, IBV_WC_RDMA_WRITE, 0));
        if (list && not_all(p->b.buf, DEPTH * 64, 0xbb) == SIZE_MAX)
            return skip("the provider sends lists of inline data empty (rdma-core 1e8ed0af)");
        for (unsigned i = 0; i < DEPTH; i++) {
            SAME(p->b.buf + i * 64, SMALL, round * 100 + i, "inline data");
            UNTOUCHED(p->b.buf + i * 64 + SMALL, 4, 0xbb, "after inline data");
        }
    }
    return true;
}

static bool wr_inline(void) { return inline_data(false); }
static bool wr_inline_list(void) { return inline_data(true); }

/* Aborted batches leave nothing, also between complete ones and when they fill the queue. */
static bool wr_abort(void) {
    if (!supported(IBV_QPT_RC, RC_OPS)) return true;
    OPEN(p, .send_ops = RC_OPS);
    struct ibv_qp_ex *qp = p->a.qpx;
    fill(p->a.buf, LEN, 1);
    fill(p->a.buf + LEN, LEN, 2);
    for (unsigned round = 0; round < 40; round++) {
        ibv_wr_start(qp);
        for (unsigned i = 0; i < 40; i++) {
            request(qp, 5000 + i, IBV_SEND_SIGNALED);
            ibv_wr_rdma_write(qp, p->b.mr->rkey, (uintptr_t)p->b.buf + LEN);
            ibv_wr_set_sge(qp, p->a.mr->lkey, (uintptr_t)p->a.buf + LEN, LEN);
        }
        ibv_wr_abort(qp);
        memset(p->b.buf, 0xbb, LEN);
        ibv_wr_start(qp);
        request(qp, round, IBV_SEND_SIGNALED);
        ibv_wr_rdma_write(qp, p->b.mr->rkey, (uintptr_t)p->b.buf);
        ibv_wr_set_sge(qp, p->a.mr->lkey, (uintptr_t)p->a.buf, LEN);
        DO(complete(qp, 1, LEN, 0));
        DO(reap_run(&p->a, 1, round, IBV_WC_RDMA_WRITE, 0));
        SAME(p->b.buf, LEN, 1, "written data");
    }
    UNTOUCHED(p->b.buf + LEN, LEN, 0xbb, "what aborted batches were to write");
    return quiet(p->a.cq, 20);
}

/* More than fits: the batch is refused as a whole and nothing of it is sent. */
static bool wr_overflow(void) {
    if (!supported(IBV_QPT_RC, RC_OPS)) return true;
    OPEN(p, .send_ops = RC_OPS, .send_wr = 16, .cqe = 1024);
    struct ibv_qp_ex *qp = p->a.qpx;
    enum { MANY = 400 };
    CHECK(p->a.cap.max_send_wr < MANY, "max_send_wr %u", p->a.cap.max_send_wr);
    fill(p->a.buf, LEN, 1);
    ibv_wr_start(qp);
    for (unsigned i = 0; i < MANY; i++) {
        request(qp, i, IBV_SEND_SIGNALED);
        ibv_wr_rdma_write(qp, p->b.mr->rkey, (uintptr_t)p->b.buf + LEN);
        ibv_wr_set_sge(qp, p->a.mr->lkey, (uintptr_t)p->a.buf, 64);
    }
    int error = ibv_wr_complete(qp);
    if (sabotaged(S_ACCEPT)) error = 0;
    /* mlx5 says ENOMEM, rxe ENOSPC. */
    CHECK(error == ENOMEM || error == ENOSPC, "a batch of %d in a queue of %u gives %d", MANY,
          p->a.cap.max_send_wr, error);
    DO(quiet(p->a.cq, 50));
    UNTOUCHED(p->b.buf + LEN, 64, 0xbb, "what the refused batch was to write");
    ibv_wr_start(qp);
    request(qp, 1000, IBV_SEND_SIGNALED);
    ibv_wr_rdma_write(qp, p->b.mr->rkey, (uintptr_t)p->b.buf);
    ibv_wr_set_sge(qp, p->a.mr->lkey, (uintptr_t)p->a.buf, LEN);
    DO(complete(qp, 1, LEN, 0));
    DO(reap_run(&p->a, 1, 1000, IBV_WC_RDMA_WRITE, 0));
    SAME(p->b.buf, LEN, 1, "written data");
    return true;
}

/* ibv_post_send and ibv_wr_* in turn on one queue pair; unsignaled ones between. */
static bool wr_mixed(void) {
    if (!supported(IBV_QPT_RC, RC_OPS)) return true;
    OPEN(p, .send_ops = RC_OPS);
    struct ibv_qp_ex *qp = p->a.qpx;
    for (unsigned round = 0; round < 20; round++) {
        fill(p->a.buf, DEPTH * LEN, round);
        memset(p->b.buf, 0xbb, DEPTH * LEN);
        for (unsigned i = 0; i < DEPTH; i += 2) {
            DO(put(&p->a, &p->b, (struct ask){IBV_WR_RDMA_WRITE, i * LEN, i * LEN, LEN,
                                              1000 * round + i, IBV_SEND_SIGNALED, 0}));
            ibv_wr_start(qp);
            request(qp, 1000 * round + i + 1, i % 4 ? IBV_SEND_SIGNALED : 0);
            ibv_wr_rdma_write(qp, p->b.mr->rkey, (uintptr_t)p->b.buf + (i + 1) * LEN);
            ibv_wr_set_sge(qp, p->a.mr->lkey, (uintptr_t)p->a.buf + (i + 1) * LEN, LEN);
            DO(complete(qp, 1, LEN, 0));
        }
        for (unsigned i = 0; i < DEPTH; i++) {
            struct ibv_wc wc;
            if (i % 4 == 1) continue;
            DO(reap(p->a.cq, &wc, 1));
            WC(&wc, &p->a, 1000 * round + i, IBV_WC_RDMA_WRITE, 0);
        }
        SAME(p->b.buf, DEPTH * LEN, round, "written data");
    }
    return quiet(p->a.cq, 5);
}

/* Outstanding ibv_wr_* requests are flushed like any. */
static bool wr_error(void) {
    if (!supported(IBV_QPT_RC, RC_OPS)) return true;
    OPEN(p, .send_ops = RC_OPS);
    struct ibv_qp_ex *qp = p->a.qpx;
    ibv_wr_start(qp);
    for (unsigned i = 0; i < 10; i++) {
        request(qp, i, i % 2 ? 0 : IBV_SEND_SIGNALED);
        ibv_wr_send(qp);
        ibv_wr_set_sge(qp, p->a.mr->lkey, (uintptr_t)p->a.buf, LEN);
    }
    DO(complete(qp, 10, 10 * LEN, 0));
    CHECK(!qp_state(p->a.qp, IBV_QPS_ERR), "ERR");
    for (unsigned i = 0; i < 10; i++) {
        struct ibv_wc wc;
        DO(reap(p->a.cq, &wc, 1));
        CHECK(wc.wr_id == i && wc.status != IBV_WC_SUCCESS, "completion %u is of %llu: %s", i,
              (unsigned long long)wc.wr_id, ibv_wc_status_str(wc.status));
        CHECK(wc.qp_num == p->a.qp->qp_num, "queue pair %u", wc.qp_num);
    }
    return quiet(p->a.cq, 20);
}

/* Datagrams by ibv_wr_set_ud_addr. */
static bool wr_ud(void) {
    enum { SMALL = 900, GRH = 40 };
    if (!supported(IBV_QPT_UD, IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM)) return true;
    OPEN(p, .type = IBV_QPT_UD, .send_ops = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM);
    struct ibv_qp_ex *qp = p->a.qpx;
    struct address b;
    address_of(&b, p->b.dev, p->b.qp, NULL);
    struct ibv_ah_attr attr = {0};
    attr_route(&attr, p->a.dev->gid_index, &b, 0);
    struct ibv_ah *ah = ibv_create_ah(p->a.dev->pd, &attr);
    CHECK(ah, "ibv_create_ah: %s", strerror(errno));
    bool passed = true;
    for (unsigned round = 0; passed && round < 8; round++) {
        fill(p->a.buf, SMALL, round);
        passed = want(&p->b, 0, SMALL + GRH, 1) && want(&p->b, LEN, SMALL + GRH, 2);
        ibv_wr_start(qp);
        for (unsigned i = 0; i < 2; i++) {
            request(qp, 10 + i, IBV_SEND_SIGNALED);
            if (i) ibv_wr_send_imm(qp, htobe32(round));
            else ibv_wr_send(qp);
            ibv_wr_set_ud_addr(qp, ah, p->b.qp->qp_num, 0x11111111);
            ibv_wr_set_sge(qp, p->a.mr->lkey, (uintptr_t)p->a.buf, SMALL);
        }
        passed = passed && complete(qp, 2, 2 * SMALL, 0) &&
                 reap_run(&p->a, 2, 10, IBV_WC_SEND, 0) &&
                 reap_run(&p->b, 2, 1, IBV_WC_RECV, SMALL + GRH) &&
                 same(p->b.buf + GRH, SMALL, round, "datagram") &&
                 same(p->b.buf + LEN + GRH, SMALL, round, "datagram with immediate");
    }
    CHECK(!ibv_destroy_ah(ah), "ibv_destroy_ah");
    return passed;
}

const struct check api_checks[] = {
    {"wr_single", wr_single},
    {"wr_batch", wr_batch},
    {"wr_sge_list", wr_sge_list},
    {"wr_inline", wr_inline},
    {"wr_inline_list", wr_inline_list},
    {"wr_abort", wr_abort},
    {"wr_overflow", wr_overflow},
    {"wr_mixed", wr_mixed},
    {"wr_error", wr_error},
    {"wr_ud", wr_ud},
    {NULL, NULL},
};
