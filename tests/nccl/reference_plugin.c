/* A NCCL net plugin as simple as one can be: TCP, a socket a comm, progress inside test. It exists so
 * that nccl_check can be tried: it passes every case, and REFERENCE_PLUGIN_FAULT=NAME gives it one of the
 * faults below, of which each makes some case fail (tests/tests/nccl.rs says which). */
#define _GNU_SOURCE
#include "abi.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define MAGIC 0x7374726177310001ULL
enum { SLOTS = 64, PENDING = 64, RECVS = 4 };

struct request {
    struct comm *comm;
    bool used, done, started;
    int n, left;
    void *data[RECVS], **kept;
    size_t room[RECVS], size[RECVS];
    int tag[RECVS];
    bool filled[RECVS];
    void *copy;
};

struct header {
    uint64_t size;
    int32_t tag, unused;
};

struct comm {
    int fd, error;
    bool sends, handshake;
    struct request slot[SLOTS], *queue[SLOTS];
    long head, tail;
    size_t moved; /* of the header and the current message */
    struct header header;
    struct comm *next;
};

struct listener {
    int fd;
    int pending[PENDING];
    size_t got[PENDING];
    uint8_t magic[PENDING][8];
};

struct handle {
    uint64_t magic;
    struct sockaddr_in at;
};

static logger log_to;
static struct sockaddr_in own_address;
static char own_name[64];
static atomic_bool broken;
static struct comm *comms; /* for the fault "exits" */
static pthread_mutex_t comms_lock = PTHREAD_MUTEX_INITIALIZER;

static bool fault(const char *name) {
    const char *set = getenv("REFERENCE_PLUGIN_FAULT");
    return set && strcmp(set, name) == 0;
}

#define SAY(...) log_to(LOG_WARN, 16, __FILE__, __LINE__, __VA_ARGS__)

/* --- init, devices --- */

static int start(logger log) {
    log_to = log;
    const char *wanted = getenv("NCCL_SOCKET_IFNAME");
    if (!wanted || !*wanted || fault("interface")) wanted = "lo";
    struct ifaddrs *all = NULL;
    if (getifaddrs(&all)) return RESULT_SYSTEM;
    bool found = false;
    for (struct ifaddrs *each = all; each && !found; each = each->ifa_next)
        if (each->ifa_addr && each->ifa_addr->sa_family == AF_INET &&
            strncmp(each->ifa_name, wanted, strlen(wanted)) == 0) {
            memcpy(&own_address, each->ifa_addr, sizeof own_address);
            snprintf(own_name, sizeof own_name, "%s", each->ifa_name);
            found = true;
        }
    freeifaddrs(all);
    if (!found) SAY("NCCL_SOCKET_IFNAME=%s: no such interface with an IPv4 address", wanted);
    return found ? RESULT_OK : RESULT_SYSTEM;
}

static int devices(int *count) {
    *count = 1;
    return RESULT_OK;
}

#define FILL_COMMON(p)                                                                           \
    (p)->name = own_name, (p)->pci_path = NULL, (p)->guid = 1,                                   \
    (p)->pointer_support = POINTER_HOST, (p)->speed_mbps = 10000, (p)->port = 0,                 \
    (p)->latency = 0, (p)->max_comms = 65536, (p)->max_recvs = RECVS, (p)->device_type = 0,      \
    (p)->device_version = 0
#define FILL_PARTS(p)                                                                            \
    (p)->reg_is_global = 0, (p)->force_flush = 0, (p)->parts.count = 1,                          \
    (p)->parts.devices[0] = device, (p)->max_p2p_bytes = (p)->max_coll_bytes = (size_t)1 << 40
#define PROPERTIES(N, TYPE, MORE)                                                                \
    static int properties_##N(int device, struct TYPE *p) {                                      \
        if (device && !fault("device")) return RESULT_ARGUMENT;                                  \
        FILL_COMMON(p);                                                                          \
        MORE;                                                                                    \
        if (fault("scribbles")) memset(p + 1, 0, 8);                                             \
        return RESULT_OK;                                                                        \
    }
