/* Threads that post at once, and processes that fork. */
#include "check.h"

#include <signal.h>
#include <sys/wait.h>

enum { LEN = 2048, EACH = 400 };

struct poster {
    struct end *from, *to;
    uint64_t tag;          /* upper half of the wr_id */
    size_t base;           /* where its slots start */
    _Atomic unsigned done; /* completions seen by the poller */
    unsigned window;
    _Atomic bool *stop;
    bool passed;
};

/* EACH writes, each to a slot of its own, at most `window` outstanding. */
static void *post_loop(void *argument) {
    struct poster *me = argument;
    const uint64_t until = now_ns() + patience_ms() * 1000000u;
    for (unsigned i = 0; i < EACH; i++) {
        while (i - atomic_load(&me->done) >= me->window) {
            if (atomic_load(me->stop)) return NULL;
            if (now_ns() > until) {
                failed_at(__FILE__, __LINE__, "no completion for request %u", i);
                return NULL;
            }
            usleep(50);
        }
        const size_t at = me->base + i * LEN;
        if (!put(me->from, me->to, (struct ask){IBV_WR_RDMA_WRITE, at, at, LEN, me->tag << 32 | i,
                                                IBV_SEND_SIGNALED, 0}))
            return NULL;
    }
    me->passed = true;
    return NULL;
}

/* Starts the posters, gives each its completions, and demands each poster's order. */
static bool run_posters(struct poster *posters, unsigned n, struct ibv_cq *cq, uint64_t seed) {
    pthread_t threads[8];
    _Atomic bool stop = false;
    unsigned started = 0, total = 0;
    bool passed = true;
    for (unsigned i = 0; i < n; i++) posters[i].stop = &stop;
    fill(posters[0].from->buf, n * EACH * LEN, seed);
    for (; started < n; started++)
        if (pthread_create(&threads[started], NULL, post_loop, &posters[started])) break;
    passed = started == n;
    const uint64_t until = now_ns() + patience_ms() * 1000000u;
    while (passed && total < n * EACH) {
        struct ibv_wc wc[16];
        const int got = poll_some(cq, wc, 16);
        if (got < 0 || now_ns() > until)
            passed = failed_at(__FILE__, __LINE__, "%u of %u completions came", total, n * EACH);
        for (int i = 0; passed && i < got; i++) {
            const uint64_t tag = wc[i].wr_id >> 32;
            if (tag >= n) {
                passed = failed_at(__FILE__, __LINE__, "completion of %#llx",
                                   (unsigned long long)wc[i].wr_id);
                break;
            }
            struct poster *poster = &posters[tag];
            passed = wc_is(&wc[i], poster->from, tag << 32 | atomic_load(&poster->done),
                           IBV_WC_RDMA_WRITE, 0);
            atomic_fetch_add(&poster->done, 1);
            total++;
        }
        if (!got) usleep(20);
    }
    atomic_store(&stop, true);
    for (unsigned i = 0; i < started; i++) pthread_join(threads[i], NULL);
    for (unsigned i = 0; passed && i < n; i++)
        if (!posters[i].passed) passed = failed_at(__FILE__, __LINE__, "poster %u stopped", i);
    return passed && same(posters[0].to->buf, n * EACH * LEN, seed, "written data");
}

/* Two threads post on one queue pair: each one's requests stay in its order. */
static bool threads_one_qp(void) {
    OPEN(p, .len = 2 * EACH * LEN);
    struct poster posters[2];
    memset(posters, 0, sizeof posters);
    for (unsigned i = 0; i < 2; i++) {
        posters[i].from = &p->a;
        posters[i].to = &p->b;
        posters[i].tag = i;
        posters[i].base = i * EACH * LEN;
        posters[i].window = 24;
    }
    DO(run_posters(posters, 2, p->a.cq, 12));
    return quiet(p->a.cq, 5);
}

/* Four threads, four queue pairs, one completion queue. */
static bool threads_four_qps(void) {
    OPEN(base, .len = 4 * EACH * LEN, .cqe = 1024);
    struct poster posters[4];
    memset(posters, 0, sizeof posters);
    for (unsigned i = 0; i < 4; i++) {
        struct pair *q = i ? pair_open(&(struct options){.share = base}) : base;
        if (!q) return false;
        posters[i].from = &q->a;
        posters[i].to = &q->b;
        posters[i].tag = i;
        posters[i].base = i * EACH * LEN;
        posters[i].window = 48;
    }
    DO(run_posters(posters, 4, base->a.cq, 13));
    return quiet(base->a.cq, 5);
}

struct poller {
    struct ibv_cq *cq;
    _Atomic unsigned *seen; /* per id */
    _Atomic unsigned *total;
    unsigned due;
    uint64_t until;
    uint32_t qp_num;
};

