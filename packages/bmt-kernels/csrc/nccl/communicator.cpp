#include "nccl/communicator.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdio>
#include <thread>

namespace bmt::nccl {
namespace {

// How long whoever is inside NCCL may stay there before it is aborted under its feet, which is better than to hang.
constexpr Seconds patience_with_host{1.0};
constexpr auto glance = std::chrono::milliseconds(20);

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
    void add(Result result) { first_bad_ = first_bad_ == success ? result : first_bad_; }
    Result and_then(Result last) const { return first_bad_ == success ? last : first_bad_; }

   private:
    Result first_bad_ = success;
};

// Joining blocks until all members have come, and cannot be broken off. So a thread of its own does it, which is left behind when
// it takes too long, and aborts what it gets if it ever gets it.
class Joining {
   public:
    static std::shared_ptr<Joining> begun(const std::shared_ptr<Core>& core, const UniqueId& id, int size, int rank) {
        auto joining = std::make_shared<Joining>();
        std::thread([=] { joining->run(*core, id, size, rank); }).detach();
        return joining;
    }

    // Returns whether it is over by then, or when the run fails.
    bool is_over_by(Clock::time_point deadline, const State& state) {
        std::unique_lock lock(mutex_);
        while (!is_over_ && !state.failed() && Clock::now() < deadline) {
            over_.wait_for(lock, glance);
        }
        is_given_up_ = !is_over_;
        return is_over_;
    }

    Result result = success;
    Comm comm = nullptr;
    std::string problem;  // what went wrong before NCCL was asked

   private:
    void run(const Core& core, const UniqueId& id, int size, int rank) {
        try {
            const Current current(core.device);
            Config config;
            result = core.library.api.comm_init_rank_config(&comm, size, id, rank, &config);
            if (!is_wanted() && comm != nullptr) {
                core.library.api.comm_abort(comm);
            }
        } catch (const std::exception& error) {
            problem = error.what();
            (void)is_wanted();
        }
    }

    // Says that it is over, and returns whether anybody still waits for it.
    bool is_wanted() {
        const std::lock_guard lock(mutex_);
        is_over_ = true;
        over_.notify_all();
        return !is_given_up_;
    }

    std::mutex mutex_;
    std::condition_variable over_;
    bool is_over_ = false;
    bool is_given_up_ = false;
};

}  // namespace

Communicator::Communicator(std::shared_ptr<Core> core, const UniqueId& id, std::vector<int> ranks, int rank)
    : core_(std::move(core)), ranks_(std::move(ranks)), rank_(rank), idle_since_(Clock::now()) {
    core_->state.check();
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(core_->timeout);
    const auto joining = Joining::begun(core_, id, static_cast<int>(ranks_.size()), rank_);
    if (!joining->is_over_by(deadline, core_->state)) {
        core_->state.check();
        fail("joining " + where() + late(" could not begin"));
    }
    if (!joining->problem.empty() || joining->result != success) {
        const bool was_asked = joining->problem.empty();
        fail("joining " + where() +
             " failed: " + (was_asked ? core_->library.describe(joining->result, joining->comm) : joining->problem));
    }
    comm_ = joining->comm;
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
    is_starting(call);
    const Result result = enqueue(core_->library.api, comm);
    has_started();
    if (result != success) {
        core_->state.check();
        fail(described(call) + " " + where() + " failed: " + core_->library.describe(result, comm));
    }
    track(call, writable(stream));
}

void Communicator::is_starting(const Call& call) {
    const std::lock_guard lock(pending_mutex_);
    starting_ = Pending{nullptr, call, Clock::now()};
}

void Communicator::has_started() {
    const std::lock_guard lock(pending_mutex_);
    starting_.reset();
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
    if (comm_ == nullptr) {
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
                return described(oldest.call) + " " + where() + late(" has not finished");
            }
        } else if (starting_ && now - starting_->issued > core_->timeout) {
            return described(starting_->call) + " " + where() + late(" could not begin");
        }
    }
    const std::lock_guard lock(life_mutex_);
    const Comm comm = comm_;
    if (comm == nullptr) {
        return {};
    }
    Result result = success;
    const Result asked = core_->library.api.comm_get_async_error(comm, &result);
    if (asked != success || result != success) {
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
    if (const Comm comm = taken(); comm != nullptr) {
        const Current current(core_->device);
        core_->library.api.comm_abort(comm);
        forget_events();
    }
}

void Communicator::finish() {
    const Current current(core_->device);
    const std::lock_guard lock(mutex_);
    const Comm comm = taken();
    if (comm == nullptr) {
        return;
    }
    const Api& api = core_->library.api;
    if (api.comm_finalize(comm) == success) {
        api.comm_destroy(comm);
    } else {
        api.comm_abort(comm);
    }
    forget_events();
}

Comm Communicator::taken() {
    const std::lock_guard lock(life_mutex_);
    return comm_.exchange(nullptr);
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

std::string Communicator::late(const char* what) const {
    return what + (" within " + written(core_->timeout)) + ": another rank has left, hangs, or made other calls";
}

void Communicator::fail(const std::string& message) {
    core_->state.fail(message);
    core_->state.check();
    throw Failed(message);
}

}  // namespace bmt::nccl
