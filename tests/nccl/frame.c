/* What check.h declares and is not about a plugin: processes, verdicts, the folder, patterns. */
#define _GNU_SOURCE
#include "check.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

struct setup setup = {.slow = 1};
bool verbose;

enum { WATCHES = 64 };

/* Shared by all processes of a case. */
static struct verdict {
    atomic_int failed, skipped;
    atomic_uint watches;
    char failure[1024], remark[512];
    struct watch {
        _Atomic(const char *) call;
        atomic_ullong since_ns;
        atomic_int rank;
    } watch[WATCHES];
} *verdict;

static int own_rank = -1;
static _Thread_local struct watch *own_watch;
static _Thread_local pid_t own_watch_pid;
static char folder[256], subfolder[300];

uint64_t now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000 + (uint64_t)time.tv_nsec;
}

uint64_t patience_ns(void) { return (uint64_t)(1e10 * setup.slow); }

void rest(void) {
    if (setup.rest_us) usleep(setup.rest_us);
    else sched_yield();
}

void rest_ms(unsigned ms) { usleep(ms * 1000); }

void watch_enter(const char *call) {
    if (!verdict) return;
    if (!own_watch || own_watch_pid != getpid()) {
        own_watch = &verdict->watch[atomic_fetch_add(&verdict->watches, 1) % WATCHES];
        own_watch_pid = getpid();
        atomic_store(&own_watch->rank, own_rank);
    }
    atomic_store(&own_watch->since_ns, now_ns());
    atomic_store(&own_watch->call, call);
}

void watch_leave(void) {
    if (!verdict || !own_watch) return;
    const uint64_t took = now_ns() - atomic_load(&own_watch->since_ns);
    const char *call = atomic_exchange(&own_watch->call, NULL);
    /* Long even where a busy machine gives the process no time: the call waited for somebody. */
    if (took > patience_ns())
        failed_at("driver", 0, "%s returned only after %.1f s: it must not block", call,
                  (double)took / 1e9);
}

bool failed_at(const char *file, int line, const char *format, ...) {
    char text[900];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    const char *name = strrchr(file, '/');
    if (!verdict || atomic_fetch_add(&verdict->failed, 1) == 0) {
        char rank[24] = "";
        if (own_rank >= 0) snprintf(rank, sizeof rank, "rank %d: ", own_rank);
        if (verdict)
            snprintf(verdict->failure, sizeof verdict->failure, "%s%s (%s:%d)", rank, text,
                     name ? name + 1 : file, line);
        else fprintf(stderr, "%s\n", text);
    }
    return false;
}

bool has_failed(void) { return verdict && atomic_load(&verdict->failed); }

bool skip(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vsnprintf(verdict->remark, sizeof verdict->remark, format, args);
    va_end(args);
    atomic_store(&verdict->skipped, 1);
    return true;
}

void note(const char *format, ...) {
    va_list args;
    va_start(args, format);
    if (verdict) vsnprintf(verdict->remark, sizeof verdict->remark, format, args);
    va_end(args);
}

/* --- one case, in a process group of its own --- */

static void where_it_hangs(char *text, size_t room) {
    size_t at = 0;
    for (unsigned i = 0; i < WATCHES && at + 80 < room; i++) {
        const char *call = atomic_load(&verdict->watch[i].call);
        if (!call) continue;
        const double since = (double)(now_ns() - atomic_load(&verdict->watch[i].since_ns)) / 1e9;
        const int rank = atomic_load(&verdict->watch[i].rank);
        int n = rank >= 0 ? snprintf(text + at, room - at, "; rank %d is in %s", rank, call)
                          : snprintf(text + at, room - at, "; it is in %s", call);
        if (n > 0) at += (size_t)n;
        n = snprintf(text + at, room - at, " for %.1f s", since);
        if (n > 0) at += (size_t)n;
    }
}

