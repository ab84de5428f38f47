// One communicator of NCCL: starts operations on streams, and knows which of them are not finished.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "nccl/core.h"

namespace bmt::nccl {

// What an operation is called in messages.
struct Call {
    const char* name;
    std::size_t count;
    int element;  // ncclDataType_t
    int peer = -1;
};

// A part of an exchange: `bytes` at `address`, to or from member `peer`.
struct Part {
    std::uintptr_t address;
    std::size_t bytes;
    int peer;
};

// [Note: who is inside NCCL] To abort a communicator frees its memory, which a thread that is inside of NCCL with it reads on. NCCL
// connects to peers when a call first needs them, and looks for a peer that has died for a minute, between naps. So a call that may
// connect runs in a thread of its own, which the caller leaves behind when the run fails; and whoever is inside aborts the
// communicator when it comes out. Which calls may connect follows from their signature: NCCL goes the same ways for equal ones.
class Communicator : public std::enable_shared_from_this<Communicator> {
   public:
    // Returns when all members have joined. `ranks` are their ranks in the world, this process is ranks[rank].
    Communicator(std::shared_ptr<Core> core, const UniqueId& id, std::vector<int> ranks, int rank);

    void all_gather(std::uintptr_t input, std::uintptr_t output, std::size_t bytes, std::uintptr_t stream);
    void reduce_scatter(std::uintptr_t input, std::uintptr_t output, std::size_t count, int element, int op,
                        std::uintptr_t stream);
    void all_reduce(std::uintptr_t address, std::size_t count, int element, int op, std::uintptr_t stream);
    void broadcast(std::uintptr_t address, std::size_t bytes, int root, std::uintptr_t stream);
    // All sends and receives as one.
    void exchange(const std::vector<Part>& sends, const std::vector<Part>& recvs, std::uintptr_t stream);
    // Piece i of the input goes to member i, piece i of the output comes from it; `bytes` each.
    void all_to_all(std::uintptr_t input, std::uintptr_t output, std::size_t bytes, std::uintptr_t stream);

    // The rest is for the engine.

    // What has gone wrong by now; empty if nothing has.
    std::string examine();
    bool is_idle();
    // Leaves it to whoever is inside NCCL, unless the device hangs.
    void abort();
    // Gives everything back in an orderly way. Nothing may be under way.
    void finish();

   private:
    struct Pending {
        Event event;
        Call call;
        Clock::time_point issued;
    };

    using Signature = std::vector<std::size_t>;

    template <class Enqueue>
    void issue(const Call& call, Signature signature, std::uintptr_t stream, const Enqueue& enqueue);
    // The next two return what went wrong; empty if nothing did.
    template <class Enqueue>
    std::string run(const Call& call, Stream stream, const Enqueue& enqueue);
    template <class Enqueue>
    std::string run_inside(const Call& call, Stream stream, const Enqueue& enqueue);
    // `starting_` tells the watcher of a call that blocks.
    void is_starting(const Call& call);
    void has_started();
    std::string track(const Call& call, Stream stream);
    bool is_captured(Stream stream) const;
    std::string reported(int status) const;
    // From then on this communicator is closed, for everybody.
    Comm taken();
    void forget_events();
    std::string described(const Call& call) const;
    std::string where() const;
    std::string late(const char* what) const;
    [[noreturn]] void fail(const std::string& message);

    const std::shared_ptr<Core> core_;
    const std::vector<int> ranks_;
    const int rank_;
    std::mutex turn_;  // of whoever issues a call
    std::set<Signature> known_;
    std::timed_mutex mutex_;            // of whoever is inside NCCL
    std::atomic<bool> is_left_{false};  // whether to abort is left to whoever is inside NCCL
    std::atomic<Comm> comm_{nullptr};
    std::mutex life_mutex_;  // of whoever asks it from outside: nobody gives it back meanwhile
    std::mutex pending_mutex_;
    std::deque<Pending> pending_;  // oldest first
    std::optional<Pending> starting_;
    std::vector<Event> unused_;
    Clock::time_point idle_since_;  // when the operation before the oldest pending one was found finished
};

}  // namespace bmt::nccl
