/* See driver.h. */
#define _GNU_SOURCE
#include "driver.h"

#include "check.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char log_text[1 << 16];
static size_t log_used;
static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;

void log_line(int level, unsigned long flags, const char *file, int line, const char *format, ...) {
    (void)flags;
    char text[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (verbose) fprintf(stderr, "  [%d] %s:%d %s\n", level, file ? file : "", line, text);
    pthread_mutex_lock(&log_lock);
    const size_t need = strlen(text) + 1;
    if (log_used + need + 1 < sizeof log_text) {
        memcpy(log_text + log_used, text, need);
        log_text[log_used + need - 1] = '\n';
        log_used += need;
        log_text[log_used] = '\0';
    }
    pthread_mutex_unlock(&log_lock);
}

const char *logged(void) { return log_text; }

void log_forget(void) {
    log_used = 0;
    log_text[0] = '\0';
}

bool net_load(struct net *net, char *why, size_t room) {
    char symbol[32];
    net->library = dlopen(net->path, RTLD_NOW | RTLD_LOCAL);
    if (!net->library) {
        snprintf(why, room, "dlopen: %s", dlerror());
        return false;
    }
    snprintf(symbol, sizeof symbol, "ncclNetPlugin_v%d", net->version);
    net->table = dlsym(net->library, symbol);
    if (!net->table) {
        snprintf(why, room, "%s has no %s", net->path, symbol);
        return false;
    }
    net->name = *(const char *const *)net->table;
    return true;
}

bool net_unload(struct net *net, char *why, size_t room) {
    net->table = NULL;
    net->name = NULL;
    watch_enter("dlclose");
    const int failed = dlclose(net->library);
    watch_leave();
    net->library = NULL;
    if (failed) snprintf(why, room, "dlclose: %s", dlerror());
    return !failed;
}

#define T(n) ((const struct net_v##n *)net->table)
/* Functions whose signature is that of v7 in all versions, at the same place. */
#define COMMON T(7)
#define WATCHED(name, expression)                                                                \
    watch_enter(name);                                                                           \
    const int result = (expression);                                                             \
    watch_leave();                                                                               \
    return result

int net_init(struct net *net, uint64_t comm_id) {
    /* A temporary of the caller's stack, as in NCCL: the plugin must have copied it. */
    struct comm_config config = net->config;
    int result = RESULT_USAGE;
    watch_enter("init");
    switch (net->version) {
    case 7: result = T(7)->init(log_line); break;
    case 8: result = T(8)->init(log_line); break;
    case 9: result = T(9)->init(log_line); break;
    case 10: result = T(10)->init(log_line, net->callback); break;
    case 11: result = T(11)->init(&net->context, comm_id, &config, log_line, net->callback); break;
    case 12: result = T(12)->init(&net->context, comm_id, &config, log_line, net->callback); break;
    }
    watch_leave();
    memset(&config, 0x77, sizeof config);
    return result;
}

int net_finalize(struct net *net) {
    if (net->version < 11) return RESULT_OK;
    WATCHED("finalize", T(11)->finalize(net->context));
}

int net_devices(struct net *net, int *count) { WATCHED("devices", COMMON->devices(count)); }

#define TAKE_COMMON(p)                                                                           \
    to->name = (p).name, to->pci_path = (p).pci_path, to->guid = (p).guid,                       \
    to->pointer_support = (p).pointer_support, to->speed_mbps = (p).speed_mbps,                  \
    to->port = (p).port, to->latency = (p).latency, to->max_comms = (p).max_comms,               \
    to->max_recvs = (p).max_recvs, to->device_type = (p).device_type,                            \
    to->device_version = (p).device_version
#define TAKE_PARTS(p)                                                                            \
    to->reg_is_global = (p).reg_is_global, to->force_flush = (p).force_flush,                    \
    to->parts = (p).parts.count, to->part = (p).parts.devices[0],                                \
    to->max_p2p_bytes = (p).max_p2p_bytes, to->max_coll_bytes = (p).max_coll_bytes

int net_properties(struct net *net, int device, struct properties *to) {
    union {
        struct properties_v7 v7;
        struct properties_v8 v8;
        struct properties_v9 v9;
        struct properties_v11 v11;
        struct properties_v12 v12;
        uint8_t bytes[512];
    } p;
    memset(p.bytes, 0xa5, sizeof p);
    memset(to, 0, sizeof *to);
    to->parts = 1;
    to->part = device;
    to->max_p2p_bytes = 1 << 30;
    to->max_coll_bytes = 512 << 20;
    to->max_multi_request = 1;
    to->rail = to->plane = UNDEFINED;
    size_t size = sizeof p.v12;
    int result = RESULT_USAGE;
    watch_enter("getProperties");
    switch (net->version) {
    case 7: result = T(7)->properties(device, &p.v7), size = sizeof p.v7; break;
    case 8: result = T(8)->properties(device, &p.v8), size = sizeof p.v8; break;
    case 9: result = T(9)->properties(device, &p.v9), size = sizeof p.v9; break;
    case 10: result = T(10)->properties(device, &p.v9), size = sizeof p.v9; break;
    case 11: result = T(11)->properties(device, &p.v11), size = sizeof p.v11; break;
    case 12: result = T(12)->properties(device, &p.v12); break;
    }
    watch_leave();
    for (size_t i = size; i < sizeof p; i++) to->overrun |= p.bytes[i] != 0xa5;
    if (result) return result;
    switch (net->version) {
    case 7: TAKE_COMMON(p.v7); break;
    case 8: TAKE_COMMON(p.v8), to->reg_is_global = p.v8.reg_is_global; break;
    case 9:
    case 10: TAKE_COMMON(p.v9), TAKE_PARTS(p.v9); break;
    case 11:
        TAKE_COMMON(p.v11), TAKE_PARTS(p.v11);
        to->max_multi_request = p.v11.max_multi_request;
        break;
    case 12:
        TAKE_COMMON(p.v12), TAKE_PARTS(p.v12);
        to->max_multi_request = p.v12.max_multi_request;
        to->rail = p.v12.rail, to->plane = p.v12.plane;
        break;
    }
    return result;
}

int net_listen(struct net *net, int device, void *handle, void **listen) {
    if (net->version >= 11) {
        WATCHED("listen", T(11)->listen(net->context, device, handle, listen));
    }
    WATCHED("listen", T(7)->listen(device, handle, listen));
}

int net_connect(struct net *net, int device, void *handle, void **send) {
    struct device_handle *offload = NULL;
    if (net->version >= 11) {
        WATCHED("connect", T(11)->connect(net->context, device, handle, send, &offload));
    }
    if (net->version == 10) {
        struct comm_config config = net->config;
        watch_enter("connect");
        const int result = T(10)->connect(device, &config, handle, send, &offload);
        watch_leave();
        memset(&config, 0x77, sizeof config);
        return result;
    }
    /* Older hosts that know no offload pass no place for it. */
    WATCHED("connect", T(7)->connect(device, handle, send, NULL));
}

int net_accept(struct net *net, void *listen, void **receive) {
    struct device_handle *offload = NULL;
    WATCHED("accept", COMMON->accept(listen, receive, net->version < 10 ? NULL : &offload));
}

int net_register(struct net *net, void *comm, void *data, size_t size, int type, void **memory) {
    if (net->version == 7) {
        if (size >> 31) return RESULT_INTERNAL;
        WATCHED("regMr", T(7)->register_memory(comm, data, (int)size, type, memory));
    }
    WATCHED("regMr", T(8)->register_memory(comm, data, size, type, memory));
}

int net_register_dmabuf(struct net *net, void *comm, void *data, size_t size, int fd,
                        void **memory) {
    if (!COMMON->register_dmabuf) return RESULT_USAGE;
    WATCHED("regMrDmaBuf", COMMON->register_dmabuf(comm, data, size, POINTER_CUDA, 0, fd, memory));
}

int net_deregister(struct net *net, void *comm, void *memory) {
    WATCHED("deregMr", COMMON->deregister(comm, memory));
}

int net_isend(struct net *net, void *comm, void *data, size_t size, int tag, void *memory,
              void *phandle, void **request) {
    if (net->refuse_of && ++net->tries % net->refuse_of) {
        *request = NULL;
        return RESULT_OK;
    }
    if (net->version >= 10) {
        WATCHED("isend", T(10)->isend(comm, data, size, tag, memory, phandle, request));
    }
    if (net->version == 9) {
        WATCHED("isend", T(9)->isend(comm, data, size, tag, memory, request));
    }
    if (size > (size_t)1 << 30) return RESULT_INTERNAL;
    WATCHED("isend", T(7)->isend(comm, data, (int)size, tag, memory, request));
}

int net_irecv(struct net *net, void *comm, int n, void *const *data, const size_t *sizes,
              const int *tags, void *const *memory, void *const *phandles, void **request) {
    void *data_copy[GROUP_MAX], *memory_copy[GROUP_MAX], *phandle_copy[GROUP_MAX];
    size_t size_copy[GROUP_MAX];
    int tag_copy[GROUP_MAX], int_sizes[GROUP_MAX], result;
    for (int i = 0; i < n; i++) {
        data_copy[i] = data[i];
        memory_copy[i] = memory ? memory[i] : NULL;
        phandle_copy[i] = phandles ? phandles[i] : NULL;
        size_copy[i] = sizes[i];
        tag_copy[i] = tags[i];
        int_sizes[i] = (int)sizes[i];
    }
    watch_enter("irecv");
    if (net->version >= 10)
        result = T(10)->irecv(comm, n, data_copy, size_copy, tag_copy, memory_copy, phandle_copy,
                              request);
    else if (net->version == 9)
        result = T(9)->irecv(comm, n, data_copy, size_copy, tag_copy, memory_copy, request);
    else {
        if (*request == OPTIONAL_COMPLETION) *request = NULL;
        result = T(7)->irecv(comm, n, data_copy, int_sizes, tag_copy, memory_copy, request);
    }
    watch_leave();
    memset(data_copy, 0x11, sizeof data_copy);
    memset(memory_copy, 0x11, sizeof memory_copy);
    memset(phandle_copy, 0x11, sizeof phandle_copy);
    memset(size_copy, 0x11, sizeof size_copy);
    memset(tag_copy, 0x11, sizeof tag_copy);
    memset(int_sizes, 0x11, sizeof int_sizes);
    /* Without this the compiler drops the writes above, which nobody in here reads. */
    __asm__ volatile("" ::"r"(data_copy), "r"(memory_copy), "r"(phandle_copy), "r"(size_copy),
                     "r"(tag_copy), "r"(int_sizes)
                     : "memory");
    return result;
}

int net_iflush(struct net *net, void *comm, int n, void **data, int *sizes, void **memory,
               void **request) {
    WATCHED("iflush", COMMON->iflush(comm, n, data, sizes, memory, request));
}

int net_test(struct net *net, void *request, int *done, int *sizes) {
    WATCHED("test", COMMON->test(request, done, sizes));
}

int net_close_send(struct net *net, void *comm) { WATCHED("closeSend", COMMON->close_send(comm)); }

int net_close_receive(struct net *net, void *comm) {
    WATCHED("closeRecv", COMMON->close_receive(comm));
}

int net_close_listen(struct net *net, void *listen) {
    WATCHED("closeListen", COMMON->close_listen(listen));
}

int net_set_attributes(struct net *net, struct net_attributes *attributes) {
    if (net->version < 11 || !T(11)->set_attributes) return RESULT_OK;
    WATCHED("setNetAttr", T(11)->set_attributes(net->context, attributes));
}

int net_make_virtual(struct net *net, int count, const int *devices, bool *exists) {
    struct virtual_8 parts = {.count = count}; /* a smaller count reads the same as virtual_4 */
    for (int i = 0; i < count && i < 4; i++) parts.devices[i] = devices[i];
    int device = -1;
    *exists = net->version >= 9 && T(9)->make_virtual;
    if (!*exists) return RESULT_OK;
    if (net->version >= 12) {
        WATCHED("makeVDevice", T(12)->make_virtual(&device, &parts));
    }
    WATCHED("makeVDevice", T(9)->make_virtual(&device, (struct virtual_4 *)&parts));
}
