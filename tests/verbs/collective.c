/* A stream like a collective's between two processes. In each round the client writes its
 * messages to the server, an immediate on the last; the server answers with as much; the round
 * is over when the answer is there and both sides' writes are done. Then the client "computes"
 * until the next period. Each side prints one line of JSON; times are the client's.
 *
 *   collective --server -b rxe1 --port 7471 &
 *   collective --connect 127.0.0.1 -a rxe0 --port 7471 --rounds 100 --bytes 262144 */
#include "common.h"

#include <getopt.h>

struct plan {
    uint64_t rounds, bytes, messages, period_us, signal_every;
    uint32_t tclass, corrupt;
};

/* Its memory: what goes out, then what comes in in even and in odd rounds, since the peer may be one
 * round ahead while the last one is being verified. */
static struct endpoint side;
static struct plan plan;
static uint64_t requests, payload, outstanding, unacknowledged;
static uint64_t heard; /* immediates */
static char detail[256];

static void stop(const char *what, int error) {
    if (!*detail) snprintf(detail, sizeof detail, "%s: %s", what, strerror(error));
}

static bool poll_once(void) {
    struct ibv_wc wc[16];
    const int got = ibv_poll_cq(side.cq, 16, wc);
    if (got < 0) stop("ibv_poll_cq", EIO);
    for (int i = 0; i < got; i++) {
        if (wc[i].status != IBV_WC_SUCCESS) {
            if (!*detail)
                snprintf(detail, sizeof detail, "request %llu: %s",
                         (unsigned long long)wc[i].wr_id, ibv_wc_status_str(wc[i].status));
            return false;
        }
        if (wc[i].opcode & IBV_WC_RECV) {
            if (be32toh(wc[i].imm_data) != (uint32_t)heard && !*detail)
                snprintf(detail, sizeof detail, "immediate %u where %llu was due",
                         be32toh(wc[i].imm_data), (unsigned long long)heard);
            heard++;
            struct ibv_recv_wr wr = {0}, *bad;
            if (ibv_post_recv(side.qp, &wr, &bad)) stop("ibv_post_recv", errno);
        } else {
            /* A signaled write takes those before it along; wr_id says how many. */
            if (wc[i].wr_id > outstanding) stop("more completions than writes", EPROTO);
            outstanding -= wc[i].wr_id;
        }
    }
    return !*detail;
}

static uint64_t incoming(uint64_t round) { return plan.bytes * (1 + round % 2); }

static uint64_t patience_ns(void) {
    const char *text = getenv("VERBS_TIMEOUT_MS");
    return (text ? strtoull(text, NULL, 10) : 60000) * slowness() * 1000000u;
}

/* Looks at the peer now and then; false when waiting is over. */
static bool patient(uint64_t until, const char *what) {
    static unsigned turns;
    usleep(1);
    if (++turns % 256 == 0 && peer_lost(side.fd)) stop("the peer stopped", ECONNRESET);
    if (now_ns() > until) stop(what, ETIMEDOUT);
    return !*detail;
}

/* One side's half of a round: every message, then the completions in the course of poll_once. */
static bool write_round(uint64_t round) {
    const uint64_t until = now_ns() + patience_ns();
    uint64_t at = 0;
    for (uint64_t i = 0; i < plan.messages; i++) {
        const bool last = i + 1 == plan.messages;
        const uint64_t len = last ? plan.bytes - at : plan.bytes / plan.messages;
        struct ibv_sge sge = {(uintptr_t)side.buf + at, (uint32_t)len, side.mr->lkey};
        struct ibv_send_wr wr = {.sg_list = &sge, .num_sge = len ? 1 : 0,
                                 .opcode = last ? IBV_WR_RDMA_WRITE_WITH_IMM : IBV_WR_RDMA_WRITE,
                                 .imm_data = htobe32((uint32_t)round)};
        struct ibv_send_wr *bad;
        wr.wr.rdma.remote_addr = side.peer.addr + incoming(round) + at;
        wr.wr.rdma.rkey = side.peer.rkey;
        unacknowledged++;
        if (last || unacknowledged == plan.signal_every) {
            wr.send_flags = IBV_SEND_SIGNALED;
            wr.wr_id = unacknowledged;
            unacknowledged = 0;
        }
        while (outstanding >= 2 * plan.signal_every) {
            if (!poll_once() || !patient(until, "own writes")) return false;
        }
        const int error = ibv_post_send(side.qp, &wr, &bad);
        if (error) {
            stop("ibv_post_send", error);
            return false;
        }
        outstanding++;
        requests++;
        payload += len;
        at += len;
    }
    return true;
}

