/* Applications that die with work under way: each of --cycles children connects a pair of queue pairs,
 * posts until its send queue is full, says so, and is killed. How much of it had completed by then goes
 * into the line of JSON at the end. Exit status 1 if a child could not do its part. */
#include "common.h"

#include <getopt.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

enum { SLICE = 65536, POSTS = 64 };

/* Never returns; the parent's SIGKILL ends it. */
static void victim(const char *names[2], int gid_index, int ready) {
    struct device a, b;
    if (device_open(&a, names[0], gid_index) || device_open(&b, names[1], gid_index)) _exit(3);
    uint8_t *memory = mmap(NULL, 2 * SLICE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) _exit(4);
    struct ibv_mr *from = ibv_reg_mr(a.pd, memory, SLICE, ALL_ACCESS);
    struct ibv_mr *to = ibv_reg_mr(b.pd, memory + SLICE, SLICE, ALL_ACCESS);
    struct ibv_cq *cqs[2] = {ibv_create_cq(a.ctx, POSTS, NULL, NULL, 0),
                             ibv_create_cq(b.ctx, POSTS, NULL, NULL, 0)};
    if (!from || !to || !cqs[0] || !cqs[1]) _exit(5);
    struct ibv_qp_init_attr attr = {.send_cq = cqs[0], .recv_cq = cqs[0], .qp_type = IBV_QPT_RC,
                                    .cap = {POSTS, 1, 1, 1, 0}};
    struct ibv_qp *qa = ibv_create_qp(a.pd, &attr);
    attr.send_cq = attr.recv_cq = cqs[1];
    struct ibv_qp *qb = ibv_create_qp(b.pd, &attr);
    if (!qa || !qb) _exit(6);
    const struct path path = {0};
    struct address to_a, to_b;
    address_of(&to_a, &a, qa, NULL);
    address_of(&to_b, &b, qb, NULL);
    if (qp_up(qa, &a, to_a.psn, &to_b, &path) || qp_up(qb, &b, to_b.psn, &to_a, &path)) _exit(7);
    for (int i = 0; i < POSTS; i++) {
        struct ibv_sge sge = {(uintptr_t)memory, SLICE, from->lkey};
        struct ibv_send_wr wr = {.wr_id = (uint64_t)i, .sg_list = &sge, .num_sge = 1,
                                 .opcode = IBV_WR_RDMA_WRITE, .send_flags = IBV_SEND_SIGNALED};
        struct ibv_send_wr *bad;
        wr.wr.rdma.remote_addr = (uintptr_t)memory + SLICE;
        wr.wr.rdma.rkey = to->rkey;
        if (ibv_post_send(qa, &wr, &bad)) _exit(8);
    }
    struct ibv_wc wc[POSTS];
    const int done = ibv_poll_cq(cqs[0], POSTS, wc);
    if (write(ready, &done, sizeof done) != sizeof done) _exit(9);
    for (;;) pause();
}

int main(int argc, char **argv) {
    const char *names[2] = {getenv("VERBS_A"), getenv("VERBS_B")};
    int cycles = 100, gid_index = -1;
    for (int c; (c = getopt(argc, argv, "a:b:g:n:h")) != -1;) {
        switch (c) {
        case 'a': names[0] = optarg; break;
        case 'b': names[1] = optarg; break;
        case 'g': gid_index = atoi(optarg); break;
        case 'n': cycles = atoi(optarg); break;
        default:
            fprintf(c == 'h' ? stdout : stderr,
                    "usage: %s [-a DEVICE] [-b DEVICE] [-g GID_INDEX] [-n CYCLES]\n", argv[0]);
            return c == 'h' ? 0 : 3;
        }
    }
    if (!names[0]) names[0] = "rxe0";
    if (!names[1]) names[1] = "rxe1";
    long completed = 0;
    int failed = 0, status = 0;
    for (int i = 0; i < cycles && !failed; i++) {
        int pipes[2];
        if (pipe(pipes)) return 3;
        const pid_t child = fork();
        if (child < 0) return 3;
        if (child == 0) {
            close(pipes[0]);
            victim(names, gid_index, pipes[1]);
        }
        close(pipes[1]);
        int done = 0;
        if (read(pipes[0], &done, sizeof done) != sizeof done || done < 0) failed = i + 1;
        completed += done;
        close(pipes[0]);
        kill(child, SIGKILL);
        waitpid(child, &status, 0);
    }
    printf("{\"test\":\"orphans\",\"passed\":%s,\"cycles\":%d,\"posts\":%d,\"completed\":%ld,"
           "\"detail\":\"child %d, status %#x\"}\n",
           failed ? "false" : "true", cycles, POSTS, completed, failed, (unsigned)status);
    return failed ? 1 : 0;
}
