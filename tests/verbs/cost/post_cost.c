/* Posts WRITEs one by one and polls for each: nanoseconds of one. Arguments: how many, bytes of each, and
 * of how many one is signaled. */
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

int main(int argc, char **argv) {
    if (argc != 4) return fprintf(stderr, "usage: post_cost COUNT BYTES SIGNAL_EVERY\n"), 2;
    const long count = atol(argv[1]), every = atol(argv[3]);
    struct ibv_context *context = ibv_open_device(NULL);
    if (!context) return 1;
    struct ibv_pd pd = {.context = context};
    struct ibv_cq cq = {.context = context};
    struct ibv_qp_init_attr init = {
        .send_cq = &cq, .qp_type = IBV_QPT_RC, .cap = {.max_send_wr = 128, .max_send_sge = 1}};
    struct ibv_qp *qp = ibv_create_qp(&pd, &init);
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTS};
    if (!qp || ibv_modify_qp(qp, &attr, IBV_QP_STATE)) return 1;
    qp->send_cq = &cq;
    struct ibv_sge sge = {.addr = 4096, .length = (uint32_t)atol(argv[2])};
    struct timespec began, ended;
    clock_gettime(CLOCK_MONOTONIC, &began);
    for (long i = 1; i <= count; i++) {
        const int signaled = i % every == 0;
        struct ibv_send_wr *bad, wr = {.wr_id = (uint64_t)i,
                                       .sg_list = &sge,
                                       .num_sge = 1,
                                       .opcode = IBV_WR_RDMA_WRITE,
                                       .send_flags = signaled ? IBV_SEND_SIGNALED : 0};
        struct ibv_wc wc;
        if (ibv_post_send(qp, &wr, &bad)) return 1;
        if (!signaled) continue;
        while (ibv_poll_cq(&cq, 1, &wc) == 0) {}
        if (wc.wr_id != (uint64_t)i) return 1;
    }
    clock_gettime(CLOCK_MONOTONIC, &ended);
    printf("%.1f\n", ((double)(ended.tv_sec - began.tv_sec) * 1e9 +
                      (double)(ended.tv_nsec - began.tv_nsec)) / (double)count);
    return ibv_destroy_qp(qp);
}
