/* A libibverbs.so.1 whose provider does nothing, so a post and its completion cost only what a library
 * in between takes. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdatomic.h>
#include <stdlib.h>

enum { DEPTH = 1024, NUMBER = 17 };

static struct ibv_device device = {.name = "null0", .dev_name = "null0"};
static uint64_t ids[DEPTH];
static unsigned head, tail;

/* A provider's lock of its queues, and the queue pair made last. */
static atomic_flag busy = ATOMIC_FLAG_INIT;
static struct ibv_qp *latest;

int ibv_cmd_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, void *command, size_t bytes);

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad) {
    (void)qp;
    while (atomic_flag_test_and_set(&busy)) {}
    atomic_flag_clear(&busy);
    /* NULL_REFUSES=N: the queue is full each Nth time. */
    static long posts, refuses = -1;
    if (refuses < 0) refuses = getenv("NULL_REFUSES") ? atol(getenv("NULL_REFUSES")) : 0;
    if (refuses && ++posts % refuses == 0) {
        *bad = wr;
        return ENOMEM;
    }
    for (; wr; wr = wr->next)
        if (wr->send_flags & IBV_SEND_SIGNALED) ids[head++ % DEPTH] = wr->wr_id;
    return 0;
}

static int poll_cq(struct ibv_cq *cq, int n, struct ibv_wc *wc) {
    (void)cq;
    int got = 0;
    /* NULL_BREAKS: a poll puts the queue pair into error once, under the lock, as hns and mana do. */
    static int broken;
    if (getenv("NULL_BREAKS") && tail != head && !broken++) {
        struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
        while (atomic_flag_test_and_set(&busy)) {}
        ibv_cmd_modify_qp(latest, &attr, IBV_QP_STATE, NULL, 0);
        atomic_flag_clear(&busy);
    }
    for (; got < n && tail != head; got++)
        wc[got] = (struct ibv_wc){
            .wr_id = ids[tail++ % DEPTH], .opcode = IBV_WC_RDMA_WRITE, .qp_num = NUMBER};
    return got;
}

static void wr_start(struct ibv_qp_ex *qp) { (void)qp; }

/* As mlx5's: what was not built here is not posted. */
static int wr_complete(struct ibv_qp_ex *qp) {
    (void)qp;
    return 0;
}

static struct ibv_qp *create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr) {
    struct ibv_qp_ex *qp = calloc(1, sizeof *qp);
    if (!qp) return NULL;
    qp->qp_base.context = context;
    qp->qp_base.qp_num = NUMBER;
    qp->qp_base.qp_type = attr->qp_type;
    qp->wr_start = wr_start;
    qp->wr_complete = wr_complete;
    return &qp->qp_base;
}

struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *qp) { return (struct ibv_qp_ex *)qp; }

struct ibv_context *ibv_open_device(struct ibv_device *unused) {
    (void)unused;
    struct verbs_context *verbs = calloc(1, sizeof *verbs);
    if (!verbs) return NULL;
    verbs->sz = sizeof *verbs;
    verbs->create_qp_ex = create_qp_ex;
    struct ibv_context *context = &verbs->context;
    context->abi_compat = __VERBS_ABI_IS_EXTENDED;
    context->device = &device;
    context->ops.post_send = post_send;
    context->ops.poll_cq = poll_cq;
    return context;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr) {
    /* A queue pair for building has more fields behind the common ones. */
    struct ibv_qp *qp = calloc(1, sizeof(struct ibv_qp_ex));
    if (!qp) return NULL;
    qp->context = pd->context;
    qp->qp_num = NUMBER;
    qp->qp_type = attr->qp_type;
    return latest = qp;
}

int ibv_destroy_qp(struct ibv_qp *qp) {
    free(qp);
    return 0;
}

int ibv_cmd_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, void *command, size_t bytes) {
    (void)mask, (void)command, (void)bytes;
    qp->state = attr->qp_state;
    return 0;
}

#undef ibv_query_qp
int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask) {
    if (mask & IBV_QP_STATE) qp->state = attr->qp_state;
    /* As mlx5 does since rdma-core 40. */
    struct ibv_qp_ex *building = ibv_qp_to_qp_ex(qp);
    if (building->wr_complete) building->wr_complete = wr_complete;
    return 0;
}

int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask,
                 struct ibv_qp_init_attr *init) {
    (void)qp, (void)attr, (void)mask, (void)init;
    return 0;
}
