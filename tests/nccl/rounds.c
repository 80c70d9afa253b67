/* nccl_rounds: an all-to-all over a NCCL net plugin again and again, as the layers of a model do it, between
 * ranks that are started one by one on the devices and hosts that are wanted. In each round every rank sends its
 * messages to every other; rank 0 begins a round each period, the others when its first message comes. A round
 * is over for rank 0 when all it sends and receives is done. Data are checked. --help says how. */
#define _GNU_SOURCE
#include "wire.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

enum { RANKS_MAX = 8, MESSAGES_MAX = 64 };

static int rank = -1, ranks = 2, messages = 3, tclass = -1;
static long rounds = 20;
static size_t bytes = 48 << 10;
static uint64_t period_us = 100000;
static const char *folder;

static struct net net;
static struct link links[2 * RANKS_MAX];
static struct buffer buffers[2 * RANKS_MAX];
static struct message plan[2 * RANKS_MAX][MESSAGES_MAX];
static struct stream streams[2 * RANKS_MAX];
static int n;

static void path_to(char *path, int from, int to, const char *suffix) {
    snprintf(path, PATH_MAX, "%s/%d-%d%s", folder, from, to, suffix);
}

static bool write_handle(const struct link *link) {
    char part[PATH_MAX], path[PATH_MAX];
    path_to(part, link->from, link->to, ".part");
    path_to(path, link->from, link->to, "");
    const int fd = open(part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    CHECK(fd >= 0, "%s: %s", part, strerror(errno));
    const bool written = write(fd, link->handle, HANDLE_BYTES) == HANDLE_BYTES;
    close(fd);
    CHECK(written && rename(part, path) == 0, "%s: %s", path, strerror(errno));
    return true;
}

static bool read_handle(struct link *link) {
    char path[PATH_MAX];
    path_to(path, link->from, link->to, "");
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return true;
    CHECK(read(fd, link->handle, HANDLE_BYTES) == HANDLE_BYTES, "%s is too short", path);
    close(fd);
    link->heard = true;
    return true;
}

static bool open_all(void) {
    for (int other = 0; other < ranks; other++) {
        if (other == rank) continue;
        links[n++] = (struct link){.from = rank, .to = other};
        links[n++] = (struct link){.from = other, .to = rank};
    }
    for (int i = 0; i < n; i++) {
        if (links[i].to != rank) continue;
        OK(net_listen(&net, setup.listen_device, links[i].handle, &links[i].listen));
        DO(write_handle(&links[i]));
    }
    const uint64_t until = now_ns() + 6 * patience_ns();
    for (int open = 0; open < n;) {
        open = 0;
        for (int i = 0; i < n; i++) {
            struct link *link = &links[i];
            if (!link->comm && link->to == rank) OK(net_accept(&net, link->listen, &link->comm));
            else if (!link->comm && !link->heard) DO(read_handle(link));
            else if (!link->comm)
                OK(net_connect(&net, setup.send_device, link->handle, &link->comm));
            open += link->comm != NULL;
        }
        CHECK(now_ns() < until, "rank %d: %d of %d connections came about", rank, open, n);
        usleep(1000);
    }
    for (int i = 0; i < n; i++) {
        DO(buffer_open(&net, links[i].comm, &buffers[i], bytes + (size_t)messages));
        if (links[i].listen) OK(net_close_listen(&net, links[i].listen));
    }
    return true;
}

static void prepare(long round) {
    for (int i = 0; i < n; i++) {
        const size_t each = bytes / (size_t)messages;
        for (int m = 0; m < messages; m++)
            plan[i][m] = (struct message){
                .size = each,
                .room = each,
                .id = (((uint64_t)round * 16 + (uint64_t)links[i].from) * 16 +
                       (uint64_t)links[i].to) * MESSAGES_MAX + (uint64_t)m,
            };
        streams[i] = (struct stream){
            .net = &net,
            .comm = links[i].comm,
            .memory = buffers[i].memory,
            .base = buffers[i].at,
            .sends = links[i].from == rank,
            .slot_bytes = each,
            .window = messages < REQUESTS_MAX ? messages : REQUESTS_MAX,
            .messages = plan[i],
            .n = messages,
        };
    }
}

static bool play(void) {
    const uint64_t until = now_ns() + 12 * patience_ns();
    bool begun = rank == 0;
    for (int done = 0; done < n;) {
        bool progress = false;
        done = 0;
        for (int i = 0; i < n; i++) {
            struct stream *s = &streams[i];
            if (s->done < s->n && (begun || !s->sends)) DO(stream_step(s, &progress));
            if (links[i].from == 0 && s->done > 0) begun = true;
            done += s->done == s->n;
        }
        CHECK(now_ns() < until, "rank %d: a round is never over", rank);
        /* The processors are for those who have something to do. */
        if (!progress) usleep(20);
    }
    return true;
}

static bool measure(double *times) {
    if (tclass >= 0) net.config.traffic_class = tclass;
    DO(net_open(&net));
    DO(open_all());
    const uint64_t start = now_ns();
    for (long round = 0; round < rounds; round++) {
        prepare(round);
        const uint64_t due = start + (uint64_t)round * period_us * 1000;
        while (rank == 0 && now_ns() < due) usleep(100);
        const uint64_t from = now_ns();
        DO(play());
        times[round] = (double)(now_ns() - from) / 1e3;
    }
    for (int i = 0; i < n; i++) {
        DO(buffer_close(&net, &buffers[i]));
        if (links[i].from == rank) OK(net_close_send(&net, links[i].comm));
        else OK(net_close_receive(&net, links[i].comm));
    }
    return net_shut(&net);
}

static int usage(const char *name, int status) {
    fprintf(status ? stderr : stdout,
            "usage: %s --plugin PATH --rank R --folder DIR [OPTION]...\n"
            "  -p, --plugin PATH   the library        -v, --version N   " VERSIONS " (" NEWEST ")\n"
            "  -r, --rank R        0 to ranks - 1     -n, --ranks N     2 to 8 (2)\n"
            "  -f, --folder DIR    shared by the ranks, empty at first\n"
            "  -d, --device N      (0)                -s, --slow N      N times as patient (1)\n"
            "  --rounds N          (20)               --period-us N     (100000)\n"
            "  --bytes B           from each rank to each other in a round (49152)\n"
            "  --messages M        that they go in, 1 to %d (3)\n"
            "  --tclass N          traffic class of the communicator (unset)\n"
            "Prints one line of JSON; times are rank 0's.\n",
            name, MESSAGES_MAX);
    return status;
}

int main(int argc, char **argv) {
    enum { ROUNDS = 1000, BYTES, MESSAGES, PERIOD, TCLASS };
    static const struct option options[] = {{"plugin", required_argument, NULL, 'p'},
                                            {"version", required_argument, NULL, 'v'},
                                            {"rank", required_argument, NULL, 'r'},
                                            {"ranks", required_argument, NULL, 'n'},
                                            {"folder", required_argument, NULL, 'f'},
                                            {"device", required_argument, NULL, 'd'},
                                            {"slow", required_argument, NULL, 's'},
                                            {"rounds", required_argument, NULL, ROUNDS},
                                            {"bytes", required_argument, NULL, BYTES},
                                            {"messages", required_argument, NULL, MESSAGES},
                                            {"period-us", required_argument, NULL, PERIOD},
                                            {"tclass", required_argument, NULL, TCLASS},
                                            {"verbose", no_argument, NULL, 'V'},
                                            {"help", no_argument, NULL, 'h'},
                                            {NULL, 0, NULL, 0}};
    setup.version = VERSION_LAST;
    for (int c; (c = getopt_long(argc, argv, "p:v:r:n:f:d:s:Vh", options, NULL)) != -1;) {
        switch (c) {
        case 'p': setup.plugin = optarg; break;
        case 'v': setup.version = atoi(optarg); break;
        case 'r': rank = atoi(optarg); break;
        case 'n': ranks = atoi(optarg); break;
        case 'f': folder = optarg; break;
        case 'd': setup.send_device = setup.listen_device = atoi(optarg); break;
        case 's': setup.slow = atof(optarg); break;
        case ROUNDS: rounds = atol(optarg); break;
        case BYTES: bytes = strtoull(optarg, NULL, 0); break;
        case MESSAGES: messages = atoi(optarg); break;
        case PERIOD: period_us = strtoull(optarg, NULL, 0); break;
        case TCLASS: tclass = atoi(optarg); break;
        case 'V': verbose = true; break;
        case 'h': return usage(argv[0], 0);
        default: return usage(argv[0], 3);
        }
    }
    if (!(setup.slow > 0)) setup.slow = 1;
    if (!setup.plugin || !folder || ranks < 2 || ranks > RANKS_MAX || rank < 0 || rank >= ranks ||
        messages < 1 || messages > MESSAGES_MAX || rounds < 1 || bytes < (size_t)messages ||
        bytes > (size_t)1 << 30 || setup.version < VERSION_FIRST || setup.version > VERSION_LAST ||
        tclass > 255)
        return usage(argv[0], 3);
    double *times = calloc((size_t)rounds, sizeof *times);
    if (!times) {
        perror("rounds");
        return 3;
    }
    const bool passed = measure(times);
    printf("{\"program\":\"nccl_rounds\",\"rank\":%d,\"ranks\":%d,\"passed\":%s,\"bytes\":%zu", rank,
           ranks, passed ? "true" : "false", bytes);
    if (rank == 0) {
        fputs(",\"round_us\":[", stdout);
        for (long i = 0; i < rounds; i++) printf("%s%.1f", i ? "," : "", times[i]);
        fputs("]", stdout);
    }
    puts("}");
    free(times);
    return passed ? 0 : 1;
}
