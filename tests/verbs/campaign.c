/* A worker of a fault campaign on verbs: numbered transfers on several RC queue pairs between two processes. It knows
 * nothing of Laxity.
 *
 *   campaign receive|send DEVICE GID_INDEX SOCKET SEED
 *
 * Standard output carries frames for the campaign's oracle (tools/rig/src/faults/frame.rs): what was submitted, what
 * came, what is complete. Standard input carries commands of one byte: `e` finish, `f` fork, `t` end a thread that has
 * posted, `q` put a queue pair with work requests into the error state. Each queue pair has a connection to SOCKET, by
 * which the two sides exchange addresses.
 *
 * queue 0: SEND, in lists and inline. 1: RDMA_WRITE_WITH_IMM. 2: RDMA_READ. From 1000 on: queue pairs that end early.
 */
#include "common.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>

enum { SLOT = 32768, DEPTH = 8, INLINE = 64, LIST = 3, EXTRA = 1000, BASE = 3 };
enum { EMPTY = 0xee, REPORTED_MS = 100, WATCH_MS = 5 };
/* Exit statuses of a worker that saw what must not be. */
enum { POST_FAILED = 10, WRONG_ORDER, SUCCESS_AFTER_ERROR, COMPLETED_TWICE, NO_SETUP };

static struct device device;
static const char *address;
static uint64_t seed;
static atomic_bool stop;
static atomic_uint_fast64_t starved_ns;
static pthread_mutex_t output = PTHREAD_MUTEX_INITIALIZER;

struct hello {
    uint32_t queue, unused;
    struct address at;
};

struct queue {
    uint32_t id;
    int fd;
    uint8_t *memory;
    struct ibv_mr *mr;
    struct ibv_cq *cq;
    struct ibv_qp *qp;
    struct address peer;
    /* Transfers that were submitted, that completed, and that the peer has taken. */
    uint64_t next, done, taken;
    uint64_t size[DEPTH], begin_ns[DEPTH], starved_ns[DEPTH];
    uint64_t random;
    bool broken;
};

static void fail(int status, const char *what) {
    fprintf(stderr, "campaign: %s: %s\n", what, strerror(errno));
    _exit(status);
}

static void put_all(const void *what, size_t len) {
    for (size_t at = 0; at < len;) {
        const ssize_t n = write(1, (const char *)what + at, len - at);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) _exit(0);
        at += (size_t)n;
    }
}

static void frame(char kind, bool flag, uint64_t starved_ms, uint32_t queue, uint64_t number, uint64_t value,
                  const void *payload, uint64_t len) {
    struct __attribute__((packed)) {
        char kind;
        uint8_t flag;
        uint16_t starved_ms;
        uint32_t queue;
        uint64_t number, value, len;
    } head = {kind, flag, starved_ms > 65535 ? 65535 : (uint16_t)starved_ms, queue, number, value, len};
    pthread_mutex_lock(&output);
    put_all(&head, sizeof head);
    put_all(payload, len);
    pthread_mutex_unlock(&output);
}

static void say(char kind, const struct queue *queue, uint64_t number, uint64_t value) {
    frame(kind, kind == 'S', 0, queue->id, number, value, NULL, 0);
}

/* Each word names its queue, its transfer and its place, as frame.rs has it. */
static uint64_t word(uint32_t queue, uint64_t number, uint64_t index) {
    return (uint64_t)queue << 56 | (number & 0xffffffff) << 24 | (index & 0xffffff);
}

static void content(uint8_t *to, uint32_t queue, uint64_t number, uint64_t size) {
    for (uint64_t i = 0; i < size / 8; i++) {
        const uint64_t w = word(queue, number, i);
        memcpy(to + 8 * i, &w, 8);
    }
}

static uint64_t draw(struct queue *queue, uint64_t below) {
    queue->random = queue->random * 6364136223846793005u + 1442695040888963407u;
    return (queue->random >> 33) % below;
}

