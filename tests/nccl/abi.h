/* The tables by which NCCL calls a net plugin (v7 to v12) and a profiler (v3 to v6), written down
 * from NCCL 2.19 to 2.32 (plugins/net and plugins/profiler of its repository are the source; every
 * size and offset that matters is asserted below). Names are this harness's own. */
#ifndef LAXITY_TESTS_NCCL_ABI_H
#define LAXITY_TESTS_NCCL_ABI_H

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

enum { /* ncclResult_t */
    RESULT_OK = 0,
    RESULT_CUDA = 1,
    RESULT_SYSTEM = 2,
    RESULT_INTERNAL = 3,
    RESULT_ARGUMENT = 4,
    RESULT_USAGE = 5,
    RESULT_REMOTE = 6,
};

enum { HANDLE_BYTES = 128, REQUESTS_MAX = 32, GROUP_MAX = 8, PROXY_STEPS = 8 };
enum { POINTER_HOST = 1, POINTER_CUDA = 2, POINTER_DMABUF = 4 };
enum { LOG_WARN = 2, LOG_INFO = 3 };
#define OPTIONAL_COMPLETION ((void *)(uintptr_t)1) /* *request on entry of irecv, v9 on */
#define UNDEFINED (-1)

typedef void (*logger)(int level, unsigned long flags, const char *file, int line,
                       const char *format, ...);
/* Called by the plugin inside isend and irecv; type 0 starts an event of the plugin's, 1 stops it,
 * 2 updates, 3 both. */
typedef int (*profiler_callback)(void **event, int type, void *phandle, int64_t plugin_id,
                                 void *data);

struct device_handle { /* of device offload, which no host plugin has */
    int type, version;
    void *handle;
    size_t size;
    int needs_proxy_progress;
};

#define PROPERTIES_HEAD                                                                          \
    char *name;                                                                                  \
    char *pci_path;                                                                              \
    uint64_t guid;                                                                               \
    int pointer_support
#define PROPERTIES_PORT                                                                          \
    int speed_mbps;                                                                              \
    int port;                                                                                    \
    float latency;                                                                               \
    int max_comms;                                                                               \
    int max_recvs;                                                                               \
    int device_type;                                                                             \
    int device_version

struct virtual_4 { /* v9 to v11 */
    int count;
    int devices[4];
};
struct virtual_8 { /* v12 */
    int count;
    int devices[8];
};

struct properties_v7 {
    PROPERTIES_HEAD;
    PROPERTIES_PORT;
};
struct properties_v8 {
    PROPERTIES_HEAD;
    int reg_is_global;
    PROPERTIES_PORT;
};
struct properties_v9 { /* and v10 */
    PROPERTIES_HEAD;
    int reg_is_global;
    int force_flush;
    PROPERTIES_PORT;
    struct virtual_4 parts;
    size_t max_p2p_bytes, max_coll_bytes;
};
struct properties_v11 {
    PROPERTIES_HEAD;
    int reg_is_global;
    int force_flush;
    PROPERTIES_PORT;
    struct virtual_4 parts;
    size_t max_p2p_bytes, max_coll_bytes;
    int max_multi_request;
};
struct properties_v12 {
    PROPERTIES_HEAD;
    int reg_is_global;
    int force_flush;
    PROPERTIES_PORT;
    struct virtual_8 parts;
    size_t max_p2p_bytes, max_coll_bytes;
    int max_multi_request;
    int16_t rail, plane;
};

struct comm_config { /* v10: an argument of connect; v11 on: of init */
    int traffic_class;
};
struct comm_attributes {
    int32_t peers_max, peers_min, flows_max, flows_min;
};
struct net_attributes { /* v11 on */
    struct comm_attributes send, receive;
    uint32_t op, algo, proto;
};

#define NET_TABLE(NAME, INIT, PROPERTIES, LISTEN, CONNECT, REG_BYTES, IO_BYTES, SEND_PROFILE,    \
                  RECV_PROFILE, TAIL)                                                            \
    struct NAME {                                                                                \
        const char *name;                                                                        \
        int(*init) INIT;                                                                         \
        int (*devices)(int *count);                                                              \
        int (*properties)(int device, struct PROPERTIES *properties);                            \
        int(*listen) LISTEN;                                                                     \
        int(*connect) CONNECT;                                                                   \
        int (*accept)(void *listen, void **receive, struct device_handle **offload);             \
        int (*register_memory)(void *comm, void *data, REG_BYTES size, int type, void **memory); \
        int (*register_dmabuf)(void *comm, void *data, size_t size, int type, uint64_t offset,   \
                               int fd, void **memory);                                           \
        int (*deregister)(void *comm, void *memory);                                             \
        int (*isend)(void *comm, void *data, IO_BYTES size, int tag,                             \
                     void *memory SEND_PROFILE, void **request);                                 \
        int (*irecv)(void *comm, int n, void **data, IO_BYTES *sizes, int *tags,                 \
                     void **memory RECV_PROFILE, void **request);                                \
        int (*iflush)(void *comm, int n, void **data, int *sizes, void **memory,                 \
                      void **request);                                                           \
        int (*test)(void *request, int *done, int *sizes);                                       \
        int (*close_send)(void *comm);                                                           \
        int (*close_receive)(void *comm);                                                        \
        int (*close_listen)(void *comm);                                                         \
        int (*device_memory)(void *comm, void *memory, void **pointer);                          \
        int (*consumed)(void *comm, int n, void *request);                                       \
        TAIL                                                                                     \
    }

