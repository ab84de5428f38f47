#include "nccl/library.h"

#include <dlfcn.h>

#include <stdexcept>

namespace bmt::nccl {
namespace {

void* opened(const std::string& path, int flags) {
    void* const handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | flags);
    if (handle == nullptr) {
        const char* const reason = dlerror();
        throw CannotOpen(flags != 0 || reason == nullptr ? path + " is not loaded" : reason);
    }
    return handle;
}

template <class Function>
void find(void* handle, const std::string& path, const char* name, Function*& function) {
    void* const address = dlsym(handle, name);
    if (address == nullptr) {
        throw std::runtime_error(path + " has no function " + name);
    }
    function = reinterpret_cast<Function*>(address);
}

std::string file_of(void* address, const std::string& otherwise) {
    Dl_info found;
    return dladdr(address, &found) != 0 && found.dli_fname != nullptr ? found.dli_fname : otherwise;
}

std::string written(int version) {
    const int major = version / 10000;
    return version < 10000 ? std::to_string(version)
                           : std::to_string(major) + "." + std::to_string(version / 100 % 100) + "." +
                                 std::to_string(version % 100);
}

}  // namespace

Library::Library(const std::string& name, bool only_if_loaded) {
    void* const handle = opened(name, only_if_loaded ? RTLD_NOLOAD : 0);
    find(handle, name, "ncclGetVersion", api.get_version);
    path = file_of(reinterpret_cast<void*>(api.get_version), name);
    if (api.get_version(&version) != success || version < oldest_version || version > newest_version) {
        throw std::runtime_error(path + " is NCCL " + written(version) + ", and bmt-kernels knows NCCL from " +
                                 written(oldest_version) + " on, below 3");
    }
    find(handle, path, "ncclGetUniqueId", api.get_unique_id);
    find(handle, path, "ncclCommInitRankConfig", api.comm_init_rank_config);
    find(handle, path, "ncclCommFinalize", api.comm_finalize);
    find(handle, path, "ncclCommDestroy", api.comm_destroy);
    find(handle, path, "ncclCommAbort", api.comm_abort);
    find(handle, path, "ncclCommGetAsyncError", api.comm_get_async_error);
    find(handle, path, "ncclGetErrorString", api.get_error_string);
    find(handle, path, "ncclGetLastError", api.get_last_error);
    find(handle, path, "ncclGroupStart", api.group_start);
    find(handle, path, "ncclGroupEnd", api.group_end);
    find(handle, path, "ncclAllGather", api.all_gather);
    find(handle, path, "ncclReduceScatter", api.reduce_scatter);
    find(handle, path, "ncclAllReduce", api.all_reduce);
    find(handle, path, "ncclBroadcast", api.broadcast);
    find(handle, path, "ncclSend", api.send);
    find(handle, path, "ncclRecv", api.recv);
}

UniqueId Library::unique_id() const {
    UniqueId id{};
    const Result result = api.get_unique_id(&id);
    if (result != success) {
        throw std::runtime_error("ncclGetUniqueId failed: " + describe(result, nullptr));
    }
    return id;
}

std::string Library::describe(Result result, Comm comm) const {
    const char* const kind = api.get_error_string(result);
    const char* const details = api.get_last_error(comm);
    std::string text = kind == nullptr ? "error " + std::to_string(result) : kind;
    if (details != nullptr && *details != '\0') {
        text += std::string(" (") + details + ")";
    }
    return text;
}

Device::Device(const std::string& driver_path, int index) {
    void* const handle = opened(driver_path, 0);
    find(handle, driver_path, "cuInit", driver.init);
    find(handle, driver_path, "cuDeviceGet", driver.device_get);
    find(handle, driver_path, "cuDevicePrimaryCtxRetain", driver.primary_context_retain);
    find(handle, driver_path, "cuDevicePrimaryCtxRelease_v2", driver.primary_context_release);
    find(handle, driver_path, "cuCtxPushCurrent_v2", driver.context_push);
    find(handle, driver_path, "cuCtxPopCurrent_v2", driver.context_pop);
    find(handle, driver_path, "cuEventCreate", driver.event_create);
    find(handle, driver_path, "cuEventDestroy_v2", driver.event_destroy);
    find(handle, driver_path, "cuEventQuery", driver.event_query);
    find(handle, driver_path, "cuEventRecord", driver.event_record);
    find(handle, driver_path, "cuStreamIsCapturing", driver.stream_is_capturing);
    find(handle, driver_path, "cuThreadExchangeStreamCaptureMode", driver.exchange_capture_mode);
    find(handle, driver_path, "cuGetErrorName", driver.get_error_name);
    check(driver.init(0), "cuInit");
    check(driver.device_get(&device_, index), "cuDeviceGet");
    check(driver.primary_context_retain(&context, device_), "cuDevicePrimaryCtxRetain");
}

Device::~Device() { driver.primary_context_release(device_); }

void Device::check(int status, const char* what) const {
    if (status != 0) {
        throw std::runtime_error(std::string(what) + " failed: " + name_of(status));
    }
}

std::string Device::name_of(int status) const {
    const char* name = nullptr;
    driver.get_error_name(status, &name);
    return name == nullptr ? std::to_string(status) : name;
}

}  // namespace bmt::nccl