static uint64_t draw_size(struct queue *queue) {
    static const uint64_t most[] = {INLINE / 8, 256, SLOT / 8};
    return 8 * (1 + draw(queue, most[draw(queue, COUNT(most))]));
}

/* As tell() and hear(), but a peer that is gone is expected here. */
static bool told(int fd, const void *what, size_t len) {
    return send(fd, what, len, MSG_NOSIGNAL) == (ssize_t)len;
}

static bool heard(int fd, void *what, size_t len) {
    return recv(fd, what, len, MSG_WAITALL) == (ssize_t)len;
}

/* Makes the queue pair's parts. Failure is one of the worker's. */
static void open_queue(struct queue *queue, uint32_t id, int fd) {
    memset(queue, 0, sizeof *queue);
    queue->id = id;
    queue->fd = fd;
    queue->random = seed * 31 + id;
    if (posix_memalign((void **)&queue->memory, 4096, DEPTH * SLOT)) fail(NO_SETUP, "memory");
    memset(queue->memory, EMPTY, DEPTH * SLOT);
    queue->mr = ibv_reg_mr(device.pd, queue->memory, DEPTH * SLOT, ALL_ACCESS);
    queue->cq = ibv_create_cq(device.ctx, 4 * DEPTH, NULL, NULL, 0);
    struct ibv_qp_init_attr attr = {.send_cq = queue->cq, .recv_cq = queue->cq, .qp_type = IBV_QPT_RC,
                                    .cap = {DEPTH, DEPTH, 1, 1, INLINE}};
    queue->qp = queue->mr && queue->cq ? ibv_create_qp(device.pd, &attr) : NULL;
    if (!queue->qp) fail(NO_SETUP, "queue pair");
}

static void close_queue(struct queue *queue) {
    if (ibv_destroy_qp(queue->qp) || ibv_destroy_cq(queue->cq) || ibv_dereg_mr(queue->mr)) fail(NO_SETUP, "destroy");
    free(queue->memory);
    close(queue->fd);
}

static void connect_qp(struct queue *queue, uint32_t psn) {
    /* Retries outlast two links that are down for four seconds each: seven times two seconds. */
    const struct path path = {.timeout = 19, .retry_cnt = 6};
    if (qp_up(queue->qp, &device, psn, &queue->peer, &path)) fail(NO_SETUP, "connect");
}

/* receive */

static void post_receive(struct queue *queue, uint64_t slot) {
    struct ibv_sge sge = {(uintptr_t)(queue->memory + slot * SLOT), SLOT, queue->mr->lkey};
    struct ibv_recv_wr wr = {.wr_id = slot, .sg_list = &sge, .num_sge = queue->id == 1 ? 0 : 1}, *bad;
    if (ibv_post_recv(queue->qp, &wr, &bad) && !queue->broken) fail(POST_FAILED, "post_recv");
}

static void take(struct queue *queue, const struct ibv_wc *wc) {
    if (wc->status != IBV_WC_SUCCESS) {
        queue->broken = true;
        return;
    }
    const uint64_t slot = queue->id == 1 ? ntohl(wc->imm_data) : wc->wr_id;
    const uint64_t number = queue->next++;
    uint8_t *at = queue->memory + slot * SLOT;
    uint64_t size = wc->byte_len;
    say('S', queue, number, size);
    /* What is beyond its end is too much for the oracle. */
    if (size < SLOT && not_all(at + size, SLOT - size, EMPTY) != SIZE_MAX) size += 8;
    frame('B', false, 0, queue->id, number, 0, at, size);
    say('D', queue, number, 0);
    memset(at, EMPTY, SLOT);
    post_receive(queue, wc->wr_id);
    /* The sender may use the slot again. */
    if (queue->id == 1) told(queue->fd, "\1", 1);
}

static bool take_all(struct queue *queue) {
    struct ibv_wc wc[DEPTH];
    const int n = ibv_poll_cq(queue->cq, DEPTH, wc);
    for (int i = 0; i < n; i++) take(queue, &wc[i]);
    return n > 0;
}

