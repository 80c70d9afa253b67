/* nccl_perf: bandwidth and latency of a NCCL net plugin between two processes, as one line of JSON.
 * Written with the calls of nccl_check, without its checks of the data. --help says how. */
#define _GNU_SOURCE
#include "wire.h"

#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

enum { STREAMS_MAX = 32, PINGS_MAX = 100000 };

static size_t bytes = 1 << 20, ping_bytes = 8;
static int window = 8, streams = 1, seconds = 5, pings = 2000, repeats = 1;

/* A connection is opened from the side that connects; the first of them carries handles back. */
struct side {
    struct net net;
    bool receives; /* of the measured direction: the side that listened first */
    void *to, *from;
    struct buffer to_buffer, from_buffer;
    void *comm[STREAMS_MAX];
    struct buffer buffer[STREAMS_MAX];
};

static bool write_file(const char *path, const void *data, size_t len) {
    char part[PATH_MAX];
    snprintf(part, sizeof part, "%s.part", path);
    const int fd = open(part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    CHECK(fd >= 0, "%s: %s", part, strerror(errno));
    const bool written = write(fd, data, len) == (ssize_t)len;
    close(fd);
    CHECK(written && rename(part, path) == 0, "%s: %s", path, strerror(errno));
    return true;
}

static bool read_file(const char *path, void *data, size_t len) {
    const uint64_t until = now_ns() + 3 * patience_ns();
    for (;;) {
        const int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd >= 0) {
            const bool got = read(fd, data, len) == (ssize_t)len;
            close(fd);
            CHECK(got, "%s is too short", path);
            return true;
        }
        CHECK(now_ns() < until, "%s never came", path);
        rest_ms(5);
    }
}

/* One whole message on a comm. */
static bool put(struct side *s, const void *data, size_t len) {
    void *request;
    memcpy(s->to_buffer.at, data, len);
    DO(isend_until(&s->net, s->to, s->to_buffer.at, len, 0, s->to_buffer.memory, &request));
    return until_done(&s->net, request, NULL);
}

static bool get(struct side *s, void *data, size_t len) {
    void *request;
    int size = 0;
    DO(irecv_until(&s->net, s->from, s->from_buffer.at, 65536, 0, s->from_buffer.memory, &request));
    DO(until_done(&s->net, request, &size));
    CHECK(size == (int)len, "%d bytes came, %zu were awaited", size, len);
    memcpy(data, s->from_buffer.at, len);
    return true;
}

/* `path` brings the first handle over; all others go over the connection made with it. */
static bool side_open(struct side *s, const char *path) {
    uint8_t handle[HANDLE_BYTES] = {0};
    void *listen = NULL;
    DO(net_open(&s->net));
    if (s->receives) {
        OK(net_listen(&s->net, setup.listen_device, handle, &listen));
        DO(write_file(path, handle, sizeof handle));
        DO(accept_until(&s->net, listen, &s->from));
        DO(buffer_open(&s->net, s->from, &s->from_buffer, 65536));
        OK(net_close_listen(&s->net, listen));
        uint8_t back[HANDLE_BYTES];
        DO(get(s, back, sizeof back));
        DO(connect_until(&s->net, back, &s->to));
        DO(buffer_open(&s->net, s->to, &s->to_buffer, 65536));
    } else {
        DO(read_file(path, handle, sizeof handle));
        DO(connect_until(&s->net, handle, &s->to));
        DO(buffer_open(&s->net, s->to, &s->to_buffer, 65536));
        OK(net_listen(&s->net, setup.listen_device, handle, &listen));
        DO(put(s, handle, sizeof handle));
        DO(accept_until(&s->net, listen, &s->from));
        DO(buffer_open(&s->net, s->from, &s->from_buffer, 65536));
        OK(net_close_listen(&s->net, listen));
    }
    for (int i = 0; i < streams; i++) {
        if (s->receives) {
            OK(net_listen(&s->net, setup.listen_device, handle, &listen));
            DO(put(s, handle, sizeof handle));
            DO(accept_until(&s->net, listen, &s->comm[i]));
            OK(net_close_listen(&s->net, listen));
        } else {
            DO(get(s, handle, sizeof handle));
            DO(connect_until(&s->net, handle, &s->comm[i]));
        }
        DO(buffer_open(&s->net, s->comm[i], &s->buffer[i], (size_t)window * bytes));
        memset(s->buffer[i].at, 7, s->buffer[i].len);
    }
    return true;
}

static bool side_close(struct side *s) {
    for (int i = 0; i < streams; i++) {
        DO(buffer_close(&s->net, &s->buffer[i]));
        if (s->receives) OK(net_close_receive(&s->net, s->comm[i]));
        else OK(net_close_send(&s->net, s->comm[i]));
    }
    DO(buffer_close(&s->net, &s->to_buffer));
    DO(buffer_close(&s->net, &s->from_buffer));
    OK(net_close_send(&s->net, s->to));
    OK(net_close_receive(&s->net, s->from));
    return net_shut(&s->net);
}

