/* One process that writes to itself through a device, one WRITE at a time: microseconds from the post to
 * its return and to its completion, medians. Two processes that poll disturb each other where there are
 * few processors; this one is stable to a per cent. Arguments: device, bytes, how many. */
#include "../common.h"

int main(int argc, char **argv) {
    if (argc != 4) return fprintf(stderr, "usage: self_write DEVICE BYTES COUNT\n"), 2;
    const unsigned len = (unsigned)atoi(argv[2]), count = (unsigned)atoi(argv[3]);
    static uint8_t buf[2 << 16];
    if (!count || len > sizeof buf / 2) return 2;
    struct device device;
    if (device_open(&device, argv[1], -1)) return 3;
    struct ibv_mr *mr = ibv_reg_mr(device.pd, buf, sizeof buf, ALL_ACCESS);
    struct ibv_cq *cq = ibv_create_cq(device.ctx, 256, NULL, NULL, 0);
    struct ibv_qp_init_attr init = {
        .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
        .cap = {.max_send_wr = 64, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1}};
    struct ibv_qp *qps[2];
    struct address ends[2];
    for (int i = 0; i < 2; i++) {
        qps[i] = mr && cq ? ibv_create_qp(device.pd, &init) : NULL;
        if (!qps[i]) return perror(argv[1]), 3;
        address_of(&ends[i], &device, qps[i], mr);
    }
    const struct path path = {0};
    for (int i = 0; i < 2; i++)
        if (qp_up(qps[i], &device, ends[i].psn, &ends[1 - i], &path)) return 3;
    double *returned = calloc(count, sizeof *returned), *complete = calloc(count, sizeof *complete);
    for (unsigned i = 0; i < count; i++) {
        struct ibv_sge sge = {(uintptr_t)buf, len, mr->lkey};
        struct ibv_send_wr *bad, wr = {.wr_id = i, .sg_list = &sge, .num_sge = 1,
                                       .opcode = IBV_WR_RDMA_WRITE,
                                       .send_flags = IBV_SEND_SIGNALED};
        wr.wr.rdma.remote_addr = (uintptr_t)buf + sizeof buf / 2;
        wr.wr.rdma.rkey = mr->rkey;
        struct ibv_wc wc;
        const uint64_t began = now_ns();
        if (ibv_post_send(qps[0], &wr, &bad)) return perror("ibv_post_send"), 1;
        returned[i] = (double)(now_ns() - began) / 1e3;
        int got;
        while (!(got = ibv_poll_cq(cq, 1, &wc))) {}
        complete[i] = (double)(now_ns() - began) / 1e3;
        if (got < 0 || wc.status != IBV_WC_SUCCESS || wc.wr_id != i) return 1;
    }
    qsort(returned, count, sizeof *returned, by_value);
    qsort(complete, count, sizeof *complete, by_value);
    printf("%.2f %.2f\n", quantile(returned, count, 0.5), quantile(complete, count, 0.5));
    return 0;
}
