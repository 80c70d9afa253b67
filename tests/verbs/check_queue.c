/* Properties of a post: the caller may reuse its memory afterwards, lists, refusals, and which
 * requests complete. */
#include "check.h"

enum { DEPTH = 32, LEN = 4096 };

/* The same request, SGEs and list are used again and again, changed right after each post. */
static bool reuse_request(void) {
    OPEN(p);
    struct ibv_send_wr wr[4], *bad;
    struct ibv_sge sge[4][2];
    fill(p->a.buf, 2 * DEPTH * LEN, 5);
    for (unsigned i = 0; i < DEPTH; i += 4) {
        for (unsigned j = 0; j < 4; j++) {
            const size_t at = (i + j) * LEN;
            fill_request(&wr[j], sge[j], &p->a, &p->b,
                         (struct ask){IBV_WR_RDMA_WRITE, at, at, 100, i + j, IBV_SEND_SIGNALED, 0});
            sge[j][1] = (struct ibv_sge){(uintptr_t)p->a.buf + at + 100, LEN - 100,
                                         p->a.mr->lkey};
            wr[j].num_sge = 2;
            wr[j].next = j < 3 ? &wr[j + 1] : NULL;
        }
        const int error = post(p->a.qp, wr, &bad);
        /* First plausible but wrong, which a shallow copy would obey, then junk. */
        for (unsigned j = 0; j < 4; j++) {
            wr[j].wr.rdma.remote_addr = (uintptr_t)p->b.buf + 900000;
            wr[j].wr_id = 99999;
            sge[j][0].addr = sge[j][1].addr = (uintptr_t)p->a.buf + 800000;
            __asm__ volatile("" : : "r"(wr), "r"(sge) : "memory");
        }
        if (i % 8) {
            scribble(wr, sizeof wr);
            scribble(sge, sizeof sge);
        }
        CHECK(!error, "post: %s", strerror(error));
    }
    DO(reap_run(&p->a, DEPTH, 0, IBV_WC_RDMA_WRITE, 0));
    SAME(p->b.buf, DEPTH * LEN, 5, "written data");
    UNTOUCHED(p->b.buf + 900000, LEN, 0xbb, "where the overwritten requests point");
    return true;
}

/* The list and its SGEs lie on the heap and are freed (and unmapped) right after the post. */
static bool reuse_freed(void) {
    OPEN(p);
    fill(p->a.buf, DEPTH * LEN, 6);
    struct ibv_send_wr *wr = calloc(DEPTH, sizeof *wr), *bad;
    struct ibv_sge *sge = calloc(DEPTH, sizeof *sge);
    for (unsigned i = 0; i < DEPTH; i++) {
        fill_request(&wr[i], &sge[i], &p->a, &p->b,
                     (struct ask){IBV_WR_RDMA_WRITE, i * LEN, i * LEN, LEN, i,
                                  IBV_SEND_SIGNALED, 0});
        wr[i].next = i + 1 < DEPTH ? &wr[i + 1] : NULL;
    }
    const int error = post(p->a.qp, wr, &bad);
    scribble(wr, DEPTH * sizeof *wr);
    scribble(sge, DEPTH * sizeof *sge);
    free(wr);
    free(sge);
    CHECK(!error, "post: %s", strerror(error));
    DO(reap_run(&p->a, DEPTH, 0, IBV_WC_RDMA_WRITE, 0));
    SAME(p->b.buf, DEPTH * LEN, 6, "written data");
    return true;
}

