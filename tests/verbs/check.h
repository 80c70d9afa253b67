/* The harness of verbs_check: pairs of connected queue pairs, counted posts, checked polls.
 *
 * A subtest is a function that returns whether it passed. CHECK records the first failure and
 * leaves the subtest. All pairs that it opened with pair_open are closed then. */
#ifndef LAXITY_TESTS_VERBS_CHECK_H
#define LAXITY_TESTS_VERBS_CHECK_H

#include "common.h"

#include <pthread.h>
#include <stdatomic.h>

struct end {
    struct device *dev;
    struct ibv_comp_channel *channel;
    struct ibv_cq *cq; /* of sends and receives */
    struct ibv_qp *qp;
    struct ibv_qp_ex *qpx; /* with options.send_ops */
    struct ibv_qp_cap cap;
    struct ibv_mr *mr;
    uint8_t *buf;
    size_t len;
    bool borrowed; /* channel, cq, mr and buf are another pair's */
};

/* All zero: an RC pair with 1 MiB on each side and room for 64 requests. */
struct options {
    enum ibv_qp_type type;
    size_t len;
    bool sig_all;
    unsigned send_wr, recv_wr, sge, inline_data;
    int cqe;
    bool channel;
    bool extended_cq;
    uint64_t wc_flags; /* of an extended CQ */
    uint64_t send_ops;
    struct ibv_srq *srq; /* b receives from it */
    struct pair *share;  /* use its memory, completion queues and channels */
    bool unconnected;
    struct path path;
};

struct pair {
    struct pair *next;
    struct end a, b;
    struct path path;
};

extern struct device A, B;
extern bool strict_sq;

/* NULL after a failure has been recorded. */
struct pair *pair_open(const struct options *options);
bool pair_connect(struct pair *pair);
void pair_close(struct pair *pair);

bool failed_at(const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
bool skip(const char *format, ...) __attribute__((format(printf, 1, 2)));
void note(const char *format, ...) __attribute__((format(printf, 1, 2)));

#define FAIL(...) return failed_at(__FILE__, __LINE__, __VA_ARGS__)
#define CHECK(condition, ...)                                                                    \
    do {                                                                                         \
        if (!(condition)) FAIL(__VA_ARGS__);                                                     \
    } while (0)
#define DO(call)                                                                                 \
    do {                                                                                         \
        if (!(call)) return false;                                                               \
    } while (0)
#define OPEN(name, ...)                                                                          \
    struct pair *name = pair_open(&(struct options){__VA_ARGS__});                               \
    if (!name) return false

/* Calls ibv_post_send and counts the requests that it took. */
int post(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
void count(uint64_t requests, uint64_t bytes, uint64_t read_bytes);

/* One request with one SGE (none when len is NONE); the request and the SGE are overwritten
 * before it returns. */
#define NONE UINT32_MAX
struct ask {
    enum ibv_wr_opcode op;
    size_t from, to;
    uint32_t len;
    uint64_t id;
    unsigned flags;
    uint32_t imm;
};
bool put(struct end *from, struct end *to, struct ask ask);
void fill_request(struct ibv_send_wr *wr, struct ibv_sge *sge, const struct end *from,
                  const struct end *to, struct ask ask);
bool want(struct end *end, size_t at, uint32_t len, uint64_t id);

/* One poll that gives up to n. Every completion a subtest judges comes through here. */
int poll_some(struct ibv_cq *cq, struct ibv_wc *wc, int n);
/* Exactly n, or a failure after a while. */
bool reap(struct ibv_cq *cq, struct ibv_wc *wc, int n);
/* No completion for so long. */
bool quiet(struct ibv_cq *cq, unsigned ms);

/* byte_len is looked at where it is defined: receives, RDMA READ, atomics. */
bool wc_is(const struct ibv_wc *wc, const struct end *end, uint64_t id, enum ibv_wc_opcode op,
           uint32_t byte_len);
#define WC(...) DO(wc_is(__VA_ARGS__))
/* n completions of one kind, with ids from first upwards. */
bool reap_run(struct end *end, int n, uint64_t first, enum ibv_wc_opcode op, uint32_t byte_len);

bool same(const void *in, size_t len, uint64_t seed, const char *what);
bool untouched(const void *in, size_t len, uint8_t byte, const char *what);
#define SAME(...) DO(same(__VA_ARGS__))
#define UNTOUCHED(...) DO(untouched(__VA_ARGS__))

/* The deliberate errors of --sabotage, for subtests that do not go through the calls above. */
enum sabotage {
    S_NONE, S_DATA, S_DROP, S_ORDER, S_ID, S_OPCODE, S_LEN, S_STATUS, S_QP, S_BAD, S_ACCEPT,
};
bool sabotaged(enum sabotage kind); /* true once */

uint64_t patience_ms(void);

struct check {
    const char *name;
    bool (*run)(void);
};
extern const struct check transfer_checks[], queue_checks[], completion_checks[], state_checks[],
    thread_checks[], api_checks[];

/* Runs this program again with these arguments and adds its counts to the current subtest's. */
bool again(const char *option, const char *subtest);

#endif
