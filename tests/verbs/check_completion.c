/* Completion queues: partial polls, events, the extended interface. */
#include "check.h"

#include <fcntl.h>
#include <poll.h>

enum { DEPTH = 32, LEN = 4096 };

static bool write_at(struct pair *p, unsigned i, uint64_t id) {
    return put(&p->a, &p->b, (struct ask){IBV_WR_RDMA_WRITE, i * LEN, i * LEN, LEN, id,
                                          IBV_SEND_SIGNALED, 0});
}

static bool poll_partial(void) {
    static const int rooms[] = {1, 3, 7, 2, 64};
    OPEN(p);
    struct ibv_wc wc[65];
    fill(p->a.buf, DEPTH * LEN, 4);
    for (unsigned round = 0; round < 8; round++) {
        CHECK(ibv_poll_cq(p->a.cq, 64, wc) == 0, "a poll of an empty queue gives something");
        CHECK(ibv_poll_cq(p->a.cq, 0, wc) == 0, "a poll for nothing gives something");
        memset(p->b.buf, 0xbb, DEPTH * LEN);
        for (unsigned i = 0; i < DEPTH; i++) DO(write_at(p, i, round * 100 + i));
        if (round % 2) sleep_ms(5);
        unsigned done = 0;
        const uint64_t until = now_ns() + patience_ms() * 1000000u;
        for (unsigned turn = 0; done < DEPTH; turn++) {
            const int room = rooms[turn % COUNT(rooms)];
            memset(wc, 0x5a, sizeof wc);
            const int got = poll_some(p->a.cq, wc, room);
            CHECK(got >= 0 && got <= room, "a poll for %d gives %d", room, got);
            for (int i = 0; i < got; i++)
                WC(&wc[i], &p->a, round * 100 + done + (unsigned)i, IBV_WC_RDMA_WRITE, 0);
            UNTOUCHED(&wc[got], (64 - (size_t)got) * sizeof *wc, 0x5a, "past what the poll gave");
            done += (unsigned)got;
            CHECK(now_ns() < until, "%u of %d completions came", done, DEPTH);
            if (!got) usleep(100);
        }
        SAME(p->b.buf, DEPTH * LEN, 4, "written data");
    }
    return quiet(p->a.cq, 5);
}

/* Whether an event waits on the channel within so long. */
static bool readable(struct ibv_comp_channel *channel, uint64_t ms) {
    struct pollfd fd = {.fd = channel->fd, .events = POLLIN};
    int n;
    do n = poll(&fd, 1, (int)ms);
    while (n < 0 && errno == EINTR);
    return n == 1;
}

static bool take_event(struct end *end) {
    struct ibv_cq *cq = NULL;
    void *context = NULL;
    CHECK(ibv_get_cq_event(end->channel, &cq, &context) == 0, "ibv_get_cq_event: %s",
          strerror(errno));
    ibv_ack_cq_events(cq, 1);
    CHECK(cq == end->cq, "the event is another queue's");
    CHECK(context == end, "the event's context is another's");
    return true;
}