PROPERTIES(v7, properties_v7, (void)0)
PROPERTIES(v8, properties_v8, p->reg_is_global = 0)
PROPERTIES(v9, properties_v9, FILL_PARTS(p))
PROPERTIES(v11, properties_v11, (FILL_PARTS(p), p->max_multi_request = 1))
PROPERTIES(v12, properties_v12, (FILL_PARTS(p), p->max_multi_request = 1, p->rail = p->plane = -1))

/* --- connections --- */

static int new_socket(void) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    return fd;
}

static struct comm *new_comm(int fd, bool sends) {
    struct comm *comm = calloc(1, sizeof *comm);
    comm->fd = fd;
    comm->sends = sends;
    const int one = 1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    pthread_mutex_lock(&comms_lock);
    comm->next = comms;
    comms = comm;
    pthread_mutex_unlock(&comms_lock);
    return comm;
}

static int listen_at(int device, void *opaque, void **out) {
    if (device && !fault("device")) return RESULT_ARGUMENT;
    struct listener *l = calloc(1, sizeof *l);
    struct handle handle = {.magic = MAGIC, .at = own_address};
    socklen_t len = sizeof handle.at;
    memset(l->pending, -1, sizeof l->pending);
    l->fd = new_socket();
    handle.at.sin_port = 0;
    if (l->fd < 0 || bind(l->fd, (struct sockaddr *)&handle.at, len) || listen(l->fd, 512) ||
        getsockname(l->fd, (struct sockaddr *)&handle.at, &len))
        return RESULT_SYSTEM;
    memset(opaque, 0, HANDLE_BYTES);
    memcpy(opaque, &handle, sizeof handle);
    *out = l;
    return RESULT_OK;
}

/* The comm under way is kept in the handle, as NCCL lets a plugin do. */
static int connect_to(int device, void *opaque, void **out) {
    struct handle handle;
    struct comm *comm = NULL;
    uint8_t *state = (uint8_t *)opaque + sizeof handle;
    (void)device;
    memcpy(&handle, opaque, sizeof handle);
    *out = NULL;
    if (handle.magic != MAGIC && fault("any_handle")) return RESULT_OK; /* and again, and again */
    if (handle.magic != MAGIC) {
        SAY("a handle that is none of this plugin's (%llx)", (unsigned long long)handle.magic);
        return RESULT_ARGUMENT;
    }
    if (handle.at.sin_family != AF_INET || !handle.at.sin_port) {
        SAY("a handle without an address");
        return RESULT_ARGUMENT;
    }
    memcpy(&comm, state, sizeof comm);
    if (!comm) {
        const int fd = new_socket();
        if (fd < 0) return RESULT_SYSTEM;
        comm = new_comm(fd, true);
        memcpy(state, &comm, sizeof comm);
        if (connect(fd, (struct sockaddr *)&handle.at, sizeof handle.at) && errno != EINPROGRESS) {
            SAY("connect: %s", strerror(errno));
            return RESULT_REMOTE;
        }
    }
    struct pollfd ready = {.fd = comm->fd, .events = POLLOUT};
    if (poll(&ready, 1, 0) == 0) return RESULT_OK;
    int error = 0;
    socklen_t len = sizeof error;
    getsockopt(comm->fd, SOL_SOCKET, SO_ERROR, &error, &len);
    const uint64_t magic = MAGIC;
    if (error || send(comm->fd, &magic, sizeof magic, MSG_NOSIGNAL) != sizeof magic) {
        SAY("connect: %s", strerror(error ? error : errno));
        return RESULT_REMOTE;
    }
    *out = comm;
    return RESULT_OK;
}