/* Inline payload belongs to the caller again once the post has returned, and needs no lkey. */
static bool reuse_inline(void) {
    enum { SMALL = 60 };
    OPEN(p, .inline_data = 64);
    CHECK(p->a.cap.max_inline_data >= 64, "max_inline_data %u", p->a.cap.max_inline_data);
    uint8_t *stack = malloc(SMALL);
    for (unsigned i = 0; i < DEPTH; i++) DO(want(&p->b, 100000 + i * 64, 64, 50 + i));
    for (unsigned i = 0; i < 2 * DEPTH; i++) {
        struct ibv_send_wr wr, *bad;
        struct ibv_sge sge[2];
        const bool send = i % 2;
        fill(stack, SMALL, i);
        fill_request(&wr, sge, &p->a, &p->b,
                     (struct ask){send ? IBV_WR_SEND : IBV_WR_RDMA_WRITE, 0, i * 64, SMALL, i,
                                  IBV_SEND_SIGNALED | IBV_SEND_INLINE, 0});
        sge[0] = (struct ibv_sge){(uintptr_t)stack, 17, 0xdead};
        sge[1] = (struct ibv_sge){(uintptr_t)stack + 17, SMALL - 17, 0xdead};
        wr.num_sge = 2;
        const int error = post(p->a.qp, &wr, &bad);
        scribble(stack, SMALL);
        scribble(sge, sizeof sge);
        scribble(&wr, sizeof wr);
        CHECK(!error, "post: %s", strerror(error));
    }
    free(stack);
    struct ibv_wc wc[2 * DEPTH];
    DO(reap(p->a.cq, wc, 2 * DEPTH));
    for (unsigned i = 0; i < 2 * DEPTH; i++)
        WC(&wc[i], &p->a, i, i % 2 ? IBV_WC_SEND : IBV_WC_RDMA_WRITE, 0);
    DO(reap_run(&p->b, DEPTH, 50, IBV_WC_RECV, SMALL));
    for (unsigned i = 0; i < 2 * DEPTH; i++)
        SAME(i % 2 ? p->b.buf + 100000 + i / 2 * 64 : p->b.buf + i * 64, SMALL, i, "inline data");
    return true;
}

static void build_list(struct pair *p, struct ibv_send_wr *wr, struct ibv_sge *sge, unsigned n,
                       uint64_t first) {
    for (unsigned i = 0; i < n; i++) {
        fill_request(&wr[i], &sge[i], &p->a, &p->b,
                     (struct ask){IBV_WR_RDMA_WRITE, i * LEN, i * LEN, LEN, first + i,
                                  IBV_SEND_SIGNALED, 0});
        wr[i].next = i + 1 < n ? &wr[i + 1] : NULL;
    }
}

static bool post_list(void) {
    OPEN(p);
    struct ibv_send_wr wr[DEPTH], *bad;
    struct ibv_sge sge[DEPTH];
    for (unsigned round = 0; round < 8; round++) {
        fill(p->a.buf, DEPTH * LEN, 20 + round);
        build_list(p, wr, sge, DEPTH, 1000 * round);
        const int error = post(p->a.qp, wr, &bad);
        scribble(wr, sizeof wr);
        scribble(sge, sizeof sge);
        CHECK(!error, "post: %s", strerror(error));
        DO(reap_run(&p->a, DEPTH, 1000 * round, IBV_WC_RDMA_WRITE, 0));
        SAME(p->b.buf, DEPTH * LEN, 20 + round, "written data");
    }
    /* An empty list is fine or refused, but takes nothing and breaks nothing. */
    bad = NULL;
    (void)ibv_post_send(p->a.qp, NULL, &bad);
    return quiet(p->a.cq, 5);
}