static atomic_int open_queues, all_queues;

static void *receive(void *argument) {
    const int fd = (int)(intptr_t)argument;
    struct queue queue;
    struct hello hello;
    if (heard(fd, &hello, sizeof hello)) {
        open_queue(&queue, hello.queue, fd);
        queue.peer = hello.at;
        address_of(&hello.at, &device, queue.qp, queue.mr);
        connect_qp(&queue, hello.at.psn);
        for (uint64_t slot = 0; slot < DEPTH; slot++) {
            if (queue.id == 2)
                content(queue.memory + slot * SLOT, 0, 0, SLOT);
            else
                post_receive(&queue, slot);
        }
        told(fd, &hello, sizeof hello);
        uint64_t count;
        ssize_t got = -1;
        while (got < 0) {
            while (take_all(&queue)) continue;
            usleep(300);
            got = recv(fd, &count, sizeof count, MSG_DONTWAIT);
        }
        if (queue.id != 2) {
            const uint64_t give_up = now_ns() + 2000000000u;
            while (take_all(&queue) || (got > 0 && queue.next < count && now_ns() < give_up)) continue;
            say(got > 0 ? 'E' : 'X', &queue, got > 0 ? count : 0, 0);
        }
        close_queue(&queue);
    }
    atomic_fetch_sub(&open_queues, 1);
    return NULL;
}

static void receiver(void) {
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    snprintf(at.sun_path, sizeof at.sun_path, "%s", address);
    const int listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (bind(listener, (struct sockaddr *)&at, sizeof at) || listen(listener, 64)) fail(NO_SETUP, "listen");
    while (all_queues == 0 || open_queues > 0) {
        struct pollfd ready = {listener, POLLIN, 0};
        if (poll(&ready, 1, 50) <= 0) continue;
        const int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
        pthread_t thread;
        atomic_fetch_add(&open_queues, 1);
        atomic_fetch_add(&all_queues, 1);
        if (fd < 0 || pthread_create(&thread, NULL, receive, (void *)(intptr_t)fd)) fail(NO_SETUP, "accept");
        pthread_detach(thread);
    }
}

/* send */

/* Connects a queue. Returns false if the receiver is gone. */
static bool dial(struct queue *queue, uint32_t id) {
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    snprintf(at.sun_path, sizeof at.sun_path, "%s", address);
    const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    while (connect(fd, (struct sockaddr *)&at, sizeof at)) {
        /* The first queue waits for a receiver that starts. */
        if (id != 0) return false;
        usleep(2000);
    }
    open_queue(queue, id, fd);
    struct hello hello = {.queue = id};
    address_of(&hello.at, &device, queue->qp, queue->mr);
    const uint32_t psn = hello.at.psn;
    if (!told(fd, &hello, sizeof hello) || !heard(fd, &hello, sizeof hello)) return false;
    queue->peer = hello.at;
    connect_qp(queue, psn);
    return true;
}