static int accept_from(void *opaque, void **out, struct device_handle **offload) {
    struct listener *l = opaque;
    (void)offload;
    *out = NULL;
    if (fault("blocks")) poll(&(struct pollfd){.fd = l->fd, .events = POLLIN}, 1, -1);
    for (int i = 0; i < PENDING; i++) {
        if (l->pending[i] < 0) {
            l->pending[i] = accept4(l->fd, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
            if (l->pending[i] < 0) continue;
            l->got[i] = 0;
        }
        const ssize_t n = recv(l->pending[i], l->magic[i] + l->got[i], 8 - l->got[i], 0);
        if (n > 0) l->got[i] += (size_t)n;
        const uint64_t magic = MAGIC;
        const bool true_peer = l->got[i] == 8 && memcmp(l->magic[i], &magic, 8) == 0;
        if (true_peer || fault("trusts")) {
            *out = new_comm(l->pending[i], false);
            l->pending[i] = -1;
            return RESULT_OK;
        }
        if (n == 0 || (n < 0 && errno != EAGAIN) || l->got[i] == 8) {
            close(l->pending[i]);
            l->pending[i] = -1;
        }
    }
    return RESULT_OK;
}

static int close_listener(void *opaque) {
    struct listener *l = opaque;
    for (int i = 0; i < PENDING; i++)
        if (l->pending[i] >= 0) close(l->pending[i]);
    close(l->fd);
    free(l);
    return RESULT_OK;
}

/* --- memory: nothing to do for TCP --- */

static int register_any(void *comm, void *data, size_t size, int type, void **memory) {
    (void)comm, (void)size;
    *memory = data;
    return type == POINTER_HOST ? RESULT_OK : RESULT_ARGUMENT;
}
static int register_v7(void *comm, void *data, int size, int type, void **memory) {
    return register_any(comm, data, (size_t)size, type, memory);
}
static int deregister(void *comm, void *memory) {
    (void)comm, (void)memory;
    return RESULT_OK;
}

/* --- messages --- */

static int gone(struct comm *c, ssize_t n) {
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return RESULT_OK;
    if (fault("deaf")) return RESULT_OK;
    return c->error = RESULT_REMOTE;
}

static int pump_send(struct comm *c) {
    while (!c->error && c->head < c->tail) {
        struct request *r = c->queue[c->head % SLOTS];
        r->started = true;
        c->header = (struct header){.size = r->size[0], .tag = r->tag[0]};
        if (fault("truncates") && c->header.size > 1000) c->header.size--;
        const size_t whole = sizeof c->header + c->header.size;
        while (c->moved < whole) {
            const bool head = c->moved < sizeof c->header;
            const uint8_t *from = head ? (uint8_t *)&c->header + c->moved
                                       : (uint8_t *)r->data[0] + (c->moved - sizeof c->header);
            const size_t len = (head ? sizeof c->header : whole) - c->moved;
            const ssize_t n = send(c->fd, from, len, fault("sigpipe") ? 0 : MSG_NOSIGNAL);
            if (n < 0) return gone(c, n);
            c->moved += (size_t)n;
        }
        c->moved = 0;
        c->head++;
        r->done = true;
        free(r->copy);
        r->copy = NULL;
    }
    return c->error;
}

static int pump_receive(struct comm *c) {
    while (!c->error && c->head < c->tail) {
        struct request *r = c->queue[c->head % SLOTS];
        while (c->moved < sizeof c->header) {
            const ssize_t n = recv(c->fd, (uint8_t *)&c->header + c->moved,
                                   sizeof c->header - c->moved, 0);
            if (n <= 0) return gone(c, n);
            c->moved += (size_t)n;
        }
        int i = 0;
        while (i < r->n && (r->filled[i] || r->tag[i] != c->header.tag)) i++;
        if (i == r->n || c->header.size > r->room[i]) {
            SAY("tag %d, %llu bytes: no such receive", c->header.tag,
                (unsigned long long)c->header.size);
            return c->error = RESULT_INTERNAL;
        }
        uint8_t *to = r->kept ? r->kept[i] : r->data[i];
        const size_t whole = sizeof c->header + c->header.size;
        while (c->moved < whole) {
            const ssize_t n = recv(c->fd, to + (c->moved - sizeof c->header), whole - c->moved, 0);
            if (n <= 0) return gone(c, n);
            c->moved += (size_t)n;
        }
        if (fault("corrupts") && c->header.size > 65536) to[65536] ^= 1;
        c->moved = 0;
        r->filled[i] = true;
        r->size[i] = c->header.size;
        if (--r->left == 0) {
            r->done = true;
            c->head++;
        }
    }
    return c->error;
}

static struct request *new_request(struct comm *c) {
    for (int i = 0; i < SLOTS; i++)
        if (!c->slot[i].used) {
            c->slot[i] = (struct request){.comm = c, .used = true};
            return &c->slot[i];
        }
    return NULL;
}

static int isend_any(void *opaque, void *data, size_t size, int tag, void **request) {
    struct comm *c = opaque;
    *request = NULL;
    if (atomic_load(&broken)) return RESULT_INTERNAL;
    if (fault("raises") && pump_send(c)) return c->error;
    struct request *r = new_request(c);
    if (!r) return RESULT_OK;
    r->n = 1;
    r->data[0] = data, r->size[0] = size, r->tag[0] = tag;
    if (fault("loses")) pump_send(c);
    c->queue[c->tail % SLOTS] = r;
    c->tail++;
    *request = r;
    if (fault("early")) r->done = true;
    if (fault("loses")) {
        r->data[0] = r->copy = memcpy(malloc(size + 1), data, size);
        r->done = true;
        return RESULT_OK;
    }
    if (fault("grows") && !malloc(128)) return RESULT_SYSTEM;
    if (fault("reorders") && c->tail - c->head >= 2) {
        struct request **last = &c->queue[(c->tail - 1) % SLOTS],
                       **before = &c->queue[(c->tail - 2) % SLOTS];
        if (!(*before)->started) {
            *last = *before;
            *before = r;
        }
    }
    if (!fault("reorders")) pump_send(c); /* what is wrong is said by test */
    return RESULT_OK;
}

static int irecv_any(void *opaque, int n, void **data, const size_t *sizes, const int *int_sizes,
                     const int *tags, void **request) {
    struct comm *c = opaque;
    *request = NULL;
    struct request *r = n <= RECVS ? new_request(c) : NULL;
    if (!r) return RESULT_OK;
    r->n = r->left = n;
    for (int i = 0; i < n; i++) {
        r->data[i] = data[i];
        r->room[i] = sizes ? sizes[i] : (size_t)int_sizes[i];
        r->tag[i] = tags[i];
    }
    if (fault("keeps")) r->kept = data;
    c->queue[c->tail % SLOTS] = r;
    c->tail++;
    *request = r;
    return RESULT_OK;
}

static int test(void *opaque, int *done, int *sizes) {
    struct request *r = opaque;
    struct comm *c = r->comm;
    *done = 0;
    if (!r->done || fault("early")) {
        const int result = c->sends ? pump_send(c) : pump_receive(c);
        if (result && !r->done) return result;
    }
    if (!r->done) return RESULT_OK;
    for (int i = 0; sizes && i < r->n; i++) sizes[i] = (int)r->size[i];
    if (sizes && fault("oversizes")) sizes[r->n] = 0;
    *done = 1;
    if (!fault("loses") && !fault("early")) r->used = false;
    else if (!r->copy && c->head == c->tail) r->used = false;
    return RESULT_OK;
}

static int iflush(void *comm, int n, void **data, int *sizes, void **memory, void **request) {
    (void)comm, (void)n, (void)data, (void)sizes, (void)memory;
    if (!fault("flush")) *request = NULL;
    return RESULT_OK;
}

static void *goes_on(void *opaque) {
    for (int i = 0; i < 50; i++) {
        pump_receive(opaque);
        usleep(1000);
    }
    return NULL;
}

static int close_comm(void *opaque) {
    struct comm *c = opaque;
    if (fault("hangs") && c->head < c->tail) pause();
    if (fault("late_write") && !c->sends && c->head < c->tail) {
        pthread_t thread;
        pthread_create(&thread, NULL, goes_on, c);
        pthread_detach(thread);
        return RESULT_OK;
    }
    pthread_mutex_lock(&comms_lock);
    struct comm **at = &comms;
    while (*at && *at != c) at = &(*at)->next;
    if (*at) *at = c->next;
    pthread_mutex_unlock(&comms_lock);
    if (!fault("leaks")) close(c->fd);
    free(c);
    return RESULT_OK;
}

__attribute__((destructor)) static void ends(void) {
    if (!fault("exits")) return;
    for (struct comm *c = comms; c; c = c->next) shutdown(c->fd, SHUT_RDWR);
}

/* --- the tables --- */

/* clang-format off */
static int init_v7(logger log) { return start(log); }
static int init_v10(logger log, profiler_callback profile);
static int init_v11(void **context, uint64_t id, struct comm_config *config, logger log,
                    profiler_callback profile);
static int finalize(void *context) {
    (void)context;
    if (fault("finalizes")) atomic_store(&broken, true);
    return RESULT_OK;
}
static int listen_v11(void *context, int device, void *handle, void **out) {
    (void)context;
    return listen_at(device, handle, out);
}
static int connect_v7(int device, void *handle, void **out, struct device_handle **offload) {
    (void)offload;
    return connect_to(device, handle, out);
}
static int connect_v10(int device, struct comm_config *config, void *handle, void **out,
                       struct device_handle **offload) {
    (void)config, (void)offload;
    return connect_to(device, handle, out);
}
static int connect_v11(void *context, int device, void *handle, void **out,
                       struct device_handle **offload) {
    (void)context, (void)offload;
    return connect_to(device, handle, out);
}
static int register_dmabuf(void *comm, void *data, size_t size, int type, uint64_t offset, int fd,
                           void **memory) {
    (void)comm, (void)data, (void)size, (void)type, (void)offset, (void)fd, (void)memory;
    return RESULT_USAGE;
}

static profiler_callback profile_to;

static int isend_v7(void *c, void *data, int size, int tag, void *memory, void **request) {
    (void)memory;
    return isend_any(c, data, (size_t)size, tag, request);
}
static int isend_v9(void *c, void *data, size_t size, int tag, void *memory, void **request) {
    (void)memory;
    return isend_any(c, data, size, tag, request);
}
static int isend_v10(void *c, void *data, size_t size, int tag, void *memory, void *phandle,
                     void **request) {
    (void)memory;
    void *event = NULL;
    if (profile_to && phandle) profile_to(&event, 0, phandle, 1, NULL);
    if (profile_to && phandle && event && event != (void *)0x77) profile_to(&event, 1, phandle, 1, NULL);
    return isend_any(c, data, size, tag, request);
}
static int irecv_v7(void *c, int n, void **data, int *sizes, int *tags, void **memory,
                    void **request) {
    (void)memory;
    return irecv_any(c, n, data, NULL, sizes, tags, request);
}
static int irecv_v9(void *c, int n, void **data, size_t *sizes, int *tags, void **memory,
                    void **request) {
    (void)memory;
    return irecv_any(c, n, data, sizes, NULL, tags, request);
}
static int irecv_v10(void *c, int n, void **data, size_t *sizes, int *tags, void **memory,
                     void **phandles, void **request) {
    (void)memory, (void)phandles;
    return irecv_any(c, n, data, sizes, NULL, tags, request);
}
static int init_v10(logger log, profiler_callback profile) {
    profile_to = profile;
    return start(log);
}
static int init_v11(void **context, uint64_t id, struct comm_config *config, logger log,
                    profiler_callback profile) {
    (void)id, (void)config;
    *context = NULL;
    return init_v10(log, profile);
}

#define EXPORT __attribute__((visibility("default"))) const struct
#define TABLE(N, INIT, PROPERTIES_N, LISTEN_N, CONNECT_N, REGISTER, IO)                          \
    EXPORT net_v##N ncclNetPlugin_v##N = {                                                       \
        .name = "Reference", .init = INIT, .devices = devices, .properties = PROPERTIES_N,        \
        .listen = LISTEN_N, .connect = CONNECT_N, .accept = accept_from,                         \
        .register_memory = REGISTER, .register_dmabuf = register_dmabuf,                         \
        .deregister = deregister, .isend = isend_##IO, .irecv = irecv_##IO, .iflush = iflush,    \
        .test = test, .close_send = close_comm, .close_receive = close_comm,                     \
        .close_listen = close_listener
TABLE(7, init_v7, properties_v7, listen_at, connect_v7, register_v7, v7)};
TABLE(8, init_v7, properties_v8, listen_at, connect_v7, register_any, v7)};
TABLE(9, init_v7, properties_v9, listen_at, connect_v7, register_any, v9)};
TABLE(10, init_v10, properties_v9, listen_at, connect_v10, register_any, v10)};
TABLE(11, init_v11, properties_v11, listen_v11, connect_v11, register_any, v10), .finalize = finalize};
TABLE(12, init_v11, properties_v12, listen_v11, connect_v11, register_any, v10), .finalize = finalize};
/* clang-format on */