#define NO_ARGUMENT
#define NO_TAIL
#define ONE_PHANDLE , void *phandle
#define PHANDLES , void **phandles
#define VIRTUAL(TYPE) int (*make_virtual)(int *device, struct TYPE *parts);
#define CONTEXT_TAIL(TYPE)                                                                       \
    VIRTUAL(TYPE)                                                                                \
    int (*finalize)(void *context);                                                              \
    int (*set_attributes)(void *context, struct net_attributes *attributes);

#define CONNECT_V7 (int device, void *handle, void **send, struct device_handle **offload)
#define CONNECT_V10                                                                              \
    (int device, struct comm_config *config, void *handle, void **send,                          \
     struct device_handle **offload)
#define CONNECT_V11                                                                              \
    (void *context, int device, void *handle, void **send, struct device_handle **offload)
#define LISTEN_V7 (int device, void *handle, void **listen)
#define LISTEN_V11 (void *context, int device, void *handle, void **listen)
#define INIT_V11                                                                                 \
    (void **context, uint64_t comm_id, struct comm_config *config, logger log,                   \
     profiler_callback profile)

/* clang-format off */
NET_TABLE(net_v7, (logger log), properties_v7, LISTEN_V7, CONNECT_V7, int, int,
          NO_ARGUMENT, NO_ARGUMENT, NO_TAIL);
NET_TABLE(net_v8, (logger log), properties_v8, LISTEN_V7, CONNECT_V7, size_t, int,
          NO_ARGUMENT, NO_ARGUMENT, NO_TAIL);
NET_TABLE(net_v9, (logger log), properties_v9, LISTEN_V7, CONNECT_V7, size_t, size_t,
          NO_ARGUMENT, NO_ARGUMENT, VIRTUAL(virtual_4));
NET_TABLE(net_v10, (logger log, profiler_callback profile), properties_v9, LISTEN_V7, CONNECT_V10,
          size_t, size_t, ONE_PHANDLE, PHANDLES, VIRTUAL(virtual_4));
NET_TABLE(net_v11, INIT_V11, properties_v11, LISTEN_V11, CONNECT_V11,
          size_t, size_t, ONE_PHANDLE, PHANDLES, CONTEXT_TAIL(virtual_4));
NET_TABLE(net_v12, INIT_V11, properties_v12, LISTEN_V11, CONNECT_V11,
          size_t, size_t, ONE_PHANDLE, PHANDLES, CONTEXT_TAIL(virtual_8));
/* clang-format on */

