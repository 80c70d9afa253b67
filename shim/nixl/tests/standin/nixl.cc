// A stand-in for libnixl.so. Both sides of a transfer are memory of this process. A post logs itself and is in progress
// for three questions; its bytes move at the post. A transfer to the agent "gone" is refused at the post. The log,
// STANDIN_LOG, also has two threads in an agent at once, which NIXL does not allow.
#include "nixl_facts.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

template class nixlDescList<nixlBasicDesc>;
template class nixlDescList<nixlStrideDesc>;

namespace {
void log(const char *what, long number) {
    static FILE *file = std::fopen(std::getenv("STANDIN_LOG"), "a");
    std::fprintf(file, "%s %ld\n", what, number);
    std::fflush(file);
}
} // namespace

class nixlAgentData {
public:
    mutable std::atomic<int> threads{0};
    mutable int requests = 0;
};

struct Alone {
    const nixlAgentData &agent;
    explicit Alone(const nixlAgentData &agent) : agent(agent) {
        if (agent.threads++ != 0) log("two threads", agent.threads);
    }
    ~Alone() { agent.threads--; }
};

class nixlDlistH {
public:
    std::vector<nixlBasicDesc> descs;
};

class nixlXferReqH {
public:
    int number;
    bool writes, is_gone;
    std::vector<nixlBasicDesc> local, remote;
    nixl_status_t status = NIXL_ERR_NOT_POSTED;
    int questions = 0;
};

nixlAgent::nixlAgent(const std::string &, const nixlAgentConfig &) : data(new nixlAgentData) {}
nixlAgent::~nixlAgent() { log("destroy", 0); }

nixl_status_t nixlAgent::prepXferDlist(const std::string &, const nixl_xfer_dlist_t &descs, nixlDlistH *&list,
                                       const nixl_opt_args_t *) const {
    list = new nixlDlistH{{descs.begin(), descs.end()}};
    return NIXL_SUCCESS;
}

nixl_status_t nixlAgent::prepXferDlist(const nixl_stride_dlist_t &rows, nixlDlistH *&list,
                                       const nixl_opt_args_t *) const {
    list = new nixlDlistH;
    for (const auto &row : rows)
        for (size_t i = 0; i < row.count; i++) {
            nixlBasicDesc desc = row;
            desc.addr += i * row.stride;
            list->descs.push_back(desc);
        }
    return NIXL_SUCCESS;
}

nixl_status_t nixlAgent::makeXferReq(nixl_xfer_op_t operation, const nixlDlistH &local,
                                     std::span<const int> local_indices, const nixlDlistH &remote,
                                     std::span<const int> remote_indices, nixlXferReqH *&request,
                                     const nixl_opt_args_t *) const {
    request = new nixlXferReqH{++data->requests, operation == NIXL_WRITE, false, {}, {}};
    for (int index : local_indices) request->local.push_back(local.descs.at(index));
    for (int index : remote_indices) request->remote.push_back(remote.descs.at(index));
    return NIXL_SUCCESS;
}

// Calls the other overload by its symbol while it is in the agent, as NIXL may do.
nixl_status_t nixlAgent::makeXferReq(const nixl_xfer_op_t &operation, const nixlDlistH *local,
                                     const std::vector<int> &local_indices, const nixlDlistH *remote,
                                     const std::vector<int> &remote_indices, nixlXferReqH *&request,
                                     const nixl_opt_args_t *extra) const {
    Alone alone(*data);
    return makeXferReq(operation, *local, std::span<const int>(local_indices), *remote,
                       std::span<const int>(remote_indices), request, extra);
}

nixl_status_t nixlAgent::createXferReq(const nixl_xfer_op_t &operation, const nixl_xfer_dlist_t &local,
                                       const nixl_xfer_dlist_t &remote, const std::string &agent,
                                       nixlXferReqH *&request, const nixl_opt_args_t *) const {
    Alone alone(*data);
    request = new nixlXferReqH{++data->requests, operation == NIXL_WRITE, agent == "gone",
                               {local.begin(), local.end()}, {remote.begin(), remote.end()}};
    return NIXL_SUCCESS;
}

nixl_status_t nixlAgent::postXferReq(nixlXferReqH *request, const nixl_opt_args_t *extra) const {
    Alone alone(*data);
    if (request->status == NIXL_IN_PROG) return NIXL_ERR_REPOST_ACTIVE;
    usleep(300);
    log(extra ? "post with arguments" : "post", request->number);
    if (request->is_gone) return NIXL_ERR_NOT_FOUND;
    for (size_t i = 0; i < request->local.size(); i++) {
        auto *here = reinterpret_cast<void *>(request->local[i].addr);
        auto *there = reinterpret_cast<void *>(request->remote[i].addr);
        std::memcpy(request->writes ? there : here, request->writes ? here : there, request->local[i].len);
    }
    request->questions = 0;
    return request->status = NIXL_IN_PROG;
}

nixl_status_t nixlAgent::getXferStatus(nixlXferReqH *request) const {
    Alone alone(*data);
    if (request->status == NIXL_IN_PROG && ++request->questions > 3) request->status = NIXL_SUCCESS;
    return request->status;
}

nixl_status_t nixlAgent::getXferTelemetry(const nixlXferReqH *request, nixlXferTelemetry &) const {
    return request->status;
}

nixl_status_t nixlAgent::releaseXferReq(nixlXferReqH *request) const {
    Alone alone(*data);
    log("release", request->number);
    delete request;
    return NIXL_SUCCESS;
}

nixl_status_t nixlAgent::releasedDlistH(nixlDlistH *list) const {
    delete list;
    return NIXL_SUCCESS;
}

// Takes long.
nixl_status_t nixlAgent::checkRemoteMD(const std::string name, const nixl_xfer_dlist_t &) const {
    Alone alone(*data);
    usleep(60000);
    return name == "peer" ? NIXL_SUCCESS : NIXL_ERR_NOT_FOUND;
}

// Takes long with arguments.
nixl_status_t nixlAgent::getNotifs(nixl_notifs_t &, const nixl_opt_args_t *extra) {
    Alone alone(*data);
    usleep(extra ? 60000 : 100);
    return NIXL_SUCCESS;
}