static bool wait_for(uint64_t immediates, bool writes) {
    const uint64_t until = now_ns() + patience_ns();
    while (heard < immediates || (writes && outstanding)) {
        if (!poll_once()) return false;
        if (!patient(until, heard < immediates ? "the peer's round" : "own writes")) return false;
    }
    return true;
}

static bool verify(uint64_t round, uint64_t whose) {
    uint8_t *in = side.buf + incoming(round);
    if (plan.corrupt && round == plan.rounds / 2) in[plan.bytes / 2] ^= 1;
    const size_t at = mismatch(in, plan.bytes, 2 * round + whose);
    if (at != SIZE_MAX && !*detail)
        snprintf(detail, sizeof detail, "round %llu: byte %zu is wrong",
                 (unsigned long long)round, at);
    return at == SIZE_MAX;
}

static int usage(const char *name, int status) {
    fprintf(status ? stderr : stdout,
            "usage: %s --server [-b DEVICE] [--port N]\n"
            "       %s --connect HOST [-a DEVICE] [--port N] [OPTION]...\n"
            "  -a, -b, -d DEVICE   (VERBS_A: rxe0 for the client, VERBS_B: rxe1 for the server)\n"
            "  -g INDEX            GID index (VERBS_GID_INDEX; the IPv4 RoCE v2 one)\n"
            "  --port N            of the rendezvous (7471)\n"
            "  --rounds N          (100)        --bytes N        per round and direction (262144)\n"
            "  --messages N        per round (4)  --period-us N  (10000)\n"
            "  --tclass N          traffic class of both queue pairs (0)\n"
            "  --signal-every N    signal each Nth write (16)\n"
            "  --samples           print each round's microseconds\n"
            "  --corrupt           falsify a byte before it is verified, to see the failure\n",
            name, name);
    return status;
}