/* Arm, post, then nothing but poll(2) on the channel: the event must come by itself. */
static bool cq_events(void) {
    OPEN(p, .channel = true);
    fill(p->a.buf, DEPTH * LEN, 14);
    fcntl(p->a.channel->fd, F_SETFL, fcntl(p->a.channel->fd, F_GETFL) | O_NONBLOCK);
    struct ibv_cq *cq;
    void *context;
    CHECK(ibv_get_cq_event(p->a.channel, &cq, &context) == -1 && errno == EAGAIN,
          "an event before anything was asked for");
    for (unsigned i = 0; i < DEPTH; i++) {
        CHECK(!ibv_req_notify_cq(p->a.cq, 0), "ibv_req_notify_cq");
        CHECK(!readable(p->a.channel, i < 2 ? 20 : 0), "an event before there is a completion");
        DO(write_at(p, i, i));
        CHECK(readable(p->a.channel, patience_ms()), "no event for request %u", i);
        DO(take_event(&p->a));
        DO(reap_run(&p->a, 1, i, IBV_WC_RDMA_WRITE, 0));
    }
    SAME(p->b.buf, DEPTH * LEN, 14, "written data");

    /* Not armed: a completion and no event. Armed with it in the queue, the next one counts. */
    DO(write_at(p, 0, 100));
    DO(reap_run(&p->a, 1, 100, IBV_WC_RDMA_WRITE, 0));
    CHECK(!readable(p->a.channel, 20), "an event that was not asked for");
    CHECK(!ibv_req_notify_cq(p->a.cq, 0), "ibv_req_notify_cq");
    for (unsigned i = 0; i < 16; i++) DO(write_at(p, i, 200 + i));
    CHECK(readable(p->a.channel, patience_ms()), "no event for a run of requests");
    DO(take_event(&p->a));
    DO(reap_run(&p->a, 16, 200, IBV_WC_RDMA_WRITE, 0));
    CHECK(!readable(p->a.channel, 20), "a second event for one request");

    /* The receiver's side. */
    CHECK(!ibv_req_notify_cq(p->b.cq, 0), "ibv_req_notify_cq");
    DO(want(&p->b, 0, LEN, 7));
    DO(put(&p->a, NULL, (struct ask){IBV_WR_SEND, LEN, 0, LEN, 300, IBV_SEND_SIGNALED, 0}));
    CHECK(readable(p->b.channel, patience_ms()), "no event at the receiver");
    DO(take_event(&p->b));
    DO(reap_run(&p->b, 1, 7, IBV_WC_RECV, LEN));
    return reap_run(&p->a, 1, 300, IBV_WC_SEND, 0);
}

struct waiter {
    struct end *end;
    unsigned total;
    _Atomic unsigned done;
    bool passed;
};

/* The canonical loop: wait for an event, arm again, poll until empty. */
static void *wait_loop(void *argument) {
    struct waiter *w = argument;
    unsigned done = 0;
    while (done < w->total) {
        if (!take_event(w->end)) return NULL;
        if (ibv_req_notify_cq(w->end->cq, 0)) {
            failed_at(__FILE__, __LINE__, "ibv_req_notify_cq");
            return NULL;
        }
        struct ibv_wc wc;
        int got;
        while ((got = poll_some(w->end->cq, &wc, 1)) > 0) {
            if (!wc_is(&wc, w->end, done, IBV_WC_RDMA_WRITE, 0)) return NULL;
            atomic_store(&w->done, ++done);
        }
        if (got < 0) return NULL;
    }
    w->passed = true;
    return NULL;
}

/* A thread blocks in ibv_get_cq_event while another posts. */
static bool cq_events_thread(void) {
    OPEN(p, .channel = true);
    struct waiter w = {.end = &p->a, .total = 500};
    pthread_t thread;
    fill(p->a.buf, DEPTH * LEN, 15);
    CHECK(!ibv_req_notify_cq(p->a.cq, 0), "ibv_req_notify_cq");
    CHECK(!pthread_create(&thread, NULL, wait_loop, &w), "pthread_create");
    const uint64_t until = now_ns() + patience_ms() * 1000000u;
    bool passed = true;
    for (unsigned i = 0; passed && i < w.total;) {
        if (i - atomic_load(&w.done) < DEPTH) {
            passed = write_at(p, i % DEPTH, i);
            i++;
        } else
            usleep(50);
        if (now_ns() > until) break;
    }
    while (passed && atomic_load(&w.done) < w.total && now_ns() < until) usleep(200);
    if (atomic_load(&w.done) < w.total) {
        /* It is blocked for good: it cannot be joined, nor can its queue be destroyed. */
        failed_at(__FILE__, __LINE__, "%u of %u completions came by events", w.done, w.total);
        pthread_cancel(thread);
    }
    pthread_join(thread, NULL);
    CHECK(passed && w.passed, "the waiting thread stopped early");
    SAME(p->b.buf, DEPTH * LEN, 15, "written data");
    return true;
}

