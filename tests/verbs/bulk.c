/* A windowed bulk transfer between two processes: the client writes to or reads from the
 * server's memory in slices, at most --depth outstanding. With --period-us it comes as transfers
 * that arrive one a period, first come first served, each with a deadline after its arrival.
 * What arrived is verified at the end: by its pattern, and by a checksum of both sides' memory.
 *
 *   bulk --server -b rxe1 --port 7472 &
 *   bulk --connect 127.0.0.1 -a rxe0 --port 7472 --op write --bytes 67108864 */
#include "common.h"

#include <getopt.h>

struct plan {
    uint64_t bytes, memory;
    uint32_t read, tclass;
};

struct verdict {
    uint64_t sum;
    uint64_t wrong; /* first wrong byte, or UINT64_MAX */
};

enum { SERVER_SEED = 71, CLIENT_SEED = 72 };

static char detail[256];

static void stop(const char *what, int error) {
    if (!*detail) snprintf(detail, sizeof detail, "%s: %s", what, strerror(error));
}

static int usage(const char *name, int status) {
    fprintf(status ? stderr : stdout,
            "usage: %s --server [-b DEVICE] [--port N]\n"
            "       %s --connect HOST [-a DEVICE] [--port N] [OPTION]...\n"
            "  -a, -b, -d DEVICE   (VERBS_A: rxe0 for the client, VERBS_B: rxe1 for the server)\n"
            "  -g INDEX            GID index (VERBS_GID_INDEX; the IPv4 RoCE v2 one)\n"
            "  --port N            of the rendezvous (7472)\n"
            "  --op write|read     (write)      --bytes N      in total (67108864)\n"
            "  --slice N           bytes of one work request (65536)\n"
            "  --depth N           outstanding work requests (32)\n"
            "  --signal-every N    signal each Nth, and the last of a transfer (1)\n"
            "  --memory N          memory on each side, used in turn if less than --bytes, then\n"
            "                      only what came last in each place is verified (--bytes, up to\n"
            "                      1 GiB)\n"
            "  --transfer N        bytes of one transfer (--bytes)\n"
            "  --period-us N       one transfer arrives each period (0: all at once)\n"
            "  --deadline-us N     after a transfer's arrival (0: none)\n"
            "  --tclass N          traffic class of both queue pairs (0)\n"
            "  --samples           print each transfer's microseconds\n"
            "  --corrupt           falsify a byte before it is verified, to see the failure\n",
            name, name);
    return status;
}

