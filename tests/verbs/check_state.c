/* Queue pairs in trouble: errors, flushes, RESET, SQD, destruction with work pending, leaks. */
#include "check.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>

enum { LEN = 4096 };

/* Sends that a peer without receives keeps outstanding; odd ids are unsignaled. */
static bool stuck_sends(struct end *end, unsigned n, uint64_t first) {
    for (unsigned i = 0; i < n; i++)
        DO(put(end, NULL, (struct ask){IBV_WR_SEND, i * LEN, 0, LEN, first + i,
                                       i % 2 ? 0 : IBV_SEND_SIGNALED, 0}));
    return true;
}

/* A completion with an error for each id, in order. Only id, status and qp_num are defined. */
static bool reap_errors(struct end *end, unsigned n, uint64_t first, const char *when) {
    for (unsigned i = 0; i < n; i++) {
        struct ibv_wc wc;
        DO(reap(end->cq, &wc, 1));
        CHECK(wc.status != IBV_WC_SUCCESS, "%s: request %llu succeeded", when,
              (unsigned long long)wc.wr_id);
        CHECK(i == 0 || wc.status == IBV_WC_WR_FLUSH_ERR, "%s: request %llu: %s", when,
              (unsigned long long)wc.wr_id, ibv_wc_status_str(wc.status));
        CHECK(wc.wr_id == first + i, "%s: completion of %llu where %llu was due", when,
              (unsigned long long)wc.wr_id, (unsigned long long)first + i);
        CHECK(wc.qp_num == end->qp->qp_num, "%s: queue pair %u", when, wc.qp_num);
    }
    return true;
}

static bool state_is(struct ibv_qp *qp, enum ibv_qp_state state) {
    struct ibv_qp_attr attr;
    struct ibv_qp_init_attr init;
    CHECK(!ibv_query_qp(qp, &attr, IBV_QP_STATE, &init), "ibv_query_qp");
    CHECK(attr.qp_state == state, "state %d, not %d", attr.qp_state, state);
    return true;
}

static bool works(struct pair *p, uint64_t seed, uint64_t id) {
    memset(p->b.buf, 0xbb, 16 * LEN);
    fill(p->a.buf, 16 * LEN, seed);
    for (unsigned i = 0; i < 16; i++)
        DO(put(&p->a, &p->b, (struct ask){IBV_WR_RDMA_WRITE, i * LEN, i * LEN, LEN, id + i,
                                          IBV_SEND_SIGNALED, 0}));
    DO(reap_run(&p->a, 16, id, IBV_WC_RDMA_WRITE, 0));
    SAME(p->b.buf, 16 * LEN, seed, "written data");
    return true;
}

static bool reconnect(struct pair *p) {
    CHECK(!qp_state(p->a.qp, IBV_QPS_RESET), "RESET of a");
    /* The packets that a has sent arrive before b is reset. If one arrives meanwhile, SoftRoCE of
       Linux 6.1 may never handle another one of this queue pair, with the library and without
       (docs/notes/verbs-seen-once.md). A guest of busy processors needs longer than 5 ms. */
    sleep_ms(50);
    CHECK(!qp_state(p->b.qp, IBV_QPS_RESET), "RESET of b");
    return pair_connect(p);
}

/* To ERR with work outstanding: an error completion for each request, signaled or not. */
static bool qp_error(void) {
    OPEN(p);
    for (unsigned round = 0; round < 4; round++) {
        DO(works(p, 60 + round, 1000));
        for (unsigned i = 0; i < 4; i++) DO(want(&p->a, 500000, LEN, 900 + i));
        DO(stuck_sends(&p->a, 20, 100));
        if (round % 2) sleep_ms(20);
        CHECK(!qp_state(p->a.qp, IBV_QPS_ERR), "ERR");
        DO(state_is(p->a.qp, IBV_QPS_ERR));
        /* Send and receive queues are flushed each in its order. */
        uint64_t send = 100, receive = 900;
        for (unsigned i = 0; i < 24; i++) {
            struct ibv_wc wc;
            DO(reap(p->a.cq, &wc, 1));
            CHECK(wc.status != IBV_WC_SUCCESS, "request %llu succeeded",
                  (unsigned long long)wc.wr_id);
            uint64_t *due = wc.wr_id >= 900 ? &receive : &send;
            CHECK(wc.wr_id == *due, "completion of %llu where %llu was due",
                  (unsigned long long)wc.wr_id, (unsigned long long)*due);
            ++*due;
            CHECK(wc.qp_num == p->a.qp->qp_num, "queue pair %u", wc.qp_num);
        }
        CHECK(send == 120 && receive == 904, "%llu sends and %llu receives flushed",
              (unsigned long long)send - 100, (unsigned long long)receive - 900);
        DO(quiet(p->a.cq, 20));
        DO(reconnect(p));
    }
    return works(p, 99, 2000);
}

