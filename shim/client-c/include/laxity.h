/*
 * laxity.h: submit network transfers to laxityd, the per-host scheduler.
 *
 *   lax_client *client = lax_attach(NULL);          // once per process; never fails
 *   lax_lane *lane = lax_lane_open(client);         // once per thread
 *   lax_flow flow = LAX_FLOW_INIT;
 *   flow.stage = LAX_STAGE_KV_REUSE;
 *   flow.bytes = 64 << 20;
 *   lax_ticket ticket;
 *   lax_grant grant;
 *   lax_submit(lane, &flow, &ticket);               // never blocks
 *   do {
 *       lax_wait(lane, &ticket, &grant);            // ends in any case
 *       send_marked(grant.bytes, grant.dscp);       // your code
 *       lax_complete(lane, &ticket, grant.bytes);   // once they were delivered
 *   } while (!grant.last);
 *   lax_lane_close(lane);
 *   lax_detach(client);
 *
 * Scheduling never loses or stalls a transfer. If there is no daemon, or if it dies, stalls, refuses
 * this process or is bypassed, all bytes that are not permitted yet are permitted at once, each byte
 * once, with `bypassed` set. The same holds for a NULL client or lane. So a program that ignores
 * errors still sends everything.
 *
 * Threads: any thread may use a client; one thread at a time may use a lane. After fork() the child
 * may go on using both: its tickets resolve as bypassed, and its lanes attach anew. The library
 * starts no thread and handles no signal.
 *
 * Functions return 0 or a positive result, or -EINVAL if an argument is invalid. Hints also return
 * the errors that are named with them. A call that returns an error has no effect, except that
 * lax_submit grants all bytes. Times are nanoseconds of CLOCK_MONOTONIC.
 *
 * ABI: structs that may grow begin with their size. Set it with the INIT macros. C99 and C++11.
 */
#ifndef LAXITY_H
#define LAXITY_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Version of this interface. lax_abi_version() returns the version of the library. */
#define LAX_ABI_VERSION 1

/* What the scheduler does with the transfers of a process. */
enum {
    LAX_MODE_OFF = 0,     /* nothing; the daemon does not see them */
    LAX_MODE_OBSERVE = 1, /* it counts and reports them, and delays none */
    LAX_MODE_ENFORCE = 2  /* they wait for permits */
};

/* What a flow is for. */
enum {
    LAX_STAGE_KV_REUSE = 1,   /* fetch of reusable KV-cache blocks */
    LAX_STAGE_COLLECTIVE = 2, /* a collective inside a layer */
    LAX_STAGE_P2D = 3,        /* prefill-to-decode transfer */
    LAX_STAGE_WEIGHTS = 4,    /* model weights of a scale-out */
    LAX_STAGE_BACKGROUND = 5  /* anything else */
};

enum {
    LAX_EGRESS = 0, /* out of this host */
    LAX_INGRESS = 1 /* into this host */
};

/* The value of grant.level for the lowest level. */
#define LAX_LEVEL_SCAVENGER 255

/* One attachment to the daemon, shared by the process. */
typedef struct lax_client lax_client;

/* One thread's queue to the daemon. */
typedef struct lax_lane lax_lane;

/* Options of lax_attach. Set with LAX_OPTIONS_INIT. A field that is 0 or NULL has its default, except
 * `mode`, where 0 is LAX_MODE_OFF. */
typedef struct lax_options {
    uint32_t size;              /* sizeof(lax_options) */
    uint32_t mode;              /* LAX_MODE_*; the daemon's mode applies if it is lower */
    const char *socket;         /* the daemon's socket; default /run/laxity/laxityd.sock */
    const char *name;           /* the process's name in status and reports, cut to 27 bytes */
    uint32_t stall_timeout_ms;  /* a daemon without a sign of life for this long counts as dead; default 100 */
    uint32_t reattach_every_ms; /* shortest time between two attempts to attach; default 250 */
    uint32_t attach_timeout_ms; /* longest time that lax_attach waits for an answer; default 100 */
    uint32_t reserved;          /* zero */
} lax_options;

#define LAX_OPTIONS_INIT { sizeof(lax_options), LAX_MODE_ENFORCE, 0, 0, 0, 0, 0, 0 }

