/* A stand-in for libibverbs with one device. Its port 1 is InfiniBand, its port 2 Ethernet. It prints the service level
 * of each queue pair that connects. */
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#undef ibv_query_port
#undef ibv_reg_mr

static struct ibv_device device = {.name = "standin0"};
static int poll_none(struct ibv_cq *cq, int count, struct ibv_wc *into)
{
    (void)cq, (void)count, (void)into;
    return 0;
}

struct ibv_device **ibv_get_device_list(int *count)
{
    struct ibv_device **list = calloc(2, sizeof *list);
    list[0] = &device;
    *count = 1;
    return list;
}

void ibv_free_device_list(struct ibv_device **list)
{
    free(list);
}

struct ibv_context *ibv_open_device(struct ibv_device *opened)
{
    struct ibv_context *context = calloc(1, sizeof *context);
    context->device = opened;
    context->async_fd = -1;
    context->ops.poll_cq = poll_none;
    return context;
}

int ibv_close_device(struct ibv_context *context)
{
    free(context);
    return 0;
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
    (void)context;
    attr->phys_port_cnt = 2;
    attr->max_qp = attr->max_qp_wr = attr->max_cqe = 4096;
    return 0;
}

int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *compat)
{
    struct ibv_port_attr *attr = (struct ibv_port_attr *)compat;
    (void)context;
    attr->state = IBV_PORT_ACTIVE;
    attr->active_mtu = IBV_MTU_4096;
    attr->max_msg_sz = 1u << 30;
    attr->gid_tbl_len = 1;
    attr->lid = port == 1 ? 7 : 0;
    attr->link_layer = port == 1 ? IBV_LINK_LAYER_INFINIBAND : IBV_LINK_LAYER_ETHERNET;
    return 0;
}

int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid)
{
    (void)context, (void)index;
    memset(gid, 0, sizeof *gid);
    gid->raw[0] = 0xfe;
    gid->raw[1] = 0x80;
    gid->raw[15] = port;
    return 0;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
    struct ibv_pd *pd = calloc(1, sizeof *pd);
    pd->context = context;
    return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd)
{
    free(pd);
    return 0;
}

struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *address, size_t length, int access)
{
    struct ibv_mr *mr = calloc(1, sizeof *mr);
    (void)pd, (void)address, (void)length, (void)access;
    return mr;
}

int ibv_dereg_mr(struct ibv_mr *mr)
{
    free(mr);
    return 0;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int entries, void *of, struct ibv_comp_channel *c, int vector)
{
    struct ibv_cq *cq = calloc(1, sizeof *cq);
    (void)entries, (void)of, (void)c, (void)vector;
    cq->context = context;
    return cq;
}

int ibv_destroy_cq(struct ibv_cq *cq)
{
    free(cq);
    return 0;
}

struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *attr)
{
    struct ibv_srq *srq = calloc(1, sizeof *srq);
    (void)attr;
    srq->context = pd->context;
    return srq;
}

int ibv_destroy_srq(struct ibv_srq *srq)
{
    free(srq);
    return 0;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
    static int number;
    struct ibv_qp *qp = calloc(1, sizeof *qp);
    qp->context = pd->context;
    qp->qp_type = attr->qp_type;
    qp->qp_num = ++number;
    return qp;
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
    (void)qp;
    if (mask & IBV_QP_AV)
        printf("%d", attr->ah_attr.sl);
    return 0;
}

int ibv_destroy_qp(struct ibv_qp *qp)
{
    free(qp);
    return 0;
}

int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
    (void)context, (void)event;
    return -1;
}

void ibv_ack_async_event(struct ibv_async_event *event)
{
    (void)event;
}

const char *ibv_wc_status_str(enum ibv_wc_status status)
{
    (void)status;
    return "a status";
}

const char *ibv_event_type_str(enum ibv_event_type event)
{
    (void)event;
    return "an event";
}