/* The 20th of 32 cannot be: the 19 before it are executed, it is named, the rest is not taken. */
static bool post_list_invalid(void) {
    OPEN(p, .inline_data = 64);
    enum { WRONG = 19 };
    for (unsigned kind = 0; kind < 3; kind++) {
        const unsigned wrong = kind == 2 ? 0 : WRONG;
        struct ibv_send_wr wr[DEPTH], *bad;
        struct ibv_sge sge[DEPTH], many[64];
        memset(p->b.buf, 0xbb, DEPTH * LEN);
        fill(p->a.buf, DEPTH * LEN, 30 + kind);
        build_list(p, wr, sge, DEPTH, 100 * kind);
        if (kind != 1) { /* one SGE too many */
            CHECK(p->a.cap.max_send_sge < COUNT(many), "max_send_sge %u", p->a.cap.max_send_sge);
            for (unsigned i = 0; i < COUNT(many); i++)
                many[i] = (struct ibv_sge){(uintptr_t)p->a.buf + i, 1, p->a.mr->lkey};
            wr[wrong].sg_list = many;
            wr[wrong].num_sge = (int)p->a.cap.max_send_sge + 1;
        } else { /* too much inline data */
            wr[wrong].send_flags |= IBV_SEND_INLINE;
            sge[wrong].length = p->a.cap.max_inline_data + 1;
        }
        int error = post(p->a.qp, wr, &bad);
        CHECK(error == EINVAL || error == ENOMEM, "kind %u: the post gives %d, not EINVAL", kind,
              error);
        CHECK(bad == &wr[wrong], "kind %u: bad_wr is request %td, not %u", kind,
              bad ? bad - wr : (ptrdiff_t)-1, wrong);
        if (wrong) DO(reap_run(&p->a, (int)wrong, 100 * kind, IBV_WC_RDMA_WRITE, 0));
        DO(quiet(p->a.cq, 20));
        SAME(p->b.buf, wrong * LEN, 30 + kind, "the requests before the invalid one");
        UNTOUCHED(p->b.buf + wrong * LEN, (DEPTH - wrong) * LEN, 0xbb,
                  "the invalid request and those after it");
        /* Mended, the rest goes through. */
        wr[wrong].sg_list = &sge[wrong];
        wr[wrong].num_sge = 1;
        wr[wrong].send_flags = IBV_SEND_SIGNALED;
        sge[wrong].length = LEN;
        error = post(p->a.qp, &wr[wrong], &bad);
        CHECK(!error, "the mended list: %s", strerror(error));
        DO(reap_run(&p->a, (int)(DEPTH - wrong), 100 * kind + wrong, IBV_WC_RDMA_WRITE, 0));
        SAME(p->b.buf, DEPTH * LEN, 30 + kind, "the whole list");
    }
    return true;
}

/* Only each sixteenth completes; the queue's room comes back with it. */
static bool unsignaled(void) {
    OPEN(p, .len = 4 << 20);
    enum { TOTAL = 640, CHAIN = 16 };
    fill(p->a.buf, TOTAL * LEN, 8);
    unsigned posted = 0, done = 0;
    while (done < TOTAL) {
        while (posted < TOTAL && posted - done < 3 * CHAIN) {
            const bool last = posted % CHAIN == CHAIN - 1;
            DO(put(&p->a, &p->b, (struct ask){IBV_WR_RDMA_WRITE, posted * LEN, posted * LEN, LEN,
                                              posted, last ? IBV_SEND_SIGNALED : 0, 0}));
            posted++;
        }
        done += CHAIN;
        DO(reap_run(&p->a, 1, done - 1, IBV_WC_RDMA_WRITE, 0));
        CHECK(memcmp(p->b.buf + (done - CHAIN) * LEN, p->a.buf + (done - CHAIN) * LEN,
                     CHAIN * LEN) == 0,
              "the chain before completion %u", done - 1);
    }
    SAME(p->b.buf, TOTAL * LEN, 8, "written data");
    return quiet(p->a.cq, 5);
}

/* sq_sig_all: every request completes, whatever its flags. */
static bool sig_all(void) {
    OPEN(p, .sig_all = true);
    fill(p->a.buf, DEPTH * LEN, 11);
    for (unsigned i = 0; i < DEPTH; i++)
        DO(put(&p->a, &p->b, (struct ask){IBV_WR_RDMA_WRITE, i * LEN, i * LEN, LEN, i,
                                          i % 3 ? 0 : IBV_SEND_SIGNALED, 0}));
    DO(reap_run(&p->a, DEPTH, 0, IBV_WC_RDMA_WRITE, 0));
    SAME(p->b.buf, DEPTH * LEN, 11, "written data");
    return quiet(p->a.cq, 5);
}

/* Sends to a peer without receives stay outstanding, so that the queue fills for certain. */
static bool send_numbered(struct end *end, uint64_t i, unsigned flags, int *error) {
    struct ibv_send_wr wr, *bad;
    struct ibv_sge sge;
    fill(end->buf + i * 32, 32, i);
    fill_request(&wr, &sge, end, NULL, (struct ask){IBV_WR_SEND, i * 32, 0, 32, i, flags, 0});
    *error = post(end->qp, &wr, &bad);
    CHECK(*error == 0 || bad == &wr, "bad_wr is not the refused request");
    CHECK(*error == 0 || *error == ENOMEM, "refused with %s", strerror(*error));
    return true;
}

