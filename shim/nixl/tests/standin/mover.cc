// Moves bytes with NIXL's C++ interface: mover WAY. Prints what NIXL answers. It is linked with the stand-in, or loaded
// by loader.c as Python loads NIXL's bindings.
#include "nixl_facts.h"

#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <string>
#include <unistd.h>

namespace {
constexpr size_t SIZE = 40000, BLOCKS = 8;
char here[BLOCKS * SIZE], there[BLOCKS * SIZE];

// Blocks [first, first + count) of an agent's memory.
nixl_xfer_dlist_t blocks(char *memory, size_t first, size_t count) {
    nixl_xfer_dlist_t list(DRAM_SEG);
    for (size_t i = first; i < first + count; i++) {
        nixlBasicDesc desc{};
        desc.addr = reinterpret_cast<uintptr_t>(memory + i * SIZE), desc.len = SIZE;
        list.addDesc(desc);
    }
    return list;
}

nixlXferReqH *create(nixlAgent &agent, size_t first, size_t count, const char *peer = "there") {
    nixlXferReqH *request = nullptr;
    agent.createXferReq(NIXL_WRITE, blocks(here, first, count), blocks(there, first, count), peer, request);
    return request;
}

nixl_status_t wait(nixlAgent &agent, nixlXferReqH *request) {
    nixl_status_t status;
    while ((status = agent.getXferStatus(request)) == NIXL_IN_PROG) usleep(200);
    return status;
}

void say(const char *what, long number) {
    std::printf("%s %ld\n", what, number);
    std::fflush(stdout);
}

bool arrived(size_t first, size_t count) {
    return std::memcmp(here + first * SIZE, there + first * SIZE, count * SIZE) == 0;
}

// Waits for bytes, and calls `meanwhile`, but not for the state of a transfer.
template <class F> void await(size_t first, size_t count, F meanwhile) {
    volatile char *last = there + (first + count) * SIZE - 1;
    while (*last != here[(first + count) * SIZE - 1]) meanwhile();
}

// Three requests of one, two and three blocks, posted at once.
void order(nixlAgent &agent) {
    nixlXferReqH *requests[] = {create(agent, 0, 1), create(agent, 1, 2), create(agent, 3, 3)};
    for (auto *request : requests) say("post", agent.postXferReq(request));
    say("again", agent.postXferReq(requests[0]));
    nixlXferTelemetry telemetry;
    say("telemetry", agent.getXferTelemetry(requests[0], telemetry));
    for (auto *request : requests) say("wait", wait(agent, request));
    say("repost", agent.postXferReq(requests[1]));
    say("wait", wait(agent, requests[1]));
    say("arrived", arrived(0, 6));
    for (auto *request : requests) agent.releaseXferReq(request);
}

// A request that is created with a list of files, and a prepared one.
void storage(nixlAgent &agent) {
    nixl_xfer_dlist_t files(FILE_SEG);
    for (const auto &desc : blocks(there, 0, BLOCKS)) files.addDesc(desc);
    nixlXferReqH *requests[2] = {};
    agent.createXferReq(NIXL_WRITE, blocks(here, 0, BLOCKS), files, "here", requests[0]);
    nixlDlistH *local = nullptr, *remote = nullptr;
    agent.prepXferDlist("", blocks(here, 0, BLOCKS), local);
    agent.prepXferDlist("here", files, remote);
    const std::vector<int> some{0, 2};
    agent.makeXferReq(NIXL_WRITE, local, some, remote, some, requests[1]);
    for (auto *request : requests) {
        say("post", agent.postXferReq(request));
        say("wait", wait(agent, request));
        agent.releaseXferReq(request);
    }
    say("arrived", arrived(0, BLOCKS));
    for (auto *list : {local, remote}) agent.releasedDlistH(list);
}

void prepared(nixlAgent &agent) {
    nixlDlistH *local = nullptr, *remote = nullptr, *strided = nullptr;
    agent.prepXferDlist("", blocks(here, 0, BLOCKS), local);
    agent.prepXferDlist("there", blocks(there, 0, BLOCKS), remote);
    nixl_stride_dlist_t rows(DRAM_SEG);
    nixlStrideDesc row{};
    row.addr = reinterpret_cast<uintptr_t>(here), row.len = SIZE, row.stride = SIZE, row.count = BLOCKS;
    rows.addDesc(row);
    agent.prepXferDlist(rows, strided);
    std::memset(there, 'r', sizeof there);
    nixlXferReqH *request = nullptr;
    const std::vector<int> even{0, 2, 4}, odd{1, 3};
    agent.makeXferReq(NIXL_READ, local, even, remote, even, request);
    for (int i = 0; i < 2; i++) {
        say("post", agent.postXferReq(request));
        say("wait", wait(agent, request));
    }
    agent.releaseXferReq(request);
    agent.makeXferReq(NIXL_READ, *strided, std::span<const int>(odd), *remote, std::span<const int>(odd), request);
    say("post", agent.postXferReq(request));
    say("wait", wait(agent, request));
    agent.releaseXferReq(request);
    say("arrived", arrived(0, 5));
    for (auto *list : {local, remote, strided}) agent.releasedDlistH(list);
}
} // namespace

extern "C" int run(const char *named) {
    const std::string way = named;
    for (size_t i = 0; i < sizeof here; i++) here[i] = char(1 + i % 100);
    auto agent = std::make_unique<nixlAgent>("here", nixlAgentConfig());
    if (way == "order") {
        order(*agent);
    } else if (way == "prepared") {
        prepared(*agent);
    } else if (way == "storage") {
        storage(*agent);
    } else {
        auto *request = create(*agent, 0, BLOCKS, way == "late" ? "gone" : "there");
        if (way == "exempt") {
            auto exempt = reinterpret_cast<void (*)(void *)>(dlsym(RTLD_DEFAULT, "laxity_nixl_exempt"));
            exempt(request);
        }
        nixl_opt_args_t extra;
        extra.notif = "arrived";
        say("post", agent->postXferReq(request, way == "arguments" ? &extra : nullptr));
        if (way == "silent") {
            await(0, BLOCKS, [] { usleep(1000); });
            usleep(100000);
        } else if (way == "notified") {
            nixl_notifs_t found;
            await(0, BLOCKS, [&] { agent->getNotifs(found); });
            for (int i = 0; i < 200; i++) agent->getNotifs(found), usleep(100);
        } else if (way == "busy") {
            nixl_notifs_t found;
            for (int i = 0; i < 5; i++) agent->getNotifs(found, &extra);
        } else if (way == "checking") {
            // The thread may post between two calls.
            const auto peer = [&] { agent->checkRemoteMD("peer", blocks(there, 0, BLOCKS)), usleep(20000); };
            await(0, BLOCKS, peer);
            for (int i = 0; i < 3; i++) peer();
        } else if (way == "release") {
            say("release", agent->releaseXferReq(request));
        } else if (way == "destroy") {
            agent.reset();
            usleep(50000);
        } else {
            say("wait", wait(*agent, request));
            say("wait", wait(*agent, request));
            if (way == "late") {
                const auto again = agent->postXferReq(request);
                say("repost", again == NIXL_IN_PROG ? wait(*agent, request) : again);
            }
        }
        say("arrived", arrived(0, BLOCKS));
    }
    agent.reset();
    say("over", 0);
    return 0;
}

#ifdef MAIN
int main(int, char **words) { return run(words[1]); }
#endif