int main(int argc, char **argv) {
    enum { PORT = 1000, ROUNDS, BYTES, MESSAGES, PERIOD, TCLASS, SIGNAL, SAMPLES, CORRUPT };
    static const struct option options[] = {
        {"server", no_argument, NULL, 's'},        {"connect", required_argument, NULL, 'c'},
        {"port", required_argument, NULL, PORT},   {"rounds", required_argument, NULL, ROUNDS},
        {"bytes", required_argument, NULL, BYTES}, {"messages", required_argument, NULL, MESSAGES},
        {"period-us", required_argument, NULL, PERIOD},
        {"tclass", required_argument, NULL, TCLASS},
        {"signal-every", required_argument, NULL, SIGNAL},
        {"samples", no_argument, NULL, SAMPLES},   {"corrupt", no_argument, NULL, CORRUPT},
        {"help", no_argument, NULL, 'h'},          {NULL, 0, NULL, 0}};
    const char *name = NULL, *host = NULL;
    int gid_index = -1, port = 7471;
    bool server = false, samples = false;
    plan = (struct plan){.rounds = 100, .bytes = 262144, .messages = 4, .period_us = 10000,
                         .signal_every = 16};
    for (int c; (c = getopt_long(argc, argv, "a:b:d:g:sc:h", options, NULL)) != -1;) {
        switch (c) {
        case 'a': case 'b': case 'd': name = optarg; break;
        case 'g': gid_index = atoi(optarg); break;
        case 's': server = true; break;
        case 'c': host = optarg; break;
        case PORT: port = atoi(optarg); break;
        case ROUNDS: plan.rounds = strtoull(optarg, NULL, 10); break;
        case BYTES: plan.bytes = strtoull(optarg, NULL, 10); break;
        case MESSAGES: plan.messages = strtoull(optarg, NULL, 10); break;
        case PERIOD: plan.period_us = strtoull(optarg, NULL, 10); break;
        case TCLASS: plan.tclass = (uint32_t)strtoul(optarg, NULL, 0); break;
        case SIGNAL: plan.signal_every = strtoull(optarg, NULL, 10); break;
        case SAMPLES: samples = true; break;
        case CORRUPT: plan.corrupt = 1; break;
        default: return usage(argv[0], c == 'h' ? 0 : 3);
        }
    }
    if (server == (host != NULL)) return usage(argv[0], 3);
    if (!plan.rounds || !plan.messages || plan.bytes < plan.messages || !plan.signal_every ||
        plan.tclass > 255 || plan.bytes / plan.messages > 1u << 30) {
        fprintf(stderr, "%s: rounds, messages and signal-every are at least 1, bytes at least "
                        "messages, tclass at most 255\n", argv[0]);
        return 3;
    }
    name = server ? device_name(name, "VERBS_B", "rxe1") : device_name(name, "VERBS_A", "rxe0");
    if (device_open(&side.device, name, gid_index)) return 3;
    side.fd = rendezvous(host, port);
    if (server) {
        const uint32_t corrupt = plan.corrupt;
        hear(side.fd, &plan, sizeof plan);
        plan.corrupt = corrupt;
    } else {
        tell(side.fd, &plan, sizeof plan);
    }
    if (endpoint_open(&side, 3 * plan.bytes, (unsigned)(3 * plan.signal_every), 16,
                  (uint8_t)plan.tclass))
        return 3;
    memset(side.buf, 0xaa, 3 * plan.bytes);
    for (unsigned i = 0; i < 8; i++) {
        struct ibv_recv_wr wr = {0}, *bad;
        if (ibv_post_recv(side.qp, &wr, &bad)) stop("ibv_post_recv", EIO);
    }
    /* Both are ready to receive before the first write. */
    meet(side.fd);

    double *times = calloc(plan.rounds, sizeof *times);
    uint64_t round = 0, late = 0;
    double lag = 0;
    bool good = !*detail;
    const uint64_t start = now_ns();
    for (; good && round < plan.rounds; round++) {
        /* Filled before the clock runs, out of the "compute" time. */
        fill(side.buf, plan.bytes, 2 * round + (server ? 1 : 0));
        if (server) {
            good = wait_for(round + 1, false) && write_round(round);
            /* While its answer is on the way it looks at what it got. */
            good = good && verify(round, 0) && wait_for(0, true);
            continue;
        }
        const uint64_t due = start + round * plan.period_us * 1000u;
        uint64_t from = now_ns();
        if (from < due) {
            sleep_until_ns(due);
            from = now_ns();
        } else if (round && from > due + 100000) {
            late++;
            lag += (double)(from - due) / 1e3;
        }
        good = write_round(round) && wait_for(round + 1, true);
        times[round] = (double)(now_ns() - from) / 1e3;
        good = good && verify(round, 1);
    }
    const double seconds = (double)(now_ns() - start) / 1e9;
    /* A server that is gone is told from one that has finished: each says how it went. */
    char passed = good && !*detail, other = 0;
    if (!peer_lost(side.fd)) {
        tell(side.fd, &passed, 1);
        hear(side.fd, &other, 1);
    }
    if (!other) stop("the peer failed", EPROTO);
    good = good && other;

    double sum = 0;
    for (uint64_t i = 0; i < round && !server; i++) sum += times[i];
    printf("{\"program\":\"collective\",\"role\":\"%s\",\"passed\":%s,\"rounds\":%llu,"
           "\"work_requests\":%llu,\"bytes\":%llu,\"read_bytes\":0,\"seconds\":%.6f",
           server ? "server" : "client", good ? "true" : "false", (unsigned long long)round,
           (unsigned long long)requests, (unsigned long long)payload, seconds);
    if (!server) {
        if (samples) {
            fputs(",\"round_us\":[", stdout);
            for (uint64_t i = 0; i < round; i++) printf("%s%.1f", i ? "," : "", times[i]);
            fputs("]", stdout);
        }
        qsort(times, round, sizeof *times, by_value);
        printf(",\"tclass\":%u,\"period_us\":%llu,\"p50_us\":%.1f,\"p90_us\":%.1f,"
               "\"p99_us\":%.1f,\"mean_us\":%.1f,\"max_us\":%.1f,\"sum_us\":%.1f,"
               "\"late_rounds\":%llu,\"lag_us\":%.1f",
               plan.tclass, (unsigned long long)plan.period_us, quantile(times, round, 0.5),
               quantile(times, round, 0.9), quantile(times, round, 0.99),
               round ? sum / (double)round : 0, round ? times[round - 1] : 0, sum,
               (unsigned long long)late, lag);
    }
    fputs(",\"detail\":", stdout);
    json_text(stdout, detail);
    puts("}");

    const bool closed = !endpoint_close(&side);
    free(times);
    return good && closed ? 0 : 1;
}
