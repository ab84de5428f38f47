#include "nccl/communicator.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstdio>
#include <functional>
#include <thread>

namespace bmt::nccl {
namespace {

// How long an abort waits for a thread that is inside NCCL.
constexpr Seconds patience_with_host{1.0};
constexpr auto glance = std::chrono::milliseconds(20);
constexpr std::size_t most_signatures = 4096;

// First number of a signature.
enum Kind : std::size_t {
    kind_gather,
    kind_reduce_scatter,
    kind_reduce,
    kind_broadcast,
    kind_exchange,
    kind_all_to_all
};

std::size_t number(int value) { return static_cast<std::size_t>(value); }
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

// Runs `work` in a thread of its own, because it may block until other members come and cannot be broken off. When the run fails
// first, or it takes too long, the thread is left behind: it runs `when_left` at the end.
class Attempt {
   public:
    using Work = std::function<std::string()>;  // returns what went wrong; empty if nothing did

    static std::shared_ptr<Attempt> begun(const std::shared_ptr<Core>& core, Work work,
                                          std::function<void()> when_left) {
        auto attempt = std::make_shared<Attempt>();
        std::thread([=] { attempt->run(*core, work, when_left); }).detach();
        return attempt;
    }

    // Returns whether it is over by then.
    bool is_over_by(Clock::time_point deadline, const State& state) {
        std::unique_lock lock(mutex_);
        while (!is_over_ && !state.failed() && Clock::now() < deadline) {
            over_.wait_for(lock, glance);
        }
        is_left_ = !is_over_;
        return is_over_;
    }

    std::string problem;  // once it is over

   private:
    void run(const Core& core, const Work& work, const std::function<void()>& when_left) {
        try {
            const Current current(core.device);
            std::string found = work();
            if (!is_wanted(std::move(found))) {
                when_left();
            }
        } catch (const std::exception& error) {
            (void)is_wanted(error.what());
        }
    }

    // Says that it is over, and returns whether anybody still waits for it.
    bool is_wanted(std::string found) {
        const std::lock_guard lock(mutex_);
        problem = std::move(found);
        is_over_ = true;
        over_.notify_all();
        return !is_left_;
    }