/* A transfer. Set with LAX_FLOW_INIT. */
typedef struct lax_flow {
    uint32_t size;          /* sizeof(lax_flow) */
    uint16_t layer;         /* layer that consumes or produced the bytes, from 0 */
    uint8_t stage;          /* LAX_STAGE_* */
    uint8_t direction;      /* LAX_EGRESS or LAX_INGRESS */
    uint8_t nic;            /* index of the NIC in the daemon's configuration */
    uint8_t unused;         /* ignored */
    uint8_t whole;          /* 1 if the flow can't be cut, like a work request; it gets one grant */
    uint8_t peer;           /* number of the other end from lax_peer; 0 if unknown */
    uint8_t reserved[4];    /* zero */
    uint64_t bytes;         /* bytes to move */
    uint64_t batch;         /* 0 if unknown */
    uint64_t request;       /* 0 if unknown, or if the flow serves all of the batch */
    uint64_t deadline_ns;   /* absolute, CLOCK_MONOTONIC; 0 if there is none */
} lax_flow;

#define LAX_FLOW_INIT \
    { sizeof(lax_flow), 0, LAX_STAGE_BACKGROUND, LAX_EGRESS, 0, 0, 0, 0, {0, 0, 0, 0}, 0, 0, 0, 0 }

/* A submitted flow. The program may store and move it, but must not read it or use two copies.
 * On the lane that submitted it, wait for its last grant or cancel it. */
typedef struct lax_ticket {
    uint64_t opaque[8];
} lax_ticket;

/* A permit: how many bytes of a flow may be sent now, and how. */
typedef struct lax_grant {
    uint64_t bytes;      /* number of bytes, in addition to earlier grants of this ticket */
    uint8_t level;       /* 1 is the highest, 255 the scavenger; 0 if no daemon decided */
    uint8_t dscp;        /* DSCP for these bytes; 0 if no daemon decided (keep the marking then) */
    uint8_t last;        /* 1 if this is the last grant of its ticket */
    uint8_t bypassed;    /* 1 if permitted without a daemon */
    uint8_t reserved[4];
} lax_grant;

/* Counters over all lanes of a client since lax_attach. Set `size` before the call. */
typedef struct lax_stats {
    uint32_t size;            /* sizeof(lax_stats) */
    uint32_t scheduled;       /* 1 if a daemon schedules this process now */
    uint64_t scheduled_bytes; /* permitted by the daemon */
    uint64_t bypassed_bytes;  /* permitted without it */
    uint64_t bypassed_flows;  /* flows with at least one byte in bypassed_bytes */
    uint64_t observed_bytes;  /* permitted at once and reported, in mode observe */
    uint64_t unscheduled_ns;  /* time without a scheduler */
    uint64_t reattaches;      /* how often a daemon was found after one was lost */
    uint64_t lane_full;       /* flows bypassed because all slots or lanes were in use */
} lax_stats;

#define LAX_STATS_INIT { sizeof(lax_stats), 0, 0, 0, 0, 0, 0, 0, 0 }

/* LAX_ABI_VERSION of the library. */
uint32_t lax_abi_version(void);

/* Attaches to the daemon. If `options` is NULL, they come from LAXITY_SOCKET, LAXITY_NAME,
 * LAXITY_MODE, LAXITY_STALL_MS and LAXITY_ATTACH_MS. Succeeds without a daemon, too. Returns NULL
 * only if the options are invalid. */
lax_client *lax_attach(const lax_options *options);

/* Releases the client. Open lanes go on working until they are closed. */
void lax_detach(lax_client *client);

/* 1 if a daemon schedules this process now, else 0. */
int lax_is_scheduled(const lax_client *client);

/* The daemon's DSCP for a level. 0 (unmarked) without a daemon. */
uint8_t lax_dscp(const lax_client *client, uint8_t level);

/* The number of the peer with this address, for lax_flow.peer. The address is IPv6, IPv4 mapped into
 * IPv6, or a GID of RoCE v2. Name the peer of each fetch (LAX_INGRESS): the sender's host does not
 * see the fetch, so the coordinator counts its bytes on the peer's port. Returns 0 for NULL, and after
 * 255 peers. */
