/* Loading: symbols, properties, registration, reload, contexts, fork, environment. */
#define _GNU_SOURCE
#include "wire.h"

#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *const expected_symbols[] = {
    "ncclNetPlugin_v7",  "ncclNetPlugin_v8",  "ncclNetPlugin_v9", "ncclNetPlugin_v10",
    "ncclNetPlugin_v11", "ncclNetPlugin_v12", "ncclProfiler_v3",  "ncclProfiler_v4",
    "ncclProfiler_v5",   "ncclProfiler_v6",   "ncclRmaPlugin_v14", "ncclRmaPlugin_v15",
    "ncclRmaPlugin_v16"};

/* What the file's dynamic symbol table defines for others, against the list above. */
static bool symbols(void) {
    const int fd = open(setup.plugin, O_RDONLY | O_CLOEXEC);
    struct stat stat;
    CHECK(fd >= 0 && fstat(fd, &stat) == 0, "%s: %s", setup.plugin, strerror(errno));
    const uint8_t *file = mmap(NULL, (size_t)stat.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    CHECK(file != MAP_FAILED, "mmap: %s", strerror(errno));
    const Elf64_Ehdr *header = (const void *)file;
    CHECK(memcmp(header->e_ident, ELFMAG, SELFMAG) == 0, "not an ELF file");
    const Elf64_Shdr *sections = (const void *)(file + header->e_shoff);
    bool seen[COUNT(expected_symbols)] = {false};
    for (int i = 0; i < header->e_shnum; i++) {
        if (sections[i].sh_type != SHT_DYNSYM) continue;
        const Elf64_Sym *table = (const void *)(file + sections[i].sh_offset);
        const char *names = (const char *)(file + sections[sections[i].sh_link].sh_offset);
        for (size_t s = 0; s < sections[i].sh_size / sizeof *table; s++) {
            const Elf64_Sym *symbol = &table[s];
            if (symbol->st_shndx == SHN_UNDEF || ELF64_ST_BIND(symbol->st_info) == STB_LOCAL)
                continue;
            size_t k = 0;
            while (k < COUNT(seen) && strcmp(names + symbol->st_name, expected_symbols[k])) k++;
            CHECK(k < COUNT(seen), "exports %s, which is none of NCCL's", names + symbol->st_name);
            CHECK(ELF64_ST_TYPE(symbol->st_info) == STT_OBJECT, "%s is no object",
                  expected_symbols[k]);
            seen[k] = true;
        }
    }
    /* A plugin may leave out the tables of one-sided operations. */
    for (size_t k = 0; k < COUNT(seen); k++)
        CHECK(seen[k] || strncmp(expected_symbols[k], "ncclRma", 7) == 0, "lacks %s",
              expected_symbols[k]);
    munmap((void *)file, (size_t)stat.st_size);
    close(fd);

    struct net net = {.path = setup.plugin};
    char why[512], name[64] = "";
    for (net.version = VERSION_FIRST; net.version <= VERSION_LAST; net.version++) {
        if (!net_load(&net, why, sizeof why)) FAIL("%s", why);
        CHECK(net.name && *net.name, "v%d has no name", net.version);
        CHECK(!*name || strcmp(name, net.name) == 0, "v%d is named %s, others %s", net.version,
              net.name, name);
        snprintf(name, sizeof name, "%s", net.name);
        /* All but the three that NCCL asks for before it calls them. */
        const void *const *slots = net.table;
        for (int slot = 1; slot <= 16; slot++)
            CHECK(slots[slot] || slot == 8, "v%d: function %d of the table is NULL", net.version,
                  slot);
        if (net.version >= 11) CHECK(slots[20], "v%d has no finalize", net.version);
        if (!net_unload(&net, why, sizeof why)) FAIL("%s", why);
    }
    note("%s", name);
    return true;
}

static bool properties(void) {
    struct net net = {0};
    DO(net_open(&net));
    int devices = 0;
    OK(net_devices(&net, &devices));
    for (int device = 0; device < devices; device++) {
        struct properties p, again;
        OK(net_properties(&net, device, &p));
        OK(net_properties(&net, device, &again));
        CHECK(!p.overrun, "more bytes were written than v%d's struct has", net.version);
        CHECK(p.name && *p.name, "device %d has no name", device);
        CHECK(strcmp(p.name, again.name) == 0 && p.guid == again.guid &&
                  p.speed_mbps == again.speed_mbps,
              "device %d has other properties when asked again", device);
        CHECK(!p.pci_path || strncmp(p.pci_path, "/sys/", 5) == 0, "pciPath of device %d is %s",
              device, p.pci_path);
        CHECK(p.pointer_support & POINTER_HOST, "device %d takes no host memory", device);
        CHECK(!(p.pointer_support & ~7), "ptrSupport is %#x", (unsigned)p.pointer_support);
        CHECK((p.reg_is_global | 1) == 1 && (p.force_flush | 1) == 1, "flags %d, %d",
              p.reg_is_global, p.force_flush);
        CHECK(p.speed_mbps > 0, "device %d has speed %d", device, p.speed_mbps);
        CHECK(p.latency >= 0 && p.latency < 1e6, "device %d has latency %f", device,
              (double)p.latency);
        CHECK(p.max_comms > 0, "maxComms is %d", p.max_comms);
        CHECK(p.max_recvs >= 1 && p.max_recvs <= GROUP_MAX, "maxRecvs is %d", p.max_recvs);
        CHECK(p.device_type == 0, "netDeviceType is %d: not the host's", p.device_type);
        CHECK(p.parts == 1 && p.part == device, "device %d is made of %d devices, the first %d",
              device, p.parts, p.part);
        CHECK(p.max_p2p_bytes > 0 && p.max_p2p_bytes <= (size_t)1 << 40, "maxP2pBytes is %zu",
              p.max_p2p_bytes);
        CHECK(p.max_coll_bytes > 0 && p.max_coll_bytes <= (size_t)1 << 40, "maxCollBytes is %zu",
              p.max_coll_bytes);
        CHECK(p.max_multi_request >= 1, "maxMultiRequestSize is %d", p.max_multi_request);
        CHECK(p.rail >= -1 && p.plane >= -1, "rail %d, plane %d", p.rail, p.plane);
        for (int other = 0; other < device; other++) {
            struct properties q;
            OK(net_properties(&net, other, &q));
            CHECK(strcmp(q.name, p.name), "devices %d and %d are both %s", other, device, p.name);
        }
        if (device == 0) note("%d device(s); %s, %d Mbit/s", devices, p.name, p.speed_mbps);
    }
    /* NCCL never asks for these; a plugin that indexes with them crashes its host. */
    struct properties p;
    void *comm = NULL;
    uint8_t handle[HANDLE_BYTES] = {0};
    CHECK(net_properties(&net, devices, &p), "getProperties(%d) of %d devices is fine", devices,
          devices);
    CHECK(net_properties(&net, -1, &p), "getProperties(-1) is fine");
    CHECK(net_listen(&net, devices, handle, &comm), "listen on device %d of %d", devices, devices);
    bool exists;
    CHECK(net_make_virtual(&net, 2, (int[]){0, devices}, &exists) || !exists,
          "makeVDevice took a device that is not there");
    return net_shut(&net);
}

static bool handle_size(void) {
    struct net net = {0};
    DO(net_open(&net));
    struct {
        uint8_t handle[HANDLE_BYTES], behind[64];
    } place;
    memset(&place, 0x33, sizeof place);
    void *listen = NULL;
    OK(net_listen(&net, setup.listen_device, place.handle, &listen));
    CHECK(listen, "listen gives no comm");
    DO(bytes_are(place.behind, sizeof place.behind, 0x33, "behind the handle"));
    OK(net_close_listen(&net, listen));
    return net_shut(&net);
}

static bool registration(void) {
    struct net net = {0};
    DO(net_open(&net));
    struct wire wire;
    DO(wire_open(&net, &wire, 4096));
    struct properties p;
    OK(net_properties(&net, setup.send_device, &p));
    /* Pages that are never touched; a verbs plugin pins them, so they have to be there. */
    const size_t most = available_mib() > 4096 ? (size_t)1 << 30 : (size_t)64 << 20;
    uint8_t *area = mmap(NULL, most, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(area != MAP_FAILED, "mmap: %s", strerror(errno));
    for (size_t size = 1; size <= most; size = size < 4096 ? size * 16 : size * 8) {
        void *a = NULL, *b = NULL, *c = NULL;
        OK(net_register(&net, wire.send, area + 1, size - (size == most), POINTER_HOST, &a));
        OK(net_register(&net, wire.send, area + 1, size - (size == most), POINTER_HOST, &b));
        OK(net_register(&net, wire.receive, area, size, POINTER_HOST, &c));
        OK(net_deregister(&net, wire.receive, c));
        OK(net_deregister(&net, wire.send, a));
        OK(net_deregister(&net, wire.send, b));
    }
    munmap(area, most);
    void *memory = NULL;
    if (!(p.pointer_support & POINTER_CUDA))
        CHECK(net_register(&net, wire.send, wire.out.at, 64, POINTER_CUDA, &memory),
              "regMr takes device memory, which ptrSupport excludes");
    /* A file that is no dmabuf. */
    const int fd = memfd_create("none", MFD_CLOEXEC);
    CHECK(fd >= 0 && ftruncate(fd, 1 << 20) == 0, "memfd: %s", strerror(errno));
    CHECK(net_register_dmabuf(&net, wire.send, wire.out.at, 64, fd, &memory),
          "regMrDmaBuf takes a file that is no dmabuf");
    close(fd);
    CHECK(net_register_dmabuf(&net, wire.send, wire.out.at, 64, -1, &memory),
          "regMrDmaBuf takes descriptor -1");
    DO(one_message(&wire, 1000, 4096, 1, true));
    note("up to %zu MiB", most >> 20);
    DO(wire_close(&wire));
    return net_shut(&net);
}

/* Contexts of two communicators (before v11: the same one): the first goes, the second works. */
static bool contexts(void) {
    struct net a = {0}, b = {0}, c = {.config.traffic_class = 5};
    DO(net_open(&a));
    DO(net_open(&b));
    DO(net_open(&c));
    struct wire of_a, of_b, of_c;
    DO(wire_open(&a, &of_a, 65536));
    DO(wire_open(&b, &of_b, 65536));
    DO(wire_open(&c, &of_c, 65536));
    DO(one_message(&of_a, 5000, 65536, 1, true));
    DO(one_message(&of_b, 5000, 65536, 2, false));
    DO(wire_close(&of_a));
    OK(net_finalize(&a));
    DO(one_message(&of_b, 60000, 65536, 3, true));
    DO(wire_close(&of_b));
    OK(net_finalize(&b));
    DO(one_message(&of_c, 60000, 65536, 4, false));
    struct wire late;
    DO(wire_open(&c, &late, 65536));
    DO(one_message(&late, 777, 65536, 5, true));
    DO(wire_close(&late));
    DO(wire_close(&of_c));
    OK(net_finalize(&c));
    char why[512];
    if (!net_unload(&a, why, sizeof why) || !net_unload(&b, why, sizeof why) ||
        !net_unload(&c, why, sizeof why))
        FAIL("%s", why);
    return true;
}

/* After its last communicator NCCL closes the library; the next one opens it again. */
static bool reload(void) {
    int files = 0, threads = 0;
    for (int round = 0; round < 8; round++) {
        struct net net = {0};
        struct wire wire;
        DO(net_open(&net));
        DO(wire_open(&net, &wire, 1 << 20));
        DO(one_message(&wire, 100000, 1 << 20, (uint64_t)round, round % 2));
        DO(wire_close(&wire));
        DO(net_shut(&net));
        /* What the first rounds leave is cached; more by every round is a leak. */
        if (round == 2) files = open_files(), threads = running_threads();
    }
    CHECK(open_files() <= files, "open files grew from %d to %d", files, open_files());
    CHECK(running_threads() <= threads, "threads grew from %d to %d", threads, running_threads());
    note("%d files open, %d threads", files, threads);
    return true;
}

static bool no_leak(void) {
    struct net net = {0};
    DO(net_open(&net));
    int files = 0, threads = 0;
    long kib = 0;
    for (int round = 0; round < 60; round++) {
        struct wire wire;
        DO(wire_open(&net, &wire, 65536));
        DO(one_message(&wire, 65536, 65536, (uint64_t)round, round % 2));
        DO(wire_close(&wire));
        if (round == 9) files = open_files(), threads = running_threads(), kib = resident_kib();
    }
    CHECK(open_files() <= files, "50 connections, opened and closed: open files grew from %d to %d",
          files, open_files());
    CHECK(running_threads() <= threads, "50 connections: threads grew from %d to %d", threads,
          running_threads());
    CHECK(resident_kib() < kib + 4096, "50 connections: memory grew from %ld to %ld KiB", kib,
          resident_kib());
    return net_shut(&net);
}

static bool child_ended_well(pid_t child, const char *what) {
    int status = 0;
    CHECK(child > 0, "fork: %s", strerror(errno));
    CHECK(waitpid(child, &status, 0) == child, "waitpid: %s", strerror(errno));
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "%s: status %#x", what, (unsigned)status);
    return true;
}

static bool forks(void) {
    struct net net = {0};
    struct wire wire;
    DO(net_open(&net));
    DO(wire_open(&net, &wire, 1 << 20));
    DO(one_message(&wire, 70000, 1 << 20, 1, true));
    void *pending = NULL;
    DO(irecv_until(&net, wire.receive, wire.in.at, 1 << 20, 5, wire.in.memory, &pending));
    fflush(NULL);

    pid_t child = fork(); /* as subprocess.run does it */
    if (child == 0) _exit(0);
    DO(child_ended_well(child, "a child that ends at once"));
    child = fork(); /* with all that a library has hung into exit */
    if (child == 0) exit(0);
    DO(child_ended_well(child, "a child that calls exit"));

    child = fork();
    if (child == 0) {
        struct net own = {0};
        struct wire inner;
        const bool passed = net_open(&own) && wire_open(&own, &inner, 1 << 20) &&
                            one_message(&inner, 300000, 1 << 20, 9, true) &&
                            one_message(&inner, 300000, 1 << 20, 10, false) && wire_close(&inner);
        _exit(passed ? 0 : 1);
    }
    /* The parent goes on meanwhile. */
    void *sent = NULL;
    pattern_fill(wire.out.at, 90000, 2, 0);
    DO(isend_until(&net, wire.send, wire.out.at, 90000, 5, wire.out.memory, &sent));
    int size = 0;
    for (int both = 0; both < 2;) {
        int done = 0;
        if (sent) OK(net_test(&net, sent, &done, NULL));
        if (done) sent = NULL, both++;
        done = 0;
        if (pending) OK(net_test(&net, pending, &done, &size));
        if (done) pending = NULL, both++;
    }
    CHECK(size == 90000, "received %d bytes", size);
    DO(pattern_is(wire.in.at, 90000, 2, 0, "after the forks"));
    DO(child_ended_well(child, "a child that uses the plugin itself"));
    DO(one_message(&wire, 1 << 20, 1 << 20, 3, false));
    DO(wire_close(&wire));
    return net_shut(&net);
}

static bool works(void) {
    struct net net = {0};
    struct wire wire;
    DO(net_open(&net));
    DO(wire_open(&net, &wire, 4 << 20));
    for (uint64_t id = 0; id < 20; id++)
        DO(one_message(&wire, (size_t)1 << (id + 1), 4 << 20, id, id % 2));
    DO(wire_close(&wire));
    return net_shut(&net);
}

static bool no_daemon(void) {
    setenv("LAXITY_SOCKET", "/nonexistent/laxityd.sock", 1);
    return works();
}

static bool mode_off(void) {
    setenv("LAXITY_MODE", "off", 1);
    return works();
}

static bool bad_interface(void) {
    setenv("NCCL_SOCKET_IFNAME", "nonsense", 1);
    setenv("LAXITY_NET", "tcp", 1);
    struct net net = {.path = setup.plugin, .version = setup.version};
    char why[512];
    if (!net_load(&net, why, sizeof why)) FAIL("%s", why);
    CHECK(net_init(&net, 1) != RESULT_OK, "init succeeds with NCCL_SOCKET_IFNAME=nonsense");
    CHECK(strstr(logged(), "nonsense"), "the log does not name the interface that it did not find: %s",
          logged());
    if (!net_unload(&net, why, sizeof why)) FAIL("%s", why);
    return true;
}

/* Which interfaces there are, and in which order, as the environment chooses them: the names that
 * NCCL_CHECK_DEVICES expects, with commas. interfaces.sh runs it where it makes the interfaces. */
static bool interfaces(void) {
    const char *expected = getenv("NCCL_CHECK_DEVICES");
    if (!expected) return skip("NCCL_CHECK_DEVICES says nothing");
    struct net net = {0};
    char names[512] = "";
    int devices = 0;
    DO(net_open(&net));
    OK(net_devices(&net, &devices));
    for (int device = 0; device < devices; device++) {
        struct properties p;
        OK(net_properties(&net, device, &p));
        const size_t used = strlen(names);
        snprintf(names + used, sizeof names - used, "%s%s", used ? "," : "", p.name);
    }
    CHECK(strcmp(names, expected) == 0, "the devices are %s, not %s", names, expected);
    note("%s", names);
    return net_shut(&net);
}

const struct check load_checks[] = {
    {"symbols", symbols, 10, 0, ONCE, "exactly NCCL's symbols leave the library; names, tables"},
    {"properties", properties, 10, 0, EACH, "getProperties is true; devices that are not there"},
    {"handle_size", handle_size, 10, 0, EACH, "a handle has 128 bytes and no more"},
    {"registration", registration, 45, 0, EACH, "regMr of 1 B to 1 GiB; what cannot be registered"},
    {"contexts", contexts, 45, 0, EACH, "several init; one finalised while others work"},
    {"reload", reload, 45, 0, EACH, "last close, dlclose, dlopen, works again"},
    {"no_leak", no_leak, 45, 0, EACH, "connections leave no files, threads or memory behind"},
    {"forks", forks, 45, 0, EACH, "children that do nothing, that exit, that work"},
    {"no_daemon", no_daemon, 45, 0, EACH, "LAXITY_SOCKET leads nowhere: traffic passes"},
    {"mode_off", mode_off, 45, 0, EACH, "LAXITY_MODE=off: traffic passes"},
    {"bad_interface", bad_interface, 45, 0, EACH, "NCCL_SOCKET_IFNAME names nothing: init says so"},
    {"interfaces", interfaces, 45, 0, EACH, "the devices are those of NCCL_CHECK_DEVICES, if set"},
    {0}};
