#include "nccl/communicator.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <thread>

namespace bmt::nccl {
namespace {

// How long whoever is inside NCCL may stay there before it is aborted under its feet, which is better than to hang.
constexpr Seconds patience_with_host{5.0};
constexpr auto shortest_nap = std::chrono::microseconds(20);
constexpr auto longest_nap = std::chrono::milliseconds(2);

const void* readable(std::uintptr_t address) { return reinterpret_cast<const void*>(address); }
void* writable(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

std::string amount(std::size_t count, int element) {
    constexpr std::array names{"int8",   "bytes",   "int32",   "uint32",  "int64",
                               "uint64", "float16", "float32", "float64", "bfloat16"};
    return std::to_string(count) + " " + names.at(static_cast<std::size_t>(element));
}

std::string written(Seconds seconds) {
    std::array<char, 32> text;
    std::snprintf(text.data(), text.size(), "%g s", seconds.count());
    return text.data();
}

// The results of several calls, of which the first bad one counts.
class Several {
   public:
    void add(Result result) {
        if (first_bad_ == success && result != in_progress) {
            first_bad_ = result;
        }
    }
    Result and_then(Result last) const { return first_bad_ == success ? last : first_bad_; }

   private:
    Result first_bad_ = success;
};

}  // namespace

Communicator::Communicator(std::shared_ptr<Core> core, const UniqueId& id, std::vector<int> ranks, int rank)
    : core_(std::move(core)), ranks_(std::move(ranks)), rank_(rank), idle_since_(Clock::now()) {
    core_->state.check();
    const Current current(core_->device);
    Config config;
    config.blocking = 0;  // or a member that never joins could not be given up
    Comm comm = nullptr;
    const Api& api = core_->library.api;
    const Result result = api.comm_init_rank_config(&comm, static_cast<int>(ranks_.size()), id, rank_, &config);
    try {
        fail_unless_settled(result, comm, "joining");
    } catch (...) {
        if (comm != nullptr) {
            api.comm_abort(comm);
        }
        throw;
    }
    comm_ = comm;
}

void Communicator::all_gather(std::uintptr_t input, std::uintptr_t output, std::size_t bytes, std::uintptr_t stream) {
    issue({"all_gather", bytes, element_byte}, stream, [&](const Api& api, Comm comm) {
        return api.all_gather(readable(input), writable(output), bytes, element_byte, comm, writable(stream));
    });
}

void Communicator::reduce_scatter(std::uintptr_t input, std::uintptr_t output, std::size_t count, int element, int op,
                                  std::uintptr_t stream) {
    issue({"reduce_scatter", count, element}, stream, [&](const Api& api, Comm comm) {
        return api.reduce_scatter(readable(input), writable(output), count, element, op, comm, writable(stream));
    });
}

void Communicator::all_reduce(std::uintptr_t address, std::size_t count, int element, int op, std::uintptr_t stream) {
    issue({"all_reduce", count, element}, stream, [&](const Api& api, Comm comm) {
        return api.all_reduce(readable(address), writable(address), count, element, op, comm, writable(stream));
    });
}

void Communicator::broadcast(std::uintptr_t address, std::size_t bytes, int root, std::uintptr_t stream) {
    issue({"broadcast", bytes, element_byte, root}, stream, [&](const Api& api, Comm comm) {
        return api.broadcast(readable(address), writable(address), bytes, element_byte, root, comm, writable(stream));
    });
}

void Communicator::exchange(const std::vector<Part>& sends, const std::vector<Part>& recvs, std::uintptr_t stream) {
    if (sends.empty() && recvs.empty()) {
        return;
    }
    Call call{"exchange", 0, element_byte};
    for (const auto* const parts : {&sends, &recvs}) {
        for (const Part& part : *parts) {
            call.count += part.bytes;
        }
    }
    if (sends.size() + recvs.size() == 1) {
        call.name = recvs.empty() ? "send" : "recv";
        call.peer = (recvs.empty() ? sends : recvs)[0].peer;
    }
    issue(call, stream, [&](const Api& api, Comm comm) {
        Several results;
        results.add(api.group_start());
        for (const Part& part : recvs) {
            results.add(api.recv(writable(part.address), part.bytes, element_byte, part.peer, comm, writable(stream)));
        }
        for (const Part& part : sends) {
            results.add(api.send(readable(part.address), part.bytes, element_byte, part.peer, comm, writable(stream)));
        }
        return results.and_then(api.group_end());
    });
}

void Communicator::all_to_all(std::uintptr_t input, std::uintptr_t output, std::size_t bytes, std::uintptr_t stream) {
    const std::size_t size = ranks_.size();
    issue({"reduce_scatter", size * bytes, element_byte}, stream, [&](const Api& api, Comm comm) {
        Several results;
        results.add(api.group_start());
        for (std::size_t i = 0; i < size; ++i) {
            const int peer = static_cast<int>(i);
            results.add(api.send(readable(input + i * bytes), bytes, element_byte, peer, comm, writable(stream)));
            results.add(api.recv(writable(output + i * bytes), bytes, element_byte, peer, comm, writable(stream)));
        }
        return results.and_then(api.group_end());
    });
}

template <class Enqueue>
void Communicator::issue(const Call& call, std::uintptr_t stream, const Enqueue& enqueue) {
    core_->state.check();
    const Current current(core_->device);
    const std::lock_guard lock(mutex_);
    const Comm comm = comm_;
    if (comm == nullptr) {
        core_->state.check();
        throw Failed("this NCCL communicator is closed");
    }
    const Result result = enqueue(core_->library.api, comm);
    if (result != success) {
        fail_unless_settled(result, comm, described(call));
    }
    track(call, writable(stream));
}

Result Communicator::settled(Result result, Comm comm, Clock::time_point deadline) const {
    std::chrono::microseconds nap = shortest_nap;
    while (result == in_progress && Clock::now() < deadline) {
        const Result asked = core_->library.api.comm_get_async_error(comm, &result);
        if (asked != success) {
            return asked;
        }
        if (result == in_progress) {
            if (core_->state.failed()) {
                return in_progress;
            }
            std::this_thread::sleep_for(nap);
            nap = std::min<std::chrono::microseconds>(2 * nap, longest_nap);
        }
    }
    return result;
}

void Communicator::fail_unless_settled(Result result, Comm comm, const std::string& what) {
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(core_->timeout);
    result = settled(result, comm, deadline);
    if (result == success) {
        return;
    }
    core_->state.check();
    if (result == in_progress) {
        fail(what + " " + where() + " could not begin within " + written(core_->timeout) +
             ": another rank has left, hangs, or made other calls");
    }
    fail(what + " " + where() + " failed: " + core_->library.describe(result, comm));
}

void Communicator::track(const Call& call, Stream stream) {
    const Driver& driver = core_->device.driver;
    int is_capturing = 0;
    // In a CUDA graph, events are nodes, which nobody can ask.
    if (driver.stream_is_capturing(stream, &is_capturing) != 0 || is_capturing != 0) {
        return;
    }
    const std::lock_guard lock(pending_mutex_);
    if (unused_.empty()) {
        Event made = nullptr;
        fail_unless_done(driver.event_create(&made, event_without_time), call);
        unused_.push_back(made);
    }
    const Event event = unused_.back();
    fail_unless_done(driver.event_record(event, stream), call);
    unused_.pop_back();
    pending_.push_back({event, call, Clock::now()});
}

void Communicator::fail_unless_done(int status, const Call& call) {
    if (status != 0) {
        fail(described(call) + " " + where() + " failed: the device reports " + core_->device.name_of(status));
    }
}

std::string Communicator::examine() {
    const Comm comm = comm_;
    if (comm == nullptr) {
        return {};
    }
    const auto now = Clock::now();
    {
        const std::lock_guard lock(pending_mutex_);
        int status = 0;
        while (!pending_.empty() && (status = core_->device.driver.event_query(pending_.front().event)) == 0) {
            unused_.push_back(pending_.front().event);
            pending_.pop_front();
            idle_since_ = now;
        }
        if (!pending_.empty()) {
            const Pending& oldest = pending_.front();
            if (status != cuda_not_ready) {
                return described(oldest.call) + " " + where() + " failed: the device reports " +
                       core_->device.name_of(status);
            }
            if (now - std::max(oldest.issued, idle_since_) > core_->timeout) {
                return described(oldest.call) + " " + where() + " has not finished within " + written(core_->timeout) +
                       ": another rank has left, hangs, or made other calls";
            }
        }
    }
    Result result = success;
    const Result asked = core_->library.api.comm_get_async_error(comm, &result);
    if (asked != success || (result != success && result != in_progress)) {
        return "NCCL failed " + where() + ": " + core_->library.describe(asked != success ? asked : result, comm);
    }
    return {};
}

bool Communicator::is_idle() {
    const std::lock_guard lock(pending_mutex_);
    return pending_.empty();
}

void Communicator::abort() {
    std::unique_lock lock(mutex_, std::defer_lock);
    (void)lock.try_lock_for(patience_with_host);
    if (const Comm comm = comm_.exchange(nullptr); comm != nullptr) {
        const Current current(core_->device);
        core_->library.api.comm_abort(comm);
        forget_events();
    }
}

void Communicator::finish(Clock::time_point deadline) {
    const Current current(core_->device);
    const std::lock_guard lock(mutex_);
    const Comm comm = comm_.exchange(nullptr);
    if (comm == nullptr) {
        return;
    }
    const Api& api = core_->library.api;
    if (settled(api.comm_finalize(comm), comm, deadline) == success) {
        api.comm_destroy(comm);
    } else {
        api.comm_abort(comm);
    }
    forget_events();
}

void Communicator::forget_events() {
    const std::lock_guard lock(pending_mutex_);
    for (const Pending& pending : pending_) {
        unused_.push_back(pending.event);
    }
    pending_.clear();
    for (const Event event : unused_) {
        core_->device.driver.event_destroy(event);
    }
    unused_.clear();
}

std::string Communicator::described(const Call& call) const {
    std::string text = std::string(call.name) + " of " + amount(call.count, call.element);
    if (call.peer >= 0) {
        const bool is_send = call.name[0] == 's';
        text += (is_send ? " to rank " : " from rank ") + std::to_string(ranks_[static_cast<std::size_t>(call.peer)]);
    }
    return text;
}

std::string Communicator::where() const {
    std::string members;
    for (const int member : ranks_) {
        members += (members.empty() ? "" : ", ") + std::to_string(member);
    }
    return "on rank " + std::to_string(ranks_[static_cast<std::size_t>(rank_)]) + " in the group of ranks (" + members +
           ")";
}

void Communicator::fail(const std::string& message) {
    core_->state.fail(message);
    core_->state.check();
    throw Failed(message);
}

}  // namespace bmt::nccl