/* Messages until `until` (or, for the receiver, until each stream had its last, of no bytes).
 * Receives that are posted behind the last are taken up by the next call. */
static bool flow(struct side *s, uint64_t until, uint64_t *moved) {
    static void *requests[STREAMS_MAX][REQUESTS_MAX];
    static long posted[STREAMS_MAX], done[STREAMS_MAX];
    bool last[STREAMS_MAX] = {false}, ended[STREAMS_MAX] = {false};
    *moved = 0;
    for (int open = streams; open;) {
        bool progress = false;
        for (int i = 0; i < streams; i++) {
            struct buffer *b = &s->buffer[i];
            while (!ended[i] && !last[i] && posted[i] - done[i] < window) {
                const int slot = (int)(posted[i] % window), tag = 0;
                void *at = b->at + (size_t)slot * bytes, **request = &requests[i][slot];
                *request = NULL;
                const bool over = !s->receives && now_ns() >= until;
                if (s->receives)
                    OK(net_irecv(&s->net, s->comm[i], 1, &at, &bytes, &tag, &b->memory, NULL,
                                 request));
                else
                    OK(net_isend(&s->net, s->comm[i], at, over ? 0 : bytes, tag, b->memory, NULL,
                                 request));
                if (!*request) break;
                posted[i]++;
                last[i] = over;
                progress = true;
            }
            while (done[i] < posted[i]) {
                int is_done = 0, size = 0;
                OK(net_test(&s->net, requests[i][done[i] % window], &is_done, &size));
                if (!is_done) break;
                done[i]++;
                progress = true;
                *moved += (uint64_t)(unsigned)size;
                if (s->receives && size == 0) {
                    ended[i] = true;
                    open--;
                    break;
                }
            }
            if (!s->receives && last[i] && !ended[i] && done[i] == posted[i]) {
                ended[i] = true;
                open--;
            }
        }
        if (!progress) rest();
    }
    return true;
}

static int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* A message there and one back; half of it, in microseconds. */
static bool ping_pong(struct side *s, double *p50, double *p99, double *least) {
    static double times[PINGS_MAX];
    for (int i = -pings / 10 - 1; i < pings; i++) {
        void *sent = NULL, *received = NULL;
        const uint64_t begun = now_ns();
        if (!s->receives)
            DO(isend_until(&s->net, s->to, s->to_buffer.at, ping_bytes, 0, s->to_buffer.memory,
                           &sent));
        DO(irecv_until(&s->net, s->from, s->from_buffer.at, 65536, 0, s->from_buffer.memory,
                       &received));
        for (int done = 0; !done;) OK(net_test(&s->net, received, &done, NULL));
        if (s->receives)
            DO(isend_until(&s->net, s->to, s->to_buffer.at, ping_bytes, 0, s->to_buffer.memory,
                           &sent));
        for (int done = 0; !done;) OK(net_test(&s->net, sent, &done, NULL));
        if (i >= 0) times[i] = (double)(now_ns() - begun) / 2e3;
    }
    qsort(times, (size_t)pings, sizeof *times, by_value);
    *p50 = pings ? times[pings / 2] : 0;
    *p99 = pings ? times[(long)pings * 99 / 100] : 0;
    *least = pings ? times[0] : 0;
    return true;
}

static bool measure(struct side *s, const char *path) {
    double p50 = 0, p99 = 0, least = 0;
    char ready = 1;
    DO(side_open(s, path));
    if (pings) DO(ping_pong(s, &p50, &p99, &least));
    for (int repeat = 0; repeat < repeats; repeat++) {
        uint64_t moved = 0, first = 0;
        /* A second to warm up, and the receiver's count of what came counts. */
        for (int turn = 0; turn < 2; turn++) {
            const uint64_t begun = now_ns();
            DO(flow(s, begun + (turn ? (uint64_t)seconds : 1) * 1000000000, &moved));
            if (s->receives) DO(put(s, &moved, sizeof moved));
            else {
                uint64_t theirs = 0;
                DO(get(s, &theirs, sizeof theirs));
                first = now_ns() - begun;
                CHECK(theirs == moved, "%llu bytes were sent, %llu came",
                      (unsigned long long)moved, (unsigned long long)theirs);
            }
        }
        if (s->receives) continue;
        printf("{\"plugin\":\"%s\",\"version\":%d,\"bytes\":%zu,\"window\":%d,\"streams\":%d,"
               "\"seconds\":%.3f,\"moved\":%llu,\"gbit_per_s\":%.3f,\"ping_bytes\":%zu,"
               "\"latency_us\":{\"min\":%.2f,\"p50\":%.2f,\"p99\":%.2f}}\n",
               s->net.name, s->net.version, bytes, window, streams, (double)first / 1e9,
               (unsigned long long)moved, (double)moved * 8 / (double)first, ping_bytes, least, p50,
               p99);
        fflush(stdout);
    }
    if (s->receives) DO(get(s, &ready, 1));
    else DO(put(s, &ready, 1));
    return side_close(s);
}

