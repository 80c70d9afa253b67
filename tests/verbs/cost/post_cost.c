/* Posts WRITEs one by one and polls for each: nanoseconds of one. Arguments: how many, bytes of each, and
 * of how many one is signaled; then, if wanted, how many SENDs of as much come first, and microseconds
 * between two posts. POST_TCLASS is the traffic class of the queue pair, POST_AFTER_US the time between
 * its making and the first post, POST_WAITS_US that between the last post and the end. With POST_BUILDS
 * work requests are built by ibv_wr_start and the functions after it. With POST_POLLS_NOT no post is polled
 * for, and with POST_POLLS_LAST all are at the end. With POST_INVALIDATES a LOCAL_INV follows each. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static struct ibv_cq cq;
static struct ibv_qp *qp;
static struct ibv_sge sge = {.addr = 4096};

static struct ibv_qp_ex *building;

static int build(const struct ibv_send_wr *wr) {
    ibv_wr_start(building);
    building->wr_id = wr->wr_id;
    building->wr_flags = wr->send_flags;
    if (wr->opcode == IBV_WR_SEND)
        ibv_wr_send(building);
    else
        ibv_wr_rdma_write(building, 0, 0);
    ibv_wr_set_sge(building, 0, wr->sg_list->addr, wr->sg_list->length);
    return ibv_wr_complete(building);
}

static int post(enum ibv_wr_opcode opcode, uint64_t id, int signaled) {
    struct ibv_send_wr *bad, wr = {.wr_id = id,
                                   .sg_list = &sge,
                                   .num_sge = 1,
                                   .opcode = opcode,
                                   .send_flags = signaled ? IBV_SEND_SIGNALED : 0};
    struct ibv_wc wc;
    int error;
    if (getenv("POST_INVALIDATES")) {
        struct ibv_send_wr invalidate = {.opcode = IBV_WR_LOCAL_INV};
        wr.next = &invalidate;
        return ibv_post_send(qp, &wr, &bad);
    }
    while ((error = building ? build(&wr) : ibv_post_send(qp, &wr, &bad)) == ENOMEM) {}
    if (error) return 1;
    if (!signaled || getenv("POST_POLLS_NOT")) return 0;
    while (ibv_poll_cq(&cq, 1, &wc) == 0) {}
    return wc.wr_id != id;
}

static long setting(const char *name) {
    const char *text = getenv(name);
    return text ? atol(text) : 0;
}

int main(int argc, char **argv) {
    if (argc < 4 || argc > 6)
        return fprintf(stderr, "usage: post_cost COUNT BYTES SIGNAL_EVERY [SENDS [PAUSE_US]]\n"), 2;
    const long count = atol(argv[1]), every = atol(argv[3]);
    const long sends = argc > 4 ? atol(argv[4]) : 0, pause = argc > 5 ? atol(argv[5]) : 0;
    struct ibv_context *context = ibv_open_device(NULL);
    if (!context) return 1;
    struct ibv_pd pd = {.context = context};
    cq.context = context;
    sge.length = (uint32_t)atol(argv[2]);
    struct ibv_qp_init_attr init = {
        .send_cq = &cq, .qp_type = IBV_QPT_RC, .cap = {.max_send_wr = 128, .max_send_sge = 1}};
    struct ibv_qp_init_attr_ex init_ex = {
        .send_cq = &cq, .qp_type = IBV_QPT_RC, .cap = init.cap, .pd = &pd,
        .comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        .send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_SEND};
    qp = getenv("POST_BUILDS") ? ibv_create_qp_ex(context, &init_ex) : ibv_create_qp(&pd, &init);
    if (qp && getenv("POST_BUILDS")) building = ibv_qp_to_qp_ex(qp);
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR, .ah_attr = {.is_global = 1}};
    attr.ah_attr.grh.traffic_class = (uint8_t)setting("POST_TCLASS");
    if (!qp || ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV)) return 1;
    attr.qp_state = IBV_QPS_RTS;
    if (ibv_modify_qp(qp, &attr, IBV_QP_STATE)) return 1;
    qp->send_cq = &cq;
    usleep((useconds_t)setting("POST_AFTER_US"));
    for (long i = 1; i <= sends; i++)
        if (post(IBV_WR_SEND, (uint64_t)i, 1)) return 1;
    struct timespec began, ended;
    clock_gettime(CLOCK_MONOTONIC, &began);
    for (long i = 1; i <= count; i++) {
        if (post(IBV_WR_RDMA_WRITE, (uint64_t)i, i % every == 0)) return 1;
        if (pause) usleep((useconds_t)pause);
    }
    clock_gettime(CLOCK_MONOTONIC, &ended);
    struct ibv_wc wc;
    for (long left = getenv("POST_POLLS_LAST") ? count / every : 0; left > 0;)
        left -= ibv_poll_cq(&cq, 1, &wc);
    printf("%.1f\n", ((double)(ended.tv_sec - began.tv_sec) * 1e9 +
                      (double)(ended.tv_nsec - began.tv_nsec)) / (double)count);
    usleep((useconds_t)setting("POST_WAITS_US"));
    /* NULL_KEEP: the queue pair is left to the end of the process. */
    return getenv("NULL_KEEP") ? 0 : ibv_destroy_qp(qp);
}