/* Posts in ERR are taken and flushed. */
static bool qp_error_post(void) {
    OPEN(p);
    DO(works(p, 3, 0));
    CHECK(!qp_state(p->a.qp, IBV_QPS_ERR), "ERR");
    for (unsigned round = 0; round < 3; round++) {
        DO(stuck_sends(&p->a, 5, 10));
        DO(reap_errors(&p->a, 5, 10, "posted in ERR"));
    }
    DO(quiet(p->a.cq, 20));
    DO(reconnect(p));
    return works(p, 4, 100);
}

/* The wrong rkey fails its request, flushes those behind it, and harms none before it. */
static bool access_error(void) {
    OPEN(p);
    for (unsigned round = 0; round < 3; round++) {
        struct ibv_send_wr wr[8], *bad;
        struct ibv_sge sge[8];
        struct ibv_wc wc[8];
        memset(p->b.buf, 0xbb, 8 * LEN);
        fill(p->a.buf, 8 * LEN, 70 + round);
        for (unsigned i = 0; i < 8; i++) {
            /* The third is wrong; of those behind it, some are unsignaled. */
            fill_request(&wr[i], &sge[i], &p->a, &p->b,
                         (struct ask){IBV_WR_RDMA_WRITE, i * LEN, i * LEN, LEN, 10 + i,
                                      i == 5 || i == 2 ? 0 : IBV_SEND_SIGNALED, 0});
            if (i == 2) wr[i].wr.rdma.rkey ^= 0x5500;
            if (i == 2 && round == 1) {
                wr[i].wr.rdma.rkey ^= 0x5500;
                wr[i].wr.rdma.remote_addr = (uintptr_t)p->b.buf + p->b.len - 16;
            }
            if (round == 2) {
                const int error = post(p->a.qp, &wr[i], &bad);
                CHECK(!error, "post: %s", strerror(error));
            } else
                wr[i].next = i < 7 ? &wr[i + 1] : NULL;
        }
        if (round < 2) {
            const int error = post(p->a.qp, wr, &bad);
            CHECK(!error, "post: %s", strerror(error));
        }
        scribble(wr, sizeof wr);
        DO(reap(p->a.cq, wc, 8));
        WC(&wc[0], &p->a, 10, IBV_WC_RDMA_WRITE, 0);
        WC(&wc[1], &p->a, 11, IBV_WC_RDMA_WRITE, 0);
        for (unsigned i = 2; i < 8; i++) {
            const enum ibv_wc_status due = i == 2 ? IBV_WC_REM_ACCESS_ERR : IBV_WC_WR_FLUSH_ERR;
            CHECK(wc[i].wr_id == 10 + i, "completion of %llu where %u was due",
                  (unsigned long long)wc[i].wr_id, 10 + i);
            CHECK(wc[i].status == due, "request %u: %s, not %s", 10 + i,
                  ibv_wc_status_str(wc[i].status), ibv_wc_status_str(due));
        }
        DO(state_is(p->a.qp, IBV_QPS_ERR));
        SAME(p->b.buf, 2 * LEN, 70 + round, "the writes before the wrong one");
        UNTOUCHED(p->b.buf + 2 * LEN, 6 * LEN, 0xbb, "the wrong write and those behind it");
        DO(quiet(p->a.cq, 5));
        DO(reconnect(p));
    }
    return works(p, 5, 100);
}