uint8_t lax_peer(const uint8_t address[16]);

int lax_get_stats(const lax_client *client, lax_stats *stats);

/* Opens a lane for the calling thread. NULL only for a NULL client. */
lax_lane *lax_lane_open(const lax_client *client);

/* Closes a lane and cancels its waiting flows. */
void lax_lane_close(lax_lane *lane);

/* Submits a flow. Never blocks. If it fails, `ticket` (unless NULL) grants all of flow->bytes. */
int lax_submit(lax_lane *lane, const lax_flow *flow, lax_ticket *ticket);

/* Returns 1 and a grant if more bytes may be sent now, else 0. Never blocks. */
int lax_poll(lax_lane *lane, lax_ticket *ticket, lax_grant *grant);

/* Waits for the next grant. Returns 1 and the grant, or 0 and an empty last grant if the ticket
 * already had its last one. Always returns, at the latest when the daemon ends, or a second later if
 * it is upgraded. */
int lax_wait(lax_lane *lane, lax_ticket *ticket, lax_grant *grant);

/* Sleeps until a ticket of the lane may have a new grant (returns 1), or until timeout_ns has passed
 * (returns 0). For loops over many tickets. */
int lax_wait_any(lax_lane *lane, uint64_t timeout_ns);

/* Reports that `bytes` of the flow were delivered. Report every byte that was permitted. */
int lax_complete(lax_lane *lane, const lax_ticket *ticket, uint64_t bytes);

/* Cancels the bytes of a flow that are not permitted, and those that are permitted and not complete. */
int lax_cancel(lax_lane *lane, lax_ticket *ticket);

/* Hints: what the inference engine knows and the transfer library does not. */
int lax_hint_batch_begin(lax_lane *lane, uint64_t batch, uint16_t layers, uint64_t layer_time_ns);
int lax_hint_request_join(lax_lane *lane, uint64_t batch, uint64_t request, uint64_t deadline_ns,
                          uint64_t bytes);
int lax_hint_request_end(lax_lane *lane, uint64_t request);
int lax_hint_batch_queued(lax_lane *lane, uint64_t batch, uint64_t ahead);
int lax_hint_layer_begin(lax_lane *lane, uint64_t batch, uint16_t layer);
int lax_hint_compute_end(lax_lane *lane, uint64_t batch);
int lax_hint_batch_end(lax_lane *lane, uint64_t batch);

/* The same hints from any thread, without a client or lane. They suit an engine, where several threads
 * work on one request. The process remembers them, within limits, and repeats them to a restarted daemon.
 * All hints reach the daemon of LAXITY_SOCKET in the order of the calls. Without a daemon they have no
 * effect. After fork() the child has none of them.
 *
 * They return 0, or
 *   -EINVAL   for an id of 0 or a batch without layers,
 *   -ETIME    for a deadline that has passed,
 *   -EALREADY for a request that has ended,
 *   -ERANGE   for a layer that the batch does not have.
 * After an error nothing has changed, and no transfer is affected. A hint about a request or batch that
 * began in another process is counted and passed to the daemon. */

/* Facts about a request. Set with LAX_REQUEST_INIT. An unknown fact is 0 or NULL. */
typedef struct lax_request {
    uint32_t size;        /* sizeof(lax_request) */
    int32_t priority;     /* the engine's priority; larger is more urgent */
    uint64_t deadline_ns; /* when its first token is due, absolute, CLOCK_MONOTONIC */
    uint64_t bytes;       /* bytes that it will move */
    const char *tenant;   /* its tenant, cut to 64 bytes */
} lax_request;

#define LAX_REQUEST_INIT { sizeof(lax_request), 0, 0, 0, 0 }

