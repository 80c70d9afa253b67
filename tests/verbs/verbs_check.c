/* Checks of the verbs as a program sees them, against a device or against a library in
 * between. One line of JSON a subtest; exit status 1 if any of them failed, 2 on a hang.
 * work_requests and bytes count what ibv_post_send (or ibv_wr_complete) took, READs and atomics
 * included; read_bytes is the RDMA READ part of bytes. */
#include "check.h"

#include <fcntl.h>
#include <getopt.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/wait.h>

struct device A, B;
bool strict_sq;

static const char *current = "start";
static char gid_argument[16];
static struct pair *pairs;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char failure[512], remark[512];
static bool skipped;
static _Atomic uint64_t requests, payload, read_payload;
static enum sabotage sabotage;
static _Atomic bool sabotage_done;

uint64_t patience_ms(void) {
    const char *text = getenv("VERBS_TIMEOUT_MS");
    return (text ? strtoull(text, NULL, 10) : 20000) * slowness();
}

bool failed_at(const char *file, int line, const char *format, ...) {
    pthread_mutex_lock(&lock);
    if (!*failure) {
        const char *base = strrchr(file, '/');
        const int n = snprintf(failure, sizeof failure, "%s:%d: ", base ? base + 1 : file, line);
        va_list args;
        va_start(args, format);
        vsnprintf(failure + n, sizeof failure - (size_t)n, format, args);
        va_end(args);
    }
    pthread_mutex_unlock(&lock);
    return false;
}

bool skip(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(remark, sizeof remark, format, args);
    va_end(args);
    skipped = true;
    return true;
}

void note(const char *format, ...) {
    va_list args;
    va_start(args, format);
    const size_t n = strlen(remark);
    if (n) snprintf(remark + n, sizeof remark - n, "; ");
    vsnprintf(remark + strlen(remark), sizeof remark - strlen(remark), format, args);
    va_end(args);
}

bool sabotaged(enum sabotage kind) {
    return sabotage == kind && !atomic_exchange(&sabotage_done, true);
}

void count(uint64_t wrs, uint64_t bytes, uint64_t read_bytes) {
    atomic_fetch_add(&requests, wrs);
    atomic_fetch_add(&payload, bytes);
    atomic_fetch_add(&read_payload, read_bytes);
}

/* Lengths are summed before the post: afterwards the list may no longer be valid. */
int post(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad) {
    enum { LONGEST = 1024 };
    uint64_t bytes[LONGEST], reads[LONGEST];
    const struct ibv_send_wr *at[LONGEST];
    int n = 0;
    for (const struct ibv_send_wr *w = wr; w && n < LONGEST; w = w->next, n++) {
        uint64_t sum = 0;
        /* An invalid request's SGEs need not exist. */
        for (int i = 0; i < w->num_sge && i < 64; i++) sum += w->sg_list[i].length;
        bytes[n] = sum;
        reads[n] = w->opcode == IBV_WR_RDMA_READ ? sum : 0;
        at[n] = w;
    }
    *bad = NULL;
    int error = ibv_post_send(qp, wr, bad);
    if (error && sabotaged(S_ACCEPT)) error = 0;
    for (int i = 0; i < n; i++) {
        if (error && at[i] == *bad) break;
        if (error && !*bad) break;
        count(1, bytes[i], reads[i]);
    }
    if (error && *bad && sabotaged(S_BAD)) *bad = (*bad)->next;
    return error;
}

void fill_request(struct ibv_send_wr *wr, struct ibv_sge *sge, const struct end *from,
                  const struct end *to, struct ask ask) {
    const bool bare = ask.len == NONE;
    memset(wr, 0, sizeof *wr);
    memset(sge, 0, sizeof *sge);
    if (!bare) {
        sge->addr = (uintptr_t)from->buf + ask.from;
        sge->length = ask.len;
        sge->lkey = from->mr->lkey;
        wr->sg_list = sge;
        wr->num_sge = 1;
    }
    wr->wr_id = ask.id;
    wr->opcode = ask.op;
    wr->send_flags = ask.flags;
    wr->imm_data = htobe32(ask.imm);
    if (to) {
        wr->wr.rdma.remote_addr = (uintptr_t)to->buf + ask.to;
        wr->wr.rdma.rkey = to->mr->rkey;
    }
}

bool put(struct end *from, struct end *to, struct ask ask) {
    struct ibv_send_wr wr, *bad;
    struct ibv_sge sge;
    fill_request(&wr, &sge, from, to, ask);
    const int error = post(from->qp, &wr, &bad);
    scribble(&wr, sizeof wr);
    scribble(&sge, sizeof sge);
    CHECK(!error, "post of request %llu: %s", (unsigned long long)ask.id, strerror(error));
    return true;
}