static bool receive_numbered(struct end *end, uint64_t from, uint64_t to) {
    for (uint64_t i = from; i < to;) {
        const uint64_t n = to - i < 32 ? to - i : 32;
        for (uint64_t j = i; j < i + n; j++) DO(want(end, j * 32, 32, j));
        DO(reap_run(end, (int)n, i, IBV_WC_RECV, 32));
        for (uint64_t j = i; j < i + n; j++) SAME(end->buf + j * 32, 32, j, "sent data");
        i += n;
    }
    return true;
}

static bool sq_overflow(void) {
    OPEN(p, .cqe = 2048);
    const uint64_t room = p->a.cap.max_send_wr;
    uint64_t taken = 0;
    int error = 0;
    /* A strict limit has to be exact, also for a program that waits before its first poll: until then
     * the library can't know whether it will see the program's polls. */
    const uint64_t most = strict_sq ? room : 4 * room;
    while (taken < most) {
        DO(send_numbered(&p->a, taken, IBV_SEND_SIGNALED, &error));
        if (error) break;
        taken++;
    }
    note("max_send_wr %llu, %llu taken%s", (unsigned long long)room, (unsigned long long)taken,
         error ? "" : " without a refusal");
    CHECK(taken >= room, "only %llu of %llu taken", (unsigned long long)taken,
          (unsigned long long)room);
    if (!strict_sq) {
        DO(receive_numbered(&p->b, 0, taken));
        DO(reap_run(&p->a, (int)taken, 0, IBV_WC_SEND, 0));
        return quiet(p->a.cq, 20);
    }
    usleep(300 * 1000);

    /* Ten done and polled: of a list of twenty, ten fit. */
    DO(receive_numbered(&p->b, 0, 10));
    DO(reap_run(&p->a, 10, 0, IBV_WC_SEND, 0));
    struct ibv_send_wr wr[20], *bad;
    struct ibv_sge sge[20];
    for (unsigned i = 0; i < 20; i++) {
        fill(p->a.buf + (taken + i) * 32, 32, taken + i);
        fill_request(&wr[i], &sge[i], &p->a, NULL,
                     (struct ask){IBV_WR_SEND, (taken + i) * 32, 0, 32, taken + i,
                                  IBV_SEND_SIGNALED, 0});
        wr[i].next = i < 19 ? &wr[i + 1] : NULL;
    }
    error = post(p->a.qp, wr, &bad);
    CHECK(error == ENOMEM, "twenty into a room of ten: %d", error);
    CHECK(bad == &wr[10], "bad_wr is request %td, not 10", bad ? bad - wr : (ptrdiff_t)-1);
    taken += 10;
    DO(send_numbered(&p->a, taken, IBV_SEND_SIGNALED, &error));
    CHECK(error == ENOMEM, "one more than max_send_wr was taken");
    DO(receive_numbered(&p->b, 10, taken));
    DO(reap_run(&p->a, (int)taken - 10, 10, IBV_WC_SEND, 0));

    /* Unsignaled requests hold their room until a signaled one behind them has been polled. In front
     * of them so many that are not received that the rest has to wait: those that need not may go at
     * once, and then the provider counts. */
    const uint64_t stuck = room * 4 / 5;
    for (unsigned round = 0; round < 2; round++) {
        const uint64_t first = taken, last = first + room - 1;
        for (; taken <= last; taken++) {
            const bool signaled = taken < first + stuck || taken == last;
            DO(send_numbered(&p->a, taken, signaled ? IBV_SEND_SIGNALED : 0, &error));
            CHECK(!error, "refused with %llu outstanding", (unsigned long long)(taken - first));
        }
        DO(send_numbered(&p->a, taken, 0, &error));
        CHECK(error == ENOMEM, "more than max_send_wr unsignaled requests were taken");
        DO(receive_numbered(&p->b, first, taken));
        DO(reap_run(&p->a, (int)stuck, first, IBV_WC_SEND, 0));
        DO(reap_run(&p->a, 1, last, IBV_WC_SEND, 0));
    }
    return quiet(p->a.cq, 20);
}