static void *poll_loop(void *argument) {
    struct poller *me = argument;
    while (atomic_load(me->total) < me->due && now_ns() < me->until) {
        struct ibv_wc wc[4];
        const int got = poll_some(me->cq, wc, 4);
        for (int i = 0; i < got; i++) {
            if (wc[i].status != IBV_WC_SUCCESS || wc[i].wr_id >= me->due ||
                wc[i].opcode != IBV_WC_RDMA_WRITE || wc[i].qp_num != me->qp_num) {
                failed_at(__FILE__, __LINE__, "request %llu: %s",
                          (unsigned long long)wc[i].wr_id, ibv_wc_status_str(wc[i].status));
                continue;
            }
            atomic_fetch_add(&me->seen[wc[i].wr_id], 1);
            atomic_fetch_add(me->total, 1);
        }
        if (!got) usleep(20);
    }
    return NULL;
}

/* Two threads poll one completion queue: each completion goes to exactly one of them. */
static bool threads_poll(void) {
    enum { TOTAL = 800 };
    static _Atomic unsigned seen[TOTAL];
    _Atomic unsigned total = 0;
    memset(seen, 0, sizeof seen);
    OPEN(p, .len = TOTAL * LEN);
    fill(p->a.buf, TOTAL * LEN, 19);
    const uint64_t until = now_ns() + patience_ms() * 1000000u;
    struct poller poller = {p->a.cq, seen, &total, TOTAL, until, p->a.qp->qp_num};
    pthread_t threads[2];
    for (unsigned i = 0; i < 2; i++)
        CHECK(!pthread_create(&threads[i], NULL, poll_loop, &poller), "pthread_create");
    bool passed = true;
    for (unsigned i = 0; passed && i < TOTAL && now_ns() < until;) {
        if (i - atomic_load(&total) >= 48) {
            usleep(50);
            continue;
        }
        passed = put(&p->a, &p->b, (struct ask){IBV_WR_RDMA_WRITE, i * LEN, i * LEN, LEN, i,
                                                IBV_SEND_SIGNALED, 0});
        i++;
    }
    for (unsigned i = 0; i < 2; i++) pthread_join(threads[i], NULL);
    DO(passed);
    CHECK(atomic_load(&total) == TOTAL, "%u of %d completions came", total, TOTAL);
    for (unsigned i = 0; i < TOTAL; i++)
        CHECK(seen[i] == 1, "request %u completed %u times", i, seen[i]);
    SAME(p->b.buf, TOTAL * LEN, 19, "written data");
    return quiet(p->a.cq, 5);
}

/* Each thread makes, uses and destroys queue pairs of its own all the while. */
static void *life_loop(void *argument) {
    struct poster *me = argument;
    for (unsigned round = 0; round < 20; round++) {
        struct ibv_cq *cq = ibv_create_cq(A.ctx, 32, NULL, NULL, 0);
        struct ibv_qp_init_attr attr = {.send_cq = cq, .recv_cq = cq,
                                        .cap = {.max_send_wr = 16, .max_recv_wr = 1,
                                                .max_send_sge = 1, .max_recv_sge = 1},
                                        .qp_type = IBV_QPT_RC};
        struct ibv_qp *qp[2] = {NULL, NULL};
        for (int i = 0; cq && i < 2; i++) qp[i] = ibv_create_qp(A.pd, &attr);
        struct address at[2];
        const struct path path = {0};
        bool good = qp[0] && qp[1];
        for (int i = 0; good && i < 2; i++) address_of(&at[i], &A, qp[i], NULL);
        for (int i = 0; good && i < 2; i++)
            good = !qp_up(qp[i], &A, at[i].psn, &at[1 - i], &path);
        struct end end = *me->from;
        end.qp = qp[0];
        end.cq = cq;
        for (unsigned i = 0; good && i < 8; i++)
            good = put(&end, &end, (struct ask){IBV_WR_RDMA_WRITE, me->base, me->base + 500000,
                                                LEN, i, IBV_SEND_SIGNALED, 0});
        good = good && reap_run(&end, 8, 0, IBV_WC_RDMA_WRITE, 0) &&
               memcmp(end.buf + me->base, end.buf + me->base + 500000, LEN) == 0;
        for (int i = 0; i < 2; i++)
            if (qp[i] && ibv_destroy_qp(qp[i])) good = false;
        if (cq && ibv_destroy_cq(cq)) good = false;
        if (!good) {
            failed_at(__FILE__, __LINE__, "thread %u, round %u", (unsigned)me->tag, round);
            return NULL;
        }
    }
    me->passed = true;
    return NULL;
}

static bool threads_create(void) {
    OPEN(p);
    fill(p->a.buf, 4 * LEN, 20);
    struct poster posters[4];
    pthread_t threads[4];
    memset(posters, 0, sizeof posters);
    for (unsigned i = 0; i < 4; i++) {
        posters[i].from = &p->a;
        posters[i].tag = i;
        posters[i].base = i * LEN;
        CHECK(!pthread_create(&threads[i], NULL, life_loop, &posters[i]), "pthread_create");
    }
    bool passed = true;
    for (unsigned i = 0; i < 4; i++) {
        pthread_join(threads[i], NULL);
        passed = passed && posters[i].passed;
    }
    DO(passed);
    SAME(p->a.buf + 500000, 4 * LEN, 20, "written data");
    return true;
}