bool want(struct end *end, size_t at, uint32_t len, uint64_t id) {
    struct ibv_sge sge = {(uintptr_t)end->buf + at, len, end->mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = id, .sg_list = &sge, .num_sge = 1}, *bad = NULL;
    if (len == NONE) wr.num_sge = 0;
    const int error = end->qp->srq ? ibv_post_srq_recv(end->qp->srq, &wr, &bad)
                                   : ibv_post_recv(end->qp, &wr, &bad);
    scribble(&wr, sizeof wr);
    scribble(&sge, sizeof sge);
    CHECK(!error, "post of receive %llu: %s", (unsigned long long)id, strerror(error));
    return true;
}

/* S_ORDER holds a completion back until the next one of the same queue has been given. */
static struct ibv_wc held;
static struct ibv_cq *held_of;

int poll_some(struct ibv_cq *cq, struct ibv_wc *wc, int n) {
    if (sabotage == S_ORDER && held_of == cq && n > 0) {
        const int got = ibv_poll_cq(cq, 1, wc);
        if (got <= 0) return got;
        const struct ibv_wc next = wc[0];
        if (n >= 2) {
            wc[1] = held;
            held_of = NULL;
            return 2;
        }
        if (held.wr_id == next.wr_id && held.qp_num == next.qp_num) return 1;
        held_of = NULL; /* gives one, loses one: wrong either way */
        return 1;
    }
    int got = ibv_poll_cq(cq, n, wc);
    if (sabotage == S_NONE || got <= 0) return got;
    if (sabotaged(S_DROP)) memmove(wc, wc + 1, sizeof *wc * (size_t)--got);
    else if (got >= 2 && sabotaged(S_ORDER)) {
        const struct ibv_wc first = wc[0];
        wc[0] = wc[1];
        wc[1] = first;
    } else if (got == 1 && sabotaged(S_ORDER)) {
        held = wc[0];
        held_of = cq;
        return 0;
    } else if (sabotaged(S_ID)) wc[0].wr_id ^= 1u << 20;
    else if (sabotaged(S_STATUS))
        wc[0].status = wc[0].status ? IBV_WC_SUCCESS : IBV_WC_GENERAL_ERR;
    else if (sabotaged(S_QP)) wc[0].qp_num ^= 0x400000;
    else if (wc[0].status == IBV_WC_SUCCESS) {
        if (sabotaged(S_OPCODE)) wc[0].opcode = IBV_WC_TSO;
        else if (((wc[0].opcode & IBV_WC_RECV) || wc[0].opcode == IBV_WC_RDMA_READ) &&
                 sabotaged(S_LEN))
            wc[0].byte_len++;
    }
    return got;
}

bool reap(struct ibv_cq *cq, struct ibv_wc *wc, int n) {
    const uint64_t until = now_ns() + patience_ms() * 1000000u;
    for (int got = 0; got < n;) {
        const int more = poll_some(cq, wc + got, n - got);
        CHECK(more >= 0, "ibv_poll_cq: %d", more);
        got += more;
        if (more) continue;
        CHECK(now_ns() < until, "%d of %d completions came", got, n);
        usleep(20);
    }
    return true;
}

bool quiet(struct ibv_cq *cq, unsigned ms) {
    struct ibv_wc wc;
    const uint64_t until = now_ns() + (uint64_t)ms * 1000000u;
    do {
        const int got = poll_some(cq, &wc, 1);
        CHECK(got == 0, "a completion of request %llu that should not be: %s",
              (unsigned long long)wc.wr_id, ibv_wc_status_str(wc.status));
        usleep(1000);
    } while (now_ns() < until);
    return true;
}

bool wc_is(const struct ibv_wc *wc, const struct end *end, uint64_t id, enum ibv_wc_opcode op,
           uint32_t byte_len) {
    CHECK(wc->status == IBV_WC_SUCCESS, "request %llu: %s where %llu was to succeed",
          (unsigned long long)wc->wr_id, ibv_wc_status_str(wc->status), (unsigned long long)id);
    CHECK(wc->wr_id == id, "completion of %llu where %llu was due",
          (unsigned long long)wc->wr_id, (unsigned long long)id);
    CHECK(wc->opcode == op, "request %llu: opcode %d, not %d", (unsigned long long)id, wc->opcode,
          op);
    CHECK(wc->qp_num == end->qp->qp_num, "request %llu: queue pair %u, not %u",
          (unsigned long long)id, wc->qp_num, end->qp->qp_num);
    const bool defined = (op & IBV_WC_RECV) || op == IBV_WC_RDMA_READ ||
                         op == IBV_WC_COMP_SWAP || op == IBV_WC_FETCH_ADD;
    CHECK(!defined || wc->byte_len == byte_len, "request %llu: %u bytes, not %u",
          (unsigned long long)id, wc->byte_len, byte_len);
    return true;
}

