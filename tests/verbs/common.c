#include "common.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <stdatomic.h>
#include <sys/socket.h>

#define TRY(call)                                                                                \
    do {                                                                                         \
        const int error_ = (call);                                                               \
        if (error_) {                                                                            \
            fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call,                        \
                    strerror(error_ > 0 ? error_ : errno));                                      \
            return error_ > 0 ? error_ : errno;                                                  \
        }                                                                                        \
    } while (0)

const char *device_name(const char *given, const char *variable, const char *otherwise) {
    if (given) return given;
    const char *set = getenv(variable);
    return set && *set ? set : otherwise;
}

static int choose_gid(struct ibv_context *ctx, const struct ibv_port_attr *port) {
    static const uint8_t mapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
    for (int i = 0; i < port->gid_tbl_len && i < 64; i++) {
        struct ibv_gid_entry entry;
        if (ibv_query_gid_ex(ctx, 1, (uint32_t)i, &entry, 0)) continue;
        if (entry.gid_type == IBV_GID_TYPE_ROCE_V2 && memcmp(entry.gid.raw, mapped, 12) == 0)
            return i;
    }
    return 0;
}

int device_open(struct device *device, const char *name, int gid_index) {
    memset(device, 0, sizeof *device);
    int n = 0;
    struct ibv_device **list = ibv_get_device_list(&n);
    for (int i = 0; list && i < n; i++)
        if (strcmp(ibv_get_device_name(list[i]), name) == 0)
            device->ctx = ibv_open_device(list[i]);
    if (!device->ctx) {
        fprintf(stderr, "cannot open the RDMA device %s; there are %d:", name, n);
        for (int i = 0; list && i < n; i++) fprintf(stderr, " %s", ibv_get_device_name(list[i]));
        fputc('\n', stderr);
        if (list) ibv_free_device_list(list);
        return ENODEV;
    }
    ibv_free_device_list(list);
    snprintf(device->name, sizeof device->name, "%s", name);
    TRY(ibv_query_port(device->ctx, 1, &device->port));
    TRY(ibv_query_device(device->ctx, &device->attr));
    if (gid_index < 0 && getenv("VERBS_GID_INDEX")) gid_index = atoi(getenv("VERBS_GID_INDEX"));
    device->gid_index = gid_index >= 0 ? gid_index : choose_gid(device->ctx, &device->port);
    TRY(ibv_query_gid(device->ctx, 1, device->gid_index, &device->gid));
    device->pd = ibv_alloc_pd(device->ctx);
    TRY(device->pd ? 0 : -1);
    return 0;
}

void device_close(struct device *device) {
    if (device->pd) ibv_dealloc_pd(device->pd);
    if (device->ctx) ibv_close_device(device->ctx);
    memset(device, 0, sizeof *device);
}

void address_of(struct address *address, const struct device *device, const struct ibv_qp *qp,
                const struct ibv_mr *mr) {
    memset(address, 0, sizeof *address);
    address->qpn = qp->qp_num;
    /* Another one each time: a packet of before a RESET must not pass for one of after it. */
    static atomic_uint connections;
    const unsigned nth = atomic_fetch_add(&connections, 1);
    address->psn = (qp->qp_num * 7919u + nth * 100003u + 4242u) & 0xffffff;
    address->mtu = device->port.active_mtu;
    address->lid = device->port.lid;
    memcpy(address->gid, device->gid.raw, 16);
    if (mr) {
        address->addr = (uintptr_t)mr->addr;
        address->len = mr->length;
        address->rkey = mr->rkey;
    }
}

int qp_up(struct ibv_qp *qp, const struct device *device, uint32_t psn,
          const struct address *peer, const struct path *path) {
    struct ibv_qp_attr attr;
    int mask = attr_init(&attr, qp->qp_type);
    TRY(ibv_modify_qp(qp, &attr, mask));
    mask = attr_rtr(&attr, qp->qp_type, device->gid_index, device->port.active_mtu, peer, path);
    TRY(ibv_modify_qp(qp, &attr, mask));
    mask = attr_rts(&attr, qp->qp_type, psn, path);
    TRY(ibv_modify_qp(qp, &attr, mask));
    return 0;
}

int qp_state(struct ibv_qp *qp, enum ibv_qp_state to) {
    struct ibv_qp_attr attr = {.qp_state = to};
    return ibv_modify_qp(qp, &attr, IBV_QP_STATE);
}