int main(int argc, char **argv) {
    enum {
        PORT = 1000, OP, BYTES, SLICE, DEPTH, SIGNAL, MEMORY, TRANSFER, PERIOD, DEADLINE, TCLASS,
        SAMPLES, CORRUPT,
    };
    static const struct option options[] = {
        {"server", no_argument, NULL, 's'},        {"connect", required_argument, NULL, 'c'},
        {"port", required_argument, NULL, PORT},   {"op", required_argument, NULL, OP},
        {"bytes", required_argument, NULL, BYTES}, {"slice", required_argument, NULL, SLICE},
        {"depth", required_argument, NULL, DEPTH},
        {"signal-every", required_argument, NULL, SIGNAL},
        {"memory", required_argument, NULL, MEMORY},
        {"transfer", required_argument, NULL, TRANSFER},
        {"period-us", required_argument, NULL, PERIOD},
        {"deadline-us", required_argument, NULL, DEADLINE},
        {"tclass", required_argument, NULL, TCLASS},
        {"samples", no_argument, NULL, SAMPLES},   {"corrupt", no_argument, NULL, CORRUPT},
        {"help", no_argument, NULL, 'h'},          {NULL, 0, NULL, 0}};
    const char *name = NULL, *host = NULL;
    int gid_index = -1, port = 7472;
    bool server = false, samples = false, corrupt = false;
    uint64_t slice = 65536, depth = 32, every = 1, transfer = 0, period_us = 0, deadline_us = 0;
    struct plan plan = {.bytes = 64 << 20};
    for (int c; (c = getopt_long(argc, argv, "a:b:d:g:sc:h", options, NULL)) != -1;) {
        switch (c) {
        case 'a': case 'b': case 'd': name = optarg; break;
        case 'g': gid_index = atoi(optarg); break;
        case 's': server = true; break;
        case 'c': host = optarg; break;
        case PORT: port = atoi(optarg); break;
        case OP:
            plan.read = strcmp(optarg, "read") == 0;
            if (!plan.read && strcmp(optarg, "write") != 0) return usage(argv[0], 3);
            break;
        case BYTES: plan.bytes = strtoull(optarg, NULL, 10); break;
        case SLICE: slice = strtoull(optarg, NULL, 10); break;
        case DEPTH: depth = strtoull(optarg, NULL, 10); break;
        case SIGNAL: every = strtoull(optarg, NULL, 10); break;
        case MEMORY: plan.memory = strtoull(optarg, NULL, 10); break;
        case TRANSFER: transfer = strtoull(optarg, NULL, 10); break;
        case PERIOD: period_us = strtoull(optarg, NULL, 10); break;
        case DEADLINE: deadline_us = strtoull(optarg, NULL, 10); break;
        case TCLASS: plan.tclass = (uint32_t)strtoul(optarg, NULL, 0); break;
        case SAMPLES: samples = true; break;
        case CORRUPT: corrupt = true; break;
        default: return usage(argv[0], c == 'h' ? 0 : 3);
        }
    }
    if (server == (host != NULL)) return usage(argv[0], 3);
    if (!plan.memory) plan.memory = plan.bytes < 1u << 30 ? plan.bytes : 1u << 30;
    if (plan.memory > plan.bytes) plan.memory = plan.bytes;
    if (!transfer || transfer > plan.bytes) transfer = plan.bytes;
    if (!plan.bytes || !slice || slice > 1u << 30 || !depth || depth > 8192 || !every ||
        every > depth || plan.tclass > 255) {
        fprintf(stderr, "%s: bytes, slice, depth and signal-every are at least 1, signal-every at "
                        "most depth, depth at most 8192, tclass at most 255\n", argv[0]);
        return 3;
    }
    if (plan.memory < plan.bytes && plan.memory < slice * depth) {
        fprintf(stderr, "%s: --memory must hold --depth slices or all of --bytes\n", argv[0]);
        return 3;
    }
    name = server ? device_name(name, "VERBS_B", "rxe1") : device_name(name, "VERBS_A", "rxe0");
    struct endpoint side = {0};
    if (device_open(&side.device, name, gid_index)) return 3;
    const int fd = side.fd = rendezvous(host, port);
    if (server) hear(fd, &plan, sizeof plan);
    else tell(fd, &plan, sizeof plan);
    if (endpoint_open(&side, plan.memory, (unsigned)depth, 1, (uint8_t)plan.tclass)) return 3;
    uint8_t *const buf = side.buf;
    /* Both sides know both patterns; the receiving side's must give way to the other's. */
    fill(buf, plan.memory, server ? SERVER_SEED : CLIENT_SEED);
    meet(fd);

    uint64_t requests = 0, payload = 0, transfers = server ? 0 : (plan.bytes + transfer - 1) / transfer;
    double *times = calloc(transfers + 1, sizeof *times);
    uint64_t posted = 0, done = 0;    /* bytes */
    uint64_t *ends = calloc(depth, sizeof *ends); /* of the outstanding requests */
    uint64_t head = 0, tail = 0, unsignaled = 0;  /* requests */
    uint64_t finished = 0, met = 0, idle_turns = 0;
    const char *timeout_text = getenv("VERBS_TIMEOUT_MS");
    const uint64_t patience =
        (timeout_text ? strtoull(timeout_text, NULL, 10) : 60000) * slowness() * 1000000u;
    const uint64_t start = now_ns();
    uint64_t progress = start;
    while (!server && done < plan.bytes && !*detail) {
        const uint64_t now = now_ns();
        const uint64_t arrived = period_us ? (now - start) / (period_us * 1000) + 1 : transfers;
        const uint64_t open = arrived < transfers ? arrived * transfer : plan.bytes;
        bool idle = true;
        while (posted < open && head - tail < depth) {
            const uint64_t at = posted % plan.memory;
            const uint64_t end = (posted / transfer + 1) * transfer;
            uint64_t len = slice;
            if (len > end - posted) len = end - posted;
            if (len > plan.bytes - posted) len = plan.bytes - posted;
            if (len > plan.memory - at) len = plan.memory - at;
            const bool last = posted + len == end || posted + len == plan.bytes;
            struct ibv_sge sge = {(uintptr_t)buf + at, (uint32_t)len, side.mr->lkey};
            struct ibv_send_wr wr = {.wr_id = head, .sg_list = &sge, .num_sge = 1,
                                     .opcode = plan.read ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE};
            struct ibv_send_wr *bad;
            wr.wr.rdma.remote_addr = side.peer.addr + at;
            wr.wr.rdma.rkey = side.peer.rkey;
            if (++unsignaled == every || last || head + 1 - tail == depth) {
                wr.send_flags = IBV_SEND_SIGNALED;
                unsignaled = 0;
            }
            const int error = ibv_post_send(side.qp, &wr, &bad);
            if (error) {
                stop("ibv_post_send", error);
                break;
            }
            ends[head++ % depth] = posted + len;
            posted += len;
            requests++;
            payload += len;
            idle = false;
        }
        struct ibv_wc wc[32];
        const int got = ibv_poll_cq(side.cq, 32, wc);
        if (got < 0) stop("ibv_poll_cq", EIO);
        for (int i = 0; i < got; i++) {
            if (wc[i].status != IBV_WC_SUCCESS) {
                if (!*detail)
                    snprintf(detail, sizeof detail, "request %llu: %s",
                             (unsigned long long)wc[i].wr_id, ibv_wc_status_str(wc[i].status));
                break;
            }
            if (wc[i].wr_id < tail || wc[i].wr_id >= head) {
                stop("a completion out of order", EPROTO);
                break;
            }
            tail = wc[i].wr_id + 1;
            done = ends[wc[i].wr_id % depth];
            progress = now_ns();
            for (; finished < transfers; finished++) {
                const uint64_t end = (finished + 1) * transfer;
                if (done < (end < plan.bytes ? end : plan.bytes)) break;
                const uint64_t arrival = start + finished * period_us * 1000;
                times[finished] = (double)(progress - arrival) / 1e3;
                if (!deadline_us || times[finished] <= (double)deadline_us) met++;
            }
            idle = false;
        }
        if (!idle) continue;
        if (head == tail) {
            /* Nothing outstanding and nothing due: until the next arrival. */
            sleep_until_ns(start + arrived * period_us * 1000);
            progress = now_ns();
        } else if (++idle_turns % 1000 == 0 && peer_lost(fd))
            stop("the peer stopped", ECONNRESET);
        else if (now - progress > patience && now > progress)
            stop("completions", ETIMEDOUT);
        else
            usleep(10);
    }
    const double seconds = (double)(now_ns() - start) / 1e9;

    /* The client has finished: both look at their memory. */
    struct verdict here = {0}, there;
    const bool alone = !server && peer_lost(fd);
    char byte = 1;
    if (alone) stop("the peer stopped", ECONNRESET);
    else if (!server) tell(fd, &byte, 1);
    else hear(fd, &byte, 1);
    if (corrupt) buf[plan.memory / 3] ^= 0x10;
    const size_t wrong = mismatch(buf, plan.memory, plan.read ? SERVER_SEED : CLIENT_SEED);
    here.sum = checksum(buf, plan.memory);
    here.wrong = wrong == SIZE_MAX ? UINT64_MAX : wrong;
    there = here;
    if (!alone) {
        tell(fd, &here, sizeof here);
        hear(fd, &there, sizeof there);
    }
    if (!*detail && here.wrong != UINT64_MAX)
        snprintf(detail, sizeof detail, "byte %zu is wrong", wrong);
    if (!*detail && there.wrong != UINT64_MAX)
        snprintf(detail, sizeof detail, "the peer's byte %llu is wrong",
                 (unsigned long long)there.wrong);
    if (!*detail && here.sum != there.sum)
        snprintf(detail, sizeof detail, "checksums %016llx and %016llx",
                 (unsigned long long)here.sum, (unsigned long long)there.sum);
    const bool good = !*detail && (server || done == plan.bytes);

    printf("{\"program\":\"bulk\",\"role\":\"%s\",\"op\":\"%s\",\"passed\":%s,"
           "\"work_requests\":%llu,\"bytes\":%llu,\"read_bytes\":%llu,\"checksum\":\"%016llx\"",
           server ? "server" : "client", plan.read ? "read" : "write", good ? "true" : "false",
           (unsigned long long)requests, (unsigned long long)payload,
           (unsigned long long)(plan.read ? payload : 0), (unsigned long long)here.sum);
    if (!server) {
        if (samples) {
            fputs(",\"transfer_us\":[", stdout);
            for (uint64_t i = 0; i < finished; i++) printf("%s%.1f", i ? "," : "", times[i]);
            fputs("]", stdout);
        }
        double sum = 0;
        for (uint64_t i = 0; i < finished; i++) sum += times[i];
        qsort(times, finished, sizeof *times, by_value);
        printf(",\"tclass\":%u,\"seconds\":%.6f,\"mb_per_s\":%.3f,\"transfers\":%llu,"
               "\"met\":%llu,\"missed\":%llu,\"deadline_us\":%llu,\"p50_us\":%.1f,"
               "\"p90_us\":%.1f,\"p99_us\":%.1f,\"mean_us\":%.1f,\"max_us\":%.1f",
               plan.tclass, seconds, (double)done / seconds / 1e6, (unsigned long long)transfers,
               (unsigned long long)met, (unsigned long long)(transfers - met),
               (unsigned long long)deadline_us, quantile(times, finished, 0.5),
               quantile(times, finished, 0.9), quantile(times, finished, 0.99),
               finished ? sum / (double)finished : 0, finished ? times[finished - 1] : 0);
    }
    fputs(",\"detail\":", stdout);
    json_text(stdout, detail);
    puts("}");

    const bool closed = !endpoint_close(&side);
    free(times);
    free(ends);
    return good && closed ? 0 : 1;
}