/* Posts `count` transfers as one list. */
static void post(struct queue *queue, unsigned count) {
    struct ibv_sge sge[LIST];
    struct ibv_send_wr wr[LIST], *bad;
    memset(wr, 0, sizeof wr);
    for (unsigned i = 0; i < count; i++) {
        const uint64_t number = queue->next++, slot = number % DEPTH, size = draw_size(queue);
        uint8_t *from = queue->memory + slot * SLOT;
        const uint64_t remote = queue->peer.addr + slot * SLOT;
        queue->size[slot] = size;
        queue->begin_ns[slot] = now_ns();
        queue->starved_ns[slot] = starved_ns;
        sge[i] = (struct ibv_sge){(uintptr_t)from, (uint32_t)size, queue->mr->lkey};
        wr[i] = (struct ibv_send_wr){.wr_id = number, .sg_list = &sge[i], .num_sge = 1,
                                     .next = i + 1 < count ? &wr[i + 1] : NULL, .opcode = IBV_WR_SEND,
                                     .send_flags = IBV_SEND_SIGNALED | (size <= INLINE ? IBV_SEND_INLINE : 0)};
        wr[i].wr.rdma.remote_addr = remote;
        wr[i].wr.rdma.rkey = queue->peer.rkey;
        if (queue->id == 1) {
            wr[i].opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
            wr[i].imm_data = htonl((uint32_t)slot);
        } else if (queue->id == 2) {
            wr[i].opcode = IBV_WR_RDMA_READ;
            wr[i].send_flags = IBV_SEND_SIGNALED;
        }
        if (queue->id == 2)
            memset(from, EMPTY, SLOT);
        else
            content(from, queue->id, number, size);
        /* The receiver's frames have the bytes that came. */
        say('S', queue, number, queue->id == 2 ? size : 0);
    }
    if (ibv_post_send(queue->qp, wr, &bad)) fail(POST_FAILED, "post_send");
}

/* What a READ brought has the words of transfer 0 of queue 0. */
static void put_read(struct queue *queue, uint64_t number) {
    const uint64_t slot = number % DEPTH, size = queue->size[slot];
    uint8_t *at = queue->memory + slot * SLOT;
    for (uint64_t i = 0; i < size / 8; i++) {
        uint64_t w;
        memcpy(&w, at + 8 * i, 8);
        w += word(queue->id, number, 0);
        memcpy(at + 8 * i, &w, 8);
    }
    frame('B', false, 0, queue->id, number, 0, at, size);
}

static void report_wait(struct queue *queue, uint64_t number) {
    const uint64_t slot = number % DEPTH, end = now_ns();
    if (end - queue->begin_ns[slot] < REPORTED_MS * 1000000u) return;
    /* The watching thread runs at least once after the wait. */
    sleep_ms(2 * WATCH_MS);
    const uint64_t starved_ms = (starved_ns - queue->starved_ns[slot]) / 1000000u;
    frame('W', false, starved_ms, queue->id, queue->begin_ns[slot], end, NULL, 0);
}

/* Takes completions. Each must be that of the oldest work request, and none succeeds after one that failed. */
static void poll_queue(struct queue *queue) {
    struct ibv_wc wc[DEPTH];
    const int n = ibv_poll_cq(queue->cq, DEPTH, wc);
    for (int i = 0; i < n; i++) {
        const uint64_t number = wc[i].wr_id;
        if (queue->done == queue->next) fail(COMPLETED_TWICE, "a completion of nothing");
        if (wc[i].status != IBV_WC_SUCCESS) {
            if (number != queue->done) fail(WRONG_ORDER, "an error out of order");
            queue->broken = true;
        } else {
            if (queue->broken) fail(SUCCESS_AFTER_ERROR, "success after an error");
            report_wait(queue, number);
            if (queue->id == 2) put_read(queue, number);
            say('D', queue, number, 0);
        }
        queue->done++;
    }
    char taken[DEPTH];
    const ssize_t more = queue->id == 1 ? recv(queue->fd, taken, sizeof taken, MSG_DONTWAIT) : 0;
    if (more > 0) queue->taken += (uint64_t)more;
    if (n <= 0) usleep(200);
}

/* Slots that a new transfer can have. */
static unsigned room(const struct queue *queue) {
    const uint64_t used = queue->next - (queue->id == 1 && queue->taken < queue->done ? queue->taken : queue->done);
    return (unsigned)(DEPTH - used);
}

static void drain(struct queue *queue) {
    while (queue->done < queue->next) poll_queue(queue);
    /* One that completes again would do so about now. */
    for (int i = 0; i < 10; i++) poll_queue(queue);
}

