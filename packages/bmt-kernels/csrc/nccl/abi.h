// The part of NCCL's and of the CUDA driver's binary interface that is used, declared here so that neither's headers are needed.
//
// [Note: what is stable] NCCL keeps what it has declared for as long as its library is called libnccl.so.2: numbers of types and
// operations, signatures, an id of 128 bytes. ncclConfig_t grows, and says itself how large it is and of which version: the
// library completes what an older caller does not know. The one here is that of NCCL 2.18. The driver's functions never
// change; one that had to has another name (_v2).
#pragma once

#include <climits>
#include <cstddef>

namespace bmt::nccl {

struct UniqueId {
    char bytes[128];
};

struct Config {
    std::size_t size = sizeof(Config);
    unsigned magic = 0xcafebeef;
    unsigned version = 21800;
    // Where it does not block, NCCL starts a thread for each call: 150 us instead of 25.
    int blocking = 1;
    int cga_cluster_size = INT_MIN;  // INT_MIN and nullptr: as the library thinks best
    int min_ctas = INT_MIN;
    int max_ctas = INT_MIN;
    const char* net_name = nullptr;
    int split_share = INT_MIN;
};

constexpr int oldest_version = 21800;
constexpr int newest_version = 29999;  // 2.99.99

using Comm = void*;
using Stream = void*;

enum Result : int { success = 0 };

extern "C" {

struct Api {
    Result (*get_version)(int*);
    Result (*get_unique_id)(UniqueId*);
    Result (*comm_init_rank_config)(Comm*, int, UniqueId, int, Config*);
    Result (*comm_finalize)(Comm);
    Result (*comm_destroy)(Comm);
    Result (*comm_abort)(Comm);
    Result (*comm_get_async_error)(Comm, Result*);
    const char* (*get_error_string)(Result);
    const char* (*get_last_error)(Comm);
    Result (*group_start)();
    Result (*group_end)();
    Result (*all_gather)(const void*, void*, std::size_t, int, Comm, Stream);
    Result (*reduce_scatter)(const void*, void*, std::size_t, int, int, Comm, Stream);
    Result (*all_reduce)(const void*, void*, std::size_t, int, int, Comm, Stream);
    Result (*broadcast)(const void*, void*, std::size_t, int, int, Comm, Stream);
    Result (*send)(const void*, std::size_t, int, int, Comm, Stream);
    Result (*recv)(void*, std::size_t, int, int, Comm, Stream);
};

using Event = void*;
using Context = void*;

struct Driver {
    int (*init)(unsigned);
    int (*device_get)(int*, int);
    int (*primary_context_retain)(Context*, int);
    int (*primary_context_release)(int);
    int (*context_push)(Context);
    int (*context_pop)(Context*);
    int (*event_create)(Event*, unsigned);
    int (*event_destroy)(Event);
    int (*event_query)(Event);
    int (*event_record)(Event, Stream);
    int (*stream_is_capturing)(Stream, int*);
    int (*exchange_capture_mode)(int*);
    int (*get_error_name)(int, const char**);
};
}

constexpr int element_byte = 1;  // ncclUint8
constexpr int cuda_not_ready = 600;
constexpr unsigned event_without_time = 2;
constexpr int capture_mode_relaxed = 2;

}  // namespace bmt::nccl