#ifdef EXTRA_SYMBOL
__attribute__((visibility("default"))) int reference_plugin_extra = 1;
#endif

/* --- a profiler that looks at the parents, and keeps nothing --- */

struct event {
    _Atomic(int) type;
};
static struct event ring[4096];
static atomic_ulong used;

static int profile_start(void **handle, uint64_t type, void *parent, bool own) {
    struct event *event = &ring[atomic_fetch_add(&used, 1) % 4096];
    if (fault("hoards")) event = calloc(1, 64);
    if (parent && (own || fault("follows")) && ((struct event *)parent)->type < 0) return RESULT_USAGE;
    event->type = (int)type;
    *handle = event;
    return RESULT_OK;
}
static int profile_stop(void *handle) {
    (void)handle;
    return RESULT_OK;
}
static int profile_record(void *handle, int state, union event_state *values) {
    (void)handle, (void)state, (void)values;
    return RESULT_OK;
}
static int profile_end(void *context) {
    (void)context;
    return RESULT_OK;
}
#define OWN(e) ((e)->type != EVENT_PROXY_OP || (e)->proxy_op.pid == getpid())
#define MASK (EVENT_COLL | EVENT_P2P | EVENT_PROXY_OP | EVENT_PROXY_STEP | EVENT_NET)
#define PROFILER(N, TABLE_N, EVENT, ...)                                                         \
    static int profile_init_##N(__VA_ARGS__) {                                                   \
        *mask = MASK;                                                                            \
        *context = NULL;                                                                         \
        return RESULT_OK;                                                                        \
    }                                                                                            \
    static int profile_start_##N(void *context, void **handle, struct EVENT *e) {                \
        (void)context;                                                                           \
        return profile_start(handle, e->type, e->parent, OWN(e));                                \
    }                                                                                            \
    EXPORT TABLE_N ncclProfiler_##N = {.name = "Reference", .init = profile_init_##N,             \
                                       .start = profile_start_##N, .stop = profile_stop,         \
                                       .record = profile_record, .finalize = profile_end};
#pragma GCC diagnostic ignored "-Wunused-parameter"
PROFILER(v3, profiler_v3, event_v3, void **context, int *mask)
PROFILER(v4, profiler_v4, event_v4, void **context, int *mask, const char *name, uint64_t hash,
         int nodes, int ranks, int rank, logger log)
PROFILER(v5, profiler_v5, event_v5, void **context, uint64_t id, int *mask, const char *name,
         int nodes, int ranks, int rank, logger log)
PROFILER(v6, profiler_v5, event_v5, void **context, uint64_t id, int *mask, const char *name,
         int nodes, int ranks, int rank, logger log)