/* A child that does not end by itself is killed by its own alarm, and seen. */
static bool child_ended(pid_t child, const char *which) {
    int status = 0;
    pid_t ended;
    do ended = waitpid(child, &status, 0);
    while (ended < 0 && errno == EINTR);
    CHECK(ended == child, "waitpid: %s", strerror(errno));
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s: child ended with status %#x%s",
          which, (unsigned)status,
          WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM ? " (it hung)" : "");
    return true;
}

static pid_t fork_child(unsigned kind) {
    fflush(stdout);
    const pid_t child = fork();
    if (child) return child;
    signal(SIGALRM, SIG_DFL);
    alarm((unsigned)(15 * slowness()));
    switch (kind) {
    case 0: _exit(0);
    case 1: /* what any program does after fork: allocate, print to nowhere, end with exit() */
        for (unsigned i = 0; i < 100; i++) {
            void *volatile some = malloc(1000 + i);
            free(some);
        }
        exit(0);
    case 2: { /* verbs that touch nothing of the parent's */
        int n = 0;
        struct ibv_device **list = ibv_get_device_list(&n);
        if (!list || n < 1 || !ibv_get_device_name(list[0])) _exit(4);
        ibv_free_device_list(list);
        if (!ibv_wc_status_str(IBV_WC_SUCCESS)) _exit(5);
        exit(0);
    }
    case 3: /* another program */
        execl("/bin/true", "true", (char *)NULL);
        _exit(6);
    default: { /* a grandchild */
        const pid_t grandchild = fork();
        if (grandchild == 0) _exit(0);
        int status = 0;
        waitpid(grandchild, &status, 0);
        _exit(status ? 7 : 0);
    }
    }
}

/* Forks with requests outstanding and with another thread posting: the children end, and the
 * parent's requests are all executed, once. */
static bool fork_(void) {
    OPEN(p, .len = 4 << 20);
    for (unsigned kind = 0; kind < 5; kind++) {
        fill(p->a.buf, 32 * LEN, 60 + kind);
        memset(p->b.buf, 0xbb, 32 * LEN);
        for (unsigned i = 0; i < 16; i++)
            DO(put(&p->a, &p->b, (struct ask){IBV_WR_RDMA_WRITE, i * LEN, i * LEN, LEN, i,
                                              IBV_SEND_SIGNALED, 0}));
        const pid_t child = fork_child(kind);
        CHECK(child > 0, "fork: %s", strerror(errno));
        for (unsigned i = 16; i < 32; i++)
            DO(put(&p->a, &p->b, (struct ask){IBV_WR_RDMA_WRITE, i * LEN, i * LEN, LEN, i,
                                              IBV_SEND_SIGNALED, 0}));
        DO(reap_run(&p->a, 32, 0, IBV_WC_RDMA_WRITE, 0));
        DO(child_ended(child, "fork"));
        SAME(p->b.buf, 32 * LEN, 60 + kind, "written data");
    }

    struct poster poster;
    memset(&poster, 0, sizeof poster);
    _Atomic bool stop = false;
    poster.from = &p->a;
    poster.to = &p->b;
    poster.window = 32;
    poster.stop = &stop;
    pthread_t thread;
    fill(p->a.buf, EACH * LEN, 90);
    CHECK(!pthread_create(&thread, NULL, post_loop, &poster), "pthread_create");
    bool passed = true;
    unsigned done = 0, forks = 0;
    const uint64_t until = now_ns() + patience_ms() * 1000000u;
    while (passed && done < EACH && now_ns() < until) {
        struct ibv_wc wc[8];
        const int got = poll_some(p->a.cq, wc, 8);
        for (int i = 0; passed && i < got; i++) {
            passed = wc_is(&wc[i], &p->a, done, IBV_WC_RDMA_WRITE, 0);
            atomic_store(&poster.done, ++done);
        }
        if (passed && forks < 12 && done >= forks * EACH / 12) {
            const pid_t child = fork_child(forks++ % 5);
            passed = child > 0 && child_ended(child, "fork beside a posting thread");
        }
    }
    atomic_store(&stop, true);
    pthread_join(thread, NULL);
    DO(passed);
    CHECK(done == EACH && poster.passed, "%u of %d completions came", done, EACH);
    SAME(p->b.buf, EACH * LEN, 90, "written data");
    return quiet(p->a.cq, 5);
}

static bool fork_init(void) { return again("-f", "fork"); }

const struct check thread_checks[] = {
    {"threads_one_qp", threads_one_qp},
    {"threads_four_qps", threads_four_qps},
    {"threads_poll", threads_poll},
    {"threads_create", threads_create},
    {"fork", fork_},
    {"fork_init", fork_init},
    {NULL, NULL},
};
