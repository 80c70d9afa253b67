// Mooncake's own Transfer Engine behind its C interface, for releases that have no C library: the Python package exports the C++ class
// (`engine.so`), and this calls it, as Mooncake's `transfer_engine_c.cpp` does. The process needs libpython, which engine.so refers to.
//
// Layouts and signatures are facts of release 0.3.13, written down anew, and hold for that release only: `Status` is 16 bytes (code,
// message) and goes by reference, since it has a destructor; a request is opcode, source, target, offset, length, retry count, hint, group;
// a transfer's status is an enum and a count. The engine's own size is not known here, so it gets more than enough.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <vector>

extern "C" {
#include "mooncake_facts.h"
}

namespace mooncake {

class Status {
   public:
    ~Status() { delete[] message; }
    uint16_t code;
    const char *message;
};

class Transport {
   public:
    struct TransferRequest {
        int opcode;
        void *source;
        uint64_t target;
        uint64_t offset;
        size_t length;
        int retries = 0;
        int hint = 0;
        uint64_t group = 0;
    };
    struct TransferStatus {
        int status;
        size_t transferred;
    };
};
static_assert(sizeof(Transport::TransferRequest) == 56 && sizeof(Status) == 16, "as in release 0.3.13");

class TransferEngine {
   public:
    TransferEngine(bool discover);
    ~TransferEngine();
    int init(const std::string &metadata, const std::string &local, const std::string &host, uint64_t port);
    int getRpcPort();
    Transport *installTransport(const std::string &protocol, void **args);
    int uninstallTransport(const std::string &protocol);
    uint64_t openSegment(const std::string &name);
    int registerLocalMemory(void *address, size_t length, const std::string &location, bool remote, bool update);
    int unregisterLocalMemory(void *address, bool update);
    uint64_t allocateBatchID(size_t size);
    Status submitTransfer(uint64_t batch, const std::vector<Transport::TransferRequest> &requests);
    Status getTransferStatus(uint64_t batch, size_t task, Transport::TransferStatus &status);
    Status freeBatchID(uint64_t batch);
};

}  // namespace mooncake

using mooncake::TransferEngine;
using mooncake::Transport;

enum { ROOM = 1 << 16 };

// The sources of what each batch was given. Mooncake itself says "waiting" of a transfer that it moves.
static std::mutex given_lock;
static std::map<uint64_t, std::vector<void *>> given;

static TransferEngine *of(void *engine) { return static_cast<TransferEngine *>(engine); }

extern "C" {

void *createTransferEngine(const char *metadata, const char *local, const char *host, uint64_t port, int discover) {
    void *room = calloc(1, ROOM);
    TransferEngine *engine = new (room) TransferEngine(discover != 0);
    if (engine->init(metadata, local, host, port)) return nullptr;
    printf("port %d\n", engine->getRpcPort());
    fflush(stdout);
    return engine;
}

void destroyTransferEngine(void *engine) { of(engine)->~TransferEngine(); }

void *installTransport(void *engine, const char *protocol, void **args) {
    (void)args;
    return of(engine)->installTransport(protocol, nullptr);
}

int uninstallTransport(void *engine, const char *protocol) { return of(engine)->uninstallTransport(protocol); }

int32_t openSegment(void *engine, const char *name) { return static_cast<int32_t>(of(engine)->openSegment(name)); }

int registerLocalMemory(void *engine, void *address, size_t length, const char *location, int remote) {
    return of(engine)->registerLocalMemory(address, length, location, remote != 0, true);
}

int registerLocalMemoryBatch(void *engine, struct buffer *buffers, size_t count, const char *location) {
    int code = 0;
    for (size_t i = 0; i < count && !code; i++)
        code = registerLocalMemory(engine, buffers[i].address, buffers[i].length, location, 1);
    return code;
}

int unregisterLocalMemory(void *engine, void *address) { return of(engine)->unregisterLocalMemory(address, true); }

int unregisterLocalMemoryBatch(void *engine, void **addresses, size_t count) {
    int code = 0;
    for (size_t i = 0; i < count && !code; i++) code = unregisterLocalMemory(engine, addresses[i]);
    return code;
}

uint64_t allocateBatchID(void *engine, size_t size) { return of(engine)->allocateBatchID(size); }

int submitTransfer(void *engine, uint64_t batch, struct request *requests, size_t count) {
    std::vector<Transport::TransferRequest> all(count);
    for (size_t i = 0; i < count; i++) {
        all[i].opcode = requests[i].opcode;
        all[i].source = requests[i].source;
        all[i].target = static_cast<uint64_t>(requests[i].target);
        all[i].offset = requests[i].offset;
        all[i].length = requests[i].length;
    }
    {
        // Before the call, since a transfer may end within it.
        std::lock_guard<std::mutex> held(given_lock);
        for (auto &request : all) given[batch].push_back(request.source);
    }
    int code = of(engine)->submitTransfer(batch, all).code;
    if (code) {
        std::lock_guard<std::mutex> held(given_lock);
        given[batch].resize(given[batch].size() - count);
    }
    return code;
}

// Not of Mooncake: copies the sources of the first `most` transfers that a batch was given, and
// returns the number of all.
size_t givenSources(uint64_t batch, void **sources, size_t most) {
    std::lock_guard<std::mutex> held(given_lock);
    auto found = given.find(batch);
    if (found == given.end()) return 0;
    for (size_t i = 0; i < most && i < found->second.size(); i++) sources[i] = found->second[i];
    return found->second.size();
}

// What a notification is in C++ is not written down here.
int submitTransferWithNotify(void *, uint64_t, struct request *, size_t, struct message) { return -1; }

int getTransferStatus(void *engine, uint64_t batch, size_t task, struct status *status) {
    Transport::TransferStatus now = {0, 0};
    int code = of(engine)->getTransferStatus(batch, task, now).code;
    if (code == 0) *status = {now.status, now.transferred};
    return code;
}

int freeBatchID(void *engine, uint64_t batch) {
    // Another batch may get the number at once.
    std::lock_guard<std::mutex> held(given_lock);
    int code = of(engine)->freeBatchID(batch).code;
    if (code == 0) given.erase(batch);
    return code;
}
}