/* Counters of hints. Set `size` before the call. */
typedef struct lax_hint_stats {
    uint32_t size; /* sizeof(lax_hint_stats) */
    uint32_t reserved;
    uint64_t hints;                /* hints that were accepted */
    uint64_t requests;             /* requests that are remembered, ended ones included */
    uint64_t batches;              /* batches that are remembered */
    uint64_t requests_evicted;     /* requests that were ended because 65536 others followed */
    uint64_t batches_evicted;      /* batches that were ended because 4096 others followed */
    uint64_t requests_begun_twice; /* requests that began again before their end */
    uint64_t requests_ended_twice; /* ends of ended requests; refused */
    uint64_t requests_unknown;     /* ends of unknown requests */
    uint64_t batches_begun_twice;  /* batches that began again before their end */
    uint64_t batches_unknown;      /* hints about unknown batches */
    uint64_t layers_unknown;       /* layers that the batch does not have; refused */
    uint64_t layers_backwards;     /* layers that began after a later layer */
    uint64_t deadlines_passed;     /* deadlines in the past; refused */
} lax_hint_stats;

#define LAX_HINT_STATS_INIT { sizeof(lax_hint_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/* The number of a request or batch whose id is a text: the text's FNV-1a hash of 64 bits, which is the
 * same on all hosts. 0 for NULL. */
uint64_t lax_number(const char *id);

/* Begins a request. `facts` is NULL if nothing is known of it. */
int lax_request_begin(uint64_t request, const lax_request *facts);
/* The request belongs to the trace of this W3C header, `traceparent`. Spans, explanations and logs about
 * the request then have the trace's id. An invalid header is ignored. */
int lax_request_trace(uint64_t request, const char *traceparent);
/* Ends a request: it has its first token, or was aborted. */
int lax_request_end(uint64_t request);
int lax_batch_begin(uint64_t batch, uint16_t layers, uint64_t layer_time_ns);
int lax_batch_join(uint64_t batch, uint64_t request);
int lax_batch_queued(uint64_t batch, uint64_t ahead);
int lax_layer_begin(uint64_t batch, uint16_t layer);
int lax_compute_end(uint64_t batch);
int lax_batch_end(uint64_t batch);

int lax_get_hint_stats(lax_hint_stats *stats);

/* Scopes and memory: hints about transfers that a library posts under liblaxity.so (laxity run) or a
 * plugin of Laxity. Each value of a transfer comes from the first of these that has it: an open scope of
 * the posting thread, the memory that it reads or writes, the job's profile. */

#define LAX_LAYER_UNKNOWN 0xffff

typedef struct lax_scope {
    uint32_t size;        /* sizeof(lax_scope) */
    uint16_t layer;       /* LAX_LAYER_UNKNOWN */
    uint8_t stage;        /* LAX_STAGE_*, 0 if unknown */
    uint8_t reserved;     /* zero */
    uint64_t batch;       /* 0 if unknown */
    uint64_t request;     /* 0 if unknown, or if it is for all of the batch */
    uint64_t deadline_ns; /* absolute, CLOCK_MONOTONIC; 0 if unknown */
} lax_scope;

#define LAX_SCOPE_INIT { sizeof(lax_scope), LAX_LAYER_UNKNOWN, 0, 0, 0, 0, 0 }

/* Opens a scope. Until lax_scope_pop, all transfers that the calling thread submits have its values. Scopes
 * nest, at most 8 deep. An inner scope takes what it leaves unknown from the outer one, except the batch and
 * deadline of another request. */
int lax_scope_push(const lax_scope *scope);
int lax_scope_pop(void);

/* For libraries that post for others: the values of a transfer that the calling thread posts from `address`
 * (NULL if unknown). They come from the thread's open scopes, else from the memory. Returns 1 if there are
 * any, else 0. Set `said->size` before the call. */
int lax_scope_of(const void *address, lax_scope *said);

/* Registers a range of memory for the KV cache of `layer`. Give `stage` if all transfers of the range have that
 * stage, else 0. The latest call for an address counts. -ENOMEM if a million ranges are registered. */
int lax_memory_layer(const void *address, uint64_t bytes, uint16_t layer, uint8_t stage);

/* Registers a range of memory as blocks of a request. */
int lax_memory_owner(const void *address, uint64_t bytes, uint64_t batch, uint64_t request,
                     uint64_t deadline_ns);

/* Removes all hints about a range of memory. */
int lax_memory_forget(const void *address, uint64_t bytes);

#ifdef __cplusplus
}
#endif

#endif
