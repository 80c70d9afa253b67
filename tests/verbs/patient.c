/* patient.so, for LD_PRELOAD: queue pairs wait at least 2^20 * 4.096 us (4.3 s) for an
 * acknowledgement before they send everything again.
 *
 * Mooncake's 67 ms are fixed, and meant for ports a thousand times as fast as those of the lab:
 * there, a transfer behind another one takes longer, and go-back-N fills the port with packets that
 * were sent before. So the lab scales this time as it scales all others, with and without
 * Laxity alike. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <infiniband/verbs.h>

enum { TIMEOUT_MIN = 20 };

typedef int modify_qp(struct ibv_qp *, struct ibv_qp_attr *, int);

int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask) {
    modify_qp *const real = (modify_qp *)dlvsym(RTLD_NEXT, "ibv_modify_qp", "IBVERBS_1.1");
    if (!real) return ENOSYS;
    if (!(mask & IBV_QP_TIMEOUT) || attr->timeout == 0 || attr->timeout >= TIMEOUT_MIN)
        return real(qp, attr, mask);
    struct ibv_qp_attr own = *attr;
    own.timeout = TIMEOUT_MIN;
    return real(qp, &own, mask);
}
