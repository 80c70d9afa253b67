/* The frame of nccl_check: each case runs in processes of its own under a hard limit of time, a
 * case is a function that returns whether it passed, CHECK records the first failure of any of its
 * processes, and processes find each other through files in a folder, so that they may as well be
 * started by hand in different network namespaces or hosts. */
#ifndef LAXITY_TESTS_NCCL_CHECK_H
#define LAXITY_TESTS_NCCL_CHECK_H

#include "driver.h"

#include <signal.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

struct setup {
    const char *plugin;
    int version;
    int send_device, listen_device;
    double slow;       /* all limits of time are multiplied by it */
    int rank, ranks;   /* of separately started ranks; ranks is 0 when this program forks them */
    const char *folder;
    unsigned rest_us;  /* of each rest; 0: only let others run */
};
extern struct setup setup;
extern bool verbose;

/* Records the failure of this process; the first of all processes is the one shown. */
bool failed_at(const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
/* The case passes, and the line says that it was skipped and why. */
bool skip(const char *format, ...) __attribute__((format(printf, 1, 2)));
void note(const char *format, ...) __attribute__((format(printf, 1, 2)));
bool has_failed(void);

#define FAIL(...) return failed_at(__FILE__, __LINE__, __VA_ARGS__)
#define CHECK(condition, ...)                                                                    \
    do {                                                                                         \
        if (!(condition)) FAIL(__VA_ARGS__);                                                     \
    } while (0)
#define DO(call)                                                                                 \
    do {                                                                                         \
        if (!(call)) return false;                                                               \
    } while (0)
/* A call of the plugin that must return success. */
#define OK(call)                                                                                 \
    do {                                                                                         \
        const int ok_result = (call);                                                            \
        if (ok_result) FAIL("%s: result %d", #call, ok_result);                                  \
    } while (0)

uint64_t now_ns(void);
/* Time that something may take which needs no time to speak of: 10 s times --slow. */
uint64_t patience_ns(void);
void rest(void); /* lets others run: nothing was to do */
void rest_ms(unsigned ms);

/* A plugin of the case's version, loaded and initialised, with at least one device. */
bool net_open(struct net *net);
bool net_shut(struct net *net);

/* Runs `part` in n processes, as ranks 0 to n-1, and waits for all; or, when the program was
 * started as one of several ranks, runs that one here. Of `killed` ranks the end is not judged. */
bool ranks_run(int n, bool (*part)(int rank, int ranks), unsigned killed);
/* Files of the current case's folder. */
bool tell(const char *key, int rank, const void *data, size_t len);
bool hear(const char *key, int rank, void *data, size_t len);
bool meet(const char *key, int rank, int ranks); /* a barrier; each key once */
void forget_folder(void);

/* The bytes of message `id` from `offset` on. */
void pattern_fill(void *to, size_t len, uint64_t id, size_t offset);
bool pattern_is(const void *in, size_t len, uint64_t id, size_t offset, const char *what);
bool bytes_are(const void *in, size_t len, uint8_t byte, const char *what);

long resident_kib(void);
long available_mib(void);
int open_files(void);
int running_threads(void);

struct check {
    const char *name;
    bool (*run)(void);
    unsigned seconds;     /* limit, times --slow */
    int from;             /* first version for which it makes sense; 0: all */
    enum { EACH, ONCE, RANKS_2 = 2, RANKS_4 = 4, RANKS_8 = 8 } kind;
    const char *about;
};
/* Runs it in a process group of its own, prints its line. */
bool case_run(const struct check *check, bool *skipped);

extern const struct check load_checks[], connect_checks[], transfer_checks[], abort_checks[],
    thread_checks[], collective_checks[], profiler_checks[], rma_checks[];

#endif