static bool cq_events_solicited(void) {
    OPEN(p, .channel = true);
    fill(p->a.buf, LEN, 16);
    for (unsigned i = 0; i < 8; i++) {
        CHECK(!ibv_req_notify_cq(p->b.cq, 1), "ibv_req_notify_cq");
        DO(want(&p->b, 0, LEN, 2 * i));
        DO(want(&p->b, LEN, LEN, 2 * i + 1));
        DO(put(&p->a, NULL, (struct ask){IBV_WR_SEND, 0, 0, LEN, 2 * i, IBV_SEND_SIGNALED, 0}));
        DO(reap_run(&p->a, 1, 2 * i, IBV_WC_SEND, 0));
        CHECK(!readable(p->b.channel, 30), "an event for a send that solicits none");
        DO(put(&p->a, NULL, (struct ask){IBV_WR_SEND, 0, 0, LEN, 2 * i + 1,
                                         IBV_SEND_SIGNALED | IBV_SEND_SOLICITED, 0}));
        CHECK(readable(p->b.channel, patience_ms()), "no event for a send that solicits one");
        DO(take_event(&p->b));
        DO(reap_run(&p->a, 1, 2 * i + 1, IBV_WC_SEND, 0));
        DO(reap_run(&p->b, 2, 2 * i, IBV_WC_RECV, LEN));
        SAME(p->b.buf, 2, 16, "received data");
    }
    return true;
}

/* Reads one completion of a started batch with every reader it has. */
static void read_ex(struct ibv_cq_ex *cq, struct ibv_wc *wc) {
    memset(wc, 0, sizeof *wc);
    wc->wr_id = cq->wr_id;
    wc->status = cq->status;
    wc->vendor_err = ibv_wc_read_vendor_err(cq);
    wc->qp_num = ibv_wc_read_qp_num(cq);
    if (wc->status != IBV_WC_SUCCESS) return;
    wc->opcode = ibv_wc_read_opcode(cq);
    wc->wc_flags = ibv_wc_read_wc_flags(cq);
    wc->byte_len = ibv_wc_read_byte_len(cq);
    if (wc->wc_flags & IBV_WC_WITH_IMM) wc->imm_data = ibv_wc_read_imm_data(cq);
}

/* n completions by start_poll/next_poll/end_poll, at most `batch` in one go. It never asks for
 * one more than there are to come, and the callers let all of them come first: in librxe before
 * rdma-core 56, ibv_end_poll after an ibv_next_poll without a result takes one too many. What
 * that leaves out is in cq_ex_drain. */
static bool reap_ex(struct end *end, struct ibv_wc *wc, unsigned n, unsigned batch) {
    struct ibv_cq_ex *cq = (struct ibv_cq_ex *)end->cq;
    const uint64_t until = now_ns() + patience_ms() * 1000000u;
    for (unsigned done = 0; done < n;) {
        struct ibv_poll_cq_attr attr = {0};
        int error = ibv_start_poll(cq, &attr);
        if (error == ENOENT) {
            CHECK(now_ns() < until, "%u of %u completions came", done, n);
            usleep(50);
            continue;
        }
        CHECK(!error, "ibv_start_poll: %d", error);
        for (unsigned i = 0; !error && done < n;) {
            read_ex(cq, &wc[done]);
            if (sabotaged(S_ID)) wc[done].wr_id++;
            if (sabotaged(S_OPCODE)) wc[done].opcode = IBV_WC_TSO;
            if (sabotaged(S_STATUS)) wc[done].status = IBV_WC_GENERAL_ERR;
            if (sabotaged(S_LEN)) wc[done].byte_len++;
            if (sabotaged(S_QP)) wc[done].qp_num++;
            if (!sabotaged(S_DROP)) done++;
            if (++i == batch) break;
            error = done < n ? ibv_next_poll(cq) : 0;
        }
        ibv_end_poll(cq);
        CHECK(!error || error == ENOENT, "ibv_next_poll: %d", error);
    }
    return true;
}

