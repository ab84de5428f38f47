// What the communicators of a run share: the libraries, and the failure that ends all of them.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "nccl/library.h"

namespace bmt::nccl {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// Communication has failed, here or on another rank, or is over. The message says all.
class Failed : public std::runtime_error {
    using std::runtime_error::runtime_error;
};

// [Note: one failure ends all] A collective that another rank does not take part in never ends, and all that waits for it does
// not either. So after the first failure every communicator is aborted, which ends what hangs on the device, with garbage
// for a result. The first thing that a rank sees of it must be the exception: every later call raises, and a program that waits for
// the device is told (`on_failure`) before it is let go.
class State {
   public:
    explicit State(std::function<void()> on_failure) : on_failure_(std::move(on_failure)) {}

    // Returns whether this was the first failure; only the first one counts.
    bool fail(const std::string& message) {
        {
            const std::lock_guard lock(mutex_);
            if (failed_ || closed_) {
                return false;
            }
            message_ = message;
            failed_ = true;
        }
        on_failure_();
        changed_.notify_all();
        return true;
    }

    void close() {
        {
            const std::lock_guard lock(mutex_);
            closed_ = true;
        }
        changed_.notify_all();
    }

    bool failed() const { return failed_; }
    bool closed() const { return closed_; }

    std::string message() const {
        const std::lock_guard lock(mutex_);
        return message_;
    }

    // Throws if there was a failure, which then has been told.
    void check() {
        if (failed_) {
            told_ = true;
            throw Failed(message());
        }
        if (closed_) {
            throw Failed("this NCCL communicator is closed: shutdown() was called");
        }
    }

    // The failure, for whom it is to be told; empty if there is none, or nobody to be told any more.
    std::string untold() {
        const bool is_due = failed_ && !closed_ && !told_.exchange(true);
        return is_due ? message() : std::string();
    }

    // Returns when there was a failure or the end, at the latest after `patience`.
    void wait(Seconds patience) {
        std::unique_lock lock(mutex_);
        changed_.wait_for(lock, patience, [this] { return failed_ || closed_; });
    }

   private:
    std::function<void()> on_failure_;
    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::string message_;
    std::atomic<bool> failed_{false};
    std::atomic<bool> closed_{false};
    std::atomic<bool> told_{false};
};

struct Core {
    Core(const Library& library_, const std::string& driver_path, int device_index, double timeout_,
         std::function<void()> on_failure)
        : library(library_), device(driver_path, device_index), timeout(timeout_), state(std::move(on_failure)) {}

    const Library library;
    const Device device;
    const Seconds timeout;
    State state;
};

}  // namespace bmt::nccl
