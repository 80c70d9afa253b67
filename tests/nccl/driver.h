/* A net plugin of any version behind one set of calls, as NCCL's own net_vN.cc put the older ones
 * behind the newest. Each call is watched: the harness can say which call a hang is in. */
#ifndef LAXITY_TESTS_NCCL_DRIVER_H
#define LAXITY_TESTS_NCCL_DRIVER_H

#include "abi.h"

enum { VERSION_FIRST = 7, VERSION_LAST = 12 };
/* The same for people. */
#define NEWEST "12"
#define VERSIONS "7 to " NEWEST

struct net {
    const char *path;
    int version;
    void *library;
    const void *table;
    const char *name;
    void *context;              /* v11 on */
    struct comm_config config;  /* v10 on; the traffic class, or UNDEFINED */
    profiler_callback callback; /* v10 on */
    unsigned refuse_of;         /* 50: of 50 tries to send, 49 do not reach the plugin */
    unsigned tries;
};

/* A version-free view of the properties; what a version lacks has NCCL's default. */
struct properties {
    const char *name, *pci_path;
    uint64_t guid;
    int pointer_support, reg_is_global, force_flush, speed_mbps, port, max_comms, max_recvs;
    float latency;
    int device_type, device_version, parts, part;
    size_t max_p2p_bytes, max_coll_bytes;
    int max_multi_request, rail, plane;
    bool overrun; /* bytes behind this version's struct were written */
};

/* These two say what went wrong in `why`, and return false. */
bool net_load(struct net *net, char *why, size_t room);
bool net_unload(struct net *net, char *why, size_t room);

int net_init(struct net *net, uint64_t comm_id);
int net_finalize(struct net *net); /* nothing before v11 */
int net_devices(struct net *net, int *count);
int net_properties(struct net *net, int device, struct properties *properties);
int net_listen(struct net *net, int device, void *handle, void **listen);
int net_connect(struct net *net, int device, void *handle, void **send);
int net_accept(struct net *net, void *listen, void **receive);
int net_register(struct net *net, void *comm, void *data, size_t size, int type, void **memory);
int net_register_dmabuf(struct net *net, void *comm, void *data, size_t size, int fd,
                        void **memory);
int net_deregister(struct net *net, void *comm, void *memory);
int net_isend(struct net *net, void *comm, void *data, size_t size, int tag, void *memory,
              void *phandle, void **request);
/* The arrays given to the plugin are copies on the stack, overwritten before this returns. */
int net_irecv(struct net *net, void *comm, int n, void *const *data, const size_t *sizes,
              const int *tags, void *const *memory, void *const *phandles, void **request);
int net_iflush(struct net *net, void *comm, int n, void **data, int *sizes, void **memory,
               void **request);
int net_test(struct net *net, void *request, int *done, int *sizes);
int net_close_send(struct net *net, void *comm);
int net_close_receive(struct net *net, void *comm);
int net_close_listen(struct net *net, void *listen);
int net_set_attributes(struct net *net, struct net_attributes *attributes);
/* RESULT_OK where the plugin has none. */
int net_make_virtual(struct net *net, int count, const int *devices, bool *exists);

/* The lines that the plugin logged in this process, newest last; for a case to look into. */
const char *logged(void);
void log_forget(void);
void log_line(int level, unsigned long flags, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

/* Which call this thread is in, in memory that the parent process sees. NULL when outside. */
void watch_enter(const char *call);
void watch_leave(void);

#endif