static void die(const char *what) {
    fprintf(stderr, "%s: %s\n", what, strerror(errno));
    exit(3);
}

int rendezvous_listen(int port) {
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int on = 1;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    if (fd < 0) die("socket");
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, (struct sockaddr *)&at, sizeof at) || listen(fd, 16)) die("listen");
    return fd;
}

int rendezvous_accept(int listener) {
    const int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    const int on = 1;
    if (fd < 0) die("accept");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    return fd;
}

int rendezvous_connect(const char *host, int port) {
    char service[16];
    snprintf(service, sizeof service, "%d", port);
    struct addrinfo hints = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM}, *found;
    const int error = getaddrinfo(host, service, &hints, &found);
    if (error) {
        fprintf(stderr, "%s: %s\n", host, gai_strerror(error));
        exit(3);
    }
    const uint64_t until = now_ns() + 20000000000u * slowness();
    for (;;) {
        const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        const int on = 1;
        if (fd < 0) die("socket");
        if (connect(fd, found->ai_addr, found->ai_addrlen) == 0) {
            setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
            freeaddrinfo(found);
            return fd;
        }
        if (now_ns() > until) die("connect");
        close(fd);
        sleep_ms(20);
    }
}

int rendezvous(const char *host, int port) {
    if (host) return rendezvous_connect(host, port);
    const int listener = rendezvous_listen(port);
    const int fd = rendezvous_accept(listener);
    close(listener);
    return fd;
}

void tell(int fd, const void *what, size_t len) {
    for (size_t at = 0; at < len;) {
        const ssize_t n = send(fd, (const char *)what + at, len - at, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) die("the peer is gone (send)");
        at += (size_t)n;
    }
}

void hear(int fd, void *what, size_t len) {
    for (size_t at = 0; at < len;) {
        const ssize_t n = recv(fd, (char *)what + at, len - at, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n == 0) errno = ECONNRESET;
        if (n <= 0) die("the peer is gone (recv)");
        at += (size_t)n;
    }
}

void meet(int fd) {
    char here = 1;
    tell(fd, &here, 1);
    hear(fd, &here, 1);
}

int endpoint_open(struct endpoint *end, size_t memory, unsigned depth, unsigned receives, uint8_t tclass) {
    if (posix_memalign((void **)&end->buf, 4096, memory)) return ENOMEM;
    end->mr = ibv_reg_mr(end->device.pd, end->buf, memory, ALL_ACCESS);
    end->cq = ibv_create_cq(end->device.ctx, (int)(depth + 2 * receives), NULL, NULL, 0);
    struct ibv_qp_init_attr attr = {.send_cq = end->cq, .recv_cq = end->cq, .qp_type = IBV_QPT_RC,
                                    .cap = {.max_send_wr = depth, .max_recv_wr = receives,
                                            .max_send_sge = 1, .max_recv_sge = 1}};
    end->qp = end->mr && end->cq ? ibv_create_qp(end->device.pd, &attr) : NULL;
    if (!end->qp) {
        fprintf(stderr, "%s: %s\n", end->device.name, strerror(errno));
        return errno;
    }
    struct address mine;
    const struct path path = {.tclass = tclass};
    address_of(&mine, &end->device, end->qp, end->mr);
    tell(end->fd, &mine, sizeof mine);
    hear(end->fd, &end->peer, sizeof end->peer);
    return qp_up(end->qp, &end->device, mine.psn, &end->peer, &path);
}

int endpoint_close(struct endpoint *end) {
    int error = ibv_destroy_qp(end->qp);
    if (!error) error = ibv_destroy_cq(end->cq);
    if (!error) error = ibv_dereg_mr(end->mr);
    device_close(&end->device);
    close(end->fd);
    free(end->buf);
    return error;
}

bool peer_lost(int fd) {
    char said = 1;
    const ssize_t n = recv(fd, &said, 1, MSG_PEEK | MSG_DONTWAIT);
    if (n < 0) return errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR;
    return n == 0 || said == 0;
}

int by_value(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double quantile(const double *sorted, size_t n, double q) {
    if (n == 0) return 0;
    size_t rank = (size_t)(q * (double)n);
    if ((double)rank < q * (double)n) rank++;
    return sorted[rank ? rank - 1 : 0];
}
