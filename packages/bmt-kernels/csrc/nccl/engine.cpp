#include "nccl/engine.h"

#include <unistd.h>

#include <algorithm>
#include <functional>
#include <future>
#include <optional>

namespace bmt::nccl {
namespace {

// How late a failure may be noticed, beyond its timeout.
constexpr auto period = std::chrono::milliseconds(50);
constexpr auto nap = std::chrono::milliseconds(1);
constexpr auto patience_with_abort = std::chrono::seconds(20);

// Runs the tasks side by side: to give back one communicator may take until another one is aborted, because it frees memory of
// the device, for which the device must be idle. A thread that is not done by the deadline is left behind.
void run_all(const std::vector<std::function<void()>>& tasks, Clock::time_point deadline) {
    std::vector<std::future<void>> futures;
    for (const auto& task : tasks) {
        std::packaged_task<void()> packaged(task);
        futures.push_back(packaged.get_future());
        std::thread(std::move(packaged)).detach();
    }
    for (const auto& future : futures) {
        future.wait_until(deadline);
    }
}

Clock::time_point after(Seconds seconds) { return Clock::now() + std::chrono::duration_cast<Clock::duration>(seconds); }

}  // namespace

Engine::Engine(std::shared_ptr<Core> core_)
    : core(std::move(core_)), process_(getpid()), watcher_([this] { watch(); }) {}

std::shared_ptr<Engine> Engine::made(std::shared_ptr<Core> core) {
    return {new Engine(std::move(core)), [](Engine* engine) {
                if (!engine->is_in_fork()) {
                    delete engine;
                }
            }};
}

bool Engine::is_in_fork() const { return getpid() != process_; }

Engine::~Engine() {
    core->state.close();
    stop_watching();
}

std::shared_ptr<Communicator> Engine::communicator(const UniqueId& id, std::vector<int> ranks, int rank) {
    auto made = std::make_shared<Communicator>(core, id, std::move(ranks), rank);
    const std::lock_guard lock(mutex_);
    communicators_.push_back(made);
    return made;
}

bool Engine::close(Seconds patience) {
    if (is_in_fork()) {
        return true;
    }
    const auto deadline = after(patience);
    const bool is_idle = becomes_idle(deadline);
    core->state.close();
    stop_watching();
    std::vector<std::function<void()>> tasks;
    for (const auto& communicator : communicators()) {
        tasks.emplace_back([communicator, is_idle] {
            if (is_idle) {
                communicator->finish();
            } else {
                communicator->abort();
            }
        });
    }
    run_all(tasks, (is_idle ? std::max(deadline, Clock::now()) : Clock::now()) + patience_with_abort);
    const std::lock_guard lock(mutex_);
    communicators_.clear();
    return is_idle;
}

bool Engine::becomes_idle(Clock::time_point deadline) {
    const Current current(core->device);
    while (!core->state.failed()) {
        bool is_idle = true;
        for (const auto& communicator : communicators()) {
            is_idle = communicator->examine().empty() && communicator->is_idle() && is_idle;
        }
        if (is_idle || Clock::now() >= deadline) {
            return is_idle && !core->state.failed();
        }
        std::this_thread::sleep_for(nap);
    }
    return false;
}

void Engine::watch() {
    // What is asked here must not break the capture of a CUDA graph elsewhere.
    int mode = capture_mode_relaxed;
    core->device.driver.exchange_capture_mode(&mode);
    std::optional<Current> current;
    try {
        current.emplace(core->device);
    } catch (const std::exception& error) {
        core->state.fail(std::string("NCCL cannot be watched: ") + error.what());
    }
    std::unique_lock lock(mutex_);
    while (!core->state.failed() && !is_stopping_) {
        lock.unlock();
        for (const auto& communicator : communicators()) {
            if (const std::string problem = communicator->examine(); !problem.empty()) {
                core->state.fail(problem);
            }
        }
        lock.lock();
        if (!core->state.failed() && !is_stopping_) {
            stopping_.wait_for(lock, period);
        }
    }
    lock.unlock();
    if (core->state.failed()) {
        std::vector<std::function<void()>> tasks;
        for (const auto& communicator : communicators()) {
            tasks.emplace_back([communicator] { communicator->abort(); });
        }
        run_all(tasks, Clock::now() + patience_with_abort);
    }
}

void Engine::stop_watching() {
    {
        const std::lock_guard lock(mutex_);
        is_stopping_ = true;
    }
    stopping_.notify_all();
    if (watcher_.joinable()) {
        watcher_.join();
    }
}

std::vector<std::shared_ptr<Communicator>> Engine::communicators() {
    const std::lock_guard lock(mutex_);
    return communicators_;
}

}  // namespace bmt::nccl