    std::mutex mutex_;
    std::condition_variable over_;
    bool is_over_ = false;
    bool is_left_ = false;
};

}  // namespace

Communicator::Communicator(std::shared_ptr<Core> core, const UniqueId& id, std::vector<int> ranks, int rank)
    : core_(std::move(core)), ranks_(std::move(ranks)), rank_(rank), idle_since_(Clock::now()) {
    core_->state.check();
    const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(core_->timeout);
    const auto comm = std::make_shared<Comm>(nullptr);
    const auto attempt = Attempt::begun(
        core_,
        [=, core = core_, size = static_cast<int>(ranks_.size())] {
            Config config;
            const Result result = core->library.api.comm_init_rank_config(comm.get(), size, id, rank, &config);
            return result == success ? std::string() : core->library.describe(result, *comm);
        },
        [=, core = core_] {
            if (*comm != nullptr) {
                core->library.api.comm_abort(*comm);
            }
        });
    if (!attempt->is_over_by(deadline, core_->state)) {
        core_->state.check();
        fail("joining " + where() + late(" could not begin"));
    }
    if (!attempt->problem.empty()) {
        fail("joining " + where() + " failed: " + attempt->problem);
    }
    comm_ = *comm;
}

void Communicator::all_gather(std::uintptr_t input, std::uintptr_t output, std::size_t bytes, std::uintptr_t stream) {
    issue({"all_gather", bytes, element_byte}, {kind_gather, bytes}, stream, [=](const Api& api, Comm comm) {
        return api.all_gather(readable(input), writable(output), bytes, element_byte, comm, writable(stream));
    });
}

void Communicator::reduce_scatter(std::uintptr_t input, std::uintptr_t output, std::size_t count, int element, int op,
                                  std::uintptr_t stream) {
    Signature signature{kind_reduce_scatter, count, number(element), number(op)};
    issue({"reduce_scatter", count, element}, std::move(signature), stream, [=](const Api& api, Comm comm) {
        return api.reduce_scatter(readable(input), writable(output), count, element, op, comm, writable(stream));
    });
}

void Communicator::all_reduce(std::uintptr_t address, std::size_t count, int element, int op, std::uintptr_t stream) {
    Signature signature{kind_reduce, count, number(element), number(op)};
    issue({"all_reduce", count, element}, std::move(signature), stream, [=](const Api& api, Comm comm) {
        return api.all_reduce(readable(address), writable(address), count, element, op, comm, writable(stream));
    });
}

void Communicator::broadcast(std::uintptr_t address, std::size_t bytes, int root, std::uintptr_t stream) {
    Signature signature{kind_broadcast, bytes, number(root)};
    issue({"broadcast", bytes, element_byte, root}, std::move(signature), stream, [=](const Api& api, Comm comm) {
        return api.broadcast(readable(address), writable(address), bytes, element_byte, root, comm, writable(stream));
    });
}

void Communicator::exchange(const std::vector<Part>& sends, const std::vector<Part>& recvs, std::uintptr_t stream) {
    if (sends.empty() && recvs.empty()) {
        return;
    }
    Call call{"exchange", 0, element_byte};
    Signature signature{kind_exchange, sends.size()};
    for (const auto* const parts : {&sends, &recvs}) {
        for (const Part& part : *parts) {
            call.count += part.bytes;
            signature.push_back(number(part.peer));
        }
    }
    if (sends.size() + recvs.size() == 1) {
        call.name = recvs.empty() ? "send" : "recv";
        call.peer = (recvs.empty() ? sends : recvs)[0].peer;
    }
    issue(call, std::move(signature), stream, [=](const Api& api, Comm comm) {
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
    const Call call{"reduce_scatter", size * bytes, element_byte};
    issue(call, {kind_all_to_all}, stream, [=](const Api& api, Comm comm) {
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
void Communicator::issue(const Call& call, Signature signature, std::uintptr_t stream, const Enqueue& enqueue) {
    core_->state.check();
    const std::lock_guard turn(turn_);
    core_->state.check();
    const bool is_known = known_.contains(signature);
    std::string problem;
    if (is_known || is_captured(writable(stream))) {
        problem = run(call, writable(stream), enqueue);
    } else {
        const auto self = shared_from_this();
        const auto attempt = Attempt::begun(core_, [=] { return self->run(call, writable(stream), enqueue); }, [] {});
        if (!attempt->is_over_by(Clock::time_point::max(), core_->state)) {
            core_->state.check();
        }
        problem = attempt->problem;
    }
    if (!problem.empty()) {
        core_->state.check();
        fail(problem);
    }
    if (!is_known) {
        if (known_.size() == most_signatures) {
            known_.clear();
        }
        known_.insert(std::move(signature));
    }
}

template <class Enqueue>
std::string Communicator::run(const Call& call, Stream stream, const Enqueue& enqueue) {
    std::string problem = run_inside(call, stream, enqueue);
    if (is_left_) {
        abort();
    }
    return problem.empty() ? problem : described(call) + " " + where() + " failed: " + problem;
}

template <class Enqueue>
std::string Communicator::run_inside(const Call& call, Stream stream, const Enqueue& enqueue) {
    const Current current(core_->device);
    const std::lock_guard lock(mutex_);
    const Comm comm = comm_;
    if (comm == nullptr) {
        return "this NCCL communicator is closed";
    }
    is_starting(call);
    const Result result = enqueue(core_->library.api, comm);
    has_started();
    return result == success ? track(call, stream) : core_->library.describe(result, comm);
}

void Communicator::is_starting(const Call& call) {
    const std::lock_guard lock(pending_mutex_);
    starting_ = Pending{nullptr, call, Clock::now()};
}

void Communicator::has_started() {
    const std::lock_guard lock(pending_mutex_);
    starting_.reset();
}

bool Communicator::is_captured(Stream stream) const {
    int is_capturing = 0;
    return core_->device.driver.stream_is_capturing(stream, &is_capturing) != 0 || is_capturing != 0;
}

std::string Communicator::track(const Call& call, Stream stream) {
    const Driver& driver = core_->device.driver;
    if (is_captured(stream)) {  // in a CUDA graph, events are nodes, which nobody can ask
        return {};
    }
    const std::lock_guard lock(pending_mutex_);
    if (unused_.empty()) {
        Event made = nullptr;
        if (const int status = driver.event_create(&made, event_without_time); status != 0) {
            return reported(status);
        }
        unused_.push_back(made);
    }
    const Event event = unused_.back();
    if (const int status = driver.event_record(event, stream); status != 0) {
        return reported(status);
    }
    unused_.pop_back();
    pending_.push_back({event, call, Clock::now()});
    return {};
}

std::string Communicator::reported(int status) const { return "the device reports " + core_->device.name_of(status); }

std::string Communicator::examine() {
    if (comm_ == nullptr) {
        return {};
    }
    const auto now = Clock::now();
    std::string call = "NCCL";
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
            call = described(oldest.call);
            if (status != cuda_not_ready) {
                return call + " " + where() + " failed: " + reported(status);
            }
            if (now - std::max(oldest.issued, idle_since_) > core_->timeout) {
                return call + " " + where() + late(" has not finished");
            }
        } else if (starting_) {
            call = described(starting_->call);
            if (now - starting_->issued > core_->timeout) {
                return call + " " + where() + late(" could not begin");
            }
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
        return call + " " + where() + " failed: " + core_->library.describe(asked != success ? asked : result, comm);
    }
    return {};
}

bool Communicator::is_idle() {
    const Driver& driver = core_->device.driver;
    const std::lock_guard lock(pending_mutex_);
    return std::all_of(pending_.begin(), pending_.end(),
                       [&](const Pending& pending) { return driver.event_query(pending.event) == 0; });
}

void Communicator::abort() {
    const Current current(core_->device);
    is_left_ = true;
    std::unique_lock lock(mutex_, std::defer_lock);
    if (!lock.try_lock_for(patience_with_host) && is_idle()) {
        return;
    }
    // Where the device hangs, whoever is inside NCCL may wait for the device: to abort under its feet is better than to hang.
    is_left_ = false;
    if (const Comm comm = taken(); comm != nullptr) {
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
