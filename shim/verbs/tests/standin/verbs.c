/* A stand-in for libibverbs with one device. It prints each change of a queue pair. */
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>

static struct ibv_device device = {.name = "standin0"};
static struct ibv_context context = {.device = &device};

struct ibv_context *ibv_open_device(struct ibv_device *unused)
{
    (void)unused;
    return &context;
}

int ibv_close_device(struct ibv_context *unused)
{
    (void)unused;
    return 0;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
    struct ibv_qp *qp = calloc(1, sizeof *qp);
    (void)attr;
    qp->context = &context;
    qp->pd = pd;
    qp->qp_num = 7;
    qp->qp_type = IBV_QPT_RC;
    return qp;
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
    (void)qp;
    if (mask & IBV_QP_AV)
        printf("state %d port %d sl %d\n", attr->qp_state, attr->ah_attr.port_num, attr->ah_attr.sl);
    return 0;
}

int ibv_destroy_qp(struct ibv_qp *qp)
{
    free(qp);
    return 0;
}
