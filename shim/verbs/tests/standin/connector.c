/* Connects a queue pair through a port of InfiniBand, then through one of Ethernet, then with a
 * service level of its own. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define DEVICES "/sys/class/infiniband/"

/* The library's open(2), with DEVICES in the folder of this test. */
int open64(const char *path, int flags, ...)
{
    char moved[4096];
    va_list arguments;
    va_start(arguments, flags);
    int mode = va_arg(arguments, int);
    va_end(arguments);
    if (!strncmp(path, DEVICES, strlen(DEVICES))) {
        snprintf(moved, sizeof moved, "%s/%s", getenv("DEVICES"), path + strlen(DEVICES));
        path = moved;
    }
    int (*real)(const char *, int, ...) = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open64");
    return real(path, flags, mode);
}

static void connect_through(struct ibv_qp *qp, int port, int sl)
{
    struct ibv_qp_attr attr = {.qp_state = IBV_QPS_RTR};
    attr.ah_attr.port_num = port;
    attr.ah_attr.sl = sl;
    if (ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_AV))
        exit(1);
    if (attr.ah_attr.sl != sl) {
        fprintf(stderr, "the program's own attributes changed\n");
        exit(1);
    }
}

int main(void)
{
    struct ibv_context *context = ibv_open_device(NULL);
    struct ibv_pd pd = {.context = context};
    struct ibv_qp_init_attr attr = {.qp_type = IBV_QPT_RC};
    struct ibv_qp *qp = ibv_create_qp(&pd, &attr);
    connect_through(qp, 1, 0);
    connect_through(qp, 2, 0);
    connect_through(qp, 1, 5);
    ibv_destroy_qp(qp);
    ibv_close_device(context);
    return 0;
}