/* Runs `check` in a child and says how it ended. The child's group is killed in any case. */
bool case_run(const struct check *check, bool *skipped) {
    verdict = mmap(NULL, sizeof *verdict, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (verdict == MAP_FAILED) {
        perror("mmap");
        exit(3);
    }
    const char *base = setup.folder;
    if (!base) {
        const char *tmp = getenv("TMPDIR");
        snprintf(folder, sizeof folder, "%s/nccl_check.XXXXXX", tmp && *tmp ? tmp : "/tmp");
        if (!mkdtemp(folder)) {
            perror(folder);
            exit(3);
        }
        base = folder;
    }
    snprintf(subfolder, sizeof subfolder, "%s/v%d.%s", base, setup.version, check->name);
    mkdir(subfolder, 0777);

    fflush(NULL);
    const uint64_t begun = now_ns();
    const uint64_t limit = (uint64_t)(check->seconds * setup.slow * 1e9);
    const pid_t child = fork();
    if (child == 0) {
        setpgid(0, 0);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        const bool passed = check->run();
        if (!passed) failed_at(check->name, 0, "failed without saying why");
        /* As a job's process ends: what a plugin does at exit is done. */
        exit(passed ? 0 : 1);
    }
    setpgid(child, child);
    int status = 0;
    bool late = false;
    while (waitpid(child, &status, WNOHANG) == 0) {
        if (now_ns() - begun > limit) {
            late = true;
            char calls[700] = "";
            where_it_hangs(calls, sizeof calls);
            kill(-child, SIGKILL);
            waitpid(child, &status, 0);
            failed_at(check->name, 0, "no end after %.0f s%s", (double)limit / 1e9, calls);
            break;
        }
        rest_ms(2);
    }
    if (!late) kill(-child, SIGKILL); /* what it left behind */
    if (!late && WIFSIGNALED(status)) {
        char calls[700] = "";
        where_it_hangs(calls, sizeof calls);
        failed_at(check->name, 0, "killed by signal %d (%s)%s", WTERMSIG(status),
                  strsignal(WTERMSIG(status)), calls);
    } else if (!late && WEXITSTATUS(status) != 0) {
        failed_at(check->name, 0, "exit status %d", WEXITSTATUS(status));
    }
    if (!setup.folder) {
        forget_folder();
        rmdir(folder);
    }
    const bool passed = !atomic_load(&verdict->failed);
    *skipped = passed && atomic_load(&verdict->skipped);
    printf("%-7s v%-2d %-28s %s\n", !passed ? "FAILED" : *skipped ? "skipped" : "ok", setup.version,
           check->name, passed ? verdict->remark : verdict->failure);
    fflush(stdout);
    munmap(verdict, sizeof *verdict);
    verdict = NULL;
    return passed;
}

void forget_folder(void) {
    DIR *dir = opendir(subfolder);
    if (!dir) return;
    for (struct dirent *entry; (entry = readdir(dir));)
        if (entry->d_name[0] != '.') unlinkat(dirfd(dir), entry->d_name, 0);
    closedir(dir);
    rmdir(subfolder);
}

/* --- ranks --- */

static void path_of(char *path, size_t room, const char *key, int rank, const char *suffix) {
    snprintf(path, room, "%s/%s.%d%s", subfolder, key, rank, suffix);
}

bool ranks_run(int n, bool (*part)(int rank, int ranks), unsigned killed) {
    if (setup.ranks) {
        own_rank = setup.rank;
        char mark[400];
        path_of(mark, sizeof mark, "here", setup.rank, "");
        const int fd = open(mark, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
        CHECK(fd >= 0, "%s: %s; each run needs a folder of its own", mark, strerror(errno));
        close(fd);
        return part(setup.rank, setup.ranks);
    }
    pid_t children[16];
    fflush(NULL);
    for (int rank = 0; rank < n; rank++) {
        children[rank] = fork();
        CHECK(children[rank] >= 0, "fork: %s", strerror(errno));
        if (children[rank] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            own_rank = rank;
            const bool passed = part(rank, n);
            if (!passed) failed_at("rank", rank, "failed without saying why");
            exit(passed ? 0 : 1);
        }
    }
    bool passed = true;
    for (int ended = 0; ended < n; ended++) {
        int status = 0;
        const pid_t pid = waitpid(-1, &status, 0);
        int rank = 0;
        while (rank < n && children[rank] != pid) rank++;
        if (rank == n) {
            ended--;
            if (pid < 0) FAIL("waitpid: %s", strerror(errno));
            continue;
        }
        children[rank] = 0;
        if (killed >> rank & 1) continue;
        if (WIFSIGNALED(status)) {
            own_rank = rank;
            failed_at("rank", rank, "killed by signal %d (%s)", WTERMSIG(status),
                      strsignal(WTERMSIG(status)));
            own_rank = -1;
        }
        if (!WIFEXITED(status) || WEXITSTATUS(status)) {
            passed = false;
            /* The others would only wait for it. */
            for (int other = 0; other < n; other++)
                if (children[other] && other != rank) kill(children[other], SIGKILL);
        }
    }
    return passed;
}

/* --- the folder --- */

bool tell(const char *key, int rank, const void *data, size_t len) {
    char part[400], path[400];
    path_of(part, sizeof part, key, rank, ".part");
    path_of(path, sizeof path, key, rank, "");
    const int fd = open(part, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    CHECK(fd >= 0, "%s: %s", part, strerror(errno));
    const bool written = write(fd, data, len) == (ssize_t)len;
    close(fd);
    CHECK(written && rename(part, path) == 0, "%s: %s", path, strerror(errno));
    return true;
}

bool hear(const char *key, int rank, void *data, size_t len) {
    char path[400];
    path_of(path, sizeof path, key, rank, "");
    const uint64_t until = now_ns() + 3 * patience_ns();
    int fd;
    while ((fd = open(path, O_RDONLY | O_CLOEXEC)) < 0) {
        CHECK(errno == ENOENT, "%s: %s", path, strerror(errno));
        CHECK(now_ns() < until, "rank %d never told its %s", rank, key);
        rest_ms(1);
    }
    const bool got = read(fd, data, len) == (ssize_t)len;
    close(fd);
    CHECK(got, "%s is too short", path);
    return true;
}

bool meet(const char *key, int rank, int ranks) {
    char at = 1;
    DO(tell(key, rank, &at, 1));
    for (int other = 0; other < ranks; other++) DO(hear(key, other, &at, 1));
    return true;
}

/* --- patterns: each 8 bytes of a message depend on the message and the place --- */

static uint64_t word_of(uint64_t id, size_t word) {
    return (id + 1) * 0x9e3779b97f4a7c15ULL ^ ((uint64_t)word + 1) * 0xd6e8feb86659fd93ULL;
}

/* Offsets are multiples of 8; only the last word of a message is cut. */
void pattern_fill(void *to, size_t len, uint64_t id, size_t offset) {
    uint8_t *bytes = to;
    for (size_t at = 0; at < len; at += 8) {
        const uint64_t word = word_of(id, (offset + at) / 8);
        memcpy(bytes + at, &word, len - at < 8 ? len - at : 8);
    }
}

bool pattern_is(const void *in, size_t len, uint64_t id, size_t offset, const char *what) {
    const uint8_t *bytes = in;
    for (size_t at = 0; at < len; at += 8) {
        const uint64_t word = word_of(id, (offset + at) / 8);
        const size_t n = len - at < 8 ? len - at : 8;
        if (memcmp(bytes + at, &word, n) == 0) continue;
        size_t bad = at;
        while (bytes[bad] == ((const uint8_t *)&word)[bad - at]) bad++;
        FAIL("%s: message %llu of %zu bytes is wrong from byte %zu on (%#x, not %#x)", what,
             (unsigned long long)id, len, offset + bad, bytes[bad],
             ((const uint8_t *)&word)[bad - at]);
    }
    return true;
}

bool bytes_are(const void *in, size_t len, uint8_t byte, const char *what) {
    const uint8_t *bytes = in;
    for (size_t at = 0; at < len; at++)
        CHECK(bytes[at] == byte, "%s: byte %zu of %zu was written (%#x)", what, at, len, bytes[at]);
    return true;
}

/* --- what the process holds --- */

static long field_of(const char *file, const char *name) {
    char line[256];
    long value = -1;
    FILE *in = fopen(file, "re");
    if (!in) return -1;
    const size_t len = strlen(name);
    while (fgets(line, sizeof line, in))
        if (strncmp(line, name, len) == 0) value = atol(line + len);
    fclose(in);
    return value;
}

long resident_kib(void) { return field_of("/proc/self/status", "VmRSS:"); }

long available_mib(void) { return field_of("/proc/meminfo", "MemAvailable:") / 1024; }

int running_threads(void) { return (int)field_of("/proc/self/status", "Threads:"); }

int open_files(void) {
    DIR *dir = opendir("/proc/self/fd");
    int n = -1; /* the folder's own */
    if (!dir) return -1;
    for (struct dirent *entry; (entry = readdir(dir));) n += entry->d_name[0] != '.';
    closedir(dir);
    return n;
}

/* --- a loaded plugin --- */

bool net_open(struct net *net) {
    char why[512];
    if (!net->path) net->path = setup.plugin;
    if (!net->version) net->version = setup.version;
    if (!net->config.traffic_class) net->config.traffic_class = UNDEFINED;
    if (!net_load(net, why, sizeof why)) FAIL("%s", why);
    OK(net_init(net, 0x1a71));
    int devices = 0;
    OK(net_devices(net, &devices));
    CHECK(devices > setup.send_device && devices > setup.listen_device,
          "devices: %d; devices %d and %d were asked for", devices, setup.send_device,
          setup.listen_device);
    return true;
}

bool net_shut(struct net *net) {
    char why[512];
    OK(net_finalize(net));
    if (!net_unload(net, why, sizeof why)) FAIL("%s", why);
    return true;
}
