/* What the tests use of Mooncake's C interfaces, written down from its headers of release 0.3.12: `transfer_engine_c.h` and
 * TENT's `tent/transfer_engine.h`. */
#ifndef MOONCAKE_FACTS_H
#define MOONCAKE_FACTS_H

#include <stddef.h>
#include <stdint.h>

enum { READ_OPCODE = 0, WRITE_OPCODE = 1 };
enum { IS_WAITING = 0, IS_COMPLETED = 4, IS_FAILED = 6 };

struct request {
    int opcode;
    void *source;
    int32_t target;
    uint64_t offset;
    uint64_t length;
};

struct message {
    char *name;
    char *text;
};

struct status {
    int status;
    uint64_t transferred;
};

struct buffer {
    void *address;
    size_t length;
};

struct tent_request {
    int opcode;
    void *source;
    uint64_t target;
    uint64_t offset;
    uint64_t length;
    int priority;
    int transport_hint;
};

void *createTransferEngine(const char *metadata, const char *local, const char *host, uint64_t port, int discover);
void destroyTransferEngine(void *engine);
void *installTransport(void *engine, const char *protocol, void **args);
int uninstallTransport(void *engine, const char *protocol);
int32_t openSegment(void *engine, const char *name);
int32_t openSegmentNoCache(void *engine, const char *name);
int registerLocalMemory(void *engine, void *address, size_t length, const char *location, int remote);
int unregisterLocalMemory(void *engine, void *address);
int registerLocalMemoryBatch(void *engine, struct buffer *buffers, size_t count, const char *location);
int unregisterLocalMemoryBatch(void *engine, void **addresses, size_t count);
uint64_t allocateBatchID(void *engine, size_t size);
int submitTransfer(void *engine, uint64_t batch, struct request *requests, size_t count);
int submitTransferWithNotify(void *engine, uint64_t batch, struct request *requests, size_t count, struct message message);
int getTransferStatus(void *engine, uint64_t batch, size_t task, struct status *status);
int freeBatchID(void *engine, uint64_t batch);
int tent_submit(void *engine, uint64_t batch, struct tent_request *requests, size_t count);
int tent_submit_notif(void *engine, uint64_t batch, struct tent_request *requests, size_t count, const char *name,
                      const char *message);
int tent_cancel_task(void *engine, uint64_t batch, size_t task);

#endif
