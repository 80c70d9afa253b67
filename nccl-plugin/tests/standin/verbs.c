/* A stand-in for libibverbs with one device. Its port 1 is InfiniBand, its port 2 Ethernet. It prints the service level
 * of each queue pair that connects. All queue pairs are in one process. A work request is performed when its completion
 * is polled, so nothing is done early. Keys, bounds and access rights are checked as by a NIC. */
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#undef ibv_query_port
#undef ibv_reg_mr

enum { KEYS = 1 << 16 };

/* A work request that was posted and not performed. */
struct work {
    struct work *next;
    struct ibv_qp *qp;
    struct ibv_send_wr wr;
    struct ibv_sge sge;
    char inlined[64];
};

struct completion_queue {
    struct ibv_cq cq;
    struct work *first, **last;
};

static struct ibv_device device = {.name = "standin0"};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
/* Registrations by key, and queue pairs by number. Neither is used twice. */
static struct ibv_mr *regions[KEYS];
static int access_of[KEYS];
static struct ibv_qp *pairs[KEYS];
static uint32_t destinations[KEYS];
static uint32_t keys, numbers;

static int allows(uint32_t key, uint64_t address, size_t bytes, int access)
{
    struct ibv_mr *mr = key < KEYS ? regions[key] : NULL;
    const uint64_t start = mr ? (uint64_t)mr->addr : 0;
    return mr && (access_of[key] & access) == access && address >= start && bytes <= mr->length &&
           address - start <= mr->length - bytes;
}

/* Returns the status of a work request's completion. */
static enum ibv_wc_status perform(struct work *work)
{
    const int atomic = work->wr.opcode == IBV_WR_ATOMIC_FETCH_AND_ADD;
    const int reads = work->wr.opcode == IBV_WR_RDMA_READ;
    const uint64_t remote = atomic ? work->wr.wr.atomic.remote_addr : work->wr.wr.rdma.remote_addr;
    const uint32_t rkey = atomic ? work->wr.wr.atomic.rkey : work->wr.wr.rdma.rkey;
    const size_t bytes = work->wr.num_sge ? work->sge.length : 0;
    const struct ibv_qp *peer = pairs[destinations[work->qp->qp_num]];
    void *local = (void *)work->sge.addr, *there = (void *)remote;
    if (work->qp->state == IBV_QPS_ERR) return IBV_WC_WR_FLUSH_ERR;
    if (!peer || destinations[peer->qp_num] != work->qp->qp_num) return IBV_WC_RETRY_EXC_ERR;
    if (work->wr.send_flags & IBV_SEND_INLINE)
        local = work->inlined;
    else if (bytes && !allows(work->sge.lkey, work->sge.addr, bytes, reads || atomic ? IBV_ACCESS_LOCAL_WRITE : 0))
        return IBV_WC_LOC_PROT_ERR;
    if (!allows(rkey, remote, bytes, atomic ? IBV_ACCESS_REMOTE_ATOMIC : reads ? IBV_ACCESS_REMOTE_READ
                                                                             : IBV_ACCESS_REMOTE_WRITE))
        return IBV_WC_REM_ACCESS_ERR;
    if (atomic && (bytes != 8 || remote % 8)) return IBV_WC_REM_INV_REQ_ERR;
    if (atomic)
        *(uint64_t *)local = __atomic_fetch_add((uint64_t *)there, work->wr.wr.atomic.compare_add, __ATOMIC_SEQ_CST);
    else if (reads)
        memcpy(local, there, bytes);
    else
        memcpy(there, local, bytes);
    return IBV_WC_SUCCESS;
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    struct completion_queue *queue = (struct completion_queue *)qp->send_cq;
    (void)bad;
    pthread_mutex_lock(&lock);
    for (; wr; wr = wr->next) {
        struct work *work = calloc(1, sizeof *work);
        work->qp = qp;
        work->wr = *wr;
        if (wr->num_sge) work->sge = *wr->sg_list;
        if (wr->send_flags & IBV_SEND_INLINE) memcpy(work->inlined, (void *)work->sge.addr, work->sge.length);
        *queue->last = work;
        queue->last = &work->next;
    }
    pthread_mutex_unlock(&lock);
    return 0;
}

static int poll_cq(struct ibv_cq *cq, int count, struct ibv_wc *into)
{
    struct completion_queue *queue = (struct completion_queue *)cq;
    int found = 0;
    pthread_mutex_lock(&lock);
    while (found < count && queue->first) {
        struct work *work = queue->first;
        queue->first = work->next;
        if (!queue->first) queue->last = &queue->first;
        memset(&into[found], 0, sizeof *into);
        into[found].wr_id = work->wr.wr_id;
        into[found].qp_num = work->qp->qp_num;
        into[found].status = perform(work);
        if (into[found].status) work->qp->state = IBV_QPS_ERR;
        found++;
        free(work);
    }
    pthread_mutex_unlock(&lock);
    return found;
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
    context->ops.poll_cq = poll_cq;
    context->ops.post_send = post_send;
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
    attr->atomic_cap = IBV_ATOMIC_HCA;
    attr->max_qp_rd_atom = attr->max_qp_init_rd_atom = 16;
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
    (void)pd;
    mr->addr = address;
    mr->length = length;
    pthread_mutex_lock(&lock);
    mr->lkey = mr->rkey = ++keys % KEYS;
    regions[mr->lkey] = mr;
    access_of[mr->lkey] = access;
    pthread_mutex_unlock(&lock);
    return mr;
}

int ibv_dereg_mr(struct ibv_mr *mr)
{
    pthread_mutex_lock(&lock);
    regions[mr->lkey] = NULL;
    pthread_mutex_unlock(&lock);
    free(mr);
    return 0;
}

struct ibv_cq *ibv_create_cq(struct ibv_context *context, int entries, void *of, struct ibv_comp_channel *c, int vector)
{
    struct completion_queue *queue = calloc(1, sizeof *queue);
    (void)entries, (void)of, (void)c, (void)vector;
    queue->cq.context = context;
    queue->last = &queue->first;
    return &queue->cq;
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
    if (getenv("STANDIN_NO_QUEUE_PAIRS")) return NULL;
    struct ibv_qp *qp = calloc(1, sizeof *qp);
    qp->context = pd->context;
    qp->qp_type = attr->qp_type;
    qp->send_cq = attr->send_cq;
    attr->cap.max_inline_data = attr->cap.max_inline_data > 64 ? 64 : attr->cap.max_inline_data;
    pthread_mutex_lock(&lock);
    qp->qp_num = ++numbers % KEYS;
    pairs[qp->qp_num] = qp;
    pthread_mutex_unlock(&lock);
    return qp;
}

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
    pthread_mutex_lock(&lock);
    if (mask & IBV_QP_DEST_QPN) destinations[qp->qp_num] = attr->dest_qp_num;
    if (mask & IBV_QP_AV) printf("%d", attr->ah_attr.sl);
    pthread_mutex_unlock(&lock);
    return 0;
}

int ibv_destroy_qp(struct ibv_qp *qp)
{
    struct completion_queue *queue = (struct completion_queue *)qp->send_cq;
    pthread_mutex_lock(&lock);
    pairs[qp->qp_num] = NULL;
    for (struct work **at = &queue->first; *at;) {
        struct work *work = *at;
        if (work->qp != qp) {
            at = &work->next;
            continue;
        }
        *at = work->next;
        free(work);
    }
    queue->last = &queue->first;
    while (*queue->last) queue->last = &(*queue->last)->next;
    pthread_mutex_unlock(&lock);
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