/* RESET forgets outstanding work without completions, and the queue pair serves again. */
static bool qp_reset(void) {
    OPEN(p);
    for (unsigned round = 0; round < 12; round++) {
        DO(works(p, 80 + round, 1000));
        for (unsigned i = 0; i < 4; i++) DO(want(&p->a, 500000, LEN, 900 + i));
        DO(stuck_sends(&p->a, 30, 100));
        DO(reconnect(p));
        DO(quiet(p->a.cq, 20));
        /* The forgotten sends must not arrive now. */
        DO(want(&p->b, 600000, LEN, 700));
        DO(quiet(p->b.cq, 20));
        memset(p->a.buf, 0x11, LEN);
        fill(p->a.buf + 200000, LEN, 333);
        DO(put(&p->a, NULL,
               (struct ask){IBV_WR_SEND, 200000, 0, LEN, 800, IBV_SEND_SIGNALED, 0}));
        DO(reap_run(&p->b, 1, 700, IBV_WC_RECV, LEN));
        DO(reap_run(&p->a, 1, 800, IBV_WC_SEND, 0));
        SAME(p->b.buf + 600000, LEN, 333, "the first send after RESET");
    }
    /* The whole depth is there again after RESET. */
    DO(stuck_sends(&p->a, p->a.cap.max_send_wr, 0));
    DO(reconnect(p));
    for (unsigned i = 0; i < 64; i++) DO(want(&p->b, 0, LEN, i));
    for (unsigned i = 0; i < 64; i++)
        DO(put(&p->a, NULL, (struct ask){IBV_WR_SEND, 0, 0, LEN, i, IBV_SEND_SIGNALED, 0}));
    DO(reap_run(&p->b, 64, 0, IBV_WC_RECV, LEN));
    return reap_run(&p->a, 64, 0, IBV_WC_SEND, 0);
}

/* Waits for an asynchronous event of this kind on this queue pair; others are dropped. */
static bool async_event(struct device *dev, enum ibv_event_type type, struct ibv_qp *qp,
                        uint64_t ms) {
    const uint64_t until = now_ns() + ms * 1000000u;
    bool found = false;
    fcntl(dev->ctx->async_fd, F_SETFL, fcntl(dev->ctx->async_fd, F_GETFL) | O_NONBLOCK);
    while (!found) {
        struct ibv_async_event event;
        struct pollfd fd = {.fd = dev->ctx->async_fd, .events = POLLIN};
        const uint64_t now = now_ns();
        if (now >= until) break;
        if (poll(&fd, 1, (int)((until - now) / 1000000u) + 1) <= 0) continue;
        if (ibv_get_async_event(dev->ctx, &event)) continue;
        found = event.event_type == type && event.element.qp == qp;
        ibv_ack_async_event(&event);
    }
    return found;
}

/* SQD: requests in flight finish, others wait, and RTS starts them again. */
static bool sqd(void) {
    OPEN(p, .len = 40 << 20);
    enum { WRITES = 32, EACH = 1 << 20 };
    fill(p->a.buf, WRITES * EACH, 66);
    for (unsigned i = 0; i < WRITES; i++)
        DO(put(&p->a, &p->b, (struct ask){IBV_WR_RDMA_WRITE, i * EACH, i * EACH, EACH, i,
                                          IBV_SEND_SIGNALED, 0}));
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_SQD, .en_sqd_async_notify = 1};
    int error = ibv_modify_qp(p->a.qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY);
    if (error) {
        const int first = error;
        DO(reap_run(&p->a, WRITES, 0, IBV_WC_RDMA_WRITE, 0));
        return skip("RTS→SQD: %s", strerror(first));
    }
    const bool event = async_event(p->a.dev, IBV_EVENT_SQ_DRAINED, p->a.qp, patience_ms() / 2);
    struct ibv_qp_init_attr init;
    CHECK(!ibv_query_qp(p->a.qp, &attr, IBV_QP_STATE, &init), "ibv_query_qp");
    CHECK(attr.qp_state == IBV_QPS_SQD && !attr.sq_draining, "state %d, draining %d, event %d",
          attr.qp_state, attr.sq_draining, event);
    unsigned done = 0;
    struct ibv_wc wc[WRITES + 2];
    for (int got; (got = poll_some(p->a.cq, wc, WRITES)) != 0;) {
        CHECK(got > 0, "ibv_poll_cq: %d", got);
        for (int i = 0; i < got; i++)
            WC(&wc[i], &p->a, done + (unsigned)i, IBV_WC_RDMA_WRITE, 0);
        done += (unsigned)got;
    }
    SAME(p->b.buf, done * EACH, 66, "what completed before the drain");
    /* Drained: nothing more moves, and a request posted now waits. */
    DO(quiet(p->a.cq, 100));
    fill(p->a.buf + WRITES * EACH, 2 * LEN, 67);
    DO(put(&p->a, &p->b, (struct ask){IBV_WR_RDMA_WRITE, WRITES * EACH, WRITES * EACH, LEN, 500,
                                      IBV_SEND_SIGNALED, 0}));
    DO(quiet(p->a.cq, 100));
    error = qp_state(p->a.qp, IBV_QPS_RTS);
    CHECK(!error, "SQD→RTS: %s", strerror(error));
    /* Some providers only look at the queue again at the next post. */
    uint64_t until = now_ns() + 300000000u * slowness();
    int early = 0;
    while (!early && now_ns() < until) {
        early = poll_some(p->a.cq, wc, 1);
        if (!early) usleep(1000);
    }
    DO(put(&p->a, &p->b, (struct ask){IBV_WR_RDMA_WRITE, WRITES * EACH + LEN,
                                      WRITES * EACH + LEN, LEN, 501, IBV_SEND_SIGNALED, 0}));
    const int left = (int)(WRITES - done) + 2;
    DO(reap(p->a.cq, wc + early, left - early));
    for (int i = 0; i < left; i++) {
        const unsigned id = done + (unsigned)i;
        WC(&wc[i], &p->a, id < WRITES ? id : 500 + id - WRITES, IBV_WC_RDMA_WRITE, 0);
    }
    SAME(p->b.buf, WRITES * EACH, 66, "written data");
    SAME(p->b.buf + WRITES * EACH, 2 * LEN, 67, "data posted in and after SQD");
    note("%u of %d done when drained%s; RTS resumes %s", done, WRITES,
         event ? "" : " (no SQ_DRAINED event)", early ? "by itself" : "with the next post");
    return true;
}