static bool cq_ex(void) {
    struct ibv_cq_init_attr_ex attr = {.cqe = 16, .wc_flags = IBV_WC_STANDARD_FLAGS};
    struct ibv_cq_ex *probe = ibv_create_cq_ex(A.ctx, &attr);
    if (!probe) return skip("no extended completion queues: %s", strerror(errno));
    CHECK(!ibv_destroy_cq(ibv_cq_ex_to_cq(probe)), "ibv_destroy_cq");

    OPEN(p, .extended_cq = true, .channel = true, .wc_flags = IBV_WC_STANDARD_FLAGS);
    struct ibv_poll_cq_attr poll_attr = {0};
    struct ibv_wc wc[2 * DEPTH];
    CHECK(ibv_start_poll((struct ibv_cq_ex *)p->a.cq, &poll_attr) == ENOENT,
          "a poll of an empty queue gives something");
    for (unsigned batch = 1; batch <= 64; batch *= 4) {
        fill(p->a.buf, DEPTH * LEN, 90 + batch);
        for (unsigned i = 0; i < DEPTH; i++) DO(want(&p->b, 0, NONE, 100 + i));
        for (unsigned i = 0; i < DEPTH; i++)
            DO(put(&p->a, &p->b, (struct ask){IBV_WR_RDMA_WRITE_WITH_IMM, i * LEN, i * LEN, LEN,
                                              i, IBV_SEND_SIGNALED, 5000 + i}));
        /* The last write is there; its completions are within moments. */
        const uint64_t until = now_ns() + patience_ms() * 1000000u;
        while (mismatch(p->b.buf, DEPTH * LEN, 90 + batch) != SIZE_MAX && now_ns() < until)
            usleep(1000);
        sleep_ms(100 * (unsigned)slowness());
        DO(reap_ex(&p->a, wc, DEPTH, batch));
        for (unsigned i = 0; i < DEPTH; i++) WC(&wc[i], &p->a, i, IBV_WC_RDMA_WRITE, 0);
        DO(reap_ex(&p->b, wc, DEPTH, batch));
        for (unsigned i = 0; i < DEPTH; i++) {
            WC(&wc[i], &p->b, 100 + i, IBV_WC_RECV_RDMA_WITH_IMM, LEN);
            CHECK(be32toh(wc[i].imm_data) == 5000 + i, "immediate %u", be32toh(wc[i].imm_data));
        }
        SAME(p->b.buf, DEPTH * LEN, 90 + batch, "written data");
    }

    /* READs have a length; an event comes for an extended queue too. */
    for (unsigned i = 0; i < 4; i++) {
        CHECK(!ibv_req_notify_cq(p->a.cq, 0), "ibv_req_notify_cq");
        DO(put(&p->a, &p->b, (struct ask){IBV_WR_RDMA_READ, 500000, i * LEN, LEN / 2, 60 + i,
                                          IBV_SEND_SIGNALED, 0}));
        CHECK(readable(p->a.channel, patience_ms()), "no event");
        DO(take_event(&p->a));
        DO(reap_ex(&p->a, wc, 1, 1));
        WC(&wc[0], &p->a, 60 + i, IBV_WC_RDMA_READ, LEN / 2);
    }

    /* A failure and a flush through the readers. */
    struct ibv_send_wr wr, *bad;
    struct ibv_sge sge;
    for (unsigned i = 0; i < 2; i++) {
        fill_request(&wr, &sge, &p->a, &p->b,
                     (struct ask){IBV_WR_RDMA_WRITE, 0, 0, LEN, 70 + i, IBV_SEND_SIGNALED, 0});
        if (i == 0) wr.wr.rdma.rkey ^= 0x5500;
        const int error = post(p->a.qp, &wr, &bad);
        CHECK(!error, "post: %s", strerror(error));
    }
    DO(reap_ex(&p->a, wc, 2, 1));
    CHECK(wc[0].wr_id == 70 && wc[0].status == IBV_WC_REM_ACCESS_ERR, "%llu: %s",
          (unsigned long long)wc[0].wr_id, ibv_wc_status_str(wc[0].status));
    CHECK(wc[1].wr_id == 71 && wc[1].status == IBV_WC_WR_FLUSH_ERR, "%llu: %s",
          (unsigned long long)wc[1].wr_id, ibv_wc_status_str(wc[1].status));
    return true;
}

