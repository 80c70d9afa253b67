/* nccl_check: drives a NCCL net plugin the way NCCL does, through every version of its interface,
 * in host memory. --help says how. See check.h for how a case is written. */
#define _GNU_SOURCE
#include "check.h"

#include <errno.h>
#include <getopt.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static const struct check *const groups[] = {load_checks,   connect_checks,    transfer_checks,
                                             abort_checks,  thread_checks,     collective_checks,
                                             profiler_checks, rma_checks};

static int usage(const char *name, int status) {
    fprintf(status ? stderr : stdout,
            "usage: %s --plugin PATH [OPTION]... [CASE]...\n"
            "  -p, --plugin PATH     the library\n"
            "  -v, --version N|all   interface version, " VERSIONS "; may be repeated (all)\n"
            "  -d, --device N        device that sends, and listens unless --peer is given (0)\n"
            "  -e, --peer N          device that listens\n"
            "  -s, --slow N          allow N times as long (1; 0.2 is a fifth)\n"
            "  -r, --rank R --ranks N --folder DIR\n"
            "                        be one of N ranks that were started separately (in other\n"
            "                        network namespaces, on other hosts) and find each other by\n"
            "                        files in DIR, which all share; for the cases of --list that\n"
            "                        say how many ranks they have. N may be 2 to 8 for those that\n"
            "                        say \"ranks\"\n"
            "  -l, --list            the cases\n"
            "  -V, --verbose         show what the plugin logs\n"
            "One line a case: ok, skipped or FAILED, version, case, detail. The exit status is 1\n"
            "if one failed, 3 if nothing could be tried.\n",
            name);
    return status;
}

static void list(void) {
    for (size_t g = 0; g < COUNT(groups); g++)
        for (const struct check *check = groups[g]; check->name; check++) {
            printf("%-28s %s", check->name, check->about);
            if (check->kind >= RANKS_2) printf(" (%d ranks)", (int)check->kind);
            if (check->from) printf(" (v%d on)", check->from);
            puts("");
        }
}

static const struct check *find(const char *name) {
    for (size_t g = 0; g < COUNT(groups); g++)
        for (const struct check *check = groups[g]; check->name; check++)
            if (strcmp(check->name, name) == 0) return check;
    return NULL;
}

int main(int argc, char **argv) {
    static const struct option options[] = {{"plugin", required_argument, NULL, 'p'},
                                            {"version", required_argument, NULL, 'v'},
                                            {"device", required_argument, NULL, 'd'},
                                            {"peer", required_argument, NULL, 'e'},
                                            {"slow", required_argument, NULL, 's'},
                                            {"rank", required_argument, NULL, 'r'},
                                            {"ranks", required_argument, NULL, 'n'},
                                            {"folder", required_argument, NULL, 'f'},
                                            {"list", no_argument, NULL, 'l'},
                                            {"verbose", no_argument, NULL, 'V'},
                                            {"help", no_argument, NULL, 'h'},
                                            {NULL, 0, NULL, 0}};
    unsigned versions = 0;
    int peer = -1;
    for (int c; (c = getopt_long(argc, argv, "p:v:d:e:s:r:n:f:lVh", options, NULL)) != -1;) {
        switch (c) {
        case 'p': setup.plugin = optarg; break;
        case 'v': {
            const int version = atoi(optarg);
            if (strcmp(optarg, "all") == 0) versions = ~0U;
            else if (version >= VERSION_FIRST && version <= VERSION_LAST) versions |= 1U << version;
            else {
                fprintf(stderr, "no version %s: " VERSIONS ", or all\n", optarg);
                return 3;
            }
            break;
        }
        case 'd': setup.send_device = atoi(optarg); break;
        case 'e': peer = atoi(optarg); break;
        case 's': setup.slow = atof(optarg); break;
        case 'r': setup.rank = atoi(optarg); break;
        case 'n': setup.ranks = atoi(optarg); break;
        case 'f': setup.folder = optarg; break;
        case 'l': list(); return 0;
        case 'V': verbose = true; break;
        case 'h': return usage(argv[0], 0);
        default: return usage(argv[0], 3);
        }
    }
    setup.listen_device = peer < 0 ? setup.send_device : peer;
    if (!versions) versions = ~0U;
    if (!(setup.slow > 0)) setup.slow = 1;
    if (!setup.plugin) return usage(argv[0], 3);
    if (access(setup.plugin, R_OK)) {
        fprintf(stderr, "%s: %s\n", setup.plugin, strerror(errno));
        return 3;
    }
    for (int i = optind; i < argc; i++) {
        const struct check *check = find(argv[i]);
        if (!check) {
            fprintf(stderr, "no case %s; --list lists them\n", argv[i]);
            return 3;
        }
        if (setup.ranks && check->kind < RANKS_2) {
            fprintf(stderr, "%s has no ranks: it is run without --ranks\n", argv[i]);
            return 3;
        }
    }
    if (setup.ranks && (setup.ranks < 2 || setup.ranks > 8 || setup.rank < 0 ||
                        setup.rank >= setup.ranks || !setup.folder || optind == argc)) {
        fprintf(stderr, "--ranks 2 to 8 needs --rank below it, --folder and the names of cases\n");
        return 3;
    }
    bool passed = true;
    unsigned tried = 0;
    for (int version = VERSION_FIRST; version <= VERSION_LAST; version++) {
        if (!(versions >> version & 1)) continue;
        setup.version = version;
        for (size_t g = 0; g < COUNT(groups); g++)
            for (const struct check *check = groups[g]; check->name; check++) {
                bool chosen = optind == argc;
                for (int i = optind; i < argc; i++)
                    chosen = chosen || strcmp(check->name, argv[i]) == 0;
                if (!chosen || version < check->from) continue;
                const bool last = version == VERSION_LAST || !(versions >> (version + 1));
                if (check->kind == ONCE && !last) continue;
                bool skipped = false;
                passed = case_run(check, &skipped) && passed;
                tried += !skipped;
            }
    }
    if (!tried) fprintf(stderr, "no case was tried\n");
    return !passed ? 1 : tried ? 0 : 3;
}