bool reap_run(struct end *end, int n, uint64_t first, enum ibv_wc_opcode op, uint32_t byte_len) {
    struct ibv_wc wc[32];
    for (int done = 0; done < n;) {
        const int now = n - done < 32 ? n - done : 32;
        DO(reap(end->cq, wc, now));
        for (int i = 0; i < now; i++)
            WC(&wc[i], end, first + (uint64_t)(done + i), op, byte_len);
        done += now;
    }
    return true;
}

bool same(const void *in, size_t len, uint64_t seed, const char *what) {
    if (len && sabotaged(S_DATA)) *((uint8_t *)(uintptr_t)in + len / 2) ^= 0x40;
    const size_t at = mismatch(in, len, seed);
    CHECK(at == SIZE_MAX, "%s: byte %zu of %zu is wrong", what, at, len);
    return true;
}

bool untouched(const void *in, size_t len, uint8_t byte, const char *what) {
    const size_t at = not_all(in, len, byte);
    CHECK(at == SIZE_MAX, "%s: byte %zu of %zu was written", what, at, len);
    return true;
}

static bool end_open(struct end *end, struct device *dev, const struct options *o, bool first) {
    const struct pair *share = o->share;
    end->dev = dev;
    if (share) {
        const struct end *of = first ? &share->a : &share->b;
        end->borrowed = true;
        end->channel = of->channel;
        end->cq = of->cq;
        end->mr = of->mr;
        end->buf = of->buf;
        end->len = of->len;
    } else {
        const int cqe = o->cqe ? o->cqe : 256;
        end->len = o->len ? o->len : 1 << 20;
        end->buf = mmap(NULL, end->len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (end->buf == MAP_FAILED) end->buf = NULL;
        CHECK(end->buf, "mmap: %s", strerror(errno));
        memset(end->buf, first ? 0xaa : 0xbb, end->len);
        end->mr = ibv_reg_mr(dev->pd, end->buf, end->len, ALL_ACCESS);
        CHECK(end->mr, "ibv_reg_mr: %s", strerror(errno));
        if (o->channel) {
            end->channel = ibv_create_comp_channel(dev->ctx);
            CHECK(end->channel, "ibv_create_comp_channel: %s", strerror(errno));
        }
        if (o->extended_cq) {
            struct ibv_cq_init_attr_ex attr = {.cqe = (uint32_t)cqe, .cq_context = end,
                                               .channel = end->channel, .wc_flags = o->wc_flags};
            struct ibv_cq_ex *cq = ibv_create_cq_ex(dev->ctx, &attr);
            CHECK(cq, "ibv_create_cq_ex: %s", strerror(errno));
            end->cq = ibv_cq_ex_to_cq(cq);
        } else {
            end->cq = ibv_create_cq(dev->ctx, cqe, end, end->channel, 0);
            CHECK(end->cq, "ibv_create_cq: %s", strerror(errno));
        }
    }
    const struct ibv_qp_cap cap = {.max_send_wr = o->send_wr ? o->send_wr : 64,
                                   .max_recv_wr = o->recv_wr ? o->recv_wr : 64,
                                   .max_send_sge = o->sge ? o->sge : 4,
                                   .max_recv_sge = o->sge ? o->sge : 4,
                                   .max_inline_data = o->inline_data};
    const enum ibv_qp_type type = o->type ? o->type : IBV_QPT_RC;
    struct ibv_srq *srq = first ? NULL : o->srq;
    if (o->send_ops) {
        struct ibv_qp_init_attr_ex attr = {
            .qp_context = end, .send_cq = end->cq, .recv_cq = end->cq, .srq = srq, .cap = cap,
            .qp_type = type, .sq_sig_all = o->sig_all, .pd = dev->pd,
            .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
            .send_ops_flags = o->send_ops};
        end->qp = ibv_create_qp_ex(dev->ctx, &attr);
        CHECK(end->qp, "ibv_create_qp_ex: %s", strerror(errno));
        end->qpx = ibv_qp_to_qp_ex(end->qp);
        CHECK(end->qpx, "ibv_qp_to_qp_ex gives nothing");
        end->cap = attr.cap;
    } else {
        struct ibv_qp_init_attr attr = {.qp_context = end, .send_cq = end->cq,
                                        .recv_cq = end->cq, .srq = srq, .cap = cap,
                                        .qp_type = type, .sq_sig_all = o->sig_all};
        end->qp = ibv_create_qp(dev->pd, &attr);
        CHECK(end->qp, "ibv_create_qp: %s", strerror(errno));
        end->cap = attr.cap;
    }
    CHECK(end->cap.max_send_wr >= cap.max_send_wr, "max_send_wr %u, less than the %u asked for",
          end->cap.max_send_wr, cap.max_send_wr);
    return true;
}

static void end_close(struct end *end) {
    if (end->qp && ibv_destroy_qp(end->qp))
        failed_at(__FILE__, __LINE__, "ibv_destroy_qp: %s", strerror(errno));
    if (end->borrowed) return;
    if (end->cq) {
        const int error = ibv_destroy_cq(end->cq);
        if (error) failed_at(__FILE__, __LINE__, "ibv_destroy_cq: %s", strerror(error));
    }
    if (end->channel && ibv_destroy_comp_channel(end->channel))
        failed_at(__FILE__, __LINE__, "ibv_destroy_comp_channel: %s", strerror(errno));
    if (end->mr && ibv_dereg_mr(end->mr))
        failed_at(__FILE__, __LINE__, "ibv_dereg_mr: %s", strerror(errno));
    if (end->buf) munmap(end->buf, end->len);
}

bool pair_connect(struct pair *pair) {
    struct address a, b;
    address_of(&a, pair->a.dev, pair->a.qp, NULL);
    address_of(&b, pair->b.dev, pair->b.qp, NULL);
    CHECK(!qp_up(pair->a.qp, pair->a.dev, a.psn, &b, &pair->path), "connecting a");
    CHECK(!qp_up(pair->b.qp, pair->b.dev, b.psn, &a, &pair->path), "connecting b");
    return true;
}

struct pair *pair_open(const struct options *options) {
    struct pair *pair = calloc(1, sizeof *pair);
    pair->next = pairs;
    pairs = pair;
    pair->path = options->path;
    if (end_open(&pair->a, &A, options, true) && end_open(&pair->b, &B, options, false) &&
        (options->unconnected || pair_connect(pair)))
        return pair;
    return NULL;
}

void pair_close(struct pair *pair) {
    for (struct pair **at = &pairs; *at; at = &(*at)->next)
        if (*at == pair) {
            *at = pair->next;
            break;
        }
    end_close(&pair->a);
    end_close(&pair->b);
    free(pair);
}

/* Sharers first: pairs are listed latest first. */
static void close_all(void) {
    while (pairs) pair_close(pairs);
}

static void hang(int signal) {
    char line[512];
    (void)signal;
    const int n = snprintf(line, sizeof line,
                           "{\"test\":\"%s\",\"passed\":false,\"skipped\":false,"
                           "\"work_requests\":%llu,\"bytes\":%llu,\"read_bytes\":%llu,"
                           "\"detail\":\"hung\"}\n",
                           current, (unsigned long long)requests, (unsigned long long)payload,
                           (unsigned long long)read_payload);
    if (write(STDOUT_FILENO, line, (size_t)n) < 0) _exit(3);
    _exit(2);
}

static bool run_one(const struct check *check) {
    current = check->name;
    *failure = *remark = '\0';
    skipped = false;
    requests = payload = read_payload = 0;
    sabotage_done = false;
    held_of = NULL;
    alarm((unsigned)(120 * slowness()));
    const uint64_t from = now_ns();
    bool passed = check->run();
    close_all();
    alarm(0);
    if (*failure) passed = false;
    else if (!passed) snprintf(failure, sizeof failure, "failed without saying why");
    if (getenv("VERBS_TIMES"))
        fprintf(stderr, "%-28s %6.0f ms\n", check->name, (double)(now_ns() - from) / 1e6);
    json_result(check->name, passed, passed && skipped, requests, payload, read_payload,
                passed ? remark : failure);
    return passed;
}

bool again(const char *option, const char *subtest) {
    int pipes[2];
    CHECK(pipe2(pipes, O_CLOEXEC) == 0, "pipe: %s", strerror(errno));
    fflush(stdout);
    const pid_t child = fork();
    CHECK(child >= 0, "fork: %s", strerror(errno));
    if (child == 0) {
        dup2(pipes[1], STDOUT_FILENO);
        execl("/proc/self/exe", "verbs_check", "-a", A.name, "-b", B.name, "-g", gid_argument,
              option, subtest, (char *)NULL);
        _exit(127);
    }
    close(pipes[1]);
    char text[1024] = "";
    size_t len = 0;
    for (;;) {
        const ssize_t n = read(pipes[0], text + len, sizeof text - 1 - len);
        if (n <= 0) break;
        text[len += (size_t)n] = '\0';
    }
    close(pipes[0]);
    int status = 0;
    waitpid(child, &status, 0);
    unsigned long long n = 0, bytes = 0, reads = 0;
    const char *counts = strstr(text, "\"work_requests\":");
    if (counts)
        sscanf(counts, "\"work_requests\":%llu,\"bytes\":%llu,\"read_bytes\":%llu", &n, &bytes,
               &reads);
    count(n, bytes, reads);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %#x; %s", (unsigned)status, text);
    return true;
}

static const struct check *const groups[] = {transfer_checks, queue_checks,  completion_checks,
                                             state_checks,    thread_checks, api_checks};

static int usage(const char *name, int status) {
    fprintf(status ? stderr : stdout,
            "usage: %s [OPTION]... [SUBTEST]...\n"
            "  -a DEVICE, -b DEVICE  the two devices (VERBS_A, VERBS_B; rxe0, rxe1)\n"
            "  -g INDEX              GID index of both (VERBS_GID_INDEX; the IPv4 RoCE v2 one)\n"
            "  -s, --strict-sq       the send queue must refuse at exactly max_send_wr\n"
            "  -f, --fork-init       call ibv_fork_init first\n"
            "  -x, --sabotage KIND   falsify one result, to see the subtest fail: data drop order\n"
            "                        id opcode len status qp bad accept\n"
            "  -l, --list            the subtests\n"
            "VERBS_SLOW=N allows N times as long; VERBS_TIMEOUT_MS is how long a completion may\n"
            "take (20000); VERBS_NO_RSS=1 leaves memory growth unjudged; VERBS_TIMES=1 tells how\n"
            "long each takes on stderr.\n",
            name);
    return status;
}

int main(int argc, char **argv) {
    static const char *const kinds[] = {"",       "data", "drop",   "order", "id",    "opcode",
                                        "len",    "status", "qp",   "bad",   "accept"};
    static const struct option options[] = {{"strict-sq", no_argument, NULL, 's'},
                                            {"fork-init", no_argument, NULL, 'f'},
                                            {"sabotage", required_argument, NULL, 'x'},
                                            {"list", no_argument, NULL, 'l'},
                                            {"help", no_argument, NULL, 'h'},
                                            {NULL, 0, NULL, 0}};
    const char *a = NULL, *b = NULL;
    int gid_index = -1;
    bool fork_init = false;
    for (int c; (c = getopt_long(argc, argv, "a:b:g:sfx:lh", options, NULL)) != -1;) {
        switch (c) {
        case 'a': a = optarg; break;
        case 'b': b = optarg; break;
        case 'g': gid_index = atoi(optarg); break;
        case 's': strict_sq = true; break;
        case 'f': fork_init = true; break;
        case 'x':
            for (size_t i = 1; i < COUNT(kinds); i++)
                if (strcmp(optarg, kinds[i]) == 0) sabotage = (enum sabotage)i;
            if (sabotage == S_NONE) return usage(argv[0], 3);
            break;
        case 'l':
            for (size_t g = 0; g < COUNT(groups); g++)
                for (const struct check *check = groups[g]; check->name; check++) puts(check->name);
            return 0;
        case 'h': return usage(argv[0], 0);
        default: return usage(argv[0], 3);
        }
    }
    for (int i = optind; i < argc; i++) {
        bool known = false;
        for (size_t g = 0; g < COUNT(groups); g++)
            for (const struct check *check = groups[g]; check->name; check++)
                known = known || strcmp(check->name, argv[i]) == 0;
        if (!known) {
            fprintf(stderr, "no subtest %s; --list lists them\n", argv[i]);
            return 3;
        }
    }
    if (fork_init && ibv_fork_init()) {
        perror("ibv_fork_init");
        return 3;
    }
    if (device_open(&A, device_name(a, "VERBS_A", "rxe0"), gid_index) ||
        device_open(&B, device_name(b, "VERBS_B", "rxe1"), gid_index))
        return 3;
    snprintf(gid_argument, sizeof gid_argument, "%d", gid_index);
    signal(SIGALRM, hang);
    signal(SIGPIPE, SIG_IGN);

    bool passed = true;
    for (size_t g = 0; g < COUNT(groups); g++)
        for (const struct check *check = groups[g]; check->name; check++) {
            bool chosen = optind == argc;
            for (int i = optind; i < argc; i++)
                chosen = chosen || strcmp(check->name, argv[i]) == 0;
            if (chosen) passed = run_one(check) && passed;
        }
    device_close(&A);
    device_close(&B);
    return passed ? 0 : 1;
}