/* The usual loop: ibv_next_poll until there is no more, ibv_end_poll, and again later. */
static bool cq_ex_drain(void) {
    struct ibv_cq_init_attr_ex attr = {.cqe = 16, .wc_flags = IBV_WC_STANDARD_FLAGS};
    struct ibv_cq_ex *probe = ibv_create_cq_ex(A.ctx, &attr);
    if (!probe) return skip("no extended completion queues: %s", strerror(errno));
    CHECK(!ibv_destroy_cq(ibv_cq_ex_to_cq(probe)), "ibv_destroy_cq");
    OPEN(p, .extended_cq = true, .wc_flags = IBV_WC_STANDARD_FLAGS);
    struct ibv_cq_ex *cq = (struct ibv_cq_ex *)p->a.cq;
    struct ibv_poll_cq_attr probe_attr = {0};
    const uint64_t until = now_ns() + patience_ms() * 1000000u;
    fill(p->a.buf, DEPTH * LEN, 45);
    /* One alone, drained, and the queue must be empty: what is there otherwise is an entry that
     * no completion has been written to. */
    DO(write_at(p, 0, 77));
    while (ibv_start_poll(cq, &probe_attr) == ENOENT) {
        CHECK(now_ns() < until, "no completion came");
        usleep(200);
    }
    CHECK(cq->wr_id == 77 && ibv_next_poll(cq) == ENOENT, "not one completion");
    ibv_end_poll(cq);
    if (ibv_start_poll(cq, &probe_attr) != ENOENT) {
        const uint64_t id = cq->wr_id;
        const uint32_t number = ibv_wc_read_qp_num(cq);
        ibv_end_poll(cq);
        if (id == 0 && number == 0)
            return skip("ibv_end_poll takes one too many after an empty ibv_next_poll (rdma-core "
                        "b78b414e)");
        FAIL("a completion of %llu in an emptied queue", (unsigned long long)id);
    }
    for (unsigned posted = 0, done = 0; done < 10 * DEPTH;) {
        while (posted < 10 * DEPTH && posted - done < DEPTH) {
            DO(write_at(p, posted % DEPTH, posted));
            posted++;
        }
        struct ibv_poll_cq_attr poll_attr = {0};
        int error = ibv_start_poll(cq, &poll_attr);
        if (error == ENOENT) {
            CHECK(now_ns() < until, "%u completions came", done);
            usleep(200);
            continue;
        }
        CHECK(!error, "ibv_start_poll: %d", error);
        for (; !error; error = ibv_next_poll(cq)) {
            struct ibv_wc wc;
            read_ex(cq, &wc);
            if (sabotaged(S_ID)) wc.wr_id++;
            if (done == posted || wc.wr_id != done) {
                ibv_end_poll(cq);
                FAIL("completion of %llu where %u was due", (unsigned long long)wc.wr_id, done);
            }
            WC(&wc, &p->a, done++, IBV_WC_RDMA_WRITE, 0);
        }
        ibv_end_poll(cq);
        CHECK(error == ENOENT, "ibv_next_poll: %d", error);
    }
    SAME(p->b.buf, DEPTH * LEN, 45, "written data");
    return true;
}

/* A queue made by ibv_create_cq_ex polled with ibv_poll_cq. */
static bool cq_ex_plain_poll(void) {
    struct ibv_cq_init_attr_ex attr = {.cqe = 16, .wc_flags = IBV_WC_STANDARD_FLAGS};
    struct ibv_cq_ex *probe = ibv_create_cq_ex(A.ctx, &attr);
    if (!probe) return skip("no extended completion queues: %s", strerror(errno));
    CHECK(!ibv_destroy_cq(ibv_cq_ex_to_cq(probe)), "ibv_destroy_cq");
    OPEN(p, .extended_cq = true, .wc_flags = IBV_WC_STANDARD_FLAGS);
    fill(p->a.buf, DEPTH * LEN, 44);
    for (unsigned i = 0; i < DEPTH; i++) DO(write_at(p, i, i));
    DO(reap_run(&p->a, DEPTH, 0, IBV_WC_RDMA_WRITE, 0));
    SAME(p->b.buf, DEPTH * LEN, 44, "written data");
    return true;
}