/* Full and emptied again and again: room is neither lost nor invented. */
static bool sq_cycles(void) {
    OPEN(p, .send_wr = 16, .cqe = 512);
    const unsigned room = p->a.cap.max_send_wr;
    fill(p->a.buf, room * 512, 77);
    for (unsigned round = 0; round < 100; round++) {
        memset(p->b.buf, 0xbb, room * 512);
        for (unsigned i = 0; i < room; i++)
            DO(put(&p->a, &p->b,
                   (struct ask){IBV_WR_RDMA_WRITE, i * 512, i * 512, 512, round * 1000 + i,
                                round % 2 || i + 1 == room ? IBV_SEND_SIGNALED : 0, 0}));
        if (round % 2) DO(reap_run(&p->a, (int)room, round * 1000, IBV_WC_RDMA_WRITE, 0));
        else DO(reap_run(&p->a, 1, round * 1000 + room - 1, IBV_WC_RDMA_WRITE, 0));
        SAME(p->b.buf, room * 512, 77, "written data");
    }
    return true;
}

static bool many_qps(void) {
    enum { QPS = 200, EACH = 2000 };
    OPEN(base, .cqe = 1024);
    struct pair *p[QPS];
    fill(base->a.buf, QPS * EACH, 21);
    for (unsigned i = 0; i < QPS; i++) {
        p[i] = pair_open(&(struct options){.share = base, .send_wr = 4, .recv_wr = 1});
        if (!p[i]) return false;
    }
    for (unsigned i = 0; i < QPS; i++)
        DO(put(&p[i]->a, &p[i]->b, (struct ask){IBV_WR_RDMA_WRITE, i * EACH, i * EACH, EACH, i,
                                                IBV_SEND_SIGNALED, 0}));
    bool seen[QPS] = {false};
    for (unsigned i = 0; i < QPS; i++) {
        struct ibv_wc wc;
        DO(reap(base->a.cq, &wc, 1));
        CHECK(wc.wr_id < QPS && !seen[wc.wr_id], "request %llu", (unsigned long long)wc.wr_id);
        seen[wc.wr_id] = true;
        WC(&wc, &p[wc.wr_id]->a, wc.wr_id, IBV_WC_RDMA_WRITE, 0);
    }
    SAME(base->b.buf, QPS * EACH, 21, "written data");
    return quiet(base->a.cq, 5);
}

/* What a thread of NCCL posts for GPUs (RMA_IB_PROXY): for a put with a signal one list of an
 * unsignaled RDMA WRITE and a FETCH_AND_ADD, at most 256 operations a queue pair, one queue pair a
 * context, all on one completion queue that is polled for four at a time. Newer releases link the
 * lists of several operations. NCCL does not repeat a post, so that an error ends the job. */
enum { CONTEXTS = 4, PUTS = 256, PUT = 2500, SIGNAL = 3 << 20, SCRATCH = SIGNAL + 4096, BATCH = 8 };

/* Place of a put. Puts that are under way together have different ones. */
static size_t place(unsigned context, unsigned n) {
    return ((size_t)(n % PUTS) * CONTEXTS + context) * PUT;
}

static void signalled_put(struct ibv_send_wr *wr, struct ibv_sge *sge, const struct pair *p,
                          unsigned context, unsigned n) {
    const size_t at = place(context, n);
    const uint64_t id = context * PUTS + n % PUTS;
    fill_request(wr, sge, &p->a, &p->b, (struct ask){IBV_WR_RDMA_WRITE, at, at, PUT, id, 0, 0});
    fill_request(wr + 1, sge + 1, &p->a, NULL,
                 (struct ask){IBV_WR_ATOMIC_FETCH_AND_ADD, SCRATCH + context * 8, 0, 8, id,
                              IBV_SEND_SIGNALED, 0});
    wr[1].wr.atomic.remote_addr = (uintptr_t)p->b.buf + SIGNAL + context * 8;
    wr[1].wr.atomic.rkey = p->b.mr->rkey;
    wr[1].wr.atomic.compare_add = 1;
    wr->next = wr + 1;
}