static void *send_queue(void *argument) {
    struct queue *queue = argument;
    while (!stop && !queue->broken) {
        const unsigned most = room(queue) < LIST ? room(queue) : LIST;
        if (most > 0) post(queue, 1 + (unsigned)draw(queue, most));
        poll_queue(queue);
        /* A receiver that is gone takes nothing, and the queue pair may have nothing to fail. */
        if (most == 0 && queue->done == queue->next && peer_lost(queue->fd)) break;
    }
    drain(queue);
    if (queue->broken || !told(queue->fd, &queue->next, sizeof queue->next))
        say('X', queue, 0, 0);
    else
        say('E', queue, queue->next, 0);
    return NULL;
}

/* A queue pair that gets into the error state with work requests: all of them complete once, in order. */
static void *break_queue(void *argument) {
    struct queue queue;
    if (!dial(&queue, (uint32_t)(intptr_t)argument)) return NULL;
    while (queue.next + LIST <= DEPTH) post(&queue, LIST);
    usleep((useconds_t)draw(&queue, 20000));
    if (qp_state(queue.qp, IBV_QPS_ERR)) fail(NO_SETUP, "error state");
    drain(&queue);
    say('X', &queue, 0, 0);
    close_queue(&queue);
    return NULL;
}

/* Ends its thread with work requests under way, for whose ends nobody asks. */
static void *lose_thread(void *argument) {
    struct queue *queue = malloc(sizeof *queue);
    if (!queue || !dial(queue, (uint32_t)(intptr_t)argument)) return NULL;
    post(queue, LIST);
    say('X', queue, 0, 0);
    syscall(SYS_exit, 0);
    return NULL;
}

static void *fork_child(void *argument) {
    const pid_t child = fork();
    if (child == 0) {
        execl("/bin/true", "true", NULL);
        _exit(1);
    }
    waitpid(child, NULL, 0);
    return argument;
}

static void *obey(void *argument) {
    uintptr_t extra = EXTRA;
    for (char command; read(0, &command, 1) == 1;) {
        void *(*what)(void *) = command == 'f'   ? fork_child
                                : command == 't' ? lose_thread
                                : command == 'q' ? break_queue
                                                 : NULL;
        pthread_t thread;
        if (command == 'e')
            stop = true;
        else if (what && !pthread_create(&thread, NULL, what, (void *)++extra))
            pthread_detach(thread);
    }
    /* The driver is gone. */
    _exit(0);
    return argument;
}

/* Counts the time in which the process wanted to run and did not. */
static void *watch(void *argument) {
    for (uint64_t last = now_ns();; last = now_ns()) {
        sleep_ms(WATCH_MS);
        const uint64_t late = now_ns() - last;
        if (late > (WATCH_MS + 1) * 1000000u) starved_ns += late - (WATCH_MS + 1) * 1000000u;
    }
    return argument;
}

int main(int argc, char **argv) {
    if (argc != 6) {
        fprintf(stderr, "usage: %s receive|send DEVICE GID_INDEX SOCKET SEED\n", argv[0]);
        return 3;
    }
    /* A driver that is killed takes its workers with it. */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    address = argv[4];
    seed = strtoull(argv[5], NULL, 10);
    if (device_open(&device, argv[2], atoi(argv[3]))) return NO_SETUP;
    pthread_t thread, threads[BASE];
    static struct queue queues[BASE];
    if (pthread_create(&thread, NULL, obey, NULL) || pthread_create(&thread, NULL, watch, NULL)) return NO_SETUP;
    if (strcmp(argv[1], "receive") == 0) {
        receiver();
        return 0;
    }
    for (unsigned id = 0; id < BASE; id++)
        if (!dial(&queues[id], id)) return NO_SETUP;
    for (unsigned id = 0; id < BASE; id++)
        if (pthread_create(&threads[id], NULL, send_queue, &queues[id])) return NO_SETUP;
    for (unsigned id = 0; id < BASE; id++) pthread_join(threads[id], NULL);
    /* Not by return: threads that were lost can't end in order. */
    fflush(NULL);
    exit(0);
}