#define SIZE(TYPE, BYTES) static_assert(sizeof(struct TYPE) == (BYTES), #TYPE)
#define AT(TYPE, FIELD, OFFSET)                                                                  \
    static_assert(offsetof(struct TYPE, FIELD) == (OFFSET), #TYPE "." #FIELD)

SIZE(properties_v7, 56);
SIZE(properties_v8, 64);
SIZE(properties_v9, 104);
SIZE(properties_v11, 112);
SIZE(properties_v12, 128);
AT(properties_v7, speed_mbps, 28);
AT(properties_v7, device_version, 52);
AT(properties_v8, speed_mbps, 32);
AT(properties_v8, device_version, 56);
AT(properties_v9, force_flush, 32);
AT(properties_v9, speed_mbps, 36);
AT(properties_v9, parts, 64);
AT(properties_v9, max_p2p_bytes, 88);
AT(properties_v11, max_multi_request, 104);
AT(properties_v12, parts, 64);
AT(properties_v12, max_p2p_bytes, 104);
AT(properties_v12, max_multi_request, 120);
AT(properties_v12, rail, 124);
AT(properties_v12, plane, 126);
SIZE(comm_config, 4);
SIZE(net_attributes, 44);
SIZE(device_handle, 32);
SIZE(net_v7, 152);
SIZE(net_v8, 152);
SIZE(net_v9, 160);
SIZE(net_v10, 160);
SIZE(net_v11, 176);
SIZE(net_v12, 176);
AT(net_v12, isend, 80);
AT(net_v12, consumed, 144);
AT(net_v12, make_virtual, 152);
AT(net_v12, finalize, 160);
AT(net_v12, set_attributes, 168);

/* The profiler. Bits of the activation mask and of an event's type. */
enum {
    EVENT_GROUP = 1 << 0,
    EVENT_COLL = 1 << 1,
    EVENT_P2P = 1 << 2,
    EVENT_PROXY_OP = 1 << 3,
    EVENT_PROXY_STEP = 1 << 4,
    EVENT_PROXY_CTRL = 1 << 5,
    EVENT_KERNEL = 1 << 6,
    EVENT_NET = 1 << 7,
    EVENT_GROUP_API = 1 << 8,
    EVENT_COLL_API = 1 << 9,
    EVENT_P2P_API = 1 << 10,
};
enum { /* states of recordEventState */
    STATE_STEP_SEND_WAIT = 9,
    STATE_STEP_RECEIVE_WAIT = 10,
    STATE_CTRL_IDLE = 13,
    STATE_CTRL_ACTIVE = 14,
    STATE_OP_IN_PROGRESS = 19,
    STATE_STEP_PEER_WAIT = 20,
    STATE_NET_UPDATE = 21,
};

struct event_proxy_op {
    pid_t pid;
    uint8_t channel;
    int peer, steps, chunk, is_send;
};
struct event_net {
    int64_t id;
    void *data;
};

struct event_v3 {
    uint8_t type;
    void *parent;
    int rank;
    union {
        struct {
            const char *name;
            uint64_t comm_hash, sequence;
            const char *func;
            const void *from;
            void *to;
            size_t count;
            int root;
            const char *datatype;
            uint8_t channels, warps;
            const char *algo, *proto;
        } coll;
        struct {
            const char *name;
            uint64_t comm_hash;
            const char *func;
            void *buffer;
            const char *datatype;
            size_t count;
            int peer;
        } p2p;
        struct event_proxy_op proxy_op;
        struct { int step; } proxy_step;
        struct event_net net;
    };
};
struct event_v4 {
    uint8_t type;
    void *parent;
    int rank;
    union {
        struct {
            uint64_t sequence;
            const char *func;
            const void *from;
            void *to;
            size_t count;
            int root;
            const char *datatype;
            uint8_t channels, warps;
            const char *algo, *proto;
        } coll;
        struct {
            const char *func;
            void *buffer;
            const char *datatype;
            size_t count;
            int peer;
            uint8_t channels;
        } p2p;
        struct event_proxy_op proxy_op;
        struct { int step; } proxy_step;
        struct event_net net;
    };
};
struct event_v5 { /* and v6, whose additions are no longer than these */
    uint64_t type;
    void *parent;
    int rank;
    union {
        struct {
            bool captured;
            int depth;
        } group_api;
        struct {
            const char *func;
            size_t count;
            const char *datatype;
            int root;
            void *stream;
            bool captured;
        } coll_api;
        struct {
            uint64_t sequence;
            const char *func;
            const void *from;
            void *to;
            size_t count;
            int root;
            const char *datatype;
            uint8_t channels, warps;
            const char *algo, *proto;
            void *group;
        } coll;
        struct {
            const char *func;
            void *buffer;
            const char *datatype;
            size_t count;
            int peer;
            uint8_t channels;
            void *group;
        } p2p;
        struct event_proxy_op proxy_op;
        struct { int step; } proxy_step;
        struct event_net net;
    };
};
union event_state { /* v3's is 16 bytes, later ones 8 */
    struct { size_t bytes; int steps; } proxy_op_v3;
    struct { size_t bytes; } proxy_step;
    struct { int appended; } proxy_ctrl;
    struct { void *data; } net;
};

#define PROFILER_TABLE(NAME, INIT, EVENT)                                                        \
    struct NAME {                                                                                \
        const char *name;                                                                        \
        int(*init) INIT;                                                                         \
        int (*start)(void *context, void **handle, struct EVENT *event);                         \
        int (*stop)(void *handle);                                                               \
        int (*record)(void *handle, int state, union event_state *values);                       \
        int (*finalize)(void *context);                                                          \
    }
PROFILER_TABLE(profiler_v3, (void **context, int *mask), event_v3);
PROFILER_TABLE(profiler_v4,
               (void **context, int *mask, const char *name, uint64_t hash, int nodes, int ranks,
                int rank, logger log),
               event_v4);
PROFILER_TABLE(profiler_v5, /* and v6 */
               (void **context, uint64_t id, int *mask, const char *name, int nodes, int ranks,
                int rank, logger log),
               event_v5);

SIZE(event_v3, 120);
SIZE(event_v4, 104);
SIZE(event_v5, 112);
AT(event_v3, coll.sequence, 40);
AT(event_v3, coll.proto, 112);
AT(event_v4, coll.sequence, 24);
AT(event_v4, coll.proto, 96);
AT(event_v4, p2p.channels, 60);
AT(event_v5, coll.group, 104);
AT(event_v5, p2p.group, 64);
AT(event_v5, proxy_op.is_send, 44);
AT(event_v5, net.data, 32);
SIZE(profiler_v3, 48);

#endif