static int usage(const char *name, int status) {
    fprintf(status ? stderr : stdout,
            "usage: %s --plugin PATH [OPTION]...\n"
            "  -p, --plugin PATH    the library\n"
            "  -v, --version N      interface version, " VERSIONS " (" NEWEST ")\n"
            "  -b, --bytes B        of a message (1048576)\n"
            "  -w, --window W       messages outstanding per stream, 1 to 32 (8)\n"
            "  -n, --streams S      comms at once, 1 to 32 (1)\n"
            "  -t, --seconds T      measured, after one second that is not (5)\n"
            "  -r, --repeat R       bandwidth so many times, each with a line of its own (1)\n"
            "  -i, --pings N        round trips measured first; 0: none (2000)\n"
            "  -B, --ping-bytes B   of a message there and back, at most 65536 (8)\n"
            "  -d, --device N       (0)\n"
            "  -R, --rest-us US     sleep so long where there is nothing to do (0: spin), on machines\n"
            "                       whose processors are the network, too\n"
            "  -L, --listen FILE    be the receiving side; its handle is written to FILE\n"
            "  -C, --connect FILE   be the sending side, with the handle in FILE; it prints\n"
            "Without the last two it forks both. Both sides need the same options; a FILE that\n"
            "is left from an earlier run has to be removed first.\n",
            name);
    return status;
}

int main(int argc, char **argv) {
    static const struct option options[] = {{"plugin", required_argument, NULL, 'p'},
                                            {"version", required_argument, NULL, 'v'},
                                            {"bytes", required_argument, NULL, 'b'},
                                            {"window", required_argument, NULL, 'w'},
                                            {"streams", required_argument, NULL, 'n'},
                                            {"seconds", required_argument, NULL, 't'},
                                            {"repeat", required_argument, NULL, 'r'},
                                            {"pings", required_argument, NULL, 'i'},
                                            {"ping-bytes", required_argument, NULL, 'B'},
                                            {"device", required_argument, NULL, 'd'},
                                            {"rest-us", required_argument, NULL, 'R'},
                                            {"listen", required_argument, NULL, 'L'},
                                            {"connect", required_argument, NULL, 'C'},
                                            {"verbose", no_argument, NULL, 'V'},
                                            {"help", no_argument, NULL, 'h'},
                                            {NULL, 0, NULL, 0}};
    const char *listens = NULL, *connects = NULL;
    setup.version = VERSION_LAST;
    for (int c; (c = getopt_long(argc, argv, "p:v:b:w:n:t:r:i:B:d:R:L:C:Vh", options, NULL)) != -1;) {
        switch (c) {
        case 'p': setup.plugin = optarg; break;
        case 'v': setup.version = atoi(optarg); break;
        case 'b': bytes = strtoull(optarg, NULL, 0); break;
        case 'w': window = atoi(optarg); break;
        case 'n': streams = atoi(optarg); break;
        case 't': seconds = atoi(optarg); break;
        case 'r': repeats = atoi(optarg); break;
        case 'i': pings = atoi(optarg); break;
        case 'B': ping_bytes = strtoull(optarg, NULL, 0); break;
        case 'R': setup.rest_us = (unsigned)atoi(optarg); break;
        case 'd': setup.send_device = setup.listen_device = atoi(optarg); break;
        case 'L': listens = optarg; break;
        case 'C': connects = optarg; break;
        case 'V': verbose = true; break;
        case 'h': return usage(argv[0], 0);
        default: return usage(argv[0], 3);
        }
    }
    if (!setup.plugin || setup.version < VERSION_FIRST || setup.version > VERSION_LAST ||
        bytes < 1 || bytes > (size_t)1 << 30 || window < 1 || window > REQUESTS_MAX ||
        streams < 1 || streams > STREAMS_MAX || seconds < 1 || pings < 0 || pings > PINGS_MAX ||
        ping_bytes < 1 || ping_bytes > 65536 || repeats < 1 || (listens && connects))
        return usage(argv[0], 3);

    /* A plugin that hangs ends in a signal, not in a program that measures for ever. */
    alarm((unsigned)((seconds + 1) * repeats + 120));
    static struct side side;
    if (listens || connects) {
        side.receives = listens != NULL;
        return measure(&side, listens ? listens : connects) ? 0 : 1;
    }
    const char *base = getenv("TMPDIR");
    char folder[PATH_MAX - 16], path[PATH_MAX];
    snprintf(folder, sizeof folder, "%s/nccl_perf.XXXXXX", base && *base ? base : P_tmpdir);
    if (!mkdtemp(folder)) {
        perror(folder);
        return 3;
    }
    snprintf(path, sizeof path, "%s/handle", folder);
    const pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* the alarm is the parent's */
        side.receives = true;
        _exit(measure(&side, path) ? 0 : 1);
    }
    const bool passed = measure(&side, path);
    int status = 1;
    if (!passed) kill(child, SIGKILL);
    waitpid(child, &status, 0);
    unlink(path);
    rmdir(folder);
    return passed && status == 0 ? 0 : 1;
}
