// The part of NIXL's C++ interface (nixl.h of 1.0.0 to 1.5.1) that the tests use, with its mangled names and layouts.
// With -DLARGER, descriptors are those of no known release.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

enum nixl_mem_t { DRAM_SEG, VRAM_SEG, BLK_SEG, OBJ_SEG, FILE_SEG };
enum nixl_xfer_op_t { NIXL_READ, NIXL_WRITE };
enum nixl_status_t {
    NIXL_IN_PROG = 1,
    NIXL_SUCCESS = 0,
    NIXL_ERR_NOT_POSTED = -1,
    NIXL_ERR_NOT_FOUND = -4,
    NIXL_ERR_REPOST_ACTIVE = -7,
};

class nixlBasicDesc {
public:
    uintptr_t addr;
    size_t len;
    uint64_t devId;
#ifdef LARGER
    uint64_t more = 0;
#endif
};

class nixlStrideDesc : public nixlBasicDesc {
public:
    size_t stride;
    size_t count;
};

template <class T> class nixlDescList {
protected:
    nixl_mem_t type;
    std::vector<T> descs;

public:
    explicit nixlDescList(const nixl_mem_t &type) : type(type) {}
    virtual ~nixlDescList() = default;
    nixl_mem_t getType() const { return type; }
    int descCount() const { return int(descs.size()); }
    typename std::vector<T>::const_iterator begin() const { return descs.begin(); }
    typename std::vector<T>::const_iterator end() const { return descs.end(); }
    virtual void addDesc(const T &desc) { descs.push_back(desc); }
};

using nixl_xfer_dlist_t = nixlDescList<nixlBasicDesc>;
using nixl_stride_dlist_t = nixlDescList<nixlStrideDesc>;
using nixl_notifs_t = std::unordered_map<std::string, std::vector<std::string>>;

struct nixlAgentOptionalArgs {
    std::vector<void *> backends;
    std::optional<std::string> notif;
};
using nixl_opt_args_t = nixlAgentOptionalArgs;

struct nixlAgentConfig {};
struct nixlXferTelemetry {
    uint64_t totalBytes;
};
class nixlXferReqH;
class nixlDlistH;
class nixlAgentData;

class nixlAgent {
    const std::unique_ptr<nixlAgentData> data;

public:
    nixlAgent(const std::string &name, const nixlAgentConfig &config);
    ~nixlAgent();
    nixl_status_t prepXferDlist(const std::string &agent, const nixl_xfer_dlist_t &descs, nixlDlistH *&list,
                                const nixl_opt_args_t *extra = nullptr) const;
    nixl_status_t prepXferDlist(const nixl_stride_dlist_t &descs, nixlDlistH *&list,
                                const nixl_opt_args_t *extra = nullptr) const;
    nixl_status_t makeXferReq(const nixl_xfer_op_t &operation, const nixlDlistH *local,
                              const std::vector<int> &local_indices, const nixlDlistH *remote,
                              const std::vector<int> &remote_indices, nixlXferReqH *&request,
                              const nixl_opt_args_t *extra = nullptr) const;
    nixl_status_t makeXferReq(nixl_xfer_op_t operation, const nixlDlistH &local, std::span<const int> local_indices,
                              const nixlDlistH &remote, std::span<const int> remote_indices, nixlXferReqH *&request,
                              const nixl_opt_args_t *extra = nullptr) const;
    nixl_status_t createXferReq(const nixl_xfer_op_t &operation, const nixl_xfer_dlist_t &local,
                                const nixl_xfer_dlist_t &remote, const std::string &agent, nixlXferReqH *&request,
                                const nixl_opt_args_t *extra = nullptr) const;
    nixl_status_t postXferReq(nixlXferReqH *request, const nixl_opt_args_t *extra = nullptr) const;
    nixl_status_t getXferStatus(nixlXferReqH *request) const;
    nixl_status_t getXferTelemetry(const nixlXferReqH *request, nixlXferTelemetry &telemetry) const;
    nixl_status_t releaseXferReq(nixlXferReqH *request) const;
    nixl_status_t releasedDlistH(nixlDlistH *list) const;
    nixl_status_t checkRemoteMD(const std::string name, const nixl_xfer_dlist_t &descs) const;
    nixl_status_t getNotifs(nixl_notifs_t &found, const nixl_opt_args_t *extra = nullptr);
};