static bool nccl_rma_batches(struct pair *const p[CONTEXTS], unsigned batch) {
    enum { TOTAL = PUTS + 64 };
    unsigned posted[CONTEXTS] = {0}, done[CONTEXTS] = {0};
    const uint64_t until = now_ns() + 3 * patience_ms() * 1000000u;
    memset(p[0]->b.buf, 0xbb, SIGNAL);
    memset(p[0]->b.buf + SIGNAL, 0, CONTEXTS * 8);
    for (unsigned left = CONTEXTS * TOTAL; left;) {
        for (unsigned context = 0; context < CONTEXTS; context++) {
            if (posted[context] + batch > TOTAL || posted[context] + batch - done[context] > PUTS)
                continue;
            struct ibv_send_wr wr[2 * BATCH], *bad;
            struct ibv_sge sge[2 * BATCH];
            for (unsigned i = 0; i < batch; i++) {
                signalled_put(wr + 2 * i, sge + 2 * i, p[context], context, posted[context] + i);
                if (i) wr[2 * i - 1].next = wr + 2 * i;
            }
            const int error = post(p[context]->a.qp, wr, &bad);
            scribble(wr, sizeof wr);
            scribble(sge, sizeof sge);
            CHECK(!error, "%s after %u operations, %u of them done", strerror(error),
                  posted[context], done[context]);
            posted[context] += batch;
        }
        struct ibv_wc wc[4];
        /* All lists are posted before the first poll, as far as NCCL's bound allows. */
        const bool full = posted[0] == TOTAL || posted[0] + batch - done[0] > PUTS;
        const int got = full ? poll_some(p[0]->a.cq, wc, 4) : 0;
        CHECK(got >= 0, "ibv_poll_cq: %d", got);
        for (int i = 0; i < got; i++) {
            const unsigned context = (unsigned)(wc[i].wr_id / PUTS) % CONTEXTS;
            WC(&wc[i], &p[context]->a, context * PUTS + done[context] % PUTS, IBV_WC_FETCH_ADD, 8);
            /* The data are there before the signal, and each put brings its own. */
            const size_t at = place(context, done[context]);
            CHECK(!memcmp(p[0]->b.buf + at, p[0]->a.buf + at, PUT), "context %u: put %u", context,
                  done[context]);
            memset(p[0]->b.buf + at, 0xbb, PUT);
            done[context]++;
            left--;
            uint64_t signal;
            memcpy(&signal, p[0]->b.buf + SIGNAL + context * 8, 8);
            CHECK(signal >= done[context], "context %u: %u done, signal %llu", context,
                  done[context], (unsigned long long)signal);
        }
        CHECK(now_ns() < until, "%u operations are not done", left);
    }
    for (unsigned context = 0; context < CONTEXTS; context++) {
        uint64_t signal;
        memcpy(&signal, p[0]->b.buf + SIGNAL + context * 8, 8);
        CHECK(signal == TOTAL, "context %u: signal %llu", context, (unsigned long long)signal);
    }
    return quiet(p[0]->a.cq, 5);
}

static bool nccl_rma(void) {
    struct pair *p[CONTEXTS] = {NULL};
    for (unsigned context = 0; context < CONTEXTS; context++) {
        struct options options = {.len = 4 << 20, .send_wr = 2 * PUTS, .cqe = CONTEXTS * PUTS};
        options.share = p[0];
        p[context] = pair_open(&options);
        if (!p[context]) return false;
    }
    fill(p[0]->a.buf, 64 * CONTEXTS * PUT, 31);
    return nccl_rma_batches(p, 1) && nccl_rma_batches(p, BATCH);
}

const struct check queue_checks[] = {
    {"reuse_request", reuse_request},
    {"reuse_freed", reuse_freed},
    {"reuse_inline", reuse_inline},
    {"post_list", post_list},
    {"post_list_invalid", post_list_invalid},
    {"unsignaled", unsignaled},
    {"sig_all", sig_all},
    {"sq_overflow", sq_overflow},
    {"sq_cycles", sq_cycles},
    {"many_qps", many_qps},
    {"nccl_rma", nccl_rma},
    {NULL, NULL},
};
