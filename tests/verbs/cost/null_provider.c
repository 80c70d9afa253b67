/* A libibverbs.so.1 whose provider does nothing, so a post and its completion cost only what a library
 * in between takes. */
#include <errno.h>
#include <infiniband/verbs.h>
#include <stdlib.h>

enum { DEPTH = 1024, NUMBER = 17 };

static struct ibv_device device = {.name = "null0", .dev_name = "null0"};
static uint64_t ids[DEPTH];
static unsigned head, tail;

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad) {
    (void)qp;
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
    for (; got < n && tail != head; got++)
        wc[got] = (struct ibv_wc){
            .wr_id = ids[tail++ % DEPTH], .opcode = IBV_WC_RDMA_WRITE, .qp_num = NUMBER};
    return got;
}

struct ibv_context *ibv_open_device(struct ibv_device *unused) {
    (void)unused;
    struct ibv_context *context = calloc(1, sizeof *context);
    if (!context) return NULL;
    context->device = &device;
    context->ops.post_send = post_send;
    context->ops.poll_cq = poll_cq;
    return context;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr) {
    struct ibv_qp *qp = calloc(1, sizeof *qp);
    if (!qp) return NULL;
    qp->context = pd->context;
    qp->qp_num = NUMBER;
    qp->qp_type = attr->qp_type;
    return qp;
}

int ibv_destroy_qp(struct ibv_qp *qp) {
    free(qp);
    return 0;
}

#undef ibv_query_qp
int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask) {
    if (mask & IBV_QP_STATE) qp->state = attr->qp_state;
    return 0;
}

int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask,
                 struct ibv_qp_init_attr *init) {
    (void)qp, (void)attr, (void)mask, (void)init;
    return 0;
}
