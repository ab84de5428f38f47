// The communicators of a run, and the thread that watches them.
#pragma once

#include <sys/types.h>

#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "nccl/communicator.h"

namespace bmt::nccl {

class Engine {
   public:
    // [Note: engines in forks] A fork has the engine's memory and none of its threads, for which the engine's end would wait for
    // ever, by join and in the destructors of what they wait on. So it leaves the engine where it is.
    static std::shared_ptr<Engine> made(std::shared_ptr<Core> core);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    std::shared_ptr<Communicator> communicator(const UniqueId& id, std::vector<int> ranks, int rank);
    // Waits for what is under way, then gives all communicators back; after a failure, or `patience`, aborts them and returns
    // false.
    bool close(Seconds patience);

    const std::shared_ptr<Core> core;

   private:
    explicit Engine(std::shared_ptr<Core> core);
    bool is_in_fork() const;
    void watch();
    void stop_watching();
    std::vector<std::shared_ptr<Communicator>> communicators();
    bool becomes_idle(Clock::time_point deadline);

    std::mutex mutex_;
    std::vector<std::shared_ptr<Communicator>> communicators_;
    std::condition_variable stopping_;
    bool is_stopping_ = false;
    pid_t process_;
    std::thread watcher_;
};

}  // namespace bmt::nccl