/* Destroyed with sends, writes and READs pending: no hang, no completion of another queue pair
 * lost, and the completion queue can go too. */
static bool destroy_pending(void) {
    for (unsigned round = 0; round < 50; round++) {
        OPEN(p, .len = 4 << 20);
        OPEN(q, .share = p);
        /* Not both in one queue pair: SoftRoCE (Linux 6.1) loses completions of others, and references, if
         * one is RESET while a peer keeps it waiting, and then transfers and is destroyed. */
        if (round % 2 == 0) {
            DO(stuck_sends(&p->a, 10, 100));
        } else {
            for (unsigned i = 0; i < 8; i++)
                DO(put(&p->a, &p->b, (struct ask){i % 2 ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE,
                                                  1 << 20, 1 << 20, 1 << 20, 200 + i,
                                                  IBV_SEND_SIGNALED, 0}));
        }
        fill(p->a.buf + (3 << 20), 4 * LEN, round);
        for (unsigned i = 0; i < 4; i++)
            DO(put(&q->a, &q->b, (struct ask){IBV_WR_RDMA_WRITE, (3 << 20) + i * LEN,
                                              (3 << 20) + i * LEN, LEN, i, IBV_SEND_SIGNALED, 0}));
        if (round % 3 == 1) sleep_ms(2);
        const uint32_t gone = p->a.qp->qp_num;
        CHECK(!ibv_destroy_qp(p->a.qp), "ibv_destroy_qp");
        p->a.qp = NULL;
        /* q's four come, in order; p's may or may not have. */
        const uint64_t until = now_ns() + patience_ms() * 1000000u;
        for (uint64_t next = 0; next < 4;) {
            struct ibv_wc wc;
            const int got = poll_some(p->a.cq, &wc, 1);
            CHECK(got >= 0, "ibv_poll_cq: %d", got);
            CHECK(now_ns() < until, "%llu of 4 completions came", (unsigned long long)next);
            if (!got || wc.qp_num == gone) continue;
            WC(&wc, &q->a, next++, IBV_WC_RDMA_WRITE, 0);
        }
        SAME(p->b.buf + (3 << 20), 4 * LEN, round, "the other queue pair's data");
        pair_close(q);
        pair_close(p);
    }
    return true;
}

static unsigned entries(const char *path) {
    DIR *dir = opendir(path);
    unsigned n = 0;
    while (dir && readdir(dir)) n++;
    if (dir) closedir(dir);
    return n;
}

static unsigned lines(const char *path) {
    FILE *file = fopen(path, "re");
    unsigned n = 0;
    for (int c; file && (c = getc(file)) != EOF;) n += c == '\n';
    if (file) fclose(file);
    return n;
}

static long resident_kib(void) {
    FILE *file = fopen("/proc/self/statm", "re");
    long size = 0, resident = 0;
    if (file) {
        if (fscanf(file, "%ld %ld", &size, &resident) != 2) resident = 0;
        fclose(file);
    }
    return resident * (sysconf(_SC_PAGESIZE) / 1024);
}