/* Sends and receives on queues of their own: QPs whose send and receive CQ differ. */
static bool two_cqs(void) {
    OPEN(p);
    struct ibv_cq *receives = ibv_create_cq(B.ctx, 64, NULL, NULL, 0);
    CHECK(receives, "ibv_create_cq: %s", strerror(errno));
    struct ibv_qp_init_attr attr = {.send_cq = p->b.cq, .recv_cq = receives,
                                    .cap = {.max_send_wr = 32, .max_recv_wr = 32,
                                            .max_send_sge = 1, .max_recv_sge = 1},
                                    .qp_type = IBV_QPT_RC};
    struct ibv_qp *qp = ibv_create_qp(B.pd, &attr);
    CHECK(qp, "ibv_create_qp: %s", strerror(errno));
    /* In the place of the pair's own b. */
    struct ibv_qp *old = p->b.qp;
    p->b.qp = qp;
    CHECK(!ibv_destroy_qp(old), "ibv_destroy_qp");
    CHECK(!qp_state(p->a.qp, IBV_QPS_RESET), "RESET");
    bool passed = pair_connect(p);
    fill(p->a.buf, 16 * LEN, 51);
    fill(p->b.buf + 500000, 16 * LEN, 52);
    struct end receiver = p->b;
    receiver.cq = receives;
    for (unsigned i = 0; passed && i < 16; i++)
        passed = want(&p->b, i * LEN, LEN, 10 + i) && want(&p->a, 500000 + i * LEN, LEN, 30 + i);
    for (unsigned i = 0; passed && i < 16; i++)
        passed = put(&p->a, NULL, (struct ask){IBV_WR_SEND, i * LEN, 0, LEN, 50 + i,
                                               IBV_SEND_SIGNALED, 0}) &&
                 put(&p->b, NULL, (struct ask){IBV_WR_SEND, 500000 + i * LEN, 0, LEN, 70 + i,
                                               IBV_SEND_SIGNALED, 0});
    passed = passed && reap_run(&receiver, 16, 10, IBV_WC_RECV, LEN) &&
             reap_run(&p->b, 16, 70, IBV_WC_SEND, 0);
    /* a's one queue has both kinds, each in its order. */
    uint64_t sent = 50, received = 30;
    for (unsigned i = 0; passed && i < 32; i++) {
        struct ibv_wc wc;
        passed = reap(p->a.cq, &wc, 1);
        const bool receive = passed && (wc.opcode & IBV_WC_RECV);
        passed = passed && wc_is(&wc, &p->a, receive ? received++ : sent++,
                                 receive ? IBV_WC_RECV : IBV_WC_SEND, LEN);
    }
    passed = passed && same(p->b.buf, 16 * LEN, 51, "data to b") &&
             same(p->a.buf + 500000, 16 * LEN, 52, "data to a");
    CHECK(!ibv_destroy_qp(qp), "ibv_destroy_qp");
    p->b.qp = NULL;
    CHECK(!ibv_destroy_cq(receives), "ibv_destroy_cq");
    return passed;
}

const struct check completion_checks[] = {
    {"poll_partial", poll_partial},
    {"two_cqs", two_cqs},
    {"cq_events", cq_events},
    {"cq_events_thread", cq_events_thread},
    {"cq_events_solicited", cq_events_solicited},
    {"cq_ex", cq_ex},
    {"cq_ex_drain", cq_ex_drain},
    {"cq_ex_plain_poll", cq_ex_plain_poll},
    {NULL, NULL},
};
