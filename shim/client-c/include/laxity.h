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
 *       lax_complete(lane, &ticket, grant.bytes);   // once they have left the wire
 *   } while (!grant.last);
 *   lax_lane_close(lane);
 *   lax_detach(client);
 *
 * Scheduling is never a reason to lose or stall a transfer. Without a daemon, or with one that
 * dies, stalls, refuses or is told to step aside, whatever was not granted yet is granted at once,
 * each byte once, with `bypassed` set. The same holds for a NULL client or lane, so a program that
 * checks nothing still sends everything.
 *
 * Threads: a client may be used from any thread at once; a lane from one thread at a time. After
 * fork() the child may go on using client and lanes: its tickets resolve as bypassed and its lanes
 * attach anew. No thread is started and no signal handled.
 *
 * Return values: 0 or a positive answer; -EINVAL if an argument makes no sense (then nothing
 * happened, except as said above). Times are nanoseconds of CLOCK_MONOTONIC.
 *
 * ABI: structs that may grow begin with their size; set it with the INIT macros. C99 and C++11.
 */
#ifndef LAXITY_H
#define LAXITY_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Version of this interface; lax_abi_version() is that of the library. */
#define LAX_ABI_VERSION 1

/* How far the scheduler may go. */
enum {
    LAX_MODE_OFF = 0,     /* the daemon is told nothing */
    LAX_MODE_OBSERVE = 1, /* account and report, delay nothing */
    LAX_MODE_ENFORCE = 2  /* permits decide */
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

/* The level of grant.level that lies below all others. */
#define LAX_LEVEL_SCAVENGER 255

/* One attachment to the daemon, shared by the process. */
typedef struct lax_client lax_client;

/* One thread's way to the daemon. */
typedef struct lax_lane lax_lane;

/* Set with LAX_OPTIONS_INIT; a zero or NULL field keeps its default. */
typedef struct lax_options {
    uint32_t size;              /* sizeof(lax_options) */
    uint32_t mode;              /* LAX_MODE_*, as asked for; the daemon's may be lower */
    const char *socket;         /* default /run/laxity/laxityd.sock */
    const char *name;           /* shown to people, at most 32 bytes */
    uint32_t stall_timeout_ms;  /* give up a daemon without a sign of life: 100 */
    uint32_t reattach_every_ms; /* look for a daemon at most this often: 1000 */
    uint32_t attach_timeout_ms; /* how long lax_attach waits for an answer: 100 */
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
    uint8_t receiver_bound; /* the receiving side is the bottleneck, not this port */
    uint8_t whole;          /* goes out in one piece, like a work request: granted as a whole */
    uint8_t peer;           /* the other end, see lax_peer; 0 if unknown */
    uint8_t reserved[4];    /* zero */
    uint64_t bytes;         /* bytes to move */
    uint64_t batch;         /* 0 if unknown */
    uint64_t request;       /* 0 if unknown, or all of the batch */
    uint64_t deadline_ns;   /* absolute, CLOCK_MONOTONIC; 0 if there is none */
} lax_flow;

#define LAX_FLOW_INIT \
    { sizeof(lax_flow), 0, LAX_STAGE_BACKGROUND, LAX_EGRESS, 0, 0, 0, 0, {0, 0, 0, 0}, 0, 0, 0, 0 }

/* A flow that was submitted. Yours to store and move, not to read, nor to use twice by copying.
 * Bring each to its last grant or cancel it, on the lane that submitted it. */
typedef struct lax_ticket {
    uint64_t opaque[8];
} lax_ticket;

/* Leave to send. */
typedef struct lax_grant {
    uint64_t bytes;      /* bytes more, beyond earlier grants of this ticket */
    uint8_t level;       /* 1 the highest, 255 the scavenger; 0 if nobody decided */
    uint8_t dscp;        /* to mark them with; 0 (leave it alone) if nobody decided */
    uint8_t last;        /* nothing more will come for this ticket */
    uint8_t bypassed;    /* granted without the daemon */
    uint8_t reserved[4];
} lax_grant;

/* Counters over all lanes of a client since lax_attach. Set `size` before the call. */
typedef struct lax_stats {
    uint32_t size;            /* sizeof(lax_stats) */
    uint32_t scheduled;       /* 1 if a daemon schedules this process now */
    uint64_t scheduled_bytes; /* granted by the daemon */
    uint64_t bypassed_bytes;  /* granted without it */
    uint64_t bypassed_flows;  /* flows of which at least one byte was */
    uint64_t observed_bytes;  /* granted at once and reported, in mode observe */
    uint64_t unscheduled_ns;  /* time without a scheduler */
    uint64_t reattaches;      /* daemons found after one was lost */
    uint64_t lane_full;       /* flows bypassed because all slots or lanes were in use */
} lax_stats;

#define LAX_STATS_INIT { sizeof(lax_stats), 0, 0, 0, 0, 0, 0, 0, 0 }

/* LAX_ABI_VERSION of the library. */
uint32_t lax_abi_version(void);

/* Attaches. NULL: options from LAXITY_SOCKET, LAXITY_NAME, LAXITY_MODE, LAXITY_STALL_MS,
 * LAXITY_ATTACH_MS. Never fails for lack of a daemon; NULL only if the options make no sense. */
lax_client *lax_attach(const lax_options *options);

/* Lets go of the client. Lanes that are open go on working until they are closed. */
void lax_detach(lax_client *client);

/* 1 if a daemon schedules this process now, else 0. */
int lax_is_scheduled(const lax_client *client);

/* DSCP that the daemon gives a level; 0 (unmarked) without a daemon. */
uint8_t lax_dscp(const lax_client *client, uint8_t level);

/* The number of the peer with this address (IPv6, or IPv4 mapped into it; of RoCE v2 the GID), for
 * lax_flow.peer. Name it for what you fetch (LAX_INGRESS): the sender's host does not know of it, and many
 * that fetch from one host are put in order by the coordinator. 0 for NULL, and beyond 255 peers. */
uint8_t lax_peer(const uint8_t address[16]);

int lax_get_stats(const lax_client *client, lax_stats *stats);

/* Opens a lane for the calling thread. NULL only for a NULL client. */
lax_lane *lax_lane_open(const lax_client *client);

/* Closes a lane; flows that wait are withdrawn. */
void lax_lane_close(lax_lane *lane);

/* Submits a flow; never blocks. If it fails, `ticket` (unless NULL) grants all of flow->bytes. */
int lax_submit(lax_lane *lane, const lax_flow *flow, lax_ticket *ticket);

/* 1 and a grant if more may be sent now, else 0. Never blocks. */
int lax_poll(lax_lane *lane, lax_ticket *ticket, lax_grant *grant);

/* Waits for the next grant: 1 and the grant; 0 and an empty last grant if there was a last one
 * before. Ends in any case. */
int lax_wait(lax_lane *lane, lax_ticket *ticket, lax_grant *grant);

/* Sleeps until some ticket of the lane may have more to say (1), or until timeout_ns passed (0).
 * For loops over many tickets. */
int lax_wait_any(lax_lane *lane, uint64_t timeout_ns);

/* `bytes` of the flow have left the wire. Report every byte that was granted. */
int lax_complete(lax_lane *lane, const lax_ticket *ticket, uint64_t bytes);

/* Gives up a flow: what was not granted will not be sent, what was not completed never will be. */
int lax_cancel(lax_lane *lane, lax_ticket *ticket);

/* What the inference engine knows and the transfer library does not. */
int lax_hint_batch_begin(lax_lane *lane, uint64_t batch, uint16_t layers, uint64_t layer_time_ns);
int lax_hint_request_join(lax_lane *lane, uint64_t batch, uint64_t request, uint64_t deadline_ns,
                          uint64_t bytes);
int lax_hint_request_end(lax_lane *lane, uint64_t request);
int lax_hint_batch_queued(lax_lane *lane, uint64_t batch, uint64_t ahead);
int lax_hint_layer_begin(lax_lane *lane, uint64_t batch, uint16_t layer);
int lax_hint_compute_end(lax_lane *lane, uint64_t batch);
int lax_hint_batch_end(lax_lane *lane, uint64_t batch);

/* The same from any thread, without client or lane: for an engine, whose requests no single thread has.
 * What is said here is remembered, within limits: a daemon that is started anew is told it again. All hints of
 * the process go one way, in the order in which they were said, to the daemon that LAXITY_SOCKET names; without
 * one they cost little and do nothing. After fork() the child knows none of them.
 *
 * Besides 0 and -EINVAL (an id of 0, no layers): -ETIME for a deadline that has passed, -EALREADY for a
 * request that has ended, -ERANGE for a layer that the batch does not have. Then nothing changed, and no
 * transfer is affected. A request or batch that was begun in another process is counted, and the daemon is told. */

/* What is known of a request. Set with LAX_REQUEST_INIT; 0 and NULL for what is not known. */
typedef struct lax_request {
    uint32_t size;        /* sizeof(lax_request) */
    int32_t priority;     /* the engine's own, larger is more urgent */
    uint64_t deadline_ns; /* when its first token is due, absolute, CLOCK_MONOTONIC */
    uint64_t bytes;       /* that it will move */
    const char *tenant;   /* for whom it is, at most 64 bytes */
} lax_request;

#define LAX_REQUEST_INIT { sizeof(lax_request), 0, 0, 0, 0 }

/* What is known, and what was counted. Set `size` before the call. */
typedef struct lax_hint_stats {
    uint32_t size; /* sizeof(lax_hint_stats) */
    uint32_t reserved;
    uint64_t hints;                /* taken */
    uint64_t requests;             /* remembered, with those that have ended */
    uint64_t batches;              /* remembered */
    uint64_t requests_evicted;     /* taken for ended, as 65536 came after them */
    uint64_t batches_evicted;      /* taken for ended, as 4096 came after them */
    uint64_t requests_begun_twice; /* began while they had not ended */
    uint64_t requests_ended_twice; /* refused */
    uint64_t requests_unknown;     /* ended, and were not known */
    uint64_t batches_begun_twice;  /* began while they had not ended */
    uint64_t batches_unknown;      /* hints about batches that were not known */
    uint64_t layers_unknown;       /* refused */
    uint64_t layers_backwards;     /* began after a later one */
    uint64_t deadlines_passed;     /* refused */
} lax_hint_stats;

#define LAX_HINT_STATS_INIT { sizeof(lax_hint_stats), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }

/* The number of a request or batch that the application knows by a text: its FNV-1a hash of 64 bits, the same on all
 * hosts. 0 for NULL. */
uint64_t lax_number(const char *id);

/* A request came in. NULL: nothing is known of it. */
int lax_request_begin(uint64_t request, const lax_request *facts);
/* It has its first token, or was aborted. */
int lax_request_end(uint64_t request);
int lax_batch_begin(uint64_t batch, uint16_t layers, uint64_t layer_time_ns);
int lax_batch_join(uint64_t batch, uint64_t request);
int lax_batch_queued(uint64_t batch, uint64_t ahead);
int lax_layer_begin(uint64_t batch, uint16_t layer);
int lax_compute_end(uint64_t batch);
int lax_batch_end(uint64_t batch);

int lax_get_hint_stats(lax_hint_stats *stats);

/* What transfers belong to, for programs whose transfers are posted by a library that runs under
 * liblaxity.so (laxity run) or a plugin of Laxity. In the order in which they are believed: an open
 * scope of the posting thread, what is known of the memory it reads or writes, the job's profile. */

#define LAX_LAYER_UNKNOWN 0xffff

typedef struct lax_scope {
    uint32_t size;        /* sizeof(lax_scope) */
    uint16_t layer;       /* LAX_LAYER_UNKNOWN */
    uint8_t stage;        /* LAX_STAGE_*, 0 if unknown */
    uint8_t reserved;     /* zero */
    uint64_t batch;       /* 0 if unknown */
    uint64_t request;     /* 0 if unknown, or all of the batch */
    uint64_t deadline_ns; /* absolute, CLOCK_MONOTONIC; 0 if unknown */
} lax_scope;

#define LAX_SCOPE_INIT { sizeof(lax_scope), LAX_LAYER_UNKNOWN, 0, 0, 0, 0, 0 }

/* Whatever the calling thread submits from here on belongs to this, until lax_scope_pop. Scopes nest
 * (8 deep); what an inner one leaves unknown it has from the outer one, but for the batch and deadline of another request. */
int lax_scope_push(const lax_scope *scope);
int lax_scope_pop(void);

/* For libraries that post for others: what is said of a transfer that the calling thread posts from `address` (NULL if
 * that is unknown), by its open scopes, and where they say nothing, of the memory. 1 if anything is, else 0. Set
 * `said->size` before the call. */
int lax_scope_of(const void *address, lax_scope *said);

/* A range of memory holds the KV cache of `layer`; `stage` if its transfers always have the same, or
 * 0. The last word about an address counts. -ENOMEM if a million ranges are known. */
int lax_memory_layer(const void *address, uint64_t bytes, uint16_t layer, uint8_t stage);

/* A range of memory holds blocks of a request. */
int lax_memory_owner(const void *address, uint64_t bytes, uint64_t batch, uint64_t request,
                     uint64_t deadline_ns);

/* Nothing is known of a range any more. */
int lax_memory_forget(const void *address, uint64_t bytes);

#ifdef __cplusplus
}
#endif

#endif