static bool judge_memory(void) {
#ifdef __SANITIZE_ADDRESS__
    return false; /* freed memory is kept in quarantine */
#else
    return getenv("VERBS_NO_RSS") == NULL;
#endif
}

struct usage {
    unsigned fds, maps, threads;
    long kib;
};

static struct usage usage(void) {
    return (struct usage){entries("/proc/self/fd"), lines("/proc/self/maps"),
                          entries("/proc/self/task"), resident_kib()};
}

/* What is used in common with others or grows once, like the pages of a ring that fill for the first time, is
 * no leak: that grows each time. So the same work is done in several rounds, and the one that adds the
 * least memory is judged. */
enum { ROUNDS = 5 };

static bool no_growth(const struct usage at[ROUNDS + 1], long kib, const char *what) {
    const struct usage *before = &at[0], *after = &at[ROUNDS];
    long least = LONG_MAX;
    char grown[ROUNDS * 12] = "";
    for (int i = 1; i <= ROUNDS; i++) {
        const long by = at[i].kib - at[i - 1].kib;
        if (by < least) least = by;
        const size_t used = strlen(grown);
        snprintf(grown + used, sizeof grown - used, " %+ld", by);
    }
    note("%s: resident%s KiB, mappings %+d", what, grown, (int)after->maps - (int)before->maps);
    CHECK(after->fds == before->fds, "%s: %u descriptors became %u", what, before->fds, after->fds);
    CHECK(after->threads <= before->threads, "%s: %u threads became %u", what, before->threads,
          after->threads);
    if (!judge_memory()) return true;
    CHECK(after->maps <= before->maps + 4, "%s: %u mappings became %u", what, before->maps,
          after->maps);
    CHECK(least <= kib, "%s: resident memory grew by%s KiB", what, grown);
    return true;
}

/* Makes and destroys a queue pair for each end; one in ten is used, half of those with work pending
 * at the end. */
static bool come_and_go(struct pair *p, unsigned i) {
    struct pair *q = pair_open(&(struct options){.share = p, .unconnected = i % 10 != 0});
    if (!q) return false;
    if (i % 10 == 0) {
        fill(p->a.buf, 512, i);
        DO(put(&q->a, &q->b, (struct ask){IBV_WR_RDMA_WRITE, 0, 0, 512, i, IBV_SEND_SIGNALED, 0}));
        DO(reap_run(&q->a, 1, i, IBV_WC_RDMA_WRITE, 0));
        SAME(p->b.buf, 512, i, "written data");
        if (i % 20 == 0) DO(stuck_sends(&q->a, 8, 0));
    }
    pair_close(q);
    /* Nothing of a destroyed queue pair may pile up in the queue. */
    struct ibv_wc wc[16];
    while (i % 20 == 0 && ibv_poll_cq(p->a.cq, 16, wc) > 0) continue;
    return true;
}

static bool device_comes_and_goes(void) {
    struct device again;
    CHECK(!device_open(&again, A.name, A.gid_index), "open");
    struct ibv_cq *cq = ibv_create_cq(again.ctx, 16, NULL, NULL, 0);
    CHECK(cq, "ibv_create_cq");
    CHECK(!ibv_destroy_cq(cq), "ibv_destroy_cq");
    device_close(&again);
    return true;
}

/* Over a thousand queue pairs made and destroyed; then devices opened and closed. The first round warms up.
 * A leak of 400 bytes per queue pair is found. */
static bool leak(void) {
    enum { PAIRS = 240, DEVICES = 20 };
    OPEN(p);
    struct usage at[ROUNDS + 1];
    for (unsigned round = 0, i = 0; round <= ROUNDS; round++) {
        for (unsigned n = 0; n < PAIRS; n++) DO(come_and_go(p, i++));
        at[round] = usage();
    }
    DO(no_growth(at, 192, "240 pairs of queue pairs"));

    for (unsigned round = 0; round <= ROUNDS; round++) {
        for (unsigned n = 0; n < DEVICES; n++) DO(device_comes_and_goes());
        at[round] = usage();
    }
    return no_growth(at, 160, "20 devices");
}

const struct check state_checks[] = {
    {"qp_error", qp_error},
    {"qp_error_post", qp_error_post},
    {"access_error", access_error},
    {"qp_reset", qp_reset},
    {"sqd", sqd},
    {"destroy_pending", destroy_pending},
    {"leak", leak},
    {NULL, NULL},
};
